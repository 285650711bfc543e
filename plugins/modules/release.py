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
    V(inspected) only looks. V(built) makes the release on one node, from the archive in the cache or from the package
    index, packs the archive for the others and serves it for a short time. V(fetched) brings a node to the same release
    from that archive. V(current) proves that the release imports, switches the C(current) link to it in one step and
    removes old releases.
  - >-
    The marker C(release.json) is written last, when everything else is on disk. A folder without it is a leftover of a
    killed run: it is wiped and made anew. A lock on the folder keeps two runs from building at once, also when the
    first one lost its controller.
  - What it does is logged on the node to O(log_path).
author:
  - The ironrack authors
options:
  state:
    description: What to reach.
    type: str
    choices: [inspected, built, fetched, current]
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
    description: Interpreter on the nodes that the environment is made from. Default C(/usr/bin/python<major>.<minor>).
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
    description: Package index. Credentials in the URL are passed on without showing up in arguments or logs.
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
    description: With O(state=built), serve the archive read-only from a transient systemd unit.
    type: dict
    suboptions:
      script:
        description: Path of the server on the node.
        type: path
        required: true
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
  source:
    description: With O(state=fetched), what O(state=built) returned as C(archive) on the builder.
    type: dict
    default: {}
  keep:
    description: With O(state=current), how many releases to keep. The current one and those in use always stay.
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
versions:
  description: Versions of vLLM, torch, Ray and Transformers that the lock holds.
  returned: always
  type: dict
missing_commands:
  description: Programs that V(built) and V(fetched) need and that are not installed.
  returned: O(state=inspected)
  type: list
  elements: str
archive:
  description: The archive's C(path), C(sha256), C(size), C(unpacked_bytes) and, when it is served, C(url).
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

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import time
import urllib.parse
import urllib.request
import zipfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

MARKER = "release.json"
MANIFEST = "manifest.txt"
COMMANDS = ("tar", "zstd")
CHUNK = 1 << 20
GIB = 1 << 30
SERVER_UNIT = "ironrack-release-server.service"
UV_WHEEL = "uv-{version}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
# What tar and the environment write beside the package files themselves.
ROOM_TO_SPARE = GIB


class ReleaseError(Exception):
    """A problem whose text names what is wrong and what helps."""


# ---------------------------------------------------------------- files


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(CHUNK), b""):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path, text):
    """Write a small file so that a reader, or a machine that loses power, sees all of it or none."""
    partial = f"{path}.part"
    with open(partial, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.chmod(partial, 0o644)
    os.replace(partial, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def wipe(path):
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


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
    subprocess.run(["sync", "--file-system", path], check=True)


# ---------------------------------------------------------------- manifest


def manifest_entries(root):
    """[(relative path, kind, link target)] of everything under root, in a stable order."""
    entries = []
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files) + [item for item in folders if os.path.islink(os.path.join(folder, item))]:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, root)
            if relative not in (MARKER, MANIFEST):
                entries.append(relative)
    return sorted(entries)


def manifest_line(root, relative):
    path = os.path.join(root, relative)
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return f"link:{os.readlink(path)} 0 {relative}", 0
    return f"{file_sha256(path)} {info.st_size} {relative}", info.st_size


def write_manifest(root):
    """Hash every file of the environment; returns (digest of the list, files, bytes)."""
    entries = manifest_entries(root)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        lines = list(pool.map(lambda relative: manifest_line(root, relative), entries, chunksize=64))
    text = "".join(f"{line}\n" for line, _size in lines)
    write_atomically(os.path.join(root, MANIFEST), text)
    return hashlib.sha256(text.encode()).hexdigest(), len(lines), sum(size for _line, size in lines)


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


def download(url, target, sha256, size, log, *, attempts=6, pause=1.0, timeout=60):
    """Fetch a file into target; a broken transfer goes on where it stopped, a wrong one is fetched once more."""
    partial = f"{target}.part"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # cluster traffic, never by proxy
    problem, fresh_start = "", True
    for attempt in range(attempts):
        if attempt:
            time.sleep(min(pause * 2 ** (attempt - 1), 15))
        have = os.path.getsize(partial) if os.path.exists(partial) else 0
        try:
            if have > size:
                os.unlink(partial)
                have = 0
            if have < size:
                headers = {"Range": f"bytes={have}-"} if have else {}
                log(f"fetching {url} from byte {have} of {size}")
                request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the builder's URL
                with opener.open(request, timeout=timeout) as answer:
                    resumed = bool(have) and answer.status == 206
                    with open(partial, "ab" if resumed else "wb") as stream:
                        shutil.copyfileobj(answer, stream, CHUNK)
                        stream.flush()
                        os.fsync(stream.fileno())
            have = os.path.getsize(partial)
            if have < size:
                raise ConnectionError(f"the connection ended after {have} of {size} bytes")
        except OSError as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            problem = f"{type(error).__name__}: {error}"
            log(f"attempt {attempt + 1}: {problem}")
            continue
        found = file_sha256(partial)
        if found == sha256:
            os.chmod(partial, 0o644)
            os.replace(partial, target)
            return
        os.unlink(partial)
        problem = f"its sha256 is {found} instead of {sha256}"
        log(f"attempt {attempt + 1}: {problem}")
        if not fresh_start:
            break
        fresh_start = False
    raise ReleaseError(
        f"{url} could not be fetched: {problem}. Check that the builder's address can be reached from here "
        f"and that a firewall lets python_env_serve_port through; or put the archive, with its .sha256 file, "
        f"into {os.path.dirname(target)} on this node, and run again."
    )


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
        self.archives = os.path.join(params["cache_dir"], "releases")
        self.archive_path = os.path.join(self.archives, f"{self.id}.tar.zst")
        self.python = os.path.join(self.path, "bin", "python")
        self.lock_handles = []
        self.actions = []
        self.changed = False

    # -- looking

    def marker(self, path=None):
        """What the marker says, or None when the release is not complete."""
        try:
            with open(os.path.join(path or self.path, MARKER), encoding="utf-8") as stream:
                marker = json.load(stream)
        except (OSError, ValueError):
            return None
        return marker if isinstance(marker, dict) and marker.get("id") == self.id else None

    def linked(self):
        try:
            return os.readlink(self.link)
        except OSError:
            return ""

    def is_current(self):
        return os.path.basename(self.linked()) == self.id

    def interpreter_version(self):
        interpreter = self.params["interpreter"]
        try:
            done = subprocess.run(
                [interpreter, "-I", "-c", "import platform; print(platform.python_version())"],
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
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
        with open(self.params["log_path"], "a", encoding="utf-8") as stream:
            stream.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {self.id} {text}\n")

    def done(self, text):
        self.actions.append(text)
        self.changed = True
        if not self.module.check_mode:
            self.log(text)

    def prepare_folders(self):
        for folder in (self.params["prefix"], self.root, self.params["cache_dir"], self.archives):
            os.makedirs(folder, mode=0o755, exist_ok=True)
        if platform.machine() != "x86_64":
            raise ReleaseError(
                f"{socket.gethostname()} is {platform.machine()}; the lock files hold wheels for x86_64 only. "
                "Take this node out of the instances."
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
                    break
                except BlockingIOError:
                    if not waited:
                        self.log(f"waiting for another run that holds {path}")
                        waited = True
                    if time.monotonic() > deadline:
                        raise ReleaseError(
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
        parts = urllib.parse.urlsplit(url)
        userinfo = (self.params["credentials"] or {}).get(parts.netloc)
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
            "UV_DEFAULT_INDEX": self.with_credentials(params["index_url"]),
        }
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
        indexes = ", ".join([params["index_url"], *params["extra_index_urls"]])
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
        params = self.params
        name = UV_WHEEL.format(version=params["uv_version"])
        folder = os.path.join(params["cache_dir"], "uv")
        os.makedirs(folder, mode=0o755, exist_ok=True)
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
        base = params["index_url"].rstrip("/") + "/uv/"
        if params["http_proxy"]:
            os.environ.update(http_proxy=params["http_proxy"], https_proxy=params["http_proxy"])
        try:
            found = next((path for path in local if os.path.exists(path)), None)
            if found:
                shutil.copyfile(found, partial)
            else:
                with self.read_index(base) as answer:
                    page = answer.read().decode("utf-8", "replace")
                    link = wheel_link(page, answer.headers.get("Content-Type", ""), answer.geturl(), name)
                if link is None:
                    raise ReleaseError(
                        f"the index page {base} does not list {name}. Check python_env_index_url and "
                        "python_env_uv_version, or put the wheel into a folder of python_env_find_links."
                    )
                self.log(f"fetching {name}")
                with self.read_index(link) as answer, open(partial, "wb") as stream:
                    shutil.copyfileobj(answer, stream, CHUNK)
        except OSError as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            raise ReleaseError(
                f"the package index {params['index_url']} did not answer on {socket.gethostname()}: {error}. Check "
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

    def archive_sha256(self):
        """Hash of the archive in the cache, when there is one and it is whole."""
        sidecar = f"{self.archive_path}.sha256"
        if not (os.path.exists(self.archive_path) and os.path.exists(sidecar)):
            return None
        with open(sidecar, encoding="utf-8") as stream:
            wanted = stream.read().split()[:1]
        found = file_sha256(self.archive_path)
        if wanted != [found]:
            self.log(f"the archive {self.archive_path} does not have the hash in its .sha256 file; it is not used")
            return None
        return found

    def build(self):
        params = self.params
        version = self.interpreter_version()
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
        self.run([uv, "venv", "--python", params["interpreter"], self.path], environment, self.explain_uv)
        install = ["--python", self.python, "--compile-bytecode", "--link-mode", "copy"]
        self.run(
            [uv, "pip", "sync", *install, "--require-hashes", "--no-build", params["lock_file"]],
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
        self.prove()
        manifest, files, size = write_manifest(self.path)
        sync_file_system(self.path)
        marker = {
            "id": self.id,
            "variant": params["variant"],
            "versions": self.versions,
            "python": version,
            "interpreter": params["interpreter"],
            "lock": params["lock_name"],
            "manifest_sha256": manifest,
            "files": files,
            "bytes": size,
            "built_on": socket.gethostname(),
            "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_atomically(os.path.join(self.path, MARKER), json.dumps(marker, indent=2, sort_keys=True) + "\n")
        self.done(f"built {self.path}: {files} files, {size / GIB:.2f} GiB, in {time.monotonic() - started:.0f} s")

    def prove(self):
        """Import what will run, as an unprivileged user, and compare the versions with the lock."""
        code = (
            "import json, importlib.metadata as metadata\n"
            "import vllm, torch, ray, transformers\n"
            "print('IRONRACK ' + json.dumps({'vllm': metadata.version('vllm'), 'torch': torch.__version__,"
            " 'ray': ray.__version__, 'transformers': transformers.__version__, 'cuda': torch.version.cuda}))\n"
        )
        options = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
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

    def pack(self):
        """Write the archive, hashed on its way to the disk."""
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
        digest, size = hashlib.sha256(), 0
        with open(partial, "wb") as stream:
            writer = subprocess.Popen(tar, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=self.lock_handles)
            packer = subprocess.Popen(
                ["zstd", "--quiet", "--stdout", "-T0", "-3"],
                stdin=writer.stdout,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=self.lock_handles,
            )
            writer.stdout.close()
            for block in iter(lambda: packer.stdout.read(CHUNK), b""):
                digest.update(block)
                size += len(block)
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
            errors = writer.stderr.read().decode("utf-8", "replace") + packer.stderr.read().decode("utf-8", "replace")
            if packer.wait() or writer.wait():
                raise ReleaseError(f"packing {self.path} failed: {errors.strip()[-500:]}")
        os.chmod(partial, 0o644)
        os.replace(partial, self.archive_path)
        write_atomically(
            f"{self.archive_path}.sha256", f"{digest.hexdigest()}  {os.path.basename(self.archive_path)}\n"
        )
        self.done(f"packed {self.archive_path}: {size / GIB:.2f} GiB, in {time.monotonic() - started:.0f} s")
        return digest.hexdigest()

    def unpack(self, size):
        """Unpack beside the final place, then rename: the release appears complete or not at all."""
        require_space([(self.root, size + ROOM_TO_SPARE // 4, "the release")], "Make room there and run again.")
        started = time.monotonic()
        folder = os.path.join(self.root, f".{self.id}.part")
        wipe(folder)
        os.mkdir(folder, 0o755)
        self.run(
            [
                *["tar", "--extract", "--file", self.archive_path, "--use-compress-program=zstd"],
                *["--directory", folder, "--no-same-owner", "--preserve-permissions"],
            ]
        )
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
            sha256 = None
            if self.marker() is None:
                sha256 = self.archive_sha256()
                if sha256:
                    self.unpack(4 * os.path.getsize(self.archive_path))
                else:
                    try:
                        self.build()
                    except (ReleaseError, OSError):
                        wipe(self.path)  # what cannot be finished must not fill the disk either
                        raise
            if self.params["pack"]:
                sha256 = sha256 or self.archive_sha256() or self.pack()
        if not self.params["pack"]:
            return {}
        marker = self.marker()
        archive = {
            "path": self.archive_path,
            "sha256": sha256,
            "size": os.path.getsize(self.archive_path),
            "unpacked_bytes": marker["bytes"],
        }
        os.utime(self.archive_path)  # its age, for the removal of old archives, counts from the last use
        if self.params["serve"]:
            archive["url"] = self.serve(self.params["serve"])
        return {"archive": archive}

    def serve(self, options):
        """Start the server as a transient unit: it needs no file that a killed run could leave behind."""
        host = f"[{options['address']}]" if ":" in options["address"] else options["address"]
        subprocess.run(["systemctl", "stop", SERVER_UNIT], capture_output=True, check=False)
        properties = [
            f"RuntimeMaxSec={options['lifetime']}",
            "DynamicUser=yes",
            "ProtectSystem=strict",
            "ProtectHome=yes",
            "PrivateDevices=yes",
            "NoNewPrivileges=yes",
            "CapabilityBoundingSet=",
            "RestrictAddressFamilies=AF_INET AF_INET6",
            "SystemCallFilter=@system-service",
            "TasksMax=256",
        ]
        self.run(
            ["systemd-run", "--quiet", "--collect", f"--unit={SERVER_UNIT}"]
            + [f"--property={item}" for item in properties]
            + ["/usr/bin/python3", "-I", options["script"]]
            + [f"--address={options['address']}", f"--port={options['port']}", self.archive_path]
        )
        for _attempt in range(100):
            try:
                socket.create_connection((options["address"], options["port"]), timeout=2).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            journal = subprocess.run(
                ["journalctl", "--no-pager", "--lines=10", f"--unit={SERVER_UNIT}"],
                capture_output=True,
                text=True,
                check=False,
            )
            raise ReleaseError(
                f"the archive server does not listen on {host}:{options['port']} (python_env_serve_port): the port is "
                f"taken, or {options['address']} is no address of {socket.gethostname()} (cluster_address).\n"
                f"{journal.stdout}"
            )
        self.log(f"serving {self.archive_path} on {host}:{options['port']}")
        return f"http://{host}:{options['port']}/{os.path.basename(self.archive_path)}"

    # -- fetched

    def fetched(self):
        if self.marker() is not None:
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
        self.interpreter_version()
        with self.locked(os.path.join(self.root, f".{self.id}.lock")):
            if self.marker() is not None:
                return {}  # the run that held the lock has done it
            ours = False
            with self.locked(self.archive_path + ".lock"):
                if not (os.path.exists(self.archive_path) and file_sha256(self.archive_path) == source["sha256"]):
                    require_space(
                        [(self.archives, int(source["size"]), "the archive")],
                        "Make room, or move python_env_cache_dir.",
                    )
                    started = time.monotonic()
                    download(source["url"], self.archive_path, source["sha256"], int(source["size"]), self.log)
                    seconds = time.monotonic() - started
                    self.done(f"fetched {int(source['size']) / GIB:.2f} GiB in {seconds:.0f} s")
                    ours = True
            self.unpack(int(source["unpacked_bytes"]))
            if ours:
                os.unlink(self.archive_path)  # only the builder keeps it
        return {}

    # -- current

    def in_use(self):
        """Releases that a running process has files of open or mapped, or was started from."""
        pattern = re.compile(re.escape(self.root.encode()) + rb"/([0-9a-f]{16})")
        used = set()
        for process in os.listdir("/proc"):
            if process.isdigit():
                for name in ("cmdline", "environ", "maps"):
                    with contextlib.suppress(OSError), open(f"/proc/{process}/{name}", "rb") as stream:
                        used.update(match.decode() for match in pattern.findall(stream.read()))
        return used

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
        if len(releases) >= keep:
            used = self.in_use() | {os.path.basename(self.linked())}
            for identity in releases[keep - 1 :]:
                if identity not in used:
                    with self.locked(os.path.join(self.root, f".{identity}.lock")):
                        # the marker first: what is left of a killed removal must not look complete
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(os.path.join(self.root, identity, MARKER))
                        wipe(os.path.join(self.root, identity))
                        os.unlink(os.path.join(self.root, f".{identity}.lock"))
                    self.done(f"removed the old release {identity}")
        archives = [
            identity for identity in newest_first(self.archives, r"([0-9a-f]{16})\.tar\.zst") if identity != self.id
        ]
        for identity in archives[keep - 1 :]:
            for suffix in (".tar.zst", ".tar.zst.sha256", ".tar.zst.lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.archives, identity + suffix))
            self.done(f"removed the old archive {identity}")

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
        if self.marker() is None:
            raise ReleaseError(f"{self.path} is not complete; {self.link} stays at {previous or 'nothing'}")
        marker = self.marker()
        if (marker["built_on"], marker["python"]) != (socket.gethostname(), self.interpreter_version()):
            self.prove()  # where it was built it was proven before it was finished
        partial = f"{self.link}.part"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        os.symlink(os.path.join("releases", self.id), partial)
        os.replace(partial, self.link)
        self.done(f"switched {self.link} from {previous or 'nothing'} to releases/{self.id}")
        self.collect_garbage()
        return {"diff": diff}


def missing_commands():
    return [name for name in COMMANDS if shutil.which(name) is None]


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "required": True, "choices": ["inspected", "built", "fetched", "current"]},
            "variant": {"type": "str", "required": True, "choices": ["cu130", "cu129", "cpu"]},
            "vllm_version": {"type": "str", "required": True},
            "python": {"type": "str", "required": True},
            "interpreter": {"type": "str", "default": ""},
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
                    "script": {"type": "path", "required": True},
                    "address": {"type": "str", "required": True},
                    "port": {"type": "int", "required": True},
                    "lifetime": {"type": "int", "default": 3600},
                },
            },
            "source": {"type": "dict", "default": {}},
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
        lock_name=plan["lock_name"],
        download_bytes=int(plan["download_bytes"]),
        lock_file=plan.get("lock_file", ""),
        wheel_files=plan.get("wheel_files", []),
        credentials=module.params["_credentials"],
    )
    os.umask(0o022)
    release = Release(module)
    before = release.linked()
    result = {}
    try:
        if module.params["state"] == "inspected":
            result["missing_commands"] = missing_commands()
        elif module.params["state"] == "built":
            result = release.built()
        elif module.params["state"] == "fetched":
            result = release.fetched()
        else:
            result = release.make_current()
    except ReleaseError as error:
        module.fail_json(msg=str(error), release_id=release.id, actions=release.actions, log=module.params["log_path"])
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        module.fail_json(
            msg=(
                f"the disk of {socket.gethostname()} is full ({error.filename or module.params['prefix']}). "
                f"The release in use is not touched. Make room under {module.params['prefix']} and "
                f"{module.params['cache_dir']}, and run again."
            ),
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
        **result,
    )


if __name__ == "__main__":
    main()
