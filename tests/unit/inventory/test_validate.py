"""Variables against the contract."""
# ruff: noqa: S104  # nothing listens here

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.contract import CONTRACT, SITE, SWITCHES
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory.validate import (
    CONDA_PYTHONS,
    Problem,
    check_controller,
    check_host_names,
    render,
    show,
    validate,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LOCKS = Path(__file__).resolve().parents[3] / "roles" / "python_env" / "files" / "locks"
ROLES = {
    "ray_port": {"type": "int", "default": 6379, "description": "x"},
    "base_packages": {"type": "list", "elements": "str", "description": "x"},
    "ray_token": {"type": "str", "no_log": True, "choices": ["never"], "description": "x"},
    "vllm_limits": {"type": "dict", "options": {"nofile": {"type": "int", "description": "x"}}, "description": "x"},
}
INSTANCE = {"model": {"path": "/data/m"}, "nodes": "vllm_nodes"}


def problems(variables: dict[str, Any], extra: tuple[str, ...] = ()) -> list[Problem]:
    return validate({"n1": variables}, ROLES, extra).problems


def instance(**changes: Any) -> dict[str, Any]:
    return {"vllm_instances": {"a": {**INSTANCE, **changes}}}


def test_good_values_and_defaults() -> None:
    checked = validate({"n1": {**instance(context_length="4096"), "ray_port": "6379", "gpus": None}}, ROLES)
    assert checked.problems == []
    spec = checked.values["n1"]["vllm_instances"]["a"]
    assert spec["context_length"] == 4096
    assert (spec["port"], spec["master_port"], spec["executor"]) == (8000, 29501, "auto")
    assert checked.values["n1"]["ray_port"] == 6379


@pytest.mark.parametrize(
    ("variables", "variable", "value", "words"),
    [
        ({"cluster_adress": "10.0.0.1"}, "cluster_adress", "10.0.0.1", ["unknown variable", "cluster_address"]),
        ({"RAY_PORT": 1}, "RAY_PORT", "1", ["did you mean ray_port"]),
        ({"whatever": 1}, "whatever", "1", ["site_"]),
        (instance(contxt_length=1), "vllm_instances.a.contxt_length", "1", ["unknown key", "context_length"]),
        (instance(model={"pth": "/x"}), "vllm_instances.a.model.pth", "/x", ["did you mean path"]),
        (instance(parallelism={"tensr": 2}), "vllm_instances.a.parallelism.tensr", "2", ["did you mean tensor"]),
        (instance(executor="slurm"), "vllm_instances.a.executor", "slurm", ["auto, ray, mp"]),
        (instance(port="http"), "vllm_instances.a.port", "http", ["an integer", "8000"]),
        (instance(port=80), "vllm_instances.a.port", "80", ["1024 or more"]),
        (instance(port=70000), "vllm_instances.a.port", "70000", ["65535 or less"]),
        (instance(context_length="long"), "vllm_instances.a.context_length", "long", ["an integer or auto"]),
        (instance(context_length=0), "vllm_instances.a.context_length", "0", ["1 or more"]),
        (instance(nodes={"a": 1}), "vllm_instances.a.nodes", '{"a": 1}', ["a list"]),
        (instance(environment={"A B": "x"}), "vllm_instances.a.environment.A B", "x", ["no name"]),
        (instance(environment={"RAY_ADDRESS": "x"}), "vllm_instances.a.environment.RAY_ADDRESS", "x", ["ray_head"]),
        (
            instance(environment={"HF_TOKEN": "abc"}),
            "vllm_instances.a.environment.HF_TOKEN",
            "(hidden)",
            ["secret", "set vllm_secret_environment.a.HF_TOKEN instead"],
        ),
        ({"vllm_instances": []}, "vllm_instances", "[]", ["a dictionary"]),
        ({"vllm_instances": {"a": {"nodes": "x"}}}, "vllm_instances.a.model", "(not set)", ["is required"]),
        ({"vllm_instances": {"a b": INSTANCE}}, "vllm_instances.a b", "a b", ["name of an instance", "letters"]),
        (
            {"vllm_instances": {"Llama": INSTANCE, "llama": INSTANCE}},
            "vllm_instances.llama",
            "llama",
            ["duplicate instance name", "Llama", "rename"],
        ),
        ({"cluster_address": "gpu1.example"}, "cluster_address", "gpu1.example", ["not an IP address", "10.0.0.11"]),
        *[
            ({"cluster_address": address}, "cluster_address", address, [word, "10.0.0.11"])
            for address, word in (
                ("240.0.0.1", "reserved"),
                ("255.255.255.255", "broadcast"),
                ("0.1.2.3", "reserved"),
                ("::ffff:10.0.0.1", "IPv4 address inside an IPv6"),
                ("2001:db8::1%eth0", "zoned"),
                ("fe80::1%eth0", "link-local"),
            )
        ],
        *[
            ({"cluster_interface": name}, "cluster_interface", show(name), ["not the name of an interface", "ip -br"])
            for name in ('eth0" accept; #', "eth0*", "a234567890123456", "", "eth 0", "eth0\n")
        ],
        ({"base_packages": '["x"]'}, "base_packages", '["x"]', ["not a list", "-e '{\"base_packages\": [...]}'"]),
        ({"vllm_limits": '{"nofile": 1}'}, "vllm_limits", '{"nofile": 1}', ["-e '{\"vllm_limits\": {...}}'"]),
        (instance(nodes="a", args="[1]"), "vllm_instances.a.args", "[1]", ["give a dictionary"]),
        ({"cluster_address": "10.0.0.1/24"}, "cluster_address", "10.0.0.1/24", ["not an IP address"]),
        ({"cluster_address": "127.0.0.1"}, "cluster_address", "127.0.0.1", ["loopback"]),
        ({"cluster_address": "0.0.0.0"}, "cluster_address", "0.0.0.0", ["unspecified"]),
        ({"cluster_interface": "docker0"}, "cluster_interface", "docker0", ["containers", "ib0"]),
        ({"cluster_interface": "lo"}, "cluster_interface", "lo", ["no other node"]),
        ({"gpus": {"count": 2}}, "gpus.name", "(not set)", ["is required"]),
        ({"gpus": {"cnt": 2, "name": "x", "memory_total_mib": 1024}}, "gpus.cnt", "2", ["did you mean count"]),
        ({"gpus": [{"name": "x", "memory_total_mib": 141}]}, "gpus[0].memory_total_mib", "141", ["1024 or more"]),
        ({"ray_port": "many"}, "ray_port", "many", ["an integer"]),
        ({"base_packages": "vim"}, "base_packages", "vim", ["a list"]),
        ({"vllm_limits": {"nofiles": 1}}, "vllm_limits.nofiles", "1", ["did you mean nofile"]),
        ({"ray_token": "swordfish"}, "ray_token", "(hidden)", ["not one of the choices"]),
        ({"plan_format": "json"}, "plan_format", "json", ["switch for one run"]),
        ({"python_env_variant": "cu12"}, "python_env_variant", "cu12", ["cu129"]),
    ],
)
def test_problem_names_variable_value_and_remedy(variables, variable, value, words) -> None:
    found = [item for item in problems(variables) if item.variable == variable]
    assert found, problems(variables)
    assert found[0].value == value
    assert found[0].remedy
    text = render(found)
    assert "swordfish" not in text
    for word in [variable, value, *words]:
        assert word in text


@pytest.mark.parametrize(
    "variables",
    [
        {"ansible_host": "x", "site_rack": 1, "molecule_file": "x", "group_names": [], "inventory_dir": "/"},
        {"cluster_address": "fd00::1", "cluster_interface": "ens1f0"},
        {"gpus": [{"name": "a", "memory_total_mib": 1024}, {"count": 2, "name": "b", "memory_total_mib": 2048}]},
        {"ironrack_mirror": "https://mirror.example"},
    ],
)
def test_accepted(variables) -> None:
    assert problems(variables) == []


@pytest.mark.parametrize(
    "name", ["localhost", "ip6-localhost", "localhost.lan", "gpu 1", "#x", "a,b", "n*", "-n", "n\n", ""]
)
def test_names_that_no_host_can_have(name: str) -> None:
    (found,) = check_host_names(["n1", name])
    assert (found.host, found.variable) == (name, "inventory_hostname")
    assert "rename it" in found.remedy


def test_names_that_hosts_have() -> None:
    names = ["n1", "gpu-1.example.org", "gpu_1", "10.0.0.1", "fd00::1", "1", "localhosts", "N2"]
    assert list(check_host_names([*names, "n1"])) == []
    (found,) = check_host_names(["n1", "N1"])
    assert "n1 only in case" in found.problem


@pytest.mark.parametrize(
    ("keys", "names", "refused"),
    [
        ({}, [], True),
        ({"ssh_authorized_keys": []}, ["ssh_authorized_keys"], True),
        ({}, ["ssh_authorized_keys"], False),
        ({"ssh_authorized_keys": ["ssh-ed25519 AAAA"]}, ["ssh_authorized_keys"], False),
    ],
)
def test_all_keys_go_only_where_some_come(keys: dict[str, Any], names: list[str], refused: bool) -> None:
    roles = {
        "ssh_authorized_keys": {"type": "list", "elements": "str"},
        "ssh_authorized_keys_exclusive": {"type": "bool"},
    }
    variables = {"ssh_authorized_keys_exclusive": "yes", **keys}
    found = validate({"n1": variables}, roles, (), {"n1": ["ssh_authorized_keys_exclusive", *names]}).problems
    assert [item.variable for item in found] == ["ssh_authorized_keys_exclusive"] * refused


def test_extra_vars() -> None:
    assert problems({"plan_format": "json"}, ("plan_format",)) == []
    (problem,) = problems({"plan_fromat": "json"}, ("plan_fromat",))
    assert "given with -e" in problem.problem
    assert "plan_format" in problem.remedy


def test_duplicate_addresses() -> None:
    hosts = {"n1": {"cluster_address": "fd00::1"}, "n2": {"cluster_address": "fd00:0::1"}}
    (problem,) = validate(hosts, ROLES).problems
    assert (problem.host, problem.variable) == ("n2", "cluster_address")
    assert "n1" in problem.problem


def test_all_problems_in_one_message_and_equal_ones_once() -> None:
    hosts = {f"n{i}": {"cluster_adress": "x", "ray_port": "y"} for i in range(10)}
    text = render(validate(hosts, ROLES).problems)
    assert text.startswith("2 problems in the inventory; no host was contacted.")
    assert "(n0, n1, n2 and 7 more)" in text


def test_values_are_short_and_nested_secrets_hidden() -> None:
    assert len(show("x" * 1000)) <= 120
    assert "swordfish" not in show({"a": [{"api_key": "swordfish"}]})
    assert "swordfish" not in show({"args": {"api-key": "swordfish"}})
    assert show("swordfish", "vllm_instances.a.args.api-key") == "(hidden)"
    assert show("swordfish", "vllm_secret_environment.a.HF_TOKEN") == "(hidden)"
    # A count of tokens is no secret.
    for name in (
        "args.max-num-batched-tokens",
        "speculative.num_speculative_tokens",
        "args.long-prefill-token-threshold",
    ):
        assert show(8192, name) == "8192"
    assert show({"max_num_batched_tokens": 1, "tokenizer": "x"}) == '{"max_num_batched_tokens": 1, "tokenizer": "x"}'


@pytest.mark.parametrize(
    ("core", "python", "words"),
    [
        ("2.18.7", (3, 12), ["ansible-core = 2.18.7", "2.19", "make venv"]),
        ("2.19.1", (3, 10), ["python = 3.10", "3.11", "make venv"]),
    ],
)
def test_old_controllers_are_refused(core, python, words) -> None:
    text = render(check_controller(core, python))
    for word in words:
        assert word in text


@pytest.mark.parametrize("core", ["2.19.0", "2.21.5", "2.22.0rc1"])
def test_supported_controllers(core) -> None:
    assert check_controller(core, (3, 12)) == []


def test_contract_is_described() -> None:
    def walk(options: dict[str, Any]) -> None:
        for name, option in options.items():
            assert option.get("description", "").endswith("."), name
            assert option.get("type") or option.get("any_of"), name
            walk(option.get("options") or {})
            for alternative in option.get("any_of", ()):
                walk(alternative.get("options") or {})

    walk(CONTRACT)
    assert {spec["scope"] for spec in CONTRACT.values()} == {"host", "cluster"}
    assert not set(SWITCHES) & set(CONTRACT)
    assert set(SITE) == {"user", "group", "config_dir", "state_dir", "prefix", "current"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*CONTRACT, *ROLES, "other"]), JSON, max_size=5))
def test_any_value_is_answered(variables) -> None:
    for problem in problems(variables):
        assert problem.variable
        assert problem.problem
        assert problem.remedy
    render(problems(variables))


@pytest.mark.parametrize(
    ("variables", "names", "refused"),
    [
        ({"python_env_variant": "cu129"}, None, True),
        ({"python_env_variant": "cu129", "python_env_lock": ""}, None, True),
        ({"python_env_variant": "cu129", "python_env_lock": "/locks/mine.txt"}, None, False),
        # A template, which is not evaluated here.
        ({"python_env_variant": "cu129"}, ["python_env_variant", "python_env_lock"], False),
        ({"python_env_variant": "cu130"}, None, False),
    ],
)
def test_cuda_12_needs_a_lock_of_ones_own(variables: dict[str, Any], names: Any, refused: bool) -> None:
    roles = {"python_env_lock": {"type": "str"}}
    found = validate({"n1": variables}, roles, (), None if names is None else {"n1": names}).problems
    assert [item.variable for item in found] == (["python_env_lock"] if refused else [])


@pytest.mark.parametrize(
    ("variables", "names", "refused"),
    [
        ({"python_env_python": "3.11", "python_env_variant": "cu130"}, None, True),
        ({"python_env_python": "3.13.1", "python_env_method": "conda", "python_env_conda_lock": ""}, None, True),
        ({"python_env_python": "3.12"}, None, False),
        ({"python_env_python": "3.12.7"}, None, False),
        ({"python_env_python": "3.11", "python_env_method": "venv"}, None, False),
        ({"python_env_python": "3.11", "python_env_conda_lock": "/locks/mine.lock"}, None, False),
        # Templates, which are not evaluated here.
        ({"python_env_python": "3.11"}, ["python_env_python", "python_env_conda_lock"], False),
        ({"python_env_python": "3.11"}, ["python_env_python", "python_env_method"], False),
    ],
)
def test_a_python_without_a_conda_lock_is_refused(variables: dict[str, Any], names: Any, refused: bool) -> None:
    roles = {name: {"type": "str"} for name in ("python_env_python", "python_env_method", "python_env_conda_lock")}
    found = validate({"n1": variables}, roles, (), None if names is None else {"n1": names}).problems
    assert [item.variable for item in found] == (["python_env_python"] if refused else [])
    assert not refused or (
        found[0].value == variables["python_env_python"] and "python_env_conda_lock" in found[0].remedy
    )


def test_the_conda_locks_that_ship_are_known() -> None:
    shipped = {f"3.{path.stem.removeprefix('conda-cp3')}" for path in LOCKS.glob("conda-cp3*.lock")}
    assert shipped == set(CONDA_PYTHONS)
