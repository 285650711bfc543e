#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: net_probe
short_description: Test the network from this node to its peers
version_added: 0.1.0
description:
  - >-
    Connects to all peers at once and describes what came of it: TCP ports, who answered, the largest packet that gets
    through unbroken, the difference of the clocks, bandwidth; and what this node itself says of its name, addresses,
    routes and of others that use its address.
  - >-
    It measures and does not judge. Nothing that it finds makes it fail. What could not be measured is null or has an
    C(error).
  - Peers answer by M(ironrack.vllm.net_listener), which has to run there before.
author:
  - The ironrack authors
options:
  node:
    description: Name of this node, as the peers know it.
    type: str
    required: true
  address:
    description: Its cluster address, an IPv4 or IPv6 literal.
    type: str
    required: true
  interface:
    description: Its cluster interface. Empty, or when there is none of this name, the one that has O(address).
    type: str
    default: ""
  peers:
    description: >-
      Name of each peer to C(address) (a literal of the same family as O(address)), C(listener) (as
      M(ironrack.vllm.net_listener) returned it there, or null) and C(ports) (a list of pinned TCP ports to try).
    type: dict
    default: {}
  timeout:
    description: >-
      Seconds to wait for a connection, a name and an answer, 0.1 to 60. All peers and ports are tried at the same time,
      so a whole run takes little longer than this, bandwidth left out.
    type: float
    default: 3
  mtu:
    description: Find out whether packets of the interface's MTU get through.
    type: bool
    default: true
  clock:
    description: Compare the clocks.
    type: bool
    default: true
  duplicates:
    description: Ask on the link whether somebody else has O(address). Needs root.
    type: bool
    default: true
  bandwidth:
    description: >-
      C(pairs) (names of the peers to send to), C(seconds) for each (default 3), C(streams) at the same time (default 4)
      and C(wait) (seconds for all of them together; the default grows with the number of peers). Empty, or without
      C(pairs), nothing is measured. A node takes part in one measurement at a time, also as the one that is sent to.
    type: dict
    default: {}
  path:
    description: O(ironrack.vllm.net_listener#module:path) of this node's own process, for O(bandwidth).
    type: path
    default: /run/ironrack/net-listener.json
attributes:
  check_mode:
    description: Changes nothing in any mode.
    support: full
  diff_mode:
    description: Changes nothing in any mode.
    support: none
seealso:
  - module: ironrack.vllm.net_listener
notes:
  - Connections to ports that are held by the listener end with a reset, so that no port stays in TIME_WAIT.
"""

EXAMPLES = r"""
- name: Try the other node
  ironrack.vllm.net_probe:
    node: n1
    address: 10.77.1.11
    interface: eth1
    peers:
      n2:
        address: 10.77.1.12
        listener: "{{ hostvars['n2'].listener.listener }}"
        ports: [6379, 8000, 29501]
  register: network
"""

RETURN = r"""
json:
  description: RV(probe) as text, which Ansible need not look through for each of many nodes.
  returned: always
  type: str
probe:
  description: What was found.
  returned: always
  type: dict
  contains:
    node:
      description: O(node).
      type: str
    address:
      description: O(address).
      type: str
    family:
      description: 4 or 6.
      type: int
    started:
      description: When the run began, in seconds since 1970 by this node's clock.
      type: float
    seconds:
      description: How long it took.
      type: float
    interface:
      description: >-
        The cluster interface, null when there is none: C(name), C(mtu), C(mac), C(speed_mbit) (null for virtual
        ones), C(up), C(addresses) (as C(address/prefix)), C(has_address) (whether O(address) is among them),
        C(dad_failed) (those that the kernel does not use because somebody else had them before). C(mac) is null where
        the interface has none.
      type: dict
    addresses:
      description: All addresses of this node, of whatever interface.
      type: list
      elements: str
    hostname:
      description: >-
        C(name) the kernel knows, C(resolves) (addresses the node finds for it) and C(error).
      type: dict
    routes:
      description: Default routes with C(family), C(dev), C(gateway), C(metric), C(src).
      type: list
      elements: dict
    duplicate:
      description: MAC addresses of others that have O(address); null when it could not be found out.
      type: list
      elements: str
    duplicate_error:
      description: Why it could not be found out, or null.
      type: str
    ephemeral:
      description: First and last port of the kernel's range; null when it cannot be read.
      type: list
      elements: int
    peers:
      description: Name of each peer to what was found of it.
      type: dict
      contains:
        address:
          description: The address that was tried.
          type: str
        tested:
          description: Whether the peer has a listener.
          type: bool
        why:
          description: Why not, or null.
          type: str
        name:
          description: C(resolves) (addresses this node finds for the peer's name) and C(error).
          type: dict
        identity:
          description: >-
            Name of the node that answered; the name of another one if any port was answered by another; null if
            nobody told a name.
          type: str
        mac:
          description: MAC address this node knows of the peer's address; null when it is behind a gateway or unknown.
          type: str
        neighbour:
          description: State of the kernel's entry for it, C(reachable), C(stale), C(failed) and so on, or null.
          type: str
        route:
          description: C(dev), C(src), C(gateway) of the way to it; C(error) where there is none.
          type: dict
        tcp:
          description: >-
            One entry a port: C(port), C(kind) (C(pinned), C(random), C(control)), C(result) (C(open), C(refused),
            C(timeout), C(unreachable), C(error)), C(errno), C(error), C(ms) (milliseconds), C(answered_by).
          type: list
          elements: dict
        udp:
          description: C(result) (as of a TCP port) and C(ms) of a small datagram; null without a listener.
          type: dict
        mtu:
          description: >-
            C(tried) (bytes of the IP packet), C(ok) (null when no packet of any size was answered), C(largest) (bytes
            of the largest packet that was answered; a usual MTU when it is at most 4 bytes less), C(by) (C(icmp),
            C(udp)), C(error). Null without O(mtu).
          type: dict
        clock:
          description: C(offset_s) (the peer's clock minus this node's) and C(rtt_s), in seconds; null if unknown.
          type: dict
        bandwidth:
          description: >-
            C(mbit_s), C(seconds), C(streams) and C(tool) (C(iperf3), C(sockets)), or C(error); null when not asked for.
          type: dict
"""

import asyncio
import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import random
import secrets
import select
import socket
import struct
import subprocess
import threading
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils import net_wire, netlink

SYS = "/sys/class/net"
NAME_THREADS = 32
CLOCK_ROUNDS = 8
CLOCKS_TOGETHER = 8
# Waits for the answer to a datagram: nodes limit how many echo requests they answer, so a lost one tells little.
PATIENT = (0.3, 0.5, 0.8)
QUICK = (0.25, 0.35)
# Sizes that a path is often limited to: Ethernet, tunnels, IP over InfiniBand, the least of IPv6.
COMMON_SIZES = (1500, 9000, 1450, 8950, 1400, 4092, 2044, 1280)
SMALL = 128
TAG = 4
# Headers before the data of a datagram: IP and UDP or ICMP.
OVERHEAD = {4: 28, 6: 48}
LARGEST = 65535
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES, errno.EPERM)
# Before Python 3.11 the one is no kind of the other.
FAILURES = (OSError, asyncio.TimeoutError)
ETHERNET = 1
ETH_P_ARP, ETH_P_IPV6, PACKET_OUTGOING, SO_ATTACH_FILTER = 0x0806, 0x86DD, 4, 26
ECHO_REQUEST, ECHO_REPLY = {4: 8, 6: 128}, {4: 0, 6: 129}
SOLICITATION, ADVERTISEMENT = 135, 136
DUPLICATE_WAITS = (0.15, 0.25, 0.6)
LISTENER_KEYS = ("node", "token", "control", "udp", "held", "random", "iperf3")
MOST = {"seconds": 600, "streams": 64, "wait": 3600}


class ProbeError(Exception):
    """A problem that names the option and what to do."""


def kind_of(error):
    """The word for what became of an attempt."""
    if isinstance(error, (asyncio.TimeoutError, socket.timeout)) or error.errno == errno.ETIMEDOUT:
        return "timeout"
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    return "unreachable" if error.errno in UNREACHABLE else "error"


def hardware(mac):
    """A hardware address; None where there is none (routed, point-to-point), which the kernel writes as zeros."""
    return mac if mac and mac.strip("0:") else None


def milliseconds(since):
    return round((time.monotonic() - since) * 1000, 2)


# --- this node -------------------------------------------------------------------------------------------------------


def read(*parts):
    try:
        with open(os.path.join(SYS, *parts), encoding="utf-8") as handle:
            return handle.read().strip()
    except OSError:  # a speed cannot be read while the link is down
        return ""


def hardware_below(name, depth=3):
    """Whether a device is behind an interface. The others make up a speed."""
    folder = os.path.join(SYS, name)
    if os.path.exists(os.path.join(folder, "device")):
        return True
    with contextlib.suppress(OSError):
        lower = [entry[6:] for entry in os.listdir(folder) if entry.startswith("lower_")]
        return depth > 0 and any(hardware_below(entry, depth - 1) for entry in lower)
    return False


def describe_interface(name, address):
    own = ipaddress.ip_address(address)
    found = netlink.addresses()
    if not name or not os.path.isdir(os.path.join(SYS, name)):
        name = next((item["interface"] for item in found if ipaddress.ip_address(item["address"]) == own), "")
    if not name:
        return None
    here = [item for item in found if item["interface"] == name]
    speed = read(name, "speed")
    return {
        "name": name,
        "mtu": int(read(name, "mtu") or 0),
        "mac": hardware(read(name, "address")),
        "speed_mbit": int(speed) if speed.isdigit() and int(speed) and hardware_below(name) else None,
        "up": bool(int(read(name, "flags") or "0", 16) & 1) and read(name, "carrier") == "1",
        "addresses": [f"{item['address']}/{item['prefix']}" for item in here],
        "has_address": any(ipaddress.ip_address(item["address"]) == own for item in here),
        "dad_failed": [item["address"] for item in here if item["dad_failed"]],
    }


def ephemeral_range():
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as handle:
            return [int(word) for word in handle.read().split()]
    except (OSError, ValueError):
        return None


class Names:
    """Looks names up while other things are measured: a name service that is away takes its time."""

    def __init__(self, names, seconds):
        self.end = time.monotonic() + seconds
        self.seconds = seconds
        self.waiting = list(reversed(names))
        self.answers = {}
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in names[:NAME_THREADS]]
        for thread in self.threads:
            thread.start()

    def work(self):
        while True:
            try:
                name = self.waiting.pop()
            except IndexError:
                return
            try:
                found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                # The order tells which one programs take.
                self.answers[name] = {"resolves": list(dict.fromkeys(item[4][0] for item in found)), "error": None}
            except (OSError, UnicodeError) as error:
                text = getattr(error, "strerror", None) or str(error)
                self.answers[name] = {"resolves": [], "error": text}

    def get(self, name):
        for thread in self.threads:
            thread.join(max(0.0, self.end - time.monotonic()))
        missing = {"resolves": [], "error": f"no answer within {self.seconds:g} seconds"}
        return self.answers.get(name, missing)


# --- who else has the address ----------------------------------------------------------------------------------------


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def question_of(own, mac):
    """(protocol, link address to send to, packet) that asks, from nobody, who has an address (RFC 5227, RFC 4862)."""
    if own.version == 4:
        packet = struct.pack("!HHBBH6s4s6s4s", ETHERNET, 0x0800, 6, 4, 1, mac, bytes(4), bytes(6), own.packed)
        return ETH_P_ARP, b"\xff" * 6, packet
    group = bytes.fromhex("ff0200000000000000000001ff") + own.packed[-3:]
    # The nonce keeps the kernel's own detection of loops out of it (RFC 7527).
    body = bytes(4) + own.packed + struct.pack("!BB6s", 14, 1, secrets.token_bytes(6))
    pseudo = bytes(16) + group + struct.pack("!IxxxB", len(body) + 4, 58)
    total = checksum(pseudo + struct.pack("!BBH", SOLICITATION, 0, 0) + body)
    message = struct.pack("!BBH", SOLICITATION, 0, total) + body
    header = struct.pack("!IHBB", 6 << 28, len(message), 58, 255) + bytes(16) + group
    return ETH_P_IPV6, b"\x33\x33" + group[-4:], header + message


def only_advertisements(sock):
    """A filter in the kernel, since all IPv6 traffic of the link would come here."""
    load, equal, answer = 0x30, 0x15, 0x06  # linux/bpf_common.h
    program = [
        (load, 0, 0, 6),  # next header
        (equal, 0, 3, 58),
        (load, 0, 0, 40),  # type of the ICMPv6 message
        (equal, 0, 1, ADVERTISEMENT),
        (answer, 0, 0, 0xFFFF),
        (answer, 0, 0, 0),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))


def claimant(own, data, sender):
    """MAC of who says that the address is its own; None for other packets."""
    if own.version == 4:
        if len(data) >= 28 and data[14:18] == own.packed:
            return data[8:14]
    elif len(data) >= 64 and data[6] == 58 and data[40] == ADVERTISEMENT and data[48:64] == own.packed:
        return sender
    return None


def duplicates(interface, address):
    """(MACs of others, why it could not be found out)."""
    own = ipaddress.ip_address(address)
    if interface is None:
        return None, f"no interface has the address {address}"
    name = interface["name"]
    if read(name, "type") != str(ETHERNET) or not interface["mac"]:
        return None, f"{name} is no Ethernet interface"
    mine = {read(entry, "address") for entry in os.listdir(SYS)}
    protocol, target, packet = question_of(own, bytes.fromhex(interface["mac"].replace(":", "")))
    try:
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as sock:
            if protocol == ETH_P_IPV6:
                only_advertisements(sock)
            sock.bind((name, protocol))
            others = set()
            for seconds in DUPLICATE_WAITS:
                sock.sendto(packet, (name, protocol, 0, 0, target))
                end = time.monotonic() + seconds
                while select.select([sock], [], [], max(0.0, end - time.monotonic()))[0]:
                    data, (_, _, direction, _, sender) = sock.recvfrom(2048)
                    mac = None if direction == PACKET_OUTGOING else claimant(own, data, sender)
                    if mac and any(mac):
                        others.add(":".join(f"{byte:02x}" for byte in mac))
            # Another interface of this node on the same link may answer as well.
            return sorted(others - mine), None
    except PermissionError:
        return None, "only root may listen on the link: run with become"
    except OSError as error:
        return None, f"{name}: {error.strerror}"


class Duplicates(threading.Thread):
    """The question takes a second; meanwhile other things go on."""

    def __init__(self, interface, address):
        super().__init__(daemon=True)
        self.arguments = (interface, address)
        self.start()

    def run(self):
        self.found = duplicates(*self.arguments)

    def get(self):
        self.join()
        return self.found


# --- packets that come back whole ------------------------------------------------------------------------------------


class Echo:
    """Asks a peer to send packets of a given size back. What of an answer tells it from others is its key."""

    def __init__(self, loop, sock, version):
        self.loop = loop
        self.sock = sock
        self.version = version
        self.expected = {}  # key -> future
        sock.setblocking(False)
        net_wire.never_fragment(sock, sock.family)
        loop.add_reader(sock, self.receive)

    def close(self):
        self.loop.remove_reader(self.sock)
        self.sock.close()

    def packet(self, key, size):
        raise NotImplementedError

    def send(self, address, packet):
        raise NotImplementedError

    def receive(self):
        raise NotImplementedError

    def answered(self, key, length):
        future = self.expected.get(key)
        if future and not future.done():
            future.set_result(length)

    async def ask(self, address, size, waits):
        """Milliseconds until a packet of this size (with its headers) was back; None where none came."""
        key = secrets.token_bytes(16)
        future = self.expected[key] = self.loop.create_future()
        packet = self.packet(key, size - OVERHEAD[self.version])
        try:
            for seconds in waits:
                start = time.monotonic()
                try:
                    self.send(address, packet)
                except OSError as error:
                    # Too big, or told so by a router about an earlier one.
                    if error.errno == errno.EMSGSIZE:
                        continue
                    if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
                        raise
                # Not all at the same moment: the peers' limit for echo requests holds for all nodes together.
                await asyncio.wait([future], timeout=seconds * random.uniform(0.9, 1.3))  # noqa: S311 - no secret
                if future.done():
                    return milliseconds(start) if future.result() == len(packet) else None
        finally:
            del self.expected[key]
        return None


class Icmp(Echo):
    """One socket for all peers."""

    def __init__(self, loop, version):
        family, protocol = (
            (socket.AF_INET, socket.IPPROTO_ICMP) if version == 4 else (socket.AF_INET6, socket.IPPROTO_ICMPV6)
        )
        try:
            sock = socket.socket(family, socket.SOCK_RAW, protocol)
        except PermissionError:  # not root: a kind of socket that some systems allow to everybody
            sock = socket.socket(family, socket.SOCK_DGRAM, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.with_header = version == 4 and sock.type == socket.SOCK_RAW
        super().__init__(loop, sock, version)

    def packet(self, key, size):
        body = key.ljust(size, b"\0")
        # The kernel fills in the checksum of ICMPv6, and all of an unprivileged socket's.
        head = struct.pack("!BBHHH", ECHO_REQUEST[self.version], 0, 0, os.getpid() & 0xFFFF, 1)
        total = checksum(head + body + b"\0" * (size % 2)) if self.version == 4 else 0
        return head[:2] + struct.pack("!H", total) + head[4:] + body

    def send(self, address, packet):
        self.sock.sendto(packet, (address, 0))

    def receive(self):
        with contextlib.suppress(OSError):
            while True:
                data = self.sock.recv(LARGEST)
                if self.with_header:
                    data = data[(data[0] & 15) * 4 :]
                if data[:1] == bytes([ECHO_REPLY[self.version]]):
                    self.answered(data[8:24], len(data))


class Udp(Echo):
    """A socket for one peer: the kernel then tells when the peer refuses."""

    def __init__(self, loop, version, address, port, token):
        sock = socket.socket(net_wire.address_family(address), socket.SOCK_DGRAM)
        self.head = net_wire.MAGIC + token.encode()
        super().__init__(loop, sock, version)
        try:
            sock.connect((address, port))
        except OSError:
            self.close()
            raise

    def packet(self, key, size):
        return (self.head + key).ljust(size, b"\0")

    def send(self, address, packet):
        self.sock.send(packet)

    def receive(self):
        try:
            while True:
                data = self.sock.recv(LARGEST)
                self.answered(data[len(self.head) :][:16], len(data))
        except BlockingIOError:
            return
        except OSError as error:
            for future in self.expected.values():
                if error.errno != errno.EMSGSIZE and not future.done():
                    future.set_exception(error)


async def largest(echo, address, top, rtt):
    """The largest size that comes back, or the usual one below it, when `top` does not and a small one does."""
    low, high = SMALL, top
    while True:
        low, high = await narrowed(echo, address, low, high, rtt)
        # Answers get lost, on a node that is very busy too: what is too large is asked for once more, with patience.
        if high == top or await echo.ask(address, high, PATIENT) is None:
            return low
        low, high = high, top


async def narrowed(echo, address, low, high, rtt):
    """(a size that comes back, one a little above it that does not)"""
    waits = [max(0.1, 5 * rtt / 1000), max(0.2, 10 * rtt / 1000)]
    for size in COMMON_SIZES:
        if low < size < high:
            if await echo.ask(address, size, waits) is None:
                high = size
                continue
            low = size
            # A link lets a little more through than its MTU says, for the tag of a VLAN.
            if size + TAG + 1 < high and await echo.ask(address, size + TAG + 1, waits) is None:
                return size, size + TAG + 1
    while high - low > 1:
        middle = (low + high) // 2
        if await echo.ask(address, middle, waits) is None:
            high = middle
        else:
            low = middle
    return low, high


# --- the peers -------------------------------------------------------------------------------------------------------


class Peer:
    """All that is tried with one peer."""

    def __init__(self, prober, name, values):
        self.prober = prober
        self.loop = prober.loop
        self.name = name
        self.address = values["address"]
        self.listener = values.get("listener") or None
        self.ports = values.get("ports") or []
        self.control = None  # its socket, kept open for the clock
        self.udp = self.loop.create_future()  # the Echo by UDP, None where that does not work
        self.told = []
        try:
            route = netlink.route_to(self.address)
        except OSError as error:
            route = {"dev": None, "src": None, "gateway": None, "error": os.strerror(error.errno or 0)}
        self.found = {
            "address": self.address,
            "tested": self.listener is not None,
            "why": None if self.listener else "not in this run",
            "name": None,
            "identity": None,
            "mac": None,
            "neighbour": None,
            "route": route,
            "tcp": [],
            "udp": None,
            "mtu": None,
            "clock": None,
            "bandwidth": None,
        }

    async def connect(self, port, kind, greeted):
        """Try a port; a listener says who it is."""
        entry = {"port": port, "kind": kind, "result": "open", "errno": None, "error": None, "answered_by": None}
        async with self.prober.limit:
            sock = socket.socket(net_wire.address_family(self.address), socket.SOCK_STREAM)
            sock.setblocking(False)
            start = time.monotonic()
            try:
                await self.reach(sock, port)
            except FAILURES as error:
                sock.close()
                entry.update(result=kind_of(error), errno=getattr(error, "errno", None))
                entry["error"] = os.strerror(entry["errno"]) if entry["errno"] else None
                entry["ms"] = milliseconds(start)
                return entry
            entry["ms"] = milliseconds(start)
            if greeted:
                net_wire.reset_on_close(sock)
                left = max(1.0, start + self.prober.timeout - time.monotonic())
                try:
                    greeting = await asyncio.wait_for(self.line(sock), left)
                    entry["answered_by"] = self.who(greeting)
                    if entry["answered_by"] is None:
                        entry["error"] = "connected, but no listener answered: something else did"
                    elif kind == "control" and entry["answered_by"] == self.name:
                        await asyncio.wait_for(self.belong(sock), left)
                except FAILURES as error:
                    entry["error"] = f"connected, but no listener answered: {kind_of(error)}"
            if kind == "control" and entry["answered_by"] == self.name and not entry["error"]:
                self.control = sock
            else:
                sock.close()
        return entry

    async def reach(self, sock, port):
        try:
            await asyncio.wait_for(self.loop.sock_connect(sock, (self.address, port)), self.prober.timeout)
        except asyncio.TimeoutError:  # noqa: UP041 - not the same thing before Python 3.11
            # On a node that is very busy the timer may come before the news.
            with contextlib.suppress(OSError):
                sock.getpeername()
                return
            raise

    async def line(self, sock):
        data = b""
        while not data.endswith(b"\n"):
            piece = await self.loop.sock_recv(sock, net_wire.LINE_LIMIT)
            if not piece or len(data) > net_wire.LINE_LIMIT:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            data += piece
        return net_wire.parse(data)

    async def belong(self, sock):
        """Show the token at once: the listener soon ends a conversation in which nobody does."""
        await self.loop.sock_sendall(sock, net_wire.line(token=self.listener["token"], op="clock"))
        await self.line(sock)

    def who(self, greeting):
        node = greeting.get("node")
        if not isinstance(node, str):
            return None
        same = greeting.get("id") == net_wire.identity(self.listener["token"])
        self.told.append(node if same or node != self.name else f"{node} of another run")
        return self.told[-1]

    async def try_udp(self):
        """A small datagram. Whatever comes of it, the search for the MTU may be waiting for it."""
        start = time.monotonic()
        took, result, echo = None, "timeout", None
        try:
            echo = Udp(self.loop, self.prober.version, self.address, self.listener["udp"], self.listener["token"])
            self.prober.echoes.append(echo)
            took = await echo.ask(self.address, SMALL, [self.prober.timeout * part for part in (0.1, 0.2, 0.4)])
            result = "timeout" if took is None else "open"
        except OSError as error:
            result = kind_of(error)
        self.found["udp"] = {"result": result, "ms": milliseconds(start) if took is None else took}
        self.udp.set_result(echo if result == "open" else None)

    async def ways(self):
        if self.prober.icmp:
            yield "icmp", self.prober.icmp
        echo = await self.udp if self.listener else None
        if echo:
            yield "udp", echo

    async def try_mtu(self, top):
        """What the path carries, by the first way that is answered at all."""
        found = {"tried": top, "ok": None, "largest": None, "by": None, "error": None}
        reasons = []
        async for by, echo in self.ways():
            try:
                if await echo.ask(self.address, top, PATIENT) is not None:
                    found.update(ok=True, largest=top, by=by)
                    break
                rtt = await echo.ask(self.address, SMALL, QUICK)
                if rtt is not None:
                    found.update(ok=False, largest=await largest(echo, self.address, top, rtt), by=by)
                    break
                reasons.append(f"{by}: no answer")
            except OSError as error:
                reasons.append(f"{by}: {error.strerror}")
        if found["by"] is None:
            found["error"] = "; ".join(reasons) or "no way to ask: run with become, so that echo requests can be sent"
        self.found["mtu"] = found

    async def try_ports(self):
        kinds = [(port, "pinned") for port in self.ports]
        if self.listener:
            kinds += [(port, "random") for port in self.listener["random"]]
            kinds.append((self.listener["control"], "control"))
        held = {port for port, kind in kinds if kind != "pinned"} | set((self.listener or {}).get("held", ()))
        self.found["tcp"] = await asyncio.gather(*(self.connect(port, kind, port in held) for port, kind in kinds))
        others = [name for name in self.told if name != self.name]
        self.found["identity"] = (others or self.told or [None])[0]

    async def try_clock(self):
        """Of several questions the one with the shortest way tells best."""
        if self.control is None:
            return
        async with self.prober.clocks:
            with contextlib.suppress(OSError, asyncio.TimeoutError, KeyError, TypeError):
                await asyncio.wait_for(self.ask_clock(), self.prober.timeout)
        self.control.close()

    async def ask_clock(self):
        question = net_wire.line(token=self.listener["token"], op="clock")
        for _ in range(CLOCK_ROUNDS):
            start, before = time.monotonic(), time.time()
            await self.loop.sock_sendall(self.control, question)
            answer = await self.line(self.control)
            rtt = time.monotonic() - start
            offset = (answer["t1"] + answer["t2"] - before - (before + rtt)) / 2
            if self.found["clock"] is None or rtt < self.found["clock"]["rtt_s"]:
                self.found["clock"] = {"offset_s": round(offset, 6), "rtt_s": round(rtt, 6)}


class Prober:
    """One run: everything at the same time, the clocks after it."""

    def __init__(self, options, interface):
        self.options = options
        self.interface = interface
        self.timeout = options["timeout"]
        self.version = ipaddress.ip_address(options["address"]).version
        self.echoes = []
        self.icmp = None

    async def run(self):
        self.loop = asyncio.get_running_loop()
        self.limit = asyncio.Semaphore(max(32, net_wire.open_files() - 64 - 2 * len(self.options["peers"])))
        self.clocks = asyncio.Semaphore(CLOCKS_TOGETHER)
        if self.options["mtu"]:
            with contextlib.suppress(OSError):
                self.icmp = Icmp(self.loop, self.version)
                self.echoes.append(self.icmp)
        top = min((self.interface or {}).get("mtu") or 1500, LARGEST)
        peers = [Peer(self, name, values) for name, values in self.options["peers"].items()]
        try:
            tasks = []
            for peer in peers:
                tasks.append(self.loop.create_task(peer.try_ports()))
                if peer.listener:
                    tasks.append(self.loop.create_task(peer.try_udp()))
                if self.options["mtu"]:
                    tasks.append(self.loop.create_task(peer.try_mtu(top)))
                await asyncio.sleep(0)  # answers to the first ones are seen while the last ones are started
            await asyncio.gather(*tasks)
            if self.options["clock"]:
                await asyncio.gather(*(peer.try_clock() for peer in peers))
        finally:
            for echo in self.echoes:
                echo.close()
        return {peer.name: peer.found for peer in peers}


# --- bandwidth -------------------------------------------------------------------------------------------------------


class Control:
    """A conversation with a listener."""

    def __init__(self, address, port, token, timeout):
        self.token = token
        self.target = (address, port)
        self.sock = socket.create_connection(self.target, timeout)
        net_wire.reset_on_close(self.sock)
        net_wire.read_line(self.sock)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def ask(self, **question):
        self.sock.sendall(net_wire.line(token=self.token, **question))
        answer = net_wire.read_line(self.sock)
        if "error" in answer:
            raise net_wire.WireError(answer["error"])
        return answer


class Bandwidth:
    """Measures to one peer after the other. Nobody coordinates: it takes both ends' locks, or tries another peer."""

    def __init__(self, options, found, iperf3):
        settings = options["bandwidth"]
        self.node = options["node"]
        self.address = options["address"]
        self.timeout = options["timeout"]
        self.peers = options["peers"]
        self.found = found
        self.iperf3 = iperf3
        self.path = options["path"]
        self.seconds = settings.get("seconds", 3)
        self.streams = settings.get("streams", 4)
        names = sorted(settings.get("pairs", []))
        # Each begins after its own name, so that not all begin with the same one.
        self.left = [name for name in names if name > self.node] + [name for name in names if name < self.node]
        self.wait = settings.get("wait", 30 + 4 * (self.seconds + 1) * max(len(names), len(self.peers)))

    def run(self):
        for name in list(self.left):
            control = [entry for entry in self.found[name]["tcp"] if entry["kind"] == "control"]
            if not control or control[0]["answered_by"] != name:
                self.done(name, {"error": "not measured: its listener does not answer"})
        try:
            with open(self.path, "rb") as handle:
                own = net_wire.parse(handle.read())
            limit = time.monotonic() + self.wait
            while self.left and time.monotonic() < limit:
                with Control(self.address, own["control"], own["token"], self.timeout) as here:
                    if here.ask(op="acquire", who=self.node, seconds=self.seconds)["ok"]:
                        progress = self.measure_one()
                    else:
                        progress = False
                if not progress:
                    time.sleep(random.uniform(0.05, 0.3))  # noqa: S311 - two nodes must not meet again and again
        except (OSError, KeyError, net_wire.WireError) as error:
            reason = {"error": f"not measured: this node's own listener does not answer ({error})"}
        else:
            reason = {"error": f"not measured: the peer or this node was busy for {self.wait:g} seconds"}
        for name in list(self.left):
            self.done(name, reason)

    def done(self, name, result):
        self.found[name]["bandwidth"] = result
        self.left.remove(name)

    def measure_one(self):
        """The first peer that is free. Whether there was one."""
        for name in list(self.left):
            peer = self.peers[name]
            listener = peer["listener"]
            try:
                with Control(peer["address"], listener["control"], listener["token"], self.timeout) as there:
                    lock = there.ask(op="acquire", who=self.node, seconds=self.seconds)
                    if not lock["ok"]:
                        continue
                    self.done(name, self.measure(there, listener, lock["key"]))
            except (OSError, KeyError, net_wire.WireError) as error:
                self.done(name, {"error": f"not measured: {error}"})
            return True
        return False

    def measure(self, there, listener, key):
        if self.iperf3 and listener["iperf3"]:
            with contextlib.suppress(net_wire.WireError, subprocess.TimeoutExpired, ValueError, KeyError):
                return self.by_iperf3(there)
        return self.by_sockets(there, key)

    def by_iperf3(self, there):
        there.sock.settimeout(10)  # it has to start there
        port = there.ask(op="iperf3", seconds=self.seconds)["port"]
        command = [self.iperf3, "--client", there.target[0], "--port", str(port), "--json"]
        command += ["--time", f"{self.seconds:g}", "--parallel", str(self.streams)]
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=self.seconds + 15, check=False
        )
        total = json.loads(answer.stdout)["end"]["sum_received"]
        return self.result(total["bits_per_second"] / 1e6, total["seconds"], "iperf3")

    def by_sockets(self, there, key):
        reports = []
        threads = [
            threading.Thread(target=self.stream, args=(there, key, reports), daemon=True) for _ in range(self.streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(reports) < self.streams:
            return {"error": f"{self.streams - len(reports)} of {self.streams} streams broke off"}
        seconds = max(report["seconds"] for report in reports)
        return self.result(sum(report["bytes"] for report in reports) * 8e-6 / seconds, seconds, "sockets")

    def stream(self, there, key, reports):
        failures = contextlib.suppress(OSError, net_wire.WireError)
        with failures, Control(*there.target, there.token, self.timeout) as own:
            own.ask(op="sink", key=key)
            own.sock.settimeout(self.seconds + 10)
            reports.append(net_wire.source(own.sock, self.seconds))

    def result(self, mbit, seconds, tool):
        return {"mbit_s": round(mbit, 1), "seconds": round(seconds, 2), "streams": self.streams, "tool": tool}


# --- the module ------------------------------------------------------------------------------------------------------


def version_of(variable, value):
    try:
        return ipaddress.ip_address(value).version
    except ValueError:
        raise ProbeError(f"{variable} = {value!r}: is no IPv4 or IPv6 address -> give a literal one") from None


def check(options):
    """An error for what makes no sense."""
    version = version_of("address", options["address"])
    if not 0.1 <= options["timeout"] <= 60:
        raise ProbeError(f"timeout = {options['timeout']:g}: is out of range -> give seconds from 0.1 to 60")
    for name, values in options["peers"].items():
        variable = f"peers.{name}"
        if not isinstance(values, dict) or "address" not in values:
            raise ProbeError(f"{variable} = {values!r}: has no address -> give {{address, listener, ports}}")
        if version_of(f"{variable}.address", values["address"]) != version:
            raise ProbeError(
                f"{variable}.address = {values['address']}: is of another family than address = {options['address']}"
                " -> give all nodes cluster addresses of one family"
            )
        listener = values.get("listener")
        missing = [key for key in LISTENER_KEYS if key not in listener] if isinstance(listener, dict) else []
        if missing or (listener and not isinstance(listener, dict)):
            raise ProbeError(
                f"{variable}.listener = {listener!r}: is not what net_listener returned -> pass its result on, or null"
            )
        for port in values.get("ports") or []:
            if not isinstance(port, int) or not 0 < port < 65536:
                raise ProbeError(f"{variable}.ports = {port!r}: is no TCP port -> give numbers from 1 to 65535")
    check_bandwidth(options["bandwidth"], options["peers"])


def check_bandwidth(settings, peers):
    for key, value in settings.items():
        if key == "pairs":
            unknown = [name for name in value if name not in peers]
            if unknown:
                raise ProbeError(f"bandwidth.pairs = {unknown[0]}: is not among peers -> name peers only")
        elif key not in ("seconds", "streams", "wait"):
            raise ProbeError(f"bandwidth.{key}: is not known -> use pairs, seconds, streams, wait")
        elif not isinstance(value, (int, float)) or not 0 < value <= MOST[key]:
            raise ProbeError(f"bandwidth.{key} = {value!r}: is out of range -> give a number up to {MOST[key]}")


def probe(options, iperf3):
    started, start = time.time(), time.monotonic()
    name = socket.gethostname()
    names = Names([name, *(peer for peer in options["peers"] if peer != name)], options["timeout"])
    interface = describe_interface(options["interface"], options["address"])
    others = Duplicates(interface, options["address"]) if options["duplicates"] else None
    peers = asyncio.run(Prober(options, interface).run())
    known = netlink.neighbours()
    for peer, found in peers.items():
        entry = known.get((found["route"]["dev"], str(ipaddress.ip_address(found["address"]))), {})
        found["mac"], found["neighbour"] = hardware(entry.get("mac")), entry.get("state")
        found["name"] = names.get(peer)
    duplicate, duplicate_error = others.get() if others else (None, "not asked for")
    if options["bandwidth"].get("pairs"):
        Bandwidth(options, peers, iperf3).run()
    return {
        "node": options["node"],
        "address": options["address"],
        "family": ipaddress.ip_address(options["address"]).version,
        "started": started,
        "seconds": round(time.monotonic() - start, 3),
        "interface": interface,
        "addresses": [item["address"] for item in netlink.addresses()],
        "hostname": dict(names.get(name), name=name),
        "routes": netlink.default_routes(),
        "duplicate": duplicate,
        "duplicate_error": duplicate_error,
        "ephemeral": ephemeral_range(),
        "peers": peers,
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "interface": {"type": "str", "default": ""},
            "peers": {"type": "dict", "default": {}},
            "timeout": {"type": "float", "default": 3},
            "mtu": {"type": "bool", "default": True},
            "clock": {"type": "bool", "default": True},
            "duplicates": {"type": "bool", "default": True},
            "bandwidth": {"type": "dict", "default": {}},
            "path": {"type": "path", "default": net_wire.DEFAULT_PATH},
        },
        supports_check_mode=True,
    )
    try:
        check(module.params)
        found = probe(module.params, module.get_bin_path("iperf3"))
    except ProbeError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, probe=found, json=json.dumps(found))


if __name__ == "__main__":
    main()
