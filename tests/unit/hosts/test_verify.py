"""The comparison of a host with what the inventory declares."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.verify import (
    COMPARED,
    host_report,
    model_paths,
    wanted_paths,
)

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}

PLAN: dict[str, Any] = {
    "site": {"prefix": "/opt/ironrack", "current": "/opt/ironrack/current", "state_dir": "/var/lib/ironrack"},
    "nodes": {
        "n1": {"address": "10.77.1.11", "interface": "eth0", "gpus": []},
        "n2": {"address": "10.77.1.12", "interface": "eth0", "gpus": [H200, H200]},
    },
    "runtime": {"variant": "cu130"},
    "instances": {"big": {"model_path": "/data/models/big", "world": [{"node": "n2", "rank": 0, "role": "api"}]}},
}


def facts(**more: Any) -> dict[str, Any]:
    present: dict[str, Any] = {"exists": True, "kind": "directory", "free_bytes": 10**12}
    return {
        "gpus": [H200 | {"index": 0, "mig": False}, H200 | {"index": 1, "mig": None}],
        "nvidia": {"pci_devices": ["0000:06:00.0", "0000:07:00.0"], "error": None},
        "nics": [
            {
                "name": "eth0",
                "up": True,
                "kind": "physical",
                "addresses": [{"address": "10.77.1.12", "family": 4, "scope": "global"}],
            }
        ],
        "filesystems": [{"mountpoint": "/dev/shm", "size_bytes": 2**33}],
        "paths": {
            "/data/models/big": present,
            "/data/models/big/config.json": present | {"kind": "file"},
            "/opt/ironrack": present,
            "/var/lib/ironrack": present,
            "/opt/ironrack/current": present | {"exists": False},
        },
        "warnings": [],
    } | more


def problems(changed: dict[str, Any] | None = None, plan: dict[str, Any] = PLAN, host: str = "n2") -> list[str]:
    return host_report(facts(**(changed or {})), plan, host, {"prefix": 10, "state_dir": 2})["problems"]


def test_as_declared() -> None:
    assert host_report(facts(), PLAN, "n2", {"prefix": 10}) == {"problems": [], "warnings": []}


def test_paths_to_look_for() -> None:
    assert model_paths(PLAN, "n2") == ["/data/models/big", "/data/models/big/config.json"]
    assert wanted_paths(PLAN, "n1") == ["/opt/ironrack", "/opt/ironrack/current", "/var/lib/ironrack"]


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([H200 | {"index": 0}], ["2 × NVIDIA H200 (143771 MiB)", "1 × NVIDIA H200", "1 more on the PCI bus"]),
        ([H200 | {"index": i, "name": "NVIDIA H100"} for i in (0, 1)], ["2 × NVIDIA H200", "2 × NVIDIA H100"]),
        ([H200 | {"index": i, "memory_total_mib": 81559} for i in (0, 1)], ["(143771 MiB)", "(81559 MiB)"]),
        ([H200 | {"index": i} for i in range(3)], ["2 × NVIDIA H200", "3 × NVIDIA H200"]),
    ],
)
def test_other_gpus_than_declared(gpus: list[Any], words: list[str]) -> None:
    (problem,) = problems({"gpus": gpus})
    for word in [*words, "gpus of n2"]:
        assert word in problem


def test_gpus_alike_in_name_and_last_digit() -> None:
    gpus = [{"index": i, "name": "h200 ", "memory_total_mib": 143770} for i in (0, 1)]
    assert problems({"gpus": gpus}) == []


def test_no_gpus_at_all_tells_the_reason() -> None:
    broken = {"gpus": [], "nvidia": {"pci_devices": ["a", "b"], "error": "NVIDIA-SMI has failed"}}
    (problem,) = problems(broken)
    for word in ("shows no GPU", "NVIDIA-SMI has failed", "2 NVIDIA GPUs on its PCI bus", "python_env_variant"):
        assert word in problem


def gpu_plan(**variables: Any) -> dict[str, Any]:
    """The driver of n2 is this project's to install."""
    plan = copy.deepcopy(PLAN)
    plan["nodes"]["n2"] |= {"groups": ["ironrack_gpu"], "nvidia": {"python_env_variant": "cu130"} | variables}
    return plan


BARE: dict[str, Any] = {
    "gpus": [],
    "nvidia": {"pci_devices": ["0000:06:00.0", "0000:07:00.0"], "error": "nvidia-smi is not installed"},
    "distribution": {"id": "debian", "version": "12"},
    "kernel": {"release": "6.1.0-40-amd64", "architecture": "x86_64"},
    "nvidia_functions": [{"address": f"0000:0{n}:00.0", "device": "0x2335", "class": "0x030200"} for n in (6, 7)],
}


def test_a_host_without_a_driver_is_one_to_install_it_on() -> None:
    report = host_report(facts(**BARE), gpu_plan(), "n2", {})
    assert report["problems"] == []
    assert "nvidia-smi is not installed" in report["warnings"][0]
    assert "playbooks/host.yml" in report["warnings"][0]


def test_gpus_missing_on_the_bus_are_refused_before_the_driver_is_there() -> None:
    one = BARE | {"nvidia": {"pci_devices": ["0000:06:00.0"], "error": "nvidia-smi is not installed"}}
    (problem,) = problems(one, gpu_plan())
    assert "1 NVIDIA GPUs on its PCI bus" in problem


def test_a_driver_of_somebody_else_must_be_there_already() -> None:
    (problem,) = problems(BARE, gpu_plan(nvidia_driver_source="none"))
    assert "shows no GPU" in problem


def test_what_cannot_be_installed_is_told_before_anything_is() -> None:
    found = problems(BARE, gpu_plan(nvidia_driver_source="distribution"))
    assert any(text.startswith("n2: nvidia_driver_source is 'distribution'") and "cu129" in text for text in found)


def test_a_wish_that_is_refused_is_the_only_error() -> None:
    """Whether the missing driver is one too cannot be told before it is known which one is wanted."""
    (problem,) = problems(BARE, gpu_plan(nvidia_driver_branch=570))
    assert problem.startswith("n2: nvidia_driver_branch is 570")


def test_only_what_is_asked_for_is_compared() -> None:
    wrong = facts(gpus=[], nics=[], paths={}, filesystems=[{"mountpoint": "/dev/shm", "size_bytes": 1}])
    counts = {part: len(host_report(wrong, PLAN, "n2", {}, [part])["problems"]) for part in COMPARED}
    assert counts == {"gpus": 1, "network": 1, "models": 1, "space": 1}
    assert len(host_report(wrong, PLAN, "n2", {})["problems"]) == 4


def test_mig_is_refused() -> None:
    (problem,) = problems({"gpus": [H200 | {"index": 0, "mig": True}, H200 | {"index": 1}]})
    assert "MIG is enabled on GPU 0 of n2" in problem


def test_slots_of_the_cpu_build_are_not_compared() -> None:
    plan = copy.deepcopy(PLAN) | {"runtime": {"variant": "cpu"}}
    assert problems({"gpus": [], "nvidia": {}}, plan) == []


def test_undeclared_gpus_are_a_warning_only_where_an_engine_runs() -> None:
    plan = copy.deepcopy(PLAN)
    plan["nodes"]["n2"]["gpus"] = []
    report = host_report(facts(), plan, "n2", {})
    assert report["problems"] == []
    assert report["warnings"] == ["n2 has 2 × NVIDIA H200 (143771 MiB), and its variable gpus declares none"]


def test_network() -> None:
    (problem,) = problems({"nics": []})
    assert "cluster_interface of n2 is eth0, which it does not have" in problem


@pytest.mark.parametrize(
    ("path", "entry", "words"),
    [
        ("/data/models/big", {"exists": False}, "does not exist"),
        ("/data/models/big", {"exists": True, "kind": "file"}, "is not a folder"),
        ("/data/models/big/config.json", {"exists": False}, "holds no config.json"),
    ],
)
def test_model_that_is_not_there(path: str, entry: dict[str, Any], words: str) -> None:
    (problem,) = problems({"paths": facts()["paths"] | {path: entry}})
    assert f"model path /data/models/big of instance big {words} on n2" in problem
    assert "vllm_instances.big.model" in problem


def test_model_of_another_node_does_not_matter() -> None:
    lone = facts()["nics"][0] | {"addresses": [{"address": "10.77.1.11", "family": 4, "scope": "global"}]}
    assert problems({"paths": {}, "nics": [lone]}, host="n1") == []


def test_space_is_a_problem_before_the_first_release_and_a_warning_after() -> None:
    little = facts()["paths"] | {"/opt/ironrack": {"exists": True, "kind": "directory", "free_bytes": 3 * 2**30}}
    (problem,) = problems({"paths": little})
    assert problem.startswith("/opt/ironrack on n2 has 3.0 GiB free, host_facts_min_free_gib.prefix asks for 10")
    serving = little | {"/opt/ironrack/current": {"exists": True, "kind": "directory", "free_bytes": 1}}
    report = host_report(facts(paths=serving), PLAN, "n2", {"prefix": 10})
    assert report["problems"] == []
    assert len(report["warnings"]) == 1


def test_small_shared_memory() -> None:
    (problem,) = problems({"filesystems": [{"mountpoint": "/dev/shm", "size_bytes": 64 * 2**20}]})
    assert "/dev/shm on n2 holds 64 MiB" in problem


def test_all_problems_at_once_and_the_modules_warnings() -> None:
    report = host_report(facts(gpus=[], nics=[], paths={}, warnings=["rdma: odd"]), PLAN, "n2", {})
    assert len(report["problems"]) == 3
    assert report["warnings"] == ["n2: rdma: odd"]


def test_host_without_a_part_in_the_plan() -> None:
    assert host_report({}, PLAN, "other") == {"problems": [], "warnings": []}
