"""What the checks of a preflight are made of: verdicts, a view of one host's facts, and the list of all checks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

Facts = Mapping[str, Any]

ORDER = ("pass", "skip", "warn", "fail")
NOT_DATACENTRE = re.compile(r"geforce|rtx|quadro|titan", re.IGNORECASE)


@cache
def data() -> dict[str, Any]:
    text = (Path(__file__).parent / "data" / "preflight.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@dataclass(frozen=True)
class Settings:
    """What a site may set: variables of the role preflight, without their prefix."""

    fail_on: str = "fail"
    accept: Sequence[str] = ()
    xid_hours: float = 24
    clock_skew_seconds: float = 30
    min_free_gib: Mapping[str, float] = field(default_factory=lambda: {"prefix": 10, "state_dir": 20, "shm": 8})


@dataclass(frozen=True)
class Verdict:
    status: str
    measured: str
    expected: str = ""
    remedy: str = ""


def passed(measured: str, expected: str = "") -> Verdict:
    return Verdict("pass", measured, expected)


def skipped(reason: str) -> Verdict:
    return Verdict("skip", reason)


def warned(measured: str, expected: str, remedy: str) -> Verdict:
    return Verdict("warn", measured, expected, remedy)


def failed(measured: str, expected: str, remedy: str) -> Verdict:
    return Verdict("fail", measured, expected, remedy)


@dataclass(frozen=True)
class Node:
    """One host's facts, with what is asked of them again and again."""

    host: str
    facts: Facts
    plan: Mapping[str, Any]
    settings: Settings

    @property
    def health(self) -> Facts:
        return self.facts.get("health") or {}

    @property
    def gpus(self) -> Sequence[Facts]:
        """As nvidia-smi -q tells."""
        return self.health.get("gpus") or []

    @property
    def nvidia(self) -> Facts:
        return self.facts.get("nvidia") or {}

    @property
    def driver(self) -> Facts:
        return self.facts.get("nvidia_driver") or {}

    @property
    def version(self) -> str | None:
        """Version of the driver that runs."""
        return self.driver.get("loaded") or self.nvidia.get("driver_version")

    @property
    def packages(self) -> Sequence[Facts]:
        return [package for package in self.facts.get("packages") or [] if str(package["state"]).endswith("i")]

    @property
    def release(self) -> Facts:
        return self.health.get("release") or {}

    @property
    def kernels(self) -> Sequence[Facts]:
        return self.facts.get("kernels") or []

    @property
    def running(self) -> str:
        return str((self.facts.get("kernel") or {}).get("release"))

    @property
    def virtual(self) -> bool:
        return bool(self.health.get("virtual"))

    @property
    def nvlink(self) -> bool:
        return self.nvidia.get("topology") == "nvlink"

    @property
    def rdma(self) -> Sequence[Facts]:
        return self.facts.get("rdma") or []

    @property
    def variant(self) -> str:
        return str((self.plan.get("runtime") or {}).get("variant"))

    @property
    def declared(self) -> Sequence[Facts]:
        """GPUs of the inventory; with the CPU build they are slots."""
        node = (self.plan.get("nodes") or {}).get(self.host) or {}
        return [] if self.variant == "cpu" else node.get("gpus") or []

    @property
    def has_gpus(self) -> bool:
        """Has them, or should have them."""
        return bool(self.declared or self.facts.get("gpus") or self.nvidia.get("pci_devices"))

    def events(self, kind: str) -> list[Facts]:
        return [event for event in (self.health.get("kernel_log") or {}).get("events") or [] if event["kind"] == kind]

    def service(self, name: str) -> str | None:
        return ((self.health.get("services") or {}).get(name) or {}).get("active")

    def gpu_names(self) -> list[str]:
        return [str(gpu.get("name") or "") for gpu in self.gpus or self.facts.get("gpus") or []]

    def those(self, wrong: Callable[[Facts], object]) -> list[Facts]:
        return [gpu for gpu in self.gpus if wrong(gpu)]


Judge = Callable[[Node], Verdict]


@dataclass(frozen=True)
class Check:
    id: str
    group: tuple[str, ...]
    needs: str
    judge: Judge


def registry(checks: list[Check]) -> Callable[..., Callable[[Judge], Judge]]:
    """A decorator that adds checks to the list: name, numbers of the field reports, and what the host needs for it.

    needs: `gpu` for hosts that have or should have GPUs, `details` for those whose nvidia-smi -q could be read.
    """

    def check(name: str, *group: str, needs: str = "") -> Callable[[Judge], Judge]:
        def register(judge: Judge) -> Judge:
            checks.append(Check(name, group, needs, judge))
            return judge

        return register

    return check


def on(gpus: Sequence[Facts]) -> str:
    """GPU 0, 3"""
    return "GPU " + ", ".join(str(gpu.get("index", gpu.get("gpu"))) for gpu in gpus)


def numbers(version: str) -> tuple[int, ...]:
    """Comparable: 580.65.06 is below 580.105.08."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def upstream(version: str) -> str:
    """580.95.05-0ubuntu1 -> 580.95.05"""
    return re.split(r"[-+~]", version.rpartition(":")[2])[0]


def consumer(name: str) -> bool:
    return NOT_DATACENTRE.search(name) is not None


def hours(seconds: float) -> str:
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
