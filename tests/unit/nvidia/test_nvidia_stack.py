"""Which stack which host gets, and what is said when a wish cannot be had."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia import matrix
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.errors import StackError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.request import DEFAULTS, check, too_old
from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia.stack import stack

RELEASES = {
    ("debian", "12"): "6.1.0-40-amd64",
    ("debian", "13"): "6.12.94+deb13-amd64",
    ("ubuntu", "22.04"): "5.15.0-160-generic",
    ("ubuntu", "24.04"): "6.8.0-90-generic",
}
H200, H100_PCIE, B200, B300, GB200, V100, T4, RTX_4090, A100 = (
    0x2335,
    0x2331,
    0x2901,
    0x3182,
    0x2941,
    0x1DB5,
    0x1EB8,
    0x2684,
    0x20B2,
)


def host(
    *devices: int, distribution: tuple[str, str] = ("ubuntu", "24.04"), nvswitches: int = 0, **more: Any
) -> dict[str, Any]:
    functions = [
        {"address": f"0000:{number:02x}:00.0", "device": f"0x{device:04x}", "class": "0x030200", "driver": None}
        for number, device in enumerate(devices)
    ]
    functions += [
        {"address": f"0001:{number:02x}:00.0", "device": "0x22a3", "class": "0x068000", "driver": None}
        for number in range(nvswitches)
    ]
    release = RELEASES.get(distribution, "6.1.0-1-amd64")
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


def refused(facts: dict[str, Any], **request: Any) -> list[tuple[str, str]]:
    """(variable, text) of each problem; nothing else may be answered beside one."""
    answer = stack(facts, request)
    assert answer["problems"]
    assert answer["branch"] is None
    assert not answer["packages"]["driver"]
    for problem in answer["problems"]:
        assert problem["variable"] in problem["text"]
        assert problem["remedy"] in problem["text"]
    return [(problem["variable"], problem["text"]) for problem in answer["problems"]]


def test_hgx_h200() -> None:
    answer = good(host(*[H200] * 8, nvswitches=4))
    assert (answer["branch"], answer["flavour"], answer["version"]) == (580, "open", "580.159.04")
    assert answer["packages"] == {
        "driver": ["libnvidia-compute-580", "nvidia-dkms-580-open", "nvidia-utils-580", "nvidia-persistenced"],
        "fabric": ["nvidia-fabricmanager", "libnvidia-nscq"],
        "cuda": ["cuda-toolkit-13-0"],
        "headers": ["linux-headers-6.8.0-90-generic"],
        "tools": ["datacenter-gpu-manager-4-cuda13"],
    }
    assert [service["name"] for service in answer["services"]] == [
        "nvidia-persistenced",
        "nvidia-fabricmanager",
        "nvidia-dcgm",
    ]
    assert answer["fabric_version"] == answer["version"]
    assert answer["dkms"] == "nvidia"
    assert answer["gdr"] == "none"


@pytest.mark.parametrize("device", [H100_PCIE, 0x233B, RTX_4090, T4])
def test_cards_need_no_fabric_manager(device: int) -> None:
    answer = good(host(*[device] * 8))
    assert answer["packages"]["fabric"] == []
    assert answer["hardware"]["nvswitch"] is False


def test_four_sxm_modules_have_no_switch_and_a_virtual_machine_is_warned() -> None:
    four = good(host(*[H200] * 4))
    assert four["packages"]["fabric"] == []
    eight = good(host(*[H200] * 8))
    assert eight["packages"]["fabric"] == []
    assert any("without an NVSwitch" in text for text in eight["warnings"])
    assert not any("without an NVSwitch" in text for text in four["warnings"])


def test_blackwell_boards_get_the_subnet_manager() -> None:
    answer = good(host(*[B200] * 8))
    assert answer["packages"]["fabric"] == ["nvidia-fabricmanager", "libnvidia-nscq", "nvlink5-580", "nvlsm"]
    assert answer["flavour"] == "open"
    assert good(host(B200))["packages"]["fabric"] == []


def test_grace_blackwell_gets_imex_and_no_fabric_manager() -> None:
    facts = host(*[GB200] * 4, kernel={"release": "6.8.0-90-generic-64k", "architecture": "aarch64"})
    answer = good(facts)
    assert answer["packages"]["fabric"] == ["nvidia-imex"]
    assert answer["repositories"][0]["uris"][0].endswith("/ubuntu2404/sbsa/")


@pytest.mark.parametrize(
    ("branch", "fabric"),
    [
        (570, ["nvidia-fabricmanager-570", "libnvidia-nscq-570"]),
        (575, ["nvidia-fabricmanager-575", "libnvidia-nscq-575"]),
        (580, ["nvidia-fabricmanager", "libnvidia-nscq"]),
        (595, ["nvidia-fabricmanager", "libnvidia-nscq"]),
    ],
)
@pytest.mark.parametrize("distribution", RELEASES)
def test_names_of_fabric_manager(distribution: tuple[str, str], branch: int, fabric: list[str]) -> None:
    facts = host(*[H200] * 8, nvswitches=4, distribution=distribution)
    answer = good(facts, nvidia_driver_branch=branch, python_env_variant="cu129")
    assert answer["packages"]["fabric"] == fabric


@pytest.mark.parametrize(
    ("distribution", "branch", "flavour", "driver"),
    [
        (("debian", "12"), 580, "open", "nvidia-kernel-open-dkms"),
        (("debian", "13"), 580, "proprietary", "nvidia-kernel-dkms"),
        (("debian", "12"), 550, "proprietary", "cuda-drivers-550"),
        (("ubuntu", "22.04"), 570, "open", "nvidia-dkms-570-open"),
        (("ubuntu", "24.04"), 595, "open", "nvidia-dkms-open"),
        (("ubuntu", "24.04"), 595, "proprietary", "nvidia-dkms"),
    ],
)
def test_names_of_the_driver(distribution: tuple[str, str], branch: int, flavour: str, driver: str) -> None:
    answer = good(
        host(H100_PCIE, distribution=distribution),
        nvidia_driver_branch=branch,
        nvidia_driver_flavour=flavour,
        python_env_variant="cu129",
    )
    assert driver in answer["packages"]["driver"]


def test_old_generations_take_the_proprietary_module_and_cuda_12() -> None:
    [(variable, text)] = refused(host(V100))
    assert variable == "python_env_variant"
    assert "cu129" in text
    answer = good(host(V100), python_env_variant="cu129")
    assert (answer["branch"], answer["flavour"]) == (580, "proprietary")
    assert any("begin with Turing" in text for text in answer["warnings"])
    [(variable, _)] = refused(host(V100), python_env_variant="cu129", nvidia_driver_branch=590)
    assert variable == "nvidia_driver_branch"
    [(variable, _)] = refused(host(V100), python_env_variant="cu129", nvidia_driver_flavour="open")
    assert variable == "nvidia_driver_flavour"


def test_blackwell_takes_the_open_module_alone() -> None:
    [(variable, text)] = refused(host(B200), nvidia_driver_flavour="proprietary")
    assert variable == "nvidia_driver_flavour"
    assert "open" in text
    [(variable, text)] = refused(host(B300), nvidia_driver_branch=570, python_env_variant="cu129")
    assert variable == "nvidia_driver_branch"
    assert "580" in text


def test_no_module_drives_volta_and_blackwell_together() -> None:
    [(_, text)] = refused(host(V100, B200), python_env_variant="cu129")
    assert "different hosts" in text


@pytest.mark.parametrize(("version", "branch"), [("12", 535), ("13", 550)])
def test_debians_own_driver_is_too_old_for_cuda_13(version: str, branch: int) -> None:
    facts = host(H100_PCIE, distribution=("debian", version))
    [(variable, text)] = refused(facts, nvidia_driver_source="distribution")
    assert variable == "nvidia_driver_source"
    assert f"branch {branch}" in text
    assert "cu129" in text
    assert "nvidia or local" in text
    answer = good(facts, nvidia_driver_source="distribution", python_env_variant="cu129")
    assert answer["branch"] == branch
    assert answer["packages"]["driver"][0] == "nvidia-kernel-dkms"
    assert answer["packages"]["cuda"] == answer["packages"]["tools"] == []
    assert answer["version_pin"] is None
    assert answer["pins"] == [{"package": answer["pins"][0]["package"], "pin": "release o=NVIDIA", "priority": -1}]
    assert {entry["name"] for entry in answer["repositories"]} == {"debian-nvidia", "debian-nvidia-security"}
    assert any("minor version compatibility" in text for text in answer["warnings"])


def test_debian_has_no_fabric_manager() -> None:
    facts = host(*[A100] * 8, nvswitches=6, distribution=("debian", "13"))
    [(variable, text)] = refused(facts, nvidia_driver_source="distribution", python_env_variant="cu129")
    assert variable == "nvidia_driver_source"
    assert "Fabric Manager" in text


def test_debian_12_cannot_install_its_open_module() -> None:
    facts = host(H100_PCIE, distribution=("debian", "12"))
    request = {"nvidia_driver_source": "distribution", "python_env_variant": "cu129"}
    assert good(facts, **request)["flavour"] == "proprietary"
    [(variable, _)] = refused(facts, **request, nvidia_driver_flavour="open")
    assert variable == "nvidia_driver_flavour"


def test_ubuntus_own_driver() -> None:
    answer = good(host(*[H200] * 8, nvswitches=4), nvidia_driver_source="distribution")
    assert "nvidia-dkms-580-server-open" in answer["packages"]["driver"]
    assert answer["packages"]["fabric"] == ["nvidia-fabricmanager-580", "libnvidia-nscq-580"]
    built = good(host(H200), nvidia_driver_source="distribution", nvidia_driver_precompiled=True)
    assert "linux-modules-nvidia-580-server-open-6.8.0-90-generic" in built["packages"]["driver"]
    assert not [name for name in built["packages"]["driver"] if name.startswith("nvidia-dkms")]
    assert built["dkms"] is None


def test_local_packages() -> None:
    facts = host(H200)
    [(variable, _)] = refused(facts, nvidia_driver_source="local")
    assert variable == "nvidia_driver_local"
    [(variable, _)] = refused(facts, nvidia_driver_source="local", nvidia_driver_local="https://depot/nvidia")
    assert variable == "nvidia_driver_key_url"
    answer = good(facts, nvidia_driver_source="local", nvidia_driver_local="/srv/nvidia")
    [repository] = answer["repositories"]
    assert repository["uris"] == ["file:/srv/nvidia"]
    assert repository["trusted"] is True
    assert answer["version"] is None
    assert answer["version_pin"] == "580.*"


@pytest.mark.parametrize("name", ["rhel", "rocky", "almalinux"])
def test_red_hat_is_prepared_and_refused(name: str) -> None:
    [(variable, text)] = refused(host(H200, distribution=(name, "9.6")))
    assert variable == "ironrack_host.distribution"
    assert "no test has installed" in text


def test_unknown_distributions() -> None:
    [(variable, text)] = refused(host(H200, distribution=("arch", "")))
    assert variable == "ironrack_host.distribution"
    assert "debian 12" in text
    assert refused({"nvidia_functions": host(H200)["nvidia_functions"]})


def test_floor_of_cuda_13() -> None:
    [(variable, text)] = refused(host(RTX_4090), nvidia_driver_branch=570)
    assert variable == "nvidia_driver_branch"
    assert "cu129" in text
    assert "cuda_compat" not in text
    [(variable, text)] = refused(host(H200), nvidia_driver_version="570.211.01")
    assert variable == "nvidia_driver_version"
    assert "cuda_compat" in text


def test_compat_is_for_data_centre_cards() -> None:
    answer = good(host(H200), nvidia_driver_branch=570, cuda_compat=True)
    assert "cuda-compat-13-0" in answer["packages"]["cuda"]
    assert good(host(H200), cuda_compat=True)["packages"]["cuda"] == ["cuda-toolkit-13-0"]
    [(variable, text)] = refused(host(RTX_4090), cuda_compat=True)
    assert variable == "cuda_compat"
    assert "804" in text
    assert refused(host(RTX_4090), nvidia_driver_branch=570, cuda_compat=True)


def test_toolkit_of_the_runtimes_major_version() -> None:
    assert good(host(H200), python_env_variant="cu129")["packages"]["cuda"] == ["cuda-toolkit-12-9"]
    assert good(host(H200), cuda_version="none")["packages"]["cuda"] == []
    assert good(host(H200), cuda_version="13.1")["packages"]["cuda"] == ["cuda-toolkit-13-1"]
    [(variable, _)] = refused(host(H200), cuda_version="12.9")
    assert variable == "cuda_version"


def test_version_and_branch_contradict() -> None:
    [(variable, _)] = refused(host(H200), nvidia_driver_branch="580", nvidia_driver_version="595.71.05")
    assert variable == "nvidia_driver_version"
    assert good(host(H200), nvidia_driver_version="595.71.05")["branch"] == 595


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nvidia_driver_source", "runfile"),
        ("nvidia_driver_branch", "581"),
        ("nvidia_driver_branch", 580.0),
        ("nvidia_driver_version", "580"),
        ("nvidia_driver_version", "580.159.04-1ubuntu1"),
        ("nvidia_driver_version", "699.10.01"),
        ("nvidia_driver_flavour", "closed"),
        ("nvidia_driver_precompiled", "maybe"),
        ("nvidia_driver_packages", "nvidia-open"),
        ("nvidia_driver_packages", ["nvidia open"]),
        ("nvidia_driver_mirror", ""),
        ("nvidia_driver_mirror", "mirror"),
        ("nvidia_driver_key_sha256", "abc"),
        ("nvidia_driver_key_fingerprint", "3bf863cc"),
        ("cuda_version", 13.0),
        ("cuda_version", "thirteen"),
        ("cuda_compat", 2),
        ("gpu_fabric_manager", True),
        ("gpu_fabric_gdr", "on"),
        ("python_env_variant", "cu128"),
        ("gpus", 8),
        ("gpus", [5, None]),
        ("gpus", {"count": -1, "name": "NVIDIA H200"}),
        ("gpus", {"count": True, "name": "NVIDIA H200"}),
        ("nvidia_driver_branch", "５８０"),
        ("nvidia_driver_branch", "0580"),
        ("nvidia_driver_version", "５８０.159.04"),
        ("cuda_version", "13.00"),
        ("nvidia_driver_brach", 580),
    ],
)
def test_wrong_values_name_the_variable(name: str, value: Any) -> None:
    [(variable, text)] = refused(host(H200), **{name: value})
    assert variable == name
    assert repr(value) in text


def test_misspelt_variables_get_a_suggestion() -> None:
    [(_, text)] = refused(host(H200), nvidia_driver_brach=580)
    assert "nvidia_driver_branch" in text


@pytest.mark.parametrize(("facts", "request_"), [(None, {}), ([], {}), ({}, "cu130")])
def test_what_cannot_be_read(facts: Any, request_: Any) -> None:
    with pytest.raises(StackError, match="hand over"):
        stack(facts, request_)


def test_hosts_without_gpus() -> None:
    answer = good(host())
    assert answer["needed"] is False
    assert "gpus" in answer["warnings"][0]
    assert good(host(H200), python_env_variant="cpu")["needed"] is False


def test_the_inventory_stands_in_for_the_bus() -> None:
    declared = {"count": 8, "name": "NVIDIA H100 80GB HBM3", "memory_total_mib": 81559}
    answer = good(host(), gpus=declared)
    assert answer["hardware"]["origin"] == "inventory"
    assert answer["packages"]["fabric"] == ["nvidia-fabricmanager", "libnvidia-nscq"]
    assert "the variable gpus" in answer["warnings"][0]
    assert good(host(), gpus=[declared | {"count": 4}])["packages"]["fabric"] == []
    [(variable, text)] = refused(host(), gpus=[{"count": 1, "name": "Radeon"}])
    assert variable == "gpus"
    assert "Radeon" in text


def test_unknown_devices_need_a_decision() -> None:
    [(variable, text)] = refused(host(0x4000))
    assert variable == "ironrack_host.nvidia_functions"
    assert "10de:4000" in text
    answer = good(host(0x4000), nvidia_driver_branch=595, nvidia_driver_flavour="open")
    assert any("unchecked" in text for text in answer["warnings"])
    [(_, text)] = refused(host(0x102D))
    assert "older than Maxwell" in text


def test_manager_by_hand() -> None:
    [(variable, _)] = refused(host(H100_PCIE), gpu_fabric_manager="present")
    assert variable == "gpu_fabric_manager"
    assert good(host(B200), gpu_fabric_manager="present")["packages"]["fabric"]
    answer = good(host(*[H200] * 8, nvswitches=4), gpu_fabric_manager="absent")
    assert answer["packages"]["fabric"] == []
    assert any("802" in text for text in answer["warnings"])


def test_gpudirect() -> None:
    rdma = [{"device": "mlx5_0"}]
    assert good(host(H200, rdma=rdma))["gdr"] == "dma_buf"
    answer = good(host(H200, rdma=rdma), nvidia_driver_flavour="proprietary")
    assert answer["gdr"] == "peermem"
    assert "nvidia_peermem" in answer["modules"]["load"]
    assert refused(host(H200, rdma=rdma), nvidia_driver_flavour="proprietary", gpu_fabric_gdr="dma_buf")
    old = {"release": "5.10.0-8-amd64", "architecture": "x86_64"}
    assert good(host(H200, rdma=rdma, kernel=old, kernels=[{"release": "5.10.0-8-amd64"}]))["gdr"] == "peermem"


def test_the_open_module_of_old_branches_needs_an_option_for_consumer_cards() -> None:
    request = {"nvidia_driver_branch": 550, "nvidia_driver_flavour": "open", "python_env_variant": "cu129"}
    assert "nvidia" in good(host(RTX_4090), **request)["modules"]["options"]
    assert "nvidia" not in good(host(H100_PCIE), **request)["modules"]["options"]
    assert good(host(H100_PCIE))["modules"]["options"] == {"nouveau": "modeset=0"}


def test_headers_for_every_kernel_and_holds_of_the_kernel() -> None:
    facts = host(H200, kernels=[{"release": "6.8.0-89-generic"}, {"release": "6.8.0-90-generic"}])
    answer = good(facts)
    assert answer["packages"]["headers"] == ["linux-headers-6.8.0-89-generic", "linux-headers-6.8.0-90-generic"]
    assert "linux-image-generic-hwe-24.04" in answer["hold"]
    installed = [{"name": "linux-image-generic", "version": "6.8.0-90.91", "state": "ii", "hold": False}]
    held = good(facts | {"packages": installed})["hold"]
    assert "linux-image-generic" in held
    assert "linux-image-generic-hwe-24.04" not in held
    debian = good(host(H200, distribution=("debian", "13")))
    assert {"linux-image-amd64", "linux-headers-amd64"} <= set(debian["hold"])
    bare = good(host(H200, kernels=[]))
    assert bare["packages"]["headers"] == ["linux-headers-6.8.0-90-generic"]
    assert any("kernels is empty" in text for text in bare["warnings"])


def test_the_kernel_of_a_container_is_not_the_hosts() -> None:
    """A node of the lab runs the kernel of the machine below it, whose headers it cannot have."""
    facts = host(H200, container="podman", kernels=[{"release": "6.1.0-40-amd64"}], distribution=("debian", "12"))
    facts["kernel"] = {"release": "6.6.1-foreign", "architecture": "x86_64"}
    assert good(facts)["packages"]["headers"] == ["linux-headers-6.1.0-40-amd64"]


def test_pins() -> None:
    pins = good(host(*[H200] * 8, nvswitches=4))["pins"]
    assert [(pin["pin"], pin["priority"]) for pin in pins] == [
        ("release o=Ubuntu", 500),
        ("release o=Ubuntu", -1),
        ("version 580.159.04-*", 1001),
    ]
    assert pins[1]["package"] == pins[2]["package"]
    # Each pattern costs apt time at every start; names cost none. Wider than what is coupled, so nothing is left out.
    patterns = pins[2]["package"].split()
    assert sum("*" in pattern for pattern in patterns) == 2
    for pattern in matrix.COUPLED:
        assert any(fnmatchcase(pattern.rstrip("*"), other) for other in patterns), pattern
    assert {"libnvsdm-580", "nvlink5-580"} <= set(patterns)
    assert "nvidia-installer-cleanup" in pins[0]["package"].split()


def test_repositories_have_a_key_each() -> None:
    [repository] = good(host(H200))["repositories"]
    assert repository["key_url"].endswith("/ubuntu2404/x86_64/3bf863cc.pub")
    assert repository["key_fingerprint"].endswith("3BF863CC")
    assert repository["trusted"] is False
    first, *rest = good(host(H200, distribution=("debian", "13")), nvidia_driver_mirror="https://mirror/cuda/")[
        "repositories"
    ]
    assert first["uris"] == ["https://mirror/cuda/debian13/x86_64/"]
    assert first["key_fingerprint"].endswith("8793F200")
    assert [entry["components"] for entry in rest] == [["contrib"], ["contrib"]]


def test_a_mirror_with_a_key_of_its_own() -> None:
    own = {"key_url": "file:///srv/key.asc", "key_sha256": "a" * 64, "key_fingerprint": "B" * 40}
    [repository] = good(host(H200), **{f"nvidia_driver_{name}": value for name, value in own.items()})["repositories"]
    assert {name: repository[name] for name in own} == own


def package(name: str, state: str = "ii", version: str = "1") -> dict[str, Any]:
    return {"name": name, "version": version, "state": state, "hold": state[0] == "h"}


def test_what_is_removed() -> None:
    there = [
        package("nvidia-dkms-570-open"),
        package("libnvidia-compute-570", "hi"),
        package("libnvidia-compute-580"),
        package("libnvidia-cfg1-580"),
        package("nvidia-fabricmanager-570"),
        package("nvidia-dkms-580"),
        package("nvidia-utils-580-server"),
        package("nvidia-driver-pinning-570"),
        package("xserver-xorg-video-nouveau"),
        package("nvidia-utils-550", "rc"),
        package("nvidia-container-toolkit"),
        package("libnvidia-container1"),
        package("cuda-toolkit-12-8"),
        package("linux-image-generic"),
    ]
    answer = good(host(H200, packages=there))
    assert answer["remove"] == [
        "libnvidia-compute-570",
        "nvidia-dkms-570-open",
        "nvidia-dkms-580",
        "nvidia-driver-pinning-570",
        "nvidia-fabricmanager-570",
        "nvidia-utils-580-server",
        "xserver-xorg-video-nouveau",
    ]


@pytest.mark.parametrize(
    ("branch", "there"),
    [(580, "nvidia-fabricmanager-570"), (570, "nvidia-fabricmanager"), (570, "libnvidia-nscq")],
)
def test_the_same_files_under_another_name_go_in_the_same_transaction(branch: int, there: str) -> None:
    facts = host(*[H200] * 8, nvswitches=4, distribution=("debian", "12"), packages=[package(there)])
    answer = good(facts, nvidia_driver_branch=branch, python_env_variant="cu129")
    assert answer["transaction"]["remove"] == [there]
    assert there not in answer["packages"]["fabric"]


def test_what_is_stale_once_the_new_branch_is_there() -> None:
    there = [
        package("libnvidia-cfg1", version="550.163.01-2"),
        package("nvidia-alternative", version="580.159.04-1"),
        package("nvidia-persistenced", version="550.163.01-1"),
        package("nvidia-kernel-common", version="20240109+1"),
        package("libnvidia-container1", version="1.18.0-1"),
        package("nvidia-fabricmanager-570", "rc", version="570.211.01-1"),
    ]
    answer = good(host(H200, distribution=("debian", "12"), packages=there))
    assert answer["stale"] == ["libnvidia-cfg1"]
    assert answer["remove"] == []


@pytest.mark.parametrize(
    ("branch", "there", "gone"),
    [
        (580, "datacenter-gpu-manager-4-cuda12", True),
        (570, "datacenter-gpu-manager-4-cuda13", True),
        (580, "datacenter-gpu-manager-4-cuda-all", True),
        (580, "datacenter-gpu-manager-4-proprietary-cuda12", True),
        (580, "datacenter-gpu-manager-4-proprietary-cuda13", False),
        (580, "datacenter-gpu-manager-4-core", False),
        (580, "datacenter-gpu-manager", True),
    ],
)
def test_one_dcgm_is_left(branch: int, there: str, gone: bool) -> None:
    facts = host(H200, packages=[package(there)])
    answer = good(facts, nvidia_driver_branch=branch, python_env_variant="cu129")
    assert answer["transaction"]["remove"] == ([there] if gone else [])
    without = good(facts, nvidia_driver_branch=branch, python_env_variant="cu129", gpu_fabric_dcgm=False)
    assert without["transaction"]["remove"] == [], "where DCGM is not this role's, all of it is left alone"


def test_libraries_that_programs_do_not_find() -> None:
    there = [
        package("libcuda1", version="580.159.04-1"),
        package("libnvidia-ml1", version="580.159.04-1"),
        package("libnvidia-ml-dev", version="12.4.127~12.4.1-8"),
        package("libnvidia-compute-570", version="570.211.01-0ubuntu1") | {"state": "rc"},
    ]
    facts = host(H200, distribution=("debian", "12"), packages=there)
    assert good(facts)["unlinked"] == [], "facts that do not tell of libraries prove nothing"
    found = {"libcuda": "580.159.04", "libnvidia-ml": "580.159.04"}
    assert good(facts | {"nvidia_driver": {"libraries": found}})["unlinked"] == []
    (told,) = good(facts | {"nvidia_driver": {"libraries": {"libcuda": "580.159.04"}}})["unlinked"]
    assert told.startswith("libnvidia-ml1 580.159.04 is installed, but libnvidia-ml.so.1 leads to nothing")
    old = found | {"libcuda": "535.261.03"}
    (told,) = good(facts | {"nvidia_driver": {"libraries": old}})["unlinked"]
    assert told.startswith("libcuda1 580.159.04 is installed, but libcuda.so.1 leads to 535.261.03")


def test_a_loaded_driver_is_told_of() -> None:
    facts = host(H200)
    older = facts | {"nvidia_driver": {"loaded": "570.211.01"}}
    same = facts | {"nvidia_driver": {"loaded": "580.159.04"}}
    assert any("an upgrade" in text and "570.211.01" in text for text in good(older)["warnings"])
    assert good(same)["warnings"] == good(facts)["warnings"]
    assert good(older) | {"warnings": []} == good(same) | {"warnings": []}
    facts |= {"health": {"gpus": [{"index": 0, "processes": [{"pid": 4711, "name": "python3"}]}]}}
    assert any("pid 4711" in text for text in good(facts | {"nvidia_driver": {"loaded": "570.211.01"}})["warnings"])


@pytest.mark.parametrize("newer", ["580.211.01", "595.71.05"])
def test_nothing_is_downgraded_unasked(newer: str) -> None:
    """What is newer and runs the runtime stays, with its reason, until version or branch name another."""
    there = [package("libnvidia-compute-580", version=f"{newer}-0ubuntu1")]
    for facts in (host(H200, packages=there), host(H200, nvidia_driver={"loaded": newer})):
        answer = good(facts)
        assert (answer["version"], answer["branch"], answer["version_pin"]) == (newer, int(newer[:3]), f"{newer}-*")
        assert any(f"driver {newer} is installed" in text and "kept" in text for text in answer["reasons"])
        assert not any("grade" in text for text in answer["warnings"])
        assert good(facts, nvidia_driver_branch=newer[:3])["version"] == newer
        assert good(facts, nvidia_driver_version="580.159.04")["version"] == "580.159.04"
    facts = host(H200, packages=[package("libnvidia-compute-595", version="595.71.05-1")])
    assert good(facts, nvidia_driver_branch=580)["version"] == "580.159.04"


def test_what_is_installed_counts_and_not_what_a_reboot_will_unload() -> None:
    there = [package("libnvidia-compute-580", version="580.159.04-0ubuntu1")]
    answer = good(host(H200, packages=there, nvidia_driver={"loaded": "595.71.05"}))
    assert answer["version"] == "580.159.04"
    left = [package("libnvidia-compute-595", "rc", version="595.71.05-0ubuntu1")]
    assert good(host(H200, packages=there + left))["version"] == "580.159.04"


def test_a_newer_driver_that_does_not_drive_the_gpus_is_replaced() -> None:
    there = [package("libnvidia-compute-595", version="595.71.05-0ubuntu1")]
    answer = good(host(V100, packages=there), python_env_variant="cu129")
    assert answer["branch"] == 580
    assert any("595.71.05 is installed and replaced" in text for text in answer["reasons"])


def test_an_unknown_newer_driver_is_not_replaced_unasked() -> None:
    facts = host(H200, packages=[package("libnvidia-compute-701", version="701.10.01-1")])
    [(variable, text)] = refused(facts)
    assert variable == "nvidia_driver_version"
    assert "701.10.01" in text
    assert "580.159.04" in text
    assert good(facts, nvidia_driver_version="580.159.04")["version"] == "580.159.04"


def test_a_folder_of_the_site_keeps_the_newer_branch() -> None:
    facts = host(H200, packages=[package("libnvidia-compute-595", version="595.71.05-1")])
    answer = good(facts, nvidia_driver_source="local", nvidia_driver_local="/srv/nvidia")
    assert (answer["branch"], answer["version"], answer["version_pin"]) == (595, None, "595.*")


@pytest.mark.parametrize("text", ["yes", "true", "True", "on", "1", 1])
def test_switches_may_be_texts(text: Any) -> None:
    """-e gives texts; what the inventory's check takes must not be refused by a role after hosts were changed."""
    assert "cuda-compat-13-0" in good(host(H200), nvidia_driver_branch=570, cuda_compat=text)["packages"]["cuda"]
    assert good(host(H200), gpu_fabric_dcgm="no")["packages"]["tools"] == []


@pytest.mark.parametrize(
    ("request_", "variable"),
    [
        ({"nvidia_driver_branch": 570, "nvidia_driver_version": "580.159.04", "cuda_compat": True}, "version"),
        ({"cuda_version": "12.9"}, "cuda_version"),
        ({"cuda_version": "13.0", "python_env_variant": "cu129"}, "cuda_version"),
        ({"nvidia_driver_source": "local"}, "nvidia_driver_local"),
        ({"nvidia_driver_precompiled": "yes"}, "nvidia_driver_precompiled"),
    ],
)
def test_contradictions_need_no_host(request_: dict[str, Any], variable: str) -> None:
    [problem] = check(request_)[1]
    assert problem.variable.endswith(variable)
    assert problem.remedy
    assert len(refused(host(H200), **request_)) == 1


def test_a_branch_below_the_floor_needs_no_host() -> None:
    for wish in ({"nvidia_driver_branch": 550}, {"nvidia_driver_version": "570.211.01"}):
        [problem] = too_old(check(wish)[0])
        assert problem.variable in wish
        assert "580" in problem.message
        assert "cu129" in problem.remedy
        for more in ({"cuda_compat": "yes"}, {"python_env_variant": "cu129"}, {"python_env_variant": "cpu"}):
            assert too_old(check(wish | more)[0]) == []
    assert too_old(check({})[0]) == []


def test_modules_built_beforehand_are_ubuntus() -> None:
    wish = {"nvidia_driver_precompiled": True, "nvidia_driver_source": "distribution", "python_env_variant": "cu129"}
    [(variable, text)] = refused(host(T4, distribution=("debian", "12")), **wish)
    assert variable == "nvidia_driver_precompiled"
    assert "debian 12" in text
    assert any("linux-modules-nvidia" in name for name in good(host(T4), **wish)["packages"]["driver"])


@pytest.mark.parametrize(
    ("devices", "declared", "fabric"),
    [
        ([0x2920] * 8, {"count": 8, "name": "NVIDIA B200"}, True),
        ([B200] * 7, {"count": 8, "name": "NVIDIA B200"}, True),
        ([B200] * 7, [], False),
        ([0x2920] * 8, {"count": 8, "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition"}, False),
    ],
)
def test_boards_of_blackwell(devices: list[int], declared: Any, fabric: bool) -> None:
    answer = good(host(*devices), gpus=declared)
    assert ("nvidia-fabricmanager" in answer["packages"]["fabric"]) == fabric
    assert answer["warnings"], "an unknown board, or one that has lost a GPU, is told of"


def test_the_drivers_own_name_of_an_unknown_board_counts() -> None:
    facts = host(*[0x2920] * 8, gpus=[{"name": "NVIDIA B200", "memory_total_mib": 183359}] * 8)
    answer = good(facts)
    assert answer["hardware"]["datacenter"]
    assert answer["hardware"]["nvswitch"]
    assert any("10de:2920" in text and "nvidia-smi" in text for text in answer["warnings"])
    assert good(host(*[B200] * 8), gpus={"count": 8, "name": "NVIDIA B200"})["warnings"] == []


def test_an_unknown_generation_is_told_by_its_name() -> None:
    answer = good(host(0x4000), gpus={"count": 1, "name": "NVIDIA B300"})
    assert answer["flavour"] == "open"
    assert any("10de:4000" in text for text in answer["warnings"])


def test_second_hand_rows_are_told_of() -> None:
    reasons = good(host(*[B200] * 8, distribution=("debian", "13")), nvidia_driver_branch=595)["reasons"]
    [told] = [text for text in reasons if text.startswith("what is known of")]
    for name in ("NVIDIA B200", "branch 595", "debian 13"):
        assert name in told
    assert "what is known of" not in " ".join(good(host(H200))["reasons"])


def test_debian_13s_repository_begins_later() -> None:
    """With a mirror of the site, what that holds is the site's business."""
    facts = host(H200, distribution=("debian", "13"))
    answer = good(facts)
    assert (answer["branch"], answer["cuda"]["toolkit"]) == (595, "13.1")
    assert any("begins with 590" in text for text in answer["reasons"])
    assert not any("not known to hold" in text for text in answer["warnings"])
    mirrored = good(facts, nvidia_driver_mirror="https://mirror/cuda")
    assert (mirrored["branch"], mirrored["cuda"]["toolkit"]) == (580, "13.0")
    asked = good(facts, nvidia_driver_branch=580, cuda_version="13.0")
    assert len([text for text in asked["warnings"] if "580" in text or "13.0" in text]) == 2
    old = good(host(V100, distribution=("debian", "13")), python_env_variant="cu129")
    assert old["branch"] == 580
    assert any("not known to hold a toolkit of CUDA 12" in text for text in old["warnings"])


@pytest.mark.parametrize("name", [name for name in DEFAULTS if "mirror" in name or name.endswith(("_local", "_url"))])
def test_a_login_in_an_address_is_refused_and_not_shown(name: str) -> None:
    [problem] = check({name: "http://user:s3cret@host/repos", "nvidia_driver_key_sha256": "a" * 64})[1]
    assert problem.variable == name
    assert "s3cret" not in str(problem.as_dict())
    assert "auth.conf.d" in problem.remedy
    assert check({name: "http://host/re@pos", "nvidia_driver_key_sha256": "a" * 64})[1] == []


def test_a_reboot_is_announced_where_no_driver_is_loaded() -> None:
    assert any("reboot" in text for text in good(host(H200))["reasons"])
    assert not any("reboot" in text for text in good(host(H200, nvidia_driver={"loaded": "580.159.04"}))["reasons"])


def test_packages_named_twice_are_installed_once() -> None:
    answer = good(host(H200), nvidia_driver_packages=["nvidia-open", "nvidia-open", "datacenter-gpu-manager-4-cuda13"])
    names = [entry["name"] for entry in answer["transaction"]["install"]]
    assert len(names) == len(set(names))


def test_packages_by_hand() -> None:
    answer = good(host(H200), nvidia_driver_packages=["nvidia-open-580"])
    assert answer["packages"]["driver"] == ["nvidia-open-580"]
