"""Real conda environments: a channel that the lab's builder makes from this machine's Python, py-rattler, uv.

The conda command of Miniforge cannot be had everywhere: a stand-in for it takes the same arguments and installs with
py-rattler.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.action.release import ActionModule
from ansible_collections.ironrack.vllm.plugins.module_utils import conda_env, release_tree
from ansible_collections.ironrack.vllm.plugins.modules import release as module
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import conda

ROOT = Path(__file__).resolve().parents[3]
BUILDER = ROOT / "roles/lab/files/build_channel.py"
UV = str(Path(sys.executable).with_name("uv"))
# Debian's own, as on the lab's nodes; elsewhere the one that runs the tests.
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys._base_executable


def role_default(name):
    text = (ROOT / "roles/python_env/defaults/main.yml").read_text()
    return re.search(rf"(?m)^{name}: (\S+)$", text)[1]


def version_of(python):
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def rattler_python():
    """A Python with the py-rattler that the role pins, by its hash; made once, beside the other caches."""
    version, sha256 = role_default("python_env_rattler_version"), role_default("python_env_rattler_sha256")
    folder = ROOT / ".cache" / f"rattler-{version}-{sha256[:12]}-{sys.version_info[0]}.{sys.version_info[1]}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            subprocess.run([UV, "venv", "-q", "--clear", "--python", sys.executable, folder], check=True)
            requirement = folder / "requirement.txt"
            requirement.write_text(f"py-rattler=={version} --hash=sha256:{sha256}\n")
            install = [UV, "pip", "install", "-q", "--python", folder / "bin/python", "--no-deps", "--require-hashes"]
            subprocess.run([*install, "-r", requirement], check=True)
            (folder / "complete").touch()
    return str(folder / "bin/python")


@pytest.fixture(scope="session")
def channel(tmp_path_factory):
    """The folder of a channel, and the text of its explicit lock."""
    folder = tmp_path_factory.mktemp("channel")
    done = subprocess.run([PYTHON, str(BUILDER), str(folder)], capture_output=True, text=True, check=True)
    return folder, json.loads(done.stdout)["text"]


@pytest.fixture
def served(channel):
    """The same channel by http: (URL, paths asked for, paths to answer with 503 once)."""
    asked, broken = [], set()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path in broken:
                broken.discard(self.path)
                self.send_error(503)
            else:
                super().do_GET()

        def log_message(self, *_args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(channel[0])))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked, broken
    server.shutdown()
    server.server_close()


@pytest.fixture
def index(tmp_path):
    """A package index in a folder with one small wheel; (URL, line of the lock)."""
    folder = tmp_path / "index" / "demo"
    folder.mkdir(parents=True)
    wheel = folder / "demo-1.0-py3-none-any.whl"
    files = {
        "demo.py": b"value = 7\n\n\ndef main():\n    print(value)\n",
        "demo-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
        "demo-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "demo-1.0.dist-info/entry_points.txt": b"[console_scripts]\ndemo = demo:main\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {**files, "demo-1.0.dist-info/RECORD": record.encode()}.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return (tmp_path / "index").as_uri(), f"demo==1.0 --hash=sha256:{digest}\n"


@pytest.fixture
def build(make, tmp_path, channel, index, rattler_python):
    """build(mirror, ...) -> Release that was built, in one place for all builds of a test."""
    lock_file = tmp_path / "wheels.txt"
    lock_file.write_text(index[1])

    def run(mirror=None, lock=None, **params):
        text = channel[1] if lock is None else lock
        lock_path = tmp_path / "my.lock"
        lock_path.write_text(text)
        python = re.search(r"/python-(\d+\.\d+)", text)[1]
        place = channel[0].as_uri() if mirror is None else mirror
        plan = ActionModule._conda({"conda_lock": str(lock_path), "conda_mirror": place}, python)
        release = make(
            conda=plan,
            python=python,
            interpreter="",
            index_url=index[0],
            lock_file=str(lock_file),
            download_bytes=1000,
            **{"conda_client": "rattler", "miniforge_url": "", "miniforge_sha256": "", **params},
        )
        release.uv = lambda: UV
        release.rattler = lambda *_: rattler_python
        release.params["pack"] = False
        module.wipe(release.path)  # what an earlier build of the test left
        release.built()
        return release

    return run


def ask(release, code, *flags, **environment):
    command = [release.python, *flags, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return done.stdout.strip()


# ---------------------------------------------------------------- the environment


def look_at(release):
    """What an environment must be, however it was made."""
    root = Path(release.path)
    # What `conda list -p` reads.
    (record,) = [json.loads(path.read_text()) for path in (root / "conda-meta").glob("*.json")]
    assert (record["name"], record["version"]) == ("python", version_of(PYTHON))
    assert all((root / name).exists() for name in record["files"])
    assert "::python-" in (root / "conda-meta/history").read_text()
    # The environment's own Python, with its own library, and what uv put in.
    assert ask(release, "import sys; print(sys.prefix, sys.base_prefix)") == f"{root} {root}"
    assert ask(release, "import os; print(os.__file__)").startswith(f"{root}/lib/")
    assert ask(release, "import demo; print(demo.__file__)").startswith(f"{root}/lib/")
    assert subprocess.run([root / "bin/demo"], capture_output=True, text=True, check=True).stdout == "7\n"
    assert (root / "bin/demo").read_text().startswith(f"#!{root}/bin/python")
    assert (release.marker()["method"], release.marker()["python"]) == ("conda", version_of(PYTHON))
    # Copies, so that nothing outside can change what the release holds.
    assert not [path for path in root.rglob("*") if path.is_file() and path.stat().st_nlink > 1]


def packages_of_a_user_are_hidden(release, home):
    short = ".".join(version_of(PYTHON).split(".")[:2])
    folder = home / f".local/lib/python{short}/site-packages"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "intruder.py").write_text("")
    code = "import importlib.util as u; print(u.find_spec('intruder'))"
    return ask(release, code, HOME=str(home), PYTHONNOUSERSITE="") == "None"


def using_it_changes_nothing(release):
    """The library is compiled when the release is built: a first start as root must not look like drift."""
    ask(release, "import demo, json, ssl, sqlite3, asyncio, xml.dom.minidom, http.server, unittest, ctypes")
    return release_tree.examine(release.path, full=True).lines() == []


def test_an_environment_is_made_from_a_folder_and_from_a_server_alike(build, channel, served, tmp_path):
    """A real one each time, and the mirror leaves no trace: sites with mirrors of their own get the same files."""
    prints = []
    for mirror in (channel[0].as_uri(), served[0]):
        release = build(mirror)
        look_at(release)
        assert packages_of_a_user_are_hidden(release, tmp_path / "home")
        assert using_it_changes_nothing(release)
        root = Path(release.path)
        texts = {path.name: path.read_text() for path in (root / "conda-meta").iterdir()}
        assert not [name for name, text in texts.items() if str(tmp_path) in text or "127.0.0.1" in text]
        assert '"url": "https://conda.invalid/lab/linux-64/python-' in "".join(texts.values())
        prints.append(
            {
                str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in root.rglob("*")
                if path.is_file() and "demo" not in str(path) and path.name not in (module.MARKER, module.MANIFEST)
            }
        )
        shutil.rmtree(tmp_path / "cache/conda/packages")
    assert prints[0] == prints[1]
    assert len(prints[0]) > 500
    assert [path for path in served[1] if path.endswith(".bz2")]
    left = [path.name for path in (tmp_path / "cache/conda").iterdir()]
    assert left == ["lock"], "what the build alone needs is removed"


def packages(channel, mirror):
    lock = conda.parse_explicit(channel[1])
    names = ("sha256", "file_name", "name", "version", "build")
    return [
        {"url": conda.mirrored(package, mirror)} | {name: getattr(package, name) for name in names}
        for package in lock.packages
    ]


def test_packages_that_are_there_are_not_fetched_again(channel, served, tmp_path):
    folder = tmp_path / "packages"
    wanted = packages(channel, served[0])
    (path,) = conda_env.fetch_packages(wanted, str(folder), urllib.request.urlopen, print)
    assert conda_env.file_sha256(path) == wanted[0]["sha256"]
    (folder / "zlib-0-0.conda").write_text("of an older lock")
    conda_env.fetch_packages(wanted, str(folder), urllib.request.urlopen, print)
    assert (len(served[1]), [path.name for path in folder.iterdir()]) == (1, [wanted[0]["file_name"]])


# ---------------------------------------------------------------- what goes wrong


def package_url(text, mirror):
    return f"{mirror}/lab/linux-64/" + re.search(r"/(python-[^/#]+)#", text)[1]


def test_a_package_with_another_hash_is_refused_and_nothing_stays(build, channel, tmp_path):
    lock = re.sub(r"#[0-9a-f]{64}", "#" + "0" * 64, channel[1])
    with pytest.raises(conda_env.CondaError) as caught:
        build(lock=lock)
    for word in ("python-", "its sha256 is", "0" * 64, "python_env_conda_mirror", "python_env_conda_lock"):
        assert word in str(caught.value)
    assert not [path for path in (tmp_path / "opt/releases").iterdir() if path.is_dir()]


@pytest.mark.parametrize("way", ["file", "http"])
def test_a_mirror_without_the_package_is_named(build, channel, served, way):
    mirror = f"{served[0] if way == 'http' else channel[0].as_uri()}/empty"
    with pytest.raises(conda_env.CondaError) as caught:
        build(mirror)
    assert package_url(channel[1], mirror) in str(caught.value)
    assert "python_env_conda_mirror" in str(caught.value)
    assert len(served[1]) == (1 if way == "http" else 0), "what is not there is asked for once"


def test_a_passing_fault_of_the_mirror_is_waited_out(channel, served, tmp_path):
    wanted = packages(channel, served[0])
    served[2].add(urllib.parse.urlsplit(wanted[0]["url"]).path)
    conda_env.fetch_packages(wanted, str(tmp_path / "packages"), urllib.request.urlopen, print)
    assert len(served[1]) == 2


def test_a_password_for_the_mirror_is_used_and_not_shown(make, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "open_url", lambda url, **_: calls.append(url))
    release = make(credentials={"https://mirror/conda": "me:secret"})
    release.read_file("https://mirror/conda/forge/linux-64/x.conda")
    assert calls == ["https://me:secret@mirror/conda/forge/linux-64/x.conda"]


@pytest.fixture
def answering(tmp_path):
    """answering(answers) -> what is fetched for b"right" from a server that gives these, one after another."""
    servers = []

    def fetch(answers):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                with contextlib.suppress(OSError):  # the client may leave
                    self.wfile.write(b"HTTP/1.1 " + answers.pop(0))

            def log_message(self, *_args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, target = f"http://127.0.0.1:{server.server_port}/x", tmp_path / "x.conda"
        options = {"opener": urllib.request.urlopen, "log": print, "what": "x", "remedy": "", "pause": 0.01}
        conda_env.fetch_file(url, str(target), hashlib.sha256(b"right").hexdigest(), **options)
        return target.read_bytes()

    yield fetch
    for server in servers:
        server.shutdown()
        server.server_close()


RIGHT = b"200 OK\r\nContent-Length: 5\r\n\r\nright"
# Broken off, and not a file with another hash: those are given up after the second.
SHORT = b"200 OK\r\nContent-Length: 5\r\n\r\nrig"


@pytest.mark.parametrize(
    "first",
    [[b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nrig"], [SHORT, SHORT, SHORT]],
    ids=["chunked", "short"],
)
def test_an_answer_that_breaks_off_is_asked_for_again(answering, first):
    assert answering([*first, RIGHT]) == b"right"


def test_an_answer_that_always_breaks_off_is_no_wrong_hash(answering):
    with pytest.raises(conda_env.CondaError, match=r"/x: ConnectionError: the answer broke off after 3 of 5 bytes"):
        answering([SHORT] * 4)


def test_a_packed_answer_is_not_measured_by_the_length_of_the_packed_one(answering, monkeypatch):
    """As open_url unpacks it on the way."""
    original = urllib.request.urlopen

    def unpacking(url):
        answer = original(url)
        answer.length = None
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", unpacking)
    packed = b"200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 6\r\n\r\nright"
    assert answering([packed]) == b"right"


@pytest.mark.parametrize(
    ("said", "pause"),
    [
        ("Retry-After: 7\r\n", 7),
        ("Retry-After: Fri, 31 Dec 2100 00:00:00 GMT\r\n", 60),
        ("Retry-After: 999999\r\n", 60),
        ("Retry-After: soon\r\n", 0.01),
        ("", 0.01),
    ],
)
@pytest.mark.parametrize("code", ["429 Too Many Requests", "408 Request Timeout"])
def test_a_channel_that_asks_to_come_again_is_given_time(answering, monkeypatch, code, said, pause):
    pauses = []
    monkeypatch.setattr(conda_env.time, "sleep", pauses.append)
    assert answering([f"{code}\r\n{said}Content-Length: 0\r\n\r\n".encode(), RIGHT]) == b"right"
    assert pauses == [pause]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"200 OK\r\n\r\n" + b"x" * 5000, "the server sends more than 4000 bytes"),
        (b"200 OK\r\nContent-Length: 4001\r\n\r\n", "the server announces 4001 bytes, and 4000 are the most"),
    ],
)
def test_a_server_that_sends_without_end_is_left(answering, monkeypatch, tmp_path, answer, told):
    monkeypatch.setattr(conda_env, "MOST", 4000)
    with pytest.raises(conda_env.CondaError, match=rf"x could not be fetched from http://127\S+/x: {told}"):
        answering([answer])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_download_is_fetched_anew(tmp_path):
    target = tmp_path / "x.conda"
    target.write_text("half")
    calls = []

    def opener(url):
        calls.append(url)
        return (tmp_path / "right").open("rb")

    (tmp_path / "right").write_bytes(b"right")
    digest = hashlib.sha256(b"right").hexdigest()
    conda_env.fetch_file("http://m/x", str(target), digest, opener=opener, log=print, what="x", remedy="")
    assert (target.read_bytes(), calls) == (b"right", ["http://m/x"])


def test_a_client_that_installs_less_than_asked_is_seen(build, monkeypatch, tmp_path):
    """Whatever the client says: what stands in conda-meta is compared with the lock."""
    original = conda_env.settle

    def without(prefix, packages):
        for path in Path(prefix, "conda-meta").glob("python-*.json"):
            path.unlink()
        original(prefix, packages)

    monkeypatch.setattr(conda_env, "settle", without)
    with pytest.raises(conda_env.CondaError, match=r"lacks python-.* of the conda lock"):
        build()
    assert not [path for path in (tmp_path / "opt/releases").iterdir() if path.is_dir()]


def test_a_link_out_of_the_environment_is_refused(tmp_path):
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libx.so").symlink_to("/usr/lib/libx.so")
    with pytest.raises(conda_env.CondaError, match=r"libx\.so is a link to /usr/lib/libx\.so"):
        conda_env.settle(str(tmp_path), [])


def test_a_python_that_does_not_start_on_a_node_is_named(make):
    release = make(conda={"packages": []})
    python = Path(release.python)
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'version GLIBC_2.99 not found' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(module.ReleaseError, match=r"own Python .* does not start .*GLIBC_2\.99 not found.*update this"):
        release.interpreter_version()


# ---------------------------------------------------------------- miniforge


STAND_IN = """#!/bin/sh
# A stand-in for the installer of Miniforge: its conda command installs with py-rattler.
[ "$1" = -b ] && [ "$2" = -p ] || exit 9
mkdir -p "$3/bin"
cat > "$3/bin/conda" <<'END'
#!{python}
import json, pathlib, subprocess, sys, urllib.parse
words = sys.argv[1:]
flags = {{"--yes", "--quiet", "--offline", "--copy", "--no-default-packages"}}
assert words[0] == "create" and flags <= set(words), words
prefix, listing = words[words.index("--prefix") + 1], words[words.index("--file") + 1]
lines = pathlib.Path(listing).read_text().splitlines()
assert lines[0] == "@EXPLICIT" and all("#" in line for line in lines[1:]), lines
paths = [urllib.parse.unquote(line.split("#")[0].removeprefix("file://")) for line in lines[1:]]
order = pathlib.Path(listing).with_name("stand-in.json")
order.write_text(json.dumps({{"packages": paths, "prefix": prefix, "cache": prefix + ".cache"}}))
program = order.with_suffix(".py")
program.write_text({program!r})
subprocess.run(["{python}", program, order], check=True)
END
chmod 755 "$3/bin/conda"
"""


def test_miniforge_gets_the_checked_files_and_makes_the_same_environment(build, tmp_path, rattler_python):
    installer = tmp_path / "Miniforge3-Linux-x86_64.sh"
    installer.write_text(STAND_IN.format(python=rattler_python, program=conda_env.RATTLER_PROGRAM))
    sha256 = hashlib.sha256(installer.read_bytes()).hexdigest()
    release = build(conda_client="miniforge", miniforge_url=installer.as_uri(), miniforge_sha256=sha256)
    assert ask(release, "import demo; print(demo.value)") == "7"
    assert f"miniforge-{sha256[:12]}/bin/conda create" in Path(release.params["log_path"]).read_text()
    look_at(release)
    installer.unlink()  # the second time it is there
    assert release.miniforge(str(tmp_path / "cache/conda")).endswith(f"miniforge-{sha256[:12]}/bin/conda")


def test_an_installer_of_miniforge_with_another_hash_is_not_run(build, tmp_path):
    installer = tmp_path / "Miniforge3-Linux-x86_64.sh"
    installer.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    with pytest.raises(conda_env.CondaError, match=r"the installer of Miniforge .*python_env_miniforge_sha256"):
        build(conda_client="miniforge", miniforge_url=installer.as_uri(), miniforge_sha256="0" * 64)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- the lab's channel


def test_the_lab_packs_the_same_python_to_the_same_bytes(channel, tmp_path):
    done = subprocess.run([PYTHON, str(BUILDER), str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["text"] == channel[1]
    again = subprocess.run([PYTHON, str(BUILDER), str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["changed"] is False


def test_the_solver_finds_the_labs_python_and_make_lock_writes_it_down(channel, tmp_path, rattler_python, monkeypatch):
    """`make lock` for real, against the lab's channel: the same lock as the channel's builder wrote."""
    spec = importlib.util.spec_from_file_location("ironrack_lock_script", ROOT / "scripts/lock.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "LOCKS", tmp_path)
    (tmp_path / "conda.in").write_text("python\n")
    uv = tmp_path / "uv"  # the pinned py-rattler is there already
    uv.write_text(f'#!/bin/sh\nwhile [ "$1" != python ]; do shift; done\nshift\nexec {rattler_python} "$@"\n')
    uv.chmod(0o755)
    short = ".".join(version_of(PYTHON).split(".")[:2])
    text = script.solve_conda(str(uv), short, (channel[0] / "lab").as_uri())
    package, sha256 = re.search(r"/linux-64/(\S+)#(\S+)", channel[1]).groups()
    size = (channel[0] / "lab/linux-64" / package).stat().st_size
    said = f"# licence: unknown, size: {size}"
    assert text.endswith(f"@EXPLICIT\n{said}\n{(channel[0] / 'lab').as_uri()}/linux-64/{package}#{sha256}\n")
    with pytest.raises(SystemExit, match="could not be solved"):
        script.solve_conda(str(uv), "3.99", (channel[0] / "lab").as_uri())
