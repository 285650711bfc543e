"""Turns config.json into the tensors that vLLM creates for it: named groups of linear layers with their shapes.

Each family of models is described as vLLM builds it (vllm/model_executor/models/*.py), with vLLM's names, because
quantization is decided by name. Sizes are those of the whole model; weights.py splits them over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from .errors import ModelConfigError, UnsupportedArchitectureError, short
from .mixers import Mixer, architecture_of, generative_name, mixers, size_of
from .model import Model, text_config

_MAX_SIZE = 1 << 32
_FLASHINFER_HEADS = (64, 128, 256, 512)
_MODEL_DTYPE = ""
_FLOAT32 = "float32"
# float32 in eager mode, where FlashInfer's kernel turns Q and K; else the model's.
EAGER_FLOAT32 = "float32 if eager"


@dataclass(frozen=True)
class Linear:
    """One linear layer as vLLM fuses it."""

    name: str
    inputs: int
    # Output sizes of the fused parts, in order.
    outputs: tuple[int, ...]
    # "column", "row", "replicated", or "qkv": column with KV heads that are replicated when they are too few.
    split: str
    # Names in the checkpoint of the fused parts; empty when the layer is not fused.
    parts: tuple[str, ...] = ()
    kv_heads: int = 0
    bias: bool = False
    # False: vLLM never hands this layer to a quantization method.
    quantized: bool = True
    # A bfloat16 copy beside a quantized weight (MLA's absorbed kv_b_proj).
    absorbed: bool = False
    lora: bool = True


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer."""

    name: str
    count: int
    hidden: int
    intermediate: int
    gated: bool = True
    bias: bool = False
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Vocabulary:
    """An embedding or a language-model head, padded to 64 rows and split by rows."""

    name: str
    rows: int
    columns: int
    head: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Plain:
    """A tensor that no quantization touches. `split` tells whether tensor ranks share it."""

    elements: int
    dtype: str = _MODEL_DTYPE
    split: bool = False


Item = Linear | Experts | Vocabulary | Plain
Layer = tuple[Item, ...]


@dataclass(frozen=True)
class Tower:
    """An encoder of images or sound with its projector."""

    items: Layer = ()
    # Each layer's items, times `depth`.
    block: Layer = ()
    depth: int = 0
    heads: int = 0
    # Held whole by each tensor rank in any case.
    replicated: bool = False
    prefix: str = "visual."
    # What the names of its layers begin with.
    layers: str = "blocks."
    # Elements of the model's dtype that it keeps for each token of the largest batch.
    token_elements: int = 0
    # Left out when limit_mm_per_prompt is zero for all of these (models/interfaces.py: _mark_tower_model).
    modalities: tuple[str, ...] = ("image", "video")


@dataclass(frozen=True)
class Structure:
    """All tensors of a model, by place."""

    architecture: str
    # Prefix of the decoder layers' names: "model.layers.".
    prefix: str
    layers: tuple[Layer, ...]
    # Held by the first stage only, by the last one only, and by every stage.
    first: Layer = ()
    last: Layer = ()
    every: Layer = ()
    embedding: Vocabulary | None = None
    head: Vocabulary | None = None
    tied: bool = False
    # These classes make the table or the head on every stage, used there or not.
    embedding_everywhere: bool = False
    head_everywhere: bool = False
    # The version from which Transformers' modules serve the model: they have no tables of cosines and sines (`every`),
    # and the embedding and the head are on the stages that use them.
    own_until: tuple[int, int] | None = None
    towers: tuple[Tower, ...] = ()
    # The MTP layers inside the checkpoint, loaded only for speculation.
    mtp: Layer = ()
    mtp_layers: int = 0
    # Elements of the model's dtype that a buffer keeps for each token of the largest batch.
    token_elements: int = 0
    # The same on the last stage alone, from 0.33 on only with a drafter.
    last_token_elements: int = 0
    # Replacements that turn names in the checkpoint into vLLM's (WeightsMapper).
    renamed: tuple[tuple[str, str], ...] = ()


class Source:
    """config.json with checked access."""

    def __init__(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        self.config = config
        self.text = text
        self.hidden = self.size("hidden_size", "n_embd", "d_model", "dim")

    def size(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        return size_of(self.text, names, default, minimum)

    def has(self, name: str) -> bool:
        return self.text.get(name) is not None

    def flag(self, *names: str, default: bool = False) -> bool:
        for name in names:
            value = self.text.get(name)
            if value is None:
                continue
            if not isinstance(value, bool):
                raise ModelConfigError(f"config.json: {name} = {short(value)} is neither true nor false", key=name)
            return value
        return default

    def sub(self, name: str) -> Mapping[str, Any]:
        value = self.text.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ModelConfigError(f"config.json: {name} = {short(value)} is not an object", key=name)
        return value

    def integers(self, name: str) -> list[int]:
        value = self.text.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ModelConfigError(f"config.json: {name} = {short(value)} is not a list of integers", key=name)
        return value

    def number(self, source: Mapping[str, Any], name: str, default: float) -> float:
        value = source.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e9:
            raise ModelConfigError(f"config.json: {name} = {short(value)} is not a positive number", key=name)
        return float(value)

    def tied(self, default: bool) -> bool:
        for source in (self.text, self.config):
            value = source.get("tie_word_embeddings")
            if value is not None:
                if not isinstance(value, bool):
                    raise ModelConfigError(
                        f"config.json: tie_word_embeddings = {short(value)} is neither true nor false",
                        key="tie_word_embeddings",
                    )
                return value
        return default

    @property
    def intermediate(self) -> int:
        # GPT-2's configs leave out four times the hidden size.
        default = 4 * self.hidden if self.has("n_embd") else None
        return self.size("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=default)

    @property
    def vocabulary(self) -> int:
        return self.size("vocab_size", "padded_vocab_size")


@dataclass(frozen=True)
class Style:
    """How one family spells a decoder layer."""

    attention: str = "self_attn"
    output: str = "o_proj"
    qkv_parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_name: str = "qkv_proj"
    # A bias that is always there, or the key that decides and its default.
    qkv_bias: bool | tuple[str, bool] = False
    output_bias: bool | tuple[str, bool] = False
    # "", "head" (one vector of head size for Q and K each), "full" (of all heads), "split" (of the rank's heads).
    qk_norm: str = ""
    # Vectors of the hidden size in each layer, and whether each has a bias too.
    norms: int = 2
    norm_bias: bool = False
    final_norm: bool = True
    mlp: str = "mlp"
    gated: bool = True
    up: str = "up_proj"
    down: str = "down_proj"
    mlp_bias: bool | tuple[str, bool] = False
    tied: bool = False
    rotary: bool = True
    rotary_dtype: str = _MODEL_DTYPE
    # Learned positions: the key of their count and what vLLM adds to it.
    positions: tuple[str, int] | None = None
    head_bias: bool = False
    sinks: bool = False
    # Doubled Q outputs (Qwen3-Next's output gate).
    gate: bool = False
    moe: Moe | None = None
    root: str = "model."
    layers: str = "layers."


@dataclass(frozen=True)
class Moe:
    """How one family spells its experts."""

    name: str = "mlp"
    experts: tuple[str, ...] = ("num_experts",)
    intermediate: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    router_dtype: str = _MODEL_DTYPE
    router_bias: bool = False
    # float32 vector that corrects the choice of experts; a key that switches it, or always.
    correction: bool | tuple[str, str] = False
    shared_name: str = ""
    # Key of the shared experts' size, or of their number (then times the experts' size).
    shared_size: tuple[str, ...] = ()
    shared_count: tuple[str, ...] = ()
    shared_gate: bool = False
    bias: bool = False
    gated: bool = True


def build(model: Model) -> Structure:
    """Describe `model`. Raises UnsupportedArchitectureError where the architecture is not known."""
    config = model.config
    text = text_config(config)
    architecture = architecture_of(config)
    if not architecture:
        architecture = _architecture_by_type(config, text)
    source = Source(config, text)
    families = _families()
    generative = architecture if architecture in families else generative_name(architecture)
    found = families.get(generative)
    if found is None:
        raise UnsupportedArchitectureError(
            f"the weights of {architecture:.80} are not known to this version.",
            "Plan it by hand: give parallelism and max_model_len.",
            "architectures",
        )
    structure = found(source, generative)
    structure = replace(
        structure,
        embedding_everywhere=structure.embedding_everywhere or generative in _EMBEDDING_EVERYWHERE,
        head_everywhere=structure.head_everywhere or generative in _HEAD_EVERYWHERE,
    )
    return structure if generative == architecture else pooled(source, structure, architecture)


@lru_cache(maxsize=1)
def _families() -> Mapping[str, Family]:
    """The families of this file and of those that build on it."""
    from . import families_dense, families_encoder, families_latent, families_vision  # noqa: PLC0415 - they use this

    parts = (families_dense, families_encoder, families_latent, families_vision)
    return {**_FAMILIES, **{name: family for part in parts for name, family in part.FAMILIES.items()}}


def _architecture_by_type(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    model_type = config.get("model_type") or text.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedArchitectureError(
            "config.json names neither architectures nor model_type, so its weights can't be told.",
            "Use the checkpoint's own config.json.",
            "architectures",
        )
    architecture = _BY_TYPE.get(model_type)
    if architecture is None:
        raise UnsupportedArchitectureError(
            f"config.json has no architectures, and model_type {short(model_type)} does not tell one.",
            "Use the checkpoint's own config.json.",
            "architectures",
        )
    return architecture


# --- Parts of a decoder -------------------------------------------------------------------------------------------


def _switch(source: Source, value: bool | tuple[str, bool]) -> bool:
    return value if isinstance(value, bool) else source.flag(value[0], default=value[1])


def _attention(source: Source, style: Style, mixer: Mixer) -> list[Item]:
    """Grouped-query attention. `vllm/model_executor/layers/linear.py: QKVParallelLinear`."""
    hidden = source.hidden
    queries = mixer.heads * mixer.head_dim * (2 if style.gate else 1)
    keys = mixer.kv_heads * mixer.head_dim
    values = mixer.kv_heads * mixer.v_head_dim
    name = f"{style.attention}.{style.qkv_name}"
    items: list[Item] = [
        Linear(
            name,
            hidden,
            (queries, keys, values),
            "qkv",
            style.qkv_parts,
            mixer.kv_heads,
            _switch(source, style.qkv_bias),
        ),
        Linear(
            f"{style.attention}.{style.output}",
            mixer.heads * mixer.v_head_dim,
            (hidden,),
            "row",
            bias=_switch(source, style.output_bias),
        ),
    ]
    if style.qk_norm == "head":
        items.append(Plain(2 * mixer.head_dim))
    elif style.qk_norm in ("full", "split"):
        items.append(Plain(mixer.heads * mixer.head_dim + keys, split=style.qk_norm == "split"))
    if style.sinks:
        items.append(Plain(mixer.heads, split=True))
    return items


def _mlp(
    source: Source, style: Style, name: str, intermediate: int, *, gated: bool | None = None, hidden: int = 0
) -> list[Item]:
    hidden = hidden or source.hidden
    bias = _switch(source, style.mlp_bias)
    gated = style.gated if gated is None else gated
    if gated:
        up = Linear(
            f"{name}.gate_up_proj",
            hidden,
            (intermediate, intermediate),
            "column",
            ("gate_proj", "up_proj"),
            bias=bias,
        )
    else:
        up = Linear(f"{name}.{style.up}", hidden, (intermediate,), "column", bias=bias)
    return [up, Linear(f"{name}.{style.down}", intermediate, (hidden,), "row", bias=bias)]


def _moe(source: Source, style: Style, moe: Moe) -> list[Item]:
    experts = source.size(*moe.experts)
    intermediate = source.size(*moe.intermediate)
    items: list[Item] = [Plain(experts * source.hidden, moe.router_dtype)]
    if moe.router_bias:
        items.append(Plain(experts))
    correction = moe.correction
    if correction is True or (isinstance(correction, tuple) and source.text.get(correction[0]) == correction[1]):
        items.append(Plain(experts, _FLOAT32))
    items.append(Experts(f"{moe.name}.experts", experts, source.hidden, intermediate, gated=moe.gated, bias=moe.bias))
    shared = source.size(*moe.shared_size, default=0, minimum=0) if moe.shared_size else 0
    if moe.shared_count and not shared:
        shared = intermediate * source.size(*moe.shared_count, default=0, minimum=0)
    if shared:
        items += _mlp(source, style, f"{moe.name}.{moe.shared_name}", shared, gated=moe.gated)
        if moe.shared_gate:
            items.append(Plain(source.hidden))
    return items


def _norms(source: Source, style: Style) -> Plain:
    return Plain(style.norms * source.hidden * (2 if style.norm_bias else 1))


def _rope_parameters(source: Source, kind: str = "") -> Mapping[str, Any]:
    found = source.text.get("rope_parameters")
    if not isinstance(found, Mapping):
        found = source.text.get("rope_scaling")
    if not isinstance(found, Mapping):
        return {}
    if kind and isinstance(found.get(kind), Mapping):
        found = found[kind]
    return found


def _rotary(source: Source, head_dim: int, dtype: str = _MODEL_DTYPE, kind: str = "") -> Plain:
    """The table of cosines and sines. `vllm/model_executor/layers/rotary_embedding`: rows as each type makes them."""
    rope = _rope_parameters(source, kind)
    rows = source.size("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=8192)
    name = str(rope.get("rope_type", rope.get("type", "default")))
    factor = source.number(rope, "factor", 1.0)
    if name in ("yarn", "deepseek_yarn", "deepseek_llama_scaling"):
        rows = int(size_of(rope, ("original_max_position_embeddings",), rows) * factor)
    elif name in ("linear", "dynamic"):
        rows = int(rows * factor)
    if "mrope_section" in rope:
        # MRotaryEmbedding keeps four times the positions for the three axes of a picture.
        rows *= 4
    partial = source.number(rope, "partial_rotary_factor", 0.0) or source.number(
        source.text, "partial_rotary_factor", source.number(source.text, "rotary_pct", 1.0)
    )
    width = source.size("rotary_dim", default=0, minimum=0) or int(head_dim * min(partial, 1.0))
    if name == "proportional":
        width = head_dim
    # Two factors of rope_type longrope: one table each for short and long texts.
    if name in ("longrope", "su"):
        rows += size_of(rope, ("original_max_position_embeddings",), 0, 0) or source.size(
            "original_max_position_embeddings", default=0, minimum=0
        )
    return Plain(rows * width, dtype)


def _ends(source: Source, style: Style, structure: Structure) -> Structure:
    """Adds the embedding, the last norm and the head."""
    vocabulary = source.vocabulary
    embedding = Vocabulary(f"{style.root}embed_tokens", vocabulary, source.hidden)
    first: list[Item] = []
    if style.positions is not None:
        key, more = style.positions
        first.append(Plain((source.size(key) + more) * source.hidden))
    last: list[Item] = []
    if style.final_norm:
        last.append(Plain(source.hidden * (2 if style.norm_bias else 1)))
    return replace(
        structure,
        embedding=embedding,
        head=Vocabulary("lm_head", vocabulary, source.hidden, head=True, bias=style.head_bias),
        tied=source.tied(style.tied),
        first=(*structure.first, *first),
        last=(*structure.last, *last),
    )


LayerBuilder = Callable[[int, Mixer], tuple[Any, Callable[[], list[Item]]]]


def _layers(source: Source, make: LayerBuilder) -> tuple[Layer, ...]:
    """One tuple a layer; layers of the same kind are built once and are the same object."""
    built: dict[Any, Layer] = {}
    result = []
    for index, mixer in enumerate(mixers(source.config)):
        kind, builder = make(index, mixer)
        key = (id(mixer), kind)
        if key not in built:
            built[key] = tuple(builder())
        result.append(built[key])
    return tuple(result)


def _is_sparse(source: Source, index: int) -> bool:
    """Whether this layer has experts, as the keys of most families say."""
    if index < source.size("first_k_dense_replace", default=0, minimum=0):
        return False
    if index in source.integers("mlp_only_layers"):
        return False
    frequency = source.text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return index < len(frequency) and bool(frequency[index])
    step = source.size("decoder_sparse_step", "moe_layer_freq", default=1, minimum=0) or 1
    if "decoder_sparse_step" in source.text:
        return (index + 1) % step == 0
    return index % step == 0


def _decoder(source: Source, architecture: str, style: Style) -> Structure:
    """A decoder whose layers are attention and one MLP or a set of experts."""
    moe = style.moe

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = moe is not None and _is_sparse(source, index)

        def items() -> list[Item]:
            feed = (
                _moe(source, style, moe)
                if sparse and moe is not None
                else _mlp(source, style, style.mlp, source.intermediate)
            )
            return [*_attention(source, style, mixer), *feed, _norms(source, style)]

        return sparse, items

    layers = _layers(source, make)
    every: list[Item] = []
    if style.rotary:
        mixer = mixers(source.config)[0]
        every.append(_rotary(source, mixer.head_dim, style.rotary_dtype))
    structure = Structure(architecture, f"{style.root}{style.layers}", layers, every=tuple(every))
    return _ends(source, style, structure)


# --- Pooling models -----------------------------------------------------------------------------------------------


def labels(source: Source) -> int:
    """Number of classes: transformers counts id2label and takes two where config.json names none."""
    names = source.text.get("id2label")
    return len(names) if isinstance(names, Mapping) and names else source.size("num_labels", default=2)


def head_dtype(source: Source) -> str:
    """Of a pooling model's last layers (vllm/config/model.py: head_dtype)."""
    return _MODEL_DTYPE if source.text.get("head_dtype") == "model" else _FLOAT32


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


# --- Families -----------------------------------------------------------------------------------------------------

Family = Callable[[Source, str], Structure]


def _styled(style: Style) -> Family:
    return lambda source, architecture: _decoder(source, architecture, style)


_LLAMA = Style(qkv_bias=("attention_bias", False), output_bias=("attention_bias", False), mlp_bias=("mlp_bias", False))
_QWEN2 = Style(qkv_bias=True)
_QWEN3 = Style(qkv_bias=("attention_bias", False), output_bias=("attention_bias", False), qk_norm="head")
_GEMMA = Style(tied=True)
_GPT2 = Style(
    attention="attn",
    output="c_proj",
    qkv_name="c_attn",
    qkv_parts=(),
    qkv_bias=True,
    output_bias=True,
    norm_bias=True,
    gated=False,
    up="c_fc",
    down="c_proj",
    mlp_bias=True,
    tied=True,
    rotary=False,
    positions=("n_positions", 0),
    root="transformer.",
    layers="h.",
)
_QWEN3_MOE = replace(_QWEN3, moe=Moe(shared_size=(), experts=("num_experts",)))


def _phi3(source: Source, architecture: str) -> Structure:
    return _decoder(source, architecture, replace(_LLAMA, qkv_parts=("qkv_proj",)))


def _cohere(source: Source, architecture: str) -> Structure:
    norm = "split" if source.flag("use_qk_norm") else ""
    return _decoder(source, architecture, replace(_LLAMA, norms=1, tied=True, qk_norm=norm))


def _gemma2(source: Source, architecture: str) -> Structure:
    return _decoder(source, architecture, replace(_GEMMA, norms=4))


def _gemma3(source: Source, architecture: str) -> Structure:
    """Two rotary tables: one for windowed layers, one for the others (models/gemma3.py)."""
    structure = _decoder(source, architecture, replace(_GEMMA, norms=4, qk_norm="head", rotary=False))
    head_dim = mixers(source.config)[0].head_dim
    # A scaling without a kind of layer is the global layers' own.
    plain = {key: value for key, value in source.text.items() if key != "rope_scaling"}
    local = Source(source.config, plain)
    tables = (_rotary(source, head_dim, kind="full_attention"), _rotary(local, head_dim, kind="sliding_attention"))
    return replace(structure, every=tables)


def _gpt_oss(source: Source, architecture: str) -> Structure:
    """`vllm/model_executor/models/gpt_oss.py`: biases everywhere, attention sinks, a float32 rotary table."""
    style = Style(
        attention="attn",
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        rotary_dtype=_FLOAT32,
        moe=Moe(experts=("num_local_experts",), intermediate=("intermediate_size",), router_bias=True, bias=True),
    )
    return _decoder(source, architecture, style)


def _minimax_m2(source: Source, architecture: str) -> Structure:
    style = Style(
        qk_norm="split",
        moe=Moe(
            name="block_sparse_moe",
            experts=("num_local_experts",),
            intermediate=("intermediate_size",),
            router_dtype=_FLOAT32,
            correction=True,
        ),
    )
    return _decoder(source, architecture, style)


def _mla(source: Source, architecture: str) -> Structure:
    """Latent attention of DeepSeek V2 to V3.2, GLM-5 and Kimi-K2 (models/deepseek_v2.py), experts beside it."""
    heads = source.size("num_attention_heads")
    rank, rope = source.size("kv_lora_rank"), source.size("qk_rope_head_dim")
    nope, values = source.size("qk_nope_head_dim"), source.size("v_head_dim")
    query_rank = source.size("q_lora_rank", default=0, minimum=0)
    queries = heads * (nope + rope)
    hidden = source.hidden
    style = Style(
        moe=Moe(
            experts=("n_routed_experts", "num_experts", "num_local_experts"),
            intermediate=("moe_intermediate_size",),
            correction=("topk_method", "noaux_tc"),
            shared_name="shared_experts",
            shared_count=("n_shared_experts",),
        )
    )
    moe = style.moe
    correction = source.text.get("topk_method", "noaux_tc" if source.has("index_topk") else None) == "noaux_tc"
    if moe is not None:
        moe = replace(moe, correction=correction)

    def attention(mixer: Mixer) -> list[Item]:
        items: list[Item] = []
        if query_rank:
            items += [
                Linear(
                    "self_attn.fused_qkv_a_proj",
                    hidden,
                    (query_rank, rank + rope),
                    "replicated",
                    ("q_a_proj", "kv_a_proj_with_mqa"),
                ),
                Plain(query_rank),
                Linear("self_attn.q_b_proj", query_rank, (queries,), "column"),
            ]
        else:
            items += [
                Linear("self_attn.q_proj", hidden, (queries,), "column"),
                Linear("self_attn.kv_a_proj_with_mqa", hidden, (rank + rope,), "replicated"),
            ]
        items += [
            Plain(rank),
            Linear("self_attn.kv_b_proj", rank, (heads * (nope + values),), "column", absorbed=True),
            Linear("self_attn.o_proj", heads * values, (hidden,), "row"),
        ]
        if mixer.index_dim and not mixer.index_shared:
            index_heads = source.size("index_n_heads")
            items += [
                Linear("self_attn.indexer.wq_b", query_rank or hidden, (mixer.index_dim * index_heads,), "replicated"),
                Plain(hidden * (mixer.index_dim + index_heads)),
                Plain(2 * mixer.index_dim, _FLOAT32),
            ]
        return items

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = source.has("n_routed_experts") and _is_sparse(source, index)

        def items() -> list[Item]:
            feed = (
                _moe(source, style, moe)
                if sparse and moe is not None
                else _mlp(source, style, "mlp", source.intermediate)
            )
            return [*attention(mixer), *feed, _norms(source, style)]

        return sparse, items

    layers = _layers(source, make)
    # layers/rotary_embedding/deepseek_scaling_rope.py: any scaling makes it DeepSeek's own kind.
    kind = _rope_parameters(source)
    scaled = str(kind.get("rope_type", kind.get("type", "default"))) != "default"
    table = _rotary(source, rope, EAGER_FLOAT32 if scaled and rope in _FLASHINFER_HEADS else _MODEL_DTYPE)
    structure = Structure(architecture, "model.layers.", layers, every=(table,))
    count = source.size("num_nextn_predict_layers", default=0, minimum=0)
    if count:
        own = [*attention(replace(mixers(source.config)[-1], index_shared=False)), _norms(source, style)]
        feed = _moe(source, style, moe) if source.has("n_routed_experts") and moe is not None else []
        extra: list[Item] = [Plain(2 * hidden * hidden + 3 * hidden)]
        structure = replace(structure, mtp=(*own, *feed, *extra), mtp_layers=count)
    return _ends(source, style, structure)


def _mamba2_items(source: Source, mixer: Mixer, name: str, bias: bool) -> list[Item]:
    """`layers/mamba/mamba_mixer2.py`. Groups that are fewer than the ranks are held by each."""
    groups = mixer.state_groups * mixer.state_dim
    count = mixer.state_groups
    convolution = mixer.conv_kernel + 1
    return [
        Linear(f"{name}.in_proj", source.hidden, (mixer.inner, mixer.inner, mixer.state_heads), "column", bias=bias),
        Linear(f"{name}.in_proj", source.hidden, (0, groups, groups), "qkv", kv_heads=count, bias=bias),
        Plain(mixer.inner * convolution, split=True),
        Linear(f"{name}.conv1d", convolution, (0, groups, groups), "qkv", kv_heads=count, quantized=False, lora=False),
        Plain(mixer.state_heads, _FLOAT32, split=True),
        Plain(2 * mixer.state_heads, split=True),
        Plain(mixer.inner, split=True),
        Linear(f"{name}.out_proj", mixer.inner, (source.hidden,), "row", bias=bias),
    ]


def _nemotron_kinds(source: Source) -> list[str]:
    pattern = source.text.get("hybrid_override_pattern") or source.text.get("layers_block_type")
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if isinstance(pattern, str | list):
        return [names.get(kind, kind) for kind in pattern if isinstance(kind, str) and kind != "|"]
    raise ModelConfigError("config.json has no hybrid_override_pattern", key="hybrid_override_pattern")


def _nemotron_h(source: Source, architecture: str) -> Structure:
    """One of Mamba-2, attention, MLP or experts a layer (models/nemotron_h.py)."""
    kinds = _nemotron_kinds(source)
    style = Style(
        attention="mixer",
        mlp="mixer",
        gated=False,
        norms=1,
        qkv_bias=("attention_bias", False),
        output_bias=("attention_bias", False),
        mlp_bias=("mlp_bias", False),
        rotary=False,
    )

    def experts() -> list[Item]:
        count = source.size("n_routed_experts")
        latent = source.size("moe_latent_size", default=0, minimum=0)
        wide = latent or source.hidden
        items: list[Item] = [
            Plain(count * source.hidden),
            Plain(count, _FLOAT32),
            Experts(
                "mixer.experts",
                count,
                wide,
                source.size("moe_intermediate_size"),
                gated=False,
                parts=("up_proj", "down_proj"),
            ),
        ]
        shared = source.size("n_shared_experts", default=0, minimum=0)
        if shared:
            size = shared * source.size("moe_shared_expert_intermediate_size")
            items += _mlp(source, style, "mixer.shared_experts", size)
        if latent:
            items.append(Linear("mixer.fc1_latent_proj", source.hidden, (latent,), "replicated"))
            items.append(Linear("mixer.fc2_latent_proj", latent, (source.hidden,), "replicated"))
        return items

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        kind = kinds[index] if index < len(kinds) else ""

        def items() -> list[Item]:
            if mixer.kind == "mamba2":
                own = _mamba2_items(source, mixer, "mixer", source.flag("mamba_proj_bias", "use_bias"))
            elif mixer.is_attention:
                own = _attention(source, style, mixer)
            elif kind == "moe":
                own = experts()
            else:
                own = _mlp(source, style, "mixer", source.intermediate)
            return [*own, _norms(source, style)]

        return kind, items

    layers = _layers(source, make)
    structure = Structure(architecture, "model.layers.", layers, renamed=(("backbone.", "model."),))
    return _ends(source, style, structure)


def _gdn(source: Source, architecture: str) -> Structure:
    """Gated delta nets with attention in between (models/qwen3_next.py, qwen3_5.py), alone or with experts."""
    older = "Next" in architecture
    style = Style(
        qkv_bias=("attention_bias", False), qk_norm="head", gate=source.flag("attn_output_gate", default=True)
    )
    moe = Moe(
        intermediate=("moe_intermediate_size",),
        shared_name="shared_expert",
        shared_size=("shared_expert_intermediate_size",),
        shared_gate=True,
    )
    hidden = source.hidden

    def linear_attention(mixer: Mixer) -> list[Item]:
        keys = mixer.state_groups * mixer.state_dim
        values = mixer.inner
        name = "linear_attn"
        mixed = () if older else ("in_proj_qkv", "in_proj_z")
        small = () if older else ("in_proj_b", "in_proj_a")
        return [
            Linear(f"{name}.in_proj_qkvz", hidden, (keys, keys, values, values), "column", mixed),
            Linear(f"{name}.in_proj_ba", hidden, (mixer.state_heads,) * 2, "column", small),
            Plain((2 * keys + values) * mixer.conv_kernel, split=True),
            Plain(mixer.state_heads, _FLOAT32, split=True),
            Plain(mixer.state_heads, split=True),
            Plain(mixer.state_head_dim),
            Linear(f"{name}.out_proj", values, (hidden,), "row"),
        ]

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = source.has("num_experts") and _is_sparse(source, index)

        def items() -> list[Item]:
            own = linear_attention(mixer) if mixer.kind == "gdn" else _attention(source, style, mixer)
            feed = _moe(source, style, moe) if sparse else _mlp(source, style, "mlp", source.intermediate)
            return [*own, *feed, _norms(source, style)]

        return sparse, items

    layers = _layers(source, make)
    full = next((mixer for mixer in mixers(source.config) if mixer.kind == "full"), None)
    every = (_rotary(source, full.head_dim),) if full is not None else ()
    structure = Structure(architecture, "model.layers.", layers, every=every)
    count = source.size("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0, minimum=0)
    if count and full is not None:
        feed = (
            _moe(source, style, moe) if source.has("num_experts") else _mlp(source, style, "mlp", source.intermediate)
        )
        own = [*_attention(source, style, full), *feed, _norms(source, style)]
        extra: list[Item] = [Plain(2 * hidden * hidden + 3 * hidden)]
        structure = replace(structure, mtp=(*own, *extra), mtp_layers=count)
    return _ends(source, style, structure)


def _glm4_moe(source: Source, architecture: str) -> Structure:
    style = Style(
        qkv_bias=("attention_bias", False),
        qk_norm="head" if source.flag("use_qk_norm") else "",
        moe=Moe(
            experts=("n_routed_experts",),
            intermediate=("moe_intermediate_size",),
            router_dtype=_FLOAT32,
            correction=True,
            shared_name="shared_experts",
            shared_count=("n_shared_experts",),
        ),
    )
    if not source.has("partial_rotary_factor") and not _rope_parameters(source):
        # transformers' Glm4MoeConfig turns half of each head.
        source = Source(source.config, {**source.text, "partial_rotary_factor": 0.5})
    return _decoder(source, architecture, style)


def _mimo_v2(source: Source, architecture: str) -> Structure:
    """Other heads in windowed layers, sinks, K and V of different size (models/mimo_v2.py)."""
    style = Style(
        qkv_bias=("attention_bias", False),
        rotary=False,
        moe=Moe(
            experts=("n_routed_experts",),
            intermediate=("moe_intermediate_size",),
            router_dtype=_FLOAT32,
            correction=True,
        ),
    )
    structure = _decoder(source, architecture, style)
    sink_keys = {"sliding": "add_swa_attention_sink_bias", "full": "add_full_attention_sink_bias"}
    kinds = {mixer.kind: mixer for mixer in mixers(source.config)}
    every = tuple(_rotary(source, mixer.head_dim) for mixer in kinds.values())
    sinks = sum(
        mixer.heads for mixer in mixers(source.config) if source.flag(sink_keys.get(mixer.kind, ""), default=False)
    )
    return replace(structure, every=(*every, Plain(sinks, split=True)))


def _llama4(source: Source, architecture: str) -> Structure:
    """Experts in every n-th layer, the shared one as wide as a routed one (models/llama4.py)."""
    moe = Moe(
        name="feed_forward",
        experts=("num_local_experts",),
        intermediate=("intermediate_size",),
        shared_name="shared_expert",
        shared_size=("intermediate_size",),
    )
    style = Style(mlp="feed_forward", moe=moe)
    step = source.size("interleave_moe_layer_step", default=1, minimum=0)
    listed = source.integers("moe_layers")

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = index in listed if listed else step > 0 and (index + 1) % step == 0

        def items() -> list[Item]:
            feed = (
                _moe(source, style, moe)
                if sparse
                else _mlp(source, style, "feed_forward", source.size("intermediate_size_mlp"))
            )
            return [*_attention(source, style, mixer), *feed, _norms(source, style)]

        return sparse, items

    layers = _layers(source, make)
    every = (_rotary(source, mixers(source.config)[0].head_dim),)
    return _ends(source, style, Structure(architecture, "model.layers.", layers, every=every))


def _qwen_tower(source: Source, *, deepstack: bool) -> Tower:
    """The vision tower of Qwen3-VL and Qwen3.5 (models/qwen3_vl.py)."""
    vision = source.config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelConfigError("config.json has no vision_config", key="vision_config")
    hidden = size_of(vision, ("hidden_size",))
    wide = size_of(vision, ("intermediate_size",))
    patch = size_of(vision, ("patch_size",), 16)
    merged = hidden * size_of(vision, ("spatial_merge_size",), 2) ** 2
    out = size_of(vision, ("out_hidden_size",), source.hidden)
    time = size_of(vision, ("temporal_patch_size",), 2)
    channels = size_of(vision, ("in_channels",), 3)
    heads = size_of(vision, ("num_heads",), 16)
    stacks = vision.get("deepstack_visual_indexes") if deepstack else None
    count = len(stacks) if isinstance(stacks, list) else 0
    items: list[Item] = [
        Plain(hidden * (channels * time * patch * patch + 1)),
        Plain(size_of(vision, ("num_position_embeddings",), 2304) * hidden),
        Plain(8192 * (hidden // heads // 2)),
    ]
    for index in range(count + 1):
        name = "merger" if index == 0 else f"deepstack_merger_list.{index - 1}"
        items += [
            Plain(2 * (hidden if index == 0 else merged)),
            Linear(f"{name}.linear_fc1", merged, (merged,), "column", bias=True, lora=False),
            Linear(f"{name}.linear_fc2", merged, (out,), "row", bias=True, lora=False),
        ]
    block: Layer = (
        Plain(4 * hidden),
        Linear("attn.qkv", hidden, (hidden, hidden, hidden), "column", bias=True, lora=False),
        Linear("attn.proj", hidden, (hidden,), "row", bias=True, lora=False),
        Linear("mlp.linear_fc1", hidden, (wide,), "column", bias=True, lora=False),
        Linear("mlp.linear_fc2", wide, (hidden,), "row", bias=True, lora=False),
    )
    # Features of lower layers wait in a buffer for the language model to take them.
    buffer = min(count, 64) * source.hidden
    return Tower(tuple(items), block, size_of(vision, ("depth",), 27), heads, token_elements=buffer)


_RENAMED = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head", "language_model.lm_head"),
    ("language_model.", "language_model."),
    ("model.", "language_model.model."),
)


def _wrapped(inner: Family, tower: Callable[[Source], Tower]) -> Family:
    """A language model under `language_model.` with a tower beside it."""

    def build_both(source: Source, architecture: str) -> Structure:
        structure = inner(source, architecture)
        head = structure.head
        return replace(
            structure,
            prefix=f"language_model.{structure.prefix}",
            head=replace(head, name=f"language_model.{head.name}") if head is not None else None,
            towers=(tower(source),),
            renamed=_RENAMED,
        )

    return build_both


def _llama4_tower(source: Source) -> Tower:
    """Llama 4's tower (models/mllama4.py)."""
    vision = source.config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    hidden = size_of(vision, ("hidden_size",), 768)
    wide = size_of(vision, ("intermediate_size",), 5632)
    patch = size_of(vision, ("patch_size",), 14)
    image = size_of(vision, ("image_size",), 448)
    patches = (image // patch) ** 2 + 1
    first, out = size_of(vision, ("projector_input_dim",), 4096), size_of(vision, ("vision_output_dim",), 7680)
    heads = size_of(vision, ("num_attention_heads",), 16)
    items: tuple[Item, ...] = (
        Plain(patches * hidden + 5 * hidden),
        Linear("patch_embedding.linear", 3 * patch * patch, (hidden,), "column", quantized=False, lora=False),
        Plain(patches * (hidden // heads // 2) * 2, _FLOAT32),
        Linear("adapter.fc1", wide, (first,), "column", quantized=False, lora=False),
        Linear("adapter.fc2", first, (first,), "row", quantized=False, lora=False),
        Linear("projector.linear_1", out, (source.hidden,), "column", quantized=False, lora=False),
    )
    block: Layer = (
        Plain(4 * hidden),
        Linear("qkv_proj", hidden, (hidden, hidden, hidden), "column", bias=True, quantized=False, lora=False),
        Linear("o_proj", hidden, (hidden,), "row", bias=True, quantized=False, lora=False),
        Linear("fc1", hidden, (wide,), "column", bias=True, quantized=False, lora=False),
        Linear("fc2", wide, (hidden,), "row", bias=True, quantized=False, lora=False),
    )
    return Tower(items, block, size_of(vision, ("num_hidden_layers",), 34), heads, prefix="vision_model.")


_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "LlamaForCausalLM",
            "LLaMAForCausalLM",
            "MistralForCausalLM",
            "InternLM2ForCausalLM",
            "InternLM3ForCausalLM",
            "InternLMForCausalLM",
            "AquilaForCausalLM",
            "XverseForCausalLM",
            "SolarForCausalLM",
            "CwmForCausalLM",
            "GraniteForCausalLM",
            "ExaoneForCausalLM",
            "TeleChatForCausalLM",
        ),
        _styled(_LLAMA),
    ),
    "Qwen2ForCausalLM": _styled(_QWEN2),
    "MiMoForCausalLM": _styled(_QWEN2),
    "Qwen3ForCausalLM": _styled(_QWEN3),
    "Qwen3MoeForCausalLM": _styled(_QWEN3_MOE),
    "Qwen2MoeForCausalLM": _styled(
        replace(
            _QWEN2,
            moe=Moe(shared_name="shared_expert", shared_size=("shared_expert_intermediate_size",), shared_gate=True),
        )
    ),
    "GemmaForCausalLM": _styled(_GEMMA),
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "CohereForCausalLM": _cohere,
    "Cohere2ForCausalLM": _cohere,
    "GPT2LMHeadModel": _styled(_GPT2),
    "GptOssForCausalLM": _gpt_oss,
    "MixtralForCausalLM": _styled(
        replace(
            _LLAMA,
            moe=Moe(name="block_sparse_moe", experts=("num_local_experts",), intermediate=("intermediate_size",)),
        )
    ),
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "DeepseekV2ForCausalLM": _mla,
    "DeepseekV3ForCausalLM": _mla,
    "DeepseekV32ForCausalLM": _mla,
    "GlmMoeDsaForCausalLM": _mla,
    "MistralLarge3ForCausalLM": _mla,
    "NemotronHForCausalLM": _nemotron_h,
    "Qwen3NextForCausalLM": _gdn,
    "Qwen3_5ForCausalLM": _gdn,
    "Qwen3_5MoeForCausalLM": _gdn,
    "Qwen3_5ForConditionalGeneration": _wrapped(_gdn, lambda source: _qwen_tower(source, deepstack=False)),
    "Qwen3_5MoeForConditionalGeneration": _wrapped(_gdn, lambda source: _qwen_tower(source, deepstack=False)),
    "Qwen3VLForConditionalGeneration": _wrapped(_styled(_QWEN3), lambda source: _qwen_tower(source, deepstack=True)),
    "Qwen3VLMoeForConditionalGeneration": _wrapped(
        _styled(_QWEN3_MOE), lambda source: _qwen_tower(source, deepstack=True)
    ),
    "Glm4MoeForCausalLM": _glm4_moe,
    "MiMoV2FlashForCausalLM": _mimo_v2,
    "Llama4ForConditionalGeneration": _wrapped(_llama4, _llama4_tower),
    "Llama4ForCausalLM": _llama4,
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
_BY_TYPE: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}
