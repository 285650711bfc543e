"""What gloo_check makes of the runtime's answers. The runtime is a stand-in that says what PyTorch 2.13 said there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
MEETING = {"name": "n2", "address": "10.77.1.11", "port": 50123}
# Recorded where /etc/hosts had 127.0.1.1 and GLOO_SOCKET_IFNAME was not set; the native stack is shortened.
LOOPBACK = """\
Traceback (most recent call last):
  File "<string>", line 8, in <module>
RuntimeError: Gloo connectFullMesh failed with [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] \
timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:5023$0
Exception raised from connect at pair.cc:152 (most recent call first):
frame #0: <unknown function> + 0x1
"""


@pytest.fixture(name="runtime")
def fixture_runtime(tmp_path: Path) -> Callable[..., str]:
    """A program in place of the runtime's Python, which gets -I -c PROGRAM RANK ADDRESS PORT SECONDS."""

    def runtime(script: str) -> str:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        return str(program)

    return runtime


def check(run: Run, python: str, environment: Path, **options: Any) -> dict[str, Any]:
    result = run("gloo_check", python=python, environment_file=str(environment), **options)
    assert result.get("changed") is False, result
    gloo: dict[str, Any] = result["gloo"]
    return gloo


def test_without_a_runtime_nothing_is_tested(run: Run, tmp_path: Path) -> None:
    gloo = check(run, str(tmp_path / "missing"), tmp_path / "node.env", next=MEETING)
    assert (gloo["tested"], gloo["why"], gloo["next"]) == (False, "no runtime yet", None)


def test_both_pairs_run_at_once_with_the_units_variables(run: Run, runtime: Callable[..., str], tmp_path: Path) -> None:
    environment = tmp_path / "node.env"
    environment.write_text(
        '# a comment\nGLOO_SOCKET_IFNAME="eth1"\nEMPTY=\n; another\nWITH_SPACE="a b"\n', encoding="utf-8"
    )
    python = runtime(
        f"""echo "$4 $5 $6 $7 $GLOO_SOCKET_IFNAME $WITH_SPACE ${{HOME:-none}} $1" > {tmp_path}/rank$4
        until [ -e {tmp_path}/rank0 ] && [ -e {tmp_path}/rank1 ]; do sleep 0.05; done
        echo '{{"ok": true, "seconds": 0.0042}}'"""
    )
    gloo = check(run, python, environment, next=MEETING, previous={**MEETING, "name": "n3", "port": 50456})
    assert gloo["next"] == {"peer": "n2", "ok": True, "error": None, "seconds": 0.0042}
    assert gloo["previous"]["peer"] == "n3"
    assert gloo["interface"] == "eth1"
    assert (tmp_path / "rank0").read_text("utf-8") == "0 10.77.1.11 50123 120 eth1 a b none -I\n"
    assert (tmp_path / "rank1").read_text("utf-8") == "1 10.77.1.11 50456 120 eth1 a b none -I\n"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (f"cat >&2 << 'END'\n{LOOPBACK}END\nexit 1", "RuntimeError: Gloo connectFullMesh failed"),
        ('echo \'{"ok": false, "seconds": 1}\'', "the sum is wrong"),
        ("exit 3", "ended with code 3 and no word"),
        ("echo noise", "ended with code 0 and no word"),
    ],
)
def test_failure_is_told_in_its_own_words(
    run: Run, runtime: Callable[..., str], tmp_path: Path, script: str, error: str
) -> None:
    pair = check(run, runtime(script), tmp_path / "none", next=MEETING)["next"]
    assert (pair["ok"], pair["error"][: len(error)]) == (False, error)
    if "Gloo" in error:
        assert "remote=[127.0.1.1]" in pair["error"]
        assert "frame" not in pair["error"]


def test_rank_that_hangs_is_ended_with_its_children(
    load: Callable[[str], Any], runtime: Callable[..., str], tmp_path: Path
) -> None:
    module = load("gloo_check")
    python = runtime(f"sleep 300 & echo $! > {tmp_path}/child\nwait")
    process = module.begin(python, dict(os.environ), 0, MEETING, 5)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text("utf-8"):
        time.sleep(0.02)
    pair = module.outcome(process, MEETING, time.monotonic() + 0.2)
    assert pair["error"].startswith("timed out")
    child = int((tmp_path / "child").read_text("utf-8"))
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text("utf-8").split()[2]
        except OSError:
            state = "gone"
        if state in ("Z", "gone"):
            break
        time.sleep(0.02)
    assert state in ("Z", "gone")


@pytest.mark.parametrize("timeout", [4, 1801])
def test_timeout_out_of_range(run: Run, tmp_path: Path, timeout: int) -> None:
    result = run("gloo_check", python="/bin/true", environment_file=str(tmp_path / "x"), timeout=timeout)
    assert result["failed"]
    assert f"timeout={timeout}" in result["msg"]
