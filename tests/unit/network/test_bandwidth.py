"""Who exchanges data over NCCL with whom, what it should reach, and the verdict. NCCL speaks as in public logs."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import bandwidth, probe_fabric
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network.probe import judge

H200 = ["NVIDIA H200"] * 8
NDR = [
    {"name": f"mlx5_{number}", "port": 1, "active": True, "link_layer": "InfiniBand", "gbit": 400.0}
    for number in range(8)
]
RDMA = {"NCCL_IB_HCA": "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7", "NCCL_NET": "IB"}
GDR = {"P2P/CUMEM": 112, "NET/IB/GDRDMA": 32}


def plan(*engines: list[str]) -> dict[str, Any]:
    names = dict.fromkeys(name for nodes in engines for name in nodes)
    return {
        "nodes": {
            name: {"address": f"10.77.1.{number}", "groups": ["ironrack_runtime"]}
            for number, name in enumerate(names, 1)
        },
        "instances": {
            f"llm{number}": {"replicas": [{"world": [{"node": name} for name in nodes for _ in range(2)]}]}
            for number, nodes in enumerate(engines)
        },
    }


def listeners(*names: str) -> dict[str, Any]:
    return {name: {"random": [50001, 50002, 50003]} for name in names}


def schedule(the_plan: dict[str, Any], *present: str) -> dict[str, list[tuple[str, list[str], int]]]:
    found = bandwidth.meetings(the_plan, listeners(*(present or the_plan["nodes"])))
    return {name: [(e["kind"], e["nodes"], e["round"]) for e in told["meetings"]] for name, told in found.items()}


def run(*nodes: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "alone" if len(nodes) == 1 else "pair",
        "nodes": list(nodes),
        "why": None,
        "ok": True,
        "error": None,
        "warnings": [],
        "ranks": 8 * len(nodes),
        "sizes": [],
        "bus_gb_s": 472.0 if len(nodes) == 1 else 365.0,
        "version": "2.27.7+cuda13.0",
        "network": "IB",
        "interface": "eth1",
        "via": {"P2P/CUMEM": 112} if len(nodes) == 1 else dict(GDR),
        "nvls": 16 if len(nodes) == 1 else 0,
        "gdr": [],
        **more,
    }


def node(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "tested": True,
        "why": None,
        "gpus": H200,
        "devices": NDR,
        "variables": RDMA,
        "runs": list(runs),
        **more,
    }


def pair_of(first: dict[str, Any], second: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Two nodes that are well by themselves, and a pair as each of them saw it."""
    return {
        "n1": node(run("n1"), run("n1", "n2", **first), **more),
        "n2": node(run("n2"), run("n1", "n2", **second), **more),
    }


def verdict(results: dict[str, Any], mode: str = "full") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    report = judge({name: {} for name in results}, plan(["n1", "n2"]), {"mode": mode}, results={"nccl": results})
    check = next(check for check in report["checks"] if check["id"] == "net_nccl")
    return check, [finding for finding in report["findings"] if finding["check"] == "net_nccl"]


# --- who with whom ---------------------------------------------------------------------------------------------------


def test_two_nodes_are_one_pair() -> None:
    found = bandwidth.meetings(plan(["n1", "n2"]), listeners("n1", "n2"))
    pair = {"kind": "pair", "nodes": ["n1", "n2"], "address": "10.77.1.1", "port": 50003, "round": 1}
    assert found["n1"]["meetings"] == found["n2"]["meetings"] == [pair]


@pytest.mark.parametrize("count", [3, 4, 5, 8, 64])
def test_ring_then_all_and_no_node_twice_at_a_time(count: int) -> None:
    names = [f"n{number}" for number in range(1, count + 1)]
    found = schedule(plan(names))
    every = {(kind, tuple(nodes), number) for told in found.values() for kind, nodes, number in told}
    pairs = [entry for entry in every if entry[0] == "pair"]
    assert {frozenset(nodes) for _, nodes, _ in pairs} == {
        frozenset((names[at], names[(at + 1) % count])) for at in range(count)
    }
    assert [entry for entry in every if entry[0] == "all"] == [("all", tuple(names), max(e[2] for e in every))]
    for name, told in found.items():
        rounds = [number for _, _, number in told]
        assert rounds == sorted(set(rounds)), name
        assert all(name in nodes for _, nodes, _ in told)
    assert max(entry[2] for entry in every) == 3 + count % 2


def test_nodes_that_share_no_engine_have_nothing_to_exchange() -> None:
    the_plan = plan(["n1", "n2"], ["n3"], ["n2", "n1"])
    assert schedule(the_plan) == {"n1": [("pair", ["n1", "n2"], 1)], "n2": [("pair", ["n1", "n2"], 1)], "n3": []}
    # With --limit, or where a node is down, the others are tried.
    assert schedule(the_plan, "n1", "n3") == {"n1": [], "n2": [], "n3": []}


def test_time_grows_with_the_rounds() -> None:
    short = bandwidth.meetings(plan(["n1"]), listeners("n1"))["n1"]["seconds"]
    long = bandwidth.meetings(plan(["n1", "n2", "n3"]), listeners("n1", "n2", "n3"))["n1"]["seconds"]
    assert (short, long) == (600, 600 + 4 * bandwidth.MEETING_SECONDS)


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "nvls", "figure"),
    [
        (H200, True, 475),
        (["NVIDIA H100 80GB HBM3"] * 8, True, 475),
        (H200, False, 370),
        (["NVIDIA A100-SXM4-80GB"] * 8, False, 230),
        # Two GPUs of such a board were not told of, nor cards with another NVLink.
        (["NVIDIA H200"] * 2, False, None),
        (["NVIDIA H200 NVL"] * 8, False, None),
        (["NVIDIA H100 PCIe"] * 8, False, None),
        (["NVIDIA H800"] * 8, True, None),
        (["NVIDIA H200"] * 7 + ["NVIDIA H100 PCIe"], True, None),
    ],
)
def test_figures_of_one_node(gpus: list[str], nvls: bool, figure: float | None) -> None:
    found = bandwidth.alone(gpus, nvls)
    assert (found.gb_s if found else None) == figure


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("=mlx5_1", ["mlx5_1"]),
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1:1,mlx5_10:2", ["mlx5_1"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10"]),
        ("^mlx5_1", ["mlx5_0"]),
    ],
)
def test_adapters_that_nccl_takes(wanted: str | None, names: list[str]) -> None:
    devices = [{"name": f"mlx5_{number}", "port": 1, "active": number != 2} for number in (0, 1, 2, 10)]
    assert [device["name"] for device in bandwidth.used(devices, wanted)] == names


def test_what_adapters_carry() -> None:
    assert bandwidth.carried(NDR, 8) == (8 * 46.0, bandwidth.ADAPTERS[400][1])
    assert bandwidth.carried(NDR, 2) == (2 * 46.0, bandwidth.ADAPTERS[400][1])
    assert bandwidth.carried([*NDR, {"gbit": 100.0}], 8) is None
    assert bandwidth.carried([], 8) is None


def test_what_a_pair_has_to_reach() -> None:
    told = bandwidth.expected(run("n1", "n2"), [node(), node()])
    assert told is not None
    assert told[0] == pytest.approx(0.85 * 368)
    # The node with fewer adapters is the measure of both.
    fewer = node(variables={"NCCL_IB_HCA": "=mlx5_0,mlx5_1"})
    told = bandwidth.expected(run("n1", "n2"), [node(), fewer])
    assert told is not None
    assert told[0] == pytest.approx(0.85 * 92)
    # What these GPUs cannot do among themselves, no adapter makes them do.
    older = node(gpus=["NVIDIA A100-SXM4-80GB"] * 8)
    told = bandwidth.expected(run("n1", "n2"), [older, older])
    assert told is not None
    assert told[0] == pytest.approx(0.85 * 230)
    assert bandwidth.expected(run("n1", "n2", via={"NET/Socket": 4}), [node(), node()]) is None
    assert bandwidth.expected(run("n1", "n2", kind="all"), [node(), node()]) is None


@pytest.mark.parametrize(
    ("words", "kind", "cause"),
    [
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            "alone",
            "802",
        ),
        ("Bootstrap : no socket interface found", "pair", "NCCL_SOCKET_IFNAME names an interface"),
        ("Call to ibv_reg_mr failed with error Cannot allocate memory", "pair", "locked memory"),
        ("Call to ibv_modify_qp failed with error Network is unreachable", "pair", "no address"),
        ("Call to ibv_modify_qp failed with 110 Connection timed out", "pair", "rails that are not joined"),
        ("Call to ibv_modify_qp failed with error No such device", "pair", "address index"),
        (
            "NET/IB : Got completion from peer 10.0.0.1<55921> with status=12 opcode=1",
            "pair",
            "packets of RDMA are lost",
        ),
        ("NET/IB : Got completion with error 4: local access violation", "pair", "different MTUs"),
        ("Failed to initialize any NET plugin", "alone", "none of the RDMA devices"),
        (
            "Error: failed to extend /dev/shm/nccl-x to 9637892 bytes, error: No space left on device (28)",
            "alone",
            "shm",
        ),
        ("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401", "alone", "multicast"),
        ("Cuda failure 2 'out of memory'", "alone", "holds the GPU"),
        (
            "socketStartConnect: Connect to 10.0.0.1<41235> failed : Software caused connection abort",
            "pair",
            "random port",
        ),
        ("timed out: no end within 180 seconds", "alone", "ACS"),
        ("timed out: no end within 180 seconds", "pair", "closed random ports"),
        ("something new", "pair", "own words"),
    ],
)
def test_causes(words: str, kind: str, cause: str) -> None:
    assert cause in bandwidth.explain(words, kind)[0]


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_all_is_well() -> None:
    check, findings = verdict(pair_of({}, {"bus_gb_s": None}))
    assert findings == []
    assert check["status"] == "pass"
    assert check["measured"] == (
        "3 times, the slowest: n1 alone 472 GB/s, at least 427.5 (NVLS, P2P/CUMEM) and"
        " n1, n2 365 GB/s, at least 312.8 (NET/IB/GDRDMA, P2P/CUMEM)"
    )


def test_figures_are_on_the_screen_too() -> None:
    report = judge({}, plan(["n1", "n2"]), {"mode": "full"}, results={"nccl": pair_of({}, {})})
    assert "  slowest over NCCL: n1 alone 472 GB/s, at least 427.5 (NVLS, P2P/CUMEM)\n" in report["table"]
    assert "  slowest over NCCL: n1, n2 365 GB/s" in report["table"]


def test_each_run_is_told_once_with_what_it_had_to_reach() -> None:
    told = probe_fabric.runs(pair_of({}, {}))
    assert [(entry["kind"], entry["nodes"]) for entry in told] == [
        ("alone", ["n1"]),
        ("pair", ["n1", "n2"]),
        ("alone", ["n2"]),
    ]
    assert [entry["expected"]["gb_s"] for entry in told] == [427.5, 312.8, 427.5]
    assert "nccl-tests/issues/290" in told[0]["expected"]["of"]


def test_slow_node_and_slow_pair() -> None:
    results = pair_of({"bus_gb_s": 180.0}, {})
    results["n2"]["runs"][0] |= {"bus_gb_s": 300.0}
    check, findings = verdict(results)
    assert check["status"] == "fail"
    assert {tuple(finding["nodes"]): finding["status"] for finding in findings} == {
        ("n1", "n2"): "fail",
        ("n2",): "fail",
    }
    pair = next(finding for finding in findings if finding["pairs"])
    assert (pair["pairs"], "85% of 368 GB/s" in pair["expected"]) == ([["n1", "n2"]], True)


def test_without_gpudirect() -> None:
    results = pair_of({"via": {"NET/IB": 32}, "bus_gb_s": 330.0}, {"via": {"NET/IB": 32}})
    check, findings = verdict(results)
    assert (check["status"], [finding["status"] for finding in findings]) == ("warn", ["warn"])
    assert "GPUDirect RDMA is off" in findings[0]["cause"]


def test_tcp_is_told_only_but_for_hosts_with_rdma() -> None:
    sockets = {"via": {"NET/Socket": 8}, "bus_gb_s": 2.1, "network": "Socket"}
    plain = {"variables": {"NCCL_SOCKET_IFNAME": "=eth1", "NCCL_IB_DISABLE": "1"}, "devices": []}
    check, findings = verdict(pair_of(sockets, sockets, **plain))
    assert findings == []
    assert "n1, n2 2.1 GB/s (NET/Socket)" in check["measured"]
    assert "1 of these speeds is told only" in check["measured"]
    check, findings = verdict(pair_of(sockets, sockets, variables={"NCCL_IB_HCA": "=mlx5_0"}))
    assert [finding["expected"] for finding in findings] == ["RDMA (NET/IB), since NCCL_IB_HCA names devices"]


def test_unknown_gpus_have_no_verdict_on_their_speed() -> None:
    results = {"n1": node(run("n1", bus_gb_s=11.0, nvls=0), gpus=["NVIDIA GeForce RTX 4090"] * 8)}
    check, findings = verdict(results)
    assert (check["status"], findings) == ("pass", [])
    assert "no figure to compare it with is known" in check["measured"]


def test_failure_is_told_by_the_node_that_knows() -> None:
    waits = {"ok": False, "error": "timed out: no end within 180 seconds"}
    fails = {
        "ok": False,
        "error": "torch.distributed.DistBackendError: NCCL error in: … unhandled system error",
        "warnings": ["Call to ibv_modify_qp failed with error Network is unreachable"],
    }
    check, findings = verdict(pair_of(waits, fails))
    assert check["status"] == "fail"
    assert findings[0]["measured"].startswith("n1, n2: n2: torch.distributed.DistBackendError")
    assert "RoCE port has no address" in findings[0]["cause"]
    assert findings[0]["pairs"] == [["n1", "n2"]]


@pytest.mark.parametrize(
    ("results", "mode", "why"),
    [
        ({}, "quick", "preflight_network=full tests it"),
        ({"n1": None, "n2": None}, "full", "no result of any node"),
        ({"n1": node(run("n1", why="GPUs are in use by vllm@llm"))}, "full", "GPUs are in use by vllm@llm"),
        ({"n1": node(run("n1", why="no GPUs here"))}, "full", "no GPUs here"),
        ({"n1": node(run("n1", why="one GPU"))}, "full", "one GPU a node, and no engine over several nodes"),
    ],
)
def test_not_tested_is_never_a_pass(results: dict[str, Any], mode: str, why: str) -> None:
    check, findings = verdict(results, mode)
    assert (check["status"], check["measured"], findings) == ("skip", f"not tested: {why}", [])


def test_pair_with_a_node_that_could_not_take_part() -> None:
    results = pair_of({"why": "n2: GPUs are in use by vllm@llm"}, {"why": "n2: GPUs are in use by vllm@llm"})
    results["n2"]["runs"][0] |= {"why": "GPUs are in use by vllm@llm"}
    check, findings = verdict(results)
    assert (check["status"], findings) == ("pass", [])
    assert "1 time," in check["measured"]
    assert "not tested: n2: GPUs are in use by vllm@llm and GPUs are in use by vllm@llm" in check["measured"]
    # A node whose module gave nothing.
    results = {"n1": node(run("n1"), run("n1", "n2")), "n2": None}
    check, _ = verdict(results)
    assert "not tested: no result from n2" in check["measured"]
