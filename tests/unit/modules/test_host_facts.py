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


@pytest.mark.alone
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
        "bridges": [],
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
    device = tmp_path / "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:18:00.0"
    device.mkdir(parents=True)
    (port.parent.parent / "device").symlink_to(device)
    (found,) = facts.rdma_facts(str(tmp_path))
    assert (found["pci"], found["bridges"]) == ("0000:18:00.0", ["0000:15:01.0", "0000:16:00.0"])
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


# --- driver, kernels, packages ---------------------------------------------------------------------------------------


def put(root: Path, **files: str) -> str:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return str(root)


def test_driver_in_the_kernel_and_on_disk(facts: ModuleType, tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)\n"
    library = tmp_path / "usr/lib/x86_64-linux-gnu"
    modules = {f"sys/module/{name}/initstate": "live\n" for name in ("nvidia", "nvidia_uvm", "kvm")}
    root = put(
        tmp_path, **{"proc/driver/nvidia/version": version, "sys/module/nouveau/parameters/modeset": "0\n"}, **modules
    )
    library.mkdir(parents=True)
    (library / "libcuda.so.570.195.03").write_text("")  # a leftover: the link decides
    (library / "libcuda.so.580.159.04").write_text("")
    (library / "libcuda.so.1").symlink_to("libcuda.so.580.159.04")
    assert facts.driver_facts(root) == {
        "loaded": "580.159.04",
        "flavour": "open",
        "library": "580.159.04",
        "libraries": {"libcuda": "580.159.04"},
        "modules": ["nvidia", "nvidia_uvm"],
        "runfile": False,
    }
    put(tmp_path, **{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.309.01  Thu\n"})
    assert facts.driver_facts(root)["flavour"] == "proprietary"
    assert facts.driver_facts(root)["loaded"] == "535.309.01"


def test_pci_functions_of_nvidia(facts: ModuleType, tmp_path: Path) -> None:
    for address, vendor, kind in (("0000:05:00.0", "0x10de", "0x068000"), ("0000:06:00.0", "0x15b3", "0x020700")):
        device = f"sys/bus/pci/devices/{address}"
        names = {
            "vendor": vendor,
            "device": "0x22a3",
            "class": kind,
            "subsystem_vendor": "0x10de",
            "subsystem_device": "0x1",
        }
        put(tmp_path, **{f"{device}/{name}": text + "\n" for name, text in names.items()})
    (tmp_path / "sys/bus/pci/devices/0000:05:00.0/driver").symlink_to("../../../bus/pci/drivers/nvidia-nvswitch")
    assert facts.nvidia_functions(str(tmp_path)) == [
        {
            "address": "0000:05:00.0",
            "device": "0x22a3",
            "subsystem": "0x10de:0x1",
            "class": "0x068000",
            "driver": "nvidia-nvswitch",
        }
    ]


def test_kernels_in_their_order_with_headers_and_module(facts: ModuleType, tmp_path: Path) -> None:
    root = put(
        tmp_path,
        **{
            "lib/modules/6.8.0-99-generic/modules.dep": "updates/dkms/nvidia.ko.zst: kernel/a.ko\nx/nvidia-uvm.ko:\n",
            "lib/modules/6.8.0-100-generic/modules.dep": "updates/dkms/nvidia-uvm.ko.zst:\n",
            "lib/modules/6.8.0-100-generic/build/Makefile": "",
            "lib/modules/6.1.0-1-amd64/modules.dep": "updates/dkms/nvidia-current.ko:\n",
            "boot/vmlinuz-6.8.0-99-generic": "",
            "boot/vmlinuz-6.8.0-100-generic": "",
            "lib/modules/6.1.0-1-amd64/vmlinuz": "",
            "lib/modules/5.0-removed/modules.dep": "",
        },
    )
    assert facts.installed_kernels(root) == [
        {"release": "6.1.0-1-amd64", "headers": False, "nvidia_module": "updates/dkms/nvidia-current.ko"},
        {"release": "6.8.0-99-generic", "headers": False, "nvidia_module": "updates/dkms/nvidia.ko.zst"},
        {"release": "6.8.0-100-generic", "headers": True, "nvidia_module": None},
    ]


def test_dkms_installed_built_failed_added(facts: ModuleType, tmp_path: Path) -> None:
    tree = "var/lib/dkms"
    root = put(
        tmp_path,
        **{
            f"{tree}/nvidia/580.95.05/source/dkms.conf": "",
            f"{tree}/nvidia/580.95.05/6.1.0-1/x86_64/module/nvidia.ko": "",
            f"{tree}/nvidia/580.95.05/6.1.0-2/x86_64/module/nvidia.ko": "",
            f"{tree}/nvidia/580.95.05/build/make.log": "make.log for nvidia-580 for kernel 6.1.0-3 (x86_64)\n",
            f"{tree}/other/1/source/dkms.conf": "",
        },
    )
    (tmp_path / tree / "nvidia/kernel-6.1.0-1-x86_64").symlink_to("580.95.05/6.1.0-1/x86_64")
    states = [(entry["module"], entry["kernel"], entry["state"]) for entry in facts.dkms_facts(root)]
    assert states == [
        ("nvidia", "6.1.0-1", "installed"),
        ("nvidia", "6.1.0-2", "built"),
        ("nvidia", "6.1.0-3", "failed"),
        ("other", None, "added"),
    ]


def test_packages_by_dpkg(facts: ModuleType, tmp_path: Path) -> None:
    names = {
        "nvidia-open-580": "hold ok installed",
        "cuda-nvcc-13-0": "install ok installed",
        "bash": "install ok installed",
    }
    text = "".join(
        f"Package: {name}\nStatus: {status}\nVersion: 580.95.05-1\nArchitecture: amd64\nMaintainer: a <a@b>\n"
        "Description: a\n\n"
        for name, status in names.items()
    )
    root = put(tmp_path, **{"var/lib/dpkg/status": text, "var/lib/dpkg/info/format": "1\n"})
    assert facts.package_facts(root, 20) == [
        {"name": "cuda-nvcc-13-0", "version": "580.95.05-1", "state": "ii", "hold": False},
        {"name": "nvidia-open-580", "version": "580.95.05-1", "state": "hi", "hold": True},
    ]
    assert facts.package_facts(str(tmp_path / "none"), 20) == []


@pytest.mark.parametrize(("content", "state"), [(b"\6\0\0\0\1", True), (b"\6\0\0\0\0", False), (None, None)])
def test_secure_boot(facts: ModuleType, tmp_path: Path, content: bytes | None, state: bool | None) -> None:
    assert facts.secure_boot(str(tmp_path)) is False, "no UEFI, no Secure Boot"
    folder = tmp_path / "sys/firmware/efi/efivars"
    folder.mkdir(parents=True)
    if content:
        (folder / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(content)
    assert facts.secure_boot(str(tmp_path)) is state


# --- health ----------------------------------------------------------------------------------------------------------


def test_health_asks_nvidia_smi_once_for_all_details(
    facts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NVIDIA_STANDIN", raising=False)
    asked = []
    execute = facts.execute

    def recorded(command: list[str], timeout: float) -> Any:
        asked.append(" ".join(command[1:]))
        return execute(command, timeout)

    monkeypatch.setattr(facts, "execute", recorded)
    host = facts.gather(
        nvidia_smi=str(RECORDING / "nvidia-smi"), root=put(tmp_path, **{"proc/uptime": "9 1"}), health=True
    )
    assert len([line for line in asked if line.startswith("--query-gpu")]) == 1
    assert sorted(line for line in asked[1:] if not line.startswith("-c ")) == [
        "-q -x",
        "nvlink -s",
        "topo -m",
        "topo -p2p r",
    ]
    assert host["nvidia"]["cuda_version"] == "13.0"
    assert [gpu["pci"] for gpu in host["health"]["gpus"]] == ["0000:00:06.0", "0000:00:07.0"]
    assert host["health"]["nvlink"][1] == {"gpu": 1, "links": 18, "inactive": [], "gbyte_s": 26.562}
    assert host["health"]["p2p"] == [["X", "OK"], ["OK", "X"]]
    assert host["health"]["topology"] == [["X", "NV18"], ["NV18", "X"]]
    assert "health" not in facts.gather(nvidia_smi="none", root=str(tmp_path))


def test_health_of_an_empty_root_never_fails(facts: ModuleType, tmp_path: Path) -> None:
    host = facts.gather(root=str(tmp_path), nvidia_smi="no-such-program", health=True, release=str(tmp_path / "none"))
    assert host["health"]["gpus"] == []
    assert host["health"]["release"] is None
    assert host["health"]["kernel_log"] == {"source": None, "complete": True, "events": []}


def test_details_that_a_driver_does_not_tell(facts: ModuleType) -> None:
    (gpu,) = facts.parse_details("", '<log><gpu id="00000001:3B:00.0"><remapped_rows>N/A</remapped_rows></gpu></log>')
    assert gpu["pci"] == "0001:3b:00.0"
    assert {gpu[key] for key in ("remap_pending", "fabric_state", "mig", "ecc_uncorrectable", "width")} == {None}
    (gpu,) = facts.parse_details(
        "", (RECORDING / "details.xml").read_text().replace("event_reason", "throttle_reason")
    )[:1]
    assert gpu["throttle"] == ["gpu_idle"], "drivers before 550 have other names"


def test_links_that_are_all_down(facts: ModuleType) -> None:
    text = (
        "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-0)\n"
        "\t NVML: Unable to retrieve NVLink information as all links are inActive\n"
        "GPU 1: NVIDIA L40S (UUID: GPU-1)\n"
    )
    assert [(gpu["links"], gpu["inactive"]) for gpu in facts.parse_nvlink(text)] == [(0, ["all"]), (0, [])]


def config_space(control: int | None) -> bytes:
    """Extended capabilities of a bridge: advanced error reporting, then perhaps Access Control Services."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | ((0x148 if control is not None else 0) << 20)).to_bytes(4, "little")
    if control is not None:
        space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(space)


def test_acs_of_the_bridges_above_a_gpu(facts: ModuleType, tmp_path: Path) -> None:
    root = tmp_path / "sys/devices/pci0000:00"
    gpu = root / "0000:00:01.0/0000:01:00.0/0000:02:00.0"
    group = tmp_path / "sys/kernel/iommu_groups/7"
    for folder in (gpu, group, tmp_path / "sys/bus/pci/devices"):
        folder.mkdir(parents=True)
    (gpu.parent.parent / "config").write_bytes(config_space(0x1D))
    (gpu.parent / "config").write_bytes(config_space(None))
    (gpu.parent / "max_link_width").write_text("8\n")
    (gpu / "current_link_width").write_text("8\n")
    (gpu / "max_link_width").write_text("16\n")
    (group / "type").write_text("DMA-FQ\n")
    (gpu / "iommu_group").symlink_to(group)
    for folder in (gpu, gpu.parent, gpu.parent.parent):
        (tmp_path / "sys/bus/pci/devices" / folder.name).symlink_to(folder)
    assert facts.pci_link(str(tmp_path), "0000:02:00.0") == {
        "pci": "0000:02:00.0",
        "width": 8,
        "width_max": 16,
        "slot_width_max": 8,
        "bridges": ["0000:00:01.0", "0000:01:00.0"],
        "acs": {"0000:00:01.0": 0x1D},
        "iommu": "DMA-FQ",
    }


def test_kernel_log(facts: ModuleType, tmp_path: Path) -> None:
    lines = (
        "6,0,339,-;Linux version 6.18\n SUBSYSTEM=x\n",
        "4,1,100000000,-;NVRM: Xid (PCI:0000:3b:00): 63, pid=1, Row Remapper: New row marked for remapping\n",
        "4,2,101000000,-;nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress error\n",
        "4,3,102000000,-;NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x24:0x72:1568)\n",
        "4,4,103000000,-;NVRM: API mismatch: the client has the version 580.95.05\n",
    )
    root = put(tmp_path, **{"dev/kmsg": "".join(lines), "proc/uptime": "160.5 1.0"})
    log = facts.kernel_log(root, 5)
    assert (log["source"], log["complete"]) == ("kmsg", True)
    assert [(event["kind"], event["code"], event["device"], event["seconds_ago"]) for event in log["events"]] == [
        ("xid", 63, "0000:3b:00", 60),
        ("sxid", 12028, "0000:05:00.0", 59),
        ("init", None, "0000:3b:00.0", 58),
        ("mismatch", None, None, 57),
    ]
    put(tmp_path, **{"dev/kmsg": lines[1]})
    assert facts.kernel_log(root, 5)["complete"] is False, "the ring's beginning is lost"


def test_later_drop_ins_win(facts: ModuleType, tmp_path: Path) -> None:
    assert facts.remove_ipc(str(tmp_path)) is True, "systemd's default"
    root = put(
        tmp_path,
        **{
            "etc/systemd/logind.conf": "[Login]\n#RemoveIPC=yes\nRemoveIPC=yes\n",
            "etc/systemd/logind.conf.d/ironrack.conf": "[Login]\nRemoveIPC=no\n",
            "usr/lib/systemd/logind.conf.d/10-vendor.conf": "[Login]\nRemoveIPC=yes\n",
        },
    )
    assert facts.remove_ipc(root) is False


def test_unattended_upgrades(facts: ModuleType, tmp_path: Path) -> None:
    root = put(
        tmp_path,
        **{
            "etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\n',
            "etc/apt/apt.conf.d/50unattended-upgrades": (
                'Unattended-Upgrade::Package-Blacklist {\n// "linux-";\n  "nvidia-"; "libnvidia-";\n};\n'
            ),
        },
    )
    assert facts.unattended_upgrades(root) == {"enabled": True, "blacklist": ["nvidia-", "libnvidia-"]}


def test_runtime_is_read_without_starting_it(facts: ModuleType, tmp_path: Path) -> None:
    packages = tmp_path / "lib/python3.12/site-packages"
    put(
        tmp_path,
        **{
            "release.json": '{"id": "abc", "variant": "cu130"}',
            "lib/python3.12/site-packages/torch/version.py": "cuda: Optional[str] = '13.0'\n",
        },
    )
    (packages / "vllm").mkdir()
    assert facts.release_facts(str(tmp_path)) == {
        "id": "abc",
        "variant": "cu130",
        "torch_cuda": "13.0",
        "extension_cuda": [],
    }
    assert any(name.startswith("libc.so") for name in facts.needed_libraries("/bin/ls"))
    assert facts.needed_libraries(str(tmp_path / "release.json")) == []


def test_clock_is_compared_with_the_controller(facts: ModuleType, tmp_path: Path) -> None:
    host = facts.gather(root=str(tmp_path), nvidia_smi="none", health=True, controller_time=time.time() + 100)
    assert -101 < host["health"]["clock"]["offset_seconds"] < -99
    assert isinstance(host["health"]["clock"]["synchronised"], bool | None)


def test_file_system_below_a_path(facts: ModuleType, tmp_path: Path) -> None:
    table = (
        "1 1 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /var/lib rw - xfs /dev/b rw\n3 1 0:3 / /var/lib rw - nfs4 s:/x r\n"
    )
    root = put(tmp_path, **{"proc/self/mountinfo": table})
    assert facts.file_system_types(root, ["/var/lib/ironrack", "/var/library"]) == {
        "/var/lib/ironrack": "nfs4",
        "/var/library": "ext4",
    }


def test_holder_of_a_device_node(facts: ModuleType, tmp_path: Path) -> None:
    root = put(tmp_path, **{"proc/42/comm": "python3\n", "proc/42/cgroup": "0::/system.slice/vllm@big.service\n"})
    (tmp_path / "proc/42/fd").mkdir()
    (tmp_path / "proc/42/fd/7").symlink_to("/dev/nvidia1")
    (found,) = facts.holders(root, "1")
    assert (found["pid"], found["name"], found["unit"]) == (42, "python3", "vllm@big.service")
    assert facts.holders(root, "0") == []


@pytest.mark.alone
def test_program_that_ends_late_is_not_waited_for(facts: ModuleType) -> None:
    start = time.monotonic()
    assert "timed out" in facts.execute(["sleep", "30"], 0.2)[1]
    assert time.monotonic() - start < 2
    assert facts.execute(["no-such-program"], 1)[0] is None


def test_a_warning_beside_the_details_does_not_hide_them(facts: ModuleType) -> None:
    xml = "<nvidia_smi_log><gpu id='0'><product_name>NVIDIA H200</product_name></gpu></nvidia_smi_log>\n"
    said = f"Warning: persistence mode is off\n{xml}WARNING: infoROM is corrupted at gpu 0000:07:00.0\n"
    assert facts.parse_details("/", said) == facts.parse_details("/", xml) != []


def test_units_that_serve(facts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.serving(str(tmp_path), 5) == [], "without systemd nothing serves"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    lines = "vllm@x.service   loaded active running vLLM\nray-head.service loaded activating start Ray\n"
    asked: list[list[str]] = []
    monkeypatch.setattr(facts, "execute", lambda command, timeout: (asked.append(command) or lines, None))
    assert facts.serving(str(tmp_path), 5) == ["ray-head.service", "vllm@x.service"]
    assert "vllm@*.service" in asked[0]
    monkeypatch.setattr(facts, "execute", lambda command, timeout: (None, "no bus"))
    host = facts.gather(root=str(tmp_path), nvidia_smi="no-such-program")
    assert host["serving"] is None
    assert any("no bus" in text for text in host["warnings"])
