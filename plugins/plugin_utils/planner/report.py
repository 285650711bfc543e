"""The plan of a cluster for people and for programs: one document, and its text.

`document` is what `plan_format=json` prints; text (here) and HTML (html.py) are drawn from it, so that all three say
the same. Memory is in GiB (2^30 bytes) of one GPU; a rank is one GPU of one engine, numbered as vLLM does:
data-parallel rank first, then pipeline stage, then tensor-parallel rank (vllm/distributed/parallel_state.py).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

SCHEMA = 1
BAR = 40
# Lists longer than this are cut in what people read; the JSON document has all of it.
SHOWN_REPLICAS = 8
SHOWN_COMMANDS = 2
PARTS = (
    ("weights_gib", "#", "weights"),
    ("activation_gib", "+", "activation"),
    ("overhead_gib", "o", "overhead"),
    ("kv_cache_gib", "k", "KV cache"),
    ("free_gib", ".", "free"),
)
# What the plan decides, in the order in which people look for it.
FLAGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "pp_layer_partition",
    "distributed_executor_backend",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_dtype",
)


def render_report(cluster: Mapping[str, Any]) -> str:
    """Everything that `cluster_plan` decided, one block an instance."""
    return render_text(document(cluster))


# The document


def document(cluster: Mapping[str, Any], growth: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plan as one JSON value; `growth` holds the answer of growth.py for each instance."""
    told = {
        f"{name}: {text}" for name, instance in cluster["instances"].items() for text in instance["plan"]["warnings"]
    }
    return {
        "schema": SCHEMA,
        "vllm_version": cluster["runtime"]["vllm_version"],
        "variant": cluster["runtime"]["variant"],
        "nodes": {
            name: {
                "address": node["address"],
                "gpus": [{"index": index, **gpu} for index, gpu in enumerate(node["gpus"])],
            }
            for name, node in cluster["nodes"].items()
        },
        "ray": cluster["ray"],
        "instances": {
            name: _instance(name, instance, cluster, (growth or {}).get(name))
            for name, instance in cluster["instances"].items()
        },
        "warnings": [text for text in cluster["warnings"] if text not in told],
    }


def _instance(
    name: str, instance: Mapping[str, Any], cluster: Mapping[str, Any], growth: Mapping[str, Any] | None
) -> dict[str, Any]:
    plan = instance["plan"]
    figures = plan["estimate"] or {}
    replicas = [
        {
            "url": described["url"],
            "nodes": list(replica["nodes"]),
            "ranks": _ranks(plan, replica, cluster["nodes"]),
        }
        for replica, described in zip(plan["replicas"], instance["replicas"], strict=True)
    ]
    return {
        "url": instance["url"],
        "model_path": instance["model_path"],
        "flags": {key: plan.get(key) for key in FLAGS},
        "commands": list(_commands(name, cluster["hosts"])),
        "replicas": replicas,
        "memory": _memory(figures, replicas),
        "kv_cache_tokens": figures.get("kv_cache_tokens"),
        "max_concurrency": _finite(figures.get("max_concurrency")),
        # In all engines together, which may be on unequal GPUs.
        "sequences": _finite(plan.get("sequences")),
        "margin": _finite(figures.get("margin")),
        "assumptions": list(figures.get("assumptions") or ()),
        "reasons": list(plan["reasons"]),
        "warnings": list(plan["warnings"]),
        "growth": growth,
    }


def engines(plan: Mapping[str, Any]) -> int:
    """Engine cores with a KV cache of their own: replicas, and the data-parallel ranks inside each."""
    one = _size(plan, "tensor_parallel_size") * _size(plan, "pipeline_parallel_size")
    return sum(max(1, sum(map(len, replica["gpus"].values())) // one) for replica in plan["replicas"])


def _size(plan: Mapping[str, Any], key: str) -> int:
    return int(plan.get(key) or 1)


def _ranks(plan: Mapping[str, Any], replica: Mapping[str, Any], nodes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every GPU of a replica with its place in the engine."""
    tensor, pipeline = _size(plan, "tensor_parallel_size"), _size(plan, "pipeline_parallel_size")
    found: list[dict[str, Any]] = []
    for node in replica["nodes"]:
        declared = nodes[node]["gpus"]
        for index in replica["gpus"][node]:
            rank = len(found)
            gpu = declared[index] if index < len(declared) else {}
            found.append(
                {
                    "rank": rank,
                    "node": node,
                    "gpu": index,
                    "gpu_name": gpu.get("name"),
                    "memory_total_mib": gpu.get("memory_total_mib"),
                    "data": rank // (tensor * pipeline),
                    "stage": rank // tensor % pipeline,
                    "tensor": rank % tensor,
                }
            )
    return found


def _commands(name: str, hosts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for node, host in hosts.items():
        for item in host["instances"]:
            if item["instance"] == name:
                yield {
                    "node": node,
                    "replica": item["replica"],
                    "role": item["role"],
                    "args": list(item["args"]),
                    "environment": dict(item["environment"]),
                }


def _memory(figures: Mapping[str, Any], replicas: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a pipeline stage: the figures of one GPU, and which GPUs they stand for."""
    kinds: dict[int, dict[tuple[str, float], int]] = {}
    for replica in replicas:
        for rank in replica["ranks"]:
            kind = str(rank["gpu_name"]), float(rank["memory_total_mib"] or 0)
            counts = kinds.setdefault(rank["stage"], {})
            counts[kind] = counts.get(kind, 0) + 1
    found = []
    for rank in figures.get("ranks") or ():
        stage = rank["stage"]
        gpus = sorted(kinds.get(stage, {}).items(), key=lambda item: (item[0][1], item[0][0]))
        # The smallest GPU of a stage decides, so the figures are its own.
        total = gpus[0][0][1] / 1024 if gpus else 0.0
        sizes = {key: max(0.0, _finite(rank.get(key)) or 0.0) for key, _, _ in PARTS[:-1]}
        found.append(
            {
                "stage": stage,
                "gpus": [{"name": name, "memory_total_mib": mib, "count": count} for (name, mib), count in gpus],
                "total_gib": round(total, 3),
                **sizes,
                # Outside gpu_memory_utilization: the driver's own, and what is left to others.
                "free_gib": round(max(0.0, total - sum(sizes.values())), 3),
            }
        )
    return found


def _finite(value: Any) -> float | None:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


# Text


def render_text(plan: Mapping[str, Any]) -> str:
    """A document for a terminal, in plain ASCII apart from names."""
    lines = [f"vLLM {plan['vllm_version']} ({plan['variant']}), {_many(len(plan['nodes']), 'node')}"]
    ray = plan["ray"]
    if ray:
        workers = ", ".join(ray["workers"]) or "none"
        lines.append(f"Ray: head {ray['head']} ({ray['address']}), workers {workers}, {ray['total_gpus']} GPUs")
    if not plan["instances"]:
        lines.append("No instances: set vllm_instances.")
    for name, instance in plan["instances"].items():
        lines += ["", *_instance_text(name, instance)]
    if plan["warnings"]:
        lines += ["", "Warnings:", *(f"  ! {text}" for text in plan["warnings"])]
    return "\n".join(lines)


def _instance_text(name: str, instance: Mapping[str, Any]) -> Iterator[str]:
    flags = instance["flags"]
    yield f"{name}: {instance['url']}"
    yield f"  {layout_text(instance)}"
    yield f"  flags: {', '.join(f'{key} {value}' for key, value in shown_flags(flags))}"
    yield f"  placement of {_many(len(instance['replicas']), 'replica')}:"
    for number, replica in enumerate(instance["replicas"][:SHOWN_REPLICAS]):
        yield from (f"    {line}" for line in _placement_text(number, replica, instance))
    if len(instance["replicas"]) > SHOWN_REPLICAS:
        yield f"    and {len(instance['replicas']) - SHOWN_REPLICAS} more replicas (plan_format=json lists all)"
    yield from _commands_text(instance["commands"])
    yield from _memory_text(instance)
    yield "  reasons:"
    yield from (f"    - {reason}" for reason in instance["reasons"])
    if instance["warnings"]:
        yield "  warnings:"
        yield from (f"    ! {text}" for text in instance["warnings"])
    if instance["growth"]:
        yield from growth_text(instance["growth"], "  ")


def layout_text(instance: Mapping[str, Any]) -> str:
    """The shape of an instance in one line."""
    flags, replicas = instance["flags"], instance["replicas"]
    shape = f"tensor {flags['tensor_parallel_size']} x pipeline {flags['pipeline_parallel_size']}"
    if (flags["data_parallel_size"] or 1) > 1:
        shape += f" x data {flags['data_parallel_size']}"
    if flags["enable_expert_parallel"]:
        shape += ", experts spread"
    if len(replicas) > 1:
        shape = f"{len(replicas)} replicas of {shape}"
    gpus = sum(len(replica["ranks"]) for replica in replicas)
    nodes = len({node for replica in replicas for node in replica["nodes"]})
    return (
        f"{shape}: {_many(gpus, 'GPU')} on {_many(nodes, 'node')}, executor {flags['distributed_executor_backend']}, "
        f"context {flags['max_model_len']}"
    )


def shown_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Flags that say something, as text."""
    for key, value in flags.items():
        if value is None or value is False:
            continue
        yield key, ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _placement_text(number: int, replica: Mapping[str, Any], instance: Mapping[str, Any]) -> Iterator[str]:
    prefix = ""
    if len(instance["replicas"]) > 1:
        yield f"replica {number}: {replica['url']}"
        prefix = "  "
    roles = {item["node"]: item["role"] for item in instance["commands"] if item["replica"] == number}
    for node, found in groupby(replica["ranks"], key=lambda rank: str(rank["node"])):
        ranks = list(found)
        role = f"{roles[node]}, " if node in roles else ""
        yield f"{prefix}{node}  {role}{place_text(ranks, instance['flags'])}  ({kinds_text(ranks)})"


def place_text(ranks: Sequence[Mapping[str, Any]], flags: Mapping[str, Any]) -> str:
    """What the GPUs of one node hold: their indices, stages and data-parallel ranks."""
    stages: dict[int, list[int]] = {}
    for rank in ranks:
        stages.setdefault(rank["stage"], []).append(rank["gpu"])
    if (flags["pipeline_parallel_size"] or 1) == 1:
        text = f"GPUs {spans(rank['gpu'] for rank in ranks)}"
    else:
        text = "; ".join(f"stage {stage} on GPUs {spans(gpus)}" for stage, gpus in sorted(stages.items()))
    data = sorted({rank["data"] for rank in ranks})
    if (flags["data_parallel_size"] or 1) > 1:
        text += f"; data ranks {spans(data)}"
    return text


def kinds_text(ranks: Iterable[Mapping[str, Any]]) -> str:
    """4 x NVIDIA H200, 2 x NVIDIA L40S."""
    counts: dict[str, int] = {}
    for rank in ranks:
        name = str(rank["gpu_name"] or "unknown")
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def spans(numbers: Iterable[int]) -> str:
    """0-3,6 for 0, 1, 2, 3, 6."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _commands_text(commands: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not commands:
        return
    yield "  command:"
    for item in commands[:SHOWN_COMMANDS]:
        where = f"replica {item['replica']} on {item['node']} ({item['role']}): " if len(commands) > 1 else ""
        yield f"    {where}{command_text(item)}"
    if len(commands) > SHOWN_COMMANDS:
        yield f"    and {len(commands) - SHOWN_COMMANDS} more (plan_format=json lists all)"


def command_text(command: Mapping[str, Any]) -> str:
    """One line for a shell."""
    environment = [f"{key}={shlex.quote(str(value))}" for key, value in sorted(command["environment"].items())]
    return " ".join([*environment, "vllm serve", shlex.join(command["args"])])


def _memory_text(instance: Mapping[str, Any]) -> Iterator[str]:
    if not instance["memory"]:
        yield "  memory: not estimated"
        return
    legend = ", ".join(f"{mark} {label}" for _, mark, label in PARTS)
    yield f"  memory of one GPU of each stage, GiB ({legend}):"
    for stages, entry in alike(instance["memory"]):
        sizes = [float(entry[key]) for key, _, _ in PARTS]
        bar = "".join(mark * width for (_, mark, _), width in zip(PARTS, shares(sizes, BAR), strict=True))
        figures = ", ".join(f"{label} {size:.1f}" for (_, _, label), size in zip(PARTS, sizes, strict=True))
        gpu = f"{entry['gpus'][0]['name']}: " if entry["gpus"] else ""
        yield f"    stage {stages} [{bar}] {gpu}{figures}"
    yield from (f"    {line}" for line in capacity_text(instance))
    if instance["assumptions"]:
        yield f"    assumed: {'; '.join(instance['assumptions'])}"


def alike(memory: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Neighbouring stages with the same figures as one: ("0-2", entry)."""
    for _, found in groupby(memory, key=lambda entry: {key: value for key, value in entry.items() if key != "stage"}):
        entries = list(found)
        yield spans(entry["stage"] for entry in entries), entries[0]


def shares(sizes: Sequence[float], width: int) -> list[int]:
    """Whole cells for each size, `width` in all."""
    total = sum(sizes)
    if total <= 0:
        return [0] * (len(sizes) - 1) + [width]
    edges, running = [0], 0.0
    for size in sizes:
        running += size
        edges.append(round(width * running / total))
    return [right - left for left, right in pairwise(edges)]


def capacity_text(instance: Mapping[str, Any]) -> Iterator[str]:
    """How many tokens and sequences the KV cache holds."""
    tokens, sequences = instance["kv_cache_tokens"], instance["max_concurrency"]
    if tokens is None or sequences is None:
        return
    one = engine_count(instance)
    each = "each KV cache: " if one > 1 else ""
    text = f"{each}{tokens} tokens of KV cache, {sequences:.1f} sequences at full length"
    if one > 1:
        together = instance["sequences"]
        text += f"; all {one} together {sequences * one if together is None else together:.1f}"
    if instance["margin"] is not None:
        text += f" (margin of the estimate {instance['margin']:.1%})"
    yield text


def engine_count(instance: Mapping[str, Any]) -> int:
    """The same as `engines`, of a document's instance."""
    return sum(len({rank["data"] for rank in replica["ranks"]}) for replica in instance["replicas"])


def growth_text(growth: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """The answer of growth.py."""
    yield f"{indent}growth by {growth['factor']:g}: {growth_summary(growth)}"
    for line in growth_details(growth):
        yield f"{indent}  - {line}"


def growth_summary(growth: Mapping[str, Any]) -> str:
    """One sentence: what is needed, or why that can't be said."""
    then = growth["then"]
    if then is None:
        return str(growth["problem"])
    add = growth["add"]
    buy = (
        "the GPUs of today are enough"
        if not add["nodes"]
        else f"{_many(add['nodes'], 'node')} and {_many(add['gpus'], 'GPU')} more than today"
    )
    return (
        f"{growth['concurrency']['then']} sequences of {growth['context_length']} tokens need "
        f"{_many(then['gpus'], 'GPU')} on {_many(then['nodes'], 'node')}: {buy}"
    )


def growth_details(growth: Mapping[str, Any]) -> Iterator[str]:
    """What changes, one line each."""
    now, then, wanted = growth["today"], growth["then"], growth["concurrency"]
    base = "concurrency" if growth["base"] == "concurrency" else "what the plan of today holds"
    yield f"today {wanted['today']} sequences ({base}), room for {now['capacity']:.1f}"
    if then is None:
        return
    yield f"then {wanted['then']} sequences, room for {then['capacity']:.1f}"
    if growth["added"]:
        yield f"added: {', '.join(growth['added'])}"
    if now["replicas"] != then["replicas"]:
        yield f"replicas: {now['replicas']} -> {then['replicas']}"
    for change in growth["changes"]:
        yield f"{change['flag']}: {_value(change['today'])} -> {_value(change['then'])}"
    if growth["note"]:
        yield str(growth["note"])


def _value(value: Any) -> str:
    return "unset" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
