"""Encoders and pooling models: BERT and its kin, ModernBERT, and decoders that return embeddings or scores.

Encoders keep no KV cache. A pooling model holds no language-model head, but a classifier in float32
(vllm/config/model.py: head_dtype) where it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .engine import Engine
from .errors import UnsupportedArchitectureError, short
from .mixers import Mixer, architecture_of, generative_name, mixers
from .model import Model
from .structure import _FLOAT32, Family, Item, Linear, Plain, Source, Structure, Vocabulary, _layers, head_dtype, labels

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
        items += [Vocabulary("embeddings.position_embeddings", rows, hidden), Plain(2 * rows, _FLOAT32)]
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
        _layers(source, make),
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

    head_dim = mixers(source.config)[0].head_dim
    # One table for global and one for local layers; the embedding's and the last norm.
    more: list[Item] = [Plain(2 * source.size("max_position_embeddings", default=8192) * head_dim), Plain(2 * norm)]
    dense = hidden * hidden + (hidden if source.flag("classifier_bias") else 0)
    if architecture.endswith("ForSequenceClassification"):
        more += [Plain(dense + norm, dtype), _classifier(source)]
    elif architecture.endswith("ForTokenClassification"):
        more += [Plain(dense + norm), _classifier(source)]
    return _encoder(source, architecture, "model.encoder_layer.layers.", layer, more)


def _nomic(source: Source, architecture: str) -> Structure:
    """`models/bert_with_rope.py: NomicBertModel`: rotary positions, a gated MLP with swiglu."""
    if source.size("moe_every_n_layers", default=0, minimum=0):
        raise UnsupportedArchitectureError(
            f"the weights of {short(architecture)} with experts (moe_every_n_layers) are not known to this version.",
            "Plan it by hand: give parallelism and max_model_len.",
            "moe_every_n_layers",
        )
    hidden, wide = source.hidden, source.intermediate
    bias, gated = source.flag("qkv_proj_bias"), source.text.get("activation_function") == "swiglu"

    def layer(mixer: Mixer) -> list[Item]:
        width = mixer.heads * mixer.head_dim
        up = (
            Linear("mlp.gate_up_proj", hidden, (wide, wide), "column", ("gate_proj", "up_proj"), bias=bias)
            if gated
            else Linear("mlp.up_proj", hidden, (wide,), "column", bias=bias)
        )
        return [
            Linear("attn.qkv_proj", hidden, (width,) * 3, "qkv", (), mixer.heads, bias=bias),
            Linear("attn.out_proj", hidden, (hidden,), "row", bias=bias),
            up,
            Linear("mlp.down_proj", wide, (hidden,), "row", bias=bias),
            Plain(4 * hidden),
        ]

    rows = source.size("max_position_embeddings", "n_positions", default=2048)
    more = [*_embeddings(source, positions=False), Plain(rows * mixers(source.config)[0].head_dim)]
    return _encoder(source, architecture, "encoder.layers.", layer, more)


FAMILIES: dict[str, Family] = {
    "BertModel": _bert,
    **{f"Bert{task}": _bert for task in _CLASSIFIERS},
    "RobertaModel": _bert,
    **{f"Roberta{task}": _bert for task in _CLASSIFIERS},
    "XLMRobertaModel": _bert,
    **{f"XLMRoberta{task}": _bert for task in _CLASSIFIERS},
    "ModernBertModel": _modernbert,
    **{f"ModernBert{task}": _modernbert for task in _CLASSIFIERS},
    "NomicBertModel": _nomic,
}
