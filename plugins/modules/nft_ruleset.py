#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: nft_ruleset
short_description: Put a node's firewall in force without locking anybody out
version_added: 0.1.0
description:
  - Replaces the nftables table C(inet ironrack) in one step, and leaves every other table alone.
  - >-
    Before that a roll-back is armed on the node. Then a fresh SSH connection is opened: only over it can the new rules
    be confirmed. When it does not come through in time, the node takes the old rules back by itself and the task fails.
  - >-
    What is confirmed is kept in C(/etc/ironrack/firewall.nft), which C(ironrack-firewall.service) loads at boot before
    the network is up. C(nftables.service), whose start and reload remove every table, loads it again afterwards.
  - Whoever is connected at the moment is let in by SSH as well.
author:
  - The ironrack authors
options:
  rules:
    description:
      - The rules, from the filter P(ironrack.vllm.firewall_rules#filter).
      - With C(mode) V(off) in them, everything of this firewall is removed from the node.
    type: dict
    required: true
  foreign:
    description:
      - What to do where another firewall (ufw, firewalld, a table of somebody else) filters incoming packets too.
        A packet then has to please both.
      - V(refuse) fails before anything is changed, V(keep) warns.
    type: str
    choices: [refuse, keep]
    default: refuse
  seconds:
    description: Seconds after which unconfirmed rules are taken back.
    type: int
    default: 60
  ruleset:
    description: Set by the action plugin; the rules as text for nft. Empty removes the firewall.
    type: str
    default: ""
  kernel:
    description: Set by the action plugin; kernel settings that go with the rules.
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
    description: Reports what would change. The text is checked by nft where the node has it.
    support: full
  diff_mode:
    description: Shows the rules before and after.
    support: full
"""

EXAMPLES = r"""
- name: Let in what the plan asks for
  ironrack.vllm.nft_ruleset:
    rules: "{{ __firewall_rules }}"
"""

RETURN = r"""
admin_networks:
  description: Who may open SSH connections, whoever is connected now included.
  returned: when the firewall is on
  type: list
  elements: str
notes:
  description: What else on the node has to do with its firewall.
  returned: always
  type: list
  elements: str
"""

import contextlib
import json
import os
import re
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils.files import remove, write
from ansible_collections.ironrack.vllm.plugins.module_utils.guard import Guard, GuardError

ROOT = "/"
TABLE = ("inet", "ironrack")
UNIT = "ironrack-firewall.service"
RESERVED = "net.ipv4.ip_local_reserved_ports"
# Connections that are open before the first rules: the kernel does not know them, and would take the next packet that
# comes in for a new connection. It watches for some seconds before anything is dropped.
WATCH_SECONDS = 3
WATCH = """\
table inet ironrack {
    chain input {
        type filter hook input priority filter; policy accept;
        ct state established,related accept
    }
}
"""
UNIT_TEXT = """\
# Managed by ironrack: the firewall's table, in force before the network is.
[Unit]
Description=Firewall of ironrack
DefaultDependencies=no
Wants=network-pre.target
Before=network-pre.target shutdown.target
Conflicts=shutdown.target
After=local-fs.target systemd-sysctl.service nftables.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={nft} -f {rules}
ExecReload={nft} -f {rules}

[Install]
WantedBy=sysinit.target
"""
# The elements of a set that packets write into.
LATELY = r"(set \S+ \{[^{}]*\bflags [a-z,]*\bdynamic\b[^{}]*?)\n\s*elements = \{[^}]*\}"
# Parts of a rule that do not ask what the packet is. What iptables alone knows is told by its name.
WITHOUT_CONDITION = {"counter", "log", "accept", "drop", "reject", "return", "jump", "goto", "xt"}
# A failure of ours must not stop theirs, which would remove every table once more.
DROP_IN_TEXT = """\
# Managed by ironrack: the start and the reload of nftables begin with the removal of every table.
[Service]
ExecStartPost=-{nft} -f {rules}
ExecReload=-{nft} -f {rules}
"""


class RulesetError(Exception):
    """The message says what to do."""


class Node:
    """Where things are."""

    def __init__(self, module, root):
        self.nft = module.get_bin_path("nft", opt_dirs=["/usr/sbin", "/sbin"])
        self.rules = os.path.join(root, "etc/ironrack/firewall.nft")
        # How nft lists the table that it made of the rules: another listing later means that somebody changed it.
        self.listing = os.path.join(root, "etc/ironrack/firewall.listing")
        self.unit = os.path.join(root, "etc/systemd/system", UNIT)
        self.drop_in = os.path.join(root, "etc/systemd/system/nftables.service.d/60-ironrack.conf")
        self.kernel = os.path.join(root, "etc/sysctl.d/61-ironrack-firewall.conf")
        # Kernel settings as they were before the first change, to go back to: {name: value}.
        self.kernel_before = os.path.join(root, "etc/ironrack/firewall.kernel")
        self.before = os.path.join(root, "run/ironrack/firewall.before")
        self.ufw = os.path.join(root, "etc/ufw/ufw.conf")
        self.legacy = os.path.join(root, "proc/net/ip_tables_names")
        self.proc_sys = os.path.join(root, "proc/sys")
        self.systemd = os.path.isdir(os.path.join(root, "run/systemd/system"))
        folder, by = os.path.join(root, "run/ironrack/guard"), module.params["guard"].get("by", "")
        self.guard = Guard("firewall", module.params["seconds"], folder, by)

    def setting(self, name):
        """The file of a kernel setting."""
        return os.path.join(self.proc_sys, *name.split("."))

    def run(self, *command):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr.strip()

    def must(self, *command):
        code, out, error = self.run(*command)
        if code:
            raise RulesetError(f"{' '.join(command)}: {error or out.strip() or 'failed'}")
        return out

    def load(self, text, *options):
        """Hand a text to nft; with --check it only reads it."""
        command = [self.nft, *options, "-f", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RulesetError(f"nft does not accept the rules, nothing was changed: {done.stderr.strip()}")

    def table(self):
        """The table in force, as text without counters; nothing where there is none.

        Who sent echo requests lately is no part of the rules.
        """
        code, out, _ = self.run(self.nft, "--stateless", "list", "table", *TABLE)
        return re.sub(LATELY, r"\1", out) if code == 0 else ""

    def present(self):
        """Addresses that the table in force lets in since somebody was connected from there."""
        found = re.findall(r"set present_[46] \{[^}]*elements = \{([^}]*)\}", self.table())
        return sorted(word.strip() for part in found for word in part.split(",") if word.strip())

    def others(self):
        """Chains of everybody else, and their rules: {(family, table, chain): [expressions]}."""
        code, out, error = self.run(self.nft, "--json", "--stateless", "--terse", "list", "ruleset")
        if code:
            raise RulesetError(
                f"nft list ruleset: {error}. This kernel has no nf_tables, or it may not be used here: load the module"
                " nf_tables, or set firewall_mode: off"
            )
        items = json.loads(out)["nftables"]
        found = [item["chain"] for item in items if "chain" in item]
        rules = {}
        for rule in (item["rule"] for item in items if "rule" in item):
            rules.setdefault((rule["family"], rule["table"], rule["chain"]), []).append(rule.get("expr") or [])
        return [chain for chain in found if (chain["family"], chain["table"]) != TABLE], rules

    def foreign(self):
        """Firewalls of others that may drop what this one lets in, and what else is worth a word."""
        chains, rules = self.others()
        others, notes = [], []
        if "ENABLED=yes" in read(self.ufw).replace(" ", ""):
            others.append("ufw is enabled (ufw disable switches it off)")
        if self.systemd and self.run("systemctl", "is-active", "--quiet", "firewalld.service")[0] == 0:
            others.append("firewalld is active (systemctl disable --now firewalld switches it off)")
        if not others:
            others += sorted(
                {
                    f"chain {chain['name']} of the table {chain['family']} {chain['table']} drops incoming packets"
                    f" (nft delete table {chain['family']} {chain['table']} removes it)"
                    for chain in chains
                    if chain.get("hook") in ("input", "prerouting", "ingress")
                    and end_of(chain, rules, chain.get("policy")) == "drop"
                }
            )
        if any(chain["name"].startswith("DOCKER") for chain in chains):
            notes.append(
                "Docker has chains of its own, which are kept: ports that containers publish are forwarded past this"
                " firewall, so publish them on 127.0.0.1; containers reach the host itself only through"
                " firewall_trusted_interfaces: [docker0]"
            )
        if read(self.legacy).strip():
            notes.append(
                "rules of iptables-legacy are in force beside nftables; this firewall does not see what they drop"
                " (iptables-legacy -S shows them)"
            )
        return others, notes


def end_of(chain, rules, policy, seen=()):
    """What becomes of a packet that no condition of a chain fits: "accept", "drop", or `policy` where nothing says."""
    own = (chain["family"], chain["table"], chain["name"])
    for expressions in rules.get(own, []) if own not in seen else []:
        kinds = {kind: value for expression in expressions for kind, value in expression.items()}
        if not set(kinds) <= WITHOUT_CONDITION:
            continue
        target = (kinds.get("xt") or {}).get("name")
        if "drop" in kinds or "reject" in kinds or target in ("DROP", "REJECT"):
            return "drop"
        if "accept" in kinds:
            return "accept"
        if "return" in kinds:
            break
        for way in ("jump", "goto"):
            if way in kinds:
                there = end_of({**chain, "name": kinds[way]["target"]}, rules, None, (*seen, own))
                if there or way == "goto":
                    return there or policy
    return policy


def read(path):
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read()
    except OSError:
        return ""


def together(*lists):
    """Lists of ports as the kernel writes them, as in 4000,5000-5010, as one."""
    pairs = []
    for part in ",".join(lists).split(","):
        if part.strip():
            low, _, high = part.strip().partition("-")
            pairs.append((int(low), int(high or low)))
    found = []
    for low, high in sorted(pairs):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


class Ruleset:
    """What is wanted, and what of it is there."""

    def __init__(self, node, text, kernel):
        self.node = node
        self.text = text
        self.kernel = dict(kernel)
        if RESERVED in kernel:
            # What the site has reserved stays so.
            others = self.before().get(RESERVED, read(node.setting(RESERVED)))
            self.kernel[RESERVED] = together(others, kernel[RESERVED])
        lines = [f"{name} = {value}" for name, value in sorted(self.kernel.items())]
        self.kernel_text = "\n".join(["# Managed by ironrack: the ports of the firewall.", *lines, ""]) if lines else ""
        self.units = {node.unit: UNIT_TEXT, node.drop_in: DROP_IN_TEXT} if node.systemd or not text else {}
        for path, unit in self.units.items():
            self.units[path] = unit.format(nft=node.nft, rules=node.rules) if text else ""

    def table_differs(self):
        if not self.text:
            return bool(self.node.nft and self.node.table())
        if not self.node.nft or read(self.node.rules) != self.text:
            return True
        live = self.node.table()
        return not live or live != read(self.node.listing)

    def settings(self):
        """Kernel settings that are not in force: (name, file, value)."""
        before = self.before()
        # What is not set any more goes back to what it was.
        wanted = {name: value for name, value in before.items() if name not in self.kernel} | self.kernel
        found = []
        for name, value in wanted.items():
            path = self.node.setting(name)
            if read(path).split() != str(value).split():
                found.append((name, path, str(value)))
        return found

    def before(self):
        """What settings of this firewall were before it made them."""
        text = read(self.node.kernel_before)
        return json.loads(text) if text else {}

    def rest_differs(self):
        node = self.node
        wanted = [(node.rules, self.text), (node.kernel, self.kernel_text), *self.units.items()]
        if any(read(path) != content or (not content and os.path.lexists(path)) for path, content in wanted):
            return True
        if self.text and node.systemd and node.run("systemctl", "is-enabled", "--quiet", UNIT)[0]:
            return True
        return bool(self.settings()) or set(self.before()) != set(self.kernel)

    def set_kernel(self):
        node = self.node
        before = self.before()
        for name in self.kernel:
            before.setdefault(name, " ".join(read(node.setting(name)).split()))
        if before:
            write(node.kernel_before, json.dumps(before) + "\n")
        if self.kernel_text:
            write(node.kernel, self.kernel_text)
        else:
            remove(node.kernel)
        for _, path, value in self.settings():
            set_kernel(path, value)
        kept = {name: value for name, value in before.items() if name in self.kernel}
        if not kept:
            remove(node.kernel_before)
        elif kept != before:
            write(node.kernel_before, json.dumps(kept) + "\n")

    def arm_and_load(self):
        """Put the new table in force, to be taken back unless it is confirmed."""
        node = self.node
        live = node.table()
        head = f"table {' '.join(TABLE)}\ndelete table {' '.join(TABLE)}\n"
        # Loading this restores the old table, or removes the new one.
        write(node.before, head + live)
        node.guard.arm(commands=[[node.nft, "-f", node.before]])
        try:
            if not live:
                node.load(WATCH)
                time.sleep(WATCH_SECONDS)
            node.load(self.text)
        except RulesetError:
            node.guard.revert()
            raise

    def keep(self):
        """Make what is in force last."""
        node = self.node
        write(node.rules, self.text)
        write(node.listing, node.table())
        self.set_kernel()
        if node.systemd:
            changed = [path for path, text in self.units.items() if read(path) != text]
            for path in changed:
                write(path, self.units[path])
            if changed:
                node.must("systemctl", "daemon-reload")
            node.must("systemctl", "enable", "--quiet", UNIT)
            # Loads the same rules again, so that the unit is known to be active.
            node.must("systemctl", "restart", UNIT)

    def drop(self):
        """Remove every trace."""
        node = self.node
        if node.systemd and os.path.lexists(node.unit):
            node.run("systemctl", "disable", "--quiet", UNIT)
            node.run("systemctl", "stop", UNIT)
        self.set_kernel()
        for path in (*self.units, node.rules, node.listing):
            remove(path)
        with contextlib.suppress(OSError):
            # Somebody else's drop-ins stay, and so does their folder.
            os.rmdir(os.path.dirname(node.drop_in))
        if node.systemd:
            node.must("systemctl", "daemon-reload")
        if node.nft and node.table():
            node.must(node.nft, "delete", "table", *TABLE)


def set_kernel(path, value):
    try:
        with open(path, "w", encoding="utf-8") as handle:
            # An empty value is one, too.
            handle.write(value + "\n")
    except OSError as error:
        raise RulesetError(
            f"{path} = {value}: {error.strerror}; strict_ports needs it, set firewall_mode:"
            " trusted_cluster where the kernel refuses it"
        ) from error


def check_kernel(ruleset):
    """Whether settings can be made is known before anything is changed."""
    for _, path, value in ruleset.settings():
        if not os.access(path, os.W_OK):
            raise RulesetError(
                f"{path} = {value}: cannot be set here (a container whose kernel settings are read-only?); set"
                " firewall_mode: trusted_cluster, or make the setting on the machine below"
            )


def apply(module, node):
    ruleset = Ruleset(node, module.params["ruleset"], module.params["kernel"])
    result = {"changed": False, "notes": []}
    if not module.check_mode:
        # A run that was interrupted: its rules were never confirmed.
        node.guard.clear()
    before = read(node.rules)
    if not ruleset.text:
        result["changed"] = ruleset.table_differs() or ruleset.rest_differs()
        if result["changed"] and not module.check_mode:
            ruleset.drop()
    else:
        if not node.nft and not module.check_mode:
            raise RulesetError("nft is not installed: install the package nftables, or set firewall_mode: off")
        others = []
        if node.nft:
            others, result["notes"] = node.foreign()
            node.load(ruleset.text, "--check")
        if others and module.params["foreign"] == "refuse":
            raise RulesetError(
                f"another firewall filters here too, and a packet has to please both: {'; '.join(others)}. Switch it"
                " off, or set firewall_mode: off and open in it what -e firewall_show=true prints, or set"
                " firewall_foreign: keep if it lets all of that in"
            )
        result["notes"] = [f"beside this firewall: {other}" for other in others] + result["notes"]
        check_kernel(ruleset)
        table, rest = ruleset.table_differs(), ruleset.rest_differs()
        result["changed"] = table or rest
        if result["changed"] and not module.check_mode:
            if table:
                ruleset.arm_and_load()
                result["guard"] = node.guard.told()
            else:
                ruleset.keep()
    if module._diff and result["changed"]:
        headers = {"before_header": node.rules, "after_header": node.rules}
        after = ruleset.text
        if before == after:
            # The file says the right thing; the table in force, the unit or a kernel setting did not.
            before, after = node.table() if module.check_mode else "(not in force)\n", "(in force, kept over a boot)\n"
        result["diff"] = {**headers, "before": before, "after": after}
    for note in result["notes"] if result["changed"] else []:
        module.warn(note)
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "rules": {"type": "dict", "required": True},
            "foreign": {"type": "str", "choices": ["refuse", "keep"], "default": "refuse"},
            "seconds": {"type": "int", "default": 60},
            "ruleset": {"type": "str", "default": ""},
            "kernel": {"type": "dict", "default": {}},
            "guard": {"type": "dict", "default": {}},
            "step": {"type": "str", "choices": ["apply", "confirm", "status"], "default": "apply"},
        },
        supports_check_mode=True,
    )
    node = Node(module, ROOT)
    try:
        if module.params["step"] == "status":
            state = node.guard.state(module.params["guard"].get("token"))
            result = {"changed": False, "state": state, "present": node.present() if node.nft else []}
        elif module.params["step"] == "confirm":
            with node.guard.locked():
                confirmed = node.guard.confirm(module.params["guard"].get("token"))
                if confirmed:
                    Ruleset(node, module.params["ruleset"], module.params["kernel"]).keep()
            result = {"changed": confirmed, "confirmed": confirmed}
        else:
            result = apply(module, node)
    except (RulesetError, GuardError) as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
