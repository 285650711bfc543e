"""The exceptions that the planner raises. Nothing else leaves it."""

from __future__ import annotations


class PlannerError(ValueError):
    """A request that can't be served; the message says why and what to change."""


class ModelConfigError(PlannerError):
    """A config.json that can't be read as a model."""


class UnsupportedArchitectureError(PlannerError):
    """A model whose memory is not known well enough to state figures."""
