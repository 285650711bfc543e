#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: units
short_description: Bring many systemd units into the wanted state in one task
version_added: 0.1.0
description:
  - Enables, disables, starts, stops and restarts systemd units, and reloads systemd's own view of them where needed.
  - >-
    A running unit is restarted when what it was started from has changed since: one of O(units[].restart_if_newer),
    its unit file, or a drop-in. The comparison is made against the start of the running unit, so a change
    whose restart was lost (a killed run) is made up for by the next run. No handler is needed.
  - >-
    The start is taken from the monotonic clock, so that a wall clock that was set after boot does not
    mislead it. A path that bears a time in the future is reported as a warning and does not cause a restart.
author:
  - The ironrack authors
options:
  units:
    description: The units. Those to start are started together; systemd orders them.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the unit, instances of templates included. V(.service) is appended to a name without a dot.
        type: str
        required: true
      state:
        description:
          - Whether it should run.
          - When not given it is left as it is, except that a running unit is restarted for O(units[].restart_if_newer).
        type: str
        choices: [started, stopped]
      enabled:
        description: Whether it should start at boot. Left alone when not given.
        type: bool
      restart_if_newer:
        description:
          - Files, folders and links the unit was started from. A running unit older than one of them is restarted.
          - Of a link the time of the link itself counts, of a folder that of its list of names.
          - A path that does not exist is ignored.
          - The unit's own unit file and drop-ins always count and need not be listed.
        type: list
        elements: str
        default: []
  no_block:
    description: Only queue the jobs, do not wait for them. Failures to start are not seen then.
    type: bool
    default: false
  timeout:
    description:
      - Seconds to wait for the jobs of all units. systemd's own limits (C(TimeoutStartSec=)) usually end them earlier.
      - When it runs out the task fails; systemd goes on with the jobs.
    type: int
    default: 600
  changed_paths:
    description:
      - >-
        Used in check mode only. Paths that earlier tasks of this run would have changed, such as
        RV(ironrack.vllm.render#module:changed_paths).
      - A running unit that was started from one of them is reported as one that would be restarted.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Reports what would be done. A unit that does not exist yet is reported as one that would be started.
    support: full
  diff_mode:
    description: Shows the state of each changed unit before and after, and why it is restarted.
    support: full
"""

EXAMPLES = r"""
- name: Run the Ray worker and the engine
  ironrack.vllm.units:
    units:
      - name: ray-worker.service
        state: started
        enabled: true
        restart_if_newer:
          - /etc/ironrack/node.env
          - /opt/ironrack/current
      - name: vllm@qwen72b.service
        state: started
        enabled: true
        restart_if_newer:
          - /etc/ironrack/node.env
          - /etc/ironrack/vllm/qwen72b.env
          - /opt/ironrack/current

- name: Retire an instance
  ironrack.vllm.units:
    units:
      - name: vllm@old.service
        state: stopped
        enabled: false
"""

RETURN = r"""
units:
  description: For each unit what was found, done, and reached.
  returned: always
  type: dict
  contains:
    actions:
      description: "What was done (in check mode: would be): C(enable), C(disable), C(start), C(stop), C(restart)."
      type: list
      elements: str
    reasons:
      description: Paths that made a restart necessary.
      type: list
      elements: str
    active_state:
      description: C(ActiveState) at the end.
      type: str
    sub_state:
      description: C(SubState) at the end.
      type: str
    enabled:
      description: C(UnitFileState) at the end.
      type: str
  sample:
    ray-worker.service:
      actions: [restart]
      reasons: [/etc/ironrack/node.env]
      active_state: active
      sub_state: running
      enabled: enabled
daemon_reloaded:
  description: Whether systemd was told to read its unit files again.
  returned: always
  type: bool
"""

import contextlib
import os
import re
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule

PROPERTIES = (
    "Id",
    "LoadState",
    "LoadError",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "FragmentPath",
    "DropInPaths",
    "NeedDaemonReload",
    "InactiveExitTimestampMonotonic",
    "Type",
    "Result",
    "ExecMainCode",
    "ExecMainStatus",
    "NRestarts",
)
# A stamp per unit that had to be reloaded: what its reload hid (a removed drop-in leaves no file with a newer time)
# still causes the restart when the run dies between reload and restart.
STAMP_DIR = "/run/ironrack-units"
# Times of files come from a coarse clock that can lag by one tick.
CLOCK_SLACK = 0.02
# More than this in the future is a wrong clock, not a tick.
FUTURE_SLACK = 5.0
RUNNING = ("active", "reloading", "refreshing", "activating")
NAME = re.compile(
    r"[A-Za-z0-9:_.\\][A-Za-z0-9:_.\\@-]*\.(service|timer|socket|target|path|mount|slice|automount|swap|device|scope)"
)


class UnitsError(Exception):
    """A problem that names the unit."""


def full_name(name):
    name = name if "." in name else name + ".service"
    if not NAME.fullmatch(name):
        raise UnitsError(f"{name!r} is not the name of a systemd unit")
    return name


def parse_show(text, count):
    """Blocks of systemctl show, one per unit asked for, in the same order."""
    blocks = [{}]
    for line in text.splitlines():
        if not line:
            blocks.append({})
            continue
        key, separator, value = line.partition("=")
        if separator:
            blocks[-1][key] = value
    blocks = [block for block in blocks if block]
    if len(blocks) != count:
        raise UnitsError(f"systemctl show answered for {len(blocks)} of {count} units")
    return blocks


def boot_clock():
    """Seconds to add to a monotonic time to get today's wall clock.

    The wall clock that systemd recorded at the start is not used: at boot it may have been wrong and set right later.
    """
    return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)


def started_at(block, offset):
    """Wall clock time at which the unit began to start, or None.

    Not the start of the main process: a file that changed while ExecStartPre ran may have been read before the change.
    """
    monotonic = int(block.get("InactiveExitTimestampMonotonic") or 0)
    return monotonic / 1e6 + offset if monotonic else None


def own_paths(name, block):
    """The unit's file and drop-ins, and the folders whose change shows that a drop-in is gone."""
    paths = []
    if block.get("FragmentPath"):
        paths.append(block["FragmentPath"])
    for path in block.get("DropInPaths", "").split():
        # systemctl set-property writes there and applies at once
        if ".control/" not in path:
            paths.append(path)
    stem, _, suffix = name.rpartition(".")
    names = [name]
    if "@" in stem:
        names.append(stem.split("@")[0] + "@." + suffix)
    for folder in ("/etc/systemd/system", "/run/systemd/system"):
        paths.extend(f"{folder}/{unit}.d" for unit in names)
    paths.append(f"{STAMP_DIR}/{name}")
    return paths


def newer_paths(paths, start, now):
    """Those of the paths changed after start, and those whose time lies in the future."""
    newer, future = [], []
    for path in dict.fromkeys(paths):
        try:
            changed = os.lstat(path).st_mtime
        except OSError:
            continue
        if changed > now + FUTURE_SLACK:
            future.append(path)
        elif changed + CLOCK_SLACK >= start:
            newer.append(path)
    return newer, future


def is_running(block):
    """Running or on its way up.  A unit on its way down is neither: it has to be stopped or started for certain."""
    return block.get("ActiveState") in RUNNING


def touched(path, changed):
    """Whether one of the changed paths is this one, or lies directly in it."""
    return any(other == path or os.path.dirname(other) == path for other in changed)


class Systemd:
    """The few calls of systemctl and journalctl that are needed."""

    def __init__(self, timeout):
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.environment = dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0", SYSTEMD_PAGER="")

    def call(self, *arguments):
        left = max(1.0, self.deadline - time.monotonic())
        try:
            return subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=left,
                check=False,
                env=self.environment,
                encoding="utf-8",
                errors="replace",
            )
        except FileNotFoundError:
            raise UnitsError(f"{arguments[0]} is not installed: this host does not run systemd") from None

    def show(self, names):
        answer = self.call("systemctl", "show", "--property", ",".join(PROPERTIES), "--", *names)
        if answer.returncode != 0:
            raise UnitsError(f"systemctl show failed: {answer.stderr.strip()}")
        blocks = parse_show(answer.stdout, len(names))
        return {name: blocks[number] for number, name in enumerate(names)}

    def must(self, *arguments):
        answer = self.call("systemctl", *arguments)
        if answer.returncode != 0:
            raise UnitsError(f"systemctl {' '.join(arguments)} failed: {answer.stderr.strip()}")

    def journal(self, name, lines=40):
        with contextlib.suppress(UnitsError, subprocess.TimeoutExpired):
            self.deadline = max(self.deadline, time.monotonic() + 10)
            answer = self.call(
                "journalctl", "--no-pager", "--quiet", "--output=short-iso", f"--lines={lines}", f"--unit={name}"
            )
            return answer.stdout.rstrip()
        return ""


class Plan:
    """What has to be done, worked out from one look at all units."""

    def __init__(self, wanted, blocks, check_mode=False, changed=()):
        self.wanted = wanted
        self.blocks = blocks
        self.actions = {name: [] for name in wanted}
        self.reasons = {name: [] for name in wanted}
        self.warnings = []
        self.offset, self.now = boot_clock(), time.time()
        self.assumed = changed if check_mode else ()
        for name, want in wanted.items():
            block = blocks[name]
            load = block.get("LoadState")
            if load == "masked" and (want["state"] == "started" or want["enabled"]):
                raise UnitsError(f"{name} is masked; run: systemctl unmask {name}")
            if load in ("bad-setting", "error") and (want["state"] == "started" or want["enabled"]):
                raise UnitsError(
                    f"{name} cannot be loaded ({load}): {block.get('LoadError', '')}; see: systemctl status {name}"
                )
            absent = load == "not-found"
            if absent and not check_mode and (want["state"] == "started" or want["enabled"]):
                raise UnitsError(f"{name} does not exist on this host: no unit file of this name was found")
            self._enabled(name, want, block, absent)
            self._state(name, want, block)

    def _enabled(self, name, want, block, absent):
        state = block.get("UnitFileState", "")
        if want["enabled"] is None or (absent and not want["enabled"]):
            return
        if want["enabled"] and state in ("static", "generated", "transient", "indirect"):
            self.warnings.append(f"{name} is {state}: without a matching [Install] section enabling it has no effect")
        elif want["enabled"] and state != "enabled":
            self.actions[name].append("enable")
        elif not want["enabled"] and state in ("enabled", "enabled-runtime"):
            self.actions[name].append("disable")

    def _state(self, name, want, block):
        running = is_running(block)
        if want["state"] == "stopped" and (running or block.get("ActiveState") == "deactivating"):
            self.actions[name].append("stop")
        if want["state"] == "stopped" or (want["state"] is None and not (running and want["restart_if_newer"])):
            return
        if not running:
            self.actions[name].append("start")
            return
        paths = want["restart_if_newer"] + own_paths(name, block)
        start = started_at(block, self.offset)
        reasons, future = newer_paths(paths, start, self.now) if start else ([], [])
        reasons += [path for path in paths if path not in reasons and touched(path, self.assumed)]
        # The stamp tells of a reload, by this run or a run that was killed after it.
        reloaded = f"{STAMP_DIR}/{name}"
        if reloaded in reasons or block.get("NeedDaemonReload") == "yes":
            reasons = [path for path in reasons if path != reloaded] or ["its unit files or drop-ins"]
        self.warnings += [
            f"{path} bears a time in the future: whether {name} is older cannot be told" for path in future
        ]
        if reasons:
            self.reasons[name] = reasons
            self.actions[name].append("restart")

    def having(self, action):
        return [name for name, actions in self.actions.items() if action in actions]

    def changed(self):
        return any(self.actions.values())


def describe(name, block, journal):
    """What to print of a unit that did not come up."""
    text = (
        f"{name} did not start: ActiveState={block.get('ActiveState')} SubState={block.get('SubState')}"
        f" Result={block.get('Result')} ExecMainCode={block.get('ExecMainCode')}"
        f" ExecMainStatus={block.get('ExecMainStatus')} NRestarts={block.get('NRestarts')}"
    )
    return text + (f"\nIts last lines in the journal:\n{journal}" if journal else "\nIt wrote nothing to the journal.")


def is_up(block, no_block):
    state = block.get("ActiveState")
    if state in ("active", "reloading", "refreshing"):
        return True
    if state == "activating":
        return no_block or block.get("SubState") != "auto-restart"
    return no_block or (state == "inactive" and block.get("Type") == "oneshot" and block.get("Result") == "success")


def stamp(names):
    os.makedirs(STAMP_DIR, mode=0o755, exist_ok=True)
    for name in names:
        with open(os.path.join(STAMP_DIR, name), "w", encoding="utf-8"):
            pass
        os.utime(os.path.join(STAMP_DIR, name))


def reload_if_needed(systemd, wanted, blocks):
    """Reload systemd when its view of a unit is old; returns the new view and whether that was done."""
    stale = [name for name, block in blocks.items() if block.get("NeedDaemonReload") == "yes"]
    unknown = [
        name
        for name, block in blocks.items()
        if block.get("LoadState") in ("not-found", "bad-setting", "error")
        and (wanted[name]["state"] == "started" or wanted[name]["enabled"])
    ]
    if not stale and not unknown:
        return blocks, False
    stamp([name for name in stale if is_running(blocks[name])])
    systemd.must("daemon-reload")
    return systemd.show(list(wanted)), True


def run_jobs(systemd, plan, no_block):
    flags = ["--no-block"] if no_block else []
    stop, disable, enable = plan.having("stop"), plan.having("disable"), plan.having("enable")
    if stop:
        systemd.must(*flags, "stop", "--", *stop)
    if disable:
        systemd.must("disable", "--quiet", "--", *disable)
    if enable:
        systemd.must("enable", "--quiet", "--", *enable)
    restart, start = plan.having("restart"), plan.having("start")
    # A unit still on its way up (a run before this one was killed while it waited) is waited for as well.
    rising = [
        name
        for name, want in plan.wanted.items()
        if want["state"] == "started" and name not in restart and plan.blocks[name].get("ActiveState") == "activating"
    ]
    if start or restart:
        # Clears an exhausted start limit; units that never failed make it complain, which does not matter.
        systemd.call("systemctl", "reset-failed", "--", *start, *restart)
    problems = []
    for verb, names in (("restart", restart), ("start", start + rising)):
        if names:
            answer = systemd.call("systemctl", *flags, verb, "--", *names)
            if answer.returncode != 0:
                problems.append(answer.stderr.strip())
    return problems


def diff_sides(plan, after=None):
    before_text, after_text = [], []
    for name in plan.wanted:
        actions = plan.actions[name]
        if not actions:
            continue
        block = plan.blocks[name]
        old_state, old_enabled = block.get("ActiveState"), block.get("UnitFileState") or "no unit file"
        new_state = {"start": "active", "restart": "active", "stop": "inactive"}
        reached = next((new_state[action] for action in actions if action in new_state), old_state)
        new_enabled = "enabled" if "enable" in actions else "disabled" if "disable" in actions else old_enabled
        if after:
            reached, new_enabled = after[name].get("ActiveState"), after[name].get("UnitFileState") or new_enabled
        why = f", restarted for {', '.join(plan.reasons[name])}" if plan.reasons[name] else ""
        before_text.append(f"{name}: {old_state}, {old_enabled}\n")
        after_text.append(f"{name}: {reached}, {new_enabled}{why}\n")
    return {
        "before_header": "units",
        "after_header": "units",
        "before": "".join(before_text),
        "after": "".join(after_text),
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "units": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "state": {"type": "str", "choices": ["started", "stopped"]},
                    "enabled": {"type": "bool"},
                    "restart_if_newer": {"type": "list", "elements": "str", "default": []},
                },
            },
            "no_block": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 600},
            "changed_paths": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    if not module.params["units"]:
        module.exit_json(changed=False, units={}, daemon_reloaded=False)
    no_block = module.params["no_block"]
    systemd = Systemd(module.params["timeout"])
    plan, reloaded = None, False
    try:
        wanted = {}
        for unit in module.params["units"]:
            name = full_name(unit["name"])
            if name in wanted:
                raise UnitsError(f"{name} is listed twice")
            wanted[name] = unit
        before = after = systemd.show(list(wanted))
        if not module.check_mode:
            before, reloaded = reload_if_needed(systemd, wanted, before)
        plan = Plan(wanted, before, module.check_mode, module.params["changed_paths"])
        after = before
        if not module.check_mode:
            problems = run_jobs(systemd, plan, no_block)
            if problems or plan.changed():
                after = systemd.show(list(wanted))
            failed = [
                name
                for name, want in wanted.items()
                if (want["state"] == "started" or "restart" in plan.actions[name]) and not is_up(after[name], no_block)
            ]
            if failed:
                raise UnitsError("\n\n".join(describe(name, after[name], systemd.journal(name)) for name in failed))
            if problems:
                raise UnitsError("\n".join(problems))
    except UnitsError as error:
        module.fail_json(msg=str(error), changed=reloaded or bool(plan and plan.changed()), daemon_reloaded=reloaded)
    except subprocess.TimeoutExpired as error:
        waiting = [name for name in (plan.wanted if plan else {}) if name in error.cmd]
        tails = "\n\n".join(f"{name}:\n{systemd.journal(name)}" for name in waiting)
        module.fail_json(
            msg=f"No end of {' '.join(error.cmd)} within timeout={systemd.timeout} seconds; systemd goes on with it."
            f" Last lines in the journal of\n{tails}",
            changed=reloaded or bool(plan and plan.changed()),
            daemon_reloaded=reloaded,
        )
    for warning in plan.warnings:
        module.warn(warning)
    result = {
        "changed": plan.changed(),
        "daemon_reloaded": reloaded,
        "units": {
            name: {
                "actions": plan.actions[name],
                "reasons": plan.reasons[name],
                "active_state": after[name].get("ActiveState", ""),
                "sub_state": after[name].get("SubState", ""),
                "enabled": after[name].get("UnitFileState", ""),
            }
            for name in wanted
        },
    }
    if module._diff and plan.changed():
        result["diff"] = diff_sides(plan, None if module.check_mode else after)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
