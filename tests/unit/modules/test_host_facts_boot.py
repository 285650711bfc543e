"""What host_facts tells of the boot: files made up in a folder, process 1 and mounts as the kernel writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

KERNELS = [{"release": "6.1.0-40-amd64"}, {"release": "6.1.0-42-amd64"}]
GRUB = """
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
else
   set default="0"
fi
menuentry 'Debian GNU/Linux' --class debian {
\tlinux\t/boot/vmlinuz-6.1.0-42-amd64 root=UUID=7c ro quiet intel_iommu=on iommu=pt
\tinitrd\t/boot/initrd.img-6.1.0-42-amd64
}
menuentry 'Debian GNU/Linux, with Linux 6.1.0-40-amd64' {
\tlinux\t/boot/vmlinuz-6.1.0-40-amd64 root=UUID=7c ro quiet
}
"""


@pytest.fixture(name="module")
def fixture_module(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("host_facts")


@pytest.fixture(name="root")
def fixture_root(tmp_path: Path) -> Path:
    """A host that booted an hour ago, in a kernel that has run for two."""
    for folder in ("proc/1", "proc/self", "etc/modprobe.d", "boot/grub"):
        (tmp_path / folder).mkdir(parents=True)
    ticks = 3600 * os.sysconf("SC_CLK_TCK")
    before = "1 (systemd (odd) name) S 0 1 1 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 1 0"
    (tmp_path / "proc/1/stat").write_text(f"{before} {ticks} 170000000 3000\n")
    (tmp_path / "proc/uptime").write_text("7200.00 1.00\n")
    (tmp_path / "boot/grub/grub.cfg").write_text(GRUB)
    return tmp_path


def boot(module: ModuleType, root: Path) -> dict[str, Any]:
    facts: dict[str, Any] = module.boot_facts(str(root), KERNELS)
    return facts


def test_boot_time_is_that_of_process_1(module: ModuleType, root: Path) -> None:
    assert module.boot_time(str(root)) == pytest.approx(time.time() - 3600, abs=5)
    # and the real one lies in the past
    assert module.boot_time("") < time.time()


def test_grub_tells_kernel_and_options(module: ModuleType, root: Path) -> None:
    facts = boot(module, root)
    assert (facts["kernel"], facts["options"]) == ("6.1.0-42-amd64", ["intel_iommu=on", "iommu=pt"])


@pytest.mark.parametrize("text", ["", GRUB.replace('set default="0"', 'set default="${saved_entry}"')])
def test_an_entry_that_is_not_certain_is_not_told(module: ModuleType, root: Path, text: str) -> None:
    (root / "boot/grub/grub.cfg").write_text(text)
    assert (boot(module, root)["kernel"], boot(module, root)["options"]) == (None, None)


def test_modprobe_files_changed_after_the_boot(module: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "etc/modprobe.d"
    (folder / "nvidia.conf").write_text("options nvidia NVreg_RestrictProfilingToAdminUsers=0\n")
    (folder / "other.conf").write_text("# not about nvidia\noptions kvm nested=1\n")
    # as dpkg leaves a file: the time at which its package was built
    os.utime(folder / "nvidia.conf", (1, 1))
    assert boot(module, root)["modprobe"] == ["/etc/modprobe.d/nvidia.conf"]
    monkeypatch.setattr(module, "boot_time", lambda root: time.time() + 5)
    assert boot(module, root)["modprobe"] == []


def test_initramfs_without_the_list_that_keeps_nouveau_away(module: ModuleType, root: Path) -> None:
    for kernel in KERNELS:
        (root / f"boot/initrd.img-{kernel['release']}").touch()
    os.utime(root / "boot/initrd.img-6.1.0-40-amd64", (1, 1))
    assert boot(module, root)["initramfs_older"] == []
    (root / "etc/modprobe.d/nvidia.conf").write_text("options nvidia NVreg_EnableGpuFirmware=1\n")
    assert boot(module, root)["initramfs_older"] == []
    (root / "etc/modprobe.d/nouveau.conf").write_text("blacklist nouveau\n")
    later = time.time() + 60
    os.utime(root / "boot/initrd.img-6.1.0-42-amd64", (later, later))
    assert boot(module, root)["initramfs_older"] == ["6.1.0-40-amd64"]


def test_lines_of_fstab_that_are_not_mounted(module: ModuleType, root: Path) -> None:
    (root / "proc/self/mountinfo").write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 8:2 / /data/big\\040models rw - xfs /dev/sdb1 rw\n"
    )
    (root / "etc/fstab").write_text(
        "# /dev/sdx /commented xfs defaults 0 0\n"
        "/dev/sda1 / ext4 defaults 0 1\n"
        "/dev/sdb1 /data/big\\040models/ xfs defaults,nofail 0 2\n"
        "/dev/sdc1 /scratch xfs defaults,nofail 0 2\n"
        "/dev/sdd1 none swap sw 0 0\n"
        "/dev/cdrom /media/cdrom0 udf,iso9660 user,noauto 0 0\n"
        "store:/home /home nfs _netdev,x-systemd.automount 0 0\n"
    )
    assert module.unmounted(str(root)) == ["/scratch"]


def test_users_of_a_gpu_are_found_by_its_device_node(module: ModuleType, root: Path) -> None:
    for pid, name, target in ((41, "train", "/dev/nvidia3"), (42, "smi", "/dev/nvidiactl"), (43, "sh", "/dev/null")):
        (root / f"proc/{pid}/fd").mkdir(parents=True)
        (root / f"proc/{pid}/fd/5").symlink_to(target)
        (root / f"proc/{pid}/comm").write_text(f"{name}\n")
        (root / f"proc/{pid}/cgroup").write_text("0::/user.slice/user-1000.slice/session-4.scope\n")
    found = module.holders(str(root), r"\d+")
    assert [(user["pid"], user["name"], user["unit"]) for user in found] == [(41, "train", "session-4.scope")]
    assert [user["pid"] for user in module.holders(str(root), "3")] == [41]
    assert module.holders(str(root), "0") == []
