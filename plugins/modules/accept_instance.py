#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: accept_instance
short_description: Accept an instance of vLLM by a real completion
version_added: 0.1.0
description:
  - Runs on the node of the API server. Lists the models, asks for one greedy completion, and looks at the units.
  - >-
    Checks the model's name, the number of tokens, that the answer's C(system_fingerprint) names the planned layout,
    that C(/health) answers and that no unit was restarted meanwhile.
  - With O(reference=transformers) the text must equal the model's own greedy answer. That is computed once and kept.
  - The report is written on the controller when O(report) is given; an equal report is left alone.
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
  url:
    description: Address of the API server, without a path.
    type: str
    required: true
  ask_url:
    description: Address to print in the command that asks again. O(url) when empty.
    type: str
    default: ""
  env_file:
    description: Environment file of the instance. C(VLLM_API_KEY) is read from it.
    type: path
    required: true
  units:
    description: Units of this node that the instance depends on.
    type: list
    elements: str
    required: true
  layout:
    description:
      - Sizes the answer must come from, C(tensor), C(pipeline), C(data), and whether experts are parallel, C(expert).
      - Empty to skip that check.
    type: dict
    default: {}
  prompt:
    description: What to ask.
    type: str
    required: true
  max_tokens:
    description: How many tokens to ask for.
    type: int
    default: 16
  timeout:
    description: Seconds to wait for an answer.
    type: int
    default: 120
  observe_seconds:
    description: Seconds over which the units must not be restarted.
    type: int
    default: 3
  reference:
    description: Where the expected text comes from.
    type: str
    choices: [none, transformers]
    default: none
  reference_script:
    description: The program that computes the reference. Set by the role.
    type: str
    default: ""
  model_path:
    description: Folder of the model.
    type: path
    required: true
  python:
    description: A Python that has transformers.
    type: path
    default: /opt/ironrack/current/bin/python
  user:
    description: User that computes the reference.
    type: str
    default: ironrack
  cache_dir:
    description: Where computed references are kept.
    type: path
    default: /var/lib/ironrack/accept
  report:
    description: File on the controller to write the report to.
    type: str
    default: ""
attributes:
  check_mode:
    description: Does nothing, since nothing may have been deployed.
    support: full
  diff_mode:
    description: Shows how the report changes.
    support: full
"""

EXAMPLES = r"""
- name: Accept tiny
  ironrack.vllm.accept_instance:
    name: tiny
    url: http://10.77.1.12:8000
    env_file: /etc/ironrack/vllm/tiny.env
    units: [vllm@tiny.service, ray-worker.service]
    layout: {tensor: 2, pipeline: 2}
    prompt: The scheduler
    model_path: /data/models/tiny
"""

RETURN = r"""
acceptance:
  description: What was found. Free of times, so that equal deployments give equal reports.
  returned: success
  type: dict
  sample: {instance: tiny, text: " places a", tokens: 3, fingerprint: vllm-0.32.0-tp2-pp2-42845710}
seconds:
  description: How long the completion took.
  returned: success
  type: float
curl:
  description: The command that asks again.
  returned: success
  type: str
"""

import hashlib
import http.client
import json
import os
import pwd
import re
import shlex
import subprocess
import time
import urllib.error
import urllib.request

from ansible.module_utils.basic import AnsibleModule

NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
FINGERPRINT = re.compile(
    r"vllm-(?P<version>.+?)(?:-tp(?P<tensor>\d+))?(?:-pp(?P<pipeline>\d+))?(?:-dp(?P<data>\d+))?(?P<expert>-ep)?-[0-9a-z]{6,8}"
)
# Up to this size the weights count by content, above it by size and time.
HASH_LIMIT = 2 * 2**30


class Rejected(Exception):
    """What is wrong, in words for the user."""


def api_key(path):
    try:
        with open(path, encoding="utf-8") as file:
            match = re.search(r'^VLLM_API_KEY="((?:[^"\\]|\\.)*)"$', file.read(), re.MULTILINE)
    except OSError:
        return None
    return re.sub(r"\\(.)", r"\1", match[1]) if match else None


class Api:
    """The instance's HTTP interface."""

    def __init__(self, url, key, timeout):
        self.url, self.timeout = url, timeout
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def call(self, path, body=None):
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, self.headers)  # noqa: S310 (http, from the plan)
        try:
            with NO_PROXY.open(request, timeout=self.timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise Rejected(
                f"{self.url}{path} answered HTTP {error.code}: {error.read(500).decode(errors='replace')}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise Rejected(
                f"{self.url}{path} did not answer (limit {self.timeout} s): {getattr(error, 'reason', error)}"
            ) from None
        return json.loads(text) if text else None


def unit_states(units):
    answer = subprocess.run(
        ["systemctl", "show", "--property=Id,ActiveState,SubState,NRestarts,InvocationID", "--", *units],
        stdout=subprocess.PIPE,
        check=True,
        encoding="utf-8",
    )
    states = {}
    for block in answer.stdout.strip().split("\n\n"):
        state = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        states[state["Id"]] = state
    return states


def check_units(before, after):
    for unit, state in after.items():
        if state["ActiveState"] != "active":
            raise Rejected(
                f"{unit} is {state['ActiveState']} ({state['SubState']}), not active; see: journalctl -u {unit}"
            )
        first = before[unit]
        if any(state.get(key) != first.get(key) for key in ("NRestarts", "InvocationID")):
            raise Rejected(
                f"{unit} was restarted while it was observed ({state.get('NRestarts')} times by now); "
                f"see: journalctl -u {unit}"
            )


def check_layout(fingerprint, layout):
    match = FINGERPRINT.fullmatch(fingerprint or "")
    if not match:
        raise Rejected(f"the answer's system_fingerprint {fingerprint!r} names no layout; is --fingerprint-mode set?")
    found = {size: int(match[size] or 1) for size in ("tensor", "pipeline", "data")}
    found["expert"] = bool(match["expert"])
    wanted = {"tensor": 1, "pipeline": 1, "data": 1, "expert": False} | layout
    if found != wanted:
        raise Rejected(
            f"the answer comes from the layout {found} (system_fingerprint {fingerprint}), planned is {wanted}"
        )


def model_digest(folder):
    digest = hashlib.sha256()
    entries = sorted((entry for entry in os.scandir(folder) if entry.is_file()), key=lambda entry: entry.name)
    if not entries:
        raise Rejected(f"the model folder {folder} holds no files")
    by_content = sum(entry.stat().st_size for entry in entries) <= HASH_LIMIT
    for entry in entries:
        status = entry.stat()
        digest.update(f"{entry.name}\0{status.st_size}\0".encode())
        if by_content:
            with open(entry.path, "rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        else:
            digest.update(str(status.st_mtime_ns).encode())
    return digest.hexdigest()


def reference(params):
    """The model's own answer, computed once for the same files, question and program."""
    request = {"model": params["model_path"], "prompt": params["prompt"], "tokens": params["max_tokens"]}
    parts = [model_digest(params["model_path"]), params["reference_script"], json.dumps(request, sort_keys=True)]
    path = os.path.join(params["cache_dir"], hashlib.sha256("\0".join(parts).encode()).hexdigest() + ".json")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        pass
    account = pwd.getpwnam(params["user"])
    answer = subprocess.run(
        [params["python"], "-c", params["reference_script"]],
        input=json.dumps(request),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        cwd="/",
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=[],
        env={"PATH": "/usr/bin:/bin", "HOME": account.pw_dir},
    )
    if answer.returncode != 0:
        tail = "\n".join(answer.stderr.strip().splitlines()[-5:])
        raise Rejected(f"transformers could not compute the reference (accept_reference: none does without):\n{tail}")
    result = json.loads(answer.stdout.strip().splitlines()[-1])
    os.makedirs(params["cache_dir"], mode=0o755, exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(path + ".new", path)
    return result


def accept(params):
    key = api_key(params["env_file"])
    api = Api(params["url"], key, params["timeout"])
    started = time.monotonic()
    before = unit_states(params["units"])
    check_units(before, before)
    api.call("/health")
    models = [model["id"] for model in api.call("/v1/models")["data"]]
    model = params["model"] or params["name"]
    if model not in models:
        raise Rejected(f"{params['url']} serves {models}, not {model}")
    body = {"model": model, "prompt": params["prompt"], "max_tokens": params["max_tokens"], "temperature": 0}
    asked = time.monotonic()
    answer = api.call("/v1/completions", body)
    seconds = time.monotonic() - asked
    choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
    if tokens != params["max_tokens"] and not (0 < tokens < params["max_tokens"] and choice["finish_reason"] == "stop"):
        raise Rejected(
            f"{tokens} tokens came (finish_reason {choice['finish_reason']}), {params['max_tokens']} were asked for"
        )
    if params["layout"]:
        check_layout(answer.get("system_fingerprint"), params["layout"])
    if params["reference"] == "transformers":
        expected = reference(params)
        if (choice["text"], tokens) != (expected["text"], expected["tokens"]):
            raise Rejected(
                "the completion is not the model's own greedy answer:\n"
                f"  prompt:       {params['prompt']!r}\n"
                f"  vLLM:         {choice['text']!r} ({tokens} tokens)\n"
                f"  transformers: {expected['text']!r} ({expected['tokens']} tokens)"
            )
    time.sleep(max(0.0, params["observe_seconds"] - (time.monotonic() - started)))
    check_units(before, unit_states(params["units"]))
    acceptance = {
        "instance": params["name"],
        "url": params["url"],
        "prompt": params["prompt"],
        "text": choice["text"],
        "tokens": tokens,
        "finish_reason": choice["finish_reason"],
        "fingerprint": answer.get("system_fingerprint"),
        "layout_checked": bool(params["layout"]),
        "reference": params["reference"],
        "units": sorted(params["units"]),
    }
    command = [
        "curl",
        "-s",
        (params["ask_url"] or params["url"]) + "/v1/completions",
        "-H",
        "Content-Type: application/json",
    ]
    authorization = ' -H "Authorization: Bearer $VLLM_API_KEY"' if key else ""
    curl = shlex.join(command) + authorization + " -d " + shlex.quote(json.dumps(body))
    return {"acceptance": acceptance, "seconds": round(seconds, 2), "curl": curl}


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "model": {"type": "str"},
            "url": {"type": "str", "required": True},
            "ask_url": {"type": "str", "default": ""},
            "env_file": {"type": "path", "required": True},
            "units": {"type": "list", "elements": "str", "required": True},
            "layout": {"type": "dict", "default": {}},
            "prompt": {"type": "str", "required": True},
            "max_tokens": {"type": "int", "default": 16},
            "timeout": {"type": "int", "default": 120},
            "observe_seconds": {"type": "int", "default": 3},
            "reference": {"type": "str", "choices": ["none", "transformers"], "default": "none"},
            "reference_script": {"type": "str", "default": ""},
            "model_path": {"type": "path", "required": True},
            "python": {"type": "path", "default": "/opt/ironrack/current/bin/python"},
            "user": {"type": "str", "default": "ironrack"},
            "cache_dir": {"type": "path", "default": "/var/lib/ironrack/accept"},
            "report": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, msg="Nothing is asked in check mode")
    try:
        result = accept(module.params)
    except Rejected as error:
        module.fail_json(msg=f"Instance {module.params['name']} is not accepted: {error}")
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
