"""Checks of network links, limits, clock, disks, and of what compiles at run time."""

from __future__ import annotations

import re

from . import verify
from .judging import Check, Node, Verdict, failed, numbers, passed, registry, skipped, warned

CHECKS: list[Check] = []
check = registry(CHECKS)
GIB = 2**30
NOFILE = 1048576
HARDWARE_CLOCK_SECONDS = 60
SWAP_MIB = 1024
NEARLY_FULL = 0.05


@check("rdma_links", "E14")
def rdma_links(node: Node) -> Verdict:
    if not node.rdma:
        return skipped("no RDMA device")
    down = [f"{port['device']}/{port['port']}: {port['state']}" for port in node.rdma if port.get("state") != "ACTIVE"]
    counts = [
        f"{port['device']}/{port['port']} went down {port['count']} times"
        for port in node.health.get("link_downed") or []
        if (port.get("count") or 0) > 1
    ]
    if down or counts:
        return warned(
            "; ".join([*down, *counts][:8]),
            "every port active, and steady",
            "check cable and transceiver; a port that is not used needs no cable: name the used ones in fabric_hcas",
        )
    return passed(f"{len(node.rdma)} ports active")


@check("memlock", "F1", "F2", "F3", "F4")
def memlock(node: Node) -> Verdict:
    limits = node.facts.get("limits") or {}
    if "memlock" not in limits:
        return skipped("cannot be told")
    if limits["memlock"] is None:
        return passed("unlimited")
    return warned(
        f"{limits['memlock']} bytes for process 1",
        "unlimited, for RDMA and pinned memory",
        "in a container: raise its limit; on a host: DefaultLimitMEMLOCK=infinity in /etc/systemd/system.conf",
    )


@check("nofile")
def nofile(node: Node) -> Verdict:
    limits = node.facts.get("limits") or {}
    if "nofile" not in limits:
        return skipped("cannot be told")
    if limits["nofile"] is None or limits["nofile"] >= NOFILE:
        return passed(str(limits["nofile"] or "unlimited"))
    return warned(
        f"{limits['nofile']} for process 1",
        f"{NOFILE}: Ray opens files for each processor",
        "raise fs.nr_open, or in a container its limit",
    )


@check("remove_ipc")
def remove_ipc(node: Node) -> Verdict:
    if node.health.get("remove_ipc"):
        return warned(
            "logind removes shared memory at logout",
            "RemoveIPC=no",
            "run playbooks/host.yml, which writes /etc/systemd/logind.conf.d/ironrack.conf",
        )
    return passed("RemoveIPC=no")


@check("shm")
def shm(node: Node) -> Verdict:
    wanted = node.settings.min_free_gib.get("shm", 0)
    for entry in node.facts.get("filesystems") or []:
        if entry.get("mountpoint") != verify.SHM:
            continue
        measured = f"{entry['free_bytes'] / GIB:.1f} of {entry['size_bytes'] / GIB:.1f} GiB free"
        remedy = "remount it larger (size= of its line in /etc/fstab), or remove what killed programs left there"
        if entry["size_bytes"] < verify.SHM_MIN_BYTES:
            return failed(measured, f"{wanted:g} GiB free", remedy)
        if entry["free_bytes"] < wanted * GIB:
            return warned(measured, f"{wanted:g} GiB free", remedy)
        return passed(measured)
    return warned("not mounted", f"{wanted:g} GiB free", "mount a tmpfs on /dev/shm")


@check("disk_space", "I7")
def disk_space(node: Node) -> Verdict:
    site, paths = node.plan.get("site") or {}, node.facts.get("paths") or {}
    serving = bool((paths.get(site.get("current", "")) or {}).get("exists"))
    short: list[str] = []
    enough: list[str] = []
    for key, gib in node.settings.min_free_gib.items():
        path = site.get(key)
        free = (paths.get(path) or {}).get("free_bytes") if path else None
        if free is not None:
            text = f"{path} has {free / GIB:.1f} GiB free"
            (short if free < gib * GIB else enough).append(text + (f", {gib:g} wanted" if free < gib * GIB else ""))
    if short:
        result = warned if serving else failed
        return result("; ".join(short), "preflight_min_free_gib", "free some space, or lower preflight_min_free_gib")
    return passed("; ".join(enough)) if enough else skipped("nothing was measured")


@check("disk_full", "I8")
def disk_full(node: Node) -> Verdict:
    full = [
        f"{entry['mountpoint']} {100 - 100 * entry['free_bytes'] / entry['size_bytes']:.0f} %"
        for entry in node.facts.get("filesystems") or []
        if entry.get("size_bytes") and entry["free_bytes"] < NEARLY_FULL * entry["size_bytes"]
    ]
    if full:
        return warned(", ".join(full), "below 95 % (Ray stops placing work above it)", "free some space there")
    return passed("every file system below 95 %")


@check("models", "I1", "I2", "I3")
def models(node: Node) -> Verdict:
    problems = verify.model_problems(node.facts, node.plan, node.host)
    if problems:
        return warned(
            "; ".join(problems), "each model on each node of its instance", "copy it there before runtime.yml"
        )
    count = sum(1 for path in verify.model_paths(node.plan, node.host) if path.endswith("/config.json"))
    return passed(f"{count} models are there") if count else skipped("no model on this node")


@check("cache_filesystem", "I14")
def cache_filesystem(node: Node) -> Verdict:
    path = (node.plan.get("site") or {}).get("state_dir")
    kind = (node.health.get("file_system_types") or {}).get(path)
    if kind is None:
        return skipped("cannot be told")
    if re.match(r"nfs|cifs|smb|ceph|lustre|beegfs|gpfs|glusterfs|9p|fuse", kind):
        return warned(
            f"{path} is on {kind}", "a local file system for the compilers' caches", f"mount a local disk at {path}"
        )
    return passed(f"{path} is on {kind}")


@check("time_sync")
def time_sync(node: Node) -> Verdict:
    synchronised = (node.health.get("clock") or {}).get("synchronised")
    active = [name for name in ("chrony", "chronyd", "systemd-timesyncd") if node.service(name) == "active"]
    if synchronised is None:
        return skipped("cannot be told")
    if not synchronised:
        return warned(
            f"the kernel's clock is not synchronised ({', '.join(active) or 'no time service'} runs)",
            "synchronised",
            "set base_time_servers to servers that the node reaches, run playbooks/host.yml; chronyc tracking tells",
        )
    return passed(f"synchronised{' by ' + ', '.join(active) if active else ''}")


@check("time_servers")
def time_servers(node: Node) -> Verdict:
    """Seen before the clock moves: a server that is gone, or one that the others contradict."""
    servers = (node.health.get("clock") or {}).get("servers")
    if not servers:
        return skipped("chrony does not run here, or has no server")
    expected = "one that is followed, none that disagrees"
    remedy = (
        "set base_time_servers to servers that the node reaches and that agree, run playbooks/host.yml; chronyc sources"
        " tells more. Where addresses of the cluster have changed, host.yml has to run as well as network.yml"
    )
    liars = [str(server["name"]) for server in servers if server["state"] == "x"]
    if liars:
        return warned(f"{', '.join(liars)} disagrees with the others", expected, remedy)
    followed = [server for server in servers if server["state"] == "*"]
    if not followed:
        return warned(f"none of {', '.join(str(server['name']) for server in servers)} is followed", expected, remedy)
    # The last requests are the lowest bits.
    lost = [str(server["name"]) for server in followed if not int(str(server["reach"]), 8) & 0o7]
    if lost:
        return warned(f"{lost[0]} has not answered the last three requests", expected, remedy)
    return passed(f"follows {followed[0]['name']}")


@check("node_environment", "A11", "A12", "A13")
def node_environment(node: Node) -> Verdict:
    written = node.health.get("node_environment")
    planned = (node.plan.get("nodes") or {}).get(node.host) or {}
    if written is None or not planned.get("address"):
        return skipped("node.env is not written yet: playbooks/network.yml does")
    remedy = (
        f"run playbooks/network.yml --limit {node.host}, then playbooks/serve.yml: Ray and the engines read it at start"
    )
    wrong = []
    if written.get("VLLM_HOST_IP") not in (None, planned["address"]):
        wrong.append(f"VLLM_HOST_IP={written['VLLM_HOST_IP']}")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        interface = str(written.get(name) or "").lstrip("=")
        if planned.get("interface") and interface and interface != planned["interface"]:
            wrong.append(f"{name}={written[name]}")
    if wrong:
        expected = " on ".join(str(planned[key]) for key in ("address", "interface") if planned.get(key))
        return failed(f"node.env is of another plan: {', '.join(wrong)}", expected, remedy)
    return passed(f"node.env names {planned['address']}")


@check("hardware_clock")
def hardware_clock(node: Node) -> Verdict:
    clock = node.health.get("clock") or {}
    offset = clock.get("hardware_offset_seconds")
    if clock.get("hardware_local"):
        return warned("counts local time", "UTC", "timedatectl set-local-rtc 0")
    if offset is None:
        return skipped("none that can be read")
    if abs(offset) > HARDWARE_CLOCK_SECONDS:
        return warned(
            f"{offset:+d} s from the system's clock",
            f"within {HARDWARE_CLOCK_SECONDS} s",
            "hwclock --systohc; replace the board's battery if it comes back",
        )
    return passed(f"{offset:+d} s")


@check("swap")
def swap(node: Node) -> Verdict:
    used = node.health.get("swap_used_mib") or 0
    if used > SWAP_MIB:
        return warned(
            f"{used} MiB in use",
            f"below {SWAP_MIB} MiB",
            "find what needs the memory (smem, ps), then swapoff -a && swapon -a",
        )
    return passed(f"{used} MiB in use")


@check("hugepages")
def hugepages(node: Node) -> Verdict:
    memory = node.facts.get("memory") or {}
    reserved, total = (memory.get("hugepages") or 0) * 2, memory.get("total_mib") or 0
    if total and reserved > total / 4:
        return warned(
            f"{reserved} MiB of {total} MiB reserved (pages of 2 MiB)",
            "below a quarter: engines do not use them",
            "lower vm.nr_hugepages",
        )
    return passed(f"{reserved} MiB reserved")


# --- what compiles at run time ---------------------------------------------------------------------------------------


@check("compiler", "D26", needs="gpu")
def compiler(node: Node) -> Verdict:
    if (node.health.get("toolchain") or {}).get("compiler"):
        return passed("a C compiler is there")
    return warned("no C compiler", "gcc, for Triton's launchers", "run playbooks/host.yml (role base installs it)")


@check("python_headers", "D25", needs="gpu")
def python_headers(node: Node) -> Verdict:
    if (node.health.get("toolchain") or {}).get("python_headers"):
        return passed("Python.h is there")
    return warned(
        "no Python.h", "headers of the runtime's Python", "run playbooks/host.yml (role base installs python3-dev)"
    )


@check("nvcc", "I9", needs="gpu")
def nvcc(node: Node) -> Verdict:
    version, cuda = (node.health.get("toolchain") or {}).get("nvcc"), node.release.get("torch_cuda")
    if version is None:
        return skipped("not installed: only kernels that come ready-made can be used")
    if cuda and numbers(version)[0] != numbers(cuda)[0]:
        return warned(
            f"nvcc {version}, runtime for CUDA {cuda}",
            "one CUDA",
            f"install the toolkit for CUDA {cuda}, or remove the other: FlashInfer compiles with what it finds",
        )
    return passed(f"nvcc {version}")


@check("cuda_home", "I10")
def cuda_home(node: Node) -> Verdict:
    homes = (node.health.get("toolchain") or {}).get("cuda_home") or []
    wrong = [str(home["value"]) for home in homes if not home["folder"]]
    if wrong:
        return failed(
            f"CUDA_HOME={', '.join(wrong)}",
            "one folder that exists",
            "correct it in the environment of units and /etc/environment",
        )
    return passed(", ".join(str(home["value"]) for home in homes) or "not set")


@check("ninja", "I12", needs="gpu")
def ninja(node: Node) -> Verdict:
    if not node.release:
        return skipped("no runtime is installed")
    if (node.health.get("toolchain") or {}).get("ninja"):
        return passed("in the runtime")
    return warned("not in the runtime's bin", "there, for kernels compiled at run time", "add ninja to the lock file")
