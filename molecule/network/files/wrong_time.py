#!/usr/bin/env python3
"""A time server that is wrong: answers NTP with this node's clock and so many seconds more."""

from __future__ import annotations

import socket
import struct
import sys
import time

# From 1900, where NTP begins, to 1970.
EPOCH = 2208988800


def main() -> None:
    ahead = float(sys.argv[1])
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("", 123))
    while True:
        request, client = server.recvfrom(512)
        now = time.time() + ahead + EPOCH
        stamp = struct.pack("!II", int(now), int(now % 1 * 2**32))
        # Version 4, server; stratum 2; poll and precision; delay and dispersion 0; a reference; four times.
        head = struct.pack("!BBbbII4s", 0x24, 2, 6, -20, 0, 0, b"\x0a\x00\x00\x01")
        server.sendto(head + stamp + request[40:48] + stamp * 2, client)


if __name__ == "__main__":
    main()
