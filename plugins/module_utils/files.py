# SPDX-License-Identifier: Apache-2.0
"""Small text files of a host, replaced in one step and safe on disk: those that decide who gets in."""
# Plain os calls, as in the modules.
# ruff: noqa: PTH103, PTH104, PTH108, PTH112, PTH120, PTH123

from __future__ import annotations

import contextlib
import os


def read(path):
    """The text as it is, the lines of others included; nothing where there is no file."""
    try:
        # Without `newline` Python would write the lines of others anew where they end in another way.
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as handle:
            return handle.read()
    except FileNotFoundError:
        return ""


def write(path, text, mode=0o644):
    """Replace the file. What is written beside it first has a name that no Include takes in."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        os.makedirs(folder, mode=0o755 if mode & 0o004 else 0o700)
    new = path + ".ironrack-new"
    remove(new)
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        os.fchmod(handle, mode)
        stream.write(text)
        stream.flush()
        os.fsync(handle)
    os.rename(new, path)


def remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
