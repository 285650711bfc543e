"""Policy and fabric of GPUs, against a stand-in for nvidia-smi that starts from the recording of two H200s."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

Run = Callable[..., dict[str, Any]]
Load = Callable[[str], ModuleType]

RECORDING = Path(__file__).resolve().parents[2] / "fixtures" / "nvidia_h200x2"
# The real one writes "Power limit for GPU 00000000:19:00.0 was set to 120.00 W from 250.00 W." and "All done."; what it
# sets is written into the XML that it answers next. ECC always waits for a reboot, MIG where `pending` is there.
STAND_IN = """#!{python}
import os, sys, xml.etree.ElementTree as tree
here = os.path.dirname(os.path.abspath(__file__))
arguments = sys.argv[1:]
if os.path.exists(here + "/broken"):
    sys.stdout.write(open(here + "/broken").read())
    sys.exit(9)
if arguments == ["-q", "-x"]:
    sys.stdout.write(open(here + "/details.xml").read())
    sys.exit(0)
open(here + "/calls", "a").write(" ".join(arguments) + "\\n")
if os.path.exists(here + "/refuses"):
    print(open(here + "/refuses").read())
    sys.exit(int(os.path.exists(here + "/refuses-with-status")))
_, ids, flag, value = arguments
mode = {{"0": "Disabled", "1": "Enabled"}}.get(value)
places = {{
    "-pm": ("persistence_mode", mode),
    "-e": ("ecc_mode/pending_ecc", mode),
    "-mig": ("mig_mode/pending_mig", mode),
    "-c": ("compute_mode", value.capitalize()),
    "-pl": ("gpu_power_readings/requested_power_limit", value + ".00 W"),
}}
log = tree.parse(here + "/details.xml")
for gpu in log.getroot().iter("gpu"):
    if gpu.get("id") in ids.split(","):
        gpu.find(places[flag][0]).text = places[flag][1]
        if flag == "-mig" and not os.path.exists(here + "/pending"):
            gpu.find("mig_mode/current_mig").text = mode
log.write(here + "/details.xml")
print("All done.")
"""


class Host:
    """The stand-in in a folder, and faults written into the recording."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self.run = folder, run
        self.details = folder / "details.xml"
        self.details.write_bytes((RECORDING / "details.xml").read_bytes())
        # Whoever has /dev/nvidia0 open on this machine (a lab's node, say) is no part of the tests.
        self.change("minor_number", "230", 0)
        self.change("minor_number", "231", 1)
        program = folder / "nvidia-smi"
        program.write_text(STAND_IN.format(python=sys.executable))
        program.chmod(0o755)

    def change(self, path: str, text: str, *gpus: int) -> None:
        log = ElementTree.parse(self.details)  # noqa: S314 - our own recording
        for index, gpu in enumerate(log.getroot().iter("gpu")):
            if not gpus or index in gpus:
                found = gpu.find(path)
                assert found is not None, path
                found.text = text
        log.write(self.details)

    def used_by(self, pid: int, gpu: int = 0) -> None:
        log = ElementTree.parse(self.details)  # noqa: S314 - our own recording
        processes = list(log.getroot().iter("processes"))[gpu]
        entry = ElementTree.SubElement(processes, "process_info")
        for tag, text in (("pid", str(pid)), ("type", "C"), ("process_name", "VLLM::Worker"), ("used_memory", "9 MiB")):
            ElementTree.SubElement(entry, tag).text = text
        log.write(self.details)

    def policy(self, check: bool = False, **options: Any) -> dict[str, Any]:
        return self.run("gpu_policy", programs=str(self.folder), check=check, **options)

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture(name="host")
def fixture_host(tmp_path: Path, run: Run) -> Host:
    return Host(tmp_path, run)


BOTH = "00000000:00:06.0,00000000:00:07.0"
FIRST = "00000000:00:06.0"


def test_as_recorded_nothing_differs(host: Host) -> None:
    result = host.policy(persistence=True, ecc=True, mig=False, power_limit_watts="default", compute_mode="default")
    assert not result["changed"], result
    assert result["deferred"] == ""
    assert result["reboot_reasons"] == result["changes"] == []
    assert host.calls == []


def test_one_call_sets_all_gpus(host: Host) -> None:
    result = host.policy(power_limit_watts="600")
    assert result["changed"]
    assert host.calls == [f"-i {BOTH} -pl 600"]
    assert result["changes"][1] == {"gpu": 1, "setting": "power_limit_watts", "before": "700", "after": "600"}
    assert "GPU 0 power_limit_watts: 700\n" in result["diff"]["before"]
    assert "GPU 0 power_limit_watts: 600\n" in result["diff"]["after"]
    again = host.policy(power_limit_watts="600")
    assert not again["changed"]
    assert len(host.calls) == 1


def test_default_power_is_the_cards_own(host: Host) -> None:
    host.change("gpu_power_readings/requested_power_limit", "450.00 W", 0)
    assert host.policy(power_limit_watts="default")["changed"]
    assert host.calls == [f"-i {FIRST} -pl 700"]


def test_a_board_that_limits_more_is_no_difference(host: Host) -> None:
    host.change("gpu_power_readings/current_power_limit", "550.00 W")
    assert not host.policy(power_limit_watts="700")["changed"]


def test_check_mode_sets_nothing_and_tells_the_same(host: Host) -> None:
    host.change("persistence_mode", "Disabled", 0)
    check = host.policy(check=True, persistence=True, power_limit_watts="600")
    assert check["changed"]
    assert host.calls == []
    real = host.policy(persistence=True, power_limit_watts="600")
    assert real["changes"] == check["changes"]
    # Without persistence the driver would forget the limit at once.
    assert host.calls == [f"-i {FIRST} -pm 1", f"-i {BOTH} -pl 600"]


def test_ecc_waits_for_a_reboot(host: Host) -> None:
    host.change("ecc_mode/current_ecc", "Disabled")
    host.change("ecc_mode/pending_ecc", "Disabled")
    result = host.policy(ecc=True)
    assert result["changed"]
    assert host.calls == [f"-i {BOTH} -e 1"]
    assert result["reboot_reasons"] == ["GPU 0, 1: ECC is off and set to be on"]
    again = host.policy(ecc=True)
    assert not again["changed"], "it is pending: setting it again changes nothing"
    assert again["reboot_reasons"] == result["reboot_reasons"]


def test_what_somebody_else_left_pending_is_told(host: Host) -> None:
    host.change("mig_mode/pending_mig", "Enabled", 1)
    result = host.policy(persistence=True)
    assert not result["changed"]
    assert result["reboot_reasons"] == ["GPU 1: MIG mode is off and set to be on"]


@pytest.mark.parametrize("waits", [True, False])
def test_mig_is_taken_off(host: Host, waits: bool) -> None:
    host.change("mig_mode/current_mig", "Enabled", 0)
    host.change("mig_mode/pending_mig", "Enabled", 0)
    if waits:
        (host.folder / "pending").touch()
    result = host.policy(mig=False)
    assert host.calls == [f"-i {FIRST} -mig 0"]
    assert result["reboot_reasons"] == (["GPU 0: MIG mode is on and set to be off"] if waits else [])


def test_gpus_in_use_are_not_disturbed(host: Host) -> None:
    host.change("mig_mode/current_mig", "Enabled", 0)
    host.change("mig_mode/pending_mig", "Enabled", 0)
    host.used_by(os.getpid())
    result = host.policy(mig=False, power_limit_watts="600")
    assert result["failed"]
    assert f"GPU 0 (NVIDIA H200) would change under pid {os.getpid()} VLLM::Worker (user " in result["msg"]
    assert "drain the node" in result["msg"]
    assert host.calls == [], "nothing is set when something is refused"
    assert host.policy(power_limit_watts="600")["changed"], "what programs do not feel is set"


def test_a_closed_compute_mode_is_refused_in_use_and_opening_is_not(host: Host) -> None:
    host.used_by(os.getpid(), gpu=1)
    result = host.policy(compute_mode="exclusive_process")
    assert "GPU 1" in result["msg"]
    assert "GPU 0" not in result["msg"]
    host.change("compute_mode", "Exclusive_Process")
    assert host.policy(compute_mode="default")["changed"]
    assert host.calls == [f"-i {BOTH} -c DEFAULT"]


def test_every_problem_is_told_at_once(host: Host) -> None:
    host.change("ecc_mode/current_ecc", "N/A", 0)
    host.change("mig_mode/current_mig", "N/A", 1)
    host.change("gpu_power_readings/max_power_limit", "500.00 W", 1)
    result = host.policy(ecc=True, mig=True, power_limit_watts="650", graphics_clocks_mhz="1200,2100")
    lines = result["msg"].splitlines()
    assert lines == [
        "ecc is true: GPU 0 (NVIDIA H200) has no ECC; leave it out",
        "graphics_clocks_mhz is 1200,2100: GPU 0 (NVIDIA H200) has at most 1980 MHz; give a lower one",
        "mig is true: GPU 1 (NVIDIA H200) has no MIG mode; leave it out",
        "power_limit_watts is 650: GPU 1 (NVIDIA H200) takes 200 to 500 W; set it in this range",
        "graphics_clocks_mhz is 1200,2100: GPU 1 (NVIDIA H200) has at most 1980 MHz; give a lower one",
    ]
    assert host.calls == []


def test_off_is_what_a_gpu_without_the_feature_has(host: Host) -> None:
    host.change("ecc_mode/current_ecc", "N/A")
    host.change("mig_mode/current_mig", "N/A")
    result = host.policy(ecc=False, mig=False)
    assert not result["changed"], result


def test_cards_without_a_power_limit(host: Host) -> None:
    host.change("gpu_power_readings/requested_power_limit", "N/A", 0)
    host.change("gpu_power_readings/current_power_limit", "N/A", 0)
    assert "GPU 0 (NVIDIA H200) has no power limit to set" in host.policy(power_limit_watts="500")["msg"]


def test_memory_clocks_are_those_of_the_card(host: Host) -> None:
    """The recorded cards list none (they are in a virtual machine); others do."""
    assert not host.policy(memory_clocks_mhz="3201,3201")["changed"]
    log = ElementTree.parse(host.details)  # noqa: S314 - our own recording
    for clocks in log.getroot().iter("supported_clocks"):
        for value in ("3201 MHz", "2619 MHz"):
            ElementTree.SubElement(ElementTree.SubElement(clocks, "supported_mem_clock"), "value").text = value
    log.write(host.details)
    assert not host.policy(memory_clocks_mhz="2619,2619")["changed"]
    assert "memory clocks of 2619, 3201 MHz" in host.policy(memory_clocks_mhz="2700,2700")["msg"]
    assert host.calls == [], "clocks are checked here and locked by the unit"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"power_limit_watts": "600W"}, "give whole watts"),
        ({"graphics_clocks_mhz": "1980"}, "lowest and the highest"),
        ({"memory_clocks_mhz": "3201,2619"}, "lowest and the highest"),
    ],
)
def test_wrong_forms(host: Host, options: dict[str, str], text: str) -> None:
    result = host.policy(**options)
    assert result["failed"]
    assert next(iter(options)) in result["msg"]
    assert text in result["msg"]


@pytest.mark.parametrize(
    "answer",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA"
        " driver is installed and running.\n",
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "No devices were found\n",
    ],
)
def test_before_the_driver_is_loaded_it_is_deferred(host: Host, answer: str) -> None:
    (host.folder / "broken").write_text(answer)
    result = host.policy(persistence=True, power_limit_watts="600")
    assert not result.get("failed")
    assert not result["changed"]
    assert result["deferred"] == " ".join(answer.split())
    assert "skipped" not in result, "Ansible would count the task as skipped"


def test_before_the_program_is_there_it_is_deferred(host: Host) -> None:
    result = host.policy(persistence=True, nvidia_smi="no-such-nvidia-smi")
    assert result["deferred"] == "no-such-nvidia-smi is not installed"


def test_other_failures_are_failures(host: Host) -> None:
    (host.folder / "broken").write_text("Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.\n")
    result = host.policy(persistence=True)
    assert result["failed"]
    assert "GPU is lost" in result["msg"]


def test_no_xml(host: Host) -> None:
    host.details.write_text("<?xml version='1.0' ?><nvidia_smi_log><gpu>")
    assert "wrote no XML" in host.policy(persistence=True)["msg"]


def test_a_hanging_driver_is_given_up(host: Host) -> None:
    # Its child keeps the pipe open: neither is waited for.
    (host.folder / "nvidia-smi").write_text("#!/bin/sh\nsleep 30 &\nwait\n")
    start = time.monotonic()
    result = host.policy(persistence=True, timeout=1)
    assert time.monotonic() - start < 10
    assert "no answer within 1 seconds (timeout=1)" in result["msg"]
    assert "reboot" in result["msg"]


@pytest.mark.parametrize("module", ["gpu_policy", "fabric_ready"])
def test_what_the_driver_writes_besides(host: Host, run: Run, module: str) -> None:
    text = f"echo a warning >&2\necho a word before\ncat {host.details}\necho 'WARNING: infoROM is corrupted'\n"
    (host.folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}")
    assert "failed" not in run(module, programs=str(host.folder))


def test_a_program_that_is_none(host: Host) -> None:
    (host.folder / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    assert "cannot be run (Exec format error)" in host.policy(persistence=True)["msg"]


def test_the_variable_is_named(host: Host) -> None:
    told = host.policy(power_limit_watts="9999", graphics_clocks_mhz="1,9999", variable="gpu_fabric_policy")["msg"]
    assert told.splitlines()[0].startswith("gpu_fabric_policy.power_limit_watts is 9999: GPU 0")
    assert sum(line.startswith("gpu_fabric_policy.graphics_clocks_mhz is 1,9999: ") for line in told.splitlines()) == 2
    assert host.policy(power_limit_watts="much", variable="x")["msg"].startswith("x.power_limit_watts is 'much'")


def test_a_refusal_with_a_status(host: Host) -> None:
    (host.folder / "refuses").write_text("Unable to set power limit: Insufficient Permissions")
    (host.folder / "refuses-with-status").touch()
    result = host.policy(power_limit_watts="600")
    assert result["failed"]
    assert "Insufficient Permissions" in result["msg"]
    assert not result["changed"]


def test_a_refusal_with_exit_status_0(host: Host) -> None:
    (host.folder / "refuses").write_text("Warning: not taken.")
    result = host.policy(power_limit_watts="600")
    assert result["failed"]
    assert "GPU 1: power_limit_watts was set to 600 and is 700 afterwards" in result["msg"]


def test_older_drivers_name_the_power_readings_otherwise(load: Load) -> None:
    text = (RECORDING / "details.xml").read_text().replace("gpu_power_readings", "power_readings")
    text = text.replace("requested_power_limit", "power_limit")
    gpu = load("gpu_policy").parse(text)[0]
    assert (gpu["power_limit_watts"], gpu["power_min"], gpu["power_max"]) == (700.0, 200.0, 700.0)


def test_users_are_found_by_the_device_too(load: Load, tmp_path: Path) -> None:
    """nvidia-smi lists no process that opened the device and made no context, nor those of other containers."""
    for pid, name, target in (
        (10, "python3", "/dev/nvidia0"),
        (11, "nv-hostengine", "/dev/nvidia0"),
        (12, "python3", "/dev/nvidia1"),
    ):
        (tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/comm").write_text(f"{name}\n")
        (tmp_path / f"proc/{pid}/cgroup").write_text("0::/system.slice/vllm@qwen.service\n")
        (tmp_path / f"proc/{pid}/fd/3").symlink_to(target)
    module = load("gpu_policy")
    gpu = module.parse((RECORDING / "details.xml").read_text())[0]
    found = module.users(gpu, root=str(tmp_path))
    assert len(found) == 1
    assert found[0].startswith("pid 10 python3 (user ")
    assert found[0].endswith(", vllm@qwen.service)")


# --- fabric_ready -----------------------------------------------------------------------------------------------------


def ready(host: Host, check: bool = False, timeout: int = 1) -> dict[str, Any]:
    return host.run("fabric_ready", programs=str(host.folder), check=check, timeout=timeout)


@pytest.fixture(name="systemd")
def fixture_systemd(host: Host) -> Callable[[str], None]:
    """Stand-ins for systemctl and journalctl: a unit in this state, with one line in its journal."""

    def write(state: str) -> None:
        for name, text in (("systemctl", state), ("journalctl", "fabricmanager[7]: request to query NVSwitch failed")):
            program = host.folder / name
            program.write_text(f"#!/bin/sh\necho '{text}'\n")
            program.chmod(0o755)

    return write


def test_a_complete_fabric(host: Host, systemd: Callable[[str], None]) -> None:
    systemd("active")
    result = ready(host)
    assert result["ready"]
    assert result["gpus"] == [{"index": index, "state": "Completed", "status": "Success"} for index in (0, 1)]


def test_generations_without_a_fabric_state_are_passed_over(host: Host, systemd: Callable[[str], None]) -> None:
    systemd("active")
    host.change("fabric/state", "N/A")
    result = ready(host)
    assert result["ready"]
    assert result["gpus"] == []


@pytest.mark.parametrize(("state", "status"), [("In Progress", "N/A"), ("Completed", "Insufficient Resources")])
def test_an_incomplete_fabric_fails_in_time(
    host: Host, systemd: Callable[[str], None], state: str, status: str
) -> None:
    systemd("active")
    host.change("fabric/state", state, 1)
    host.change("fabric/status", status, 1)
    start = time.monotonic()
    result = ready(host, timeout=3)
    assert 2 <= time.monotonic() - start < 15
    assert result["failed"]
    assert f"after 3 seconds: GPU 1: state {state}, status {status}. CUDA answers error 802" in result["msg"]
    assert "request to query NVSwitch failed" in result["msg"]


def test_a_failed_service_is_not_waited_for(host: Host, systemd: Callable[[str], None]) -> None:
    systemd("failed")
    host.change("fabric/state", "Not Started")
    start = time.monotonic()
    result = ready(host, timeout=60)
    assert time.monotonic() - start < 15
    assert "and its service failed" in result["msg"]


def test_the_fabric_comes_up_while_waiting(host: Host, systemd: Callable[[str], None]) -> None:
    systemd("active")
    host.change("fabric/state", "In Progress")
    complete = RECORDING / "details.xml"
    appears = f"sleep 1; cp {complete} {host.details}.new; mv {host.details}.new {host.details}"
    with subprocess.Popen(["/bin/sh", "-c", appears]):
        result = ready(host, timeout=30)
    assert result["ready"], result


def test_check_mode_does_not_wait(host: Host, systemd: Callable[[str], None]) -> None:
    systemd("inactive")
    host.change("fabric/state", "Not Started")
    start = time.monotonic()
    result = ready(host, check=True, timeout=60)
    assert time.monotonic() - start < 15
    assert not result.get("failed")
    assert not result["ready"]
