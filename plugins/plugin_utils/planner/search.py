"""Searches layouts of a model on nodes, in the order in which they serve the objective.

Nodes of one kind are interchangeable: engines of one layout on one type of GPU are priced once, however many there are.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .cards import visible_gib
from .engine import Card
from .model import Model
from .placement import Node, Placed, Pool, by_node, count, pack, pools, spans_nodes, stage_cards
from .pricing import Knobs, Pricer, Trial
from .request import Request
from .rules import Layout, holds, tensor_sizes

# Sequences of full length that an engine should hold when nobody says how many: with one, the next would wait.
FLOOR = 2
# An engine that serves less is of no use to anybody.
MIN_CONTEXT = 256
# Kept back from the longest context, because the estimate is good to a few percent.
RESERVE = 0.02
# GPUs of one engine in one node, and nodes of one engine; nobody builds more.
_MAX_WORLD = 128
_MAX_NODES = 256
# Layers moved between unequal stages; more would change the last percent.
_MOVES = 8
# What an engine over several nodes must hold more, since its ranks wait for the network.
_FARTHER = 1.25
# Nodes of one engine that are tried so that none is idle, even if half as many would do.
_WIDE = 8
# Layouts that are looked at to name the next best.
_OTHERS = 4


@dataclass(frozen=True)
class Fleet:
    """Equal engines over the nodes; types of GPUs that can't hold the engine are left out."""

    layout: Layout
    # None where memory is not estimated.
    trials: Mapping[Card, Trial] | None
    numbers: Mapping[Card, int]
    # The one engine over unequal GPUs.
    mixed: Placed | None = None
    # Nodes whose GPUs count as one type although they differ.
    merged: bool = False

    @property
    def available(self) -> int:
        return sum(self.numbers.values())

    def sequences(self, engines: int) -> float:
        """Sequences of full length that so many engines hold, those on the largest GPUs first."""
        if self.trials is None:
            return math.inf
        total = 0.0
        for card, number in self.in_order():
            used = min(number, engines)
            total += used * self.trials[card].sequences
            engines -= used
        return total

    def even(self, engines: int) -> float:
        """Sequences that so many engines hold when each gets as many, as a balancer hands them out."""
        if self.trials is None:
            return math.inf
        used, left = [], engines
        for card, number in self.in_order():
            if left > 0:
                used.append(self.trials[card].sequences)
            left -= number
        return engines * min(used, default=0.0)

    def slots(self, engines: int) -> float:
        """Sequences that so many engines run at a time, whatever room they have."""
        if self.trials is None:
            return math.inf
        return engines * self.layout.data * min(trial.knobs.seqs for trial in self.trials.values())

    def in_order(self) -> list[tuple[Card, int]]:
        return sorted(self.numbers.items(), key=lambda item: (-item[0].memory_total_mib, item[0].name))


class Search(Pricer):
    """Tries layouts on the nodes."""

    def __init__(self, model: Model, nodes: list[Node], request: Request) -> None:
        super().__init__(model, request)
        self.nodes = nodes
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.shortened: str | None = None
        # Engines that fit, but hold too few sequences: how many engines, and how many sequences.
        self.narrow: list[tuple[Layout, int, float]] = []
        self.fast = spans_nodes(nodes)
        # Several engines of a dense model are independent; only an engine with experts has ranks inside.
        self.fixed: int | None = None if model.is_moe else request.data
        if request.tensor and request.pipeline and request.data is None:
            self.fixed = 1
        largest = max(len(pool.gpus) for pool in pools(nodes))
        # A pinned tensor size that only fits over different GPUs of a node is priced on the smallest of them.
        self.merged = bool(request.tensor and request.tensor > largest)
        self.pools = pools(nodes, mixed=self.merged)
        self.by_card: dict[Card, list[Pool]] = {}
        for pool in self.pools:
            self.by_card.setdefault(pool.card, []).append(pool)
        self.sizes = {card: Counter(len(pool.gpus) for pool in found) for card, found in self.by_card.items()}
        self.room = min(max(len(pool.gpus) for pool in self.pools), _MAX_WORLD)

    # Sizes

    @cached_property
    def tensors(self) -> list[int]:
        """Tensor sizes that the model allows inside a node, largest first."""
        if self.request.tensor:
            return [self.request.tensor]
        size = self.request.decode_context
        # Sizes that would cut an expert wrongly are sizes all the same where experts stay whole.
        whole = self.model.is_moe and self.request.expert is not False
        return [tensor for tensor in tensor_sizes(self.model, self.room, expert=whole) if tensor % size == 0]

    @property
    def equal(self) -> bool:
        """Whether every node of an engine must give as many GPUs."""
        return self.request.executor == "mp"

    def layout(self, tensor: int, pipeline: int = 1, data: int = 1, expert: bool = False) -> Layout:
        partition = self.request.layer_partition
        return Layout(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            expert=expert,
            decode_context=self.request.decode_context,
            layer_partition=partition if partition is not None and len(partition) == pipeline else None,
            draft_tensor=self.engine.layout.draft_tensor,
            eplb=self.engine.layout.eplb,
            redundant_experts=self.engine.layout.redundant_experts,
            adaptive=self.engine.layout.adaptive,
        )

    def layouts(self, tensor: int, pipeline: int = 1, data: int = 1) -> Iterator[Layout]:
        """The layouts of these sizes that keep the rules: shards of experts before whole ones, unless data-parallel."""
        request = self.request
        if (
            (request.tensor or tensor) != tensor
            or (request.pipeline or pipeline) != pipeline
            or (self.model.is_moe and (request.data or data) != data)
            or pipeline > self.model.layers
        ):
            return
        if request.expert is not None:
            choices = [request.expert]
        elif not self.model.is_moe or tensor * data == 1:
            choices = [False]
        else:
            choices = [True] if data > 1 else [False, True]
        for expert in choices:
            # A rank without any expert would be a mistake.
            if expert and self.model.is_moe and tensor * data > self.model.experts:
                continue
            layout = self.layout(tensor, pipeline, data, expert)
            if holds(self.model, layout):
                yield layout

    @staticmethod
    def unit(layout: Layout) -> tuple[int, int]:
        """GPUs that must share a node, and how many such groups an engine has."""
        if layout.data > 1:
            return layout.tensor * layout.pipeline, layout.data
        return layout.tensor, layout.pipeline

    def units(self, layout: Layout) -> tuple[int, int, bool]:
        """The same, and whether each node gives as many groups; a pinned tensor size may need several nodes."""
        unit, units = self.unit(layout)
        if layout.tensor > self.room:
            return 1, layout.world * layout.data, True
        return unit, units, self.equal or layout.data > 1

    def engines_inside(self, layout: Layout, card: Card) -> int:
        """Engines that fit into single nodes."""
        world = layout.world * layout.data
        return sum(number * (size // world) for size, number in self.sizes[card].items())

    def engines(self, layout: Layout, card: Card) -> int:
        inside = self.engines_inside(layout, card)
        if inside or len(self.by_card[card]) < 2:
            return inside
        unit, units, equal = self.units(layout)
        return count(self.by_card[card], unit, units, equal=equal) if self._may_span(layout) else 0

    def _may_span(self, layout: Layout) -> bool:
        # Ranks with experts exchange tokens in every layer; without Ray they also meet without it.
        return layout.data == 1 or (self.fast and self.request.executor != "ray")

    # Fleets

    def fleet(self, layout: Layout, engines: int | None = None) -> Fleet | None:
        """As many of these engines as the nodes hold, on every type of GPU where they fit."""
        numbers = {card: number for card in self.by_card if (number := self.engines(layout, card))}
        while numbers:
            available = sum(numbers.values())
            if available < (self.fixed or 1):
                return None
            schedulers = min(available, engines or self.fixed or available) * layout.data
            trials = {card: self.trial(layout, (card,), list(numbers), schedulers) for card in numbers}
            unfit = [card for card, trial in trials.items() if not trial.fits]
            if not unfit:
                return Fleet(layout, trials, numbers, merged=self.merged)
            numbers = {card: number for card, number in numbers.items() if card not in unfit}
        return None

    def enough(self, fleet: Fleet, engines: int) -> bool:
        """Whether so many engines hold the sequences."""
        return self._holds(fleet, engines, fleet.sequences(engines))

    def enough_each(self, fleet: Fleet, engines: int) -> bool:
        """The same, where every engine holds as much as the others get."""
        return self._holds(fleet, engines, fleet.even(engines))

    def _holds(self, fleet: Fleet, engines: int, held: float) -> bool:
        if self.need is None:
            return held >= FLOOR * engines * fleet.layout.data
        return min(held, fleet.slots(engines)) >= self.need

    def all(self, fleet: Fleet) -> int:
        return self.fixed or fleet.available

    # Objectives

    def choose(self) -> tuple[Fleet, int] | None:
        """The fleet for the objective, and how many of its engines to run; None when nothing fits."""
        found = self.objective()
        if found is None and self.request.context_length is None:
            longest = self.longest()
            if longest is not None:
                whole = self.length
                self.length = longest
                self.failed.clear()
                found = self.objective()
                self.shortened = f"context_length: auto gives {longest} of the model's {whole} tokens"
        return found

    def objective(self) -> tuple[Fleet, int] | None:
        return {"throughput": self.throughput, "latency": self.latency, "capacity": self.capacity}[
            self.request.objective
        ]()

    def inside(self) -> list[Layout]:
        """Every layout of one engine inside a node."""
        found = []
        for world in range(1, self.room + 1):
            if not self.model.is_moe:
                pinned = self.request.pipeline
                sizes = (size for size in self.tensors if world % size == 0 and pinned in (None, world // size))
                tensor = next(sizes, None)
                if tensor is not None:
                    found += list(self.layouts(tensor, world // tensor))
                continue
            for tensor in self.tensors:
                if world % tensor == 0:
                    rest = world // tensor
                    data = self.request.data
                    # Pinned ranks leave stages as the only way to more GPUs.
                    stages = self.request.pipeline or (rest // data if data and rest % data == 0 else 1)
                    if rest % stages == 0:
                        found += list(self.layouts(tensor, stages, rest // stages))
        return found

    def useful(self, layout: Layout, engines: int) -> float:
        """Schedulers that have work: more than there are sequences would idle."""
        schedulers = min(engines, self.fixed or engines) * layout.data
        return min(schedulers, math.inf if self.need is None else self.need)

    def ranked(self) -> list[tuple[float, Layout]]:
        """Layouts inside a node by the schedulers that they could have, best first."""
        found = []
        for layout in self.inside():
            engines = sum(self.engines_inside(layout, card) for card in self.by_card)
            if engines >= (self.fixed or 1):
                bound = self.useful(layout, engines)
                rank = (bound, -layout.pipeline, layout.world * layout.data, layout.tensor, not layout.expert)
                found.append((rank, bound, layout))
        found.sort(key=lambda item: item[0], reverse=True)
        return [(bound, layout) for _, bound, layout in found]

    def throughput(self) -> tuple[Fleet, int] | None:
        """The most engines (or data-parallel ranks) that together still hold the sequences."""
        best: tuple[float, Fleet] | None = None
        # Holds what is asked, but only if engines on smaller GPUs get less than the others.
        uneven: Fleet | None = None
        widest: Fleet | None = None
        for bound, layout in self.ranked():
            if best is not None and bound <= best[0]:
                break
            fleet = self.fleet(layout)
            if fleet is None:
                continue
            engines = self.all(fleet)
            if not self.enough(fleet, engines):
                self.narrow.append((layout, engines, fleet.sequences(engines)))
                if widest is None or self._served(fleet) > self._served(widest):
                    widest = fleet
                continue
            if not self.enough_each(fleet, engines):
                uneven = uneven or fleet
                continue
            value = self.useful(layout, engines)
            if best is None or value > best[0]:
                best = value, fleet
        inside = uneven if best is None else best[1]
        if inside is not None:
            return inside, self.all(inside)
        across = self._fuller(self.across(lambda fleet: self.enough(fleet, self.all(fleet))))
        if across is not None and (widest is None or self._reaches(across, widest)):
            widest = across
        widest = widest or self.unequal()
        return None if widest is None else (widest, self.all(widest))

    def _served(self, fleet: Fleet) -> tuple[float, float]:
        """Sequences of what is asked that run at once, and the room for more."""
        engines = self.all(fleet)
        held = fleet.sequences(engines)
        return (held if self.need is None else min(held, fleet.slots(engines))), held

    def _fuller(self, found: Fleet | None) -> Fleet | None:
        """Engines over more nodes where these leave some idle and wider ones have more data-parallel ranks at work."""
        if found is None or found.trials is None or found.layout.data == 1 or not self.enough(found, self.all(found)):
            return found
        card = next(iter(found.numbers))
        nodes = len(self.by_card[card])
        fewest = used = self.nodes_of(found)

        def worth(fleet: Fleet) -> tuple[float, float]:
            return self.useful(fleet.layout, self.all(fleet)), fleet.sequences(self.all(fleet))

        for number in range(fewest + 1, min(nodes, max(2 * fewest, _WIDE)) + 1):
            if used * self.all(found) >= nodes:
                break
            for layout in self.layouts_across(card, number):
                fleet = self.fleet(layout) if layout.data > 1 else None
                if fleet is None or fleet.trials is None or not self.enough(fleet, self.all(fleet)):
                    continue
                if all(more > less for more, less in zip(worth(fleet), worth(found), strict=True)):
                    found, used = fleet, number
                break
        return found

    def nodes_of(self, fleet: Fleet) -> int:
        """Nodes of one engine, which takes as many GPUs of each."""
        unit, units, equal = self.units(fleet.layout)
        card = next(iter(fleet.numbers))
        placed = pack(self.by_card[card], unit, units, equal=equal)
        return len(by_node(placed[0])) if placed else 1

    def _reaches(self, across: Fleet, inside: Fleet) -> bool:
        """Whether engines over several nodes hold what those inside of one don't, or at least much more of it."""
        engines = self.all(across)
        return self.enough(across, engines) or across.sequences(engines) > _FARTHER * inside.sequences(self.all(inside))

    def latency(self) -> tuple[Fleet, int] | None:
        """The largest tensor size inside a node, and no more engines than the sequences need."""
        engines = self.fixed or 1
        fleets = (self.fleet(layout, engines) for layout in self._fast_inside())
        fleet = next((found for found in fleets if found is not None), None)
        fleet = fleet or self.across(lambda found: True, data=self.request.data is not None) or self.unequal()
        if fleet is None:
            return None
        if self.fixed is None and self.need is not None:
            while engines < fleet.available and (held := fleet.sequences(engines)) < self.need:
                engines = min(fleet.available, max(engines + 1, math.ceil(engines * self.need / max(held, 1))))
        if engines > 1:
            # Each of several engines serves only its share.
            fleet = self.fleet(fleet.layout, engines) or fleet
        return fleet, engines

    def _fast_inside(self) -> Iterator[Layout]:
        """Engines inside a node by speed: the largest tensor size first, stages only where more GPUs are needed."""
        data = (self.request.data or 1) if self.model.is_moe else 1
        most = 0
        for tensor in self.tensors:
            for stages in [self.request.pipeline] if self.request.pipeline else range(1, self.room // tensor + 1):
                # A smaller tensor size only where it reaches more GPUs.
                if tensor * stages <= most:
                    continue
                found = [each for each in self.layouts(tensor, stages, data) if self._inside(each) >= (self.fixed or 1)]
                yield from found
                most = tensor * stages if found else most

    def _inside(self, layout: Layout) -> int:
        return sum(self.engines_inside(layout, card) for card in self.by_card)

    def capacity(self) -> tuple[Fleet, int] | None:
        """The longest context and the most room in one engine, over the fewest nodes that give the whole context."""
        best: tuple[tuple[float, ...], Fleet] | None = None
        layouts = [each for each in self.inside() if self._inside(each) >= (self.fixed or 1)]
        sizes = {size for sizes in self.sizes.values() for size in sizes}
        # Half of a node's GPUs only hold less; pinned sizes may leave no other choice.
        whole = [each for each in layouts if any(size // (each.world * each.data) == 1 for size in sizes)]
        for layout in whole or layouts:
            fleet = self.fleet(layout, self.fixed or 1)
            if fleet is None or fleet.trials is None:
                continue
            held, tokens = max((trial.sequences, trial.tokens) for trial in fleet.trials.values())
            wanted = float(FLOOR * layout.data) if self.need is None else float(self.need)
            rank = (min(held / wanted, 1.0), tokens, -layout.pipeline, layout.tensor, not layout.expert)
            if best is None or rank > best[0]:
                best = rank, fleet
        found = None if best is None else best[1]
        if found is None or not self.enough(found, 1):
            across = self.across(lambda fleet: self.enough(fleet, 1))
            if across is not None and (found is None or across.sequences(1) > found.sequences(1)):
                found = across
        found = found or self.unequal()
        return None if found is None else (found, self.all(found))

    def runner_up(self, chosen: Layout) -> tuple[Fleet, int] | None:
        """The layout that would have come next, with its engines; the first few that differ in size are tried."""
        objective = self.request.objective
        if objective == "throughput":
            layouts = [layout for _, layout in self.ranked()]
        elif objective == "latency":
            data = (self.request.data or 1) if self.model.is_moe else 1
            layouts = [each for tensor in self.tensors if tensor <= self.room for each in self.layouts(tensor, 1, data)]
        else:
            layouts = sorted(self.inside(), key=lambda each: (-each.world * each.data, each.pipeline, -each.tensor))
        # Layouts that leave GPUs idle come last, for they are seldom meant.
        layouts.sort(key=self._busy, reverse=True)
        found: list[tuple[Fleet, int]] = []
        sizes = {(chosen.tensor, chosen.pipeline, chosen.data)}
        for layout in layouts:
            size = (layout.tensor, layout.pipeline, layout.data)
            if size in sizes or len(sizes) > _OTHERS:
                continue
            sizes.add(size)
            fleet = self.fleet(layout, (self.fixed or 1) if objective != "throughput" else None)
            if fleet is not None and fleet.trials is not None:
                found.append((fleet, self.all(fleet) if objective == "throughput" else self.fixed or 1))
        if objective == "latency":
            return found[0] if found else None
        return max(found, key=lambda each: (self.enough(*each), self._value(*each)), default=None)

    def _busy(self, layout: Layout) -> int:
        """GPUs that engines inside nodes would use."""
        if self.request.objective == "latency":
            return 0
        return sum(self.engines_inside(layout, card) for card in self.by_card) * layout.world * layout.data

    def _value(self, fleet: Fleet, engines: int) -> tuple[float, float]:
        useful = self.useful(fleet.layout, engines) if self.request.objective == "throughput" else 0.0
        return useful, fleet.sequences(engines)

    # Engines over several nodes

    def layouts_across(self, card: Card, nodes: int, *, data: bool = True) -> list[Layout]:
        """Layouts of an engine over so many of the largest nodes of one type, best first for the objective."""
        sizes = self._descending[card][:nodes]
        least = sizes[-1]
        found: list[Layout] = []
        if self.model.is_moe and data and self.fast and self.request.executor != "ray":
            # Data-parallel ranks need as many GPUs on each node.
            tensors = sorted(size for size in self.tensors if size <= least)
            if self.request.objective == "capacity":
                tensors.reverse()
            for tensor in tensors:
                ranks = nodes * (least // (tensor * (self.request.pipeline or 1)))
                if (pinned := self.request.data) is not None:
                    ranks = pinned if pinned <= ranks and pinned % nodes == 0 else 0
                if ranks > 1:
                    found += list(self.layouts(tensor, self.request.pipeline or 1, ranks))
        options = []
        for tensor in self.tensors:
            slots = nodes * (least // tensor) if self.equal else sum(size // tensor for size in sizes)
            if tensor > self.room:
                # Pinned, over a fabric that carries it.
                slots = nodes * least // tensor if self.fast else 0
            stages = self.request.pipeline or min(slots, self.model.layers)
            if 0 < stages <= slots:
                options += [(-layout.world, -tensor, layout) for layout in self.layouts(tensor, stages)]
        options.sort(key=lambda item: item[:2])
        return found + [layout for _, _, layout in options[:2]]

    @cached_property
    def _descending(self) -> dict[Card, list[int]]:
        return {card: sorted(sizes.elements(), reverse=True) for card, sizes in self.sizes.items()}

    def across(self, good: Callable[[Fleet], bool], *, data: bool = True) -> Fleet | None:
        """An engine over the fewest nodes of one type that is good; else the one that holds the most."""
        best: Fleet | None = None
        for card in sorted(self.by_card, key=lambda card: (-card.memory_total_mib, card.name)):
            found = self._across(card, good, data=data)
            if found is not None and good(found):
                return found
            if found is not None and (best is None or found.sequences(1) > best.sequences(1)):
                best = found
        return best

    def _across(self, card: Card, good: Callable[[Fleet], bool], *, data: bool) -> Fleet | None:
        last = min(len(self.by_card[card]), _MAX_NODES)
        tried: dict[int, Fleet | None] = {}

        def at(nodes: int) -> Fleet | None:
            if nodes not in tried:
                fleets = (self.fleet(layout) for layout in self.layouts_across(card, nodes, data=data))
                usable = [fleet for fleet in fleets if fleet is not None]
                tried[nodes] = next((fleet for fleet in usable if good(fleet)), None) or max(
                    usable, key=lambda fleet: fleet.sequences(self.all(fleet)), default=None
                )
            return tried[nodes]

        def fine(nodes: int) -> bool:
            fleet = at(nodes)
            return fleet is not None and good(fleet)

        nodes = _smallest(2, last, fine)
        if nodes is not None:
            return at(nodes)
        rest = [fleet for fleet in tried.values() if fleet is not None]
        return max(rest, key=lambda fleet: fleet.sequences(self.all(fleet)), default=None)

    def unequal(self) -> Fleet | None:
        """One engine over GPUs of several types: each stage gets the layers that its memory holds."""
        if len(self.by_card) < 2 or self.merged or (self.fixed or 1) > 1 or (self.request.data or 1) > 1:
            return None
        ordered = sorted(self.pools, key=lambda pool: (-pool.card.memory_total_mib, -len(pool.gpus), pool.order))
        tried: dict[int, Fleet | None] = {}

        def at(number: int) -> Fleet | None:
            if number not in tried:
                tried[number] = self._unequal(ordered[:number])
            return tried[number]

        found = _smallest(2, min(len(ordered), self.model.layers, _MAX_NODES), lambda number: at(number) is not None)
        return None if found is None else at(found)

    def _unequal(self, found: Sequence[Pool]) -> Fleet | None:
        options = []
        for tensor in self.tensors:
            slots = [len(pool.gpus) // tensor for pool in found]
            stages = self.request.pipeline or min(sum(slots), self.model.layers)
            if self.equal and self.request.pipeline is None:
                stages = min(slots) * len(slots)
            if 0 < stages <= sum(slots):
                options += [(-layout.world, -tensor, layout) for layout in self.layouts(tensor, stages)]
        options.sort(key=lambda item: item[:2])
        for _, _, layout in options[:2]:
            placed = pack(found, layout.tensor, layout.pipeline, equal=self.equal)
            # An engine that stays on one type was tried already.
            if not placed or len({share.pool.card for share in placed[0]}) < 2:
                continue
            if self.equal and len({len(gpus) for gpus in by_node(placed[0]).values()}) > 1:
                continue
            trial = self.balanced(layout, stage_cards(placed[0], layout.tensor))
            if trial is not None:
                smallest = min(trial.cards, key=lambda card: (card.memory_total_mib, card.name))
                return Fleet(trial.layout, {smallest: trial}, {smallest: 1}, mixed=placed[0])
        return None

    def balanced(self, layout: Layout, stages: tuple[Card, ...]) -> Trial | None:
        """Layers by the memory of each stage, then moved from the tightest to the roomiest stage while that helps."""
        if layout.layer_partition is not None:
            trial = self.trial(layout, stages, stages, 1)
            return trial if trial.fits else None
        counts = _proportional(self.model.layers, [visible_gib(card) for card in stages])
        best: Trial | None = None
        for _ in range(_MOVES):
            trial = self.trial(replace(layout, layer_partition=tuple(counts)), stages, stages, 1)
            if best is not None and (trial.fits, trial.tokens) <= (best.fits, best.tokens):
                break
            best = trial
            ranks = trial.figures["ranks"]
            if len(ranks) != len(counts):
                break
            room = [rank["kv_cache_gib"] / layers for rank, layers in zip(ranks, counts, strict=True)]
            tightest = min((index for index in range(len(counts)) if counts[index] > 1), key=lambda i: room[i])
            roomiest = max(range(len(counts)), key=lambda index: room[index])
            if tightest == roomiest:
                break
            counts = list(counts)
            counts[tightest] -= 1
            counts[roomiest] += 1
        return best if best is not None and best.fits else None

    # The longest context

    def largest(self) -> list[tuple[Layout, Card]]:
        """The engines with the most memory a sequence, over all nodes and inside one."""
        found: list[tuple[Layout, Card]] = []
        for card in self.by_card:
            sizes = self._descending[card]
            for nodes in range(min(len(sizes), self.model.layers, _MAX_NODES), 1, -1):
                layouts = [each for each in self.layouts_across(card, nodes) if self.engines(each, card)]
                if layouts:
                    found += [(layout, card) for layout in layouts[:4]]
                    break
            worlds = [layout for layout in self.inside() if self.engines_inside(layout, card) >= (self.fixed or 1)]
            worlds.sort(key=lambda layout: (-layout.world * layout.data, layout.pipeline, layout.data, layout.expert))
            found += [(layout, card) for layout in worlds[:4]]
        return found

    def longest(self) -> int | None:
        """The longest context of any engine, less a reserve; None when not even a short one fits."""
        best = 0
        for layout, card in self.largest():
            knobs = self.knobs(layout, [card], self.all_schedulers(layout))
            best = max(best, self.longest_of(layout, (card,), knobs))
        if not best and (found := self._unequal_at(MIN_CONTEXT)) is not None:
            best = self.longest_of(found.layout, found.cards, found.knobs)
        best = int(best * (1 - RESERVE)) // 16 * 16
        return best if best >= MIN_CONTEXT else None

    def _unequal_at(self, length: int) -> Trial | None:
        whole, self.length = self.length, length
        fleet = self.unequal()
        self.length = whole
        return None if fleet is None or not fleet.trials else next(iter(fleet.trials.values()))

    def all_schedulers(self, layout: Layout) -> int:
        return max(1, sum(self.engines(layout, card) for card in self.by_card)) * layout.data

    def longest_of(self, layout: Layout, cards: tuple[Card, ...], knobs: Knobs, **more: Any) -> int:
        """The longest context of an engine that fits, up to the wanted one."""

        def fits(length: int) -> bool:
            return bool(self.price(layout, cards, replace(knobs, length=length), **more)["fits"])

        figures = self.price(layout, cards, replace(knobs, length=self.length), **more)
        if figures["fits"]:
            return self.length
        said = re.search(r"estimated maximum model length is (\d+)", str(figures["error"]))
        low, high = 0, self.length
        if said and 0 < int(said[1]) < high:
            if fits(int(said[1])):
                return int(said[1])
            high = int(said[1])
        if not fits(MIN_CONTEXT):
            return 0
        low = MIN_CONTEXT
        while high - low > max(16, low // 200):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # Without prices

    def unpriced(self) -> tuple[Fleet, int] | None:
        """By the rules alone: as much memory as the nodes have, or one node for latency."""
        layouts: list[Layout] = []
        if self.request.objective == "latency":
            layouts += self._fast_inside()
        for card in sorted(self.by_card, key=lambda card: (-card.memory_total_mib, card.name)):
            for nodes in range(min(len(self.by_card[card]), self.model.layers, _MAX_NODES), 1, -1):
                layouts += self.layouts_across(card, nodes, data=False)
                if layouts and not self.fixed:
                    break
        inside = self.inside()
        inside.sort(key=lambda each: (each.data, -each.world, each.pipeline, each.expert))
        if self.request.pipeline or self.request.tensor:
            # Pinned sizes stay on one node where they can.
            layouts = inside + layouts
        for layout in layouts + inside:
            numbers = {card: number for card in self.by_card if (number := self.engines(layout, card))}
            if sum(numbers.values()) >= (self.fixed or 1):
                return Fleet(layout, None, numbers, merged=self.merged), self.fixed or 1
        return None


def _smallest(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The smallest number from `low` to `high` that is good, when larger ones are good too."""
    if high < low:
        return None
    below, step = low - 1, low
    while not good(step):
        if step >= high:
            return None
        below, step = step, min(2 * step, high)
    while step - below > 1:
        middle = (below + step) // 2
        below, step = (below, middle) if good(middle) else (middle, step)
    return step


def _proportional(layers: int, weights: Sequence[float]) -> list[int]:
    """Layers in proportion to weights, at least one each."""
    total = sum(weights)
    exact = [layers * weight / total for weight in weights]
    counts = [max(1, math.floor(value)) for value in exact]
    while sum(counts) > layers:
        counts[max(range(len(counts)), key=lambda index: (counts[index] - exact[index], counts[index]))] -= 1
    while sum(counts) < layers:
        counts[max(range(len(counts)), key=lambda index: exact[index] - counts[index])] += 1
    return counts
