"""The matrix is data: every row has a source, ranges do not overlap, names and ids tell the same."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia import matrix
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.gpus import by_device, by_name
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.versions import branch_of, upstream


def tables() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in vars(matrix).items():
        rows = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else []
        found += [(name, row) for row in rows if isinstance(row, matrix.Row)]
    return found


def test_every_table_is_seen() -> None:
    expected = {"CUDA", "BRANCHES", "GENERATIONS", "RANGES", "BOARDS", "NAMES", "DISTRIBUTIONS", "NAMES_OF_PACKAGES"}
    assert {name for name, _ in tables()} == expected


@pytest.mark.parametrize(("table", "row"), tables(), ids=lambda item: item if isinstance(item, str) else "")
def test_every_row_has_a_source(table: str, row: matrix.Row) -> None:
    assert len(row.source) > 20, (table, row)
    assert isinstance(row.verified, bool)


def test_no_source_is_of_one_machine() -> None:
    assert not [row for _, row in tables() if re.search(r"/(work|home|root|tmp)/", row.source)]


def test_ranges_do_not_overlap() -> None:
    for one, other in pairwise(sorted(matrix.RANGES, key=lambda row: row.first)):
        assert one.first <= one.last < other.first


def test_a_board_lies_in_a_range_of_its_generation() -> None:
    for device, board in matrix.BOARDS.items():
        inside = [row.generation for row in matrix.RANGES if row.first <= device <= row.last]
        base = {"grace_hopper": "hopper"}.get(board.generation, board.generation)
        assert inside == [base], hex(device)


@pytest.mark.parametrize("board", matrix.BOARDS.values(), ids=lambda board: board.name)
def test_names_and_ids_agree(board: matrix.Board) -> None:
    found = by_name(board.name)
    assert found is not None
    assert (found.generation, found.form, found.datacenter) == (board.generation, board.form, True)


@pytest.mark.parametrize(
    ("name", "generation", "datacenter"),
    [
        ("NVIDIA GeForce RTX 4090", "ada", False),
        ("NVIDIA GeForce RTX 5090", "blackwell", False),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "blackwell", False),
        ("NVIDIA RTX A6000", "ampere", False),
        ("NVIDIA RTX 6000 Ada Generation", "ada", False),
        ("NVIDIA GeForce GTX 1080 Ti", "pascal", False),
        ("NVIDIA TITAN V", "volta", False),
        ("Quadro RTX 8000", "turing", False),
    ],
)
def test_other_cards(name: str, generation: str, datacenter: bool) -> None:
    found = by_name(name)
    assert found is not None
    assert (found.generation, found.datacenter) == (generation, datacenter)


def test_unknown_cards() -> None:
    assert by_name("Radeon RX 7900") is None
    assert by_device(0x4000) is None
    assert by_device(0x102D) == "obsolete"  # Tesla K80


def test_branches() -> None:
    default = matrix.BRANCHES[matrix.DEFAULT_BRANCH]
    assert default.status == "long-term"
    assert all(row.floor <= matrix.DEFAULT_BRANCH for row in matrix.CUDA.values())
    for branch, row in matrix.BRANCHES.items():
        assert row.version is None or branch_of(row.version) == branch
        assert row.status in {"long-term", "production", "new-feature", "ended"}
        # CUDA 13 begins with branch 580, and nothing older knows it.
        assert (row.cuda.startswith("13")) == (branch >= matrix.CUDA["cu130"].floor)
    for row in matrix.GENERATIONS.values():
        assert row.first_branch in matrix.BRANCHES
        assert row.last_branch is None or row.last_branch in matrix.BRANCHES
        assert row.open_module in {"never", "possible", "only"}


@pytest.mark.parametrize("origin", ["nvidia", "distribution"])
@pytest.mark.parametrize(
    "distribution", [row for row in matrix.DISTRIBUTIONS if row.accepted], ids=lambda row: row.codename
)
def test_names_of_packages_are_told_once(distribution: matrix.Distribution, origin: str) -> None:
    for branch in matrix.BRANCHES:
        rows = [
            row
            for row in matrix.NAMES_OF_PACKAGES
            if row.family == distribution.family and row.origin == origin and row.first <= branch <= row.last
        ]
        assert len(rows) <= 1
        if origin == "nvidia" or branch == distribution.archive_branch:
            assert len(rows) == 1, branch


def test_what_is_not_proven_is_refused_not_absent() -> None:
    assert [row.id for row in matrix.DISTRIBUTIONS if not row.accepted] == ["rhel", "rocky", "almalinux"]


@pytest.mark.parametrize(
    ("text", "version"),
    [("580.159.04-1ubuntu1", "580.159.04"), ("3:575.51-1.fc41", "575.51"), ("535.309.01-0+deb12u1", "535.309.01")],
)
def test_upstream_versions(text: str, version: str) -> None:
    assert upstream(text) == version
