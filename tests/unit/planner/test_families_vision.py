"""Vision and latent-attention families: against vLLM 0.26's own classes, built on the meta device with a faked rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner import weights
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import ModelConfigError, PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.weights import stage_weights
from hypothesis import given, settings
from hypothesis import strategies as st

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}
GIB = 1 << 30
TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
# Buffers follow the largest batch; vLLM's classes were built with this one.
BATCH = {"max_num_batched_tokens": 2048}


def five_to_one(layers: int) -> list[str]:
    return ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(layers)]


ROPE4 = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
GEMMA4_TEXT: dict[str, Any] = {
    "attention_k_eq_v": True,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_parameters": ROPE4,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
}
GEMMA4_VISION = {
    "head_dim": 72,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
}
GEMMA4_MOE: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "audio_config": None,
    "text_config": {
        **GEMMA4_TEXT,
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": five_to_one(30),
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "top_k_experts": 8,
    },
    "vision_config": GEMMA4_VISION,
}
# Embeddings of each layer, shared KV caches and a tower for sound.
GEMMA4_EDGE: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "audio_config": {"model_type": "gemma4_audio"},
    "text_config": {
        **GEMMA4_TEXT,
        "attention_k_eq_v": False,
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10240,
        "layer_types": five_to_one(42),
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {
        **GEMMA4_VISION,
        "head_dim": 64,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 16,
        "num_key_value_heads": 12,
    },
}
GEMMA4_UNIFIED: dict[str, Any] = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "model_type": "gemma4_unified",
    "audio_config": {"model_type": "gemma4_unified_audio"},
    "text_config": {
        **GEMMA4_TEXT,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "layer_types": five_to_one(48),
        "model_type": "gemma4_unified_text",
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 48,
    },
    "vision_config": {"model_type": "gemma4_unified_vision"},
}
SIGLIP = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
# Gemma 3 leaves out what its class has by default, in the small model even the heads.
GEMMA3_SMALL: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": SIGLIP,
}
GEMMA3: dict[str, Any] = {
    **GEMMA3_SMALL,
    "text_config": {
        **GEMMA3_SMALL["text_config"],
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
    },
}
QWEN_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN2_VL: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    **QWEN_TEXT,
    "max_position_embeddings": 32768,
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16},
}
QWEN25_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    **QWEN_TEXT,
    "max_position_embeddings": 128000,
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
}
PIXTRAL = {
    "hidden_size": 1024,
    "image_size": 1540,
    "intermediate_size": 4096,
    "model_type": "pixtral",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
MINISTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "spatial_merge_size": 2,
    "tie_word_embeddings": False,
    "vision_feature_layer": -1,
    "quantization_config": {
        "activation_scheme": "static",
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    },
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 16384,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rope_parameters": {"factor": 16.0, "original_max_position_embeddings": 16384, "rope_type": "yarn"},
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    "vision_config": PIXTRAL,
}
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "model_type": "kimi_k2",
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"},
                }
            },
            "format": "pack-quantized",
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
            "quant_method": "compressed-tensors",
        },
        "rope_scaling": {"factor": 64.0, "original_max_position_embeddings": 4096, "type": "yarn"},
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "vision_config": {
        "merge_kernel_size": [2, 2],
        "patch_size": 14,
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    },
}
DEEPSEEK_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "expert_dtype": "fp4",
    "hc_mult": 4,
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 65536, "type": "yarn"},
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the allocator's segments, as tensors on the meta device have none."""
    monkeypatch.setattr(weights, "allocated", lambda size, whole=False: size)
    yield


def stages(source: dict[str, Any], flags: dict[str, Any], version: str = "0.26.0") -> list[float]:
    engine = parse_engine({**BATCH, **flags, "vllm_version": version})
    return [stage.bytes for stage in stage_weights(parse_config(source), engine)]


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize(
    ("source", "flags", "stage", "expected"),
    [
        (GEMMA4_MOE, {}, 0, 52043551906),
        (GEMMA4_MOE, TP2, 0, 26807506082),
        (GEMMA4_EDGE, {}, 0, 16237714012),
        (GEMMA4_EDGE, TP2, 0, 8775260764),
        (GEMMA4_EDGE, PP2, 1, 12249928510),
        (GEMMA4_UNIFIED, {}, 0, 24353610274),
        (GEMMA3_SMALL, {}, 0, 9204172714),
        (GEMMA3, {}, 0, 55166838170),
        (GEMMA3, TP2, 0, 27747566378),
        (QWEN2_VL, {}, 0, 16616962032),
        (QWEN25_VL, {}, 0, 16716061680),
        (QWEN25_VL, TP2, 0, 8425773296),
        (MINISTRAL, {}, 0, 15365780720),
        (MINISTRAL, TP2, 0, 7724807408),
        # Less the orders of inputs (int32, with their inverse), which Marlin drops when weights are not reordered.
        (
            KIMI,
            {"tensor_parallel_size": 8, "enforce_eager": True},
            0,
            77840837680 - 2 * 4 * 60 * 384 * (7168 + 256),
        ),
        # Less the indices of the indexer's top-k, which overhead.py counts.
        (DEEPSEEK_V4, {"kv_cache_dtype": "fp8"}, 0, 24172657188 - 4 * 2048 * 512),
    ],
)
def test_against_the_engines_own_classes(source, flags, stage, expected) -> None:
    assert stages(source, flags)[stage] == pytest.approx(expected, rel=2e-5)


def test_a_measured_start_of_deepseek_v4() -> None:
    """74.08 GiB on each of two H200s, public log (43 layers)."""
    ratios = [0, 0, *(4 if index % 2 == 0 else 128 for index in range(41)), 0]
    source = {**DEEPSEEK_V4, "num_hidden_layers": 43, "compress_ratios": ratios}
    flags = {**TP2, "kv_cache_dtype": "fp8", "quantization": "deepseek_v4_fp8", "enforce_eager": True}
    found = estimate(source, H200, {**flags, "vllm_version": "0.26.0"})
    assert found["weights_gib"] == pytest.approx(74.08, rel=2e-3)


def test_a_measured_start_of_gemma_4() -> None:
    """48.5 GiB on an A100, public log of vLLM 0.19; its KV cache had 21.5 GiB."""
    card = {"name": "NVIDIA A100-SXM4-80GB", "memory_total_mib": 81920}
    flags = {"max_model_len": 131072, "gpu_memory_utilization": 0.9, "enforce_eager": True, "vllm_version": "0.19.0"}
    found = estimate(GEMMA4_MOE, card, flags)
    assert found["weights_gib"] == pytest.approx(48.5, rel=2e-3)
    assert found["kv_cache_gib"] == pytest.approx(21.5, rel=0.01)


@pytest.mark.parametrize("source", [GEMMA4_MOE, GEMMA4_EDGE, GEMMA3, QWEN2_VL, QWEN25_VL, MINISTRAL])
def test_towers_are_left_out_when_nothing_may_come_in(source) -> None:
    whole = stages(source, {})[0]
    alone = stages(source, {"language_model_only": True})[0]
    limits = {"image": 0, "video": 0, "audio": 0}
    assert alone < whole
    assert stages(source, {"limit_mm_per_prompt": limits})[0] == alone
    assert stages(source, {"limit_mm_per_prompt": {"image": 1, "video": 0, "audio": 0}})[0] > alone


def test_sound_alone_is_left_out_by_its_own_limit() -> None:
    without = stages(GEMMA4_EDGE, {"limit_mm_per_prompt": {"audio": 0}})[0]
    alone = stages(GEMMA4_EDGE, {"language_model_only": True})[0]
    assert alone < without < stages(GEMMA4_EDGE, {})[0]


def test_the_unified_model_keeps_its_projections() -> None:
    assert stages(GEMMA4_UNIFIED, {"language_model_only": True}) == stages(GEMMA4_UNIFIED, {})


def test_layers_above_the_one_that_is_used_are_not_made() -> None:
    assert stages({**MINISTRAL, "vision_feature_layer": -2}, {})[0] < stages(MINISTRAL, {})[0]


def test_how_deepseek_v4_stores_its_experts() -> None:
    """MXFP4 takes 4.25 bits, NVFP4 4.5, FP8 8; another model_type is read as ordinary FP8 (quant_config.py)."""
    nvfp4 = {**DEEPSEEK_V4["quantization_config"], "moe_quant_algo": "NVFP4"}
    four = stages(DEEPSEEK_V4, {})[0]
    assert four < stages({**DEEPSEEK_V4, "quantization_config": nvfp4}, {})[0]
    eight = stages({**DEEPSEEK_V4, "expert_dtype": "fp8"}, {})[0]
    weights_of_experts = 6 * 256 * 3 * 4096 * 2048
    assert eight - four == pytest.approx(weights_of_experts * (8 - 4.25) / 8, rel=1e-2)
    other = {**DEEPSEEK_V4, "model_type": "deepseek_ref"}
    assert stages(other, {})[0] == pytest.approx(eight, rel=1e-3)
    assert stages(other, {"quantization": "deepseek_v4_fp8"})[0] == four


def test_residual_streams_are_kept_for_a_drafter_only_from_0_33() -> None:
    buffer = 2048 * 4 * 4096 * 2
    assert stages(DEEPSEEK_V4, {}, "0.26.0")[0] - stages(DEEPSEEK_V4, {}, "0.33.0")[0] == buffer


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({**DEEPSEEK_V4, "n_routed_experts": ...}, "n_routed_experts"),
        ({**DEEPSEEK_V4, "architectures": ["MistralLarge3ForCausalLM"], "n_routed_experts": ...}, "n_routed_experts"),
        ({**QWEN_TEXT, "architectures": ["Qwen3MoeForCausalLM"]}, "num_experts"),
        ({**DEEPSEEK_V4, "expert_dtype": "int3"}, "expert_dtype"),
        ({**DEEPSEEK_V4, "o_groups": ...}, "o_groups"),
        ({**GEMMA4_MOE, "vision_config": ...}, "vision_config"),
        ({**MINISTRAL, "vision_feature_layer": "last"}, "vision_feature_layer"),
        ({**KIMI, "vision_config": {**KIMI["vision_config"], "merge_kernel_size": 2}}, "merge_kernel_size"),
        ({**GEMMA4_EDGE, "audio_config": {"subsampling_conv_channels": [1]}}, "subsampling_conv_channels"),
    ],
)
def test_what_is_missing_or_wrong_is_named(source, key) -> None:
    source = {name: value for name, value in source.items() if value is not ...}
    with pytest.raises(ModelConfigError, match=key) as caught:
        stages(source, {})
    assert caught.value.key == key


def test_a_null_makes_a_model_dense() -> None:
    dense = parse_config({**DEEPSEEK_V4, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": None})
    assert not dense.is_moe


def test_experts_of_mistrals_own_format() -> None:
    source = {key: value for key, value in DEEPSEEK_V4.items() if key != "n_routed_experts"}
    found = parse_config({**source, "architectures": ["MistralLarge3ForCausalLM"], "moe": {"num_experts": 128}})
    assert found.is_moe
    assert found.experts == 128


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
SOURCES = [GEMMA4_MOE, GEMMA4_EDGE, GEMMA4_UNIFIED, GEMMA3_SMALL, QWEN2_VL, QWEN25_VL, MINISTRAL, KIMI, DEEPSEEK_V4]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SOURCES), st.data())
def test_wrong_values_give_planner_errors_only(source, data) -> None:
    part = data.draw(st.sampled_from([key for key, value in source.items() if isinstance(value, dict)] or [""]))
    inner = source.get(part)
    value = data.draw(JSON)
    if isinstance(inner, dict) and data.draw(st.booleans()):
        changed = {**source, part: {**inner, data.draw(st.sampled_from(sorted(inner))): value}}
    else:
        changed = {**source, data.draw(st.sampled_from(sorted(source))): value}
    with contextlib.suppress(PlannerError):
        estimate(changed, H200, {"tensor_parallel_size": 2})
