# SPDX-License-Identifier: Apache-2.0
"""Runs the module of the same name again and again and says what the instance is doing meanwhile."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()
LOOK_SECONDS = 10
TELL_SECONDS = 30


class ActionModule(ActionBase):  # type: ignore[misc]
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        host = (task_vars or {}).get("inventory_hostname", "?")
        start, told, told_at = time.monotonic(), "", 0.0
        restarts: int | None = None
        look = self._look(arguments, task_vars, wait=0)
        while True:
            if look.get("failed") or look.get("skipped") or look.get("ready") or not look.get("state"):
                return look
            waited = time.monotonic() - start
            state = look["state"]
            count = int(state.get("NRestarts") or 0)
            restarts = count if restarts is None or count < restarts else restarts
            why = None
            if state.get("ActiveState") == "failed":
                why = f"has failed for good ({state.get('Result')})"
            elif count - restarts >= int(arguments.get("max_restarts", 4)):
                why = f"was restarted {count - restarts} times within {waited:.0f} s"
            elif waited >= float(arguments.get("timeout", 600)):
                why = f"has not answered a completion within {waited:.0f} s"
            if why:
                return self._failure(arguments, task_vars, host, why)
            summary = f"{state.get('ActiveState')}/{state.get('SubState')}/{count}"
            if summary != told or waited - told_at >= TELL_SECONDS:
                display.display(
                    f"  [{host}] {arguments['name']} after {waited:.0f} s: {look['doing']}", color="bright gray"
                )
                told, told_at = summary, waited
            look = self._look(arguments, task_vars, wait=LOOK_SECONDS)

    def _look(self, arguments: dict[str, Any], task_vars: Any, **extra: Any) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(
            module_name="ironrack.vllm.vllm_ready", module_args=arguments | extra, task_vars=task_vars
        )
        return result

    def _failure(self, arguments: dict[str, Any], task_vars: Any, host: str, why: str) -> dict[str, Any]:
        look = self._look(arguments, task_vars, wait=0, journal=True)
        state = look.get("state", {})
        places = list(arguments.get("look_at") or [])
        lines = [
            f"Instance {arguments['name']} on {host} {why}.",
            f"vllm@{arguments['name']}.service: " + " ".join(f"{key}={value}" for key, value in sorted(state.items())),
            "Its last lines in the journal:",
            look.get("journal") or "(none)",
        ]
        if places:
            lines.append("Look also at " + "; ".join(places) + ".")
        return {"failed": True, "msg": "\n".join(lines), "state": state}
