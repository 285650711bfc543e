# SPDX-License-Identifier: Apache-2.0
"""Thin shims: the logic and its tests are in plugin_utils/runtime/compare.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import compare


def runtime_problems(found: Any, variant: Any, beside: Any = None) -> list[str]:
    return compare.version_problems(*to_plain((found, variant, beside)))


def runtime_repairs(found: Any, builder: Any) -> dict[str, Any]:
    return compare.repairs(*to_plain((found, builder)))


def failed_hosts(results: Any) -> list[str]:
    return compare.failed_hosts(to_plain(results))


def rollback_plan(found: Any, release: Any, vllm_version: Any) -> dict[str, Any]:
    return compare.rollback_plan(*to_plain((found, release, vllm_version)))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "runtime_problems": runtime_problems,
            "runtime_repairs": runtime_repairs,
            "rollback_plan": rollback_plan,
            "failed_hosts": failed_hosts,
        }
