# SPDX-License-Identifier: Apache-2.0
"""Decides what of NVIDIA's software a host gets: facts and variables in, the whole stack out, no host asked.

Nothing here depends on what happens to be installed, except what is to be removed and that a newer driver is kept:
else nodes of one kind with the same variables get the same stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import apt, choices, files, matrix, parts, state, transactions
from .errors import StackError
from .gpus import identify
from .notes import Chosen, Notes, dicts, mapping
from .request import check


def empty() -> dict[str, Any]:
    return {
        "needed": False,
        "branch": None,
        "version": None,
        "version_pin": None,
        "fabric_version": None,
        "flavour": None,
        "source": None,
        "cuda": {"runtime": None, "toolkit": None, "floor": None, "compat": None},
        "hardware": {"gpus": "", "origin": "nothing", "nvswitch": False, "rack_scale": False, "datacenter": False},
        "packages": {"driver": [], "fabric": [], "cuda": [], "headers": [], "tools": []},
        "hold": [],
        "hold_patterns": [],
        "unattended_blacklist": [],
        "pins": [],
        "repositories": [],
        "services": [],
        "modules": {"load": [], "blacklist": [], "options": {}},
        "dkms": None,
        "gdr": "none",
        "remove": [],
        "stale": [],
        "remove_patterns": [],
        "keyrings": [],
        "files": [],
        "transaction": {"install": [], "remove": [], "may_remove": [], "hold": []},
        "cuda_transaction": {"install": [], "remove": [], "may_remove": [], "hold": []},
        "unbuilt": [],
        "unlinked": [],
        "reasons": [],
        "warnings": [],
        "problems": [],
    }


def stack(facts: Any, request: Any) -> dict[str, Any]:
    """What to install, pin, hold, load and remove. With problems nothing but the problems is told."""
    if not isinstance(facts, Mapping):
        raise StackError(f"the facts are {type(facts).__name__}, a dictionary is needed; hand over ironrack_host")
    values, problems = check(request)
    notes = Notes(problems=problems)
    answer = empty()
    if values["python_env_variant"] == "cpu":
        notes.reasons.append("python_env_variant is cpu: no driver is needed")
        return _finish(answer, notes)
    if values["nvidia_driver_source"] == "none":
        notes.reasons.append("nvidia_driver_source is none: driver and CUDA are left as they are")
        return _finish(answer, notes)
    if mapping(facts, "nvidia_driver").get("runfile"):
        notes.refuse(
            "ironrack_host.nvidia_driver.runfile",
            True,
            "NVIDIA's own installer put a driver on this host, and packages beside it end in a version mismatch",
            "drain the node and run nvidia-uninstall, or set nvidia_driver_source to none and look after it yourself",
        )
    hardware = identify(facts, values["gpus"])
    if hardware.origin == "nothing":
        notes.warnings.append(
            "no NVIDIA GPU is on the PCI bus and gpus declares none: nothing is installed; declare gpus, or set"
            " python_env_variant to cpu"
        )
        return _finish(answer, notes)
    if hardware.origin != "bus":
        where = "what nvidia-smi tells" if hardware.origin == "nvidia-smi" else "the variable gpus"
        notes.warnings.append(f"no NVIDIA GPU is on the PCI bus: {where} was taken for the hardware")
    distribution = choices.choose_distribution(mapping(facts, "distribution"), notes)
    architecture = mapping(facts, "kernel").get("architecture") or "x86_64"
    if architecture not in apt.ARCHITECTURES:
        notes.refuse(
            "ironrack_host.kernel.architecture",
            architecture,
            "NVIDIA has no data centre driver for it",
            f"use a host of one of {', '.join(apt.ARCHITECTURES)}",
        )
    if distribution is None or notes.problems:
        return _finish(answer, notes)
    notes.warnings += hardware.warnings
    kept = choices.keep_installed(facts, values, distribution, hardware, notes)
    branch = choices.choose_branch(values, distribution, hardware, notes, kept) if not notes.problems else None
    if branch is None:
        return _finish(answer, notes)
    flavour = choices.choose_flavour(values, distribution, hardware, branch, notes)
    names = choices.choose_names(values, distribution, branch, notes)
    toolkit = choices.choose_toolkit(values, distribution, notes)
    notes.reasons += choices.second_hand(hardware, distribution, branch)
    if flavour and names and not notes.problems:
        chosen = Chosen(facts, values, distribution, hardware, branch, flavour, names, kept)
        _compose(answer, chosen, toolkit, notes)
    return _finish(answer, notes)


def _finish(answer: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Half an answer beside a problem would sooner or later be applied."""
    result = empty() if notes.problems else answer
    result["reasons"] = notes.reasons
    result["warnings"] = notes.warnings
    result["problems"] = [problem.as_dict() for problem in notes.problems]
    return result


def _compose(answer: dict[str, Any], chosen: Chosen, toolkit: str | None, notes: Notes) -> None:
    hardware, branch = chosen.hardware, chosen.branch
    runtime = matrix.CUDA[chosen.values["python_env_variant"]]
    version = choices.choose_version(chosen.values, branch, chosen.kept)
    releases = parts.kernels(chosen.facts, notes)
    driver = parts.driver(chosen, releases)
    fabric, fabric_services = parts.fabric(chosen, notes)
    compat = parts.compat(chosen, notes)
    mode = parts.gdr(chosen, notes)
    tools, tool_services = parts.tools(chosen, notes)
    cuda = [f"cuda-toolkit-{toolkit.replace('.', '-')}"] if toolkit else []
    cuda += [compat] if compat else []
    wanted = [*driver, *fabric, *cuda, *tools]
    installed = {str(entry.get("name")): str(entry.get("state") or "ii") for entry in dicts(chosen.facts, "packages")}
    metas = [name for name in parts.kernel_metas(chosen.distribution, releases) if not installed or name in installed]
    pin = f"{version}-*" if version else None if chosen.source == "distribution" else f"{branch}.*"
    dkms = None if parts.precompiled(chosen) else chosen.names.dkms[0 if chosen.flavour == "open" else 1]
    if fabric and version is None and pin:
        notes.warnings.append(
            f"the version is not known beforehand (nvidia_driver_version is auto, branch {branch}): set it, so that"
            f" Fabric Manager and driver cannot part"
        )
    answer.update(
        needed=True,
        branch=branch,
        version=version,
        version_pin=pin,
        # One pin covers them all, so Fabric Manager and IMEX are of the driver's version or not installed.
        fabric_version=version if fabric else None,
        flavour=chosen.flavour,
        source=chosen.source,
        cuda={"runtime": runtime.runtime, "toolkit": toolkit, "floor": runtime.floor, "compat": compat},
        hardware={
            "gpus": hardware.summary(),
            "origin": hardware.origin,
            "nvswitch": hardware.has_nvswitch,
            "rack_scale": hardware.rack_scale,
            "datacenter": hardware.datacenter,
        },
        packages={
            "driver": driver,
            "fabric": fabric,
            "cuda": cuda,
            "headers": parts.headers(chosen.facts, releases, installed),
            "tools": tools,
        },
        hold=list(dict.fromkeys([*wanted, *metas])),
        hold_patterns=[*matrix.COUPLED, "linux-image-*", "linux-headers-*", "linux-modules-*"],
        unattended_blacklist=list(apt.UNATTENDED),
        pins=apt.pins(chosen, pin),
        repositories=apt.repositories(chosen, notes),
        services=[parts.service("persistence"), *fabric_services, *tool_services],
        modules=parts.modules(chosen, mode),
        dkms=dkms,
        gdr=mode,
        # Not those of which only the files in /etc are left (rc): they harm nothing.
        remove=[
            name
            for name, state in sorted(installed.items())
            if state[1:2] != "c" and name not in wanted and apt.foreign(name, wanted, chosen)
        ],
        # Dependencies that the new packages replace; of those still there afterwards the new branch has no version.
        stale=[
            str(entry.get("name"))
            for entry in dicts(chosen.facts, "packages")
            if str(entry.get("state") or "ii")[1:2] != "c"
            and str(entry.get("name")) not in wanted
            and apt.stale(entry, branch)
        ],
        remove_patterns=[*apt.FOREIGN, *apt.NOUVEAU_PACKAGES],
    )
    answer["keyrings"] = [
        {
            "path": row["signed_by"],
            "url": row["key_url"],
            "sha256": row["key_sha256"],
            "fingerprint": row["key_fingerprint"],
            "variable": "nvidia_driver_key_url" if chosen.values["nvidia_driver_key_url"] else "nvidia_driver_mirror",
        }
        for row in answer["repositories"]
        if row["key_url"]
    ]
    answer["files"] = files.render_files(answer, chosen.values, apt.nvidias_own_sources(chosen))
    answer["transaction"] = transactions.driver_transaction(answer, metas)
    answer["cuda_transaction"] = transactions.cuda_transaction(answer)
    answer["unbuilt"] = state.unbuilt(chosen.facts, dkms, branch, version)
    answer["unlinked"] = state.unlinked(chosen.facts)
    notes.warnings += state.compare_with_loaded(chosen.facts, branch, version)
    if state.loaded(chosen.facts) is None:
        notes.reasons.append("no driver is loaded: it comes with a reboot, which host_reboot plans")
    told = state.secure_boot_warning(chosen, dkms)
    notes.warnings += [told] if told else []
