"""What rdma_check does with two nodes. ib_write_bw is a stand-in (tests/fixtures/rdma), and so are the devices.

Outputs that are read have the form that perftest's own issues show (linux-rdma/perftest 132, 234, 240).
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
STANDIN = ROOT / "tests/fixtures/rdma/ib_write_bw"
Run = Callable[..., dict[str, Any]]
Load = Callable[[str], Any]
LINE = "-" * 87
# As perftest 4.5 and later write it, of a test with a duration over RoCE.
ROCE = f"""\

************************************
* Waiting for client to connect... *
************************************
{LINE}
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 Number of qps   : 4\t\tTransport type : IB
 Connection type : RC\t\tUsing SRQ      : OFF
 PCIe relax order: ON\t\tLock-free      : OFF
 WARNING: CPU is not PCIe relaxed ordering compliant.
 ibv_wr* API     : ON\t\tUsing DDP      : OFF
 CQ Moderation   : 1
 Mtu             : 1024[B]
 Link type       : Ethernet
 GID index       : 3
 Max inline data : 0[B]
 rdma_cm QPs\t : OFF
 Data ex. method : Ethernet
{LINE}
 local address: LID 0000 QPN 0x0108 PSN 0x63ad7d RKey 0x17eedf VAddr 0x007f760c947000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:255:255:05
 remote address: LID 0000 QPN 0x0076 PSN 0xf3810c RKey 0x201600 VAddr 0x007fbb4c981000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:255:255:04
{LINE}
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 1500.000000 != 3300.016000. CPU Frequency is not max.
 1048576    23344            0.00               97.91\t\t     0.011671
{LINE}
"""
# Of all sizes, over InfiniBand, as perftest 4.x writes it.
SIZES = f"""\
{LINE}
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 Mtu             : 4096[B]
 Link type       : IB
{LINE}
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 2          5000           0.042350            0.042185            2.636533
 16         5000             0.34               0.34   \t\t   2.641399
 8388608    5000             197.01             197.00 \t\t   0.002935
{LINE}
"""
BROKEN = f"""\
{LINE}
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 Mtu             : 4096[B]
{LINE}
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 Completion with error at client
 Failed status 12: wr_id 0 syndrom 0x81
scnt=128, ccnt=0
 Failed to complete run_iter_bw function successfully
"""


def test_outputs_are_read(load: Load) -> None:
    module = load("rdma_check")
    assert module.result_of(ROCE) == {"gbit_s": 97.91, "mtu": 1024, "gid_index": 3, "link": "Ethernet"}
    assert module.result_of(SIZES) == {"gbit_s": 197.0, "mtu": 4096, "gid_index": None, "link": "IB"}
    assert module.error_of(ROCE) == module.error_of(SIZES) == ""
    assert module.result_of(BROKEN) is None
    told = (
        "Failed status 12: wr_id 0 syndrom 0x81; scnt=128, ccnt=0; Failed to complete run_iter_bw function successfully"
    )
    assert module.error_of(BROKEN) == f"Completion with error at client; {told}"
    # perftest issue 82: a clock that jumps.
    for figure in ("-nan", "inf", "-inf", "0.00"):
        assert module.result_of(ROCE.replace("97.91", figure)) is None
    # In MB/s it is no figure in Gbit/s.
    assert module.result_of(SIZES.replace("Gb/sec", "MB/sec")) is None


class Host:
    """One simulated node: its devices in a folder of their own, with the stand-in."""

    def __init__(self, folder: Path, name: str, **devices: Any) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        shutil.copy(STANDIN, self.folder)
        self.script("systemctl", "")
        self.variables("")
        self.devices(**devices)

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{text}\n", "utf-8")
        (self.folder / name).chmod(0o755)

    def variables(self, text: str) -> None:
        (self.folder / "node.env").write_text(text, "utf-8")

    def devices(self, **devices: Any) -> None:
        (self.folder / "rdma.json").write_text(json.dumps(devices), "utf-8")
        for name, told in devices.items():
            self.sysfs(name, "ports/1/state", told.get("state", "4: ACTIVE"))
            self.sysfs(name, "ports/1/counters/symbol_error", "7")
            self.sysfs(name, "device/local_cpulist", told.get("cpus", "0-1"))
            for key, value in (("speed", "32.0 GT/s PCIe"), ("width", "16")):
                self.sysfs(name, f"device/current_link_{key}", value)
                self.sysfs(name, f"device/max_link_{key}", value)

    def sysfs(self, device: str, path: str, text: str) -> None:
        file = self.folder / "sys/class/infiniband" / device / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", "utf-8")

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text("utf-8").splitlines()]

    def check(self, run: Run, meetings: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        result = run(
            "rdma_check",
            programs=str(self.folder),
            node=self.name,
            environment_file=str(self.folder / "node.env"),
            sysfs=str(self.folder / "sys"),
            log_dir=str(self.folder / "log"),
            meetings=meetings,
            **more,
        )
        assert result.get("changed") is False, result
        rdma: dict[str, Any] = result["rdma"]
        return rdma


def meeting(port: int, *names: str, rails: int = 1, number: int = 1) -> dict[str, Any]:
    return {
        "nodes": list(names),
        "addresses": ["127.0.0.1", "127.0.0.2"],
        "port": port,
        "round": number,
        "rails": [
            {"rail": rail, "devices": [f"mlx5_{rail}"] * 2, "ports": [1, 1], "wanted_gbit": 360.0}
            for rail in range(rails)
        ],
    }


def together(run: Run, meetings: list[dict[str, Any]], *hosts: Host, **more: Any) -> dict[str, dict[str, Any]]:
    def one(number: int, host: Host) -> dict[str, Any]:
        # Nodes begin at different times.
        time.sleep(0.2 * number)
        return host.check(run, [each for each in meetings if host.name in each["nodes"]], **more)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [pool.submit(one, number, host) for number, host in enumerate(hosts)]
        return {host.name: each.result() for host, each in zip(hosts, found, strict=True)}


@pytest.fixture(name="port")
def fixture_port(load: Load) -> int:
    port: int = load("rdma_check").free_port("127.0.0.1")
    return port


def rails(found: dict[str, dict[str, Any]], name: str, key: str) -> list[Any]:
    return [rail.get(key) for rail in found[name]["runs"][0]["rails"]]


def test_both_ways_over_all_rails(run: Run, tmp_path: Path, port: int) -> None:
    one = Host(tmp_path, "n1", mlx5_0={"gbit": 392.1}, mlx5_1={"gbit": 391.0})
    two = Host(tmp_path, "n2", mlx5_0={"gbit": 390.4}, mlx5_1={"gbit": 389.9, "link": "Ethernet"})
    found = together(run, [meeting(port, "n1", "n2", rails=2)], one, two, seconds=5)
    assert {name: (told["tested"], told["why"], told["version"]) for name, told in found.items()} == {
        "n1": (True, None, "6.06"),
        "n2": (True, None, "6.06"),
    }
    assert [found["n1"]["runs"][0][key] for key in ("peer", "why")] == ["n2", None]
    assert (rails(found, "n1", "gbit_s"), rails(found, "n2", "gbit_s")) == ([392.1, 391.0], [390.4, 389.9])
    assert rails(found, "n2", "gid_index") == [None, 3]
    assert rails(found, "n1", "error") == rails(found, "n2", "peer_error") == [None, None]
    assert rails(found, "n1", "alone_gbit_s") == [None, None]
    assert found["n1"]["devices"]["mlx5_1"] == {"gt_s": 32.0, "width": 16.0, "max_gt_s": 32.0, "max_width": 16.0}
    # Two ends of two rails on each node: first the one serves, then the other.
    calls = [call["argv"] for host in (one, two) for call in host.calls()]
    assert len(calls) == 8
    assert sum(argv[-1] == "127.0.0.1" for argv in calls) == sum(argv[-1] == "127.0.0.2" for argv in calls) == 2
    assert all(" ".join(argv[6:15]) == "-s 1048576 -q 4 -D 5 -f 1 -F" for argv in calls)


def test_ends_stay_beside_their_adapter(run: Run, tmp_path: Path, port: int) -> None:
    cpu = max(os.sched_getaffinity(0))
    one = Host(tmp_path, "n1", mlx5_0={"gbit": 392.1, "cpus": str(cpu)})
    two = Host(tmp_path, "n2", mlx5_0={"gbit": 392.1, "cpus": ""})
    together(run, [meeting(port, "n1", "n2")], one, two)
    assert {tuple(call["cpus"]) for call in one.calls()} == {(cpu,)}
    assert {tuple(call["cpus"]) for call in two.calls()} == {tuple(sorted(os.sched_getaffinity(0)))}


def test_what_the_engines_use_is_used(run: Run, tmp_path: Path, port: int) -> None:
    hosts = [Host(tmp_path, name, mlx5_0={"gbit": 392.1}) for name in ("n1", "n2")]
    for host in hosts:
        host.variables("NCCL_IB_SL=3\nNCCL_IB_TC=106\nNCCL_IB_GID_INDEX=5\nNCCL_IB_ADDR_FAMILY=AF_INET6\n")
    together(run, [meeting(port, "n1", "n2")], *hosts)
    for call in [call for host in hosts for call in host.calls()]:
        assert {"--sl=3", "--tclass=106", "--gid-index=5", "--ipv6"} < set(call["argv"])


def test_slow_rails_are_measured_again_alone(run: Run, tmp_path: Path, port: int) -> None:
    shared = {"gbit": 200.0, "alone": 391.0}
    one = Host(
        tmp_path, "n1", mlx5_0=shared, mlx5_1=shared, mlx5_2={"gbit": 120.0, "alone": 121.0}, mlx5_3={"gbit": 390.0}
    )
    two = Host(tmp_path, "n2", **{f"mlx5_{number}": {"gbit": 390.0} for number in range(4)})
    found = together(run, [meeting(port, "n1", "n2", rails=4)], one, two)
    assert rails(found, "n1", "gbit_s") == [200.0, 200.0, 120.0, 390.0]
    assert rails(found, "n1", "alone_gbit_s") == [391.0, 391.0, 121.0, None]
    assert rails(found, "n2", "alone_gbit_s") == [None] * 4


def test_one_dead_rail_costs_no_other(run: Run, tmp_path: Path, port: int) -> None:
    lost = {"error": " Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81"}
    one = Host(tmp_path, "n1", mlx5_0={"gbit": 392.1}, mlx5_1=lost, mlx5_2={"gbit": 392.1}, mlx5_3={"gbit": 392.1})
    two = Host(tmp_path, "n2", mlx5_0={"gbit": 392.1}, mlx5_1={"gbit": 392.1})
    two.devices(
        mlx5_0={"gbit": 392.1},
        mlx5_1={"gbit": 392.1},
        mlx5_2={"gbit": 392.1, "state": "1: DOWN"},
        mlx5_3={"unready": "Couldn't allocate MR\nfailed to create mr\n Couldn't create IB resources"},
    )
    found = together(run, [meeting(port, "n1", "n2", rails=4)], one, two)
    assert rails(found, "n1", "gbit_s") == [392.1, None, None, None]
    assert rails(found, "n1", "error")[1].endswith("Failed status 12: wr_id 0 syndrom 0x81")
    assert rails(found, "n1", "peer_error")[2] == "mlx5_2:1 is not active (1: DOWN)"
    assert "Couldn't allocate MR; failed to create mr" in rails(found, "n1", "peer_error")[3]
    assert rails(found, "n2", "error")[2] == "mlx5_2:1 is not active (1: DOWN)"
    assert "Couldn't allocate MR" in rails(found, "n2", "error")[3]
    # The other way, it works.
    assert rails(found, "n2", "gbit_s") == [392.1, 392.1, None, None]
    assert not any("mlx5_2" in call["argv"] for host in (one, two) for call in host.calls())


def test_counters_that_grow_are_told(run: Run, tmp_path: Path, port: int) -> None:
    one = Host(tmp_path, "n1", mlx5_0={"gbit": 392.1})
    two = Host(tmp_path, "n2", mlx5_0={"gbit": 392.1})
    grows = 'case "$*" in *127.0.0.2) echo 19 > ../n1/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error;; esac'
    (one.folder / "ib_write_bw").rename(one.folder / "real")
    one.script("ib_write_bw", f'cd {one.folder}\n{grows}\nexec ./real "$@"')
    found = together(run, [meeting(port, "n1", "n2")], one, two)
    assert rails(found, "n1", "counters") == [{"symbol_error": 12}]
    assert rails(found, "n2", "counters") == [{}]


def test_a_node_that_cannot_take_part_keeps_nobody(run: Run, tmp_path: Path, port: int) -> None:
    one, two = (Host(tmp_path, name, mlx5_0={"gbit": 392.1}) for name in ("n1", "n2"))
    one.script("systemctl", "echo 'vllm@llm.service loaded active running vLLM llm'")
    begin = time.monotonic()
    found = together(run, [meeting(port, "n1", "n2")], one, two)
    assert time.monotonic() - begin < 20
    assert found["n1"]["why"] == found["n1"]["runs"][0]["why"] == "adapters are in use by vllm@llm"
    assert (found["n2"]["why"], found["n2"]["runs"][0]["why"]) == (None, "n1: adapters are in use by vllm@llm")
    assert not found["n2"]["tested"]


def test_without_perftest(run: Run, tmp_path: Path) -> None:
    host = Host(tmp_path, "n1", mlx5_0={})
    found = host.check(run, [], program=str(host.folder / "nothing"))
    assert found["why"] == f"{host.folder}/nothing cannot be run (No such file or directory)"


def test_of_an_older_perftest_ipv6_is_not_asked(load: Load, tmp_path: Path) -> None:
    host = Host(tmp_path, "n1", mlx5_0={})
    host.script("ib_write_bw", "case $1 in --version) echo 'Version: 6.06';; *) echo '--ipv6';; esac; exit 1")
    given = {"node": "n1", "seconds": 4, "timeout": 60, "environment_file": "/x", "sysfs": "/sys", "log_dir": "/x"}
    given["program"] = str(host.folder / "ib_write_bw")

    def why(*addresses: str) -> str | None:
        told: str | None = load("rdma_check").Tester({**given, "meetings": [{"addresses": addresses}]}).why
        return told

    assert why("fd00::1", "fd00::2") == "perftest 6.06 cannot meet at IPv6 addresses"
    assert why("10.0.0.1", "10.0.0.2") is None


def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path, port: int) -> None:
    """The module is ended while servers and clients hang."""
    hosts = [Host(tmp_path, name, mlx5_0={"hangs": True}) for name in ("n1", "n2")]
    running = []
    for host in hosts:
        given = {
            "node": host.name,
            "environment_file": str(host.folder / "node.env"),
            "sysfs": str(host.folder / "sys"),
            "log_dir": str(host.folder / "log"),
            "program": str(host.folder / "ib_write_bw"),
            "meetings": [meeting(port, "n1", "n2")],
        }
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "plugins/modules/rdma_check.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "collections")},
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": given}))
        process.stdin.close()
        running.append(process)
    end = time.monotonic() + 20
    while not all((host.folder / "calls").exists() for host in hosts) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)
    for process in running:
        process.kill()
        process.wait()
    time.sleep(0.5)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left


def test_strangers_are_sent_away(load: Load, port: int) -> None:
    module = load("rdma_check")
    met = meeting(port, "n1", "n2")
    hello = {"node": "n1", "meeting": "n1 n2", "why": None}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(module.collect, met, hello, time.monotonic() + 10)
        # The last one is here for another meeting, and comes again.
        for word in (
            b"GET / HTTP/1.0\n",
            b'{"meeting": "n1 n2", "node": "n3"}\n',
            b'{"meeting": "n2 n3", "node": "n2"}\n',
        ):
            connection = None
            while connection is None:
                try:
                    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                except OSError:
                    time.sleep(0.05)
            with connection:
                connection.sendall(word)
                assert connection.recv(100) == b""
        link, told = module.join(met, {**hello, "node": "n2"}, time.monotonic() + 10)
        theirs = waiting.result()
    assert (told["node"], theirs[1]["node"]) == ("n1", "n2")
    for each in (link, theirs[0]):
        each.close()


def test_wrong_arguments_are_named(run: Run) -> None:
    given = {"node": "n1", "environment_file": "/x"}
    assert "seconds=2 is not between 3 and 60" in run("rdma_check", seconds=2, **given)["msg"]
    assert "meetings: n2 n3 is no pair of n1" in run("rdma_check", meetings=[meeting(1, "n2", "n3")], **given)["msg"]
