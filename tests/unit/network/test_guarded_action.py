"""The controller's side of a guarded change: confirmed over a fresh connection, or told that it was taken back."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible_collections.ironrack.vllm.plugins.action import nft_ruleset
from ansible_collections.ironrack.vllm.plugins.action.nft_ruleset import GuardedAction


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Action(GuardedAction):
    """Answers of the module are given; a call over the first connection is told from one over a fresh one."""

    WHAT = "The rules"

    def __init__(self, clock: Clock, **answers: list[Any]) -> None:
        self.clock = clock
        self.answers = answers
        self.calls: list[tuple[str, Any]] = []
        self.guards: list[dict[str, str]] = []
        self._connection = "first"

    def arguments(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _fresh(self, first: Any) -> Any:
        return "fresh"

    def _step(self, step: str, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((step, self._connection))
        self.guards.append(arguments["guard"])
        self.clock.now += 1
        given = self.answers[step]
        answer = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


@pytest.fixture(name="clock")
def fixture_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(nft_ruleset, "time", clock)
    monkeypatch.setattr(nft_ruleset.ActionBase, "run", lambda *_: {})
    return clock


APPLIED = {"changed": True, "guard": {"name": "firewall", "seconds": 20, "token": "t1"}}
LOST = AnsibleConnectionFailure("Connection timed out")
HOST = {"inventory_hostname": "n1"}


def test_confirmed_over_a_fresh_connection(clock: Clock) -> None:
    action = Action(clock, apply=[APPLIED], confirm=[{"confirmed": True}])
    assert action.run(task_vars=HOST) == {"changed": True}
    assert action.calls == [("apply", "first"), ("confirm", "fresh")]
    assert action._connection == "first"
    assert action.guards == [{"by": nft_ruleset.whoever()}, {"token": "t1"}], "nobody else's change is confirmed"


def test_replaced_by_another_run(clock: Clock) -> None:
    action = Action(clock, apply=[APPLIED], confirm=[{"confirmed": False}], status=[{"state": "replaced"}])
    result = action.run(task_vars=HOST)
    assert result["failed"]
    assert not result["changed"]
    assert "another run has changed the node since" in result["msg"]
    assert action.guards[-1] == {"token": "t1"}
    assert clock.now < 20, "nothing to wait for"


def test_tried_again_until_it_comes_through(clock: Clock) -> None:
    action = Action(clock, apply=[APPLIED], confirm=[LOST, {"unreachable": True, "msg": "?"}, {"confirmed": True}])
    assert action.run(task_vars=HOST) == {"changed": True}
    assert len(action.calls) == 4


@pytest.mark.parametrize("result", [{"changed": False}, {"failed": True, "msg": "nft refuses"}, {"changed": True}])
def test_nothing_armed_nothing_confirmed(clock: Clock, result: dict[str, Any]) -> None:
    action = Action(clock, apply=[result])
    assert action.run(task_vars=HOST) == result
    assert action.calls == [("apply", "first")]


def test_locked_out_and_taken_back(clock: Clock) -> None:
    action = Action(clock, apply=[APPLIED], confirm=[LOST], status=[{"state": "armed"}, {"state": "rolled_back"}])
    result = action.run(task_vars=HOST)
    assert result["failed"]
    assert result["state"] == "rolled_back"
    assert not result["changed"]
    assert "The rules of n1 were not confirmed" in result["msg"]
    assert "they were taken back" in result["msg"]
    assert "Connection timed out" in result["msg"]
    assert clock.now >= 22, "the node had all of its time"


def test_the_last_try_comes_after_the_roll_back(clock: Clock) -> None:
    action = Action(clock, apply=[APPLIED], confirm=[LOST, {"confirmed": False}], status=[{"state": "rolled_back"}])
    result = action.run(task_vars=HOST)
    assert "Connection timed out" in result["msg"], "why the tries before failed"
    assert clock.now < 20, "no need to wait for what has happened"


def test_confirmed_but_not_kept(clock: Clock) -> None:
    failed = {"failed": True, "msg": "systemctl: no"}
    action = Action(clock, apply=[APPLIED], confirm=[failed], status=[{"state": "confirmed"}])
    result = action.run(task_vars=HOST)
    assert result["failed"]
    assert result["changed"]
    assert "systemctl: no" in result["msg"]


def test_nobody_answers_any_more(clock: Clock) -> None:
    action = Action(clock, apply=[APPLIED], confirm=[LOST], status=[LOST])
    result = action.run(task_vars=HOST)
    assert result["failed"]
    assert "not known" in result["msg"]
