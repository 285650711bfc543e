"""What the roles render for the example inventories is what tests/golden holds. `make golden` writes it anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests/golden"
TOPOLOGIES = sorted(path.name for path in (ROOT / "tests/topologies").iterdir() if path.is_dir())


def golden(*arguments: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: Ansible reads its configuration when it is imported.
    command = [sys.executable, str(ROOT / "tests/tools/golden.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_rendered_is_golden() -> None:
    done = golden("--check")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_has_golden_files(name: str) -> None:
    assert list((GOLDEN / name).rglob("node.env"))
    assert list((GOLDEN / name).rglob("firewall.nft"))


def test_a_difference_is_shown(tmp_path: Path) -> None:
    """A file that changed, one that is missing and one too many."""
    done = golden("--golden", str(tmp_path))
    assert done.returncode == 0, done.stderr
    changed = tmp_path / "roce/gpu4/etc/ironrack/node.env"
    changed.write_text(changed.read_text("utf-8").replace("rocep69s0", "mlx5_0"), encoding="utf-8")
    (tmp_path / "tcp_two_networks/gpu1/etc/ironrack/node.env").unlink()
    (tmp_path / "stray").write_text("x\n", encoding="utf-8")
    done = golden("--check", "--golden", str(tmp_path))
    assert done.returncode == 1
    assert '-NCCL_IB_HCA="=mlx5_0,rocep197s0"' in done.stdout
    assert "+++ rendered/tcp_two_networks/gpu1/etc/ironrack/node.env" in done.stdout
    assert "--- tests/golden/stray" in done.stdout
