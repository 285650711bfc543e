"""What role base sees of a host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
Load = Callable[[str], ModuleType]

# Recorded from a Debian 13 node: systemctl list-units --type=service --state=running --no-legend --plain
RUNNING = """\
chrony.service           loaded active running chrony, an NTP client/server
dbus.service             loaded active running D-Bus System Message Bus
ssh.service              loaded active running OpenBSD Secure Shell server
systemd-journald.service loaded active running Journal Service
systemd-logind.service   loaded active running User Login Management
"""


def test_time_services_are_told_from_others_and_from_their_helpers(load: Load) -> None:
    module = load("base_state")
    assert module.parse_running(RUNNING) == ["chrony.service"]
    names = ["chrony-wait", "ntpsec-rotate-stats", "ntp", "phc2sys@eth0", "openntpd", "systemd-time-wait-sync"]
    listing = "".join(f"{name}.service loaded active running x\n" for name in names)
    assert module.parse_running(listing) == ["ntp.service", "openntpd.service", "phc2sys@eth0.service"]
    assert module.parse_running("\n") == []


def tree(tmp_path: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(("bits", "clock"), [("000001ffffffffff", True), ("000001fffdffffff", False)])
def test_whether_root_may_set_the_clock(load: Load, tmp_path: Path, bits: str, clock: bool) -> None:
    root = tree(tmp_path, {"/proc/self/status": f"CapPrm:\t000001ffffffffff\nCapEff:\t{bits}\n"})
    assert load("base_state").look(root)["may_set_clock"] is clock


def test_own_settings_are_seen_in_the_file_and_in_the_process(load: Load, tmp_path: Path) -> None:
    module = load("base_state")
    root = tree(tmp_path, {"/proc/7/cmdline": "/usr/sbin/chronyd\0-F\x001\0"})
    assert module.look(root)["time_ours"] is False
    # What a run leaves that was killed between the removal of the file and the restart.
    tree(tmp_path, {"/proc/7/cmdline": "/usr/sbin/chronyd\0-F\x001\0-f\0/etc/chrony/ironrack.conf\0"})
    assert module.look(root)["time_ours"] is True
    tree(tmp_path, {"/proc/7/cmdline": "/usr/bin/less\0/etc/chrony/ironrack.conf\0"})
    assert module.look(root)["time_ours"] is False
    tree(tmp_path, {"/etc/chrony/ironrack.conf": "x"})
    assert module.look(root)["time_ours"] is True


CLOUD = {"/etc/cloud/cloud.cfg": "users:\n  - default\n# manage_etc_hosts: true\ndisable_root: true\n"}
USER = "/var/lib/cloud/instance/cloud-config.txt"


@pytest.mark.parametrize(
    ("files", "writer", "from_user_data"),
    [
        ({}, "", False),
        ({USER: "manage_etc_hosts: true\n"}, "", False),  # without cloud-init nobody reads it
        (CLOUD, "", False),
        ({"/etc/cloud/cloud.cfg": "manage_etc_hosts: true\n"}, "/etc/cloud/cloud.cfg", False),
        ({"/etc/cloud/cloud.cfg": "manage_etc_hosts: localhost\n"}, "/etc/cloud/cloud.cfg", False),
        ({"/etc/cloud/cloud.cfg": "manage_etc_hosts: 'template' # x\n"}, "/etc/cloud/cloud.cfg", False),
        (
            {**CLOUD, "/etc/cloud/cloud.cfg.d/10-a.cfg": "manage_etc_hosts: True\n"},
            "/etc/cloud/cloud.cfg.d/10-a.cfg",
            False,
        ),
        (
            {
                "/etc/cloud/cloud.cfg": "manage_etc_hosts: true\n",
                "/etc/cloud/cloud.cfg.d/20-site.cfg": "manage_etc_hosts: false\n",
            },
            "",
            False,
        ),
        # Our own answer is left aside, or the next run would take it away.
        (
            {
                "/etc/cloud/cloud.cfg": "manage_etc_hosts: true\n",
                "/etc/cloud/cloud.cfg.d/99-ironrack-hosts.cfg": "manage_etc_hosts: false\n",
            },
            "/etc/cloud/cloud.cfg",
            False,
        ),
        ({**CLOUD, USER: "#cloud-config\nmanage_etc_hosts: localhost\n"}, USER, True),
        ({"/etc/cloud/cloud.cfg": "manage_etc_hosts: true\n", USER: "manage_etc_hosts: false\n"}, "", False),
        ({**CLOUD, USER: "write_files:\n- content: |\n    manage_etc_hosts: true\n"}, "", False),
    ],
)
def test_cloud_init_that_writes_the_hosts_file(
    load: Load, tmp_path: Path, files: dict[str, str], writer: str, from_user_data: bool
) -> None:
    root = tree(tmp_path, files)
    state = load("base_state").look(root)
    assert state["hosts_written_by"] == (root + writer if writer else "")
    assert state["hosts_in_user_data"] is from_user_data


def test_user_data_that_cannot_be_overruled_is_a_warning(run: Run, tmp_path: Path) -> None:
    root = tree(tmp_path, {**CLOUD, USER: "manage_etc_hosts: true\n"})
    result = run("base_state", root=root, check=True)
    assert result["changed"] is False
    assert "manage_etc_hosts to false" in str(result["warnings"])
    assert "warnings" not in run("base_state", root=tree(tmp_path, {USER: ""}))
