"""What is wrong with one variable of firewall or ssh by itself, told with the inventory.

Their roles run on hosts that others have changed already. What takes several variables, or the plan, is left to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..inventory.validate import Problem
from . import firewall, ssh

# Prefix, variables that have a rule of their own, what has to be on for it, and the rules.
_CHECKS: tuple[tuple[str, tuple[str, ...], dict[str, Any], Callable[[Mapping[str, Any]], list[str]]], ...] = (
    (
        "firewall_",
        (
            "admin_networks",
            "client_networks",
            "monitoring_networks",
            "trusted_interfaces",
            "ephemeral_ports",
            "ssh_ports",
            "extra",
        ),
        {"mode": "strict_ports"},
        firewall.check,
    ),
    (
        "ssh_",
        ("settings", "allow_users", "authorized_keys", "host_key_fingerprint", "between_nodes_user"),
        {"between_nodes": True},
        ssh.check,
    ),
)
_LINE = re.compile(r"(?s)(?P<variable>[^\s:]+)(?: = (?P<value>.*?))??: (?P<problem>.*?) -> (?P<remedy>.*)")


def problems(values: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    found: list[Problem] = []
    for host, own in values.items():
        for prefix, names, needed, check in _CHECKS:
            for name in names:
                variable = f"{prefix}{name}"
                if own.get(variable) is not None:
                    lines = check({**needed, name: own[variable]})
                    found += [_problem(host, line) for line in lines if line.startswith(variable)]
    return found


def _problem(host: str, line: str) -> Problem:
    # Without a plan there is no host to name.
    parts = _LINE.fullmatch(line.replace(" (): ", ": ", 1))
    if parts is None:
        return Problem(host, line.partition(" ")[0], "(hidden)", line, "correct it")
    # Where a line shows no value, there is none, or it is a secret.
    value = parts["value"] or ("(not set)" if parts["problem"] == "is missing" else "(hidden)")
    return Problem(host, parts["variable"], value, parts["problem"], parts["remedy"])
