"""The module `model_check`: complete models pass, each kind of damage is named."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils import models
from ansible_collections.ironrack.vllm.plugins.modules import model_check

ROOT = Path(__file__).resolve().parents[3]


def shard(path, tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in tensors:
        header[name] = {"dtype": "F32", "shape": [2], "data_offsets": [offset, offset + 8]}
        offset += 8
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


def shorten(path, count):
    os.truncate(path, path.stat().st_size - count)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["X"], "model_type": "x"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / ".cache").mkdir()
    shard(folder / "model-1.safetensors", ["a", "b"])
    shard(folder / "model-2.safetensors", ["c"])
    weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (folder / models.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_complete_model_passes_and_a_copy_has_the_same_digest(model, tmp_path):
    found = models.inspect(str(model))
    assert found["tensors"] == 3
    assert found["bytes"] == sum(path.stat().st_size for path in model.iterdir() if path.is_file())
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert models.inspect(str(copy))["digest"] == found["digest"]
    (copy / "tokenizer.json").write_text("{ }")
    other = models.inspect(str(copy))
    assert other["digest"] != found["digest"]
    assert [name for name in other["files"] if other["files"][name] != found["files"][name]] == ["tokenizer.json"]


def test_links_into_a_blob_store_are_followed(model):
    shutil.move(model / "model-2.safetensors", model.parent / "blob")
    (model / "model-2.safetensors").symlink_to("../blob")
    assert models.inspect(str(model))["tensors"] == 3
    (model.parent / "blob").unlink()
    with pytest.raises(models.ModelError, match=r"model-2.safetensors is a link to \.\./blob"):
        models.inspect(str(model))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "architectures"),
        (lambda folder: (folder / "model-2.safetensors").unlink(), "missing: model-2.safetensors"),
        (lambda folder: shorten(folder / "model-2.safetensors", 1), r"model-2.safetensors has \d+ of \d+ bytes"),
        (lambda folder: os.truncate(folder / "model-1.safetensors", 20), "no whole safetensors header"),
        (lambda folder: os.truncate(folder / "model-1.safetensors", 0), "no whole safetensors header"),
        (lambda folder: shard(folder / "model-2.safetensors", ["d"]), "lacks the tensor c"),
        (lambda folder: (folder / "model-1.safetensors").write_text("version https://git-lfs"), "Git LFS pointer"),
        (lambda folder: (folder / models.INDEX).write_text("{}"), "no weight_map"),
        (lambda folder: [path.unlink() for path in folder.glob("*model*")], "no weights"),
    ],
)
def test_damage_is_named(model, damage, message):
    damage(model)
    with pytest.raises(models.ModelError, match=message):
        models.inspect(str(model))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_files_that_the_service_user_cannot_read_are_named():
    user = SimpleNamespace(pw_name="nobody", pw_uid=65534, pw_gid=65534)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        Path(folder).chmod(0o755)
        for name in ("config.json", "tokenizer.json"):
            Path(folder, name).write_text("{}")
            Path(folder, name).chmod(0o644)
        names = ["config.json", "tokenizer.json"]
        assert model_check.unreadable(folder, names, user) == ""
        Path(folder, "tokenizer.json").chmod(0o600)
        assert model_check.unreadable(folder, names, user) == f"{folder}/tokenizer.json: Permission denied"
        Path(folder).chmod(0o700)
        assert model_check.unreadable(folder, names, user) == f"{folder}: Permission denied"


def test_the_tiny_model_of_the_lab_is_complete_and_the_same_each_time(tmp_path):
    script = ROOT / "roles/lab/files/make_tiny_model.py"
    digests = set()
    for name in ("one", "two"):
        subprocess.run([sys.executable, str(script), str(tmp_path / name)], check=True, capture_output=True)
        digests.add(models.inspect(str(tmp_path / name))["digest"])
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / name).iterdir()} == {0o644}
    assert len(digests) == 1
    weights = {(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")}
    assert len(weights) == 1


def test_the_wheels_of_the_lab_are_the_same_each_time(tmp_path):
    script = ROOT / "roles/lab/files/build_wheels.py"
    outputs = set()
    for name in ("one", "two"):
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path / name)], check=True, capture_output=True, text=True
        )
        outputs.add(done.stdout.replace(str(tmp_path / name), ""))
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 2
