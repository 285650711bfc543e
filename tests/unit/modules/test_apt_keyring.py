"""The apt_keyring module: keys made with gpg for this test, and what is done about those that are not as asked for."""

from __future__ import annotations

import base64
import hashlib
import stat
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
Load = Callable[[str], ModuleType]

# gpg --quick-gen-key; the fingerprints are those that gpg printed.
ONE = """-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEaw03ihYJKwYBBAHaRw8BAQdACpEzLHgi1Rqc0kPCIX9MsYvvcrfz22ZHH5xh
Dw0Cx1G0I2lyb25yYWNrIHRlc3Qgb25lIDxvbmVAZXhhbXBsZS5vcmc+iJAEExYI
ADgWIQQs4ctJ3Q15D0s4pAaKpJuUqhIKyQUCaw03igIbAwULCQgHAgYVCgkICwIE
FgIDAQIeAQIXgAAKCRCKpJuUqhIKyb1/AQD+2v7wn1cKj6mpyXyK2wMAdUp/e9u3
pP4UrCoHBCFoFAEAhaBORazMgshtp6eTrreZ7T+WoVUEK3FauaSljrk2/AU=
=fEJh
-----END PGP PUBLIC KEY BLOCK-----
"""
TWO = """-----BEGIN PGP PUBLIC KEY BLOCK-----
Comment: with a header, as keyservers send it

mDMEaw03ihYJKwYBBAHaRw8BAQdAAewi+gYTRRjSs7VeAHo89TMRCeXfVkzk8xuh
3ckU+2u0I2lyb25yYWNrIHRlc3QgdHdvIDx0d29AZXhhbXBsZS5vcmc+iJAEExYI
ADgWIQQrXnzY3czy8Nz0FeyvrHArqVkCsAUCaw03igIbAwULCQgHAgYVCgkICwIE
FgIDAQIeAQIXgAAKCRCvrHArqVkCsD5QAQCrXkGzNzVEQ/vvjK6QvSQXxrBwtJ+Q
acrMIirAzQNfUAD/RajXQImhBEMHNSEjjq0kLUbT8gp++rN5zWy7nZtqyQ0=
=jQjQ
-----END PGP PUBLIC KEY BLOCK-----
"""
FINGERPRINT_ONE = "2CE1CB49DD0D790F4B38A4068AA49B94AA120AC9"
FINGERPRINT_TWO = "2B5E7CD8DDCCF2F0DCF415ECAFAC702BA95902B0"


def packets(text: str) -> bytes:
    return base64.b64decode(text.partition("\n\n")[2].partition("\n=")[0])


@pytest.fixture(name="key")
def fixture_key(tmp_path: Path) -> dict[str, Any]:
    source = tmp_path / "one.pub"
    source.write_text(ONE)
    path = tmp_path / "keyrings" / "test.asc"
    return {"path": str(path), "url": source.as_uri(), "fingerprint": FINGERPRINT_ONE, "variable": "some_key_url"}


def test_fingerprints_are_those_of_gpg(load: Load) -> None:
    module = load("apt_keyring")
    assert module.fingerprints(module.binary(ONE.encode())) == [FINGERPRINT_ONE]
    assert module.fingerprints(module.binary(TWO.encode())) == [FINGERPRINT_TWO]
    assert module.fingerprints(module.binary((ONE + TWO).encode())) == [FINGERPRINT_ONE, FINGERPRINT_TWO]
    assert module.fingerprints(module.binary(ONE.replace("\n", "\r\n").encode())) == [FINGERPRINT_ONE]


def test_packets_of_the_new_form(load: Load) -> None:
    module = load("apt_keyring")
    old = packets(ONE)
    assert old[0] == 0x98  # a public key, old form, one octet of length
    length = old[1]
    body = old[2 : 2 + length]
    for head in (bytes([0xC6, length]), bytes([0xC6, 255, 0, 0, 0, length]), bytes([0x99, 0, length])):
        assert module.fingerprints(head + body) == [FINGERPRINT_ONE]


def test_armor_is_as_gpg_writes_it(load: Load) -> None:
    assert load("apt_keyring").armored(packets(ONE)).decode() == ONE


def test_a_key_is_written_once(run: Run, key: dict[str, Any], tmp_path: Path) -> None:
    path = Path(key["path"])
    planned = run("apt_keyring", check=True, keys=[key])
    assert planned["changed_paths"] == [str(path)]
    assert not path.parent.exists()
    first = run("apt_keyring", keys=[key])
    assert first["changed"] is True
    assert first["diff"][0]["after"] == f"{FINGERPRINT_ONE}\n"
    assert path.read_text() == ONE
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    # Without the network: what is in place is good enough.
    (tmp_path / "one.pub").unlink()
    assert run("apt_keyring", keys=[key])["changed"] is False
    assert [entry.name for entry in path.parent.iterdir()] == ["test.asc"]


def test_keys_without_armor_get_one(run: Run, key: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "one.pub").write_bytes(packets(ONE))
    key |= {"url": str(tmp_path / "one.pub"), "sha256": hashlib.sha256(packets(ONE)).hexdigest()}
    assert run("apt_keyring", keys=[key])["changed"] is True
    assert Path(key["path"]).read_text() == ONE
    # The checksum was that of the file without armor.
    assert run("apt_keyring", keys=[key])["changed"] is False


@pytest.mark.parametrize(
    ("content", "asked", "words"),
    [
        (TWO, {}, [FINGERPRINT_TWO, f"wanted is {FINGERPRINT_ONE} alone", "not trusted"]),
        (ONE + TWO, {}, [FINGERPRINT_TWO, "alone"]),
        (ONE, {"sha256": "0" * 64}, ["has SHA-256", "0" * 64, "not trusted"]),
        ("<html>not found</html>", {}, ["is no OpenPGP key", "correct the address"]),
        ("", {}, ["is no OpenPGP key"]),
        (ONE.replace("Dw0Cx1G0", "Dw0!!1G0"), {}, ["damaged armor"]),
    ],
)
def test_what_is_not_as_asked_for_is_not_written(
    run: Run, key: dict[str, Any], content: str, asked: dict[str, str], words: list[str]
) -> None:
    Path(key["url"].removeprefix("file://")).write_text(content)
    result = run("apt_keyring", keys=[key | asked])
    assert result["failed"] is True
    for word in [*words, "some_key_url", key["url"]]:
        assert word in result["msg"]
    assert not Path(key["path"]).exists()


@pytest.mark.parametrize("cut", [1, 30, 60])
def test_a_key_that_is_cut_off(run: Run, key: dict[str, Any], tmp_path: Path, cut: int) -> None:
    (tmp_path / "one.pub").write_bytes(packets(ONE)[:cut])
    result = run("apt_keyring", keys=[key])
    assert "is cut off" in result["msg"]


def test_a_key_that_cannot_be_fetched(run: Run, key: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "one.pub").unlink()
    result = run("apt_keyring", keys=[key])
    for word in ("cannot be fetched", "some_key_url", "proxy"):
        assert word in result["msg"]


def test_a_file_that_was_tampered_with_is_replaced(run: Run, key: dict[str, Any]) -> None:
    path = Path(key["path"])
    path.parent.mkdir()
    path.write_text(ONE + TWO)
    result = run("apt_keyring", keys=[key])
    assert result["changed"] is True
    assert FINGERPRINT_TWO in result["diff"][0]["before"]
    assert path.read_text() == ONE


def test_names_that_apt_would_read_otherwise_are_refused(run: Run, key: dict[str, Any], tmp_path: Path) -> None:
    result = run("apt_keyring", keys=[key | {"path": str(tmp_path / "test.gpg")}])
    assert "must end in .asc" in result["msg"]
