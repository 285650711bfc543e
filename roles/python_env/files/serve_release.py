#!/usr/bin/env python3
"""Serve one file over HTTP, read-only, with ranges: how the other nodes get a release from its builder.

Ends by itself when nobody has asked for a while. Standard library only; systemd sandboxes it and limits its life.
"""

from __future__ import annotations

import argparse
import http.server
import pathlib
import re
import socket
import sys
import threading
import time


class Activity:
    """When somebody last asked, and who is being answered."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active = 0
        self.last = time.monotonic()

    def change(self, step: int) -> None:
        with self.lock:
            self.active += step
            self.last = time.monotonic()

    def idle(self) -> float:
        with self.lock:
            return 0.0 if self.active else time.monotonic() - self.last


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(first byte, bytes) of `bytes=N-` or `bytes=N-M`; the whole file without a range; None when it does not fit."""
    if not header:
        return 0, size
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", header.strip())
    if not match:
        return 0, size
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    return (first, last - first + 1) if first <= last else None


def handler(path: pathlib.Path, activity: Activity) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            if self.path != f"/{path.name}":
                self.send_error(404)
                return
            activity.change(1)
            try:
                self.send_file(body)
            finally:
                activity.change(-1)

        def send_file(self, body: bool) -> None:
            size = path.stat().st_size
            part = parse_range(self.headers.get("Range"), size)
            if part is None:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            first, length = part
            partial = length != size
            self.send_response(206 if partial else 200)
            self.send_header("Content-Type", "application/zstd")
            self.send_header("Content-Length", str(length))
            self.send_header("Accept-Ranges", "bytes")
            if partial:
                self.send_header("Content-Range", f"bytes {first}-{first + length - 1}/{size}")
            self.end_headers()
            if not body:
                return
            self.wfile.flush()
            with path.open("rb") as stream:
                self.connection.sendfile(stream, first, length)  # the kernel copies: many nodes cost no CPU here

    return Handler


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up resumes later: one line, no trace."""
        print(f"{client_address}: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


class Server6(Server):
    address_family = socket.AF_INET6


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve one file over HTTP, read-only.")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--idle", type=float, default=120, help="end when nobody asked for this many seconds")
    args = parser.parse_args()
    activity = Activity()
    kind = Server6 if ":" in args.address else Server
    server = kind((args.address, args.port), handler(args.file, activity))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"serving {args.file} on {args.address}:{server.server_address[1]}", flush=True)
    while activity.idle() < args.idle:
        time.sleep(min(1.0, args.idle))
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
