"""The filter `ironrack.vllm.estimate`: a thin shim, the logic lives in plugin_utils/planner."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate


def _estimate(model_config: Any, gpu: Any, engine: Any = None, hf_quant_config: Any = None) -> dict[str, Any]:
    config, card, flags, quant = (to_plain(item) for item in (model_config, gpu, engine or {}, hf_quant_config))
    if not isinstance(config, dict) or not isinstance(card, dict) or not isinstance(flags, dict):
        raise AnsibleFilterError("ironrack.vllm.estimate: the model config, the GPU and the flags are dictionaries")
    try:
        return estimate(config, card, flags, quant)
    except PlannerError as error:
        raise AnsibleFilterError(f"ironrack.vllm.estimate: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"estimate": _estimate}
