# SPDX-License-Identifier: Apache-2.0
"""Thin shims: the logic and its tests are in plugin_utils/hosts/reboot.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts import errors, reboot
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand over values of built-in types, and turn the package's errors into Ansible's."""

    def shim(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*to_plain(arguments), **to_plain(options))
        except errors.HostError as error:
            raise AnsibleFilterError(str(error)) from None

    return shim


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {
            "reboot_needed": plain(reboot.reboot_needed),
            "reboot_remembered": plain(reboot.remembered),
            "reboot_problems": plain(reboot.came_back),
            "drain_scope": plain(reboot.drain_scope),
        }
