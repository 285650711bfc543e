"""The declared policy of GPUs, and what gpu_fabric makes of stack, plan and facts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia import gpu_fabric as fabric
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia import policy as policies
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.errors import StackError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.request import DEFAULTS
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.stack import stack

ROOT = Path(__file__).resolve().parents[3]
RECORDING = ROOT / "tests/fixtures/nvidia_h200x2/host.json"
B200, GB200 = "0x2901", "0x2941"


# --- the policy -------------------------------------------------------------------------------------------------------


def test_left_out_means_persistence_and_nothing_else() -> None:
    policy, problems = policies.check({})
    assert problems == []
    assert policy.arguments() == {"persistence": True}
    assert policies.boot_commands(policy) == ["/usr/bin/nvidia-smi -pm 1"]


def test_a_whole_policy() -> None:
    policy, problems = policies.check(
        {
            "persistence": True,
            "ecc": True,
            "mig": False,
            "power_limit_watts": 600,
            "clocks": {"graphics_mhz": [1200, 1980], "memory_mhz": 3201},
            "compute_mode": "default",
        }
    )
    assert problems == []
    assert policy.arguments() == {
        "persistence": True,
        "ecc": True,
        "mig": False,
        "power_limit_watts": "600",
        "graphics_clocks_mhz": "1200,1980",
        "memory_clocks_mhz": "3201,3201",
        "compute_mode": "default",
    }
    # ECC and MIG outlive a reboot; persistence comes first, for without it the others do not last.
    assert policies.boot_commands(policy) == [
        f"/usr/bin/nvidia-smi {line}" for line in ("-pm 1", "-c DEFAULT", "-pl 600", "-lgc 1200,1980", "-lmc 3201,3201")
    ]


def test_default_takes_clocks_back_and_needs_no_line_for_power() -> None:
    policy, problems = policies.check({"power_limit_watts": "default", "clocks": {"graphics_mhz": "default"}})
    assert problems == []
    assert policy.arguments()["power_limit_watts"] == "default"
    assert policies.boot_commands(policy) == ["/usr/bin/nvidia-smi -pm 1", "/usr/bin/nvidia-smi -rgc"]


@pytest.mark.parametrize(
    ("given", "variable", "text"),
    [
        (["persistence"], "gpu_fabric_policy", "not a dictionary"),
        ({"power_limit_wats": 5}, "gpu_fabric_policy.power_limit_wats", "did you mean power_limit_watts?"),
        ({"ecc": "on"}, "gpu_fabric_policy.ecc", "neither true nor false"),
        ({"mig": 0}, "gpu_fabric_policy.mig", "neither true nor false"),
        ({"mig": True}, "gpu_fabric_policy.mig", "engines use whole GPUs"),
        ({"power_limit_watts": "600W"}, "gpu_fabric_policy.power_limit_watts", "not a number of watts"),
        ({"power_limit_watts": True}, "gpu_fabric_policy.power_limit_watts", "not a number of watts"),
        ({"power_limit_watts": 600_000}, "gpu_fabric_policy.power_limit_watts", "not a number of watts"),
        ({"power_limit_watts": 0}, "gpu_fabric_policy.power_limit_watts", "not a number of watts"),
        ({"clocks": 1980}, "gpu_fabric_policy.clocks", "not a dictionary"),
        ({"clocks": {"graphic_mhz": 1980}}, "gpu_fabric_policy.clocks.graphic_mhz", "did you mean graphics_mhz?"),
        ({"clocks": {"graphics_mhz": [1980, 1200]}}, "gpu_fabric_policy.clocks.graphics_mhz", "write [1200, 1980]"),
        ({"clocks": {"memory_mhz": [1, 2, 3]}}, "gpu_fabric_policy.clocks.memory_mhz", "[1200, 1980]"),
        ({"clocks": {"memory_mhz": [1, "default"]}}, "gpu_fabric_policy.clocks.memory_mhz", "[1200, 1980]"),
        ({"compute_mode": "exclusive_process"}, "gpu_fabric_policy.compute_mode", "several processes"),
        ({"compute_mode": "shared"}, "gpu_fabric_policy.compute_mode", "not one of the choices"),
        ({"persistence": False, "power_limit_watts": 500}, "gpu_fabric_policy.persistence", "would be forgotten"),
        ({"persistence": None, "clocks": {"memory_mhz": 3201}}, "gpu_fabric_policy.persistence", "clocks"),
    ],
)
def test_wrong_policies_name_the_key(given: Any, variable: str, text: str) -> None:
    _, problems = policies.check(given)
    assert [problem.variable for problem in problems] == [variable]
    assert text in problems[0].as_dict()["text"]


def test_all_problems_at_once() -> None:
    _, problems = policies.check({"ecc": 1, "power_limit_watts": -5, "clock": {}})
    assert len(problems) == 3


def test_boot_unit() -> None:
    unit = policies.boot_unit(policies.check({"power_limit_watts": 500})[0])
    lines = unit.splitlines()
    assert [line for line in lines if line.startswith("ExecStart=")] == [
        "ExecStart=/usr/bin/nvidia-smi -pm 1",
        "ExecStart=/usr/bin/nvidia-smi -pl 500",
    ]
    # A restart of the daemon lets idle GPUs forget; engines start after this unit.
    assert "PartOf=nvidia-persistenced.service" in lines
    assert "Before=ironrack-gpu.service" in lines
    # These close the device policy: nvidia-smi would see no GPU.
    assert not [line for line in lines if line.startswith(("ProtectClock", "PrivateDevices", "DevicePolicy"))]


@pytest.mark.parametrize(("program", "path"), [("nvidia-smi", "/usr/bin/nvidia-smi"), ("/opt/bin/smi", "/opt/bin/smi")])
def test_the_unit_names_the_program_by_its_path(program: str, path: str) -> None:
    unit = files(decide(facts(), nvidia_smi=program))["/etc/systemd/system/ironrack-gpu-policy.service"]
    assert f"ExecStart={path} -pm 1\n" in unit


def test_boot_unit_without_anything_to_set_is_a_valid_unit() -> None:
    unit = policies.boot_unit(policies.check({"persistence": None})[0])
    assert "ExecStart=/usr/bin/true\n" in unit


# --- files and units --------------------------------------------------------------------------------------------------


def facts(**more: Any) -> dict[str, Any]:
    """The recorded host, as one that boots by itself (the recording is of a container), eight GPUs on NVSwitches."""
    found: dict[str, Any] = json.loads(RECORDING.read_text("utf-8"))
    functions = found["nvidia_functions"]
    switches = [functions[0] | {"class": "0x068000", "device": "0x22a3"}] * 4
    return found | {"nvidia_functions": functions[:1] * 8 + switches} | more


def plan(nodes: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
    own = {"address": "10.0.0.1", "groups": ["ironrack_runtime", "ironrack_gpu"], "gpus": [], "nvidia": request}
    return {"nodes": {"n1": own} if nodes is None else nodes}


def decide(host: dict[str, Any], of: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    of = plan() if of is None else of
    return fabric.gpu_fabric(host, stack(host, of["nodes"]["n1"]["nvidia"]), of, "n1", **settings)


def files(answer: dict[str, Any]) -> dict[str, str]:
    return {entry["path"]: entry.get("content", "") for entry in answer["files"]}


def units(answer: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in answer["units"]}


def busy(host: dict[str, Any], services: dict[str, Any]) -> dict[str, Any]:
    host = copy.deepcopy(host)
    host["health"]["gpus"][0]["processes"] = [{"pid": 4711, "name": "python3", "user": "ironrack", "unit": None}]
    host["health"]["services"] = services
    return host


RUNNING = {name: {"active": "active"} for name in ("nvidia-fabricmanager", "nvidia-persistenced", "nvidia-imex")}


def test_a_host_with_a_running_driver() -> None:
    answer = decide(facts())
    assert answer["problems"] == []
    assert answer["needed"]
    assert answer["driver"] == {"ready": True, "reason": ""}
    assert answer["wait_for_fabric"]
    found = units(answer)
    assert found["nvidia-fabricmanager.service"] == {
        "name": "nvidia-fabricmanager.service",
        "enabled": True,
        "state": "started",
        "restart_if_newer": ["/usr/share/nvidia/nvswitch/fabricmanager.cfg"],
    }
    assert found["ironrack-gpu-policy.service"]["state"] == "started"
    # Static on Ubuntu: enabling it would warn in every run.
    assert "enabled" not in found["nvidia-persistenced.service"]
    assert found["nvidia-persistenced.service"]["state"] == "started"
    assert "systemd-modules-load.service" not in found, "nvidia and nvidia_uvm are loaded"
    text = files(answer)["/etc/modules-load.d/ironrack-nvidia.conf"]
    assert text.splitlines()[1:] == ["nvidia", "nvidia_uvm"]


def test_a_driver_whose_library_is_gone_is_not_ready() -> None:
    lost = decide(facts(nvidia_driver={"loaded": "580.95.05", "library": None}, gpus=[]))
    assert not lost["driver"]["ready"]
    assert "library was not found" in lost["driver"]["reason"]
    # Found in a folder that is not known here, it serves all the same.
    assert decide(facts(nvidia_driver={"loaded": "580.95.05", "library": None}))["driver"]["ready"]


@pytest.mark.parametrize(
    "driver",
    [{}, {"loaded": None, "library": "580.95.05"}, {"loaded": "570.172.08", "library": "580.95.05"}],
    ids=["nothing", "not loaded", "another one loaded"],
)
def test_before_the_reboot_nothing_is_started(driver: dict[str, Any]) -> None:
    answer = decide(facts(nvidia_driver=driver))
    assert answer["needed"]
    assert not answer["driver"]["ready"]
    assert "next boot" in answer["driver"]["reason"]
    assert not answer["wait_for_fabric"]
    assert answer["units"]
    assert all(unit == {"name": unit["name"], "enabled": True} for unit in answer["units"])


def test_fabric_manager_is_not_restarted_under_programs() -> None:
    answer = decide(busy(facts(), RUNNING))
    assert answer["in_use"] == ["pid 4711 python3 (user ironrack) on GPU 0"]
    assert units(answer)["nvidia-fabricmanager.service"] == {"name": "nvidia-fabricmanager.service", "enabled": True}
    assert units(answer)["ironrack-gpu-policy.service"]["state"] == "started"


def test_fabric_manager_that_does_not_run_is_started_even_then() -> None:
    answer = decide(busy(facts(), {}))
    assert units(answer)["nvidia-fabricmanager.service"]["state"] == "started"


def test_services_that_the_inventory_refuses_are_stopped() -> None:
    off = plan(gpu_fabric_dcgm=False, gpu_fabric_manager="absent")
    host = facts()
    assert not {"nvidia-dcgm.service", "nvidia-fabricmanager.service"} & set(units(decide(host, off))), "not there"
    services = {"nvidia-dcgm": {"active": "active"}, "nvidia-fabricmanager": {"active": "active"}}
    host["health"]["services"] = services
    stopped = {"enabled": False, "state": "stopped"}
    found = units(decide(host, off))
    assert found["nvidia-dcgm.service"] == {"name": "nvidia-dcgm.service"} | stopped
    assert found["nvidia-fabricmanager.service"] == {"name": "nvidia-fabricmanager.service"} | stopped
    found = units(decide(busy(host, services), off))
    assert found["nvidia-fabricmanager.service"] == {"name": "nvidia-fabricmanager.service", "enabled": False}
    assert found["nvidia-dcgm.service"] == {"name": "nvidia-dcgm.service"} | stopped
    cards = facts(nvidia_functions=facts()["nvidia_functions"][:2])
    cards["health"]["services"] = services
    assert "nvidia-fabricmanager.service" not in units(decide(cards)), "auto leaves somebody else's alone"


def test_peermem_is_loaded_now_and_at_boot() -> None:
    answer = decide(facts(), plan(gpu_fabric_gdr="peermem"))
    assert "nvidia_peermem\n" in files(answer)["/etc/modules-load.d/ironrack-nvidia.conf"]
    assert units(answer)["systemd-modules-load.service"] == {
        "name": "systemd-modules-load.service",
        "restart_if_newer": ["/etc/modules-load.d/ironrack-nvidia.conf"],
    }
    before = decide(facts(nvidia_driver={}), plan(gpu_fabric_gdr="peermem"))
    assert "systemd-modules-load.service" not in units(before), "nouveau may hold the GPUs still"


def test_blackwell_boards_load_what_the_subnet_manager_needs() -> None:
    functions = [{"address": f"0000:{n:02x}:00.0", "device": B200, "class": "0x030200"} for n in range(8)]
    answer = decide(facts(nvidia_functions=functions))
    assert "ib_umad\n" in files(answer)["/etc/modules-load.d/ironrack-nvidia.conf"]
    # Fabric Manager's unit starts it; a unit of its own would be a second one.
    assert not [name for name in units(answer) if "nvlsm" in name]


def test_nothing_for_a_host_without_a_stack() -> None:
    answer = decide(facts(), plan(python_env_variant="cpu"))
    assert not answer["needed"]
    assert answer["files"] == answer["units"] == []


def test_a_driver_of_the_operators_own_still_gets_the_policy() -> None:
    answer = decide(facts(), plan(nvidia_driver_source="none"), policy={"power_limit_watts": 500})
    assert answer["needed"]
    assert set(units(answer)) == {"ironrack-gpu-policy.service"}
    assert set(files(answer)) == {"/etc/systemd/system/ironrack-gpu-policy.service"}
    assert answer["policy"] == {"persistence": True, "power_limit_watts": "500"}


def test_problems_leave_nothing_to_apply() -> None:
    answer = decide(
        facts(),
        plan(nvidia_driver_branch=999),
        policy={"ecc": "yes"},
        manager_config={"FABRIC_MODES": 1, "LOG_LEVEL": 9},
    )
    assert len(answer["problems"]) == 4
    assert not answer["needed"]
    assert answer["files"] == answer["units"] == []


def test_fabric_managers_configuration() -> None:
    answer = decide(facts(), manager_config={"LOG_LEVEL": 3, "LOG_FILE_NAME": "", "BIND_INTERFACE_IP": "127.0.0.1"})
    assert answer["problems"] == []
    assert answer["manager_config"][:2] == [{"key": "LOG_LEVEL", "value": "3"}, {"key": "LOG_FILE_NAME", "value": ""}]
    without = decide(facts(nvidia_functions=facts()["nvidia_functions"][:2]), manager_config={"LOG_LEVEL": 3})
    assert without["manager_config"] == [], "no Fabric Manager, no file"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([1], "not a dictionary"),
        ({"FABRIC_MODE": 1}, "waits for a hypervisor"),
        ({"LOG_LEVL": 1}, "did you mean LOG_LEVEL?"),
        ({"log_level": 1}, "did you mean LOG_LEVEL?"),
        ({"DAEMONIZE": 0}, "not a key"),
        ({"LOG_USE_SYSLOG": True}, "give 0 or 1"),
        ({"LOG_FILE_NAME": "a\nFABRIC_MODE=1"}, "give an absolute path"),
    ],
)
def test_wrong_configurations(config: Any, text: str) -> None:
    problems = fabric.check_manager(config)
    assert len(problems) == 1
    assert text in problems[0].as_dict()["text"]


def test_variables_are_checked_without_a_host() -> None:
    assert fabric.check_variables({"gpu_fabric_policy": None, "other": 1}) == []
    found = fabric.check_variables({"gpu_fabric_policy": {"mig": True}, "gpu_fabric_manager_config": {"X": 1}})
    assert [problem.variable for problem in found] == ["gpu_fabric_policy.mig", "gpu_fabric_manager_config.X"]


# --- IMEX -------------------------------------------------------------------------------------------------------------


def rack(**domains: str) -> dict[str, Any]:
    """Nodes with four GB200s each, by name and NVLink domain, and one with cards, and one that runs no engine."""
    gpus = [{"name": "NVIDIA GB200", "memory_total_mib": 189471}] * 4
    groups = ["ironrack_runtime", "ironrack_gpu"]
    nodes = {
        name: {
            "address": f"10.0.0.{number}",
            "groups": groups,
            "gpus": gpus,
            "nvidia": {"gpu_fabric_imex_domain": domain} if domain else {},
        }
        for number, (name, domain) in enumerate(domains.items(), 1)
    }
    nodes["cards"] = {"address": "10.0.0.200", "groups": groups, "gpus": [{"name": "NVIDIA H100 NVL"}], "nvidia": {}}
    nodes["head"] = {"address": "10.0.0.201", "groups": ["ironrack_runtime"], "gpus": gpus, "nvidia": {}}
    return plan(nodes)


def superchips() -> dict[str, Any]:
    functions = [{"address": f"000{n}:01:00.0", "device": GB200, "class": "0x030200"} for n in range(4)]
    host = facts(nvidia_functions=functions)
    return host | {"kernel": host["kernel"] | {"architecture": "aarch64"}}


def test_imex_lists_the_nodes_of_the_domain() -> None:
    answer = decide(superchips(), rack(n1="", n2="", n3=""))
    assert answer["problems"] == []
    assert files(answer)["/etc/nvidia-imex/nodes_config.cfg"] == "10.0.0.1\n10.0.0.2\n10.0.0.3\n"
    assert units(answer)["nvidia-imex.service"]["state"] == "started"
    assert not answer["wait_for_fabric"], "another tray runs Fabric Manager"


def test_imex_lists_are_equal_on_all_nodes() -> None:
    nodes = rack(n1="a", n2="b", n3="a")["nodes"]
    assert fabric.imex_nodes(nodes, "n1") == fabric.imex_nodes(nodes, "n3") == (["10.0.0.1", "10.0.0.3"], [], [])
    assert fabric.imex_nodes(nodes, "n2")[0] == ["10.0.0.2"]


def test_imex_on_request() -> None:
    nodes = rack(n1="")["nodes"]
    nodes["cards"]["nvidia"] = {"gpu_fabric_imex": "present"}
    assert fabric.imex_nodes(nodes, "n1")[0] == ["10.0.0.1", "10.0.0.200"]
    nodes["n1"]["nvidia"] = {"gpu_fabric_imex": "absent"}
    assert fabric.imex_nodes(nodes, "cards")[0] == ["10.0.0.200"]


def test_imex_needs_the_inventory_to_name_the_gpus() -> None:
    nodes = rack(n1="")
    nodes["nodes"]["n1"]["gpus"] = []
    answer = decide(superchips(), nodes)
    assert len(answer["problems"]) == 1
    assert answer["problems"][0].startswith("gpus is []: IMEX is needed")


def test_imex_needs_addresses() -> None:
    nodes = rack(n1="", n2="")["nodes"]
    nodes["n2"]["address"] = None
    _, problems, _ = fabric.imex_nodes(nodes, "n1")
    assert [(problem.variable, "n2" in problem.message) for problem in problems] == [("cluster_address", True)]


def test_a_domain_larger_than_a_rack_is_told() -> None:
    nodes = rack(**{f"n{number}": "" for number in range(1, 20)})["nodes"]
    addresses, problems, warnings = fabric.imex_nodes(nodes, "n1")
    assert (len(addresses), problems) == (19, [])
    assert "gpu_fabric_imex_domain" in warnings[0]
    del nodes["n19"]
    assert fabric.imex_nodes(nodes, "n1")[2] == []


def test_imex_is_not_restarted_under_programs() -> None:
    answer = decide(busy(superchips(), RUNNING), rack(n1="", n2=""))
    assert units(answer)["nvidia-imex.service"] == {"name": "nvidia-imex.service", "enabled": True}


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [None, [], "facts"])
def test_what_cannot_be_read(broken: Any) -> None:
    with pytest.raises(StackError, match="a dictionary is needed"):
        fabric.gpu_fabric(broken, {}, plan(), "n1")


def test_a_host_that_is_not_planned() -> None:
    with pytest.raises(StackError, match="no node n9"):
        fabric.gpu_fabric({}, {}, plan(), "n9")


def test_the_roles_defaults_are_those_that_the_stack_takes() -> None:
    defaults = yaml.safe_load((ROOT / "roles/gpu_fabric/defaults/main.yml").read_text("utf-8"))
    shared = {name: value for name, value in defaults.items() if name in DEFAULTS}
    assert shared == {name: DEFAULTS[name] for name in shared}
    assert {"gpu_fabric_manager", "gpu_fabric_imex", "gpu_fabric_gdr", "gpu_fabric_dcgm"} <= set(shared)
    assert not policies.check(defaults["gpu_fabric_policy"])[1]
