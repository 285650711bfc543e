"""ironrack_mirror: what each role makes of it, and what base finds wrong with a mirror."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.contract import CONTRACT
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.validate import check_value
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.stack import stack
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import artifacts, mirror

ROOT = Path(__file__).resolve().parents[3]
DEBIAN = {"id": "debian", "version": "12", "codename": "bookworm"}
UBUNTU = {"id": "ubuntu", "version": "24.04", "codename": "noble"}


@pytest.mark.parametrize(
    "value",
    [
        *("", "/srv/mirror", "/srv/mirror/", "/srv/a_b-c.d+e,f", "http://10.0.0.5/mirror", "https://m.example:8443"),
        *("http://[fd00::1]/mirror", "http://[fd00::1]:8080", "http://m.example/a/b/", "http://m_1.example:65535"),
    ],
)
def test_right_values(value: str) -> None:
    assert check_value(value, CONTRACT["ironrack_mirror"], "ironrack_mirror", True) == (value, [])


@pytest.mark.parametrize(
    "value",
    [
        *("srv/mirror", "/", "ftp://m.example", "/srv/my mirror", "http://", "file:///srv/m"),
        *("http://10.0.0.5:abc/m", "http://10.0.0.5:0/m", "http://10.0.0.5:65536", "http://fd00::1/m", "http://[x]/m"),
        # Each of these is another place to one of those who read it.
        *("/srv/mirror#1", "/srv/a?b", "/srv/a%20b", "http://h/a%20b", "/srv/a\\b", "/srv/$x", "/srv/{{a}}"),
        *("//srv", "/srv//m", "/srv/../etc", "/srv/./m", "http://h/../m", "http://h//m"),
    ],
)
def test_wrong_values_are_told_with_variable_value_and_remedy(value: str) -> None:
    _, (problem,) = check_value(value, CONTRACT["ironrack_mirror"], "ironrack_mirror", True)
    assert (problem.variable, problem.value) == ("ironrack_mirror", value)
    assert "make artifacts DOWNLOAD=" in problem.remedy


def test_a_password_in_it_is_not_told() -> None:
    _, (problem,) = check_value("http://user:wo@rd@m.example/", CONTRACT["ironrack_mirror"], "ironrack_mirror", True)
    assert problem.value == "http://***@m.example/"


def test_places_below_the_mirror() -> None:
    assert mirror.below("/srv/m/", "conda") == "file:///srv/m/conda"
    assert mirror.below("http://m.example/", "conda") == "http://m.example/conda"
    assert mirror.wheels("/srv/m") == "/srv/m/wheels"
    assert mirror.wheels("http://m.example/a/") == "http://m.example/a/wheels/index.html"


def test_apt_reads_the_mirror_alone_signed_by_the_distribution() -> None:
    plan = mirror.apt_plan({"distribution": DEBIAN}, "/srv/m")
    files = {entry["path"]: entry.get("content", "") for entry in plan["files"]}
    source, settings = files[mirror.SOURCE], files[mirror.SETTINGS]
    assert "URIs: file:/srv/m/apt/debian\nSuites: bookworm bookworm-updates\n" in source
    assert "URIs: file:/srv/m/apt/debian-security\nSuites: bookworm-security\n" in source
    assert source.count("Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n") == 2
    assert "rusted" not in source
    assert f'Dir::Etc::SourceParts "{mirror.SOURCES}";' in settings
    assert 'Dir::Etc::SourceList "/dev/null";' in settings
    # The source before the settings that make it the only one: a run killed in between changes nothing.
    assert list(files).index(mirror.SOURCE) < list(files).index(mirror.SETTINGS)
    ubuntu = mirror.apt_plan({"distribution": UBUNTU}, "http://m.example/")["files"][1]["content"]
    assert "URIs: http://m.example/apt/ubuntu\nSuites: noble noble-updates noble-security\n" in ubuntu


def test_without_a_mirror_its_settings_go_and_nothing_is_done_where_there_are_none() -> None:
    assert mirror.apt_plan({"apt_mirror": False}, "")["files"] == []
    gone = mirror.apt_plan({"apt_mirror": True}, "")["files"]
    assert gone == [{"path": mirror.SETTINGS, "state": "absent"}, {"path": mirror.SOURCE, "state": "absent"}]


def test_a_distribution_without_packages_there_is_refused() -> None:
    plan = mirror.apt_plan({"distribution": {"id": "rocky", "version": "9", "codename": ""}}, "/srv/m")
    assert plan["files"] == []
    assert re.search(r"ironrack_mirror is /srv/m.*rocky 9.*Leave ironrack_mirror empty", plan["problems"][0])


@pytest.mark.parametrize(("distribution", "archive"), [(DEBIAN, "debian"), (UBUNTU, "ubuntu")])
def test_the_driver_comes_from_the_mirror_too(distribution: dict[str, str], archive: str) -> None:
    facts = {
        "distribution": distribution,
        "kernel": {"release": "6.1.0-40-amd64", "architecture": "x86_64"},
        "kernels": [],
    }
    gpus = {"count": 8, "name": "NVIDIA H200", "memory_total_mib": 143771}
    answer = stack(facts, {"python_env_variant": "cu130", "gpus": gpus, "ironrack_mirror": "/srv/m"})
    assert answer["problems"] == []
    uris = {uri for row in answer["repositories"] for uri in row["uris"]}
    repository = f"{archive}{distribution['version'].replace('.', '')}"
    assert f"file:/srv/m/apt/nvidia/{repository}/x86_64/" in uris
    assert all(uri.startswith("file:/srv/m/apt/") for uri in uris)
    if archive == "debian":
        assert {"file:/srv/m/apt/debian", "file:/srv/m/apt/debian-security"} <= uris
    # The key keeps its fingerprint, and the sources lie where apt looks.
    nvidia = answer["repositories"][0]
    assert nvidia["key_url"].startswith("file:/srv/m/apt/nvidia/")
    assert len(nvidia["key_fingerprint"]) == 40
    written = [entry["path"] for entry in answer["files"] if entry["path"].endswith(".sources") and "content" in entry]
    assert written
    assert {Path(path).parent for path in written} == {Path(mirror.SOURCES)}
    # What NVIDIA's mirror is called in the list is where its packages lie.
    public = f"https://developer.download.nvidia.com/compute/cuda/repos/{repository}/x86_64/"
    assert f"file:/srv/m/{artifacts.archive_folder(public)}/" in uris


def test_what_a_site_says_of_its_own_mirrors_comes_first() -> None:
    facts = {"distribution": DEBIAN, "kernel": {"release": "6.1.0-40-amd64", "architecture": "x86_64"}, "kernels": []}
    gpus = {"count": 1, "name": "NVIDIA H200", "memory_total_mib": 143771}
    own = {"nvidia_driver_mirror": "http://n.example", "nvidia_driver_distribution_mirror": "http://d.example/debian"}
    answer = stack(facts, {"python_env_variant": "cu130", "gpus": gpus, "ironrack_mirror": "/srv/m", **own})
    uris = {uri for row in answer["repositories"] for uri in row["uris"]}
    assert uris == {"http://n.example/debian12/x86_64/", "http://d.example/debian", "http://d.example/debian-security"}


# --- what base finds ----------------------------------------------------------------------------------------------


@pytest.fixture(name="module", scope="module")
def fixture_module() -> ModuleType:
    specification = importlib.util.spec_from_file_location(
        "base_state_of_mirror", ROOT / "plugins/modules/base_state.py"
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    """A mirror of one package and one wheel."""
    items = []
    for kind, name in (("apt", "apt/debian/pool/a.deb"), ("wheel", "wheels/t.whl")):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(name)
        digest = hashlib.sha256(name.encode()).hexdigest()
        items.append(
            artifacts.Artifact(kind, "a", "1", "https://e/", name, len(name), digest, "x", "debian 12, ubuntu 24.04")
        )
    (tmp_path / "artifacts.json").write_text(json.dumps({"artifacts": [asdict(item) for item in items]}))
    return tmp_path


@pytest.fixture(name="served")
def fixture_served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *rest: Quiet(*rest, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_whole_mirror_is_right_by_both_ways(module: ModuleType, folder: Path, served: str) -> None:
    assert module.mirror_problems(str(folder), DEBIAN) == []
    assert module.mirror_problems(f"{served}/", UBUNTU) == []
    assert module.mirror_problems("", DEBIAN) == []


@pytest.mark.parametrize("lost", ["apt/debian/pool/a.deb", "wheels/t.whl"])
def test_a_file_that_is_missing_or_short_is_named_with_the_command(module: ModuleType, folder: Path, lost: str) -> None:
    for break_it in (lambda file: file.write_text("x"), Path.unlink):
        break_it(folder / lost)
        (problem,) = module.mirror_problems(str(folder), DEBIAN)
        assert f"ironrack_mirror is {folder}" in problem
        assert lost in problem
        assert f"make artifacts DOWNLOAD={folder}" in problem


def test_a_server_is_asked_for_the_packages_of_this_distribution(module: ModuleType, folder: Path, served: str) -> None:
    (folder / "apt/debian/pool/a.deb").unlink()
    (problem,) = module.mirror_problems(served, DEBIAN)
    assert f"{served}/apt/debian/pool/a.deb (HTTP Error 404" in problem
    assert "make artifacts DOWNLOAD=" in problem


def test_no_list_no_server_and_no_packages_of_this_distribution(module: ModuleType, folder: Path) -> None:
    (problem,) = module.mirror_problems(str(folder), {**DEBIAN, "version": "13"})
    assert "no packages for debian 13, only for debian 12, ubuntu 24.04" in problem
    (problem,) = module.mirror_problems(str(folder / "elsewhere"), DEBIAN)
    assert "artifacts.json cannot be read" in problem
    (problem,) = module.mirror_problems("http://127.0.0.1:9", DEBIAN)
    assert "from this host" in problem
    (folder / "artifacts.json").write_text("[]")
    (problem,) = module.mirror_problems(str(folder), DEBIAN)
    assert "artifacts.json cannot be read" in problem


def test_the_host_is_told_apart(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "etc/apt/apt.conf.d").mkdir(parents=True)
    (tmp_path / "var/lib/apt/lists").mkdir(parents=True)
    (tmp_path / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\nHOME_URL="x=y"\n')
    state = module.look(str(tmp_path))
    assert state["distribution"] == DEBIAN
    assert (state["apt_mirror"], state["apt_lists_old"], state["mirror_problems"]) == (False, False, [])
    settings = tmp_path / mirror.SETTINGS.lstrip("/")
    settings.write_text("")
    # Lists that are older than the settings are those of other sources.
    os.utime(tmp_path / "var/lib/apt/lists", (1, 1))
    state = module.look(str(tmp_path))
    assert (state["apt_mirror"], state["apt_lists_old"]) == (True, True)


def test_module_and_plan_mean_the_same_file(module: ModuleType) -> None:
    assert module.APT_SETTINGS == mirror.SETTINGS
    assert module.MIRROR_LIST == artifacts.LIST
