"""Weights a rank holds: against vLLM's own model classes (built on the meta device) and real start-ups."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import Card, parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import (
    PlannerError,
    UnsupportedArchitectureError,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.weights import stage_weights
from hypothesis import given, settings
from hypothesis import strategies as st

GIB = 1024**3
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
# Bytes that vLLM 0.26's classes have as parameters and buffers, seen with a faked rank on the meta device.
ORACLE = [
    (LLAMA, {}, [16094078080]),
    (MOE, {}, [61074732736]),
    (MOE, {"tensor_parallel_size": 4}, [15295739584]),
    (MOE, {"pipeline_parallel_size": 2}, [31164941152, 31164941152]),
    # The absorbed copies of kv_b_proj come after loading: 61 layers of 32768 x 512 in 16 bits.
    (LATENT, {}, [673171585524 + 61 * 32768 * 512 * 2]),
]


def bytes_of(config, flags, **more) -> list[float]:
    return [stage.bytes for stage in stage_weights(parse_config(config), parse_engine(flags), **more)]


@pytest.mark.parametrize(("config", "flags", "expected"), ORACLE)
def test_against_the_engines_own_classes(config, flags, expected) -> None:
    assert bytes_of(config, flags) == pytest.approx(expected, rel=1e-3)


def test_tied_table_is_on_both_ends() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    table = 128256 * 4096 * 2
    assert bytes_of(LLAMA, {})[0] - bytes_of(tied, {})[0] == pytest.approx(table, rel=0.01)
    first, last = bytes_of(tied, {"pipeline_parallel_size": 2})
    assert last == pytest.approx(first, rel=1e-4)


def test_layer_partition() -> None:
    first, last = bytes_of(LLAMA, {"pipeline_parallel_size": 2, "pp_layer_partition": [8, 24]})
    assert last - first == pytest.approx(16 * (bytes_of(LLAMA, {})[0] - 2 * 128256 * 4096 * 2) / 32, rel=0.01)


def test_experts_are_spread_whole() -> None:
    spread = bytes_of(MOE, {"tensor_parallel_size": 8, "enable_expert_parallel": True})
    cut = bytes_of(MOE, {"tensor_parallel_size": 8})
    assert spread == pytest.approx(cut, rel=0.02)


def test_float32_doubles() -> None:
    assert bytes_of(LLAMA, {"dtype": "float32"})[0] == pytest.approx(2 * bytes_of(LLAMA, {})[0], rel=1e-3)


def test_mtp_only_when_asked() -> None:
    plain = bytes_of(LATENT, {"tensor_parallel_size": 8})[0]
    asked = bytes_of(
        LATENT, {"tensor_parallel_size": 8, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    )[0]
    # One layer of experts, an eighth of about 11.3 GiB, and the unquantized projection.
    assert 1.3 * GIB < asked - plain < 1.8 * GIB


def test_a_draft_model_is_counted() -> None:
    small = parse_config({**LLAMA, "num_hidden_layers": 2})
    flags = {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}
    alone = bytes_of({**LLAMA, "num_hidden_layers": 2}, {})[0]
    assert bytes_of(LLAMA, flags, draft=small)[0] - bytes_of(LLAMA, {})[0] == pytest.approx(alone)


def test_lora_slots() -> None:
    more = bytes_of(LLAMA, {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16})[0] - bytes_of(LLAMA, {})[0]
    layer = 3 * 4096 + 6144 + 4096 + 4096 + 2 * 4096 + 2 * 14336 + 14336 + 4096
    ends = 2 * (128256 + 4096)
    assert more == pytest.approx(2 * 16 * 2 * (32 * layer + ends))


def test_lora_leaves_the_ends_of_some_families_alone() -> None:
    flags = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    llama_more = bytes_of(LLAMA, flags)[0] - bytes_of(LLAMA, {})[0]
    mistral_more = bytes_of(mistral, flags)[0] - bytes_of(mistral, {})[0]
    assert llama_more - mistral_more == pytest.approx(2 * 16 * 2 * 2 * (128256 + 4096))


@pytest.mark.parametrize(
    ("section", "share"),
    [
        ({"quant_method": "fp8"}, 0.5),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.25 + 4 / 256),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 0.25 + 2 / 256),
        ({"quant_method": "fp8", "ignored_layers": [f"model.layers.{i}.mlp.down_proj" for i in range(32)]}, None),
    ],
)
def test_quantized_layers(section, share) -> None:
    ends = 2 * 128256 * 4096 * 2
    full = bytes_of(LLAMA, {})[0] - ends
    got = bytes_of({**LLAMA, "quantization_config": section}, {})[0] - ends
    if share is None:
        down = 32 * 4096 * 14336 * 2
        share = 0.5 + down / full / 2
    assert got == pytest.approx(full * share, rel=0.01)


@pytest.mark.parametrize(
    "flags",
    [
        {"pipeline_parallel_size": 1 << 39},
        {"pipeline_parallel_size": 2, "pp_layer_partition": [8, 8]},
        {"pipeline_parallel_size": 2, "pp_layer_partition": [32]},
    ],
)
def test_impossible_stages(flags) -> None:
    with pytest.raises(PlannerError, match="pipeline stages"):
        bytes_of(LLAMA, flags)


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="WeirdForCausalLM"):
        bytes_of({**LLAMA, "architectures": ["WeirdForCausalLM"]}, {})


def test_unknown_quantization_is_named() -> None:
    with pytest.raises(PlannerError, match="exotic"):
        bytes_of({**LLAMA, "quantization_config": {"quant_method": "exotic"}}, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([LLAMA, MOE, LATENT]), st.data())
def test_wrong_values_give_planner_errors_only(config, data) -> None:
    key = data.draw(st.sampled_from([*config, "quantization_config", "rope_parameters", "moe_layer_freq"]))
    with contextlib.suppress(PlannerError):
        assert all(value >= 0 for value in bytes_of({**config, key: data.draw(JSON)}, {}))


def test_measured_start_ups(shared_facts: Path) -> None:
    errors = []
    for line in (shared_facts / "ground_truth" / "h200_vllm_0.26.jsonl").read_text().splitlines():
        row = json.loads(line)
        base = shared_facts / "model_configs" / row["model"]
        beside = base.with_name(f"{base.name}.hf_quant_config.json")
        model = parse_config(
            json.loads(base.with_name(f"{base.name}.json").read_text()),
            json.loads(beside.read_text()) if beside.exists() else None,
        )
        stages = stage_weights(model, parse_engine({**row["flags"], "vllm_version": "0.26.0"}), card=Card("H200", 1.0))
        errors.append(abs(stages[0].bytes / GIB / row["weights_gib_per_rank"][0] - 1))
    assert sorted(errors)[len(errors) // 2] <= 0.002
    assert max(errors) <= 0.01
