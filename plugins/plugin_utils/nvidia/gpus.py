# SPDX-License-Identifier: Apache-2.0
"""Which GPUs and NVSwitches a host has: from the PCI bus, which needs no driver, else from names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .matrix import BOARDS, GENERATIONS, HGX_GPUS, NAMES, NVSWITCH_CLASS, RANGES

ORDER = list(GENERATIONS)


@dataclass(frozen=True)
class Gpu:
    name: str
    generation: str
    form: str
    datacenter: bool
    second_hand: bool = field(default=False, compare=False)  # of a row that is not verified


@dataclass
class Hardware:
    gpus: list[Gpu] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # what no row tells the generation of
    obsolete: list[str] = field(default_factory=list)  # older than every branch
    nvswitches: int = 0
    origin: str = "nothing"  # bus | nvidia-smi | inventory | nothing
    declared: list[Gpu] = field(default_factory=list)  # what the inventory names, as far as its names are known
    warnings: list[str] = field(default_factory=list)

    @property
    def generations(self) -> list[str]:
        """Oldest first."""
        found = {gpu.generation for gpu in self.gpus}
        return [name for name in ORDER if name in found]

    @property
    def blackwell_modules(self) -> int:
        return _blackwell_modules(self.gpus)

    @property
    def blackwell_hgx(self) -> bool:
        """A board of eight. One that has lost a GPU is still a board: what is declared counts as well."""
        found = self.blackwell_modules
        return found > 0 and max(found, _blackwell_modules(self.declared)) >= HGX_GPUS

    @property
    def rack_scale(self) -> bool:
        """GB200 and GB300: NVLink between nodes. The switches are in trays of their own."""
        return any(gpu.form == "superchip" and gpu.generation.startswith("blackwell") for gpu in self.gpus)

    @property
    def has_nvswitch(self) -> bool:
        if self.nvswitches or self.blackwell_hgx:
            return True
        # Names alone: boards of eight SXM modules have switches, those of four are wired to each other.
        return self.origin != "bus" and sum(gpu.form == "sxm" for gpu in self.gpus) >= HGX_GPUS

    @property
    def datacenter(self) -> bool:
        return bool(self.gpus) and all(gpu.datacenter for gpu in self.gpus)

    def summary(self) -> str:
        return _count([gpu.name for gpu in self.gpus]) or "no GPU"


def _count(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def _blackwell_modules(gpus: Sequence[Gpu]) -> int:
    return sum(gpu.form == "sxm" and gpu.generation.startswith("blackwell") for gpu in gpus)


def number(value: Any) -> int | None:
    """0x2330 and 2330, as /sys and lspci write it."""
    text = str(value or "").lower().removeprefix("0x")
    return int(text, 16) if re.fullmatch(r"[0-9a-f]{1,8}", text) else None


def by_device(device: int) -> Gpu | str | None:
    """The GPU of a PCI device id; "obsolete", or None when no row knows it."""
    board = BOARDS.get(device)
    if board:
        return Gpu(board.name, board.generation, board.form, True, not board.verified)
    for row in RANGES:
        if row.first <= device <= row.last:
            if row.generation is None:
                return "obsolete"
            name = f"{row.generation} GPU (10de:{device:04x})"
            return Gpu(name, row.generation, "pcie", False, not row.verified)
    return None


def by_name(name: str) -> Gpu | None:
    for row in NAMES:
        if re.search(row.pattern, name, re.IGNORECASE):
            return Gpu(name, row.generation, row.form, row.datacenter)
    return None


def _entries(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]


def _names(value: Any) -> list[str]:
    """Names of declared (with a count) or found GPUs, one an element."""
    names: list[str] = []
    for entry in _entries(value):
        count = entry.get("count", 1)
        if entry.get("name") and isinstance(count, int) and not isinstance(count, bool) and 0 < count <= 64:
            names += [str(entry["name"])] * count
    return names


def _by_its_name(device: int, found: Gpu | None, named: Mapping[str, Sequence[Gpu]], hardware: Hardware) -> Gpu | None:
    """A device that is no known board, by the name that the driver or the inventory gives it.

    An id tells the generation at best; whether the GPU is a module on a board with switches, only its name does.
    """
    for where, gpus in named.items():
        fitting = {gpu for gpu in gpus if found is None or gpu.generation == found.generation}
        if len(fitting) == 1:
            gpu = fitting.pop()
            told = f"10de:{device:04x} is no board known here: taken for {gpu.name}, as {where} says"
            if told not in hardware.warnings:
                hardware.warnings.append(told)
            return gpu
    return found


def _kinds(gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    return sorted((gpu.generation, gpu.form) for gpu in gpus)


def identify(facts: Mapping[str, Any], declared: Any) -> Hardware:
    hardware = Hardware()
    functions = _entries(facts.get("nvidia_functions"))
    told = {"nvidia-smi": _names(facts.get("gpus")), "the variable gpus": _names(declared)}
    named = {where: [gpu for gpu in map(by_name, names) if gpu] for where, names in told.items()}
    hardware.declared = named["the variable gpus"]
    for function in functions:
        kind = str(function.get("class") or "").lower().removeprefix("0x")
        device = number(function.get("device"))
        if kind.startswith(NVSWITCH_CLASS):
            hardware.nvswitches += 1
        elif kind.startswith("03") and device is not None:
            found = by_device(device)
            if device not in BOARDS and not isinstance(found, str):
                found = _by_its_name(device, found, named, hardware)
            label = f"10de:{device:04x} at {function.get('address', '?')}"
            if isinstance(found, Gpu):
                hardware.gpus.append(found)
            else:
                (hardware.obsolete if found else hardware.unknown).append(label)
    if hardware.gpus or hardware.unknown or hardware.obsolete:
        hardware.origin = "bus"
        names = told["the variable gpus"]
        on_bus = len(hardware.gpus) + len(hardware.unknown) + len(hardware.obsolete)
        if names and (len(names) != on_bus or _kinds(hardware.gpus) != _kinds(hardware.declared)):
            hardware.warnings.append(
                f"gpus declares {_count(names)}, on the PCI bus are"
                f" {', '.join([hardware.summary(), *hardware.unknown, *hardware.obsolete])}: correct gpus, or look for"
                f" the GPU that is missing"
            )
        return hardware
    for origin, where in (("nvidia-smi", "nvidia-smi"), ("inventory", "the variable gpus")):
        for name in told[where]:
            gpu = by_name(name)
            if gpu:
                hardware.gpus.append(gpu)
            else:
                hardware.unknown.append(name)
        if told[where]:
            hardware.origin = origin
            break
    return hardware
