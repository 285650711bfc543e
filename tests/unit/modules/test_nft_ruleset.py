"""The firewall module and its guard on a real nftables, in a network namespace of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils.guard import Guard, GuardError

ROOT = Path(__file__).resolve().parents[3]
# What the lab proves on a booted node needs systemd; here the root is a folder, so the module finds none.
RUN = f"""import sys
sys.path[:0] = ["{ROOT}/collections", "{ROOT}/plugins/modules"]
import nft_ruleset
nft_ruleset.ROOT = sys.argv.pop()
nft_ruleset.WATCH_SECONDS = 0
nft_ruleset.main()
"""
TEXT = """table inet ironrack
delete table inet ironrack
table inet ironrack {
    chain input {
        type filter hook input priority filter; policy drop;
        tcp dport %d accept
    }
}
"""


class Host:
    """A network namespace, and a folder that stands for the root of its file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.holder = subprocess.Popen(["unshare", "-rn", "sh", "-c", "echo; exec sleep 120"], stdout=subprocess.PIPE)
        assert self.holder.stdout
        self.holder.stdout.readline()

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self.holder.pid}", "--net", "--user", "--preserve-credentials"]
        return subprocess.run([*enter, *command], input=text, capture_output=True, text=True, timeout=60, check=False)

    def module(self, ruleset: str, check: bool = False, **more: Any) -> dict[str, Any]:
        arguments = {"rules": {}, "ruleset": ruleset, "_ansible_check_mode": check, "_ansible_diff": True, **more}
        text = json.dumps({"ANSIBLE_MODULE_ARGS": arguments})
        done = self.run(sys.executable, "-c", RUN, str(self.root), text=text)
        try:
            result: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            pytest.fail(f"no JSON: {done.stdout}{done.stderr}")
        return result

    def load(self, text: str) -> None:
        """What somebody else has in nftables."""
        done = self.run("nft", "-f", "-", text=text)
        assert done.returncode == 0, done.stderr

    def table(self) -> str:
        return self.run("nft", "-s", "list", "table", "inet", "ironrack").stdout

    def apply(self, ruleset: str, **more: Any) -> None:
        assert self.module(ruleset, **more)["changed"]
        assert self.module(ruleset, step="confirm", **more)["confirmed"]

    def file(self, path: str) -> Path:
        return self.root / path


@pytest.fixture(name="host")
def fixture_host(tmp_path: Path) -> Iterator[Host]:
    if shutil.which("nft") is None or shutil.which("unshare") is None:
        pytest.skip("needs nft (package nftables) and unshare; the scenario firewall shows the same on booted nodes")
    host = Host(tmp_path)
    try:
        if host.run("nft", "list", "tables").returncode:
            pytest.skip("needs the right to use nftables in a network namespace; the scenario firewall has it")
        yield host
    finally:
        host.holder.terminate()
        host.holder.wait()


def wait_for(state: str, guard: Guard, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while guard.state() != state:
        assert time.monotonic() < end, guard.state()
        time.sleep(0.1)


# The module


def test_check_changes_nothing(host: Host) -> None:
    result = host.module(TEXT % 22, check=True)
    assert result["changed"]
    assert "tcp dport 22" in result["diff"]["after"]
    assert host.table() == ""
    assert list(host.root.iterdir()) == []


def test_apply_confirm_and_no_second_change(host: Host) -> None:
    first = host.module(TEXT % 22)
    assert first["guard"] == {"name": "firewall", "seconds": 60}
    assert "dport 22" in host.table()
    assert not host.file("etc/ironrack/firewall.nft").exists(), "unconfirmed rules do not outlive a boot"
    assert host.module(TEXT % 22, step="status")["state"] == "armed"
    assert host.module(TEXT % 22, step="confirm")["confirmed"]
    assert host.file("etc/ironrack/firewall.nft").read_text() == TEXT % 22
    again = host.module(TEXT % 22)
    assert not again["changed"]
    assert "guard" not in again


def test_not_confirmed_is_taken_back(host: Host) -> None:
    host.apply(TEXT % 22)
    before = host.table()
    host.module(TEXT % 23, seconds=1)
    assert "dport 23" in host.table()
    wait_for("rolled_back", Guard("firewall", root=str(host.file("run/ironrack/guard"))))
    end = time.monotonic() + 5
    while host.table() != before and time.monotonic() < end:
        time.sleep(0.1)
    assert host.table() == before
    assert not host.module(TEXT % 23, step="confirm")["confirmed"], "too late"
    assert host.file("etc/ironrack/firewall.nft").read_text() == TEXT % 22
    assert not host.module(TEXT % 22)["changed"]


def test_first_rules_not_confirmed_leave_no_table(host: Host) -> None:
    host.module(TEXT % 23, seconds=1)
    wait_for("rolled_back", Guard("firewall", root=str(host.file("run/ironrack/guard"))))
    end = time.monotonic() + 5
    while host.table() and time.monotonic() < end:
        time.sleep(0.1)
    assert host.table() == ""


def test_an_interrupted_run_is_taken_back_first(host: Host) -> None:
    host.apply(TEXT % 22)
    host.module(TEXT % 23)
    host.apply(TEXT % 24)
    assert "dport 24" in host.table()
    host.module(TEXT % 25)
    assert not host.module(TEXT % 24)["changed"], "what was never confirmed is gone"


def test_what_somebody_changed_is_put_right(host: Host) -> None:
    host.apply(TEXT % 22)
    host.run("nft", "add", "rule", "inet", "ironrack", "input", "tcp", "dport", "1", "accept")
    assert host.module(TEXT % 22, check=True)["changed"]
    host.apply(TEXT % 22)
    assert "dport 1 " not in host.table()
    host.run("nft", "flush", "ruleset")
    host.apply(TEXT % 22)
    assert "dport 22" in host.table()


def test_tables_of_others_are_kept(host: Host) -> None:
    host.load("add table ip nat\nadd chain ip nat DOCKER\nadd table inet mine\nadd chain inet mine x\n")
    result = host.module(TEXT % 22)
    assert any("Docker" in note for note in result["notes"])
    host.module(TEXT % 22, step="confirm")
    host.module("")
    tables = host.run("nft", "list", "tables").stdout
    assert "inet mine" in tables
    assert "ip nat" in tables
    assert "ironrack" not in tables


def test_another_firewall_is_refused_or_kept(host: Host) -> None:
    chain = "{ type filter hook input priority 0; policy drop; }"
    host.load(f"add table ip filter\nadd chain ip filter INPUT {chain}\n")
    result = host.module(TEXT % 22)
    assert result["failed"]
    assert "ip filter" in result["msg"]
    assert "firewall_foreign: keep" in result["msg"]
    assert host.table() == ""
    kept = host.module(TEXT % 22, foreign="keep")
    assert kept["changed"]
    assert any("ip filter" in note for note in kept["notes"])


def test_ufw_is_named(host: Host) -> None:
    conf = host.file("etc/ufw/ufw.conf")
    conf.parent.mkdir(parents=True)
    conf.write_text("LOGLEVEL=low\nENABLED=yes\n")
    assert "ufw is enabled" in host.module(TEXT % 22)["msg"]
    conf.write_text("ENABLED=no\n")
    assert host.module(TEXT % 22)["changed"]


def test_text_that_nft_refuses_changes_nothing(host: Host) -> None:
    host.apply(TEXT % 22)
    before = host.table()
    result = host.module("table inet ironrack { nonsense }")
    assert "nothing was changed" in result["msg"]
    assert host.table() == before
    assert host.module(TEXT % 22, step="status")["state"] == "confirmed", "no roll-back was armed"


def test_kernel_settings(host: Host) -> None:
    setting = host.file("proc/sys/net/ipv4/ip_local_port_range")
    setting.parent.mkdir(parents=True)
    setting.write_text("32768\t60999\n")
    kernel = {"net.ipv4.ip_local_port_range": "50000 60999"}
    host.apply(TEXT % 22, kernel=kernel)
    assert setting.read_text().split() == ["50000", "60999"]
    assert "ip_local_port_range = 50000 60999" in host.file("etc/sysctl.d/61-ironrack-firewall.conf").read_text()
    setting.write_text("32768 60999\n")
    again = host.module(TEXT % 22, kernel=kernel)
    assert again["changed"]
    assert "guard" not in again, "the rules are in force: nobody can be locked out by this"
    host.module(TEXT % 22, kernel=kernel)
    host.apply(TEXT % 23)
    assert not host.file("etc/sysctl.d/61-ironrack-firewall.conf").exists()
    assert setting.read_text().split() == ["32768", "60999"], "as it was before"
    assert not host.module(TEXT % 23)["changed"]


def test_ports_that_the_site_reserves_stay_reserved(host: Host) -> None:
    setting = host.file("proc/sys/net/ipv4/ip_local_reserved_ports")
    setting.parent.mkdir(parents=True)
    setting.write_text("40000-40010,44217\n")
    kernel = {"net.ipv4.ip_local_reserved_ports": "44217-44227,50000"}
    host.apply(TEXT % 22, kernel=kernel)
    assert setting.read_text() == "40000-40010,44217-44227,50000\n"
    assert not host.module(TEXT % 22, kernel=kernel)["changed"]
    assert host.module("")["changed"]
    assert setting.read_text() == "40000-40010,44217\n"
    setting.write_text("\n")
    host.apply(TEXT % 22, kernel=kernel)
    host.module("")
    assert setting.read_text() == "\n", "nothing is a value, too"


def test_a_kernel_setting_that_cannot_be_made(host: Host) -> None:
    result = host.module(TEXT % 22, kernel={"net.ipv4.ip_local_port_range": "50000 60999"})
    assert "firewall_mode: trusted_cluster" in result["msg"]
    assert host.table() == ""


def test_off_removes_every_trace(host: Host) -> None:
    assert not host.module("")["changed"]
    host.apply(TEXT % 22)
    assert host.module("", check=True)["changed"]
    assert host.table()
    assert host.module("")["changed"]
    assert host.table() == ""
    assert list(host.file("etc/ironrack").iterdir()) == []
    assert not host.module("")["changed"]


# The guard


def test_guard_puts_files_back(tmp_path: Path) -> None:
    old, new = tmp_path / "old.conf", tmp_path / "new.conf"
    old.write_text("before")
    old.chmod(0o640)
    done = tmp_path / "done"
    guard = Guard("sshd", 1, str(tmp_path / "guard"))
    guard.arm([str(old), str(new)], [["touch", str(done)]])
    old.write_text("after")
    old.chmod(0o600)
    new.write_text("after")
    assert guard.state() == "armed"
    wait_for("rolled_back", guard)
    end = time.monotonic() + 5
    while not done.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert old.read_text() == "before"
    assert old.stat().st_mode & 0o777 == 0o640
    assert not new.exists()
    assert not guard.confirm()


def test_guard_confirmed_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    guard = Guard("sshd", 1, str(tmp_path / "guard"))
    guard.arm([str(file)])
    file.write_text("after")
    assert guard.confirm()
    assert guard.confirm(), "an answer that was lost is asked for again"
    time.sleep(1.5)
    assert file.read_text() == "after"
    assert guard.state() == "confirmed"


def test_guard_of_an_earlier_run_does_not_end_the_next(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    root = str(tmp_path / "guard")
    Guard("sshd", 2, root).arm([str(file)])
    later = Guard("sshd", 30, root)
    later.arm([str(file)])
    file.write_text("after")
    time.sleep(3)
    assert later.state() == "armed"
    assert later.confirm()


def test_guard_reverts_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    guard = Guard("sshd", 30, str(tmp_path / "guard"))
    guard.arm([str(file)])
    file.write_text("after")
    guard.revert()
    assert not file.exists()
    assert guard.state() == "rolled_back"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_guard_that_cannot_be_armed(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(GuardError):
        Guard("sshd", 1, str(tmp_path / "guard")).arm()
