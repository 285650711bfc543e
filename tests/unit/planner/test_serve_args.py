"""The argument list."""
# ruff: noqa: S104  # nothing listens here

from __future__ import annotations

import argparse
import importlib
import json

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.serve_args import (
    OWNED,
    REFUSED,
    _load,
    check_args,
    serve_args,
    versions,
)
from hypothesis import given, settings
from hypothesis import strategies as st

VERSION = "0.33.0"


def test_versions() -> None:
    assert versions() == ["0.32.0", "0.33.0"]


@pytest.mark.parametrize("version", versions())
def test_owned_flags_exist(version: str) -> None:
    flags, _ = _load(version)
    assert {*OWNED, *REFUSED} <= set(flags)
    assert {name for name in flags if "ssl" in name or "uds" in name} <= {*OWNED, *REFUSED}


def test_order_and_forms() -> None:
    plan = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "max_model_len": 512,
        "gpu_memory_utilization": 0.9,
        "kv_cache_dtype": "auto",
        "args": {
            "enforce_eager": True,
            "--enable-prefix-caching": False,
            "compilation-config": {"mode": 2, "backend": "eager"},
            "allowed-origins": ["*"],
            "lora-modules": ["a=/a", "b=/b"],
            "disable-log-stats": False,
            "gpu-memory-utilization": 0.85,
        },
    }
    assert serve_args(plan, "0.32.0+cpu", model="/m", served_model_name="tiny", host="0.0.0.0", port=8000) == [
        "/m",
        "--served-model-name",
        "tiny",
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
        "--tensor-parallel-size",
        "2",
        "--pipeline-parallel-size",
        "1",
        "--distributed-executor-backend",
        "mp",
        "--max-model-len",
        "512",
        "--gpu-memory-utilization",
        "0.85",
        "--allowed-origins",
        '["*"]',
        "--compilation-config",
        '{"backend":"eager","mode":2}',
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--lora-modules",
        "a=/a",
        "b=/b",
    ]


def test_headless_rank() -> None:
    argv = serve_args(
        {"tensor_parallel_size": 2},
        VERSION,
        model="/m",
        served_model_name="x",
        host="::",
        port=1,
        nnodes=2,
        node_rank=1,
        master_addr="10.0.0.1",
        master_port=29501,
    )
    assert "--headless" in argv
    assert "--port" not in argv
    assert argv[argv.index("--node-rank") + 1] == "1"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max-modl-len": 1}, ["max-modl-len", "max-model-len"]),
        ({"tp": 2}, ["tp", "parallelism.tensor"]),
        ({"tensor_parallel_size": 2}, ["parallelism.tensor"]),
        ({"max-model-len": 1}, ["context_length"]),
        ({"port": 1}, ["port"]),
        ({"headless": True}, ["nodes"]),
        ({"api-key": "s3cr3t"}, ["vllm_secret_environment.<instance>.VLLM_API_KEY"]),
        ({"hf_token": "s3cr3t"}, ["vllm_secret_environment.<instance>.HF_TOKEN"]),
        ({"ssl-certfile": "/c"}, ["terminate TLS in front of the endpoint"]),
        ({"enable_ssl_refresh": True}, ["terminate TLS in front of the endpoint"]),
        ({"uds": "/s"}, ["Set port instead"]),
        ({"enforce-eager": "yes"}, ["true or false"]),
        ({"max-num-seqs": True}, ["Give a value"]),
        ({"max-num-seqs": None}, ["Leave the key out"]),
        ({"dtype": "a\nb"}, ["line breaks"]),
        ({"chat-template": "--port"}, ["dash"]),
        ({"no-enable-prefix-caching": True}, ["enable-prefix-caching: false"]),
        ({"q": "fp8", "quantization": "fp8"}, ["twice"]),
        ({"swap-space": 4}, ["swap-space"]),
    ],
)
def test_refused(args, words) -> None:
    with pytest.raises(PlannerError) as caught:
        check_args(args, VERSION)
    assert caught.value.key == f"args.{list(args)[-1]}"
    assert caught.value.remedy
    assert "s3cr3t" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


DATA = {"tensor_parallel_size": 1, "data_parallel_size": 16}


def test_data_parallel_nodes_meet() -> None:
    both = {"nnodes": 2, "master_addr": "10.0.0.1", "master_port": 29550, "data_parallel_size_local": 8}
    first = serve_args(DATA, VERSION, **both)
    second = serve_args(DATA, VERSION, node_rank=1, data_parallel_start_rank=8, **both)
    for argv in (first, second):
        assert "--nnodes" not in argv
        assert argv[argv.index("--data-parallel-size-local") + 1] == "8"
        assert argv[argv.index("--data-parallel-address") + 1] == "10.0.0.1"
        assert argv[argv.index("--data-parallel-rpc-port") + 1] == "29550"
    assert "--data-parallel-start-rank" not in first
    assert second[second.index("--data-parallel-start-rank") + 1] == "8"


@pytest.mark.parametrize(
    ("plan", "options", "missing"),
    [
        (DATA, {"master_addr": "10.0.0.1", "master_port": 1}, "data_parallel_size_local."),
        (
            DATA,
            {"node_rank": 1, "master_addr": "10.0.0.1", "master_port": 1},
            "data_parallel_size_local, data_parallel_start_rank.",
        ),
        (DATA, {}, "master_addr, master_port, data_parallel_size_local."),
        ({}, {"master_port": 1}, "master_addr."),
    ],
)
def test_what_a_node_needs_to_meet_the_others_is_named(plan, options, missing) -> None:
    with pytest.raises(PlannerError, match="over several nodes without Ray") as caught:
        serve_args(plan, VERSION, nnodes=2, **options)
    assert caught.value.problem.endswith(f"needs {missing}")


@pytest.mark.parametrize(
    ("name", "arguments", "options", "words"),
    [
        ("serve_args", ({},), {}, ["version is missing", "0.33.0"]),
        ("serve_args", ({}, VERSION), {"noodes": 2}, ["noodes is no option", "nnodes"]),
        ("estimate", ({},), {}, ["the GPU is one or a list"]),
        ("estimate", ({}, {}), {"max_model_len": 1}, ["max_model_len is no option", "engine"]),
        ("plan", ({},), {}, ["nodes is missing"]),
        ("plan", ({}, []), {"contxt_length": 1}, ["contxt_length"]),
    ],
)
def test_filters_refuse_wrong_arguments_in_words(name, arguments, options, words) -> None:
    module = importlib.import_module(f"ansible_collections.ironrack.vllm.plugins.filter.{name}")
    with pytest.raises(AnsibleFilterError) as caught:
        module.FilterModule().filters()[name](*arguments, **options)
    assert all(word in str(caught.value) for word in [f"ironrack.vllm.{name}", *words]), caught.value


def test_unknown_version() -> None:
    with pytest.raises(PlannerError, match=r"0\.32\.0, 0\.33\.0"):
        serve_args({}, "0.9.0")


def parser(version: str) -> argparse.ArgumentParser:
    """A parser with the names that the version knows."""
    made = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    made.add_argument("model")
    for name, entry in _load(version)[0].items():
        names = [name, *entry.get("aliases", [])]
        if entry["kind"] == "switch":
            made.add_argument(*names, action="store_true", default=None)
            if "off" in entry:
                made.add_argument(entry["off"], dest=name[2:].replace("-", "_"), action="store_false", default=None)
        else:
            made.add_argument(*names, nargs="+" if entry["kind"] == "list" else None)
    return made


PARSERS = {version: parser(version) for version in versions()}


@st.composite
def cases(draw) -> tuple[str, dict]:
    version = draw(st.sampled_from(versions()))
    flags = _load(version)[0]
    text = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=8).filter(
        lambda value: not value.startswith("-")
    )
    plain = text | st.integers(0, 1000) | st.floats(0.1, 1, allow_nan=False)
    nested = st.dictionaries(text, st.integers() | text, min_size=1, max_size=3)
    args = {}
    for name in draw(st.lists(st.sampled_from(sorted(set(flags) - set(OWNED) - REFUSED)), max_size=6, unique=True)):
        kind = flags[name]["kind"]
        value = {"switch": st.booleans(), "list": st.lists(plain, min_size=1, max_size=3), "value": plain | nested}[
            kind
        ]
        args[draw(st.sampled_from([name, name[2:], name[2:].replace("-", "_")]))] = draw(value)
    return version, args


@settings(max_examples=80, deadline=None)
@given(cases())
def test_round_trip(case) -> None:
    """A parser with the same names reads back what was written."""
    version, args = case
    argv = serve_args({"args": args}, version, model="/m")
    assert all(isinstance(item, str) for item in argv)
    parsed = vars(PARSERS[version].parse_args(argv))
    for key, value in args.items():
        found = parsed[key.lstrip("-").replace("-", "_")]
        if isinstance(value, bool):
            assert found is value or (value is False and found is None)
        elif isinstance(value, dict):
            assert json.loads(found) == value
        elif isinstance(value, list):
            assert found == [str(item) for item in value]
        else:
            assert found == str(value)
