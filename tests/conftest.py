"""Makes the collection importable from a checkout, through the committed symlink in collections/."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests/fixtures"
if str(ROOT / "collections") not in sys.path:
    sys.path.insert(0, str(ROOT / "collections"))


@pytest.fixture(scope="session")
def model_config() -> Callable[[str], dict[str, Any]]:
    """A config.json of tests/fixtures/model_configs by name; a fresh copy each time."""

    def load(name: str) -> dict[str, Any]:
        return json.loads((FIXTURES / "model_configs" / f"{name}.json").read_text("utf-8"))

    return load


@pytest.fixture(scope="session")
def shared_facts() -> Path:
    """Measurements kept beside some checkouts; tests that need them are skipped elsewhere."""
    path = ROOT.parent / "shared"
    if not (path / "model_configs").is_dir():
        pytest.skip("no measurements beside this checkout")
    return path
