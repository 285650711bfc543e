"""The verdict on what the GPUs exchange over NCCL, from what the module nccl_check returned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import bandwidth
from .probe_groups import count, joined, ordered, shown, verb

if TYPE_CHECKING:
    from .probe import View

Run = Mapping[str, Any]
_WAITED = re.compile(r"remote process exited|connection closed|timed? ?out", re.IGNORECASE)
_SPEED_REMEDY = (
    "look at nvlink, topology, pcie_width, rdma_links and peermem of these nodes, at xid and throttle, and measure"
    " again while nothing else runs"
)


def _together(name: str, run: Run, results: Mapping[str, Any]) -> dict[str, Any] | None:
    """One run as all of its nodes saw it; null where it is another node's to tell."""
    nodes = [str(node) for node in run["nodes"]]
    if name != next((node for node in nodes if results.get(node)), None):
        return None
    told = {
        node: next(
            (each for each in (results.get(node) or {}).get("runs") or [] if _same(each, run)),
            {"why": f"no result from {node}"},
        )
        for node in nodes
    }
    reasons = [str(each["why"]) for each in told.values() if each.get("why")]
    found: dict[str, Any] = {"kind": run["kind"], "nodes": nodes, "why": reasons[0] if reasons else None, "error": None}
    if reasons:
        return found
    errors = {node: str(each["error"]) for node, each in told.items() if each.get("error")}
    # Who waits in vain knows less than who failed.
    errors = dict(sorted(errors.items(), key=lambda item: bool(_WAITED.search(item[1]))))
    if errors or not all(each.get("ok") for each in told.values()):
        listed = [error if len(nodes) == 1 else f"{node}: {error}" for node, error in errors.items()]
        found["error"] = "; ".join(listed[:2]) or "no sum"
    words = [word for each in told.values() for word in each.get("warnings") or []]
    first = told[nodes[0]]
    found |= {key: first.get(key) for key in ("ranks", "bus_gb_s", "sizes", "version", "network", "interface", "nvls")}
    via: Counter[str] = Counter()
    for each in told.values():
        via.update(each.get("via") or {})
    found |= {"warnings": list(dict.fromkeys(words)), "via": dict(via)}
    return found


def _same(one: Run, other: Run) -> bool:
    return one["kind"] == other["kind"] and list(one["nodes"]) == list(other["nodes"])


def runs(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was tried, each once, with what had to be reached (`expected`, null without a figure to compare with)."""
    found = []
    for name in ordered(results):
        for run in (results[name] or {}).get("runs") or []:
            whole = _together(name, run, results)
            if whole:
                figure = None
                if not whole["why"] and not whole["error"]:
                    figure = bandwidth.expected(whole, [results[node] for node in whole["nodes"]])
                whole["expected"] = {"gb_s": round(figure[0], 1), "of": figure[1]} if figure else None
                found.append(whole)
    return found


def where(run: Run) -> str:
    return f"{run['nodes'][0]} alone" if run["kind"] == "alone" else shown(run["nodes"])


def speed(run: Run) -> str:
    figure = f", at least {run['expected']['gb_s']:g}" if run["expected"] else ""
    return f"{where(run)} {run['bus_gb_s']:.4g} GB/s{figure} ({bandwidth.ways(run)})"


def slowest(tried: Sequence[Run]) -> list[Run]:
    """The slowest of each kind: of the nodes alone, of the pairs, of all nodes of an engine."""
    found: dict[str, Run] = {}
    for run in tried:
        kind = str(run["kind"])
        if not run["why"] and not run["error"]:
            found[kind] = min(found.get(kind, run), run, key=lambda each: float(each["bus_gb_s"]))
    return list(found.values())


def nccl(view: View) -> None:
    """Adds findings and the note of net_nccl."""
    results = {name: entry for name, entry in (view.results.get("nccl") or {}).items() if entry}
    tried = [run for run in runs(results) if not view.mixed.intersection(run["nodes"])]
    done = [run for run in tried if not run["why"]]
    good = [run for run in done if not run["error"]]
    _failures(view, [run for run in done if run["error"]])
    for run in good:
        _ways(view, run, [results[node] for node in run["nodes"]])
    for run in good:
        if run["expected"] and run["bus_gb_s"] < run["expected"]["gb_s"]:
            _slow(view, run)
    reasons = Counter(str(run["why"]) for run in tried if run["why"] and run["why"] != "one GPU")
    if good:
        unknown = sum(run["expected"] is None for run in good)
        them = "it" if unknown == 1 else "them"
        more = (
            f"; {unknown} of these speeds {verb('are', unknown)} told only, no figure to compare {them} with is known"
        )
        more = more if unknown else ""
        told = joined([speed(run) for run in slowest(good)])
        left = f"not tested: {joined([why for why, _ in reasons.most_common(2)])}" if reasons else ""
        view.note("net_nccl", "pass", f"{count(len(good), 'time')}, the slowest: {told}{more}", left)
        return
    if view.settings.mode != "full":
        why = "preflight_network=full tests it"
    elif reasons:
        why = reasons.most_common(1)[0][0]
    else:
        why = "one GPU a node, and no engine over several nodes" if tried else "no result of any node"
    view.skip("net_nccl", why)


def _failures(view: View, bad: Sequence[dict[str, Any]]) -> None:
    causes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in bad:
        words = "\n".join([*run["warnings"], run["error"]])
        causes.setdefault(bandwidth.explain(words, run["kind"]), []).append(run)
    for (cause, remedy), listed in causes.items():
        first = listed[0]
        said = f"; NCCL: {first['warnings'][0]}" if first["warnings"] else ""
        more = f"; and {len(listed) - 1} more" if len(listed) > 1 else ""
        view.find(
            "net_nccl",
            "fail",
            f"{where(first)}: {first['error']}{said}{more}",
            expected="an all-reduce over NCCL gives the sum on every GPU",
            cause=cause,
            remedy=remedy,
            nodes={node for run in listed for node in run["nodes"]},
            pairs=[(run["nodes"][0], run["nodes"][1]) for run in listed if run["kind"] == "pair"],
        )


def _ways(view: View, run: dict[str, Any], nodes: Sequence[Mapping[str, Any]]) -> None:
    pairs = [(run["nodes"][0], run["nodes"][1])] if run["kind"] == "pair" else []
    if bandwidth.over_sockets(run, nodes):
        view.find(
            "net_nccl",
            "fail",
            speed(run),
            expected="RDMA (NET/IB), since NCCL_IB_HCA names devices",
            cause="NCCL could not use the RDMA devices, and took TCP without a word",
            remedy="see rdma_links and memlock; NCCL_NET=IB (playbooks/network.yml sets it) makes it an error",
            nodes=run["nodes"],
            pairs=pairs,
        )
    elif bandwidth.without_gpudirect(run):
        view.find(
            "net_nccl",
            "warn",
            speed(run),
            expected="RDMA into the GPUs' memory (GDRDMA in NCCL's log)",
            cause="GPUDirect RDMA is off: nvidia_peermem is not loaded or does not fit, no dma-buf, or GPU and adapter"
            " are far apart",
            remedy="see peermem, acs and iommu; compare the nodes, NCCL's log is in /run/ironrack/nccl",
            nodes=run["nodes"],
            pairs=pairs,
        )


def _slow(view: View, run: dict[str, Any]) -> None:
    cause = (
        "an NVLink that is down, a GPU that slows down, or another process on the GPUs"
        if run["kind"] == "alone"
        else "a link that came up slower or has errors, GPUDirect RDMA off on one node, or an adapter far from its GPU"
    )
    view.find(
        "net_nccl",
        "fail",
        speed(run),
        expected=f"at least {run['expected']['gb_s']:g} GB/s ({run['expected']['of']})",
        cause=cause,
        remedy=_SPEED_REMEDY,
        nodes=run["nodes"],
        pairs=[(run["nodes"][0], run["nodes"][1])] if run["kind"] == "pair" else [],
    )
