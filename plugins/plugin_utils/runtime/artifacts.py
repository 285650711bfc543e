# SPDX-License-Identifier: Apache-2.0
"""The list of all that a deployment fetches, and the folder that holds it for sites without a way out.

The folder is what `ironrack_mirror` names: wheels/, conda/<channel>/<subdir>/, models/<org>/<name>/<revision>/,
apt/<archive>/, tools/, and artifacts.json, the list itself.
"""

from __future__ import annotations

import html
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import conda, debian
from .lock import Lock

LIST = "artifacts.json"
FORMAT = 1
# In the folder; its release is not in the name, which role python_env looks for.
MINIFORGE = "tools/Miniforge3-Linux-x86_64.sh"
MANIFEST = "ironrack-model.json"
UNKNOWN = "unknown"
KINDS = ("wheel", "tool", "conda", "apt", "apt-index", "model")
# Bases of the main archives, and what the files of a component are licensed under as far as an index tells.
ARCHIVES: dict[str, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {
    "debian": (
        ("https://deb.debian.org/debian", ("{code}", "{code}-updates"), ("main",)),
        ("https://deb.debian.org/debian-security", ("{code}-security",), ("main",)),
    ),
    "ubuntu": (
        (
            "http://archive.ubuntu.com/ubuntu",
            ("{code}", "{code}-updates", "{code}-security"),
            ("main", "universe"),
        ),
    ),
}
# Installed by Ansible's own module on a host that lacks it.
ANSIBLE_NEEDS = ("python3-apt",)
_COMPONENTS = {
    "main": "free software, see /usr/share/doc/{name}/copyright in it",
    "universe": "free software, see /usr/share/doc/{name}/copyright in it",
    "restricted": "not free (restricted), see /usr/share/doc/{name}/copyright in it",
    "multiverse": "not free (multiverse), see /usr/share/doc/{name}/copyright in it",
    "contrib": "free software that needs what is not (contrib), see /usr/share/doc/{name}/copyright in it",
    "non-free": "not free, see /usr/share/doc/{name}/copyright in it",
    "non-free-firmware": "not free, see /usr/share/doc/{name}/copyright in it",
}
_LOGIN = re.compile(r"//[^/\s]*@")
NVIDIA_LICENCE = "NVIDIA's licence, see /usr/share/doc/{name}/copyright in it"


class ArtifactError(ValueError):
    """Something that the list cannot say; the message names it and what helps."""


@dataclass(frozen=True)
class Artifact:
    """One file: where it comes from, where it lies in the folder, and what it must be. 0 and "" are: not known."""

    kind: str
    name: str
    version: str
    url: str
    file: str
    size: int
    sha256: str
    licence: str
    # Who asks for it: the distribution of a node, an instance, a variant.
    wanted_by: str = ""
    note: str = ""
    # Git's name of the content, where a hub tells no sha256.
    git: str = ""

    def __post_init__(self) -> None:
        if self.file and not inside(self.file):
            raise ArtifactError(
                f"{self.url} would lie at {self.file!r}, which is no path inside of the folder. The place that names "
                "it so is wrong or not what it seems: correct the variable that leads there (model.repo, HF_ENDPOINT, "
                "python_env_index_url, nvidia_driver_mirror, a lock), or leave it out"
            )


def inside(name: str) -> bool:
    """Whether a name that came from outside stays in the folder."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not any(part in ("", ".", "..") for part in parts)


# --- wheels -------------------------------------------------------------------------------------------------------


def index_page(text: str, content_type: str, base: str) -> list[dict[str, Any]]:
    """The files of a page of a package index, of a folder of wheels or of a simple index, HTML or JSON."""
    if "json" in content_type:
        return [
            {
                "url": urllib.parse.urljoin(base, str(item["url"])),
                "filename": str(item["filename"]),
                "sha256": str((item.get("hashes") or {}).get("sha256") or ""),
                "size": int(item.get("size") or 0),
            }
            for item in json.loads(text).get("files", [])
        ]
    found = []
    for link in re.findall(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)["']""", text, re.IGNORECASE):
        url, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(base, html.unescape(link)))
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        name = urllib.parse.unquote(urllib.parse.urlsplit(url).path).rsplit("/", 1)[-1]
        found.append({"url": url, "filename": name, "sha256": sha256, "size": 0})
    return found


def choose_wheels(
    lock: Lock, pages: Mapping[str, Sequence[Mapping[str, Any]]], source: str, failed: Mapping[str, str] | None = None
) -> list[Artifact]:
    """The wheels of a lock, found by their hashes on the pages of its packages; `failed` are the errors of indexes."""
    chosen, missing = [], []
    for name, version in sorted(lock.packages.items()):
        wanted = lock.hashes[name]
        files = {str(item["sha256"]): item for item in pages.get(name, ()) if item["sha256"] in wanted}
        if not files:
            missing.append(f"{name} {version}")
        for sha256, item in sorted(files.items()):
            chosen.append(
                Artifact(
                    kind="wheel",
                    name=name,
                    version=version,
                    url=str(item["url"]),
                    file=f"wheels/{item['filename']}",
                    size=int(item["size"]),
                    sha256=sha256,
                    licence=str(item.get("licence") or UNKNOWN),
                    wanted_by=source,
                )
            )
    if missing:
        errors = "; ".join(f"{_LOGIN.sub('//***@', index)}: {error}" for index, error in sorted((failed or {}).items()))
        raise ArtifactError(
            (f"not every index could be read: {errors}. Check its address, its login and the proxy. " if errors else "")
            + f"{source}: no index lists a file with the locked hash of {', '.join(missing)}. Name the index or folder "
            "that has it with python_env_index_url, python_env_extra_index_urls or python_env_find_links, or for this "
            "run with --index-url and --find-links (torch's CPU wheels are on https://download.pytorch.org/whl/cpu)."
        )
    return chosen


def wheel_licence(metadata: str) -> str:
    """What a wheel's METADATA says of its licence, in its shortest form."""
    head = metadata.split("\n\n", 1)[0]
    found = re.search(r"^License-Expression: *(.+)$", head, re.MULTILINE)
    if found:
        return found[1].strip()
    classifiers = re.findall(r"^Classifier: License :: (?:OSI Approved :: )?(.+)$", head, re.MULTILINE)
    named = re.search(r"^License: *(.+)$", head, re.MULTILINE)
    if named and named[1].strip() and len(named[1]) <= 60:
        return named[1].strip()
    return "; ".join(classifiers) or (f"{named[1].strip()[:57]}..." if named and named[1].strip() else UNKNOWN)


def wheels_index(files: Iterable[Artifact]) -> str:
    """The page that uv and pip read as --find-links, with hashes."""
    rows = [
        f'<a href="{html.escape(urllib.parse.quote(name))}#sha256={item.sha256}">{html.escape(name)}</a><br>\n'
        for item in files
        for name in [item.file.rsplit("/", 1)[-1]]
    ]
    return "<!DOCTYPE html>\n<html><head><title>wheels</title></head><body>\n" + "".join(rows) + "</body></html>\n"


# --- Debian and Ubuntu --------------------------------------------------------------------------------------------


def archive_folder(base: str) -> str:
    """Where a repository lies in the folder: by the name that its address ends with, NVIDIA's by distribution."""
    parts = [part for part in urllib.parse.urlsplit(base).path.split("/") if part]
    if len(parts) >= 2 and parts[-1] in ("x86_64", "sbsa"):
        return "apt/nvidia/" + "/".join(parts[-2:])
    return f"apt/{parts[-1]}" if parts else "apt/archive"


def apt_artifacts(packages: Iterable[debian.Package], wanted_by: str) -> list[Artifact]:
    found = []
    for package in packages:
        text = NVIDIA_LICENCE if package.origin == "NVIDIA" else _COMPONENTS.get(package.component, UNKNOWN)
        found.append(
            Artifact(
                kind="apt",
                name=package.name,
                version=package.version,
                url=f"{package.base.rstrip('/')}/{urllib.parse.quote(package.file, safe='/+~:%')}",
                file=f"{archive_folder(package.base)}/{package.file}",
                size=package.size,
                sha256=package.sha256,
                licence=text.format(name=package.name),
                wanted_by=wanted_by,
            )
        )
    return found


# --- conda --------------------------------------------------------------------------------------------------------


def conda_artifacts(packages: Iterable[conda.Package], mirror: str, source: str) -> list[Artifact]:
    """The packages of an explicit lock, with what it says of their sizes and licences."""
    return [
        Artifact(
            kind="conda",
            name=package.name,
            version=package.version,
            url=conda.mirrored(package, mirror),
            file=f"conda/{package.channel_name}/{package.subdir}/{package.file_name}",
            size=package.size,
            sha256=package.sha256,
            licence=package.licence or UNKNOWN,
            wanted_by=source,
        )
        for package in packages
    ]


# --- models -------------------------------------------------------------------------------------------------------


def model_artifacts(repo: str, revision: str, told: Mapping[str, Any] | None, endpoint: str) -> list[Artifact]:
    """The files of a model as the hub's API tells them; without an answer, one line that says so."""
    base = f"{endpoint.rstrip('/')}/{repo}/resolve"
    if told is None:
        note = "the hub was not reached: its files, sizes and hashes are not known"
        return [Artifact("model", repo, revision, f"{base}/{revision}/", "", 0, "", UNKNOWN, note=note)]
    commit = str(told.get("sha") or revision)
    licence = str((told.get("cardData") or {}).get("license") or UNKNOWN)
    found = []
    for item in told.get("siblings") or []:
        name, lfs = str(item["rfilename"]), item.get("lfs") or {}
        found.append(
            Artifact(
                kind="model",
                name=repo,
                version=commit,
                url=f"{base}/{commit}/{urllib.parse.quote(name)}",
                file=f"models/{repo}/{revision}/{name}",
                size=int(item.get("size") or lfs.get("size") or 0),
                sha256=str(lfs.get("sha256") or ""),
                licence=licence,
                git="" if lfs.get("sha256") else str(item.get("blobId") or ""),
            )
        )
    return found


def manifests(items: Iterable[Artifact]) -> dict[str, str]:
    """What a mirror says of its models, by file: names, sizes and hashes, in the form that nodes keep, too."""
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        if item.kind != "model" or not item.file:
            continue
        revision, name = item.file.removeprefix(f"models/{item.name}/").split("/", 1)
        begun: dict[str, Any] = {"repo": item.name, "revision": revision, "commit": item.version, "files": []}
        listing = found.setdefault(f"models/{item.name}/{revision}/{MANIFEST}", begun)
        listing["files"].append({"name": name, "size": item.size, "sha256": item.sha256})
    return {file: json.dumps(listing, indent=1, sort_keys=True) + "\n" for file, listing in found.items()}


# --- the list -----------------------------------------------------------------------------------------------------


def merged(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Each file once, in a stable order; who wants it is joined."""
    found: dict[str, Artifact] = {}
    for item in artifacts:
        key = item.file or item.url
        before = found.get(key)
        if before is None:
            found[key] = item
            continue
        if before.sha256 and item.sha256 and before.sha256 != item.sha256:
            raise ArtifactError(
                f"two different files would lie at {item.file}: {before.url} and {item.url}. "
                "Make a folder of its own for one of the inventories."
            )
        wanted = sorted({*before.wanted_by.split(", "), *item.wanted_by.split(", ")} - {""})
        found[key] = Artifact(**(asdict(before) | {"wanted_by": ", ".join(wanted)}))
    return sorted(found.values(), key=lambda item: (KINDS.index(item.kind), item.name, item.file))


def dump(artifacts: Sequence[Artifact], inventory: str, missing: Sequence[str], remarks: Sequence[str]) -> str:
    """The list as JSON; `missing` says what else would be fetched and could not be found out."""
    known = sum(item.size for item in artifacts)
    content = {
        "format": FORMAT,
        "inventory": inventory,
        "complete": not missing,
        "missing": list(missing),
        "files": len(artifacts),
        "bytes": known,
        "remarks": list(remarks),
        "artifacts": [asdict(item) for item in artifacts],
    }
    return json.dumps(content, indent=1, sort_keys=False) + "\n"


def load(text: str, source: str) -> list[Artifact]:
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ArtifactError(f"{source} is of format {content['format']}, known is {FORMAT}: make the folder anew")
        return [Artifact(**item) for item in content["artifacts"]]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{source} is no list of `make artifacts` ({error}): make the folder anew") from None


def human(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def total(artifacts: Sequence[Artifact]) -> str:
    """Number and size, as far as that is known."""
    least = "" if all(item.size for item in artifacts) else "at least "
    return f"{len(artifacts)} files, {least}{human(sum(item.size for item in artifacts))}"


def table(artifacts: Sequence[Artifact], missing: Sequence[str], remarks: Sequence[str]) -> str:
    """The list for people: a row a file, and sums a kind."""
    head = ("KIND", "NAME", "VERSION", "SIZE", "SHA256", "LICENCE", "URL")
    rows = [
        (
            item.kind,
            item.name,
            item.version[:24],
            human(item.size) if item.size else "?",
            item.sha256[:12] or "?",
            item.licence[:32],
            item.url,
        )
        for item in artifacts
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip()
        for row in (head, *rows)
    ]
    lines.append("")
    for kind in KINDS:
        of_kind = [item for item in artifacts if item.kind == kind]
        if of_kind:
            lines.append(f"{kind}: {total(of_kind)}")
    lines.append(f"together: {total(artifacts)}")
    lines += [f"NOT IN THIS LIST: {text}" for text in missing]
    return "\n".join([*lines, *(f"note: {remark}" for remark in remarks)])
