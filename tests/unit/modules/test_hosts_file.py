"""The hosts file: our block first, this host's name off 127.0.1.1, everything else as it was."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

Run = Callable[..., dict[str, Any]]
Load = Callable[[str], ModuleType]

ENTRIES = [{"address": "10.77.1.11", "names": ["n1"]}, {"address": "10.77.1.12", "names": ["n2"]}]
DEBIAN = "127.0.0.1\tlocalhost\n127.0.1.1\tn1.example.org\tn1\n\n# IPv6\n::1 localhost ip6-localhost\n"


@pytest.fixture(name="edit")
def fixture_edit(load: Load) -> Callable[..., tuple[str, list[str]]]:
    module = load("hosts_file")

    def edit(text: str, entries: Any = ENTRIES, name: str = "n1", kernel: str = "n1") -> tuple[str, list[str]]:
        result: tuple[str, list[str]] = module.edit(text, entries, name, kernel)
        return result

    return edit


def test_debian_default(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, conflicts = edit(DEBIAN)
    lines = text.splitlines()
    assert lines[0].startswith("# BEGIN ironrack")
    assert lines[1:4] == ["10.77.1.11\tn1.example.org n1", "10.77.1.12\tn2", "# END ironrack"]
    assert lines[4:] == ["127.0.0.1\tlocalhost", "", "# IPv6", "::1 localhost ip6-localhost"]
    assert conflicts == []
    assert edit(text) == (text, []), "a second run finds nothing to do"


def test_full_name_of_the_inventory_stays_in_front(edit: Callable[..., tuple[str, list[str]]]) -> None:
    """hostname -f prints the first name of the line."""
    text, _ = edit(
        "127.0.0.1 localhost\n", [{"address": "10.77.1.11", "names": ["n1.example.org"]}], "n1.example.org", "n1"
    )
    assert "10.77.1.11\tn1.example.org n1\n" in text


def test_other_names_of_the_line_stay(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, _ = edit("127.0.1.1 n1 wiki.local\n")
    assert "127.0.1.1\twiki.local\n" in text


def test_kernel_name_that_is_not_the_inventory_name(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, _ = edit("127.0.1.1 srv17.example.org srv17\n", kernel="srv17")
    assert "10.77.1.11\tsrv17.example.org srv17 n1\n" in text
    assert "127.0.1.1" not in text
    assert edit(text, kernel="srv17")[0] == text


def test_kernel_name_of_another_node_is_not_taken(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, _ = edit("127.0.0.1 localhost\n", kernel="n2")
    assert "10.77.1.11\tn1\n10.77.1.12\tn2\n" in text
    assert edit("", kernel="localhost")[0].count("localhost") == 0


def test_host_without_an_entry_keeps_its_own_name(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, _ = edit("127.0.1.1 n9\n", name="n9", kernel="n9")
    assert text.endswith("# END ironrack\n127.0.1.1 n9\n")


def test_no_entries_leave_no_block(edit: Callable[..., tuple[str, list[str]]]) -> None:
    with_block, _ = edit(DEBIAN)
    text, _ = edit(with_block, entries=[])
    assert "ironrack" not in text
    assert edit(DEBIAN, entries=[]) == (DEBIAN, [])


def test_address_that_changes_moves_with_its_names(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, _ = edit(DEBIAN)
    moved = [{"address": "10.99.1.11", "names": ["n1"]}]
    text, _ = edit(text, entries=moved)
    assert "10.99.1.11\tn1.example.org n1\n" in text
    assert "10.77.1" not in text


def test_contradictions_are_told_not_removed(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, conflicts = edit("192.168.1.5 n2 nas\n10.77.1.12 n2\n")
    assert conflicts == ["192.168.1.5 n2 nas"]
    assert "192.168.1.5 n2 nas\n" in text


def test_broken_block_is_mended(edit: Callable[..., tuple[str, list[str]]]) -> None:
    whole, _ = edit(DEBIAN)
    half = whole.replace("# END ironrack\n", "")
    text, _ = edit(half)
    assert text.count("# BEGIN ironrack") == 1
    assert text.count("# END ironrack") == 1
    assert edit(text)[0] == text


LINES = st.lists(
    st.sampled_from(
        [
            "127.0.0.1 localhost",
            "127.0.1.1 n1",
            "127.0.1.1 n1.a n1 x",
            "# words",
            "",
            "10.0.0.9 printer  # here",
            "192.168.1.5 n2",
            "fe80::1%eth0 z",
            "junk",
            "# END ironrack",
            "# BEGIN ironrack: old",
            "10.77.1.11 n1 n1.b",
        ]
    )
)


@given(LINES)
def test_any_file_settles_after_one_edit(lines: list[str]) -> None:
    path = Path(__file__).resolve().parents[3] / "plugins/modules/hosts_file.py"
    specification = importlib.util.spec_from_file_location("hosts_file_property", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    once, _ = module.edit("\n".join(lines) + "\n", ENTRIES, "n1", "n1")
    assert module.edit(once, ENTRIES, "n1", "n1")[0] == once
    first = next(line for line in once.splitlines() if "n1" in line.split()[1:] and not line.startswith("#"))
    assert first.startswith("10.77.1.11")


def test_module_writes_shows_and_rests(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(DEBIAN)
    arguments = {"path": str(path), "hostname": "n1", "entries": ENTRIES}
    planned = run("hosts_file", check=True, **arguments)
    assert planned["changed"]
    assert path.read_text() == DEBIAN
    assert run("hosts_file", **arguments)["diff"] == planned["diff"]
    assert path.read_text() == planned["diff"]["after"]
    assert path.stat().st_mode & 0o777 == 0o644
    before = path.stat().st_mtime_ns
    assert not run("hosts_file", **arguments)["changed"]
    assert path.stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(run: Run, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "hosts").write_text(DEBIAN)
    link = tmp_path / "hosts"
    link.symlink_to("real/hosts")
    assert run("hosts_file", path=str(link), hostname="n1", entries=ENTRIES)["changed"]
    assert link.is_symlink()
    assert "10.77.1.12\tn2\n" in (real / "hosts").read_text()
    assert not run("hosts_file", path=str(link), hostname="n1", entries=ENTRIES)["changed"]


def test_what_cannot_be_written_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hosts").symlink_to("/proc/self/hosts")
    result = run("hosts_file", path=str(tmp_path / "hosts"), hostname="n1", entries=ENTRIES)
    assert result["failed"]
    assert "cannot be written" in result["msg"]
    assert " -> make the file and its folder writable" in result["msg"]


@pytest.mark.parametrize("kernel", ["localhost.localdomain", "localhost", "LOCALHOST.lan"])
def test_a_host_without_a_name_keeps_its_loopback(edit: Callable[..., tuple[str, list[str]]], kernel: str) -> None:
    text, _ = edit("127.0.0.1 localhost localhost.localdomain\n", kernel=kernel)
    assert text.endswith("# END ironrack\n127.0.0.1 localhost localhost.localdomain\n")
    assert "10.77.1.11\tn1\n" in text


def test_lines_end_where_others_see_their_end(edit: Callable[..., tuple[str, list[str]]]) -> None:
    foreign = "10.0.0.1 a # b\u2028c\n10.0.0.2 d\x0ce\r\n"
    text, _ = edit(foreign)
    assert text.endswith(f"# END ironrack\n{foreign}")
    dos = text.replace("\r", "").replace("\n", "\r\n")
    assert edit(dos)[0].count("ironrack") == 2, "one block, whoever has edited the file"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"address": "n1.example.org", "names": ["n1"]}], "not an IP address"),
        ([{"address": "10.0.0.1", "names": ["a b"]}], "not a host name"),
        ([{"address": "10.0.0.1", "names": []}], "has no names"),
        ([{"address": "10.0.0.1", "names": ["a"]}, {"address": "10.0.0.2", "names": ["a"]}], "two addresses"),
    ],
)
def test_wrong_entries(run: Run, tmp_path: Path, entries: Any, message: str) -> None:
    result = run("hosts_file", path=str(tmp_path / "hosts"), hostname="a", entries=entries)
    assert result["failed"]
    assert message in result["msg"]


# What cloud-init's template gives a Debian host whose settings say manage_etc_hosts: true.
CLOUD_INIT = """\
# Your system has configured 'manage_etc_hosts' as True.
# As a result, if you wish for changes to this file to persist
# then you will need to either
# a.) make changes to the master file in /etc/cloud/templates/hosts.debian.tmpl
# b.) change or remove the value of 'manage_etc_hosts' in
#     /etc/cloud/cloud.cfg or cloud-config from user-data
#
# The following lines are desirable for IPv4 capable hosts
127.0.1.1 n1.example.org n1
127.0.0.1 localhost

# The following lines are desirable for IPv6 capable hosts
::1 localhost ip6-localhost ip6-loopback
ff02::1 ip6-allnodes
ff02::2 ip6-allrouters
"""
SIX = [{"address": "fd00:77:1::11", "names": ["n1"]}, {"address": "fd00:77:1::12", "names": ["n2"]}]


def test_file_of_cloud_init(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, conflicts = edit(CLOUD_INIT)
    assert "127.0.1.1" not in text
    assert "10.77.1.11\tn1.example.org n1\n" in text
    assert text.endswith(CLOUD_INIT.partition("127.0.1.1 n1.example.org n1\n")[2])
    assert conflicts == []


def test_cluster_of_ipv6(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, _ = edit(DEBIAN + "::1 n1\n", entries=SIX)
    assert text.splitlines()[1:3] == ["fd00:77:1::11\tn1.example.org n1", "fd00:77:1::12\tn2"]
    own = [line.split()[0] for line in text.splitlines() if "n1" in line.split()[1:]]
    assert own == ["fd00:77:1::11"], "neither 127.0.1.1 nor ::1 is left for the host's own name"
    assert edit(text, entries=SIX)[0] == text
    # Written in another form it is the same address.
    assert edit("fd00:0077:0001:0::12 n2\n", entries=SIX)[1] == []
    assert edit("fd00:77:1::13 n2\n", entries=SIX)[1] == ["fd00:77:1::13 n2"]


def test_cluster_that_moves_to_ipv6_leaves_nothing_of_ipv4(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, _ = edit(edit(DEBIAN)[0], entries=SIX)
    assert "10.77.1" not in text
    assert "fd00:77:1::11\tn1.example.org n1\n" in text


def test_entry_of_a_node_that_left_goes(edit: Callable[..., tuple[str, list[str]]]) -> None:
    text, _ = edit(edit(DEBIAN)[0], entries=ENTRIES[:1])
    assert "n2" not in text
    assert "10.77.1.11\tn1.example.org n1\n" in text
