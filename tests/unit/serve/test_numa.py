"""The unit of an instance gets the flags that bind its ranks, by the facts of the host that it runs on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLAYBOOK = """\
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact:
        ironrack_host: "{{ told }}"
        cacheable: true
    - ansible.builtin.include_vars: "{{ root }}/roles/vllm/vars/main.yml"
    - ansible.builtin.copy:
        dest: "{{ folder }}/unit"
        content: "{{ lookup('ansible.builtin.template', root ~ '/roles/vllm/templates/instance.conf.j2') }}"
        mode: "0600"
"""
BOX = {
    "numa": [{"node": 0, "cpus": "0-31"}, {"node": 1, "cpus": "32-63"}],
    "gpus": [{"index": index, "numa_node": index} for index in range(2)],
}


@pytest.mark.parametrize(("executor", "bound"), [("mp", True), ("ray", False)])
def test_ranks_are_bound_in_the_unit(tmp_path: Path, executor: str, bound: bool) -> None:
    estimate = {"plan": {"estimate": {"weights_gib": 1}}, "tensor_parallel_size": 2}
    values: dict[str, Any] = {
        "root": str(ROOT),
        "folder": str(tmp_path),
        "told": BOX,
        "vllm_ready_timeout": 600,
        "vllm_load_mib_per_second": 100,
        "instance": {
            "name": "llm",
            "instance": "llm",
            "role": "api",
            "executor": executor,
            "args": ["/m", "--port", "8000"],
            "environment": {},
            "needs_ray_gpus": 0,
            "world": [{"node": "n1"}],
        },
        "ironrack_plan": {
            "instances": {"llm": {**estimate, "pipeline_parallel_size": 1, "data_parallel_size": 1}},
            "hosts": {},
            "site": {"config_dir": "/etc/ironrack", "current": "/opt/ironrack/current"},
            "ray": {"address": "10.0.0.1:6379"},
        },
    }
    (tmp_path / "play.yml").write_text(PLAYBOOK, "utf-8")
    (tmp_path / "values.json").write_text(json.dumps(values), "utf-8")
    program = Path(sys.executable).with_name("ansible-playbook")
    finished = subprocess.run(
        [program, tmp_path / "play.yml", "-i", "localhost,", "-c", "local", "-e", f"@{tmp_path}/values.json"],
        cwd=ROOT,
        env={
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_CACHE_PLUGIN": "memory",
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    unit = (tmp_path / "unit").read_text("utf-8")
    assert "vllm serve" in unit and ("8000" in unit)
    assert ("--numa-bind --numa-bind-nodes 0 1" in " ".join(unit.replace("\\", "").split())) is bound
