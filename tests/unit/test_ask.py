"""Where scripts/ask.py asks: the lab that is up, at whatever addresses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ask.py"
SPEC = importlib.util.spec_from_file_location("ask", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
ask = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ask)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAB_DIR", str(tmp_path))
    monkeypatch.delenv("LAB_LOOPBACK", raising=False)
    return tmp_path


def test_the_labs_own_address(lab: Path) -> None:
    nodes = [
        {"forwards": [{"listen": "127.78.9.11:2222", "port": 22}]},
        {"forwards": [{"listen": "127.78.9.12:2222", "port": 22}, {"listen": "127.78.9.12:18000", "port": 8000}]},
    ]
    (lab / "lab.json").write_text(json.dumps({"nodes": nodes}))
    assert ask.lab_url() == "http://127.78.9.12:18000"


def test_without_a_lab_as_the_inventory_says(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask.lab_url() == "http://127.77.1.12:18000"
    monkeypatch.setenv("LAB_LOOPBACK", "127.78.9")
    assert ask.lab_url() == "http://127.78.9.12:18000"
    (lab / "lab.json").write_text(json.dumps({"nodes": []}))
    assert ask.lab_url() == "http://127.78.9.12:18000"
