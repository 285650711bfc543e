"""The filter `ironrack.vllm.estimate`: a thin shim, the logic lives in plugin_utils/planner."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate


def _estimate(
    model_config: Any,
    gpu: Any = None,
    engine: Any = None,
    hf_quant_config: Any = None,
    draft_config: Any = None,
    **unknown: Any,
) -> dict[str, Any]:
    for name in unknown:
        raise AnsibleFilterError(
            f"ironrack.vllm.estimate: {name} is no option; use gpu, engine (flags such as {name!r} belong into it), "
            "hf_quant_config or draft_config"
        )
    config, card, flags, quant, draft = (
        to_plain(item) for item in (model_config, gpu, engine or {}, hf_quant_config, draft_config)
    )
    if not isinstance(config, dict) or not isinstance(card, dict | list) or not isinstance(flags, dict):
        raise AnsibleFilterError(
            "ironrack.vllm.estimate: the model config and the flags are dictionaries, the GPU is one or a list of them"
        )
    for name, value in (("hf_quant_config", quant), ("draft_config", draft)):
        if value is not None and not isinstance(value, dict):
            raise AnsibleFilterError(f"ironrack.vllm.estimate: {name} is the dictionary of a JSON file")
    try:
        return estimate(config, card, flags, quant, draft)
    except PlannerError as error:
        raise AnsibleFilterError(f"ironrack.vllm.estimate: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"estimate": _estimate}
