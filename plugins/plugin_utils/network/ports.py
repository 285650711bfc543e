"""Who talks to whom, on which port: the ports of vLLM 0.33, Ray 2.60, NCCL, Gloo and their neighbours as data.

A row is one kind of traffic. `sources` and `targets` name parts of a cluster, `port` where the number comes from. The
firewall computes its rules from the rows, the network preflight what it tries, the documentation its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EPHEMERAL = "ephemeral"

# What a port number may come from, beside a variable's name: these words, or the number itself.
WORDS = frozenset({EPHEMERAL, "none"})


@dataclass(frozen=True)
class Row:
    """One kind of traffic."""

    number: int
    part: str
    sources: str
    targets: str
    # A number, a variable, a range ("first-last" of either), "ephemeral", or "none".
    port: str
    protocol: str
    purpose: str
    pin: str
    # Whether this project starts what listens there. The other rows are kept so that the list is complete.
    used: bool = True

    def ports(self, values: Mapping[str, Any] | None = None) -> tuple[int, int] | None:
        """First and last port; None for a port that nobody can know beforehand."""
        if self.port in WORDS:
            return None
        first, _, last = self.port.partition("-")
        low = _number(first, values or {})
        high = _number(last, values or {}) if last else low
        return None if low is None or high is None else (low, high)


# Ports at which nodes hand on files, with the defaults of the roles whose they are.
FILE_PORTS = {"python_env_serve_port": 8790, "model_store_serve_port": 8791}
# What instances have in place of a variable of their own.
INSTANCE_PORTS = {"port": 8000, "master_port": 29501, "data_parallel_rpc_port": 29550}


def _number(word: str, values: Mapping[str, Any]) -> int | None:
    from ..inventory.cluster import RAY_PORTS  # noqa: PLC0415 - the inventory's validation uses the firewall's

    if word.isdigit():
        return int(word)
    value = values.get(word, {**RAY_PORTS, **INSTANCE_PORTS, **FILE_PORTS}.get(word))
    return None if value is None else int(value)


_MP, _NCCL, _PD, _RAY, _WATCH = "vLLM over several nodes", "NCCL, Gloo, RDMA", "prefill/decode", "Ray", "monitoring"

# fmt: off
MATRIX: tuple[Row, ...] = (
    Row(1, "endpoint", "clients", "api", "port", "tcp", "OpenAI API", "vllm_instances.<name>.port"),
    Row(2, "endpoint", "observability", "api", "port", "tcp", "metrics of vLLM", "vllm_instances.<name>.port"),
    Row(3, "administration", "admins", "all", "22", "tcp", "SSH", "firewall_ssh_ports"),
    Row(4, _MP, "engines", "api", "master_port", "tcp", "ranks meet", "vllm_instances.<name>.master_port"),
    Row(5, _MP, "engines", "engines", EPHEMERAL, "tcp", "message queues between ranks",
        "no option; the kernel's range"),
    Row(6, _MP, "engines", "api", "data_parallel_rpc_port", "tcp", "data-parallel ranks meet",
        "vllm_instances.<name>.data_parallel_rpc_port"),
    Row(7, _MP, "engines", "api", EPHEMERAL, "tcp", "data-parallel queues and coordinator",
        "no option; the kernel's range"),
    Row(8, _MP, "engines", "engines", EPHEMERAL, "tcp", "data- and expert-parallel groups",
        "VLLM_PORT only starts a scan"),
    Row(9, _MP, "clients", "api", "9256", "tcp", "supervisor of data-parallel servers", "a flag", used=False),
    Row(10, _MP, "engines", "engines", "29500-29510", "tcp", "data-parallel master, offline", "VLLM_DP_MASTER_PORT",
        used=False),
    Row(11, _NCCL, "engines", "engines", EPHEMERAL, "tcp", "NCCL bootstrap, sockets, RAS",
        "no option; the kernel's range"),
    Row(12, _NCCL, "local", "local", "28028", "tcp", "NCCL RAS client", "NCCL_RAS_ADDR"),
    Row(13, _NCCL, "engines", "engines", EPHEMERAL, "tcp", "Gloo", "no option; the kernel's range"),
    Row(14, _NCCL, "engines", "engines", "4791", "udp", "RoCEv2", "fixed; hardware RoCE bypasses this firewall"),
    Row(15, _NCCL, "engines", "engines", "none", "verbs", "InfiniBand", "no IP port"),
    Row(16, _PD, "decode", "prefill", "5600", "tcp", "NIXL side channel, plus the data-parallel index",
        "VLLM_NIXL_SIDE_CHANNEL_PORT", used=False),
    Row(17, _PD, "engines", "engines", EPHEMERAL, "tcp", "UCX data", "UCX_NET_DEVICES, UCX_TLS", used=False),
    Row(18, _PD, "engines", "engines", "8998", "tcp", "Mooncake bootstrap", "the connector's settings", used=False),
    Row(19, _PD, "engines", "engines", "none", "tcp", "kv_port, KV events, EC connector, offload",
        "the connector's settings", used=False),
    Row(20, _RAY, "ray", "ray_head", "ray_port", "tcp", "control store", "ray_port"),
    Row(21, _RAY, "ray", "ray", "ray_node_manager_port", "tcp", "node manager", "ray_node_manager_port"),
    Row(22, _RAY, "ray", "ray", "ray_object_manager_port", "tcp", "object manager", "ray_object_manager_port"),
    Row(23, _RAY, "ray", "ray", "ray_min_worker_port-ray_max_worker_port", "tcp", "workers and drivers",
        "ray_min_worker_port, ray_max_worker_port"),
    Row(24, _RAY, "ray", "ray", "ray_dashboard_agent_grpc_port", "tcp", "dashboard agent, gRPC",
        "ray_dashboard_agent_grpc_port"),
    Row(25, _RAY, "ray", "ray", "ray_dashboard_agent_listen_port", "tcp", "dashboard agent, HTTP",
        "ray_dashboard_agent_listen_port"),
    Row(26, _RAY, "ray", "ray", "ray_runtime_env_agent_port", "tcp", "runtime environment agent",
        "ray_runtime_env_agent_port"),
    Row(27, _WATCH, "observability", "ray", "ray_metrics_export_port", "tcp", "metrics of Ray",
        "ray_metrics_export_port"),
    Row(28, _WATCH, "observability", "ray_head", "ray_autoscaler_metrics_port", "tcp", "metrics of the autoscaler",
        "ray_autoscaler_metrics_port"),
    Row(28, _WATCH, "observability", "ray_head", "ray_dashboard_metrics_port", "tcp", "metrics of the dashboard",
        "ray_dashboard_metrics_port"),
    Row(29, _RAY, "local", "ray_head", "ray_dashboard_port", "tcp", "dashboard and jobs, on loopback",
        "ray_dashboard_port"),
    Row(30, _RAY, "clients", "ray_head", "ray_client_server_port", "tcp", "Ray Client; nobody here uses it",
        "ray_client_server_port", used=False),
    Row(31, _WATCH, "observability", "all", "9100", "tcp", "node exporter", "its flag"),
    Row(31, _WATCH, "observability", "all", "9400", "tcp", "dcgm-exporter", "its flag"),
    Row(32, "time", "cluster", "time", "123", "udp", "NTP", "base_time_serve"),
    Row(33, "files", "runtime", "runtime", "python_env_serve_port", "tcp", "releases, from node to node",
        "python_env_serve_port"),
    Row(33, "files", "runtime", "runtime", "model_store_serve_port", "tcp", "models, from node to node",
        "model_store_serve_port"),
)
# fmt: on


def pinned(values: Mapping[str, Any] | None = None) -> list[tuple[Row, int, int]]:
    """The rows whose ports are known, with first and last port."""
    found = []
    for row in MATRIX:
        ports = row.ports(values)
        if ports is not None:
            found.append((row, *ports))
    return found
