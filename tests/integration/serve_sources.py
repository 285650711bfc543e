#!/usr/bin/env python3
"""Packs the Python files of a released vLLM, which are enough for its argument parser on a machine without GPUs.

  serve_sources.py VERSION OUT.tar

Downloads the wheel from the configured package index (about 340 MB), unless OUT.tar is there already.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def main(version: str, out: Path) -> None:
    if out.is_file():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        place = ["--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64", "--dest", folder]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *place, f"vllm=={version}"], check=True
        )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith((".py", "/METADATA", "/entry_points.txt")):
                    archive.extract(name, f"{folder}/site")
        new = out.with_suffix(".new")
        with tarfile.open(new, "w") as packed:
            packed.add(f"{folder}/site", arcname=".")
        new.replace(out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
