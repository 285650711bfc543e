# SPDX-License-Identifier: Apache-2.0
"""Controller side of the module `release`: works out the release's identity, brings lock and wheels to the builder."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import conda
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import lock as locks

display = Display()


def _text(path: pathlib.Path, variable: str) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise locks.RuntimeInputError(f"{variable}: {path} is no text that can be read ({error}).") from None


def _sha256(path: pathlib.Path) -> str:
    """In pieces, since a wheel may be large and each host of the run has a process of its own here."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(functools.partial(stream.read, 1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


class ActionModule(ActionBase):
    def run(self, tmp: str | None = None, task_vars: Mapping[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        args = dict(self._task.args)
        credentials: dict[str, str] = {}
        for name in ("index_url", "extra_index_urls", "find_links", "conda_mirror", "miniforge_url"):
            if name in args:
                single = isinstance(args[name], str)
                split = [locks.split_credentials(str(url)) for url in ([args[name]] if single else args[name])]
                args[name] = split[0][0] if single else [url for url, _secret in split]
                for _url, secret in split:
                    credentials.update(secret)
        try:
            plan, wheels = self._plan(args)
        except locks.RuntimeInputError as error:
            raise AnsibleActionFail(str(error)) from error

        if args.get("state") == "built" and not self._task.check_mode:
            log = args.get("log_path", "/var/log/ironrack-release.log")
            node = self._task.delegate_to or (task_vars or {}).get("inventory_hostname", "the builder")
            display.display(f"release {plan['release_id']}: progress in {log} on {node}")
            folder = self._make_tmp_path()
            plan["lock_file"] = self._transfer_file(
                str(args["lock"]), self._connection._shell.join_path(folder, plan["lock_name"])
            )
            plan["wheel_files"] = []
            for path, digest in wheels:
                remote = self._transfer_file(str(path), self._connection._shell.join_path(folder, path.name))
                plan["wheel_files"].append({"path": remote, "sha256": digest})
            self._fixup_perms2([folder, plan["lock_file"], *[wheel["path"] for wheel in plan["wheel_files"]]])

        args["_plan"] = plan
        args["_credentials"] = credentials
        result.update(self._execute_module(module_name="ironrack.vllm.release", module_args=args, task_vars=task_vars))
        self._remove_tmp_path(self._connection._shell.tmpdir)
        return result

    def _plan(self, args: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[pathlib.Path, str]]]:
        missing = [name for name in ("lock", "variant", "vllm_version", "python") if not args.get(name)]
        if missing:
            raise locks.RuntimeInputError(f"missing arguments: {', '.join(missing)}")
        variant, python = str(args["variant"]), str(args["python"])
        lock_path = pathlib.Path(str(args["lock"]))
        if not lock_path.is_file():
            raise locks.RuntimeInputError(
                f"there is no lock file {lock_path.name} for python_env_variant {variant} and python_env_python "
                f"{python}. Choose a pair that ships with a lock (cu130 with 3.11 or 3.12, cpu with 3.11), or name "
                "your own in python_env_lock."
            )
        lock = locks.parse_lock(_text(lock_path, "python_env_lock"), lock_path.name)
        wheels = []
        for name in args.get("wheels") or []:
            path = pathlib.Path(str(name))
            if not path.is_file():
                raise locks.RuntimeInputError(f"python_env_wheels names {path}, which is no file on the controller.")
            wheels.append((path, _sha256(path)))
        environment = self._conda(args, python) if args.get("method") == "conda" else None
        interpreter = str(args.get("interpreter") or f"/usr/bin/python{'.'.join(python.split('.')[:2])}")
        if environment:
            interpreter = ""
        plan = {
            "release_id": locks.release_id(
                lock,
                variant=variant,
                wheels=[(path.name, digest) for path, digest in wheels],
                python=python,
                interpreter=interpreter,
                prefix=str(args.get("prefix", "/opt/ironrack")),
                conda=environment["digest"] if environment else "",
            ),
            "versions": locks.expected_versions(lock, variant, str(args["vllm_version"]), lock_path.name),
            "interpreter": interpreter,
            "lock_name": lock_path.name,
            "download_bytes": lock.download_bytes + (environment["download_bytes"] if environment else 0),
            "conda": environment,
        }
        return plan, wheels

    @staticmethod
    def _conda(args: Mapping[str, Any], python: str) -> dict[str, Any]:
        """What the builder needs to make the conda environment, in words of its own."""
        path = pathlib.Path(str(args.get("conda_lock") or ""))
        if not path.is_file():
            raise locks.RuntimeInputError(
                f"there is no conda lock {path.name} for python_env_python {python}. Locks ship for 3.12: set "
                "python_env_python to it, name your own in python_env_conda_lock, or set python_env_method: venv."
            )
        lock = conda.parse_explicit(_text(path, "python_env_conda_lock"), path.name)
        conda.check_python(lock, python, path.name)
        mirror = str(args.get("conda_mirror") or "")
        conda.check_mirror(mirror)
        return {
            "digest": lock.digest(),
            "download_bytes": lock.download_bytes,
            "packages": [
                {
                    "url": conda.mirrored(package, mirror),
                    "home": package.url,
                    "channel": package.channel,
                    "file_name": package.file_name,
                    "name": package.name,
                    "version": package.version,
                    "build": package.build,
                    "sha256": package.sha256,
                    "size": package.size,
                }
                for package in lock.packages
            ],
        }
