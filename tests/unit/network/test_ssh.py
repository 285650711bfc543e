"""What is decided about SSH: variables, the drop-in of sshd, pinned host keys, what nodes are told of each other."""

from __future__ import annotations

import base64
import getpass
import hashlib
import hmac
import os
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import offline, ssh
from hypothesis import given
from hypothesis import strategies as st

HOME = ssh.Connection("ops", "10.20.0.5", "10.20.0.11", 22)
LOCAL = ssh.Connection("root")


def key(name: str, kind: str = "ssh-ed25519") -> ssh.Key:
    """A key that is none, but looks like one: the same for the same name."""
    body = hashlib.sha256(name.encode()).digest()
    parts = [kind.encode(), body] if kind == "ssh-ed25519" else [kind.encode(), b"\x01\x00\x01", body]
    packed = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return ssh.Key(kind, base64.b64encode(packed).decode())


def line(names: str, of: ssh.Key, comment: str = "") -> str:
    return f"{names} {of} {comment}".strip() + "\n"


NODES = {
    name: {"address": address, "groups": ["ironrack_nodes", "ironrack_runtime"]}
    for name, address in (("gpu1", "10.1.0.1"), ("gpu2", "10.1.0.2"), ("gpu10", "fd00::a"))
}


# Keys


def test_fingerprint_is_the_one_of_ssh_keygen() -> None:
    # ssh-keygen -lf of a key made for this test.
    text = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOcsXd0NjEM0ZMtOwx7LhFqS68LS0scXSiA5dmsMKGEb root@s1"
    found = ssh.parse_key(text)
    assert found is not None
    assert found.fingerprint == "SHA256:Cqdkg+66iwGn01x3+F9gPqoylKMd3Ple+AWqk4GzoyI"


def test_parse_key() -> None:
    good = key("a")
    for text in (str(good), f"{good} ops@host", f'from="10.0.0.1",restrict {good} x', f"[h]:22 {good}"):
        assert ssh.parse_key(text) == good
    wrong = good.blob[:8] + "A" * 8 + good.blob[16:]
    for text in ("", "ssh-ed25519", "ssh-ed25519 !!!", f"ssh-rsa {good.blob}", f"ssh-ed25519 {wrong}", "AAAA ssh"):
        assert ssh.parse_key(text) is None


@pytest.mark.parametrize(
    "options", [["-t", "ed25519"], ["-t", "rsa"], *[["-t", "ecdsa", "-b", b] for b in ("256", "521")]]
)
def test_keys_of_ssh_keygen(tmp_path: Path, options: list[str]) -> None:
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(tmp_path / "key"), *options], check=True)
    text = (tmp_path / "key.pub").read_text()
    assert ssh.check({"authorized_keys": [text]}) == []
    kind, blob, *_ = text.split()
    for cut in range(4, len(blob), 4):
        assert ssh.parse_key(f"{kind} {blob[:-cut]}") is None


def test_lines_end_where_others_see_their_end() -> None:
    foreign = "old\u2028name \x0c x\r\n\nlast"
    text = ssh.pin(foreign, "gpu1", ["gpu1"], [key("a")])
    assert text == f"{foreign}\ngpu1 {key('a')} ironrack:gpu1\n"
    assert ssh.pinned(f"# \u2028{text.splitlines()[-1]}", "gpu1") == [], "a comment"


# Variables


def problems(**settings: Any) -> list[str]:
    return ssh.check(settings, NODES, "gpu1", ["gpu1", "gpu2"])


def test_defaults_are_fine() -> None:
    assert problems() == []
    assert problems(mode=False) == [], "an off without quotes"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "hard"}, ["ssh_mode = hard", "choose one of off, hardened"]),
        ({"settings": {"PermitRootLogn": "no"}}, ["ssh_settings.PermitRootLogn = no", "did you mean PermitRootLogin?"]),
        ({"settings": {"Port": 2222}}, ["ssh_settings.Port = 2222", "firewall_ssh_ports"]),
        ({"settings": {"allowusers": "ops"}}, ["ssh_settings.allowusers", "use ssh_allow_users"]),
        ({"settings": {"Match": "User x"}}, ["ssh_settings.Match", "a file of your own"]),
        ({"settings": {"UseDNS": True, "usedns": False}}, ["ssh_settings.usedns = False", "twice"]),
        ({"settings": {"Banner": "a\nPermitRootLogin yes"}}, ["ssh_settings.Banner", "line break"]),
        ({"settings": {"Banner": ["a", "b\nPermitRootLogin yes"]}}, ["ssh_settings.Banner", "line break"]),
        ({"settings": {"Banner": ""}}, ["ssh_settings.Banner", "is no value"]),
        ({"settings": ["UseDNS"]}, ["ssh_settings = ", "is no dictionary"]),
        ({"allow_users": ["two words"]}, ["ssh_allow_users = two words"]),
        ({"confirm_seconds": 5}, ["ssh_confirm_seconds = 5", "take 60"]),
        ({"confirm_seconds": True}, ["ssh_confirm_seconds = True"]),
        ({"authorized_keys": ["ssh-ed25519 nonsense"]}, ["ssh_authorized_keys[0] = ssh-ed25519 nonsense"]),
        ({"authorized_keys": [f"# {key('a')}"]}, ["ssh_authorized_keys[0] = # ssh-ed25519"]),
        ({"authorized_keys": [f"key: {key('a')}"]}, ["ssh_authorized_keys[0] = key: ssh"]),
        ({"authorized_keys": [f"restrct {key('a')}"]}, ["ssh_authorized_keys[0] = restrct"]),
        ({"authorized_keys": [f"{key('a')} x\rssh-rsa y"]}, ["ssh_authorized_keys[0] = ssh-ed25519"]),
        ({"authorized_keys": [str(key("a"))[:-8]]}, ["not the whole of one"]),
        ({"authorized_keys": [f"{key('a')}AAAA"]}, ["not the whole of one"]),
        ({"settings": {"PermitRootLogin": "maybe"}}, ["PermitRootLogin = maybe", "choose yes, no, prohibit-password"]),
        ({"settings": {"X11Forwarding": "true"}}, ["ssh_settings.X11Forwarding = true", "choose yes, no"]),
        ({"settings": {"MaxAuthTries": "few"}}, ["ssh_settings.MaxAuthTries = few", "a number"]),
        ({"settings": {"LoginGraceTime": "soon"}}, ["ssh_settings.LoginGraceTime = soon", "2m"]),
        ({"authorized_keys_exclusive": True}, ["ssh_authorized_keys = []", "nobody could log in"]),
        ({"host_key_fingerprint": "MD5:aa"}, ["ssh_host_key_fingerprint = MD5:aa (gpu1)", "ssh-keygen -lf"]),
        ({"accept_changed_host_keys": ["gpu3"]}, ["ssh_accept_changed_host_keys = gpu3"]),
        ({"between_nodes": True, "between_nodes_user": "root"}, ["ssh_between_nodes_user = root"]),
        ({"between_nodes": True, "between_nodes_user": "a b"}, ["ssh_between_nodes_user = a b"]),
    ],
)
def test_wrong_variables_are_named_with_a_remedy(settings: dict[str, Any], words: list[str]) -> None:
    found = problems(**settings)
    assert len(found) == 1
    assert " -> " in found[0]
    for word in words:
        assert word in found[0]


def test_what_sshd_takes_is_taken() -> None:
    keys = [
        f'from="10.0.0.0/8,fd00::/8",command="echo \\"a b\\"",no-X11-forwarding,NO-PTY {key("a")} a b \u2028 c',
        f"restrict\t{key('b')}",
    ]
    assert problems(authorized_keys=keys) == []
    settings = {
        "PermitRootLogin": "without-password",
        "X11Forwarding": True,
        "MaxAuthTries": 4,
        "LoginGraceTime": "1m30s",
        "LogLevel": "debug3",
        "GatewayPorts": "clientspecified",
        "PrintMotd": None,
    }
    assert problems(settings=settings) == []


def test_a_private_key_is_not_repeated() -> None:
    found = problems(authorized_keys=["-----BEGIN OPENSSH PRIVATE KEY-----\nsecret"])
    assert "private" in found[0]
    assert "secret" not in found[0]


def test_between_nodes_needs_an_address() -> None:
    found = ssh.check({"between_nodes": True}, {"gpu1": {"address": None}}, "gpu1")
    assert "cluster_address = (not set) (gpu1)" in found[0]
    assert ssh.check({"between_nodes": True}, {}, "gateway") == [], "no node, no part in it"


# sshd


def drop_in(connection: ssh.Connection = HOME, **settings: Any) -> list[str]:
    return ssh.sshd_config(settings, connection, "gpu1")[0].splitlines()


def test_hardened() -> None:
    lines = drop_in()
    for wanted in ("PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitRootLogin prohibit-password"):
        assert wanted in lines
    assert not any(line.startswith("AllowUsers") for line in lines)
    assert ssh.passwords_off("\n".join(lines))


def test_off_has_no_file() -> None:
    assert drop_in(mode="off", settings={"UseDNS": False}) == []
    assert drop_in(mode=False) == []


def test_settings_win_and_null_drops() -> None:
    lines = drop_in(
        settings={
            "passwordauthentication": True,
            "X11Forwarding": None,
            "MaxAuthTries": 4,
            "Ciphers": ["a", "b"],
            "AcceptEnv": ["LANG", "LC_*"],
        }
    )
    assert "PasswordAuthentication yes" in lines
    assert "MaxAuthTries 4" in lines
    assert "Ciphers a,b" in lines
    assert "AcceptEnv LANG LC_*" in lines
    assert not any("X11Forwarding" in line or line.startswith("passwordauthentication") for line in lines)


def test_passwords_stay_where_nobody_is_known_to_have_a_key() -> None:
    text, notes = ssh.sshd_config({}, LOCAL, "gpu1")
    assert "PasswordAuthentication" not in text
    assert "KbdInteractive" not in text
    assert "not one of SSH" in notes[0]
    text, notes = ssh.sshd_config(
        {"settings": {"PasswordAuthentication": False, "KbdInteractiveAuthentication": False}}, LOCAL, "gpu1"
    )
    assert "PasswordAuthentication no" in text, "asked for by name"
    assert notes == []


LOCK_OUTS: list[tuple[str, dict[str, Any], str]] = [
    ("ops", {"allow_users": ["admin", "backup@10.20.0.0/16"]}, "ssh_allow_users = .*add ops"),
    ("ops", {"allow_users": ["o*@10.20.0.0/16"]}, ""),
    ("ops", {"allow_users": ["admin", "ops"]}, ""),
    ("ops", {"settings": {"denyusers": ["guest", "op?"]}}, "ssh_settings.DenyUsers = .*let Ansible log in as another"),
    ("ops", {"settings": {"DenyUsers": "guest"}}, ""),
    ("root", {"settings": {"PermitRootLogin": "no"}}, "ssh_settings.PermitRootLogin = no: .*ansible_user"),
    ("root", {"settings": {"PermitRootLogin": False}}, "ssh_settings.PermitRootLogin = no"),
    ("ops", {"settings": {"PermitRootLogin": "no"}}, ""),
    ("ops", {"settings": {"PubkeyAuthentication": "no"}}, "ssh_settings.PubkeyAuthentication = no: no way to log in"),
    ("ops", {"settings": {"PubkeyAuthentication": "no", "PasswordAuthentication": True}}, ""),
    ("ops", {}, ""),
]


@pytest.mark.parametrize(("user", "settings", "words"), LOCK_OUTS)
def test_lock_outs_are_known_without_a_connection(user: str, settings: dict[str, Any], words: str) -> None:
    told = ssh.check({**settings, "login": user}, host="gpu1")
    assert len(told) == bool(words)
    assert all(re.search(words, line) and "gpu1" in line for line in told)
    assert ssh.check(settings, host="gpu1") == [], "where nobody says whom Ansible logs in as"
    assert ssh.locked_out({**settings, "mode": "off"}, user, "gpu1") == []
    # With the inventory, before any host is changed.
    own = {"ssh_mode": "hardened", **{f"ssh_{name}": value for name, value in settings.items()}}
    problems = offline.problems({"gpu1": own}, {"gpu1": "10.0.0.1"}, {}, {"gpu1": user})
    assert [problem.host for problem in problems] == ["gpu1"] * bool(words)
    assert all(problem.variable in words.replace("\\", "") and problem.remedy for problem in problems)
    for values, logins in (({**own, "ssh_mode": "off"}, {"gpu1": user}), (own, {})):
        assert offline.problems({"gpu1": values}, {"gpu1": "10.0.0.1"}, {}, logins) == []
    assert offline.problems({"gpu1": own}, {}, {}, {"gpu1": user}) == [], "a host that runs nothing"


def test_the_user_of_ansible_must_be_allowed() -> None:
    assert "AllowUsers o* ironrack-mpi" in drop_in(allow_users=["o*"], between_nodes=True)
    assert "AllowUsers ops@10.20.0.0/16" in drop_in(allow_users=["ops@10.20.0.0/16"])
    with pytest.raises(ssh.SshError, match=r"ssh_allow_users.*logs in to gpu1 as ops.*add ops"):
        drop_in(allow_users=["admin"])
    with pytest.raises(ssh.SshError, match="PermitRootLogin = no: Ansible logs in to gpu1 as root"):
        drop_in(ssh.Connection("root", "10.0.0.1", "10.0.0.2"), settings={"PermitRootLogin": False})


def test_probe() -> None:
    first, second = key("a"), key("b", "ssh-rsa")
    text = (
        f"user ops\nhome /home/ops\nssh ::ffff:10.0.0.9 50000 10.0.0.1 2222\nkey {second} x\nkey {first} x\nkey junk\n"
    )
    assert ssh.read_probe(text) == (ssh.Connection("ops", "10.0.0.9", "10.0.0.1", 2222, "/home/ops"), [first, second])
    assert ssh.read_probe("user root\nhome /root\nssh \n") == (ssh.Connection("root", home="/root"), [])
    found, _ = ssh.read_probe("user ops\nssh fe80::1%eth0 1 fe80::2%eth0 22\n")
    assert (found.client, found.server) == ("fe80::1", "fe80::2")
    # What sshd writes where the other end has no address.
    found, keys = ssh.read_probe(f"user ops\nhome /h\nssh UNKNOWN 65535 UNKNOWN 65535\nkey {first}\n")
    assert (found, keys) == (ssh.Connection("ops", home="/h"), [first])


@pytest.mark.parametrize("config", ["", "HostKeyAlgorithms +ssh-rsa\n", "  hostkey {0}/special\nHostKeyAgent none\n"])
def test_probe_asks_for_the_keys_that_sshd_has(tmp_path: Path, config: str) -> None:
    folder = tmp_path / "etc"
    (folder / "sshd_config.d").mkdir(parents=True)
    (folder / "sshd_config").write_text(config.format(folder))
    (folder / "ssh_host_ed25519_key.pub").write_text(f"{key('usual')} root@x\n")
    (folder / "special.pub").write_text(f"{key('special')} root@x\n")
    script = ssh.PROBE.replace("/etc/ssh", str(folder))
    environment = {**os.environ, "SSH_CONNECTION": "10.0.0.9 50000 10.0.0.1 22"}
    done = subprocess.run(script, shell=True, capture_output=True, text=True, env=environment, check=True)  # noqa: S602 - as sshd runs it
    found, keys = ssh.read_probe(done.stdout)
    assert (found.user, found.client) == (getpass.getuser(), "10.0.0.9")
    assert keys == [key("special" if "special" in config else "usual")]


# Pinned host keys

NAMES = ["[gpu1]:2222", "[10.20.0.11]:2222", "gpu1", "10.1.0.1"]


def test_names() -> None:
    assert ssh.host_names("gpu1", "10.20.0.11", 2222, "10.1.0.1", 22) == NAMES
    assert ssh.host_names("gpu1", "gpu1", 22, "fd00::1", 22) == ["gpu1", "fd00::1"]
    assert ssh.host_names("gpu1", None, 22, None, 22) == ["gpu1"]


def test_pin_keeps_what_others_wrote() -> None:
    other = f"# by hand\n\n{line('example.org', key('x'))}@cert-authority *.org {key('ca')}\n"
    text = ssh.pin(other, "gpu1", NAMES, [key("a"), key("b", "ssh-rsa")])
    assert text.startswith(other)
    assert text.count(",".join(NAMES)) == 2
    assert ssh.pinned(text, "gpu1") == [key("a"), key("b", "ssh-rsa")]
    assert ssh.pin(text, "gpu1", NAMES, [key("a"), key("b", "ssh-rsa")]) == text
    both = ssh.pin(text, "gpu2", ["gpu2"], [key("c")])
    assert ssh.pin(both, "gpu1", NAMES, [key("a"), key("b", "ssh-rsa")]) == both, "nor is the order changed"


def test_a_changed_key_is_refused_until_it_is_accepted() -> None:
    text = ssh.pin(line("old", key("x")), "gpu1", NAMES, [key("a")])
    with pytest.raises(ssh.SshError) as caught:
        ssh.pin(text, "gpu1", NAMES, [key("new")])
    message = str(caught.value)
    assert message.startswith("gpu1: ")
    assert key("a").fingerprint in message
    assert key("new").fingerprint in message
    assert '"ssh_accept_changed_host_keys": ["gpu1"]' in message
    accepted = ssh.pin(text, "gpu1", NAMES, [key("new")], accept=True)
    assert ssh.pinned(accepted, "gpu1") == [key("new")]
    assert accepted.startswith(line("old", key("x")))
    assert key("a").blob not in accepted


def test_a_key_by_hand_counts_too() -> None:
    text = line("10.1.0.1,elsewhere", key("a"), "me")
    with pytest.raises(ssh.SshError, match=r"Pinned for 10\.1\.0\.1"):
        ssh.pin(text, "gpu1", NAMES, [key("new")])
    accepted = ssh.pin(text, "gpu1", NAMES, [key("new")], accept=True)
    assert accepted.startswith(line("elsewhere", key("a"), "me")), "the line stays for its other name"
    assert ssh.pin(text, "gpu1", NAMES, [key("a")]).startswith(text)


def test_hashed_names() -> None:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, b"[gpu1]:2222", "sha1").digest()
    hashed = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    with pytest.raises(ssh.SshError, match="not the pinned one"):
        ssh.pin(line(hashed, key("a")), "gpu1", NAMES, [key("new")])
    ssh.pin(line(hashed, key("a")), "gpu2", ["gpu2"], [key("new")])
    ssh.pin(line("|1|x", key("a")), "gpu1", NAMES, [key("new")])


def test_an_address_that_another_host_had() -> None:
    text = ssh.pin("", "old1", ["old1", "10.1.0.1"], [key("a")])
    with pytest.raises(ssh.SshError, match="pinned for old1"):
        ssh.pin(text, "gpu1", NAMES, [key("b")])
    accepted = ssh.pin(text, "gpu1", NAMES, [key("b")], accept=True)
    assert line("old1", key("a"), "ironrack:old1") in accepted


def test_kinds_of_keys_may_come_and_go() -> None:
    text = ssh.pin("", "gpu1", NAMES, [key("a"), key("r", "ssh-rsa")])
    assert ssh.pinned(ssh.pin(text, "gpu1", NAMES, [key("a")]), "gpu1") == [key("a")]
    with pytest.raises(ssh.SshError, match="not the pinned one"):
        ssh.pin(text, "gpu1", NAMES, [key("e", "ecdsa-sha2-nistp256")])
    with pytest.raises(ssh.SshError, match="not the pinned one"):
        ssh.pin(text, "gpu1", ["moved"], [key("b")])


def test_other_names_replace_the_old_ones() -> None:
    text = ssh.pin("", "gpu1", NAMES, [key("a")])
    moved = ssh.pin(text, "gpu1", ["gpu1", "10.1.0.77"], [key("a")])
    assert moved == line("gpu1,10.1.0.77", key("a"), "ironrack:gpu1")


def test_fingerprint_of_the_inventory() -> None:
    right = key("a").fingerprint
    assert ssh.pin("", "gpu1", NAMES, [key("b", "ssh-rsa"), key("a")], fingerprint=right)
    with pytest.raises(ssh.SshError) as caught:
        ssh.pin("", "gpu1", NAMES, [key("b")], accept=True, fingerprint=right)
    assert f"ssh_host_key_fingerprint = {right} (gpu1)" in str(caught.value)
    assert key("b").fingerprint in str(caught.value)
    with pytest.raises(ssh.SshError, match="no public host key"):
        ssh.pin("", "gpu1", NAMES, [])


@given(
    st.lists(st.tuples(st.sampled_from(["h1", "h2", "h3"]), st.sampled_from("abc")), max_size=8),
    st.text(alphabet="#@x \n,|", max_size=30),
)
def test_pinning_in_any_order_loses_nothing(steps: list[tuple[str, str]], foreign: str) -> None:
    text = foreign if foreign.endswith("\n") or not foreign else foreign + "\n"
    mine: dict[str, ssh.Key] = {}
    for host, name in steps:
        text = ssh.pin(text, host, [host, f"addr-{host}"], [key(name)], accept=True)
        mine[host] = key(name)
    for host, wanted in mine.items():
        assert ssh.pinned(text, host) == [wanted]
    assert [entry for entry in text.splitlines() if "ironrack:" not in entry] == foreign.splitlines()


# From node to node


def told(host: str, nodes: dict[str, Any] | None = None, **ports: int) -> dict[str, Any]:
    known, noted = "", ""
    for name, node in NODES.items():
        port = ports.get(name, 22)
        known = ssh.pin(known, name, ssh.host_names(name, None, port, str(node["address"]), port), [key(name)])
        noted = ssh.note_node(noted, name, port, key(f"user {name}"))
    return ssh.peers(nodes or NODES, host, "mpi", known, noted)


def test_peers() -> None:
    found = told("gpu1", gpu2=2222)
    assert found["missing"] == []
    assert found["known_hosts"] == [f"[gpu2]:2222,[10.1.0.2]:2222 {key('gpu2')}", f"gpu10,fd00::a {key('gpu10')}"]
    assert found["authorized_keys"] == [
        f'from="10.1.0.2",restrict {key("user gpu2")} ironrack:gpu2',
        f'from="fd00::a",restrict {key("user gpu10")} ironrack:gpu10',
    ]
    config = found["client_config"]
    assert "Match localuser mpi host gpu2,10.1.0.2\n    Port 2222\n" in config
    assert "Match localuser mpi host gpu10,fd00::a\n    IdentityFile" in config
    assert "StrictHostKeyChecking yes" in config


def test_who_leaves_is_let_in_no_more() -> None:
    left = told("gpu1", {name: node for name, node in NODES.items() if name != "gpu2"})
    assert all("gpu2" not in entry for entry in [*left["authorized_keys"], *left["known_hosts"]])
    idle = told("gpu1", {**NODES, "gpu2": {"address": "10.1.0.2", "groups": ["ironrack_nodes"]}})
    assert idle["missing"] == []
    assert all("gpu2" not in entry for entry in idle["authorized_keys"])


def test_who_was_never_seen_is_missing() -> None:
    found = told("gpu1", {**NODES, "gpu3": {"address": "10.1.0.3", "groups": ["ironrack_runtime"]}})
    assert found["missing"] == ["gpu3"]
    assert "gpu3" not in found["client_config"]


def test_note_node() -> None:
    text = ssh.note_node(ssh.note_node("", "gpu10", 22, key("a")), "gpu2", 22, key("b"))
    assert [entry.split()[0] for entry in text.splitlines()] == ["gpu2", "gpu10"]
    assert ssh.note_node(text, "gpu10", 22, key("a")) == text
    assert ssh.note_node(text, "gpu10", 22, None).split()[0] == "gpu2"
    assert len(ssh.note_node(text, "gpu10", 22, None).splitlines()) == 1
