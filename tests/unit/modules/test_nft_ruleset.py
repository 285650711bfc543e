"""The firewall module and its guard on a real nftables, in a network namespace of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils import guard as guard_module
from ansible_collections.ironrack.vllm.plugins.module_utils.guard import Guard, GuardError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import firewall, nft

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
        result = self.module(ruleset, **more)
        assert result["changed"]
        assert self.confirm(ruleset, result, **more)

    def confirm(self, ruleset: str, result: dict[str, Any], **more: Any) -> bool:
        """Whether the change that a result tells of is confirmed."""
        more["guard"] = {"token": result["guard"]["token"]}
        return bool(self.module(ruleset, step="confirm", **more)["confirmed"])

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
    assert first["guard"] == {"name": "firewall", "seconds": 60, "token": first["guard"]["token"]}
    assert "dport 22" in host.table()
    assert not host.file("etc/ironrack/firewall.nft").exists(), "unconfirmed rules do not outlive a boot"
    assert host.module(TEXT % 22, step="status")["state"] == "armed"
    assert not host.module(TEXT % 22, step="confirm")["confirmed"], "by nobody who does not know what"
    assert host.confirm(TEXT % 22, first)
    assert host.file("etc/ironrack/firewall.nft").read_text() == TEXT % 22
    again = host.module(TEXT % 22)
    assert not again["changed"]
    assert "guard" not in again


def test_who_sent_echo_requests_is_no_change(host: Host) -> None:
    """A flood fills a set of the table with its sources, and says nothing of the rules."""
    found = {"host": "n1", "mode": "trusted_cluster", "interface": "eth1", "trusted_interfaces": [], "rules": []}
    ruleset = nft.render(found)
    host.apply(ruleset)
    bare = host.table()
    for version, start in ((4, "198.51.100."), (6, "2001:db8::")):
        some = ", ".join(f"{start}{number} limit rate 100/second burst 200 packets" for number in range(1, 9))
        host.load(f"add element inet ironrack echo_{version} {{ {some} }}\n")
    assert host.table() != bare, "nft lists them"
    assert not host.module(ruleset)["changed"]
    # They are not what an unconfirmed change goes back to either.
    result = host.module(TEXT % 22, seconds=60)
    before = host.file("run/ironrack/firewall.before").read_text()
    assert "198.51.100.1" not in before and "set echo_4" in before
    assert host.confirm(TEXT % 22, result)


def test_not_confirmed_is_taken_back(host: Host) -> None:
    host.apply(TEXT % 22)
    before = host.table()
    late = host.module(TEXT % 23, seconds=1)
    assert "dport 23" in host.table()
    wait_for("rolled_back", Guard("firewall", root=str(host.file("run/ironrack/guard"))))
    end = time.monotonic() + 5
    while host.table() != before and time.monotonic() < end:
        time.sleep(0.1)
    assert host.table() == before
    assert not host.confirm(TEXT % 23, late), "too late"
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
    assert host.confirm(TEXT % 22, result)
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


ACCEPTS = "add table ip filter\nadd chain ip filter INPUT { type filter hook %s priority 0; policy accept; }\n"


@pytest.mark.parametrize(
    ("rules", "drops"),
    [
        ("add rule ip filter INPUT tcp dport 22 accept\nadd rule ip filter INPUT counter drop\n", True),
        ("add rule ip filter INPUT counter reject\n", True),
        ("add rule ip filter INPUT tcp dport 23 drop\nadd rule ip filter INPUT ip saddr 192.0.2.1 reject\n", False),
        ("add rule ip filter INPUT counter accept\nadd rule ip filter INPUT drop\n", False),
        ("add chain ip filter END\nadd rule ip filter END log drop\nadd rule ip filter INPUT jump END\n", True),
        ("add chain ip filter END\nadd rule ip filter END drop\nadd rule ip filter INPUT iif lo goto END\n", False),
        ("add chain ip filter END\nadd rule ip filter END return\nadd rule ip filter INPUT jump END\n", False),
        ("add chain ip filter END\nadd rule ip filter INPUT goto END\nadd rule ip filter INPUT drop\n", False),
    ],
)
@pytest.mark.parametrize("hook", ["input", "prerouting"])
def test_a_last_rule_that_drops_is_a_firewall_too(host: Host, rules: str, drops: bool, hook: str) -> None:
    host.load(ACCEPTS % hook + rules)
    result = host.module(TEXT % 22)
    assert bool(result.get("failed")) == drops, result
    assert not drops or "chain INPUT of the table ip filter drops" in result["msg"]


def test_whoever_was_let_in_before_is_known(host: Host) -> None:
    """By the table in force, which is what the next controller asks for."""
    found: dict[str, Any] = {"host": "n1", "mode": "trusted_cluster", "interface": None, "admin_networks": []}
    found |= {"ssh_ports": [22], "trusted_interfaces": [], "rules": [{"source": "admins", "networks": []}]}
    found["rules"][0] |= {"ports": [[22, 22]], "protocol": "tcp", "interface": None, "purpose": "SSH"}
    assert host.module("", step="status")["present"] == []
    before: list[str] = []
    for client in ("192.0.2.1", "192.0.2.2", "2001:db8::7"):
        text = nft.render(firewall.admit(found, f"{client} 50000 192.0.2.9 22", before))
        host.apply(text)
        before = host.module(text, step="status")["present"]
    assert before == ["192.0.2.1", "192.0.2.2", "2001:db8::7"]
    again = nft.render(firewall.admit(found, "192.0.2.1 50000 192.0.2.9 22", before))
    assert not host.module(again)["changed"], "the first controller finds what it made"


def test_rules_of_another_controller_wait(host: Host) -> None:
    first = host.module(TEXT % 23, guard={"by": "a@one"})
    refused = host.module(TEXT % 24, guard={"by": "b@two"})
    assert "a@one has changed this node" in refused["msg"]
    assert "dport 23" in host.table()
    assert host.confirm(TEXT % 23, first)
    second = host.module(TEXT % 24, guard={"by": "b@two"})
    assert not host.confirm(TEXT % 23, first)
    assert host.module(TEXT % 23, step="status", guard=first["guard"])["state"] == "replaced"
    assert host.confirm(TEXT % 24, second)


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
    assert not guard.confirm(guard.token)


def test_guard_confirmed_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    guard = Guard("sshd", 1, str(tmp_path / "guard"))
    guard.arm([str(file)])
    file.write_text("after")
    assert guard.confirm(guard.token)
    assert guard.confirm(guard.token), "an answer that was lost is asked for again"
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
    assert later.confirm(later.token)


def test_guard_reverts_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    guard = Guard("sshd", 30, str(tmp_path / "guard"))
    guard.arm([str(file)])
    file.write_text("after")
    guard.revert()
    assert not file.exists()
    assert guard.state() == "rolled_back"


def test_two_controllers_do_not_confirm_each_other(tmp_path: Path) -> None:
    """The second one is refused as long as the first one has time. The first one's token is not good for it later."""
    file = tmp_path / "file"
    file.write_text("before")
    root = str(tmp_path / "guard")
    first, second = Guard("sshd", 60, root, "a@one"), Guard("sshd", 60, root, "b@two")
    first.arm([str(file)])
    file.write_text("first")
    with pytest.raises(GuardError, match=r"a@one has changed this node at .* run again in 6\d s"):
        second.arm([str(file)])
    with pytest.raises(GuardError):
        second.clear()
    assert file.read_text() == "first"
    assert not second.confirm(second.token)
    # The first one's time is over, and its timer has died.
    forget(tmp_path, until=0)
    second.clear()
    assert file.read_text() == "before"
    second.arm([str(file)])
    file.write_text("second")
    assert not first.confirm(first.token)
    assert first.state(first.token) == "replaced"
    assert second.state(second.token) == "armed"
    assert second.confirm(second.token)
    assert not first.confirm(first.token)


def test_nobody_waits_for_what_was_before_the_boot(tmp_path: Path) -> None:
    file = tmp_path / "file"
    Guard("sshd", 60, str(tmp_path / "guard"), "a@one").arm([str(file)])
    file.write_text("after")
    forget(tmp_path, boot="another")
    Guard("sshd", 60, str(tmp_path / "guard"), "b@two").clear()
    assert not file.exists()


def forget(folder: Path, **changed: Any) -> None:
    about = folder / "guard/sshd/about"
    about.write_text(json.dumps(json.loads(about.read_text()) | changed))


def test_only_one_of_many_arms(tmp_path: Path) -> None:
    """At the same time, each in a process of its own."""
    code = f"""import sys
sys.path.insert(0, "{ROOT}/collections")
from ansible_collections.ironrack.vllm.plugins.module_utils.guard import Guard, GuardError
guard = Guard("sshd", 30, sys.argv[1], sys.argv[2])
try:
    guard.arm()
    print(guard.token)
except GuardError:
    pass
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"u@{number}"], stdout=subprocess.PIPE, text=True)
        for number in range(4)
    ]
    tokens = "".join(process.communicate(timeout=60)[0] for process in running).split()
    assert len(tokens) == 1
    assert Guard("sshd", root=str(tmp_path)).confirm(tokens[0])


def test_one_waits_for_the_other(tmp_path: Path) -> None:
    guard = Guard("sshd", 30, str(tmp_path))
    with guard.locked():
        thread = threading.Thread(target=Guard("sshd", 30, str(tmp_path)).arm)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert guard.state() == "none"
    thread.join(10)
    assert guard.state() == "armed"


class Boot:
    """Files under a guard that lasts, in a folder that stands for the root of the file system."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # No systemd here; what it would run at boot is read from the unit.
        monkeypatch.setattr(guard_module, "SYSTEMD", str(root / "nowhere"))
        self.units = root / "units"
        self.file, self.told = root / "file", root / "told"
        self.file.write_text("before")
        self.guard = Guard("sshd", 60, str(root / "lib"), "a@one", str(self.units))
        self.unit = self.units / "ironrack-guard-boot-sshd.service"
        self.link = self.units / "sysinit.target.wants" / self.unit.name

    def arm(self) -> None:
        self.guard.arm([str(self.file)], [["touch", str(self.told)]])
        self.file.write_text("after")

    def boot(self) -> None:
        """What systemd does with the unit's command."""
        text = self.unit.read_text()
        command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
        subprocess.run(shlex.split(command.partition("=")[2]), check=True, timeout=30)


@pytest.fixture(name="boot")
def fixture_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Boot:
    return Boot(tmp_path, monkeypatch)


def test_a_boot_before_the_confirmation_takes_files_back(boot: Boot) -> None:
    boot.arm()
    text = boot.unit.read_text()
    assert boot.link.resolve() == boot.unit
    assert {"ssh.service", "ssh.socket", "sshd.service"} <= set(re.findall(r"(?m)^Before=(.*)$", text)[0].split())
    boot.boot()
    assert boot.file.read_text() == "before"
    assert not boot.told.exists(), "sshd, which has not started yet, is not waited for"
    assert boot.guard.state() == "rolled_back"
    assert not boot.link.is_symlink()
    assert not boot.unit.exists()


def test_a_node_that_goes_down_in_the_middle_of_it(boot: Boot) -> None:
    boot.arm()
    os.rename(boot.guard.armed, boot.guard.rolled_back)  # noqa: PTH104 - as the script does, which gets no further
    boot.boot()
    assert boot.file.read_text() == "before"
    assert not boot.unit.exists()


@pytest.mark.parametrize("end", ["confirm", "revert"])
def test_no_unit_is_left(boot: Boot, end: str) -> None:
    boot.arm()
    if end == "confirm":
        assert boot.guard.confirm(boot.guard.token)
    else:
        boot.guard.revert()
        assert boot.told.exists()
    assert boot.file.read_text() == ("after" if end == "confirm" else "before")
    assert not boot.link.is_symlink()
    assert not boot.unit.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_guard_that_cannot_be_armed(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(GuardError):
        Guard("sshd", 1, str(tmp_path / "guard")).arm()
