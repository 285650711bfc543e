#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: rdma_check
short_description: Measure with ib_write_bw how fast RDMA adapters write to those of other nodes
version_added: 0.1.0
description:
  - >-
    Meets each node of O(meetings) in turn. The two run C(ib_write_bw) of the package perftest over all rails at the
    same time, first one way and then the other; rails that are slow then are measured again, each alone. One end of a
    rail is a server at a free TCP port, at which the two ends agree on how to meet; the data goes from adapter to
    adapter.
  - >-
    The other nodes have to run the module at the same time. A node that cannot take part says so, and the others do not
    wait for it.
  - >-
    Each process stays on the processors beside its adapter. Service level, traffic class, and a fixed address index are
    those that the environment file gives NCCL; without an index perftest chooses one itself, of the newest RoCE
    version.
  - >-
    Tests nothing while a unit of an engine is active. All processes are ended with the module. What they wrote stays in
    O(log_dir).
author:
  - The ironrack authors
options:
  node:
    description: Name of this node.
    type: str
    required: true
  environment_file:
    description: File with variables as systemd's C(EnvironmentFile=) takes them. A missing one is empty.
    type: path
    required: true
  meetings:
    description: Whom this node meets, in an order that is the same on all nodes.
    type: list
    elements: dict
    default: []
    suboptions:
      nodes:
        description: Names of the two nodes. The first one waits for the second.
        type: list
        elements: str
        required: true
      addresses:
        description: Addresses of the two nodes.
        type: list
        elements: str
        required: true
      port:
        description: TCP port at which the first node waits.
        type: int
        required: true
      round:
        description: Meetings with the same number have no node in common, and go on at the same time.
        type: int
        required: true
      rails:
        description: Pairs of adapters.
        type: list
        elements: dict
        required: true
        suboptions:
          rail:
            description: Number of the rail.
            type: int
            required: true
          devices:
            description: Device of each of the two nodes, such as C(mlx5_0).
            type: list
            elements: str
            required: true
          ports:
            description: Port of each device.
            type: list
            elements: int
            required: true
          wanted_gbit:
            description: What is slower is measured again alone. In Gbit/s.
            type: float
            default: 0
  seconds:
    description: Seconds of each measurement.
    type: int
    default: 4
  timeout:
    description: Seconds for each meeting.
    type: int
    default: 180
  program:
    description: The program that measures.
    type: str
    default: ib_write_bw
  sysfs:
    description: Where the kernel tells of devices.
    type: path
    default: /sys
  log_dir:
    description: Folder for what the programs write.
    type: path
    default: /run/ironrack/rdma
attributes:
  check_mode:
    description: Is skipped.
    support: none
  diff_mode:
    description: Changes nothing in any mode.
    support: none
seealso:
  - module: ironrack.vllm.nccl_check
"""

EXAMPLES = r"""
- name: Measure one rail between n1 and n2
  ironrack.vllm.rdma_check:
    node: n1
    environment_file: /etc/ironrack/node.env
    meetings:
      - nodes: [n1, n2]
        addresses: [10.77.1.11, 10.77.1.12]
        port: 50123
        round: 1
        rails:
          - {rail: 0, devices: [mlx5_0, mlx5_0], ports: [1, 1], wanted_gbit: 360}
"""

RETURN = r"""
rdma:
  description: What became of it.
  returned: always
  type: dict
  contains:
    tested:
      description: Whether anything was measured.
      type: bool
    why:
      description: Why not, or null.
      type: str
    version:
      description: Version of perftest, or null.
      type: str
    devices:
      description: For each device of this node C(gt_s), C(width), C(max_gt_s), C(max_width) of its PCI Express link.
      type: dict
    runs:
      description: >-
        For each meeting C(peer), C(why) (not tested), and C(rails). Of these, what this node sent, C(rail), C(device),
        C(port), C(gbit_s), C(alone_gbit_s) (of slow ones), C(mtu), C(gid_index), C(link), C(error), C(peer_error) (what
        the other end said), and C(counters) (of errors, that grew on this node).
      type: list
      elements: dict
"""

import contextlib
import ctypes
import glob
import os
import re
import resource
import signal
import socket
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils.env_file import read_environment
from ansible_collections.ironrack.vllm.plugins.module_utils.net_wire import (
    WireError,
    address_family,
    line,
    read_line,
)
from ansible_collections.ironrack.vllm.plugins.module_utils.program import call

# Nodes begin at different times, the more so where Ansible works on few hosts at a time.
GRACE = 60
LONGEST = 300
# A message that fills every link known with four of them in flight, and that costs the processors little.
MESSAGE_BYTES = 1 << 20
QUEUE_PAIRS = 4
# Connecting takes perftest more than a second; a packet that is lost for good, some more.
AROUND_SECONDS = 20
# As the engines have it.
OPTIONS = (("NCCL_IB_SL", "--sl="), ("NCCL_IB_TC", "--tclass="), ("NCCL_IB_GID_INDEX", "--gid-index="))
COUNTERS = (
    "counters/excessive_buffer_overrun_errors",
    "counters/link_downed",
    "counters/link_error_recovery",
    "counters/port_rcv_errors",
    "counters/port_xmit_discards",
    "counters/symbol_error",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/np_ecn_marked_roce_packets",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/roce_slow_restart",
)
ROW = re.compile(r"\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+|-?nan|-?inf)\s+[\d.]+\s*$")
# What perftest writes besides results and errors.
NOISE = re.compile(
    r"-{5,}|\*{3,}|\* Waiting|\s*RDMA_Write .*Test|\s*#bytes|\s*WARNING|Conflicting CPU|\s*(local|remote) address:"
    r"|\s*GID:|\s*PCIe relax order:|[^:]+\s: |[^:]+\t: |\s*Perftest doesn't|\s*$"
)


class Tester:
    """This node: its programs, folders and variables."""

    def __init__(self, parameters):
        self.node, self.seconds, self.timeout = parameters["node"], parameters["seconds"], parameters["timeout"]
        self.program, self.log_dir = parameters["program"], parameters["log_dir"]
        self.folder = os.path.join(parameters["sysfs"], "class/infiniband")
        self.variables = read_environment(parameters["environment_file"])
        self.version, self.help, self.why = None, "", None
        status, out, err = call([self.program, "--version"], 20)
        if status is None:
            self.why = f"{self.program} {err}"
            return
        found = re.search(r"Version: *(\S+)", out + err)
        self.version = found.group(1) if found else None
        self.help = "".join(call([self.program, "--help"], 20)[1:])
        serving = engines()
        if serving:
            self.why = f"adapters are in use by {', '.join(serving)}"
        elif any(":" in each for each in all_addresses(parameters)) and "--ipv6-addr" not in self.help:
            self.why = f"perftest {self.version} cannot meet at IPv6 addresses"

    def path(self, device, *more):
        return os.path.join(self.folder, device, *more)

    def cannot(self, device, port):
        """Why a port carries nothing, or None."""
        state = read(self.path(device, "ports", str(port), "state"))
        if not state:
            return f"there is no {device}:{port}"
        return None if "ACTIVE" in state else f"{device}:{port} is not active ({state})"

    def command(self, device, port, tcp, address, target=None):
        argv = [self.program, "-d", device, "-i", str(port), "-p", str(tcp), "-s", str(MESSAGE_BYTES)]
        argv += ["-q", str(QUEUE_PAIRS), "-D", str(self.seconds), "-f", "1", "-F", "--report_gbits"]
        for name, option in (
            ("NCCL_IB_SL", "--sl="),
            ("NCCL_IB_TC", "--tclass="),
            ("NCCL_IB_GID_INDEX", "--gid-index="),
        ):
            if self.variables.get(name, "").isdigit():
                argv.append(option + self.variables[name])
        if self.variables.get("NCCL_IB_ADDR_FAMILY") == "AF_INET6":
            argv.append("--ipv6")
        if ":" in address:
            argv.append("--ipv6-addr")
        return argv + ([target] if target else [])

    def start(self, device, argv, log):
        os.makedirs(self.log_dir, mode=0o700, exist_ok=True)
        path = os.path.join(self.log_dir, log)
        beside = cpus(read(self.path(device, "device/local_cpulist")))

        def prepare():
            # Ends with the module that began it, in any case.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, beside or os.sched_getaffinity(0))

        with open(path, "w", encoding="utf-8") as handle:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LC_ALL": "C"},
                preexec_fn=prepare,  # noqa: PLW1509 (this process has no threads)
                start_new_session=True,
            )
        return process, path


def all_addresses(parameters):
    return {address for meeting in parameters["meetings"] for address in meeting["addresses"]}


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def cpus(text):
    """The set of a list such as 0-3,8."""
    found = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        with contextlib.suppress(ValueError):
            found.update(range(int(low), int(high or low) + 1))
    return found


def engines():
    """Units of engines that run or start."""
    listing = ["systemctl", "list-units", "--plain", "--no-legend", "--state=active,activating,reloading"]
    out = call([*listing, "vllm@*.service"], 30)[1]
    return sorted(row.split()[0].replace(".service", "") for row in out.splitlines() if row.strip())


def counters(tester, device, port):
    folder = tester.path(device, "ports", str(port))
    found = {name: read(os.path.join(folder, name)) for name in COUNTERS}
    return {name.partition("/")[2]: int(value) for name, value in found.items() if value.isdigit()}


def pci_links(tester):
    found = {}
    for path in sorted(glob.glob(tester.path("*"))):
        link = {}
        for key, name in (
            ("gt_s", "current_link_speed"),
            ("width", "current_link_width"),
            ("max_gt_s", "max_link_speed"),
            ("max_width", "max_link_width"),
        ):
            number = re.match(r"[\d.]+", read(os.path.join(path, "device", name)))
            link[key] = float(number.group()) if number else None
        found[os.path.basename(path)] = link
    return found


# --- what perftest writes --------------------------------------------------------------------------------------------


def result_of(text):
    """The figure of a whole output with what it says of the link, or None."""
    before, _, after = text.partition("BW average[Gb/sec]")
    rows = [row for row in map(ROW.match, after.splitlines()[1:]) if row]
    if not rows:
        return None
    figure = float(rows[-1].group(1))
    # A clock that jumps gives figures that cannot be.
    if not 0 < figure < 1e5:
        return None
    found = {"gbit_s": figure, "mtu": None, "gid_index": None, "link": None}
    for key, pattern, cast in (
        ("mtu", r"^ *Mtu *: (\d+)", int),
        ("gid_index", r"^ *[Gg][Ii][Dd] index *: (\d+)", int),
        ("link", r"^ *Link type *: (\S+)", str),
    ):
        match = re.search(pattern, before, re.MULTILINE)
        found[key] = cast(match.group(1)) if match else None
    return found


def error_of(text):
    """The lines that say what went wrong, in one."""
    told = [row.strip() for row in text.splitlines() if not NOISE.match(row) and not ROW.match(row)]
    return "; ".join(dict.fromkeys(told))[:LONGEST]


# --- meeting another node --------------------------------------------------------------------------------------------


def name_of(meeting):
    return " ".join(meeting["nodes"])


def hear(link, seconds):
    link.settimeout(seconds)
    told = read_line(link)
    if not told:
        raise WireError("an answer that cannot be read")
    return told


def collect(meeting, hello, end):
    """On the first node: the connection with the second one, and what that says of itself."""
    address = meeting["addresses"][0]
    with socket.socket(address_family(address), socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, meeting["port"]))
        server.listen(64)
        while time.monotonic() < end:
            server.settimeout(max(end - time.monotonic(), 0.1))
            try:
                link = server.accept()[0]
            except OSError:
                break
            try:
                told = hear(link, 5)
                # Strangers, and nodes that are here for a later meeting and will come again.
                if told.get("meeting") == name_of(meeting) and told.get("node") == meeting["nodes"][1]:
                    link.sendall(line(**hello))
                    return link, told
            except (OSError, WireError):
                pass
            link.close()
    return None, None


def join(meeting, hello, end):
    """On the second node, the same."""
    while time.monotonic() < end:
        link = None
        try:
            link = socket.create_connection((meeting["addresses"][0], meeting["port"]), timeout=5)
            link.sendall(line(**hello))
            told = hear(link, max(end - time.monotonic(), 0.1))
            if told.get("node") == meeting["nodes"][0]:
                return link, told
        except (OSError, WireError):
            pass
        if link:
            link.close()
        time.sleep(0.3)
    return None, None


def meet(tester, meeting, end):
    here = meeting["nodes"].index(tester.node)
    peer = meeting["nodes"][1 - here]
    rails = {
        rail["rail"]: {"device": rail["devices"][here], "port": rail["ports"][here], "wanted": rail["wanted_gbit"]}
        for rail in meeting["rails"]
    }
    cannot = {number: tester.cannot(rail["device"], rail["port"]) for number, rail in rails.items()}
    hello = {
        "node": tester.node,
        "meeting": name_of(meeting),
        "why": tester.why,
        "cannot": {str(number): why for number, why in cannot.items() if why},
    }
    link, told = (join if here else collect)(meeting, hello, end)
    if link is None:
        return {"peer": peer, "why": f"{peer} did not come", "rails": []}
    with link:
        why = tester.why or (f"{peer}: {told['why']}" if told.get("why") else None)
        if why:
            return {"peer": peer, "why": why, "rails": []}
        before = {number: counters(tester, rail["device"], rail["port"]) for number, rail in rails.items()}
        found = {}
        for number, rail in rails.items():
            theirs = (told.get("cannot") or {}).get(str(number))
            found[number] = {
                "rail": number,
                "device": rail["device"],
                "port": rail["port"],
                "error": cannot[number],
                "peer_error": theirs,
            }
        able = {number: rail for number, rail in rails.items() if not found[number]["error"]}
        able = {number: rail for number, rail in able.items() if not found[number]["peer_error"]}
        place = {
            "round": meeting["round"],
            "address": meeting["addresses"][here],
            "peer": meeting["addresses"][1 - here],
        }
        try:
            for turn in (1, 0):
                if turn == here:
                    measure(tester, link, able, found, place)
                else:
                    serve(tester, link, rails, place)
        except (OSError, WireError) as error:
            for entry in found.values():
                if not entry.get("gbit_s") and not entry["error"]:
                    entry["peer_error"] = entry["peer_error"] or f"{peer} went away: {error}"[:LONGEST]
        for number, rail in rails.items():
            after = counters(tester, rail["device"], rail["port"])
            grown = {name: after[name] - count for name, count in before[number].items() if after.get(name, 0) > count}
            found[number]["counters"] = grown
    return {"peer": peer, "why": None, "rails": list(found.values())}


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(tester, link, rails, found, place):
    """Write to the other node over all rails, then over each slow one alone; found is filled."""
    if rails:
        for number, result in batch(tester, link, rails, place, "all").items():
            found[number].update(result)
    slow = [number for number in rails if found[number].get("gbit_s", 1e9) < rails[number]["wanted"]]
    for number in slow if len(rails) > 1 else ():
        result = batch(tester, link, {number: rails[number]}, place, "alone")[number]
        found[number]["alone_gbit_s"] = result.get("gbit_s")
    link.sendall(line(done=True))


def batch(tester, link, rails, place, label):
    link.sendall(line(serve=sorted(rails)))
    told = hear(link, 2 * AROUND_SECONDS)
    results, running = {}, {}
    try:
        for number, rail in rails.items():
            tcp = (told.get("ports") or {}).get(str(number))
            if tcp:
                argv = tester.command(rail["device"], rail["port"], int(tcp), place["address"], place["peer"])
                running[number] = tester.start(rail["device"], argv, f"{place['round']}-{number}-client-{label}.log")
        await_all([process for process, _ in running.values()], tester.seconds + AROUND_SECONDS)
    finally:
        codes = {number: stop(process) for number, (process, _) in running.items()}
    link.sendall(line(stop=True))
    said = hear(link, AROUND_SECONDS).get("said") or {}
    for number in rails:
        theirs = said.get(str(number))
        if number not in running:
            results[number] = {"error": None, "peer_error": theirs or "gave no port"}
            continue
        text = read(running[number][1])
        result = result_of(text) if codes[number] == 0 else None
        if result:
            results[number] = result
            continue
        ended = "no end in time" if codes[number] is None else f"ended with code {codes[number]} and no figure"
        results[number] = {"error": error_of(text) or ended, "peer_error": theirs}
    return results


def serve(tester, link, rails, place):
    """Be the other end, until the node that measures has done."""
    running, failed = {}, {}
    # It measures all, and each slow one.
    try:
        while True:
            told = hear(link, tester.timeout)
            if told.get("serve"):
                wanted = {number: rails[number] for number in told["serve"] if number in rails}
                ports, running, failed = open_servers(tester, wanted, place)
                link.sendall(line(ports=ports))
            elif told.get("stop"):
                # One that saw its client go has something to say.
                await_all([process for process, _ in running.values()], 3)
                said = dict(failed)
                for number, (process, path) in running.items():
                    code = stop(process)
                    words = error_of(read(path))
                    if code != 0 and words:
                        said[str(number)] = words
                running, failed = {}, {}
                link.sendall(line(said=said))
            else:
                return
    finally:
        for process, _ in running.values():
            stop(process)


def open_servers(tester, rails, place):
    """Ports at which servers listen, the servers, and what those say that do not."""
    waiting, running, ports, failed = {}, {}, {}, {}
    for number, rail in rails.items():
        tcp = free_port(place["address"])
        argv = tester.command(rail["device"], rail["port"], tcp, place["address"])
        running[number] = tester.start(rail["device"], argv, f"{place['round']}-{number}-server.log")
        waiting[number] = tcp
    end = time.monotonic() + AROUND_SECONDS
    while waiting and time.monotonic() < end:
        open_now = listening()
        for number, tcp in list(waiting.items()):
            if tcp in open_now:
                ports[str(number)] = waiting.pop(number)
            elif running[number][0].poll() is not None:
                del waiting[number]
        time.sleep(0.05)
    for number in rails:
        if str(number) not in ports:
            process, path = running.pop(number)
            stop(process)
            failed[str(number)] = error_of(read(path)) or "does not listen"
    return ports, running, failed


def free_port(address):
    with socket.socket(address_family(address), socket.SOCK_STREAM) as sock:
        sock.bind((address, 0))
        return sock.getsockname()[1]


def listening():
    """TCP ports at which somebody listens. To connect would take the one connection that a server accepts."""
    found = set()
    for name in ("tcp", "tcp6"):
        for row in read(f"/proc/net/{name}").splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def await_all(processes, seconds):
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.1)


def stop(process):
    """The exit status; None of one that had to be ended."""
    code = process.poll()
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code


def check(parameters):
    start = time.monotonic()
    tester = Tester(parameters)
    runs = []
    for meeting in parameters["meetings"]:
        # Until then everybody has come out of the rounds before.
        runs.append(meet(tester, meeting, start + GRACE + meeting["round"] * tester.timeout))
    return {
        "tested": any(rail.get("gbit_s") for run in runs for rail in run["rails"]),
        "why": tester.why,
        "version": tester.version,
        "devices": pci_links(tester),
        "runs": runs,
    }


def main():
    rail = {
        "rail": {"type": "int", "required": True},
        "devices": {"type": "list", "elements": "str", "required": True},
        "ports": {"type": "list", "elements": "int", "required": True},
        "wanted_gbit": {"type": "float", "default": 0},
    }
    meeting = {
        "nodes": {"type": "list", "elements": "str", "required": True},
        "addresses": {"type": "list", "elements": "str", "required": True},
        "port": {"type": "int", "required": True},
        "round": {"type": "int", "required": True},
        "rails": {"type": "list", "elements": "dict", "required": True, "options": rail},
    }
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "environment_file": {"type": "path", "required": True},
            "meetings": {"type": "list", "elements": "dict", "default": [], "options": meeting},
            "seconds": {"type": "int", "default": 4},
            "timeout": {"type": "int", "default": 180},
            "program": {"type": "str", "default": "ib_write_bw"},
            "sysfs": {"type": "path", "default": "/sys"},
            "log_dir": {"type": "path", "default": "/run/ironrack/rdma"},
        },
        supports_check_mode=False,
    )
    for name, low, high in (("seconds", 3, 60), ("timeout", 20, 3600)):
        if not low <= module.params[name] <= high:
            module.fail_json(msg=f"{name}={module.params[name]} is not between {low} and {high}; correct it")
    for each in module.params["meetings"]:
        if module.params["node"] not in each["nodes"] or len(each["nodes"]) != 2 or len(each["addresses"]) != 2:
            module.fail_json(
                msg=f"meetings: {name_of(each)} is no pair of {module.params['node']} and another node, with an address"
                " of each; correct it"
            )
    # Ended like by an error, so that no process stays.
    signal.signal(signal.SIGTERM, lambda *_: module.fail_json(msg="ended from outside"))
    try:
        module.exit_json(changed=False, rdma=check(module.params))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or module.params['program']}: {error.strerror}")


if __name__ == "__main__":
    main()
