# SPDX-License-Identifier: Apache-2.0
"""Files that tell apt, modprobe and DKMS what was decided, as entries of the module `render`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime import mirror

SOURCES = "/etc/apt/sources.list.d"
PREFERENCES = "/etc/apt/preferences.d/00-ironrack-nvidia"
UNATTENDED = "/etc/apt/apt.conf.d/52ironrack-nvidia"
MODPROBE = "/etc/modprobe.d/ironrack-nvidia.conf"
SIGNING = "/etc/dkms/framework.conf.d/ironrack.conf"
HEAD = "# Managed by ironrack: role nvidia_driver.\n"
# Every name that a repository may have: files of those that are not wanted any more are removed.
REPOSITORIES = ("nvidia-cuda", "nvidia-local", "debian-nvidia", "debian-nvidia-security", "ubuntu-nvidia")


def source_file(repository: Mapping[str, Any]) -> str:
    """A source in apt's deb822 form."""
    lines = {
        "Types": "deb",
        "URIs": " ".join(repository["uris"]),
        "Suites": " ".join(repository["suites"]),
        "Components": " ".join(repository["components"]),
        "Architectures": " ".join(repository["architectures"]),
        "Signed-By": repository["signed_by"],
        "Trusted": "yes" if repository["trusted"] else "",
    }
    return HEAD + "".join(f"{key}: {value}\n" for key, value in lines.items() if value)


def preferences(pins: Sequence[Mapping[str, Any]]) -> str:
    records = (f"Package: {pin['package']}\nPin: {pin['pin']}\nPin-Priority: {pin['priority']}\n" for pin in pins)
    return HEAD + "\n" + "\n".join(records)


def unattended(patterns: Sequence[str]) -> str:
    rows = "".join(f'    "{pattern}";\n' for pattern in patterns)
    return f"// Managed by ironrack: role nvidia_driver.\nUnattended-Upgrade::Package-Blacklist {{\n{rows}}};\n"


def modprobe(modules: Mapping[str, Any]) -> str:
    rows = [f"blacklist {name}\n" for name in modules["blacklist"]]
    rows += [f"options {name} {value}\n" for name, value in modules["options"].items()]
    return HEAD + "".join(rows)


def render_files(
    answer: Mapping[str, Any], values: Mapping[str, Any], nvidias_own: Sequence[str]
) -> list[dict[str, Any]]:
    """All files, in the order in which they are written; `nvidias_own` are sources that NVIDIA's packages bring."""
    wanted = {repository["name"]: repository for repository in answer["repositories"]}
    # With a mirror of the site apt reads its folder alone.
    folder, other = (mirror.SOURCES, SOURCES) if values["ironrack_mirror"] else (SOURCES, mirror.SOURCES)
    entries = [_file(f"{folder}/ironrack-{name}.sources", source_file(row)) for name, row in wanted.items()]
    gone = [f"{folder}/ironrack-{name}.sources" for name in REPOSITORIES if name not in wanted]
    gone += [f"{other}/ironrack-{name}.sources" for name in REPOSITORIES]
    entries += [{"path": path, "state": "absent"} for path in [*gone, *nvidias_own]]
    entries += [
        _file(PREFERENCES, preferences(answer["pins"])),
        _file(UNATTENDED, unattended(answer["unattended_blacklist"])),
        _folder("/etc/modprobe.d"),
        _file(MODPROBE, modprobe(answer["modules"])),
    ]
    key, certificate = values["nvidia_driver_mok_key"], values["nvidia_driver_mok_cert"]
    if key and certificate:
        text = f'{HEAD}mok_signing_key="{key}"\nmok_certificate="{certificate}"\n'
        entries += [_folder("/etc/dkms"), _folder("/etc/dkms/framework.conf.d"), _file(SIGNING, text)]
    else:
        entries.append({"path": SIGNING, "state": "absent"})
    return entries


def _file(path: str, content: str) -> dict[str, Any]:
    return {"path": path, "content": content, "owner": "root", "group": "root", "mode": "0644"}


def _folder(path: str) -> dict[str, Any]:
    return {"path": path, "state": "directory", "owner": "root", "group": "root", "mode": "0755"}
