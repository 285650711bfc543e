#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: base_state
short_description: Look at what role base has to know of a host before it decides
version_added: 0.1.0
description:
  - Tells which service keeps the clock, whether this host may set it, and whether cloud-init writes C(/etc/hosts).
  - Reads only, in a real run and in check mode alike.
author:
  - The ironrack authors
options:
  root:
    description: Folder to look below in place of the root folder; C(systemctl) is not asked then.
    type: str
    default: ""
attributes:
  check_mode:
    description: Reads only, so it does the same.
    support: full
"""

EXAMPLES = r"""
- name: Look at the host
  ironrack.vllm.base_state:
  register: found
"""

RETURN = r"""
state:
  description: What was found.
  returned: always
  type: dict
  contains:
    time_services:
      description: Units that run and keep the clock, or serve the time.
      type: list
      elements: str
    time_ours:
      description: Whether chrony has, or still runs with, settings that role base wrote.
      type: bool
    may_set_clock:
      description: Whether root may set the clock here. In most containers it may not.
      type: bool
    hosts_written_by:
      description: File that makes cloud-init write C(/etc/hosts) at each boot; empty where it does not.
      type: str
    hosts_in_user_data:
      description: Whether that file comes with the machine's user data, which local settings cannot overrule.
      type: bool
  sample:
    time_services: [systemd-timesyncd.service]
    time_ours: false
    may_set_clock: true
    hosts_written_by: ""
    hosts_in_user_data: false
"""

import glob
import os
import re
import subprocess

from ansible.module_utils.basic import AnsibleModule

# Of a unit that keeps time, a name; helpers like chrony-wait end by themselves and are no longer running.
TIME_UNITS = re.compile(
    r"(chronyd?|ntpd?|ntpsec|openntpd|ntpd-rs|systemd-timesyncd|timemaster|phc2sys(@.*)?|ptp4l(@.*)?)\.service"
)
OWN_SETTINGS = "/etc/chrony/ironrack.conf"
OWN_CLOUD_FILE = "99-ironrack-hosts.cfg"
# linux/capability.h
CAP_SYS_TIME = 25
# What the machine brings with it, in the order in which cloud-init lets one overrule the other.
USER_DATA = ("vendor-cloud-config.txt", "vendor2-cloud-config.txt", "cloud-config.txt")


class StateError(Exception):
    """A question that the host does not answer."""


def read(path, default=""):
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return default


def parse_running(text):
    """Names of the time services in a listing of running units."""
    names = [line.split()[0] for line in text.splitlines() if line.split()]
    return sorted(name for name in names if TIME_UNITS.fullmatch(name))


def running_services():
    command = ["systemctl", "list-units", "--type=service", "--state=running", "--no-legend", "--plain", "--no-pager"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
            env=dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0"),
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        raise StateError("systemctl is not installed: this host does not run systemd") from None
    except subprocess.TimeoutExpired:
        raise StateError("systemctl list-units gave no answer within 60 s") from None
    if done.returncode:
        raise StateError(f"systemctl list-units failed: {done.stderr.strip()}")
    return parse_running(done.stdout)


def runs_with_own_settings(root):
    """A daemon that was started with our settings, which a killed run may have removed since."""
    for path in glob.glob(f"{root}/proc/[0-9]*/cmdline"):
        words = read(path).split("\0")
        if os.path.basename(words[0]) == "chronyd" and OWN_SETTINGS in words:
            return True
    return False


def may_set_clock(root):
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", read(f"{root}/proc/self/status"), re.MULTILINE)
    return bool(found and int(found.group(1), 16) >> CAP_SYS_TIME & 1)


def setting(text):
    """The last value of manage_etc_hosts at the top level of a cloud-config, or None.

    A line is looked for instead of YAML being read: Python on the host need not have a reader of YAML.
    """
    found = re.findall(r"^manage_etc_hosts:[ \t]*['\"]?([A-Za-z]+)", text, re.MULTILINE)
    return found[-1].lower() if found else None


def hosts_writer(root):
    """(file, whether it is user data) of what makes cloud-init write the hosts file, our own answer left aside."""
    cloud = f"{root}/etc/cloud"
    if not os.path.isdir(cloud):
        return "", False
    local = [f"{cloud}/cloud.cfg", *sorted(glob.glob(f"{cloud}/cloud.cfg.d/*.cfg"))]
    brought = [f"{root}/var/lib/cloud/instance/{name}" for name in USER_DATA]
    writer, from_user_data = "", False
    for path in local + brought:
        value = None if os.path.basename(path) == OWN_CLOUD_FILE else setting(read(path))
        if value is not None:
            writer = "" if value in ("false", "no", "off") else path
            from_user_data = bool(writer) and path in brought
    return writer, from_user_data


def look(root):
    writer, from_user_data = hosts_writer(root)
    return {
        "time_services": [] if root else running_services(),
        "time_ours": os.path.lexists(root + OWN_SETTINGS) or runs_with_own_settings(root),
        "may_set_clock": may_set_clock(root),
        "hosts_written_by": writer,
        "hosts_in_user_data": from_user_data,
    }


def main():
    module = AnsibleModule(argument_spec={"root": {"type": "str", "default": ""}}, supports_check_mode=True)
    try:
        state = look(module.params["root"].rstrip("/"))
    except StateError as error:
        module.fail_json(msg=str(error))
    if state["hosts_in_user_data"]:
        module.warn(
            f"{state['hosts_written_by']} makes cloud-init write /etc/hosts at each boot, and settings on the host"
            " cannot overrule it: set manage_etc_hosts to false in the user data of this machine"
        )
    module.exit_json(changed=False, state=state)


if __name__ == "__main__":
    main()
