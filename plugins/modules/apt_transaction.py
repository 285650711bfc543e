#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: apt_transaction
short_description: Install, remove and hold coupled packages in one run of apt
version_added: 0.1.0
description:
  - Packages that only work together (driver, kernel headers, Fabric Manager) change together or not at all.
  - >-
    Everything is simulated first. What the simulation would remove, or change of what somebody else holds, without
    having been asked for is refused before any change.
  - What dpkg was interrupted in is finished first, so that a killed run is made up for by the next one.
  - Package lists are fetched only when something is to be changed. Needs no python3-apt.
author:
  - The ironrack authors
options:
  install:
    description: Packages to install. They are marked as asked for (C(apt-mark manual)).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the package, with C(:architecture) for a foreign one.
        type: str
        required: true
      version:
        description:
          - Version, or a glob of versions. Empty for any that apt's preferences allow.
          - An installed version that fits is left as it is, however old.
          - A glob without a colon is compared without the epoch.
        type: str
        default: ""
      group:
        description:
          - Packages of one group get the same upstream version (without epoch and revision).
          - That of the members already installed is kept where it fits, else it is the newest that all of them have.
        type: str
        default: ""
  remove:
    description: Names or globs of packages to remove. Those to install are excepted, those not installed ignored.
    type: list
    elements: str
    default: []
  may_remove:
    description: Names or globs of packages that may go when apt finds it necessary.
    type: list
    elements: str
    default: []
  hold:
    description:
      - Names or globs of packages to hold afterwards, as far as they are installed.
      - They replace what earlier runs with the same O(state_path) held; holds made by others stay.
    type: list
    elements: str
    default: []
  install_recommends:
    description: Whether recommended packages are installed.
    type: bool
    default: false
  update_cache:
    description:
      - Whether to fetch the package lists before something is installed, when they are older than
        O(cache_valid_time) or than a source, or lack what is asked for.
    type: bool
    default: true
  cache_valid_time:
    description: Seconds for which package lists that this module fetched count as fresh.
    type: int
    default: 3600
  lock_timeout:
    description: Seconds to wait for another apt or dpkg.
    type: int
    default: 300
  restart_services:
    description:
      - Whether the scripts of packages may start, restart and stop services, as they do by default.
      - >-
        With V(false) they ask F(/usr/sbin/policy-rc.d) in vain, for this transaction alone. A file of that name that
        is already there stays, and a warning tells that it decides.
    type: bool
    default: true
  state_path:
    description: File that lists the holds made by this caller. Its folder is the module's own.
    type: path
    default: /var/lib/ironrack-apt/holds
attributes:
  check_mode:
    description: >-
      Tells what the simulation tells. Package lists are not fetched and dpkg is not finished; what is in no list yet
      is told in RV(unknown) instead of failing.
    support: full
  diff_mode:
    description: Shows versions and holds before and after.
    support: full
"""

EXAMPLES = r"""
- name: Move driver and Fabric Manager to one version
  ironrack.vllm.apt_transaction:
    install:
      - name: nvidia-open
        version: 580.95.05-*
      - name: nvidia-fabricmanager
        version: 580.95.05-*
    remove: [nvidia-fabricmanager-570]
    may_remove: ["libnvidia-*"]
    hold: ["nvidia-*", "libnvidia-*"]
    state_path: /var/lib/ironrack-apt/driver

- name: The newest of a branch that both have
  ironrack.vllm.apt_transaction:
    install:
      - name: nvidia-open
        version: 580.*
        group: driver
      - name: nvidia-fabricmanager
        version: 580.*
        group: driver
"""

RETURN = r"""
packages:
  description: >-
    Version before and after of each package that changed, null where there is none. After a failure too: what it
    had changed by then.
  returned: always
  type: dict
  sample:
    nvidia-open: {before: 570.211.01-1, after: 580.95.05-1}
held:
  description: Packages held by this caller at the end.
  returned: always
  type: list
  elements: str
recovered:
  description: Packages that were found unfinished by an interrupted dpkg.
  returned: always
  type: list
  elements: str
unknown:
  description: In check mode, packages that cannot be installed from the lists and preferences that are there so far.
  returned: always
  type: list
  elements: str
cache_updated:
  description: Whether package lists were fetched.
  returned: always
  type: bool
output:
  description: The last lines that apt and dpkg wrote.
  returned: failure
  type: str
"""

import contextlib
import fcntl
import fnmatch
import glob
import os
import re
import struct
import subprocess
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule

LISTS = "/var/lib/apt/lists"
SOURCES = "/etc/apt/sources.list"
AUTOMATIC = "/var/lib/apt/extended_states"
UPDATED = "/var/lib/apt/periodic/update-success-stamp"
DPKG = "/var/lib/dpkg"
# What scripts of packages ask before they start or stop a service (invoke-rc.d, deb-systemd-invoke). Ours forbids it to
# those that this module's apt runs, which the variable tells: one that a killed run has left does no harm.
SERVICES = "/usr/sbin/policy-rc.d"
FORBID = """\
#!/bin/sh
# Managed by ironrack: module apt_transaction.
[ -z "$IRONRACK_APT_TRANSACTION" ] || exit 101
"""
QUERY = "${db:Status-Abbrev}\t${binary:Package}\t${Version}\t${Architecture}\t${Provides}\n"
# dpkg's letters: half-installed, unpacked, half-configured, triggers awaited and pending
UNFINISHED = "HUFWt"
NAME = re.compile(r"[a-z0-9]([a-z0-9+.-]*[a-z0-9+.])?(:[a-z0-9-]+)?")
PATTERN = re.compile(r"[a-z0-9*?\[\]!+.:-]+")
VERSION = re.compile(r"[A-Za-z0-9*?\[\]!+.~:-]*")
STEP = re.compile(r"(Inst|Remv|Purg) (\S+)(?: \[([^\]]*)\])?(?: \((\S+))?")
POLICY = re.compile(r" (?:\*\*\*|   ) (\S+) (-?\d+)")
LOCKED = re.compile(r"Could not get lock|locked by another process")
BROKEN = re.compile(r"fix-broken|Unmet dependencies")
EXACT = re.compile(r"Depends: (\S+) \(= ([^)\s]+)\) but")
MARKED = re.compile(
    r"E:|Err:|Error!|dpkg(-deb)?: |W: (GPG error|OpenPGP)|The following packages have unmet|Errors were encountered"
)
ROUTINE = re.compile(
    r"(Get|Hit|Ign):|\d+ upgraded|Need to get|After this operation|Fetched|\(?Reading|Building|Solving|The following"
    r"|Selecting|Preparing|Unpacking|Setting up|Removing|Processing| "
)
REMEDIES = (
    (r"No space left on device|enough free space", "make room{space}, then run again"),
    (r"Read-only file system", "a file system is mounted read-only: see dmesg for errors of its disk"),
    (
        r"Certificate verification failed|certificate verify failed",
        "the mirror's certificate is not trusted: install its authority (ca-certificates), or set the host's clock",
    ),
    (
        r"are you root|open \(13: Permission denied\)|requires superuser privilege",
        "run this as root (become: true)",
    ),
    (
        r"Release file .*(is not valid yet|is expired)",
        "set the host's clock; if it is right, the mirror is out of date: synchronize it or name another",
    ),
    (
        r"Conflicting values set for option",
        "the same repository is configured in two files, with other keys: remove the file that is not this project's",
    ),
    (
        r"NO_PUBKEY|BADSIG|EXPKEYSIG|REVKEYSIG|Missing key|signature verification failed|not signed"
        r"|signatures? (was|were|couldn|could)|[Cc]learsigned file isn't valid|unauthenticated packages",
        "install the repository's current key in the file that Signed-By of its source names; if the key is the right"
        " one, the mirror was tampered with or is half synchronized",
    ),
    (
        r"Hash Sum mismatch|unexpected size|does not match the expected|Mirror sync in progress",
        "the mirror is damaged or half synchronized: synchronize it again, or name another mirror",
    ),
    (
        r"does not have a Release file|no longer has a Release file|404 +Not Found|File not found",
        "the mirror lacks this: correct its address (distribution, architecture), or synchronize it again",
    ),
    (
        r"Could not resolve|Temporary failure|Could not connect|Unable to connect|Connection (refused|timed out|failed)"
        r"|407 +Proxy|Failed to fetch",
        "check the address of the mirror, the network and the proxy",
    ),
    (
        r"Malformed (entry|stanza|line)|sources could not be read",
        "correct or remove the file that apt names",
    ),
    (r"changed its '", "if that is meant, run once: apt-get update --allow-releaseinfo-change"),
    (LOCKED.pattern, "another apt or dpkg runs: wait for it to end, or raise lock_timeout"),
    (
        r"needs to be reinstalled, but",
        "no repository has that version: add one that has, or take the package off the list with"
        " dpkg --remove --force-remove-reinstreq",
    ),
    (
        r"is a virtual package|has no installation candidate",
        "name a package that provides it; see what apt-cache policy tells of repositories and preferences",
    ),
    (
        r"Try 'apt --fix-broken",
        "packages of this host lack what they depend on, left so by somebody else: install that, or remove the packages"
        " that apt names",
    ),
    (
        r"[Uu]nmet dependencies|held broken packages|unable to correct",
        "the versions do not fit together: name those of the dependencies too or pin them all in apt's preferences,"
        " add the repository that a dependency lacks, or correct the version",
    ),
    (
        r"Bad return status for module build|Error! .*(headers|kernel)|error processing package \S*dkms",
        "a kernel module was not built: its make.log in /var/lib/dkms says why; headers of that kernel or a compiler"
        " are missing, or the driver is too old for the kernel",
    ),
    (
        r"subprocess returned error|error processing (package|archive)",
        "a script or file of the package failed: see the lines above dpkg's, mend that, then run again",
    ),
)


class AptError(Exception):
    """What went wrong, and the remedy; what apt wrote besides."""

    def __init__(self, message, output=""):
        super().__init__(message)
        self.output = output


def matches(name, patterns):
    return any(fnmatch.fnmatchcase(item, pattern) for pattern in patterns for item in {name, name.split(":")[0]})


def fits(version, pattern):
    """Whether a version is one that was asked for; the epoch counts only where it was named."""
    if not pattern:
        return True
    return fnmatch.fnmatchcase(version if ":" in pattern else version.split(":", 1)[-1], pattern)


def upstream(version):
    return version.split(":", 1)[-1].rsplit("-", 1)[0]


def full_disks():
    """ "on /boot (3 MiB free)" for what is nearly full of the places that packages go to."""
    told = {}
    for path in ("/", "/usr", "/var", "/var/cache/apt/archives", "/boot"):
        try:
            room, device = os.statvfs(path), os.stat(path).st_dev
        except OSError:
            continue
        free = room.f_bavail * room.f_frsize // 2**20
        if free < 1024 or not room.f_favail:
            told.setdefault(device, f"{path} ({free} MiB, {room.f_favail} files free)")
    return " on " + ", ".join(told.values()) if told else ""


def explain(text):
    """apt's own lines first, then what to do about them."""
    lines = [line.rstrip() for line in text.splitlines()]
    first = next((number for number, line in enumerate(lines) if line.startswith("dpkg: error processing")), 0)
    # The cause of a failed maintainer script stands above dpkg's own line, in the script's words.
    shown = [line for line in lines[max(0, first - 12) : first] if not ROUTINE.match(line)]
    telling = False
    for line in lines[first:]:
        telling = bool(MARKED.match(line)) or (telling and line.startswith(" "))
        if telling and "[weak]" not in line:
            shown.append(line)
    shown = list(dict.fromkeys(shown[-40:] or lines[-8:]))
    remedy = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, text)), None)
    if remedy:
        shown.append("Remedy: " + remedy.replace("{space}", full_disks()) + ".")
    return "\n".join(shown)


def parse_query(text):
    """Name -> (three status letters, version, provides); the host's own architecture is not part of a name."""
    rows = [line.split("\t") for line in text.splitlines() if line.count("\t") == 4]
    native = next((row[3] for row in rows if row[1].split(":")[0] == "dpkg"), "")
    found = {}
    for status, name, version, _architecture, provides in rows:
        own = native and name.endswith(":" + native)
        names = [item.split()[0].split(":")[0] for item in provides.split(",") if item.strip()]
        found[name.split(":")[0] if own else name] = (status.ljust(3), version, names)
    return found


def installed(states):
    """What is there, if unfinished."""
    return {name: version for name, (status, version, _) in states.items() if status[1] not in "nc"}


def usable(states):
    """What has its files: not what is half installed or has to be unpacked again."""
    return {name: states[name][1] for name in installed(states) if states[name][0][1] != "H"}


def unfinished(states):
    return sorted(name for name, (status, _, _) in states.items() if status[1] in UNFINISHED or status[2] == "R")


def held(states):
    return {name for name in installed(states) if states[name][0][0] == "h"}


def parse_policy(text):
    """Name -> [(version, priority)], newest first as apt tells them; empty for what is only a virtual package."""
    found, versions = {}, None
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            versions = found.setdefault(line[:-1], [])
        row = POLICY.fullmatch(line)
        if row and versions is not None:
            versions.append((row.group(1), int(row.group(2))))
    return found


def parse_simulation(text):
    """Name -> (version before, version after) of all that apt would change."""
    steps = {}
    for line in text.splitlines():
        step = STEP.match(line)
        if step:
            verb, name, old, new = step.groups()
            before = steps[name][0] if name in steps else old
            steps[name] = (before, new if verb == "Inst" else None)
    return steps


def parse_automatic(text):
    """Packages that apt takes for mere dependencies, which it may clean away."""
    found = set()
    for stanza in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line)
        if fields.get("Auto-Installed") == "1":
            found.add(fields.get("Package", ""))
    return found


def check_request(parameters):
    """Refuses what can only be a mistake."""
    wanted = {}
    for entry in parameters["install"]:
        name, version = entry["name"], entry["version"]
        if not NAME.fullmatch(name):
            raise AptError(f"install: {name!r} is not the name of a package; give one name an entry, without version")
        if not VERSION.fullmatch(version):
            raise AptError(f"install: {name}: {version!r} is not a version or a glob of versions; an example: 580.95.*")
        if name in wanted:
            raise AptError(f"install: {name} is listed twice; list it once")
        wanted[name] = entry
    for option in ("remove", "may_remove", "hold"):
        for pattern in parameters[option]:
            if not PATTERN.fullmatch(pattern):
                raise AptError(f"{option}: {pattern!r} is not a name or glob of packages; an example: libnvidia-*")
            letters = re.sub(r"\[.*?\]|[^a-z0-9]", "", pattern)
            if option != "hold" and len(letters) < 2 and letters != pattern:
                raise AptError(f"{option}: {pattern!r} fits almost every package of the host; name them closer")
    for option in ("cache_valid_time", "lock_timeout"):
        if parameters[option] < 0:
            raise AptError(f"{option} is {parameters[option]}; give 0 or more seconds")
    return wanted


def allowed(name, entry, present, policy):
    """Versions of a package that fit, newest first."""
    found = [version for version, priority in policy.get(name, []) if priority >= 0 or version == present.get(name)]
    if name in present and present[name] not in found:
        found.append(present[name])
    return [version for version in found if fits(version, entry["version"])]


def why_not(name, version, policy):
    """Why there is nothing to install."""
    if re.match(r"linux-headers-\d", name) and not policy.get(name):
        kernel = name.replace("headers", "image", 1)
        return (
            f"install: {name} is in no repository of this host, and kernel modules cannot be built for that kernel"
            f" without it; remove the kernel (apt-get purge {kernel}), or add the repository that has its headers"
        )
    if name not in policy:
        return f"install: {name} is in no repository of this host; correct the name, or add the repository that has it"
    if not policy[name]:
        return (
            f"install: {name} is only a virtual package, it has no version {version or 'of its own'}; name a package"
            f" that provides it (apt-cache showpkg {name})"
        )
    blocked = [item for item, priority in policy[name] if fits(item, version) and priority < 0]
    if blocked:
        return (
            f"install: {name} has {', '.join(blocked)}, which apt's preferences forbid here; ask for another version,"
            f" or see which file of /etc/apt/preferences.d says so (apt-cache policy {name})"
        )
    there = ", ".join(item for item, _priority in policy[name][:12])
    return f"install: {name} has no version {version}; there are: {there}. Ask for one of those, or add a repository"


def satisfied(wanted, present, provided):
    """Names whose installed version is one that was asked for; members of a group together or not at all."""
    fine = {
        name
        for name, entry in wanted.items()
        if (name in present and fits(present[name], entry["version"]))
        or (name in provided and not entry["version"] and not entry["group"])
    }
    for group in {entry["group"] for entry in wanted.values()} - {""}:
        members = [name for name, entry in wanted.items() if entry["group"] == group]
        if not fine.issuperset(members) or len({upstream(present[name]) for name in members}) > 1:
            fine.difference_update(members)
    return fine


def choose_versions(wanted, present, policy, provided=()):
    """(name -> version to install, empty for apt's choice; name -> why there is none)."""
    chosen, problems, groups = {}, {}, {}
    fine = satisfied(wanted, present, provided)
    for name, entry in wanted.items():
        if name in fine:
            continue
        fitting = allowed(name, entry, present, policy)
        virtual = name in policy and not policy[name] and not entry["version"] and not entry["group"]
        if entry["group"] and fitting:
            groups.setdefault(entry["group"], {})[name] = fitting
        elif not fitting and not virtual:
            problems[name] = why_not(name, entry["version"], policy)
        else:
            chosen[name] = fitting[0] if entry["version"] else ""
    for group, members in groups.items():
        first = next(iter(members))
        common = [
            item
            for item in dict.fromkeys(map(upstream, members[first]))
            if all(item in map(upstream, fitting) for fitting in members.values())
        ]
        there = [upstream(present[name]) for name in members if name in present]
        common.sort(key=lambda item: -there.count(item))
        if not common:
            told = "; ".join(f"{name}: {', '.join(fitting[:8])}" for name, fitting in members.items())
            message = f"install: no version that all of group {group} have ({told}); complete the mirror or ask for"
            problems.update(dict.fromkeys(members, f"{message} another"))
            continue
        for name, fitting in members.items():
            target = present.get(name)
            if target is None or target not in fitting or upstream(target) != common[0]:
                target = next(item for item in fitting if upstream(item) == common[0])
            if target != present.get(name):
                chosen[name] = target
    return chosen, problems


def refuse(steps, wanted, parameters, half_removed, foreign_holds):
    """Refuses what nobody asked for."""
    leave = parameters["remove"] + parameters["may_remove"]
    gone = sorted(
        name
        for name, (_old, new) in steps.items()
        if new is None and (name in wanted or not (matches(name, leave) or name in half_removed))
    )
    if gone:
        raise AptError(
            f"apt would remove {', '.join(gone)}, which was not asked for; nothing was changed. Add what may go to"
            f" may_remove, or choose versions that fit what is installed"
        )
    ours = parameters["remove"] + parameters["hold"]
    frozen = sorted(name for name in steps if name in foreign_holds and name not in wanted and not matches(name, ours))
    if frozen:
        raise AptError(
            f"apt would change {', '.join(frozen)}, held by somebody else; nothing was changed."
            f" Release it (apt-mark unhold {' '.join(frozen)}) or leave out what needs it"
        )


class Apt:
    """The few calls of apt and dpkg that are needed."""

    def __init__(self, parameters):
        self.timeout = parameters["lock_timeout"]
        path = os.environ.get("PATH", "")
        self.environment = dict(
            os.environ,
            PATH=f"{path}:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin".lstrip(":"),
            LC_ALL="C.UTF-8",
            LANGUAGE="",
            DEBIAN_FRONTEND="noninteractive",
            APT_LISTCHANGES_FRONTEND="none",
            APT_LISTBUGS_FRONTEND="none",
            NEEDRESTART_SUSPEND="1",
            UCF_FORCE_CONFFOLD="1",
            **({} if parameters["restart_services"] else {"IRONRACK_APT_TRANSACTION": "1"}),
        )
        lock = ["-o", f"DPkg::Lock::Timeout={self.timeout}"]
        # Without the error mode apt says yes to lists it could not fetch, and old versions are taken for the newest.
        self.fetch = ["-q", "-o", "APT::Update::Error-Mode=any", "-o", "Acquire::Retries=3", *lock]
        self.flags = [
            "-y", "-q", "--allow-downgrades", "--allow-change-held-packages", "--ignore-hold", *lock,
            "-o", "Acquire::Retries=3", "-o", "Dpkg::Use-Pty=0",
            "-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold",
            "-o", f"APT::Install-Recommends={'true' if parameters['install_recommends'] else 'false'}",
        ]  # fmt: skip

    def call(self, *arguments):
        # Into a file, and in a session of its own: apt and dpkg end what they began, also when this module is killed.
        with tempfile.TemporaryFile() as output:
            try:
                answer = subprocess.run(
                    arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    check=False, env=self.environment, start_new_session=True,
                )  # fmt: skip
            except FileNotFoundError:
                raise AptError(f"{arguments[0]} is not there: this host is not managed by apt") from None
            output.seek(0)
            return answer.returncode, output.read().decode("utf-8", "replace")

    def patiently(self, *arguments):
        """Waits where apt itself does not: locks of lists and archives, dpkg called directly."""
        end = time.monotonic() + self.timeout
        while True:
            code, text = self.call(*arguments)
            if not code or not LOCKED.search(text) or time.monotonic() >= end:
                return code, text
            time.sleep(1)

    def must(self, *arguments):
        code, text = self.patiently(*arguments)
        if code:
            raise AptError(f"{' '.join(arguments[:2])} failed:\n{explain(text)}", text)
        return text

    def wait(self):
        """Until no other apt or dpkg runs: what is read while it does is no longer true afterwards."""
        try:
            lock = open(f"{DPKG}/lock-frontend", "r+", encoding="utf-8")  # noqa: SIM115 (closed below)
        except OSError:
            return
        with lock:
            end = time.monotonic() + self.timeout
            while True:
                asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                answer = struct.unpack("hhqqi4x", fcntl.fcntl(lock, fcntl.F_GETLK, asked))
                if answer[0] == fcntl.F_UNLCK:
                    return
                if time.monotonic() >= end:
                    break
                time.sleep(1)
        # Not its arguments: a command line may hold secrets.
        name = read_text(f"/proc/{answer[4]}/comm").strip() or "unknown"
        raise AptError(
            f"{DPKG}/lock-frontend is held by process {answer[4]} ({name}) for more than lock_timeout"
            f" {self.timeout} s; nothing was changed. Wait for that process to end, or raise lock_timeout"
        )

    def states(self):
        return parse_query(self.must("dpkg-query", "-W", "-f", QUERY))

    def native(self):
        return ":" + self.must("dpkg", "--print-architecture").strip()

    def policy(self, names):
        return parse_policy(self.must("apt-cache", "policy", *names)) if names else {}

    def configure(self):
        """What dpkg says when it cannot finish; the transaction may still mend that."""
        code, text = self.patiently("dpkg", "--force-confdef", "--force-confold", "--configure", "-a")
        return text if code else ""

    def simulate(self, order):
        """(order, flags and steps): what to ask for besides, so that apt can do it, and what it would then do."""
        mending, added = [], {}
        while True:
            asked = order + [f"{name}={version}" for name, version in sorted(added.items())]
            code, text = self.call("apt-get", "-s", "install", *mending, *self.flags, *asked)
            if not code:
                return asked, mending, parse_simulation(text)
            named = {item.split("=")[0].rstrip("-") for item in asked}
            exact = {name: version for name, version in EXACT.findall(text) if name not in named}
            if exact:
                # apt takes the newest for a dependency, even where exactly another version is demanded.
                added.update(exact)
            elif BROKEN.search(text) and not mending:
                # Others left broken dependencies behind: apt changes nothing without mending them.
                mending = ["--fix-broken"]
            else:
                raise AptError(f"apt-get cannot do this, nothing was changed:\n{explain(text)}", text)

    def mark(self, verb, names):
        if names:
            self.must("apt-mark", verb, *sorted(names))


def modified(path):
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def read_names(path):
    try:
        with open(path, encoding="utf-8") as handle:
            return set(handle.read().split())
    except OSError:
        return set()


def write_names(path, names):
    """Whole or not at all; no file for no names."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if not names:
        if os.path.exists(path):
            os.unlink(path)
        return
    with open(path + ".new", "w", encoding="utf-8") as handle:
        handle.write("".join(f"{name}\n" for name in sorted(names)))
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(path + ".new", path)


def read_text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


class Transaction:
    """One call of the module, step by step."""

    def __init__(self, parameters, check):
        self.parameters, self.check = parameters, check
        self.wanted = check_request(parameters)
        self.apt = Apt(parameters)
        self.state = parameters["state_path"]
        folder = os.path.dirname(self.state)
        self.stamp = os.path.join(folder, ".updated")
        # apt forgets the hold of a package that it changes. Should this run be killed, the next one reads this list.
        self.restore = os.path.join(folder, f".{os.path.basename(self.state)}.restore")
        self.ours = read_names(self.state)
        self.of_project = self.ours.union(*(read_names(path) for path in glob.glob(os.path.join(folder, "*"))))
        self.result = {
            "changed": False,
            "packages": {},
            "held": sorted(self.ours),
            "recovered": [],
            "unknown": [],
            "cache_updated": False,
        }
        self.holds, self.warnings = ([], []), []

    @contextlib.contextmanager
    def services_left_alone(self):
        if self.parameters["restart_services"]:
            yield
            return
        if os.path.lexists(SERVICES):
            self.warnings.append(
                f"{SERVICES} is not this module's and stays: it decides whether packages restart services; remove it if"
                " nobody needs it"
            )
            yield
            return
        with open(SERVICES + ".new", "w", encoding="utf-8") as handle:
            handle.write(FORBID)
        os.chmod(SERVICES + ".new", 0o755)  # noqa: S103 - a program of the system, which anybody may run
        os.replace(SERVICES + ".new", SERVICES)
        try:
            yield
        finally:
            os.unlink(SERVICES)

    def run(self):
        if not self.check:
            self.apt.wait()
            if read_text(SERVICES) == FORBID:
                os.unlink(SERVICES)
        if any(":" in name for name in self.wanted):
            own = self.apt.native()
            self.wanted = {name[: -len(own)] if name.endswith(own) else name: self.wanted[name] for name in self.wanted}
        start = self.apt.states()
        states, trouble, failure, steps = start, "", None, {}
        self.result["recovered"] = unfinished(start)
        if not self.check and (self.result["recovered"] or glob.glob(f"{DPKG}/updates/[0-9]*")):
            with self.services_left_alone():
                trouble = self.apt.configure()
            states = self.apt.states()
        refused = True
        try:
            order, mending, steps = self.plan(states)
            refused = False
            if steps and not self.check:
                self.keep_in_mind(held(states), steps)
                with self.services_left_alone():
                    self.apt.must("apt-get", "install", *mending, *self.apt.flags, *order)
        except AptError as error:
            failure = error
        if self.check:
            after = self.foretell(start, steps)
        else:
            states = self.apt.states()
            after = installed(states)
            self.compare(start, states, {} if failure else steps)
            if refused and self.result["changed"]:
                told = f"{failure}\nBefore that, dpkg went on with {', '.join(self.result['recovered'])}."
                failure = AptError(told, failure.output)
            failure = failure or self.missed(states, trouble)
        try:
            self.hold(held(start), held(states), after, refused)
            if not refused:
                self.ask_for(after)
        except AptError as error:
            failure = failure or error
        if failure:
            raise failure

    def plan(self, states):
        """What to ask of apt, with which flags, and what it would do; refused here is refused before any change."""
        present, repair = usable(states), bool(self.result["recovered"])
        provided = {name for item in present for name in states[item][2]}
        todo = bool(self.wanted.keys() - satisfied(self.wanted, present, provided)) or repair
        going = [name for name in installed(states) if matches(name, self.parameters["remove"])]
        going = sorted(set(going) - set(self.wanted))
        if not todo and not going:
            return [], [], {}
        targets = self.resolve(present, provided) if todo else {}
        steps = {name: (present.get(name), version or "newest") for name, version in targets.items()}
        steps.update({name: (states[name][1], None) for name in going})
        if self.result["unknown"]:
            # A simulation without them would tell of something that is not going to happen.
            return [], [], steps
        if repair:
            # All are named with their versions, so that apt mends towards them and not away from them.
            targets.update({name: present[name] for name in self.wanted if name in present and name not in targets})
        order = [f"{name}={version}" if version else name for name, version in sorted(targets.items())]
        order += [f"{name}-" for name in going]
        try:
            order, mending, steps = self.apt.simulate(order)
        except AptError as error:
            if not self.check:
                raise
            # Repositories and preferences of this run, which check mode does not write, may be what apt lacks.
            self.warnings.append(str(error))
            self.result["unknown"] = sorted(targets)
            return [], [], steps
        half = {name for name, (status, _, _) in states.items() if status[1] == "H"}
        refuse(steps, self.wanted, self.parameters, half, held(states) - self.of_project)
        return order, mending, steps

    def resolve(self, present, provided):
        may_fetch = self.parameters["update_cache"] and not self.check
        if may_fetch and self.lists_are_old():
            self.update()
        targets, problems = choose_versions(self.wanted, present, self.apt.policy(list(self.wanted)), provided)
        if problems and may_fetch and not self.result["cache_updated"]:
            # A version newer than the lists, which count as fresh.
            self.update()
            targets, problems = choose_versions(self.wanted, present, self.apt.policy(list(self.wanted)), provided)
        if self.check:
            self.result["unknown"] = sorted(problems)
        elif problems:
            raise AptError("\n".join(dict.fromkeys(problems.values())) + ".\nNothing was changed.")
        return targets

    def lists_are_old(self):
        fetched, now = max(modified(self.stamp), modified(UPDATED)), time.time()
        # A new image has no lists, but a folder with a new date; a killed fetch leaves part of them.
        there = glob.glob(f"{LISTS}/*Packages*") or glob.glob(f"{LISTS}/*Release")
        sources = [SOURCES, f"{SOURCES}.d", *glob.glob(f"{SOURCES}.d/*")]
        fresh = -60 < now - fetched <= self.parameters["cache_valid_time"]
        return not (there and fresh) or any(modified(path) >= fetched for path in sources)

    def update(self):
        self.apt.must("apt-get", "update", *self.apt.fetch)
        self.result["cache_updated"] = True
        os.makedirs(os.path.dirname(self.stamp), mode=0o755, exist_ok=True)
        with open(self.stamp, "w", encoding="utf-8"):
            pass
        os.utime(self.stamp)

    def keep_in_mind(self, holds, steps):
        foreign = (holds - self.ours) & set(steps)
        if foreign:
            write_names(self.restore, foreign | read_names(self.restore))

    def foretell(self, start, steps):
        """What check mode takes for the outcome."""
        there = installed(start)
        unknown = {name: self.wanted[name]["version"] or "newest" for name in self.result["unknown"]}
        changes = {**{name: (there.get(name), version) for name, version in unknown.items()}, **steps}
        self.tell(changes)
        self.result["changed"] = self.result["changed"] or bool(self.result["recovered"])
        after = {name: version for name, version in there.items() if name not in changes}
        after.update({name: new for name, (_old, new) in changes.items() if new})
        return after

    def compare(self, start, states, steps):
        """What really happened, whatever was meant to; steps tell of those that were installed anew."""
        before, after = installed(start), installed(states)
        names = {name for name in {*before, *after} if before.get(name) != after.get(name)}
        self.tell({name: (before.get(name), after.get(name)) for name in names | set(steps)})
        finished = any(start[name] != states.get(name) for name in self.result["recovered"])
        self.result["changed"] = self.result["changed"] or finished

    def tell(self, changes):
        self.result["packages"] = {name: {"before": a, "after": b} for name, (a, b) in sorted(changes.items())}
        self.result["changed"] = self.result["changed"] or bool(changes)

    def missed(self, states, trouble):
        """What is not as it should be although apt did not complain."""
        left, present = unfinished(states), usable(states)
        if left:
            why = explain(trouble) if trouble else "see what dpkg --audit tells of them"
            return AptError(f"dpkg is left unfinished with {', '.join(left)}:\n{why}", trouble)
        provided = {name for item in present for name in states[item][2]}
        missed = sorted(set(self.wanted) - satisfied(self.wanted, present, provided))
        if missed:
            told = ", ".join(f"{name} {present.get(name, 'absent')}" for name in missed)
            return AptError(f"apt did not complain, but left {told}; another apt ran meanwhile? Run again")
        return None

    def hold(self, start, now, after, refused):
        """Holds what is to be held and what was held by others, also when apt failed; a refusal changes no hold."""
        foreign = (start | read_names(self.restore)) - self.ours
        if refused:
            mine = self.ours & set(after)
        else:
            # What somebody else held already stays theirs: it is not released when it leaves our list.
            mine = {name for name in after if matches(name, self.parameters["hold"])} - foreign
        desired = mine | (foreign & set(after))
        released = (start & self.ours & set(after)) - desired
        if not self.check:
            if not mine <= self.ours:
                write_names(self.state, mine | self.ours)
            self.apt.mark("unhold", now & released)
            self.apt.mark("hold", desired - now)
            if not refused and mine != self.ours:
                write_names(self.state, mine)
            write_names(self.restore, set())
        self.result["held"] = sorted(mine)
        self.holds = (sorted(released), sorted(desired - start))
        self.result["changed"] = self.result["changed"] or any(self.holds)

    def ask_for(self, after):
        """What came as a dependency of something else would be cleaned away with it."""
        wanted = {name for name in self.wanted if name in after and name not in self.result["packages"]}
        automatic = wanted & parse_automatic(read_text(AUTOMATIC)) if wanted else set()
        if not self.check:
            self.apt.mark("manual", automatic)
        self.result["changed"] = self.result["changed"] or bool(automatic)

    def diff(self):
        packages = self.result["packages"].items()
        before = [f"{name} {step['before'] or 'absent'}\n" for name, step in packages]
        after = [f"{name} {step['after'] or 'absent'}\n" for name, step in packages]
        released, new = self.holds
        return {
            "before_header": "packages",
            "after_header": "packages",
            "before": "".join(before + [f"hold {name}\n" for name in released]),
            "after": "".join(after + [f"hold {name}\n" for name in new]),
        }


def main():
    module = AnsibleModule(
        argument_spec={
            "install": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "version": {"type": "str", "default": ""},
                    "group": {"type": "str", "default": ""},
                },
            },
            "remove": {"type": "list", "elements": "str", "default": []},
            "may_remove": {"type": "list", "elements": "str", "default": []},
            "hold": {"type": "list", "elements": "str", "default": []},
            "install_recommends": {"type": "bool", "default": False},
            "update_cache": {"type": "bool", "default": True},
            "cache_valid_time": {"type": "int", "default": 3600},
            "lock_timeout": {"type": "int", "default": 300},
            "restart_services": {"type": "bool", "default": True},
            "state_path": {"type": "path", "default": "/var/lib/ironrack-apt/holds"},
        },
        supports_check_mode=True,
    )
    transaction = None
    try:
        transaction = Transaction(module.params, module.check_mode)
        transaction.run()
    except AptError as error:
        result = transaction.result if transaction else {"changed": False}
        module.fail_json(msg=str(error), output=error.output[-8000:], **result)
    except OSError as error:
        result = transaction.result if transaction else {"changed": False}
        module.fail_json(msg=f"{error}; make that possible (become: true, room on the disk), then run again", **result)
    result = transaction.result
    for warning in transaction.warnings:
        module.warn(warning)
    if result["unknown"]:
        module.warn(
            f"what changes with {', '.join(result['unknown'])} cannot be known yet: the package lists of this host lack"
            " what is asked for, until the repositories are configured and fetched"
        )
    if module._diff and result["changed"]:
        result["diff"] = transaction.diff()
    module.exit_json(**result)


if __name__ == "__main__":
    main()
