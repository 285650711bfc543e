# SPDX-License-Identifier: Apache-2.0
"""What net_listener and net_probe say to each other."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import socket
import struct
import time

DEFAULT_PATH = "/run/ironrack/net-listener.json"
MAGIC = b"ironrack"
LINE_LIMIT = 4096
CHUNK = 1 << 20
# linux/in.h, linux/in6.h; Python has no names for them.
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PMTUDISC_PROBE = 10, 23, 3
IP_PKTINFO = 8


class WireError(Exception):
    """The other end did not answer as a listener does."""


def identity(token):
    """What a listener shows to everybody. The token itself is known only to the nodes of a run and lets them ask."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def line(**values):
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def parse(data):
    """The object of one line; an empty one for anything else."""
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def address_family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def open_files():
    """How many there may be, as many as the system lets us."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def never_fragment(sock, family):
    """Datagrams go out whole or not at all, whatever the kernel remembers of the path."""
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, PMTUDISC_PROBE)
    else:
        sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, PMTUDISC_PROBE)


def tell_own_address(sock, family):
    """Datagrams come with the address that they were sent to."""
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)


def answer_from(ancillary):
    """The same address as the sender of an answer: a host with several would take another one, and not be heard."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO):
            return [(level, kind, struct.pack("=i4s4s", 0, data[4:8], bytes(4)))]
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            return [(level, kind, data[:20])]
    return []


def reset_on_close(sock):
    """A port that was tried must not stay in TIME_WAIT: whoever it belongs to may want to bind it right after."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read_line(sock):
    """One line from a blocking socket."""
    data = b""
    while not data.endswith(b"\n"):
        piece = sock.recv(1)
        if not piece or len(data) > LINE_LIMIT:
            raise WireError("the connection ended before an answer came")
        data += piece
    return parse(data)


def sink(sock):
    """Take what comes until the other end has no more; tell how much, and in what time."""
    buffer = bytearray(CHUNK)
    total, first = 0, None
    while True:
        size = sock.recv_into(buffer)
        if first is None:
            first = time.monotonic()
        if not size:
            break
        total += size
    sock.sendall(line(bytes=total, seconds=time.monotonic() - first))


def source(sock, seconds):
    """Send for some seconds; the sink's report."""
    data = memoryview(os.urandom(CHUNK))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    return read_line(sock)
