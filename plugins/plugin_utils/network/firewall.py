"""The firewall of a node: what the plan and the groups let in, as rules. Everything else is dropped.

`trusted_cluster` lets every TCP port in from the nodes of the cluster on the cluster's interface, since NCCL, Gloo and
ZMQ take ports that nobody can pin. `strict_ports` lists ports instead, and narrows the kernel's range for the rest.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..planner.plan import natural_key
from .ports import EPHEMERAL, MATRIX, Row

MODES = ("off", "trusted_cluster", "strict_ports")
# The source of a rule that lets in whoever was connected when rules changed.
PRESENT = "present"
Ports = list[list[int]]

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_WORDS = {"yes": True, "true": True, "on": True, "1": True, "no": False, "false": False, "off": False, "0": False}
# A name, and no wildcard of nft's.
_INTERFACE = re.compile(r"[A-Za-z0-9_.@-]{1,15}")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
# Below this no kernel range may begin: the pinned ports of Ray and vLLM and those of the system live there.
_LOWEST_EPHEMERAL = 32768
_SMALLEST_RANGE = 4096
DEFAULTS: dict[str, Any] = {
    "mode": "off",
    "admin_networks": [],
    "client_networks": [],
    "monitoring_networks": [],
    "ssh_ports": [22],
    "gateway_ports": [443],
    "ephemeral_ports": "50000-60999",
    "trusted_interfaces": [],
    "extra": [],
    # Of other roles: ssh_between_nodes, base_time_serve.
    "ssh_between_nodes": False,
    "time_serve": False,
    "confirm_seconds": 60,
}


# The names of a cluster are put in order for each rule of each node.
_natural = lru_cache(maxsize=8192)(natural_key)


class FirewallError(ValueError):
    """Names what is wrong with the variables of the firewall, and the remedy; one line a problem."""


def _port_range(value: Any) -> list[int] | None:
    """[first, last] of a number or "first-last"; None for what is neither."""
    found = _RANGE.fullmatch(str(value).strip())
    if not found or isinstance(value, bool):
        return None
    low = int(found[1])
    high = int(found[2] or low)
    return [low, high] if 1 <= low <= high <= 65535 else None


def _check_networks(variable: str, value: Any) -> list[str]:
    if value is not None and not isinstance(value, (list, tuple)):
        return [f"{variable} = {value}: is not a list -> write it as [10.20.0.0/16]"]
    problems = []
    for entry in value or []:
        try:
            # Of a zone, Python's versions think differently.
            network = ipaddress.ip_network(str(entry).partition("%")[0])
        except ValueError as error:
            hint = "write it as 10.20.0.0/16, 203.0.113.7 or 2001:db8::/48"
            if "host bits" in str(error):
                hint = f"write {ipaddress.ip_network(str(entry), strict=False)}, or a single address without /"
            problems.append(f"{variable} = {entry}: is not a network -> {hint}")
            continue
        if "%" in str(entry):
            problems.append(
                f"{variable} = {entry}: names a zone, which no firewall knows -> write {network.network_address}"
            )
        elif isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
            length = network.prefixlen - 96
            inside = ipaddress.ip_network((int(network.network_address) & 0xFFFFFFFF, length))
            problems.append(
                f"{variable} = {entry}: is an IPv4 network in IPv6, from which no packet comes -> write {inside}"
            )
        elif network.is_multicast:
            problems.append(
                f"{variable} = {entry}: is multicast, from which no packet comes -> write the network of the senders"
            )
    return problems


def _check_extra(entries: Iterable[Any]) -> list[str]:
    problems = []
    for number, entry in enumerate(entries):
        variable = f"firewall_extra[{number}]"
        if not isinstance(entry, Mapping):
            problems.append(f"{variable} = {entry}: is not a dictionary -> give from, ports and protocol")
            continue
        unknown = sorted(set(entry) - {"from", "ports", "protocol", "interface", "purpose"})
        if unknown:
            problems.append(
                f"{variable}.{unknown[0]}: is not a key -> the keys are from, ports, protocol, interface, purpose"
            )
        if not entry.get("from"):
            problems.append(f"{variable}.from: is missing -> list networks; 0.0.0.0/0 and ::/0 stand for everybody")
        else:
            problems += _check_networks(f"{variable}.from", entry["from"])
        if not entry.get("ports"):
            problems.append(f"{variable}.ports: is missing -> list ports, as in [9000, 9100-9110]")
        problems += [
            f"{variable}.ports = {port}: is no port -> write 9000 or 9100-9110"
            for port in entry.get("ports") or []
            if _port_range(port) is None
        ]
        if entry.get("protocol", "tcp") not in ("tcp", "udp"):
            problems.append(f"{variable}.protocol = {entry['protocol']}: is neither tcp nor udp -> choose one of them")
        if entry.get("interface") and not _INTERFACE.fullmatch(str(entry["interface"])):
            problems.append(
                f"{variable}.interface = {entry['interface']}: is not the name of an interface -> correct it"
            )
    return problems


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    complete = {**DEFAULTS, **settings}
    # What YAML makes of an `off` without quotes.
    if complete["mode"] in (False, "False"):
        complete["mode"] = "off"
    # What -e makes of true and false.
    if str(complete["time_serve"]).lower() in _WORDS:
        complete["time_serve"] = _WORDS[str(complete["time_serve"]).lower()]
    return complete


def check(settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with the variables by themselves."""
    settings = _complete(settings)
    if settings["mode"] not in MODES:
        return [f"firewall_mode = {settings['mode']}: is not known -> choose one of {', '.join(MODES)}"]
    problems = []
    for name in ("admin_networks", "client_networks", "monitoring_networks"):
        problems += _check_networks(f"firewall_{name}", settings[name])
    if not isinstance(settings["time_serve"], bool):
        problems += _check_networks("base_time_serve", settings["time_serve"])
    for name in ("ssh_ports", "gateway_ports"):
        if not isinstance(settings[name], (list, tuple)):
            problems.append(f"firewall_{name} = {settings[name]}: is not a list -> write it as {DEFAULTS[name]}")
            continue
        for port in settings[name]:
            found = _port_range(port)
            if found is None or found[0] != found[1]:
                problems.append(f"firewall_{name} = {port}: is no port -> write a number from 1 to 65535")
    if not settings["ssh_ports"]:
        problems.append(
            "firewall_ssh_ports = []: nobody could administer the node -> list the ports of sshd, as in [22]"
        )
    if settings["gateway_ports"] in ([], ()):
        problems.append(
            "firewall_gateway_ports = []: nobody could reach the endpoint -> list the ports of the gateway's proxy, as"
            " in [443]; firewall_client_networks says who may reach them"
        )
    for name in settings["trusted_interfaces"] or []:
        if not _INTERFACE.fullmatch(str(name)):
            problems.append(f"firewall_trusted_interfaces = {name}: is not the name of an interface -> correct it")
    found = _port_range(settings["ephemeral_ports"])
    if found is None:
        problems.append(
            f"firewall_ephemeral_ports = {settings['ephemeral_ports']}: is no range -> write it as 50000-60999"
        )
    elif found[0] < _LOWEST_EPHEMERAL or found[1] - found[0] + 1 < _SMALLEST_RANGE:
        problems.append(
            f"firewall_ephemeral_ports = {settings['ephemeral_ports']}: begins below {_LOWEST_EPHEMERAL}, where pinned"
            f" ports are, or has fewer than {_SMALLEST_RANGE} ports, which NCCL and Ray use up -> take 50000-60999"
        )
    seconds = settings["confirm_seconds"]
    if isinstance(seconds, bool) or not str(seconds).isdigit() or not 15 <= int(seconds) <= 600:
        problems.append(
            f"firewall_confirm_seconds = {seconds}: is not between 15 and 600 -> a fresh connection needs some seconds,"
            f" and somebody who is locked out should not wait long; take 60"
        )
    return problems + _check_extra(settings["extra"])


class _Cluster:
    """Who is who, by the plan and the groups."""

    def __init__(
        self, plan: Mapping[str, Any], groups: Mapping[str, Sequence[str]], addresses: Mapping[str, str | None]
    ) -> None:
        self.plan = plan
        self.nodes: Mapping[str, Any] = plan["nodes"]
        self.gateway = list(groups.get("gateway") or [])
        self.observability = list(groups.get("observability") or [])
        self.addresses = {host: address for host, address in addresses.items() if address}
        self.addresses |= {host: node["address"] for host, node in self.nodes.items() if node.get("address")}
        ray = plan.get("ray")
        self.ray_head = ray["head"] if ray else None
        self.ray = [ray["head"], *ray["workers"]] if ray else []
        self._parts: dict[str, list[Mapping[str, Any]]] = {}
        for name, instance in plan["instances"].items():
            for replica in instance["replicas"]:
                part = {**replica, "executor": instance["executor"], "instance": name}
                for host in dict.fromkeys(member["node"] for member in replica["world"]):
                    self._parts.setdefault(host, []).append(part)

    def of(self, hosts: Iterable[str]) -> list[str]:
        """The addresses of hosts that have one."""
        return [self.addresses[host] for host in sorted(set(hosts), key=_natural) if host in self.addresses]

    def missing(self) -> list[str]:
        return [
            f"cluster_address = (not set) ({host}): the nodes' firewalls must know who the group {group} is -> set"
            f" cluster_address of {host}, the address from which the nodes see it"
            for group, hosts in (("gateway", self.gateway), ("observability", self.observability))
            for host in hosts
            # A single machine that has every part talks to itself over loopback.
            if host not in self.addresses and {*self.nodes} != {host}
        ]

    def parts(self, host: str) -> list[Mapping[str, Any]]:
        """Replicas that run on the host."""
        return self._parts.get(host, [])


def _rule(purpose: str, source: str, networks: Sequence[str], ports: Ports | None, **more: Any) -> dict[str, Any]:
    return {
        "rows": more.get("rows", []),
        "purpose": purpose,
        "source": source,
        # Two families in one list; where nothing is named, nobody is let in.
        "networks": list(dict.fromkeys(networks)),
        "interface": more.get("interface"),
        "protocol": more.get("protocol", "tcp"),
        # None for all of them; an empty list lets nothing in.
        "ports": ports,
    }


def _members(cluster: _Cluster, host: str, row: Row, values: Mapping[str, Any]) -> tuple[list[str], Ports]:
    """In strict mode: the nodes that a row lets in at this host, and the ports."""
    listed = row.ports(values)
    pair = [list(listed)] if listed else []
    if row.part == "Ray":
        on = host in cluster.ray if row.targets == "ray" else host == cluster.ray_head
        return (cluster.ray, pair) if on and row.sources == "ray" else ([], [])
    parts = cluster.parts(host)
    several = [part for part in parts if len(part["world"]) > 1]
    nodes = [member["node"] for part in several for member in part["world"]]
    if row.port == EPHEMERAL or row.protocol == "udp":
        return nodes, pair
    # Ports on which the ranks of one replica meet: at its first node.
    ports = []
    for entry in cluster.plan["hosts"].get(host, {}).get("instances", []):
        if entry["role"] == "api" and row.port in ("master_port", "data_parallel_rpc_port"):
            arguments = list(map(str, entry["args"]))
            ports += _argument_ports(arguments, "--" + row.port.replace("_", "-"))
    return (nodes, ports) if ports else ([], [])


def _argument_ports(arguments: Sequence[str], flag: str) -> Ports:
    found = []
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == flag:
            number = value if equals else arguments[position + 1]
            found.append([int(number), int(number)])
    return found


def _api_ports(cluster: _Cluster, host: str) -> Ports:
    ports = {int(part["port"]) for part in cluster.parts(host) if part["api_node"] == host}
    return [[port, port] for port in sorted(ports)]


def _between_nodes(
    cluster: _Cluster, host: str, interface: str, settings: Mapping[str, Any], values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What other nodes of the cluster may reach."""
    peers = cluster.of(cluster.nodes)
    if host not in cluster.nodes or len(peers) < 2:
        return []
    if settings["mode"] == "trusted_cluster":
        trusted = {row.number for row in MATRIX if row.used and row.sources in ("engines", "ray", "runtime")}
        rows = sorted(trusted - {14, 15})
        return [
            _rule("everything between the nodes", "cluster", peers, None, rows=rows, interface=interface),
            _rule("RoCEv2", "cluster", peers, [[4791, 4791]], rows=[14], interface=interface, protocol="udp"),
        ]
    rules = []
    ephemeral = [_range(settings["ephemeral_ports"])]
    everywhere = [row.number for row in MATRIX if row.used and row.port == EPHEMERAL]
    rules.append(
        # All nodes: the preflight tries these ports between every pair, before it is known where an engine will run.
        _rule("ports that cannot be pinned", "cluster", peers, ephemeral, rows=everywhere, interface=interface)
    )
    for row in MATRIX:
        if not row.used or row.sources not in ("engines", "ray") or row.port in (EPHEMERAL, "none"):
            continue
        nodes, ports = _members(cluster, host, row, values)
        if nodes and ports:
            source = "ray" if row.sources == "ray" else "engines"
            networks = cluster.of(nodes)
            rules.append(
                _rule(
                    row.purpose, source, networks, ports, rows=[row.number], interface=interface, protocol=row.protocol
                )
            )
    rules += _files(cluster, host, interface, values)
    watchers = [member["node"] for part in cluster.parts(host) if part["api_node"] == host for member in part["world"]]
    if len(set(watchers)) > 1:
        rules.append(
            _rule(
                "OpenAI API, watched by further ranks",
                "engines",
                cluster.of(watchers),
                _api_ports(cluster, host),
                rows=[1],
                interface=interface,
            )
        )
    if settings["ssh_between_nodes"]:
        rules.append(
            _rule("SSH between nodes", "cluster", peers, _singles(settings["ssh_ports"]), rows=[3], interface=interface)
        )
    return rules


def _files(cluster: _Cluster, host: str, interface: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Any node may take a release or a model from any other: who stands before whom is known only in the run."""
    nodes = [name for name, node in cluster.nodes.items() if "ironrack_runtime" in node["groups"]]
    rules = []
    for row in MATRIX:
        listed = row.ports(values)
        if row.sources == "runtime" and listed and host in nodes:
            networks, ports = cluster.of(nodes), [list(listed)]
            rules.append(_rule(row.purpose, "runtime", networks, ports, rows=[row.number], interface=interface))
    return rules


def _singles(ports: Iterable[Any]) -> Ports:
    return [[int(port), int(port)] for port in ports]


def _range(value: Any) -> list[int]:
    found = _port_range(value)
    if found is None:
        raise FirewallError(f"{value} is no port")
    return found


def _endpoint(cluster: _Cluster, host: str, interface: str | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What clients reach: the gateway where there is one, otherwise the engines' own endpoints."""
    rules = []
    api = _api_ports(cluster, host)
    clients = settings["client_networks"]
    if cluster.gateway:
        if host in cluster.gateway:
            ports = _singles(settings["gateway_ports"])
            rules.append(_rule("the cluster's endpoint", "clients", clients, ports, rows=[1]))
        if api:
            gateways = cluster.of(cluster.gateway)
            rules.append(_rule("OpenAI API", "gateway", gateways, api, rows=[1], interface=interface))
    elif api:
        rules.append(_rule("OpenAI API", "clients", clients, api, rows=[1]))
    return rules


def _watched(
    cluster: _Cluster, host: str, interface: str | None, settings: Mapping[str, Any], values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What Prometheus scrapes."""
    ports: Ports = []
    rows = set()
    for row in MATRIX:
        if row.sources != "observability":
            continue
        here = {
            "api": bool(_api_ports(cluster, host)),
            "ray": host in cluster.ray,
            "ray_head": host == cluster.ray_head,
            "all": True,
        }[row.targets]
        if not here:
            continue
        listed = row.ports(values)
        ports += _api_ports(cluster, host) if row.targets == "api" else [list(listed)] if listed else []
        rows.add(row.number)
    merged = sorted(map(list, {tuple(pair) for pair in ports}))
    rules = []
    if cluster.observability:
        networks = cluster.of(cluster.observability)
        rules.append(_rule("metrics", "observability", networks, merged, rows=sorted(rows), interface=interface))
    if settings["monitoring_networks"]:
        networks = settings["monitoring_networks"]
        rules.append(_rule("metrics", "monitoring", networks, merged, rows=sorted(rows)))
    return rules


def _time(cluster: _Cluster, interface: str | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Who may ask this node for the time: the nodes, or the networks that base_time_serve lists."""
    serve = settings["time_serve"]
    if not serve:
        return []
    row = next(row for row in MATRIX if row.targets == "time")
    port = _singles([row.port])
    if serve is True:
        nodes = cluster.of(cluster.nodes)
        return [
            _rule(row.purpose, "cluster", nodes, port, rows=[row.number], interface=interface, protocol=row.protocol)
        ]
    return [_rule(row.purpose, "time", list(map(str, serve)), port, rows=[row.number], protocol=row.protocol)]


def _kernel(cluster: _Cluster, settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Kernel settings: pinned ports are nobody's ephemeral port, and strict lists need a known range."""
    pinned: set[tuple[int, int]] = set()
    for row in MATRIX:
        listed = row.ports(values)
        if listed and row.used and (row.targets == "runtime" or (cluster.ray and "ray" in row.targets)):
            pinned.add(listed)
    for host in cluster.nodes:
        pinned |= {(low, high) for low, high in _api_ports(cluster, host)}
        for entry in cluster.plan["hosts"].get(host, {}).get("instances", []):
            for flag in ("--master-port", "--data-parallel-rpc-port"):
                pinned |= {(low, high) for low, high in _argument_ports(list(map(str, entry["args"])), flag)}
    strict = settings["mode"] == "strict_ports"
    low, high = _range(settings["ephemeral_ports"]) if strict else (_LOWEST_EPHEMERAL, 60999)
    inside = sorted((first, last) for first, last in pinned if first <= high and last >= low)
    kernel = {}
    if strict:
        kernel["net.ipv4.ip_local_port_range"] = f"{low} {high}"
    if inside:
        kernel["net.ipv4.ip_local_reserved_ports"] = ",".join(
            str(first) if first == last else f"{first}-{last}" for first, last in inside
        )
    return kernel


def rules(
    plan: Mapping[str, Any],
    host: str,
    groups: Mapping[str, Sequence[str]],
    addresses: Mapping[str, str | None],
    *,
    interface: str | None = None,
    settings: Mapping[str, Any] | None = None,
    ports: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a host lets in.

    `addresses` are the cluster addresses of hosts outside of the plan (gateways, observability), `settings` the
    variables of the role without their prefix, `ports` the port variables of the role ray that the inventory sets.
    """
    settings = _complete(settings or {})
    values = dict(ports or {})
    problems = check(settings)
    cluster = _Cluster(plan, groups, addresses)
    if settings["mode"] == "off":
        if problems:
            raise FirewallError("\n".join(problems))
        told = [f"firewall_{name}" for name in ("admin_networks", "client_networks", "extra") if settings[name]]
        warnings = [f"firewall_mode is off: nothing is filtered, in spite of {', '.join(told)}"] if told else []
        return {"host": host, "mode": "off", "rules": [], "kernel": {}, "warnings": warnings, "admin_networks": []}
    problems += cluster.missing()
    wanted = len(cluster.of(cluster.nodes)) > 1 and host in cluster.nodes
    if wanted and not interface:
        problems.append(
            f"cluster_interface = (not set) ({host}): the firewall must know where the cluster's traffic comes in ->"
            f" set cluster_interface of {host}, or run playbooks/facts.yml first"
        )
    if interface and not _INTERFACE.fullmatch(interface):
        problems.append(
            f"cluster_interface = {interface} ({host}): is not the name of an interface -> correct it, as in eth1"
        )
    if problems:
        raise FirewallError("\n".join(problems))
    found = [
        _rule("SSH", "admins", settings["admin_networks"], _singles(settings["ssh_ports"]), rows=[3]),
        *_between_nodes(cluster, host, str(interface), settings, values),
        *_time(cluster, interface, settings),
        *_endpoint(cluster, host, interface, settings),
        *_watched(cluster, host, interface, settings, values),
    ]
    for number, entry in enumerate(settings["extra"]):
        purpose, extra_ports = str(entry.get("purpose") or f"firewall_extra[{number}]"), map(_range, entry["ports"])
        more = {"interface": entry.get("interface"), "protocol": entry.get("protocol", "tcp")}
        found.append(_rule(purpose, f"extra{number}", list(map(str, entry["from"])), list(extra_ports), **more))
    found = [rule for rule in found if rule["ports"] != []]
    warnings = []
    if not settings["admin_networks"]:
        warnings.append(
            f"firewall_admin_networks is empty: by SSH, {host} lets in only the addresses that this firewall was"
            " switched on and changed from, and nobody else; list the networks of your administrators, as in"
            " [10.20.0.0/16]"
        )
    if not settings["client_networks"] and any(rule["source"] == "clients" for rule in found):
        what = "the gateway" if host in cluster.gateway else "the endpoint"
        warnings.append(f"firewall_client_networks is empty: nobody outside of the cluster reaches {what} on {host}")
    return {
        "host": host,
        "mode": settings["mode"],
        "interface": interface,
        "admin_networks": list(map(str, settings["admin_networks"])),
        "ssh_ports": [int(port) for port in settings["ssh_ports"]],
        "trusted_interfaces": list(settings["trusted_interfaces"]),
        "rules": found,
        "kernel": _kernel(cluster, settings, values),
        "warnings": warnings,
    }


def admit(found: Mapping[str, Any], connection: str, before: Sequence[str] = ()) -> dict[str, Any]:
    """The rules with whoever is connected now let in by SSH, so that applying them locks nobody out.

    `connection` is what sshd says of the connection (SSH_CONNECTION: client, its port, server, its port), or nothing
    where the connection is not one of SSH. `before` are addresses that were let in like this earlier. They stay as long
    as no network is listed: otherwise two controllers would shut each other out.
    """
    listed = list(found["admin_networks"])
    client, port = _client(connection)
    if client and port not in found["ssh_ports"]:
        raise FirewallError(
            f"firewall_ssh_ports = {found['ssh_ports']}: this connection came in at port {port} of"
            f" {found['host']}, which would be closed -> add {port} to firewall_ssh_ports"
        )
    if not client and not listed:
        why = (
            "comes from the node itself (a tunnel, such as ssh -L), which says nothing of where it began"
            if len(connection.split()) == 4
            else "is not one of SSH"
        )
        raise FirewallError(
            f"firewall_admin_networks = []: this connection to {found['host']} {why}, so nobody is known"
            f" who may administer the node -> list the networks that SSH comes from, as in [10.20.0.0/16]"
        )
    present = {client} if client else set()
    present |= set() if listed else set(map(_address, before))
    networks = [ipaddress.ip_network(entry) for entry in listed]
    outside = sorted(str(one) for one in present if not any(one in network for network in networks))
    changed = list(found["rules"])
    if outside:
        # In a set of their own, by which they are known the next time.
        changed.insert(1, _rule("SSH, whoever was connected", PRESENT, outside, _singles(found["ssh_ports"]), rows=[3]))
    return {**found, "admin_networks": [*listed, *outside], "present": outside, "rules": changed}


def _client(connection: str) -> tuple[Any, int]:
    """Whoever is connected, and the port; nobody where the connection does not tell where it comes from."""
    words = connection.split()
    if len(words) != 4:
        return None, 0
    try:
        client, server = (_address(word) for word in (words[0], words[2]))
        port = int(words[3])
    except ValueError:
        # sshd says UNKNOWN of a connection that is none of TCP.
        return None, 0
    return (None, 0) if client.is_loopback or client == server else (client, port)


def _address(word: str) -> Any:
    address = ipaddress.ip_address(word.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
