"""Why nothing fits, by how much, and what would; every change was checked by the estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .engine import Card
from .errors import PlannerError
from .placement import declared
from .pricing import Knobs, Trial, shape
from .rules import Layout, holds, tensor_sizes
from .search import MIN_CONTEXT, Search


def refusal(search: Search) -> PlannerError:
    """Why nothing fits: the best engine, its shortfall, and changes that were checked to fit."""
    tried = search.largest()
    if not tried:
        return no_layout(search)
    trials = []
    for layout, card in tried:
        knobs = search.knobs(layout, [card], search.all_schedulers(layout))
        trials.append(Trial(layout, (card,), knobs, search.price(layout, (card,), knobs)))
    best = max(trials, key=lambda trial: (trial.tokens, trial.layout.world * trial.layout.data))
    if best.fits and search.fixed:
        return no_layout(search)
    layout, card = best.layout, best.cards[0]
    short_by = _shortfall(search, best)
    missing = "" if short_by is None else f" Short by {short_by:.2f} GiB a GPU."
    changes = _changes(search, best)
    return PlannerError(
        f"The model does not fit {layout.world * layout.data} x {card.name or 'GPU'} ({shape(layout)}, context_length "
        f"{search.length}). vLLM would say: {best.figures['error']}{missing}",
        f"Would fit: {'; or '.join(changes[:3])}." if changes else "Use more GPUs or a quantized checkpoint.",
        "context_length" if search.request.context_length and best.tokens else "model",
    )


def _shortfall(search: Search, trial: Trial) -> float | None:
    """GiB that each GPU lacks: how much larger its memory would have to be, times the share that is used."""
    card = trial.cards[0]

    def fits(mib: float) -> bool:
        larger = (replace(card, memory_total_mib=card.memory_total_mib + mib),)
        return bool(search.price(trial.layout, larger, trial.knobs)["fits"])

    high = 1024.0
    while not fits(high):
        high *= 2
        if high > 1 << 26:
            return None
    low = 0.0 if high == 1024.0 else high / 2
    while high - low > 8:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return max(0.01, high / 1024 * trial.knobs.utilization)


def _changes(search: Search, trial: Trial) -> list[str]:
    """Changes that make it fit, each checked."""
    layout, cards, knobs = trial.layout, trial.cards, trial.knobs
    changes = []
    length = search.longest_of(layout, cards, knobs) // 16 * 16
    if length >= MIN_CONTEXT:
        changes.append(f"context_length: {length}")
    if "kv_cache_dtype" not in search.request.flags and _fits(search, layout, cards, knobs, kv_cache_dtype="fp8"):
        changes.append("args: {kv-cache-dtype: fp8}")
    for seqs in (256, 128, 64, 16, 4, 1):
        if (
            seqs < knobs.seqs
            and layout.data == 1
            and _fits(search, layout, cards, replace(knobs, seqs=seqs))
            and (search.need is not None or search.request.max_num_seqs is not None)
        ):
            changes.append(f"args: {{max-num-seqs: {seqs}}}" if search.request.max_num_seqs else f"concurrency: {seqs}")
            break
    wider = _wider(search, trial)
    if wider is not None:
        changes.append(f"{wider.world * wider.data} GPUs ({shape(wider)})")
    if (
        search.model.quantization is None
        and "quantization" not in search.request.flags
        and _fits(search, layout, cards, knobs, quantization="fp8")
    ):
        changes.append("a checkpoint quantized to FP8")
    return changes


def _fits(search: Search, layout: Layout, cards: tuple[Card, ...], knobs: Knobs, **more: Any) -> bool:
    try:
        return bool(search.price(layout, cards, knobs, **more)["fits"])
    except PlannerError:
        # A change that this model or version does not know is no advice.
        return False


def _wider(search: Search, trial: Trial) -> Layout | None:
    """The smallest larger engine that fits: more GPUs in a node up to eight, then more nodes of eight."""
    base = trial.layout
    sizes = [
        size
        for size in sorted(tensor_sizes(search.model, 8, expert=search.model.is_moe))
        if size % base.decode_context == 0
    ]
    if search.request.tensor:
        sizes = [search.request.tensor]
    stages = [1] if search.request.pipeline is None else [search.request.pipeline]
    options = [(size, each) for each in stages for size in sizes]
    if search.request.pipeline is None and sizes:
        options += [(sizes[-1], 1 << power) for power in range(1, 8) if 1 << power <= search.model.layers]
    for tensor, pipeline in options:
        if tensor * pipeline <= base.world * base.data:
            continue
        for expert in (False, True) if search.model.is_moe else (False,):
            layout = replace(base, tensor=tensor, pipeline=pipeline, data=1, expert=expert, layer_partition=None)
            if holds(search.model, layout) and _fits(search, layout, trial.cards, trial.knobs):
                return layout
    return None


def no_layout(search: Search) -> PlannerError:
    request, known = search.request, declared(search.nodes)
    pins = [
        f"{name} {value}"
        for name, value in (("tensor", request.tensor), ("pipeline", request.pipeline), ("data", request.data))
        if value
    ]
    if pins:
        return PlannerError(
            f"parallelism {' x '.join(pins)} can't be laid over these nodes ({known})"
            + (" with as many GPUs on each, as executor mp needs." if request.executor == "mp" else "."),
            "Choose sizes whose product is a multiple of the number of nodes and fits the smallest, or leave them out.",
            "parallelism",
        )
    return PlannerError(
        f"No layout of this model keeps the engine's rules on these nodes ({known}).",
        "Choose another model or other nodes.",
        "model",
    )
