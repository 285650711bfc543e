# SPDX-License-Identifier: Apache-2.0
"""Packages, services and kernel modules of what was chosen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import matrix
from .notes import Chosen, Notes, dicts, mapping

# First kernel with the dma-buf interface that GPUDirect RDMA uses.
DMA_BUF_KERNEL = (5, 12)
NOUVEAU = ("nouveau", "nova_core", "nova_drm", "nvidiafb")
SERVICE_OF = {
    "persistence": "nvidia-persistenced",
    "fabric_manager": "nvidia-fabricmanager",
    "imex": "nvidia-imex",
    "dcgm": "nvidia-dcgm",
}


def kernels(facts: Mapping[str, Any], notes: Notes) -> list[str]:
    """Releases of every installed kernel, the running one with them."""
    running = mapping(facts, "kernel").get("release")
    releases = [str(entry["release"]) for entry in dicts(facts, "kernels") if entry.get("release")]
    if not releases:
        notes.warnings.append(
            "ironrack_host.kernels is empty: headers are asked for the running kernel alone; another one that is booted"
            " later would be without a driver"
        )
    if isinstance(running, str) and running and running not in releases and not facts.get("container"):
        releases.append(running)
    return list(dict.fromkeys(releases))


def headers(facts: Mapping[str, Any], releases: Sequence[str], installed: Mapping[str, str]) -> list[str]:
    """Packages with the headers of every kernel, but for kernels made by hand, whose headers are no package."""
    own = {str(entry.get("release")) for entry in dicts(facts, "kernels") if entry.get("headers")}
    names = {release: f"linux-headers-{release}" for release in releases}
    return [name for release, name in names.items() if release not in own or name in installed]


def kernel_metas(distribution: matrix.Distribution, releases: Sequence[str]) -> list[str]:
    """The meta-packages that pull a new kernel in: held, a kernel comes when the driver for it does."""
    flavours = list(dict.fromkeys(_kernel_flavour(release) for release in releases))
    metas: list[str] = []
    for flavour in flavours:
        if not flavour:
            continue
        metas += [f"linux-image-{flavour}", f"linux-headers-{flavour}"]
        if distribution.family == "ubuntu":
            hwe = f"{flavour}-hwe-{distribution.version}"
            metas += [f"linux-{flavour}", f"linux-image-{hwe}", f"linux-headers-{hwe}", f"linux-{hwe}"]
    return metas


def _kernel_flavour(release: str) -> str:
    """6.1.0-40-cloud-amd64 -> cloud-amd64, 6.12.94+deb13-amd64 -> amd64, 6.8.0-90-generic -> generic"""
    found = re.fullmatch(r"\d+(?:\.\d+)*(?:\+deb\d+)?(?:-\d+)?-([a-z][a-z0-9-]*)", release)
    return found.group(1) if found else ""


def precompiled(chosen: Chosen) -> bool:
    return bool(chosen.values["nvidia_driver_precompiled"]) and chosen.names.precompiled is not None


def driver(chosen: Chosen, releases: Sequence[str]) -> list[str]:
    values, branch, flavour, names = chosen.values, chosen.branch, chosen.flavour, chosen.names
    if values["nvidia_driver_packages"]:
        return list(values["nvidia_driver_packages"])
    packages = [name.format(b=branch) for name in (names.open if flavour == "open" else names.proprietary)]
    if names.precompiled and precompiled(chosen):
        template = names.precompiled[0 if flavour == "open" else 1]
        packages = [name for name in packages if "-dkms-" not in name or "-no-dkms-" in name]
        packages += [template.format(b=branch, k=release) for release in releases]
    return packages


def fabric(chosen: Chosen, notes: Notes) -> tuple[list[str], list[dict[str, Any]]]:
    values, distribution, hardware = chosen.values, chosen.distribution, chosen.hardware
    branch, names = chosen.branch, chosen.names
    packages: list[str] = []
    services: list[dict[str, Any]] = []
    where = f"{distribution.id} {distribution.version}" if names.origin == "distribution" else f"branch {branch}"
    manager = str(values["gpu_fabric_manager"])
    has_board = any(gpu.form == "sxm" for gpu in hardware.gpus)
    if manager == "present" and not (hardware.has_nvswitch or has_board):
        notes.refuse(
            "gpu_fabric_manager",
            manager,
            f"there is no NVSwitch: {hardware.summary()} are PCIe cards or superchips, it would not start",
            "set it to auto or absent",
        )
    elif manager == "present" or (manager == "auto" and hardware.has_nvswitch):
        blackwell = any(gpu.form == "sxm" and gpu.generation.startswith("blackwell") for gpu in hardware.gpus)
        wanted = [*names.fabric_manager, *(names.nvlink5 if blackwell else ())]
        if not names.fabric_manager or (blackwell and not names.nvlink5):
            notes.refuse(
                "nvidia_driver_source",
                values["nvidia_driver_source"],
                f"{hardware.summary()} need {'the NVLink subnet manager' if blackwell else 'Fabric Manager'}, which"
                f" {where} does not have",
                "set it to nvidia or local, with a branch of 570 or newer",
            )
        packages += [name.format(b=branch) for name in wanted]
        services.append(service("fabric_manager"))
        notes.reasons.append(
            "Fabric Manager"
            + (" and the NVLink subnet manager" if blackwell else "")
            + (": the GPUs are joined by NVSwitches" if manager == "auto" else ": gpu_fabric_manager asks for it")
        )
    elif manager == "absent" and hardware.has_nvswitch:
        notes.warnings.append(
            "gpu_fabric_manager is absent on a host with NVSwitches: CUDA answers error 802 until something else sets"
            " the switches up"
        )
    elif manager == "auto" and hardware.blackwell_modules > 1:
        # Their switches are not seen on the bus, so a board that has lost a GPU looks like none.
        notes.warnings.append(
            f"{hardware.summary()}: boards of Blackwell modules have eight. Fabric Manager is left out; if this is one"
            f" that has lost a GPU, set gpu_fabric_manager to present, or declare gpus with a count of 8"
        )
    elif has_board and hardware.origin == "bus" and len(hardware.gpus) >= matrix.HGX_GPUS:
        notes.warnings.append(
            f"{hardware.summary()} without an NVSwitch on the bus: Fabric Manager is left out; on bare metal look for"
            f" the switches (lspci -d 10de::0680), in a virtual machine the host runs it"
        )
    imex = str(values["gpu_fabric_imex"])
    if imex == "present" or (imex == "auto" and hardware.rack_scale):
        if names.imex:
            packages += [name.format(b=branch) for name in names.imex]
            services.append(service("imex"))
            notes.reasons.append("IMEX: NVLink reaches other nodes (GB200, GB300)")
        else:
            notes.refuse(
                "nvidia_driver_source",
                values["nvidia_driver_source"],
                f"IMEX is needed, which {where} does not have",
                "set it to nvidia or local, or gpu_fabric_imex to absent",
            )
    return packages, services


def compat(chosen: Chosen, notes: Notes) -> str | None:
    values, hardware = chosen.values, chosen.hardware
    if not values["cuda_compat"]:
        return None
    cuda = matrix.CUDA[values["python_env_variant"]]
    if not hardware.datacenter:
        notes.refuse(
            "cuda_compat",
            True,
            f"forward compatibility is for data centre GPUs, {hardware.summary()} answer error 804",
            "set it to false, with a driver branch that runs the runtime",
        )
        return None
    if chosen.branch >= cuda.native:
        notes.reasons.append(f"no cuda-compat: branch {chosen.branch} runs CUDA {cuda.runtime} without it")
        return None
    if values["nvidia_driver_source"] == "distribution":
        notes.refuse(
            "cuda_compat",
            True,
            "nvidia_driver_source is distribution, and cuda-compat is in NVIDIA's repository alone",
            "set it to false, or nvidia_driver_source to nvidia or local",
        )
        return None
    return f"cuda-compat-{cuda.runtime.replace('.', '-')}"


def gdr(chosen: Chosen, notes: Notes) -> str:
    values, facts, flavour = chosen.values, chosen.facts, chosen.flavour
    given = str(values["gpu_fabric_gdr"])
    release = str(mapping(facts, "kernel").get("release") or "")
    found = re.match(r"(\d+)\.(\d+)", release)
    new_enough = found is not None and (int(found.group(1)), int(found.group(2))) >= DMA_BUF_KERNEL
    possible = flavour == "open" and new_enough
    if given == "dma_buf" and not possible:
        notes.refuse(
            "gpu_fabric_gdr",
            given,
            f"dma-buf needs the open kernel module and kernel 5.12 (here: {flavour}, {release or 'unknown'})",
            "set it to peermem or auto",
        )
    if given != "auto":
        mode = given
    elif not dicts(facts, "rdma"):
        mode = "none"
    else:
        mode = "dma_buf" if possible else "peermem"
        notes.reasons.append(f"GPUDirect RDMA by {mode}: {flavour} kernel module, kernel {release or 'unknown'}")
    if mode == "peermem":
        notes.warnings.append(
            "nvidia_peermem registers with the peer memory interface of DOCA/MLNX_OFED or of Ubuntu's kernel; without"
            " it GPUDirect RDMA stays off"
        )
    return mode


def tools(chosen: Chosen, notes: Notes) -> tuple[list[str], list[dict[str, Any]]]:
    values, branch = chosen.values, chosen.branch
    if not values["gpu_fabric_dcgm"]:
        return [], []
    if values["nvidia_driver_source"] == "distribution":
        notes.reasons.append("no DCGM: nvidia_driver_source is distribution, and it is in NVIDIA's repository alone")
        return [], []
    major = matrix.BRANCHES[branch].cuda.split(".")[0]
    return [f"datacenter-gpu-manager-4-cuda{major}"], [service("dcgm")]


def service(key: str) -> dict[str, Any]:
    """when: these services fail, and keep failing, where no driver is loaded."""
    return {"name": SERVICE_OF[key], "state": "started", "enabled": True, "when": "driver_loaded"}


def modules(chosen: Chosen, mode: str) -> dict[str, Any]:
    options: dict[str, str] = {"nouveau": "modeset=0"}
    if chosen.flavour == "open" and not matrix.BRANCHES[chosen.branch].open_default and not chosen.hardware.datacenter:
        # Before branch 560 the open module drove workstation and consumer GPUs on request only.
        options["nvidia"] = "NVreg_OpenRmEnableUnsupportedGpus=1"
    asked = str(chosen.values["gpu_fabric_imex"])
    if asked == "present" or (asked == "auto" and chosen.hardware.rack_scale):
        options["nvidia"] = f"{options.get('nvidia', '')} NVreg_CreateImexChannel0=1".strip()
    load = ["nvidia", "nvidia_uvm", *(["nvidia_peermem"] if mode == "peermem" else [])]
    return {"load": load, "blacklist": list(NOUVEAU), "options": options}
