#!/usr/bin/env python3
"""Ask the lab's OpenAI endpoint for a completion and print the command that does the same."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import urllib.error
import urllib.request

# The lab's gate: loopback address and port of the API node (inventories/lab/hosts.yml, lab_forwards).
URL = "http://127.77.1.12:18000"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The scheduler places each worker")
    parser.add_argument("--url", default=URL)
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
