"""The module `model_fetch` with the real huggingface_hub of the runtime, against a hub that speaks its API."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.ironrack.vllm.plugins.module_utils import fanout, mirror, models, redirects
from ansible_collections.ironrack.vllm.plugins.module_utils import hub as hub_program
from ansible_collections.ironrack.vllm.plugins.modules import model_check, model_fetch

ROOT = Path(__file__).resolve().parents[3]
REPO = "org/tiny"
TOKEN = "hf_secretsecretsecret"  # noqa: S105
Run = Callable[..., dict[str, Any]]


def load_hub() -> Any:
    specification = importlib.util.spec_from_file_location("ironrack_test_hub", ROOT / "tests/tools/hub.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def hub_python() -> str:
    """A Python with the huggingface_hub that the runtime's lock names; made once, beside the other caches."""
    lock = (ROOT / "roles/python_env/files/locks/cu130-cp312.txt").read_text()
    found = re.search(r"^huggingface-hub==(\S+)", lock, re.MULTILINE)
    assert found is not None
    folder = ROOT / ".cache" / f"hub-{found[1]}-{sys.version_info[0]}.{sys.version_info[1]}"
    python = folder / "bin/python"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            uv = str(Path(sys.executable).with_name("uv"))
            pins = folder.parent / f"{folder.name}.txt"
            pins.write_text("\n".join(re.findall(r"^[a-z0-9._-]+==[^\s;\\]+", lock, re.MULTILINE)))
            subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, folder], check=True)
            install = [uv, "pip", "install", "-q", "--python", python, "-c", pins, f"huggingface-hub=={found[1]}"]
            subprocess.run(install, check=True)
            (folder / "complete").touch()
    return str(python)


def shard(path: Path, tensors: list[str], size: int = 60000) -> None:
    header: dict[str, Any] = {}
    for index, name in enumerate(tensors):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [index * size, (index + 1) * size]}
    raw = json.dumps(header).encode()
    body = b"".join(hashlib.sha256(f"{name} {n}".encode()).digest() for name in tensors for n in range(size // 32))
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body.ljust(len(tensors) * size, b"\0"))


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["X"], "model_type": "x", "vocab_size": 100}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    shard(folder / "model-1.safetensors", ["a", "b"])
    shard(folder / "model-2.safetensors", ["c"])
    weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (folder / models.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "pytorch_model.bin").write_bytes(b"the same weights once more")
    (folder / "original").mkdir()
    (folder / "original/consolidated.00.pth").write_bytes(b"and again")
    (folder / ".gitattributes").write_text("")
    return folder


WANTED = sorted(
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model-1.safetensors", "model-2.safetensors", models.INDEX),
    ]
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The modules in this process: one of their own for each call would be most of the time."""
    warnings: list[str] = []
    # Ansible shows a warning, and returns none, where it takes the process for a controller, which other tests make it.
    monkeypatch.setattr(AnsibleModule, "warn", lambda _self, text: warnings.append(text))

    def call(module: ModuleType, check: bool = False, **parameters: Any) -> dict[str, Any]:
        warnings.clear()
        with patch_module_args({"_ansible_check_mode": check, **parameters}), pytest.raises(SystemExit):
            module.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return {**result, "warnings": list(warnings)}

    return call


@pytest.fixture
def site(tmp_path: Path, run: Run, hub_python: str) -> Iterator[SimpleNamespace]:
    """A hub with one model, and a node that wants it."""
    hub = load_hub()
    root = tmp_path / "hub"
    source = make_model(root / REPO / "main")
    servers, state = hub.serve(root)
    url = f"http://127.0.0.1:{servers[0].server_address[1]}"
    store = tmp_path / "models"
    log = tmp_path / "log"
    path = store / REPO / "main"

    def call(action: str, **parameters: Any) -> dict[str, Any]:
        model = {"path": str(path), "repo": REPO, "revision": "main", **parameters.pop("model", {})}
        common = {"endpoint": url, "store": str(store), "python": hub_python, "log_path": str(log), "reserve": 0}
        return run(model_fetch, state=action, models=[model], **{**common, **parameters})

    def fetch(**parameters: Any) -> dict[str, Any]:
        listed = call("listed", **parameters)
        return listed if listed.get("failed") else call("fetched", listings=listed["listings"], **parameters)

    def fail(**faults: Any) -> None:
        (root / "faults.json").write_text(json.dumps(faults))

    def asked(name: str) -> list[str | None]:
        """The ranges in which a file was taken."""
        return [
            each["range"] for each in state.requests if each["path"].endswith(f"/{name}") and "/cdn/" in each["path"]
        ]

    yield SimpleNamespace(
        **{"root": root, "source": source, "state": state, "url": url, "store": store, "path": path, "hub": hub},
        **{
            "folder": f"file://{root}",
            "call": call,
            "fetch": fetch,
            "fail": fail,
            "asked": asked,
            "run": run,
            "log": log,
        },
    )
    for server in servers:
        server.shutdown()
        server.server_close()


def same(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in WANTED)


def told(result: dict[str, Any]) -> str:
    return "\n".join(result["warnings"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_model_comes_from_the_hub_once(site: SimpleNamespace) -> None:
    result = site.fetch()
    assert result["changed"], result
    assert same(site.path, site.source)
    assert sorted(str(p.relative_to(site.path)) for p in site.path.rglob("*")) == sorted([*WANTED, models.MANIFEST])
    manifest = json.loads((site.path / models.MANIFEST).read_text())
    assert manifest["commit"] == site.hub.commit_of(site.source)
    for entry in manifest["files"]:
        assert entry == {**entry, **fanout.describe(site.source / entry["name"], entry["name"])}
    assert {(site.path / name).stat().st_mode & 0o777 for name in WANTED} == {0o644}
    assert sorted(p.name for p in (site.store / REPO).iterdir()) == [".main.lock", "main"]
    # Asked again, the node knows by itself, and nothing changes.
    count = len(site.state.requests)
    again = site.fetch()
    assert not again["changed"]
    assert told(again) == ""
    assert len(site.state.requests) == count
    # And what was asked was the model alone.
    strange = [e["path"] for e in site.state.requests if REPO not in e["path"]]
    assert strange == []


def test_a_branch_is_resolved_once_and_told(site: SimpleNamespace) -> None:
    commit = site.hub.commit_of(site.source)
    listed = site.call("listed")
    assert f"the revision main is the commit {commit} today" in told(listed)
    assert {e["path"].split("/resolve/")[-1] for e in site.state.requests} == {f"/api/models/{REPO}/revision/main"}
    site.fail(wrong=["model-2.safetensors"])
    assert site.call("fetched", listings=listed["listings"])["failed"]
    # What began with a commit goes on with it, though the branch moves.
    new = site.source.rename(site.root / REPO / commit)
    (make_model(site.root / REPO / "main") / "new.json").write_text("{}")
    site.fail()
    result = site.fetch()
    assert json.loads((site.path / models.MANIFEST).read_text())["commit"] == commit, result
    assert not (site.path / "new.json").exists()
    assert same(site.path, new)


def test_a_pinned_revision_needs_no_word(site: SimpleNamespace) -> None:
    commit = site.hub.commit_of(site.source)
    result = site.fetch(model={"revision": commit})
    assert result["changed"]
    assert told(site.call("listed", model={"revision": commit})) == ""


def test_a_token_reaches_the_hub_and_nobody_else(site: SimpleNamespace) -> None:
    site.fail(gated=True, token=TOKEN)
    result = site.fetch(token=TOKEN)
    assert result["changed"], result
    assert TOKEN not in json.dumps(result)
    assert TOKEN not in site.log.read_text()
    assert not any(TOKEN in p.read_text(errors="replace") for p in site.store.rglob("*") if p.is_file())
    # The place that the hub sends to for large files does not get it: the stand-in refuses then.
    assert site.asked("model-1.safetensors") == [None]


def test_a_token_in_a_file_is_for_root_alone(site: SimpleNamespace, tmp_path: Path) -> None:
    site.fail(gated=True, token=TOKEN)
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o640)
    assert f"chmod 600 {file}" in site.fetch(token_file=str(file))["msg"]
    file.chmod(0o600)
    assert site.fetch(token_file=str(file))["changed"]
    file.write_text("\n")
    assert re.search(rf"model_store_token_file = {file} on \S+ is empty", site.fetch(token_file=str(file))["msg"])


def test_a_token_in_a_file_is_hidden_from_the_answer_too(site: SimpleNamespace, tmp_path: Path) -> None:
    """A server may say in its error what it was given."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    site.fail(echo=True)
    result = site.call("listed", token_file=str(file))
    assert result["failed"]
    assert TOKEN not in json.dumps(result)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"blobId": None}, r"config.json of org/tiny without a hash"),
        ({"lfs": {"sha256": "", "size": 5, "pointerSize": 1}}, r"config.json of org/tiny without a hash"),
        ({"lfs": {"sha256": "a" * 64, "size": "x", "pointerSize": 1}}, r"config.json. of org/tiny without a size"),
        ({"size": -5}, r"config.json. of org/tiny without a size"),
        ({"rfilename": "../../x.json"}, r"x.json.* of org/tiny without a size or place"),
        ({"rfilename": "a\nb.json"}, r"b.json.* of org/tiny without a size or place"),
    ],
)
def test_a_hub_that_tells_no_hash_is_not_believed(site: SimpleNamespace, told: dict[str, Any], message: str) -> None:
    site.fail(told={"config.json": told})
    assert re.search(message, site.call("listed")["msg"])


def test_a_hub_that_means_another_commit_is_not_believed(site: SimpleNamespace) -> None:
    site.source.rename(site.root / REPO / ("d" * 40))
    site.fail(sha="e" * 40)
    result = site.call("listed", model={"revision": "d" * 40})
    assert re.search(r"d{40}.* answers with the commit e{40}", result["msg"])


def test_a_hub_that_asks_for_no_pause_is_not_asked_for_ever(site: SimpleNamespace) -> None:
    site.fail(limit={"count": 3, "after": 0})
    assert site.call("listed")["listings"]
    assert site.log.read_text().count("again in 1 s") == 3


def test_two_runs_do_not_share_a_folder_for_the_library(site: SimpleNamespace, tmp_path: Path) -> None:
    python = tmp_path / "python"
    # The first to come stays until the second has gone, and tells whether its file is still there.
    python.write_text(
        '#!/bin/sh\nmkdir -p "$HOME"; touch "$HOME/$$"\n'
        f'mkdir {tmp_path}/first 2>/dev/null || {{ cat >/dev/null; echo \'{{"files": [], "commit": ""}}\'; exit; }}\n'
        f"cat >/dev/null; until [ -e {tmp_path}/second ]; do sleep 0.05; done\n"
        f'[ -e "$HOME/$$" ] && touch {tmp_path}/kept; echo \'{{"files": [], "commit": ""}}\'\n'
    )
    python.chmod(0o755)

    def program() -> model_fetch.Fetch:
        fetch = object.__new__(model_fetch.Fetch)
        fetch.host, fetch.token = "n1", ""
        names = ("http_proxy", "ca_bundle", "endpoint", "log_path")
        fetch.params = {"store": str(site.store), "ignore": [], "workers": 1, "python": str(python)}
        fetch.params |= dict.fromkeys(names, "")
        return fetch

    model = {"repo": REPO, "revision": "main", "path": str(site.path)}
    first = threading.Thread(target=lambda: program().hub(model))
    first.start()
    deadline = time.monotonic() + 20
    while not (tmp_path / "first").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    program().hub({**model, "path": str(site.store / "org/other/main")})
    (tmp_path / "second").touch()
    first.join()
    assert (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("faults", "parameters", "message"),
    [
        (
            {"gated": True},
            {},
            r"is gated, and there is no token. Accept its licence at http://\S+/org/tiny .*model_store_token",
        ),
        (
            {"gated": "not_accepted"},
            {"token": TOKEN},
            r"account of model_store_token has no access. Accept its licence at http",
        ),
        ({"token": TOKEN}, {"token": "hf_wrong"}, r"does not take the token: set model_store_token"),
        (
            {},
            {"model": {"repo": "org/other"}},
            r"knows no model org/other, or does not show it to somebody without a token",
        ),
        ({}, {"model": {"revision": "v2"}}, r"org/tiny has no revision v2: correct model.revision"),
        ({"limit": {"count": 99, "after": 7200}}, {}, r"limits the rate and asks to wait for 2 h 00 min: run again"),
        ({}, {"python": "/nonexistent/python"}, r"/nonexistent/python does not run on .*playbooks/runtime.yml"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    site: SimpleNamespace, faults: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    site.fail(**faults)
    result = site.fetch(**parameters)
    assert result["failed"]
    assert re.search(message, result["msg"]), result["msg"]
    assert not site.path.exists()


def test_a_rate_limit_is_waited_for(site: SimpleNamespace) -> None:
    site.fail(limit={"count": 2, "after": 1})
    started = time.monotonic()
    assert site.call("listed")["listings"]
    assert 2 <= time.monotonic() - started < 20
    assert "429" in site.log.read_text()


def test_a_rate_limit_among_the_files_is_waited_for(site: SimpleNamespace) -> None:
    listed = site.call("listed")
    site.fail(limit={"count": 2, "after": 1})
    assert site.call("fetched", listings=listed["listings"])["changed"]
    assert same(site.path, site.source)


def test_a_broken_connection_goes_on_where_it_stopped(site: SimpleNamespace) -> None:
    shard(site.source / "model-1.safetensors", ["a", "b"], 1_500_000)
    site.fail(cut={"model-1.safetensors": 2_500_000})
    assert site.fetch()["changed"]
    assert same(site.path, site.source)
    assert site.asked("model-1.safetensors") == [None, "bytes=2097152-"]


def test_a_killed_run_is_gone_on_with(site: SimpleNamespace) -> None:
    listed = site.call("listed")
    listing = next(iter(listed["listings"].values()))
    models.begin(str(site.path), {key: listing[key] for key in ("repo", "revision", "commit", "files")})
    part = (site.source / "model-1.safetensors").read_bytes()[:50000]
    (site.path / "model-1.safetensors.part").write_bytes(part)
    assert models.look(str(site.path))["state"] == "arriving"
    assert site.fetch()["changed"]
    assert site.asked("model-1.safetensors") == ["bytes=50000-"]
    assert same(site.path, site.source)


def test_a_kill_in_the_middle_ends_the_program_that_fetches_too(site: SimpleNamespace, hub_python: str) -> None:
    listings = site.call("listed")["listings"]
    site.fail(slow=1000)
    model = {"path": str(site.path), "repo": REPO, "revision": "main"}
    arguments = {"state": "fetched", "models": [model], "listings": listings, "store": str(site.store)}
    arguments |= {"endpoint": site.url, "python": hub_python, "log_path": str(site.log), "reserve": 0}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "plugins/modules/model_fetch.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "collections")},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode())
    process.stdin.close()
    part = site.path / "model-1.safetensors.part"
    deadline = time.monotonic() + 120  # on a machine that is busy with other tests
    while not site.asked("model-1.safetensors"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 15  # far less than the rest would take
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert children
    assert models.look(str(site.path))["state"] == "arriving"
    had = part.stat().st_size if part.exists() else 0
    site.fail()
    assert site.fetch()["changed"]
    assert site.asked("model-1.safetensors")[-1] == (f"bytes={had}-" if had else None)


def test_wrong_bytes_are_named_and_never_kept(site: SimpleNamespace) -> None:
    site.fail(wrong=["model-2.safetensors"])
    result = site.fetch()
    assert result["failed"]
    assert re.search(
        r"model-2.safetensors of org/tiny came twice from http.* has the sha256 \w+ instead of", result["msg"]
    )
    assert not (site.path / "model-2.safetensors").exists()
    assert not (site.path / "model-2.safetensors.part").exists()
    assert models.look(str(site.path))["state"] == "arriving"
    assert len(site.asked("model-2.safetensors")) == 2
    site.fail()
    assert site.fetch()["changed"]
    # What was right is not fetched again.
    assert len(site.asked("model-1.safetensors")) == 1


def test_a_small_file_is_held_against_its_git_hash(site: SimpleNamespace) -> None:
    site.fail(wrong=["tokenizer.json"])
    assert re.search(r"tokenizer.json of org/tiny came twice.* is not the blob \w{40}", site.fetch()["msg"])


def look(site: SimpleNamespace, verify: str = "sizes") -> dict[str, Any]:
    wanted = {str(site.path): {"instances": ["tiny"], "repo": REPO}}
    user = "root" if os.geteuid() == 0 else os.environ["USER"]
    result: dict[str, Any] = site.run(
        model_check, models=wanted, user=user, verify=verify, store=str(site.store), log_path=str(site.log)
    )
    assert not result.get("failed"), result
    result["model"] = result["models"][str(site.path)]
    return result


def test_a_corrupt_shard_is_found_and_fetched_again_alone(site: SimpleNamespace) -> None:
    assert look(site)["model"]["state"] == "absent"
    site.fetch()
    assert look(site)["model"]["state"] == "complete"
    flip(site.path / "model-2.safetensors")
    assert look(site)["model"]["state"] == "complete"  # of the right size, and its header is whole
    found = look(site, "full")
    assert found["model"]["state"] == "damaged"
    assert list(found["model"]["faults"]) == ["model-2.safetensors"]
    assert "model-2.safetensors has the sha256" in told(found)
    site.state.requests.clear()
    assert site.fetch(model={"suspects": ["model-2.safetensors"]})["changed"]
    assert site.asked("model-2.safetensors") == [None]
    assert site.asked("model-1.safetensors") == []
    assert look(site, "full")["model"]["state"] == "complete"


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda folder: os.truncate(folder / "model-1.safetensors", 100), "has 100 bytes instead of"),
        (lambda folder: (folder / "model-1.safetensors").unlink(), "is missing"),
    ],
)
def test_a_truncated_or_missing_shard_is_found_at_once(site: SimpleNamespace, damage: Any, fault: str) -> None:
    site.fetch()
    damage(site.path)
    assert fault in look(site)["model"]["faults"]["model-1.safetensors"]
    site.state.requests.clear()
    assert site.fetch()["changed"]
    assert site.asked("model-2.safetensors") == []
    assert look(site, "full")["model"]["state"] == "complete"


def test_a_repository_without_a_whole_model_is_refused(site: SimpleNamespace) -> None:
    (site.source / "model-2.safetensors").unlink()
    result = site.fetch()
    assert "cannot be served" in result["msg"]
    assert "missing: model-2.safetensors" in result["msg"]
    assert look(site)["model"]["state"] == "arriving"


def test_too_small_a_disk_is_refused_before_the_first_byte(site: SimpleNamespace) -> None:
    listed = site.call("listed", mirror=site.folder)
    size = sum(entry["size"] for entry in next(iter(listed["listings"].values()))["files"])
    free = shutil.disk_usage(site.store.parent).free
    result = site.call("room", listings=listed["listings"], reserve=free / size + 1)
    assert re.search(r"still need\(s\) 0\.00 GB and .* for the next revision \(model_store_reserve\)", result["msg"])
    assert not site.path.exists()
    assert site.call("room", listings=listed["listings"])["missing_bytes"] == size
    site.fetch(mirror=site.folder)
    # What is there needs no room any more.
    assert site.call("room", listings=listed["listings"], reserve=free / size + 1)["missing_bytes"] == 0


def test_a_disk_that_fills_up_on_the_way_loses_nothing(site: SimpleNamespace, tmp_path: Path, hub_python: str) -> None:
    listed = site.call("listed")
    # Parts go to the kernel's own full disk.
    python = tmp_path / "python"
    python.write_text(
        f"#!{hub_python}\n"
        "import os, sys\n"
        "exec(sys.argv[3].removesuffix('hub.main()'))\n"
        "hub.models.no_link = lambda path, flags: os.open('/dev/full', os.O_WRONLY)\n"
        "hub.main()\n"
    )
    python.chmod(0o755)
    result = site.call("fetched", listings=listed["listings"], python=str(python))
    assert re.search(
        r"the disk of \S+ on \S+ is full .*What has arrived stays .*make room and run again", result["msg"]
    )
    assert site.fetch()["changed"]
    assert same(site.path, site.source)


@pytest.mark.parametrize("way", ["hub", "mirror"])
def test_root_writes_through_no_link(site: SimpleNamespace, tmp_path: Path, way: str) -> None:
    manifest_of(site)
    listings = site.call("listed", **({"mirror": site.folder} if way == "mirror" else {}))["listings"]
    models.prepare(str(site.path))
    victim = tmp_path / "shadow"
    victim.write_text("root:x")
    victim.chmod(0o600)
    (site.path / "model-1.safetensors.part").symlink_to(victim)
    result = site.call("fetched", listings=listings, **({"mirror": site.folder} if way == "mirror" else {}))
    assert result["changed"], result
    assert same(site.path, site.source)
    assert not (site.path / "model-1.safetensors").is_symlink()
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("root:x", 0o600)


def test_a_link_that_comes_later_is_not_followed_either(tmp_path: Path) -> None:
    victim, part = tmp_path / "shadow", tmp_path / "a.part"
    victim.write_text("root:x")
    victim.chmod(0o600)
    part.symlink_to(victim)
    with pytest.raises(OSError, match=r"a\.part"):
        models.keep_file(str(part), str(tmp_path / "a"))
    assert victim.stat().st_mode & 0o777 == 0o600


def test_a_folder_in_a_model_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/sub").symlink_to(tmp_path)
    with pytest.raises(models.ModelError, match=r"model/sub is a link"):
        models.prepare(str(tmp_path / "model"), ["config.json", "sub/deeper/x.json"])
    assert not (tmp_path / "deeper").exists()
    # Where the whole model lies is the user's matter.
    (tmp_path / "link").symlink_to(tmp_path / "model")
    models.prepare(str(tmp_path / "link"), ["other/x.json"])


def test_an_error_is_told_while_other_files_still_come() -> None:
    names = ["large", "bad", "last"]
    fetcher = object.__new__(hub_program.Hub)
    files = [{"name": name, "size": 1} for name in names]
    fetcher.job = {"listing": {"commit": "", "files": files}, "workers": 2}
    end = threading.Event()

    def file(entry: dict[str, Any], _commit: str) -> dict[str, Any]:
        if entry["name"] == "bad":
            raise models.ModelError("no right to bad")
        end.wait(20)
        return entry

    fetcher.file = file
    started = time.monotonic()
    try:
        with pytest.raises(models.ModelError, match="no right to bad"):
            fetcher.fetch()
        assert time.monotonic() - started < 10
    finally:
        end.set()
    fetcher.job["listing"]["files"] = [files[2], files[0]]
    assert fetcher.fetch()["files"] == [files[0], files[2]]


def test_what_the_system_refuses_is_told_and_ends_the_server(
    site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(fanout, "stop", stopped.append)
    listings = site.fetch(mirror=site.folder)["listings"]
    shutil.rmtree(site.store)
    site.store.write_text("")
    for action in ("fetched", "received"):
        result = site.call(action, listings=listings)
        assert re.match(r"/\S+: (Not a directory|File exists) \(on \S+; log: ", result["msg"]), result
    assert stopped == [model_fetch.UNIT]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    models.Log(str(tmp_path / "full"))("a line")
    models.Log(str(tmp_path / "away/log"))("a line")


def test_progress_says_bytes_speed_and_time_left(tmp_path: Path) -> None:
    listing = {"files": [{"name": "a", "size": 3_000_000_000}, {"name": "b", "size": 1_000_000_000}]}
    progress = models.Progress(str(tmp_path), listing, print)
    progress.start -= 10
    os.truncate(os.open(tmp_path / "a.part", os.O_CREAT | os.O_WRONLY), 1_000_000_000)
    assert re.fullmatch(
        r"\S+: 1000000000 of 4000000000 bytes \(1\.00 of 4\.00 GB, 25 %\), (99|100)\.\d MB/s, 30 s left",
        progress.line(),
    )


def test_check_mode_fetches_nothing(site: SimpleNamespace) -> None:
    listed = site.call("listed", check=True)
    result = site.call("fetched", check=True, listings=listed["listings"])
    assert result["changed"]
    assert "would fetch 0.00 GB of org/tiny" in result["actions"][0]
    # On a bare host there is no huggingface_hub to ask with.
    bare = site.call("listed", check=True, python="/nonexistent/python")
    assert bare["listings"] == {}
    assert site.call("fetched", check=True, listings={})["actions"] == [f"would fetch {REPO} to {site.path}"]
    assert not site.path.exists()


def test_a_file_that_only_xet_gives_comes_by_the_library_itself(site: SimpleNamespace, hub_python: str) -> None:
    """The way for files beyond 50 GB, tried with a limit of 1000 bytes; without Xet the library takes HTTP."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from ansible_collections.ironrack.vllm.plugins.module_utils import hub\n"
        "hub.LARGE = 1000; hub.main()"
    )
    listing = next(iter(site.call("listed")["listings"].values()))
    models.begin(str(site.path), listing)
    job = {"endpoint": site.url, "repo": REPO, "revision": "main", "token": "", "ignore": [], "folder": str(site.path)}
    job |= {"home": str(site.store / ".hub"), "workers": 2, "log": str(site.log), "listing": listing}
    done = subprocess.run(
        [hub_python, "-I", "-c", code, str(ROOT / "collections")],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "error" not in json.loads(done.stdout)
    assert same(site.path, site.source)


# ---------------------------------------------------------------- mirrors


def mirrored(site: SimpleNamespace, **parameters: Any) -> dict[str, Any]:
    """The stand-in's files as a plain web server would give them."""
    result: dict[str, Any] = site.fetch(mirror=f"{site.url}/cdn", endpoint="http://127.0.0.1:9", **parameters)
    return result


def write_sums(folder: Path, names: list[str]) -> None:
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_a_mirror_with_the_manifest_of_a_node(site: SimpleNamespace, tmp_path: Path) -> None:
    site.fetch()
    shutil.copy(site.path / models.MANIFEST, site.source)
    shutil.rmtree(site.path)
    assert mirrored(site)["changed"]
    assert same(site.path, site.source)
    assert look(site, "full")["model"]["commit"]


def test_a_mirror_with_sums(site: SimpleNamespace) -> None:
    write_sums(site.source, WANTED)
    site.fail(cut={"model-1.safetensors": 70000})
    assert mirrored(site)["changed"]
    assert same(site.path, site.source)
    assert site.asked("model-1.safetensors")[-1] == "bytes=70000-"


def test_a_damaged_mirror_is_named(site: SimpleNamespace) -> None:
    write_sums(site.source, WANTED)
    flip(site.source / "model-1.safetensors")
    result = mirrored(site)
    assert re.search(r"http\S+/model-1.safetensors came twice and has the sha256", result["msg"])
    (site.source / "model-1.safetensors").unlink()
    assert "has no size there" in mirrored(site)["msg"]
    (site.source / "SHA256SUMS").unlink()
    assert "has not this revision, or nothing that lists its files" in mirrored(site)["msg"]


def test_a_file_in_the_mirror_that_does_not_end_is_broken_off(site: SimpleNamespace) -> None:
    files = manifest_of(site)
    (entry,) = [each for each in files if each["name"] == "model-1.safetensors"]
    entry["size"] -= 10
    (site.source / models.MANIFEST).write_text(json.dumps({"repo": REPO, "commit": "", "files": files}))
    result = site.fetch(mirror=site.folder)
    assert re.search(rf"model-1.safetensors has more than the {entry['size']} bytes", result["msg"])


def test_a_mirror_that_wants_a_password_is_told_apart(site: SimpleNamespace) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    result = site.call("listed", mirror=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    assert re.search(r"\(model_store_mirror\) answers 403 Forbidden. Put a name and password", result["msg"])


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_wrong_file_of_authorities_is_named(site: SimpleNamespace, tmp_path: Path, content: str | None) -> None:
    bundle = tmp_path / "ca.pem"
    if content:
        bundle.write_text(content)
    result = site.call("listed", mirror=site.url, ca_bundle=str(bundle))
    assert re.match(rf"model_store_ca_bundle = {bundle} cannot be used", result["msg"]), result


def test_a_folder_is_a_mirror(site: SimpleNamespace) -> None:
    result = site.fetch(mirror=f"file://{site.root}", endpoint="http://127.0.0.1:9")
    assert result["changed"], result
    assert same(site.path, site.source)
    assert look(site, "full")["model"]["state"] == "complete"
    other = site.fetch(mirror=f"file://{site.root}", model={"revision": "v9", "path": str(site.store / REPO / "v9")})
    assert re.search(r"the mirror has no model at \S+/org/tiny/v9 .*make artifacts", other["msg"])


def test_a_password_stays_with_the_mirror(tmp_path: Path) -> None:
    seen: list[tuple[str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers["Host"] or "").split(":")[0]
            seen.append((host, self.headers.get("Authorization")))
            target = {"/o/n/r/away": f"http://localhost:{self.server.server_port}/x", "/o/n/r/here": "/x"}.get(
                self.path
            )
            self.send_response(302 if target else 200)
            if target:
                self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = mirror.Mirror(f"http://127.0.0.1:{server.server_port}", print, login="user:s3cret")
    for name in ("away", "here"):
        source.open("o/n/r", name).read()
    server.shutdown()
    server.server_close()
    assert [host for host, _ in seen] == ["127.0.0.1", "localhost", "127.0.0.1", "127.0.0.1"]
    assert [bool(given) for _, given in seen] == [True, False, True, True]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://h/a", "https://h:443/b", True),
        ("http://h/a", "https://h/b", True),
        ("https://h/a", "http://h/b", False),
        ("https://h/a", "https://h:8443/b", False),
        ("https://h/a", "https://h.evil/b", False),
        ("http://h:8080/a", "https://h/b", False),
        ("https://h/a", "https://h:none/b", False),
    ],
)
def test_who_may_know_a_secret(one: str, other: str, same: bool) -> None:
    assert redirects.same_origin(one, other) == same


def test_what_another_attempt_left_is_not_gone_on_with_unproven(site: SimpleNamespace) -> None:
    """A folder without hashes: only its own bytes may become the model."""
    site.path.mkdir(parents=True)
    (site.path / "model-1.safetensors.part").write_bytes(b"OLDOLD")
    assert site.fetch(mirror=site.folder)["changed"]
    assert same(site.path, site.source)


def manifest_of(site: SimpleNamespace, **more: Any) -> list[dict[str, Any]]:
    files = [
        {
            "name": name,
            "size": (site.source / name).stat().st_size,
            "sha256": hashlib.sha256((site.source / name).read_bytes()).hexdigest(),
            **more,
        }
        for name in [*WANTED, "pytorch_model.bin", "original/consolidated.00.pth"]
    ]
    (site.source / models.MANIFEST).write_text(json.dumps({"repo": REPO, "commit": "", "files": files}))
    return files


def test_what_no_engine_reads_is_not_taken_from_a_mirror_either(site: SimpleNamespace) -> None:
    manifest_of(site)
    listing = next(iter(site.call("listed", mirror=site.folder, ignore=["tokenizer*"])["listings"].values()))
    assert [e["name"] for e in listing["files"]] == [name for name in WANTED if not name.startswith("tokenizer")]


@pytest.mark.parametrize("sha256", [None, "", "x" * 64, 5])
def test_a_manifest_without_hashes_is_none(site: SimpleNamespace, sha256: Any) -> None:
    manifest_of(site, sha256=sha256)
    assert "is no manifest of a model" in site.call("listed", mirror=site.folder)["msg"]


@pytest.mark.parametrize("name", ["../up.safetensors", "/etc/up.safetensors"])
def test_sums_of_a_file_elsewhere_are_refused(site: SimpleNamespace, name: str) -> None:
    write_sums(site.source, WANTED)
    with (site.source / "SHA256SUMS").open("a") as stream:
        stream.write(f"{'0' * 64}  {name}\n")
    assert re.search(r"SHA256SUMS names .*up.safetensors", site.call("listed", mirror=site.folder)["msg"])


def test_nothing_left_to_fetch_is_said(site: SimpleNamespace) -> None:
    for parameters in ({}, {"mirror": site.folder}):
        result = site.call("listed", ignore=["*"], **parameters)
        assert "model_store_ignore" in result["msg"], result


# ---------------------------------------------------------------- node to node


def receive(site: SimpleNamespace, path: Path, listings: dict[str, Any], **model: Any) -> dict[str, Any]:
    """Another node, whose source is the stand-in, which serves what the first node has."""
    shutil.copytree(site.path, site.root / REPO / "v1", dirs_exist_ok=True)
    listing = next(iter(listings.values()))
    store = path.parents[2]
    entry = {"path": str(path), "revision": "v1", "sources": [f"{site.url}/cdn/"], **model}
    result: dict[str, Any] = site.call("received", model=entry, listings={str(path): listing}, store=str(store))
    return result


def test_a_node_takes_the_model_from_another(site: SimpleNamespace, tmp_path: Path) -> None:
    listings = site.fetch(mirror=site.folder)["listings"]
    other = tmp_path / "other" / REPO / "v1"
    result = receive(site, other, listings)
    assert "received 7 of 7 files" in result["actions"][0], result
    assert same(other, site.source)
    assert models.load_manifest(str(other)) == models.load_manifest(str(site.path))
    # One shard is damaged: it alone travels again.
    flip(other / "model-2.safetensors")
    site.state.requests.clear()
    result = receive(site, other, listings, suspects=["model-2.safetensors"])
    assert "received 1 of 7 files" in result["actions"][0]
    assert same(other, site.source)
    # A folder that nobody vouches for is looked at as a whole.
    (other / models.MANIFEST).unlink()
    flip(other / "model-1.safetensors")
    assert "received 7 of 7 files" in receive(site, other, listings)["actions"][0]
    assert same(other, site.source)
    assert len(site.asked("model-2.safetensors")) == 1


def test_files_of_another_commit_and_the_same_size_come_anew(site: SimpleNamespace, tmp_path: Path) -> None:
    """A branch that moved on: size and header are no proof, and a run that was killed in between has to see it, too."""
    listings = site.fetch(mirror=site.folder)["listings"]
    other = tmp_path / "other" / REPO / "v1"
    receive(site, other, listings)
    moved = json.loads((other / models.MANIFEST).read_text())
    flip(other / "model-1.safetensors")
    old = next(entry for entry in moved["files"] if entry["name"] == "model-1.safetensors")
    old["sha256"] = hashlib.sha256((other / "model-1.safetensors").read_bytes()).hexdigest()
    (other / models.MANIFEST).write_text(json.dumps(moved))
    assert look(site)["model"]["state"] == "complete"
    models.begin(str(other), next(iter(listings.values())))  # killed here
    assert "received 1 of 7 files" in receive(site, other, listings)["actions"][0]
    assert same(other, site.source)


def test_what_is_odd_about_a_model_is_told_when_it_has_come(site: SimpleNamespace) -> None:
    config = site.source / "config.json"
    about = json.loads(config.read_text())
    config.write_text(json.dumps({**about, "vocab_size": 10, "eos_token_id": 10}))
    site.fetch()
    result = site.call("finished")
    assert any("eos_token_id of config.json is 10, beyond the vocab_size 10" in text for text in result["warnings"])
    assert "notes" not in next(iter(result["models"].values()))


def test_a_node_that_has_the_model_from_elsewhere_gives_it_to_the_others(site: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copytree(site.source, site.path)
    assert look(site)["model"]["state"] == "foreign"
    result = site.fetch()
    assert result["changed"]
    assert "described" in result["actions"][0]
    assert site.state.requests == []
    assert look(site, "full")["model"]["state"] == "complete"


def test_a_full_disk_of_a_node_that_receives_is_told_as_it_is(
    site: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = site.fetch(mirror=site.folder)["listings"]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fanout, "fetch", full)
    message = receive(site, tmp_path / "other" / REPO / "v1", listings)["msg"]
    assert re.search(r"is full .*Files that are whole stay, the one that did not fit was removed: make room", message)


def test_the_server_serves_what_this_node_takes_from_others_too(
    site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setattr(fanout, "serve", lambda _unit, _store, names, *_, **options: served.append((names, options)))
    listings = site.call("listed", mirror=site.folder)["listings"]
    other = {
        str(site.store / "org/other/v1"): {"files": [{"name": "x.json", "size": 1}]},
        "/away": {"files": "damaged"},
    }
    serve = {"address": "127.0.0.1", "port": 1, "lifetime": 9}
    site.call("fetched", listings={**other, **listings}, mirror=site.folder, serve=serve)
    ((names, options),) = served
    assert sorted(names) == sorted(["org/other/v1/x.json", *(f"{REPO}/main/{name}" for name in WANTED)])
    # It does not end by itself while the run still fetches another model.
    assert options == {"lifetime": 9}


def test_a_server_that_does_not_start_is_a_warning(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), fanout.PROGRAM)

    monkeypatch.setattr(fanout, "serve", serve)
    result = site.fetch(mirror=site.folder, serve={"address": "127.0.0.1", "port": 1})
    assert result["changed"]
    assert f"{fanout.PROGRAM}: Read-only file system" in told(result)


def test_the_servers_are_ended(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(fanout, "stop", stopped.append)
    site.call("stopped", check=True)
    assert stopped == []
    assert not site.call("stopped")["changed"]
    assert stopped == [model_fetch.UNIT]
    # Also where nothing else of the block was reached.
    (block,) = yaml.safe_load((ROOT / "roles/model_store/tasks/fetch.yml").read_text())
    assert [task["ironrack.vllm.model_fetch"]["state"] for task in block["always"]] == ["stopped", "stopped"]
    assert [task.get("delegate_to") for task in block["always"]] == [None, "{{ item }}"]


# ---------------------------------------------------------------- revisions


def test_a_revision_that_cannot_be_removed_is_a_warning(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    site.fetch(mirror=site.folder)

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), ".nfs1")

    monkeypatch.setattr(shutil, "rmtree", busy)
    result = site.call("finished", keep=0)
    assert not result.get("failed")
    assert re.search(rf"{site.path} on \S+ is not wholly removed \(.nfs1: Device or resource busy\)", told(result))


def test_old_revisions_stay_until_they_may_go(site: SimpleNamespace) -> None:
    for age, revision in enumerate(("v3", "v2", "v1")):
        shutil.copytree(site.source, site.root / REPO / revision)
        path = site.store / REPO / revision
        site.fetch(model={"revision": revision, "path": str(path)}, mirror=site.folder)
        os.utime(path / models.MANIFEST, (1000 - age, 1000 - age))
    site.fetch(mirror=site.folder)
    assert [Path(item["path"]).name for item in look(site)["old"]] == ["v3", "v2", "v1"]
    assert not site.call("finished", planned=[str(site.path)])["changed"]
    result = site.call("finished", planned=[str(site.path)], keep=1)
    assert result["changed"]
    assert sorted(p.name for p in (site.store / REPO).iterdir() if p.is_dir()) == ["main", "v3"]
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"{site.store / REPO / 'v3'}"])
    try:
        kept = site.call("finished", planned=[str(site.path)], keep=0)
        assert "still uses it" in told(kept)
        assert (site.store / REPO / "v3" / models.MANIFEST).exists()
    finally:
        engine.kill()
        engine.wait()
    # Another run may be filling it.
    with models.locked(str(site.store / REPO / "v3"), print):
        kept = site.call("finished", planned=[str(site.path)], keep=0)
    assert "v3 is not removed: another run" in told(kept)
    assert (site.store / REPO / "v3" / models.MANIFEST).exists()
    site.call("finished", planned=[str(site.path)], keep=0)
    assert [p.name for p in (site.store / REPO).iterdir() if p.is_dir()] == ["main"]
