#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: net_listener
short_description: Let other nodes test the network to this one
version_added: 0.1.0
description:
  - >-
    Starts a small process that accepts connections on the ports that the cluster will use, and on some random high
    ports, so that M(ironrack.vllm.net_probe) on other nodes can tell whether they get through. It tells its name to
    whoever connects, sends datagrams back, tells its clock and takes part in measuring bandwidth.
  - >-
    The process ends with O(state=absent), at the latest after O(lifetime) seconds, and when another one is started.
    Nothing is installed, and no file is left but for an empty lock beside O(path).
  - >-
    It only serves nodes that got its token from this module. Besides taking part in measurements there is nothing that
    it could be asked to do.
  - >-
    Connections of strangers do not keep nodes out: who does not show the token within 5 seconds has to go, and earlier
    when there are many.
  - >-
    The process of another run is not replaced while nodes ask it. O(state=present) waits until it ends or nobody has
    asked it for 20 seconds, which is so after a run that was interrupted, and fails after 30 seconds.
  - With O(state=present) a port that is in use is left to whoever has it.
author:
  - The ironrack authors
options:
  state:
    description: Whether it runs.
    type: str
    choices: [present, absent]
    default: present
  node:
    description: Name of this node, told to those who connect. Required with O(state=present).
    type: str
    default: ""
  address:
    description: >-
      The node's cluster address, an IPv4 or IPv6 literal. The process listens on all addresses of its family, as Ray
      and NCCL do. Required with O(state=present).
    type: str
    default: ""
  ports:
    description: TCP ports to hold, those that the cluster will use.
    type: list
    elements: int
    default: []
  random:
    description: How many further TCP ports to take from the kernel's range of ephemeral ports, 0 to 64.
    type: int
    default: 3
  allowed:
    description: >-
      Addresses of the nodes that may ask. Others are told the name and have to go at once; so they stay out of
      measurements, also with the token. Empty, all may. O(address) always may.
    type: list
    elements: str
    default: []
  spare_units:
    description: >-
      Names or patterns of systemd units. While one of them is active or is being started, free ports of O(ports) are
      not held, since they may be its own.
    type: list
    elements: str
    default: []
  lifetime:
    description: Seconds after which the process ends by itself, 1 to 3600.
    type: int
    default: 300
  path:
    description: Where the process leaves its id and its token. One process for each path.
    type: path
    default: /run/ironrack/net-listener.json
attributes:
  check_mode:
    description: Does the same, since nothing of the host is changed.
    support: full
  diff_mode:
    description: Changes nothing in any mode.
    support: none
seealso:
  - module: ironrack.vllm.net_probe
notes:
  - Needs root for O(path) below C(/run) and for ports below 1024.
"""

EXAMPLES = r"""
- name: Let the other nodes in for the test
  ironrack.vllm.net_listener:
    node: "{{ inventory_hostname }}"
    address: 10.77.1.11
    ports: [6379, 8000, 29501]
    allowed: [10.77.1.12, 10.77.1.13]
    spare_units: ["ray-*.service", "vllm@*.service"]
  register: listener

- name: End it
  ironrack.vllm.net_listener:
    state: absent
"""

RETURN = r"""
listener:
  description: What M(ironrack.vllm.net_probe) has to know; null with O(state=absent).
  returned: always
  type: dict
  contains:
    node:
      description: Name of the node.
      type: str
    address:
      description: Its cluster address.
      type: str
    token:
      description: Lets the nodes of this run ask. It is new with every start.
      type: str
    control:
      description: TCP port for questions.
      type: int
    udp:
      description: UDP port that sends datagrams back.
      type: int
    held:
      description: Those of O(ports) that the process listens on.
      type: list
      elements: int
    busy:
      description: Those of O(ports) that somebody else listens on.
      type: list
      elements: int
    left:
      description: Those of O(ports) that are free and not held because of O(spare_units).
      type: list
      elements: int
    failed:
      description: Those of O(ports) that cannot be held, with C(port) and C(error).
      type: list
      elements: dict
    random:
      description: Random high ports that the process listens on.
      type: list
      elements: int
    iperf3:
      description: Whether iperf3 is installed.
      type: bool
ended:
  description: Whether an earlier process was ended.
  returned: always
  type: bool
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections import OrderedDict

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils import net_wire

BACKLOG = 4096
STRANGER_SECONDS = 0.5  # to read the name: a reset takes away what was not read yet
GREETED_SECONDS = 5  # for a client to go again, or to show that it belongs to the run
UNKNOWN_MOST = 512  # connections from one address that did not show it; a node of the run needs a few dozen
CONNECTIONS_MOST = 8192
QUIET_SECONDS = 20  # after which nobody is taken to need a listener any more
PATIENCE_SECONDS = 30  # for the listener of another run
IDLE_SECONDS = 60
MOST_STREAMS = 64
MOST_SECONDS = 600


class ListenerError(Exception):
    """A problem that names the option and what to do."""


# --- the process -----------------------------------------------------------------------------------------------------


class Listener:
    """Serves until it is told to end. One event loop; threads only where bandwidth is measured."""

    def __init__(self, node, token, tcp, control, udp, *, iperf3=None, allowed=(), spoken=None):
        self.node = node
        self.token = token
        self.identity = net_wire.identity(token)
        self.tcp = tcp
        self.control = control
        self.udp = udp
        self.iperf3 = iperf3
        self.allowed = frozenset(allowed)
        self.spoken = spoken or (lambda: None)  # told each second in which nodes of the run asked something
        self.asked = False
        self.unknown = {}  # address -> its connections that did not show the token, the oldest first
        self.holder = None  # (who, key) of the one bandwidth test at a time
        self.tasks = set()
        self.pool = concurrent.futures.ThreadPoolExecutor(MOST_STREAMS)

    async def run(self, seconds):
        self.loop = asyncio.get_running_loop()
        self.most = min(CONNECTIONS_MOST, max(64, net_wire.open_files() // 2))
        self.loop.add_reader(self.udp, self.echo)
        self.start(self.tell())
        for sock in self.tcp:
            self.start(self.accept(sock, self.greet))
        self.start(self.accept(self.control, self.converse))
        await asyncio.sleep(seconds)

    def start(self, work):
        task = self.loop.create_task(work)
        self.tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self.tasks.discard)
        return task

    async def tell(self):
        while True:
            if self.asked or self.holder:
                self.asked = False
                self.spoken()
            await asyncio.sleep(1)

    def echo(self):
        with contextlib.suppress(OSError):
            while True:
                data, to, _, sender = self.udp.recvmsg(65535, 64)
                # Only to members: two echo services must not talk to each other for ever.
                if data.startswith(net_wire.MAGIC + self.token.encode()) and self.lets_in(sender[0]):
                    self.asked = True
                    with contextlib.suppress(OSError):
                        self.udp.sendmsg([data], net_wire.answer_from(to), 0, sender)

    async def accept(self, server, serve):
        port = server.getsockname()[1]
        while True:
            try:
                sock, sender = await self.loop.sock_accept(server)
            except OSError:  # too many open files: the oldest of those that may go has to
                self.make_room()
                await asyncio.sleep(0.01)
                continue
            net_wire.reset_on_close(sock)
            task = self.start(self.guarded(serve, sock, port, sender[0]))
            there = self.unknown.setdefault(sender[0], OrderedDict())
            there[task] = None
            task.add_done_callback(lambda done, address=sender[0]: self.known(done, address))
            if len(there) > UNKNOWN_MOST:
                self.dismiss(sender[0])
            elif len(self.tasks) > self.most:
                self.make_room()

    def known(self, task, address):
        """No longer one of those that may be sent away."""
        there = self.unknown.get(address, {})
        there.pop(task, None)
        if not there:
            self.unknown.pop(address, None)

    def dismiss(self, address):
        """End the oldest connection from an address, so that the newest one is answered."""
        task = next(iter(self.unknown[address]))
        self.known(task, address)
        task.cancel()

    def make_room(self):
        if self.unknown:
            self.dismiss(max(self.unknown, key=lambda address: len(self.unknown[address])))

    def lets_in(self, address):
        return not self.allowed or ipaddress.ip_address(address.partition("%")[0]) in self.allowed

    async def guarded(self, serve, sock, port, address):
        with contextlib.suppress(OSError, asyncio.TimeoutError), sock:
            sock.setblocking(False)
            await self.loop.sock_sendall(sock, net_wire.line(node=self.node, id=self.identity, port=port))
            if self.lets_in(address):
                await serve(sock, address)
            else:
                await asyncio.sleep(STRANGER_SECONDS)

    async def greet(self, sock, _):
        await asyncio.wait_for(self.loop.sock_recv(sock, 1), GREETED_SECONDS)

    async def converse(self, sock, address):
        held = None
        patience = GREETED_SECONDS
        children = []
        buffer = b""
        try:
            while len(buffer) < net_wire.LINE_LIMIT:
                piece = await asyncio.wait_for(self.loop.sock_recv(sock, net_wire.LINE_LIMIT), patience)
                received = time.time()
                if not piece:
                    return
                buffer += piece
                while b"\n" in buffer:
                    first, _, buffer = buffer.partition(b"\n")
                    question = net_wire.parse(first)
                    operation = question.get("op")
                    if question.get("token") != self.token:
                        return
                    self.asked = True
                    self.known(asyncio.current_task(), address)
                    patience = max(patience, IDLE_SECONDS)
                    if operation == "clock":
                        answer = {"t1": received, "t2": time.time()}
                    elif operation == "acquire":
                        if self.holder is None:
                            held = self.holder = (str(question.get("who")), secrets.token_hex(8))
                            patience = min(float(question.get("seconds", 0)), MOST_SECONDS) + IDLE_SECONDS
                        mine = held is not None and self.holder is held
                        answer = {"ok": mine, "holder": self.holder[0], "key": held[1] if mine else ""}
                    elif operation == "iperf3" and held and self.iperf3:
                        answer = await self.start_iperf3(float(question.get("seconds", 0)), sock.family, children)
                    elif operation == "sink" and self.holder and question.get("key") == self.holder[1]:
                        await self.loop.sock_sendall(sock, net_wire.line(ok=True))
                        sock.settimeout(IDLE_SECONDS / 2)
                        await self.loop.run_in_executor(self.pool, net_wire.sink, sock)
                        sock.setblocking(False)
                        continue
                    else:
                        answer = {"error": f"nothing that can be asked: {operation}"}
                    await self.loop.sock_sendall(sock, net_wire.line(**answer))
        finally:
            if held and self.holder is held:
                self.holder = None
            for child in children:
                if child.returncode is None:
                    child.terminate()  # timeout hands it on

    async def start_iperf3(self, seconds, family, children):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        child = await asyncio.create_subprocess_exec(
            # Ends with its test, with the connection that asked, and at last by itself.
            "timeout",
            "--signal=KILL",
            str(int(min(seconds, MOST_SECONDS)) + 20),
            self.iperf3,
            "--server",
            "--one-off",
            "--forceflush",
            "-6" if family == socket.AF_INET6 else "-4",
            "--port",
            str(port),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        children.append(child)
        said = b""
        with contextlib.suppress(asyncio.TimeoutError):
            while b"listening" not in said:
                piece = await asyncio.wait_for(child.stdout.read(net_wire.LINE_LIMIT), 5)
                said += piece
                if not piece:
                    break
        if b"listening" in said:
            self.start(child.communicate())  # reads the rest, so that it does not wait for a reader
            return {"port": port}
        return {"error": "iperf3: " + (said.decode("utf-8", "replace").strip() or "does not start to listen")}


def serve(listener, seconds, path, pid_file):
    """The life of the process."""
    # Should the loop hang, the kernel ends it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds + 10)

    async def live():
        task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await listener.run(seconds)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(live())
    with contextlib.suppress(OSError):
        if load(path).get("pid") == pid_file["pid"]:
            os.unlink(path)


def daemonize(listener, seconds, path, record):
    """Start the process and wait until its sockets and its record are there. Its id."""
    keep = {sock.fileno() for sock in [*listener.tcp, listener.control, listener.udp]}
    ready, report = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.close(ready)
            detach(keep | {report})
            record = dict(record, pid=os.getpid(), start=start_time(os.getpid()))
            store(path, record)
            os.write(report, json.dumps(record).encode())
            os.close(report)
            serve(listener, seconds, path, record)
            status = 0
        except Exception as error:
            with contextlib.suppress(OSError):
                os.write(report, str(error).encode())
        finally:
            os._exit(status)  # never back into the module
    os.close(report)
    os.waitpid(child, 0)
    with os.fdopen(ready, "rb") as pipe:
        said = pipe.read()
    started = net_wire.parse(said)
    if "pid" not in started:
        raise ListenerError(
            f"path = {path}: the process did not start: {said.decode('utf-8', 'replace') or 'no reason given'}"
            " -> run as root (become), or give a path in a folder that can be written"
        )
    return started["pid"]


def detach(keep):
    """Let go of whatever belongs to the module: an open output would keep Ansible waiting."""
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def own_unit(pid):
    """Out of the SSH session's unit, where the end of the session could end it (KillUserProcesses=yes)."""
    if not os.path.isdir("/run/systemd/system") or os.geteuid() != 0:
        return
    call = ["busctl", "call", "--quiet", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"]
    call += ["org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))"]
    call += [f"ironrack-net-listener-{pid}.scope", "fail", "2", "PIDs", "au", "1", str(pid)]
    call += ["CollectMode", "s", "inactive-or-failed", "0"]
    # Without it the process lives on as long as the session, which is enough for nearly all hosts.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(call, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=False)


# --- the record of it ------------------------------------------------------------------------------------------------


def start_time(pid):
    """When a process was started, in ticks since boot: with it a number that is given again is not mistaken."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            fields = handle.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def load(path):
    try:
        with open(path, "rb") as handle:
            return net_wire.parse(handle.read())
    except FileNotFoundError:
        return {}


def store(path, record):
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as handle:
        json.dump(record, handle)
    os.replace(path + ".new", path)


def touch(path):
    with contextlib.suppress(OSError):
        os.utime(path)


def who():
    """Who started it, as far as the system tells."""
    name = os.environ.get("SUDO_USER") or os.environ.get("USER") or f"user {os.getuid()}"
    client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    return f"{name} from {client}" if client else name


def needed(path):
    """The record of a process that nodes of its run still ask; none where it may be replaced."""
    record = load(path)
    if alive(record):
        with contextlib.suppress(FileNotFoundError):  # it ended just now
            # A clock that was set back makes a time in the future, which tells nothing.
            if 0 <= time.time() - os.stat(path).st_mtime < QUIET_SECONDS:
                return record
    return None


def alive(record):
    pid = record.get("pid")
    return isinstance(pid, int) and pid > 1 and start_time(pid) == record.get("start") is not None


def end(path):
    """End the process that the path tells of. Whether there was one."""
    record = load(path)
    there = alive(record)
    for number, seconds in ((signal.SIGTERM, 3), (signal.SIGKILL, 3)):
        if not alive(record):
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(record["pid"], number)
        limit = time.monotonic() + seconds
        while alive(record) and time.monotonic() < limit:
            time.sleep(0.01)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return there


# --- ports -----------------------------------------------------------------------------------------------------------


def bound(family, kind, port, host=""):
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        if kind == socket.SOCK_STREAM:
            sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def hold(family, address, port):
    """Listen on a port. Somebody who has it on another address only (loopback) does not have it for the cluster."""
    try:
        return bound(family, socket.SOCK_STREAM, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return bound(family, socket.SOCK_STREAM, port, address)


def take(family, address, ports, randoms, spared):
    """All sockets, and what became of each port."""
    sockets, found = [], {"held": [], "busy": [], "left": [], "failed": []}
    for port in sorted(set(ports)):
        try:
            sock = hold(family, address, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                found["busy"].append(port)
            else:
                found["failed"].append({"port": port, "error": error.strerror})
            continue
        if spared:
            sock.close()
            found["left"].append(port)
        else:
            sockets.append(sock)
            found["held"].append(port)
    high = [high_port(family, ports) for _ in range(randoms)]
    found["random"] = sorted(sock.getsockname()[1] for sock in high)
    return sockets + high, found


def high_port(family, spare):
    """A port of the kernel's choice; not one that a unit may want."""
    while True:
        sock = bound(family, socket.SOCK_STREAM, 0)
        if sock.getsockname()[1] not in spare:
            return sock
        sock.close()


def control_pair(family, spare):
    """A TCP and a UDP socket of one number."""
    for _ in range(20):
        control = high_port(family, spare)
        try:
            udp = bound(family, socket.SOCK_DGRAM, control.getsockname()[1])
        except OSError:
            control.close()
            continue
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        net_wire.never_fragment(udp, family)
        net_wire.tell_own_address(udp, family)
        return control, udp
    raise ListenerError("no port is free for TCP and UDP: look with ss -lntu who holds so many")


def units_active(patterns):
    """Whether a unit runs or is about to."""
    if not patterns or not os.path.isdir("/run/systemd/system"):
        return False
    states = "--state=active,activating,reloading,refreshing,deactivating"
    command = ["systemctl", "list-units", "--plain", "--no-legend", "--no-pager", "--full", states, "--", *patterns]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return True  # systemd does not answer: leave the ports alone
    return bool(answer.stdout.strip())


# --- the module ------------------------------------------------------------------------------------------------------


def check(options):
    """The address family; an error for what makes no sense."""
    if not options["node"]:
        raise ListenerError("node is empty: give the name that the other nodes know this one by")
    try:
        version = ipaddress.ip_address(options["address"]).version
    except ValueError:
        raise ListenerError(
            f"address = {options['address']!r}: is no IPv4 or IPv6 address -> give the node's cluster address"
        ) from None
    for port in options["ports"]:
        if not 0 < port < 65536:
            raise ListenerError(f"ports = {port}: is no TCP port -> give numbers from 1 to 65535")
    for entry in options["allowed"]:
        try:
            ipaddress.ip_address(entry)
        except ValueError:
            raise ListenerError(
                f"allowed = {entry!r}: is no IPv4 or IPv6 address -> give the cluster addresses of the nodes"
            ) from None
    for name, low, high in (("random", 0, 64), ("lifetime", 1, 3600)):
        if not low <= options[name] <= high:
            raise ListenerError(f"{name} = {options[name]}: is out of range -> give a number from {low} to {high}")
    return socket.AF_INET if version == 4 else socket.AF_INET6


def wait(path, lock):
    """Until the listener of another run is not needed any more. Meanwhile that run may end it."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while True:
        record = needed(path)
        if record is None:
            return
        if time.monotonic() > limit:
            now = time.time()
            raise ListenerError(
                f"path = {path}: another run, of {record.get('who')}, is testing the network since"
                f" {now - record.get('since', now):.0f} s -> run it again when that has ended, at the latest in"
                f" {max(0, record.get('until', now) - now):.0f} s"
            )
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(0.2)
        fcntl.flock(lock, fcntl.LOCK_EX)


def present(options, iperf3, lock):
    family = check(options)
    wait(options["path"], lock)
    ended = end(options["path"])
    tcp, found = take(
        family, options["address"], options["ports"], options["random"], units_active(options["spare_units"])
    )
    control, udp = control_pair(family, options["ports"])
    port = control.getsockname()[1]
    token = secrets.token_hex(16)
    record = {"node": options["node"], "address": options["address"], "control": port, "token": token}
    described = dict(found, udp=port, iperf3=bool(iperf3), **record)
    record.update(who=who(), since=int(time.time()), until=int(time.time()) + options["lifetime"])
    allowed = [ipaddress.ip_address(entry) for entry in [*options["allowed"], options["address"]]]
    listener = Listener(
        options["node"],
        token,
        tcp,
        control,
        udp,
        iperf3=iperf3,
        allowed=allowed if options["allowed"] else (),
        spoken=lambda: touch(options["path"]),
    )
    own_unit(daemonize(listener, options["lifetime"], options["path"], record))
    return described, ended


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "node": {"type": "str", "default": ""},
            "address": {"type": "str", "default": ""},
            "ports": {"type": "list", "elements": "int", "default": []},
            "random": {"type": "int", "default": 3},
            "allowed": {"type": "list", "elements": "str", "default": []},
            "spare_units": {"type": "list", "elements": "str", "default": []},
            "lifetime": {"type": "int", "default": 300},
            "path": {"type": "path", "default": net_wire.DEFAULT_PATH},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        os.makedirs(os.path.dirname(options["path"]), mode=0o755, exist_ok=True)
        with open(options["path"] + ".lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if options["state"] == "present":
                described, ended = present(options, module.get_bin_path("iperf3"), lock)
            else:
                described, ended = None, end(options["path"])
    except ListenerError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"path = {options['path']}: {error.filename or 'socket'}: {error.strerror}"
            " -> run as root (become), or give a path in a folder that can be written"
        )
    module.exit_json(changed=False, listener=described, ended=ended)


if __name__ == "__main__":
    main()
