# SPDX-License-Identifier: Apache-2.0
"""What apt is told to do, as options of the module `apt_transaction`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from . import matrix

KERNEL = ("linux-image-*", "linux-headers-*", "linux-modules-*")
# Debian numbers these on their own, apart from its driver.
OWN_NUMBER_IN_ARCHIVE = ("nvidia-persistenced", "nvidia-modprobe")


def coupled(name: str, source: str) -> bool:
    """Whether a package has to be of the driver's own version."""
    if source == "distribution" and name in OWN_NUMBER_IN_ARCHIVE:
        return False
    fits = any(fnmatchcase(name, pattern) for pattern in matrix.COUPLED)
    return fits and not any(fnmatchcase(name, pattern) for pattern in matrix.NOT_COUPLED)


def driver_transaction(answer: Mapping[str, Any], metas: Sequence[str]) -> dict[str, Any]:
    """Driver, headers, Fabric Manager and tools: they change together or not at all."""
    packages, source, version = answer["packages"], answer["source"], answer["version_pin"]
    # Packages that the inventory names may be among the others.
    names = list(dict.fromkeys([*packages["headers"], *packages["driver"], *packages["fabric"], *packages["tools"]]))
    install: list[dict[str, Any]] = []
    for name in names:
        wanted: dict[str, Any] = {}
        if version and coupled(name, source):
            wanted = {"version": version, "group": "driver"}
        elif source == "distribution" and coupled(name, "nvidia"):
            # Else a newer one, left by another source, would do as well.
            wanted = {"version": f"{answer['branch']}.*"}
        install.append({"name": name} | wanted)
    return {
        "install": install,
        "remove": list(answer["remove"]),
        "may_remove": list(answer["remove_patterns"]),
        "hold": [*names, *metas, *matrix.COUPLED, *KERNEL, "datacenter-gpu-manager*"],
    }


def cuda_transaction(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The toolkit. A cuda-compat that is not wanted goes: where it does not belong every program fails with 804."""
    names = list(answer["packages"]["cuda"])
    toolkit = answer["cuda"]["toolkit"]
    kinds = ("cuda-*-{}", "lib*-{}", "cuda-toolkit-{}-*")
    parts = [kind.format(toolkit.replace(".", "-")) for kind in kinds] if toolkit else []
    return {
        "install": [{"name": name} for name in names],
        "remove": ["cuda-compat-*"],
        "may_remove": [],
        "hold": [*names, *parts],
    }
