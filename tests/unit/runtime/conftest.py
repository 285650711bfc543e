"""Fixtures of the runtime's tests."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from ansible_collections.ironrack.vllm.plugins.modules import release as module
from releases import ID


@pytest.fixture
def make(tmp_path):
    """Release(...) over folders of the test; each call is a new run."""

    def build(check_mode=False, **params):
        defaults = {
            "release_id": ID,
            "versions": {"vllm": "0.32.0", "torch": "2.13.0+cpu"},
            "variant": "cpu",
            "python": ".".join(map(str, sys.version_info[:2])),
            "interpreter": sys.executable,
            "prefix": str(tmp_path / "opt"),
            "cache_dir": str(tmp_path / "cache"),
            "log_path": str(tmp_path / "release.log"),
            "index_url": "https://index.example/simple",
            "extra_index_urls": [],
            "find_links": [],
            "http_proxy": "",
            "ca_bundle": "",
            "credentials": {},
            "lock_name": "cpu-cp311.txt",
            "lock_file": "",
            "wheel_files": [],
            "download_bytes": 1000,
            "uv_version": "9.9.9",
            "uv_sha256": "0" * 64,
            "pack": True,
            "serve": None,
            "conda": None,
            "verify": "quick",
            "source": {},
            "chain": {},
            "keep": 3,
        }
        warned = []
        built = module.Release(
            SimpleNamespace(params={**defaults, **params}, check_mode=check_mode, warn=warned.append, warned=warned)
        )
        built.prove = lambda: None
        return built

    return build
