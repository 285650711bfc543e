"""Files from node to node over the loopback interface: the real server, the real client, sources that fail."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.module_utils import fanout, serve_files

PIECE = 64 << 10
NAME = "0123.tar.zst"
CONTENT = os.urandom(20 * PIECE + 17)
ENTRY: dict = {}
FAST = {"timeout": 1.0, "starve": 1.5, "grace": 0.0, "rounds": 2, "pause": 0.01}


@pytest.fixture(scope="module", autouse=True)
def entry(tmp_path_factory):
    path = tmp_path_factory.mktemp("entry") / NAME
    path.write_bytes(CONTENT)
    ENTRY.update(fanout.describe(str(path), NAME, PIECE))


class Node:
    """A folder with a server, as a node has it."""

    def __init__(self, folder, names, handler=serve_files.Handler, address="127.0.0.1", patience=0.2):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        self.asked = []
        node = self

        class Counting(handler):
            def answer(self, body):
                node.asked.append((self.path, self.headers.get("Range")))
                super().answer(body)

        self.server = serve_files.Server((address, 0), str(self.folder), names, Counting, patience)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.url = fanout.base_url(address, self.server.server_port)
        self.log = []

    def stop(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()

    def fetch(self, sources, files=None, **options):
        return fanout.fetch(files or [ENTRY], sources, str(self.folder), self.log.append, **{**FAST, **options})

    def content(self, name=NAME):
        return (self.folder / name).read_bytes()


@pytest.fixture
def node(tmp_path):
    """Makes nodes, and ends their servers."""
    nodes = []

    def make(names=(NAME,), content=None, **options):
        made = Node(tmp_path / f"node{len(nodes)}", names, **options)
        nodes.append(made)
        if content is not None:
            (made.folder / NAME).write_bytes(content)
        return made

    yield make
    for made in nodes:
        made.stop()


def ask(url, **headers):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers))  # noqa: S310 - loopback


def in_background(function, *arguments, **options):
    """A thread, and the list into which its result or error goes."""
    results = []

    def work():
        try:
            results.append(function(*arguments, **options))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, results


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


# ---------------------------------------------------------------- what is sent


def test_a_file_is_described_by_digests_that_fit_its_bytes(tmp_path):
    assert ENTRY["size"] == len(CONTENT)
    assert ENTRY["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    cut = [CONTENT[first : first + PIECE] for first in range(0, len(CONTENT), PIECE)]
    assert ENTRY["pieces"] == [hashlib.sha256(piece).hexdigest() for piece in cut]
    digests = fanout.Digests(PIECE)
    for first in range(0, len(CONTENT), 1000):  # blocks that no piece is a multiple of
        digests.update(CONTENT[first : first + 1000])
    assert digests.entry(NAME) == ENTRY
    (tmp_path / "empty").write_bytes(b"")
    assert fanout.describe(str(tmp_path / "empty"), "empty")["pieces"] == []


@pytest.mark.parametrize(("size", "mib"), [(0, 1), (1 << 29, 1), (2_500_000_000, 8), (5 << 30, 16), (10**12, 64)])
def test_pieces_are_small_for_a_short_chain_and_few_for_a_large_file(size, mib):
    assert fanout.piece_size(size) == mib << 20


# ---------------------------------------------------------------- the server


def test_only_the_given_names_are_served(node):
    builder = node(content=CONTENT)
    (builder.folder / "other").write_text("x")
    for other in ("", "other", "../0123.tar.zst", f"{NAME}/x", f"./{NAME}", "%2e%2e/node0/other"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(builder.url + other)
        assert caught.value.code == 404, other


@pytest.mark.parametrize(
    ("header", "status", "body"),
    [
        (None, 200, CONTENT),
        ("bytes=0-", 206, CONTENT),
        ("bytes=100-", 206, CONTENT[100:]),
        ("bytes=5-9", 206, CONTENT[5:10]),
        (f"bytes={len(CONTENT) - 3}-{len(CONTENT) + 9}", 206, CONTENT[-3:]),
        ("lines=1-2", 200, CONTENT),
    ],
    ids=["none", "from 0", "from 100", "5 bytes", "beyond the end", "no range"],
)
def test_ranges(node, header, status, body):
    builder = node(content=CONTENT)
    with ask(builder.url + NAME, **({"Range": header} if header else {})) as answer:
        assert answer.status == status
        assert answer.read() == body
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(builder.url + NAME, Range=f"bytes={len(CONTENT)}-")
    assert caught.value.code == 416


def test_bytes_that_are_not_there_yet_are_waited_for_and_then_promised(node):
    parent = node(patience=0.3)
    partial = parent.folder / f"{NAME}.part"
    partial.write_bytes(CONTENT[:10])
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(parent.url + NAME, Range="bytes=5-19")
    assert caught.value.code == 503
    timer = threading.Timer(0.1, lambda: partial.write_bytes(CONTENT[:20]))
    timer.start()
    with ask(parent.url + NAME, Range="bytes=5-19") as answer:
        assert answer.read() == CONTENT[5:20]
        assert answer.headers["Content-Range"] == "bytes 5-19/*"
    timer.join()


@pytest.mark.alone
def test_a_file_that_may_not_be_read_is_refused_at_once(node, monkeypatch):
    parent = node(content=CONTENT, patience=5.0)

    def forbidden(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(serve_files, "open", forbidden, raising=False)
    started = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(parent.url + NAME, Range="bytes=0-9")
    assert caught.value.code == 403
    assert time.monotonic() - started < 2


def test_a_source_that_answers_at_once_that_it_waits_is_not_flooded(node):
    parent = node(patience=0.0)
    with pytest.raises(fanout.FanoutError, match="nothing new"):
        node().fetch([parent.url], starve=0.5, rounds=1)
    assert len(parent.asked) < 20


def test_what_a_killed_run_left_does_not_hide_the_whole_file(node):
    parent = node(content=CONTENT)
    (parent.folder / f"{NAME}.part").write_bytes(b"old" * 10)
    with ask(parent.url + NAME, Range="bytes=5-99") as answer:
        assert answer.read() == CONTENT[5:100]
    child = node()
    child.fetch([parent.url])
    assert child.content() == CONTENT
    parent.fetch([])
    assert not (parent.folder / f"{NAME}.part").exists()


def test_a_file_that_is_wrong_is_away_before_its_part_is_there(node):
    """Which is why the server may take a whole file for the right one."""
    parent, child = node(content=CONTENT), node(content=b"old" * 100)
    seen = []

    class Looking:
        @staticmethod
        def append(_text):
            seen.append((child.folder / NAME).exists() and (child.folder / f"{NAME}.part").exists())

    child.log = Looking
    (child.folder / f"{NAME}.unproven").write_bytes(CONTENT[:PIECE])
    child.fetch([parent.url])
    assert len(seen) == 2
    assert not any(seen)
    assert child.content() == CONTENT


def test_the_server_ends_when_nobody_asks(tmp_path):
    (tmp_path / NAME).write_bytes(b"x")
    command = [sys.executable, "-I", serve_files.__file__, "--address=127.0.0.1", "--port=0", "--idle=0.3", "--"]
    done = subprocess.run([*command, str(tmp_path), NAME, "sub/two"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"serving 2 files of {tmp_path} on 127.0.0.1:")


def test_who_asks_for_something_else_keeps_no_server_alive(node):
    parent = node(content=CONTENT)
    activity = parent.server.activity
    before = activity.last
    with pytest.raises(urllib.error.HTTPError):
        ask(parent.url + "other")
    assert activity.last == before
    with ask(parent.url + NAME) as answer:
        answer.read()
    assert activity.last > before


def test_a_port_that_is_taken_is_told_in_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-I", serve_files.__file__, "--address=127.0.0.1", f"--port={port}", "--"]
        done = subprocess.run([*command, str(tmp_path), NAME], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert done.stderr == f"cannot listen on 127.0.0.1, port {port}: Address already in use\n"


def test_the_unit_of_the_server(tmp_path, monkeypatch):
    """What systemd is asked for, and what is said when it refuses."""
    calls = []
    answers = {"systemd-run": (0, "", "")}

    def call(command, timeout):
        calls.append(command)
        return answers.get(command[0], (0, "cannot listen on x: Address already in use\n", ""))

    monkeypatch.setattr(fanout, "PROGRAM", str(tmp_path / "libexec" / "serve-files"))
    monkeypatch.setattr(fanout.program, "call", call)
    assert fanout.serve("unit", "/srv/x", ["a", "$HOME"], "fd00::1", 8790, lifetime=9) == "http://[fd00::1]:8790/"
    stop, run = calls
    assert stop == ["systemctl", "stop", "unit"]
    assert {"--unit=unit", "--collect", "--property=DynamicUser=yes", "--property=RuntimeMaxSec=9"} <= set(run)
    assert run[-3:] == ["/srv/x", "a", "$$HOME"]
    assert "--idle=9" in run, "it waits for its whole life, unless told otherwise"
    fanout.serve("unit", "/srv/x", ["a"], "10.0.0.1", 8790, lifetime=9, idle=5)
    assert "--idle=5" in calls[-1]
    del calls[2:]
    program = tmp_path / "libexec" / "serve-files"
    assert program.read_text() == Path(serve_files.__file__).read_text()
    assert program.stat().st_mode & 0o777 == 0o755
    before = program.stat().st_ino
    answers["systemd-run"] = (1, "", "Job for unit failed.")
    with pytest.raises(
        fanout.FanoutError, match=r"unit does not run on .*: cannot listen on x: .*\. Either .* port 8790"
    ):
        fanout.serve("unit", "/srv/x", ["a"], "10.0.0.1", 8790)
    assert program.stat().st_ino == before, "what is there already is not written again"


def test_the_server_tells_systemd_that_it_listens(tmp_path):
    (tmp_path / NAME).write_bytes(b"x")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(20)
        command = [sys.executable, "-I", serve_files.__file__, "--address=127.0.0.1", "--port=0", "--idle=0.1", "--"]
        with subprocess.Popen(
            [*command, str(tmp_path), NAME],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
            stdout=subprocess.DEVNULL,
        ):
            assert notify.recv(100) == b"READY=1"


# ---------------------------------------------------------------- the client


def test_a_file_is_fetched_whole_and_readable(node):
    builder, child = node(content=CONTENT), node()
    told = []
    result = child.fetch([builder.url], progress=told.append, interval=0)
    assert child.content() == CONTENT
    assert (child.folder / NAME).stat().st_mode & 0o777 == 0o644
    assert [path.name for path in child.folder.iterdir()] == [NAME]
    assert result["bytes"] == len(CONTENT)
    assert result["by_source"] == {builder.url: len(CONTENT)}
    assert [state["done"] for state in told] == sorted(state["done"] for state in told)
    assert told[-1]["done"] == told[-1]["total"] == len(CONTENT)
    assert told[-1]["eta"] == 0
    assert fanout.progress_text(told[-1]).startswith(f"1.3 MiB of 1.3 MiB ({NAME} from {builder.url}), ")


def test_a_folder_of_files_keeps_its_shape(node):
    names = ["config.json", "empty", "sub/a file with $ and ü", "big"]
    builder, child = node(names), node(names)
    sizes = {"config.json": 700, "empty": 0, "sub/a file with $ and ü": PIECE, "big": 3 * PIECE + 1}
    files = []
    for name, size in sizes.items():
        (builder.folder / name).parent.mkdir(exist_ok=True)
        (builder.folder / name).write_bytes(os.urandom(size))
        files.append(fanout.describe(str(builder.folder / name), name, PIECE))
    child.fetch([builder.url], files)
    for name in names:
        assert child.content(name) == builder.content(name)
    assert child.fetch([closed_port()], files)["bytes"] == 0, "what is there and right is not fetched again"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "a/../../b", ""])
def test_a_name_stays_inside_of_the_folder(node, name):
    builder, child = node(content=CONTENT), node()
    with pytest.raises(fanout.FanoutError, match="no path inside"):
        child.fetch([builder.url], [{**ENTRY, "name": name}])


def test_digests_that_do_not_fit_the_size_are_refused(node):
    with pytest.raises(fanout.FanoutError, match="do not fit"):
        node().fetch([closed_port()], [{**ENTRY, "pieces": ENTRY["pieces"][:-1]}])


def test_a_file_without_digests_of_pieces_is_one_piece(node):
    builder, child = node(content=CONTENT), node()
    child.fetch([builder.url], [{key: ENTRY[key] for key in ("name", "size", "sha256")}])
    assert child.content() == CONTENT
    assert len(builder.asked) == 1


def test_ipv6(node):
    builder, child = node(content=CONTENT, address="::1"), node()
    assert builder.url.startswith("http://[::1]:")
    child.fetch([builder.url])
    assert child.content() == CONTENT


def test_a_file_that_is_wrong_is_replaced_and_not_written_over(node, monkeypatch):
    builder, child = node(content=CONTENT), node(content=CONTENT[:-1] + b"?")
    real = fanout._begin

    def begin(path, pieces, log):
        assert not Path(path).exists(), "it is not handed on while the right one arrives"
        return real(path, pieces, log)

    monkeypatch.setattr(fanout, "_begin", begin)
    with (child.folder / NAME).open("rb") as held:
        child.fetch([builder.url])
        assert held.read()[-1:] == b"?", "whoever has the old file open keeps it"
    assert child.content() == CONTENT


# ---------------------------------------------------------------- resume


def test_a_broken_transfer_goes_on_where_it_stopped(node):
    builder, child = node(content=CONTENT), node()
    (child.folder / f"{NAME}.part").write_bytes(CONTENT[: 7 * PIECE + 5])
    child.fetch([builder.url])
    assert child.content() == CONTENT
    assert builder.asked[0][1] == f"bytes={7 * PIECE}-{8 * PIECE - 1}"


def test_what_lies_in_a_part_is_checked_before_anybody_gets_it(node, monkeypatch):
    builder, child = node(content=CONTENT), node()
    spoilt = bytearray(CONTENT[: 9 * PIECE])
    spoilt[4 * PIECE] ^= 1
    (child.folder / f"{NAME}.part").write_bytes(spoilt)
    seen = []
    real = fanout._verified

    def watched(stream, pieces):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(child.url + NAME, Range="bytes=0-9")
        seen.append(caught.value.code)
        return real(stream, pieces)

    monkeypatch.setattr(fanout, "_verified", watched)
    child.fetch([builder.url])
    assert seen == [503]
    assert child.content() == CONTENT
    assert builder.asked[0][1] == f"bytes={4 * PIECE}-{5 * PIECE - 1}"


@pytest.mark.parametrize("end", [".part", ".unproven"])
def test_root_writes_through_no_link(node, tmp_path, end):
    builder, child = node(content=CONTENT), node()
    victim = tmp_path / "shadow"
    victim.write_text("root:x")
    victim.chmod(0o600)
    (child.folder / f"{NAME}{end}").symlink_to(victim)
    child.fetch([builder.url])
    assert child.content() == CONTENT
    assert not (child.folder / NAME).is_symlink()
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("root:x", 0o600)


def test_a_link_that_comes_later_is_an_error(node, tmp_path, monkeypatch):
    builder, child = node(content=CONTENT), node()
    victim = tmp_path / "shadow"
    victim.write_text("root:x")
    monkeypatch.setattr(fanout, "_begin", lambda path, *_: Path(f"{path}.part").symlink_to(victim) or 0)
    with pytest.raises(OSError, match=NAME):
        child.fetch([builder.url])
    assert victim.read_text() == "root:x"


def test_a_killed_fetch_is_taken_up_again(node, tmp_path):
    """kill -9 in the middle, through a server that is slow enough to be caught in the middle."""

    class Slow(serve_files.Handler):
        def send_bytes(self, stream, first, length):
            time.sleep(0.05)
            return super().send_bytes(stream, first, length)

    builder, child = node(content=CONTENT, handler=Slow), node()
    code = textwrap.dedent(
        """
        import json, sys
        from ansible_collections.ironrack.vllm.plugins.module_utils import fanout
        entry, url, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
        fanout.fetch([entry], [url], folder, print)
        """
    )
    command = [sys.executable, "-c", code, json.dumps(ENTRY), builder.url, str(child.folder)]
    root = Path(__file__).resolve().parents[3] / "collections"
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root)}, stdout=subprocess.DEVNULL)
    partial = child.folder / f"{NAME}.part"
    deadline = time.monotonic() + 30
    while not (partial.exists() and partial.stat().st_size >= 3 * PIECE):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    have = partial.stat().st_size // PIECE
    assert 3 <= have < 20
    before = len(builder.asked)
    child.fetch([builder.url])
    assert child.content() == CONTENT
    assert builder.asked[before][1].startswith(f"bytes={have * PIECE}-")


# ---------------------------------------------------------------- a chain


def test_a_node_hands_on_what_it_still_receives(node):
    """The last node has pieces before the first has all of them."""
    gate = threading.Event()

    class Gated(serve_files.Handler):
        def send_bytes(self, stream, first, length):
            if first >= 10 * PIECE:
                gate.wait(20)
            return super().send_bytes(stream, first, length)

    builder = node(content=CONTENT, handler=Gated)
    first, second = node(), node()
    running = [
        in_background(first.fetch, [builder.url], timeout=30),
        in_background(second.fetch, [first.url, builder.url], starve=30, grace=10),
    ]
    partial = second.folder / f"{NAME}.part"
    deadline = time.monotonic() + 20
    while not (partial.exists() and partial.stat().st_size == 10 * PIECE):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (first.folder / NAME).exists()
    gate.set()
    for thread, _results in running:
        thread.join(30)
    assert first.content() == second.content() == CONTENT
    assert running[1][1][0]["by_source"] == {first.url: len(CONTENT)}


# ---------------------------------------------------------------- sources that fail


def test_a_parent_that_does_not_answer_is_left_for_the_builder(node):
    builder, child = node(content=CONTENT), node()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        result = child.fetch([url, builder.url], timeout=0.3)
    assert child.content() == CONTENT
    assert result["by_source"] == {builder.url: len(CONTENT)}
    assert any(line.startswith(f"{url}: ") and "timed out" in line for line in child.log)


def test_the_first_source_may_come_up_a_little_later(node):
    builder, parent, child = node(content=CONTENT), node(), node()
    port = parent.server.server_port
    parent.stop()
    thread, results = in_background(child.fetch, [parent.url, builder.url], grace=20)
    time.sleep(0.3)
    late = serve_files.Server(("127.0.0.1", port), str(builder.folder), [NAME])
    threading.Thread(target=late.serve_forever, args=(0.02,), daemon=True).start()
    thread.join(20)
    late.shutdown()
    late.server_close()
    assert results[0]["by_source"] == {parent.url: len(CONTENT)}


def test_a_parent_that_never_comes_up_is_left_after_its_grace(node):
    builder, child = node(content=CONTENT), node()
    result = child.fetch([closed_port(), builder.url], grace=0.5)
    assert result["by_source"] == {builder.url: len(CONTENT)}


def test_a_parent_that_dies_in_the_middle_is_left_where_it_stopped(node):
    builder, child = node(content=CONTENT), node()
    parents = []

    class Mortal(serve_files.Handler):
        def send_bytes(self, stream, first, length):
            if first >= 6 * PIECE:
                threading.Thread(target=parents[0].stop).start()
                self.connection.shutdown(socket.SHUT_RDWR)
                return 0
            return super().send_bytes(stream, first, length)

    parents.append(node(content=CONTENT, handler=Mortal))
    result = child.fetch([parents[0].url, builder.url])
    assert child.content() == CONTENT
    assert result["by_source"] == {parents[0].url: 6 * PIECE, builder.url: len(CONTENT) - 6 * PIECE}
    assert builder.asked[0][1].startswith(f"bytes={6 * PIECE}-")


def test_a_wrong_byte_is_named_and_never_handed_on(node):
    spoilt = bytearray(CONTENT)
    spoilt[8 * PIECE + 3] ^= 1
    builder, parent = node(content=CONTENT), node(content=bytes(spoilt))
    child, grandchild = node(), node()
    running = [
        in_background(child.fetch, [parent.url, builder.url]),
        in_background(grandchild.fetch, [child.url, parent.url, builder.url], grace=10, starve=20),
    ]
    for thread, _results in running:
        thread.join(30)
    assert child.content() == grandchild.content() == CONTENT
    (wrong,) = running[0][1][0]["wrong"]
    assert wrong.startswith(f"{parent.url} sent wrong bytes: {8 * PIECE} to {9 * PIECE - 1} of {NAME} have the sha256 ")
    assert f"not {ENTRY['pieces'][8]}" in wrong
    assert running[1][1][0]["wrong"] == []
    assert running[1][1][0]["by_source"] == {child.url: len(CONTENT)}


def test_wrong_bytes_from_everybody_are_an_error_that_names_them(node):
    spoilt = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    one, two, child = node(content=spoilt), node(content=spoilt), node()
    with pytest.raises(fanout.FanoutError) as caught:
        child.fetch([one.url, two.url])
    for source in (one, two):
        assert f"{source.url}: wrong bytes: {20 * PIECE} to {len(CONTENT) - 1} of {NAME}" in str(caught.value)
    assert not (child.folder / NAME).exists()
    assert (child.folder / f"{NAME}.part").stat().st_size == 20 * PIECE, "what was right stays for the next run"


def test_a_parent_that_has_nothing_new_is_left_in_the_end(node):
    """It is alive, but its own fetch hangs: no deadlock."""
    builder, parent, child = node(content=CONTENT), node(patience=0.1), node()
    (parent.folder / f"{NAME}.part").write_bytes(CONTENT[: 5 * PIECE])
    result = child.fetch([parent.url, builder.url], starve=0.5)
    assert child.content() == CONTENT
    assert result["by_source"] == {parent.url: 5 * PIECE, builder.url: len(CONTENT) - 5 * PIECE}
    assert any("has had nothing new" in line for line in child.log)


def test_a_node_that_joins_later_takes_from_one_that_is_done(node):
    builder, done, late = node(content=CONTENT), node(), node()
    done.fetch([builder.url])
    builder.stop()
    assert late.fetch([done.url, builder.url])["by_source"] == {done.url: len(CONTENT)}


def test_fewer_forks_than_nodes_do_not_block(node):
    """One at a time, in the order of the chain: each takes from one that is done."""
    builder = node(content=CONTENT)
    before = builder
    for _ in range(4):
        child = node()
        assert child.fetch([before.url, builder.url], grace=5)["by_source"] == {before.url: len(CONTENT)}
        before = child


def test_with_no_source_the_error_says_what_each_did(node):
    urls = [closed_port(), closed_port()]
    with pytest.raises(fanout.FanoutError) as caught:
        node().fetch(urls)
    text = str(caught.value)
    assert NAME in text
    assert all(f"{url}: ConnectionRefusedError" in text for url in urls)
    with pytest.raises(fanout.FanoutError, match="no node to fetch it from"):
        node().fetch([])


def test_a_connection_that_the_server_closed_is_opened_again(node):
    """A file may take longer to write than a server holds a silent connection."""

    class Short(serve_files.Handler):
        def answer(self, body):
            super().answer(body)
            self.close_connection = True  # without telling

    builder, child = node(content=CONTENT, handler=Short), node()
    child.fetch([builder.url])
    assert child.content() == CONTENT
    assert child.log == []


def test_no_proxy_is_asked(node, monkeypatch):
    builder, child = node(content=CONTENT), node()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, closed_port())
    child.fetch([builder.url])
    assert child.content() == CONTENT


# ---------------------------------------------------------------- a full disk


def test_a_full_disk_is_an_error_and_leaves_room(node, monkeypatch):
    builder, child = node(content=CONTENT), node()
    real = fanout._keep
    calls = []

    def full(stream, view, digest):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(stream, view, digest)

    monkeypatch.setattr(fanout, "_keep", full)
    with pytest.raises(OSError, match="No space left") as caught:
        child.fetch([builder.url])
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(child.folder / f"{NAME}.part")
    assert list(child.folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount of its own")
def test_a_file_system_that_fills_up(node, tmp_path):
    """The same on a real file system of 1 MiB, in a mount namespace of its own."""
    builder = node(content=CONTENT)
    code = textwrap.dedent(
        """
        import json, os, sys
        from ansible_collections.ironrack.vllm.plugins.module_utils import fanout
        try:
            fanout.fetch([json.loads(sys.argv[1])], [sys.argv[2]], sys.argv[3], print)
        except OSError as error:
            print(error.errno, error.filename, os.listdir(sys.argv[3]))
        """
    )
    folder = tmp_path / "small"
    folder.mkdir()
    root = Path(__file__).resolve().parents[3] / "collections"
    mounted = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    command = [sys.executable, "-c", code, json.dumps(ENTRY), builder.url, str(folder)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, str(folder), *command],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "permission denied" in done.stderr:
        pytest.skip("no mounts here")
    assert done.stdout.splitlines()[-1] == f"{errno.ENOSPC} {folder / NAME}.part []", done.stderr


def test_a_parent_whose_file_is_taken_away_is_left(node):
    """What a full disk does to the nodes behind it."""
    builder, parent, child = node(content=CONTENT), node(patience=0.1), node()
    partial = parent.folder / f"{NAME}.part"
    partial.write_bytes(CONTENT[: 5 * PIECE])
    removed = threading.Timer(0.3, partial.unlink)
    removed.start()
    result = child.fetch([parent.url, builder.url], starve=1)
    removed.join()
    assert child.content() == CONTENT
    assert result["by_source"][builder.url] == len(CONTENT) - 5 * PIECE
