"""Reads the switches of playbooks/plan.yml, which come with -e: the form of the plan, its file, growth."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..planner.errors import PlannerError
from ..planner.growth import MAX_FACTOR, MIN_FACTOR, check_factor
from .validate import Problem, show

FORMATS = ("text", "json", "html")
# Beside the inventory, where every other report is kept.
HIDDEN = ".ironrack"
HTML_FILE = "plan.html"


@dataclass(frozen=True)
class Asked:
    """How the plan is to be shown."""

    format: str = "text"
    file: Path | None = None
    growth: float | None = None


def read(values: Mapping[str, Any], inventory_dir: Path | None, base: Path) -> tuple[Asked, list[Problem]]:
    """The switches, and what is wrong with them. `base` is the folder that a relative plan_file starts from."""
    problems: list[Problem] = []
    form = values.get("plan_format")
    if form is None:
        form = FORMATS[0]
    elif form not in FORMATS:
        close = difflib.get_close_matches(str(form).lower(), FORMATS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        problems.append(
            Problem(
                "",
                "plan_format",
                show(form, "plan_format"),
                "is not one of the choices",
                f"{hint}choose {', '.join(FORMATS)}",
            )
        )
        form = FORMATS[0]
    growth, found = _growth(values.get("plan_growth"))
    problems += found
    file, found = _file(values.get("plan_file"), str(form), inventory_dir, base)
    return Asked(str(form), file, growth), problems + found


def _growth(value: Any) -> tuple[float | None, list[Problem]]:
    if value is None:
        return None, []
    try:
        factor = value if isinstance(value, bool) else float(value)
        check_factor(factor)
        return factor, []
    except (TypeError, ValueError, OverflowError) as error:
        # PlannerError is a ValueError that knows its remedy.
        remedy = error.remedy if isinstance(error, PlannerError) else "give a number, for example -e plan_growth=6"
        return None, [
            Problem(
                "",
                "plan_growth",
                show(value, "plan_growth"),
                f"is not a factor between {MIN_FACTOR:g} and {MAX_FACTOR:g}",
                remedy,
            )
        ]


def _file(value: Any, form: str, inventory_dir: Path | None, base: Path) -> tuple[Path | None, list[Problem]]:
    remedy = "give a file in a folder that exists and that you may write to, for example -e plan_file=/tmp/plan"
    if value is None:
        if form != "html":
            return None, []
        if inventory_dir is None:
            return None, [
                Problem("", "plan_file", "(not set)", "the inventory has no folder that the report could go to", remedy)
            ]
        path = inventory_dir / HIDDEN / HTML_FILE
        # Made when the report is written; a folder above it is there.
        reason = _unwritable(path, inventory_dir if not path.parent.is_dir() else path.parent)
        return path, [Problem("", "plan_file", "(not set)", f"{path}: {reason}", remedy)] if reason else []
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        return None, [Problem("", "plan_file", show(value, "plan_file"), "is not the path of a file", remedy)]
    try:
        path = base / Path(value).expanduser()
    except RuntimeError as error:
        return None, [Problem("", "plan_file", show(value), str(error), remedy)]
    reason = _unwritable(path, path.parent)
    return path, [Problem("", "plan_file", show(value), reason, remedy)] if reason else []


def _unwritable(path: Path, folder: Path) -> str:
    """Why no file can be put there, or nothing. Only an attempt knows (mounts, quotas, root)."""
    try:
        if path.is_dir():
            return "is a folder"
        if path.exists() and not path.is_file():
            return "is not a regular file"
        if not folder.is_dir():
            return f"the folder {folder} does not exist"
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"can't be written: {error.strerror or error}"


def write(path: Path, content: str) -> bool:
    """Replace the file in one step; says whether its content changed."""
    data = content.encode("utf-8", errors="backslashreplace")
    path = path.resolve()
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
        new = Path(handle.name)
        try:
            handle.write(data)
            handle.flush()
            new.chmod(0o644)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
    return True
