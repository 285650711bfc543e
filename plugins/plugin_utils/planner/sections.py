"""Where config.json describes the language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model", "decoder", "generator")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# Files of Gemma 3 hold only what differs from Gemma3TextConfig, heads and vocabulary left out.
_CLASS_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    }
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model. Heads are never a mix of text and vision towers."""
    inner: Mapping[str, Any] = config
    thinker = inner.get("thinker_config")
    if isinstance(thinker, Mapping):
        inner = thinker
    for key in _TEXT_KEYS:
        candidate = inner.get(key)
        if not isinstance(candidate, Mapping):
            continue
        kind = candidate.get("model_type")
        if isinstance(kind, str) and kind in _CLASS_DEFAULTS:
            return {**_CLASS_DEFAULTS[kind], **{key: item for key, item in candidate.items() if item is not None}}
        if first_of(candidate, HEADS) is not None:
            return candidate
    return inner


def first_of(config: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any] | None:
    for name in names:
        if config.get(name) is not None:
            return name, config[name]
    return None
