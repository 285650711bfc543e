"""The exceptions that the planner raises. Nothing else leaves it."""

from __future__ import annotations

from typing import Any


class PlannerError(ValueError):
    """A request that can't be served.

    The message is the problem and the remedy; `key` is the key of the request that it is about (`parallelism.tensor`).
    """

    def __init__(self, problem: str, remedy: str = "", key: str = "") -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.problem = problem
        self.remedy = remedy
        self.key = key


class ModelConfigError(PlannerError):
    """A config.json that can't be read as a model."""


class UnsupportedArchitectureError(PlannerError):
    """A model whose memory is not known well enough to state figures."""


def short(value: Any, limit: int = 60) -> str:
    """A value for a message; numbers of thousands of digits and deep nesting can't be printed."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."
