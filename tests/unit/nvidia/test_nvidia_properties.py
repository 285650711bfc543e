"""What holds for every host and every wish."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from typing import Any

from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia import matrix
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.errors import StackError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.request import CHOICES, DEFAULTS
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.stack import empty, stack
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.versions import driver_key
from hypothesis import given, settings
from hypothesis import strategies as st

NEVER = {name for name, row in matrix.GENERATIONS.items() if row.open_module == "never"}
ONLY = {name for name, row in matrix.GENERATIONS.items() if row.open_module == "only"}

devices = st.sampled_from([*matrix.BOARDS, 0x2684, 0x2B85, 0x1B80, 0x1F02, 0x4000, 0x102D])
functions = st.lists(st.tuples(devices, st.integers(1, 8)), max_size=2).map(
    lambda groups: [
        {"address": "0000:01:00.0", "device": f"0x{device:04x}", "class": "0x030200"}
        for device, count in groups
        for _ in range(count)
    ]
)
switches = st.integers(0, 4).map(lambda count: [{"device": "0x22a3", "class": "0x068000"}] * count)
facts_of_hosts = st.builds(
    lambda gpus, bridges, distribution, architecture, release, rdma: {
        "distribution": {"id": distribution[0], "version": distribution[1]},
        "kernel": {"release": release, "architecture": architecture},
        "kernels": [{"release": release}],
        "nvidia_functions": gpus + bridges,
        "rdma": rdma,
    },
    functions,
    switches,
    st.sampled_from([(row.id, row.version) for row in matrix.DISTRIBUTIONS] + [("arch", "1")]),
    st.sampled_from(["x86_64", "aarch64", "ppc64le"]),
    st.sampled_from(["6.1.0-40-amd64", "6.8.0-90-generic", "5.4.0", ""]),
    st.sampled_from([[], [{"device": "mlx5_0"}]]),
)
versions = [row.version for row in matrix.BRANCHES.values() if row.version]
wishes = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(choices) for name, choices in CHOICES.items()},
        "nvidia_driver_branch": st.sampled_from(["auto", *matrix.BRANCHES, "580", 123]),
        "nvidia_driver_version": st.sampled_from(["auto", *versions]),
        "cuda_version": st.sampled_from(["auto", "none", "12.9", "13.0", "13.1"]),
        "nvidia_driver_local": st.sampled_from(["", "/srv/nvidia", "https://depot/nvidia"]),
        "gpus": st.sampled_from([[], {"count": 8, "name": "NVIDIA B200"}, [{"count": 2, "name": "Tesla T4"}]]),
    },
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def generations(facts: dict[str, Any]) -> set[str]:
    found = set()
    for function in facts["nvidia_functions"]:
        device = int(function["device"], 16)
        board = matrix.BOARDS.get(device)
        spans = [row.generation for row in matrix.RANGES if row.first <= device <= row.last]
        if function["class"].startswith("0x03"):
            found.add(board.generation if board else (spans or [None])[0])
    return {name for name in found if name}


@settings(max_examples=400, deadline=None)
@given(facts_of_hosts, wishes)
def test_rules_that_always_hold(facts: dict[str, Any], request: dict[str, Any]) -> None:
    before = copy.deepcopy((facts, request))
    answer = stack(facts, request)
    assert (facts, request) == before
    assert stack(facts, request) == answer
    assert set(answer) == set(empty())
    if answer["problems"]:
        told = {"reasons", "warnings", "problems"}
        assert {key: value for key, value in answer.items() if key not in told} == {
            key: value for key, value in empty().items() if key not in told
        }
        for problem in answer["problems"]:
            assert set(problem) == {"variable", "value", "message", "remedy", "text"}
            assert problem["variable"] in DEFAULTS or problem["variable"].startswith("ironrack_host.")
            assert problem["message"] and problem["remedy"]
        return
    if not answer["needed"]:
        return
    kinds = generations(facts)
    variant = request.get("python_env_variant", "cu130")
    assert answer["branch"] >= matrix.CUDA[variant].floor or answer["cuda"]["compat"]
    assert not (answer["flavour"] == "open" and kinds & NEVER)
    assert not (answer["flavour"] == "proprietary" and kinds & ONLY)
    for kind in kinds:
        row = matrix.GENERATIONS[kind]
        assert row.first_branch <= answer["branch"] <= (row.last_branch or 999)
    fabric = answer["packages"]["fabric"]
    if fabric:
        assert answer["fabric_version"] == answer["version"]
    driver_pins = [pin for pin in answer["pins"] if pin["pin"].startswith("version")]
    for pin in driver_pins:
        assert pin["pin"] == f"version {answer['version_pin']}"
        for name in [*fabric, *answer["packages"]["driver"]]:
            # nvlsm is numbered by date: it fits every driver.
            assert name == "nvlsm" or any(fnmatchcase(name, glob) for glob in pin["package"].split()), name
    managed = any("fabricmanager" in name for name in fabric)
    assert managed == any(service["name"] == "nvidia-fabricmanager" for service in answer["services"])
    if managed and request.get("gpu_fabric_manager", "auto") == "auto":
        assert answer["hardware"]["nvswitch"]
    if "compat" in str(answer["packages"]["cuda"]):
        assert answer["hardware"]["datacenter"]
    names = [name for part in ("driver", "fabric", "cuda", "tools") for name in answer["packages"][part]]
    assert len(names) == len(set(names))
    assert set(names) <= set(answer["hold"])
    assert not any("{" in name for name in names)
    assert not set(answer["remove"]) & set(names)
    assert {"nouveau"} <= set(answer["modules"]["blacklist"])


@settings(max_examples=300, deadline=None)
@given(anything, anything)
def test_no_other_exception(facts: Any, request: Any) -> None:
    try:
        answer = stack(facts, request)
    except StackError:
        return
    assert set(answer) == set(empty())


keys = st.sampled_from(["distribution", "kernel", "kernels", "nvidia_functions", "gpus", "packages", "nvidia_driver"])


@settings(max_examples=300, deadline=None)
@given(facts_of_hosts, st.dictionaries(keys, anything, max_size=2), st.sampled_from(sorted(DEFAULTS)), anything)
def test_damaged_facts_and_variables(facts: dict[str, Any], damage: dict[str, Any], name: str, value: Any) -> None:
    assert set(stack(facts | damage, {name: value})) == set(empty())


@settings(max_examples=300, deadline=None)
@given(facts_of_hosts, wishes, st.sampled_from(versions))
def test_a_downgrade_is_named_or_needed(facts: dict[str, Any], request: dict[str, Any], there: str) -> None:
    """Whatever a host has: an older driver comes only where one was asked for, or the newer one drives no GPU of it."""
    answer = stack(facts | {"nvidia_driver": {"loaded": there}}, request)
    named = {"nvidia_driver_branch", "nvidia_driver_version"} & {
        name for name, value in request.items() if value != "auto"
    }
    if not answer["needed"] or named or answer["source"] == "distribution":
        return
    own = int(there[:3])
    driven = all(
        row.first_branch <= own <= (row.last_branch or own)
        for row in (matrix.GENERATIONS[kind] for kind in generations(facts))
    )
    if driven and own >= matrix.CUDA[request.get("python_env_variant", "cu130")].floor:
        assert answer["branch"] >= own
        assert not answer["version"] or driver_key(answer["version"]) >= driver_key(there)
