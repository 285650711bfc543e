# SPDX-License-Identifier: Apache-2.0
"""Changes that can lock out whoever makes them: made on the node under a guard, confirmed over a fresh connection."""

from __future__ import annotations

import getpass
import os
import time
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import connection_loader
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import firewall, nft
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain

# A connection that is multiplexed into the one that is open proves nothing.
FRESH = "-o ControlMaster=no -o ControlPath=none"
TRY_SECONDS = 8
# No network is between these and their host, so none can be closed.
LOCAL = frozenset({"local", "podman", "docker", "chroot", "lxc", "nspawn", "machinectl"})


class GuardedAction(ActionBase):  # type: ignore[misc]
    """Runs MODULE with `step` apply, and, where it has armed a guard, with `confirm` over a fresh connection."""

    MODULE = ""
    # What is changed, for messages.
    WHAT = ""

    def arguments(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        return dict(self._task.args)

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        arguments = self.arguments(task_vars)
        result = self._step("apply", {**arguments, "guard": {"by": whoever()}}, task_vars)
        guard = result.pop("guard", None)
        if result.get("failed") or not guard:
            return result
        # Without it the confirmation could be that of a change that another run has made since.
        arguments = {**arguments, "guard": {"token": guard["token"]}}
        end = time.monotonic() + float(guard["seconds"])
        first, why = self._connection, "no answer"
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                self._connection = self._fresh(first)
                answer = self._step("confirm", arguments, task_vars)
            except AnsibleError as error:
                answer = {"unreachable": True, "msg": str(error)}
            finally:
                self._connection = first
            if answer.get("confirmed"):
                return result
            if not answer.get("unreachable"):
                # What came too late is no news: the tries before say why.
                why = str(answer.get("msg") or why)
                break
            why = str(answer.get("msg")).strip()
            time.sleep(max(0.0, 1 - (time.monotonic() - began)))
        return self._taken_back(guard, end, why, arguments, task_vars)

    def _step(self, step: str, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(
            module_name=self.MODULE, module_args={**arguments, "step": step}, task_vars=task_vars
        )
        return result

    def _fresh(self, first: Any) -> Any:
        """Another connection to the same host, with the same settings."""
        name = str(first.ansible_name or first.transport).rpartition(".")[2]
        if name in LOCAL:
            return first
        if name != "ssh":
            first.reset()
            return first
        fresh = connection_loader.get(first.ansible_name, self._play_context)
        fresh._options = dict(first._options)
        fresh.set_option("ssh_args", f"{FRESH} {first.get_option('ssh_args') or ''}".strip())
        fresh.set_option("timeout", TRY_SECONDS)
        fresh.set_option("reconnection_retries", 0)
        fresh.set_become_plugin(first.become)
        fresh._shell = first._shell
        return fresh

    def _taken_back(
        self, guard: dict[str, Any], end: float, why: str, arguments: dict[str, Any], task_vars: dict[str, Any]
    ) -> dict[str, Any]:
        """Wait for the roll-back and say how things are."""
        state = self._state(arguments, task_vars)
        if state not in ("confirmed", "rolled_back", "replaced"):
            # The node's clock started before ours.
            time.sleep(max(0.0, end - time.monotonic()) + 2)
            state = self._state(arguments, task_vars)
        said = {
            "rolled_back": "they were taken back, the node is as it was before",
            "confirmed": "they stay in force, but something went wrong afterwards",
            "replaced": "they were taken back, and another run has changed the node since",
        }.get(state, f"whether they were taken back is not known ({state})")
        where = f"{self.WHAT} of {task_vars.get('inventory_hostname', '?')}"
        return {
            "failed": True,
            "changed": state == "confirmed",
            "state": state,
            "msg": (
                f"{where} were not confirmed over a fresh connection within {guard['seconds']} s: {said}.\n"
                f"The fresh connection: {why}"
            ),
        }

    def _state(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> str:
        try:
            return str(self._step("status", arguments, task_vars).get("state", "no answer"))
        except AnsibleError as error:
            return str(error)


def whoever() -> str:
    """Who works on the node, for somebody else who wants to."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{os.uname().nodename}"


class ActionModule(GuardedAction):
    """The firewall of a node; see the module of the same name."""

    MODULE = "ironrack.vllm.nft_ruleset"
    WHAT = "The new firewall rules"

    def arguments(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(self._task.args)
        found = to_plain(arguments.get("rules"))
        if not isinstance(found, dict) or "mode" not in found:
            raise AnsibleError("rules: give what the filter ironrack.vllm.firewall_rules returns")
        self.admins: list[str] = []
        # With rules, the role's validation has shown them.
        self.warnings = list(found.get("warnings", [])) if found["mode"] == "off" else []
        # What the text and the settings say already need not travel.
        arguments["rules"] = {"mode": found["mode"]}
        if found["mode"] == "off":
            return {**arguments, "ruleset": "", "kernel": {}}
        try:
            listed = found["admin_networks"]
            before = [] if listed else self._step("status", arguments, task_vars).get("present", [])
            found = firewall.admit(found, self._present(), before)
        except firewall.FirewallError as error:
            raise AnsibleError(str(error)) from None
        self.admins = found["admin_networks"]
        if found["present"]:
            only = ", which firewall_admin_networks leaves out," if listed else " and from nowhere else,"
            self.warnings.append(
                f"{found['host']} lets in SSH from {', '.join(found['present'])}{only} since somebody is or was"
                " connected from there: list the networks of your administrators in firewall_admin_networks"
            )
        return {**arguments, "ruleset": nft.render(found), "kernel": found["kernel"]}

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        if self.warnings:
            result["warnings"] = [*result.get("warnings", []), *self.warnings]
        return {**result, "admin_networks": self.admins} if self.admins else result

    def _present(self) -> str:
        """What sshd says of this connection: asked without becoming root, since sudo drops the variable."""
        code, out, _ = self._connection.exec_command('echo "$SSH_CONNECTION"', sudoable=False)
        return out.decode(errors="replace").strip().splitlines()[-1].strip() if code == 0 and out.strip() else ""
