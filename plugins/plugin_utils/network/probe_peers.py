"""Who tries what at whom: peers of each node, pinned ports that a node holds, pairs whose speed is measured.

The ports come from the rules of the firewall, so that the preflight proves what the firewall promises, and nothing that
nobody needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..planner.plan import natural_key
from . import bandwidth, firewall

# Up to so many nodes, the speed between all pairs is measured; beyond it each node measures some, see `rotation`.
_ALL_PAIRS = 8


def members(plan: Mapping[str, Any]) -> list[str]:
    """The nodes that run something, in their order: those that have to reach each other."""
    return sorted(
        (name for name, node in plan["nodes"].items() if "ironrack_runtime" in node["groups"]), key=natural_key
    )


def admitted(plan: Mapping[str, Any], host: str, values: Mapping[str, Any]) -> list[tuple[set[str], list[int], str]]:
    """Addresses that a host lets in at ports that are pinned, the ports (of a range: both ends), and what for."""
    address = plan["nodes"][host].get("address")
    if not address:
        return []
    found = firewall.rules(
        plan, host, {}, {}, interface="any", settings={"mode": "strict_ports"}, ports=values
    )  # whatever the mode: an open firewall has to let in what a strict one does
    return [
        (set(rule["networks"]), sorted({port for pair in rule["ports"] for port in pair}), str(rule["purpose"]))
        for rule in found["rules"]
        if rule["source"] in ("ray", "engines") and rule["protocol"] == "tcp"
    ]


def listener_ports(plan: Mapping[str, Any], host: str, ports: Mapping[str, Any] | None = None) -> list[int]:
    """The pinned ports that other nodes have to reach at this one."""
    own = {plan["nodes"][host].get("address")}
    return sorted(
        {port for sources, listed, _ in admitted(plan, host, ports or {}) if sources - own for port in listed}
    )


def purposes(plan: Mapping[str, Any], host: str, ports: Mapping[str, Any] | None = None) -> dict[int, str]:
    """What each pinned port of a host is for."""
    return {port: purpose for _, listed, purpose in admitted(plan, host, ports or {}) for port in listed}


def rotation(names: Sequence[str], name: str) -> list[str]:
    """Whom a node measures its speed to: all others of a few; of many those 1, 2, 4, 8 ... places on.

    Every node is then as often one end as the other, and the time grows with the logarithm of the number of nodes.
    """
    place, count = names.index(name), len(names)
    steps: Iterable[int] = range(1, count) if count <= _ALL_PAIRS else (2**power for power in range(count.bit_length()))
    return [names[(place + step) % count] for step in steps if step < count]


def peers(
    plan: Mapping[str, Any],
    listeners: Mapping[str, Mapping[str, Any] | None],
    ports: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """For each node: `peers` of the module net_probe, `pairs` whose speed it measures, `ring` for gloo_check,
    `nccl` for nccl_check.

    In the ring each node begins with the next one, at one of its own random ports: the listener has had it, and gives
    it back before.
    """
    names = [name for name in members(plan) if plan["nodes"][name].get("address")]
    lets_in = {name: admitted(plan, name, ports or {}) for name in names if listeners.get(name)}
    present = [name for name in names if listeners.get(name)]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        address = plan["nodes"][name]["address"]
        others: dict[str, Any] = {}
        for other in names:
            if other == name:
                continue
            listener = listeners.get(other) or None
            answering = {*listener["held"], *listener["busy"]} if listener else set()
            allowed = {port for sources, listed, _ in lets_in.get(other, ()) if address in sources for port in listed}
            others[other] = {
                "address": plan["nodes"][other]["address"],
                "listener": listener,
                "ports": sorted(allowed & answering),
            }
        found[name] = {"peers": others, "pairs": rotation(present, name) if name in present else [], "ring": {}}
    if len(present) > 1:
        for name, following in zip(present, [*present[1:], present[0]], strict=True):
            meeting = {"address": plan["nodes"][name]["address"], "port": (listeners[name] or {})["random"][0]}
            found[name]["ring"]["next"] = {"name": following, **meeting}
            found[following]["ring"]["previous"] = {"name": name, **meeting}
    exchanges = bandwidth.meetings(plan, {name: listeners.get(name) for name in names})
    for name in names:
        found[name]["nccl"] = exchanges[name]
    return found
