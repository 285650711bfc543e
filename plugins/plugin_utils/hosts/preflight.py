"""The verdict on hosts: each check judges what the module host_facts measured, and names the remedy.

A check has an id, and the numbers of the field reports (docs/failure-checks.md) that it would have caught. Its
judgement is `pass`, `warn`, `fail`, or `skip` where it does not apply. Nothing here connects to a host or changes one.
"""

from __future__ import annotations

import difflib
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..network import probe
from . import checks_driver, checks_gpu, checks_host, verify
from .errors import HostError
from .judging import ORDER, Check, Facts, Node, Settings, Verdict, failed, passed, skipped

CHECKS: Sequence[Check] = (*checks_driver.CHECKS, *checks_gpu.CHECKS, *checks_host.CHECKS)
FAIL_ON = ("fail", "warn", "never")

# --- equality across nodes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equality:
    id: str
    group: tuple[str, ...]
    status: str
    # (nodes that must agree, the value), or None where the node has no say
    value: Callable[[Node], tuple[str, str] | None]
    remedy: str


def _of(value: object) -> tuple[str, str] | None:
    return ("", str(value)) if value else None


def _vbios(node: Node) -> tuple[str, str] | None:
    versions = sorted({str(gpu.get("vbios")) for gpu in node.gpus if gpu.get("vbios")})
    return ("|".join(sorted(set(node.gpu_names()))), ", ".join(versions)) if versions else None


def _topology(node: Node) -> tuple[str, str] | None:
    kinds = Counter(checks_gpu.pair_kinds(node.health.get("topology") or []))
    measured = ", ".join(f"{count // 2} pairs {kind}" for kind, count in sorted(kinds.items()))
    return ("|".join(node.gpu_names()), measured) if kinds else None


def _gpus(node: Node) -> tuple[str, str] | None:
    instances = "|".join(sorted(verify.instances_on(node.plan, node.host)))
    return (instances, verify.describe(node.facts["gpus"])) if instances and node.facts.get("gpus") else None


EQUAL = (
    Equality(
        "same_driver", ("D13", "D18"), "fail", lambda n: _of(n.has_gpus and n.version), "one driver on every node"
    ),
    Equality(
        "same_fabric_manager",
        ("D4", "D5"),
        "fail",
        lambda n: _of(checks_driver.needs_fabric_manager(n) and n.health.get("fabric_manager")),
        "one version of driver and Fabric Manager on every node",
    ),
    Equality(
        "same_flavour",
        (),
        "warn",
        lambda n: _of(n.driver.get("flavour")),
        "the open, or the proprietary, module everywhere",
    ),
    Equality("same_runtime", ("D20", "D21"), "fail", lambda n: _of(n.release.get("id")), "run playbooks/runtime.yml"),
    Equality("same_kernel", (), "warn", lambda n: _of(n.running), "update and reboot the nodes that are behind"),
    Equality("same_gpus", (), "warn", _gpus, "an instance is as fast as its slowest node: give it nodes of one kind"),
    Equality("same_topology", (), "warn", _topology, "compare slots, bridges and BIOS with the other nodes"),
    Equality("same_vbios", (), "warn", _vbios, "bring the GPUs' firmware to one version"),
)


def equalities(nodes: Sequence[Node]) -> dict[str, list[dict[str, Any]]]:
    """For each host the checks that compare it with the others that this run looked at."""
    found: dict[str, list[dict[str, Any]]] = {node.host: [] for node in nodes}
    for rule in EQUAL:
        values = {node.host: rule.value(node) for node in nodes}
        for host, mine in values.items():
            peers = {
                other: value[1] for other, value in values.items() if value is not None and mine and value[0] == mine[0]
            }
            counts = Counter(peers.values()).most_common(2)
            if mine is None or len(peers) < 2:
                verdict = skipped("no other node to compare with" if mine else "does not apply")
            elif len(counts) == 1:
                verdict = passed(f"{mine[1]} on {len(peers)} nodes")
            else:
                # Without a majority nobody can be called right.
                usual = counts[0][0] if counts[0][1] > counts[1][1] else None
                others = [other for other, value in peers.items() if value != mine[1]]
                theirs = ", ".join(f"{other} has {peers[other]}" for other in others[:3])
                verdict = (
                    passed(f"{mine[1]}, as on most nodes; {theirs}")
                    if mine[1] == usual
                    else Verdict(rule.status, f"{mine[1]}; {theirs}", usual or "the same on every node", rule.remedy)
                )
            found[host].append(described(rule.id, rule.group, verdict))
    return found


def clock_skews(nodes: Sequence[Node], limit: float) -> dict[str, dict[str, Any]]:
    """Each clock against the middle of all, a single one against the controller's; with the time of connecting."""
    offsets = {node.host: (node.health.get("clock") or {}).get("offset_seconds") for node in nodes}
    known = [offset for offset in offsets.values() if offset is not None]
    # An even number of clocks has no middle one: the controller's decides between two halves.
    middle = statistics.median(known if len(known) % 2 else [*known, 0.0]) if len(known) > 1 else 0.0
    found = {}
    for host, offset in offsets.items():
        if offset is None:
            verdict = skipped("was not measured")
        elif abs(offset - middle) > limit:
            verdict = failed(
                f"{offset - middle:+.0f} s from the {'other nodes' if len(known) > 1 else 'controller'}",
                f"within {limit:g} s (preflight_clock_skew_seconds)",
                "give all nodes the same base_time_servers; chronyc makestep sets the clock at once",
            )
        else:
            verdict = passed(f"{offset - middle:+.1f} s")
        found[host] = described("clock_skew", (), verdict)
    return found


# --- the report ------------------------------------------------------------------------------------------------------


def described(name: str, group: Sequence[str], verdict: Verdict) -> dict[str, Any]:
    return {
        "id": name,
        "group": list(group),
        "status": verdict.status,
        "measured": verdict.measured,
        "expected": verdict.expected,
        "remedy": verdict.remedy,
    }


def check_ids() -> list[str]:
    return [item.id for item in CHECKS] + [rule.id for rule in EQUAL] + ["clock_skew", *probe.CHECKS]


def judge(node: Node) -> list[dict[str, Any]]:
    found = []
    for item in CHECKS:
        if item.needs and not node.has_gpus:
            verdict = skipped("no GPUs here, and none declared")
        elif item.needs == "details" and not node.gpus:
            verdict = skipped("nvidia-smi -q could not be read, see gpu_driver")
        else:
            verdict = item.judge(node)
        found.append(described(item.id, item.group, verdict))
    return found


def parse_settings(options: Mapping[str, Any]) -> Settings:
    known = Settings.__dataclass_fields__
    for name in options:
        if name not in known:
            raise HostError(f"preflight has no setting {name!r}; it knows {', '.join(known)}")
    settings = Settings(**options)
    if settings.fail_on not in FAIL_ON:
        raise HostError(f"preflight_fail_on={settings.fail_on!r} is none of {', '.join(FAIL_ON)}; choose one of them")
    ids = check_ids()
    for name in settings.accept:
        if name not in ids:
            near = difflib.get_close_matches(str(name), ids, 1)
            hint = f"did you mean {near[0]}?" if near else f"checks are {', '.join(ids)}"
            raise HostError(f"preflight_accept names {name!r}, which is no check; {hint}")
    for name, value in {
        "xid_hours": settings.xid_hours,
        "clock_skew_seconds": settings.clock_skew_seconds,
        **{f"min_free_gib.{key}": size for key, size in settings.min_free_gib.items()},
    }.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise HostError(f"preflight_{name}={value!r} is not a number from 0 on; correct it")
    return settings


def preflight(
    facts: Mapping[str, Facts], plan: Mapping[str, Any], hosts: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    """facts: the fact ironrack_host of each host that was looked at; hosts: all that this run should have looked at."""
    settings = parse_settings(options)
    nodes = [Node(host, facts[host], plan, settings) for host in facts]
    compared, skews = equalities(nodes), clock_skews(nodes, settings.clock_skew_seconds)
    report: dict[str, Any] = {}
    for node in nodes:
        checks = [*judge(node), *compared[node.host], skews[node.host]]
        for item in checks:
            item["accepted"] = item["status"] == "fail" and item["id"] in settings.accept
            if item["accepted"]:
                item["status"] = "warn"
        report[node.host] = _node_report(checks)
    for host in hosts:
        if host not in facts:
            verdict = failed(
                "the host could not be looked at",
                "reachable",
                "see the error above; repair it, or leave it out with --limit",
            )
            report[host] = _node_report([described("reachable", (), verdict) | {"accepted": False}])
    worst = max((entry["status"] for entry in report.values()), key=ORDER.index, default="pass")
    counts = {status: sum(entry["counts"][status] for entry in report.values()) for status in reversed(ORDER)}
    return {
        "ok": worst != "fail",
        **_verdict(worst, settings.fail_on),
        "counts": counts,
        "nodes": report,
        "table": table(report),
    }


def _verdict(worst: str, fail_on: str) -> dict[str, Any]:
    return {
        "exit_code": {"fail": 2, "warn": 1}.get(worst, 0),
        "status": "pass" if worst == "skip" else worst,
        "fail_on": fail_on,
        "stop": fail_on != "never" and ORDER.index(worst) >= ORDER.index(fail_on),
    }


def with_network(report: Mapping[str, Any], network: Mapping[str, Any]) -> dict[str, Any]:
    """One verdict on hosts and network; without hosts, on the network alone."""
    worst = max(report["status"], network["verdict"], key=ORDER.index)
    tables = [report["table"], network["table"]] if report["nodes"] else [network["table"]]
    return {
        **report,
        "ok": worst != "fail",
        **_verdict(worst, report["fail_on"]),
        "counts": {status: count + network["counts"][status] for status, count in report["counts"].items()},
        # All pairs have files of their own.
        "network": {key: value for key, value in network.items() if key not in ("json", "html", "table")},
        "table": "\n\n".join(tables),
    }


def _node_report(checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {status: sum(1 for item in checks if item["status"] == status) for status in reversed(ORDER)}
    status = "fail" if counts["fail"] else "warn" if counts["warn"] else "pass"
    return {"ok": not counts["fail"], "status": status, "counts": counts, "checks": list(checks)}


def table(report: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a node, then what is not as it should be, nodes with the same finding together."""
    width = max((len(host) for host in [*report, "node"]), default=4)
    lines = [f"{'node':<{width}}  verdict  {'fail':>4}  {'warn':>4}  {'pass':>4}  {'skip':>4}"]
    for host, entry in report.items():
        counts = "  ".join(f"{entry['counts'][status]:>4}" for status in ("fail", "warn", "pass", "skip"))
        lines.append(f"{host:<{width}}  {entry['status'].upper():<7}  {counts}")
    findings: dict[tuple[str, str, str, str, str], list[str]] = {}
    for host, entry in report.items():
        for item in entry["checks"]:
            if item["status"] in ("warn", "fail"):
                reports = f" [{', '.join(item['group'])}]" if item["group"] else ""
                accepted = " (accepted)" if item.get("accepted") else ""
                key = (
                    item["status"],
                    item["id"] + reports + accepted,
                    item["measured"],
                    item["expected"],
                    item["remedy"],
                )
                findings.setdefault(key, []).append(host)
    for finding in sorted(findings, key=lambda finding: (finding[0] != "fail", finding[1])):
        status, name, measured, expected, remedy = finding
        lines += [
            "",
            f"{status.upper()} {name} on {', '.join(findings[finding])}",
            f"  measured: {measured}",
            f"  expected: {expected}",
            f"  remedy:   {remedy}",
        ]
    return "\n".join(lines)
