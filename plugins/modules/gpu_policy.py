#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_policy
short_description: Bring modes and limits of all GPUs of a host into the declared state
version_added: 0.1.0
description:
  - Reads C(nvidia-smi -q -x), compares every GPU with what is declared, and sets what differs.
  - >-
    Everything is checked against what the GPUs themselves say they can do (range of the power limit, clocks, ECC, MIG)
    before anything is changed. All problems are told at once.
  - Never resets a GPU. What takes effect only after a reset or reboot is set, and told in RV(reboot_reasons).
  - >-
    Changes that programs would feel (MIG mode, a closed compute mode) are refused for GPUs in use; the error says by
    whom.
  - Where the driver does not answer, because none is loaded yet, nothing is done and RV(deferred) says why.
author:
  - The ironrack authors
options:
  persistence:
    description: Whether the driver stays initialised while no program uses the GPU.
    type: bool
  ecc:
    description: Whether memory errors are corrected. Takes effect with a reboot; see RV(reboot_reasons).
    type: bool
  mig:
    description:
      - Whether the GPU is to be split into instances.
      - >-
        The driver itself may reinitialise an idle GPU for it; where that is not enough, it takes effect with a reboot.
    type: bool
  power_limit_watts:
    description: Watts that the GPU may take, or V(default) for the one it comes with.
    type: str
  graphics_clocks_mhz:
    description:
      - Lowest and highest clock in MHz, as in V(1200,1980), or V(default).
      - >-
        Only checked here. No query tells whether clocks are locked, so the service that locks them at boot does it at
        other times as well.
    type: str
  memory_clocks_mhz:
    description: Like O(graphics_clocks_mhz), for the clock of the memory.
    type: str
  compute_mode:
    description: How many programs may use a GPU at the same time.
    type: str
    choices: [default, exclusive_process, prohibited]
  variable:
    description: Where the settings come from, to be named in messages; a dictionary with the names of the options.
    type: str
    default: ""
  nvidia_smi:
    description: The program. Looked up in the usual folders when it is a bare name.
    type: str
    default: nvidia-smi
  timeout:
    description: Seconds after which one call of it is given up.
    type: int
    default: 60
attributes:
  check_mode:
    description: Reports what would be set, and every problem.
    support: full
  diff_mode:
    description: Shows each setting that differs before and after.
    support: full
"""

EXAMPLES = r"""
- name: Keep the GPUs initialised and at 600 W
  ironrack.vllm.gpu_policy:
    persistence: true
    ecc: true
    mig: false
    power_limit_watts: "600"
"""

RETURN = r"""
changes:
  description: What was (in check mode would be) set, GPU by GPU.
  returned: always
  type: list
  elements: dict
  contains:
    gpu:
      description: Its number.
      type: int
    setting:
      description: Name of the option.
      type: str
    before:
      description: What it was.
      type: str
    after:
      description: What was asked for.
      type: str
reboot_reasons:
  description: What is set and takes effect with the next reboot.
  returned: always
  type: list
  elements: str
  sample: ["GPU 0, 1: ECC is off and set to be on"]
deferred:
  description: Why nothing could be read and set; empty when it could.
  returned: always
  type: str
"""

import glob
import os
import pwd
import re
import shutil
import xml.etree.ElementTree

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils.program import call, smi_log

# Answers of a host whose driver is not loaded, not yet the new one, or has no GPU.
NO_DRIVER = re.compile(
    r"couldn't communicate with the NVIDIA driver|[Dd]river/library version mismatch|[Dd]river [Nn]ot [Ll]oaded"
    r"|No devices were found"
)
# Part of the driver and its watchers; names as the kernel cuts them.
DAEMONS = ("nvidia-persiste", "nv-fabricmanage", "nvidia-imex", "nv-hostengine", "dcgm-exporter", "nvidia-smi")
FLAGS = {"persistence": "-pm", "ecc": "-e", "mig": "-mig", "power_limit_watts": "-pl", "compute_mode": "-c"}
# Order of setting: what follows holds only in persistence mode.
ORDER = tuple(FLAGS)
TITLES = {"ecc": "ECC", "mig": "MIG mode"}
CLOCKS = {"graphics_clocks_mhz": "graphics_clock", "memory_clocks_mhz": "mem_clock"}


class PolicyError(Exception):
    """What is wrong, one sentence a line."""


class NoDriver(Exception):
    """Nothing to ask."""


def word(text):
    """What nvidia-smi tells, or None for its ways to say nothing."""
    text = (text or "").strip()
    return None if text in ("", "N/A", "[N/A]", "Not Supported") or text.startswith("Requested func") else text


def on_off(text):
    return {"Enabled": True, "Disabled": False}.get(text)


def quantity(text):
    found = re.match(r"\d+(\.\d+)?", text or "")
    return float(found.group()) if found else None


def show(value):
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return "unknown" if value is None else str(value)


def parse(text):
    """nvidia-smi -q -x: of each GPU what this module sets, and what it can be set to."""
    try:
        root = xml.etree.ElementTree.fromstring(smi_log(text))  # noqa: S314 - written by the host's own nvidia-smi
    except xml.etree.ElementTree.ParseError as error:
        raise PolicyError(f"nvidia-smi -q -x wrote no XML ({error}); run it by hand on the host") from None
    gpus = []
    for item in root.iter("gpu"):

        def tell(path, item=item):
            return word(item.findtext(path))

        power = "gpu_power_readings" if item.find("gpu_power_readings") is not None else "power_readings"
        gpus.append(
            {
                "index": len(gpus),
                "id": item.get("id", ""),
                "name": tell("product_name") or "GPU",
                "minor": tell("minor_number"),
                "persistence": on_off(tell("persistence_mode")),
                "ecc": on_off(tell("ecc_mode/current_ecc")),
                "ecc_pending": on_off(tell("ecc_mode/pending_ecc")),
                "mig": on_off(tell("mig_mode/current_mig")),
                "mig_pending": on_off(tell("mig_mode/pending_mig")),
                "compute_mode": (tell("compute_mode") or "").lower() or None,
                # The current limit is lower where something else (the board, the rack) limits as well.
                "power_limit_watts": quantity(
                    tell(f"{power}/requested_power_limit")
                    or tell(f"{power}/power_limit")
                    or tell(f"{power}/current_power_limit")
                ),
                "power_default": quantity(tell(f"{power}/default_power_limit")),
                "power_min": quantity(tell(f"{power}/min_power_limit")),
                "power_max": quantity(tell(f"{power}/max_power_limit")),
                "graphics_clock": quantity(tell("max_clocks/graphics_clock")),
                "mem_clock": quantity(tell("max_clocks/mem_clock")),
                "memory_clocks": sorted(
                    {
                        int(quantity(entry.findtext("value")))
                        for entry in item.findall("supported_clocks/supported_mem_clock")
                        if quantity(entry.findtext("value"))
                    }
                ),
                "processes": [
                    {"pid": word(entry.findtext("pid")), "name": word(entry.findtext("process_name"))}
                    for entry in item.findall("processes/process_info")
                ],
            }
        )
    return gpus


def owner(root, pid):
    """User and systemd unit of a process: whom to ask."""
    try:
        user = pwd.getpwuid(os.stat(f"{root}/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        user = "an unknown user"
    try:
        with open(f"{root}/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as handle:
            units = re.findall(r"/([^/\n]+\.service)", handle.read())
    except OSError:
        units = []
    return f"user {user}" + (f", {units[-1]}" if units else "")


def users(gpu, root=""):
    """Who uses a GPU: what nvidia-smi lists, and whoever else has its device open."""
    found = {}
    for process in gpu["processes"]:
        name = os.path.basename((process["name"] or "?").split(" ")[0])
        found[process["pid"]] = name
    for path in glob.glob(f"{root}/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(path) != f"/dev/nvidia{gpu['minor']}":
                continue
            pid = path.split("/")[-3]
            with open(f"{root}/proc/{pid}/comm", encoding="utf-8", errors="replace") as handle:
                name = handle.read().strip()
        except OSError:
            continue
        if name not in DAEMONS:
            found.setdefault(pid, name)
    return [f"pid {pid} {name} ({owner(root, pid)})" for pid, name in found.items()]


def wanted_power(gpu, value, problems):
    """The limit in watts for one GPU, or None with a problem."""
    where = f"power_limit_watts is {value}: GPU {gpu['index']} ({gpu['name']})"
    if gpu["power_limit_watts"] is None or gpu["power_default"] is None:
        problems.append(f"{where} has no power limit to set; leave it out")
        return None
    if value == "default":
        return gpu["power_default"]
    low, high = gpu["power_min"], gpu["power_max"]
    if low is not None and high is not None and not low <= float(value) <= high:
        problems.append(f"{where} takes {low:g} to {high:g} W; set it in this range")
        return None
    return float(value)


def check_clocks(gpu, option, value, problems):
    where = f"{option} is {value}: GPU {gpu['index']} ({gpu['name']})"
    low, high = map(int, value.split(","))
    top = gpu[CLOCKS[option]]
    if top is None:
        problems.append(f"{where} does not tell its clocks; leave it out")
    elif high > top:
        problems.append(f"{where} has at most {top:g} MHz; give a lower one")
    elif option == "memory_clocks_mhz" and gpu["memory_clocks"]:
        possible = gpu["memory_clocks"]
        if not any(low <= clock <= high for clock in possible):
            problems.append(f"{where} has memory clocks of {', '.join(map(str, possible))} MHz; give one of them")


def compare(gpu, wanted, problems, root=""):
    """The changes for one GPU; what it cannot do goes to problems."""
    where = f"GPU {gpu['index']} ({gpu['name']})"
    changes = []

    def differs(setting, now, target):
        if now != target:
            changes.append({"gpu": gpu["index"], "id": gpu["id"], "setting": setting, "now": now, "target": target})
            return True
        return False

    if wanted.get("persistence") is not None:
        differs("persistence", gpu["persistence"], wanted["persistence"])
    for setting in ("ecc", "mig"):
        target = wanted.get(setting)
        if target is None:
            continue
        if gpu[setting] is None:
            # A GPU without the feature has it off.
            if target:
                problems.append(f"{setting} is true: {where} has no {TITLES[setting]}; leave it out")
            continue
        # What is pending is set already.
        if differs(setting, gpu[f"{setting}_pending"], target) and setting == "mig":
            refuse_in_use(gpu, f"{setting} is {str(target).lower()}", problems, root)
    if wanted.get("power_limit_watts"):
        target = wanted_power(gpu, wanted["power_limit_watts"], problems)
        if target is not None:
            differs("power_limit_watts", gpu["power_limit_watts"], target)
    mode = wanted.get("compute_mode")
    if mode and differs("compute_mode", gpu["compute_mode"], mode) and mode != "default":
        refuse_in_use(gpu, f"compute_mode is {mode}", problems, root)
    for option in CLOCKS:
        if wanted.get(option) and wanted[option] != "default":
            check_clocks(gpu, option, wanted[option], problems)
    return changes


def refuse_in_use(gpu, what, problems, root):
    who = users(gpu, root)
    if who:
        problems.append(
            f"{what}: GPU {gpu['index']} ({gpu['name']}) would change under {'; '.join(who)}; drain the node first"
        )


def argument(setting, target):
    if isinstance(target, bool):
        return str(int(target))
    return f"{target:g}" if isinstance(target, float) else target.upper()


def commands(changes):
    """Arguments of nvidia-smi, one command for all GPUs that get the same."""
    groups = {}
    for setting in ORDER:
        for change in changes:
            if change["setting"] == setting:
                groups.setdefault((setting, argument(setting, change["target"])), []).append(change["id"])
    return [["-i", ",".join(ids), FLAGS[setting], value] for (setting, value), ids in groups.items()]


def pending(gpus):
    """What waits for a reboot."""
    reasons = []
    for setting, title in TITLES.items():
        for now in (True, False):
            waiting = [
                gpu["index"]
                for gpu in gpus
                if gpu[setting] is now and gpu[f"{setting}_pending"] not in (None, gpu[setting])
            ]
            if waiting:
                reasons.append(
                    f"GPU {', '.join(map(str, waiting))}: {title} is {show(now)} and set to be {show(not now)}"
                )
    return reasons


def not_taken(changes, gpus):
    """Settings that are refused with a message alone, and exit status 0."""
    after = {gpu["id"]: gpu for gpu in gpus}
    problems = []
    for change in changes:
        # Of those that wait for a reboot, what is pending counts.
        setting = f"{change['setting']}_pending" if change["setting"] in TITLES else change["setting"]
        now = after[change["id"]][setting] if change["id"] in after else None
        if now != change["target"]:
            problems.append(
                f"GPU {change['gpu']}: {change['setting']} was set to {show(change['target'])} and is {show(now)}"
                f" afterwards; set it by hand (nvidia-smi {' '.join(commands([change])[0])}) and read what it answers"
            )
    return problems


class Smi:
    def __init__(self, program, timeout):
        self.program = shutil.which(program)
        self.name, self.timeout = program, timeout

    def ask(self, *arguments):
        status, output, errors = call([self.program, *arguments], self.timeout)
        if status is None:
            raise PolicyError(
                f"nvidia-smi {' '.join(arguments)} {errors} (timeout={self.timeout}): a GPU or the driver hangs; look"
                " for Xid lines in the kernel log (journalctl -k -g NVRM), drain the node and reboot it"
            )
        # nvidia-smi tells its errors on standard output.
        return status, f"{output}\n{errors}" if status else output

    def gpus(self):
        if self.program is None:
            raise NoDriver(f"{self.name} is not installed")
        status, text = self.ask("-q", "-x")
        if status and NO_DRIVER.search(text):
            raise NoDriver(" ".join(text.split()))
        if status:
            raise PolicyError(f"nvidia-smi -q -x failed (exit status {status}): {' '.join(text.split())}")
        gpus = parse(text)
        if not gpus:
            raise NoDriver("nvidia-smi lists no GPU")
        return gpus

    def set(self, arguments):
        status, text = self.ask(*arguments)
        if status:
            raise PolicyError(f"nvidia-smi {' '.join(arguments)} failed (exit status {status}): {text.strip()}")


def check_form(wanted):
    """What the types of the options cannot say."""
    watts = wanted.get("power_limit_watts")
    if watts and watts != "default" and not re.fullmatch(r"[1-9]\d{0,4}", watts):
        raise PolicyError(f"power_limit_watts is {watts!r}: give whole watts, or default")
    for option in CLOCKS:
        value = wanted.get(option)
        if not value or value == "default":
            continue
        found = re.fullmatch(r"([1-9]\d{0,4}),([1-9]\d{0,4})", value)
        if not found or int(found.group(1)) > int(found.group(2)):
            raise PolicyError(f"{option} is {value!r}: give the lowest and the highest clock, as in 1200,1980")


def named(text, variable):
    """Each line that begins with the name of an option, with the variable that holds it."""
    if not variable:
        return text
    options = "|".join((*ORDER, *CLOCKS))
    return re.sub(rf"(?m)^(?=({options}) is )", f"{variable}.", text)


def main():
    switch = {"type": "bool"}
    module = AnsibleModule(
        argument_spec={
            "persistence": switch,
            "ecc": switch,
            "mig": switch,
            "power_limit_watts": {"type": "str"},
            "graphics_clocks_mhz": {"type": "str"},
            "memory_clocks_mhz": {"type": "str"},
            "compute_mode": {"type": "str", "choices": ["default", "exclusive_process", "prohibited"]},
            "variable": {"type": "str", "default": ""},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    smi = Smi(wanted["nvidia_smi"], wanted["timeout"])
    done = []
    try:
        check_form(wanted)
        gpus = smi.gpus()
        problems, changes = [], []
        for gpu in gpus:
            changes += compare(gpu, wanted, problems)
        if problems:
            raise PolicyError("\n".join(problems))
        if not module.check_mode:
            for arguments in commands(changes):
                smi.set(arguments)
                done.append(arguments)
            if changes:
                gpus = smi.gpus()
                problems = not_taken(changes, gpus)
                if problems:
                    raise PolicyError("\n".join(problems))
    except NoDriver as reason:
        module.exit_json(changed=False, changes=[], reboot_reasons=[], deferred=str(reason))
    except PolicyError as error:
        module.fail_json(msg=named(str(error), wanted["variable"]), changed=bool(done))
    told = [
        {
            "gpu": change["gpu"],
            "setting": change["setting"],
            "before": show(change["now"]),
            "after": show(change["target"]),
        }
        for change in changes
    ]
    result = {"changed": bool(changes), "changes": told, "reboot_reasons": pending(gpus), "deferred": ""}
    if module._diff and told:
        result["diff"] = {
            "before_header": "GPUs",
            "after_header": "GPUs",
            "before": "".join(f"GPU {row['gpu']} {row['setting']}: {row['before']}\n" for row in told),
            "after": "".join(f"GPU {row['gpu']} {row['setting']}: {row['after']}\n" for row in told),
        }
    module.exit_json(**result)


if __name__ == "__main__":
    main()
