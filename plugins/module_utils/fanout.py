# SPDX-License-Identifier: Apache-2.0
"""Files from node to node: each node hands on what it receives, while it still receives it.

A file travels in pieces. Each is compared with its digest before it is written, so no node hands on a wrong byte, and a
node that meets one knows at once who sent it. A source that fails is left for the next; the last one is the builder.
"""
# Plain os calls, as in the modules.
# ruff: noqa: PTH103, PTH105, PTH108, PTH110, PTH114, PTH118, PTH120, PTH123, PTH202

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import http.client
import inspect
import os
import socket
import time
import urllib.parse

from ansible_collections.ironrack.vllm.plugins.module_utils import files as small_files
from ansible_collections.ironrack.vllm.plugins.module_utils import program, serve_files

PROGRAM = "/usr/local/libexec/ironrack/serve-files"
BLOCK = 1 << 20
SMALLEST_PIECE, LARGEST_PIECE = 1 << 20, 1 << 26
# Small enough that a chain of many nodes is filled soon, so few that their digests stay a short text.
PIECES = 512
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class FanoutError(Exception):
    """A problem whose text names what is wrong and what helps."""


class _NothingNew(Exception):
    """The source is alive, but waits for these bytes itself."""


# ---------------------------------------------------------------- what is sent


def piece_size(size):
    piece = SMALLEST_PIECE
    while piece < LARGEST_PIECE and piece * PIECES < size:
        piece *= 2
    return piece


class Digests:
    """The digests of a file and of its pieces, from its bytes as they pass."""

    def __init__(self, piece):
        self.piece, self.size, self.pieces = piece, 0, []
        self.whole, self.part, self.room = hashlib.sha256(), hashlib.sha256(), piece

    def update(self, block):
        self.whole.update(block)
        self.size += len(block)
        view = memoryview(block)
        while view:
            head, view = view[: self.room], view[self.room :]
            self.part.update(head)
            self.room -= len(head)
            if not self.room:
                self._next()

    def _next(self):
        self.pieces.append(self.part.hexdigest())
        self.part, self.room = hashlib.sha256(), self.piece

    def entry(self, name):
        if self.room < self.piece:
            self._next()
        return {
            "name": name,
            "size": self.size,
            "sha256": self.whole.hexdigest(),
            "piece": self.piece,
            "pieces": self.pieces,
        }


def describe(path, name, piece=None):
    """What `fetch` must know of a file that is complete on this node."""
    digests = Digests(piece or piece_size(os.path.getsize(path)))
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK), b""):
            digests.update(block)
    return digests.entry(name)


def _pieces(entry):
    """[(first byte, length, digest)]; a file without digests of pieces is one piece."""
    size = int(entry["size"])
    piece = int(entry.get("piece") or 0) if entry.get("pieces") else size
    digests = entry.get("pieces") or ([entry["sha256"]] if size else [])
    firsts = range(0, size, max(piece, 1))
    if len(firsts) != len(digests):
        raise FanoutError(f"{entry['name']}: {len(digests)} digests do not fit {size} bytes in pieces of {piece}")
    return [(first, min(piece, size - first), digests[index]) for index, first in enumerate(firsts)]


def _safe(name):
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts):
        raise FanoutError(f"{name!r} is no path inside of the folder")
    return name


# ---------------------------------------------------------------- progress


def amount(size):
    for unit, text in UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {text}"
    return f"{size:.0f} bytes"


def progress_text(state):
    eta = int(state["eta"])
    left = f"{eta // 3600} h {eta % 3600 // 60} min" if eta >= 3600 else f"{eta // 60} min {eta % 60} s"
    return (
        f"{amount(state['done'])} of {amount(state['total'])} ({state['name']} from {state['source']}), "
        f"{amount(state['rate'])}/s, {left} left"
    )


class _Progress:
    def __init__(self, total, callback, interval):
        self.total, self.callback, self.interval = total, callback, interval
        self.done = self.received = 0
        self.started = self.told = time.monotonic()

    def add(self, size, name, source):
        """source is None for what was here before."""
        self.done += size
        if source is not None:
            self.received += size
        now = time.monotonic()
        if self.callback and source is not None and (now - self.told >= self.interval or self.done == self.total):
            self.told = now
            rate = self.received / max(now - self.started, 0.001)
            eta = (self.total - self.done) / rate if rate else 0
            self.callback(
                {"done": self.done, "total": self.total, "rate": rate, "eta": eta, "name": name, "source": source}
            )


# ---------------------------------------------------------------- sources


class _Source:
    def __init__(self, url, timeout):
        parts = urllib.parse.urlsplit(url)
        self.url, self.host, self.port = url, parts.hostname, parts.port or 80
        self.folder = parts.path.rstrip("/")
        self.timeout = timeout
        self.connection = None
        self.answered = False  # ever
        self.wrong = self.bytes = 0
        self.problem = "not asked"

    def close(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def read(self, name, first, view):
        """Fill the view with the file's bytes from `first` on."""
        used = self.connection is not None
        try:
            self._read(name, first, view)
        except (ConnectionError, http.client.BadStatusLine):
            self.close()
            if not used:
                raise
            self._read(name, first, view)  # the other end closes a connection that was silent for a while
        self.bytes += len(view)

    def _read(self, name, first, view):
        try:
            if self.connection is None:
                # Straight to the node: traffic of the cluster never takes a proxy.
                self.connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
            path = f"{self.folder}/{urllib.parse.quote(name)}"
            self.connection.request("GET", path, headers={"Range": f"bytes={first}-{first + len(view) - 1}"})
            answer = self.connection.getresponse()
            self.answered = True
            if answer.status == 503:
                answer.read()
                raise _NothingNew
            if answer.status != 206 or answer.headers.get("Content-Length") != str(len(view)):
                raise ConnectionError(f"answers {answer.status} {answer.reason}")
            have = 0
            while have < len(view):
                got = answer.readinto(view[have:])
                if not got:
                    raise ConnectionError(f"the connection ended after {have} of {len(view)} bytes")
                have += got
        except _NothingNew:
            raise
        except BaseException:
            self.close()
            raise


class _Sources:
    """The sources in their order; the one that works is kept."""

    def __init__(self, urls, log, options):
        self.all = [_Source(url, options["timeout"]) for url in dict.fromkeys(urls)]
        self.log, self.options = log, options
        self.current, self.failures = self.all[0] if self.all else None, 0
        self.begin = self.alive = time.monotonic()

    def read(self, entry, first, view):
        """Fill the view from the first source that can; returns it."""
        if not self.all:
            raise FanoutError(f"{entry['name']} is not here, and there is no node to fetch it from")
        while True:
            source = self.current
            try:
                source.read(entry["name"], first, view)
            except _NothingNew:
                if time.monotonic() - self.alive > self.options["starve"]:
                    self.next(f"has had nothing new for {self.options['starve']:.0f} s", entry)
                time.sleep(0.05)  # whatever answers there need not have waited itself
                continue
            except (OSError, http.client.HTTPException) as error:
                source.problem = f"{type(error).__name__}: {error}"
                # All nodes begin together: the one before this one may be a little later.
                if source is self.all[0] and not source.answered and self._early():
                    time.sleep(0.2)
                    continue
                self.next(source.problem, entry)
                continue
            self.failures, self.alive = 0, time.monotonic()
            return source

    def _early(self):
        return len(self.all) > 1 and time.monotonic() - self.begin < self.options["grace"]

    def next(self, problem, entry):
        """Go on to the next source; after the last, wait and begin again, a few times."""
        self.current.problem = problem
        self.current.close()
        self.log(f"{self.current.url}: {problem}")
        self.failures += 1
        rounds, place = divmod(self.failures, len(self.all))
        usable = [source for source in self.all if source.wrong < 2]
        if not usable or rounds >= self.options["rounds"]:
            told = "; ".join(f"{source.url}: {source.problem}" for source in self.all)
            raise FanoutError(f"{entry['name']} could not be fetched from any node ({told})")
        if not place:
            time.sleep(min(self.options["pause"] * 2 ** (rounds - 1), 15))
        start = self.all.index(self.current) + 1
        self.current = next(source for source in self.all[start:] + self.all[:start] if source.wrong < 2)
        self.alive = time.monotonic()

    def close(self):
        for source in self.all:
            source.close()


# ---------------------------------------------------------------- fetching


def fetch(
    files,
    sources,
    folder,
    log,
    progress=None,
    *,
    timeout=15.0,
    starve=60.0,
    grace=30.0,
    rounds=6,
    pause=1.0,
    interval=5.0,
):
    """Bring files into a folder.

    files: entries of `describe`. sources: base URLs, the nearest node first, the builder last. timeout: seconds of
    silence after which a source counts as dead. starve: seconds after which one that is alive, but waits itself, is
    left. grace: seconds that the first source has for coming up.
    """
    started = time.monotonic()
    options = {"timeout": timeout, "starve": starve, "grace": grace, "rounds": rounds, "pause": pause}
    told = _Progress(sum(int(entry["size"]) for entry in files), progress, interval)
    plan = [(entry, os.path.join(folder, _safe(entry["name"])), _pieces(entry)) for entry in files]
    ring = _Sources(sources, log, options)
    with contextlib.closing(ring), concurrent.futures.ThreadPoolExecutor(1) as keeper:
        fetcher = _Fetcher(ring, keeper, told)
        for entry, path, pieces in plan:
            fetcher.file(entry, path, pieces)
    return {
        "bytes": told.received,
        "seconds": time.monotonic() - started,
        "by_source": {source.url: source.bytes for source in ring.all if source.bytes},
        "wrong": fetcher.wrong,
    }


def _verified(stream, pieces):
    """How many of the first pieces a file holds as they should be."""
    for index, (_first, length, digest) in enumerate(pieces):
        found, left = hashlib.sha256(), length
        while left:
            block = stream.read(min(left, BLOCK))
            if not block:
                return index
            found.update(block)
            left -= len(block)
        if found.hexdigest() != digest:
            return index
    return len(pieces)


def _no_link(path, flags):
    """For open(): root writes through no link that somebody may have put there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _begin(path, pieces, log):
    """Number of pieces that `<path>.part` already holds; after this it holds nothing else."""
    partial, unproven = f"{path}.part", f"{path}.unproven"
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        # Under another name while it is read: a server hands on what lies in a .part
        os.replace(partial, unproven)
    if os.path.islink(unproven):
        os.unlink(unproven)  # none of ours: it is somebody else's file that would be cut
    with open(unproven, "a+b", opener=_no_link) as stream:
        stream.seek(0)
        have = _verified(stream, pieces)
        stream.truncate(sum(length for _first, length, _digest in pieces[:have]))
        os.fchmod(stream.fileno(), 0o644)
    os.replace(unproven, partial)
    if have:
        log(f"{partial} holds {have} of {len(pieces)} pieces")
    return have


class _Fetcher:
    def __init__(self, ring, keeper, told):
        self.ring, self.keeper, self.told = ring, keeper, told
        self.wrong = []

    def file(self, entry, path, pieces):
        size = int(entry["size"])
        if os.path.exists(path):
            with open(path, "rb") as stream:
                right = os.path.getsize(path) == size and _verified(stream, pieces) == len(pieces)
            if right:
                for rest in (f"{path}.part", f"{path}.unproven"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(rest)  # of a run that was killed before the file came by another way
                self.told.add(size, entry["name"], None)
                return
            self.ring.log(f"{path} is not the file that it should be; it is fetched again")
            os.unlink(path)  # for the room, and so that nobody takes it from here; who has it open keeps it
        index = _begin(path, pieces, self.ring.log)
        self.told.add(sum(length for _first, length, _digest in pieces[:index]), entry["name"], None)
        partial = f"{path}.part"
        try:
            with open(partial, "ab", buffering=0, opener=_no_link) as stream:
                self.arrive(entry, pieces, index, stream)
                os.fsync(stream.fileno())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)  # what cannot be finished must not fill the disk
            raise OSError(errno.ENOSPC, os.strerror(error.errno), partial) from None
        os.replace(partial, path)

    def arrive(self, entry, pieces, index, stream):
        """Take piece after piece; one is checked and written while the next one arrives."""
        buffers = [bytearray(pieces[0][1] if pieces else 0) for _ in range(2)]
        kept = None
        while index < len(pieces) or kept:
            source = None
            if index < len(pieces):
                first, length, digest = pieces[index]
                view = memoryview(buffers[index % 2])[:length]
                source = self.ring.read(entry, first, view)
            if kept:
                before, sender, future = kept
                kept = None
                found = future.result()
                if found:
                    index = before
                    self.blame(entry, pieces[index], sender, found)
                    continue
                self.told.add(pieces[before][1], entry["name"], sender.url)
            if source:
                kept = index, source, self.keeper.submit(_keep, stream, view, digest)
                index += 1

    def blame(self, entry, piece, source, found):
        first, length, digest = piece
        text = f"wrong bytes: {first} to {first + length - 1} of {entry['name']} have the sha256 {found}, not {digest}"
        source.wrong += 1
        self.wrong.append(f"{source.url} sent {text}")
        if self.ring.current is source:
            self.ring.next(text, entry)
        else:
            self.ring.log(f"{source.url}: {text}")


def _keep(stream, view, digest):
    """Write a piece if it is right; otherwise say what it is."""
    found = hashlib.sha256(view).hexdigest()
    if found != digest:
        return found
    while view:
        view = view[stream.write(view) :]
    return None


# ---------------------------------------------------------------- serving


def base_url(address, port):
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/"


def serve(unit, folder, names, address, port, *, lifetime=3600, idle=None):
    """Serve files from a transient unit: it needs no file that a killed run could leave behind. Returns the URL.

    Without `idle` it waits its whole lifetime for somebody to ask: a run may do other work for hours in between.
    """
    idle = lifetime if idle is None else idle
    text = inspect.getsource(serve_files)
    if small_files.read(PROGRAM) != text:
        small_files.write(PROGRAM, text, 0o755)
    stop(unit)
    properties = [
        "Type=notify",  # so that it is known here whether it listens
        "TimeoutStartSec=30",
        f"RuntimeMaxSec={lifetime}",
        "DynamicUser=yes",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateDevices=yes",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        "SystemCallFilter=@system-service",
        "TasksMax=256",
    ]
    words = [f"--address={address}", f"--port={port}", f"--idle={idle}", "--", folder, *names]
    command = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", *(f"--property={item}" for item in properties)]
    # systemd would put a variable in for what follows a dollar sign
    command += ["/usr/bin/python3", "-I", PROGRAM, *(word.replace("$", "$$") for word in words)]
    status, _output, errors = program.call(command, 60)
    if status == 0:
        return base_url(address, port)
    # What the program said, without what systemd says of it.
    journal = ["journalctl", "--no-pager", "--output=cat", "--lines=1", f"--unit={unit}", "--identifier=python3"]
    told = program.call(journal, 10)[1].strip() or errors.strip()
    raise FanoutError(
        f"the file server {unit} does not run on {socket.gethostname()}: {told}. Either something else has port "
        f"{port}, or {address} is no address of this node (cluster_address)."
    )


def stop(unit):
    program.call(["systemctl", "stop", unit], 60)
