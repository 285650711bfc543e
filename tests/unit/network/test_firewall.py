"""What each node lets in: rules from the plan, and the text that nft gets."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.cluster import RAY_PORTS
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import firewall, matrix, nft, ports
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network.firewall import FirewallError, admit, check

ROLES = Path(__file__).resolve().parents[3] / "roles"
API = ["--port", "8000", "--nnodes", "2", "--master-port", "29501"]


def plan(executor: str = "ray", nodes: int = 3, family: int = 4) -> dict[str, Any]:
    """The first node is Ray's head, the others run one instance; the second is its API node."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    prefix = "10.77.1." if family == 4 else "fd00:77::"
    engines = names[1:]
    world = [{"node": name, "rank": rank, "role": "api" if rank == 0 else "ray"} for rank, name in enumerate(engines)]
    replica = {"name": "tiny", "api_node": "n2", "url": "http://x:8000", "port": 8000, "world": world}
    hosts: dict[str, Any] = {name: {"ray": None, "instances": []} for name in names}
    for member in world:
        hosts[member["node"]]["instances"].append({"role": member["role"], "args": API if executor == "mp" else []})
    ray = {"head": "n1", "workers": engines, "address": f"{prefix}11:6379"} if executor == "ray" else None
    return {
        "nodes": {
            name: {"address": f"{prefix}{10 + number}", "interface": "eth1", "groups": []}
            for number, name in enumerate(names, 1)
        },
        "ray": ray,
        "instances": {"tiny": {"executor": executor, "replicas": [replica]}},
        "hosts": hosts,
    }


def rules(host: str = "n2", mode: str = "trusted_cluster", **more: Any) -> dict[str, Any]:
    settings = {"mode": mode, "admin_networks": ["10.20.0.0/16"], **more.pop("settings", {})}
    return firewall.rules(
        more.pop("plan", None) or plan(),
        host,
        more.pop("groups", {}),
        more.pop("addresses", {}),
        interface=more.pop("interface", "eth1"),
        settings=settings,
        **more,
    )


def lets_in(found: dict[str, Any], source: str, port: int, protocol: str = "tcp", interface: str = "eth1") -> bool:
    """Whether a packet of a new connection passes."""
    import ipaddress  # noqa: PLC0415 - the one place that needs it

    address = ipaddress.ip_address(source)
    return any(
        any(address in ipaddress.ip_network(entry) for entry in rule["networks"])
        and rule["protocol"] == protocol
        and rule["interface"] in (None, interface)
        and (rule["ports"] is None or any(low <= port <= high for low, high in rule["ports"]))
        for rule in found["rules"]
    )


# The matrix


def test_matrix_is_whole() -> None:
    assert sorted({row.number for row in ports.MATRIX}) == list(range(1, 34))


def test_matrix_follows_the_inventory() -> None:
    row = next(row for row in ports.MATRIX if row.number == 23)
    assert row.ports() == (10100, 10199)
    assert row.ports({"ray_max_worker_port": 10499}) == (10100, 10499)
    assert next(row for row in ports.MATRIX if row.number == 5).ports() is None
    named = {row.port for row in ports.MATRIX for name in RAY_PORTS if name in row.port}
    assert len(named) == len(RAY_PORTS) - 1, "each port of Ray has a row; first and last worker port share one"


# Who gets in


@pytest.mark.parametrize("port", [22, 6379, 29501, 33333, 50000])
def test_trusted_nodes_reach_everything_on_the_cluster_interface(port: int) -> None:
    found = rules()
    assert lets_in(found, "10.77.1.13", port)
    assert not lets_in(found, "10.77.1.13", port, interface="eth0"), "on another interface the address is forged"
    assert not lets_in(found, "10.77.1.99", port), "a neighbour in the same network is no node"
    assert not lets_in(found, "203.0.113.5", port, interface="eth0")


def test_nodes_with_a_runtime_hand_on_files_to_one_another() -> None:
    cluster = plan()
    for name in ("n1", "n2"):
        cluster["nodes"][name]["groups"] = ["ironrack_runtime"]
    for port in (8790, 8791):
        found = rules("n1", "strict_ports", plan=cluster)
        assert lets_in(found, "10.77.1.12", port)
        assert not lets_in(found, "10.77.1.12", port, interface="eth0")
        assert not lets_in(found, "10.77.1.13", port), "it has no runtime to fetch"
        assert not lets_in(rules("n3", "strict_ports", plan=cluster), "10.77.1.11", port)
    moved = rules("n1", "strict_ports", plan=cluster, ports={"python_env_serve_port": 55555})
    assert lets_in(moved, "10.77.1.12", 55555)
    assert not lets_in(moved, "10.77.1.12", 8790)
    assert "55555" in moved["kernel"]["net.ipv4.ip_local_reserved_ports"]


def test_roce_is_the_only_udp() -> None:
    found = rules()
    assert lets_in(found, "10.77.1.13", 4791, "udp")
    assert not lets_in(found, "10.77.1.13", 123, "udp")


@pytest.mark.parametrize("mode", ["trusted_cluster", "strict_ports"])
def test_only_admins_use_ssh(mode: str) -> None:
    found = rules(mode=mode)
    assert lets_in(found, "10.20.3.4", 22, interface="eth0")
    assert not lets_in(found, "10.20.3.4", 8000, interface="eth0")
    assert not lets_in(found, "203.0.113.5", 22, interface="eth0")


def test_strict_names_ports() -> None:
    head, worker = rules("n1", "strict_ports"), rules("n3", "strict_ports")
    for port, at_head, at_worker in ((6379, True, False), (6380, True, True), (10150, True, True), (55555, True, True)):
        assert lets_in(head, "10.77.1.12", port) == at_head, port
        assert lets_in(worker, "10.77.1.12", port) == at_worker, port
    for port in (22, 8265, 10001, 29501, 44217, 40000):
        assert not lets_in(worker, "10.77.1.12", port), port


def test_strict_meeting_port_without_ray() -> None:
    cluster = plan("mp")
    assert lets_in(rules("n2", "strict_ports", plan=cluster), "10.77.1.13", 29501)
    assert not lets_in(rules("n2", "strict_ports", plan=cluster), "10.77.1.11", 29501), "n1 has no rank of it"
    assert not lets_in(rules("n3", "strict_ports", plan=cluster), "10.77.1.12", 29501), "only the first node listens"
    assert not lets_in(rules("n2", "strict_ports", plan=cluster), "10.77.1.13", 6380), "no Ray, no ports of Ray"


def test_strict_ssh_between_nodes_is_asked_for() -> None:
    assert lets_in(rules("n2", "strict_ports", settings={"ssh_between_nodes": True}), "10.77.1.13", 22)


@pytest.mark.parametrize("mode", ["trusted_cluster", "strict_ports"])
def test_time_is_served_where_it_is_asked_for(mode: str) -> None:
    served = rules("n1", mode, settings={"time_serve": True})
    assert lets_in(served, "10.77.1.12", 123, "udp")
    assert not lets_in(served, "10.77.1.99", 123, "udp")
    assert not lets_in(served, "10.77.1.12", 123, "udp", interface="eth0")
    assert rules("n1", mode, settings={"time_serve": "true"}) == served, "given with -e"
    listed = rules("n1", mode, settings={"time_serve": ["192.0.2.0/24"]})
    assert lets_in(listed, "192.0.2.9", 123, "udp", interface="eth0")
    assert not lets_in(listed, "10.77.1.12", 123, "udp")
    for asked in (False, "no", []):
        assert not lets_in(rules("n1", mode, settings={"time_serve": asked}), "10.77.1.12", 123, "udp")


def test_strict_follows_ray_port() -> None:
    found = rules("n1", "strict_ports", ports={"ray_port": 7000})
    assert lets_in(found, "10.77.1.12", 7000)
    assert not lets_in(found, "10.77.1.12", 6379)


def test_endpoint_without_a_gateway() -> None:
    open_to = {"client_networks": ["192.0.2.0/24"]}
    assert lets_in(rules("n2", settings=open_to), "192.0.2.9", 8000, interface="eth0")
    assert not lets_in(rules("n3", settings=open_to), "192.0.2.9", 8000, interface="eth0"), "n3 has no endpoint"
    assert not lets_in(rules("n2"), "192.0.2.9", 8000, interface="eth0"), "nobody was named"
    assert "firewall_client_networks is empty" in rules("n2")["warnings"][0]


def test_endpoint_behind_a_gateway() -> None:
    groups, addresses = {"gateway": ["gw"]}, {"gw": "10.77.1.50"}
    open_to = {"client_networks": ["0.0.0.0/0", "::/0"]}
    node = rules("n2", groups=groups, addresses=addresses, settings=open_to)
    assert lets_in(node, "10.77.1.50", 8000)
    assert not lets_in(node, "10.77.1.50", 6379), "the gateway is no node of the cluster"
    assert not lets_in(node, "192.0.2.9", 8000, interface="eth0"), "clients go by the gateway"
    gateway = rules("gw", groups=groups, addresses=addresses, settings=open_to, interface=None)
    assert lets_in(gateway, "192.0.2.9", 443, interface="eth0")
    assert lets_in(gateway, "2001:db8::9", 443, interface="eth0")
    assert not lets_in(gateway, "10.77.1.12", 6379)


def test_metrics_for_the_group_and_for_networks() -> None:
    groups, addresses = {"observability": ["mon"]}, {"mon": "10.77.1.60"}
    head = rules("n1", groups=groups, addresses=addresses, settings={"monitoring_networks": ["198.51.100.7"]})
    for port in (6385, 9100, 9400, 44217, 44227):
        assert lets_in(head, "10.77.1.60", port), port
        assert lets_in(head, "198.51.100.7", port, interface="eth0"), port
    assert not lets_in(head, "10.77.1.60", 8265)
    worker = rules("n2", groups=groups, addresses=addresses)
    assert lets_in(worker, "10.77.1.60", 8000)
    assert not lets_in(worker, "10.77.1.60", 44217)


def test_extra() -> None:
    extra = [{"from": ["192.0.2.0/24"], "ports": ["9000-9010", 123], "protocol": "udp", "interface": "eth0"}]
    found = rules(settings={"extra": extra})
    assert lets_in(found, "192.0.2.1", 9005, "udp", "eth0")
    assert not lets_in(found, "192.0.2.1", 9005, "tcp", "eth0")
    assert not lets_in(found, "192.0.2.1", 9005, "udp", "eth1")


def test_a_single_machine_has_no_cluster() -> None:
    alone = plan("mp", nodes=2)
    del alone["nodes"]["n1"], alone["hosts"]["n1"]
    alone["nodes"]["n2"] |= {"address": None, "interface": None}
    found = rules("n2", plan=alone, interface=None)
    assert {rule["source"] for rule in found["rules"]} == {"admins", "clients"}


def test_ipv6() -> None:
    found = rules(plan=plan(family=6), settings={"admin_networks": ["2001:db8::/48"]})
    assert lets_in(found, "fd00:77::13", 6379)
    text = nft.render(found)
    assert "ip6 saddr @cluster_6" in text
    assert "ip saddr @" not in text


def test_kernel() -> None:
    assert rules()["kernel"] == {"net.ipv4.ip_local_reserved_ports": "44217,44227"}
    strict = rules(mode="strict_ports", settings={"ephemeral_ports": "40000-50000"})
    assert strict["kernel"] == {
        "net.ipv4.ip_local_port_range": "40000 50000",
        "net.ipv4.ip_local_reserved_ports": "44217,44227",
    }
    cluster = plan("mp")
    cluster["hosts"]["n2"]["instances"][0]["args"] = ["--master-port=41000"]
    assert rules(plan=cluster)["kernel"] == {"net.ipv4.ip_local_reserved_ports": "41000"}, "no Ray, no ports of Ray"
    assert rules(plan=plan("mp"))["kernel"] == {}


def test_off_asks_for_nothing() -> None:
    for mode in ("off", False):
        found = rules("n2", mode, interface=None, settings={"admin_networks": []})  # type: ignore[arg-type]
        assert found["rules"] == []
        assert found["mode"] == "off"
        assert found["warnings"] == []
    told = rules("n2", "off", interface=None)["warnings"]
    assert told == ["firewall_mode is off: nothing is filtered, in spite of firewall_admin_networks"]


# The one who is connected


def test_the_present_connection_is_let_in() -> None:
    found = admit(rules(), "192.0.2.44 50000 192.0.2.1 22")
    assert found["admin_networks"] == ["10.20.0.0/16", "192.0.2.44"]
    assert lets_in(found, "192.0.2.44", 22, interface="eth0")
    assert admit(rules(), "10.20.9.9 50000 10.20.0.1 22")["admin_networks"] == ["10.20.0.0/16"]


@pytest.mark.parametrize(
    ("client", "admin"),
    [("::ffff:192.0.2.44", "192.0.2.44"), ("fe80::1%eth0", "fe80::1"), ("2001:db8::7", "2001:db8::7")],
)
def test_the_present_connection_over_ipv6(client: str, admin: str) -> None:
    assert admit(rules(settings={"admin_networks": []}), f"{client} 50000 :: 22")["admin_networks"] == [admin]


def test_nobody_to_admit_is_refused() -> None:
    with pytest.raises(FirewallError, match=r"firewall_admin_networks = .*not one of SSH"):
        admit(rules(settings={"admin_networks": []}), "")


@pytest.mark.parametrize("end", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "192.0.2.1"])
def test_a_tunnel_says_nothing_of_where_it_began(end: str) -> None:
    """Let in by loopback, its confirmation would come through whatever the rules are."""
    server = end if end == "192.0.2.1" else "127.0.0.1"
    with pytest.raises(FirewallError, match=r"firewall_admin_networks = \[\]: .*tunnel.* -> list"):
        admit(rules(settings={"admin_networks": []}), f"{end} 50000 {server} 22", ["192.0.2.50"])
    found = admit(rules(), f"{end} 50000 {server} 2222")
    assert (found["admin_networks"], found["present"]) == (["10.20.0.0/16"], [])


def test_a_connection_that_sshd_does_not_know() -> None:
    with pytest.raises(FirewallError, match=r"firewall_admin_networks = \[\]"):
        admit(rules(settings={"admin_networks": []}), "UNKNOWN 65535 UNKNOWN 65535")
    assert admit(rules(), "UNKNOWN 65535 UNKNOWN 65535")["admin_networks"] == ["10.20.0.0/16"]


def test_two_controllers_do_not_shut_each_other_out() -> None:
    nobody = rules(settings={"admin_networks": []})
    assert any("firewall_admin_networks is empty" in warning for warning in nobody["warnings"])
    assert not any("firewall_admin_networks" in warning for warning in rules()["warnings"])
    found = admit(nobody, "192.0.2.44 50000 192.0.2.1 22", ["192.0.2.7", "192.0.2.44"])
    assert found["present"] == ["192.0.2.44", "192.0.2.7"]
    assert lets_in(found, "192.0.2.7", 22, interface="eth0")
    assert "set present_4" in nft.render(found), "where the next one finds them"
    listed = admit(rules(), "192.0.2.44 50000 192.0.2.1 22", ["192.0.2.7"])
    assert not lets_in(listed, "192.0.2.7", 22, interface="eth0"), "who lists networks means them"


def test_another_port_of_sshd_is_refused() -> None:
    with pytest.raises(FirewallError, match=r"firewall_ssh_ports = .*2222"):
        admit(rules(), "10.20.1.1 50000 10.20.0.1 2222")


# Wrong input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "open"}, "firewall_mode = open"),
        ({"admin_networks": ["10.20.0.5/16"]}, "write 10.20.0.0/16"),
        ({"client_networks": ["everybody"]}, "firewall_client_networks = everybody"),
        ({"ssh_ports": []}, "firewall_ssh_ports"),
        ({"ssh_ports": [70000]}, "firewall_ssh_ports = 70000"),
        ({"gateway_ports": []}, "firewall_gateway_ports = []"),
        ({"gateway_ports": None}, "firewall_gateway_ports = None"),
        ({"ssh_ports": "22"}, "firewall_ssh_ports = 22: is not a list"),
        ({"admin_networks": "10.0.0.0/8"}, "firewall_admin_networks = 10.0.0.0/8: is not a list"),
        ({"admin_networks": ["fe80::1%eth0"]}, "write fe80::1"),
        ({"client_networks": ["::ffff:10.0.0.0/104"]}, "write 10.0.0.0/8"),
        ({"monitoring_networks": ["224.0.0.0/4"]}, "firewall_monitoring_networks = 224.0.0.0/4: is multicast"),
        ({"extra": [{"from": ["ff02::1"], "ports": [1]}]}, "firewall_extra[0].from = ff02::1: is multicast"),
        ({"trusted_interfaces": ["eth0*"]}, "firewall_trusted_interfaces = eth0*"),
        ({"gateway_ports": ["443-445"]}, "firewall_gateway_ports = 443-445"),
        ({"ephemeral_ports": "50000"}, "firewall_ephemeral_ports = 50000"),
        ({"ephemeral_ports": "1024-60999"}, "begins below 32768"),
        ({"ephemeral_ports": "50000-50100"}, "fewer than 4096"),
        ({"trusted_interfaces": ['docker0" accept']}, "firewall_trusted_interfaces"),
        ({"extra": [{"ports": [1]}]}, "firewall_extra[0].from"),
        ({"extra": [{"from": ["10.0.0.0/8"]}]}, "firewall_extra[0].ports"),
        ({"extra": [{"from": ["10.0.0.0/8"], "port": [1], "ports": [1]}]}, "firewall_extra[0].port:"),
        ({"extra": [{"from": ["10.0.0.0/8"], "ports": [1], "protocol": "icmp"}]}, "firewall_extra[0].protocol = icmp"),
        ({"time_serve": ["10.20.0.5/16"]}, "base_time_serve = 10.20.0.5/16"),
        ({"confirm_seconds": 5}, "firewall_confirm_seconds = 5"),
    ],
)
def test_problems_name_variable_and_remedy(settings: dict[str, Any], words: str) -> None:
    found = check({"mode": "strict_ports", **settings})
    assert len(found) == 1
    assert words in found[0]
    assert " -> " in found[0]
    assert check({"mode": "strict_ports"}) == []


def test_a_gateway_that_nobody_knows() -> None:
    with pytest.raises(FirewallError, match=r"cluster_address = \(not set\) \(gw\)"):
        rules(groups={"gateway": ["gw"]})


@pytest.mark.parametrize("name", ['eth0" accept; #', "eth0*", "", "a" * 16])
def test_a_name_that_nft_would_take_for_more(name: str) -> None:
    with pytest.raises(FirewallError, match="cluster_interface = "):
        rules(interface=name)
    with pytest.raises(ValueError, match="not the name of an interface"):
        nft.render({**rules(), "trusted_interfaces": [name]})
    found = rules()
    for rule in found["rules"]:
        rule["interface"] = name or "*"
    with pytest.raises(ValueError, match="not the name of an interface"):
        nft.render(found)


def test_no_interface() -> None:
    with pytest.raises(FirewallError, match=r"cluster_interface = \(not set\) \(n2\)"):
        rules(interface=None)


# The text


def everything(mode: str) -> dict[str, Any]:
    """Rules of every kind, two families, networks that overlap."""
    return rules(
        mode=mode,
        groups={"gateway": ["gw"], "observability": ["mon"]},
        addresses={"gw": "10.77.1.50", "mon": "10.77.1.60"},
        settings={
            "admin_networks": ["10.20.0.0/16", "10.20.3.0/24", "10.20.0.0/16", "2001:db8::/48"],
            "client_networks": ["0.0.0.0/0", "::/0"],
            "monitoring_networks": ["198.51.100.0/24"],
            "trusted_interfaces": ["docker0"],
            "extra": [{"from": ["0.0.0.0/0"], "ports": [80, "81-90", 85], "purpose": 'say "hello"'}],
        },
    )


@pytest.mark.parametrize("mode", ["trusted_cluster", "strict_ports"])
def test_text(mode: str) -> None:
    lines = [line.strip() for line in nft.render(everything(mode)).splitlines()]
    body = lines[lines.index("chain input {") :]
    assert lines[1:3] == ["table inet ironrack", "delete table inet ironrack"], "one step, whatever was there"
    assert "flush ruleset" not in " ".join(lines)
    assert body[1].endswith("policy drop;")
    first = body.index("ct state established,related accept")
    assert first == 7 and all("echo-request" in line for line in body[3:first]), "but for echo requests, replies first"
    assert body[-3] == "counter drop"
    assert "elements = { 10.20.0.0/16 }" in lines, "what lies in another network is an error in a set"
    assert "meta nfproto ipv4 tcp dport 80-90 accept comment \"say 'hello'\"" in body
    first_rule = next(number for number, line in enumerate(body) if "comment" in line)
    for kind in ("packet-too-big", "destination-unreachable", "nd-neighbor-solicit"):
        assert any(kind in line for line in body[:first_rule]), kind


LISTS = [name for name, value in firewall.DEFAULTS.items() if isinstance(value, list)]


@pytest.mark.parametrize("mode", ["trusted_cluster", "strict_ports"])
@pytest.mark.parametrize("empty", [[], *([name] for name in LISTS), LISTS])
def test_only_the_cluster_gets_in_without_a_port(mode: str, empty: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever list is empty: everything at every port is for the cluster's nodes alone, on their interface."""
    monkeypatch.setattr(firewall, "check", lambda _settings: [])
    settings = {name: ["192.0.2.0/24"] for name in ("admin_networks", "client_networks", "monitoring_networks")}
    settings |= {"extra": [{"from": ["192.0.2.0/24"], "ports": [1]}], "time_serve": []}
    settings |= {name: [] for name in empty}
    for host in ("n1", "n2", "gw"):
        found = rules(
            host,
            mode,
            groups={"gateway": ["gw"], "observability": ["mon"]},
            addresses={"gw": "10.77.1.50", "mon": "10.77.1.60"},
            settings={"admin_networks": [], **settings},
        )
        found["rules"] += [{**rule, "ports": []} for rule in found["rules"]]
        lines = [line for line in nft.render(found).splitlines() if "comment" in line]
        open_lines = [line for line in lines if " dport " not in line]
        assert all("@cluster_" in line and 'iifname "eth1"' in line for line in open_lines)
        assert len(open_lines) == (1 if mode == "trusted_cluster" and host != "gw" else 0)


def test_dhcp_is_not_for_the_cluster() -> None:
    assert 'iifname != "eth1" udp sport 67 udp dport 68 accept' in nft.render(rules())


def in_namespace(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "-rn", *command], input=text, capture_output=True, text=True, timeout=30, check=False
    )


needs_nft = pytest.mark.skipif(
    shutil.which("nft") is None or in_namespace("nft", "list", "tables").returncode != 0,
    reason="needs nft (package nftables) and the right to make network namespaces; the scenario firewall needs neither",
)


@needs_nft
@pytest.mark.parametrize("mode", ["trusted_cluster", "strict_ports"])
def test_nft_takes_the_text_again_and_again(mode: str, tmp_path: Path) -> None:
    text = nft.render(everything(mode))
    twice = in_namespace(
        "sh", "-c", 'cat > "$0"; nft -f "$0" && nft -f "$0" && nft -s list ruleset', str(tmp_path / "x"), text=text
    )
    done = in_namespace("nft", "-f", "-", text=text + text)
    assert done.returncode == 0, done.stderr
    assert twice.returncode == 0, twice.stderr
    assert twice.stdout.count("table inet ironrack") == 1


@needs_nft
def test_nft_takes_the_golden_files() -> None:
    golden = sorted((Path(__file__).resolve().parents[3] / "tests/golden").rglob("firewall.nft"))
    assert golden
    # Each begins with the removal of the one before.
    done = in_namespace("sh", "-ec", 'for file; do nft -f "$file"; done', "sh", *map(str, golden))
    assert done.returncode == 0, done.stderr


# All together


def test_sixty_four_nodes_in_seconds() -> None:
    cluster = plan(nodes=64)
    start = time.monotonic()
    found = [rules(host, "strict_ports", plan=cluster) for host in cluster["nodes"]]
    texts = [nft.render(one) for one in found]
    shown = matrix.render(found, "html")
    assert time.monotonic() - start < 10
    assert "10.77.1.74" in texts[0]
    assert "n3 ... n64 (62)" in shown


def test_table_and_picture() -> None:
    found = [rules(host, settings={"client_networks": ["192.0.2.0/24"]}) for host in ("n1", "n2", "n3")]
    text = matrix.render(found)
    assert text.count("everything else that comes in is dropped") == 2, "n1 and n3 let in the same"
    assert "n1, n3" in text
    assert "clients: 192.0.2.0/24" in text
    head = text.splitlines()[0].split("  ")
    assert head[-1].strip() == "traffic of", "a name of the port matrix's part says more than its number"
    assert re.search(r"(?m)everything between the nodes +vLLM over several nodes; NCCL, Gloo, RDMA; Ray", text)
    own = rules(settings={"extra": [{"from": ["192.0.2.0/24"], "ports": [80]}]})
    assert re.search(r"(?m)firewall_extra\[0\] +the site$", matrix.render([own]))
    page = matrix.render(found, "html")
    assert page.count("<svg") == 1
    assert page.count("<rect") == 3 + 2, "three sources, two kinds of nodes"
    assert page.count("<path") == 2 + 3
    off = firewall.rules(plan(), "n1", {}, {})
    assert "firewall_mode is off" in matrix.render([off])
    assert "not filtered" in matrix.render([off], "html")


def test_rules_survive_json_and_do_not_change_the_plan() -> None:
    cluster = plan()
    before = copy.deepcopy(cluster)
    found = rules(plan=cluster)
    assert cluster == before
    assert yaml.safe_load(yaml.safe_dump(found)) == found


def test_the_role_hands_over_what_is_read() -> None:
    role = ROLES / "firewall"
    private = yaml.safe_load((role / "vars/main.yml").read_text())
    public = yaml.safe_load((role / "defaults/main.yml").read_text())
    assert private["__firewall_port_names"] == [*RAY_PORTS, *ports.FILE_PORTS]
    for name, port in ports.FILE_PORTS.items():
        role = name.removesuffix("_serve_port")
        assert yaml.safe_load((ROLES / role / "defaults/main.yml").read_text())[name] == port
    assert set(private["__firewall_settings"]) == set(firewall.DEFAULTS)
    named = {name: public[f"firewall_{name}"] for name in firewall.DEFAULTS if f"firewall_{name}" in public}
    assert named == {name: firewall.DEFAULTS[name] for name in named}
    assert set(firewall.DEFAULTS) - set(named) == {"ssh_between_nodes", "time_serve"}
