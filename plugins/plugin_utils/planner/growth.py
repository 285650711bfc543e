"""What an instance needs when more sequences are in flight: nodes of the kind it has today, planned again.

Nothing here knows how a plan is made: the planner is asked with more and more copies of the nodes until the sequences
have room. The unit of capacity is one sequence of the planned context length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import PlannerError
from .plan import plan
from .report import FLAGS, engines

Planner = Callable[..., dict[str, Any]]

# Beyond these the question is no longer about an instance of this cluster, and the search must end.
MAX_NODES = 1024
MAX_PLANS = 24
MIN_FACTOR = 1.0
MAX_FACTOR = 1000.0
# How often the nodes may double without any gain before the search gives up.
_PATIENCE = 2
# How many times as many nodes engines like today's may take before engines over more nodes are the better answer.
_WORTH = 2
# Engines that are surer of less than this part of their room are so tight that larger ones may hold much more.
_TIGHT = 0.97


class _Search:
    """Plans for growing numbers of nodes, each made once."""

    def __init__(
        self,
        config: Mapping[str, Any],
        nodes: Sequence[Mapping[str, Any]],
        template: Sequence[Mapping[str, Any]],
        request: Mapping[str, Any],
        target: int,
        *,
        planner: Planner,
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._template = template
        self._request = request
        self._target = target
        self._planner = planner
        self._known: dict[int, dict[str, Any] | None] = {}
        self.error = ""

    def plan(self, count: int) -> dict[str, Any] | None:
        """The plan on `count` nodes, or None when the planner refuses."""
        if count not in self._known:
            try:
                self._known[count] = self._planner(self._config, [*self._nodes, *self.new(count)], **self._request)
            except PlannerError as error:
                self._known[count] = None
                self.error = str(error)
        return self._known[count]

    def new(self, count: int) -> list[Mapping[str, Any]]:
        """What stands beside today's nodes: copies of those in use, in turn. No host name holds a blank, so the names
        are free.
        """
        found: list[Mapping[str, Any]] = []
        for extra in range(count - len(self._nodes)):
            node = self._template[extra % len(self._template)]
            found.append({**node, "name": f"{node['name']} copy {extra // len(self._template) + 1}"})
        return found

    def capacity(self, count: int) -> float:
        found = self.plan(count)
        return 0.0 if found is None else capacity(found)

    def smallest(self, guess: int, most: int = MAX_NODES, widest: int = MAX_NODES) -> int | None:
        """The smallest number of nodes, from today's to `most`, that holds the target, with `widest` nodes an engine.

        Doubles from today's, jumping ahead to `guess` (capacity grows almost in proportion), then halves the interval.
        """

        def holds(count: int) -> bool:
            found = self.plan(count)
            return found is not None and spread(found) <= widest and capacity(found) >= self._target

        low = len(self._nodes)
        if holds(low):
            return low
        high, best, idle = max(low + 1, guess), self.capacity(low), 0
        while not holds(min(high, most)):
            reached = self.capacity(min(high, most))
            idle = 0 if reached > best else idle + 1
            if high >= most or idle >= _PATIENCE or len(self._known) >= MAX_PLANS // 2:
                return None
            low, high, best = high, 2 * high, max(best, reached)
        high = min(high, most)
        # A good guess is exact or one too many: look there first.
        probe = high - 1
        while high - low > 1 and len(self._known) < MAX_PLANS:
            if holds(probe):
                high = probe
            else:
                low = probe
            probe = (low + high) // 2
        return high


def grow(
    config: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    request: Mapping[str, Any],
    today: Mapping[str, Any],
    factor: float,
    *,
    planner: Planner = plan,
) -> dict[str, Any]:
    """What `factor` times as many sequences of the same length need.

    `config`, `nodes` and `request` are what the planner was given, `today` is its answer.
    """
    check_factor(factor)
    answer: dict[str, Any] = {
        "factor": float(factor),
        "base": "concurrency" if request.get("concurrency") else "max_concurrency",
        "context_length": today["max_model_len"],
        "concurrency": {"today": None, "then": None},
        "today": _described(today),
        "then": None,
        "add": None,
        "added": [],
        "changes": [],
        "note": "",
        "problem": "",
    }
    if not today["estimate"]:
        return {**answer, "problem": "memory is not estimated for this instance, so growth can't be"}
    base = int(request.get("concurrency") or math.floor(room(today)))
    target = math.ceil(base * factor)
    answer["concurrency"] = {"today": base, "then": target}
    if target < 1:
        return {**answer, "problem": "the plan of today holds not even one sequence"}
    asked = {**request, "context_length": today["max_model_len"], "concurrency": target}
    used = _used(today)
    template = [node for node in nodes if node["name"] in used]
    search = _Search(config, nodes, template, asked, target, planner=planner)
    guess = len(nodes)
    if sure(today) > _TIGHT * room(today):
        guess += math.ceil(len(template) * (target / max(sure(today), 1.0) - 1))
    fewer = search.smallest(guess)
    # Engines over no more nodes than today's answer faster; they are worth some nodes more.
    alike = None if fewer is None else search.smallest(fewer, _WORTH * fewer, spread(today))
    count = fewer if alike is None else alike
    if count is not None and (found := search.plan(count)) is not None:
        return {**answer, **_compared(today, found, search.new(count)), "note": _fewer(search, fewer, count)}
    return {**answer, **_side_by_side(today, target, nodes, template, search.error)}


def check_factor(factor: float) -> None:
    """Raise unless the factor can be searched."""
    known = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not known or not MIN_FACTOR <= factor <= MAX_FACTOR:
        raise PlannerError(
            f"plan_growth = {factor!r} is not a factor between {MIN_FACTOR:g} and {MAX_FACTOR:g}.",
            "Give the factor by which concurrency grows, for example 6.",
            "plan_growth",
        )


def room(found: Mapping[str, Any]) -> float:
    """Sequences of full length that the KV caches of all engines hold."""
    figures = found["estimate"]
    if found.get("sequences") is not None:
        return float(found["sequences"])
    return engines(found) * float(figures["max_concurrency"] or 0.0) if figures else 0.0


def sure(found: Mapping[str, Any]) -> float:
    """The same at the lower end of the estimate's margin."""
    return room(found) * (1 - float((found["estimate"] or {}).get("margin") or 0.0))


def capacity(found: Mapping[str, Any]) -> float:
    """Sequences of full length that run at once: they need room, and slots of the schedulers."""
    slots = found.get("max_num_seqs")
    return sure(found) if slots is None else min(sure(found), engines(found) * float(slots))


def spread(found: Mapping[str, Any]) -> int:
    """Nodes of the engine that is on the most of them."""
    return max(len(replica["nodes"]) for replica in found["replicas"])


def _fewer(search: _Search, fewer: int | None, count: int) -> str:
    """What would do with fewer nodes, where the engines are over more of them each."""
    found = search.plan(fewer) if fewer is not None and fewer < count else None
    if found is None:
        return ""
    tensor, pipeline, data = (found[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "data"))
    sizes = f"tensor {tensor} x pipeline {pipeline}" + (f" x data {data}" if data > 1 else "")
    return (
        f"{_described(found)['nodes']} nodes would hold them too, with engines of {sizes} over {spread(found)} nodes "
        "each, which wait for the network between them"
    )


def _used(found: Mapping[str, Any]) -> dict[str, int]:
    """GPUs in use on each node."""
    used: dict[str, int] = {}
    for replica in found["replicas"]:
        for name, gpus in replica["gpus"].items():
            used[name] = used.get(name, 0) + len(gpus)
    return used


def _described(found: Mapping[str, Any]) -> dict[str, Any]:
    used = _used(found)
    return {
        "nodes": len(used),
        "gpus": sum(used.values()),
        "replicas": len(found["replicas"]),
        "capacity": round(room(found), 2),
    }


def _compared(today: Mapping[str, Any], found: Mapping[str, Any], new: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    changes = [
        {"flag": flag, "today": today.get(flag), "then": found.get(flag)}
        for flag in FLAGS
        if today.get(flag) != found.get(flag)
    ]
    return {
        "then": _described(found),
        "add": {"nodes": len(new), "gpus": sum(len(node["gpus"]) for node in new)},
        "added": _kinds(new),
        "changes": changes,
    }


def _side_by_side(
    today: Mapping[str, Any],
    target: int,
    nodes: Sequence[Mapping[str, Any]],
    template: list[Mapping[str, Any]],
    error: str,
) -> dict[str, Any]:
    """When one instance can't grow by nodes (its objective or its pins hold it): several instances like today's."""
    now = _described(today)
    if sure(today) < 1:
        return {"problem": error or "more nodes of this kind do not make room for more sequences"}
    times = math.ceil(target / sure(today))
    if now["nodes"] * times > MAX_NODES:
        return {"problem": f"more than {MAX_NODES} nodes of this kind would be needed"}
    used = _used(today)
    # Instances that one set of such nodes carries, and sets that stand there already.
    fit = max(1, min(len(node["gpus"]) // used[node["name"]] for node in template))
    sets = math.ceil(times / fit)
    new = max(0, sets - len(nodes) // len(template))
    return {
        "then": {
            "nodes": sets * len(template),
            "gpus": times * now["gpus"],
            "replicas": times * now["replicas"],
            "capacity": round(times * room(today), 2),
        },
        "add": {"nodes": new * len(template), "gpus": new * sum(len(node["gpus"]) for node in template)},
        "added": _kinds(template * new),
        "note": (
            f"more nodes do not widen this instance (its objective and pinned sizes hold it): run {times} instances "
            "like today's side by side"
        ),
    }


def _kinds(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """2 nodes with 8 x NVIDIA H200."""
    counts: dict[str, int] = {}
    for node in nodes:
        gpus: dict[str, int] = {}
        for gpu in node["gpus"]:
            gpus[str(gpu["name"])] = gpus.get(str(gpu["name"]), 0) + 1
        text = ", ".join(f"{count} x {name}" for name, count in gpus.items())
        counts[text] = counts.get(text, 0) + 1
    return [f"{count} node{'s' if count > 1 else ''} with {text}" for text, count in counts.items()]
