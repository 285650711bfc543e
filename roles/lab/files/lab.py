#!/usr/bin/env python3
"""Hold a closed lab for test nodes, and work in it.

The holder is one small daemon with mount, network, process and IPC namespaces of its own. In there
/sys/fs/cgroup is a private cgroup2 tree and /run is empty, so podman finds what it finds on a freshly booted host;
the nodes' bridges live there, nothing in it has a route out, and everything in it ends with the holder.
Two doors lead through the wall (doors.py): a proxy for the nodes, and a gate to their ports for this machine.

Settings come from DIR/lab.json, which role `lab` writes. Standard library only.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast
from urllib.parse import urlsplit

RUN = Path("/run/ironrack")
CGROUP = Path("/sys/fs/cgroup")
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
CA_PUBLIC = Path("/usr/share/ca-certificates")
IMAGE = "localhost/ironrack-node"
PYPI = "https://pypi.org/simple"
NFT_TABLE = "ironrack_lab"
DOORS = Path(__file__).resolve().with_name("doors.py")
CHANNEL = Path(__file__).resolve().with_name("build_channel.py")
# Where nodes see CACHE/node.
NODE_CACHE = "/var/cache/ironrack"
START_TIMEOUT = 30.0
LOCK_TIMEOUT = 900.0

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


class LabError(Exception):
    """Something the user can act on."""


# --- Linux --------------------------------------------------------------------------------------------------------


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(descriptor: int, flags: int) -> None:
    _check(_libc.setns(descriptor, flags), "setns")


def mount(kind: str, target: str, flags: int = 0, options: str = "") -> None:
    _check(
        _libc.mount(kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()),
        f"mount {kind} on {target}",
    )


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), 0), f"unmount {target}")


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot: with the pid and the boot id it names one process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return parse_start(stat)


def parse_start(stat: str) -> int | None:
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_atomic(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write a file unless it holds that text already; never leave half a file behind."""
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return False
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)
    return True


# --- settings and state -------------------------------------------------------------------------------------------


class Lab(NamedTuple):
    """What DIR/lab.json declares."""

    directory: Path
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.settings["name"])

    @property
    def cache(self) -> Path:
        return Path(self.settings["cache"])

    @property
    def storage(self) -> Path:
        return self.cache / "podman" / self.name

    @property
    def channel(self) -> Path:
        """The lab's conda channel; nodes see it below NODE_CACHE."""
        return self.cache / "node" / "channel"

    @property
    def digest(self) -> str:
        """Of everything the running doors depend on."""
        parts = {key: self.settings[key] for key in ("networks", "nodes", "proxy")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def node(self, name: str) -> dict[str, Any]:
        for node in self.settings["nodes"]:
            if node["name"] == name:
                return cast(dict[str, Any], node)
        known = ", ".join(node["name"] for node in self.settings["nodes"])
        raise LabError(f"no node {name!r} in lab {self.name!r}; its nodes: {known}")

    def container(self, node: str) -> str:
        return f"{self.settings['prefix']}{self.node(node)['name']}"


def load(directory: Path) -> Lab:
    try:
        settings = json.loads((directory / "lab.json").read_text())
    except FileNotFoundError:
        raise LabError(
            f"no lab is declared in {directory}: run the playbook lab_up, or name its folder (--dir or LAB_DIR)"
        ) from None
    return Lab(directory, settings)


def run_directory(name: str) -> Path:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
        raise LabError(f"lab name {name!r}: use 1 to 31 lower-case letters, digits and dashes")
    return RUN / name


def read_state(name: str) -> dict[str, Any] | None:
    """The holder's own words, whether it still lives or not."""
    try:
        state = json.loads((run_directory(name) / "holder.json").read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def holder(name: str) -> dict[str, Any] | None:
    """The state of the living holder, or None. A recycled pid and a reboot are both recognised."""
    state = read_state(name)
    if state and state["boot_id"] == boot_id() and process_start(state["pid"]) == state["start"]:
        return state
    return None


def require_holder(name: str) -> dict[str, Any]:
    state = holder(name)
    if state is None:
        raise LabError(f"lab {name!r} is not up: run the playbook lab_up")
    return state


@contextlib.contextmanager
def locked(path: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[int]:
    """Hold a lock file; the kernel drops the lock with its last holder, so a killed run blocks nobody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + timeout
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held the lock before may have removed the file: then this lock guards nothing.
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        if time.monotonic() > end:
            raise LabError(f"another run has held {path} for {timeout:.0f} s")
        time.sleep(0.05)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# --- what the doors are told --------------------------------------------------------------------------------------


def source_hosts(text: str) -> set[str]:
    """Hosts named in an apt source file, of either format."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    urls = re.findall(r"https?://[^\s\]]+", "\n".join(lines))
    return {host for url in urls if (host := urlsplit(url).hostname)}


def url_hosts(values: Sequence[str]) -> set[str]:
    return {host for value in values for word in value.split() if (host := urlsplit(word).hostname)}


def allowed_hosts(lab: Lab) -> set[str]:
    hosts = {"pypi.org", "files.pythonhosted.org", *lab.settings["proxy"]["hosts"]}
    apt = Path("/etc/apt")
    for path in (apt / "sources.list", *apt.glob("sources.list.d/*.list"), *apt.glob("sources.list.d/*.sources")):
        with contextlib.suppress(OSError):
            hosts |= source_hosts(path.read_text())
    image = lab.settings["image"]
    return hosts | url_hosts([image["mirror"], image["security_mirror"], *lab.settings["proxy"]["indexes"]])


def forwards(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The gate's ports: where each listens on the machine, and the node's port behind it."""
    found = []
    for node in settings["nodes"]:
        for forward in node["forwards"]:
            host, _, port = str(forward["listen"]).rpartition(":")
            if not is_loopback(host):
                raise LabError(f"forward {forward['listen']} of {node['name']}: only loopback addresses are served")
            network = forward.get("network") or next(iter(node["addresses"]))
            # The first address: of a node with both families the one of IPv4, as the declaration orders them.
            target = [str(node["addresses"][network][0]), int(forward["port"])]
            found.append({"listen": [host, int(port)], "target": target})
    return found


def is_loopback(address: str) -> bool:
    return bool(re.fullmatch(r"127(\.\d{1,3}){3}", address))


def gateways_of(network: dict[str, Any]) -> list[str]:
    return [str(network[key]) for key in ("gateway", "gateway6") if network.get(key)]


def door_orders(lab: Lab, outside: int, inside: int, starting: Sequence[int]) -> dict[str, Any]:
    proxy = lab.settings["proxy"]
    gateways = [gateway for network in lab.settings["networks"] for gateway in gateways_of(network)]
    # Inside, images are made by it in any case; no node is there.
    addresses = ["127.0.0.1", *(gateways if not proxy.get("airgapped") else ())]
    return {
        "outside": outside,
        "inside": inside,
        "starting": list(starting),
        "gate": forwards(lab.settings),
        "proxy": [[address, proxy["port"]] for address in addresses],
        "hosts": sorted(allowed_hosts(lab)),
        "cache": str(lab.cache / "apt"),
        "channel": str(lab.channel),
    }


def state_text(lab: Lab, error: str | None) -> str:
    """What the doors write down of the holder, their parent."""
    status = Path("/proc/self/status").read_text()
    pid = int(status.split("PPid:")[1].split()[0])
    state = {
        "name": lab.name,
        "dir": str(lab.directory),
        "cache": str(lab.cache),
        "pid": pid,
        "start": process_start(pid),
        "boot_id": boot_id(),
        "digest": lab.digest,
        "written": time.monotonic_ns(),
        "error": error,
    }
    return json.dumps(state, indent=1) + "\n"


# --- the holder ---------------------------------------------------------------------------------------------------


def cgroup_name(name: str) -> str:
    return f"ironrack-{name}"


def enter_cgroup(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "cgroup.procs").write_text("0")


def build_walls(name: str) -> None:
    """Become the first process of the lab's own small machine."""
    unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC)
    mount("none", "/", MS_REC | MS_PRIVATE)
    resolver = Path("/etc/resolv.conf").resolve()
    names = resolver.read_text() if resolver.is_file() else ""
    hardened = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("sysfs", "/sys", hardened)
    mount("cgroup2", str(CGROUP), hardened)
    # The cgroup namespace begins at the lab's own group; its processes live one level below, as cgroup2 demands.
    enter_cgroup(CGROUP / cgroup_name(name))
    unshare(CLONE_NEWCGROUP)
    enter_cgroup(CGROUP / cgroup_name(name) / "holder")
    unmount(str(CGROUP))
    mount("cgroup2", str(CGROUP), hardened)
    mount("proc", "/proc", hardened)
    mount("tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=755")
    mount("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777")  # noqa: S108
    if resolver.is_relative_to("/run"):
        resolver.parent.mkdir(parents=True, exist_ok=True)
        resolver.write_text(names)
    with socket.socket() as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def start_doors(directory: Path, machine: dict[str, int], inside: int, starting: Sequence[int] = ()) -> int:
    """Fork the process that serves both doors; it closes the descriptors `starting` once it is ready."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        setns(machine["mnt"], CLONE_NEWNS)
        setns(machine["net"], CLONE_NEWNET)
        lab = load(directory)
        state = run_directory(lab.name) / "holder.json"
        for descriptor in (machine["net"], inside, *starting):
            os.set_inheritable(descriptor, True)
        try:
            orders = door_orders(lab, machine["net"], inside, starting)
            orders |= {"state": str(state), "good": state_text(lab, None), "bad": state_text(lab, "{error}")}
        except LabError as problem:
            write_atomic(state, state_text(lab, str(problem)))
            os._exit(3)
        paper = os.memfd_create("orders")
        os.write(paper, json.dumps(orders).encode())
        os.lseek(paper, 0, os.SEEK_SET)
        os.dup2(paper, 0)
        os.execv(sys.executable, [sys.executable, str(DOORS), lab.name])  # noqa: S606
    except BaseException as problem:
        print(f"doors: {problem!r}", file=sys.stderr)
    finally:
        os._exit(1)


def hold(lab: Lab, starting: Sequence[int]) -> NoReturn:
    """The holder's life: keep the namespaces, bury the dead, keep the doors open."""
    machine = {kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("mnt", "net")}
    build_walls(lab.name)
    inside = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    # Blocked, so that none is lost: the first process of a namespace has no default actions.
    signals = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    doors = start_doors(lab.directory, machine, inside, starting)
    for descriptor in starting:
        os.close(descriptor)
    while True:
        received = signal.sigwait(signals)
        if received == signal.SIGTERM:
            os._exit(0)
        elif received == signal.SIGHUP:
            if doors:
                os.kill(doors, signal.SIGKILL)
                os.waitpid(doors, 0)
            doors = start_doors(lab.directory, machine, inside)
        else:
            for pid, code in reap():
                # Code 3 is a fault in the settings, which only a new lab_up can mend.
                if pid == doors and code == 3:
                    doors = 0
                elif pid == doors:
                    time.sleep(1)
                    doors = start_doors(lab.directory, machine, inside)


def reap() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def become_holder(lab: Lab, lock: int) -> None:
    """Fork the holder off, free of everything that belongs to the run that started it, and wait until it stands.

    The holder inherits the lock until then: should this run be killed, the next one waits for the holder too.
    """
    watch, report = os.pipe()
    pid = os.fork()
    if pid:
        os.close(report)
        os.waitpid(pid, 0)
        with selectors.DefaultSelector() as selector:  # readable at its end: the holder stands, or is gone
            selector.register(watch, selectors.EVENT_READ)
            selector.select(START_TIMEOUT)
        os.close(watch)
        return
    try:
        os.setsid()
        os.chdir("/")
        os.umask(0o022)
        log = os.open(lab.directory / "lab.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        starting = (lock, report)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in starting:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        unshare(CLONE_NEWPID)
        if os.fork() == 0:
            hold(lab, starting)
    except BaseException as problem:
        print(f"holder: {problem!r}", file=sys.stderr)
    finally:
        os._exit(0)


def engine_configuration(lab: Lab, limits: dict[str, int]) -> dict[str, str]:
    """podman's two files: nothing shared with the user's own podman, nothing asked that this machine cannot give."""
    storage = lab.storage
    return {
        "containers.conf": f"""\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
log_driver = "k8s-file"
pids_limit = 0
default_ulimits = [{", ".join(f'"{name}={value}:{value}"' for name, value in limits.items())}]
[network]
network_backend = "netavark"
network_config_dir = "{storage}/networks"
""",
        "storage.conf": f"""\
[storage]
driver = "{lab.settings["storage_driver"]}"
graphroot = "{storage}/storage"
runroot = "/run/containers/storage"
""",
    }


def usual_limits() -> dict[str, int]:
    """What a server usually allows, or less where this machine's hard limit is lower and may not be raised."""
    usual = {"nofile": (resource.RLIMIT_NOFILE, 1048576), "nproc": (resource.RLIMIT_NPROC, 32768)}
    found = {}
    for name, (kind, value) in usual.items():
        hard = resource.getrlimit(kind)[1]
        found[name] = value if hard == resource.RLIM_INFINITY else min(value, hard)
    return found


def sweep(name: str) -> None:
    """Kill what is left in the lab's control group and remove the group. Runs in a child with mounts of its own."""
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            raise LabError(f"could not clear control group {cgroup_name(name)}")
        return
    code = 1
    try:
        unshare(CLONE_NEWNS)
        mount("none", "/", MS_REC | MS_PRIVATE)
        mount("cgroup2", str(CGROUP), MS_NOSUID | MS_NODEV | MS_NOEXEC)
        code = 0 if clear_group(CGROUP / cgroup_name(name)) else 1
    except BaseException as problem:
        print(f"sweep: {problem!r}", file=sys.stderr)
    finally:
        os._exit(code)


def clear_group(group: Path, timeout: float = 15.0) -> bool:
    end = time.monotonic() + timeout
    while group.exists():
        folders = [group, *(path for path in group.rglob("*") if path.is_dir())]
        for folder in folders:
            with contextlib.suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
        for folder in reversed(folders):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if group.exists():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
    return True


# --- commands -----------------------------------------------------------------------------------------------------


def emit(**values: Any) -> int:
    print(json.dumps(values, sort_keys=True))
    return 0


def command_up(lab: Lab) -> int:
    run = run_directory(lab.name)
    written = 0
    with locked(run / "lock") as lock:
        changed = False
        for name, text in engine_configuration(lab, usual_limits()).items():
            changed |= write_atomic(lab.directory / name, text)
        for folder in (lab.storage / "networks", lab.cache / "rootfs", lab.cache / "node"):
            folder.mkdir(parents=True, exist_ok=True)
        state = holder(lab.name)
        if state:
            if (state["dir"], state["cache"]) != (str(lab.directory), str(lab.cache)):
                raise LabError(
                    f"lab {lab.name!r} is already up from {state['dir']} with cache {state['cache']}: "
                    f"take that one down first, or give this one another name (LAB_NAME)"
                )
            if state["digest"] == lab.digest and not state["error"]:
                return emit(changed=changed, pid=state["pid"])
            written = state["written"]
            os.kill(state["pid"], signal.SIGHUP)
        else:
            sweep(lab.name)
            (run / "holder.json").unlink(missing_ok=True)
            become_holder(lab, lock)
        state = wait_ready(lab, written)
    return emit(changed=True, pid=state["pid"])


def wait_ready(lab: Lab, written: int) -> dict[str, Any]:
    """The state of a holder that stands, or learns of new settings."""
    end = time.monotonic() + START_TIMEOUT
    while True:
        state = holder(lab.name)
        if state and state["written"] != written:
            break
        if state is None or time.monotonic() > end:
            log = (lab.directory / "lab.log").read_text().splitlines()[-5:]
            raise LabError(f"lab {lab.name!r} does not start; its log ends: " + " | ".join(log))
        time.sleep(0.02)
    if state["error"]:
        raise LabError(f"lab {lab.name!r}: {state['error']}")
    return state


def command_down(name: str, directory: Path) -> int:
    run = run_directory(name)
    changed = (directory / "lab.json").exists()
    if run.exists():
        changed = True
        with locked(run / "lock"):
            state = holder(name)
            if state and Path(state["dir"]) != directory:
                raise LabError(f"lab {name!r} belongs to {state['dir']}: take it down from there")
            if state:
                kill(state)
            sweep(name)
            old = read_state(name)
            if old and not state:
                # It died by itself: what its nodes left behind is no state to start the next lab from.
                shutil.rmtree(Path(old["cache"]) / "podman" / name, ignore_errors=True)
            shutil.rmtree(run)
        with contextlib.suppress(OSError):
            RUN.rmdir()
    if (directory / "lab.json").exists():  # else it is no lab's folder, whatever it is
        shutil.rmtree(directory)
    return emit(changed=changed)


def kill(state: dict[str, Any]) -> None:
    """Kill the holder, and with it every process of the lab; never a stranger that got its number."""
    try:
        descriptor = os.pidfd_open(state["pid"])
    except ProcessLookupError:
        return
    with os.fdopen(descriptor, closefd=True) as process, selectors.DefaultSelector() as selector:
        if process_start(state["pid"]) != state["start"]:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
        selector.register(process.fileno(), selectors.EVENT_READ)
        # The kernel ends every process of the namespace first, hundreds of them on a busy machine.
        if not selector.select(120):
            raise LabError(f"the holder (pid {state['pid']}) does not end")


def enter(lab: Lab, outside: bool) -> None:
    """Step into the running lab; with `outside`, keep the machine's network (to pull images)."""
    pid = require_holder(lab.name)["pid"]
    kinds = {
        "mnt": CLONE_NEWNS,
        "cgroup": CLONE_NEWCGROUP,
        "ipc": CLONE_NEWIPC,
        "net": CLONE_NEWNET,
        "pid": CLONE_NEWPID,
    }
    if outside:
        del kinds["net"]
    here = Path.cwd()
    spaces = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds}
    require_holder(lab.name)  # still the same process: the descriptors are the lab's
    for kind, descriptor in spaces.items():
        if kind == "cgroup":  # join the lab's group while the machine's tree is still ours to see
            enter_cgroup(CGROUP / "holder")
        setns(descriptor, kinds[kind])
    with contextlib.suppress(OSError):
        os.chdir(here)


def command_exec(lab: Lab, command: Sequence[str], outside: bool) -> int:
    if not command:
        raise LabError("exec: which command?")
    enter(lab, outside)
    environment = os.environ | {
        "CONTAINERS_CONF": str(lab.directory / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(lab.directory / "storage.conf"),
    }
    pid = os.fork()
    if pid == 0:
        try:
            os.execvpe(command[0], list(command), environment)  # noqa: S606
        except OSError as problem:
            print(f"lab: {command[0]}: {problem.strerror}", file=sys.stderr)
            os._exit(127 if problem.errno == errno.ENOENT else 126)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(pid, received))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def inside(lab: Lab, *command: str, outside: bool = False, check: bool = True, **options: Any) -> str:
    """Run a command in the lab and return what it printed."""
    itself = [sys.executable, __file__, "--dir", str(lab.directory), "exec", *(["--outside"] if outside else []), "--"]
    options.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run([*itself, *command], capture_output=True, text=True, check=False, **options)
    if check and done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise LabError(f"{' '.join(command[:4])} failed with code {done.returncode}:\n{tail}")
    return str(done.stdout)


def command_status(name: str, directory: Path) -> int:
    state = holder(name) or {}
    return emit(
        name=name,
        running=bool(state),
        pid=state.get("pid"),
        dir=state.get("dir", str(directory)),
        error=state.get("error"),
    )


# --- images -------------------------------------------------------------------------------------------------------


def certificates(text: str) -> list[str]:
    return re.findall(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", text, re.DOTALL)


def site_certificates() -> list[str]:
    """Authorities this machine trusts beyond the public ones: without them no node could fetch anything by https."""
    if not CA_BUNDLE.exists():
        return []
    public = {
        "".join(certificate.split())
        for path in CA_PUBLIC.rglob("*.crt")
        for certificate in certificates(path.read_text(errors="replace"))
    }
    bundle = certificates(CA_BUNDLE.read_text(errors="replace"))
    return [certificate for certificate in bundle if "".join(certificate.split()) not in public] if public else []


def image_context(target: Path) -> None:
    """What goes into an image besides packages."""
    for path in sorted((Path(__file__).resolve().parent / "node").iterdir()):
        shutil.copy(path, target / path.name)
    (target / "ca").mkdir()
    for certificate in site_certificates():
        name = hashlib.sha256(certificate.encode()).hexdigest()[:16]
        (target / "ca" / f"site-{name}.crt").write_text(certificate + "\n")


def image_key(context: Path, recipe: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for path in sorted(path for path in context.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(context)}\0{path.stat().st_mode & 0o111}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def bootstrap_command(lab: Lab, suite: str, context: Path) -> list[str]:
    image = lab.settings["image"]
    proxy = f"http://127.0.0.1:{lab.settings['proxy']['port']}"
    drop = [f"--dpkgopt=path-exclude=/usr/share/{kind}/*" for kind in ("man", "locale", "doc")]
    return [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--mode=root",
        f"--include={','.join(image['packages'])}",
        "--dpkgopt=force-unsafe-io",
        *drop,
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        f'--aptopt=Acquire::http::Proxy "{proxy}"',
        f'--customize-hook=cp -r {context} "$1"/opt/node',
        '--customize-hook=chroot "$1" sh /opt/node/node-setup',
        '--customize-hook=rm -rf "$1"/opt/node "$1"/etc/apt/apt.conf.d/99mmdebstrap',
        suite,
        "-",
        f"deb {image['mirror']} {suite} main",
        f"deb {image['mirror']} {suite}-updates main",
        f"deb {image['security_mirror']} {suite}-security main",
    ]


def bootstrap(lab: Lab, suite: str, context: Path, archive: Path) -> None:
    """Build a root filesystem; inside the lab, so that a killed build leaves neither mounts nor files."""
    part = archive.with_name(f".{archive.name}.part")
    script = 'set -eu; export TMPDIR=/dev/shm; out=$1; shift; "$@" | zstd -q -3 -T0 -f -o "$out"'
    inside(lab, "bash", "-o", "pipefail", "-c", script, "bash", str(part), *bootstrap_command(lab, suite, context))
    part.replace(archive)


def week() -> str:
    return time.strftime("%GW%V", time.gmtime())


def ensure_image(lab: Lab, suite: str, context: Path, busy: bool) -> tuple[str, bool]:
    """The image of a suite, from this lab's storage, from the cache, or built: (name, changed)."""
    image = lab.settings["image"]
    base = str(image["base"]).replace("{suite}", suite)
    recipe = {**image, "base": base, "suite": suite, "command": bootstrap_command(lab, suite, Path("context"))}
    key = image_key(context, recipe)
    name = f"{IMAGE}:{suite}-{key}"
    engine = lab.settings["engine"]
    closed = lab.settings["isolation"] == "closed"
    query = ("image", "inspect", "-f", '{{index .Config.Labels "ironrack.week"}}', name)
    label = run_engine(lab, engine, *query, check=False)
    # A new week means fresh packages, but never under nodes that exist.
    if label.strip() and (busy or label.strip() == week()):
        return name, False
    rootfs = lab.cache / "rootfs"
    with locked(rootfs / f".{suite}.lock"):
        if base:
            arguments = ["--build-arg", f"BASE={base}", "--build-arg", f"PACKAGES={' '.join(image['packages'])}"]
            arguments += ["--label", f"ironrack.week={week()}", "--network", "host", "-t", name, str(context)]
            run_engine(lab, engine, "build", *arguments, outside=closed)
            return name, True
        archive = rootfs / f"{suite}-{key}-{week()}.tar.zst"
        if not archive.exists():
            bootstrap(lab, suite, context, archive)
            for old in rootfs.glob(f"{suite}-*.tar.zst"):
                if old != archive and old.stat().st_mtime < time.time() - 14 * 86400:
                    old.unlink()
        changes = ['CMD ["/sbin/node-init"]', "STOPSIGNAL SIGRTMIN+3", f"LABEL ironrack.week={week()}"]
        flags = [word for change in changes for word in ("--change", change)]
        script = 'set -eu; archive=$1; shift; zstd -dcq "$archive" | "$@"'
        command = ["bash", "-o", "pipefail", "-c", script, "bash", str(archive), engine, "import", *flags, "-", name]
        if closed:
            inside(lab, *command)
        else:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return name, True


def run_engine(lab: Lab, *command: str, outside: bool = False, check: bool = True) -> str:
    if lab.settings["isolation"] == "closed":
        return inside(lab, *command, outside=outside, check=check)
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        raise LabError(f"{' '.join(command[:3])} failed:\n{done.stderr.strip()}")
    return done.stdout


def command_images(lab: Lab) -> int:
    engine = lab.settings["engine"]
    found: dict[str, str] = {}
    changed = False
    busy = bool(run_engine(lab, engine, "ps", "-aq", "--filter", f"label=ironrack.lab={lab.name}").strip())
    with tempfile.TemporaryDirectory(prefix="ironrack-") as folder:
        context = Path(folder) / "node"
        context.mkdir()
        image_context(context)
        for suite in sorted({node["suite"] for node in lab.settings["nodes"]}):
            found[suite], made = ensure_image(lab, suite, context, busy)
            changed |= made
    if changed and not busy:
        wanted = set(found.values())
        listed = run_engine(lab, engine, "images", "--format", "{{.Repository}}:{{.Tag}}", check=False).split()
        if old := [name for name in listed if name.startswith(f"{IMAGE}:") and name not in wanted]:
            run_engine(lab, engine, "rmi", *old, check=False)
    return emit(changed=changed, images=found)


# --- the conda channel --------------------------------------------------------------------------------------------


def command_channel(lab: Lab) -> int:
    """Let a node pack its Python into the lab's conda channel, and write the explicit lock down beside the key.

    A node of Debian 12 where there is one: the lock of the runtime's CPU build is for its Python.
    """
    nodes = sorted(lab.settings["nodes"], key=lambda node: str(node["suite"]) != "bookworm")
    folder = f"{NODE_CACHE}/{lab.channel.name}"
    with locked(lab.channel / ".lock"):
        write_atomic(lab.channel / CHANNEL.name, CHANNEL.read_text())
        container = lab.container(str(nodes[0]["name"]))
        command = ("exec", container, "python3", "-I", f"{folder}/{CHANNEL.name}", folder)
        made = json.loads(run_engine(lab, lab.settings["engine"], *command))
        changed = write_atomic(lab.directory / "conda.lock", made["text"]) or made["changed"]
    return emit(changed=changed, lock=str(lab.directory / "conda.lock"))


# --- the machine --------------------------------------------------------------------------------------------------


def pip_settings() -> dict[str, list[str]]:
    """What pip is told on this machine, from its configuration files and its environment: name -> words."""
    home = Path.home()
    files = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        home / ".pip/pip.conf",
        home / ".config/pip/pip.conf",
    ]
    if extra := os.environ.get("PIP_CONFIG_FILE"):
        files.append(Path(extra))
    found: dict[str, list[str]] = {}
    for path in files:
        with contextlib.suppress(OSError, configparser.Error):
            parser = configparser.RawConfigParser()
            parser.read_string(path.read_text())
            for section in ("global", "install"):
                for name, value in parser[section].items() if parser.has_section(section) else ():
                    found.setdefault(name, []).extend(value.split())
    for name in ("find-links", "index-url", "extra-index-url"):
        found.setdefault(name, []).extend(os.environ.get(f"PIP_{name.replace('-', '_').upper()}", "").split())
    return found


def site_indexes(pip: dict[str, list[str]]) -> list[str]:
    """Package indexes that this machine is set up to use, and its nodes may reach; the main one first."""
    words = {name: os.environ.get(name, "").split() for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX")}
    main = [*words["UV_DEFAULT_INDEX"], *words["UV_INDEX_URL"], *reversed(pip["index-url"]), PYPI][:1]
    extra = [*words["UV_INDEX"], *os.environ.get("UV_EXTRA_INDEX_URL", "").split(), *pip["extra-index-url"]]
    # uv allows NAME=URL.
    indexes = [re.sub(r"^[\w-]+=(?=\w+://)", "", word) for word in main + extra]
    return [index for index in dict.fromkeys(indexes) if index.startswith(("http://", "https://"))]


def wheel_mounts(pip: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Local wheel folders that pip is set up to use, as mounts for the nodes."""
    words = dict.fromkeys(word.removeprefix("file://") for word in pip["find-links"])
    folders = [word for word in words if Path(word).is_dir()]
    return [
        {"source": folder, "target": f"/opt/wheels-{number}", "read_only": True}
        for number, folder in enumerate(folders, 1)
    ]


def command_prepare(directory: Path, settings: dict[str, Any]) -> int:
    """What belongs to the user, not to root: the folders, the declaration and the key."""
    pip = pip_settings()
    indexes, wheels = site_indexes(pip), wheel_mounts(pip)
    proxy = settings["proxy"]
    proxy["indexes"] = indexes
    # For the inventory: where the nodes' Python packages come from.
    settings["runtime"] = {
        "find_links": [mount["target"] for mount in wheels],
        "index_url": indexes[0] if indexes else PYPI,
        "extra_index_urls": indexes[1:],
        "http_proxy": "",
        "conda_mirror": f"file://{NODE_CACHE}/channel",
    }
    if settings["isolation"] == "closed":
        gateway = settings["networks"][0]["gateway"]
        host = f"[{gateway}]" if ":" in gateway else gateway
        settings["runtime"]["conda_mirror"] = f"http://{host}:{proxy['port']}/conda"
        settings["runtime"]["http_proxy"] = f"http://{settings['networks'][0]['gateway']}:{proxy['port']}"
    key = directory / "id_ed25519"
    changed = False
    for folder in (directory / "models", Path(settings["cache"]) / "node"):
        changed |= not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
    changed |= write_atomic(directory / "lab.json", json.dumps(settings, indent=1) + "\n")
    if not key.with_suffix(".pub").exists():
        key.unlink(missing_ok=True)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {settings['name']}", "-f", str(key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        changed = True
    return emit(changed=changed, wheels=wheels, public_key=key.with_suffix(".pub").read_text())


def command_packages(wanted: Sequence[str]) -> int:
    """Install the missing ones of some Debian packages. A third-party source that fails is no reason to stop."""
    query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package}\n", *wanted]
    listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    present = {line.split()[-1] for line in listed if line.startswith("ii ")}
    missing = [name for name in wanted if name not in present]
    if not missing:
        return emit(changed=False, installed=[])
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    wait = ["-o", "DPkg::Lock::Timeout=600"]
    install = ["apt-get", *wait, "install", "-y", "-q", "--no-install-recommends", *missing]
    # Mend what a killed run left, refresh the lists, and try once more: only when the first attempt fails.
    steps = [install, ["dpkg", "--configure", "-a"], ["apt-get", *wait, "update", "-q"], install]
    for number, step in enumerate(steps):
        done = subprocess.run(
            step, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if step is install and done.returncode == 0:
            return emit(changed=True, installed=missing)
        if number == len(steps) - 1:
            raise LabError(f"cannot install {' '.join(missing)}:\n{(done.stdout + done.stderr).strip()[-1500:]}")
    return 1


# --- faults -------------------------------------------------------------------------------------------------------


def addresses_of(lab: Lab, words: str, network: str | None) -> list[str]:
    """Addresses of both families of a comma-separated list of nodes, on one network or on all."""
    found = []
    for name in words.split(","):
        node = lab.node(name)
        if network and network not in node["addresses"]:
            raise LabError(f"node {name!r} has no address on network {network!r}")
        found += [word for key, words in node["addresses"].items() if network in (None, key) for word in words]
    return found


def partition_rules(left: Sequence[str], right: Sequence[str]) -> str:
    """nftables text that drops everything between two sides, both ways."""
    lines = [
        f"add table bridge {NFT_TABLE}",
        f"add chain bridge {NFT_TABLE} cut {{ type filter hook forward priority 0; }}",
    ]
    # A neighbour's solicitation of IPv6 goes to a group and may pass: the answer to it is dropped.
    for protocol, six in (("ip", False), ("ip6", True)):
        family = [[word for word in side if (":" in word) is six] for side in (left, right)]
        if not all(family):
            continue
        sides = ["{ " + ", ".join(side) + " }" for side in family]
        for source, target in (sides, sides[::-1]):
            lines.append(f"add rule bridge {NFT_TABLE} cut {protocol} saddr {source} {protocol} daddr {target} drop")
            if not six:
                lines.append(f"add rule bridge {NFT_TABLE} cut arp saddr ip {source} arp daddr ip {target} drop")
    return "\n".join(lines) + "\n"


def need_closed(lab: Lab) -> None:
    if lab.settings["isolation"] != "closed":
        raise LabError("only a closed lab can cut its network (lab_isolation: closed)")


def command_partition(lab: Lab, left: str, right: str, network: str | None) -> int:
    need_closed(lab)
    rules = partition_rules(addresses_of(lab, left, network), addresses_of(lab, right, network))
    inside(lab, "nft", "-f", "-", stdin=None, input=rules)
    return emit(changed=True)


def command_heal(lab: Lab) -> int:
    need_closed(lab)
    present = f"table bridge {NFT_TABLE}" in inside(lab, "nft", "list", "tables")
    if present:
        inside(lab, "nft", "delete", "table", "bridge", NFT_TABLE)
    return emit(changed=present)


def command_delay(lab: Lab, name: str, milliseconds: int, network: str | None) -> int:
    """Delay what a node sends; 0 ends it."""
    node = lab.node(name)
    interfaces = {network["name"]: network["interface"] for network in lab.settings["networks"]}
    if network and network not in node["addresses"]:
        raise LabError(f"node {name!r} has no address on network {network!r}")
    for key in [network] if network else list(node["addresses"]):
        action = ["replace"] if milliseconds else ["del"]
        what = ["netem", "delay", f"{milliseconds}ms"] if milliseconds else []
        command = ["tc", "qdisc", *action, "dev", interfaces[key], "root", *what]
        try:
            run_engine(lab, lab.settings["engine"], "exec", lab.container(name), *command, check=bool(milliseconds))
        except LabError as problem:
            if "qdisc kind is unknown" in str(problem) or "No such file or directory" in str(problem):
                raise LabError("this machine's kernel has no netem (module sch_netem): no delay here") from None
            raise
    return emit(changed=True)


# --- command line -------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lab.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("LAB_DIR") or ".lab"), help="the lab's folder")
    parser.add_argument("--name", help="the lab's name (default: as declared in DIR/lab.json)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start the holder, or bring its doors up to date")
    commands.add_parser("down", help="end the lab and remove its traces outside the cache")
    commands.add_parser("status", help="print what is running, as JSON")
    commands.add_parser("images", help="make the images that the nodes boot from")
    commands.add_parser("channel", help="make the conda channel from a node's Python")
    commands.add_parser("prepare", help="write the declaration read from standard input; make folders and a key")
    packages = commands.add_parser("packages", help="install missing packages on this machine")
    packages.add_argument("packages", nargs="+")
    execute = commands.add_parser("exec", help="run a command in the lab, for instance: exec podman ps")
    execute.add_argument("--outside", action="store_true", help="with the machine's own network")
    execute.add_argument("argv", nargs=argparse.REMAINDER)
    cut = commands.add_parser("partition", help="drop everything between nodes (each side: NODE[,NODE...])")
    cut.add_argument("left")
    cut.add_argument("right")
    commands.add_parser("heal", help="end all partitions")
    delay = commands.add_parser("delay", help="delay what a node sends (0: no longer)")
    delay.add_argument("node")
    delay.add_argument("milliseconds", type=int)
    for fault in (cut, delay):
        fault.add_argument("--network", help="on this network only")
    options = parser.parse_args(arguments)
    options.dir = options.dir.absolute()
    if options.command == "exec" and options.argv[:1] == ["--"]:
        options.argv = options.argv[1:]
    return options


def declared_name(options: argparse.Namespace) -> str:
    if options.name:
        return str(options.name)
    with contextlib.suppress(LabError):
        return load(options.dir).name
    return os.environ.get("LAB_NAME") or "lab"


def dispatch(options: argparse.Namespace) -> int:
    command = options.command
    if command == "prepare":
        return command_prepare(options.dir, json.load(sys.stdin))
    if command == "packages":
        return command_packages(options.packages)
    if command == "status":
        return command_status(declared_name(options), options.dir)
    if command == "down":
        return command_down(declared_name(options), options.dir)
    lab = load(options.dir)
    if command == "up":
        return command_up(lab)
    if command == "exec":
        return command_exec(lab, options.argv, options.outside)
    if command == "images":
        return command_images(lab)
    if command == "channel":
        return command_channel(lab)
    if command == "partition":
        return command_partition(lab, options.left, options.right, options.network)
    if command == "heal":
        return command_heal(lab)
    return command_delay(lab, options.node, options.milliseconds, options.network)


def main() -> int:
    try:
        return dispatch(parse(sys.argv[1:]))
    except LabError as problem:
        print(f"lab: {problem}", file=sys.stderr)
    except PermissionError as problem:
        print(f"lab: {problem}: this needs root", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
