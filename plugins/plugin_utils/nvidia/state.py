# SPDX-License-Identifier: Apache-2.0
"""What is there already, beside what is wanted: told to the operator, and no part of the choice."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from .notes import Chosen, dicts, mapping
from .versions import branch_of, driver_key, upstream

LIBRARIES = (
    ("libcuda1", "libcuda"),
    ("libnvidia-ml1", "libnvidia-ml"),
    ("libnvidia-compute*", "libcuda"),
    ("libnvidia-compute*", "libnvidia-ml"),
)
BUILD_LOG = "/var/lib/dkms/{module}/{version}/build/make.log"


def installed(facts: Mapping[str, Any]) -> str | None:
    """Version of the driver on disk; where no package of it is installed, of the one that is loaded.

    After a downgrade the loaded one is the newer until the reboot, and not what is wanted back.
    """
    versions = [
        upstream(str(package.get("version") or ""))
        for package in dicts(facts, "packages")
        if str(package.get("state") or "ii")[1:2] == "i"
        and any(fnmatchcase(str(package.get("name")), pattern) for pattern, _ in LIBRARIES)
    ]
    keys = {version: key for version in versions if (key := driver_key(version))}
    return max(keys, key=lambda version: keys[version]) if keys else loaded(facts)


def loaded(facts: Mapping[str, Any]) -> str | None:
    found = mapping(facts, "nvidia_driver").get("loaded") or mapping(facts, "nvidia").get("driver_version")
    return upstream(found) if isinstance(found, str) and driver_key(upstream(found)) else None


def compare_with_loaded(facts: Mapping[str, Any], branch: int, version: str | None) -> list[str]:
    """A change of the loaded driver, and who would have to let go of the GPUs for it."""
    there = loaded(facts)
    if there is None:
        return []
    old, new = driver_key(there), driver_key(version or f"{branch}.00")
    same = there == version if version else branch_of(there) == branch
    if old is None or new is None or same:
        return []
    warnings = [
        f"driver {there} is loaded, {version or f'branch {branch}'} is wanted:"
        + (
            " a downgrade that takes a drain and a reboot"
            if old > new
            else f" an upgrade that takes a drain and a reboot (set nvidia_driver_version to {there} to keep it)"
        )
    ]
    users = in_use(facts)
    if users:
        warnings.append(
            f"GPUs are in use by {'; '.join(users)}: nothing is unloaded, driver {there} stays in the kernel until"
            f" the reboot"
        )
    return warnings


def unlinked(facts: Mapping[str, Any]) -> list[str]:
    """Libraries that are installed, and that the loader does not find in that version.

    On Debian the links belong to update-alternatives: packages of two makers can take them from each other.
    """
    links = mapping(facts, "nvidia_driver").get("libraries")
    if not isinstance(links, Mapping):
        return []
    told = []
    for package in dicts(facts, "packages"):
        name, version = str(package.get("name")), upstream(str(package.get("version") or ""))
        mine = [library for pattern, library in LIBRARIES if fnmatchcase(name, pattern)]
        if str(package.get("state") or "ii")[1:2] != "i" or driver_key(version) is None:
            continue
        told += [
            f"{name} {version} is installed, but {library}.so.1 leads to {links.get(library) or 'nothing'}: programs do"
            f" not find the driver; apt-get install --reinstall {name}, then see update-alternatives --display nvidia"
            for library in mine
            if links.get(library) != version
        ]
    return told


def in_use(facts: Mapping[str, Any]) -> list[str]:
    """pid 4711 python3 (user ironrack, vllm@qwen.service) on GPU 0, 1"""
    places: dict[str, list[str]] = {}
    for gpu in dicts(mapping(facts, "health"), "gpus"):
        for process in [*dicts(gpu, "processes"), *dicts(gpu, "holders")]:
            whose = [f"user {process['user']}" if process.get("user") else "", str(process.get("unit") or "")]
            owner = ", ".join(filter(None, whose))
            text = f"pid {process.get('pid')} {process.get('name') or '?'}{f' ({owner})' if owner else ''}"
            places.setdefault(text, []).append(str(gpu.get("index")))
    return [f"{text} on GPU {', '.join(dict.fromkeys(gpus))}" for text, gpus in places.items()]


def secure_boot_warning(chosen: Chosen, dkms: str | None) -> str | None:
    """The firmware must know the key that DKMS signs with; only somebody at the console can confirm it."""
    if chosen.facts.get("secure_boot") is not True or dkms is None:
        return None
    certificate = str(chosen.values["nvidia_driver_mok_cert"])
    ubuntu = chosen.distribution.family == "ubuntu"
    if not certificate:
        certificate = "/var/lib/shim-signed/mok/MOK.der" if ubuntu else "/var/lib/dkms/mok.pub"
    other = (
        "; or take Canonical's signed modules (nvidia_driver_source distribution, nvidia_driver_precompiled true)"
        if ubuntu
        else ""
    )
    return (
        f"Secure Boot is on, and the kernel loads a module built by DKMS only when the firmware knows its key. Unless"
        f" that is done (mokutil --test-key {certificate}): mokutil --import {certificate}, choose a password, reboot,"
        f" and at the console choose Enroll MOK, Continue, Yes, and give the password{other}"
    )


def unbuilt(facts: Mapping[str, Any], dkms: str | None, branch: int, version: str | None) -> list[dict[str, Any]]:
    """Installed kernels without a module of the wanted driver: a boot into one of them would lose the GPUs."""
    ours = [entry for entry in dicts(facts, "dkms") if str(entry.get("module")).startswith("nvidia")]
    missing = []
    for kernel in dicts(facts, "kernels"):
        release = str(kernel.get("release"))
        mine = [entry for entry in ours if entry.get("kernel") == release]
        fitting = [
            entry
            for entry in mine
            if (entry.get("version") == version if version else branch_of(str(entry.get("version"))) == branch)
        ]
        built = any(entry.get("state") == "installed" for entry in fitting)
        file = kernel.get("nvidia_module")
        # What DKMS has built of another source goes with that source's packages.
        if built or (file and not (ours and (dkms or "/dkms/" in str(file)))):
            continue
        failed = next((entry for entry in [*fitting, *ours] if entry.get("state") == "failed"), None)
        module, of_version = (failed or {}).get("module") or dkms, (failed or {}).get("version") or version
        log = BUILD_LOG.format(module=module, version=of_version) if module and of_version else None
        headers = f"linux-headers-{release}"
        missing.append(
            {
                "kernel": release,
                "module": module,
                "version": of_version,
                "log": log,
                "text": f"kernel {release} has no {f'module {version}' if version else 'module'} of NVIDIA"
                + (f"; DKMS writes its build of {module} to {log}" if log else "")
                + (
                    f"; install {headers}" + ("" if kernel.get("headers") else " (missing)") + " and run"
                    f" dkms autoinstall -k {release}"
                    if dkms
                    else "; install the linux-modules-nvidia package of this kernel"
                )
                + f", or remove the kernel (apt-get purge linux-image-{release})",
            }
        )
    return missing
