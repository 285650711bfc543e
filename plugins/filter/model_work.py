# SPDX-License-Identifier: Apache-2.0
"""Thin shim: the logic and its tests are in plugin_utils/runtime/models.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import models


def model_work(plan: Any, looked: Any, builder: str = "") -> list[dict[str, Any]]:
    return models.work(*to_plain((plan, looked)), str(builder))


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"model_work": model_work}
