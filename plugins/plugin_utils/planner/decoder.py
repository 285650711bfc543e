"""The parts of a decoder: attention, MLP, experts, rotary tables, embedding and head, as most families have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import ModelConfigError
from .mixers import Mixer, size_of
from .source import Source
from .tensors import FLOAT32, MODEL_DTYPE, Experts, Item, Layer, Linear, Plain, Structure, Vocabulary, Whole

Family = Callable[[Source, str], Structure]
LayerBuilder = Callable[[int, Mixer], tuple[Any, Callable[[], list[Item]]]]


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
    rotary_dtype: str = MODEL_DTYPE
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
    router_dtype: str = MODEL_DTYPE
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
    shared_whole: Whole | None = None


def switch(source: Source, value: bool | tuple[str, bool]) -> bool:
    return value if isinstance(value, bool) else source.flag(value[0], default=value[1])


def attention_items(source: Source, style: Style, mixer: Mixer) -> list[Item]:
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
            switch(source, style.qkv_bias),
        ),
        Linear(
            f"{style.attention}.{style.output}",
            mixer.heads * mixer.v_head_dim,
            (hidden,),
            "row",
            bias=switch(source, style.output_bias),
        ),
    ]
    if style.qk_norm == "head":
        items.append(Plain(2 * mixer.head_dim))
    elif style.qk_norm in ("full", "split"):
        items.append(Plain(mixer.heads * mixer.head_dim + keys, split=style.qk_norm == "split"))
    if style.sinks:
        items.append(Plain(mixer.heads, split=True))
    return items


def mlp_items(
    source: Source,
    style: Style,
    name: str,
    intermediate: int,
    *,
    gated: bool | None = None,
    whole: Whole | None = None,
) -> list[Item]:
    hidden = source.hidden
    bias = switch(source, style.mlp_bias)
    gated = style.gated if gated is None else gated
    if gated:
        up = Linear(
            f"{name}.gate_up_proj",
            hidden,
            (intermediate, intermediate),
            "column",
            ("gate_proj", "up_proj"),
            bias=bias,
            whole=whole,
        )
    else:
        up = Linear(f"{name}.{style.up}", hidden, (intermediate,), "column", bias=bias, whole=whole)
    return [up, Linear(f"{name}.{style.down}", intermediate, (hidden,), "row", bias=bias, whole=whole)]


def moe_items(source: Source, style: Style, moe: Moe) -> list[Item]:
    experts = source.size(*moe.experts)
    intermediate = source.size(*moe.intermediate)
    items: list[Item] = [Plain(experts * source.hidden, moe.router_dtype)]
    if moe.router_bias:
        items.append(Plain(experts))
    correction = moe.correction
    if correction is True or (isinstance(correction, tuple) and source.text.get(correction[0]) == correction[1]):
        items.append(Plain(experts, FLOAT32))
    items.append(Experts(f"{moe.name}.experts", experts, source.hidden, intermediate, gated=moe.gated, bias=moe.bias))
    shared = source.size(*moe.shared_size, default=0, minimum=0) if moe.shared_size else 0
    if moe.shared_count and not shared:
        shared = intermediate * source.size(*moe.shared_count, default=0, minimum=0)
    if shared:
        name = f"{moe.name}.{moe.shared_name}"
        items += mlp_items(source, style, name, shared, gated=moe.gated, whole=moe.shared_whole)
        if moe.shared_gate:
            items.append(Plain(source.hidden))
    return items


def norm_items(source: Source, style: Style) -> Plain:
    return Plain(style.norms * source.hidden * (2 if style.norm_bias else 1))


def rope_parameters(source: Source, kind: str = "") -> Mapping[str, Any]:
    found = source.text.get("rope_parameters")
    if not isinstance(found, Mapping):
        found = source.text.get("rope_scaling")
    if not isinstance(found, Mapping):
        return {}
    if kind and isinstance(found.get(kind), Mapping):
        found = found[kind]
    return found


def rotary_table(source: Source, head_dim: int, dtype: str = MODEL_DTYPE, kind: str = "") -> Plain:
    """The table of cosines and sines. `vllm/model_executor/layers/rotary_embedding`: rows as each type makes them."""
    rope = rope_parameters(source, kind)
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


def with_ends(source: Source, style: Style, structure: Structure) -> Structure:
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


def layers_of(source: Source, make: LayerBuilder) -> tuple[Layer, ...]:
    """One tuple a layer; layers of the same kind are built once and are the same object."""
    built: dict[Any, Layer] = {}
    result = []
    for index, mixer in enumerate(source.mixers):
        kind, builder = make(index, mixer)
        key = (id(mixer), kind)
        if key not in built:
            built[key] = tuple(builder())
        result.append(built[key])
    return tuple(result)


def sparse_layers(source: Source) -> list[bool]:
    """Which layers have experts, as the keys of most families say."""
    layers = len(source.mixers)
    first = source.size("first_k_dense_replace", default=0, minimum=0)
    dense = frozenset(source.integers("mlp_only_layers"))
    frequency = source.text.get("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) < layers:
            raise ModelConfigError(
                f"config.json: moe_layer_freq has {len(frequency)} entries for {layers} layers.",
                "Use the checkpoint's own list.",
                "moe_layer_freq",
            )
        chosen = [bool(value) for value in frequency[:layers]]
    else:
        step = source.size("decoder_sparse_step", "moe_layer_freq", default=1)
        shift = 1 if "decoder_sparse_step" in source.text else 0
        chosen = [(index + shift) % step == 0 for index in range(layers)]
    return [value and index >= first and index not in dense for index, value in enumerate(chosen)]


def decoder(source: Source, architecture: str, style: Style) -> Structure:
    """A decoder whose layers are attention and one MLP or a set of experts."""
    moe = style.moe
    experts = sparse_layers(source) if moe is not None else []

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = bool(experts) and experts[index]

        def items() -> list[Item]:
            feed = (
                moe_items(source, style, moe)
                if sparse and moe is not None
                else mlp_items(source, style, style.mlp, source.intermediate)
            )
            return [*attention_items(source, style, mixer), *feed, norm_items(source, style)]

        return sparse, items

    layers = layers_of(source, make)
    every: list[Item] = []
    if style.rotary:
        mixer = source.mixers[0]
        every.append(rotary_table(source, mixer.head_dim, style.rotary_dtype))
    structure = Structure(architecture, f"{style.root}{style.layers}", layers, every=tuple(every))
    return with_ends(source, style, structure)


def styled(style: Style) -> Family:
    return lambda source, architecture: decoder(source, architecture, style)
