"""What NCCL, Gloo, Ray and vLLM have to be told of a node's network.

Three traps decide the form: NCCL takes interface names as prefixes unless they are written with a leading "=", while
Gloo knows plain names only; a variable that is set to nothing is not the same as one that is not set; the index of a
RoCE GID differs between nodes and moves when a link does, so NCCL has to find it itself.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import nics
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

# The host's identity: what is set here by hand would contradict the addresses the rest of the cluster uses.
MANAGED = ("NODE_IP", "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
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
TORCH_NCCL_TRACE_BUFFER_SIZE TP_SOCKET_IFNAME UCX_NET_DEVICES UCX_TLS
    """.split()  # noqa: SIM905 (sixty names read better as text)
)
NOTES = {
    "NCCL_TIMEOUT": "NCCL has no such variable; vLLM's flag is --distributed-timeout-seconds",
    "NCCL_ASYNC_ERROR_HANDLING": "is an old name that vLLM drops; it is TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_IB_GID_INDEX": "differs between nodes and moves when a link goes down; unset, NCCL finds it itself",
}


def check(fabric_type: str, hcas: Sequence[str], extra: Mapping[str, Any]) -> list[str]:
    """Warnings about what the inventory asks for; HostError where it cannot be right."""
    if fabric_type not in FABRICS:
        raise HostError(f"fabric_type is {fabric_type}; it is one of {', '.join(FABRICS)}")
    if hcas and fabric_type not in LINK_LAYERS:
        raise HostError(
            f"fabric_hcas is {', '.join(hcas)} and fabric_type {fabric_type}: RDMA devices go with fabric_type"
            f" infiniband or roce only; set that, or leave fabric_hcas empty"
        )
    for hca in hcas:
        if not re.fullmatch(r"[A-Za-z0-9_-]+(:\d+)?", hca):
            raise HostError(f"fabric_hcas holds {hca!r}; write the name of one device, as in mlx5_0 or mlx5_0:1")
    warnings = []
    for name, value in extra.items():
        if not NAME.fullmatch(str(name)):
            raise HostError(f"fabric_environment holds {name!r}, which is not the name of a variable")
        if name in MANAGED:
            raise HostError(f"fabric_environment holds {name}, which is set from cluster_interface and cluster_address")
        if SECRET.search(name.upper()):
            raise HostError(
                f"fabric_environment holds {name}: its file is readable by everybody on the node; a secret has to go to"
                f" a variable that is made for it"
            )
        if value is None or str(value) == "":
            raise HostError(f"fabric_environment.{name} is empty, which is not the same as not set; leave {name} out")
        if isinstance(value, Mapping | list):
            raise HostError(f"fabric_environment.{name} is not a string")
        if name in NOTES:
            warnings.append(f"fabric_environment.{name}: {NOTES[name]}")
        elif name not in KNOWN and name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_")):
            near = difflib.get_close_matches(name, sorted(KNOWN), n=1, cutoff=0.85)
            if near:
                warnings.append(f"fabric_environment.{name} is not a variable known here; did you mean {near[0]}?")
    return warnings


def check_hcas(host: str, fabric_type: str, hcas: Sequence[str], rdma: Sequence[Mapping[str, Any]]) -> None:
    """Every listed device exists on this host, has the right link layer, and its link is up."""
    layer = LINK_LAYERS.get(fabric_type)
    if layer is None:
        return
    seen = (
        ", ".join(f"{port['device']}:{port['port']} ({port['link_layer']}, {port['state']})" for port in rdma) or "none"
    )
    usable = [port for port in rdma if port.get("link_layer") == layer and port.get("state") == "ACTIVE"]
    if not usable:
        raise HostError(
            f"fabric_type is {fabric_type}, but {host} has no active RDMA port with link layer {layer} (it has {seen});"
            f" bring the link up, or correct fabric_type"
        )
    for hca in hcas:
        device, _, port = hca.partition(":")
        if not any(item["device"] == device and port in ("", str(item["port"])) for item in usable):
            raise HostError(
                f"fabric_hcas names {hca}, which is not an active {layer} port of {host} (it has {seen});"
                f" correct fabric_hcas of this host, or bring the link up"
            )


def node_environment(
    facts: Mapping[str, Any],
    node: Mapping[str, Any],
    host: str,
    *,
    fabric_type: str = "auto",
    hcas: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The variables of one node's environment file."""
    extra = extra or {}
    check(fabric_type, hcas, extra)
    interface, address = locate(facts, node, host)
    if facts:
        check_hcas(host, fabric_type, hcas, facts.get("rdma") or [])
    try:
        literal = str(ipaddress.ip_address(address))
    except ValueError:
        raise HostError(f"cluster_address of {host} is {address}, which is not an IP address") from None
    environment = {"NODE_IP": literal, "VLLM_HOST_IP": literal, "GLOO_SOCKET_IFNAME": interface}
    if fabric_type != "nvlink":
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"
    environment |= PROFILES[fabric_type]
    if hcas:
        environment["NCCL_IB_HCA"] = "=" + ",".join(hcas)
    return environment | {str(name): str(value) for name, value in extra.items()}


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
