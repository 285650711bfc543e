"""The rules of many nodes as a table for the console, or as a page with a picture."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..planner.plan import natural_key
from .nft import merged
from .ports import MATRIX

_HEAD = ("nodes", "from", "in at", "ports", "for", "traffic of")
_PARTS = {row.number: row.part for row in MATRIX}
_WIDEST = 60
# Sources in the order in which the picture shows them, and their colours.
_COLOURS = {
    "admins": "#7c3aed",
    "clients": "#0369a1",
    "gateway": "#0891b2",
    "observability": "#b45309",
    "monitoring": "#b45309",
    "ray": "#15803d",
    "engines": "#15803d",
    "runtime": "#15803d",
    "cluster": "#15803d",
}
_OTHER = "#475569"


def render(found: Sequence[Mapping[str, Any]], form: str = "text") -> str:
    """Rules of several nodes, in one of the forms."""
    groups = _alike(found)
    return _html(groups) if form == "html" else _text(groups)


def _alike(found: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], Mapping[str, Any]]]:
    """Nodes that let in the same, by what they let in."""
    groups: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for one in sorted(found, key=lambda item: natural_key(item["host"])):
        same = {key: value for key, value in one.items() if key not in ("host", "warnings")}
        groups.setdefault(json.dumps(same, sort_keys=True), ([], one))[0].append(one["host"])
    return list(groups.values())


def _ports(rule: Mapping[str, Any]) -> str:
    if rule["ports"] is None:
        return f"all {rule['protocol']}"
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in rule["ports"])
    return f"{rule['protocol']} {shown}"


def _together(rules: Sequence[Mapping[str, Any]]) -> str:
    """The ports of several rules, by protocol."""
    shown = []
    for protocol in dict.fromkeys(rule["protocol"] for rule in rules):
        mine = [rule for rule in rules if rule["protocol"] == protocol]
        every = any(rule["ports"] is None for rule in mine)
        ports = None if every else [list(pair) for pair in merged([pair for rule in mine for pair in rule["ports"]])]
        shown.append(_ports({"protocol": protocol, "ports": ports}))
    return "; ".join(shown)


def _who(rule: Mapping[str, Any]) -> str:
    networks = list(rule["networks"])
    if not networks:
        return f"{rule['source']}: present connection" if rule["source"] == "admins" else f"{rule['source']}: nobody"
    shown = ", ".join(networks[:3]) + (f" and {len(networks) - 3} more" if len(networks) > 3 else "")
    return f"{rule['source']}: {shown}"


def names(hosts: Sequence[str]) -> str:
    """Few names in full, many by the first and the last."""
    return ", ".join(hosts) if len(hosts) <= 3 else f"{hosts[0]} ... {hosts[-1]} ({len(hosts)})"


def _lines(one: Mapping[str, Any], hosts: Sequence[str]) -> Iterable[tuple[str, ...]]:
    for rule in one["rules"]:
        parts = "; ".join(dict.fromkeys(_PARTS[number] for number in rule["rows"])) or "the site"
        yield names(hosts), _who(rule), rule["interface"] or "any", _ports(rule), rule["purpose"], parts


def _text(groups: Sequence[tuple[list[str], Mapping[str, Any]]]) -> str:
    blocks = []
    for hosts, one in groups:
        if one["mode"] == "off":
            blocks.append(f"{names(hosts)}: firewall_mode is off, nothing is filtered here")
            continue
        table = [_HEAD, *_lines(one, hosts)]
        widths = [min(_WIDEST, max(len(row[column]) for row in table)) for column in range(len(_HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        lines.append(f"everything else that comes in is dropped ({one['mode']}); replies, ICMP and loopback are let in")
        lines += [f"{name} = {value}" for name, value in sorted(one["kernel"].items())]
        lines += [f"Warning: {warning}" for warning in one["warnings"]]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _html(groups: Sequence[tuple[list[str], Mapping[str, Any]]]) -> str:
    escape = html.escape
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for hosts, one in groups
        for line in _lines(one, hosts)
    ]
    head = "".join(f"<th>{cell}</th>" for cell in _HEAD)
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#0f172a}"
        "div{overflow-x:auto}table{border-collapse:collapse;width:100%}"
        "th,td{border-bottom:1px solid #cbd5e1;padding:.3rem .6rem;text-align:left}svg{max-width:100%;height:auto}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Who may reach what</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head><body>\n'
        f"<h1>Who may reach what</h1>\n<p>Everything that is not shown is dropped. Replies, ICMP and loopback are let"
        f" in.</p>\n{picture(groups)}\n<div><table><thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>\n</body></html>\n"
    )


def picture(groups: Sequence[tuple[list[str], Mapping[str, Any]]]) -> str:
    """Sources on the left, nodes on the right, an arrow for what may pass."""
    used = {
        rule["source"] for _, one in groups for rule in one["rules"] if rule["networks"] or rule["source"] == "admins"
    }
    sources = [name for name in _COLOURS if name in used] + sorted(used - {*_COLOURS})
    # One line of text for each arrow: boxes on the right are as tall as what leads to them.
    arrows: list[tuple[str, int, str]] = []
    for number, (_, one) in enumerate(groups):
        by_source: dict[str, list[Mapping[str, Any]]] = {}
        for rule in one["rules"]:
            if rule["source"] in sources and (rule["networks"] or rule["source"] == "admins"):
                by_source.setdefault(rule["source"], []).append(rule)
        arrows += [(source, number, _together(by_source[source])) for source in sources if source in by_source]
    step, left, right, top = 26, 150, 560, 30
    height = top * 2 + step * max(len(arrows) + len(groups), 2 * len(sources))
    source_at = {
        name: top + (height - 2 * top) * (position + 0.5) / max(len(sources), 1)
        for position, name in enumerate(sources)
    }
    parts = [
        f'<svg viewBox="0 0 1000 {height}" role="img" aria-label="Who may reach what" font-family="sans-serif"'
        f' font-size="12">'
    ]
    for name, y in source_at.items():
        colour = _COLOURS.get(name, _OTHER)
        parts.append(
            f'<rect x="10" y="{y - 12:.0f}" width="{left - 10}" height="24" rx="5" fill="{colour}"/>'
            f'<text x="{10 + (left - 10) / 2:.0f}" y="{y + 4:.0f}" fill="#fff" text-anchor="middle">'
            f"{html.escape(name)}</text>"
        )
    y = float(top)
    for number, (hosts, one) in enumerate(groups):
        mine = [(source, label) for source, target, label in arrows if target == number]
        tall = step * max(len(mine), 1)
        parts.append(
            f'<rect x="{right}" y="{y:.0f}" width="430" height="{tall}" rx="5" fill="#f1f5f9" stroke="#94a3b8"/>'
            f'<text x="980" y="{y + 17:.0f}" text-anchor="end" font-weight="bold">{html.escape(names(hosts))}</text>'
        )
        if one["mode"] == "off":
            parts.append(f'<text x="{right + 10}" y="{y + 17:.0f}">not filtered (firewall_mode: off)</text>')
        for position, (source, label) in enumerate(mine):
            at = y + step * (position + 0.5)
            colour, begin = _COLOURS.get(source, _OTHER), source_at[source]
            shown = label if len(label) <= 44 else label[:43] + "…"
            parts.append(
                f'<path d="M{left} {begin:.0f} C{left + 200} {begin:.0f} {right - 200} {at:.0f} {right} {at:.0f}"'
                f' fill="none" stroke="{colour}" stroke-width="1.5"/>'
                f'<circle cx="{right}" cy="{at:.0f}" r="3.5" fill="{colour}"/>'
                f'<text x="{right + 10}" y="{at + 4:.0f}" fill="{colour}"><title>{html.escape(label)}</title>'
                f"{html.escape(shown)}</text>"
            )
        y += tall + step
    return "\n".join([*parts, "</svg>"])
