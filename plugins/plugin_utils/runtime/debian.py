# SPDX-License-Identifier: Apache-2.0
"""What apt would take from repositories: their indexes, versions, preferences, and what a package stands on.

For a host on which nothing is installed: the answer is all that a bare node may ever ask of a repository.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

DEFAULT_PRIORITY = 500
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RELATION = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9+.-]*)(:(?P<arch>[a-z0-9-]+))?\s*(\((?P<op><<|<=|=|>=|>>)\s*(?P<version>[^)]+)\))?"
)


class RepositoryError(ValueError):
    """What a repository does not give; the message names it."""


@dataclass(frozen=True)
class Package:
    """One version of one package in one repository."""

    name: str
    version: str
    file: str
    size: int
    sha256: str
    component: str
    origin: str
    # Where `file` begins.
    base: str
    needs: str = ""
    provides: str = ""


@dataclass
class Archive:
    """All packages of the repositories that a node reads, with the preferences that choose among them."""

    packages: dict[str, list[Package]] = field(default_factory=dict)
    providers: dict[str, list[Package]] = field(default_factory=dict)
    pins: Sequence[Mapping[str, Any]] = ()

    def add(self, found: Iterable[Package]) -> None:
        for package in found:
            self.packages.setdefault(package.name, []).append(package)
            for relation in relations(package.provides):
                self.providers.setdefault(relation[0]["name"], []).append(package)

    def candidate(self, name: str, fits: str = "") -> Package | None:
        """The version that apt would install, of those that a glob or version allows."""
        ranked = [
            (priority, _VersionKey(package.version), package)
            for package in self.packages.get(name, ())
            if (priority := self._priority(package)) >= 0 and _allowed(package.version, fits)
        ]
        return max(ranked, key=lambda row: row[:2])[2] if ranked else None

    def _priority(self, package: Package) -> int:
        for pin in self.pins:
            if any(fnmatchcase(package.name, pattern) for pattern in str(pin["package"]).split()):
                kind, _, wanted = str(pin["pin"]).partition(" ")
                if kind == "version" and fnmatchcase(package.version, wanted):
                    return int(pin["priority"])
                if kind == "release" and wanted == f"o={package.origin}":
                    return int(pin["priority"])
        return DEFAULT_PRIORITY

    def closure(self, wanted: Iterable[Mapping[str, Any]]) -> dict[str, Package]:
        """Every package that installing `wanted` on a bare node may fetch; raises where something cannot be had."""
        found: dict[str, Package] = {}
        missing: list[str] = []
        queue: list[tuple[str, str, str]] = []
        for entry in wanted:
            name, _, version = str(entry["name"]).replace(">=", "=").partition("=")
            fits = version or str(entry.get("version") or "")
            package = self.candidate(name.partition(":")[0], fits)
            if package is None:
                missing.append(f"{name}{f' {fits}' if fits else ''}")
            else:
                found[package.name] = package
                queue += [(package.name, group, package.name) for group in _groups(package.needs)]
        while queue:
            _, group, asker = queue.pop()
            package = self._choose(group, found)
            if package is None:
                missing.append(f"{group} (needed by {asker})")
            elif package.name not in found:
                found[package.name] = package
                queue += [(package.name, below, package.name) for below in _groups(package.needs)]
        if missing:
            raise RepositoryError(", ".join(sorted(set(missing))))
        return found

    def _choose(self, group: str, found: Mapping[str, Package]) -> Package | None:
        """The package that satisfies one group of alternatives: what is taken already, else the first that can be."""
        choices: list[Package] = []
        for relation in next(iter(relations(group)), []):
            candidate = self.candidate(relation["name"])
            named = [candidate] if candidate and satisfies(candidate.version, relation) else []
            others = [
                package
                for package in self.providers.get(relation["name"], ())
                if self.candidate(package.name) == package
            ]
            choices += named + (others if not relation["op"] else [p for p in others if _provides(p, relation)])
        taken = [package for package in choices if found.get(package.name) == package]
        return next(iter(taken or choices), None)


def _provides(package: Package, relation: Mapping[str, str]) -> bool:
    return any(
        provided[0]["name"] == relation["name"]
        and provided[0]["version"]
        and satisfies(provided[0]["version"], relation)
        for provided in relations(package.provides)
    )


def _allowed(version: str, fits: str) -> bool:
    """As the module apt_transaction reads it: a glob without a colon is compared without the epoch."""
    return not fits or fnmatchcase(version, fits) or fnmatchcase(version.partition(":")[2] or version, fits)


def _groups(needs: str) -> list[str]:
    return [group.strip() for group in needs.split(",") if group.strip()]


def relations(text: str) -> Iterator[list[dict[str, str]]]:
    """`a (>= 1) | b, c` as groups of alternatives."""
    for group in _groups(text):
        alternatives = [match for part in group.split("|") if (match := _RELATION.match(part.strip()))]
        if alternatives:
            yield [{key: value or "" for key, value in match.groupdict().items()} for match in alternatives]


def satisfies(version: str, relation: Mapping[str, str]) -> bool:
    if not relation["op"]:
        return True
    order = compare(version, relation["version"].strip())
    return {"<<": order < 0, "<=": order <= 0, "=": order == 0, ">=": order >= 0, ">>": order > 0}[relation["op"]]


# --- versions -----------------------------------------------------------------------------------------------------


def compare(left: str, right: str) -> int:
    """Order of two versions as dpkg sees it: negative, zero, positive."""
    (epoch_left, up_left, rev_left), (epoch_right, up_right, rev_right) = _parts(left), _parts(right)
    if epoch_left != epoch_right:
        return epoch_left - epoch_right
    return _compare_part(up_left, up_right) or _compare_part(rev_left, rev_right)


_VersionKey = functools.cmp_to_key(compare)


def _parts(version: str) -> tuple[int, str, str]:
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream, dash, revision = rest.rpartition("-")
    return int(epoch), upstream if dash else rest, revision if dash else "0"


def _order(character: str) -> int:
    """A tilde sorts before the end, letters before everything else."""
    if character == "~":
        return -1
    return ord(character) if character.isalpha() else ord(character) + 256


def _compare_part(left: str, right: str) -> int:
    while left or right:
        text_left, text_right = (re.match(r"\D*", side)[0] for side in (left, right))  # type: ignore[index]
        for place in range(max(len(text_left), len(text_right))):
            first = _order(text_left[place]) if place < len(text_left) else 0
            second = _order(text_right[place]) if place < len(text_right) else 0
            if first != second:
                return first - second
        left, right = left[len(text_left) :], right[len(text_right) :]
        number_left, number_right = (re.match(r"\d*", side)[0] for side in (left, right))  # type: ignore[index]
        if difference := int(number_left or 0) - int(number_right or 0):
            return difference
        left, right = left[len(number_left) :], right[len(number_right) :]
    return 0


# --- indexes ------------------------------------------------------------------------------------------------------


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """Records of a control file; continued lines are joined."""
    for block in re.split(r"\n\s*\n", text):
        record: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line[:1] in (" ", "\t") and key:
                record[key] += "\n" + line.strip()
            elif ":" in line:
                key, _, value = line.partition(":")
                record[key] = value.strip()
        if record:
            yield record


def read_packages(text: str, base: str, component: str, origin: str) -> Iterator[Package]:
    for record in stanzas(text):
        # What has no hash cannot be verified: apt would not take it either.
        if {"Package", "Version", "Filename"} <= record.keys() and _SHA256.fullmatch(record.get("SHA256", "")):
            needs = ", ".join(record[key] for key in ("Pre-Depends", "Depends") if record.get(key))
            yield Package(
                name=record["Package"],
                version=record["Version"],
                file=record["Filename"].removeprefix("./"),
                size=int(record.get("Size") or 0),
                sha256=record["SHA256"],
                component=component,
                origin=origin,
                base=base,
                needs=needs.replace("\n", " "),
                provides=record.get("Provides", "").replace("\n", " "),
            )


def read_release(text: str) -> tuple[dict[str, str], dict[str, tuple[str, int]]]:
    """Of a Release or InRelease file: its fields, and sha256 and size of each index by its path."""
    # Signed text begins after the headers of the signature, and a line that begins with a dash is escaped.
    signed = re.search(r"-----BEGIN PGP SIGNED MESSAGE-----.*?\n\n(.*?)-----BEGIN PGP SIGNATURE-----", text, re.DOTALL)
    record = next(stanzas(signed[1].replace("\n- ", "\n") if signed else text), {})
    files = {}
    for line in record.get("SHA256", "").splitlines():
        words = line.split()
        if len(words) == 3:
            files[words[2].removeprefix("./")] = (words[0], int(words[1]))
    return record, files
