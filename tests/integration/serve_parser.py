#!/usr/bin/env python3
"""Holds the flag tables and rendered command lines against the argument parser of an installed vLLM.

Run with the Python of that vLLM, since it imports the parser itself:

  serve_parser.py CASES.json     {"flags": {...}, "argvs": [[...], ...]}, as serve_cases.py writes it

Prints what differs, one line each, and ends with 1 if anything does.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

# The parser of a CUDA build works on a machine without GPUs only like this.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse(top, argv):
    """The parser's complaint about an argument list, or None."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            top.parse_args(["serve", *argv])
    except SystemExit:
        return complaint.getvalue().strip().rsplit("\n", 1)[-1]
    return None


def flag_problems(top, actions, flags):
    for name, entry in flags.items():
        action = actions.get(name)
        if action is None:
            yield f"{name}: the parser does not know it"
            continue
        kind = "switch" if action.nargs == 0 else "list" if action.nargs in ("+", "*") else "value"
        if kind != entry["kind"]:
            yield f"{name}: is a {kind} for the parser, a {entry['kind']} in the table"
        for alias in entry.get("aliases", ()):
            if actions.get(alias) is not action:
                yield f"{alias}: the parser does not know it as {name}"
        if "off" in entry:
            complaint = parse(top, ["model", entry["off"]])
            if complaint:
                yield f"{entry['off']}: {complaint}"
    known = {spelling for name, entry in flags.items() for spelling in (name, *entry.get("aliases", ()))}
    known |= {entry["off"] for entry in flags.values() if "off" in entry}
    for action in dict.fromkeys(actions.values()):
        if action.dest != "help" and not known & set(action.option_strings):
            yield f"{action.option_strings[0]}: missing in the table"


def argv_problems(top, actions, argvs):
    for argv in argvs:
        complaint = parse(top, argv)
        if complaint:
            yield f"{' '.join(argv)}: {complaint}"
        # argparse takes abbreviations, which a later version may read as another flag.
        for word in argv:
            if word.startswith("--") and word not in actions and not word.startswith("--no-"):
                yield f"{word}: no whole name of a flag"


def main():
    cases = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    top = FlexibleArgumentParser(prog="vllm")
    serve = cmd_init()[0].subparser_init(top.add_subparsers(dest="subparser"))
    actions = serve._option_string_actions
    problems = [*flag_problems(top, actions, cases["flags"]), *argv_problems(top, actions, cases["argvs"])]
    for problem in problems:
        print(problem)
    print(f"{len(cases['flags'])} flags and {len(cases['argvs'])} command lines held against the parser")
    return 1 if problems or not cases["argvs"] else 0


if __name__ == "__main__":
    sys.exit(main())
