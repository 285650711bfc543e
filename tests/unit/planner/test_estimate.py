"""Memory: a first version, held against what was measured where measurements are at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import (
    PlannerError,
    UnsupportedArchitectureError,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from hypothesis import given, settings
from hypothesis import strategies as st

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}


def test_shape(model_config) -> None:
    result = estimate(model_config("dense_8b"), H200, {"max_model_len": 32768})
    assert set(result) == {
        "fits",
        "error",
        "weights_gib",
        "kv_cache_gib",
        "kv_cache_tokens",
        "max_concurrency",
        "ranks",
        "assumptions",
        "margin",
    }
    assert set(result["ranks"][0]) == {"stage", "weights_gib", "activation_gib", "overhead_gib", "kv_cache_gib"}
    assert result["fits"]
    assert result["weights_gib"] == pytest.approx(14.96, abs=0.02)


def test_embedding_first_and_head_last(model_config) -> None:
    ranks = estimate(model_config("dense_8b"), H200, {"pipeline_parallel_size": 4})["ranks"]
    weights = [rank["weights_gib"] for rank in ranks]
    assert weights[0] > weights[1] == weights[2] < weights[3]


def test_fp8_cache_holds_twice_as_much(model_config) -> None:
    plain = estimate(model_config("dense_8b"), H200, {})
    fp8 = estimate(model_config("dense_8b"), H200, {"kv_cache_dtype": "fp8"})
    assert fp8["kv_cache_tokens"] == pytest.approx(2 * plain["kv_cache_tokens"], rel=1e-4)


def test_refusal_in_the_engines_words(model_config) -> None:
    result = estimate(model_config("dense_72b"), H200, {})
    assert not result["fits"]
    assert result["error"].startswith("No available memory for the cache blocks")
    result = estimate(model_config("dense_8b"), {"name": "NVIDIA L4", "memory_total_mib": 23034}, {})
    assert "To serve at least one request with the model's max seq len (131072)" in result["error"]


@pytest.mark.parametrize("name", ["multimodal", "hybrid_mamba"])
def test_unknown_structures_are_refused_by_name(model_config, name) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="ForC"):
        estimate(model_config(name), H200)


@pytest.mark.parametrize(
    "flags",
    [
        {"gpu_memory_utilization": 2},
        {"gpu_memory_utilization": "x"},
        {"max_num_seqs": -1},
        {"tensor_parallel_size": 0},
        {"max_model_len": []},
    ],
)
def test_wrong_flags(model_config, flags) -> None:
    with pytest.raises(PlannerError):
        estimate(model_config("dense_8b"), H200, flags)


@settings(max_examples=50, deadline=None)
@given(st.integers(20_000, 200_000), st.integers(1, 50_000))
def test_more_memory_never_hurts(model_config, mib, more) -> None:
    # Inside one class of cards: larger classes take larger batches by default.
    flags = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    small = estimate(model_config("dense_8b"), {"name": "x", "memory_total_mib": mib}, flags)
    large = estimate(model_config("dense_8b"), {"name": "x", "memory_total_mib": mib + more}, flags)
    assert small["kv_cache_tokens"] <= large["kv_cache_tokens"]
    assert not small["fits"] or large["fits"]


def test_against_measured_starts(shared_facts: Path) -> None:
    checked = 0
    for line in (shared_facts / "ground_truth/h200_vllm_0.26.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        config = json.loads((shared_facts / f"model_configs/{row['model']}.json").read_text("utf-8"))
        gpu = {"name": row["gpu"], "memory_total_mib": row["gpu_memory_total_mib"]}
        try:
            beside = shared_facts / f"model_configs/{row['model']}.hf_quant_config.json"
            quantization = json.loads(beside.read_text("utf-8")) if beside.exists() else None
            result = estimate(config, gpu, row["flags"], quantization)
        except UnsupportedArchitectureError:
            continue
        checked += 1
        assert result["weights_gib"] == pytest.approx(max(row["weights_gib_per_rank"]), rel=0.01), row["id"]
        assert result["fits"] == (row["error"] is None), row["id"]
        if row["kv_cache_tokens"]:
            assert result["kv_cache_tokens"] == pytest.approx(row["kv_cache_tokens"], rel=0.01), row["id"]
    assert checked >= 8
