#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: drain
short_description: Take this project's units of a node out of service, and put back what ran before
version_added: 0.1.0
description:
  - >-
    With O(state=drained), writes down which units run or start at boot, disables them, stops timers, waits until the
    engines have no request in flight, and stops the rest. A node that is drained stays so across reboots.
  - >-
    With O(state=admitted), enables and starts what the record says ran before, waits for it, and removes the record.
  - >-
    The record is written before anything is stopped, and removed after everything runs. A run that is killed anywhere
    between is made up for by the next.
author:
  - The ironrack authors
options:
  state:
    description: What to reach. V(query) only reads the record.
    type: str
    choices: [drained, admitted, query]
    required: true
  name:
    description:
      - Name of the record. A node can be drained for several reasons at once; each puts back only what it took away.
    type: str
    required: true
  units:
    description: Units to take out of service, as systemctl's patterns. Those that are there are found on the node.
    type: list
    elements: str
    default: []
  wait_for:
    description: Addresses of API servers, without a path, whose requests in flight are waited for.
    type: list
    elements: str
    default: []
  wait_timeout:
    description: Seconds to wait for requests in flight. Those that are left then are cut off, with a warning.
    type: int
    default: 300
  timeout:
    description: Seconds to wait for units to stop or start.
    type: int
    default: 300
  remember:
    description: Kept in the record and returned with it.
    type: dict
    default: {}
  directory:
    description: Folder of the records.
    type: path
    default: /var/lib/ironrack-host
attributes:
  check_mode:
    description: Tells which units would be stopped or started. Does not wait.
    support: full
  diff_mode:
    description: Lists these units.
    support: full
"""

EXAMPLES = r"""
- name: Take the node out of service
  ironrack.vllm.drain:
    state: drained
    name: reboot
    units: ["vllm-canary@*.timer", "vllm@*.service", ray-worker.service]
    wait_for: ["http://10.77.1.12:8000"]

- name: Put it back
  ironrack.vllm.drain:
    state: admitted
    name: reboot
"""

RETURN = r"""
record:
  description: >-
    The record as it is at the end, null when there is none; after O(state=admitted) the one that was carried out.
    Has C(boot_id) and C(time) of its writing, C(units) (of each unit C(enabled) and C(start), whether it ran or would
    have at boot) and C(remember).
  returned: always
  type: dict
units:
  description: Units that were (or in check mode would be) stopped or started.
  returned: always
  type: list
  elements: str
cut_off:
  description: Requests that were still in flight when the time was up.
  returned: always
  type: int
waited:
  description: Seconds waited for requests in flight.
  returned: always
  type: int
"""

import http.client
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request

from ansible.module_utils.basic import AnsibleModule

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PROPERTIES = "Id,LoadState,ActiveState,SubState,UnitFileState,Result"
RUNNING = ("active", "reloading", "refreshing", "activating")
# vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
IN_FLIGHT = re.compile(rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
WATCHER = re.compile(r"vllm-(?:canary|watch)@(.+)\.timer$")
LOOK_SECONDS = 1.0


class DrainError(Exception):
    """A problem that names the unit or the file."""


def call(*command, timeout=60):
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            env=dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0", SYSTEMD_PAGER=""),
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        raise DrainError(f"{command[0]} is not installed: this host does not run systemd") from None
    except subprocess.TimeoutExpired:
        raise DrainError(f"no end of {' '.join(command)} within {timeout} seconds; systemd goes on with it") from None
    return answer


def systemctl(*arguments, timeout=60):
    answer = call("systemctl", *arguments, timeout=timeout)
    if answer.returncode != 0:
        raise DrainError(f"systemctl {' '.join(arguments)} failed: {answer.stderr.strip()}")
    return answer.stdout


def show(patterns):
    """name -> properties of the units that are there."""
    if not patterns:
        return {}
    found = {}
    for block in systemctl("show", "--no-pager", "-p", PROPERTIES, "--", *patterns).split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if values.get("Id") and values.get("LoadState") not in ("not-found", "masked"):
            found[values["Id"]] = values
    return found


def boot_id():
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
        return handle.read().strip()


def load(path):
    try:
        with open(path, encoding="utf-8") as handle:
            record = json.load(handle)
        record["units"].items()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DrainError(
            f"{path} cannot be read ({error}): start the units by hand (playbooks/serve.yml does) and remove it"
        ) from None
    return record


def save(path, record):
    """On disk before anything is stopped: a reboot may follow."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as handle:
        json.dump(record, handle, indent=1, sort_keys=True)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(path + ".new", path)


def in_flight(url):
    """Requests that an API server has accepted and not answered. One that is not there has none; None: not known."""
    try:
        with NO_PROXY.open(url + "/metrics", timeout=5) as answer:
            return int(sum(float(value) for value in IN_FLIGHT.findall(answer.read())))
    except (OSError, http.client.HTTPException, ValueError) as error:
        # A server that is slow to answer, or answers with an error, may have its hands full of requests.
        return 0 if isinstance(getattr(error, "reason", error), ConnectionRefusedError) else None


def wait_for_requests(urls, seconds):
    """(requests left, servers that do not tell theirs, seconds waited)"""
    start = time.monotonic()
    while True:
        counts = {url: in_flight(url) for url in urls}
        left = sum(count or 0 for count in counts.values())
        silent = [url for url, count in counts.items() if count is None]
        waited = time.monotonic() - start
        if not (left or silent) or waited >= seconds:
            return left, silent, int(waited)
        time.sleep(LOOK_SECONDS)


def stop_units(names, timeout):
    """Together: systemd stops each before what it was started after."""
    try:
        systemctl("stop", "--", *names, timeout=timeout)
    except DrainError as error:
        blocks = show(names)
        left = [name for name in names if blocks.get(name, {}).get("ActiveState") not in (None, "inactive", "failed")]
        if not left:
            raise
        raise DrainError(
            f"{', '.join(left)} did not stop ({error}). systemctl kill --signal=KILL {' '.join(left)} on the node ends"
            f" it; where it only needs longer, raise timeout={timeout}"
        ) from None


def drain(record, units, options, check_mode):
    """The new record, the units to stop (timers first), and what wait_for_requests says."""
    known = dict(record["units"]) if record else {}
    stop = []
    for name, values in units.items():
        running = values.get("ActiveState") in RUNNING
        enabled = values.get("UnitFileState") in ("enabled", "enabled-runtime")
        if running or values.get("ActiveState") == "deactivating" or enabled:
            stop.append(name)
            # Of two runs the first saw what ran; the second sees what the first has not reached.
            before = known.get(name, {"enabled": False, "start": False})
            known[name] = {"enabled": before["enabled"] or enabled, "start": before["start"] or running or enabled}
    stop.sort(key=lambda name: (not name.endswith(".timer"), name))
    here = boot_id()
    if record and not stop and record["boot_id"] == here and record["remember"] == options["remember"]:
        return record, stop, (0, [], 0)
    new = {"boot_id": here, "time": int(time.time()), "units": known, "remember": options["remember"]}
    requests = (0, [], 0)
    if not check_mode:
        save(options["path"], new)
        timers = [name for name in stop if name.endswith(".timer")]
        if timers:
            # The canary's requests are not to be waited for, and it must not start again what is being stopped.
            systemctl("disable", "--quiet", "--now", "--", *timers, timeout=options["timeout"])
        if len(stop) > len(timers):
            requests = wait_for_requests(options["wait_for"], options["wait_timeout"])
        others = [name for name in stop if name not in timers]
        if others:
            systemctl("disable", "--quiet", "--", *others)
            stop_units(others, options["timeout"])
    return new, stop, requests


def journal(name):
    answer = call("journalctl", "--no-pager", "--quiet", "--output=short-iso", "--lines=20", f"--unit={name}")
    return answer.stdout.rstrip() or "(nothing)"


def not_up(names):
    """Those that do not run, those that have failed. Waiting for other nodes before the start is as good as running."""
    blocks = show(names)
    waiting, failed = [], []
    for name in names:
        values = blocks.get(name, {})
        state, sub = values.get("ActiveState"), values.get("SubState")
        if state == "failed" or not values:
            failed.append(name)
        elif state not in ("active", "reloading", "refreshing") and (state, sub) != ("activating", "start-pre"):
            waiting.append(name)
    return waiting, failed


def admit(record, options, check_mode):
    """The units to start."""
    needs = {name: WATCHER.sub(r"vllm@\1.service", name) for name in record["units"]}
    blocks = show(sorted({*needs, *needs.values()}))
    # An instance may have been retired while the node was drained: its unit, and what watches over it, stay away.
    there = {
        name: want
        for name, want in record["units"].items()
        if all(blocks.get(unit, {}).get("LoadState") == "loaded" for unit in (name, needs[name]))
    }
    enable = [
        name
        for name, want in there.items()
        if want["enabled"] and blocks[name].get("UnitFileState") not in ("enabled", "enabled-runtime")
    ]
    wanted = sorted(name for name, want in there.items() if want["start"])
    start = [name for name in wanted if blocks[name].get("ActiveState") not in RUNNING]
    if check_mode:
        return start
    if enable:
        systemctl("enable", "--quiet", "--", *enable)
    if start:
        # Complains of units that never failed, which does not matter.
        call("systemctl", "reset-failed", "--", *start)
        systemctl("start", "--no-block", "--", *start)
    deadline = time.monotonic() + options["timeout"]
    while wanted:
        waiting, failed = not_up(wanted)
        if failed or (waiting and time.monotonic() >= deadline):
            texts = [f"{name}, the end of its journal:\n{journal(name)}" for name in failed or waiting]
            raise DrainError(
                f"of what ran before, {', '.join(failed or waiting)} did not come up"
                + ("" if failed else f" within timeout={options['timeout']} seconds")
                + ". "
                + "\n".join(texts)
            )
        if not waiting:
            break
        time.sleep(LOOK_SECONDS)
    os.unlink(options["path"])
    return start


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["drained", "admitted", "query"], "required": True},
            "name": {"type": "str", "required": True},
            "units": {"type": "list", "elements": "str", "default": []},
            "wait_for": {"type": "list", "elements": "str", "default": []},
            "wait_timeout": {"type": "int", "default": 300},
            "timeout": {"type": "int", "default": 300},
            "remember": {"type": "dict", "default": {}},
            "directory": {"type": "path", "default": "/var/lib/ironrack-host"},
        },
        supports_check_mode=True,
    )
    options = dict(module.params)
    if not NAME.fullmatch(options["name"]):
        module.fail_json(msg=f"name={options['name']!r} is no name of a file: use letters, digits, dots and dashes")
    options["path"] = os.path.join(options["directory"], f"drained-{options['name']}.json")
    record, units, left, silent, waited = None, [], 0, [], 0
    try:
        record = load(options["path"])
        changed = False
        if options["state"] == "drained":
            new, units, (left, silent, waited) = drain(record, show(options["units"]), options, module.check_mode)
            changed, record = new is not record, new
        elif options["state"] == "admitted" and record:
            units, changed = admit(record, options, module.check_mode), True
    except DrainError as error:
        # What was written before the failure says what ran.
        kept = load(options["path"]) if record or options["state"] == "drained" else None
        module.fail_json(msg=str(error), changed=True, record=kept, units=units, cut_off=left, waited=waited)
    if left:
        module.warn(f"{left} requests were still in flight after wait_timeout={options['wait_timeout']} s: cut off")
    if silent:
        module.warn(
            f"{', '.join(silent)} did not say within wait_timeout={options['wait_timeout']} s how many requests are in"
            " flight: those that were are cut off"
        )
    result = {"changed": changed, "record": record, "units": units, "cut_off": left, "waited": waited}
    if module._diff and units:
        ran, rests = "".join(f"{name}: runs\n" for name in units), "".join(f"{name}: stopped\n" for name in units)
        drained = options["state"] == "drained"
        result["diff"] = {
            "before_header": "units",
            "after_header": "units",
            "before": ran if drained else rests,
            "after": rests if drained else ran,
        }
    module.exit_json(**result)


if __name__ == "__main__":
    main()
