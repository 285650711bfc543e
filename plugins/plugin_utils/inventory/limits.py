"""What variables of roles may be, beyond what an argument spec can say.

Roles check their variables when they run, which is after other roles have changed the hosts. What one variable alone
shows is therefore told with the inventory, before anything is contacted. An entry is laid over the option of that name
in the role's argument spec and may have

* `minimum`, `maximum`, and `above` (a minimum that is itself too little), for numbers;
* `pattern`, with `problem` and `remedy` for the message; of a list, each element has to match;
* `choices`, with `remedy` where there are too many to list; of a list, each element has to be one of them;
* `any_of`, where the spec says `raw`;
* `keys`, `value`, `key_pattern`: the dictionary is a map, as in the contract;
* `options` with entries for the keys of a dictionary.

Numbers that `network/fabrics.py` compares between nodes have their limits there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..hosts import preflight
from .contract import Spec

# Longer than anybody waits, and short enough for every clock and timer.
_YEAR = 365 * 86400
_SECONDS: Spec = {"minimum": 1, "maximum": _YEAR}
_SHA256 = {
    "pattern": r"[0-9a-f]{64}",
    "problem": "is not a SHA-256",
    "remedy": "give 64 lower case hexadecimal digits",
}
_PORT: Spec = {"minimum": 1, "maximum": 65535}
_COUNT: Spec = {"minimum": 1}
_NOT_NEGATIVE: Spec = {"minimum": 0}
# Beyond that nobody waits for the connection that is to confirm a change, or is locked out for long.
_CONFIRM: Spec = {"minimum": 15, "maximum": 600}
_WORDS: Spec = {"pattern": r"(?s).*\S.*", "problem": "is empty", "remedy": "write something"}
_PROGRAM: Spec = {
    "pattern": r"(/[A-Za-z0-9._+-]+)+|[A-Za-z0-9._+-]+",
    "problem": "is no program",
    "remedy": "give a bare name or an absolute path, without arguments, such as nvidia-smi",
}
_FOLDER: Spec = {
    "pattern": r"/[^\0\n]*",
    "problem": "is not an absolute path",
    "remedy": "begin it with /, or with {{ inventory_dir }}",
}
_ON_NODES: Spec = {**_FOLDER, "pattern": r"/[^\0\n]+", "remedy": "give an absolute path on the nodes"}
# As apt names it, with a version where one is wanted; not its options, nor several in one.
_PACKAGE: Spec = {
    "pattern": r"[a-z0-9][a-z0-9+.*-]*(:[a-z0-9-]+)?(>?=[A-Za-z0-9.+:~*-]+)?",
    "problem": "is no name of a package",
    "remedy": "give one name an entry, such as numactl or numactl=2.0.16-1",
}
_PACKAGE_LISTS: Spec = {"minimum": 0}


def _either_empty_or(entry: Spec) -> Spec:
    return {**entry, "pattern": f"|{entry['pattern']}"}


def _sizes(*names: str) -> Spec:
    return {"options": dict.fromkeys(names, _NOT_NEGATIVE)}


LIMITS: dict[str, Spec] = {
    "accept_prompt": _WORDS,
    "accept_max_tokens": _COUNT,
    "accept_timeout": _SECONDS,
    "accept_observe_seconds": {"minimum": 0, "maximum": _YEAR},
    "accept_report_dir": _FOLDER,
    "base_cache_valid_time": _PACKAGE_LISTS,
    "base_packages": _PACKAGE,
    "base_sysctl": {
        "keys": "name of a kernel setting",
        "key_pattern": r"[A-Za-z0-9_-]+([./][A-Za-z0-9_:@-]+)+",
        "value": {
            "type": "str",
            "required": True,
            "pattern": r"[^\S\n]*\S[^\n]*",
            "problem": "is no value of a kernel setting",
            "remedy": "give a number or a text of one line, or remove the setting",
        },
    },
    "base_time_serve": {"any_of": [{"type": "bool"}, {"type": "list", "elements": "str"}]},
    "cuda_cache_valid_time": _PACKAGE_LISTS,
    "cuda_lock_timeout": _SECONDS,
    "firewall_confirm_seconds": _CONFIRM,
    "firewall_gateway_ports": _PORT,
    "firewall_ssh_ports": _PORT,
    "gpu_fabric_nvidia_smi": _PROGRAM,
    "gpu_fabric_timeout": _SECONDS,
    "host_facts_min_free_gib": _sizes("prefix", "state_dir"),
    "host_facts_nvidia_smi": _PROGRAM,
    "host_facts_timeout": _SECONDS,
    "host_reboot_connect_timeout": _SECONDS,
    "host_reboot_drain_timeout": {"minimum": 0, "maximum": _YEAR},
    "host_reboot_nvidia_smi": _PROGRAM,
    "host_reboot_nvidia_smi_timeout": _SECONDS,
    "host_reboot_ready_timeout": _SECONDS,
    "host_reboot_reasons": {**_WORDS, "remedy": "write why the host has to reboot, or remove it from the list"},
    "host_reboot_record": {
        "pattern": r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "problem": "is no name of a record",
        "remedy": "use letters, digits, dots, underscores and dashes, beginning with a letter or digit",
    },
    "host_reboot_test_command": {**_WORDS, "remedy": "name the command that tells that the host has booted"},
    "host_reboot_timeout": _SECONDS,
    "host_reboot_unit_timeout": _SECONDS,
    "host_reboot_verify_timeout": _SECONDS,
    "lab_boot_timeout": _SECONDS,
    "lab_forwards": {"options": {"port": _PORT}},
    "lab_proxy_port": _PORT,
    "model_store_ca_bundle": _either_empty_or(_ON_NODES),
    "model_store_endpoint": {
        "pattern": r"https?://[^\s/@?#\"']+(/[^\s@?#\"']*)?",
        "problem": "is not an http(s) address without a login",
        "remedy": "give the hub, https://huggingface.co, or a server that speaks its API; a token is model_store_token",
    },
    "model_store_ignore": _WORDS,
    "model_store_keep": {"minimum": -1},
    "model_store_mirror": {
        "pattern": r"|https?://[^\s/?#\"']+(/[^\s?#\"']*)?|/[^\s\"'?#%]*",
        "problem": "is neither an absolute path nor an http(s) address",
        "remedy": "give the folder on the node that fetches, such as /srv/models, or the address of one, such as "
        "https://models.example.net; below it is <org>/<name>/<revision>/<file>",
    },
    "model_store_reserve": {"minimum": 0, "maximum": 100},
    "model_store_serve_lifetime": _SECONDS,
    "model_store_serve_port": _PORT,
    "model_store_token": {
        "pattern": r"|[!-~]+",
        "problem": "holds white space or other characters that no token has",
        "remedy": "give the token as the hub shows it, or leave it empty",
    },
    "model_store_token_file": _either_empty_or(_ON_NODES),
    "model_store_workers": {"minimum": 1, "maximum": 64},
    "nvidia_driver_cache_valid_time": _PACKAGE_LISTS,
    "nvidia_driver_lock_timeout": _SECONDS,
    "nvidia_driver_nvidia_smi": _PROGRAM,
    "preflight_accept": {"choices": preflight.check_ids(), "remedy": "docs/failure-checks.md lists the checks"},
    "preflight_clock_skew_seconds": {"above": 0},
    "preflight_min_free_gib": _sizes("prefix", "state_dir", "shm"),
    "preflight_network_bandwidth_seconds": {"above": 0, "maximum": 60},
    "preflight_network_clock_seconds": {"above": 0},
    "preflight_network_min_bandwidth_fraction": {"above": 0, "maximum": 1},
    "preflight_network_min_rdma_fraction": {"above": 0, "maximum": 1},
    "preflight_network_nccl_mib": {"minimum": 1, "maximum": 16384},
    "preflight_network_timeout": {"above": 0, "maximum": 60},
    "preflight_nvidia_smi": _PROGRAM,
    "preflight_report_dir": _FOLDER,
    "preflight_timeout": _SECONDS,
    "preflight_xid_hours": _NOT_NEGATIVE,
    "python_env_cache_dir": _ON_NODES,
    "python_env_conda_mirror": {
        "pattern": r"((https?://[^/?#]|file:///)[^?#]*)?",
        "problem": "is no place of conda channels",
        "remedy": "leave it empty, or give a URL http://, https:// or file:///folder without ? and #",
    },
    "python_env_interpreter": _either_empty_or(_ON_NODES),
    "python_env_keep_releases": _COUNT,
    "python_env_python": {
        "pattern": r"3\.1[1-4](\.[0-9]+)?",
        "problem": "is no Python that vLLM runs on",
        "remedy": "give 3.11 to 3.14, with or without a patch level, in quotes",
    },
    "python_env_serve_lifetime": _SECONDS,
    "python_env_serve_port": _PORT,
    "python_env_miniforge_sha256": _SHA256,
    "python_env_rattler_sha256": _SHA256,
    "python_env_uv_sha256": _SHA256,
    **dict.fromkeys(
        (
            "ray_port",
            "ray_node_manager_port",
            "ray_object_manager_port",
            "ray_runtime_env_agent_port",
            "ray_dashboard_agent_grpc_port",
            "ray_dashboard_agent_listen_port",
            "ray_metrics_export_port",
            "ray_min_worker_port",
            "ray_max_worker_port",
            "ray_client_server_port",
            "ray_dashboard_port",
            "ray_autoscaler_metrics_port",
            "ray_dashboard_metrics_port",
        ),
        _PORT,
    ),
    "ray_drain_seconds": {"minimum": 0, "maximum": _YEAR},
    "ray_num_cpus": _NOT_NEGATIVE,
    # Ray's own limit, 75 MiB.
    "ray_object_store_memory_bytes": {"minimum": 78643200},
    "ray_token": {
        "pattern": r"|\S{16,}",
        "problem": "is too short, or holds white space",
        "remedy": "give 16 characters or more and no white space, or leave it empty to have one made",
    },
    "ray_wait_timeout": _SECONDS,
    "rollback_release": {
        "pattern": r"([0-9a-f]{16})?",
        "problem": "is no id of a release",
        "remedy": "give its 16 hexadecimal digits, as ironrack-release list prints them on a node, or leave it out for "
        "the one before",
    },
    "ssh_confirm_seconds": _CONFIRM,
    "ssh_known_hosts_file": {
        # Beside it, the role keeps a file node_keys.
        "pattern": r"(?!/(dev|proc|sys)/)~?/([^\0\n]*/)?(?!(\.{1,2}|node_keys)$)[^/\0\n]+",
        "problem": "is no file that host keys could be kept in",
        "remedy": "give the absolute path of a file on the controller, as in {{ inventory_dir }}/.ironrack/known_hosts",
    },
    "vllm_canary_failures": _COUNT,
    "vllm_canary_interval": _SECONDS,
    "vllm_canary_timeout": _SECONDS,
    "vllm_load_mib_per_second": _COUNT,
    "vllm_ready_restarts": _COUNT,
    "vllm_ready_timeout": _SECONDS,
    "vllm_restart_seconds": {"minimum": 0, "maximum": _YEAR},
    "vllm_start_limit_burst": _COUNT,
    "vllm_start_limit_interval": _SECONDS,
    "vllm_stop_timeout": _SECONDS,
    "vllm_watch_interval": _SECONDS,
}


def limited(options: Mapping[str, Spec]) -> dict[str, Spec]:
    """The options of roles with their limits.

    A role reads its variables as they are: null where it has a default of another kind is no default, but a mistake.
    """
    return {
        name: {"required": option.get("default") is not None, **_laid_over(option, LIMITS.get(name, {}))}
        for name, option in options.items()
    }


def _laid_over(option: Spec, limits: Spec) -> Spec:
    options: Any = option.get("options")
    if options and "options" in limits:
        options = {key: _laid_over(entry, limits["options"].get(key, {})) for key, entry in options.items()}
        limits = {**limits, "options": options}
    return {**option, **limits}
