"""64 nodes are planned, get rules and are judged in seconds, with the same few tasks for each of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.cluster import RAY_PORTS, build
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.model_files import find_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.validate import validate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import firewall, nft, probe, probe_html, probe_peers

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests/fixtures"
COUNT = 64
NAMES = [f"n{number}" for number in range(1, COUNT + 1)]
ADDRESSES = {name: f"10.20.0.{number}" for number, name in enumerate(NAMES, 1)}
SETTINGS = {"mode": "strict_ports", "admin_networks": ["10.9.0.0/16"], "client_networks": ["10.0.0.0/8"]}
# Of the task files, in their order; what runs on the controller alone is left out.
QUICK = ["net_listener", "net_probe", "net_listener"]
FULL = [name for check in ("gloo", "rdma", "nccl") for name in (f"{check}_check", "async_status")]


def plan() -> dict[str, Any]:
    """Ray over all nodes, and 32 instances of two nodes each."""
    instances = {
        f"llm{number // 2}": {
            "model": {"path": "/data/models/llm", "config": str(FIXTURES / "model_configs/dense_tiny.json")},
            "nodes": NAMES[number : number + 2],
            "executor": "ray",
            "context_length": 512,
            "parallelism": {"tensor": 2, "pipeline": 2},
        }
        for number in range(0, COUNT, 2)
    }
    hosts = {
        name: {
            "python_env_variant": "cpu",
            "python_env_vllm_version": "0.32.0",
            "vllm_instances": instances,
            "cluster_address": ADDRESSES[name],
            "cluster_interface": "eth1",
            "gpus": {"count": 2, "name": "slot", "memory_total_mib": 1024},
        }
        for name in NAMES
    }
    checked = validate(hosts, {"fabric_type": {"type": "str"}, **{name: {"type": "int"} for name in RAY_PORTS}})
    found, problems = build(
        checked.values, {"vllm_nodes": NAMES}, lambda variable, model: find_config(variable, model, FIXTURES)
    )
    assert [*checked.problems, *problems] == []
    return found


def listening(the_plan: dict[str, Any]) -> dict[str, Any]:
    """What net_listener returns."""
    return {
        name: {
            "node": name,
            "address": ADDRESSES[name],
            "token": "t",
            "control": 40001,
            "udp": 40001,
            "held": probe_peers.listener_ports(the_plan, name),
            "busy": [],
            "left": [],
            "failed": [],
            "random": [50001, 50002, 50003],
            "iperf3": False,
        }
        for name in NAMES
    }


def measured(asked: dict[str, Any], closed: tuple[str, str]) -> dict[str, Any]:
    """What net_probe returns where all is well, but that one node does not reach another one."""
    return {name: told(name, number, asked[name]["peers"], closed) for number, name in enumerate(NAMES, 1)}


def told(name: str, number: int, peers: dict[str, Any], closed: tuple[str, str]) -> dict[str, Any]:
    return {
        "node": name,
        "address": ADDRESSES[name],
        "family": 4,
        "started": 0.0,
        "interface": {
            "name": "eth1",
            "mtu": 9000,
            "mac": f"02:00:00:00:00:{number:02x}",
            "speed_mbit": 100000,
            "up": True,
            "has_address": True,
            "addresses": [f"{ADDRESSES[name]}/24"],
            "dad_failed": [],
        },
        "hostname": {"name": name, "resolves": [ADDRESSES[name]], "error": None},
        "routes": [],
        "duplicate": [],
        "duplicate_error": None,
        "ephemeral": [32768, 60999],
        "peers": {other: seen(other, peer, (name, other) == closed) for other, peer in peers.items()},
    }


def seen(other: str, peer: dict[str, Any], closed: bool) -> dict[str, Any]:
    listener = peer["listener"]
    attempts = [(listener["control"], "control")] + [(port, "random") for port in listener["random"]]
    attempts += [(port, "pinned") for port in peer["ports"]]
    return {
        "address": peer["address"],
        "tested": True,
        "why": None,
        "name": {"resolves": [peer["address"]], "error": None},
        "identity": None if closed else other,
        "mac": f"02:00:00:00:00:{int(other[1:]):02x}",
        "neighbour": "reachable",
        "route": {"dev": "eth1", "src": None, "gateway": None},
        "tcp": [
            {
                "port": port,
                "kind": kind,
                "result": "timeout" if closed else "open",
                "errno": None,
                "error": None,
                "ms": 0.2,
                "answered_by": None if closed else other,
            }
            for port, kind in attempts
        ],
        "udp": {"result": "timeout", "ms": None},
        "mtu": {"tried": 9000, "ok": True, "largest": 9000, "by": "icmp", "error": None},
        "clock": {"offset_s": 0.0001, "rtt_s": 0.0003},
        "bandwidth": {"mbit_s": 24500.0, "seconds": 3.0, "streams": 4, "tool": "iperf3"},
    }


@pytest.mark.alone
def test_plan_rules_peers_and_verdict_of_64_nodes() -> None:
    begin = time.process_time()
    the_plan = plan()
    rules = {
        name: nft.render(firewall.rules(the_plan, name, {}, {}, interface="eth1", settings=SETTINGS)) for name in NAMES
    }
    listeners = listening(the_plan)
    asked = probe_peers.peers(the_plan, listeners)
    own = time.process_time() - begin

    # The nodes' part, which is not of the controller's time.
    probes = measured(asked, ("n9", "n20"))

    begin = time.process_time()
    report = probe.judge(probes, the_plan, {"mode": "full"}, listeners=listeners)
    page = probe_html.render(report)
    own += time.process_time() - begin
    assert own <= 10, f"{own:.1f} s"

    assert the_plan["ray"]["head"] == "n1"
    assert len(rules) == COUNT
    assert all("tcp dport" in text and ADDRESSES["n64"] in text for text in rules.values())
    assert max(text.count("\n") for text in rules.values()) < 100, "the nodes are in sets, not a line each"
    assert {name: len(probe["peers"]) for name, probe in probes.items()} == dict.fromkeys(NAMES, COUNT - 1)
    assert all(peer["ports"] for entry in asked.values() for peer in entry["peers"].values()), "Ray's are everybody's"
    assert max(len(entry["pairs"]) for entry in asked.values()) <= 8, "the speed of few pairs of many nodes"
    assert [(found["check"], found["nodes"], found["targets"]) for found in report["findings"]] == [
        ("net_connect", ["n9"], ["n20"])
    ]
    assert sum(len(row) for row in report["matrix"].values()) == COUNT * (COUNT - 1)
    assert "n9" in page


def test_each_node_has_the_same_few_tasks() -> None:
    """No loop, so that connections to a node do not grow with the number of its peers."""
    for name, modules in (("measure_network", [*QUICK, "include_tasks"]), ("measure_full", FULL)):
        tasks = yaml.safe_load((ROOT / f"roles/preflight/tasks/{name}.yml").read_text("utf-8"))
        on_nodes = [task for task in tasks if not task.get("run_once")]
        assert [key.rpartition(".")[2] for task in on_nodes for key in task if key.count(".") == 2] == modules
        assert not [key for task in tasks for key in task if key == "loop" or key.startswith("with_")]
