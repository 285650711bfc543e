#!/usr/bin/env python3
"""Resolve roles/python_env/files/locks/*.in into lock files with a hash for every wheel.

`make lock` calls this. A lock names, for one variant and one Python, each package, its version and the
sha256 of the wheels that fit the target (linux x86_64, glibc 2.35): nothing else can be installed from it.
A conda lock (conda-cp312.lock, from conda.in) names the URL and the sha256 of each conda package for one Python.
Pins that still satisfy the inputs are kept; --upgrade takes the newest instead. --check resolves nothing:
it says whether each lock was made from the inputs that lie beside it.

torch's CPU wheels are not on PyPI. They come from the folder or page in --find-links (default: what pip is
configured with), and where there is none from PyTorch's own index. Neither place is written into the lock.
Conda packages are solved by py-rattler (pinned in roles/python_env/defaults) against --conda-channel; the URLs of
that channel are what the lock holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
from typing import Any

LOCKS = pathlib.Path(__file__).resolve().parent.parent / "roles" / "python_env" / "files" / "locks"
ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGETS = [("cpu", "3.11"), ("cu130", "3.11"), ("cu130", "3.12"), ("conda", "3.12")]
PLATFORM = "x86_64-manylinux_2_35"
CONDA_PLATFORM = "linux-64"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CONDA_CHANNEL = "https://conda.anaconda.org/conda-forge"
# What a node of the oldest supported system offers the packages (Ubuntu 22.04).
CONDA_VIRTUAL = {"__glibc": "2.35", "__linux": "5.15", "__unix": "0"}
# Run with py-rattler at hand; the order comes on standard input, the packages go to standard output.
SOLVER = """
import asyncio, json, os, sys
from rattler import BuildString, Channel, GenericVirtualPackage, PackageName, Version, solve

order = json.load(sys.stdin)
virtual = order["virtual"].items()
virtual = [GenericVirtualPackage(PackageName(n), Version(v), BuildString("0")) for n, v in virtual]
records = asyncio.run(solve(
    [Channel(order["channel"])], order["specs"], platforms=[order["platform"], "noarch"], virtual_packages=virtual
))
rows = [[r.url, r.sha256.hex() if r.sha256 else "", r.size or 0, r.license or ""] for r in records]
json.dump(rows, sys.stdout)
sys.stdout.flush()
os._exit(0)  # py-rattler's threads may still run: taking the interpreter down under them has crashed
"""


def conda() -> Any:
    """The code that reads conda locks, without the collection being installed."""
    sys.path.insert(0, str(ROOT))
    from plugins.plugin_utils.runtime import conda as module  # noqa: PLC0415

    return module


def lock_path(variant: str, python: str) -> pathlib.Path:
    return LOCKS / f"{variant}-cp{python.replace('.', '')}.{'lock' if variant == 'conda' else 'txt'}"


def inputs_digest(variant: str, python: str) -> str:
    """Digest of everything that a lock is made from, comments left out."""
    platform = CONDA_PLATFORM if variant == "conda" else PLATFORM
    digest = hashlib.sha256(f"{python} {platform}\n".encode())
    for suffix in (".in", ".overrides"):
        path = LOCKS / (variant + suffix)
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            text = line.split("#", 1)[0].strip()
            if text:
                digest.update(f"{suffix} {text}\n".encode())
    return digest.hexdigest()


def pip_find_links() -> list[str]:
    """The find-links that pip is configured with on this machine."""
    for python in (sys.executable, "/usr/bin/python3"):
        done = subprocess.run(
            [python, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout.split()
    return os.environ.get("PIP_FIND_LINKS", "").split()


def resolve(uv: str, variant: str, python: str, find_links: list[str], upgrade: bool) -> dict[str, Any]:
    """Return the resolution as a parsed pylock.toml: names, versions, wheels with URL, size and hash."""
    command = [uv, "pip", "compile", "--quiet", "--no-build", "--python-version", python, "--python-platform", PLATFORM]
    overrides = LOCKS / f"{variant}.overrides"
    if overrides.exists():
        command += ["--override", str(overrides)]
    if variant == "cpu":
        if find_links:
            command += [word for place in find_links for word in ("--find-links", place)]
        else:
            # PyTorch's index also carries old copies of common packages: take the best version over both.
            command += ["--index", TORCH_CPU_INDEX, "--index-strategy", "unsafe-best-match"]
    source = str(LOCKS / f"{variant}.in")
    with tempfile.TemporaryDirectory() as folder:
        pins = pathlib.Path(folder, "pins.txt")
        lock = lock_path(variant, python)
        if lock.exists() and not upgrade:
            # uv prefers the versions that it finds in its output file
            pins.write_text("".join(f"{line.split()[0]}\n" for line in lock.read_text().splitlines() if "==" in line))
        subprocess.run(
            [*command, source, "--no-header", "--output-file", str(pins)], check=True, stdout=subprocess.DEVNULL
        )
        pylock = pathlib.Path(folder, "pylock.toml")
        subprocess.run(
            [*command, source, "--constraint", str(pins), "--format", "pylock.toml", "--output-file", str(pylock)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return tomllib.loads(pylock.read_text())


def wheel_size(wheel: dict[str, Any]) -> int:
    url = urllib.parse.urlsplit(wheel["url"])
    if url.scheme == "file":
        return pathlib.Path(urllib.parse.unquote(url.path)).stat().st_size
    return int(wheel.get("size", 0))


def render(variant: str, python: str, resolution: dict[str, Any]) -> str:
    lines, total = [], 0
    packages = sorted(resolution["packages"], key=lambda package: package["name"])
    for package in packages:
        wheels = package.get("wheels", [])
        if not wheels:
            raise SystemExit(f"{package['name']} {package['version']}: no wheel fits {PLATFORM}, Python {python}")
        total += max(wheel_size(wheel) for wheel in wheels)
        hashes = sorted({wheel["hashes"]["sha256"] for wheel in wheels})
        lines.append(
            f"{package['name']}=={package['version']}" + "".join(f" \\\n    --hash=sha256:{value}" for value in hashes)
        )
    header = [
        f"# vLLM runtime, variant {variant}, Python {python}, linux x86_64, glibc 2.35 or newer.",
        "# Made by `make lock` from the .in and .overrides files beside it: do not edit.",
        f"# inputs: sha256:{inputs_digest(variant, python)}",
        f"# packages: {len(packages)}",
        f"# download-bytes: {total}",
    ]
    return with_digest("\n".join(header + lines) + "\n")


def solve_conda(uv: str, python: str, channel: str) -> str:
    """Solve conda.in against the channel, and return the text of the explicit lock."""
    specs = conda().parse_specs((LOCKS / "conda.in").read_text(), "conda.in")
    specs["python"] = f"={python}"
    defaults = (ROOT / "roles/python_env/defaults/main.yml").read_text()
    rattler = next(
        line.split(":")[1].strip() for line in defaults.splitlines() if line.startswith("python_env_rattler_version:")
    )
    command = [uv, "run", "--quiet", "--no-project", "--isolated", "--with", f"py-rattler=={rattler}"]
    order = {
        "channel": channel,
        "specs": [f"{name} {version}".strip() for name, version in specs.items()],
        "platform": CONDA_PLATFORM,
        "virtual": CONDA_VIRTUAL,
    }
    done = subprocess.run(
        [*command, "python", "-c", SOLVER], input=json.dumps(order), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the conda packages could not be solved: is {channel} reachable (--conda-channel)?")
    header = [
        f"Python {python} and the libraries under it, {CONDA_PLATFORM}, from conda packages.",
        "Made by `make lock` from conda.in beside it: do not edit.",
        f"inputs: sha256:{inputs_digest('conda', python)}",
    ]
    return with_digest(conda().render([tuple(row) for row in json.loads(done.stdout)], header))


def content_digest(text: str) -> str:
    """Digest of what would be installed: `make lock` writes it down, so that a line edited by hand shows."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def with_digest(text: str) -> str:
    return text.replace("# packages:", f"# content: sha256:{content_digest(text)}\n# packages:", 1)


def check_conda(python: str) -> str | None:
    """What can be said without the channel: every line has a hash, and what conda.in asks for is there."""
    module, lock = conda(), lock_path("conda", python)
    try:
        found = module.parse_explicit(lock.read_text(), lock.name)
        module.check_python(found, python, lock.name)
    except module.RuntimeInputError as error:
        return str(error)
    problems = module.unsatisfied(found, module.parse_specs((LOCKS / "conda.in").read_text(), "conda.in"))
    return f"{lock.name}: {'; '.join(problems)}: run `make lock`" if problems else None


def check(variant: str, python: str) -> str | None:
    lock = lock_path(variant, python)
    if not lock.exists():
        return f"{lock.name} is missing: run `make lock`"
    text = lock.read_text()
    if f"# inputs: sha256:{inputs_digest(variant, python)}\n" not in text:
        return f"{lock.name} was made from other inputs than {variant}.in and {variant}.overrides: run `make lock`"
    if variant == "conda" and (problem := check_conda(python)):
        return problem
    if f"# content: sha256:{content_digest(text)}\n" not in text:
        return f"{lock.name} was edited by hand: change {variant}.in and run `make lock`"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Resolve the runtime's lock files.")
    parser.add_argument("variants", nargs="*", help="only these variants (default: all)")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of keeping pins")
    parser.add_argument("--check", action="store_true", help="only compare locks with their inputs")
    parser.add_argument("--find-links", action="append", default=[], metavar="PLACE", help="where torch+cpu lies")
    parser.add_argument("--conda-channel", default=CONDA_CHANNEL, metavar="URL", help="where conda packages are")
    parser.add_argument("--uv", default="uv", help="the uv command")
    args = parser.parse_args()
    targets = [target for target in TARGETS if not args.variants or target[0] in args.variants]
    if args.check:
        problems = [problem for target in targets if (problem := check(*target))]
        print("\n".join(problems) or f"{len(targets)} locks fit their inputs")
        return 1 if problems else 0
    find_links = args.find_links or pip_find_links()
    for variant, python in targets:
        if variant == "conda":
            text = solve_conda(args.uv, python, args.conda_channel)
        else:
            text = render(variant, python, resolve(args.uv, variant, python, find_links, args.upgrade))
        lock = lock_path(variant, python)
        changed = not lock.exists() or lock.read_text() != text
        lock.write_text(text)
        print(f"{lock.name}: {'written' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
