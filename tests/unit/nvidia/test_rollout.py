"""Which nodes change their driver one after the other, and that the playbook does so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.errors import StackError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.rollout import in_turn
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.stack import stack

ROOT = Path(__file__).resolve().parents[3]
NAMES = ["libnvidia-compute-580", "nvidia-dkms-580-open", "nvidia-utils-580", "nvidia-persistenced"]


def node(serving: Any, version: str | None, *more: str) -> dict[str, Any]:
    names = [*NAMES, "datacenter-gpu-manager-4-cuda13", *more] if version else []
    return {
        "distribution": {"id": "ubuntu", "version": "24.04"},
        "kernel": {"release": "6.8.0-90-generic", "architecture": "x86_64"},
        "kernels": [{"release": "6.8.0-90-generic", "headers": True}],
        "nvidia_functions": [{"device": "0x2335", "class": "0x030200"}],
        "packages": [{"name": name, "version": f"1:{version}-0ubuntu1", "state": "hi"} for name in names],
        "serving": serving,
    }


def waits(facts: dict[str, Any], **request: Any) -> list[str]:
    return in_turn(facts, stack(facts, request))


def test_a_node_that_serves_waits_while_its_driver_changes() -> None:
    facts = node(["ray-worker.service", "vllm@x.service"], "580.105.08")
    [text] = waits(facts)
    assert text.startswith("ray-worker.service, vllm@x.service: ")
    assert "libnvidia-compute-580 1:580.105.08-0ubuntu1 is to become 580.159.04-*" in text
    assert waits(facts, nvidia_driver_source="none") == []


@pytest.mark.parametrize(
    "facts",
    [
        node([], "580.105.08"),
        node(["vllm@x.service"], "580.159.04"),
        # A newer one is kept, so nothing changes.
        node(["vllm@x.service"], "580.211.01"),
    ],
)
def test_everybody_else_goes_at_once(facts: dict[str, Any]) -> None:
    assert waits(facts) == []


def test_what_comes_and_what_goes_is_a_change() -> None:
    serving = ["vllm@x.service"]
    assert "is to be installed" in waits(node(serving, None))[0]
    assert waits(node(serving, "580.159.04", "libnvidia-compute-570"))[0].endswith(
        "libnvidia-compute-570 is to be removed"
    )
    # Left behind files in /etc are no package.
    left = node(serving, "580.159.04")
    left["packages"].append({"name": "libnvidia-compute-570", "version": "570.211.01-1", "state": "rc"})
    assert waits(left) == []


def test_facts_that_do_not_tell_count_as_serving() -> None:
    assert "unknown" in waits(node(None, "580.105.08"))[0]
    with pytest.raises(StackError, match="facts"):
        in_turn(None, {})
    with pytest.raises(StackError, match="stack"):
        in_turn({}, None)


def test_the_playbook_changes_those_nodes_a_few_at_a_time() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/host.yml").read_text("utf-8"))
    roles = [[role["role"].rpartition(".")[2] for role in play.get("roles", [])] for play in plays]
    driver = [number for number, names in enumerate(roles) if "nvidia_driver" in names]
    assert "host_facts" in str(plays[1]["tasks"])
    assert roles.index(["base"]) > 1, "what cannot be had is refused before a host is changed"
    assert [plays[number]["hosts"] for number in driver] == [
        "ironrack_gpu:!ironrack_in_turn",
        "ironrack_gpu:&ironrack_in_turn",
    ]
    assert "serial" not in plays[driver[0]]
    assert "host_reboot_serial" in plays[driver[1]]["serial"]
    assert roles[driver[1]] == ["nvidia_driver", "cuda", "gpu_fabric", "host_reboot"]
