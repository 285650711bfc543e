#!/usr/bin/env python3
"""The two doors of a closed lab. lab.py starts this in the machine's own mount and network namespaces.

* The proxy listens inside, at every network's gateway address, and fetches from outside: apt by plain http (packages
  and indexes are cached), anything else by CONNECT, and only from the hosts of an allow-list. Asked as a server, it
  hands out the lab's conda channel below /conda.
* The gate listens outside, on loopback addresses, and forwards to ports of the nodes.

A socket belongs to the network namespace in which it was made, whatever its process does later: that is all it takes.
Orders come as JSON on standard input. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401  (needed at the first name lookup; the interpreter's files may be gone by then)
import hashlib
import http.client
import json
import os
import selectors
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

CLONE_NEWNET = 0x40000000
IP_FREEBIND = 15
IPV6_FREEBIND = 78
PACKAGE_DAYS = 30
BAD_ORDERS = 3

_libc = ctypes.CDLL(None, use_errno=True)


def enter_network(descriptor: int) -> None:
    """Move the calling thread, and no other, into a network namespace."""
    if _libc.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy one direction; hand the end of it on, so that half-closed connections work."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def relay(left: socket.socket, right: socket.socket) -> None:
    back = threading.Thread(target=pump, args=(right, left), daemon=True)
    back.start()
    pump(left, right)
    back.join()


def notice_dead_peer(connection: socket.socket) -> None:
    """A node that went away without a word must not leave a client waiting."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, listener: socket.socket, hosts: frozenset[str], cache: Path, channel: Path) -> None:
        super().__init__(listener.getsockname(), ProxyRequest, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.hosts = hosts
        self.cache = cache
        self.channel = channel
        self.files: dict[Path, threading.Lock] = {}
        self.files_guard = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        print(f"proxy {client_address[0]}: {sys.exc_info()[1]!r}", file=sys.stderr)


class ProxyRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120

    @property
    def proxy(self) -> Proxy:
        return cast(Proxy, self.server)

    def log_message(self, format: str, *args: Any) -> None:
        print(f"proxy {self.client_address[0]} {format % args}", file=sys.stderr)

    def refuse(self, code: int, why: str) -> None:
        self.send_response(code, why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not url.scheme and url.path.startswith("/conda/"):
            path = (self.proxy.channel / url.path.removeprefix("/conda/")).resolve()
            found = path.is_relative_to(self.proxy.channel.resolve()) and path.is_file()
            return self.send_file(path) if found else self.refuse(404, f"the lab's channel has no {url.path}")
        if url.scheme != "http" or url.hostname not in self.proxy.hosts:
            return self.refuse(403, f"{url.hostname} is not on the lab's list (lab_proxy_hosts)")
        if not (url.path.endswith((".deb", ".udeb")) or "/by-hash/" in url.path):
            return self.fetch(None)
        path = self.proxy.cache / hashlib.sha256(self.path.encode()).hexdigest()
        with self.proxy.files_guard:
            lock = self.proxy.files.setdefault(path, threading.Lock())
        # One fetch serves all nodes. A client that waited too long fetches for itself: apt gives up after 30 s.
        mine = lock.acquire(timeout=15)
        try:
            if path.exists():
                os.utime(path)
                return self.send_file(path)
            return self.fetch(path if mine else None)
        finally:
            if mine:
                lock.release()

    def send_file(self, path: Path) -> None:
        with path.open("rb") as file:
            self.send_response(200)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def fetch(self, keep: Path | None) -> None:
        """Stream an answer through, and keep a copy where asked to: of a whole answer only."""
        wanted = ("if-modified-since", "if-none-match", "user-agent", "accept")
        headers = {key: value for key, value in self.headers.items() if key.lower() in wanted}
        try:
            answer = urllib.request.urlopen(urllib.request.Request(self.path, headers=headers), timeout=30)  # noqa: S310
        except urllib.error.HTTPError as problem:
            return self.refuse(problem.code, problem.reason)
        except (OSError, http.client.HTTPException) as problem:
            return self.refuse(502, str(problem).splitlines()[0])
        with answer, contextlib.ExitStack() as stack:
            length = answer.headers["Content-Length"]
            self.send_response(200)
            for name in ("Content-Length", "Content-Type", "Last-Modified", "ETag"):
                if value := answer.headers[name]:
                    self.send_header(name, value)
            if length is None:
                self.send_header("Connection", "close")
            self.end_headers()
            copy = None
            if keep and length:
                copy = stack.enter_context(tempfile.NamedTemporaryFile(dir=keep.parent, delete=False))
                stack.callback(Path(copy.name).unlink, missing_ok=True)
            done = 0
            while data := answer.read(1 << 16):
                done += len(data)
                self.wfile.write(data)
                if copy:
                    copy.write(data)
            if length and done != int(length):
                self.close_connection = True
            elif keep and copy:
                copy.flush()
                Path(copy.name).replace(keep)

    def do_CONNECT(self) -> None:
        host, _, port = self.path.rpartition(":")
        if host not in self.proxy.hosts or port != "443":
            return self.refuse(403, f"{host}:{port} is not on the lab's list (lab_proxy_hosts)")
        try:
            upstream = socket.create_connection((host, 443), 30)
        except OSError as problem:
            return self.refuse(502, str(problem))
        with upstream:
            upstream.settimeout(None)
            self.connection.settimeout(None)
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            relay(self.connection, upstream)


def through_gate(client: socket.socket, target: tuple[str, int], inside: int) -> None:
    with client:
        try:
            enter_network(inside)
            node = socket.create_connection(target, 5)
        except OSError:
            # As a closed port would: a reset, not a polite end.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        with node:
            node.settimeout(None)
            notice_dead_peer(node)
            relay(client, node)


def serve_gate(listeners: dict[socket.socket, tuple[str, int]], inside: int) -> NoReturn:
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                listener = cast(socket.socket, key.fileobj)
                with contextlib.suppress(OSError):
                    client, _ = listener.accept()
                    arguments = (client, listeners[listener], inside)
                    threading.Thread(target=through_gate, args=arguments, daemon=True).start()


def listen(address: tuple[str, int]) -> socket.socket:
    six = ":" in address[0]
    listener = socket.socket(socket.AF_INET6 if six else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # A gateway's address comes and goes with its bridge.
    listener.setsockopt(*((socket.IPPROTO_IPV6, IPV6_FREEBIND) if six else (socket.IPPROTO_IP, IP_FREEBIND)), 1)
    try:
        listener.bind(address)
    except OSError as problem:
        raise OSError(problem.errno, f"cannot listen on {address[0]}:{address[1]}: {problem.strerror}") from None
    listener.listen(128)
    return listener


def prune_packages(cache: Path) -> None:
    oldest = time.time() - PACKAGE_DAYS * 86400
    for path in cache.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def main(orders: dict[str, Any]) -> NoReturn:
    state = Path(orders["state"])
    inside, outside = orders["inside"], orders["outside"]
    try:
        gate = {listen(tuple(item["listen"])): tuple(item["target"]) for item in orders["gate"]}
        enter_network(inside)
        inner = [listen((host, port)) for host, port in orders["proxy"]]
        enter_network(outside)
        cache = Path(orders["cache"])
        cache.mkdir(parents=True, exist_ok=True)
        prune_packages(cache)
    except OSError as problem:
        write_atomic(state, orders["bad"].replace("{error}", json.dumps(str(problem.strerror))[1:-1]))
        sys.exit(BAD_ORDERS)
    for listener in inner:
        proxy = Proxy(listener, frozenset(orders["hosts"]), cache, Path(orders["channel"]))
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
    write_atomic(state, orders["good"])
    for descriptor in orders["starting"]:
        os.close(descriptor)
    serve_gate(gate, inside)


if __name__ == "__main__":
    main(json.load(sys.stdin))
