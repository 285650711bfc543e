"""The network's verdict as a page: heat maps of connections, delay, packet size, clocks and speed, then the findings.

One file without scripts or anything from elsewhere. Colour never stands alone: each cell has its text and a title.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .probe_groups import count
from .probe_text import VERDICTS

Cell = Mapping[str, Any]

_STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#0f172a;--line:#cbd5e1;--soft:#f1f5f9;--pass:#bbf7d0;
--pass-text:#14532d;--warn:#fde68a;--warn-text:#713f12;--fail:#b91c1c;--fail-text:#fff;--skip:#e2e8f0;--skip-text:#334155;
--l1:#dcfce7;--l2:#d9f0c4;--l3:#fef3c7;--l4:#fdba74;--l5:#f87171;--level-text:#1c1917}
@media (prefers-color-scheme:dark){:root{--page:#0f172a;--text:#e2e8f0;--line:#475569;--soft:#1e293b;--pass:#14532d;
--pass-text:#dcfce7;--warn:#78530b;--warn-text:#fef3c7;--fail:#f87171;--fail-text:#1c1917;--skip:#334155;
--skip-text:#cbd5e1;--l1:#14532d;--l2:#3f6212;--l3:#854d0e;--l4:#9a3412;--l5:#991b1b;--level-text:#fff}}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:90rem;padding:0 1rem;background:var(--page);
color:var(--text)}h1,h2{line-height:1.2}.scroll{overflow:auto;max-height:85vh;border:1px solid var(--line)}
table{border-collapse:separate;border-spacing:1px}th,td{padding:.2rem .4rem;text-align:left;vertical-align:top}
.map{font-size:12px}.map td{text-align:center;white-space:nowrap}.map thead th{position:sticky;top:0;
background:var(--page)}
.map tbody th{position:sticky;left:0;background:var(--page)}.map thead th:first-child{left:0;z-index:1}
.pass{background:var(--pass);color:var(--pass-text)}.warn{background:var(--warn);color:var(--warn-text)}
.fail{background:var(--fail);color:var(--fail-text);font-weight:bold}.skip{background:var(--skip);color:var(--skip-text)}
.own{background:var(--soft)}.l1{background:var(--l1)}.l2{background:var(--l2)}.l3{background:var(--l3)}
.l4{background:var(--l4)}.l5{background:var(--l5)}.l1,.l2,.l3,.l4,.l5{color:var(--level-text)}
.legend span{padding:.1rem .5rem;margin-right:.5rem;border-radius:3px}.checks td,.checks th{border-bottom:1px solid
var(--line)}article{border-left:4px solid var(--line);padding:.2rem 1rem;margin:1rem 0}dt{font-weight:bold}dd{margin:0
0 .3rem 0}.status{padding:0 .4rem;border-radius:3px}
"""


@dataclass(frozen=True)
class Figure:
    """One heat map of a number."""

    title: str
    about: str
    unit: str
    key: str
    form: str
    more_is_worse: bool


_FIGURES = (
    Figure("Delay", "Fastest connection, from row to column.", "ms", "ms", "{:.2f}", True),
    Figure("Packet size", "Largest packet that comes through whole.", "bytes", "mtu", "{:.0f}", False),
    Figure("Clocks", "Clock of the column, seen from the row.", "s", "offset_s", "{:+.3f}", True),
    Figure("Speed", "TCP from row to column.", "Mbit/s", "mbit_s", "{:.0f}", False),
    Figure("RDMA", "Slowest rail from row to column.", "GB/s", "rdma_gb_s", "{:.1f}", False),
)
_LEVELS = 5


def render(report: Mapping[str, Any], title: str = "Network preflight") -> str:
    """The page."""
    escape = html.escape
    nodes, matrix = report["nodes"], report["matrix"]
    columns = [*nodes, *report["not_in_this_run"]]
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f'<h1>{escape(title)}: <span class="status {report["verdict"]}">{VERDICTS[report["verdict"]]}</span></h1>',
        f"<p>{count(len(nodes), 'node')}. Checks: "
        + ", ".join(f"{report['counts'][status]} {status}" for status in ("fail", "warn", "pass", "skip"))
        + ". Rows are where a connection starts, columns where it goes.</p>",
        *(_finding(finding) for finding in report["findings"]),
    ]
    if len(nodes) > 1:
        parts += [
            "<h2>Connections</h2>",
            '<p class="legend"><span class="pass">ok</span><span class="warn">!: a warning</span><span class="fail">'
            'open/tried, or the checks that fail</span><span class="skip">-: not tested</span></p>',
            _map("Connections", (nodes, columns), matrix, _connection),
        ]
        for figure in _FIGURES:
            values = [cell[figure.key] for row in matrix.values() for cell in row.values() if figure.key in cell]
            if values:
                parts += [
                    f"<h2>{figure.title} ({figure.unit})</h2><p>{figure.about}</p>",
                    _legend(figure, values),
                    _map(figure.title, (nodes, columns), matrix, _shade(figure, values)),
                ]
    parts += ["<h2>Checks</h2>", _checks(report), "</body></html>\n"]
    return "\n".join(parts)


def _finding(finding: Mapping[str, Any]) -> str:
    escape = html.escape
    where = ", ".join(finding["nodes"]) + (f" → {', '.join(finding['targets'])}" if finding["targets"] else "")
    accepted = " (accepted)" if finding["accepted"] else ""
    rows = "".join(
        f"<dt>{name}</dt><dd>{escape(finding[name])}</dd>" for name in ("measured", "expected", "cause", "remedy")
    )
    return (
        f'<article><h3><span class="status {finding["status"]}">{finding["status"].upper()}</span>'
        f" {escape(finding['check'])}{accepted}</h3><p>{escape(where)}</p><dl>{rows}</dl></article>"
    )


def _map(
    label: str,
    names_of: tuple[list[str], list[str]],
    matrix: Mapping[str, Mapping[str, Cell]],
    describe: Callable[[Cell], tuple[str, str]],
) -> str:
    nodes, columns = names_of
    names = {name: html.escape(name) for name in columns}
    head = "".join(f'<th scope="col">{names[name]}</th>' for name in columns)
    rows = []
    for source in nodes:
        cells = []
        row = matrix.get(source, {})
        for target in columns:
            if source == target:
                cells.append('<td class="own"></td>')
                continue
            cell = row.get(target)
            style, shown = describe(cell) if cell else ("skip", "-")
            title = f"{names[source]} → {names[target]}: {_title(cell)}"
            cells.append(f'<td class="{style}" title="{title}">{html.escape(shown)}</td>')
        rows.append(f'<tr><th scope="row">{names[source]}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="scroll" tabindex="0"><table class="map" aria-label="{label}">\n'
        f'<thead><tr><th scope="col">from \\ to</th>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _title(cell: Cell | None) -> str:
    """All that is known of a pair, for who hovers over a cell."""
    if cell is None:
        return "not measured"
    parts = [str(cell["why"])] if "why" in cell else [f"{cell['open']} of {cell['tried']} ports open"]
    parts += [f"{port} {result}" for port, result in list(cell.get("closed", {}).items())[:6]]
    parts += [f"{figure.form.format(cell[figure.key])} {figure.unit}" for figure in _FIGURES if figure.key in cell]
    parts += [f"rail {number}: {speed:.1f} GB/s" for number, speed in enumerate(cell.get("rails_gb_s", ()))]
    parts += cell.get("checks", [])
    return html.escape("; ".join(parts))


def _connection(cell: Cell) -> tuple[str, str]:
    status = str(cell["status"])
    if status == "pass":
        return status, "ok"
    if status == "skip":
        return status, "-"
    if status == "warn":
        return status, "!"
    if cell.get("closed"):
        return status, f"{cell['open']}/{cell['tried']}"
    return status, ", ".join(str(check).removeprefix("net_") for check in cell.get("checks", []))


def _bounds(figure: Figure, values: list[float]) -> list[float]:
    """Where a shade begins: equal steps between best and worst."""
    sizes = [abs(value) for value in values]
    low, high = min(sizes), max(sizes)
    return [low + (high - low) * step / _LEVELS for step in range(_LEVELS + 1)]


def _shade(figure: Figure, values: list[float]) -> Callable[[Cell], tuple[str, str]]:
    bounds = _bounds(figure, values)
    width = bounds[-1] - bounds[0]

    def describe(cell: Cell) -> tuple[str, str]:
        if figure.key not in cell:
            return "skip", "-"
        value = float(cell[figure.key])
        level = min(int((abs(value) - bounds[0]) / width * _LEVELS), _LEVELS - 1) if width else 0
        # All alike is neither good nor bad.
        level = level if figure.more_is_worse or not width else _LEVELS - 1 - level
        return f"l{level + 1}", figure.form.format(value)

    return describe


def _legend(figure: Figure, values: list[float]) -> str:
    bounds = _bounds(figure, values)
    if bounds[0] == bounds[-1]:
        return f'<p class="legend"><span class="l1">{_plain(bounds[0])} everywhere</span></p>'
    shades = range(_LEVELS) if figure.more_is_worse else range(_LEVELS - 1, -1, -1)
    spans = [
        f'<span class="l{number + 1}">{_plain(bounds[step])} to {_plain(bounds[step + 1])}</span>'
        for number, step in enumerate(shades)
    ]
    return f'<p class="legend">{"".join(spans)}</p>'


def _plain(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _checks(report: Mapping[str, Any]) -> str:
    escape = html.escape
    rows = [
        f'<tr><th scope="row">{escape(item["id"])}</th><td class="{item["status"]}">{item["status"]}</td>'
        f"<td>{escape(item['measured'])}</td></tr>"
        for item in report["checks"]
    ]
    return (
        '<table class="checks"><thead><tr><th scope="col">check</th><th scope="col">status</th><th scope="col">measured'
        "</th></tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"
    )
