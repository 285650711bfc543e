"""What NCCL, Gloo, UCX, Ray and vLLM have to be told of a node's network.

Three traps decide the form: NCCL takes interface names as prefixes unless they are written with a leading "=", while
Gloo and UCX know plain names only; a variable that is set to nothing is not the same as one that is not set; the index
of a RoCE GID differs between nodes and moves when a link does, so NCCL has to find it itself.

All of it is written once, to the file that the units of Ray and vLLM read. /etc/nccl.conf adds nothing to that: it is
read by NCCL alone, the environment wins over it, and it would hold for every other program of the node.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import nics, topology
from .errors import HostError

FABRICS = ("auto", "nvlink", "tcp", "infiniband", "roce")

# Beyond the interface names, which every fabric but nvlink sets.
PROFILES: dict[str, dict[str, str]] = {
    # NCCL takes RDMA where it finds it, and sockets otherwise.
    "auto": {},
    "nvlink": {},
    "tcp": {"NCCL_IB_DISABLE": "1"},
    # A lost adapter is an error then, and not a silent fall back to sockets.
    "infiniband": {"NCCL_NET": "IB"},
    "roce": {"NCCL_NET": "IB"},
}
LINK_LAYERS = {"infiniband": "InfiniBand", "roce": "Ethernet"}
RAILS = ("shared", "isolated")
# Variable -> its largest value, its default (NCCL's own, so that nothing is set) and the fabrics it belongs to.
NUMBERS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "fabric_service_level": (15, 0, ("infiniband", "roce")),
    "fabric_traffic_class": (255, 0, ("roce",)),
    "fabric_queue_pairs": (128, 1, ("infiniband", "roce")),
}

# The host's identity: what is set here by hand would contradict the addresses the rest of the cluster uses.
MANAGED = ("NODE_IP", "VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL|PRIVATE")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

KNOWN = frozenset(
    """
CUDA_DEVICE_ORDER FI_PROVIDER GLOO_SOCKET_IFNAME OMP_NUM_THREADS
NCCL_ALGO NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_COMM_BLOCKING NCCL_CONF_FILE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE
NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE NCCL_GRAPH_MIXING_SUPPORT
NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ADDR_FAMILY NCCL_IB_ADDR_RANGE NCCL_IB_AR_THRESHOLD NCCL_IB_CUDA_SUPPORT
NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_PKEY
NCCL_IB_QPS_PER_CONNECTION
NCCL_IB_RETRY_CNT NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT
NCCL_IGNORE_CPU_AFFINITY NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MNNVL_ENABLE NCCL_NET
NCCL_NET_GDR_C2C NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_PLUGIN NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS
NCCL_NVLS_ENABLE
NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_PXN_DISABLE NCCL_RAS_ADDR
NCCL_RAS_ENABLE NCCL_RAS_TIMEOUT_FACTOR NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
NCCL_SOCKET_POLL_TIMEOUT_MSEC NCCL_SOCKET_RETRY_CNT NCCL_TOPO_FILE NCCL_TUNER_PLUGIN NCCL_UID_STAGGER_RATE
TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
TORCH_NCCL_TRACE_BUFFER_SIZE TP_SOCKET_IFNAME UCX_IB_SL UCX_IB_TRAFFIC_CLASS UCX_NET_DEVICES UCX_TLS
    """.split()  # noqa: SIM905 (sixty names read better as text)
)
NOTES = {
    "NCCL_TIMEOUT": "NCCL has no such variable; vLLM's flag is --distributed-timeout-seconds",
    "NCCL_ASYNC_ERROR_HANDLING": "is an old name that vLLM drops; it is TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_IB_GID_INDEX": "differs between nodes and moves when a link goes down; unset, NCCL finds it itself",
}


class FabricError(HostError):
    """A value of the inventory that cannot be right."""

    def __init__(self, variable: str, value: Any, problem: str, remedy: str) -> None:
        super().__init__(f"{variable} = {value}: {problem}; {remedy}")
        self.variable, self.value, self.problem, self.remedy = variable, value, problem, remedy


def check(
    fabric_type: str,
    hcas: Sequence[str],
    extra: Mapping[str, Any],
    rails: str = "shared",
    numbers: Mapping[str, int] | None = None,
) -> list[str]:
    """Warnings about what the inventory asks for; FabricError where it cannot be right."""
    for variable, value, known in (("fabric_type", fabric_type, FABRICS), ("fabric_rails", rails, RAILS)):
        if value not in known:
            raise FabricError(variable, value, "is not known", f"use one of {', '.join(known)}")
    if rails == "isolated" and fabric_type not in LINK_LAYERS:
        raise FabricError(
            "fabric_rails",
            rails,
            f"rails are those of RDMA adapters, but fabric_type is {fabric_type}",
            "set fabric_type to infiniband or roce, or leave fabric_rails out",
        )
    for name, number in (numbers or {}).items():
        largest, default, fabrics = NUMBERS[name]
        if not default <= number <= largest:
            raise FabricError(name, number, "is out of range", f"give a number from {default} to {largest}")
        if number != default and fabric_type not in fabrics:
            raise FabricError(
                name,
                number,
                f"goes with fabric_type {' or '.join(fabrics)} only, and that is {fabric_type}",
                f"correct fabric_type, or leave {name} out",
            )
    if hcas and fabric_type not in LINK_LAYERS:
        raise FabricError(
            "fabric_hcas",
            ", ".join(map(str, hcas)),
            f"RDMA devices go with fabric_type infiniband or roce only, and that is {fabric_type}",
            "set one of these, or leave fabric_hcas empty",
        )
    for hca in hcas:
        if not re.fullmatch(r"[A-Za-z0-9_-]+(:\d+)?", hca):
            raise FabricError("fabric_hcas", hca, "is no device", "write the name of one, as in mlx5_0 or mlx5_0:1")
    return [text for name, value in extra.items() for text in _check_extra(str(name), value)]


def _check_extra(name: str, value: Any) -> list[str]:
    """A warning about one variable of fabric_environment, or none."""
    variable = f"fabric_environment.{name}"
    # Not the value: it might be a secret.
    shown = "(not shown)"
    if not NAME.fullmatch(name):
        raise FabricError(variable, shown, "is not the name of a variable", "use letters, digits and underscores")
    if name in MANAGED:
        raise FabricError(variable, shown, "is set from cluster_interface and cluster_address", "leave it out")
    if SECRET.search(name.upper()):
        raise FabricError(
            variable, shown, "its file is readable by everybody on the node", "put a secret in a variable made for it"
        )
    if value is None or str(value) == "":
        raise FabricError(variable, "(empty)", "empty is not the same as not set", f"leave {name} out")
    if isinstance(value, Mapping | list):
        raise FabricError(variable, shown, "is not a string", "write its value in quotes")
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", str(value)):
        raise FabricError(
            variable, shown, "has a control character in it, which systemd refuses in a file", "remove it"
        )
    if name in NOTES:
        return [f"{variable}: {NOTES[name]}"]
    if name not in KNOWN and name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_")):
        near = difflib.get_close_matches(name, sorted(KNOWN), n=1, cutoff=0.85)
        if near:
            return [f"{variable} is not a variable known here; did you mean {near[0]}?"]
    return []


def used_ports(
    host: str, fabric_type: str, hcas: Sequence[str], facts: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, Any]]]:
    """The ports that carry the engines' traffic, each with the name NCCL is to know it by.

    Without a list these are the ports of the right kind beside a GPU, where there are such, for adapters elsewhere are
    those of storage and management; and all that are active otherwise. A port beside a GPU whose link is down is an
    error and not a shorter list: the hardware decides, and not the moment.
    """
    layer = LINK_LAYERS.get(fabric_type)
    if layer is None:
        return []
    rdma: Sequence[Mapping[str, Any]] = facts.get("rdma") or []
    seen = (
        ", ".join(f"{port['device']}:{port['port']} ({port['link_layer']}, {port['state']})" for port in rdma) or "none"
    )
    usable = [port for port in rdma if port.get("link_layer") == layer and port.get("state") == "ACTIVE"]
    if not usable:
        raise HostError(
            f"fabric_type is {fabric_type}, but {host} has no active RDMA port with link layer {layer} (it has {seen});"
            f" bring the link up, or correct fabric_type"
        )
    found: list[tuple[str, Mapping[str, Any]]] = []
    for hca in hcas:
        device, _, number = hca.partition(":")
        named = [port for port in usable if port["device"] == device and number in ("", str(port["port"]))]
        if not named:
            raise HostError(
                f"fabric_hcas names {hca}, which is not an active {layer} port of {host} (it has {seen});"
                f" correct fabric_hcas of this host, or bring the link up"
            )
        found += [(hca, port) for port in named]
    return found or [(f"{port['device']}:{port['port']}", port) for port in _chosen(host, layer, usable, facts)]


def _chosen(
    host: str, layer: str, usable: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    gpus = facts.get("gpus") or []
    of_layer = [port for port in facts["rdma"] if port.get("link_layer") == layer]
    beside = topology.beside_gpus(of_layer, gpus)
    linked = {port["device"] for port in usable}
    lost = [f"{port['device']}:{port['port']} ({port['state']})" for port in beside if port["device"] not in linked]
    if lost:
        raise HostError(
            f"{', '.join(lost)} of {host} is an {layer} port beside a GPU, but not active; bring the link up, or list"
            f" the devices that carry the engines' traffic in fabric_hcas of this host"
        )
    chosen = [port for port in beside if port in usable] or list(usable)
    return sorted(chosen, key=lambda port: (topology.natural(port["device"]), port["port"]))


def address_family(host: str, ports: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> int | None:
    """4 or 6, the family of the addresses that RoCE ports have in common; None where the facts do not name them."""
    links = {nic["name"]: nic for nic in facts.get("nics") or []}
    common = {4, 6}
    for port in ports:
        bearers = [links[name] for name in port.get("interfaces") or [] if name in links]
        if not bearers:
            return None
        bearers += [links[nic["master"]] for nic in bearers if nic.get("master") in links]
        own = {6 if ":" in address else 4 for nic in bearers for address in nics.global_addresses(nic)}
        if not own:
            raise HostError(
                f"{port['device']}:{port['port']} of {host} is to carry RoCE, but its interface"
                f" {', '.join(port['interfaces'])} has no address; give it one, or leave the device out of fabric_hcas"
            )
        common &= own
    if not common:
        raise HostError(
            f"RoCE ports of {host} have addresses of different families, and NCCL takes those of one; give"
            f" {', '.join(port['device'] for port in ports)} IPv4 addresses, or all of them IPv6 addresses"
        )
    return min(common)


def node_environment(
    facts: Mapping[str, Any],
    node: Mapping[str, Any],
    host: str,
    *,
    fabric_type: str = "auto",
    hcas: Sequence[str] = (),
    rails: str = "shared",
    numbers: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
    hosts: Mapping[str, Any] | None = None,
    config_dir: str = "",
) -> dict[str, str]:
    """The variables of one node's environment file; `hosts` are those of the plan, `config_dir` is where vLLM finds
    what `not_carried` lists."""
    extra, hosts = extra or {}, hosts or {}
    numbers = {name: default for name, (_, default, _) in NUMBERS.items()} | dict(numbers or {})
    check(fabric_type, hcas, extra, rails, numbers)
    interface, address = locate(facts, node, host)
    try:
        literal = str(ipaddress.ip_address(address))
    except ValueError:
        raise HostError(f"cluster_address of {host} is {address}, which is not an IP address") from None
    if fabric_type in LINK_LAYERS and not facts:
        raise HostError(
            f"fabric_type is {fabric_type}, and nothing is known about the RDMA devices of {host} yet; run"
            f" playbooks/facts.yml first"
        )
    ports = used_ports(host, fabric_type, hcas, facts)
    # NIXL would offer its peers localhost.
    environment = dict.fromkeys(("NODE_IP", "VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST"), literal)
    environment["GLOO_SOCKET_IFNAME"] = interface
    if fabric_type != "nvlink":
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"
        if ":" in literal:
            # Of an interface with addresses of both families NCCL would take the IPv4 one.
            environment["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    environment |= PROFILES[fabric_type]
    if ports:
        environment |= _rdma(host, fabric_type, ports, facts=facts, rails=rails, numbers=numbers)
    executors = transfers(hosts, host)
    if executors:
        environment |= _ucx(fabric_type, interface, ports, facts=facts, numbers=numbers, executors=executors)
    if config_dir and (hosts.get(host) or {}).get("ray"):
        environment["VLLM_CONFIG_ROOT"] = config_dir
    return environment | {str(name): str(value) for name, value in extra.items()}


def _rdma(
    host: str,
    fabric_type: str,
    ports: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    facts: Mapping[str, Any],
    rails: str,
    numbers: Mapping[str, int],
) -> dict[str, str]:
    found = {"NCCL_IB_HCA": "=" + ",".join(dict.fromkeys(name for name, _ in ports))}
    if rails == "isolated":
        # An adapter reaches those of its own rail only; NCCL would try the others too.
        found["NCCL_CROSS_NIC"] = "0"
    for variable, name in (
        ("fabric_service_level", "NCCL_IB_SL"),
        ("fabric_traffic_class", "NCCL_IB_TC"),
        ("fabric_queue_pairs", "NCCL_IB_QPS_PER_CONNECTION"),
    ):
        if numbers[variable] != NUMBERS[variable][1]:
            found[name] = str(numbers[variable])
    if fabric_type == "roce" and address_family(host, [port for _, port in ports], facts) == 6:
        found["NCCL_IB_ADDR_FAMILY"] = "AF_INET6"
    return found


def transfers(hosts: Mapping[str, Any], host: str) -> set[str]:
    """Executors of the engines with a rank on this host that use NIXL: to hand over KV caches, or among experts."""
    return {
        str(instance["executor"])
        for each in hosts.values()
        for instance in each.get("instances") or ()
        if any("nixl" in str(word).lower() for word in instance["args"])
        and any(member["node"] == host for member in instance["world"])
    }


def _ucx(
    fabric_type: str,
    interface: str,
    ports: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    facts: Mapping[str, Any],
    numbers: Mapping[str, int],
    executors: set[str],
) -> dict[str, str]:
    """UCX, which carries NIXL's transfers, reads none of NCCL's variables. UCX_TLS stays unset: a list by hand that
    forgets CUDA's transports fails."""
    if fabric_type == "tcp":
        return {"UCX_NET_DEVICES": interface}
    if not ports:
        return {}
    found = {}
    for variable, name in (("fabric_service_level", "UCX_IB_SL"), ("fabric_traffic_class", "UCX_IB_TRAFFIC_CLASS")):
        if numbers[variable] != NUMBERS[variable][1]:
            found[name] = str(numbers[variable])
    pairs = topology.nearest(facts.get("gpus") or [], [port for _, port in ports])
    numbered = {port["port"] for _, port in pairs}
    # Ranks under Ray do not read the mapping, and it has one number for the ports of all adapters.
    if executors == {"mp"} and len(numbered) == 1 and all(gpu.get("pci") and port.get("pci") for gpu, port in pairs):
        found["VLLM_GPU_NIC_PCIE_MAPPING"] = ",".join(f"{gpu['pci']}={port['pci']}" for gpu, port in pairs)
        found["VLLM_NIC_SELECTION_VARS"] = f"UCX_NET_DEVICES:{numbered.pop()}"
    else:
        found["UCX_NET_DEVICES"] = ",".join(f"{port['device']}:{port['port']}" for _, port in ports)
    return found


def not_carried(environment: Mapping[str, str]) -> list[str]:
    """Names that vLLM's driver must not hand to the Ray workers of other nodes: what a node leaves unset is unset for a
    reason, and the driver's node would fill it in. The content of ray_non_carry_over_env_vars.json in
    VLLM_CONFIG_ROOT."""
    return sorted(environment)


def locate(facts: Mapping[str, Any], node: Mapping[str, Any], host: str) -> tuple[str, str]:
    """Interface and address; the facts of the host are needed only when the inventory leaves one of them out."""
    interface, address = node.get("interface"), node.get("address")
    if not facts:
        if interface and address and not nics.is_refused(interface):
            return interface, address
        raise HostError(
            f"nothing is known about the interfaces of {host} yet; run playbooks/facts.yml first, or set both"
            f" cluster_interface and cluster_address"
        )
    return nics.resolve(host, facts.get("nics") or [], interface, address)
