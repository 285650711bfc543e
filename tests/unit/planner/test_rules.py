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


FP8_EXPERTS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
DRAFT = {"method": "eagle", "model": "a/b", "num_speculative_tokens": 2, "enable_adaptive_verification": True}


@pytest.mark.parametrize(
    ("name", "changes", "layout", "rule", "text"),
    [
        ("dense_8b", {}, Layout(tensor=4, decode_context=3), 11, "tp_size=4 must be divisible by dcp_size=3."),
        (
            "dense_28_heads",
            {"num_key_value_heads": 2, "num_attention_heads": 32},
            Layout(tensor=8, decode_context=8),
            11,
            "exceeds the maximum supported value (4)",
        ),
        (
            "dense_28_heads",
            {"num_key_value_heads": 2, "num_attention_heads": 24, "hidden_size": 3072},
            Layout(tensor=16, decode_context=8),
            11,
            "The model's number of query heads per KV head (12) must be divisible by",
        ),
        (
            "moe_128_experts",
            {**FP8_EXPERTS, "moe_intermediate_size": 768},
            Layout(tensor=4),
            15,
            "The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128.",
        ),
        (
            "dense_8b",
            {},
            Layout(pipeline=2, adaptive=True),
            21,
            "Adaptive verification is not currently compatible with pipeline parallelism",
        ),
    ],
)
def test_rule_of_a_layout(model_config, name, changes, layout, rule, text) -> None:
    model = parse_config({**model_config(name), **changes})
    found = [item for item in check(model, layout) if item.rule == rule]
    assert found, check(model, layout)
    assert text in found[0].message
    assert found[0].remedy


def test_whole_experts_lift_the_rule_of_their_blocks(model_config) -> None:
    model = parse_config({**model_config("moe_128_experts"), **FP8_EXPERTS, "moe_intermediate_size": 768})
    assert not [item for item in check(model, Layout(tensor=4, expert=True)) if item.rule == 15]


def test_experts_that_marlin_can_not_serve_are_told(model_config) -> None:
    """Rule 13: no error, but slower kernels."""
    config = {
        **model_config("moe_128_experts"),
        "hidden_size": 4160,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32},
    }
    assert any("no multiple of 128" in text for text in remarks(parse_config(config), Layout()))
    whole = parse_config({**config, "hidden_size": 4096})
    assert not any("no multiple of 128" in text for text in remarks(whole, Layout()))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"speculative_config": {"num_speculative_tokens": 2}}, "provided but without speculative model"),
        (
            {"speculative_config": {"method": "eagle", "model": "a/b"}},
            "`num_speculative_tokens` was not provided",
        ),
        ({"speculative_config": DRAFT, "enable_lora": True}, "not currently compatible with LoRA"),
    ],
)
def test_rule_of_drafts(model_config, flags, text) -> None:
    model = parse_config(model_config("dense_8b"))
    (violation,) = check_engine(model, parse_engine({"vllm_version": "0.33.0", **flags}))
    assert violation.rule == 21
    assert text in violation.message


def test_gguf_needs_its_plugin(model_config) -> None:
    model = parse_config(model_config("dense_8b"))
    (violation,) = check_engine(model, parse_engine({"vllm_version": "0.33.0", "quantization": "gguf"}))
    assert violation.rule == 22
    assert "vllm-gguf-plugin" in violation.remedy


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("name", "changes", "flags", "rule", "text", "remedy"),
    [
        ("dense_8b", {"vocab_size": 262144}, {"enable_lora": True}, 20, "vocab size must be <= 258048", "merged"),
        ("dense_8b", {}, {"block_size": 24}, 24, "No valid attention backend found for cuda", "block-size to 32"),
        ("dense_8b", {}, {"block_size": 1}, 24, "no multiple of 16", "block-size to 16"),
        ("hybrid_mamba", {}, {"block_size": 40}, 24, "no multiple of 16", "block-size to 32"),
        (
            "dense_8b",
            LATENT,
            {"block_size": 32, "attention_backend": "FLASHMLA"},
            24,
            "Selected backend FLASHMLA is not valid for this configuration. Reason: ['block_size not supported']",
            "block-size to 64",
        ),
        (
            "dense_8b",
            {**LATENT, "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048, "n_routed_experts": None},
            {"block_size": 32},
            24,
            "32 is no multiple of 64",
            "block-size to 64",
        ),
        ("dense_8b", {}, {"max_num_seqs": 64, "max_num_batched_tokens": 32}, 25, "(32) must be greater", "64 or more"),
        ("dense_8b", {}, {"cudagraph_capture_sizes": []}, 26, "at least one element", "leave it out"),
        ("dense_8b", {}, {"cudagraph_capture_sizes": [1, 0]}, 26, "positive integers", "leave it out"),
        (
            "dense_8b",
            {},
            {"compilation_config": '{"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 4}'},
            26,
            "should be consistent with the max value of cudagraph_capture_sizes(=2)",
            "max-cudagraph-capture-size",
        ),
    ],
)
def test_rule_of_sizes(model_config, name, changes, flags, rule, text, remedy) -> None:
    model = parse_config({**model_config(name), **changes})
    (violation,) = check_engine(model, parse_engine({"vllm_version": "0.33.0", **flags}))
    assert violation.rule == rule
    assert text in violation.message
    assert remedy in violation.remedy
    assert violation.flag in flags


@pytest.mark.parametrize(
    ("name", "changes", "flags"),
    [
        ("dense_8b", {"vocab_size": 258048}, {"enable_lora": True}),
        ("dense_8b", {"vocab_size": 262144}, {}),
        ("dense_8b", {}, {"block_size": 48}),
        ("dense_8b", LATENT, {"block_size": 16}),
        ("dense_8b", LATENT, {"block_size": 64, "attention_backend": "FLASHMLA"}),
        # FlexAttention took any size before 0.26.
        ("dense_8b", {}, {"block_size": 24, "vllm_version": "0.19.1"}),
        ("dense_8b", {}, {"max_num_seqs": 64, "max_num_batched_tokens": 64}),
        # Sizes beyond a batch are dropped before the largest is looked at.
        ("dense_8b", {}, {"cudagraph_capture_sizes": [1, 2, 10**6], "max_cudagraph_capture_size": 2}),
        ("dense_8b", {}, {"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 2}),
        ("dense_8b", {}, {"cudagraph_capture_sizes": [], "enforce_eager": True}),
    ],
)
def test_sizes_that_vllm_takes(model_config, name, changes, flags) -> None:
    model = parse_config({**model_config(name), **changes})
    assert check_engine(model, parse_engine({"vllm_version": "0.33.0", **flags})) == []


def test_blocks_on_cpu(model_config) -> None:
    model, latent = (parse_config({**model_config("dense_8b"), **changes}) for changes in ({}, LATENT))
    engine = parse_engine({"vllm_version": "0.33.0", "block_size": 16})
    (violation,) = check_engine(model, engine, cpu=True)
    assert "No common block size for 16 (CPU_ATTN: [MultipleOf(32)])." in violation.message
    assert check_engine(latent, engine, cpu=True) == []


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
