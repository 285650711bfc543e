# SPDX-License-Identifier: Apache-2.0
"""Loads filters and tests once, before Ansible forks."""

from __future__ import annotations

DOCUMENTATION = r"""
name: preload
type: aggregate
short_description: Loads filters and tests once instead of once a task
description:
  - >-
    Ansible runs each task of each host in a process of its own, and each of these that meets a filter of this
    collection loads all of them from their sources, with all that they import. That is half a second of the
    controller's CPU a task.
  - This callback loads them before the first process is made; all the others inherit them. It changes nothing else.
requirements:
  - enabled in C(callbacks_enabled), as the project's C(ansible.cfg) does
author:
  - The ironrack authors
"""

from typing import Any

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader

# Looking for one of a collection's filters, Ansible loads all of them.
ANY = "ironrack.vllm.nvidia_stack"


class CallbackModule(CallbackBase):
    """Has nothing to show."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "ironrack.vllm.preload"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_start(self, playbook: Any) -> None:
        for loader in (filter_loader, test_loader):
            for _ in loader.all():
                pass
        filter_loader.get(ANY)
