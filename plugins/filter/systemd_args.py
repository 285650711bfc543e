# SPDX-License-Identifier: Apache-2.0
"""Thin shim: the logic and its tests are in plugin_utils/serve/quoting.py."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.serve import quoting


def systemd_args(arguments: Any, separator: str = " ") -> str:
    try:
        return quoting.systemd_args(arguments, separator)
    except quoting.QuotingError as error:
        raise AnsibleFilterError(f"systemd_args: {error}") from None


def systemd_environment(variables: Any) -> str:
    try:
        return quoting.environment_file(variables)
    except quoting.QuotingError as error:
        raise AnsibleFilterError(f"systemd_environment: {error}") from None


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"systemd_args": systemd_args, "systemd_environment": systemd_environment}
