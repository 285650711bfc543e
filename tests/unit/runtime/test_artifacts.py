"""The list of what a deployment fetches: its rows, what it refuses, how it reads."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.runtime import artifacts, conda, debian, lock

HASHES = {name: name * 64 for name in "abcd"}
ITEM = artifacts.Artifact(
    "wheel", "torch", "2", "https://i.example/t.whl", "wheels/t.whl", 10, HASHES["a"], "BSD-3-Clause", "one"
)
LOCK = lock.Lock({"torch": "2", "ray": "1"}, {"torch": (HASHES["a"], HASHES["b"]), "ray": (HASHES["c"],)}, 0)
PAGE = [
    {"url": "https://i.example/t.whl", "filename": "t.whl", "sha256": HASHES["a"], "size": 10},
    {"url": "https://i.example/t.tar.gz", "filename": "t.tar.gz", "sha256": HASHES["d"], "size": 5},
]


def test_the_wheels_of_a_lock_are_those_with_its_hashes() -> None:
    ray = {"url": "https://i.example/r.whl", "filename": "r.whl", "sha256": HASHES["c"], "size": 7}
    found = artifacts.choose_wheels(LOCK, {"torch": PAGE, "ray": [ray]}, "cpu.txt")
    assert [(item.name, item.file, item.size, item.sha256) for item in found] == [
        ("ray", "wheels/r.whl", 7, HASHES["c"]),
        ("torch", "wheels/t.whl", 10, HASHES["a"]),
    ]


def test_a_wheel_that_no_index_has_is_an_error_with_name_and_remedy() -> None:
    with pytest.raises(artifacts.ArtifactError) as caught:
        artifacts.choose_wheels(LOCK, {"torch": PAGE}, "cpu.txt")
    for word in ("cpu.txt", "ray 1", "python_env_index_url", "--index-url"):
        assert word in str(caught.value)
    assert "torch 2" not in str(caught.value)


def test_what_an_index_answered_stands_in_front_without_its_login() -> None:
    failed = {"https://me:SECRET@i.example/simple": "HTTP Error 401: Unauthorized"}
    with pytest.raises(artifacts.ArtifactError) as caught:
        artifacts.choose_wheels(LOCK, {"torch": PAGE}, "cpu.txt", failed)
    for word in ("https://***@i.example/simple: HTTP Error 401: Unauthorized", "login", "proxy", "ray 1"):
        assert word in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_both_forms_of_an_index_are_read() -> None:
    html = f'<a href="../t%2Bcpu.whl#sha256={HASHES["a"]}" data-x="1">t</a><A class=x HREF="u.whl?a=1&amp;b=2">u</A>'
    assert artifacts.index_page(html, "text/html", "https://i.example/simple/t/") == [
        {"url": "https://i.example/simple/t%2Bcpu.whl", "filename": "t+cpu.whl", "sha256": HASHES["a"], "size": 0},
        {"url": "https://i.example/simple/t/u.whl?a=1&b=2", "filename": "u.whl", "sha256": "", "size": 0},
    ]
    files = [{"filename": "t.whl", "url": "t.whl", "hashes": {"sha256": HASHES["a"]}, "size": 3}]
    assert artifacts.index_page(
        json.dumps({"files": files}), "application/vnd.pypi.simple.v1+json", "https://i/s/"
    ) == [{"url": "https://i/s/t.whl", "filename": "t.whl", "sha256": HASHES["a"], "size": 3}]


def test_the_page_of_the_folder_reads_back() -> None:
    wheel = replace(ITEM, file="wheels/torch-2+cpu-py3.whl")
    text = artifacts.wheels_index([wheel])
    (found,) = artifacts.index_page(text, "text/html", "http://m.example/wheels/index.html")
    assert (found["url"], found["filename"]) == ("http://m.example/wheels/torch-2%2Bcpu-py3.whl", "torch-2+cpu-py3.whl")
    assert found["sha256"] == HASHES["a"]


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT OR Apache-2.0\nLicense: other\n\ntext", "MIT OR Apache-2.0"),
        ("License: BSD\nClassifier: License :: OSI Approved :: MIT License\n", "BSD"),
        ("Classifier: License :: OSI Approved :: MIT License\n", "MIT License"),
        (f"License: {'x' * 100}\n", "x" * 57 + "..."),
        ("Name: a\n\nLicense: not in the head\n", "unknown"),
    ],
)
def test_what_a_wheel_says_of_its_licence(metadata: str, licence: str) -> None:
    assert artifacts.wheel_licence(metadata) == licence


@pytest.mark.parametrize(
    ("base", "folder"),
    [
        ("https://deb.debian.org/debian", "apt/debian"),
        ("http://deb.debian.org/debian-security/", "apt/debian-security"),
        ("http://archive.ubuntu.com/ubuntu", "apt/ubuntu"),
        ("https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/", "apt/nvidia/debian12/x86_64"),
    ],
)
def test_a_repository_lies_where_the_roles_look_for_it(base: str, folder: str) -> None:
    assert artifacts.archive_folder(base) == folder


def test_an_apt_package_keeps_its_place_below_the_archive() -> None:
    package = debian.Package(
        "a", "1:2+b", "pool/main/a/a_2+b_amd64.deb", 9, HASHES["a"], "main", "Debian", "https://d.example/debian/"
    )
    (found,) = artifacts.apt_artifacts([package], "debian 12")
    assert found.url == "https://d.example/debian/pool/main/a/a_2+b_amd64.deb"
    assert found.file == "apt/debian/pool/main/a/a_2+b_amd64.deb"
    assert "copyright" in found.licence
    (nvidia,) = artifacts.apt_artifacts([replace(package, origin="NVIDIA", component="")], "debian 12")
    assert "NVIDIA" in nvidia.licence


def test_conda_packages_lie_by_channel_and_platform() -> None:
    url = "https://conda.example/forge/linux-64/python-3.12.1-h1_0.conda"
    packages = conda.parse_explicit(f"@EXPLICIT\n{url}#{HASHES['b']}\n").packages
    (found,) = artifacts.conda_artifacts(packages, "", "conda.lock")
    assert (found.url, found.file, found.sha256) == (url, "conda/forge/linux-64/python-3.12.1-h1_0.conda", HASHES["b"])
    assert (found.size, found.licence) == (0, artifacts.UNKNOWN)
    said = conda.parse_explicit(f"@EXPLICIT\n# licence: Python-2.0, size: 7\n{url}#{HASHES['b']}\n").packages
    (known,) = artifacts.conda_artifacts(said, "", "conda.lock")
    assert (known.size, known.licence) == (7, "Python-2.0")
    # Where the role fetches it with the mirror is where it lies.
    mirrored = conda.mirrored(packages[0], "file:///srv/mirror/conda")
    assert mirrored == f"file:///srv/mirror/{found.file}"


def test_a_model_is_listed_with_what_is_known() -> None:
    told = {
        "sha": "c" * 40,
        "cardData": {"license": "apache-2.0"},
        "siblings": [
            {"rfilename": "a/m.safetensors", "size": 5, "lfs": {"sha256": HASHES["a"]}},
            {"rfilename": "config.json", "size": 2, "blobId": "b" * 40},
        ],
    }
    big, small = artifacts.model_artifacts("org/m", "main", told, "https://hub.example/")
    assert big.url == f"https://hub.example/org/m/resolve/{'c' * 40}/a/m.safetensors"
    assert (big.file, big.sha256, big.licence) == ("models/org/m/main/a/m.safetensors", HASHES["a"], "apache-2.0")
    assert (small.sha256, small.git) == ("", "b" * 40)
    (unknown,) = artifacts.model_artifacts("org/m", "main", None, "https://hub.example")
    assert unknown.file == ""
    assert "not reached" in unknown.note


@pytest.mark.parametrize(
    "name", ["../../../../etc/cron.d/x", "/etc/x", "a/../../x", "a//b", "./a", "a/", "a\\..\\x", "a\nb", "a\0b", ".."]
)
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    """Of a hub, an index, a repository, a lock, or the list itself."""
    told = {"sha": "c" * 40, "siblings": [{"rfilename": name, "size": 5, "lfs": {"sha256": HASHES["a"]}}]}
    with pytest.raises(artifacts.ArtifactError, match=r"no path inside of the folder"):
        artifacts.model_artifacts("org/m", "main", told, "https://hub.example")
    with pytest.raises(artifacts.ArtifactError, match=r"https://i.example/t.whl .*no path inside of the folder"):
        artifacts.choose_wheels(LOCK, {"torch": [PAGE[0] | {"filename": name}], "ray": PAGE}, "cpu.txt")
    package = debian.Package("x", "1", name, 1, HASHES["a"], "main", "Debian", "https://deb.example/debian")
    with pytest.raises(artifacts.ArtifactError, match=r"no path inside of the folder"):
        artifacts.apt_artifacts([package], "debian 12")
    text = json.dumps({"format": artifacts.FORMAT, "artifacts": [{**asdict(ITEM), "file": name}]})
    with pytest.raises(artifacts.ArtifactError, match=r"no path inside of the folder"):
        artifacts.load(text, "artifacts.json")


def test_a_file_is_listed_once_and_two_that_differ_are_refused() -> None:
    (both,) = artifacts.merged([ITEM, replace(ITEM, wanted_by="two")])
    assert both.wanted_by == "one, two"
    with pytest.raises(artifacts.ArtifactError, match="two different files"):
        artifacts.merged([ITEM, replace(ITEM, sha256=HASHES["b"])])


def test_the_list_reads_back_and_says_what_it_lacks() -> None:
    text = artifacts.dump([ITEM], "prod", ["NVIDIA"], ["a remark"])
    assert artifacts.load(text, "x") == [ITEM]
    content = json.loads(text)
    assert (content["complete"], content["missing"], content["files"], content["bytes"]) == (False, ["NVIDIA"], 1, 10)
    assert json.loads(artifacts.dump([ITEM], "prod", [], []))["complete"] is True
    for wrong in ("{}", "[", '{"format": 2}', '{"format": 1, "artifacts": [{}]}'):
        with pytest.raises(artifacts.ArtifactError, match="make the folder anew"):
            artifacts.load(wrong, "artifacts.json")


def test_the_table_has_a_row_a_file_and_the_sums() -> None:
    text = artifacts.table([ITEM, replace(ITEM, kind="apt", size=3 << 20)], ["NVIDIA's repository"], ["a remark"])
    assert text.count(ITEM.url) == 2
    assert "wheel: 1 files, 10 B" in text
    assert "together: 2 files, 3.0 MiB" in text
    assert "together: 2 files, at least 10 B" in artifacts.table([ITEM, replace(ITEM, kind="apt", size=0)], [], [])
    assert "NOT IN THIS LIST: NVIDIA's repository" in text
    assert "note: a remark" in text
