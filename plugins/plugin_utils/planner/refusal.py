"""Why nothing fits, by how much, and what would; every change was checked by the estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .engine import Card
from .errors import PlannerError, short
from .placement import declared
from .pricing import Knobs, Pricer, Trial, shape
from .request import Request
from .rules import LORA_RANKS, Layout, holds, tensor_sizes
from .search import MIN_CONTEXT, Fleet, Search

# Flags that take the most memory by mistake; where several would do, the first of these is named.
_USUAL = ("max_num_batched_tokens", "max_num_seqs", "max_loras", "max_lora_rank", "gpu_memory_utilization")
_SPECULATIVE = "speculative_config"
_MUCH_LONGER = 1.2
# A context of less than this part of what is wanted is another service.
_SHORTER = 8
# More engines than so many times those of today are no advice.
_MAX_TIMES = 64


def refusal(search: Search) -> PlannerError:
    """Why nothing fits: the best engine, its shortfall, and changes that were checked to fit."""
    too_many = _too_many_engines(search)
    if too_many is not None:
        return too_many
    tried = search.largest()
    if not tried:
        return no_layout(search)
    trials = []
    for layout, card in tried:
        knobs = search.knobs(layout, [card], search.all_schedulers(layout))
        trials.append(Trial(layout, (card,), knobs, search.price(layout, (card,), knobs)))
    best = max(trials, key=lambda trial: (trial.tokens, trial.layout.world * trial.layout.data))
    if best.fits:
        return no_layout(search)
    blamed = _flag_to_blame(search, best)
    if blamed is not None:
        return blamed
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


def _flag_to_blame(search: Search, best: Trial) -> PlannerError | None:
    """The flag that takes the room: without it the model fits."""
    flags = [_SPECULATIVE] if search.request.speculative else []
    flags += sorted(
        search.request.flags, key=lambda flag: (_USUAL.index(flag) if flag in _USUAL else len(_USUAL), flag)
    )
    told = [flag for flag in flags if _tells(search, best, flag)]
    for guilty in [*([flag] for flag in told), *([told] if len(told) > 1 else [])]:
        other = Search(search.model, search.nodes, _without(search.request, guilty))
        found = other.choose()
        if found is None or not found[0].trials:
            continue
        trial = min(found[0].trials.values(), key=lambda each: each.tokens)
        layout, card = trial.layout, trial.cards[0]
        said = search.price(layout, trial.cards, search.knobs(layout, [card], search.all_schedulers(layout)))["error"]
        values = " and ".join(f"{_dashed(flag)} = {short(_value(search.request, flag))}" for flag in guilty)
        gpus = f"{layout.world * layout.data} x {card.name or 'GPU'} ({shape(layout)}, context_length {other.length})"
        return PlannerError(
            f"{values}: the engine does not start with {'these' if len(guilty) > 1 else 'this'}; without, it fits "
            f"{gpus}." + (f" vLLM would say: {said}" if said else ""),
            " ".join(_advice(other, trial, flag, search.request, alone=len(guilty) == 1) for flag in guilty),
            guilty[0] if len(guilty) == 1 else "args",
        )
    return None


def shortening(search: Search) -> str:
    """The flag without which `auto` would give a much longer context than it does; empty where there is none."""
    for flag in (*_USUAL, "kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if flag in search.request.flags:
            longest = Search(search.model, search.nodes, _without(search.request, [flag])).longest() or 0
            if longest > _MUCH_LONGER * search.length:
                value = short(search.request.flags[flag])
                return (
                    f"{_dashed(flag)} = {value} shortens the context to {search.length} tokens; without, {longest} fit"
                )
    return ""


def _without(request: Request, flags: Sequence[str]) -> Request:
    return replace(
        request,
        flags={flag: value for flag, value in request.flags.items() if flag not in flags},
        speculative={} if _SPECULATIVE in flags else request.speculative,
    )


def _value(request: Request, flag: str) -> Any:
    return request.speculative if flag == _SPECULATIVE else request.flags[flag]


def _dashed(flag: str) -> str:
    return "speculative" if flag == _SPECULATIVE else flag.replace("_", "-")


def _tells(search: Search, best: Trial, flag: str) -> bool:
    """Whether a flag changes what the best engine takes."""
    other = Pricer(search.model, _without(search.request, [flag]))
    other.length = search.length
    knobs = other.knobs(best.layout, best.cards[:1], search.all_schedulers(best.layout))
    return other.price(best.layout, best.cards, knobs) != best.figures


def _advice(other: Search, trial: Trial, flag: str, request: Request, *, alone: bool) -> str:
    """A value of the flag that was checked to fit, and the way without it."""
    if flag == _SPECULATIVE:
        return "Leave speculative out, or propose fewer tokens."
    knobs = trial.knobs
    for value in _milder(flag, request.flags[flag]) if alone else ():
        more: dict[str, Any] = {}
        if flag == "max_num_batched_tokens":
            tried = replace(knobs, tokens=value)
        elif flag == "max_num_seqs":
            tokens = knobs.tokens if "max_num_batched_tokens" in request.flags else max(knobs.tokens, value)
            tried = replace(knobs, seqs=value, tokens=tokens)
        elif flag == "gpu_memory_utilization":
            tried = replace(knobs, utilization=value)
        else:
            tried, more = knobs, {flag: value}
        if _fits(other, trial.layout, trial.cards, tried, **more):
            bound = "more" if flag == "gpu_memory_utilization" else "less"
            return f"Set {_dashed(flag)} to {value} or {bound} in args, or leave it out."
    return f"Leave {_dashed(flag)} out of args."


def _milder(flag: str, value: Any) -> Iterator[Any]:
    """Values of a flag that take less memory, nearest first."""
    if flag == "max_lora_rank":
        yield from sorted((rank for rank in LORA_RANKS if rank < int(value)), reverse=True)
    elif flag == "gpu_memory_utilization":
        # In hundredths, and rounded up from what is given.
        yield from (step / 100 for step in range(math.floor(float(value) * 100 + 1e-9) + 1, 96))
    elif flag in _USUAL and str(value).isdecimal():
        yield from (1 << power for power in range((int(value) - 1).bit_length() - 1, -1, -1))


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
    if length >= _shortest(search):
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


def _sure(figures: Mapping[str, Any]) -> float:
    """Sequences of full length at the lower end of the margin."""
    return float(figures["max_concurrency"]) * (1 - float(figures["margin"]))


def _shortest(search: Search) -> int:
    """The shortest context that is still advice to somebody who wants the present one."""
    return max(MIN_CONTEXT, search.length // _SHORTER)


def holding(search: Search, fleet: Fleet, engines: int) -> list[str]:
    """Changes with which engines of this layout hold every sequence that is asked for, each checked; at most three.

    They hold them at the lower end of the estimate's margin too.
    """
    layout, need = fleet.layout, search.need
    if fleet.trials is None or need is None:
        return []
    schedulers = engines * layout.data
    # As many as each scheduler gets; the KV cache must hold them, and their number must fit.
    share = -(-need // schedulers)

    def held(card: Card, trial: Trial, length: int, *, slots: int | None = None, **more: Any) -> float:
        seqs = max(trial.knobs.seqs, share) if search.request.max_num_seqs is None else slots or trial.knobs.seqs
        knobs = replace(trial.knobs, length=length, seqs=seqs, tokens=max(trial.knobs.tokens, seqs))
        try:
            figures = search.price(layout, trial.cards, knobs, **more)
        except PlannerError:
            # A change that this model or version does not know is no advice.
            return 0.0
        return float(min(_sure(figures), seqs)) if figures["fits"] else 0.0

    def holds_all(length: int, **more: Any) -> bool:
        total, left = 0.0, engines
        for card, number in fleet.in_order():
            used = min(number, left)
            total += used * layout.data * held(card, fleet.trials[card], length, **more)  # type: ignore[index]
            left -= used
        return total >= need

    changes = []
    if (
        fleet.slots(engines) < need
        and search.request.max_num_seqs is not None
        and holds_all(search.length, slots=share)
    ):
        changes.append(f"args: {{max-num-seqs: {share}}}")
    low, high = 0, search.length
    while high - low > max(16, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if holds_all(middle) else (low, middle)
    if low // 16 * 16 >= _shortest(search) and holds_all(low // 16 * 16):
        changes.append(f"context_length: {low // 16 * 16}")
    if "kv_cache_dtype" not in search.request.flags and holds_all(search.length, kv_cache_dtype="fp8"):
        changes.append("args: {kv-cache-dtype: fp8}")
    each = min(_sure(trial.figures) for trial in fleet.trials.values()) * layout.data
    if search.request.max_num_seqs is not None:
        each = min(each, fleet.slots(1))
    number = math.ceil(need / each) if each >= 1 else 0
    open_count = search.request.objective != "capacity" and search.fixed is None
    if open_count and engines < number <= _MAX_TIMES * engines:
        changes.append(f"{number * layout.world * layout.data} GPUs of this kind ({number} engines of {shape(layout)})")
    room = math.floor(min(engines * each, fleet.slots(engines)))
    if room >= 1:
        changes.append(f"concurrency: {room}")
    return changes[:3]


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
    data = (search.request.data or 1) if search.model.is_moe else 1
    pinned = search.request.expert
    experts = (
        (pinned,) if pinned is not None else (True,) if data > 1 else (False, True) if search.model.is_moe else (False,)
    )
    options = [(size, each) for each in stages for size in sizes]
    if search.request.pipeline is None and sizes:
        options += [(sizes[-1], 1 << power) for power in range(1, 8) if 1 << power <= search.model.layers]
    for tensor, pipeline in options:
        if tensor * pipeline * data <= base.world * base.data:
            continue
        for expert in experts:
            layout = replace(base, tensor=tensor, pipeline=pipeline, data=data, expert=expert, layer_partition=None)
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


def _too_many_engines(search: Search) -> PlannerError | None:
    """A dense model fits, but not as often as is pinned."""
    wanted = search.request.data
    if wanted is None or search.model.is_moe:
        return None
    other = Search(search.model, search.nodes, replace(search.request, data=None))
    other.fixed = None
    fleets = [fleet for _, layout in other.ranked() if (fleet := other.fleet(layout)) is not None]
    best = max(fleets, key=lambda fleet: fleet.available, default=None)
    if best is None or best.available >= wanted:
        return None
    number, each = best.available, shape(best.layout)
    return PlannerError(
        f"parallelism.data = {wanted}, but only {number} {'engine' if number == 1 else 'engines'} of {each} "
        f"fit on these nodes ({declared(search.nodes)}).",
        f"Set parallelism.data to {number} or less, or leave it out.",
        "parallelism.data",
    )
