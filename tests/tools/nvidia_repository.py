#!/usr/bin/env python3
"""Build signed apt repositories of small packages with the names, versions and relations of NVIDIA's, for tests.

    nvidia_repository.py OUT --kernel 6.1.0-40-amd64 --driver 580.159.04 [--fault debian12=signature]

Writes OUT/debian12/x86_64 and OUT/debian13/x86_64 (flat, as NVIDIA's are), OUT/kernel (kernels and headers, as a
distribution has them), and OUT/repository.json with the key's fingerprint and checksum. Key and all are for a test
alone. The same arguments give the same packages. Needs gpg; a run takes two seconds.

The packages are real packages: relations, maintainer scripts, units, DKMS sources. Stand-ins in them are what needs
the hardware: kernel modules (ELF files that hold nothing but their version), kernels, and the programs that talk to
GPUs, which are the scripts in gpu_standin/.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

EPOCH = 1735689600
DATE = "Wed, 01 Jan 2025 00:00:00 UTC"
# machine -> (Debian's architecture, folder of NVIDIA's repository, library folder, machine in an ELF header)
MACHINES = {
    "x86_64": ("amd64", "x86_64", "x86_64-linux-gnu", 62),
    "aarch64": ("arm64", "sbsa", "aarch64-linux-gnu", 183),
}
ARCHITECTURE, FOLDER, TRIPLET, ELF_MACHINE = MACHINES[platform.machine()]
# Name of the key file in each distribution's repository.
KEYS = {"debian12": "3bf863cc.pub", "debian13": "8793F200.pub"}
FAULTS = ("signature", "unsigned", "index", "package")
LIBRARIES = f"usr/lib/{TRIPLET}"
FABRIC_MANAGER = """\
LOG_LEVEL=4
LOG_FILE_NAME=/var/log/fabricmanager.log
DAEMONIZE=1
BIND_INTERFACE_IP=127.0.0.1
STARTING_TCP_PORT=16000
FABRIC_MODE=0
FABRIC_MODE_RESTART=0
STATE_FILE_NAME=/tmp/fabricmanager.state
FM_CMD_BIND_INTERFACE=127.0.0.1
FM_CMD_PORT_NUMBER=6666
FM_STAY_RESIDENT_ON_FAILURES=0
ACCESS_LINK_FAILURE_MODE=0
TRUNK_LINK_FAILURE_MODE=0
NVSWITCH_FAILURE_MODE=0
ABORT_CUDA_JOBS_ON_FM_EXIT=1
TOPOLOGY_FILE_PATH=/usr/share/nvidia/nvswitch
"""
HERE = Path(__file__).resolve().parent
RECORDED = HERE.parent / "fixtures" / "nvidia_h200x2"
STANDIN = "opt/gpu-standin"
PROGRAMS = (
    "nvidia-smi",
    "nvidia-persistenced",
    "nv-fabricmanager",
    "nvidia-imex",
    "nv-hostengine",
    "nvlsm",
    "nvidia-modprobe",
)
MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")


@dataclass
class Package:
    name: str
    version: str
    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes | str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    triggers: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        # The epoch is no part of a file's name.
        return f"{self.name}_{self.version.partition(':')[2] or self.version}_{ARCHITECTURE}.deb"

    def control(self) -> str:
        first = {"Package": self.name, "Version": self.version, "Architecture": ARCHITECTURE}
        last = {
            "Maintainer": "ironrack tests <nobody@example.org>",
            "Description": "stand-in for a test, holds nothing",
        }
        size = {"Installed-Size": str(sum(len(value) for value in self.files.values()) // 1024 + 1)}
        return "".join(f"{key}: {value}\n" for key, value in {**first, **size, **self.fields, **last}.items())


# --- packages as files -----------------------------------------------------------------------------------------------


def tar(members: dict[str, tuple[int, bytes | str | None]]) -> bytes:
    """A compressed archive of path -> (mode, content); a text is a link's target, None makes a folder."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=EPOCH, compresslevel=1) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, (mode, content) in members.items():
            entry = tarfile.TarInfo(f"./{path}" if path else "./")
            entry.mode, entry.mtime, entry.uname, entry.gname = mode, EPOCH, "root", "root"
            if isinstance(content, bytes):
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
            else:
                entry.type = tarfile.DIRTYPE if content is None else tarfile.SYMTYPE
                entry.linkname = content or ""
                archive.addfile(entry)
    return buffer.getvalue()


def deb(package: Package) -> bytes:
    control: dict[str, tuple[int, bytes | str | None]] = {
        "": (0o755, None),
        "control": (0o644, package.control().encode()),
    }
    for name, text in package.scripts.items():
        control[name] = (0o755, f"#!/bin/sh\nset -e\n{text}".encode())
    if package.triggers:
        control["triggers"] = (0o644, "".join(f"interest-await {name}\n" for name in package.triggers).encode())
    data: dict[str, tuple[int, bytes | str | None]] = {"": (0o755, None)}
    contents: dict[str, tuple[int, bytes | str]] = {
        path: (0o644, value.encode() if isinstance(value, str) else value) for path, value in package.files.items()
    }
    contents.update({path: (0o755, text.encode()) for path, text in package.programs.items()})
    contents.update({path: (0o777, target) for path, target in package.links.items()})
    for path in sorted(contents):
        for folder in reversed(Path(path).parents):
            if str(folder) != ".":
                data.setdefault(str(folder), (0o755, None))
        data[path] = contents[path]
    configuration = [f"/{path}\n" for path in package.files if path.startswith("etc/")]
    if configuration:
        control["conffiles"] = (0o644, "".join(configuration).encode())
    result = io.BytesIO(b"!<arch>\n")
    result.seek(0, io.SEEK_END)
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar.gz", tar(control)), ("data.tar.gz", tar(data))):
        result.write(f"{name:<16}{EPOCH:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode())
        result.write(content + b"\n" * (len(content) % 2))
    return result.getvalue()


def kernel_module(name: str, version: str, depends: str = "") -> bytes:
    """An ELF file that modinfo and depmod read as a kernel module, with no code in it."""
    about = b"".join(
        f"{key}={value}\0".encode()
        for key, value in {"version": version, "license": "Dual MIT/GPL", "depends": depends, "name": name}.items()
        if key != "version" or value
    )
    names = b"\0.modinfo\0.shstrtab\0"
    offset = 64
    sections = struct.pack("<IIQQQQIIQQ", *([0] * 10))
    sections += struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, offset, len(about), 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 10, 3, 0, 0, offset + len(about), len(names), 0, 0, 1, 0)
    padding = -(offset + len(about) + len(names)) % 8
    table = offset + len(about) + len(names) + padding
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 1, ELF_MACHINE, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    return head + about + names + bytes(padding) + sections


# --- NVIDIA's packages -----------------------------------------------------------------------------------------------


def standin(name: str) -> str:
    """What a program that talks to GPUs does here: it asks the node's stand-in for the hardware."""
    return f'#!/bin/sh\nexec /{STANDIN}/{name} "$@"\n'


def unit(description: str, start: str, pid_file: str, more: str = "") -> str:
    return (
        f"[Unit]\nDescription={description}\n\n[Service]\nType=forking\nPIDFile={pid_file}\nExecStart={start}\n{more}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def enable(name: str, start: bool) -> dict[str, str]:
    """What debhelper writes for a package with a unit."""
    text = f"if [ -d /run/systemd/system ]; then\n    systemctl daemon-reload\n    systemctl enable -q {name}\n"
    if start:
        # A driver that is not loaded yet fails the service, not the package.
        text += f"    deb-systemd-invoke restart {name} > /dev/null || true\n"
    stop = f'if [ -d /run/systemd/system ] && [ "$1" = remove ]; then\n    deb-systemd-invoke stop {name} || true\nfi\n'
    gone = f'if [ -d /run/systemd/system ] && [ "$1" != upgrade ]; then\n    systemctl disable -q {name} || true\n'
    return {"postinst": f"{text}fi\n", "prerm": stop, "postrm": f"{gone}    systemctl daemon-reload\nfi\n"}


def library(
    name: str, soname: str, version: str, major: int = 1, folder: str = f"{LIBRARIES}/nvidia/current"
) -> Package:
    return Package(
        name,
        f"{version}-1",
        files={f"{folder}/{soname}.{version}": f"{soname} {version}\n"},
        links={f"{folder}/{soname}.{major}": f"{soname}.{version}"},
    )


def alternative(version: str) -> Package:
    """As Debian's, which NVIDIA's are made from: programs and libraries lie in folders of their own, and the links to
    them belong to an alternative, made anew whenever something in these folders changes."""
    current = "usr/lib/nvidia/current"
    # (link, name in the alternative, file); the names are Debian's: one link cannot have two.
    rows = [("usr/bin/nvidia-smi", "nvidia-smi", f"{current}/nvidia-smi")]
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4"):
        rows.append((f"{LIBRARIES}/{name}", f"{name}-{TRIPLET}", f"{LIBRARIES}/nvidia/current/{name}"))
    config = "libnvidia-cfg.so.1"
    rows.append((f"{LIBRARIES}/nvidia/{config}", f"{config}-{TRIPLET}", f"{LIBRARIES}/nvidia/current/{config}"))
    slaves = "".join(
        f'    [ ! -e /{file} ] || set -- "$@" --slave /{link} nvidia--{name} /{file}\n' for link, name, file in rows
    )
    master = f"/usr/lib/nvidia/nvidia nvidia /{current}"
    return Package(
        "nvidia-alternative",
        f"{version}-1",
        # From Debian's contrib.
        {"Depends": "glx-alternative-nvidia (>= 1.2)"},
        scripts={
            "postinst": 'if [ "$1" = triggered ]; then\n    set --\n'
            f'{slaves}    update-alternatives --install {master} {version.split(".", maxsplit=1)[0]} "$@"\n'
            "    dpkg-trigger --no-await register-glx-alternative-nvidia\n"
            "else\n    dpkg-trigger register-nvidia-alternative\nfi\n",
            "prerm": 'if [ "$1" = remove ] || [ "$1" = deconfigure ]; then\n'
            f"    update-alternatives --remove nvidia /{current}\n"
            "    dpkg-trigger --no-await register-glx-alternative-nvidia\nfi\n",
        },
        triggers=("register-nvidia-alternative", f"/{current}", f"/{LIBRARIES}/nvidia/current"),
    )


def dkms(name: str, other: str, version: str, flavour: str) -> Package:
    source = f"usr/src/nvidia-{version}"
    lines = [f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\nAUTOINSTALL="yes"\n']
    lines.append("MAKE[0]=\"'make' KERNEL_UNAME=${kernelver} modules\"\nCLEAN=\"'make' clean\"\n")
    for number, module in enumerate(MODULES):
        lines.append(
            f'BUILT_MODULE_NAME[{number}]="{module}"\nDEST_MODULE_LOCATION[{number}]="/kernel/drivers/video"\n'
        )
    files: dict[str, bytes | str] = {f"{source}/dkms.conf": "".join(lines)}
    # A module is compiled against the headers: without them, and where they are marked as unfit, the build fails.
    files[f"{source}/Makefile"] = (
        "modules:\n"
        "\ttest -e /lib/modules/$(KERNEL_UNAME)/build/Makefile\n"
        "\t! test -e /lib/modules/$(KERNEL_UNAME)/build/unfit\n"
        "\tcp built/*.ko .\n"
        "clean:\n"
        "\trm -f *.ko\n"
    )
    for module in MODULES:
        depends = "" if module == "nvidia" else "nvidia-modeset" if module == "nvidia-drm" else "nvidia"
        files[f"{source}/built/{module}.ko"] = kernel_module(module, version, depends)
    files[f"{source}/built/flavour"] = f"{flavour}\n"
    return Package(
        name,
        f"{version}-1",
        {
            "Depends": f"dkms (>= 3), nvidia-kernel-support (= {version}-1), firmware-nvidia-gsp (= {version}-1)",
            "Provides": "nvidia-kernel",
            "Conflicts": other,
            "Replaces": other,
        },
        files,
        scripts={
            "postinst": f'[ "$1" != configure ] || /usr/lib/dkms/common.postinst nvidia {version} "" "" "$2"\n',
            "prerm": f"dkms remove -m nvidia -v {version} --all || true\n",
        },
    )


def driver(version: str) -> list[Package]:
    """One release of the driver for Debian, as NVIDIA's repositories have it since branch 560."""
    branch = int(version.split(".", maxsplit=1)[0])
    full = f"{version}-1"
    exact = f"(= {full})"
    # Up to branch 575 what belongs to the switches has the branch in its name.
    suffix = "" if branch >= 580 else f"-{branch}"
    run = "/run/nvidia-fabricmanager/nv-fabricmanager.pid"
    manager = {
        "Conflicts": "nvidia-fabricmanager",
        "Replaces": "nvidia-fabricmanager",
        "Provides": "nvidia-fabricmanager",
    }
    if not suffix:
        manager = dict.fromkeys(("Conflicts", "Replaces"), "nvidia-fabricmanager-570, nvidia-fabricmanager-575")
    return [
        library("libcuda1", "libcuda.so", version),
        library("libnvidia-ml1", "libnvidia-ml.so", version),
        library("libnvidia-ptxjitcompiler1", "libnvidia-ptxjitcompiler.so", version),
        library("libnvidia-nvvm4", "libnvidia-nvvm.so", version, major=4),
        library(f"libnvidia-nscq{suffix}", "libnvidia-nscq.so", version, folder=LIBRARIES),
        Package("firmware-nvidia-gsp", full, files={f"usr/lib/firmware/nvidia/{version}/gsp_ga10x.bin": "firmware\n"}),
        alternative(version),
        Package(
            "nvidia-kernel-support",
            full,
            {"Depends": "nvidia-kernel-common (>= 20151021), nvidia-modprobe (>= 525)"},
            # Where a test wants to interrupt dpkg.
            scripts={
                "postinst": "while [ -e /run/pause-dpkg ]; do touch /run/dpkg-paused; sleep 0.2; done\n",
            },
        ),
        Package("nvidia-modprobe", full, programs={"usr/bin/nvidia-modprobe": standin("nvidia-modprobe")}),
        Package(
            "nvidia-persistenced",
            full,
            {"Depends": "libnvidia-cfg1 " + exact},
            {
                "usr/lib/systemd/system/nvidia-persistenced.service": unit(
                    "NVIDIA Persistence Daemon",
                    "/usr/bin/nvidia-persistenced --verbose",
                    "/run/nvidia-persistenced/nvidia-persistenced.pid",
                    "ExecStopPost=/bin/rm -rf /run/nvidia-persistenced\n",
                )
            },
            {"usr/bin/nvidia-persistenced": standin("nvidia-persistenced")},
            scripts=enable("nvidia-persistenced.service", start=True),
        ),
        library("libnvidia-cfg1", "libnvidia-cfg.so", version),
        Package(
            "nvidia-driver-cuda",
            full,
            {
                "Depends": f"libcuda1 {exact}, libnvidia-ml1 {exact}, libnvidia-ptxjitcompiler1 {exact},"
                f" libnvidia-nvvm4 {exact}, nvidia-alternative {exact},"
                f" nvidia-kernel-dkms {exact} | nvidia-kernel-open-dkms {exact}",
                "Recommends": f"nvidia-persistenced {exact}",
                # Debian's package of that program.
                "Conflicts": "nvidia-smi",
                "Replaces": "nvidia-smi",
            },
            programs={"usr/lib/nvidia/current/nvidia-smi": standin("nvidia-smi")},
        ),
        dkms("nvidia-kernel-open-dkms", "nvidia-kernel-dkms", version, "open"),
        dkms("nvidia-kernel-dkms", "nvidia-kernel-open-dkms", version, "proprietary"),
        Package(
            f"nvidia-fabricmanager{suffix}",
            full,
            manager,
            {
                "usr/lib/systemd/system/nvidia-fabricmanager.service": unit(
                    "NVIDIA fabric manager service",
                    "/usr/bin/nv-fabricmanager -c /usr/share/nvidia/nvswitch/fabricmanager.cfg",
                    run,
                    "TimeoutStartSec=720\nLimitCORE=infinity\n",
                ),
                "usr/share/nvidia/nvswitch/fabricmanager.cfg": FABRIC_MANAGER,
                "usr/share/nvidia/nvswitch/version": f"{version}\n",
            },
            {"usr/bin/nv-fabricmanager": standin("nv-fabricmanager")},
            scripts=enable("nvidia-fabricmanager.service", start=False)
            | {"postinst": "systemctl daemon-reload || true\n"},
        ),
        Package(
            f"nvidia-imex{suffix}",
            full,
            files={
                "usr/lib/systemd/system/nvidia-imex.service": unit(
                    "NVIDIA IMEX service", "/usr/bin/nvidia-imex -c /etc/nvidia-imex/config.cfg", "/run/nvidia-imex.pid"
                ),
                "etc/nvidia-imex/config.cfg": "LOG_LEVEL=4\nIMEX_NODE_CONFIG_FILE=/etc/nvidia-imex/nodes_config.cfg\n",
            },
            programs={"usr/bin/nvidia-imex": standin("nvidia-imex")},
        ),
    ]


def toolkit(version: str) -> list[Package]:
    """cuda-toolkit-13-0 and what it pulls in; version as 13.0.2."""
    major, minor = version.split(".")[:2]
    name, home = f"{major}-{minor}", f"usr/local/cuda-{major}.{minor}"
    link = f"update-alternatives --install /usr/local/cuda cuda /{home} {major}{minor}\n"
    return [
        Package(
            f"cuda-toolkit-{name}-config-common",
            f"{version}-1",
            files={f"{home}/version.json": f'{{"cuda": {{"name": "CUDA SDK", "version": "{version}"}}}}\n'},
            scripts={
                "postinst": link,
                "prerm": f'if [ "$1" = remove ]; then\n    update-alternatives --remove cuda /{home}\nfi\n',
            },
        ),
        Package(
            f"cuda-nvcc-{name}",
            f"{version}-1",
            programs={
                f"{home}/bin/nvcc": f"#!/bin/sh\necho 'Cuda compilation tools, release {major}.{minor}, V{version}'\n"
            },
        ),
        Package(
            f"cuda-toolkit-{name}",
            f"{version}-1",
            {"Depends": f"cuda-toolkit-{name}-config-common, cuda-nvcc-{name} (>= {version})"},
        ),
        Package(
            f"datacenter-gpu-manager-4-cuda{major}",
            "1:4.4.1-1",
            {"Depends": "datacenter-gpu-manager-4-core (= 1:4.4.1-1)"},
        ),
    ]


def tools() -> list[Package]:
    return [
        Package(
            "datacenter-gpu-manager-4-core",
            "1:4.4.1-1",
            files={
                "usr/lib/systemd/system/nvidia-dcgm.service": unit(
                    "NVIDIA DCGM service",
                    "/usr/bin/nv-hostengine --service-account nvidia-dcgm",
                    "/run/nvhostengine.pid",
                )
            },
            programs={"usr/bin/nv-hostengine": standin("nv-hostengine")},
        ),
        Package("nvlsm", "2025.06.11-1", programs={"opt/nvidia/nvlsm/sbin/nvlsm": standin("nvlsm")}),
    ]


def gpus() -> Package:
    """The hardware itself: what it shows at boot, and the ends of the programs above that talk to it."""
    folder = HERE / "gpu_standin"
    return Package(
        "gpu-standin",
        "1",
        {"Depends": "python3, kmod"},
        {
            "usr/lib/systemd/system/gpu-standin.service": (folder / "gpu-standin.service").read_text(),
            **{
                f"{STANDIN}/recorded/{path.name}": path.read_bytes()
                for path in RECORDED.iterdir()
                if path.suffix in (".txt", ".xml")
            },
        },
        {f"{STANDIN}/standin.py": (folder / "standin.py").read_text()},
        {f"{STANDIN}/{name}": "standin.py" for name in ("boot", *PROGRAMS)},
        {"postinst": "systemctl enable -q gpu-standin.service\n"},
    )


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernel(release: str) -> list[Package]:
    """A kernel, its headers and the meta-packages that pull in the newest of its flavour, as Debian has them."""
    if not re.fullmatch(r"[a-z0-9.+-]+", release):
        raise SystemExit(f"kernel {release}: no Debian package can be named after it; use another kernel for this test")
    version = re.match(r"[\d.]+\d(-\d+)?", release)
    flavour = re.sub(r"^\d+(\.\d+)*(\+deb\d+)?(-\d+)?-", "", release)
    number = f"{version.group() if version else release}-1"
    modules = f"usr/lib/modules/{release}"
    # What Debian's own kernel drives the GPUs with until it is told otherwise.
    nouveau = f"{modules}/kernel/drivers/gpu/drm/nouveau/nouveau.ko"
    hooks = f"--arg={release} --arg=/boot/vmlinuz-{release}"
    return [
        Package(
            f"linux-image-{release}",
            number,
            {"Depends": "kmod, initramfs-tools | linux-initramfs-tool"},
            {
                f"boot/vmlinuz-{release}": f"kernel {release}\n",
                f"boot/config-{release}": "CONFIG_RD_GZIP=y\nCONFIG_RD_ZSTD=y\n",
                f"{modules}/modules.order": "kernel/drivers/gpu/drm/nouveau/nouveau.ko\n",
                f"{modules}/modules.builtin": "",
                f"{modules}/modules.builtin.modinfo": "",
                nouveau: kernel_module("nouveau", ""),
            },
            scripts={
                "postinst": f"depmod {release}\nrun-parts --report --exit-on-error {hooks} /etc/kernel/postinst.d\n",
                "postrm": f'[ "$1" != remove ] || run-parts --report {hooks} /etc/kernel/postrm.d\n',
            },
        ),
        Package(
            f"linux-headers-{release}",
            number,
            {"Depends": "make"},
            {
                f"usr/src/linux-headers-{release}/Makefile": f"# {release}\n",
                f"usr/src/linux-headers-{release}/.config": "",
                f"usr/src/linux-headers-{release}/include/generated/utsrelease.h": f'#define UTS_RELEASE "{release}"\n',
            },
            links={f"{modules}/build": f"/usr/src/linux-headers-{release}"},
            scripts={
                "postinst": f"if [ -d /etc/kernel/header_postinst.d ]; then\n"
                f"    run-parts --report --verbose --exit-on-error --arg={release} /etc/kernel/header_postinst.d\nfi\n"
            },
        ),
        Package(f"linux-image-{flavour}", number, {"Depends": f"linux-image-{release} (= {number})"}),
        Package(f"linux-headers-{flavour}", number, {"Depends": f"linux-headers-{release} (= {number})"}),
    ]


# --- repositories ----------------------------------------------------------------------------------------------------


class Signer:
    """A key of its own, kept as a file so that a later run signs with the same one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        # The agent's socket wants a short path.
        self.home = tempfile.mkdtemp(prefix="gpg")
        self.environment = {**os.environ, "GNUPGHOME": self.home}
        if file.exists():
            self.run("--import", str(file))
        else:
            self.run("--quick-generate-key", "ironrack test repository", "ed25519", "sign", "never")
            file.write_bytes(self.run("--export-secret-keys"))
            file.chmod(0o600)

    def run(self, *arguments: str, data: bytes = b"") -> bytes:
        command = ["gpg", "--batch", "--quiet", "--yes", "--pinentry-mode", "loopback", "--passphrase", "", *arguments]
        return subprocess.run(command, input=data, env=self.environment, check=True, capture_output=True).stdout

    def public(self) -> bytes:
        return self.run("--armor", "--export")

    def fingerprint(self) -> str:
        lines = self.run("--with-colons", "--list-keys").decode().splitlines()
        return next(line.split(":")[9] for line in lines if line.startswith("fpr:"))

    def close(self) -> None:
        subprocess.run(["gpgconf", "--kill", "all"], env=self.environment, check=False, capture_output=True)
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def signer(file: Path) -> Iterator[Signer]:
    made = Signer(file)
    try:
        yield made
    finally:
        made.close()


def index(packages: Sequence[Package], contents: dict[str, bytes]) -> bytes:
    records = []
    for package in packages:
        content = contents[package.file_name]
        digest = hashlib.sha256(content).hexdigest()
        records.append(f"{package.control()}Filename: ./{package.file_name}\nSize: {len(content)}\nSHA256: {digest}\n")
    return "\n".join(records).encode()


def write(path: Path, content: bytes) -> None:
    """As a mirror does it: who reads meanwhile gets the old file or the new one."""
    part = path.with_name(f".{path.name}")
    part.write_bytes(content)
    part.replace(path)


def publish(folder: Path, packages: Sequence[Package], key: Signer, origin: str, fault: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contents = {package.file_name: deb(package) for package in packages}
    listing = index(packages, contents)
    lists = {"Packages": listing, "Packages.gz": gzip.compress(listing, mtime=EPOCH)}
    sums = "".join(f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}\n" for name, data in lists.items())
    release = (
        f"Origin: {origin}\nLabel: {origin} CUDA\nArchitectures: {ARCHITECTURE}\nDate: {DATE}\nSHA256:\n{sums}".encode()
    )
    signed = {"Release": release, "InRelease": key.run("--clearsign", "--output", "-", data=release)}
    if fault == "unsigned":
        signed = {}
    elif fault == "index":
        # As while a mirror is half updated: the lists are newer than their checksums.
        lists = {
            name: data + b"\n" if name == "Packages" else gzip.compress(listing + b"\n", mtime=EPOCH)
            for name, data in lists.items()
        }
    elif fault == "package":
        contents = {name: data[:-1] + bytes([data[-1] ^ 1]) for name, data in contents.items()}
    wanted = {**contents, **lists, **signed, "key.pub": b""}
    for path in folder.iterdir():
        if path.name not in wanted and not path.name.endswith(".pub"):
            path.unlink()
    for name, data in {**contents, **lists, **signed}.items():
        write(folder / name, data)


def build(options: argparse.Namespace) -> dict[str, object]:
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    packages = [package for version in options.driver for package in driver(version)]
    packages += [package for version in options.toolkit for package in toolkit(version)] + tools()
    kernels = [package for release in options.kernel for package in kernel(release)] + [gpus()]
    faults = dict(fault.split("=") for fault in options.fault)
    with contextlib.ExitStack() as stack:
        key = stack.enter_context(signer(out.parent / f"{out.name}.key"))
        public = key.public()
        for distribution, key_file in KEYS.items():
            fault = faults.get(distribution)
            used = key
            if fault == "signature":
                used = stack.enter_context(signer(out.parent / f"{out.name}.other.key"))
            folder = out / distribution / FOLDER
            publish(folder, packages, used, "NVIDIA", fault)
            write(folder / key_file, public)
        publish(out / "kernel", kernels, key, "Debian", None)
        write(out / "kernel" / "key.pub", public)
        about = {
            "fingerprint": key.fingerprint(),
            "sha256": hashlib.sha256(public).hexdigest(),
            "packages": sorted({package.name for package in packages}),
        }
    write(out / "repository.json", json.dumps(about, indent=1).encode())
    return about


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", help="folder of the repositories")
    parser.add_argument("--driver", action="append", default=[], help="release of the driver, as 580.159.04")
    parser.add_argument("--toolkit", action="append", default=[], help="release of the CUDA toolkit, as 13.0.2")
    parser.add_argument("--kernel", action="append", default=[], help="release of a kernel, as uname -r prints it")
    known = [f"{distribution}={fault}" for distribution in KEYS for fault in FAULTS]
    parser.add_argument("--fault", action="append", default=[], choices=known, help="what is wrong with a repository")
    print(json.dumps(build(parser.parse_args(arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
