"""Whether a host needs a reboot, what forbids it, what stops with it, and how it came back.

The host is the recording of two H200s in tests/fixtures/nvidia_h200x2, put on metal, with faults written into it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts import reboot
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.errors import HostError

RECORDING = Path(__file__).resolve().parents[2] / "fixtures" / "nvidia_h200x2" / "host.json"
HOST: dict[str, Any] = json.loads(RECORDING.read_text(encoding="utf-8"))
H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}
RUNS, OLD = "580.159.04", "570.195.03"
KERNEL, NEWER = "6.8.0-79-generic", "6.8.0-90-generic"
MODULE = "updates/dkms/nvidia.ko.zst"


def host(**paths: Any) -> dict[str, Any]:
    """A healthy metal host with a driver that DKMS built, changed at paths such as health__gpus__0__mig_pending."""
    facts: dict[str, Any] = copy.deepcopy(HOST)
    facts["kernel"] = {"release": KERNEL, "architecture": "x86_64", "options": ["iommu=pt"]}
    facts["kernels"] = [{"release": KERNEL, "headers": True, "nvidia_module": MODULE}]
    facts["dkms"] = [{"module": "nvidia", "version": RUNS, "kernel": KERNEL, "state": "installed"}]
    facts["packages"] = [{"name": "nvidia-open", "version": f"{RUNS}-1", "state": "hi", "hold": True}]
    facts["health"] |= {"virtual": False, "fabric_manager": RUNS, "unmounted": [], "gpu_users": []}
    facts["health"]["services"] = {"nvidia-fabricmanager": {"active": "active"}}
    facts["health"]["clock"] = {"synchronised": True, "offset_seconds": 0.4}
    facts["health"]["boot"] = {"kernel": None, "options": None, "modprobe": [], "initramfs_older": []}
    for path, value in paths.items():
        *folders, last = path.split("__")
        place: Any = facts
        for key in folders:
            place = place[int(key)] if isinstance(place, list) else place[key]
        if isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    return facts


def kernel(release: str, module: str | None = MODULE, headers: bool = True) -> dict[str, Any]:
    return {"release": release, "headers": headers, "nvidia_module": module}


def process(**fields: Any) -> dict[str, Any]:
    return {"pid": 41, "name": "python3", "used_mib": 9000, "unit": "session-4.scope", "user": "ann"} | fields


def needed(facts: dict[str, Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    return reboot.reboot_needed(facts, *arguments, **options)


# --- reasons ---------------------------------------------------------------------------------------------------------


def test_a_healthy_host_needs_none() -> None:
    nothing = {"needed": False, "reasons": [], "kinds": [], "disabling": [], "blockers": []}
    assert needed(host()) == nothing
    assert needed(host(), {"needed": True}) == nothing
    # as recorded: a container without kernels, packages and systemd, and without what older facts lack
    assert needed(copy.deepcopy(HOST)) == nothing


UNLOADED = {"nvidia_driver__loaded": None, "nvidia_driver__modules": [], "gpus": [], "health__gpus": []}
REASONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "driver",
        {"nvidia_driver__loaded": OLD},
        f"driver {OLD} runs, installed is library {RUNS} and kernel module {RUNS}",
    ),
    ("driver", {"dkms__0__version": "580.200.01"}, f"driver {RUNS} runs, installed is kernel module 580.200.01"),
    ("module", UNLOADED, "the driver is installed, and no NVIDIA module is loaded"),
    (
        "module",
        UNLOADED | {"kernels": [kernel(KERNEL, None), kernel(NEWER)], "dkms": []},
        f"kernel {KERNEL} has no NVIDIA module, {NEWER} has one",
    ),
    ("nouveau", UNLOADED | {"nvidia_driver__modules": ["nouveau"]}, "nouveau is loaded"),
    ("kernel", {"kernels": [kernel(KERNEL), kernel(NEWER)]}, f"kernel {KERNEL} runs, {NEWER} is installed"),
    ("packages", {"health__reboot_required": ["dbus", "libc6"]}, "(/run/reboot-required): dbus, libc6"),
    ("packages", {"health__reboot_required": []}, "(/run/reboot-required)"),
    (
        "modprobe",
        {"health__boot__modprobe": ["/etc/modprobe.d/nvidia.conf"]},
        "/etc/modprobe.d/nvidia.conf changed after the boot, and nvidia is loaded",
    ),
    (
        "options",
        {"health__boot__options": ["iommu=pt", "intel_iommu=on"]},
        "the kernel runs not yet with intel_iommu=on",
    ),
    ("options", {"health__boot__options": []}, "the kernel runs still with iommu=pt"),
    ("ecc", {"health__gpus__1__ecc_pending": False}, "GPU 1: ECC off is pending"),
    ("mig", {"health__gpus__0__mig_pending": True}, "GPU 0: MIG on is pending"),
    ("memory", {"health__gpus__0__remap_pending": True}, "GPU 0: a repair of its memory is pending"),
    ("recovery", {"health__gpus__1__recovery_action": "Reboot"}, "GPU 1: the driver asks for a reboot"),
]


@pytest.mark.parametrize(("kind", "change", "text"), REASONS)
def test_each_reason_alone(kind: str, change: dict[str, Any], text: str) -> None:
    result = needed(host(**change), {"needed": True})
    # A newer kernel with the module is also a kernel that does not run.
    assert set(result["kinds"]) - {kind} <= {"kernel"}
    assert kind in result["kinds"]
    assert text in "; ".join(result["reasons"])
    assert result["needed"]
    assert result["blockers"] == []
    ignored = needed(host(**change), {"needed": True}, ignore=[kind, "kernel"])
    assert (ignored["needed"], ignored["reasons"]) == (False, [])


def test_each_kind_is_tried() -> None:
    assert {kind for kind, _, _ in REASONS} | {"policy"} == set(reboot.KINDS)


def test_reasons_of_others_count_as_well() -> None:
    result = needed(host(), None, ["BIOS update on Tuesday"])
    assert (result["needed"], result["reasons"], result["kinds"]) == (True, ["BIOS update on Tuesday"], ["policy"])
    assert not needed(host(), None, ["BIOS update on Tuesday"], ignore=["policy"])["needed"]


@pytest.mark.parametrize(
    "change",
    [
        # the boot loader is told to start this kernel: the newer one is installed and not chosen
        {"kernels": [kernel(KERNEL), kernel(NEWER)], "health__boot__kernel": KERNEL},
        # options of a module that is not loaded are read when it is
        {"health__boot__modprobe": ["/etc/modprobe.d/x.conf"], "packages": [], "dkms": [], "kernels": []} | UNLOADED,
        # nouveau on a host that gets no driver of NVIDIA's
        UNLOADED | {"nvidia_driver__modules": ["nouveau"], "packages": [], "dkms": [], "kernels": []},
        # libraries without a module, as in a container
        UNLOADED | {"packages": [], "dkms": [], "kernels": []},
        # consumer cards have neither
        {"health__gpus__0__ecc": None, "health__gpus__0__ecc_pending": None, "health__gpus__0__mig_pending": None},
        {"health__gpus__0__recovery_action": "Drain and Reset"},
    ],
)
def test_what_is_no_reason(change: dict[str, Any]) -> None:
    assert needed(host(**change), {"needed": False})["reasons"] == []


def test_an_unusable_stack_is_not_taken_for_no_need() -> None:
    facts = host(**UNLOADED)
    assert not needed(facts, {"needed": False, "problems": []})["needed"]
    assert needed(facts, {"needed": False, "problems": [{"text": "cannot be"}]})["needed"]


def test_a_misspelt_kind_is_told() -> None:
    with pytest.raises(HostError, match=r"host_reboot_ignore names 'kernels'.*did you mean kernel"):
        needed(host(), ignore=["kernels"])


@pytest.mark.parametrize("facts", [None, {}, {"health": None}, []])
def test_facts_without_health_are_told(facts: Any) -> None:
    with pytest.raises(HostError, match="health: true"):
        reboot.reboot_needed(facts)


# --- blockers --------------------------------------------------------------------------------------------------------

PENDING = {"nvidia_driver__loaded": OLD}


def blockers(change: dict[str, Any], **options: Any) -> list[str]:
    result = needed(host(**(PENDING | change)), {"needed": True}, **options)
    assert result["needed"]
    found: list[str] = result["blockers"]
    return found


def test_a_kernel_without_module_would_lose_the_gpus() -> None:
    change = {
        "kernels": [kernel(KERNEL), kernel(NEWER, None)],
        "dkms": [
            {"module": "nvidia", "version": RUNS, "kernel": KERNEL, "state": "installed"},
            {"module": "nvidia", "version": RUNS, "kernel": NEWER, "state": "failed"},
        ],
    }
    (text,) = blockers(change)
    assert f"kernel {NEWER} would boot and has no NVIDIA module" in text
    assert f"/var/lib/dkms/nvidia/{RUNS}/build/make.log" in text
    assert f"linux-headers-{NEWER}" in text
    # force is for people and for second tries, not for losing GPUs
    assert blockers(change, force=True) == [text]
    # the boot loader starts another
    assert blockers(change | {"health__boot__kernel": KERNEL}) == []


def test_missing_headers_are_named() -> None:
    (text,) = blockers({"kernels": [kernel(KERNEL), kernel(NEWER, None, headers=False)]})
    assert "its headers are not installed" in text


@pytest.mark.parametrize("state", ["iU", "iF", "hF", "iHR", "iW", "it"])
def test_an_unfinished_dpkg(state: str) -> None:
    (text,) = blockers({"packages__0__state": state})
    assert f"nvidia-open ({state}): dpkg --configure -a" in text


@pytest.mark.parametrize("state", ["ii", "hi", "rc", "hc"])
def test_a_finished_dpkg(state: str) -> None:
    assert blockers({"packages__0__state": state}) == []


def test_an_old_initramfs_would_load_nouveau() -> None:
    (text,) = blockers({"health__boot__initramfs_older": [KERNEL]})
    assert f"update-initramfs -u -k {KERNEL}" in text
    assert blockers({"health__boot__initramfs_older": ["6.1.0-1-amd64"]}) == []


def test_somebody_else_on_a_gpu() -> None:
    change = {"health__gpus__1__processes": [process()]}
    (text,) = blockers(change)
    assert "python3 (pid 41, ann, session-4.scope) on GPU 1" in text
    assert "host_reboot_force: true" in text
    assert blockers(change, force=True) == []


def test_somebody_else_where_nvidia_smi_fails() -> None:
    """After an update it always does: the library is newer than the module."""
    change = {"health__gpus": [], "gpus": [], "health__gpu_users": [process(used_mib=None)] * 2}
    (text,) = blockers(change)
    assert text.count("pid 41") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"unit": "vllm@tiny.service"},
        {"unit": "ray-worker.service"},
        {"unit": "nvidia-persistenced.service", "used_mib": None},
        {"unit": "nvidia-dcgm.service", "used_mib": None},
        {"name": "Xorg", "unit": "gdm.service", "used_mib": 4},
    ],
)
def test_who_is_nobody_else(fields: dict[str, Any]) -> None:
    assert blockers({"health__gpus__0__processes": [process(**fields)]}) == []


def test_a_reboot_that_did_not_help_is_not_tried_for_ever() -> None:
    reasons = needed(host(**PENDING))["reasons"]
    left = {"boot_id": "of the boot before", "remember": {"reasons": reasons}}
    (text,) = blockers({}, left=left)
    assert "rebooted for the same reasons and they still hold" in text
    assert blockers({}, left=left, force=True) == []
    # drained and not yet rebooted
    assert blockers({}, left=left | {"boot_id": HOST["boot_id"]}) == []
    # rebooted, and another reason since
    assert blockers({"health__reboot_required": []}, left=left) == []
    assert blockers({}, left=None) == []


def test_nothing_is_in_the_way_of_a_reboot_that_is_not_needed() -> None:
    result = needed(host(packages__0__state="iU", health__gpus__0__processes=[process()]))
    assert (result["needed"], result["blockers"]) == (False, [])


# --- what stops ------------------------------------------------------------------------------------------------------


def replica(name: str, *nodes: str) -> dict[str, Any]:
    world = [{"node": node} for node in nodes]
    return {"name": name, "api_node": nodes[0], "url": f"http://{nodes[0]}:8000", "world": world}


PLAN: dict[str, Any] = {
    "runtime": {"variant": "cu130"},
    "nodes": {name: {"gpus": [H200, H200]} for name in ("n1", "n2", "n3", "n4")},
    "ray": {"head": "n4"},
    "instances": {
        "small": {"executor": "mp", "replicas": [replica("small", "n1"), replica("small.r1", "n2")]},
        "big": {"executor": "ray", "replicas": [replica("big", "n2", "n3")]},
    },
}


def test_a_node_takes_its_own_and_what_leans_on_it() -> None:
    scope = reboot.drain_scope(PLAN, "n3")
    assert scope["partners"] == [{"node": "n2", "units": ["vllm-canary@big.timer", "vllm@big.service"]}]
    assert scope["wait_for"] == ["http://n2:8000"]
    assert scope["alone"] == []
    assert "vllm@*.service" in scope["units"]


def test_replicas_elsewhere_go_on() -> None:
    scope = reboot.drain_scope(PLAN, "n1")
    assert (scope["partners"], scope["wait_for"]) == ([], ["http://n1:8000"])
    assert scope["alone"] == [{"name": "small", "instance": "small", "url": "http://n1:8000"}]


def test_an_instance_over_several_nodes_is_not_waited_for() -> None:
    """Its other nodes may still have their turn: only the replica that is here as a whole must answer."""
    scope = reboot.drain_scope(PLAN, "n2")
    assert scope["partners"] == []
    assert scope["wait_for"] == ["http://n2:8000", "http://n2:8000"]
    assert [instance["name"] for instance in scope["alone"]] == ["small.r1"]


def test_the_head_takes_everything_that_uses_ray() -> None:
    scope = reboot.drain_scope(PLAN, "n4")
    assert scope["partners"] == [{"node": "n2", "units": ["vllm-canary@big.timer", "vllm@big.service"]}]


def test_a_cluster_without_instances() -> None:
    scope = reboot.drain_scope({"ray": None, "instances": {}}, "n1")
    assert (scope["partners"], scope["wait_for"], scope["alone"]) == ([], [], [])
    with pytest.raises(HostError, match=r"prepare\.yml"):
        reboot.drain_scope(None, "n1")


# --- afterwards ------------------------------------------------------------------------------------------------------


def back(facts: dict[str, Any], before: dict[str, Any] | None = None, **options: Any) -> list[str]:
    if before is None:
        before = reboot.remembered(host(), [])
    return reboot.came_back(facts, PLAN, "n1", before, {"needed": True}, **options)


def test_it_came_back() -> None:
    assert back(host()) == []
    assert back(host(), {}) == []
    # reasons that were only said are no state of the host
    assert back(host(), reboot.remembered(host(), ["BIOS update"])) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gpus": HOST["gpus"][:1]}, "gpu_count: 1 × NVIDIA H200 (143771 MiB); 1 more on the PCI bus; expected 2 ×"),
        ({"nvidia_driver__loaded": OLD}, f"driver_versions: kernel module {OLD}, library {RUNS}"),
        ({"nvidia_driver__loaded": OLD}, f"the reboot did not change this: driver {OLD} runs"),
        (
            {"nvidia__error": "Driver/library version mismatch", "gpus": []},
            "gpu_driver: Driver/library version mismatch",
        ),
        ({"health__services": {"nvidia-fabricmanager": {"active": "failed"}}}, "fabric_manager: version"),
        ({"health__gpus__0__fabric_state": "In Progress"}, "fabric_state: GPU 0: state In Progress"),
        (
            {
                "health__kernel_log__events": [
                    {"kind": "xid", "code": 79, "device": "0000:00:06", "seconds_ago": 9, "text": "fallen off the bus"}
                ]
            },
            "xid: Xid 79",
        ),
        ({"health__gpus__0__remap_pending": True}, "row_remap: GPU 0"),
        ({"health__unmounted": ["/data"]}, "not mounted any more: /data"),
        ({"filesystems": []}, "not mounted any more: /"),
        ({"health__clock__synchronised": False}, "the clock is not synchronised, as it was before"),
        ({"health__clock__offset_seconds": -7200.0}, "the clock is -7200 s off the controller's"),
        ({"kernels": [kernel(KERNEL), kernel(NEWER)]}, f"the reboot did not change this: kernel {KERNEL} runs"),
    ],
)
def test_it_did_not(change: dict[str, Any], text: str) -> None:
    assert any(problem.startswith(text) for problem in back(host(**change))), back(host(**change))


def test_what_was_so_before_is_no_fault_of_the_reboot() -> None:
    unwell = host(health__unmounted=["/scratch"], health__clock__synchronised=False, health__reboot_required=["dbus"])
    assert back(unwell, reboot.remembered(unwell, []), ignore=["packages"]) == []


def test_a_reboot_that_was_not_wanted_is_not_asked_for() -> None:
    """Drained by a run that did not end, and then host_reboot: never. What hinders engines is told all the same."""
    assert back(host(kernels=[kernel(KERNEL), kernel(NEWER)]), rebooted=False) == []
    assert [text.split(":")[0] for text in back(host(**PENDING), rebooted=False)] == [
        "driver_versions",
        "fabric_manager",
    ]


def test_what_somebody_plugged_in_is_not_missed() -> None:
    facts = host()
    stick = dict(facts["filesystems"][0], mountpoint="/media/stick")
    assert reboot.remembered(host(filesystems=[*facts["filesystems"], stick]), [])["mountpoints"] == [
        entry["mountpoint"] for entry in sorted(facts["filesystems"], key=lambda entry: str(entry["mountpoint"]))
    ]


def test_a_host_without_gpus_comes_back() -> None:
    facts = host(gpus=[], nvidia={}, nvidia_functions=[], nvidia_driver={}, packages=[], dkms=[], kernels=[])
    facts["health"] |= {"gpus": [], "nvlink": [], "services": {}}
    plan = PLAN | {"nodes": {"n1": {"gpus": []}}}
    assert reboot.came_back(facts, plan, "n1", {}, {"needed": False}) == []
