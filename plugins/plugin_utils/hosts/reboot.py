"""Whether a host needs a reboot and why, what forbids it, what stops with it, and whether it came back as it should.

Facts in, sentences out: nothing here connects to a host or changes one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import checks_driver, checks_gpu
from .errors import HostError
from .judging import Facts, Node, Settings, on, upstream

# Kinds of reasons, by which host_reboot_ignore names them.
KINDS = (
    "driver",
    "module",
    "nouveau",
    "kernel",
    "packages",
    "modprobe",
    "options",
    "ecc",
    "mig",
    "memory",
    "recovery",
    "policy",
)
# Engines run all the same.
HARMLESS = ("kernel", "packages", "modprobe", "options")
# No engine runs until the reboot.
DISABLING = ("driver", "module", "nouveau", "recovery")
# Packages that are the driver on this host; libraries alone (a container has them from outside) build no module.
MODULE_PACKAGE = re.compile(
    r"(cuda-drivers|nvidia-(driver|open|kernel-(open-)?dkms|open-kernel-dkms|dkms|kernel-common)|linux-modules-nvidia)"
)
# Their users of a GPU are part of the driver; they end and begin with the host.
DRIVER_UNIT = re.compile(r"(nvidia-|dcgm|nv-hostengine|ironrack-gpu)")
UNFINISHED = re.compile(r".[HUFWt]|..R")
# What a reboot may have broken.
CHECKS_AFTER = (
    "gpu_driver",
    "gpu_count",
    "driver_versions",
    "fabric_manager",
    "fabric_state",
    "imex",
    "nouveau",
    "xid",
    "ecc",
    "row_remap",
    "recovery_action",
    "nvlink",
)
OWN_UNITS = (
    "vllm-canary@*.timer",
    "vllm-watch@*.timer",
    "vllm@*.service",
    "ray-worker.service",
    "ray-head.service",
)


@dataclass(frozen=True)
class Look:
    """One host's facts, with what is asked of them more than once."""

    node: Node
    stack: Mapping[str, Any]

    @property
    def driver(self) -> Facts:
        return self.node.driver

    @property
    def loaded(self) -> str | None:
        return self.driver.get("loaded") or None

    @property
    def modules(self) -> Sequence[str]:
        return self.driver.get("modules") or []

    @property
    def boot(self) -> Facts:
        """What the next boot will use."""
        return self.node.health.get("boot") or {}

    @property
    def installed(self) -> bool:
        """Whether a driver with a kernel module is installed."""
        names = [str(package["name"]) for package in self.node.packages]
        return bool(
            any(MODULE_PACKAGE.match(name) for name in names)
            or any(str(entry["module"]).startswith("nvidia") for entry in self.node.facts.get("dkms") or [])
            or any(kernel.get("nvidia_module") for kernel in self.node.kernels)
        )

    @property
    def wanted(self) -> bool:
        return bool(self.stack.get("needed", True)) and bool(self.node.nvidia.get("pci_devices"))

    @property
    def next_kernel(self) -> Facts | None:
        """The kernel that a reboot starts: the boot loader's, else the newest; None where none is told."""
        chosen = self.boot.get("kernel")
        for kernel in self.node.kernels:
            if kernel["release"] == chosen:
                return kernel
        return self.node.kernels[-1] if self.node.kernels else None

    def running_kernel(self) -> Facts:
        return next((kernel for kernel in self.node.kernels if kernel["release"] == self.node.running), {})

    def on_disk(self) -> str | None:
        """Version of the module that DKMS has put in place for the running kernel."""
        for entry in self.node.facts.get("dkms") or []:
            mine = str(entry["module"]).startswith("nvidia") and entry.get("kernel") == self.node.running
            if mine and entry.get("state") == "installed":
                return upstream(str(entry["version"]))
        return None


def look_at(facts: Any, stack: Any = None, plan: Any = None, host: str = "") -> Look:
    if not isinstance(facts, Mapping) or not isinstance(facts.get("health"), Mapping):
        raise HostError(
            "the facts of the host are missing or without health: gather them with ironrack.vllm.host_facts"
            " (health: true) and hand over ansible_facts['ironrack_host']"
        )
    # A stack with problems is empty, which does not mean that the host needs none.
    usable = stack if isinstance(stack, Mapping) and not stack.get("problems") else {}
    return Look(Node(host, facts, plan or {}, Settings()), usable)


# --- reasons ---------------------------------------------------------------------------------------------------------


def _driver(look: Look) -> str | None:
    if look.loaded is None:
        return None
    found = {"library": look.driver.get("library"), "kernel module": look.on_disk()}
    other = [f"{name} {version}" for name, version in found.items() if version and version != look.loaded]
    return f"driver {look.loaded} runs, installed is {' and '.join(other)}" if other else None


def _module(look: Look) -> str | None:
    if look.loaded or "nvidia" in look.modules or "nouveau" in look.modules or not (look.installed and look.wanted):
        return None
    running = look.running_kernel()
    target = look.next_kernel
    if not look.node.kernels or running.get("nvidia_module"):
        return "the driver is installed, and no NVIDIA module is loaded"
    if target and target["release"] != look.node.running and target.get("nvidia_module"):
        return f"kernel {look.node.running} has no NVIDIA module, {target['release']} has one"
    return None


def _nouveau(look: Look) -> str | None:
    wrong = "nouveau" in look.modules and (look.installed or look.stack.get("needed"))
    return "nouveau is loaded, and holds the GPUs that NVIDIA's driver is installed for" if wrong else None


def _kernel(look: Look) -> str | None:
    target = look.next_kernel
    if target is None or target["release"] == look.node.running:
        return None
    return f"kernel {look.node.running} runs, {target['release']} is installed"


def _packages(look: Look) -> str | None:
    packages = look.node.health.get("reboot_required")
    if packages is None:
        return None
    shown = ", ".join(packages[:5]) + (", …" if len(packages) > 5 else "")
    return "the distribution asks for a reboot (/run/reboot-required)" + (f": {shown}" if shown else "")


def _modprobe(look: Look) -> str | None:
    # Options of modules that are not loaded are read when they are.
    files = look.boot.get("modprobe") or []
    affected = [name for name in ("nvidia", "nouveau") if name in look.modules or (name == "nvidia" and look.loaded)]
    if not files or not affected:
        return None
    return f"{', '.join(files[:4])} changed after the boot, and {' and '.join(affected)} is loaded"


def _options(look: Look) -> str | None:
    declared = look.boot.get("options")
    if declared is None:
        return None
    running = (look.node.facts.get("kernel") or {}).get("options") or []
    missing = sorted(set(declared) - set(running))
    extra = sorted(set(running) - set(declared))
    parts = [f"{text} {' '.join(words)}" for text, words in (("not yet with", missing), ("still with", extra)) if words]
    return f"the kernel runs {' and '.join(parts)}: the boot loader's options were changed" if parts else None


def _pending(current: str, pending: str) -> Callable[[Look], list[Facts]]:
    def differ(look: Look) -> list[Facts]:
        return look.node.those(
            lambda gpu: (
                gpu.get(current) is not None and gpu.get(pending) is not None and gpu.get(current) != gpu.get(pending)
            )
        )

    return differ


def _ecc(look: Look) -> str | None:
    gpus = _pending("ecc", "ecc_pending")(look)
    return f"{on(gpus)}: ECC {'on' if gpus[0]['ecc_pending'] else 'off'} is pending" if gpus else None


def _mig(look: Look) -> str | None:
    gpus = _pending("mig", "mig_pending")(look)
    return f"{on(gpus)}: MIG {'on' if gpus[0]['mig_pending'] else 'off'} is pending" if gpus else None


def _memory(look: Look) -> str | None:
    gpus = look.node.those(
        lambda gpu: gpu.get("remap_pending") or gpu.get("retirement_pending") or gpu.get("repair_pending")
    )
    return f"{on(gpus)}: a repair of its memory is pending" if gpus else None


def _recovery(look: Look) -> str | None:
    # "Reboot", in newer drivers "Node Reboot" or "System Reboot"; a reset is no reason to take the whole node.
    gpus = look.node.those(lambda gpu: "reboot" in str(gpu.get("recovery_action")).lower())
    return f"{on(gpus)}: the driver asks for a reboot (recovery action {gpus[0]['recovery_action']})" if gpus else None


REASONS: dict[str, Callable[[Look], str | None]] = {
    "driver": _driver,
    "module": _module,
    "nouveau": _nouveau,
    "kernel": _kernel,
    "packages": _packages,
    "modprobe": _modprobe,
    "options": _options,
    "ecc": _ecc,
    "mig": _mig,
    "memory": _memory,
    "recovery": _recovery,
}


def _reasons(look: Look, ignore: Sequence[str]) -> dict[str, str]:
    found = {kind: judge(look) for kind, judge in REASONS.items() if kind not in ignore}
    return {kind: text for kind, text in found.items() if text}


# --- blockers --------------------------------------------------------------------------------------------------------


def _no_module(look: Look) -> str | None:
    """A reboot into a kernel without the module would lose the GPUs."""
    target = look.next_kernel
    if target is None or target.get("nvidia_module") or not (look.installed and look.wanted):
        return None
    release = target["release"]
    failed = [
        f"DKMS could not build {entry['module']} {entry['version']}"
        f" (/var/lib/dkms/{entry['module']}/{entry['version']}/build/make.log)"
        for entry in look.node.facts.get("dkms") or []
        if entry.get("state") == "failed" and entry.get("kernel") == release
    ]
    why = f" ({'; '.join(failed)})" if failed else "" if target.get("headers") else " (its headers are not installed)"
    return (
        f"kernel {release} would boot and has no NVIDIA module{why}, so the GPUs would be lost: install"
        f" linux-headers-{release}, then dkms autoinstall -k {release}, or remove that kernel"
    )


def _unfinished(look: Look) -> str | None:
    names = [
        f"{package['name']} ({package['state']})"
        for package in look.node.facts.get("packages") or []
        if UNFINISHED.match(str(package["state"]))
    ]
    if not names:
        return None
    return f"dpkg has not finished {', '.join(names[:5])}: dpkg --configure -a, then apt-get -f install"


def _initramfs(look: Look) -> str | None:
    """nouveau would be loaded from the old image before anything on the root file system can forbid it."""
    target = look.next_kernel
    stale = look.boot.get("initramfs_older") or []
    release = target["release"] if target else look.node.running
    if release not in stale or not look.wanted:
        return None
    return (
        f"the initramfs of kernel {release} is older than a file of /etc/modprobe.d on NVIDIA or nouveau, so nouveau"
        f" may be loaded again: update-initramfs -u -k {release}"
    )


def users(facts: Facts) -> list[str]:
    """Users of a GPU that are neither this project's units nor part of the driver."""
    found: dict[Any, str] = {}
    health = facts.get("health") or {}
    everybody = [
        (gpu, process)
        for gpu in health.get("gpus") or []
        for process in [*(gpu.get("processes") or []), *(gpu.get("holders") or [])]
    ]
    # Where nvidia-smi fails (its library is newer than the module), only the open device nodes tell.
    everybody += [({}, process) for process in health.get("gpu_users") or []]
    for gpu, process in everybody:
        unit = str(process.get("unit") or "")
        used = process.get("used_mib")
        if checks_gpu.OWN_UNIT.match(unit) or DRIVER_UNIT.match(unit):
            continue
        if used is not None and used < checks_gpu.HOLDS_SOME_MIB:
            continue  # a display's own few pages
        where = f" on GPU {gpu['index']}" if "index" in gpu else ""
        found.setdefault(
            process.get("pid"),
            f"{process.get('name') or '?'} (pid {process.get('pid')}, {process.get('user') or 'unknown user'}"
            f"{', ' + unit if unit else ''}){where}",
        )
    return list(found.values())


def _used(look: Look) -> str | None:
    names = users(look.node.facts)
    if not names:
        return None
    shown = "; ".join(names[:5]) + (f"; {len(names) - 5} more" if len(names) > 5 else "")
    return f"somebody else uses the GPUs: {shown}. Ask them to end it, or set host_reboot_force: true"


def _futile(look: Look, reasons: Sequence[str], left: Any) -> str | None:
    """The last reboot was for the same reasons and they still hold: another will not help."""
    if not rebooted_since(look.node.facts, left) or (left.get("remember") or {}).get("reasons") != list(reasons):
        return None
    return (
        "the node was rebooted for the same reasons and they still hold: find out why (journalctl -b, dmesg | grep -i"
        " nvidia), then set host_reboot_force: true to reboot it once more, or host_reboot: never to go on without"
    )


# --- what is asked from outside --------------------------------------------------------------------------------------


def reboot_needed(
    facts: Any,
    stack: Any = None,
    policy_reasons: Sequence[str] = (),
    *,
    ignore: Sequence[str] = (),
    force: bool = False,
    left: Any = None,
) -> dict[str, Any]:
    """needed, reasons, kinds (of the reasons) and blockers; left is the record that an interrupted run has left."""
    for kind in ignore:
        if kind not in KINDS:
            near = difflib.get_close_matches(str(kind), KINDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "use some of"
            raise HostError(f"host_reboot_ignore names {kind!r}, which is no reason; {hint} ({', '.join(KINDS)})")
    look = look_at(facts, stack)
    reasons = _reasons(look, ignore)
    texts = [*reasons.values(), *([] if "policy" in ignore else map(str, policy_reasons))]
    kinds = [*reasons, *(["policy"] if len(texts) > len(reasons) else [])]
    blockers = []
    if texts:
        found = [_no_module(look), _unfinished(look), _initramfs(look)]
        if not force:
            found += [_used(look), _futile(look, texts, left)]
        blockers = [text for text in found if text]
    disabling = [text for kind, text in reasons.items() if kind in DISABLING]
    return {"needed": bool(texts), "reasons": texts, "kinds": kinds, "disabling": disabling, "blockers": blockers}


def rebooted_since(facts: Facts, left: Any) -> bool:
    """Whether the host has booted since the record was written."""
    return bool(left) and left.get("boot_id") not in (None, facts.get("boot_id"))


def drain_scope(plan: Any, host: str) -> dict[str, Any]:
    """What stops with a node: its own units, and the API servers elsewhere whose engine has a part on it.

    An engine that loses a rank hangs for minutes before it ends by itself, so it is stopped, and started again with
    the node.
    """
    if not isinstance(plan, Mapping):
        raise HostError("the plan is missing: run playbooks/prepare.yml first, which sets ironrack_plan")
    head = (plan.get("ray") or {}).get("head") == host
    urls: list[str] = []
    alone: list[dict[str, str]] = []
    partners: dict[str, list[str]] = {}
    for name, instance in (plan.get("instances") or {}).items():
        for replica in instance.get("replicas") or []:
            nodes = {member["node"] for member in replica["world"]}
            if host not in nodes and not (head and instance.get("executor") == "ray"):
                continue
            urls.append(replica["url"])
            unit = replica["name"]
            if replica["api_node"] != host:
                partners.setdefault(replica["api_node"], []).extend(
                    [f"vllm-canary@{unit}.timer", f"vllm@{unit}.service"]
                )
            elif nodes == {host}:
                alone.append({"name": unit, "instance": name, "url": replica["url"]})
    return {
        "units": list(OWN_UNITS),
        "wait_for": urls,
        "partners": [{"node": node, "units": units} for node, units in partners.items()],
        # Those that can answer as soon as this node is back: the others may wait for nodes whose turn is still to come.
        "alone": alone,
    }


def remembered(facts: Any, reasons: Sequence[str]) -> dict[str, Any]:
    """What has to be known of the time before the reboot, when the host is back: kept in the record on the node."""
    look = look_at(facts)
    return {
        "reasons": list(reasons),
        "mountpoints": _mountpoints(look.node.facts),
        "unmounted": list(look.node.health.get("unmounted") or []),
        "synchronised": (look.node.health.get("clock") or {}).get("synchronised"),
    }


def _mountpoints(facts: Facts) -> list[str]:
    """Of disks that belong to the host, not of what somebody has plugged in."""
    points = [str(entry["mountpoint"]) for entry in facts.get("filesystems") or []]
    return sorted(point for point in points if not point.startswith(("/run/", "/media/")))


def came_back(
    facts: Any,
    plan: Any,
    host: str,
    before: Any = None,
    stack: Any = None,
    *,
    ignore: Sequence[str] = (),
    rebooted: bool = True,
    clock_seconds: float = 60,
) -> list[str]:
    """What is not as it should be on a host that is to serve again; before is what remembered() told, or nothing.

    rebooted: the reboot was made, so its reasons must be gone.
    """
    look = look_at(facts, stack, plan, host)
    before = before or {}
    problems = []
    for check in (*checks_driver.CHECKS, *checks_gpu.CHECKS):
        applies = {"gpu": look.node.has_gpus, "details": bool(look.node.gpus)}.get(check.needs, True)
        if check.id not in CHECKS_AFTER or not applies:
            continue
        verdict = check.judge(look.node)
        if verdict.status == "fail":
            problems.append(f"{check.id}: {verdict.measured}; expected {verdict.expected}; {verdict.remedy}")
    if rebooted:
        problems += [
            f"the reboot did not change this: {text}"
            + (f" (host_reboot_ignore: [{kind}] leaves it alone)" if kind in HARMLESS else "")
            for kind, text in _reasons(look, ignore).items()
        ]
    here = _mountpoints(look.node.facts)
    lost = [point for point in before.get("mountpoints") or [] if point not in here]
    lost += [point for point in look.node.health.get("unmounted") or [] if point not in (before.get("unmounted") or [])]
    if lost:
        names = ", ".join(dict.fromkeys(lost))
        problems.append(f"not mounted any more: {names}; mount -a tells why, or add it to /etc/fstab")
    clock = look.node.health.get("clock") or {}
    if before.get("synchronised") and clock.get("synchronised") is False:
        problems.append("the clock is not synchronised, as it was before; see chronyc tracking or timedatectl")
    offset = clock.get("offset_seconds")
    if offset is not None and abs(offset) > clock_seconds:
        problems.append(f"the clock is {offset:+.0f} s off the controller's: chronyc makestep, then hwclock --systohc")
    return problems
