"""Brings many bad pairs together, so that one fault is told once: "nobody reaches n7" and not 63 lines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..planner.plan import natural_key

Pair = tuple[str, str]
_SHOWN = 8


@dataclass(frozen=True)
class Group:
    """Pairs that are bad alike. `kind` is one of

    all (every pair), alone (a node, both ways), into (a node, from everywhere), out_of (a node, to everywhere), between
    (two sets, both ways), one_way (from one set to the other).
    """

    kind: str
    sources: list[str]
    targets: list[str]
    pairs: list[Pair] = field(default_factory=list)


def ordered(names: Collection[str]) -> list[str]:
    return sorted(names, key=natural_key)


def shown(names: Collection[str]) -> str:
    """Few names in full; of many the first ones and how many there are."""
    listed = ordered(names)
    if len(listed) <= _SHOWN:
        return ", ".join(listed)
    return f"{', '.join(listed[: _SHOWN - 2])} ... {listed[-1]} ({len(listed)} nodes)"


def grouped(bad: Collection[Pair], tested: Collection[Pair]) -> list[Group]:
    """The bad pairs as few groups. What was not tested neither speaks for a group nor against it."""
    left = set(bad)
    if not left:
        return []
    nodes = ordered({name for pair in tested for name in pair})
    if left >= set(tested) and len(nodes) > 2:
        return [Group("all", nodes, nodes, sorted(left))]
    into: dict[str, set[str]] = {name: set() for name in nodes}
    out: dict[str, set[str]] = {name: set() for name in nodes}
    for source, target in tested:
        out[source].add(target)
        into[target].add(source)
    found = []

    def take(kind: str, name: str, pairs: set[Pair]) -> None:
        sources, targets = {pair[0] for pair in pairs} - {name}, {pair[1] for pair in pairs} - {name}
        if kind == "into":
            group = Group(kind, ordered(sources), [name], sorted(pairs))
        else:
            group = Group(kind, [name], ordered(targets | (sources if kind == "alone" else set())), sorted(pairs))
        found.append(group)
        left.difference_update(pairs)

    # A node that has nobody is told first: the others' sets would otherwise all be different.
    for kind in ("alone", "into", "out_of"):
        for name in nodes:
            inward = {(source, name) for source in into[name]}
            outward = {(name, target) for target in out[name]}
            pairs = {"alone": inward | outward, "into": inward, "out_of": outward}[kind]
            whole = inward and outward if kind == "alone" else True
            # With a single other node, the two are as guilty as each other.
            if whole and len(pairs) > (2 if kind == "alone" else 1) and pairs <= set(bad) and pairs & left:
                take(kind, name, pairs & left)
    return found + _sets(left)


def _sets(left: set[Pair]) -> list[Group]:
    """Targets that the same sources do not reach, together; and both ways where it is so."""
    by_target: dict[str, set[str]] = {}
    for source, target in left:
        by_target.setdefault(target, set()).add(source)
    rectangles: dict[frozenset[str], set[str]] = {}
    for target, sources in by_target.items():
        rectangles.setdefault(frozenset(sources), set()).add(target)
    found = []
    done: set[frozenset[str]] = set()
    for side in sorted(rectangles, key=lambda names: [natural_key(name) for name in ordered(names)]):
        if side in done:
            continue
        other = frozenset(rectangles[side])
        pairs = [(source, target) for source in side for target in other]
        if rectangles.get(other) == set(side):
            done.add(other)
            pairs += [(target, source) for source, target in pairs]
            found.append(Group("between", ordered(side), ordered(other), sorted(pairs)))
        else:
            found.append(Group("one_way", ordered(side), ordered(other), sorted(pairs)))
    return found


def by_value(pairs: Mapping[Pair, str]) -> dict[str, list[Pair]]:
    """Pairs of the same value together."""
    found: dict[str, list[Pair]] = {}
    for pair, value in pairs.items():
        found.setdefault(value, []).append(pair)
    return found


_IRREGULAR = {"are": "is", "were": "was", "do": "does", "have": "has"}


def verb(many: str, number: int) -> str:
    """The form of a verb for so many: they find, but it finds; they do not, but it does not."""
    if number != 1:
        return many
    first, _, rest = many.partition(" ")
    ending = "es" if first.endswith(("ch", "sh", "ss", "x")) else "s"
    return " ".join(filter(None, (_IRREGULAR.get(first, first + ending), rest)))


def do(names: Collection[str], many: str) -> str:
    """Who does something: n1 finds, but n1, n2 find."""
    return f"{shown(names)} {verb(many, len(names))}"


def count(number: int, one: str) -> str:
    """1 node, 2 nodes"""
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def joined(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] if parts else ""
