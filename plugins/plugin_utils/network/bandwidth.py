"""What the fabric should do, and what NCCL's words mean: who measures with whom, figures to compare with, causes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Seconds of the module nccl_check for one meeting, and around all of them.
MEETING_SECONDS = 180
_AROUND_SECONDS = 420


@dataclass(frozen=True)
class Reference:
    """All-reduce bus bandwidth of the GPUs of one node, in GB/s, as nccl-tests shows it for large messages."""

    # Of the whole name that nvidia-smi prints.
    gpus: str
    count: int
    # Whether the data goes through the switch (NVLS); null where the GPUs cannot.
    nvls: bool | None
    gb_s: float
    source: str


_HOPPER = r"NVIDIA (H100 \d+GB HBM3|H200)"
ALONE = (
    Reference(_HOPPER, 8, True, 475, "https://github.com/NVIDIA/nccl-tests/issues/290"),
    Reference(_HOPPER, 8, False, 370, "https://github.com/NVIDIA/nccl-tests/issues/212"),
    Reference(r"NVIDIA A100-SXM4-\d+GB", 8, None, 230, "https://github.com/NVIDIA/nccl-tests/issues/175"),
)
# What one adapter carries between two nodes, by its speed in Gbit/s: GB/s and where that was told.
ADAPTERS: dict[int, tuple[float, str]] = {
    400: (46.0, "https://github.com/NVIDIA/nccl-tests/issues/290"),
    200: (21.5, "https://github.com/NVIDIA/nccl-tests/issues/175"),
}
# Shares of these figures that have to be reached: this project's choice, no vendor's.
SHARES = {"alone": 0.90, "pair": 0.85}


@dataclass(frozen=True)
class Cause:
    """What a word of NCCL, CUDA or PyTorch means, and what helps."""

    words: str
    cause: str
    remedy: str


# The first that fits counts.
CAUSES = (
    Cause(
        r"error 802|system not yet initialized",
        "CUDA error 802: the NVLink fabric is not ready",
        "start Fabric Manager in exactly the driver's version; see fabric_manager and fabric_state",
    ),
    Cause(
        r"no socket interface found|Bootstrap.*no.*interface",
        "NCCL_SOCKET_IFNAME names an interface that the node does not have",
        "correct cluster_interface in the inventory, and run playbooks/network.yml, which writes node.env",
    ),
    Cause(
        r"out of memory|CUDA failure 2\b",
        "another process holds the GPU's memory",
        "see gpu_memory; stop what holds it, or wait until it has ended",
    ),
    Cause(
        r"ibv_reg_mr.*(Cannot allocate memory|failed)|ibv_create_cq.*Cannot allocate memory",
        "memory cannot be registered for RDMA: the limit of locked memory, or no way from the adapter to the GPU",
        "see memlock and peermem: LimitMEMLOCK=infinity, nvidia_peermem loaded or an open driver with dma-buf",
    ),
    Cause(
        r"ibv_modify_qp.*(Network is unreachable|No route)",
        "a RoCE port has no address, or no route to the other one's",
        "give each RoCE interface an address, and let each reach its peer (ip addr, ping -I)",
    ),
    Cause(
        r"ibv_modify_qp.*(No such device|Invalid argument|No data available|\b61\b)|gid.*(No such device|not found)",
        "the RoCE address index does not exist on this node",
        "leave NCCL_IB_GID_INDEX unset (fabric_environment, /etc/nccl.conf); compare show_gids on the nodes",
    ),
    Cause(
        r"ibv_modify_qp.*(Connection timed out|\b110\b)",
        "two adapters do not reach each other: rails that are not joined, or a path of the fabric that is down",
        "set fabric_rails=isolated where the rails are not joined; look at ibstat, the subnet manager, and with"
        " RoCE at the switches; try ib_write_bw between these nodes",
    ),
    Cause(
        r"status=12|error 12\b|vendor err 129|IBV_WC_RETRY_EXC",
        "packets of RDMA are lost until the adapter gives up: the fabric drops them, or the other side is gone",
        "with RoCE check PFC, ECN and the MTU on the switches; with InfiniBand the link's errors (perfquery)",
    ),
    Cause(
        r"status=1\b|status=4\b|local access violation|IBV_WC_LOC_LEN_ERR|IBV_WC_LOC_PROT_ERR",
        "an adapter refuses what NCCL sends: the two nodes have different MTUs, or GPUDirect RDMA fails",
        "compare active_mtu (ibv_devinfo) on both nodes; see peermem and acs",
    ),
    Cause(
        r"NET/IB ?: ?No device found|Failed to initialize any NET plugin|Failed to initialize NET plugin IB",
        "NCCL finds none of the RDMA devices that it has to use",
        "see rdma_links; correct fabric_hcas, or set fabric_type to what joins the nodes",
    ),
    Cause(
        r"dev/shm|shared memory.*(No space|fail)|No space left on device",
        "the shared memory of the node (/dev/shm) is full or too small",
        "see shm; remove what old processes left there, or enlarge it",
    ),
    Cause(
        r"NVLS|multicast|fabric.*(401|not.*ready)",
        "the NVLink switch does not give NCCL its multicast memory",
        "see fabric_state; restart Fabric Manager while no engine runs. NCCL_NVLS_ENABLE=0 in fabric_environment"
        " is a stop-gap that costs speed",
    ),
    Cause(
        r"no kernel image|CUDA driver version is insufficient|forward compatibility",
        "the runtime's CUDA does not fit the GPU or its driver",
        "see driver_cuda and cuda_agree",
    ),
    Cause(
        r"Connection refused|No route to host|Connection timed out|Network is unreachable|socketStartConnect",
        "a connection between the two nodes on a random port does not come about",
        "see net_connect and net_ports_random",
    ),
)


def explain(words: str, kind: str) -> tuple[str, str]:
    """Cause and remedy of what was said. `kind` is that of the run."""
    for entry in CAUSES:
        if re.search(entry.words, words, re.IGNORECASE):
            return entry.cause, entry.remedy
    if re.search(r"timed? ?out", words, re.IGNORECASE):
        if kind == "alone":
            return (
                "the GPUs of one node wait for each other: P2P that is reported and does not work, ACS, or the IOMMU",
                "see p2p, acs, iommu and xid; try NCCL_P2P_DISABLE=1 in fabric_environment to find out",
            )
        return (
            "the ranks of the nodes wait for each other: closed random ports, a wrong interface, or a rank that ended",
            "see net_connect and net_ports_random, and what the other nodes say; NCCL's log is in /run/ironrack/nccl",
        )
    return (
        "NCCL's own words are the best there is",
        "read NCCL's whole log in /run/ironrack/nccl on these nodes",
    )


# --- who with whom ---------------------------------------------------------------------------------------------------


def groups(plan: Mapping[str, Any], present: Iterable[str]) -> list[list[str]]:
    """The nodes of each engine that spans several: only they exchange data over NCCL."""
    here = set(present)
    found: list[list[str]] = []
    for instance in plan.get("instances", {}).values():
        for replica in instance["replicas"]:
            nodes = list(dict.fromkeys(member["node"] for member in replica["world"]))
            nodes = [node for node in nodes if node in here]
            if len(nodes) > 1 and nodes not in found:
                found.append(nodes)
    return found


def meetings(plan: Mapping[str, Any], listeners: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """For each node `meetings` of the module nccl_check, and the `seconds` that all of it may take.

    Neighbours in a ring first, then all nodes of an engine. Meetings of one round have no node in common.
    """
    present = [name for name in plan["nodes"] if listeners.get(name)]
    sets = groups(plan, present)
    wanted: list[tuple[str, list[str]]] = []
    for nodes in sets:
        ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))[: len(nodes) if len(nodes) > 2 else 1]
        # Every second pair first: they have no node in common.
        for pair in [*ring[::2], *ring[1::2]]:
            if not any(set(pair) == set(other) for _, other in wanted):
                wanted.append(("pair", list(pair)))
    wanted += [("all", nodes) for nodes in sets if len(nodes) > 2]
    found: dict[str, dict[str, Any]] = {name: {"meetings": []} for name in plan["nodes"]}
    last = dict.fromkeys(present, 0)
    for kind, nodes in wanted:
        number = 1 + max(last[node] for node in nodes)
        last.update(dict.fromkeys(nodes, number))
        first = nodes[0]
        meeting = {
            "kind": kind,
            "nodes": nodes,
            "address": plan["nodes"][first]["address"],
            # The listener has had it, and gives it back before. The first one is gloo_check's.
            "port": (listeners[first] or {})["random"][-1],
            "round": number,
        }
        for node in nodes:
            found[node]["meetings"].append(meeting)
    seconds = _AROUND_SECONDS + MEETING_SECONDS * (1 + max(last.values(), default=0))
    return {name: {"meetings": told["meetings"], "seconds": seconds} for name, told in found.items()}


# --- figures ---------------------------------------------------------------------------------------------------------


def used(devices: Sequence[Mapping[str, Any]], wanted: str | None) -> list[Mapping[str, Any]]:
    """The active ports that NCCL_IB_HCA names: = exact, ^ all but these, otherwise beginnings of names."""
    active = [device for device in devices if device.get("active")]
    if not wanted:
        return active
    without = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    entries = [entry.split(":") for entry in wanted.lstrip("^=").split(",") if entry]

    def fits(device: Mapping[str, Any]) -> bool:
        return any(
            (device["name"] == name if exact else str(device["name"]).startswith(name))
            and (not rest or not rest[0] or str(device.get("port")) == rest[0])
            for name, *rest in entries
        )

    return [device for device in active if fits(device) != without]


def alone(gpus: Sequence[str], nvls: bool) -> Reference | None:
    """The figure for the GPUs of one node, where one is known."""
    for entry in ALONE:
        if (
            len(gpus) == entry.count
            and all(re.fullmatch(entry.gpus, name) for name in gpus)
            and entry.nvls in (None, nvls)
        ):
            return entry
    return None


def carried(devices: Sequence[Mapping[str, Any]], gpus: int) -> tuple[float, str] | None:
    """GB/s that the adapters of a node carry, and the source; no more adapters count than there are GPUs."""
    figures = [ADAPTERS.get(round(float(device.get("gbit") or 0))) for device in devices]
    known = [figure for figure in figures if figure]
    if not known or len(known) != len(figures):
        return None
    best = sorted(known, reverse=True)[:gpus]
    return sum(figure[0] for figure in best), best[0][1]


def expected(run: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> tuple[float, str] | None:
    """What a run has to reach in GB/s, and from which figure; null where none is known.

    `nodes` is what nccl_check returned on each node of the run.
    """
    nvls = bool(run.get("nvls"))
    within = [alone(node["gpus"], nvls) for node in nodes]
    if run["kind"] == "alone":
        figure = within[0]
        if not figure or run.get("ranks") != figure.count:
            return None
        way = " through the switch (NVLS)" if figure.nvls else ""
        share = SHARES["alone"]
        return share * figure.gb_s, f"{share:.0%} of {figure.gb_s:g} GB/s{way}, {figure.source}"
    if run["kind"] != "pair" or not any(way.startswith("NET/IB") for way in run.get("via") or {}):
        return None
    carrying = [
        carried(used(node["devices"], node["variables"].get("NCCL_IB_HCA")), len(node["gpus"])) for node in nodes
    ]
    if not all(carrying):
        return None
    least, source = min(figure for figure in carrying if figure)
    # Data that leaves a node goes between its GPUs too.
    limits = [figure.gb_s for figure in within if figure]
    least = min([least, *limits])
    share = SHARES["pair"]
    return share * least, f"{share:.0%} of {least:g} GB/s that the adapters carry, {source}"


def ways(run: Mapping[str, Any]) -> str:
    """How the data went, in few words."""
    via = run.get("via") or {}
    details = {"Shared", "read", "direct"}
    named = sorted({"/".join(part for part in way.split("/") if part not in details) for way in via})
    if run.get("nvls"):
        named.insert(0, "NVLS")
    return ", ".join(named) or "unknown ways"


def over_sockets(run: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> bool:
    """RDMA devices are named for NCCL, and it takes TCP."""
    wants = any(
        node["variables"].get("NCCL_IB_HCA") and node["variables"].get("NCCL_IB_DISABLE", "0") in ("", "0")
        for node in nodes
    )
    return wants and any(way.startswith("NET/Socket") for way in run.get("via") or {})


def without_gpudirect(run: Mapping[str, Any]) -> bool:
    """RDMA, but by way of the processor's memory."""
    by_rdma = [way for way in run.get("via") or {} if way.startswith("NET/IB")]
    return bool(by_rdma) and not any("GDRDMA" in way for way in by_rdma)
