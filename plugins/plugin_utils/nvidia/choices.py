# SPDX-License-Identifier: Apache-2.0
"""Branch, kernel module, version, toolkit: what is chosen, and why a wish is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import matrix, state
from .gpus import ORDER, Hardware
from .notes import Notes
from .request import MIRROR
from .versions import branch_of, cuda_parts, driver_key


def choose_distribution(found: Mapping[str, Any], notes: Notes) -> matrix.Distribution | None:
    name, version = str(found.get("id") or ""), str(found.get("version") or "")
    accepted = ", ".join(f"{row.id} {row.version}" for row in matrix.DISTRIBUTIONS if row.accepted)
    for row in matrix.DISTRIBUTIONS:
        same = version == row.version if row.family != "rhel" else version.partition(".")[0] == row.version
        if name == row.id and same:
            if row.accepted:
                return row
            notes.refuse(
                "ironrack_host.distribution",
                f"{name} {version}",
                "its packages are known here, but no test has installed them on such a host yet",
                f"use one of {accepted}, or install the driver yourself and leave the roles of the driver out",
            )
            return None
    notes.refuse(
        "ironrack_host.distribution",
        f"{name} {version}".strip() or None,
        "no packages of NVIDIA are known for it",
        f"use one of {accepted}, or run playbooks/facts.yml when the facts are missing",
    )
    return None


def from_nvidia(values: Mapping[str, Any]) -> bool:
    """From NVIDIA's own servers. A mirror of the site holds what the site has put there."""
    return bool(values["nvidia_driver_source"] == "nvidia" and values["nvidia_driver_mirror"] == MIRROR)


def drives(branch: int, hardware: Hardware) -> bool:
    rows = [matrix.GENERATIONS[name] for name in hardware.generations]
    return all(row.first_branch <= branch <= (row.last_branch or branch) for row in rows)


def _default_branch(values: Mapping[str, Any], distribution: matrix.Distribution, hardware: Hardware) -> int:
    first = distribution.first_branch or 0
    if first <= matrix.DEFAULT_BRANCH or not from_nvidia(values):
        return matrix.DEFAULT_BRANCH
    there = [
        branch
        for branch, row in matrix.BRANCHES.items()
        if branch >= first and row.status != "ended" and row.version and drives(branch, hardware)
    ]
    return min(there, default=matrix.DEFAULT_BRANCH)


def keep_installed(
    facts: Mapping[str, Any],
    values: Mapping[str, Any],
    distribution: matrix.Distribution,
    hardware: Hardware,
    notes: Notes,
) -> str | None:
    """The installed version, where it is newer than what would be chosen: nobody has asked for a downgrade."""
    there = state.installed(facts)
    own = branch_of(there) if there else None
    given = str(values["nvidia_driver_branch"])
    named = str(values["nvidia_driver_version"]) != "auto" or given not in ("auto", str(own))
    if there is None or own is None or named or values["nvidia_driver_source"] not in ("nvidia", "local"):
        return None
    branch = int(given) if given != "auto" else _default_branch(values, distribution, hardware)
    chosen = matrix.BRANCHES[branch].version or f"{branch}.00"
    if (driver_key(there) or ()) <= (driver_key(chosen) or ()) or (own == branch and not _known(values, branch)):
        return None
    if own not in matrix.BRANCHES:
        notes.refuse(
            "nvidia_driver_version",
            "auto",
            f"driver {there} is installed, newer than every branch known here, and is not replaced by {chosen} unasked",
            f"set it to {chosen} to replace it, or nvidia_driver_source to none to keep it",
        )
        return None
    if own < matrix.CUDA[values["python_env_variant"]].floor or not drives(own, hardware):
        notes.reasons.append(f"driver {there} is installed and replaced: it does not drive {hardware.summary()}")
        return None
    notes.reasons.append(
        f"driver {there} is installed, newer than {chosen}, and runs the runtime: it is kept (nvidia_driver_version"
        f" {chosen} replaces it)"
    )
    return there


def _known(values: Mapping[str, Any], branch: int) -> bool:
    """Whether a version is chosen beforehand: of a folder of the site, what is there is."""
    return values["nvidia_driver_source"] == "nvidia" and matrix.BRANCHES[branch].version is not None


def choose_branch(
    values: Mapping[str, Any],
    distribution: matrix.Distribution,
    hardware: Hardware,
    notes: Notes,
    kept: str | None = None,
) -> int | None:
    before = len(notes.problems)
    source = values["nvidia_driver_source"]
    given, version = str(values["nvidia_driver_branch"]), str(values["nvidia_driver_version"])
    of_version = branch_of(version)
    archive = distribution.archive_branch
    if source == "distribution":
        wrong = None
        if archive is None or given not in ("auto", str(archive)):
            wrong = "nvidia_driver_branch"
        elif of_version not in (None, archive):
            wrong = "nvidia_driver_version"
        if archive is None or wrong:
            variable = wrong or "nvidia_driver_source"
            notes.refuse(
                variable,
                values[variable],
                f"nvidia_driver_source is distribution, and {distribution.id} {distribution.version} has"
                f" {'no packages' if archive is None else f'branch {archive} alone'}",
                f"set {variable} to auto, or nvidia_driver_source to nvidia or local",
            )
            return None
        branch = archive
        notes.reasons.append(f"branch {branch} is what {distribution.id} {distribution.version} has itself")
    elif given != "auto":
        branch = int(given)
        notes.reasons.append(f"branch {branch} is what nvidia_driver_branch asks for")
    elif of_version is not None:
        branch = of_version
        notes.reasons.append(f"branch {branch} follows from nvidia_driver_version {version}")
    elif kept:
        branch = branch_of(kept) or matrix.DEFAULT_BRANCH
    else:
        branch = _default_branch(values, distribution, hardware)
        until = f"supported until {matrix.BRANCHES[branch].end_of_life}"
        notes.reasons.append(
            f"branch {branch}: {until}, runs CUDA 12 and 13 and every generation from Maxwell to Blackwell Ultra"
            if branch == matrix.DEFAULT_BRANCH
            else f"branch {branch}: {until}; NVIDIA's repository for {distribution.id} {distribution.version} is not"
            f" known to hold {matrix.DEFAULT_BRANCH}, it begins with {distribution.first_branch}"
        )
    _check_cuda(values, distribution, hardware, branch, notes)
    _check_generations(hardware, branch, given != "auto" or of_version is not None, values, notes)
    _check_lifecycle(values, distribution, branch, notes)
    return branch if len(notes.problems) == before else None


def _check_cuda(
    values: Mapping[str, Any], distribution: matrix.Distribution, hardware: Hardware, branch: int, notes: Notes
) -> None:
    variant = values["python_env_variant"]
    cuda = matrix.CUDA[variant]
    first = ORDER.index(cuda.first_generation)
    old = [name for name in hardware.generations if ORDER.index(name) < first]
    if old:
        notes.refuse(
            "python_env_variant",
            variant,
            f"CUDA {cuda.runtime} has no code for {', '.join(old)} GPUs ({hardware.summary()})",
            "set python_env_variant to cu129, or use Turing or newer GPUs",
        )
    elif any(ORDER.index(name) < ORDER.index(matrix.VLLM_FIRST_GENERATION) for name in hardware.generations):
        notes.warnings.append(
            f"vLLM's published builds begin with Turing (compute capability 7.5): {hardware.summary()} need a build of"
            f" your own, named by python_env_lock"
        )
    if branch >= cuda.floor:
        if branch < cuda.native:
            notes.warnings.append(
                f"driver branch {branch} is older than CUDA {cuda.runtime} (branch {cuda.native}): it runs by minor"
                f" version compatibility, so the driver compiles no PTX of CUDA {cuda.runtime} and newer features of"
                f" the driver are absent"
            )
        return
    if values["cuda_compat"] and _compat_possible(values, hardware, old):
        notes.warnings.append(
            f"cuda_compat lets CUDA {cuda.runtime} run on branch {branch}, which is older than its floor {cuda.floor}:"
            f" the engines need VLLM_ENABLE_CUDA_COMPATIBILITY=1"
        )
        return
    remedies = [
        "set python_env_variant to cu129 (CUDA 12, runs from branch 525 on; python_env_lock has to name a lock)"
    ]
    if values["nvidia_driver_source"] == "distribution":
        variable: str = "nvidia_driver_source"
        remedies.append("or nvidia_driver_source to nvidia or local")
        what = f"{distribution.id} {distribution.version} has driver branch {branch}"
    else:
        explicit = str(values["nvidia_driver_branch"]) != "auto"
        variable = "nvidia_driver_branch" if explicit else "nvidia_driver_version"
        remedies.append(f"or {variable} to auto or to {cuda.floor} or newer")
        what = f"driver branch {branch} is too old"
        if hardware.datacenter and not old:
            remedies.append("or cuda_compat to true (data centre GPUs only)")
    notes.refuse(
        variable,
        values[variable],
        f"{what}, CUDA {cuda.runtime} of python_env_variant {variant} needs {cuda.floor} or newer",
        ", ".join(remedies),
    )


def _compat_possible(values: Mapping[str, Any], hardware: Hardware, old: list[str]) -> bool:
    return hardware.datacenter and not old and values["nvidia_driver_source"] != "distribution"


def _check_generations(
    hardware: Hardware, branch: int, explicit: bool, values: Mapping[str, Any], notes: Notes
) -> None:
    if hardware.obsolete:
        notes.refuse(
            "ironrack_host.nvidia_functions",
            ", ".join(hardware.obsolete),
            "older than Maxwell, no branch that runs vLLM drives it",
            "take the GPU out, or leave the host out of vllm_nodes",
        )
    if hardware.unknown and not (explicit and values["nvidia_driver_flavour"] != "auto"):
        bus = hardware.origin == "bus"
        notes.refuse(
            "ironrack_host.nvidia_functions" if bus else "gpus",
            ", ".join(hardware.unknown),
            "no generation is known for it here, so neither branch nor flavour can be chosen",
            "set both nvidia_driver_branch and nvidia_driver_flavour"
            + ("" if bus else ", or correct the name (as nvidia-smi prints it)"),
        )
    elif hardware.unknown:
        notes.warnings.append(
            f"the generation of {', '.join(hardware.unknown)} is not known here: nvidia_driver_branch and"
            f" nvidia_driver_flavour were taken unchecked"
        )
    for name in hardware.generations:
        row = matrix.GENERATIONS[name]
        if branch < row.first_branch or (row.last_branch is not None and branch > row.last_branch):
            span = f"{row.first_branch} to {row.last_branch}" if row.last_branch else f"{row.first_branch} and newer"
            variable, remedy = _blame(values, f"a branch from {span}")
            notes.refuse(
                variable,
                values[variable],
                f"branch {branch} does not drive {name} GPUs ({hardware.summary()}), branches {span} do",
                remedy,
            )


def _blame(values: Mapping[str, Any], wanted: str) -> tuple[str, str]:
    """The variable that brought the branch about, and what to set it to."""
    if values["nvidia_driver_source"] == "distribution":
        return "nvidia_driver_source", f"set it to nvidia or local, with {wanted}"
    if str(values["nvidia_driver_branch"]) == "auto" and str(values["nvidia_driver_version"]) != "auto":
        return "nvidia_driver_version", f"set it to auto, or to a version of {wanted}"
    return "nvidia_driver_branch", f"set it to auto, or to {wanted}"


def _check_lifecycle(values: Mapping[str, Any], distribution: matrix.Distribution, branch: int, notes: Notes) -> None:
    row = matrix.BRANCHES[branch]
    if row.status == "ended":
        notes.warnings.append(
            f"driver branch {branch} gets no more security fixes"
            f"{f' (ended {row.end_of_life})' if row.end_of_life else ''}; {matrix.DEFAULT_BRANCH} does"
        )
    if from_nvidia(values) and distribution.first_branch and branch < distribution.first_branch:
        notes.warnings.append(
            f"NVIDIA's repository for {distribution.id} {distribution.version} is not known to hold branch {branch};"
            f" it begins with {distribution.first_branch}"
        )


def choose_flavour(
    values: Mapping[str, Any], distribution: matrix.Distribution, hardware: Hardware, branch: int, notes: Notes
) -> str | None:
    never = [name for name in hardware.generations if matrix.GENERATIONS[name].open_module == "never"]
    only = [name for name in hardware.generations if matrix.GENERATIONS[name].open_module == "only"]
    row = matrix.BRANCHES[branch]
    given = str(values["nvidia_driver_flavour"])
    from_archive = values["nvidia_driver_source"] == "distribution"
    if never and only:
        notes.refuse(
            "ironrack_host.nvidia_functions",
            hardware.summary(),
            f"{', '.join(never)} GPUs need the proprietary kernel module, {', '.join(only)} GPUs the open one, and only"
            f" one can be loaded",
            "put the GPUs into different hosts",
        )
        return None
    if given != "auto":
        flavour = given
        why = "nvidia_driver_flavour asks for it"
    elif only or row.open_only:
        flavour, why = "open", f"{', '.join(only) or f'branch {branch}'} knows no other"
    elif never:
        flavour, why = "proprietary", f"{', '.join(never)} GPUs have no GSP, which the open module needs"
    elif from_archive and not distribution.archive_open:
        flavour, why = "proprietary", f"{distribution.id} {distribution.version} has no working open module"
    elif row.open_default:
        flavour, why = "open", "NVIDIA's default for Turing and newer since branch 560"
    else:
        flavour, why = "proprietary", f"NVIDIA's default in branch {branch}"
    variable = "nvidia_driver_flavour"
    if flavour == "open" and never:
        notes.refuse(variable, given, f"{', '.join(never)} GPUs have no GSP, which it needs", "set it to proprietary")
        return None
    if flavour == "open" and from_archive and not distribution.archive_open:
        notes.refuse(
            variable if given != "auto" else "nvidia_driver_source",
            given if given != "auto" else "distribution",
            f"the open kernel module of {distribution.id} {distribution.version} cannot be installed beside its driver",
            f"set {f'{variable} to proprietary, or ' if given != 'auto' and not only else ''}nvidia_driver_source to"
            f" nvidia or local",
        )
        return None
    if flavour == "proprietary" and (only or row.open_only):
        who = f"{', '.join(only)} GPUs work" if only else f"branch {branch} comes"
        notes.refuse(variable, given, f"{who} with the open kernel module alone", "set it to open or auto")
        return None
    notes.reasons.append(f"{flavour} kernel module: {why}")
    return flavour


def choose_version(values: Mapping[str, Any], branch: int, kept: str | None = None) -> str | None:
    """The exact version, where it is known beforehand. Archives and folders usually hold one version: theirs."""
    given = str(values["nvidia_driver_version"])
    if given != "auto":
        return given
    if values["nvidia_driver_source"] != "nvidia":
        return None
    return kept or matrix.BRANCHES[branch].version


def choose_names(
    values: Mapping[str, Any], distribution: matrix.Distribution, branch: int, notes: Notes
) -> matrix.Names | None:
    origin = "distribution" if values["nvidia_driver_source"] == "distribution" else "nvidia"
    for row in matrix.NAMES_OF_PACKAGES:
        if row.family == distribution.family and row.origin == origin and row.first <= branch <= row.last:
            if values["nvidia_driver_precompiled"] and row.precompiled is None:
                notes.refuse(
                    "nvidia_driver_precompiled",
                    True,
                    f"{distribution.id} {distribution.version} has no modules that were built beforehand",
                    "set it to false",
                )
                return None
            if not row.verified:
                notes.reasons.append(
                    f"names of the packages of branch {branch} for {distribution.id} are second hand;"
                    f" nvidia_driver_packages replaces those of the driver"
                )
            return row
    variable, remedy = _blame(values, f"branch {matrix.DEFAULT_BRANCH}")
    notes.refuse(variable, values[variable], f"no package names are known for branch {branch}", remedy)
    return None


def second_hand(hardware: Hardware, distribution: matrix.Distribution, branch: int) -> list[str]:
    """What the choice stands on and nobody here has seen."""
    rows: list[tuple[str, matrix.Row]] = [
        (f"{distribution.id} {distribution.version}", distribution),
        (f"branch {branch}", matrix.BRANCHES[branch]),
        *((f"{name} GPUs", matrix.GENERATIONS[name]) for name in hardware.generations),
    ]
    names = [gpu.name for gpu in hardware.gpus if gpu.second_hand] + [name for name, row in rows if not row.verified]
    if not names:
        return []
    told = ", ".join(dict.fromkeys(names))
    return [f"what is known of {told} is second hand: plugins/plugin_utils/nvidia/matrix.py names the sources"]


def choose_toolkit(values: Mapping[str, Any], distribution: matrix.Distribution, notes: Notes) -> str | None:
    """The CUDA toolkit that kernels are compiled with at run time: of the runtime's major version, or none."""
    given = str(values["cuda_version"])
    cuda = matrix.CUDA[values["python_env_variant"]]
    archive = values["nvidia_driver_source"] == "distribution"
    if given == "none":
        return None
    if given == "auto":
        if archive:
            notes.reasons.append("no CUDA toolkit: nvidia_driver_source is distribution, whose toolkit is older")
            return None
        there = [version for version in cuda.toolkits if _in_repository(version, values, distribution)]
        if not there:
            notes.warnings.append(
                f"NVIDIA's repository for {distribution.id} {distribution.version} is not known to hold a toolkit of"
                f" CUDA {cuda.runtime.split('.')[0]}; if there is none, set cuda_version to none"
            )
        return (there or cuda.toolkits)[0]
    if archive:
        notes.refuse(
            "cuda_version",
            given,
            "nvidia_driver_source is distribution, and the toolkit is in NVIDIA's repository alone",
            "set it to none, or nvidia_driver_source to nvidia or local",
        )
    elif given not in cuda.toolkits or not _in_repository(given, values, distribution):
        notes.warnings.append(f"cuda_version {given} is not among those known here ({', '.join(cuda.toolkits)})")
    return given


def _in_repository(version: str, values: Mapping[str, Any], distribution: matrix.Distribution) -> bool:
    first = cuda_parts(distribution.first_toolkit) if from_nvidia(values) else None
    return (cuda_parts(version) or (0, 0)) >= (first or (0, 0))
