# SPDX-License-Identifier: Apache-2.0
"""Thin shim: the logic and its tests are in plugin_utils/hosts/preflight.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts import errors, preflight
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def judge(facts: Any, plan: Any, hosts: Any = (), **options: Any) -> dict[str, Any]:
    """Hand over values of built-in types, and turn the package's errors into Ansible's."""
    try:
        return preflight.preflight(to_plain(facts), to_plain(plan), to_plain(hosts), **to_plain(options))
    except errors.HostError as error:
        raise AnsibleFilterError(str(error)) from None


def with_network(report: Any, network: Any) -> dict[str, Any]:
    return preflight.with_network(to_plain(report), to_plain(network))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"preflight": judge, "preflight_with_network": with_network}
