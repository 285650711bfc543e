"""What nccl_check makes of answers. Runtime and nvidia-smi are stand-ins; NCCL speaks as in public logs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "nccl"
Run = Callable[..., dict[str, Any]]
Load = Callable[[str], Any]
SIZES = [{"mib": 1, "iterations": 20, "seconds": 0.0001, "bus_gb_s": 12.0}]
SIZES += [{"mib": 1024, "iterations": 20, "seconds": 0.0039, "bus_gb_s": 472.5}]
RESULT = "ironrack-result " + json.dumps({"ok": True, "sizes": SIZES})
LOG = """\
n1:984:984 [4] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =eth1
n1:984:984 [4] NCCL INFO Bootstrap: Using eth1:10.77.1.11<0>
n1:984:984 [0] NCCL INFO NCCL version 2.27.7+cuda13.0
n1:984:990 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth1:10.77.1.11<0>
n1:984:990 [0] NCCL INFO Using network IB
n1:984:990 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
n1:984:990 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
n1:984:990 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0(8)/GDRDMA
n1:984:990 [0] NCCL INFO Channel 01/0 : 15[7] -> 0[0] [receive] via NET/IB/1/GDRDMA
n1:984:990 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM
n1:984:990 [0] NCCL INFO 16 coll channels, 16 collnet channels, 16 nvls channels, 16 p2p channels
n1:984:991 [0] NCCL WARN NET/IB : Got completion from peer 10.77.1.12<55921> with status=12 opcode=1 len=0
n1:984:992 [1] NCCL WARN NET/IB : Got completion from peer 10.77.1.12<55921> with status=12 opcode=1 len=0
"""
FAILED = """\
n1:984:991 [0] NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable
[rank0]: Traceback (most recent call last):
Traceback (most recent call last):
  File "<string>", line 15, in <module>
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled system \
error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.7
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Call to ibv_modify_qp failed with error Network is unreachable
Exception raised from create at NCCLUtils.cpp:93 (most recent call first):
frame #0: c10::Error::Error + 0x80
"""
HUNG = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] [Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=135000) ran for 135009 milliseconds
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):
"""
LOST = """\
Traceback (most recent call last):
torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.cpp:93, remote process exited or there was a network \
error, NCCL version 2.27.7
"""


class Host:
    """Stand-ins on one simulated node: nvidia-smi, systemctl, and the runtime's Python."""

    def __init__(self, folder: Path, name: str = "n1") -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        self.gpus(2)
        self.program("systemctl", "")
        self.runtime(f"echo '{RESULT}'")
        (self.folder / "node.env").write_text(
            'NCCL_SOCKET_IFNAME="=eth1"\nNCCL_DEBUG_FILE=/x\nVLLM_HOST_IP=::1\n', "utf-8"
        )

    def program(self, name: str, script: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    def gpus(self, count: int, used: int = 4, holder: str = "") -> None:
        rows = "\n".join(f"{number}, NVIDIA H200, {used}" for number in range(count))
        apps = f"echo {holder}" if holder else ":"
        self.program("nvidia-smi", f"case $1 in --query-gpu*) echo '{rows}';; *) {apps};; esac")

    def runtime(self, ranks: str, count: str = "13.0 2") -> None:
        """The rank's argument is $R, in JSON."""
        self.program("python", f'if [ $# = 3 ]; then echo "{count}"; exit; fi\nR=$4\ncd {self.folder}\n{ranks}')

    def check(self, run: Run, **more: Any) -> dict[str, Any]:
        result = run(
            "nccl_check",
            programs=str(self.folder),
            node=self.name,
            python=str(self.folder / "python"),
            environment_file=str(self.folder / "node.env"),
            log_dir=str(self.folder / "log"),
            **more,
        )
        assert result.get("changed") is False, result
        nccl: dict[str, Any] = result["nccl"]
        return nccl


@pytest.fixture(name="host")
def fixture_host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def pair(port: int, *nodes: str, number: int = 1) -> dict[str, Any]:
    return {"kind": "pair", "nodes": list(nodes), "address": "127.0.0.1", "port": port, "round": number}


def test_one_process_for_each_gpu_with_the_units_variables(run: Run, host: Host) -> None:
    host.runtime(
        'echo "$R" > rank.$$; env > env.$$\n'
        "until [ $(ls rank.* | wc -l) = 2 ]; do sleep 0.05; done\n"
        f"cat << 'END'\n{LOG}{RESULT}\nEND"
    )
    nccl = host.check(run, mib=64)
    (alone,) = nccl["runs"]
    assert (nccl["tested"], nccl["why"], nccl["gpus"]) == (True, None, ["NVIDIA H200"] * 2)
    assert (alone["kind"], alone["ok"], alone["ranks"], alone["bus_gb_s"]) == ("alone", True, 2, 472.5)
    assert alone["sizes"] == SIZES
    ranks = sorted((json.loads(p.read_text("utf-8")) for p in host.folder.glob("rank.*")), key=lambda r: r["rank"])
    assert [(r["rank"], r["world"], r["device"], r["mib"]) for r in ranks] == [(0, 2, 0, 64), (1, 2, 1, 64)]
    assert ranks[0]["port"] == ranks[1]["port"]
    variables = next(iter(host.folder.glob("env.*"))).read_text("utf-8")
    assert "NCCL_SOCKET_IFNAME==eth1\n" in variables
    assert "NCCL_DEBUG=INFO\n" in variables
    assert "NCCL_DEBUG_FILE" not in variables
    assert nccl["variables"] == {"NCCL_DEBUG_FILE": "/x", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert LOG in (host.folder / "log" / "alone-0.log").read_text("utf-8")


def test_what_nccl_says_is_read(load: Load) -> None:
    told = load("nccl_check").read_logs([LOG, LOG])
    assert told == {
        "version": "2.27.7+cuda13.0",
        "network": "IB",
        "interface": "eth1",
        "nvls": 16,
        "gdr": ["enabled"],
        "via": {"NET/IB/GDRDMA": 4, "P2P/CUMEM": 2},
        "warnings": ["NET/IB : Got completion from peer 10.77.1.12<55921> with status=12 opcode=1 len=0"],
    }
    old = (
        "n1:1:1 [0] NCCL INFO Bootstrap : Using [0]ib0:192.168.1.8<0>\n"
        "n1:1:1 [0] NCCL INFO Channel 00/02 : 0[0] -> 1[1] [send] via NET/Socket/0\n"
    )
    told = load("nccl_check").read_logs([old])
    assert (told["interface"], told["via"]) == ("ib0", {"NET/Socket": 1})


@pytest.mark.parametrize(
    ("log", "interface", "via", "fastest"),
    [("one_node_nvlink", "eth0", {"P2P/CUMEM": 14}, 329.197), ("two_nodes_sockets", "lo", {"NET/Socket": 4}, 3.342)],
)
def test_logs_of_two_h200(load: Load, log: str, interface: str, via: dict[str, int], fastest: float) -> None:
    """Recorded with PyTorch 2.11 on two GPUs of one host, the second as two nodes over loopback; names are changed."""
    text = (FIXTURES / f"{log}.log").read_text("utf-8")
    told = load("nccl_check").outcome([text], [0], False, 180)
    assert (told["ok"], told["bus_gb_s"], told["sizes"][-1]["mib"]) == (True, fastest, 1024)
    assert (told["version"], told["network"], told["interface"]) == ("2.28.9+cuda13.0", "Socket", interface)
    assert (told["nvls"], told["gdr"], told["warnings"]) == (0, [], [])
    assert {name: count for name, count in told["via"].items() if name in via} == via


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        (f"cat << 'END'\n{FAILED}END\nexit 1", "torch.distributed.DistBackendError: NCCL error in: "),
        ("exit 3", "ended with code 3 and no word"),
        # A collective that hangs, as PyTorch's watchdog tells it.
        (f"cat << 'END'\n{HUNG}END\nexit 134", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL"),
        ('echo \'ironrack-result {"ok": false, "sizes": []}\'', "the sum is wrong"),
        # The one that failed first knows why.
        (
            f"case $R in *'\"rank\": 0,'*) cat << 'END'\n{LOST}END\n;; *) cat << 'END'\n{FAILED}END\n;; esac\nexit 1",
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc",
        ),
    ],
)
def test_failure_is_told_in_its_own_words(run: Run, host: Host, ranks: str, error: str) -> None:
    host.runtime(ranks)
    (alone,) = host.check(run)["runs"]
    assert (alone["ok"], alone["error"][: len(error)], alone["bus_gb_s"]) == (False, error, None)
    if "Backend" in error:
        assert "Last error: Call to ibv_modify_qp failed with error Network is unreachable" in alone["error"]
        assert "frame" not in alone["error"]
        assert alone["warnings"] == ["Call to ibv_modify_qp failed with error Network is unreachable"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").split()[2] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    end = time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_ranks_that_hang_are_ended_with_their_children(load: Load, host: Host) -> None:
    host.runtime("sleep 300 & echo $! > child\nwait")
    (host.folder / "log").mkdir()
    parameters = {"python": str(host.folder / "python"), "log_dir": str(host.folder / "log"), "mib": 1}
    ranks = [{"rank": 0, "world": 1, "device": 0, "host": "127.0.0.1", "port": 1}]
    told = load("nccl_check").exchange(parameters, dict(os.environ), "alone", ranks, time.monotonic() + 1)
    assert (told["ok"], told["error"]) == (False, "timed out: no end within 10 seconds")
    assert gone(int((host.folder / "child").read_text("utf-8")))


def test_once_a_rank_has_failed_the_others_are_not_waited_for(load: Load) -> None:
    class Rank:
        def __init__(self, code: int | None) -> None:
            self.returncode = code

        def poll(self) -> int | None:
            return self.returncode

    module = load("nccl_check")
    clock = iter(range(0, 1000, 5))
    module.time = type("Clock", (), {"monotonic": lambda: next(clock), "sleep": lambda _: None})
    assert module.await_all([Rank(1), Rank(None)], 1000) is False
    assert next(clock) < 60


# --- what is not tested ----------------------------------------------------------------------------------------------


def test_nothing_is_tested_without_gpus_or_runtime(run: Run, host: Host) -> None:
    nccl = host.check(run, nvidia_smi="no-such-program")
    assert (nccl["tested"], nccl["why"], nccl["runs"][0]["why"]) == (False, "no GPUs here", "no GPUs here")
    host.runtime("exit 9", count=" 0")
    assert host.check(run)["why"] == "the runtime's PyTorch is built without CUDA"
    host.runtime("exit 9", count="13.0 0")
    assert host.check(run)["why"] == "the runtime's PyTorch finds no GPU"
    host.runtime("exit 9", count="13.0 1")
    assert (host.check(run)["why"], host.check(run)["runs"][0]["why"]) == (None, "one GPU")
    host.program("python", "echo 'ImportError: libcudart.so.13' >&2; exit 1")
    assert host.check(run)["why"] == "the runtime's PyTorch does not load: ImportError: libcudart.so.13"
    (host.folder / "python").unlink()
    assert host.check(run)["why"] == "no runtime yet"
    assert not (host.folder / "log").exists() or not list((host.folder / "log").iterdir())


def test_gpus_in_use_are_left_alone(run: Run, load: Load, host: Host, tmp_path: Path) -> None:
    host.runtime("touch ran")
    host.program("systemctl", "echo 'vllm@llm.service loaded active running vLLM'")
    assert host.check(run)["why"] == "GPUs are in use by vllm@llm"
    host.program("systemctl", "")
    host.gpus(2, used=70000, holder="4711")
    assert host.check(run)["why"] == "GPU 0 is in use: 70000 MiB (process 4711)"
    assert not (host.folder / "ran").exists()
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711" / "cgroup").write_text("0::/system.slice/system-vllm.slice/vllm@llm.service\n", "utf-8")
    assert load("nccl_check").unit_of("4711", str(tmp_path)) == "vllm@llm.service"
    assert load("nccl_check").unit_of("4712", str(tmp_path)) == ""


def test_rdma_ports(load: Load, tmp_path: Path) -> None:
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "1: DOWN", "40 Gb/sec (4X QDR)"),
    ):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", "InfiniBand")):
            (port / file).write_text(f"{text}\n", "utf-8")
    first, second = load("nccl_check").rdma_ports(str(tmp_path))
    assert first == {"name": "mlx5_0", "port": 1, "active": True, "link_layer": "InfiniBand", "gbit": 400.0}
    assert (second["active"], second["gbit"]) == (False, 40.0)


# --- several nodes ---------------------------------------------------------------------------------------------------


@pytest.fixture(name="port")
def fixture_port(load: Load) -> int:
    port: int = load("nccl_check").free_port("127.0.0.1")
    return port


def together(run: Run, meetings: list[dict[str, Any]], *hosts: Host) -> dict[str, dict[str, Any]]:
    """All nodes at the same time, the later ones a moment later."""

    def one(number: int, host: Host) -> dict[str, Any]:
        time.sleep(0.2 * number)
        return host.check(run, meetings=[meeting for meeting in meetings if host.name in meeting["nodes"]])

    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [pool.submit(one, number, host) for number, host in enumerate(hosts)]
        return {host.name: each.result() for host, each in zip(hosts, found, strict=True)}


def test_ranks_of_two_nodes_have_one_meeting_point(run: Run, tmp_path: Path, port: int) -> None:
    hosts = [Host(tmp_path, name) for name in ("n1", "n2")]
    for host, count in zip(hosts, (2, 3), strict=True):
        host.runtime(f"echo \"$R\" >> rank.$$\necho '{RESULT}'", count=f"13.0 {count}")
    found = together(run, [pair(port, "n1", "n2")], *hosts)
    for nccl in found.values():
        assert (nccl["runs"][1]["ok"], nccl["runs"][1]["ranks"]) == (True, 5)
    ranks = [json.loads(path.read_text("utf-8")) for path in tmp_path.glob("*/rank.*")]
    pairs = sorted((r["rank"], r["device"], r["host"], r["port"]) for r in ranks if r["world"] == 5)
    assert [(rank, device) for rank, device, _, _ in pairs] == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 2)]
    assert len({(host, number) for _, _, host, number in pairs}) == 1


def test_a_node_that_cannot_take_part_says_so(run: Run, tmp_path: Path, port: int) -> None:
    for cannot in ("n1", "n2"):
        (tmp_path / cannot).mkdir()
        hosts = [Host(tmp_path / cannot, name) for name in ("n1", "n2")]
        next(host for host in hosts if host.name == cannot).program("systemctl", "echo vllm@llm.service")
        begin = time.monotonic()
        found = together(run, [pair(port, "n1", "n2")], *hosts)
        assert time.monotonic() - begin < 20
        for nccl in found.values():
            assert nccl["runs"][1]["why"] == f"{cannot}: GPUs are in use by vllm@llm"


def test_three_nodes_in_turn(run: Run, tmp_path: Path, port: int) -> None:
    hosts = [Host(tmp_path, name) for name in ("n1", "n2", "n3")]
    whole = {**pair(port, "n1", "n2", "n3", number=4), "kind": "all"}
    # n3 comes to the port of n1 while n1 is there for n2, and has to come again.
    meetings = [pair(port, "n1", "n2"), pair(port + 1, "n2", "n3", number=2), pair(port, "n1", "n3", number=3), whole]
    found = together(run, meetings, *hosts)
    for name, nccl in found.items():
        assert [each["ok"] for each in nccl["runs"]] == [True] * (len(nccl["runs"])), name
        assert len(nccl["runs"]) == 4


def test_strangers_and_nodes_of_another_meeting_are_sent_away(load: Load, port: int) -> None:
    module = load("nccl_check")
    hello = {"node": "n1", "gpus": 2, "why": None}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        meeting = pool.submit(module.collect, pair(port, "n1", "n2"), hello, time.monotonic() + 10)
        for word in (b"GET / HTTP/1.0\r\n\r\n\n", b'{"meeting": "all n1 n2", "node": "n2", "gpus": 9}\n'):
            connection = None
            while connection is None:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            with connection:
                connection.sendall(word)
                assert connection.recv(100) == b""
        told = module.join(pair(port, "n1", "n2"), {**hello, "node": "n2"}, time.monotonic() + 10)
        assert told == meeting.result()
        assert (told["why"], told["gpus"]) == (None, [2, 2])


def test_a_node_that_does_not_come(load: Load, port: int) -> None:
    module = load("nccl_check")
    hello = {"node": "n1", "gpus": 2, "why": None}
    end = time.monotonic() + 0.4
    assert module.collect(pair(port, "n1", "n2"), hello, end) == {"why": "n2 did not come"}
    told = module.join(pair(port, "n2", "n1"), hello, time.monotonic() + 0.4)
    assert told == {"why": "n2 did not come"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"mib": 0}, "mib=0 is not between 1 and 16384"),
        ({"timeout": 5}, "timeout=5 is not between 30 and 1800"),
        ({"meetings": [pair(1, "n2", "n3")]}, "pair n2 n3 has no n1"),
    ],
)
def test_wrong_values(run: Run, wrong: dict[str, Any], told: str) -> None:
    result = run("nccl_check", node="n1", python="/bin/true", environment_file="/dev/null", **wrong)
    assert result["failed"]
    assert told in result["msg"]
