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

from ..hosts import nics
from ..hosts.judging import ORDER
from . import probe_fabric, probe_shape, rdma_verdict
from . import probe_text as text
from .probe_groups import Group, Pair, by_value, count, do, grouped, joined, ordered, shown, verb
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
    "net_rdma": ("F5", "F7", "F8"),
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
    min_rdma_fraction: float = 0.9


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
        return bool(self.answers - {self.target})

    @property
    def answers(self) -> set[str]:
        """Who says a name there."""
        return {str(name) for attempt in self.probe.get("tcp") or [] if (name := attempt.get("answered_by"))}

    @property
    def closed(self) -> bool:
        return bool(self.bad and not self.good and not self.mute)

    @property
    def silent(self) -> bool:
        """Nobody says on the wire that the address is its own."""
        return not text.card(self.probe.get("mac")) and self.probe.get("neighbour") in ("failed", "incomplete")

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
    # Of checks without a finding: what was seen, or why nothing was; then what was left out, and why.
    notes: dict[str, tuple[str, str, str]] = field(default_factory=dict)

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
        self.measured: dict[Pair, Direction] = {}
        for name, probe in self.seen.items():
            for other, peer in (probe.get("peers") or {}).items():
                there = self.listeners.get(other) or {}
                busy, held = (frozenset(there.get(key) or ()) for key in ("busy", "held"))
                self.measured[name, other] = Direction(name, other, peer, busy, held)
        # Whose address a node has in place of its own. What is measured of the two is of the other one.
        self.instead = self._instead()
        self.mixed = {*self.instead, *self.instead.values()}
        self.directions = {pair: found for pair, found in self.measured.items() if not self.mixed.intersection(pair)}
        # Where a node has the other's address too, packets never leave it, and replies to the other never come back.
        looped = {pair for pair, found in self.directions.items() if found.itself}
        looped |= {(target, source) for source, target in looped}
        self.tested = {pair for pair, found in self.directions.items() if found.tested and not found.astray} - looped

    def _instead(self) -> dict[str, str]:
        found = {}
        owners = {self.address(name): name for name in self.plan["nodes"]}
        for name, probe in self.seen.items():
            if has_own(probe):
                continue
            interface = probe.get("interface") or {}
            others = [owners.get(text.bare(entry)) for entry in interface.get("addresses") or []]
            # Where it has no interface of that name, those who found it at the address of another one tell.
            others += [target for (_, target), each in self.measured.items() if each.answers == {name}]
            foreign = next((other for other in others if other and other != name), None)
            if foreign:
                found[name] = foreign
        return found

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

    def note(self, check: str, status: str, measured: str, left: str = "") -> None:
        """`left` is what was not tested, and why."""
        self.notes[check] = (status, "; ".join(filter(None, (measured, left))), left)

    def skip(self, check: str, why: str, what: str = "not tested") -> None:
        self.note(check, "skip", "", f"{what}: {why}")


def has_own(probe: Probe) -> bool:
    """Whether the node's interface has its cluster address."""
    interface = probe.get("interface") or {}
    own = {text.bare(entry) for entry in interface.get("addresses") or []}
    return bool(interface and interface.get("has_address", text.bare(probe.get("address") or "") in own))


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
        others = [view.measured[other, name] for other in view.seen if (other, name) in view.measured]
        open_to = [found.source for found in others if found.good]
        neighbours = [found.source for found in others if text.card(found.probe.get("mac"))]
        if open_to:
            seen = f"its listener answers {shown(open_to)}"
        elif any(found.bad for found in others):
            how = _how(found.bad for found in others if found.bad)[1]
            seen = f"{do([found.source for found in others if found.bad], 'connect')} to it: {how}"
        elif neighbours:
            seen = f"something with its address {view.address(name)} answers {shown(neighbours)} on the wire"
        elif others:
            seen = f"{do([found.source for found in others], 'see')} nothing at its address {view.address(name)}"
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
    view.note("net_probed", "pass", count(len(view.seen), "node"))


def _mixed(view: View) -> None:
    """Nodes that have each other's address: one finding for all that follows from it."""
    left = dict(view.instead)
    while left:
        # Those that hang together: two that are swapped, or several in a circle or a row.
        part = {next(iter(left))}
        while more := {each for pair in left.items() if part.intersection(pair) for each in pair} - part:
            part |= more
        told = {name: left.pop(name) for name in ordered(part & {*left})}
        swapped, names = len(told) == len(part), joined(ordered(part))
        view.find(
            "net_interface",
            "fail",
            joined([f"{name} has {view.address(other)}, the address of {other}" for name, other in told.items()])
            + ("" if swapped else f"; {joined([f'{name} should have {view.address(name)}' for name in told])}"),
            expected="each node has its own cluster address",
            cause=f"the addresses of {names} are mixed up, in the inventory or on the nodes"
            if swapped
            else "cluster_address is of another node, or the node was given the address of another one",
            remedy=f"exchange cluster_address of {names} in the inventory, or the addresses on the nodes"
            if swapped
            else "correct cluster_address in the inventory, or the address on the node",
            nodes=part & {*view.seen},
            targets=part - {*view.seen},
            pairs=[pair for pair in view.measured if part.intersection(pair)],
        )


def _interfaces(view: View) -> None:
    _mixed(view)
    bad: dict[tuple[str, str], dict[str, str]] = {}
    for name, probe in view.seen.items():
        interface, address = probe.get("interface") or {}, view.address(name)
        network = text.network_of(address, interface.get("addresses") or [])
        if name in view.instead:
            continue
        if not interface:
            has, cause = (
                f"no interface has {address}",
                "cluster_address is not this node's, or cluster_interface is gone",
            )
        elif not has_own(probe):
            listed = sorted({text.bare(entry) for entry in interface.get("addresses") or []})
            has = f"{interface.get('name')} has {', '.join(listed) or 'no address'}, not {address}"
            cause = "cluster_address is not this node's, or belongs to another interface"
        elif interface.get("up") is False:
            has, cause = f"{interface.get('name')} is down", "cable, switch port, or the interface's configuration"
        elif network and (kind := nics.reserved(address, network.prefixlen)):
            has = f"{address} is {kind} of {network}, which {interface.get('name')} is in"
            cause = "cluster_address, or the prefix length of the interface, is wrong: nobody can use that address"
        else:
            continue
        bad.setdefault((cause, "" if len(view.seen) == 1 else interface.get("name") or ""), {})[name] = has
    for (cause, _), told in bad.items():
        own = f"{view.address(next(iter(told)))}" if len(told) == 1 else "the node's cluster address"
        view.find(
            "net_interface",
            "fail",
            next(iter(told.values())) if len(told) == 1 else text.listed(told),
            expected=f"the interface of the cluster is up and has {own}",
            cause=cause,
            remedy="correct cluster_interface and cluster_address in the inventory, or the node's network",
            nodes=told,
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
    for check in ("net_connect", "net_partition"):
        if not view.tested:
            view.skip(check, _why_none(view))
        else:
            told = f"{count(len(view.tested), 'direction')} between {count(len(view.seen), 'node')}"
            view.note(check, "pass", told)


def _why_none(view: View) -> str:
    outside = [name for name in members(view.plan) if name not in view.nodes]
    if len(view.nodes) < 2:
        return "one node alone in this run" + (f", {do(outside, 'are')} not in it" if outside else "")
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
        if tried:
            view.note(check, "pass", count(tried, "connection"))
        elif view.tested:
            view.skip(check, "no node has such a port")
        else:
            view.skip(check, _why_none(view))


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
    cause, remedy = text.ports(pinned, every, result, group.targets)
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
    if view.tested:
        view.note("net_identity", "pass", "each address is answered by its node")
    else:
        view.skip("net_identity", _why_none(view))


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


def _duplicates(view: View) -> None:
    tested = 0
    for name, probe in view.seen.items():
        interface = probe.get("interface") or {}
        tested += probe.get("duplicate") is not None
        others = [card for entry in probe.get("duplicate") or [] if (card := text.card(entry))]
        refused = view.address(name) in map(text.bare, interface.get("dad_failed") or [])
        if (not others and not refused) or name in view.mixed:
            continue
        measured = f"{joined(others)} {verb('have', len(others))} the address {view.address(name)} of {name} too"
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
        if card := text.card((probe.get("interface") or {}).get("mac")):
            cards.setdefault(card, []).append(name)
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
        left = f"not tested on {count(sum(why.values()), 'node')}: {why.most_common(1)[0][0]}" if why else ""
        view.note("net_duplicate_address", "pass", f"nobody else has the address of {count(tested, 'node')}", left)
    else:
        view.skip("net_duplicate_address", why.most_common(1)[0][0] if why else "not asked")


def _other_cards(view: View) -> None:
    """Others see another hardware address than the node says of itself: a second machine answers some of the time."""
    seen: dict[tuple[str, str], list[str]] = {}
    for (source, target), found in view.directions.items():
        card = text.card(found.probe.get("mac"))
        own = text.card(((view.seen.get(target) or {}).get("interface") or {}).get("mac"))
        # InfiniBand's are longer, and shown in several ways; behind a gateway it is the gateway's.
        routed = (found.probe.get("route") or {}).get("gateway")
        if len(card) == len(own) == 17 and card != own and not routed:
            seen.setdefault((target, card), []).append(source)
    for (target, card), sources in seen.items():
        view.find(
            "net_duplicate_address",
            "warn",
            f"{do(sources, 'find')} {view.address(target)} of {target} at {card}, not at its own hardware address",
            expected="the hardware address of the node's interface",
            cause="a second machine has the address, or something answers for it (proxy ARP, a bond that moved)",
            remedy="look for that hardware address in the switch; on the nodes: ip neigh flush to ADDRESS",
            nodes=sources,
            targets=[target],
            pairs=[(source, target) for source in sources],
        )


def _names(view: View) -> None:
    missing: dict[str, list[str]] = {}
    other: dict[str, dict[str, str]] = {}
    for (source, target), found in view.directions.items():
        told = found.probe.get("name")
        if told is None:
            continue
        resolves = [text.bare(entry) for entry in told.get("resolves") or []]
        if not resolves:
            missing.setdefault(target, []).append(source)
        elif view.address(target) not in resolves or any(text.loopback(entry) for entry in resolves):
            other.setdefault(source, {})[target] = ", ".join(resolves)
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
    for sources, told in alike(other):
        (target, *more), one = told, len(told) == 1
        view.find(
            "net_names",
            "fail",
            f"on {shown(sources)} the name {target} means {told[target]}"
            if not more
            else f"on {shown(sources)} the names of {len(told)} nodes mean other addresses: {text.listed(told)}",
            expected=f"{view.address(target)}, its cluster address"
            if one
            else "each name means the node's cluster address"
            f" ({text.listed({name: view.address(name) for name in told})})",
            cause="an old line in /etc/hosts, or a name server that knows another address of it"
            if one
            else "old lines in /etc/hosts, or a name server that knows other addresses of them",
            remedy="run playbooks/network.yml, which writes /etc/hosts; take older lines of"
            f" {'that name' if one else 'these names'} out",
            nodes=sources,
            targets=told,
        )
    asked = any(found.probe.get("name") is not None for found in view.directions.values())
    if asked:
        view.note("net_names", "pass", "each name means its cluster address")
    else:
        view.skip("net_names", "no peer was asked for")


def alike(told: Mapping[str, Mapping[str, str]]) -> list[tuple[list[str], dict[str, str]]]:
    """Nodes that say the same of others, with what they say: of itself none does, which is no difference."""
    found: list[tuple[list[str], dict[str, str]]] = []
    for name in ordered(told):
        for names, whole in found:
            both = {other for other in {*whole, *told[name]} if other not in (name, *names)}
            if all(whole.get(other) == told[name].get(other) for other in both) and not any(
                whole.get(other, said) != said for other, said in told[name].items()
            ):
                names.append(name)
                whole.update(told[name])
                break
        else:
            found.append(([name], dict(told[name])))
    return [(names, {name: whole[name] for name in ordered(whole)}) for names, whole in found]


def _own_names(view: View) -> None:
    owners = {view.address(name): name for name in view.plan["nodes"]}
    told: dict[tuple[str, str], dict[str, str]] = {}
    for name, probe in view.seen.items():
        own = probe.get("hostname") or {}
        resolves = [text.bare(entry) for entry in own.get("resolves") or []]
        if name in view.mixed:
            continue
        looped = [entry for entry in resolves if text.loopback(entry)]
        if looped:
            cause = "the line with 127.0.1.1 that the installer of Debian and Ubuntu writes into /etc/hosts"
            told.setdefault(("fail", cause), {})[name] = f"{own.get('name')} means {joined(looped)}"
        elif not resolves:
            cause = "no line in /etc/hosts; Gloo and Ray may fall back to loopback"
            told.setdefault(("warn", cause), {})[name] = f"{own.get('name')} cannot be resolved: {own.get('error')}"
        elif view.address(name) not in resolves:
            cause = _whose(resolves, view.address(name), owners, probe.get("addresses"))
            told.setdefault(("warn", cause), {})[name] = (
                f"{own.get('name')} means {joined(resolves)}, not {view.address(name)}"
            )
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


def _whose(resolves: Sequence[str], address: str, owners: Mapping[str, str], own: Sequence[Any] | None) -> str:
    """Why a node's own name means these addresses and not its cluster address."""
    if others := ordered({owners[entry] for entry in resolves if entry in owners}):
        return f"the name means {joined(others)} there: /etc/hosts was copied from it, or a name server mixes them up"
    if all((":" in entry) != (":" in address) for entry in resolves):
        spoken, known = ("IPv6", "IPv4") if ":" in address else ("IPv4", "IPv6")
        return f"the cluster speaks {spoken}, and the name is known by {known} alone"
    # What a node has was not told by older versions of the module.
    if own is not None and not {text.bare(entry) for entry in own}.intersection(resolves):
        return (
            "an address that the node does not have (any more): an old line in /etc/hosts, or an old name server entry"
        )
    return "the name belongs to another interface of the node"


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
    wrong: dict[str, dict[str, dict[str, str]]] = {}

    def add(kind: str, source: str, target: str, told: str) -> None:
        wrong.setdefault(kind, {}).setdefault(source, {})[target] = told

    for (source, target), found in view.directions.items():
        route = found.probe.get("route")
        if not route:
            continue
        if route.get("error"):
            add("none", source, target, f"has no route: {route['error']}")
            continue
        interface = ((view.seen[source].get("interface") or {}).get("name")) or ""
        leaves, sender = str(route.get("dev") or ""), text.bare(route.get("src") or "")
        if interface and leaves and leaves not in (interface, "lo"):
            add("interface", source, target, f"leaves by {leaves}, not by {interface}")
        elif leaves == "lo":
            add("loop", source, target, "ends on the node itself: it has that address too")
        elif sender and sender != view.address(source):
            add("sender", source, target, f"leaves with the address {sender}, not {view.address(source)}")
    for kind in wrong.values():
        _wrong_ways(view, kind)
    routed = any(found.probe.get("route") for found in view.directions.values())
    if routed:
        view.note("net_route", "pass", "by the cluster's interface")
    else:
        view.skip("net_route", "no peer was asked for")


def _wrong_ways(view: View, wrong: Mapping[str, Mapping[str, str]]) -> None:
    """Routes that are wrong in one way: the nodes that have the same told once, the others each."""
    for sources, told in alike(wrong):
        for said, targets in _by(told).items():
            pairs = [(source, target) for source in sources for target in targets if wrong[source].get(target) == said]
            view.find(
                "net_route",
                "fail",
                f"from {shown(sources)} to {shown(targets)} traffic {said}",
                expected="traffic between nodes leaves by the cluster's interface, with the cluster's address",
                cause="another interface has an address in the same network, a more specific route, or the cluster's"
                " interface has none in the peers' network",
                remedy="look at ip route get ADDRESS on the node; correct prefix, routes or cluster_interface",
                nodes=sources,
                targets=targets,
                pairs=pairs,
            )


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
    view.note("net_mtu_equal", "pass", f"{next(iter(sizes.values()), 'unknown')} on {count(len(sizes), 'node')}")
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
    why = errors.most_common(1)[0][0] if errors else _why_none(view)
    if tested:
        left = f"not measured in {count(sum(errors.values()), 'direction')}: {why}" if errors else ""
        view.note("net_mtu_path", "pass", count(len(tested), "direction"), left)
    else:
        view.skip("net_mtu_path", why, "not measured")


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
        view.skip("net_clock", _why_none(view), "not measured")
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
        view.skip(
            "net_bandwidth", _why_none(view) if view.settings.mode == "full" else "preflight_network=full tests it"
        )
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
            f"{len(pairs)} of {count(len(speeds) + len(errors), 'direction')} {verb('were', len(pairs))} not measured:"
            f" {told}",
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
            f"{count(len(speeds), 'direction')}, {middle:.0f} Mbit/s in the middle, worst {worst[0]} to {worst[1]} with"
            f" {speeds[worst]:.0f}",
        )


def _link(view: View, name: str) -> int | None:
    return ((view.seen.get(name) or {}).get("interface") or {}).get("speed_mbit")


def _gloo(view: View) -> None:
    results = view.results.get("gloo") or {}
    reasons: dict[str, list[str]] = {}
    for name in ordered(results):
        if why := (results[name] or {}).get("why"):
            reasons.setdefault(str(why), []).append(name)
    tried, bad, causes = 0, dict[Pair, str](), dict[Pair, str]()
    for name in ordered(results):
        mine = (results[name] or {}).get("next")
        peer = str((mine or {}).get("peer"))
        theirs = results.get(peer) or {}
        # Where the neighbour could not take part, waiting for it tells nothing.
        if not mine or not theirs.get("tested") or view.mixed.intersection((name, peer)):
            continue
        tried += 1
        other = theirs.get("previous") or {}
        if mine["ok"] and other.get("ok"):
            continue
        said = [f"{who}: {end['error']}" for who, end in ((name, mine), (peer, other)) if end.get("error")]
        # One of the two mostly knows why, and the other waits in vain.
        said.sort(key=lambda told: "timed out: the two" in told)
        bad[name, peer] = said[0] if said else f"{peer}: gave no answer"
        causes[name, peer] = text.gloo(bad[name, peer], {who: results[who].get("interface") for who in (name, peer)})
    for cause, pairs in by_value(causes).items():
        more = f"; and {count(len(pairs) - 2, 'more pair')}" if len(pairs) > 2 else ""
        view.find(
            "net_gloo",
            "fail",
            f"{len(pairs)} of {count(tried, 'pair')} failed: {'; '.join(bad[pair] for pair in pairs[:2])}{more}",
            expected="an all-reduce of two ranks gives the sum on both",
            cause=cause,
            remedy="run playbooks/network.yml, which sets GLOO_SOCKET_IFNAME; see net_connect and net_ports_random",
            nodes={name for pair in pairs for name in pair},
            pairs=pairs,
        )
    missing = joined([f"{why} ({shown(names)})" for why, names in reasons.items()])
    if tried:
        view.note("net_gloo", "pass", count(tried, "pair"), f"not tested on some nodes: {missing}" if missing else "")
    else:
        usual = _why_none(view) if view.settings.mode == "full" else "preflight_network=full tests it"
        view.skip("net_gloo", missing or usual)


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
        rdma_verdict.verdict,
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
            "measured": view.notes[check][1] if check not in found else _first(view.findings, check),
            # What of it was not tested, and why.
            "left": view.notes.get(check, ("", "", ""))[2],
        }
        for check, group in CHECKS.items()
    ]
    counts = {status: sum(item["status"] == status for item in checks) for status in reversed(ORDER)}
    view.findings.sort(key=lambda finding: (finding["status"] != "fail", list(CHECKS).index(finding["check"])))
    # A node alone, or peers that are all left out by --limit: nothing between nodes was tried.
    untried = len(members(plan)) > 1 and not any(found.tested for found in view.measured.values())
    report = {
        "ok": not counts["fail"],
        "verdict": "fail" if counts["fail"] else "warn" if counts["warn"] else "skip" if untried else "pass",
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
    figures["rdma_gb_s"] = {pair: cell["rdma_gb_s"] for pair, cell in rdma_verdict.cells(view).items()}
    worst = {}
    for name, values in figures.items():
        if values:
            pair = (min if name in ("bandwidth_mbit_s", "rdma_gb_s") else max)(values, key=lambda each: values[each])
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
    over_rails = rdma_verdict.cells(view)
    for (source, target), found in view.measured.items():
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
        cell |= over_rails.get((source, target), {})
        matrix.setdefault(source, {})[target] = cell
    return matrix
