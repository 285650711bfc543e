"""A model hub for tests: speaks the hub's HTTP API over files that a test made, and misbehaves when asked to.

    python hub.py FOLDER --port 8800       # FOLDER/<org>/<name>/<revision>/<file>

A stand-in for huggingface.co. What it answers was written after what huggingface_hub asks and how it reads the answers:
model information with the files' sizes and hashes, files by `resolve` with ETag, X-Linked-Etag, X-Linked-Size and
X-Repo-Commit, a redirect to another place for files in LFS, ranges, and the errors with X-Error-Code. `faults.json` in
FOLDER, read at each request, makes it fail:

    {"gated": true, "token": "hf_x", "limit": {"count": 2, "after": 1}, "cut": {"model-1.safetensors": 1000},
     "wrong": ["model-2.safetensors"], "slow": 1000000, "told": {"config.json": {"blobId": null}}, "sha": "<commit>",
     "echo": true}
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

LFS_FROM = 1024
BLOCK = 65536


def commit_of(folder: Path) -> str:
    """The commit of a revision: its name where it is one, otherwise one made of the content's names."""
    if re.fullmatch(r"[0-9a-f]{40}", folder.name):
        return folder.name
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return hashlib.sha1(json.dumps([folder.name, *names]).encode(), usedforsecurity=False).hexdigest()


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class State:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.limited = 0
        self.content_port = 0
        self.cut: set[str] = set()
        self.requests: list[dict[str, Any]] = []

    @property
    def faults(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.root / "faults.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def folder(self, repo: str, revision: str) -> Path | None:
        """The revision by its name or by its commit."""
        base = self.root / repo
        if not base.is_dir():
            return None
        return next((each for each in base.iterdir() if revision in (each.name, commit_of(each))), None)


def handler(state: State) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are recorded, not printed."""

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            url = urllib.parse.urlsplit(self.path)
            path = urllib.parse.unquote(url.path)
            with state.lock:
                authorization = self.headers.get("Authorization")
                state.requests.append(
                    {
                        "method": self.command,
                        "path": path,
                        "range": self.headers.get("Range"),
                        "authorized": authorization is not None,
                    }
                )
                record = state.root / "requests.jsonl"
                with record.open("a") as stream:
                    stream.write(json.dumps(state.requests[-1]) + "\n")
            if path.startswith("/cdn/"):
                # As the real one: signed, and no place for the token.
                if authorization:
                    self.fail(400, "", "the token does not belong here")
                elif (state.root / path.removeprefix("/cdn/")).is_file():
                    self.send_file(state.root / path.removeprefix("/cdn/"), body, {})
                else:
                    self.fail(404, "", "no such file")
                return
            if self.limited():
                return
            match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
            if match:
                self.send_info(match[1], match[2] or "main", "blobs" in urllib.parse.parse_qs(url.query))
                return
            match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if match:
                self.resolve(match[1], match[2], match[3], body)
                return
            self.fail(404, "", "no such page")

        def limited(self) -> bool:
            limit = state.faults.get("limit")
            with state.lock:
                if not limit or state.limited >= limit["count"]:
                    return False
                state.limited += 1
            self.fail(429, "", "rate limit", {"Retry-After": str(limit["after"])})
            return True

        def admitted(self, repo: str, revision: str) -> Path | None:
            """The folder of the revision, once the errors that stand before it are answered."""
            faults = state.faults
            given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if faults.get("echo"):
                self.fail(403, "", f"the token {given} may not")
                return None
            if given and "token" in faults and given != faults["token"]:
                self.fail(401, "", "Invalid credentials in Authorization header")
                return None
            if not (state.root / repo).is_dir():
                self.fail(401 if not given else 404, "RepoNotFound", "Repository not found")
                return None
            if faults.get("gated") and (not given or faults["gated"] == "not_accepted"):
                self.fail(
                    403 if given else 401, "GatedRepo", f"Access to model {repo} is restricted. Visit the page to ask."
                )
                return None
            folder = state.folder(repo, revision)
            if folder is None:
                self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return folder

        def send_info(self, repo: str, revision: str, blobs: bool) -> None:
            folder = self.admitted(repo, revision)
            if folder is None:
                return
            siblings = []
            for path in sorted(each for each in folder.rglob("*") if each.is_file()):
                data = path.read_bytes()
                entry: dict[str, Any] = {"rfilename": str(path.relative_to(folder))}
                if blobs:
                    entry |= {"size": len(data), "blobId": git_blob(data)}
                    if len(data) >= LFS_FROM:
                        digest = hashlib.sha256(data).hexdigest()
                        entry |= {"lfs": {"sha256": digest, "size": len(data), "pointerSize": 130}}
                siblings.append(entry | state.faults.get("told", {}).get(entry["rfilename"], {}))
            commit = state.faults.get("sha") or commit_of(folder)
            answer = {"_id": "0", "id": repo, "modelId": repo, "sha": commit, "siblings": siblings}
            answer |= {"private": False, "tags": [], "downloads": 0, "likes": 0}
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def resolve(self, repo: str, revision: str, name: str, body: bool) -> None:
            folder = self.admitted(repo, revision)
            if folder is None:
                return
            path = folder / name
            if not path.is_file():
                self.fail(404, "EntryNotFound", f"{name} does not exist on {revision}")
                return
            data = path.read_bytes()
            headers = {"X-Repo-Commit": commit_of(folder)}
            if len(data) < LFS_FROM:
                self.send_file(path, body, {**headers, "ETag": f'"{git_blob(data)}"'})
                return
            headers |= {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
            self.send_response(302)
            for key, value in headers.items():
                self.send_header(key, value)
            # Another server, as a content network is.
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            target = urllib.parse.quote(str(path.relative_to(state.root)))
            self.send_header("Location", f"http://{host}:{state.content_port}/cdn/{target}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send_file(self, path: Path, body: bool, headers: dict[str, str]) -> None:
            faults = state.faults
            data = path.read_bytes()
            if path.name in faults.get("wrong", ()):
                data = data[:-1] + bytes([data[-1] ^ 1])
            size, first, last = len(data), 0, len(data) - 1
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if match:
                first, last = int(match[1]), min(int(match[2] or last), last)
                if first >= size:
                    self.fail(416, "", "range", {"Content-Range": f"bytes */{size}"})
                    return
            self.send_response(206 if match else 200)
            for key, value in headers.items():
                self.send_header(key, value)
            if match:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            if not body:
                return
            data = data[first : last + 1]
            cut = faults.get("cut", {}).get(path.name)
            with state.lock:
                if cut is not None and path.name not in state.cut:
                    state.cut.add(path.name)
                    data = data[:cut]
                    self.close_connection = True
            slow = faults.get("slow")
            for start in range(0, len(data), BLOCK):
                self.wfile.write(data[start : start + BLOCK])
                if slow:
                    time.sleep(BLOCK / slow)

        def fail(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
            text = json.dumps({"error": message}).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

    return Handler


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed hang up; a test wants them to."""


def serve(root: Path, address: str = "127.0.0.1", port: int = 0) -> tuple[list[Server], State]:
    """The hub and its content server (at the next port), in threads of this process, and what they were asked."""
    state = State(root)
    servers = [Server((address, each), handler(state)) for each in (port, port and port + 1)]
    state.content_port = servers[1].server_address[1]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    return servers, state


def main() -> None:
    parser = argparse.ArgumentParser(description="A model hub for tests.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8800)
    args = parser.parse_args()
    serve(args.folder, args.address, args.port)
    print(f"serving {args.folder} on {args.address}:{args.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
