"""Switches of one run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.switches import Asked, read, write


def test_nothing_given(tmp_path: Path) -> None:
    assert read({}, tmp_path, tmp_path) == (Asked("text", None, None), [])


def test_everything_given(tmp_path: Path) -> None:
    values = {"plan_format": "json", "plan_growth": "2.5", "plan_file": "plan.json"}
    assert read(values, None, tmp_path) == (Asked("json", tmp_path / "plan.json", 2.5), [])


def test_a_page_goes_beside_the_inventory(tmp_path: Path) -> None:
    asked, problems = read({"plan_format": "html"}, tmp_path, Path("/"))
    assert (asked.file, problems) == (tmp_path / ".ironrack/plan.html", [])
    assert not (tmp_path / ".ironrack").exists()


@pytest.mark.parametrize(
    "name, value",
    [
        ("plan_format", "xml"),
        ("plan_format", ["json"]),
        ("plan_format", 3),
        *(("plan_growth", value) for value in ("-1", "abc", "1e9", 0, True, "nan", "inf", [], {}, "1" * 400, "")),
        *(("plan_file", value) for value in ("", " ", 3, [], "missing/plan", ".", "a\0b", "x" * 5000, "~nobody-9/x")),
        ("plan_file", "/dev/null"),
        ("plan_file", "/proc/plan"),
    ],
)
def test_wrong_values_name_variable_value_and_remedy(name: str, value: Any, tmp_path: Path) -> None:
    _, (problem,) = read({name: value}, tmp_path, tmp_path)
    assert problem.variable == name
    assert problem.value and problem.problem and problem.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_page_without_a_folder_needs_a_file() -> None:
    _, (problem,) = read({"plan_format": "html"}, None, Path("/"))
    assert (problem.variable, problem.value) == ("plan_file", "(not set)")


def test_writing_replaces_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "new/plan.html"
    assert write(path, "one \ud800")
    assert not write(path, "one \ud800")
    assert write(path, "two")
    assert path.read_text(encoding="utf-8") == "two"
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["plan.html"]  # noqa: PTH208
