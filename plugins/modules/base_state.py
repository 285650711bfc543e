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
  - Tells whether the site's mirror, where there is one, can be read from here and is whole.
  - Reads only, in a real run and in check mode alike.
author:
  - The ironrack authors
options:
  root:
    description: Folder to look below in place of the root folder; C(systemctl) is not asked then.
    type: str
    default: ""
  mirror:
    description: >-
      Value of C(ironrack_mirror). Of a folder every file of its list is looked for; of a server those of this host's
      distribution are asked for.
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
    distribution:
      description: C(id), C(version) and C(codename) of the distribution.
      type: dict
    apt_mirror:
      description: Whether apt has settings for the site's mirror.
      type: bool
    apt_lists_old:
      description: Whether those settings are newer than apt's lists of packages.
      type: bool
    mirror_problems:
      description: What is wrong with the mirror, in sentences that name the file and the remedy.
      type: list
      elements: str
  sample:
    time_services: [systemd-timesyncd.service]
    time_ours: false
    may_set_clock: true
    hosts_written_by: ""
    hosts_in_user_data: false
    distribution: {id: debian, version: "12", codename: bookworm}
    apt_mirror: false
    apt_lists_old: false
    mirror_problems: []
"""

import concurrent.futures
import glob
import json
import os
import re
import subprocess
import urllib.error

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

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
APT_SETTINGS = "/etc/apt/apt.conf.d/95ironrack-mirror"
APT_LISTS = "/var/lib/apt/lists"
# Written last by `make artifacts`: a folder with it was complete once.
MIRROR_LIST = "artifacts.json"
ASKED_AT_ONCE = 8
SHOWN = 3


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


def distribution(root):
    found = dict(
        line.split("=", 1) for line in read(f"{root}/etc/os-release").splitlines() if re.match(r"[A-Z_]+=", line)
    )
    names = {"id": "ID", "version": "VERSION_ID", "codename": "VERSION_CODENAME"}
    return {key: found.get(name, "").strip("\"'") for key, name in names.items()}


def newer(path, than):
    """Whether a file changed after another, or that one is not there."""
    try:
        return os.stat(path).st_mtime > os.stat(than).st_mtime
    except OSError:
        return os.path.exists(path)


def ask(url, method="HEAD"):
    # Never by a proxy: the mirror is the site's.
    return open_url(url, method=method, timeout=30, use_proxy=False, http_agent="ironrack")


def unreachable(url):
    """Why nothing can be fetched there, or an empty text."""
    try:
        ask(url).close()
    except (urllib.error.URLError, OSError) as error:
        return f"{url} ({error})"
    return ""


def mirror_problems(mirror, host):
    """What is wrong with the mirror, as far as it shows from here without reading every byte."""
    if not mirror:
        return []
    base = mirror.rstrip("/")
    on_disk = base.startswith("/")
    makes = f"`make artifacts DOWNLOAD={base if on_disk else '<folder>'}` makes it"
    said = f"ironrack_mirror is {mirror}"
    try:
        if on_disk:
            with open(f"{base}/{MIRROR_LIST}", encoding="utf-8") as handle:
                text = handle.read()
        else:
            with ask(f"{base}/{MIRROR_LIST}", "GET") as answer:
                text = answer.read().decode("utf-8", "replace")
        listed = [item for item in json.loads(text)["artifacts"] if item["file"]]
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        where = "on this host" if on_disk else "from this host"
        return [f"{said}: {MIRROR_LIST} cannot be read there {where} ({error}); {makes}"]
    label = "{id} {version}".format(**host)
    own = [item for item in listed if item["kind"].startswith("apt") and label in item["wanted_by"].split(", ")]
    if not own:
        found = sorted({item["wanted_by"] for item in listed if item["kind"] == "apt"})
        return [f"{said}: it has no packages for {label}, only for {', '.join(found) or 'nothing'}; {makes}"]
    if on_disk:
        lost = [item["file"] for item in listed if not fits(f"{base}/{item['file']}", item["size"])]
    else:
        with concurrent.futures.ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            lost = [told for told in pool.map(unreachable, [f"{base}/{item['file']}" for item in own]) if told]
    if not lost:
        return []
    more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    return [f"{said}: missing there, or of another size, are {', '.join(lost[:SHOWN])}{more}; {makes}"]


def fits(path, size):
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def look(root, mirror=""):
    writer, from_user_data = hosts_writer(root)
    host = distribution(root)
    return {
        "time_services": [] if root else running_services(),
        "time_ours": os.path.lexists(root + OWN_SETTINGS) or runs_with_own_settings(root),
        "may_set_clock": may_set_clock(root),
        "hosts_written_by": writer,
        "hosts_in_user_data": from_user_data,
        "distribution": host,
        "apt_mirror": os.path.lexists(root + APT_SETTINGS),
        "apt_lists_old": newer(root + APT_SETTINGS, root + APT_LISTS),
        "mirror_problems": mirror_problems(mirror, host),
    }


def main():
    module = AnsibleModule(
        argument_spec={"root": {"type": "str", "default": ""}, "mirror": {"type": "str", "default": ""}},
        supports_check_mode=True,
    )
    try:
        state = look(module.params["root"].rstrip("/"), module.params["mirror"])
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
