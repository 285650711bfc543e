"""Renders a plan as the argument list of `vllm serve`, checked against the flags of the pinned version."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import PlannerError, short

_DATA = Path(__file__).parent / "data"
_PREFIX = "serve_flags_"

# Flags that the plan decides: the key of an instance that says the same.
OWNED = {
    "--tensor-parallel-size": "parallelism.tensor",
    "--pipeline-parallel-size": "parallelism.pipeline",
    "--data-parallel-size": "parallelism.data",
    "--enable-expert-parallel": "parallelism.expert",
    "--distributed-executor-backend": "executor",
    "--max-model-len": "context_length",
    "--speculative-config": "speculative",
    "--kv-transfer-config": "disaggregation",
    "--port": "port",
    "--master-port": "master_port",
    "--served-model-name": "the instance's own name",
    "--model": "model.path",
    "--revision": "model.revision",
    "--host": "cluster_address (the server listens on every address of its node)",
    "--uds": "port",
    "--master-addr": "cluster_address",
    "--nnodes": "nodes",
    "--node-rank": "nodes",
    "--headless": "nodes",
    "--data-parallel-address": "cluster_address",
    "--data-parallel-backend": "executor",
    "--data-parallel-rank": "nodes",
    "--data-parallel-rpc-port": "data_parallel_rpc_port",
    "--data-parallel-size-local": "nodes",
    "--data-parallel-start-rank": "nodes",
    "--config": "args",
    "--api-key": "vllm_secret_environment.<instance>.VLLM_API_KEY (a key in argv is readable by every user)",
    "--hf-token": "vllm_secret_environment.<instance>.HF_TOKEN (a token in argv is readable by every user)",
}
# Flags that would change how the endpoint is reached, which its clients and checks rely on.
REFUSED = frozenset(
    {
        "--enable-ssl-refresh",
        "--ssl-ca-certs",
        "--ssl-cert-reqs",
        "--ssl-certfile",
        "--ssl-ciphers",
        "--ssl-keyfile",
    }
)
# Plan keys in the order in which they are rendered.
_PLAN_FLAGS = (
    ("tensor_parallel_size", "--tensor-parallel-size"),
    ("pipeline_parallel_size", "--pipeline-parallel-size"),
    ("data_parallel_size", "--data-parallel-size"),
    ("enable_expert_parallel", "--enable-expert-parallel"),
    ("distributed_executor_backend", "--distributed-executor-backend"),
    ("max_model_len", "--max-model-len"),
    ("max_num_seqs", "--max-num-seqs"),
    ("max_num_batched_tokens", "--max-num-batched-tokens"),
    ("gpu_memory_utilization", "--gpu-memory-utilization"),
    ("kv_cache_dtype", "--kv-cache-dtype"),
    ("speculative_config", "--speculative-config"),
)
# Flags of vLLM 0.19 to 0.31 that the listed versions no longer have.
_OLDER_FLAGS = (
    "calculate_kv_scales",
    "enable_bf16x3_router_gemm",
    "max_long_partial_prefills",
    "max_num_partial_prefills",
    "override_attention_dtype",
)
# Keys of an engine's description that are no flags.
_BESIDE_FLAGS = ("pp_layer_partition", "vllm_version")
_PARTITION = "VLLM_PP_LAYER_PARTITION"
# Values that mean the same as leaving the flag out.
_UNSAID: dict[str, Any] = {
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "kv_cache_dtype": "auto",
}


def versions() -> list[str]:
    """Versions whose flags are known, oldest first."""
    names = (path.stem.removeprefix(_PREFIX) for path in _DATA.glob(f"{_PREFIX}*.json"))
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


@lru_cache(maxsize=8)
def _load(version: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Flags of a version, and every spelling of each."""
    known = versions()
    # Patch releases and local builds (0.32.0+cpu, 0.33.1) share the flags of their minor version.
    minor = version.split("+", maxsplit=1)[0].split(".")[:2]
    match = next((name for name in reversed(known) if name.split(".")[:2] == minor), None)
    if match is None:
        raise PlannerError(
            f"The flags of vLLM {version} are not known.", f"Use one of {', '.join(known)}.", "vllm_version"
        )
    flags: dict[str, dict[str, Any]] = json.loads((_DATA / f"{_PREFIX}{match}.json").read_text("utf-8"))["flags"]
    spellings = {}
    for name, entry in flags.items():
        for spelling in (name, *entry.get("aliases", ())):
            spellings[spelling] = name
    return flags, spellings


def flag_name(key: str, version: str) -> str:
    """The flag that a key of `args` means, or an error with a suggestion."""
    flags, spellings = _load(version)
    bare = key.strip().lstrip("-").replace("_", "-")
    for candidate in (f"--{bare}", f"-{bare}"):
        if candidate in spellings:
            return spellings[candidate]
    off = {entry["off"]: name for name, entry in flags.items() if "off" in entry}
    off |= {f"--no-{name[2:]}": name for name in off.values()}
    if f"--{bare}" in off:
        positive = off[f"--{bare}"]
        raise PlannerError(f"{key!r} switches a flag off.", f"Write {positive[2:]}: false instead.", f"args.{key}")
    close = difflib.get_close_matches(f"--{bare}", flags, n=1, cutoff=0.6)
    hint = f"Did you mean {close[0][2:]!r}?" if close else f"See `vllm serve --help=all` of vLLM {version}."
    raise PlannerError(f"{key!r} is no flag of vLLM {version}.", hint, f"args.{key}")


def check_args(args: Mapping[str, Any], version: str) -> dict[str, Any]:
    """`args` of an instance with every key as its flag; raises on the first key that can't be used."""
    checked: dict[str, Any] = {}
    _load(version)
    for key, value in args.items():
        name = flag_name(str(key), version)
        if name in OWNED:
            raise PlannerError(f"{key!r} is decided by the plan.", f"Set {OWNED[name]} instead.", f"args.{key}")
        if name in REFUSED:
            raise PlannerError(
                f"{key!r} would change how the endpoint is reached; vLLM itself stays on http.",
                "Remove it and terminate TLS in front of the endpoint.",
                f"args.{key}",
            )
        if name in checked:
            raise PlannerError(f"{key!r} says {name} twice.", "Remove one of them.", f"args.{key}")
        try:
            _render(name, value, version)
        except PlannerError as error:
            raise PlannerError(error.problem, error.remedy, f"args.{key}") from error
        checked[name] = value
    return checked


def engine_flags(args: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The same in snake_case, as the estimate reads them."""
    return {name[2:].replace("-", "_"): value for name, value in check_args(args, version).items()}


@lru_cache(maxsize=1)
def _engine_keys() -> dict[str, str]:
    """Every spelling of a flag of any known version in snake_case, and its key."""
    keys = {key: key for key in (*_OLDER_FLAGS, *_BESIDE_FLAGS)}
    for version in versions():
        for spelling, name in _load(version)[1].items():
            keys[_snake(spelling)] = _snake(name)
    return keys


def _snake(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_")


def engine_keys(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The description of an engine with every key as its flag in snake_case; raises on the first unknown key.

    Hyphens and short names count as the flag that they mean. Names of environment variables are kept as they are.
    """
    known = _engine_keys()
    found: dict[str, Any] = {}
    for key, value in engine.items():
        shown = short(key)
        if isinstance(key, str) and key.startswith("VLLM_"):
            name = "pp_layer_partition" if key == _PARTITION else key
        elif isinstance(key, str) and _snake(key) in known:
            name = known[_snake(key)]
        else:
            snake = _snake(str(key)[:100])
            close = difflib.get_close_matches(snake, known, n=1, cutoff=0.6)
            hint = "Use the flags of `vllm serve` in snake_case."
            if snake.startswith("no_") and snake[3:] in known:
                hint = f"Write {known[snake[3:]]}: false instead."
            elif close:
                hint = f"Did you mean {known[close[0]]!r}?"
            raise PlannerError(f"engine: {shown} is no flag of vLLM.", hint, f"engine.{str(key)[:100]}")
        if name in found:
            raise PlannerError(f"engine: {shown} says {name} twice.", "Remove one of them.", f"engine.{key}")
        found[name] = value
    return found


def serve_args(
    plan: Mapping[str, Any],
    version: str,
    *,
    model: str | None = None,
    served_model_name: str | None = None,
    host: str | None = None,
    port: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    data_parallel_size_local: int | None = None,
    data_parallel_start_rank: int | None = None,
) -> list[str]:
    """What follows `vllm serve`, one element an argument.

    An engine over several nodes without Ray meets at `master_addr` and `master_port`; with data-parallel ranks that are
    whole on their nodes (`data_parallel_size_local` of them on each) that is vLLM's data-parallel handshake.
    """
    argv = [model] if model is not None else []
    for flag, value in (("--served-model-name", served_model_name), ("--host", host), ("--port", port)):
        # A headless node has no API server; these flags would only mislead the reader of its unit.
        if value is not None and node_rank == 0:
            argv += _render(flag, value, version)
    args = check_args(plan.get("args") or {}, version)
    for key, flag in _PLAN_FLAGS:
        value = plan.get(key)
        if value is None or value == {} or value == _UNSAID.get(key):
            continue
        argv += _render(flag, args.pop(flag, value), version)
    if nnodes > 1:
        _check_meeting(
            plan,
            {
                "master_addr": master_addr,
                "master_port": master_port,
                "data_parallel_size_local": data_parallel_size_local,
                # The first node has the first ranks.
                "data_parallel_start_rank": data_parallel_start_rank if node_rank else 0,
            },
        )
        meeting: tuple[tuple[str, Any], ...] = (
            ("--nnodes", nnodes),
            ("--node-rank", node_rank),
            ("--master-addr", master_addr),
            ("--master-port", master_port),
        )
        if data_parallel_size_local is not None:
            meeting = (
                ("--data-parallel-size-local", data_parallel_size_local),
                ("--data-parallel-address", master_addr),
                ("--data-parallel-rpc-port", master_port),
            )
            if node_rank:
                meeting += (("--data-parallel-start-rank", data_parallel_start_rank),)
        for flag, value in meeting:
            argv += _render(flag, value, version)
        if node_rank:
            argv += _render("--headless", True, version)
    for flag, value in sorted(args.items()):
        argv += _render(flag, value, version)
    return argv


def _check_meeting(plan: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise unless everything is there that tells a node where its engine meets, and which ranks are its own."""
    data = plan.get("data_parallel_size") or 1
    wanted = list(options) if data > 1 else ["master_addr", "master_port"]
    missing = [name for name in wanted if options[name] is None]
    if not missing:
        return
    what = "An engine over several nodes without Ray"
    if data > 1:
        local = "data_parallel_size_local is the number of ranks on this node, data_parallel_start_rank its first"
        raise PlannerError(f"{what} and with {data} data-parallel ranks needs {', '.join(missing)}.", f"{local}.")
    raise PlannerError(f"{what} needs {', '.join(missing)}.", "Both are those of its first node.")


def _render(flag: str, value: Any, version: str) -> list[str]:
    flags, _ = _load(version)
    entry = flags.get(flag)
    if entry is None:
        raise PlannerError(f"{flag} is no flag of vLLM {version}.")
    kind = entry["kind"]
    if value is None:
        raise PlannerError(f"{flag[2:]} has no value.", "Leave the key out to keep vLLM's default.")
    if kind == "switch":
        if not isinstance(value, bool):
            raise PlannerError(f"{flag[2:]} = {value!r}: this flag is a switch.", "Give true or false.")
        if value:
            return [flag]
        return [entry["off"]] if "off" in entry else []
    if isinstance(value, bool):
        raise PlannerError(f"{flag[2:]} = {str(value).lower()}: this flag is not a switch.", "Give a value.")
    if isinstance(value, Mapping):
        return [flag, json.dumps(value, sort_keys=True, separators=(",", ":"))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if kind != "list":
            # Flags that read JSON take lists as JSON too.
            return [flag, json.dumps(list(value), separators=(",", ":"))]
        if not value:
            raise PlannerError(f"{flag[2:]} is an empty list.", "Leave the key out instead.")
        return [flag, *(_text(flag, item) for item in value)]
    return [flag, _text(flag, value)]


def _text(flag: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    text = str(value)
    if "\n" in text or "\0" in text:
        raise PlannerError(f"{flag[2:]}: a value can't hold line breaks.", "Write it in one line.")
    if text.startswith("-") and not _is_number(text):
        # argparse would read it as the next flag.
        raise PlannerError(f"{flag[2:]} = {text!r}: a value can't begin with a dash.", "Remove the dash.")
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
