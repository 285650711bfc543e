"""One service keeps the clock: never none where the clock may be set, and never two."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts import time_service

NODES: dict[str, Any] = {
    name: {"address": address, "groups": ["ironrack_nodes", "ironrack_runtime"]}
    for name, address in {"n1": "10.77.1.11", "n2": "10.77.1.12", "n3": "fd00:77:1::13", "n4": None}.items()
}
BARE = {"time_services": [], "time_ours": False, "may_set_clock": True}


def decide(found: dict[str, Any] | None = None, host: str = "n2", **more: Any) -> dict[str, Any]:
    options = {"servers": [], "serve": False, "nodes": NODES, **more}
    nodes = options.pop("nodes")
    return time_service.plan({**BARE, **(found or {})}, host, nodes, **options)


def problem(**more: Any) -> str:
    found = decide(**more)
    assert (found["packages"], found["files"], found["units"]) == ([], [], [])
    (text,) = found["problems"]
    assert isinstance(text, str)
    return text


def text_of(answer: dict[str, Any], path: str = time_service.CONFIGURATION) -> str:
    return next(str(entry["content"]) for entry in answer["files"] if entry["path"] == path)


def test_a_bare_host_gets_chrony_as_its_package_sets_it_up() -> None:
    answer = decide()
    assert answer["packages"] == ["chrony"]
    assert answer["files"] == []
    assert [unit["name"] for unit in answer["units"]] == ["chrony.service"]


@pytest.mark.parametrize("unit", ["systemd-timesyncd.service", "ntpsec.service", "phc2sys@eth0.service"])
def test_what_keeps_the_clock_already_stays(unit: str) -> None:
    answer = decide({"time_services": [unit]})
    assert (answer["packages"], answer["files"], answer["units"], answer["problems"]) == ([], [], [], [])
    assert unit in answer["why"]


def test_where_nobody_may_set_the_clock_nothing_is_installed_unasked() -> None:
    assert decide({"may_set_clock": False})["packages"] == []
    assert decide({"may_set_clock": False}, servers=["time.example.org"])["packages"] == ["chrony"]


def test_keep_touches_nothing() -> None:
    for found in (BARE, {"time_ours": True}):
        answer = decide(found, mode="keep")
        assert (answer["packages"], answer["files"], answer["units"]) == ([], [], [])


def test_exactly_the_named_servers() -> None:
    answer = decide(servers=["time.example.org", "10.9.9.9", "fd00::9", "2.debian.pool.ntp.org"])
    directives = [line.split()[:2] for line in text_of(answer).splitlines() if line.split()[0] in ("server", "pool")]
    assert directives == [
        ["server", "time.example.org"],
        ["server", "10.9.9.9"],
        ["server", "fd00::9"],
        ["pool", "2.debian.pool.ntp.org"],
    ]
    # Neither the package's servers nor those that DHCP brings.
    assert "include" not in text_of(answer)
    assert "sourcedir" not in text_of(answer)
    assert {"makestep 1 3", "rtcsync"} <= {*text_of(answer).splitlines()}
    assert "allow" not in text_of(answer)
    assert time_service.CONFIGURATION in text_of(answer, time_service.OPTIONS)
    assert f"EnvironmentFile=-{time_service.OPTIONS}" in text_of(answer, time_service.DROP_IN)


def test_a_node_is_asked_by_its_address() -> None:
    answer = decide(servers=["n1", "10.77.1.12", "n3", "n4"], host="n9", serving=dict.fromkeys(NODES, True))
    assert [line for line in text_of(answer).splitlines() if line.startswith("server")] == [
        "server 10.77.1.11 iburst",
        "server 10.77.1.12 iburst",
        "server fd00:77:1::13 iburst",
        "server n4 iburst",
    ]


def test_serving_the_cluster_or_networks() -> None:
    cluster = text_of(decide(serve=True)).splitlines()
    assert [line for line in cluster if line.startswith("allow")] == [
        "allow 10.77.1.11",
        "allow 10.77.1.12",
        "allow fd00:77:1::13",
    ]
    # Without servers of its own, those of the site's settings.
    assert {"local stratum 10 orphan", "include /etc/chrony/chrony.conf"} <= {*cluster}
    assert decide(serve="true") == decide(serve=True)
    assert decide(serve="False") == decide(serve=False)
    both = text_of(decide(serve=["10.20.0.0/16"], servers=["10.9.9.9"]))
    assert "allow 10.20.0.0/16\nlocal stratum 10 orphan\n" in both
    assert "include" not in both


def test_served_or_named_replaces_what_the_package_replaces() -> None:
    assert decide({"time_services": ["systemd-timesyncd.service"]}, serve=True)["packages"] == ["chrony"]
    assert decide({"time_services": ["ntpsec.service"]}, servers=["10.9.9.9"])["packages"] == ["chrony"]


def test_a_second_service_that_would_stay_is_refused() -> None:
    text = problem(found={"time_services": ["chrony.service", "phc2sys.service"]}, servers=["10.9.9.9"])
    assert "base_time_servers" in text
    assert "phc2sys.service" in text
    assert "stop and disable" in text


def test_back_to_the_package_s_settings() -> None:
    answer = decide({"time_ours": True, "time_services": ["chrony.service"]})
    assert [(entry["path"], entry["state"]) for entry in answer["files"]] == [
        (time_service.DROP_IN, "absent"),
        (time_service.OPTIONS, "absent"),
        (time_service.CONFIGURATION, "absent"),
    ]
    assert answer["units"]
    assert answer["packages"] == ["chrony"]
    # Somebody has put another service in its place since.
    other = decide({"time_ours": True, "time_services": ["systemd-timesyncd.service"]})
    assert (other["packages"], other["units"]) == ([], [])
    assert len(other["files"]) == 3


def test_what_points_to_a_file_comes_after_it_and_goes_before_it() -> None:
    """A run that is killed in between leaves a chrony that starts."""
    paths = [entry["path"] for entry in decide(servers=["10.9.9.9"])["files"] if entry.get("state") != "directory"]
    assert paths == [time_service.CONFIGURATION, time_service.OPTIONS, time_service.DROP_IN]
    assert [entry["path"] for entry in decide({"time_ours": True})["files"]] == paths[::-1]


@pytest.mark.parametrize("server", ["n2", "10.77.1.12", "127.0.0.1", "::1"])
def test_a_node_that_names_itself_is_refused(server: str) -> None:
    text = problem(servers=[server], serving={"n2": True})
    assert f"base_time_servers = {server}: is this node, n2, itself" in text
    assert "host_vars/n2.yml" in text


def test_a_node_that_is_named_must_be_prepared() -> None:
    spare = {**NODES, "n5": {"address": "10.77.1.15", "groups": ["ironrack_nodes"]}}
    text = problem(nodes=spare, servers=["n5"], serving={"n5": True})
    assert "base_time_servers = n5: n5 takes no part in the plan" in text


@pytest.mark.parametrize("server", ["n1", "10.77.1.11"])
def test_a_node_that_is_named_must_serve(server: str) -> None:
    text = problem(servers=[server], serving={"n1": False})
    assert f"base_time_servers = {server}: n1 is a node of this cluster and does not serve" in text
    assert "base_time_serve: true for n1" in text
    assert decide(servers=[server], serving={"n1": ["10.77.1.0/24"]})["problems"] == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"servers": ["time.example.org iburst"]}, "base_time_servers = time.example.org iburst: is neither"),
        ({"servers": ["-x"]}, "base_time_servers = -x: is neither"),
        ({"servers": ["10.0.0.256"]}, "base_time_servers = 10.0.0.256: is not an IP address"),
        ({"servers": ["a.example", "a.example"]}, "is named twice"),
        ({"servers": "a.example"}, "is not a list"),
        ({"serve": "yes please"}, "base_time_serve = yes please: is neither true, false nor a list"),
        ({"serve": ["10.0.0.1/8"]}, "write 10.0.0.0/8"),
        ({"serve": ["lan"]}, "base_time_serve = lan: is not a network"),
        (
            {"serve": True, "nodes": {"n2": {"address": None, "groups": []}}},
            "no node of the cluster has a cluster_address",
        ),
        ({"mode": "off"}, "base_time_mode = off: is not known -> choose one of auto, keep"),
        ({"mode": "keep", "servers": ["a.example"]}, "base_time_servers = a.example: has no effect with"),
        ({"mode": "keep", "serve": True}, "base_time_serve = True: has no effect with"),
    ],
)
def test_wrong_variables_are_named_with_value_and_remedy(more: dict[str, Any], expected: str) -> None:
    text = problem(**more)
    assert expected in text
    assert " -> " in text
