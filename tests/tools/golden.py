"""What the roles render for the example inventories in tests/topologies, kept in tests/golden.

    golden.py            writes tests/golden anew (make golden)
    golden.py --check    changes nothing, prints what differs, ends with 1 when something does

A topology is an inventory. What its hosts would tell about their hardware stands in tests/fixtures/topologies: a
description by hand, except where it names a recording. A renderer returns files of one host, by their path there; what
roles write is templated from the roles themselves, so that the golden files hold what a host would really get.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGIES = ROOT / "tests/topologies"
HARDWARE = ROOT / "tests/fixtures/topologies"
RECORDINGS = ROOT / "tests/fixtures"
GOLDEN = ROOT / "tests/golden"

os.environ["ANSIBLE_CONFIG"] = str(ROOT / "ansible.cfg")
sys.path.insert(0, str(ROOT / "collections"))

import yaml  # noqa: E402 - Ansible reads its configuration when it is imported
from ansible.inventory.manager import InventoryManager  # noqa: E402
from ansible.parsing.dataloader import DataLoader  # noqa: E402
from ansible.plugins.loader import init_plugin_loader  # noqa: E402
from ansible.template import Templar  # noqa: E402
from ansible.vars.hostvars import HostVars  # noqa: E402
from ansible.vars.manager import VariableManager  # noqa: E402


class GoldenError(Exception):
    """A topology that can't be planned or rendered."""


class Topology:
    """One example inventory with its plan."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._loader = DataLoader()
        self._loader.set_basedir(str(folder))
        inventory = InventoryManager(loader=self._loader, sources=[str(folder)])
        manager = VariableManager(loader=self._loader, inventory=inventory)
        self._hostvars = HostVars(inventory=inventory, variable_manager=manager, loader=self._loader)
        self._variables = {host.name: manager.get_vars(host=host) for host in inventory.get_hosts()}
        self.hardware = read_hardware(self.name)
        stray = sorted(set(self.hardware) - set(self._variables))
        if stray:
            raise GoldenError(f"{self.name}: hardware of {', '.join(stray)}, which the inventory does not have")
        groups = {name: [host.name for host in group.get_hosts()] for name, group in inventory.groups.items()}
        self.plan = self._plan(folder, groups)

    def _plan(self, folder: Path, groups: Mapping[str, Any]) -> dict[str, Any]:
        from ansible_collections.ironrack.vllm.plugins.action import cluster_plan  # noqa: PLC0415 - found once the loader is set up
        from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import cluster, validate  # noqa: PLC0415 - found once the loader is set up

        variables = {"groups": groups, "hostvars": self._hostvars, "inventory_dir": str(folder)}
        templar = Templar(loader=self._loader, variables=variables)
        collected = cluster_plan.Collected(variables, templar, cluster_plan._role_options())
        checked = validate.validate(collected.values, collected.roles, collected.extra, collected.names)
        plan, found = cluster.build(checked.values, collected.groups, collected.load_config, collected.facts)
        problems = [*collected.problems, *checked.problems, *found]
        if problems:
            raise GoldenError(f"{self.name}: {validate.render(problems)}")
        return plan

    @property
    def hosts(self) -> list[str]:
        return sorted(self._variables)

    def groups(self, host: str) -> list[str]:
        """The groups that the plan puts a host into."""
        return list(self.plan["nodes"].get(host, {}).get("groups", ()))

    def template(self, host: str, role: str, value: Any) -> Any:
        """A value as a task of this role would see it on this host."""
        variables: dict[str, Any] = {}
        for source in (
            self._yaml(role, "defaults/main.yml"),
            self._variables[host],
            self._yaml(role, "vars/main.yml"),
            {
                "ironrack_plan": self.plan,
                "hostvars": self._hostvars,
                "ansible_facts": {"ironrack_host": self.hardware[host]} if host in self.hardware else {},
            },
        ):
            variables |= source
        return Templar(loader=self._loader, variables=variables).template(value)

    def variable(self, host: str, role: str, name: str) -> Any:
        """One of a role's own variables on this host."""
        return self.template(host, role, self._yaml(role, "vars/main.yml")[name])

    def rendered(self, host: str, role: str) -> dict[str, str]:
        """The files that the tasks `ironrack.vllm.render` of a role write."""
        files: dict[str, str] = {}
        for task in self._yaml(role, "tasks/main.yml", []):
            if "ironrack.vllm.render" not in task:
                continue
            for entry in self.template(host, role, task["ironrack.vllm.render"]["files"]):
                if entry.get("state", "file") == "file":
                    files[str(entry["path"])] = str(entry["content"])
        return files

    def _yaml(self, role: str, path: str, empty: Any = None) -> Any:
        file = ROOT / "roles" / role / path
        loaded = self._loader.load_from_file(str(file), trusted_as_template=True) if file.exists() else None
        return loaded or ({} if empty is None else empty)


def read_hardware(name: str) -> dict[str, Any]:
    """The facts of each host, without the anchors of the file, which begin with a dot."""
    path = HARDWARE / f"{name}.yml"
    read = yaml.safe_load(path.read_text("utf-8")) if path.exists() else {}
    hardware = {}
    for host, facts in read.items():
        if host.startswith("."):
            continue
        recorded = facts.pop("recorded", None)
        hardware[host] = (json.loads((RECORDINGS / recorded).read_text("utf-8")) if recorded else {}) | facts
    return hardware


def firewall(topology: Topology, host: str) -> dict[str, str]:
    """As it goes into force where nobody is connected whom firewall_admin_networks leaves out."""
    if "ironrack_runtime" not in topology.groups(host):
        return {}
    from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import nft  # noqa: PLC0415 - found once the loader is set up

    rules = topology.variable(host, "firewall", "__firewall_rules")
    files = {"/etc/ironrack/firewall.nft": nft.render(rules)}
    if rules["kernel"]:
        lines = [f"{name} = {value}\n" for name, value in sorted(rules["kernel"].items())]
        files["/etc/sysctl.d/61-ironrack-firewall.conf"] = "".join(lines)
    return files


def fabric(topology: Topology, host: str) -> dict[str, str]:
    return topology.rendered(host, "fabric") if "ironrack_runtime" in topology.groups(host) else {}


# Each gets a topology and a host, and returns the content of files by their path on the host.
RENDERERS: tuple[Callable[[Topology, str], dict[str, str]], ...] = (fabric, firewall)


def render() -> dict[str, str]:
    """Everything that belongs into tests/golden, by path below it."""
    init_plugin_loader()
    found: dict[str, str] = {}
    for folder in sorted(path for path in TOPOLOGIES.iterdir() if path.is_dir()):
        topology = Topology(folder)
        for host in topology.hosts:
            for renderer in RENDERERS:
                for path, content in renderer(topology, host).items():
                    found[f"{topology.name}/{host}/{path.lstrip('/')}"] = content
    return found


def differences(wanted: Mapping[str, str], golden: Path) -> list[str]:
    """Unified diffs between what is kept and what is rendered now."""
    kept = {str(path.relative_to(golden)): path.read_text("utf-8") for path in golden.rglob("*") if path.is_file()}
    lines: list[str] = []
    for path in sorted({*kept, *wanted}):
        lines += difflib.unified_diff(
            kept.get(path, "").splitlines(),
            wanted.get(path, "").splitlines(),
            f"tests/golden/{path}" if path in kept else "/dev/null",
            f"rendered/{path}" if path in wanted else "/dev/null",
            lineterm="",
        )
    return lines


def write(wanted: Mapping[str, str], golden: Path) -> None:
    if golden.exists():
        shutil.rmtree(golden)
    for path, content in wanted.items():
        file = golden / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write tests/golden, or compare it with what the roles render.")
    parser.add_argument("--check", action="store_true", help="change nothing; end with 1 when something differs")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder of the golden files")
    arguments = parser.parse_args()
    try:
        wanted = render()
    except GoldenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not arguments.check:
        write(wanted, arguments.golden)
        return 0
    lines = differences(wanted, arguments.golden)
    if lines:
        print("\n".join(lines))
        print("error: tests/golden is out of step: look at the differences, then run make golden", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
