"""What roles make of their variables: vars/main.yml, and what tasks/validate.yml asserts, templated for one node.

    echo '[{"role": "ray", "variables": {"ray_port": "6379"}}]' | render_roles.py

A process of its own, since Ansible finds filters of a collection only where nobody has imported from it before. Prints
one dictionary for each request; what can't be evaluated is there as a text that begins with `error: `.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import golden
import yaml
from ansible.errors import AnsibleError
from ansible.plugins.loader import init_plugin_loader
from ansible.template import trust_as_template

# It has every part: GPUs, Ray, an engine over several nodes.
TOPOLOGY, HOST = "mixed", "gpu1"
FACTS = golden.RECORDINGS / "nvidia_h200x2/host.json"
# What tasks before would have registered or set.
REGISTERED: dict[str, Any] = {
    "__base_found": {
        "state": {
            "time_services": [],
            "time_ours": False,
            "may_set_clock": True,
            "may_raise_limits": True,
            "open_files_max": 1048576,
            "hosts_written_by": "",
            "hosts_in_user_data": False,
        }
    },
    "__gpu_fabric_policy": {"deferred": "", "reboot_reasons": []},
    "__gpu_fabric_manager": {"changed": False},
    "__gpu_fabric_files": {"changed_paths": []},
    "__host_reboot_decision": {"asks": False, "needed": True, "reasons": [], "untouched": [], "blockers": []},
    "__host_reboot_drained": {},
    "__host_reboot_left": {},
    "__host_reboot_go": True,
    "__host_reboot_done": {"rebooted": True},
}


def wanted(role: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, template and further variables."""
    for name in load(role, "vars/main.yml"):
        yield name, f"{{{{ {name} }}}}", {}
    for task in load(role, "tasks/validate.yml"):
        conditions = (task.get("ansible.builtin.assert") or {}).get("that") or []
        for condition in [conditions] if isinstance(conditions, str) else conditions:
            # A backslash in braces stands for itself, in a bare condition it escapes.
            yield condition, "{{ " + condition.replace("\\\\", "\\") + " }}", task.get("vars") or {}


def load(role: str, path: str) -> Any:
    file = golden.ROOT / "roles" / role / path
    return (yaml.safe_load(file.read_text("utf-8")) if file.exists() else None) or {}


def trusted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: trusted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [trusted(item) for item in value]
    return trust_as_template(value) if isinstance(value, str) else value


def rendered(topology: golden.Topology, role: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    from ansible_collections.ironrack.vllm.plugins.plugin_utils.plain import to_plain  # noqa: PLC0415 - found once the loader is set up

    instances = topology.plan["hosts"][HOST]["instances"]
    of_the_play = {
        "ansible_check_mode": False,
        "ansible_play_batch": [HOST],
        "ansible_play_hosts": [HOST],
        "ansible_play_hosts_all": [HOST],
        "ansible_search_path": [str(golden.ROOT / "roles" / role)],
        "inventory_dir": topology._loader.get_basedir(),
        "role_path": str(golden.ROOT / "roles" / role),
        # Of loops.
        "instance": instances[0],
    }
    kept = topology._variables[HOST]
    found: dict[str, Any] = {}
    for name, template, more in wanted(role):
        topology._variables[HOST] = {**kept, **REGISTERED, **of_the_play, **trusted(more), **variables}
        try:
            found[name] = to_plain(topology.template(HOST, role, trusted(template)))
        except AnsibleError as error:
            found[name] = f"error: {error}"
    topology._variables[HOST] = kept
    return found


def main() -> None:
    init_plugin_loader()
    with tempfile.TemporaryDirectory() as folder:
        # A copy: roles keep secrets that they make beside the inventory.
        inventory = Path(folder) / golden.TOPOLOGIES.name / TOPOLOGY
        shutil.copytree(golden.TOPOLOGIES / TOPOLOGY, inventory)
        (Path(folder) / "fixtures").symlink_to(golden.ROOT / "tests/fixtures")
        topology = golden.Topology(inventory)
        facts = json.loads(FACTS.read_text("utf-8"))
        # The network is the topology's, the rest a recording of another machine.
        topology.hardware = {host: facts | topology.hardware.get(host, {}) for host in topology.hosts}
        answers = [rendered(topology, each["role"], each["variables"]) for each in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
