"""What the probe sees of real faults, each made in network namespaces: links, firewalls, addresses, names."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import nft
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network.probe import judge
from net_nodes import Bridge, Node, Stopwatch, call_module, need_namespaces

PINNED = 6379
AT_ONCE = 24
FAMILIES = pytest.mark.parametrize("family", [4, 6], ids=["ipv4", "ipv6"])


Body = Callable[..., None]


class Running:
    """All tests of this file at the same time, each with a link of its own: most of their time is waiting."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        need_namespaces()
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.futures: dict[str, Future[None]] = {}
        for item in request.session.items:
            body = getattr(getattr(item, "obj", None), "body", None)
            if body is not None and item.path == request.path:
                given = item.callspec.params if hasattr(item, "callspec") else {}
                self.futures[item.nodeid] = self.pool.submit(self.run, body, folders.mktemp("link"), given)

    @staticmethod
    def run(body: Body, folder: Path, given: dict[str, Any]) -> None:
        bridge = Bridge(folder)
        try:
            body(bridge, **given)
        finally:
            bridge.end()


@pytest.fixture(name="running", scope="module")
def fixture_running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(request, tmp_path_factory)
    yield running
    running.pool.shutdown(cancel_futures=True)


def together(body: Body) -> Body:
    """A test that runs with the others."""

    def test(running: Running, request: pytest.FixtureRequest, **_: Any) -> None:
        running.futures[request.node.nodeid].result()

    given = [each for each in signature(body).parameters.values() if each.name != "bridge"]
    ours = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("running", "request")]
    test.__dict__.update(body=body, __signature__=Signature([*ours, *given]))
    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


def pair(bridge: Bridge, family: int = 4, **options: Any) -> tuple[Node, Node]:
    first, second = bridge.add("n1", family), bridge.add("n2", family)
    second.listen(**{"ports": [PINNED], "random": 1, **options})
    return first, second


def results(found: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    return {entry["kind"]: (entry["result"], entry["errno"]) for entry in found["tcp"]}


@FAMILIES
@together
def test_healthy(bridge: Bridge, family: int) -> None:
    n1, n2 = pair(bridge, family)
    found = n1.probe(n2, ports=(PINNED,), duplicates=True)
    assert (found["family"], found["duplicate"], found["duplicate_error"]) == (family, [], None)
    interface = found["interface"]
    assert (interface["name"], interface["mtu"], interface["mac"]) == ("eth0", 1500, n1.mac)
    assert (interface["up"], interface["has_address"], interface["dad_failed"]) == (True, True, [])
    assert f"{n1.address}/{24 if family == 4 else 64}" in interface["addresses"]
    assert interface["speed_mbit"] is None  # veth makes up 10000
    n2_seen = found["peers"]["n2"]
    assert (n2_seen["identity"], n2_seen["mac"], n2_seen["tested"]) == ("n2", n2.mac, True)
    assert n2_seen["route"] == {"dev": "eth0", "src": n1.address, "gateway": None}
    assert {entry["result"] for entry in n2_seen["tcp"]} == {"open"}
    assert {entry["answered_by"] for entry in n2_seen["tcp"]} == {"n2"}
    assert n2_seen["udp"]["result"] == "open"
    assert n2_seen["mtu"] == {"tried": 1500, "ok": True, "largest": 1500, "by": "icmp", "error": None}
    assert abs(n2_seen["clock"]["offset_s"]) < 0.05


@together
def test_interface_is_found_by_the_address(bridge: Bridge) -> None:
    n1 = bridge.add("n1")
    assert n1.probe(interface="")["interface"]["name"] == "eth0"
    assert n1.probe(interface="eth9")["interface"]["name"] == "eth0"
    n1.address = "10.9.0.77"
    found = n1.probe(interface="eth9")
    assert (found["interface"], found["duplicate"]) == (None, None)
    assert found["duplicate_error"] == "no interface has the address 10.9.0.77"
    found = n1.probe()
    assert found["interface"]["has_address"] is False
    n1.ip("link set eth0 down")
    assert n1.probe()["interface"]["up"] is False


@FAMILIES
@pytest.mark.parametrize("own", [9000, 1500])
@together
def test_one_side_has_small_packets(bridge: Bridge, family: int, own: int) -> None:
    """Only the side with the large ones sees it."""
    n1, n2 = pair(bridge, family)
    (n1 if own == 9000 else n2).ip("link set eth0 mtu 9000")
    mtu = n1.probe(n2, duplicates=False)["peers"]["n2"]["mtu"]
    assert (mtu["tried"], mtu["ok"], mtu["largest"]) == (own, own == 1500, 1500)


@FAMILIES
@pytest.mark.parametrize("size", [1450, 4321])
@together
def test_the_switch_has_small_packets(bridge: Bridge, family: int, size: int) -> None:
    """Neither node can know: both have large ones. ICMP is shut here, so UDP has to tell."""
    n1, n2 = pair(bridge, family)
    n2.drop("icmp type echo-request" if family == 4 else "icmpv6 type echo-request")
    for node in (n1, n2):
        node.ip("link set eth0 mtu 9000")
    bridge.switch.ip(f"link set eth0-2 mtu {size}")
    mtu = n1.probe(n2, duplicates=False, timeout=4.0)["peers"]["n2"]["mtu"]
    assert mtu == {"tried": 9000, "ok": False, "largest": size, "by": "udp", "error": None}


@FAMILIES
@pytest.mark.parametrize("by", ["icmp", "udp"])
@together
def test_a_router_has_small_packets(bridge: Bridge, family: int, by: str) -> None:
    """It would cut larger ones into pieces if it were allowed to."""
    n1, router, n3 = bridge.add("n1", family), bridge.add("router", family), bridge.add("n3", family)
    near, far, prefix = ("10.8.0.2", "10.8.0.3", 24) if family == 4 else ("fd08::2", "fd08::3", 64)
    more = " nodad" if family == 6 else ""
    bridge.wire(router, "eth1", 9)
    router.ip(f"address add {near}/{prefix} dev eth1{more}")
    router.ip("link set eth1 mtu 1400")
    router.run("sysctl", "-qw", "net.ipv4.ip_forward=1" if family == 4 else "net.ipv6.conf.all.forwarding=1")
    # Both of its interfaces are on the one bridge: each shall answer for its own address only.
    router.run("sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1")
    n3.ip("address flush dev eth0 scope global")
    n3.ip(f"address add {far}/{prefix} dev eth0{more}")
    n3.ip("link set eth0 mtu 1400")
    n3.ip(f"-{family} route add default via {near}")
    n1.ip(f"-{family} route add default via {router.address}")
    n3.address = far
    n3.listen(random=0)
    if by == "udp":
        n3.drop("icmp type echo-request" if family == 4 else "icmpv6 type echo-request")
    # By UDP two kernels have to find neighbours and a process has to answer before the first datagram is back.
    seen = n1.probe(n3, duplicates=False, timeout=4.0)["peers"]["n3"]
    assert (seen["route"]["gateway"], seen["mac"]) == (router.address, None)
    assert seen["mtu"] == {"tried": 1500, "ok": False, "largest": 1400, "by": by, "error": None}
    # What the kernel has learnt of the path meanwhile does not count.
    assert n1.probe(n3, duplicates=False)["peers"]["n3"]["mtu"] == seen["mtu"]


@FAMILIES
@together
def test_no_datagram_comes_back(bridge: Bridge, family: int) -> None:
    n1, n2 = pair(bridge, family)
    n2.drop("meta l4proto { icmp, udp }" if family == 4 else "icmpv6 type echo-request")
    n2.drop("meta l4proto udp")
    seen = n1.probe(n2, duplicates=False)["peers"]["n2"]
    assert (seen["mtu"]["ok"], seen["mtu"]["largest"]) == (None, None)
    assert "icmp: no answer" in seen["mtu"]["error"]
    assert seen["udp"]["result"] == "timeout"
    assert seen["identity"] == "n2"


@FAMILIES
@together
def test_firewall_of_this_project(bridge: Bridge, family: int) -> None:
    """TCP and echo requests are let in, other datagrams are not."""
    n1, n2 = pair(bridge, family)
    n2.drop("meta l4proto udp")
    seen = n1.probe(n2, duplicates=False)["peers"]["n2"]
    assert (seen["mtu"]["ok"], seen["mtu"]["by"], seen["udp"]["result"]) == (True, "icmp", "timeout")


@FAMILIES
@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("drop", {4: ("timeout", None), 6: ("timeout", None)}),
        ("reject with tcp reset", {4: ("refused", errno.ECONNREFUSED), 6: ("refused", errno.ECONNREFUSED)}),
        ("reject", {4: ("refused", errno.ECONNREFUSED), 6: ("refused", errno.ECONNREFUSED)}),
        (
            "reject with icmpx type admin-prohibited",
            {4: ("unreachable", errno.EHOSTUNREACH), 6: ("unreachable", errno.EACCES)},
        ),
    ],
    ids=["drop", "reset", "reject", "prohibited"],
)
@together
def test_firewalls_differ(bridge: Bridge, family: int, verdict: str, expected: dict[int, tuple[str, int]]) -> None:
    """A firewall with a list of ports: the random ones are shut."""
    n1, n2 = pair(bridge, family)
    n2.drop("tcp dport 1024-6378", "drop")
    n2.drop("tcp dport 32768-65535", verdict)
    # An error that comes while connect() is still at work, as only on one machine, does not count: the next SYN's does.
    seen = n1.probe(n2, ports=(PINNED,), duplicates=False, mtu=False, timeout=2.5)["peers"]["n2"]
    shut = expected[family]
    assert results(seen) == {"pinned": ("open", None), "random": shut, "control": shut}
    assert (seen["identity"], seen["clock"]) == ("n2", None)
    errors = {entry["error"] for entry in seen["tcp"] if entry["errno"]}
    assert errors <= {"Connection refused", "No route to host", "Permission denied"}


@FAMILIES
@together
def test_one_direction_only(bridge: Bridge, family: int) -> None:
    n1, n2 = pair(bridge, family)
    n1.listen(ports=[PINNED], random=1)
    n2.drop(f"meta nfproto ipv{family} tcp flags syn / syn,ack")
    assert set(results(n1.probe(n2, duplicates=False)["peers"]["n2"]).values()) == {("timeout", None)}
    assert set(results(n2.probe(n1, duplicates=False)["peers"]["n1"]).values()) == {("open", None)}


@together
def test_nobody_at_the_address(bridge: Bridge) -> None:
    """With 3 seconds the kernel's own word, after three questions for the link address, mostly comes first."""
    n1, n2 = pair(bridge)
    n2.ip("link set eth0 down")
    start = time.monotonic()
    seen = n1.probe(n2, duplicates=False, timeout=1.0)["peers"]["n2"]
    assert time.monotonic() - start < 5
    assert {entry["result"] for entry in seen["tcp"]} <= {"timeout", "unreachable"}
    assert (seen["mac"], seen["identity"], seen["clock"]) == (None, None, None)
    assert seen["neighbour"] in ("incomplete", "failed")
    assert seen["mtu"]["ok"] is None


@together
def test_no_way(bridge: Bridge) -> None:
    n1, n2 = pair(bridge)
    n2.address = "10.99.0.2"
    seen = n1.probe(n2)["peers"]["n2"]
    assert seen["route"] == {"dev": None, "src": None, "gateway": None, "error": "Network is unreachable"}
    assert set(results(seen).values()) == {("unreachable", errno.ENETUNREACH)}
    assert (seen["udp"]["result"], seen["mtu"]["ok"]) == ("unreachable", None)


@FAMILIES
@together
def test_the_way_is_another_interface(bridge: Bridge, family: int) -> None:
    n1, n2 = pair(bridge, family)
    bridge.wire(n1, "eth1", 9)
    other = "10.9.0.9" if family == 4 else "fd09::9"
    n1.ip(f"address add {other}/{32 if family == 4 else 128} dev eth1" + (" nodad" if family == 6 else ""))
    n1.ip(f"route add {n2.address}/{32 if family == 4 else 128} dev eth1 src {other}")
    seen = n1.probe(n2)["peers"]["n2"]
    assert seen["route"] == {"dev": "eth1", "src": other, "gateway": None}


@FAMILIES
@together
def test_somebody_has_the_address_too(bridge: Bridge, family: int) -> None:
    n1, n2 = pair(bridge, family)
    n3 = bridge.add("n3", family)
    more = "/24" if family == 4 else "/64 nodad"
    n3.ip(f"address add {n1.address}{more} dev eth0")
    n1.listen()
    found = n1.probe(n2)
    assert (found["duplicate"], found["duplicate_error"]) == ([n3.mac], None)
    assert n3.probe(n2, address=n1.address)["duplicate"] == [n1.mac]
    assert n2.probe()["duplicate"] == []


@together
def test_somebody_else_answers(bridge: Bridge) -> None:
    n1, n2 = pair(bridge)
    n3 = bridge.add("n3")
    n3.listen(ports=[PINNED])
    n2.ip("link set eth0 down")
    n3.ip(f"address add {n2.address}/24 dev eth0")
    seen = n1.probe(n2, ports=(PINNED,))["peers"]["n2"]
    assert (seen["identity"], seen["mac"]) == ("n3", n3.mac)
    assert [entry["answered_by"] for entry in seen["tcp"] if entry["kind"] == "pinned"] == ["n3"]
    assert seen["clock"] is None


@FAMILIES
@together
def test_two_nodes_with_each_others_address(bridge: Bridge, family: int) -> None:
    """What is measured then is told as one thing."""
    nodes = [bridge.add(name, family) for name in ("n1", "n2", "n3")]
    own = {node.name: node.address for node in nodes}
    length, more = (24, "") if family == 4 else (64, " nodad")
    for node, other in ((nodes[0], "n2"), (nodes[1], "n1")):
        node.ip(f"address del {own[node.name]}/{length} dev eth0")
        node.ip(f"address add {own[other]}/{length} dev eth0{more}")
    bridge.listen(ports=[PINNED], random=2)
    probes = {
        node.name: node.probe(*(other for other in nodes if other is not node), ports=(PINNED,)) for node in nodes
    }
    plan = {
        "nodes": {name: {"address": address, "groups": ["ironrack_runtime"]} for name, address in own.items()},
        "ray": None,
        "instances": {},
        "hosts": {name: {"instances": []} for name in own},
    }
    # The names are in no file here.
    report = judge(probes, plan, {"accept": []})
    told = [finding for finding in report["findings"] if finding["check"] not in ("net_names", "net_own_name")]
    assert [(finding["check"], finding["nodes"]) for finding in told] == [("net_interface", ["n1", "n2"])]
    assert told[0]["measured"].startswith(f"n1 has {own['n2']}, the address of n2 and n2 has {own['n1']}")
    # One of the two alone in a run.
    alone = judge({"n1": probes["n1"]}, plan)["findings"]
    told = [finding for finding in alone if finding["check"] not in ("net_names", "net_own_name")]
    assert [finding["check"] for finding in told] == ["net_interface"]


@together
def test_an_interface_without_a_hardware_address(bridge: Bridge) -> None:
    """Point-to-point; of lo the kernel shows zeros."""
    n1 = bridge.add("n1")
    n1.ip("tuntap add mode tun dev tun0")
    n1.ip("address add 10.7.0.1/24 dev tun0")
    n1.ip("link set tun0 up")
    n1.ip("address add 10.6.0.1/32 dev lo")
    for interface, address in (("tun0", "10.7.0.1"), ("lo", "10.6.0.1")):
        found = n1.probe(interface=interface, address=address)
        assert (found["interface"]["name"], found["interface"]["mac"]) == (interface, None)
        assert (found["duplicate"], found["duplicate_error"]) == (None, f"{interface} is no Ethernet interface")
        assert {"10.7.0.1", "10.6.0.1", n1.address} <= set(found["addresses"])


@together
def test_own_second_interface_is_nobody_else(bridge: Bridge) -> None:
    """Linux answers for all its addresses on all its interfaces."""
    n1 = bridge.add("n1")
    bridge.wire(n1, "eth1", 9)
    assert n1.probe()["duplicate"] == []


# Sends echo requests, each of another flow where `fixed` is 0, and prints how many were answered.
ECHO = """
import os, select, socket, struct, sys, time
address, seconds, pause, fixed = sys.argv[1], *map(float, sys.argv[2:])
six = ':' in address
kind = (socket.AF_INET6, socket.IPPROTO_ICMPV6) if six else (socket.AF_INET, socket.IPPROTO_ICMP)
sock = socket.socket(kind[0], socket.SOCK_RAW, kind[1])
sent = answers = 0
end = time.monotonic() + seconds
while (now := time.monotonic()) < end + 0.5:
    if now < end:
        ident = int(fixed) or sent % 60000 + 1
        body = struct.pack('!HH', ident, 1)
        total = 0x0800 + sum(struct.unpack('!HH', body))
        total = ~((total & 0xffff) + (total >> 16)) & 0xffff
        sock.sendto(struct.pack('!BBH', 128 if six else 8, 0, 0 if six else total) + body, (address, 0))
        sent += 1
    while select.select([sock], [], [], pause if now < end else 0.05)[0]:
        data = sock.recv(2048)
        answers += data[0 if six else (data[0] & 15) * 4] == (129 if six else 0)
        if time.monotonic() > end + 0.5:
            break
print(sent, answers)
"""


@FAMILIES
@pytest.mark.parametrize("fixed", [0, 7], ids=["flows", "one-flow"])
@together
def test_a_flood_of_echo_requests_takes_nothing_from_others(bridge: Bridge, family: int, fixed: int) -> None:
    """The firewall's limit holds for each source."""
    n1, flooder, other = (bridge.add(name, family) for name in ("n1", "n2", "n3"))
    rules = {"host": "n1", "mode": "trusted_cluster", "interface": "eth0", "trusted_interfaces": [], "rules": []}
    text = bridge.folder / "rules.nft"
    text.write_text(nft.render(rules))
    n1.run("nft", "-f", str(text))

    def echo(node: Node, seconds: float, pause: float, flow: int) -> tuple[int, int]:
        words = node.run("python3", "-c", ECHO, n1.address, str(seconds), str(pause), str(flow)).split()
        return int(words[0]), int(words[1])

    with ThreadPoolExecutor(2) as pool:
        flood = pool.submit(echo, flooder, 3.0, 0.0, fixed)
        time.sleep(0.7)
        asked, answered = echo(other, 1.5, 0.05, 9)
        sent, got = flood.result()
    assert asked == answered >= 5, f"{answered} of {asked} while {got} of {sent} of the flood were answered"
    assert 200 <= got <= 200 + 100 * 4.5 and sent > 2 * got, f"{got} of {sent} were answered"


@together
def test_address_that_was_taken_at_boot(bridge: Bridge) -> None:
    n1, n2 = bridge.add("n1", 6), bridge.add("n2", 6)
    n2.ip(f"address add {n1.address}/64 dev eth0")
    limit = time.monotonic() + 10
    while not (found := n2.probe(duplicates=False)["interface"]["dad_failed"]) and time.monotonic() < limit:
        time.sleep(0.2)
    assert found == [n1.address]


@together
def test_default_routes(bridge: Bridge) -> None:
    n1 = bridge.add("n1")
    bridge.wire(n1, "eth1", 9)
    n1.ip("address add 10.8.0.1/24 dev eth1")
    n1.ip("route add default via 10.8.0.254 dev eth1 metric 100 src 10.8.0.1")
    n1.ip("route add default via 10.9.0.254 dev eth0 metric 50")
    n1.ip("-6 route add default metric 7 nexthop via fe80::1 dev eth0 nexthop via fe80::2 dev eth1")
    n1.ip("route add default via 10.9.0.253 dev eth0 table 77")  # not the main table
    n1.ip("route add unreachable default metric 4000")
    routes = sorted(n1.probe()["routes"], key=lambda route: (route["family"], route["metric"], route["dev"]))
    assert routes == [
        {"family": 4, "dev": "eth0", "gateway": "10.9.0.254", "metric": 50, "src": None},
        {"family": 4, "dev": "eth1", "gateway": "10.8.0.254", "metric": 100, "src": "10.8.0.1"},
        {"family": 6, "dev": "eth0", "gateway": "fe80::1", "metric": 7, "src": None},
        {"family": 6, "dev": "eth1", "gateway": "fe80::2", "metric": 7, "src": None},
    ]


@together
def test_names(bridge: Bridge) -> None:
    n1, n2 = pair(bridge)
    n3 = bridge.add("n3")
    n1.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 n1\n198.51.100.2 n2\n{n2.address} n2\n")
    found = n1.probe(n2, n3)
    assert found["hostname"] == {"name": "n1", "resolves": ["127.0.1.1"], "error": None}
    assert found["peers"]["n2"]["name"] == {"resolves": [n2.address, "198.51.100.2"], "error": None}
    assert found["peers"]["n3"]["name"]["resolves"] == []
    assert found["peers"]["n3"]["name"]["error"]


@together
def test_peer_outside_of_the_run(bridge: Bridge) -> None:
    n1, n2 = bridge.add("n1"), bridge.add("n2")
    n1.hosts.write_text(f"{n2.address} n2\n")
    n2.ip("link set eth0 mtu 1400")
    bridge.switch.ip("link set eth0-2 mtu 1400")
    seen = n1.probe(n2)["peers"]["n2"]
    assert (seen["tested"], seen["why"]) == (False, "not in this run")
    assert (seen["tcp"], seen["udp"], seen["identity"], seen["clock"]) == ([], None, None, None)
    assert seen["name"]["resolves"] == [n2.address]
    assert (seen["mac"], seen["mtu"]["largest"]) == (n2.mac, 1400)


@together
def test_clocks(bridge: Bridge) -> None:
    """A namespace has no clock of its own, so the module of the peer adds to what it reads."""
    n1, n2 = bridge.add("n1"), bridge.add("n2")
    n2.preamble = "import time\nreal = time.time\ntime.time = lambda: real() + 7.5\n"
    n2.listen()
    clock = n1.probe(n2)["peers"]["n2"]["clock"]
    assert clock["offset_s"] == pytest.approx(7.5, abs=0.1)
    assert 0 < clock["rtt_s"] < 0.5
    assert n1.probe(n2, clock=False)["peers"]["n2"]["clock"] is None


@together
def test_without_root(bridge: Bridge) -> None:
    """Less can be found out, and it says what."""
    n1, n2 = pair(bridge)
    n1.ip("address add 10.9.0.99/24 dev eth0")
    n1.as_user = 65534
    n1.run("sysctl", "-qw", "net.ipv4.ping_group_range=1 0")
    found = n1.probe(n2, timeout=4.0)
    assert (found["duplicate"], found["duplicate_error"]) == (None, "only root may listen on the link: run with become")
    assert found["peers"]["n2"]["mtu"]["by"] == "udp"
    assert found["peers"]["n2"]["identity"] == "n2"
    n1.run("sysctl", "-qw", "net.ipv4.ping_group_range=0 65534")
    assert n1.probe(n2)["peers"]["n2"]["mtu"]["by"] == "icmp"


@together
def test_64_nodes_and_nobody_answers(bridge: Bridge) -> None:
    """945 connections that all wait until the end, and as many questions for the MTU."""
    n1 = bridge.add("n1")
    n1.drop("ip daddr 127.0.1.0/24")
    listener = {
        "node": "x", "token": "x", "control": 40000, "udp": 40000, "held": [], "random": [40001, 40002], "iperf3": False
    }  # fmt: skip
    ports = list(range(10001, 10013))
    peers = {
        f"n{number}": {"address": f"127.0.1.{number}", "listener": listener, "ports": ports} for number in range(2, 65)
    }
    options = {"node": "n1", "address": n1.address, "peers": peers, "timeout": 3}
    with Stopwatch() as watch:
        found = call_module("net_probe", options, *n1.enter)["probe"]
    seen = found["peers"]["n64"]
    assert [entry["result"] for entry in seen["tcp"]] == ["timeout"] * 15
    assert (seen["udp"]["result"], seen["mtu"]["ok"], seen["identity"]) == ("timeout", None, None)
    watch.check(seconds=6, cpu=9)
