# SPDX-License-Identifier: Apache-2.0
"""Keys of SSH: host keys pinned on the controller, users' keys on the node; see the module of the same name."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.ironrack.vllm.plugins.action.nft_ruleset import LOCAL, GuardedAction
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import ssh
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain

display = Display()


def probe(connection: Any) -> tuple[ssh.Connection, list[ssh.Key]]:
    """Who is logged in and from where, and the host keys of the node."""
    code, out, error = connection.exec_command(ssh.PROBE, sudoable=False)
    found, keys = ssh.read_probe(out.decode(errors="replace"))
    if code or not found.user:
        raise AnsibleError(f"the host does not say who is logged in: {error.decode(errors='replace').strip()}")
    return found, keys


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hosts are worked on at the same time, each by a process of its own."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read(path: Path) -> str:
    try:
        # Not read_text(), which changes the ends of lines.
        return path.read_bytes().decode("utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise AnsibleError(f"{path}: {error.strerror}") from None


def status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AnsibleError(f"ssh_known_hosts_file = {path}: {error.strerror} -> name another file") from None


def change(path: Path, function: Callable[[str], str], check: bool) -> tuple[str, str]:
    """The text of a file before and after; nobody else changes it in between."""
    path = path.resolve()
    present = status(path)
    if present and not stat.S_ISREG(present.st_mode):
        raise AnsibleError(
            f"ssh_known_hosts_file = {path}: is there and is no regular file, so host keys cannot be kept in it -> name"
            " a file of its own, as in {{ inventory_dir }}/.ironrack/known_hosts"
        )
    if check:
        before = read(path)
        return before, function(before)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.parent):
            before = read(path)
            after = function(before)
            if after != before:
                new = path.with_name(f"{path.name}.{os.getpid()}.new")
                new.write_bytes(after.encode("utf-8", errors="surrogateescape"))
                if present:
                    new.chmod(stat.S_IMODE(present.st_mode))
                new.replace(path)
    except OSError as error:
        raise AnsibleError(f"{error.filename or path}: {error.strerror}") from None
    return before, after


class ActionModule(GuardedAction):
    """Runs on the node once the controller is content with its host keys."""

    MODULE = "ironrack.vllm.ssh_keys"
    WHAT = "The authorized keys"

    def arguments(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        return {**to_plain(dict(self._task.args)), "user": self.present.user}

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        arguments: dict[str, Any] = to_plain(dict(self._task.args))
        host = str(task_vars["inventory_hostname"])
        file = Path(str(arguments["known_hosts"])).expanduser()
        try:
            if arguments.get("scan"):
                return self._scan(host, file, arguments)
            if arguments.get("nodes") is not None:
                return self._tell(host, file, arguments, task_vars)
            return self._pin(host, file, arguments, tmp, task_vars)
        except ssh.SshError as error:
            raise AnsibleError(str(error)) from None

    def _pin(
        self, host: str, file: Path, arguments: dict[str, Any], tmp: str | None, task_vars: dict[str, Any]
    ) -> dict[str, Any]:
        self.present, self.keys = probe(self._connection)
        reached, port = self._reached()
        address = arguments.get("address") or None
        names = ssh.host_names(host, reached, port, address, self.present.port)
        check = bool(self._task.check_mode)

        def pin(text: str) -> str:
            return ssh.pin(
                text,
                host,
                names,
                self.keys,
                accept=bool(arguments.get("accept_changed")),
                fingerprint=str(arguments.get("fingerprint") or ""),
            )

        before, after = change(file, pin, check)
        result = super().run(tmp, task_vars)
        if result.get("failed"):
            return result
        key = ssh.parse_key(str(result.get("between_key") or ""))
        if not check:
            change(file.with_name("node_keys"), lambda text: ssh.note_node(text, host, self.present.port, key), check)
        result["fingerprints"] = [key.fingerprint for key in self.keys]
        if before != after:
            result["changed"] = True
            if self._task.diff:
                shown = {"before_header": str(file), "after_header": str(file)}
                difference = {**shown, "before": before, "after": after}
                result["diff"] = [difference, *([result["diff"]] if "diff" in result else [])]
        return result

    def _reached(self) -> tuple[str | None, int]:
        """Where the connection goes to: what ssh looks up in known_hosts."""
        connection = self._connection
        name = str(connection.ansible_name or connection.transport).rpartition(".")[2]
        if name in LOCAL:
            return None, 22
        port = connection.get_option("port")
        return str(connection.get_option("host")), int(port or 22)

    def _scan(self, host: str, file: Path, arguments: dict[str, Any]) -> dict[str, Any]:
        """Pin the key that has the declared fingerprint, before there is any connection."""
        reached, port = self._reached()
        fingerprint = str(arguments.get("fingerprint") or "")
        if reached is None or not fingerprint:
            return {"changed": False, "skipped": True}
        command = ["ssh-keyscan", "-T", "10", "-p", str(port), reached]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        keys = ssh.parse_keys(done.stdout)
        if not keys:
            said = done.stderr.strip() or f"no answer at port {port}"
            raise AnsibleError(f"{host}: no host key could be read from {reached}: {said}")
        # The others may be anybody's. What has the fingerprint is the host's, and a connection will show whether it
        # is the host that has it.
        right = [key for key in keys if key.fingerprint == fingerprint]
        names = ssh.host_names(host, reached, port, None, port)
        before, after = change(
            file,
            lambda text: (
                ssh.pin(text, host, names, right or keys, accept=bool(right), fingerprint=fingerprint)
                if fingerprint not in [key.fingerprint for key in ssh.pinned(text, host)]
                else text
            ),
            bool(self._task.check_mode),
        )
        result: dict[str, Any] = {"changed": before != after, "fingerprints": [fingerprint]}
        if before != after and self._task.diff:
            result["diff"] = {"before_header": str(file), "after_header": str(file), "before": before, "after": after}
        return result

    def _tell(self, host: str, file: Path, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        noted = read(file.with_name("node_keys"))
        peers = ssh.peers(arguments["nodes"], host, str(arguments["between"]), read(file), noted)
        missing = peers.pop("missing")
        result = self._step("peers", {**arguments, "nodes": None, "peers": peers}, task_vars)
        if missing and not self._task.check_mode:
            display.warning(
                f"{host}: does not reach {', '.join(missing)} yet, whose keys no run has seen; run the playbook for"
                " them, and then for all"
            )
        return {**result, "missing": missing}
