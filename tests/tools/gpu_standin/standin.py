#!/usr/bin/python3
"""Stand-in for GPUs in a test node: two H200 behind an NVSwitch, as a kernel and NVIDIA's programs would show them.

Called by one of its names (links to this file in /opt/gpu-standin):

  boot                 What the kernel does at boot: shows the PCI functions, and loads the module that the node's
                       files would make it load. nouveau where neither blacklist nor initramfs keeps it out; else nvidia
                       in the version of the module on disk. Seen through mounts over /proc/driver, /sys/module and
                       /sys/bus/pci/devices.
  nvidia-smi           Replays what two H200s answered (recorded/), with the loaded driver's version and what was set.
  nvidia-persistenced, nv-fabricmanager, nvidia-imex, nv-hostengine, nvlsm
                       Daemons that refuse to start when the module is not loaded, or is of another version than they.
  nvidia-modprobe      Makes device nodes.

What a GPU keeps over a reboot (ECC and MIG mode) is in /var/lib/gpu-standin.json, all else in /run/gpu-standin.
Lines of /run/gpu-standin/processes (pids) are shown as processes that use GPU 0.
"""

import glob
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

HERE = "/opt/gpu-standin"
RECORDED = f"{HERE}/recorded"
RUN = "/run/gpu-standin"
KEPT = "/var/lib/gpu-standin.json"
VOLATILE = f"{RUN}/state.json"
# Not the file in /proc that shows it: systemd 252 gives a sandboxed unit a fresh /proc, without the mounts over it.
LOADED = f"{RUN}/driver/nvidia/version"
GPUS = ("0000:00:06.0", "0000:00:07.0")
FUNCTIONS = {
    **{address: {"device": "0x2335", "subsystem_device": "0x18bf", "class": "0x030200"} for address in GPUS},
    "0000:00:08.0": {"device": "0x22a3", "subsystem_device": "0x1796", "class": "0x068000"},
}
LINK = {"numa_node": "-1", "current_link_width": "16", "max_link_width": "16"}
LOADED_BANNER = """\
NVRM version: NVIDIA UNIX {flavour}Kernel Module{platform}  {version}  Release Build  (dvs-builder@U22)
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""


def read(path, default=""):
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return default


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(text)


def load(path):
    return json.loads(read(path, "{}"))


def run(*command):
    return subprocess.run(command, check=False, capture_output=True, encoding="utf-8", errors="replace")


# --- boot ------------------------------------------------------------------------------------------------------------


def blacklisted(folders, module):
    texts = [read(path) for folder in folders for path in glob.glob(f"{folder}/*.conf")]
    return any(re.search(rf"(?m)^\s*blacklist\s+{module}\s*$", text) for text in texts)


def nouveau_loads(release):
    """Whether the kernel would come up with nouveau: from the initramfs, which has a copy of the settings, or later."""
    if run("modinfo", "-k", release, "nouveau").returncode:
        return False
    if not blacklisted(("/etc/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"), "nouveau"):
        return True
    image = f"/boot/initrd.img-{release}"
    if not os.path.exists(image):
        return False
    with tempfile.TemporaryDirectory() as folder:
        run("unmkinitramfs", image, folder)
        places = (f"{folder}/etc/modprobe.d", f"{folder}/usr/lib/modprobe.d", f"{folder}/lib/modprobe.d")
        inside = [f"{folder}/main{place[len(folder) :]}" for place in places]
        return not blacklisted((*places, *inside), "nouveau")


def module_on_disk(release):
    """Version and file of the module nvidia for this kernel."""
    found = run("modinfo", "-k", release, "nvidia")
    if found.returncode:
        return None, None
    about = dict(re.findall(r"(?m)^(\w+):\s*(\S+)$", found.stdout))
    return about.get("version"), about.get("filename")


def boot():
    release = os.uname().release
    nouveau = nouveau_loads(release)
    version, _ = (None, None) if nouveau else module_on_disk(release)
    driver = "nouveau" if nouveau else "nvidia" if version else None
    for address, function in FUNCTIONS.items():
        folder = f"{RUN}/pci/{address}"
        for name, value in {"vendor": "0x10de", "subsystem_vendor": "0x10de", **LINK, **function}.items():
            write(f"{folder}/{name}", f"{value}\n")
        if driver:
            os.symlink(f"/sys/bus/pci/drivers/{driver}", f"{folder}/driver")
    os.makedirs(f"{RUN}/driver")
    os.makedirs(f"{RUN}/module")
    modules = {"nouveau": ""} if nouveau else {}
    if version:
        source = f"/usr/src/nvidia-{version}/built/flavour"
        is_open = read(source).strip() == "open"
        banner = LOADED_BANNER.format(
            flavour="Open " if is_open else "", platform=" for x86_64" if is_open else "", version=version
        )
        write(f"{RUN}/driver/nvidia/version", banner)
        asked = [line.strip() for path in glob.glob("/etc/modules-load.d/*.conf") for line in read(path).splitlines()]
        names = ["nvidia", "nvidia_modeset", "nvidia_drm", *(name.replace("-", "_") for name in asked)]
        modules = {name: version for name in names if name.startswith("nvidia")}
    for name, number in modules.items():
        write(f"{RUN}/module/{name}/initstate", "live\n")
        if number:
            write(f"{RUN}/module/{name}/version", f"{number}\n")
    for source, target in (("pci", "/sys/bus/pci/devices"), ("driver", "/proc/driver"), ("module", "/sys/module")):
        subprocess.run(["mount", "--bind", f"{RUN}/{source}", target], check=True)
    # What was asked for takes effect with a reset, and a boot is one.
    kept = load(KEPT)
    for gpu in kept.values():
        gpu.update({name: gpu[f"{name}_pending"] for name in ("ecc", "mig") if f"{name}_pending" in gpu})
    write(KEPT, json.dumps(kept))
    return 0


# --- what all programs ask -------------------------------------------------------------------------------------------


def loaded_version():
    found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", read(LOADED))
    return found.group(1) if found else None


def library_version():
    for path in glob.glob("/usr/lib/*-linux-gnu/libnvidia-ml.so.1"):
        return os.path.basename(os.path.realpath(path)).partition(".so.")[2]
    return None


def package_version(pattern):
    form = "${db:Status-Status} ${Version}\n"
    for line in run("dpkg-query", "-W", "-f", form, pattern).stdout.splitlines():
        state, _, version = line.partition(" ")
        if state == "installed":
            return version.split(":")[-1].rpartition("-")[0]
    return None


# --- daemons ---------------------------------------------------------------------------------------------------------

DAEMONS = {
    "nvidia-persistenced": ("/run/nvidia-persistenced/nvidia-persistenced.pid", "nvidia-persistenced"),
    "nv-fabricmanager": ("/run/nvidia-fabricmanager/nv-fabricmanager.pid", "nvidia-fabricmanager*"),
    "nvidia-imex": ("/run/nvidia-imex.pid", "nvidia-imex*"),
    "nv-hostengine": ("/run/nvhostengine.pid", None),
    "nvlsm": ("/run/nvlsm.pid", None),
}


def alive(name):
    pid = read(DAEMONS[name][0]).strip()
    return pid.isdigit() and os.path.exists(f"/proc/{pid}")


def daemon(name, arguments):
    pid_file, package = DAEMONS[name]
    own = package_version(package) if package else None
    if "--version" in arguments:
        print(f"{name} version is : {own}")
        return 0
    loaded = loaded_version()
    if loaded is None:
        print(f"{name}: the NVIDIA driver is not loaded", file=sys.stderr)
        return 1
    if own and own != loaded:
        print(
            f"{name}: NVIDIA GPU driver interface version {own} doesn't match with driver version {loaded}",
            file=sys.stderr,
        )
        return 1
    if os.fork():
        # systemd reads the file as soon as this process ends.
        while not alive(name):
            time.sleep(0.01)
        return 0
    os.setsid()
    if name == "nvidia-persistenced":
        change(VOLATILE, {}, persistence="--no-persistence-mode" not in arguments)
    write(pid_file, f"{os.getpid()}\n")
    with open(os.devnull, "r+b") as null:
        for number in range(3):
            os.dup2(null.fileno(), number)
    os.execvp("sleep", [name, "infinity"])


def modprobe():
    """Device nodes. They are those of /dev/null: without a driver behind it a node of NVIDIA's cannot be opened."""
    if not loaded_version():
        return 1
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        if not os.path.exists(f"/dev/{name}"):
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            os.chmod(f"/dev/{name}", 0o666)
    return 0


# --- nvidia-smi ------------------------------------------------------------------------------------------------------

ONOFF = {"0": False, "1": True, "DISABLED": False, "ENABLED": True}
MODES = {"0": "Default", "2": "Prohibited", "3": "Exclusive_Process"}


def change(path, selected, **values):
    """Remember a setting, of all GPUs or of those selected."""
    state = load(path)
    for number in selected or range(len(GPUS)):
        state.setdefault(str(number), {}).update(values)
    write(path, json.dumps(state))


def settings(number):
    values = {
        "ecc": True,
        "ecc_pending": True,
        "mig": False,
        "mig_pending": False,
        "persistence": False,
        "mode": "Default",
    }
    for path in (KEPT, VOLATILE):
        values.update(load(path).get(str(number), {}))
    return values


def processes():
    return [line for line in read(f"{RUN}/processes").split() if os.path.isdir(f"/proc/{line}")]


def word(on):
    return "Enabled" if on else "Disabled"


def fabric():
    return ("Completed", "Success") if alive("nv-fabricmanager") else ("In Progress", "N/A")


def details(selected):
    """nvidia-smi -q -x"""
    root = ElementTree.parse(f"{RECORDED}/details.xml").getroot()
    root.find("driver_version").text = loaded_version()
    for number, gpu in enumerate(root.findall("gpu")):
        if selected and number not in selected:
            root.remove(gpu)
            continue
        values = settings(number)
        texts = {
            "persistence_mode": word(values["persistence"]),
            "mig_mode/current_mig": word(values["mig"]),
            "mig_mode/pending_mig": word(values["mig_pending"]),
            "ecc_mode/current_ecc": word(values["ecc"]),
            "ecc_mode/pending_ecc": word(values["ecc_pending"]),
            "compute_mode": values["mode"],
            "gsp_firmware_version": loaded_version(),
            "fabric/state": fabric()[0],
            "fabric/status": fabric()[1],
        }
        if "power" in values:
            texts["gpu_power_readings/current_power_limit"] = f"{values['power']:.2f} W"
            texts["gpu_power_readings/requested_power_limit"] = f"{values['power']:.2f} W"
        for path, text in texts.items():
            gpu.find(path).text = text
        if number == 0:
            for pid in processes():
                entry = ElementTree.SubElement(gpu.find("processes"), "process_info")
                for name, text in {
                    "pid": pid,
                    "type": "C",
                    "process_name": read(f"/proc/{pid}/comm").strip(),
                    "used_memory": "2048 MiB",
                }.items():
                    ElementTree.SubElement(entry, name).text = text
    root.find("attached_gpus").text = str(len(root.findall("gpu")))
    return '<?xml version="1.0" ?>\n' + ElementTree.tostring(root, encoding="unicode")


def query(fields, selected):
    """nvidia-smi --query-gpu: what was recorded, and what changes."""
    names = ("index", "uuid", "name", "memory.total", "pci.bus_id", "driver_version", "compute_cap", "mig.mode.current")
    lines = []
    for number, line in enumerate(read(f"{RECORDED}/query.txt").splitlines()):
        if selected and number not in selected:
            continue
        values = dict(zip((*names, "ecc.mode.current"), line.split(", "), strict=True))
        own = settings(number)
        values["driver_version"] = loaded_version()
        values["mig.mode.current"], values["ecc.mode.current"] = word(own["mig"]), word(own["ecc"])
        values["persistence_mode"] = word(own["persistence"])
        unknown = [field for field in fields if field not in values]
        if unknown:
            print(f'Field "{unknown[0]}" is not a valid field to query.')
            return 2
        lines.append(", ".join(values[field] for field in fields))
    print("\n".join(lines))
    return 0


def setting(options, selected):
    """What changes a GPU. Returns None when nothing of that kind was asked for."""
    value = {key: text for key, text in options.items() if key not in ("-i", "--id")}
    done = None
    for key, text in value.items():
        if key in ("-pm", "--persistence-mode"):
            change(VOLATILE, selected, persistence=ONOFF[text])
        elif key in ("-pl", "--power-limit"):
            if not 200 <= float(text) <= 700:
                limits = "which should be between 200.00 W and 700.00 W"
                print(f"Provided power limit {float(text):.2f} W is not a valid power limit {limits}")
                return 2
            change(VOLATILE, selected, power=float(text))
        elif key in ("-e", "--ecc-config"):
            change(KEPT, selected, ecc_pending=ONOFF[text])
        elif key in ("-mig", "--multi-instance-gpu"):
            change(KEPT, selected, mig_pending=ONOFF[text])
        elif key in ("-c", "--compute-mode"):
            change(VOLATILE, selected, mode=MODES.get(text, text.title()))
        elif key in ("-lgc", "--lock-gpu-clocks", "-lmc", "--lock-memory-clocks", "-rgc", "-rmc"):
            change(VOLATILE, selected, **{key.strip("-"): text})
        else:
            continue
        done = 0
        print("All done.")
    return done


def parse(arguments):
    """Options in all the forms that nvidia-smi takes: -pl 500, --power-limit=500."""
    options, waiting = {}, None
    for argument in arguments:
        if argument.startswith("-"):
            waiting, equals, text = argument.partition("=")
            options[waiting] = text if equals else ""
        elif waiting:
            options[waiting] = argument
    return options


def chosen(options):
    text = options.get("-i", options.get("--id", ""))
    return [int(part) if part.isdigit() else GPUS.index(part[-12:].lower()) for part in text.split(",") if part]


def smi(arguments):
    loaded = loaded_version()
    if loaded is None:
        print(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
            " Make sure that the latest NVIDIA driver is installed and running.\n"
        )
        return 9
    if library_version() != loaded:
        print(f"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: {library_version()}")
        return 18
    recorded = {
        "topo -m": "topo.txt",
        "nvlink -s": "nvlink.txt",
        "topo -p2p r": "p2p.txt",
        "-q -d COMPUTE": "compute.txt",
    }
    name = recorded.get(" ".join(arguments))
    if name:
        print(re.sub(r"(?m)^(Driver Version\s+: ).*$", rf"\g<1>{loaded}", read(f"{RECORDED}/{name}")), end="")
        return 0
    options = parse(arguments)
    selected = chosen(options)
    if "-q" in options and "-x" in options:
        print(details(selected))
        return 0
    fields = options.get("--query-gpu")
    if fields:
        return query(fields.split(","), selected)
    done = setting(options, selected)
    if done is None:
        print(f"this stand-in has no answer to: {' '.join(arguments)}", file=sys.stderr)
        return 1
    return done


def main():
    name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
    if name == "boot":
        return boot()
    if name == "nvidia-smi":
        return smi(arguments)
    if name == "nvidia-modprobe":
        return modprobe()
    if name in DAEMONS:
        return daemon(name, arguments)
    print(f"{name}: not one of this stand-in's names", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
