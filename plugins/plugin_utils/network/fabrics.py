"""Whether what the nodes of one inventory say of their fabric is right, and fits together. Needs no connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..hosts import fabric
from ..inventory.validate import Problem, show

# The variables of the role fabric, with their defaults there.
DEFAULTS: dict[str, Any] = {
    "fabric_type": "auto",
    "fabric_hcas": [],
    "fabric_rails": "shared",
    **{name: default for name, (_, default, _) in fabric.NUMBERS.items()},
    "fabric_environment": {},
}
# What both ends of a connection have to agree on.
COMMON = ("fabric_type", "fabric_rails", *fabric.NUMBERS)


def problems(values: Mapping[str, Mapping[str, Any]], engines: Iterable[tuple[str, Sequence[str]]]) -> list[Problem]:
    """What is wrong; `engines` are the names of instances with the nodes of each of their replicas."""
    found: list[Problem] = []
    spread = [(name, nodes) for name, nodes in engines if len(nodes) > 1]
    for host, own in values.items():
        setting = _of(own)
        try:
            fabric.check(
                setting["fabric_type"],
                setting["fabric_hcas"],
                setting["fabric_environment"],
                setting["fabric_rails"],
                {name: setting[name] for name in fabric.NUMBERS},
            )
        except fabric.FabricError as error:
            found.append(Problem(host, error.variable, str(error.value), error.problem, error.remedy))
    for name, nodes in spread:
        found += _disagreements(name, {host: _of(values[host]) for host in nodes})
    return found


def _of(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: default if own.get(name) is None else own[name] for name, default in DEFAULTS.items()}


def _disagreements(name: str, settings: Mapping[str, Mapping[str, Any]]) -> Iterable[Problem]:
    first, *others = settings
    for host, setting in settings.items():
        if setting["fabric_type"] == "nvlink":
            yield Problem(
                host,
                "fabric_type",
                "nvlink",
                f"is for engines that never leave their node, but {name} spans {', '.join(settings)}",
                "set what joins these nodes: infiniband, roce or tcp",
            )
            return
    for host in others:
        for variable in COMMON:
            mine, theirs = settings[host][variable], settings[first][variable]
            if mine != theirs:
                yield Problem(
                    host,
                    variable,
                    show(mine, variable),
                    f"differs from {first} ({show(theirs, variable)}), where {name} has ranks too",
                    f"set {variable} alike on {', '.join(settings)}, in a group that they share",
                )
        mine, theirs = settings[host]["fabric_hcas"], settings[first]["fabric_hcas"]
        isolated = settings[host]["fabric_rails"] == settings[first]["fabric_rails"] == "isolated"
        if isolated and mine and theirs and len(mine) != len(theirs):
            yield Problem(
                host,
                "fabric_hcas",
                show(mine, "fabric_hcas"),
                f"{len(mine)} rails, but {first}, where {name} has ranks too, has {len(theirs)}",
                "list as many devices on each of these nodes: nothing joins the rails",
            )
