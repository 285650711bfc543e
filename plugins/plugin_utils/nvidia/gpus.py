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


@dataclass
class Hardware:
    gpus: list[Gpu] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # what no row tells the generation of
    obsolete: list[str] = field(default_factory=list)  # older than every branch
    nvswitches: int = 0
    origin: str = "nothing"  # bus | nvidia-smi | inventory | nothing

    @property
    def generations(self) -> list[str]:
        """Oldest first."""
        found = {gpu.generation for gpu in self.gpus}
        return [name for name in ORDER if name in found]

    @property
    def blackwell_hgx(self) -> bool:
        return sum(gpu.form == "sxm" and gpu.generation.startswith("blackwell") for gpu in self.gpus) >= HGX_GPUS

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
        counts: dict[str, int] = {}
        for gpu in self.gpus:
            counts[gpu.name] = counts.get(gpu.name, 0) + 1
        return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"


def number(value: Any) -> int | None:
    """0x2330 and 2330, as /sys and lspci write it."""
    text = str(value or "").lower().removeprefix("0x")
    return int(text, 16) if re.fullmatch(r"[0-9a-f]{1,8}", text) else None


def by_device(device: int) -> Gpu | str | None:
    """The GPU of a PCI device id; "obsolete", or None when no row knows it."""
    board = BOARDS.get(device)
    if board:
        return Gpu(board.name, board.generation, board.form, True)
    for row in RANGES:
        if row.first <= device <= row.last:
            if row.generation is None:
                return "obsolete"
            return Gpu(f"{row.generation} GPU (10de:{device:04x})", row.generation, "pcie", False)
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


def identify(facts: Mapping[str, Any], declared: Any) -> Hardware:
    hardware = Hardware()
    functions = _entries(facts.get("nvidia_functions"))
    for function in functions:
        kind = str(function.get("class") or "").lower().removeprefix("0x")
        device = number(function.get("device"))
        if kind.startswith(NVSWITCH_CLASS):
            hardware.nvswitches += 1
        elif kind.startswith("03") and device is not None:
            found = by_device(device)
            label = f"10de:{device:04x} at {function.get('address', '?')}"
            if isinstance(found, Gpu):
                hardware.gpus.append(found)
            else:
                (hardware.obsolete if found else hardware.unknown).append(label)
    if hardware.gpus or hardware.unknown or hardware.obsolete:
        hardware.origin = "bus"
        return hardware
    for origin, names in (("nvidia-smi", _names(facts.get("gpus"))), ("inventory", _names(declared))):
        for name in names:
            gpu = by_name(name)
            if gpu:
                hardware.gpus.append(gpu)
            else:
                hardware.unknown.append(name)
        if names:
            hardware.origin = origin
            break
    return hardware
