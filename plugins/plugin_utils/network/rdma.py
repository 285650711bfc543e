"""Whose RDMA adapters write to whose, rail by rail, and what the words of perftest mean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..hosts import fabric
from ..hosts.errors import HostError
from .bandwidth import Cause
from .probe_peers import members, rotation

# perftest leaves a second out at either end.
LEAST_SECONDS = 4
# Of one measurement, around the seconds that it lasts: connecting, and a packet that is lost for good.
_AROUND_SECONDS = 8
_LEAST_TIMEOUT = 60
# What the module waits for others, and some more for Ansible.
_GRACE_SECONDS = 180

UNANSWERED = Cause(
    r"status 12\b|status 13\b|syndrom 0x81|status 5\b",
    "the other adapter never answers: the rail's cable is in another rail's switch, no route between the two ports,"
    " MTUs that differ, or a fabric that drops (with RoCE: PFC, ECN)",
    "compare the port of the switch with the plan of the cables (ibnetdiscover or lldpctl); with RoCE ping -I with"
    " large packets, then PFC and ECN on the switch",
)
# Words are perftest's own (src/*.c), status numbers those of verbs (enum ibv_wc_status). What a node says of itself
# comes first: whom it meets has no part in it.
OWN = (
    Cause(
        r"there is no \S+:\d+|Did not detect devices|Unable to find the Infiniband|IB device \S+ not found",
        "the adapter is gone: its driver is not loaded, or it fell off the bus",
        "look at lspci and dmesg on that node, and at rdma link; correct fabric_hcas where the device has another name",
    ),
    Cause(
        r"is not active \(|state is (Down|Initialize|Armed|Unknown|No state)|Couldn't set the link layer",
        "the port's link is not up: cable, transceiver, switch port, or, with InfiniBand, no subnet manager",
        "look at ibstat (State, Physical state) and the switch; Initializing means that no subnet manager runs",
    ),
    Cause(
        r"allocate MR|create MR|create mr|ibv_reg_mr|Cannot allocate memory|Couldn't create IB resources",
        "memory cannot be registered for RDMA: the limit of locked memory is too low",
        "see memlock: in a container raise its limit, on a host DefaultLimitMEMLOCK=infinity in systemd's system.conf",
    ),
)
# The first that fits counts.
CAUSES = (
    *OWN,
    Cause(
        r"Incompatibility issue with GID|GID types",
        "the two ends took addresses (GIDs) of different RoCE versions",
        "compare show_gids on both nodes: each RoCE interface needs an address of the same family, and with it a GID of"
        " RoCE v2; leave NCCL_IB_GID_INDEX unset",
    ),
    Cause(
        r"set up socket connection|gid.*(not found|No such|query)|ibv_query_gid",
        "the address index (GID) does not exist on that adapter",
        "leave NCCL_IB_GID_INDEX out of fabric_environment; give the RoCE interface an address, then compare show_gids",
    ),
    Cause(
        r"modify QP|ibv_modify_qp|Unable to Connect the HCA",
        "the adapter refuses the other one's address: with RoCE no route or no neighbour for it, or a GID of the wrong"
        " version; with InfiniBand no path from the subnet manager",
        "with RoCE: ip addr on both interfaces, ping -I from one to the other, show_gids; with InfiniBand: saquery and"
        " the subnet manager's log",
    ),
    UNANSWERED,
    Cause(
        r"status (1|2|4|9|10|11)\b",
        "an adapter refuses the data: MTUs that differ, or firmware that does not fit",
        "compare active_mtu and fw_ver (ibv_devinfo) on both nodes",
    ),
    Cause(
        r"Couldn't (connect to|listen)|Unable to init the socket|Problem in resolving|gave no port|does not listen",
        "the two ends do not meet over TCP on a random port",
        "see net_connect and net_ports_random",
    ),
    Cause(
        r"[Uu]nrecognized option|[Ii]nvalid (option|command)|Parser function exited|2\*MARGIN",
        "this version of perftest does not know an argument",
        "install perftest of the distribution, or a newer one, on all nodes alike",
    ),
    Cause(
        r"no end in time|went away|[Cc]ouldn't read|Unable to read|Failed to exchange",
        "the other end stopped in the middle: see what it says of the same rail",
        "read /run/ironrack/rdma on both nodes; a fabric that drops everything looks like that too",
    ),
)


def explain(words: str) -> tuple[str, str]:
    """Cause and remedy of what was said."""
    for entry in CAUSES:
        if re.search(entry.words, words):
            return entry.cause, entry.remedy
    return "perftest's own words are the best there is", "read its whole output in /run/ironrack/rdma on these nodes"


# --- who with whom ---------------------------------------------------------------------------------------------------


def rails(host: str, kind: str, hcas: Sequence[str], facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The ports that carry the engines' traffic, in their order; HostError where there are none."""
    if not facts:
        raise HostError(f"nothing is known about the RDMA devices of {host}")
    return [port for _, port in fabric.used_ports(host, kind, hcas, facts)]


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Whom to measure with whom: all of a few nodes, of many each with some, as for the speed of TCP.

    In the order of a tournament, so that those next to each other have no node in common.
    """
    wanted = {frozenset((name, other)) for name in names for other in rotation(names, name)}
    seats: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found: list[tuple[str, str]] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        for one, other in zip(seats[:half], reversed(seats[half:]), strict=True):
            if one is not None and other is not None and frozenset((one, other)) in wanted:
                found.append((one, other))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def rounds(wanted: Iterable[tuple[str, str]]) -> list[tuple[int, tuple[str, str]]]:
    """Each pair with the first round, from 1, in which neither of its nodes has another."""
    taken: dict[str, set[int]] = {}
    found = []
    for pair in wanted:
        busy = taken.setdefault(pair[0], set()) | taken.setdefault(pair[1], set())
        number = next(number for number in itertools.count(1) if number not in busy)
        for name in pair:
            taken[name].add(number)
        found.append((number, pair))
    return sorted(found)


def meetings(
    plan: Mapping[str, Any],
    listeners: Mapping[str, Mapping[str, Any] | None],
    facts: Mapping[str, Mapping[str, Any] | None],
    types: Mapping[str, str],
    hcas: Mapping[str, Sequence[str]],
    *,
    seconds: float = LEAST_SECONDS,
    fraction: float = 0.9,
) -> dict[str, dict[str, Any]]:
    """For each node `meetings`, `seconds` and `timeout` of the module rdma_check, `limit` for the whole of it, the
    `rate` in Gbit/s of each rail, and `why` nothing is measured there.

    `types` and `hcas` are fabric_type and fabric_hcas of each node.
    """
    own: dict[str, list[Mapping[str, Any]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in members(plan):
        kind = str(types.get(name) or "auto")
        found[name] = {"type": kind, "why": None, "meetings": [], "rate": []}
        if kind not in fabric.LINK_LAYERS:
            continue
        try:
            ports = rails(name, kind, hcas.get(name) or [], facts.get(name) or {})
        except HostError as error:
            found[name]["why"] = str(error)
            continue
        found[name]["rate"] = [port.get("rate_gbit") for port in ports]
        if listeners.get(name) and plan["nodes"][name].get("address"):
            own[name] = ports
    lasts = max(LEAST_SECONDS, round(seconds))
    wanted = [
        pair for kind in fabric.LINK_LAYERS for pair in pairs([name for name in own if found[name]["type"] == kind])
    ]
    timeout, last = _LEAST_TIMEOUT, 0
    for number, (first, second) in rounds(wanted):
        together = [
            {
                "rail": place,
                "devices": [one["device"], other["device"]],
                "ports": [one["port"], other["port"]],
                "wanted_gbit": fraction * min(one.get("rate_gbit") or 0, other.get("rate_gbit") or 0),
            }
            for place, (one, other) in enumerate(zip(own[first], own[second], strict=False))
        ]
        meeting = {
            "nodes": [first, second],
            "addresses": [plan["nodes"][name]["address"] for name in (first, second)],
            # The listener has had it, and gives it back before. The first one is gloo_check's, the last nccl_check's.
            "port": (listeners[first] or {})["random"][1],
            "round": number,
            "rails": together,
        }
        # Both ways: all rails, and each alone.
        timeout = max(timeout, 2 * (1 + len(together)) * (lasts + _AROUND_SECONDS))
        last = max(last, number)
        for name in (first, second):
            found[name]["meetings"].append(meeting)
    for told in found.values():
        told |= {"seconds": lasts, "timeout": timeout, "limit": _GRACE_SECONDS + (last + 1) * timeout}
    return found
