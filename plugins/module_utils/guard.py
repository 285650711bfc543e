# SPDX-License-Identifier: Apache-2.0
"""Takes a change back unless somebody confirms it in time: for changes that can lock out whoever makes them."""
# Plain os calls, as in the modules.
# ruff: noqa: PTH103, PTH104, PTH108, PTH110, PTH112, PTH114, PTH116, PTH118, PTH120, PTH123, PTH211

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import time
import uuid

# What is not kept over a boot needs no guard after one.
ROOT = "/run/ironrack/guard"
# For files, which are.
LASTING = "var/lib/ironrack-guard"
SYSTEMD = "/run/systemd/system"
UNITS = "etc/systemd/system"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# A timer may come late.
GRACE_SECONDS = 5
# Before anybody can log in, and before sshd has read what was never confirmed.
BOOT_UNIT = """\
# Managed by ironrack: takes back what was not confirmed before the node went down.
[Unit]
Description=Roll-back of an unconfirmed change ({name})
DefaultDependencies=no
After=local-fs.target
Before=sysinit.target ssh.service ssh.socket sshd.service shutdown.target
Conflicts=shutdown.target

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'if [ -e {armed} ]; then exec /bin/sh {armed} boot; \
elif [ -e {rolled_back} ]; then exec /bin/sh {rolled_back} again; fi'

[Install]
WantedBy=sysinit.target
"""


class GuardError(Exception):
    """The guard cannot be set, so the change must not be made."""


class Guard:
    """One armed roll-back at a time for each name.

    Its folder is `<root>/<name>` as long as it is armed. Renaming the folder is what decides between confirming and
    rolling back, so that never both happen. Only who has its token can confirm it.
    """

    def __init__(self, name, seconds=60, root=ROOT, by="", units=None):
        self.name = name
        self.seconds = seconds
        self.root = root
        # Who makes the change, in words: of the same one, an earlier run was interrupted.
        self.by = by
        self.token = uuid.uuid4().hex
        # With the token in its name, so that no timer of an earlier guard runs the roll-back of a later one.
        self.script = "rollback." + self.token
        self.armed = os.path.join(root, name)
        self.confirmed = os.path.join(root, name + ".confirmed")
        self.rolled_back = os.path.join(root, name + ".rolled-back")
        self.lock = os.path.join(root, name + ".lock")
        self.unit = "ironrack-guard-" + name
        self.boot = None
        if units:
            # Not the name of the timer, which would be the same unit.
            boot = f"ironrack-guard-boot-{name}.service"
            self.boot = (os.path.join(units, boot), os.path.join(units, "sysinit.target.wants", boot))
        self.holds_lock = False

    @contextlib.contextmanager
    def locked(self):
        """Two runs at a time must not both arm, nor one confirm what the other one has replaced."""
        if self.holds_lock:
            yield
            return
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        handle = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            self.holds_lock = True
            yield
        finally:
            self.holds_lock = False
            os.close(handle)

    def arm(self, files=(), commands=()):
        """Remember the files as they are, and have them put back and the commands run when the time is over."""
        new = self.armed + ".new"
        try:
            with self.locked():
                self.clear()
                for folder in (self.confirmed, self.rolled_back, new):
                    shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(new, mode=0o700)
                about = {
                    "token": self.token,
                    "by": self.by,
                    "at": time.strftime("%H:%M:%S %Z"),
                    "until": time.clock_gettime(time.CLOCK_BOOTTIME) + self.seconds,
                    "boot": boot_id(),
                }
                store(os.path.join(new, self.script), self._script(new, files, commands))
                store(os.path.join(new, "about"), json.dumps(about))
                os.rename(new, self.armed)
                sync(self.root)
                try:
                    self._write_unit()
                    self._start_timer()
                except (OSError, GuardError) as error:
                    shutil.rmtree(self.armed, ignore_errors=True)
                    self._remove_unit()
                    raise GuardError(f"no roll-back can be armed: {error}") from error
        except OSError as error:
            raise GuardError(f"{error.filename or self.armed}: {error.strerror}") from error

    def told(self):
        """What whoever confirms has to know."""
        return {"name": self.name, "seconds": self.seconds, "token": self.token}

    def clear(self):
        """Take back what an interrupted run has left. What somebody else waits to confirm is left alone."""
        if self.state() != "armed":
            return
        with self.locked():
            about = self._about(self.armed)
            left = about.get("until", 0) + GRACE_SECONDS - time.clock_gettime(time.CLOCK_BOOTTIME)
            if about.get("by", self.by) != self.by and about.get("boot") == boot_id() and left > 0:
                raise GuardError(
                    f"{about['by']} has changed this node at {about['at']} and not confirmed it yet ({self.name});"
                    f" nothing was changed now -> run again in {int(left) + 1} s, when it is confirmed or taken back"
                )
            self.revert()

    def _about(self, folder):
        try:
            with open(os.path.join(folder, "about"), encoding="utf-8") as handle:
                return json.load(handle)
        except (OSError, ValueError):
            return {}

    def _write_unit(self):
        if not self.boot:
            return
        unit, link = self.boot
        os.makedirs(os.path.dirname(link), mode=0o755, exist_ok=True)
        armed, rolled_back = (os.path.join(folder, self.script) for folder in (self.armed, self.rolled_back))
        store(unit, BOOT_UNIT.format(name=self.name, armed=armed, rolled_back=rolled_back), 0o644)
        if not os.path.islink(link):
            os.symlink(unit, link)
        sync(os.path.dirname(unit))
        sync(os.path.dirname(link))

    def _remove_unit(self):
        for path in reversed(self.boot or ()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _script(self, folder, files, commands):
        """What runs when the time is over. The first line that can fail claims the right to roll back."""
        quoted = shlex.quote
        lines = [
            "#!/bin/sh",
            # Whoever arms the next one must not remove the copies meanwhile.
            'if [ -z "$IRONRACK_GUARD_LOCKED" ] && command -v flock >/dev/null; then',
            f"    exec 9>>{quoted(self.lock)} && flock 9",
            "fi",
            # Again: the node went down in the middle of it.
            f'[ "$1" = again ] || mv {quoted(self.armed)} {quoted(self.rolled_back)} || exit 0',
            "failed=0",
        ]
        for number, path in enumerate(files):
            copy = f"{number}.saved"
            if os.path.lexists(path):
                shutil.copy2(path, os.path.join(folder, copy))
                info = os.stat(path)
                os.chown(os.path.join(folder, copy), info.st_uid, info.st_gid)
                sync(os.path.join(folder, copy))
                beside = quoted(path + ".ironrack-guard")
                saved = quoted(os.path.join(self.rolled_back, copy))
                lines.append(f"{{ cp -p {saved} {beside} && mv -f {beside} {quoted(path)}; }} || failed=1")
            else:
                lines.append(f"rm -f {quoted(path)} || failed=1")
        if self.boot:
            # Lasting, before the unit that would do it again goes.
            lines += ["sync", f"rm -f {' '.join(quoted(path) for path in reversed(self.boot))}"]
        # At boot what the commands would tell does not run yet.
        lines += ['[ -z "$1" ] || exit $failed']
        lines += [f"{' '.join(map(quoted, command))} || failed=1" for command in commands]
        return "\n".join([*lines, "exit $failed", ""])

    def _start_timer(self):
        script = os.path.join(self.armed, self.script)
        if os.path.isdir(SYSTEMD):
            # Named by the time of arming: a timer of an earlier guard may not have gone yet.
            self._stop_timer()
            command = ["systemd-run", "--quiet", "--collect", f"--unit={self.unit}", f"--on-active={self.seconds}s"]
            command += ["--timer-property=AccuracySec=1s", "/bin/sh", script]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            if done.returncode:
                raise GuardError(f"{' '.join(command)}: {done.stdout.decode(errors='replace').strip()}")
            return
        subprocess.Popen(
            ["/bin/sh", "-c", f'sleep {int(self.seconds)}; exec /bin/sh "$1"', "sh", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,
        )

    def _stop_timer(self):
        if os.path.isdir(SYSTEMD):
            command = ["systemctl", "stop", self.unit + ".timer"]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    def confirm(self, token):
        """The change stays; False when it is too late, or when it is another one by now."""
        # None would be anybody's.
        token = token or ""
        with self.locked():
            if self.state(token) == "armed":
                # Fails where the time is over just now.
                with contextlib.suppress(OSError):
                    os.rename(self.armed, self.confirmed)
                    sync(self.root)
                    self._remove_unit()
                    self._stop_timer()
            return self.state(token) == "confirmed"

    def revert(self):
        """Take the change back now. Nothing happens where no guard is armed."""
        if self.state() != "armed":
            return
        with self.locked():
            self._stop_timer()
            script = os.path.join(self.armed, "rollback." + str(self._about(self.armed).get("token")))
            if not os.path.exists(script):
                # Its time was over just now.
                return
            done = subprocess.run(
                ["/bin/sh", script],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                env={**os.environ, "IRONRACK_GUARD_LOCKED": "1"},
            )
        if done.returncode:
            raise GuardError(f"the roll-back failed: {done.stdout.decode(errors='replace').strip()}")

    def state(self, token=None):
        """How things are; with a token, "replaced" where they are those of another change."""
        for name in ("armed", "confirmed", "rolled_back"):
            folder = getattr(self, name)
            if os.path.isdir(folder):
                return name if token in (None, self._about(folder).get("token")) else "replaced"
        return "none"


def boot_id():
    try:
        with open(BOOT_ID, encoding="utf-8") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def store(path, text, mode=0o600):
    """Write a file that is still there after a power failure."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(handle)


def sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
