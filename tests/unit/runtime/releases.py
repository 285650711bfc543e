"""Small releases for the tests of the module `release`: no environment, but all that the module looks at."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.modules import release as module

ID = "0123456789abcdef"
OTHERS = [f"{index:016x}" for index in range(1, 6)]
needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")


def fill(release, identity=None, size=100, built_on="elsewhere", machine="another"):
    """A finished release on disk."""
    root = Path(release.root, identity or release.id)
    (root / "bin").mkdir(parents=True, exist_ok=True)
    (root / "bin" / "python").symlink_to(sys.executable)
    (root / "lib").mkdir(exist_ok=True)
    (root / "lib" / "data.bin").write_bytes(b"d" * size)
    manifest, files, total = module.write_manifest(str(root))
    marker = {
        "id": identity or release.id,
        "bytes": total,
        "files": files,
        "manifest_sha256": manifest,
        "built_on": built_on,
        "machine": machine,
        "python": release.interpreter_version(),
    }
    (root / module.MARKER).write_text(json.dumps(marker))
    return root
