"""The filter `ironrack.vllm.serve_args`: a thin shim, the logic lives in plugin_utils/planner."""

from __future__ import annotations

from inspect import signature
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.serve_args import serve_args


def _serve_args(plan: Any, version: Any = None, **options: Any) -> list[str]:
    data = to_plain(plan)
    if not isinstance(data, dict):
        raise AnsibleFilterError("ironrack.vllm.serve_args: the input is not a plan")
    if version is None:
        raise AnsibleFilterError("ironrack.vllm.serve_args: version is missing: give the version of vLLM, '0.33.0' say")
    known = list(signature(serve_args).parameters)[2:]
    for name in options:
        if name not in known:
            raise AnsibleFilterError(f"ironrack.vllm.serve_args: {name} is no option; use {', '.join(known)}")
    try:
        return serve_args(data, str(version), **to_plain(options))
    except PlannerError as error:
        raise AnsibleFilterError(f"ironrack.vllm.serve_args: {error}") from error
    except TypeError as error:
        raise AnsibleFilterError(f"ironrack.vllm.serve_args: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"serve_args": _serve_args}
