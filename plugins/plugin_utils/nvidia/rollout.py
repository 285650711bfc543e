# SPDX-License-Identifier: Apache-2.0
"""Which nodes get their driver one after the other: those that serve while it changes."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from .errors import StackError
from .notes import dicts, mapping


def changes(facts: Mapping[str, Any], stack: Mapping[str, Any]) -> list[str]:
    """What the transaction would do to packages of the driver and of what is coupled with it, in words."""
    there = {
        str(package.get("name")): str(package.get("version") or "")
        for package in dicts(facts, "packages")
        if str(package.get("state") or "ii")[1:2] == "i"
    }
    packages, transaction = mapping(stack, "packages"), mapping(stack, "transaction")
    ours = {str(name) for part in ("driver", "fabric", "tools") for name in packages.get(part) or ()}
    found = []
    for entry in dicts(transaction, "install"):
        name, wanted = str(entry.get("name")), str(entry.get("version") or "*")
        if name not in ours:
            continue
        if name not in there:
            found.append(f"{name} is to be installed")
        elif not fnmatchcase(there[name].rpartition(":")[2], wanted):
            found.append(f"{name} {there[name]} is to become {wanted}")
    return found + [f"{name} is to be removed" for name in transaction.get("remove") or () if name in there]


def in_turn(facts: Any, stack: Any) -> list[str]:
    """Why this node waits for its turn: it serves, and its driver changes. Empty: all such nodes at once."""
    for name, value in (("facts", facts), ("stack", stack)):
        if not isinstance(value, Mapping):
            raise StackError(f"the {name} are {type(value).__name__}, a dictionary is needed")
    units = facts.get("serving")
    told = changes(facts, stack) if stack.get("needed") else []
    if not told or units == []:
        return []
    # Facts that do not tell leave open whether the node serves.
    return [f"{', '.join(map(str, units)) if units else 'what it serves is unknown'}: {'; '.join(told)}"]
