"""The controller's side of SSH: one file for many hosts at a time, and a password that is not the only way in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible_collections.ironrack.vllm.plugins.action import ssh_keys, sshd

ROOT = Path(__file__).resolve().parents[3]
WRITE = f"""import sys
sys.path.insert(0, "{ROOT}/collections")
from pathlib import Path
from ansible_collections.ironrack.vllm.plugins.action.ssh_keys import change
for number in range(20):
    change(Path(sys.argv[1]), lambda text: text + f"{{sys.argv[2]}}.{{number}}\\n", False)
"""


def test_hosts_write_at_the_same_time(tmp_path: Path) -> None:
    """Forks of Ansible each add their host: none may lose the line of another."""
    file = tmp_path / "new/known_hosts"
    running = [subprocess.Popen([sys.executable, "-c", WRITE, str(file), name]) for name in "abc"]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert sorted(file.read_text().split()) == sorted(f"{name}.{number}" for name in "abc" for number in range(20))
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["known_hosts"]


def test_a_check_writes_nothing(tmp_path: Path) -> None:
    assert ssh_keys.change(tmp_path / "new/file", lambda text: text + "x", True) == ("", "x")
    assert list(tmp_path.iterdir()) == []


def test_only_a_file_of_its_own_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link", Path("/dev/null"), tmp_path / "pipe/below"):
        for check in (True, False):
            with pytest.raises(AnsibleError, match=r"(?s)ssh_known_hosts_file = .* -> name"):
                ssh_keys.change(path, lambda text: text + "x", check)
    assert Path("/dev/null").is_char_device()


def test_a_file_keeps_its_mode_and_the_ends_of_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_bytes(b"by hand\r\n\xff\n")
    file.chmod(0o600)
    ssh_keys.change(file, lambda text: text + "x\n", False)
    assert file.read_bytes() == b"by hand\r\n\xff\nx\n"
    assert file.stat().st_mode & 0o777 == 0o600


class Connection:
    """A connection whose answer to a command is given."""

    def __init__(self, answer: Any, password: str | None = None) -> None:
        self.answer = answer
        self.options = {"password": password}
        self._play_context = SimpleNamespace(password=password)

    def get_option(self, name: str) -> str | None:
        return self.options[name]

    def set_option(self, name: str, value: str | None) -> None:
        self.options[name] = value

    def exec_command(self, _command: str, sudoable: bool = True) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def action(first: Connection, fresh: Connection, check: bool = False) -> Any:
    made = object.__new__(sshd.ActionModule)
    made._connection = first
    made._play_context = SimpleNamespace(password=first._play_context.password)
    made._task = SimpleNamespace(check_mode=check)
    made._fresh = lambda _first: fresh
    return made


def test_probe_needs_an_answer() -> None:
    found, keys = ssh_keys.probe(Connection((0, b"user ops\nhome /home/ops\nssh 10.0.0.9 1 10.0.0.1 22\n", b"")))
    assert (found.user, found.client, keys) == ("ops", "10.0.0.9", [])
    with pytest.raises(AnsibleError, match="does not say who is logged in: broken"):
        ssh_keys.probe(Connection((1, b"", b"broken")))


def test_without_a_password_a_key_it_was() -> None:
    never = Connection(AssertionError("no second connection is needed"))
    action(Connection((0, b"", b"")), never)._need_a_key("gpu1", "ops")


def test_a_password_beside_a_key_is_fine() -> None:
    fresh = Connection((0, b"", b""), "secret")
    action(Connection(None, "secret"), fresh)._need_a_key("gpu1", "ops")
    assert fresh.options["password"] is None, "the second connection shows that it needs none"
    assert fresh._play_context.password == "", "nor looks for one where the first one would"


def test_a_password_asked_for_counts_too() -> None:
    first = Connection(None, "secret")
    first.options["password"] = None
    with pytest.raises(AnsibleError, match="gets in no other way"):
        action(first, Connection((255, b"", b"denied")))._need_a_key("gpu1", "ops")


@pytest.mark.parametrize("answer", [(255, b"", b"denied"), AnsibleConnectionFailure("denied")])
def test_a_password_alone_is_refused(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, fresh = Connection(None, "secret"), Connection(answer, "secret")
    with pytest.raises(AnsibleError) as caught:
        action(first, fresh)._need_a_key("gpu1", "ops")
    message = str(caught.value)
    for word in ("PasswordAuthentication = no", "gpu1", "ops", "denied", "ssh_authorized_keys"):
        assert word in message
    assert "secret" not in message
    warnings: list[str] = []
    monkeypatch.setattr(sshd, "display", SimpleNamespace(warning=warnings.append))
    action(first, fresh, check=True)._need_a_key("gpu1", "ops")
    assert len(warnings) == 1, "in a check the key may be one that the run would have brought"
