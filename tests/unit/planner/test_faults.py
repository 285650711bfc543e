"""Values of config.json with which no vLLM starts: each is refused with its key and its value."""

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import ModelConfigError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}
DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
SPARSE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
}
GROUPED = {
    **DENSE,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "n_group": 4,
    "topk_group": 2,
}
HYBRID = {
    **DENSE,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "head_dim": 128,
}


def priced(config):
    return estimate(config, H200, {"vllm_version": "0.33.0", "max_model_len": 2048})


@pytest.mark.parametrize("config", [DENSE, SPARSE, GROUPED, HYBRID])
def test_the_configs_are_sound_before_they_are_spoilt(config) -> None:
    assert priced(config)["fits"]


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (DENSE, "architectures", []),
        (DENSE, "architectures", ""),
        (DENSE, "architectures", "LlamaForCausalLM"),
        (DENSE, "architectures", [""]),
        (DENSE, "architectures", [3]),
        (DENSE, "architectures", {"LlamaForCausalLM": 1}),
        (DENSE, "architectures", 7),
        (DENSE, "model_type", ["llama"]),
        (DENSE, "model_type", ""),
        (DENSE, "model_type", 3),
        (DENSE, "torch_dtype", 16),
        (DENSE, "num_key_value_heads", 6),
        (DENSE, "num_key_value_heads", 32),
        (DENSE, "num_key_value_heads", 0),
        (DENSE, "head_dim", -64),
        (DENSE, "hidden_size", 8),
        (DENSE, "intermediate_size", 0),
        (DENSE, "vocab_size", 0),
        (DENSE, "max_position_embeddings", 0),
        (DENSE, "sliding_window", -1),
        (DENSE, "sliding_window", "4096"),
        (DENSE, "tie_word_embeddings", "false"),
        (DENSE, "attention_bias", 1),
        (DENSE, "rms_norm_eps", "1e-6"),
        (DENSE, "rms_norm_eps", float("nan")),
        (DENSE, "rope_theta", -1),
        (DENSE, "partial_rotary_factor", 1.5),
        (DENSE, "rope_scaling", "yarn"),
        (DENSE, "quantization_config", "fp8"),
        (DENSE, "text_config", ["llama"]),
        (DENSE, "layer_types", "full_attention"),
        (DENSE, "layer_types", ["full_attention"] * 3),
        (SPARSE, "num_experts_per_tok", 65),
        (SPARSE, "num_experts_per_tok", 0),
        (SPARSE, "num_experts_per_tok", "8"),
        (SPARSE, "decoder_sparse_step", 0),
        (SPARSE, "decoder_sparse_step", -1),
        (SPARSE, "moe_intermediate_size", 0),
        (SPARSE, "norm_topk_prob", 1),
        (GROUPED, "n_group", 0),
        (GROUPED, "n_group", 3),
        (GROUPED, "topk_group", 5),
        (GROUPED, "moe_layer_freq", 0),
        (GROUPED, "moe_layer_freq", [1, 1]),
        (GROUPED, "first_k_dense_replace", -1),
        (GROUPED, "n_shared_experts", -1),
        (HYBRID, "linear_num_key_heads", 5),
        (HYBRID, "linear_num_key_heads", 0),
        (HYBRID, "full_attention_interval", 0),
        (HYBRID, "mamba_ssm_dtype", 32),
    ],
)
def test_refused_with_key_and_value(config, key, value) -> None:
    with pytest.raises(ModelConfigError) as caught:
        priced({**config, key: value})
    message = str(caught.value)
    assert key in message
    if not isinstance(value, list | dict):
        assert (str(value) if isinstance(value, float) else repr(value)) in message


def test_an_unknown_kind_of_layer_is_named() -> None:
    with pytest.raises(ModelConfigError, match="layer_types has 'fully_attention'"):
        priced({**DENSE, "layer_types": ["full_attention"] * 3 + ["fully_attention"]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_type", "spiral"),
        ("rope_type", 3),
        ("factor", 0),
        ("original_max_position_embeddings", -4096),
        ("beta_fast", "32"),
        ("partial_rotary_factor", 0),
        ("mrope_section", [0, 8]),
        ("mrope_section", "16"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_rope(key, value, nested) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, key: value}
    with pytest.raises(ModelConfigError, match=key):
        parse_config({**DENSE, "rope_parameters": {"full_attention": rope} if nested else rope})


def test_rope_of_a_kind_of_layer_is_an_object() -> None:
    with pytest.raises(ModelConfigError, match=r"rope_parameters\.sliding_attention = 'default'"):
        parse_config({**DENSE, "rope_parameters": {"full_attention": {}, "sliding_attention": "default"}})


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": -2}, "group_size"),
        ({"quant_method": "fp8", "activation_scheme": "sometimes"}, "activation_scheme"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    ],
)
def test_quantization(section, key) -> None:
    with pytest.raises(ModelConfigError, match=key):
        priced({**DENSE, "quantization_config": section})


def test_a_language_model_inside_is_checked_too() -> None:
    inner = {**SPARSE, "num_experts_per_tok": 100}
    with pytest.raises(ModelConfigError, match="num_experts_per_tok = 100"):
        parse_config({"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": inner})


@pytest.mark.parametrize("value", ["5", [-1], ["5"]])
def test_layers_whose_features_a_tower_hands_on(value) -> None:
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": value}
    inner = {**DENSE, "model_type": "qwen3_vl_text"}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": inner,
        "vision_config": vision,
    }
    with pytest.raises(ModelConfigError, match="deepstack_visual_indexes"):
        priced(config)


@pytest.mark.parametrize("value", [None, [2], {"a": 1}])
def test_null_is_as_good_as_absent_but_other_types_are_not(value) -> None:
    config = {**DENSE, "attention_bias": value}
    if value is None:
        assert priced(config) == priced(DENSE)
    else:
        with pytest.raises(ModelConfigError, match="attention_bias"):
            priced(config)


def test_a_number_of_experts_for_each_layer() -> None:
    config = {**SPARSE, "moe_topk": [8] * 4}
    del config["num_experts_per_tok"]
    assert parse_config(config).experts_per_token == 8
    with pytest.raises(ModelConfigError, match="moe_topk"):
        parse_config({**config, "moe_topk": [8, 8, 65, 8]})


def test_zero_means_derive_where_vllm_derives() -> None:
    """vllm/transformers_utils/model_arch_config_convertor.py: a head_dim of 0 is as good as none."""
    assert priced({**DENSE, "head_dim": 0}) == priced(DENSE)
