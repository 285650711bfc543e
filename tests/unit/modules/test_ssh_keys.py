"""The node's side of keys: files of others are kept, keys come and go, and a removed key has to be confirmed."""

from __future__ import annotations

import getpass
import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
# As the node would run it, with a folder for the root of its file system.
RUN = f"""import sys
sys.path[:0] = ["{ROOT}/collections", "{ROOT}/plugins/modules"]
import ssh_keys
ssh_keys.ROOT = sys.argv.pop()
ssh_keys.main()
"""
ME = getpass.getuser()
ONE = "ssh-ed25519 AAAAone one"
TWO = "ssh-ed25519 AAAAtwo two"
THREE = 'from="10.0.0.1",restrict ssh-ed25519 AAAAthree three'


class Host:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / pwd.getpwnam(ME).pw_dir.lstrip("/")
        self.home.mkdir(parents=True)
        self.file = self.home / ".ssh/authorized_keys"
        self.key = self.home / ".ssh/id_ironrack"
        self.client = root / "etc/ssh/ssh_config.d/10-ironrack.conf"
        self.known = root / "etc/ssh/ssh_known_hosts"

    def module(self, check: bool = False, **more: Any) -> dict[str, Any]:
        arguments = {
            "known_hosts": "/nowhere",
            "user": ME,
            "_ansible_check_mode": check,
            "_ansible_diff": True,
            **more,
        }
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(self.root)],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        try:
            result: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            pytest.fail(f"no JSON: {done.stdout}{done.stderr}")
        return result

    def write(self, text: str) -> None:
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        self.file.write_text(text)


@pytest.fixture(name="host")
def fixture_host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_nothing_asked_nothing_written(host: Host) -> None:
    assert not host.module()["changed"]
    assert not host.file.exists()
    assert not (host.root / "etc").exists()


def test_keys_are_added_beside_those_of_others(host: Host) -> None:
    host.write(f"# mine\n{ONE}")
    assert host.module(check=True, authorized_keys=[ONE, TWO])["changed"]
    assert host.file.read_text() == f"# mine\n{ONE}"
    result = host.module(authorized_keys=[ONE, TWO])
    assert "guard" not in result, "nobody can be locked out by a key more"
    assert "AAAAtwo" in result["diff"]["after"]
    assert host.file.read_text().startswith(f"# mine\n{ONE}\n# BEGIN")
    assert host.file.read_text().count("AAAAone") == 1, "it was there"
    assert host.file.stat().st_mode & 0o777 == 0o600
    assert not host.module(authorized_keys=[ONE, TWO])["changed"]


def test_lines_of_others_stay_to_the_letter(host: Host) -> None:
    host.file.parent.mkdir(mode=0o700)
    foreign = "ssh-ed25519 AAAAhis his \u2028 key\r\n# \x0c page\n".encode()
    host.file.write_bytes(foreign)
    host.module(authorized_keys=[ONE])
    assert host.file.read_bytes().startswith(foreign + b"# BEGIN")
    assert not host.module(authorized_keys=[ONE])["changed"]


def test_a_folder_is_made_for_the_first_key(host: Host) -> None:
    host.module(authorized_keys=[ONE])
    assert host.file.parent.stat().st_mode & 0o777 == 0o700
    assert ONE in host.file.read_text()


def test_a_removed_key_has_to_be_confirmed(host: Host) -> None:
    host.module(authorized_keys=[ONE, TWO])
    result = host.module(authorized_keys=[ONE])
    assert (result["guard"]["name"], result["guard"]["seconds"]) == ("keys", 60)
    assert "AAAAtwo" not in host.file.read_text()
    assert host.module(step="status")["state"] == "armed"
    assert not host.module(step="confirm")["confirmed"], "by nobody who does not know what"
    assert host.module(step="confirm", guard=result["guard"])["confirmed"]
    assert not host.module(authorized_keys=[ONE])["changed"]


def test_not_confirmed_is_taken_back(host: Host) -> None:
    host.module(authorized_keys=[ONE, TWO])
    before = host.file.read_text()
    late = host.module(authorized_keys=[TWO], seconds=1)
    assert "AAAAone" not in host.file.read_text()
    end = time.monotonic() + 15
    while host.file.read_text() != before:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert not host.module(step="confirm", guard=late["guard"])["confirmed"]


def test_the_guard_outlives_a_boot(host: Host) -> None:
    """What was taken away is a file that stays, so what brings it back has to stay, too."""
    host.module(authorized_keys=[ONE, TWO])
    host.module(authorized_keys=[TWO])
    assert list((host.root / "var/lib/ironrack-guard/keys").glob("rollback.*"))


def test_two_controllers(host: Host) -> None:
    host.module(authorized_keys=[ONE, TWO])
    host.module(authorized_keys=[TWO], guard={"by": "a@one"})
    refused = host.module(authorized_keys=[ONE], guard={"by": "b@two"})
    assert "a@one has changed this node" in refused["msg"]
    assert "AAAAone" not in host.file.read_text()


def test_an_interrupted_run_is_taken_back_first(host: Host) -> None:
    host.module(authorized_keys=[ONE, TWO])
    host.module(authorized_keys=[TWO])
    assert not host.module(authorized_keys=[ONE, TWO])["changed"], "what was never confirmed is gone"


def test_exclusive_keeps_what_is_listed_and_the_peers(host: Host) -> None:
    host.write(f"{ONE}\n{TWO}\n")
    host.module(step="peers", between=ME, peers={"authorized_keys": [THREE], "known_hosts": [], "client_config": ""})
    result = host.module(authorized_keys=[TWO], exclusive=True, between=ME)
    assert result["guard"]
    text = host.file.read_text()
    assert "AAAAone" not in text
    assert text.count("AAAAtwo") == 1
    assert text.count("AAAAthree") == 1
    host.module(step="confirm", guard=result["guard"])
    again = host.module(authorized_keys=[TWO], exclusive=True, between=ME)
    assert not again["changed"]
    host.file.write_text(host.file.read_text() + ONE + "\n")
    assert host.module(authorized_keys=[TWO], exclusive=True, between=ME)["guard"], "one that came back goes again"


def test_a_key_pair_is_made_once_and_stays_here(host: Host) -> None:
    planned = host.module(check=True, between=ME)
    assert planned["changed"]
    assert planned["between_key"] == ""
    assert not host.key.exists()
    first = host.module(between=ME)
    assert first["between_key"].startswith("ssh-ed25519 AAAA")
    private = host.key.read_text()
    assert host.key.stat().st_mode & 0o777 == 0o600
    assert private.splitlines()[1] not in json.dumps(first), "the private part is nobody's business"
    again = host.module(between=ME)
    assert not again["changed"]
    assert again["between_key"] == first["between_key"]
    assert host.key.read_text() == private


def test_half_a_key_pair_is_made_anew(host: Host) -> None:
    first = host.module(between=ME)["between_key"]
    host.key.with_suffix(".pub").unlink()
    second = host.module(between=ME)
    assert second["changed"]
    assert second["between_key"] != first


PEERS = {
    "authorized_keys": [THREE],
    "known_hosts": ["gpu2 ssh-ed25519 AAAAgpu2"],
    "client_config": f"# Managed by ironrack: how {ME} reaches the other nodes.\nMatch localuser {ME} host gpu2\n",
}


def test_peers_come_and_go(host: Host) -> None:
    host.known.parent.mkdir(parents=True)
    host.known.write_text("other ssh-ed25519 AAAAother\n")
    host.write(f"{ONE}\n")
    host.module(between=ME)
    assert host.module(check=True, step="peers", between=ME, peers=PEERS)["changed"]
    assert "AAAAthree" not in host.file.read_text()
    assert host.module(step="peers", between=ME, peers=PEERS)["changed"]
    assert host.known.read_text().startswith("other ssh-ed25519 AAAAother\n# BEGIN")
    assert THREE in host.file.read_text().splitlines()
    assert not host.module(step="peers", between=ME, peers=PEERS)["changed"]
    assert not host.module(between=ME)["changed"]
    fewer = {**PEERS, "authorized_keys": [], "known_hosts": []}
    assert host.module(step="peers", between=ME, peers=fewer)["changed"]
    assert host.file.read_text() == f"{ONE}\n"
    host.module(step="peers", between=ME, peers=PEERS)

    assert host.module(check=True)["changed"]
    assert host.key.exists()
    off = host.module()
    assert off["changed"]
    assert "guard" not in off
    assert host.file.read_text() == f"{ONE}\n"
    assert host.known.read_text() == "other ssh-ed25519 AAAAother\n"
    assert not host.client.exists()
    assert not host.key.exists()
    assert not host.key.with_suffix(".pub").exists()
    assert not host.module()["changed"]


def test_an_interrupted_start_is_cleared_away_too(host: Host) -> None:
    host.module(between=ME)
    host.module()
    assert not host.key.exists()
    assert not host.client.exists()


def test_files_of_ours_alone_are_removed(host: Host) -> None:
    host.module(between=ME)
    host.module(step="peers", between=ME, peers=PEERS)
    host.module()
    assert not host.file.exists()
    assert not host.known.exists()


def test_unknown_user_of_ansible(host: Host) -> None:
    result = host.module(user="nobody-here")
    assert result["failed"]
    assert "nobody-here" in result["msg"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_follows_no_link_of_a_user() -> None:
    """Files in a home are handled as its user."""
    # Not pytest's own folder, into which nobody else gets.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        host = Host(Path(folder))
        secret = host.root / "secret"
        secret.write_text("root's\n")
        secret.chmod(0o600)
        entry = pwd.getpwnam("nobody")
        home = host.root / entry.pw_dir.lstrip("/")
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh/authorized_keys").symlink_to(secret)
        for path in (home, home / ".ssh"):
            os.chown(path, entry.pw_uid, entry.pw_gid)
        result = host.module(user="nobody", authorized_keys=[ONE])
        assert result["failed"]
        assert "as user nobody" in result["msg"]
        assert secret.read_text() == "root's\n"
        (home / ".ssh/authorized_keys").unlink()
        assert host.module(user="nobody", authorized_keys=[ONE])["changed"]
        assert (home / ".ssh/authorized_keys").stat().st_uid == entry.pw_uid
