"""The repository as an installed collection: built, installed elsewhere, run by its full name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    env |= {"PATH": f"{BIN}:{env['PATH']}", **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("collection")
    built = run(str(BIN / "ansible-galaxy"), "collection", "build", "--output-path", str(work), cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (tarball,) = work.glob("ironrack-vllm-*.tar.gz")
    target = str(work / "collections")
    done = run(str(BIN / "ansible-galaxy"), "collection", "install", str(tarball), "--no-deps", "-p", target, cwd=work)
    assert done.returncode == 0, done.stderr
    return work


def play(installed: Path, playbook: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BIN / "ansible-playbook"),
        f"ironrack.vllm.{playbook}",
        "-i",
        str(ROOT / "inventories/prod"),
        *options,
    ]
    return run(*command, cwd=installed, ANSIBLE_COLLECTIONS_PATH=str(installed / "collections"))


def test_caches_and_environments_of_a_checkout_are_not_packed(installed: Path) -> None:
    (tarball,) = installed.glob("ironrack-vllm-*.tar.gz")
    assert tarball.stat().st_size < 5_000_000
    shipped = installed / "collections/ansible_collections/ironrack/vllm"
    assert not [path.name for path in shipped.iterdir() if path.name.startswith(".")]


def test_nothing_private_is_shipped(installed: Path) -> None:
    root = installed / "collections/ansible_collections/ironrack/vllm"
    present = {path.name for path in root.iterdir()}
    assert {"playbooks", "plugins", "roles", "README.md", "LICENSE"} <= present
    assert not present & {"collections", "inventories", "tests", "molecule", ".venv", ".lab", ".git"}


@pytest.mark.parametrize("playbook", ["site", "plan", "accept", "lab_up"])
def test_playbooks_parse_by_full_name(installed: Path, playbook: str) -> None:
    done = play(installed, playbook, "--syntax-check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_plan_runs_from_the_installed_collection(installed: Path) -> None:
    done = play(installed, "plan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensor" in done.stdout
    assert str(ROOT / "plugins") not in done.stdout
