"""The archive server on the builder, and the client that fetches from it, over the loopback interface."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.modules import release

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "roles/python_env/files/serve_release.py"
CONTENT = os.urandom(3 * release.CHUNK + 17)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def server_module():
    spec = importlib.util.spec_from_file_location("serve_release", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def served(server_module, tmp_path):
    """(URL of the served file, its path, headers of the requests)."""
    path = tmp_path / "served" / "0123.tar.zst"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    seen = []
    base = server_module.handler(path, server_module.Activity())

    class Handler(base):
        def send_file(self, body):
            seen.append(self.headers.get("Range"))
            super().send_file(body)

        def log_message(self, *args):
            pass

    server = server_module.Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/{path.name}", path, seen
    server.shutdown()
    server.server_close()


def ask(url, **headers):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers))  # noqa: S310 - loopback


def fetch(url, target, digest=DIGEST, **options):
    log = []
    release.download(url, str(target), digest, len(CONTENT), log.append, pause=0.01, **options)
    return log


def test_only_the_one_file_is_served(served):
    url, _path, _seen = served
    for other in ("/", "/other", "/../0123.tar.zst", "/0123.tar.zst/x"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(url.rsplit("/", 1)[0] + other)
        assert caught.value.code == 404


@pytest.mark.parametrize(
    ("header", "status", "body"),
    [
        (None, 200, CONTENT),
        ("bytes=0-", 200, CONTENT),
        ("bytes=100-", 206, CONTENT[100:]),
        ("bytes=5-9", 206, CONTENT[5:10]),
        ("lines=1-2", 200, CONTENT),
    ],
)
def test_ranges(served, header, status, body):
    with ask(served[0], **({"Range": header} if header else {})) as answer:
        assert answer.status == status
        assert answer.read() == body


def test_a_range_behind_the_end_is_refused(served):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(served[0], Range=f"bytes={len(CONTENT)}-")
    assert caught.value.code == 416


def test_a_file_is_fetched_whole_and_readable(served, tmp_path):
    fetch(served[0], tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT
    assert (tmp_path / "got").stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "got.part").exists()


def test_a_broken_transfer_goes_on_where_it_stopped(served, tmp_path):
    (tmp_path / "got.part").write_bytes(CONTENT[: 2 * release.CHUNK])
    fetch(served[0], tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT
    assert served[2] == [f"bytes={2 * release.CHUNK}-"]


def test_a_whole_part_is_only_verified(served, tmp_path):
    (tmp_path / "got.part").write_bytes(CONTENT)
    fetch(served[0], tmp_path / "got")
    assert served[2] == []


def test_a_connection_that_breaks_is_taken_up_again(server_module, tmp_path):
    path = tmp_path / "0123.tar.zst"
    path.write_bytes(CONTENT)
    calls = []
    base = server_module.handler(path, server_module.Activity())

    class Handler(base):
        def send_file(self, body):
            calls.append(self.headers.get("Range"))
            if len(calls) < 3:
                self.send_response(200 if len(calls) == 1 else 206)
                self.send_header("Content-Length", str(len(CONTENT)))
                self.end_headers()
                start = (len(calls) - 1) * release.CHUNK
                self.wfile.write(CONTENT[start : start + release.CHUNK])
                self.close_connection = True
            else:
                super().send_file(body)

        def log_message(self, *args):
            pass

    server = server_module.Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fetch(f"http://127.0.0.1:{server.server_address[1]}/{path.name}", tmp_path / "got")
    server.shutdown()
    server.server_close()
    assert (tmp_path / "got").read_bytes() == CONTENT
    assert calls == [None, f"bytes={release.CHUNK}-", f"bytes={2 * release.CHUNK}-"]


def test_a_damaged_part_is_thrown_away_and_fetched_anew(served, tmp_path):
    (tmp_path / "got.part").write_bytes(b"x" * release.CHUNK)
    log = fetch(served[0], tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == CONTENT
    assert any("instead of" in line for line in log)


def test_a_wrong_file_is_an_error_that_says_what_helps(served, tmp_path):
    with pytest.raises(release.ReleaseError, match=r"sha256 is .* instead of .*python_env_serve_port"):
        fetch(served[0], tmp_path / "got", digest="0" * 64)
    assert not (tmp_path / "got").exists()
    assert not (tmp_path / "got.part").exists()


def test_nobody_there_is_an_error_that_says_what_helps(tmp_path):
    with pytest.raises(release.ReleaseError, match=r"refused.*python_env_serve_port"):
        fetch("http://127.0.0.1:9/0123.tar.zst", tmp_path / "got", attempts=2)


def test_a_full_disk_is_not_tried_again(served, tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(release.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left") as caught:
        fetch(served[0], tmp_path / "got")
    assert caught.value.errno == errno.ENOSPC
    assert len(served[2]) == 1


def test_the_server_ends_by_itself_when_nobody_asks(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    argv = [sys.executable, str(SCRIPT), "--address=127.0.0.1", "--port=0", "--idle=0.3", str(path)]
    started = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert "serving" in done.stdout
    assert time.monotonic() - started < 20
