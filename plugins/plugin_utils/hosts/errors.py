"""The one error of this package."""

from __future__ import annotations


class HostError(ValueError):
    """Names what is wrong with a host's variables or facts, and the remedy."""
