"""Distances between GPUs and adapters, and which adapter each GPU gets."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.topology import (
    DISTANCES,
    beside_gpus,
    distance,
    natural,
    nearest,
    numa_arguments,
)


def device(*bridges: str, numa: int | None = 0, **more: Any) -> dict[str, Any]:
    return {"bridges": list(bridges), "numa_node": numa, "port": 1} | more


SWITCH = ("0000:15:01.0", "0000:16:00.0")
GPU = device(*SWITCH, "0000:17:01.0", index=0)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (device(*SWITCH, "0000:17:00.0"), "PIX"),
        (device(*SWITCH, "0000:17:02.0", "0000:19:00.0", "0000:1a:00.0"), "PXB"),
        (device("0000:15:03.0"), "PHB"),
        (device("0000:28:01.0"), "NODE"),
        (device("0000:c0:01.0", numa=1), "SYS"),
        (device("0000:28:01.0", numa=None), "SYS"),
        # The same bus in another domain is another host bridge.
        (device("0001:15:03.0", numa=1), "SYS"),
    ],
)
def test_distance(other: dict[str, Any], name: str) -> None:
    for pair in ((GPU, other), (other, GPU)):
        found = distance(*pair)
        assert found is not None and DISTANCES[found[0]] == name


def test_without_bridges_nothing_is_known() -> None:
    assert distance(GPU, device()) is None
    assert distance({"index": 0}, GPU) is None
    assert nearest([GPU, {"index": 1}], [device(*SWITCH, "0000:17:00.0", device="m0")]) == []
    assert beside_gpus([device(device="m0")], [GPU]) == []
    # The port might be beside the other one.
    assert beside_gpus([device(*SWITCH, "0000:17:00.0", device="m0")], [GPU, {"index": 1}]) == []


def test_adapters_that_are_equally_near_are_shared_out() -> None:
    gpus = [device(*SWITCH, f"0000:17:0{index}.0", index=index) for index in (3, 2, 1, 0)]
    ports = [device(*SWITCH, f"0000:17:1{index}.0", device=f"mlx5_{index}") for index in (10, 9)]
    ports.append(device("0000:c0:01.0", numa=1, device="mlx5_0"))
    pairs = [(gpu["index"], port["device"]) for gpu, port in nearest(gpus, ports)]
    assert pairs == [(0, "mlx5_9"), (1, "mlx5_10"), (2, "mlx5_9"), (3, "mlx5_10")]
    assert [port["device"] for port in beside_gpus(ports, gpus)] == ["mlx5_10", "mlx5_9"]


def test_natural_order() -> None:
    assert sorted(["mlx5_10", "mlx5_9", "irdma1"], key=natural) == ["irdma1", "mlx5_9", "mlx5_10"]


BOX = {
    "numa": [{"node": 0, "cpus": "0-31"}, {"node": 1, "cpus": "32-63"}],
    "gpus": [{"index": index, "numa_node": index // 2} for index in range(4)],
}
MP = {"executor": "mp", "args": ["--port", "8000"], "environment": {}}


@pytest.mark.parametrize(
    ("facts", "instance", "nodes"),
    [
        (BOX, MP, ["0", "0", "1", "1"]),
        (BOX, MP | {"environment": {"CUDA_VISIBLE_DEVICES": "3,1"}}, ["1", "0"]),
        # What another NUMA node has is nothing to this engine.
        (BOX, MP | {"environment": {"CUDA_VISIBLE_DEVICES": "0,1"}}, ["0", "0"]),
        (BOX, MP | {"environment": {"CUDA_VISIBLE_DEVICES": "7"}}, []),
        (BOX, MP | {"executor": "ray"}, []),
        (BOX, MP | {"args": ["--no-numa-bind"]}, []),
        (BOX, MP | {"args": ["--numa-bind", "--numa-bind-nodes", "1"]}, []),
        (BOX, MP | {"args": ["--device-ids", "2,3"]}, []),
        (BOX, MP | {"args": ["--kv-offloading-size", "200"]}, []),
        (BOX, MP | {"args": ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}']}, []),
        (BOX | {"numa": BOX["numa"][:1]}, MP, []),
        (BOX | {"numa": [BOX["numa"][0], {"node": 1, "cpus": ""}]}, MP, []),
        (BOX | {"gpus": [{"index": 0, "numa_node": None}, {"index": 1, "numa_node": 0}]}, MP, []),
        (BOX | {"gpus": []}, MP, []),
        ({}, MP, []),
    ],
)
def test_ranks_stay_beside_their_gpu(facts: dict[str, Any], instance: dict[str, Any], nodes: list[str]) -> None:
    assert numa_arguments(facts, instance) == (["--numa-bind", "--numa-bind-nodes", *nodes] if nodes else [])
