# SPDX-License-Identifier: Apache-2.0
"""Thin shims: the logic and its tests are in plugin_utils/network/."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.errors import HostError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import probe, probe_html, probe_peers, rdma
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network.firewall import FirewallError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand over values of built-in types, and turn the package's errors into Ansible's."""

    def shim(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*to_plain(arguments), **to_plain(options))
        except (FirewallError, HostError) as error:
            raise AnsibleFilterError(str(error)) from None

    return shim


def network_preflight(measured: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The verdict, with the files of the report as text.

    Ansible looks at every value in a variable again and again, which takes minutes for all pairs of many nodes. So what
    net_probe measured is taken from its text where there is one, and all pairs leave as text.
    """
    probes = {}
    for name, result in measured.items():
        text = result.get("json")
        try:
            probes[str(name)] = json.loads(str(text)) if text else to_plain(result.get("probe"))
        except ValueError:
            probes[str(name)] = str(text)  # told as what cannot be read
    report = plain(probe.judge)(probes, *arguments, **options)
    page = probe_html.render(report)
    whole = json.dumps({key: value for key, value in report.items() if key != "table"}, ensure_ascii=False) + "\n"
    return {**{key: value for key, value in report.items() if key != "matrix"}, "json": whole, "html": page}


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "network_ports": plain(probe_peers.listener_ports),
            "network_peers": plain(probe_peers.peers),
            "network_preflight": network_preflight,
            "rdma_meetings": plain(rdma.meetings),
        }
