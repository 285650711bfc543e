#!/usr/bin/env python3
"""Compare the network's part of a preflight with what was broken; print what differs, and fail if anything does.

Standard input is a JSON object: `folder` (of the report), `whole` (whether the playbook judged the hosts too), `shown`
(what it printed), `found` (a list of {check, nodes, targets, measured, cause, remedy}, regular expressions for the last
three, `status` where it is not `fail`), `besides` (checks that the fault may or may not make fail as well), `tested`
(how many directions have to be open at all their ports) and `family` (that the cluster speaks).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any


def key(finding: dict[str, Any]) -> tuple[str, ...]:
    return finding["check"], *finding["nodes"], "->", *finding.get("targets", [])


def differences(given: dict[str, Any]) -> list[str]:
    folder = Path(given["folder"])
    report = json.loads((folder / "network.json").read_text(encoding="utf-8"))
    found = {key(finding): finding for finding in report["findings"]}
    wanted = {key(item): item for item in given["found"]}
    result = [f"{' '.join(name)}: was not found" for name in wanted.keys() - found.keys()]
    result += [
        f"{' '.join(name)}: nobody broke it: {found[name]}"
        for name in found.keys() - wanted.keys()
        if name[0] not in given.get("besides", [])
    ]
    for name in found.keys() & wanted.keys():
        finding, item = found[name], {"status": "fail", "cause": "", "remedy": "", **wanted[name]}
        result += [
            f"{' '.join(name)}: {part} is {finding[part]!r}, not {item[part]!r}"
            for part in ("status", "measured", "cause", "remedy")
            if not re.search(item[part], finding[part])
        ]
        line = f"{finding['status'].upper()} {finding['check']}.* on {', '.join(finding['nodes'])}"
        line += f" -> {', '.join(finding['targets'])}" if finding["targets"] else ""
        if not re.search(rf"{line}\n\s+measured: {re.escape(finding['measured'])}", given["shown"]):
            result.append(f"{' '.join(name)}: the table does not tell it")
    cells = [cell for row in report["matrix"].values() for cell in row.values()]
    if given.get("tested") is not None:
        clean = sum(cell.get("tried", 0) > 0 and cell["open"] == cell["tried"] for cell in cells)
        if clean != given["tested"]:
            result.append(f"{clean} directions are open at all their ports, not {given['tested']}: {report['matrix']}")
    family = next(check["measured"] for check in report["checks"] if check["id"] == "net_family")
    if family != given.get("family", family):
        result.append(f"the nodes were tested by {family}, not {given['family']}")
    verdict = "fail" if any(item.get("status", "fail") == "fail" for item in wanted.values()) else None
    verdict = verdict or ("warn" if wanted else "pass")
    if report["verdict"] != verdict:
        result.append(f"the verdict is {report['verdict']}, not {verdict}")
    if given["whole"]:
        same = json.loads((folder / "preflight.json").read_text(encoding="utf-8"))["network"]
        if same["findings"] != report["findings"]:
            result.append("preflight.json and network.json are not of one run")
    return result


def main() -> int:
    result = differences(json.load(sys.stdin))
    print("\n".join(result))
    return 1 if result else 0


if __name__ == "__main__":
    sys.exit(main())
