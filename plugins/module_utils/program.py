# SPDX-License-Identifier: Apache-2.0
"""Runs a program of the host that may be missing, hang, or write what is no UTF-8."""

from __future__ import annotations

import os
import subprocess


def call(command, timeout):
    """(exit status, standard output, errors); without a status the errors say why there is no answer."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0", SYSTEMD_PAGER=""),
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        return None, "", f"cannot be run ({error.strerror})"
    try:
        output, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Not waited for: a process that hangs inside a driver does not die of this.
        child.kill()
        return None, "", f"gave no answer within {timeout:.0f} seconds"
    return child.returncode, output, errors


def smi_log(output):
    """The XML of nvidia-smi -q -x; what the driver writes besides is no part of it."""
    start, mark = output.find("<nvidia_smi_log"), "</nvidia_smi_log>"
    end = output.rfind(mark)
    return output[start : end + len(mark)] if 0 <= start < end else output
