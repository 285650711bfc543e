#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_check
short_description: Prove that model folders are complete, and give each a digest to compare between nodes
version_added: 0.1.0
description:
  - Looks only; changes nothing.
  - >-
    For each folder: it exists; C(config.json) is one; every shard that the index names is there, holds the tensors the
    index says, and is as long as its own header says; and the service user can read all of it.
  - >-
    The digest covers name and size of every file, the headers of safetensors files and all of each small file.
    Weights are not read: a folder of 100 GB takes well under a second.
author:
  - The ironrack authors
options:
  models:
    description: Name of each instance (for messages and for the result), and the absolute path of its folder.
    type: dict
    required: true
  user:
    description: User that must be able to read the folders. One that does not exist yet is tolerated in check mode.
    type: str
    required: true
attributes:
  check_mode:
    description: It never changes anything.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Check the models
  ironrack.vllm.model_check:
    user: ironrack
    models:
      tiny: /data/models/tiny
"""

RETURN = r"""
models:
  description: For each instance, what was found.
  returned: success
  type: dict
  contains:
    digest:
      description: Equal on two nodes when names, sizes, headers and small files are.
      type: str
    bytes:
      description: Size of all files.
      type: int
    tensors:
      description: Number of tensors in the safetensors files.
      type: int
    files:
      description: Digest of each file, to name what differs.
      type: dict
"""

import hashlib
import json
import os
import pwd
import socket
import struct

from ansible.module_utils.basic import AnsibleModule

HEADER_LIMIT = 100 * 1000 * 1000  # what the safetensors library accepts
WHOLE_FILE_LIMIT = 32 * 1024 * 1024
INDEX = "model.safetensors.index.json"


class ModelError(Exception):
    """A problem whose text names file and remedy."""


def read_json(path, name):
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
    except FileNotFoundError:
        raise ModelError(f"{name} is missing") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{name} cannot be read ({error}): copy it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name} is no JSON object: copy it again")
    return value


def safetensors_header(path):
    """(raw header, names of the tensors); raises when the file is not as long as its header says."""
    name = os.path.basename(path)
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ModelError(f"{name} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        raw = stream.read(length) if 2 <= length <= HEADER_LIMIT else b""
    if len(raw) != length or not raw:
        raise ModelError(f"{name} has no whole safetensors header ({size} bytes): copy it again")
    try:
        header = json.loads(raw)
        tensors = {key: value["data_offsets"][1] for key, value in header.items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ModelError(f"{name} has a damaged safetensors header: copy it again") from None
    wanted = 8 + length + max(tensors.values(), default=0)
    if size != wanted:
        raise ModelError(f"{name} has {size} of {wanted} bytes: the copy was broken off or mixed up, copy it again")
    return raw, set(tensors)


def inspect(path):
    """Check one folder; returns the module's result for it."""
    if not os.path.isdir(path):
        raise ModelError("the folder does not exist: copy or mount the model there, or correct model.path")
    config = read_json(os.path.join(path, "config.json"), "config.json")
    if "architectures" not in config and "model_type" not in config:
        raise ModelError("config.json names neither architectures nor model_type: it is not a model's")
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    names = [name for name in names if not os.path.isdir(os.path.join(path, name))]
    for name in names:
        if not os.path.exists(os.path.join(path, name)):
            raise ModelError(f"{name} is a link to {os.readlink(os.path.join(path, name))}, which does not exist")

    files, tensors, size = {}, {}, 0
    for name in names:
        file_path = os.path.join(path, name)
        length = os.path.getsize(file_path)
        size += length
        digest = hashlib.sha256(str(length).encode())
        if name.endswith(".safetensors"):
            raw, tensors[name] = safetensors_header(file_path)
            digest.update(raw)
        elif length <= WHOLE_FILE_LIMIT:
            with open(file_path, "rb") as stream:
                digest.update(stream.read())
        files[name] = digest.hexdigest()

    if INDEX in files:
        weight_map = read_json(os.path.join(path, INDEX), INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{INDEX} has no weight_map: copy it again")
        missing = sorted({shard for shard in weight_map.values() if shard not in tensors})
        if missing:
            raise ModelError(f"shards named in {INDEX} are missing: {', '.join(missing[:5])} ({len(missing)} in all)")
        for tensor, shard in weight_map.items():
            if tensor not in tensors[shard]:
                raise ModelError(f"{shard} lacks the tensor {tensor} that {INDEX} says it holds: copy both again")
    elif not tensors and not any(name.endswith((".bin", ".pt", ".gguf")) for name in names):
        raise ModelError("there are no weights in it (*.safetensors)")

    text = json.dumps(sorted(files.items()), separators=(",", ":"))
    return {
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "bytes": size,
        "tensors": sum(len(found) for found in tensors.values()),
        "files": files,
    }


def unreadable(path, names, user):
    """The first thing the user cannot read, or an empty text. Tried in a child that has become the user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        problem = ""
        try:
            if os.geteuid() == 0:
                os.initgroups(user.pw_name, user.pw_gid)
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
            for name in ["", *names]:
                target = os.path.join(path, name) if name else path
                try:
                    handle = os.open(target, os.O_RDONLY)
                    os.close(handle)
                except OSError as error:
                    problem = f"{target}: {error.strerror}"
                    break
            os.write(writer, problem.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        problem = stream.read().decode()
    os.waitpid(child, 0)
    return problem


def main():
    module = AnsibleModule(
        argument_spec={
            "models": {"type": "dict", "required": True},
            "user": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        user = pwd.getpwnam(module.params["user"])
    except KeyError:
        user = None
    if user is None and not module.check_mode:
        module.fail_json(msg=f"the user {module.params['user']} does not exist on {socket.gethostname()}: run host.yml")
    result = {}
    for name, path in module.params["models"].items():
        try:
            result[name] = inspect(path)
            problem = unreadable(path, sorted(result[name]["files"]), user) if user else ""
            if problem:
                raise ModelError(f"{user.pw_name} cannot read {problem}: give it read and search permission")
        except ModelError as error:
            module.fail_json(
                msg=f"the model of instance {name} at {path} on {socket.gethostname()} cannot be served: {error}"
            )
    module.exit_json(changed=False, models=result)


if __name__ == "__main__":
    main()
