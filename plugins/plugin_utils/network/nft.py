"""A node's rules as text for nft: one table of its own, replaced in one step. Other tables are not touched."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

TABLE = "inet ironrack"
_INDENT = "        "
_INTERFACE = re.compile(r"[A-Za-z0-9_.@-]{1,15}")
_FAMILIES = ((4, "ip", "ipv4_addr"), (6, "ip6", "ipv6_addr"))

# Echo requests, which are limited for each source: whoever floods a node takes nothing from the others, for whom it is
# how they find out the MTU. A preflight asks a node some twenty times. They come before what is established, as a flood
# soon is.
_ECHO_SET = ("size 65535", "flags dynamic,timeout", "timeout 10s")
_ECHO_LIMIT = "limit rate 100/second burst 200 packets"
_ECHO = (
    *(f"{icmp} type echo-request update @echo_{version} {{ {word} saddr {_ECHO_LIMIT} }} accept"
      for icmp, version, word in (("icmp", 4, "ip"), ("icmpv6", 6, "ip6"))),
    "icmp type echo-request drop",
    "icmpv6 type echo-request drop",
)  # fmt: skip

# Path MTU discovery, neighbours and routers: without them connections hang or nothing is found at all.
_CONTROL = (
    "icmp type { destination-unreachable, time-exceeded, parameter-problem } accept",
    "icmpv6 type { destination-unreachable, packet-too-big, time-exceeded, parameter-problem } accept",
    "icmpv6 type { nd-router-solicit, nd-router-advert, nd-neighbor-solicit, nd-neighbor-advert,"
    " ind-neighbor-solicit, ind-neighbor-advert, mld-listener-query, mld-listener-report, mld-listener-done,"
    " mld2-listener-report } accept",
    "ip protocol igmp accept",
    "ip6 saddr fe80::/10 udp sport 547 udp dport 546 accept",
)


# The same nodes are in the rules of each.
_network = lru_cache(maxsize=8192)(ipaddress.ip_network)


def render(found: Mapping[str, Any]) -> str:
    """The ruleset of one node. The first two lines make it the same whether the table was there or not."""
    sets: dict[str, tuple[str, list[str]]] = {}
    lines: list[str] = []
    # What a DHCP server sends unasked. The cluster's interface does without: clients see offers before the firewall
    # does, and a renewed lease is a reply.
    lease = f'iifname != "{_name(found["interface"])}" ' if found["interface"] else ""
    for rule in found["rules"]:
        lines += _rule(rule, sets)
    text = [
        f"# Managed by ironrack: the firewall of {found['host']}, {found['mode']}. Changes here are lost.",
        f"table {TABLE}",
        f"delete table {TABLE}",
        f"table {TABLE} {{",
    ]
    for name, (kind, elements) in sorted(sets.items()):
        text += [
            f"    set {name} {{",
            f"{_INDENT}type {kind}",
            f"{_INDENT}flags interval",
            f"{_INDENT}elements = {{ {', '.join(elements)} }}",
            "    }",
            "",
        ]
    for version, _, kind in _FAMILIES:
        text += [
            f"    set echo_{version} {{",
            *(f"{_INDENT}{line}" for line in (f"type {kind}", *_ECHO_SET)),
            "    }",
            "",
        ]
    text += [
        "    chain input {",
        f"{_INDENT}type filter hook input priority filter; policy drop;",
        f'{_INDENT}iifname "lo" accept',
        *(f"{_INDENT}{line}" for line in _ECHO),
        f"{_INDENT}ct state established,related accept",
        *(f"{_INDENT}{line}" for line in _CONTROL),
        f"{_INDENT}{lease}udp sport 67 udp dport 68 accept",
        f"{_INDENT}ct state invalid drop",
        *(f'{_INDENT}iifname "{_name(name)}" accept' for name in found["trusted_interfaces"]),
        *(f"{_INDENT}{line}" for line in lines),
        f"{_INDENT}counter drop",
        "    }",
        "}",
        "",
    ]
    return "\n".join(text)


def _rule(rule: Mapping[str, Any], sets: dict[str, tuple[str, list[str]]]) -> list[str]:
    """One line for each family that the rule's networks belong to."""
    networks = [_network(entry) for entry in rule["networks"]]
    lines: list[str] = []
    if rule["ports"] == []:
        return lines
    for version, word, kind in _FAMILIES:
        family: list[Any] = [network for network in networks if network.version == version]
        if not family:
            continue
        elements = _apart(family)
        interface = f'iifname "{_name(rule["interface"])}" ' if rule["interface"] else ""
        source = (
            ""
            if elements in (["0.0.0.0/0"], ["::/0"])
            else f"{word} saddr @{_set(sets, rule, version, kind, elements)} "
        )
        everybody = "" if source else f"meta nfproto ipv{version} "
        lines.append(
            f"{interface}{everybody}{source}{_ports(rule['protocol'], rule['ports'])} accept"
            f' comment "{_comment(rule["purpose"])}"'
        )
    return lines


def _set(
    sets: dict[str, tuple[str, list[str]]], rule: Mapping[str, Any], version: int, kind: str, elements: list[str]
) -> str:
    """The name of the set that holds the elements: rules with the same sources share one."""
    for number in range(1, 1000):
        name = f"{rule['source']}{'' if number == 1 else f'_{number}_'}_{version}"
        if sets.setdefault(name, (kind, elements)) == (kind, elements):
            return name
    raise ValueError(f"too many sets named {rule['source']}")


def _apart(networks: list[Any]) -> list[str]:
    """In order, without those that lie in another: overlapping intervals are an error in a set."""
    kept: list[Any] = []
    # A network sorts before those that lie in it.
    for network in sorted(set(networks)):
        # Nothing lies in a single address: asked first, for nodes by the hundred.
        if not kept or kept[-1].prefixlen == network.max_prefixlen or not network.subnet_of(kept[-1]):
            kept.append(network)
    return [_short(network) for network in kept]


def _short(network: Any) -> str:
    return str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)


def _name(interface: str) -> str:
    """Between quotes nft takes anything, and a star as a wildcard."""
    if not _INTERFACE.fullmatch(interface):
        raise ValueError(f"{interface!r} is not the name of an interface")
    return interface


def _ports(protocol: str, ports: Sequence[Sequence[int]] | None) -> str:
    if ports is None:
        return f"meta l4proto {protocol}"
    written = [str(low) if low == high else f"{low}-{high}" for low, high in merged(ports)]
    return f"{protocol} dport {written[0] if len(written) == 1 else '{ ' + ', '.join(written) + ' }'}"


def merged(ports: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted((low, high) for low, high in ports):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def _comment(text: str) -> str:
    """nft takes up to 128 bytes between quotes, without a quote inside."""
    return text.replace('"', "'").replace("\\", "/").encode("ascii", "replace").decode()[:120]
