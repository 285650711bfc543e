# SPDX-License-Identifier: Apache-2.0
"""What the kernel knows of addresses, routes and neighbours, asked without a program."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct

# linux/rtnetlink.h, linux/neighbour.h, linux/if_addr.h
RTM_NEWADDR, RTM_GETADDR = 20, 22
RTM_NEWROUTE, RTM_GETROUTE = 24, 26
RTM_NEWNEIGH, RTM_GETNEIGH = 28, 30
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS = 1, 2, 8
IFA_F_DADFAILED = 0x08
RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC, RTA_MULTIPATH, RTA_TABLE, RTA_VIA = 1, 4, 5, 6, 7, 9, 15, 18
RT_TABLE_MAIN, RTN_UNICAST = 254, 1
NDA_DST, NDA_LLADDR = 1, 2
NEIGHBOUR_STATES = {
    0x01: "incomplete",
    0x02: "reachable",
    0x04: "stale",
    0x08: "delay",
    0x10: "probe",
    0x20: "failed",
    0x40: "noarp",
    0x80: "permanent",
}
SIZE = 1 << 18


def attributes(data):
    """Type -> value of a run of attributes."""
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def messages(conn):
    """(type, payload) of the answer to one request; OSError with the kernel's number where it refuses."""
    while True:
        data = conn.recv(SIZE)
        while len(data) >= 16:
            length, kind, flags = struct.unpack_from("=IHH", data)
            if kind == NLMSG_DONE or length < 16:
                return
            if kind == NLMSG_ERROR:
                number = -struct.unpack_from("=i", data, 16)[0]
                raise OSError(number, "the kernel refused the question")
            yield kind, data[16:length]
            if not flags & 0x2:  # one message, not one of several
                return
            data = data[(length + 3) & ~3 :]


def ask(kind, body, flags):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as conn:
        conn.settimeout(5)
        conn.bind((0, 0))
        conn.send(struct.pack("=IHHII", 16 + len(body), kind, NLM_F_REQUEST | flags, 1, 0) + body)
        yield from messages(conn)


def text(raw):
    return str(ipaddress.ip_address(raw)) if raw and len(raw) in (4, 16) else None


def number(raw):
    return struct.unpack("=I", raw)[0] if raw else None


def name_of(index):
    """Name of an interface by its number; None when it went meanwhile."""
    if index:
        with contextlib.suppress(OSError):
            return socket.if_indextoname(index)
    return None


def addresses():
    """All addresses: {interface, address, prefix, family, dad_failed}."""
    found = []
    for kind, payload in ask(RTM_GETADDR, struct.pack("=BxHiII", 0, 0, 0, 0, 0), NLM_F_DUMP):
        if kind != RTM_NEWADDR:
            continue
        family, prefix, flags, _, index = struct.unpack_from("=BBBBI", payload)
        parts = attributes(payload[8:])
        # On a point-to-point link ADDRESS is the other end's.
        address = text(parts.get(IFA_LOCAL, parts.get(IFA_ADDRESS)))
        flags = number(parts.get(IFA_FLAGS)) or flags
        if address:
            found.append(
                {
                    "interface": name_of(index),
                    "address": address,
                    "prefix": prefix,
                    "family": 4 if family == socket.AF_INET else 6,
                    "dad_failed": bool(flags & IFA_F_DADFAILED),
                }
            )
    return found


def gateway(parts):
    if RTA_VIA in parts:  # a gateway of the other family
        return text(parts[RTA_VIA][2:])
    return text(parts.get(RTA_GATEWAY))


def hops(parts):
    """(interface, gateway) of each next hop of a route."""
    several = parts.get(RTA_MULTIPATH, b"")
    if not several:
        yield name_of(number(parts.get(RTA_OIF))), gateway(parts)
    while len(several) >= 8:
        length, _, _, index = struct.unpack_from("=HBBi", several)
        if length < 8:
            break
        yield name_of(index), gateway(attributes(several[8:length]))
        several = several[(length + 3) & ~3 :]


def default_routes():
    """Of the main table: {family, dev, gateway, metric, src}."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 0, 0, 0, 0, 0)
        for kind, payload in ask(RTM_GETROUTE, body, NLM_F_DUMP):
            if kind != RTM_NEWROUTE:
                continue
            prefix, table, route_type = payload[1], payload[4], payload[7]
            parts = attributes(payload[12:])
            table = number(parts.get(RTA_TABLE)) or table
            if payload[0] != family or prefix or table != RT_TABLE_MAIN or route_type != RTN_UNICAST:
                continue
            for dev, via in hops(parts):
                found.append(
                    {
                        "family": 4 if family == socket.AF_INET else 6,
                        "dev": dev,
                        "gateway": via,
                        "metric": number(parts.get(RTA_PRIORITY)) or 0,
                        "src": text(parts.get(RTA_PREFSRC)),
                    }
                )
    return found


def route_to(address):
    """{dev, src, gateway} that the kernel takes to an address; OSError where there is no way."""
    target = ipaddress.ip_address(address)
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    raw = target.packed
    body = struct.pack("=BBBBBBBBI", family, len(raw) * 8, 0, 0, 0, 0, 0, 0, 0)
    body += struct.pack("=HH", 4 + len(raw), RTA_DST) + raw
    for kind, payload in ask(RTM_GETROUTE, body, 0):
        if kind == RTM_NEWROUTE:
            parts = attributes(payload[12:])
            dev, via = next(hops(parts), (None, None))
            return {"dev": dev, "src": text(parts.get(RTA_PREFSRC)), "gateway": via}
    return {"dev": None, "src": None, "gateway": None}


def neighbours():
    """(interface, address) -> {mac, state} of what the kernel remembers of its links."""
    found = {}
    for kind, payload in ask(RTM_GETNEIGH, struct.pack("=BxxxiHBB", 0, 0, 0, 0, 0), NLM_F_DUMP):
        if kind != RTM_NEWNEIGH:
            continue
        _, index, state = struct.unpack_from("=BxxxiH", payload)
        parts = attributes(payload[12:])
        address = text(parts.get(NDA_DST))
        if address:
            mac = ":".join(f"{byte:02x}" for byte in parts.get(NDA_LLADDR, b"")) or None
            found[(name_of(index), address)] = {"mac": mac, "state": NEIGHBOUR_STATES.get(state)}
    return found
