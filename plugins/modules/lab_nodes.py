#!/usr/bin/python
# Copyright: the ironrack authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Test nodes of a lab: networks and containers that boot systemd."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_nodes
short_description: Bring the test nodes of a lab to their declared state
version_added: "0.1.0"
description:
  - Creates the networks and nodes of a lab with podman or docker, starts what is stopped, makes anew what differs
    from its declaration, and removes nodes and networks of this lab that are declared no longer.
  - A node is a container that boots systemd. It gets all capabilities but those that would reach the machine below it.
  - Waits until every node has booted, then installs the given files and returns the nodes' SSH host keys, read through
    the engine, which is a channel to trust.
  - Labels mark what belongs to a lab and hold a digest of the declaration. Nothing without the lab's label is touched.
author:
  - The ironrack authors (@ironrack)
options:
  executable:
    description: The engine's command line, for instance a command that enters the lab, followed by C(podman).
    type: list
    elements: str
    default: [podman]
  engine:
    description: Whose command line it is.
    type: str
    choices: [podman, docker]
    default: podman
  lab:
    description: Name of the lab.
    type: str
    required: true
  prefix:
    description: What the names of containers and networks begin with; needed where the engine is not the lab's own.
    type: str
    default: ""
  state:
    description: With V(absent), removes all nodes and networks of the lab.
    type: str
    choices: [present, absent]
    default: present
  internal:
    description: Whether the networks have no way out.
    type: bool
    default: true
  networks:
    description: Networks of the lab.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the network.
        type: str
        required: true
      subnet:
        description: Its subnet, in CIDR notation.
        type: str
        required: true
      gateway:
        description: Address of the bridge.
        type: str
        required: true
      subnet6:
        description: A subnet of IPv6 beside O(networks[].subnet), in CIDR notation.
        type: str
      gateway6:
        description: Address of the bridge in O(networks[].subnet6).
        type: str
      interface:
        description: Name of the interface that a node has on it.
        type: str
        required: true
  nodes:
    description: Nodes of the lab.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the node, which is its host name as well.
        type: str
        required: true
      suite:
        description: Which of O(images) it boots.
        type: str
        required: true
      addresses:
        description: >-
          Its address on each network, by the network's name, in the order of the networks; a list of two on a network
          with IPv4 and IPv6.
        type: dict
        required: true
      forwards:
        description: Ports to publish on the machine; used with O(publish) only.
        type: list
        elements: dict
        default: []
  images:
    description: Image of each suite.
    type: dict
    default: {}
  mounts:
    description: Folders of the machine to mount in every node.
    type: list
    elements: dict
    default: []
    suboptions:
      source:
        description: Folder on the machine.
        type: str
        required: true
      target:
        description: Folder in the node.
        type: str
        required: true
      read_only:
        description: Whether the node may only read it.
        type: bool
        default: true
  publish:
    description: Publish the nodes' C(forwards) through the engine.
    type: bool
    default: false
  shm_size:
    description: Size of /dev/shm.
    type: str
    default: 1g
  files:
    description: Files to install in every node once it has booted.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path in the node.
        type: str
        required: true
      content:
        description: What it holds. A newline is added at the end where there is none.
        type: str
        required: true
      mode:
        description: Permissions, in octal.
        type: str
        default: "0644"
      owner:
        description: Owner and group.
        type: str
        default: root
  boot_timeout:
    description: Seconds that a node may take to boot.
    type: int
    default: 90
  lock:
    description: Lock file. A run that was killed may have left this module working; the next one waits for it.
    type: path
attributes:
  check_mode:
    description: Reports what it would do and does nothing.
    support: full
  diff_mode:
    description: The list of actions says what changed; there is no diff.
    support: none
"""

EXAMPLES = r"""
- name: Two nodes on one network
  ironrack.vllm.lab_nodes:
    lab: demo
    networks:
      - {name: cluster, subnet: 10.77.1.0/24, gateway: 10.77.1.1, interface: eth0}
    images: {bookworm: "localhost/ironrack-node:bookworm"}
    nodes:
      - {name: n1, suite: bookworm, addresses: {cluster: 10.77.1.11}}
      - {name: n2, suite: bookworm, addresses: {cluster: 10.77.1.12}}

- name: No trace of them
  ironrack.vllm.lab_nodes:
    lab: demo
    state: absent
"""

RETURN = r"""
actions:
  description: What was done, or would be done, in words.
  returned: always
  type: list
  elements: str
  sample: ["create network cluster", "create node n1"]
nodes:
  description: State and SSH host keys of each node.
  returned: when O(state=present), not in check mode
  type: dict
  sample: {"n1": {"state": "running", "failed_units": [], "host_keys": ["ssh-ed25519 AAAAC3..."]}}
"""

import contextlib
import fcntl
import hashlib
import io
import json
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule

DROPPED = ("SYS_TIME", "SYS_RESOURCE", "SYS_MODULE", "SYS_RAWIO")
LAB, DIGEST = "ironrack.lab", "ironrack.digest"

# Waits for the end of the boot, then tells everything there is to know in one go.
PROBE = """
end=$(( $(date +%s) + {timeout} ))
while :; do
  state=$(systemctl is-system-running 2>/dev/null)
  case $state in running|degraded) break ;; esac
  if [ "$(date +%s)" -ge "$end" ]; then
    echo "state $state"
    systemctl list-jobs --no-legend 2>&1 | sed 's/^/failed /'
    exit 0
  fi
  sleep 0.1
done
echo "state $state"
systemctl list-units --failed --plain --no-legend 2>/dev/null | sed 's/^/failed /'
sed 's/^/key /' /etc/ssh/ssh_host_*_key.pub
for file in {paths}; do
  [ -f "$file" ] || continue
  echo "file $(stat -c '%a %U' "$file") $(sha256sum "$file")"
done
"""


class EngineError(Exception):
    """The engine refused something."""


def digest_of(declaration):
    return hashlib.sha256(json.dumps(declaration, sort_keys=True).encode()).hexdigest()


def network_arguments(wanted, network):
    """Command line that creates a network, its digest and name excepted."""
    arguments = ["network", "create", "--subnet", network["subnet"], "--gateway", network["gateway"]]
    if network.get("subnet6"):
        arguments += ["--subnet", network["subnet6"], "--gateway", network["gateway6"]]
    # podman sees it by the subnet, and takes the word as a wish for a subnet of the other family.
    if wanted["engine"] == "docker" and (":" in network["subnet"] or network.get("subnet6")):
        arguments.append("--ipv6")
    if wanted["internal"]:
        arguments.append("--internal")
    if wanted["engine"] == "podman":
        # Names come from /etc/hosts, as on hosts without a name server; and a closed lab has none to ask.
        arguments.append("--disable-dns")
    return [*arguments, "--label", f"{LAB}={wanted['lab']}"], wanted["prefix"] + network["name"]


def node_arguments(wanted, node, image):
    """Command line that creates a node, its digest and image excepted."""
    podman = wanted["engine"] == "podman"
    arguments = ["--name", wanted["prefix"] + node["name"], "--hostname", node["name"]]
    arguments += ["--label", f"{LAB}={wanted['lab']}"]
    for network in wanted["networks"]:
        given = node["addresses"].get(network["name"])
        if given is None:
            continue
        addresses = given if isinstance(given, list) else [given]
        name, interface = wanted["prefix"] + network["name"], network["interface"]
        fixed = ",".join(f"{'ip6' if ':' in word else 'ip'}={word}" for word in addresses)
        if podman:
            arguments += ["--network", f"{name}:{fixed},interface_name={interface}"]
        else:
            option = f"driver-opt=com.docker.network.endpoint.ifname={interface}"
            arguments += ["--network", f"name={name},{fixed},{option}"]
    arguments += ["--restart", "always", "--shm-size", wanted["shm_size"], "--cap-add", "ALL"]
    for capability in DROPPED:
        arguments += ["--cap-drop", capability]
    arguments += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
    if podman:
        arguments += ["--systemd=always", "--no-hosts", "--pull=never"]
        if wanted["internal"]:
            arguments.append("--dns=none")
    else:
        arguments += ["--security-opt", "systempaths=unconfined", "--cgroupns", "private", "--env", "container=docker"]
        for folder in ("/run:exec", "/run/lock", "/tmp:exec"):  # noqa: S108
            arguments += ["--tmpfs", folder]
    for item in wanted["mounts"]:
        mode = "ro" if item["read_only"] else "rw"
        arguments += ["--volume", f"{item['source']}:{item['target']}:{mode}"]
    if wanted["publish"]:
        for forward in node["forwards"]:
            arguments += ["--publish", f"{forward['listen']}:{forward['port']}"]
    return arguments, image


def parse_probe(text):
    """What the probe printed, as a dict."""
    found = {"state": "", "failed_units": [], "host_keys": [], "files": {}}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "state":
            found["state"] = rest.strip()
        elif kind == "failed":
            found["failed_units"].append(rest.split()[0] if rest.split() else rest)
        elif kind == "key":
            found["host_keys"].append(" ".join(rest.split()[:2]))
        elif kind == "file":
            words = rest.split()
            found["files"][words[-1]] = " ".join(words[:-1])
    return found


def file_signature(item):
    digest = hashlib.sha256(item["content"].encode()).hexdigest()
    return f"{item['mode'].lstrip('0')} {item['owner']} {digest}"


def archive_of(files):
    """A tar archive of files, owned by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for item in files:
            data = item["content"].encode()
            member = tarfile.TarInfo(item["path"].lstrip("/"))
            member.size, member.mode, member.mtime = len(data), int(item["mode"], 8), int(time.time())
            member.uname = member.gname = item["owner"]
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


class Engine:
    def __init__(self, executable):
        self.executable = list(executable)

    def __call__(self, *arguments, data=None, check=True):
        command = [*self.executable, *arguments]
        done = subprocess.run(command, input=data or b"", capture_output=True, check=False)
        if check and done.returncode:
            message = done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip()
            raise EngineError(f"{' '.join(arguments[:3])} failed with code {done.returncode}: {message[-1500:]}")
        return done.stdout.decode(errors="replace")

    def containers(self, lab):
        """Name -> (digest, running) of the lab's containers."""
        names = self("ps", "-a", "--format", "{{.Names}}", "--filter", f"label={LAB}={lab}").split()
        # Of one whose removal was killed the engine knows the name and nothing else: it fits no declaration.
        found = dict.fromkeys(names, (None, False))
        for item in self.inspected(names):
            labels = item["Config"]["Labels"] or {}
            state = item["State"]
            running = bool(state["Running"]) and not state.get("Paused")
            found[item["Name"].lstrip("/")] = (labels.get(DIGEST), running)
        return found

    def inspected(self, names):
        """What the engine tells of containers; nothing of those that it cannot inspect."""
        if not names:
            return []
        try:
            return json.loads(self("inspect", "--type", "container", *names))
        except EngineError:
            return [item for name in names for item in self.inspected([name])] if len(names) > 1 else []

    def networks(self, lab):
        """Name -> digest of the lab's networks."""
        names = self("network", "ls", "--format", "{{.Name}}", "--filter", f"label={LAB}={lab}").split()
        if not names:
            return {}
        found = {}
        for item in json.loads(self("network", "inspect", *names)):
            name = item.get("name") or item["Name"]
            labels = item.get("labels") or item.get("Labels") or {}
            found[name] = labels.get(DIGEST)
        return found


class Reconciler:
    def __init__(self, parameters, check_mode):
        self.parameters = parameters
        self.check_mode = check_mode
        self.engine = Engine(parameters["executable"])
        self.actions = []
        self.warnings = []

    def do(self, words, *commands):
        self.actions.append(words)
        if not self.check_mode:
            for command in commands:
                self.engine(*command)

    def declared(self):
        """Wanted networks and nodes: name -> (digest, command line)."""
        wanted = self.parameters
        networks, nodes = {}, {}
        if wanted["state"] == "absent":
            return networks, nodes
        for network in wanted["networks"]:
            arguments, name = network_arguments(wanted, network)
            digest = digest_of(arguments)
            networks[name] = (digest, [*arguments, "--label", f"{DIGEST}={digest}", name])
        for node in wanted["nodes"]:
            image = wanted["images"].get(node["suite"])
            if image is None:
                raise EngineError(f"node {node['name']}: no image is given for suite {node['suite']!r}")
            arguments, image = node_arguments(wanted, node, image)
            digest = digest_of([arguments, image, {name: made[0] for name, made in networks.items()}])
            command = ["create", *arguments, "--label", f"{DIGEST}={digest}", image]
            nodes[wanted["prefix"] + node["name"]] = (digest, command)
        return networks, nodes

    def run(self):
        networks, nodes = self.declared()
        lab = self.parameters["lab"]
        here, nets = self.engine.containers(lab), self.engine.networks(lab)
        for name in sorted(here):
            if name not in nodes or here[name][0] != nodes[name][0]:
                self.do(f"remove node {name}", ["rm", "-f", "-v", *self.quick(), name])
                del here[name]
        for name in sorted(nets):
            if name not in networks or nets[name] != networks[name][0]:
                self.do(f"remove network {name}", ["network", "rm", name])
                del nets[name]
        for name, (_digest, command) in networks.items():
            if name not in nets:
                self.do(f"create network {name}", command)
        if nodes:
            with ThreadPoolExecutor(max_workers=min(len(nodes), 8)) as pool:
                return dict(pool.map(lambda name: self.node(name, nodes[name][1], here.get(name)), nodes))
        return {}

    def quick(self):
        return ["-t", "0"] if self.parameters["engine"] == "podman" else []

    def node(self, name, create, present):
        if present is None:
            self.do(f"create node {name}", create, ["start", name])
        elif not present[1]:
            self.start(name, create)
        short = name[len(self.parameters["prefix"]) :]
        if self.check_mode:
            return short, {}
        return short, self.settle(name)

    def start(self, name, create):
        """Start a node that is stopped, paused, or half made by a run that was killed."""
        try:
            self.engine("unpause", name, check=False) if not self.check_mode else None
            self.do(f"start node {name}", ["start", name])
        except EngineError:
            self.do(f"make node {name} anew", ["rm", "-f", "-v", *self.quick(), name], create, ["start", name])

    def probe(self, name, timeout):
        paths = " ".join(item["path"] for item in self.parameters["files"])
        script = PROBE.format(timeout=timeout, paths=paths)
        end = time.monotonic() + timeout
        while True:
            try:
                return parse_probe(self.engine("exec", "-i", name, "sh", "-s", data=script.encode()))
            except EngineError:  # in its first moments a container may refuse to be entered
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def settle(self, name):
        """Wait for a node's boot and install its files."""
        found = self.probe(name, self.parameters["boot_timeout"])
        if found["state"] not in ("running", "degraded"):
            jobs = ", ".join(found["failed_units"]) or "none"
            raise EngineError(
                f"node {name} has not booted after {self.parameters['boot_timeout']} s: its state is "
                f"{found['state'] or 'unknown'}, its jobs: {jobs}; what it printed: "
                + self.engine("logs", "--tail", "20", name, check=False)
            )
        files = self.parameters["files"]
        stale = [item for item in files if found["files"].get(item["path"]) != file_signature(item)]
        if stale:
            self.actions.append(f"install {len(stale)} files in node {name}")
            self.engine("exec", "-i", name, "tar", "-x", "-C", "/", "-f", "-", data=archive_of(stale))
        if found["failed_units"]:
            self.warnings.append(f"node {name} is degraded: {', '.join(found['failed_units'])}")
        return {key: found[key] for key in ("state", "failed_units", "host_keys")}


@contextlib.contextmanager
def hold_lock(path, timeout=600):
    if path is None:
        yield
        return
    with open(path, "a") as file:
        end = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise EngineError(f"another run has held {path} for {timeout} s") from None
                time.sleep(0.1)
        yield


def main():
    network = {key: {"type": "str", "required": True} for key in ("name", "subnet", "gateway", "interface")}
    network |= {key: {"type": "str"} for key in ("subnet6", "gateway6")}
    node = {
        "name": {"type": "str", "required": True},
        "suite": {"type": "str", "required": True},
        "addresses": {"type": "dict", "required": True},
        "forwards": {"type": "list", "elements": "dict", "default": []},
    }
    mount = {
        "source": {"type": "str", "required": True},
        "target": {"type": "str", "required": True},
        "read_only": {"type": "bool", "default": True},
    }
    file = {
        "path": {"type": "str", "required": True},
        "content": {"type": "str", "required": True},
        "mode": {"type": "str", "default": "0644"},
        "owner": {"type": "str", "default": "root"},
    }
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "list", "elements": "str", "default": ["podman"]},
            "engine": {"type": "str", "choices": ["podman", "docker"], "default": "podman"},
            "lab": {"type": "str", "required": True},
            "prefix": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "internal": {"type": "bool", "default": True},
            "networks": {"type": "list", "elements": "dict", "default": [], "options": network},
            "nodes": {"type": "list", "elements": "dict", "default": [], "options": node},
            "images": {"type": "dict", "default": {}},
            "mounts": {"type": "list", "elements": "dict", "default": [], "options": mount},
            "publish": {"type": "bool", "default": False},
            "shm_size": {"type": "str", "default": "1g"},
            "files": {"type": "list", "elements": "dict", "default": [], "options": file},
            "boot_timeout": {"type": "int", "default": 90},
            "lock": {"type": "path"},
        },
        supports_check_mode=True,
    )
    parameters = json.loads(json.dumps(module.params))  # plain types, whatever the tagging of values does
    for item in parameters["files"]:
        item["content"] = item["content"].rstrip("\n") + "\n"
    reconciler = Reconciler(parameters, module.check_mode)
    try:
        with hold_lock(parameters["lock"]):
            nodes = reconciler.run()
    except (EngineError, OSError) as problem:
        module.fail_json(msg=f"lab {parameters['lab']}: {problem}", actions=reconciler.actions)
    for warning in reconciler.warnings:
        module.warn(warning)
    result = {"changed": bool(reconciler.actions), "actions": reconciler.actions}
    if parameters["state"] == "present" and not module.check_mode:
        result["nodes"] = nodes
    module.exit_json(**result)


if __name__ == "__main__":
    main()
