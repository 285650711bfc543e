#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: release
short_description: Build, fetch and switch the immutable environment that vLLM and Ray run in
version_added: 0.1.0
description:
  - >-
    A release is one folder, C(<prefix>/releases/<id>), with a Python environment that is never changed again. Its id is
    worked out on the controller from the lock file, the extra wheels, the Python and the paths, so the same inputs are
    the same release.
  - >-
    V(inspected) only looks; it also tells what is no longer as it was built. V(built) makes the release on one
    node, from the archive in the cache or from the package index, packs the archive for the others and serves it
    for a short time. V(fetched) brings a node to the same release from that archive, and proves that it imports.
    V(repaired) writes the files again that are no longer as they were built, each in one step, and leaves all
    others alone. V(current) proves that the release imports, where V(fetched) did not just do so, switches the
    C(current) link to it in one step and removes old releases.
  - >-
    The marker C(release.json) is written last, when everything else is on disk. A folder without it is a leftover
    of a killed run: it is wiped and made anew, unless it is in use: then it is repaired in its place. A lock on the
    folder keeps two runs from building at once, also when the first one lost its controller.
  - What it does is logged on the node to O(log_path).
author:
  - The ironrack authors
options:
  state:
    description: What to reach.
    type: str
    choices: [inspected, built, fetched, repaired, current]
    required: true
  variant:
    description: Hardware the release is for.
    type: str
    choices: [cu130, cu129, cpu]
    required: true
  vllm_version:
    description: Version of vLLM that the lock must hold.
    type: str
    required: true
  python:
    description: Python of the release, as V(3.12); with a patch level (V(3.12.7)) every node must have exactly that.
    type: str
    required: true
  interpreter:
    description: >-
      With O(method=venv), the interpreter on the nodes that the environment is made from. Default
      C(/usr/bin/python<major>.<minor>).
    type: str
    default: ""
  method:
    description:
      - What the environment is made with.
      - >-
        V(conda) brings its own Python and the libraries under it, from O(conda_lock). Nodes need none. V(venv) is a
        virtual environment over the nodes' O(interpreter).
    type: str
    choices: [conda, venv]
    default: venv
  conda_lock:
    description: With O(method=conda), path of the explicit conda lock on the controller, with a sha256 in every line.
    type: str
    default: ""
  conda_client:
    description: >-
      What installs the conda packages on the builder. V(rattler) is py-rattler, from the package index, in an
      environment of its own. V(miniforge) is the C(conda) command.
    type: str
    choices: [rattler, miniforge]
    default: rattler
  conda_mirror:
    description: >-
      Place under which each channel has a folder of its name, as C(http), C(https) or C(file) URL. Empty means the URLs
      of the lock. Credentials in the URL are passed on without showing up in arguments or logs.
    type: str
    default: ""
  rattler_version:
    description: Version of py-rattler, which the builder fetches from the index.
    type: str
    default: 0.28.0
  rattler_sha256:
    description: Hash of py-rattler's wheel for linux x86_64.
    type: str
    default: 4f4ab1d34d5394e7ce130a86e59009c95ace4f5757d9c3af04de1351bcea47eb
  miniforge_url:
    description: With O(conda_client=miniforge), URL of its installer.
    type: str
    default: ""
  miniforge_sha256:
    description: Hash of that installer.
    type: str
    default: ""
  lock:
    description: Path of the lock file on the controller.
    type: str
    required: true
  wheels:
    description: Paths of further wheels on the controller, installed as they are, without their requirements.
    type: list
    elements: str
    default: []
  prefix:
    description: Folder that holds C(releases) and the link C(current).
    type: path
    default: /opt/ironrack
  cache_dir:
    description: Folder on the nodes for archives, downloads and uv's cache.
    type: path
    default: /var/cache/ironrack
  log_path:
    description: Log file on the node.
    type: path
    default: /var/log/ironrack-release.log
  index_url:
    description: >-
      Package index; empty, only O(find_links) is read. Credentials in the URL are passed on without showing up in
      arguments or logs.
    type: str
    default: https://pypi.org/simple
  extra_index_urls:
    description: Further package indexes. All are asked; the hashes in the lock decide what is accepted.
    type: list
    elements: str
    default: []
  find_links:
    description: Folders on the builder, or pages, with further wheels.
    type: list
    elements: str
    default: []
  http_proxy:
    description: Proxy for the package index.
    type: str
    default: ""
  ca_bundle:
    description: File on the builder with the certificate authorities to trust, instead of the system's.
    type: str
    default: ""
  uv_version:
    description: Version of uv, which the builder fetches from the index.
    type: str
    default: 0.13.9
  uv_sha256:
    description: Hash of uv's wheel for linux x86_64.
    type: str
    default: d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19
  pack:
    description: With O(state=built), also write the archive that other nodes fetch.
    type: bool
    default: true
  serve:
    description: With O(state=built) and O(state=fetched), serve the archive read-only from a transient systemd unit.
    type: dict
    suboptions:
      address:
        description: Address to listen on.
        type: str
        required: true
      port:
        description: Port to listen on.
        type: int
        required: true
      lifetime:
        description: Seconds after which systemd ends it in any case. It ends by itself when nobody asks any more.
        type: int
        default: 3600
  verify:
    description: >-
      How O(state=inspected) and O(state=repaired) look for what has changed. V(quick) compares sizes, times, modes and
      owners, V(full) reads every byte.
    type: str
    choices: [quick, full]
    default: quick
  source:
    description: >-
      With O(state=fetched) and O(state=repaired), what O(state=built) returned as C(archive) on the node that has it.
    type: dict
    default: {}
  chain:
    description: >-
      With O(state=fetched), what the filter P(ironrack.vllm.fanout_sources#filter) says of this node. The archive comes
      from the node before it in a chain and is handed on while it still arrives.
    type: dict
    default: {}
  keep:
    description: >-
      With O(state=current), how many releases to keep. The current one and those in use always stay. With
      O(state=built) it counts on a host that runs none itself.
    type: int
    default: 3
attributes:
  check_mode:
    description: Says what would be done; nothing on the node is needed for it.
    support: full
  diff_mode:
    description: Shows the switch of C(current).
    support: partial
"""

EXAMPLES = r"""
- name: Look whether the node has the release
  ironrack.vllm.release:
    state: inspected
    variant: cu130
    vllm_version: 0.33.0
    python: "3.12"
    lock: "{{ role_path }}/files/locks/cu130-cp312.txt"
"""

RETURN = r"""
release_id:
  description: Identity of the release.
  returned: always
  type: str
  sample: 0f3a6c2d9b1e4f58
release:
  description: Its folder.
  returned: always
  type: str
present:
  description: Whether the release is complete on this node.
  returned: always
  type: bool
current:
  description: Whether the C(current) link points to it.
  returned: always
  type: bool
previous:
  description: Where the C(current) link points, or pointed before it was switched.
  returned: always
  type: str
before:
  description: Id of the release that was current before this task, or empty.
  returned: always
  type: str
before_that:
  description: Id of the release that was current before that one, or empty.
  returned: always
  type: str
link_time:
  description: >-
    When the link C(current) was made, in nanoseconds since the epoch, or 0; units that are older get restarted.
  returned: always
  type: int
versions:
  description: Versions of vLLM, torch, Ray and Transformers that the lock holds.
  returned: always
  type: dict
drift:
  description: >-
    What is no longer as it was built. C(changed) says of each path what about it, C(missing) and C(extra) are lists.
    Each holds 100 paths at most, C(total) counts all.
  returned: O(state=inspected)
  type: dict
manifest_sha256:
  description: Hash of the list of the release's files. Equal on two nodes, they have the same build.
  returned: O(state=inspected)
  type: str
has_archive:
  description: Whether the release's archive lies on this node.
  returned: O(state=inspected)
  type: bool
runtime:
  description: >-
    Versions found on this node, of C(python), C(vllm), C(ray), C(torch), C(nccl), C(cuda) (of torch), C(vllm_cuda) (the
    major version that vLLM's extension is linked to) and C(driver). What is not there is left out.
  returned: O(state=inspected)
  type: dict
restart:
  description: Units that may have read a file while it was not as it was built; playbooks/serve.yml restarts them.
  returned: O(state=repaired)
  type: list
  elements: str
missing_commands:
  description: Programs that V(built) and V(fetched) need and that are not installed.
  returned: O(state=inspected)
  type: list
  elements: str
archive:
  description: >-
    The archive's C(path), C(sha256), C(size), C(unpacked_bytes), C(file) (its name and digests), the C(manifest_sha256)
    of the release and, when it is served, C(url).
  returned: O(state=built), when there is one
  type: dict
actions:
  description: What was done.
  returned: always
  type: list
  elements: str
log:
  description: The log file on the node.
  returned: always
  type: str
"""

import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import http.client
import json
import os
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import zipfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url
from ansible_collections.ironrack.vllm.plugins.module_utils import conda_env, fanout, release_tree
from ansible_collections.ironrack.vllm.plugins.module_utils.release_tree import (
    MANIFEST,
    MARKER,
    file_sha256,
    write_atomically,
    write_manifest,
)

COMMANDS = ("tar", "zstd")
CHUNK = 1 << 20
GIB = 1 << 30
SERVER_UNIT = "ironrack-release-server.service"
# Distributions whose versions are compared over the nodes, as their folders are named.
DISTRIBUTIONS = {"vllm": "vllm", "ray": "ray", "torch": "torch", "nvidia_nccl_cu": "nccl"}
DISTRIBUTION = re.compile(r"(vllm|ray|torch|nvidia_nccl_cu[0-9]+)-([^-]+)\.dist-info")
PRINT_PYTHON = "import platform; print(platform.python_version())"
# Names that a library is linked to stand ahead of its code.
LINKED_WITHIN = 16 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# How many changed files are named; that of a release which somebody upgraded by hand would be thousands.
NAMED_FILES = 100
# How many of them on the screen.
SHOWN_FILES = 20
UV_WHEEL = "uv-{version}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
# A process's start is known to a hundredth of a second, the boot it is counted from to a second.
CLOCK_SLACK = 1.0
# What tar and the environment write beside the package files themselves.
ROOM_TO_SPARE = GIB


class ReleaseError(Exception):
    """A problem whose text names what is wrong and what helps."""


class BusyError(ReleaseError):
    """Another run holds the lock."""


# ---------------------------------------------------------------- files


def wipe(path):
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


def this_machine():
    """A digest of the machine's id, which is not to be given away itself; hosts of two sites may share a name."""
    try:
        with open("/etc/machine-id", encoding="ascii") as stream:
            text = stream.read().strip()
    except OSError:
        text = ""
    return hashlib.sha256(f"ironrack {text or socket.gethostname()}".encode()).hexdigest()[:16]


def linked_cuda(path):
    """Major version of CUDA that a library is linked to, or None."""
    with open(path, "rb") as stream:
        match = re.search(rb"\0libcudart\.so\.([0-9]+)\0", stream.read(LINKED_WITHIN))
    return match[1].decode() if match else None


def existing_parent(path):
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def require_space(needs, remedy):
    """needs: [(folder, bytes, what for)]; needs on one file system are added up."""
    totals = {}
    for folder, size, purpose in needs:
        place = existing_parent(folder)
        entry = totals.setdefault(os.stat(place).st_dev, {"place": place, "size": 0, "purposes": []})
        entry["size"] += size
        entry["purposes"].append(f"{purpose} in {folder}")
    for entry in totals.values():
        info = os.statvfs(entry["place"])
        free = info.f_bavail * info.f_frsize
        if free < entry["size"]:
            raise ReleaseError(
                f"not enough disk space on {socket.gethostname()}: {' and '.join(entry['purposes'])} "
                f"need about {entry['size'] / GIB:.1f} GiB, {free / GIB:.1f} GiB are free. "
                f"The release in use is not touched. {remedy}"
            )


def sync_file_system(path):
    """The marker must not reach the disk before what it vouches for."""
    done = subprocess.run(["sync", "--file-system", path], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{path} on {socket.gethostname()} could not be written to the disk: {done.stderr.strip()}")


# ---------------------------------------------------------------- network


def wheel_link(page, content_type, base_url, file_name):
    """URL of one file on a simple index page, HTML or JSON; None when the page does not list it."""
    if "json" in content_type:
        links = [item["url"] for item in json.loads(page).get("files", [])]
    else:
        links = [link.replace("&amp;", "&") for link in re.findall(r"""href\s*=\s*["']([^"']+)["']""", page)]
    for link in links:
        url = urllib.parse.urldefrag(urllib.parse.urljoin(base_url, link)).url
        if urllib.parse.unquote(urllib.parse.urlsplit(url).path).rsplit("/", 1)[-1] == file_name:
            return url
    return None


# ---------------------------------------------------------------- the release


class Release:
    def __init__(self, module):
        params = module.params
        self.module = module
        self.params = params
        self.id = params["release_id"]
        self.versions = params["versions"]
        self.root = os.path.join(params["prefix"], "releases")
        self.path = os.path.join(self.root, self.id)
        self.link = os.path.join(params["prefix"], "current")
        self.proof = os.path.join(self.root, f".{self.id}.proven")
        self.archives = os.path.join(params["cache_dir"], "releases")
        self.archive_path = os.path.join(self.archives, f"{self.id}.tar.zst")
        self.python = os.path.join(self.path, "bin", "python")
        self.conda = params["conda"]
        self.lock_handles = []
        self.actions = []
        self.changed = False
        self.before_that = release_tree.linked(params["prefix"], "previous")

    # -- looking

    def marker(self, path=None):
        """What the marker says, or None when the release is not complete."""
        return release_tree.read_marker(path or self.path)

    def linked(self):
        try:
            return os.readlink(self.link)
        except OSError:
            return ""

    def is_current(self):
        return os.path.basename(self.linked()) == self.id

    def used_by(self):
        """Who would lose files if the folder were taken away: the link leads to it, or units run from it."""
        if not os.path.isdir(self.path):
            return []
        units = release_tree.users(self.params["prefix"]).get(self.id, {})
        return [*([self.link] if self.is_current() else []), *sorted(units)]

    def examine(self):
        """(what is no longer as it was built, the manifest or None when that itself is damaged)."""
        findings = release_tree.Findings()
        marker = self.marker()
        if marker is None:
            # What is current was complete once. Anything else is the leftover of a killed run, and made anew.
            if self.is_current() and os.path.isdir(self.path):
                findings.missing.append(MARKER)
            return findings, None
        try:
            entries = release_tree.read_manifest(self.path, marker.get("manifest_sha256"))
        except release_tree.TreeError as error:
            findings.changed[MANIFEST] = str(error)
            return findings, None
        return release_tree.inspect(self.path, entries, full=self.params["verify"] == "full"), entries

    def inspected(self):
        findings, _entries = self.examine()
        return {
            "missing_commands": missing_commands(),
            "drift": findings.report(NAMED_FILES),
            "manifest_sha256": (self.marker() or {}).get("manifest_sha256", ""),
            "has_archive": os.path.exists(self.archive_path),
            "runtime": self.runtime(),
        }

    def runtime(self):
        """Versions that have to be the same on all nodes, read without importing anything."""
        found = {}
        for name in glob.glob(os.path.join(self.path, "lib", "python3*", "site-packages", "*.dist-info")):
            match = DISTRIBUTION.fullmatch(os.path.basename(name))
            if match:
                found[DISTRIBUTIONS[re.sub(r"[0-9]+$", "", match[1])]] = match[2]
        for name in glob.glob(os.path.join(self.path, "lib", "python3*", "site-packages", "torch", "version.py")):
            with contextlib.suppress(OSError), open(name, encoding="utf-8") as stream:
                match = re.search(r"(?m)^cuda\b[^=]*=\s*['\"]([\d.]+)", stream.read())
                found.update({"cuda": match[1]} if match else {})
        extension = self.extension_cuda()
        found.update({"vllm_cuda": extension} if extension else {})
        with contextlib.suppress(OSError), open("/proc/driver/nvidia/version", encoding="utf-8") as stream:
            match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", stream.read())
            found.update({"driver": match[1]} if match else {})
        # The environment's own Python; before there is one, that which it will be made from.
        own = self.conda or os.path.exists(self.python)
        ask = [self.python if own else self.params["interpreter"], "-I", "-c", PRINT_PYTHON]
        if os.path.exists(ask[0]):
            done = subprocess.run(ask, capture_output=True, text=True, check=False)
            found.update({"python": done.stdout.strip()} if done.returncode == 0 else {})
        return found

    def extension_cuda(self):
        """Major version of CUDA that vLLM's extension is made for, or None."""
        names = glob.glob(os.path.join(self.path, "lib", "python3*", "site-packages", "vllm", "_C*.so"))
        with contextlib.suppress(OSError):
            return next(filter(None, map(linked_cuda, sorted(names))), None)
        return None

    def interpreter_version(self):
        """Version of the Python that the environment is made from; with conda the release brings it."""
        interpreter = self.python if self.conda else self.params["interpreter"]
        try:
            done = subprocess.run(
                [interpreter, "-I", "-c", PRINT_PYTHON],
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            if self.conda:
                said = (getattr(error, "stderr", "") or str(error)).strip()
                raise ReleaseError(
                    f"the release's own Python {interpreter} does not start on {socket.gethostname()}: {said}. Its "
                    "conda packages need a Linux as new as the builder's: update this node, or take it out of the "
                    "instances."
                ) from None
            raise ReleaseError(
                f"the interpreter {interpreter} does not run on {socket.gethostname()} ({error}). Install Python "
                f"{self.params['python']} there, or name another with python_env_interpreter and python_env_python."
            ) from None
        found = done.stdout.strip()
        wanted = self.params["python"]
        if found.split(".")[: wanted.count(".") + 1] != wanted.split("."):
            raise ReleaseError(
                f"{interpreter} on {socket.gethostname()} is Python {found}, python_env_python asks for {wanted}. "
                "Install that version, or set python_env_python to what all nodes have."
            )
        return found

    # -- doing

    def log(self, text):
        # A log that cannot be written, on a full disk say, must not make a failure of what was done.
        with contextlib.suppress(OSError), open(self.params["log_path"], "a", encoding="utf-8") as stream:
            stream.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {self.id} {text}\n")

    def done(self, text):
        self.actions.append(text)
        self.changed = True
        if not self.module.check_mode:
            self.log(text)

    def prepare_folders(self):
        for folder in (self.params["prefix"], self.root, self.params["cache_dir"], self.archives):
            os.makedirs(folder, mode=0o755, exist_ok=True)
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise ReleaseError(
                f"{socket.gethostname()} is {platform.system()} on {platform.machine()}; the lock files hold wheels "
                "for Linux on x86_64 only. Take this node out of the instances, or name another python_env_builder."
            )
        missing = missing_commands()
        if missing:
            self.install(missing)

    def install(self, packages):
        """Here and not in a task of its own, because the builder need not be among the hosts of the run."""
        if shutil.which("apt-get") is None:
            raise ReleaseError(f"not installed on {socket.gethostname()}: {', '.join(packages)}. Install them there.")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        apt = ["apt-get", "--quiet", "--option", "DPkg::Lock::Timeout=300"]
        self.run([*apt, "update"], environment)
        self.run([*apt, "install", "--yes", "--no-install-recommends", *packages], environment)
        self.done(f"installed {', '.join(packages)}")

    @contextlib.contextmanager
    def locked(self, path, patience=3600):
        """Only one at a time. Children inherit the lock: it outlives a killed parent until they have ended too."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.set_inheritable(handle, True)
            self.lock_handles.append(handle)
            waited = False
            deadline = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if release_tree.is_named(path, handle):
                        break
                    # Who held it has removed the file: the next run would make another one, and hold that.
                    fresh = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                    os.dup2(fresh, handle)
                    os.close(fresh)
                except BlockingIOError:
                    if patience and not waited:
                        self.log(f"waiting for another run that holds {path}")
                        waited = True
                    if time.monotonic() >= deadline:
                        raise BusyError(
                            f"another run has held {path} for {patience} s; see {self.params['log_path']}"
                        ) from None
                    time.sleep(0.5)
            yield
        finally:
            self.lock_handles.remove(handle)
            os.close(handle)

    def run(self, argv, environment=None, explain=None, **options):
        """Run a program with its output in the log; on failure the end of the output goes into the error."""
        self.log("running " + " ".join(argv).replace("\n", "; "))
        output = []
        with subprocess.Popen(
            argv,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=self.lock_handles,
            **options,
        ) as process:
            for line in process.stdout:
                self.log("  " + line.rstrip())
                output.append(line)
        if process.returncode:
            hint = explain("".join(output)) if explain else ""
            raise ReleaseError(
                f"{hint}{os.path.basename(argv[0])} failed with status {process.returncode} on {socket.gethostname()} "
                f"(log: {self.params['log_path']}):\n{''.join(output[-15:]).strip()}"
            )
        return "".join(output)

    # -- built

    def with_credentials(self, url):
        """The URL with the login of the index or mirror that it is below of, or of another one on that server."""
        parts = urllib.parse.urlsplit(url)
        server = f"{parts.scheme}://{parts.netloc}/"
        logins = self.params["credentials"] or {}
        known = sorted((place for place in logins if f"{place}/".startswith(server)), key=len, reverse=True)
        above = [place for place in known if f"{url}/".startswith(f"{place.rstrip('/')}/")]
        userinfo = logins[(above or known)[0]] if known else ""
        return urllib.parse.urlunsplit(parts._replace(netloc=f"{userinfo}@{parts.netloc}")) if userinfo else url

    def index_environment(self):
        """uv's settings. URLs go into the environment, not the arguments, because they may hold a password."""
        params = self.params
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": params["cache_dir"],
            "LC_ALL": "C.UTF-8",
            "UV_NO_CONFIG": "1",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_CACHE_DIR": os.path.join(params["cache_dir"], "uv-cache"),
            "UV_HTTP_TIMEOUT": "120",
        }
        if params["index_url"]:
            environment["UV_DEFAULT_INDEX"] = self.with_credentials(params["index_url"])
        if params["extra_index_urls"]:
            environment["UV_INDEX"] = " ".join(self.with_credentials(url) for url in params["extra_index_urls"])
            # Any index may offer the version; the hash decides. Without this the first index that knows
            # a name wins, even when it lacks the version.
            environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        if params["find_links"]:
            environment["UV_FIND_LINKS"] = ",".join(self.with_credentials(place) for place in params["find_links"])
        if params["ca_bundle"]:
            environment["SSL_CERT_FILE"] = params["ca_bundle"]
        else:
            environment["UV_SYSTEM_CERTS"] = "1"
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            proxy = params["http_proxy"] or os.environ.get(name)
            if proxy:
                environment[name] = proxy
        for name in ("no_proxy", "NO_PROXY"):
            if name in os.environ:
                environment[name] = os.environ[name]
        return environment

    def index_flags(self):
        """Without an index uv would ask the public one."""
        return [] if self.params["index_url"] or self.params["extra_index_urls"] else ["--no-index"]

    def explain_uv(self, output):
        """First sentence of the error: what it most likely is, and which variable helps."""
        params = self.params
        flat = " ".join(output.split())
        if "No space left on device" in flat:
            return (
                f"no disk space was left under {params['prefix']} or {params['cache_dir']} (python_env_cache_dir): "
                "make room. "
            )
        if re.search(r"[Hh]ash mismatch", flat):
            return (
                f"a package is not the one that was locked ({params['lock_name']}): the index or the wheel folder "
                "offers another file of the same version. Check python_env_index_url and python_env_find_links. "
            )
        if re.search(r"invalid peer certificate|UnknownIssuer|certificate verify failed", flat):
            return f"the certificate of {params['index_url']} is not trusted: set python_env_ca_bundle. "
        indexes = ", ".join(filter(None, [params["index_url"], *params["extra_index_urls"]]))
        if not indexes and re.search(r"not found in|Failed to fetch|No solution found|unsatisfiable", flat):
            return (
                f"a wheel is missing in {', '.join(params['find_links']) or 'python_env_find_links, which is empty'}, "
                "and no index is asked (python_env_index_url is empty). `make artifacts DOWNLOAD=<its folder>` for "
                "this inventory fetches it. "
            )
        if re.search(r"error sending request|Failed to fetch|Could not connect|dns error|tunnel error|timed out", flat):
            return (
                f"a package index did not answer ({indexes}): check python_env_index_url, "
                "python_env_extra_index_urls, python_env_find_links and python_env_http_proxy. "
            )
        if re.search(r"no version of|not found in the package registry|No solution found|unsatisfiable", flat):
            return (
                f"{indexes} lack a locked package (torch's CPU wheels are on PyTorch's own index): check "
                "python_env_index_url, python_env_extra_index_urls and python_env_find_links. "
            )
        return ""

    def read_index(self, url):
        bundle = self.params["ca_bundle"] or None
        accept = {"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"}
        return open_url(self.with_credentials(url), headers=accept, timeout=120, ca_path=bundle, http_agent="ironrack")

    def uv(self):
        """Path of a uv whose wheel has the pinned hash."""
        folder = os.path.join(self.params["cache_dir"], "uv")
        os.makedirs(folder, mode=0o755, exist_ok=True)
        with self.locked(f"{folder}.lock"):  # another run may be building another release
            return self.unpacked_uv(folder)

    def unpacked_uv(self, folder):
        params = self.params
        name = UV_WHEEL.format(version=params["uv_version"])
        wheel = os.path.join(folder, name)
        if not (os.path.exists(wheel) and file_sha256(wheel) == params["uv_sha256"]):
            self.fetch_uv(name, wheel)
        binary = os.path.join(folder, f"uv-{params['uv_version']}")
        partial = f"{binary}.part"
        with zipfile.ZipFile(wheel) as archive:
            member = f"uv-{params['uv_version']}.data/scripts/uv"
            with archive.open(member) as source, open(partial, "wb") as target:
                shutil.copyfileobj(source, target, CHUNK)
        os.chmod(partial, 0o755)  # noqa: S103 - a program
        os.replace(partial, binary)
        return binary

    def fetch_uv(self, name, wheel):
        params = self.params
        local = [os.path.join(place, name) for place in params["find_links"] if "://" not in place]
        partial = f"{wheel}.part"
        pages = [place for place in params["find_links"] if "://" in place]
        pages += [params["index_url"].rstrip("/") + "/uv/"] if params["index_url"] else []
        if params["http_proxy"]:
            os.environ.update(http_proxy=params["http_proxy"], https_proxy=params["http_proxy"])
        try:
            found = next((path for path in local if os.path.exists(path)), None)
            if found:
                shutil.copyfile(found, partial)
            else:
                link = next(filter(None, (self.link_on(page, name) for page in pages)), None)
                if link is None:
                    raise ReleaseError(
                        f"{' and '.join(pages or params['find_links'])} has no {name}. Check python_env_index_url and "
                        "python_env_uv_version, or put the wheel into a folder of python_env_find_links; into a mirror "
                        "`make artifacts DOWNLOAD=<its folder>` brings it."
                    )
                self.log(f"fetching {name}")
                with self.read_index(link) as answer, open(partial, "wb") as stream:
                    shutil.copyfileobj(answer, stream, CHUNK)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if getattr(error, "errno", None) in NO_ROOM:
                raise
            raise ReleaseError(
                f"the package index {' or '.join(pages)} did not answer on {socket.gethostname()}: {error}. Check "
                "python_env_index_url, python_env_http_proxy and python_env_ca_bundle."
            ) from None
        digest = file_sha256(partial)
        if digest != params["uv_sha256"]:
            os.unlink(partial)
            raise ReleaseError(
                f"{name} has the sha256 {digest}, python_env_uv_sha256 is {params['uv_sha256']}. Set it to the hash of "
                f"uv {params['uv_version']}, or check where python_env_index_url leads."
            )
        os.replace(partial, wheel)

    def link_on(self, page, name):
        with self.read_index(page) as answer:
            text = answer.read().decode("utf-8", "replace")
            return wheel_link(text, answer.headers.get("Content-Type", ""), answer.geturl(), name)

    def archive_entry(self):
        """Digests of the archive in the cache, when there is one and it is whole."""
        sidecar = f"{self.archive_path}.sha256"
        if not (os.path.exists(self.archive_path) and os.path.exists(sidecar)):
            return None
        with open(sidecar, encoding="utf-8") as stream:
            wanted = stream.read().split()[:1]
        entry = fanout.describe(self.archive_path, os.path.basename(self.archive_path))
        if wanted != [entry["sha256"]]:
            self.log(f"the archive {self.archive_path} does not have the hash in its .sha256 file; it is not used")
            return None
        return entry

    def build(self):
        params = self.params
        if not self.conda:
            self.interpreter_version()  # before anything is fetched
        expected = params["download_bytes"]
        require_space(
            [
                (self.root, 3 * expected + ROOM_TO_SPARE, "the release"),
                (params["cache_dir"], 3 * expected, "uv's cache and the archive"),
            ],
            "Make room, or move python_env_cache_dir to a larger disk.",
        )
        started = time.monotonic()
        wipe(self.path)
        uv = self.uv()
        environment = self.index_environment()
        if self.conda:
            self.conda_environment(uv, environment)
        else:
            self.run([uv, "venv", "--python", params["interpreter"], self.path], environment, self.explain_uv)
        version = self.interpreter_version()
        install = ["--python", self.python, "--compile-bytecode", "--link-mode", "copy"]
        self.run(
            [uv, "pip", "sync", *install, *self.index_flags(), "--require-hashes", "--no-build", params["lock_file"]],
            environment,
            self.explain_uv,
        )
        if params["wheel_files"]:
            for wheel in params["wheel_files"]:
                found = file_sha256(wheel["path"])
                if found != wheel["sha256"]:
                    raise ReleaseError(
                        f"the wheel {wheel['path']} arrived damaged: sha256 {found}, not {wheel['sha256']}"
                    )
            paths = [wheel["path"] for wheel in params["wheel_files"]]
            self.run([uv, "pip", "install", *install, "--no-deps", "--offline", *paths], environment, self.explain_uv)
        if self.conda:
            conda_env.without_user_packages(self.path)
        self.prove()
        manifest, files, size = write_manifest(self.path)
        sync_file_system(self.path)
        marker = {
            "id": self.id,
            "variant": params["variant"],
            "versions": self.versions,
            "python": version,
            "method": "conda" if self.conda else "venv",
            "interpreter": params["interpreter"],
            "lock": params["lock_name"],
            "manifest_sha256": manifest,
            "files": files,
            "bytes": size,
            "built_on": socket.gethostname(),
            "machine": this_machine(),
            "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_atomically(os.path.join(self.path, MARKER), json.dumps(marker, indent=2, sort_keys=True) + "\n")
        self.done(f"built {self.path}: {files} files, {size / GIB:.2f} GiB, in {time.monotonic() - started:.0f} s")

    def conda_environment(self, uv, environment):
        """Python and the libraries under it, from the packages of the explicit lock."""
        params = self.params
        folder = os.path.join(params["cache_dir"], "conda")
        packages = self.conda["packages"]
        names = os.path.join(folder, "packages")
        os.makedirs(folder, mode=0o755, exist_ok=True)
        with self.locked(os.path.join(folder, "lock")):  # the tools and files below are shared by all releases
            if params["http_proxy"]:
                os.environ.update(http_proxy=params["http_proxy"], https_proxy=params["http_proxy"])
            paths = conda_env.fetch_packages(packages, names, self.read_file, self.log)
            work = os.path.join(folder, "work")
            wipe(work)
            os.mkdir(work)
            if params["conda_client"] == "rattler":
                order = os.path.join(work, "order.json")
                program = os.path.join(work, "install.py")
                write_atomically(program, conda_env.RATTLER_PROGRAM)
                write_atomically(
                    order,
                    json.dumps({"packages": paths, "prefix": self.path, "cache": os.path.join(work, "cache")}),
                )
                command = [self.rattler(uv, environment, folder), "-I", program, order]
            else:
                listing = os.path.join(work, "explicit.txt")
                write_atomically(listing, conda_env.explicit_text(packages, names))
                command = [self.miniforge(folder), "create", "--yes", "--quiet", "--offline", "--copy"]
                command += ["--no-default-packages", "--prefix", self.path, "--file", listing]
            self.run(
                command,
                {
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "HOME": work,  # no settings or caches of the user's
                    "LC_ALL": "C.UTF-8",
                    "CONDARC": os.path.join(work, "condarc"),
                    "CONDA_PKGS_DIRS": os.path.join(work, "cache"),
                },
            )
            wipe(work)
        conda_env.settle(self.path, packages)
        # The library of a virtual environment lies outside of it, compiled. Here it is part of the release.
        with contextlib.suppress(ReleaseError):  # some files of the standard library are wrong on purpose
            self.run([self.python, "-I", "-m", "compileall", "-q", "-j0", os.path.join(self.path, "lib")])

    def read_file(self, url):
        bundle = self.params["ca_bundle"] or None
        return open_url(self.with_credentials(url), timeout=120, ca_path=bundle, http_agent="ironrack")

    def rattler(self, uv, environment, folder):
        """Python of a tool environment with the pinned py-rattler."""
        params = self.params
        tool = os.path.join(folder, f"rattler-{params['rattler_version']}-{params['rattler_sha256'][:12]}")
        python = os.path.join(tool, "bin", "python")
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([python, "-I", "-c", "import rattler"], capture_output=True, check=True)
            return python
        have = platform.python_version_tuple()[:2]
        if tuple(map(int, have)) < (3, 10):
            raise ReleaseError(
                f"py-rattler needs Python 3.10 or newer, {sys.executable} on {socket.gethostname()} is "
                f"{'.'.join(have)}. Choose another python_env_builder, or python_env_conda_client: miniforge."
            )
        wipe(tool)
        self.run([uv, "venv", "--python", sys.executable, tool], environment, self.explain_uv)
        requirement = os.path.join(tool, "requirement.txt")
        write_atomically(
            requirement, f"py-rattler=={params['rattler_version']} --hash=sha256:{params['rattler_sha256']}\n"
        )
        install = [uv, "pip", "install", "--python", python, "--no-deps", "--no-build", "--require-hashes"]
        self.run([*install, *self.index_flags(), "--requirements", requirement], environment, self.explain_uv)
        return python

    def miniforge(self, folder):
        """The conda command of the pinned Miniforge."""
        params = self.params
        digest = params["miniforge_sha256"]
        home = os.path.join(folder, f"miniforge-{digest[:12]}")
        command = os.path.join(home, "bin", "conda")
        finished = os.path.join(home, ".ironrack-complete")
        if os.path.exists(finished) and os.path.exists(command):
            return command
        installer = os.path.join(folder, "miniforge.sh")
        conda_env.fetch_file(
            params["miniforge_url"],
            installer,
            digest,
            opener=self.read_file,
            log=self.log,
            what="the installer of Miniforge",
            remedy="Check python_env_miniforge_url, python_env_miniforge_sha256 and python_env_http_proxy.",
        )
        wipe(home)
        self.run(["bash", installer, "-b", "-p", home], {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": folder})
        write_atomically(finished, "")
        os.unlink(installer)
        return command

    def prove(self):
        """Import what will run, as an unprivileged user, and compare the versions with the lock."""
        code = (
            "import json, importlib.metadata as metadata\n"
            "import vllm, torch, ray, transformers\n"
            "print('IRONRACK ' + json.dumps({'vllm': metadata.version('vllm'), 'torch': torch.__version__,"
            " 'ray': ray.__version__, 'transformers': transformers.__version__, 'cuda': torch.version.cuda}))\n"
        )
        nobody = pwd.getpwnam("nobody")  # its group has another name on other systems
        options = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
        environment = {
            "PATH": f"{self.path}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/nonexistent",
            "LC_ALL": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            # `current` may be proven on a Ray head without GPUs
            "VLLM_CONFIG_ROOT": "/nonexistent",
        }
        output = self.run([self.python, "-I", "-c", code], environment, cwd="/", **options)
        found = json.loads(output.rsplit("IRONRACK ", 1)[1].splitlines()[0])
        found["vllm"] = found["vllm"].split("+")[0]
        wanted = {**self.versions, "vllm": self.versions["vllm"].split("+")[0]}
        wrong = {
            name: (value, found.get(name))
            for name, value in wanted.items()
            if found.get(name) not in (value, value.split("+")[0])
        }
        if wrong:
            raise ReleaseError(f"{self.path} imports other versions than locked (name: locked, found): {wrong}")
        cuda = {"cu130": "13", "cu129": "12"}.get(self.params["variant"])
        if (found["cuda"] or "").split(".")[0] != (cuda or ""):
            raise ReleaseError(
                f"torch in {self.path} is made for CUDA {found['cuda']}, python_env_variant is "
                f"{self.params['variant']}. "
                "Take a lock of that variant (python_env_lock)."
            )
        extension = self.extension_cuda()
        if extension not in (None, cuda):
            raise ReleaseError(
                f"vLLM's extension in {self.path} is made for CUDA {extension}, python_env_variant is "
                f"{self.params['variant']} and torch is made for CUDA {found['cuda'] or 'none'}. Take a wheel of vLLM "
                "for that variant (python_env_lock, python_env_wheels)."
            )

    def prove_here(self):
        """Once on a way to the switch. Where it was built, it was proven before it was finished."""
        marker, version = self.marker(), self.interpreter_version()
        if (marker.get("machine"), marker["python"]) == (this_machine(), version):
            return
        proven = f"{marker.get('manifest_sha256')} {version}\n"
        with contextlib.suppress(FileNotFoundError), open(self.proof, encoding="utf-8") as stream:
            if stream.read() == proven:
                return
        self.prove()
        write_atomically(self.proof, proven)

    def pack(self):
        """Write the archive, hashed on its way to the disk; returns its digests."""
        marker = self.marker()
        require_space(
            [(self.archives, marker["bytes"] // 2, "the archive")],
            "Make room, or move python_env_cache_dir to a larger disk.",
        )
        started = time.monotonic()
        partial = f"{self.archive_path}.part"
        tar = [
            "tar",
            "--create",
            "--directory",
            self.root,
            "--sort=name",
            "--numeric-owner",
            "--owner=0",
            "--group=0",
            self.id,
        ]
        # Smaller than half of what goes in, as far as is known here.
        digests = fanout.Digests(fanout.piece_size(marker["bytes"] // 2))
        try:
            with open(partial, "wb") as stream:
                self.compress(tar, lambda block: (digests.update(block), stream.write(block)))
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(partial, 0o644)
            os.replace(partial, self.archive_path)
        finally:
            wipe(partial)  # what cannot be finished must not fill the disk
        entry = digests.entry(os.path.basename(self.archive_path))
        write_atomically(f"{self.archive_path}.sha256", f"{entry['sha256']}  {entry['name']}\n")
        self.done(f"packed {self.archive_path}: {entry['size'] / GIB:.2f} GiB, in {time.monotonic() - started:.0f} s")
        return entry

    def compress(self, tar, take):
        """Give what tar writes, compressed, to `take`; neither program outlives a failure: both hold the locks."""
        zstd = ["zstd", "--quiet", "--stdout", "-T0", "-3"]
        pipe, locks = subprocess.PIPE, self.lock_handles
        with tempfile.TemporaryFile() as errors, contextlib.ExitStack() as programs:
            started = []
            for command in (tar, zstd):
                source = started[-1].stdout if started else None
                process = subprocess.Popen(command, stdin=source, stdout=pipe, stderr=errors, pass_fds=locks)
                programs.enter_context(process)
                programs.callback(process.kill)
                started.append(process)
            writer, packer = started
            writer.stdout.close()
            for block in iter(lambda: packer.stdout.read(CHUNK), b""):
                take(block)
            if packer.wait() or writer.wait():
                errors.seek(0)
                told = errors.read().decode("utf-8", "replace").strip()
                raise ReleaseError(f"packing {self.path} failed: {told[-500:]}")

    def unpack(self, size):
        """Unpack beside the final place, then rename: the release appears complete or not at all.

        One that is in use, but lost its marker, is repaired in its place instead.
        """
        if self.used_by():
            self.repair(contextlib.nullcontext)
            return
        require_space([(self.root, size + ROOM_TO_SPARE // 4, "the release")], "Make room there and run again.")
        started = time.monotonic()
        folder = os.path.join(self.root, f".{self.id}.part")
        wipe(folder)
        os.mkdir(folder, 0o755)
        command = ["tar", "--extract", "--file", self.archive_path, "--use-compress-program=zstd"]
        command += ["--directory", folder, "--no-same-owner", "--preserve-permissions"]
        try:
            self.run(command)
        except (ReleaseError, OSError):
            wipe(folder)  # what cannot be finished must not fill the disk
            raise
        if self.marker(os.path.join(folder, self.id)) is None:
            wipe(folder)
            raise ReleaseError(f"{self.archive_path} does not hold the release {self.id}; remove it and run again")
        sync_file_system(folder)
        wipe(self.path)
        os.rename(os.path.join(folder, self.id), self.path)
        os.rmdir(folder)
        self.done(f"unpacked {self.path} in {time.monotonic() - started:.0f} s")

    def built(self):
        if self.module.check_mode:
            if self.marker() is None:
                self.done(f"would build {self.path}")
            return {}
        self.prepare_folders()
        with self.locked(os.path.join(self.root, f".{self.id}.lock")), self.locked(self.archive_path + ".lock"):
            entry = None
            whole = self.marker() is None
            if whole:
                entry = self.archive_entry()
                if entry:
                    self.unpack(4 * os.path.getsize(self.archive_path))
                else:
                    self.require_unused()
                    try:
                        self.build()
                    except (ReleaseError, conda_env.CondaError, OSError):
                        wipe(self.path)  # what cannot be finished must not fill the disk either
                        raise
            if self.params["pack"]:
                entry = entry or self.archive_entry()
                if not entry:
                    self.require_whole(known=whole)
                    entry = self.pack()
        if not self.linked():
            self.collect_garbage()  # a host that only builds: no switch does it there
        if not self.params["pack"]:
            return {}
        marker = self.marker()
        archive = {
            "path": self.archive_path,
            "file": entry,
            "sha256": entry["sha256"],
            "manifest_sha256": marker["manifest_sha256"],
            "size": entry["size"],
            "unpacked_bytes": marker["bytes"],
        }
        os.utime(self.archive_path)  # its age, for the removal of old archives, counts from the last use
        if self.params["serve"]:
            archive["url"] = self.serve()
        return {"archive": archive}

    def require_unused(self):
        """A build begins with an empty folder."""
        users = self.used_by()
        if users:
            raise ReleaseError(
                f"{self.path} on {socket.gethostname()} is used by {', '.join(users)}, but {MARKER} is lost there and "
                "no whole archive is left to repair it from. Run without --limit, then a node with a whole copy helps. "
                f"If none has one, {self.other_ways()}"
            )

    def other_ways(self):
        return (
            f"return to another release with playbooks/rollback.yml; or stop what uses it, remove {self.path} and "
            "run again: it is built anew."
        )

    def require_whole(self, known):
        """A damaged release must not be handed on. What this run has just made needs no second look."""
        findings = release_tree.Findings() if known else release_tree.examine(self.path, full=True)
        if findings:
            raise ReleaseError(
                f"{self.path} on {socket.gethostname()} is no longer as it was built and its archive is gone: "
                f"{'; '.join(findings.lines()[:5])}. Name a node with a whole copy in python_env_builder "
                "(`ironrack-release verify` tells), or return to another release with playbooks/rollback.yml."
            )

    def serve(self):
        """Offer the archive to the other nodes, also while it arrives here."""
        options = self.params["serve"]
        try:
            url = fanout.serve(
                SERVER_UNIT,
                self.archives,
                [os.path.basename(self.archive_path)],
                options["address"],
                options["port"],
                lifetime=options["lifetime"],
                # Between two waves of forks lie unpacking, flushing the disk and the proof.
                idle=900,
            )
        except fanout.FanoutError as error:
            raise ReleaseError(f"{error} The port is python_env_serve_port.") from None
        self.log(f"serving {self.archive_path} at {url}")
        return url

    # -- fetched

    def fetched(self):
        if self.marker() is not None:
            if not (self.module.check_mode or self.is_current()):
                self.prove_here()
            return {}
        if self.module.check_mode:
            self.done(f"would fetch {self.path}")
            return {}
        source = self.params["source"] or {}
        if not source.get("sha256"):
            raise ReleaseError(
                f"{self.path} is not complete and the builder offered no archive; run without --skip-tags"
            )
        self.prepare_folders()
        if not self.conda:
            self.interpreter_version()
        with self.locked(os.path.join(self.root, f".{self.id}.lock")):
            if self.marker() is None:  # else the run that held the lock has done it
                if not (self.used_by() or os.path.exists(self.archive_path)):
                    room = int(source["unpacked_bytes"]) + ROOM_TO_SPARE // 4
                    require_space(
                        [(self.archives, self.to_come(), "the archive"), (self.root, room, "the release")],
                        "Make room there and run again.",
                    )
                with self.locked(self.archive_path + ".lock"):
                    self.fetch_archive()
                self.unpack(int(source["unpacked_bytes"]))
            self.prove_here()  # before any node switches
        return {}

    def to_come(self):
        """Bytes of the archive that an earlier run has not brought yet."""
        partial = f"{self.archive_path}.part"
        have = os.path.getsize(partial) if os.path.exists(partial) else 0
        return max(int(self.params["source"]["file"]["size"]) - have, 0)

    def fetch_archive(self):
        """The archive stays until all nodes have it, for those behind this one; `current` removes it."""
        source, chain = self.params["source"], self.params["chain"]
        entry = source["file"]
        if not os.path.exists(self.archive_path):
            require_space(
                [(self.archives, self.to_come(), "the archive")],
                "Make room, or move python_env_cache_dir.",
            )
        if chain.get("serve") and self.params["serve"]:
            try:
                self.serve()
            except ReleaseError as error:
                self.module.warn(f"the nodes behind {socket.gethostname()} fetch from others: {error}")
        try:
            result = fanout.fetch(
                [entry],
                chain.get("sources") or [url for url in [source.get("url")] if url],
                self.archives,
                self.log,
                lambda state: self.log(fanout.progress_text(state)),
                starve=float(chain.get("starve", 30)),
            )
        except (fanout.FanoutError, OSError) as error:
            fanout.stop(SERVER_UNIT)  # those behind it go on to others at once
            if isinstance(error, OSError):
                raise
            raise ReleaseError(
                f"{error}. Check that {socket.gethostname()} reaches these nodes and that no firewall closes "
                f"python_env_serve_port; or put the archive, with its .sha256 file, into {self.archives} on this node, "
                "and run again."
            ) from None
        for text in result["wrong"]:
            self.module.warn(f"{text}; it was fetched from another node. Check the memory and disks of the sender.")
        if result["bytes"]:
            self.done(
                f"fetched {result['bytes'] / GIB:.2f} GiB in {result['seconds']:.0f} s "
                f"from {', '.join(result['by_source'])}"
            )

    def forget_archive(self):
        """All nodes have the release now. Where the archive was packed or put by hand it stays, with its .sha256."""
        if not os.path.exists(self.archive_path):
            return
        with self.locked(self.archive_path + ".lock"):
            if os.path.exists(self.archive_path) and not os.path.exists(f"{self.archive_path}.sha256"):
                fanout.stop(SERVER_UNIT)
                os.unlink(self.archive_path)

    # -- repaired

    def repaired(self):
        if self.module.check_mode:
            findings, _entries = self.examine()
            for line in findings.lines()[:NAMED_FILES]:
                self.done(f"would repair: {line}")
            late = self.started_since(release_tree.since(self.path, findings)) if self.is_current() else []
            self.show("would repair", findings, late)
            return {"restart": late}
        self.prepare_folders()
        with self.locked(os.path.join(self.root, f".{self.id}.lock")):
            return {"restart": self.repair(self.archive_at_hand)}

    def repair(self, archive):
        """Returns the units to restart. archive: context in which the archive is there, entered if it is needed."""
        findings, entries = self.examine()
        side = os.path.join(self.root, f".{self.id}.part")
        began = release_tree.since(self.path, findings)
        try:
            findings = self.mend(side, findings, entries, archive)
        finally:
            wipe(side)
        sync_file_system(self.path)
        left = release_tree.examine(self.path)
        if left:
            raise ReleaseError(f"{self.path} could not be repaired: {'; '.join(left.lines()[:5])}")
        for line in findings.lines()[:NAMED_FILES]:
            self.done(f"repaired: {line}")
        if len(findings.paths()) > NAMED_FILES:
            self.done(f"repaired: {len(findings.paths())} files in all")
        late = self.mark_for_restart(began)
        self.show("repaired", findings, late if self.is_current() else [])
        return late

    def show(self, what, findings, late):
        """On the screen of whoever runs the playbook; the log has more of it."""
        host, lines = socket.gethostname(), findings.lines()
        for line in lines[:SHOWN_FILES]:
            self.module.warn(f"{host}: {what}: {line}")
        if len(lines) > SHOWN_FILES:
            self.module.warn(f"{host}: {what}: {len(lines)} files in all, see {self.params['log_path']}")
        if late:
            self.module.warn(
                f"{host}: {', '.join(late)} started when the release was not as it was built, and may run what is no "
                "longer there: playbooks/serve.yml (part of site.yml) restarts it"
            )

    def mend(self, side, findings, entries, archive):
        """Put right what was found, and return what that was. Only what differs is written."""
        wipe(side)
        needed = release_tree.restorable(self.path, entries, findings) if entries is not None else []
        if not (needed or entries is None or self.is_another_build()):
            release_tree.restore(self.path, entries, findings, [], side)
            return findings
        with archive():
            findings, entries, needed = self.bring(side, findings, entries, needed)
            root = os.path.join(side, self.id)
            release_tree.restore(self.path, entries, findings, needed, root)
            for name in (MANIFEST, MARKER):  # in this order: a killed run must not look complete
                os.replace(os.path.join(root, name), os.path.join(self.path, name))
        return findings

    def is_another_build(self):
        return (self.params["source"] or {}).get("manifest_sha256") not in (None, self.marker()["manifest_sha256"])

    @contextlib.contextmanager
    def archive_at_hand(self):
        """The archive, from this node's cache or from the node that offers it."""
        if not (self.params["source"] or {}).get("file"):
            raise ReleaseError(f"{self.path} is damaged and no other node offered a whole copy: {self.other_ways()}")
        with self.locked(self.archive_path + ".lock"):
            self.fetch_archive()
            yield
        self.forget_archive()

    def bring(self, side, findings, entries, needed):
        """Take the content out of the archive. One of another build of the release replaces all that differs."""
        self.extract(side, [MANIFEST, MARKER])
        root = os.path.join(side, self.id)
        theirs = self.marker(root)
        if theirs is None:
            raise ReleaseError(f"{self.archive_path} does not hold the release {self.id}; remove it and run again")
        if entries is None or theirs["manifest_sha256"] != self.marker()["manifest_sha256"]:
            entries = release_tree.read_manifest(root, theirs["manifest_sha256"])
            findings = release_tree.inspect(self.path, entries, full=True)
            needed = release_tree.restorable(self.path, entries, findings)
            if self.marker() is None:
                findings.missing.append(MARKER)
        size = sum(entries[path].size for path in needed)
        require_space([(self.root, size + ROOM_TO_SPARE // 16, "the repair")], "Make room there and run again.")
        if needed:
            self.extract(side, needed)
        return findings, entries, needed

    def extract(self, folder, paths):
        os.makedirs(folder, mode=0o755, exist_ok=True)
        names = os.path.join(folder, "names")
        with open(names, "wb") as stream:
            stream.write(b"".join(os.fsencode(f"{self.id}/{path}") + b"\0" for path in paths))
        self.run(
            [
                *["tar", "--extract", "--file", self.archive_path, "--use-compress-program=zstd"],
                *["--directory", folder, "--no-same-owner", "--preserve-permissions", "--no-recursion"],
                *["--null", "--verbatim-files-from", f"--files-from={names}"],
            ]
        )

    def mark_for_restart(self, began):
        """Units that started while the release was different may run what is no longer there.

        The others go on as they are. The roles restart a unit that is older than the link, so the link is made anew.
        """
        late = self.started_since(began)
        if late and self.is_current():
            release_tree.replace_link(self.link, os.path.join("releases", self.id))
            self.log(f"to be restarted: {', '.join(late)}")
        return late

    def started_since(self, began):
        units = release_tree.users(self.params["prefix"]).get(self.id, {})
        return sorted(unit for unit, start in units.items() if start >= began - CLOCK_SLACK)

    # -- current

    def collect_garbage(self):
        def newest_first(folder, pattern):
            found = []
            for name in os.listdir(folder) if os.path.isdir(folder) else []:
                match = re.fullmatch(pattern, name)
                if match:
                    stamp = (
                        os.path.join(folder, name, MARKER)
                        if os.path.isdir(os.path.join(folder, name))
                        else os.path.join(folder, name)
                    )
                    found.append((os.path.getmtime(stamp) if os.path.exists(stamp) else 0, match.group(1)))
            return [identity for _age, identity in sorted(found, reverse=True)]

        keep = max(self.params["keep"], 1)
        releases = [identity for identity in newest_first(self.root, r"([0-9a-f]{16})") if identity != self.id]
        for identity in releases[keep - 1 :]:
            folder = os.path.join(self.root, identity)
            # the marker first: what is left of a killed removal must not look complete
            paths = os.path.join(folder, MARKER), folder
            if self.remove(f".{identity}.lock", *paths, unless=functools.partial(self.is_needed, identity)):
                self.done(f"removed the old release {identity}")
        archives = [
            identity for identity in newest_first(self.archives, r"([0-9a-f]{16})\.tar\.zst") if identity != self.id
        ]
        for identity in archives[keep - 1 :]:
            archive = os.path.join(self.archives, f"{identity}.tar.zst")
            if self.remove(f"{archive}.lock", archive, f"{archive}.sha256"):
                self.done(f"removed the old archive {identity}")
        for folder, pattern in (
            (self.root, r"(\.[0-9a-f]{16})\.(?:part|proven)"),
            (self.archives, r"([0-9a-f]{16}\.tar\.zst)\.(?:part|unproven)"),
        ):
            for name in os.listdir(folder) if os.path.isdir(folder) else []:
                match = re.fullmatch(pattern, name)
                path = os.path.join(folder, name)
                if match and self.remove(os.path.join(folder, f"{match[1]}.lock"), path):
                    self.done(f"removed {path}, which a killed run left")

    def is_needed(self, identity):
        """Whether something runs from a release, or a rollback would return to it, also once this switch is undone."""
        prefix = self.params["prefix"]
        links = release_tree.linked(prefix), release_tree.linked(prefix, "previous"), self.before_that
        return identity in links or identity in release_tree.users(prefix)

    def remove(self, lock, *paths, unless=lambda: False):
        """Take away what no other run is making, switching to or handing on right now; whether it did."""
        lock = os.path.join(self.root, lock)
        try:
            with self.locked(lock, patience=0):
                if unless():
                    return False
                for path in (*paths, lock):
                    wipe(path)
        except BusyError:
            return False
        return True

    def make_current(self):
        previous = self.linked()
        diff = {"before": f"{self.link} -> {previous or 'absent'}\n", "after": f"{self.link} -> releases/{self.id}\n"}
        if self.is_current():
            if not self.module.check_mode and self.marker() is not None:
                self.collect_garbage()
            return {}
        if self.module.check_mode:
            self.done(f"would switch {self.link} to {self.id}")
            return {"diff": diff}
        self.forget_archive()
        try:
            with self.locked(os.path.join(self.root, f".{self.id}.lock")):  # else another run might remove it now
                if self.marker() is None:
                    raise ReleaseError(f"{self.path} is not complete; {self.link} stays at {previous or 'nothing'}")
                self.prove_here()
                release_tree.switch(self.params["prefix"], self.id)
        except OSError as error:
            raise ReleaseError(
                f"{socket.gethostname()}: {self.link} stays at {previous or 'nothing'}: {error.strerror} "
                f"({error.filename or self.params['prefix']}). Make the folder writable for root and run again"
            ) from None
        self.done(f"switched {self.link} from {previous or 'nothing'} to releases/{self.id}")
        try:
            wipe(self.proof)
            self.collect_garbage()
        except OSError as error:  # it runs: that an old one could not be removed must not look like a failed switch
            self.module.warn(f"{socket.gethostname()}: an old release could not be removed: {error}")
        return {"diff": diff}


def missing_commands():
    return [name for name in COMMANDS if shutil.which(name) is None]


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "required": True,
                "choices": ["inspected", "built", "fetched", "repaired", "current"],
            },
            "variant": {"type": "str", "required": True, "choices": ["cu130", "cu129", "cpu"]},
            "vllm_version": {"type": "str", "required": True},
            "python": {"type": "str", "required": True},
            "interpreter": {"type": "str", "default": ""},
            "method": {"type": "str", "choices": ["conda", "venv"], "default": "venv"},
            "conda_lock": {"type": "str", "default": ""},
            "conda_client": {"type": "str", "choices": ["rattler", "miniforge"], "default": "rattler"},
            "conda_mirror": {"type": "str", "default": ""},
            "rattler_version": {"type": "str", "default": "0.28.0"},
            "rattler_sha256": {
                "type": "str",
                "default": "4f4ab1d34d5394e7ce130a86e59009c95ace4f5757d9c3af04de1351bcea47eb",
            },
            "miniforge_url": {"type": "str", "default": ""},
            "miniforge_sha256": {"type": "str", "default": ""},
            "lock": {"type": "str", "required": True},
            "wheels": {"type": "list", "elements": "str", "default": []},
            "prefix": {"type": "path", "default": "/opt/ironrack"},
            "cache_dir": {"type": "path", "default": "/var/cache/ironrack"},
            "log_path": {"type": "path", "default": "/var/log/ironrack-release.log"},
            "index_url": {"type": "str", "default": "https://pypi.org/simple"},
            "extra_index_urls": {"type": "list", "elements": "str", "default": []},
            "find_links": {"type": "list", "elements": "str", "default": []},
            "http_proxy": {"type": "str", "default": "", "no_log": True},
            "ca_bundle": {"type": "str", "default": ""},
            "uv_version": {"type": "str", "default": "0.13.9"},
            "uv_sha256": {"type": "str", "default": "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19"},
            "pack": {"type": "bool", "default": True},
            "serve": {
                "type": "dict",
                "options": {
                    "address": {"type": "str", "required": True},
                    "port": {"type": "int", "required": True},
                    "lifetime": {"type": "int", "default": 3600},
                },
            },
            "verify": {"type": "str", "choices": ["quick", "full"], "default": "quick"},
            "source": {"type": "dict", "default": {}},
            "chain": {"type": "dict", "default": {}},
            "keep": {"type": "int", "default": 3},
            # Set by the action plugin of the same name, which runs on the controller.
            "_plan": {"type": "dict", "required": True},
            "_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )
    plan = module.params["_plan"]
    module.params.update(
        release_id=plan["release_id"],
        versions=plan["versions"],
        interpreter=plan["interpreter"],
        conda=plan.get("conda") or {},
        lock_name=plan["lock_name"],
        download_bytes=int(plan["download_bytes"]),
        lock_file=plan.get("lock_file", ""),
        wheel_files=plan.get("wheel_files", []),
        credentials=module.params["_credentials"],
    )
    os.umask(0o022)
    release = Release(module)
    before, prefix, result = release.linked(), module.params["prefix"], {}
    links = {
        "before": release_tree.linked(prefix),
        "before_that": release.before_that,
        "link_time": release_tree.link_time(prefix),
    }
    try:
        if module.params["state"] == "inspected":
            result = release.inspected()
        elif module.params["state"] == "built":
            result = release.built()
        elif module.params["state"] == "fetched":
            result = release.fetched()
        elif module.params["state"] == "repaired":
            result = release.repaired()
        else:
            result = release.make_current()
    except (ReleaseError, conda_env.CondaError, release_tree.TreeError) as error:
        module.fail_json(msg=str(error), release_id=release.id, actions=release.actions, log=module.params["log_path"])
    except OSError as error:
        where = f"{socket.gethostname()}: {error.strerror or error} ({error.filename or prefix})"
        remedy = f"Make room under {prefix} and {module.params['cache_dir']}" if error.errno in NO_ROOM else "Mend that"
        module.fail_json(
            msg=f"{where}. The release in use is not touched. {remedy}, and run again.",
            release_id=release.id,
            actions=release.actions,
            log=module.params["log_path"],
        )
    module.exit_json(
        changed=release.changed,
        release_id=release.id,
        release=release.path,
        present=release.marker() is not None,
        current=release.is_current(),
        previous=before,
        versions=release.versions,
        actions=release.actions,
        log=module.params["log_path"],
        **links,
        **result,
    )


if __name__ == "__main__":
    main()
