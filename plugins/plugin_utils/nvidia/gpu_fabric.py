# SPDX-License-Identifier: Apache-2.0
"""What the role gpu_fabric applies on a host: facts, stack, plan and variables in; files, units and policy out."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import policy as policies
from .errors import StackError
from .gpus import identify
from .notes import dicts, mapping
from .parts import SERVICE_OF
from .request import DEFAULTS, Problem
from .state import in_use

MANAGER_VARIABLE = "gpu_fabric_manager_config"
# What `check_variables` reads.
PROGRAM_VARIABLE = "gpu_fabric_nvidia_smi"
VARIABLES = (policies.VARIABLE, MANAGER_VARIABLE, PROGRAM_VARIABLE)
MODULES_LOAD = "/etc/modules-load.d/ironrack-nvidia.conf"
MANAGER_CONFIG = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
IMEX_FOLDER = "/etc/nvidia-imex"
IMEX_NODES = f"{IMEX_FOLDER}/nodes_config.cfg"
IMEX_CONFIG = f"{IMEX_FOLDER}/config.cfg"
# Compute trays of the largest NVLink domain there is (NVL72): https://docs.nvidia.com/multi-node-nvlink-systems/
LARGEST_DOMAIN = 18
PERSISTENCE, MANAGER, IMEX, DCGM = (
    f"{SERVICE_OF[key]}.service" for key in ("persistence", "fabric_manager", "imex", "dcgm")
)
# A stop of these takes the fabric from under programs that use it.
DISTURBING = (MANAGER, IMEX)
# Fabric Manager's keys that make sense where it runs beside the engines, with what they may be:
# https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/. DAEMONIZE is the unit's business.
SWITCH = (r"[01]", "0 or 1")
NUMBER = (r"\d{1,9}", "a number")
ADDRESS = (r"[0-9a-fA-F:.]+", "an IP address")
PATH = (r"(?:/[\w./-]{1,255})?", "an absolute path, or nothing")
MANAGER_KEYS = {
    "LOG_LEVEL": (r"[0-4]", "0 (nothing) to 4 (info)"),
    "LOG_FILE_NAME": PATH,
    "LOG_APPEND_TO_LOG": SWITCH,
    "LOG_FILE_MAX_SIZE": NUMBER,
    "LOG_MAX_ROTATE_COUNT": NUMBER,
    "LOG_USE_SYSLOG": SWITCH,
    "BIND_INTERFACE_IP": ADDRESS,
    "STARTING_TCP_PORT": NUMBER,
    "UNIX_SOCKET_PATH": PATH,
    "FM_CMD_BIND_INTERFACE": ADDRESS,
    "FM_CMD_PORT_NUMBER": NUMBER,
    "FM_CMD_UNIX_SOCKET_PATH": PATH,
    "FABRIC_MODE": (r"0", "0: in the other modes it waits for a hypervisor"),
    "FM_STAY_RESIDENT_ON_FAILURES": SWITCH,
    "ACCESS_LINK_FAILURE_MODE": SWITCH,
    "TRUNK_LINK_FAILURE_MODE": SWITCH,
    "NVSWITCH_FAILURE_MODE": SWITCH,
    "ABORT_CUDA_JOBS_ON_FM_EXIT": SWITCH,
}


def gpu_fabric(
    facts: Any,
    stack: Any,
    plan: Any,
    host: str,
    *,
    policy: Any = None,
    manager_config: Any = None,
    nvidia_smi: str = "",
) -> dict[str, Any]:
    """The role's variables of the same names. With problems only these are told."""
    for name, value in (("facts", facts), ("stack", stack), ("plan", plan)):
        if not isinstance(value, Mapping):
            raise StackError(f"{name} is {type(value).__name__}, a dictionary is needed")
    nodes = mapping(plan, "nodes")
    if host not in nodes:
        raise StackError(f"the plan has no node {host}; run playbooks/host.yml, which makes the plan first")
    problems = [str(problem.get("text")) for problem in dicts(stack, "problems")]
    declared, _ = policies.check({} if policy is None else policy)
    manager_config = {} if manager_config is None else manager_config
    found = check_variables(
        {policies.VARIABLE: policy, MANAGER_VARIABLE: manager_config, PROGRAM_VARIABLE: nvidia_smi or None}
    )
    program = nvidia_smi if nvidia_smi.startswith("/") else policies.NVIDIA_SMI
    services = [f"{service['name']}.service" for service in dicts(stack, "services")]
    peers, faults, warnings = imex_nodes(nodes, host) if IMEX in services else ([], [], [])
    problems += [str(problem.as_dict()["text"]) for problem in [*found, *faults]]
    answer: dict[str, Any] = {
        "needed": False,
        "driver": {"ready": False, "reason": ""},
        "in_use": in_use(facts),
        "files": [],
        "manager_config": [],
        "units": [],
        "policy": {},
        "wait_for_fabric": False,
        "warnings": [],
        "problems": problems,
    }
    own = mapping(mapping(nodes, host), "nvidia")
    if problems or not (stack.get("needed") or own.get("nvidia_driver_source") == "none"):
        return answer
    reason = not_ready(facts)
    busy = bool(answer["in_use"])
    answer.update(
        needed=True,
        driver={"ready": not reason, "reason": reason},
        files=_files(stack, policies.boot_unit(declared, program), peers),
        manager_config=[{"key": str(key), "value": str(value)} for key, value in manager_config.items()]
        if MANAGER in services
        else [],
        units=_units(facts, stack, services, ready=not reason, busy=busy) + _unwanted(facts, own, busy=busy),
        policy=declared.arguments(),
        wait_for_fabric=MANAGER in services and not reason,
        warnings=warnings,
    )
    return answer


def not_ready(facts: Mapping[str, Any]) -> str:
    """Why services of the driver would fail now; empty when they would not."""
    driver = mapping(facts, "nvidia_driver")
    loaded, library = driver.get("loaded"), driver.get("library")
    if not loaded:
        return "no kernel module of NVIDIA is loaded; the next boot loads it"
    if library and library != loaded:
        return f"driver {loaded} is loaded and {library} is installed; the next boot loads that"
    if not library and not facts.get("gpus"):
        return f"driver {loaded} is loaded, its library was not found, and nvidia-smi shows no GPU"
    return ""


def check_variables(values: Mapping[str, Any]) -> list[Problem]:
    """What can be told of a host's variables of the role before the host is looked at."""
    given = {name: values[name] for name in VARIABLES if values.get(name) is not None}
    problems = policies.check(given.get(policies.VARIABLE, {}))[1] + check_manager(given.get(MANAGER_VARIABLE, {}))
    program = given.get(PROGRAM_VARIABLE, "nvidia-smi")
    # It goes into a unit, where a space or a line's end begins something else.
    if not isinstance(program, str) or not re.fullmatch(r"/?[A-Za-z0-9_.+-]+(/[A-Za-z0-9_.+-]+)*", program):
        problems.append(
            Problem(
                PROGRAM_VARIABLE,
                program,
                "no plain name or path of a program",
                "give nvidia-smi or /usr/bin/nvidia-smi",
            )
        )
    return problems


def check_manager(config: Any) -> list[Problem]:
    variable = MANAGER_VARIABLE
    if not isinstance(config, Mapping):
        return [Problem(variable, config, "not a dictionary", "write {LOG_LEVEL: 4}")]
    problems = []
    for key, value in config.items():
        known = MANAGER_KEYS.get(str(key))
        if known is None:
            near = difflib.get_close_matches(str(key).upper(), MANAGER_KEYS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(MANAGER_KEYS)}"
            problems.append(Problem(f"{variable}.{key}", value, "not a key that is set here", remedy))
        elif isinstance(value, bool) or not re.fullmatch(known[0], str(value)):
            problems.append(Problem(f"{variable}.{key}", value, "not a value it takes", f"give {known[1]}"))
    return problems


def imex_nodes(nodes: Mapping[str, Any], host: str) -> tuple[list[str], list[Problem], list[str]]:
    """Addresses of the nodes that share the host's NVLink domain: the same list in the same order on each of them."""

    def value(name: str, key: str) -> Any:
        return mapping(mapping(nodes, name), "nvidia").get(key, DEFAULTS.get(key, ""))

    def member(name: str) -> bool:
        asked, node = value(name, "gpu_fabric_imex"), mapping(nodes, name)
        wants = asked == "present" or (asked == "auto" and identify({}, node.get("gpus")).rack_scale)
        return wants and "ironrack_gpu" in (node.get("groups") or ())

    domain = value(host, "gpu_fabric_imex_domain")
    members = [name for name in nodes if value(name, "gpu_fabric_imex_domain") == domain and member(name)]
    if host not in members:
        remedy = "declare them ({count: 4, name: NVIDIA GB200, memory_total_mib: …}), or set gpu_fabric_imex to present"
        message = "IMEX is needed, and which nodes share the NVLink domain is read from the inventory alone"
        return [], [Problem("gpus", mapping(nodes, host).get("gpus"), message, remedy)], []
    problems, addresses = [], []
    for name in members:
        address = str(mapping(nodes, name).get("address") or "")
        try:
            addresses.append(str(ipaddress.ip_address(address)))
        except ValueError:
            remedy = "set cluster_address to the address of its cluster interface"
            problems.append(Problem("cluster_address", address, f"IMEX on {host} needs an address of {name}", remedy))
    warnings = []
    if len(members) > LARGEST_DOMAIN:
        warnings.append(
            f"the NVLink domain {domain or '(unnamed)'} has {len(members)} nodes, and no rack has more than"
            f" {LARGEST_DOMAIN}: give each rack's nodes a name of their own in gpu_fabric_imex_domain"
        )
    return addresses, problems, warnings


def _files(stack: Mapping[str, Any], boot_unit: str, peers: Sequence[str]) -> list[dict[str, Any]]:
    modules = _modules(stack)
    text = "# Managed by ironrack: role gpu_fabric.\n" + "".join(f"{name}\n" for name in modules)
    entries = [_folder("/etc/modules-load.d"), _file(MODULES_LOAD, text)] if modules else []
    entries.append(_file(f"/etc/systemd/system/{policies.UNIT}", boot_unit))
    if peers:
        # No comment in it: its parser takes addresses, one a line.
        entries += [_folder(IMEX_FOLDER), _file(IMEX_NODES, "".join(f"{address}\n" for address in peers))]
    return entries


def _modules(stack: Mapping[str, Any]) -> list[str]:
    modules = [str(name) for name in mapping(stack, "modules").get("load") or []]
    packages = [str(name) for name in mapping(stack, "packages").get("fabric") or []]
    if any(name.startswith(("nvlink5", "nvlsm")) for name in packages):
        # The NVLink subnet manager, which Fabric Manager's own unit starts, talks to the switches through it.
        modules.append("ib_umad")
    return modules


def _units(
    facts: Mapping[str, Any], stack: Mapping[str, Any], services: Sequence[str], *, ready: bool, busy: bool
) -> list[dict[str, Any]]:
    running = mapping(mapping(facts, "health"), "services")
    newer = {MANAGER: [MANAGER_CONFIG], IMEX: [IMEX_NODES, IMEX_CONFIG]}
    units: list[dict[str, Any]] = []
    if ready and set(_modules(stack)) - {"nvidia", "nvidia_uvm"}:
        # Loads what was added to the list; without a state it is left alone where it does not run.
        units.append({"name": "systemd-modules-load.service", "restart_if_newer": [MODULES_LOAD]})
    for name in services:
        unit: dict[str, Any] = {"name": name, "enabled": True}
        if name == PERSISTENCE:
            # Static on Ubuntu, where udev starts it; the policy's unit wants it on either.
            unit = {"name": name}
        active = mapping(running, name.removesuffix(".service")).get("active") == "active"
        if ready and not (name in DISTURBING and active and busy):
            unit |= {"state": "started", "restart_if_newer": newer.get(name, [])}
        units.append(unit)
    own: dict[str, Any] = {"name": policies.UNIT, "enabled": True}
    units.append(own | ({"state": "started"} if ready else {}))
    return [unit for unit in units if len(unit) > 1]


def _unwanted(facts: Mapping[str, Any], own: Mapping[str, Any], *, busy: bool) -> list[dict[str, Any]]:
    """Services that the inventory says no to. Those that it leaves to us are left to whoever started them."""
    running = mapping(mapping(facts, "health"), "services")
    refused = {
        MANAGER: own.get("gpu_fabric_manager") == "absent",
        IMEX: own.get("gpu_fabric_imex") == "absent",
        DCGM: own.get("gpu_fabric_dcgm") is False,
    }
    units = []
    for name, off in refused.items():
        if off and name.removesuffix(".service") in running:
            keep = busy and name in DISTURBING
            units.append({"name": name, "enabled": False} | ({} if keep else {"state": "stopped"}))
    return units


def _file(path: str, content: str) -> dict[str, Any]:
    return {"path": path, "content": content, "owner": "root", "group": "root", "mode": "0644"}


def _folder(path: str) -> dict[str, Any]:
    return {"path": path, "state": "directory", "owner": "root", "group": "root", "mode": "0755"}
