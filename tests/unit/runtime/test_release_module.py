"""The module `release` on a small stand-in for an environment: pack, unpack, switch, clean up, survive kills."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils import fanout, serve_files
from ansible_collections.ironrack.vllm.plugins.modules import release as module
from releases import ID, OTHERS, fill, needs_zstd

# ---------------------------------------------------------------- manifest


def test_the_manifest_names_every_file_and_link(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("x")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / module.MARKER).write_text("{}")
    os.utime(tmp_path / "b" / "file", (1.5, 1.5))
    (tmp_path / "b").chmod(0o750)
    (tmp_path / "b" / "file").chmod(0o640)
    digest, files, size = module.write_manifest(str(tmp_path))
    text = (tmp_path / module.MANIFEST).read_text()
    assert text == (
        f"link\tb\t0\t0000\t0\ta\nfolder\t\t0\t0750\t0\tb\n"
        f"file\t{hashlib.sha256(b'x').hexdigest()}\t1\t0640\t1\tb/file\n"
    )
    assert (digest, files, size) == (hashlib.sha256(text.encode()).hexdigest(), 2, 1)
    assert module.write_manifest(str(tmp_path))[0] == digest


# ---------------------------------------------------------------- archive


@needs_zstd
def test_a_release_travels_as_an_archive(make, tmp_path):
    builder = make()
    fill(builder)
    result = builder.built()["archive"]
    assert result["sha256"] == module.file_sha256(result["path"])
    assert Path(result["path"] + ".sha256").read_text() == f"{result['sha256']}  {ID}.tar.zst\n"

    node = make(prefix=str(tmp_path / "other"), source=result)  # same cache: nothing to fetch
    node.fetched()
    assert node.marker()["id"] == ID
    assert (Path(node.path) / "lib/data.bin").read_bytes() == b"d" * 100
    assert (Path(node.path) / "bin/python").is_symlink()
    (action,) = node.actions  # the seconds depend on the machine's load
    assert re.fullmatch(rf"unpacked {re.escape(node.path)} in \d+ s", action)
    assert Path(result["path"]).exists(), "an archive that was there before stays"
    again = make(prefix=str(tmp_path / "other"), source=result)
    again.fetched()
    assert not again.changed


@pytest.fixture
def offered(make, monkeypatch):
    """What the builder offers, and a real server of its archive."""
    monkeypatch.setattr(module.fanout, "stop", lambda unit: None)
    builder = make()
    fill(builder)
    archive = builder.built()["archive"]
    server = serve_files.Server(("127.0.0.1", 0), builder.archives, [archive["file"]["name"]])
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield {**archive, "url": fanout.base_url("127.0.0.1", server.server_port)}
    server.shutdown()
    server.server_close()


@needs_zstd
def test_a_fetched_archive_stays_for_the_nodes_behind_until_the_switch(make, tmp_path, offered):
    elsewhere = {"prefix": str(tmp_path / "other"), "cache_dir": str(tmp_path / "cache2")}
    node = make(**elsewhere, source=offered, chain={"sources": [offered["url"]], "serve": True})
    node.fetched()
    assert node.marker() is not None
    assert f"from {offered['url']}" in node.actions[0]
    assert Path(node.archive_path).read_bytes() == Path(offered["path"]).read_bytes()
    last = make(**elsewhere)
    last.make_current()
    assert not Path(node.archive_path).exists()
    builder = make()
    builder.make_current()
    assert Path(builder.archive_path).exists(), "the builder keeps it"


@needs_zstd
def test_what_cannot_be_fetched_is_an_error_that_says_what_helps(make, tmp_path, offered, monkeypatch):
    stopped = []
    monkeypatch.setattr(module.fanout, "stop", stopped.append)

    def nobody(*args, **options):
        raise fanout.FanoutError("x could not be fetched from any node")

    monkeypatch.setattr(module.fanout, "fetch", nobody)
    node = make(prefix=str(tmp_path / "other"), cache_dir=str(tmp_path / "cache2"), source=offered)
    with pytest.raises(module.ReleaseError, match=r"from any node\. Check .*python_env_serve_port.*\.sha256 file"):
        node.fetched()
    assert stopped == [module.SERVER_UNIT], "the nodes behind it go on to others at once"


@needs_zstd
def test_a_sender_of_wrong_bytes_is_named_in_a_warning(make, tmp_path, offered):
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    content = bytearray(Path(offered["path"]).read_bytes())
    content[20] ^= 1
    (spoilt / offered["file"]["name"]).write_bytes(content)
    server = serve_files.Server(("127.0.0.1", 0), str(spoilt), [offered["file"]["name"]])
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    wrong = fanout.base_url("127.0.0.1", server.server_port)
    node = make(
        prefix=str(tmp_path / "other"),
        cache_dir=str(tmp_path / "cache2"),
        source=offered,
        chain={"sources": [wrong, offered["url"]]},
    )
    warnings = []
    node.module.warn = warnings.append
    try:
        node.fetched()
    finally:
        server.shutdown()
        server.server_close()
    assert node.marker() is not None
    assert warnings[0].startswith(f"{wrong} sent wrong bytes")


@needs_zstd
def test_a_node_that_cannot_serve_fetches_all_the_same(make, tmp_path, offered, monkeypatch):
    def taken(*args, **options):
        raise fanout.FanoutError("does not listen: the port is taken.")

    monkeypatch.setattr(module.fanout, "serve", taken)
    node = make(
        prefix=str(tmp_path / "other"),
        cache_dir=str(tmp_path / "cache2"),
        source=offered,
        chain={"sources": [offered["url"]], "serve": True},
        serve={"address": "127.0.0.1", "port": 1, "lifetime": 60},
    )
    warnings = []
    node.module.warn = warnings.append
    node.fetched()
    assert node.marker() is not None
    assert "the port is taken" in warnings[0]


@needs_zstd
def test_a_seeded_archive_is_used_instead_of_a_build(make, tmp_path):
    first = make()
    fill(first)
    first.built()
    shutil.rmtree(first.path)
    second = make()
    second.build = lambda: pytest.fail("built although there is an archive")
    second.built()
    assert second.marker() is not None


@needs_zstd
def test_a_damaged_archive_is_not_trusted(make):
    first = make()
    fill(first)
    archive = Path(first.built()["archive"]["path"])
    archive.write_bytes(archive.read_bytes()[:-1] + b"!")
    second = make()
    sha256 = second.built()["archive"]["sha256"]
    assert sha256 == module.file_sha256(str(archive))
    assert any("packed" in action for action in second.actions)


@needs_zstd
def test_an_archive_of_something_else_is_refused(make, tmp_path):
    release = make()
    fill(release, OTHERS[0])
    release.prepare_folders()
    subprocess.run(
        ["tar", "--create", "--zstd", "--file", release.archive_path, "--directory", release.root, OTHERS[0]],
        check=True,
    )
    with pytest.raises(module.ReleaseError, match="does not hold the release"):
        release.unpack(100)
    assert release.marker() is None


# ---------------------------------------------------------------- kills


def test_a_folder_without_a_marker_is_not_a_release(make):
    release = make()
    Path(release.path, "bin").mkdir(parents=True)
    assert release.marker() is None
    Path(release.path, module.MARKER).write_text('{"id": "')
    assert release.marker() is None
    Path(release.path, module.MARKER).write_text(json.dumps({"id": OTHERS[0]}))
    assert release.marker() is None


@needs_zstd
def test_what_a_killed_run_left_is_replaced(make, tmp_path):
    builder = make()
    fill(builder)
    archive = builder.built()["archive"]
    node = make(prefix=str(tmp_path / "other"), source=archive)
    Path(node.path, "half").mkdir(parents=True)
    Path(node.root, f".{ID}.part", ID).mkdir(parents=True)
    Path(node.archive_path + ".part").write_bytes(b"half")
    node.fetched()
    assert node.marker() is not None
    assert not Path(node.path, "half").exists()
    assert not Path(node.root, f".{ID}.part").exists()


def test_a_second_run_waits_for_the_first(make, tmp_path):
    first, second = make(), make()
    order = []
    lock = str(tmp_path / "lock")
    entered = threading.Event()

    def hold():
        with first.locked(lock):
            entered.set()
            time.sleep(0.7)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with second.locked(lock):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert "waiting for another run" in (tmp_path / "release.log").read_text()


def test_a_fetch_that_waited_does_not_do_it_again(make):
    first, second = make(), make(source={"sha256": "0" * 64})
    second.prepare_folders()
    thread = threading.Thread(target=second.fetched)
    with first.locked(str(Path(first.root, f".{ID}.lock"))):
        thread.start()
        time.sleep(0.3)
        fill(first)
    thread.join()
    assert not second.changed


def test_the_lock_outlives_a_killed_parent_until_its_child_ends(make, tmp_path):
    release = make()
    lock = str(tmp_path / "lock")
    with release.locked(lock):
        child = subprocess.Popen(["sleep", "1"], pass_fds=release.lock_handles)
    try:
        with pytest.raises(module.ReleaseError, match="another run has held"), make().locked(lock, patience=0.1):
            pass
    finally:
        child.wait()
    with make().locked(lock, patience=1):
        pass


def test_a_lock_whose_file_was_removed_is_not_taken_by_two(make, tmp_path):
    first, second, third = make(), make(), make()
    lock = str(tmp_path / "lock")
    waiting, taken, done = threading.Event(), threading.Event(), threading.Event()

    def wait():
        waiting.set()
        with second.locked(lock):
            taken.set()
            done.wait(10)

    thread = threading.Thread(target=wait)
    with first.locked(lock):
        thread.start()
        waiting.wait()
        time.sleep(0.3)  # it has opened the file by now
        assert first.remove(lock) is False, "it is held"
        Path(lock).unlink()
    assert taken.wait(10)
    try:
        with pytest.raises(module.BusyError), third.locked(lock, patience=0):
            pass
    finally:
        done.set()
        thread.join()


def test_runs_that_build_two_releases_share_one_uv(make, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / NAME, "w") as archive:
        archive.writestr("uv-9.9.9.data/scripts/uv", "#!/bin/sh\nexit 0\n#" + "x" * (30 << 20))
    sha256 = module.file_sha256(str(wheels / NAME))
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                release = make(find_links=[str(wheels)], uv_sha256=sha256)
                for _ in range(4):
                    subprocess.run([release.uv()], check=True)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


# ---------------------------------------------------------------- switch


def test_the_switch_is_one_step_and_only_to_a_complete_release(make):
    release = make()
    Path(release.root).mkdir(parents=True)
    with pytest.raises(module.ReleaseError, match="is not complete"):
        release.make_current()
    assert release.linked() == ""
    fill(release)
    release.make_current()
    assert str(Path(release.link).readlink()) == f"releases/{ID}"
    before = os.lstat(release.link).st_mtime_ns
    again = make()
    again.make_current()
    assert not again.changed
    assert os.lstat(release.link).st_mtime_ns == before, "units restart when the link is newer than they are"


def test_a_machine_of_the_same_name_proves_for_itself(make):
    release, proven = make(), []
    fill(release, built_on=socket.gethostname(), machine="of another site")
    release.prove = lambda: proven.append(True)
    release.make_current()
    assert proven == [True]


def test_an_undone_switch_leaves_no_trace(make):
    """Units that are older than the link are restarted by the next run of serve.yml."""
    old, new = make(release_id=OTHERS[0]), make()
    for release in (old, new):
        fill(release)
        release.make_current()
        os.utime(release.link, ns=(10**18, 10**18), follow_symlinks=False)
    prefix, tree = new.params["prefix"], module.release_tree
    tree.switch(prefix, OTHERS[0], "", 10**18)
    assert (tree.linked(prefix), tree.linked(prefix, "previous"), tree.link_time(prefix)) == (OTHERS[0], "", 10**18)


def test_a_folder_that_cannot_be_flushed_is_switched_all_the_same(make, monkeypatch):
    release = make()
    fill(release)

    real = module.release_tree.sync_folder

    def refuse(path):
        if path == release.params["prefix"]:
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(module.release_tree, "sync_folder", refuse)
    monkeypatch.setitem(release.params, "log_path", "/dev/full")
    release.make_current()
    assert release.is_current()


def test_a_release_that_is_switched_to_is_not_removed_meanwhile(make):
    release, other = make(), make(release_id=OTHERS[0], keep=1)
    for each in (release, other):
        fill(each)
    age(Path(release.path, module.MARKER), 1000)
    with module.release_tree.held(release.params["prefix"], ID):
        other.make_current()
    assert Path(release.path).is_dir()
    make(release_id=OTHERS[0], keep=1).make_current()
    assert not Path(release.path).exists()


def test_who_waits_for_a_removed_lock_takes_the_next_one(make, tmp_path):
    release = make()
    fill(release)
    prefix, lock = release.params["prefix"], Path(release.root, f".{ID}.lock")
    order = []

    def wait():
        with module.release_tree.held(prefix, ID):
            order.append("second")

    thread = threading.Thread(target=wait)
    with module.release_tree.held(prefix, ID):
        thread.start()
        time.sleep(0.3)
        lock.unlink()
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert lock.exists()


@needs_zstd
def test_room_for_archive_and_release_is_looked_for_before_the_transfer(make, tmp_path, offered, monkeypatch):
    release = make(prefix=str(tmp_path / "other"), cache_dir=str(tmp_path / "cache2"))
    release.params["source"] = {**offered, "unpacked_bytes": 1 << 60}
    monkeypatch.setattr(release, "fetch_archive", lambda: pytest.fail("fetched in vain"))
    with pytest.raises(module.ReleaseError, match=r"not enough disk space .*the archive.*the release"):
        release.fetched()


def test_a_link_that_cannot_be_made_leaves_what_runs_and_says_what_helps(make, monkeypatch):
    old, release = make(release_id=OTHERS[0]), make()
    fill(old)
    old.make_current()
    fill(release)
    real = module.release_tree.replace_link

    def refuse(path, target):
        if path == release.link:
            raise OSError(errno.EROFS, "Read-only file system", path)
        real(path, target)

    monkeypatch.setattr(module.release_tree, "replace_link", refuse)
    with pytest.raises(module.ReleaseError, match=r"stays at releases/.*Read-only file system.*run again"):
        release.make_current()
    assert release.linked() == f"releases/{OTHERS[0]}"


def test_an_old_release_that_cannot_be_removed_is_no_failed_switch(make, monkeypatch):
    release, warned = make(), []
    fill(release)

    def refuse():
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(release, "collect_garbage", refuse)
    monkeypatch.setattr(release.module, "warn", warned.append, raising=False)
    release.make_current()
    assert release.is_current()
    assert "Device or resource busy" in warned[0]


def test_a_release_that_does_not_import_is_not_switched_to(make):
    old = make(release_id=OTHERS[0])
    fill(old)
    old.make_current()
    release = make()
    fill(release)

    def broken():
        raise module.ReleaseError("no module named torch")

    release.prove = broken
    with pytest.raises(module.ReleaseError, match="torch"):
        release.make_current()
    assert release.linked() == f"releases/{OTHERS[0]}"


def test_the_builder_proves_once(make):
    release = make()
    fill(release, built_on=socket.gethostname(), machine=module.this_machine())
    release.prove = lambda: pytest.fail("proven twice")
    release.fetched()
    release.make_current()
    assert release.is_current()


@needs_zstd
def test_a_release_is_proven_where_all_nodes_wait_for_each_other(make, tmp_path, offered):
    elsewhere = {"prefix": str(tmp_path / "other"), "cache_dir": str(tmp_path / "cache2"), "source": offered}
    proven = []

    def run(state, broken=False):
        def prove():
            proven.append(state)
            if broken:
                raise module.ReleaseError("GLIBC_2.38 not found")

        release = make(**elsewhere)
        release.prove = prove
        getattr(release, state)()
        return release

    for _ in range(2):  # also when it is there already
        with pytest.raises(module.ReleaseError, match="GLIBC"):
            run("fetched", broken=True)
    run("fetched")
    release = run("make_current")
    assert release.is_current()
    assert proven == ["fetched"] * 3, "not a second time for the switch"
    run("fetched")
    assert proven == ["fetched"] * 3, "nor where it runs"
    Path(release.link).unlink()
    run("make_current")
    assert proven[3:] == ["make_current"], "the proof counts for one switch"


def test_check_mode_changes_nothing_on_a_bare_node(make, tmp_path):
    for state in ("built", "fetched", "make_current"):
        release = make(check_mode=True)
        getattr(release, state)()
        assert release.changed
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- old releases


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))


def age(path, seconds):
    stamp = time.time() - seconds
    os.utime(path, (stamp, stamp))


def test_old_releases_and_archives_go_the_newest_stay(make):
    release = make(keep=3)
    for index, identity in enumerate(OTHERS):
        age(fill(release, identity) / module.MARKER, 1000 - index)
    release.prepare_folders()
    for index, identity in enumerate(OTHERS):
        archive = Path(release.archives, f"{identity}.tar.zst")
        archive.write_bytes(b"x")
        age(archive, 1000 - index)
    fill(release)
    release.make_current()
    assert names(release.root) == sorted([ID, *OTHERS[-2:]])
    assert names(release.archives) == [f"{identity}.tar.zst" for identity in OTHERS[-2:]]


def test_a_host_that_only_builds_clears_up_too(make):
    release = make(keep=2, pack=False)
    for index, identity in enumerate(OTHERS):
        age(fill(release, identity) / module.MARKER, 1000 - index)
    fill(release)
    release.built()
    assert names(release.root) == sorted([ID, OTHERS[-1]])
    # A node does it with the switch, when the one before is known.
    release.make_current()
    for identity in OTHERS[:-1]:
        fill(release, identity)
    make(keep=2, pack=False).built()
    assert names(release.root) == sorted([ID, *OTHERS])


def test_what_a_process_uses_stays(make):
    old = make(release_id=OTHERS[0])
    age(fill(old) / module.MARKER, 1000)
    old.make_current()
    running = make(release_id=OTHERS[1])
    age(fill(running) / module.MARKER, 900)
    third = make(release_id=OTHERS[2])
    age(fill(third) / module.MARKER, 800)
    process = subprocess.Popen(["sleep", "30"], env={"VIRTUAL_ENV": running.path})
    try:
        release = make(keep=1)
        fill(release)
        release.make_current()
    finally:
        process.terminate()
        process.wait()
    # OTHERS[0] was the current one before: a rollback would return to it.
    assert names(release.root) == sorted([ID, OTHERS[0], OTHERS[1]])


def test_what_killed_runs_left_goes_what_others_are_at_stays(make):
    release = make(keep=1)
    fill(release)
    release.prepare_folders()
    for identity in OTHERS[:3]:
        fill(release, identity)
    left = [Path(release.root, f".{OTHERS[3]}.part"), Path(release.archives, f"{OTHERS[3]}.tar.zst.part")]
    busy = [Path(release.root, f".{OTHERS[4]}.part"), Path(release.archives, f"{OTHERS[4]}.tar.zst.part")]
    for folder, archive in (left, busy):
        Path(folder, "x").mkdir(parents=True)
        archive.write_bytes(b"x")
    other = make()
    with (
        other.locked(str(Path(release.root, f".{OTHERS[4]}.lock"))),
        other.locked(str(Path(release.archives, f"{OTHERS[4]}.tar.zst.lock"))),
        other.locked(str(Path(release.root, f".{OTHERS[0]}.lock"))),
    ):
        started = time.monotonic()
        release.make_current()
    assert time.monotonic() - started < 5, "it does not wait for them"
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in busy)
    assert names(release.root) == sorted([ID, OTHERS[0]])


# ---------------------------------------------------------------- errors that say what helps


@needs_zstd
def test_an_archive_that_cannot_be_finished_leaves_nothing(make, monkeypatch):
    release = make()
    fill(release, size=5 << 20)
    real, started = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: started.append(real(*words, **more)) or started[-1])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fanout.Digests, "update", full)
        with pytest.raises(OSError, match="No space left"):
            release.built()
    assert [process.returncode is None for process in started] == [False, False], "they would hold the locks"
    assert not list(Path(release.archives).glob("*.part"))
    release.id = OTHERS[0]
    with pytest.raises(module.ReleaseError, match=rf"packing .* failed: .*{OTHERS[0]}"):
        release.pack()
    assert not list(Path(release.archives).glob("*.part"))


def test_a_full_disk_is_seen_before_anything_is_written(make, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=real(path).f_frsize))
    release = make(download_bytes=5 * module.GIB)
    release.prepare_folders()
    with pytest.raises(module.ReleaseError, match=r"not enough disk space on .*GiB are free.*python_env_cache_dir"):
        release.build()
    assert not Path(release.path).exists()


def test_a_build_that_fails_leaves_the_disk_as_it_was(make):
    release = make()

    def build():
        Path(release.path, "half").mkdir(parents=True)
        raise module.ReleaseError("the index did not answer")

    release.build = build
    with pytest.raises(module.ReleaseError, match="index"):
        release.built()
    assert names(release.root) == []


def test_the_space_on_one_file_system_is_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=15, f_frsize=1))
    module.require_space([(str(tmp_path / "a" / "b"), 10, "x")], "")
    with pytest.raises(module.ReleaseError):
        module.require_space([(str(tmp_path / "a"), 10, "x"), (str(tmp_path / "b"), 10, "y")], "")


def test_a_missing_or_other_python_is_named(make):
    with pytest.raises(module.ReleaseError, match=r"/nowhere/python does not run on .*python_env_interpreter"):
        make(interpreter="/nowhere/python").interpreter_version()
    with pytest.raises(module.ReleaseError, match=r"python_env_python asks for 3\.99"):
        make(python="3.99").interpreter_version()
    patch = make(python=".".join(map(str, sys.version_info[:3])))
    assert patch.interpreter_version() == patch.params["python"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("error: Hash mismatch for `torch==2.13.0+cpu`", "not the one that was locked"),
        ("error: Failed to fetch: `https://index.example/simple/ray/`", "python_env_http_proxy"),
        ("  Caused by: invalid peer certificate: UnknownIssuer", "python_env_ca_bundle"),
        ("  Because there is no version of torch==2.13.0+cpu and you require", "python_env_extra_index_urls"),
        ("failed to copy: No space left on device (os error 28)", "make room"),
        ("something else", ""),
    ],
)
def test_uv_errors_are_explained(make, output, expected):
    text = make().explain_uv(output)
    assert expected in text
    assert bool(text) == bool(expected)


def test_a_failed_program_is_shown_with_the_end_of_its_output(make, tmp_path):
    release = make()
    with pytest.raises(module.ReleaseError, match=r"(?s)sh failed with status 3.*release\.log.*line 40"):
        release.run(["sh", "-c", "seq -f 'line %g' 40; exit 3"])
    assert "line 1\n" in (tmp_path / "release.log").read_text()


# ---------------------------------------------------------------- index


def test_passwords_travel_in_the_environment_only(make):
    release = make(
        extra_index_urls=["https://other.example/simple"],
        find_links=["/opt/wheels"],
        credentials={"https://index.example/simple": "me:secret"},
        http_proxy="http://proxy:3128",
        ca_bundle="/etc/ca.pem",
    )
    environment = release.index_environment()
    assert environment["UV_DEFAULT_INDEX"] == "https://me:secret@index.example/simple"
    assert environment["UV_INDEX"] == "https://other.example/simple"
    assert environment["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert environment["UV_FIND_LINKS"] == "/opt/wheels"
    assert environment["HTTPS_PROXY"] == environment["https_proxy"] == "http://proxy:3128"
    assert environment["SSL_CERT_FILE"] == "/etc/ca.pem"
    assert "UV_INDEX_STRATEGY" not in make().index_environment()


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("https://h/one/uv/", "a:1@"),
        ("https://h/one", "a:1@"),
        ("https://h/one/deeper/x", "c:3@"),
        ("https://h/two/", "b:2@"),
        ("https://h/files/x.whl", "c:3@"),  # where the page of one of them leads
        ("http://h/one/uv/", ""),
        ("https://h2/one/uv/", ""),
        ("https://h:444/one/", ""),
        ("/opt/wheels", ""),
    ],
)
def test_each_index_of_a_server_has_its_own_login(make, url, login):
    release = make(credentials={"https://h/one": "a:1", "https://h/one/deeper": "c:3", "https://h/two": "b:2"})
    assert release.with_credentials(url) == url.replace("//", f"//{login}")


NAME = module.UV_WHEEL.format(version="9.9.9")


@pytest.mark.parametrize(
    ("content_type", "page"),
    [
        ("text/html", f'<a href="x.whl">x</a><a href="../files/{NAME}#sha256=00">uv</a>'),
        ("application/vnd.pypi.simple.v1+json", json.dumps({"files": [{"url": f"../files/{NAME}#sha256=00"}]})),
    ],
)
def test_the_wheel_of_uv_is_found_on_an_index_page(content_type, page):
    link = module.wheel_link(page, content_type, "https://index.example/simple/uv/", NAME)
    assert link == f"https://index.example/simple/files/{NAME}"
    assert module.wheel_link(page, content_type, "https://index.example/", "other.whl") is None


def test_a_uv_with_another_hash_is_refused(make, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / NAME).write_bytes(b"not uv")
    release = make(find_links=[str(wheels)])
    release.prepare_folders()
    with pytest.raises(module.ReleaseError, match=r"python_env_uv_sha256 is 000"):
        release.uv()
    assert list(Path(release.params["cache_dir"], "uv").iterdir()) == []
