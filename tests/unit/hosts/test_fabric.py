"""The environment of a node, and the traps it has to avoid."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.errors import HostError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.fabric import FABRICS, check, node_environment

NODE = {"interface": "eth0", "address": "10.77.1.12"}
NIC = {"name": "eth0", "up": True, "addresses": [{"address": "10.77.1.12", "family": 4, "scope": "global"}]}
PORTS = [
    {"device": "mlx5_0", "port": 1, "link_layer": "InfiniBand", "state": "ACTIVE"},
    {"device": "mlx5_1", "port": 1, "link_layer": "InfiniBand", "state": "DOWN"},
    {"device": "mlx5_2", "port": 1, "link_layer": "Ethernet", "state": "ACTIVE"},
]
FACTS: dict[str, Any] = {"nics": [NIC], "rdma": PORTS}

IDENTITY = {"NODE_IP": "10.77.1.12", "VLLM_HOST_IP": "10.77.1.12", "GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("fabric", "hcas", "more"),
    [
        ("auto", [], {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ("nvlink", [], {}),
        ("tcp", [], {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_DISABLE": "1"}),
        ("infiniband", [], {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NET": "IB"}),
        ("infiniband", ["mlx5_0:1"], {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NET": "IB", "NCCL_IB_HCA": "=mlx5_0:1"}),
        ("roce", ["mlx5_2"], {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NET": "IB", "NCCL_IB_HCA": "=mlx5_2"}),
    ],
)
def test_profiles(fabric: str, hcas: list[str], more: dict[str, str]) -> None:
    assert node_environment(FACTS, NODE, "n2", fabric_type=fabric, hcas=hcas) == IDENTITY | more


@pytest.mark.parametrize("fabric", FABRICS)
def test_never_empty_never_a_gid_index(fabric: str) -> None:
    environment = node_environment(FACTS, NODE, "n2", fabric_type=fabric)
    assert all(environment.values())
    assert not [name for name in environment if "GID" in name]
    assert not environment["GLOO_SOCKET_IFNAME"].startswith("=")


def test_interface_comes_from_the_address() -> None:
    environment = node_environment(FACTS, {"interface": None, "address": "10.77.1.12"}, "n2")
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_facts_are_not_needed_when_the_inventory_says_it_all() -> None:
    assert node_environment({}, NODE, "n2")["NODE_IP"] == "10.77.1.12"
    with pytest.raises(HostError, match=r"playbooks/facts\.yml"):
        node_environment({}, {"interface": None, "address": "10.77.1.12"}, "n2")


def test_ipv6_is_written_plain() -> None:
    nic = NIC | {"addresses": [{"address": "fd00::12", "family": 6, "scope": "global"}]}
    environment = node_environment({"nics": [nic]}, {"interface": "eth0", "address": "FD00:0::12"}, "n2")
    assert environment["VLLM_HOST_IP"] == "fd00::12"


def test_a_name_is_no_address() -> None:
    with pytest.raises(HostError, match="not an IP address"):
        node_environment({}, {"interface": "eth0", "address": "n2.example.org"}, "n2")


def test_extra_variables_come_last_and_as_strings() -> None:
    environment = node_environment(FACTS, NODE, "n2", fabric_type="tcp", extra={"NCCL_IB_DISABLE": "0", "A": 1})
    assert environment["NCCL_IB_DISABLE"] == "0"
    assert environment["A"] == "1"


@pytest.mark.parametrize(
    ("fabric", "hcas", "words"),
    [
        ("infiniband", ["mlx5_9"], "mlx5_9, which is not an active InfiniBand port of n2"),
        ("infiniband", ["mlx5_1"], "mlx5_1, which is not an active"),
        ("roce", ["mlx5_0"], "mlx5_0, which is not an active Ethernet port"),
        ("infiniband", ["mlx5_0:2"], "mlx5_0:2, which is not"),
    ],
)
def test_devices_that_are_not_there(fabric: str, hcas: list[str], words: str) -> None:
    with pytest.raises(HostError, match=words):
        node_environment(FACTS, NODE, "n2", fabric_type=fabric, hcas=hcas)


def test_fabric_that_is_not_there() -> None:
    with pytest.raises(HostError, match=r"no active RDMA port with link layer InfiniBand \(it has none\)"):
        node_environment(FACTS | {"rdma": []}, NODE, "n2", fabric_type="infiniband")


@pytest.mark.parametrize(
    ("fabric", "hcas", "extra", "words"),
    [
        ("ib", [], {}, "fabric_type is ib; it is one of auto"),
        ("tcp", ["mlx5_0"], {}, "fabric_hcas is mlx5_0 and fabric_type tcp"),
        ("roce", ["=mlx5_0"], {}, "fabric_hcas holds '=mlx5_0'"),
        ("auto", [], {"NCCL_IB_GID_INDEX": ""}, "not the same as not set"),
        ("auto", [], {"NCCL_IB_GID_INDEX": None}, "not the same as not set"),
        ("auto", [], {"VLLM_HOST_IP": "1.2.3.4"}, "set from cluster_interface"),
        ("auto", [], {"HF_TOKEN": "x"}, "readable by everybody"),
        ("auto", [], {"a b": "x"}, "not the name of a variable"),
        ("auto", [], {"A": ["x"]}, "not a string"),
    ],
)
def test_what_cannot_be_right(fabric: str, hcas: list[str], extra: dict[str, Any], words: str) -> None:
    with pytest.raises(HostError, match=words):
        check(fabric, hcas, extra)


def test_warnings() -> None:
    assert check("auto", [], {"NCCL_SOCKET_IFNAM": "x"}) == [
        "fabric_environment.NCCL_SOCKET_IFNAM is not a variable known here; did you mean NCCL_SOCKET_IFNAME?"
    ]
    assert "no such variable" in check("auto", [], {"NCCL_TIMEOUT": "1"})[0]
    assert check("auto", [], {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "1", "NCCL_SOMETHING_NEW_AND_LONG": "1"}) == []
