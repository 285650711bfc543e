"""The plan of the whole cluster."""
# ruff: noqa: S104  # nothing listens here; parametrized

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.cluster import (
    RAY_PORTS,
    Facts,
    build,
    digest,
    facts_view,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.model_files import find_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.validate import Problem, render, validate

SLOTS = {"count": 2, "name": "slot", "memory_total_mib": 1024}
GROUPS = {"vllm_nodes": ["n2", "n3"], "ray_head": ["n1"], "ray_workers": ["n2", "n3"]}
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/model_configs"


def lab(**changes: Any) -> dict[str, dict[str, Any]]:
    """The lab's hosts: n1 without GPUs, n2 and n3 with two slots."""
    instance: dict[str, Any] = {
        "model": {"path": "/data/models/tiny", "config": str(FIXTURES / "dense_tiny.json")},
        "nodes": "vllm_nodes",
        "executor": "ray",
        "context_length": 512,
        "parallelism": {"tensor": 2, "pipeline": 2},
        **changes,
    }
    common = {
        "python_env_variant": "cpu",
        "python_env_vllm_version": "0.32.0",
        "vllm_instances": {"tiny": {key: value for key, value in instance.items() if value is not None}},
    }
    return {
        "n1": {**common, "cluster_address": "10.77.1.11", "cluster_interface": "eth0"},
        "n2": {**common, "cluster_address": "10.77.1.12", "cluster_interface": "eth0", "gpus": SLOTS},
        "n3": {**common, "cluster_address": "10.77.1.13", "cluster_interface": "eth0", "gpus": SLOTS},
    }


def run(
    hosts: dict[str, dict[str, Any]],
    groups: dict[str, list[str]] | None = None,
    facts: dict[str, Facts] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], list[Problem]]:
    texts = {name: {"type": "str"} for name in ("fabric_type", "python_env_builder")}
    roles = {**texts, **{name: {"type": "int"} for name in RAY_PORTS}}
    checked = validate(hosts, roles)

    def load(variable: str, model: Any) -> Any:
        return find_config(variable, model, FIXTURES.parent)

    plan, problems = build(checked.values, GROUPS if groups is None else groups, load, facts, **options)
    return plan, [*checked.problems, *problems]


def test_ray_over_two_nodes() -> None:
    plan, problems = run(lab())
    assert problems == []
    assert set(plan) == {
        "digest",
        "site",
        "nodes",
        "hosts_entries",
        "ray",
        "runtime",
        "instances",
        "hosts",
        "warnings",
        "report",
    }
    assert plan["ray"] == {"head": "n1", "address": "10.77.1.11:6379", "workers": ["n2", "n3"], "total_gpus": 4}
    assert plan["runtime"] == {"variant": "cpu", "vllm_version": "0.32.0", "ray": True}
    assert plan["nodes"]["n1"] == {
        "address": "10.77.1.11",
        "interface": "eth0",
        "gpus": [],
        "nvidia": {"python_env_variant": "cpu"},
        "groups": ["ironrack_nodes", "ironrack_ray_head", "ironrack_runtime"],
    }
    worker = ["ironrack_nodes", "ironrack_ray_workers", "ironrack_engines"]
    assert plan["nodes"]["n2"]["groups"] == [*worker, "ironrack_api", "ironrack_runtime"]
    assert plan["nodes"]["n3"]["groups"] == [*worker, "ironrack_runtime"]
    assert plan["hosts"]["n1"] == {"ray": {"role": "head", "num_gpus": 0}, "instances": []}
    assert plan["hosts"]["n3"] == {"ray": {"role": "worker", "num_gpus": 2}, "instances": []}
    (engine,) = plan["hosts"]["n2"]["instances"]
    assert (engine["role"], engine["needs_ray_gpus"], engine["environment"]) == ("api", 4, {})
    assert engine["args"][:5] == ["/data/models/tiny", "--served-model-name", "tiny", "--host", "0.0.0.0"]
    assert "--gpu-memory-utilization" not in engine["args"]
    assert "--nnodes" not in engine["args"]
    instance = plan["instances"]["tiny"]
    assert instance["url"] == "http://10.77.1.12:8000"
    assert instance["world"] == [
        {"node": "n2", "rank": 0, "role": "api"},
        {"node": "n3", "rank": 1, "role": "ray"},
    ]
    assert plan["hosts_entries"][0] == {"address": "10.77.1.11", "names": ["n1"]}
    assert plan["digest"] == digest({key: value for key, value in plan.items() if key != "digest"})
    assert "tensor 2 x pipeline 2" in plan["report"]


def test_mp_over_two_nodes() -> None:
    plan, problems = run(lab(executor="mp"), {"vllm_nodes": ["n2", "n3"]})
    assert problems == []
    assert plan["ray"] is None
    first, second = (plan["hosts"][host]["instances"][0] for host in ("n2", "n3"))
    assert (first["role"], second["role"]) == ("api", "headless")
    assert second["args"][-9:] == [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "10.77.1.12",
        "--master-port",
        "29501",
        "--headless",
    ]
    assert "--headless" not in first["args"]
    assert "--port" not in second["args"]
    # n1 has nothing to do, so it is no node of the cluster.
    assert "n1" not in plan["nodes"]


def gpu_box(**variables: Any) -> dict[str, dict[str, Any]]:
    return {
        "box": {
            "gpus": {"count": 2, "name": "NVIDIA H200", "memory_total_mib": 143771},
            "vllm_instances": {
                "m": {"model": {"path": "/m", "config": str(FIXTURES / "dense_8b.json")}, "nodes": "box"}
            },
            **variables,
        }
    }


def test_nodes_that_get_a_driver() -> None:
    """Those that run engines on GPUs, each with the variables that decide its driver."""
    plan, problems = run(gpu_box(), {})
    assert problems == []
    assert "ironrack_gpu" in plan["nodes"]["box"]["groups"]
    assert plan["nodes"]["box"]["nvidia"] == {
        "python_env_variant": "cu130",
        "gpus": {"count": 2, "name": "NVIDIA H200", "memory_total_mib": 143771},
    }
    plan, _ = run(lab())
    assert not any("ironrack_gpu" in node["groups"] for node in plan["nodes"].values())


def test_variables_of_the_driver_are_checked_before_any_host_is_contacted() -> None:
    names = ("nvidia_driver_branch", "cuda_version", "nvidia_driver_mirror", "gpu_fabric_policy")
    roles = {name: {"type": "raw"} for name in names}
    wrong = {"nvidia_driver_branch": "581", "cuda_version": 13.0, "gpu_fabric_policy": {"power_limit_watts": "many"}}
    hosts = gpu_box(**wrong, nvidia_driver_mirror="https://mirror/cuda")
    checked = validate(hosts, {"fabric_type": {"type": "str"}, **roles})

    def load(variable: str, model: Any) -> Any:
        return find_config(variable, model, FIXTURES.parent)

    plan, problems = build(checked.values, {}, load)
    assert plan == {}
    assert [(item.host, item.variable, item.value) for item in problems] == [
        ("box", "nvidia_driver_branch", "581"),
        ("box", "cuda_version", "13.0"),
        ("box", "gpu_fabric_policy.power_limit_watts", "many"),
    ]
    assert "580" in problems[0].remedy
    assert "quotes" in problems[1].remedy


@pytest.mark.parametrize(
    ("wrong", "variable"),
    [
        ({"nvidia_driver_branch": 590, "nvidia_driver_version": "580.159.04"}, "nvidia_driver_version"),
        ({"nvidia_driver_branch": "550"}, "nvidia_driver_branch"),
        ({"nvidia_driver_version": "570.211.01"}, "nvidia_driver_version"),
        ({"cuda_version": "12.9"}, "cuda_version"),
        ({"nvidia_driver_source": "local"}, "nvidia_driver_local"),
        ({"nvidia_driver_precompiled": "yes"}, "nvidia_driver_precompiled"),
        ({"gpu_fabric_nvidia_smi": "/x\nExecStartPost=/y"}, "gpu_fabric_nvidia_smi"),
        ({"gpu_fabric_nvidia_smi": "/opt/my tools/nvidia-smi"}, "gpu_fabric_nvidia_smi"),
    ],
)
def test_contradictions_are_told_without_a_connection(wrong: dict[str, Any], variable: str) -> None:
    roles = {name: {"type": "raw"} for name in ("fabric_type", *wrong)}
    checked = validate(gpu_box(**wrong), roles)

    def load(path: str, model: Any) -> Any:
        return find_config(path, model, FIXTURES.parent)

    plan, problems = build(checked.values, {}, load)
    assert plan == {}
    assert {item.variable for item in problems} == {variable}
    assert all(item.remedy for item in problems)


def test_one_node_needs_no_address() -> None:
    hosts = {
        "box": {
            "gpus": {"count": 2, "name": "NVIDIA H200", "memory_total_mib": 143771},
            "vllm_instances": {
                "m": {"model": {"path": "/m", "config": str(FIXTURES / "dense_8b.json")}, "nodes": "box"}
            },
        }
    }
    plan, problems = run(hosts, {})
    assert problems == []
    assert plan["nodes"]["box"]["address"] is None
    assert plan["hosts_entries"] == []
    assert plan["instances"]["m"]["url"] == "http://127.0.0.1:8000"
    assert plan["instances"]["m"]["executor"] == "mp"


def test_ray_groups_are_derived() -> None:
    plan, problems = run(lab(), {"vllm_nodes": ["n2", "n3"]})
    assert problems == []
    assert (plan["ray"]["head"], plan["ray"]["workers"]) == ("n2", ["n3"])
    assert plan["hosts"]["n2"]["ray"] == {"role": "head", "num_gpus": 2}


def test_ray_groups_without_ray_do_nothing() -> None:
    plan, problems = run(lab(executor="mp"))
    assert problems == []
    assert plan["ray"] is None
    assert plan["nodes"]["n1"]["groups"] == ["ironrack_nodes"]
    assert any("no instance uses Ray" in text for text in plan["warnings"])


def test_no_instances() -> None:
    plan, problems = run({"n1": {}}, {"vllm_nodes": ["n1"]})
    assert problems == []
    assert plan["instances"] == {}
    assert "No instances" in plan["report"]


def test_ipv6_is_bracketed() -> None:
    hosts = lab()
    for number, host in enumerate(hosts.values(), 1):
        host["cluster_address"] = f"fd00::{number}"
    plan, problems = run(hosts)
    assert problems == []
    assert plan["ray"]["address"] == "[fd00::1]:6379"
    assert plan["instances"]["tiny"]["url"] == "http://[fd00::2]:8000"
    (engine,) = plan["hosts"]["n2"]["instances"]
    assert engine["args"][engine["args"].index("--host") + 1] == "::"


def test_ray_ports_are_those_of_the_role() -> None:
    defaults = yaml.safe_load((FIXTURES.parents[2] / "roles/ray/defaults/main.yml").read_text("utf-8"))
    assert {name: value for name, value in defaults.items() if name.endswith("_port")} == RAY_PORTS


def test_ray_port_comes_from_its_variable() -> None:
    hosts = {name: {**host, "ray_port": "6400"} for name, host in lab(port=6379).items()}
    plan, problems = run(hosts)
    assert problems == []
    assert plan["ray"]["address"] == "10.77.1.11:6400"


@pytest.mark.parametrize("gpus", ["two", 2, {"count": 2}, {"count": "x", "name": "slot", "memory_total_mib": 1}])
def test_invalid_gpus_are_told_once(gpus: Any) -> None:
    _, problems = run(set_on(lab(), "n3", gpus=gpus))
    assert problems
    assert "declares no GPUs" not in render(problems)


def test_a_builder_outside_of_the_cluster_says_where_it_is_reached() -> None:
    hosts = lab()
    for host in hosts.values():
        host["python_env_builder"] = "controller"
    hosts["controller"] = {"python_env_builder": "controller", "cluster_address": "10.77.1.250"}
    plan, problems = run(hosts)
    assert problems == []
    assert "controller" not in plan["nodes"]
    hosts["controller"]["cluster_address"] = "fd00::1"
    _, (problem,) = run(hosts)
    assert (problem.host, problem.value) == ("controller", "fd00::1")
    assert "is of another family than that of n1 (10.77.1.11)" in problem.problem
    del hosts["controller"]["cluster_address"]
    _, (problem,) = run(hosts)
    assert (problem.host, problem.variable) == ("controller", "cluster_address")
    assert "python_env_builder" in problem.problem


def test_address_from_cached_facts() -> None:
    hosts = lab()
    del hosts["n3"]["cluster_address"]
    plan, problems = run(hosts, facts={"n3": Facts(addresses={"eth0": "10.77.1.13"})})
    assert problems == []
    assert plan["nodes"]["n3"]["address"] == "10.77.1.13"
    plan, problems = run(hosts, require_addresses=False)
    assert problems == []
    # Only to be looked at: the name stands for the address.
    assert plan["nodes"]["n3"]["address"] == "n3"
    assert any("n3: cluster_address is not known yet" in text for text in plan["warnings"])
    del hosts["n2"]["cluster_address"], hosts["n2"]["cluster_interface"], hosts["n1"]["cluster_address"]
    plan, problems = run(hosts, require_addresses=False)
    assert problems == []
    assert plan["ray"]["address"] == "n1:6379"
    assert plan["instances"]["tiny"]["url"] == "http://n2:8000"


@pytest.mark.parametrize(
    ("address", "facts", "words"),
    [
        ("10.77.1.0", {"n2": 24}, "is the address of 10.77.1.0/24"),
        ("10.77.1.255", {"n2": 24}, "is the broadcast address of 10.77.1.0/24"),
        ("10.77.1.255", {"n2": 16, "n3": 24}, "is the broadcast address of 10.77.1.0/24"),
        ("10.77.1.255", {"n2": 16}, ""),
        ("10.77.1.12", {"n2": 24}, ""),
        ("10.77.1.255", {}, ""),
    ],
)
def test_address_that_no_host_can_have(address: str, facts: dict[str, int], words: str) -> None:
    """By the prefix lengths of the nodes that have been looked at."""
    hosts = lab()
    hosts["n1"]["cluster_address"] = address if address != "10.77.1.12" else hosts["n1"]["cluster_address"]
    views = {name: Facts(prefixes={hosts[name]["cluster_address"]: length}) for name, length in facts.items()}
    _, problems = run(hosts, facts=views)
    assert [(problem.host, problem.variable) for problem in problems] == ([("n1", "cluster_address")] if words else [])
    assert all(words in problem.problem for problem in problems)
    # Its own prefix length counts more than those of others.
    views["n1"] = Facts(prefixes={hosts["n1"]["cluster_address"]: 8})
    assert run(hosts, facts=views)[1] == []


def test_gpus_from_cached_facts() -> None:
    hosts = lab()
    del hosts["n3"]["gpus"]
    plan, problems = run(hosts, facts={"n3": Facts(gpus=[{"name": "slot", "memory_total_mib": 1024}] * 2)})
    assert problems == []
    assert any("gpus is not declared" in text for text in plan["warnings"])


def test_facts_view() -> None:
    view = facts_view(
        {
            "nics": [
                {
                    "name": "eth0",
                    "addresses": [
                        {"address": "fe80::1", "family": "ipv6", "scope": "link"},
                        {"address": "10.0.0.1", "family": "ipv4", "scope": "global"},
                    ],
                },
                {"name": "broken", "addresses": "x"},
            ],
            "gpus": [{"name": "NVIDIA H200", "memory_total_mib": 143771}, {"name": "x", "memory_total_mib": None}],
        }
    )
    assert view.addresses == {"eth0": "10.0.0.1"}
    assert len(view.gpus) == 1
    assert facts_view(None) == Facts()


def test_facts_of_another_inventory_are_not_used() -> None:
    facts = {"inventory": "/a", "gpus": [{"name": "NVIDIA H200", "memory_total_mib": 143771}]}
    assert len(facts_view(facts, "/a").gpus) == 1
    for other in (facts_view(facts, "/b"), facts_view(facts), facts_view({"gpus": facts["gpus"]}, "/a")):
        assert other == Facts()


def test_two_instances_share_a_node_when_their_sizes_are_pinned() -> None:
    spec = {"model": {"path": "/m", "config": str(FIXTURES / "dense_8b.json")}, "nodes": "box"}
    pins = {"tensor": 1, "pipeline": 1}
    hosts = {
        "box": {
            "gpus": {"count": 2, "name": "NVIDIA H200", "memory_total_mib": 143771},
            "vllm_instances": {
                "a": {**spec, "parallelism": pins},
                "b": {**spec, "parallelism": pins, "port": 8001},
            },
        }
    }
    plan, problems = run(hosts, {})
    assert problems == []
    visible = [item["environment"]["CUDA_VISIBLE_DEVICES"] for item in plan["hosts"]["box"]["instances"]]
    assert visible == ["0", "1"]


def two(hosts: dict[str, dict[str, Any]], **second: Any) -> dict[str, dict[str, Any]]:
    for host in hosts.values():
        instances = copy.deepcopy(host["vllm_instances"])
        instances["zwei"] = {**instances["tiny"], **second}
        host["vllm_instances"] = instances
    return hosts


def without(hosts: dict[str, dict[str, Any]], host: str, *names: str) -> dict[str, dict[str, Any]]:
    for name in names:
        del hosts[host][name]
    return hosts


def set_on(hosts: dict[str, dict[str, Any]], host: str, **values: Any) -> dict[str, dict[str, Any]]:
    hosts[host].update(values)
    return hosts


HALF = {"tensor": 1, "pipeline": 1}
THREE = {**SLOTS, "count": 3}
FOUR = {**SLOTS, "count": 4}
T = "vllm_instances.tiny"
Z = "vllm_instances.zwei"


@pytest.mark.parametrize(
    ("hosts", "groups", "variable", "value", "words"),
    [
        (
            without(lab(), "n3", "cluster_address", "cluster_interface"),
            None,
            "cluster_address",
            "(not set)",
            ["n3", "multi-homed", "cluster_interface", "spans 2 nodes"],
        ),
        (
            set_on(lab(), "n3", cluster_address="fd00::3"),
            None,
            "cluster_address",
            "fd00::3",
            ["n3", "n1 (10.77.1.11)", "family"],
        ),
        (lab(port=6384), None, f"{T}.port", "6384", ["port of Ray", "n2", "ray_dashboard_agent_listen_port"]),
        (lab(port=10150), None, f"{T}.port", "10150", ["port of Ray", "10100 to 10199"]),
        (
            {name: {**host, "ray_max_worker_port": 10300} for name, host in lab(port=10250).items()},
            None,
            f"{T}.port",
            "10250",
            ["10100 to 10300"],
        ),
        (set_on(lab(), "n3", gpus=[]), None, "gpus", "(not set)", ["n3", "declares no GPUs"]),
        (without(lab(), "n1", "cluster_address"), None, "cluster_address", "(not set)", ["n1", "eth0", "facts"]),
        (lab(nodes="vllm_node"), None, f"{T}.nodes", "vllm_node", ["did you mean vllm_nodes"]),
        (lab(nodes="empty"), {**GROUPS, "empty": []}, f"{T}.nodes", "empty", ["the group is empty", "put hosts"]),
        (lab(nodes=["n2", "n2"]), None, f"{T}.nodes", '["n2", "n2"]', ["twice"]),
        (lab(nodes=[]), None, f"{T}.nodes", "[]", ["names no host"]),
        (lab(model={"config": {}}), None, f"{T}.model.path", "(not set)", ["model.repo"]),
        (lab(model={"path": "models/x"}), None, f"{T}.model.path", "models/x", ["absolute path"]),
        (lab(model={"path": "/nowhere/x"}), None, f"{T}.model.path", "/nowhere/x", ["config.json", "model.config"]),
        (lab(model={"path": "/x", "config": "no.json"}), None, f"{T}.model.config", "no.json", ["no such file"]),
        (lab(model={"repo": "a/b"}), None, f"{T}.model.repo", "a/b", ["model_configs/a__b.json"]),
        (lab(model={"repo": "nonsense"}), None, f"{T}.model.repo", "nonsense", ["org/name"]),
        (lab(context_length=4096), None, f"{T}.context_length", "4096", ["2048", "auto"]),
        (lab(parallelism={"tensor": 3}), None, f"{T}.parallelism.tensor", "3", ["(8)", "divisible", "1, 2, 4, 8"]),
        (lab(parallelism={"tensor": 4, "pipeline": 2}), None, f"{T}.parallelism", "tensor", ["8 GPUs", "declare 4"]),
        (lab(args={"max-modl-len": 1}), None, f"{T}.args.max-modl-len", "1", ["Did you mean 'max-model-len'"]),
        (lab(args={"tensor_parallel_size": 1}), None, f"{T}.args.tensor_parallel_size", "1", ["parallelism.tensor"]),
        (without(lab(), "n2", "gpus"), None, "gpus", "(not set)", ["n2", "nvidia-smi", "count"]),
        (
            two(lab(parallelism=None)),
            None,
            f"{T}.nodes",
            "vllm_nodes",
            ["two instances on the same GPUs", "tiny, zwei"],
        ),
        (two(lab()), None, f"{Z}.nodes", "vllm_nodes", ["taken by tiny"]),
        (
            two(set_on(lab(nodes=["n2"], parallelism=HALF, executor="mp"), "n2", gpus=FOUR)),
            None,
            f"{Z}.port",
            "8000",
            ["duplicate port on n2", "vllm_instances.tiny.port"],
        ),
        (
            # Two GPUs of each node for the one, the third of each for the other: both span the nodes.
            two(
                set_on(set_on(lab(executor="mp"), "n2", gpus=THREE), "n3", gpus=THREE),
                port=8001,
                parallelism={"tensor": 1, "pipeline": 2},
            ),
            None,
            f"{Z}.master_port",
            "29501",
            ["duplicate port on n2", "master_port"],
        ),
        (
            two(set_on(lab(nodes=["n2"], parallelism=HALF), "n2", gpus=FOUR), executor="mp", port=8001),
            None,
            f"{Z}.executor",
            "mp",
            ["without Ray on n2", "tiny", "same executor"],
        ),
        (lab(), {**GROUPS, "ray_head": ["n1", "n2"]}, "ray_head", "n1, n2", ["2 hosts", "one head"]),
        (lab(), {**GROUPS, "ray_workers": ["n2"]}, "ray_workers", '["n2"]', ["n3", "leave the group out"]),
        (
            set_on(lab(), "n3", python_env_variant="cu130"),
            None,
            "python_env_variant",
            "cu130",
            ["differs", "group_vars"],
        ),
        (
            {**lab(), "n4": {"vllm_instances": {}}},
            None,
            "vllm_instances",
            "{}",
            ["n4", "differs from n1"],
        ),
        (
            {name: {**host, "python_env_vllm_version": "0.1.0"} for name, host in lab().items()},
            None,
            "python_env_vllm_version",
            "0.1.0",
            ["0.33.0"],
        ),
    ],
)
def test_refusals(hosts, groups, variable, value, words) -> None:
    plan, problems = run(copy.deepcopy(hosts), groups)
    assert plan == {}
    found = [item for item in problems if item.variable == variable]
    assert found, problems
    text = render(found)
    assert all(item.remedy for item in found)
    for word in [variable, value, *words]:
        assert word in text, text


@pytest.mark.parametrize("content", ["{", "[]", '{"hidden_size": "x"}', "{}", '{"num_attention_heads": 1e400}'])
def test_bad_config_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    plan, problems = run(lab(model={"path": "/x", "config": str(path)}))
    assert plan == {}
    (problem,) = problems
    assert problem.variable.startswith("vllm_instances.tiny.model")
    assert problem.remedy


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"hidden_size": -1}, ["hidden_size = -1"]),
        ({"num_attention_heads": None}, ["has no attention heads"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, ["factor = 'x'"]),
    ],
)
@pytest.mark.parametrize("place", ["config", "beside", "folder"])
def test_a_wrong_value_names_instance_file_and_key(
    tmp_path: Path, content: dict[str, Any], words: list[str], place: str
) -> None:
    """However the file was found: named by the user, beside the inventory, or in the model's folder."""
    file = tmp_path / {"config": "mine.json", "beside": "model_configs/a__b.json", "folder": "m/config.json"}[place]
    file.parent.mkdir(exist_ok=True)
    tiny = json.loads((FIXTURES / "dense_tiny.json").read_text("utf-8"))
    file.write_text(json.dumps({**tiny, **content}), "utf-8")
    model = {
        "config": {"path": "/x", "config": "mine.json"},
        "beside": {"repo": "a/b", "path": "/x"},
        "folder": {"path": str(file.parent)},
    }[place]
    checked = validate(lab(model=model), {name: {"type": "int"} for name in RAY_PORTS})
    _, problems = build(checked.values, GROUPS, lambda variable, each: find_config(variable, each, tmp_path))
    text = render(problems)
    for word in ["1 problem", f"{T}.model.config = {file}", *words]:
        assert word in text, text


def test_a_wrong_value_in_the_inventory_itself_is_told_there() -> None:
    tiny = json.loads((FIXTURES / "dense_tiny.json").read_text("utf-8"))
    _, problems = run(lab(model={"path": "/x", "config": {**tiny, "hidden_size": -1}}))
    assert [(item.variable, item.value) for item in problems] == [(f"{T}.model.config", "(its content)")]
    assert "hidden_size = -1" in problems[0].problem


def test_a_wrong_value_of_the_drafter_names_its_file(tmp_path: Path) -> None:
    hosts = lab(speculative={"method": "draft_model", "model": "org/small", "num_speculative_tokens": 2})
    (tmp_path / "model_configs").mkdir()
    file = tmp_path / "model_configs/org__small.json"
    file.write_text(json.dumps({**json.loads((FIXTURES / "dense_8b.json").read_text("utf-8")), "vocab_size": -5}))
    checked = validate(hosts, {name: {"type": "int"} for name in RAY_PORTS})
    _, problems = build(checked.values, GROUPS, lambda variable, model: find_config(variable, model, tmp_path))
    text = render(problems)
    assert f"{T}.speculative.model = org/small: {file}: vocab_size = -5" in text


@pytest.mark.parametrize("where", ["", "text_config"])
def test_a_key_with_two_values_is_refused(tmp_path: Path, where: str) -> None:
    content = (FIXTURES / "dense_tiny.json").read_text("utf-8")
    file = tmp_path / "config.json"
    if where:
        file.write_text(content.replace("{", '{"text_config": {"hidden_size": 1, "hidden_size": 2},', 1), "utf-8")
    else:
        file.write_text(content.replace("{", '{"hidden_size": 999,', 1), "utf-8")
    plan, problems = run(lab(model={"path": "/x", "config": str(file)}))
    assert plan == {}
    (problem,) = problems
    assert problem.problem.startswith(f"{file}: hidden_size is there twice, as ")


def test_the_same_value_twice_is_no_mistake(tmp_path: Path) -> None:
    content = (FIXTURES / "dense_tiny.json").read_text("utf-8")
    file = tmp_path / "config.json"
    file.write_text(content.replace("{", f'{{"hidden_size": {json.loads(content)["hidden_size"]},', 1), "utf-8")
    assert run(lab(model={"path": "/x", "config": str(file)}))[1] == []


def crowd(number: int, **first: Any) -> dict[str, dict[str, Any]]:
    """Many instances on the same nodes; `first` changes the first one."""
    hosts = lab(parallelism=None)
    tiny = hosts["n1"]["vllm_instances"]["tiny"]
    instances = {f"i{index}": {**tiny, "port": 8000 + index} for index in range(1, number + 1)}
    instances["i1"] |= first
    return {name: {**host, "vllm_instances": instances} for name, host in hosts.items()}


def test_many_instances_on_the_same_gpus_are_one_problem() -> None:
    _, problems = run(crowd(12))
    (problem,) = problems
    assert problem.variable == "vllm_instances.i1.nodes"
    assert problem.problem.startswith("12 instances on the same GPUs: i1, i2, i3")
    assert "i9, i10, i11, i12 use n2, n3" in problem.problem


def test_wrong_pins_are_told_beside_the_sharing() -> None:
    _, problems = run(crowd(3, parallelism={"tensor": 3}))
    assert [item.variable for item in problems] == [
        "vllm_instances.i1.nodes",
        "vllm_instances.i1.parallelism.tensor",
    ]


def test_instances_apart_are_told_apart() -> None:
    hosts = crowd(4)
    for index, instance in enumerate(hosts["n1"]["vllm_instances"].values()):
        instance["nodes"] = ["n2"] if index < 2 else ["n3"]
    _, problems = run(hosts)
    told = [(item.variable, item.problem.split(", and ")[0].split(": ")[1]) for item in problems]
    assert told == [("vllm_instances.i1.nodes", "i1, i2 use n2"), ("vllm_instances.i3.nodes", "i3, i4 use n3")]


def test_all_problems_are_collected() -> None:
    hosts = without(lab(port=1, nodes="nobody"), "n3", "cluster_address")
    hosts["n2"]["cluster_adress"] = "x"
    _, problems = run(hosts, {**GROUPS, "ray_head": ["n1", "n2"]})
    assert {item.variable for item in problems} >= {
        "vllm_instances.tiny.port",
        "vllm_instances.tiny.nodes",
        "cluster_adress",
        "ray_head",
    }


def test_any_order_of_hosts_and_groups_gives_the_same_plan() -> None:
    expected = run(lab())[0]
    order = random.Random(7)  # noqa: S311
    for _ in range(10):
        names = list(lab())
        order.shuffle(names)
        hosts = {name: lab()[name] for name in names}
        groups = {group: order.sample(members, len(members)) for group, members in GROUPS.items()}
        assert json.dumps(run(hosts, groups)[0], sort_keys=True) == json.dumps(expected, sort_keys=True)


def test_replicas_have_units_ports_and_urls_of_their_own() -> None:
    plan, problems = run(lab(parallelism={"tensor": 1, "pipeline": 1, "data": 4}, executor="mp"))
    assert problems == []
    replicas = plan["instances"]["tiny"]["replicas"]
    assert [(item["name"], item["url"]) for item in replicas] == [
        ("tiny", "http://10.77.1.12:8000"),
        ("tiny.r1", "http://10.77.1.12:8001"),
        ("tiny.r2", "http://10.77.1.13:8000"),
        ("tiny.r3", "http://10.77.1.13:8001"),
    ]
    first, second = plan["hosts"]["n2"]["instances"]
    assert (first["instance"], first["replica"]) == ("tiny", 0)
    assert (second["instance"], second["replica"], second["role"]) == ("tiny", 1, "api")
    # Clients ask all of them for the same model.
    assert all(item["args"][1:3] == ["--served-model-name", "tiny"] for item in (first, second))
    assert second["args"][second["args"].index("--port") + 1] == "8001"
    assert {"ironrack_api", "ironrack_engines"} <= set(plan["nodes"]["n3"]["groups"])


def test_a_replica_needs_its_unit_name() -> None:
    hosts = two(lab(parallelism={"tensor": 1, "pipeline": 1, "data": 2}, executor="mp", nodes=["n2"]), nodes=["n3"])
    for host in hosts.values():
        host["vllm_instances"]["tiny.r1"] = host["vllm_instances"].pop("zwei")
    _, problems = run(hosts)
    assert any("vllm@tiny.r1.service is that of a replica of tiny" in str(problem) for problem in problems)


def test_replicas_stay_below_the_last_port() -> None:
    _, problems = run(lab(parallelism={"tensor": 1, "pipeline": 1, "data": 4}, executor="mp", port=65535))
    assert any("beyond 65535" in str(problem) for problem in problems)


def test_data_parallel_ranks_over_nodes_meet_without_ray() -> None:
    instance: dict[str, Any] = {
        "model": {"path": "/data/models/moe", "config": str(FIXTURES / "moe_128_experts.json")},
        "nodes": ["n2", "n3"],
        "context_length": 8192,
        "parallelism": {"tensor": 1, "data": 4, "expert": True},
    }
    hosts = lab()
    for host in hosts.values():
        host |= {"vllm_instances": {"moe": instance}, "fabric_type": "infiniband"}
        host |= {"python_env_variant": "cu130", "python_env_vllm_version": "0.33.0"}
    for name in ("n2", "n3"):
        hosts[name]["gpus"] = {"count": 2, "name": "NVIDIA H200", "memory_total_mib": 143771}
    plan, problems = run(hosts)
    assert problems == []
    first, second = (plan["hosts"][host]["instances"][0] for host in ("n2", "n3"))
    meeting = ["--data-parallel-size-local", "2", "--data-parallel-address", "10.77.1.12"]
    meeting += ["--data-parallel-rpc-port", "29550"]
    assert first["args"][-6:] == meeting
    assert second["args"][-9:] == [*meeting, "--data-parallel-start-rank", "2", "--headless"]
    assert (first["role"], second["role"]) == ("api", "headless")
    # These ranks give the meeting port up once they have met, so nothing watches it.
    assert second["meeting_port"] is None


@pytest.mark.parametrize("fabric", ["auto", "tcp", "infiniband", "roce"])
def test_every_fabric_that_joins_nodes_can_be_planned(fabric: str) -> None:
    _, problems = run({host: values | {"fabric_type": fabric} for host, values in lab().items()})
    assert problems == []


def test_nodes_of_an_engine_agree_on_the_fabric() -> None:
    hosts = lab()
    hosts["n2"]["fabric_type"] = "infiniband"
    _, problems = run(hosts)
    assert [(problem.host, problem.variable) for problem in problems] == [("n3", "fabric_type")]
    # On a node of its own an engine needs none.
    alone = lab(nodes=["n3"], parallelism={"tensor": 2, "pipeline": 1}, executor="mp")
    assert run({host: values | {"fabric_type": "nvlink"} for host, values in alone.items()})[1] == []


def test_the_drafter_is_priced_where_its_config_is_known(tmp_path: Path) -> None:
    hosts = lab(
        parallelism=None, executor=None, nodes=["n2"], speculative={"method": "draft_model", "model": "org/small"}
    )
    for host in hosts.values():
        host |= {"python_env_variant": "cu130", "python_env_vllm_version": "0.33.0"}
        host["vllm_instances"]["tiny"]["speculative"]["num_speculative_tokens"] = 2
        host["vllm_instances"]["tiny"]["model"]["config"] = str(FIXTURES / "dense_8b.json")
        host["vllm_instances"]["tiny"]["context_length"] = 4096
    hosts["n2"]["gpus"] = {"count": 1, "name": "NVIDIA H200", "memory_total_mib": 143771}

    def figures(folder: Path) -> tuple[float, list[str]]:
        checked = validate(hosts, {name: {"type": "int"} for name in RAY_PORTS})
        plan, problems = build(checked.values, GROUPS, lambda variable, model: find_config(variable, model, folder))
        assert [*checked.problems, *problems] == []
        return plan["instances"]["tiny"]["plan"]["estimate"]["weights_gib"], plan["warnings"]

    without_draft, warnings = figures(tmp_path)
    assert any("org/small is not priced" in text for text in warnings)
    (tmp_path / "model_configs").mkdir()
    (tmp_path / "model_configs/org__small.json").write_text((FIXTURES / "dense_8b.json").read_text("utf-8"), "utf-8")
    with_draft, warnings = figures(tmp_path)
    assert with_draft > without_draft + 10
    assert not any("org/small" in text for text in warnings)


def test_an_empty_inventory_is_an_error() -> None:
    plan, problems = run({}, {})
    assert plan == {}
    (problem,) = problems
    assert (problem.variable, problem.problem) == ("inventory", "names no host")
    assert "-i inventories/prod" in problem.remedy


def test_gpus_without_a_count_are_told() -> None:
    hosts = lab(parallelism={"tensor": 1, "pipeline": 2})
    for name in ("n2", "n3"):
        hosts[name]["gpus"] = {"name": "slot", "memory_total_mib": 4096}
    plan, problems = run(hosts)
    assert not problems
    assert "n2, n3: gpus has no count, which means one GPU a node" in plan["warnings"]
    assert not any("count" in text for text in run(lab())[0]["warnings"])


def test_nodes_without_a_free_gpu_name_who_takes_them() -> None:
    _, problems = run(two(lab(), nodes=["n2", "n3"], port=8001))
    (problem,) = [item for item in problems if item.variable == "vllm_instances.zwei.nodes"]
    assert problem.problem == "every GPU of n2, n3 is taken by tiny"
    assert "pin smaller sizes of tiny" in problem.remedy
