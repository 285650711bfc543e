#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: render
short_description: Write many files, directories and links in one task
version_added: 0.1.0
description:
  - Brings a list of files, directories and symbolic links into the wanted state, in the order given.
  - >-
    Every file is written to a temporary file beside its target, synced to disk and renamed over it, so that a reader
    (or a machine that loses power) sees the old content or the new one, never a part.
  - What is already as wanted is not touched and keeps its modification time.
  - The whole list is checked before the first change is made.
  - A symbolic link at O(files[].path) is never followed.
author:
  - The ironrack authors
options:
  files:
    description: What to write, in this order.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description:
          - Absolute path.
          - The folder it lies in must exist, or be an earlier V(directory) entry of the same list.
        type: str
        required: true
      state:
        description:
          - V(file) writes O(files[].content) or O(files[].secret_content); a link found at the path is replaced.
          - V(directory) creates one folder; a link found at the path is an error.
          - V(link) creates a symbolic link to O(files[].src); a file found at the path is replaced.
          - V(absent) removes a file, a link, or a folder that is empty by then.
        type: str
        choices: [file, absent, directory, link]
        default: file
      content:
        description: The whole content of the file, written as it is.
        type: str
      secret_content:
        description:
          - Like O(files[].content), for secrets. It is never printed, and a diff shows only its size.
          - The file's mode defaults to V(0600) and must not give others any right.
        type: str
      src:
        description: Target of the link, for O(files[].state=link). It need not exist.
        type: str
      owner:
        description: User that owns it. When not given it is left as it is; new things get the user of this task.
        type: str
      group:
        description: Group that owns it. When not given it is left as it is; new things get the group of this task.
        type: str
      mode:
        description:
          - Permissions as an octal string with a leading zero, such as V("0644").
          - Defaults to V("0644") for new files and V("0755") for new folders. Ignored for links.
        type: str
      sysctl:
        description:
          - The file is one of sysctl.d, and its settings are to be in force now as well, not only after the next boot.
          - A setting that this kernel lacks or refuses (some belong to the machine below a container) is a warning.
        type: bool
        default: false
attributes:
  check_mode:
    description: >-
      Reports what would change. A folder, user or group that does not exist is tolerated then,
      because an earlier task may be what creates it.
    support: full
  diff_mode:
    description: Shows each file before and after, except for O(files[].secret_content).
    support: full
"""

EXAMPLES = r"""
- name: Write the configuration of one node
  ironrack.vllm.render:
    files:
      - path: /etc/ironrack
        state: directory
        mode: "0755"
      - path: /etc/ironrack/node.env
        content: |
          NODE_IP=10.77.1.11
        mode: "0644"
      - path: /etc/ironrack/ray.token
        secret_content: "{{ ray_token }}"
        owner: root
        group: root
        mode: "0600"
      - path: /etc/sysctl.d/60-ironrack.conf
        content: |
          vm.swappiness = 10
        sysctl: true
      - path: /etc/ironrack/old.conf
        state: absent

- name: Point the service to another release
  ironrack.vllm.render:
    files:
      - path: /opt/ironrack/current
        state: link
        src: releases/2f1c9a
"""

RETURN = r"""
changed_paths:
  description: >-
    The paths that were (or in check mode would be) changed, in order; of kernel settings their path in C(/proc/sys).
  returned: always
  type: list
  elements: str
  sample: [/etc/ironrack/node.env]
missing_parents:
  description: Folders that did not exist and were tolerated, in check mode only.
  returned: check mode
  type: list
  elements: str
  sample: [/etc/ironrack]
"""

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import re
import stat
import tempfile

from ansible.module_utils.basic import AnsibleModule

PROC_SYS = "/proc/sys"
DIFF_LIMIT = 256 * 1024
TMP_MARK = ".ironrack-new-"


class RenderError(Exception):
    """A problem with one entry; the text names its path."""


def parse_mode(path, value):
    """Octal string with a leading zero -> int.  A bare number is refused: YAML turns 0644 into 420."""
    if value is None:
        return None
    if not re.fullmatch(r"0[0-7]{3,4}", value):
        raise RenderError(
            f'{path}: mode {value!r} is not an octal string such as "0644" (quote it, with the leading zero)'
        )
    return int(value, 8)


def lookup_id(path, kind, name, check_mode):
    """Name or number of a user or group -> id; None when not given, or not there yet in check mode."""
    if name is None:
        return None
    try:
        return pwd.getpwnam(name).pw_uid if kind == "owner" else grp.getgrnam(name).gr_gid
    except KeyError:
        if name.isdigit():
            return int(name)
        if check_mode:
            return None
        raise RenderError(f"{path}: {kind} {name!r} does not exist on this host") from None


def lstat(path):
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def kind_of(info):
    if info is None:
        return "absent"
    for test, name in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link")):
        if test(info.st_mode):
            return name
    return "special"


def check_entry(entry, seen):
    """Everything that can be said of an entry without looking at the disk."""
    path, state = entry["path"], entry["state"]
    if not path.startswith("/") or path != os.path.normpath(path) or path == "/":
        raise RenderError(f"{path!r}: not an absolute path in its plain form")
    if path in seen:
        raise RenderError(f"{path}: listed twice")
    contents = [key for key in ("content", "secret_content") if entry[key] is not None]
    if state == "file" and len(contents) != 1:
        raise RenderError(f"{path}: a file needs content or secret_content, and not both")
    if state != "file" and contents:
        raise RenderError(f"{path}: {contents[0]} goes with state file only, not with {state}")
    if (state == "link") != bool(entry["src"]):
        raise RenderError(f"{path}: src and state link belong together")
    if entry.get("sysctl"):
        if entry["content"] is None:
            raise RenderError(f"{path}: sysctl goes with content only")
        parse_sysctl(path, entry["content"])


def parse_sysctl(path, text):
    """Settings of a sysctl.d file: (name, path below /proc/sys, value)."""
    settings = []
    for line in text.splitlines():
        plain = line.strip()
        if not plain or plain[0] in "#;":
            continue
        name, separator, value = plain.partition("=")
        name = name.strip().lstrip("-").strip()
        if not separator or not re.fullmatch(r"[A-Za-z0-9_-]+([./][A-Za-z0-9_:@-]+)+", name):
            raise RenderError(f"{path}: {plain!r} is not a setting of the kernel, as in vm.swappiness = 10")
        # sysctl.d: when the first separator is a slash, dots are part of names
        first = re.search("[./]", name).group()
        settings.append((name, name if first == "/" else name.replace(".", "/"), " ".join(value.split())))
    return settings


class Setting:
    """One kernel setting: what it is now and what it should be."""

    def __init__(self, name, path, value):
        self.name, self.path, self.value = name, f"{PROC_SYS}/{path}", value
        self.problem = None
        try:
            self.now = self.read()
        except OSError as error:
            self.now = None
            self.problem = "this kernel has no such setting" if error.errno == errno.ENOENT else error.strerror

    def read(self):
        with open(self.path, encoding="utf-8") as handle:
            return " ".join(handle.read().split())

    def differs(self):
        return self.problem is None and self.now != self.value

    def apply(self):
        """True when the kernel took it."""
        try:
            with open(self.path, "w", encoding="utf-8") as handle:
                handle.write(self.value)
            reached = self.read()
        except OSError as error:
            self.problem = f"the kernel refuses it ({error.strerror})"
            return False
        if reached != self.value:
            self.problem = f"the kernel made it {reached}"
        return reached != self.now

    def warning(self):
        return f"{self.name} = {self.value}: {self.problem}"


class Bundle:
    """The entries, worked out against the disk first, then applied."""

    def __init__(self, entries, check_mode=False):
        self.check_mode = check_mode
        self.entries = []
        self.kinds = {}  # path -> what it will be once the entries before are applied
        self.missing_parents = []
        self.settings = []
        for entry in entries:
            check_entry(entry, {e["path"] for e in self.entries})
            self.entries.append(self._examine(dict(entry)))
            if entry.get("sysctl"):
                self.settings += [Setting(*setting) for setting in parse_sysctl(entry["path"], entry["content"])]

    def _exists_as_directory(self, path):
        if path in self.kinds:
            return self.kinds[path] == "directory"
        return os.path.isdir(path)

    def _examine(self, entry):
        path, state = entry["path"], entry["state"]
        info = lstat(path)
        kind = kind_of(info)
        entry["found"], entry["kind"] = info, kind
        entry["secret"] = entry["secret_content"] is not None
        entry["old"] = entry["new"] = b""
        parent = os.path.dirname(path)
        if state != "absent" and not self._exists_as_directory(parent):
            if not self.check_mode:
                raise RenderError(f"{path}: the folder {parent} does not exist; list it before, with state directory")
            if parent not in self.missing_parents:
                self.missing_parents.append(parent)
        refuse = {
            "file": ("directory", "special"),
            "link": ("directory", "special"),
            "directory": ("file", "link", "special"),
            "absent": ("special",),
        }[state]
        if kind in refuse:
            raise RenderError(f"{path}: is a {kind}, wanted is state {state}; move it away by hand first")
        self.kinds[path] = state

        entry["uid"] = lookup_id(path, "owner", entry["owner"], self.check_mode)
        entry["gid"] = lookup_id(path, "group", entry["group"], self.check_mode)
        mode = parse_mode(path, entry["mode"])
        if mode is None:
            if info is not None and kind == state:
                mode = stat.S_IMODE(info.st_mode)
            else:
                mode = 0o600 if entry["secret"] else (0o755 if state == "directory" else 0o644)
            if entry["secret"]:
                mode &= ~0o007
        if entry["secret"] and mode & 0o007:
            raise RenderError(f"{path}: mode {entry['mode']} lets everybody at secret_content; use 0600 or 0640")
        entry["bits"] = mode

        entry["changes"] = getattr(self, "_examine_" + state)(entry)
        return entry

    def _attributes(self, entry):
        """What of owner, group and mode differs: name -> (before, after)."""
        info, differ = entry["found"], {}
        if entry["state"] != "link" and stat.S_IMODE(info.st_mode) != entry["bits"]:
            differ["mode"] = (f"{stat.S_IMODE(info.st_mode):04o}", f"{entry['bits']:04o}")
        for key, actual in (("uid", info.st_uid), ("gid", info.st_gid)):
            name = "owner" if key == "uid" else "group"
            missing = entry[name] is not None and entry[key] is None  # in check mode: not created yet
            if missing or (entry[key] is not None and entry[key] != actual):
                differ[name] = (actual, entry[name])
        return differ

    def _examine_file(self, entry):
        text = entry["secret_content"] if entry["secret"] else entry["content"]
        entry["new"] = text.encode("utf-8", "surrogateescape")
        if entry["kind"] != "file":
            return {"content": True}
        with open(entry["path"], "rb") as handle:
            entry["old"] = handle.read()
        changes = self._attributes(entry)
        if entry["old"] != entry["new"]:
            changes["content"] = True
        return changes

    def _examine_directory(self, entry):
        return self._attributes(entry) if entry["kind"] == "directory" else {"content": True}

    def _examine_link(self, entry):
        if entry["kind"] == "link":
            entry["old"] = os.readlink(entry["path"]).encode("utf-8", "surrogateescape")
        entry["new"] = entry["src"].encode("utf-8", "surrogateescape")
        if entry["kind"] == "link" and entry["old"] == entry["new"]:
            return self._attributes(entry)
        return {"content": True}

    def _examine_absent(self, entry):
        path = entry["path"]
        if entry["kind"] == "file":
            with open(path, "rb") as handle:
                entry["old"] = handle.read()
        elif entry["kind"] == "link":
            entry["old"] = os.readlink(path).encode("utf-8", "surrogateescape")
        elif entry["kind"] == "directory":
            left = [name for name in os.listdir(path) if self.kinds.get(os.path.join(path, name)) != "absent"]
            if left:
                raise RenderError(
                    f"{path}: is not empty ({', '.join(sorted(left)[:5])}); only empty folders are removed"
                )
        return {"content": True} if entry["found"] else {}

    def changed(self):
        return [entry for entry in self.entries if entry["changes"]]

    def changed_paths(self):
        """What apply would do, for check mode."""
        settings = [setting.path for setting in self.settings if setting.differs()]
        return [entry["path"] for entry in self.changed()] + settings

    def apply(self, done):
        """Make the changes; each finished path is appended to done, so that a failure can tell what was reached."""
        folders = set()
        for entry in self.entries:
            if entry["state"] in ("file", "link"):
                folders.add(os.path.dirname(entry["path"]))
            if not entry["changes"]:
                continue
            try:
                getattr(self, "_apply_" + entry["state"])(entry)
            except OSError as error:
                raise RenderError(f"{entry['path']}: {error.strerror or error}") from error
            done.append(entry["path"])
        for setting in self.settings:
            if setting.differs() and setting.apply():
                done.append(setting.path)
        for folder in folders:
            remove_leftovers(folder, [entry["path"] for entry in self.entries])

    def _apply_file(self, entry):
        if "content" in entry["changes"]:
            keep = entry["found"] if entry["kind"] == "file" else None
            uid = entry["uid"] if entry["uid"] is not None else (keep.st_uid if keep else -1)
            gid = entry["gid"] if entry["gid"] is not None else (keep.st_gid if keep else -1)
            write_atomically(entry["path"], entry["new"], entry["bits"], uid, gid)
        else:
            set_attributes(entry["path"], entry["bits"], entry["uid"], entry["gid"], 0)

    def _apply_directory(self, entry):
        if entry["kind"] == "absent":
            os.mkdir(entry["path"], 0o700)
        set_attributes(entry["path"], entry["bits"], entry["uid"], entry["gid"], os.O_DIRECTORY)

    def _apply_link(self, entry):
        path = entry["path"]
        uid = -1 if entry["uid"] is None else entry["uid"]
        gid = -1 if entry["gid"] is None else entry["gid"]
        if "content" not in entry["changes"]:
            os.chown(path, uid, gid, follow_symlinks=False)
            return
        # symlink(2) cannot replace, so a new link is made beside it (in a folder nobody else can reach) and renamed.
        folder = tempfile.mkdtemp(prefix=temporary_prefix(path), dir=os.path.dirname(path))
        fresh = os.path.join(folder, "link")
        try:
            os.symlink(entry["src"], fresh)
            os.chown(fresh, uid, gid, follow_symlinks=False)
            os.rename(fresh, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            raise
        finally:
            os.rmdir(folder)
        sync_folder(os.path.dirname(path))

    def _apply_absent(self, entry):
        if entry["kind"] == "directory":
            os.rmdir(entry["path"])
        else:
            os.unlink(entry["path"])
        sync_folder(os.path.dirname(entry["path"]))

    def diffs(self):
        result = []
        for entry in self.changed():
            path, changes = entry["path"], entry["changes"]
            if "content" in changes:
                before, after = self._sides(entry)
                result.append(
                    {
                        "before_header": f"{path} ({entry['kind']})",
                        "after_header": f"{path} ({entry['state']})",
                        "before": before,
                        "after": after,
                    }
                )
            names = sorted(set(changes) - {"content"})
            if names:
                result.append(
                    {
                        "before_header": path,
                        "after_header": path,
                        "before": "".join(f"{name}: {changes[name][0]}\n" for name in names),
                        "after": "".join(f"{name}: {changes[name][1]}\n" for name in names),
                    }
                )
        return result

    def setting_diffs(self, done):
        return [
            {
                "before_header": setting.path,
                "after_header": setting.path,
                "before": f"{setting.now}\n",
                "after": f"{setting.value}\n",
            }
            for setting in self.settings
            if setting.path in done
        ]

    @staticmethod
    def _sides(entry):
        old, new, state = entry["old"], entry["new"], entry["state"]
        # Whatever lies at the path of a secret may be a secret too; so may a private file that is removed.
        private = entry["kind"] == "file" and state == "absent" and not stat.S_IMODE(entry["found"].st_mode) & 0o007
        if entry["secret"] or private:
            before = f"(secret, {len(old)} bytes)\n" if entry["kind"] == "file" else ""
            return before, f"(secret, {len(new)} bytes, changed)\n" if state == "file" else ""
        if state == "directory":
            return "", f"folder, mode {entry['bits']:04o}\n"
        sides = []
        for kind, data in ((entry["kind"], old), (state, new)):
            if kind == "link":
                sides.append(f"link to {printable(data)}\n")
            elif kind == "directory":
                sides.append("folder\n")
            else:
                sides.append(printable(data))
        return sides[0], sides[1]


def printable(data):
    if len(data) > DIFF_LIMIT:
        return f"({len(data)} bytes, too long to show)\n"
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return f"({len(data)} bytes, not text)\n"


def temporary_prefix(path):
    return f".{os.path.basename(path)[:180]}{TMP_MARK}"


def sync_folder(folder):
    """Make a rename or removal durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def set_attributes(path, mode, uid, gid, flags):
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags)
    try:
        os.fchown(handle, -1 if uid is None else uid, -1 if gid is None else gid)
        os.fchmod(handle, mode)  # after chown, which drops set-id bits
    finally:
        os.close(handle)


def write_atomically(path, data, mode, uid, gid):
    folder = os.path.dirname(path)
    handle, fresh = tempfile.mkstemp(prefix=temporary_prefix(path), dir=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # tells remove_leftovers of another run that this one lives
        with os.fdopen(handle, "wb", closefd=False) as stream:
            stream.write(data)
        os.fchown(handle, uid, gid)
        os.fchmod(handle, mode)
        os.fsync(handle)
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise
    finally:
        os.close(handle)
    sync_folder(folder)


def remove_leftovers(folder, paths):
    """Clear the temporary files that a killed run left beside these paths."""
    prefixes = tuple(temporary_prefix(path) for path in paths if os.path.dirname(path) == folder)
    for name in os.listdir(folder):
        if TMP_MARK not in name or not name.startswith(prefixes):
            continue
        stale = os.path.join(folder, name)
        try:
            if kind_of(lstat(stale)) == "directory":
                for inner in os.listdir(stale):
                    os.unlink(os.path.join(stale, inner))
                os.rmdir(stale)
                continue
            handle = os.open(stale, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(stale)
            finally:
                os.close(handle)
        except OSError:
            continue  # in use by another run, or just gone


def main():
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "str", "required": True},
                    "state": {"type": "str", "choices": ["file", "absent", "directory", "link"], "default": "file"},
                    "content": {"type": "str"},
                    "secret_content": {"type": "str", "no_log": True},
                    "src": {"type": "str"},
                    "owner": {"type": "str"},
                    "group": {"type": "str"},
                    "mode": {"type": "str"},
                    "sysctl": {"type": "bool", "default": False},
                },
            },
        },
        supports_check_mode=True,
    )
    done = []
    try:
        bundle = Bundle(module.params["files"], module.check_mode)
        if module.check_mode:
            done = bundle.changed_paths()
        else:
            bundle.apply(done)
    except RenderError as error:
        module.fail_json(msg=str(error), changed=bool(done), changed_paths=done)
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}", changed=bool(done), changed_paths=done)
    result = {"changed": bool(done), "changed_paths": done}
    if module.check_mode:
        result["missing_parents"] = bundle.missing_parents
    if module._diff:
        result["diff"] = bundle.diffs() + bundle.setting_diffs(done)
    for setting in bundle.settings:
        if setting.problem:
            module.warn(setting.warning())
    module.exit_json(**result)


if __name__ == "__main__":
    main()
