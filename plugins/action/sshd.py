# SPDX-License-Identifier: Apache-2.0
"""The settings of sshd, confirmed over a fresh connection; see the module of the same name."""

from __future__ import annotations

from copy import copy
from dataclasses import asdict
from typing import Any

from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.ironrack.vllm.plugins.action.nft_ruleset import GuardedAction
from ansible_collections.ironrack.vllm.plugins.action.ssh_keys import probe
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import ssh
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain

display = Display()


class ActionModule(GuardedAction):
    """Knows how the present connection got in, and lets that way stay."""

    MODULE = "ironrack.vllm.sshd"
    WHAT = "The settings of sshd"

    def arguments(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        arguments: dict[str, Any] = to_plain(dict(self._task.args))
        host = str(task_vars.get("inventory_hostname", "?"))
        connection, _ = probe(self._connection)
        try:
            text, notes = ssh.sshd_config(arguments["settings"], connection, host)
        except ssh.SshError as error:
            raise AnsibleError(str(error)) from None
        if ssh.passwords_off(text) and connection.is_ssh:
            self._need_a_key(host, connection.user)
        for note in notes:
            display.warning(note)
        return {**arguments, "settings": {}, "text": text, "connection": asdict(connection)}

    def _need_a_key(self, host: str, user: str) -> None:
        """Where Ansible has a password, find out whether it gets in without."""
        try:
            password = self._connection.get_option("password")
        except KeyError:
            password = None
        # -k leaves it with the play alone, and the connection looks there, too.
        if not (password or self._play_context.password):
            # ssh was told not to use one, and is connected.
            return
        fresh = self._fresh(self._connection)
        if fresh is self._connection:
            return
        fresh.set_option("password", None)
        fresh._play_context = copy(self._play_context)
        fresh._play_context.password = ""
        try:
            code, _, said = fresh.exec_command("true", sudoable=False)
            why = said.decode(errors="replace").strip()
        except AnsibleError as error:
            code, why = 255, str(error)
        if not code:
            return
        message = (
            f"ssh_settings.PasswordAuthentication = no: Ansible logs in to {host} as {user} by password"
            f" (ansible_password), and gets in no other way ({why}) -> put a key of yours into ssh_authorized_keys and"
            " run again without ansible_password, or set ssh_settings: {PasswordAuthentication: true}"
        )
        if not self._task.check_mode:
            raise AnsibleError(message)
        # The key may be one that this run would have put there.
        display.warning(message)
