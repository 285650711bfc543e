"""Nodes for the tests of the network modules: namespaces of their own with a real kernel's network, joined by a bridge.

A node has its network, its host name, its view of /sys and its own /etc/hosts; files and processes are the machine's.
What a test changes is gone with the node's process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCK = threading.Lock()
SETUP = """
set -e
mount --make-rprivate /
mount -t sysfs sysfs /sys
mount --bind "$2" /etc/hosts
hostname "$1"
ip link set lo up
echo ready
exec sleep 120
"""


def call_module(name: str, parameters: dict[str, Any], *before: str, preamble: str = "") -> dict[str, Any]:
    """The module's result; run as a target does, in a process of its own, behind a command such as nsenter."""
    start = f"import sys\nsys.path[:0] = ['{ROOT}/collections', '{ROOT}/plugins/modules']\n"
    done = subprocess.run(
        [*before, sys.executable, "-c", f"{start}{preamble}\nimport {name}\n{name}.main()\n"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": parameters}),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert not done.stderr, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# Starts a module in a node's namespaces within milliseconds: by a fork of a process that has read the modules already.
# Each call is a process of its own all the same, with arguments on standard input and its result on standard output.
NURSERY = """
import ctypes, importlib, json, os, signal, socket, sys, traceback
sys.path[:0] = [sys.argv[2] + '/collections', sys.argv[2] + '/plugins/modules']
import encodings.ascii, encodings.idna
import net_listener, net_probe
libc = ctypes.CDLL(None, use_errno=True)
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(64)
sys.argv = sys.argv[:1]
print('ready', flush=True)

def child(connection):
    with connection.makefile('rb') as stream:
        asked = json.loads(stream.readline())
    for kind in ('net', 'mnt', 'uts'):
        handle = os.open(f'/proc/{asked["pid"]}/ns/{kind}', os.O_RDONLY)
        if libc.setns(handle, 0):
            raise OSError(ctypes.get_errno(), f'setns {kind}')
        os.close(handle)
    if asked['user']:
        os.setgroups([])
        os.setresgid(*[asked['user']] * 3)
        os.setresuid(*[asked['user']] * 3)
    files = [os.memfd_create(name) for name in ('in', 'out', 'err')]
    os.write(files[0], json.dumps({'ANSIBLE_MODULE_ARGS': asked['options']}).encode())
    os.lseek(files[0], 0, os.SEEK_SET)
    for number, handle in enumerate(files):
        os.dup2(handle, number)
    sys.stdin = open(0, encoding='utf-8', closefd=False)
    try:
        exec(asked['preamble'], {})
        importlib.import_module(asked['name']).main()
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    said = [os.pread(handle, 1 << 26, 0).decode() for handle in files[1:]]
    connection.sendall(json.dumps(said).encode())

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    connection, _ = server.accept()
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        server.close()
        try:
            child(connection)
        finally:
            os._exit(0)
    connection.close()
"""


class Nursery:
    """The one of this process, started when it is needed."""

    process: subprocess.Popen[str] | None = None
    path = ""

    @classmethod
    def call(cls, name: str, options: dict[str, Any], pid: int, user: int, preamble: str) -> dict[str, Any]:
        with LOCK:
            if cls.process is None:
                cls.path = f"{tempfile.mkdtemp(prefix='nursery')}/socket"
                command = [sys.executable, "-c", NURSERY, cls.path, str(ROOT)]
                cls.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                assert cls.process.stdout and cls.process.stdout.readline() == "ready\n"
                atexit.register(cls.end)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(90)
            connection.connect(cls.path)
            question = {"name": name, "options": options, "pid": pid, "user": user, "preamble": preamble}
            connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile("rb") as stream:
                out, error = json.loads(stream.read() or b'["", "the module ended without a word"]')
        assert not error, error
        result: dict[str, Any] = json.loads(out)
        return result

    @classmethod
    def end(cls) -> None:
        assert cls.process
        cls.process.kill()
        cls.process.wait()
        shutil.rmtree(Path(cls.path).parent, ignore_errors=True)


class Stopwatch:
    """Holds a module to a time: the processor's always, the clock's where other work leaves the machine alone."""

    def __enter__(self) -> Stopwatch:
        self.quiet = os.getloadavg()[0] < 1.5 * (os.cpu_count() or 1)
        self.start = time.monotonic()
        self.cpu = self.children()
        return self

    def __exit__(self, *_: object) -> None:
        self.took = time.monotonic() - self.start
        self.cpu = self.children() - self.cpu

    @staticmethod
    def children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def check(self, seconds: float, cpu: float) -> None:
        assert self.cpu <= cpu, f"{self.cpu:.1f} s of the processor"
        assert self.took <= seconds or not self.quiet, f"{self.took:.1f} s"


class Node:
    """One node, its address on the bridge being <network>.<number>."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.path = str(folder / f"{name}.json")
        hosts = folder / f"{name}.hosts"
        hosts.write_text("127.0.0.1 localhost\n")
        self.hosts = hosts
        command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", SETUP, "sh", name, str(hosts)]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.holder.stdout
        self.listener: dict[str, Any] | None = None
        self.address = ""
        self.mac = ""
        self.preamble = ""  # runs in the modules' processes before them
        self.as_user = 0
        self.ready = self.holder.stdout.readline() == "ready\n"

    @property
    def enter(self) -> list[str]:
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--uts"]

    def module(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        return Nursery.call(name, options, self.holder.pid, self.as_user, self.preamble)

    def run(self, *command: str) -> str:
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr}"
        return done.stdout

    def ip(self, words: str) -> str:
        return self.run("ip", *words.split())

    def drop(self, rule: str, verdict: str = "drop") -> None:
        """A rule for what comes in."""
        self.run("nft", "add table inet t; add chain inet t in { type filter hook input priority 0; }")
        self.run("nft", f"add rule inet t in {rule} {verdict}")

    def listen(self, **options: Any) -> dict[str, Any]:
        options = {"node": self.name, "address": self.address, "path": self.path, "lifetime": 60, **options}
        result = self.module("net_listener", options)
        assert "listener" in result, result
        self.listener = result["listener"]
        return result

    def probe(self, *peers: Node, ports: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
        known = {
            peer.name: {"address": peer.address, "listener": peer.listener, "ports": list(ports)} for peer in peers
        }
        defaults = {"node": self.name, "address": self.address, "interface": "eth0", "timeout": 1.0, "path": self.path}
        result = self.module("net_probe", {**defaults, "peers": known, **options})
        assert "probe" in result, result
        found: dict[str, Any] = result["probe"]
        return found

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(json.loads(Path(self.path).read_text())["pid"], signal.SIGTERM)
        self.holder.kill()
        self.holder.communicate()


class Bridge:
    """Nodes on one link. `family` says which addresses they use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.switch = Node(folder, "switch")
        if not self.switch.ready:
            self.switch.holder.kill()
            pytest.skip(f"no namespaces here: {self.switch.holder.communicate()[1].strip()}")
        self.switch.ip("link add br0 type bridge mcast_snooping 0")
        self.switch.ip("link set br0 up")

    def add(self, name: str, family: int = 4) -> Node:
        node = Node(self.folder, name)
        assert node.ready
        self.nodes.append(node)
        number = len(self.nodes)
        node.address = f"10.9.0.{number}" if family == 4 else f"fd09::{number}"
        self.wire(node, "eth0", number)
        node.ip(f"address add {node.address}/{24 if family == 4 else 64} dev eth0" + (" nodad" if family == 6 else ""))
        node.mac = json.loads(node.ip("-json link show eth0"))[0]["address"]
        return node

    def wire(self, node: Node, interface: str, number: int) -> None:
        port = f"{interface}-{number}"
        node.ip(f"link add {interface} type veth peer name {port} netns {self.switch.holder.pid}")
        node.ip(f"link set {interface} up")
        self.switch.ip(f"link set {port} master br0 mtu 9000 up")

    def listen(self, **options: Any) -> None:
        for node in self.nodes:
            node.listen(**options)

    def end(self) -> None:
        for node in [*self.nodes, self.switch]:
            with contextlib.suppress(OSError, AssertionError):
                node.end()


def need_namespaces() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces with a /sys of their own")
