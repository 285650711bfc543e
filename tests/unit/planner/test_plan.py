"""Placement."""
# ruff: noqa: PLR0917  # parametrized

from __future__ import annotations

import json
import math
import random
import time

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.plan import plan
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.rules import Layout, holds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_total_mib": 81559}
A100_40 = {"name": "NVIDIA A100-SXM4-40GB", "memory_total_mib": 40960}
L4 = {"name": "NVIDIA L4", "memory_total_mib": 23034}


def nodes(*counts: int, gpu: dict = H200, fabric: str = "tcp") -> list[dict]:
    return [{"name": f"n{i}", "gpus": [gpu] * count, "inter_node": fabric} for i, count in enumerate(counts, 1)]


def test_tensor_inside_pipeline_across(model_config) -> None:
    # One node of small cards holds three sequences, two nodes hold the eight that are asked for.
    result = plan(model_config("dense_72b"), nodes(8, 8, gpu=L4), context_length=32768, concurrency=8)
    assert (result["tensor_parallel_size"], result["pipeline_parallel_size"]) == (8, 2)
    assert result["distributed_executor_backend"] == "ray"
    assert result["replicas"][0]["nodes"] == ["n1", "n2"]
    assert result["estimate"]["fits"]
    assert result["max_num_seqs"] == 8


def test_one_node_needs_no_ray(model_config) -> None:
    result = plan(model_config("dense_8b"), nodes(1))
    assert (result["tensor_parallel_size"], result["pipeline_parallel_size"]) == (1, 1)
    assert result["distributed_executor_backend"] == "mp"


def test_latency_stays_on_one_node(model_config) -> None:
    result = plan(model_config("dense_72b"), nodes(8, 8), objective="latency")
    assert (result["tensor_parallel_size"], result["pipeline_parallel_size"]) == (8, 1)
    assert any("GPUs without work: n2" in text for text in result["warnings"])


def test_heads_decide_how_far_tensor_goes(model_config) -> None:
    result = plan(model_config("dense_28_heads"), nodes(8), objective="latency")
    assert (result["tensor_parallel_size"], result["pipeline_parallel_size"]) == (4, 1)
    assert any("n1 (4 of 8)" in text for text in result["warnings"])


def test_unequal_nodes_use_what_each_has(model_config) -> None:
    result = plan(model_config("dense_8b"), nodes(8, 4))
    assert result["tensor_parallel_size"] == 1
    assert [replica["nodes"] for replica in result["replicas"]] == [["n1"]] * 8 + [["n2"]] * 4


def test_pins_are_kept(model_config) -> None:
    result = plan(model_config("dense_tiny"), nodes(2, 2), parallelism={"tensor": 2, "pipeline": 2}, variant="cpu")
    assert (result["tensor_parallel_size"], result["pipeline_parallel_size"]) == (2, 2)
    assert result["estimate"] is None
    assert result["gpu_memory_utilization"] is None


def test_executor_as_asked(model_config) -> None:
    assert plan(model_config("dense_72b"), nodes(8, 8), executor="mp")["distributed_executor_backend"] == "mp"


def test_tensor_across_nodes_needs_a_fast_fabric(model_config) -> None:
    with pytest.raises(PlannerError, match=r"parallelism\.tensor = 16 is more than the 8 GPUs") as caught:
        plan(model_config("dense_72b"), nodes(8, 8), parallelism={"tensor": 16})
    assert caught.value.key == "parallelism.tensor"
    result = plan(model_config("dense_72b"), nodes(8, 8, fabric="infiniband"), parallelism={"tensor": 16})
    assert result["tensor_parallel_size"] == 16
    assert any("spans nodes" in text for text in result["warnings"])


@pytest.mark.parametrize(
    ("request_", "key", "words"),
    [
        ({"context_length": 40000}, "context_length", ["40000", "32768", "max_position_embeddings", "auto"]),
        ({"parallelism": {"tensor": 3}}, "parallelism.tensor", ["(64)", "(3)", "1, 2, 4, 8"]),
        ({"parallelism": {"tensor": 8, "pipeline": 4}}, "parallelism", ["32 GPUs", "declare 16"]),
        (
            {"parallelism": {"tensor": 4, "pipeline": 3}, "executor": "mp"},
            "parallelism",
            ["tensor 4 x pipeline 3", "as many GPUs on each", "multiple of the number of nodes"],
        ),
        ({"parallelism": {"data": 20}}, "parallelism", ["data 20", "declare 16"]),
        ({"parallelism": {"tenzor": 2}}, "parallelism.tenzor", ["tensor"]),
        ({"args": {"tensor-parallel-size": 2}}, "args.tensor-parallel-size", ["parallelism.tensor"]),
        ({"args": {"gpu-memry-utilization": 0.9}}, "args.gpu-memry-utilization", ["gpu-memory-utilization"]),
        ({"disaggregation": {"prefill": "a"}}, "disaggregation", ["not served"]),
        ({"objective": "speed"}, "objective", ["throughput"]),
        ({"executor": "slurm"}, "executor", ["auto, ray, mp"]),
        ({"concurrency": -1}, "concurrency", ["-1"]),
        ({"contxt": 1}, "contxt", ["context_length"]),
        ({"contxt_length": 1}, "contxt_length", ["Did you mean 'context_length'?"]),
        ({"environment": {"VLLM_PP_LAYER_PARTITION": "40,41"}}, "parallelism.pipeline", ["sum(partitions)=81"]),
        (
            {"environment": {"VLLM_PP_LAYER_PARTITION": "30,30,20"}, "parallelism": {"tensor": 4, "pipeline": 2}},
            "parallelism.pipeline",
            ["len(partitions)=3", "pp_size=2"],
        ),
        # Flags are named as the user wrote them, wherever their value is looked at.
        ({"args": {"gpu-memory-utilization": 2}}, "args.gpu-memory-utilization", ["between 0 and 1"]),
        ({"args": {"kv_cache_dtype": "fp3"}}, "args.kv_cache_dtype", ["fp3", "fp8_e4m3"]),
        ({"args": {"max-num-seqs": 10**15}}, "args.max-num-seqs", ["positive integer up to"]),
        ({"args": {"block_size": 24}}, "args.block_size", ["no multiple of 16", "Set block-size to 32"]),
        ({"args": {"block-size": 40}, "variant": "cpu"}, "args.block-size", ["No common block size for 40"]),
        ({"vllm_version": "0.1.0"}, "vllm_version", ["0.33.0"]),
    ],
)
def test_refusals(model_config, request_, key, words) -> None:
    with pytest.raises(PlannerError) as caught:
        plan(model_config("dense_72b"), nodes(8, 8), **request_)
    assert caught.value.key == key
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [-1, "x"])
def test_a_wrong_value_is_told_where_it_comes_from(model_config, value) -> None:
    """The model's file, the drafter's file or an override: each by its own key."""
    config, wrong = model_config("dense_8b"), {**model_config("dense_8b"), "vocab_size": value}
    draft = {"speculative": {"method": "draft_model", "model": "a/b", "num_speculative_tokens": 2}}
    for request_, key in (
        ({"args": {"hf-overrides": {"vocab_size": value}}}, "args.hf-overrides"),
        ({"args": {"hf_overrides": json.dumps({"vocab_size": value})}}, "args.hf_overrides"),
        ({**draft, "draft_config": wrong}, "draft_config"),
    ):
        with pytest.raises(PlannerError, match="vocab_size") as caught:
            plan(config, nodes(1), **request_)
        assert caught.value.key == key
    with pytest.raises(PlannerError, match="vocab_size") as caught:
        plan(wrong, nodes(1), **draft, draft_config=config, args={"hf-overrides": {"hidden_act": "silu"}})
    assert caught.value.key == "model.config"


def test_a_wrong_config_is_named_as_such(model_config) -> None:
    with pytest.raises(PlannerError, match="hidden_size") as caught:
        plan({**model_config("dense_8b"), "hidden_size": -1}, nodes(1))
    assert caught.value.key == "model.config"


def test_too_large_names_the_shortfall_and_what_fits(model_config) -> None:
    with pytest.raises(PlannerError) as caught:
        plan(model_config("dense_72b"), nodes(1))
    message = str(caught.value)
    assert "No available memory for the cache blocks" in message
    assert "GiB a GPU" in message
    assert "2 GPUs (tensor 2)" in caught.value.remedy


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        ({"args": {"max-num-batched-tokens": 10**7}}, "args.max-num-batched-tokens"),
        ({"args": {"max_num_batched_tokens": 10**9, "enforce-eager": True}}, "args.max_num_batched_tokens"),
        ({"args": {"max-num-seqs": 10**6}}, "args.max-num-seqs"),
        ({"args": {"enable-lora": True, "max-loras": 10**5}}, "args.max-loras"),
        ({"args": {"enable-lora": True, "max-lora-rank": 512, "max-loras": 1000}}, "args.max-loras"),
        ({"args": {"gpu-memory-utilization": 0.05}}, "args.gpu-memory-utilization"),
        ({"args": {"kv-cache-memory-bytes": 10**12}}, "args.kv-cache-memory-bytes"),
        ({"args": {"num-gpu-blocks-override": 10**9}}, "args.num-gpu-blocks-override"),
        ({"args": {"num-gpu-blocks-override": 1}}, "args.num-gpu-blocks-override"),
        ({"args": {"block-size": 1 << 20}}, "args.block-size"),
        (
            {"args": {"enable-chunked-prefill": False, "max-num-batched-tokens": 1024}, "context_length": 8192},
            "args.max-num-batched-tokens",
        ),
        (
            {"speculative": {"method": "ngram", "num_speculative_tokens": 10**6, "prompt_lookup_max": 4}},
            "speculative",
        ),
    ],
)
def test_a_flag_that_takes_the_room_is_blamed_and_not_the_model(model_config, request_, key) -> None:
    config = model_config("dense_8b")
    with pytest.raises(PlannerError) as caught:
        plan(config, nodes(1), **request_)
    assert caught.value.key == key
    assert "without, it fits 1 x NVIDIA H200" in caught.value.problem
    # The advice was checked: what it names fits.
    name = key.removeprefix("args.")
    if "Set " in caught.value.remedy:
        value = float(caught.value.remedy.split(f"Set {name.replace('_', '-')} to ")[1].split()[0])
        value = value if value < 1 else int(value)
        assert plan(config, nodes(1), **{**request_, "args": {**request_["args"], name: value}})["estimate"]["fits"]


def test_two_flags_that_take_the_room_are_both_named(model_config) -> None:
    with pytest.raises(PlannerError) as caught:
        plan(model_config("dense_8b"), nodes(1), args={"max-num-batched-tokens": 10**7, "max-num-seqs": 10**6})
    assert caught.value.key == "args"
    assert "max-num-batched-tokens = 10000000 and max-num-seqs = 1000000" in caught.value.problem


def test_a_model_that_is_too_large_is_not_blamed_on_its_flags(model_config) -> None:
    with pytest.raises(PlannerError) as caught:
        plan(model_config("dense_72b"), nodes(1, gpu=L4), args={"max-num-batched-tokens": 4096, "max-num-seqs": 8})
    assert caught.value.key == "model"


def test_advice_really_fits(model_config) -> None:
    config = model_config("dense_72b")
    with pytest.raises(PlannerError) as caught:
        plan(config, nodes(2, gpu=H100), context_length=32768)
    remedy = caught.value.remedy
    length = int(remedy.split("context_length: ")[1].split(";")[0].rstrip("."))
    assert plan(config, nodes(2, gpu=H100), context_length=length)["estimate"]["fits"]


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
WIDE = {"tensor": 1, "data": 16, "expert": True}


def test_shorter_steps_make_room_where_experts_are_spread_wide() -> None:
    """The profile run holds what the experts of all data-parallel ranks get, so a long step costs much of the cache."""
    listed = nodes(8, 8, fabric="infiniband")
    result = plan(DEEPSEEK_V3, listed, parallelism=WIDE, context_length=32768)
    assert result["max_num_batched_tokens"] == 2048
    (reason,) = [text for text in result["reasons"] if text.startswith("max_num_batched_tokens")]
    assert "with vLLM's 8192 a data-parallel rank would hold" in reason
    pinned = plan(DEEPSEEK_V3, listed, parallelism=WIDE, context_length=32768, args={"max-num-batched-tokens": 8192})
    assert result["sequences"] > 2 * pinned["sequences"]
    # Once what is asked has room, long steps stay; the reasons tell the price.
    asked = plan(DEEPSEEK_V3, listed, parallelism=WIDE, context_length=32768, concurrency=64)
    assert asked["max_num_batched_tokens"] == 8192
    assert any("2048 would make room for" in text and "what is asked has room" in text for text in asked["reasons"])


def test_steps_stay_long_where_little_would_be_won(model_config) -> None:
    assert plan(model_config("dense_8b"), nodes(8))["max_num_batched_tokens"] == 8192
    assert plan(DEEPSEEK_V3, nodes(8), objective="latency", context_length=32768)["max_num_batched_tokens"] == 8192


def test_the_wider_of_two_that_hold_too_little_is_taken() -> None:
    listed = nodes(8, 8, fabric="infiniband")
    result = plan(DEEPSEEK_V3, listed, context_length=65536, concurrency=512)
    assert result["data_parallel_size"] == 16
    assert any(text.startswith("next best: 2 engines of tensor 1 x data 8") for text in result["reasons"])


@pytest.mark.parametrize(
    ("name", "request_", "text"),
    [
        ("dense_8b", {}, "next best: 4 engines of tensor 2, with room for "),
        ("dense_8b", {"concurrency": 62, "context_length": 131072}, "(fewer than the 62 asked)"),
        ("dense_72b", {"objective": "latency"}, "next best: one engine of tensor 4"),
        ("dense_72b", {"objective": "capacity"}, "(less room)"),
    ],
)
def test_the_next_best_layout_is_named(model_config, name, request_, text) -> None:
    reasons = plan(model_config(name), nodes(8), **request_)["reasons"]
    (found,) = [reason for reason in reasons if reason.startswith("next best: ")]
    assert text in found


def test_no_next_best_where_the_sizes_are_pinned(model_config) -> None:
    result = plan(model_config("dense_72b"), nodes(8), parallelism={"tensor": 4, "pipeline": 1})
    assert not any("next best" in reason for reason in result["reasons"])


def test_unequal_replicas_are_added_up_as_they_are(model_config) -> None:
    config = model_config("dense_8b")
    both = [{"name": "a", "gpus": [H200] * 2}, {"name": "b", "gpus": [H100] * 2}]
    request_ = {"context_length": 32768, "args": {"max-num-seqs": 64, "max-num-batched-tokens": 4096}}
    result = plan(config, both, **request_)
    apart = [plan(config, [node], **request_) for node in both]
    assert len(result["replicas"]) == 4
    assert result["sequences"] == pytest.approx(sum(each["sequences"] for each in apart), abs=0.1)
    assert f"room for {result['sequences']:.1f} sequences" in result["reasons"][0]
    # The estimate is that of the one with the least room.
    assert result["estimate"]["max_concurrency"] == apart[1]["estimate"]["max_concurrency"]
    assert result["sequences"] > 1.3 * 4 * result["estimate"]["max_concurrency"]


def test_too_many_replicas_are_told_how_many_fit(model_config) -> None:
    mixed = [{"name": "a", "gpus": [H200] * 4}, {"name": "b", "gpus": [L4] * 4}]
    with pytest.raises(PlannerError) as caught:
        plan(model_config("dense_72b"), mixed, parallelism={"data": 3}, context_length=32768)
    assert caught.value.key == "parallelism.data"
    assert "only 2 engines of tensor 2 fit on these nodes" in caught.value.problem
    assert len(plan(model_config("dense_72b"), mixed, parallelism={"data": 2}, context_length=32768)["replicas"]) == 2


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("dense_8b", {"concurrency": 100, "context_length": 131072}),
        ("dense_72b", {"concurrency": 64, "context_length": 32768, "objective": "latency"}),
        ("moe_128_experts", {"concurrency": 2000, "context_length": 32768}),
    ],
)
def test_what_is_asked_and_not_held_is_told_with_what_would(model_config, name, request_) -> None:
    """vLLM starts and lets the others wait, so it is a warning; each change that it names was checked."""
    config = model_config(name)
    result = plan(config, nodes(2), **request_)
    (warning,) = [text for text in result["warnings"] if text.startswith("concurrency = ")]
    assert f"only {result['sequences']:.1f} sequences fit; the others wait" in warning
    assert result["sequences"] < request_["concurrency"]
    # A context of a few tokens is no advice to somebody who wants long ones.
    assert ("context_length: " in warning) == (name != "moe_128_experts")
    if "context_length: " in warning:
        length = int(warning.split("context_length: ")[1].split(";")[0].rstrip("."))
        assert length >= request_["context_length"] // 8
        shorter = plan(config, nodes(2), **{**request_, "context_length": length})
        assert not any(text.startswith("concurrency = ") for text in shorter["warnings"])
    if "GPUs of this kind" in warning:
        gpus = int(warning.split(" GPUs of this kind")[0].split()[-1])
        more = plan(config, nodes(*[2] * -(-gpus // 2)), **request_)
        assert not any(text.startswith("concurrency = ") for text in more["warnings"])


def test_few_slots_are_a_warning_and_count_over_all_schedulers(model_config) -> None:
    asked = {"concurrency": 64, "context_length": 8192}
    config = model_config("dense_8b")
    enough = plan(config, nodes(8), args={"max-num-seqs": 8}, **asked)
    assert (len(enough["replicas"]), enough["max_num_seqs"]) == (8, 8)
    assert not any(text.startswith("concurrency = ") for text in enough["warnings"])
    few = plan(config, nodes(8), args={"max-num-seqs": 4}, **asked)
    assert len(few["replicas"]) == 8
    (warning,) = [text for text in few["warnings"] if text.startswith("concurrency = ")]
    assert "only 32 run at a time (max_num_seqs 4)" in warning
    assert "Would fit: args: {max-num-seqs: 8}" in warning
    assert "16 GPUs of this kind" in warning


def test_no_node_idles_where_wider_engines_would_use_it(model_config) -> None:
    """Two nodes hold what is asked, three have more data-parallel ranks and hold more."""
    asked = {"concurrency": 16, "context_length": 4096}
    config = model_config("moe_128_experts")
    two = plan(config, nodes(2, 2, gpu=L4, fabric="infiniband"), **asked)
    assert len(two["replicas"][0]["nodes"]) == 2
    three = plan(config, nodes(2, 2, 2, gpu=L4, fabric="infiniband"), **asked)
    assert [len(replica["nodes"]) for replica in three["replicas"]] == [3]
    assert three["data_parallel_size"] > two["data_parallel_size"]
    assert three["sequences"] > two["sequences"]
    assert not any("without work" in text for text in three["warnings"])
    # More ranks than sequences would have nothing to do; what would use the node all the same is told.
    few = plan(config, nodes(2, 2, 2, gpu=L4, fabric="infiniband"), **{**asked, "concurrency": 4})
    (idle,) = [text for text in few["warnings"] if "without work" in text]
    assert "n3 (all 2)" in idle
    assert "parallelism: {tensor: 1, data: 6}" in idle
    pinned = plan(config, nodes(2, 2, 2, gpu=L4, fabric="infiniband"), parallelism={"tensor": 1, "data": 6}, **asked)
    assert pinned["replicas"][0]["nodes"] == ["n1", "n2", "n3"]


def test_an_even_share_must_fit_the_smaller_gpus(model_config) -> None:
    """Together they hold what is asked, but the balancer gives an engine on a small GPU as much as the others."""
    pins = {"tensor": 1, "pipeline": 1, "data": 8}
    mixed = [*nodes(4), {"name": "s1", "gpus": [A100_40] * 4, "inter_node": "tcp"}]
    result = plan(model_config("dense_8b"), mixed, concurrency=100, context_length=16384, parallelism=pins)
    (warning,) = [text for text in result["warnings"] if text.startswith("concurrency = ")]
    assert "an even share of the 8 engines is 12.5 sequences" in warning
    assert "NVIDIA A100-SXM4-40GB" in warning
    fits = int(warning.split("Would fit: concurrency: ")[1].split(";")[0])
    less = plan(model_config("dense_8b"), mixed, concurrency=fits, context_length=16384, parallelism=pins)
    assert not any("even share" in text for text in less["warnings"])


def test_a_doubtful_concurrency_is_told(model_config) -> None:
    config, request = model_config("dense_8b"), {"context_length": 4096}
    rough = math.floor(plan(config, nodes(1), concurrency=8, **request)["sequences"])
    held = plan(config, nodes(1), concurrency=rough, **request)["estimate"]
    close = math.floor(held["max_concurrency"])
    assert close > held["max_concurrency"] * (1 - held["margin"])
    tight = plan(config, nodes(1), concurrency=close, **request)
    assert any("lower end of its margin" in text for text in tight["warnings"])
    sure = math.floor(close * (1 - 2 * held["margin"]))
    assert plan(config, nodes(1), concurrency=sure, **request)["warnings"] == []


def test_the_smallest_utilization_that_fits_is_advised(model_config) -> None:
    config, asked = model_config("dense_8b"), {"context_length": 8192, "concurrency": 4}

    def tried(share: float) -> dict:
        return plan(config, nodes(1, gpu=L4), args={"gpu-memory-utilization": share}, **asked)

    with pytest.raises(PlannerError) as caught:
        tried(0.3)
    least = float(caught.value.remedy.split("Set gpu-memory-utilization to ")[1].split()[0])
    assert tried(least)["estimate"]["fits"]
    with pytest.raises(PlannerError):
        tried(round(least - 0.01, 2))


@pytest.mark.parametrize(
    ("name", "request_", "words"),
    [
        ("AMD Instinct MI300X", {}, ["node n1", "AMD Instinct MI300X", "no NVIDIA GPU"]),
        ("Tesla V100-SXM2-32GB", {"variant": "cu130"}, ["V100", "compute capability 7.0", "cu130", "7.5"]),
        ("Tesla P40", {}, ["P40", "compute capability 6.1"]),
    ],
)
def test_gpus_on_which_vllm_does_not_run(model_config, name, request_, words) -> None:
    gpu = {"name": name, "memory_total_mib": 196608}
    with pytest.raises(PlannerError) as caught:
        plan(model_config("dense_8b"), nodes(2, gpu=gpu), **request_)
    assert caught.value.key == "nodes.n1.gpus"
    assert all(word in str(caught.value) for word in words)
    # Slots of the CPU build have any name.
    assert plan(model_config("dense_8b"), nodes(2, gpu=gpu), variant="cpu")["replicas"]


def test_an_unknown_gpu_is_told(model_config) -> None:
    result = plan(model_config("dense_8b"), nodes(1, gpu={"name": "NVIDIA RTX 9090", "memory_total_mib": 49152}))
    assert any("NVIDIA RTX 9090: not a GPU that is known" in text for text in result["warnings"])
    assert any("NVIDIA RTX 9090 is not known" in text for text in result["estimate"]["assumptions"])
    known = plan(model_config("dense_8b"), nodes(1))
    assert not any("not a GPU" in text or "not known" in text for text in known["warnings"])
    assert not any("not known" in text for text in known["estimate"]["assumptions"])


def test_more_sequences_than_a_step_can_hold_wait(model_config) -> None:
    result = plan(model_config("dense_8b"), nodes(1), concurrency=10**7, context_length=2048)
    assert result["max_num_seqs"] == 512
    assert result["estimate"]["fits"]
    assert any("concurrency = 10000000" in text for text in result["warnings"])


def test_auto_context_is_what_memory_allows(model_config) -> None:
    result = plan(model_config("dense_72b"), nodes(2, gpu=H100))
    assert 0 < result["max_model_len"] < 32768
    assert result["estimate"]["fits"]
    assert any("auto" in reason for reason in result["reasons"])


def test_a_flag_that_shortens_the_context_is_named(model_config) -> None:
    config, args = model_config("dense_72b"), {"max-num-batched-tokens": 16384}
    result = plan(config, nodes(2, gpu=H100), args=args)
    longest = plan(config, nodes(2, gpu=H100))["max_model_len"]
    assert result["max_model_len"] < longest
    (warning,) = [text for text in result["warnings"] if text.startswith("max-num-batched-tokens = 16384 shortens")]
    assert warning.endswith(f"to {result['max_model_len']} tokens; without, {longest} fit")
    harmless = plan(config, nodes(2, gpu=H100), args={"max-num-seqs": 64, "max-num-batched-tokens": 2048})
    assert not any("shortens" in text for text in harmless["warnings"])


def test_unknown_architecture_is_placed_with_a_warning(model_config) -> None:
    result = plan({**model_config("dense_8b"), "architectures": ["FutureForCausalLM"]}, nodes(8))
    assert result["estimate"] is None
    assert any("FutureForCausalLM" in text for text in result["warnings"])


def test_experts_over_nodes_need_a_fast_fabric(model_config) -> None:
    pins = {"tensor": 1, "data": 16, "expert": True}
    with pytest.raises(PlannerError, match="not InfiniBand or RoCE") as caught:
        plan(model_config("moe_128_experts"), nodes(8, 8), parallelism=pins)
    assert caught.value.key == "parallelism.data"
    result = plan(model_config("moe_128_experts"), nodes(8, 8, fabric="roce"), parallelism=pins)
    assert result["data_parallel_size"] == 16
    assert result["replicas"][0]["nodes"] == ["n1", "n2"]
    assert result["distributed_executor_backend"] == "mp"


def test_no_gpus(model_config) -> None:
    with pytest.raises(PlannerError, match="No GPUs on n1"):
        plan(model_config("dense_8b"), nodes(0))
    assert plan(model_config("dense_8b"), nodes(1, 0))["replicas"][0]["nodes"] == ["n1"]


@pytest.mark.parametrize("mib", [0, -1, float("nan"), float("inf"), "many", None, True])
def test_hostile_memory(model_config, mib) -> None:
    with pytest.raises(PlannerError, match="memory_total_mib"):
        plan(model_config("dense_8b"), nodes(1, gpu={"name": "x", "memory_total_mib": mib}))


COUNTS = st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(any)
NAMES = st.sampled_from(["dense_tiny", "dense_8b", "dense_72b", "dense_28_heads", "moe_128_experts", "fp8_block"])
OBJECTIVES = st.sampled_from(["throughput", "latency", "capacity"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES, COUNTS, OBJECTIVES, st.sampled_from([H200, H100, L4]), st.randoms())
def test_any_order_of_nodes_gives_the_same_plan(model_config, name, counts, objective, gpu, order) -> None:
    config = model_config(name)
    listed = nodes(*counts, gpu=gpu)

    def answer(these: list[dict]) -> str:
        try:
            return json.dumps(plan(config, these, objective=objective), sort_keys=True)
        except PlannerError as error:
            return str(error)

    expected = answer(listed)
    shuffled = list(listed)
    order.shuffle(shuffled)
    assert answer(shuffled) == expected


@settings(max_examples=60, deadline=None)
@given(NAMES, COUNTS, OBJECTIVES, st.sampled_from([H200, H100, L4]))
def test_every_plan_keeps_the_rules(model_config, name, counts, objective, gpu) -> None:
    config = model_config(name)
    listed = nodes(*counts, gpu=gpu)
    try:
        result = plan(config, listed, objective=objective)
    except PlannerError:
        return
    sizes = {key: result[f"{key}_parallel_size"] for key in ("tensor", "pipeline", "data")}
    assert holds(parse_config(config), Layout(**sizes, expert=result["enable_expert_parallel"]))
    room = {node["name"]: len(node["gpus"]) for node in listed}
    for name_, indices in result["replicas"][0]["gpus"].items():
        assert len(set(indices)) == len(indices) <= room[name_]
        # A tensor group never leaves its node unless it was asked to.
        assert len(indices) % sizes["tensor"] == 0


@pytest.mark.alone
def test_a_thousand_nodes_are_planned_quickly(model_config) -> None:
    listed = nodes(*[8] * 1000)
    random.Random(1).shuffle(listed)  # noqa: S311
    started = time.perf_counter()
    result = plan(model_config("dense_72b"), listed)
    assert time.perf_counter() - started < 2
    assert len(result["replicas"]) == 4000


def test_latency_keeps_experts_whole_where_shards_would_break_a_rule(model_config) -> None:
    config = {**model_config("moe_128_experts"), "moe_intermediate_size": 772}
    result = plan(config, nodes(8), objective="latency")
    assert (result["tensor_parallel_size"], result["enable_expert_parallel"]) == (8, True)


@pytest.mark.parametrize(
    "value", [10**5000, b"x", {"a": {1, 2}}, [[[10**5000]]]], ids=["huge", "bytes", "set", "nested"]
)
def test_what_json_cannot_say_is_refused(model_config, value) -> None:
    for key in ("hf_quant_config", "speculative", "environment", "vllm_version"):
        with pytest.raises(PlannerError):
            plan(model_config("dense_8b"), nodes(1), **{key: value})
    with pytest.raises(PlannerError):
        plan({**model_config("dense_8b"), "model_type": value}, nodes(1))


def test_a_deep_config_is_refused(model_config) -> None:
    deep: dict = {}
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(PlannerError, match="deep"):
        plan({**model_config("dense_8b"), "extra": deep}, nodes(1))


def test_unequal_gpus_get_layers_by_their_memory(model_config) -> None:
    a100 = {"name": "NVIDIA A100-SXM4-40GB", "memory_total_mib": 40960}
    listed = [{"name": "n1", "gpus": [H100]}, {"name": "n2", "gpus": [a100]}, {"name": "n3", "gpus": [a100]}]
    result = plan(model_config("dense_72b"), listed, context_length=4096)
    split = result["pp_layer_partition"]
    assert sum(split) == 80
    assert split[0] > max(split[1:])
    # Ray would not keep the order of the nodes.
    assert result["distributed_executor_backend"] == "mp"
    assert result["estimate"]["fits"]


def test_experts_are_spread_over_data_parallel_ranks(model_config) -> None:
    result = plan(model_config("moe_128_experts"), nodes(8), objective="throughput")
    assert (result["data_parallel_size"], result["tensor_parallel_size"]) == (8, 1)
    assert result["enable_expert_parallel"]
    assert len(result["replicas"]) == 1


@pytest.mark.parametrize("objective", ["throughput", "latency", "capacity"])
@pytest.mark.parametrize(
    "pinned", [{"pipeline": 2}, {"data": 2}, {"tensor": 1, "pipeline": 1}, {"tensor": 2, "pipeline": 2}, {"tensor": 4}]
)
def test_pinned_sizes_that_fit_in_a_node_are_planned(model_config, objective, pinned) -> None:
    found = plan(model_config("dense_8b"), nodes(8), objective=objective, parallelism=pinned)
    for key, size in pinned.items():
        # A dense model's data size is its number of replicas.
        got = len(found["replicas"]) if key == "data" else found[f"{key}_parallel_size"]
        assert got == size


def test_pinned_data_of_experts_leaves_gpus_to_stages(model_config) -> None:
    """57 GiB of weights on eight cards of 24 GiB: only stages make them fit."""
    small = {"name": "NVIDIA L4", "memory_total_mib": 23034}
    found = plan(model_config("moe_128_experts"), nodes(8, gpu=small), parallelism={"tensor": 1, "data": 1})
    assert (found["tensor_parallel_size"], found["data_parallel_size"]) == (1, 1)
    assert found["pipeline_parallel_size"] > 2


def test_experts_pinned_with_open_sizes_keep_their_features(model_config) -> None:
    found = plan(model_config("moe_128_experts"), nodes(8), parallelism={"expert": True}, args={"enable-eplb": True})
    assert found["enable_expert_parallel"]


def test_capacity_is_an_engine_that_holds_everything_and_as_many_as_there_is_room_for(model_config) -> None:
    request = {"objective": "capacity", "context_length": 16384}
    one = plan(model_config("dense_72b"), nodes(2, 2, 2), concurrency=10, **request)
    assert [replica["nodes"] for replica in one["replicas"]] == [["n1"], ["n2"], ["n3"]]
    assert one["estimate"]["max_concurrency"] >= 10
    two = plan(model_config("dense_72b"), nodes(2, 2, 2), concurrency=40, **request)
    assert [replica["nodes"] for replica in two["replicas"]] == [["n1", "n2"]]
    assert two["estimate"]["max_concurrency"] >= 40
