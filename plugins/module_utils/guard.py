# SPDX-License-Identifier: Apache-2.0
"""Takes a change back unless somebody confirms it in time: for changes that can lock out whoever makes them."""
# Plain os calls, as in the modules.
# ruff: noqa: PTH103, PTH104, PTH110, PTH112, PTH116, PTH118, PTH123

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid

ROOT = "/run/ironrack/guard"
SYSTEMD = "/run/systemd/system"


class GuardError(Exception):
    """The guard cannot be set, so the change must not be made."""


class Guard:
    """One armed roll-back at a time for each name.

    Its folder is `<root>/<name>` as long as it is armed. Renaming the folder is what decides between confirming and
    rolling back, so that never both happen.
    """

    def __init__(self, name, seconds=60, root=ROOT):
        self.name = name
        self.seconds = seconds
        self.root = root
        self.armed = os.path.join(root, name)
        self.confirmed = os.path.join(root, name + ".confirmed")
        self.rolled_back = os.path.join(root, name + ".rolled-back")
        self.unit = "ironrack-guard-" + name

    def arm(self, files=(), commands=()):
        """Remember the files as they are, and have them put back and the commands run when the time is over."""
        # A run that was interrupted has left its guard: what it had changed is taken back first.
        self.revert()
        for folder in (self.confirmed, self.rolled_back):
            shutil.rmtree(folder, ignore_errors=True)
        new = self.armed + ".new"
        shutil.rmtree(new, ignore_errors=True)
        try:
            os.makedirs(new, mode=0o700)
            with open(os.path.join(new, "rollback"), "w", encoding="utf-8") as handle:
                handle.write(self._script(new, files, commands))
            os.rename(new, self.armed)
        except OSError as error:
            raise GuardError(f"{error.filename or self.armed}: {error.strerror}") from error
        try:
            self._start_timer()
        except (OSError, GuardError) as error:
            shutil.rmtree(self.armed, ignore_errors=True)
            raise GuardError(f"no roll-back can be armed: {error}") from error

    def _script(self, folder, files, commands):
        """What runs when the time is over. The first line that can fail claims the right to roll back."""
        quoted = shlex.quote
        lines = ["#!/bin/sh", f"mv {quoted(self.armed)} {quoted(self.rolled_back)} || exit 0", "failed=0"]
        for number, path in enumerate(files):
            copy = f"{number}.saved"
            if os.path.lexists(path):
                shutil.copy2(path, os.path.join(folder, copy))
                info = os.stat(path)
                os.chown(os.path.join(folder, copy), info.st_uid, info.st_gid)
                beside = quoted(path + ".ironrack-guard")
                saved = quoted(os.path.join(self.rolled_back, copy))
                lines.append(f"{{ cp -p {saved} {beside} && mv -f {beside} {quoted(path)}; }} || failed=1")
            else:
                lines.append(f"rm -f {quoted(path)} || failed=1")
        lines += [f"{' '.join(map(quoted, command))} || failed=1" for command in commands]
        return "\n".join([*lines, "exit $failed", ""])

    def _start_timer(self):
        script = os.path.join(self.armed, "rollback")
        if os.path.isdir(SYSTEMD):
            # Named by the time of arming: a timer of an earlier guard may not have gone yet.
            self._stop_timer()
            command = ["systemd-run", "--quiet", "--collect", f"--unit={self.unit}", f"--on-active={self.seconds}s"]
            command += ["--timer-property=AccuracySec=1s", "/bin/sh", script]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            if done.returncode:
                raise GuardError(f"{' '.join(command)}: {done.stdout.decode(errors='replace').strip()}")
            return
        # A guard of later arming has a rollback of its own: only the process's own one is run. Told apart by a word,
        # since file systems give the number of a removed file to the next one.
        mark = uuid.uuid4().hex
        with open(os.path.join(self.armed, "mark"), "w", encoding="utf-8") as handle:
            handle.write(mark)
        shell = f'sleep {int(self.seconds)}; [ "$(cat "${{1%/*}}/mark" 2>/dev/null)" = {mark} ] && exec /bin/sh "$1"'
        subprocess.Popen(
            ["/bin/sh", "-c", shell, "sh", script],
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

    def confirm(self):
        """The change stays; False when it is too late."""
        try:
            os.rename(self.armed, self.confirmed)
        except OSError:
            return self.state() == "confirmed"
        self._stop_timer()
        return True

    def revert(self):
        """Take the change back now. Nothing happens where no guard is armed."""
        script = os.path.join(self.armed, "rollback")
        if not os.path.exists(script):
            return
        self._stop_timer()
        done = subprocess.run(["/bin/sh", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise GuardError(f"the roll-back failed: {done.stdout.decode(errors='replace').strip()}")

    def state(self):
        for name in ("armed", "confirmed", "rolled_back"):
            if os.path.isdir(getattr(self, name)):
                return name
        return "none"
