"""The verdict on hosts: a recording of two real H200s, faults written into it, and nodes against each other.

tests/fixtures/nvidia_h200x2 was recorded on Ubuntu 24.04 with two H200s (driver 580.159.04, open module, a virtual
machine) and redacted: host.json is what the module host_facts returned there, the other files what nvidia-smi said. The
program nvidia-smi in that folder is a stand-in that replays them.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts import judging, preflight
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.errors import HostError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import probe

TREE = Path(__file__).resolve().parents[3]
RECORDING = TREE / "tests" / "fixtures" / "nvidia_h200x2"
DOCUMENT = TREE / "docs" / "failure-checks.md"
HOST = json.loads((RECORDING / "host.json").read_text(encoding="utf-8"))
H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}
B200 = "NVIDIA B200"
MODEL = "/data/models/big"
PLAN: dict[str, Any] = {
    "site": {"prefix": "/opt/ironrack", "current": "/opt/ironrack/current", "state_dir": "/var/lib/ironrack"},
    "runtime": {"variant": "cu130"},
    "nodes": {name: {"gpus": [H200, H200], "address": f"10.77.1.1{name[1]}"} for name in ("n1", "n2", "n3")},
    "instances": {"big": {"model_path": MODEL, "world": [{"node": name} for name in ("n1", "n2", "n3")]}},
}
GIB = 2**30
# Groups of public reports in the document, and how many.
REPORTS = (("A", 25), ("C", 17), ("D", 26), ("E", 14), ("F", 26), ("H", 4), ("I", 14))


def host(**paths: Any) -> dict[str, Any]:
    """The recorded host, on metal and with the model, changed at paths such as health__gpus__0__mig."""
    facts: dict[str, Any] = copy.deepcopy(HOST)
    facts["health"]["virtual"] = False
    facts["health"]["services"] = {"nvidia-fabricmanager": {"active": "active"}, "chrony": {"active": "active"}}
    facts["health"]["fabric_manager"] = "580.159.04"
    facts["health"]["clock"]["synchronised"] = True
    facts["health"]["remove_ipc"] = False
    facts["limits"]["nofile"] = 1048576
    present = {"exists": True, "kind": "directory", "free_bytes": 10**12}
    facts["paths"] |= {MODEL: present, f"{MODEL}/config.json": present | {"kind": "file"}}
    for path, value in paths.items():
        *folders, last = path.split("__")
        place: Any = facts
        for key in folders:
            place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
        if isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    return facts


def report(facts: dict[str, Any], plan: dict[str, Any] = PLAN, **options: Any) -> dict[str, Any]:
    return preflight.preflight({"n1": facts}, plan, ["n1"], **options)


def verdict(result: dict[str, Any], name: str, node: str = "n1") -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in result["nodes"][node]["checks"] if item["id"] == name)
    return found


def wrong(result: dict[str, Any], node: str = "n1") -> dict[str, str]:
    return {
        item["id"]: item["status"] for item in result["nodes"][node]["checks"] if item["status"] in ("warn", "fail")
    }


# --- the recording ---------------------------------------------------------------------------------------------------


def test_recorded_host_as_it_was() -> None:
    """Judged as recorded: a container without systemd, which is what its three warnings say."""
    plan = copy.deepcopy(PLAN) | {"instances": {}}
    result = report(copy.deepcopy(HOST), plan)
    assert wrong(result) == {"nofile": "warn", "remove_ipc": "warn", "time_sync": "warn"}
    assert (result["ok"], result["exit_code"], result["status"], result["stop"]) == (True, 1, "warn", False)
    assert verdict(result, "nvlink")["measured"] == "18 links on each, all active"
    assert verdict(result, "fabric_state")["measured"] == "GPU 0, 1: Completed, Success"


def test_healthy_host() -> None:
    result = report(host())
    assert wrong(result) == {}
    assert (result["ok"], result["exit_code"], result["status"]) == (True, 0, "pass")
    assert "FAIL" not in result["table"]


def test_host_without_gpus_is_asked_for_none() -> None:
    facts = host(gpus=[], nvidia={}, nvidia_functions=[], nvidia_driver={}, packages=[])
    facts["health"] |= {"gpus": [], "nvlink": [], "p2p": [], "topology": [], "pci": [], "device_nodes": []}
    plan = copy.deepcopy(PLAN)
    plan["nodes"]["n1"]["gpus"] = []
    assert wrong(report(facts, plan)) == {}
    # with the CPU build, declared GPUs are slots
    assert wrong(report(facts, copy.deepcopy(PLAN) | {"runtime": {"variant": "cpu"}})) == {}


# --- faults, through the module that measures ------------------------------------------------------------------------


@pytest.fixture(name="module", scope="module")
def fixture_module() -> Iterator[ModuleType]:
    specification = importlib.util.spec_from_file_location("host_facts", TREE / "plugins/modules/host_facts.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    yield module


Measure = Callable[..., dict[str, Any]]


@pytest.fixture(name="measure")
def fixture_measure(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Collect facts where nvidia-smi is the stand-in; the recording may be changed before, and a root laid out."""

    def measure(
        details: Callable[[str], str] = str, links: Callable[[str], str] = str, behaviour: str = "", **files: str
    ) -> dict[str, Any]:
        for name, change in (("details.xml", details), ("nvlink.txt", links)):
            recorded = (RECORDING / name).read_text(encoding="utf-8")
            changed = change(recorded)
            assert change is str or changed != recorded, "the fault is not in the recording"
            (tmp_path / name).write_text(changed, encoding="utf-8")
        monkeypatch.setenv("NVIDIA_STANDIN", behaviour)
        monkeypatch.setenv("NVIDIA_STANDIN_DETAILS", str(tmp_path / "details.xml"))
        monkeypatch.setenv("NVIDIA_STANDIN_NVLINK", str(tmp_path / "nvlink.txt"))
        root = tmp_path / "root"
        for address in ("0000:00:06.0", "0000:00:07.0"):
            device = root / "sys/bus/pci/devices" / address
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")
        files = {"proc/uptime": "4000.5 1.0", "dev/kmsg": "6,0,100,-;Linux version 6.18\n"} | files
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        facts: dict[str, Any] = module.gather(nvidia_smi=str(RECORDING / "nvidia-smi"), root=str(root), health=True)
        return facts

    return measure


def judged(facts: dict[str, Any], name: str) -> dict[str, Any]:
    return verdict(report(facts), name)


def second(old: str, new: str) -> Callable[[str], str]:
    """Change the second GPU's part alone."""

    def change(text: str) -> str:
        head, separator, tail = text.rpartition('<gpu id="')
        return head + separator + tail.replace(old, new)

    return change


def test_recording_through_the_module_is_healthy(measure: Measure) -> None:
    bad = wrong(report(measure()))
    gpu_checks = {check.id for check in preflight.CHECKS if check.needs == "details"} - {"device_nodes"}
    assert not gpu_checks & set(bad)


PROCESS = """<process_info>
				<gpu_instance_id>N/A</gpu_instance_id>
				<compute_instance_id>N/A</compute_instance_id>
				<pid>635</pid>
				<type>C</type>
				<process_name>/opt/torch/.venv/bin/python3</process_name>
				<used_memory>3682 MiB</used_memory>
			</process_info>"""


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "fabric_state",
            second("<state>Completed</state>", "<state>In Progress</state>"),
            ["GPU 1", "In Progress", "802"],
        ),
        ("mig", second("<current_mig>Disabled", "<current_mig>Enabled"), ["GPU 1: MIG is on"]),
        ("row_remap", second("row_pending>No", "row_pending>Yes"), ["GPU 1: a remap is pending"]),
        ("row_remap", second("row_failure>No", "row_failure>Yes"), ["GPU 1: a row could not be remapped"]),
        ("gpu_memory", second("<processes>", f"<processes>{PROCESS}"), ["GPU 1: 3682 MiB by python3 (pid 635"]),
        ("gpu_memory", second("<used>0 MiB", "<used>70000 MiB"), ["GPU 1: 70000 MiB by no process"]),
        ("pcie_width", second("<current_link_width>16x", "<current_link_width>8x"), ["GPU 1: x8 of x16"]),
        ("pcie_generation", second("<max_link_gen>5", "<max_link_gen>4"), ["GPU 1: generation 4 of 5"]),
        ("ecc", second("<dram_uncorrectable>0", "<dram_uncorrectable>2"), ["GPU 1: 2 uncorrectable"]),
        ("recovery_action", second("<gpu_recovery_action>None", "<gpu_recovery_action>Reset"), ["GPU 1: Reset"]),
        ("compute_mode", second("<compute_mode>Default", "<compute_mode>Exclusive_Process"), ["Exclusive_Process"]),
        ("persistence", second("<persistence_mode>Enabled", "<persistence_mode>Disabled"), ["GPU 1: off"]),
        (
            "throttle",
            second("thermal_slowdown>Not Active", "thermal_slowdown>Active"),
            ["GPU 1: hw_thermal_slowdown, sw_thermal_slowdown"],
        ),
        ("power_limit", second("<current_power_limit>700.00", "<current_power_limit>350.00"), ["350.0 W of 700.0 W"]),
    ],
)
def test_fault_in_what_nvidia_smi_tells(
    measure: Measure, name: str, change: Callable[[str], str], words: list[str]
) -> None:
    found = judged(measure(change), name)
    assert found["status"] in ("warn", "fail")
    for word in words:
        assert word in found["measured"]
    assert found["remedy"]


def test_link_that_is_down(measure: Measure) -> None:
    found = judged(measure(links=lambda text: text.replace("Link 17: 26.562 GB/s", "Link 17: <inactive>", 1)), "nvlink")
    assert (found["status"], found["measured"]) == ("fail", "inactive links: GPU 0: 17")


def test_missing_gpu(measure: Measure) -> None:
    found = judged(measure(behaviour="one"), "gpu_count")
    assert (found["status"], found["expected"]) == ("fail", "2 × NVIDIA H200 (143771 MiB)")
    assert found["measured"] == "1 × NVIDIA H200 (143771 MiB); 1 more on the PCI bus"


def test_libraries_replaced_under_the_module(measure: Measure, tmp_path: Path) -> None:
    folder = tmp_path / "root/usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.580.172.08").write_text("")
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.172.08")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    result = report(measure(behaviour="mismatch", **{"proc/driver/nvidia/version": version}))
    assert verdict(result, "gpu_driver")["status"] == "fail"
    assert "reboot" in verdict(result, "gpu_driver")["remedy"]
    found = verdict(result, "driver_versions")
    assert (found["status"], found["measured"]) == ("fail", "kernel module 580.159.04, library 580.172.08")


def test_driver_that_hangs(measure: Measure, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "execute", lambda command, timeout: (None, "Command timed out after 20 seconds"))
    found = judged(measure(), "gpu_driver")
    assert found["status"] == "fail"
    assert "the driver hangs" in found["remedy"]


XID = "4,{},{}000000,-;NVRM: Xid (PCI:0000:00:07): 79, pid=1234, name=python, GPU has fallen off the bus.\n"


def test_xid_79_in_the_kernel_log(measure: Measure) -> None:
    facts = measure(**{"dev/kmsg": "6,0,100,-;Linux\n" + XID.format(1, 3700) + XID.format(2, 3820)})
    found = judged(facts, "xid")
    assert found["status"] == "fail"
    assert found["measured"] == "Xid 79 on 0000:00:07: the GPU has fallen off the bus (2 times, last 3 min ago)"
    assert "power it off and on" in found["remedy"]
    assert judged(facts, "same_driver")["status"] == "skip"
    # a reset leaves the line in the log
    assert verdict(report(facts, xid_hours=0.01), "xid")["status"] == "warn"


@pytest.mark.parametrize(("code", "status"), [(13, "warn"), (31, "warn"), (48, "fail"), (149, "fail"), (999, "warn")])
def test_xids_by_their_meaning(measure: Measure, code: int, status: str) -> None:
    facts = measure(**{"dev/kmsg": "6,0,1,-;Linux\n" + XID.replace("79", str(code)).format(1, 3700)})
    assert judged(facts, "xid")["status"] == status


def test_module_that_secure_boot_refuses(measure: Measure) -> None:
    log = "6,0,1,-;Linux\n3,1,9000000,-;Loading of unsigned module is rejected\n"
    facts = measure(behaviour="broken", **{"dev/kmsg": log, "sys/firmware/efi/efivars/SecureBoot-8be4": "\6\0\0\0\1"})
    assert facts["secure_boot"] is True
    found = judged(facts, "secure_boot")
    assert found["status"] == "fail"
    assert "Loading of unsigned module is rejected" in found["measured"]


# --- every check can find something ----------------------------------------------------------------------------------

PORT = {"device": "mlx5_0", "port": 1, "state": "DOWN"}
DKMS = [{"module": "nvidia", "version": "580.159.04", "kernel": "6.1.0-2", "state": "failed"}]
KERNELS = [
    {"release": "6.18.44-gpu", "headers": True, "nvidia_module": "updates/dkms/nvidia.ko"},
    {"release": "6.18.45-gpu", "headers": False, "nvidia_module": None},
]


def package(name: str, version: str = "580.159.04-1", hold: bool = False) -> dict[str, Any]:
    return {"name": name, "version": version, "state": "hi" if hold else "ii", "hold": hold}


def server(name: str, state: str, reach: str) -> dict[str, str]:
    return {"name": name, "state": state, "reach": reach}


FAULTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("gpu_driver", "fail", {"nvidia__error": "nvidia-smi is not installed", "gpus": []}, "is not installed"),
    # Without what nvidia-smi -q tells, most other checks have nothing to judge: that must not look like health.
    ("gpu_driver", "fail", {"health__gpus": [], "warnings": ["nvidia-smi -q -x: timed out"]}, "-q -x: timed out"),
    ("gpu_count", "fail", {"gpus": [H200 | {"index": 0}]}, "1 × NVIDIA H200"),
    ("driver_versions", "fail", {"packages": [package("libnvidia-compute-580", "580.172.08-1")]}, "580.172.08"),
    ("known_driver", "warn", {"nvidia_driver__loaded": "570.133.20", "health__gpus__0__name": B200}, "66 days"),
    (
        "driver_cuda",
        "fail",
        {"nvidia_driver__loaded": "570.195.03", "packages": []},
        "driver 570.195.03, runtime for CUDA 13.0",
    ),
    ("driver_cuda", "warn", {"nvidia_driver__loaded": "570.195.03"}, "cuda-compat-13-0"),
    ("cuda_agree", "fail", {"health__release": {"torch_cuda": "12.9", "extension_cuda": [13]}}, "CUDA 12.9"),
    ("cuda_compat", "fail", {"health__gpus__0__name": "NVIDIA GeForce RTX 4090"}, "cuda-compat-13-0 beside"),
    ("fabric_manager", "fail", {"health__fabric_manager": "580.172.08"}, "580.172.08"),
    ("fabric_manager", "fail", {"health__fabric_manager": None}, "not installed"),
    ("fabric_manager", "fail", {"health__services__nvidia-fabricmanager__active": "failed"}, "service failed"),
    (
        "fabric_state",
        "fail",
        {"health__gpus__1__fabric_health": {"bandwidth": "Degraded"}},
        "GPU 1: bandwidth Degraded",
    ),
    ("imex", "fail", {"health__gpus__0__name": "NVIDIA GB200"}, "no package"),
    ("persistence", "warn", {"health__gpus__1__persistence": False}, "GPU 1"),
    ("nouveau", "fail", {"nvidia_driver__modules": ["nouveau"]}, "loaded"),
    ("secure_boot", "fail", {"secure_boot": True, "nvidia_driver__loaded": None}, "Secure Boot on"),
    (
        "dkms",
        "fail",
        {"kernels": KERNELS, "dkms": DKMS},
        "no module for 6.18.45-gpu (build of nvidia 580.159.04 failed",
    ),
    ("headers", "warn", {"kernels": KERNELS, "dkms": DKMS}, "none for 6.18.45-gpu"),
    ("kernel_pending", "warn", {"kernels": KERNELS}, "6.18.44-gpu runs, 6.18.45-gpu is installed"),
    ("kernel_pending", "warn", {"health__reboot_required": ["linux-base"]}, "linux-base"),
    ("holds", "warn", {"packages": [package("nvidia-open-580"), package("cuda-drivers-580", hold=True)]}, "1 of 2"),
    ("one_install", "warn", {"packages": [package("nvidia-open-580")], "nvidia_driver__runfile": True}, "installer"),
    ("device_nodes", "warn", {"health__device_nodes": [{"name": "nvidia0", "mode": "0666"}]}, "nvidia-uvm, 1 of 2"),
    ("device_nodes", "warn", {"health__device_nodes__2__mode": "0660"}, "not open to every user: nvidia0"),
    ("peermem", "warn", {"rdma": [PORT], "nvidia_driver__flavour": "proprietary"}, "neither"),
    ("ecc", "warn", {"health__gpus__0__ecc": False}, "GPU 0: ECC is off"),
    ("row_remap", "fail", {"health__gpus__0__remap_pending": True}, "pending"),
    ("recovery_action", "fail", {"health__gpus__0__recovery_action": "Reboot"}, "GPU 0: Reboot"),
    ("xid", "warn", {"health__kernel_log__source": None}, "cannot be read"),
    ("mig", "fail", {"health__gpus__0__mig_pending": True}, "GPU 0"),
    ("compute_mode", "fail", {"health__gpus__0__compute_mode": "Prohibited"}, "Prohibited"),
    ("gpu_memory", "fail", {"health__gpus__0__memory_used_mib": 9000}, "9000 MiB by no process"),
    (
        "pcie_width",
        "warn",
        {"health__pci__0__slot_width_max": 8, "health__pci__0__width": 8},
        "GPU 0: x16 in a slot of x8",
    ),
    (
        "pcie_generation",
        "warn",
        {"health__gpus__0__generation": 1, "health__gpus__0__throttle": []},
        "generation 1 of 5",
    ),
    ("throttle", "fail", {"health__gpus__0__throttle": ["hw_power_brake_slowdown"]}, "hw_power_brake_slowdown"),
    ("power_limit", "warn", {"health__gpus__0__power_limit_w": 500.0}, "500.0 W of 700.0 W"),
    ("nvlink", "fail", {"health__nvlink__1__inactive": [3]}, "GPU 1: 3"),
    ("nvlink", "warn", {"health__nvlink__1__links": 12}, "GPU 1: 12 links"),
    (
        "topology",
        "warn",
        {"health__topology": [["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]]},
        "2 pairs SYS",
    ),
    ("p2p", "fail", {"health__p2p": [["X", "CNS"], ["CNS", "X"]]}, "1 pairs CNS"),
    ("p2p", "warn", {"nvidia__topology": "pcie", "health__gpus__0__name": "NVIDIA GeForce RTX 4090"}, "known to hang"),
    ("acs", "warn", {"health__pci__0__acs": {"0000:00:01.0": 0x1D}}, "on at 0000:00:01.0"),
    ("acs", "fail", {"health__pci__0__acs": {"0000:00:01.0": 0x1D}, "nvidia__topology": "pcie"}, "0000:00:01.0"),
    ("iommu", "warn", {"health__pci__0__iommu": "DMA-FQ"}, "DMA-FQ"),
    ("rdma_links", "warn", {"rdma": [PORT]}, "mlx5_0/1: DOWN"),
    ("memlock", "warn", {"limits__memlock": 65536}, "65536 bytes"),
    ("nofile", "warn", {"limits__nofile": 1024}, "1024"),
    ("remove_ipc", "warn", {"health__remove_ipc": True}, "logout"),
    (
        "shm",
        "fail",
        {"filesystems": [{"mountpoint": "/dev/shm", "size_bytes": 2**26, "free_bytes": 2**26}]},
        "0.1 of 0.1",
    ),
    (
        "shm",
        "warn",
        {"filesystems": [{"mountpoint": "/dev/shm", "size_bytes": 4 * GIB, "free_bytes": GIB}]},
        "1.0 of 4.0",
    ),
    ("disk_space", "fail", {"paths__/opt/ironrack__free_bytes": GIB}, "/opt/ironrack has 1.0 GiB free, 10 wanted"),
    ("disk_full", "warn", {"filesystems__1__free_bytes": GIB}, "/ 100 %"),
    ("models", "warn", {f"paths__{MODEL}__exists": False}, "does not exist on n1"),
    ("cache_filesystem", "warn", {"health__file_system_types": {"/var/lib/ironrack": "nfs4"}}, "on nfs4"),
    ("time_sync", "warn", {"health__clock__synchronised": False}, "not synchronised (chrony runs)"),
    (
        "time_servers",
        "warn",
        {"health__clock__servers": [server("10.0.0.1", "?", "0")]},
        "none of 10.0.0.1",
    ),
    (
        "node_environment",
        "fail",
        {"health__node_environment": {"VLLM_HOST_IP": "fd85::11", "GLOO_SOCKET_IFNAME": "eth9"}},
        "another plan: VLLM_HOST_IP=fd85::11",
    ),
    ("hardware_clock", "warn", {"health__clock__hardware_offset_seconds": -7200}, "-7200 s"),
    ("swap", "warn", {"health__swap_used_mib": 5000}, "5000 MiB"),
    ("hugepages", "warn", {"memory__hugepages": 100000}, "200000 MiB"),
    ("compiler", "warn", {"health__toolchain__compiler": False}, "no C compiler"),
    ("python_headers", "warn", {"health__toolchain__python_headers": False}, "no Python.h"),
    (
        "nvcc",
        "warn",
        {"health__toolchain__nvcc": "12.4", "health__release": {"torch_cuda": "13.0"}},
        "nvcc 12.4, runtime for CUDA 13.0",
    ),
    ("cuda_home", "fail", {"health__toolchain__cuda_home": [{"value": "/a:/b", "folder": False}]}, "CUDA_HOME=/a:/b"),
    ("ninja", "warn", {"health__release": {"id": "x"}}, "not in the runtime"),
    ("clock_skew", "fail", {"health__clock__offset_seconds": 95.0}, "+95 s from the controller"),
]


@pytest.mark.parametrize(
    ("name", "status", "change", "words"), FAULTS, ids=lambda value: value if type(value) is str else ""
)
def test_fault(name: str, status: str, change: dict[str, Any], words: str) -> None:
    assert verdict(report(host()), name)["status"] in ("pass", "skip")
    found = verdict(report(host(**change)), name)
    assert found["status"] == status
    assert words in found["measured"]
    assert found["expected"]
    assert found["remedy"]


def test_every_check_has_a_fault_here() -> None:
    across = {rule.id for rule in preflight.EQUAL}
    assert {name for name, *_ in FAULTS} == set(preflight.check_ids()) - across - {*probe.CHECKS}


@pytest.mark.parametrize("verdict_of_network", ["pass", "warn", "fail"])
@pytest.mark.parametrize("hosts", [True, False])
def test_one_verdict_on_hosts_and_network(verdict_of_network: str, hosts: bool) -> None:
    counts = {"fail": 0, "warn": 0, "pass": 3, "skip": 1} | {verdict_of_network: 2}
    network = {"verdict": verdict_of_network, "counts": counts, "table": "network: ...", "html": "", "findings": []}
    before = preflight.preflight({"n1": host()} if hosts else {}, PLAN, fail_on="warn")
    result = preflight.with_network(before, network)
    assert (result["ok"], result["status"]) == (verdict_of_network != "fail", verdict_of_network)
    assert result["exit_code"] == {"pass": 0, "warn": 1, "fail": 2}[verdict_of_network]
    assert result["stop"] == (verdict_of_network != "pass")
    assert result["counts"]["pass"] == before["counts"]["pass"] + counts["pass"]
    assert result["table"].endswith("network: ...")
    assert ("n1" in result["table"]) == hosts
    assert result["network"] == {"verdict": verdict_of_network, "counts": counts, "findings": []}


def test_what_could_not_be_measured_stops_no_verdict() -> None:
    """Any part of the facts may be missing or null: an odd host must not take the verdict on all others with it."""
    for section in [*HOST, *(f"health__{part}" for part in HOST["health"])]:
        assert report(host(**{section: None}))["nodes"]["n1"]["checks"]
    for key in HOST["health"]["gpus"][0]:
        if key not in ("index", "fabric_state"):
            assert report(host(**{f"health__gpus__0__{key}": None}))["nodes"]["n1"]["checks"]


# --- details ---------------------------------------------------------------------------------------------------------


def held(**process: Any) -> dict[str, Any]:
    return verdict(
        report(
            host(health__gpus__0__processes=[{"pid": 7, "name": "python3", "used_mib": 90000, "user": "u"} | process])
        ),
        "gpu_memory",
    )


def test_memory_of_our_own_units_is_as_it_should_be() -> None:
    found = held(unit="vllm@big.service")
    assert (found["status"], found["measured"]) == ("pass", "in use by vllm@big.service")


def test_memory_of_others_names_the_owner() -> None:
    assert "90000 MiB by python3 (pid 7, u, session-3.scope)" in held(unit="session-3.scope")["measured"]
    assert held(unit=None)["status"] == "fail"
    assert held(unit=None, used_mib=200)["status"] == "warn"


def test_fabric_manager_belongs_to_the_host_below_a_virtual_machine() -> None:
    facts = host(health__virtual=True, health__fabric_manager=None)
    assert verdict(report(facts), "fabric_manager")["status"] == "skip"
    switch = {"address": "0000:05:00.0", "device": "0x22a3", "class": "0x068000", "driver": None}
    facts["nvidia_functions"].append(switch)
    assert verdict(report(facts), "fabric_manager")["status"] == "fail"


def test_drivers_below_cuda_13_may_serve_cuda_12() -> None:
    plan = copy.deepcopy(PLAN) | {"runtime": {"variant": "cu129"}}
    facts = host(nvidia_driver__loaded="550.163.01", packages=[])
    assert verdict(report(facts, plan), "driver_cuda")["status"] == "pass"
    assert verdict(report(facts), "driver_cuda")["status"] == "fail"
    # the newest digits count as numbers
    assert verdict(report(host(nvidia_driver__loaded="580.105.08")), "driver_cuda")["status"] == "pass"


def test_unattended_upgrades_are_told() -> None:
    facts = host(
        packages=[package("nvidia-open-580")], health__unattended_upgrades={"enabled": True, "blacklist": ["linux-"]}
    )
    assert "unattended upgrades may replace them" in verdict(report(facts), "holds")["measured"]
    facts["health"]["unattended_upgrades"]["blacklist"] = ["nvidia-", "("]
    assert "unattended" not in verdict(report(facts), "holds")["measured"]


def test_less_space_is_a_warning_on_a_node_that_serves() -> None:
    facts = host(**{"paths__/opt/ironrack__free_bytes": GIB, "paths__/opt/ironrack/current": {"exists": True}})
    assert verdict(report(facts), "disk_space")["status"] == "warn"


# --- nodes against each other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "path", "value"),
    [
        ("same_driver", "fail", "nvidia_driver__loaded", "580.95.05"),
        ("same_fabric_manager", "fail", "health__fabric_manager", "580.95.05"),
        ("same_flavour", "warn", "nvidia_driver__flavour", "proprietary"),
        ("same_runtime", "fail", "health__release", {"id": "other"}),
        ("same_kernel", "warn", "kernel__release", "6.1.0"),
        ("same_gpus", "warn", "gpus", [H200]),
        ("same_topology", "warn", "health__topology", [["X", "SYS"], ["SYS", "X"]]),
        ("same_vbios", "warn", "health__gpus__0__vbios", "96.00.00.00.01"),
    ],
)
def test_one_node_is_different(name: str, status: str, path: str, value: Any) -> None:
    release = {"health__release": {"id": "usual"}}
    alike = {node: host(**release) for node in ("n1", "n2", "n3")}
    result = preflight.preflight(alike, PLAN)
    assert verdict(result, name)["status"] == "pass"
    result = preflight.preflight(alike | {"n2": host(**(release | {path: value}))}, PLAN)
    assert verdict(result, name, "n2")["status"] == status
    assert "n1 has" in verdict(result, name, "n2")["measured"]
    assert verdict(result, name, "n1")["status"] == "pass"
    assert "n2 has" in verdict(result, name, "n1")["measured"]


def test_without_a_majority_both_are_named() -> None:
    result = preflight.preflight({"n1": host(), "n2": host(nvidia_driver__loaded="580.95.05")}, PLAN)
    assert [verdict(result, "same_driver", node)["status"] for node in ("n1", "n2")] == ["fail", "fail"]
    assert verdict(result, "same_driver")["measured"] == "580.159.04; n2 has 580.95.05"


def test_equality_is_checked_by_every_rule() -> None:
    assert {rule.id for rule in preflight.EQUAL} == {
        "same_driver",
        "same_fabric_manager",
        "same_flavour",
        "same_runtime",
        "same_kernel",
        "same_gpus",
        "same_topology",
        "same_vbios",
    }


def test_clocks_are_held_against_the_middle() -> None:
    nodes = {
        name: host(health__clock__offset_seconds=offset) for name, offset in (("n1", 60.2), ("n2", 61.0), ("n3", 1.0))
    }
    result = preflight.preflight(nodes, PLAN)
    assert [verdict(result, "clock_skew", node)["status"] for node in nodes] == ["pass", "pass", "fail"]
    assert "-59 s from the other nodes" in verdict(result, "clock_skew", "n3")["measured"]


def test_controller_decides_between_two_clocks() -> None:
    nodes = {name: host(health__clock__offset_seconds=offset) for name, offset in (("n1", 0.2), ("n2", 50.0))}
    result = preflight.preflight(nodes, PLAN)
    assert [verdict(result, "clock_skew", node)["status"] for node in nodes] == ["pass", "fail"]


# --- the report ------------------------------------------------------------------------------------------------------


def test_node_that_could_not_be_looked_at() -> None:
    result = preflight.preflight({"n1": host()}, PLAN, ["n1", "n2"])
    assert wrong(result, "n2") == {"reachable": "fail"}
    assert (result["ok"], result["stop"]) == (False, True)


@pytest.mark.parametrize(
    ("fail_on", "stop"), [("fail", [False, True]), ("warn", [True, True]), ("never", [False, False])]
)
def test_what_stops_the_playbook(fail_on: str, stop: list[bool]) -> None:
    facts = [host(health__remove_ipc=True), host(health__gpus__0__mig=True)]
    assert [report(one, fail_on=fail_on)["stop"] for one in facts] == stop
    assert [report(one, fail_on=fail_on)["exit_code"] for one in facts] == [1, 2]


def test_accepted_failure_is_a_warning() -> None:
    result = report(host(health__gpus__0__mig=True), accept=["mig"])
    assert result["ok"]
    assert verdict(result, "mig")["status"] == "warn"
    assert verdict(result, "mig")["accepted"]
    assert "WARN mig (accepted) on n1" in result["table"]


def test_table_tells_a_finding_of_several_nodes_once() -> None:
    facts = host(health__gpus__0__fabric_state="In Progress")
    table = preflight.preflight({"n1": facts, "n2": facts, "n3": host()}, PLAN)["table"]
    assert table.splitlines()[0].split() == ["node", "verdict", "fail", "warn", "pass", "skip"]
    assert "FAIL fabric_state [D1, D3, D8, D9, D12] on n1, n2" in table
    assert "remedy:   start Fabric Manager" in table


def test_report_is_plain_json_and_the_same_each_time() -> None:
    assert json.loads(json.dumps(report(host()))) == report(host())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fail_on": "always"}, ["preflight_fail_on='always'", "fail, warn, never"]),
        ({"accept": ["migg"]}, ["preflight_accept", "'migg'", "did you mean mig?"]),
        ({"accept": ["zzzz"]}, ["'zzzz'", "checks are gpu_driver"]),
        ({"xid_hours": "many"}, ["preflight_xid_hours='many'"]),
        ({"clock_skew_seconds": float("nan")}, ["preflight_clock_skew_seconds=nan"]),
        ({"min_free_gib": {"prefix": -1}}, ["preflight_min_free_gib.prefix=-1"]),
        ({"colour": 1}, ["'colour'", "fail_on"]),
    ],
)
def test_wrong_settings(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(HostError) as caught:
        report(host(), **options)
    for word in words:
        assert word in str(caught.value)


# --- data and document -----------------------------------------------------------------------------------------------


def test_every_row_of_the_data_has_a_source() -> None:
    for rows in judging.data().values():
        assert rows
        for row in rows:
            assert "http" in row["source"] or "nverror.h" in row["source"]
    codes = [code for row in judging.data()["xids"] for code in row["codes"]]
    assert len(codes) == len(set(codes))
    assert {79, 48, 63, 64, 74, 92, 94, 95, 119, 120, 31, 13} <= set(codes)


def test_document_lists_every_report_and_every_check() -> None:
    rows = re.findall(r"(?m)^\| ([ACDEFHI]\d+) \| (.*?) \| (.*?) \| (.*?) \|$", DOCUMENT.read_text(encoding="utf-8"))
    assert [row[0] for row in rows] == [f"{group}{n + 1}" for group, size in REPORTS for n in range(size)]
    groups = {check.id: set(check.group) for check in preflight.CHECKS}
    groups |= {rule.id: set(rule.group) for rule in preflight.EQUAL}
    groups |= {name: set(group) for name, group in probe.CHECKS.items()}
    told: dict[str, set[str]] = {}
    for report_id, _, _, checks in rows:
        if not checks.startswith("`"):
            assert checks.startswith("no host shows it"), report_id
            continue
        for name in re.findall(r"`(\w+)`", checks):
            told.setdefault(name, set()).add(report_id)
    assert told == {name: group for name, group in groups.items() if group}
    listed = re.findall(r"(?m)^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8"))
    assert sorted(listed) == sorted([*preflight.check_ids(), "reachable"])


@pytest.mark.parametrize(
    ("servers", "status", "words"),
    [
        ([server("a", "*", "377"), server("b", "+", "377")], "pass", "follows a"),
        ([server("a", "*", "377"), server("b", "x", "377")], "warn", "b disagrees"),
        ([server("a", "*", "370")], "warn", "a has not answered the last three"),
        ([server("a", "*", "1")], "pass", "follows a"),
        ([], "skip", "no server"),
        (None, "skip", "chrony does not run"),
    ],
)
def test_servers_of_the_time(servers: list[dict[str, str]] | None, status: str, words: str) -> None:
    found = verdict(report(host(health__clock__servers=servers)), "time_servers")
    assert found["status"] == status
    assert words in found["measured"]


def test_environment_that_fits_the_plan() -> None:
    plan = copy.deepcopy(PLAN)
    plan["nodes"]["n1"]["interface"] = "eth0"
    for name, status in (("eth0", "pass"), ("eth1", "fail")):
        written = {"VLLM_HOST_IP": "10.77.1.11", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": f"={name}"}
        result = report(host(health__node_environment=written), plan)
        assert verdict(result, "node_environment")["status"] == status
