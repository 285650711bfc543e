#!/usr/bin/python3 -IB
# SPDX-License-Identifier: Apache-2.0
"""Show the releases of this node, and prove that one is still what was built.

  ironrack-release list [--json]
  ironrack-release verify [--release ID] [--quick] [--json]

verify reads every file (with --quick only sizes, times, modes and owners) and ends with 0 when all is as it was built,
with 1 when something is not, and names it, and with 2 when that cannot be told.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time

# The code that the deployment itself uses, put here by it.
sys.path.insert(0, "/usr/local/libexec/ironrack")

import release_tree  # type: ignore[import-not-found]

GIB = 1 << 30


def verify(prefix: str, identity: str, quick: bool, as_json: bool) -> int:
    identity = identity or release_tree.linked(prefix)
    known = ", ".join(item["id"] for item in release_tree.installed(prefix)) or "none"
    root = os.path.join(prefix, "releases", identity)
    started = time.monotonic()
    try:
        if not release_tree.IDENTITY.fullmatch(identity):
            raise release_tree.TreeError(
                f"{identity!r} is no release" if identity else f"{prefix}/current leads to no release"
            )
        findings = release_tree.examine(root, full=not quick)
    except (release_tree.TreeError, OSError) as error:
        if as_json:
            print(json.dumps({"host": socket.gethostname(), "release": identity, "error": str(error)}))
        else:
            print(f"{socket.gethostname()}: {error}. Releases here: {known}.", file=sys.stderr)
        return 2
    seconds = time.monotonic() - started
    if as_json:
        found = findings.report()
        found |= {"host": socket.gethostname(), "release": identity, "quick": quick, "seconds": round(seconds, 2)}
        found |= {"files": findings.files, "bytes": findings.bytes, "bytecode": len(findings.bytecode)}
        print(json.dumps(found))
    else:
        for line in findings.lines():
            print(line)
        verdict = "NOT as built" if findings else "as built"
        how = "sizes, times, modes" if quick else "every byte"
        note = f"; {len(findings.bytecode)} files of bytecode that Python added" if findings.bytecode else ""
        print(
            f"{socket.gethostname()}: release {identity} is {verdict}: {findings.files} files, "
            f"{findings.bytes / GIB:.2f} GiB, {how}, {seconds:.1f} s{note}"
        )
    return 1 if findings else 0


def show(prefix: str, as_json: bool) -> int:
    releases = release_tree.installed(prefix)
    if as_json:
        print(json.dumps(releases))
        return 0
    for item in releases:
        inputs = item["inputs"]
        marks = [name for name in ("current", "previous") if item[name]] + ([] if item["complete"] else ["INCOMPLETE"])
        vllm = (inputs["versions"] or {}).get("vllm", "?")
        print(
            f"{item['id']}  vLLM {vllm}, {inputs['variant']}, Python {inputs['python']}, built {item['built_at']} on "
            f"{item['built_on']}  {' '.join(marks) or '-'}  used by {', '.join(item['in_use_by']) or 'nothing'}"
        )
    if not releases:
        print(f"no release in {prefix}/releases")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("verify", "list"):
        command = commands.add_parser(name)
        command.add_argument("--json", action="store_true", help="one line for programs")
        command.add_argument("--prefix", default="/opt/ironrack", help="folder of the releases (%(default)s)")
        if name == "verify":
            command.add_argument("--release", default="", help="id of the release (the current one)")
            command.add_argument("--quick", action="store_true", help="do not read the files")
    arguments = parser.parse_args()
    if arguments.command == "list":
        return show(arguments.prefix, arguments.json)
    return verify(arguments.prefix, arguments.release, arguments.quick, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
