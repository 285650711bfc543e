"""What is compared over the nodes, and which release a rollback goes to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import compare

RUNTIME = {
    "python": "3.12.3",
    "vllm": "0.33.0",
    "ray": "2.50.0",
    "torch": "2.13.0",
    "nccl": "2.28.3",
    "cuda": "13.0",
    "vllm_cuda": "13",
}


def node(drift: int = 0, present: bool = True, **runtime: str) -> dict[str, Any]:
    return {"present": present, "drift": {"total": drift}, "runtime": {**RUNTIME, "driver": "580.65.06", **runtime}}


def test_equal_nodes_have_no_problems() -> None:
    assert compare.version_problems({f"n{number}": node() for number in range(64)}, "cu130") == []


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("python", "Python"),
        ("vllm", "vLLM"),
        ("ray", "Ray"),
        ("torch", "torch"),
        ("nccl", "NCCL"),
        ("cuda", "torch's CUDA"),
        ("vllm_cuda", "the CUDA of vLLM's extension"),
    ],
)
def test_a_difference_names_both_nodes_and_both_versions(name: str, title: str) -> None:
    (problem,) = compare.version_problems({"n1": node(), "n2": node(), "n3": node(**{name: "9.9.9"})}, "cu130")
    assert problem.startswith(f"{title} is {RUNTIME[name]} on n1, but 9.9.9 on n3: ")


def test_what_a_repair_mends_is_no_reason_to_refuse() -> None:
    """Of a damaged node, and of one that gets its release first, only its own Python counts."""
    assert compare.version_problems({"n1": node(), "n2": node(drift=3, ray="1.0")}, "cu130") == []
    assert compare.version_problems({"n1": node(), "n2": node(present=False, ray="1.0")}, "cu130") == []
    assert len(compare.version_problems({"n1": node(), "n2": node(drift=3, python="3.12.9")}, "cu130")) == 1


def test_many_nodes_are_counted() -> None:
    found = {f"n{number}": node(ray="2.51.0") if number > 4 else node() for number in range(16)}
    (problem,) = compare.version_problems(found, "cu130")
    assert problem.startswith("Ray is 2.51.0 on n5, but 2.50.0 on n0, n1, n2, n3, n4: ")
    found = {f"n{number}": node(ray="2.51.0") if number % 2 else node() for number in range(15)}
    assert "n1, n3, n5, n7, n9 and 2 more" in compare.version_problems(found, "cu130")[0]


def test_a_driver_too_old_is_named_with_one_that_is_not() -> None:
    found = {"n1": node(), "n2": node(driver="570.86.15"), "head": node(driver="")}
    (problem,) = compare.version_problems(found, "cu130")
    assert "driver of n2 is 570.86.15 (n1 has 580.65.06)" in problem
    assert "needs 580 or newer" in problem
    assert "cu129" in problem
    assert compare.version_problems(found, "cu129") == []
    assert compare.version_problems(found, "cpu") == []


def test_who_failed_and_who_was_not_reached_is_told() -> None:
    done = {"changed": True, "failed": False}
    results = {"n1": done, "n2": {"failed": True, "msg": "x"}, "n3": {"unreachable": True}, "n4": {}, "n5": None}
    assert compare.failed_hosts(results) == ["n2", "n3"]
    assert compare.failed_hosts({"n1": done}) == []


# ---------------------------------------------------------------- rollback


def release(number: int, current: bool = False, previous: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "id": f"{number:016x}",
        "complete": True,
        "current": current,
        "previous": previous,
        "damage": [],
        "inputs": {
            "versions": {"vllm": "0.33.0+cpu"},
            "variant": "cpu",
            "method": "venv",
            "python": "3.12.3",
            "lock": "x",
        },
        **more,
    }


FOUND = {name: [release(2, current=True), release(1, previous=True), release(0)] for name in ("n1", "n2", "n3")}


def changed(name: str, number: int, **more: Any) -> dict[str, list[dict[str, Any]]]:
    found = copy.deepcopy(FOUND)
    found[name][number] |= more
    return found


def test_without_a_name_it_is_the_one_before() -> None:
    plan = compare.rollback_plan(FOUND, "", "0.33.0")
    assert plan["release"] == f"{1:016x}"
    assert plan["problems"] == []
    assert 'python_env_python: "3.12"' in plan["stay"]
    assert 'python_env_vllm_version: "0.33.0"' in plan["stay"]


def test_a_named_one_also_when_the_run_before_was_killed_half_way() -> None:
    found = changed("n2", 0, current=False, previous=True)
    found["n2"][1] |= {"current": True, "previous": False}
    assert compare.rollback_plan(found, f"{1:016x}", "0.33.0")["release"] == f"{1:016x}"
    plan = compare.rollback_plan(found, "", "0.33.0")
    assert plan["release"] == ""
    assert "is 0000000000000001 on n1, but 0000000000000002 on n2: name one that both have" in plan["problems"][0]


def test_a_switch_that_was_killed_half_way_is_not_taken_for_a_rollback() -> None:
    found = changed("n2", 0, previous=True)
    found["n2"][1]["previous"] = False
    plan = compare.rollback_plan({"n2": found["n2"]}, "", "0.33.0")
    assert plan["release"] == ""
    (problem,) = plan["problems"]
    assert problem.startswith("a switch of n2 was interrupted")
    assert "-e rollback_release=ID" in problem
    assert "0000000000000001 (vLLM 0.33.0)" in problem
    assert compare.rollback_plan(found, "", "0.33.0")["problems"] == [problem], "one is enough to refuse"
    assert compare.rollback_plan(found, f"{1:016x}", "0.33.0")["release"] == f"{1:016x}"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (changed("n3", 1, complete=False), "the release 0000000000000001 on n3 is not complete"),
        (changed("n3", 1, complete=False), "run site.yml, which builds or fetches it"),
        (changed("n3", 1, damage=["changed a/b (other content)"]), "not as it was built (changed a/b (other content))"),
        (changed("n3", 1, damage=["changed a/b (other content)"]), "run playbooks/runtime.yml, which repairs it"),
        (changed("n3", 1, previous=False), "n3 was never switched from one release to another"),
        ({**FOUND, "n3": FOUND["n3"][:1] + FOUND["n3"][2:]}, "Name one with -e rollback_release=ID"),
    ],
)
def test_a_refusal_names_the_node_and_what_is_there(found: Any, said: str) -> None:
    plan = compare.rollback_plan(found, "", "0.33.0")
    assert plan["release"] == ""
    (problem,) = plan["problems"]
    assert "n3" in problem
    assert said in problem
    assert "there: 0000000000000002 (vLLM 0.33.0, current)" in problem


def test_without_another_release_there_is_nothing_to_return_to() -> None:
    plan = compare.rollback_plan({name: [release(2, current=True)] for name in FOUND}, "", "0.33.0")
    assert plan["release"] == ""
    (problem,) = plan["problems"]
    assert problem.startswith(
        "there is no other release on n1, n2, n3, so nothing to return to; there: 0000000000000002"
    )
    assert "change the inventory" in problem
    assert "rollback_release" not in problem


def test_nodes_that_are_there_already() -> None:
    plan = compare.rollback_plan(FOUND, f"{2:016x}", "0.33.0")
    assert (plan["release"], plan["already"], plan["problems"]) == (f"{2:016x}", True, [])
    assert "before this run, and are" in plan["stay"][0]
    some = changed("n2", 0, current=False)
    assert compare.rollback_plan(some, f"{2:016x}", "0.33.0")["already"] is False
    assert compare.rollback_plan(FOUND, "", "0.33.0")["already"] is False


def test_a_release_that_one_node_lacks() -> None:
    plan = compare.rollback_plan({**FOUND, "n3": FOUND["n3"][:1]}, f"{1:016x}", "0.33.0")
    assert plan["problems"][0].startswith("n3 does not have the release 0000000000000001; there: 0000000000000002 (")


def test_another_vllm_needs_other_command_lines() -> None:
    plan = compare.rollback_plan(FOUND, "", "0.34.0")
    assert "-e rollback_release=0000000000000001 -e python_env_vllm_version=0.33.0" in plan["problems"][0]


@pytest.mark.parametrize(
    ("changes", "hosts", "giver", "damaged"),
    [
        ({}, ["n1", "n2", "n3"], "n1", []),
        ({"n1": {"drift": {"total": 1}}}, ["n1", "n2", "n3"], "n2", ["n1"]),
        # Its archive may be as damaged as it is itself.
        ({"n1": {"present": False, "drift": {"total": 1}, "has_archive": True}}, ["n1", "n2", "n3"], "n2", ["n1"]),
        ({name: {"drift": {"total": 1}} for name in ("n1", "n2", "n3")}, ["n1", "n2", "n3"], "", ["n1", "n2", "n3"]),
        (
            {name: {"drift": {"total": 1}, "has_archive": True} for name in ("n1", "n2", "n3")},
            ["n3", "n2", "n1"],
            "n1",
            ["n3", "n2", "n1"],
        ),
        ({"n3": {"drift": {"total": 1}}}, ["n3"], "n1", ["n3"]),
        ({"n2": {"manifest_sha256": "bb"}}, ["n1", "n2", "n3"], "n1", ["n2"]),
        ({name: {"present": False, "manifest_sha256": ""} for name in ("n1", "n2")}, ["n1", "n2"], "", []),
    ],
    ids=["all whole", "builder damaged", "only its archive", "nobody", "archives alone", "limit", "another", "bare"],
)
def test_files_are_taken_from_a_node_that_has_all_of_them(
    changes: dict[str, Any], hosts: list[str], giver: str, damaged: list[str]
) -> None:
    whole = {"present": True, "drift": {"total": 0}, "has_archive": False, "manifest_sha256": "aa"}
    found = {name: whole | changes.get(name, {}) for name in hosts}
    repairs = compare.repairs(found, "n1")
    assert (repairs["damaged"], repairs["giver"]) == (damaged, giver)


WHOLE = {"present": True, "drift": {"total": 0}, "has_archive": False, "manifest_sha256": "aa"}
BARE = WHOLE | {"present": False, "manifest_sha256": ""}


def test_a_builder_that_lost_the_release_gets_it_from_who_has_it() -> None:
    """Else it would build it again, differently in its times, and the others would count as damaged from then on."""
    assert compare.repairs({"n1": BARE, "n2": WHOLE, "n3": BARE}, "n1")["maker"] == "n2"
    assert compare.repairs({"n1": BARE | {"has_archive": True}, "n2": WHOLE}, "n1")["maker"] == "n1"
    assert compare.repairs({"n1": BARE, "n2": BARE}, "n1")["maker"] == "n1"
    assert compare.repairs({"n1": BARE, "n2": WHOLE | {"drift": {"total": 1}}}, "n1")["maker"] == "n1"
    assert compare.repairs({"n2": BARE, "n3": BARE}, "n1")["maker"] == "n1", "not looked at in this run"


def test_a_builder_that_was_not_looked_at_is_asked_last() -> None:
    """With --limit, or outside of the cluster: it may have lost its copy, or never had one."""
    damaged = WHOLE | {"drift": {"total": 1}}
    found = {"n1": WHOLE, "n2": damaged, "n3": WHOLE | {"has_archive": True}}
    assert compare.repairs(found, "controller") == {"damaged": ["n2"], "giver": "n3", "maker": "n3"}
    assert compare.repairs({"n2": damaged}, "controller")["giver"] == "controller"
    assert compare.repairs({"n1": WHOLE, "n2": WHOLE, "n3": WHOLE | {"manifest_sha256": "bb"}}, "x")["damaged"] == [
        "n3"
    ]


def test_a_run_with_limit_does_not_split_the_cluster() -> None:
    found = {"n2": node() | {"release_id": "bb"}}
    builder = node() | {"release_id": "bb", "before": "aa"}
    (problem,) = compare.version_problems(found, "cu130", {"n1": builder})
    assert problem.startswith("n1 runs release aa, and bb is wanted: with --limit only n2 would get it")
    # It runs that release, too; or it only builds and runs none.
    for before in ("bb", ""):
        assert compare.version_problems(found, "cu130", {"n1": builder | {"before": before}}) == []


def test_nodes_that_are_to_run_different_releases_are_named() -> None:
    found = {name: node() | {"release_id": "aa"} for name in ("n1", "n2", "n3")}
    assert compare.version_problems(found, "cu130") == []
    found["n3"]["release_id"] = "bb"
    (problem,) = compare.version_problems(found, "cu130")
    assert problem.startswith("the inventory asks for release aa for n1, but for bb for n3: set python_env_method, ")


def test_what_most_nodes_have_stays() -> None:
    other = WHOLE | {"manifest_sha256": "bb"}
    found = {"n1": other, "n2": WHOLE, "n3": WHOLE}
    assert compare.repairs(found, "n1") == {"damaged": ["n1"], "giver": "n2", "maker": "n2"}
    assert compare.repairs({"n1": other, "n2": WHOLE}, "n1")["damaged"] == ["n2"], "the builder between equals"
    assert compare.repairs({"n2": other, "n3": WHOLE, "n1": WHOLE}, "n1")["giver"] == "n1"
