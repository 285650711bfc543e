"""How far GPUs and RDMA devices of a host are from each other, by the PCI bridges above them.

The classes are those that `nvidia-smi topo -m` prints. They are computed, and not read from it, since it knows adapters
only while a driver of NVIDIA's runs, and names them by numbers of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

# From near to far.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
# Without a host bridge between them: what lets an adapter read a GPU's memory at full speed.
BESIDE = ("PIX", "PXB")


def natural(name: str) -> list[tuple[int, int | str]]:
    """mlx5_10 comes after mlx5_9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[int, int] | None:
    """Class (index in DISTANCES) and number of bridges between two devices; None where the facts do not tell."""
    mine, theirs = one.get("bridges"), other.get("bridges")
    if not mine or not theirs:
        return None
    common = 0
    for left, right in zip(mine, theirs, strict=False):
        if left != right:
            break
        common += 1
    between = len(mine) + len(theirs) - 2 * common
    if common:
        # Two ports of the same switch are two bridges apart.
        return (0 if between <= 2 else 1), between
    if _root(mine[0]) == _root(theirs[0]):
        return 2, between
    nodes = one.get("numa_node"), other.get("numa_node")
    return (3 if nodes[0] is not None and nodes[0] == nodes[1] else 4), between


def _root(bridge: str) -> str:
    """Domain and bus of a root port, which are those of its host bridge."""
    return bridge.rpartition(":")[0]


def beside_gpus(ports: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Ports that share a root port with a GPU; empty when the facts do not tell of every GPU where it is."""
    if not all(gpu.get("bridges") for gpu in gpus):
        return []
    reach = len(BESIDE)
    return [
        port for port in ports if any((found := distance(gpu, port)) is not None and found[0] < reach for gpu in gpus)
    ]


def nearest(
    gpus: Sequence[Mapping[str, Any]], ports: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each GPU with its port. Of ports that are equally near, the one with the fewest GPUs so far; empty when the facts
    do not tell for every GPU."""
    load: Counter[str] = Counter()
    pairs = []
    for gpu in sorted(gpus, key=lambda each: int(each["index"])):
        measured = [(found, port) for port in ports if (found := distance(gpu, port)) is not None]
        if not measured:
            return []
        shortest = min(found for found, _ in measured)
        port = min(
            (port for found, port in measured if found == shortest),
            key=lambda each: (load[each["device"]], natural(each["device"]), each["port"]),
        )
        load[port["device"]] += 1
        pairs.append((gpu, port))
    return pairs
