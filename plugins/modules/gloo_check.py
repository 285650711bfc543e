#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: gloo_check
short_description: Let the runtime's PyTorch add numbers with its neighbours over Gloo
version_added: 0.1.0
description:
  - >-
    Runs an all-reduce of two ranks with O(next) and another one with O(previous), both at the same time, in the runtime
    that serves and with the variables that its units get. This is how the engines' ranks meet, before any model is
    loaded.
  - >-
    Each pair meets at a port of the node that begins it. The neighbours have to run the module at the same time, with
    the same port.
  - Needs no GPU, and changes nothing.
author:
  - The ironrack authors
options:
  python:
    description: Python of the runtime. Where it is missing, nothing is tested.
    type: path
    required: true
  environment_file:
    description: File with variables as systemd's C(EnvironmentFile=) takes them. A missing one is empty.
    type: path
    required: true
  next:
    description: The node with which this one begins, and where they meet.
    type: dict
    suboptions: &meeting
      name:
        description: Name of the other node.
        type: str
        required: true
      address:
        description: Address at which the two meet, of the node that begins.
        type: str
        required: true
      port:
        description: TCP port at which the two meet.
        type: int
        required: true
  previous:
    description: The node that begins with this one, and where they meet.
    type: dict
    suboptions: *meeting
  timeout:
    description: Seconds after which a pair is given up. Loading PyTorch takes its time.
    type: int
    default: 120
attributes:
  check_mode:
    description: Does the same, since nothing of the host is changed.
    support: full
  diff_mode:
    description: Changes nothing in any mode.
    support: none
seealso:
  - module: ironrack.vllm.net_probe
"""

EXAMPLES = r"""
- name: Add numbers with the neighbours
  ironrack.vllm.gloo_check:
    python: /opt/ironrack/current/bin/python
    environment_file: /etc/ironrack/node.env
    next: {name: n2, address: 10.77.1.11, port: 50123}
    previous: {name: n3, address: 10.77.1.13, port: 50456}
"""

RETURN = r"""
gloo:
  description: What became of it.
  returned: always
  type: dict
  contains:
    tested:
      description: Whether anything was tested.
      type: bool
    why:
      description: Why not, or null.
      type: str
    interface:
      description: What C(GLOO_SOCKET_IFNAME) says, or null.
      type: str
    next:
      description: C(peer), C(ok), C(error), C(seconds) of the pair that this node began, or null.
      type: dict
    previous:
      description: The same of the pair that the other one began, or null.
      type: dict
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils.env_file import read_environment

# Runs in the runtime. Rank 0 holds the meeting point, so it leaves last.
PROGRAM = """
import datetime, json, sys, time
import torch
import torch.distributed as dist
rank, host, port, seconds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
limit = datetime.timedelta(seconds=seconds)
store = dist.TCPStore(host, port, 2, rank == 0, limit)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
begin = time.monotonic()
values = torch.full((65536,), float(rank + 1))
dist.all_reduce(values)
right = bool((values == 3.0).all())
seconds = time.monotonic() - begin
store.set("done%d" % rank, "1")
store.wait(["done%d" % (1 - rank)], limit)
print(json.dumps({"ok": right, "seconds": round(seconds, 4)}))
"""
LONGEST = 400


def begin(python, environment, rank, meeting, timeout):
    argv = [python, "-I", "-c", PROGRAM, str(rank), meeting["address"], str(meeting["port"]), str(timeout)]
    return subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def stop(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def outcome(process, meeting, end):
    answer = {"peer": meeting["name"], "ok": False, "error": None, "seconds": None}
    try:
        out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        stop(process)
        process.communicate()
        return dict(answer, error="timed out: the two did not finish an all-reduce")
    try:
        told = json.loads(out.strip().splitlines()[-1])
        if told["ok"]:
            return dict(answer, ok=True, seconds=told["seconds"])
        return dict(answer, error="the sum is wrong")
    except (ValueError, IndexError, KeyError):
        return dict(answer, error=reason(err) or f"ended with code {process.returncode} and no word")


def reason(text):
    """The line that says what went wrong: the exception's, without the native stack that may follow it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (named or lines or [""])[-1][:LONGEST]


def check(parameters):
    result = {"tested": False, "why": None, "interface": None, "next": None, "previous": None}
    python, timeout = parameters["python"], parameters["timeout"]
    if not os.path.exists(python):
        return dict(result, why="no runtime yet")
    variables = read_environment(parameters["environment_file"])
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **variables}
    result["interface"] = variables.get("GLOO_SOCKET_IFNAME")
    pairs = [(key, rank) for key, rank in (("next", 0), ("previous", 1)) if parameters[key]]
    # Loading PyTorch comes on top of what the two ranks wait for each other.
    end = time.monotonic() + timeout + 30
    running = {}
    try:
        for key, rank in pairs:
            running[key] = begin(python, environment, rank, parameters[key], timeout)
        for key, process in running.items():
            result[key] = outcome(process, parameters[key], end)
    finally:
        for process in running.values():
            if process.poll() is None:
                stop(process)
                process.wait()
    return dict(result, tested=bool(pairs), why=None if pairs else "no neighbour in this run")


def main():
    meeting = {
        "type": "dict",
        "options": {
            "name": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
        },
    }
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            "environment_file": {"type": "path", "required": True},
            "next": meeting,
            "previous": meeting,
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    if not 5 <= module.params["timeout"] <= 1800:
        module.fail_json(msg=f"timeout={module.params['timeout']} is not between 5 and 1800 seconds; correct it")
    try:
        module.exit_json(changed=False, gloo=check(module.params))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or module.params['python']}: {error.strerror}")


if __name__ == "__main__":
    main()
