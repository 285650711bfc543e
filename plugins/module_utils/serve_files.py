#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve files of one folder over HTTP, read-only, also while they arrive: how a node hands on what it receives.

A file that arrives is `<name>.part`; all that is in it has been verified by whoever writes it. A question for bytes
that are not there yet waits a little and is then told to ask again (503), which says that this node is alive.

Ends by itself when nobody has asked for a while. Standard library only; systemd sandboxes it and limits its life.
"""
# Plain os calls, as in the modules.
# ruff: noqa: PTH118, PTH123

from __future__ import annotations

import argparse
import http.server
import os
import re
import socket
import sys
import threading
import time
import urllib.parse

# How often it looks for bytes that have not arrived yet, in seconds.
LOOK = 0.02


class Activity:
    """When somebody last asked, and who is being answered."""

    def __init__(self):
        self.lock = threading.Lock()
        self.active = 0
        self.last = time.monotonic()

    def change(self, step):
        with self.lock:
            self.active += step
            self.last = time.monotonic()

    def idle(self):
        with self.lock:
            return 0.0 if self.active else time.monotonic() - self.last


def parse_range(header):
    """(first byte, last byte or None) of `bytes=N-` or `bytes=N-M`; None for the whole file."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", (header or "").strip())
    if not match:
        return None
    return int(match[1]), int(match[2]) if match[2] else None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = True

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)[1:]
        if name not in self.server.names:
            self.empty(404)  # a scanner does not keep the server alive
            return
        self.server.activity.change(1)
        try:
            self.send_file(name, body)
        finally:
            self.server.activity.change(-1)

    def empty(self, status, *headers):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def find(self, name, last):
        """(open file, its size, whether it is complete) once it holds the byte `last`; None when it takes too long.

        A file that may not be read is a PermissionError: that does not change by waiting.
        """
        path = os.path.join(self.server.folder, name)
        deadline = time.monotonic() + self.server.patience
        while True:
            # The whole file first: who writes takes a wrong one away before its new part begins, so a part beside it
            # is the leftover of a killed run, which never grows.
            for candidate, whole in ((path, True), (f"{path}.part", False)):
                try:
                    stream = open(candidate, "rb")  # noqa: SIM115 - closed by whoever gets it
                except PermissionError:
                    raise
                except OSError:
                    continue
                size = os.fstat(stream.fileno()).st_size
                if whole or (last is not None and last < size):
                    return stream, size, whole
                stream.close()
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK)

    def send_file(self, name, body):
        asked = parse_range(self.headers.get("Range"))
        try:
            found = self.find(name, asked[1] if asked else None)
        except PermissionError:
            self.empty(403)
            return
        if found is None:
            self.empty(503, ("Retry-After", "0"))
            return
        stream, size, whole = found
        with stream:
            first, last = asked or (0, None)
            last = size - 1 if last is None else min(last, size - 1)
            if asked and first > last:
                self.empty(416, ("Content-Range", f"bytes */{size}"))
                return
            self.send_response(206 if asked else 200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size if whole else '*'}")
            self.end_headers()
            if body and last >= first:
                self.wfile.flush()
                if self.send_bytes(stream, first, last - first + 1) < last - first + 1:
                    self.close_connection = True  # the file was taken away

    def send_bytes(self, stream, first, length):
        return self.connection.sendfile(stream, first, length)  # the kernel copies: it costs no processor time here

    def log_message(self, format, *args):
        """A line for each piece would fill the journal."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address, folder, names, handler=Handler, patience=5.0):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.folder = folder
        self.names = frozenset(names)
        self.patience = patience
        self.activity = Activity()
        super().__init__(address, handler)

    def server_bind(self):
        """Without the look-up of the own name, which waits for a name server that may not be there."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request, client_address):
        """A client that hangs up resumes later: one line, no trace."""
        print(f"{client_address}: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


def tell_systemd(text):
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(text.encode(), f"\0{path[1:]}" if path.startswith("@") else path)


def main():
    parser = argparse.ArgumentParser(description="Serve files of one folder over HTTP, read-only.")
    parser.add_argument("folder")
    parser.add_argument("names", nargs="+", metavar="name", help="file in the folder, there or still to arrive")
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--idle", type=float, default=300, help="end when nobody asked for this many seconds")
    args = parser.parse_args()
    try:
        server = Server((args.address, args.port), args.folder, args.names)
    except OSError as error:
        print(f"cannot listen on {args.address}, port {args.port}: {error.strerror}", file=sys.stderr)
        return 1
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"serving {len(args.names)} files of {args.folder} on {args.address}:{server.server_port}", flush=True)
    tell_systemd("READY=1")
    while server.activity.idle() < args.idle:
        time.sleep(min(1.0, args.idle))
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
