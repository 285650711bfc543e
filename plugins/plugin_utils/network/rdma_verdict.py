"""The verdict on RDMA between nodes, rail by rail, from what the module rdma_check returned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..hosts.fabric import LINK_LAYERS
from . import rdma
from .probe_groups import Pair, joined, ordered, shown

if TYPE_CHECKING:
    from .probe import View

# Of a rail alone, that much more than with the others shows that they share something.
_ALONE_MORE = 1.1
# What is left of a PCI Express link's raw speed for data of packets with 256 bytes, from its third generation on.
_PCI_SHARE = 0.9
# Frames of Ethernet with 4096 bytes of data need 4200 with their headers.
_BEST_MTU = 4096
_SHOWN = 6
_FEW = 2
# Counters of congestion that was met in time; all others are of packets that were lost or damaged.
_MARKED = ("np_ecn_marked_roce_packets",)


@dataclass(frozen=True)
class Way:
    """What one node sent to another over one rail."""

    source: str
    target: str
    rail: int
    # As in mlx5_0:1, by name of the node.
    devices: Mapping[str, str]
    gbit: float | None
    # What the slower of the two ports runs at, and what has to be reached.
    rate: float | None
    wanted: float
    alone: float | None = None
    mtu: int | None = None
    link: str | None = None
    # What the two ends said, by name of the node.
    errors: Mapping[str, str] = field(default_factory=dict)
    # Of errors, by name of the node.
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def pair(self) -> Pair:
        return self.source, self.target

    @property
    def slow(self) -> bool:
        return self.gbit is not None and self.gbit < self.wanted

    @property
    def said(self) -> str:
        return "; ".join(f"{name}: {words}" for name, words in self.errors.items())


@dataclass
class Group:
    """Ways that are bad for one reason: all of a node's rails in `rails`, or between nodes of which none is odd."""

    node: str | None
    rails: list[int]
    ways: list[Way]


def ways(results: Mapping[str, Any], asked: Mapping[str, Any], fraction: float) -> list[Way]:
    """What was tried. `asked` is what rdma.meetings returned."""
    return [
        _way(source, str(run["peer"]), rail, results=results, asked=asked, fraction=fraction)
        for source in ordered(results)
        for run in results[source].get("runs") or []
        for rail in run.get("rails") or []
    ]


def _way(
    source: str,
    target: str,
    rail: Mapping[str, Any],
    *,
    results: Mapping[str, Any],
    asked: Mapping[str, Any],
    fraction: float,
) -> Way:
    number = int(rail["rail"])
    back = (
        entry
        for run in (results.get(target) or {}).get("runs") or []
        if run["peer"] == source
        for entry in run.get("rails") or []
        if entry["rail"] == number
    )
    ends = {source: rail, target: next(back, {})}
    rates = [rate for name in ends if (rate := _rate(asked, name, number))]
    rate = min(rates) if len(rates) == len(ends) else None
    errors = {name: str(rail[key]) for name, key in ((source, "error"), (target, "peer_error")) if rail.get(key)}
    return Way(
        source=source,
        target=target,
        rail=number,
        devices={name: f"{end['device']}:{end['port']}" for name, end in ends.items() if end},
        gbit=rail.get("gbit_s"),
        rate=rate,
        wanted=fraction * (rate or 0),
        alone=rail.get("alone_gbit_s"),
        mtu=rail.get("mtu"),
        link=rail.get("link"),
        errors={} if rail.get("gbit_s") else errors or {source: "no figure"},
        counters={name: end["counters"] for name, end in ends.items() if end.get("counters")},
    )


def _rate(asked: Mapping[str, Any], name: str, number: int) -> float | None:
    rates = (asked.get(name) or {}).get("rate") or []
    return float(rates[number]) if number < len(rates) and rates[number] else None


# --- whose fault -----------------------------------------------------------------------------------------------------


def grouped(bad: Sequence[Way], tried: Sequence[Way]) -> list[Group]:
    """A node's rail that is bad to everybody is told once, with all rails of that node for which it is so."""
    left = list(bad)
    blamed: dict[str, list[int]] = {}
    for node in ordered({name for way in tried for name in way.pair}):
        for rail in sorted({way.rail for way in tried}):
            own = [way for way in tried if way.rail == rail and node in way.pair]
            peers = {name for way in own for name in way.pair} - {node}
            # With a single other node, the two are as guilty as each other; and one whom nobody reaches is told first.
            if len(peers) > 1 and peers == {name for way in bad if way in own for name in way.pair} - {node}:
                others = [way for way in tried if way.rail == rail and node not in way.pair]
                if not others or any(way not in bad for way in others):
                    blamed.setdefault(node, []).append(rail)
    found = []
    for node, numbers in blamed.items():
        mine = [way for way in left if way.rail in numbers and node in way.pair]
        if mine:
            left = [way for way in left if way not in mine]
            found.append(Group(node, numbers, mine))
    by_rails: dict[tuple[str, ...], list[Way]] = {}
    for way in left:
        by_rails.setdefault(tuple(ordered(set(way.pair))), []).append(way)
    for listed in by_rails.values():
        found.append(Group(None, sorted({way.rail for way in listed}), listed))
    return found


def _where(group: Group) -> str:
    word = "rail" if len(group.rails) == 1 else "rails"
    numbers = joined([str(number) for number in group.rails])
    devices = {
        f"{device} of {name}"
        for way in group.ways
        for name, device in way.devices.items()
        if group.node in (None, name) and len(group.rails) <= _FEW
    }
    return f"{word} {numbers}" + (f" ({', '.join(sorted(devices))})" if devices else "")


def _swapped(group: Group, tried: Sequence[Way]) -> bool:
    """Exactly two of a node's rails carry nothing, and others do."""
    if group.node is None or len(group.rails) != 2:
        return False
    others = [way for way in tried if group.node in way.pair and way.rail not in group.rails]
    return bool(others) and all(way.gbit for way in others)


def pci_gbit(link: Mapping[str, Any] | None) -> float | None:
    """What a PCI Express link carries, from the speed and the width that it came up with."""
    if not link or not link.get("gt_s") or not link.get("width"):
        return None
    speed = float(link["gt_s"])
    encoding = 128 / 130 if speed >= 8 else 0.8
    return speed * float(link["width"]) * encoding * _PCI_SHARE


def slow_cause(group: Group, links: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Likely cause and remedy, by the first evidence that shows. `links` are the PCI Express links of each node."""
    for evidence in (_narrow_slot(group, links), _small_packets(group), _lost_packets(group), _shared(group)):
        if evidence:
            return evidence
    if any(counter in _MARKED for way in group.ways for grown in way.counters.values() for counter in grown):
        return (
            "switches mark packets (ECN), and the adapters slow down: other traffic on the same ports, or thresholds"
            " that are too low",
            "measure again while nothing else runs; see ECN thresholds and PFC on the switches",
        )
    if group.node is not None:
        return (
            f"cable, transceiver or switch port of {group.node}, or what its adapter shares in the host (IOMMU, slot)",
            "compare ibstat or ethtool (speed, lanes) with the other nodes, see pcie_width, iommu and rdma_links, and"
            " swap the cable with one of a good rail",
        )
    return (
        "a link between switches that came up slower or is shared, a wrong cable, or other traffic",
        "measure again while nothing else runs; see rdma_links, and iblinkinfo or the switches for links below their"
        " speed",
    )


def _narrow_slot(group: Group, links: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    for way in group.ways:
        for name, device in way.devices.items():
            link = (links.get(name) or {}).get(device.partition(":")[0]) or {}
            carries = pci_gbit(link)
            if carries and carries < way.wanted:
                most = f" of {link['max_gt_s']:g} GT/s x{link['max_width']:g}" if link.get("max_gt_s") else ""
                return (
                    f"the PCI Express link of {device} on {name} came up with {link['gt_s']:g} GT/s"
                    f" x{link['width']:g}{most}, which carries {carries:.0f} Gbit/s",
                    "reseat the adapter, try another slot, and see its width and generation in the BIOS",
                )
    return None


def _small_packets(group: Group) -> tuple[str, str] | None:
    mtu = min((way.mtu for way in group.ways if way.mtu), default=_BEST_MTU)
    if mtu >= _BEST_MTU:
        return None
    cause = f"packets of RDMA carry {mtu} bytes instead of {_BEST_MTU}"
    if any(way.link == "Ethernet" for way in group.ways):
        return (
            f"{cause}: the MTU of the interfaces is too small",
            "set an MTU of 4200 or more (9000) on both RoCE interfaces and on every switch port between them",
        )
    return (
        f"{cause}: a port or a switch limits them",
        "see active_mtu (ibv_devinfo) and the subnet manager's partitions",
    )


def _lost_packets(group: Group) -> tuple[str, str] | None:
    lost = [
        f"{name}: {counter} +{count}"
        for way in group.ways
        for name, grown in way.counters.items()
        for counter, count in grown.items()
        if counter not in _MARKED
    ]
    if not lost:
        return None
    cause = f"packets are lost or damaged ({'; '.join(dict.fromkeys(lost[:3]))}): a bad cable or transceiver"
    remedy = "see the port's errors (perfquery, ethtool -S, mlxlink), and clean or replace the cable"
    if any(way.link == "Ethernet" for way in group.ways):
        cause += ", or a switch without PFC and ECN for this traffic class"
        remedy += "; compare PFC, ECN and fabric_traffic_class with what the network's owner set up"
    return cause, remedy


def _shared(group: Group) -> tuple[str, str] | None:
    if not any(
        way.alone and way.gbit and way.alone >= way.wanted and way.alone > _ALONE_MORE * way.gbit for way in group.ways
    ):
        return None
    return (
        "each of these rails is fast alone and slow with the others: they share a PCI Express switch, an uplink of the"
        " fabric, or a memory controller",
        "see topology and pcie_width; with several switches: how they spread connections over their uplinks, and with"
        " RoCE fabric_queue_pairs",
    )


# --- telling ---------------------------------------------------------------------------------------------------------


def gb(gbit: float | None) -> str:
    return f"{(gbit or 0) / 8:.1f}"


def _figures(group: Group) -> str:
    told = [
        f"{way.source} to {way.target} rail {way.rail} {gb(way.gbit)} GB/s"
        + (f" (alone {gb(way.alone)})" if way.alone else "")
        for way in sorted(group.ways, key=lambda way: way.gbit or 0)
    ]
    return "; ".join(told[:_SHOWN]) + (f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")


def verdict(view: View) -> None:
    """Adds findings and the note of net_rdma."""
    asked = view.results.get("rdma_asked") or {}
    results = {name: entry for name, entry in (view.results.get("rdma") or {}).items() if entry}
    nodes = [name for name in view.nodes if (asked.get(name) or {}).get("type") in LINK_LAYERS]
    if view.settings.mode != "full" or not nodes:
        full = view.settings.mode == "full"
        why = "fabric_type is neither infiniband nor roce" if full else "preflight_network=full tests it"
        view.skip("net_rdma", why)
        return
    _unable(view, {name: str(asked[name]["why"]) for name in nodes if asked[name].get("why")}, results)
    found = ways(results, asked, view.settings.min_rdma_fraction)
    tried = [way for way in found if not view.mixed.intersection(way.pair)]
    _failures(view, tried)
    _slow(view, tried, {name: entry.get("devices") or {} for name, entry in results.items()})
    _fewer(view, {name: len(asked[name].get("rate") or []) for name in nodes if not asked[name].get("why")})
    good = [way for way in tried if way.gbit]
    if good:
        unknown = sum(way.rate is None for way in good)
        more = f"; of {unknown} the port's speed is not known, so they are told only" if unknown else ""
        text = f"{len(good)} rails and directions, the slowest: {speed(slowest(good))}{more}"
        view.note("net_rdma", "pass", text)
        return
    if tried:
        return
    reasons = Counter(str(entry["why"]) for entry in results.values() if entry.get("why"))
    reasons.update(str(run["why"]) for entry in results.values() for run in entry.get("runs") or [] if run.get("why"))
    why = reasons.most_common(1)[0][0] if reasons else "no other node of its fabric in this run"
    view.skip("net_rdma", why)


def speed(way: Way) -> str:
    of = f" of {gb(way.rate)}" if way.rate else ""
    return f"{way.source} to {way.target}, rail {way.rail} ({way.devices[way.source]}): {gb(way.gbit)}{of} GB/s"


def slowest(tried: Sequence[Way]) -> Way:
    return min(tried, key=lambda way: (way.gbit or 0) / (way.rate or 1))


def _unable(view: View, ports: Mapping[str, str], results: Mapping[str, Any]) -> None:
    for name, why in ports.items():
        view.find(
            "net_rdma",
            "fail",
            why,
            expected="active ports of the kind that fabric_type says, one for each rail",
            cause="a link that is down, an adapter whose driver is not loaded, or a fabric_type that is another node's",
            remedy="see rdma_links; look at ibstat or rdma link on that node",
            nodes=[name],
        )
    reasons: dict[str, list[str]] = {}
    for name, entry in results.items():
        why = str(entry.get("why") or "")
        if why and not why.startswith("adapters are in use"):
            reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        view.find(
            "net_rdma",
            "warn",
            why,
            expected="ib_write_bw, which measures RDMA",
            cause="the package perftest is not installed there, or too old",
            remedy="run playbooks/network.yml, which installs perftest where fabric_type is infiniband or roce",
            nodes=names,
        )


def _failures(view: View, tried: Sequence[Way]) -> None:
    bad = [way for way in tried if not way.gbit]
    own = {(frozenset(way.pair), way.rail) for way in _own_faults(view, bad)}
    causes: dict[tuple[str, str], list[tuple[Group, str]]] = {}
    for group in grouped([way for way in bad if (frozenset(way.pair), way.rail) not in own], tried):
        # One of the two mostly knows why, and the other waits in vain.
        first = min(group.ways, key=lambda way: rdma.explain(way.said)[0] == rdma.CAUSES[-1].cause)
        cause, remedy = rdma.explain(first.said)
        if _swapped(group, tried) and cause == rdma.UNANSWERED.cause:
            numbers = joined([str(number) for number in group.rails])
            cause = f"the cables of rails {numbers} of {group.node} are swapped: each is in the switch of the other"
            remedy = "compare both cables with the plan (ibnetdiscover or lldpctl), and swap them"
        names = {name for way in group.ways for name in way.pair}
        who = f"from {group.node} to {shown(names - {group.node})} or back" if group.node else f"between {shown(names)}"
        causes.setdefault((cause, remedy), []).append((group, f"{_where(group)}: nothing goes {who}: {first.said}"))
    for why, listed in causes.items():
        _tell(view, [group for group, _ in listed], [text for _, text in listed], "as much as the ports can", why)


def _own_faults(view: View, bad: Sequence[Way]) -> list[Way]:
    """Tells what is wrong with a node by itself, whomever it meets, and returns these ways."""
    found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    ways_of: dict[tuple[str, str], list[Way]] = {}
    for way in bad:
        for name, words in way.errors.items():
            entry = next((entry for entry in rdma.OWN if re.search(entry.words, words)), None)
            if entry:
                key = entry.cause, entry.remedy
                found.setdefault(key, {}).setdefault(name, {})[way.devices.get(name, f"rail {way.rail}")] = words
                ways_of.setdefault(key, []).append(way)
    for (cause, remedy), nodes in found.items():
        told = [f"{name} ({', '.join(nodes[name])}): {next(iter(nodes[name].values()))}" for name in ordered(nodes)]
        view.find(
            "net_rdma",
            "fail",
            _few(told),
            expected="each rail of a node can be used",
            cause=cause,
            remedy=remedy,
            nodes=nodes,
            pairs=dict.fromkeys(way.pair for way in ways_of[cause, remedy]),
        )
    return [way for listed in ways_of.values() for way in listed]


def _slow(view: View, tried: Sequence[Way], links: Mapping[str, Mapping[str, Any]]) -> None:
    causes: dict[tuple[str, str], list[Group]] = {}
    for group in grouped([way for way in tried if way.slow], tried):
        causes.setdefault(slow_cause(group, links), []).append(group)
    for why, groups in causes.items():
        first = groups[0].ways[0]
        share = f"{view.settings.min_rdma_fraction:g} of the ports' {first.rate:g} Gbit/s"
        texts = [f"{_where(group)}: {_figures(group)}" for group in groups]
        _tell(view, groups, texts, f"at least {gb(first.wanted)} GB/s ({share})", why)


def _tell(view: View, groups: Sequence[Group], texts: Sequence[str], expected: str, why: tuple[str, str]) -> None:
    view.find(
        "net_rdma",
        "fail",
        _few(texts),
        expected=expected,
        cause=why[0],
        remedy=why[1],
        nodes={name for group in groups for way in group.ways for name in way.pair if group.node in (None, name)},
        pairs=dict.fromkeys(way.pair for group in groups for way in group.ways),
    )


def _few(texts: Sequence[str]) -> str:
    return "; ".join(texts[:_FEW]) + (f"; and {len(texts) - _FEW} more" if len(texts) > _FEW else "")


def _fewer(view: View, counts: Mapping[str, int]) -> None:
    if len(set(counts.values())) < 2:
        return
    most = max(counts.values())
    few = {name: count for name, count in counts.items() if count < most}
    view.find(
        "net_rdma",
        "warn",
        f"{', '.join(f'{name} has {count}' for name, count in few.items())} rails, the others {most}",
        expected="as many rails on each node",
        cause="an adapter is missing, or fabric_hcas does not name the same ones on all nodes",
        remedy="compare rdma link on the nodes; list each node's devices in fabric_hcas, in the same order of rails",
        nodes=few,
    )


def cells(view: View) -> dict[Pair, dict[str, Any]]:
    """For the matrix: GB/s of the slowest rail, and of each, from node to node."""
    results = {name: entry for name, entry in (view.results.get("rdma") or {}).items() if entry}
    found: dict[Pair, dict[int, float]] = {}
    for way in ways(results, view.results.get("rdma_asked") or {}, 1):
        found.setdefault(way.pair, {})[way.rail] = round((way.gbit or 0) / 8, 2)
    return {
        pair: {"rdma_gb_s": min(rails.values()), "rails_gb_s": [rails[number] for number in sorted(rails)]}
        for pair, rails in found.items()
    }
