# SPDX-License-Identifier: Apache-2.0
"""The declared policy of the GPUs: what may be asked for, and what of it each boot has to set anew.

What a card can do (its range of power, its clocks) only the card knows: the module `gpu_policy` compares with that.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .request import Problem

VARIABLE = "gpu_fabric_policy"
DEFAULT = "default"
CLOCK_KEYS = ("graphics_mhz", "memory_mhz")
KEYS = ("persistence", "ecc", "mig", "power_limit_watts", "clocks", "compute_mode")
COMPUTE_MODES = (DEFAULT, "exclusive_process", "prohibited")
# Far beyond any card; beyond it the unit is wrong (milliwatts, kHz).
MOST_WATTS = 10_000
MOST_MHZ = 100_000
# Where packages put it; systemd looks a bare name up in folders of its own.
NVIDIA_SMI = "/usr/bin/nvidia-smi"
UNIT = "ironrack-gpu-policy.service"


@dataclass(frozen=True)
class Policy:
    """None: left as it is. Clocks are MIN,MAX as nvidia-smi takes them."""

    persistence: bool | None = True
    ecc: bool | None = None
    mig: bool | None = None
    power_limit_watts: str | None = None
    graphics_clocks_mhz: str | None = None
    memory_clocks_mhz: str | None = None
    compute_mode: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Options of the module `gpu_policy`."""
        return {name: value for name, value in vars(self).items() if value is not None}


def check(given: Any) -> tuple[Policy, list[Problem]]:
    """The policy, and what is wrong with the variable; what is wrong is left out of the policy."""
    if not isinstance(given, Mapping):
        return Policy(), [Problem(VARIABLE, given, "not a dictionary", f"give some of {', '.join(KEYS)}")]
    problems = _unknown(given, KEYS, VARIABLE)
    values: dict[str, Any] = {}
    for name in ("persistence", "ecc", "mig"):
        if name not in given:
            continue
        if given[name] is None or isinstance(given[name], bool):
            values[name] = given[name]
        else:
            problems.append(_problem(name, given[name], "neither true nor false", "set it to true, false or null"))
    if values.get("mig"):
        values["mig"] = None
        problems.append(
            _problem("mig", True, "engines use whole GPUs, and a GPU in MIG mode is none", "set it to false or null")
        )
    watts = given.get("power_limit_watts")
    if watts is not None:
        values["power_limit_watts"] = _whole(watts, MOST_WATTS)
        if values["power_limit_watts"] is None:
            problems.append(
                _problem("power_limit_watts", watts, "not a number of watts", "set it to 500, say, or default")
            )
    _clocks(given.get("clocks"), values, problems)
    mode = given.get("compute_mode")
    if mode is not None and mode != DEFAULT:
        known = mode in COMPUTE_MODES
        fault = "several processes of an engine open each GPU" if known else "not one of the choices"
        problems.append(_problem("compute_mode", mode, fault, f"set it to {DEFAULT} or null"))
    elif mode is not None:
        values["compute_mode"] = mode
    policy = Policy(**values)
    _needs_persistence(policy, problems)
    return policy, problems


def _clocks(clocks: Any, values: dict[str, Any], problems: list[Problem]) -> None:
    if clocks is None:
        return
    if not isinstance(clocks, Mapping):
        remedy = "write clocks: {graphics_mhz: [1200, 1980]}"
        problems.append(_problem("clocks", clocks, "not a dictionary", remedy))
        return
    problems += _unknown(clocks, CLOCK_KEYS, f"{VARIABLE}.clocks")
    for key in CLOCK_KEYS:
        value = clocks.get(key)
        if value is None:
            continue
        pair = value if isinstance(value, list) else [value, value]
        texts = [_whole(item, MOST_MHZ) for item in pair]
        name = f"clocks.{key}"
        if value == DEFAULT:
            values[f"{key.removesuffix('_mhz')}_clocks_mhz"] = DEFAULT
        elif len(pair) != 2 or None in texts or DEFAULT in texts:
            remedy = "give MHz: 1980, [1200, 1980], or default"
            problems.append(_problem(name, value, "neither a clock nor a lowest and a highest one", remedy))
        elif pair[0] > pair[1]:
            problems.append(_problem(name, value, "the lowest clock is above the highest", f"write {pair[::-1]}"))
        else:
            values[f"{key.removesuffix('_mhz')}_clocks_mhz"] = ",".join(map(str, texts))


def _needs_persistence(policy: Policy, problems: list[Problem]) -> None:
    """Without persistence the driver forgets with the last program that closes the GPU."""
    kept = {
        "power_limit_watts": policy.power_limit_watts,
        "clocks": policy.graphics_clocks_mhz or policy.memory_clocks_mhz,
        "compute_mode": policy.compute_mode,
    }
    forgotten = [name for name, value in kept.items() if value not in (None, DEFAULT)]
    if forgotten and not policy.persistence:
        problems.append(
            _problem(
                "persistence",
                policy.persistence,
                f"{' and '.join(forgotten)} would be forgotten whenever no program uses the GPU",
                f"set it to true, or leave out {' and '.join(forgotten)}",
            )
        )


def _unknown(given: Mapping[Any, Any], known: tuple[str, ...], variable: str) -> list[Problem]:
    problems = []
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            problems.append(Problem(f"{variable}.{key}", given[key], "no such key", remedy))
    return problems


def _problem(key: str, value: Any, message: str, remedy: str) -> Problem:
    return Problem(f"{VARIABLE}.{key}", value, message, remedy)


def _whole(value: Any, most: int) -> str | None:
    """A whole number above zero as nvidia-smi takes it, or the word default."""
    if value == DEFAULT:
        return DEFAULT
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        return None
    return str(value)


def boot_commands(policy: Policy, program: str = NVIDIA_SMI) -> list[str]:
    """What a reboot forgets, in the order in which it is set: the rest holds only in persistence mode."""
    commands = []
    if policy.persistence is not None:
        # Goes through nvidia-persistenced where that runs, whichever mode its unit starts it in.
        commands.append(f"-pm {int(policy.persistence)}")
    if policy.compute_mode:
        commands.append(f"-c {policy.compute_mode.upper()}")
    if policy.power_limit_watts not in (None, DEFAULT):
        commands.append(f"-pl {policy.power_limit_watts}")
    for clocks, lock, reset in (
        (policy.graphics_clocks_mhz, "-lgc", "-rgc"),
        (policy.memory_clocks_mhz, "-lmc", "-rmc"),
    ):
        if clocks:
            commands.append(reset if clocks == DEFAULT else f"{lock} {clocks}")
    return [f"{program} {command}" for command in commands]


def boot_unit(policy: Policy, program: str = NVIDIA_SMI) -> str:
    """One unit sets them at boot, and again when nvidia-persistenced was restarted, which makes idle GPUs forget."""
    lines = "".join(f"ExecStart={command}\n" for command in boot_commands(policy, program) or ["/usr/bin/true"])
    return f"""\
# Managed by ironrack: gpu_fabric_policy, as far as a reboot forgets it.
[Unit]
Description=Persistence, power limit and clocks of the GPUs
# Not the case until the first boot with the driver.
ConditionPathExists=/proc/driver/nvidia/version
Wants=nvidia-persistenced.service
PartOf=nvidia-persistenced.service
After=systemd-modules-load.service nvidia-persistenced.service nvidia-fabricmanager.service
Before=ironrack-gpu.service

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=300
{lines}\
NoNewPrivileges=yes
ProtectSystem=full
ProtectHome=yes
PrivateTmp=yes
# No ProtectClock and no PrivateDevices: both close the device policy, and the GPUs with it.
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""
