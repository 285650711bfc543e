"""What holds for every plan, whatever the nodes, the request and the config."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.plan import plan
from hypothesis import given, settings
from hypothesis import strategies as st

CARDS = [
    {"name": "NVIDIA H200", "memory_total_mib": 143771},
    {"name": "NVIDIA H100 80GB HBM3", "memory_total_mib": 81559},
    {"name": "NVIDIA L40S", "memory_total_mib": 46068},
    {"name": "NVIDIA L4", "memory_total_mib": 23034},
]
MODELS = ["dense_8b", "dense_72b", "dense_28_heads", "moe_128_experts", "fp8_block", "awq_group_128"]


@st.composite
def racks(draw: st.DrawFn) -> list[dict[str, Any]]:
    fabric = draw(st.sampled_from(["infiniband", "roce", "tcp"]))
    return [
        {
            "name": f"n{index}",
            "gpus": [dict(draw(st.sampled_from(CARDS)))] * draw(st.integers(1, 8)),
            "intra_node": "nvlink",
            "inter_node": fabric,
        }
        for index in range(draw(st.integers(1, 4)))
    ]


REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "objective": st.sampled_from(["throughput", "latency", "capacity"]),
        "context_length": st.sampled_from([1024, 8192, 32768, "auto"]),
        "concurrency": st.sampled_from([1, 16, 300]),
        "parallelism": st.fixed_dictionaries(
            {}, optional={"tensor": st.integers(1, 8), "pipeline": st.integers(1, 4), "data": st.integers(1, 8)}
        ),
    },
)


def planned(config: dict[str, Any], nodes: list[dict[str, Any]], request: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return plan(config, nodes, **request)
    except PlannerError as error:
        assert str(error)
        return None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), racks(), REQUESTS)
def test_every_plan(model_config, model, nodes, request_) -> None:
    config = model_config(model)
    result = planned(config, copy.deepcopy(nodes), request_)
    if result is None:
        return
    world = result["tensor_parallel_size"] * result["pipeline_parallel_size"] * result["data_parallel_size"]
    gpus = {node["name"]: node["gpus"] for node in nodes}
    taken: set[tuple[str, int]] = set()
    for replica in result["replicas"]:
        used = [(name, index) for name in replica["nodes"] for index in replica["gpus"][name]]
        # Sizes multiply to the GPUs used, no GPU twice, none that is not there.
        assert len(used) == len(set(used)) == world
        assert not taken & set(used)
        assert all(0 <= index < len(gpus[name]) for name, index in used)
        taken |= set(used)
    for key, value in (request_.get("parallelism") or {}).items():
        if key != "data":
            assert result[f"{key}_parallel_size"] == value
    figures = result["estimate"]
    assert figures["fits"], figures["error"]
    # No rank over its budget.
    assert all(rank["kv_cache_gib"] > 0 for rank in figures["ranks"])
    # The estimate of the plan is the plan's estimate.
    flags = {key: result[key] for key in FLAGS if result.get(key) is not None}
    cards = [
        gpus[name][index] for name in result["replicas"][0]["nodes"] for index in result["replicas"][0]["gpus"][name]
    ]
    kinds = {
        (card["name"], card["memory_total_mib"])
        for replica in result["replicas"]
        for name in replica["nodes"]
        for card in (gpus[name][index] for index in replica["gpus"][name])
    }
    if len(kinds) == 1:
        assert estimate(config, cards[0], flags) == figures


FLAGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "pp_layer_partition",
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), racks(), REQUESTS, st.randoms(use_true_random=False))
def test_order_of_nodes_changes_nothing(model_config, model, nodes, request_, rng: random.Random) -> None:
    first = planned(model_config(model), copy.deepcopy(nodes), request_)
    shuffled = copy.deepcopy(nodes)
    rng.shuffle(shuffled)
    assert planned(model_config(model), shuffled, request_) == first


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["dense_8b", "dense_72b", "moe_128_experts"]),
    st.integers(1, 2),
    st.integers(24_000, 140_000),
    st.integers(1, 60_000),
)
def test_more_memory_never_plans_less(model_config, model, count, mib, more) -> None:
    # The same batch sizes on both, since larger cards have larger defaults.
    request = {"context_length": 4096, "concurrency": 8, "args": {"max-num-batched-tokens": 2048}}

    def nodes(memory: int) -> list[dict[str, Any]]:
        gpus = [{"name": "x", "memory_total_mib": memory}] * 8
        return [{"name": f"n{index}", "gpus": gpus, "inter_node": "tcp"} for index in range(count)]

    small = planned(model_config(model), nodes(mib), request)
    large = planned(model_config(model), nodes(mib + more), request)
    assert small is None or large is not None
    if small and large:
        assert (
            len(large["replicas"]) * large["data_parallel_size"] >= len(small["replicas"]) * small["data_parallel_size"]
        )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_request_gives_a_plan_or_the_documented_error(model_config, data) -> None:
    scalars = st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=6))
    values = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=6,
    )
    keys = [
        "objective",
        "context_length",
        "concurrency",
        "parallelism",
        "executor",
        "disaggregation",
        "speculative",
        "args",
        "environment",
        "vllm_version",
        "variant",
    ]
    request = data.draw(st.dictionaries(st.sampled_from(keys), values, max_size=3))
    nodes: Any = [{"name": "n", "gpus": [dict(CARDS[0])] * 2}]
    if data.draw(st.booleans()):
        nodes = data.draw(values | st.lists(st.fixed_dictionaries({"name": values, "gpus": values}), max_size=3))
    planned(model_config("dense_8b"), nodes, request)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("model", "request_"),
    [
        ("dense_8b", {"context_length": 8192, "concurrency": 50_000}),
        ("dense_72b", {"context_length": 32768, "concurrency": 5000}),
        ("moe_128_experts", {"context_length": 32768}),
        ("dense_72b", {"objective": "capacity"}),
        ("dense_72b", {"objective": "latency"}),
    ],
)
def test_a_thousand_nodes_of_eight_gpus(model_config, benchmark, model, request_) -> None:
    nodes = [{"name": f"n{index}", "gpus": [dict(CARDS[1])] * 8, "inter_node": "infiniband"} for index in range(1000)]
    result = benchmark.pedantic(plan, (model_config(model), nodes), request_, rounds=3)
    assert benchmark.stats.stats.min <= 2
    assert result["replicas"]


def test_objectives_differ(model_config) -> None:
    nodes = [{"name": f"n{index}", "gpus": [dict(CARDS[1])] * 8, "inter_node": "infiniband"} for index in range(2)]
    config = model_config("dense_8b")
    found = {
        objective: plan(config, nodes, objective=objective, context_length=length, concurrency=16)
        for objective, length in (("latency", 8192), ("throughput", 8192), ("capacity", "auto"))
    }
    assert found["latency"]["tensor_parallel_size"] == 8
    assert len(found["latency"]["replicas"]) == 1
    assert found["throughput"]["tensor_parallel_size"] == 1
    assert len(found["throughput"]["replicas"]) == 16
    assert found["capacity"]["max_model_len"] >= found["latency"]["max_model_len"]


def test_unequal_nodes_share_layers_by_memory(model_config) -> None:
    nodes = [{"name": "a", "gpus": [dict(CARDS[0])]}, {"name": "b", "gpus": [dict(CARDS[2])]}]
    result = plan(model_config("dense_72b"), nodes, context_length=4096)
    assert result["pipeline_parallel_size"] == 2
    first, second = result["pp_layer_partition"]
    assert first > 2 * second
    assert first + second == 80
    assert all(rank["kv_cache_gib"] > 0 for rank in result["estimate"]["ranks"])


def test_experts_are_data_parallel(model_config) -> None:
    nodes = [{"name": "a", "gpus": [dict(CARDS[1])] * 8}]
    result = plan(model_config("moe_128_experts"), nodes, context_length=32768, concurrency=64)
    assert result["data_parallel_size"] > 1
    assert result["enable_expert_parallel"]
    assert len(result["replicas"]) == 1
