"""Prices one engine on given GPUs: the flags that the planner sets by itself, and what the estimate says of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from . import estimate as memory
from .cards import visible_gib
from .engine import Card, parse_engine
from .model import Model, parse_config
from .overhead import batch_defaults
from .request import Request
from .rules import Layout

# Steps in which the planner may lower what it sets by itself.
_SEQS = (512, 256, 128, 64, 32, 16)
LOW_TOKENS = 2048
# A step of half as many tokens is worth it where the KV cache grows by this share.
WORTH = 0.1


@dataclass(frozen=True)
class Knobs:
    """What the planner sets on an engine beside its layout."""

    length: int
    seqs: int
    tokens: int
    utilization: float


@dataclass(frozen=True)
class Trial:
    """One engine on given GPUs: its flags and what the estimate says of them."""

    layout: Layout
    # One type for the whole engine, or one for each stage.
    cards: tuple[Card, ...]
    knobs: Knobs
    figures: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        return bool(self.figures["fits"])

    @property
    def sequences(self) -> float:
        """Sequences of full length that the engine holds, over all its data-parallel ranks."""
        return float(self.figures["max_concurrency"]) * self.layout.data

    @property
    def tokens(self) -> float:
        return float(self.figures["kv_cache_tokens"]) * self.layout.data


class Pricer:
    """Asks the estimate; every answer is kept."""

    def __init__(self, model: Model, request: Request) -> None:
        self.model = model
        self.request = request
        self.draft = parse_config(request.draft_config) if request.draft_config else None
        self.engine = parse_engine(self.base_flags)
        self.length = request.context_length or model.default_context
        if request.objective == "capacity" and request.context_length is None:
            self.length = model.max_context
        self.failed: list[Trial] = []
        self._prices: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        self._defaults: dict[tuple[Any, ...], tuple[int, int]] = {}

    @cached_property
    def base_flags(self) -> dict[str, Any]:
        flags = {**self.request.flags, "vllm_version": self.request.vllm_version}
        if self.request.speculative:
            flags["speculative_config"] = self.request.speculative
        return flags

    @property
    def need(self) -> int | None:
        """Sequences in flight that are asked for."""
        return self.request.concurrency

    def price(self, layout: Layout, cards: tuple[Card, ...], knobs: Knobs, **more: Any) -> Mapping[str, Any]:
        key = (layout, cards, knobs, *sorted(more.items()))
        if key not in self._prices:
            flags = {**self.base_flags, **_layout_flags(layout), **more}
            flags |= {
                "max_model_len": knobs.length,
                "max_num_seqs": knobs.seqs,
                "max_num_batched_tokens": knobs.tokens,
                "gpu_memory_utilization": knobs.utilization,
            }
            self._prices[key] = self._estimate(cards, flags)
        return self._prices[key]

    def _estimate(self, cards: tuple[Card, ...], flags: Mapping[str, Any]) -> Mapping[str, Any]:
        listed = [{"name": card.name, "memory_total_mib": card.memory_total_mib} for card in cards]
        return memory.estimate_model(self.model, listed[0] if len(set(cards)) == 1 else listed, flags, self.draft)

    def defaults(self, layout: Layout, cards: Iterable[Card], seqs: int | None) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens` that vLLM takes by itself, the least over these GPUs."""
        key = (layout.expert, layout.data, frozenset(cards), seqs, self.length)
        if key not in self._defaults:
            flags = {**self.base_flags, **_layout_flags(layout), "max_model_len": self.length}
            if seqs is not None:
                flags["max_num_seqs"] = seqs
            found = [batch_defaults(parse_engine(flags), card, self.model) for card in key[2]]
            self._defaults[key] = min(each[0] for each in found), min(each[1] for each in found)
        return self._defaults[key]

    def utilization(self, cards: Iterable[Card], gpus: int) -> float:
        """vLLM's default share, less where a small card would leave too little room outside of it.

        The CUDA context and NCCL's buffers lie outside of what vLLM asks for (v1/worker/gpu_worker.py).
        """
        asked = self.request.flags.get("gpu_memory_utilization")
        if asked is not None:
            return float(self.engine.gpu_memory_utilization or 0)
        default = 0.92 if self.engine.at_least(0, 20) else 0.9
        visible = min(visible_gib(card) for card in cards)
        outside = 1.0 if gpus == 1 else 2.0
        if visible <= 2 * outside:
            return default
        return min(default, math.floor((visible - outside) / visible * 100) / 100)

    def knobs(self, layout: Layout, cards: Sequence[Card], schedulers: int) -> Knobs:
        """Flags of an engine whose sequences are shared among so many schedulers."""
        seqs = self.request.max_num_seqs
        if seqs is None and self.need is not None:
            seqs = _share(self.need, schedulers)
        default_seqs, tokens = self.defaults(layout, cards, seqs)
        seqs = default_seqs if seqs is None else seqs
        if self.request.flags.get("max_num_batched_tokens") is None:
            # vLLM refuses fewer tokens a step than sequences.
            tokens = max(tokens, seqs)
        return Knobs(self.length, seqs, tokens, self.utilization(cards, layout.world * layout.data))

    def trial(self, layout: Layout, cards: tuple[Card, ...], common: Sequence[Card], schedulers: int) -> Trial:
        """Price an engine; with fewer sequences and tokens a step where vLLM's defaults don't fit or leave little."""
        knobs = self.knobs(layout, common, schedulers)
        first = Trial(layout, cards, knobs, self.price(layout, cards, knobs))
        if first.fits:
            return self._roomier(first, schedulers)
        for lower in self._lower(first, common):
            figures = self.price(layout, cards, lower)
            if figures["fits"]:
                return Trial(layout, cards, lower, figures)
        self.failed.append(first)
        return first

    def _roomier(self, trial: Trial, schedulers: int) -> Trial:
        """The same engine with fewer tokens a step, as long as halving them makes much more room that is wanted.

        The profile run holds the activations of a whole step, those of the experts over all data-parallel ranks.
        Latency wants long steps, and so does everybody once the sequences have room.
        """
        wanted = None if self.need is None else _share(self.need, schedulers)
        if not self.may_cut_tokens or (wanted is None and self.request.objective == "latency"):
            return trial
        while trial.knobs.tokens > max(LOW_TOKENS, trial.knobs.seqs):
            if wanted is not None and trial.figures["max_concurrency"] >= wanted:
                break
            knobs = replace(trial.knobs, tokens=max(LOW_TOKENS, trial.knobs.seqs, trial.knobs.tokens // 2))
            lower = replace(trial, knobs=knobs, figures=self.price(trial.layout, trial.cards, knobs))
            if not lower.fits or lower.tokens < trial.tokens * (1 + WORTH):
                break
            trial = lower
        return trial

    def _lower(self, first: Trial, common: Sequence[Card]) -> Iterator[Knobs]:
        """Smaller flags that the planner may set by itself, from mild to hard; none when even the hardest won't do."""
        knobs = first.knobs
        blocks = re.search(r"Mamba cache blocks \((\d+)\)", str(first.figures["error"]))
        free = self.request.max_num_seqs is None
        if blocks and free and 0 < int(blocks[1]) < knobs.seqs:
            yield replace(knobs, seqs=int(blocks[1]))
            return

        def fewer_tokens(step: Knobs) -> Knobs:
            return replace(step, tokens=min(step.tokens, max(LOW_TOKENS, step.seqs)))

        fewer = [self._fewer(first.layout, common, knobs, seqs) for seqs in _SEQS if free and seqs < knobs.seqs]
        cut = self.may_cut_tokens
        if self.need is None:
            steps = [*fewer, *(fewer_tokens(step) for step in (knobs, *fewer) if cut)]
        else:
            # Sequences that were asked for go last; those without a place wait.
            steps = [*([fewer_tokens(knobs)] if cut else []), *fewer, *(fewer_tokens(step) for step in fewer if cut)]
        steps = [step for step in steps if step != knobs]
        if steps and self.price(first.layout, first.cards, steps[-1])["fits"]:
            yield from steps

    def _fewer(self, layout: Layout, common: Sequence[Card], knobs: Knobs, seqs: int) -> Knobs:
        """The same with fewer sequences, and with the tokens that vLLM takes for them."""
        if self.request.flags.get("max_num_batched_tokens") is not None:
            return replace(knobs, seqs=seqs)
        return replace(knobs, seqs=seqs, tokens=min(knobs.tokens, max(self.defaults(layout, common, seqs)[1], seqs)))

    @cached_property
    def may_cut_tokens(self) -> bool:
        """Images and hybrid blocks must fit into one step, so there the default stays."""
        text = self.model.text
        hybrid = self.model.mamba_heads or any(key.startswith(("mamba_", "linear_", "ssm_")) for key in map(str, text))
        return not (
            hybrid
            or self.model.multimodal
            or self.request.flags.get("max_num_batched_tokens") is not None
            or self.request.flags.get("enable_chunked_prefill") is False
        )


def _share(sequences: int, schedulers: int) -> int:
    """Sequences that one of several schedulers must take: a quarter more than its share, since balancing is uneven."""
    if schedulers == 1:
        return sequences
    return min(sequences, math.ceil(1.25 * sequences / schedulers))


def _layout_flags(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "data_parallel_size": layout.data,
        "enable_expert_parallel": layout.expert,
        "pp_layer_partition": list(layout.layer_partition) if layout.layer_partition is not None else None,
    }


def shape(layout: Layout) -> str:
    parts = [f"tensor {layout.tensor}"]
    if layout.pipeline > 1:
        parts.append(f"pipeline {layout.pipeline}")
    if layout.data > 1:
        parts.append(f"data {layout.data}")
    return " x ".join(parts)
