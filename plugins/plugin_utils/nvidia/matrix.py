# SPDX-License-Identifier: Apache-2.0
"""What goes with what, as data. Each row names its source; `verified` is false where that source is second hand.

Package names change between branches, and NVIDIA's repositories cannot be asked from a test: a row that is not
verified was read in someone else's listing of a repository, or deduced from its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

GUIDE = "NVIDIA Driver Installation Guide, docs.nvidia.com/datacenter/tesla/driver-installation-guide"
LIFECYCLE = (
    "NVIDIA Data Center Drivers, Supported Drivers and CUDA Toolkit Versions,"
    " docs.nvidia.com/datacenter/tesla/drivers (editions 580, 615, 620)"
)
COMPATIBILITY = "CUDA Compatibility, docs.nvidia.com/deploy/cuda-compatibility"
MODULES = f"{GUIDE}/kernel-modules.html"
OPEN_ONLY = "NVIDIA Transitions Fully Towards Open-Source GPU Kernel Modules, developer.nvidia.com/blog, 2024-07"
PCI_IDS = "The PCI ID Repository, pci-ids.ucw.cz, vendor 10de"
REPOSITORY = "listing of developer.download.nvidia.com/compute/cuda/repos, 2026-05 to 2026-07, second hand"
UBUNTU_ARCHIVE = "packages.ubuntu.com, noble-updates and jammy-updates, restricted and multiverse"
DEBIAN_ARCHIVE = "Debian archive, non-free and contrib, apt-cache of bookworm and trixie, 2026-11"


@dataclass(frozen=True)
class Row:
    source: str
    verified: bool


# --- CUDA ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuda(Row):
    """A major version of CUDA, as python_env_variant names it."""

    runtime: str  # what the wheels were built with
    floor: int  # first driver branch that runs it
    native: int  # first driver branch that knows all its features
    toolkits: tuple[str, ...]  # cuda-toolkit-<major>-<minor> known in NVIDIA's repositories; the first is the default
    first_generation: str


CUDA = {
    "cu129": Cuda(
        source=f"{COMPATIBILITY}/minor-version-compatibility.html, table 1; CUDA 12.9 release notes, table of drivers",
        verified=True,
        runtime="12.9",
        floor=525,
        native=575,
        toolkits=("12.9", "12.8", "12.6", "12.4"),
        first_generation="maxwell",
    ),
    "cu130": Cuda(
        source=f"{COMPATIBILITY}/minor-version-compatibility.html, table 1; CUDA 13.0 release notes, table of drivers",
        verified=True,
        runtime="13.0",
        floor=580,
        native=580,
        toolkits=("13.0", "13.1"),
        first_generation="turing",
    ),
}

# vLLM's published builds hold code for compute capability 7.5 and newer.
VLLM_FIRST_GENERATION = "turing"


# --- driver branches -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branch(Row):
    status: str  # long-term | production | new-feature | ended
    end_of_life: str | None
    cuda: str  # newest CUDA its libcuda knows
    version: str | None  # last release known to be in NVIDIA's repositories: what is installed unless told otherwise
    open_default: bool  # NVIDIA's own default is the open module
    open_only: bool = False


BRANCHES: dict[int, Branch] = {
    535: Branch(LIFECYCLE, True, "ended", "2026-06", "12.2", "535.288.01", open_default=False),
    550: Branch(LIFECYCLE, True, "ended", None, "12.4", "550.163.01", open_default=False),
    570: Branch(LIFECYCLE, True, "ended", "2026-02", "12.8", "570.211.01", open_default=True),
    575: Branch(LIFECYCLE, True, "ended", None, "12.9", "575.57.08", open_default=True),
    580: Branch(LIFECYCLE, True, "long-term", "2028-06", "13.0", "580.159.04", open_default=True),
    590: Branch(LIFECYCLE, True, "ended", None, "13.1", "590.48.01", open_default=True),
    595: Branch(LIFECYCLE, False, "production", "2027-03", "13.2", "595.71.05", open_default=True),
    610: Branch(LIFECYCLE, False, "ended", "2026-08", "13.3", "610.43.02", open_default=True),
    620: Branch(
        f"{LIFECYCLE}; edition 620 of the installation guide describes the open modules alone",
        False,
        "long-term",
        "2029-09",
        "13.3",
        None,
        open_default=True,
        open_only=True,
    ),
}
DEFAULT_BRANCH = 580


# --- GPU generations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation(Row):
    open_module: str  # never | possible | only
    first_branch: int
    last_branch: int | None = None


# Oldest first.
GENERATIONS: dict[str, Generation] = {
    "maxwell": Generation(f"{MODULES}; release 580 is the last for it", True, "never", 535, 580),
    "pascal": Generation(f"{MODULES}; release 580 is the last for it", True, "never", 535, 580),
    "volta": Generation(f"{MODULES}; release 580 is the last for it", True, "never", 535, 580),
    "turing": Generation(MODULES, True, "possible", 535),
    "ampere": Generation(MODULES, True, "possible", 535),
    "ada": Generation(MODULES, True, "possible", 535),
    "hopper": Generation(MODULES, True, "possible", 535),
    "grace_hopper": Generation(OPEN_ONLY, True, "only", 535),
    "blackwell": Generation(f"{OPEN_ONLY}; Data Center driver 570 release notes", True, "only", 570),
    "blackwell_ultra": Generation(f"{OPEN_ONLY}; first branch: installation reports of HGX B300", False, "only", 580),
}


# --- GPUs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range(Row):
    """Device ids NVIDIA gave out to one generation. None as generation: older than every branch in BRANCHES."""

    first: int
    last: int
    generation: str | None


RANGES = (
    Range(PCI_IDS, True, 0x0000, 0x133F, None),
    Range(PCI_IDS, True, 0x1340, 0x15EF, "maxwell"),
    Range(PCI_IDS, True, 0x15F0, 0x15FF, "pascal"),
    Range(PCI_IDS, True, 0x1600, 0x1724, "maxwell"),
    Range(PCI_IDS, True, 0x1725, 0x172F, "pascal"),
    Range(PCI_IDS, True, 0x1730, 0x1AFF, "maxwell"),
    Range(PCI_IDS, True, 0x1B00, 0x1D7F, "pascal"),
    Range(PCI_IDS, True, 0x1D80, 0x1DFF, "volta"),
    Range(PCI_IDS, True, 0x1E00, 0x1FFF, "turing"),
    Range(PCI_IDS, True, 0x2080, 0x20FF, "ampere"),
    Range(PCI_IDS, True, 0x2180, 0x21FF, "turing"),
    Range(PCI_IDS, True, 0x2200, 0x22FF, "ampere"),
    Range(PCI_IDS, True, 0x2300, 0x23FF, "hopper"),
    Range(PCI_IDS, True, 0x2400, 0x25FF, "ampere"),
    Range(PCI_IDS, True, 0x2600, 0x28FF, "ada"),
    Range(f"{PCI_IDS}, as quoted in public code", False, 0x2900, 0x2FFF, "blackwell"),
    Range(f"{PCI_IDS}, as quoted in public code", False, 0x3180, 0x31FF, "blackwell_ultra"),
)


@dataclass(frozen=True)
class Board(Row):
    """A data centre board. Every other GPU is taken for a workstation's or a consumer's."""

    name: str
    generation: str
    form: str  # sxm | pcie | superchip


def _boards(source: str, verified: bool, *rows: tuple[int, str, str, str]) -> dict[int, Board]:
    return {device: Board(source, verified, name, generation, form) for device, name, generation, form in rows}


BOARDS: dict[int, Board] = {
    **_boards(
        PCI_IDS,
        True,
        (0x15F7, "Tesla P100-PCIE-12GB", "pascal", "pcie"),
        (0x15F8, "Tesla P100-PCIE-16GB", "pascal", "pcie"),
        (0x15F9, "Tesla P100-SXM2-16GB", "pascal", "sxm"),
        (0x1B38, "Tesla P40", "pascal", "pcie"),
        (0x1BB3, "Tesla P4", "pascal", "pcie"),
        (0x1DB1, "Tesla V100-SXM2-16GB", "volta", "sxm"),
        (0x1DB4, "Tesla V100-PCIE-16GB", "volta", "pcie"),
        (0x1DB5, "Tesla V100-SXM2-32GB", "volta", "sxm"),
        (0x1DB6, "Tesla V100-PCIE-32GB", "volta", "pcie"),
        (0x1DB8, "Tesla V100-SXM3-32GB", "volta", "sxm"),
        (0x1EB8, "Tesla T4", "turing", "pcie"),
        (0x20B0, "NVIDIA A100-SXM4-40GB", "ampere", "sxm"),
        (0x20B1, "NVIDIA A100-PCIE-40GB", "ampere", "pcie"),
        (0x20B2, "NVIDIA A100-SXM4-80GB", "ampere", "sxm"),
        (0x20B5, "NVIDIA A100 80GB PCIe", "ampere", "pcie"),
        (0x20B7, "NVIDIA A30", "ampere", "pcie"),
        (0x20F1, "NVIDIA A100-PCIE-40GB", "ampere", "pcie"),
        (0x20F3, "NVIDIA A800-SXM4-80GB", "ampere", "sxm"),
        (0x20F5, "NVIDIA A800 80GB PCIe", "ampere", "pcie"),
        (0x2235, "NVIDIA A40", "ampere", "pcie"),
        (0x2236, "NVIDIA A10", "ampere", "pcie"),
        (0x2237, "NVIDIA A10G", "ampere", "pcie"),
        (0x25B6, "NVIDIA A16", "ampere", "pcie"),
        (0x26B5, "NVIDIA L40", "ada", "pcie"),
        (0x26B9, "NVIDIA L40S", "ada", "pcie"),
        (0x26BA, "NVIDIA L20", "ada", "pcie"),
        (0x27B6, "NVIDIA L2", "ada", "pcie"),
        (0x27B8, "NVIDIA L4", "ada", "pcie"),
        (0x2321, "NVIDIA H100 NVL", "hopper", "pcie"),
        (0x2322, "NVIDIA H800 PCIe", "hopper", "pcie"),
        (0x2324, "NVIDIA H800", "hopper", "sxm"),
        (0x2329, "NVIDIA H20", "hopper", "sxm"),
        (0x2330, "NVIDIA H100 80GB HBM3", "hopper", "sxm"),
        (0x2331, "NVIDIA H100 PCIe", "hopper", "pcie"),
        (0x233B, "NVIDIA H200 NVL", "hopper", "pcie"),
    ),
    **_boards("nvidia-smi -q of two H200s, recorded by this project", True, (0x2335, "NVIDIA H200", "hopper", "sxm")),
    **_boards(
        f"{PCI_IDS}, as quoted in public code",
        False,
        (0x2342, "NVIDIA GH200 480GB", "grace_hopper", "superchip"),
        (0x2348, "NVIDIA GH200 144G HBM3e", "grace_hopper", "superchip"),
        (0x2901, "NVIDIA B200", "blackwell", "sxm"),
        (0x2941, "NVIDIA GB200", "blackwell", "superchip"),
        (0x29BC, "NVIDIA B100", "blackwell", "sxm"),
        (0x2BB5, "NVIDIA RTX PRO 6000 Blackwell Server Edition", "blackwell", "pcie"),
        (0x3182, "NVIDIA B300 SXM6 AC", "blackwell_ultra", "sxm"),
        (0x31C2, "NVIDIA GB300", "blackwell_ultra", "superchip"),
        (0x31C3, "NVIDIA GB300", "blackwell_ultra", "superchip"),
    ),
}


@dataclass(frozen=True)
class Name(Row):
    """Reads a GPU's name where there is no PCI id: the inventory's, or nvidia-smi's. The first that fits counts."""

    pattern: str
    generation: str
    form: str
    datacenter: bool


_NAMES = "product names as nvidia-smi prints them; NVIDIA CUDA GPUs, developer.nvidia.com/cuda-gpus"
NAMES = (
    Name(_NAMES, True, r"\bGB300\b", "blackwell_ultra", "superchip", True),
    Name(_NAMES, True, r"\bB300\b", "blackwell_ultra", "sxm", True),
    Name(_NAMES, True, r"\bGB200\b", "blackwell", "superchip", True),
    Name(_NAMES, True, r"\bB[12]00\b", "blackwell", "sxm", True),
    Name(_NAMES, True, r"\bRTX PRO \d+ Blackwell Server\b", "blackwell", "pcie", True),
    Name(_NAMES, True, r"\bRTX PRO \d+ Blackwell\b|\bRTX 50\d\d\b|\bGB10\b", "blackwell", "pcie", False),
    Name(_NAMES, True, r"\bGH200\b", "grace_hopper", "superchip", True),
    Name(_NAMES, True, r"\bH(100|200|800) (PCIe|NVL)\b", "hopper", "pcie", True),
    Name(_NAMES, True, r"\bH(100|200|800|20)\b", "hopper", "sxm", True),
    Name(_NAMES, True, r"\bL(2|4|20|40|40S)\b", "ada", "pcie", True),
    Name(_NAMES, True, r"\bRTX 40\d\d\b|\bRTX \d+ Ada\b", "ada", "pcie", False),
    Name(_NAMES, True, r"\bA(100|800)-SXM", "ampere", "sxm", True),
    Name(_NAMES, True, r"\bA(100|800|30|40|10|10G|16|2)\b", "ampere", "pcie", True),
    Name(_NAMES, True, r"\bRTX 30\d\d\b|\bRTX A\d{4}\b", "ampere", "pcie", False),
    Name(_NAMES, True, r"\bT4\b", "turing", "pcie", True),
    Name(_NAMES, True, r"\bRTX 20\d\d\b|\bQuadro RTX\b|\bTITAN RTX\b|\bGTX 16\d\d\b", "turing", "pcie", False),
    Name(_NAMES, True, r"\bV100-SXM", "volta", "sxm", True),
    Name(_NAMES, True, r"\bV100\b", "volta", "pcie", True),
    Name(_NAMES, True, r"\bTITAN V\b", "volta", "pcie", False),
    Name(_NAMES, True, r"\bP100-SXM", "pascal", "sxm", True),
    Name(_NAMES, True, r"\bTesla P(100|40|6|4)\b", "pascal", "pcie", True),
    Name(_NAMES, True, r"\bGTX 10\d\d\b|\bTITAN Xp\b", "pascal", "pcie", False),
    Name(_NAMES, True, r"\bTesla M(40|60|10|6|4)\b", "maxwell", "pcie", True),
    Name(_NAMES, True, r"\bGTX 9\d\d\b", "maxwell", "pcie", False),
)

# NVSwitches are bridges of NVIDIA (class 0x0680) up to Hopper. From Blackwell on the host sees no such bridge: the
# board's switches are reached through ConnectX functions, and a full board of eight tells that they are there.
NVSWITCH_CLASS = "0680"
HGX_GPUS = 8


# --- distributions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution(Row):
    """A distribution's release. NVIDIA signs its repositories with one key, that for Debian 13 with another."""

    id: str
    version: str
    codename: str
    family: str  # debian | ubuntu | rhel
    repository: str  # folder below the mirror of NVIDIA's repositories
    key_file: str
    key_fingerprint: str
    accepted: bool  # hosts of it are planned for; none of its rows has been installed by a test yet
    archive_branch: int | None  # branch of the distribution's own packages
    archive_open: bool  # its open module is installable
    first_branch: int | None  # oldest branch in NVIDIA's repository for it
    first_toolkit: str = ""  # oldest CUDA toolkit there; empty, all of CUDA's rows


KEY_2022 = "EB693B3035CD5710E231E123A4B469963BF863CC"
KEY_2025 = "02182E60104FCDC26EAE1B8597A5D4CB8793F200"

DISTRIBUTIONS = (
    Distribution(
        source=f"{DEBIAN_ARCHIVE}; {REPOSITORY}. nvidia-open-kernel-dkms lags behind and is held back as broken there",
        verified=True,
        id="debian",
        version="12",
        codename="bookworm",
        family="debian",
        repository="debian12",
        key_file="3bf863cc.pub",
        key_fingerprint=KEY_2022,
        accepted=True,
        archive_branch=535,
        archive_open=False,
        first_branch=530,
    ),
    Distribution(
        source=f"{DEBIAN_ARCHIVE}; {REPOSITORY}; github.com/NVIDIA/cuda-repo-management issues 38 and 40 (it began with"
        " CUDA 13.1 and branch 590, older ones were asked for in vain). It has a key of its own (8793F200.pub)",
        verified=False,
        id="debian",
        version="13",
        codename="trixie",
        family="debian",
        repository="debian13",
        key_file="8793F200.pub",
        key_fingerprint=KEY_2025,
        accepted=True,
        archive_branch=550,
        archive_open=True,
        first_branch=590,
        first_toolkit="13.1",
    ),
    Distribution(
        source=f"{UBUNTU_ARCHIVE}; {REPOSITORY}",
        verified=True,
        id="ubuntu",
        version="22.04",
        codename="jammy",
        family="ubuntu",
        repository="ubuntu2204",
        key_file="3bf863cc.pub",
        key_fingerprint=KEY_2022,
        accepted=True,
        archive_branch=580,
        archive_open=True,
        first_branch=515,
    ),
    Distribution(
        source=f"{UBUNTU_ARCHIVE}; {REPOSITORY}",
        verified=True,
        id="ubuntu",
        version="24.04",
        codename="noble",
        family="ubuntu",
        repository="ubuntu2404",
        key_file="3bf863cc.pub",
        key_fingerprint=KEY_2022,
        accepted=True,
        archive_branch=580,
        archive_open=True,
        first_branch=550,
    ),
    *(
        Distribution(
            source=f"{GUIDE}, Red Hat Enterprise Linux",
            verified=False,
            id=name,
            version="9",
            codename="",
            family="rhel",
            repository="rhel9",
            key_file="",
            key_fingerprint="",
            accepted=False,
            archive_branch=None,
            archive_open=False,
            first_branch=515,
        )
        for name in ("rhel", "rocky", "almalinux")
    ),
)


# --- package names ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names(Row):
    """Names of packages for branches from first to last; {b} stands for the branch, {k} for a kernel release."""

    family: str
    origin: str  # nvidia | distribution
    first: int
    last: int
    open: tuple[str, ...]
    proprietary: tuple[str, ...]
    dkms: tuple[str, str]  # name of the module in DKMS, open and proprietary
    fabric_manager: tuple[str, ...] = ()
    nvlink5: tuple[str, ...] = ()
    imex: tuple[str, ...] = ()
    precompiled: tuple[str, str] | None = None  # open and proprietary


NAMES_OF_PACKAGES = (
    Names(
        source=f"{GUIDE}/debian.html; {REPOSITORY}",
        verified=False,
        family="debian",
        origin="nvidia",
        first=515,
        last=555,
        open=("cuda-drivers-{b}", "nvidia-kernel-open-dkms"),
        proprietary=("cuda-drivers-{b}",),
        dkms=("nvidia-current-open", "nvidia-current"),
        fabric_manager=("nvidia-fabricmanager-{b}", "libnvidia-nscq-{b}"),
        imex=("nvidia-imex-{b}",),
    ),
    Names(
        source=f"{GUIDE}/compute-only-and-desktop-installation.html; {REPOSITORY}",
        verified=False,
        family="debian",
        origin="nvidia",
        first=560,
        last=575,
        open=("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced", "nvidia-modprobe"),
        proprietary=("nvidia-driver-cuda", "nvidia-kernel-dkms", "nvidia-persistenced", "nvidia-modprobe"),
        dkms=("nvidia", "nvidia"),
        fabric_manager=("nvidia-fabricmanager-{b}", "libnvidia-nscq-{b}"),
        nvlink5=("nvlink5-{b}", "nvlsm"),
        imex=("nvidia-imex-{b}",),
    ),
    Names(
        source=f"{GUIDE}/compute-only-and-desktop-installation.html; {REPOSITORY}",
        verified=False,
        family="debian",
        origin="nvidia",
        first=580,
        last=580,
        open=("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced", "nvidia-modprobe"),
        proprietary=("nvidia-driver-cuda", "nvidia-kernel-dkms", "nvidia-persistenced", "nvidia-modprobe"),
        dkms=("nvidia", "nvidia"),
        fabric_manager=("nvidia-fabricmanager", "libnvidia-nscq"),
        nvlink5=("nvlink5-{b}", "nvlsm"),
        imex=("nvidia-imex",),
    ),
    Names(
        source=f"{GUIDE}/compute-only-and-desktop-installation.html; {REPOSITORY}",
        verified=False,
        family="debian",
        origin="nvidia",
        first=590,
        last=999,
        open=("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced", "nvidia-modprobe"),
        proprietary=("nvidia-driver-cuda", "nvidia-kernel-dkms", "nvidia-persistenced", "nvidia-modprobe"),
        dkms=("nvidia", "nvidia"),
        fabric_manager=("nvidia-fabricmanager", "libnvidia-nscq"),
        nvlink5=("nvlink5", "nvlsm"),
        imex=("nvidia-imex",),
    ),
    Names(
        source=f"{GUIDE}/ubuntu.html; {REPOSITORY}",
        verified=False,
        family="ubuntu",
        origin="nvidia",
        first=515,
        last=575,
        open=("libnvidia-compute-{b}", "nvidia-dkms-{b}-open", "nvidia-utils-{b}", "nvidia-compute-utils-{b}"),
        proprietary=("libnvidia-compute-{b}", "nvidia-dkms-{b}", "nvidia-utils-{b}", "nvidia-compute-utils-{b}"),
        dkms=("nvidia", "nvidia"),
        fabric_manager=("nvidia-fabricmanager-{b}", "libnvidia-nscq-{b}"),
        nvlink5=("nvlink5-{b}", "nvlsm"),
        imex=("nvidia-imex-{b}",),
    ),
    Names(
        source=f"{GUIDE}/ubuntu.html; {REPOSITORY}: driver packages keep the branch in their name, the fabric's do not",
        verified=False,
        family="ubuntu",
        origin="nvidia",
        first=580,
        last=580,
        open=("libnvidia-compute-{b}", "nvidia-dkms-{b}-open", "nvidia-utils-{b}", "nvidia-persistenced"),
        proprietary=("libnvidia-compute-{b}", "nvidia-dkms-{b}", "nvidia-utils-{b}", "nvidia-persistenced"),
        dkms=("nvidia", "nvidia"),
        fabric_manager=("nvidia-fabricmanager", "libnvidia-nscq"),
        nvlink5=("nvlink5-{b}", "nvlsm"),
        imex=("nvidia-imex",),
    ),
    Names(
        source=f"{GUIDE}/recent-updates.html, Ubuntu 590 and later packages; {GUIDE}/ubuntu.html, compute-only system",
        verified=False,
        family="ubuntu",
        origin="nvidia",
        first=590,
        last=999,
        open=("libnvidia-compute", "nvidia-dkms-open", "nvidia-persistenced", "nvidia-modprobe"),
        proprietary=("libnvidia-compute", "nvidia-dkms", "nvidia-persistenced", "nvidia-modprobe"),
        dkms=("nvidia", "nvidia"),
        fabric_manager=("nvidia-fabricmanager", "libnvidia-nscq"),
        nvlink5=("nvlink5", "nvlsm"),
        imex=("nvidia-imex",),
    ),
    Names(
        source=f"{DEBIAN_ARCHIVE}; names of the DKMS modules from memory",
        verified=False,
        family="debian",
        origin="distribution",
        first=535,
        last=550,
        # libnvidia-cfg1 by name: for nvidia-persistenced that of any branch would do, also of another source.
        open=(
            "nvidia-open-kernel-dkms",
            "libcuda1",
            "libnvidia-cfg1",
            "nvidia-smi",
            "nvidia-persistenced",
            "nvidia-modprobe",
        ),
        proprietary=(
            "nvidia-kernel-dkms",
            "libcuda1",
            "libnvidia-cfg1",
            "nvidia-smi",
            "nvidia-persistenced",
            "nvidia-modprobe",
        ),
        dkms=("nvidia-current-open", "nvidia-current"),
    ),
    Names(
        source=f"{UBUNTU_ARCHIVE}: Fabric Manager depends on nvidia-kernel-common-<branch>-server of its own version;"
        " names of the DKMS module and of IMEX from memory",
        verified=False,
        family="ubuntu",
        origin="distribution",
        first=535,
        last=999,
        open=("nvidia-headless-no-dkms-{b}-server-open", "nvidia-dkms-{b}-server-open", "nvidia-utils-{b}-server"),
        proprietary=("nvidia-headless-no-dkms-{b}-server", "nvidia-dkms-{b}-server", "nvidia-utils-{b}-server"),
        dkms=("nvidia", "nvidia"),
        fabric_manager=("nvidia-fabricmanager-{b}", "libnvidia-nscq-{b}"),
        imex=("nvidia-imex-{b}",),
        precompiled=("linux-modules-nvidia-{b}-server-open-{k}", "linux-modules-nvidia-{b}-server-{k}"),
    ),
    Names(
        source=f"{GUIDE}, Red Hat Enterprise Linux: module stream {{b}}-open or {{b}}-dkms",
        verified=False,
        family="rhel",
        origin="nvidia",
        first=515,
        last=999,
        open=("nvidia-driver-cuda", "kmod-nvidia-open-dkms", "nvidia-persistenced"),
        proprietary=("nvidia-driver-cuda", "kmod-nvidia-latest-dkms", "nvidia-persistenced"),
        dkms=("nvidia", "nvidia"),
        fabric_manager=("nvidia-fabric-manager", "libnvidia-nscq"),
        nvlink5=("nvlink5", "nvlsm"),
        imex=("nvidia-imex",),
    ),
)

# Everything that has to be of the driver's own version, and so is pinned, held and replaced together.
COUPLED = (
    "cuda-drivers*",
    "firmware-nvidia-gsp*",
    "libcuda1*",
    "libcudadebugger1*",
    "libnvcuvid1*",
    "libnvidia-*",
    "libnvsdm*",
    "nvidia-alternative*",
    "nvidia-compute-utils*",
    "nvidia-dkms*",
    "nvidia-driver*",
    "nvidia-fabricmanager*",
    "nvidia-firmware*",
    "nvidia-headless*",
    "nvidia-imex*",
    "nvidia-kernel*",
    "nvidia-modprobe*",
    "nvidia-open*",
    "nvidia-persistenced*",
    "nvidia-smi*",
    "nvidia-utils*",
    "nvlink5*",
)
# Names that fit COUPLED and are numbered on their own.
NOT_COUPLED = ("libnvidia-container*", "nvidia-kernel-common", "libnvidia-egl-*", "libnvidia-ml-dev")
