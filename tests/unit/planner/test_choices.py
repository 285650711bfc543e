"""Values that the argument parser of vLLM refuses."""

from __future__ import annotations

import json

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.choices import (
    _DATA,
    check_choices,
    check_speculative,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.serve_args import _load, versions


@pytest.mark.parametrize("version", versions())
def test_every_version_has_its_values(version: str) -> None:
    known = json.loads((_DATA / f"serve_values_{version}.json").read_text("utf-8"))
    flags, _ = _load(version)
    assert known["version"] == version
    kinds = [set(known["choices"]), *(set(known[kind]) for kind in ("int", "float", "size"))]
    assert set().union(*kinds) <= set(flags)
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert {"--block-size", "--max-num-seqs"} <= set(known["int"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"performance_mode": "fast"}, ["performance-mode = 'fast'", "balanced, interactivity, throughput"]),
        ({"scheduling_policy": "fcsf"}, ["Did you mean 'fcfs'?"]),
        ({"max_lora_rank": 24}, ["1, 128, 16"]),
        ({"attention_backend": "flash_atn"}, ["Did you mean 'FLASH_ATTN'?"]),
        ({"tool_call_parser": "llama3"}, ["Did you mean 'llama3_json'?", "more"]),
        ({"reasoning_parser": "qwen"}, ["Did you mean 'qwen3'?"]),
        ({"mamba_cache_dtype": "float8"}, ["auto, bfloat16, float16, float32"]),
        ({"safetensors_load_strategy": "x"}, ["prefetch"]),
        ({"long_prefill_token_threshold": "many"}, ["long-prefill-token-threshold = 'many' is not an integer"]),
        ({"all2all_backend": {"a": 1}}, ["invalid choice"]),
        ({"dtype": ["bfloat16"]}, ["invalid choice"]),
        ({"collect_detailed_traces": ["model", "all the rest"]}, ["model, worker"]),
        ({"max_num_seqs": "1k"}, ["is not an integer"]),
        ({"max_num_seqs": 64.0}, ["is not an integer"]),
        ({"max_num_batched_tokens": "1.5K"}, ["with k, m, g or t"]),
        ({"gpu_memory_utilization": "most"}, ["is not a number"]),
        ({"gpu_memory_utilization": ""}, ["is not a number"]),
    ],
)
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1+cu129"])
def test_refused(version: str, flags: dict, words: list[str]) -> None:
    with pytest.raises(PlannerError) as caught:
        check_choices(flags, version)
    assert caught.value.key == next(iter(flags))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"performance_mode": "throughput", "max_lora_rank": 16, "attention_backend": "flash_attn"},
        {"max_lora_rank": "32", "attention_backend": "auto"},
        # A plugin of the user's own brings parsers that nobody else knows.
        {"tool_call_parser": "mine", "tool_parser_plugin": "/p.py"},
        {"reasoning_parser": "mine", "reasoning_parser_plugin": "/p.py"},
        {"max_num_seqs": "64", "max_num_batched_tokens": "1.5k", "gpu_memory_utilization": ".9"},
        {"max_num_batched_tokens": "16K", "gpu_memory_utilization": 1, "long_prefill_token_threshold": 0},
        {"quantization": "anything", "collect_detailed_traces": ["model", "worker"]},
    ],
)
def test_taken(flags: dict) -> None:
    check_choices(flags, "0.33.0")


def test_words_are_words_for_the_estimate_too() -> None:
    with pytest.raises(PlannerError, match="all2all_backend"):
        parse_engine({"all2all_backend": {"a": 1}})


def test_nothing_is_known_of_other_versions() -> None:
    check_choices({"performance_mode": "fast"}, "0.20.0")


@pytest.mark.parametrize(("text", "tokens"), [("1.5k", 1500), ("16K", 16384), ("2048", 2048), ("1m", 10**6)])
def test_sizes_are_read_as_the_parser_reads_them(text: str, tokens: int) -> None:
    assert parse_engine({"max_num_batched_tokens": text}).max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("speculative", "key", "words"),
    [
        ({"method": "eagel"}, "speculative.method", ["Did you mean 'eagle'?"]),
        ({"num_spec_tokens": 3}, "speculative", ["Did you mean 'num_speculative_tokens'?"]),
        ({"tensor_parallel_size": 2}, "speculative", ["Did you mean 'draft_tensor_parallel_size'?"]),
    ],
)
def test_refused_of_speculative(speculative: dict, key: str, words: list[str]) -> None:
    with pytest.raises(PlannerError) as caught:
        check_speculative(speculative, "0.33.0")
    assert caught.value.key == key
    for word in words:
        assert word in str(caught.value)


def test_taken_of_speculative() -> None:
    check_speculative({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4}, "0.33.0")
    check_speculative({"method": "[ngram]"}, "0.32.0")
    check_speculative({"anything": 1}, "0.20.0")
