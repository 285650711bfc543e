"""What growing concurrency needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.growth import MAX_NODES, MAX_PLANS, grow, room
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.plan import plan

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}
L4 = {"name": "NVIDIA L4", "memory_total_mib": 23034}


def nodes(count: int, gpus: int = 8) -> list[dict[str, Any]]:
    return [{"name": f"n{index}", "gpus": [H200] * gpus, "inter_node": "tcp"} for index in range(1, count + 1)]


class Planner:
    """One replica of ten sequences a node, at most `limit` nodes in use."""

    def __init__(self, limit: int = 10**6, each: float = 10.0) -> None:
        self.limit = limit
        self.each = each
        self.asked: list[int] = []

    def __call__(self, _config: Any, given: Sequence[Mapping[str, Any]], **request: Any) -> dict[str, Any]:
        self.asked.append(len(given))
        assert len({node["name"] for node in given}) == len(given)
        used = given[: self.limit]
        return {
            "tensor_parallel_size": len(given[0]["gpus"]),
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "max_model_len": request.get("context_length") or 4096,
            "max_num_seqs": request.get("concurrency"),
            "replicas": [
                {"nodes": [node["name"]], "gpus": {node["name"]: list(range(len(node["gpus"])))}} for node in used
            ],
            "estimate": {"max_concurrency": self.each},
        }


@pytest.mark.parametrize(
    "today, factor, needed", [(2, 1, 2), (2, 2, 4), (2, 6, 12), (3, 1.1, 4), (1, 7.25, 8), (1, 900, 900)]
)
def test_the_smallest_number_of_nodes_is_found(today: int, factor: float, needed: int) -> None:
    planner = Planner()
    now = planner({}, nodes(today))
    found = grow({}, nodes(today), {}, now, factor, planner=planner)
    assert found["then"]["nodes"] == needed
    assert found["then"]["gpus"] == 8 * needed
    assert found["add"] == {"nodes": needed - today, "gpus": 8 * (needed - today)}
    assert found["concurrency"] == {"today": 10 * today, "then": math.ceil(10 * today * factor)}
    assert found["base"] == "max_concurrency"
    assert len(planner.asked) <= MAX_PLANS + 1


def test_asked_concurrency_is_the_base() -> None:
    planner = Planner()
    request = {"concurrency": 5, "context_length": 100}
    now = planner({}, nodes(1), **request)
    found = grow({}, nodes(1), request, now, 4, planner=planner)
    assert found["concurrency"] == {"today": 5, "then": 20}
    assert found["then"]["nodes"] == 2
    assert {"flag": "max_num_seqs", "today": 5, "then": 20} in found["changes"]


def test_an_instance_that_can_not_widen_is_repeated() -> None:
    planner = Planner(limit=1)
    now = planner({}, nodes(1))
    found = grow({}, nodes(1), {}, now, 3, planner=planner)
    assert found["then"] == {"nodes": 3, "gpus": 24, "replicas": 3, "capacity": 30.0}
    assert found["add"] == {"nodes": 2, "gpus": 16}
    assert "side by side" in found["note"]


def test_idle_nodes_of_today_are_taken_first() -> None:
    planner = Planner(limit=1)
    now = planner({}, nodes(2))
    assert grow({}, nodes(2), {}, now, 3, planner=planner)["add"] == {"nodes": 1, "gpus": 8}


def test_copies_are_of_the_nodes_in_use() -> None:
    planner = Planner(limit=1)
    mixed = [*nodes(1), {"name": "small", "gpus": [L4], "inter_node": "tcp"}]
    now = planner({}, mixed)
    planner.limit = 10**6
    assert grow({}, mixed, {}, now, 5, planner=planner)["added"] == ["3 nodes with 8 x NVIDIA H200"]


def test_the_search_ends() -> None:
    planner = Planner()
    found = grow({}, nodes(3), {}, planner({}, nodes(3)), 1000, planner=planner)
    assert found["then"] is None
    assert str(MAX_NODES) in found["problem"]
    assert max(planner.asked) <= MAX_NODES


def test_refusals_of_the_planner_are_told() -> None:
    def refuse(*_: Any, **__: Any) -> dict[str, Any]:
        raise PlannerError("It does not fit.")

    now = Planner(each=0.5)({}, nodes(1))
    found = grow({}, nodes(1), {"concurrency": 3}, now, 2, planner=refuse)
    assert found["problem"] == "It does not fit."
    assert found["then"] is None


def test_without_figures_there_is_no_answer() -> None:
    now = {**Planner()({}, nodes(1)), "estimate": None}
    assert "not estimated" in grow({}, nodes(1), {}, now, 2)["problem"]


@pytest.mark.parametrize("factor", [-1, 0, 0.5, 1e9, float("nan"), float("inf"), True, "6"])
def test_wrong_factors(factor: Any) -> None:
    with pytest.raises(PlannerError, match="plan_growth") as caught:
        grow({}, nodes(1), {}, Planner()({}, nodes(1)), factor)
    assert caught.value.key == "plan_growth"


def test_with_the_real_planner(model_config) -> None:
    config, request = model_config("dense_8b"), {"concurrency": 64, "context_length": 32768}
    today = plan(config, nodes(1), **request)
    found = grow(config, nodes(1), request, today, 10)
    assert found["then"]["capacity"] >= 640
    again = plan(config, nodes(found["then"]["nodes"]), **{**request, "concurrency": 640})
    assert room(again) >= 640
    json.dumps(found, allow_nan=False)


def test_engines_inside_nodes_are_not_traded_for_one_over_many(model_config) -> None:
    """Fewer nodes would hold the sequences in one engine over all of them; that is a note, and not the answer."""
    config, request = model_config("dense_72b"), {"concurrency": 8, "context_length": 16384}

    def rack(count: int) -> list[dict[str, Any]]:
        gpus = [{"name": "NVIDIA H100 80GB HBM3", "memory_total_mib": 81559}] * 4
        return [{"name": f"n{i}", "gpus": gpus, "inter_node": "infiniband"} for i in range(1, count + 1)]

    today = plan(config, rack(1), **request)
    found = grow(config, rack(1), request, today, 10)
    count = found["then"]["nodes"]
    then = plan(config, rack(count), **{**request, "concurrency": 80})
    assert [len(replica["nodes"]) for replica in then["replicas"]] == [1] * len(then["replicas"])
    assert (count, found["note"].split(",")[0]) == (3, "2 nodes would hold them too")
    assert then["warnings"] == []
    # The warning of a plan that holds too few counts engines of today's flags, which comes to almost the same.
    (warning,) = [text for text in plan(config, rack(1), **{**request, "concurrency": 80})["warnings"] if "fit" in text]
    gpus = int(warning.split(" GPUs of this kind")[0].split()[-1])
    assert gpus == pytest.approx(found["then"]["gpus"], rel=0.1)
