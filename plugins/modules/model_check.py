#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_check
short_description: Say of model folders whether they are complete, and give each a digest to compare between nodes
version_added: 0.1.0
description:
  - Looks only; changes nothing.
  - >-
    For each folder: it exists; C(config.json) is one; every shard that the index names is there, holds the tensors the
    index says, and is as long as its own header says; and the service user can read all of it. A folder that
    M(ironrack.vllm.model_fetch) filled is held against its manifest, too.
  - >-
    The digest covers name and size of every file, the headers of safetensors files and all of each small file.
    Weights are not read: a folder of 100 GB takes well under a second. With V(full) everything is read.
  - What is wrong with a folder that the user brings is an error; what is wrong with one that is fetched is returned.
author:
  - The ironrack authors
options:
  models:
    description: By absolute path of its folder, each model.
    type: dict
    required: true
    suboptions:
      instances:
        description: Names of its instances, for messages.
        type: list
        elements: str
      repo:
        description: Repository that it is fetched from. Empty where the user brings the folder.
        type: str
  user:
    description: User that must be able to read the folders. One that does not exist yet is tolerated in check mode.
    type: str
    required: true
  verify:
    description: V(sizes) trusts that a file of the right size has not changed; V(full) reads all of it.
    type: str
    choices: [sizes, full]
    default: sizes
  store:
    description: Folder that holds the models that are fetched, as C(<org>/<name>/<revision>).
    type: path
    default: ""
  planned:
    description: >-
      Folders under O(store) that are never old, beside those of O(models), since this host has them for others.
    type: list
    elements: path
    default: []
  keep:
    description: Old revisions of a repository that may stay. Negative means all of them.
    type: int
    default: -1
  log_path:
    description: Log file on the node, for the progress of V(full).
    type: path
    default: /var/log/ironrack-models.log
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
      /data/models/tiny: {instances: [tiny], repo: ""}
"""

RETURN = r"""
models:
  description: By folder, what was found.
  returned: success
  type: dict
  contains:
    state:
      description: >-
        C(complete), C(foreign) (complete, but not fetched by ironrack), C(arriving), C(damaged) or C(absent).
      type: str
    faults:
      description: By file, what is wrong with it. An empty name stands for the folder as a whole.
      type: dict
    commit:
      description: Commit of the repository, where it is known.
      type: str
    manifest:
      description: Equal on two nodes when their manifests name the same files with the same hashes.
      type: str
    digest:
      description: Equal on two nodes when names, sizes, headers and small files are; with V(full) when all content is.
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
old:
  description: Revisions in O(store) that are in no plan of this node, with their sizes.
  returned: success
  type: list
  elements: dict
surplus:
  description: Those of them that O(keep) lets go.
  returned: success
  type: list
  elements: str
"""

import os
import pwd
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils import models
from ansible_collections.ironrack.vllm.plugins.module_utils.models import ModelError


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
        except BaseException as error:
            problem = f"{path}: {error}"
        finally:
            os.write(writer, problem.encode(errors="backslashreplace")[:4000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        problem = stream.read().decode()
    os.waitpid(child, 0)
    return problem


def look(path, model, full, log):
    """One folder: what is fetched may lack something, what the user brings may not."""
    told = [0, 0]

    def seen(count):
        # The hashing of a large model takes minutes: one line for each 50 GB.
        told[0] += count
        if told[0] // (50 * models.GB) > told[1]:
            told[1] = told[0] // (50 * models.GB)
            log(f"{path}: {told[0] / models.GB:.0f} GB read")

    if model["repo"]:
        return models.look(path, full, seen)
    found = models.inspect(path, full, seen)
    return {"state": "foreign", "faults": {}, "commit": "", "manifest": "", **found}


def check(module, user):
    params = module.params
    log = models.Log(params["log_path"])
    result = {}
    for path, model in params["models"].items():
        names = ", ".join(model["instances"])
        try:
            result[path] = look(path, model, params["verify"] == "full", log)
            if user and result[path]["state"] in ("complete", "foreign"):
                problem = unreadable(path, sorted(result[path]["files"]), user)
                if problem:
                    raise ModelError(f"{user.pw_name} cannot read {problem}: give it read and search permission")
        except ModelError as error:
            module.fail_json(
                msg=f"the model of instance {names} at {path} on {socket.gethostname()} cannot be served: {error}"
            )
        for note in result[path].pop("notes", []):
            module.warn(f"{names} at {path}: {note}")
        for name, problem in result[path]["faults"].items():
            module.warn(f"{names} at {path} on {socket.gethostname()}: {name} {problem}; it is fetched again")
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "models": {"type": "dict", "required": True},
            "user": {"type": "str", "required": True},
            "verify": {"type": "str", "choices": ["sizes", "full"], "default": "sizes"},
            "store": {"type": "path", "default": ""},
            "planned": {"type": "list", "elements": "path", "default": []},
            "keep": {"type": "int", "default": -1},
            "log_path": {"type": "path", "default": "/var/log/ironrack-models.log"},
        },
        supports_check_mode=True,
    )
    try:
        user = pwd.getpwnam(module.params["user"])
    except KeyError:
        user = None
    if user is None and not module.check_mode:
        module.fail_json(msg=f"the user {module.params['user']} does not exist on {socket.gethostname()}: run host.yml")
    found = check(module, user)
    store, keep = module.params["store"], module.params["keep"]
    old = models.revisions(store, [*module.params["models"], *module.params["planned"]]) if store else []
    surplus = models.surplus(old, keep) if keep >= 0 else []
    module.exit_json(changed=False, models=found, old=old, surplus=surplus)


if __name__ == "__main__":
    main()
