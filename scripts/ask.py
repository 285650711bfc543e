#!/usr/bin/env python3
"""Ask the lab's OpenAI endpoint for a completion and print the command that does the same."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
API_PORT = 8000


def lab_url() -> str:
    """The lab's gate to the endpoint: as the lab in LAB_DIR declares it, otherwise as inventories/lab would."""
    try:
        declared = json.loads(
            (Path(os.environ.get("LAB_DIR") or ROOT / ".lab") / "lab.json").read_text(encoding="utf-8")
        )
        doors = [door for node in declared["nodes"] for door in node["forwards"] if door["port"] == API_PORT]
        return f"http://{doors[0]['listen']}"
    except (OSError, ValueError, LookupError, TypeError):
        return f"http://{os.environ.get('LAB_LOOPBACK') or '127.77.1'}.12:18000"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The scheduler places each worker")
    parser.add_argument("--url", default=lab_url())
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()

    endpoint = f"{args.url}/v1/completions"
    body = json.dumps({"model": args.model, "prompt": args.prompt, "max_tokens": args.max_tokens, "temperature": 0})
    request = urllib.request.Request(endpoint, body.encode(), {"Content-Type": "application/json"})  # noqa: S310 (http, loopback)
    # A proxy of the user's shell must not see a request to loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as response:
            answer = json.load(response)
    except (urllib.error.URLError, TimeoutError) as error:
        print(f"error: {endpoint} gave no completion: {error}. Is the lab up? (make lab)", file=sys.stderr)
        return 1
    choice = answer["choices"][0]
    print(f"prompt:      {args.prompt}")
    print(f"completion: {choice['text']}")
    print(f"model {answer['model']}, {answer['usage']['completion_tokens']} tokens, {answer.get('system_fingerprint')}")
    print("(the lab's model has random weights: the text is reproducible, not sensible)\n")
    print("Ask again:")
    print(f"  curl {endpoint} -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    print('  make ask PROMPT="..."          and when you are done: make lab-down')
    return 0


if __name__ == "__main__":
    sys.exit(main())
