"""Values of role variables: numbers and booleans that come as text (`-e x=10`), and values that are wrong.

Ansible's argument specs check a variable and convert nothing: a role that is given `-e x=10` works with a text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.action.cluster_plan import _role_options
from ansible_collections.ironrack.vllm.plugins.plugin_utils.hosts import fabric
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import cluster, limits, model_files, validate
from jinja2 import nodes

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
CASTS = {"int": "int", "float": "float", "bool": "bool"}
# Keys of a task whose text is for somebody to read.
MESSAGES = ("name", "msg", "fail_msg", "success_msg", "prompt", "label")
# Modules whose own arguments say what they take; the keys below these are not converted any more.
MODULES = ("ironrack.vllm.", "ansible.builtin.")


def load(role: str, path: str) -> Any:
    file = ROOT / "roles" / role / path
    return (yaml.safe_load(file.read_text("utf-8")) if file.exists() else None) or {}


def options_of(role: str) -> dict[str, Any]:
    return {
        name: option
        for entry in load(role, "meta/argument_specs.yml")["argument_specs"].values()
        for name, option in (entry.get("options") or {}).items()
    }


ALL = {name: option for role in ROLES for name, option in options_of(role).items()}
TYPED = {name: option["type"] for name, option in ALL.items() if option["type"] in CASTS}


def native(option: Mapping[str, Any]) -> Any:
    return option["default"] if not isinstance(option["default"], str) else None


def as_text(value: Any) -> Any:
    """As it comes with `-e x=10`, or inside of what a template has joined."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value


# --- the inventory's check --------------------------------------------------------------------------------------------


def has_typed(option: Mapping[str, Any]) -> bool:
    below = option.get("options") or {}
    return (
        option["type"] in CASTS
        or isinstance(option.get("default"), bool)
        or option.get("elements") in CASTS
        or any(map(has_typed, below.values()))
    )


@pytest.mark.parametrize("name", [name for name, option in ALL.items() if has_typed(option)])
def test_text_counts_as_what_it_says(name: str) -> None:
    options = _role_options()
    values = [True, False] if isinstance(ALL[name].get("default"), bool) else [native(ALL[name])]
    # What no value of the variable is right without.
    beside = {"ssh_authorized_keys": ["x"]} if name == "ssh_authorized_keys_exclusive" else {}
    for value in values:
        given, text = (
            validate.validate({"n1": {name: each, **beside}}, options, extra=[name]) for each in (value, as_text(value))
        )
        assert given.problems == text.problems == []
        assert given.values == text.values
        assert type(given.values["n1"][name]) is type(text.values["n1"][name])


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "1", "false", "False", "no", "off", "0"])
def test_a_word_means_the_same_to_the_check_and_to_the_roles(word: str) -> None:
    """Roles read it with the filter `bool`."""
    from ansible.plugins.filter.core import to_bool  # noqa: PLC0415 - the loader's own import of it comes first

    checked, found = validate.check_value(word, {"type": "bool"}, "x")
    assert found == []
    assert checked is to_bool(word)


@pytest.mark.parametrize("word", ["y", "t", "n", "f", "", "yes!", "2", "null", "None"])
def test_a_word_that_the_roles_do_not_understand_is_refused(word: str) -> None:
    assert validate.check_value(word, {"type": "bool"}, "x")[1]


# --- templates of roles -----------------------------------------------------------------------------------------------


def uncast(template: str, typed: Mapping[str, str]) -> Iterator[str]:
    """Names of numbers and booleans that a template uses as they come."""

    def walk(node: nodes.Node, cast: str | None) -> Iterator[str]:
        if isinstance(node, nodes.Name) and node.name in typed and cast != CASTS[typed[node.name]]:
            yield node.name
        for child in node.iter_child_nodes():
            converts = node.name if isinstance(node, nodes.Filter) and child is node.node else None
            yield from walk(child, cast if converts == "default" else converts)

    # Filters and tests are not looked up before a template is compiled.
    yield from walk(jinja2.Environment(autoescape=True, extensions=["jinja2.ext.do"]).parse(template), None)


def whole(template: str, typed: Mapping[str, str]) -> bool:
    """Whether a template is nothing but one variable."""
    return template.strip("{} ") in typed


def templates_of_tasks(node: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Where, the template, and whether it is an expression without braces."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from templates_of_tasks(value, (*above, str(key)))
    elif isinstance(node, list):
        for value in node:
            yield from templates_of_tasks(value, above)
    elif isinstance(node, str):
        yield above, node, bool(above) and above[-1] in ("when", "that", "until", "failed_when", "changed_when")


def is_argument(above: tuple[str, ...]) -> bool:
    """A module converts its own arguments, and nothing below them."""
    return len(above) > 1 and above[-2].startswith(MODULES) and above[-2] not in ("ansible.builtin.set_fact",)


# Backslashes that an expression without braces keeps as they are.
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize("role", ROLES)
def test_roles_convert_what_they_use(role: str) -> None:
    found = []
    for file in sorted((ROOT / "roles" / role).glob("*/*.yml")):
        if file.parent.name not in ("tasks", "vars", "handlers"):
            continue
        for above, template, expression in templates_of_tasks(yaml.safe_load(file.read_text("utf-8"))):
            if above and above[-1] in MESSAGES:
                continue
            if is_argument(above) and whole(template, TYPED):
                continue
            text = f"{{{{ {template} }}}}" if expression and "{{" not in template else template
            found += [f"{file.parent.name}/{file.name}: {'.'.join(above)}: {name}" for name in uncast(text, TYPED)]
    for file in sorted((ROOT / "roles" / role).glob("templates/*.j2")):
        found += [f"templates/{file.name}: {name}" for name in uncast(file.read_text("utf-8"), TYPED)]
    assert found == []


def test_the_search_for_unconverted_values_finds_some() -> None:
    typed = {"a": "int", "b": "bool", "c": "float"}
    assert list(uncast("{{ a > 3 }}", typed)) == ["a"]
    assert list(uncast("{{ x if b else a | int }}", typed)) == ["b"]
    assert list(uncast("{{ a | float + c | float }}", typed)) == ["a"]
    assert list(uncast("{% if b | bool %}{{ f | g(a, h=c) }}{% endif %}", typed)) == ["a", "c"]
    assert list(uncast("{{ a | int + 60 }} {{ [b | bool] | first }}", typed)) == []


# --- rendered ---------------------------------------------------------------------------------------------------------

# The lab's variables are those of the machine that it runs on.
RENDERED = [role for role in ROLES if role != "lab"]
# Reads what all hosts of a run have gathered or answered.
OF_A_RUN = {
    "__model_store_looked",
    "__model_store_now",
    "__model_store_work",
    "__preflight_facts",
    "__preflight_rdma_here",
    "__python_env_answers",
    "__python_env_chain",
    "__python_env_problems",
    "__python_env_repairs",
    "__rollback_failed",
    "__rollback_plan",
}


def given_to(role: str) -> list[dict[str, Any]]:
    """Defaults, and every switch the other way round."""
    options = {name: option for name, option in options_of(role).items() if has_typed(option)}
    values = {name: native(option) for name, option in options.items()}
    return [values, {name: not value if isinstance(value, bool) else value for name, value in values.items()}]


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """By role: what it makes of native values and of the same as text."""
    requests = [
        {"role": role, "variables": each}
        for role in RENDERED
        for values in given_to(role)
        for each in (values, as_text(values))
    ]
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/tools/render_roles.py")],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    answers = json.loads(run.stdout)
    for request, one, other in zip(requests[::2], answers[::2], answers[1::2], strict=True):
        found.setdefault(request["role"], []).append((one, other))
    return found


@pytest.mark.parametrize("role", RENDERED)
def test_roles_make_the_same_of_text(rendered: dict[str, Any], role: str) -> None:
    for expected, found in rendered[role]:
        assert found == expected


@pytest.mark.parametrize("role", RENDERED)
def test_everything_is_rendered_and_right(rendered: dict[str, Any], role: str) -> None:
    """Two errors would be the same, too."""
    values, _ = rendered[role][0]
    errors = [value for value in values.values() if isinstance(value, str) and value.startswith("error: ")]
    assert len(errors) == len(OF_A_RUN & set(values)), errors
    assert all(value is True for name, value in values.items() if not name.startswith("__"))


# --- wrong values -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problems() -> Callable[[dict[str, Any]], list[validate.Problem]]:
    """What playbooks/prepare.yml says of variables that are set for every host of an inventory that is right."""
    options = _role_options()
    instance = {
        "model": {"path": "/data/models/large", "config": str(ROOT / "tests/fixtures/model_configs/dense_72b.json")},
        "nodes": "vllm_nodes",
        "context_length": 8192,
        "concurrency": 8,
        "executor": "ray",
        "parallelism": {"tensor": 8, "pipeline": 2},
    }
    hosts = {
        f"gpu{number}": {
            "cluster_address": f"10.20.1.1{number}",
            "gpus": {"count": 8, "name": "NVIDIA H200", "memory_total_mib": 143771},
            "vllm_instances": {"large": instance},
        }
        for number in (1, 2)
    }

    def check(changes: dict[str, Any], groups: dict[str, list[str]] | None = None) -> list[validate.Problem]:
        values = {host: {**own, **changes} for host, own in hosts.items()}
        checked = validate.validate(values, options, extra=changes)
        _, found = cluster.build(
            checked.values,
            {"vllm_nodes": list(hosts), **(groups or {})},
            lambda variable, model: model_files.find_config(variable, model, None),
        )
        return [*checked.problems, *found]

    assert check({}) == []
    return check


WRONG: list[tuple[str, Any, str]] = [
    *[
        (name, 0, "1 or more")
        for name in ALL
        if name.endswith("_timeout") and ALL[name]["type"] == "int" and name != "host_reboot_drain_timeout"
    ],
    *[(name, -1, "or more") for name in ALL if name.endswith("_timeout") and ALL[name]["type"] == "int"],
    *[(name, "-1", "0 or more") for name in ALL if name.endswith("_cache_valid_time")],
    *[
        (name, value, "without arguments")
        for name in ALL
        if name.endswith("_nvidia_smi")
        for value in ("", "nvidia-smi -q", "/usr/bin/nvidia-smi -q", "/x\nExecStartPost=/bin/true", "bin/nvidia-smi")
    ],
    ("host_reboot_record", "../x", "use letters"),
    ("host_reboot_record", "x\n", "use letters"),
    ("host_reboot_reasons", [""], "write why"),
    ("host_reboot_reasons", ["new kernel", "  "], "write why"),
    ("host_reboot_test_command", "", "name the command"),
    ("host_reboot_force", "perhaps", "for example false"),
    ("preflight_accept", ["nosuchcheck"], "lists the checks"),
    ("preflight_accept", ["xidd"], "did you mean xid?"),
    ("preflight_xid_hours", -1, "0 or more"),
    ("preflight_xid_hours", "nan", "for example 24"),
    ("preflight_xid_hours", float("inf"), "for example 24"),
    ("preflight_clock_skew_seconds", 0, "more than 0"),
    ("preflight_clock_skew_seconds", "-1", "more than 0"),
    ("preflight_clock_skew_seconds", "nan", "for example 30"),
    ("preflight_network_timeout", 61, "60 or less"),
    ("preflight_network_min_bandwidth_fraction", "1.1", "1 or less"),
    ("preflight_min_free_gib", {"shm": -1}, "0 or more"),
    ("preflight_min_free_gib", {"shn": 1}, "known keys: prefix, state_dir, shm"),
    ("host_facts_min_free_gib", {"prefix": "-0.5"}, "0 or more"),
    ("preflight_report_dir", "rel/x", "begin it with /"),
    ("preflight_report_dir", "", "begin it with /"),
    ("accept_report_dir", "reports", "begin it with /"),
    ("accept_prompt", " ", "write"),
    ("accept_max_tokens", "0", "1 or more"),
    ("base_sysctl", {"vm": 1}, "correct or remove it"),
    ("base_sysctl", {"vm.swappiness": ""}, "one line"),
    ("base_sysctl", {"vm.swappiness": None}, "a string"),
    ("base_sysctl", {"vm.swappiness": "1\nkernel.panic = 1"}, "one line"),
    ("firewall_ssh_ports", [0], "1 or more"),
    ("firewall_gateway_ports", [443, "70000"], "65535 or less"),
    ("firewall_confirm_seconds", 14, "15 or more"),
    ("ssh_confirm_seconds", "601", "600 or less"),
    ("lab_proxy_port", 65536, "65535 or less"),
    ("lab_forwards", [{"listen": "127.77.1.1:22", "port": 0}], "1 or more"),
    ("python_env_python", 3.1, "3.11 to 3.14"),
    ("python_env_python", "2.7", "3.11 to 3.14"),
    ("python_env_interpreter", "python3", "absolute path"),
    ("python_env_cache_dir", "/", "absolute path"),
    ("python_env_uv_sha256", "0" * 63, "64 lower case"),
    ("python_env_conda_mirror", "/srv/mirror/conda", "file:///folder"),
    ("python_env_conda_mirror", "https://", "file:///folder"),
    ("python_env_rattler_sha256", "0" * 65, "64 lower case"),
    ("python_env_miniforge_sha256", "A" * 64, "64 lower case"),
    ("python_env_keep_releases", 0, "1 or more"),
    ("ray_port", 0, "1 or more"),
    ("ray_metrics_export_port", "999999", "65535 or less"),
    ("ray_object_store_memory_bytes", 78643199, "78643200 or more"),
    ("ray_token", "short", "16 characters"),
    ("rollback_release", "zz", "16 hexadecimal digits"),
    ("vllm_load_mib_per_second", 0, "1 or more"),
    ("vllm_canary_failures", "0", "1 or more"),
    ("vllm_restart_seconds", 10**17, "or less"),
    ("cuda_version", "14.0", "set it to"),
    ("cuda_version", "99.9", "set it to"),
    ("cuda_compat", "", "for example false"),
    ("firewall_admin_networks", ["10.0.0.1/8"], "write 10.0.0.0/8"),
    ("firewall_client_networks", ["everybody"], "write it as 10.20.0.0/16"),
    ("firewall_ephemeral_ports", "1-2", "take 50000-60999"),
    ("firewall_extra", [{"from": ["10.0.0.0/8"], "ports": ["http"]}], "write 9000 or 9100-9110"),
    ("firewall_ssh_ports", [], "list the ports"),
    ("firewall_trusted_interfaces", ["a b"], "correct it"),
    ("ssh_allow_users", ["a b"], "write ops"),
    ("ssh_authorized_keys", ["AAAA"], "one line of a .pub file"),
    ("ssh_between_nodes_user", "root", "and not root"),
    ("ssh_host_key_fingerprint", "MD5:12", "write SHA256: and 43 characters"),
    ("ssh_authorized_keys_exclusive", True, "list the keys"),
    ("ssh_accept_changed_host_keys", ["n9"], "name hosts as the inventory does"),
    *[
        ("ssh_known_hosts_file", value, "absolute path of a file")
        for value in ("", "/", "5", 5, "/dev/null", "known_hosts", "/x/", "/x/..", "/x/node_keys", "/x\0y")
    ],
    *[("base_packages", [name], "one name an entry") for name in ("a b", "--allow-downgrades", "", "-x", "A")],
    ("base_time_servers", ["a b"], "without options"),
    ("base_time_servers", ["10.0.0.300"], "correct it"),
    ("base_time_servers", ["127.0.0.1"], "leave it out here"),
    ("base_time_servers", '["x"]', "-e '{\"base_time_servers\": [...]}'"),
    ("base_time_serve", ["10.0.0.1/8"], "write 10.0.0.0/8"),
    ("base_time_serve", ["all"], "write it as"),
    ("base_time_serve", '["10.0.0.0/8"]', "-e '{\"base_time_serve\": [...]}'"),
    ("fabric_environment", {"NCCL_DEBUG": "a\0b"}, "remove it"),
    ("fabric_environment", {"NCCL_DEBUG": "a\rb"}, "remove it"),
    ("ssh_settings", {"PermitRootLogin": "maybe"}, "choose yes, no, prohibit-password"),
    ("ssh_settings", {"PermitRotLogin": "no"}, "did you mean PermitRootLogin?"),
    ("base_time_serve", "perhaps", "true or false or a list"),
    *[(name, None, "for example") for name in TYPED],
]


@pytest.mark.parametrize(("name", "value", "remedy"), WRONG, ids=lambda value: json.dumps(value)[:40])
def test_wrong_values_are_refused_with_the_inventory(
    problems: Callable[[dict[str, Any]], list[validate.Problem]], name: str, value: Any, remedy: str
) -> None:
    """As playbooks/prepare.yml does it, for every host, before any is contacted."""
    found = problems({name: value})
    assert found, "nobody noticed"
    for problem in found:
        assert problem.variable.startswith(name)
        assert remedy in problem.remedy
        assert problem.value


STRICT = {"firewall_mode": "strict_ports"}


@pytest.mark.parametrize(
    ("values", "variable", "where"),
    [
        ({**STRICT, "base_sysctl": {"net.ipv4.ip_local_port_range": "1024 65535"}}, "base_sysctl", ["gpu1", "gpu2"]),
        ({**STRICT, "base_sysctl": {"net/ipv4/ip_local_reserved_ports": 80}}, "base_sysctl", ["gpu1", "gpu2"]),
        ({"base_time_servers": ["gpu1"], "base_time_serve": True}, "base_time_servers", ["gpu1"]),
        ({"base_time_servers": ["10.20.1.12"], "base_time_serve": True}, "base_time_servers", ["gpu2"]),
        ({"base_time_servers": ["gpu1"], "base_time_serve": False}, "base_time_servers", ["gpu1", "gpu2"]),
        (STRICT, "cluster_address", ["lb"]),
    ],
)
def test_variables_that_do_not_fit_are_refused_with_the_inventory(
    problems: Callable[..., list[validate.Problem]], values: dict[str, Any], variable: str, where: list[str]
) -> None:
    found = problems(values, {"gateway": ["lb"]} if variable == "cluster_address" else {})
    assert [item.host for item in found] == where
    for item in found:
        assert item.variable.partition(".")[0] == variable
        assert item.remedy


def test_what_fits_is_accepted(problems: Callable[..., list[validate.Problem]]) -> None:
    assert problems({"base_sysctl": {"net.ipv4.ip_local_port_range": "32768 60999"}}) == []
    assert problems({"base_time_servers": ["time.example.org", "10.0.0.5", "fd00::5"], "base_time_serve": []}) == []
    assert problems({"base_time_serve": "true", **STRICT}, {"gateway": ["gpu1"]}) == []
    assert problems({}, {"gateway": ["lb"]}) == [], "nothing is filtered"
    assert problems({"base_packages": ["libnuma1", "g++", "numactl=2.0.16-1", "libc6:amd64", "chrony>=4"]}) == []
    for path in ("/etc/ironrack/known_hosts", "~/.ssh/known_hosts", "/known_hosts", "/development/x y"):
        assert problems({"ssh_known_hosts_file": path}) == []
    assert problems({"ssh_accept_changed_host_keys": ["gpu2"]}) == []


def test_a_host_of_the_plan_has_a_name_that_can_be_looked_up(
    problems: Callable[..., list[validate.Problem]],
) -> None:
    (found,) = problems({}, {"gateway": ["l b"]})
    assert (found.host, found.variable) == ("l b", "inventory_hostname")


def test_a_secret_is_not_shown(problems: Callable[[dict[str, Any]], list[validate.Problem]]) -> None:
    problem, *_ = problems({"ray_token": "short"})
    assert "short" not in f"{problem.value} {problem.problem} {problem.remedy}".replace("too short", "")


def test_a_private_key_is_not_shown(problems: Callable[[dict[str, Any]], list[validate.Problem]]) -> None:
    found = problems({"ssh_authorized_keys": ["-----BEGIN OPENSSH PRIVATE KEY-----\nswordfish"]})
    assert {item.value for item in found} == {"(hidden)"}
    assert "swordfish" not in validate.render(found)


def test_a_vaulted_token_is_taken_on_trust() -> None:
    assert validate.check_value("(vaulted)", _role_options()["ray_token"], "ray_token")[1] == []


# --- completeness -----------------------------------------------------------------------------------------------------


def numbers(name: str, option: Mapping[str, Any], limit: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if {option["type"], option.get("elements")} & {"int", "float"}:
        yield name, limit
    for key, inner in (option.get("options") or {}).items():
        yield from numbers(f"{name}.{key}", inner, (limit.get("options") or {}).get(key, {}))


def test_every_number_has_limits() -> None:
    without = [
        path
        for name, option in ALL.items()
        for path, limit in numbers(name, option, limits.LIMITS.get(name, {}))
        if not {"minimum", "above"} & set(limit) and path not in fabric.NUMBERS
    ]
    assert without == []


def test_every_limit_belongs_to_a_variable() -> None:
    assert set(limits.LIMITS) <= set(ALL)
    for name, limit in limits.LIMITS.items():
        assert set(limit.get("options") or {}) <= set(ALL[name].get("options") or {}), name
        assert ("pattern" in limit) == ("problem" in limit), name
        assert "pattern" not in limit or limit["remedy"], name


def test_defaults_are_within_their_limits() -> None:
    options = _role_options()
    for name, option in ALL.items():
        default = option.get("default")
        if default is not None and "{{" not in str(default):
            assert validate.check_value(default, options[name], name)[1] == []
