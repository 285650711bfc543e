"""Values that the argument parser of `vllm serve` refuses: words outside a closed set, and what is no number."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import PlannerError, short

_DATA = Path(__file__).parent / "data"
# Sets that these flags of the user's own open again.
_OPENED_BY = {"--tool-call-parser": "tool_parser_plugin", "--reasoning-parser": "reasoning_parser_plugin"}
# Compared in capitals (vllm/config/attention.py).
_CAPITALS = "--attention-backend"
# The one of these flags that takes several words.
_SEVERAL = "--collect-detailed-traces"
_SHOWN = 20
_NUMBERS = {
    "int": (re.compile(r"[+-]?\d{1,30}"), "an integer"),
    "size": (
        re.compile(r"[+-]?\d{1,30}|\d{1,15}[KMGT]|\d{1,15}(\.\d{1,15})?[kmgt]"),
        "an integer, or a number with k, m, g or t",
    ),
    "float": (re.compile(r"[+-]?(\d{1,30}(\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,3})?"), "a number"),
}


@lru_cache(maxsize=4)
def _load(version: str) -> dict[str, Any]:
    """The values of a minor version; of one that is not listed, nothing is known."""
    minor = ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
    for path in sorted(_DATA.glob("serve_values_*.json")):
        if path.stem.removeprefix("serve_values_").rpartition(".")[0] == minor:
            known: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return known
    return {"choices": {}}


def check_choices(flags: Mapping[str, Any], version: str) -> None:
    """Raise on the first value that the parser would not take; `flags` are named in snake_case."""
    known = _load(version)
    for flag, value in flags.items():
        name = f"--{flag.replace('_', '-')}"
        choices = known["choices"].get(name)
        if choices is not None and flags.get(_OPENED_BY.get(name, "")) is None:
            _check_choice(name, flag, value, choices)
        for kind, (form, expected) in _NUMBERS.items():
            if name in known.get(kind, ()) and not _is_number(value, form, whole=kind != "float"):
                raise PlannerError(f"{name[2:]} = {short(value)} is not {expected}.", "Correct it.", flag)


def check_speculative(speculative: Mapping[str, Any], version: str) -> None:
    """Raise on a key or a method that vLLM's speculative_config does not have."""
    known = _load(version)
    fields: Sequence[str] = known.get("speculative", ())
    for key in speculative if fields else ():
        if key not in fields:
            close = difflib.get_close_matches(str(key)[:100], fields, n=1, cutoff=0.6)
            raise PlannerError(
                f"speculative.{str(key)[:100]} is no key of vLLM's speculative_config.",
                f"Did you mean {close[0]!r}?" if close else f"Use {', '.join(fields[:_SHOWN])}, ...",
                "speculative",
            )
    methods = known["choices"].get("--spec-method")
    method = speculative.get("method")
    if methods is not None and method is not None and method != "[ngram]":
        _check_choice("--speculative.method", "speculative.method", method, methods)


def _check_choice(name: str, flag: str, value: Any, choices: Sequence[str]) -> None:
    text = value.upper() if name == _CAPITALS and isinstance(value, str) else value
    items = text if name == _SEVERAL and isinstance(text, list | tuple) else [text]
    if all(isinstance(item, str | int) and str(item) in choices for item in items):
        return
    close = difflib.get_close_matches(str(text)[:100], choices, n=1, cutoff=0.6)
    shown = ", ".join(choices[:_SHOWN]) + (f" and {len(choices) - _SHOWN} more" if len(choices) > _SHOWN else "")
    raise PlannerError(
        f"{name[2:]} = {short(value)}: invalid choice (choose from {shown}).",
        f"Did you mean {close[0]!r}?" if close else "Use one of these, or leave it out.",
        flag,
    )


def _is_number(value: Any, form: re.Pattern[str], *, whole: bool) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, str):
        return value == "None" or form.fullmatch(value.strip()) is not None
    return isinstance(value, int) or (isinstance(value, float) and not whole)
