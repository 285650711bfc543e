# SPDX-License-Identifier: Apache-2.0
"""What must be the same on all nodes, and which release a rollback goes to: from what the nodes said of themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..nvidia.matrix import CUDA

Found = Mapping[str, Any]

# Package or part: (what it is called, what helps when two nodes differ).
_COMPARED = {
    "python": (
        "Python",
        "bring both to the same patch level (Ray and pickled code want it), or take python_env_method: conda, which "
        "brings its own",
    ),
    "vllm": ("vLLM", ""),
    "ray": ("Ray", ""),
    "torch": ("torch", ""),
    "nccl": ("NCCL", ""),
    "cuda": ("torch's CUDA", ""),
    "vllm_cuda": ("the CUDA of vLLM's extension", ""),
}
_OTHER_BUILD = (
    "both say that they are whole, so one was put there by hand: remove its folder under releases/ and run again, "
    "and the node gets the builder's"
)


def version_problems(found: Mapping[str, Found], variant: str, beside: Mapping[str, Found] | None = None) -> list[str]:
    """Sentences about versions that differ between nodes, and about drivers that are too old for the runtime.

    found: what the module `release` returned for each node as `inspected`. A node with drift is repaired by the same
    run, so of it only what a repair cannot change counts. beside: the same for nodes that --limit leaves out.
    """
    left_out = _left_out(found, beside or {})
    return [*_releases(found), *left_out, *_differences(found), *_old_drivers(found, variant)]


def _left_out(found: Mapping[str, Found], beside: Mapping[str, Found]) -> list[str]:
    return [
        f"{node} runs release {about['before']}, and {about['release_id']} is wanted: with --limit only "
        f"{', '.join(found)} would get it, and nodes with different releases do not work together. Run without --limit"
        for node, about in beside.items()
        if about.get("before") and about["before"] != about.get("release_id")
    ]


def _releases(found: Mapping[str, Found]) -> list[str]:
    wanted = {node: str(about["release_id"]) for node, about in found.items() if about.get("release_id")}
    counted = Counter(wanted.values()).most_common()
    if len(counted) < 2:
        return []
    first = next(node for node in wanted if wanted[node] == counted[0][0])
    others = [f"{identity} for {_names(wanted, identity)}" for identity, _count in counted[1:]]
    return [
        f"the inventory asks for release {counted[0][0]} for {first}, but for {', '.join(others)}: set "
        "python_env_method, _python, _interpreter, _lock, _conda_lock and _wheels once for the whole cluster, in "
        "group_vars/all"
    ]


def _differences(found: Mapping[str, Found]) -> list[str]:
    problems = []
    for name, (title, remedy) in _COMPARED.items():
        known = {
            node: str(about["runtime"][name])
            for node, about in found.items()
            if about["runtime"].get(name) and (name == "python" or _is_whole(about))
        }
        counted = Counter(known.values()).most_common()
        if len(counted) < 2:
            continue
        usual = counted[0][0]
        first = next(node for node in known if known[node] == usual)
        others = [f"{version} on {_names(known, version)}" for version, _count in counted[1:]]
        problems.append(f"{title} is {usual} on {first}, but {', '.join(others)}: {remedy or _OTHER_BUILD}")
    return problems


def repairs(found: Mapping[str, Found], builder: str) -> dict[str, Any]:
    """Who is damaged, who gives what they lack, and who makes or hands out the release to those without it.

    found: as in version_problems, of the nodes of this run, and of the builder. One that could not be looked at is
    asked last. `damaged`: the nodes whose release is not as it was built, or of another build than most have.
    `giver`: empty where there is none. `maker`: the builder, unless it has lost the release and another has it whole.
    """
    own = found.get(builder)
    whole = {node: str(about["manifest_sha256"]) for node, about in found.items() if _is_whole(about)}
    counted = Counter(whole.values())
    # What most nodes have is left alone, and with it the engines that run from it; the builder decides between equals.
    reference = max(counted, key=lambda build: (counted[build], build == whole.get(builder)), default="")
    damaged = [
        node
        for node, about in found.items()
        if about["drift"]["total"] or (about["present"] and reference not in ("", about["manifest_sha256"]))
    ]
    known = [node for node, build in whole.items() if build == reference]
    # An archive may be damaged, too.
    archived = [node for node, about in found.items() if about["has_archive"]]
    # The builder first, where it was looked at; the others as they come, those that need not pack it ahead.
    givers = sorted(known, key=lambda node: (node != builder, node not in archived))
    by_preference = [*givers, *([builder] if own is None else []), *sorted(archived, key=builder.__ne__)]
    packed = own is not None and own["has_archive"] and not own["present"]
    return {
        "damaged": damaged,
        "giver": by_preference[0] if by_preference else "",
        "maker": builder if packed or not givers else givers[0],
    }


def _is_whole(about: Found) -> bool:
    return bool(about.get("present")) and not (about.get("drift") or {}).get("total")


def _names(known: Mapping[str, str], version: str, limit: int = 5) -> str:
    nodes = [node for node in known if known[node] == version]
    more = f" and {len(nodes) - limit} more" if len(nodes) > limit else ""
    return ", ".join(nodes[:limit]) + more


def _old_drivers(found: Mapping[str, Found], variant: str) -> list[str]:
    runtime = CUDA.get(variant)
    if runtime is None:
        return []
    drivers = {node: str(about["runtime"]["driver"]) for node, about in found.items() if about["runtime"].get("driver")}
    problems = []
    instead = ", or set python_env_variant to cu129 with a lock of your own" if variant == "cu130" else ""
    for node, driver in drivers.items():
        if int(driver.split(".", maxsplit=1)[0]) >= runtime.floor:
            continue
        newer = next(
            (
                f" ({other} has {value})"
                for other, value in drivers.items()
                if int(value.split(".", maxsplit=1)[0]) >= runtime.floor
            ),
            "",
        )
        problems.append(
            f"the driver of {node} is {driver}{newer}; torch for CUDA {runtime.runtime} (python_env_variant {variant}) "
            f"needs {runtime.floor} or newer: update the driver{instead}"
        )
    return problems


def failed_hosts(results: Mapping[str, Found | None]) -> list[str]:
    """The hosts whose task failed or that were not reached; results: what the task registered for each, if anything."""
    return [host for host, result in results.items() if result and (result.get("failed") or result.get("unreachable"))]


# ---------------------------------------------------------------- rollback

_ABSENT = (
    "Name one that every node has, or put back in the inventory what that release was made from and run site.yml, "
    "which builds or fetches it"
)
_DAMAGED = (
    "Name another, or put back in the inventory what that release was made from and run playbooks/runtime.yml, which "
    "repairs it"
)


def rollback_plan(found: Mapping[str, Sequence[Found]], wanted: str, planned_version: str) -> dict[str, Any]:
    """The release that every node can go to (`release`), or why there is none (`problems`), and how to stay on it.

    found: the list of releases of each node, as the module `release_switch` returns it. wanted: an id, or empty for
    the one that was current before. planned_version: the vLLM that the units' command lines are written for.
    """
    problems: list[str] = []
    target = wanted or _previous(found, problems)
    chosen: Found = {}
    if not problems:
        for node, releases in found.items():
            release = next((item for item in releases if item["id"] == target), None)
            there = f"there: {_listed(releases)}"
            if release is None:
                problems.append(f"{node} does not have the release {target}; {there}. {_ABSENT}")
            elif not release["complete"]:
                problems.append(f"the release {target} on {node} is not complete; {there}. {_ABSENT}")
            elif release["damage"]:
                named = "; ".join(release["damage"][:3])
                problems.append(f"{node} has the release {target} not as it was built ({named}); {there}. {_DAMAGED}")
            chosen = release or chosen
    if not problems:
        version, planned = _vllm(chosen), planned_version.split("+", maxsplit=1)[0]
        if version != planned:
            problems.append(
                f"release {target} holds vLLM {version}, but python_env_vllm_version is {planned}, for which the "
                f"units' command lines would be written: run again with -e rollback_release={target} "
                f"-e python_env_vllm_version={version}"
            )
    already = not problems and all(
        _first(item["id"] for item in each if item["current"]) == target for each in found.values()
    )
    return {
        "release": "" if problems else target,
        "already": already,
        "problems": problems,
        "stay": [] if problems else _stay(chosen, already),
    }


def _previous(found: Mapping[str, Sequence[Found]], problems: list[str]) -> str:
    before = {node: _first(item["id"] for item in releases if item["previous"]) for node, releases in found.items()}
    # Both links lead to one release only where a switch was killed between the two.
    halved = [
        node for node, releases in found.items() if any(item["previous"] and item["current"] for item in releases)
    ]
    if halved:
        problems.extend(
            f"a switch of {node} was interrupted, so what was current before is not known there; there: "
            f"{_listed(found[node])}. Name the release to return to with -e rollback_release=ID"
            for node in halved
        )
        return ""
    without = [node for node, identity in before.items() if not identity]
    alone = [node for node in without if not any(item["complete"] and not item["current"] for item in found[node])]
    if alone:
        problems.append(
            f"there is no other release on {', '.join(alone[:5])}{f' and {len(alone) - 5} more' if alone[5:] else ''}, "
            f"so nothing to return to; there: {_listed(found[alone[0]])}. To run another one, change the inventory "
            "(python_env_vllm_version, python_env_lock, python_env_wheels) and run site.yml"
        )
        return ""
    if without:
        problems.extend(
            f"{node} was never switched from one release to another; there: {_listed(found[node])}. "
            "Name one with -e rollback_release=ID"
            for node in without
        )
        return ""
    usual, count = Counter(before.values()).most_common(1)[0]
    if count < len(before):
        first = next(node for node in before if before[node] == usual)
        other = next(node for node in before if before[node] != usual)
        problems.append(
            f"the previous release is {usual} on {first}, but {before[other]} on {other}: name one that both have with "
            f"-e rollback_release=ID; {first} has {_listed(found[first])}; {other} has {_listed(found[other])}"
        )
    return usual


def _first(values: Iterable[str]) -> str:
    return next(iter(values), "")


def _vllm(release: Found) -> str:
    return str((release["inputs"].get("versions") or {}).get("vllm", "?")).split("+", maxsplit=1)[0]


def _listed(releases: Sequence[Found]) -> str:
    def marks(item: Found) -> str:
        words = [word for word in ("current", "previous") if item[word]]
        words += [] if item["complete"] else ["incomplete"]
        return ", ".join([f"vLLM {_vllm(item)}", *words])

    return "; ".join(f"{item['id']} ({marks(item)})" for item in releases) or "nothing"


def _stay(release: Found, already: bool) -> list[str]:
    inputs = release["inputs"]
    python = ".".join(str(inputs.get("python")).split(".")[:2])
    return [
        f"All nodes were at release {release['id']} before this run, and are. If the inventory asks for another one, "
        "the next site.yml or runtime.yml goes to that."
        if already
        else f"All nodes run release {release['id']} now. What the inventory asks for is another one: the next "
        "site.yml or runtime.yml goes forward to it again.",
        "To stay, bring back in the inventory what this release was made from:",
        f'python_env_vllm_version: "{_vllm(release)}"',
        f"python_env_variant: {inputs.get('variant')}",
        f"python_env_method: {inputs.get('method')}",
        f'python_env_python: "{python}"',
        f"python_env_lock as it was then ({inputs.get('lock')}), and the same python_env_conda_lock, "
        "python_env_interpreter and python_env_wheels",
        f"`ansible-playbook playbooks/runtime.yml --check` then says nothing of a release other than {release['id']}.",
    ]
