"""Builds the plan of the whole cluster, which is all that the roles know about it, from checked inventory variables."""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..hosts import nics
from ..hosts.fabric import LINK_LAYERS
from ..network import fabrics
from ..nvidia import gpu_fabric
from ..nvidia import request as nvidia
from ..planner.errors import PlannerError
from ..planner.growth import grow
from ..planner.plan import natural_key, plan
from ..planner.report import render_report
from ..planner.serve_args import serve_args, versions
from .contract import CONTRACT, SITE
from .model_files import (
    ConfigFile,
    check_model,
    check_trust,
    draft_place,
    fetched_model,
    model_path,
    moving_revision,
)
from .validate import Problem, check_host_names, not_set, show

# Variables of the role ray that the plan reads, with their defaults there: ports that Ray listens on.
RAY_PORTS = {
    "ray_port": 6379,
    "ray_node_manager_port": 6380,
    "ray_object_manager_port": 6381,
    "ray_runtime_env_agent_port": 6382,
    "ray_dashboard_agent_grpc_port": 6383,
    "ray_dashboard_agent_listen_port": 6384,
    "ray_metrics_export_port": 6385,
    "ray_dashboard_port": 8265,
    "ray_client_server_port": 10001,
    "ray_min_worker_port": 10100,
    "ray_max_worker_port": 10199,
    "ray_autoscaler_metrics_port": 44217,
    "ray_dashboard_metrics_port": 44227,
}
ConfigLoader = Callable[[str, Mapping[str, Any]], tuple[dict[str, Any] | None, list[Problem]]]


@dataclass
class Facts:
    """What cached facts of a host say, as far as the plan may use it."""

    addresses: dict[str, str] = field(default_factory=dict)
    # Of each address.
    prefixes: dict[str, int] = field(default_factory=dict)
    # Of the inventory: whom Ansible logs in as, where it does so by SSH.
    login: str = ""
    gpus: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Replica:
    """One engine of an instance: one `vllm serve` endpoint, one unit name."""

    name: str
    index: int
    nodes: list[str]
    gpus: Mapping[str, list[int]]
    # Added to the ports of the instance, since replicas may have their API server on the same node.
    offset: int

    @property
    def api(self) -> str:
        return self.nodes[0]


@dataclass
class Engine:
    """One instance on its way through the planner."""

    name: str
    spec: Mapping[str, Any]
    nodes: list[str]
    config: dict[str, Any] | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    # What the planner was given.
    offered: list[dict[str, Any]] = field(default_factory=list)
    request: dict[str, Any] = field(default_factory=dict)

    @property
    def variable(self) -> str:
        return f"vllm_instances.{self.name}"

    @property
    def replicas(self) -> list[Replica]:
        found = []
        servers: Counter[str] = Counter()
        for index, entry in enumerate(self.plan["replicas"]):
            nodes = list(entry["nodes"])
            name = f"{self.name}.r{index}" if index else self.name
            found.append(Replica(name, index, nodes, entry["gpus"], servers[nodes[0]]))
            servers[nodes[0]] += 1
        return found

    @property
    def used(self) -> list[str]:
        """Nodes that hold ranks, in the order of the replicas and their ranks."""
        return list(dict.fromkeys(host for entry in self.plan["replicas"] for host in entry["nodes"]))

    @property
    def gpus(self) -> dict[str, list[int]]:
        """All GPUs that the instance takes."""
        found: dict[str, list[int]] = {}
        for entry in self.plan["replicas"]:
            for host, indices in entry["gpus"].items():
                found.setdefault(host, []).extend(indices)
        return found

    @property
    def spans(self) -> bool:
        """Whether ranks of one replica are on several nodes."""
        return any(len(entry["nodes"]) > 1 for entry in self.plan["replicas"])

    @property
    def executor(self) -> str:
        return str(self.plan["distributed_executor_backend"])

    @property
    def data(self) -> int:
        """Data-parallel ranks inside each replica."""
        return int(self.plan.get("data_parallel_size") or 1)

    @property
    def port(self) -> int:
        return int(self.spec["port"])

    def meeting_port(self) -> tuple[str, int] | None:
        """The key of the port on which the nodes of a replica meet without Ray, and the port."""
        if self.executor != "mp" or not self.spans:
            return None
        key = "data_parallel_rpc_port" if self.data > 1 else "master_port"
        return key, int(self.spec[key])


class Builder:
    """Collects problems on the way, so that a user sees all of them at once."""

    def __init__(
        self,
        values: Mapping[str, Mapping[str, Any]],
        groups: Mapping[str, Iterable[str]],
        load_config: ConfigLoader,
        facts: Mapping[str, Facts] | None = None,
        require_addresses: bool = True,
        *,
        growth: float | None = None,
    ) -> None:
        self.values = values
        self.groups = {name: list(members) for name, members in groups.items()}
        self.load_config = load_config
        self.facts = facts or {}
        self.require_addresses = require_addresses
        self.growth = growth
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    # Variables

    def common(self, name: str, hosts: Iterable[str]) -> Any:
        """The value of a variable of the whole cluster; different values on two hosts are a problem."""
        first: tuple[str, Any] | None = None
        for host in hosts:
            value = self.values.get(host, {}).get(name)
            if value is None:
                continue
            if first is None:
                first = host, value
            elif first[1] is not value and first[1] != value:
                self.problems.append(
                    Problem(
                        host,
                        name,
                        show(value, name),
                        f"differs from {first[0]} ({show(first[1], name)})",
                        "set it once for the whole cluster, in group_vars/all",
                    )
                )
                break
        if first is not None:
            return first[1]
        return RAY_PORTS[name] if name in RAY_PORTS else CONTRACT[name].get("default")

    # Instances

    def engines(self, instances: Mapping[str, Any]) -> list[Engine]:
        found = []
        for name in sorted(instances, key=natural_key):
            spec = instances[name]
            variable = f"vllm_instances.{name}"
            nodes = self._members(variable, spec.get("nodes")) if isinstance(spec, Mapping) else None
            if not isinstance(spec, Mapping) or nodes is None or not isinstance(spec.get("model"), Mapping):
                continue
            problems = check_model(f"{variable}.model", spec["model"])
            trust, warnings = check_trust(variable, spec)
            self.problems += problems + trust
            self.warnings += warnings
            engine = Engine(name, spec, nodes)
            if not problems:
                config, problems = self.load_config(f"{variable}.model", spec["model"])
                self.problems += problems
                engine.config = config
            found.append(engine)
        return found

    def _members(self, variable: str, nodes: Any) -> list[str] | None:
        if nodes is None:
            return None
        wanted = [nodes] if isinstance(nodes, str) else list(nodes)
        members: list[str] = []
        for item in wanted:
            if item is None:
                return None
            if item in self.values:
                members.append(item)
            elif item not in self.groups:
                close = difflib.get_close_matches(str(item), [*self.groups, *self.values], n=1, cutoff=0.6)
                hint = f"did you mean {close[0]}? Otherwise " if close else ""
                self.problems.append(
                    Problem(
                        "",
                        f"{variable}.nodes",
                        show(item),
                        "is neither a group nor a host of the inventory",
                        f"{hint}define the group and put hosts in it",
                    )
                )
                return None
            elif not self.groups[item]:
                self.problems.append(
                    Problem(
                        "",
                        f"{variable}.nodes",
                        show(item),
                        "the group is empty",
                        f"put hosts in the group {item}, or name another",
                    )
                )
                return None
            else:
                members += self.groups[item]
        if not members:
            self.problems.append(
                Problem("", f"{variable}.nodes", show(nodes), "names no host", "name a group or hosts")
            )
            return None
        if isinstance(nodes, list) and len(set(wanted)) != len(wanted):
            self.problems.append(
                Problem("", f"{variable}.nodes", show(nodes), "names a host twice", "name each host once")
            )
            return None
        return sorted(set(members), key=natural_key)

    # GPUs

    def declared_gpus(self, host: str, needed: bool) -> list[dict[str, Any]]:
        """The GPUs of a host, one entry each."""
        declared = self.values.get(host, {}).get("gpus")
        if not declared:
            cached = self.facts.get(host, Facts()).gpus
            if cached and declared is None:
                self.warnings.append(f"{host}: gpus is not declared; the facts of the last run are used")
                return cached
            if needed:
                self.problems.append(
                    not_set(
                        host,
                        "gpus",
                        "the node runs an engine, but declares no GPUs",
                        "set gpus: {count: 8, name: NVIDIA H200, memory_total_mib: 143771} as nvidia-smi prints them",
                    )
                )
            return []
        entries = declared if isinstance(declared, list) else [declared]
        gpus: list[dict[str, Any]] = []
        for entry in entries:
            if not isinstance(entry, Mapping) or not entry.get("name") or not entry.get("memory_total_mib"):
                return []
            one = {"name": entry["name"], "memory_total_mib": entry["memory_total_mib"]}
            gpus += [dict(one) for _ in range(entry.get("count") or 1)]
        return gpus

    # Planning

    def plan_engines(self, engines: list[Engine], variant: str, version: str) -> list[Engine]:
        crowded = self._check_sharing(engines)
        taken: dict[str, dict[int, str]] = {}
        gpus = {
            host: self.declared_gpus(host, True)
            for engine in engines
            for host in engine.nodes
            if engine.config is not None
        }
        countless = [host for host in gpus if _without_count(self.values[host].get("gpus"))]
        if countless:
            self.warnings.append(f"{_listed(countless)}: gpus has no count, which means one GPU a node")
        planned = []
        for engine in engines:
            if engine.config is None or not all(gpus.get(host) for host in engine.nodes):
                continue
            # On a crowded node an engine is only held against its own pins, with every GPU to itself.
            busy: Mapping[str, Mapping[int, str]] = {} if engine.name in crowded else taken
            nodes = []
            for host in engine.nodes:
                free = [
                    {**gpu, "index": index} for index, gpu in enumerate(gpus[host]) if index not in busy.get(host, {})
                ]
                nodes.append({"name": host, "gpus": free, "inter_node": self._fabric(host)})
            owners = sorted({owner for node in engine.nodes for owner in busy.get(node, {}).values()}, key=natural_key)
            if owners and not any(node["gpus"] for node in nodes):
                self.problems.append(
                    Problem(
                        "",
                        f"{engine.variable}.nodes",
                        show(engine.spec["nodes"]),
                        f"every GPU of {_listed(engine.nodes)} is taken by {_listed(owners)}",
                        f"give {engine.name} nodes of its own, or pin smaller sizes of {owners[0]} (parallelism)",
                    )
                )
                continue
            engine.offered = nodes
            engine.request = {
                "objective": engine.spec.get("objective"),
                "context_length": engine.spec.get("context_length"),
                "concurrency": engine.spec.get("concurrency"),
                "parallelism": engine.spec.get("parallelism") or {},
                "executor": engine.spec.get("executor"),
                "disaggregation": engine.spec.get("disaggregation"),
                "speculative": engine.spec.get("speculative"),
                "args": _plan_args(engine.spec.get("args") or {}, variant),
                "environment": engine.spec.get("environment") or {},
                "variant": variant,
                "vllm_version": version,
                "draft_config": self._draft_config(engine),
            }
            try:
                engine.plan = plan(engine.config, nodes, **engine.request)
            except PlannerError as error:
                self.problems.append(self._planner_problem(engine, error, busy))
                continue
            if engine.name in crowded:
                continue
            for host, indices in engine.gpus.items():
                taken.setdefault(host, {}).update(dict.fromkeys(indices, engine.name))
            self.warnings += [f"{engine.name}: {text}" for text in engine.plan["warnings"]]
            planned.append(engine)
        return planned

    def _check_sharing(self, engines: list[Engine]) -> set[str]:
        """Instances that take every GPU of nodes which others use too: one problem for all that meet there."""
        crowded: set[str] = set()
        for group in _neighbours(engines):
            greedy = [engine for engine in group if not _sizes_pinned(engine)]
            if not greedy:
                continue
            crowded |= {engine.name for engine in greedy}
            users = Counter(host for engine in group for host in engine.nodes)
            hosts = sorted((host for host, number in users.items() if number > 1), key=natural_key)
            self.problems.append(
                Problem(
                    "",
                    f"{greedy[0].variable}.nodes",
                    show(greedy[0].spec["nodes"]),
                    f"{'two' if len(group) == 2 else len(group)} instances on the same GPUs: "
                    f"{_listed([engine.name for engine in group])} use {_listed(hosts)}, and an instance takes every "
                    f"GPU of its nodes unless its sizes are pinned (not pinned: "
                    f"{_listed([engine.name for engine in greedy])})",
                    "give each instance nodes of its own, or pin parallelism.tensor and parallelism.pipeline of each "
                    "so that they share",
                )
            )
        return crowded

    def _draft_config(self, engine: Engine) -> dict[str, Any] | None:
        """The config.json of the model that the drafter is, where it is one of its own."""
        place = draft_place(engine.spec)
        if place is None:
            return None
        config, problems = self.load_config(f"{engine.variable}.speculative", place)
        if problems:
            name = place["repo"]
            self.warnings.append(
                f"{engine.name}: the memory of the drafter {name} is not priced, since the controller has no "
                f"config.json of it: put it at model_configs/{name.replace('/', '__')}.json beside the inventory"
            )
        return config

    def _fabric(self, host: str) -> str:
        """What the planner may count on between nodes: without a word about RDMA, no more than TCP."""
        value = str(self.values.get(host, {}).get("fabric_type"))
        return value if value in LINK_LAYERS else "tcp"

    def _planner_problem(self, engine: Engine, error: PlannerError, taken: Mapping[str, Mapping[int, str]]) -> Problem:
        """Point at the key that the message speaks of."""
        key = error.key or "model"
        if key in ("model.config", "draft_config"):
            return self._config_problem(engine, error)
        host, _, name = key.removeprefix("nodes.").rpartition(".")
        if key.startswith("nodes.") and host in self.values:
            return Problem(host, name, show(self.values[host].get(name)), error.problem, error.remedy or "correct it")
        value: Any = engine.spec
        for part in key.split(".", 1):
            value = value.get(part) if isinstance(value, Mapping) else None
        busy = sorted({owner for host in engine.nodes for owner in taken.get(host, {}).values()}, key=natural_key)
        note = f" (other GPUs of these nodes are taken by {', '.join(busy)})" if busy else ""
        remedy = error.remedy or f"correct {engine.variable}.{key}"
        return Problem("", f"{engine.variable}.{key}", show(value, key), error.problem + note, remedy)

    @staticmethod
    def _config_problem(engine: Engine, error: PlannerError) -> Problem:
        """A value in a config.json: name the file that holds it, or the variable where it stands in the inventory."""
        own = error.key == "model.config"
        config = engine.config if own else engine.request["draft_config"]
        key = f"{engine.variable}.{'model.config' if own else 'speculative.model'}"
        if not isinstance(config, ConfigFile):
            return Problem("", key, "(its content)", error.problem, error.remedy or f"correct {key}")
        problem = error.problem.removeprefix("config.json").lstrip(": ")
        remedy = error.remedy or f"correct it in {config.file}"
        if own:
            return Problem("", key, config.file, problem, remedy)
        return Problem("", key, show(engine.spec["speculative"].get("model")), f"{config.file}: {problem}", remedy)

    # Addresses

    def addresses(self, reasons: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str | None]:
        """The cluster address of each host; `reasons` says why a host must have one."""
        found: dict[str, str | None] = {}
        for host in hosts:
            variables = self.values.get(host, {})
            address, interface = variables.get("cluster_address"), variables.get("cluster_interface")
            if not address and interface:
                address = self.facts.get(host, Facts()).addresses.get(str(interface))
            found[host] = _canonical(address)
            if found[host] or host not in reasons or address:
                continue
            if not self.require_addresses:
                self.warnings.append(f"{host}: cluster_address is not known yet; the name stands for it in this plan")
                continue
            advice = (
                "set cluster_address to the IP address of this interface, or gather the host's facts first"
                if interface
                else "set cluster_address to its IP address on the cluster network, and cluster_interface to the "
                "interface that holds it (host variables)"
            )
            self.problems.append(
                not_set(
                    host,
                    "cluster_address",
                    f"{reasons[host]}; on a multi-homed node the address is never guessed"
                    + (f" and no facts of cluster_interface {interface} are cached" if interface else ""),
                    advice,
                )
            )
        self._check_families(found)
        self._check_hosts_part(found)
        if not self.require_addresses:
            # Only to be looked at: a deployment asks for the addresses.
            found.update({host: host for host in reasons if found.get(host) is None})
        return found

    def _check_hosts_part(self, addresses: Mapping[str, str | None]) -> None:
        """Addresses that stand for a network, or for all in it, by what is known of the nodes' interfaces."""
        own = {
            host: ipaddress.ip_interface(f"{address}/{self.facts[host].prefixes[address]}").network
            for host, address in addresses.items()
            if address and address in self.facts.get(host, Facts()).prefixes
        }
        for host, address in addresses.items():
            # Where a host has no such address, the others of its network tell.
            others = [network for network in set(own.values()) if address and ipaddress.ip_address(address) in network]
            network = own.get(host) or max(others, key=lambda each: each.prefixlen, default=None)
            if address and network and (kind := nics.reserved(address, network.prefixlen)):
                self.problems.append(
                    Problem(
                        host,
                        "cluster_address",
                        address,
                        f"is {kind} of {network}, which no host can have",
                        "give the IP address of the node's interface on the cluster network",
                    )
                )

    def _check_families(self, addresses: Mapping[str, str | None]) -> None:
        first: tuple[str, str] | None = None
        for host, address in addresses.items():
            if address is None:
                continue
            if first is None:
                first = host, address
            elif (":" in address) != (":" in first[1]):
                self.problems.append(
                    Problem(
                        host,
                        "cluster_address",
                        address,
                        f"is of another family than that of {first[0]} ({first[1]})",
                        "give all nodes IPv4 addresses, or all of them IPv6 addresses",
                    )
                )
                return

    def check_names(self, engines: list[Engine]) -> None:
        """Further replicas have unit names of their own, which no other instance may have."""
        owners = {engine.name: engine for engine in engines}
        for engine in engines:
            for replica in engine.replicas[1:]:
                if replica.name in owners:
                    self.problems.append(
                        Problem(
                            "",
                            f"vllm_instances.{replica.name}",
                            show(owners[replica.name].spec.get("nodes")),
                            f"its unit vllm@{replica.name}.service is that of a replica of {engine.name}",
                            "give the instance another name",
                        )
                    )

    # Driver

    def driver_request(self, host: str, variant: str) -> dict[str, Any]:
        """The host's variables that decide what of NVIDIA's software it gets, as far as they are set."""
        values = self.values[host]
        given = {name: values[name] for name in nvidia.DEFAULTS if values.get(name) is not None}
        return given | {"python_env_variant": variant}

    def check_driver(self, engines: list[Engine], variant: str) -> None:
        """What can be told of these variables before the hosts are looked at."""
        for host in dict.fromkeys(host for engine in engines for host in engine.used) if variant != "cpu" else ():
            wishes, faults = nvidia.check(self.driver_request(host, variant))
            for fault in faults + nvidia.too_old(wishes) + gpu_fabric.check_variables(self.values[host]):
                shown = show(fault.value, fault.variable)
                self.problems.append(Problem(host, fault.variable, shown, fault.message, fault.remedy))

    def check_network(self, addresses: Mapping[str, str | None]) -> None:
        """What variables of the roles base, firewall and ssh show without a look at the hosts."""
        beside = [host for group in ("gateway", "observability") for host in self.groups.get(group, ())]
        self.problems += check_host_names([*addresses, *beside])
        # Late: the ports of the firewall's matrix are those of Ray, above.
        from ..network import offline  # noqa: PLC0415

        logins = {host: view.login for host, view in self.facts.items() if view.login}
        groups = self.groups if self.require_addresses else {}
        self.problems += offline.problems(self.values, addresses, groups, logins)

    def check_release_builder(self, addresses: Mapping[str, str | None]) -> None:
        """One that is no node of the cluster has no address in the plan, so its own variables must say it."""
        for builder in dict.fromkeys(str(self.values[node].get("python_env_builder", "")) for node in addresses):
            if builder not in self.values or builder in addresses:
                continue
            address = self.values[builder].get("cluster_address")
            if not address:
                self.problems.append(
                    Problem(
                        builder,
                        "cluster_address",
                        "(not set)",
                        "builds the release (python_env_builder), but the nodes do not know where to fetch it",
                        "set it to the IP address at which they reach this host",
                    )
                )
            self._check_families({**addresses, builder: address})

    # Ports

    def ray_ports(self, ray_nodes: list[str]) -> dict[int, str]:
        """Every port that Ray may listen on, and the variable that says so."""
        ports = {name: int(self.common(name, ray_nodes)) for name in RAY_PORTS}
        low, high = ports.pop("ray_min_worker_port"), ports.pop("ray_max_worker_port")
        # Bounded: whatever an inventory says, there are no more ports than these.
        taken = dict.fromkeys(range(max(low, 1), min(high, 65535) + 1), f"ray_min_worker_port {low} to {high}")
        return taken | {port: name for name, port in ports.items()}

    def check_ports(self, engines: list[Engine], ray_nodes: list[str]) -> None:
        ray_ports = self.ray_ports(ray_nodes) if ray_nodes else {}
        owners: dict[tuple[str, int], tuple[Engine, str]] = {}
        on_ray = set(ray_nodes)
        for engine in engines:
            listening = [("port", engine.port)]
            meeting = engine.meeting_port()
            if meeting is not None:
                listening.append(meeting)
            # Further ranks too: their node may be the first of the instance after the next change.
            beside = [host for host in engine.used if host in on_ray]
            for replica, (key, first) in itertools.product(engine.replicas, listening):
                port, api = first + replica.offset, replica.api
                if port > 65535:
                    self.problems.append(
                        Problem(
                            "",
                            f"{engine.variable}.{key}",
                            str(first),
                            f"the replicas on {api} take the ports from {first} up, beyond 65535",
                            f"lower {key}",
                        )
                    )
                    break
                if beside and port in ray_ports:
                    self.problems.append(
                        Problem(
                            "",
                            f"{engine.variable}.{key}",
                            str(port),
                            f"is a port of Ray, which runs on {beside[0]}: {ray_ports[port]}",
                            f"give {engine.name} another {key}",
                        )
                    )
                other, other_key = owners.setdefault((api, port), (engine, key))
                if other is engine and other_key == key:
                    continue
                self.problems.append(
                    Problem(
                        "",
                        f"{engine.variable}.{key}",
                        str(port),
                        f"duplicate port on {api}: {other.variable}.{other_key} is {port} too",
                        f"give {engine.name} another {key}",
                    )
                )

    # Ray

    def ray(self, engines: list[Engine]) -> tuple[str | None, list[str]]:
        """Head and workers."""
        heads = self.groups.get("ray_head", [])
        if len(heads) > 1:
            self.problems.append(
                Problem(
                    "",
                    "ray_head",
                    ", ".join(heads),
                    f"the group has {len(heads)} hosts; a Ray cluster has one head",
                    "leave one host in the group ray_head",
                )
            )
        users = [engine for engine in engines if engine.executor == "ray"]
        if not users:
            if heads or self.groups.get("ray_workers"):
                self.warnings.append("no instance uses Ray: the groups ray_head and ray_workers have no effect")
            return None, []
        needed = sorted({host for engine in users for host in engine.used}, key=natural_key)
        head = heads[0] if heads else users[0].used[0]
        workers = self.groups.get("ray_workers") or []
        if workers:
            outside = [host for host in needed if host not in workers and host != head]
            for host in outside:
                self.problems.append(
                    Problem(
                        host,
                        "ray_workers",
                        show(workers),
                        "an instance over Ray uses this node, which is in neither ray_head nor ray_workers",
                        f"put {host} in the group ray_workers, or leave the group out: it is derived then",
                    )
                )
        else:
            workers = needed
        self._check_ray_neighbours(engines)
        return head, sorted({host for host in workers if host != head}, key=natural_key)

    def _check_ray_neighbours(self, engines: list[Engine]) -> None:
        ray_nodes = {host: engine.name for engine in engines if engine.executor == "ray" for host in engine.used}
        for engine in engines:
            both = [host for host in engine.used if host in ray_nodes] if engine.executor == "mp" else []
            if both:
                self.problems.append(
                    Problem(
                        "",
                        f"{engine.variable}.executor",
                        show(engine.spec.get("executor")),
                        f"runs without Ray on {both[0]}, whose GPUs Ray hands out to {ray_nodes[both[0]]}",
                        "give both instances the same executor, or nodes of their own",
                    )
                )

    # All together

    def build(self) -> dict[str, Any]:
        """The plan; only valid when no problem was found."""
        everybody = sorted(self.values, key=natural_key)
        if not everybody:
            self.problems.append(
                Problem("", "inventory", "(empty)", "names no host", "give one with -i, such as -i inventories/prod")
            )
            return {}
        instances = self.common("vllm_instances", everybody) or {}
        engines = self.engines(instances)
        members = {host for engine in engines for host in engine.nodes}
        for group in ("vllm_nodes", "ray_head", "ray_workers"):
            members |= {host for host in self.groups.get(group, ()) if host in self.values}
        nodes = sorted(members, key=natural_key)
        variant = str(self.common("python_env_variant", nodes or everybody))
        version = str(self.common("python_env_vllm_version", nodes or everybody))
        self.common("ironrack_mirror", everybody)
        self.common("host_reboot_serial", everybody)
        planned = self.plan_engines(engines, variant, version) if self._version_known(version) else []
        head, workers = self.ray(planned)
        reasons = {}
        for engine in planned:
            for replica in engine.replicas:
                for host in replica.nodes if len(replica.nodes) > 1 else ():
                    reasons[host] = f"the instance {engine.name} spans {len(replica.nodes)} nodes"
            if fetched_model(engine.spec["model"]) and len(engine.used) > 1:
                for host in engine.used:
                    reasons.setdefault(host, f"the model of the instance {engine.name} goes from node to node")
        for host in [head, *workers] if head else ():
            reasons.setdefault(str(host), "the node is part of the Ray cluster")
        addresses = self.addresses(reasons, nodes)
        self.check_names(planned)
        self.check_driver(planned, variant)
        worlds = [(engine.name, replica.nodes) for engine in planned for replica in engine.replicas]
        self.problems += fabrics.problems({host: self.values[host] for host in nodes}, worlds)
        self.check_network(addresses)
        ray_nodes = [head, *workers] if head else []
        self.check_ports(planned, ray_nodes)
        self.check_release_builder(addresses)
        if self.problems:
            return {}
        return self._assemble(
            planned, nodes, addresses=addresses, ray=(head, workers), variant=variant, version=version
        )

    def _version_known(self, version: str) -> bool:
        try:
            serve_args({}, version)
        except PlannerError:
            self.problems.append(
                Problem(
                    "",
                    "python_env_vllm_version",
                    version,
                    "the flags of this version of vLLM are not known",
                    f"use one of {', '.join(versions())}",
                )
            )
            return False
        return True

    def _assemble(
        self,
        engines: list[Engine],
        nodes: list[str],
        *,
        addresses: Mapping[str, str | None],
        ray: tuple[str | None, list[str]],
        variant: str,
        version: str,
    ) -> dict[str, Any]:
        head, workers = ray
        hosts: dict[str, dict[str, Any]] = {host: {"ray": None, "instances": []} for host in nodes}
        ray_gpus: dict[str, int] = {}
        described = {}
        for engine in engines:
            described[engine.name] = self._describe(engine, addresses, hosts, variant, version)
            if engine.executor == "ray":
                for host, indices in engine.gpus.items():
                    ray_gpus[host] = ray_gpus.get(host, 0) + len(indices)
        if head:
            for host in [head, *workers]:
                # Only what is planned: Ray packs an engine where it finds room, so spare GPUs would move its ranks.
                hosts[host]["ray"] = {"role": "head" if host == head else "worker", "num_gpus": ray_gpus.get(host, 0)}
        api = {replica.api for engine in engines for replica in engine.replicas}
        running = {host for host in nodes if hosts[host]["instances"]} | {
            host for engine in engines for host in engine.used
        }
        described_nodes = {}
        for host in nodes:
            groups = ["ironrack_nodes"]
            if hosts[host]["ray"]:
                # Other names than those that a user may declare: an earlier plan must not look like a declaration.
                groups.append("ironrack_ray_head" if host == head else "ironrack_ray_workers")
            if host in running:
                groups.append("ironrack_engines")
                if variant != "cpu":
                    groups.append("ironrack_gpu")
            if host in api:
                groups.append("ironrack_api")
            if len(groups) > 1:
                groups.append("ironrack_runtime")
            described_nodes[host] = {
                "address": addresses[host],
                "interface": self.values[host].get("cluster_interface"),
                "gpus": self.declared_gpus(host, False) if self.values[host].get("gpus") else self.facts_gpus(host),
                "nvidia": self.driver_request(host, variant),
                "groups": groups,
            }
        result: dict[str, Any] = {
            "site": dict(SITE),
            "nodes": described_nodes,
            "hosts_entries": [
                {"address": addresses[host], "names": [host]} for host in nodes if addresses[host] is not None
            ],
            "ray": None
            if head is None
            else {
                "head": head,
                "address": _endpoint(addresses[head], int(self.common("ray_port", [head, *workers]))),
                "workers": workers,
                "total_gpus": sum(ray_gpus.values()),
            },
            "runtime": {"variant": variant, "vllm_version": version, "ray": head is not None},
            "instances": described,
            "hosts": hosts,
            "warnings": list(dict.fromkeys(self.warnings)),
        }
        result["report"] = render_report(result)
        result = {"digest": digest(result), **result}
        if self.growth is not None:
            # A question beside the plan, so no part of what its digest names.
            result["growth"] = {
                engine.name: grow(engine.config or {}, engine.offered, engine.request, engine.plan, self.growth)
                for engine in engines
            }
        return result

    def facts_gpus(self, host: str) -> list[dict[str, Any]]:
        return list(self.facts.get(host, Facts()).gpus)

    def _describe(
        self,
        engine: Engine,
        addresses: Mapping[str, str | None],
        hosts: dict[str, dict[str, Any]],
        variant: str,
        version: str,
    ) -> dict[str, Any]:
        spec = engine.spec
        path = str(model_path(spec["model"], SITE["state_dir"]))
        if moving := moving_revision(spec["model"]):
            given = f"is {moving}" if spec["model"].get("revision") else f"is not set, which means {moving}"
            self.warnings.append(
                f"{engine.name}: model.revision {given}: the nodes keep the commit to which it leads at the first "
                "fetch, and other sites may get another one. Pin it: set model.revision to that commit (40 hexadecimal "
                "digits)"
            )
        replicas: list[dict[str, Any]] = []
        for replica in engine.replicas:
            url = f"http://{_endpoint(addresses[replica.api] or '127.0.0.1', engine.port + replica.offset)}"
            role = "ray" if engine.executor == "ray" else "headless"
            world = [
                {"node": host, "rank": rank, "role": role if rank else "api"} for rank, host in enumerate(replica.nodes)
            ]
            replicas.append(
                {
                    "name": replica.name,
                    "api_node": replica.api,
                    "url": url,
                    "port": engine.port + replica.offset,
                    "world": world,
                }
            )
            self._place(
                engine, replica, replicas[-1], path, addresses=addresses, hosts=hosts, runtime=(variant, version)
            )
        first = replicas[0]
        return {
            "executor": engine.executor,
            "api_node": first["api_node"],
            "url": first["url"],
            "port": engine.port,
            "model_path": path,
            # What the nodes fetch to that path; nothing where the user brings it.
            "model": fetched_model(spec["model"]),
            "context_length": engine.plan["max_model_len"],
            "tensor_parallel_size": engine.plan["tensor_parallel_size"],
            "pipeline_parallel_size": engine.plan["pipeline_parallel_size"],
            "data_parallel_size": engine.data,
            "replicas": replicas,
            # Every node that has a part, with the first of its roles.
            "world": list({item["node"]: item for entry in reversed(replicas) for item in entry["world"]}.values()),
            "plan": engine.plan,
        }

    def _place(
        self,
        engine: Engine,
        replica: Replica,
        described: Mapping[str, Any],
        path: str,
        *,
        addresses: Mapping[str, str | None],
        hosts: dict[str, dict[str, Any]],
        runtime: tuple[str, str],
    ) -> None:
        """Give each node of a replica the unit that it runs."""
        variant, version = runtime
        several = len(replica.nodes) > 1 and engine.executor != "ray"
        meeting = engine.meeting_port()
        ranks_a_node = engine.data // len(replica.nodes) if several else engine.data
        for member in described["world"]:
            host, rank = member["node"], member["rank"]
            if member["role"] == "ray":
                continue
            environment = dict(engine.spec.get("environment") or {})
            partition = engine.plan.get("pp_layer_partition")
            if partition:
                environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, partition))
            indices = replica.gpus[host]
            if engine.executor == "mp" and variant != "cpu" and len(indices) < len(self.declared_gpus(host, False)):
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
            spread: dict[str, Any] = {}
            if several and meeting is not None:
                port = meeting[1] + replica.offset
                spread = {"nnodes": len(replica.nodes), "node_rank": rank, "master_addr": addresses[replica.api]}
                spread["master_port"] = port
                if engine.data > 1:
                    spread |= {
                        "data_parallel_size_local": ranks_a_node,
                        "data_parallel_start_rank": rank * ranks_a_node,
                    }
            hosts[host]["instances"].append(
                {
                    "name": replica.name,
                    "instance": engine.name,
                    "replica": replica.index,
                    "role": member["role"],
                    "executor": engine.executor,
                    "url": described["url"],
                    "api_node": replica.api,
                    "world": described["world"],
                    "meeting_port": spread["master_port"] if spread and engine.data == 1 else None,
                    "args": serve_args(
                        engine.plan,
                        version,
                        model=path,
                        served_model_name=engine.name,
                        host=_listen(addresses[replica.api]),
                        port=engine.port + replica.offset,
                        **spread,
                    ),
                    "environment": environment,
                    "needs_ray_gpus": sum(map(len, replica.gpus.values())) if engine.executor == "ray" else 0,
                }
            )


def build(
    values: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Iterable[str]],
    load_config: ConfigLoader,
    facts: Mapping[str, Facts] | None = None,
    require_addresses: bool = True,
    *,
    growth: float | None = None,
) -> tuple[dict[str, Any], list[Problem]]:
    """The plan of the cluster, or the problems that prevent it; `growth` asks what that many times the load needs."""
    builder = Builder(values, groups, load_config, facts, require_addresses, growth=growth)
    result = builder.build()
    return result, list(dict.fromkeys(builder.problems))


def digest(value: Any) -> str:
    """SHA-256 of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def facts_view(host_facts: Any, inventory: str = "") -> Facts:
    """What the plan may use of the facts `ironrack_host` of a host, unless they come from another inventory.

    A fact cache knows hosts by name only, and two sites may give the same name to different hosts.
    """
    view = Facts()
    if not isinstance(host_facts, Mapping) or (host_facts.get("inventory") or "") != inventory:
        return view
    nics = host_facts.get("nics")
    for nic in nics if isinstance(nics, list) else ():
        entries = nic.get("addresses") if isinstance(nic, Mapping) else None
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, Mapping) or entry.get("scope") not in ("global", "site"):
                continue
            address = _canonical(entry.get("address"))
            if address:
                view.addresses.setdefault(str(nic["name"]), address)
                if isinstance(entry.get("prefix"), int):
                    view.prefixes[address] = entry["prefix"]
    gpus = host_facts.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, Mapping) and gpu.get("name") and isinstance(gpu.get("memory_total_mib"), int):
            view.gpus.append({"name": str(gpu["name"]), "memory_total_mib": gpu["memory_total_mib"]})
    return view


def _canonical(address: Any) -> str | None:
    try:
        return str(ipaddress.ip_address(str(address))) if address else None
    except ValueError:
        return None


def _listen(address: str | None) -> str:
    """Every address of the node: the firewall and the proxy decide who reaches it."""
    return "::" if address and ":" in address else "0.0.0.0"  # noqa: S104


def _endpoint(address: str | None, port: int) -> str:
    return f"[{address}]:{port}" if address and ":" in address else f"{address}:{port}"


def _without_count(gpus: Any) -> bool:
    """A single entry without a number; a list says by its length how many there are."""
    return isinstance(gpus, Mapping) and gpus.get("count") is None


def _plan_args(args: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """On CPU the utilization flag would be a share of the machine's memory: never emitted."""
    if variant != "cpu":
        return dict(args)
    return {key: value for key, value in args.items() if key.replace("_", "-").lstrip("-") != "gpu-memory-utilization"}


def _sizes_pinned(engine: Engine) -> bool:
    pins = engine.spec.get("parallelism") or {}
    return bool(pins.get("tensor") and pins.get("pipeline"))


def _neighbours(engines: Iterable[Engine]) -> list[list[Engine]]:
    """Instances that share nodes, directly or through others, in their order; those that share none are left out."""
    groups: list[tuple[set[str], list[Engine]]] = []
    for engine in engines:
        hosts, members, apart = set(engine.nodes), [], []
        for group in groups:
            if hosts.isdisjoint(group[0]):
                apart.append(group)
            else:
                hosts |= group[0]
                members += group[1]
        groups = [*apart, (hosts, [*members, engine])]
    return [sorted(members, key=lambda each: natural_key(each.name)) for _, members in groups if len(members) > 1]


def _listed(names: Sequence[str], limit: int = 16) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
