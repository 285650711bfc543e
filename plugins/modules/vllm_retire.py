#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: vllm_retire
short_description: Stop and remove instances and Ray units that a node should no longer have
version_added: 0.1.0
description:
  - Looks for instances of C(vllm@.service), for the timers that watch over them and for Ray units that this project
    wrote, stops those that are not to be kept, and removes their files.
  - Only files that begin with this project's mark are touched. What was written by hand stays.
author:
  - The ironrack authors
options:
  keep_instances:
    description: Names of the instances that stay.
    type: list
    elements: str
    required: true
  keep_units:
    description: Ray units and timers that stay.
    type: list
    elements: str
    default: []
  config_dir:
    description: Folder of the project's configuration.
    type: path
    default: /etc/ironrack
attributes:
  check_mode:
    description: Reports what would be stopped and removed.
    support: full
  diff_mode:
    description: Lists the units and files that go.
    support: full
"""

EXAMPLES = r"""
- name: Keep one instance, and no Ray
  ironrack.vllm.vllm_retire:
    keep_instances: [tiny]
    keep_units: [vllm-canary@tiny.timer]
"""

RETURN = r"""
units:
  description: Units that were (or in check mode would be) stopped and disabled.
  returned: always
  type: list
  elements: str
  sample: [vllm@old.service, vllm-canary@old.timer]
paths:
  description: Files that were (or would be) removed.
  returned: always
  type: list
  elements: str
  sample: [/etc/systemd/system/vllm@old.service.d/10-instance.conf]
"""

import contextlib
import os
import re

from ansible.module_utils.basic import AnsibleModule

UNITS = "/etc/systemd/system"
MARK = "# Managed by ironrack"
INSTANCE = re.compile(r"vllm@(.+)\.service\.d")
WATCHER = re.compile(r"(.+)\.(canary|watch)\.json")
RAY_UNITS = ("ray-head.service", "ray-worker.service")


def ours(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().startswith(MARK)
    except OSError:
        return False


def names(folder):
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


def leftovers(keep_instances, keep_units, config_dir):
    """Units to stop and files to remove. The drop-in by which an instance is found goes last."""
    units, paths = [], []
    for name in names(UNITS):
        match = INSTANCE.fullmatch(name)
        dropin = f"{UNITS}/{name}/10-instance.conf"
        if match and match[1] not in keep_instances and ours(dropin):
            units += [f"vllm-canary@{match[1]}.timer", f"vllm-watch@{match[1]}.timer", f"vllm@{match[1]}.service"]
            files = [f"{config_dir}/vllm/{match[1]}.{suffix}" for suffix in ("env", "canary.json", "watch.json")]
            paths += [path for path in files if os.path.lexists(path)] + [dropin]
    # The node's part in an instance that stays may have changed: the API server moved to another node, or came here.
    for name in names(f"{config_dir}/vllm"):
        match = WATCHER.fullmatch(name)
        timer = f"vllm-{match[2]}@{match[1]}.timer" if match else None
        if timer and timer not in units + keep_units:
            units.append(timer)
            paths.append(f"{config_dir}/vllm/{name}")
    for name in RAY_UNITS:
        if name not in keep_units and ours(f"{UNITS}/{name}"):
            units.append(name)
            paths.append(f"{UNITS}/{name}")
    if any(name in units for name in RAY_UNITS) and not any(name in keep_units for name in RAY_UNITS):
        paths[:0] = [path for path in (f"{config_dir}/ray.token", f"{config_dir}/ray.env") if os.path.lexists(path)]
    return units, paths


def main():
    module = AnsibleModule(
        argument_spec={
            "keep_instances": {"type": "list", "elements": "str", "required": True},
            "keep_units": {"type": "list", "elements": "str", "default": []},
            "config_dir": {"type": "path", "default": "/etc/ironrack"},
        },
        supports_check_mode=True,
    )
    units, paths = leftovers(module.params["keep_instances"], module.params["keep_units"], module.params["config_dir"])
    result = {"changed": bool(units), "units": units, "paths": paths}
    if module._diff and units:
        result["diff"] = {
            "before_header": "units and files",
            "after_header": "units and files",
            "before": "\n".join(units + paths) + "\n",
            "after": "",
        }
    if units and not module.check_mode:
        # Stopped first, removed last: a run that dies in between finds them again.
        module.run_command(["systemctl", "disable", "--quiet", "--now", "--", *units], check_rc=True)
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if path.endswith(".service.d/10-instance.conf"):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.dirname(path))
        module.run_command(["systemctl", "daemon-reload"], check_rc=True)
        module.run_command(["systemctl", "reset-failed", "--", *units])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
