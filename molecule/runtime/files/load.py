#!/usr/bin/env python3
"""Ask URLs again and again until the file STOP exists, and say how often each failed: load.py STOP URL...

Standard library only.
"""

from __future__ import annotations

import http.client
import json
import pathlib
import sys
import threading
import time
import urllib.request

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
BODY = json.dumps({"model": "any", "prompt": "hi", "max_tokens": 1}).encode()


def ask(url: str, stop: pathlib.Path, result: dict[str, object]) -> None:
    texts: list[str] = []
    failed, asked, longest = 0, 0, 0.0
    down_since: float | None = None
    while not stop.exists():
        asked += 1
        request = urllib.request.Request(  # noqa: S310 - an address of the lab
            f"{url}/v1/completions", BODY, {"Content-Type": "application/json"}
        )
        try:
            with OPENER.open(request, timeout=5) as answer:
                text = json.load(answer)["choices"][0]["text"]
            if text not in texts[-1:]:
                texts.append(text)
            down_since = None
        except (OSError, ValueError, http.client.HTTPException):  # whichever way it was cut off
            failed += 1
            down_since = down_since or time.monotonic()
            longest = max(longest, time.monotonic() - down_since)
        time.sleep(0.1)
    result[url] = {"asked": asked, "failed": failed, "longest_gap": round(longest, 1), "texts": texts}


def main() -> None:
    stop, result = pathlib.Path(sys.argv[1]), {}
    threads = [threading.Thread(target=ask, args=(url, stop, result)) for url in sys.argv[2:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
