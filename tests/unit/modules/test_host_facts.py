"""The host's description: from recordings, from a made-up /sys, and from the machine the tests run on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
Load = Callable[[str], ModuleType]

RECORDING = Path(__file__).resolve().parents[2] / "fixtures" / "nvidia_h200x2"


@pytest.fixture(name="facts")
def fixture_facts(load: Load) -> ModuleType:
    return load("host_facts")


def test_this_machine(facts: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("abc")
    paths = [str(tmp_path / name) for name in ("model", "file", "no/such/thing")]
    start = time.monotonic()
    host = facts.gather(paths, nvidia_smi="no-such-program")
    assert time.monotonic() - start < 1
    assert host["warnings"] == []
    assert host["cpu"]["threads"] >= host["cpu"]["cores"] >= 1
    assert host["memory"]["total_mib"] > 100
    loopback = next(nic for nic in host["nics"] if nic["name"] == "lo")
    assert loopback["kind"] == "loopback"
    assert {"address": "127.0.0.1", "prefix": 8, "family": 4, "scope": "host"} in loopback["addresses"]
    assert [host["paths"][path]["kind"] for path in paths] == ["directory", "file", None]
    assert host["paths"][paths[1]]["size_bytes"] == 3
    assert host["paths"][paths[2]]["free_bytes"] > 0, "that of the nearest folder there is"
    assert len(host["boot_id"]) == 36


def test_as_a_module(run: Run) -> None:
    result = run("host_facts", check=True, paths=["/"], inventory="/site")
    assert not result["changed"]
    assert result["ansible_facts"]["ironrack_host"]["paths"]["/"]["kind"] == "directory"
    assert result["ansible_facts"]["ironrack_host"]["inventory"] == "/site"


def test_an_empty_root_never_fails(facts: ModuleType, tmp_path: Path) -> None:
    host = facts.gather(root=str(tmp_path), nvidia_smi="no-such-program")
    assert host["cpu"] == {}
    assert host["gpus"] == []
    assert any(warning.startswith("cpu: FileNotFoundError") for warning in host["warnings"])


# --- GPUs ------------------------------------------------------------------------------------------------------------


def gpus(facts: ModuleType, monkeypatch: pytest.MonkeyPatch, behaviour: str = "", timeout: int = 20, root: str = "/no"):
    monkeypatch.setenv("NVIDIA_STANDIN", behaviour)
    return facts.gpu_facts(root, str(RECORDING / "nvidia-smi"), timeout)


def test_two_h200(facts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in ("0000:00:06.0", "0000:00:07.0"):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        (device / "numa_node").write_text("1\n")
    found, about, warnings = gpus(facts, monkeypatch, root=str(tmp_path))
    assert warnings == []
    assert found[1] == {
        "index": 1,
        "uuid": "GPU-00000000-0000-0000-0000-000000000002",
        "name": "NVIDIA H200",
        "memory_total_mib": 143771,
        "pci": "0000:00:07.0",
        "compute_capability": "9.0",
        "mig": False,
        "ecc": True,
        "numa_node": 1,
    }
    assert about == {
        "driver_version": "580.159.04",
        "cuda_version": "13.0",
        "topology": "nvlink",
        "pci_devices": ["0000:00:06.0", "0000:00:07.0"],
        "error": None,
    }


def test_old_driver_is_asked_for_less(facts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found, about, warnings = gpus(facts, monkeypatch, "old-driver")
    assert [gpu["memory_total_mib"] for gpu in found] == [143771, 143771]
    assert found[0]["compute_capability"] is None
    assert found[0]["mig"] is None
    assert about["driver_version"] == "580.159.04"
    assert warnings == []


def test_one_gpu_has_no_topology(facts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found, about, _ = gpus(facts, monkeypatch, "one")
    assert len(found) == 1
    assert about["topology"] is None


def test_broken_driver_is_told(facts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found, about, warnings = gpus(facts, monkeypatch, "broken")
    assert found == []
    assert "couldn't communicate with the NVIDIA driver" in about["error"]
    assert warnings


def test_hanging_driver_is_given_up(facts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    found, about, _ = gpus(facts, monkeypatch, "hang", timeout=1)
    assert time.monotonic() - start < 5
    assert found == []
    assert "timed out" in about["error"]


def test_odd_lines_are_told_and_skipped(facts: ModuleType) -> None:
    names = ["index", "uuid", "name", "memory_total_mib", "pci"]
    text = (
        "0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, 00000001:C7:00.0\n"
        "Unable to determine the device handle for GPU 0000:07:00.0: Unknown Error\n"
        "1, GPU-b, [Unknown Error], [N/A], 00000000:07:00.0\n"
    )
    found, problems = facts.parse_gpus(text, names)
    assert found[0]["pci"] == "0001:c7:00.0"
    assert found[1]["memory_total_mib"] is None
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ("\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n", "nvlink"),
        ("\tGPU0\tGPU1\tNIC0\nGPU0\t X \tPIX\tSYS\nGPU1\tPIX\t X \tSYS\nNIC0\tSYS\tSYS\t X\n", "pcie"),
        # bridges that join pairs only: not every GPU reaches every other over NVLink
        (
            "GPU0\t X \tNV12\tSYS\tSYS\nGPU1\tNV12\t X \tSYS\tSYS\n"
            "GPU2\tSYS\tSYS\t X \tNV12\nGPU3\tSYS\tSYS\tNV12\t X \n",
            "pcie",
        ),
        ("GPU0\t X \n", None),
        ("", None),
    ],
)
def test_topology(facts: ModuleType, matrix: str, expected: str | None) -> None:
    assert facts.parse_topology(matrix) == expected


# --- RDMA, disks, routes ---------------------------------------------------------------------------------------------


def test_rdma_port(facts: ModuleType, tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "gid_attrs/ndevs").mkdir(parents=True)
    (port / "gid_attrs/ndevs/0").write_text("ens1f0np0\n")
    for name, text in (("state", "4: ACTIVE"), ("link_layer", "Ethernet"), ("rate", "400 Gb/sec (4X NDR)")):
        (port / name).write_text(text + "\n")
    (found,) = facts.rdma_facts(str(tmp_path))
    assert (found["device"], found["port"], found["state"]) == ("mlx5_0", 1, "ACTIVE")
    assert (found["link_layer"], found["rate_gbit"], found["interfaces"]) == ("Ethernet", 400.0, ["ens1f0np0"])


def test_disk_with_a_mounted_partition(facts: ModuleType, tmp_path: Path) -> None:
    disk = tmp_path / "sys/block/nvme0n1"
    part = disk / "nvme0n1p2"
    for folder in (disk / "queue", disk / "device", part, tmp_path / "proc/self", tmp_path / "sys/block/loop0"):
        folder.mkdir(parents=True)
    (disk / "size").write_text("2000\n")
    (disk / "dev").write_text("259:0\n")
    (disk / "queue/rotational").write_text("0\n")
    (disk / "device/model").write_text("Fast One   \n")
    (part / "dev").write_text("259:2\n")
    (tmp_path / "sys/block/loop0/size").write_text("100\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 1 259:2 / /with\\040space rw - ext4 /dev/nvme0n1p2 rw\n")
    assert facts.disk_facts(str(tmp_path)) == [
        {
            "name": "nvme0n1",
            "size_bytes": 1024000,
            "rotational": False,
            "model": "Fast One",
            "mountpoints": ["/with space"],
        }
    ]


def test_default_routes(facts: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "eno1\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eno1\t0000A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
    )
    assert facts.route_facts(str(tmp_path)) == [
        {"interface": "eno1", "gateway": "192.168.0.1", "family": 4, "metric": 100}
    ]


def test_path_on_a_file_system_that_hangs(facts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "space", lambda path: time.sleep(3))
    warnings: list[str] = []
    assert facts.path_facts("/", 0.2, warnings)["exists"] is False
    assert warnings == ["/: no answer within 0.2 seconds"]
