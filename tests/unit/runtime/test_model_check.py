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


# ---------------------------------------------------------------- what others call a model


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        # A few safetensors beside it do not make the weights superfluous.
        (
            ["pytorch_model.bin", "lora/adapter_model.safetensors"],
            ["pytorch_model.bin", "lora/adapter_model.safetensors"],
        ),
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model.safetensors", "2_Dense/pytorch_model.bin"], ["model.safetensors", "2_Dense/pytorch_model.bin"]),
    ],
)
def test_other_weights_are_left_out_where_the_same_are_there_as_safetensors(names, kept):
    assert models.wanted(names) == kept


def test_weights_in_a_folder_below_are_not_the_model(model):
    (model / "lora").mkdir()
    shard(model / "lora/adapter_model.safetensors", ["x"])
    for name in ("model-1.safetensors", "model-2.safetensors", models.INDEX):
        (model / name).unlink()
    with pytest.raises(models.ModelError, match="there are no weights"):
        models.inspect(str(model))


def test_folders_below_are_part_of_the_model(model):
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text("{}")
    (model / "original").mkdir()
    (model / "original/x").write_text("")
    found = models.inspect(str(model))
    assert "1_Pooling/config.json" in found["files"]
    assert not any(name.startswith(("original", ".cache")) for name in found["files"])
    (model / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    assert models.inspect(str(model))["digest"] != found["digest"]


def test_what_is_no_file_does_not_hang_the_check(model):
    os.mkfifo(model / "pipe")
    with pytest.raises(models.ModelError, match="pipe is no file"):
        models.inspect(str(model))


@pytest.mark.parametrize("offsets", [[0, "4"], [0, None], [0, True], [0, -9]])
def test_a_header_of_other_types_is_damaged(model, offsets):
    raw = json.dumps({"w": {"data_offsets": offsets}, "v": {"data_offsets": [0, 4]}}).encode()
    (model / "model-1.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(models.ModelError, match=r"damaged safetensors header|was broken off"):
        models.inspect(str(model))


def test_an_index_of_other_types_is_damaged(model):
    (model / models.INDEX).write_text('{"weight_map": {"a": ["model-1.safetensors"]}}')
    with pytest.raises(models.ModelError, match="weight_map"):
        models.inspect(str(model))


@pytest.mark.parametrize(
    "entries",
    [
        [{"name": "a", "size": -5}],
        [{"name": "a", "size": True}],
        [{"name": "a\nb", "size": 1}],
        [{"name": "../a", "size": 1}],
        [{"name": "a", "size": 1}, {"name": "a", "size": 2}],
        [{"name": models.MANIFEST, "size": 1}],
        [{"name": "a.part", "size": 1}],
    ],
)
def test_a_list_that_lies_is_none(entries):
    assert models.check_listing({"files": [{"name": "x", "size": 0}]})
    assert not models.check_listing({"files": entries})


def test_what_was_left_of_a_transfer_goes_when_all_is_there(model):
    for name in ("model-1.safetensors.part", "model-1.safetensors.unproven"):
        (model / name).write_bytes(b"x")
    names = ["config.json", "model-1.safetensors"]
    models.finish(str(model), {"files": [{"name": name, "size": (model / name).stat().st_size} for name in names]})
    assert not list(model.glob("*.part")) + list(model.glob("*.unproven"))


def test_nothing_is_written_through_a_link(model, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("root's")
    (model / f"{models.ARRIVING}.new").symlink_to(victim)
    models.begin(str(model), {"files": [{"name": "a", "size": 1}]})
    assert victim.read_text() == "root's"
    assert models.load_manifest(str(model), models.ARRIVING)


def test_a_name_that_is_no_text_is_unreadable_too(model):
    name = os.fsdecode(b"b\xff.json")
    (model / name).write_text("{}")
    (model / name).chmod(0)
    user = SimpleNamespace(pw_name="nobody", pw_uid=65534, pw_gid=65534)
    for folder in (model, *model.parents):
        if folder != folder.parent and str(folder).startswith(tempfile.gettempdir() + "/"):
            folder.chmod(0o755)
    assert "Permission denied" in model_check.unreadable(str(model), [name], user)
    # Whatever goes wrong in the child is no permission to go on.
    user.pw_uid = "x"
    assert model_check.unreadable(str(model), ["config.json"], user)


def test_a_lock_that_was_removed_is_not_held(tmp_path):
    folder = str(tmp_path / "org/name/r1")
    with models.locked(folder, print):
        lock = tmp_path / "org/name/.r1.lock"
        with pytest.raises(models.ModelError, match="another run"), models.locked(folder, print, patience=0):
            pass
        # Of a revision that was removed; who waited for this lock must not take it for the new one.
        lock.unlink()
        with models.locked(folder, print, patience=0):
            assert lock.exists()
