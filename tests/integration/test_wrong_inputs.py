"""Wrong inventories through real Ansible: one message with everything that is wrong, before any host is contacted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests/fixtures/model_configs"
PLAYBOOK = [
    {
        "name": "Plan",
        "hosts": "all",
        "gather_facts": False,
        "tasks": [
            {
                "name": "Plan the cluster",
                "ironrack.vllm.cluster_plan": {},
                "run_once": True,
                "register": "ironrack_plan",
            },
            # A second time with a registered variable about: that is no variable of the inventory.
            {"name": "Plan it again", "ironrack.vllm.cluster_plan": {}, "run_once": True},
            {"name": "Show", "ansible.builtin.debug": {"var": "ironrack_plan.digest"}},
        ],
    }
]
SLOTS = {"count": 2, "name": "slot", "memory_total_mib": 1024}


@dataclass
class Run:
    """What a run left behind."""

    status: str
    output: str
    messages: list[str] = field(default_factory=list)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    contacted: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.messages) or self.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run the playbook on an inventory. Every use of SSH would leave a mark."""

    def call(
        inventory: Path | dict[str, Any],
        group_vars: str | dict[str, Any] | None = None,
        playbook: str | None = None,
        options: str = "",
    ) -> Run:
        work = tmp_path_factory.mktemp("run")
        if not isinstance(inventory, Path):
            folder = work / "inventory"
            (folder / "group_vars").mkdir(parents=True)
            (folder / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
            text = group_vars if isinstance(group_vars, str) else yaml.safe_dump(group_vars or {})
            (folder / "group_vars/all.yml").write_text(text, encoding="utf-8")
            inventory = folder
        if playbook is None:
            playbook = str(work / "playbook.yml")
            Path(playbook).write_text(yaml.safe_dump(PLAYBOOK), encoding="utf-8")
        (work / "runner").mkdir()
        mark = work / "contacted"
        ssh = work / "ssh"
        ssh.write_text(f"#!/bin/sh\ntouch {mark}\nexit 255\n", encoding="utf-8")
        ssh.chmod(0o755)
        outcome = ansible_runner.run(
            private_data_dir=str(work / "runner"),
            playbook=playbook,
            inventory=str(inventory),
            cmdline=options or None,
            quiet=True,
            envvars={
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
                "ANSIBLE_CACHE_PLUGIN": "memory",
                "ANSIBLE_SSH_EXECUTABLE": str(ssh),
                "ANSIBLE_LOCAL_TEMP": str(work / "tmp"),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
        )
        found = Run(str(outcome.status), outcome.stdout.read())
        for event in outcome.events:
            data = event.get("event_data", {})
            if event["event"] in ("runner_on_failed", "runner_on_unreachable"):
                found.messages.append(str(data["res"].get("msg", "")))
            elif event["event"] == "runner_on_ok":
                found.results.setdefault(data["task"], []).append(data["res"])
        found.contacted = mark.exists()
        return found

    return call


def hosts(**changes: dict[str, Any]) -> dict[str, Any]:
    """Three hosts at addresses that nobody answers (RFC 5737)."""
    listed: dict[str, dict[str, Any]] = {
        f"n{i}": {"ansible_host": f"192.0.2.{i}", "cluster_address": f"10.77.1.1{i}", "gpus": SLOTS} for i in (1, 2, 3)
    }
    for name, values in changes.items():
        listed[name] = {key: value for key, value in {**listed[name], **values}.items() if value is not None}
    return {
        "vllm_nodes": {"hosts": {"n2": listed["n2"], "n3": listed["n3"]}},
        "ray_head": {"hosts": {"n1": listed["n1"]}},
        "ray_workers": {"hosts": {"n2": None, "n3": None}},
        "nobody": {"hosts": {}},
    }


def variables(**changes: Any) -> dict[str, Any]:
    instance = {
        "model": {"path": "/data/models/tiny", "config": str(CONFIGS / "dense_tiny.json")},
        "nodes": "vllm_nodes",
        "executor": "ray",
        "context_length": 512,
        "parallelism": {"tensor": 2, "pipeline": 2},
    }
    return {
        "python_env_variant": "cpu",
        "vllm_instances": {"tiny": {**instance, **changes}},
    }


def instances(**named: dict[str, Any]) -> dict[str, Any]:
    good = variables()["vllm_instances"]["tiny"]
    return {**variables(), "vllm_instances": {name: {**good, **changes} for name, changes in named.items()}}


@pytest.fixture(scope="module")
def contract(run: Callable[..., Run]) -> Run:
    """Everything that is wrong in the variables themselves, in one inventory."""
    return run(
        hosts(
            n1={"cluster_address": "gpu1.example", "cluster_interface": "docker0"},
            n3={"cluster_address": "10.77.1.12", "cluster_adress": "10.77.1.13"},
        ),
        {
            **instances(
                tiny={"contxt_length": 4096, "port": "http", "environment": {"HF_TOKEN": "swordfish"}},
                Tiny={"executor": "slurm"},
                empty={"nodes": "nobody", "master_port": 80},
                lost={"nodes": "vllm_node", "model": {"path": "models/x"}},
                unread={"model": {"path": "/nowhere/model"}},
                broken={"model": {"path": "/x", "config": __file__}},
            ),
            "vllm_instnces": {},
            "ray_prot": 6379,
            "site_helper": 1,
        },
        options="-e plan_fromat=json",
    )


@pytest.mark.parametrize(
    "words",
    [
        ["cluster_adress = 10.77.1.13 (n3)", "unknown variable", "did you mean cluster_address?"],
        ["vllm_instnces = {}", "did you mean vllm_instances?"],
        ["plan_fromat = json", "given with -e", "did you mean plan_format?"],
        ["vllm_instances.tiny.contxt_length = 4096", "unknown key", "did you mean context_length?"],
        ["vllm_instances.tiny.port = http", "not an integer", "8000"],
        ["vllm_instances.tiny.environment.HF_TOKEN = (hidden)", "secret", "vllm_secret_environment.tiny.HF_TOKEN"],
        ["duplicate instance name", "rename one"],
        ["vllm_instances.Tiny.executor = slurm", "choose auto, ray, mp"],
        ["vllm_instances.empty.nodes = nobody", "the group is empty", "put hosts in the group nobody"],
        ["vllm_instances.empty.master_port = 80", "use 1024 or more"],
        ["vllm_instances.lost.nodes = vllm_node", "did you mean vllm_nodes?"],
        ["cluster_address = gpu1.example (n1)", "not an IP address", "10.0.0.11"],
        ["cluster_interface = docker0 (n1)", "containers", "ib0"],
        ["cluster_address = 10.77.1.12 (n3)", "duplicate: n2", "its own cluster_address"],
        ["vllm_instances.unread.model.path = /nowhere/model", "no config.json", "model.config"],
        ["vllm_instances.broken.model.config", "not valid JSON", "config.json on the controller"],
    ],
    ids=lambda words: words[0].split(" = ")[0],
)
def test_variables(contract: Run, words: list[str]) -> None:
    assert contract.status == "failed"
    assert not contract.contacted
    for word in words:
        assert word in contract.text


def test_one_message_without_secrets(contract: Run) -> None:
    assert len(contract.messages) == 1
    assert "site_helper" not in contract.text
    assert "swordfish" not in contract.output


@pytest.fixture(scope="module")
def of_roles(run: Callable[..., Run]) -> Run:
    """Variables of roles that run late, when others have changed the hosts; those with -e are texts."""
    return run(
        hosts(),
        {
            **variables(),
            "base_sysctl": {"swappiness": 10},
            "firewall_ssh_ports": [22, 0],
            "host_reboot_reasons": [""],
            "preflight_accept": ["xidd"],
            "preflight_min_free_gib": {"shm": -1},
            "preflight_nvidia_smi": "nvidia-smi -q",
            "ray_token": "swordfish",
            "vllm_stop_timeout": None,
        },
        options="-e host_reboot_timeout=0 -e host_reboot_record=../x -e host_reboot_force=perhaps -e cuda_compat="
        " -e preflight_xid_hours=nan -e preflight_report_dir=reports",
    )


@pytest.mark.parametrize(
    "words",
    [
        ["base_sysctl.swappiness = 10", "no name of a kernel setting", "correct or remove it"],
        ["firewall_ssh_ports[1] = 0", "is less than 1", "use 1 or more"],
        ["host_reboot_reasons[0] = ''", "is empty", "write why"],
        ["host_reboot_timeout = 0", "is less than 1", "use 1 or more"],
        ["host_reboot_record = ../x", "no name of a record", "use letters"],
        ["host_reboot_force = perhaps", "is not true or false", "for example false"],
        ["cuda_compat = ''", "is not true or false", "for example false"],
        ["preflight_accept[0] = xidd", "not one of the choices", "did you mean xid?"],
        ["preflight_min_free_gib.shm = -1", "is less than 0", "use 0 or more"],
        ["preflight_nvidia_smi = nvidia-smi -q", "is no program", "without arguments"],
        ["preflight_report_dir = reports", "not an absolute path", "begin it with /"],
        ["preflight_xid_hours = nan", "not a number", "for example 24"],
        ["ray_token = (hidden)", "too short", "give 16 characters"],
        ["vllm_stop_timeout = null", "not an integer", "for example 20"],
    ],
    ids=lambda words: words[0].split(" = ")[0],
)
def test_variables_of_roles(of_roles: Run, words: list[str]) -> None:
    assert of_roles.status == "failed"
    assert not of_roles.contacted
    assert "14 problems in the inventory" in of_roles.text
    assert "swordfish" not in of_roles.output
    for word in words:
        assert word in of_roles.text


def test_numbers_and_booleans_may_come_as_text(run: Callable[..., Run]) -> None:
    words = "host_reboot_timeout=600 host_reboot_force=false preflight_xid_hours=0.5 base_acs_off=no ray_port=6379"
    found = run(hosts(), variables(), options=" ".join(f"-e {word}" for word in words.split()))
    assert found.status == "successful", found.text


@pytest.fixture(scope="module")
def cluster(run: Callable[..., Run]) -> Run:
    """Variables that are fine by themselves and wrong together."""
    inventory = hosts(n2={"gpus": {**SLOTS, "count": 8}}, n3={"cluster_address": None})
    inventory["ray_head"]["hosts"]["n2"] = None
    return run(
        inventory,
        instances(
            a={"nodes": ["n2"], "parallelism": {"tensor": 1, "pipeline": 1}},
            b={"nodes": ["n2"], "parallelism": {"tensor": 1, "pipeline": 1}, "executor": "mp"},
            long={"nodes": ["n2"], "context_length": 4096},
            heads={"nodes": ["n2"], "parallelism": {"tensor": 3, "pipeline": 1}},
            many={"nodes": ["n2"], "parallelism": {"tensor": 8, "pipeline": 4}},
            greedy={"nodes": ["n2"], "parallelism": {}},
            wide={"nodes": "vllm_nodes", "parallelism": {"tensor": 2, "pipeline": 2}},
            flags={"nodes": ["n2"], "args": {"max-modl-len": 1}},
        ),
    )


@pytest.mark.parametrize(
    "words",
    [
        ["cluster_address = (not set) (n3)", "multi-homed", "set cluster_address", "cluster_interface"],
        ["vllm_instances.long.context_length = 4096", "2048 tokens", "max_position_embeddings=2048", "2048 or less"],
        ["vllm_instances.heads.parallelism.tensor = 3", "attention heads (8)", "one of 1, 2, 4, 8"],
        ["vllm_instances.many.parallelism", "asks for 32 GPUs", "Lower parallelism"],
        ["vllm_instances.greedy.nodes", "instances on the same GPUs", "pin parallelism.tensor"],
        ["vllm_instances.b.port = 8000", "duplicate port on n2", "another port"],
        ["vllm_instances.b.executor = mp", "whose GPUs Ray hands out", "the same executor"],
        ["vllm_instances.flags.args.max-modl-len = 1", "no flag of vLLM", "Did you mean 'max-model-len'?"],
        ["ray_head = n1, n2", "one head", "leave one host"],
    ],
    ids=lambda words: words[0].split(" = ")[0],
)
def test_together(cluster: Run, words: list[str]) -> None:
    assert cluster.status == "failed"
    assert not cluster.contacted
    for word in words:
        assert word in cluster.text


def test_a_key_written_twice(run: Callable[..., Run]) -> None:
    text = yaml.safe_dump(variables())
    text += "  tiny: {model: {path: /x}, nodes: vllm_nodes}\n"
    found = run(hosts(), text)
    assert found.status == "failed"
    assert "duplicate mapping key 'tiny'" in found.output.replace("\r\n", " ")
    assert not found.contacted


def test_a_good_inventory_is_planned_twice_alike(run: Callable[..., Run]) -> None:
    """Templates, values of single hosts, --limit and variables that plays register."""
    inventory = hosts(n2={"site_port": 8001})
    good = variables(port="{{ site_number + 1 }}", context_length="{{ site_length }}")
    good |= {"site_number": 8999, "site_length": 512, "molecule_x": 1}
    found = run(inventory, good, options="--limit n3 -e plan_format=json")
    assert found.status == "successful", found.text
    (first,), (second,) = found.results["Plan the cluster"], found.results["Plan it again"]
    assert first["instances"]["tiny"]["port"] == 9000
    assert first["ray"]["head"] == "n1"
    assert first["digest"] == second["digest"]
    assert first["inputs"] == second["inputs"]
    assert not found.contacted


@pytest.mark.parametrize(
    ("name", "instance", "sizes", "executor"),
    [("prod", "llama405b", (8, 2), "ray"), ("single", "llama8b", (1, 1), "mp")],
)
def test_shipped_inventories(
    run: Callable[..., Run], name: str, instance: str, sizes: tuple[int, int], executor: str
) -> None:
    found = run(ROOT / "inventories" / name)
    assert found.status == "successful", found.text
    assert not found.contacted
    (plan,) = found.results["Plan the cluster"]
    placed = plan["instances"][instance]
    assert (placed["tensor_parallel_size"], placed["pipeline_parallel_size"]) == sizes
    assert placed["executor"] == executor
    assert placed["plan"]["estimate"]["fits"]
    json.dumps(plan)
