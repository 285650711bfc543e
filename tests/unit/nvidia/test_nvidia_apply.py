"""What the roles are handed: files, keys and transactions, and what is told of the host's state."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.stack import stack

H200, B200 = "0x2335", "0x2901"


def host(*devices: str, distribution: tuple[str, str] = ("debian", "12"), **more: Any) -> dict[str, Any]:
    functions = [
        {"address": f"0000:{number:02x}:00.0", "device": device, "class": "0x030200"}
        for number, device in enumerate(devices or (H200,))
    ]
    release = "6.1.0-40-amd64" if distribution[0] == "debian" else "6.8.0-90-generic"
    return {
        "distribution": {"id": distribution[0], "version": distribution[1]},
        "kernel": {"release": release, "architecture": "x86_64"},
        "kernels": [{"release": release, "headers": False, "nvidia_module": None}],
        "nvidia_functions": functions,
        "packages": [],
    } | more


def good(facts: dict[str, Any], **request: Any) -> dict[str, Any]:
    answer = stack(facts, request)
    assert answer["problems"] == []
    return answer


def written(answer: dict[str, Any]) -> dict[str, str]:
    return {entry["path"]: entry["content"] for entry in answer["files"] if "content" in entry}


def absent(answer: dict[str, Any]) -> set[str]:
    return {entry["path"] for entry in answer["files"] if entry.get("state") == "absent"}


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_source_of_nvidias_repository() -> None:
    text = written(good(host()))["/etc/apt/sources.list.d/ironrack-nvidia-cuda.sources"]
    assert text.splitlines()[1:] == [
        "Types: deb",
        "URIs: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/",
        "Suites: /",
        "Architectures: amd64",
        "Signed-By: /etc/apt/keyrings/nvidia-cuda.asc",
    ]


def test_folders_of_the_node_become_addresses_that_apt_knows() -> None:
    request = {"nvidia_driver_mirror": "/srv/nvidia/", "nvidia_driver_distribution_mirror": "/srv/debian"}
    files = written(good(host(), **request))
    assert "URIs: file:/srv/nvidia/debian12/x86_64/\n" in files["/etc/apt/sources.list.d/ironrack-nvidia-cuda.sources"]
    security = files["/etc/apt/sources.list.d/ironrack-debian-nvidia-security.sources"]
    assert "URIs: file:/srv/debian-security\n" in security
    assert "Components: contrib\n" in security


def test_sources_that_are_not_wanted_any_more_go() -> None:
    answer = good(host(), nvidia_driver_source="local", nvidia_driver_local="/srv/nvidia")
    local = written(answer)["/etc/apt/sources.list.d/ironrack-nvidia-local.sources"]
    assert "Trusted: yes\n" in local
    assert "Signed-By" not in local
    for name in ("nvidia-cuda", "debian-nvidia", "debian-nvidia-security", "ubuntu-nvidia"):
        assert f"/etc/apt/sources.list.d/ironrack-{name}.sources" in absent(answer)


def test_the_source_of_nvidias_keyring_package_gives_way() -> None:
    """apt refuses the same repository under two keys."""
    assert "/etc/apt/sources.list.d/cuda-debian12-x86_64.list" in absent(good(host()))
    ubuntu = good(host(distribution=("ubuntu", "24.04")))
    assert "/etc/apt/sources.list.d/cuda-ubuntu2404-x86_64.list" in absent(ubuntu)


def test_preferences_hold_the_records_in_their_order() -> None:
    text = written(good(host()))["/etc/apt/preferences.d/00-ironrack-nvidia"]
    records = text.split("\n\n")[1:]
    assert [record.splitlines()[2] for record in records] == [
        "Pin-Priority: 500",
        "Pin-Priority: -1",
        "Pin-Priority: 1001",
    ]
    assert "Pin: version 580.159.04-*" in records[2]
    assert " nvidia-* " in records[2].splitlines()[0]


def test_nouveau_stays_off_and_upgrades_keep_away() -> None:
    files = written(good(host()))
    modprobe = files["/etc/modprobe.d/ironrack-nvidia.conf"].splitlines()
    assert "blacklist nouveau" in modprobe
    assert "options nouveau modeset=0" in modprobe
    unattended = files["/etc/apt/apt.conf.d/52ironrack-nvidia"]
    assert "Unattended-Upgrade::Package-Blacklist {\n" in unattended
    assert '    "libnvidia-";\n' in unattended
    assert unattended.endswith("};\n")


def test_keys_of_ones_own_for_secure_boot() -> None:
    path = "/etc/dkms/framework.conf.d/ironrack.conf"
    assert path in absent(good(host()))
    request = {"nvidia_driver_mok_key": "/root/mok.key", "nvidia_driver_mok_cert": "/root/mok.der"}
    answer = good(host(), **request)
    assert 'mok_signing_key="/root/mok.key"\nmok_certificate="/root/mok.der"\n' in written(answer)[path]
    paths = [entry["path"] for entry in answer["files"]]
    assert paths.index("/etc/dkms") < paths.index("/etc/dkms/framework.conf.d") < paths.index(path)


def test_every_path_is_listed_once_and_below_a_folder_that_is_there() -> None:
    for distribution in (("debian", "12"), ("debian", "13"), ("ubuntu", "22.04"), ("ubuntu", "24.04")):
        paths = [entry["path"] for entry in good(host(distribution=distribution))["files"]]
        assert len(paths) == len(set(paths))


# --- keys ------------------------------------------------------------------------------------------------------------


def test_keys() -> None:
    [key] = good(host(distribution=("debian", "13")))["keyrings"]
    assert key == {
        "path": "/etc/apt/keyrings/nvidia-cuda.asc",
        "url": "https://developer.download.nvidia.com/compute/cuda/repos/debian13/x86_64/8793F200.pub",
        "sha256": None,
        "fingerprint": "02182E60104FCDC26EAE1B8597A5D4CB8793F200",
        "variable": "nvidia_driver_mirror",
    }
    own = {"nvidia_driver_key_url": "/srv/key.asc", "nvidia_driver_key_sha256": "a" * 64}
    [key] = good(host(), nvidia_driver_source="local", nvidia_driver_local="http://depot/n", **own)["keyrings"]
    assert (key["url"], key["sha256"], key["variable"]) == ("/srv/key.asc", "a" * 64, "nvidia_driver_key_url")
    assert good(host(), nvidia_driver_source="local", nvidia_driver_local="/srv/n")["keyrings"] == []


@pytest.mark.parametrize(
    ("request_", "variable"),
    [
        ({"nvidia_driver_key_url": "https://depot/key.asc"}, "nvidia_driver_key_fingerprint"),
        ({"nvidia_driver_mok_key": "/root/mok.key"}, "nvidia_driver_mok_cert"),
        ({"nvidia_driver_mok_cert": "/root/mok.der"}, "nvidia_driver_mok_key"),
        ({"nvidia_driver_mok_cert": "mok.der", "nvidia_driver_mok_key": "/root/mok.key"}, "nvidia_driver_mok_cert"),
    ],
)
def test_variables_that_need_each_other(request_: dict[str, Any], variable: str) -> None:
    problems = stack(host(), request_)["problems"]
    assert variable in [problem["variable"] for problem in problems]


# --- transactions ----------------------------------------------------------------------------------------------------


def versions(answer: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {
        entry["name"]: (entry.get("version", ""), entry.get("group", "")) for entry in answer["transaction"]["install"]
    }


def test_what_is_coupled_has_one_version() -> None:
    facts = host(*[B200] * 8)
    found = versions(good(facts))
    fixed = ("580.159.04-*", "driver")
    for name in ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-fabricmanager", "nvlink5-580"):
        assert found[name] == fixed
    # Numbered by date, by kernel, on its own.
    for name in ("nvlsm", "linux-headers-6.1.0-40-amd64", "datacenter-gpu-manager-4-cuda13"):
        assert found[name] == ("", "")


def test_without_a_known_version_the_branch_is_coupled() -> None:
    found = versions(good(host(), nvidia_driver_source="local", nvidia_driver_local="/srv/n"))
    assert found["nvidia-driver-cuda"] == ("580.*", "driver")


def test_the_distributions_packages_are_of_its_branch() -> None:
    request = {"nvidia_driver_source": "distribution", "python_env_variant": "cu129"}
    found = versions(good(host(), **request))
    # What another source has left in a newer version would otherwise do.
    assert found["libcuda1"] == found["nvidia-persistenced"] == ("535.*", "")
    # Left out, it would be that of the other source, or one of a branch for old GPUs.
    assert found["libnvidia-cfg1"] == ("535.*", "")
    assert found["linux-headers-6.1.0-40-amd64"] == ("", "")
    found = versions(good(host(), **request, nvidia_driver_version="535.261.03"))
    assert found["libcuda1"] == found["nvidia-smi"] == ("535.261.03-*", "driver")
    # Debian numbers them apart from its driver.
    assert found["nvidia-persistenced"] == found["nvidia-modprobe"] == ("535.*", "")
    problems = stack(host(), request | {"nvidia_driver_version": "550.163.01"})["problems"]
    assert [problem["variable"] for problem in problems] == ["nvidia_driver_version"]


def test_holds_of_driver_and_kernel() -> None:
    hold = good(host())["transaction"]["hold"]
    for name in ("nvidia-driver-cuda", "libnvidia-*", "linux-image-*", "linux-headers-*", "linux-image-amd64"):
        assert name in hold
    assert not [name for name in hold if name.startswith("cuda-toolkit")]


def test_the_toolkit_is_held_with_its_parts() -> None:
    answer = good(host())["cuda_transaction"]
    assert answer["install"] == [{"name": "cuda-toolkit-13-0"}]
    assert answer["hold"] == ["cuda-toolkit-13-0", "cuda-*-13-0", "lib*-13-0", "cuda-toolkit-13-0-*"]
    assert answer["remove"] == ["cuda-compat-*"]
    none = good(host(), cuda_version="none")["cuda_transaction"]
    assert none["install"] == none["hold"] == []


def test_a_driver_of_somebody_else_is_left_alone() -> None:
    answer = good(host(), nvidia_driver_source="none")
    assert answer["needed"] is False
    assert answer["files"] == answer["keyrings"] == answer["transaction"]["install"] == []


def test_packages_are_not_installed_over_nvidias_installer() -> None:
    facts = host(nvidia_driver={"runfile": True, "loaded": "580.159.04"})
    [problem] = stack(facts, {})["problems"]
    assert "nvidia-uninstall" in problem["remedy"]
    assert stack(facts, {"nvidia_driver_source": "none"})["problems"] == []


# --- the host's state ------------------------------------------------------------------------------------------------

PROCESS = {"pid": 4711, "name": "python3", "used_mib": 9000, "unit": "vllm@qwen.service", "user": "ironrack"}


def test_who_holds_gpus_that_are_to_get_another_driver() -> None:
    health = {"gpus": [{"index": 0, "processes": [PROCESS]}, {"index": 1, "processes": [PROCESS], "holders": []}]}
    old = host(health=health, nvidia_driver={"loaded": "570.211.01"})
    [text] = [text for text in good(old)["warnings"] if "in use" in text]
    assert "pid 4711 python3 (user ironrack, vllm@qwen.service) on GPU 0, 1" in text
    assert "nothing is unloaded" in text
    current = host(health=health, nvidia_driver={"loaded": "580.159.04"})
    assert not [text for text in good(current)["warnings"] if "in use" in text]
    holder = {"index": 0, "processes": [], "holders": [{"pid": 7, "name": None, "unit": None, "user": None}]}
    unknown = host(health={"gpus": [holder]}, nvidia_driver={"loaded": "570.211.01"})
    assert any("pid 7 ? on GPU 0" in text for text in good(unknown)["warnings"])


@pytest.mark.parametrize(
    ("distribution", "certificate"),
    [(("debian", "12"), "/var/lib/dkms/mok.pub"), (("ubuntu", "24.04"), "/var/lib/shim-signed/mok/MOK.der")],
)
def test_secure_boot_tells_the_steps(distribution: tuple[str, str], certificate: str) -> None:
    on = host(distribution=distribution, secure_boot=True)
    [text] = [text for text in good(on)["warnings"] if "Secure Boot" in text]
    assert f"mokutil --import {certificate}" in text
    assert not any("Secure Boot" in text for text in good(on | {"secure_boot": None})["warnings"])
    own = {"nvidia_driver_mok_key": "/root/k", "nvidia_driver_mok_cert": "/root/own.der"}
    assert any("mokutil --import /root/own.der" in text for text in good(on, **own)["warnings"])


def test_modules_that_the_distribution_signed_need_no_key() -> None:
    on = host(distribution=("ubuntu", "24.04"), secure_boot=True)
    request = {"nvidia_driver_source": "distribution", "nvidia_driver_precompiled": True}
    assert not any("Secure Boot" in text for text in good(on, **request)["warnings"])


def kernel(release: str, module: str | None = "updates/dkms/nvidia.ko", headers: bool = True) -> dict[str, Any]:
    return {"release": release, "headers": headers, "nvidia_module": module}


def built(release: str, version: str = "580.159.04", state: str = "installed") -> dict[str, Any]:
    return {"module": "nvidia", "version": version, "kernel": release, "state": state}


def test_kernels_without_a_module() -> None:
    old, new = "6.1.0-39-amd64", "6.1.0-40-amd64"
    kernels = [kernel(old), kernel(new)]
    assert good(host(kernels=kernels, dkms=[built(old), built(new)]))["unbuilt"] == []
    failed = [built(old), built(new, state="failed")]
    [missing] = good(host(kernels=[kernel(old), kernel(new, None, headers=False)], dkms=failed))["unbuilt"]
    assert (missing["kernel"], missing["log"]) == (new, "/var/lib/dkms/nvidia/580.159.04/build/make.log")
    for word in (new, missing["log"], f"linux-headers-{new} (missing)", f"dkms autoinstall -k {new}"):
        assert word in missing["text"]


def test_a_module_of_another_version_is_none() -> None:
    release = "6.1.0-40-amd64"
    facts = host(kernels=[kernel(release)], dkms=[built(release, "570.211.01")])
    assert [entry["kernel"] for entry in good(facts)["unbuilt"]] == [release]
    # Nor is one that another source has left, although nothing of DKMS is wanted.
    debians = {
        "nvidia_driver_source": "distribution",
        "python_env_variant": "cu129",
        "nvidia_driver_packages": ["libcuda1"],
    }
    assert [entry["kernel"] for entry in good(facts, **debians)["unbuilt"]] == [release]
    facts["dkms"][0]["version"] = "535.309.01"
    assert good(facts, **debians)["unbuilt"] == []
    # Where DKMS knows nothing, the file is all there is to go by.
    assert good(host(kernels=[kernel(release)], dkms=[]))["unbuilt"] == []


def test_headers_that_are_no_package_are_not_asked_for() -> None:
    own, packaged, bare = "6.1.90-site", "6.1.0-40-amd64", "6.1.0-41-amd64"
    package = {"name": f"linux-headers-{packaged}", "version": "6.1.153-1", "state": "ii", "hold": False}
    facts = host(kernels=[kernel(own), kernel(packaged), kernel(bare, headers=False)], packages=[package])
    assert good(facts)["packages"]["headers"] == [f"linux-headers-{packaged}", f"linux-headers-{bare}"]
