"""The drain module against a stand-in systemctl that keeps units as JSON, and a real HTTP server for the metrics."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
UNITS = ["vllm-canary@*.timer", "vllm-watch@*.timer", "vllm@*.service", "ray-worker.service", "ray-head.service"]

# `show` answers patterns by what is loaded, and a full name that is not there with LoadState=not-found.
SYSTEMCTL = """#!{python}
import fnmatch, json, sys
store = {store!r}
with open(store) as handle:
    state = json.load(handle)
verb, names = sys.argv[1], sys.argv[sys.argv.index("--") + 1 :]
blocks = []
if verb == "show":
    for name in names:
        found = [unit for unit in state["units"] if fnmatch.fnmatchcase(unit, name)]
        for unit in found:
            lines = dict(state["units"][unit], Id=unit).items()
            blocks.append("".join(f"{{key}}={{value}}\\n" for key, value in lines))
        if not found and "*" not in name:
            blocks.append(f"Id={{name}}\\nLoadState=not-found\\nActiveState=inactive\\nSubState=dead\\nUnitFileState=\\n")
    print("\\n".join(blocks), end="")
    sys.exit(0)
state["calls"].append(" ".join(word for word in sys.argv[1:] if word != "--"))
rc = 0
for name in names:
    unit = state["units"][name]
    if verb == "stop" or (verb == "disable" and "--now" in sys.argv):
        if unit.get("sticks"):
            rc = 1
            print(f"Job for {{name}} canceled.", file=sys.stderr)
        else:
            unit.update(ActiveState="inactive", SubState="dead")
    if verb in ("enable", "disable"):
        unit["UnitFileState"] = verb + "d"
    if verb == "start":
        unit.update(json.loads(unit.get("starts", '{{"ActiveState": "active", "SubState": "running"}}')))
with open(store, "w") as handle:
    json.dump(state, handle)
sys.exit(rc)
"""
RUNS = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "UnitFileState": "enabled"}
RESTS = {"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "UnitFileState": "disabled"}


class Node:
    """A folder with programs and records."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder = folder
        self.run_module = run
        self.store = folder / "state.json"
        self.record_file = folder / "records" / "drained-reboot.json"
        programs = {
            "systemctl": SYSTEMCTL.format(python=sys.executable, store=str(self.store)),
            "journalctl": "#!/bin/sh\necho 'the last words'\n",
        }
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.write(
            {
                "vllm-canary@tiny.timer": RUNS,
                "vllm@tiny.service": RUNS,
                "vllm@off.service": RESTS,
                "ray-worker.service": RUNS,
                "ssh.service": RUNS,
            }
        )

    def write(self, units: dict[str, dict[str, str]]) -> None:
        self.store.write_text(json.dumps({"units": units, "calls": []}))

    def units(self) -> dict[str, dict[str, str]]:
        units: dict[str, dict[str, str]] = json.loads(self.store.read_text())["units"]
        return units

    def change(self, name: str, **values: str) -> None:
        self.write({**self.units(), name: {**self.units().get(name, RUNS), **values}})

    def calls(self) -> list[str]:
        calls: list[str] = json.loads(self.store.read_text())["calls"]
        return calls

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.record_file.read_text())
        return record

    def reboot(self) -> None:
        """Another boot: units that are enabled have started, and the record is of the boot before."""
        for name, unit in self.units().items():
            state = {"ActiveState": "active"} if unit["UnitFileState"] == "enabled" else {"ActiveState": "inactive"}
            self.change(name, **state)
        record = self.record()
        record["boot_id"] = "of the boot before"
        self.record_file.write_text(json.dumps(record))

    def run(self, state: str, **options: Any) -> dict[str, Any]:
        options = {"units": UNITS if state == "drained" else [], "directory": str(self.record_file.parent)} | options
        return self.run_module("drain", programs=str(self.folder), state=state, name="reboot", **options)


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path, run: Run) -> Node:
    return Node(tmp_path, run)


class Server:
    """Answers /metrics as vLLM 0.33 does; each request shows the next count, the last one for ever."""

    def __init__(self, counts: list[int]) -> None:
        outer = self
        self.counts, self.asked = counts, 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                count = outer.counts[min(outer.asked, len(outer.counts) - 1)]
                outer.asked += 1
                if count < 0:
                    self.send_error(503)
                    return
                text = (
                    "# TYPE vllm:num_requests_running gauge\n"
                    f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {count}.0\n'
                    'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0\n'
                    'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 91.0\n'
                )
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(name="serve")
def fixture_serve() -> Iterator[Callable[[list[int]], Server]]:
    servers: list[Server] = []

    def serve(counts: list[int]) -> Server:
        servers.append(Server(counts))
        return servers[-1]

    yield serve
    for server in servers:
        server.server.shutdown()


def test_a_drained_node_runs_nothing_and_stays_so_at_boot(node: Node) -> None:
    result = node.run("drained", remember={"reasons": ["why"]})
    assert result["changed"]
    assert result["units"] == ["vllm-canary@tiny.timer", "ray-worker.service", "vllm@tiny.service"]
    # The canary first: it would start again what is being stopped. Then both at once, so that systemd keeps the order.
    assert node.calls() == [
        "disable --quiet --now vllm-canary@tiny.timer",
        "disable --quiet ray-worker.service vllm@tiny.service",
        "stop ray-worker.service vllm@tiny.service",
    ]
    assert node.units()["ssh.service"] == RUNS
    assert node.record()["units"] == {
        name: {"enabled": True, "start": True}
        for name in ("vllm-canary@tiny.timer", "ray-worker.service", "vllm@tiny.service")
    }
    assert node.record()["remember"] == {"reasons": ["why"]}
    assert not node.run("drained", remember={"reasons": ["why"]})["changed"]
    node.reboot()
    assert {name for name, unit in node.units().items() if unit["ActiveState"] == "active"} == {"ssh.service"}


def test_what_ran_runs_again_and_nothing_else(node: Node) -> None:
    before = node.units()
    node.run("drained")
    node.reboot()
    result = node.run("admitted")
    assert result["changed"]
    assert node.units() == before
    assert not node.record_file.exists()
    again = node.run("admitted")
    assert (again["changed"], again["record"]) == (False, None)


def test_check_mode_tells_and_does_nothing(node: Node) -> None:
    before = node.units()
    result = node.run("drained", check=True)
    assert result["changed"]
    assert "vllm@tiny.service: stopped" in result["diff"]["after"]
    assert (node.units(), node.calls(), node.record_file.exists()) == (before, [], False)
    node.run("drained")
    result = node.run("admitted", check=True)
    assert sorted(result["units"]) == ["ray-worker.service", "vllm-canary@tiny.timer", "vllm@tiny.service"]
    assert node.record_file.exists()


def test_a_run_that_was_killed_half_way_is_made_up_for(node: Node) -> None:
    """The first run got as far as the canary: the second must not forget that it ran."""
    node.run("drained")
    node.change("ray-worker.service", ActiveState="active", UnitFileState="enabled")
    node.change("vllm@tiny.service", ActiveState="active", UnitFileState="enabled")
    node.run("drained")
    assert sorted(node.record()["units"]) == ["ray-worker.service", "vllm-canary@tiny.timer", "vllm@tiny.service"]
    assert node.units()["vllm@tiny.service"]["ActiveState"] == "inactive"


def test_a_unit_that_is_still_stopping_was_running(node: Node) -> None:
    node.run("drained")
    node.change("vllm@tiny.service", ActiveState="deactivating", SubState="stop-sigterm")
    assert node.run("drained")["units"] == ["vllm@tiny.service"]
    assert node.record()["units"]["vllm@tiny.service"] == {"enabled": True, "start": True}


def test_record_is_written_before_anything_stops(node: Node) -> None:
    node.change("ray-worker.service", sticks="yes")
    result = node.run("drained")
    assert result["failed"]
    assert "Job for ray-worker.service canceled" in result["msg"]
    assert result["msg"].startswith("ray-worker.service did not stop"), "the one that hangs, not all that were asked"
    assert "systemctl kill --signal=KILL ray-worker.service" in result["msg"]
    assert result["record"] == node.record()
    assert "ray-worker.service" in node.record()["units"]


def test_a_failed_engine_that_is_enabled_is_started_again(node: Node) -> None:
    """A driver that does not fit its library is why engines fail, and why nodes are rebooted."""
    node.change("vllm@tiny.service", ActiveState="failed", SubState="failed")
    node.run("drained")
    assert node.record()["units"]["vllm@tiny.service"] == {"enabled": True, "start": True}
    node.run("admitted")
    assert node.units()["vllm@tiny.service"]["ActiveState"] == "active"
    assert any(call.startswith("reset-failed") for call in node.calls())


def test_started_by_hand_is_started_but_not_enabled(node: Node) -> None:
    node.change("vllm@off.service", ActiveState="active")
    node.run("drained")
    node.run("admitted")
    unit = node.units()["vllm@off.service"]
    assert (unit["ActiveState"], unit["UnitFileState"]) == ("active", "disabled")


def test_waits_for_requests_in_flight(node: Node, serve: Callable[[list[int]], Server]) -> None:
    server = serve([2, 1, 0])
    result = node.run("drained", wait_for=[server.url])
    assert server.asked == 3
    assert (result["cut_off"], result["units"][0]) == (0, "vllm-canary@tiny.timer")
    assert "warnings" not in result


def test_cuts_off_what_does_not_end(node: Node, serve: Callable[[list[int]], Server]) -> None:
    result = node.run("drained", wait_for=[serve([3]).url, "http://127.0.0.1:9"], wait_timeout=1)
    assert result["cut_off"] == 3
    assert "3 requests were still in flight after wait_timeout=1 s" in str(result["warnings"])
    assert node.units()["vllm@tiny.service"]["ActiveState"] == "inactive"


def test_a_server_that_does_not_tell_is_waited_for(node: Node, serve: Callable[[list[int]], Server]) -> None:
    """Too busy to answer its metrics is when it has the most requests."""
    server = serve([-1, 2, 0])
    result = node.run("drained", wait_for=[server.url], wait_timeout=20)
    assert (server.asked, result["cut_off"], result.get("warnings")) == (3, 0, None)


def test_a_server_that_never_tells_is_named(node: Node, serve: Callable[[list[int]], Server]) -> None:
    server = serve([-1])
    result = node.run("drained", wait_for=[server.url, "http://127.0.0.1:1"], wait_timeout=1)
    (warning,) = result["warnings"]
    assert f"{server.url} did not say" in str(warning)
    assert "127.0.0.1:1," not in str(warning), "nobody listens there, so nothing is in flight"


def test_nothing_is_waited_for_where_nothing_runs(node: Node, serve: Callable[[list[int]], Server]) -> None:
    server = serve([5])
    node.write({"vllm@off.service": RESTS})
    assert node.run("drained", wait_for=[server.url])["units"] == []
    assert server.asked == 0
    assert node.run("admitted")["units"] == []
    assert not node.record_file.exists()


def test_a_unit_that_does_not_come_up_keeps_the_record(node: Node) -> None:
    node.run("drained")
    node.change("vllm@tiny.service", starts='{"ActiveState": "failed", "SubState": "failed"}')
    result = node.run("admitted")
    assert result["failed"]
    assert "vllm@tiny.service did not come up" in result["msg"]
    assert "the last words" in result["msg"]
    assert node.record_file.exists()


def test_time_is_up(node: Node) -> None:
    node.run("drained")
    node.change("vllm@tiny.service", starts='{"ActiveState": "activating", "SubState": "auto-restart"}')
    result = node.run("admitted", timeout=1)
    assert "vllm@tiny.service did not come up within timeout=1 seconds" in result["msg"]


def test_waiting_for_other_nodes_is_as_good_as_running(node: Node) -> None:
    """Its start waits for the whole Ray cluster, whose other nodes may still have their turn."""
    node.run("drained")
    node.change("vllm@tiny.service", starts='{"ActiveState": "activating", "SubState": "start-pre"}')
    assert not node.run("admitted", timeout=1).get("failed")


def test_an_instance_that_was_retired_meanwhile_stays_away(node: Node) -> None:
    """Its unit and timer can still be loaded from their templates, but there is nothing to run."""
    node.run("drained")
    node.change("vllm@tiny.service", LoadState="bad-setting")
    result = node.run("admitted")
    assert not result.get("failed")
    assert result["units"] == ["ray-worker.service"]
    assert node.units()["vllm-canary@tiny.timer"]["ActiveState"] == "inactive"


def test_query_reads_only(node: Node) -> None:
    assert node.run("query")["record"] is None
    node.run("drained", remember={"a": 1})
    result = node.run("query")
    assert (result["changed"], result["record"]["remember"]) == (False, {"a": 1})


def test_reasons_have_their_own_records(node: Node) -> None:
    """Somebody else's maintenance is not ended by a reboot."""
    node.run_module(
        "drain",
        programs=str(node.folder),
        state="drained",
        name="maintenance",
        units=UNITS,
        directory=str(node.record_file.parent),
    )
    node.run("drained")
    node.reboot()
    node.run("admitted")
    assert node.units()["vllm@tiny.service"]["ActiveState"] == "inactive"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"units": null}', "\xff"])
def test_a_broken_record_is_told(node: Node, text: str) -> None:
    node.record_file.parent.mkdir()
    node.record_file.write_text(text, encoding="latin-1")
    result = node.run("admitted")
    assert result["failed"]
    assert str(node.record_file) in result["msg"]
    assert "playbooks/serve.yml" in result["msg"]


def test_the_name_is_no_path(node: Node) -> None:
    result = node.run_module("drain", programs=str(node.folder), state="query", name="../x")
    assert result["failed"]
    assert "'../x'" in result["msg"]
