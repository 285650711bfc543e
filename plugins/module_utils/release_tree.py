# SPDX-License-Identifier: Apache-2.0
"""What a release holds, what of it is no longer as it was built, and who uses it.

Shared by the modules release and release_switch and by the program ironrack-release, so nothing of Ansible is imported.
"""
# Plain os calls, as in the modules: a release has tens of thousands of files.
# ruff: noqa: PTH101, PTH102, PTH105, PTH108, PTH112, PTH114, PTH115, PTH116, PTH118, PTH119, PTH120
# ruff: noqa: PTH123, PTH208, PTH211

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import heapq
import json
import os
import re
import shutil
import stat
import time

MARKER = "release.json"
MANIFEST = "manifest.txt"
CHUNK = 1 << 20
IDENTITY = re.compile(r"[0-9a-f]{16}")
# What opening a file costs, in bytes that could be hashed instead.
FILE_COST = 32 << 10


class TreeError(Exception):
    """Why nothing can be said about a release."""


# ---------------------------------------------------------------- files


def file_sha256(path):
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as stream:
        while True:
            size = stream.readinto(buffer)
            if not size:
                return digest.hexdigest()
            digest.update(view[:size])


def is_named(path, handle):
    """Whether an open file is still the one of that name: who held a lock may have removed its file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def write_atomically(path, text):
    """Write a small file so that a reader, or a machine that loses power, sees all of it or none."""
    partial = f"{path}.part"
    with open(partial, "w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.chmod(partial, 0o644)
    os.replace(partial, path)
    sync_folder(os.path.dirname(path))


def sync_folder(path):
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_link(path, target):
    """Point a link elsewhere in one step."""
    partial = f"{path}.part"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    os.symlink(target, partial)
    os.replace(partial, path)


@contextlib.contextmanager
def held(prefix, identity):
    """Nobody builds, repairs or removes the release meanwhile; for seconds, so it is waited for."""
    path = os.path.join(prefix, "releases", f".{identity}.lock")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if is_named(path, handle):
                yield
                return
        finally:
            os.close(handle)


def link_time(prefix):
    """When `current` was made, in nanoseconds since the epoch, or 0: units that started before are restarted."""
    try:
        return os.lstat(os.path.join(prefix, "current")).st_mtime_ns
    except OSError:
        return 0


def switch(prefix, identity, previous=None, made_at=0):
    """Make a release the current one. `previous` is set first: it is what a rollback returns to.

    Killed in between, both lead to one release, which is so at no other time. previous: what that link is to lead to
    instead of the one that was current, or nothing. made_at: as link_time() was, to undo a switch without a trace.
    """
    before, before_that = linked(prefix), linked(prefix, "previous")
    link = os.path.join(prefix, "previous")
    target = before if previous is None else previous
    if target and target != identity:
        replace_link(link, os.path.join("releases", target))
    elif previous is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link)
    try:
        replace_link(os.path.join(prefix, "current"), os.path.join("releases", identity))
    except OSError:
        if before_that:
            replace_link(link, os.path.join("releases", before_that))
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
        raise
    # It is switched: nothing below may look as if it were not.
    with contextlib.suppress(OSError):
        if made_at:
            os.utime(os.path.join(prefix, "current"), ns=(made_at, made_at), follow_symlinks=False)
        sync_folder(prefix)


# ---------------------------------------------------------------- manifest


# A line of the manifest: how a file, link or folder was when the release was built. `content` is a file's sha256 or a
# link's target; size and time count for files only, the mode not for links.
Entry = collections.namedtuple("Entry", "kind content size mode mtime path")


def walk(root):
    """{relative path: lstat} of everything below root, but for the release's own two files."""
    found = {}
    folders = [(root, "")]
    while folders:
        folder, prefix = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                relative = prefix + entry.name
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    folders.append((entry.path, relative + "/"))
                if relative not in (MARKER, MANIFEST):
                    found[relative] = info
    return found


def kind_of(info):
    if stat.S_ISLNK(info.st_mode):
        return "link"
    if stat.S_ISDIR(info.st_mode):
        return "folder"
    return "file" if stat.S_ISREG(info.st_mode) else "special"


def write_manifest(root):
    """Describe everything in root; returns (digest of the description, files, bytes)."""
    found = walk(root)
    hashes = hash_files(root, {path: info.st_size for path, info in found.items() if stat.S_ISREG(info.st_mode)})
    lines, files, total = [], 0, 0
    for path in sorted(found):
        info = found[path]
        kind = kind_of(info)
        content = {"file": hashes.get(path), "link": "", "folder": ""}.get(kind)
        if kind == "link":
            content = os.readlink(os.path.join(root, path))
        if content is None or re.search(r"[\t\n]", path + content):
            raise TreeError(f"{os.path.join(root, path)} cannot be part of a release: it is unreadable or oddly named")
        size, mtime = (info.st_size, int(info.st_mtime)) if kind == "file" else (0, 0)
        mode = 0 if kind == "link" else stat.S_IMODE(info.st_mode)
        lines.append(f"{kind}\t{content}\t{size}\t{mode:04o}\t{mtime}\t{path}\n")
        files += kind != "folder"
        total += size
    text = "".join(lines)
    write_atomically(os.path.join(root, MANIFEST), text)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest(), files, total


def read_marker(root):
    """What the marker says, or None: then the release is not complete."""
    try:
        with open(os.path.join(root, MARKER), encoding="utf-8") as stream:
            marker = json.load(stream)
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and marker.get("id") == os.path.basename(root) else None


def read_manifest(root, sha256):
    """{path: Entry}; only of a manifest that has the hash which the marker names."""
    path = os.path.join(root, MANIFEST)
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
    except OSError as error:
        raise TreeError(f"{path} cannot be read ({error.strerror})") from None
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise TreeError(f"{path} is not the one that {MARKER} names")
    entries = {}
    try:
        for line in raw.decode("utf-8", "surrogateescape").split("\n")[:-1]:
            kind, content, size, mode, mtime, name = line.split("\t")
            entries[name] = Entry(kind, content, int(size), int(mode, 8), int(mtime), name)
    except ValueError:
        raise TreeError(f"{path} has a form that this version does not read") from None
    return entries


# ---------------------------------------------------------------- hashing


def shares(sizes, count):
    """Spread the files over so many workers, each with about the same to do."""
    heap = [(0, number) for number in range(count)]
    parts = [[] for _number in range(count)]
    for path in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = heapq.heappop(heap)
        parts[number].append(path)
        heapq.heappush(heap, (load + sizes[path] + FILE_COST, number))
    return [part for part in parts if part]


def hash_share(root, paths):
    result = {}
    for path in paths:
        with contextlib.suppress(OSError):
            result[path] = file_sha256(os.path.join(root, path))
    return result


def hash_files(root, sizes, workers=None):
    """{path: sha256}; what cannot be read is left out. Processes, since threads share one core for small files."""
    workers = workers or min(16, len(os.sched_getaffinity(0)))
    parts = shares(sizes, max(1, min(workers, len(sizes) // 64 + 1)))
    pending = []
    for part in parts[1:]:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(read_end)
                with os.fdopen(write_end, "w", encoding="utf-8") as stream:
                    json.dump(hash_share(root, part), stream)
                status = 0
            finally:
                os._exit(status)  # nothing of the parent's is cleaned up twice
        os.close(write_end)
        pending.append((child, read_end))
    hashes = hash_share(root, parts[0]) if parts else {}
    failed = False
    for child, read_end in pending:
        with os.fdopen(read_end, encoding="utf-8") as stream:
            text = stream.read()
        failed |= os.waitpid(child, 0)[1] != 0
        if not failed:
            hashes.update(json.loads(text))
    if failed:
        raise TreeError(f"a process that hashed files of {root} was killed; is there enough memory?")
    return hashes


# ---------------------------------------------------------------- drift


class Findings:
    """How a release differs from what was built."""

    def __init__(self):
        self.changed = {}  # path: what about it
        self.missing = []
        self.extra = []
        self.bytecode = []  # written by Python beside a source of the release; harmless
        self.files = self.bytes = 0

    def __bool__(self):
        return bool(self.changed or self.missing or self.extra)

    def paths(self):
        return sorted([*self.changed, *self.missing, *self.extra])

    def lines(self):
        return [
            *(f"changed {path} ({why})" for path, why in sorted(self.changed.items())),
            *(f"missing {path}" for path in sorted(self.missing)),
            *(f"extra {path}" for path in sorted(self.extra)),
        ]

    def report(self, limit=None):
        """As data; a list of more than `limit` entries is cut, `total` counts all."""
        return {
            "changed": dict(sorted(self.changed.items())[:limit]),
            "missing": sorted(self.missing)[:limit],
            "extra": sorted(self.extra)[:limit],
            "total": len(self.changed) + len(self.missing) + len(self.extra),
        }


def is_bytecode(path, entries):
    """Whether Python may have written it: root's Python does so for what no one compiled before."""
    folder, name = os.path.split(path)
    if os.path.basename(folder) != "__pycache__" or not name.endswith(".pyc"):
        return False
    return os.path.join(os.path.dirname(folder), name.split(".")[0] + ".py") in entries


def compare(entry, info, path, owner):
    """What about a file is not as it was built, without reading it; None when nothing is."""
    kind = kind_of(info)
    if kind != entry.kind:
        return f"a {kind} instead of a {entry.kind}"
    if kind == "link":
        target = os.readlink(path)
        return f"leads to {target} instead of {entry.content}" if target != entry.content else None
    if kind == "file" and info.st_size != entry.size:
        return f"{info.st_size} bytes instead of {entry.size}"
    if stat.S_IMODE(info.st_mode) != entry.mode:
        return f"mode {stat.S_IMODE(info.st_mode):04o} instead of {entry.mode:04o}"
    if (info.st_uid, info.st_gid) != owner:
        return f"owner {info.st_uid}:{info.st_gid} instead of {owner[0]}:{owner[1]}"
    if kind == "file" and int(info.st_mtime) != entry.mtime:
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.st_mtime))
        return f"written again at {written}"
    return None


def inspect(root, entries, full=False):
    """Hold what is there against the manifest: by size, time, mode and owner, or with `full` by every byte."""
    found = walk(root)
    owner = os.lstat(root)
    owner = (owner.st_uid, owner.st_gid)
    findings = Findings()
    to_hash = {}
    for name, entry in entries.items():
        info = found.pop(name, None)
        if info is None:
            findings.missing.append(name)
            continue
        findings.files += entry.kind != "folder"
        findings.bytes += entry.size
        why = compare(entry, info, os.path.join(root, name), owner)
        if why:
            findings.changed[name] = why
        elif full and entry.kind == "file":
            to_hash[name] = entry.size
    extra = set()
    caches = []
    for name in sorted(found):
        if is_bytecode(name, entries):
            findings.bytecode.append(name)
        elif os.path.basename(name) == "__pycache__" and os.path.dirname(name) in entries:
            caches.append(name)  # the folder itself says nothing; what lies in it is judged
        elif os.path.dirname(name) not in extra:
            findings.extra.append(name)
            if stat.S_ISDIR(found[name].st_mode):
                extra.add(name)
        elif stat.S_ISDIR(found[name].st_mode):
            extra.add(name)  # named by the folder it lies in
    if to_hash:
        hashes = hash_files(root, to_hash)
        for name in to_hash:
            if hashes.get(name) != entries[name].content:
                findings.changed[name] = "other content" if name in hashes else "cannot be read"
    return findings


def examine(root, full=False):
    """Findings about a complete release; raises TreeError when there is nothing to hold it against."""
    marker = read_marker(root)
    if marker is None:
        there = "is not complete" if os.path.isdir(root) else "does not exist"
        raise TreeError(f"the release {root} {there}")
    return inspect(root, read_manifest(root, marker.get("manifest_sha256")), full)


# ---------------------------------------------------------------- repair


def restorable(root, entries, findings):
    """Put right what needs no content (mode, owner, time); returns the paths whose content has to be brought."""
    owner = os.lstat(root)
    needed = []
    for path in [*findings.missing, *findings.changed]:
        entry, target = entries[path], os.path.join(root, path)
        if entry.kind == "file" and (
            path in findings.missing
            or not stat.S_ISREG(os.lstat(target).st_mode)
            or os.lstat(target).st_size != entry.size
            or file_sha256(target) != entry.content
        ):
            needed.append(path)
        elif entry.kind == "file":
            settle(target, entry, owner)
    return needed


def settle(path, entry, owner):
    if (os.lstat(path).st_uid, os.lstat(path).st_gid) != (owner.st_uid, owner.st_gid):
        os.chown(path, owner.st_uid, owner.st_gid)
    os.chmod(path, entry.mode)
    if entry.kind == "file":
        os.utime(path, (entry.mtime, entry.mtime))


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def restore(root, entries, findings, needed, source):
    """Bring every path back to what the manifest says, each in one step; `source` holds the content of those needed."""
    owner = os.lstat(root)
    wrong = [path for path in needed if not is_as_built(os.path.join(source, path), entries[path])]
    if wrong:
        raise TreeError(f"the archive does not hold what the manifest names: {', '.join(sorted(wrong)[:5])}")
    # A folder before what lies in it. Marker and manifest, when they were damaged, are the caller's.
    for path in sorted({*findings.missing, *findings.changed} & set(entries)):
        entry, target = entries[path], os.path.join(root, path)
        if entry.kind == "folder":
            if kind_there(target) != "folder":
                remove(target)
                os.mkdir(target)
            settle(target, entry, owner)
        elif entry.kind == "link":
            if kind_there(target) == "folder":
                remove(target)
            replace_link(target, entry.content)
            os.chown(target, owner.st_uid, owner.st_gid, follow_symlinks=False)
        elif path in needed:
            settle(os.path.join(source, path), entry, owner)
            if kind_there(target) == "folder":
                remove(target)
            os.replace(os.path.join(source, path), target)
    for path in findings.extra:
        remove(os.path.join(root, path))


def kind_there(path):
    try:
        return kind_of(os.lstat(path))
    except OSError:
        return ""


def is_as_built(path, entry):
    try:
        return os.lstat(path).st_size == entry.size and file_sha256(path) == entry.content
    except OSError:
        return False


def since(root, findings):
    """Since when the release may have been different, in seconds since the epoch: a process may have read it then."""
    moments = []
    for path in findings.paths():
        place = os.path.join(root, path)
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        moments.append(os.lstat(place).st_ctime)
    return min(moments, default=0.0)


# ---------------------------------------------------------------- who uses it


def boot_time():
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat", encoding="ascii") as stream:
        return float(re.search(r"^btime (\d+)$", stream.read(), re.MULTILINE)[1])
    return 0.0


def process_start(process, boot):
    """When a process began, in seconds since the epoch."""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stream:
        return boot + int(stream.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def unit_of(process):
    """The systemd unit a process belongs to, or its command."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/cgroup", encoding="utf-8") as stream:
        for part in reversed(stream.read().replace("\n", "/").split("/")):
            if part.endswith((".service", ".scope")):
                return part
    with contextlib.suppress(OSError), open(f"/proc/{process}/comm", encoding="utf-8", errors="replace") as stream:
        return f"{stream.read().strip()} (process {process})"
    return f"process {process}"


def linked(prefix, name="current"):
    """The id that <prefix>/current (or previous) points to, or nothing."""
    try:
        return os.path.basename(os.readlink(os.path.join(prefix, name)))
    except OSError:
        return ""


def users(prefix):
    """{release id: {unit: start of its last process}}: who runs from a release.

    A process that has its files open or mapped, or was started by its path, names it. One that knows `current` alone
    may, when the link is younger, run from the release before.
    """
    root = os.path.join(prefix, "releases")
    by_path = re.compile(re.escape(os.fsencode(root)) + rb"/([0-9a-f]{16})")
    by_link = os.fsencode(os.path.join(prefix, "current")) + b"/"
    current, previous = linked(prefix), linked(prefix, "previous")
    switched = os.lstat(os.path.join(prefix, "current")).st_mtime if current else 0.0
    boot = boot_time()
    result = {}
    for process in os.listdir("/proc"):
        if not process.isdigit() or int(process) == os.getpid():
            continue
        used, through_link = set(), False
        for name in ("cmdline", "environ", "maps"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/{name}", "rb") as stream:
                content = stream.read()
                used.update(match.decode() for match in by_path.findall(content))
                through_link = through_link or by_link in content
        with contextlib.suppress(OSError, ValueError, IndexError):
            start = process_start(process, boot)
            if through_link and not used:
                used.add(current)
                if start < switched:
                    used.add(previous)
            for identity in used - {""}:
                units = result.setdefault(identity, {})
                unit = unit_of(process)
                units[unit] = max(start, units.get(unit, start))
    return result


def installed(prefix):
    """Every release on this node, newest first."""
    root = os.path.join(prefix, "releases")
    current, previous = linked(prefix), linked(prefix, "previous")
    in_use = users(prefix)
    result = []
    for name in os.listdir(root) if os.path.isdir(root) else []:
        path = os.path.join(root, name)
        if not IDENTITY.fullmatch(name) or not os.path.isdir(path):
            continue
        marker = read_marker(path)
        about = marker or {}
        result.append(
            {
                "id": name,
                "complete": marker is not None,
                "current": name == current,
                "previous": name == previous,
                "in_use_by": sorted(in_use.get(name, {})),
                "bytes": about.get("bytes", 0),
                "files": about.get("files", 0),
                "manifest_sha256": about.get("manifest_sha256", ""),
                "inputs": {key: about.get(key, "") for key in ("variant", "python", "lock", "versions", "method")},
                "built_at": about.get("built_at", ""),
                "built_on": about.get("built_on", ""),
            }
        )
    return sorted(result, key=lambda item: (item["built_at"], item["id"]), reverse=True)
