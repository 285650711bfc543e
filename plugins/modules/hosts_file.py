#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: hosts_file
short_description: Give the nodes of the cluster their addresses in /etc/hosts
version_added: 0.1.0
description:
  - >-
    Keeps one marked block of entries at the head of the file, where it wins over other lines, and leaves the rest
    of the file as it is.
  - >-
    Takes this host's own names off loopback addresses, where installers put them (C(127.0.1.1) on Debian and Ubuntu):
    software that looks up its own name there tells the other nodes to connect to themselves. The names move to this
    host's entry. C(localhost) stays.
  - Writes atomically, and only when something changes. Where the file is a link, what it leads to is written.
author:
  - The ironrack authors
options:
  entries:
    description: The nodes.
    type: list
    elements: dict
    required: true
    suboptions:
      address:
        description: IP address of the node on the cluster's network.
        type: str
        required: true
      names:
        description: Names of the node, the one that reverse lookups give first.
        type: list
        elements: str
        required: true
  hostname:
    description:
      - The name in O(entries) that stands for this host.
      - When it is not among them, loopback addresses are left as they are.
    type: str
    required: true
  path:
    description: The file.
    type: str
    default: /etc/hosts
attributes:
  check_mode:
    description: Reports what would change.
    support: full
  diff_mode:
    description: Shows the file before and after.
    support: full
"""

EXAMPLES = r"""
- name: Let the nodes find each other by name
  ironrack.vllm.hosts_file:
    hostname: "{{ inventory_hostname }}"
    entries:
      - {address: 10.77.1.11, names: [n1]}
      - {address: 10.77.1.12, names: [n2]}
"""

RETURN = r"""
conflicts:
  description: Lines outside of the block that give one of the names another address.
  returned: always
  type: list
  elements: str
  sample: ["192.168.1.5 n2"]
"""

import ipaddress
import os
import socket
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule

BEGIN = "# BEGIN ironrack: addresses of the cluster's nodes (managed, changes in here are lost)"
END = "# END ironrack"


TMP_PREFIX = ".hosts.ironrack-new-"


def split_line(line):
    """A line of the file -> (address, names), or None for what is no entry."""
    words = line.partition("#")[0].split()
    return (words[0], words[1:]) if len(words) > 1 else None


def is_head(line):
    return line.startswith("# BEGIN ironrack")


def split_block(text):
    """Lines outside of our block, and lines inside.  Marks without a partner are dropped, the lines at them kept."""
    rest, block, inside = [], [], None
    # splitlines() would cut at a form feed or U+2028 too.
    for line in text.removesuffix("\n").split("\n") if text else []:
        if is_head(line):
            rest += inside or []  # the block before had no end
            inside = []
        elif line.rstrip() == END:
            block += inside or []
            inside = None
        elif inside is not None:
            inside.append(line)
        else:
            rest.append(line)
    return rest + (inside or []), block


def own_names(hostname, kernel_name, names):
    """Those of the names that mean this host: equal to a known one, or a long form of it."""
    known = {hostname.lower(), hostname.lower().split(".")[0], kernel_name.lower(), kernel_name.lower().split(".")[0]}
    mine = [name for name in names if name.lower() in known or name.lower().split(".")[0] in known]
    return [name for name in mine if not is_localhost(name)]


def is_localhost(name):
    """Whether a name means whoever asks; that of a host that was never given a name is one, localhost.localdomain."""
    return name.lower().split(".")[0] in ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")


def edit(text, entries, hostname, kernel_name):
    """The new text of the file, and the lines that contradict it."""
    rest, block = split_block(text)
    mine = next((entry for entry in entries if hostname in entry["names"]), None)
    moved, kept = [], []
    for line in rest:
        found = split_line(line)
        if mine is None or found is None or not is_loopback(found[0]):
            kept.append(line)
            continue
        taken = own_names(hostname, kernel_name, found[1])
        moved += taken
        left = [name for name in found[1] if name not in taken]
        if not taken:
            kept.append(line)
        elif left:
            kept.append(f"{found[0]}\t{' '.join(left)}")
    if mine is not None:
        # What was moved before stands in the block now, and has to stay: nothing else resolves it.
        for line in block:
            found = split_line(line)
            if found and hostname in found[1]:
                moved += own_names(hostname, kernel_name, found[1])
    others = {name for entry in entries if entry is not mine for name in entry["names"]}

    def usable(name):
        return name not in others and not is_localhost(name)

    lines = [BEGIN]
    for entry in entries:
        names = entry["names"]
        if entry is mine:
            # The first name is the host's full one (hostname -f), so what a line began with stays in front.
            before, after = ([name for name in part if usable(name)] for part in (moved, [kernel_name]))
            names = [*before, *names, *after]
        lines.append(f"{entry['address']}\t{' '.join(dict.fromkeys(names))}")
    lines.append(END)
    new = (lines if entries else []) + kept
    return "\n".join(new) + "\n" if new else "", conflicts(kept, entries)


def conflicts(lines, entries):
    wanted = {name: entry["address"] for entry in entries for name in entry["names"]}
    found = []
    for line in lines:
        parts = split_line(line)
        for name in parts[1] if parts else []:
            if name in wanted and not same(parts[0], wanted[name]):
                found.append(" ".join([parts[0], *parts[1]]))
                break
    return found


def is_loopback(address):
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def same(one, other):
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        return one == other


def check(entries):
    """A text that says what is wrong, or None."""
    seen = {}
    for entry in entries:
        try:
            ipaddress.ip_address(entry["address"])
        except ValueError:
            return f"{entry['address']!r} is not an IP address"
        if not entry["names"]:
            return f"{entry['address']} has no names"
        for name in entry["names"]:
            if not name or any(char.isspace() or char == "#" for char in name):
                return f"{name!r} is not a host name"
            if seen.setdefault(name, entry["address"]) != entry["address"]:
                return f"{name} is given two addresses, {seen[name]} and {entry['address']}"
    return None


def remove_leftovers(folder):
    """What a run that was killed while it wrote has left; no run takes minutes to write."""
    for name in os.listdir(folder):
        stale = os.path.join(folder, name)
        if name.startswith(TMP_PREFIX) and time.time() - os.lstat(stale).st_mtime > 300:
            os.unlink(stale)


def write(module, path, text):
    remove_leftovers(os.path.dirname(path))
    handle, fresh = tempfile.mkstemp(prefix=TMP_PREFIX, dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(handle, 0o644)
            os.fsync(handle)
        # Inside a container the file may be a bind mount, which cannot be replaced; it is rewritten in place then.
        module.atomic_move(fresh, path, unsafe_writes=True)
    finally:
        if os.path.exists(fresh):
            os.unlink(fresh)


def main():
    module = AnsibleModule(
        argument_spec={
            "entries": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "address": {"type": "str", "required": True},
                    "names": {"type": "list", "elements": "str", "required": True},
                },
            },
            "hostname": {"type": "str", "required": True},
            "path": {"type": "str", "default": "/etc/hosts"},
        },
        supports_check_mode=True,
    )
    # A link stays one: what it leads to is the file.
    path, entries = os.path.realpath(module.params["path"]), module.params["entries"]
    wrong = check(entries)
    if wrong:
        module.fail_json(msg=f"entries: {wrong}")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as handle:
            old = handle.read()
    except FileNotFoundError:
        old = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    except OSError as error:
        module.fail_json(msg=f"{path}: {error.strerror}")
    new, contradicting = edit(old, entries, module.params["hostname"], socket.gethostname())
    for line in contradicting:
        module.warn(f"{path} also holds '{line}', which contradicts the cluster's addresses; remove it")
    changed = new != old or not os.path.exists(path)
    if changed and not module.check_mode:
        try:
            write(module, path, new)
        except OSError as error:
            module.fail_json(
                msg=f"{path}: cannot be written ({error.strerror}) -> make the file and its folder writable for root;"
                " where an image provides it read-only, put the nodes' addresses into that image"
            )
    result = {"changed": changed, "conflicts": contradicting}
    if module._diff:
        result["diff"] = {"before_header": path, "after_header": path, "before": old, "after": new}
    module.exit_json(**result)


if __name__ == "__main__":
    main()
