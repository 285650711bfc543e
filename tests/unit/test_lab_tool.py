"""The lab's holder: what it decides before it touches anything."""

from __future__ import annotations

import fcntl
import http.client
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILES = Path(__file__).resolve().parents[2] / "roles" / "lab" / "files"


def load_program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lab_program_{name}", FILES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_program("lab")
doors = load_program("doors")


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "name": "demo",
        "cache": "/cache",
        "engine": "podman",
        "isolation": "closed",
        "prefix": "",
        "storage_driver": "overlay",
        "networks": [
            {"name": "cluster", "subnet": "10.1.1.0/24", "gateway": "10.1.1.1", "interface": "eth0"}
            | {"subnet6": "fd00:1::/64", "gateway6": "fd00:1::1"},
            {"name": "public", "subnet": "10.1.2.0/24", "gateway": "10.1.2.1", "interface": "eth1"},
        ],
        "nodes": [
            {
                "name": "n1",
                "suite": "bookworm",
                "addresses": {"cluster": ["10.1.1.11", "fd00:1::11"], "public": ["10.1.2.11"]},
                "forwards": [
                    {"listen": "127.9.1.11:2222", "port": 22},
                    {"listen": "127.9.1.11:18000", "port": 8000, "network": "public"},
                ],
            },
            {"name": "n2", "suite": "bookworm", "addresses": {"cluster": ["10.1.1.12", "fd00:1::12"]}, "forwards": []},
        ],
        "proxy": {"port": 3142, "hosts": ["extra.example"], "indexes": ["https://index.example/simple"]},
        "image": {
            "base": "",
            "mirror": "http://m.example/debian",
            "security_mirror": "http://s.example/x",
            "packages": [],
        },
        **changes,
    }


def lab(tmp_path: Path, **changes: Any) -> Any:
    (tmp_path / "lab.json").write_text(json.dumps(settings(**changes)))
    return tool.load(tmp_path)


def test_start_time_is_found_behind_any_process_name() -> None:
    tail = " ".join(["S", *(str(number) for number in range(4, 53))])
    assert tool.parse_start(f"7 (a) b (c) {tail}\n") == 22


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_dead_process_has_no_start_time(state: str) -> None:
    assert tool.parse_start(f"7 (x) {state} " + "0 " * 48) is None


def test_own_process_is_recognised_and_a_missing_one_is_not() -> None:
    assert isinstance(tool.process_start(os.getpid()), int)
    assert tool.process_start(2**22 + 1) is None


@pytest.mark.parametrize(
    ("change", "alive"),
    [({}, True), ({"start": 1}, False), ({"boot_id": "another boot"}, False), ({"pid": 2**22 + 1}, False)],
)
def test_holder_is_never_mistaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], alive: bool
) -> None:
    monkeypatch.setattr(tool, "RUN", tmp_path)
    state = {"pid": os.getpid(), "start": tool.process_start(os.getpid()), "boot_id": tool.boot_id(), **change}
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "holder.json").write_text(json.dumps(state))
    assert (tool.holder("demo") is not None) is alive


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_half_a_state_file_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(tool, "RUN", tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "holder.json").write_text(text)
    assert tool.holder("demo") is None


@pytest.mark.parametrize("name", ["", "../x", "Lab", "a b", "x" * 32, "-x"])
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(tool.LabError, match="lab name"):
        tool.run_directory(name)


def test_lock_survives_the_removal_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with tool.locked(path) as first:
        with pytest.raises(tool.LabError, match="another run"), tool.locked(path, timeout=0.1):
            pass
        path.unlink()
        with tool.locked(path, timeout=1) as second:
            assert os.fstat(first).st_ino != os.fstat(second).st_ino
            with path.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_write_atomic_tells_whether_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert tool.write_atomic(path, "a")
    assert not tool.write_atomic(path, "a")
    assert tool.write_atomic(path, "b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_hosts_of_both_source_formats() -> None:
    listed = "deb [signed-by=/k arch=amd64] http://one.example/debian sid main\n# deb http://no.example/ x\n"
    modern = "Types: deb\n# http://no.example/\nURIs: https://two.example/d http://three.example/d\n"
    assert tool.source_hosts(listed) | tool.source_hosts(modern) == {"one.example", "two.example", "three.example"}


def test_allow_list_holds_mirrors_indexes_and_extras(tmp_path: Path) -> None:
    hosts = tool.allowed_hosts(lab(tmp_path))
    assert {"m.example", "s.example", "index.example", "extra.example", "pypi.org"} <= hosts


def test_forwards_take_the_first_network_unless_told() -> None:
    assert tool.forwards(settings()) == [
        {"listen": ["127.9.1.11", 2222], "target": ["10.1.1.11", 22]},
        {"listen": ["127.9.1.11", 18000], "target": ["10.1.2.11", 8000]},
    ]


@pytest.mark.parametrize("address", ["0.0.0.0", "10.1.1.1", "127.0.0.1.example", "::1"])  # noqa: S104
def test_gate_listens_on_loopback_only(address: str) -> None:
    nodes = [{"name": "n", "addresses": {"c": ["10.0.0.1"]}, "forwards": [{"listen": f"{address}:1", "port": 22}]}]
    with pytest.raises(tool.LabError, match="only loopback"):
        tool.forwards(settings(nodes=nodes))


def test_pip_settings_from_files_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    configuration = tmp_path / "pip.conf"
    configuration.write_text(
        f"[global]\nindex-url = https://a.example/simple\nextra-index-url =\n  file:///x\n  https://b.example/simple\n"
        f"[install]\nfind-links = file://{wheels} /not/there\n[download]\nfind-links = /no\n"
    )
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_INDEX", "torch=https://c.example/whl")
    pip = tool.pip_settings()
    indexes = tool.site_indexes(pip)
    assert indexes[0] == "https://a.example/simple"
    assert {"https://b.example/simple", "https://c.example/whl"} <= set(indexes[1:])
    assert {"source": str(wheels), "target": "/opt/wheels-1", "read_only": True} in tool.wheel_mounts(pip)
    assert [mount["source"] for mount in tool.wheel_mounts(pip)].count(str(wheels)) == 1


def test_a_folder_that_is_no_lab_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "RUN", tmp_path / "run")
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "file").touch()
    assert tool.command_down("demo", folder) == 0
    assert (folder / "file").exists()
    (folder / "lab.json").touch()
    assert tool.command_down("demo", folder) == 0
    assert not folder.exists()


def test_partition_drops_both_ways_and_arp_too() -> None:
    rules = tool.partition_rules(["10.0.0.1"], ["10.0.0.2", "10.0.0.3"])
    assert "ip saddr { 10.0.0.1 } ip daddr { 10.0.0.2, 10.0.0.3 } drop" in rules
    assert "ip saddr { 10.0.0.2, 10.0.0.3 } ip daddr { 10.0.0.1 } drop" in rules
    assert rules.count("arp saddr") == 2
    assert "ip6" not in rules


def test_partition_takes_each_family_by_itself() -> None:
    rules = tool.partition_rules(["10.0.0.1", "fd00::1"], ["10.0.0.2", "fd00::2"]).splitlines()
    assert rules[0].startswith("add table")
    assert sorted(line.partition(" cut ")[2] for line in rules[2:]) == [
        "arp saddr ip { 10.0.0.1 } arp daddr ip { 10.0.0.2 } drop",
        "arp saddr ip { 10.0.0.2 } arp daddr ip { 10.0.0.1 } drop",
        "ip saddr { 10.0.0.1 } ip daddr { 10.0.0.2 } drop",
        "ip saddr { 10.0.0.2 } ip daddr { 10.0.0.1 } drop",
        "ip6 saddr { fd00::1 } ip6 daddr { fd00::2 } drop",
        "ip6 saddr { fd00::2 } ip6 daddr { fd00::1 } drop",
    ]
    assert tool.partition_rules(["fd00::1"], ["10.0.0.2"]).count("drop") == 0


def test_the_proxy_listens_at_the_gateways_of_both_families(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps(settings()))
    orders = tool.door_orders(tool.load(tmp_path), 3, 4, [])
    assert [address for address, _ in orders["proxy"]] == ["127.0.0.1", "10.1.1.1", "fd00:1::1", "10.1.2.1"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fd00:dead::1"])
def test_a_door_opens_at_an_address_of_either_family(address: str) -> None:
    """Also at one that no interface has yet: a gateway's address comes and goes with its bridge."""
    listener = doors.listen((address, 0))
    with listener:
        assert listener.getsockname()[0] == address


def test_the_proxy_hands_out_the_labs_conda_channel_and_nothing_beside_it(tmp_path: Path) -> None:
    channel = tmp_path / "node" / "channel"
    (channel / "lab" / "linux-64").mkdir(parents=True)
    (channel / "lab" / "linux-64" / "python-3-0.tar.bz2").write_bytes(b"package")
    (tmp_path / "node" / "secret").write_text("")
    with doors.listen(("127.0.0.1", 0)) as listener:
        proxy = doors.Proxy(listener, frozenset(), tmp_path, channel)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()

        def ask(path: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(*listener.getsockname(), timeout=10)
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

        assert ask("/conda/lab/linux-64/python-3-0.tar.bz2") == (200, b"package")
        for path in ("/conda/lab/linux-64/other", "/conda/lab", "/conda/../secret", "/conda//etc/passwd"):
            assert ask(path) == (404, b""), path
        assert ask("/elsewhere")[0] == 403
        proxy.shutdown()


@pytest.mark.parametrize(
    ("gateway", "isolation", "mirror"),
    [
        ("10.1.1.1", "closed", "http://10.1.1.1:3142/conda"),
        ("fd00:1::1", "closed", "http://[fd00:1::1]:3142/conda"),
        ("10.1.1.1", "none", "file:///var/cache/ironrack/channel"),
    ],
)
def test_nodes_are_told_where_the_conda_channel_is(tmp_path: Path, gateway: str, isolation: str, mirror: str) -> None:
    declared = settings(isolation=isolation, cache=str(tmp_path / "cache"))
    declared["networks"][0]["gateway"] = gateway
    (tmp_path / "id_ed25519.pub").write_text("ssh-ed25519 AAAA")
    assert tool.command_prepare(tmp_path, declared) == 0
    assert json.loads((tmp_path / "lab.json").read_text())["runtime"]["conda_mirror"] == mirror


def test_fault_sides_are_checked(tmp_path: Path) -> None:
    declared = lab(tmp_path)
    assert tool.addresses_of(declared, "n1,n2", "cluster") == ["10.1.1.11", "fd00:1::11", "10.1.1.12", "fd00:1::12"]
    assert tool.addresses_of(declared, "n1", None) == ["10.1.1.11", "fd00:1::11", "10.1.2.11"]
    with pytest.raises(tool.LabError, match="its nodes: n1, n2"):
        tool.addresses_of(declared, "n9", None)
    with pytest.raises(tool.LabError, match="no address on network 'public'"):
        tool.addresses_of(declared, "n2", "public")


def test_engine_configuration_shares_nothing(tmp_path: Path) -> None:
    files = tool.engine_configuration(lab(tmp_path), {"nofile": 20000, "nproc": 300})
    assert 'default_ulimits = ["nofile=20000:20000", "nproc=300:300"]' in files["containers.conf"]
    assert 'network_config_dir = "/cache/podman/demo/networks"' in files["containers.conf"]
    assert 'graphroot = "/cache/podman/demo/storage"' in files["storage.conf"]


def test_limits_never_exceed_what_this_machine_allows() -> None:
    limits = tool.usual_limits()
    assert 0 < limits["nofile"] <= 1048576
    assert 0 < limits["nproc"] <= 32768


def test_image_key_follows_content_mode_and_recipe(tmp_path: Path) -> None:
    file = tmp_path / "node-init"
    file.write_text("a")
    first = tool.image_key(tmp_path, {"suite": "bookworm"})
    assert first == tool.image_key(tmp_path, {"suite": "bookworm"})
    assert first != tool.image_key(tmp_path, {"suite": "trixie"})
    file.chmod(0o755)
    second = tool.image_key(tmp_path, {"suite": "bookworm"})
    assert second != first
    file.write_text("b")
    assert tool.image_key(tmp_path, {"suite": "bookworm"}) != second


def test_digest_ignores_what_the_doors_do_not_use(tmp_path: Path) -> None:
    first = lab(tmp_path).digest
    assert lab(tmp_path, image={}).digest == first
    assert lab(tmp_path, proxy={"port": 1, "hosts": [], "indexes": []}).digest != first


def test_site_certificates_are_those_beyond_the_public_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def certificate(body: str) -> str:
        return f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"

    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "a.crt").write_text(certificate("AAAA"))
    bundle = tmp_path / "bundle"
    bundle.write_text(certificate("AAAA") + certificate("BBBB"))
    monkeypatch.setattr(tool, "CA_BUNDLE", bundle)
    monkeypatch.setattr(tool, "CA_PUBLIC", tmp_path / "public")
    assert tool.site_certificates() == [certificate("BBBB").strip()]


def test_missing_declaration_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(tool.LabError, match="lab_up"):
        tool.load(tmp_path)


def test_command_line_hands_the_rest_to_exec(tmp_path: Path) -> None:
    options = tool.parse(["--dir", str(tmp_path), "exec", "--", "podman", "ps", "--all"])
    assert options.argv == ["podman", "ps", "--all"]
    assert not options.outside


def test_old_packages_leave_the_proxy_cache(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    doors.prune_packages(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
