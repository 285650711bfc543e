"""scripts/artifacts.py: what it reads in the roles, and the folder that it fills. In processes of their own."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import artifacts

ROOT = Path(__file__).resolve().parents[3]
DATA = bytes(range(256)) * 2000
PROLOGUE = """
import json, sys
from pathlib import Path
sys.path.insert(0, "{root}/scripts")
import artifacts as program
program.init_plugin_loader()
"""
WANTED = """
inventory = program.Inventory(Path("{root}/inventories/prod"))
print(json.dumps(sorted(entry["name"] for entry in program.wanted_packages(inventory, inventory.hosts(), {{}}))))
"""
FETCH = """
items = list(program.code("plugin_utils.runtime.artifacts").load(Path(sys.argv[1]).read_text(), "x"))
folder = program.Folder(Path(sys.argv[2]), [Path(cache) for cache in sys.argv[3:]])
try:
    items = folder.fetch(items, {{}})
    folder.write_list(items, "prod", program.Report())
    print(json.dumps(folder.check(items)))
except program.Failure as failure:
    print(json.dumps(str(failure)))
"""


def execute(code: str, *arguments: object, root: Path = ROOT) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", (PROLOGUE + code).format(root=root), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "ANSIBLE_CONFIG": str(root / "ansible.cfg")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- what the roles read ------------------------------------------------------------------------------------------


@pytest.fixture(name="project")
def fixture_project(tmp_path: Path) -> Path:
    """A copy of what the list is made from, to be changed."""
    ignore = shutil.ignore_patterns("__pycache__", "README.md")
    for name in ("roles", "plugins", "scripts", "inventories/prod", "meta"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("ansible.cfg", "galaxy.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "collections/ansible_collections/ironrack").mkdir(parents=True)
    (tmp_path / "collections/ansible_collections/ironrack/vllm").symlink_to(tmp_path)
    return tmp_path


def test_a_package_that_is_added_to_a_role_or_a_module_is_in_the_list(project: Path) -> None:
    before = execute(WANTED, root=project)
    assert {"ca-certificates", "chrony", "nftables", "zstd", "python3-apt", "gcc"} <= set(before)

    defaults = project / "roles/base/defaults/main.yml"
    defaults.write_text(defaults.read_text().replace("  - libnuma1\n", "  - libnuma1\n  - added-default\n"))
    private = project / "roles/base/vars/main.yml"
    private.write_text(private.read_text().replace("'libc6-dev'", "'libc6-dev', 'added-private'"))
    tasks = project / "roles/ray/tasks/main.yml"
    added = {"name": "X", "block": [{"name": "Y", "ansible.builtin.apt": {"name": ["added-task"]}}]}
    tasks.write_text(yaml.safe_dump([*yaml.safe_load(tasks.read_text()), added], sort_keys=False))
    module = project / "plugins/modules/release.py"
    module.write_text(module.read_text().replace('COMMANDS = ("tar"', 'COMMANDS = ("added-command", "tar"'))
    inventory = project / "inventories/prod/group_vars/all.yml"
    inventory.write_text(f"{inventory.read_text()}\nbase_acs_off: true\n")

    new = set(execute(WANTED, root=project)) - set(before)
    assert new == {"added-default", "added-private", "added-task", "added-command", "pciutils"}


def test_no_module_installs_packages_that_the_list_does_not_know() -> None:
    """Those that are told what to install by a task are read there."""
    told_by_tasks = {"apt_transaction"}
    installing = {
        path.stem
        for path in (ROOT / "plugins").glob("mod*/*.py")
        if re.search(r"""apt-get["'].*\binstall\b|["']install["'], ["']--yes""", path.read_text("utf-8"))
    }
    known = re.search(r"^MODULE_PACKAGES = (\{.*\})$", (ROOT / "scripts/artifacts.py").read_text(), re.MULTILINE)
    assert known is not None
    assert installing - told_by_tasks == set(json.loads(known[1]))


def test_tasks_of_roles_install_by_the_modules_that_the_list_reads() -> None:
    """By a command or another module they would go unseen."""
    for path in (ROOT / "roles").glob("*/tasks/*.yml"):
        if path.parts[-3] != "lab":
            text = path.read_text("utf-8")
            assert not re.search(r"ansible\.builtin\.(package|dnf|yum|pip|get_url):", text), path
            assert not re.search(r"apt(-get)?[, ]+install\b", text), path


# --- the folder ---------------------------------------------------------------------------------------------------


@pytest.fixture(name="site")
def fixture_site() -> Iterator[tuple[str, list[str]]]:
    """A server of one file that breaks its first answer off in the middle, and what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/a.whl":
                self.send_error(404)
                return
            span = self.headers.get("Range") or ""
            asked.append(span)
            first = int(span[6:-1]) if span else 0
            self.send_response(206 if span else 200)
            self.send_header("Content-Length", str(len(DATA) - first))
            self.end_headers()
            self.wfile.write(DATA[first:] if len(asked) > 1 else DATA[: len(DATA) // 2])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


@pytest.fixture(name="listed")
def fixture_listed(tmp_path: Path) -> Callable[..., Path]:
    def write(url: str, name: str = "a.whl", sha256: str = "") -> Path:
        digest = sha256 or hashlib.sha256(DATA).hexdigest()
        item = artifacts.Artifact("wheel", "a", "1", f"{url}/{name}", f"wheels/{name}", len(DATA), digest, "MIT")
        path = tmp_path / "wanted.json"
        path.write_text(json.dumps({"format": artifacts.FORMAT, "artifacts": [asdict(item)]}))
        return path

    return write


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(
    site: tuple[str, list[str]], listed: Callable[..., Path], tmp_path: Path
) -> None:
    url, asked = site
    assert execute(FETCH, listed(url), tmp_path / "m") == []
    assert asked == ["", f"bytes={len(DATA) // 2}-"]
    assert (tmp_path / "m/wheels/a.whl").read_bytes() == DATA
    assert "a.whl#sha256=" in (tmp_path / "m/wheels/index.html").read_text()
    assert [path.name for path in (tmp_path / "m/wheels").iterdir() if path.suffix == ".part"] == []
    # Whole already: nobody is asked.
    assert execute(FETCH, listed(url), tmp_path / "m") == []
    assert len(asked) == 2
    # Damaged: fetched again, and that alone.
    (tmp_path / "m/wheels/a.whl").write_bytes(DATA[:-1] + b"x")
    assert execute(FETCH, listed(url), tmp_path / "m") == []
    assert asked[2:] == [""]


def test_a_wrong_file_is_refused_and_does_not_stay(
    site: tuple[str, list[str]], listed: Callable[..., Path], tmp_path: Path
) -> None:
    told = execute(FETCH, listed(site[0], sha256="0" * 64), tmp_path / "m")
    assert "wheels/a.whl" in told
    assert "its sha256 is" in told
    assert list((tmp_path / "m/wheels").iterdir()) == []
    assert not (tmp_path / "m" / artifacts.LIST).exists()


def test_a_file_that_is_not_there_is_named(
    site: tuple[str, list[str]], listed: Callable[..., Path], tmp_path: Path
) -> None:
    told = execute(FETCH, listed(site[0], "b.whl"), tmp_path / "m")
    assert f"wheels/b.whl from {site[0]}/b.whl: HTTP Error 404" in told


def test_a_cache_is_asked_first_and_believed_by_its_hash_alone(
    site: tuple[str, list[str]], listed: Callable[..., Path], tmp_path: Path
) -> None:
    url, asked = site
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    for folder, data in ((wrong, b"x" * len(DATA)), (right, DATA)):
        folder.mkdir()
        (folder / "a.whl").write_bytes(data)
    assert execute(FETCH, listed(url), tmp_path / "m", wrong, right) == []
    assert asked == []


@pytest.mark.parametrize("place", [".", "conda", "conda/forge/linux-64"], ids=["mirror", "channels", "files"])
def test_a_cache_may_be_laid_out_as_a_mirror_is(site: tuple[str, list[str]], tmp_path: Path, place: str) -> None:
    name, digest = "conda/forge/linux-64/a.whl", hashlib.sha256(DATA).hexdigest()
    item = artifacts.Artifact("conda", "a", "1", f"{site[0]}/a.whl", name, 0, digest, "MIT")
    wanted = tmp_path / "wanted.json"
    wanted.write_text(json.dumps({"format": artifacts.FORMAT, "artifacts": [asdict(item)]}))
    kept = tmp_path / "old" / name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(DATA)
    assert execute(FETCH, wanted, tmp_path / "m", tmp_path / "old" / place) == []
    assert (tmp_path / "m" / name).read_bytes() == DATA
    assert site[1] == []


LOGIN = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import artifacts as program
place = program.without_login(os.environ["PLACE"])
with program.opened(place + "/a.whl") as answer:
    body = answer.read()
print(json.dumps([place, program.size_of(place + "/a.whl"), len(body), program.login_for("http://127.0.0.2:1/")]))
"""


def test_a_login_is_sent_and_never_shown(tmp_path: Path) -> None:
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.send_header("Content-Length", str(len(DATA)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(DATA)

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/conda"
        done = subprocess.run(
            [sys.executable, "-c", LOGIN, str(ROOT / "scripts")],
            env={**os.environ, "PLACE": place.replace("//", "//me:s%40cret@")},
            capture_output=True,
            text=True,
            check=True,
        )
        server.shutdown()
    assert json.loads(done.stdout) == [place, len(DATA), len(DATA), {}]
    assert asked == ["Basic " + base64.b64encode(b"me:s@cret").decode()] * 2


def model_file(url: str, tmp_path: Path, **more: str) -> Path:
    """A list of one file of a model, as the hub tells of a small one."""
    name = f"models/org/m/{'c' * 40}/a.whl"
    item = artifacts.Artifact("model", "org/m", "c" * 40, f"{url}/a.whl", name, len(DATA), "", "MIT", **more)
    path = tmp_path / "wanted.json"
    path.write_text(json.dumps({"format": artifacts.FORMAT, "artifacts": [asdict(item)]}))
    return path


def test_a_file_of_a_model_is_believed_by_its_git_hash(site: tuple[str, list[str]], tmp_path: Path) -> None:
    git = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA, usedforsecurity=False).hexdigest()
    file = tmp_path / f"m/models/org/m/{'c' * 40}/a.whl"
    file.parent.mkdir(parents=True)
    # What another run left, of something else.
    file.with_name("a.whl.part").write_bytes(b"OLD")
    file.write_bytes(b"x" * len(DATA))
    assert "is not the blob" in execute(FETCH, model_file(site[0], tmp_path, git=git), tmp_path / "m")
    assert execute(FETCH, model_file(site[0], tmp_path, git=git), tmp_path / "m") == []
    assert file.read_bytes() == DATA
    # A server of this folder then says what the model consists of.
    manifest = json.loads((file.parent / "ironrack-model.json").read_text())
    entry = {"name": "a.whl", "size": len(DATA), "sha256": hashlib.sha256(DATA).hexdigest()}
    assert manifest == {"repo": "org/m", "revision": "c" * 40, "commit": "c" * 40, "files": [entry]}


def test_a_file_that_nothing_proves_is_refused(site: tuple[str, list[str]], tmp_path: Path) -> None:
    assert "tells no hash" in execute(FETCH, model_file(site[0], tmp_path), tmp_path / "m")


BROKEN = """
import http.server, os, threading
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        self.wfile.write(b"10\\r\\nabc" if asked.count(self.path) == 1 else b"3\\r\\nabc\\r\\n0\\r\\n\\r\\n")
        self.close_connection = True
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["no_proxy"] = "*"
url = f"http://127.0.0.1:{{server.server_port}}"
got = program.get(url + "/page", tries=2)[0].decode()
try:
    program.get("http://user:SECRET@127.0.0.1/", tries=1)
except OSError as error:
    told = str(error)
digest = program.hashlib.sha256(b"abc").hexdigest()
item = program.code("plugin_utils.runtime.artifacts").Artifact(
    "wheel", "a", "1", url + "/a.whl", "wheels/a.whl", 3, digest, "MIT")
program.Folder(Path(sys.argv[1]), []).fetch([item], {{}})
print(json.dumps([got, told, asked]))
"""


def test_an_answer_in_chunks_that_breaks_off_is_asked_for_again(tmp_path: Path) -> None:
    got, told, asked = execute(BROKEN, tmp_path)
    assert got == "abc"
    assert "SECRET" not in told
    assert asked == ["/page", "/page", "/a.whl", "/a.whl"]
    assert (tmp_path / "wheels/a.whl").read_bytes() == b"abc"


def test_a_file_of_unknown_size_that_breaks_off_goes_on_too(site: tuple[str, list[str]], tmp_path: Path) -> None:
    item = artifacts.Artifact(
        "conda", "a", "1", f"{site[0]}/a.whl", "conda/a", 0, hashlib.sha256(DATA).hexdigest(), "MIT"
    )
    wanted = tmp_path / "wanted.json"
    wanted.write_text(json.dumps({"format": artifacts.FORMAT, "artifacts": [asdict(item)]}))
    assert execute(FETCH, wanted, tmp_path / "m") == []
    assert site[1] == ["", f"bytes={len(DATA) // 2}-"]


ENDLESS = """
import http.server, os, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        if self.path == "/announced": self.send_header("Content-Length", "1000")
        self.end_headers()
        try:
            for _ in range(100): self.wfile.write(b"x" * 100000)
        except OSError: pass
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["no_proxy"] = "*"
program.code("module_utils.conda_env").MOST = 5000
kit, told = program.code("plugin_utils.runtime.artifacts"), []
for path, size in (("/announced", 100), ("/sized", 100), ("/unknown", 0)):
    item = kit.Artifact("wheel", "a", "1", f"http://127.0.0.1:{{server.server_port}}{{path}}", "a", size, "a" * 64, "")
    try:
        program.Folder(Path(sys.argv[1]), []).fetch([item], {{}})
    except program.Failure as failure:
        told.append(str(failure).splitlines()[-1])
print(json.dumps(told))
"""


def test_a_server_that_sends_more_than_a_file_has_is_left(tmp_path: Path) -> None:
    announced, sized, unknown = execute(ENDLESS, tmp_path)
    assert re.search(r"http://127\S+/announced: the server announces 1000 bytes, and 100 are", announced)
    assert re.search(r"http://127\S+/sized: the server sends more than 100 bytes", sized)
    assert re.search(r"http://127\S+/unknown: the server sends more than 5000 bytes", unknown)
    assert list(tmp_path.iterdir()) == []


REFRESHED = """
kit, root = program.code("plugin_utils.runtime.artifacts"), Path(sys.argv[1])
suite = "apt/debian/dists/bookworm"
names = {{"InRelease": suite + "/InRelease", "Packages": suite + "/main/Packages"}}
for name, file in names.items():
    (root / "m" / file).parent.mkdir(parents=True, exist_ok=True)
    (root / "m" / file).write_text("old")
indexes = {{file: b"new " + name.encode() for name, file in names.items()}}
def item(kind, url, file, data):
    return kit.Artifact(kind, "a", "1", url, file, len(data), program.hashlib.sha256(data).hexdigest(), "")
items = [item("apt-index", "file:///x", file, data) for file, data in indexes.items()]
items.append(item("apt", (root / "a.deb").as_uri(), "apt/debian/pool/a.deb", b"deb"))
put, write, order = Path.replace, Path.write_bytes, []
def noted(self, target):
    order.append(target.name)
    return put(self, target)
def full(self, data):
    if self.name == "InRelease.part": raise OSError(28, "No space left on device")
    return write(self, data)
Path.replace = noted
def refreshed():
    try:
        program.Folder(root / "m", []).fetch(items, indexes)
    except (program.Failure, OSError):
        pass
    return [(root / "m" / file).read_text() for file in names.values()]
told = [refreshed()]
(root / "a.deb").write_bytes(b"deb")
Path.write_bytes = full
told.append(refreshed())
Path.write_bytes = write
order.clear()
print(json.dumps([*told, refreshed(), order, refreshed(), order]))
"""


def test_indexes_are_replaced_when_all_else_is_there_the_signed_ones_last(tmp_path: Path) -> None:
    """A new Packages under an old InRelease would end every apt-get update of the site."""
    lacking, full, done, order, again, same = execute(REFRESHED, tmp_path)
    assert lacking == full == ["old", "old"]
    assert done == again == ["new InRelease", "new Packages"]
    assert order == same == ["Packages", "InRelease"]


HELD = """
def never(_):
    raise AssertionError("looked up although another run has the folder")
program.collect = never
arguments = program.parse(["--inventory", "{root}/inventories/prod", "--download", sys.argv[1]])
told = []
with program.Folder(Path(sys.argv[1]), []).held():
    for _ in range(2):
        try:
            program.run(arguments)
        except program.Failure as failure:
            told.append(str(failure))
program.collect = lambda _: ([], {{}}, program.Report())
stdout, sys.stdout = sys.stdout, sys.stderr
print(json.dumps([program.os.getpid(), told, program.run(arguments)]), file=stdout)
"""


def test_one_run_fills_a_folder_and_the_next_says_who(tmp_path: Path) -> None:
    pid, told, then = execute(HELD, tmp_path / "m")
    assert len(told) == 2
    assert all(f"{tmp_path / 'm'} (DOWNLOAD) is being filled by process {pid} on " in text for text in told)
    assert then == 0


INDEXES = """
import http.server, os, threading
from types import SimpleNamespace
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        code = int(self.path.split("/")[1])
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"<html>log in first</html>")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["no_proxy"] = "*"
program.time.sleep = lambda _: None
url = f"http://127.0.0.1:{{server.server_port}}"
program.places_of = lambda *_: ([f"{{url}}/{{code}}" for code in (200, 401, 404, 503)] + ["http://127.0.0.1:9/x"], [])
program.tools_of = lambda _: {{("uv", "1", "a" * 64)}}
try:
    program.wheels_of(SimpleNamespace(hosts=list), program.parse([]))
except ValueError as error:
    told = str(error)
pages = [b"<html>", b"License: MIT\\n\\n"]
program.get = lambda *_, **__: (pages.pop(0), "", "")
print(json.dumps([url, told, program.licence_of("a", "1", "https://e/a.whl")]))
"""


def test_an_index_that_does_not_answer_is_told_and_one_without_the_package_is_not() -> None:
    url, told, licence = execute(INDEXES)
    for text in (f"{url}/401: HTTP Error 401", f"{url}/503: HTTP Error 503", f"{url}/200: its page of uv is no JSON"):
        assert text in told
    assert "http://127.0.0.1:9/x: <urlopen error" in told
    assert "/404" not in told
    # A page that is no JSON is not asked for a licence; the next place is.
    assert licence == "MIT"


REDIRECTED = """
import http.server, os, threading
seen = []
class Other(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        seen.append([self.headers.get("Host").split(":")[0], self.headers.get("Authorization")])
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"{{}}")
    def log_message(self, *_): pass
class First(Other):
    def do_GET(self):
        if self.path.startswith("/same"): return super().do_GET()
        seen.append([self.headers.get("Host").split(":")[0], self.headers.get("Authorization")])
        place = f"http://localhost:{{other.server_port}}/x" if self.path == "/away" else "/same"
        self.send_response(302); self.send_header("Location", place); self.send_header("Content-Length", "0")
        self.end_headers()
first, other = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), each) for each in (First, Other)]
for server in (first, other):
    threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {{"HF_TOKEN": "hf_x", "HF_ENDPOINT": f"http://127.0.0.1:{{first.server_port}}", "no_proxy": "*"}}
for place in ("/away", "/here"):
    program.opened(os.environ["HF_ENDPOINT"] + place).read()
program.opened(f"http://127.0.0.1:{{other.server_port}}/another-port").read()
print(json.dumps(seen))
"""


def test_the_token_is_for_the_hub_alone() -> None:
    mine, other = ["127.0.0.1", "Bearer hf_x"], ["localhost", None]
    assert execute(REDIRECTED) == [mine, other, mine, mine, ["127.0.0.1", None]]


def test_a_folder_is_checked_without_network(
    site: tuple[str, list[str]], listed: Callable[..., Path], tmp_path: Path
) -> None:
    def check() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/artifacts.py"), "--check", str(tmp_path / "m")]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert "artifacts.json is missing" in check().stderr
    assert execute(FETCH, listed(site[0]), tmp_path / "m") == []
    assert check().returncode == 0
    (tmp_path / "m/wheels/a.whl").write_bytes(b"x" * len(DATA))
    told = check()
    assert told.returncode == 1
    assert "wheels/a.whl: is damaged" in told.stderr
    assert f"make artifacts INVENTORY=... DOWNLOAD={tmp_path / 'm'}" in told.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--inventory", "inventories/nope"], "there is no inventory inventories/nope"),
        (["--inventory", "inventories/prod", "--os", "debian11"], "--os debian11: is none of debian12"),
    ],
)
def test_a_wrong_argument_is_told_at_once(arguments: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "scripts/artifacts.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "looking up" not in done.stderr


MODELS = """
from types import SimpleNamespace
instance = {{"model": {{"path": "/data/models/a", "repo": "o/n"}}}}
report = program.Report()
hosts = {{name: {{"vllm_instances": {{"llama": instance}}}} for name in ("n1", "n2")}}
print(json.dumps([program.models_of(SimpleNamespace(values=hosts), report), report.remarks]))
"""


def test_a_model_that_the_user_brings_is_named() -> None:
    items, remarks = execute(MODELS)
    assert items == []
    assert "llama: /data/models/a is yours (model.path): bring it to the nodes yourself" in remarks


# --- the driver ---------------------------------------------------------------------------------------------------

DRIVER = """
kit = program.code("plugin_utils.runtime.artifacts")
kit.ARCHIVES = {{"debian": (("file://" + sys.argv[2] + "/debian", ("{{code}}",), ("main",)),)}}
signed = program.Repositories._verify
# The distribution's archive is the test's own and has no signature; NVIDIA's is verified.
program.Repositories._verify = lambda self, *rest: signed(self, *rest) if "/x86_64" in rest[1] else None
inventory, report = program.Inventory(Path(sys.argv[1])), program.Report()
try:
    items, indexes = program.apt_of(inventory, program.supported(["debian12"])[0], [], report)
    print(json.dumps([[[item.name, item.version, item.file] for item in items], sorted(indexes), report.missing]))
except program.Failure as failure:
    print(json.dumps(str(failure)))
"""
KERNEL = "6.1.0-40-amd64"
# Of the distribution: what roles install, and what NVIDIA's packages stand on.
OF_DEBIAN = {
    "linux-headers-amd64": f"linux-headers-{KERNEL} (= 6.1-1)",
    f"linux-headers-{KERNEL}": "",
    "dkms": "gcc",
    "glx-alternative-nvidia": "",
    "nvidia-kernel-common": "",
    # Newer than NVIDIA's: preferences have to keep it out.
    "nvidia-modprobe": "",
}


@pytest.fixture(name="nvidia", scope="module")
def fixture_nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages with the names, versions and relations of NVIDIA's, signed; beside them an archive of Debian's."""
    out = tmp_path_factory.mktemp("nvidia")
    tool = [sys.executable, str(ROOT / "tests/tools/nvidia_repository.py"), str(out), "--kernel", KERNEL]
    subprocess.run([*tool, "--driver", "580.159.04"], check=True, capture_output=True, timeout=60)
    names = dict.fromkeys(execute(WANTED), "") | OF_DEBIAN
    text = "".join(
        f"Package: {name}\nVersion: {'20991231-1' if 'nvidia' in name else '6.1-1'}\nFilename: pool/{name}.deb\n"
        f"Size: 1\nSHA256: {'a' * 64}\n" + (f"Depends: {needs}\n" if needs else "") + "\n"
        for name, needs in names.items()
    )
    for archive, suites in (("debian", ("bookworm", "bookworm-updates")), ("debian-security", ("bookworm-security",))):
        for suite in suites:
            rows = ""
            for component in ("main", "contrib", "non-free", "non-free-firmware"):
                file = out / archive / "dists" / suite / component / "binary-amd64/Packages"
                file.parent.mkdir(parents=True)
                file.write_text(text if (component, suite) == ("main", "bookworm") else "")
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                rows += f" {digest} {file.stat().st_size} {component}/binary-amd64/Packages\n"
            (out / archive / "dists" / suite / "InRelease").write_text(f"Origin: Debian\nSHA256:\n{rows}")
    return out


def driver_inventory(folder: Path, nvidia: Path, fingerprint: str) -> Path:
    shutil.copytree(ROOT / "inventories/prod", folder / "prod")
    settings = {
        "nvidia_driver_mirror": str(nvidia),
        "nvidia_driver_distribution_mirror": f"file://{nvidia}/debian",
        "nvidia_driver_key_fingerprint": fingerprint,
        "gpu_fabric_dcgm": False,
        "cuda_version": "none",
    }
    path = folder / "prod/group_vars/all.yml"
    path.write_text(f"{path.read_text()}\n{yaml.safe_dump(settings)}")
    return folder / "prod"


def test_the_driver_is_listed_as_a_node_would_install_it(nvidia: Path, tmp_path: Path) -> None:
    fingerprint = json.loads((nvidia / "repository.json").read_text())["fingerprint"]
    rows, indexes, missing = execute(DRIVER, driver_inventory(tmp_path, nvidia, fingerprint), nvidia)
    assert missing == []
    found = {name: (version, file) for name, version, file in rows}
    # What roles ask for, and what that stands on; of NVIDIA where the names are in both.
    assert {"nvidia-driver-cuda", "libcuda1", "nvidia-fabricmanager", "dkms", f"linux-headers-{KERNEL}"} <= set(found)
    assert found["libcuda1"] == ("580.159.04-1", "apt/nvidia/debian12/x86_64/libcuda1_580.159.04-1_amd64.deb")
    assert found["nvidia-modprobe"][0] == "580.159.04-1"
    # Key and signed index come along, whole: nodes verify them.
    names = {path.rsplit("/", 1)[-1] for path in indexes if "x86_64" in path}
    assert {"InRelease", "3bf863cc.pub"} <= names
    assert any(name.startswith("Packages") for name in names)


def test_a_key_that_is_not_the_one_asked_for_ends_it(nvidia: Path, tmp_path: Path) -> None:
    rows, _, missing = execute(DRIVER, driver_inventory(tmp_path, nvidia, "A" * 40), nvidia)
    assert "wanted is AAAA" in missing[0]
    assert "nvidia-driver-cuda" in missing[0]
    assert "libcuda1" not in {name for name, *_ in rows}


def test_a_wrong_signature_ends_it(nvidia: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(nvidia, broken)
    release = broken / "debian12/x86_64/InRelease"
    release.write_text(release.read_text().replace("SHA256:\n", "SHA256:\n ", 1))
    fingerprint = json.loads((nvidia / "repository.json").read_text())["fingerprint"]
    _, _, missing = execute(DRIVER, driver_inventory(tmp_path, broken, fingerprint), nvidia)
    assert "the signature of its index is wrong" in missing[0]
