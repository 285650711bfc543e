"""What of a GPU decides memory: its chip by the name that nvidia-smi prints, and what torch sees of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .engine import Card
from .errors import PlannerError, short

# nvidia-smi's total minus its `reserved` line is what cudaMemGetInfo calls total: 143771 - 616 MiB = 139.80 GiB on an
# H200 (driver 580, nvidia-smi -q). The reserve grows with the card: (GiB that nvidia-smi prints, GiB reserved), from
# the "Free memory on device (a/b GiB)" lines of H200, H100, H100 NVL, B200, GB300, RTX 5090, 3090, 4090, T4 and L4.
_RESERVED = (
    (0.0, 0.40),
    (16.0, 0.42),
    (24.0, 0.43),
    (32.0, 0.46),
    (80.0, 0.457),
    (96.0, 0.47),
    (140.4, 0.6016),
    (179.0, 0.70),
    (278.0, 0.93),
)
# A100s keep more for ECC and row remapping: 40.00 -> 39.39 and 80.00 -> 79.25 GiB.
_RESERVED_A100 = ((0.0, 0.45), (40.0, 0.61), (80.0, 0.75))
# Unified memory: torch sees what the system leaves of 128 GB, however large the card calls itself.
_GB10_VISIBLE_GIB = 121.69


@dataclass(frozen=True)
class Chip:
    """What of a GPU decides which kernels run and how large their buffers are."""

    # Compute capability as a two-digit number.
    capability: int
    multiprocessors: int

    @property
    def hopper(self) -> bool:
        return self.capability == 90

    @property
    def blackwell(self) -> bool:
        """Datacenter Blackwell, for which vLLM has its own kernels."""
        return 100 <= self.capability < 110


# Patterns in the order in which they are tried: a later, shorter name would match earlier, longer ones too.
_CHIPS: tuple[tuple[str, Chip], ...] = (
    (r"gb10\b|spark", Chip(121, 48)),
    (r"rtx pro 6000|rtx 6000 pro", Chip(120, 188)),
    (r"rtx pro", Chip(120, 110)),
    (r"rtx 50[5-9]0", Chip(120, 84)),
    (r"thor", Chip(110, 20)),
    (r"b300", Chip(103, 148)),
    (r"b[12]00", Chip(100, 148)),
    (r"h100 pcie|h800 pcie", Chip(90, 114)),
    (r"h20\b", Chip(90, 78)),
    (r"h[12]00|h800|gh200", Chip(90, 132)),
    (r"l40|rtx 6000 ada|rtx 4090", Chip(89, 142)),
    (r"\bl20\b", Chip(89, 92)),
    (r"\bl4\b", Chip(89, 58)),
    (r"rtx 40[5-9]0|ada generation", Chip(89, 76)),
    (r"a100|a800|a30\b", Chip(80, 108)),
    (r"a40\b|a6000", Chip(86, 84)),
    (r"\ba10", Chip(86, 72)),
    (r"\ba16\b|\ba2\b", Chip(86, 10)),
    (r"rtx 30[5-9]0|rtx a\d000", Chip(86, 82)),
    (r"t4\b|rtx 20[6-8]0|quadro rtx|titan rtx", Chip(75, 40)),
    (r"gtx 16\d0", Chip(75, 24)),
    (r"v100|titan v\b|gv100", Chip(70, 80)),
    (r"p100|gp100|p40\b|p4\b|gtx 10\d0|titan xp?\b", Chip(61, 30)),
    (r"[mk][468]0\b|gtx [79]\d0", Chip(52, 24)),
)
_LARGE_CHIPS = {"rtx 5090": Chip(120, 170), "rtx 4090": Chip(89, 128)}
# A card that is not known is taken as a current datacenter card, whose kernels take the most.
UNKNOWN_CHIP = Chip(90, 132)


# Names of other makers' accelerators.
_FOREIGN = re.compile(
    r"\b(amd|radeon|instinct|mi[23]\d\d[ax]?|gfx\d+|rocm|intel|gaudi\d?|arc|gpu max|ascend|tpu|apple|moore threads)\b"
)
# The oldest chips that vLLM's kernels are built for: Turing.
LEAST_CAPABILITY = 75


def chip(gpu: Card) -> Chip:
    """The chip behind the name that nvidia-smi prints."""
    return _chip(gpu.name) or UNKNOWN_CHIP


def is_known(gpu: Card) -> bool:
    return _chip(gpu.name) is not None


@lru_cache(maxsize=1024)
def _chip(name: str) -> Chip | None:
    lower = name.lower()[:200]
    for text, found in _LARGE_CHIPS.items():
        if text in lower:
            return found
    return next((found for pattern, found in _CHIPS if re.search(pattern, lower)), None)


@lru_cache(maxsize=1024)
def is_foreign(name: str) -> bool:
    """Whether a name says that the GPU is not NVIDIA's."""
    return "nvidia" not in name.lower() and _FOREIGN.search(name.lower()[:200]) is not None


def refuse_foreign(name: str, where: str, key: str) -> None:
    """Raise for a GPU on which no CUDA build of vLLM runs."""
    if is_foreign(name):
        raise PlannerError(
            f"{where}: {short(name)} is no NVIDIA GPU; vLLM's CUDA builds do not run on it.",
            "Give an NVIDIA GPU by the name that nvidia-smi prints.",
            key,
        )


def check_usable(name: str, node: str, variant: str) -> None:
    """Raise for a GPU on which the build of vLLM does not run."""
    refuse_foreign(name, f"node {node}", f"nodes.{node}.gpus")
    found = _chip(name)
    if found is not None and found.capability < LEAST_CAPABILITY:
        build = f"the build {variant} of vLLM" if variant else "vLLM"
        raise PlannerError(
            f"node {node}: {short(name)} has compute capability {found.capability / 10}, and {build} is built for "
            f"{LEAST_CAPABILITY / 10} (Turing) and newer.",
            "Leave this GPU out.",
            f"nodes.{node}.gpus",
        )


def visible_gib(gpu: Card) -> float:
    """GiB that torch sees of the memory_total_mib that nvidia-smi prints."""
    printed = gpu.memory_total_mib / 1024
    name = gpu.name.lower()
    if chip(gpu).capability == 121:
        return min(printed, _GB10_VISIBLE_GIB)
    points = _RESERVED_A100 if "a100" in name or "a800" in name else _RESERVED
    return max(0.0, printed - _interpolate(points, printed))


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    low = points[0]
    for high in points[1:]:
        if at <= high[0]:
            return low[1] + (high[1] - low[1]) * (at - low[0]) / (high[0] - low[0])
        low = high
    return points[-1][1]
