# SPDX-License-Identifier: Apache-2.0
"""What `ironrack_mirror` means for each role: a folder on the nodes, or the address of a server of such a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .artifacts import ARCHIVES, archive_folder

# A user and password would end in files that everybody may read. A folder is part of URLs, too (file://), and read by
# apt, uv, and conda's client: it holds nothing that means something to one of them.
_FOLDER = r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~+,=:-]+)"
_HOST = r"(\[(?=.*:)[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)"
_PORT = r"(:([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5]))"
PATTERN = rf"|https?://{_HOST}{_PORT}?{_FOLDER}*/?|{_FOLDER}+/?"
PROBLEM = "is neither an absolute path of plain characters nor an http(s) address without a login"
REMEDY = (
    "give the folder on the nodes, such as /srv/mirror, or the address that serves it, such as http://10.0.0.5/mirror; "
    "`make artifacts DOWNLOAD=<folder>` makes it"
)

SOURCES = "/etc/apt/ironrack.sources.d"
SOURCE = f"{SOURCES}/ironrack-mirror.sources"
SETTINGS = "/etc/apt/apt.conf.d/95ironrack-mirror"
HEAD = "# Managed by ironrack: ironrack_mirror.\n"


def place(mirror: str) -> str:
    """Without the slash at the end, as everything below is written behind it."""
    return mirror.rstrip("/")


def below(mirror: str, folder: str, scheme: str = "file://") -> str:
    """An address below the mirror; of a folder on the nodes it is one of a file."""
    base = place(mirror)
    return f"{scheme if base.startswith('/') else ''}{base}/{folder}"


def wheels(mirror: str) -> str:
    """What uv takes for --find-links: the folder itself, or the page of it."""
    base = place(mirror)
    return f"{base}/wheels" if base.startswith("/") else f"{base}/wheels/index.html"


def apt_source(mirror: str, distribution: Mapping[str, Any]) -> str:
    """The distribution's own archives from the mirror, signed by the distribution as they always are."""
    family, code = str(distribution["id"]), str(distribution["codename"])
    blocks = []
    for base, suites, components in ARCHIVES[family]:
        lines = {
            "Types": "deb",
            "URIs": below(mirror, archive_folder(base), "file:"),
            "Suites": " ".join(suite.format(code=code) for suite in suites),
            "Components": " ".join(components),
            "Architectures": "amd64",
            "Signed-By": f"/usr/share/keyrings/{family}-archive-keyring.gpg",
        }
        blocks.append("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return HEAD + "\n".join(blocks)


APT_SETTINGS = f"""\
// Managed by ironrack: ironrack_mirror. apt reads {SOURCES} alone, so that nothing of it waits for servers that
// cannot be reached. The indexes there are as old as the mirror: a date by which they should have been renewed does not
// count. Their signatures do.
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "{SOURCES}";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
Acquire::PDiffs "false";
"""


def apt_plan(state: Mapping[str, Any], mirror: str) -> dict[str, Any]:
    """What base does about apt on a host: `files` as the module render takes them, and `problems`."""
    if not mirror:
        # Settings go first: without them the sources beside them mean nothing.
        gone = [{"path": path, "state": "absent"} for path in (SETTINGS, SOURCE)] if state.get("apt_mirror") else []
        return {"files": gone, "problems": []}
    problems = [*state.get("mirror_problems", ())]
    distribution = state.get("distribution") or {}
    if distribution.get("id") not in ARCHIVES or not distribution.get("codename"):
        told = f"{distribution.get('id') or 'unknown'} {distribution.get('version') or ''}".strip()
        problems.append(
            f"ironrack_mirror is {mirror}: this host runs {told}, and the mirror has packages for "
            f"{' and '.join(name.capitalize() for name in ARCHIVES)}. Leave ironrack_mirror empty for it."
        )
    files: Sequence[dict[str, Any]] = ()
    if not problems:
        files = [
            {"path": SOURCES, "state": "directory", "owner": "root", "group": "root", "mode": "0755"},
            _file(SOURCE, apt_source(mirror, distribution)),
            _file(SETTINGS, APT_SETTINGS),
        ]
    return {"files": [*files], "problems": problems}


def _file(path: str, content: str) -> dict[str, Any]:
    return {"path": path, "content": content, "owner": "root", "group": "root", "mode": "0644"}
