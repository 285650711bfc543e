"""What vLLM will say of GPU memory for fixed flags: puts weights, overhead and KV cache together.

A rank's KV cache is what is left of `visible memory x utilization` after the weights, the peak of the profile run, the
growth of memory that torch does not manage, and the CUDA graph estimate (vllm/v1/worker/gpu_worker.py). The rank with
the fewest blocks decides for all (vllm/v1/core/kv_cache_utils.py). Figures come from the model's structure and the
version's rules, never from a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cards import chip, is_foreign, is_known, visible_gib
from .engine import NEWEST_VERSION, OLDEST_VERSION, Card, Engine, mapping_flag, parse_card, parse_engine
from .errors import PlannerError, UnsupportedArchitectureError
from .kv_cache import KVPlan, KVResult, checkpoint_kv_dtype, kv_plan
from .mixers import draft_mixers, mixers
from .model import Model, merge, parse_config
from .overhead import StageOverhead, batch_defaults, runner, stage_overheads, utilization
from .request import check_plain
from .rules import check
from .serve_args import engine_keys
from .weights import StageWeights, stage_weights

GIB = float(1 << 30)
# What loading takes besides the weights themselves before the profile run can begin: the CUDA context.
_CONTEXT_GIB = 0.5
# Half-width of the doubt about loaded weights, as a share of them.
_WEIGHTS_DOUBT = 0.004
# What two starts of the same engine may differ by, as a share of the KV cache.
_LEAST_MARGIN = 0.01
# The same for the KV cache of a version that is none of those whose rules are described: 0.19 to 0.33.
_OTHER_VERSION_MARGIN = 0.15

_DTYPES = {
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}


def estimate(
    config: Mapping[str, Any],
    gpu: Any,
    engine: Mapping[str, Any] | None = None,
    hf_quant_config: Mapping[str, Any] | None = None,
    draft_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The filter's entry: config.json, GPU and flags in, figures out (GiB = 2^30 bytes).

    `gpu` is a mapping of name and memory_total_mib, or a list of one a pipeline stage. `draft_config` is the
    config.json of the model that `speculative_config` names.
    """
    for key, value in (
        ("model_config", config),
        ("engine", engine),
        ("hf_quant_config", hf_quant_config),
        ("draft_config", draft_config),
    ):
        check_plain(value, key)
    flags = engine_keys(engine or {})
    overrides = mapping_flag(flags, "hf_overrides")
    model = parse_config(merge(config, overrides) if overrides else config, hf_quant_config)
    draft = None if draft_config is None else parse_config(draft_config)
    return estimate_model(model, gpu, flags, draft)


def estimate_model(
    model: Model, gpu: Any, flags: Mapping[str, Any] | Engine, draft: Model | None = None
) -> dict[str, Any]:
    """The same for a model that is parsed already."""
    engine = flags if isinstance(flags, Engine) else parse_engine(flags)
    layout = engine.layout
    listed = list(gpu) if isinstance(gpu, Sequence) and not isinstance(gpu, str | bytes) else [gpu]
    if len(listed) not in (1, layout.pipeline):
        raise PlannerError(f"{len(listed)} GPUs are given for {layout.pipeline} pipeline stages.", key="gpu")
    cards = [parse_card(item) for item in listed]
    if len(cards) == 1:
        cards *= layout.pipeline
    broken = check(model, layout)
    if broken:
        return _refused(str(broken[0]))
    length = engine.max_model_len or (model.max_context if engine.auto_length else model.default_context)
    if length > model.max_context and not engine.auto_length:
        return _refused(
            f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
            f"({model.max_context_key}={model.max_context} or model_max_length={model.max_context_alternative} in "
            "model's config.json)."
        )
    seqs, tokens = batch_defaults(engine, cards[0], model)
    unscheduled = _unscheduled(engine, seqs, tokens, length)
    if unscheduled:
        return _refused(unscheduled)
    # Each stage on its own kind of GPU, which decides its kernels.
    plan = _cache_plan(model, engine, cards[0], length, draft)
    kinds = {card: _of_kind(model, engine, card, draft, plan.block_size) for card in dict.fromkeys(cards)}
    weights = [kinds[card][0][stage] for stage, card in enumerate(cards)]
    overheads = [kinds[card][1][stage] for stage, card in enumerate(cards)]
    share = utilization(engine)
    # Buffers that attention makes while it loads are part of what vLLM prints as the weights.
    loaded = [weight.bytes / GIB + part.loaded_gib for weight, part in zip(weights, overheads, strict=True)]
    free = [
        visible_gib(card) * share - gib - part.activation_gib - part.non_torch_gib - part.graph_gib
        for card, gib, part in zip(cards, loaded, overheads, strict=True)
    ]
    if engine.kv_cache_memory_bytes is not None:
        free = [engine.kv_cache_memory_bytes / GIB] * layout.pipeline
    sized = plan.size(
        [gib * GIB for gib in free],
        length,
        auto_length=engine.auto_length,
        max_num_seqs=seqs,
        blocks_override=_blocks_override(engine),
    )
    error = sized.error
    for stage, (card, gib) in enumerate(zip(cards, loaded, strict=True)):
        taken = f"The weights of one rank take {gib:.2f} GiB"
        total = gib + _CONTEXT_GIB
        # Nothing but the card itself limits what these flags ask for.
        asked = _asked_cache(engine, sized.num_blocks * plan.block_bytes[stage] / GIB)
        if asked is not None and total <= visible_gib(card):
            total += asked + overheads[stage].activation_gib
            taken += f", its KV cache {asked:.2f} GiB"
        if total > visible_gib(card):
            error = (
                f"torch.OutOfMemoryError: CUDA out of memory. {taken}, the GPU has a total capacity of "
                f"{visible_gib(card):.2f} GiB."
            )
            break
    return _result(engine, plan, sized, error, cards=cards, loaded=loaded, overheads=overheads, free=free, draft=draft)


def _unscheduled(engine: Engine, seqs: int, tokens: int, length: int) -> str:
    """Why the scheduler would refuse these sizes (vllm/config/scheduler.py; vllm/config/vllm.py for drafts)."""
    if tokens < seqs:
        return f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})."
    if engine.enable_chunked_prefill is False and tokens < length:
        return (
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}). This effectively limits the "
            "maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please increase "
            "max_num_batched_tokens or decrease max_model_len."
        )
    if engine.at_least(0, 32) and tokens <= engine.speculative_tokens:
        return (
            "VllmConfig does not have enough slots to schedule a token and support the speculative decoding settings. "
            f"Got max_num_batched_tokens={tokens} and num_lookahead_tokens={engine.speculative_tokens}."
        )
    return ""


def _of_kind(
    model: Model, engine: Engine, card: Card, draft: Model | None, block: int
) -> tuple[list[StageWeights], list[StageOverhead]]:
    """What every stage would hold if all were on this kind of GPU."""
    weights = stage_weights(model, engine, draft, card)
    return weights, stage_overheads(model, engine, card, weights, block)


def _cache_plan(model: Model, engine: Engine, card: Card, length: int, draft: Model | None) -> KVPlan:
    method = ""
    if engine.speculative:
        method = str(engine.speculative.get("method") or ("draft_model" if draft else ""))
    # Batch sizes are those of the GPU that the API server sees, which is the first stage's.
    _, tokens = batch_defaults(engine, card, model)
    return kv_plan(
        mixers(model.config),
        engine,
        dtype=_dtype(model, engine),
        max_num_batched_tokens=tokens,
        max_model_len=length,
        checkpoint_kv_dtype=checkpoint_kv_dtype(model.config, model.quantization_beside),
        capability=chip(card).capability,
        draft=draft_mixers(model.config, method, draft.config if draft else None) if method else (),
        partition=engine.layout.layer_partition,
        new_runner=runner(model, engine) == "v2",
    )


def _dtype(model: Model, engine: Engine) -> str:
    """The type of the activations; float32 checkpoints are served in 16 bits unless float32 is asked for."""
    asked = model.dtype if engine.dtype == "auto" else engine.dtype
    if asked not in _DTYPES:
        raise UnsupportedArchitectureError(f"dtype {asked[:60]!r} is not known.", "Use float16, bfloat16 or float32.")
    if engine.dtype == "auto" and _DTYPES[asked] == "float32":
        return "bfloat16"
    return _DTYPES[asked]


def _asked_cache(engine: Engine, blocks_gib: float) -> float | None:
    """GiB of KV cache that flags ask for, whatever is free; None where vLLM takes what is left."""
    if _blocks_override(engine) is not None:
        return blocks_gib
    if engine.kv_cache_memory_bytes is not None:
        return engine.kv_cache_memory_bytes / GIB
    return None


def _blocks_override(engine: Engine) -> int | None:
    value = engine.flags.get("num_gpu_blocks_override")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
        raise PlannerError(
            f"num_gpu_blocks_override = {str(value)[:60]} is not a positive integer.", key="num_gpu_blocks_override"
        )
    return value


def _result(
    engine: Engine,
    plan: KVPlan,
    sized: KVResult,
    error: str | None,
    *,
    cards: Sequence[Card],
    loaded: Sequence[float],
    overheads: Sequence[StageOverhead],
    free: Sequence[float],
    draft: Model | None,
) -> dict[str, Any]:
    stages = range(len(cards))
    # Stages without a cache of their own (all their layers are without) can't be the tightest by blocks.
    tightest = min(
        stages, key=lambda stage: (free[stage] / plan.block_bytes[stage] if plan.block_bytes[stage] else 1e30, stage)
    )
    caches = any(plan.block_bytes)
    if not caches:
        # An encoder keeps nothing between its steps; what it needs is room for one of them.
        tightest = min(stages, key=lambda stage: free[stage])
        if error is None and free[tightest] < 0:
            error = (
                f"torch.OutOfMemoryError: CUDA out of memory. Weights and activations of one rank take "
                f"{-free[tightest]:.2f} GiB more than the GPU may give."
            )
    doubt = overheads[tightest].spread_gib + _WEIGHTS_DOUBT * loaded[tightest]
    notes = [note for part in overheads for note in part.notes]
    unpriced = _unpriced_drafter(engine) if draft is None else ""
    if unpriced:
        notes.append(f"the drafter {unpriced} is not priced: its config.json was not given")
    margin = max(_LEAST_MARGIN, doubt / free[tightest]) if free[tightest] > 0 else 1.0
    if engine.version < OLDEST_VERSION:
        notes.append(f"the rules of vLLM {'.'.join(map(str, OLDEST_VERSION))} are applied to this older version")
        margin = max(margin, _OTHER_VERSION_MARGIN)
    if engine.version[:2] > NEWEST_VERSION:
        notes.append(f"the rules of vLLM {'.'.join(map(str, NEWEST_VERSION))} are applied to this newer version")
        margin = max(margin, _OTHER_VERSION_MARGIN)
    return {
        "fits": error is None,
        "error": error,
        "weights_gib": round(loaded[tightest], 3),
        "kv_cache_gib": round(max(0.0, free[tightest]), 3) if caches else 0.0,
        "kv_cache_tokens": sized.tokens,
        "max_concurrency": round(sized.concurrency, 2),
        "ranks": [
            {
                "stage": stage,
                "weights_gib": round(loaded[stage], 3),
                "activation_gib": round(overheads[stage].activation_gib, 3),
                "overhead_gib": round(overheads[stage].non_torch_gib + overheads[stage].graph_gib, 3),
                "kv_cache_gib": round(free[stage], 3) if caches else 0.0,
            }
            for stage in stages
        ],
        "assumptions": list(dict.fromkeys([*_assumptions(engine, cards), *notes])),
        "margin": round(min(1.0, margin), 4),
    }


def _assumptions(engine: Engine, cards: Sequence[Card]) -> list[str]:
    share = utilization(engine)
    notes = [
        f"torch sees {visible_gib(card):.2f} GiB of {card.name or 'the card'}, {share:.2f} of it is asked for"
        for card in dict.fromkeys(cards)
    ]
    notes += [
        f"{card.name or 'a GPU without a name'} is not known: it is taken for an H100 (compute capability 9.0)"
        for card in dict.fromkeys(cards)
        if not is_known(card)
    ]
    notes += [
        f"{card.name} is no NVIDIA GPU: a build of vLLM for it has buffers of its own, the weights are the same"
        for card in dict.fromkeys(cards)
        if is_foreign(card.name)
    ]
    version = ".".join(map(str, engine.version))
    if OLDEST_VERSION <= engine.version < (*NEWEST_VERSION, 1 << 20):
        notes.append(f"the rules are those of vLLM {version}")
    return [*notes, "no other process uses the card"]


def _unpriced_drafter(engine: Engine) -> str:
    """The model that the drafter is read from, unless its layers are part of the model itself."""
    method = str(engine.speculative.get("method") or "draft_model")
    name = engine.speculative.get("model")
    own = "mtp" in method or method in ("ngram", "ngram_gpu", "suffix")
    return str(name)[:100] if name and not own else ""


def _refused(error: str) -> dict[str, Any]:
    return {
        "fits": False,
        "error": error,
        "weights_gib": None,
        "kv_cache_gib": None,
        "kv_cache_tokens": 0,
        "max_concurrency": 0.0,
        "ranks": [],
        "assumptions": [],
        "margin": 0.0,
    }
