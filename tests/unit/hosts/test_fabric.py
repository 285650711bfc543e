"""The environment of a node, and the traps it has to avoid."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.filter.host_problems import FilterModule
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.errors import HostError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.fabric import (
    FABRICS,
    address_family,
    check,
    node_environment,
    not_carried,
    transfers,
)

NODE = {"interface": "eth0", "address": "10.77.1.12"}
NIC = {"name": "eth0", "up": True, "addresses": [{"address": "10.77.1.12", "family": 4, "scope": "global"}]}
PORTS = [
    {"device": "mlx5_0", "port": 1, "link_layer": "InfiniBand", "state": "ACTIVE"},
    {"device": "mlx5_1", "port": 1, "link_layer": "InfiniBand", "state": "DOWN"},
    {"device": "mlx5_2", "port": 1, "link_layer": "Ethernet", "state": "ACTIVE"},
]
FACTS: dict[str, Any] = {"nics": [NIC], "rdma": PORTS}

IDENTITY = {
    "NODE_IP": "10.77.1.12",
    "VLLM_HOST_IP": "10.77.1.12",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.77.1.12",
    "GLOO_SOCKET_IFNAME": "eth0",
}
RDMA = {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NET": "IB"}


def port(
    device: str, layer: str = "InfiniBand", *, state: str = "ACTIVE", root: str = "", **more: Any
) -> dict[str, Any]:
    """A port; with `root` the bus of the root port above it."""
    bridges = [f"0000:{root}:01.0", f"0000:{root}:02.0"] if root else []
    return {"device": device, "port": 1, "link_layer": layer, "state": state, "bridges": bridges} | more


def gpu(index: int, root: str) -> dict[str, Any]:
    return {"index": index, "pci": f"0000:{root}:1{index}.0", "bridges": [f"0000:{root}:01.0", f"0000:{root}:03.0"]}


@pytest.mark.parametrize(
    ("fabric", "hcas", "more"),
    [
        ("auto", [], {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ("nvlink", [], {}),
        ("tcp", [], {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_DISABLE": "1"}),
        # The adapter of the other link layer must not be taken.
        ("infiniband", [], RDMA | {"NCCL_IB_HCA": "=mlx5_0:1"}),
        ("infiniband", ["mlx5_0"], RDMA | {"NCCL_IB_HCA": "=mlx5_0"}),
        ("roce", ["mlx5_2:1"], RDMA | {"NCCL_IB_HCA": "=mlx5_2:1"}),
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
    with pytest.raises(HostError, match=r"RDMA devices of n2 yet; run playbooks/facts\.yml"):
        node_environment({}, NODE, "n2", fabric_type="roce")


def test_ipv6_is_written_plain() -> None:
    nic = NIC | {"addresses": [{"address": "fd00::12", "family": 6, "scope": "global"}]}
    environment = node_environment({"nics": [nic]}, {"interface": "eth0", "address": "FD00:0::12"}, "n2")
    assert environment["VLLM_HOST_IP"] == environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "fd00::12"
    assert environment["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    assert "NCCL_SOCKET_FAMILY" not in node_environment(FACTS, NODE, "n2")


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
        ("ib", [], {}, "fabric_type = ib: is not known; use one of auto"),
        ("tcp", ["mlx5_0"], {}, "fabric_hcas = mlx5_0: RDMA devices go with .* and that is tcp; set one"),
        ("roce", ["=mlx5_0"], {}, "fabric_hcas = =mlx5_0: is no device"),
        ("auto", [], {"NCCL_IB_GID_INDEX": ""}, "not the same as not set"),
        ("auto", [], {"NCCL_IB_GID_INDEX": None}, "not the same as not set"),
        ("auto", [], {"VLLM_HOST_IP": "1.2.3.4"}, "set from cluster_interface"),
        ("auto", [], {"HF_TOKEN": "x"}, "readable by everybody"),
        ("auto", [], {"a b": "x"}, "not the name of a variable"),
        ("auto", [], {"A": ["x"]}, "not a string"),
        ("auto", [], {"VLLM_NIXL_SIDE_CHANNEL_HOST": "1.2.3.4"}, "set from cluster_interface"),
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


@pytest.mark.parametrize(
    ("fabric", "rails", "numbers", "words"),
    [
        ("roce", "isolatd", {}, "fabric_rails = isolatd: is not known; use one of shared, isolated"),
        ("tcp", "isolated", {}, "fabric_rails = isolated: .* but fabric_type is tcp"),
        ("roce", "shared", {"fabric_traffic_class": 256}, "fabric_traffic_class = 256: .* number from 0 to 255"),
        ("roce", "shared", {"fabric_service_level": -1}, "fabric_service_level = -1: .* number from 0 to 15"),
        ("roce", "shared", {"fabric_queue_pairs": 0}, "fabric_queue_pairs = 0: .* number from 1 to 128"),
        (
            "infiniband",
            "shared",
            {"fabric_traffic_class": 104},
            "goes with fabric_type roce only, and that is infiniband",
        ),
        (
            "auto",
            "shared",
            {"fabric_queue_pairs": 4},
            "goes with fabric_type infiniband or roce only, and that is auto",
        ),
    ],
)
def test_settings_that_cannot_be_right(fabric: str, rails: str, numbers: dict[str, int], words: str) -> None:
    with pytest.raises(HostError, match=words):
        check(fabric, [], {}, rails, numbers)


def test_settings_of_the_network() -> None:
    numbers = {"fabric_service_level": 3, "fabric_traffic_class": 104, "fabric_queue_pairs": 4}
    options: dict[str, Any] = {"fabric_type": "roce", "rails": "isolated", "numbers": numbers}
    environment = node_environment(FACTS, NODE, "n2", **options)
    assert environment == IDENTITY | RDMA | {
        "NCCL_IB_HCA": "=mlx5_2:1",
        "NCCL_CROSS_NIC": "0",
        "NCCL_IB_SL": "3",
        "NCCL_IB_TC": "104",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
    }
    # By hand is by hand.
    assert node_environment(FACTS, NODE, "n2", **options, extra={"NCCL_CROSS_NIC": 1})["NCCL_CROSS_NIC"] == "1"


def test_adapters_beside_gpus_are_taken_and_storage_is_not() -> None:
    ports = [
        port("mlx5_10", root="aa"),
        port("mlx5_9", root="bb"),
        port("mlx5_1", root="cc"),
        port("mlx5_2", "Ethernet", root="aa"),
    ]
    facts = FACTS | {"rdma": ports, "gpus": [gpu(0, "aa"), gpu(1, "bb")]}
    assert node_environment(facts, NODE, "n2", fabric_type="infiniband")["NCCL_IB_HCA"] == "=mlx5_9:1,mlx5_10:1"
    # Without GPUs, or facts about bridges, there is nothing to go by.
    everything = node_environment(facts | {"gpus": []}, NODE, "n2", fabric_type="infiniband")
    assert everything["NCCL_IB_HCA"] == "=mlx5_1:1,mlx5_9:1,mlx5_10:1"


def test_a_lost_adapter_beside_a_gpu_is_an_error_and_no_shorter_list() -> None:
    facts = FACTS | {"rdma": [port("mlx5_0", root="aa"), port("mlx5_1", root="bb", state="DOWN")]}
    facts |= {"gpus": [gpu(0, "aa"), gpu(1, "bb")]}
    with pytest.raises(HostError, match=r"mlx5_1:1 \(DOWN\) of n2 is an InfiniBand port beside a GPU.* in fabric_hcas"):
        node_environment(facts, NODE, "n2", fabric_type="infiniband")
    listed = node_environment(facts, NODE, "n2", fabric_type="infiniband", hcas=["mlx5_0"])
    assert listed["NCCL_IB_HCA"] == "=mlx5_0"
    # The second port of an adapter often has no cable.
    facts["rdma"][1] |= {"device": "mlx5_0", "port": 2}
    assert node_environment(facts, NODE, "n2", fabric_type="infiniband")["NCCL_IB_HCA"] == "=mlx5_0:1"


def nic(name: str, *addresses: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "addresses": [{"address": each, "scope": "global"} for each in addresses]} | more


@pytest.mark.parametrize(
    ("links", "family"),
    [
        ([nic("a", "10.0.0.1"), nic("b", "10.0.1.1", "fd00::1")], 4),
        ([nic("a", "fd00::1"), nic("b", "fd00:1::1")], 6),
        ([nic("a", master="bond0"), nic("b", "fd00:1::1"), nic("bond0", "fd00::1")], 6),
        ([nic("a", "10.0.0.1")], None),
    ],
)
def test_family_of_the_addresses_of_roce(links: list[dict[str, Any]], family: int | None) -> None:
    ports = [port("r0", interfaces=["a"]), port("r1", interfaces=["b"])]
    assert address_family("n2", ports, {"nics": links}) == family


def test_roce_needs_addresses_of_one_family() -> None:
    ports = [port("r0", interfaces=["a"]), port("r1", interfaces=["b"])]
    with pytest.raises(HostError, match="r1:1 of n2 is to carry RoCE, but its interface b has no address"):
        address_family("n2", ports, {"nics": [nic("a", "10.0.0.1"), nic("b")]})
    with pytest.raises(HostError, match="addresses of different families"):
        address_family("n2", ports, {"nics": [nic("a", "10.0.0.1"), nic("b", "fd00::1")]})


def plan_hosts(executor: str, *args: str, ray: bool = False) -> dict[str, Any]:
    """An engine whose API server is on n1 and that has a rank on n2."""
    instance = {"executor": executor, "args": list(args), "world": [{"node": "n1"}, {"node": "n2"}]}
    part = {"role": "worker", "num_gpus": 2} if ray else None
    return {"n1": {"ray": part, "instances": [instance]}, "n2": {"ray": part, "instances": []}}


NIXL = ("--kv-transfer-config", '{"kv_connector": "NixlConnector"}')


def test_whose_engines_use_nixl() -> None:
    assert transfers(plan_hosts("mp", *NIXL), "n2") == {"mp"}
    assert transfers(plan_hosts("mp", *NIXL), "n3") == set()
    assert transfers(plan_hosts("mp", "--all2all-backend", "deepep_v2"), "n2") == set()


def test_ucx_is_told_what_nccl_is_told() -> None:
    facts = FACTS | {"rdma": [port("m0", root="aa", pci="0000:aa:05.0"), port("m1", root="bb", pci="0000:bb:05.0")]}
    facts |= {"gpus": [gpu(0, "bb"), gpu(1, "aa")]}
    options: dict[str, Any] = {"fabric_type": "infiniband", "numbers": {"fabric_service_level": 2}}

    def ucx(hosts: dict[str, Any], facts: dict[str, Any] = facts) -> dict[str, str]:
        environment = node_environment(facts, NODE, "n2", **options, hosts=hosts)
        return {name: value for name, value in environment.items() if "UCX" in name + value or "GPU_NIC" in name}

    assert ucx(plan_hosts("mp")) == {}
    # Each rank has the adapter beside its GPU.
    assert ucx(plan_hosts("mp", *NIXL)) == {
        "UCX_IB_SL": "2",
        "VLLM_GPU_NIC_PCIE_MAPPING": "0000:bb:10.0=0000:bb:05.0,0000:aa:11.0=0000:aa:05.0",
        "VLLM_NIC_SELECTION_VARS": "UCX_NET_DEVICES:1",
    }
    # Ranks under Ray read no mapping, and a mapping that lacks a GPU stops vLLM.
    everything = {"UCX_IB_SL": "2", "UCX_NET_DEVICES": "m0:1,m1:1"}
    assert ucx(plan_hosts("ray", *NIXL)) == everything
    assert ucx(plan_hosts("mp", *NIXL), facts | {"gpus": [gpu(0, "bb"), {"index": 1, "pci": "x"}]}) == everything
    options = {"fabric_type": "tcp"}
    assert ucx(plan_hosts("mp", *NIXL)) == {"UCX_NET_DEVICES": "eth0"}
    options = {"fabric_type": "auto"}
    assert ucx(plan_hosts("mp", *NIXL)) == {}


def test_what_the_driver_must_not_hand_to_ray_workers() -> None:
    options: dict[str, Any] = {"fabric_type": "infiniband", "extra": {"NCCL_DEBUG": "WARN"}, "config_dir": "/etc/x"}
    environment = node_environment(FACTS, NODE, "n2", **options, hosts=plan_hosts("ray", ray=True))
    assert environment["VLLM_CONFIG_ROOT"] == "/etc/x"
    assert {"NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_NET"} <= set(not_carried(environment))
    assert not_carried(environment) == sorted(environment)
    assert "VLLM_CONFIG_ROOT" not in node_environment(FACTS, NODE, "n2", **options, hosts=plan_hosts("mp"))


def test_what_does_not_fit_is_a_sentence_before_anything_is_written() -> None:
    """Role fabric asserts it; the template of the file would fail in the middle of a task, the remedy out of sight."""
    problems = FilterModule().filters()["environment_problems"]
    assert problems(FACTS, NODE, "n2", fabric_type="tcp") == []
    (sentence,) = problems({**FACTS, "rdma": []}, NODE, "n2", fabric_type="infiniband")
    assert "n2 has no active RDMA port" in sentence
    (sentence,) = problems(FACTS, {"interface": "eth1", "address": "10.77.1.12"}, "n2")
    assert "eth1" in sentence
