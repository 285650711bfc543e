"""Values of config.json with which no vLLM starts: wrong types of keys that it reads, and sizes that contradict.

`transformers` checks the type of every key that its configuration classes declare, and vLLM's layers fail on what does
not divide. Keys that are read where they matter (layers, hidden size, heads) have their checks there; here are those
that an estimate would otherwise pass over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ModelConfigError, short

Section = Mapping[str, Any]

_SECTIONS = (
    "audio_config",
    "language_config",
    "linear_attn_config",
    "llm_config",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "sparse_attention_config",
    "text_config",
    "thinker_config",
    "vision_config",
)
_SWITCHES = (
    "add_full_attention_sink_bias",
    "add_swa_attention_sink_bias",
    "alibi",
    "attention_bias",
    "attention_k_eq_v",
    "attention_output_gate",
    "attn_output_gate",
    "enable_moe_block",
    "mamba_proj_bias",
    "mlp_bias",
    "multi_query",
    "new_decoder_architecture",
    "norm_topk_prob",
    "parallel_attn",
    "qkv_bias",
    "tie_word_embeddings",
    "use_bias",
    "use_conv_bias",
    "use_double_wide_mlp",
    "use_qk_norm",
    "use_routing_bias",
    "use_sliding_window",
)
_WORDS = (
    "dtype",
    "mamba_ssm_cache_dtype",
    "mamba_ssm_dtype",
    "model_type",
    "qk_norm_type",
    "scoring_func",
    "topk_method",
    "torch_dtype",
)
# Counts that may be zero, and those that may not.
_COUNTS = (
    "first_k_dense_replace",
    "interleave_moe_layer_step",
    "max_window_layers",
    "mtp_num_hidden_layers",
    "mtp_transformer_layers",
    "n_shared_experts",
    "num_kv_shared_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "sliding_window",
    "sliding_window_size",
)
_SIZES = (
    "attention_chunk_size",
    "index_topk",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "n_group",
    "q_lora_rank",
    "rotary_dim",
    "swa_head_dim",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_v_head_dim",
    "topk_group",
    "v_head_dim",
    "vocab_size_per_layer_input",
)
_NUMBERS = (
    "attention_value_scale",
    "final_logit_softcapping",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "norm_eps",
    "rms_norm_eps",
    "routed_scaling_factor",
    "swa_rope_theta",
    "swiglu_limit",
)
# transformers/configuration_utils.py: ALLOWED_LAYER_TYPES, with the names that older releases had.
_LAYER_TYPES = frozenset(
    {
        "attention",
        "chunked_attention",
        "compressed_sparse_attention",
        "conv",
        "deepseek_sparse_attention",
        "dense",
        "full_attention",
        "heavily_compressed_attention",
        "hybrid",
        "hybrid_sliding",
        "indexed_attention",
        "linear_attention",
        "mamba",
        "minimax_m3_sparse",
        "mlp",
        "moe",
        "sliding_attention",
        "sparse",
        "window_attention",
    }
)
# vllm/model_executor/layers/rotary_embedding: get_rope; "su" and "mrope" are older names that vLLM puts right.
_ROPE_TYPES = frozenset(
    {
        "bailing_mrope",
        "deepseek_llama_scaling",
        "deepseek_yarn",
        "default",
        "dynamic",
        "linear",
        "llama3",
        "longrope",
        "mllama4",
        "mrope",
        "ntk",
        "openpangu",
        "proportional",
        "su",
        "telechat3-yarn",
        "xdrope",
        "yarn",
    }
)
_ROPE_SIZES = ("factor", "original_max_position_embeddings", "rope_theta")
_ROPE_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "high_freq_factor", "low_freq_factor", "mscale")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_MAX_SIZE = 1 << 32


def _wrong(key: str, value: Any, wanted: str) -> ModelConfigError:
    return ModelConfigError(f"config.json: {key} = {short(value)} is not {wanted}.", "Correct it.", key)


def _is_integer(value: Any, minimum: int) -> bool:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= _MAX_SIZE


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


_Rule = tuple[Callable[[Any], bool], str]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_SECTIONS, (lambda value: isinstance(value, Mapping), "an object")),
    **dict.fromkeys(_SWITCHES, (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(_WORDS, (lambda value: isinstance(value, str) and value != "", "a word")),
    **dict.fromkeys(_COUNTS, (lambda value: _is_integer(value, 0), "an integer from 0 up")),
    **dict.fromkeys(_SIZES, (lambda value: _is_integer(value, 1), "an integer from 1 up")),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    # Step-3.5 has one for each layer.
    "rope_theta": (
        lambda value: all(map(_is_number, value)) if isinstance(value, list) else _is_number(value),
        "a number",
    ),
    "partial_rotary_factor": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
}


def check_values(config: Section, text: Section) -> None:
    """Raise ModelConfigError for the first value of these kinds. `text` is the part about the language model."""
    for section in (config,) if text is config else (config, text):
        for key, value in section.items():
            rule = _RULES.get(key) if isinstance(key, str) else None
            if rule is not None and value is not None and not rule[0](value):
                raise _wrong(key, value, rule[1])
        _check_architectures(section)
        _check_layer_types(section)
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(key, text.get(key))


def _check_architectures(section: Section) -> None:
    names = section.get("architectures")
    if names is None:
        return
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ModelConfigError(
            f"config.json: architectures = {short(names)} is not a list of class names.",
            'Write it as the checkpoint has it: ["LlamaForCausalLM"], say.',
            "architectures",
        )


def _check_layer_types(section: Section) -> None:
    for key in ("layer_types", "mlp_layer_types"):
        kinds = section.get(key)
        if kinds is None:
            continue
        if not isinstance(kinds, list):
            raise _wrong(key, kinds, "a list of words")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _LAYER_TYPES:
                raise ModelConfigError(
                    f"config.json: {key} has {short(kind)}, which is no kind of layer.", "Correct it.", key
                )


def _check_rope(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        return
    # Models with windows may have one set for each kind of attention.
    kinds = [name for name in value if isinstance(name, str) and name.endswith("_attention")]
    for name in kinds:
        rope = value[name]
        if rope is not None and not isinstance(rope, Mapping):
            raise _wrong(f"{key}.{name}", rope, "an object")
        _check_one_rope(f"{key}.{name}", rope or {})
    if not kinds:
        _check_one_rope(key, value)


def _check_one_rope(key: str, rope: Section) -> None:
    kind = rope.get("rope_type", rope.get("type"))
    if kind is not None and (not isinstance(kind, str) or kind not in _ROPE_TYPES):
        raise _wrong(f"{key}.rope_type", kind, f"one of {', '.join(sorted(_ROPE_TYPES))}")
    for name, number in rope.items():
        if number is None:
            continue
        if name in _ROPE_SIZES and not (_is_number(number) and 0 < number <= _MAX_SIZE):
            raise _wrong(f"{key}.{name}", number, "a positive number")
        if name in _ROPE_NUMBERS and not _is_number(number):
            raise _wrong(f"{key}.{name}", number, "a number")
        if name == "partial_rotary_factor" and not (_is_number(number) and 0 < number <= 1):
            raise _wrong(f"{key}.{name}", number, "a number above 0 and up to 1")
        if name == "mrope_section" and not (
            isinstance(number, list) and number and all(_is_integer(part, 1) for part in number)
        ):
            raise _wrong(f"{key}.{name}", number, "a list of sizes")


def check_routing(text: Section, experts: int) -> None:
    """What a router can't do (vllm/model_executor/layers/fused_moe: top-k, and top-k in groups)."""
    for key in _PER_TOKEN:
        chosen = text.get(key)
        if chosen is None:
            continue
        # Hunyuan's files have one number for each layer.
        if not all(
            _is_integer(item, 1) and item <= experts for item in (chosen if isinstance(chosen, list) else [chosen])
        ):
            raise _wrong(key, chosen, f"a number of the {experts} experts")
        break
    groups, kept = text.get("n_group"), text.get("topk_group")
    if groups is not None and experts % groups:
        raise _wrong("n_group", groups, f"a divisor of the {experts} experts")
    if groups is not None and kept is not None and kept > groups:
        raise _wrong("topk_group", kept, f"a number of the {groups} groups (n_group)")
    for key in ("decoder_sparse_step", "moe_layer_freq"):
        step = text.get(key)
        if step is not None and not isinstance(step, list) and not _is_integer(step, 1):
            raise _wrong(key, step, "an integer from 1 up")
