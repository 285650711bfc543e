"""Chooses how one engine is spread over its nodes: tensor parallelism inside a node, pipeline stages across nodes.

This version plans one engine an instance, with the same number of GPUs on each of its nodes. The answer depends on the
set of nodes, never on their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from . import estimate as memory
from .errors import PlannerError, UnsupportedArchitectureError
from .model import Model, merge, parse_config
from .rules import Layout, holds, require, split_layers, tensor_sizes
from .serve_args import engine_flags

DEFAULT_VERSION = "0.33.0"
OBJECTIVES = ("throughput", "latency", "capacity")
EXECUTORS = ("auto", "ray", "mp")
# A fabric fast enough to carry an all-reduce for every layer between nodes.
_FAST_FABRICS = ("infiniband", "roce")
_REQUEST_KEYS = frozenset(
    {
        "objective",
        "context_length",
        "concurrency",
        "parallelism",
        "executor",
        "disaggregation",
        "speculative",
        "args",
        "environment",
        "vllm_version",
        "variant",
        "hf_quant_config",
    }
)
_PARTITION = "VLLM_PP_LAYER_PARTITION"


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_total_mib: float


@dataclass(frozen=True)
class Node:
    name: str
    gpus: tuple[Gpu, ...]
    inter_node: str


@dataclass(frozen=True)
class Candidate:
    """A layout and the nodes that carry it, with as many GPUs on each."""

    layout: Layout
    nodes: tuple[Node, ...]
    gpus_per_node: int

    @property
    def gpus(self) -> list[Gpu]:
        return [gpu for node in self.nodes for gpu in node.gpus[: self.gpus_per_node]]


@dataclass
class Request:
    """A checked request."""

    objective: str = "throughput"
    context_length: int | None = None
    concurrency: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    expert: bool = False
    executor: str = "auto"
    speculative: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    layer_partition: tuple[int, ...] | None = None
    vllm_version: str = DEFAULT_VERSION
    cpu: bool = False


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """n2 before n10, and a total order for any names."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), part) if part.isdecimal() and part.isascii() else (1, 0, part) for part in parts]


def plan(config: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], **request: Any) -> dict[str, Any]:
    """The filter's entry: model config and nodes in, flags and placement out."""
    asked = _request(request)
    overrides = asked.flags.get("hf_overrides")
    hf_quant_config = request.get("hf_quant_config")
    model = parse_config(
        merge(config, overrides) if isinstance(overrides, Mapping) else config,
        hf_quant_config if isinstance(hf_quant_config, Mapping) else None,
    )
    return plan_model(model, _nodes(nodes), asked)


def plan_model(model: Model, nodes: list[Node], request: Request) -> dict[str, Any]:
    """The same for parsed input."""
    warnings: list[str] = []
    reasons: list[str] = []
    _check_context(model, request)
    usable = _usable(nodes, warnings)
    candidate, figures, context = _choose(model, usable, request, reasons, warnings)
    layout = candidate.layout
    executor = _executor(candidate, request, reasons)
    _describe(model, candidate, usable, request, reasons=reasons, warnings=warnings)
    if figures is not None and request.concurrency and figures["max_concurrency"] < request.concurrency:
        warnings.append(
            f"concurrency = {request.concurrency}, but at {context} tokens each only "
            f"{figures['max_concurrency']:.1f} sequences fit; the others wait or are preempted"
        )
    split = split_layers(model.layers, layout.pipeline, layout.layer_partition)
    flags = request.flags
    return {
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "data_parallel_size": 1,
        "enable_expert_parallel": layout.expert,
        "max_model_len": context,
        "max_num_seqs": flags.get("max_num_seqs", request.concurrency),
        "max_num_batched_tokens": flags.get("max_num_batched_tokens"),
        "gpu_memory_utilization": (
            None if request.cpu else flags.get("gpu_memory_utilization", memory.DEFAULT_UTILIZATION)
        ),
        "kv_cache_dtype": flags.get("kv_cache_dtype", "auto"),
        "distributed_executor_backend": executor,
        "pp_layer_partition": split if layout.layer_partition is not None else None,
        "speculative_config": request.speculative,
        "args": request.args,
        "replicas": [
            {
                "nodes": [node.name for node in candidate.nodes],
                "gpus": {
                    node.name: [gpu.index for gpu in node.gpus[: candidate.gpus_per_node]] for node in candidate.nodes
                },
            }
        ],
        "estimate": figures,
        "reasons": reasons,
        "warnings": warnings,
    }


def _request(values: Mapping[str, Any]) -> Request:
    unknown = sorted(set(values) - _REQUEST_KEYS)
    if unknown:
        raise PlannerError(
            f"{unknown[0]!r} is no key of a request.", f"Use {', '.join(sorted(_REQUEST_KEYS))}.", str(unknown[0])
        )
    version = str(values.get("vllm_version") or DEFAULT_VERSION)
    parallelism = values.get("parallelism") or {}
    if not isinstance(parallelism, Mapping):
        raise _wrong("parallelism", parallelism, "a dictionary")
    for key in parallelism:
        if key not in ("tensor", "pipeline", "data", "expert"):
            raise PlannerError(
                f"parallelism.{key} is not known.", "Use tensor, pipeline, data or expert.", f"parallelism.{key}"
            )
    data = _integer(parallelism.get("data"), "parallelism.data")
    if data not in (None, 1):
        raise PlannerError(
            f"parallelism.data = {data}: this release runs one engine an instance.",
            "Leave it out, and define one instance a replica.",
            "parallelism.data",
        )
    if values.get("disaggregation"):
        raise PlannerError("disaggregation is not served by this release.", "Leave it out.", "disaggregation")
    args = values.get("args") or {}
    if not isinstance(args, Mapping):
        raise _wrong("args", args, "a dictionary")
    speculative = values.get("speculative") or {}
    if not isinstance(speculative, Mapping):
        raise _wrong("speculative", speculative, "a dictionary")
    context = values.get("context_length")
    request = Request(
        objective=_choice(values.get("objective"), "objective", OBJECTIVES),
        context_length=None if context in (None, "auto") else _integer(context, "context_length"),
        concurrency=_integer(values.get("concurrency"), "concurrency"),
        tensor=_integer(parallelism.get("tensor"), "parallelism.tensor"),
        pipeline=_integer(parallelism.get("pipeline"), "parallelism.pipeline"),
        expert=bool(parallelism.get("expert")),
        executor=_choice(values.get("executor"), "executor", EXECUTORS),
        speculative=dict(speculative),
        args=dict(args),
        flags=engine_flags(args, version),
        layer_partition=_partition(values.get("environment") or {}),
        vllm_version=version,
        cpu=values.get("variant") == "cpu",
    )
    seqs = _integer(request.flags.get("max_num_seqs"), "args max-num-seqs")
    if seqs is not None and request.concurrency is not None and seqs < request.concurrency:
        raise PlannerError(
            f"args max-num-seqs = {seqs} is less than concurrency = {request.concurrency}.",
            "Leave max-num-seqs out of args.",
            "concurrency",
        )
    return request


def _choice(value: Any, name: str, choices: Sequence[str]) -> str:
    if value is None:
        return choices[0]
    if value not in choices:
        raise _wrong(name, value, f"one of {', '.join(choices)}")
    return str(value)


def _wrong(key: str, value: Any, expected: str) -> PlannerError:
    shown = repr(value)
    return PlannerError(f"{key} = {shown if len(shown) < 100 else shown[:97] + '...'} is not {expected}.", key=key)


def _integer(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise _wrong(name, value, "a positive integer")
    return value


def _partition(environment: Any) -> tuple[int, ...] | None:
    text = environment.get(_PARTITION) if isinstance(environment, Mapping) else None
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", str(text)):
        raise PlannerError(
            f"Invalid partition string: {text}.",
            f"{_PARTITION} is a comma list of layer counts.",
            f"environment.{_PARTITION}",
        )
    return tuple(int(part) for part in str(text).split(","))


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> list[Node]:
    if isinstance(nodes, str | Mapping) or not isinstance(nodes, Sequence) or not nodes:
        raise PlannerError("nodes is not a list of nodes")
    parsed = []
    for node in nodes:
        if not isinstance(node, Mapping) or not isinstance(node.get("name"), str):
            raise PlannerError(f"a node needs a name and gpus: {node!r}"[:200])
        listed = node.get("gpus") or []
        if isinstance(listed, str | Mapping) or not isinstance(listed, Sequence):
            raise PlannerError(f"node {node['name']}: gpus is not a list")
        gpus = []
        for position, gpu in enumerate(listed):
            if not isinstance(gpu, Mapping):
                raise PlannerError(f"node {node['name']}: a GPU is a dictionary of name and memory_total_mib")
            mib = gpu.get("memory_total_mib")
            if isinstance(mib, bool) or not isinstance(mib, int | float) or not 0 < mib < 1 << 40:
                raise PlannerError(f"node {node['name']}: memory_total_mib = {mib!r} is not a positive number of MiB")
            gpus.append(Gpu(int(gpu.get("index", position)), str(gpu.get("name", "")), mib))
        parsed.append(Node(node["name"], tuple(gpus), str(node.get("inter_node", "tcp"))))
    parsed.sort(key=lambda node: natural_key(node.name))
    for left, right in pairwise(parsed):
        if left.name == right.name:
            raise PlannerError(f"node {left.name} is listed twice")
    return parsed


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


def _usable(nodes: list[Node], warnings: list[str]) -> list[Node]:
    empty = [node.name for node in nodes if not node.gpus]
    if len(empty) == len(nodes):
        raise PlannerError(f"No GPUs on {', '.join(empty[:5])}.", "Declare them in gpus.", "nodes")
    if empty:
        warnings.append(f"no GPUs on {', '.join(empty)}: left out")
    return [node for node in nodes if node.gpus]


def _candidates(model: Model, nodes: list[Node], request: Request) -> Iterator[Candidate]:
    """Layouts that keep every pinned value and break no rule, best first for the objective."""
    counts = range(1, min(len(nodes), model.layers) + 1)
    for count in counts if request.objective == "latency" else reversed(counts):
        # Nodes with more GPUs carry more; equal ones are taken in the order of their names.
        chosen = sorted(nodes, key=lambda node: -len(node.gpus))[:count]
        chosen.sort(key=lambda node: natural_key(node.name))
        room = min(len(node.gpus) for node in chosen)
        found = list(_on(model, chosen, room, request))
        # The most GPUs first, then the largest tensor size: stages are slower than shards.
        found.sort(key=lambda item: (-item.layout.world, -item.layout.tensor))
        if request.objective == "latency":
            found.sort(key=lambda item: (item.layout.pipeline, -item.layout.tensor))
        yield from found


def _on(model: Model, nodes: list[Node], room: int, request: Request) -> Iterator[Candidate]:
    count = len(nodes)
    sizes = [request.tensor] if request.tensor else tensor_sizes(model, room)
    for tensor in sizes:
        if request.pipeline:
            stages = [request.pipeline]
        elif tensor > room:
            stages = [1]
        else:
            stages = [count * each for each in range(1, room // tensor + 1)]
        for pipeline in stages:
            layout = _layout(tensor, pipeline, request)
            # Ranks are laid out node by node: each holds as many, and whole tensor groups unless one fits no node.
            if layout.world % count or layout.world // count > room:
                continue
            if (layout.world // count) % tensor and not (tensor > room and _spans_nodes(nodes)):
                continue
            if holds(model, layout):
                yield Candidate(layout, tuple(nodes), layout.world // count)


def _spans_nodes(nodes: list[Node]) -> bool:
    return len(nodes) > 1 and all(node.inter_node in _FAST_FABRICS for node in nodes)


def _layout(tensor: int, pipeline: int, request: Request) -> Layout:
    draft = request.speculative.get("draft_tensor_parallel_size")
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        expert=request.expert,
        decode_context=_integer(request.flags.get("decode_context_parallel_size"), "decode-context-parallel-size") or 1,
        layer_partition=request.layer_partition,
        draft_tensor=_integer(draft, "speculative.draft_tensor_parallel_size"),
    )


def _choose(
    model: Model, nodes: list[Node], request: Request, reasons: list[str], warnings: list[str]
) -> tuple[Candidate, dict[str, Any] | None, int]:
    """The first candidate that fits, its figures and its context length."""
    _check_pins(model, nodes, request)
    best: tuple[Candidate, dict[str, Any]] | None = None
    for candidate in _candidates(model, nodes, request):
        asked = request.context_length or model.default_context
        if request.cpu:
            reasons.append("declared slots on CPU: memory is not estimated")
            return candidate, None, asked
        try:
            figures = _estimate(model, candidate, request, asked)
        except UnsupportedArchitectureError as error:
            warnings.append(f"{error}: placement follows the rules alone, the fit is not checked")
            return candidate, None, asked
        if figures["fits"]:
            return candidate, figures, asked
        tokens = int(figures["kv_cache_tokens"])
        if request.context_length is None and tokens >= memory.BLOCK_TOKENS:
            reasons.append(f"context_length: auto gives {tokens} of the model's {model.default_context} tokens")
            return candidate, _estimate(model, candidate, request, tokens), tokens
        if best is None or figures["kv_cache_tokens"] > best[1]["kv_cache_tokens"]:
            best = candidate, figures
    if best is None:
        raise _no_layout(nodes, request)
    raise _does_not_fit(model, best[0], best[1], request)


def _check_pins(model: Model, nodes: list[Node], request: Request) -> None:
    """Pinned values that can't work anywhere, each with its own message."""
    if request.tensor or request.pipeline or request.expert or request.layer_partition:
        pipeline = request.pipeline or (len(request.layer_partition) if request.layer_partition else 1)
        key = "parallelism.tensor" if request.tensor else "parallelism.pipeline" if request.pipeline else "parallelism"
        require(model, _layout(request.tensor or 1, pipeline, request), key)
    total = sum(len(node.gpus) for node in nodes)
    asked = (request.tensor or 1) * (request.pipeline or 1)
    if asked > total:
        declared = ", ".join(f"{node.name}: {len(node.gpus)}" for node in nodes[:8])
        raise PlannerError(
            f"parallelism asks for {asked} GPUs (tensor {request.tensor or 1} x pipeline {request.pipeline or 1}), "
            f"the nodes declare {total} ({declared}).",
            "Lower parallelism, or add nodes or GPUs.",
            "parallelism",
        )
    largest = max(len(node.gpus) for node in nodes)
    if request.tensor and request.tensor > largest and not _spans_nodes(nodes):
        raise PlannerError(
            f"parallelism.tensor = {request.tensor} is more than the {largest} GPUs of a node, and the fabric between "
            "the nodes is not InfiniBand or RoCE.",
            f"Set parallelism.tensor to {largest} or less, and parallelism.pipeline to the number of nodes.",
            "parallelism.tensor",
        )


def _no_layout(nodes: list[Node], request: Request) -> PlannerError:
    declared = ", ".join(f"{node.name}: {len(node.gpus)}" for node in nodes[:8])
    pins = [f"{name} {value}" for name, value in (("tensor", request.tensor), ("pipeline", request.pipeline)) if value]
    if pins:
        return PlannerError(
            f"parallelism {' x '.join(pins)} can't be laid over these nodes with as many GPUs on each ({declared}).",
            "Choose sizes whose product is a multiple of the number of nodes and fits the smallest, or leave them out.",
            "parallelism",
        )
    return PlannerError(
        f"No layout of this model keeps the engine's rules on these nodes ({declared}).",
        "Choose another model or other nodes.",
        "model",
    )


def _estimate(model: Model, candidate: Candidate, request: Request, length: int) -> dict[str, Any]:
    smallest = min(candidate.gpus, key=lambda gpu: (gpu.memory_total_mib, gpu.name))
    flags = dict(request.flags)
    flags.setdefault("max_num_seqs", request.concurrency)
    flags |= {
        "tensor_parallel_size": candidate.layout.tensor,
        "pipeline_parallel_size": candidate.layout.pipeline,
        "enable_expert_parallel": candidate.layout.expert,
        "max_model_len": length,
    }
    gpu = {"name": smallest.name, "memory_total_mib": smallest.memory_total_mib}
    return memory.estimate_model(model, gpu, flags)


def _does_not_fit(model: Model, candidate: Candidate, figures: dict[str, Any], request: Request) -> PlannerError:
    """The shortfall, and changes that were checked to fit."""
    layout = candidate.layout
    length = request.context_length or model.default_context
    ranks = figures["ranks"]
    short = ""
    if ranks:
        tightest = min(ranks, key=lambda rank: rank["kv_cache_gib"])
        per_request = _request_gib(model, layout, length, request)
        short = f" Short by {max(0.01, per_request - tightest['kv_cache_gib']):.2f} GiB a GPU."
    fits: list[str] = []
    tokens = int(figures["kv_cache_tokens"])
    if tokens >= memory.BLOCK_TOKENS:
        fits.append(f"context_length: {tokens}")
    if "kv_cache_dtype" not in request.flags:
        trial = Request(**{**request.__dict__, "flags": {**request.flags, "kv_cache_dtype": "fp8"}})
        if _estimate(model, candidate, trial, length)["fits"]:
            fits.append("args: {kv-cache-dtype: fp8}")
    seqs = request.flags.get("max_num_seqs", request.concurrency)
    trial = Request(**{**request.__dict__, "flags": {**request.flags, "max_num_seqs": 16}})
    if (seqs is None or seqs > 16) and _estimate(model, candidate, trial, length)["fits"]:
        fits.append("concurrency: 16")
    for factor in (2, 4, 8):
        wider = Candidate(Layout(layout.tensor * factor, layout.pipeline, expert=layout.expert), candidate.nodes, 0)
        if not holds(model, wider.layout):
            continue
        smallest = Candidate(wider.layout, candidate.nodes, candidate.gpus_per_node)
        if _estimate(model, smallest, request, length)["fits"]:
            fits.append(f"{wider.layout.world} GPUs (tensor {wider.layout.tensor})")
            break
    return PlannerError(
        f"The model does not fit (tensor {layout.tensor} x pipeline {layout.pipeline}, context_length {length}). "
        f"vLLM would say: {figures['error']}{short}",
        f"Would fit: {'; or '.join(fits[:3])}." if fits else "Use more GPUs or a quantized checkpoint.",
        "context_length" if tokens and request.context_length else "model",
    )


def _request_gib(model: Model, layout: Layout, length: int, request: Request) -> float:
    # 2 bytes unless an 8-bit cache is asked for; only the message depends on it.
    size = 1 if str(request.flags.get("kv_cache_dtype", "auto")).startswith("fp8") else 2
    layers = max(split_layers(model.layers, layout.pipeline, layout.layer_partition))
    return 2 * layers * max(1.0, model.kv_heads / layout.tensor) * model.head_dim * size * length / memory.GIB


def _executor(candidate: Candidate, request: Request, reasons: list[str]) -> str:
    if request.executor != "auto":
        reasons.append(f"executor: {request.executor} as asked")
        return request.executor
    if len(candidate.nodes) == 1:
        reasons.append("executor: mp, because all ranks are on one node")
        return "mp"
    reasons.append(f"executor: ray, because the ranks are spread over {len(candidate.nodes)} nodes")
    return "ray"


def _describe(
    model: Model,
    candidate: Candidate,
    nodes: list[Node],
    request: Request,
    *,
    reasons: list[str],
    warnings: list[str],
) -> None:
    layout = candidate.layout
    room = min(len(node.gpus) for node in candidate.nodes)
    if request.tensor:
        reasons.append(f"tensor {layout.tensor} as pinned")
    else:
        reasons.append(
            f"tensor {layout.tensor}: the largest size for the {room} GPUs of a node that divides "
            f"{model.heads} attention heads, {model.kv_heads} KV heads and every layer"
        )
    if request.pipeline:
        reasons.append(f"pipeline {layout.pipeline} as pinned")
    elif layout.pipeline > 1:
        reasons.append(f"pipeline {layout.pipeline}: stages over {len(candidate.nodes)} nodes ({request.objective})")
    if layout.tensor > candidate.gpus_per_node:
        warnings.append(
            f"tensor {layout.tensor} spans nodes: every layer waits for the network; pipeline stages cost less"
        )
    split = split_layers(model.layers, layout.pipeline, layout.layer_partition)
    if len(set(split)) > 1:
        reasons.append(f"layers of the stages: {', '.join(map(str, split))}")
    used = {node.name for node in candidate.nodes}
    idle = [f"{node.name} (all {len(node.gpus)})" for node in nodes if node.name not in used]
    idle += [
        f"{node.name} ({len(node.gpus) - candidate.gpus_per_node} of {len(node.gpus)})"
        for node in candidate.nodes
        if len(node.gpus) > candidate.gpus_per_node
    ]
    if idle:
        shown = ", ".join(idle[:8]) + (f" and {len(idle) - 8} more nodes" if len(idle) > 8 else "")
        warnings.append(f"GPUs without work: {shown}")
    kinds = sorted({gpu.name for gpu in candidate.gpus})
    if len(kinds) > 1:
        warnings.append(f"mixed GPUs ({', '.join(kinds)}): the smallest decides for all")
    if layout.pipeline > 1 and model.tied_embeddings and not request.cpu:
        reasons.append("the tied embedding is held by the first and the last stage")
