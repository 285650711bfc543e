"""Encoders with rotary positions and EmbeddingGemma: against vLLM's own classes (0.26)."""

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import parse_card, parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.weights import stage_weights

L4 = {"name": "NVIDIA L4", "memory_total_mib": 23034}
GTE = {
    "architectures": ["GteNewModel"],
    "model_type": "new",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "vocab_size": 250048,
    "type_vocab_size": 1,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu",
    "position_embedding_type": "rope",
    "torch_dtype": "float16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 160000},
}
JINA = {
    "architectures": ["XLMRobertaModel"],
    "position_embedding_type": "rotary",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 250002,
    "type_vocab_size": 1,
    "max_position_embeddings": 8194,
    "torch_dtype": "bfloat16",
    "hidden_act": "gelu",
}
EMBEDDING_GEMMA = {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "use_bidirectional_attention": True,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 2048,
    "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "tensor", "total"),
    [
        (GTE, 1, 460776592),
        (GTE, 4, 116010640),
        ({**GTE, "architectures": ["GteModel"], "type_vocab_size": 0}, 1, 460678288),
        ({**GTE, "architectures": ["GteNewForSequenceClassification"], "id2label": {"0": "score"}}, 1, 463142036),
        (JINA, 1, 614052240),
        (JINA, 4, 154339728),
        (EMBEDDING_GEMMA, 1, 455519962),
    ],
)
def test_against_vllm(config, tensor, total) -> None:
    engine = parse_engine({"tensor_parallel_size": tensor, "vllm_version": "0.26.0"})
    (stage,) = stage_weights(parse_config(config), engine, card=parse_card(L4))
    assert -1e-5 <= stage.bytes / total - 1 <= 0.005


@pytest.mark.parametrize("config", [GTE, JINA, EMBEDDING_GEMMA])
def test_they_keep_no_cache(config) -> None:
    answer = estimate(config, L4, {"vllm_version": "0.33.0"})
    assert answer["fits"]
    assert (answer["kv_cache_tokens"], answer["kv_cache_gib"]) == (0, 0.0)


def test_a_causal_gemma_keeps_one() -> None:
    """models/config.py: Gemma3TextModelConfig takes is_causal from use_bidirectional_attention."""
    answer = estimate({**EMBEDDING_GEMMA, "use_bidirectional_attention": False}, L4, {"vllm_version": "0.33.0"})
    assert answer["kv_cache_tokens"] > 0


def test_learned_positions_are_another_model() -> None:
    engine = parse_engine({"vllm_version": "0.26.0"})
    learned = {**JINA, "position_embedding_type": "absolute"}
    rows = 8194
    (with_table,) = stage_weights(parse_config(learned), engine)
    (turned,) = stage_weights(parse_config(JINA), engine)
    # A learned table of positions, and their 8-byte numbers, instead of cosines and sines of 64 columns.
    assert with_table.bytes - turned.bytes == pytest.approx(rows * (1024 * 2 + 8 - 64 * 2), rel=0.02)
