#!/usr/bin/env python3
"""Build a conda channel that holds one package, the Python that runs this: build_channel.py OUT_DIR

For the lab, where no conda channel can be reached: a node packs its own interpreter, and all nodes make real conda
environments from it. The shared libraries that it needs are those of the node's Debian. Writes

  OUT_DIR/lab/linux-64/python-<version>-<build>.tar.bz2, repodata.json (and an empty noarch)
  OUT_DIR/lab-cp<major><minor>.lock   the explicit lock: URL#sha256

Prints one line of JSON: what was made, and whether it is new. The same interpreter gives the same bytes, so that the
hash (and with it the release id) stays. Standard library only.
"""

from __future__ import annotations

import argparse
import bz2
import hashlib
import io
import json
import os
import pathlib
import platform
import sys
import sysconfig
import tarfile

# No host has this name: python_env_conda_mirror says where the channel is.
CHANNEL = "https://conda.invalid/lab"
SKIPPED = {
    "__pycache__",
    "EXTERNALLY-MANAGED",
    "idlelib",
    "lib2to3",
    "sitecustomize.py",
    "test",
    "tkinter",
    "turtledemo",
}
# Debian's Python installs into dist-packages below a `local` folder unless it runs in a virtual environment, and looks
# only into dist-packages. This copy is no system Python: it installs into site-packages, and dist-packages is a link
# there (what looks is frozen into the executable).
DEBIAN = "posix_local"
UNPATCHED = 'if sys.base_prefix != sys.prefix or hasattr(sys, "real_prefix"):'


def own_files() -> dict[str, tuple[pathlib.Path, bytes | None]]:
    """Path in the package -> (file on disk, other content than its own)."""
    short = sysconfig.get_python_version()
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    found: dict[str, tuple[pathlib.Path, bytes | None]] = {
        f"bin/python{short}": (pathlib.Path(os.path.realpath(sys._base_executable)), None)
    }
    roots = [(stdlib, f"lib/python{short}"), (pathlib.Path(sysconfig.get_path("include")), f"include/python{short}")]
    for root, target in roots:
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("config-"))
            if folder == str(root):
                folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
            for name in sorted(files):
                path = pathlib.Path(folder, name)
                if name not in SKIPPED and path.exists():  # a link of Debian's may lead nowhere
                    found[f"{target}/{path.relative_to(root)}"] = (path, None)
    readme = b"Packages that are installed into this environment.\n"
    found[f"lib/python{short}/site-packages/README.txt"] = (stdlib / "os.py", readme)
    scheme = f"lib/python{short}/sysconfig.py"
    text = found[scheme][0].read_text()
    if DEBIAN in text:
        if text.count(UNPATCHED) != 1:
            sys.exit(f"build_channel: {found[scheme][0]} is not Debian's as it was known: no {UNPATCHED!r}")
        found[scheme] = (found[scheme][0], text.replace(UNPATCHED, "if True:").encode())
    return found


def entry(name: str, size: int, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, mode, 1577836800  # 2020-01-01
    return info


def pack(version: str, build: str, contents: dict[str, bytes], modes: dict[str, int]) -> bytes:
    """A package of the format .tar.bz2: files, links, and what conda wants to know of them in info/."""
    short = ".".join(version.split(".")[:2])
    links = {"bin/python": f"python{short}", "bin/python3": f"python{short}"}
    links[f"lib/python{short}/dist-packages"] = "site-packages"
    index = {
        "name": "python",
        "version": version,
        "build": build,
        "build_number": 0,
        "depends": [],
        "constrains": [],
        "arch": "x86_64",
        "platform": "linux",
        "subdir": "linux-64",
        "license": "PSF-2.0",
    }
    paths = [
        {
            "_path": name,
            "path_type": "hardlink",
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_in_bytes": len(data),
        }
        for name, data in contents.items()
    ]
    paths += [{"_path": name, "path_type": "softlink"} for name in links]
    paths.sort(key=lambda item: str(item["_path"]))
    information = {
        "info/about.json": {"summary": "the interpreter of a lab node, packed by the lab"},
        "info/index.json": index,
        "info/paths.json": {"paths": paths, "paths_version": 1},
    }
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, value in information.items():
            data = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
            archive.addfile(entry(name, len(data), 0o644), io.BytesIO(data))
        listing = "".join(f"{item['_path']}\n" for item in paths).encode()
        archive.addfile(entry("info/files", len(listing), 0o644), io.BytesIO(listing))
        for name, data in contents.items():
            archive.addfile(entry(name, len(data), modes[name]), io.BytesIO(data))
        for name, target in links.items():
            link = entry(name, 0, 0o777)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return bz2.compress(raw.getvalue(), 1)


def write(path: pathlib.Path, data: bytes) -> bool:
    if path.exists() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.chmod(0o644)
    partial.replace(path)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a conda channel from the Python that runs this.")
    parser.add_argument("out", type=pathlib.Path, help="folder to write (created if missing)")
    out = parser.parse_args().out
    files = own_files()
    contents = {name: data if data is not None else path.read_bytes() for name, (path, data) in files.items()}
    modes = {name: 0o755 if os.access(path, os.X_OK) else 0o644 for name, (path, _data) in files.items()}
    version = platform.python_version()
    digest = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    for name, data in sorted(contents.items()):
        digest.update(f"{name}\0{modes[name]}\0{len(data)}\0".encode() + data)
    build = f"h{digest.hexdigest()[:8]}_0"
    package = out / "lab" / "linux-64" / f"python-{version}-{build}.tar.bz2"
    changed = not package.exists()
    if changed:
        write(package, pack(version, build, contents, modes))
    data = package.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    record = {
        "name": "python",
        "version": version,
        "build": build,
        "build_number": 0,
        "depends": [],
        "subdir": "linux-64",
        "sha256": sha256,
        "size": len(data),
    }
    for subdir, packages in (("linux-64", {package.name: record}), ("noarch", {})):
        repodata = {"info": {"subdir": subdir}, "packages": packages, "packages.conda": {}, "repodata_version": 1}
        changed |= write(out / "lab" / subdir / "repodata.json", (json.dumps(repodata, indent=1) + "\n").encode())
    lock = out / f"lab-cp{''.join(version.split('.')[:2])}.lock"
    text = (
        "# The Python of a lab node, made by build_channel.py.\n"
        f"# download-bytes: {len(data)}\n@EXPLICIT\n{CHANNEL}/linux-64/{package.name}#{sha256}\n"
    )
    changed |= write(lock, text.encode())
    print(json.dumps({"changed": changed, "package": str(package), "lock": str(lock), "text": text}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
