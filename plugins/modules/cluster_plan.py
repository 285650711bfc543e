"""Documentation of the action plugin of the same name; nothing runs on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cluster_plan
short_description: Check the inventory and plan the cluster
version_added: "0.1.0"
author:
  - The ironrack authors
description:
  - Checks every variable of the inventory and every C(-e) against the inventory contract and the roles' argument
    specs, and reports all problems in one message, each with the variable, its value and a remedy.
  - Plans every instance in C(vllm_instances) and returns the plan, the only source of the roles about the cluster.
  - Register it as C(ironrack_plan).
  - Runs on the controller and opens no connection. Looks at all hosts of the inventory, so C(--limit) changes nothing.
  - Uses variables of the inventory only, and cached facts of C(ironrack.vllm.host_facts) where an address or the GPUs
    are not declared.
options:
  require_addresses:
    description:
      - Whether a node of a multi-node instance that names its C(cluster_interface), but not its C(cluster_address),
        must have cached facts. With V(false) its address is null in the plan, and a warning says so.
    type: bool
    default: true
  show:
    description:
      - Returns the plan for people instead of the plan for roles, in the form of the switches C(plan_format) (V(text),
        V(json) or V(html)), C(plan_growth) and C(plan_file), which come with C(-e).
      - With V(json) the document is also printed as one line.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Nothing is changed but C(plan_file), which check mode leaves alone.
notes:
  - Use it under C(run_once); the fact is then set on all hosts of the play.
"""

EXAMPLES = r"""
- name: Plan the cluster from the inventory
  ironrack.vllm.cluster_plan:
  run_once: true
  register: ironrack_plan

- name: Bring the plan into the form that is asked for with -e plan_format
  ironrack.vllm.cluster_plan:
    show: true
  register: plan_shown
  run_once: true
"""

RETURN = r"""
instances:
  description:
    - What each instance runs, and where.
    - Every key of the plan is a key of the result, which roles expect registered as C(ironrack_plan).
  returned: success, unless O(show)
  type: dict
report:
  description: The plan as text.
  returned: success, unless O(show)
  type: str
document:
  description: The plan as one machine-readable value.
  returned: success with O(show)
  type: dict
path:
  description: The file that the plan was written to.
  returned: when one was asked for, or with C(plan_format=html)
  type: str
msg:
  description: What the terminal shows, the plan as text or where it was written.
  returned: success with O(show)
  type: str
"""
