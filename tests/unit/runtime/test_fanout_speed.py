"""How long a chain of nodes takes, beside one copy and a star, when each node's uplink is limited.

As a program it measures with a larger file, for docs/performance.md:
`PYTHONPATH=collections python tests/unit/runtime/test_fanout_speed.py`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils import fanout, serve_files
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import fanout as order

NODES = 8
NAME = "release.tar.zst"
MIB = 1 << 20
LIMIT = 1.6


class Uplink:
    """A token bucket: what a node sends, to whomever, leaves at this rate. It counts too."""

    def __init__(self, rate):
        self.rate, self.free, self.bytes = rate, 0.0, 0
        self.lock = threading.Lock()

    def take(self, size):
        with self.lock:
            now = time.monotonic()
            self.free = max(self.free, now - 0.02) + size / self.rate
            self.bytes += size
            wait = self.free - now
        if wait > 0:
            time.sleep(wait)


class Limited(serve_files.Handler):
    def send_bytes(self, stream, first, length):
        stream.seek(first)
        left = length
        while left:
            block = stream.read(min(left, 32 << 10))
            if not block:
                break
            self.server.uplink.take(len(block))
            self.connection.sendall(block)
            left -= len(block)
        return length - left


class Fleet:
    """The builder n0 and the nodes behind it, each with its folder, server and limited uplink."""

    def __init__(self, folder, size, rate, piece, nodes=NODES):
        self.names = [f"n{number}" for number in range(nodes + 1)]
        self.folders = {name: Path(folder) / name for name in self.names}
        self.servers = {}
        for name, place in self.folders.items():
            place.mkdir(parents=True)
            server = serve_files.Server(("127.0.0.1", 0), str(place), [NAME], Limited)
            server.uplink = Uplink(rate)
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            self.servers[name] = server
        (self.folders["n0"] / NAME).write_bytes(os.urandom(size))
        self.entry = fanout.describe(str(self.folders["n0"] / NAME), NAME, piece)

    def url(self, name):
        return fanout.base_url("127.0.0.1", self.servers[name].server_port)

    def copy(self, names, star=False):
        """Bring the file to these nodes at once; returns (seconds, copies that each uplink sent)."""
        sent = {name: server.uplink.bytes for name, server in self.servers.items()}
        errors = []

        def work(name):
            try:
                # The ports differ here, on one address; the order is that of the product.
                chain = order.sources(names, name, "n0", {one: one for one in self.names}, 1)["sources"]
                urls = [self.url("n0")] if star else [self.url(url.split("/")[2].split(":")[0]) for url in chain]
                fanout.fetch([self.entry], urls, str(self.folders[name]), lambda text: None)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - started
        assert not errors, errors
        size = self.entry["size"]
        wanted = (self.folders["n0"] / NAME).read_bytes()
        for name in names:
            assert (self.folders[name] / NAME).read_bytes() == wanted
            (self.folders[name] / NAME).unlink()
        return seconds, {name: (server.uplink.bytes - sent[name]) / size for name, server in self.servers.items()}

    def stop(self):
        for server in self.servers.values():
            server.shutdown()
            server.server_close()


def measure(folder, size, rate, piece):
    """One copy, then the chain: for each the seconds and what each uplink sent. The fleet is for more."""
    fleet = Fleet(folder, size, rate, piece)
    nodes = fleet.names[1:]
    return fleet.copy(nodes[:1]), fleet.copy(nodes), fleet


@pytest.mark.alone
def test_a_chain_takes_little_longer_than_one_copy(tmp_path):
    """The bytes do not depend on the machine's load. The times do, so one of three runs has to keep the limit."""
    ratios = []
    while len(ratios) < 3:
        one, chain, fleet = measure(tmp_path / str(len(ratios)), 12 * MIB, 8 * MIB, 256 << 10)
        fleet.stop()
        assert one[1] == {name: float(name == "n0") for name in one[1]}
        assert chain[1] == {**dict.fromkeys(chain[1], 1.0), f"n{NODES}": 0.0}, "each uplink sends one copy"
        ratios.append(chain[0] / one[0])
        if ratios[-1] <= LIMIT:
            return
    raise AssertionError(f"{NODES} nodes in a chain take {ratios} times one copy, the limit is {LIMIT}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rate", type=int, default=20, help="MiB a second that an uplink sends")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one, chain, fleet = measure(folder, args.mib * MIB, args.rate * MIB, MIB)
        star = fleet.copy(fleet.names[1:], star=True)
        fleet.stop()
    print(f"load {os.getloadavg()[0]:.1f}, {args.mib} MiB, {args.rate} MiB/s an uplink, the builder and {NODES} nodes")
    for label, (seconds, copies) in (("one copy", one), ("chain", chain), ("star", star)):
        busiest = max(list(copies.values())[1:])
        print(f"{label:9}{seconds:6.2f} s, {seconds / one[0]:.2f} times one copy;", end=" ")
        print(f"copies sent: builder {copies['n0']:.2f}, the busiest other node {busiest:.2f}")


if __name__ == "__main__":
    main()
