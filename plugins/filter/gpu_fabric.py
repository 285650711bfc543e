# SPDX-License-Identifier: Apache-2.0
"""The filter `ironrack.vllm.gpu_fabric`: a thin shim, the logic lives in plugin_utils/nvidia/gpu_fabric.py."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.errors import StackError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.gpu_fabric import gpu_fabric
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def _gpu_fabric(
    facts: Any,
    stack: Any,
    plan: Any,
    host: Any,
    *,
    policy: Any = None,
    manager_config: Any = None,
    nvidia_smi: Any = "",
) -> dict[str, Any]:
    try:
        return gpu_fabric(
            to_plain(facts),
            to_plain(stack),
            to_plain(plan),
            to_plain(host),
            policy=to_plain(policy),
            manager_config=to_plain(manager_config),
            nvidia_smi=str(to_plain(nvidia_smi)),
        )
    except StackError as error:
        raise AnsibleFilterError(f"ironrack.vllm.gpu_fabric: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"gpu_fabric": _gpu_fabric}
