"""What is wrong with variables of base, firewall and ssh, told with the inventory.

Their roles run on hosts that others have changed already. What takes a look at a host is left to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..hosts import time_service
from ..inventory.validate import Problem, not_set, show
from . import firewall, ssh
from .ports import FILE_PORTS

# Prefix, variables that have a rule of their own, what has to be on for it, and the rules.
_CHECKS: tuple[tuple[str, tuple[str, ...], dict[str, Any], Callable[[Mapping[str, Any]], list[str]]], ...] = (
    (
        "firewall_",
        (
            "admin_networks",
            "client_networks",
            "gateway_ports",
            "monitoring_networks",
            "trusted_interfaces",
            "ephemeral_ports",
            "ssh_ports",
            "extra",
        ),
        {"mode": "strict_ports"},
        firewall.check,
    ),
    (
        "ssh_",
        ("settings", "allow_users", "authorized_keys", "host_key_fingerprint", "between_nodes_user"),
        {"between_nodes": True},
        ssh.check,
    ),
)
_LINE = re.compile(r"(?s)(?P<variable>[^\s:]+)(?: = (?P<value>.*?))??: (?P<problem>.*?) -> (?P<remedy>.*)")


# Settings of the kernel that the firewall writes itself in mode strict_ports.
_OF_THE_FIREWALL = ("net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports")


def problems(
    values: Mapping[str, Mapping[str, Any]],
    addresses: Mapping[str, str | None],
    groups: Mapping[str, Iterable[str]],
    logins: Mapping[str, str] | None = None,
) -> list[Problem]:
    """`addresses` are the cluster addresses of the plan's nodes, `logins` whom Ansible logs in as by SSH."""
    nodes = {host: {"address": address, "groups": ["ironrack_runtime"]} for host, address in addresses.items()}
    found: list[Problem] = []
    for host, own in values.items():
        for prefix, names, needed, check in _CHECKS:
            for name in names:
                variable = f"{prefix}{name}"
                if own.get(variable) is not None:
                    lines = check({**needed, name: own[variable]})
                    found += [_problem(host, line) for line in lines if line.startswith(variable)]
        changed = own.get("ssh_accept_changed_host_keys") or []
        lines = ssh.check({"accept_changed_host_keys": changed}, hosts=values)
        found += [_problem(host, line) for line in lines]
        found += _port_ranges(host, own)
        found += _serve_ports(host, own)
        found += _lock_out(host, own, (logins or {}).get(host, ""), host in nodes)
        if host in nodes:
            found += _clock(host, values, nodes)
    return found + list(_unknown_neighbours(values, addresses, groups))


def _lock_out(host: str, own: Mapping[str, Any], login: str, managed: bool) -> Iterator[Problem]:
    """Changes of sshd after which Ansible itself could not log in: refused before a host key is pinned."""
    given = {
        name: own[f"ssh_{name}"]
        for name in ("settings", "allow_users")
        if isinstance(own.get(f"ssh_{name}"), dict | list)
    }
    if managed and login and own.get("ssh_mode") == "hardened" and not ssh.check(given):
        yield from (_problem(host, line) for line in ssh.locked_out(given, login, host))


def _serve_ports(host: str, own: Mapping[str, Any]) -> Iterator[Problem]:
    """Releases and models are handed on by servers that stay for minutes: the second would find its port taken."""
    given = {name: str(own.get(name) or default) for name, default in FILE_PORTS.items()}
    first, second = given
    if given[first] == given[second]:
        yield Problem(host, second, given[second], f"is the value of {first}, too", "give each a port of its own")


def _port_ranges(host: str, own: Mapping[str, Any]) -> Iterator[Problem]:
    sysctl = own.get("base_sysctl")
    if own.get("firewall_mode") != "strict_ports" or not isinstance(sysctl, Mapping):
        return
    for name, value in sysctl.items():
        if str(name).replace("/", ".") in _OF_THE_FIREWALL:
            yield Problem(
                host,
                f"base_sysctl.{name}",
                show(value),
                "is set by the firewall in mode strict_ports, which opens those ports and no others",
                "remove it, and set firewall_ephemeral_ports, or take firewall_mode: trusted_cluster",
            )


def _clock(host: str, values: Mapping[str, Mapping[str, Any]], nodes: Mapping[str, Any]) -> Iterator[Problem]:
    own = values[host]
    # What a template says is not known here.
    serving = {node: values[node]["base_time_serve"] for node in nodes if _given(values[node], "base_time_serve")}
    servers = own["base_time_servers"] if _given(own, "base_time_servers") else []
    serve = own["base_time_serve"] if _given(own, "base_time_serve") else False
    for line in time_service.check_offline(servers, serve, host, nodes, serving):
        yield _problem(host, line)


def _given(own: Mapping[str, Any], name: str) -> bool:
    return own.get(name) is not None


def _unknown_neighbours(
    values: Mapping[str, Mapping[str, Any]],
    addresses: Mapping[str, str | None],
    groups: Mapping[str, Iterable[str]],
) -> Iterator[Problem]:
    modes = {values.get(host, {}).get("firewall_mode") for host in addresses}
    for group in ("gateway", "observability") if modes & {"trusted_cluster", "strict_ports"} else ():
        for host in groups.get(group, ()):
            # A single machine that has every part talks to itself over loopback.
            if {*addresses} == {host} or addresses.get(host) or values.get(host, {}).get("cluster_address"):
                continue
            yield not_set(
                host,
                "cluster_address",
                f"the nodes' firewalls must know who the group {group} is",
                "set it to the address from which the nodes see this host",
            )


def _problem(host: str, line: str) -> Problem:
    # Without a plan there is no host to name.
    parts = _LINE.fullmatch(line.replace(" (): ", ": ", 1))
    if parts is None:
        return Problem(host, line.partition(" ")[0], "(hidden)", line, "correct it")
    # Where a line shows no value, there is none, or it is a secret.
    value = parts["value"] or ("(not set)" if parts["problem"] == "is missing" else "(hidden)")
    return Problem(host, parts["variable"], value, parts["problem"], parts["remedy"])
