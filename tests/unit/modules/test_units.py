"""The units module against a stand-in systemctl that keeps units as JSON; the lab proves it on a real systemd."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]

SYSTEMCTL = """#!{python}
import json, sys, time
store = {store!r}
with open(store) as handle:
    state = json.load(handle)
flags = [a for a in sys.argv[1:] if a.startswith("--") and a != "--"]
words = [a for a in sys.argv[1:] if not a.startswith("--")]
verb, names = words[0], words[1:]
if verb == "show":
    properties, names = words[1].split(","), words[2:]
    for name in names:
        unit = state["units"].get(name, {{"LoadState": "not-found", "ActiveState": "inactive"}})
        print("\\n".join(f"{{key}}={{unit.get(key, '')}}" for key in properties) + "\\n")
    sys.exit(0)
state["calls"].append(" ".join(sys.argv[1:]))
rc = 0
monotonic = str(int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6))
if verb == "daemon-reload":
    for unit in state["units"].values():
        unit["NeedDaemonReload"] = "no"
    state["units"].update(state.pop("new", {{}}))
for name in names:
    unit = state["units"].get(name)
    if unit is None:
        rc = 1
    elif verb in ("start", "restart"):
        if unit.get("hangs"):
            time.sleep(60)
        unit["InactiveExitTimestampMonotonic"] = monotonic
        unit["ActiveState"] = "failed" if unit.get("fails") else "active"
        unit["Result"] = "exit-code" if unit.get("fails") else "success"
        if unit.get("fails"):
            rc = 1
            unit["ExecMainStatus"] = "203"
            print(f"Job for {{name}} failed.", file=sys.stderr)
    elif verb == "stop":
        unit["ActiveState"] = "inactive"
    elif verb in ("enable", "disable"):
        unit["UnitFileState"] = verb + "d"
with open(store, "w") as handle:
    json.dump(state, handle)
sys.exit(rc)
"""


class Host:
    """A directory with stand-ins for systemctl and journalctl."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.store = folder / "state.json"
        self._program("systemctl", SYSTEMCTL.format(python=sys.executable, store=str(self.store)))
        self._program("journalctl", "#!/bin/sh\necho 'the last words'\n")
        self.save({"units": {}, "calls": []})

    def _program(self, name: str, text: str) -> None:
        program = self.path / name
        program.write_text(text)
        program.chmod(0o755)

    def save(self, state: dict[str, Any]) -> None:
        self.store.write_text(json.dumps(state))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.store.read_text())
        return state

    def unit(self, name: str, age: float | None = None, **properties: Any) -> None:
        """A known unit; age is for how many seconds it has been running."""
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        unit = {"LoadState": "loaded", "ActiveState": "inactive", "UnitFileState": "disabled", "NeedDaemonReload": "no"}
        if age is not None:
            unit |= {"ActiveState": "active", "InactiveExitTimestampMonotonic": str(int((now - age) * 1e6))}
        state = self.state()
        state["units"][name] = unit | properties
        self.save(state)

    def calls(self) -> list[str]:
        calls: list[str] = self.state()["calls"]
        return calls


@pytest.fixture(name="host")
def fixture_host(tmp_path: Path) -> Host:
    folder = tmp_path / "bin"
    folder.mkdir()
    return Host(folder)


def test_starts_and_enables_then_rests(run: Run, host: Host) -> None:
    host.unit("a.service")
    host.unit("vllm@tiny.service")
    wanted = [{"name": "a", "state": "started", "enabled": True}, {"name": "vllm@tiny.service", "state": "started"}]
    first = run("units", programs=str(host.path), units=wanted)
    assert first["changed"]
    assert first["units"]["a.service"]["actions"] == ["enable", "start"]
    assert first["units"]["a.service"]["active_state"] == "active"
    assert host.calls() == [
        "enable --quiet -- a.service",
        "reset-failed -- a.service vllm@tiny.service",
        "start -- a.service vllm@tiny.service",
    ]
    second = run("units", programs=str(host.path), units=wanted)
    assert not second["changed"]
    assert len(host.calls()) == 3


def test_restarts_what_is_older_than_a_file_or_a_link(run: Run, host: Host, tmp_path: Path) -> None:
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 1000, time.time() - 1000))
    link.symlink_to("old")
    os.utime(link, (time.time() - 10, time.time() - 10), follow_symlinks=False)
    for name, age in (("kept", 100.0), ("file", 100.0), ("link", 100.0), ("later", 5.0)):
        host.unit(f"{name}.service", age=age)
    paths = {"kept": [old], "file": [new], "link": [link], "later": [link]}
    wanted = [{"name": n, "state": "started", "restart_if_newer": [str(p) for p in ps]} for n, ps in paths.items()]
    result = run("units", programs=str(host.path), units=wanted)
    assert [n for n, unit in result["units"].items() if unit["actions"]] == ["file.service", "link.service"]
    assert result["units"]["link.service"]["reasons"] == [str(link)]
    assert "restart -- file.service link.service" in host.calls()
    assert not run("units", programs=str(host.path), units=wanted)["changed"]


def test_unit_file_and_drop_in_count_without_being_listed(run: Run, host: Host, tmp_path: Path) -> None:
    fragment, drop_in, control = tmp_path / "a.service", tmp_path / "10.conf", tmp_path / "system.control" / "c.conf"
    control.parent.mkdir()
    for path in (fragment, drop_in, control):
        path.touch()
    host.unit("a.service", age=50, FragmentPath=str(fragment))
    host.unit("b.service", age=50, DropInPaths=str(drop_in))
    host.unit("c.service", age=50, DropInPaths=str(control))
    wanted = [{"name": name, "state": "started"} for name in ("a", "b", "c")]
    result = run("units", programs=str(host.path), units=wanted)
    assert result["units"]["a.service"]["reasons"] == [str(fragment)]
    assert result["units"]["b.service"]["reasons"] == [str(drop_in)]
    assert result["units"]["c.service"]["actions"] == []


def test_time_in_the_future_warns_and_does_not_restart_for_ever(run: Run, host: Host, tmp_path: Path) -> None:
    path = tmp_path / "later"
    path.touch()
    os.utime(path, (time.time() + 3600, time.time() + 3600))
    host.unit("a.service", age=50)
    result = run(
        "units", programs=str(host.path), units=[{"name": "a", "state": "started", "restart_if_newer": [str(path)]}]
    )
    assert not result["changed"]
    assert "bears a time in the future" in str(result["warnings"])


def test_without_a_state_a_running_unit_is_restarted_for_listed_paths_only(
    run: Run, host: Host, tmp_path: Path
) -> None:
    path = tmp_path / "conf"
    path.touch()
    host.unit("runs.service", age=50)
    host.unit("rests.service")
    host.unit("bare.service", age=50, FragmentPath=str(path))
    listed = {"restart_if_newer": [str(path)]}
    wanted = [{"name": "runs", **listed}, {"name": "rests", **listed}, {"name": "bare"}]
    result = run("units", programs=str(host.path), units=wanted)
    assert [name for name, unit in result["units"].items() if unit["actions"]] == ["runs.service"]


def test_check_mode_touches_nothing(run: Run, host: Host) -> None:
    host.unit("a.service", age=50)
    host.unit("b.service", age=50, UnitFileState="enabled")
    wanted = [
        {"name": "a", "state": "started", "restart_if_newer": ["/etc/x/conf.env"]},
        {"name": "b", "state": "stopped", "enabled": False},
        {"name": "new@one.service", "state": "started", "enabled": True},
    ]
    result = run("units", programs=str(host.path), check=True, units=wanted, changed_paths=["/etc/x/conf.env"])
    assert {name: unit["actions"] for name, unit in result["units"].items()} == {
        "a.service": ["restart"],
        "b.service": ["disable", "stop"],
        "new@one.service": ["enable", "start"],
    }
    assert host.calls() == []
    assert "a.service: active, disabled, restarted for /etc/x/conf.env" in result["diff"]["after"]


def test_changed_paths_mean_nothing_outside_check_mode(run: Run, host: Host) -> None:
    host.unit("a.service", age=50)
    wanted = [{"name": "a", "state": "started", "restart_if_newer": ["/no/file"]}]
    assert not run("units", programs=str(host.path), units=wanted, changed_paths=["/no/file"])["changed"]


def test_failed_start_shows_state_and_journal(run: Run, host: Host) -> None:
    host.unit("bad.service", fails=True)
    result = run("units", programs=str(host.path), units=[{"name": "bad", "state": "started"}])
    assert result["failed"]
    for part in ("bad.service did not start", "Result=exit-code", "ExecMainStatus=203", "the last words"):
        assert part in result["msg"]


def test_timeout_names_the_unit(run: Run, host: Host) -> None:
    host.unit("slow.service", hangs=True)
    result = run("units", programs=str(host.path), units=[{"name": "slow", "state": "started"}], timeout=2)
    assert result["failed"]
    assert "within timeout=2 seconds" in result["msg"]
    assert "slow.service:\nthe last words" in result["msg"]


def test_unknown_unit_is_looked_for_again_after_a_reload(run: Run, host: Host) -> None:
    host.save({"units": {}, "calls": [], "new": {"a.service": {"LoadState": "loaded", "ActiveState": "inactive"}}})
    result = run("units", programs=str(host.path), units=[{"name": "a", "state": "started"}])
    assert result["daemon_reloaded"]
    assert result["units"]["a.service"]["active_state"] == "active"
    missing = run("units", programs=str(host.path), units=[{"name": "nope", "state": "started"}])
    assert missing["failed"]
    assert "nope.service does not exist" in missing["msg"]


def test_retiring_a_unit_that_is_gone_is_no_change(run: Run, host: Host) -> None:
    result = run("units", programs=str(host.path), units=[{"name": "gone", "state": "stopped", "enabled": False}])
    assert not result["changed"]
    assert host.calls() == []


def test_masked_and_misspelt_units_are_errors(run: Run, host: Host) -> None:
    host.unit("m.service", LoadState="masked")
    masked = run("units", programs=str(host.path), units=[{"name": "m", "state": "started"}])
    assert "systemctl unmask m.service" in masked["msg"]
    for name in ("--now.service", "a b.service", "x.servce", "a*.service"):
        assert "not the name" in run("units", programs=str(host.path), units=[{"name": name}])["msg"]
    twice = run("units", programs=str(host.path), units=[{"name": "a"}, {"name": "a.service"}])
    assert "listed twice" in twice["msg"]


def test_unit_on_its_way_up_is_waited_for_without_a_change(run: Run, host: Host) -> None:
    host.unit("a.service", age=3, ActiveState="activating", SubState="start-pre")
    result = run("units", programs=str(host.path), units=[{"name": "a", "state": "started"}])
    assert not result["changed"]
    assert host.calls() == ["start -- a.service"]


def test_no_block_only_queues(run: Run, host: Host) -> None:
    host.unit("bad.service", fails=True)
    host.unit("a.service")
    result = run("units", programs=str(host.path), units=[{"name": "a", "state": "started"}], no_block=True)
    assert result["changed"]
    assert "--no-block start -- a.service" in host.calls()


def test_reload_leaves_a_stamp_before_it_reloads(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = load("units")
    monkeypatch.setattr(units, "STAMP_DIR", str(tmp_path / "stamps"))
    seen: list[bool] = []

    class Killed(Exception):
        pass

    class Systemd:
        def must(self, *_: str) -> None:
            seen.append((tmp_path / "stamps" / "a.service").exists())
            raise Killed

    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    block = {
        "LoadState": "loaded",
        "ActiveState": "active",
        "NeedDaemonReload": "yes",
        "InactiveExitTimestampMonotonic": str(int((now - 5) * 1e6)),
    }
    wanted = {"a.service": {"state": "started", "enabled": None, "restart_if_newer": []}}
    with pytest.raises(Killed):
        units.reload_if_needed(Systemd(), wanted, {"a.service": block})
    assert seen == [True]
    # The next run finds nothing to reload, and restarts all the same.
    plan = units.Plan(wanted, {"a.service": block | {"NeedDaemonReload": "no"}})
    assert plan.actions == {"a.service": ["restart"]}
    assert plan.reasons == {"a.service": ["its unit files or drop-ins"]}


def test_start_is_told_by_the_monotonic_clock(load: Callable[[str], ModuleType]) -> None:
    units = load("units")
    offset = units.boot_clock()
    block = {"InactiveExitTimestampMonotonic": str(int((time.clock_gettime(time.CLOCK_MONOTONIC) - 60) * 1e6))}
    assert units.started_at(block, offset) == pytest.approx(time.time() - 60, abs=0.5)
    # The clock was set one hour forward after the unit had started: files keep their place relative to the start.
    assert units.started_at(block, offset + 3600) == pytest.approx(time.time() + 3600 - 60, abs=0.5)
    assert units.started_at({"InactiveExitTimestampMonotonic": "0"}, offset) is None
