"""Which interface and address of a host belong to the cluster. Never taken from the default route."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import HostError

# Bridges and pipes of container engines and virtual machines: who guesses takes them, and peers cannot reach them.
REFUSED = re.compile(
    r"lo$|docker|cni|veth|br-|virbr|flannel|cali|tunl|kube|podman|lxc|lxdbr|vnet|ip6tnl|sit\d|dummy|ifb\d"
)
NAMES_OF_REFUSED = "loopback, docker*, cni*, veth*, br-*, virbr*, flannel* and their like"


def is_refused(name: str) -> bool:
    return REFUSED.match(name) is not None


def reserved(address: str, prefix: int) -> str:
    """What an address is in its network, where no host may have it; empty for the others."""
    own = ipaddress.ip_interface(f"{address}/{prefix}")
    # A network of two, or of one, has no address to spare (RFC 3021); IPv6 has no broadcast.
    if own.version == 4 and prefix < 31:
        return {own.network.network_address: "the address", own.network.broadcast_address: "the broadcast address"}.get(
            own.ip, ""
        )
    return "the address" if own.version == 6 and prefix < 127 and own.ip == own.network.network_address else ""


def same_address(one: str, other: str) -> bool:
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        return one == other


def global_addresses(nic: Mapping[str, Any]) -> list[str]:
    """Addresses others can reach, IPv4 first."""
    found = [entry for entry in nic.get("addresses", []) if entry.get("scope") in ("global", "site")]
    return [entry["address"] for entry in sorted(found, key=lambda entry: int(entry.get("family", 4)))]


def candidates(nics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Interfaces that could carry the cluster: up, not refused, with an address, not a part of another interface."""
    return [
        nic
        for nic in nics
        if nic.get("up")
        and nic.get("kind") != "loopback"
        and not nic.get("master")
        and not is_refused(nic["name"])
        and global_addresses(nic)
    ]


def bearer(nics: Sequence[Mapping[str, Any]], address: str) -> Mapping[str, Any] | None:
    for nic in nics:
        if any(same_address(entry["address"], address) for entry in nic.get("addresses", [])):
            return nic
    return None


def summary(nics: Sequence[Mapping[str, Any]]) -> str:
    """What a message lists of interfaces: name and addresses."""
    shown = [f"{nic['name']} ({', '.join(global_addresses(nic)) or 'no address'})" for nic in nics]
    return ", ".join(shown) or "none"


def resolve(
    host: str, nics: Sequence[Mapping[str, Any]], interface: str | None, address: str | None
) -> tuple[str, str]:
    """The (interface, address) of this host, from its variables and what it has; HostError when they do not fit."""
    interface, address = _resolve(host, nics, interface, address)
    nic = bearer(nics, address) or {}
    for entry in nic.get("addresses", []):
        prefix = entry.get("prefix")
        if isinstance(prefix, int) and same_address(entry["address"], address) and (kind := reserved(address, prefix)):
            network = ipaddress.ip_interface(f"{address}/{prefix}").network
            raise HostError(
                f"cluster_address of {host} is {address}, {kind} of {network}, in which {nic['name']} is: no host can"
                " have it; give the interface another address, or correct its prefix length"
            )
    return interface, address


def _resolve(
    host: str, nics: Sequence[Mapping[str, Any]], interface: str | None, address: str | None
) -> tuple[str, str]:
    if interface and is_refused(interface):
        raise HostError(
            f"cluster_interface of {host} is {interface}: loopback and interfaces of container engines or virtual"
            f" machines ({NAMES_OF_REFUSED}) cannot carry the cluster; name the interface that the other nodes reach"
            f" (candidates: {summary(candidates(nics))})"
        )
    if interface:
        return interface, _address_of(host, nics, interface, address)
    if address:
        nic = bearer(nics, address)
        if nic is None:
            raise HostError(
                f"cluster_address of {host} is {address}, but no interface of it bears this address"
                f" (it has {summary(candidates(nics))}); correct cluster_address, or give the interface the address"
            )
        if is_refused(nic["name"]):
            raise HostError(
                f"cluster_address of {host} is {address}, which {nic['name']} bears: that interface"
                f" ({NAMES_OF_REFUSED}) cannot carry the cluster (candidates: {summary(candidates(nics))})"
            )
        if not nic.get("up"):
            raise HostError(f"{nic['name']} of {host}, which bears cluster_address {address}, is down; bring it up")
        return nic["name"], address
    found = candidates(nics)
    if len(found) != 1:
        what = "has no interface that could carry the cluster" if not found else f"has several: {summary(found)}"
        raise HostError(
            f"neither cluster_interface nor cluster_address is set for {host}, and it {what}; set one of the two"
            f" in its host variables"
        )
    return found[0]["name"], global_addresses(found[0])[0]


def _address_of(host: str, nics: Sequence[Mapping[str, Any]], interface: str, address: str | None) -> str:
    nic = next((nic for nic in nics if nic["name"] == interface), None)
    if nic is None:
        raise HostError(
            f"cluster_interface of {host} is {interface}, which it does not have"
            f" (candidates: {summary(candidates(nics))})"
        )
    if not nic.get("up"):
        raise HostError(f"cluster_interface {interface} of {host} is down; bring it up, or name another one")
    if address is None:
        own = global_addresses(nic)
        if not own:
            raise HostError(f"cluster_interface {interface} of {host} has no address; give it one, or name another one")
        return own[0]
    if not any(same_address(entry["address"], address) for entry in nic.get("addresses", [])):
        other = bearer(nics, address)
        where = f"{other['name']} bears it" if other else "no interface of it does"
        raise HostError(
            f"cluster_interface {interface} of {host} does not bear cluster_address {address}: {where}"
            f" ({interface} has {', '.join(global_addresses(nic)) or 'no address'})"
        )
    return address
