#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: fabric_ready
short_description: Wait until the NVLink fabric took in every GPU
version_added: 0.1.0
description:
  - >-
    Waits, up to O(timeout), until every GPU that belongs to an NVLink fabric reports state Completed and status
    Success. Before that, CUDA answers error 802 (system not yet initialized).
  - >-
    GPUs that report no fabric state (generations before Hopper, boards without NVSwitch) are passed over; their
    service is what tells.
  - Fails early when the service ended in a failure, and tells its last lines in the journal.
author:
  - The ironrack authors
options:
  timeout:
    description: Seconds to wait. Boards with eight GPUs take up to a minute after the service's start.
    type: int
    default: 180
  service:
    description: Unit that brings the fabric up.
    type: str
    default: nvidia-fabricmanager.service
  nvidia_smi:
    description: The program. Looked up in the usual folders when it is a bare name.
    type: str
    default: nvidia-smi
attributes:
  check_mode:
    description: Looks once, waits for nothing, and does not fail; an earlier task would have started the service.
    support: full
  diff_mode:
    description: Changes nothing in any mode.
    support: none
"""

EXAMPLES = r"""
- name: Wait for the fabric
  ironrack.vllm.fabric_ready:
    timeout: 300
"""

RETURN = r"""
ready:
  description: Whether every GPU of a fabric is taken in.
  returned: always
  type: bool
gpus:
  description: The GPUs of a fabric.
  returned: always
  type: list
  elements: dict
  contains:
    index:
      description: Number of the GPU.
      type: int
    state:
      description: C(Completed), C(In Progress), C(Not Started).
      type: str
    status:
      description: C(Success), or what went wrong.
      type: str
"""

import shutil
import time
import xml.etree.ElementTree

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils.program import call, smi_log

INTERVAL = 2
NO_FABRIC = ("", "N/A", "[N/A]", "Not Supported")


class FabricError(Exception):
    """Waiting longer does not help."""


def parse(text):
    """nvidia-smi -q -x: the GPUs that have a fabric state."""
    try:
        root = xml.etree.ElementTree.fromstring(smi_log(text))  # noqa: S314 - written by the host's own nvidia-smi
    except xml.etree.ElementTree.ParseError as error:
        raise FabricError(f"nvidia-smi -q -x wrote no XML ({error}); run it by hand on the host") from None
    gpus = []
    for index, item in enumerate(root.iter("gpu")):
        state = (item.findtext("fabric/state") or "").strip()
        if state not in NO_FABRIC:
            gpus.append({"index": index, "state": state, "status": (item.findtext("fabric/status") or "").strip()})
    return gpus


def complete(gpu):
    return gpu["state"] == "Completed" and gpu["status"] == "Success"


def ask(program, seconds):
    status, output, errors = call([program, "-q", "-x"], seconds)
    if status is None:
        raise FabricError(
            f"nvidia-smi -q -x {errors}: a GPU or the driver hangs, or {program} is not the right program"
        )
    if status:
        raise FabricError(f"nvidia-smi -q -x failed (exit status {status}): {' '.join((output + errors).split())}")
    return parse(output)


def failed(service):
    status, output, _ = call(["systemctl", "show", "--property", "ActiveState", "--value", service], 20)
    return status == 0 and output.strip() == "failed"


def explain(gpus, service, waited):
    _, journal, _ = call(["journalctl", "--no-pager", "--quiet", "--lines=20", f"--unit={service}"], 20)
    states = "; ".join(
        f"GPU {gpu['index']}: state {gpu['state']}, status {gpu['status']}" for gpu in gpus if not complete(gpu)
    )
    return (
        f"The NVLink fabric is not complete {waited}: {states}. CUDA answers error 802 until it is. {service} must run,"
        f" in exactly the driver's version (compare nvidia-smi with nv-fabricmanager --version). If it does, raise"
        f" gpu_fabric_timeout for state In Progress; else restart it while no program uses the GPUs, or reboot."
        + (f"\nLast lines of {service} in the journal:\n{journal.rstrip()}" if journal.strip() else "")
    )


def wait(program, service, timeout):
    start = time.monotonic()
    while True:
        left = timeout - (time.monotonic() - start)
        gpus = ask(program, max(left, 20))
        if all(map(complete, gpus)):
            return gpus
        if failed(service):
            raise FabricError(explain(gpus, service, "and its service failed"))
        if time.monotonic() - start + INTERVAL > timeout:
            raise FabricError(explain(gpus, service, f"after {timeout} seconds"))
        time.sleep(INTERVAL)


def main():
    module = AnsibleModule(
        argument_spec={
            "timeout": {"type": "int", "default": 180},
            "service": {"type": "str", "default": "nvidia-fabricmanager.service"},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
        },
        supports_check_mode=True,
    )
    program = shutil.which(module.params["nvidia_smi"])
    try:
        if program is None:
            raise FabricError(f"{module.params['nvidia_smi']} is not installed: install the driver first")
        if module.check_mode:
            gpus = ask(program, 20)
        else:
            gpus = wait(program, module.params["service"], module.params["timeout"])
    except FabricError as error:
        if module.check_mode:
            module.exit_json(changed=False, ready=False, gpus=[], msg=str(error))
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, ready=all(map(complete, gpus)), gpus=gpus)


if __name__ == "__main__":
    main()
