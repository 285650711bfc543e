"""What vLLM will say of memory for fixed flags: a first version for plain transformers.

Covered: decoder-only models with full GQA/MHA attention, dense or mixture-of-experts, unquantized or with FP8, AWQ and
GPTQ linear layers. Everything else raises `UnsupportedArchitectureError`, because a guess would be worse than none.
Figures come from the model's structure and from the version's rules, never from a model's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import PlannerError, UnsupportedArchitectureError
from .model import Model, merge, parse_config
from .rules import Layout, check, padded_vocab, split_layers

GIB = float(1 << 30)
BLOCK_TOKENS = 16
DEFAULT_UTILIZATION = 0.92
# The driver keeps part of the memory that nvidia-smi prints; torch sees the rest.
TORCH_SHARE = 0.9955

_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "auto": 2}
_KV_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}

# Structure that config.json does not tell: how many matrices the MLP has, and biases are too small to matter.
_GATED = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Phi3ForCausalLM",
        "GraniteForCausalLM",
        "OlmoForCausalLM",
        "Olmo2ForCausalLM",
        "InternLM2ForCausalLM",
        "GemmaForCausalLM",
        "CohereForCausalLM",
        "BaichuanForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
_UNGATED = frozenset({"GPT2LMHeadModel", "PhiForCausalLM", "Starcoder2ForCausalLM", "OPTForCausalLM"})


@dataclass(frozen=True)
class Rank:
    """The memory of one GPU of one pipeline stage, in GiB."""

    stage: int
    weights: float
    activation: float
    overhead: float
    kv: float
    kv_bytes_per_token: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "weights_gib": round(self.weights, 3),
            "activation_gib": round(self.activation, 3),
            "overhead_gib": round(self.overhead, 3),
            "kv_cache_gib": round(self.kv, 3),
        }


def covers(model: Model) -> None:
    """Raise when the memory of this model is not known to this version."""
    reason = ""
    if model.architecture not in _GATED | _UNGATED:
        reason = "its structure"
    elif model.mla:
        reason = "its latent attention"
    elif model.sliding_window is not None and model.sliding_window < model.max_context:
        reason = "its sliding window"
    elif model.quantization and model.quantization.method not in ("fp8", "awq", "gptq", "awq_marlin", "gptq_marlin"):
        reason = f"its quantization {model.quantization.method!r}"
    if reason:
        name = model.architecture or model.model_type or "unnamed"
        raise UnsupportedArchitectureError(f"the memory of {name} is not known to this version because of {reason}")


def estimate(
    config: Mapping[str, Any],
    gpu: Mapping[str, Any],
    engine: Mapping[str, Any] | None = None,
    hf_quant_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The filter's entry: model config, GPU and flags in, figures out."""
    flags = dict(engine or {})
    overrides = flags.get("hf_overrides")
    model = parse_config(merge(config, overrides) if isinstance(overrides, Mapping) else config, hf_quant_config)
    return estimate_model(model, gpu, flags)


def estimate_model(model: Model, gpu: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a model that is parsed already."""
    covers(model)
    layout = Layout(
        tensor=_positive(flags, "tensor_parallel_size", 1),
        pipeline=_positive(flags, "pipeline_parallel_size", 1),
        data=_positive(flags, "data_parallel_size", 1),
        expert=bool(flags.get("enable_expert_parallel")),
    )
    broken = check(model, layout)
    if broken:
        return _result([], model.max_context, str(broken[0]), [])
    memory_mib = _number(gpu, "memory_total_mib")
    name = str(gpu.get("name", ""))
    torch_gib = memory_mib / 1024 * TORCH_SHARE
    seqs_default, tokens_default = batch_defaults(name, torch_gib)
    seqs = _positive(flags, "max_num_seqs", seqs_default)
    tokens = _positive(flags, "max_num_batched_tokens", tokens_default)
    length = flags.get("max_model_len")
    length = model.default_context if length in (None, "auto", -1) else _positive(flags, "max_model_len", 0)
    utilization = float(_number(flags, "gpu_memory_utilization", DEFAULT_UTILIZATION))
    if not 0 < utilization <= 1:
        raise PlannerError(f"gpu_memory_utilization = {utilization} is not between 0 and 1")
    budget = torch_gib * utilization
    eager = bool(flags.get("enforce_eager"))
    ranks = []
    for stage, layers in enumerate(split_layers(model.layers, layout.pipeline)):
        weights = _weights(model, layout, stage, layers, flags) / GIB
        activation = _activation(model, layout, seqs, tokens, eager)
        overhead = 0.22 if layout.world == 1 else 0.06
        if model.is_moe and not eager:
            overhead += 0.6
        per_token = _kv_bytes(model, layout, layers, flags)
        kv = budget - weights - activation - overhead
        ranks.append(Rank(stage, weights, activation, overhead, kv, per_token))
    return _result(ranks, length, None, _assumptions(model, torch_gib, utilization))


def batch_defaults(name: str, memory_gib: float) -> tuple[int, int]:
    """`max_num_seqs` and `max_num_batched_tokens` that the API server takes on this GPU."""
    if memory_gib >= 160:
        return 1024, 16384
    if memory_gib >= 70 and "a100" not in name.lower():
        return 1024, 8192
    return 256, 2048


def _result(ranks: list[Rank], length: int, error: str | None, assumptions: list[str]) -> dict[str, Any]:
    if error is not None or not ranks:
        return {
            "fits": False,
            "error": error,
            "weights_gib": None,
            "kv_cache_gib": None,
            "kv_cache_tokens": 0,
            "max_concurrency": 0.0,
            "ranks": [],
            "assumptions": assumptions,
            "margin": 0.0,
        }
    tightest = min(ranks, key=lambda rank: (_tokens(rank), -rank.weights))
    tokens = _tokens(tightest)
    needed = math.ceil(length / BLOCK_TOKENS) * BLOCK_TOKENS
    if tightest.kv <= 0:
        error = (
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            "engine."
        )
    elif tokens < needed:
        error = (
            f"To serve at least one request with the model's max seq len ({length}), "
            f"({needed * tightest.kv_bytes_per_token / GIB:.2f} GiB KV cache is needed, which is larger than the "
            f"available KV cache memory ({tightest.kv:.2f} GiB). Based on the available memory, the estimated maximum "
            f"model length is {tokens}."
        )
    return {
        "fits": error is None,
        "error": error,
        "weights_gib": round(tightest.weights, 3),
        "kv_cache_gib": round(max(0.0, tightest.kv), 3),
        "kv_cache_tokens": tokens,
        "max_concurrency": round(tokens / needed, 2),
        "ranks": [rank.as_dict() for rank in ranks],
        "assumptions": assumptions,
        "margin": 0.05,
    }


def _tokens(rank: Rank) -> int:
    if rank.kv <= 0:
        return 0
    return int(rank.kv * GIB // (rank.kv_bytes_per_token * BLOCK_TOKENS)) * BLOCK_TOKENS


def _weights(model: Model, layout: Layout, stage: int, layers: int, flags: Mapping[str, Any]) -> float:
    plain = _dtype_bytes(model, flags)
    tensor = layout.tensor
    attention = model.hidden * model.head_dim * (2 * model.heads / tensor + 2 * max(1.0, model.kv_heads / tensor))
    matrices = 3 if model.architecture in _GATED else 2
    dense = matrices * model.hidden * model.intermediate / tensor
    linear = _linear_bytes(model, plain, flags.get("quantization") == "fp8")
    # Dense layers come first in every family that mixes them, so early stages hold them.
    before = sum(split_layers(model.layers, layout.pipeline)[:stage])
    dense_here = layers if not model.is_moe else max(0, min(layers, model.dense_layers - before))
    total = layers * attention * linear + dense_here * dense * linear
    if model.is_moe:
        shards = layout.data * tensor
        experts = matrices * model.hidden * model.moe_intermediate * model.experts / shards
        if layout.expert:
            experts = matrices * model.hidden * model.moe_intermediate * math.ceil(model.experts / shards)
        shared = matrices * model.hidden * model.shared_intermediate / tensor
        router = model.hidden * model.experts * plain
        total += (layers - dense_here) * ((experts + shared) * linear + router)
    total += layers * 2 * model.hidden * plain
    table = padded_vocab(model) * model.hidden * plain / tensor
    last = stage == layout.pipeline - 1
    if stage == 0:
        total += table
    if last and not (model.tied_embeddings and stage == 0):
        total += table
    return total


def _linear_bytes(model: Model, plain: float, online_fp8: bool) -> float:
    """Bytes of one weight of a linear layer, its scales included."""
    quantization = model.quantization
    if quantization is None:
        # `--quantization fp8` converts the linear layers while they load.
        return 1.0 if online_fp8 else plain
    if quantization.method == "fp8":
        block = quantization.block
        return 1.0 + (4.0 / (block[0] * block[1]) if block else 0.0)
    bits = quantization.bits or 4
    group = quantization.group_size or 128
    return bits / 8 + (2 + bits / 8) / group


def _kv_bytes(model: Model, layout: Layout, layers: int, flags: Mapping[str, Any]) -> float:
    asked = str(flags.get("kv_cache_dtype", "auto"))
    if asked == "auto":
        size: float = 1 if model.quantization and model.quantization.fp8_kv else _dtype_bytes(model, flags)
    elif asked in _KV_BYTES:
        size = _KV_BYTES[asked]
    else:
        raise UnsupportedArchitectureError(f"kv_cache_dtype {asked!r} is not known to this version")
    return 2 * layers * max(1.0, model.kv_heads / layout.tensor) * model.head_dim * size


def _activation(model: Model, layout: Layout, seqs: int, tokens: int, eager: bool) -> float:
    width = model.moe_intermediate * max(1, model.experts_per_token) if model.is_moe else model.intermediate
    peak = tokens * (3 * width / layout.tensor + 3 * model.hidden) * 2 / GIB
    if model.is_moe:
        # The older runner warms the sampler up with float32 logits of every sequence; that is the peak.
        return max(peak, 3.8 * 4 * model.vocab * seqs / GIB) + 0.5
    return peak if eager else peak * 1.25


def _dtype_bytes(model: Model, flags: Mapping[str, Any]) -> int:
    asked = str(flags.get("dtype", "auto"))
    name = model.dtype if asked == "auto" else asked
    if asked == "auto" and name == "float32":
        # vLLM downcasts float32 checkpoints unless float32 is asked for.
        return 2
    if name not in _DTYPE_BYTES:
        raise UnsupportedArchitectureError(f"dtype {name!r} is not known to this version")
    return _DTYPE_BYTES[name]


def _assumptions(model: Model, torch_gib: float, utilization: float) -> list[str]:
    notes = [
        f"torch sees {torch_gib:.1f} GiB of the card, {utilization:.2f} of it is asked for",
        "no other process uses the card",
    ]
    if model.quantization:
        notes.append("every linear layer is quantized, embeddings and head are not")
    return notes


def _number(source: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = source.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise PlannerError(f"{key} = {value!r} is not a positive number")
    return value


def _positive(source: Mapping[str, Any], key: str, default: int) -> int:
    value = source.get(key)
    if value is None:
        return default
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlannerError(f"{key} = {value!r} is not a positive integer")
    return value
