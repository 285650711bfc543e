"""A document of report.py as one HTML page: pictures are inline SVG, nothing is fetched, nothing runs.

Every string that comes from an inventory or a model passes `_text`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from .report import (
    PARTS,
    alike,
    capacity_text,
    command_text,
    growth_details,
    growth_summary,
    kinds_text,
    layout_text,
    place_text,
    shown_flags,
)

# A page of a thousand nodes helps nobody; the JSON document has all of them.
DRAWN_NODES = 96
DRAWN_REPLICAS = 64
_BAR_WIDTH, _BAR_HEIGHT, _BAR_LEFT, _BAR_RIGHT = 560, 26, 150, 90
_CELL, _GAP, _MAP_LEFT, _MAP_COLUMNS = 34, 4, 150, 16
# Tell apart with colour-blind eyes too; instances beyond these begin again, and every GPU says its stage in words.
_INSTANCE_COLORS = 6
# What HTML does not allow in a text, and halves of characters that can't be encoded.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

_STYLE = """
:root { --fg: #1c2126; --bg: #fff; --soft: #5b6670; --line: #d4dade; --panel: #f5f7f8; --warn: #8a4b00;
  --p0: #3b6ea8; --p1: #d98324; --p2: #9a7bb5; --p3: #3d8f5f; --p4: #e3e7ea;
  --i0: #3b6ea8; --i1: #3d8f5f; --i2: #b0563f; --i3: #8a6fb0; --i4: #8a7a1f; --i5: #2f8c95; --idle: #e3e7ea; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6eaed; --bg: #15191c; --soft: #9aa6b0; --line: #39424a;
  --panel: #1d2327; --warn: #f0b35a; --p4: #39424a; --idle: #39424a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 980px; color: var(--fg); background: var(--bg);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 20px; margin: 36px 0 4px; border-top: 1px solid var(--line);
  padding-top: 20px; } h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 4px 0; } .soft { color: var(--soft); } ul { margin: 4px 0; padding-left: 20px; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top;
  padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } td.n { font-variant-numeric: tabular-nums; }
pre { background: var(--panel); padding: 10px 12px; margin: 4px 0; overflow-x: auto; font-size: 13px; }
@media (max-width: 700px) { table { display: block; overflow-x: auto; } th, td { overflow-wrap: normal; } }
.scroll { overflow-x: auto; } svg { display: block; max-width: 100%; height: auto; } svg text { fill: var(--fg);
  font: 12px system-ui, sans-serif; } svg text.s { fill: var(--soft); font-size: 11px; } svg text.w { fill: #fff;
  font-size: 11px; } .warn { border-left: 3px solid var(--warn); padding: 2px 0 2px 12px; }
.legend span { display: inline-block; margin-right: 16px; } .legend i { display: inline-block; width: 12px;
  height: 12px; margin-right: 6px; border-radius: 2px; vertical-align: -1px; }
.p0 { fill: var(--p0); background: var(--p0); } .p1 { fill: var(--p1); background: var(--p1); }
.p2 { fill: var(--p2); background: var(--p2); } .p3 { fill: var(--p3); background: var(--p3); }
.p4 { fill: var(--p4); background: var(--p4); } .i0 { fill: var(--i0); background: var(--i0); }
.i1 { fill: var(--i1); background: var(--i1); } .i2 { fill: var(--i2); background: var(--i2); }
.i3 { fill: var(--i3); background: var(--i3); } .i4 { fill: var(--i4); background: var(--i4); }
.i5 { fill: var(--i5); background: var(--i5); } .idle { fill: var(--idle); background: var(--idle); }
"""


def render_html(plan: Mapping[str, Any]) -> str:
    """The whole page."""
    instances = plan["instances"]
    gpus = sum(len(node["gpus"]) for node in plan["nodes"].values())
    head = f"vLLM {plan['vllm_version']} ({plan['variant']}), {len(plan['nodes'])} nodes, {gpus} GPUs"
    body = [f"<h1>Plan of the cluster</h1><p class='soft'>{_text(head)}</p>"]
    ray = plan["ray"]
    if ray:
        workers = ", ".join(ray["workers"]) or "none"
        text = f"Ray: head {ray['head']} ({ray['address']}), workers {workers}"
        body.append(f"<p>{_text(text)}</p>")
    body += _warnings(plan["warnings"])
    if not instances:
        body.append("<p>No instances: set <code>vllm_instances</code>.</p>")
    body += _map(plan)
    for name, instance in instances.items():
        body += _instance(name, instance)
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>Plan of the cluster</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _text(value: Any) -> str:
    return escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def _list(items: Iterable[Any]) -> str:
    return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in items)}</ul>"


def _warnings(warnings: Sequence[str]) -> Iterator[str]:
    if warnings:
        yield f"<div class='warn'><h3>Warnings</h3>{_list(warnings)}</div>"


def _instance(name: str, instance: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{_text(name)}</h2>"
    yield f"<p>{_text(layout_text(instance))}</p><p class='soft'>{_text(instance['url'])}</p>"
    yield from _warnings(instance["warnings"])
    yield "<h3>Memory of one GPU of each stage</h3>"
    if instance["memory"]:
        yield _bars(instance["memory"])
        yield _legend((f"p{index}", label) for index, (_, _, label) in enumerate(PARTS))
        yield from (f"<p>{_text(line)}</p>" for line in capacity_text(instance))
        yield _memory_table(instance["memory"])
        if instance["assumptions"]:
            yield f"<p class='soft'>Assumed: {_text('; '.join(instance['assumptions']))}.</p>"
    else:
        yield "<p>Not estimated.</p>"
    yield "<h3>Placement</h3>"
    yield _placement(instance)
    yield f"<h3>Why</h3>{_list(instance['reasons'])}"
    if instance["growth"]:
        growth = instance["growth"]
        yield f"<h3>Growth by {growth['factor']:g}</h3><p>{_text(growth_summary(growth))}</p>"
        if growth["then"]:
            yield _growth_bars(growth)
        yield _list(growth_details(growth))
    yield "<h3>Flags</h3>"
    rows = "".join(
        f"<tr><td><code>{_text(key)}</code></td><td class='n'>{_text(value)}</td></tr>"
        for key, value in shown_flags(instance["flags"])
    )
    yield f"<table><tbody>{rows}</tbody></table>"
    for item in instance["commands"][:DRAWN_REPLICAS]:
        where = f"replica {item['replica']} on {item['node']} ({item['role']})"
        yield f"<p class='soft'>{_text(where)}</p><pre>{_text(_command(item))}</pre>"


def _command(item: Mapping[str, Any]) -> str:
    """A command for a shell with a line for each flag, which neither wraps inside a word nor runs off the page."""
    whole = command_text(item)
    flags = [index for index, arg in enumerate(item["args"]) if arg.startswith("--")]
    if not flags:
        return whole
    tail = [shlex.join(item["args"][a:b]) for a, b in zip(flags, [*flags[1:], len(item["args"])], strict=True)]
    head = whole.removesuffix(" ".join(tail)).rstrip()
    return " \\\n    ".join([head, *tail])


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return (
        "<p class='legend'>"
        + "".join(f"<span><i class='{css}'></i>{_text(label)}</span>" for css, label in entries)
        + "</p>"
    )


# Memory


def _bars(memory: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each stage, all in the same scale: the length is the memory of its GPU."""
    rows = list(alike(memory))
    longest = max((_total(entry) for _, entry in rows), default=0.0) or 1.0
    height = len(rows) * (_BAR_HEIGHT + 10)
    parts = []
    for line, (stages, entry) in enumerate(rows):
        top, left = line * (_BAR_HEIGHT + 10), float(_BAR_LEFT)
        parts.append(f"<text x='0' y='{top + 12}'>{_text(f'stage {stages}')}</text>")
        if entry["gpus"]:
            parts.append(f"<text class='s' x='0' y='{top + 25}'>{_text(_short(entry['gpus'][0]['name'], 24))}</text>")
        for index, (key, _, label) in enumerate(PARTS):
            size = float(entry[key])
            width = _BAR_WIDTH * size / longest
            parts.append(
                f"<rect class='p{index}' x='{left:.1f}' y='{top}' width='{width:.1f}' height='{_BAR_HEIGHT}'>"
                f"<title>{_text(f'{label} {size:.2f} GiB')}</title></rect>"
            )
            # A figure only where it has room; the table has all.
            if width > 44 and key != "free_gib":
                parts.append(f"<text class='w' x='{left + 5:.1f}' y='{top + 17}'>{size:.1f}</text>")
            left += width
        parts.append(f"<text class='s' x='{left + 6:.1f}' y='{top + 17}'>{_total(entry):.1f} GiB</text>")
    return _svg(_BAR_LEFT + _BAR_WIDTH + _BAR_RIGHT, height, "Memory of one GPU of each pipeline stage", parts)


def _total(entry: Mapping[str, Any]) -> float:
    return sum(float(entry[key]) for key, _, _ in PARTS)


def _memory_table(memory: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{_text(label)}</th>" for _, _, label in PARTS)
    rows = []
    for stages, entry in alike(memory):
        gpus = ", ".join(f"{gpu['count']} x {gpu['name']}" for gpu in entry["gpus"])
        cells = "".join(f"<td class='n'>{float(entry[key]):.2f}</td>" for key, _, _ in PARTS)
        rows.append(f"<tr><td>{_text(stages)}</td><td>{_text(gpus)}</td>{cells}</tr>")
    return (
        f"<div class='scroll'><table><thead><tr><th>stage</th><th>GPUs</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><p class='soft'>GiB; free is what lies outside "
        "gpu_memory_utilization.</p>"
    )


# Placement


def _placement(instance: Mapping[str, Any]) -> str:
    rows = []
    replicas = instance["replicas"]
    for index, replica in enumerate(replicas[:DRAWN_REPLICAS]):
        for node in replica["nodes"]:
            ranks = [rank for rank in replica["ranks"] if rank["node"] == node]
            cells = (index, replica["url"], node, place_text(ranks, instance["flags"]), kinds_text(ranks))
            rows.append(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{title}</th>" for title in ("replica", "URL", "node", "place", "GPUs"))
    more = len(replicas) - DRAWN_REPLICAS
    note = f"<p class='soft'>and {more} more replicas</p>" if more > 0 else ""
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _map(plan: Mapping[str, Any]) -> Iterator[str]:
    """One row a node, one square a GPU: colour says which instance, the words replica, data rank and stage."""
    owners: dict[tuple[str, int], tuple[int, str, str]] = {}
    for number, (name, instance) in enumerate(plan["instances"].items()):
        several = {
            "r": len(instance["replicas"]) > 1,
            "d": (instance["flags"]["data_parallel_size"] or 1) > 1,
            "s": (instance["flags"]["pipeline_parallel_size"] or 1) > 1,
        }
        for index, replica in enumerate(instance["replicas"]):
            for rank in replica["ranks"]:
                place = {"r": index, "d": rank["data"], "s": rank["stage"]}
                label = " ".join(f"{key}{value}" for key, value in place.items() if several[key])
                title = (
                    f"{name}: replica {index}, rank {rank['rank']}, data {rank['data']}, stage {rank['stage']}, "
                    f"tensor {rank['tensor']}"
                )
                owners[rank["node"], rank["gpu"]] = number, label, title
    nodes = [(name, node["gpus"]) for name, node in plan["nodes"].items() if node["gpus"]]
    if not nodes:
        return
    yield "<h3>Nodes and GPUs</h3>"
    parts: list[str] = []
    top = 0
    step = _CELL + _GAP
    for name, gpus in nodes[:DRAWN_NODES]:
        parts.append(f"<text x='0' y='{top + 15}'>{_text(_short(name, 22))}</text>")
        parts.append(f"<text class='s' x='0' y='{top + 29}'>{_text(_short(kinds_text(_named(gpus)), 24))}</text>")
        for position, gpu in enumerate(gpus):
            x = _MAP_LEFT + position % _MAP_COLUMNS * step
            y = top + position // _MAP_COLUMNS * step
            parts += _square(x, y, name, gpu, owners.get((name, gpu["index"])))
        top += step * -(-len(gpus) // _MAP_COLUMNS) + 4
    columns = min(_MAP_COLUMNS, max(len(gpus) for _, gpus in nodes))
    yield _svg(_MAP_LEFT + max(columns, 8) * step, top, "Which GPU of which node serves which instance", parts)
    entries = [(f"i{number % _INSTANCE_COLORS}", name) for number, name in enumerate(plan["instances"])]
    yield _legend([*entries, ("idle", "idle")])
    yield "<p class='soft'>In a square: r replica, d data-parallel rank, s pipeline stage, where there are several.</p>"
    if len(nodes) > DRAWN_NODES:
        yield f"<p class='soft'>and {len(nodes) - DRAWN_NODES} more nodes</p>"


def _square(x: int, y: int, node: str, gpu: Mapping[str, Any], owner: tuple[int, str, str] | None) -> Iterator[str]:
    css = f"i{owner[0] % _INSTANCE_COLORS}" if owner else "idle"
    what = f"{node}, GPU {gpu['index']}, {gpu['name']}, {gpu['memory_total_mib']} MiB: {owner[2] if owner else 'idle'}"
    yield (
        f"<rect class='{css}' x='{x}' y='{y}' width='{_CELL}' height='{_CELL}' rx='3'><title>{_text(what)}</title>"
        "</rect>"
    )
    # Two words fill a line of a square; a third goes below.
    words = owner[1].split() if owner else []
    for line, text in enumerate((" ".join(words[:2]), " ".join(words[2:]))):
        if text:
            yield f"<text class='w' x='{x + _CELL / 2:g}' y='{y + 15 + 13 * line}' text-anchor='middle'>{text}</text>"


def _named(gpus: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"gpu_name": gpu["name"]} for gpu in gpus]


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"


# Growth


def _growth_bars(growth: Mapping[str, Any]) -> str:
    """GPUs today and then."""
    rows = [("today", growth["today"]), ("then", growth["then"])]
    longest = max(1, *(row["gpus"] for _, row in rows))
    parts = []
    for line, (label, row) in enumerate(rows):
        top = line * (_BAR_HEIGHT + 10)
        width = _BAR_WIDTH * row["gpus"] / longest
        parts.append(f"<text x='0' y='{top + 17}'>{label}</text>")
        parts.append(
            f"<rect class='i{line}' x='{_BAR_LEFT}' y='{top}' width='{width:.1f}' height='{_BAR_HEIGHT}'></rect>"
        )
        parts.append(f"<text class='s' x='{_BAR_LEFT + width + 6:.1f}' y='{top + 17}'>{row['gpus']} GPUs</text>")
    return _svg(_BAR_LEFT + _BAR_WIDTH + _BAR_RIGHT, 2 * (_BAR_HEIGHT + 10), "GPUs today and after growth", parts)


def _svg(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    return (
        f"<svg viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img' aria-label='{_text(label)}'>"
        f"{''.join(parts)}</svg>"
    )
