"""Which interface and address belong to the cluster."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.errors import HostError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts.nics import candidates, is_refused, resolve


def nic(name: str, *addresses: str, **more: Any) -> dict[str, Any]:
    entries = [
        {
            "address": address,
            "family": 6 if ":" in address else 4,
            "scope": "link" if address.startswith("fe80") else "host" if address.startswith("127") else "global",
        }
        for address in addresses
    ]
    return {"name": name, "up": True, "kind": "physical", "master": None, "addresses": entries} | more


TWO = [
    nic("lo", "127.0.0.1", kind="loopback"),
    nic("eno1", "192.168.1.5", "fd00::5", "fe80::1"),
    nic("ens1f0", "10.77.1.11"),
    nic("docker0", "172.17.0.1", kind="bridge"),
    nic("veth12ab", "169.254.1.1", kind="veth"),
    nic("ens2", "10.99.0.1", up=False),
    nic("ens3", kind="physical"),
    nic("eth9", "10.1.1.1", master="bond0"),
]
ONE = [entry for entry in TWO if entry["name"] != "eno1"]


@pytest.mark.parametrize(
    ("address", "prefix", "kind"),
    [
        ("10.77.1.0", 24, "the address of 10.77.1.0/24"),
        ("10.77.1.255", 24, "the broadcast address of 10.77.1.0/24"),
        ("10.77.1.255", 16, ""),
        ("10.77.1.0", 31, ""),
        ("fd00::", 64, "the address of fd00::/64"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_address_that_no_host_can_have(address: str, prefix: int, kind: str, given: bool) -> None:
    only = nic("ens1f0", address)
    only["addresses"][0]["prefix"] = prefix
    if kind:
        with pytest.raises(HostError, match=f"{re.escape(address)}, {kind}, in which ens1f0 is"):
            resolve("n1", [only], None, address if given else None)
    else:
        assert resolve("n1", [only], None, address if given else None) == ("ens1f0", address)


@pytest.mark.parametrize(
    "name",
    ["lo", "docker0", "docker_gwbridge", "cni0", "veth0a1b", "br-1a2b3c", "virbr0", "flannel.1", "cali123", "vnet0"],
)
def test_refused(name: str) -> None:
    assert is_refused(name)


@pytest.mark.parametrize(
    "name", ["eth0", "ens1f0np0", "bond0", "br0", "bridge0", "ib0", "lom1", "vlan100", "wan", "eno1"]
)
def test_accepted(name: str) -> None:
    assert not is_refused(name)


def test_candidates() -> None:
    assert [entry["name"] for entry in candidates(TWO)] == ["eno1", "ens1f0"]


@pytest.mark.parametrize(
    ("nics", "interface", "address", "expected"),
    [
        (TWO, "ens1f0", "10.77.1.11", ("ens1f0", "10.77.1.11")),
        (TWO, "ens1f0", None, ("ens1f0", "10.77.1.11")),
        (TWO, None, "10.77.1.11", ("ens1f0", "10.77.1.11")),
        (TWO, None, "fd00:0::5", ("eno1", "fd00:0::5")),
        (TWO, "eno1", None, ("eno1", "192.168.1.5")),
        (ONE, None, None, ("ens1f0", "10.77.1.11")),
    ],
)
def test_resolved(nics: list[Any], interface: str | None, address: str | None, expected: tuple[str, str]) -> None:
    assert resolve("n1", nics, interface, address) == expected


@pytest.mark.parametrize(
    ("nics", "interface", "address", "parts"),
    [
        (
            TWO,
            None,
            None,
            ["n1", "cluster_interface", "cluster_address", "eno1 (192.168.1.5, fd00::5), ens1f0 (10.77.1.11)"],
        ),
        ([], None, None, ["has no interface", "cluster_interface"]),
        (TWO, "eth7", None, ["eth7", "does not have", "candidates: eno1"]),
        (TWO, "ens2", None, ["ens2", "is down"]),
        (TWO, "ens3", None, ["ens3", "has no address"]),
        (TWO, "docker0", "172.17.0.1", ["docker0", "container engines"]),
        (TWO, "ens1f0", "10.77.1.99", ["10.77.1.99", "no interface of it does", "ens1f0 has 10.77.1.11"]),
        (TWO, "ens1f0", "192.168.1.5", ["192.168.1.5", "eno1 bears it"]),
        (TWO, None, "10.5.5.5", ["cluster_address", "10.5.5.5", "no interface"]),
        (TWO, None, "172.17.0.1", ["docker0", "cannot carry"]),
        (TWO, None, "127.0.0.1", ["lo bears", "cannot carry"]),
        (TWO, None, "10.99.0.1", ["ens2", "is down"]),
    ],
)
def test_refusals_name_what_and_how(
    nics: list[Any], interface: str | None, address: str | None, parts: list[str]
) -> None:
    with pytest.raises(HostError) as caught:
        resolve("n1", nics, interface, address)
    for part in parts:
        assert part.lower() in str(caught.value).lower()
