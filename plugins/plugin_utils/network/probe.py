"""The verdict on the network: what the module net_probe measured on each node, judged pair by pair and as a whole.

A fault is one finding, however many pairs show it, with the pairs, what was measured, the likely cause and the remedy.
Nothing here connects to a host or changes one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..hosts.judging import ORDER
from . import probe_fabric, probe_shape
from . import probe_text as text
from .probe_groups import Group, Pair, by_value, grouped, joined, ordered, shown
from .probe_peers import members, purposes

Probe = Mapping[str, Any]

# Each check with the reports of docs/failure-checks.md that it would have caught.
CHECKS: dict[str, tuple[str, ...]] = {
    "net_probed": (),
    "net_interface": ("A1", "A7"),
    "net_family": ("H1", "H2", "H4"),
    "net_connect": ("C2", "C3", "C4", "C5", "C9"),
    "net_partition": ("A10", "C9"),
    "net_ports_random": ("C1", "C2", "C3", "C4", "C8"),
    "net_ports_pinned": ("C9",),
    "net_identity": ("A1",),
    "net_duplicate_address": ("A1",),
    "net_names": ("A2", "A7", "H1"),
    "net_own_name": ("A8", "A16", "A17"),
    "net_default_route": ("A3", "A7"),
    "net_route": ("A1", "A7"),
    "net_mtu_path": ("F19", "F20"),
    "net_mtu_equal": ("F19", "F20"),
    "net_clock": (),
    "net_bandwidth": (),
    "net_gloo": ("A8", "A9", "A10"),
    "net_nccl": ("E1", "E2", "E3", "E4", "E5", "E6", "E7", "F7", "F8", "F13", "F14", "F15", "F16", "F17", "F18", "F22"),
}
# Of one process, whatever the link can do.
_ONE_PROCESS_MBIT = 25000
# Where no link speed is known, a pair is slow below this share of the middle one.
_OF_MEDIAN = 0.5


@dataclass(frozen=True)
class Settings:
    """Variables of the role preflight, without preflight_network_ before them; mode and accept go without it too."""

    mode: str = "quick"
    accept: Sequence[str] = ()
    clock_seconds: float = 1.0
    min_bandwidth_fraction: float = 0.8


@dataclass
class Direction:
    """What one node found at another."""

    source: str
    target: str
    probe: Mapping[str, Any]
    # Ports that the target's own services have, where nothing was held for the test; and those that were held.
    busy: frozenset[int]
    held: frozenset[int]
    good: list[Mapping[str, Any]] = field(default_factory=list)
    bad: list[Mapping[str, Any]] = field(default_factory=list)
    # Somebody accepts the connection where the listener should, and does not say its name.
    mute: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for attempt in self.probe.get("tcp") or []:
            # A service may have gone since, but the packet came through.
            passed = attempt["result"] == "open" or (attempt["result"] == "refused" and attempt["port"] in self.busy)
            listens = attempt["kind"] != "pinned" or attempt["port"] in self.held or attempt.get("error")
            if attempt["result"] == "open" and listens and not attempt.get("answered_by"):
                self.mute.append(attempt)
            else:
                (self.good if passed else self.bad).append(attempt)

    @property
    def pair(self) -> Pair:
        return self.source, self.target

    @property
    def tested(self) -> bool:
        return bool(self.good or self.bad or self.mute)

    @property
    def itself(self) -> bool:
        return (self.probe.get("route") or {}).get("dev") == "lo"

    @property
    def astray(self) -> bool:
        """Another node, or another run, answers: what is open there says nothing of this one."""
        return bool({attempt.get("answered_by") for attempt in self.probe.get("tcp") or []} - {None, self.target})

    @property
    def closed(self) -> bool:
        return bool(self.bad and not self.good and not self.mute)

    @property
    def silent(self) -> bool:
        """Nobody says on the wire that the address is its own."""
        return not self.probe.get("mac") and self.probe.get("neighbour") in ("failed", "incomplete")

    def bad_ports(self, pinned: bool) -> list[Mapping[str, Any]]:
        return [attempt for attempt in self.bad if (attempt["kind"] == "pinned") == pinned]

    @property
    def milliseconds(self) -> float | None:
        times = [float(attempt["ms"]) for attempt in self.good if attempt.get("ms") is not None]
        return min(times) if times else None


@dataclass
class View:
    """All that was measured, with what is asked of it again and again."""

    probes: Mapping[str, Probe | None]
    plan: Mapping[str, Any]
    settings: Settings
    listeners: Mapping[str, Mapping[str, Any] | None]
    ports: Mapping[str, Any]
    results: Mapping[str, Any]
    findings: list[dict[str, Any]] = field(default_factory=list)
    # Of checks without a finding: what was seen, or why nothing was.
    notes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = ordered(self.probes)
        self.broken = {
            name: told
            for name in self.nodes
            if self.probes[name] and (told := probe_shape.fault(self.probes[name], self.plan["nodes"]))
        }
        self.seen: dict[str, Probe] = {
            name: probe for name in self.nodes if (probe := self.probes[name]) and name not in self.broken
        }
        self.directions: dict[Pair, Direction] = {}
        for name, probe in self.seen.items():
            for other, peer in (probe.get("peers") or {}).items():
                there = self.listeners.get(other) or {}
                busy, held = (frozenset(there.get(key) or ()) for key in ("busy", "held"))
                self.directions[name, other] = Direction(name, other, peer, busy, held)
        # Where a node has the other's address too, packets never leave it, and replies to the other never come back.
        looped = {pair for pair, found in self.directions.items() if found.itself}
        looped |= {(target, source) for source, target in looped}
        self.tested = {pair for pair, found in self.directions.items() if found.tested and not found.astray} - looped

    def address(self, name: str) -> str:
        node = self.plan["nodes"].get(name) or {}
        return text.bare((self.seen.get(name) or {}).get("address") or node.get("address") or "")

    def mtu(self, name: str) -> int | None:
        return ((self.seen.get(name) or {}).get("interface") or {}).get("mtu")

    def find(
        self,
        check: str,
        status: str,
        measured: str,
        *,
        expected: str,
        cause: str,
        remedy: str,
        nodes: Iterable[str],
        targets: Iterable[str] = (),
        pairs: Iterable[Pair] = (),
    ) -> None:
        listed = list(pairs)
        accepted = status == "fail" and check in self.settings.accept
        self.findings.append(
            {
                "check": check,
                "group": list(CHECKS[check]),
                "status": "warn" if accepted else status,
                "accepted": accepted,
                "nodes": ordered(set(nodes)),
                "targets": ordered(set(targets)),
                "pairs": [list(pair) for pair in listed],
                "measured": measured,
                "expected": expected,
                "cause": cause,
                "remedy": remedy,
            }
        )

    def note(self, check: str, status: str, measured: str) -> None:
        self.notes[check] = (status, measured)


# --- reachable at all ------------------------------------------------------------------------------------------------


def _usual(attempts: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """What became of the bad attempts between two nodes, and how it reads, with the system's error.

    A firewall that rejects sends few answers a second: one among many attempts that time out tells that it does.
    """
    listed = list(attempts)
    results = Counter(str(attempt["result"]) for attempt in listed)
    told = Counter({result: count for result, count in results.items() if result != "timeout"}) or results
    result = told.most_common(1)[0][0]
    errors = Counter(
        f"{attempt['error']}" + (f", errno {attempt['errno']}" if attempt.get("errno") else "")
        for attempt in listed
        if attempt["result"] == result and attempt.get("error")
    )
    return result, f"{result} ({errors.most_common(1)[0][0]})" if errors else result


def _how(pairs: Iterable[Iterable[Mapping[str, Any]]]) -> tuple[str, str]:
    """The same of several pairs: what most of them had."""
    return Counter(_usual(attempts) for attempts in pairs).most_common(1)[0][0]


def _probed(view: View) -> None:
    for name in view.nodes:
        if name in view.seen:
            continue
        if name in view.broken:
            view.find(
                "net_probed",
                "fail",
                f"the measurement of {name} cannot be read: {view.broken[name]}",
                expected="a measurement from each node of the run",
                cause="the module of another version ran there, or something on the node writes into its output",
                remedy=f"run it again; if it comes back, leave {name} out with --limit and look at its -vvv output",
                nodes=[name],
            )
            continue
        others = [view.directions[other, name] for other in view.seen if (other, name) in view.directions]
        open_to = [found.source for found in others if found.good]
        neighbours = [found.source for found in others if found.probe.get("mac")]
        if open_to:
            seen = f"its listener answers {shown(open_to)}"
        elif any(found.bad for found in others):
            how = _how(found.bad for found in others if found.bad)[1]
            seen = f"{shown([found.source for found in others if found.bad])} connect to it: {how}"
        elif neighbours:
            seen = f"something with its address {view.address(name)} answers {shown(neighbours)} on the wire"
        elif others:
            seen = f"{shown([found.source for found in others])} see nothing at its address {view.address(name)}"
        else:
            seen = "no other node looked for it"
        view.find(
            "net_probed",
            "fail",
            f"no measurement from {name}; {seen}",
            expected="a measurement from each node of the run",
            cause="Ansible could not connect to it, or a module failed there",
            remedy="see the error of that host above; repair it, or leave it out with --limit",
            nodes=[name],
        )
    view.note("net_probed", "pass", f"{len(view.seen)} nodes")


def _interfaces(view: View) -> None:
    for name, probe in view.seen.items():
        interface, address = probe.get("interface") or {}, view.address(name)
        own = {text.bare(entry) for entry in interface.get("addresses") or []}
        if not interface:
            has, cause = (
                f"no interface has {address}",
                "cluster_address is not this node's, or cluster_interface is gone",
            )
        elif not interface.get("has_address", address in own):
            has = f"{interface.get('name')} has {', '.join(sorted(own)) or 'no address'}, not {address}"
            cause = "cluster_address is not this node's, or belongs to another interface"
        elif interface.get("up") is False:
            has, cause = f"{interface.get('name')} is down", "cable, switch port, or the interface's configuration"
        else:
            continue
        view.find(
            "net_interface",
            "fail",
            has,
            expected=f"the interface of the cluster is up and has {address}",
            cause=cause,
            remedy="correct cluster_interface and cluster_address in the inventory, or the node's network",
            nodes=[name],
        )
    view.note("net_interface", "pass", "up, with the cluster's address")
    families = {name: str(probe.get("family") or 0) for name, probe in view.seen.items()}
    if len(set(families.values())) > 1:
        parts = [f"{shown(names)} IPv{family}" for family, names in sorted(_by(families).items())]
        view.find(
            "net_family",
            "fail",
            f"cluster addresses of two families: {joined(parts)}",
            expected="one family on all nodes",
            cause="cluster_address of some nodes is of the other family, or the interface has no address of this one",
            remedy="set cluster_address of all nodes to addresses of one family",
            nodes=view.seen,
        )
    view.note("net_family", "pass", f"IPv{next(iter(families.values()), 4)}")


def _by(values: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return found


def _connections(view: View) -> None:
    closed = {pair for pair in view.tested if view.directions[pair].closed}
    for group in grouped(closed, view.tested):
        result, how = _how(view.directions[pair].bad for pair in group.pairs)
        if all(view.directions[pair].silent for pair in group.pairs):
            result = "silent"
        partition = group.kind == "between" and len(group.sources) + len(group.targets) > 2
        back = {(target, source) for source, target in group.pairs} & view.tested - closed
        measured, cause, remedy = text.connection(group, result, how, bool(back), view.address)
        view.find(
            "net_partition" if partition else "net_connect",
            "fail",
            measured,
            expected="each node reaches each other node, in both directions",
            cause=cause,
            remedy=remedy,
            nodes=group.sources,
            targets=group.targets,
            pairs=group.pairs,
        )
    count = len(view.tested)
    skipped = [
        (pair, found) for pair, found in view.directions.items() if not found.tested and pair[1] not in view.nodes
    ]
    outside = ordered({pair[1] for pair, _ in skipped})
    for check in ("net_connect", "net_partition"):
        if not count:
            view.note(check, "skip", f"not tested: {_why_none(view)}")
        else:
            more = f"; not tested: {shown(outside)}, not in this run" if outside else ""
            view.note(check, "pass", f"{count} directions between {len(view.seen)} nodes{more}")


def _why_none(view: View) -> str:
    if len(view.nodes) < 2:
        return "one node alone in this run"
    if any(found.astray for found in view.directions.values()):
        return "another node or another run answers"
    reasons = Counter(str(found.probe.get("why")) for found in view.directions.values() if found.probe.get("why"))
    return reasons.most_common(1)[0][0] if reasons else "no node has a peer that listened"


def _ports(view: View) -> None:
    for check, pinned in (("net_ports_random", False), ("net_ports_pinned", True)):
        bad: dict[Pair, str] = {}
        for pair in view.tested:
            found = view.directions[pair]
            ports = [] if found.closed else found.bad_ports(pinned)
            if ports:
                # The numbers of random ports say nothing, and differ on each node.
                bad[pair] = " ".join(sorted({str(entry["port"]) for entry in ports})) if pinned else ""
        for value, pairs in by_value(bad).items():
            relevant = {
                pair
                for pair in view.tested
                if any((entry["kind"] == "pinned") == pinned for entry in view.directions[pair].probe["tcp"])
            }
            for group in grouped(pairs, relevant):
                _port_finding(view, check, group, value)
        tried = sum(
            (entry["kind"] == "pinned") == pinned
            for pair in view.tested
            for entry in view.directions[pair].probe["tcp"]
        )
        view.note(check, "pass" if tried else "skip", f"{tried} connections" if tried else "nothing to test")


def _port_finding(view: View, check: str, group: Group, value: str) -> None:
    pinned = bool(value)
    bad = [attempt for pair in group.pairs for attempt in view.directions[pair].bad_ports(pinned)]
    every = not any(
        (attempt["kind"] == "pinned") == pinned for pair in group.pairs for attempt in view.directions[pair].good
    )
    result, how = _how(view.directions[pair].bad_ports(pinned) for pair in group.pairs)
    if pinned:
        names = purposes(view.plan, group.targets[0], view.ports)
        ports = joined([f"{port} ({names.get(int(port), 'pinned')})" for port in value.split()])
        what = f"{'no pinned port' if every else 'pinned ports are closed'}: {ports}"
    else:
        examples = ", ".join(str(attempt["port"]) for attempt in bad[:3])
        what = f"{'no random high port' if every else 'some random high ports are closed'}: {examples}"
    where = text.direction(group)
    cause, remedy = text.ports(pinned, every, result, shown(group.targets))
    view.find(
        check,
        "fail",
        f"{where}: {what}: {how}",
        expected="nodes reach each other's pinned ports and the kernel's whole range of random ports",
        cause=cause,
        remedy=remedy,
        nodes=group.sources,
        targets=group.targets,
        pairs=group.pairs,
    )


# --- who answers -----------------------------------------------------------------------------------------------------


def _identities(view: View) -> None:
    wrong: dict[tuple[str, str], list[str]] = {}
    for (source, target), found in view.directions.items():
        others = {entry.get("answered_by") for entry in found.probe.get("tcp") or []} | {found.probe.get("identity")}
        for other in others - {None, target}:
            wrong.setdefault((target, str(other)), []).append(source)
    for (target, other), sources in wrong.items():
        stale = other.startswith(f"{target} of ")
        view.find(
            "net_identity",
            "warn" if stale else "fail",
            f"at {view.address(target)}, the address of {target}, {other} answers {shown(sources)}",
            expected=f"{target} answers at its address, with the listener of this run",
            cause="two runs at the same time, or a listener that was left over; it ends by itself"
            if stale
            else f"{target} and {other} have the same address, or cluster_address of the two is mixed up",
            remedy="wait until the other run ends, and run it again"
            if stale
            else "correct cluster_address in the inventory, or the address of one of the nodes",
            nodes=sources,
            targets=[target],
            pairs=[(source, target) for source in sources],
        )
    _mute(view)
    view.note("net_identity", *_told(view, "each address is answered by its node"))


def _mute(view: View) -> None:
    """Ports that are open, but not at the listener. All of a node is told as such, single ports by number."""
    bad: dict[Pair, str] = {}
    for pair in view.tested:
        found = view.directions[pair]
        if found.mute:
            some = sorted({int(attempt["port"]) for attempt in found.mute})
            bad[pair] = joined([str(port) for port in some]) if found.good else ""
    by_target: dict[tuple[str, str], list[Pair]] = {}
    for pair, ports in bad.items():
        by_target.setdefault((pair[1], ports), []).append(pair)
    for (target, ports), pairs in by_target.items():
        where = f"port {ports} of" if ports else "every port of"
        view.find(
            "net_identity",
            "fail",
            f"something accepts connections at {where} {view.address(target)}, the address of {target}, and is not its"
            f" listener: {shown([pair[0] for pair in pairs])} got no name",
            expected=f"{target} answers at its address, with the listener of this run",
            cause="a firewall or router between that answers for others (SYN proxy, load balancer), another machine or"
            f" program with that address and port, or the listener on {target} hangs",
            remedy=f"on {target}: ss -lntp shows who listens; compare the hardware address with ip neigh on the others,"
            " and look for proxies on the way",
            nodes=[pair[0] for pair in pairs],
            targets=[target],
            pairs=pairs,
        )


def _told(view: View, measured: str) -> tuple[str, str]:
    return ("pass", measured) if view.tested else ("skip", f"not tested: {_why_none(view)}")


def _duplicates(view: View) -> None:
    tested = 0
    for name, probe in view.seen.items():
        others, interface = probe.get("duplicate"), probe.get("interface") or {}
        tested += others is not None
        refused = view.address(name) in map(text.bare, interface.get("dad_failed") or [])
        if not others and not refused:
            continue
        measured = f"{joined(list(map(str, others or ())))} has the address {view.address(name)} of {name} too"
        view.find(
            "net_duplicate_address",
            "fail",
            f"{measured} ({name} is {interface.get('mac')})"
            if others
            else f"the kernel of {name} does not use {view.address(name)}: somebody had it when the interface came up",
            expected="one machine has the address",
            cause="the address was given to another machine, or a DHCP server gives it away",
            remedy="find the machine by its hardware address (switch, ip neigh) and give it another address",
            nodes=[name],
        )
    cards: dict[str, list[str]] = {}
    for name, probe in view.seen.items():
        if card := (probe.get("interface") or {}).get("mac"):
            cards.setdefault(str(card).lower(), []).append(name)
    for card, names in cards.items():
        if len(names) > 1:
            view.find(
                "net_duplicate_address",
                "fail",
                f"{shown(names)} have the same hardware address {card}",
                expected="each interface has its own hardware address",
                cause="nodes were cloned with their network configuration, or two names are the same machine",
                remedy="give each node its own hardware address; check ansible_host of the two",
                nodes=names,
            )
    _other_cards(view)
    why = Counter(str(probe["duplicate_error"]) for probe in view.seen.values() if probe.get("duplicate_error"))
    if tested:
        view.note("net_duplicate_address", "pass", f"nobody else has the address of {tested} nodes")
    else:
        view.note("net_duplicate_address", "skip", f"not tested: {why.most_common(1)[0][0] if why else 'not asked'}")


def _other_cards(view: View) -> None:
    """Others see another hardware address than the node says of itself: a second machine answers some of the time."""
    seen: dict[tuple[str, str], list[str]] = {}
    for (source, target), found in view.directions.items():
        card = str(found.probe.get("mac") or "").lower()
        own = str(((view.seen.get(target) or {}).get("interface") or {}).get("mac") or "").lower()
        # InfiniBand's are longer, and shown in several ways; behind a gateway it is the gateway's.
        routed = (found.probe.get("route") or {}).get("gateway")
        if len(card) == len(own) == 17 and card != own and not routed:
            seen.setdefault((target, card), []).append(source)
    for (target, card), sources in seen.items():
        view.find(
            "net_duplicate_address",
            "warn",
            f"{shown(sources)} find {view.address(target)} of {target} at {card}, not at its own hardware address",
            expected="the hardware address of the node's interface",
            cause="a second machine has the address, or something answers for it (proxy ARP, a bond that moved)",
            remedy="look for that hardware address in the switch; on the nodes: ip neigh flush to ADDRESS",
            nodes=sources,
            targets=[target],
            pairs=[(source, target) for source in sources],
        )


def _names(view: View) -> None:
    missing: dict[str, list[str]] = {}
    other: dict[tuple[str, str], list[str]] = {}
    for (source, target), found in view.directions.items():
        told = found.probe.get("name")
        if told is None:
            continue
        resolves = [text.bare(entry) for entry in told.get("resolves") or []]
        if not resolves:
            missing.setdefault(target, []).append(source)
        elif view.address(target) not in resolves or any(text.loopback(entry) for entry in resolves):
            other.setdefault((target, ", ".join(resolves)), []).append(source)
    if missing:
        asking = {source for listed in missing.values() for source in listed}
        view.find(
            "net_names",
            "warn",
            f"{shown(asking)} cannot resolve {shown(missing)}",
            expected="each node knows the others by name",
            cause="no line in /etc/hosts and no name server that knows them",
            remedy="run playbooks/network.yml: the role fabric writes /etc/hosts",
            nodes=asking,
            targets=missing,
        )
    for (target, told), sources in other.items():
        view.find(
            "net_names",
            "fail",
            f"on {shown(sources)} the name {target} means {told}",
            expected=f"{view.address(target)}, its cluster address",
            cause="an old line in /etc/hosts, or a name server that knows another address of it",
            remedy="run playbooks/network.yml, which writes /etc/hosts; take older lines of that name out",
            nodes=sources,
            targets=[target],
        )
    asked = any(found.probe.get("name") is not None for found in view.directions.values())
    view.note("net_names", "pass" if asked else "skip", "each name means its cluster address" if asked else "not asked")


def _own_names(view: View) -> None:
    told: dict[tuple[str, str], dict[str, str]] = {}
    for name, probe in view.seen.items():
        own = probe.get("hostname") or {}
        resolves = [text.bare(entry) for entry in own.get("resolves") or []]
        looped = [entry for entry in resolves if text.loopback(entry)]
        if looped:
            cause = "the line with 127.0.1.1 that the installer of Debian and Ubuntu writes into /etc/hosts"
            told.setdefault(("fail", cause), {})[name] = f"{own.get('name')} means {joined(looped)}"
        elif not resolves:
            cause = "no line in /etc/hosts; Gloo and Ray may fall back to loopback"
            told.setdefault(("warn", cause), {})[name] = f"{own.get('name')} cannot be resolved: {own.get('error')}"
        elif view.address(name) not in resolves:
            cause = "the name belongs to another interface of the node"
            told.setdefault(("warn", cause), {})[name] = f"{own.get('name')} means {joined(resolves)}"
    for (status, cause), names in told.items():
        view.find(
            "net_own_name",
            status,
            f"a node's own name: {text.listed(names)}",
            expected="the node's cluster address",
            cause=cause,
            remedy="run playbooks/network.yml, which writes /etc/hosts; take older lines of that name out",
            nodes=names,
        )
    view.note("net_own_name", "pass", "each node's own name means its cluster address")


# --- routes, MTU, clock ----------------------------------------------------------------------------------------------


def _routes(view: View) -> None:
    several: dict[int, dict[str, str]] = {}
    for name, probe in view.seen.items():
        for family in (4, 6):
            routes = [route for route in probe.get("routes") or [] if route.get("family") == family]
            # Of one interface, routers may announce several.
            if len(routes) > 1 and (family == 4 or len({str(route.get("dev")) for route in routes}) > 1):
                several.setdefault(family, {})[name] = " and ".join(
                    f"{route.get('dev')} via {route.get('gateway') or 'link'} metric {route.get('metric') or 0}"
                    for route in routes
                )
    for family, names in several.items():
        view.find(
            "net_default_route",
            "warn",
            f"several default routes by IPv{family}: {text.listed(names)}",
            expected="at most one default route",
            cause="two interfaces got one each, by DHCP, router advertisements or the network's configuration",
            remedy="keep the one that leads outside; on the cluster's interface set no gateway",
            nodes=names,
        )
    view.note("net_default_route", "pass", "at most one on each node")
    wrong: dict[tuple[str, str], list[str]] = {}
    for (source, target), found in view.directions.items():
        route = found.probe.get("route")
        if not route:
            continue
        if route.get("error"):
            wrong.setdefault((source, f"has no route: {route['error']}"), []).append(target)
            continue
        interface = ((view.seen[source].get("interface") or {}).get("name")) or ""
        leaves, sender = str(route.get("dev") or ""), text.bare(route.get("src") or "")
        if interface and leaves and leaves not in (interface, "lo"):
            wrong.setdefault((source, f"leaves by {leaves}, not by {interface}"), []).append(target)
        elif leaves == "lo":
            wrong.setdefault((source, "ends on the node itself: it has that address too"), []).append(target)
        elif sender and sender != view.address(source):
            told = f"leaves with the address {sender}, not {view.address(source)}"
            wrong.setdefault((source, told), []).append(target)
    for (source, told), targets in wrong.items():
        view.find(
            "net_route",
            "fail",
            f"from {source} to {shown(targets)} traffic {told}",
            expected="traffic between nodes leaves by the cluster's interface, with the cluster's address",
            cause="another interface has an address in the same network, a more specific route, or the cluster's"
            " interface has none in the peers' network",
            remedy="look at ip route get ADDRESS on the node; correct prefix, routes or cluster_interface",
            nodes=[source],
            targets=targets,
            pairs=[(source, target) for target in targets],
        )
    routed = any(found.probe.get("route") for found in view.directions.values())
    view.note("net_route", "pass" if routed else "skip", "by the cluster's interface" if routed else "not asked")


def _mtu(view: View) -> None:
    sizes = {name: str(size) for name in view.seen if (size := view.mtu(name))}
    if len(set(sizes.values())) > 1:
        by = _by(sizes)
        usual = max(by, key=lambda size: len(by[size]))
        tie = sum(len(names) == len(by[usual]) for names in by.values()) > 1
        odd = [name for size, names in by.items() for name in names if tie or size != usual]
        view.find(
            "net_mtu_equal",
            "fail",
            joined([f"{size} on {shown(by[size])}" for size in sorted(by, key=int)]),
            expected="one MTU on the cluster's interfaces" + ("" if tie else f", {usual} as on most nodes"),
            cause="jumbo frames were switched on for some nodes only",
            remedy="set the same MTU on the interface of every node, and at least that on the switches",
            nodes=odd,
        )
    view.note("net_mtu_equal", "pass", f"{next(iter(sizes.values()), 'unknown')} on {len(sizes)} nodes")
    bad: dict[Pair, str] = {}
    tested = set()
    for pair, found in view.directions.items():
        told = found.probe.get("mtu") or {}
        if told.get("ok") is None:
            continue
        tested.add(pair)
        if not told["ok"]:
            bad[pair] = f"{told.get('tried')}/{told.get('largest') or 0}"
    for value, pairs in by_value(bad).items():
        tried, largest = map(int, value.split("/"))
        for group in grouped(pairs, tested):
            cause = text.mtu(largest, {name: view.mtu(name) for name in {*group.sources, *group.targets}})
            view.find(
                "net_mtu_path",
                "fail",
                f"{text.direction(group)}: packets of {tried} bytes get lost, "
                + (f"{largest} bytes is the largest that comes through" if largest else "and smaller ones too"),
                expected=f"packets of the interface's MTU ({tried} bytes) come through whole",
                cause=cause,
                remedy="set one MTU on both interfaces and on every switch port between them",
                nodes=group.sources,
                targets=group.targets,
                pairs=group.pairs,
            )
    errors = Counter(
        str(told.get("error") or "no answer to large packets or small ones")
        for found in view.directions.values()
        if (told := found.probe.get("mtu")) and told.get("ok") is None
    )
    if tested:
        more = f"; not measured in {sum(errors.values())} directions" if errors else ""
        view.note("net_mtu_path", "pass", f"{len(tested)} directions{more}")
    else:
        why = errors.most_common(1)[0][0] if errors else _why_none(view)
        view.note("net_mtu_path", "skip", f"not measured: {why}")


def offsets(view: View) -> dict[str, float]:
    """How far each clock is from the middle one. One direction is enough, and nodes compare by way of others."""
    apart: dict[str, dict[str, float]] = {}
    for (source, target), found in view.directions.items():
        if told := found.probe.get("clock"):
            apart.setdefault(source, {})[target] = float(told["offset_s"])
            apart.setdefault(target, {}).setdefault(source, -float(told["offset_s"]))
    found_all: dict[str, float] = {}
    for start in ordered(apart):
        if start in found_all:
            continue
        part, waiting = {start: 0.0}, [start]
        for name in waiting:
            for other, offset in apart[name].items():
                if other not in part:
                    part[other] = part[name] + offset
                    waiting.append(other)
        middle = statistics.median(part.values())
        found_all |= {name: ahead - middle for name, ahead in part.items()}
    return found_all


def _clock(view: View) -> None:
    limit = view.settings.clock_seconds
    measured = {
        pair: float(told["offset_s"]) for pair, found in view.directions.items() if (told := found.probe.get("clock"))
    }
    if not measured:
        view.note("net_clock", "skip", f"not measured: {_why_none(view)}")
        return
    pair = max(measured, key=lambda each: abs(measured[each]))
    view.note("net_clock", "pass", f"at most {abs(measured[pair]):.3f} s apart ({pair[0]}, {pair[1]})")
    if abs(measured[pair]) <= limit:
        return
    own = offsets(view)
    odd = {name: skew for name, skew in own.items() if abs(skew) > limit} if len(own) > 2 else {}
    if odd:
        told = joined([f"{name} {odd[name]:+.1f} s" for name in ordered(odd)][:12])
        who, against = list(odd), "the clocks of most nodes"
    else:
        told, who, against = f"{pair[1]} is {measured[pair]:+.1f} s from {pair[0]}", list(pair), "each other"
    view.find(
        "net_clock",
        "fail",
        f"{told}, against {against}",
        expected=f"within {limit:g} s (preflight_network_clock_seconds)",
        cause="no time service runs there, or its server disagrees with the others'",
        remedy="use the same time servers on all nodes; chronyc tracking and chronyc sources show whom it follows, and"
        " chronyc makestep sets the clock at once",
        nodes=who,
    )


# --- speed and the engines' own ways ---------------------------------------------------------------------------------


def _bandwidth(view: View) -> None:
    speeds: dict[Pair, float] = {}
    errors: dict[Pair, str] = {}
    for pair, found in view.directions.items():
        told = found.probe.get("bandwidth")
        if told and told.get("mbit_s") is not None:
            speeds[pair] = float(told["mbit_s"])
        elif told:
            errors[pair] = str(told.get("error"))
    if not speeds and not errors:
        why = "preflight_network=full measures it" if view.settings.mode != "full" else _why_none(view)
        view.note("net_bandwidth", "skip", f"not tested: {why}")
        return
    middle = statistics.median(speeds.values()) if speeds else 0.0
    bad: dict[Pair, str] = {}
    for pair, speed in speeds.items():
        link = min((value for name in pair if (value := _link(view, name))), default=None)
        if link:
            usable = min(link, _ONE_PROCESS_MBIT)
            wanted = view.settings.min_bandwidth_fraction * usable
            if speed < wanted:
                told = f"{link} Mbit/s" if usable == link else f"{usable} Mbit/s, what one process makes of {link}"
                bad[pair] = f"{wanted:.0f} Mbit/s ({view.settings.min_bandwidth_fraction:g} of {told})"
                continue
        if len(speeds) > 2 and speed < _OF_MEDIAN * middle:
            bad[pair] = f"{_OF_MEDIAN * middle:.0f} Mbit/s (half of what most pairs have)"
    for wanted_text, pairs in by_value(bad).items():
        for group in grouped(pairs, speeds):
            worst = min(group.pairs, key=lambda each: speeds[each])
            view.find(
                "net_bandwidth",
                # Of virtual links nobody knows what they should do.
                "fail" if all(_link(view, name) for name in worst) else "warn",
                f"{text.direction(group)}: worst {worst[0]} to {worst[1]} with {speeds[worst]:.0f} Mbit/s;"
                f" most pairs have {middle:.0f}",
                expected=f"at least {wanted_text}",
                cause=text.slow(group, {name: _link(view, name) for name in worst}),
                remedy="look at ethtool INTERFACE (speed, duplex), ethtool -S (errors, drops) and the switch ports;"
                " measure again while nothing else uses the network",
                nodes=group.sources,
                targets=group.targets,
                pairs=group.pairs,
            )
    for told, pairs in by_value(errors).items():
        view.find(
            "net_bandwidth",
            "warn",
            f"{len(pairs)} of {len(speeds) + len(errors)} directions were not measured: {told}",
            expected="a measurement of each direction",
            cause="other tests kept the nodes busy, or the connection broke while data went over it",
            remedy="run it again, with more preflight_network_bandwidth_seconds or fewer nodes (--limit)",
            nodes={pair[0] for pair in pairs},
            targets={pair[1] for pair in pairs},
            pairs=pairs,
        )
    if speeds:
        worst = min(speeds, key=lambda each: speeds[each])
        view.note(
            "net_bandwidth",
            "pass",
            f"{len(speeds)} directions, {middle:.0f} Mbit/s in the middle, worst {worst[0]} to {worst[1]} with"
            f" {speeds[worst]:.0f}",
        )


def _link(view: View, name: str) -> int | None:
    return ((view.seen.get(name) or {}).get("interface") or {}).get("speed_mbit")


def _gloo(view: View) -> None:
    results = view.results.get("gloo") or {}
    reasons = Counter(str(entry["why"]) for entry in results.values() if entry and entry.get("why"))
    count, bad, causes = 0, dict[Pair, str](), dict[Pair, str]()
    for name in ordered(results):
        mine = (results[name] or {}).get("next")
        peer = str((mine or {}).get("peer"))
        theirs = results.get(peer) or {}
        # Where the neighbour could not take part, waiting for it tells nothing.
        if not mine or not theirs.get("tested"):
            continue
        count += 1
        other = theirs.get("previous") or {}
        if mine["ok"] and other.get("ok"):
            continue
        said = [f"{who}: {end['error']}" for who, end in ((name, mine), (peer, other)) if end.get("error")]
        # One of the two mostly knows why, and the other waits in vain.
        said.sort(key=lambda told: "timed out: the two" in told)
        bad[name, peer] = said[0] if said else f"{peer}: gave no answer"
        causes[name, peer] = text.gloo(bad[name, peer], {who: results[who].get("interface") for who in (name, peer)})
    for cause, pairs in by_value(causes).items():
        more = f"; and {len(pairs) - 2} more pairs" if len(pairs) > 2 else ""
        view.find(
            "net_gloo",
            "fail",
            f"{len(pairs)} of {count} pairs failed: {'; '.join(bad[pair] for pair in pairs[:2])}{more}",
            expected="an all-reduce of two ranks gives the sum on both",
            cause=cause,
            remedy="run playbooks/network.yml, which sets GLOO_SOCKET_IFNAME; see net_connect and net_ports_random",
            nodes={name for pair in pairs for name in pair},
            pairs=pairs,
        )
    if count:
        more = f"; not tested on some nodes: {joined(list(reasons))}" if reasons else ""
        view.note("net_gloo", "pass", f"{count} pairs{more}")
    else:
        usual = "preflight_network=full tests it" if view.settings.mode != "full" else _why_none(view)
        view.note("net_gloo", "skip", f"not tested: {reasons.most_common(1)[0][0] if reasons else usual}")


# --- the report ------------------------------------------------------------------------------------------------------


def judge(
    probes: Mapping[str, Probe | None],
    plan: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    listeners: Mapping[str, Mapping[str, Any] | None] | None = None,
    ports: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Judge a run. `probes` has each node of the run, with null where it was not measured."""
    view = View(probes, plan, Settings(**(settings or {})), listeners or {}, ports or {}, results or {})
    for part in (
        _probed,
        _interfaces,
        _connections,
        _ports,
        _identities,
        _duplicates,
        _names,
        _own_names,
        _routes,
        _mtu,
        _clock,
        _bandwidth,
        _gloo,
        probe_fabric.nccl,
    ):
        part(view)
    found: dict[str, str] = {}
    for finding in view.findings:
        check = finding["check"]
        found[check] = max(found.get(check, "pass"), finding["status"], key=ORDER.index)
    checks = [
        {
            "id": check,
            "group": list(group),
            "status": found.get(check) or view.notes[check][0],
            "measured": view.notes.get(check, ("", ""))[1] if check not in found else _first(view.findings, check),
        }
        for check, group in CHECKS.items()
    ]
    counts = {status: sum(item["status"] == status for item in checks) for status in reversed(ORDER)}
    view.findings.sort(key=lambda finding: (finding["status"] != "fail", list(CHECKS).index(finding["check"])))
    report = {
        "ok": not counts["fail"],
        "verdict": "fail" if counts["fail"] else "warn" if counts["warn"] else "pass",
        "mode": view.settings.mode,
        "nodes": view.nodes,
        "missing": [name for name in view.nodes if name not in view.seen],
        "not_in_this_run": [name for name in members(plan) if name not in probes],
        "counts": counts,
        "checks": checks,
        "findings": view.findings,
        "worst": _worst(view),
        "nccl": probe_fabric.runs(view.results.get("nccl") or {}),
        "matrix": _matrix(view),
    }
    return {**report, "table": text.table(report)}


def _first(findings: Sequence[Mapping[str, Any]], check: str) -> str:
    return next(str(finding["measured"]) for finding in findings if finding["check"] == check)


def _worst(view: View) -> dict[str, Any]:
    """The worst pair of each figure."""
    figures: dict[str, dict[Pair, float]] = {"latency_ms": {}, "clock_offset_s": {}, "bandwidth_mbit_s": {}}
    for pair, found in view.directions.items():
        if (milliseconds := found.milliseconds) is not None:
            figures["latency_ms"][pair] = milliseconds
        if told := found.probe.get("clock"):
            figures["clock_offset_s"][pair] = abs(float(told["offset_s"]))
        if (told := found.probe.get("bandwidth")) and told.get("mbit_s") is not None:
            figures["bandwidth_mbit_s"][pair] = float(told["mbit_s"])
    worst = {}
    for name, values in figures.items():
        if values:
            pair = (min if name == "bandwidth_mbit_s" else max)(values, key=lambda each: values[each])
            worst[name] = {"pair": list(pair), "value": values[pair]}
    return worst


def _matrix(view: View) -> dict[str, dict[str, dict[str, Any]]]:
    """For each node what it found at each other one: a status, short words, and the figures."""
    bad: dict[Pair, tuple[str, list[str]]] = {}
    for finding in view.findings:
        for pair in finding["pairs"]:
            status, checks = bad.get((pair[0], pair[1]), ("pass", []))
            bad[pair[0], pair[1]] = max(status, finding["status"], key=ORDER.index), [*checks, finding["check"]]
    matrix: dict[str, dict[str, dict[str, Any]]] = {}
    for (source, target), found in view.directions.items():
        status, checks = bad.get((source, target), ("pass" if found.tested else "skip", []))
        cell: dict[str, Any] = {"status": status}
        if checks:
            cell["checks"] = checks
        if found.tested:
            cell |= {"open": len(found.good), "tried": len(found.good) + len(found.bad) + len(found.mute)}
        else:
            cell["why"] = str(found.probe.get("why") or "not tested")
        if found.bad:
            cell["closed"] = {str(attempt["port"]): str(attempt["result"]) for attempt in found.bad}
        if found.mute:
            cell["mute"] = [attempt["port"] for attempt in found.mute]
        if (milliseconds := found.milliseconds) is not None:
            cell["ms"] = round(milliseconds, 2)
        if (told := found.probe.get("mtu")) and told.get("largest"):
            cell["mtu"] = told["largest"]
        if told := found.probe.get("clock"):
            cell["offset_s"] = round(float(told["offset_s"]), 4)
        if (told := found.probe.get("bandwidth")) and told.get("mbit_s") is not None:
            cell["mbit_s"] = round(float(told["mbit_s"]))
        matrix.setdefault(source, {})[target] = cell
    return matrix
