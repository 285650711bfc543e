"""Runs modules as the target would: as a script with JSON arguments, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = ROOT / "plugins" / "modules"


def module_arguments(check: bool = False, diff: bool = True, **parameters: Any) -> str:
    return json.dumps({"ANSIBLE_MODULE_ARGS": {"_ansible_check_mode": check, "_ansible_diff": diff, **parameters}})


def run_module(module: str, programs: str = "", check: bool = False, **parameters: Any) -> dict[str, Any]:
    """The module's result; the folder programs goes before PATH, for stand-ins."""
    environment = dict(os.environ)
    environment["PATH"] = f"{programs}:{environment['PATH']}" if programs else environment["PATH"]
    environment["PYTHONPATH"] = str(ROOT / "collections")
    finished = subprocess.run(
        [sys.executable, str(MODULES / f"{module}.py")],
        input=module_arguments(check, **parameters),
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    try:
        result: dict[str, Any] = json.loads(finished.stdout)
    except ValueError:
        pytest.fail(f"{module} printed no JSON: {finished.stdout}{finished.stderr}")
    return result


@pytest.fixture(name="run")
def fixture_run() -> Callable[..., dict[str, Any]]:
    return run_module


@pytest.fixture(name="load")
def fixture_load() -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        specification = importlib.util.spec_from_file_location(f"ironrack_module_{name}", MODULES / f"{name}.py")
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module

    return load
