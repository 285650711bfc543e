# SPDX-License-Identifier: Apache-2.0
"""Variables of a file as systemd's EnvironmentFile= takes them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path


def read_environment(path):
    """NAME=value, quoted or not, comments with # or ;. A missing file is empty."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    found = {}
    for line in lines:
        name, equals, value = line.strip().partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            continue
        try:
            words = shlex.split(value)
        except ValueError:
            words = [value]
        found[name] = " ".join(words)
    return found
