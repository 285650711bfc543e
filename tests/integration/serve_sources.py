#!/usr/bin/env python3
"""Packs the Python files of a released vLLM, which are enough for its argument parser on a machine without GPUs.

  serve_sources.py VERSION PYTHON OUT.tar [REQUIREMENT ...]

REQUIREMENT: packages that this version imports and the environment of the other version lacks, for Python PYTHON.

Downloads the wheel from the configured package index (about 340 MB), unless OUT.tar is there already.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def download(folder: Path, python: str, requirement: str) -> Path:
    place = ["--only-binary=:all:", f"--python-version={python}", "--platform=manylinux_2_28_x86_64"]
    place += ["--platform=manylinux2014_x86_64", "--platform=manylinux_2_17_x86_64", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *place, requirement]
    before = set(folder.glob("*.whl"))
    subprocess.run(command, check=True)
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def main(version: str, python: str, out: Path, requirements: list[str]) -> None:
    if out.is_file():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        with zipfile.ZipFile(download(folder, python, f"vllm=={version}")) as archive:
            for member in archive.namelist():
                if member.endswith((".py", "/METADATA", "/entry_points.txt")):
                    archive.extract(member, folder / "site")
        for requirement in requirements:
            with zipfile.ZipFile(download(folder, python, requirement)) as archive:
                for member in archive.namelist():
                    archive.extract(member, folder / "site")
        new = out.with_suffix(".new")
        with tarfile.open(new, "w") as packed:
            packed.add(folder / "site", arcname=".")
        new.replace(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
