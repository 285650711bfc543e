# SPDX-License-Identifier: Apache-2.0
"""Thin shims: the logic and its tests are in plugin_utils/hosts/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts import errors, fabric, topology, verify
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand over values of built-in types, and turn the package's errors into Ansible's."""

    def shim(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*to_plain(arguments), **to_plain(options))
        except errors.HostError as error:
            raise AnsibleFilterError(str(error)) from None

    return shim


def fabric_problems(
    fabric_type: str,
    hcas: list[str],
    extra: dict[str, Any],
    rails: str = "shared",
    numbers: dict[str, int] | None = None,
) -> dict[str, list[str]]:
    try:
        return {"problems": [], "warnings": fabric.check(fabric_type, hcas, extra, rails, numbers)}
    except errors.HostError as error:
        return {"problems": [str(error)], "warnings": []}


def environment_problems(*arguments: Any, **options: Any) -> list[str]:
    try:
        fabric.node_environment(*arguments, **options)
    except errors.HostError as error:
        return [str(error)]
    return []


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {
            "host_problems": plain(verify.host_report),
            "host_paths": plain(verify.wanted_paths),
            "fabric_problems": plain(fabric_problems),
            "node_environment": plain(fabric.node_environment),
            "environment_problems": plain(environment_problems),
            "not_carried": plain(fabric.not_carried),
            "numa_arguments": plain(topology.numa_arguments),
        }
