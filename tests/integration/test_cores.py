"""Every supported ansible-core that this machine has a Python for: 2.19 needs 3.11, 2.21 needs 3.12."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def other_interpreters() -> list[str]:
    """Interpreters of another minor version than this one that bring another ansible-core, one of each core."""
    folders = [Path(entry) for entry in os.environ["PATH"].split(os.pathsep)]
    folders += sorted(Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/3.1[1-4]*/bin"))
    found: dict[bool, str] = {}
    for minor in range(11, 15):
        for folder in folders:
            candidate = shutil.which(f"python3.{minor}", path=str(folder))
            # A shim of a version manager exists but may not run.
            if (
                candidate
                and subprocess.run([candidate, "-c", "import ensurepip"], capture_output=True, check=False).returncode
                == 0
            ):
                found.setdefault(minor >= 12, candidate)
    found.pop(sys.version_info >= (3, 12), None)
    return list(found.values())


@pytest.mark.parametrize("interpreter", [sys.executable, *other_interpreters()])
def test_inventories_plan_and_playbooks_parse(interpreter: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if interpreter == sys.executable:
        bin_folder = Path(sys.executable).parent
    else:
        venv = ROOT / ".venv-other-core"
        subprocess.run(
            [ROOT / "scripts/venv.sh"], env={**os.environ, "PYTHON": interpreter, "VENV": str(venv)}, check=True
        )
        bin_folder = venv / "bin"
    env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    for command in (
        ["site.yml", "--syntax-check", "-i", "inventories/prod"],
        ["playbooks/plan.yml", "-i", "inventories/prod"],
        ["playbooks/plan.yml", "-i", "inventories/single"],
    ):
        done = subprocess.run(
            [bin_folder / "ansible-playbook", *command],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{interpreter} {command}: {done.stdout}{done.stderr}"
        assert "[WARNING]" not in done.stderr and "[DEPRECATION" not in done.stderr, done.stderr
