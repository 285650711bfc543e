# SPDX-License-Identifier: Apache-2.0
"""Thin shim: the logic and its tests are in plugin_utils/network/ssh.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import ssh
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def ssh_problems(settings: Any, nodes: Any, host: str, hosts: Any) -> list[str]:
    return ssh.check(*to_plain((settings, nodes, host, hosts)))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"ssh_problems": ssh_problems}
