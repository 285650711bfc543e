"""Kimi-Linear, Kimi-K3, MiniMax-M3, Step and shared experts under sequence parallelism, against vLLM's own classes.

The totals are those of the parameters and buffers that vLLM 0.26 (0.33 where said) creates for these shapes.
"""

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import parse_card, parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import (
    ModelConfigError,
    UnsupportedArchitectureError,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.kv_cache import kv_plan
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.mixers import mixers
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.weights import stage_weights

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}
SPREAD = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}

KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "head_dim": 72,
    "intermediate_size": 9216,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 1024,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3, 5],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576,
    "tie_word_embeddings": False,
    "vocab_size": 163840,
    "dtype": "bfloat16",
}
KIMI_K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "attn_res_block_size": 12,
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_intermediate_size": 3072,
        "moe_layer_freq": 1,
        "num_attention_heads": 96,
        "num_experts": 32,
        "num_experts_per_token": 8,
        "num_hidden_layers": 5,
        "num_key_value_heads": 96,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "group_size": 32, "type": "float", "strategy": "group"},
                }
            },
            "format": "mxfp4-pack-quantized",
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
            "quant_method": "compressed-tensors",
        },
        "routed_expert_hidden_size": 3584,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "vision_config": {
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "patch_size": 14,
        "qkv_hidden_size": 1536,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": 27,
    },
}
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "torch_dtype": "bfloat16",
    "projector_hidden_size": 6144,
    "text_config": {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_text",
        "dense_intermediate_size": 12288,
        "head_dim": 128,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "max_position_embeddings": 1048576,
        "moe_layer_freq": [0, 0, 0, 1, 1],
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 64,
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 0, 0, 1, 1],
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
        },
        "tie_word_embeddings": False,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "patch_size": 14,
        "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}
STEP = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 6,
    "vocab_size": 128896,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "torch_dtype": "bfloat16",
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96},
    "moe_layers_enum": "3,4,5",
    "moe_num_experts": 64,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "use_head_wise_attn_gate": True,
    "sliding_window": 512,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"],
    "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 32768},
    "yarn_only_types": ["full_attention"],
    "tie_word_embeddings": False,
}
# The same as transformers writes it (Step3p7TextConfig).
STEP_NEWER = {
    **{
        key: value
        for key, value in STEP.items()
        if not key.startswith(
            ("moe_layers", "moe_num", "moe_top", "attention_other", "partial", "rope", "yarn", "num_att")
        )
    },
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_sliding_attention_heads": 96,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 3],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": 32768,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 1.0},
    },
}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def bytes_of(config, flags, version="0.26.0"):
    engine = parse_engine({**flags, "vllm_version": version})
    return [stage.bytes for stage in stage_weights(parse_config(config), engine, card=parse_card(H200))]


@pytest.mark.parametrize(
    ("config", "version", "flags", "totals"),
    [
        (KIMI_LINEAR, "0.26.0", {}, [16569030692]),
        (KIMI_LINEAR, "0.26.0", {"tensor_parallel_size": 4}, [4151367332]),
        (KIMI_LINEAR, "0.26.0", SPREAD, [4666713892]),
        (KIMI_LINEAR, "0.33.0", SPREAD, [4758728476]),
        (
            KIMI_LINEAR,
            "0.33.0",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            [4202084288, 4088506204],
        ),
        (KIMI_K3, "0.33.0", {}, [14780029980]),
        (KIMI_K3, "0.33.0", {"tensor_parallel_size": 8}, [3025254108]),
        (KIMI_K3, "0.33.0", {**SPREAD, "tensor_parallel_size": 8}, [5081381084]),
        (KIMI_K3, "0.33.0", {"tensor_parallel_size": 4, "language_model_only": True}, [3810035612]),
        (MINIMAX_M3, "0.26.0", {}, [37506316112]),
        (MINIMAX_M3, "0.33.0", {"tensor_parallel_size": 4}, [9486797588]),
        (STEP, "0.26.0", {}, [10283495384]),
        (STEP, "0.33.0", {"tensor_parallel_size": 8}, [1310306192]),
        (STEP, "0.33.0", SPREAD, [3646010000]),
        (STEP_NEWER, "0.33.0", {"tensor_parallel_size": 2}, [5155958672]),
    ],
)
def test_against_vllm(config, version, flags, totals) -> None:
    # Torch hands out small pieces of these few layers in blocks of 2 MiB, which the sums do not know.
    for got, held in zip(bytes_of(config, flags, version), totals, strict=True):
        assert -0.0005 <= got / held - 1 <= 0.008


def test_shared_experts_are_whole_where_ranks_share_the_tokens() -> None:
    """use_sequence_parallel_moe: with experts spread over tensor and data ranks."""
    shared = 3 * 2048 * 2 * 1408 * 2 * 3
    spread = bytes_of(DEEPSEEK, SPREAD)[0]
    other = bytes_of(DEEPSEEK, {**SPREAD, "all2all_backend": "flashinfer_all2allv"})[0]
    assert spread - other == pytest.approx(shared / 2, rel=0.02)
    assert spread == bytes_of(DEEPSEEK, {**SPREAD, "all2all_backend": "naive"})[0]
    # One tensor rank has nobody to share with.
    alone = {"tensor_parallel_size": 1, "data_parallel_size": 4, "enable_expert_parallel": True}
    assert bytes_of(DEEPSEEK, alone) == bytes_of(DEEPSEEK, {**alone, "all2all_backend": "flashinfer_all2allv"})


def test_kimi_k3_keeps_its_latent_projections_unquantized() -> None:
    """models/config.py: KimiK3ForConditionalGenerationConfig reads the checkpoint as MXFP4 experts alone."""
    plain = {**KIMI_K3, "text_config": {**KIMI_K3["text_config"]}}
    section = plain["text_config"]["quantization_config"]
    plain["text_config"]["quantization_config"] = {**section, "format": "nvfp4-pack-quantized"}
    latent = 4 * 2 * 7168 * 3584
    assert bytes_of(KIMI_K3, {}, "0.33.0")[0] - bytes_of(plain, {}, "0.33.0")[0] > latent


def kimi_plan(config, version="0.33.0", **flags):
    engine = parse_engine({"vllm_version": version, "enable_prefix_caching": True, **flags})
    return kv_plan(
        mixers(config), engine, dtype="bfloat16", max_num_batched_tokens=8192, max_model_len=32768, capability=90
    )


def test_kimi_states_and_pages() -> None:
    """The block of latent rows grows until its page holds a state: 32 heads of 128 x 128 float32, and 3 inputs."""
    plan = kimi_plan(KIMI_LINEAR, enable_prefix_caching=False)
    state = 32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2
    row = 576 * 2
    assert plan.block_size == -(-state // (128 * row)) * 128
    assert {cache.page for group in plan.groups for cache in group.caches} == {plan.block_size * row}
    assert plan.has_state
    # A sequence needs a block of its state in each layer, so that many sequences are the limit.
    sized = plan.size([plan.block_bytes[0] * 41], 4096, max_num_seqs=64)
    assert sized.error is not None
    assert "max_num_seqs (64) exceeds available Mamba cache blocks (41)" in sized.error


def test_only_the_bounded_full_rank_gate_stores_states_inside_a_prefill() -> None:
    """vllm/models/kimi_k3/nvidia/kda.py: FlashKDA takes one block more a request; Kimi-Linear's Triton kernel none."""

    def slots(config):
        return {cache.slots for group in kimi_plan(config).groups for cache in group.caches if cache.kind == "state"}

    assert slots(KIMI_LINEAR) == {2}
    assert slots(KIMI_K3) == {3}


def test_whole_models_fit_where_they_should() -> None:
    full = [4, 8, 12, 16, 20, 24, 27]
    layers = {"full_attn_layers": full, "kda_layers": [layer for layer in range(1, 28) if layer not in full]}
    whole = {
        **KIMI_LINEAR,
        "num_hidden_layers": 27,
        "linear_attn_config": {**KIMI_LINEAR["linear_attn_config"], **layers},
    }
    answer = estimate(whole, H200, {"vllm_version": "0.33.0", "max_model_len": 131072})
    assert answer["fits"]
    # Its name says 48 B parameters.
    assert answer["weights_gib"] == pytest.approx(48e9 * 2 / 2**30, rel=0.03)


@pytest.mark.parametrize(
    ("config", "change", "error"),
    [
        (KIMI_LINEAR, {"num_nextn_predict_layers": 1}, UnsupportedArchitectureError),
        (KIMI_LINEAR, {"num_experts_per_token": 257}, ModelConfigError),
        (KIMI_LINEAR, {"kv_lora_rank": None}, ModelConfigError),
        (STEP, {"moe_layers_enum": "3;4"}, ModelConfigError),
        (STEP, {"moe_layers_enum": 3}, ModelConfigError),
        (STEP, {"rope_theta": [5e6, "x"]}, ModelConfigError),
    ],
)
def test_refused_by_name(config, change, error) -> None:
    key = next(iter(change))
    with pytest.raises(error, match=key):
        bytes_of({**config, **change}, {})


GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def test_the_mtp_layer_of_glm_is_a_layer_with_experts_and_a_projection() -> None:
    layer = bytes_of({**GLM, "num_hidden_layers": 4}, {})[0] - bytes_of(GLM, {})[0]
    projection = 2 * 4096 * 4096 * 2
    assert bytes_of(GLM, MTP)[0] - bytes_of(GLM, {})[0] == pytest.approx(layer + projection, rel=1e-3)


@pytest.mark.parametrize("config", [DEEPSEEK, STEP, {**GLM, "num_nextn_predict_layers": 0}])
def test_mtp_layers_that_are_not_described_are_refused_instead_of_left_out(config) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=f"MTP layers of {config['architectures'][0]}"):
        bytes_of(config, MTP)


def test_mxfp4_tiles_on_blackwell() -> None:
    """mxfp4_round_up_hidden_size_and_intermediate_size: 256 columns up to 0.26, 128 in 0.32 and later."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    card = parse_card({"name": "NVIDIA B200", "memory_total_mib": 183359})

    def held(version):
        return stage_weights(parse_config(config), parse_engine({"vllm_version": version}), card=card)[0].bytes

    # 2,880 columns become 3,072 or 2,944; rows of hidden state 3,072; 17 bits for 4 weights, three matrices.
    saved = 32 * 3 * (3072 - 2944) * 3072 * 17 / 32
    assert held("0.26.0") - held("0.33.0") == pytest.approx(saved, rel=0.1)
