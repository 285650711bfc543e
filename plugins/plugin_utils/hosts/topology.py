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
# Arguments of an engine that settle where its ranks run, or that keep much in the host's memory. Bound memory is bound
# strictly: an engine that needs more than one NUMA node has is killed, however much the others have left.
_PLACED = ("--numa-bind", "--no-numa-bind", "--device-ids")
_IN_HOST_MEMORY = ("offload", "lmcache")


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


def numa_arguments(facts: Mapping[str, Any], instance: Mapping[str, Any]) -> list[str]:
    """Flags of `vllm serve` that keep each rank of a planned instance on processors and memory beside its GPU.

    vLLM wants a NUMA node for each GPU that the engine sees. Only its own executor starts ranks with numactl: under
    Ray, which starts them itself, the flags would bind nothing but the process that schedules.
    """
    arguments = [str(argument) for argument in instance["args"]]
    if instance["executor"] != "mp" or any(argument.startswith(_PLACED) for argument in arguments):
        return []
    if any(word in argument.lower() for argument in arguments for word in _IN_HOST_MEMORY):
        return []
    # On some boards the memory of a GPU is a NUMA node too, without processors.
    with_processors = {node["node"] for node in facts.get("numa") or [] if node.get("cpus")}
    beside = {int(gpu["index"]): gpu.get("numa_node") for gpu in facts.get("gpus") or []}
    visible = str((instance.get("environment") or {}).get("CUDA_VISIBLE_DEVICES", ""))
    nodes = [beside.get(index) for index in (map(int, visible.split(",")) if visible else sorted(beside))]
    if len(with_processors) < 2 or not nodes or not with_processors.issuperset(nodes):
        return []
    return ["--numa-bind", "--numa-bind-nodes", *map(str, nodes)]
