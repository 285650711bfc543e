"""The process that lets other nodes test the network: real sockets on loopback addresses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils import net_wire
from net_nodes import call_module

ADDRESS = "127.0.0.2"
Start = Callable[..., dict[str, Any]]


@pytest.fixture(name="path")
def fixture_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run" / "net-listener.json"
    yield path
    absent(path)


@pytest.fixture(name="start")
def fixture_start(path: Path) -> Start:
    def start(**options: Any) -> dict[str, Any]:
        result = call_module("net_listener", {"node": "n2", "address": ADDRESS, "path": str(path), **options})
        assert "listener" in result, result
        assert result["changed"] is False
        described: dict[str, Any] = result["listener"]
        return described

    return start


def absent(path: Path) -> dict[str, Any]:
    return call_module("net_listener", {"state": "absent", "path": str(path)})


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def running(process: dict[str, Any]) -> bool:
    try:
        status = Path(f"/proc/{process['pid']}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def connect(port: int, address: str = ADDRESS) -> socket.socket:
    return socket.create_connection((address, port), 5)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port


class Asked:
    """A conversation with the control port."""

    def __init__(self, listener: dict[str, Any], token: str | None = None) -> None:
        self.sock = connect(listener["control"])
        net_wire.read_line(self.sock)
        self.token = token or listener["token"]

    def ask(self, **question: Any) -> dict[str, Any]:
        self.sock.sendall(net_wire.line(token=self.token, **question))
        answer: dict[str, Any] = net_wire.read_line(self.sock)
        return answer


def test_tells_its_name_on_every_port(start: Start) -> None:
    pinned = free_port()
    listener = start(ports=[pinned], random=2)
    assert listener["held"] == [pinned]
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert len(set(listener["random"])) == 2
    assert all(low <= port <= high for port in [*listener["random"], listener["control"]])
    for port in [pinned, *listener["random"], listener["control"]]:
        with connect(port) as sock:
            assert net_wire.read_line(sock) == {"node": "n2", "id": net_wire.identity(listener["token"]), "port": port}
    # It listens on all addresses, as those do whose ports it holds; and it does not tell its token.
    with connect(pinned, "127.0.0.9") as sock:
        assert listener["token"] not in str(net_wire.read_line(sock))


def test_a_port_in_use_is_told(start: Start) -> None:
    with socket.socket() as wildcard, socket.socket() as elsewhere:
        wildcard.bind(("", 0))
        wildcard.listen()
        elsewhere.bind(("127.0.0.1", 0))  # not for the cluster: on another address it is free
        elsewhere.listen()
        busy, free = wildcard.getsockname()[1], elsewhere.getsockname()[1]
        listener = start(ports=[free, busy])
        assert (listener["busy"], listener["held"], listener["failed"]) == ([busy], [free], [])
        with connect(free) as sock:
            assert net_wire.read_line(sock)["port"] == free


def test_ports_of_units_are_left_to_them(load: Callable[[str], ModuleType]) -> None:
    module = load("net_listener")
    port = free_port()
    sockets, found = module.take(socket.AF_INET, ADDRESS, [port], 1, True)
    assert (found["left"], found["held"], found["random"]) == ([port], [], [sockets[0].getsockname()[1]])
    with socket.socket() as mine:
        mine.bind(("", port))
    sockets[0].close()


def test_no_port_stays_taken(start: Start, path: Path) -> None:
    """Programs that do not set SO_REUSEADDR must get their port the moment after."""
    pinned = free_port()
    listener = start(ports=[pinned])
    with connect(pinned) as sock:
        net_wire.reset_on_close(sock)
        assert net_wire.read_line(sock)["port"] == pinned
    with connect(listener["random"][0]) as sock:
        assert net_wire.read_line(sock)["node"] == "n2"
        assert absent(path)["ended"] is True
    with socket.socket() as mine, socket.socket() as other:
        mine.bind(("", pinned))
        other.bind(("", listener["random"][0]))


def test_ends_when_told(start: Start, path: Path) -> None:
    listener = start()
    process = record(path)
    assert running(process)
    assert os.getsid(process["pid"]) != os.getsid(0)
    assert path.stat().st_mode & 0o077 == 0
    assert absent(path) | {"invocation": None} == {
        "changed": False,
        "listener": None,
        "ended": True,
        "invocation": None,
    }
    assert not running(process)
    assert not path.exists()
    with pytest.raises(ConnectionRefusedError):
        connect(listener["control"])
    assert absent(path)["ended"] is False


def test_ends_by_itself(start: Start, path: Path) -> None:
    listener = start(lifetime=1)
    process = record(path)
    with connect(listener["control"]) as sock:  # a client that stays does not keep it
        net_wire.read_line(sock)
        limit = time.monotonic() + 8
        while running(process) and time.monotonic() < limit:
            time.sleep(0.05)
    assert not running(process)
    assert not path.exists()


HASTY = "import net_listener; net_listener.QUIET_SECONDS, net_listener.PATIENCE_SECONDS = 2, 3"


def again(path: Path, preamble: str = HASTY, **options: Any) -> dict[str, Any]:
    """Another run comes, with less patience than they have."""
    return call_module(
        "net_listener", {"node": "n2", "address": ADDRESS, "path": str(path), **options}, preamble=preamble
    )


def test_one_that_a_run_left_over_is_replaced(start: Start, path: Path) -> None:
    """Nobody asks it any more; connections without the token do not count."""
    port = free_port()
    first_listener = start(ports=[port])
    first = record(path)
    with connect(first_listener["control"]) as stranger:
        net_wire.read_line(stranger)
        result = again(path, ports=[port])
    assert result["ended"] is True
    second_listener = result["listener"]
    assert not running(first)
    assert running(record(path))
    assert second_listener["held"] == [port]
    assert second_listener["token"] != first_listener["token"]


def test_one_that_is_needed_is_not_replaced(start: Start, path: Path) -> None:
    listener = start(lifetime=100)
    process = record(path)
    ended = threading.Event()

    def ask_on() -> None:
        with contextlib.closing(Asked(listener).sock):
            while not ended.wait(0.2):
                Asked(listener).ask(op="clock")

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_on)
        result = again(path)
        ended.set()
        asking.result()
    assert result["failed"] is True
    assert re.search(
        r"another run, of \S.*, is testing the network since \d+ s -> run it again when that has ended", result["msg"]
    )
    assert re.search(r"at the latest in (9\d|100) s$", result["msg"])
    assert running(process)
    assert Asked(listener).ask(op="clock")["t1"] > 0


def test_the_end_of_another_run_is_waited_for(start: Start, path: Path) -> None:
    """The run that is waited for can still end its own."""
    start()
    process = record(path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(again, path, "")
        time.sleep(1)
        assert running(process)
        assert absent(path)["ended"] is True
        began = time.monotonic()
        assert waiting.result()["ended"] is False
    assert time.monotonic() - began < 10, "long before it would be taken to be left over"
    assert record(path)["pid"] != process["pid"]


def test_one_that_hangs_is_ended(start: Start, path: Path) -> None:
    start()
    process = record(path)
    os.kill(process["pid"], signal.SIGSTOP)
    assert absent(path)["ended"] is True
    assert not running(process)


def test_a_number_given_again_is_not_mistaken(path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        path.parent.mkdir()
        path.write_text(json.dumps({"pid": stranger.pid, "start": 1, "token": "x"}))
        assert absent(path)["ended"] is False
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": "1"}', '{"pid": 1, "start": null}'])
def test_a_broken_record_does_no_harm(start: Start, path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    start()
    assert running(record(path))


def test_strangers_can_ask_nothing(start: Start) -> None:
    listener = start()
    for token in ("0" * 32, net_wire.identity(listener["token"])):
        with pytest.raises((net_wire.WireError, ConnectionError)):
            Asked(listener, token).ask(op="clock")
    member = Asked(listener)
    assert "error" in member.ask(op="sink", key="")  # without the lock
    assert "error" in member.ask(op="iperf3", seconds=1)
    assert "error" in member.ask(op="run", command="id")


def test_datagrams_come_back_to_members_only(start: Start) -> None:
    listener = start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.3)
        sock.connect((ADDRESS, listener["udp"]))
        packet = (net_wire.MAGIC + listener["token"].encode()).ljust(9000, b"x")
        sock.send(packet)
        assert sock.recv(65535) == packet
        sock.send(net_wire.MAGIC + b"0" * 32)
        with pytest.raises(TimeoutError):
            sock.recv(65535)


def test_one_bandwidth_test_at_a_time(start: Start) -> None:
    listener = start()
    first, second = Asked(listener), Asked(listener)
    assert first.ask(op="acquire", who="n1")["ok"] is True
    answer = second.ask(op="acquire", who="n3")
    assert (answer["ok"], answer["holder"], answer["key"]) == (False, "n1", "")
    net_wire.reset_on_close(first.sock)
    first.sock.close()
    limit = time.monotonic() + 5
    while not second.ask(op="acquire", who="n3")["ok"]:
        assert time.monotonic() < limit
    # Asked again it still has it.
    assert second.ask(op="acquire", who="n3")["ok"] is True


def test_sinks_what_the_holder_sends(start: Start) -> None:
    listener = start()
    holder, stream = Asked(listener), Asked(listener)
    key = holder.ask(op="acquire", who="n1")["key"]
    assert stream.ask(op="sink", key=key) == {"ok": True}
    stream.sock.sendall(b"x" * 3_000_000)
    stream.sock.shutdown(socket.SHUT_WR)
    assert net_wire.read_line(stream.sock)["bytes"] == 3_000_000


def test_many_at_once(start: Start) -> None:
    listener = start()
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(listener["random"][0])) for _ in range(400)]
        assert all(net_wire.read_line(sock)["node"] == "n2" for sock in socks)


@contextlib.contextmanager
def idle(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections of a stranger that says nothing, more than programs may have files open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 200:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    try:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(connect(port)) for _ in range(count)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.alone
@pytest.mark.parametrize("port", ["random", "control"])
@pytest.mark.parametrize("hard", [1024, 4096])
def test_idle_connections_do_not_make_it_deaf(path: Path, port: str, hard: int) -> None:
    """Where it may have more files open than the usual 1024, and where it may not."""
    limits = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, {hard}))"
    listener = again(path, limits)["listener"]
    member = Asked(listener)
    assert member.ask(op="clock")["t1"] > 0
    target = listener["control"] if port == "control" else listener["random"][0]
    with idle(target, 1500) as strangers:
        began = time.monotonic()
        with connect(listener["random"][1]) as sock:
            assert net_wire.read_line(sock)["node"] == "n2"
        assert Asked(listener).ask(op="clock")["t1"] > 0
        assert time.monotonic() - began < 3
        assert net_wire.read_line(strangers[-1])["node"] == "n2"
        assert member.ask(op="clock")["t1"] > 0, "who showed the token stays"


def test_who_does_not_show_the_token_has_to_go(start: Start) -> None:
    listener = start()
    with connect(listener["control"]) as stranger:
        net_wire.read_line(stranger)
        stranger.settimeout(8)
        with pytest.raises(ConnectionResetError):
            stranger.recv(1)


def test_only_nodes_of_the_run_may_ask(start: Start) -> None:
    listener = start(allowed=["127.0.0.7"])

    def asked(source: str) -> dict[str, Any]:
        with socket.create_connection((ADDRESS, listener["control"]), 5, (source, 0)) as sock:
            greeting = net_wire.read_line(sock)
            assert greeting["node"] == "n2", "who it is, everybody may know"
            sock.sendall(net_wire.line(token=listener["token"], op="clock"))
            answer: dict[str, Any] = net_wire.read_line(sock)
            return answer

    def echoed(source: str) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((source, 0))
            sock.settimeout(0.5)
            sock.sendto(net_wire.MAGIC + listener["token"].encode(), (ADDRESS, listener["udp"]))
            with contextlib.suppress(TimeoutError):
                return bool(sock.recv(100))
            return False

    for member in ("127.0.0.7", ADDRESS):
        assert "t1" in asked(member)
        assert echoed(member)
    with pytest.raises((net_wire.WireError, ConnectionError)):
        asked("127.0.0.8")
    assert not echoed("127.0.0.8")
    with socket.create_connection((ADDRESS, listener["random"][0]), 5, ("127.0.0.8", 0)) as sock:
        assert net_wire.read_line(sock)["node"] == "n2"
        sock.settimeout(2)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allowed": ["n3"]}, "allowed = 'n3': is no IPv4 or IPv6 address -> give"),
        ({"node": ""}, "node is empty: give"),
        ({"address": "n2"}, "address = 'n2': is no IPv4 or IPv6 address -> give"),
        ({"ports": [70000]}, "ports = 70000: is no TCP port -> give"),
        ({"random": 65}, "random = 65: is out of range -> give"),
        ({"lifetime": 0}, "lifetime = 0: is out of range -> give"),
        ({"path": "/proc/ironrack/x.json"}, "path = /proc/ironrack/x.json: "),
    ],
)
def test_wrong_options_are_named(path: Path, options: dict[str, Any], words: str) -> None:
    result = call_module("net_listener", {"node": "n2", "address": ADDRESS, "path": str(path), **options})
    assert result["failed"] is True
    assert result["msg"].startswith(words)
    assert not path.exists()


def test_ipv6(path: Path) -> None:
    result = call_module("net_listener", {"node": "n2", "address": "::1", "path": str(path)})
    listener = result["listener"]
    with connect(listener["random"][0], "::1") as sock:
        assert net_wire.read_line(sock)["node"] == "n2"
    with pytest.raises(ConnectionRefusedError):  # of its family only
        connect(listener["random"][0], "127.0.0.1")


def test_works_in_check_mode(start: Start) -> None:
    with connect(start(_ansible_check_mode=True)["control"]) as sock:
        assert net_wire.read_line(sock)["node"] == "n2"
