#!/usr/bin/env python3
"""Holds the estimate against measured starts of vLLM and prints the errors.

  table.py [FOLDER]      FOLDER: ground_truth/*.jsonl and model_configs/*.json (default: `shared` beside the checkout)

A row is one start: model, flags, GPU, version, and what vLLM said. Rows that lack what a comparison needs (config.json,
version, GPU memory) are left out of it and counted.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "collections"))

from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate

ROOT = Path(__file__).resolve().parents[2]
# What `nvidia-smi` prints on these cards; the logs name the card only.
MEMORY_MIB = {
    "A10": 23028,
    "A100": 81920,
    "A100 40GB": 40960,
    "A100 80GB": 81920,
    "B200": 183359,
    "GB300": 284208,
    "GH200 96GB": 97871,
    "H20": 143771,
    "H100": 81559,
    "H200": 143771,
    "L4": 23034,
    "L40S": 46068,
    "RTX 3090": 24576,
    "RTX 4090": 24564,
    "RTX 5090": 32607,
    "RTX PRO 5000 72GB": 73337,
    "RTX PRO 6000 Blackwell": 97887,
    "T4": 15360,
    "V100 32GB": 32768,
}
_FLAGS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
_NO_FLAGS = ("kv_cache_dtype_inferred", "load_format")
METRICS = ("weights", "kv_gib", "tokens", "concurrency")
# Median and 90th percentile of the absolute error in percent, for vLLM 0.19 and later.
BARS = {"weights": (0.4, 2.0), "tokens": (0.8, 3.0), "concurrency": (0.8, 3.0)}


@dataclass
class Row:
    """One comparison."""

    id: str
    version: tuple[int, int]
    source: str
    said: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    margin: float = 0.0
    starts: bool = True
    fits: bool | None = None
    error: str | None = None
    problem: str | None = None

    def errors(self) -> dict[str, float]:
        """Percent, positive where the estimate is too high."""
        both = {name: (self.predicted[name], said) for name, said in self.said.items() if name in self.predicted}
        return {name: 100 * (mine - said) / said for name, (mine, said) in both.items() if said > 0}


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        if not path.name.endswith(".hf_quant_config.json"):
            found[path.stem] = {"config": json.loads(path.read_text("utf-8"))}
            beside = path.with_name(f"{path.stem}.hf_quant_config.json")
            if beside.is_file():
                found[path.stem]["hf_quant_config"] = json.loads(beside.read_text("utf-8"))
    return found


def engine(flags: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The flags of a row as the filter takes them."""
    found: dict[str, Any] = {"vllm_version": version}
    for name, value in flags.items():
        if name == "VLLM_PP_LAYER_PARTITION":
            found["pp_layer_partition"] = [int(part) for part in value.split(",")]
        elif name not in _NO_FLAGS and not name.startswith("VLLM_"):
            found[_FLAGS.get(name, name)] = value
    return found


def _version(text: str | None) -> tuple[int, int] | None:
    parts = str(text or "").lstrip(">=").split(".")
    if len(parts) < 2 or not parts[0].isdigit() or not parts[1].isdigit() or (parts[1] == "1" and "dev" in str(text)):
        return None
    return int(parts[0]), int(parts[1])


def _ours(record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    said: dict[str, float] = {"weights": max(record["weights_gib_per_rank"])} if record["weights_gib_per_rank"] else {}
    if record.get("kv_cache_tokens"):
        kv = record["kv_cache_gib"]
        said["kv_gib"] = min(kv) if isinstance(kv, list) else kv
        said["tokens"] = record["kv_cache_tokens"]
        said["concurrency"] = record["max_concurrency"][1]
    return said, {"name": record["gpu"], "memory_total_mib": record["gpu_memory_total_mib"]}


def _public(record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any] | None]:
    said = {}
    for name, key in (("weights", "weights_gib_per_gpu"), ("kv_gib", "kv_gib_per_gpu"), ("tokens", "kv_tokens")):
        if record.get(key):
            said[name] = record[key]
    if isinstance(record.get("max_concurrency"), dict):
        said["concurrency"] = record["max_concurrency"]["x"]
    memory = MEMORY_MIB.get(str(record["gpu"]))
    return said, None if memory is None else {"name": f"NVIDIA {record['gpu']}", "memory_total_mib": memory}


def compare(record: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], source: str) -> Row | None:
    """The row of one record, or None when it lacks what any comparison needs."""
    version = _version(record["vllm_version"])
    said, gpu = _ours(record) if "weights_gib_per_rank" in record else _public(record)
    model = models.get(str(record["model"]).replace("/", "__"))
    if "config" in record:
        model = {"config": record["config"]}
    if version is None or gpu is None or model is None:
        return None
    row = Row(record["id"], version, source, said, starts=not record["error"], error=record["error"])
    flags = engine(record["flags"], f"{version[0]}.{version[1]}.0")
    try:
        answer = estimate(model["config"], gpu, flags, model.get("hf_quant_config"))
    except PlannerError as problem:
        row.problem = str(problem)
        return row
    row.fits, row.margin = answer["fits"], answer["margin"]
    figures = {
        "weights": max((rank["weights_gib"] for rank in answer["ranks"]), default=None),
        "kv_gib": answer["kv_cache_gib"],
        "tokens": answer["kv_cache_tokens"],
        "concurrency": answer["max_concurrency"],
    }
    row.predicted = {name: value for name, value in figures.items() if value is not None}
    return row


def rows(shared: Path) -> Iterator[Row]:
    models = configs(shared / "model_configs")
    for path in sorted((shared / "ground_truth").glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            row = compare(json.loads(line), models, path.stem)
            if row is not None:
                yield row


def summary(found: list[Row], oldest: tuple[int, int] = (0, 19)) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of the absolute errors in percent, and how many there are."""
    result = {}
    for metric in METRICS:
        errors = sorted(abs(row.errors()[metric]) for row in found if row.version >= oldest and metric in row.errors())
        if errors:
            rank = max(0, -(-len(errors) * 9 // 10) - 1)
            result[metric] = {"n": len(errors), "median": statistics.median(errors), "p90": errors[rank]}
    return result


def covered(found: list[Row], oldest: tuple[int, int] = (0, 19)) -> float:
    """The share of rows whose KV cache lies within the stated margin."""
    inside = [
        abs(row.errors()["tokens"]) <= 100 * row.margin
        for row in found
        if row.version >= oldest and "tokens" in row.errors()
    ]
    return sum(inside) / len(inside) if inside else 1.0


def render(found: list[Row]) -> str:
    lines = [f"{'row':<34} {'vLLM':<5} " + " ".join(f"{metric:>22}" for metric in METRICS) + "  margin starts"]
    for row in sorted(found, key=lambda item: (item.source, item.version, item.id)):
        errors = row.errors()
        cells = []
        for metric in METRICS:
            if metric in errors:
                cells.append(f"{row.predicted[metric]:>9.6g}/{row.said[metric]:<9.6g}{errors[metric]:+.1f}%".rjust(22))
            else:
                cells.append(" " * 22)
        start = "" if row.fits is None else ("ok" if row.fits == row.starts else f"WRONG (said {row.fits})")
        version = ".".join(map(str, row.version))
        note = f"  {row.problem[:90]}" if row.problem else f"  {100 * row.margin:5.1f}% {start}"
        lines.append(f"{row.id:<34} {version:<5} " + " ".join(cells) + note)
    for metric, figures in summary(found).items():
        lines.append(
            f"{metric}: n {figures['n']}, median {figures['median']:.2f} %, 90th percentile {figures['p90']:.2f} %"
        )
    lines.append(f"inside the margin: {100 * covered(found):.0f} %")
    return "\n".join(lines)


if __name__ == "__main__":
    print(render(list(rows(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared"))))
