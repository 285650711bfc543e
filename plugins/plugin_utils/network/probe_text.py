"""The words of the network's verdict: likely causes, remedies, and the table on the screen."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from .probe_fabric import slowest, speed
from .probe_groups import Group, count, do, ordered, shown, verb

# Up to so many nodes, each pair has a cell on the screen.
_MATRIX_NODES = 12
_TOLD = 4
# A run that tested nothing is no proof, whatever else it found in order.
VERDICTS = {"pass": "PASS", "warn": "WARN", "fail": "FAIL", "skip": "NOT TESTED"}
_SYMBOLS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "skip": "-"}


def bare(entry: Any) -> str:
    """An address without prefix length or zone, from a string or from what ip says of it."""
    return _bare(str(entry.get("address") or entry.get("local") or "") if isinstance(entry, Mapping) else str(entry))


@lru_cache(4096)
def _bare(value: str) -> str:
    value = value.partition("/")[0].partition("%")[0]
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        return value


def card(value: Any) -> str:
    """A hardware address; nothing where an interface has none (routed, point-to-point), which reads as zeros."""
    found = str(value or "").lower()
    digits = found.replace(":", "")
    return "" if set(digits) <= {"0"} or set(digits) == {"f"} else found


def network_of(address: str, entries: Iterable[Any]) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network that an interface is in with this address, where its prefix length is told."""
    for entry in entries:
        value = f"{entry.get('address')}/{entry.get('prefix')}" if isinstance(entry, Mapping) else str(entry)
        if bare(value) == address and "/" in value:
            with contextlib.suppress(ValueError):
                return ipaddress.ip_interface(f"{address}/{value.rpartition('/')[2]}").network
    return None


def loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def listed(told: Mapping[str, str]) -> str:
    """What nodes say, each after its name; of many the first ones."""
    names = ordered(told)
    more = f"; and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return "; ".join(f"{name}: {told[name]}" for name in names[:_TOLD]) + more


def direction(group: Group) -> str:
    sources, targets = shown(group.sources), shown(group.targets)
    return {
        "all": f"between all {len(group.sources)} nodes",
        "alone": f"between {sources} and {targets}, both ways",
        "into": f"to {targets} from everywhere ({sources})",
        "out_of": f"from {sources} to everywhere ({targets})",
        "between": f"between {sources} and {targets}, both ways",
        "one_way": f"from {sources} to {targets}",
    }[group.kind]


def connection(group: Group, result: str, how: str, back: bool, address: Callable[[str], str]) -> tuple[str, str, str]:
    """Measured, cause and remedy where no port of a node was reached."""
    sources, targets = shown(group.sources), shown(group.targets)
    one = group.targets[0] if group.kind == "into" else group.sources[0]
    measured = {
        "all": f"no node reaches any other: {how}",
        "alone": f"{sources} reaches none of {targets}, and none of them reaches it: {how}",
        "into": f"nobody reaches {targets} (tried: {sources}), but it reaches others: {how}",
        "out_of": f"{sources} reaches nobody (tried: {targets}), but others reach it: {how}",
        "between": f"{sources} and {targets} do not reach each other: {how}",
        "one_way": f"{sources} cannot reach {targets}" + (", but the other way works" if back else "") + f": {how}",
    }[group.kind]
    if result == "silent":
        several = group.kind == "alone" or len(group.targets) > 1
        whose = "these addresses" if several else f"the address of {targets}"
        cause = (
            f"nobody answers on the wire (ARP, neighbour discovery) for {whose}: down, on another network (VLAN,"
            " cable), or cluster_address is wrong"
        )
    elif result == "refused":
        cause = (
            f"a machine answers at the address but refuses every port: a firewall that rejects, or the address"
            f" belongs to another machine than {targets if group.kind != 'alone' else sources}"
        )
    elif group.kind == "into" or (group.kind == "one_way" and back):
        cause = f"{firewalls(group.targets, 'reject' if result == 'unreachable' else 'drop')} new connections" + (
            f" from {sources}" if group.kind == "one_way" else ""
        )
    elif group.kind == "out_of":
        cause = f"a firewall on {one} filters what goes out, or replies do not come back to it (its route, its address)"
    elif group.kind == "alone":
        cause = f"{one} is on the wrong network: cluster_address or cluster_interface, cable, VLAN, or its firewall"
    elif group.kind == "all":
        cause = "firewalls on all nodes, a switch that separates its ports, or addresses of the wrong network"
    elif group.kind == "between":
        cause = "a switch, VLAN or router between the two sides, or firewalls that know only one of them"
    else:
        cause = f"{firewalls(group.targets)} or between, or no route from {sources}"
    if result == "unreachable" and group.kind in ("alone", "between", "all"):
        cause += "; a firewall or a router says so"
    checked = joined_addresses(group, address)
    remedy = {
        "into": f"on {targets}: nft list ruleset, ufw status, firewall-cmd --list-all; let the cluster's addresses in"
        " (playbooks/network.yml with firewall_mode does)",
        "one_way": f"on {targets}: nft list ruleset, ufw status, firewall-cmd --list-all; let {sources} in"
        " (playbooks/network.yml with firewall_mode does)",
        "out_of": f"on {one}: nft list ruleset (output), ip route, ip rule",
    }.get(
        group.kind,
        f"check {checked} with ip addr on the nodes, then VLAN and port isolation on the switches, then firewalls"
        " (nft list ruleset)",
    )
    return measured, cause, remedy


def firewalls(names: list[str], does: str = "", the: bool = False) -> str:
    """A firewall on n1 drops, but firewalls on n1, n2 drop."""
    one = "the firewall" if the else "a firewall"
    several = "the firewalls" if the else "firewalls"
    return f"{one if len(names) == 1 else several} on {shown(names)}" + (f" {verb(does, len(names))}" if does else "")


def joined_addresses(group: Group, address: Callable[[str], str]) -> str:
    names = ordered({*group.sources} if group.kind == "alone" else {*group.sources, *group.targets})
    listed = [f"{name} {address(name)}" for name in names[:4]]
    return ", ".join(listed) + (" ..." if len(names) > len(listed) else "")


def ports(pinned: bool, every: bool, result: str, names: list[str]) -> tuple[str, str]:
    """Cause and remedy where some ports of a node are open and others are not."""
    targets = shown(names)
    does = verb("reject" if result in ("refused", "unreachable") else "drop", len(names))
    if not pinned and every:
        return (
            f"{firewalls(names, 'have', the=True)} a list of ports and {does} the rest; NCCL, Gloo and ZMQ take random"
            " ports",
            f"let every TCP port in from the cluster's nodes on {targets} (firewall_mode: trusted_cluster), or"
            " narrow the range and open it (strict_ports)",
        )
    if not pinned:
        return (
            f"{firewalls(names, 'open', the=True)} a narrower range than net.ipv4.ip_local_port_range has",
            "open the whole range between the nodes, or narrow the kernel's to it (firewall_mode: strict_ports does)",
        )
    return (
        f"{firewalls(names, 'open', the=True)} the kernel's range of random ports but {does} these",
        f"open them on {targets} to the cluster's nodes (playbooks/network.yml -e firewall_show=true lists them)",
    )


def mtu(largest: int, interfaces: Mapping[str, int | None]) -> str:
    """Who is in the way, by the largest packet that came through and what the interfaces say of themselves."""
    lower = ordered([name for name, size in interfaces.items() if size and size <= largest])
    sizes = {size for size in interfaces.values() if size}
    if lower and len(sizes) > 1:
        where = "its interface" if len(lower) == 1 else "their interfaces"
        others = "the other has" if len(interfaces) - len(lower) == 1 else "the others have"
        return f"{do(lower, 'have')} an MTU of {largest} on {where}, {others} {max(sizes)}"
    if not largest:
        return "packets with DF get lost whatever their size: a firewall that drops ICMP, or a broken path"
    usual = " (the default of switches that do not pass jumbo frames)" if largest in (1500, 1504, 1518) else ""
    return f"a switch port, tunnel or bridge between them passes {largest} bytes only{usual}"


def slow(group: Group, links: Mapping[str, int | None]) -> str:
    known = {name: speed for name, speed in links.items() if speed}
    if len(set(known.values())) > 1:
        slowest = min(known, key=lambda name: known[name])
        return f"the link of {slowest} runs at {known[slowest]} Mbit/s"
    if group.kind in ("into", "alone"):
        return f"the link, driver or processor of {group.targets[0] if group.kind == 'into' else group.sources[0]}"
    if group.kind == "out_of":
        return f"the link, driver or processor of {group.sources[0]}"
    return "a link that came up slower, errors on a cable, a switch with too little between its ports, or other traffic"


def gloo(error: str, interfaces: Mapping[str, str | None]) -> str:
    if not all(interfaces.values()):
        return "GLOO_SOCKET_IFNAME is not set there, so Gloo takes the address that the node's name means"
    told = ", ".join(sorted({str(interface) for interface in interfaces.values()}))
    if "imed out" in error or "imeout" in error:
        return f"the ranks did not find each other: random ports are closed, or Gloo is on the wrong interface ({told})"
    return f"the interface that Gloo uses ({told}), or a port between the two nodes"


# --- the table -------------------------------------------------------------------------------------------------------


def table(report: Mapping[str, Any]) -> str:
    """A summary, a matrix where it is small, then what is not as it should be."""
    nodes, matrix = report["nodes"], report["matrix"]
    bad = [
        (source, target)
        for source, row in matrix.items()
        for target, cell in row.items()
        if cell["status"] in ("warn", "fail")
    ]
    tested = sum(cell["status"] != "skip" for row in matrix.values() for cell in row.values())
    counts = ", ".join(f"{report['counts'][status]} {status}" for status in ("fail", "warn", "pass", "skip"))
    if tested:
        directions = f"{count(tested, 'direction')} tested, {len(bad)} of them bad"
    else:
        directions = "no direction between nodes was tested"
    lines = [f"network: {VERDICTS[report['verdict']]}: {count(len(nodes), 'node')}, {directions}; checks: {counts}"]
    for name, unit in (("latency_ms", "ms"), ("clock_offset_s", "s"), ("bandwidth_mbit_s", "Mbit/s")):
        if name in report["worst"]:
            worst = report["worst"][name]
            value = f"{worst['value']:.0f}" if unit == "Mbit/s" else f"{worst['value']:.3g}"
            lines.append(
                f"  worst {name.rsplit('_', 2 if unit == 'Mbit/s' else 1)[0].replace('_', ' ')}: {value} {unit},"
                f" {worst['pair'][0]} to {worst['pair'][1]}"
            )
    if "rdma_gb_s" in report["worst"]:
        worst = report["worst"]["rdma_gb_s"]
        lines.append(f"  slowest rail: {worst['value']:.1f} GB/s, {worst['pair'][0]} to {worst['pair'][1]}")
    lines += [f"  slowest over NCCL: {speed(run)}" for run in slowest(report["nccl"])]
    for key, words in (("missing", "not measured"), ("not_in_this_run", "not in this run, so not tested")):
        if report[key]:
            lines.append(f"  {words}: {shown(report[key])}")
    untested: dict[str, list[str]] = {}
    for check in report["checks"]:
        if check["left"]:
            untested.setdefault(check["left"], []).append(check["id"])
    lines += [f"  {', '.join(names)}: {why}" for why, names in untested.items()]
    if 1 < len(nodes) <= _MATRIX_NODES:
        lines += ["", *_small_matrix(nodes, matrix)]
    for finding in report["findings"]:
        reports = f" [{', '.join(finding['group'])}]" if finding["group"] else ""
        accepted = " (accepted)" if finding["accepted"] else ""
        where = shown(finding["nodes"]) + (f" -> {shown(finding['targets'])}" if finding["targets"] else "")
        lines += [
            "",
            f"{finding['status'].upper()} {finding['check']}{reports}{accepted} on {where}",
            f"  measured: {finding['measured']}",
            f"  expected: {finding['expected']}",
            f"  cause:    {finding['cause']}",
            f"  remedy:   {finding['remedy']}",
        ]
    return "\n".join(lines)


def _small_matrix(nodes: list[str], matrix: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    rows = [["from \\ to", *nodes]]
    for source in nodes:
        row = [source]
        for target in nodes:
            cell = matrix.get(source, {}).get(target)
            if cell is None:
                row.append("" if source == target else "-")
            elif cell["status"] == "pass" and "ms" in cell:
                speed = f" {cell['mbit_s']}M" if "mbit_s" in cell else ""
                rails = f" {cell['rdma_gb_s']:.1f}GB/s" if "rdma_gb_s" in cell else ""
                row.append(f"{cell['ms']:.1f}ms{speed}{rails}")
            else:
                row.append(_SYMBOLS[cell["status"]])
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(nodes) + 1)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
