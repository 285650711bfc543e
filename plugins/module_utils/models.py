# SPDX-License-Identifier: Apache-2.0
"""Model folders on a node: what is in them, what is wrong with them, what is still missing.

A folder that ironrack filled holds a manifest (`MANIFEST`), written last: names, sizes and SHA-256 of all its files. As
long as it is being filled, there is `ARRIVING` instead. A folder with neither was put there by somebody else; only its
own files can then say whether it is whole.
"""
# Plain os calls, as in the modules.
# ruff: noqa: PTH101, PTH102, PTH105, PTH108, PTH110, PTH112, PTH113, PTH114, PTH115, PTH116, PTH118, PTH119, PTH120, PTH123, PTH202, PTH204, PTH208

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import socket
import stat
import struct
import threading
import time

MANIFEST = "ironrack-model.json"
ARRIVING = "ironrack-model.part.json"
PART = ".part"
UNPROVEN = ".unproven"  # a part that is looked at
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100 * 1000 * 1000  # what the safetensors library accepts
WHOLE_FILE_LIMIT = 32 * 1024 * 1024
CHUNK = 4 << 20
GB = 10**9
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "*.tiktoken"),
)
# The same weights once more, for other programs; wanted only where there are no safetensors.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf")
# Nothing that vLLM reads.
NEVER = (
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.mlmodel", "*.mlpackage"),
    *("original/*", "onnx/*", "openvino/*", "coreml/*", "metal/*", ".git*", ".cache/*"),
)


class ModelError(Exception):
    """A problem whose text names file and remedy."""


# ---------------------------------------------------------------- files


def read_json(path, name):
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
    except FileNotFoundError:
        raise ModelError(f"{name} is missing") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{name} cannot be read ({error}): copy it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name} is no JSON object: copy it again")
    return value


def sha256(path, seen=None):
    """Hash of a whole file; `seen` hears of each block."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(CHUNK), b""):
            digest.update(block)
            if seen:
                seen(len(block))
    return digest.hexdigest()


def git_blob(path):
    """The name that git gives to a file's content: how the hub names files that are not in LFS."""
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(f"blob {os.path.getsize(path)}\0".encode())
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(CHUNK), b""):
            digest.update(block)
    return digest.hexdigest()


def no_link(path, flags):
    """For open(): root writes through no link that somebody may have put there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def drop_link(path):
    """Where ironrack writes, a link is none of its own."""
    if os.path.islink(path):
        os.unlink(path)


def write_atomically(path, text):
    partial = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    with open(partial, "w", encoding="utf-8", opener=no_link) as stream:
        stream.write(text)
        stream.flush()
        os.fchmod(stream.fileno(), 0o644)
        os.fsync(stream.fileno())
    os.replace(partial, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def safe_name(name):
    """Whether a file name that came from outside stays inside the folder."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not any(part in ("", ".", "..") for part in parts)


def prepare(folder, names=()):
    """The folders that the files need, open to everybody who may serve them."""
    for name in names:
        place = folder
        for part in name.split("/")[:-1]:
            place = os.path.join(place, part)
            if os.path.islink(place):
                raise ModelError(f"{place} is a link, and root writes through none in a model's folder: remove it")
    for path in [folder, *sorted({os.path.dirname(os.path.join(folder, name)) for name in names})]:
        missing, place = [], path
        while not os.path.isdir(place):
            missing.append(place)
            place = os.path.dirname(place)
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each)
                os.chmod(each, 0o755)  # noqa: S103 - the engine's user reads it


def keep_file(partial, target):
    """What has arrived and is right takes its place."""
    handle = no_link(partial, os.O_RDONLY)
    try:
        os.fchmod(handle, 0o644)
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(partial, target)


# ---------------------------------------------------------------- what a folder holds


def safetensors_header(path):
    """(raw header, names of the tensors); raises when the file is not as long as its header says."""
    name = os.path.basename(path)
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ModelError(f"{name} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        raw = stream.read(length) if 2 <= length <= HEADER_LIMIT else b""
    if len(raw) != length or not raw:
        raise ModelError(f"{name} has no whole safetensors header ({size} bytes): copy it again")
    try:
        header = json.loads(raw)
        tensors = {key: int(value["data_offsets"][1]) for key, value in header.items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ModelError(f"{name} has a damaged safetensors header: copy it again") from None
    wanted = 8 + length + max(tensors.values(), default=0)
    if size != wanted:
        raise ModelError(f"{name} has {size} of {wanted} bytes: the copy was broken off or mixed up, copy it again")
    return raw, set(tensors)


def is_ours(name):
    """What ironrack itself writes beside a model's files."""
    return name in (MANIFEST, ARRIVING) or name.endswith((PART, UNPROVEN, ".new"))


def names_in(folder):
    """The files of a folder that somebody else filled, without what no engine reads."""
    names = []
    for place, folders, found in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [os.path.relpath(os.path.join(place, name), folder) for name in found if not name.startswith(".")]
    names = sorted(name for name in names if not _matches(name, NEVER) and not is_ours(name))
    for name in names:
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            raise ModelError(f"{name} is a link to {os.readlink(path)}, which does not exist")
        if not os.path.isfile(path):
            raise ModelError(f"{name} is no file: take it out of the folder")
    return names


def inspect(path, full=False, seen=None, hashes=None):
    """Check one folder by what its own files say; returns sizes and digests to compare between nodes.

    With `full` the digests are those of whole files; `hashes` holds the ones that are known already.
    """
    if not os.path.isdir(path):
        raise ModelError("the folder does not exist: copy or mount the model there, or correct model.path")
    manifest = load_manifest(path)
    names = [entry["name"] for entry in manifest["files"]] if manifest else names_in(path)
    config = read_json(os.path.join(path, "config.json"), "config.json")
    if "architectures" not in config and "model_type" not in config:
        raise ModelError("config.json names neither architectures nor model_type: it is not a model's")

    files, tensors, size = {}, {}, 0
    for name in names:
        file_path = os.path.join(path, name)
        length = os.path.getsize(file_path)
        size += length
        digest = hashlib.sha256(str(length).encode())
        if name.endswith(".safetensors"):
            raw, tensors[name] = safetensors_header(file_path)
            digest.update(raw)
        elif length <= WHOLE_FILE_LIMIT and not full:
            with open(file_path, "rb") as stream:
                digest.update(stream.read())
        files[name] = ((hashes or {}).get(name) or sha256(file_path, seen)) if full else digest.hexdigest()

    if INDEX in files:
        weight_map = read_json(os.path.join(path, INDEX), INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values() or [0]):
            raise ModelError(f"{INDEX} has no weight_map: copy it again")
        missing = sorted({shard for shard in weight_map.values() if shard not in tensors})
        if missing:
            raise ModelError(f"shards named in {INDEX} are missing: {', '.join(missing[:5])} ({len(missing)} in all)")
        for tensor, shard in weight_map.items():
            if tensor not in tensors[shard]:
                raise ModelError(f"{shard} lacks the tensor {tensor} that {INDEX} says it holds: copy both again")
    elif not any(name.endswith((".safetensors", ".bin", ".pt", ".gguf")) and "/" not in name for name in names):
        raise ModelError("there are no weights in it (*.safetensors)")

    text = json.dumps(sorted(files.items()), separators=(",", ":"))
    return {
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "bytes": size,
        "tensors": sum(len(found) for found in tensors.values()),
        "files": files,
        "notes": notes(path, config, names),
    }


def _vocabulary(config):
    """The size of the vocabulary, also of models that keep their language part in a section of its own."""
    for section in (config, config.get("text_config"), config.get("llm_config"), config.get("language_config")):
        if isinstance(section, dict) and isinstance(section.get("vocab_size"), int):
            return section["vocab_size"]
    return None


def notes(path, config, names):
    """What does not stop an engine, or not every one, but is mostly a copy that lacks something."""
    found = []
    if not any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in TOKENIZERS):
        found.append("there is no tokenizer (tokenizer.json or tokenizer.model)")
    generation = {}
    if "generation_config.json" in names:
        generation = read_json(os.path.join(path, "generation_config.json"), "generation_config.json")
    if "tokenizer_config.json" in names:
        read_json(os.path.join(path, "tokenizer_config.json"), "tokenizer_config.json")
    vocabulary = _vocabulary(config)
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = values.get(key)
            for token in value if isinstance(value, list) else [value]:
                if vocabulary and isinstance(token, int) and token >= vocabulary:
                    found.append(
                        f"{key} of {name} is {token}, beyond the vocab_size {vocabulary} of config.json: "
                        "the files may be of different models"
                    )
    return found


# ---------------------------------------------------------------- the manifest


def load_manifest(folder, name=MANIFEST):
    """What the folder has to hold, or None where nothing says it."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as stream:
            manifest = json.load(stream)
    except (OSError, ValueError):
        return None
    return manifest if check_listing(manifest) else None


def check_listing(listing):
    """Whether this is a list of files, none of them outside the folder."""
    files = listing.get("files") if isinstance(listing, dict) else None
    return (
        isinstance(files, list)
        and bool(files)
        and all(
            isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and safe_name(entry["name"])
            and not is_ours(entry["name"])
            and type(entry.get("size")) is int
            and entry["size"] >= 0
            for entry in files
        )
        and len({entry["name"] for entry in files}) == len(files)
    )


def render(listing):
    return json.dumps(listing, indent=1, sort_keys=True) + "\n"


def begin(folder, listing):
    """The folder is being filled from now on; what it was before is no longer promised."""
    prepare(folder, [entry["name"] for entry in listing["files"]])
    # What was something else before, a branch that moved on say, may have the same size: its absence tells it apart.
    before = load_manifest(folder) or load_manifest(folder, ARRIVING) or {"files": []}
    digests = {entry["name"]: entry.get("sha256") for entry in before["files"]}
    for entry in listing["files"]:
        was, now = digests.get(entry["name"]), entry.get("sha256")
        if was and now and was != now:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, entry["name"]))
    write_atomically(os.path.join(folder, ARRIVING), render(listing))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, MANIFEST))


def finish(folder, listing):
    """Everything is there and right: say so, last."""
    write_atomically(os.path.join(folder, MANIFEST), render(listing))
    # What a killed run left beside the files is room for nothing.
    leftovers = [f"{entry['name']}{end}" for entry in listing["files"] for end in (PART, UNPROVEN)]
    for name in (ARRIVING, *leftovers):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def fault(folder, entry, full, seen=None):
    """What is wrong with one file of the manifest, or an empty text."""
    path = os.path.join(folder, entry["name"])
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(info.st_mode):
        return "is no file"
    if info.st_size != entry["size"]:
        return f"has {info.st_size} bytes instead of {entry['size']}"
    try:
        if entry["name"].endswith(".safetensors"):
            safetensors_header(path)
        if full and entry.get("sha256"):
            found = sha256(path, seen)
            if found != entry["sha256"]:
                return f"has the sha256 {found} instead of {entry['sha256']}"
        elif full and entry.get("git") and git_blob(path) != entry["git"]:
            return "is not the file that the hub has"
    except ModelError as error:
        return str(error).replace(f"{os.path.basename(path)} ", "", 1).replace(": copy it again", "")
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def faults(folder, listing, full=False, seen=None):
    """{file: what is wrong with it} against a listing."""
    found = {entry["name"]: fault(folder, entry, full, seen) for entry in listing["files"]}
    return {name: text for name, text in found.items() if text}


def manifest_digest(manifest):
    """Equal where the same files were promised; how they were cut into pieces for the way does not count."""
    files = sorted((entry["name"], entry["size"], entry.get("sha256", "")) for entry in manifest["files"])
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def look(path, full=False, seen=None, verified=False):
    """State of a folder that ironrack fills: absent, arriving, damaged, complete, or foreign (complete, not ours).

    With `verified`, the hashes of the manifest were proven just now, and are not worked out again.
    """
    manifest = load_manifest(path)
    if manifest:
        found = {"commit": manifest.get("commit", ""), "manifest": manifest_digest(manifest)}
        wrong = faults(path, manifest, full and not verified, seen)
        if not wrong:
            hashes = {entry["name"]: entry.get("sha256") for entry in manifest["files"]}
            try:
                return {**found, "state": "complete", "faults": {}, **inspect(path, full, seen, hashes)}
            except ModelError as error:
                wrong = {"": str(error)}
        return {**found, "state": "damaged", "faults": wrong}
    found = {"commit": "", "manifest": ""}
    if os.path.exists(os.path.join(path, ARRIVING)):
        return {**found, "state": "arriving", "faults": {}}
    if not os.path.isdir(path) or not os.listdir(path):
        return {**found, "state": "absent", "faults": {}}
    try:
        return {**found, "state": "foreign", "faults": {}, **inspect(path, full, seen)}
    except ModelError as error:
        return {**found, "state": "damaged", "faults": {"": str(error)}}


# ---------------------------------------------------------------- what to fetch


def _matches(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def wanted(names, ignore=()):
    """The files of a repository that an engine reads."""
    kept = [name for name in names if not _matches(name, (*NEVER, *ignore)) and not is_ours(name)]
    # By folder: the safetensors of an adapter or a part are not the weights that lie elsewhere.
    folders = {os.path.dirname(name) for name in kept if name.endswith(".safetensors")}
    return [name for name in kept if not (os.path.dirname(name) in folders and _matches(name, OTHER_WEIGHTS))]


def missing_bytes(folder, listing):
    """What still has to be written: whole files that are there count, and so does what arrived of the others."""
    total = 0
    for entry in listing["files"]:
        path = os.path.join(folder, entry["name"])
        if os.path.isfile(path) and os.path.getsize(path) == entry["size"]:
            continue
        part = os.path.getsize(path + PART) if os.path.isfile(path + PART) else 0
        total += entry["size"] - min(part, entry["size"])
    return total


def existing_parent(path):
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def check_room(wanted_models, reserve):
    """Refuse before the first byte. wanted_models: {folder: listing}; those on one file system are added up."""
    places = {}
    for folder, listing in wanted_models.items():
        parent = existing_parent(folder)
        place = places.setdefault(os.stat(parent).st_dev, {"folder": parent, "models": [], "missing": 0, "next": 0})
        size = sum(entry["size"] for entry in listing["files"])
        place["models"].append(folder)
        place["missing"] += missing_bytes(folder, listing)
        place["next"] = max(place["next"], int(size * reserve))
    for place in places.values():
        info = os.statvfs(place["folder"])
        free = info.f_bavail * info.f_frsize
        if place["missing"] and free < place["missing"] + place["next"]:
            room = (
                f" and {place['next'] / GB:.2f} GB for the next revision (model_store_reserve)" if place["next"] else ""
            )
            raise ModelError(
                f"not enough disk space on {socket.gethostname()}: {', '.join(place['models'])} still need(s) "
                f"{place['missing'] / GB:.2f} GB{room}, {free / GB:.2f} GB are free on the file system of "
                f"{place['folder']}. Nothing was fetched. Make room, mount a larger disk there"
                + (", or lower model_store_reserve (0 keeps no room)" if place["next"] else "")
                + "."
            )
    return sum(place["missing"] for place in places.values())


def os_text(error):
    """What the system said, and of which file."""
    names = [str(name) for name in (error.filename, error.filename2) if name]
    return ": ".join([*names, error.strerror or str(error)])


def no_space(error, folder, stays="What has arrived stays and is gone on with"):
    """The message where the disk filled up on the way, or None for another error."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return (
        f"the disk of {folder} on {socket.gethostname()} is full ({error.strerror}). {stays}: make room and run again."
    )


# ---------------------------------------------------------------- progress


class Log:
    """A log file on the node; what looks like a secret never gets into it."""

    def __init__(self, path, secrets=()):
        self.path = path
        self.secrets = [secret for secret in secrets if secret]

    def __call__(self, text):
        for secret in self.secrets:
            text = text.replace(secret, "***")
        text = re.sub(r"(://)[^/\s]*@", r"\1***@", text)
        # A log that cannot be written, on a full disk of its own, is no fault of a transfer.
        with contextlib.suppress(OSError), open(self.path, "a", encoding="utf-8") as stream:
            stream.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n")


def duration(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


class Progress:
    """Says every few seconds how much has arrived, how fast, and for how long it will go on; reads the disk alone."""

    def __init__(self, folder, listing, log, interval=10.0):
        self.folder, self.listing, self.log, self.interval = folder, listing, log, interval
        self.total = sum(entry["size"] for entry in listing["files"])
        self.start_bytes = self.arrived()
        self.start = time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def arrived(self):
        return self.total - missing_bytes(self.folder, self.listing)

    def line(self):
        arrived = self.arrived()
        seconds = max(time.monotonic() - self.start, 1e-6)
        rate = max(arrived - self.start_bytes, 0) / seconds
        left = f"{duration((self.total - arrived) / rate)} left" if rate else "waiting"
        return (
            f"{self.folder}: {arrived} of {self.total} bytes ({arrived / GB:.2f} of {self.total / GB:.2f} GB, "
            f"{100 * arrived // max(self.total, 1)} %), {rate / 1e6:.1f} MB/s, {left}"
        )

    def _run(self):
        while not self.ended.wait(self.interval):
            with contextlib.suppress(OSError):
                self.log(self.line())

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_error):
        self.ended.set()
        self.thread.join()

    def summary(self):
        seconds = time.monotonic() - self.start
        return (
            f"{self.total / GB:.2f} GB in {duration(seconds)}"
            if not self.start_bytes
            else f"the missing {(self.total - self.start_bytes) / GB:.2f} of {self.total / GB:.2f} GB in "
            f"{duration(seconds)}"
        )


@contextlib.contextmanager
def locked(folder, log, patience=24 * 3600):
    """Only one run fills a folder; the file lies beside it, so that a folder being served holds nothing else."""
    prepare(os.path.dirname(folder))
    path = beside(folder, "lock")
    deadline, told = time.monotonic() + patience, False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who removed the revision meanwhile has removed its lock, too; the next one locks another file.
            if os.fstat(handle).st_nlink:
                break
            os.close(handle)
            continue
        except BlockingIOError:
            os.close(handle)
        except BaseException:
            os.close(handle)
            raise
        if time.monotonic() >= deadline:
            raise ModelError(f"another run fills {folder}" + (f" for {duration(patience)}" if patience else ""))
        if not told:
            log(f"waiting for another run that fills {folder}")
            told = True
        time.sleep(0.5)
    try:
        yield handle
    finally:
        os.close(handle)


def beside(folder, what):
    """A name that belongs to a folder, but does not lie in it."""
    return os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.{what}")


# ---------------------------------------------------------------- revisions


def revisions(root, planned):
    """[(folder, bytes, time of its manifest)] under `root` (org/name/revision) that no instance of this node uses."""
    found = []
    for folder, folders, names in os.walk(root):
        if os.path.relpath(folder, root).count(os.sep) == 2:
            folders.clear()
            marks = [name for name in (MANIFEST, ARRIVING) if name in names]
            if marks and folder not in planned:
                size = sum(entry["size"] for entry in (load_manifest(folder, marks[0]) or {"files": []})["files"])
                found.append({"path": folder, "bytes": size, "time": os.path.getmtime(os.path.join(folder, marks[0]))})
    return sorted(found, key=lambda item: (os.path.dirname(item["path"]), -item["time"]))


def surplus(old, keep):
    """Those beyond the `keep` newest old revisions of each repository."""
    counted, result = {}, []
    for item in old:
        name = os.path.dirname(item["path"])
        counted[name] = counted.get(name, 0) + 1
        if counted[name] > keep:
            result.append(item["path"])
    return result


def in_use(path):
    """Whether a running process names the folder or has a file of it open."""
    needle = path.encode()
    for process in os.listdir("/proc"):
        if process.isdigit() and int(process) != os.getpid():
            for name in ("cmdline", "maps"):
                with contextlib.suppress(OSError), open(f"/proc/{process}/{name}", "rb") as stream:
                    if needle + b"/" in stream.read().replace(b"\0", b"/") + b"/":
                        return True
    return False
