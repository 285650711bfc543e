"""What apt would take from repositories: versions, preferences, and what a package stands on."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import debian
from hypothesis import given, settings
from hypothesis import strategies as st

# In dpkg's order.
ORDERED = [
    "1.0~rc1",
    "1.0~rc2-1",
    "1.0",
    "1.0-1~deb12u1",
    "1.0-1",
    "1.0-1+b1",
    "1.0-1.1",
    "1.0a",
    "1.0+dfsg",
    "1.2",
    "1.10",
    "1:0.1",
]


def stanza(name: str, version: str = "1", **fields: str) -> str:
    record = {"Package": name, "Version": version, "Filename": f"pool/{name}.deb", "Size": "10", "SHA256": "a" * 64}
    return "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in (record | fields).items()) + "\n"


def archive(*stanzas: str, origin: str = "Debian", pins: tuple = ()) -> debian.Archive:
    found = debian.Archive(pins=pins)
    found.add(debian.read_packages("".join(stanzas), "http://a.example/debian", "main", origin))
    return found


def names(found: debian.Archive, *wanted: str) -> set[str]:
    return set(found.closure([{"name": name} for name in wanted]))


@pytest.mark.parametrize(("left", "right"), list(itertools.combinations(ORDERED, 2)))
def test_versions_are_ordered(left: str, right: str) -> None:
    assert debian.compare(left, right) < 0 < debian.compare(right, left)
    assert debian.compare(left, left) == 0


def test_a_zero_in_front_does_not_count() -> None:
    assert debian.compare("1.01-00", "1.1-0") == 0


PART = st.text("0123456789abz.+~", min_size=1, max_size=6).map(lambda text: "1" + text)
VERSION = st.one_of(PART, st.tuples(PART, PART).map("-".join), st.tuples(st.sampled_from("012"), PART).map(":".join))


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="needs dpkg")
@settings(max_examples=40, deadline=None)
@given(VERSION, VERSION)
def test_the_order_is_that_of_dpkg(left: str, right: str) -> None:
    later = subprocess.run(["dpkg", "--compare-versions", left, "gt", right], check=False).returncode == 0
    assert (debian.compare(left, right) > 0) is later


def test_all_that_a_package_stands_on_is_found_and_nothing_else() -> None:
    found = archive(
        stanza("tool", Depends="liba (>= 2), nothing | libb", Pre_Depends="base"),
        stanza("liba", "1"),
        stanza("liba", "3", Depends="base"),
        stanza("libb"),
        stanza("base"),
        stanza("other"),
    )
    assert names(found, "tool") == {"tool", "liba", "libb", "base"}
    assert found.closure([{"name": "tool"}])["liba"].version == "3"


def test_the_newest_version_over_all_repositories_is_taken() -> None:
    found = archive(stanza("a", "1.9"))
    found.add(debian.read_packages(stanza("a", "1.10"), "http://security.example", "main", "Debian"))
    assert found.candidate("a").base == "http://security.example"


def test_what_is_provided_will_do_and_what_is_taken_already_comes_first() -> None:
    found = archive(
        stanza("asks", Depends="mail"),
        stanza("also", Depends="first | second"),
        stanza("mta", Provides="mail"),
        stanza("first"),
        stanza("second"),
    )
    assert names(found, "asks") == {"asks", "mta"}
    assert names(found, "second", "also") == {"second", "also"}
    versioned = archive(stanza("asks", Depends="mail (>= 2)"), stanza("mta", Provides="mail (= 2)"))
    assert names(versioned, "asks") == {"asks", "mta"}


@pytest.mark.parametrize(
    ("stanzas", "told"),
    [
        ((stanza("a", Depends="b"),), "b (needed by a)"),
        ((stanza("a", Depends="b (>= 2)"), stanza("b", "1")), "b (>= 2) (needed by a)"),
        ((stanza("c"),), "a"),
    ],
)
def test_what_cannot_be_had_is_named(stanzas: tuple[str, ...], told: str) -> None:
    with pytest.raises(debian.RepositoryError) as caught:
        names(archive(*stanzas), "a")
    assert str(caught.value) == told


def test_a_version_that_is_asked_for_is_kept() -> None:
    found = archive(stanza("driver", "580.10-1"), stanza("driver", "590.1-1"), stanza("epoch", "1:2-1"))
    assert found.closure([{"name": "driver", "version": "580.10-*"}])["driver"].version == "580.10-1"
    assert found.closure([{"name": "driver=580.10-1"}])["driver"].version == "580.10-1"
    assert found.closure([{"name": "epoch", "version": "2-*"}])["epoch"].version == "1:2-1"
    with pytest.raises(debian.RepositoryError, match=r"driver 570\.\*"):
        found.closure([{"name": "driver", "version": "570.*"}])


def test_preferences_choose_as_apt_does() -> None:
    pins = (
        {"package": "nvidia-*", "pin": "release o=Debian", "priority": -1},
        {"package": "nvidia-*", "pin": "version 580.*", "priority": 1001},
    )
    found = archive(stanza("nvidia-x", "999"), pins=pins)
    assert found.candidate("nvidia-x") is None
    found.add(
        debian.read_packages(
            stanza("nvidia-x", "580.1") + stanza("nvidia-x", "590.1"), "http://n.example", "", "NVIDIA"
        )
    )
    assert found.candidate("nvidia-x").version == "580.1"


RELEASE = """\
Origin: Debian
Suite: stable
SHA256:
 {} 12 main/binary-amd64/Packages.xz
 {} 0 ./Packages
""".format("a" * 64, "b" * 64)


def test_a_release_names_its_indexes_signed_or_not() -> None:
    signed = f"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\n{RELEASE}-----BEGIN PGP SIGNATURE-----\n\nx\n"
    for text in (RELEASE, signed):
        record, files = debian.read_release(text)
        assert record["Origin"] == "Debian"
        assert files == {"main/binary-amd64/Packages.xz": ("a" * 64, 12), "Packages": ("b" * 64, 0)}


def test_continued_lines_belong_to_their_field() -> None:
    text = "Package: a\nVersion: 1\nDepends: b,\n c\nDescription: one\n two\nFilename: ./a.deb\nSize: 3\n"
    text += f"SHA256: {'a' * 64}\n"
    (package,) = debian.read_packages(text, "http://a.example", "", "")
    assert (package.needs, package.file, package.size) == ("b, c", "a.deb", 3)


@pytest.mark.parametrize("sha256", ["", "0" * 63, "md5"])
def test_a_package_without_a_hash_is_not_there(sha256: str) -> None:
    text = f"Package: x\nVersion: 1\nFilename: pool/x.deb\nSize: 1\nSHA256: {sha256}\n"
    assert list(debian.read_packages(text, "https://deb.example/debian", "main", "Debian")) == []
