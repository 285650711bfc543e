# SPDX-License-Identifier: Apache-2.0
"""Thin shim: the logic and its tests are in plugin_utils/runtime/fanout.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import fanout


def fanout_sources(nodes: Any, host: str, builder: str, addresses: Any, port: Any) -> dict[str, Any]:
    try:
        return fanout.sources(to_plain(nodes), str(host), str(builder), to_plain(addresses), int(port))
    except fanout.FanoutInputError as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"fanout_sources": fanout_sources}
