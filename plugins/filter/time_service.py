# SPDX-License-Identifier: Apache-2.0
"""Thin shims: the logic and its tests are in plugin_utils/hosts/time_service.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts import time_service
from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def shim(*arguments: Any, **options: Any) -> Any:
        return function(*to_plain(arguments), **to_plain(options))

    return shim


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "time_service": plain(time_service.plan),
        }
