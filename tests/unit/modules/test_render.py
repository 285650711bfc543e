"""The render module: what it writes, what it leaves alone, and what a kill in the middle leaves behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
Load = Callable[[str], ModuleType]

HERE = Path(__file__).resolve()


def bundle(load: Load, entries: list[dict[str, Any]], check: bool = False) -> tuple[Any, list[str]]:
    """Examine and (unless check) apply; returns the bundle and the changed paths."""
    render = load("render")
    keys = ("content", "secret_content", "src", "owner", "group", "mode")
    result = render.Bundle([dict.fromkeys(keys) | {"state": "file"} | entry for entry in entries], check)
    done: list[str] = []
    if check:
        done = [entry["path"] for entry in result.changed()]
    else:
        result.apply(done)
    return result, done


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_writes_a_tree_once(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    files = [
        {"path": str(folder), "state": "directory", "mode": "0750"},
        {"path": str(folder / "a.env"), "content": "A=1\n"},
        {"path": str(folder / "token"), "secret_content": "hunter2-secret\n"},
        {"path": str(folder / "current"), "state": "link", "src": "releases/abc"},
    ]
    paths = [entry["path"] for entry in files]
    planned = run("render", check=True, files=files)
    assert planned["changed_paths"] == paths
    assert not folder.exists()
    first = run("render", files=files)
    assert first["changed_paths"] == paths
    assert (folder / "a.env").read_text() == "A=1\n"
    assert (folder / "current").readlink() == Path("releases/abc")
    assert [mode(folder), mode(folder / "a.env"), mode(folder / "token")] == [0o750, 0o644, 0o600]
    before = {path: os.lstat(path).st_mtime_ns for path in paths}
    second = run("render", files=files)
    assert second == {"changed": False, "changed_paths": [], "diff": [], **{k: second[k] for k in ("invocation",)}}
    assert {path: os.lstat(path).st_mtime_ns for path in paths} == before
    assert sorted(path.name for path in folder.iterdir()) == ["a.env", "current", "token"]


def test_secret_is_nowhere_in_the_answer(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("former-secret\n")
    path.chmod(0o600)
    result = run("render", files=[{"path": str(path), "secret_content": "hunter2-secret\n"}])
    assert result["changed"]
    assert "hunter2" not in str(result)
    assert "former" not in str(result)
    assert result["diff"][0]["before"] == "(secret, 14 bytes)\n"
    assert result["diff"][0]["after"] == "(secret, 15 bytes, changed)\n"
    removed = run("render", files=[{"path": str(path), "state": "absent"}])
    assert "hunter2" not in str(removed)


def test_secret_for_everybody_is_refused(run: Run, tmp_path: Path) -> None:
    result = run("render", files=[{"path": str(tmp_path / "t"), "secret_content": "secret-x", "mode": "0644"}])
    assert result["failed"]
    assert "lets everybody" in result["msg"]
    assert not (tmp_path / "t").exists()


def test_diff_shows_both_sides(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old\n")
    path.chmod(0o600)
    result = run("render", check=True, files=[{"path": str(path), "content": "new\n", "mode": "0644"}])
    assert [(side["before"], side["after"]) for side in result["diff"]] == [
        ("old\n", "new\n"),
        ("mode: 0600\n", "mode: 0644\n"),
    ]
    assert path.read_text() == "old\n"


def test_link_at_the_path_is_replaced_not_followed(load: Load, tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine\n")
    path.symlink_to(victim)
    bundle(load, [{"path": str(path), "content": "new\n"}])
    assert victim.read_text() == "mine\n"
    assert not path.is_symlink()
    assert path.read_text() == "new\n"


def test_link_where_a_folder_is_wanted_is_refused(load: Load, tmp_path: Path) -> None:
    render = load("render")
    (tmp_path / "real").mkdir()
    (tmp_path / "dir").symlink_to("real")
    with pytest.raises(Exception, match="is a link, wanted is state directory") as caught:
        bundle(load, [{"path": str(tmp_path / "dir"), "state": "directory", "mode": "0700"}])
    assert type(caught.value).__name__ == render.RenderError.__name__
    assert mode(tmp_path / "real") != 0o700


def test_link_is_changed_in_one_step(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "current"
    path.symlink_to("releases/old")
    _, done = bundle(load, [{"path": str(path), "state": "link", "src": "releases/new"}])
    assert done == [str(path)]
    assert path.readlink() == Path("releases/new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["current"]


def test_missing_folder_is_an_error_but_not_in_check_mode(run: Run, tmp_path: Path) -> None:
    files = [
        {"path": str(tmp_path / "ok"), "content": "x"},
        {"path": str(tmp_path / "no" / "a"), "content": "x", "owner": "nobody-here", "mode": "0644"},
    ]
    planned = run("render", check=True, files=files)
    assert planned["changed_paths"] == [entry["path"] for entry in files]
    assert planned["missing_parents"] == [str(tmp_path / "no")]
    result = run("render", files=files)
    assert result["failed"]
    assert "list it before, with state directory" in result["msg"]
    assert not (tmp_path / "ok").exists(), "nothing may be written when an entry is wrong"


def test_missing_owner_is_named(run: Run, tmp_path: Path) -> None:
    result = run("render", files=[{"path": str(tmp_path / "a"), "content": "x", "owner": "nobody-here"}])
    assert "owner 'nobody-here' does not exist" in result["msg"]


def test_absent_removes_folders_only_when_empty(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "x.d"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).touch()
    gone = [{"path": str(folder / "a"), "state": "absent"}, {"path": str(folder), "state": "absent"}]
    with pytest.raises(Exception, match=r"is not empty \(b\)"):
        bundle(load, gone)
    assert (folder / "a").exists()
    _, done = bundle(load, [{"path": str(folder / "b"), "state": "absent"}, *gone])
    assert len(done) == 3
    assert not folder.exists()
    assert bundle(load, gone)[1] == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "relative", "content": ""}, "not an absolute path"),
        ({"path": "/tmp/../etc/x", "content": ""}, "not an absolute path"),
        ({"path": "/tmp/x"}, "needs content or secret_content"),
        ({"path": "/tmp/x", "content": "a", "secret_content": "b"}, "not both"),
        ({"path": "/tmp/x", "state": "directory", "content": "a"}, "goes with state file only"),
        ({"path": "/tmp/x", "state": "link"}, "src and state link"),
        ({"path": "/tmp/x", "content": "a", "src": "b"}, "src and state link"),
        ({"path": "/tmp/x", "content": "a", "mode": "420"}, "not an octal string"),
        ({"path": "/tmp/x", "content": "a", "mode": "u=rw"}, "not an octal string"),
    ],
)
def test_wrong_entries(load: Load, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        bundle(load, [entry], check=True)


def test_same_path_twice(load: Load) -> None:
    with pytest.raises(Exception, match="listed twice"):
        bundle(load, [{"path": "/tmp/x", "content": "a"}, {"path": "/tmp/x", "content": "b"}], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_owner_and_mode_alone_keep_the_time(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("x")
    os.utime(path, (1, 1))
    _, done = bundle(load, [{"path": str(path), "content": "x", "owner": "1234", "group": "4321", "mode": "0600"}])
    assert done == [str(path)]
    assert (path.stat().st_uid, path.stat().st_gid, path.stat().st_mtime, mode(path)) == (1234, 4321, 1, 0o600)
    bundle(load, [{"path": str(path), "content": "y"}])
    assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (1234, 4321, 0o600), "kept when not given"


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_kill_in_the_middle_leaves_the_old_content(load: Load, tmp_path: Path, call: str) -> None:
    path = tmp_path / "node.env"
    path.write_text("old\n")
    script = f"""
import importlib.util, os, signal
s = importlib.util.spec_from_file_location("render", {str(HERE.parents[3] / "plugins/modules/render.py")!r})
render = importlib.util.module_from_spec(s); s.loader.exec_module(render)
os.{call} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
render.write_atomically({str(path)!r}, b"new\\n", 0o600, -1, -1)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old\n"
    assert len(list(tmp_path.iterdir())) == 2, "the temporary file is still there"
    bundle(load, [{"path": str(path), "content": "new\n"}])
    assert path.read_text() == "new\n"
    assert list(tmp_path.iterdir()) == [path], "the next run clears it"


def test_leftovers_go_even_when_nothing_changes_and_others_stay(load: Load, tmp_path: Path) -> None:
    render = load("render")
    path = tmp_path / "a"
    path.write_text("x")
    stale = tmp_path / f".a{render.TMP_MARK}abcd"
    other = tmp_path / f".other{render.TMP_MARK}abcd"
    for leftover in (stale, other):
        leftover.touch()
    _, done = bundle(load, [{"path": str(path), "content": "x"}])
    assert done == []
    assert not stale.exists()
    assert other.exists()


@pytest.fixture(name="kernel")
def fixture_kernel(load: Load, tmp_path: Path) -> tuple[ModuleType, Path]:
    render = load("render")
    render.PROC_SYS = str(tmp_path / "sys")
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    (tmp_path / "sys" / "vm" / "swappiness").write_text("60\n")
    return render, tmp_path


def sysctl_bundle(render: ModuleType, path: Path, content: str, check: bool = False) -> Any:
    keys = ("secret_content", "src", "owner", "group", "mode")
    entry = dict.fromkeys(keys) | {"path": str(path), "state": "file", "content": content, "sysctl": True}
    return render.Bundle([entry], check)


def test_sysctl_is_in_force_at_once(kernel: tuple[ModuleType, Path]) -> None:
    render, tmp_path = kernel
    value = tmp_path / "sys" / "vm" / "swappiness"
    conf = tmp_path / "60.conf"
    text = "# a comment\n-vm.swappiness = 10\n"
    assert sysctl_bundle(render, conf, text, check=True).changed_paths() == [str(conf), str(value)]
    assert value.read_text() == "60\n"
    done: list[str] = []
    sysctl_bundle(render, conf, text).apply(done)
    assert done == [str(conf), str(value)]
    assert value.read_text() == "10"
    value.write_text("11\n")
    done = []
    bundle_of_second_run = sysctl_bundle(render, conf, text)
    bundle_of_second_run.apply(done)
    assert done == [str(value)], "what somebody changed by hand is put right"
    assert bundle_of_second_run.setting_diffs(done)[0]["before"] == "11\n"
    done = []
    sysctl_bundle(render, conf, text).apply(done)
    assert done == []


def test_sysctl_that_is_refused_or_unknown_is_a_warning(kernel: tuple[ModuleType, Path]) -> None:
    render, tmp_path = kernel
    (tmp_path / "sys" / "vm" / "odd").mkdir()  # reading it fails, even for root
    conf = tmp_path / "60.conf"
    unsure = sysctl_bundle(render, conf, "vm.odd = 1\nvm.nothing = 1\n")
    done: list[str] = []
    unsure.apply(done)
    assert done == [str(conf)]
    assert [setting.warning() for setting in unsure.settings] == [
        "vm.odd = 1: Is a directory",
        "vm.nothing = 1: this kernel has no such setting",
    ]


@pytest.mark.parametrize("text", ["vm.swappiness", "../etc/passwd = 1", "vm.* = 1", "swappiness = 1"])
def test_sysctl_lines_that_are_no_settings(kernel: tuple[ModuleType, Path], text: str) -> None:
    render, tmp_path = kernel
    with pytest.raises(Exception, match="is not a setting of the kernel"):
        sysctl_bundle(render, tmp_path / "60.conf", text)
