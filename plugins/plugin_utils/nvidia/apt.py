# SPDX-License-Identifier: Apache-2.0
"""Repositories, apt preferences, and what an earlier branch or another source left behind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..runtime.mirror import below
from . import matrix
from .notes import Chosen, Notes, mapping
from .request import MIRROR
from .versions import branch_of, upstream

KEYRINGS = "/etc/apt/keyrings"
ARCHITECTURES = {"x86_64": ("x86_64", "amd64"), "aarch64": ("sbsa", "arm64")}
# Above 1000 apt also goes back to an older version; NVIDIA's own pinning packages stop at 1000.
PIN_PRIORITY = 1001
BLOCKED = -1
UNATTENDED = (
    "nvidia-",
    "libnvidia-",
    "libcuda",
    "libnvsdm",
    "cuda-",
    "nvlink5",
    "nvlsm",
    "firmware-nvidia-gsp",
    "datacenter-gpu-manager",
    "linux-(image|headers|modules|generic|kbuild)",
)
# What another branch or source leaves behind; the packages that are wanted are taken out of it.
FOREIGN = (*matrix.COUPLED, "nvidia-driver-pinning*", "nvidia-settings*", "xserver-xorg-video-nvidia*")
PREFIXES = ("libnvidia-", "nvidia-")
# Of the distribution, for every driver: what PREFIXES would keep out with the rest.
SUPPORT = ("nvidia-installer-cleanup", "nvidia-support", "nvidia-legacy-check", "nvidia-prime")
NOUVEAU_PACKAGES = ("xserver-xorg-video-nouveau",)
DCGM = "datacenter-gpu-manager-4-"
OLD_DCGM = ("datacenter-gpu-manager", "datacenter-gpu-manager-config")


def pinned(branch: int) -> str:
    """The coupled packages for a record of apt preferences, in as few patterns as will do.

    apt tries each pattern on every package it knows, each time that it starts: all of COUPLED cost it 1.5 s a record.
    Names are looked up, which costs nothing.
    """
    exact = [pattern.rstrip("*") for pattern in matrix.COUPLED if not pattern.startswith(PREFIXES)]
    return " ".join([*(f"{prefix}*" for prefix in PREFIXES), *exact, *(f"{name}-{branch}" for name in exact)])


def pins(chosen: Chosen, version_pin: str | None) -> list[dict[str, Any]]:
    """Records for apt preferences, in this order: the first that fits a version decides."""
    coupled = pinned(chosen.branch)
    archive = "Debian" if chosen.distribution.family == "debian" else "Ubuntu"
    if chosen.source == "distribution":
        return [{"package": coupled, "pin": "release o=NVIDIA", "priority": BLOCKED}]
    records: list[dict[str, Any]] = [
        # NVIDIA's packages stand on these of the distribution.
        {"package": " ".join([*matrix.NOT_COUPLED, *SUPPORT]), "pin": f"release o={archive}", "priority": 500},
        # The same names in the distribution's archive: mixed, they are a version mismatch.
        {"package": coupled, "pin": f"release o={archive}", "priority": BLOCKED},
    ]
    if version_pin:
        records.append({"package": coupled, "pin": f"version {version_pin}", "priority": PIN_PRIORITY})
    return records


def foreign(name: str, wanted: Sequence[str], chosen: Chosen) -> bool:
    """Whether an installed package is of another branch, source or kernel module, or nouveau's."""
    if name in NOUVEAU_PACKAGES or _other_dcgm(name, wanted):
        return True
    if any(fnmatchcase(name, pattern) for pattern in matrix.NOT_COUPLED):
        return False
    if not any(fnmatchcase(name, pattern) for pattern in FOREIGN):
        return False
    if name.startswith("nvidia-driver-pinning"):
        return True
    numbers = [int(text) for text in re.findall(r"(?<![\d.])(\d{3})(?![\d])", name)]
    if (numbers and chosen.branch not in numbers) or _plain(name) in map(_plain, wanted):
        return True
    server = "-server" in name
    if chosen.distribution.family == "ubuntu" and numbers and server != (chosen.source == "distribution"):
        return "fabricmanager" not in name and "nscq" not in name and "imex" not in name
    return _other_module(name, wanted)


def _plain(name: str) -> str:
    """nvidia-fabricmanager-570 -> nvidia-fabricmanager, the name that later branches have: both own the same files."""
    return re.sub(r"-\d{3}(?=-|$)", "", name)


def stale(package: Mapping[str, Any], branch: int) -> bool:
    """Whether an installed package moves with the driver and has the version of another branch."""
    name = str(package.get("name"))
    moves = any(fnmatchcase(name, pattern) for pattern in matrix.COUPLED)
    moves = moves and not any(fnmatchcase(name, pattern) for pattern in matrix.NOT_COUPLED)
    of_version = branch_of(upstream(str(package.get("version") or "")))
    return moves and of_version in matrix.BRANCHES and of_version != branch


def _other_dcgm(name: str, wanted: Sequence[str]) -> bool:
    """DCGM for another major version of CUDA, for all of them, or of before version 4."""
    mine = next((other for other in wanted if other.startswith(DCGM)), None)
    if mine is None:
        return False
    own = mine.removeprefix(DCGM)
    return name in OLD_DCGM or (name.startswith(DCGM) and "cuda" in name and not name.endswith(own))


def _other_module(name: str, wanted: Sequence[str]) -> bool:
    """Kernel module packages exclude each other: the open one, the proprietary one, each source's own name."""
    return "dkms" in name and "no-dkms" not in name and any("dkms" in other for other in wanted)


def repositories(chosen: Chosen, notes: Notes) -> list[dict[str, Any]]:
    values, distribution = chosen.values, chosen.distribution
    folder, deb = ARCHITECTURES[str(mapping(chosen.facts, "kernel").get("architecture") or "x86_64")]
    if chosen.source == "distribution":
        return _archive(values, distribution, deb)
    if chosen.source == "local":
        return _local(values, deb, notes)
    own, site = str(values["nvidia_driver_mirror"]), str(values["ironrack_mirror"])
    home = below(site, "apt/nvidia", "file:") if site and own == MIRROR else _uri(own)
    base = f"{home}/{distribution.repository}/{folder}/"
    result = [
        {
            "name": "nvidia-cuda",
            "uris": [base],
            "suites": ["/"],
            "components": [],
            "flat": True,
            "architectures": [deb],
            "trusted": False,
            "signed_by": f"{KEYRINGS}/nvidia-cuda.asc",
            "key_url": values["nvidia_driver_key_url"] or f"{base}{distribution.key_file}",
            "key_sha256": values["nvidia_driver_key_sha256"] or None,
            "key_fingerprint": values["nvidia_driver_key_fingerprint"] or distribution.key_fingerprint,
        }
    ]
    if distribution.family == "debian":
        # What NVIDIA's packages for Debian stand on (glx-alternative-nvidia, nvidia-installer-cleanup).
        result += [entry | {"components": ["contrib"]} for entry in _archive(values, distribution, deb)]
    return result


def _uri(place: str) -> str:
    """A folder of the node as apt names it."""
    return (f"file:{place}" if place.startswith("/") else place).rstrip("/")


def nvidias_own_sources(chosen: Chosen) -> list[str]:
    """Sources of the package cuda-keyring: apt refuses one repository under two keys' names."""
    folder, _ = ARCHITECTURES[str(mapping(chosen.facts, "kernel").get("architecture") or "x86_64")]
    name = f"cuda-{chosen.distribution.repository}-{folder}"
    return [f"/etc/apt/sources.list.d/{name}.{ending}" for ending in ("list", "sources")]


def _archive(values: Mapping[str, Any], distribution: matrix.Distribution, deb: str) -> list[dict[str, Any]]:
    code, site = distribution.codename, str(values["ironrack_mirror"])
    own = str(values["nvidia_driver_distribution_mirror"])
    own = own or (below(site, f"apt/{distribution.family}", "file:") if site else "")
    if distribution.family == "debian":
        mirror = _uri(own or "https://deb.debian.org/debian")
        components = ["contrib", "non-free", "non-free-firmware"]
        places = [("debian-nvidia", mirror, [code, f"{code}-updates"])]
        places.append(("debian-nvidia-security", f"{mirror}-security", [f"{code}-security"]))
    else:
        home = "http://archive.ubuntu.com/ubuntu" if deb == "amd64" else "http://ports.ubuntu.com/ubuntu-ports"
        mirror = _uri(own or home)
        components = ["restricted", "multiverse"]
        places = [("ubuntu-nvidia", mirror, [code, f"{code}-updates", f"{code}-security"])]
    return [
        {
            "name": name,
            "uris": [uri],
            "suites": suites,
            "components": components,
            "flat": False,
            "architectures": [deb],
            "trusted": False,
            "signed_by": f"/usr/share/keyrings/{distribution.family}-archive-keyring.gpg",
            "key_url": None,
            "key_sha256": None,
            "key_fingerprint": None,
        }
        for name, uri, suites in places
    ]


def _local(values: Mapping[str, Any], deb: str, notes: Notes) -> list[dict[str, Any]]:
    place, key = str(values["nvidia_driver_local"]), str(values["nvidia_driver_key_url"])
    on_disk = place.startswith(("/", "file:"))
    if not key and not on_disk:
        notes.refuse(
            "nvidia_driver_key_url",
            key,
            f"packages from {place} would be installed unsigned",
            "sign that repository and give the URL or path of its key, with nvidia_driver_key_sha256",
        )
    elif not key:
        notes.warnings.append(
            f"packages from {place} are trusted without a signature; nvidia_driver_key_url names a key"
        )
    return [
        {
            "name": "nvidia-local",
            "uris": [_uri(place)],
            "suites": ["./"],
            "components": [],
            "flat": True,
            "architectures": [deb],
            "trusted": not key,
            "signed_by": f"{KEYRINGS}/nvidia-local.asc" if key else None,
            "key_url": key or None,
            "key_sha256": values["nvidia_driver_key_sha256"] or None,
            "key_fingerprint": values["nvidia_driver_key_fingerprint"] or None,
        }
    ]
