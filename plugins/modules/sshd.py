#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: sshd
short_description: Harden a node's sshd without locking anybody out
version_added: 0.1.0
description:
  - Keeps C(/etc/ssh/sshd_config.d/10-ironrack.conf). In sshd the first value of a keyword is the one that counts.
  - >-
    Before a change a roll-back is armed on the node. sshd reads the new settings without ending any connection. Then a
    fresh SSH connection is opened, over which alone they can be confirmed. When it does not come through in time, the
    node takes the old settings back by itself and the task fails.
  - Afterwards sshd itself is asked what counts (C(sshd -T)). A setting that another file overrides is an error.
  - >-
    Logging in by password is switched off only where Ansible itself gets in without one. Where the present connection
    is not one of SSH it is left as it is.
author:
  - The ironrack authors
options:
  settings:
    description: The variables of the role C(ssh) without their prefix. With C(mode) V(off) in them the file is removed.
    type: dict
    required: true
  seconds:
    description: Seconds after which unconfirmed settings are taken back.
    type: int
    default: 60
  text:
    description: Set by the action plugin; the file. Empty removes it.
    type: str
    default: ""
  connection:
    description: Set by the action plugin; user and addresses of the present connection.
    type: dict
    default: {}
  guard:
    description: Set by the action plugin; who makes the change (C(by)), or which change is confirmed (C(token)).
    type: dict
    default: {}
  step:
    description: Set by the action plugin; the part of its work that is done by this call.
    type: str
    choices: [apply, confirm, status]
    default: apply
attributes:
  check_mode:
    description: Reports what would change. The text is checked by sshd.
    support: full
  diff_mode:
    description: Shows the file before and after.
    support: full
"""

EXAMPLES = r"""
- name: Harden sshd
  ironrack.vllm.sshd:
    settings:
      mode: hardened
      settings: {MaxAuthTries: 4}
      allow_users: [ops]
"""

RETURN = r"""
notes:
  description: What else sshd has been told, such as blocks for single users that ask for less.
  returned: always
  type: list
  elements: str
"""

import glob
import os
import re
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils.files import read, write
from ansible_collections.ironrack.vllm.plugins.module_utils.guard import LASTING, UNITS, Guard, GuardError

ROOT = "/"
UNIT = "ssh.service"
SOCKET = "ssh.socket"
# Of these all files together count, and more of them does no harm.
ADDED_UP = {"acceptenv", "denyusers", "denygroups"}


class SshdError(Exception):
    """The message says what to do."""


def parse(text):
    """What `sshd -T` prints: the values of each keyword."""
    found = {}
    for line in text.splitlines():
        keyword, _, value = line.strip().partition(" ")
        found.setdefault(keyword.lower(), []).append(value)
    return found


def keywords(text):
    """The keywords that a file sets outside of blocks, with the number of the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.replace("=", " ", 1).split()
        if not words or words[0].startswith("#"):
            continue
        if words[0].lower() == "match":
            break
        found.append((words[0].lower(), number))
    return found


class Node:
    """Where things are."""

    def __init__(self, module, root):
        self.sshd = module.get_bin_path("sshd", opt_dirs=["/usr/sbin", "/sbin"])
        self.config = os.path.join(root, "etc/ssh/sshd_config")
        self.dropin = os.path.join(root, "etc/ssh/sshd_config.d/10-ironrack.conf")
        self.runtime = os.path.join(root, "run/sshd")
        self.pid_file = os.path.join(root, "run/sshd.pid")
        self.systemd = os.path.isdir(os.path.join(root, "run/systemd/system"))
        units = os.path.join(root, UNITS) if self.systemd else None
        folder, by = os.path.join(root, LASTING), module.params["guard"].get("by", "")
        self.guard = Guard("sshd", module.params["seconds"], folder, by, units)

    def run(self, *command):
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout, done.stderr.strip()

    def ask(self, *options):
        """Run sshd to check or print settings."""
        # Of a sshd that waits behind a socket, only its first connection makes it.
        os.makedirs(self.runtime, mode=0o755, exist_ok=True)
        code, out, error = self.run(self.sshd, *options)
        if code:
            raise SshdError(error or out.strip() or f"sshd {' '.join(options)} failed")
        return out

    def reload_command(self, back=False):
        """What makes sshd read its settings, and, for the way back, brings it up again where it has died of them."""
        if not self.systemd:
            return ["sh", "-c", f'[ ! -e {self.pid_file} ] || kill -HUP "$(cat {self.pid_file})"']
        if self.active(SOCKET):
            # On a reload sshd forgets that its port came from the socket, and dies of finding it taken. A restart ends
            # no connection. Where sshd does not run, the next connection starts it.
            return ["systemctl", "try-restart", UNIT]
        return ["systemctl", "reload-or-restart" if back and self.active(UNIT) else "try-reload-or-restart", UNIT]

    def active(self, unit):
        return self.run("systemctl", "is-active", "--quiet", unit)[0] == 0

    def values(self, *options):
        return parse(self.ask("-T", "-f", self.config, *options))

    def differences(self, text, have):
        """Keywords of the text that sshd sees otherwise: (keyword, what it sees, what is wanted)."""
        with tempfile.NamedTemporaryFile("w", suffix=".conf", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            wanted = parse(self.ask("-T", "-f", stream.name))
        found = []
        for name in sorted({name for name, _ in keywords(text)} & set(wanted)):
            seen, asked = set(have.get(name, [])), set(wanted[name])
            if not (asked <= seen if name in ADDED_UP else asked == seen):
                found.append((name, ", ".join(have.get(name, ["(nothing)"])), ", ".join(wanted[name])))
        return found

    def places(self, name):
        """Where else a keyword is set."""
        folder = os.path.dirname(self.dropin)
        files = [path for path in sorted(glob.glob(os.path.join(folder, "*.conf"))) if path != self.dropin]
        return [
            f"{path}, line {number}"
            for path in [*files, self.config]
            for found, number in keywords(read(path))
            if found == name
        ]

    def overridden(self, text):
        """Whether anything comes before the file of ours; said as an error."""
        problems = []
        found = self.differences(text, self.values())
        for name, have, wanted in found:
            places = self.places(name)
            where = f" is set in {' and in '.join(places)}" if places else " is set elsewhere"
            problems.append(f"{name}:{where}, which gives {have} instead of {wanted}")
        if not problems:
            return
        if "/sshd_config.d/" not in "".join(re.findall(r"(?im)^\s*include\s+.*$", read(self.config))):
            raise SshdError(
                f"{self.config} does not read sshd_config.d -> put the line Include /etc/ssh/sshd_config.d/*.conf at"
                " its top, as Debian and Ubuntu have it, or set ssh_mode: off"
            )
        raise SshdError(
            f"what sshd takes first counts, and that is not {self.dropin}: {'; '.join(problems)} -> remove it there, or"
            " say the same in ssh_settings"
        )

    def exceptions(self, text, connection):
        """Blocks that ask for something else for root or the present user: worth a word, and their owner's business."""
        if not connection.get("client"):
            return []
        notes = []
        for user in dict.fromkeys(["root", connection["user"]]):
            client, server = connection["client"], connection["server"]
            test = f"user={user},host={client},addr={client},laddr={server},lport={connection['port']}"
            for name, have, wanted in self.differences(text, self.values("-C", test)):
                notes.append(f"a Match block makes {name} {have} instead of {wanted} for {user} from {client}")
        return notes


def try_text(node, text):
    """What sshd says of the text before it is anywhere."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        try:
            node.ask("-t", "-f", stream.name)
        except SshdError as error:
            said = str(error).replace(stream.name, "10-ironrack.conf")
            raise SshdError(f"sshd does not accept the settings, nothing was changed: {said} -> ssh_settings") from None


def apply(module, node):
    text = module.params["text"]
    result = {"changed": False, "notes": []}
    if not module.check_mode:
        # A run that was interrupted: its settings were never confirmed.
        node.guard.clear()
    before = read(node.dropin)
    if not node.sshd:
        if text:
            result["notes"] = ["there is no sshd on this host, so there is nothing to harden"]
        return result
    result["changed"] = before != text
    # A check makes nothing, not even the folder without which sshd gives no answer.
    silent = module.check_mode and not os.path.isdir(node.runtime)
    if text and result["changed"] and not silent:
        try_text(node, text)
    if result["changed"] and not module.check_mode:
        node.guard.arm(files=[node.dropin], commands=[node.reload_command(back=True)])
        try:
            if text:
                write(node.dropin, text)
                node.overridden(text)
            else:
                os.unlink(node.dropin)
            node.ask("-t", "-f", node.config)
            code, out, error = node.run(*node.reload_command())
            if code:
                raise SshdError(f"sshd cannot be reloaded: {error or out.strip()}")
        except (SshdError, OSError):
            node.guard.revert()
            raise
        result["guard"] = node.guard.told()
    elif text and not result["changed"] and not silent:
        node.overridden(text)
    if text and not silent and not (result["changed"] and module.check_mode):
        result["notes"] = node.exceptions(text, module.params["connection"])
    if module._diff and result["changed"]:
        result["diff"] = {"before_header": node.dropin, "after_header": node.dropin, "before": before, "after": text}
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "required": True},
            "seconds": {"type": "int", "default": 60},
            "text": {"type": "str", "default": ""},
            "connection": {"type": "dict", "default": {}},
            "guard": {"type": "dict", "default": {}},
            "step": {"type": "str", "choices": ["apply", "confirm", "status"], "default": "apply"},
        },
        supports_check_mode=True,
    )
    node = Node(module, ROOT)
    try:
        if module.params["step"] == "status":
            result = {"changed": False, "state": node.guard.state(module.params["guard"].get("token"))}
        elif module.params["step"] == "confirm":
            confirmed = node.guard.confirm(module.params["guard"].get("token"))
            result = {"changed": confirmed, "confirmed": confirmed}
        else:
            result = apply(module, node)
            for note in result["notes"] if result["changed"] else []:
                module.warn(note)
    except (SshdError, GuardError) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
