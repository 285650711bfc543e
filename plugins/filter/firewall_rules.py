# SPDX-License-Identifier: Apache-2.0
"""Thin shims: the logic and its tests are in plugin_utils/network/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.errors import HostError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.fabric import locate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import firewall, matrix
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand over values of built-in types, and turn the package's errors into Ansible's."""

    def shim(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*to_plain(arguments), **to_plain(options))
        except (firewall.FirewallError, HostError) as error:
            raise AnsibleFilterError(str(error)) from None

    return shim


def firewall_rules(plan: Any, host: str, groups: Any, addresses: Any, **options: Any) -> dict[str, Any]:
    """The interface comes from the inventory, or from the facts of the host where the inventory leaves it out."""
    facts = options.pop("facts", None) or {}
    node = plan["nodes"].get(host, {})
    interface = node.get("interface")
    if not interface and facts and node.get("address"):
        interface = locate(facts, node, host)[0]
    return firewall.rules(plan, host, groups, addresses, interface=interface, **options)


def firewall_problems(plan: Any, host: str, groups: Any, addresses: Any, **options: Any) -> dict[str, list[str]]:
    """The same question, where a problem is an answer."""
    try:
        return {"problems": [], "warnings": firewall_rules(plan, host, groups, addresses, **options)["warnings"]}
    except (firewall.FirewallError, HostError) as error:
        return {"problems": str(error).splitlines(), "warnings": []}


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "firewall_rules": plain(firewall_rules),
            "firewall_problems": plain(firewall_problems),
            "firewall_matrix": plain(matrix.render),
        }
