#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: release_switch
short_description: Look at the releases of a node, and make another one the current one
version_added: 0.1.0
description:
  - V(checked) lists the releases that the module M(ironrack.vllm.release) left on this node, and looks whether the one
    asked for is complete and as it was built, by size, time, mode and owner of every file. It changes nothing.
  - V(switched) points the link C(current) to it in one step. Nothing is restarted. The link C(previous) remembers what
    was current before, unless O(previous) says otherwise.
author:
  - The ironrack authors
options:
  state:
    description: What to do.
    type: str
    choices: [checked, switched]
    required: true
  release:
    description: Id of the release. Empty with O(state=checked) means the one that was current before.
    type: str
    default: ""
  previous:
    description: >-
      With O(state=switched), id that C(previous) is to lead to, to undo a switch as if it had not been. Empty removes
      the link.
    type: str
  made_at:
    description:
      - With O(state=switched), the RV(link_time) that C(current) is to have, to undo a switch. Units that started
        before the link was made are restarted.
    type: int
    default: 0
  prefix:
    description: Folder that holds C(releases) and the links.
    type: path
    default: /opt/ironrack
attributes:
  check_mode:
    description: Says what would be switched.
    support: full
  diff_mode:
    description: Shows the switch of C(current).
    support: full
"""

EXAMPLES = r"""
- name: Look what this node could return to
  ironrack.vllm.release_switch:
    state: checked

- name: Return to a release
  ironrack.vllm.release_switch:
    state: switched
    release: 0f3a6c2d9b1e4f58
"""

RETURN = r"""
releases:
  description: >-
    Every release of this node, newest first, each with C(id), C(complete), C(current), C(previous), C(in_use_by)
    (units), C(inputs) (what it was made from), C(built_at), C(built_on), C(bytes) and C(damage), what is no longer as
    it was built. The last is looked for in O(release) only.
  returned: always
  type: list
  elements: dict
before:
  description: Id of the release that is current, or was before it was switched. Empty where there is none.
  returned: always
  type: str
previous:
  description: Id of the release that C(previous) leads to, or led to before the switch. Empty where there is none.
  returned: always
  type: str
link_time:
  description: When the link C(current) was made, in nanoseconds since the epoch, or 0.
  returned: always
  type: int
"""

import os
import socket
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils import release_tree

NAMED_FILES = 5


def damage(path):
    """What is wrong with a complete release, in words; an empty list when nothing is."""
    try:
        problems = release_tree.examine(path).lines()
    except (release_tree.TreeError, OSError) as error:
        return [str(error)]
    try:
        command = [os.path.join(path, "bin", "python"), "-I", "-c", ""]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        problems += [f"its Python does not run: {done.stderr.strip()[-200:]}"] if done.returncode else []
    except (OSError, subprocess.TimeoutExpired) as error:
        problems.append(f"its Python does not run: {error}")
    return problems


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "required": True, "choices": ["checked", "switched"]},
            "release": {"type": "str", "default": ""},
            "previous": {"type": "str"},
            "made_at": {"type": "int", "default": 0},
            "prefix": {"type": "path", "default": "/opt/ironrack"},
        },
        required_if=[("state", "switched", ["release"])],
        supports_check_mode=True,
    )
    prefix, before = module.params["prefix"], release_tree.linked(module.params["prefix"])
    previous = release_tree.linked(prefix, "previous")
    wanted = module.params["release"] or previous
    releases = release_tree.installed(prefix)
    for release in releases:
        looked_at = release["id"] == wanted and release["complete"]
        path = os.path.join(prefix, "releases", release["id"])
        release["damage"] = damage(path)[:NAMED_FILES] if looked_at and module.params["state"] == "checked" else []
    result = {"changed": False, "releases": releases, "before": before, "previous": previous}
    result["link_time"] = release_tree.link_time(prefix)
    if module.params["state"] == "switched" and before != wanted:
        gone = (
            f"{socket.gethostname()} has no complete release {wanted}; {prefix}/current stays at {before or 'nothing'}"
        )
        if not any(release["id"] == wanted and release["complete"] for release in releases):
            module.fail_json(msg=gone, **result)
        try:
            if not module.check_mode:
                with release_tree.held(prefix, wanted):
                    # Another run may have removed it since.
                    if release_tree.read_marker(os.path.join(prefix, "releases", wanted)) is None:
                        module.fail_json(msg=gone, **result)
                    release_tree.switch(prefix, wanted, module.params["previous"], module.params["made_at"])
        except OSError as error:
            module.fail_json(
                msg=f"{socket.gethostname()}: {prefix}/current stays at {before or 'nothing'}: {error.strerror} "
                f"({error.filename or prefix}). Make the folder writable for root and run again",
                **result,
            )
        link = f"{prefix}/current"
        result["changed"] = True
        result["diff"] = {
            "before": f"{link} -> releases/{before}\n" if before else "",
            "after": f"{link} -> releases/{wanted}\n",
        }
    module.exit_json(**result)


if __name__ == "__main__":
    main()
