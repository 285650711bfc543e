# SPDX-License-Identifier: Apache-2.0
"""The decisions of the helper programs on the nodes: when to wait, when to restart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROLES = Path(__file__).parents[3] / "roles"


def program(path: str) -> ModuleType:
    """A program without a suffix, as a module; not imported, since that would leave byte code beside it."""
    module = ModuleType(path.rsplit("/", 1)[1].replace("-", "_"))
    exec(compile((ROLES / path).read_text(encoding="utf-8"), path, "exec"), module.__dict__)  # noqa: S102
    return module


ray_wait = program("ray/files/ray-wait")
WANTED = [("n2", "10.0.0.2", 2.0), ("n3", "10.0.0.3", 2.0)]


@pytest.mark.parametrize(
    ("nodes", "free", "words"),
    [
        ([["10.0.0.1", 0, 0], ["10.0.0.2", 2, 2], ["10.0.0.3", 2, 2]], 4, ""),
        ([["10.0.0.2", 2, 2]], 4, "n3 (10.0.0.3) has not joined"),
        ([["10.0.0.2", 2, 2], ["10.0.0.3", 1, 1]], 4, "n3 (10.0.0.3) offers 1 GPUs, 2 expected"),
        ([["10.0.0.2", 2, 2], ["10.0.0.3", 2, 0], ["10.0.0.3", 2, 2]], 4, "n3 (10.0.0.3) is listed twice"),
        (
            [["10.0.0.2", 2, 0], ["10.0.0.3", 2, 2]],
            4,
            "2 of the 4 GPUs needed are free (10.0.0.2 0 of 2, 10.0.0.3 2 of 2)",
        ),
        ([["10.0.0.2", 2, 0], ["10.0.0.3", 2, 2]], 0, ""),
    ],
)
def test_what_ray_lacks(nodes: list[list[Any]], free: float, words: str) -> None:
    found = ray_wait.missing(nodes, WANTED, free)
    assert found.startswith(words) if words else not found


class Canary:
    """The canary with a unit and an API server made of variables."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = program("vllm/files/vllm-canary")
        self.active, self.invocation, self.age = "active", "a", 30.0
        self.problem: tuple[str | None, bool] = (None, False)
        self.tokens: float | None = 10.0
        self.restarts = 0
        config = tmp_path / "config.json"
        config.write_text(
            json.dumps(
                {"unit": "vllm@m.service", "url": "http://x", "model": "m", "failures": 3, "first_answer_seconds": 100}
            )
        )
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["vllm-canary", str(config)])
        monkeypatch.setattr(self.module, "unit_state", self.state)
        monkeypatch.setattr(self.module, "completion", lambda _config: self.problem)
        monkeypatch.setattr(self.module, "tokens", lambda _config: self.tokens)
        monkeypatch.setattr(self.module.subprocess, "run", self.restart)
        monkeypatch.setattr(self.module.time, "clock_gettime", lambda _clock: 1000.0)

    def state(self, _unit: str) -> dict[str, str]:
        entered = str(int((1000 - self.age) * 1e6))
        return {"ActiveState": self.active, "InvocationID": self.invocation, "ActiveEnterTimestampMonotonic": entered}

    def restart(self, command: list[str], check: bool) -> None:
        assert command[:2] == ["systemctl", "restart"]
        assert check
        self.restarts += 1

    def look(self, times: int = 1) -> int:
        for _ in range(times):
            self.module.main()
        return self.restarts


@pytest.fixture(name="canary")
def a_canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Canary:
    return Canary(tmp_path, monkeypatch)


def test_hung_after_it_answered(canary: Canary) -> None:
    canary.look()
    canary.problem = ("timed out", True)
    assert canary.look(2) == 0
    assert canary.look() == 1


def test_one_answer_forgives(canary: Canary) -> None:
    canary.look()
    canary.problem = ("timed out", True)
    canary.look(2)
    canary.problem = (None, False)
    canary.look()
    canary.problem = ("timed out", True)
    assert canary.look(2) == 0


def test_busy_is_not_hung(canary: Canary) -> None:
    canary.look()
    canary.problem = ("timed out", True)
    for _ in range(10):
        canary.tokens = (canary.tokens or 0) + 1
        assert canary.look() == 0


def test_loading_is_not_hung(canary: Canary) -> None:
    canary.problem = ("refused", True)
    assert canary.look(10) == 0
    canary.age = 101
    assert canary.look() == 1


def test_a_restart_begins_anew(canary: Canary) -> None:
    canary.look()
    canary.problem = ("timed out", True)
    canary.look(2)
    canary.invocation = "b"
    assert canary.look(5) == 0


def test_a_wrong_key_is_no_reason_to_restart(canary: Canary) -> None:
    canary.look()
    canary.problem = ("HTTP 401", False)
    assert canary.look(10) == 0


def test_a_stopped_unit_is_left_alone(canary: Canary) -> None:
    canary.look()
    canary.active, canary.problem = "inactive", ("refused", True)
    assert canary.look(10) == 0


class Watch:
    """The watch of a headless rank, likewise."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = program("vllm/files/vllm-watch")
        self.connections, self.healthy, self.listens, self.age, self.invocation = 0, False, False, 1.0, "a"
        self.restarts = 0
        config = tmp_path / "config.json"
        settings = {"unit": "vllm@m.service", "url": "http://x:1", "first_answer_seconds": 100}
        config.write_text(json.dumps(settings | {"master_address": "10.0.0.2", "master_port": 29501}))
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["vllm-watch", str(config)])
        monkeypatch.setattr(self.module, "unit_state", self.state)
        monkeypatch.setattr(self.module, "connections", lambda *_: self.connections)
        monkeypatch.setattr(self.module, "healthy", lambda _: self.healthy)
        monkeypatch.setattr(self.module, "listens", lambda _: self.listens)
        monkeypatch.setattr(self.module.subprocess, "run", self.restart)
        monkeypatch.setattr(self.module.time, "clock_gettime", lambda _clock: 1000.0)

    def state(self, _unit: str) -> dict[str, str]:
        entered = str(int((1000 - self.age) * 1e6))
        return {"ActiveState": "active", "InvocationID": self.invocation, "ActiveEnterTimestampMonotonic": entered}

    def restart(self, _command: list[str], check: bool) -> None:
        assert check
        self.restarts += 1

    def look(self, times: int = 1) -> int:
        for _ in range(times):
            self.module.main()
        return self.restarts


@pytest.fixture(name="watch")
def a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(tmp_path, monkeypatch)


def test_waiting_for_the_first_rank(watch: Watch) -> None:
    assert watch.look(10) == 0


def test_lost_connection(watch: Watch) -> None:
    watch.connections = 1
    assert watch.look(3) == 0
    watch.connections = 0
    assert watch.look() == 1


def test_api_gone_without_a_word(watch: Watch) -> None:
    watch.connections, watch.healthy, watch.listens = 1, True, True
    watch.look(2)
    watch.listens = watch.healthy = False
    assert watch.look() == 0
    assert watch.look() == 1


def test_never_answered(watch: Watch) -> None:
    watch.connections, watch.age = 1, 101
    assert watch.look() == 1


def test_all_is_well(watch: Watch) -> None:
    watch.connections, watch.healthy, watch.listens, watch.age = 1, True, True, 500
    assert watch.look(10) == 0


def test_kernel_address() -> None:
    module = program("vllm/files/vllm-watch")
    assert module.kernel_address("127.0.0.1") == ("0100007F" if sys.byteorder == "little" else "7F000001")
    if sys.byteorder == "little":
        assert module.kernel_address("::ffff:10.77.1.12") == "0000000000000000FFFF00000C014D0A"
