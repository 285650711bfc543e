# SPDX-License-Identifier: Apache-2.0
"""The filters `nvidia_stack` and `nvidia_in_turn`: thin shims, the logic lives in plugin_utils/nvidia."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.errors import StackError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.rollout import in_turn
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.stack import stack
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def _nvidia_stack(facts: Any, request: Any = None) -> dict[str, Any]:
    try:
        return stack(to_plain(facts), to_plain(request or {}))
    except StackError as error:
        raise AnsibleFilterError(f"ironrack.vllm.nvidia_stack: {error}") from error


def _nvidia_in_turn(facts: Any, decided: Any) -> list[str]:
    try:
        return in_turn(to_plain(facts), to_plain(decided))
    except StackError as error:
        raise AnsibleFilterError(f"ironrack.vllm.nvidia_in_turn: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"nvidia_stack": _nvidia_stack, "nvidia_in_turn": _nvidia_in_turn}
