"""What the module reads out of sshd's files and answers. The molecule scenario asks sshd itself, on booted nodes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

# What `sshd -T` of OpenSSH 9.2 prints, cut to a few lines.
PRINTED = """\
permitrootlogin without-password
passwordauthentication no
allowusers ops
allowusers admin
acceptenv LANG
"""


@pytest.fixture(name="sshd")
def fixture_sshd(load: Any) -> ModuleType:
    module: ModuleType = load("sshd")
    return module


@pytest.fixture(name="node")
def fixture_node(sshd: ModuleType, tmp_path: Path) -> Any:
    (tmp_path / "etc/ssh/sshd_config.d").mkdir(parents=True)
    module = SimpleNamespace(params={"seconds": 60, "guard": {}}, get_bin_path=lambda *_, **__: "/usr/sbin/sshd")
    node = sshd.Node(module, str(tmp_path))
    Path(node.config).write_text("Include /etc/ssh/sshd_config.d/*.conf\nUsePAM yes\n")
    return node


def answers(node: Any, monkeypatch: pytest.MonkeyPatch, have: str, wanted: str) -> None:
    """sshd's answers for the whole configuration, and for the text alone."""
    monkeypatch.setattr(node, "ask", lambda *options: have if node.config in options else wanted)


def test_parse(sshd: ModuleType) -> None:
    assert sshd.parse(PRINTED)["allowusers"] == ["ops", "admin"]
    assert sshd.parse(PRINTED)["permitrootlogin"] == ["without-password"]


def test_keywords_end_where_blocks_begin(sshd: ModuleType) -> None:
    text = "# PermitRootLogin yes\n\n  UseDNS=no\nBanner none\nMatch User x\n  PermitTTY no\n"
    assert sshd.keywords(text) == [("usedns", 3), ("banner", 4)]


def test_what_counts_is_compared_as_sshd_prints_it(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "PermitRootLogin prohibit-password\nAllowUsers ops admin\n"
    answers(node, monkeypatch, PRINTED, PRINTED.replace("passwordauthentication no", "passwordauthentication yes"))
    node.overridden(text)


@pytest.mark.parametrize(("keyword", "fine"), [("AcceptEnv", True), ("DenyUsers", True), ("AllowUsers", False)])
def test_lists_that_files_make_together(
    sshd: ModuleType, node: Any, monkeypatch: pytest.MonkeyPatch, keyword: str, fine: bool
) -> None:
    """Whoever else is denied is denied; whoever else is allowed was not asked for."""
    answers(node, monkeypatch, f"{keyword} a\n{keyword} b\n", f"{keyword} a\n")
    assert bool(node.differences(f"{keyword} a\n", node.values())) != fine
    answers(node, monkeypatch, f"{keyword} b\n", f"{keyword} a\n")
    assert node.differences(f"{keyword} a\n", node.values())


def test_a_file_that_comes_first_is_named(sshd: ModuleType, node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Path(node.dropin).with_name("00-site.conf")
    first.write_text("# site\nPasswordAuthentication yes\n")
    answers(node, monkeypatch, "passwordauthentication yes\n", "passwordauthentication no\n")
    with pytest.raises(sshd.SshdError) as caught:
        node.overridden("PasswordAuthentication no\n")
    assert f"{first}, line 2" in str(caught.value)
    assert "gives yes instead of no" in str(caught.value)


def test_a_config_that_reads_no_folder(sshd: ModuleType, node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(node.config).write_text("#Include /etc/ssh/sshd_config.d/*.conf\nUsePAM yes\n")
    answers(node, monkeypatch, "passwordauthentication yes\n", "passwordauthentication no\n")
    with pytest.raises(sshd.SshdError, match=r"does not read sshd_config\.d -> put the line Include"):
        node.overridden("PasswordAuthentication no\n")


def test_blocks_are_worth_a_word(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(node, monkeypatch, "passwordauthentication yes\n", "passwordauthentication no\n")
    connection = {"user": "ops", "client": "10.0.0.9", "server": "10.0.0.1", "port": 22}
    notes = node.exceptions("PasswordAuthentication no\n", connection)
    assert [note.split(" for ")[1] for note in notes] == ["root from 10.0.0.9", "ops from 10.0.0.9"]
    assert node.exceptions("PasswordAuthentication no\n", {**connection, "client": ""}) == []


@pytest.mark.parametrize(
    ("active", "forward", "back"),
    [
        (("ssh.service",), "try-reload-or-restart", "reload-or-restart"),
        # Behind a socket a reload would be the end of sshd.
        (("ssh.socket",), "try-restart", "try-restart"),
        (("ssh.socket", "ssh.service"), "try-restart", "try-restart"),
        ((), "try-reload-or-restart", "try-reload-or-restart"),
    ],
)
def test_how_sshd_is_told(
    node: Any, monkeypatch: pytest.MonkeyPatch, active: tuple[str, ...], forward: str, back: str
) -> None:
    node.systemd = True
    monkeypatch.setattr(node, "active", lambda unit: unit in active)
    assert node.reload_command() == ["systemctl", forward, "ssh.service"]
    assert node.reload_command(back=True) == ["systemctl", back, "ssh.service"]
