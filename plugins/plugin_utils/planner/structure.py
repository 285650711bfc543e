"""Turns config.json into the tensors that vLLM creates for it.

Each family of models is described as vLLM builds it (vllm/model_executor/models/*.py) in a file of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import families_encoder, families_kimi, families_vision
from .decoder import Family
from .errors import UnsupportedArchitectureError, short
from .families import BY_TYPE, LANGUAGE_MODELS
from .families_encoder import pooled
from .mixers import architecture_of, generative_name
from .model import Model
from .sections import text_config
from .source import Source
from .tensors import Structure

_FAMILIES: dict[str, Family] = {
    **LANGUAGE_MODELS,
    **families_encoder.FAMILIES,
    **families_kimi.FAMILIES,
    **families_vision.FAMILIES,
}
# vllm/model_executor/models: no `is_last_rank` (or `is_first_rank`) around the head (or the embedding), 0.19 to 0.33.
_HEAD_EVERYWHERE = frozenset(
    {
        "Gemma3ForCausalLM",
        "GPT2LMHeadModel",
        "GptOssForCausalLM",
        "InternLM2ForCausalLM",
        "MixtralForCausalLM",
        "NemotronHForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
_EMBEDDING_EVERYWHERE = _HEAD_EVERYWHERE | {
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
}


def build(model: Model) -> Structure:
    """Describe `model`. Raises UnsupportedArchitectureError where the architecture is not known."""
    config = model.config
    text = text_config(config)
    architecture = architecture_of(config)
    if not architecture:
        architecture = _architecture_by_type(config, text)
    generative = architecture if architecture in _FAMILIES else generative_name(architecture)
    found = _FAMILIES.get(generative)
    if found is None:
        raise UnsupportedArchitectureError(
            f"the weights of {architecture:.80} are not known to this version.",
            "Plan it by hand: give parallelism and max_model_len.",
            "architectures",
        )
    source = Source(config, text, model.mixers)
    structure = found(source, generative)
    structure = replace(
        structure,
        embedding_everywhere=structure.embedding_everywhere or generative in _EMBEDDING_EVERYWHERE,
        head_everywhere=structure.head_everywhere or generative in _HEAD_EVERYWHERE,
    )
    return structure if generative == architecture else pooled(source, structure, architecture)


def _architecture_by_type(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    model_type = config.get("model_type") or text.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedArchitectureError(
            "config.json names neither architectures nor model_type, so its weights can't be told.",
            "Use the checkpoint's own config.json.",
            "architectures",
        )
    architecture = BY_TYPE.get(model_type)
    if architecture is None:
        raise UnsupportedArchitectureError(
            f"config.json has no architectures, and model_type {short(model_type)} does not tell one.",
            "Use the checkpoint's own config.json.",
            "architectures",
        )
    return architecture
