"""Checks of driver, libraries, Fabric Manager and kernel modules."""

from __future__ import annotations

import re

from ..nvidia.matrix import CUDA
from . import verify
from .judging import (
    Check,
    Facts,
    Node,
    Verdict,
    consumer,
    data,
    failed,
    numbers,
    on,
    passed,
    registry,
    skipped,
    upstream,
    warned,
)

CHECKS: list[Check] = []
check = registry(CHECKS)
# Variant of the runtime -> CUDA that its PyTorch is built for.
VARIANT_CUDA = {variant: row.runtime for variant, row in CUDA.items()}
DRIVER_PACKAGE = re.compile(
    r"(cuda-drivers|nvidia-(driver|open|fabricmanager|imex|kernel|dkms|persistenced|modprobe)|libnvidia-|libcuda1|nvlsm)"
)
NVSWITCH_CLASS = "0x0680"


@check("gpu_driver", "D11", "D13", "D16", "D17", "E9", "E13", needs="gpu")
def gpu_driver(node: Node) -> Verdict:
    error = node.nvidia.get("error")
    on_bus = len(node.nvidia.get("pci_devices") or [])
    expected = "nvidia-smi shows every GPU"
    if not error and node.facts.get("gpus"):
        if node.gpus or not node.health:
            return passed(f"nvidia-smi answers, driver {node.version}")
        why = [str(text) for text in node.facts.get("warnings") or [] if str(text).startswith("nvidia-smi -q -x")]
        return failed(
            f"nvidia-smi lists the GPUs and does not describe them ({'; '.join(why) or 'no reason told'}), so ECC,"
            " NVLink, MIG and more are not known",
            expected,
            "run `nvidia-smi -q -x` on the node: if it hangs, drain the node and reboot it; if it names a GPU, that one"
            " needs service",
        )
    if not on_bus and not node.facts.get("gpus"):
        return failed(
            "no NVIDIA GPU on the PCI bus", expected, "check seating, power and BIOS, or correct gpus in the inventory"
        )
    text = str(error or "nvidia-smi shows no GPU")
    if "mismatch" in text.lower():
        remedy = "the libraries were replaced under the running module: drain the node and reboot it"
    elif "timed out" in text:
        remedy = "the driver hangs: drain the node and reboot it, and update the driver if it comes back"
    elif "not installed" in text:
        remedy = "install the driver"
    else:
        failures = [event["text"] for event in (node.events("init") + node.events("mismatch"))[-1:]]
        text = "; ".join([text, *failures])
        remedy = "see the checks nouveau, secure_boot and dkms, then `dmesg | grep NVRM`; load the module or reboot"
    return failed(f"{text} ({on_bus} NVIDIA GPUs on the PCI bus)", expected, remedy)


@check("gpu_count", "E9", "E13", needs="gpu")
def gpu_count(node: Node) -> Verdict:
    real = node.facts.get("gpus") or []
    if not node.declared:
        return warned(
            f"{verify.describe(real)}, and gpus declares none",
            "gpus in the host's variables",
            "declare gpus for the host",
        )
    if verify.alike(node.declared, real):
        return passed(verify.describe(real))
    lost = len(node.nvidia.get("pci_devices") or []) - len(real)
    bus = f"; {lost} more on the PCI bus" if lost > 0 else ""
    return failed(
        verify.describe(real) + bus,
        verify.describe(node.declared),
        "a missing GPU: look for Xid 79 in the kernel log, power the node off and on, check the slot;"
        " otherwise correct gpus in the host's variables",
    )


@check("driver_versions", "D13", "D14", "D15", needs="gpu")
def driver_versions(node: Node) -> Verdict:
    found = {"kernel module": node.driver.get("loaded"), "library": node.driver.get("library")}
    for package in node.packages:
        if re.fullmatch(r"libnvidia-ml1|libcuda1|libnvidia-compute(-\d+)?(-server)?", package["name"]):
            found[f"package {package['name']}"] = upstream(package["version"])
    known = {name: version for name, version in found.items() if version}
    if len(known) < 2:
        return skipped("; ".join(f"{name} {version}" for name, version in known.items()) or "no driver is there")
    measured = ", ".join(f"{name} {version}" for name, version in known.items())
    if len(set(known.values())) > 1:
        return failed(
            measured,
            "one version",
            "packages were updated without a reboot: drain the node and reboot it, then hold the packages (see holds)",
        )
    return passed(measured)


@check("known_driver", "D11", needs="gpu")
def known_driver(node: Node) -> Verdict:
    days = (node.facts.get("uptime_seconds") or 0) / 86400
    for row in data()["drivers"]:
        if node.version == row["version"] and any(row["gpus"] in name for name in node.gpu_names()):
            return warned(
                f"driver {node.version}, up for {days:.0f} days: {row['text']} ({row['source']})",
                "a driver without this error",
                f"update the driver; until then reboot before {row['uptime_days']} days of uptime",
            )
    return passed(f"driver {node.version}: no known error for these GPUs")


@check("driver_cuda", "D18", "D19", needs="gpu")
def driver_cuda(node: Node) -> Verdict:
    cuda = node.release.get("torch_cuda") or VARIANT_CUDA.get(node.variant)
    if cuda is None or node.version is None:
        return skipped("no CUDA runtime" if cuda is None else "no driver is loaded")
    major = numbers(cuda)[0]
    floor = min((row.floor for row in CUDA.values() if numbers(row.runtime)[0] == major), default=None)
    if floor is None:
        return warned(f"CUDA {cuda}", "a CUDA whose minimum driver is known", "check NVIDIA's release notes")
    measured = f"driver {node.version}, runtime for CUDA {cuda}"
    if numbers(node.version)[0] < floor:
        compat = [entry["name"] for entry in node.packages if entry["name"].startswith(f"cuda-compat-{major}-")]
        if compat:  # where it does not belong, the check cuda_compat says so
            return warned(
                f"{measured}, {compat[0]}",
                f"driver {floor} or newer",
                "set VLLM_ENABLE_CUDA_COMPATIBILITY=1 in the instance's environment, or update the driver",
            )
        return failed(
            measured,
            f"driver {floor} or newer",
            "update the driver, or set python_env_variant to cu129 if the driver is 525 or newer",
        )
    return passed(measured, f"driver {floor} or newer")


@check("cuda_agree", "D20", "D21", needs="gpu")
def cuda_agree(node: Node) -> Verdict:
    torch, extension = node.release.get("torch_cuda"), node.release.get("extension_cuda") or []
    if not torch or not extension:
        return skipped("no runtime with CUDA is installed")
    measured = f"PyTorch for CUDA {torch}, vLLM linked with CUDA {', '.join(map(str, sorted(set(extension))))}"
    wanted = str(VARIANT_CUDA.get(node.variant, torch))
    if {numbers(torch)[0], *extension} != {numbers(wanted)[0]}:
        return failed(
            measured, f"both for CUDA {wanted}", "build the release anew from a lock file of one CUDA (make lock)"
        )
    return passed(measured)


@check("cuda_compat", "D7", needs="gpu")
def cuda_compat(node: Node) -> Verdict:
    compat = [package["name"] for package in node.packages if package["name"].startswith("cuda-compat")]
    names = [name for name in node.gpu_names() if consumer(name)]
    if compat and names:
        return failed(
            f"{', '.join(compat)} beside {names[0]}",
            "forward compatibility on data-centre GPUs only (error 804 on others)",
            f"remove it: apt-get remove {' '.join(compat)}",
        )
    return passed(", ".join(compat) or "not installed")


def needs_fabric_manager(node: Node) -> bool:
    """NVSwitches on the bus; newer boards show none, but their GPUs have a fabric state. Racks run it elsewhere."""
    if any(re.search(r"GB[23]00", name) for name in node.gpu_names()):
        return False
    switches = [item for item in node.facts.get("nvidia_functions") or [] if item["class"].startswith(NVSWITCH_CLASS)]
    return bool(switches) or (not node.virtual and any(fabric_state_of(gpu) for gpu in node.gpus))


def fabric_state_of(gpu: Facts) -> str | None:
    state = gpu.get("fabric_state")
    return None if state in (None, "Not Supported", "N/A") else str(state)


@check("fabric_manager", "D1", "D2", "D4", "D5", "D6", "D8", "D10", needs="gpu")
def fabric_manager(node: Node) -> Verdict:
    if not needs_fabric_manager(node):
        return skipped("no NVSwitch that this host manages")
    version, state = node.health.get("fabric_manager"), node.service("nvidia-fabricmanager")
    measured = f"version {version}, service {state}"
    expected = f"version {node.version}, service active"
    if version is None:
        return failed(
            "not installed", expected, f"install Fabric Manager in exactly version {node.version} (else CUDA error 802)"
        )
    if node.version and version != node.version:
        return failed(measured, expected, "install Fabric Manager and driver in one version, and hold both")
    if state != "active":
        return failed(
            measured,
            expected,
            "systemctl enable --now nvidia-fabricmanager; if it fails, journalctl -u nvidia-fabricmanager says why",
        )
    return passed(measured)


@check("fabric_state", "D1", "D3", "D8", "D9", "D12", needs="details")
def fabric_state(node: Node) -> Verdict:
    gpus = node.those(fabric_state_of)
    if not gpus:
        return skipped("GPUs without an NVLink fabric")
    expected = "state Completed, status Success, on every GPU"
    wrong = [gpu for gpu in gpus if gpu["fabric_state"] != "Completed" or gpu.get("fabric_status") != "Success"]
    if wrong:
        first = wrong[0]
        return failed(
            f"{on(wrong)}: state {first['fabric_state']}, status {first.get('fabric_status') or 'N/A'}"
            " (CUDA error 802)",
            expected,
            "start Fabric Manager (see fabric_manager) and wait for it; if it runs, restart it with the GPUs drained,"
            " then reboot. NCCL_NVLS_ENABLE=0 is a stop-gap for error 401",
        )
    bad = ("unhealthy", "degraded", "true", "limited")
    sick = [
        gpu
        for gpu in gpus
        if any(str(value).lower().startswith(bad) for value in (gpu.get("fabric_health") or {}).values())
    ]
    if sick:
        report = ", ".join(f"{key} {value}" for key, value in sick[0]["fabric_health"].items())
        return failed(f"{on(sick)}: {report}", "a healthy fabric", "drain the node and reset its GPUs; check NVLinks")
    return passed(f"{on(gpus)}: Completed, Success")


@check("imex", "D9", "D12", "F23", needs="gpu")
def imex(node: Node) -> Verdict:
    if not any(re.search(r"GB[23]00", name) for name in node.gpu_names()):
        return skipped("only for NVLink over several nodes (GB200, GB300)")
    state = node.service("nvidia-imex")
    packages = [p for p in node.packages if re.match(r"nvidia-imex", p["name"])]
    wrong = [p for p in packages if node.version and upstream(p["version"]) != node.version]
    if state != "active" or wrong:
        version = ", ".join(f"{p['name']} {p['version']}" for p in packages) or "no package"
        return failed(
            f"service {state}, {version}",
            f"active, version {node.version}",
            "install nvidia-imex in the driver's version, list the nodes in its nodes_config.cfg and start it",
        )
    return passed("active, in the driver's version")


@check("persistence", needs="details")
def persistence(node: Node) -> Verdict:
    off = node.those(lambda gpu: gpu.get("persistence") is False)
    if off:
        return warned(
            f"{on(off)}: off (nvidia-persistenced {node.service('nvidia-persistenced') or 'not installed'})",
            "on, so that the driver stays initialised between programs",
            "systemctl enable --now nvidia-persistenced",
        )
    return passed("on")


@check("nouveau", "D16", needs="gpu")
def nouveau(node: Node) -> Verdict:
    bound = [item["address"] for item in node.facts.get("nvidia_functions") or [] if item.get("driver") == "nouveau"]
    if bound or "nouveau" in (node.driver.get("modules") or []):
        return failed(
            f"loaded{', bound to ' + ', '.join(bound) if bound else ''}",
            "not loaded",
            "blacklist nouveau in /etc/modprobe.d with `options nouveau modeset=0`, update-initramfs -u, reboot",
        )
    return passed("not loaded")


@check("secure_boot", "D17", needs="gpu")
def secure_boot(node: Node) -> Verdict:
    state, refused = node.facts.get("secure_boot"), node.events("unsigned")
    if state is None:
        return skipped("cannot be told")
    if (refused or state) and not node.driver.get("loaded"):
        return failed(
            f"Secure Boot {'on' if state else 'off'}, no NVIDIA module is loaded"
            + (f": {refused[-1]['text']}" if refused else ""),
            "a module signed with a key that the firmware knows",
            "use the distribution's signed modules, or enrol the DKMS key: mokutil --import /var/lib/dkms/mok.pub,"
            " reboot, confirm at the console",
        )
    return passed("on, and the module is accepted" if state else "off")


@check("dkms", "D13", "D15", needs="gpu")
def dkms(node: Node) -> Verdict:
    ours = [entry for entry in node.facts.get("dkms") or [] if str(entry["module"]).startswith("nvidia")]
    broken = [entry for entry in ours if entry["state"] == "failed"]
    kernels = [kernel for kernel in node.kernels if not kernel["nvidia_module"]]
    expected = "a module for each installed kernel"
    if not node.kernels or (len(kernels) == len(node.kernels) and not ours):
        return skipped("no module of a package on this host")
    names = ", ".join(kernel["release"] for kernel in kernels)
    log = "; ".join(f"build of {e['module']} {e['version']} failed for {e['kernel']}" for e in broken)
    if kernels:
        newest = node.kernels[-1]["release"] in [kernel["release"] for kernel in kernels]
        result = failed if newest or node.running in [kernel["release"] for kernel in kernels] else warned
        return result(
            f"no module for {names}" + (f" ({log})" if log else ""),
            expected,
            "install linux-headers for it, then dkms autoinstall -k RELEASE; the log is"
            " /var/lib/dkms/nvidia*/VERSION/build/make.log",
        )
    return passed(f"{len(node.kernels)} kernels with a module")


@check("headers", "D13", needs="gpu")
def headers(node: Node) -> Verdict:
    if not any(str(entry["module"]).startswith("nvidia") for entry in node.facts.get("dkms") or []):
        return skipped("no module of NVIDIA is built by DKMS")
    missing = [kernel["release"] for kernel in node.kernels if not kernel["headers"]]
    if missing:
        return warned(
            f"none for {', '.join(missing)}",
            "headers for each installed kernel",
            f"apt-get install {' '.join(f'linux-headers-{release}' for release in missing)}",
        )
    return passed(f"for {len(node.kernels)} kernels")


@check("kernel_pending", "D13", "D15")
def kernel_pending(node: Node) -> Verdict:
    newest = node.kernels[-1]["release"] if node.kernels else None
    packages = node.health.get("reboot_required")
    if newest not in (None, node.running):
        return warned(
            f"{node.running} runs, {newest} is installed", "the newest kernel runs", "drain the node and reboot it"
        )
    if packages is not None:
        return warned(
            f"a reboot is required{': ' + ', '.join(packages[:5]) if packages else ''}",
            "no reboot pending",
            "drain the node and reboot it",
        )
    return passed(node.running)


@check("holds", "D5", "D6", "D13", "D14", needs="gpu")
def holds(node: Node) -> Verdict:
    drivers = [package for package in node.packages if DRIVER_PACKAGE.match(package["name"])]
    if not drivers:
        return skipped("no driver of a package")
    upgrades = node.health.get("unattended_upgrades") or {}
    loose = [package["name"] for package in drivers if not package["hold"]]
    if not loose:
        return passed(f"{len(drivers)} driver packages on hold")
    exposed = [name for name in loose if not any(matches(entry, name) for entry in upgrades.get("blacklist") or [])]
    automatic = upgrades.get("enabled") and exposed
    return warned(
        f"{len(loose)} of {len(drivers)} driver packages not on hold ({', '.join(loose[:3])}"
        f"{', …' if len(loose) > 3 else ''})" + (", and unattended upgrades may replace them" if automatic else ""),
        "driver, Fabric Manager and CUDA on hold, and in the blacklist of unattended-upgrades",
        "apt-mark hold these packages; upgrade them on purpose, with a reboot",
    )


def matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


@check("one_install", "D6", needs="gpu")
def one_install(node: Node) -> Verdict:
    drivers = [package["name"] for package in node.packages if DRIVER_PACKAGE.match(package["name"])]
    if node.driver.get("runfile") and drivers:
        return warned(
            f"NVIDIA's installer was used, and {len(drivers)} driver packages are there ({', '.join(drivers[:3])})",
            "one way of installation",
            "nvidia-uninstall, then install the packages anew",
        )
    return passed("installer" if node.driver.get("runfile") else "packages")


@check("device_nodes", needs="details")
def device_nodes(node: Node) -> Verdict:
    nodes = {item["name"]: str(item["mode"]) for item in node.health.get("device_nodes") or []}
    cards = [name for name in nodes if re.fullmatch(r"nvidia\d+", name)]
    missing = [name for name in ("nvidiactl", "nvidia-uvm") if name not in nodes]
    if len(cards) < len(node.gpus):
        missing.append(f"{len(node.gpus) - len(cards)} of {len(node.gpus)} nvidiaN")
    closed = [name for name in [*cards, "nvidiactl", "nvidia-uvm"] if name in nodes and int(nodes[name], 8) & 6 != 6]
    if missing:
        return warned(
            f"missing in /dev: {', '.join(missing)}",
            "nvidiactl, nvidia-uvm and one node a GPU",
            "nvidia-modprobe -c 0 -u; ironrack-gpu.service does it before an engine starts",
        )
    if closed:
        return warned(
            f"not open to every user: {', '.join(closed)}",
            "mode 0666",
            "set NVreg_DeviceFileMode=0666, or give the service user their group",
        )
    return passed(f"{len(cards)} GPUs, nvidiactl, nvidia-uvm")


@check("peermem", "F13", "F14", "F15", needs="gpu")
def peermem(node: Node) -> Verdict:
    if not node.rdma:
        return skipped("no RDMA device")
    modules = node.driver.get("modules") or []
    if any(name in modules for name in ("nvidia_peermem", "nv_peer_mem")):
        return passed("nvidia_peermem is loaded")
    if node.driver.get("flavour") == "open" and numbers(node.running)[:2] >= (5, 12):
        return passed("dma-buf: open module and a kernel from 5.12 on")
    return warned(
        "neither nvidia_peermem nor dma-buf",
        "one of both, for GPUDirect RDMA",
        "modprobe nvidia_peermem, and name it in /etc/modules-load.d; or use the open kernel module",
    )
