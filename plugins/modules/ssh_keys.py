#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: ssh_keys
short_description: Pin a node's host keys, and see to the keys of its users
version_added: 0.1.0
description:
  - >-
    Reads the public host keys of the node over the connection that is open, and pins them on the controller in
    O(known_hosts). Another key than the pinned one is an error, before anything on the node is changed.
  - >-
    Puts O(authorized_keys) into C(~/.ssh/authorized_keys) of the user that Ansible logs in as. Where a key is taken
    away by that, a fresh SSH connection has to come through afterwards. Otherwise the node takes the old file back by
    itself.
  - >-
    With O(between), a user of the node gets a key pair, whose private part never leaves the node. Without it, what an
    earlier run has made for such a user is removed.
  - Files are written as the user they belong to, so that no link in a home can lead elsewhere.
author:
  - The ironrack authors
options:
  known_hosts:
    description:
      - The file of pinned host keys, on the controller.
      - A file C(node_keys) beside it holds the public keys of O(between) on each node.
    type: path
    required: true
  address:
    description: The node's address on the cluster network.
    type: str
    default: ""
  accept_changed:
    description: Take a changed host key.
    type: bool
    default: false
  fingerprint:
    description: Fingerprint that one of the host keys must have, as in V(SHA256:...).
    type: str
    default: ""
  authorized_keys:
    description: Public keys that may log in as the user that Ansible logs in as.
    type: list
    elements: str
    default: []
  exclusive:
    description: Remove every other key of that user.
    type: bool
    default: false
  between:
    description: The user that logs in from node to node. Empty removes what was made for one.
    type: str
    default: ""
  nodes:
    description:
      - The nodes of the plan. When given, the node is told of the others, as far as this module has seen them before.
      - Only this is done then.
    type: dict
  scan:
    description:
      - Open no connection, but ask the host for its keys, and pin the one that has O(fingerprint).
      - Only this is done then.
      - A key that was asked for like this proves nothing by itself. The fingerprint, which came another way, does.
    type: bool
    default: false
  seconds:
    description: Seconds after which unconfirmed changes are taken back.
    type: int
    default: 60
  user:
    description: Set by the action plugin; the user that Ansible logs in as.
    type: str
    default: ""
  peers:
    description: Set by the action plugin; what the node is told of the others.
    type: dict
  guard:
    description: Set by the action plugin; who makes the change (C(by)), or which change is confirmed (C(token)).
    type: dict
    default: {}
  step:
    description: Set by the action plugin; the part of its work that is done by this call.
    type: str
    choices: [apply, peers, confirm, status]
    default: apply
attributes:
  check_mode:
    description: Reports what would change. Keys that do not exist yet are not known then.
    support: full
  diff_mode:
    description: Shows the files before and after.
    support: full
"""

EXAMPLES = r"""
- name: Pin the host keys
  ironrack.vllm.ssh_keys:
    known_hosts: "{{ inventory_dir }}/.ironrack/known_hosts"
    authorized_keys:
      - ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEXAMPLEEXAMPLEEXAMPLEEXAMPLEEXAMPLEEXAMPLE admin

- name: Let the nodes log in to each other
  ironrack.vllm.ssh_keys:
    known_hosts: "{{ inventory_dir }}/.ironrack/known_hosts"
    between: ironrack-mpi
    nodes: "{{ ironrack_plan.nodes }}"
"""

RETURN = r"""
fingerprints:
  description: Fingerprints of the node's host keys.
  returned: without O(nodes)
  type: list
  elements: str
between_key:
  description: Public key of the user that logs in from node to node.
  returned: with O(between), once it exists
  type: str
missing:
  description: Nodes that have not been seen yet, so that they are not reached.
  returned: with O(nodes)
  type: list
  elements: str
"""

import json
import os
import pwd
import re
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils.files import read, remove, write
from ansible_collections.ironrack.vllm.plugins.module_utils.guard import LASTING, UNITS, Guard, GuardError

ROOT = "/"
OWN = "ssh_authorized_keys"
PEERS = "ssh_between_nodes"
KEY_NAME = "id_ironrack"
KEY_TYPE = re.compile(r"(?:ssh-|ecdsa-|sk-)\S+")


class KeysError(Exception):
    """The message says what to do."""


def lines_of(text):
    """Lines as sshd sees them: splitlines() would cut at a form feed or U+2028 too."""
    return text[: -1 if text.endswith("\n") else None].split("\n") if text else []


def block(text, name, lines):
    """The text with the lines between two marks of ours; without lines, without the marks."""
    begin, end = f"# BEGIN ironrack: {name}", f"# END ironrack: {name}"
    new = [begin, *lines, end] if lines else []
    result, inside, placed = [], False, False
    for line in lines_of(text):
        if line == begin:
            inside = True
            result += [] if placed else new
            placed = True
        elif line == end and inside:
            inside = False
        elif not inside:
            result.append(line)
    if not placed:
        result += new
    return "".join(line + "\n" for line in result)


def inside_blocks(text):
    """The lines that are ours, by the name of their block."""
    found, name = {}, None
    for line in lines_of(text):
        if line.startswith("# BEGIN ironrack: "):
            name = line[len("# BEGIN ironrack: ") :]
        elif line.startswith("# END ironrack: "):
            name = None
        elif name:
            found.setdefault(name, []).append(line)
    return found


def blob(line):
    """The key itself in a line of authorized_keys, whatever its options and comment."""
    words = line.split()
    for number, kind in enumerate(words[:-1]):
        if KEY_TYPE.fullmatch(kind):
            return words[number + 1]
    return ""


def blobs(text):
    return {blob(line) for line in lines_of(text) if not line.lstrip().startswith("#")} - {""}


def authorized(text, wanted, exclusive):
    """authorized_keys of the login user with the wanted keys."""
    if exclusive:
        peers = inside_blocks(text).get(PEERS, [])
        return block(block("", OWN, wanted), PEERS, peers)
    others = blobs(block(text, OWN, []))
    # A key that somebody else has put there is there.
    return block(text, OWN, [line for line in wanted if blob(line) not in others])


class Account:
    """A user of the node, and the files below its home, handled as that user: root must follow no link of theirs."""

    def __init__(self, name, root):
        self.name = name
        try:
            self.entry = pwd.getpwnam(name)
        except KeyError:
            self.entry = None
        home = self.entry.pw_dir if self.entry else os.path.join("/var/lib", name)
        self.home = os.path.join(root, home.lstrip("/")) if root != "/" else home
        self.ssh = os.path.join(self.home, ".ssh")
        self.file = os.path.join(self.ssh, "authorized_keys")
        self.key = os.path.join(self.ssh, KEY_NAME)

    def run(self, function, *arguments):
        """What the function returns, run in a process of that user's."""
        if self.entry is None or self.entry.pw_uid == os.geteuid():
            return function(*arguments)
        receive, send = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.initgroups(self.name, self.entry.pw_gid)
                os.setgid(self.entry.pw_gid)
                os.setuid(self.entry.pw_uid)
                answer = {"value": function(*arguments)}
                code = 0
            except OSError as error:
                answer = {"error": f"{error.filename}: {error.strerror}"}
            except KeysError as error:
                answer = {"error": str(error)}
            with os.fdopen(send, "w") as stream:
                json.dump(answer, stream)
            os._exit(code)
        os.close(send)
        with os.fdopen(receive) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        if not text:
            raise KeysError(f"{self.name}: its files cannot be handled as that user")
        answer = json.loads(text)
        if "error" in answer:
            raise KeysError(f"as user {self.name}: {answer['error']}")
        return answer["value"]

    def authorized(self):
        return self.run(read, self.file)

    def authorize(self, text):
        """Write authorized_keys, or remove it where nothing is left in it."""
        if not text:
            self.run(remove, self.file)
            return
        if not os.path.isdir(self.ssh):
            self.run(os.mkdir, self.ssh, 0o700)
        self.run(write, self.file, text, 0o600)

    def public(self):
        return self.run(read, self.key + ".pub").strip()


class Node:
    """Where things are."""

    def __init__(self, module, root):
        self.root = root
        units = os.path.join(root, UNITS) if os.path.isdir(os.path.join(root, "run/systemd/system")) else None
        folder, by = os.path.join(root, LASTING), module.params["guard"].get("by", "")
        self.guard = Guard("keys", module.params["seconds"], folder, by, units)
        self.client = os.path.join(root, "etc/ssh/ssh_config.d/10-ironrack.conf")
        self.known_hosts = os.path.join(root, "etc/ssh/ssh_known_hosts")

    def account(self, name):
        return Account(name, self.root)

    def between(self):
        """The user for whom an earlier run has made a key."""
        found = re.search(r"how (\S+) reaches", read(self.client))
        return found.group(1) if found else ""


class Changes:
    """What is to be written, collected before the first of it is."""

    def __init__(self):
        self.names = []
        self.before = []
        self.after = []
        self.actions = []

    def file(self, path, before, after, action):
        if before != after:
            self.names.append(path)
            self.before.append(f"# {path}\n{before}")
            self.after.append(f"# {path}\n{after}")
            self.actions.append(action)

    def other(self, what, action):
        self.names.append(what)
        self.after.append(f"{what}\n")
        self.actions.append(action)

    def make(self):
        for action in self.actions:
            action()

    def result(self, module):
        result = {"changed": bool(self.names)}
        if module._diff and self.names:
            name = ", ".join(self.names)
            result["diff"] = {
                "before_header": name,
                "after_header": name,
                "before": "".join(self.before),
                "after": "".join(self.after),
            }
        return result


def must(*command):
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise KeysError(f"{' '.join(command)}: {done.stdout.decode(errors='replace').strip()}")


def make_user(name):
    # Without a password, which is not the same as locked: sshd without PAM lets nobody in who is locked.
    home = os.path.join("/var/lib", name)
    must("useradd", "--system", "--create-home", "--home-dir", home, "--shell", "/bin/bash", "--password", "*", name)


def make_key(account):
    # Not the account from before: the user may have been made since.
    account = Account(account.name, ROOT)
    if not os.path.isdir(account.ssh):
        account.run(os.mkdir, account.ssh, 0o700)
    # A file without its other half is what an interrupted run leaves.
    for path in (account.key, account.key + ".pub"):
        account.run(remove, path)
    account.run(
        must, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{account.name}@{os.uname()[1]}", "-f", account.key
    )


def revoke(node, changes, name):
    """Plan the removal of all that lets a user log in from node to node."""
    account = node.account(name)
    if account.entry:
        before = account.authorized()
        after = block(before, PEERS, [])
        changes.file(account.file, before, after, lambda: account.authorize(after))
        for path in (account.key, account.key + ".pub"):
            if account.run(os.path.lexists, path):
                changes.other(f"{path} is removed", lambda path=path: account.run(remove, path))


def plan_between(node, changes, wanted):
    """Plan the key pair of the user that logs in from node to node, or that it has none."""
    had = node.between()
    if had and had != wanted:
        revoke(node, changes, had)
    if not wanted:
        before = read(node.known_hosts)
        after = block(before, PEERS, [])
        finish = (lambda: write(node.known_hosts, after, 0o644)) if after else (lambda: remove(node.known_hosts))
        changes.file(node.known_hosts, before, after, finish)
        # The last step: by this file the user is known.
        changes.file(node.client, read(node.client), "", lambda: remove(node.client))
        return
    if had != wanted:
        text = f"# Managed by ironrack: how {wanted} reaches the other nodes.\n"
        changes.file(node.client, read(node.client), text, lambda: write(node.client, text, 0o644))
    account = node.account(wanted)
    if account.entry is None:
        changes.other(f"user {wanted} is made", lambda: make_user(wanted))
    if account.entry is None or not account.run(os.path.isfile, account.key) or not account.public():
        changes.other(f"{account.key} is made", lambda: make_key(account))


def apply(module, node):
    parameters = module.params
    changes = Changes()
    if not module.check_mode:
        # A run that was interrupted: its keys were never confirmed.
        node.guard.clear()
    plan_between(node, changes, parameters["between"])
    account = node.account(parameters["user"])
    if account.entry is None:
        raise KeysError(f"{parameters['user']}: this user, as which Ansible logs in, is not known to the system")
    before = account.authorized()
    # What is planned for the file already is not in it yet.
    if parameters["between"] != parameters["user"] and node.between() == parameters["user"]:
        base = block(before, PEERS, [])
    else:
        base = before
    after = authorized(base, parameters["authorized_keys"], parameters["exclusive"])
    taken = blobs(base) - blobs(after)
    if after != base:
        changes.file(account.file, before, after, lambda: account.authorize(after))
    result = changes.result(module)
    if not module.check_mode:
        if taken:
            node.guard.arm(files=[account.file])
            result["guard"] = node.guard.told()
        try:
            changes.make()
        except (KeysError, OSError):
            node.guard.revert()
            raise
    if parameters["between"]:
        account = node.account(parameters["between"])
        result["between_key"] = account.public() if account.entry else ""
    return result


def tell(module, node):
    """Let in the users of the other nodes, and know their host keys."""
    peers, changes = module.params["peers"], Changes()
    account = node.account(module.params["between"])
    before = account.authorized() if account.entry else ""
    after = block(before, PEERS, peers["authorized_keys"])
    if before != after:
        changes.file(account.file, before, after, lambda: account.authorize(after))
    known = read(node.known_hosts)
    new = block(known, PEERS, peers["known_hosts"])
    changes.file(node.known_hosts, known, new, lambda: write(node.known_hosts, new, 0o644))
    client = peers["client_config"]
    changes.file(node.client, read(node.client), client, lambda: write(node.client, client, 0o644))
    if not module.check_mode:
        changes.make()
    return changes.result(module)


def main():
    module = AnsibleModule(
        argument_spec={
            "known_hosts": {"type": "path", "required": True},
            "address": {"type": "str", "default": ""},
            "accept_changed": {"type": "bool", "default": False},
            "fingerprint": {"type": "str", "default": ""},
            # Public keys, whatever the names sound like.
            "authorized_keys": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "exclusive": {"type": "bool", "default": False},
            "between": {"type": "str", "default": ""},
            "nodes": {"type": "dict"},
            "scan": {"type": "bool", "default": False},
            "seconds": {"type": "int", "default": 60},
            "user": {"type": "str", "default": ""},
            "peers": {"type": "dict"},
            "guard": {"type": "dict", "default": {}},
            "step": {"type": "str", "choices": ["apply", "peers", "confirm", "status"], "default": "apply"},
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
        elif module.params["step"] == "peers":
            result = tell(module, node)
        else:
            result = apply(module, node)
    except (KeysError, GuardError) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
