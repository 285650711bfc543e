"""The probe over loopback addresses: answers, bandwidth between nodes that all want to measure, 64 nodes at once."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils import net_wire, netlink
from net_nodes import ROOT, Stopwatch, call_module

# Many listeners in one process, each on an address of its own: argv is [seconds, pinned ports, addresses].
MANY = f"""
import asyncio, json, resource, socket, sys
sys.path[:0] = ["{ROOT}/collections", "{ROOT}/plugins/modules"]
import net_listener
from ansible_collections.ironrack.vllm.plugins.module_utils import net_wire
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
seconds, pinned, addresses = (json.loads(word) for word in sys.argv[1:])
listeners, described = [], {{}}
for name, address in addresses.items():
    tcp = [net_listener.bound(socket.AF_INET, socket.SOCK_STREAM, port, address) for port in [*pinned, 0, 0, 0]]
    control = net_listener.bound(socket.AF_INET, socket.SOCK_STREAM, 0, address)
    port = control.getsockname()[1]
    udp = net_listener.bound(socket.AF_INET, socket.SOCK_DGRAM, port, address)
    net_wire.tell_own_address(udp, socket.AF_INET)
    listeners.append(net_listener.Listener(name, name * 8, tcp, control, udp))
    described[name] = {{"node": name, "address": address, "token": name * 8, "control": port, "udp": port,
                       "held": pinned, "busy": [], "random": [sock.getsockname()[1] for sock in tcp[len(pinned):]],
                       "iperf3": False}}
print(json.dumps(described), flush=True)
async def run():
    await asyncio.gather(*(listener.run(seconds) for listener in listeners))
asyncio.run(run())
"""


@pytest.fixture(name="listen")
def fixture_listen(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Listeners of their own, each with its record in <name>.json."""
    paths = []

    def listen(name: str, address: str, **options: Any) -> dict[str, Any]:
        path = tmp_path / f"{name}.json"
        paths.append(path)
        result = call_module("net_listener", {"node": name, "address": address, "path": str(path), **options})
        described: dict[str, Any] = result["listener"]
        return described

    yield listen
    for path in paths:
        call_module("net_listener", {"state": "absent", "path": str(path)})


@contextlib.contextmanager
def many(addresses: dict[str, str], pinned: list[int]) -> Iterator[dict[str, Any]]:
    words = [json.dumps(word) for word in (60, pinned, addresses)]
    with subprocess.Popen([sys.executable, "-c", MANY, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def probe(**options: Any) -> dict[str, Any]:
    result = call_module("net_probe", {"node": "n1", "address": "127.0.0.1", "duplicates": False, **options})
    assert "probe" in result, result
    assert result["changed"] is False
    found: dict[str, Any] = result["probe"]
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("", 0))
        return [sock.getsockname()[1] for sock in socks]


def test_describes_a_peer(listen: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    held, shut = free_ports(2)
    with socket.socket() as service:
        service.bind(("127.0.0.2", 0))
        service.listen()
        busy = service.getsockname()[1]
        listener = listen("n2", "127.0.0.2", ports=[held, busy], random=2)
        assert listener["busy"] == [busy]
        start = time.time()
        peer = {"address": "127.0.0.2", "listener": listener, "ports": [held, shut, busy]}
        found = probe(peers={"n2": peer}, timeout=2)
    assert abs(found["started"] - start) < 30
    assert found["ephemeral"] == [
        int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ]
    assert found["interface"]["name"] == "lo"
    assert (found["duplicate"], found["duplicate_error"]) == (None, "not asked for")
    assert found["hostname"]["name"] == socket.gethostname()
    n2 = found["peers"]["n2"]
    assert [(entry["port"], entry["kind"], entry["result"], entry["answered_by"]) for entry in n2["tcp"]] == [
        (held, "pinned", "open", "n2"),
        (shut, "pinned", "refused", None),
        (busy, "pinned", "open", None),
        *((port, "random", "open", "n2") for port in listener["random"]),
        (listener["control"], "control", "open", "n2"),
    ]
    assert n2["tcp"][1]["error"] == "Connection refused"
    assert [entry["error"] for entry in n2["tcp"] if entry["result"] == "open"] == [None] * 5
    assert all(entry["ms"] > 0 for entry in n2["tcp"])
    assert (n2["identity"], n2["udp"]["result"], n2["mtu"]["ok"]) == ("n2", "open", True)
    assert n2["clock"] is not None
    assert n2["bandwidth"] is None
    # No port of the peer's is left in TIME_WAIT, for those who do not set SO_REUSEADDR.
    call_module("net_listener", {"state": "absent", "path": str(tmp_path / "n2.json")})
    with socket.socket() as mine:
        mine.bind(("", held))


def test_a_listener_of_another_run(listen: Callable[..., dict[str, Any]]) -> None:
    listener = listen("n2", "127.0.0.2", random=0)
    listener["token"] = "0" * 32
    seen = probe(peers={"n2": {"address": "127.0.0.2", "listener": listener}}, timeout=1)["peers"]["n2"]
    assert (seen["identity"], seen["clock"], seen["udp"]["result"]) == ("n2 of another run", None, "timeout")


def test_a_stranger_at_the_port(listen: Callable[..., dict[str, Any]]) -> None:
    """Something accepts and says nothing, or something else."""
    listener = listen("n2", "127.0.0.2", random=0)
    with socket.socket() as silent, socket.socket() as other:
        for sock in (silent, other):
            sock.bind(("127.0.0.2", 0))
            sock.listen()

        def answer() -> None:
            client, _ = other.accept()
            with client:
                client.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")

        threading.Thread(target=answer, daemon=True).start()
        listener["random"] = [silent.getsockname()[1], other.getsockname()[1]]
        start = time.monotonic()
        seen = probe(peers={"n2": {"address": "127.0.0.2", "listener": listener}}, timeout=1)["peers"]["n2"]
        assert time.monotonic() - start < 10
    assert [(entry["result"], entry["answered_by"]) for entry in seen["tcp"]] == [
        ("open", None),
        ("open", None),
        ("open", "n2"),
    ]
    assert seen["tcp"][0]["error"] == "connected, but no listener answered: timeout"
    assert seen["identity"] == "n2"


def test_bandwidth_is_measured_by_all_with_all(listen: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Three nodes begin together; each takes part in one measurement at a time."""
    addresses = {"n1": "127.0.0.1", "n2": "127.0.0.2", "n3": "127.0.0.3"}
    listeners = {name: listen(name, address, random=0) for name, address in addresses.items()}
    peers = {name: {"address": addresses[name], "listener": listeners[name]} for name in addresses}

    def measure(name: str) -> dict[str, Any]:
        others = {other: peers[other] for other in peers if other != name}
        options = {"node": name, "address": addresses[name], "peers": others, "path": str(tmp_path / f"{name}.json")}
        return probe(
            **options, mtu=False, bandwidth={"pairs": sorted(others), "seconds": 0.5, "streams": 2, "wait": 60}
        )

    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        founds = dict(zip(addresses, pool.map(measure, addresses), strict=True))
    # Any two of the six pairs share a node, so none may overlap.
    assert time.monotonic() - start > 6 * 0.5
    for name, found in founds.items():
        for other in addresses:
            if other != name:
                result = found["peers"][other]["bandwidth"]
                assert result.get("error") is None, result
                assert (result["tool"], result["streams"]) == ("sockets", 2)
                assert result["mbit_s"] > 10
                assert 0.3 < result["seconds"] < 5


def test_bandwidth_gives_up(listen: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    own = listen("n1", "127.0.0.1", random=0)
    listener = listen("n2", "127.0.0.2", random=0)
    options = {"path": str(tmp_path / "n1.json"), "mtu": False, "bandwidth": {"pairs": ["n2"], "wait": 0.5}}
    peers = {"n2": {"address": "127.0.0.2", "listener": listener}}
    for taken in (own, listener):
        with socket.create_connection((taken["address"], taken["control"])) as holder:
            net_wire.read_line(holder)
            holder.sendall(net_wire.line(token=taken["token"], op="acquire", who="n9"))
            assert net_wire.read_line(holder)["ok"]
            seen = probe(peers=peers, **options)["peers"]["n2"]
        assert seen["bandwidth"] == {"error": "not measured: the peer or this node was busy for 0.5 seconds"}
    options["path"] = str(tmp_path / "none.json")
    assert "own listener does not answer" in probe(peers=peers, **options)["peers"]["n2"]["bandwidth"]["error"]
    listener["control"] = free_ports(1)[0]
    seen = probe(peers=peers, **options)["peers"]["n2"]
    assert seen["bandwidth"] == {"error": "not measured: its listener does not answer"}


@pytest.mark.skipif(not shutil.which("iperf3"), reason="iperf3 is not installed")
@pytest.mark.parametrize(("own", "other"), [("127.0.0.1", "127.0.0.2"), ("::1", "::1")], ids=["ipv4", "ipv6"])
def test_bandwidth_by_iperf3(listen: Callable[..., dict[str, Any]], tmp_path: Path, own: str, other: str) -> None:
    listen("n1", own, random=0)
    listener = listen("n2", other, random=0)
    assert listener["iperf3"] is True
    settings = {"pairs": ["n2"], "seconds": 1, "streams": 2}
    peers = {"n2": {"address": other, "listener": listener}}
    found = probe(address=own, peers=peers, path=str(tmp_path / "n1.json"), mtu=False, bandwidth=settings)
    result = found["peers"]["n2"]["bandwidth"]
    assert (result["tool"], result["streams"]) == ("iperf3", 2)
    assert result["mbit_s"] > 10


def test_64_nodes() -> None:
    """One node tries its 63 peers, 16 ports each."""
    pinned = free_ports(12)
    addresses = {f"n{number:02}": f"127.0.1.{number}" for number in range(1, 65)}
    with many(addresses, pinned) as listeners:
        peers = {
            name: {"address": address, "listener": listeners[name], "ports": pinned}
            for name, address in addresses.items()
            if name != "n01"
        }
        with Stopwatch() as watch:
            found = probe(node="n01", address="127.0.1.1", peers=peers, duplicates=True)
    assert len(found["peers"]) == 63
    for name, seen in found["peers"].items():
        assert [entry["result"] for entry in seen["tcp"]] == ["open"] * 16, name
        assert (seen["identity"], seen["udp"]["result"], seen["mtu"]["ok"]) == (name, "open", True)
        assert abs(seen["clock"]["offset_s"]) < 0.5
    watch.check(seconds=6, cpu=2.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "n1"}, "address = 'n1': is no IPv4 or IPv6 address -> give"),
        ({"timeout": 0}, "timeout = 0: is out of range -> give"),
        ({"peers": {"n2": "10.0.0.2"}}, "peers.n2 = '10.0.0.2': has no address -> give"),
        ({"peers": {"n2": {"address": "n2"}}}, "peers.n2.address = 'n2': is no IPv4 or IPv6 address -> give"),
        (
            {"peers": {"n2": {"address": "::2"}}},
            "peers.n2.address = ::2: is of another family than address = 127.0.0.1",
        ),
        (
            {"peers": {"n2": {"address": "127.0.0.2", "listener": {"node": "n2"}}}},
            "peers.n2.listener = {'node': 'n2'}: is not what net_listener returned -> pass",
        ),
        (
            {"peers": {"n2": {"address": "127.0.0.2", "ports": [0]}}},
            "peers.n2.ports = 0: is no TCP port -> give",
        ),
        ({"bandwidth": {"pairs": ["n9"]}}, "bandwidth.pairs = n9: is not among peers -> name"),
        ({"bandwidth": {"second": 1}}, "bandwidth.second: is not known -> use"),
        ({"bandwidth": {"seconds": 0}}, "bandwidth.seconds = 0: is out of range -> give"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    result = call_module("net_probe", {"node": "n1", "address": "127.0.0.1", **options})
    assert result["failed"] is True
    assert result["msg"].startswith(words)


def test_a_name_service_that_hangs(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("net_probe")
    forever = threading.Event()

    def lookup(name: str, *_: Any, **__: Any) -> list[Any]:
        if name.startswith("slow"):
            forever.wait(20)
        return [(2, 1, 6, "", ("10.0.0.1", 0)), (2, 1, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(module.socket, "getaddrinfo", lookup)
    start = time.monotonic()
    names = module.Names(["fast", *(f"slow{number}" for number in range(100))], 0.3)
    assert names.get("slow0") == {"resolves": [], "error": "no answer within 0.3 seconds"}
    assert names.get("fast") == {"resolves": ["10.0.0.1"], "error": None}
    assert time.monotonic() - start < 5
    forever.set()


def test_reads_what_ip_reads() -> None:
    """Netlink against iproute2, which need not be there on a node."""
    if not shutil.which("ip"):
        pytest.skip("iproute2 is not installed")
    told = json.loads(subprocess.run(["ip", "-json", "address"], capture_output=True, check=True).stdout)
    expected = {(item["ifname"], part["local"], part["prefixlen"]) for item in told for part in item["addr_info"]}
    assert {(item["interface"], item["address"], item["prefix"]) for item in netlink.addresses()} == expected
    for family in ("4", "6"):
        command = ["ip", f"-{family}", "-json", "route", "show", "default"]
        told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout or "[]")
        expected = {(item.get("dev"), item.get("gateway"), item.get("metric", 0)) for item in told if "dev" in item}
        mine = {
            (route["dev"], route["gateway"], route["metric"])
            for route in netlink.default_routes()
            if route["family"] == int(family)
        }
        assert expected <= mine
