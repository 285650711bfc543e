"""The engine's rules, in its words."""
# ruff: noqa: PLR0917  # parametrized

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.rules import (
    Layout,
    check,
    holds,
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
