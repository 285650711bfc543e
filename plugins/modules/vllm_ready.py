#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: vllm_ready
short_description: Wait until an instance of vLLM answers a completion
version_added: 0.1.0
description:
  - Waits until C(vllm@<name>.service) answers a real completion, and says meanwhile what it is doing.
  - >-
    Fails when the unit has failed for good, when it was restarted too often, or when the time is up,
    and shows the last lines of the unit's journal and where else to look.
  - Of a further rank, which has no API, only the unit is looked at.
author:
  - The ironrack authors
options:
  name:
    description: Name of the unit's instance, which is that of the replica.
    type: str
    required: true
  model:
    description: Name of the model that clients ask for. Left out, that is O(name).
    type: str
  role:
    description: What runs on this node, the API server or a further rank.
    type: str
    choices: [api, headless]
    default: api
  url:
    description: Address of the API server, without a path.
    type: str
    required: true
  env_file:
    description: Environment file of the instance. C(VLLM_API_KEY) is read from it.
    type: path
    required: true
  timeout:
    description: Seconds to wait.
    type: int
    default: 600
  max_restarts:
    description: Restarts during the wait after which it is given up.
    type: int
    default: 4
  look_at:
    description: What to name as other places to look at on failure.
    type: list
    elements: str
    default: []
  wait:
    description: Seconds one look may last. Set by the action that runs this module again and again.
    type: float
    default: 0
  journal:
    description: Whether to return the last lines of the journal. Set by the action on failure.
    type: bool
    default: false
attributes:
  check_mode:
    description: Looks at nothing and waits for nothing, since nothing was started.
    support: full
  diff_mode:
    description: Nothing is changed.
    support: none
"""

EXAMPLES = r"""
- name: Wait for tiny
  ironrack.vllm.vllm_ready:
    name: tiny
    url: http://10.77.1.12:8000
    env_file: /etc/ironrack/vllm/tiny.env
    look_at: ["n3: journalctl -u ray-worker"]
"""

RETURN = r"""
ready:
  description: Whether the instance answers; of a further rank, whether its unit runs.
  returned: always
  type: bool
state:
  description: State of the unit, as systemd says it.
  returned: always
  type: dict
doing:
  description: What it is doing, in words.
  returned: always
  type: str
journal:
  description: Last lines of the unit's journal.
  returned: when asked for
  type: str
"""

import http.client
import json
import re
import subprocess
import time
import urllib.error
import urllib.request

from ansible.module_utils.basic import AnsibleModule

PROPERTIES = "LoadState,ActiveState,SubState,Result,NRestarts,ExecMainStatus,InvocationID"
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
LINE = re.compile(r"\x1b\[[0-9;]*m")


def output(*command):
    answer = subprocess.run(command, capture_output=True, check=False, encoding="utf-8", errors="replace")
    return answer.stdout


def unit_state(unit):
    lines = output("systemctl", "show", f"--property={PROPERTIES}", "--", unit).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def journal(unit, lines):
    text = output("journalctl", "--no-pager", "--quiet", "--output=cat", f"--lines={lines}", f"--unit={unit}")
    return LINE.sub("", text).rstrip()


def api_key(path):
    try:
        with open(path, encoding="utf-8") as file:
            match = re.search(r'^VLLM_API_KEY="((?:[^"\\]|\\.)*)"$', file.read(), re.MULTILINE)
    except OSError:
        return None
    return re.sub(r"\\(.)", r"\1", match[1]) if match else None


def completion(url, name, key, timeout):
    """None when a completion came, else what went wrong."""
    body = {"model": name, "prompt": "hi", "max_tokens": 1, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)  # noqa: S310 (http, from the plan)
    try:
        with NO_PROXY.open(request, timeout=timeout) as answer:
            json.load(answer)["choices"][0]
        return None
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def words(state, problem, last):
    text = f"{state.get('ActiveState')}/{state.get('SubState')}"
    if int(state.get("NRestarts") or 0):
        text += f", {state['NRestarts']} restarts"
    if problem and state.get("ActiveState") == "active" and "refused" not in problem:
        text += f", no completion ({problem})"
    return text + (f": {last[:160]}" if last else "")


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "model": {"type": "str"},
            "role": {"type": "str", "choices": ["api", "headless"], "default": "api"},
            "url": {"type": "str", "required": True},
            "env_file": {"type": "path", "required": True},
            "timeout": {"type": "int", "default": 600},
            "max_restarts": {"type": "int", "default": 4},
            "look_at": {"type": "list", "elements": "str", "default": []},
            "wait": {"type": "float", "default": 0},
            "journal": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    unit = f"vllm@{module.params['name']}.service"
    if module.check_mode:
        module.exit_json(changed=False, ready=False, state={}, doing="not looked at in check mode")
    key = api_key(module.params["env_file"])
    end = time.monotonic() + module.params["wait"]
    while True:
        state, problem = unit_state(unit), None
        if module.params["role"] == "headless":
            ready = state.get("ActiveState") == "active"
        else:
            if state.get("ActiveState") == "active":
                left = max(5.0, end - time.monotonic())
                problem = completion(
                    module.params["url"], module.params["model"] or module.params["name"], key, min(60.0, left)
                )
            ready = state.get("ActiveState") == "active" and problem is None
        if ready or state.get("ActiveState") == "failed" or time.monotonic() >= end:
            break
        time.sleep(1)
    last = "" if ready else journal(unit, 1)
    result = {"changed": False, "ready": ready, "state": state, "doing": words(state, problem, last)}
    if module.params["journal"]:
        result["journal"] = journal(unit, 40)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
