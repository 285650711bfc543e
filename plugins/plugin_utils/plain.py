"""Plain Python values from whatever Ansible hands over.

Since ansible-core 2.19 values are subclasses of the built-in types that carry tags, and containers are lazy. Copies of
the built-in types keep the rest of the code free of both. Typed by behaviour only, so it needs no Ansible import.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

VAULTED = "(vaulted)"


def to_plain(value: Any) -> Any:
    """A deep copy made of built-in types only."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Set):
        return sorted((to_plain(item) for item in value), key=str)
    if hasattr(value, "_ciphertext"):
        # A value from a vault: nothing that is decided or shown here needs its text.
        return VAULTED
    # Dates and paths have no better plain form than their text.
    return str(value)
