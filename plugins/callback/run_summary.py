# Copyright: the ironrack authors
# Apache License 2.0 (see LICENSE)
"""One line at the end of every run: wall time, host-tasks, controller CPU."""

from __future__ import annotations

DOCUMENTATION = r"""
name: run_summary
type: aggregate
short_description: One line at the end of every run with its cost
description:
  - Prints wall time (seconds), host-tasks run, changed, skipped and failed, and the controller's CPU time (seconds,
    user and system, forked workers included).
  - A host-task is one task on one host; a loop counts once. The busiest host decides whether a run keeps a budget, so
    it is named with its own figures.
requirements:
  - enabled in C(callbacks_enabled), as the project's C(ansible.cfg) does
options:
  summary_file:
    description: Path of a JSON file that also receives the figures, per host too. Nothing is written when unset.
    type: path
    env:
      - name: IRONRACK_SUMMARY_FILE
    ini:
      - section: ironrack
        key: summary_file
author:
  - The ironrack authors
"""

import json
import resource
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

KINDS = ("run", "changed", "skipped", "failed")


class CallbackModule(CallbackBase):
    """Counts results as they arrive; prints when the run ends."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "ironrack.vllm.run_summary"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start = time.monotonic()
        self._hosts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))

    def _count(self, result: Any, *kinds: str) -> None:
        figures = self._hosts[str(result._host.get_name())]
        for kind in kinds:
            figures[kind] += 1

    def v2_runner_on_ok(self, result: Any) -> None:
        changed = bool(result._result.get("changed", False))
        self._count(result, "run", *(["changed"] if changed else []))

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._count(result, "skipped")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._count(result, "run", "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._count(result, "failed")

    def v2_playbook_on_stats(self, stats: Any) -> None:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
        wall = time.monotonic() - self._start
        total = {kind: sum(figures[kind] for figures in self._hosts.values()) for kind in KINDS}
        line = (
            f"ironrack: {wall:.1f} s wall, {total['run']} host-tasks run, {total['changed']} changed, "
            f"{total['skipped']} skipped, {total['failed']} failed, controller CPU {cpu:.1f} s"
        )
        if self._hosts:
            busiest = max(sorted(self._hosts), key=lambda host: self._hosts[host]["run"])
            figures = self._hosts[busiest]
            line += f" (busiest host {busiest}: {figures['run']} run, {figures['skipped']} skipped)"
        self._display.display(line)
        target = self.get_option("summary_file")
        if target:
            report = {
                "wall_seconds": round(wall, 3),
                "controller_cpu_seconds": round(cpu, 3),
                "total": total,
                "hosts": {host: dict(figures) for host, figures in sorted(self._hosts.items())},
            }
            Path(target).write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
