"""Chooses how a model is spread over nodes, with which flags, and says why.

Tensor parallelism stays inside a node, pipeline stages go across nodes. Dense models are replicated as independent
engines; mixture-of-experts models run data-parallel attention with whole experts spread over the GPUs of an engine.
The answer depends on the set of nodes, never on their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .cards import check_usable, is_known
from .engine import Card, mapping_flag
from .errors import ModelConfigError, PlannerError, UnsupportedArchitectureError, short
from .model import Model, merge, parse_config
from .placement import Node, Placed, by_node, declared, names, natural_key, pack, parse_nodes
from .pricing import LOW_TOKENS, WORTH, Knobs, shape
from .refusal import holding, no_layout, refusal, shortening
from .request import Request, check_plain, parse_request
from .rules import Layout, holds, remarks, require, require_engine, split_layers
from .search import FLOOR, RESERVE, Fleet, Search

__all__ = ["natural_key", "plan", "plan_model"]


def plan(config: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], **request: Any) -> dict[str, Any]:
    """The filter's entry: model config and nodes in, flags and placement out."""
    try:
        check_plain(config, "model")
        for key, value in request.items():
            check_plain(value, key)
        asked = parse_request(request)
        overrides = mapping_flag(asked.flags, "hf_overrides")
        hf_quant_config = request.get("hf_quant_config")
        if not isinstance(config, Mapping):
            raise PlannerError(f"model = {short(config)} is not the dictionary of a config.json.", key="model")
        model = parse_config(
            merge(config, overrides) if overrides else config,
            hf_quant_config if isinstance(hf_quant_config, Mapping) else None,
        )
        return plan_model(model, parse_nodes(nodes), asked)
    except RecursionError as error:
        raise PlannerError("config.json or the request is nested too deeply.", key="model") from error
    except ModelConfigError as error:
        raise ModelConfigError(error.problem, error.remedy, _guilty(config, nodes, request)) from error
    except PlannerError as error:
        raise type(error)(error.problem, error.remedy, _request_key(error, request)) from error


_NOT_ANOTHER = "what is left does not hold another engine"
# Flags of a layout and of the plan, and the keys of a request that decide them.
_DECIDED_BY = {
    "tensor_parallel_size": "parallelism.tensor",
    "pipeline_parallel_size": "parallelism.pipeline",
    "data_parallel_size": "parallelism.data",
    "enable_expert_parallel": "parallelism.expert",
    "pp_layer_partition": "environment.VLLM_PP_LAYER_PARTITION",
    "max_model_len": "context_length",
}


def _request_key(error: PlannerError, request: Mapping[str, Any]) -> str:
    """The key of the request that holds what an error names: flags stand in `args`."""
    if error.key.startswith("speculative_config"):
        return error.key.replace("speculative_config", "speculative", 1)
    args = request.get("args")
    for name in args if isinstance(args, Mapping) else ():
        if _flag(name) == error.key:
            return f"args.{name}"
    return _DECIDED_BY.get(error.key, error.key)


def _flag(name: Any) -> str:
    return str(name).strip().lstrip("-").replace("-", "_")


def _guilty(config: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> str:
    """Where the value of a config.json comes from: the model's file, unless it is right without the other sources."""
    others: dict[str, dict[str, Any]] = {}
    if request.get("draft_config"):
        others["draft_config"] = {**request, "draft_config": None, "speculative": None}
    args: Any = request.get("args")
    for name in args if isinstance(args, Mapping) else ():
        if _flag(name) == "hf_overrides":
            others[f"args.{name}"] = {**request, "args": {key: args[key] for key in args if key != name}}
    for key, without in others.items():
        try:
            plan(config, nodes, **without)
        except ModelConfigError:
            continue
        except PlannerError:
            pass
        return key
    return "model.config"


def plan_model(model: Model, nodes: list[Node], request: Request) -> dict[str, Any]:
    """The same for parsed input."""
    _check_context(model, request)
    usable = [node for node in nodes if node.gpus]
    empty = [node.name for node in nodes if not node.gpus]
    if not usable:
        raise PlannerError(f"No GPUs on {names(empty)}.", "Declare them in gpus.", "nodes")
    unknown = [] if request.cpu else _check_gpus(usable, request.variant)
    search = Search(model, usable, request)
    if unknown:
        search.warnings.append(
            f"{names(unknown)}: not a GPU that is known; its kernels and buffers are taken for those of an H100, so "
            "the memory may come out wrong (the names are those that nvidia-smi prints)"
        )
    if empty:
        search.warnings.append(f"no GPUs on {names(empty)}: left out")
    _check_pins(search)
    try:
        found = search.unpriced() if request.cpu else search.choose()
        if found is None:
            raise no_layout(search) if request.cpu else refusal(search)
    except UnsupportedArchitectureError as error:
        search.warnings.append(f"{error}: placement follows the rules alone, the fit is not checked")
        found = search.unpriced()
        if found is None:
            raise no_layout(search) from error
    return _answer(search, *found)


def _check_gpus(nodes: Sequence[Node], variant: str) -> list[str]:
    """Names of GPUs that are not known; raises for one on which vLLM does not run."""
    first: dict[str, str] = {}
    for node in nodes:
        for gpu in node.gpus:
            first.setdefault(gpu.name, node.name)
    for name, node_name in first.items():
        check_usable(name, node_name, variant)
    return sorted(name or "(no name)" for name in first if not is_known(Card(name, 0.0)))


def _check_context(model: Model, request: Request) -> None:
    asked = request.context_length
    if asked is None or asked <= model.max_context:
        return
    if model.max_context_alternative is not None and asked <= model.max_context_alternative:
        return
    raise PlannerError(
        f"context_length = {asked} is longer than the model's {model.max_context} tokens. vLLM would say: "
        f"User-specified max_model_len ({asked}) is greater than the derived max_model_len ({model.max_context_key}="
        f"{model.max_context}).",
        f"Set context_length to {model.max_context} or less, or to auto.",
        "context_length",
    )


def _check_pins(search: Search) -> None:
    """Pinned values that can't work anywhere, each with its own message."""
    model, request, nodes = search.model, search.request, search.nodes
    require_engine(model, search.engine, request.environment, cpu=request.cpu)
    key = "parallelism.tensor" if request.tensor else "parallelism.pipeline" if request.pipeline else "parallelism"
    data = (request.data or 1) if model.is_moe else 1
    if request.tensor or request.pipeline or request.expert or request.layer_partition or data > 1:
        # Whole experts are the planner's choice unless they are pinned, so their absence is no mistake yet.
        expert = bool(request.expert) or (request.expert is None and model.is_moe)
        layout = search.layout(request.tensor or 1, request.pipeline or 1, data, expert)
        # What depends on sizes that are still open is the search's to find.
        if not request.tensor:
            layout = replace(layout, decode_context=1)
        if model.is_moe and expert and not (request.tensor and request.data):
            layout = replace(layout, eplb=False, redundant_experts=0)
        require(model, layout, key)
    total = sum(len(node.gpus) for node in nodes)
    asked = (request.tensor or 1) * (request.pipeline or 1) * (request.data or 1)
    if asked > total:
        sizes = [("tensor", request.tensor or 1), ("pipeline", request.pipeline or 1), ("data", request.data)]
        raise PlannerError(
            f"parallelism asks for {asked} GPUs ({' x '.join(f'{name} {value}' for name, value in sizes if value)}), "
            f"the nodes declare {total} ({declared(nodes)}).",
            "Lower parallelism, or add nodes or GPUs.",
            "parallelism",
        )
    partition = request.layer_partition
    if partition is not None and request.pipeline is not None and len(partition) != request.pipeline:
        raise PlannerError(
            f"len(partitions)={len(partition)} does not match pp_size={request.pipeline}.",
            "VLLM_PP_LAYER_PARTITION needs one number a pipeline stage.",
            "parallelism.pipeline",
        )
    largest = max(len(node.gpus) for node in nodes)
    if request.tensor and request.tensor > largest and not search.fast:
        raise PlannerError(
            f"parallelism.tensor = {request.tensor} is more than the {largest} GPUs of a node, and the fabric between "
            "the nodes is not InfiniBand or RoCE.",
            f"Set parallelism.tensor to {largest} or less, and parallelism.pipeline to the number of nodes.",
            "parallelism.tensor",
        )
    ranks = (request.tensor or 1) * (request.pipeline or 1) * (request.data or 1)
    if request.data and search.model.is_moe and ranks > largest and not search.fast:
        raise PlannerError(
            f"parallelism.data = {request.data} needs {ranks} GPUs, more than the {largest} of a node: ranks with "
            "experts exchange tokens in every layer, and the fabric between the nodes is not InfiniBand or RoCE.",
            "Lower parallelism.data, or set fabric_type of the nodes if they have such a fabric.",
            "parallelism.data",
        )


def _answer(search: Search, fleet: Fleet, engines: int) -> dict[str, Any]:
    request, layout = search.request, fleet.layout
    placed = _placed(search, fleet, engines)
    final = _final(search, fleet, placed)
    knobs, figures = (None, None) if final is None else (final.knobs, final.figures)
    executor = _executor(search, layout, placed)
    _explain(search, fleet, placed, final)
    _warn(search, fleet, placed, final)
    return {
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "data_parallel_size": layout.data,
        "enable_expert_parallel": layout.expert,
        "max_model_len": search.length,
        "max_num_seqs": knobs.seqs if knobs else request.flags.get("max_num_seqs", request.concurrency),
        "max_num_batched_tokens": knobs.tokens if knobs else request.flags.get("max_num_batched_tokens"),
        "gpu_memory_utilization": None
        if request.cpu
        else knobs.utilization
        if knobs
        else search.utilization(search.by_card, search.room),
        "kv_cache_dtype": request.flags.get("kv_cache_dtype", "auto"),
        "distributed_executor_backend": executor,
        "pp_layer_partition": list(layout.layer_partition) if layout.layer_partition is not None else None,
        "speculative_config": request.speculative,
        "args": request.args,
        "replicas": [{"nodes": list(taken), "gpus": taken} for taken in (by_node(each) for each in placed)],
        "estimate": dict(figures) if figures is not None else None,
        # Of full length, in all engines together; the estimate is that of the one with the least room.
        "sequences": None if final is None else round(final.sequences, 2),
        "reasons": search.reasons,
        "warnings": search.warnings,
    }


def _placed(search: Search, fleet: Fleet, engines: int) -> list[Placed]:
    """Where the engines run: those on the largest GPUs first, then in the order of the nodes."""
    if fleet.mixed is not None:
        return [fleet.mixed]
    unit, units, equal = search.units(fleet.layout)
    placed: list[Placed] = []
    for card, _ in fleet.in_order():
        if len(placed) < engines:
            placed += pack(search.by_card[card], unit, units, equal=equal)[: engines - len(placed)]
    return sorted(placed, key=lambda each: (each[0].pool.order, each[0].gpus[0].index))


@dataclass(frozen=True)
class _Final:
    """The flags that all engines share, the figures of the engine with the least room, and what all hold together."""

    knobs: Knobs
    figures: Mapping[str, Any]
    # The GPUs of that engine.
    cards: tuple[Card, ...]
    sequences: float


def _final(search: Search, fleet: Fleet, placed: list[Placed]) -> _Final | None:
    if fleet.trials is None:
        return None
    used = {share.pool.card for each in placed for share in each}
    trials = [trial for card, trial in fleet.trials.items() if card in used or fleet.mixed is not None]
    knobs = Knobs(
        search.length,
        min(trial.knobs.seqs for trial in trials),
        min(trial.knobs.tokens for trial in trials),
        min(trial.knobs.utilization for trial in trials),
    )
    # How many engines run on GPUs of each kind; the smallest GPU of a kind stands for it.
    kinds: list[tuple[tuple[Card, ...], int]]
    if fleet.mixed is not None:
        kinds = [(_smallest_a_stage(fleet.mixed, fleet.layout.tensor), 1)]
    else:
        smallest: dict[Card, tuple[float, str]] = {}
        numbers: dict[Card, int] = {}
        for each in placed:
            for share in each:
                least = min((gpu.memory_total_mib, gpu.name) for gpu in share.gpus)
                smallest[share.pool.card] = min(smallest.get(share.pool.card, least), least)
            card = each[0].pool.card
            numbers[card] = numbers.get(card, 0) + 1
        kinds = [
            ((Card(name, memory_mib),), numbers[card])
            for card, (memory_mib, name) in sorted(smallest.items(), key=lambda item: item[1])
        ]
    priced = [(search.price(fleet.layout, cards, knobs), cards, number) for cards, number in kinds]
    figures, cards, _ = min(priced, key=lambda item: item[0]["max_concurrency"])
    held = sum(each["max_concurrency"] * number for each, _, number in priced) * fleet.layout.data
    return _Final(knobs, figures, cards, held)


def _smallest_a_stage(placed: Placed, tensor: int) -> tuple[Card, ...]:
    """The smallest GPU of each pipeline stage, as it is declared."""
    stages = []
    for share in placed:
        for start in range(0, len(share.gpus), tensor):
            least = min(share.gpus[start : start + tensor], key=lambda gpu: (gpu.memory_total_mib, gpu.name))
            stages.append(Card(least.name, least.memory_total_mib))
    return tuple(stages)


def _executor(search: Search, layout: Layout, placed: list[Placed]) -> str:
    request, reasons = search.request, search.reasons
    nodes = max(len(by_node(each)) for each in placed)
    if request.executor != "auto":
        reasons.append(f"executor: {request.executor} as asked")
        return request.executor
    if nodes == 1:
        reasons.append("executor: mp, because all ranks of an engine are on one node")
        return "mp"
    if layout.data > 1:
        reasons.append(
            f"executor: mp, because the data-parallel ranks of an engine are spread over {nodes} nodes and meet "
            "without Ray"
        )
        return "mp"
    equal = all(len({len(gpus) for gpus in by_node(each).values()}) == 1 for each in placed)
    if layout.layer_partition is not None and nodes > 2 and equal:
        reasons.append(
            "executor: mp, because the stages differ and Ray does not keep the order of the nodes after the first"
        )
        return "mp"
    if layout.layer_partition is not None and nodes > 2:
        search.warnings.append(
            "the stages differ, and Ray orders the nodes after the first by its own ids: check the order of the "
            "stages in vLLM's log, or use nodes with as many GPUs each and executor mp"
        )
    reasons.append(f"executor: ray, because the ranks of an engine are spread over {nodes} nodes")
    return "ray"


def _explain(search: Search, fleet: Fleet, placed: list[Placed], final: _Final | None) -> None:
    """Each choice in plain words, most important first."""
    request, model, layout = search.request, search.model, fleet.layout
    engines = len(placed)
    reasons: list[str] = []
    if request.cpu:
        reasons.append("declared slots on CPU: memory is not estimated")
    if final is not None:
        asked = f", {request.concurrency} asked" if request.concurrency else ""
        reasons.append(
            f"{request.objective}: {_several(engines)} of {shape(layout)}, with room for {final.sequences:.1f} "
            f"sequences of {final.knobs.length} tokens in all{asked}"
        )
    else:
        reasons.append(
            f"{request.objective}: {_several(engines)} of {shape(layout)}, by the engine's rules and not by memory"
        )
    reasons += _smaller(search, layout)
    if engines > 1 and request.data is None:
        reasons.append(
            f"{engines} engines: as many as the GPUs hold"
            if request.objective != "latency"
            else f"{engines} engines: one alone would not hold {request.concurrency} sequences"
        )
    elif search.fixed == 1 and request.data is None and request.objective == "throughput":
        reasons.append("one engine, because tensor and pipeline are pinned and parallelism.data is not")
    reasons += _sizes(search, fleet, placed)
    if final is not None:
        reasons += _next_best(search, layout, engines * layout.data, final.sequences)
    if search.shortened:
        reasons.append(f"{search.shortened}, {RESERVE:.0%} kept back for what the estimate may miss")
    if final is not None:
        reasons += _flags(search, fleet, final, engines)
    if model.tied_embeddings and layout.pipeline > 1 and not request.cpu:
        reasons.append("the tied embedding is held by the first and the last stage")
    reasons += remarks(model, layout)
    search.reasons[:0] = reasons


def _several(engines: int) -> str:
    return f"{engines} engines" if engines > 1 else "one engine"


def _next_best(search: Search, layout: Layout, schedulers: int, held: float) -> list[str]:
    """The layout that would have come next, and why it did not come first."""
    found = search.runner_up(layout)
    if found is None:
        return []
    fleet, engines = found
    room = fleet.sequences(engines)
    if search.request.objective == "latency":
        why = "fewer GPUs work on each token"
    elif search.need is not None and min(room, fleet.slots(engines)) < search.need:
        why = f"fewer than the {search.need} asked"
    elif search.request.objective == "throughput" and engines * fleet.layout.data < schedulers:
        fewer = engines * fleet.layout.data
        why = f"{fewer} scheduler{'s' if fewer > 1 else ''} instead of {schedulers}"
    else:
        why = "less room" if room < held else "no more of what was asked for"
    return [f"next best: {_several(engines)} of {shape(fleet.layout)}, with room for {room:.1f} sequences ({why})"]


def _smaller(search: Search, layout: Layout) -> list[str]:
    """Why not a smaller engine: the largest one that did not fit, or held too little."""
    world = layout.world * layout.data

    def part(other: Layout) -> bool:
        """Whether an engine is a half, a third, ... of this one; others are seldom meant."""
        size = other.world * other.data
        return size < world and world % size == 0

    failed = [trial for trial in search.failed if part(trial.layout)]
    for narrow, engines, held in [each for each in search.narrow if part(each[0])][-1:]:
        several = _several(engines)
        wanted = search.request.concurrency or f"{FLOOR} for each"
        return [f"{several} of {shape(narrow)} would hold {held:.1f} sequences, fewer than {wanted}"]
    if not failed:
        return []
    largest = max(failed, key=lambda trial: (trial.layout.world * trial.layout.data, trial.tokens))
    weights = largest.figures["weights_gib"]
    detail = "" if weights is None else f" (weights of {weights:.1f} GiB a GPU)"
    return [f"{shape(largest.layout)} does not fit {largest.cards[0].name or 'these GPUs'}{detail}"]


def _sizes(search: Search, fleet: Fleet, placed: list[Placed]) -> list[str]:
    request, model, layout = search.request, search.model, fleet.layout
    nodes = max(len(by_node(each)) for each in placed)
    reasons = []
    if request.tensor:
        reasons.append(f"tensor {layout.tensor} as pinned")
    elif request.objective == "latency" or layout.pipeline > 1:
        reasons.append(
            f"tensor {layout.tensor}: inside a node, a size that divides {model.heads} attention heads, "
            f"{model.kv_heads} KV heads and every layer"
        )
    if request.pipeline:
        reasons.append(f"pipeline {layout.pipeline} as pinned")
    elif layout.pipeline > 1 and nodes > 1:
        reasons.append(f"pipeline {layout.pipeline}: stages over {nodes} nodes, which exchange little")
    elif layout.pipeline > 1:
        reasons.append(f"pipeline {layout.pipeline}: no larger tensor size divides this model over the GPUs of a node")
    if model.is_moe and layout.data > 1:
        reasons.append(
            f"data {layout.data}: every rank has attention and a KV cache of its own, the {model.experts} experts are "
            f"spread whole over {layout.tensor * layout.data} GPUs"
        )
    elif layout.expert:
        reasons.append(f"experts stay whole, {model.experts} of them over {layout.tensor} GPUs")
    if request.data and not model.is_moe:
        reasons.append(f"{request.data} engines as pinned (parallelism.data)")
    split = split_layers(model.layers, layout.pipeline, layout.layer_partition)
    if len(set(split)) > 1:
        why = " by the memory of each stage" if fleet.mixed is not None and not request.layer_partition else ""
        reasons.append(f"layers of the stages{why}: {names(list(map(str, split)), 64)}")
    return reasons


def _flags(search: Search, fleet: Fleet, final: _Final, engines: int) -> list[str]:
    request, knobs = search.request, final.knobs
    schedulers = engines * fleet.layout.data
    reasons = []
    if request.max_num_seqs is not None:
        reasons.append(f"max_num_seqs {knobs.seqs} as given in args")
    elif request.concurrency and knobs.seqs < request.concurrency:
        reasons.append(
            f"max_num_seqs {knobs.seqs}: {request.concurrency} sequences over {schedulers} schedulers, and a quarter "
            "more because balancing is uneven"
            if knobs.seqs * schedulers >= request.concurrency
            else f"max_num_seqs {knobs.seqs}: more at a time would leave too little memory"
        )
    elif request.concurrency:
        reasons.append(f"max_num_seqs {knobs.seqs}: the concurrency asked for")
    used = list(fleet.numbers)
    default, _ = search.defaults(fleet.layout, used, None)
    if request.max_num_seqs is None and not request.concurrency and knobs.seqs < default:
        reasons.append(f"max_num_seqs {knobs.seqs}: vLLM's {default} would leave too little memory")
    if request.flags.get("max_num_batched_tokens") is None:
        _, tokens = search.defaults(fleet.layout, used, knobs.seqs)
        reasons += _step(search, fleet.layout, final, max(tokens, knobs.seqs))
    if request.flags.get("gpu_memory_utilization") is None and knobs.utilization < 0.9:
        reasons.append(
            f"gpu_memory_utilization {knobs.utilization}: the CUDA context and NCCL need room outside of it on small "
            "cards"
        )
    return reasons


def _step(search: Search, layout: Layout, final: _Final, default: int) -> list[str]:
    """Why so many tokens a step, where fewer or more would change the room by much."""
    knobs, held = final.knobs, float(final.figures["max_concurrency"])
    what = "a data-parallel rank" if layout.data > 1 else "an engine"
    if knobs.tokens < default:
        other = search.price(layout, final.cards, replace(knobs, tokens=default))
        return [
            f"max_num_batched_tokens {knobs.tokens}: with vLLM's {default} {what} would hold "
            f"{other['max_concurrency']:.1f} sequences instead of {held:.1f}"
            if other["fits"]
            else f"max_num_batched_tokens {knobs.tokens}: vLLM's {default} would leave too little memory"
        ]
    fewer = max(LOW_TOKENS, knobs.seqs)
    if not search.may_cut_tokens or fewer >= knobs.tokens:
        return []
    other = search.price(layout, final.cards, replace(knobs, tokens=fewer))
    if not other["fits"] or other["max_concurrency"] < held * (1 + WORTH):
        return []
    why = "what is asked has room" if search.need is not None else "latency wants long steps"
    return [
        f"max_num_batched_tokens {knobs.tokens}, vLLM's default: {fewer} would make room for "
        f"{other['max_concurrency']:.1f} sequences in {what} instead of {held:.1f}, but {why}"
    ]


def _warn(search: Search, fleet: Fleet, placed: list[Placed], final: _Final | None) -> None:
    request, layout, warnings = search.request, fleet.layout, search.warnings
    figures = None if final is None else final.figures
    if final is not None and request.concurrency:
        slots = final.knobs.seqs * layout.data * len(placed)
        if min(final.sequences, slots) < request.concurrency:
            only = (
                f"at {search.length} tokens each only {final.sequences:.1f} sequences fit"
                if final.sequences < slots
                else f"only {slots} run at a time (max_num_seqs {final.knobs.seqs})"
            )
            changes = holding(search, fleet, len(placed))
            warnings.append(
                f"concurrency = {request.concurrency}, but {only}; the others wait or are preempted."
                + (f" Would fit: {'; or '.join(changes)}." if changes else "")
            )
        else:
            warnings += _doubts(request.concurrency, final, len(placed), layout.data)
    if figures is not None and figures["max_concurrency"] < 1 + RESERVE and not search.shortened:
        warnings.append(
            f"one sequence of {search.length} tokens fits with less than {RESERVE:.0%} to spare, which is within the "
            "error of the estimate"
        )
    if search.shortened and (text := shortening(search)):
        warnings.append(text)
    groups = [by_node(each) for each in placed]
    if any(len(gpus) < layout.tensor for taken in groups for gpus in taken.values()):
        warnings.append(
            f"tensor {layout.tensor} spans nodes: every layer waits for the network; pipeline stages cost less"
        )
    slow = sorted(
        {share.pool.node.name for each in placed for share in each if share.pool.node.intra_node == "pcie"},
        key=natural_key,
    )
    if slow and layout.tensor * layout.data > 2:
        warnings.append(
            f"{shape(layout)} over PCIe on {names(slow)}: every layer waits for the exchange; NVLink would not"
        )
    kinds = sorted({gpu.name for each in placed for share in each for gpu in share.gpus})
    if len(kinds) > 1:
        what = "the smallest of each stage decides" if fleet.mixed is not None else "the smallest decides for all"
        warnings.append(f"mixed GPUs ({', '.join(kinds)}): {what}")
    warnings += _idle(search, fleet, groups)


def _all_nodes(search: Search, fleet: Fleet) -> str:
    """What would put every node of this kind to work; empty where nothing would."""
    layout = fleet.layout
    if layout.data == 1 or fleet.trials is None or len(fleet.numbers) != 1 or search.request.objective != "throughput":
        return ""
    card, trial = next(iter(fleet.trials.items()))
    unit = search.unit(layout)[0]
    wide = replace(layout, data=len(search.by_card[card]) * (search.room // unit))
    if not holds(search.model, wide) or wide.tensor * wide.data > search.model.experts:
        return ""
    if not search.engines(wide, card) or not search.price(wide, trial.cards, trial.knobs)["fits"]:
        return ""
    return f"; one over all nodes would use them: parallelism: {{tensor: {wide.tensor}, data: {wide.data}}}"


def _doubts(asked: int, final: _Final, engines: int, data: int) -> list[str]:
    """What is asked has room by the figures, but not on every engine, or not within their margin."""
    margin, each = final.figures["margin"], final.figures["max_concurrency"] * data
    if each * engines < asked:
        return [
            f"concurrency = {asked}: an even share of the {engines} engines is {asked / engines:.1f} sequences, but "
            f"one on {final.cards[0].name or 'the smallest GPUs'} holds {each:.1f}; what is more waits there or is "
            f"preempted. Would fit: concurrency: {max(1, math.floor(each * engines * (1 - margin)))}; or an instance "
            "of its own for each kind of GPU."
        ]
    least = each * engines * (1 - margin)
    if least < asked:
        return [
            f"concurrency = {asked} has room by the estimate ({each * engines:.1f} sequences), but not at the lower "
            f"end of its margin of {margin:.1%} ({least:.1f}); some may wait"
        ]
    return []


def _idle(search: Search, fleet: Fleet, groups: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """GPUs without work, by the reason for it."""
    used: dict[str, set[int]] = {}
    for taken in groups:
        for name, indices in taken.items():
            used.setdefault(name, set()).update(indices)
    world = fleet.layout.world * fleet.layout.data
    unit = search.unit(fleet.layout)[0]
    pin = _all_nodes(search, fleet)
    idle: dict[str, list[str]] = {}
    for pool in search.pools:
        busy = used.get(pool.node.name, set())
        free = sum(gpu.index not in busy for gpu in pool.gpus)
        if not free:
            continue
        if fleet.trials is not None and fleet.mixed is None and pool.card not in fleet.trials:
            small = len(pool.gpus) < unit
            why = (
                f"fewer than the {unit} GPUs of a {shape(fleet.layout)}"
                if small
                else f"{shape(fleet.layout)} does not fit {pool.card.name or 'these GPUs'} "
                f"({pool.card.memory_total_mib / 1024:.1f} GiB a GPU)"
            )
        elif free < unit <= search.room:
            why = f"fewer than the {unit} GPUs of one node that an engine takes"
        elif len(groups) < fleet.available and search.fixed is None:
            why = f"objective {search.request.objective} needs {_several(len(groups))} of {world} GPUs"
        elif search.fixed is not None:
            why = "the sizes are pinned"
        else:
            why = f"{_NOT_ANOTHER} of {world} GPUs"
        total = len(pool.node.gpus)
        if pin and why.startswith(_NOT_ANOTHER):
            why += pin
        idle.setdefault(why, []).append(
            f"{pool.node.name} (all {total})" if free == total else f"{pool.node.name} ({free} of {total})"
        )
    return [f"GPUs without work: {names(where)}: {why}" for why, where in idle.items()]
