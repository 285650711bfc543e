# SPDX-License-Identifier: Apache-2.0
"""Quoting for systemd's unit files and environment files.

systemd reads the words of `ExecStart=` much like a shell, but not quite: `%` starts a specifier anywhere, `$` a
variable even inside single quotes, and escapes are C escapes. An environment file has neither specifiers nor
variables and escapes of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# What may stand in a unit file without quotes. No `%`, `$`, quote, backslash, `#` or `;`.
_PLAIN = re.compile(r"[A-Za-z0-9_+=:,./@^~-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNIT_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "$": "$$", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FILE_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_FILE_ESCAPES = {"\\": "\\\\", '"': '\\"', "$": "\\$", "`": "\\`"}


class QuotingError(ValueError):
    """A value that no unit file or environment file can carry."""


def _checked(value: str, what: str) -> str:
    if not isinstance(value, str):
        raise QuotingError(f"{what} must be a string, not {value!r}; write it in quotes")
    if "\0" in value:
        raise QuotingError(f"{what} contains a NUL character: {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise QuotingError(f"{what} is not valid Unicode: {value!r}") from None
    return value


def systemd_word(value: str) -> str:
    """One argument as one word of `ExecStart=`."""
    if _PLAIN.fullmatch(_checked(value, "an argument")):
        return value
    quoted = "".join(_UNIT_ESCAPES.get(character, character) for character in value)
    return '"' + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", quoted) + '"'


def systemd_args(arguments: Iterable[str], separator: str = " ") -> str:
    """The arguments as the words that follow the program in `ExecStart=`."""
    if isinstance(arguments, (str, bytes, Mapping)):
        raise QuotingError(f"the arguments must be a list of strings, not {arguments!r}")
    return separator.join(systemd_word(argument) for argument in arguments)


def environment_file(variables: Mapping[str, str]) -> str:
    """The lines of an `EnvironmentFile=`, sorted by name."""
    lines = []
    for name, value in sorted(variables.items()):
        if not _NAME.fullmatch(name):
            raise QuotingError(f"{name!r} is not the name of an environment variable")
        text = _checked(value, f"the environment variable {name}")
        if bad := _FILE_CONTROL.search(text):
            raise QuotingError(f"the environment variable {name} contains {bad[0]!r}, which systemd refuses in a file")
        lines.append(f'{name}="' + "".join(_FILE_ESCAPES.get(character, character) for character in text) + '"\n')
    return "".join(lines)
