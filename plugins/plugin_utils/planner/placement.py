"""Nodes, their GPUs, and how engines are laid over them.

Everything here depends on the set of nodes only, never on the order in which they are listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .engine import Card
from .errors import PlannerError, short

# More than any cluster has; a larger list is a mistake and would only cost time.
MAX_GPUS = 65536
# GPU types that are told apart; cards beyond that share the figures of the smallest of their neighbours.
MAX_KINDS = 6
# Cards of one name whose memory differs by less count as one type: drivers report the same card slightly differently.
_SAME_MEMORY = 0.98
# A fabric fast enough to carry an exchange for every layer between nodes.
_FAST_FABRICS = ("infiniband", "roce")
_INTRA = ("nvlink", "pcie")
_INTER = ("infiniband", "roce", "tcp")


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_total_mib: float


@dataclass(frozen=True)
class Node:
    name: str
    gpus: tuple[Gpu, ...]
    inter_node: str = "tcp"
    intra_node: str = "nvlink"


@dataclass(frozen=True)
class Pool:
    """The GPUs of one type in one node. `card` is the smallest that counts as this type, `order` is
    the node's place in the natural order of names."""

    order: int
    node: Node
    card: Card
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Share:
    """The GPUs that one engine takes from a pool, in the order of its ranks."""

    pool: Pool
    gpus: tuple[Gpu, ...]


Placed = tuple[Share, ...]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """n2 before n10, and a total order for any names."""
    key = []
    for part in re.split(r"(\d+)", name):
        if part.isdecimal() and part.isascii():
            digits = part.lstrip("0")
            # By length first: a number of any size is compared without being converted.
            key.append((0, len(digits), digits))
        else:
            key.append((1, 0, part))
    return [*key, (-1, 0, name)]


def parse_nodes(nodes: Any) -> list[Node]:
    """Check the list of nodes; sorted by name."""
    if isinstance(nodes, str | bytes | Mapping) or not isinstance(nodes, Sequence) or not nodes:
        raise PlannerError("nodes is not a list of nodes.", "Give one dictionary a node: name and gpus.", "nodes")
    left = MAX_GPUS
    parsed = []
    for node in nodes:
        if not isinstance(node, Mapping) or not isinstance(node.get("name"), str) or not node["name"]:
            raise PlannerError(f"nodes: {short(node)} is no node.", "A node needs a name and gpus.", "nodes")
        found = _node(node, left)
        # A node counts even without GPUs, so that a list of empty nodes ends too.
        left -= max(1, len(found.gpus))
        if left < 0:
            raise PlannerError(f"nodes lists more than {MAX_GPUS} GPUs.", "Plan parts of the cluster.", "nodes")
        parsed.append(found)
    keyed = sorted(((natural_key(node.name), node) for node in parsed), key=lambda item: item[0])
    for (_, first), (_, second) in pairwise(keyed):
        if first.name == second.name:
            raise PlannerError(f"node {short(first.name)} is listed twice.", "Name each node once.", "nodes")
    return [node for _, node in keyed]


def _node(node: Mapping[str, Any], left: int) -> Node:
    name = node["name"] if len(node["name"]) <= 253 else short(node["name"])
    listed = node.get("gpus") or []
    if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Sequence):
        raise PlannerError(
            f"node {name}: gpus = {short(listed)} is not a list.", "Give one entry a GPU.", f"nodes.{name}.gpus"
        )
    if len(listed) > left:
        raise PlannerError(f"nodes lists more than {MAX_GPUS} GPUs.", "Plan parts of the cluster.", "nodes")
    gpus = tuple(_gpu(name, position, gpu) for position, gpu in enumerate(listed))
    if len({gpu.index for gpu in gpus}) < len(gpus):
        raise PlannerError(f"node {name}: two GPUs have the same index.", "Number them from 0.", f"nodes.{name}.gpus")
    fabrics = []
    for key, known in (("inter_node", _INTER), ("intra_node", _INTRA)):
        value = node.get(key)
        if value is not None and value not in known:
            raise PlannerError(
                f"node {name}: {key} = {short(value)} is not known.",
                f"Use one of {', '.join(known)}.",
                f"nodes.{name}.{key}",
            )
        fabrics.append(value)
    return Node(name, tuple(sorted(gpus, key=lambda gpu: gpu.index)), fabrics[0] or "tcp", fabrics[1] or "nvlink")


def _gpu(node: str, position: int, gpu: Any) -> Gpu:
    key = f"nodes.{node}.gpus"
    if not isinstance(gpu, Mapping):
        raise PlannerError(
            f"node {node}: {short(gpu)} is no GPU.", "A GPU is a dictionary of name and memory_total_mib.", key
        )
    mib = gpu.get("memory_total_mib")
    if isinstance(mib, bool) or not isinstance(mib, int | float) or not 0 < mib < 1 << 32 or not math.isfinite(mib):
        raise PlannerError(
            f"node {node}: memory_total_mib = {short(mib)} is not a positive number of MiB.",
            "Give what nvidia-smi prints.",
            key,
        )
    index = gpu.get("index", position)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 1 << 16:
        raise PlannerError(f"node {node}: index = {short(index)} is no number of a GPU.", "Count from 0.", key)
    name = gpu.get("name")
    if name is not None and (not isinstance(name, str) or len(name) > 200):
        raise PlannerError(
            f"node {node}: name = {short(name)} is no name of a GPU.", "Give what nvidia-smi prints.", key
        )
    return Gpu(index, name or "", mib)


def spans_nodes(nodes: Iterable[Node]) -> bool:
    """Whether the fabric between these nodes can carry tensor parallelism and the exchange of experts."""
    return all(node.inter_node in _FAST_FABRICS for node in nodes)


def cards(nodes: Iterable[Node]) -> dict[tuple[str, float], Card]:
    """The type of every (name, memory) that occurs; at most MAX_KINDS types."""
    seen = sorted({(gpu.name, gpu.memory_total_mib) for node in nodes for gpu in node.gpus})
    groups: list[list[tuple[str, float]]] = []
    for name, memory in seen:
        if groups and groups[-1][0][0] == name and groups[-1][0][1] >= _SAME_MEMORY * memory:
            groups[-1].append((name, memory))
        else:
            groups.append([(name, memory)])
    if len(groups) > MAX_KINDS:
        by_memory = sorted((item for group in groups for item in group), key=lambda item: (item[1], item[0]))
        size = -(-len(by_memory) // MAX_KINDS)
        groups = [by_memory[start : start + size] for start in range(0, len(by_memory), size)]
    types = {}
    for group in groups:
        name, memory = min(group, key=lambda item: (item[1], item[0]))
        for item in group:
            types[item] = Card(name, memory)
    return types


def pools(nodes: Sequence[Node], *, mixed: bool = False) -> list[Pool]:
    """The GPUs of each node by type; with `mixed`, all GPUs of a node count as its smallest type."""
    types = cards(nodes)
    found = []
    for order, node in enumerate(nodes):
        by_card: dict[Card, list[Gpu]] = {}
        for gpu in node.gpus:
            by_card.setdefault(types[gpu.name, gpu.memory_total_mib], []).append(gpu)
        if mixed and by_card:
            smallest = min(by_card, key=lambda card: (card.memory_total_mib, card.name))
            by_card = {smallest: list(node.gpus)}
        for card in sorted(by_card, key=lambda card: (-card.memory_total_mib, card.name)):
            found.append(Pool(order, node, card, tuple(by_card[card])))
    return found


def count(found: Iterable[Pool], unit: int, units: int, *, equal: bool) -> int:
    """How many engines `pack` would lay out."""
    found = list(found)
    inside = sum(len(pool.gpus) // (unit * units) for pool in found)
    return inside or len(pack(found, unit, units, equal=equal))


def pack(found: Sequence[Pool], unit: int, units: int, *, equal: bool) -> list[Placed]:
    """Engines of `units` groups of `unit` GPUs; a group never leaves its node.

    Engines stay inside a node where one can. Otherwise each takes as few nodes as possible, the same number of groups
    from each where that works; with `equal`, only then.
    """
    size = unit * units
    inside: list[Placed] = [
        (Share(pool, pool.gpus[start : start + size]),)
        for pool in found
        for start in range(0, len(pool.gpus) // size * size, size)
    ]
    if inside:
        return inside
    rest = sorted((pool for pool in found if len(pool.gpus) >= unit), key=lambda pool: (-len(pool.gpus), pool.order))
    engines: list[Placed] = []
    start = 0
    while taken := _spread(rest, start, unit, units, equal=equal):
        engines.append(tuple(sorted(taken, key=lambda share: (share.pool.order, share.gpus[0].index))))
        start += len(taken)
    return engines


def _spread(rest: Sequence[Pool], start: int, unit: int, units: int, *, equal: bool) -> list[Share]:
    """The GPUs of one engine over several pools from `start` on, largest pools first; empty when there are too few."""
    slots = 0
    for number in range(1, min(len(rest) - start, units) + 1):
        least = len(rest[start + number - 1].gpus) // unit
        slots += least
        if slots < units:
            continue
        if units % number == 0 and least >= units // number:
            each = units // number * unit
            return [Share(pool, pool.gpus[:each]) for pool in rest[start : start + number]]
        if equal:
            continue
        shares, left = [], units
        for pool in rest[start : start + number]:
            groups = min(left, len(pool.gpus) // unit)
            shares.append(Share(pool, pool.gpus[: groups * unit]))
            left -= groups
        return shares
    return []


def by_node(placed: Placed) -> dict[str, list[int]]:
    """The GPU indices that an engine takes on each node, in the order of its ranks."""
    taken: dict[str, list[int]] = {}
    for share in placed:
        taken.setdefault(share.pool.node.name, []).extend(gpu.index for gpu in share.gpus)
    return taken


def stage_cards(placed: Placed, tensor: int) -> tuple[Card, ...]:
    return tuple(share.pool.card for share in placed for _ in range(len(share.gpus) // tensor))


def names(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more nodes"


def declared(nodes: Sequence[Node]) -> str:
    return names([f"{node.name}: {len(node.gpus)}" for node in nodes])
