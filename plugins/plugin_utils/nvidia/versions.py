# SPDX-License-Identifier: Apache-2.0
"""Versions of drivers (580.159.04) and of CUDA (13.0)."""

from __future__ import annotations

import re

DRIVER = re.compile(r"([1-9][0-9]{2})\.([0-9]{2,3})(?:\.([0-9]{2,3}))?")
CUDA = re.compile(r"([1-9][0-9])\.(0|[1-9][0-9]?)")


def driver_key(text: str) -> tuple[int, ...] | None:
    """A sort key of a driver's version as NVIDIA numbers it, without a package's suffix; None for anything else."""
    found = DRIVER.fullmatch(text)
    return tuple(int(part) for part in found.groups() if part is not None) if found else None


def branch_of(text: str) -> int | None:
    """580.159.04 -> 580"""
    key = driver_key(text)
    return key[0] if key else None


def upstream(text: str) -> str:
    """580.159.04 of a package's version such as 1:580.159.04-1ubuntu1."""
    found = re.match(r"(?:\d+:)?(\d[\d.]*)", text)
    return found.group(1).rstrip(".") if found else text


def cuda_parts(text: str) -> tuple[int, int] | None:
    """13.0 -> (13, 0); None for anything else."""
    found = CUDA.fullmatch(text)
    return (int(found.group(1)), int(found.group(2))) if found else None
