"""Which service keeps a node's clock, with which servers, and whom it serves.

A host ends with one of them and never two: what a site runs already stays, unless servers are named or the node is to
serve the time, which takes chrony. Debian's own chrony.conf is a package's file and names public servers, so chrony
gets a file of its own, and goes back to Debian's once nothing is asked of it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

MODES = ("auto", "keep")
CONFIGURATION = "/etc/chrony/ironrack.conf"
DROP_IN_FOLDER = "/etc/systemd/system/chrony.service.d"
DROP_IN = f"{DROP_IN_FOLDER}/60-ironrack.conf"
OPTIONS = "/etc/chrony/ironrack.env"
UNIT = "chrony.service"
# Other packages of this kind conflict with chrony's, and go when it comes.
_REPLACED = ("chrony", "chronyd", "systemd-timesyncd", "ntp", "ntpd", "ntpsec", "openntpd")
# The unit of the package takes DAEMON_OPTS from /etc/default/chrony; what is read later wins.
_DROP_IN_TEXT = f"""\
# Managed by ironrack: base_time_servers, base_time_serve.
[Service]
EnvironmentFile=-{OPTIONS}
"""
_OPTIONS_TEXT = f"""\
# Managed by ironrack: chrony with settings of its own; -F 1 filters system calls, as the package does.
DAEMON_OPTS="-F 1 -f {CONFIGURATION}"
"""
# What -e base_time_serve=true makes of it, as the filter `bool` reads it.
_WORDS = {"yes": True, "true": True, "on": True, "1": True, "no": False, "false": False, "off": False, "0": False}
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\.?")
_POOL = re.compile(r"(.+\.)?pool\.ntp\.org\.?")


def _address(text: str) -> str | None:
    """An address in its plain form, or None for what is none."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def named_nodes(servers: Sequence[Any], nodes: Mapping[str, Any]) -> dict[str, str]:
    """Those of the servers that are nodes of the cluster, by name or by cluster address: server -> node."""
    by_address = {_address(str(node["address"])): name for name, node in nodes.items() if node.get("address")}
    found = {}
    for server in map(str, servers):
        node = server if server in nodes else by_address.get(_address(server) or "")
        if node:
            found[server] = node
    return found


def _meant(serve: Any) -> Any:
    return _WORDS.get(serve.lower(), serve) if isinstance(serve, str) else serve


def _served(serve: Any, nodes: Mapping[str, Any]) -> list[str]:
    """Networks that may ask this node."""
    if isinstance(serve, bool):
        return [str(node["address"]) for node in nodes.values() if node.get("address")] if serve else []
    return [str(entry) for entry in serve]


def _check_servers(servers: Any, host: str, nodes: Mapping[str, Any], serving: Mapping[str, Any]) -> list[str]:
    variable = "base_time_servers"
    if not isinstance(servers, Sequence) or isinstance(servers, str):
        return [f"{variable} = {servers}: is not a list -> write it as [time.example.org, 10.0.0.5]"]
    problems = []
    named = named_nodes(servers, nodes)
    for server in map(str, servers):
        shown = f"{variable} = {server}"
        address = _address(server)
        loopback = address is not None and ipaddress.ip_address(address).is_loopback
        itself = loopback or named.get(server, server) == host
        if address is None and not _NAME.fullmatch(server):
            problems.append(f"{shown}: is neither a host name nor an IP address -> write only that, without options")
        elif address is None and re.fullmatch(r"[\d.]+", server):
            problems.append(f"{shown}: is not an IP address -> correct it")
        elif itself:
            problems.append(
                f"{shown}: is this node, {host}, itself -> leave it out here, as in host_vars/{host}.yml:"
                f" base_time_servers: [] and base_time_serve: true"
            )
        elif server in named and "ironrack_runtime" not in nodes[named[server]]["groups"]:
            problems.append(
                f"{shown}: {named[server]} takes no part in the plan, so nothing is installed there -> name a node"
                f" that does, or another server"
            )
        elif server in named and serving.get(named[server], True) in (False, []):
            problems.append(
                f"{shown}: {named[server]} is a node of this cluster and does not serve the time -> set"
                f" base_time_serve: true for {named[server]}, or name another server"
            )
    twice = sorted({server for server in map(str, servers) if list(map(str, servers)).count(server) > 1})
    problems += [f"{variable} = {server}: is named twice -> name it once" for server in twice]
    return problems


def _check_serve(serve: Any, nodes: Mapping[str, Any]) -> list[str]:
    if isinstance(serve, bool):
        if serve and not _served(serve, nodes):
            return [
                "base_time_serve = true: no node of the cluster has a cluster_address, so nobody could ask -> set"
                " cluster_address of the nodes, or list networks, as in [10.20.0.0/16]"
            ]
        return []
    if not isinstance(serve, Sequence) or isinstance(serve, str):
        return [
            f"base_time_serve = {serve}: is neither true, false nor a list of networks -> write true to serve the"
            f" nodes of the cluster, or a list as in [10.20.0.0/16]"
        ]
    problems = []
    for entry in map(str, serve):
        try:
            ipaddress.ip_network(entry)
        except ValueError as error:
            hint = "write it as 10.20.0.0/16, 203.0.113.7 or 2001:db8::/48"
            if "host bits" in str(error):
                hint = f"write {ipaddress.ip_network(entry, strict=False)}, or a single address without /"
            problems.append(f"base_time_serve = {entry}: is not a network -> {hint}")
    return problems


def check_offline(
    servers: Any, serve: Any, host: str, nodes: Mapping[str, Any], serving: Mapping[str, Any]
) -> list[str]:
    """What shows without a look at the host. Whether anybody could ask a node that serves all is left to the plan."""
    serve, serving = _meant(serve), {node: _meant(value) for node, value in serving.items()}
    return _check_servers(servers, host, nodes, serving) + ([] if serve is True else _check_serve(serve, nodes))


def check(
    found: Mapping[str, Any],
    host: str,
    nodes: Mapping[str, Any],
    *,
    servers: Any,
    serve: Any,
    mode: str,
    serving: Mapping[str, Any],
) -> list[str]:
    """What is wrong, as sentences. `serving` says of the nodes among the servers whether they serve."""
    if mode not in MODES:
        return [f"base_time_mode = {mode}: is not known -> choose one of {', '.join(MODES)}"]
    problems = _check_servers(servers, host, nodes, serving) + _check_serve(serve, nodes)
    if problems:
        return problems
    asked = "base_time_servers" if servers else "base_time_serve" if serve else None
    if asked and mode == "keep":
        value = ", ".join(map(str, servers)) if servers else serve
        problems.append(f"{asked} = {value}: has no effect with base_time_mode: keep -> leave one of the two out")
    elif asked:
        others = [unit for unit in found["time_services"] if unit.partition(".service")[0] not in _REPLACED]
        problems += [
            f"{asked} is set, and {unit} runs on {host}: two services would set one clock -> stop and disable {unit},"
            f" or leave {asked} out here and configure chrony beside it by hand"
            for unit in others
        ]
    return problems


def configuration(servers: Sequence[str], serve: Any, nodes: Mapping[str, Any]) -> str:
    """Text of chrony's own settings."""
    lines = ["# Managed by ironrack: base_time_servers, base_time_serve. Further settings: /etc/chrony/conf.d/*.conf"]
    if servers:
        named = named_nodes(servers, nodes)
        for server in map(str, servers):
            node = named.get(server)
            # Names of nodes are known to others only once the network layer has run; their addresses always are.
            target = str(nodes[node].get("address") or server) if node else server
            if target != server:
                lines.append(f"# {node}")
            lines.append(f"{'pool' if _POOL.fullmatch(server) else 'server'} {target} iburst")
        lines += [
            "driftfile /var/lib/chrony/chrony.drift",
            "ntsdumpdir /var/lib/chrony",
            "maxupdateskew 100.0",
            "makestep 1 3",
            "rtcsync",
            "confdir /etc/chrony/conf.d",
        ]
    else:
        lines += ["# No servers are named: those of the site's own settings.", "include /etc/chrony/chrony.conf"]
    networks = _served(serve, nodes)
    if networks:
        lines += [f"allow {network}" for network in networks]
        # Without a server that answers, the nodes go on by this node's clock, together.
        lines.append("local stratum 10 orphan")
    return "\n".join(lines) + "\n"


def plan(
    found: Mapping[str, Any],
    host: str,
    nodes: Mapping[str, Any],
    *,
    servers: Any,
    serve: Any,
    mode: str = "auto",
    serving: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Packages, files and units that the host needs for its clock. `found` is what module base_state saw."""
    serve, serving = _meant(serve), {node: _meant(value) for node, value in (serving or {}).items()}
    problems = check(found, host, nodes, servers=servers, serve=serve, mode=mode, serving=serving)
    if problems:
        return {"problems": problems, "why": "", "packages": [], "files": [], "units": []}
    running = list(found["time_services"])
    if mode == "keep":
        return _answer("base_time_mode is keep: nothing is touched")
    if servers or _served(serve, nodes):
        text = configuration([str(server) for server in servers], serve, nodes)
        # In this order a run that is killed leaves nothing that points to a file that is not there.
        files = [
            {"path": CONFIGURATION, "content": text},
            {"path": OPTIONS, "content": _OPTIONS_TEXT},
            {"path": DROP_IN_FOLDER, "state": "directory"},
            {"path": DROP_IN, "content": _DROP_IN_TEXT},
        ]
        return _answer("chrony, for the servers that are named or the networks that are served", files, installs=True)
    leaves = [{"path": path, "state": "absent"} for path in (DROP_IN, OPTIONS, CONFIGURATION)]
    if found["time_ours"]:
        other = bool(running) and not {UNIT, "chronyd.service"} & {*running}
        return _answer("nothing is asked of chrony any longer", leaves, installs=not other)
    if running:
        return _answer(f"{', '.join(running)} keeps the clock already")
    if not found["may_set_clock"]:
        return _answer("nobody may set the clock here: it is that of the machine below")
    return _answer("chrony, since nothing else keeps the clock", installs=True)


def _answer(why: str, files: Sequence[Mapping[str, Any]] = (), installs: bool = False) -> dict[str, Any]:
    rights = {"owner": "root", "group": "root"}
    modes = {"directory": "0755", "file": "0644"}
    complete = []
    for entry in files:
        state = entry.get("state", "file")
        more = {**rights, "mode": modes[state]} if state in modes else {}
        complete.append({**entry, **more})
    unit = {"name": UNIT, "state": "started", "enabled": True, "restart_if_newer": [CONFIGURATION]}
    return {
        "problems": [],
        "why": why,
        "packages": ["chrony"] if installs else [],
        "files": complete,
        "units": [unit] if installs else [],
    }
