"""Encoders and pooling models: BERT and its kin, ModernBERT, and decoders that return embeddings or scores.

Encoders keep no KV cache. A pooling model holds no language-model head, but a classifier in float32
(vllm/config/model.py: head_dtype) where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .decoder import Family, layers_of, rotary_table
from .engine import Engine
from .errors import UnsupportedArchitectureError, short
from .families_gemma import gemma3
from .mixers import Mixer, architecture_of, generative_name
from .model import Model
from .source import Source
from .tensors import FLOAT32, MODEL_DTYPE, Item, Linear, Plain, Structure, Vocabulary

_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def is_pooling(model: Model, engine: Engine) -> bool:
    """Whether vLLM's pooling runner serves the model (vllm/config/model.py: _get_runner_type)."""
    if engine.runner != "auto":
        return engine.runner == "pooling"
    if engine.convert not in ("auto", "none"):
        return True
    name = architecture_of(model.config)
    return name in FAMILIES or generative_name(name) != name


def _classifier(source: Source) -> Plain:
    return Plain(labels(source) * (source.hidden + 1), head_dtype(source))


def _embeddings(source: Source, *, positions: bool) -> list[Item]:
    """Tables beside the words: positions, token types, a LayerNorm (models/bert.py: BertEmbedding)."""
    hidden = source.hidden
    items: list[Item] = [Plain(2 * hidden)]
    if positions:
        rows = source.size("max_position_embeddings")
        # position_ids is a buffer of 8-byte integers.
        items += [Vocabulary("embeddings.position_embeddings", rows, hidden), Plain(2 * rows, FLOAT32)]
    types = source.size("type_vocab_size", default=2, minimum=0)
    if types:
        items.append(Vocabulary("embeddings.token_type_embeddings", types, hidden))
    return items


def _encoder(
    source: Source, architecture: str, prefix: str, layer: Callable[[Mixer], list[Item]], more: list[Item]
) -> Structure:
    def make(_index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        return "", lambda: layer(mixer)

    return Structure(
        architecture,
        prefix,
        layers_of(source, make),
        first=tuple(more),
        embedding=Vocabulary("embeddings.word_embeddings", source.vocabulary, source.hidden),
    )


def _bert(source: Source, architecture: str) -> Structure:
    """`models/bert.py` and `roberta.py`: post-norm layers with biases everywhere."""
    hidden, wide, dtype = source.hidden, source.intermediate, head_dtype(source)

    def layer(mixer: Mixer) -> list[Item]:
        width = mixer.heads * mixer.head_dim
        parts = ("query", "key", "value")
        return [
            Linear("attention.self.qkv_proj", hidden, (width,) * 3, "qkv", parts, mixer.heads, bias=True),
            Linear("attention.output.dense", hidden, (hidden,), "row", bias=True),
            Linear("intermediate.dense", hidden, (wide,), "column", bias=True),
            Linear("output.dense", wide, (hidden,), "row", bias=True),
            Plain(4 * hidden),
        ]

    more = _embeddings(source, positions=True)
    square = Plain(hidden * (hidden + 1), dtype)
    if architecture.endswith("ForSequenceClassification"):
        # The pooler's dense layer (BERT) or the head's (RoBERTa), then the classifier.
        more += [square, _classifier(source)]
    elif architecture.endswith("ForTokenClassification"):
        more.append(_classifier(source))
    return _encoder(source, architecture, "model.encoder.layer.", layer, more)


def _modernbert(source: Source, architecture: str) -> Structure:
    """`models/modernbert.py`: the first MLP matrix is an ordinary layer that every tensor rank holds whole."""
    hidden, wide, dtype = source.hidden, source.intermediate, head_dtype(source)
    attention, mlp = source.flag("attention_bias"), source.flag("mlp_bias")
    norm = hidden * (2 if source.flag("norm_bias") else 1)

    def layer(mixer: Mixer) -> list[Item]:
        width = mixer.heads * mixer.head_dim
        return [
            Linear("attn.Wqkv", hidden, (width,) * 3, "qkv", (), mixer.heads, bias=attention),
            Linear("attn.Wo", hidden, (hidden,), "row", bias=attention),
            Linear("mlp.Wi", hidden, (2 * wide,), "replicated", bias=mlp, quantized=False, lora=False),
            Linear("mlp.Wo", wide, (hidden,), "row", bias=mlp),
            Plain(2 * norm),
        ]

    head_dim = source.mixers[0].head_dim
    # One table for global and one for local layers; the embedding's and the last norm.
    more: list[Item] = [Plain(2 * source.size("max_position_embeddings", default=8192) * head_dim), Plain(2 * norm)]
    dense = hidden * hidden + (hidden if source.flag("classifier_bias") else 0)
    if architecture.endswith("ForSequenceClassification"):
        more += [Plain(dense + norm, dtype), _classifier(source)]
    elif architecture.endswith("ForTokenClassification"):
        more += [Plain(dense + norm), _classifier(source)]
    return _encoder(source, architecture, "model.encoder_layer.layers.", layer, more)


def _rotary_bert(
    source: Source, architecture: str, *, gated: bool, bias: bool, up_bias: bool, more: tuple[Item, ...] = ()
) -> Structure:
    """`models/bert_with_rope.py`: rotary positions instead of learned ones."""
    hidden, wide = source.hidden, source.intermediate

    def layer(mixer: Mixer) -> list[Item]:
        width = mixer.heads * mixer.head_dim
        up = (
            Linear("mlp.gate_up_proj", hidden, (wide, wide), "column", ("gate_proj", "up_proj"), bias=up_bias)
            if gated
            else Linear("mlp.up_proj", hidden, (wide,), "column", bias=up_bias)
        )
        return [
            Linear("attn.qkv_proj", hidden, (width,) * 3, "qkv", (), mixer.heads, bias=bias),
            Linear("attn.out_proj", hidden, (hidden,), "row", bias=bias),
            up,
            Linear("mlp.down_proj", wide, (hidden,), "row", bias=bias),
            Plain(4 * hidden),
        ]

    return _encoder(source, architecture, "encoder.layers.", layer, [*_embeddings(source, positions=False), *more])


def _nomic(source: Source, architecture: str) -> Structure:
    """`NomicBertModel`: a gated MLP with swiglu."""
    if source.size("moe_every_n_layers", default=0, minimum=0):
        raise UnsupportedArchitectureError(
            f"the weights of {short(architecture)} with experts (moe_every_n_layers) are not known to this version.",
            "Plan it by hand: give parallelism and max_model_len.",
            "moe_every_n_layers",
        )
    bias, gated = source.flag("qkv_proj_bias"), source.text.get("activation_function") == "swiglu"
    rows = source.size("max_position_embeddings", "n_positions", default=2048)
    table = Plain(rows * source.mixers[0].head_dim)
    return _rotary_bert(source, architecture, gated=gated, bias=bias, up_bias=bias, more=(table,))


def _gte(source: Source, architecture: str) -> Structure:
    """`GteNewModel` (Alibaba's GTE) and `SnowflakeGteNewModel`: all but the first MLP matrix have biases."""
    more: list[Item] = [rotary_table(source, source.mixers[0].head_dim)]
    if architecture.endswith("ForSequenceClassification"):
        more += [Plain(source.hidden * (source.hidden + 1), head_dtype(source)), _classifier(source)]
    return _rotary_bert(source, architecture, gated=True, bias=True, up_bias=False, more=tuple(more))


def _xlm_roberta(source: Source, architecture: str) -> Structure:
    """XLM-RoBERTa, or Jina's embeddings v3, which turn positions (models/config.py: JinaRobertaModelConfig)."""
    if source.text.get("position_embedding_type") not in ("rope", "rotary"):
        return _bert(source, architecture)
    table = rotary_table(source, source.mixers[0].head_dim)
    return _rotary_bert(source, architecture, gated=False, bias=True, up_bias=True, more=(table,))


def _embedding_gemma(source: Source, architecture: str) -> Structure:
    return replace(gemma3(source, architecture), head=None, embedding_everywhere=True)


def labels(source: Source) -> int:
    """Number of classes: transformers counts id2label and takes two where config.json names none."""
    names = source.text.get("id2label")
    return len(names) if isinstance(names, Mapping) and names else source.size("num_labels", default=2)


def head_dtype(source: Source) -> str:
    """Of a pooling model's last layers (vllm/config/model.py: head_dtype)."""
    return MODEL_DTYPE if source.text.get("head_dtype") == "model" else FLOAT32


def pooled(source: Source, structure: Structure, architecture: str) -> Structure:
    """A decoder turned into a pooling model (models/adapters.py, models/qwen2_rm.py): its head gives way to scores."""
    hidden, dtype = source.hidden, head_dtype(source)
    extra: tuple[Item, ...] = ()
    if architecture.endswith("ForSequenceClassification"):
        extra = (Plain(labels(source) * hidden, dtype),)
    elif architecture.endswith("RewardModel"):
        # The class sets the number of labels itself.
        count = 2 if "Process" in architecture else 1
        square = Plain(hidden * (hidden + 1), dtype, split=True)
        extra = (square, Plain(count * hidden, dtype, split=True), Plain(count, dtype))
    return replace(structure, architecture=architecture, head=None, last=(*structure.last, *extra))


FAMILIES: dict[str, Family] = {
    "BertModel": _bert,
    **{f"Bert{task}": _bert for task in _CLASSIFIERS},
    "RobertaModel": _bert,
    **{f"Roberta{task}": _bert for task in _CLASSIFIERS},
    "XLMRobertaModel": _xlm_roberta,
    **{f"XLMRoberta{task}": _bert for task in _CLASSIFIERS},
    "ModernBertModel": _modernbert,
    **{f"ModernBert{task}": _modernbert for task in _CLASSIFIERS},
    "Gemma3TextModel": _embedding_gemma,
    "GteModel": _gte,
    "GteNewForSequenceClassification": _gte,
    "GteNewModel": _gte,
    "NomicBertModel": _nomic,
}
