#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: nccl_check
short_description: Let the runtime's PyTorch exchange data over NCCL, and measure how fast that goes
version_added: 0.1.0
description:
  - >-
    Runs all-reduces with a process for each GPU, in the runtime that serves and with the variables that its units get:
    first the GPUs of this node alone, then in each of O(meetings) with those of other nodes. Reads NCCL's own log for
    the way that the data took.
  - >-
    The other nodes of a meeting have to run the module at the same time. The first node of a meeting collects them at
    its address; a node that cannot take part says so, and the others do not wait for it.
  - >-
    Tests nothing while a unit of an engine is active, or while a GPU's memory is in use. All processes are ended with
    the module. NCCL's whole log stays in O(log_dir).
author:
  - The ironrack authors
options:
  node:
    description: Name of this node.
    type: str
    required: true
  python:
    description: Python of the runtime. Where it is missing, nothing is tested.
    type: path
    required: true
  environment_file:
    description: File with variables as systemd's C(EnvironmentFile=) takes them. A missing one is empty.
    type: path
    required: true
  meetings:
    description: What this node does with others, in an order that is the same on all nodes.
    type: list
    elements: dict
    default: []
    suboptions:
      kind:
        description: C(pair) or C(all).
        type: str
        required: true
      nodes:
        description: Names of the nodes. Ranks are given in this order.
        type: list
        elements: str
        required: true
      address:
        description: Address of the first node.
        type: str
        required: true
      port:
        description: TCP port at which the first node collects the others.
        type: int
        required: true
      round:
        description: Meetings with the same number have no node in common, and go on at the same time.
        type: int
        required: true
  mib:
    description: Size of the largest message.
    type: int
    default: 1024
  timeout:
    description: Seconds for the GPUs of this node, and for each meeting. Loading PyTorch is a part of it.
    type: int
    default: 180
  nvidia_smi:
    description: Program that says who uses the GPUs.
    type: str
    default: nvidia-smi
  log_dir:
    description: Folder for NCCL's logs.
    type: path
    default: /run/ironrack/nccl
attributes:
  check_mode:
    description: Is skipped.
    support: none
  diff_mode:
    description: Changes nothing in any mode.
    support: none
seealso:
  - module: ironrack.vllm.gloo_check
"""

EXAMPLES = r"""
- name: Exchange data between the GPUs of this node, and with n2
  ironrack.vllm.nccl_check:
    node: n1
    python: /opt/ironrack/current/bin/python
    environment_file: /etc/ironrack/node.env
    meetings:
      - {kind: pair, nodes: [n1, n2], address: 10.77.1.11, port: 50123, round: 1}
"""

RETURN = r"""
nccl:
  description: What became of it.
  returned: always
  type: dict
  contains:
    tested:
      description: Whether anything was tested.
      type: bool
    why:
      description: Why not, or null.
      type: str
    gpus:
      description: Names of the GPUs.
      type: list
      elements: str
    devices:
      description: Ports of RDMA devices, with C(name), C(port), C(active), C(link_layer), C(gbit).
      type: list
      elements: dict
    variables:
      description: What the environment file says of NCCL.
      type: dict
    runs:
      description: >-
        For the GPUs of this node (C(alone)) and each meeting C(kind), C(nodes), C(ok), C(why) (not tested), C(error),
        C(warnings) (of NCCL), C(ranks), C(sizes) (C(mib), C(iterations), C(seconds), C(bus_gb_s)), C(bus_gb_s) (of the
        fastest size), C(version), C(network), C(interface), C(via) (ways of the data, with how often NCCL names each),
        C(nvls) (channels through the switch), C(gdr) (what NCCL says of GPUDirect RDMA). Figures are of the first node.
      type: list
      elements: dict
"""

import contextlib
import glob
import json
import os
import re
import signal
import socket
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils.env_file import read_environment
from ansible_collections.ironrack.vllm.plugins.module_utils.program import call

# Runs in the runtime, once for each GPU. What it decides, it decides by times that all ranks have in common.
PROGRAM = """
import ctypes, datetime, json, os, signal, sys, threading, time, traceback
given = json.loads(sys.argv[1])
# Ends with the module that began it, and in any case.
libc = ctypes.CDLL(None)
libc.prctl(1, signal.SIGKILL)
# NCCL's log line by line: a rank that is ended keeps nothing back.
libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
signal.alarm(given["seconds"] + 30)
import torch
import torch.distributed as dist
rank, world = given["rank"], given["world"]
# A little less, so that PyTorch has the time to say for what it waits.
limit = datetime.timedelta(seconds=max(10, given["seconds"] - 45))
over = threading.Event()

def watch():
    # NCCL does not notice that a rank is gone before all of them are connected.
    try:
        line = dist.TCPStore(given["host"], given["port"], world, False, limit, wait_for_workers=False)
        while not line.check(["failed"]):
            time.sleep(0.5)
        word = line.get("failed").decode()
    except Exception:
        word = "the first rank is gone"
    # The one that failed says so itself.
    time.sleep(1)
    if not over.is_set():
        print("\\nRuntimeError: remote process exited: " + word, flush=True)
        os._exit(1)

def timed(values, count):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        dist.all_reduce(values)
    end.record()
    torch.cuda.synchronize()
    longest = torch.tensor([begin.elapsed_time(end) / 1000], dtype=torch.float64, device=values.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()

def measure(store):
    device = torch.device("cuda", given["device"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=limit, device_id=device)
    values = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(values)
    right = bool((values == world * (world + 1) / 2).all())
    largest = given["mib"]
    whole = torch.rand(largest * 262144, device=device)
    sizes, spent, each = [], 0.0, 0.0
    for mib in sorted({min(size, largest) for size in (1, 16, 128, 512, largest)}):
        # On a slow network, as far as the time goes.
        if sizes and spent + 3 * each * mib / sizes[-1]["mib"] > given["budget"]:
            break
        part = whole[: mib * 262144]
        spent += timed(part, 1)
        once = timed(part, 1)
        count = max(1, min(20, int(2 / max(once, 1e-6))))
        seconds = timed(part, count)
        spent += once + seconds
        each = seconds / count
        speed = mib * 1048576 / each / 1e9 * 2 * (world - 1) / world
        sizes.append({"mib": mib, "iterations": count, "seconds": round(each, 6), "bus_gb_s": round(speed, 3)})
    return {"ok": right, "sizes": sizes}

store = dist.TCPStore(given["host"], given["port"], world, rank == 0, limit)
threading.Thread(target=watch, daemon=True).start()
try:
    result = measure(store)
    over.set()
    # The first rank holds the meeting point, so it leaves last.
    store.set("done%d" % rank, "1")
    if rank == 0:
        store.wait(["done%d" % other for other in range(world)], limit)
except BaseException as error:
    over.set()
    traceback.print_exc()
    sys.stderr.flush()
    store.set("failed", "rank %d: %s" % (rank, " ".join(str(error).split())[:300]))
    # The others come to hear of it.
    time.sleep(3 if rank == 0 else 0)
    os._exit(1)
print("\\nironrack-result " + json.dumps(result), flush=True)
os._exit(0)
"""
COUNT = "import torch; print(torch.version.cuda or '', torch.cuda.device_count())"
HELD_MIB = 1024
# Until all nodes have begun, where Ansible works on few of them at a time.
GRACE = 60
LONGEST = 500
FEW = 6
PREFIX = re.compile(r"^\S*:\d+:\d+ \[\d+\] ")
# What a rank says of others that are gone or do not come.
WAITED = re.compile(r"remote process exited|connection closed|timed? ?out", re.IGNORECASE)
VIA = re.compile(r"\bvia ((?:NET|P2P|SHM|NVLS|COLLNET)\S*)")


# --- before anything runs --------------------------------------------------------------------------------------------


def unit_of(pid, proc="/proc"):
    """The systemd unit of a process, or nothing."""
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8") as handle:
            names = re.findall(r"([^/\n]+\.service)", handle.read())
    except OSError:
        return ""
    return names[-1] if names else ""


def gpus_of(program):
    """(names of the GPUs, why they cannot be used or None)."""
    fields = "--query-gpu=index,name,memory.used"
    status, out, err = call([program, fields, "--format=csv,noheader,nounits"], 30)
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.count(",") == 2]
    if status is None and "cannot be run" in err:
        return [], "no GPUs here"
    if status != 0:
        return [], f"nvidia-smi {err.strip() or out.strip() or 'failed'}"[:LONGEST]
    names = [row[1] for row in rows]
    if not names:
        return [], "no GPUs here"
    holders = call([program, "--query-compute-apps=pid", "--format=csv,noheader"], 30)[1].split()
    units = sorted({unit for pid in holders if (unit := unit_of(pid)).startswith("vllm")})
    if units:
        return names, f"GPUs are in use by {', '.join(unit.replace('.service', '') for unit in units)}"
    held = [row for row in rows if row[2].isdigit() and int(row[2]) >= HELD_MIB]
    if held:
        by = f" (process {', '.join(holders[:FEW])})" if holders else ""
        return names, f"GPU {held[0][0]} is in use: {held[0][2]} MiB{by}"
    return names, None


def engines():
    """Units of engines that run or start, whether they have the GPUs yet or not."""
    listing = ["systemctl", "list-units", "--plain", "--no-legend", "--state=active,activating,reloading"]
    out = call([*listing, "vllm@*.service"], 30)[1]
    return sorted(line.split()[0].replace(".service", "") for line in out.splitlines() if line.strip())


def cuda_gpus(python, environment):
    """(GPUs that the runtime's PyTorch can use, why none or None)."""
    pairs = [f"{name}={value}" for name, value in environment.items()]
    status, out, err = call(["env", "-i", *pairs, python, "-I", "-c", COUNT], 120)
    if status != 0:
        return 0, f"the runtime's PyTorch does not load: {(err.strip().splitlines() or ['no word'])[-1][:LONGEST]}"
    words = out.split()
    if len(words) < 2:
        return 0, "the runtime's PyTorch is built without CUDA"
    count = int(words[-1])
    return count, None if count else "the runtime's PyTorch finds no GPU"


def rdma_ports(sysfs="/sys/class/infiniband"):
    def read(*path):
        try:
            with open(os.path.join(*path), encoding="utf-8") as handle:
                return handle.read().strip()
        except OSError:
            return ""

    found = []
    for path in sorted(glob.glob(f"{sysfs}/*/ports/*")):
        rate = re.match(r"[\d.]+", read(path, "rate"))
        found.append(
            {
                "name": path.split("/")[-3],
                "port": int(path.split("/")[-1]),
                "active": "ACTIVE" in read(path, "state"),
                "link_layer": read(path, "link_layer"),
                "gbit": float(rate.group()) if rate else None,
            }
        )
    return found


# --- meeting other nodes ---------------------------------------------------------------------------------------------


def line_of(connection):
    """A message: one line of JSON, or None."""
    data = b""
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n") and len(data) < 65536:
            part = connection.recv(4096)
            if not part:
                break
            data += part
    try:
        told = json.loads(data)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def say(connection, message):
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def name_of(meeting):
    return f"{meeting['kind']} {' '.join(meeting['nodes'])}"


def family_of(address):
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][0]


def free_port(address):
    with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
        sock.bind((address, 0))
        return sock.getsockname()[1]


def collect(meeting, hello, end):
    """On the first node: hear all others, and tell them whether and where the ranks meet."""
    heard, waiting = {meeting["nodes"][0]: hello}, {}
    try:
        with socket.socket(family_of(meeting["address"]), socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((meeting["address"], meeting["port"]))
            server.listen(64)
            while set(heard) != set(meeting["nodes"]) and time.monotonic() < end:
                server.settimeout(max(end - time.monotonic(), 0.1))
                try:
                    connection, _ = server.accept()
                except OSError:
                    break
                connection.settimeout(5)
                told = line_of(connection) or {}
                node = told.get("node")
                # Strangers, and nodes that are here for a later meeting and will come again.
                if told.get("meeting") != name_of(meeting) or node not in meeting["nodes"][1:]:
                    connection.close()
                    continue
                if node in waiting:
                    waiting[node].close()
                heard[node], waiting[node] = told, connection
        absent = [node for node in meeting["nodes"] if node not in heard]
        reasons = [f"{node}: {told['why']}" for node, told in sorted(heard.items()) if told.get("why")]
        reasons += [f"{node} did not come" for node in absent]
        plan = {"why": "; ".join(reasons) or None}
        if not reasons:
            plan["gpus"] = [int(heard[node]["gpus"]) for node in meeting["nodes"]]
            plan["port"] = free_port(meeting["address"])
        for connection in waiting.values():
            say(connection, plan)
        return plan
    finally:
        for connection in waiting.values():
            connection.close()


def join(meeting, hello, end):
    """On a further node: the first one's word."""
    first = meeting["nodes"][0]
    while time.monotonic() < end:
        try:
            with socket.create_connection((meeting["address"], meeting["port"]), timeout=5) as connection:
                say(connection, dict(hello, meeting=name_of(meeting)))
                connection.settimeout(max(end - time.monotonic(), 0.1))
                told = line_of(connection)
            if told and "why" in told:
                return told
        except OSError:
            pass
        time.sleep(0.3)
    return {"why": f"{first} did not come"}


# --- the ranks -------------------------------------------------------------------------------------------------------


def stop(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def exchange(parameters, environment, label, ranks, end):
    """Run ranks, which are dicts with rank, world, device, host and port, and read what they wrote."""
    seconds = max(int(end - time.monotonic()), 10)
    files, running = [], []
    try:
        for each in ranks:
            path = os.path.join(parameters["log_dir"], f"{label}-{each['device']}.log")
            files.append(path)
            more = {"seconds": seconds, "mib": parameters["mib"], "budget": min(20, seconds // 4)}
            with open(path, "w", encoding="utf-8") as log:
                running.append(
                    subprocess.Popen(
                        [parameters["python"], "-I", "-c", PROGRAM, json.dumps({**each, **more})],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        late = await_all(running, end)
    finally:
        for process in running:
            stop(process)
            process.wait()
    logs = []
    for path in files:
        with open(path, encoding="utf-8", errors="replace") as handle:
            logs.append(handle.read())
    return outcome(logs, [process.returncode for process in running], late, seconds)


def await_all(running, end):
    """Whether time ran out. Once a rank has failed, the others get little more: they wait for it in vain."""
    while any(process.poll() is None for process in running):
        if any(process.returncode for process in running):
            end = min(end, time.monotonic() + 15)
            while any(process.poll() is None for process in running) and time.monotonic() < end:
                time.sleep(0.1)
            return False
        if time.monotonic() > end:
            return True
        time.sleep(0.1)
    return False


def outcome(logs, codes, late, seconds):
    told = [result_of(log) for log in logs]
    found = {"ok": all(each and each["ok"] for each in told), "error": None, "sizes": [], "bus_gb_s": None}
    found.update(read_logs(logs))
    if found["ok"]:
        found["sizes"] = told[0]["sizes"]
        found["bus_gb_s"] = max(size["bus_gb_s"] for size in told[0]["sizes"])
        return found
    failed = [rank for rank, each in enumerate(told) if not each]
    errors = [error for error in (reason(logs[rank]) for rank in failed) if error]
    if errors:
        # What a rank says of another that went away tells less than that one's own words.
        errors.sort(key=lambda error: bool(WAITED.search(error)))
        found["error"] = errors[0]
    elif late:
        found["error"] = f"timed out: no end within {seconds} seconds"
    elif failed:
        found["error"] = f"ended with code {codes[failed[0]]} and no word"
    else:
        found["error"] = "the sum is wrong"
    return found


def result_of(log):
    for line in reversed(log.splitlines()):
        if line.startswith("ironrack-result "):
            with contextlib.suppress(ValueError):
                return json.loads(line.partition(" ")[2])
    return None


def reason(log):
    """The exception with what NCCL adds to it, without the native stack and the log."""
    lines = [line.strip() for line in log.splitlines()]
    begins = [at for at, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b: ", line)]
    # NCCL's own name for it comes a line after the exception's.
    begins = [at for at in begins if not lines[at].startswith("ncclSys")] or begins
    if not begins:
        # PyTorch's watchdog ends a rank that hangs, without a Python exception.
        thrown = [line for line in lines if line.startswith("what(): ")]
        return re.sub(r"^what\(\):\s+(\[PG[^]]*\] ?)?", "", thrown[0])[:LONGEST] if thrown else ""
    words = []
    for line in lines[begins[-1] :]:
        if re.match(r"Exception raised from|frame #|\[rank\d+\]|terminate called", line) or " NCCL INFO " in line:
            break
        if line:
            words.append(line)
    return " ".join(words)[:LONGEST]


def read_logs(logs):
    """What NCCL says of itself and of the ways that it takes."""
    via, warnings, found = {}, [], {"version": None, "network": None, "interface": None, "nvls": 0, "gdr": []}
    for line in "\n".join(logs).splitlines():
        way = VIA.search(line)
        if way:
            # Which device and which channel of it says nothing more.
            name = re.sub(r"(NET/\w+)/\d+(\(\d+\))?", r"\1", way.group(1).rstrip(",;"))
            via[name] = via.get(name, 0) + 1
        elif " NCCL WARN " in line:
            text = PREFIX.sub("", line).partition("NCCL WARN ")[2].strip()[:LONGEST]
            if text and text not in warnings and len(warnings) < FEW:
                warnings.append(text)
        else:
            for key, pattern in (
                ("version", r"(?:^| INFO )NCCL version (\S+)"),
                ("network", r"Using network (\S+)"),
                ("interface", r"Bootstrap ?: Using (?:\[\d+\])?([^\s:]+):"),
            ):
                match = re.search(pattern, line)
                if match and not found[key]:
                    found[key] = match.group(1)
            match = re.search(r"(\d+) nvls channels", line)
            if match:
                found["nvls"] = max(found["nvls"], int(match.group(1)))
            match = re.search(r"NET/IB.*GPU Direct RDMA (Enabled|Disabled)", line)
            if match and match.group(1).lower() not in found["gdr"]:
                found["gdr"].append(match.group(1).lower())
    return {**found, "via": via, "warnings": warnings}


# --- all of it -------------------------------------------------------------------------------------------------------


def check(parameters):
    start = time.monotonic()
    node, timeout = parameters["node"], parameters["timeout"]
    variables = read_environment(parameters["environment_file"])
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        **variables,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,NVLS",
    }
    # To the log that is read here.
    environment.pop("NCCL_DEBUG_FILE", None)
    names, why = gpus_of(parameters["nvidia_smi"])
    serving = engines() if names else []
    if serving:
        why = f"GPUs are in use by {', '.join(serving)}"
    count = 0
    if not why and not os.path.exists(parameters["python"]):
        why = "no runtime yet"
    if not why:
        count, why = cuda_gpus(parameters["python"], environment)
    if not why:
        os.makedirs(parameters["log_dir"], mode=0o700, exist_ok=True)
    runs = []
    alone = {"kind": "alone", "nodes": [node], "why": why}
    if count > 1:
        ranks = [
            {"rank": device, "world": count, "device": device, "host": "127.0.0.1", "port": free_port("127.0.0.1")}
            for device in range(count)
        ]
        for each in ranks:
            each["port"] = ranks[0]["port"]
        told = exchange(parameters, environment, "alone", ranks, time.monotonic() + timeout)
        runs.append({**alone, "ranks": count, **told})
    else:
        runs.append(dict(alone, why=why or "one GPU"))
    for meeting in parameters["meetings"]:
        # Until then everybody has come out of the rounds before.
        end = start + GRACE + meeting["round"] * timeout
        runs.append(meet(parameters, environment, meeting, {"node": node, "gpus": count, "why": why}, end))
    return {
        "tested": any(not run["why"] for run in runs),
        "why": why,
        "gpus": names,
        "devices": rdma_ports(),
        "variables": {name: value for name, value in sorted(variables.items()) if name.startswith("NCCL_")},
        "runs": runs,
    }


def meet(parameters, environment, meeting, hello, end):
    nodes, here = meeting["nodes"], meeting["nodes"].index(hello["node"])
    plan = (join if here else collect)(meeting, hello, end)
    run = {"kind": meeting["kind"], "nodes": nodes, "why": plan["why"]}
    if plan["why"]:
        return run
    first = sum(plan["gpus"][:here])
    ranks = [
        {
            "rank": first + device,
            "world": sum(plan["gpus"]),
            "device": device,
            "host": meeting["address"],
            "port": plan["port"],
        }
        for device in range(hello["gpus"])
    ]
    end = time.monotonic() + parameters["timeout"]
    label = f"{meeting['kind']}-{meeting['round']}"
    return {**run, "ranks": sum(plan["gpus"]), **exchange(parameters, environment, label, ranks, end)}


def main():
    meeting = {
        "kind": {"type": "str", "required": True},
        "nodes": {"type": "list", "elements": "str", "required": True},
        "address": {"type": "str", "required": True},
        "port": {"type": "int", "required": True},
        "round": {"type": "int", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "python": {"type": "path", "required": True},
            "environment_file": {"type": "path", "required": True},
            "meetings": {"type": "list", "elements": "dict", "default": [], "options": meeting},
            "mib": {"type": "int", "default": 1024},
            "timeout": {"type": "int", "default": 180},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "log_dir": {"type": "path", "default": "/run/ironrack/nccl"},
        },
        supports_check_mode=False,
    )
    for name, low, high in (("mib", 1, 16384), ("timeout", 30, 1800)):
        if not low <= module.params[name] <= high:
            module.fail_json(msg=f"{name}={module.params[name]} is not between {low} and {high}; correct it")
    for each in module.params["meetings"]:
        if module.params["node"] not in each["nodes"]:
            module.fail_json(msg=f"meetings: {name_of(each)} has no {module.params['node']}; take it out")
    # Ended like by an error, so that no rank stays.
    signal.signal(signal.SIGTERM, lambda *_: module.fail_json(msg="ended from outside"))
    try:
        module.exit_json(changed=False, nccl=check(module.params))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or module.params['python']}: {error.strerror}")


if __name__ == "__main__":
    main()
