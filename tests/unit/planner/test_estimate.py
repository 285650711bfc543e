"""Memory: the estimate as a whole. tests/accuracy holds it against measured starts."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import Engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import (
    ModelConfigError,
    PlannerError,
    UnsupportedArchitectureError,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.serve_args import engine_keys
from hypothesis import given, settings
from hypothesis import strategies as st

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}


def estimate_flags() -> set[str]:
    """Every flag that decides memory."""
    names = {item.name for item in dataclasses.fields(Engine)} - {"version", "layout", "flags", "speculative"}
    sizes = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"}
    others = {"speculative_config", "pp_layer_partition", "hf_overrides", "enable_lora", "vllm_version"}
    return names | sizes | others | {"num_gpu_blocks_override", "compilation_config", "limit_mm_per_prompt"}


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
    assert result["weights_gib"] == pytest.approx(14.99, abs=0.02)


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


def test_unknown_architectures_are_refused_by_name(model_config) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="FutureForCausalLM"):
        estimate({**model_config("dense_8b"), "architectures": ["FutureForCausalLM"]}, H200)


@pytest.mark.parametrize("name", ["multimodal", "hybrid_mamba"])
def test_incomplete_files_are_refused_with_the_key(model_config, name) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json has no \w+"):
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


def test_stages_may_sit_on_different_gpus(model_config) -> None:
    small = {"name": "NVIDIA L40S", "memory_total_mib": 46068}
    flags = {"pipeline_parallel_size": 2, "max_model_len": 8192, "pp_layer_partition": [24, 8]}
    mixed = estimate(model_config("dense_8b"), [H200, small], flags)
    assert (
        mixed["ranks"][1]["kv_cache_gib"]
        == estimate(model_config("dense_8b"), small, flags)["ranks"][1]["kv_cache_gib"]
    )
    assert (
        mixed["ranks"][0]["kv_cache_gib"] == estimate(model_config("dense_8b"), H200, flags)["ranks"][0]["kv_cache_gib"]
    )
    # The tightest by blocks is at the top, not the one with the least memory.
    assert mixed["weights_gib"] in [rank["weights_gib"] for rank in mixed["ranks"]]
    with pytest.raises(PlannerError, match="3 GPUs are given for 2 pipeline stages"):
        estimate(model_config("dense_8b"), [H200, H200, small], flags)


def test_longer_than_the_model(model_config) -> None:
    result = estimate(model_config("dense_8b"), H200, {"max_model_len": 1_000_000})
    assert not result["fits"]
    assert result["error"].startswith("User-specified max_model_len (1000000) is greater than the derived")


def test_auto_length_shrinks(model_config) -> None:
    card = {"name": "NVIDIA L4", "memory_total_mib": 23034}
    assert not estimate(model_config("dense_8b"), card)["fits"]
    assert estimate(model_config("dense_8b"), card, {"max_model_len": "auto"})["fits"]


def test_old_versions_have_a_wide_margin(model_config) -> None:
    old = estimate(model_config("dense_8b"), H200, {"vllm_version": "0.11.0"})
    new = estimate(model_config("dense_8b"), H200, {"vllm_version": "0.26.0"})
    assert old["margin"] >= 0.15 > new["margin"] > 0
    assert any("older version" in note for note in old["assumptions"])


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_NAMES = ["dense_8b", "moe_128_experts", "fp8_block", "awq_group_128", "hybrid_mamba", "multimodal", "linear_rope"]


@settings(max_examples=300, deadline=2000)
@given(st.data())
def test_any_json_gives_figures_or_the_documented_error(model_config, data) -> None:
    config: dict[str, Any] = model_config(data.draw(st.sampled_from(_NAMES)))
    for _ in range(data.draw(st.integers(1, 3))):
        target: Any = config
        path = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
        for step in path:
            keys = sorted(target)
            key = keys[step % len(keys)]
            if isinstance(target[key], dict) and target[key]:
                target = target[key]
            else:
                break
        target[key] = data.draw(_JSON)
    try:
        result = estimate(
            copy.deepcopy(config), H200, {"vllm_version": data.draw(st.sampled_from(["0.19.1", "0.33.0"]))}
        )
    except PlannerError as error:
        assert str(error)
        return
    for rank in result["ranks"]:
        assert all(math.isfinite(value) for value in rank.values())


@settings(max_examples=100, deadline=2000)
@given(st.dictionaries(st.sampled_from(sorted(estimate_flags())), _JSON, max_size=3))
def test_any_flags_give_figures_or_the_documented_error(model_config, flags) -> None:
    try:
        result = estimate(model_config("dense_8b"), H200, flags)
    except PlannerError as error:
        assert str(error)
        return
    assert result["fits"] == (result["error"] is None)


@pytest.mark.parametrize(
    "gpu", [{}, {"name": 3, "memory_total_mib": 1}, {"name": "x"}, [], "H200", {"memory_total_mib": -5}]
)
def test_wrong_gpus(model_config, gpu) -> None:
    with pytest.raises(PlannerError):
        estimate(model_config("dense_8b"), gpu)


@pytest.mark.alone
@pytest.mark.benchmark(timer=time.process_time)
def test_speed(model_config, benchmark) -> None:
    """At most 5 ms of processor time for the largest of the fixtures, the median of many rounds."""
    config = model_config("moe_128_experts")
    benchmark(estimate, config, H200, {"tensor_parallel_size": 4, "vllm_version": "0.33.0"})
    assert benchmark.stats.stats.median < 0.005


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"tensor_paralel_size": 4}, ["tensor_paralel_size", "Did you mean 'tensor_parallel_size'"]),
        ({"foo": 1}, ["'foo' is no flag of vLLM", "snake_case"]),
        ({"max-modl-len": 1}, ["Did you mean 'max_model_len'"]),
        ({"no_enable_prefix_caching": True}, ["Write enable_prefix_caching: false instead"]),
        ({"tensor_parallel_size": 2, "tensor-parallel-size": 4}, ["tensor_parallel_size twice"]),
        ({3: 4}, ["3 is no flag"]),
    ],
)
def test_unknown_keys_of_an_engine(model_config, engine, words) -> None:
    with pytest.raises(PlannerError) as caught:
        estimate(model_config("dense_8b"), H200, engine)
    assert all(word in str(caught.value) for word in words), caught.value


def test_every_spelling_of_a_flag_counts(model_config) -> None:
    wanted = estimate(model_config("dense_8b"), H200, {"tensor_parallel_size": 2, "max_model_len": 8192})
    for name in ("tensor-parallel-size", "--tensor-parallel-size", "tp"):
        assert estimate(model_config("dense_8b"), H200, {name: 2, "max-model-len": 8192}) == wanted
    # Flags that decide no memory, flags of other versions and the environment are no mistakes.
    others = {"seed": 1, "override_attention_dtype": "auto", "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert estimate(model_config("dense_8b"), H200, {"tp": 2, "max_model_len": 8192, **others}) == wanted
    uneven = estimate(model_config("dense_8b"), H200, {"pp": 2, "VLLM_PP_LAYER_PARTITION": "20,12"})
    assert uneven["ranks"][0]["weights_gib"] > uneven["ranks"][1]["weights_gib"]


def test_every_flag_that_decides_memory_is_a_known_key() -> None:
    assert estimate_flags() - {"auto_length"} <= set(engine_keys(dict.fromkeys(estimate_flags() - {"auto_length"})))


def test_versions_beyond_those_described_are_told(model_config) -> None:
    known = estimate(model_config("dense_8b"), H200, {"vllm_version": "0.33.1"})
    newer = estimate(model_config("dense_8b"), H200, {"vllm_version": "0.34.0"})
    assert not any("newer" in text for text in known["assumptions"])
    assert any("newer" in text for text in newer["assumptions"])
    assert newer["margin"] > known["margin"]


def test_gpus_of_other_makers_are_estimated_with_a_caveat_and_never_planned(model_config) -> None:
    found = estimate(model_config("dense_8b"), {"name": "AMD Instinct MI300X", "memory_total_mib": 196608})
    assert any("no NVIDIA GPU" in text for text in found["assumptions"])


def test_large_bounds_are_written_out(model_config) -> None:
    with pytest.raises(PlannerError, match="between 1 and 4294967296"):
        estimate(model_config("dense_8b"), {"name": "NVIDIA H200", "memory_total_mib": 0})
