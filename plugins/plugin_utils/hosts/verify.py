"""Compares what the inventory declares of a host with what the host is. Changes nothing, decides nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..nvidia.stack import stack
from . import nics
from .errors import HostError

GIB = 2**30
# Tensor parallel workers exchange through /dev/shm; the 64 MiB of a container's default stop them at start.
SHM = "/dev/shm"  # noqa: S108
SHM_MIN_BYTES = 256 * 2**20
# nvidia-smi rounds; different drivers differ in the last digit.
MEMORY_TOLERANCE_MIB = 1

COMPARED = ("gpus", "network", "models", "space")

Facts = Mapping[str, Any]


def instances_on(plan: Mapping[str, Any], host: str) -> dict[str, Mapping[str, Any]]:
    """Instances with a rank on this host, whoever starts that rank (a unit of its own, or Ray)."""
    found = {}
    for name, instance in (plan.get("instances") or {}).items():
        if any(rank.get("node") == host for rank in instance.get("world", [])):
            found[name] = instance
    return found


def model_paths(plan: Mapping[str, Any], host: str) -> list[str]:
    """The paths to look for on this host before its models can be judged."""
    paths: list[str] = []
    for instance in instances_on(plan, host).values():
        folder = instance.get("model_path")
        # What the nodes fetch comes after this look.
        if folder and not instance.get("model"):
            paths += [path for path in (folder, f"{folder}/config.json") if path not in paths]
    return paths


def wanted_paths(plan: Mapping[str, Any], host: str) -> list[str]:
    """All paths whose presence or free space is judged."""
    site = plan.get("site") or {}
    extra = [site[key] for key in ("prefix", "current", "state_dir") if site.get(key)]
    return model_paths(plan, host) + extra


def host_report(
    facts: Facts,
    plan: Mapping[str, Any],
    host: str,
    min_free_gib: Mapping[str, float] | None = None,
    compare: Sequence[str] = COMPARED,
) -> dict[str, list[str]]:
    """Problems (the host must not be touched) and warnings, each a sentence with variable, value and remedy."""
    node = (plan.get("nodes") or {}).get(host)
    problems: list[str] = []
    warnings = [f"{host}: {text}" for text in facts.get("warnings", [])]
    if node is None:
        return {"problems": problems, "warnings": warnings}
    variant = (plan.get("runtime") or {}).get("variant")
    if variant != "cpu" and "gpus" in compare:
        driver = driver_report(facts, node, host)
        problems += driver["problems"]
        warnings += driver["warnings"]
        if not node.get("gpus") and facts.get("gpus") and instances_on(plan, host):
            warnings.append(f"{host} has {describe(facts['gpus'])}, and its variable gpus declares none")
    if "network" in compare:
        problems += network_problems(facts, node, host)
    if "models" in compare:
        problems += model_problems(facts, plan, host)
    if "space" in compare:
        space = space_report(facts, plan, host, min_free_gib or {})
        problems += space["problems"]
        warnings += space["warnings"]
    return {"problems": problems, "warnings": warnings}


# --- GPUs ------------------------------------------------------------------------------------------------------------


def describe(gpus: Sequence[Mapping[str, Any]]) -> str:
    """8 × NVIDIA H200 (143771 MiB)"""
    kinds = Counter((gpu.get("name") or "?", gpu.get("memory_total_mib")) for gpu in gpus)
    return ", ".join(f"{count} × {name} ({memory} MiB)" for (name, memory), count in kinds.items()) or "none"


def _key(gpu: Mapping[str, Any]) -> tuple[str, int]:
    name = str(gpu.get("name") or "").strip().lower()
    return name.removeprefix("nvidia ").strip(), int(gpu.get("memory_total_mib") or 0)


def alike(declared: Sequence[Mapping[str, Any]], real: Sequence[Mapping[str, Any]]) -> bool:
    """The same number of GPUs, of the same names and sizes."""
    pairs = zip(sorted(map(_key, declared)), sorted(map(_key, real)), strict=False)
    return len(declared) == len(real) and all(
        one[0] == other[0] and abs(one[1] - other[1]) <= MEMORY_TOLERANCE_MIB for one, other in pairs
    )


def driver_report(facts: Facts, node: Mapping[str, Any], host: str) -> dict[str, list[str]]:
    """Whether the GPUs are those declared, and whether the driver that is asked for can be had."""
    declared = node.get("gpus") or []
    report: dict[str, list[str]] = {"problems": [], "warnings": []}
    needed = False
    if "ironrack_gpu" in (node.get("groups") or []):
        answer = stack(facts, node.get("nvidia") or {})
        needed = answer["needed"]
        report["problems"] += [f"{host}: {problem['text']}" for problem in answer["problems"]]
        if answer["problems"] and not facts.get("gpus"):
            # What the driver's absence means cannot be told before it is known which one is wanted.
            return report
    on_bus = len((facts.get("nvidia") or {}).get("pci_devices") or [])
    if needed and declared and not facts.get("gpus") and on_bus == len(declared):
        # A new host, or one whose reboot is due: nothing of it is wrong that the host layer does not put right.
        error = (facts.get("nvidia") or {}).get("error") or "there is no nvidia-smi"
        report["warnings"].append(
            f"{host}: no driver answers for the {on_bus} GPUs on its PCI bus ({error}); playbooks/host.yml installs it,"
            f" and names and sizes of the GPUs are compared once it runs"
        )
        return report
    report["problems"] += gpu_problems(facts, declared, host)
    return report


def gpu_problems(facts: Facts, declared: Sequence[Mapping[str, Any]], host: str) -> list[str]:
    if not declared:
        return []
    real = facts.get("gpus") or []
    nvidia = facts.get("nvidia") or {}
    if not real:
        on_bus = len(nvidia.get("pci_devices") or [])
        reason = nvidia.get("error") or "there is no nvidia-smi"
        return [
            f"gpus of {host} declares {describe(declared)}, but the host shows no GPU: {reason}"
            f" ({on_bus} NVIDIA GPUs on its PCI bus); install or repair the driver, correct gpus,"
            f" or set python_env_variant to cpu"
        ]
    problems = []
    if not alike(declared, real):
        lost = len(nvidia.get("pci_devices") or []) - len(real)
        bus = f"; {lost} more on the PCI bus without a working driver" if lost > 0 else ""
        problems.append(
            f"gpus of {host} declares {describe(declared)}, nvidia-smi shows {describe(real)}{bus};"
            f" correct gpus in its host variables, or repair the hardware"
        )
    sliced = [str(gpu["index"]) for gpu in real if gpu.get("mig")]
    if sliced:
        problems.append(
            f"MIG is enabled on GPU {', '.join(sliced)} of {host}: an engine would see slices instead of the declared"
            f" {describe(declared)}; disable it (nvidia-smi -mig 0) and reset the GPU"
        )
    return problems


# --- network ---------------------------------------------------------------------------------------------------------


def network_problems(facts: Facts, node: Mapping[str, Any], host: str) -> list[str]:
    try:
        nics.resolve(host, facts.get("nics") or [], node.get("interface"), node.get("address"))
    except HostError as error:
        return [str(error)]
    return []


# --- models and space ------------------------------------------------------------------------------------------------


def model_problems(facts: Facts, plan: Mapping[str, Any], host: str) -> list[str]:
    problems = []
    paths = facts.get("paths") or {}
    for name, instance in instances_on(plan, host).items():
        folder = instance.get("model_path")
        if not folder or instance.get("model"):
            continue
        if not paths.get(folder, {}).get("exists"):
            problem = "does not exist"
        elif paths[folder].get("kind") != "directory":
            problem = "is not a folder"
        elif not paths.get(f"{folder}/config.json", {}).get("exists"):
            problem = "holds no config.json"
        else:
            continue
        problems.append(
            f"model path {folder} of instance {name} {problem} on {host}; put the model there on every node of the"
            f" instance, or correct vllm_instances.{name}.model"
        )
    return problems


def space_report(
    facts: Facts, plan: Mapping[str, Any], host: str, min_free_gib: Mapping[str, float]
) -> dict[str, list[str]]:
    """Too little space is an error before the first release is there, and a warning on a host that already serves."""
    report: dict[str, list[str]] = {"problems": [], "warnings": []}
    paths = facts.get("paths") or {}
    site = plan.get("site") or {}
    serving = bool(paths.get(site.get("current", ""), {}).get("exists"))
    for key, gib in min_free_gib.items():
        path = site.get(key)
        free = paths.get(path, {}).get("free_bytes") if path else None
        if free is None or free >= gib * GIB:
            continue
        report["warnings" if serving else "problems"].append(
            f"{path} on {host} has {free / GIB:.1f} GiB free, host_facts_min_free_gib.{key} asks for {gib:g};"
            f" free some space, or lower it"
        )
    for filesystem in facts.get("filesystems") or []:
        small = filesystem.get("mountpoint") == SHM and filesystem.get("size_bytes", 0) < SHM_MIN_BYTES
        if small and instances_on(plan, host):
            report["problems"].append(
                f"{SHM} on {host} holds {filesystem['size_bytes'] / 2**20:.0f} MiB, engines need at least"
                f" {SHM_MIN_BYTES / 2**20:.0f}; remount it larger (size= of its line in /etc/fstab)"
            )
    return report
