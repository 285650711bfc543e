"""A lab_up that is killed in the middle blocks nothing: the next one finishes, and lab_down leaves no trace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "roles" / "lab" / "files" / "lab.py"
NAME = "killtest"
INVENTORY = """
all:
  vars:
    lab_networks:
      - {name: cluster, subnet: 10.79.1.0/24, gateway: 10.79.1.1, interface: eth0}
lab:
  hosts:
    k1:
      ansible_host: 127.79.200.11
      lab_addresses: {cluster: 10.79.1.11}
      lab_forwards: [{listen: "127.79.200.11:2222", port: 22}]
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a closed lab needs root")


class Site:
    def __init__(self, folder: Path) -> None:
        self.inventory = folder / "inventory"
        (self.inventory / "group_vars").mkdir(parents=True)
        (self.inventory / "hosts.yml").write_text(INVENTORY)
        shutil.copy(ROOT / "inventories" / "lab" / "group_vars" / "lab.yml", self.inventory / "group_vars" / "lab.yml")
        self.lab = folder / "lab"
        self.environment = os.environ | {"LAB_NAME": NAME, "LAB_DIR": str(self.lab), "ANSIBLE_NOCOLOR": "1"}
        self.environment.pop("LAB_IMAGE", None)

    def command(self, playbook: str) -> list[str]:
        ansible = Path(sys.executable).with_name("ansible-playbook")
        return [str(ansible), "-i", str(self.inventory), str(ROOT / "playbooks" / playbook)]

    def run(self, playbook: str) -> str:
        done = subprocess.run(
            self.command(playbook), cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kill_in(self, playbook: str, task: str, delay: float) -> None:
        """SIGKILL a playbook and all that belongs to it, some time after it has announced a task."""
        process = subprocess.Popen(
            self.command(playbook),
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout
        for line in process.stdout:
            if f": {task}]" in line:
                time.sleep(delay)
                break
        else:
            pytest.fail(f"{playbook} never came to {task!r}")
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()

    def status(self) -> dict[str, object]:
        command = [sys.executable, str(TOOL), "--dir", str(self.lab), "--name", NAME, "status"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found: dict[str, object] = json.loads(answer)
        return found


def processes_of_lab(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line or f"/podman/{NAME}/" in line:
            found.append(line)
    return found


def traces(folder: Path) -> list[str]:
    found = processes_of_lab(folder)
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"podman/{NAME}/" in line]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/ironrack-{NAME}")]
    found += [str(path) for path in (folder, Path("/run/ironrack") / NAME) if path.exists()]
    return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.run("lab_down.yml")


def test_killed_runs_block_nothing_and_leave_nothing(site: Site) -> None:
    # One lab through them all: each run begins with what the kill before it left.
    for task, delay in [
        ("Write down the declaration, and make folders and a key", 0.3),
        ("Start the holder", 0.4),
        ("Make the nodes' images", 1.0),
        ("Boot the nodes", 1.5),
    ]:
        site.kill_in("lab_up.yml", task, delay)
    site.run("lab_up.yml")
    pid = site.status()["pid"]
    assert isinstance(pid, int)
    ping = [str(Path(sys.executable).with_name("ansible")), "-i", str(site.inventory), "lab", "-m", "ping"]
    subprocess.run(ping, cwd=ROOT, env=site.environment, check=True, capture_output=True)

    os.kill(pid, signal.SIGKILL)  # as the kernel does when memory runs out
    deadline = time.monotonic() + 120  # the kernel first ends every process of the namespace
    while site.status()["running"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not site.status()["running"]
    site.run("lab_up.yml")
    assert site.status()["pid"] not in (None, pid)

    site.kill_in("lab_down.yml", "End the holder and remove the lab's folder", 0.3)
    site.run("lab_down.yml")
    assert traces(site.lab) == []
    assert "changed=0 " in site.run("lab_down.yml")
