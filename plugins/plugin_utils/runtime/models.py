"""Which node brings which model to whom, and what the nodes' answers about their models mean together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import fanout

Plan = Mapping[str, Any]
WHOLE = ("complete", "foreign")


def places(plan: Plan, builder: str = "") -> dict[str, dict[str, Any]]:
    """Every model folder of the plan, and who has to do with it.

    A model that several instances serve is one. `repo` is empty where the user brings the folder. `keepers` are the
    nodes that may have it on purpose: those that serve it, and the one that fetches it for them.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, instance in plan["instances"].items():
        model = instance.get("model") or {}
        nodes = [rank["node"] for rank in instance["world"]]
        place = found.setdefault(
            instance["model_path"],
            {
                "repo": model.get("repo") or "",
                "revision": model.get("revision") or "",
                "instances": [],
                "nodes": [],
                "builder": builder or nodes[0],
            },
        )
        if model.get("repo") and not place["repo"]:
            # Another instance names the same folder by its path.
            place.update(repo=model["repo"], revision=model.get("revision") or "")
        place["instances"].append(name)
        place["nodes"] += [node for node in nodes if node not in place["nodes"]]
    for place in found.values():
        place["keepers"] = list(dict.fromkeys([*place["nodes"], place["builder"]]))
    return found


def work(
    plan: Plan,
    looked: Mapping[str, Mapping[str, Any]],
    builder: str = "",
) -> list[dict[str, Any]]:
    """What has to be fetched: for each node that fetches, or has a model for the others already, its models.

    `serve` says whether it hands files on: those, or what it takes from another node and has somebody behind it for.
    looked: of each host of this run, by folder, what it said of its models. A node that has a model whole is asked
    before the hub is; a damaged file comes from there, too.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for path, place in places(plan, builder).items():
        states = {host: looked[host][path] for host in place["nodes"] if path in looked.get(host, {})}
        lacking = [host for host, found in states.items() if found["state"] not in WHOLE]
        if not place["repo"] or not lacking:
            continue
        whole = [host for host, found in states.items() if found["state"] in WHOLE]
        source = place["builder"] if place["builder"] in whole or not whole else whole[0]
        task = tasks.setdefault(source, {"node": source, "models": [], "lacking": {}})
        task["models"].append(_model(path, place, states.get(source)))
        others = [host for host in lacking if host != source]
        if others:
            task["lacking"][path] = others
    handing_on = {host for task in tasks.values() for others in task["lacking"].values() for host in others[:-1]}
    for task in tasks.values():
        task["serve"] = bool(task["lacking"]) or task["node"] in handing_on
    return list(tasks.values())


def _model(path: str, place: Mapping[str, Any], found: Mapping[str, Any] | None) -> dict[str, Any]:
    """A model as the module takes it, with the files that a node said are wrong."""
    suspects = sorted((found or {}).get("faults") or {})
    return {"path": path, "repo": place["repo"], "revision": place["revision"], "suspects": suspects}


def hand_out(
    tasks: Iterable[Mapping[str, Any]],
    looked: Mapping[str, Any],
    addresses: Mapping[str, str | None],
    host: str,
    port: int,
) -> dict[str, Any]:
    """The part of one host in the work.

    `models` are those that it takes from others, with their sources, `serve` says whether it hands files on, `lacking`
    are all that its disk needs room for, `mine` all that the work is about and it has a part in.
    """
    tasks = list(tasks)
    result: dict[str, Any] = {"models": [], "serve": False, "lacking": [], "mine": []}
    for task in tasks:
        for model in task["models"]:
            path = model["path"]
            if path not in looked:
                continue
            own = _model(path, model, looked[path])
            result["mine"].append(own)
            if looked[path]["state"] not in WHOLE:
                result["lacking"].append(own)
            nodes = task["lacking"].get(path, [])
            if host in nodes:
                chain = fanout.sources(nodes, host, task["node"], addresses, port)
                result["serve"] = result["serve"] or chain["serve"]
                result["models"].append({**own, "sources": chain["sources"], "starve": chain["starve"]})
    # A node that fetched has its server already, which serves what it takes from others, too.
    result["serve"] = result["serve"] and host not in [task["node"] for task in tasks]
    return result


def _joined(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def differences(plan: Plan, looked: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why the models of the nodes of this run are not all whole and the same: sentences with file, nodes and remedy."""
    problems = []
    for path, place in places(plan).items():
        states = {host: looked[host][path] for host in place["nodes"] if path in looked.get(host, {})}
        what = f"the model of instance {', '.join(place['instances'])} at {path}"
        broken = {host: found for host, found in states.items() if found["state"] not in WHOLE}
        for host, found in broken.items():
            faults = found.get("faults") or {"": found["state"]}
            told = _joined([f"{name} {text}".strip() for name, text in faults.items()])
            problems.append(f"{what} is not complete on {host}: {told}. Run playbooks/runtime.yml again.")
        whole = {host: found for host, found in states.items() if host not in broken}
        if len({found["digest"] for found in whole.values()}) > 1:
            problems.append(f"{what} is not the same on all nodes: {_apart(whole)}. {_remedy(place, path)}")
        elif len({found["manifest"] for found in whole.values() if found["manifest"]}) > 1:
            groups = _grouped({host: found["manifest"] for host, found in whole.items() if found["manifest"]})
            told = " and ".join(_joined(hosts) for hosts in groups)
            problems.append(f"{what} has other hashes in its manifest on {told}. {_remedy(place, path)}")
    return problems


def _remedy(place: Mapping[str, Any], path: str) -> str:
    if place["repo"]:
        return f"Remove {path} on the nodes that have the wrong one, and run again: it is taken from the others."
    return "Copy the folder again to the nodes that have the wrong one."


def _grouped(values: Mapping[str, str]) -> list[list[str]]:
    """Hosts with the same value, the largest group first."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return sorted(groups.values(), key=lambda hosts: -len(hosts))


def _apart(whole: Mapping[str, Mapping[str, Any]]) -> str:
    """Which file differs where: `x.json differs on n3`, of the nodes that are the fewer."""
    names = sorted({name for found in whole.values() for name in found["files"]})
    told = []
    for name in names:
        groups = _grouped({host: found["files"].get(name, "") for host, found in whole.items()})
        if len(groups) == 1:
            continue
        others = [host for hosts in groups[1:] for host in hosts]
        lacking = [host for host, found in whole.items() if name not in found["files"]]
        told.append(
            f"{name} is missing on {_joined(lacking)}"
            if lacking
            else f"{name} differs between {_joined(groups[0])} and {_joined(others)}"
        )
    return "; ".join(told[:8]) + (f"; and {len(told) - 8} files more" if len(told) > 8 else "")
