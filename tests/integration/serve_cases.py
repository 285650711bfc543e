#!/usr/bin/env python3
"""Writes what serve_parser.py reads: the flag table of a version, and command lines that serve_args renders for it.

serve_cases.py VERSION > CASES.json
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "collections"))

from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.serve_args import (
    OWNED,
    REFUSED,
    _load,
    serve_args,
)

# Values that the plan gives, each with its rarer forms.
PLAN: dict[str, list[Any]] = {
    "tensor_parallel_size": [1, 8],
    "pipeline_parallel_size": [1, 2],
    "data_parallel_size": [1, 4],
    "enable_expert_parallel": [False, True],
    "distributed_executor_backend": ["mp", "ray"],
    "max_model_len": [32768],
    "max_num_seqs": [None, 64],
    "max_num_batched_tokens": [None, 8192],
    "gpu_memory_utilization": [None, 0.92],
    "kv_cache_dtype": ["auto", "fp8"],
}
SPREADS: list[dict[str, Any]] = [
    {},
    {"nnodes": 2, "node_rank": 0, "master_addr": "10.0.0.1", "master_port": 29501},
    {"nnodes": 2, "node_rank": 1, "master_addr": "fd00::1", "master_port": 29501},
    {"nnodes": 2, "node_rank": 0, "master_addr": "10.0.0.1", "master_port": 29550, "data_parallel_size_local": 2},
    {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.1",
        "master_port": 29550,
        "data_parallel_size_local": 2,
        "data_parallel_start_rank": 2,
    },
]
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}


def command_lines(version: str) -> list[list[str]]:
    """Every value of each plan key, every way to spread an engine, and every switch of the version both ways."""
    endpoint = {"model": "/models/m", "served_model_name": "m", "host": "0.0.0.0", "port": 8000}  # noqa: S104
    first = {key: values[0] for key, values in PLAN.items()}
    plans = [first | {key: value} for key, values in PLAN.items() for value in values]
    plans.append(first | {"speculative_config": SPECULATIVE})
    lines = [serve_args(plan, version, **endpoint) for plan in plans]
    lines += [
        serve_args(plan, version, **endpoint, **spread)
        for plan, spread in itertools.product(plans, SPREADS)
        # Data-parallel ranks over nodes are refused without the number of this node's, and that number without them.
        if not spread or (plan["data_parallel_size"] > 1) == ("data_parallel_size_local" in spread)
    ]
    flags, _ = _load(version)
    for name, entry in flags.items():
        if entry["kind"] == "switch" and name not in OWNED and name not in REFUSED:
            lines += [serve_args({"args": {name: value}}, version, model="m") for value in (True, False)]
    lines.append(serve_args({"args": {"hf-overrides": {"a": {"b": 1}}, "middleware": ["a.b"]}}, version, model="m"))
    return [list(line) for line in dict.fromkeys(map(tuple, lines))]


if __name__ == "__main__":
    print(json.dumps({"flags": _load(sys.argv[1])[0], "argvs": command_lines(sys.argv[1])}))
