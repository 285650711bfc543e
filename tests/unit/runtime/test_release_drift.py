"""Drift of a release: found, named and repaired; nothing else is touched."""

from __future__ import annotations

import errno
import json
import os
import py_compile
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils import release_tree as tree
from ansible_collections.ironrack.vllm.plugins.modules import release as module
from releases import ID, OTHERS, fill, needs_zstd

PROGRAM = Path(__file__).parents[3] / "roles/python_env/files/ironrack_release.py"
LIB = "lib/python3.11/site-packages"
CACHED = f"__init__.{sys.implementation.cache_tag}.pyc"


@pytest.fixture
def release(make):
    """A release as a builder leaves it: sources with bytecode, a library, links, folders; its archive in the cache."""
    built = make()
    root = Path(built.path)
    for package, version in (
        ("vllm", "0.32.0+cpu"),
        ("torch", "2.13.0"),
        ("ray", "2.50.0"),
        ("nvidia_nccl_cu13", "2.28"),
    ):
        (root / LIB / f"{package}-{version}.dist-info").mkdir(parents=True)
        (root / LIB / package / "__pycache__").mkdir(parents=True)
        (root / LIB / package / "__init__.py").write_text(f"version = {version!r}\n")
        py_compile.compile(str(root / LIB / package / "__init__.py"))
    (root / LIB / "torch" / "version.py").write_text("cuda: str = '13.0'\n")
    # As in vLLM's own wheel: names first, then code; the name of another place in a path is none.
    linked = b"\x7fELF" + bytes(9000) + b"/x/libcudart.so.11.0\0libcudart.so.13\0libcuda.so.1\0" + b"code" * 9000
    (root / LIB / "vllm" / "_C_stable_libtorch.abi3.so").write_bytes(linked)
    (root / LIB / "torch" / "lib.so").write_bytes(b"\x7fELF" * 5000)
    fill(built)
    return built


def look(release, full=False):
    return tree.examine(release.path, full)


def rewrite(path, content, keep_time=False):
    info = path.stat()
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    else:
        os.utime(path, (info.st_mtime + 5, info.st_mtime + 5))


def damage(release):
    """Every kind of drift at once; returns what must be named."""
    site = Path(release.path, LIB)
    rewrite(site / "vllm" / "__init__.py", b"version = 'hacked'\n")
    (site / "ray" / "__init__.py").unlink()
    shutil.rmtree(site / "torch" / "__pycache__")
    (site / "torch" / "lib.so").chmod(0o666)
    (site / "hand_installed").mkdir()
    (site / "hand_installed" / "__init__.py").write_text("")
    python = Path(release.path, "bin", "python")
    python.unlink()
    python.symlink_to("/bin/false")
    return {
        "changed": {f"{LIB}/vllm/__init__.py", f"{LIB}/torch/lib.so", "bin/python"},
        "missing": {
            f"{LIB}/ray/__init__.py",
            f"{LIB}/torch/__pycache__",
            f"{LIB}/torch/__pycache__/{CACHED}",
        },
        "extra": {f"{LIB}/hand_installed"},
    }


def snapshot(release):
    return {
        path: (info.st_ino, int(info.st_mtime), info.st_mode)
        for path, info in tree.walk(release.path).items()
        if tree.kind_of(info) != "folder"
    }


# ---------------------------------------------------------------- found


@pytest.mark.parametrize("full", [False, True])
def test_every_kind_of_drift_is_named(release, full):
    assert not look(release, full)
    wanted = damage(release)
    found = look(release, full)
    assert set(found.changed) == wanted["changed"]
    assert set(found.missing) == wanted["missing"]
    assert set(found.extra) == wanted["extra"]
    assert found.changed["bin/python"].startswith("leads to /bin/false instead of ")
    assert found.changed[f"{LIB}/torch/lib.so"].startswith("mode 0666 instead of 06")


def test_only_reading_finds_a_change_that_hides_its_time(release):
    rewrite(Path(release.path, LIB, "torch", "lib.so"), b"\x7fELG" * 5000, keep_time=True)
    assert not look(release)
    assert look(release, full=True).changed == {f"{LIB}/torch/lib.so": "other content"}


def test_a_file_that_became_a_folder_and_the_reverse(release):
    site = Path(release.path, LIB)
    (site / "ray" / "__init__.py").unlink()
    (site / "ray" / "__init__.py").mkdir()
    shutil.rmtree(site / "torch" / "__pycache__")
    (site / "torch" / "__pycache__").write_text("")
    found = look(release)
    assert found.changed == {
        f"{LIB}/ray/__init__.py": "a folder instead of a file",
        f"{LIB}/torch/__pycache__": "a file instead of a folder",
    }


def test_bytecode_that_python_adds_is_no_drift(release):
    site = Path(release.path, LIB)
    (site / "torch" / "__pycache__" / "version.cpython-311.pyc").write_bytes(b"new")
    (site / "ray" / "__pycache__" / CACHED.replace(".pyc", ".opt-1.pyc")).write_bytes(b"new")
    found = look(release, full=True)
    assert not found
    assert len(found.bytecode) == 2
    # Bytecode without a source of the release is somebody's program.
    (site / "torch" / "__pycache__" / "evil.cpython-311.pyc").write_bytes(b"new")
    assert look(release).extra == [f"{LIB}/torch/__pycache__/evil.cpython-311.pyc"]


def test_a_python_that_runs_adds_nothing_but_bytecode(release):
    before = snapshot(release)
    subprocess.run(
        [sys.executable, "-c", "import torch.version"], env={"PYTHONPATH": f"{release.path}/{LIB}"}, check=True
    )
    assert snapshot(release) != before
    assert not look(release, full=True)


def test_a_damaged_manifest_vouches_for_nothing(release, make):
    with Path(release.path, module.MANIFEST).open("a") as stream:
        stream.write("file\t0\t0\t0644\t0\textra\n")
    with pytest.raises(tree.TreeError, match=r"is not the one that release\.json names"):
        look(release)
    release.make_current()
    assert list(make().inspected()["drift"]["changed"]) == [module.MANIFEST]


def test_what_is_found_of_versions(release):
    found = release.inspected()["runtime"]
    assert {name: found[name] for name in ("vllm", "ray", "torch", "nccl", "cuda", "vllm_cuda")} == {
        "vllm": "0.32.0+cpu",
        "ray": "2.50.0",
        "torch": "2.13.0",
        "nccl": "2.28",
        "cuda": "13.0",
        "vllm_cuda": "13",
    }
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("variant", "torch_cuda", "problem"),
    [
        ("cu130", "13.0", None),
        ("cu129", "12.9", "vLLM's extension in .* is made for CUDA 13, python_env_variant is cu129 and torch .* 12.9"),
        ("cpu", None, "vLLM's extension in .* is made for CUDA 13, python_env_variant is cpu"),
        ("cu130", "12.9", "torch in .* is made for CUDA 12.9, python_env_variant is cu130"),
    ],
)
def test_torch_and_the_extension_of_vllm_are_of_one_cuda(release, make, variant, torch_cuda, problem):
    proven = make(variant=variant)
    proven.run = lambda *_args, **_options: f"IRONRACK {json.dumps({**proven.versions, 'cuda': torch_cuda})}\n"
    if problem is None:
        module.Release.prove(proven)
    else:
        with pytest.raises(module.ReleaseError, match=problem):
            module.Release.prove(proven)


def test_a_leftover_of_a_killed_run_is_not_called_drift(release, make):
    Path(release.path, module.MARKER).unlink()
    assert make().inspected()["drift"]["total"] == 0
    Path(release.link).symlink_to(f"releases/{ID}")
    assert make().inspected()["drift"]["missing"] == [module.MARKER], "what is current was complete once"


def test_hashing_is_the_same_with_any_number_of_processes(tmp_path):
    sizes = {}
    for number in range(300):
        (tmp_path / str(number)).write_bytes(os.urandom(number * 7))
        sizes[str(number)] = number * 7
    one = tree.hash_files(str(tmp_path), sizes, workers=1)
    assert len(one) == 300
    assert tree.hash_files(str(tmp_path), sizes, workers=3) == one
    parts = tree.shares({"big": 10 << 20, **{str(number): 1000 for number in range(100)}}, 2)
    assert sorted(map(len, parts)) == [1, 100], "one large file weighs as much as many small ones"


@pytest.mark.alone
def test_many_files_are_looked_at_within_two_seconds(tmp_path):
    """Of the processor's time, for 60 000: what else runs on this machine does not count."""
    root = tmp_path / ID
    for folder in range(60):
        (root / str(folder)).mkdir(parents=True)
        for number in range(100):
            (root / str(folder) / f"{number}.py").touch()
    digest, files, _size = tree.write_manifest(str(root))
    assert files == 6000
    spent = []
    for _ in range(3):  # of which the best counts: other work on the same core makes each slower
        started = time.process_time()
        assert not tree.inspect(str(root), tree.read_manifest(str(root), digest))
        spent.append(time.process_time() - started)
    assert min(spent) * 10 < 2.0


# ---------------------------------------------------------------- repaired


def repair(make, release, **params):
    again = make(source=release.archive, **params)
    return again, again.repaired()


@pytest.fixture
def packed(release):
    release.archive = release.built()["archive"]
    release.make_current()
    return release


@needs_zstd
def test_only_what_differs_is_written(packed, make):
    before = snapshot(packed)
    wanted = damage(packed)
    again, _result = repair(make, packed)
    assert not look(packed, full=True)
    after = snapshot(packed)
    assert set(after) == set(before)
    touched = {path for path in before if before[path] != after[path]}
    # The chmod was undone in place.
    assert touched == (wanted["changed"] | wanted["missing"]) - {f"{LIB}/torch/lib.so", f"{LIB}/torch/__pycache__"}
    assert sorted(again.actions) == sorted(
        [f"repaired: changed {path} ({look_up})" for path, look_up in changes(again, "changed")]
        + [f"repaired: missing {path}" for path in wanted["missing"]]
        + [f"repaired: extra {path}" for path in wanted["extra"]]
    )
    assert not Path(again.root, f".{ID}.part").exists()
    assert Path(again.archive_path).exists(), "an archive that was there before stays"


def changes(release, kind):
    for action in release.actions:
        if action.startswith(f"repaired: {kind} "):
            path, _, why = action.removeprefix(f"repaired: {kind} ").partition(" (")
            yield path, why.removesuffix(")")


@needs_zstd
def test_a_time_or_a_mode_needs_no_archive(packed, make):
    site = Path(packed.path, LIB)
    os.utime(site / "vllm" / "__init__.py")
    (site / "vllm").chmod(0o700)
    Path(packed.archive_path).unlink()
    make(source={}).repaired()
    assert not look(packed, full=True)


@needs_zstd
def test_a_damaged_manifest_is_repaired_with_what_it_hid(packed, make):
    damage(packed)
    Path(packed.path, module.MANIFEST).write_text("nothing")
    repair(make, packed)
    assert not look(packed, full=True)


@needs_zstd
def test_a_lost_marker_of_the_current_release_is_repaired(packed, make):
    Path(packed.path, module.MARKER).unlink()
    damage(packed)
    again, _result = repair(make, packed)
    assert again.marker() is not None
    assert not look(packed, full=True)
    assert "repaired: missing release.json" in again.actions


@needs_zstd
@pytest.mark.parametrize("state", ["built", "fetched"])
def test_a_release_in_use_without_its_marker_is_never_taken_away(packed, make, monkeypatch, state):
    def gone():
        return not Path(packed.link, "lib", "data.bin").exists()

    real, seen = os.rename, []
    monkeypatch.setattr(os, "rename", lambda *names: (seen.append(gone()), real(*names)))
    inode = Path(packed.path, "lib", "data.bin").stat().st_ino
    Path(packed.path, module.MARKER).unlink()
    Path(packed.path, LIB, "ray", "__init__.py").unlink()
    again = make(source=packed.archive)
    getattr(again, state)()
    assert again.marker() is not None
    assert not look(packed, full=True)
    assert not any(seen)
    assert Path(packed.path, "lib", "data.bin").stat().st_ino == inode
    assert set(again.actions) == {"repaired: missing release.json", f"repaired: missing {LIB}/ray/__init__.py"}


@needs_zstd
@pytest.mark.parametrize("current", [True, False])
def test_a_release_in_use_without_its_marker_is_not_built_anew(packed, make, current):
    Path(packed.path, module.MARKER).unlink()
    Path(packed.archive_path).write_bytes(b"damaged")
    process = None
    if not current:
        Path(packed.link).unlink()
        process = subprocess.Popen(["sleep", "60"], env={"HOME": packed.path})
    try:
        again = make()
        again.build = lambda: module.wipe(again.path)
        with pytest.raises(module.ReleaseError, match=r"is used by .*release\.json is lost.*rollback\.yml") as caught:
            again.built()
    finally:
        if process:
            process.kill()
            process.wait()
    assert (packed.link in str(caught.value)) is current
    assert Path(packed.path, "lib", "data.bin").exists()


@needs_zstd
def test_another_build_of_the_release_gives_way_to_that_of_the_builder(packed, make, tmp_path):
    other = make(prefix=str(tmp_path / "other"), cache_dir=str(tmp_path / "other-cache"))
    shutil.copytree(packed.path, other.path, symlinks=True)
    rewrite(Path(other.path, LIB, "vllm", "__pycache__", CACHED), b"made at another time")
    marker = json.loads(Path(other.path, module.MARKER).read_text())
    marker["manifest_sha256"] = module.write_manifest(other.path)[0]
    Path(other.path, module.MARKER).write_text(json.dumps(marker))
    assert not look(other, full=True)
    archive = other.built()["archive"]
    shutil.copyfile(archive["path"], packed.archive_path)
    again = make(source=archive)
    again.repaired()
    assert again.marker()["manifest_sha256"] == archive["manifest_sha256"]
    assert not look(packed, full=True)
    assert next(changes(again, "changed"))[0] == f"{LIB}/vllm/__pycache__/{CACHED}"


@needs_zstd
def test_the_link_leads_to_a_whole_release_at_every_moment(packed, make, monkeypatch):
    damage(packed)
    real, seen = os.replace, []

    def replace(source, target):
        seen.append(Path(packed.link, "lib", "data.bin").read_bytes() == b"d" * 100)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    repair(make, packed)
    assert len(seen) > 3
    assert all(seen)


@needs_zstd
def test_a_repair_that_was_killed_is_done_again(packed, make, monkeypatch):
    damage(packed)
    real, left = os.replace, [2]

    def replace(source, target):
        if LIB in str(target):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        repair(make, packed)
    monkeypatch.undo()
    assert look(packed)
    repair(make, packed)
    assert not look(packed, full=True)


@needs_zstd
def test_without_an_archive_the_error_says_what_helps(packed, make):
    damage(packed)
    Path(packed.archive_path).unlink()
    with pytest.raises(module.ReleaseError, match=r"no other node offered a whole copy.*rollback\.yml"):
        make(source={}).repaired()


@needs_zstd
def test_a_damaged_release_is_never_handed_on(packed, make):
    rewrite(Path(packed.path, LIB, "torch", "lib.so"), b"\x7fELG" * 5000, keep_time=True)
    Path(packed.archive_path).unlink()
    with pytest.raises(module.ReleaseError, match=r"no longer as it was built.*torch/lib\.so \(other content\)"):
        make().built()


@needs_zstd
def test_check_mode_names_and_repairs_nothing(packed, make):
    damage(packed)
    before = snapshot(packed)
    again = make(check_mode=True, source=packed.archive)
    again.repaired()
    assert again.changed
    assert f"would repair: missing {LIB}/ray/__init__.py" in again.actions
    assert snapshot(packed) == before
    assert f"{socket.gethostname()}: would repair: missing {LIB}/ray/__init__.py" in again.module.warned


@needs_zstd
def test_the_screen_shows_what_was_repaired_but_no_endless_list(packed, make):
    for number in range(25):
        Path(packed.path, LIB, f"by_hand_{number}.py").write_text("")
    again, _result = repair(make, packed)
    shown = [text for text in again.module.warned if ": repaired: extra " in text]
    assert len(shown) == module.SHOWN_FILES
    assert again.module.warned[-1].endswith(f": repaired: 25 files in all, see {packed.params['log_path']}")


@needs_zstd
def test_a_unit_from_before_goes_on_one_from_after_is_restarted(packed, make):
    # A second that the kernel's count of a process's start may be off, and one of the test's.
    stamp = time.time() - 10
    os.utime(packed.link, (stamp, stamp), follow_symlinks=False)
    early = subprocess.Popen(["sleep", "60"], env={"X": packed.path})
    try:
        time.sleep(2.5)
        rewrite(Path(packed.path, LIB, "vllm", "__init__.py"), b"x = 1\n")
        _again, result = repair(make, packed)
        assert result["restart"] == []
        assert os.lstat(packed.link).st_mtime == pytest.approx(stamp), "the roles would restart what is older than this"
        rewrite(Path(packed.path, LIB, "vllm", "__init__.py"), b"x = 2\n")
        late = subprocess.Popen(["sleep", "60"], env={"X": f"{packed.params['prefix']}/current/bin"})
        try:
            checked = make(check_mode=True)
            assert len(checked.repaired()["restart"]) == 1
            assert "playbooks/serve.yml" in checked.module.warned[-1]
            again, result = repair(make, packed)
        finally:
            late.kill()
            late.wait()
        assert len(result["restart"]) == 1
        assert "playbooks/serve.yml" in again.module.warned[-1]
        assert os.lstat(packed.link).st_mtime > stamp + 5
    finally:
        early.kill()
        early.wait()


# ---------------------------------------------------------------- previous, users


def test_a_switch_that_was_killed_half_way_shows(tmp_path, monkeypatch):
    prefix, real = str(tmp_path), tree.replace_link
    for identity in OTHERS[:2]:
        tree.switch(prefix, identity)
        assert tree.linked(prefix) != tree.linked(prefix, "previous")

    def killed(path, target):
        if path.endswith("/current"):
            raise KeyboardInterrupt
        real(path, target)

    monkeypatch.setattr(tree, "replace_link", killed)
    with pytest.raises(KeyboardInterrupt):
        tree.switch(prefix, OTHERS[0])
    assert tree.linked(prefix) == tree.linked(prefix, "previous") == OTHERS[1]


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_switch_that_is_undone_leaves_both_links_as_they_were(tmp_path, before):
    prefix = str(tmp_path)
    for identity in OTHERS[:before]:
        tree.switch(prefix, identity)
    links = tree.linked(prefix), tree.linked(prefix, "previous")
    tree.switch(prefix, OTHERS[4])
    tree.switch(prefix, *links)
    assert (tree.linked(prefix), tree.linked(prefix, "previous")) == links


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_switch_that_fails_leaves_both_links_as_they_were(tmp_path, monkeypatch, before):
    prefix = str(tmp_path)
    for identity in OTHERS[:before]:
        tree.switch(prefix, identity)
    links = tree.linked(prefix), tree.linked(prefix, "previous")
    real = tree.replace_link

    def refuse(path, target):
        if path.endswith("/current"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        real(path, target)

    monkeypatch.setattr(tree, "replace_link", refuse)
    with pytest.raises(OSError, match="No space left"):
        tree.switch(prefix, OTHERS[4])
    assert (tree.linked(prefix), tree.linked(prefix, "previous")) == links


@needs_zstd
def test_what_a_rollback_would_return_to_is_kept(make):
    for number, identity in enumerate([OTHERS[0], OTHERS[1], ID]):
        release = make(release_id=identity, keep=1)
        marker = fill(release) / module.MARKER
        os.utime(marker, (1000 + number, 1000 + number))
        release.make_current()
    assert tree.linked(release.params["prefix"], "previous") == OTHERS[1]
    # What `previous` led to stays until the next run: this switch may be undone.
    assert Path(release.root, OTHERS[0]).is_dir()
    make(keep=1).make_current()
    assert sorted(path.name for path in Path(release.root).iterdir() if path.name[0] != ".") == sorted([ID, OTHERS[1]])


def test_a_process_started_by_way_of_the_link_counts_for_both_when_it_is_older(make):
    old = make(release_id=OTHERS[0])
    fill(old)
    old.make_current()
    process = subprocess.Popen(["sleep", "60"], env={"PATH": f"{old.params['prefix']}/current/bin:/bin"})
    try:
        time.sleep(1.2)
        new = make()
        fill(new)
        new.make_current()
        used = tree.users(new.params["prefix"])
    finally:
        process.kill()
        process.wait()
    assert set(used) == {ID, OTHERS[0]}


def test_a_process_that_names_its_release_counts_for_that_one_alone(make):
    old = make(release_id=OTHERS[0])
    fill(old)
    old.make_current()
    prefix = old.params["prefix"]
    # As a unit is started: a script of the release, whose first line names the release's Python; a PATH by the link.
    process = subprocess.Popen(["sleep", "60"], env={"HOME": old.path, "PATH": f"{prefix}/current/bin:/bin"})
    try:
        time.sleep(1.2)
        new = make()
        fill(new)
        new.make_current()
        used = tree.users(prefix)
    finally:
        process.kill()
        process.wait()
    assert set(used) == {OTHERS[0]}


# ---------------------------------------------------------------- the program


def program(release, *arguments):
    text = PROGRAM.read_text().replace("/usr/local/libexec/ironrack", str(Path(tree.__file__).parent))
    command = [sys.executable, "-c", text, *arguments, "--prefix", release.params["prefix"]]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_zstd
def test_the_program_ends_with_0_1_or_2_and_names_the_files(packed):
    good = program(packed, "verify")
    assert (good.returncode, good.stderr) == (0, "")
    assert f"release {ID} is as built" in good.stdout
    damage(packed)
    bad = program(packed, "verify")
    assert bad.returncode == 1
    assert f"missing {LIB}/ray/__init__.py\n" in bad.stdout
    assert "NOT as built" in bad.stdout
    data = json.loads(program(packed, "verify", "--json", "--quick").stdout)
    assert data["total"] == 7
    assert data["extra"] == [f"{LIB}/hand_installed"]
    none = program(packed, "verify", "--release", "f" * 16)
    assert none.returncode == 2
    assert f"does not exist. Releases here: {ID}." in none.stderr
    assert program(packed, "verify", "--release", "../../etc").returncode == 2


@needs_zstd
def test_the_program_lists_releases(packed, make):
    other = make(release_id=OTHERS[0])
    fill(other)
    (Path(other.path) / module.MARKER).unlink()
    shown = json.loads(program(packed, "list", "--json").stdout)
    assert {item["id"]: (item["complete"], item["current"]) for item in shown} == {
        ID: (True, True),
        OTHERS[0]: (False, False),
    }
    text = program(packed, "list").stdout
    assert "current" in text
    assert "INCOMPLETE" in text
