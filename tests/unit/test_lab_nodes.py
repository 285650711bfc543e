"""Module lab_nodes against an engine that only writes down what it is told."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.modules import lab_nodes

NETWORKS = [{"name": "cluster", "subnet": "10.1.1.0/24", "gateway": "10.1.1.1", "interface": "eth0"}]
NODES: list[dict[str, Any]] = [
    {"name": "n1", "suite": "bookworm", "addresses": {"cluster": "10.1.1.11"}, "forwards": []},
    {"name": "n2", "suite": "bookworm", "addresses": {"cluster": "10.1.1.12"}, "forwards": []},
]


def parameters(**changes: Any) -> dict[str, Any]:
    return {
        "executable": ["engine"],
        "engine": "podman",
        "lab": "demo",
        "prefix": "",
        "state": "present",
        "internal": True,
        "networks": NETWORKS,
        "nodes": NODES,
        "images": {"bookworm": "image:1"},
        "mounts": [{"source": "/a", "target": "/b", "read_only": True}],
        "publish": False,
        "shm_size": "1g",
        "files": [{"path": "/etc/x", "content": "x\n", "mode": "0644", "owner": "root"}],
        "boot_timeout": 5,
        "lock": None,
        **changes,
    }


class FakeEngine:
    """Remembers containers, networks and files, as podman would."""

    def __init__(self, _executable: Any = None) -> None:
        self.calls: list[list[str]] = []
        self.made: dict[str, dict[str, Any]] = {}
        self.nets: dict[str, str] = {}
        self.files: dict[str, dict[str, str]] = {}
        self.broken: set[str] = set()

    def __call__(self, *arguments: str, data: bytes | None = None, check: bool = True) -> str:
        words = list(arguments)
        self.calls.append(words)
        labels = [word.partition("=")[2] for word in words if word.startswith("ironrack.digest=")]
        if words[0] == "create":
            name = words[words.index("--name") + 1]
            self.made[name] = {"digest": labels[0], "running": False}
        elif words[0] == "start":
            if words[1] in self.broken:
                self.broken.discard(words[1])
                raise lab_nodes.EngineError("broken")
            self.made[words[1]]["running"] = True
        elif words[0] == "rm":
            del self.made[words[-1]]
            self.files.pop(words[-1], None)
        elif words[:2] == ["network", "create"]:
            self.nets[words[-1]] = labels[0]
        elif words[:2] == ["network", "rm"]:
            del self.nets[words[-1]]
        elif words[0] == "exec" and "sh" in words:
            return self.probe(words[2])
        elif words[0] == "exec":
            assert data
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for member in archive:
                    self.files.setdefault(words[2], {})[f"/{member.name}"] = member.uname
        return ""

    def probe(self, name: str) -> str:
        item = parameters()["files"][0]
        signature = lab_nodes.file_signature(item)
        line = f"file {signature} /etc/x" if "/etc/x" in self.files.get(name, {}) else "file - /etc/x"
        return f"state running\nkey ssh-ed25519 AAAA{name} root@{name}\n{line}\n"

    def containers(self, _lab: str) -> dict[str, tuple[str, bool]]:
        return {name: (item["digest"], item["running"]) for name, item in self.made.items()}

    def networks(self, _lab: str) -> dict[str, str]:
        return dict(self.nets)


def reconcile(engine: FakeEngine, check_mode: bool = False, **changes: Any) -> tuple[list[str], dict[str, Any]]:
    reconciler = lab_nodes.Reconciler(parameters(**changes), check_mode)
    reconciler.engine = engine
    nodes = reconciler.run()
    return sorted(reconciler.actions), nodes


def test_everything_is_made_once() -> None:
    engine = FakeEngine()
    actions, nodes = reconcile(engine)
    assert actions == [
        "create network cluster",
        "create node n1",
        "create node n2",
        "install 1 files in node n1",
        "install 1 files in node n2",
    ]
    assert nodes["n2"] == {"state": "running", "failed_units": [], "host_keys": ["ssh-ed25519 AAAAn2"]}
    assert reconcile(engine)[0] == []


def test_a_stopped_node_is_started_and_keeps_its_files() -> None:
    engine = FakeEngine()
    reconcile(engine)
    engine.made["n1"]["running"] = False
    assert reconcile(engine)[0] == ["start node n1"]


def test_a_node_that_a_killed_run_left_broken_is_made_anew() -> None:
    engine = FakeEngine()
    reconcile(engine)
    engine.made["n1"]["running"] = False
    engine.broken.add("n1")
    assert "make node n1 anew" in reconcile(engine)[0]
    assert engine.made["n1"]["running"]


def test_a_changed_declaration_replaces_that_node_alone() -> None:
    engine = FakeEngine()
    reconcile(engine)
    moved = [NODES[0], {**NODES[1], "addresses": {"cluster": "10.1.1.99"}}]
    actions, _ = reconcile(engine, nodes=moved)
    assert actions == ["create node n2", "install 1 files in node n2", "remove node n2"]


def test_a_changed_network_replaces_all_on_it() -> None:
    engine = FakeEngine()
    reconcile(engine)
    actions, _ = reconcile(engine, networks=[{**NETWORKS[0], "subnet": "10.1.0.0/16"}])
    assert {"remove node n1", "remove node n2", "remove network cluster", "create network cluster"} <= set(actions)


def test_an_undeclared_node_goes() -> None:
    engine = FakeEngine()
    reconcile(engine)
    assert reconcile(engine, nodes=NODES[:1])[0] == ["remove node n2"]


def test_absent_removes_all_and_is_idempotent() -> None:
    engine = FakeEngine()
    reconcile(engine)
    assert reconcile(engine, state="absent")[0] == ["remove network cluster", "remove node n1", "remove node n2"]
    assert (engine.made, engine.nets) == ({}, {})
    assert reconcile(engine, state="absent")[0] == []


def test_check_mode_tells_and_touches_nothing() -> None:
    engine = FakeEngine()
    actions, _ = reconcile(engine, check_mode=True)
    assert "create node n1" in actions
    assert engine.calls == []


def test_a_suite_without_image_is_named() -> None:
    with pytest.raises(lab_nodes.EngineError, match="no image is given for suite 'bookworm'"):
        reconcile(FakeEngine(), images={})


def test_nodes_never_get_what_reaches_the_machine_below() -> None:
    for engine in ("podman", "docker"):
        arguments, _ = lab_nodes.node_arguments(parameters(engine=engine), NODES[0], "image:1")
        line = " ".join(arguments)
        for capability in ("SYS_TIME", "SYS_RESOURCE", "SYS_MODULE", "SYS_RAWIO"):
            assert f"--cap-drop {capability}" in line
        assert "--privileged" not in line
        assert "/a:/b:ro" in line


def test_podman_fixes_addresses_and_interface_names() -> None:
    arguments, _ = lab_nodes.node_arguments(parameters(), NODES[0], "image:1")
    assert "cluster:ip=10.1.1.11,interface_name=eth0" in arguments


@pytest.mark.parametrize("engine", ["podman", "docker"])
def test_a_network_of_both_families_gives_a_node_both_addresses(engine: str) -> None:
    network = {**NETWORKS[0], "subnet6": "fd00:1::/64", "gateway6": "fd00:1::1"}
    wanted = parameters(engine=engine, networks=[network])
    node = {**NODES[0], "addresses": {"cluster": ["10.1.1.11", "fd00:1::11"]}}
    arguments, _ = lab_nodes.node_arguments(wanted, node, "image:1")
    assert "ip=10.1.1.11,ip6=fd00:1::11" in " ".join(arguments)
    made, _ = lab_nodes.network_arguments(wanted, network)
    assert " ".join(made[2:10]) == "--subnet 10.1.1.0/24 --gateway 10.1.1.1 --subnet fd00:1::/64 --gateway fd00:1::1"
    # podman takes the word as a wish for one more subnet, of IPv4.
    assert ("--ipv6" in made) is (engine == "docker")


def test_a_network_of_one_family_is_declared_as_before() -> None:
    """Otherwise the digest differs, and every lab that runs would be made anew."""
    plain, _ = lab_nodes.network_arguments(parameters(), NETWORKS[0])
    assert plain == lab_nodes.network_arguments(parameters(), {**NETWORKS[0], "subnet6": None, "gateway6": None})[0]
    assert "--ipv6" not in plain


def test_docker_publishes_what_is_forwarded() -> None:
    node = {**NODES[0], "forwards": [{"listen": "127.0.0.1:2222", "port": 22}]}
    wanted = parameters(engine="docker", prefix="p-", publish=True)
    arguments, _ = lab_nodes.node_arguments(wanted, node, "image:1")
    assert arguments[arguments.index("--publish") + 1] == "127.0.0.1:2222:22"
    assert arguments[arguments.index("--name") + 1] == "p-n1"


def test_probe_output_is_read_whole() -> None:
    text = "state degraded\nfailed x.service loaded failed failed X\nkey ssh-ed25519 AAAA root@n1\n"
    text += "file 644 root abc /etc/x\n"
    assert lab_nodes.parse_probe(text) == {
        "state": "degraded",
        "failed_units": ["x.service"],
        "host_keys": ["ssh-ed25519 AAAA"],
        "files": {"/etc/x": "644 root abc"},
    }


def test_archive_names_owners() -> None:
    data = lab_nodes.archive_of([{"path": "/home/ops/k", "content": "k\n", "mode": "0600", "owner": "ops"}])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.getmembers()[0]
    assert (member.name, member.uname, member.mode) == ("home/ops/k", "ops", 0o600)


def test_inspection_of_both_engines_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "ps": "n1\nn2\n",
        "inspect": json.dumps(
            [
                {"Name": "/n1", "Config": {"Labels": {"ironrack.digest": "d"}}, "State": {"Running": True}},
                {"Name": "n2", "Config": {"Labels": None}, "State": {"Running": True, "Paused": True}},
            ]
        ),
    }
    monkeypatch.setattr(lab_nodes.Engine, "__call__", lambda _self, *arguments, **_: answers[arguments[0]])
    assert lab_nodes.Engine(["e"]).containers("demo") == {"n1": ("d", True), "n2": (None, False)}


def test_a_container_whose_removal_was_killed_is_removed_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its storage is gone and its name is not: inspecting it fails, and with it everything that asks for all nodes."""
    sound = {"Name": "n1", "Config": {"Labels": {"ironrack.digest": "d"}}, "State": {"Running": True}}

    def engine(_self: Any, *arguments: str, **_: Any) -> str:
        if arguments[0] == "ps":
            return "n1\nn2\n"
        if "n2" in arguments:
            raise lab_nodes.EngineError("inspect failed with code 125: container not known")
        return json.dumps([sound])

    monkeypatch.setattr(lab_nodes.Engine, "__call__", engine)
    found = lab_nodes.Engine(["e"]).containers("demo")
    assert found == {"n1": ("d", True), "n2": (None, False)}

    fake = FakeEngine()
    reconcile(fake)
    fake.made["n2"]["digest"] = None
    assert reconcile(fake)[0] == ["create node n2", "install 1 files in node n2", "remove node n2"]
