"""The network's verdict, on simulated nodes with one fault after another."""

from __future__ import annotations

import copy
import json
import random
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.filter.network_preflight import network_preflight
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import probe_groups, probe_html, probe_peers
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network.probe import CHECKS, judge

Probes = dict[str, Any]
OPEN: dict[str, Any] = {"result": "open", "errno": None, "error": None}
TIMEOUT: dict[str, Any] = {"result": "timeout", "errno": None, "error": None, "answered_by": None}
REFUSED: dict[str, Any] = {"result": "refused", "errno": 111, "error": "Connection refused", "answered_by": None}
UNREACHABLE: dict[str, Any] = {
    "result": "unreachable",
    "errno": 113,
    "error": "No route to host",
    "answered_by": None,
}


def plan(count: int = 4, executor: str = "ray") -> dict[str, Any]:
    """The first node is Ray's head and the API node of an instance over all nodes."""
    names = [f"n{number}" for number in range(1, count + 1)]
    world = [{"node": name, "rank": rank, "role": "headless" if rank else "api"} for rank, name in enumerate(names)]
    hosts: dict[str, Any] = {name: {"ray": None, "instances": []} for name in names}
    if executor == "mp":
        for member in world:
            hosts[member["node"]]["instances"].append({"role": member["role"], "args": ["--master-port", "29501"]})
    return {
        "nodes": {
            name: {"address": f"10.77.1.{number}", "interface": "eth1", "groups": ["ironrack_runtime"]}
            for number, name in enumerate(names, 1)
        },
        "ray": {"head": "n1", "workers": names[1:], "address": "10.77.1.1:6379"} if executor == "ray" else None,
        "instances": {
            "tiny": {
                "executor": executor,
                "replicas": [{"name": "tiny", "api_node": "n1", "port": 8000, "world": world}],
            }
        },
        "hosts": hosts,
    }


def listeners(the_plan: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {
            "node": name,
            "address": node["address"],
            "token": "t",
            "control": 40000 + number,
            "udp": 40000 + number,
            "held": probe_peers.listener_ports(the_plan, name),
            "busy": [],
            "left": [],
            "random": [50000 + number, 51000 + number, 52000 + number],
            "iperf3": False,
        }
        for number, (name, node) in enumerate(the_plan["nodes"].items())
    }


def measured(count: int = 4, the_plan: dict[str, Any] | None = None) -> Probes:
    """What net_probe returns on nodes that are well."""
    the_plan = the_plan or plan(count)
    listening = listeners(the_plan)
    asked = probe_peers.peers(the_plan, listening)
    probes: Probes = {}
    for number, (name, node) in enumerate(the_plan["nodes"].items(), 1):
        peers = {}
        for other, peer in asked[name]["peers"].items():
            there = listening[other]
            ports = [(there["control"], "control")] + [(port, "random") for port in there["random"]]
            ports += [(port, "pinned") for port in peer["ports"]]
            peers[other] = {
                "address": peer["address"],
                "tested": True,
                "why": None,
                "name": {"resolves": [peer["address"]], "error": None},
                "identity": other,
                "mac": f"02:00:00:00:00:{int(other[1:]):02x}",
                "neighbour": "reachable",
                "route": {"dev": "eth1", "src": node["address"], "gateway": None},
                "tcp": [{"port": port, "kind": kind, "ms": 0.3, "answered_by": other, **OPEN} for port, kind in ports],
                "udp": {"result": "open", "ms": 0.2},
                "mtu": {"tried": 1500, "ok": True, "largest": 1500, "by": "icmp", "error": None},
                "clock": {"offset_s": 0.0002, "rtt_s": 0.0004},
                "bandwidth": None,
            }
        probes[name] = {
            "node": name,
            "address": node["address"],
            "family": 4,
            "started": 0.0,
            "interface": {
                "name": "eth1",
                "mtu": 1500,
                "mac": f"02:00:00:00:00:{number:02x}",
                "speed_mbit": None,
                "up": True,
                "has_address": True,
                "addresses": [f"{node['address']}/24"],
                "dad_failed": [],
            },
            "hostname": {"name": name, "resolves": [node["address"]], "error": None},
            "routes": [{"family": 4, "dev": "eth0", "gateway": "192.0.2.1", "metric": 0, "src": None}],
            "duplicate": [],
            "duplicate_error": None,
            "ephemeral": [32768, 60999],
            "peers": peers,
        }
    return probes


def block(
    probes: Probes, sources: list[str], targets: list[str], how: dict[str, Any], kinds: tuple[str, ...] = ()
) -> None:
    for source in sources:
        for target in targets:
            if source == target:
                continue
            peer = probes[source]["peers"][target]
            for attempt in peer["tcp"]:
                if not kinds or attempt["kind"] in kinds:
                    attempt.update(how)
            if not kinds:
                peer |= {"identity": None, "clock": None, "mtu": {"tried": 1500, "ok": None, "largest": None}}


def found(probes: Probes, check: str = "", **options: Any) -> list[dict[str, Any]]:
    report = judge(probes, options.pop("the_plan", None) or plan(len(probes)), **options)
    return [finding for finding in report["findings"] if not check or finding["check"] == check]


def only(probes: Probes, check: str, **options: Any) -> dict[str, Any]:
    """The one finding that there has to be."""
    listed = found(probes, **options)
    assert [finding["check"] for finding in listed] == [check], listed
    assert all(listed[0][name] for name in ("measured", "expected", "cause", "remedy"))
    return listed[0]


def status(report: dict[str, Any], check: str) -> tuple[str, str]:
    return next((item["status"], item["measured"]) for item in report["checks"] if item["id"] == check)


# --- well ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 64])
def test_nodes_that_are_well(count: int) -> None:
    report = judge(measured(count), plan(count))
    assert report["findings"] == []
    assert (report["ok"], report["verdict"]) == (True, "pass")
    assert [item["id"] for item in report["checks"]] == list(CHECKS)
    tested = sum(cell["status"] == "pass" for row in report["matrix"].values() for cell in row.values())
    assert tested == count * (count - 1)
    assert "FAIL" not in report["table"]


def test_nodes_with_ipv6_that_are_well() -> None:
    the_plan = plan(3)
    for number, node in enumerate(the_plan["nodes"].values(), 1):
        node["address"] = f"fd00:77:0::{number}"
    probes = measured(3, the_plan)
    for probe in probes.values():
        probe["family"] = 6
        probe["hostname"]["resolves"] = [probe["address"].replace("fd00:77:0::", "FD00:0077::")]
    pinned = [entry for entry in probes["n2"]["peers"]["n1"]["tcp"] if entry["kind"] == "pinned"]
    assert 6379 in {entry["port"] for entry in pinned}
    assert judge(probes, the_plan)["findings"] == []
    probes["n1"]["hostname"]["resolves"] = ["::1"]
    assert only(probes, "net_own_name", the_plan=the_plan)["nodes"] == ["n1"]


def test_single_node_has_nothing_to_test() -> None:
    report = judge(measured(1), plan(1))
    status = {item["id"]: (item["status"], item["measured"]) for item in report["checks"]}
    assert status["net_connect"] == ("skip", "not tested: one node alone in this run")
    assert status["net_own_name"][0] == "pass", "what concerns one node is judged all the same"


def test_limit_says_what_was_not_tested() -> None:
    probes = {"n1": measured(3)["n1"]}
    for peer in probes["n1"]["peers"].values():
        peer |= {"tested": False, "why": "not in this run", "tcp": [], "identity": None, "clock": None}
    report = judge(probes, plan(3))
    assert report["ok"]
    assert report["not_in_this_run"] == ["n2", "n3"]
    assert "not in this run, so not tested: n2, n3" in report["table"]
    # Nobody may take it for a proof.
    assert report["verdict"] == "skip"
    assert report["table"].startswith("network: NOT TESTED: 1 node, no direction between nodes was tested;")
    assert "not tested: one node alone in this run, n2, n3 are not in it" in report["table"]
    assert "NOT TESTED" in probe_html.render(report)
    probes["n1"]["hostname"]["resolves"] = ["127.0.1.1"]
    assert judge(probes, plan(3))["verdict"] == "fail", "what one node alone shows is judged"


def test_nodes_that_listen_to_nobody_prove_nothing() -> None:
    probes = measured(2)
    for probe in probes.values():
        for peer in probe["peers"].values():
            peer |= {"tested": False, "why": "not in this run", "tcp": [], "identity": None, "clock": None}
    assert judge(probes, plan(2))["verdict"] == "skip"
    assert judge(measured(1), plan(1))["verdict"] == "pass", "there is nobody else whom it would need"


def test_full_shows_what_was_not_tested_and_why() -> None:
    probes = measured(3)
    probes["n1"]["peers"]["n2"]["mtu"] = {"tried": 1500, "ok": None, "largest": None, "error": "icmp: no answer"}
    for name in ("n2", "n3"):
        probes[name] |= {"duplicate": None, "duplicate_error": "eth1 is no Ethernet interface"}
    gloo = {name: {"tested": False, "why": "no runtime yet"} for name in probes}
    table = judge(probes, plan(3), {"mode": "full"}, results={"gloo": gloo})["table"]
    assert "\n  net_gloo: not tested: no runtime yet (n1, n2, n3)\n" in table
    assert "\n  net_nccl: not tested: no result of any node\n" in table
    assert "\n  net_mtu_path: not measured in 1 direction: icmp: no answer\n" in table
    assert "\n  net_duplicate_address: not tested on 2 nodes: eth1 is no Ethernet interface\n" in table
    # Of quick, one line.
    table = judge(measured(3), plan(3))["table"]
    assert "\n  net_bandwidth, net_gloo, net_rdma, net_nccl: not tested: preflight_network=full tests it\n" in table


# --- ways that are closed --------------------------------------------------------------------------------------------


def test_node_that_was_not_measured_is_told_by_the_others() -> None:
    probes = measured(3)
    for name in ("n1", "n2"):
        peer = probes[name]["peers"]["n3"]
        peer |= {"tested": False, "why": "not in this run", "tcp": [], "identity": None, "mac": None, "clock": None}
    finding = only({**probes, "n3": None}, "net_probed")
    assert finding["nodes"] == ["n3"]
    assert "n1, n2 see nothing at its address 10.77.1.3" in finding["measured"]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (TIMEOUT, "a firewall on n3 drops new connections"),
        (UNREACHABLE, "a firewall on n3 rejects new connections"),
        (REFUSED, "refuses every port"),
    ],
)
def test_one_direction_is_the_firewall_of_the_target(how: dict[str, Any], cause: str) -> None:
    probes = measured(4)
    block(probes, ["n1", "n2", "n4"], ["n3"], how)
    finding = only(probes, "net_connect")
    assert finding["targets"] == ["n3"]
    assert finding["measured"].startswith("nobody reaches n3")
    assert cause in finding["cause"]
    assert how["result"] in finding["measured"]
    assert (how["error"] or "timeout") in finding["measured"], "the system's own words"


def test_one_pair_one_way() -> None:
    probes = measured(4)
    block(probes, ["n1"], ["n3"], TIMEOUT)
    finding = only(probes, "net_connect")
    assert finding["pairs"] == [["n1", "n3"]]
    assert "n1 cannot reach n3, but the other way works" in finding["measured"]
    assert "firewall on n3" in finding["cause"]


def test_node_that_reaches_nobody() -> None:
    probes = measured(4)
    block(probes, ["n2"], ["n1", "n3", "n4"], TIMEOUT)
    assert only(probes, "net_connect")["measured"].startswith("n2 reaches nobody (tried: n1, n3, n4)")


def test_node_on_the_wrong_network() -> None:
    probes = measured(4)
    block(probes, ["n4"], ["n1", "n2", "n3"], UNREACHABLE)
    block(probes, ["n1", "n2", "n3"], ["n4"], UNREACHABLE)
    finding = only(probes, "net_connect")
    assert (finding["nodes"], finding["targets"]) == (["n4"], ["n1", "n2", "n3"])
    assert "cluster_address" in finding["cause"]
    assert "10.77.1.4" in finding["remedy"]


@pytest.mark.parametrize("count", [4, 64])
def test_partition_is_one_finding_that_names_both_sides(count: int) -> None:
    probes = measured(count)
    names = list(probes)
    left, right = names[: count // 2], names[count // 2 :]
    block(probes, left, right, TIMEOUT)
    block(probes, right, left, TIMEOUT)
    finding = only(probes, "net_partition")
    assert {tuple(finding["nodes"]), tuple(finding["targets"])} == {tuple(left), tuple(right)}
    assert len(finding["pairs"]) == 2 * len(left) * len(right)


def test_partition_that_a_third_side_does_not_see() -> None:
    """Two sides that do not see each other, and a node that sees both: sets, though all are connected somehow."""
    probes = measured(5)
    block(probes, ["n1", "n2"], ["n3", "n4"], TIMEOUT)
    block(probes, ["n3", "n4"], ["n1", "n2"], TIMEOUT)
    finding = only(probes, "net_partition")
    assert (finding["nodes"], finding["targets"]) == (["n1", "n2"], ["n3", "n4"])


def test_partition_beside_a_node_that_is_gone() -> None:
    probes = measured(5)
    for left, right in ((["n1", "n2"], ["n3", "n4"]), (["n5"], ["n1", "n2", "n3", "n4"])):
        block(probes, left, right, TIMEOUT)
        block(probes, right, left, TIMEOUT)
    listed = found(probes)
    assert {finding["check"] for finding in listed} == {"net_connect", "net_partition"}
    assert len(listed) == 2
    assert found(probes, "net_connect")[0]["nodes"] == ["n5"]


def test_firewall_that_rejects_answers_few_of_many() -> None:
    """The kernel limits how many errors it sends a second, so the other attempts time out."""
    probes = measured(4)
    block(probes, ["n1", "n2", "n4"], ["n3"], TIMEOUT)
    for name in ("n1", "n2", "n4"):
        probes[name]["peers"]["n3"]["tcp"][1].update(UNREACHABLE)
    finding = only(probes, "net_connect")
    assert "a firewall on n3 rejects new connections" in finding["cause"]
    assert "errno 113" in finding["measured"]


def test_nobody_answers_on_the_wire() -> None:
    probes = measured(4)
    for source, target in [("n4", name) for name in ("n1", "n2", "n3")] + [(name, "n4") for name in ("n1", "n2", "n3")]:
        block(probes, [source], [target], TIMEOUT)
        probes[source]["peers"][target] |= {"mac": None, "neighbour": "failed"}
    finding = only(probes, "net_connect")
    assert "nobody answers on the wire" in finding["cause"]


def test_nobody_reaches_anybody() -> None:
    probes = measured(4)
    block(probes, list(probes), list(probes), TIMEOUT)
    assert only(probes, "net_connect")["measured"] == "no node reaches any other: timeout"


def test_two_nodes_that_do_not_reach_each_other() -> None:
    probes = measured(2)
    block(probes, ["n1"], ["n2"], TIMEOUT)
    block(probes, ["n2"], ["n1"], TIMEOUT)
    finding = only(probes, "net_connect")
    assert finding["measured"] == "n1 and n2 do not reach each other: timeout"


# --- ports -----------------------------------------------------------------------------------------------------------


def test_firewall_with_a_list_of_ports() -> None:
    probes = measured(4)
    block(probes, ["n1", "n3", "n4"], ["n2"], TIMEOUT, ("random", "control"))
    finding = only(probes, "net_ports_random")
    assert finding["targets"] == ["n2"]
    assert "no random high port" in finding["measured"]
    assert "has a list of ports and drops the rest" in finding["cause"]
    assert "trusted_cluster" in finding["remedy"]


def test_some_random_ports() -> None:
    probes = measured(4)
    for name in ("n1", "n3", "n4"):
        probes[name]["peers"]["n2"]["tcp"][2].update(UNREACHABLE)
    finding = only(probes, "net_ports_random")
    assert "some random high ports are closed" in finding["measured"]
    assert "ip_local_port_range" in finding["cause"]


def test_pinned_port_is_named_with_its_purpose() -> None:
    probes = measured(4)
    for name in ("n2", "n3", "n4"):
        attempt = next(entry for entry in probes[name]["peers"]["n1"]["tcp"] if entry["port"] == 6379)
        attempt.update(REFUSED)
    finding = only(probes, "net_ports_pinned")
    assert "6379 (control store)" in finding["measured"]
    assert finding["targets"] == ["n1"]


def test_service_that_went_away_is_no_closed_port() -> None:
    the_plan = plan(2)
    listening = listeners(the_plan)
    listening["n1"] |= {"held": [], "busy": [6379]}
    probes = measured(2)
    attempt = next(entry for entry in probes["n2"]["peers"]["n1"]["tcp"] if entry["port"] == 6379)
    attempt.update(REFUSED)
    assert found(probes, listeners=listening) == []
    attempt.update(TIMEOUT)
    only(probes, "net_ports_pinned", listeners=listening)


# --- who answers -----------------------------------------------------------------------------------------------------


MUTE = {**OPEN, "answered_by": None, "error": "connected, but no listener answered: timeout"}


def test_everything_open_and_no_listener() -> None:
    """A SYN proxy, or a listener that hangs: connections alone prove nothing."""
    probes = measured(4)
    for name in ("n1", "n3", "n4"):
        block(probes, [name], ["n2"], MUTE)
    finding = only(probes, "net_identity")
    assert (finding["status"], finding["targets"]) == ("fail", ["n2"])
    assert finding["nodes"] == ["n1", "n3", "n4"]
    assert "something accepts connections at every port of 10.77.1.2" in finding["measured"]
    cell = judge(probes, plan(4))["matrix"]["n1"]["n2"]
    assert (cell["status"], cell["open"]) == ("fail", 0)


def test_nobody_is_who_it_should_be() -> None:
    probes = measured(2)
    block(probes, ["n1", "n2"], ["n1", "n2"], MUTE)
    report = judge(probes, plan(2))
    assert report["verdict"] == "fail"
    assert {finding["check"] for finding in report["findings"]} == {"net_identity"}


@pytest.mark.parametrize("kind", ["pinned", "random", "control"])
def test_a_squatter_at_one_port(kind: str) -> None:
    """Without the system's word too: what was held for the test must say its name."""
    the_plan = plan(3)
    probes = measured(3)
    attempt = next(entry for entry in probes["n2"]["peers"]["n1"]["tcp"] if entry["kind"] == kind)
    attempt["answered_by"] = None
    finding = only(probes, "net_identity", listeners=listeners(the_plan))
    assert finding["pairs"] == [["n2", "n1"]]
    assert f"at port {attempt['port']} of 10.77.1.1" in finding["measured"]


def test_a_service_says_no_name() -> None:
    the_plan = plan(2)
    listening = listeners(the_plan)
    listening["n1"] |= {"held": [], "busy": [6379]}
    probes = measured(2)
    attempt = next(entry for entry in probes["n2"]["peers"]["n1"]["tcp"] if entry["port"] == 6379)
    attempt["answered_by"] = None
    assert found(probes, listeners=listening) == []


def test_another_run_says_nothing_of_the_ports() -> None:
    probes = measured(3)
    for attempt in probes["n1"]["peers"]["n2"]["tcp"]:
        attempt.update(TIMEOUT if attempt["kind"] == "random" else {"answered_by": "n2 of another run"})
    probes["n1"]["peers"]["n2"]["identity"] = "n2 of another run"
    finding = only(probes, "net_identity")
    assert (finding["status"], finding["pairs"]) == ("warn", [["n1", "n2"]])


# --- results that are broken -----------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index below a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in inner for place in [(*path, key), *places(each, (*path, key))]]


GARBAGE: list[Any] = [None, True, -1, 1.5, 10**400, float("nan"), float("inf"), "", "x", "\0", [], [None], [1], {}]
GARBAGE += [{"a": None}, [["x"]], {"x": {"y": 1}}]


@pytest.mark.parametrize("seed", range(20))
def test_a_broken_result_still_gives_a_report(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - the same each time
    well, the_plan = measured(3), plan(3)
    well["n1"]["peers"]["n3"]["bandwidth"] = {"mbit_s": 900.0, "seconds": 3.0, "streams": 4, "tool": "sockets"}
    well["n1"]["peers"]["n2"]["mtu"] |= {"ok": False, "largest": 1400}
    everywhere = places(well["n1"])
    for _ in range(60):
        probes = copy.deepcopy(well)
        for path in chance.sample(everywhere, chance.choice([1, 1, 1, 3])):
            place: Any = probes["n1"]
            try:
                for key in path[:-1]:
                    place = place[key]
                if chance.random() < 0.3:
                    del place[path[-1]]
                else:
                    place[path[-1]] = chance.choice(GARBAGE)
            except (KeyError, IndexError, TypeError):
                continue  # gone with what was replaced before
        report = judge(probes, the_plan, listeners=listeners(the_plan))
        assert probe_html.render(report)
        assert {item["id"] for item in report["checks"]} == set(CHECKS)
        broken = [finding for finding in report["findings"] if finding["check"] == "net_probed"]
        assert all(finding["nodes"] == ["n1"] for finding in broken), "the others are well"
        json.dumps(report)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("<html>", "the result is '<html>', which cannot be"),
        (["x"], "the result is "),
        ({"peers": {"n2": {"tcp": [{"port": 1, "kind": "pinned"}]}}}, "peers.n2.tcp[0].result is missing"),
        ({"peers": {"n2": {"clock": {"offset_s": "soon"}}}}, "peers.n2.clock.offset_s is 'soon'"),
        ({"peers": {"n9": {}}}, "peers.n9 is no node of the plan"),
        ({"interface": {"mtu": float("nan")}}, "interface.mtu is 'nan'"),
    ],
)
def test_a_broken_result_is_named(result: Any, words: str) -> None:
    probes = {**measured(3), "n3": result}
    finding = only(probes, "net_probed")
    assert (finding["status"], finding["nodes"]) == ("fail", ["n3"])
    assert f"the measurement of n3 cannot be read: {words}" in finding["measured"]
    assert judge(probes, plan(3))["missing"] == ["n3"]


def test_text_that_is_no_result_is_named_too() -> None:
    probes = {name: {"json": json.dumps(probe)} for name, probe in measured(3).items()}
    report = network_preflight({**probes, "n3": {"json": "Traceback"}}, plan(3))
    assert [(finding["check"], finding["nodes"]) for finding in report["findings"]] == [("net_probed", ["n3"])]
    assert "Traceback" in report["html"]


# --- names, addresses ------------------------------------------------------------------------------------------------


def change(probes: Probes, path: str, value: Any) -> None:
    """Set a value at a path such as n1/peers/n2/identity."""
    *folders, last = path.split("/")
    place: Any = probes
    for key in folders:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value


JUMBO = {"tried": 9000, "ok": True, "largest": 9000}


def single(path: str, value: Any) -> Callable[[Probes], None]:
    return lambda probes: change(probes, path, value)


@pytest.mark.parametrize(
    ("check", "verdict", "break_it", "words"),
    [
        ("net_identity", ("fail", "n1"), single("n1/peers/n2/identity", "n3"), ("at 10.77.1.2.*n3 answers n1", "same")),
        ("net_identity", ("warn", "n1"), single("n1/peers/n2/identity", "n2 of another run"), ("another", "two runs")),
        (
            "net_duplicate_address",
            ("fail", "n3"),
            single("n3/duplicate", ["02:aa:aa:aa:aa:aa"]),
            ("02:aa.*of n3", "DHCP"),
        ),
        (
            "net_duplicate_address",
            ("fail", "n3"),
            single("n3/interface/dad_failed", ["10.77.1.3"]),
            ("kernel of n3 does not use 10.77.1.3", "another machine"),
        ),
        ("net_duplicate_address", ("warn", "n1"), single("n1/peers/n2/mac", "02:bb:bb:bb:bb:bb"), ("02:bb", "second")),
        (
            "net_names",
            ("fail", "n1"),
            single("n1/peers/n2/name/resolves", ["203.0.113.2"]),
            ("203.0.113.2", "old line"),
        ),
        ("net_names", ("fail", "n1"), single("n1/peers/n2/name/resolves", ["127.0.0.1"]), ("127.0.0.1", "old line")),
        (
            "net_names",
            ("warn", "n1"),
            single("n1/peers/n2/name", {"resolves": [], "error": "x"}),
            ("cannot", "no line"),
        ),
        ("net_own_name", ("fail", "n2"), single("n2/hostname/resolves", ["127.0.1.1"]), ("127.0.1.1", "installer")),
        (
            "net_own_name",
            ("warn", "n2"),
            single("n2/hostname/resolves", ["192.0.2.7"]),
            ("192.0.2.7", "another interf"),
        ),
        ("net_own_name", ("warn", "n2"), single("n2/hostname/resolves", []), ("cannot be resolved", "loopback")),
        (
            "net_route",
            ("fail", "n1"),
            single("n1/peers/n2/route", {"dev": "eth0", "src": "192.0.2.1", "gateway": None}),
            ("leaves by eth0, not by eth1", "more specific route"),
        ),
        (
            "net_route",
            ("fail", "n1"),
            single("n1/peers/n2/route", {"dev": "eth1", "src": "10.77.9.1", "gateway": None}),
            ("with the address 10.77.9.1", "more specific route"),
        ),
        (
            "net_route",
            ("fail", "n1"),
            single("n1/peers/n2/route/dev", "lo"),
            ("has that address too", "another interf"),
        ),
        (
            "net_interface",
            ("fail", "n2"),
            single("n2/interface/has_address", False),
            ("not 10.77.1.2", "cluster_address"),
        ),
        ("net_interface", ("fail", "n2"), single("n2/interface/up", False), ("is down", "cable")),
        ("net_interface", ("fail", "n2"), single("n2/interface", None), ("no interface has 10.77.1.2", "gone")),
        ("net_mtu_equal", ("fail", "n2"), single("n2/interface/mtu", 9000), ("1500 on n1, n3, n4 and 9000", "jumbo")),
    ],
)
def test_fault_is_named(
    check: str, verdict: tuple[str, str], break_it: Callable[[Probes], None], words: tuple[str, str]
) -> None:
    probes = measured(4)
    break_it(probes)
    finding = only(probes, check)
    assert (finding["status"], finding["nodes"]) == (verdict[0], [verdict[1]])
    assert re.search(words[0], finding["measured"])
    assert words[1] in finding["cause"]
    accepted = found(probes, settings={"accept": [check]})[0]
    assert (accepted["status"], accepted["accepted"]) == ("warn", verdict[0] == "fail")


def test_cloned_hardware_address() -> None:
    probes = measured(4)
    for name in ("n1", "n4"):
        probes[name]["interface"]["mac"] = "02:00:00:00:00:aa"
        for other in probes:
            if other != name:
                probes[other]["peers"][name]["mac"] = "02:00:00:00:00:aa"
    finding = only(probes, "net_duplicate_address")
    assert "n1, n4 have the same hardware address 02:00:00:00:00:aa" in finding["measured"]


def mix_up(probes: Probes, instead: dict[str, str]) -> None:
    """Give nodes the addresses of others, with all that net_probe then sees."""
    own = {name: probe["address"] for name, probe in probes.items()}
    holders = {own[name]: [name] for name in own if name not in instead}
    for name, other in instead.items():
        holders.setdefault(own[other], []).append(name)
    for name, probe in probes.items():
        has = own[instead.get(name, name)]
        probe["interface"] |= {"addresses": [f"{has}/24"], "has_address": has == own[name]}
        others = [other for other in holders.get(own[name], []) if other != name]
        probe["duplicate"] = [probes[other]["interface"]["mac"] for other in others]
        for target, peer in probe["peers"].items():
            there = holders.get(own[target], [])
            peer["route"]["src"] = has
            if own[target] == has:
                peer |= {"mac": None, "neighbour": None, "route": {"dev": "lo", "src": has, "gateway": None}}
                there = [name]
            if not there:
                block({name: {"peers": {target: peer}}}, [name], [target], UNREACHABLE)
                peer |= {"mac": None, "neighbour": "failed", "clock": None}
                continue
            peer["identity"] = there[0]
            if there[0] == target:
                continue
            if there[0] != name:
                peer["mac"] = probes[there[0]]["interface"]["mac"]
            for attempt in peer["tcp"]:
                attempt.update({"answered_by": there[0]} if attempt["kind"] != "random" else REFUSED)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_two_nodes_with_each_others_address_are_one_finding(count: int) -> None:
    probes = measured(count)
    mix_up(probes, {"n1": "n2", "n2": "n1"})
    finding = only(probes, "net_interface")
    assert (finding["status"], finding["nodes"]) == ("fail", ["n1", "n2"])
    assert finding["measured"] == "n1 has 10.77.1.2, the address of n2 and n2 has 10.77.1.1, the address of n1"
    assert "exchange cluster_address of n1 and n2" in finding["remedy"]
    report = judge(probes, plan(count))
    assert report["matrix"]["n1"]["n2"]["status"] == "fail"
    tested = [cell for row in report["matrix"].values() for cell in row.values() if cell["status"] == "pass"]
    assert len(tested) == (count - 2) * (count - 3), "of the others everything is judged"


def test_addresses_in_a_circle_and_a_fault_beside_it() -> None:
    probes = measured(6)
    mix_up(probes, {"n1": "n2", "n2": "n3", "n3": "n1"})
    block(probes, ["n5"], ["n6"], TIMEOUT)
    assert [finding["check"] for finding in found(probes)] == ["net_interface", "net_connect"]
    assert found(probes, "net_interface")[0]["nodes"] == ["n1", "n2", "n3"]


def test_one_address_twice_and_one_nowhere() -> None:
    """n1 has n2's address in place of its own, and n2 has it as well."""
    probes = measured(4)
    mix_up(probes, {"n1": "n2"})
    finding = only(probes, "net_interface")
    assert finding["measured"] == "n1 has 10.77.1.2, the address of n2; n1 should have 10.77.1.1"
    # The other one is not in the run.
    alone = {"n1": probes["n1"]}
    assert only(alone, "net_interface", the_plan=plan(4))["targets"] == ["n2"]


def test_two_pairs_are_two_findings() -> None:
    probes = measured(6)
    mix_up(probes, {"n1": "n2", "n2": "n1", "n4": "n6", "n6": "n4"})
    assert [finding["nodes"] for finding in found(probes)] == [["n1", "n2"], ["n4", "n6"]]


@pytest.mark.parametrize(
    ("address", "prefix", "kind"),
    [
        ("10.77.1.0", 24, "the address of 10.77.1.0/24"),
        ("10.77.1.255", 24, "the broadcast address of 10.77.1.0/24"),
        ("10.77.1.127", 25, "the broadcast address of 10.77.1.0/25"),
        ("10.77.1.0", 31, ""),
        ("10.77.1.255", 32, ""),
        ("10.77.1.255", 16, ""),
        ("fd00:77::", 64, "the address of fd00:77::/64"),
        ("fd00:77::ffff", 112, ""),
    ],
)
def test_address_that_no_host_may_have(address: str, prefix: int, kind: str) -> None:
    the_plan = plan(2)
    the_plan["nodes"]["n1"]["address"] = address
    the_plan["nodes"]["n2"]["address"] = other = "fd00:77::2" if ":" in address else "10.77.1.2"
    probes = measured(2, the_plan)
    probes["n1"]["interface"]["addresses"] = [f"{address}/{prefix}"]
    for name in probes:
        probes[name]["family"] = 6 if ":" in other else 4
    listed = found(probes, the_plan=the_plan)
    assert [finding["measured"] for finding in listed] == ([f"{address} is {kind}, which eth1 is in"] if kind else [])


@pytest.mark.parametrize("mac", [None, "", "00:00:00:00:00:00", ":".join(["00"] * 20), "ff:ff:ff:ff:ff:ff"])
def test_no_hardware_address_is_no_other_machine(mac: str | None) -> None:
    """Routed, point-to-point and IPoIB interfaces have none, or one of zeros."""
    probes = measured(3)
    for probe in probes.values():
        probe["duplicate"] = [mac] if mac and "00:00" in mac else []
        for peer in probe["peers"].values():
            peer["mac"] = mac
    assert found(probes) == [], "it is not the one that the node says of itself"
    for probe in probes.values():
        probe["interface"]["mac"] = mac
    assert found(probes) == [], "all nodes have the same one"
    probes["n3"] = None
    for name in ("n1", "n2"):
        probes[name]["peers"]["n3"] |= {"tcp": [], "identity": None, "clock": None}
    assert "see nothing at its address" in only(probes, "net_probed")["measured"]


def test_old_hosts_files_are_told_by_node() -> None:
    probes = measured(5)
    # One file for all, and another one on n5.
    for name in ("n1", "n2", "n3", "n4"):
        for target, peer in probes[name]["peers"].items():
            peer["name"]["resolves"] = [f"192.0.2.{target[1:]}"]
    probes["n5"]["peers"]["n2"]["name"]["resolves"] = ["198.51.100.2"]
    listed = found(probes)
    assert [(finding["check"], finding["nodes"]) for finding in listed] == [
        ("net_names", ["n1", "n2", "n3", "n4"]),
        ("net_names", ["n5"]),
    ]
    assert listed[0]["measured"] == (
        "on n1, n2, n3, n4 the names of 5 nodes mean other addresses: n1: 192.0.2.1; n2: 192.0.2.2; n3: 192.0.2.3;"
        " n4: 192.0.2.4; and 1 more"
    )
    assert listed[1]["measured"] == "on n5 the name n2 means 198.51.100.2"


def test_the_same_wrong_way_on_all_nodes_is_one_finding() -> None:
    probes = measured(4)
    for probe in probes.values():
        for peer in probe["peers"].values():
            peer["route"] = {"dev": "eth0", "src": "192.0.2.1", "gateway": None}
    finding = only(probes, "net_route")
    assert finding["measured"] == "from n1, n2, n3, n4 to n1, n2, n3, n4 traffic leaves by eth0, not by eth1"
    assert len(finding["pairs"]) == 12


def test_several_interfaces_that_are_down_are_one_finding() -> None:
    probes = measured(4)
    for name in ("n2", "n3"):
        probes[name]["interface"]["up"] = False
    finding = only(probes, "net_interface")
    assert (finding["nodes"], finding["measured"]) == (["n2", "n3"], "n2: eth1 is down; n3: eth1 is down")


@pytest.mark.parametrize(
    ("resolves", "addresses", "cause"),
    [
        (["192.0.2.2"], ["10.77.1.2/24", "192.0.2.2/24"], "the name belongs to another interface of the node"),
        (["192.0.2.2"], None, "the name belongs to another interface of the node"),
        (["192.0.2.2"], ["10.77.1.2/24", "198.51.100.2/24"], "an address that the node does not have (any more)"),
        (
            ["fd00::2", "2001:db8::2"],
            ["10.77.1.2/24", "fd00::2/64"],
            "the cluster speaks IPv4, and the name is known by",
        ),
        (["10.77.1.3"], ["10.77.1.2/24"], "the name means n3 there: /etc/hosts was copied from it"),
    ],
)
def test_why_an_own_name_means_something_else(resolves: list[str], addresses: list[str] | None, cause: str) -> None:
    probes = measured(3)
    probes["n2"] |= {"hostname": {"name": "n2", "resolves": resolves, "error": None}, "addresses": addresses}
    finding = only(probes, "net_own_name")
    assert finding["measured"] == f"a node's own name: n2: n2 means {' and '.join(resolves)}, not 10.77.1.2"
    assert finding["cause"].startswith(cause)


def verbs(finding: dict[str, Any]) -> str:
    return " | ".join(finding[part] for part in ("measured", "cause"))


def test_verbs_agree_with_one_node_and_with_several() -> None:
    assert probe_groups.do(["n1"], "find") == "n1 finds"
    assert probe_groups.do(["n1", "n2"], "find") == "n1, n2 find"
    assert [probe_groups.verb(word, 1) for word in ("are", "do not reach", "have", "reach", "were")] == [
        "is", "does not reach", "has", "reaches", "was"
    ]  # fmt: skip
    assert (probe_groups.count(1, "node"), probe_groups.count(2, "node")) == ("1 node", "2 nodes")
    for number, words in ((1, "n1 finds 10.77.1.3"), (2, "n1, n2 find 10.77.1.3")):
        probes = measured(3)
        for name in ("n1", "n2")[:number]:
            probes[name]["peers"]["n3"]["mac"] = "02:bb:bb:bb:bb:bb"
        assert words in verbs(only(probes, "net_duplicate_address"))
    for targets, words in (
        (["n4"], "the firewall on n4 has a list of ports and drops the rest"),
        (["n3", "n4"], "the firewalls on n3, n4 have a list of ports and drop the rest"),
    ):
        probes = measured(4)
        block(probes, ["n1", "n2"], targets, TIMEOUT, ("random", "control"))
        assert words in verbs(only(probes, "net_ports_random"))
    for targets, words in (
        (["n4"], "a firewall on n4 drops new connections"),
        (["n4", "n5"], "firewalls on n4, n5 drop new connections"),
    ):
        probes = measured(5)
        block(probes, ["n1", "n2"], targets, TIMEOUT)
        assert words in verbs(only(probes, "net_connect"))
    probes = measured(3)
    jumbo(probes, ["n1"])
    for name in ("n2", "n3"):
        probes["n1"]["peers"][name]["mtu"] = {"tried": 9000, "ok": False, "largest": 1500}
    assert (
        "n2, n3 have an MTU of 1500 on their interfaces, the other has 9000"
        in found(probes, "net_mtu_path")[0]["cause"]
    )


def test_a_node_with_another_ones_address_is_no_firewall() -> None:
    """n2 has n1's address too: what it sends to n1 never leaves it, and n1 gets no answers. No port is closed."""
    probes = measured(3)
    there = probes["n2"]["peers"]["n1"]
    there |= {"identity": "n2", "route": {"dev": "lo", "src": "10.77.1.1", "gateway": None}}
    for attempt in there["tcp"]:
        attempt.update(REFUSED if attempt["kind"] == "random" else {"answered_by": "n2"})
    for attempt in probes["n1"]["peers"]["n2"]["tcp"]:
        attempt.update(TIMEOUT)
    probes["n1"]["duplicate"] = ["02:00:00:00:00:02"]
    checks = {finding["check"] for finding in found(probes)}
    assert "net_duplicate_address" in checks
    assert not checks & {"net_connect", "net_ports_random", "net_ports_pinned", "net_partition"}


def test_gateway_and_infiniband_have_other_hardware_addresses() -> None:
    probes = measured(2)
    probes["n1"]["peers"]["n2"] |= {
        "mac": "02:ff:ff:ff:ff:ff",
        "route": {"dev": "eth1", "src": "10.77.1.1", "gateway": "10.77.1.254"},
    }
    probes["n2"]["peers"]["n1"]["mac"] = ":".join(["80"] * 20)
    assert found(probes) == []


@pytest.mark.parametrize(
    ("routes", "count"),
    [
        ([], 0),
        ([(4, "eth0", 0), (6, "eth0", 1024)], 0),
        ([(4, "eth0", 0), (4, "eth1", 100)], 1),
        ([(6, "eth0", 0), (6, "eth0", 1024)], 0),
        ([(6, "eth0", 0), (6, "eth1", 0)], 1),
    ],
)
def test_second_default_route(routes: list[tuple[int, str, int]], count: int) -> None:
    probes = measured(2)
    probes["n1"]["routes"] = [
        {"family": family, "dev": device, "gateway": "192.0.2.1", "metric": metric} for family, device, metric in routes
    ]
    listed = found(probes)
    assert [finding["check"] for finding in listed] == ["net_default_route"] * count
    assert all("eth0 via" in finding["measured"] and "eth1 via" in finding["measured"] for finding in listed)


def test_two_families() -> None:
    probes = measured(4)
    probes["n2"]["family"] = 6
    assert "IPv4 and n2 IPv6" in only(probes, "net_family")["measured"]


# --- MTU, clock, speed -----------------------------------------------------------------------------------------------


def jumbo(probes: Probes, names: list[str]) -> None:
    for name in names:
        probes[name]["interface"]["mtu"] = 9000
        for peer in probes[name]["peers"].values():
            peer["mtu"] = {"tried": 9000, "ok": True, "largest": 9000}


def test_switch_that_passes_no_jumbo_frames() -> None:
    probes = measured(4)
    jumbo(probes, list(probes))
    for source, target in (("n1", "n2"), ("n2", "n1"), ("n3", "n2"), ("n2", "n3"), ("n4", "n2"), ("n2", "n4")):
        probes[source]["peers"][target]["mtu"] = {"tried": 9000, "ok": False, "largest": 1500}
    finding = only(probes, "net_mtu_path")
    assert finding["nodes"] == ["n2"]
    assert "9000 bytes get lost, 1500 bytes is the largest" in finding["measured"]
    assert "a switch port" in finding["cause"]


def test_mtu_mismatch_names_the_smaller_side() -> None:
    probes = measured(4)
    jumbo(probes, ["n1", "n3", "n4"])
    for name in ("n1", "n3", "n4"):
        probes[name]["peers"]["n2"]["mtu"] = {"tried": 9000, "ok": False, "largest": 1500}
    listed = {finding["check"]: finding for finding in found(probes)}
    assert set(listed) == {"net_mtu_path", "net_mtu_equal"}
    assert listed["net_mtu_equal"]["nodes"] == ["n2"]
    assert listed["net_mtu_path"]["targets"] == ["n2"]
    assert "n2 has an MTU of 1500 on its interface, the others have 9000" in listed["net_mtu_path"]["cause"]


def test_mtu_that_nothing_answered_is_not_judged() -> None:
    probes = measured(2)
    for name, other in (("n1", "n2"), ("n2", "n1")):
        probes[name]["peers"][other]["mtu"] = {"tried": 1500, "ok": None, "largest": None, "error": "no answer"}
    report = judge(probes, plan(2))
    assert report["findings"] == []
    check = next(item for item in report["checks"] if item["id"] == "net_mtu_path")
    assert (check["status"], check["measured"]) == ("skip", "not measured: no answer")


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_clock_that_is_off(count: int) -> None:
    probes = measured(count)
    for name, probe in probes.items():
        for other, peer in probe["peers"].items():
            peer["clock"]["offset_s"] = 95.0 * ((other == "n2") - (name == "n2")) + 0.001
    finding = only(probes, "net_clock")
    if count > 2:
        assert finding["nodes"] == ["n2"]
        assert "n2 +95.0 s" in finding["measured"]
    else:
        assert finding["nodes"] == ["n1", "n2"]
    assert not found(probes, settings={"clock_seconds": 100})


def test_clocks_are_compared_by_way_of_others() -> None:
    """n1 and n2 do not see each other, and one direction to n3 is lost: n3 alone is wrong, by all of it."""
    probes = measured(3)
    for name, probe in probes.items():
        for other, peer in probe["peers"].items():
            peer["clock"]["offset_s"] = 90.0 * ((other == "n3") - (name == "n3"))
    probes["n1"]["peers"]["n2"]["clock"] = probes["n2"]["peers"]["n1"]["clock"] = None
    probes["n2"]["peers"]["n3"]["clock"] = None
    finding = only(probes, "net_clock")
    assert finding["nodes"] == ["n3"]
    assert "n3 +90.0 s" in finding["measured"]


def speeds(probes: Probes, usual: float, link: int | None = None, **slow: float) -> None:
    for probe in probes.values():
        probe["interface"]["speed_mbit"] = link
        for other, peer in probe["peers"].items():
            peer["bandwidth"] = {"mbit_s": slow.get(other, usual), "seconds": 2, "streams": 4, "tool": "iperf3"}


def test_speed_against_the_link() -> None:
    probes = measured(4)
    speeds(probes, 9400, 10000)
    assert found(probes) == []
    speeds(probes, 7900, 10000)
    finding = only(probes, "net_bandwidth")
    assert finding["expected"] == "at least 8000 Mbit/s (0.8 of 10000 Mbit/s)"
    assert found(probes, settings={"min_bandwidth_fraction": 0.7}) == []
    # What one process makes of a fast link is known too.
    speeds(probes, 21000, 400000)
    assert found(probes) == []


@pytest.mark.parametrize("link", [None, 10000])
def test_slow_pair_among_others(link: int | None) -> None:
    probes = measured(4)
    speeds(probes, 9400, link, n3=940)
    if link:
        probes["n3"]["interface"]["speed_mbit"] = 1000
    finding = only(probes, "net_bandwidth")
    assert (finding["targets"], finding["status"]) == (["n3"], "fail" if link else "warn")
    assert "940 Mbit/s; most pairs have 9400" in finding["measured"]
    if link:
        assert finding["cause"] == "the link of n3 runs at 1000 Mbit/s"


def test_speed_that_was_not_measured() -> None:
    probes = measured(3)
    speeds(probes, 9400)
    probes["n1"]["peers"]["n2"]["bandwidth"] = {"error": "busy"}
    finding = only(probes, "net_bandwidth")
    assert (finding["status"], finding["pairs"]) == ("warn", [["n1", "n2"]])


def test_gloo() -> None:
    def node(following: str, previous: str, **more: Any) -> dict[str, Any]:
        ends = {"next": {"peer": following, "ok": True}, "previous": {"peer": previous, "ok": True}}
        return {"tested": True, "why": None, "interface": "eth1", **ends, **more}

    results = {"n1": node("n2", "n3"), "n2": node("n3", "n1"), "n3": node("n1", "n2")}
    report = judge(measured(3), plan(3), results={"gloo": results})
    assert (report["findings"], status(report, "net_gloo")) == ([], ("pass", "3 pairs"))
    error = "RuntimeError: Gloo connectFullMesh failed with 127.0.1.1"
    results["n3"] |= {"previous": {"peer": "n2", "ok": False, "error": error}, "interface": None}
    finding = only(measured(3), "net_gloo", results={"gloo": results})
    assert (finding["nodes"], finding["measured"]) == (["n2", "n3"], f"1 of 3 pairs failed: n3: {error}")
    assert "GLOO_SOCKET_IFNAME is not set there" in finding["cause"]
    # A neighbour that could not take part is nobody's fault.
    results["n3"] = {"tested": False, "why": "no runtime yet", "interface": None, "next": None, "previous": None}
    results["n2"]["next"] |= {"ok": False, "error": "timed out"}
    report = judge(measured(3), plan(3), results={"gloo": results})
    assert report["findings"] == []
    assert status(report, "net_gloo") == ("pass", "1 pair; not tested on some nodes: no runtime yet (n3)")
    none = {name: {"tested": False, "why": "no runtime yet"} for name in results}
    report = judge(measured(3), plan(3), results={"gloo": none})
    assert status(report, "net_gloo") == ("skip", "not tested: no runtime yet (n1, n2, n3)")


def test_nccl() -> None:
    """More of it is in test_bandwidth.py."""
    alone: dict[str, Any] = {"kind": "alone", "nodes": ["n1"], "why": None, "ok": False, "warnings": [], "via": {}}
    result = {"gpus": ["slot"] * 2, "devices": [], "variables": {}, "runs": [{**alone, "error": "CUDA error 802"}]}
    finding = only(measured(2), "net_nccl", results={"nccl": {"n1": result}})
    assert (finding["nodes"], finding["measured"]) == (["n1"], "n1 alone: CUDA error 802")
    assert "Fabric Manager" in finding["remedy"]
    report = judge(measured(2), plan(2))
    assert status(report, "net_nccl") == ("skip", "not tested: preflight_network=full tests it")


def test_every_check_has_a_fault_here() -> None:
    files = (Path(__file__), Path(__file__).with_name("test_rdma.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [check for check in CHECKS if f'"{check}"' not in text] == []


# --- who tries what --------------------------------------------------------------------------------------------------


def test_ports_are_those_that_the_firewall_promises() -> None:
    the_plan = plan(3)
    assert 6379 in probe_peers.listener_ports(the_plan, "n1")
    assert 6379 not in probe_peers.listener_ports(the_plan, "n2"), "a worker has no control store"
    assert {10100, 10199} <= set(probe_peers.listener_ports(the_plan, "n2")), "both ends of a range"
    moved = probe_peers.listener_ports(the_plan, "n1", {"ray_port": 7000})
    assert 7000 in moved and 6379 not in moved
    multi = plan(3, "mp")
    assert probe_peers.listener_ports(multi, "n1") == [8000, 29501]
    assert probe_peers.listener_ports(multi, "n2") == []
    assert probe_peers.listener_ports(plan(1), "n1") == []


def test_peers_try_what_is_held_or_in_use() -> None:
    the_plan = plan(3)
    listening = listeners(the_plan)
    listening["n1"] |= {"held": [8000], "busy": [6379], "left": [6380]}
    listening["n3"] = None
    asked = probe_peers.peers(the_plan, listening)
    assert asked["n2"]["peers"]["n1"]["ports"] == [6379, 8000]
    assert asked["n2"]["peers"]["n3"] == {"address": "10.77.1.3", "listener": None, "ports": []}
    assert asked["n1"]["pairs"] == ["n2"]


@pytest.mark.parametrize("count", [2, 8, 9, 64])
def test_each_node_is_as_often_one_end_as_the_other(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    targets = [target for name in names for target in probe_peers.rotation(names, name)]
    assert {targets.count(name) for name in names} == {len(targets) // count}
    assert len(targets) // count <= 7
    assert all(name not in probe_peers.rotation(names, name) for name in names)


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_bad_pair_once(seed: int) -> None:
    import random  # noqa: PLC0415 - the one place that needs it

    chosen = random.Random(seed)  # noqa: S311 - no secret
    names = [f"n{number}" for number in range(1, 7)]
    tested = {(a, b) for a in names for b in names if a != b}
    bad = set(chosen.sample(sorted(tested), chosen.randint(1, len(tested))))
    groups = probe_groups.grouped(bad, tested)
    pairs = [pair for group in groups for pair in group.pairs]
    assert sorted(pairs) == sorted(bad)


# --- 64 nodes, and how it looks --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags that are opened and closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "td":
            self.cells.append((dict(attrs).get("class") or "", dict(attrs).get("title")))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.alone
def test_sixty_four_nodes_in_time() -> None:
    the_plan, probes = plan(64), measured(64)
    speeds(probes, 9400, n7=900)
    block(probes, ["n9"], ["n20"], TIMEOUT)
    begin = time.process_time()
    report = judge(probes, the_plan)
    page = probe_html.render(report)
    assert time.process_time() - begin <= 2.0
    lines = report["table"].splitlines()
    assert len(lines) < 30, "pairs that are well have no line"
    assert any("n9 cannot reach n20" in line for line in lines)
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    cells = [cell for cell in parser.cells if cell[1]]
    assert len(cells) == 64 * 63 * 5, "connections, delay, packet size, clocks, speed"
    begin = time.process_time()
    probe_peers.peers(the_plan, listeners(the_plan))
    assert time.process_time() - begin <= 2.0


def test_page_stands_alone_and_escapes() -> None:
    probes = measured(3)
    probes["n2"]["hostname"] = {"name": "<b>x</b>", "resolves": [], "error": "<script>alert(1)</script>"}
    page = probe_html.render(judge(probes, plan(3)))
    assert "<script" not in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert not re.search(r"(src|href)=|url\(|@import", page)
    assert "prefers-color-scheme:dark" in page


def test_page_of_a_node_with_no_measurement() -> None:
    probes: Probes = {**copy.deepcopy(measured(3)), "n3": None}
    parser = Page()
    parser.feed(probe_html.render(judge(probes, plan(3))))
    assert parser.open == []


def test_small_matrix_on_the_screen() -> None:
    probes = measured(3)
    block(probes, ["n1"], ["n3"], TIMEOUT)
    table = judge(probes, plan(3))["table"]
    assert re.search(r"(?m)^n1 +0\.3ms +FAIL$", table)
    assert re.search(r"(?m)^n3 +0\.3ms  0\.3ms$", table)
