"""The estimate against measured starts: the rows beside this file always, more where measurements are at hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import table

OWN = Path(__file__).parent / "h200.jsonl"


def own_rows() -> list[table.Row]:
    records = [json.loads(line) for line in OWN.read_text("utf-8").splitlines()]
    found = [table.compare(record, {}, "h200") for record in records]
    return [row for row in found if row is not None]


@pytest.fixture(scope="module")
def measured(shared_facts: Path) -> list[table.Row]:
    return [*table.rows(shared_facts), *own_rows()]


def test_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = own_rows()
    with capsys.disabled():
        print("\n" + table.render(found))
    assert len(found) >= 12
    assert not [row.id for row in found if row.problem]
    assert not [row.id for row in found if row.fits != row.starts]
    figures = table.summary(found)
    for metric, (median, p90) in table.BARS.items():
        assert figures[metric]["median"] <= median
        assert figures[metric]["p90"] <= p90


def test_all_rows(measured: list[table.Row], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\n" + table.render(measured))
    figures = table.summary(measured)
    for metric, (median, p90) in table.BARS.items():
        assert figures[metric]["median"] <= median, metric
        assert figures[metric]["p90"] <= p90, metric
    assert table.covered(measured) >= 0.95
    wrong = [row.id for row in measured if row.version >= (0, 19) and row.fits is not None and row.fits != row.starts]
    assert not wrong
