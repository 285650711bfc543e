# SPDX-License-Identifier: Apache-2.0
"""Thin shim: the logic and its tests are in plugin_utils/runtime/models.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import models


def model_differences(plan: Any, looked: Any) -> list[str]:
    return models.differences(*to_plain((plan, looked)))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"model_differences": model_differences}
