"""The filter `ironrack.vllm.plan`: a thin shim, the logic lives in plugin_utils/planner."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.plan import plan


def _plan(model_config: Any, nodes: Any = None, **request: Any) -> dict[str, Any]:
    config = to_plain(model_config)
    if not isinstance(config, dict):
        raise AnsibleFilterError("ironrack.vllm.plan: the input is not the dictionary of a config.json")
    if nodes is None:
        raise AnsibleFilterError("ironrack.vllm.plan: nodes is missing: give a list of name and gpus")
    try:
        return plan(config, to_plain(nodes), **to_plain(request))
    except PlannerError as error:
        raise AnsibleFilterError(f"ironrack.vllm.plan: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"plan": _plan}
