# SPDX-License-Identifier: Apache-2.0
"""Runs the module of the same name on the node, prints the completion, and keeps the report on the controller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):  # type: ignore[misc]
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        host = (task_vars or {}).get("inventory_hostname", "?")
        if self._task.check_mode:
            return {"changed": False, "msg": f"{arguments.get('name')}: nothing is asked in check mode"}
        result: dict[str, Any] = self._execute_module(
            module_name="ironrack.vllm.accept_instance", module_args=arguments, task_vars=task_vars
        )
        if result.get("failed") or "acceptance" not in result:
            return result
        found = result["acceptance"]
        display.display(
            f"  [{host}] {found['instance']} answers in {result['seconds']} s: {found['prompt']!r} -> {found['text']!r}"
            f" ({found['tokens']} tokens, {found['fingerprint']})\n  ask again: {result['curl']}",
            color="green",
        )
        report = Path(arguments["report"]) if arguments.get("report") else None
        if report:
            content = json.dumps(found | {"node": str(host), "curl": result["curl"]}, indent=2, sort_keys=True) + "\n"
            before = report.read_text(encoding="utf-8") if report.exists() else ""
            if before != content:
                report.parent.mkdir(parents=True, exist_ok=True)
                new = report.with_name(report.name + ".new")
                new.write_text(content, encoding="utf-8")
                new.replace(report)
                result["changed"] = True
                result["diff"] = {
                    "before_header": str(report),
                    "after_header": str(report),
                    "before": before,
                    "after": content,
                }
        return result
