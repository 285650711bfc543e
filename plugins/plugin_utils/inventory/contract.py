"""The inventory contract: the variables that a user writes, as argument-spec style dictionaries.

Documentation is generated from `CONTRACT`. Beyond what Ansible's argument specs know, an entry may have

* `scope`: `cluster` (one value for all hosts) or `host`;
* `keys`: the dictionary is a map; its keys are free (the text says what they are) and each value follows `options`;
* `any_of`: the value follows one of several specs.

Names that roles define are known too: they come from each role's `meta/argument_specs.yml`.
"""

from __future__ import annotations

from typing import Any

from ..runtime import mirror

Spec = dict[str, Any]

_GPU: Spec = {
    "count": {
        "type": "int",
        "minimum": 1,
        "maximum": 64,
        "description": "How many of these the node has; one where it is left out, with a warning.",
    },
    "name": {"type": "str", "required": True, "description": "The name as C(nvidia-smi) prints it."},
    "memory_total_mib": {
        "type": "int",
        "required": True,
        # No GPU has less than 1 GiB: a smaller number is one of gigabytes.
        "minimum": 1024,
        "description": "Total memory of one GPU in MiB, as C(nvidia-smi) prints it (143771 for an H200, not 141).",
    },
}

_INSTANCE: Spec = {
    "model": {
        "type": "dict",
        "required": True,
        "description": "What is served: C(path), which you bring, or C(repo) with C(revision), which is fetched.",
        "options": {
            "path": {
                "type": "str",
                "description": "Absolute path of the model's folder, the same on every engine node.",
            },
            "repo": {
                "type": "str",
                "description": "Repository on the hub, C(org/name). Fetched when C(path) is left out (docs/models.md).",
            },
            "revision": {
                "type": "str",
                "description": "Commit of the repository, all 40 digits; a branch is warned of.",
            },
            "config": {
                "description": (
                    "The model's config.json for the planner: a path on the controller (relative to the inventory), "
                    "or its content. Left out, it is looked for in C(model_configs/<org>__<name>.json) beside the "
                    "inventory, then in C(path)."
                ),
                "any_of": [{"type": "str"}, {"type": "dict"}],
            },
        },
    },
    "nodes": {
        "required": True,
        "description": "A group, a host, or a list of hosts that run the engine.",
        "any_of": [{"type": "str"}, {"type": "list", "elements": "str"}],
    },
    "objective": {
        "type": "str",
        "choices": ["throughput", "latency", "capacity"],
        "default": "throughput",
        "description": (
            "C(throughput): the most engines, or data-parallel ranks, that together hold C(concurrency) sequences of "
            "C(context_length). C(latency): engines of the largest tensor size inside a node, no more of them than "
            "C(concurrency) needs. C(capacity): engines of which each alone holds what is asked, inside a node where "
            "one can, over the fewest nodes otherwise; with C(context_length) C(auto) the longest context that fits."
        ),
    },
    "context_length": {
        "default": "auto",
        "description": "Tokens of one sequence, or C(auto) for the longest that the model and the memory allow.",
        "any_of": [{"type": "int", "minimum": 1}, {"type": "str", "choices": ["auto"]}],
    },
    "concurrency": {"type": "int", "minimum": 1, "description": "Sequences in flight that you want."},
    "parallelism": {
        "type": "dict",
        "description": "Sizes pinned by hand. They are kept and checked; what is left out is planned.",
        "options": {
            "tensor": {"type": "int", "minimum": 1, "description": "GPUs that share each layer, inside a node."},
            "pipeline": {"type": "int", "minimum": 1, "description": "Stages of consecutive layers, across nodes."},
            "data": {
                "type": "int",
                "minimum": 1,
                "description": (
                    "Data-parallel ranks inside the engine (mixture of experts, latent attention), or independent "
                    "replicas (every other model)."
                ),
            },
            "expert": {"type": "bool", "description": "Keep experts whole and spread them over the GPUs."},
        },
    },
    "executor": {
        "type": "str",
        "choices": ["auto", "ray", "mp"],
        "default": "auto",
        "description": "What starts the ranks. C(auto): C(mp) on one node, C(ray) on several (C(mp) works there too).",
    },
    "disaggregation": {
        "type": "dict",
        "description": "Prefill and decode on different nodes; not served by this release.",
        "options": {
            "prefill": {"type": "str", "description": "Group of the prefill nodes."},
            "decode": {"type": "str", "description": "Group of the decode nodes."},
            "connector": {"type": "str", "description": "What carries the KV cache."},
        },
    },
    "speculative": {"type": "dict", "description": "Passed to C(--speculative-config)."},
    "args": {
        "type": "dict",
        "description": "Any other flag of C(vllm serve), without dashes in front, checked against the pinned version.",
    },
    "port": {
        "type": "int",
        "default": 8000,
        "minimum": 1024,
        "maximum": 65535,
        "description": (
            "Port of the OpenAI endpoint on the API node. Further replicas with the same API node take the next ports."
        ),
    },
    "master_port": {
        "type": "int",
        "default": 29501,
        "minimum": 1024,
        "maximum": 65535,
        "description": "Port on which the ranks of an engine over several nodes without Ray meet.",
    },
    "data_parallel_rpc_port": {
        "type": "int",
        "default": 29550,
        "minimum": 1024,
        "maximum": 65535,
        "description": "Port on which the data-parallel ranks of an engine over several nodes meet.",
    },
    "environment": {
        "type": "dict",
        "keys": "name of an environment variable",
        "value": {"type": "str"},
        "description": "Environment of the engine. Not for secrets.",
    },
}

CONTRACT: dict[str, Spec] = {
    "vllm_instances": {
        "type": "dict",
        "scope": "cluster",
        "keys": "name of the instance, which is also the model name that clients ask for",
        "options": _INSTANCE,
        "description": "What the cluster serves. One entry is one endpoint.",
    },
    "cluster_interface": {
        "type": "str",
        "scope": "host",
        "description": "The node's interface for traffic between nodes. Never guessed on a multi-homed node.",
    },
    "cluster_address": {
        "type": "str",
        "scope": "host",
        "description": (
            "The node's IP address on the cluster network. Needed as soon as an instance spans nodes or uses Ray; "
            "left out, cached facts of C(cluster_interface) serve."
        ),
    },
    "gpus": {
        "scope": "host",
        "description": (
            "The GPUs of the node as declared: C(count) (one where it is left out), C(name) and C(memory_total_mib), "
            "the last two as C(nvidia-smi) prints them. The plan reads them, so that it needs no connection; every run "
            "compares them with the real ones. A list of such entries for mixed GPUs. With the CPU build of vLLM they "
            "are slots."
        ),
        "any_of": [{"type": "dict", "options": _GPU}, {"type": "list", "elements": "dict", "options": _GPU}],
    },
    "host_reboot_serial": {
        "type": "int",
        "scope": "cluster",
        "minimum": 1,
        "default": 1,
        "description": "How many nodes C(playbooks/host.yml) reboots at a time. One that does not come back stops it.",
    },
    "ironrack_mirror": {
        "type": "str",
        "scope": "cluster",
        "pattern": mirror.PATTERN,
        "problem": mirror.PROBLEM,
        "remedy": mirror.REMEDY,
        "description": (
            "Mirror that every node fetches from, and from nothing else: an absolute path on the nodes, or the address "
            "of a server of such a folder. C(make artifacts DOWNLOAD=<folder>) makes it; docs/airgapped.md tells how. "
            "Empty, everything comes from its home, or from where each role's own variables say."
        ),
    },
    "python_env_variant": {
        "type": "str",
        "scope": "cluster",
        "choices": ["cpu", "cu129", "cu130"],
        "default": "cu130",
        "description": "Build of vLLM. With C(cpu) the declared GPUs are slots and memory is not planned.",
    },
    "python_env_vllm_version": {
        "type": "str",
        "scope": "cluster",
        "default": "0.33.0",
        "description": "Version of vLLM; its flags and rules hold.",
    },
}

# Switches for one run, given with -e and meaningless in an inventory.
SWITCHES: dict[str, str] = {
    "plan_format": "Form of the plan that playbooks/plan.yml prints: text, json or html.",
    "plan_growth": "Factor from 1 to 1000 by which concurrency grows: playbooks/plan.yml says what that needs.",
    "plan_file": "File on the controller that playbooks/plan.yml writes the plan to, in the form of plan_format.",
    "firewall_show": "With true, playbooks/network.yml prints who may reach what, and connects to nothing.",
}

# What all nodes agree on without asking anybody.
SITE: dict[str, str] = {
    "user": "ironrack",
    "group": "ironrack",
    "config_dir": "/etc/ironrack",
    "state_dir": "/var/lib/ironrack",
    "prefix": "/opt/ironrack",
    "current": "/opt/ironrack/current",
}

# Names that are nobody's variables: Ansible's own, the site's helpers, the test driver's.
FOREIGN_PREFIXES = ("ansible_", "site_", "molecule_")
MAGIC = frozenset(
    {
        "discovered_interpreter_python",
        "environment",
        "group_names",
        "groups",
        "hostvars",
        "inventory_dir",
        "inventory_file",
        "inventory_hostname",
        "inventory_hostname_short",
        "ironrack_plan",
        "omit",
        "play_hosts",
        "playbook_dir",
        "role_name",
        "role_names",
        "role_path",
        "role_uuid",
        "vars",
    }
)

# Variables of the engine's environment that ironrack sets itself: the key that says the same.
OWNED_ENVIRONMENT: dict[str, str] = {
    "VLLM_HOST_IP": "cluster_address",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "cluster_address",
    "VLLM_CONFIG_ROOT": "nothing: names that Ray must not carry to other nodes are kept there",
    "NODE_IP": "cluster_address",
    "GLOO_SOCKET_IFNAME": "cluster_interface",
    "NCCL_SOCKET_IFNAME": "cluster_interface",
    "RAY_ADDRESS": "the groups ray_head and ray_workers",
    "RAY_AUTH_MODE": "nothing: it is always on",
    "RAY_AUTH_TOKEN": "nothing: the token is made for you",
    "RAY_AUTH_TOKEN_PATH": "nothing: the token is made for you",
    "CUDA_VISIBLE_DEVICES": "parallelism (the plan chooses the GPUs)",
}
