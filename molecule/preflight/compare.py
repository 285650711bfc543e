#!/usr/bin/env python3
"""Compare a preflight's report and table with what it should have found; print what differs, and fail if anything does.

Standard input is a JSON object: `report` and `first` (paths of this report and of the one before anything was broken),
`shown` (what the playbook printed) and `found` (a list of {check, nodes, measured, remedy} with regular expressions for
the last two, and `status` and `accepted` where they are not `fail` and false).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

# Of the machine below the nodes, and none of this test's.
MACHINE = ("disk_full", "hardware_clock", "swap", "time_sync")


def findings(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    hosts = {
        (node, check["id"]): check
        for node, told in report["nodes"].items()
        for check in told["checks"]
        if check["status"] in ("warn", "fail") and check["id"] not in MACHINE
    }
    return hosts | {
        (node, finding["check"]): finding for finding in report["network"]["findings"] for node in finding["nodes"]
    }


def differences(report: dict[str, Any], first: dict[str, Any], found: list[dict[str, Any]], shown: str) -> list[str]:
    usual = findings(first)
    fresh = {key: check for key, check in findings(report).items() if usual.get(key) != check}
    wanted = {(node, item["check"]): item for item in found for node in item["nodes"]}
    result = [f"{' '.join(key)}: nobody broke it: {fresh[key]}" for key in fresh.keys() - wanted.keys()]
    result += [f"{' '.join(key)}: was not found" for key in wanted.keys() - fresh.keys()]
    for key in fresh.keys() & wanted.keys():
        check, item = fresh[key], {"status": "fail", "accepted": False, **wanted[key]}
        result += [
            f"{' '.join(key)}: {name} is {check[name]!r}, not {item[name]!r}"
            for name in ("status", "accepted", "measured", "remedy")
            if not (re.search(item[name], check[name]) if isinstance(item[name], str) else item[name] == check[name])
        ]
        accepted = r" \(accepted\)" if check["accepted"] else ""
        lines = [
            rf"{check['status'].upper()} {key[1]}( \[.*\])?{accepted} on .*\b{key[0]}\b",
            f"measured: {re.escape(check['measured'])}$",
            f"remedy: +{re.escape(check['remedy'])}$",
        ]
        result += [
            f"{' '.join(key)}: the table has no line {line}"
            for line in lines
            if not re.search(line, shown, re.MULTILINE)
        ]
    fails = any(check["status"] == "fail" for check in findings(report).values())
    expected = {"ok": not fails, "exit_code": 2 if fails else 1 if report["counts"]["warn"] else 0}
    result += [
        f"{name} is {report[name]!r}, not {value!r}" for name, value in expected.items() if report[name] != value
    ]
    return result


def main() -> int:
    given = json.load(sys.stdin)
    report, first = (json.loads(Path(given[name]).read_text(encoding="utf-8")) for name in ("report", "first"))
    result = differences(report, first, given["found"], given["shown"])
    print("\n".join(result))
    return 1 if result else 0


if __name__ == "__main__":
    sys.exit(main())
