"""Reading config.json."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import ModelConfigError, PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import load_config, merge, parse_config
from hypothesis import given, settings
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=20,
)
KEYS = st.sampled_from(
    [
        "architectures",
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rope_scaling",
        "quantization_config",
        "num_experts",
        "mlp_only_layers",
        "text_config",
        "torch_dtype",
        "sliding_window",
    ]
)


def test_counts(model_config) -> None:
    model = parse_config(model_config("dense_72b"))
    assert (model.heads, model.kv_heads, model.layers, model.hidden) == (64, 8, 80, 8192)
    assert model.head_dim == 128
    assert model.max_context == 32768
    assert model.sliding_window is None


def test_heads_come_from_the_text_config_alone(model_config) -> None:
    model = parse_config(model_config("multimodal"))
    assert (model.heads, model.kv_heads, model.max_context) == (32, 8, 262144)
    assert model.multimodal


def test_old_names() -> None:
    model = parse_config({"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257})
    assert (model.hidden, model.heads, model.kv_heads, model.layers, model.max_context) == (768, 12, 12, 12, 1024)
    assert model.intermediate == 4 * 768


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "linear", "factor": None}, 4096),
    ],
)
def test_context_with_rope(model_config, rope, expected) -> None:
    config = {**model_config("linear_rope"), "rope_scaling": rope}
    assert parse_config(config).max_context == expected


def test_longrope_starts_at_the_original_length(model_config) -> None:
    config = {
        **model_config("linear_rope"),
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    }
    model = parse_config(config)
    assert (model.max_context, model.default_context) == (131072, 4096)


def test_quantization_group_of_compressed_tensors(model_config) -> None:
    config = model_config("dense_8b")
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}},
    }
    quantization = parse_config(config).quantization
    assert quantization is not None
    assert (quantization.bits, quantization.group_size) == (4, 32)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", "many"),
        ("num_attention_heads", 0),
        ("num_hidden_layers", -1),
        ("hidden_size", float("nan")),
        ("hidden_size", 10**30),
        ("vocab_size", True),
        ("max_position_embeddings", [1, 2]),
    ],
)
def test_wrong_numbers_name_the_key(model_config, key, value) -> None:
    with pytest.raises(ModelConfigError, match=key):
        parse_config({**model_config("dense_8b"), key: value})


def test_missing_heads() -> None:
    with pytest.raises(ModelConfigError, match="attention heads"):
        parse_config({"hidden_size": 8})


def test_overrides_merge(model_config) -> None:
    config = merge(model_config("multimodal"), {"text_config": {"num_hidden_layers": 2}})
    assert parse_config(config).layers == 2
    assert parse_config(config).heads == 32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "an object"),
        ("\udcff", "not valid JSON"),
        ("[" * 100_000, "nested too deeply|not valid JSON"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelConfigError, match=message):
        load_config(path)


def test_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelConfigError, match="larger than"):
        load_config(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="no such file"):
        load_config(tmp_path / "config.json")


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=12))
def test_any_json_gives_a_model_or_the_documented_error(model_config, changes) -> None:
    config = {**model_config("dense_tiny"), **changes}
    with contextlib.suppress(PlannerError):
        estimate(config, {"name": "gpu", "memory_total_mib": 81559}, {"tensor_parallel_size": 2})


def test_every_known_config_parses(shared_facts: Path) -> None:
    for path in sorted((shared_facts / "model_configs").glob("*.json")):
        if path.name.endswith(".hf_quant_config.json"):
            continue
        config = json.loads(path.read_text("utf-8"))
        try:
            assert parse_config(config).layers > 0, path.name
        except ModelConfigError as error:
            # Catalogues that hold a part of the config only.
            assert "has no" in str(error), (path.name, str(error))
