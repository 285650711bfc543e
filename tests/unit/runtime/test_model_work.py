"""What the nodes' answers about their models mean together: who fetches, who takes from whom, what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import model_files
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import fanout, models

A, B, C = (f"/var/lib/ironrack/models/org/{name}/r1" for name in "abc")
ADDRESSES = {f"n{number}": f"10.0.0.{number}" for number in range(1, 6)}


def plan(**instances: Any) -> dict[str, Any]:
    """Of each instance its folder and its nodes; with `repo` where ironrack fetches it."""
    return {
        "instances": {
            name: {
                "model_path": path,
                "model": {"repo": "/".join(path.split("/")[-3:-1]), "revision": "r1"}
                if path.startswith("/var")
                else None,
                "world": [{"node": node} for node in nodes],
            }
            for name, (path, nodes) in instances.items()
        }
    }


def state(name: str, **more: Any) -> dict[str, Any]:
    files = {"config.json": "1", "model.safetensors": "2"}
    return {"state": name, "faults": {}, "digest": "d", "manifest": "m", "files": files, **more}


def looked(path: str, **states: str) -> dict[str, Any]:
    return {node: {path: state(name)} for node, name in states.items()}


def test_a_folder_that_one_instance_names_by_its_path_is_fetched_for_the_other() -> None:
    wanted = plan(by_path=(A, ["n1"]), by_repo=(A, ["n2"]))
    wanted["instances"]["by_path"]["model"] = None
    (task,) = models.work(wanted, {"n1": {A: state("foreign")}, "n2": {A: state("absent")}})
    assert (task["node"], task["lacking"]) == ("n1", {A: ["n2"]})
    assert task["models"][0]["repo"] == "org/a"


def test_a_model_of_several_instances_is_one() -> None:
    found = models.places(plan(one=(A, ["n1", "n2"]), two=(A, ["n2", "n3"]), own=("/data/x", ["n1"])))
    assert found[A]["instances"] == ["one", "two"]
    assert found[A]["nodes"] == ["n1", "n2", "n3"]
    assert (found[A]["repo"], found[A]["builder"]) == ("org/a", "n1")
    assert found["/data/x"]["repo"] == ""


def test_nothing_is_to_do_where_all_have_it() -> None:
    assert models.work(plan(one=(A, ["n1", "n2"])), looked(A, n1="complete", n2="foreign")) == []
    # What the user brings is never fetched.
    assert models.work(plan(one=("/data/x", ["n1"])), looked("/data/x", n1="damaged")) == []


def test_the_first_node_fetches_and_the_others_take_it() -> None:
    work = models.work(plan(one=(A, ["n1", "n2", "n3"])), looked(A, n1="absent", n2="absent", n3="arriving"))
    assert [(task["node"], task["lacking"]) for task in work] == [("n1", {A: ["n2", "n3"]})]
    chosen = models.work(plan(one=(A, ["n1", "n2"])), looked(A, n1="absent", n2="absent"), "n5")
    assert [(task["node"], task["lacking"]) for task in chosen] == [("n5", {A: ["n1", "n2"]})]


def test_who_has_it_is_asked_before_the_hub() -> None:
    answers = looked(A, n1="damaged", n2="complete", n3="absent")
    answers["n1"][A]["faults"] = {"model.safetensors": "has the sha256 x instead of y"}
    work = models.work(plan(one=(A, ["n1", "n2", "n3"])), answers)
    assert [(task["node"], task["lacking"]) for task in work] == [("n2", {A: ["n1", "n3"]})]
    mine = models.hand_out(work, answers["n1"], ADDRESSES, "n1", 8791)
    assert mine["models"][0]["suspects"] == ["model.safetensors"]
    assert mine["models"][0]["sources"] == ["http://10.0.0.2:8791/"]


def test_with_a_limit_only_what_was_looked_at_counts() -> None:
    work = models.work(plan(one=(A, ["n1", "n2", "n3"])), looked(A, n3="absent"))
    assert [(task["node"], task["lacking"]) for task in work] == [("n1", {A: ["n3"]})]


def test_each_takes_from_the_one_before_and_hands_on() -> None:
    nodes = ["n1", "n2", "n3", "n4"]
    answers = looked(A, **dict.fromkeys(nodes, "absent"))
    work = models.work(plan(one=(A, nodes)), answers)
    parts = {node: models.hand_out(work, answers[node], ADDRESSES, node, 8791) for node in nodes}
    assert parts["n1"] == {"models": [], "serve": False, "lacking": parts["n1"]["mine"], "mine": parts["n1"]["mine"]}
    assert parts["n3"]["models"][0]["sources"][0] == "http://10.0.0.2:8791/"
    assert parts["n3"]["models"][0]["sources"][-1] == "http://10.0.0.1:8791/"
    assert [parts[node]["serve"] for node in nodes] == [False, True, True, False]


def test_a_node_that_fetches_another_model_keeps_its_one_server() -> None:
    both = plan(one=(A, ["n1", "n2", "n3"]), two=(B, ["n2", "n1", "n3"]))
    answers = {node: {A: state("absent"), B: state("absent")} for node in ("n1", "n2", "n3")}
    work = models.work(both, answers)
    assert [(task["node"], task["lacking"]) for task in work] == [("n1", {A: ["n2", "n3"]}), ("n2", {B: ["n1", "n3"]})]
    parts = {node: models.hand_out(work, answers[node], ADDRESSES, node, 8791) for node in answers}
    assert [model["path"] for model in parts["n2"]["models"]] == [A]
    assert not parts["n2"]["serve"]
    assert [task["serve"] for task in work] == [True, True]
    assert [model["path"] for model in parts["n3"]["models"]] == [A, B]


def test_a_node_that_fetches_for_itself_alone_hands_on_what_it_takes() -> None:
    """Its server is one of those that start before anybody takes anything."""
    both = plan(one=(A, ["n1", "n2", "n3"]), two=(B, ["n2"]), three=(C, ["n3"]))
    answers = {node: {path: state("absent") for path in (A, B, C)} for node in ("n1", "n2", "n3")}
    work = models.work(both, answers)
    # n3 is the last of its chain.
    assert [(task["node"], task["serve"]) for task in work] == [("n1", True), ("n2", True), ("n3", False)]


def test_what_a_node_fetches_for_others_is_none_of_its_old_revisions() -> None:
    found = models.places(plan(one=(A, ["n1", "n2"]), two=(B, ["n3"])), "n3")
    assert found[A]["keepers"] == ["n1", "n2", "n3"]
    assert found[B]["keepers"] == ["n3"]
    role = yaml.safe_load((Path(__file__).parents[3] / "roles/model_store/vars/main.yml").read_text())
    assert "keepers" in role["__model_store_kept"]


def test_a_node_without_address_is_named() -> None:
    work = models.work(plan(one=(A, ["n1", "n2"])), looked(A, n1="absent", n2="absent"))
    with pytest.raises(fanout.FanoutInputError, match=r"cluster_address = \(not set\) \(n1\)"):
        models.hand_out(work, looked(A, n2="absent")["n2"], {"n1": None, "n2": "10.0.0.2"}, "n2", 8791)


def test_equal_models_are_no_problem() -> None:
    assert models.differences(plan(one=(A, ["n1", "n2"])), looked(A, n1="complete", n2="foreign")) == []


def test_a_file_that_differs_is_named_with_its_nodes() -> None:
    answers = looked(A, n1="complete", n2="complete", n3="complete")
    answers["n3"][A] = state("complete", digest="e", files={"config.json": "9", "model.safetensors": "2"})
    assert models.differences(plan(one=(A, ["n1", "n2", "n3"])), answers) == [
        f"the model of instance one at {A} is not the same on all nodes: config.json differs between n1, n2 and n3. "
        f"Remove {A} on the nodes that have the wrong one, and run again: it is taken from the others."
    ]
    answers["n2"][A] = state("complete", digest="f", files={"config.json": "1"})
    assert "model.safetensors is missing on n2" in models.differences(plan(one=(A, ["n1", "n2", "n3"])), answers)[0]


def test_manifests_with_other_hashes_are_no_equal_models() -> None:
    answers = looked(A, n1="complete", n2="complete", n3="foreign")
    answers["n2"][A]["manifest"] = "x"
    answers["n3"][A]["manifest"] = ""
    assert (
        "has other hashes in its manifest on n1 and n2"
        in models.differences(plan(one=(A, ["n1", "n2", "n3"])), answers)[0]
    )


def test_what_is_not_whole_is_refused() -> None:
    answers = looked(A, n1="complete", n2="damaged")
    answers["n2"][A] |= {"faults": {"model.safetensors": "is missing"}}
    assert (
        "is not complete on n2: model.safetensors is missing"
        in models.differences(plan(one=(A, ["n1", "n2"])), answers)[0]
    )


@pytest.mark.parametrize(
    ("model", "args", "problem", "warning"),
    [
        ({"repo": "o/n"}, {}, "", ""),
        ({"repo": "o/n"}, {"trust-remote-code": False}, "", ""),
        ({"repo": "o/n"}, {"trust-remote-code": True}, "the revision is not pinned", ""),
        ({"repo": "o/n", "revision": "main"}, {"trust_remote_code": True}, "is not a commit", ""),
        ({"repo": "o/n", "revision": "a" * 39}, {"trust-remote-code": True}, "is not a commit", ""),
        (
            {"repo": "o/n", "revision": "a" * 40},
            {"trust-remote-code": True},
            "",
            f"runs the Python of o/n at {'a' * 40}",
        ),
        ({"path": "/data/m", "repo": "o/n"}, {"trust-remote-code": True}, "", "runs the Python in /data/m"),
    ],
)
def test_code_of_a_model_needs_a_pinned_revision(
    model: dict[str, str], args: dict[str, Any], problem: str, warning: str
) -> None:
    problems, warnings = model_files.check_trust("vllm_instances.x", {"model": model, "args": args})
    assert [problem in each.problem for each in problems] == ([True] if problem else [])
    assert [warning in each for each in warnings] == ([True] if warning else [])


def test_a_folder_of_the_user_is_not_fetched() -> None:
    assert model_files.fetched_model({"path": "/data/x", "repo": "o/n"}) is None
    assert model_files.fetched_model({"repo": "o/n"}) == {"repo": "o/n", "revision": "main"}
