#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_facts
short_description: Describe a host as an inference cluster needs it
version_added: 0.1.0
description:
  - >-
    Collects processors, memory, GPUs, network interfaces with their RDMA devices, disks and limits in one pass,
    as the fact C(ironrack_host).
  - Reads C(/proc), C(/sys) and netlink; the only program it runs is C(nvidia-smi), where there is one.
  - Never fails because of what a host lacks. What could not be read is told in C(warnings) of the fact.
author:
  - The ironrack authors
options:
  paths:
    description: Files and folders to look for. Of each is told whether it exists and how much space is free there.
    type: list
    elements: str
    default: []
  nvidia_smi:
    description: Program that describes the GPUs. Looked up in the usual folders when it is a bare name.
    type: str
    default: nvidia-smi
  timeout:
    description: Seconds after which C(nvidia-smi), or a path on a file system that hangs, is given up.
    type: int
    default: 20
  inventory:
    description: >-
      Folder of the inventory that the host is taken from; returned as it is. Tells cached facts of hosts of
      the same name in different inventories apart.
    type: str
    default: ""
attributes:
  check_mode:
    description: Changes nothing in any mode.
    support: full
  diff_mode:
    description: Changes nothing in any mode.
    support: none
  facts:
    description: Sets the fact C(ironrack_host).
    support: full
"""

EXAMPLES = r"""
- name: Look at the host
  ironrack.vllm.host_facts:
    paths:
      - /data/models/tiny
      - /data/models/tiny/config.json

- name: Show its GPUs
  ansible.builtin.debug:
    var: ansible_facts['ironrack_host'].gpus
"""

RETURN = r"""
ansible_facts:
  description: Holds the one fact.
  returned: always
  type: dict
  contains:
    ironrack_host:
      description: The host.
      type: dict
      contains:
        inventory:
          description: The option of this name.
          type: str
        hostname:
          description: Name the kernel knows.
          type: str
        cpu:
          description: >-
            C(model), C(sockets), C(cores), C(threads) and, as C(flags), those of C(avx2), C(avx512f), C(avx512_bf16),
            C(amx_bf16) it has.
          type: dict
        memory:
          description: C(total_mib), C(available_mib), C(swap_mib), C(hugepages).
          type: dict
        numa:
          description: Nodes with C(node), C(cpus) (a list in the kernel's notation) and C(total_mib).
          type: list
          elements: dict
        gpus:
          description: >-
            GPUs as nvidia-smi tells: C(index), C(uuid), C(name), C(memory_total_mib), C(pci), C(numa_node),
            C(compute_capability), C(mig), C(ecc).
          type: list
          elements: dict
        nvidia:
          description: >-
            C(driver_version), C(cuda_version), C(topology) (C(nvlink) when every pair of GPUs is linked by it, else
            C(pcie), null for less than two GPUs), C(pci_devices) (addresses of NVIDIA GPUs seen on the bus, driver or
            not), C(error).
          type: dict
        nics:
          description: >-
            Interfaces with C(name), C(kind), C(mac), C(up), C(mtu), C(speed_mbit), C(driver), C(pci), C(numa_node),
            C(master), C(addresses) (C(address), C(prefix), C(family), C(scope)) and C(rdma) (names of its devices).
          type: list
          elements: dict
        rdma:
          description: >-
            Ports of RDMA devices with C(device), C(port), C(link_layer), C(state), C(rate_gbit), C(interfaces), C(pci),
            C(numa_node), C(firmware).
          type: list
          elements: dict
        routes:
          description: Default routes with C(interface), C(gateway), C(family), C(metric).
          type: list
          elements: dict
        disks:
          description: Block devices with C(name), C(size_bytes), C(rotational), C(model), C(mountpoints).
          type: list
          elements: dict
        filesystems:
          description: >-
            Local file systems and C(/dev/shm), with C(mountpoint), C(type), C(source), C(size_bytes), C(free_bytes).
          type: list
          elements: dict
        kernel:
          description: C(release), C(architecture), C(options) (its boot options on IOMMU, PCI, CPUs, huge pages).
          type: dict
        distribution:
          description: C(id), C(version), C(codename), C(name).
          type: dict
        container:
          description: Name of the container engine the host is made by, or null.
          type: str
        boot_id:
          description: Changes with each boot.
          type: str
        uptime_seconds:
          description: Seconds since the boot.
          type: int
        python:
          description: C(default) (version of this interpreter) and C(installed) (minor versions found).
          type: dict
        systemd:
          description: Version of systemd, or null.
          type: int
        limits:
          description: Hard limits of process 1, C(memlock) and C(nofile); null stands for unlimited.
          type: dict
        paths:
          description: For each path asked for C(exists), C(kind), C(size_bytes), C(free_bytes).
          type: dict
        warnings:
          description: What could not be read.
          type: list
          elements: str
"""

import csv
import glob
import ipaddress
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading

from ansible.module_utils.basic import AnsibleModule

MIB = 1024 * 1024
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# Name in the answer -> field of nvidia-smi --query-gpu.  The first five exist in every driver.
GPU_FIELDS = (
    ("index", "index"),
    ("uuid", "uuid"),
    ("name", "name"),
    ("memory_total_mib", "memory.total"),
    ("pci", "pci.bus_id"),
    ("driver_version", "driver_version"),
    ("compute_capability", "compute_cap"),
    ("mig", "mig.mode.current"),
    ("ecc", "ecc.mode.current"),
)
# Not the whole command line: people put secrets into it.
KERNEL_OPTIONS = re.compile(r"(intel_|amd_)?iommu|pcie?_|pci=|hugepages|default_hugepagesz|isolcpus|nohz_full")
NOT_LOCAL = re.compile(r"squashfs|nfs|cifs|smb|fuse|ceph|lustre|beegfs|gpfs|glusterfs|9p|\bafs|autofs")
SCOPES = {0: "global", 200: "site", 253: "link", 254: "host"}

# Netlink and interface constants (linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h)
RTM_NEWLINK = 16
RTM_GETLINK = 18
RTM_NEWADDR = 20
RTM_GETADDR = 22
NLM_F_REQUEST = 0x1
NLM_F_DUMP = 0x300
NLMSG_ERROR = 2
NLMSG_DONE = 3
IFLA_ADDRESS = 1
IFLA_IFNAME = 3
IFLA_MTU = 4
IFLA_MASTER = 10
IFLA_LINKINFO = 18
IFLA_CARRIER = 33
IFLA_INFO_KIND = 1
IFA_ADDRESS = 1
IFA_LOCAL = 2
IFA_FLAGS = 8
IFA_F_DADFAILED = 0x08
IFA_F_DEPRECATED = 0x20
IFA_F_TENTATIVE = 0x40
IFA_F_TEMPORARY = 0x01
IFF_UP = 0x1
ARPHRD_LOOPBACK = 772
ARPHRD_INFINIBAND = 32


def read(path, default=None):
    """Text of a small file of /proc or /sys without its line end."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read().strip()
    except OSError:
        return default


def read_int(path, default=None):
    try:
        return int(read(path, ""))
    except ValueError:
        return default


def link_name(path):
    """Last part of a link's target, such as the driver behind .../device/driver."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def positive(value):
    """The kernel says -1 where it does not know."""
    return value if value is not None and value >= 0 else None


class TimedOut(Exception):
    pass


def limited(function, seconds):
    """Run function, give up waiting after seconds: a file system whose server is gone blocks for ever."""
    box = {}

    def target():
        try:
            box["value"] = function()
        except Exception as error:  # carried over to the caller's thread
            box["error"] = error

    worker = threading.Thread(target=target, daemon=True)
    worker.start()
    worker.join(seconds)
    if worker.is_alive():
        raise TimedOut(f"no answer within {seconds} seconds")
    if "error" in box:
        raise box["error"]
    return box["value"]


# --- processors and memory -------------------------------------------------------------------------------------------


def cpu_facts(root):
    first = {}
    with open(f"{root}/proc/cpuinfo", encoding="utf-8", errors="replace") as handle:
        for line in handle:  # the first processor only: on large hosts the rest takes long
            key, separator, value = line.partition(":")
            if not separator and first:
                break
            first[key.strip()] = value.strip()
    cores, sockets, threads = set(), set(), 0
    for path in glob.glob(f"{root}/sys/devices/system/cpu/cpu[0-9]*"):
        package = read_int(f"{path}/topology/physical_package_id")
        if read(f"{path}/online", "1") == "0" or package is None:
            continue
        threads += 1
        sockets.add(package)
        cores.add((package, read(f"{path}/topology/die_id"), read(f"{path}/topology/core_id")))
    flags = first.get("flags", first.get("Features", "")).split()
    return {
        "model": first.get("model name") or first.get("CPU part") or first.get("Processor"),
        "sockets": len(sockets) or 1,
        "cores": len(cores) or os.cpu_count(),
        "threads": threads or os.cpu_count(),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def memory_facts(root):
    values = {}
    for line in read(f"{root}/proc/meminfo", "").splitlines():
        key, _, value = line.partition(":")
        values[key] = int(value.split()[0]) if value.split() else 0
    return {
        "total_mib": values["MemTotal"] // 1024,
        "available_mib": values.get("MemAvailable", 0) // 1024,
        "swap_mib": values.get("SwapTotal", 0) // 1024,
        "hugepages": values.get("HugePages_Total", 0),
    }


def numa_facts(root):
    nodes = []
    for path in glob.glob(f"{root}/sys/devices/system/node/node[0-9]*"):
        found = re.search(r"MemTotal:\s+(\d+)", read(f"{path}/meminfo", ""))
        nodes.append(
            {
                "node": int(os.path.basename(path)[4:]),
                "cpus": read(f"{path}/cpulist", ""),
                "total_mib": int(found.group(1)) // 1024 if found else None,
            }
        )
    return sorted(nodes, key=lambda node: node["node"])


# --- GPUs ------------------------------------------------------------------------------------------------------------


def nvidia_pci_devices(root):
    devices = []
    for path in glob.glob(f"{root}/sys/bus/pci/devices/*"):
        # class 0x03: display controllers; leaves out the NVSwitches, audio and USB functions
        if read(f"{path}/vendor") == "0x10de" and read(f"{path}/class", "").startswith("0x03"):
            devices.append(os.path.basename(path))
    return sorted(devices)


def enabled(text):
    """Enabled / Disabled / [N/A] -> true / false / null."""
    return {"enabled": True, "disabled": False}.get(text.strip().lower())


def parse_gpus(text, names):
    """Lines of nvidia-smi --query-gpu (CSV without header and units) -> list of dicts, and what could not be read."""
    gpus, problems = [], []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(names) or not row[0].strip().isdigit():
            problems.append(f"nvidia-smi: {', '.join(row)[:200]}")
            continue
        gpu = {name: row[number].strip() for number, name in enumerate(names)}
        gpu["index"] = int(gpu["index"])
        for key in ("memory_total_mib", "compute_capability", "driver_version", "pci"):
            if key in gpu and gpu[key].startswith("["):
                gpu[key] = None
        memory = re.match(r"\d+", gpu.get("memory_total_mib") or "")
        gpu["memory_total_mib"] = int(memory.group()) if memory else None
        for key in ("mig", "ecc"):
            gpu[key] = enabled(gpu.get(key) or "")
        if gpu.get("pci"):
            # nvidia-smi prints an eight digit domain, /sys a four digit one
            gpu["pci"] = re.sub(r"^[0-9a-f]{4}([0-9a-f]{4}:)", r"\1", gpu["pci"].lower())
        gpus.append(gpu)
    return sorted(gpus, key=lambda gpu: gpu["index"]), problems


def parse_topology(text):
    """The matrix of nvidia-smi topo -m -> nvlink, pcie, or None for less than two GPUs."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    if len(rows) < 2:
        return None
    count = len(rows)
    pairs = [row[1 + other] for index, row in enumerate(rows) for other in range(count) if other != index]
    return "nvlink" if all(re.fullmatch(r"NV\d+", pair) for pair in pairs) else "pcie"


def gpu_facts(root, program, timeout):
    """GPUs, what goes for all of them, and warnings."""
    about = {
        "driver_version": None,
        "cuda_version": None,
        "topology": None,
        "pci_devices": nvidia_pci_devices(root),
        "error": None,
    }
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", read(f"{root}/proc/driver/nvidia/version", ""))
    if found:
        about["driver_version"] = found.group(1)
    folders = os.environ.get("PATH", "") + ":/usr/bin:/usr/local/bin:/usr/sbin:/usr/local/nvidia/bin"
    tool = shutil.which(program, path=folders)
    if tool is None:
        if about["pci_devices"]:
            about["error"] = f"{program} is not installed"
        return [], about, []

    def ask(*arguments):
        try:
            answer = subprocess.run(
                [tool, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
                env=dict(os.environ, LC_ALL="C"),
                encoding="utf-8",
                errors="replace",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, str(error)
        # nvidia-smi tells its errors on standard output
        return (answer.stdout, None) if answer.returncode == 0 else (None, (answer.stdout + answer.stderr).strip())

    warnings = []
    for count in (len(GPU_FIELDS), 6, 5):
        fields = GPU_FIELDS[:count]
        query = ",".join(field for _, field in fields)
        text, error = ask(f"--query-gpu={query}", "--format=csv,noheader,nounits")
        if text is not None or "not a valid field" not in error:
            break  # an old driver does not know all fields: ask it for less
    if text is None:
        about["error"] = " ".join(error.split())[:300]
        return [], about, [f"nvidia-smi: {about['error']}"]
    gpus, problems = parse_gpus(text, [name for name, _ in fields])
    warnings += problems
    for gpu in gpus:
        about["driver_version"] = gpu.pop("driver_version", None) or about["driver_version"]
        gpu["numa_node"] = positive(read_int(f"{root}/sys/bus/pci/devices/{gpu['pci']}/numa_node"))
        gpu.setdefault("compute_capability", None)
    if gpus:
        text, error = ask("-q", "-d", "COMPUTE")
        found = re.search(r"CUDA Version\s*:\s*(\d[\d.]*)", text or "")
        about["cuda_version"] = found.group(1) if found else None
    if len(gpus) > 1:
        text, error = ask("topo", "-m")
        about["topology"] = parse_topology(text or "")
        if about["topology"] is None:
            warnings.append(f"nvidia-smi topo -m: {' '.join((error or 'no matrix in its answer').split())[:200]}")
    return gpus, about, warnings


# --- network ---------------------------------------------------------------------------------------------------------


def netlink_dump(kind):
    """All messages the kernel answers to one dump request: (type, payload)."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as conn:
        conn.settimeout(5)
        conn.bind((0, 0))
        body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, 0, 0, 0)
        conn.send(struct.pack("=IHHII", 16 + len(body), kind, NLM_F_REQUEST | NLM_F_DUMP, 1, 0) + body)
        while True:
            data = conn.recv(1 << 18)
            while len(data) >= 16:
                length, answer = struct.unpack_from("=IH", data)
                if answer == NLMSG_DONE:
                    return
                if answer == NLMSG_ERROR or length < 16:
                    raise OSError("netlink refused the request")
                yield answer, data[16:length]
                data = data[(length + 3) & ~3 :]


def attributes(data):
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def netlink_links():
    links = {}
    for answer, payload in netlink_dump(RTM_GETLINK):
        if answer != RTM_NEWLINK:
            continue
        _, hardware, index, flags, _ = struct.unpack_from("=BxHiII", payload)
        found = attributes(payload[16:])
        number = {key: struct.unpack("=I", found[key])[0] for key in (IFLA_MTU, IFLA_MASTER) if key in found}
        info = attributes(found.get(IFLA_LINKINFO, b""))
        links[index] = {
            "name": found[IFLA_IFNAME].rstrip(b"\0").decode("utf-8", "replace"),
            "hardware": hardware,
            "up": bool(flags & IFF_UP) and found.get(IFLA_CARRIER, b"\1") == b"\1",
            "mac": ":".join(f"{byte:02x}" for byte in found.get(IFLA_ADDRESS, b"")) or None,
            "mtu": number.get(IFLA_MTU),
            "master": number.get(IFLA_MASTER),
            "kind": info.get(IFLA_INFO_KIND, b"").rstrip(b"\0").decode("ascii", "replace"),
        }
    return links


def netlink_addresses():
    """Interface index -> addresses; those that cannot be used to listen on are left out."""
    result = {}
    for answer, payload in netlink_dump(RTM_GETADDR):
        if answer != RTM_NEWADDR:
            continue
        family, prefix, flags, scope, index = struct.unpack_from("=BBBBI", payload)
        found = attributes(payload[8:])
        raw = found.get(IFA_LOCAL, found.get(IFA_ADDRESS))  # on point-to-point links ADDRESS is the peer's
        if raw is None or len(raw) not in (4, 16):
            continue
        if IFA_FLAGS in found:
            flags = struct.unpack("=I", found[IFA_FLAGS])[0]
        if family == socket.AF_INET6 and flags & (
            IFA_F_DADFAILED | IFA_F_TENTATIVE | IFA_F_DEPRECATED | IFA_F_TEMPORARY
        ):
            continue
        result.setdefault(index, []).append(
            {
                "address": str(ipaddress.ip_address(raw)),
                "prefix": prefix,
                "family": 4 if family == socket.AF_INET else 6,
                "scope": SCOPES.get(scope, str(scope)),
            }
        )
    return result


def nic_kind(root, link):
    """physical, or what the kernel calls the virtual kind; loopback, wireless and infiniband on their own."""
    folder = f"{root}/sys/class/net/{link['name']}"
    if link["hardware"] == ARPHRD_LOOPBACK:
        return "loopback"
    if os.path.isdir(f"{folder}/wireless") or os.path.isdir(f"{folder}/phy80211"):
        return "wireless"
    if link["kind"]:
        return link["kind"]
    if link["hardware"] == ARPHRD_INFINIBAND:
        return "infiniband"
    if not os.path.exists(f"{folder}/device"):
        return "tun" if os.path.exists(f"{folder}/tun_flags") else "virtual"
    return "physical"


def nic_facts(root, rdma):
    links, addresses = netlink_links(), netlink_addresses()
    nics = []
    for index, link in sorted(links.items()):
        folder = f"{root}/sys/class/net/{link['name']}"
        speed = read_int(f"{folder}/speed")
        bus = link_name(f"{folder}/device")
        nics.append(
            {
                "name": link["name"],
                "kind": nic_kind(root, link),
                "mac": link["mac"],
                "up": link["up"],
                "mtu": link["mtu"],
                "speed_mbit": speed if speed and 0 < speed < 2**31 else None,
                "driver": link_name(f"{folder}/device/driver"),
                "pci": bus if bus and re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", bus) else None,
                "numa_node": positive(read_int(f"{folder}/device/numa_node")),
                "master": links[link["master"]]["name"] if link["master"] in links else None,
                "addresses": addresses.get(index, []),
                "rdma": sorted({port["device"] for port in rdma if link["name"] in port["interfaces"]}),
            }
        )
    return nics


def rdma_facts(root):
    ports = []
    for path in sorted(glob.glob(f"{root}/sys/class/infiniband/*/ports/*")):
        device = path.split("/")[-3]
        folder = f"{root}/sys/class/infiniband/{device}"
        named = {read(entry) for entry in glob.glob(f"{path}/gid_attrs/ndevs/*")} - {None, ""}
        if not named and os.path.isdir(f"{folder}/device/net"):
            named = set(os.listdir(f"{folder}/device/net"))
        rate = re.match(r"[\d.]+", read(f"{path}/rate", ""))
        ports.append(
            {
                "device": device,
                "port": int(os.path.basename(path)),
                "link_layer": read(f"{path}/link_layer"),
                # "4: ACTIVE"
                "state": read(f"{path}/state", "").split(":")[-1].strip() or None,
                "rate_gbit": float(rate.group()) if rate else None,
                "interfaces": sorted(named),
                "pci": link_name(f"{folder}/device"),
                "numa_node": positive(read_int(f"{folder}/device/numa_node")),
                "firmware": read(f"{folder}/fw_ver"),
            }
        )
    return ports


def route_facts(root):
    routes = []
    for line in read(f"{root}/proc/net/route", "").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == "00000000" and fields[7] == "00000000":
            gateway = str(ipaddress.ip_address(struct.pack("<I", int(fields[2], 16))))
            routes.append({"interface": fields[0], "gateway": gateway, "family": 4, "metric": int(fields[6])})
    for line in read(f"{root}/proc/net/ipv6_route", "").splitlines():
        fields = line.split()
        if len(fields) == 10 and fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
            gateway = str(ipaddress.ip_address(bytes.fromhex(fields[4])))
            routes.append({"interface": fields[9], "gateway": gateway, "family": 6, "metric": int(fields[5], 16)})
    return routes


# --- disks -----------------------------------------------------------------------------------------------------------


def mounts(root):
    """(device number, mount point, type, source) of every mount."""
    result = []
    for line in read(f"{root}/proc/self/mountinfo", "").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), fields[4])
        result.append((fields[2], point, tail[0], tail[1]))
    return result


def space(path):
    found = os.statvfs(path)
    return {"size_bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}


def filesystem_facts(root, timeout, warnings):
    result, seen = [], set()
    for _, point, kind, source in mounts(root):
        wanted = source.startswith("/dev/") or kind in ("zfs", "btrfs") or point in ("/", "/dev/shm")  # noqa: S108
        if not wanted or NOT_LOCAL.search(kind) or point in seen or not os.path.isdir(point):
            continue
        if point.startswith(("/snap/", "/var/lib/docker/", "/var/lib/containers/")):
            continue
        seen.add(point)
        try:
            room = limited(lambda point=point: space(point), timeout)
        except (OSError, TimedOut) as error:
            warnings.append(f"{point}: {error}")
            continue
        result.append({"mountpoint": point, "type": kind, "source": source, **room})
    return result


def disk_facts(root):
    points = {}
    for number, point, _, source in mounts(root):
        for key in (number, os.path.basename(source) if source.startswith("/dev/") else None):
            if key and point not in points.setdefault(key, []):
                points[key].append(point)
    disks = []
    for folder in sorted(glob.glob(f"{root}/sys/block/*")):
        name = os.path.basename(folder)
        size = read_int(f"{folder}/size", 0) * 512
        if re.match(r"(loop|ram|zram|sr|fd|nbd)\d", name) or not size:
            continue
        parts = [folder, *glob.glob(f"{folder}/{name}*")]
        found = [
            point
            for part in parts
            for key in (read(f"{part}/dev"), os.path.basename(part))
            for point in points.get(key, [])
        ]
        disks.append(
            {
                "name": name,
                "size_bytes": size,
                "rotational": read(f"{folder}/queue/rotational") == "1",
                "model": read(f"{folder}/device/model") or read(f"{folder}/dm/name"),
                "mountpoints": sorted(set(found)),
            }
        )
    return disks


def path_facts(path, timeout, warnings):
    def look():
        try:
            info = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            info = None
        nearest = path
        while not os.path.isdir(nearest) and nearest != os.path.dirname(nearest):
            nearest = os.path.dirname(nearest)
        kind = None
        if info:
            kind = "directory" if stat.S_ISDIR(info.st_mode) else "file" if stat.S_ISREG(info.st_mode) else "other"
        size = info.st_size if kind == "file" else None
        return {
            "exists": info is not None,
            "kind": kind,
            "size_bytes": size,
            "free_bytes": space(nearest)["free_bytes"],
        }

    try:
        return limited(look, timeout)
    except (OSError, TimedOut) as error:
        warnings.append(f"{path}: {error}")
        return {"exists": False, "kind": None, "size_bytes": None, "free_bytes": None}


# --- system ----------------------------------------------------------------------------------------------------------


def distribution_facts(root):
    values = {}
    text = read(f"{root}/etc/os-release") or read(f"{root}/usr/lib/os-release", "")
    for line in text.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            values[key] = value.strip().strip("\"'")
    return {
        "id": values.get("ID"),
        "version": values.get("VERSION_ID"),
        "codename": values.get("VERSION_CODENAME"),
        "name": values.get("PRETTY_NAME"),
    }


def kernel_facts(root):
    name = os.uname()
    options = [word for word in read(f"{root}/proc/cmdline", "").split() if KERNEL_OPTIONS.match(word)]
    return {"release": name.release, "architecture": name.machine, "options": options}


def python_facts(root):
    found = set()
    for folder in ("usr/bin", "usr/local/bin"):
        for path in glob.glob(f"{root}/{folder}/python3.*"):
            match = re.fullmatch(r"python(3\.\d+)", os.path.basename(path))
            if match and os.access(path, os.X_OK):
                found.add(match.group(1))
    installed = sorted(found, key=lambda version: int(version.split(".")[1]))
    return {"default": ".".join(str(part) for part in sys.version_info[:3]), "installed": installed}


def systemd_version(root):
    for pattern in ("usr/lib/systemd", "lib/systemd", "usr/lib/*/systemd", "usr/lib64/systemd"):
        for path in glob.glob(f"{root}/{pattern}/libsystemd-shared-*.so"):
            match = re.search(r"-(\d+)", os.path.basename(path)[len("libsystemd-shared") :])
            if match:
                return int(match.group(1))
    return None


def limit_facts(root):
    limits = {}
    for line in read(f"{root}/proc/1/limits", "").splitlines():
        for label, key in (("Max locked memory", "memlock"), ("Max open files", "nofile")):
            if line.startswith(label):
                hard = line[len(label) :].split()[1]
                limits[key] = None if hard == "unlimited" else int(hard)
    return limits


def container_name(root):
    return read(f"{root}/run/systemd/container") or None


def gather(paths=(), nvidia_smi="nvidia-smi", timeout=20, root=""):
    """The whole fact.  root is where /proc and /sys are looked for: tests give it a tree of their own."""
    warnings = []

    def guarded(name, function, default):
        try:
            return function()
        except Exception as error:  # whatever a host holds ready, the rest must still be told
            warnings.append(f"{name}: {type(error).__name__}: {error}")
            return default

    about = {"driver_version": None, "cuda_version": None, "topology": None, "pci_devices": [], "error": None}
    gpus, nvidia, gpu_warnings = guarded("gpus", lambda: gpu_facts(root, nvidia_smi, timeout), ([], about, []))
    warnings += gpu_warnings
    rdma = guarded("rdma", lambda: rdma_facts(root), [])
    return {
        "hostname": guarded("hostname", lambda: os.uname().nodename, None),
        "cpu": guarded("cpu", lambda: cpu_facts(root), {}),
        "memory": guarded("memory", lambda: memory_facts(root), {}),
        "numa": guarded("numa", lambda: numa_facts(root), []),
        "gpus": gpus,
        "nvidia": nvidia,
        "nics": guarded("nics", lambda: nic_facts(root, rdma), []),
        "rdma": rdma,
        "routes": guarded("routes", lambda: route_facts(root), []),
        "disks": guarded("disks", lambda: disk_facts(root), []),
        "filesystems": guarded("filesystems", lambda: filesystem_facts(root, timeout, warnings), []),
        "kernel": guarded("kernel", lambda: kernel_facts(root), {}),
        "distribution": guarded("distribution", lambda: distribution_facts(root), {}),
        "container": guarded("container", lambda: container_name(root), None),
        "boot_id": read(f"{root}/proc/sys/kernel/random/boot_id"),
        "uptime_seconds": guarded("uptime", lambda: int(float(read(f"{root}/proc/uptime").split()[0])), None),
        "python": guarded("python", lambda: python_facts(root), {}),
        "systemd": guarded("systemd", lambda: systemd_version(root), None),
        "limits": guarded("limits", lambda: limit_facts(root), {}),
        "paths": {path: path_facts(path, timeout, warnings) for path in paths},
        "warnings": warnings,
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "str", "default": []},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "timeout": {"type": "int", "default": 20},
            "inventory": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    facts = gather(module.params["paths"], module.params["nvidia_smi"], module.params["timeout"])
    facts["inventory"] = module.params["inventory"]
    module.exit_json(changed=False, ansible_facts={"ironrack_host": facts})


if __name__ == "__main__":
    main()
