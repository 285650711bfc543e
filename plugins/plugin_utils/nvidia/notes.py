# SPDX-License-Identifier: Apache-2.0
"""What is told beside the answer, and how facts are read: whatever they are, reading them does not fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import matrix
from .gpus import Hardware
from .request import Problem


@dataclass
class Notes:
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, variable: str, value: Any, message: str, remedy: str) -> None:
        self.problems.append(Problem(variable, value, message, remedy))


@dataclass(frozen=True)
class Chosen:
    """What the parts of the answer are made from."""

    facts: Mapping[str, Any]
    values: Mapping[str, Any]
    distribution: matrix.Distribution
    hardware: Hardware
    branch: int
    flavour: str
    names: matrix.Names
    kept: str | None = None  # the installed version that stays

    @property
    def source(self) -> str:
        return str(self.values["nvidia_driver_source"])


def mapping(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = facts.get(key)
    return value if isinstance(value, Mapping) else {}


def dicts(facts: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = facts.get(key)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]
