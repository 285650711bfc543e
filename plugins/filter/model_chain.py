# SPDX-License-Identifier: Apache-2.0
"""Thin shim: the logic and its tests are in plugin_utils/runtime/models.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import fanout, models


def model_chain(work: Any, looked: Any, addresses: Any, host: str, port: Any) -> dict[str, Any]:
    try:
        return models.hand_out(*to_plain((work, looked, addresses)), str(host), int(port))
    except fanout.FanoutInputError as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"model_chain": model_chain}
