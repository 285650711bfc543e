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
  - >-
    Reads C(/proc), C(/sys) and netlink; the only programs it runs are C(nvidia-smi) and C(dpkg-query), where they are
    there, and with O(health) also C(systemctl) and at times C(journalctl).
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
  health:
    description: Also collect what a preflight judges, as RV(ansible_facts.ironrack_host.health).
    type: bool
    default: false
  release:
    description: Folder of the runtime that is in use, for O(health). Empty, the runtime is left out.
    type: str
    default: ""
  controller_time:
    description: >-
      Seconds since 1970 on the controller when the task starts, for O(health); the host's clock is compared with it.
      V(0) leaves the comparison out.
    type: float
    default: 0
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
            C(bridges) (PCI bridges above it, from the root port down), C(compute_capability), C(mig), C(ecc).
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
            C(numa_node), C(bridges) (PCI bridges above it, from the root port down), C(firmware).
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
        nvidia_functions:
          description: >-
            PCI functions of NVIDIA (GPUs, NVSwitches, others) with C(address), C(device), C(subsystem), C(class),
            C(driver) (the one in use, or null).
          type: list
          elements: dict
        nvidia_driver:
          description: >-
            C(loaded) (version of the module in the kernel), C(flavour) (C(open) or C(proprietary)), C(library) (version
            of the libraries on disk), C(libraries) (each library with its version), C(modules) (loaded modules of
            NVIDIA, and nouveau), C(runfile) (whether NVIDIA's own installer was used).
          type: dict
        kernels:
          description: >-
            Installed kernels, oldest first, with C(release), C(headers) and C(nvidia_module) (path below the folder of
            its modules, or null).
          type: list
          elements: dict
        dkms:
          description: >-
            Modules known to DKMS with C(module), C(version), C(kernel), C(state) (installed, built, failed or added).
          type: list
          elements: dict
        secure_boot:
          description: Whether Secure Boot is on; null where it cannot be told.
          type: bool
        packages:
          description: >-
            Packages of drivers, CUDA, kernels and their headers with C(name), C(version), C(state) (dpkg's two
            letters), C(hold).
          type: list
          elements: dict
        health:
          description: >-
            With O(health): C(gpus) (of each what nvidia-smi -q tells), C(nvlink), C(p2p), C(topology) (matrices of
            nvidia-smi), C(pci) (links, ACS of the bridges above and IOMMU of each GPU), C(iommu_groups), C(virtual),
            C(kernel_log), C(services), C(fabric_manager) (its version), C(device_nodes), C(remove_ipc), C(clock) (with
            C(servers), what chrony thinks of them), C(node_environment) (of node.env), C(swap_used_mib),
            C(reboot_required), C(boot) (C(kernel) and C(options) of the next boot; as C(modprobe) the files that were
            changed after this one; as C(initramfs_older) the kernels whose image is older than the list that keeps
            nouveau away), C(unmounted) (of fstab), C(gpu_users) (processes that have a GPU open, where nvidia-smi does
            not tell), C(unattended_upgrades), C(toolchain), C(release), C(file_system_types), C(link_downed).
          type: dict
        serving:
          description: Units of this project that run (engines and Ray).
          type: list
          elements: str
        warnings:
          description: What could not be read.
          type: list
          elements: str
"""

import csv
import ctypes
import glob
import ipaddress
import json
import os
import pwd
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils import netlink

MIB = 1024 * 1024
# What is asked of nvidia-smi for health, all at the same time.
DETAILS = {"xml": ("-q", "-x"), "nvlink": ("nvlink", "-s"), "p2p": ("topo", "-p2p", "r")}
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
PACKAGES = re.compile(
    r"(lib)?(nvidia|cuda|nccl|nvlsm|nvsdm)|linux-(image|headers|modules|generic|kbuild)|dkms$|firmware-nvidia"
    r"|(xserver-xorg-video-)?nouveau|datacenter-gpu-manager|doca-ofed|mlnx-ofed|unattended-upgrades$"
)
LIBRARIES = ("libcuda", "libnvidia-ml")
LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib64",
    "usr/local/nvidia/lib64",
)
SERVICES = (
    "nvidia-persistenced",
    "nvidia-fabricmanager",
    "nvidia-imex",
    "nvidia-nvlsm",
    "nvidia-dcgm",
    "chrony",
    "chronyd",
    "systemd-timesyncd",
    "unattended-upgrades",
)
SERVING = ("vllm@*.service", "ray-head.service", "ray-worker.service")
KERNEL_EVENTS = (
    # NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
    ("xid", re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")),
    # nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error
    ("sxid", re.compile(r"nvidia-nvswitch\d*: SXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")),
    ("mismatch", re.compile(r"NVRM: ()()(API mismatch.*)")),
    ("init", re.compile(r"NVRM: (?:GPU )?([0-9a-fA-F:.]*?):? ?()(RmInitAdapter failed.*)")),
    (
        "unsigned",
        re.compile(
            r"(?i)()()(.*loading of (?:unsigned )?module.* is rejected.*|.*unsigned module loading is restricted.*)"
        ),
    ),
)
KERNEL_EVENTS_KEPT = 100
# Below this, memory in use is the driver's own.
HELD_MIB = 1024
SCOPES = {0: "global", 200: "site", 253: "link", 254: "host"}

# Netlink and interface constants (linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h)
RTM_NEWLINK = 16
RTM_GETLINK = 18
RTM_NEWADDR = 20
RTM_GETADDR = 22
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


def execute(command, timeout):
    """(standard output, None) of a program, or (None, what went wrong).  Returns in time whatever the program does."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(os.environ, LC_ALL="C"),
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        return None, str(error)
    try:
        output, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        # Not waited for: a process that hangs inside a driver does not die of this.
        child.kill()
        return None, str(error)
    # nvidia-smi tells its errors on standard output
    return (output, None) if child.returncode == 0 else (None, (output + errors).strip())


def together(functions):
    """The results of functions (by name) that run at the same time."""
    results = {}
    workers = [
        threading.Thread(target=lambda name=name, function=function: results.update({name: function()}), daemon=True)
        for name, function in functions.items()
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


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


def first_processor(root):
    """The first processor's part of /proc/cpuinfo: on large hosts the rest takes long."""
    first = {}
    with open(f"{root}/proc/cpuinfo", encoding="utf-8", errors="replace") as handle:
        for line in handle:
            key, separator, value = line.partition(":")
            if not separator and first:
                break
            first[key.strip()] = value.strip()
    return first


def cpu_facts(root):
    first = first_processor(root)
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


def gpu_facts(root, program, timeout, kept=None):
    """GPUs, what goes for all of them, and warnings.  What nvidia-smi said goes to the dict kept, if there is one."""
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
        return execute([tool, *arguments], timeout)

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
        gpu["bridges"] = bridges_above(f"{root}/sys/bus/pci/devices/{gpu['pci']}")
        gpu.setdefault("compute_capability", None)
    if gpus:
        if kept is None:
            text, error = ask("-q", "-d", "COMPUTE")
            found = re.search(r"CUDA Version\s*:\s*(\d[\d.]*)", text or "")
        else:
            kept.update(together({key: lambda key=key: ask(*DETAILS[key]) for key in DETAILS}))
            for key, question in DETAILS.items():
                if kept[key][0] is None:
                    warnings.append(f"nvidia-smi {' '.join(question)}: {' '.join(kept[key][1].split())[:200]}")
            found = re.search(r"<cuda_version>(\d[\d.]*)", kept["xml"][0] or "")
        about["cuda_version"] = found.group(1) if found else None
    if len(gpus) > 1:
        text, error = ask("topo", "-m")
        about["topology"] = parse_topology(text or "")
        if kept is not None:
            kept["topology"] = (text, error)
        if about["topology"] is None:
            warnings.append(f"nvidia-smi topo -m: {' '.join((error or 'no matrix in its answer').split())[:200]}")
    return gpus, about, warnings


# --- network ---------------------------------------------------------------------------------------------------------


def netlink_dump(kind):
    """All messages the kernel answers to one dump request: (type, payload)."""
    return netlink.ask(kind, struct.pack("=BxHiII", socket.AF_UNSPEC, 0, 0, 0, 0), netlink.NLM_F_DUMP)


def netlink_links():
    links = {}
    for answer, payload in netlink_dump(RTM_GETLINK):
        if answer != RTM_NEWLINK:
            continue
        _, hardware, index, flags, _ = struct.unpack_from("=BxHiII", payload)
        found = netlink.attributes(payload[16:])
        number = {key: struct.unpack("=I", found[key])[0] for key in (IFLA_MTU, IFLA_MASTER) if key in found}
        info = netlink.attributes(found.get(IFLA_LINKINFO, b""))
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
        found = netlink.attributes(payload[8:])
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
                "bridges": bridges_above(f"{folder}/device"),
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


# --- driver and kernels ----------------------------------------------------------------------------------------------


def nvidia_functions(root):
    found = []
    for path in sorted(glob.glob(f"{root}/sys/bus/pci/devices/*")):
        if read(f"{path}/vendor") == "0x10de":
            found.append(
                {
                    "address": os.path.basename(path),
                    "device": read(f"{path}/device"),
                    "subsystem": f"{read(f'{path}/subsystem_vendor')}:{read(f'{path}/subsystem_device')}",
                    "class": read(f"{path}/class", ""),
                    "driver": link_name(f"{path}/driver"),
                }
            )
    return found


def driver_facts(root):
    text = read(f"{root}/proc/driver/nvidia/version", "")
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", text)
    libraries = {}
    for name in LIBRARIES:
        for folder in LIBRARY_FOLDERS:
            # The link that programs follow: files of an older version may lie beside it.
            target = os.path.basename(os.path.realpath(f"{root}/{folder}/{name}.so.1"))
            match = re.fullmatch(re.escape(name) + r"\.so\.(\d+\.[\d.]+)", target)
            if match:
                libraries.setdefault(name, match.group(1))
    # What is built into the kernel has no such file.
    loaded = [path.split("/")[-2] for path in glob.glob(f"{root}/sys/module/*/initstate")]
    return {
        "loaded": version.group(1) if version else read(f"{root}/sys/module/nvidia/version"),
        "flavour": ("open" if "Open Kernel Module" in text else "proprietary") if text else None,
        "library": libraries.get("libnvidia-ml") or libraries.get("libcuda"),
        "libraries": libraries,
        "modules": sorted(name for name in loaded if re.match(r"nvidia|nouveau|nova_core", name)),
        "runfile": os.path.exists(f"{root}/usr/bin/nvidia-uninstall"),
    }


def version_key(text):
    """6.8.0-100 comes after 6.8.0-99."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|[a-z]+", text)]


def installed_kernels(root):
    kernels = []
    for path in glob.glob(f"{root}/lib/modules/*"):
        release = os.path.basename(path)
        images = (f"{root}/boot/vmlinuz-{release}", f"{root}/boot/vmlinux-{release}", f"{path}/vmlinuz")
        if any(os.path.exists(image) for image in images):
            module = re.search(r"(?m)^(\S*\bnvidia(?:-current)?\.ko\S*):", read(f"{path}/modules.dep", ""))
            headers = os.path.isdir(f"{path}/build")
            found = module.group(1) if module else None
            kernels.append({"release": release, "headers": headers, "nvidia_module": found})
    return sorted(kernels, key=lambda kernel: version_key(kernel["release"]))


def dkms_facts(root):
    """What `dkms status` tells, from the folders that it looks at."""
    found = []
    tree = f"{root}/var/lib/dkms"
    for source in sorted(glob.glob(f"{tree}/*/*/source")):
        folder = os.path.dirname(source)
        version, module = os.path.basename(folder), os.path.basename(os.path.dirname(folder))
        built = sorted(glob.glob(f"{folder}/*/*/module"))
        for path in built:
            kernel, machine = path.split("/")[-3:-1]
            installed = os.path.islink(f"{tree}/{module}/kernel-{kernel}-{machine}")
            state = "installed" if installed else "built"
            found.append({"module": module, "version": version, "kernel": kernel, "state": state})
        # A build that fails leaves its log here, under the name of the kernel that it was for.
        failed = re.search(r"for kernel:? (\S+)", (read(f"{folder}/build/make.log") or "")[:500])
        if failed:
            found.append({"module": module, "version": version, "kernel": failed.group(1), "state": "failed"})
        if not built and not failed:
            found.append({"module": module, "version": version, "kernel": None, "state": "added"})
    return found


def secure_boot(root):
    if not os.path.isdir(f"{root}/sys/firmware/efi"):
        return False
    for path in glob.glob(f"{root}/sys/firmware/efi/efivars/SecureBoot-*"):
        with open(path, "rb") as handle:
            return handle.read()[-1:] == b"\1"
    return None


def package_facts(root, timeout):
    """dpkg's packages of drivers, CUDA and kernels; none where there is no dpkg."""
    if not os.path.exists(f"{root}/var/lib/dpkg/status"):
        return []
    form = "${db:Status-Abbrev}\t${Package}\t${Version}\n"
    text, error = execute(["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f", form], timeout)
    if text is None:
        raise OSError(error)
    found = {}
    for line in text.splitlines():
        state, name, version = line.split("\t")
        # Known to dpkg, but not on disk (un, pn); rc stays, since its files in /etc do.
        if PACKAGES.match(name) and state[1] != "n":
            hold = state[0] == "h"
            found[name] = {"name": name, "version": version, "state": state.strip(), "hold": hold}
    return [found[name] for name in sorted(found)]


def serving(root, timeout):
    """Engines and Ray nodes that run, start or stop now."""
    if not os.path.isdir(f"{root}/run/systemd/system"):
        return []
    states = "--state=active,activating,reloading,deactivating"
    command = ["systemctl", "list-units", "--plain", "--no-legend", "--no-pager", states, *SERVING]
    text, error = execute(command, timeout)
    if text is None:
        raise OSError(error)
    return sorted(line.split()[0] for line in text.splitlines() if line.strip())


# --- health: GPUs ----------------------------------------------------------------------------------------------------


def number(text):
    """143771 MiB, 16x, 700.00 W -> the number; N/A -> null."""
    match = re.match(r"-?\d+(\.\d+)?", text or "")
    if not match:
        return None
    return float(match.group()) if match.group(1) else int(match.group())


def yes(text):
    return {"yes": True, "no": False}.get((text or "").lower())


def parse_details(root, text):
    """nvidia-smi -q -x, GPU by GPU.  What a driver does not tell, or tells as N/A, is null."""
    if not text:
        return []
    gpus = []
    # Warnings ("infoROM is corrupted at gpu 0000:07:00.0") stand on the same output, after the end of the document.
    document = text[text.find("<") : text.rfind(">") + 1]
    for item in xml.etree.ElementTree.fromstring(document).iter("gpu"):  # noqa: S314 - by the host's own nvidia-smi

        def tell(path, item=item):
            found = (item.findtext(path) or "").strip()
            return None if found in ("", "N/A", "[N/A]", "Requested functionality has been deprecated") else found

        def count(path, tell=tell):
            return number(tell(path))

        # The names of these elements changed with driver 550.
        reasons = [
            reason.tag.replace("clocks_event_reason_", "").replace("clocks_throttle_reason_", "")
            for name in ("clocks_event_reasons", "clocks_throttle_reasons")
            for reason in item.findall(f"{name}/*")
            if (reason.text or "").strip() == "Active"
        ]
        uncorrectable = [
            count(f"ecc_errors/volatile/{name}")
            for name in (
                "sram_uncorrectable",
                "sram_uncorrectable_parity",
                "sram_uncorrectable_secded",
                "dram_uncorrectable",
            )
        ]
        processes = [
            {
                "pid": number(process.findtext("pid")),
                "name": os.path.basename((process.findtext("process_name") or "").split(" ")[0]) or None,
                "used_mib": number(process.findtext("used_memory")),
                **process_owner(root, number(process.findtext("pid"))),
            }
            for process in item.findall("processes/process_info")
        ]
        gpus.append(
            {
                "index": len(gpus),
                "pci": re.sub(r"^[0-9a-f]{4}([0-9a-f]{4}:)", r"\1", item.get("id", "").lower()),
                "name": tell("product_name"),
                "vbios": tell("vbios_version"),
                "gsp_firmware": tell("gsp_firmware_version"),
                "virtualization": tell("gpu_virtualization_mode/virtualization_mode"),
                "persistence": enabled(tell("persistence_mode") or ""),
                "mig": enabled(tell("mig_mode/current_mig") or ""),
                "mig_pending": enabled(tell("mig_mode/pending_mig") or ""),
                "compute_mode": tell("compute_mode"),
                "recovery_action": tell("gpu_recovery_action"),
                "fabric_state": tell("fabric/state"),
                "fabric_status": tell("fabric/status"),
                "fabric_health": {
                    part.tag: part.text.strip()
                    for part in item.findall("fabric/health/*")
                    if (part.text or "N/A").strip() != "N/A"
                },
                "generation": count("pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
                "generation_max": count("pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
                "generation_device_max": count("pci/pci_gpu_link_info/pcie_gen/max_device_link_gen"),
                "width": count("pci/pci_gpu_link_info/link_widths/current_link_width"),
                "width_max": count("pci/pci_gpu_link_info/link_widths/max_link_width"),
                "performance_state": tell("performance_state"),
                "throttle": sorted(set(reasons)),
                "memory_total_mib": count("fb_memory_usage/total"),
                "memory_used_mib": count("fb_memory_usage/used"),
                "memory_free_mib": count("fb_memory_usage/free"),
                "ecc": enabled(tell("ecc_mode/current_ecc") or ""),
                "ecc_pending": enabled(tell("ecc_mode/pending_ecc") or ""),
                "ecc_uncorrectable": sum(value for value in uncorrectable if value)
                if any(value is not None for value in uncorrectable)
                else None,
                "sram_threshold_exceeded": yes(tell("ecc_errors/aggregate/sram_threshold_exceeded")),
                "repair_pending": any(
                    yes(tell(f"ecc_errors/{name}")) for name in ("channel_repair_pending", "tpc_repair_pending")
                ),
                "unrepairable_memory": yes(tell("ecc_errors/unrepairable_memory")),
                "remap_pending": yes(tell("remapped_rows/remapped_row_pending")),
                "remap_failure": yes(tell("remapped_rows/remapped_row_failure")),
                "remapped_uncorrectable": count("remapped_rows/remapped_row_unc"),
                "retirement_pending": yes(tell("retired_pages/pending_retirement")),
                "power_limit_w": count("gpu_power_readings/current_power_limit"),
                "power_default_w": count("gpu_power_readings/default_power_limit"),
                "processes": processes,
                # Hung, or of another PID namespace: processes that nvidia-smi does not list.
                "holders": holders(root, tell("minor_number"))
                if not processes and (count("fb_memory_usage/used") or 0) >= HELD_MIB
                else [],
            }
        )
    return gpus


def process_owner(root, pid):
    """User and systemd unit of a process: who to ask.  Not its command line, which can hold secrets."""
    groups = read(f"{root}/proc/{pid}/cgroup", "")
    units = re.findall(r"/([^/\n]+\.(?:service|scope))", groups)
    user = None
    try:
        uid = os.stat(f"{root}/proc/{pid}").st_uid
        user = pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        pass  # it ended meanwhile, or its user is unknown here
    return {"unit": units[-1] if units else None, "user": user}


def holders(root, minor):
    """Processes that have the GPU's device node open; minor is a regular expression."""
    found = []
    for path in glob.glob(f"{root}/proc/[0-9]*/fd/*"):
        try:
            if not re.fullmatch(f"/dev/nvidia{minor}", os.readlink(path)):
                continue
        except OSError:
            continue
        pid = int(path.split("/")[-3])
        if pid not in [process["pid"] for process in found]:
            name = read(f"{root}/proc/{pid}/comm")
            found.append({"pid": pid, "name": name, "used_mib": None, **process_owner(root, pid)})
    return found


def parse_nvlink(text):
    """nvidia-smi nvlink -s -> for each GPU its number of links and those that are inactive."""
    gpus = []
    for line in text.splitlines():
        link = re.match(r"\s+Link (\d+): (\S+)", line)
        if re.match(r"GPU \d+:", line):
            gpus.append({"gpu": int(line.split()[1].rstrip(":")), "links": 0, "inactive": [], "gbyte_s": None})
        elif link and gpus:
            gpus[-1]["links"] += 1
            if "inactive" in link.group(2).lower():
                gpus[-1]["inactive"].append(int(link.group(1)))
            else:
                gpus[-1]["gbyte_s"] = number(link.group(2))
        elif gpus and "all links are inactive" in line.lower():
            gpus[-1]["inactive"] = ["all"]
    return gpus


def parse_matrix(text):
    """Rows of a matrix of nvidia-smi topo, GPUs only."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s+(?!GPU)\S", line)]
    return [row[1 : 1 + len(rows)] for row in rows]


def acs_control(root, address):
    """Control register of a bridge's Access Control Services; null without them, or where they cannot be read."""
    try:
        with open(f"{root}/sys/bus/pci/devices/{address}/config", "rb") as handle:
            config = handle.read(4096)
    except OSError:
        return None
    place, steps = 0x100, 0
    # Extended capabilities: a list that root alone gets to see.
    while 0x100 <= place <= len(config) - 8 and steps < 100:
        header = struct.unpack_from("<I", config, place)[0]
        if header & 0xFFFF == 0x000D:
            return struct.unpack_from("<H", config, place + 6)[0]
        place, steps = header >> 20, steps + 1
    return None


def bridges_above(folder):
    """Addresses of the PCI bridges above a device, from the root port down."""
    return re.findall(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", os.path.realpath(folder))[:-1]


def pci_link(root, address):
    """Link of a GPU, the slot it is in, the bridges above it and what the IOMMU does with it."""
    folder = f"{root}/sys/bus/pci/devices/{address}"
    chain = bridges_above(folder)
    slot = f"{root}/sys/bus/pci/devices/{chain[-1]}" if chain else None
    acs = {bridge: acs_control(root, bridge) for bridge in chain}
    return {
        "pci": address,
        "width": read_int(f"{folder}/current_link_width"),
        "width_max": read_int(f"{folder}/max_link_width"),
        "slot_width_max": read_int(f"{slot}/max_link_width") if slot else None,
        "bridges": chain,
        "acs": {bridge: control for bridge, control in acs.items() if control is not None},
        "iommu": read(f"{folder}/iommu_group/type"),
    }


# --- health: kernel log, services, versions --------------------------------------------------------------------------


def kernel_log_lines(root, timeout):
    """(source, complete, [(seconds since boot, message)]) of this boot."""
    records, complete = [], True
    try:
        handle = os.open(f"{root}/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        handle = None
    if handle is not None:
        chunks, limit = [], time.monotonic() + timeout
        try:
            while time.monotonic() < limit:
                try:
                    chunk = os.read(handle, 16384)
                except BrokenPipeError:
                    continue  # this record was overwritten meanwhile; the next read goes on after it
                except OSError:
                    break  # EAGAIN: the end
                if not chunk:
                    break
                chunks.append(chunk)
        finally:
            os.close(handle)
        first = None
        for line in b"".join(chunks).decode("utf-8", "replace").splitlines():
            head, separator, message = line.partition(";")
            fields = head.split(",")
            if separator and len(fields) >= 3 and fields[1].isdigit() and fields[2].isdigit():
                first = int(fields[1]) if first is None else first
                records.append((int(fields[2]) / 1e6, message))
        complete = not first
        if records and complete:
            return "kmsg", True, records
    # The kernel's buffer is a ring: where its beginning is lost, the journal may still have it.
    command = ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q", "--grep", "NVRM|SXid|module"]
    text, _ = execute(command, timeout) if not root else (None, None)
    if text:
        found = [re.match(r"\[\s*(\d+\.\d+)\] \S+ kernel: (.*)", line) for line in text.splitlines()]
        return "journal", True, [(float(match.group(1)), match.group(2)) for match in found if match]
    return ("kmsg" if records else None), complete, records


def kernel_log(root, timeout):
    source, complete, records = kernel_log_lines(root, timeout)
    uptime = float(read(f"{root}/proc/uptime", "0").split()[0])
    events = []
    for seconds, message in records:
        for kind, pattern in KERNEL_EVENTS:
            match = pattern.match(message)
            if match:
                device, code, text = match.groups()
                events.append(
                    {
                        "kind": kind,
                        "code": int(code) if code else None,
                        "device": device.lower() or None,
                        "seconds_ago": max(0, int(uptime - seconds)),
                        "text": text.strip()[:200],
                    }
                )
    return {"source": source, "complete": complete, "events": events[-KERNEL_EVENTS_KEPT:]}


def service_facts(root, timeout):
    if not os.path.isdir(f"{root}/run/systemd/system"):
        return {}
    properties = "Id,LoadState,ActiveState,SubState,UnitFileState"
    command = ["systemctl", "show", "--no-pager", "-p", properties, *(f"{name}.service" for name in SERVICES)]
    text, error = execute(command, timeout)
    if text is None:
        raise OSError(error)
    found = {}
    for block in text.strip().split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if values.get("LoadState") not in (None, "not-found"):
            found[values["Id"][: -len(".service")]] = {
                "active": values.get("ActiveState"),
                "sub": values.get("SubState"),
                "enabled": values.get("UnitFileState") or None,
            }
    return found


def fabric_manager_version(root, packages, timeout):
    for package in packages:
        # nvidia-fabricmanager-580 580.95.05-1, nvidia-fabricmanager 580.95.05-1
        if re.fullmatch(r"nvidia-fabricmanager(-\d+)?", package["name"]) and package["state"].endswith("i"):
            return re.split(r"[-+~]", package["version"].split(":")[-1])[0]
    program = f"{root}/usr/bin/nv-fabricmanager"
    text, _ = execute([program, "--version"], timeout) if os.path.exists(program) else (None, None)
    found = re.search(r"(\d+\.\d+(\.\d+)?)", text or "")
    return found.group(1) if found else None


def device_nodes(root):
    found = []
    for path in sorted(glob.glob(f"{root}/dev/nvidia*")):
        info = os.stat(path)
        if stat.S_ISCHR(info.st_mode):
            found.append({"name": os.path.basename(path), "mode": f"{stat.S_IMODE(info.st_mode):04o}"})
    return found


def settings(root, name):
    """key -> value of a file of systemd's with its drop-ins, the later ones winning."""
    values = {}
    drop_ins = {}
    for folder in ("usr/lib/systemd", "run/systemd", "etc/systemd"):
        for path in glob.glob(f"{root}/{folder}/{name}.d/*.conf"):
            drop_ins[os.path.basename(path)] = path
    for path in (f"{root}/etc/systemd/{name}", *(drop_ins[key] for key in sorted(drop_ins))):
        for line in read(path, "").splitlines():
            key, separator, value = line.partition("=")
            if separator and not line.lstrip().startswith(("#", ";")):
                values[key.strip()] = value.strip()
    return values


def remove_ipc(root):
    return settings(root, "logind.conf").get("RemoveIPC", "yes").lower() in ("yes", "true", "1", "on")


def time_servers():
    """What chrony thinks of its servers; null where it does not run."""
    text, _ = execute(["chronyc", "-c", "-n", "sources"], 5)
    rows = [line.split(",") for line in (text or "").splitlines()]
    # mode, state, name, stratum, poll, reach (octal: a bit for each of the last eight requests)
    return (
        None if text is None else [{"name": row[2], "state": row[1], "reach": row[5]} for row in rows if len(row) > 5]
    )


def clock_facts(root, offset):
    """Whether the kernel counts its clock as synchronised, what by, and how far the hardware's clock is off."""
    buffer = ctypes.create_string_buffer(512)
    # With no field to set (the first word is 0) it only reads; struct timex of a 64-bit kernel.
    state = ctypes.CDLL(None).adjtimex(buffer) if struct.calcsize("P") == 8 else -1
    status = struct.unpack_from("i", buffer, 40)[0]
    hardware = read_int(f"{root}/sys/class/rtc/rtc0/since_epoch")
    local = read(f"{root}/etc/adjtime", "").splitlines()[2:3] == ["LOCAL"]
    return {
        "synchronised": None if state < 0 else not status & 0x40,
        "offset_seconds": offset,
        "hardware_offset_seconds": None if hardware is None or local else hardware - int(time.time()),
        "hardware_local": local,
        "servers": time_servers(),
    }


def node_environment(root):
    """Addresses and interfaces that Ray and the engines are started with; null where they were never written."""
    text = read(f"{root}/etc/ironrack/node.env", None)
    if text is None:
        return None
    pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    names = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: pairs[name].strip("\"'") for name in names if name in pairs}


def swap_used_mib(root):
    text = read(f"{root}/proc/meminfo", "")
    total, free = (re.search(rf"(?m)^{key}:\s+(\d+)", text) for key in ("SwapTotal", "SwapFree"))
    return (int(total.group(1)) - int(free.group(1))) // 1024 if total and free else 0


def reboot_required(root):
    for path in ("run/reboot-required", "var/run/reboot-required"):
        if os.path.exists(f"{root}/{path}"):
            return sorted(set(read(f"{root}/{path}.pkgs", "").split()))
    return None


def boot_time(root):
    """Wall clock at which process 1 began: of a container that is the container's start, not the machine's."""
    ticks = int(read(f"{root}/proc/1/stat").rpartition(")")[2].split()[19])
    uptime = float(read(f"{root}/proc/uptime").split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def boot_loader(root):
    """(kernel, options) of GRUB's first entry; nothing where another entry or another loader may be the one."""
    text = read(f"{root}/boot/grub/grub.cfg", "")
    line = re.search(r"(?m)^\s*linux\S*\s+\S*/vmlinuz-(\S+)(.*)$", text)
    if not line or not re.search(r'(?m)^\s*set default="0"\s*$', text):
        return None, None
    return line.group(1), [word for word in line.group(2).split() if KERNEL_OPTIONS.match(word)]


def boot_facts(root, kernels):
    """What the next boot will use, and what was changed since this one for modules that may be loaded."""
    # The time of the inode: dpkg gives a file the time at which its package was built.
    changed = {
        path[len(root) :]: os.stat(path).st_ctime
        for path in sorted(glob.glob(f"{root}/etc/modprobe.d/*.conf"))
        if os.path.exists(path)
    }
    words = {path: re.sub(r"(?m)^\s*#.*$", "", read(f"{root}{path}", "")) for path in changed}
    nouveau = max([changed[path] for path in changed if "nouveau" in words[path]], default=0)
    images = {kernel["release"]: f"{root}/boot/initrd.img-{kernel['release']}" for kernel in kernels}
    since = boot_time(root)
    kernel, options = boot_loader(root)
    return {
        "kernel": kernel,
        "options": options,
        "modprobe": [path for path in changed if changed[path] > since and re.search("nvidia|nouveau", words[path])],
        "initramfs_older": [
            release for release, image in images.items() if os.path.exists(image) and os.stat(image).st_mtime < nouveau
        ],
    }


def unmounted(root):
    """Lines of fstab for the boot that are not mounted."""
    mounted = [point for _, point, _, _ in mounts(root)]
    missing = []
    for line in read(f"{root}/etc/fstab", "").splitlines():
        fields = line.split()
        if len(fields) < 4 or line.lstrip().startswith("#") or not fields[1].startswith("/"):
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), fields[1])
        lazy = {"noauto", "x-systemd.automount"} & set(fields[3].split(","))
        if not lazy and (point.rstrip("/") or "/") not in mounted:
            missing.append(point)
    return missing


def unattended_upgrades(root):
    texts = [
        re.sub(r"(?m)^\s*(//|#(?!clear)).*$", "", read(path, ""))
        for path in sorted(glob.glob(f"{root}/etc/apt/apt.conf.d/*"))
    ]
    text = "\n".join(texts)
    on = re.findall(r'APT::Periodic::Unattended-Upgrade\s+"(\w+)"', text)
    lists = re.findall(r"Unattended-Upgrade::Package-Blacklist\s*\{(.*?)\}", text, re.DOTALL)
    return {
        "enabled": bool(on) and on[-1] not in ("0", "false", "no"),
        "blacklist": [entry for block in lists for entry in re.findall(r'"([^"]+)"', block)],
    }


# --- health: runtime and network -------------------------------------------------------------------------------------


def needed_libraries(path):
    """DT_NEEDED of a 64-bit little-endian ELF file: the libraries it asks the loader for."""
    with open(path, "rb") as handle:
        head = handle.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            return []
        offset, size, count = (
            struct.unpack_from(form, head, at)[0] for form, at in (("<Q", 32), ("<H", 54), ("<H", 56))
        )
        handle.seek(offset)
        table = handle.read(size * count)
        segments = [struct.unpack_from("<IIQQQQ", table, size * number) for number in range(count)]

        def load(address, length):
            for kind, _, place, virtual, _, filled in segments:
                if kind == 1 and virtual <= address < virtual + filled:
                    handle.seek(place + address - virtual)
                    return handle.read(length)
            return b""

        needed, strings = [], None
        for kind, _, place, _, _, filled in segments:
            if kind == 2:
                handle.seek(place)
                entries = struct.iter_unpack("<QQ", handle.read(filled - filled % 16))
                for tag, value in entries:
                    if tag == 1:
                        needed.append(value)
                    elif tag == 5:
                        strings = value
        if strings is None:
            return []
        return [load(strings + value, 256).split(b"\0")[0].decode("ascii", "replace") for value in needed]


def release_facts(folder):
    """The runtime in use, without starting its Python."""
    if not os.path.isdir(folder):
        return None
    try:
        marker = json.loads(read(f"{folder}/release.json", "{}"))
    except ValueError:
        marker = {}
    found = {"id": marker.get("id"), "variant": marker.get("variant"), "torch_cuda": None, "extension_cuda": []}
    for path in glob.glob(f"{folder}/lib/python3*/site-packages/torch/version.py"):
        match = re.search(r"(?m)^cuda\b[^=]*=\s*['\"]([\d.]+)", read(path, ""))
        found["torch_cuda"] = match.group(1) if match else None
    for path in glob.glob(f"{folder}/lib/python3*/site-packages/vllm/_C*.so"):
        names = [re.fullmatch(r"libcudart\.so\.(\d+)", name) for name in needed_libraries(path)]
        found["extension_cuda"] += [int(name.group(1)) for name in names if name]
    return found


def toolchain_facts(root, release):
    """What Triton and FlashInfer need when they compile at run time."""
    folders = ["usr/bin", "usr/local/bin"]
    configured = read(f"{release}/pyvenv.cfg", "") if release else ""
    home = re.search(r"(?m)^home\s*=\s*(\S+)", configured)
    version = re.search(r"(?m)^version(?:_info)?\s*=\s*(\d+\.\d+)", configured)
    prefixes = [os.path.dirname(home.group(1)) if home else f"{root}/usr", release or f"{root}/usr"]
    wanted = f"python{version.group(1)}*" if version else "python3*"
    headers = [path for prefix in prefixes for path in glob.glob(f"{prefix}/include/{wanted}/Python.h")]
    nvcc = None
    if os.access(f"{root}/usr/local/cuda/bin/nvcc", os.X_OK):
        version = re.search(r"-(\d+\.\d+)$", os.path.realpath(f"{root}/usr/local/cuda"))
        nvcc = version.group(1) if version else None
    homes = []
    for path in (
        f"{root}/etc/environment",
        *glob.glob(f"{root}/etc/ironrack/*.env"),
        *glob.glob(f"{root}/etc/ironrack/vllm/*.env"),
    ):
        homes += re.findall(r"(?m)^(?:export )?CUDA_HOME=[\"']?([^\"'\n]*)", read(path, ""))
    return {
        "compiler": any(
            os.access(f"{root}/{folder}/{name}", os.X_OK) for folder in folders for name in ("gcc", "cc", "clang")
        ),
        "python_headers": bool(headers),
        "nvcc": nvcc,
        "ninja": os.access(f"{release}/bin/ninja", os.X_OK) if release else None,
        "cuda_home": [{"value": value, "folder": os.path.isdir(value)} for value in sorted(set(homes))],
    }


def file_system_types(root, paths):
    """Type of the file system that each path is, or will be, on."""
    table = [(point, kind) for _, point, kind, _ in mounts(root)]
    found = {}
    for path in paths:
        fitting = [entry for entry in table if path == entry[0] or path.startswith(entry[0].rstrip("/") + "/")]
        if fitting:
            # The later one of two on the same point hides the earlier.
            longest = max(len(point) for point, _ in fitting)
            found[path] = [kind for point, kind in fitting if len(point) == longest][-1]
    return found


def link_downed(root):
    """How often each RDMA port went down since its counters were cleared."""
    found = []
    for path in sorted(glob.glob(f"{root}/sys/class/infiniband/*/ports/*/counters/link_downed")):
        device, port = path.split("/")[-5], path.split("/")[-3]
        found.append({"device": device, "port": int(port), "count": read_int(path)})
    return found


def gather(paths=(), nvidia_smi="nvidia-smi", timeout=20, *, root="", health=False, release="", controller_time=0.0):
    """The whole fact.  root is where /proc and /sys are looked for: tests give it a tree of their own."""
    # At once: what follows takes its time.
    offset = time.time() - controller_time if controller_time else None
    warnings = []

    def guarded(name, function, default):
        try:
            return function()
        except Exception as error:  # whatever a host holds ready, the rest must still be told
            warnings.append(f"{name}: {type(error).__name__}: {error}")
            return default

    about = {"driver_version": None, "cuda_version": None, "topology": None, "pci_devices": [], "error": None}
    kept = {} if health else None
    gpus, nvidia, gpu_warnings = guarded("gpus", lambda: gpu_facts(root, nvidia_smi, timeout, kept), ([], about, []))
    warnings += gpu_warnings
    rdma = guarded("rdma", lambda: rdma_facts(root), [])
    functions = guarded("nvidia_functions", lambda: nvidia_functions(root), [])
    packages = guarded("packages", lambda: package_facts(root, timeout), [])
    facts = {
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
        "nvidia_functions": functions,
        "nvidia_driver": guarded("nvidia_driver", lambda: driver_facts(root), {}),
        "kernels": guarded("kernels", lambda: installed_kernels(root), []),
        "dkms": guarded("dkms", lambda: dkms_facts(root), []),
        "secure_boot": guarded("secure_boot", lambda: secure_boot(root), None),
        "packages": packages,
        "serving": guarded("serving", lambda: serving(root, timeout), None),
        "warnings": warnings,
    }
    if health:
        addresses = [device["address"] for device in functions if device["class"].startswith("0x03")]
        details = guarded("nvidia-smi -q -x", lambda: parse_details(root, (kept.get("xml") or (None,))[0]), [])
        parts = {
            "gpus": (lambda: details, []),
            "nvlink": (lambda: parse_nvlink((kept.get("nvlink") or ("",))[0] or ""), []),
            "p2p": (lambda: parse_matrix((kept.get("p2p") or ("",))[0] or ""), []),
            "topology": (lambda: parse_matrix((kept.get("topology") or ("",))[0] or ""), []),
            "pci": (lambda: [pci_link(root, address) for address in addresses], []),
            "iommu_groups": (lambda: len(glob.glob(f"{root}/sys/kernel/iommu_groups/*")), 0),
            "virtual": (lambda: "hypervisor" in first_processor(root).get("flags", "").split(), False),
            "kernel_log": (lambda: kernel_log(root, timeout), {"source": None, "events": []}),
            "services": (lambda: service_facts(root, timeout), {}),
            "fabric_manager": (lambda: fabric_manager_version(root, packages, timeout), None),
            "device_nodes": (lambda: device_nodes(root), []),
            "remove_ipc": (lambda: remove_ipc(root), True),
            "clock": (lambda: clock_facts(root, offset), {}),
            "node_environment": (lambda: node_environment(root), None),
            "swap_used_mib": (lambda: swap_used_mib(root), 0),
            "reboot_required": (lambda: reboot_required(root), None),
            "boot": (lambda: boot_facts(root, facts["kernels"]), {}),
            "unmounted": (lambda: unmounted(root), []),
            # Where nvidia-smi cannot tell: after an update its library is newer than the module that runs.
            "gpu_users": (lambda: holders(root, r"\d+") if nvidia["error"] or (gpus and not details) else [], []),
            "unattended_upgrades": (lambda: unattended_upgrades(root), {}),
            "toolchain": (lambda: toolchain_facts(root, release), {}),
            "release": (lambda: release_facts(release) if release else None, None),
            "file_system_types": (lambda: file_system_types(root, paths), {}),
            "link_downed": (lambda: link_downed(root), []),
        }
        facts["health"] = {name: guarded(name, function, default) for name, (function, default) in parts.items()}
    # They quote programs, and end on a terminal.
    warnings[:] = ["".join(sign if sign.isprintable() else "?" for sign in warning) for warning in warnings]
    return facts


def main():
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "str", "default": []},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "timeout": {"type": "int", "default": 20},
            "inventory": {"type": "str", "default": ""},
            "health": {"type": "bool", "default": False},
            "release": {"type": "str", "default": ""},
            "controller_time": {"type": "float", "default": 0},
        },
        supports_check_mode=True,
    )
    asked = {key: value for key, value in module.params.items() if key != "inventory"}
    facts = gather(**asked)
    facts["inventory"] = module.params["inventory"]
    module.exit_json(changed=False, ansible_facts={"ironrack_host": facts})


if __name__ == "__main__":
    main()
