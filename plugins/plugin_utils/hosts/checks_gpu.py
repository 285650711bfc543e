"""Checks of the GPUs and of the way between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .judging import (
    ORDER,
    Check,
    Facts,
    Node,
    Verdict,
    consumer,
    data,
    failed,
    hours,
    on,
    passed,
    registry,
    skipped,
    warned,
)

CHECKS: list[Check] = []
check = registry(CHECKS)
OWN_UNIT = re.compile(r"(vllm@|vllm-|ray-)")
# Memory that a driver or a display uses without a program of anybody's.
HELD_MIB = 1024
HOLDS_SOME_MIB = 64
ACS_VALIDATES = 0x01
ACS_REDIRECTS = 0x0C


@check("ecc", "E9", "E10", needs="details")
def ecc(node: Node) -> Verdict:
    errors = node.those(lambda gpu: gpu.get("ecc_uncorrectable") or gpu.get("sram_threshold_exceeded"))
    dead = node.those(lambda gpu: gpu.get("unrepairable_memory"))
    off = node.those(lambda gpu: gpu.get("ecc") is False and not consumer(str(gpu.get("name"))))
    pending = node.those(lambda gpu: gpu.get("ecc") != gpu.get("ecc_pending") or gpu.get("repair_pending"))
    if dead or errors:
        counts = ", ".join(str(gpu.get("ecc_uncorrectable")) for gpu in errors)
        return failed(
            f"{on(dead)}: unrepairable memory" if dead else f"{on(errors)}: {counts} uncorrectable errors",
            "no uncorrectable memory error",
            "drain the node and reset the GPU; replace the GPU if it comes back",
        )
    if off:
        return warned(f"{on(off)}: ECC is off", "on", "nvidia-smi -e 1, then reset the GPU or reboot")
    if pending:
        return warned(f"{on(pending)}: a change or repair is pending", "none pending", "reset the GPU or reboot")
    return passed("no uncorrectable error")


@check("row_remap", "E10", needs="details")
def row_remap(node: Node) -> Verdict:
    lost = node.those(lambda gpu: gpu.get("remap_failure"))
    pending = node.those(lambda gpu: gpu.get("remap_pending") or gpu.get("retirement_pending"))
    if lost:
        return failed(f"{on(lost)}: a row could not be remapped", "no failure", "have the GPU replaced (RMA)")
    if pending:
        return failed(
            f"{on(pending)}: a remap is pending",
            "none pending",
            "drain the node and reset the GPU (nvidia-smi --gpu-reset -i N), so that the row is remapped",
        )
    return passed("none pending, none failed")


@check("recovery_action", "E9", "E11", needs="details")
def recovery_action(node: Node) -> Verdict:
    wanted = node.those(lambda gpu: gpu.get("recovery_action") not in (None, "None"))
    if wanted:
        return failed(
            f"{on(wanted)}: {wanted[0]['recovery_action']}",
            "None",
            "drain the node, then do what the driver asks for: reset the GPU, or reboot",
        )
    return passed("None")


@check("xid", "E9", "E10", "E11", "E12", "E13", needs="gpu")
def xid(node: Node) -> Verdict:
    log = node.health.get("kernel_log") or {}
    if not log.get("source"):
        return warned(
            "the kernel log cannot be read", "readable", "allow root to read /dev/kmsg or the journal on this host"
        )
    rows = {code: row for row in data()["xids"] for code in row["codes"]}
    worst = "pass"
    remedies: list[str] = []
    seen: dict[tuple[str, Any, str], list[float]] = {}
    for event in node.events("xid") + node.events("sxid"):
        seen.setdefault((event["kind"], event["code"], str(event["device"])), []).append(event["seconds_ago"])
    texts = []
    for (kind, code, device), ages in sorted(seen.items(), key=lambda item: min(item[1])):
        row = rows.get(code) if kind == "xid" else None
        status = row["status"] if row else "warn"
        # A reset leaves the line in the log: an old one is no longer proof.
        if min(ages) > node.settings.xid_hours * 3600:
            status = "warn" if status == "fail" else "pass"
        if status == "pass":
            continue
        worst = max(worst, status, key=ORDER.index)
        what = row["text"] if row else "see NVIDIA's list"
        times = f"{len(ages)} times, last " if len(ages) > 1 else ""
        texts.append(f"{'Xid' if kind == 'xid' else 'SXid'} {code} on {device}: {what} ({times}{hours(min(ages))})")
        remedy = row["remedy"] if row else "look it up in NVIDIA's Xid catalogue"
        if remedy not in remedies:
            remedies.append(remedy)
    if texts:
        return Verdict(worst, "; ".join(texts[:5]), "no Xid in the kernel log", "; ".join(remedies[:3]))
    rest = "" if log.get("complete") else " in what is left of the kernel's buffer"
    return passed(f"none{rest}")


@check("mig", needs="details")
def mig(node: Node) -> Verdict:
    sliced = node.those(lambda gpu: gpu.get("mig") or gpu.get("mig_pending"))
    if sliced:
        return failed(
            f"{on(sliced)}: MIG is on or pending",
            "off: engines use whole GPUs",
            f"nvidia-smi -i {','.join(str(gpu['index']) for gpu in sliced)} -mig 0, then reset the GPU",
        )
    return passed("off")


@check("compute_mode", needs="details")
def compute_mode(node: Node) -> Verdict:
    closed = node.those(lambda gpu: gpu.get("compute_mode") not in (None, "Default"))
    if closed:
        return failed(
            f"{on(closed)}: {closed[0]['compute_mode']}",
            "Default: several processes of an engine open each GPU",
            "nvidia-smi -c DEFAULT",
        )
    return passed("Default")


@check("gpu_memory", needs="details")
def gpu_memory(node: Node) -> Verdict:
    ours: set[str] = set()
    some: list[str] = []
    much: list[str] = []
    for gpu in node.gpus:
        processes = list(gpu.get("processes") or []) + list(gpu.get("holders") or [])
        for process in processes:
            unit = str(process.get("unit") or "")
            if OWN_UNIT.match(unit):
                ours.add(unit)
                continue
            used = process.get("used_mib") or gpu.get("memory_used_mib") or 0
            text = (
                f"GPU {gpu['index']}: {used} MiB by {process.get('name')} (pid {process.get('pid')},"
                f" {process.get('user') or 'unknown user'}{', ' + unit if unit else ''})"
            )
            (much if used >= HELD_MIB else some if used >= HOLDS_SOME_MIB else []).append(text)
        if not processes and (gpu.get("memory_used_mib") or 0) >= HELD_MIB:
            much.append(f"GPU {gpu['index']}: {gpu['memory_used_mib']} MiB by no process that can be seen")
    expected = "free, or in use by this project's units"
    remedy = "stop what holds it (fuser -v /dev/nvidia*), or take the GPU out of the inventory"
    if much:
        return failed("; ".join(much[:8]), expected, remedy + "; memory without a process needs a GPU reset or reboot")
    if some:
        return warned("; ".join(some[:8]), expected, remedy)
    if ours:
        return passed(f"in use by {', '.join(sorted(ours))}")
    free = [gpu["memory_free_mib"] for gpu in node.gpus if gpu.get("memory_free_mib") is not None]
    return passed(f"{min(free)} MiB free on each" if free else "nobody uses them")


@check("pcie_width", needs="details")
def pcie_width(node: Node) -> Verdict:
    links = {link["pci"]: link for link in node.health.get("pci") or []}
    low: list[str] = []
    narrow: list[str] = []
    for gpu in node.gpus:
        link = links.get(gpu.get("pci")) or {}
        now = link.get("width") or gpu.get("width")
        best = link.get("width_max") or gpu.get("width_max")
        slot = link.get("slot_width_max") or best
        if not now or not best:
            continue
        if now < min(best, slot):
            low.append(f"GPU {gpu['index']}: x{now} of x{min(best, slot)}")
        elif slot < best:
            narrow.append(f"GPU {gpu['index']}: x{best} in a slot of x{slot}")
    if low:
        return failed(
            ", ".join(low),
            "the full width of card and slot",
            "power off, reseat card and riser; check bifurcation in BIOS",
        )
    if narrow:
        return warned(", ".join(narrow), "a slot as wide as the card", "move the card to a full slot")
    return passed("full")


@check("pcie_generation", needs="details")
def pcie_generation(node: Node) -> Verdict:
    def pairs(low: str, high: str, gpus: Sequence[Facts]) -> list[str]:
        return [
            f"GPU {gpu['index']}: generation {gpu[low]} of {gpu[high]}"
            for gpu in gpus
            if gpu.get(low) and gpu.get(high) and gpu[low] < gpu[high]
        ]

    # An idle GPU lowers its link by itself.
    busy = node.those(
        lambda gpu: gpu.get("performance_state") == "P0" and "gpu_idle" not in (gpu.get("throttle") or [])
    )
    slow = pairs("generation_max", "generation_device_max", node.gpus) or pairs("generation", "generation_max", busy)
    if slow:
        return warned(
            ", ".join(slow),
            "the GPU's own generation",
            "set the slot's link speed to auto in BIOS; reseat card and riser",
        )
    return passed("as fast as the GPU, or lowered while idle")


@check("throttle", needs="details")
def throttle(node: Node) -> Verdict:
    hard = node.those(lambda gpu: any(reason.startswith("hw_") for reason in gpu.get("throttle") or []))
    soft = node.those(lambda gpu: "sw_thermal_slowdown" in (gpu.get("throttle") or []))
    if hard or soft:
        reasons = sorted({reason for gpu in hard or soft for reason in gpu["throttle"] if reason != "gpu_idle"})
        result = failed if hard else warned
        return result(
            f"{on(hard or soft)}: {', '.join(reasons)}", "no slowdown", "check cooling, power supplies and power cables"
        )
    return passed("none")


@check("power_limit", needs="details")
def power_limit(node: Node) -> Verdict:
    low = node.those(lambda gpu: (gpu.get("power_limit_w") or 0) < (gpu.get("power_default_w") or 0))
    if low:
        return warned(
            f"{on(low)}: {low[0].get('power_limit_w')} W of {low[0]['power_default_w']} W",
            "the default limit",
            "nvidia-smi -pl WATTS, if the limit was not set on purpose",
        )
    return passed("default")


@check("nvlink", "E11", "E12", needs="details")
def nvlink(node: Node) -> Verdict:
    gpus = [gpu for gpu in node.health.get("nvlink") or [] if gpu["links"] or gpu["inactive"]]
    if not gpus:
        return skipped("no NVLink")
    down = [gpu for gpu in gpus if gpu["inactive"]]
    if down:
        links = "; ".join(f"GPU {gpu['gpu']}: {', '.join(map(str, gpu['inactive']))}" for gpu in down)
        return failed(
            f"inactive links: {links}",
            "every link active",
            "see xid and fabric_state; drain the node and reset its GPUs or reboot;"
            " if they stay down, have the board checked",
        )
    counts = {gpu["links"] for gpu in gpus}
    if len(counts) > 1:
        return warned(
            ", ".join(f"GPU {gpu['gpu']}: {gpu['links']} links" for gpu in gpus), "as many on each", "check the bridges"
        )
    return passed(f"{max(counts)} links on each, all active")


def pair_kinds(matrix: Sequence[Sequence[str]]) -> list[str]:
    return [cell for number, row in enumerate(matrix) for other, cell in enumerate(row) if other != number]


@check("topology", needs="details")
def topology(node: Node) -> Verdict:
    kinds = Counter(pair_kinds(node.health.get("topology") or []))
    if not kinds:
        return skipped("fewer than two GPUs")
    measured = ", ".join(f"{count // 2} pairs {kind}" for kind, count in sorted(kinds.items()))
    if len(kinds) > 1 and any(kind.startswith("NV") for kind in kinds):
        return warned(
            measured,
            "every pair of GPUs linked alike",
            "keep tensor parallelism within the pairs that NVLink joins; check bridges and nvlink",
        )
    return passed(measured)


@check("p2p", "E1", "E6", "E7", "E8", needs="details")
def p2p(node: Node) -> Verdict:
    kinds = Counter(pair_kinds(node.health.get("p2p") or []))
    if not kinds:
        return skipped("fewer than two GPUs")
    measured = ", ".join(f"{count // 2} pairs {kind}" for kind, count in sorted(kinds.items()))
    bad = {kind for kind in kinds if kind != "OK"}
    disable = "set NCCL_P2P_DISABLE=1 (fabric_extra_environment) and disable_custom_all_reduce in the instance's args"
    if bad and node.nvlink:
        return failed(measured, "OK for each pair", "see nvlink and fabric_state; reboot")
    if bad:
        return warned(measured, "OK for each pair", f"CNS: chipset, see acs and iommu. Where it cannot work, {disable}")
    if not node.nvlink and any("geforce" in name.lower() for name in node.gpu_names()):
        return warned(
            f"{measured} on GeForce: reported, and known to hang",
            "an all-reduce that was tried, or P2P switched off",
            f"try an all-reduce of two GPUs; if it hangs, {disable}",
        )
    return passed(measured)


@check("acs", "E2", "E5", needs="gpu")
def acs(node: Node) -> Verdict:
    links = node.health.get("pci") or []
    if node.virtual:
        return skipped("a virtual machine: the host below decides")
    if len(links) < 2 and not node.rdma:
        return skipped("one GPU and no RDMA device: no traffic between devices")
    bridges = {bridge: control for link in links for bridge, control in (link.get("acs") or {}).items()}
    active = sorted(bridge for bridge, control in bridges.items() if control & (ACS_VALIDATES | ACS_REDIRECTS))
    if active:
        result = failed if len(links) > 1 and not node.nvlink else warned
        return result(
            f"on at {', '.join(active[:6])}{', …' if len(active) > 6 else ''}",
            "off on the bridges above GPUs and network cards",
            "set base_acs_off: true and run playbooks/host.yml (not where virtual machines own devices),"
            " or switch ACS off in BIOS",
        )
    return passed("off")


@check("iommu", "E3", "E4", needs="gpu")
def iommu(node: Node) -> Verdict:
    if node.virtual:
        return skipped("a virtual machine: the host below decides")
    kinds = {link["iommu"] for link in node.health.get("pci") or [] if link.get("iommu")}
    translated = sorted(kind for kind in kinds if kind != "identity")
    if translated and (len(node.gpus) > 1 or node.rdma):
        return warned(
            f"translates for the GPUs ({', '.join(translated)})",
            "off or passthrough",
            "boot with iommu=pt, or switch the IOMMU off in BIOS (intel_iommu=off); P2P can hang otherwise",
        )
    return passed(", ".join(sorted(kinds)) or "off")
