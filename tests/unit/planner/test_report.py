"""What people and programs see of a plan: document, text and page."""

from __future__ import annotations

import json
import shlex
from html.parser import HTMLParser
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.html import render_html
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.report import (
    document,
    render_report,
    render_text,
    shares,
    spans,
)

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}
L40S = {"name": "NVIDIA L40S", "memory_total_mib": 46068}
EVIL = "</title><script>alert(1)</script>\"'&\x00\ud800"


def figures(stages: int, **changes: Any) -> dict[str, Any]:
    rank = {"weights_gib": 10.0, "activation_gib": 2.0, "overhead_gib": 1.0, "kv_cache_gib": 20.0}
    return {
        "fits": True,
        "kv_cache_tokens": 1000,
        "max_concurrency": 12.5,
        "margin": 0.02,
        "assumptions": ["no other process uses the card"],
        "ranks": [{"stage": stage, **rank} for stage in range(stages)],
        **changes,
    }


def cluster(  # noqa: PLR0917
    tensor: int = 2,
    pipeline: int = 2,
    data: int = 1,
    replicas: list[dict[str, list[int]]] | None = None,
    name: str = "big",
    nodes: dict[str, list[dict[str, Any]]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A plan of a cluster as `build` returns it, as far as a report reads it."""
    nodes = nodes or {"n1": [H200] * 4, "n2": [L40S] * 2}
    placed = replicas or [{"n1": [0, 1], "n2": [0, 1]}]
    plan = {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": data,
        "enable_expert_parallel": data > 1,
        "pp_layer_partition": [30, 10] if pipeline == 2 else None,
        "distributed_executor_backend": "ray",
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "max_num_batched_tokens": None,
        "gpu_memory_utilization": 0.92,
        "kv_cache_dtype": "auto",
        "replicas": [{"nodes": list(gpus), "gpus": gpus} for gpus in placed],
        "estimate": figures(pipeline),
        "reasons": ["because"],
        "warnings": ["careful"],
        **changes,
    }
    return {
        "runtime": {"vllm_version": "0.33.0", "variant": "cu130"},
        "nodes": {node: {"address": "10.0.0.1", "gpus": gpus} for node, gpus in nodes.items()},
        "ray": None,
        "hosts": {
            "n1": {
                "instances": [
                    {"name": name, "instance": name, "replica": 0, "role": "api", "args": ["/m x"], "environment": {}}
                ]
            }
        },
        "instances": {
            name: {
                "url": "http://10.0.0.1:8000",
                "model_path": "/m",
                "replicas": [{"url": f"http://10.0.0.1:{8000 + index}"} for index in range(len(placed))],
                "plan": plan,
            }
        },
        "warnings": [f"{name}: careful", "of the cluster"],
    }


GROWTH = {
    "factor": 6.0,
    "base": "concurrency",
    "context_length": 4096,
    "concurrency": {"today": 10, "then": 60},
    "today": {"nodes": 1, "gpus": 4, "replicas": 1, "capacity": 12.5},
    "then": {"nodes": 5, "gpus": 20, "replicas": 5, "capacity": 62.5},
    "add": {"nodes": 4, "gpus": 16},
    "added": ["4 nodes with 4 x NVIDIA H200"],
    "changes": [{"flag": "max_num_seqs", "today": 16, "then": 64}],
    "note": "",
    "problem": "",
}


def test_each_gpu_knows_its_place() -> None:
    ranks = document(cluster())["instances"]["big"]["replicas"][0]["ranks"]
    assert [(rank["node"], rank["gpu"], rank["stage"], rank["tensor"]) for rank in ranks] == [
        ("n1", 0, 0, 0),
        ("n1", 1, 0, 1),
        ("n2", 0, 1, 0),
        ("n2", 1, 1, 1),
    ]


def test_data_ranks_come_before_stages() -> None:
    plan = cluster(1, 2, 2, [{"n1": [0, 1, 2, 3]}])
    ranks = document(plan)["instances"]["big"]["replicas"][0]["ranks"]
    assert [(rank["data"], rank["stage"]) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "stage 0 on GPUs 0,2; stage 1 on GPUs 1,3; data ranks 0-1" in render_report(plan)
    assert "all 2 together 25.0" in render_report(plan)


def test_free_is_what_the_smallest_gpu_of_the_stage_has_left() -> None:
    first, second = document(cluster())["instances"]["big"]["memory"]
    assert first["free_gib"] == pytest.approx(143771 / 1024 - 33, abs=0.001)
    assert second["free_gib"] == pytest.approx(46068 / 1024 - 33, abs=0.001)
    assert second["gpus"] == [{"name": "NVIDIA L40S", "memory_total_mib": 46068, "count": 2}]


def test_text_says_everything() -> None:
    text = render_text(document(cluster(), {"big": GROWTH}))
    for words in (
        "pp_layer_partition 30,10",
        "n1  api, stage 0 on GPUs 0-1  (2 x NVIDIA H200)",
        "n2  stage 1 on GPUs 0-1  (2 x NVIDIA L40S)",
        "vllm serve '/m x'",
        "weights 10.0, activation 2.0, overhead 1.0, KV cache 20.0, free 12.0",
        "- because",
        "! careful",
        "! of the cluster",
        "growth by 6: 60 sequences of 4096 tokens need 20 GPUs on 5 nodes: 4 nodes and 16 GPUs more",
        "max_num_seqs: 16 -> 64",
        "replicas: 1 -> 5",
    ):
        assert words in text
    assert text.count("careful") == 1


def test_the_margin_is_printed() -> None:
    told = "(margin of the estimate 2.0%)"
    assert told in render_text(document(cluster()))
    assert told in render_html(document(cluster()))
    without = document(cluster(estimate=figures(2, margin=None)))
    assert "margin of the estimate" not in render_text(without)


def test_replicas_are_told_apart() -> None:
    text = render_report(cluster(1, 1, 1, [{"n1": [0]}, {"n1": [1]}]))
    assert "2 replicas of tensor 1 x pipeline 1: 2 GPUs on 1 node" in text
    assert "replica 1: http://10.0.0.1:8001" in text


def test_many_replicas_are_cut_in_text_and_whole_in_the_document() -> None:
    plan = cluster(1, 1, 1, [{"n1": [index]} for index in range(300)], nodes={"n1": [H200] * 300})
    assert "and 292 more replicas" in render_report(plan)
    assert len(document(plan)["instances"]["big"]["replicas"]) == 300
    assert len(render_html(document(plan))) < 300_000


@pytest.mark.parametrize("estimate", [None, {}, figures(2, max_concurrency=float("inf"), kv_cache_tokens=None)])
def test_missing_figures(estimate: Any) -> None:
    found = document(cluster(estimate=estimate))
    json.dumps(found, allow_nan=False)
    assert render_text(found) and render_html(found)


class Strict(HTMLParser):
    """Fails on tags that are not closed, and on anything that loads or runs."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert tag not in {"script", "link", "img", "iframe", "object", "use", "image"}
        for key, _ in attrs:
            assert not key.startswith("on") and key not in {"src", "href", "xlink:href"}
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_commands_of_the_page_have_a_line_a_flag_and_are_still_the_command() -> None:
    found = document(cluster())
    command = found["instances"]["big"]["commands"][0]
    command["args"] += ["--port", "8000", "--hf-overrides", '{"a": "b --not-a-flag"}']
    page = Strict()
    page.feed(render_html(found))
    shown = page.text[page.text.index("vllm serve") :]
    lines = shown[: shown.index("not-a-flag") + 13].splitlines()
    assert all(line.startswith("    --") and line.count(" --") == 1 for line in lines[1:-1])
    assert len(lines) == 3
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines))[2:] == command["args"]


def test_page_is_closed_drawn_and_self_contained() -> None:
    page = Strict()
    found = document(cluster(), {"big": GROWTH})
    page.feed(render_html(found))
    page.close()
    assert page.open == []
    assert {"svg", "rect", "table"} <= page.seen
    for words in ("because", "careful", "of the cluster", "stage 1", "n2", "60 sequences", "http://10.0.0.1:8000"):
        assert words in page.text


def test_page_escapes_every_string() -> None:
    gpu = {"name": EVIL, "memory_total_mib": 1000}
    plan = cluster(1, 1, 1, [{"n1": [0]}], EVIL, {"n1": [gpu], EVIL: [gpu]}, reasons=[EVIL], warnings=[EVIL])
    plan["warnings"] = [EVIL]
    plan["ray"] = {"head": EVIL, "address": EVIL, "workers": [EVIL], "total_gpus": 1}
    plan["runtime"] = {"vllm_version": EVIL, "variant": EVIL}
    plan["hosts"]["n1"]["instances"][0] |= {"args": [EVIL], "role": EVIL, "environment": {"A": EVIL}}
    plan["instances"][EVIL]["url"] = EVIL
    plan["instances"][EVIL]["replicas"][0]["url"] = EVIL
    plan["instances"][EVIL]["plan"]["estimate"]["assumptions"] = [EVIL]
    plan["instances"][EVIL]["plan"]["kv_cache_dtype"] = EVIL
    found = render_html(document(plan, {EVIL: {**GROWTH, "added": [EVIL], "note": EVIL}}))
    found.encode()
    assert "<script" not in found and "\x00" not in found
    page = Strict()
    page.feed(found)
    page.close()
    assert page.open == []


def test_small_helpers() -> None:
    assert spans([3, 0, 1, 2, 6]) == "0-3,6"
    assert sum(shares([1.0, 0.0, 33.3, 7.7], 40)) == 40
    assert shares([0.0, 0.0], 40) == [0, 40]
