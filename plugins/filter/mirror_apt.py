# SPDX-License-Identifier: Apache-2.0
"""Thin shims: the logic and its tests are in plugin_utils/runtime/mirror.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import mirror


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def shim(*arguments: Any, **options: Any) -> Any:
        return function(*to_plain(arguments), **to_plain(options))

    return shim


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "mirror_apt": plain(mirror.apt_plan),
            "mirror_below": plain(mirror.below),
            "mirror_wheels": plain(mirror.wheels),
        }
