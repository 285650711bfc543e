"""Reads a Hugging Face `config.json` into the numbers that decide how a model can be served."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import ModelConfigError, short
from .faults import check_routing, check_values
from .mixers import Mixer, distinct, mixers
from .sections import HEADS, first_of, text_config

# A real config.json has some kilobytes (the largest seen: 70); more is a mistake or an attack.
MAX_CONFIG_BYTES = 8 * 1024 * 1024
# Larger counts than this occur in no model; arithmetic with them would only hide the mistake.
MAX_COUNT = 1 << 40

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Context extension that is already part of max_position_embeddings, so that the factor must not be applied again.
_ROPE_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "top_k")
# Classes that have no dense form: a file of theirs that names no experts is incomplete.
_EXPERTS_REQUIRED = re.compile(
    r"Moe|MoE|MOE|Mixtral|GptOss|DeepseekV[234]|GlmMoe|MistralLarge3|KimiK2|KimiK3|MiniMaxM|Step3p7"
)
# What vLLM assumes when the config names no length at all.
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Quantization:
    """How the checkpoint stores its linear layers."""

    method: str
    bits: int | None
    group_size: int | None
    block: tuple[int, int] | None
    ignored: tuple[str, ...]
    fp8_kv: bool


@dataclass(frozen=True)
class Model:
    """The numbers of one model, named as in this project and not as each family spells them."""

    architecture: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    dtype: str
    experts: int
    experts_per_token: int
    moe_intermediate: int
    shared_intermediate: int
    dense_layers: int
    mla: bool
    mamba_heads: int
    mamba_groups: int
    sliding_window: int | None
    multimodal: bool
    max_context: int
    max_context_key: str
    default_context: int
    max_context_alternative: int | None
    quantization: Quantization | None
    # The whole config.json with its overrides, for what only one family of models has.
    config: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    # hf_quant_config.json, where the checkpoint has one.
    quantization_beside: Mapping[str, Any] | None = field(default=None, hash=False, repr=False)

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        return text_config(self.config)

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """What takes the place of attention in each layer; equal layers are the same object."""
        return mixers(self.config)

    @cached_property
    def kinds(self) -> tuple[Mixer, ...]:
        """The different ones among them, in the order of their first layers."""
        return distinct(self.mixers)


def load_config(path: Path) -> dict[str, Any]:
    """Read a config.json, with errors that name the file."""
    try:
        if not path.is_file():
            raise ModelConfigError(f"no such file: {path}")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelConfigError(f"{path} is larger than {MAX_CONFIG_BYTES // 1024 // 1024} MiB: not a config.json")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelConfigError(f"{path} can't be read: {error.strerror}") from error
    except RecursionError as error:
        raise ModelConfigError(f"{path} is nested too deeply to be a config.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ModelConfigError):
            raise
        raise ModelConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelConfigError(f"{path} holds a JSON {type(data).__name__}, a config.json is an object")
    return data


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`--hf-overrides`: nested objects are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_config(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None) -> Model:
    """Turn a config.json into a `Model`, or say which key is missing or wrong."""
    text = text_config(config)
    check_values(config, text)
    heads = _count(text, HEADS, "attention heads")
    hidden = _count(text, _HIDDEN, "hidden size")
    kv_heads = _count(text, _KV_HEADS, "KV heads", default=heads)
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        kv_heads = 1
    layers = _count(text, _LAYERS, "layers")
    # Some configs write 0 or null where they mean "derive it".
    head_dim = _count(text, ("head_dim", "hidden_size_per_head"), "head size", default=0, minimum=0)
    experts_width = _count(text, _INTERMEDIATE, "intermediate size", default=4 * hidden)
    # MiniMax-M3 names its dense layers' size apart.
    intermediate = _count(text, ("dense_intermediate_size",), "intermediate size", default=experts_width)
    experts = _experts(config, text)
    if experts:
        check_routing(text, experts)
    moe_intermediate = (
        _count(text, ("moe_intermediate_size",), "expert size", default=experts_width) if experts else intermediate
    )
    shared = _count(
        text, ("shared_expert_intermediate_size", "share_expert_dim"), "shared expert size", default=0, minimum=0
    )
    if not shared:
        names = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
        shared = moe_intermediate * _count(text, names, "shared experts", default=0, minimum=0)
    context, key, default_context = _context(config, text)
    architectures = config.get("architectures")
    architecture = architectures[0] if architectures else ""
    window = text.get("sliding_window")
    if text.get("use_sliding_window") is False or not isinstance(window, int) or isinstance(window, bool):
        window = None
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    alternative = config.get("model_max_length")
    return Model(
        architecture=architecture,
        model_type=str(text.get("model_type") or config.get("model_type") or ""),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or max(1, hidden // heads),
        intermediate=intermediate,
        vocab=_count(text, ("vocab_size", "padded_vocab_size"), "vocabulary", default=32000),
        tied_embeddings=bool(tied),
        dtype=_dtype(config, text),
        experts=experts,
        experts_per_token=_count(text, _EXPERTS_PER_TOKEN, "experts a token", default=0, minimum=0) if experts else 0,
        moe_intermediate=moe_intermediate,
        shared_intermediate=shared if experts else 0,
        dense_layers=min(layers, _dense_layers(text, layers)) if experts else layers,
        mla=text.get("kv_lora_rank") is not None,
        mamba_heads=_count(text, ("mamba_num_heads", "mamba_n_heads"), "Mamba heads", default=0, minimum=0),
        mamba_groups=_count(text, ("mamba_n_groups", "n_groups"), "Mamba groups", default=1, minimum=0),
        sliding_window=window,
        multimodal=any(isinstance(config.get(name), Mapping) for name in ("vision_config", "audio_config")),
        max_context=context,
        max_context_key=key,
        default_context=default_context,
        max_context_alternative=alternative if isinstance(alternative, int) else None,
        quantization=_quantization(config, text, hf_quant_config),
        config=config,
        quantization_beside=hf_quant_config,
    )


def _experts(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """How many experts an MoE layer routes to; 0 for dense models, whose files may say so with a null."""
    if first_of(text, _EXPERTS) is not None:
        return _count(text, _EXPERTS, "experts", minimum=0)
    # params.json of Mistral's own format.
    inner = text.get("moe")
    if isinstance(inner, Mapping) and inner.get("num_experts") is not None:
        return _count(inner, ("num_experts",), "experts", minimum=0)
    names = config.get("architectures")
    name = names[0] if names else ""
    if _EXPERTS_REQUIRED.search(name) and not any(key in text for key in _EXPERTS):
        key = "n_routed_experts" if re.search(r"Deepseek|GlmMoe|Glm4Moe|MistralLarge|KimiK2", name) else "num_experts"
        raise ModelConfigError(f"config.json has no {key}, which {name:.80} needs", key=key)
    return 0


def _count(
    config: Mapping[str, Any], names: Sequence[str], what: str, default: int | None = None, minimum: int = 1
) -> int:
    found = first_of(config, names)
    if found is None:
        if default is None:
            raise ModelConfigError(f"config.json has no {what} (looked for {', '.join(names)})")
        return default
    name, value = found
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_COUNT:
        raise ModelConfigError(
            f"config.json: {name} = {short(value)} is not a number of {what} (an integer from {minimum} up)"
        )
    return value


def _rope_parameters(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("rope_parameters", "rope_scaling"):
        value = text.get(key)
        if not isinstance(value, Mapping):
            continue
        nested = [item for item in value.values() if isinstance(item, Mapping)]
        yield from nested or [value]
        return


def _context(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, str, int]:
    """The longest context as vLLM derives it, the key that decides it, and the length taken when none is asked."""
    best: float = math.inf
    key = "default"
    for name in _CONTEXT_KEYS:
        value = text.get(name)
        if value is None:
            continue
        number = _count(text, (name,), "tokens")
        if number < best:
            best, key = number, name
    if text.get("model_max_length"):
        best, key = _count(text, ("model_max_length",), "tokens"), "model_max_length"
    if best == math.inf:
        best = _DEFAULT_CONTEXT
    rope = list(_rope_parameters(text))
    kinds = [str(item.get("rope_type", item.get("type", "default"))) for item in rope]
    factor: float = 1.0
    if "gemma3" not in str(config.get("model_type", "")):
        for item, kind in zip(rope, kinds, strict=True):
            if kind not in _ROPE_ALREADY_SCALED:
                value = item.get("factor", factor)
                factor = 1.0 if value is None else _factor(value)
    limit = int(best * factor)
    default = limit
    if "longrope" in kinds:
        default = min(limit, _count(text, ("original_max_position_embeddings",), "tokens", default=limit))
    return limit, key, default


def _factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise ModelConfigError(f"config.json: rope factor = {short(value)} is not a positive number")
    return float(value)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for source in (text, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(source.get(key), str):
                return str(source[key])
    return "bfloat16"


def _dense_layers(text: Mapping[str, Any], layers: int) -> int:
    """How many layers of a mixture-of-experts model have an ordinary MLP."""
    first = _count(text, ("first_k_dense_replace",), "dense layers", default=0, minimum=0)
    only = text.get("mlp_only_layers")
    dense = {index for index in only if isinstance(index, int)} if isinstance(only, list) else set()
    step = _count(text, ("decoder_sparse_step",), "sparse step", default=1)
    # Bounded: `layers` may be any number that the file claims.
    if layers > 100_000:
        raise ModelConfigError(f"config.json: {layers} layers is more than any model has")
    return sum(1 for index in range(layers) if index < first or index in dense or (index + 1) % step)


def _quantization(
    config: Mapping[str, Any], text: Mapping[str, Any], beside: Mapping[str, Any] | None
) -> Quantization | None:
    found = config.get("quantization_config") or text.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, Mapping):
        beside = beside or config.get("hf_quant_config")
        if not isinstance(beside, Mapping) or not isinstance(beside.get("quantization"), Mapping):
            return None
        inner = beside["quantization"]
        found = {
            "quant_method": str(inner.get("quant_algo", "")).lower(),
            "group_size": inner.get("group_size"),
            "ignore": inner.get("exclude_modules"),
            "kv_cache_quant_algo": inner.get("kv_cache_quant_algo"),
        }
    method = str(found.get("quant_method", "")).lower()
    bits = _optional(found, "bits")
    group = _optional(found, "group_size") or _optional(found, "q_group_size")
    groups = found.get("config_groups")
    if isinstance(groups, Mapping):
        for entry in groups.values():
            weights = entry.get("weights") if isinstance(entry, Mapping) else None
            if isinstance(weights, Mapping):
                bits = bits or _optional(weights, "num_bits")
                group = group or _optional(weights, "group_size")
    block: tuple[int, int] | None = None
    shape = found.get("weight_block_size")
    if isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) and 0 < n < MAX_COUNT for n in shape):
        block = (shape[0], shape[1])
    ignored: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        value = found.get(key)
        if isinstance(value, list):
            ignored += [item for item in value if isinstance(item, str)]
    # With kv_cache_dtype left at auto, vLLM follows the checkpoint.
    fp8_kv = str(found.get("kv_cache_quant_algo", "")).upper() == "FP8" or bool(found.get("kv_cache_scheme"))
    return Quantization(method, bits, group, block, tuple(ignored), fp8_kv)


def _optional(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_COUNT else None
