# SPDX-License-Identifier: Apache-2.0
"""Explicit conda locks: a URL and a sha256 for each package, and nothing that is left to a solver on the node."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterable

from .lock import RuntimeInputError, normalize

SUBDIRS = ("linux-64", "noarch")
# What the hashed wheel lock brings. From conda as well there would be two of it, and the wrong one might be imported.
# The first word of a name counts: pytorch-gpu, libtorch-cuda, ray-core.
_TORCH = ("pytorch", "torch", "libtorch", "torchvision", "torchaudio", "triton")
WHEELS_ONLY = frozenset((*_TORCH, "transformers", "vllm", "ray"))
MARK = "@EXPLICIT"

_LINE = re.compile(r"^(?P<url>[a-z][a-z0-9+.-]*://[^\s#]+)#(?P<hash>\S+)$")
_SHA256 = re.compile(r"^(?:sha256[:=])?(?P<sha256>[0-9a-f]{64})$")
_MD5 = re.compile(r"^(?:md5[:=])?[0-9a-f]{32}$")
_FILE = re.compile(r"^(?P<name>.+)-(?P<version>[^-]+)-(?P<build>[^-]+)(?:\.conda|\.tar\.bz2)$")
_ABOUT = re.compile(r"^# licence: (?P<licence>[^,]*?)(?:, size: (?P<size>\d+))?$")
_SPEC = re.compile(r"^(?P<name>[a-z0-9_][a-z0-9_.-]*)\s*(?P<version>(?:[=<>!~].*)?)$")
REMEDY = "Make it with `make lock`, or with `conda list --explicit --sha256`."


@dataclasses.dataclass(frozen=True)
class Package:
    """One package of a lock: where it comes from and what its file must hash to."""

    url: str
    sha256: str
    channel: str
    subdir: str
    file_name: str
    name: str
    version: str
    build: str
    # What the comment ahead of its line says; "" and 0 are: not known.
    licence: str = ""
    size: int = 0

    @property
    def channel_name(self) -> str:
        """conda-forge of https://conda.anaconda.org/conda-forge: the folder of the channel in a mirror."""
        return self.channel.rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True)
class CondaLock:
    packages: tuple[Package, ...]
    download_bytes: int

    def digest(self) -> str:
        """Digest over what would be installed: comments, order, host of the channel and layout do not count."""
        content = sorted([p.channel_name, p.subdir, p.file_name, p.sha256] for p in self.packages)
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()

    @property
    def python(self) -> str:
        return next(package.version for package in self.packages if package.name == "python")


def _package(line: str, source: str) -> Package:
    match = _LINE.match(line)
    if match is None:
        raise RuntimeInputError(
            f"{source}: the line {line[:120]!r} is not `<URL of a package>#<sha256>`. An explicit lock names one file "
            f"with its hash a line. {REMEDY}"
        )
    url = match["url"]
    digest = _SHA256.match(match["hash"])
    if digest is None:
        reason = "has an md5, which proves nothing today" if _MD5.match(match["hash"]) else "has no sha256"
        raise RuntimeInputError(f"{source}: {url} {reason}. Every line needs `#<sha256>`, 64 hex digits. {REMEDY}")
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise RuntimeInputError(f"{source}: {url} is no URL ({error}). {REMEDY}") from None
    folders = parts.path.split("/")
    plain = [urllib.parse.unquote(folder) for folder in folders]
    file_name = plain[-1]
    named = _FILE.match(file_name)
    # In a mirror and in the builder's cache the names are those of files and folders.
    escapes = any(name in (".", "..") or re.search(r"[/\\\0]", name) for name in plain)
    if escapes or len(folders) < 4 or folders[-2] not in SUBDIRS or not folders[-3] or named is None:
        raise RuntimeInputError(
            f"{source}: {url} is not <channel>/<{' or '.join(SUBDIRS)}>/<name>-<version>-<build>.conda (or .tar.bz2). "
            f"The nodes are linux-64. {REMEDY}"
        )
    if "@" in parts.netloc:
        raise RuntimeInputError(
            f"{source}: {url.replace(parts.netloc, parts.hostname or '')} holds a user name or password. Take it out "
            "of the lock, and write it into python_env_conda_mirror, which is never logged with it."
        )
    channel = url[: -len("/".join(folders[-2:])) - 1]
    name, version, build = named["name"], named["version"], named["build"]
    return Package(url, digest["sha256"], channel, folders[-2], file_name, name, version, build)


def parse_explicit(text: str, source: str = "the conda lock") -> CondaLock:
    """Read an explicit lock in which every line has a sha256; raises when a package of it does not belong there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if next((line for line in lines if not line.startswith("#")), "") != MARK:
        raise RuntimeInputError(f"{source} does not begin with {MARK}: it is no explicit conda lock. {REMEDY}")
    packages: dict[str, Package] = {}
    about = None
    for line in lines[lines.index(MARK) + 1 :]:
        if line.startswith("#"):
            about = _ABOUT.match(line)
            continue
        package = _package(line, source)
        if about:
            package = dataclasses.replace(package, licence=about["licence"], size=int(about["size"] or 0))
            about = None
        if package.name in packages:
            raise RuntimeInputError(f"{source}: {package.name} is named twice. {REMEDY}")
        if normalize(package.name).split("-")[0] in WHEELS_ONLY:
            raise RuntimeInputError(
                f"{source} holds {package.name}, which comes from the wheel lock (python_env_lock), never from conda. "
                "Take it out of the specs and make the lock anew with `make lock`."
            )
        packages[package.name] = package
    if "python" not in packages:
        raise RuntimeInputError(f"{source} holds no python, which the environment is built on. {REMEDY}")
    size = re.search(r"^# download-bytes: (\d+)$", text, re.MULTILINE)
    return CondaLock(tuple(packages.values()), int(size[1]) if size else 0)


def lock_name(python: str) -> str:
    """File name of the shipped conda lock: conda-cp312.lock for 3.12 (or 3.12.7)."""
    major, minor = python.split(".")[:2]
    return f"conda-cp{major}{minor}.lock"


def check_python(lock: CondaLock, python: str, source: str = "the conda lock") -> str:
    """The version of Python in the lock; raises when it is another one than python_env_python asks for."""
    if lock.python.split(".")[: python.count(".") + 1] != python.split("."):
        raise RuntimeInputError(
            f"python_env_python is {python}, but {source} holds Python {lock.python}. Set python_env_python: "
            f'"{".".join(lock.python.split(".")[:2])}", or give a lock of {python} in python_env_conda_lock.'
        )
    return lock.python


def mirrored(package: Package, mirror: str) -> str:
    """Where to fetch a package: in a mirror the channels lie side by side, each under its own name."""
    if not mirror:
        return package.url
    file_name = urllib.parse.quote(package.file_name)
    return "/".join([mirror.rstrip("/"), package.channel_name, package.subdir, file_name])


def check_mirror(mirror: str) -> None:
    if not mirror:
        return
    parts = urllib.parse.urlsplit(mirror)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return
    if parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment:
        return
    raise RuntimeInputError(
        f"python_env_conda_mirror is {mirror!r}. It is empty, or a URL http://..., https://... or file:///folder (on "
        "the builder) under which each channel has a folder of its name (conda-forge/linux-64/...)."
    )


def parse_specs(text: str, source: str = "the specs") -> dict[str, str]:
    """Read a .in file: one `name` or `name =3.12` a line, comments left out."""
    specs: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        match = _SPEC.match(words)
        if match is None:
            raise RuntimeInputError(f"{source}: {words!r} is not `name`, `name =3.12` or `name ==3.12.13`.")
        specs[normalize(match["name"]) if match["name"] == "python" else match["name"]] = match["version"].strip()
    return specs


def unsatisfied(lock: CondaLock, specs: dict[str, str]) -> list[str]:
    """What a reader of both files can see without a channel: wanted packages that are missing or of another version."""
    versions = {package.name: package.version for package in lock.packages}
    problems = []
    for name, wanted in specs.items():
        found = versions.get(name)
        if found is None:
            problems.append(f"{name} is not in the lock")
        elif not _fits(found, wanted):
            problems.append(f"{name} {found} is not {wanted}")
    return problems


def _fits(version: str, wanted: str) -> bool:
    """`==3.12.13` is exact, `=3.12` (or 3.12.*) a prefix; ranges are for the solver."""
    if wanted.startswith("=="):
        return version == wanted[2:].strip()
    if wanted.startswith("="):
        prefix = wanted[1:].strip().removesuffix(".*").split(".")
        return version.split(".")[: len(prefix)] == prefix
    return True


def render(packages: Iterable[tuple[str, str, int, str]], header: Iterable[str]) -> str:
    """Text of an explicit lock from (URL, sha256, size, licence), sorted by file name."""
    rows = sorted(packages, key=lambda row: row[0].rsplit("/", 1)[-1])
    lines = [f"# {line}" for line in header]
    lines += [f"# packages: {len(rows)}", f"# download-bytes: {sum(row[2] for row in rows)}", MARK]
    for url, sha256, size, licence in rows:
        # Commas end it when it is read; licence expressions have none.
        lines += [f"# licence: {licence.replace(',', ';') or 'unknown'}, size: {size}", f"{url}#{sha256}"]
    return "\n".join(lines) + "\n"
