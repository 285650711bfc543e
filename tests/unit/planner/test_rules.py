"""The engine's rules, in its words."""
# ruff: noqa: PLR0917  # parametrized

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.rules import (
    Layout,
    check,
    check_engine,
    holds,
    remarks,
    split_layers,
    tensor_sizes,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("name", "changes", "layout", "rule", "text"),
    [
        (
            "dense_72b",
            {},
            Layout(tensor=3),
            1,
            "Total number of attention heads (64) must be divisible by tensor parallel size (3).",
        ),
        ("dense_28_heads", {}, Layout(tensor=7), 2, "7 is not divisible by 4"),
        ("dense_8b", {"intermediate_size": 14340}, Layout(tensor=8), 4, "14340 is not divisible by 8"),
        (
            "dense_8b",
            {"num_attention_heads": 96, "num_key_value_heads": 96, "vocab_size": 32000},
            Layout(tensor=96),
            5,
            "vocabulary",
        ),
        ("dense_tiny", {}, Layout(pipeline=5), 6, "5 pipeline stages are more than the model's 4 layers"),
        ("dense_tiny", {}, Layout(pipeline=2, layer_partition=(4,)), 7, "len(partitions)=1 does not match pp_size=2."),
        (
            "dense_tiny",
            {},
            Layout(pipeline=2, layer_partition=(2, 3)),
            7,
            "sum(partitions)=5 does not match num_hidden_layers=4.",
        ),
        ("moe_128_experts", {"moe_intermediate_size": 770}, Layout(tensor=4), 8, "770 is not divisible by 4"),
        (
            "dense_8b",
            {},
            Layout(expert=True),
            9,
            "Number of experts in the model must be greater than 0 when expert parallelism is enabled.",
        ),
        ("dense_8b", {}, Layout(tensor=4, decode_context=2), 11, "Decode context parallelism for GQA/MQA requires"),
        ("awq_group_128", {}, Layout(tensor=8), 12, "is not divisible by group_size=128"),
        ("fp8_block", {}, Layout(tensor=16), 14, "is not divisible by weight quantization block"),
        ("hybrid_mamba", {"mamba_num_heads": 100}, Layout(tensor=8), 16, "must divide num heads"),
        ("dense_8b", {}, Layout(tensor=4, draft_tensor=2), 21, "cannot be other value than 1 or target model"),
    ],
)
def test_rule(model_config, name, changes, layout, rule, text) -> None:
    broken = check(parse_config({**model_config(name), **changes}), layout)
    found = {item.rule: item for item in broken}
    assert rule in found, broken
    assert text in found[rule].message
    assert found[rule].remedy


def test_remedy_names_sizes_that_work(model_config) -> None:
    model = parse_config(model_config("dense_28_heads"))
    (violation, *_) = check(model, Layout(tensor=8))
    assert "1, 2, 4" in violation.remedy
    assert tensor_sizes(model, 8) == [4, 2, 1]


def test_kv_heads_are_replicated(model_config) -> None:
    assert holds(parse_config(model_config("dense_72b")), Layout(tensor=16))


def test_whole_experts_lift_the_expert_rule(model_config) -> None:
    model = parse_config({**model_config("moe_128_experts"), "moe_intermediate_size": 770})
    assert holds(model, Layout(tensor=4, expert=True))


@given(st.integers(1, 200), st.integers(1, 32))
def test_layers_are_all_given_out(layers: int, stages: int) -> None:
    stages = min(layers, stages)
    split = split_layers(layers, stages)
    assert sum(split) == layers
    assert len(split) == stages
    assert max(split) - min(split) <= 1
    # The last stage also holds the head, so it never has more than another.
    assert split[-1] == min(split)


GDN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "full_attention_interval": 4,
    "linear_num_value_heads": 20,
    "linear_num_key_heads": 20,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "changes", "layout", "rule", "text"),
    [
        ("dense_8b", {"architectures": ["BertModel"]}, Layout(pipeline=2), 6, "implement the `SupportsPP` interface"),
        (
            "moe_128_experts",
            {},
            Layout(tensor=6, expert=True, eplb=True),
            10,
            "EPLB currently only supports even distribution of experts across ranks. Got 128 experts and 6 EP ranks.",
        ),
        ("moe_128_experts", {}, Layout(tensor=2, eplb=True), 10, "enable_expert_parallel must be True to use EPLB."),
        ("moe_128_experts", {}, Layout(expert=True, eplb=True), 10, "EPLB requires tensor, prefill-context, or data"),
        ("moe_128_experts", {}, Layout(redundant_experts=4), 10, "num_redundant_experts is set to 4 but EPLB is not"),
        ("dense_8b", GDN, Layout(tensor=8), 17, "20 is not divisible by 8 (linear attention value heads"),
        (
            "dense_8b",
            {"model_type": "gpt_oss"},
            Layout(tensor=3),
            18,
            "Attention sink heads (32) must be divisible by tp_size (3)",
        ),
    ],
)
def test_further_rule(model_config, name, changes, layout, rule, text) -> None:
    model = parse_config({**model_config(name), **changes})
    found = [item for item in check(model, layout) if item.rule == rule]
    assert found
    assert text in found[0].message
    assert found[0].remedy


def test_redundant_experts_even_the_ranks_out(model_config) -> None:
    model = parse_config(model_config("moe_128_experts"))
    (violation,) = [item for item in check(model, Layout(tensor=6, expert=True, eplb=True)) if item.rule == 10]
    assert violation.remedy.endswith("to 4.")
    even = Layout(tensor=6, expert=True, eplb=True, redundant_experts=4)
    assert not [item for item in check(model, even) if item.rule == 10]


@pytest.mark.parametrize(
    ("changes", "flags", "environment", "rule", "text"),
    [
        (
            {},
            {"enable_lora": True, "max_lora_rank": 24},
            {},
            20,
            "Input should be 1, 8, 16, 32, 64, 128, 256, 320 or 512",
        ),
        (
            {},
            {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2},
            {},
            20,
            "max_cpu_loras (2) must be >= max_loras (4).",
        ),
        (
            {},
            {"speculative_config": {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}},
            {},
            21,
            "prompt_lookup_min=5 must be <= prompt_lookup_max=2",
        ),
        (
            {"num_nextn_predict_layers": 2},
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}},
            {},
            21,
            "num_speculative_tokens:3 must be divisible by n_predict=2",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            {},
            {},
            22,
            "Unknown quantization method: bitsandbytes.",
        ),
        (
            {},
            {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            23,
            "KV connector NixlConnector is incompatible with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        (
            {},
            {"prefill_context_parallel_size": 4, "decode_context_parallel_size": 2, "tensor_parallel_size": 2},
            {},
            11,
            "valid DCP sizes are [1, 4, 8]",
        ),
    ],
)
def test_rule_of_other_flags(model_config, changes, flags, environment, rule, text) -> None:
    model = parse_config({**model_config("dense_8b"), **changes})
    (violation,) = check_engine(model, parse_engine({"vllm_version": "0.33.0", **flags}), environment)
    assert violation.rule == rule
    assert text in violation.message
    assert violation.remedy


def test_methods_that_an_older_version_still_has(model_config) -> None:
    model = parse_config({**model_config("dense_8b"), "quantization_config": {"quant_method": "bitsandbytes"}})
    assert check_engine(model, parse_engine({"vllm_version": "0.26.0"})) == []


def test_what_is_taken_but_costs(model_config) -> None:
    model = parse_config(model_config("dense_28_heads"))
    assert any("4 KV heads on 8 tensor ranks" in text for text in remarks(model, Layout(tensor=8)))
    assert remarks(model, Layout(tensor=2)) == []
    latent = parse_config({**model_config("dense_8b"), "kv_lora_rank": 512})
    assert any("holds the whole KV cache" in text for text in remarks(latent, Layout(tensor=8)))
    seeing = parse_config({**model_config("dense_8b"), "vision_config": {"num_heads": 6}})
    assert any("Falling back to data parallelism" in text for text in remarks(seeing, Layout(tensor=4)))
