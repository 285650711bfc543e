"""The plan of a cluster as text for people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

BAR = 40
_PARTS = (("weights_gib", "#", "weights"), ("activation_gib", "+", "activation"), ("overhead_gib", "o", "overhead"))


def render_report(cluster: Mapping[str, Any]) -> str:
    """Everything that `cluster_plan` decided, one block an instance."""
    runtime = cluster["runtime"]
    lines = [f"vLLM {runtime['vllm_version']} ({runtime['variant']}), {len(cluster['nodes'])} nodes"]
    ray = cluster["ray"]
    if ray:
        workers = ", ".join(ray["workers"]) or "none"
        lines.append(f"Ray: head {ray['head']} ({ray['address']}), workers {workers}, {ray['total_gpus']} GPUs")
    if not cluster["instances"]:
        lines.append("No instances: set vllm_instances.")
    for name, instance in cluster["instances"].items():
        lines += ["", *_instance(name, instance, cluster["hosts"])]
    if cluster["warnings"]:
        lines += ["", "Warnings:", *(f"  ! {text}" for text in cluster["warnings"])]
    return "\n".join(lines)


def _instance(name: str, instance: Mapping[str, Any], hosts: Mapping[str, Any]) -> list[str]:
    plan = instance["plan"]
    gpus = plan["replicas"][0]["gpus"]
    lines = [
        f"{name}: {instance['url']}",
        f"  tensor {instance['tensor_parallel_size']} x pipeline {instance['pipeline_parallel_size']}, "
        f"executor {instance['executor']}, context {instance['context_length']}",
        "  placement:",
    ]
    for entry in instance["world"]:
        lines.append(f"    {entry['node']}  {entry['role']}, GPUs {','.join(map(str, gpus[entry['node']]))}")
    api = next(item for item in hosts[instance["api_node"]]["instances"] if item["name"] == name)
    lines += ["  command:", f"    vllm serve {shlex.join(api['args'])}"]
    lines += _memory(plan)
    lines += ["  reasons:", *(f"    - {reason}" for reason in plan["reasons"])]
    return lines


def _memory(plan: Mapping[str, Any]) -> list[str]:
    figures = plan["estimate"]
    if not figures or not figures["ranks"]:
        return ["  memory: not estimated"]
    lines = ["  memory of one GPU of each stage (GiB):"]
    for rank in figures["ranks"]:
        parts = [(max(0.0, float(rank[key])), mark, label) for key, mark, label in _PARTS]
        parts.append((max(0.0, float(rank["kv_cache_gib"])), "k", "KV cache"))
        total = sum(size for size, _, _ in parts) or 1.0
        bar = "".join(mark * round(BAR * size / total) for size, mark, _ in parts)[:BAR].ljust(BAR, "k")
        text = ", ".join(f"{label} {size:.1f}" for size, _, label in parts)
        lines.append(f"    stage {rank['stage']} [{bar}] {text}")
    tokens, sequences = figures["kv_cache_tokens"], figures["max_concurrency"]
    lines.append(f"    {tokens} tokens of KV cache, {sequences:.1f} sequences at full length")
    return lines
