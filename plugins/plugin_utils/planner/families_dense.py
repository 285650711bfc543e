"""Further families of decoders as vLLM builds them: older dense models, NAS models, Granite and ERNIE experts.

Some are served by vLLM's own class in older versions and by Transformers' modules in newer ones
(vllm/model_executor/models/registry.py); the tensors are the same but for vLLM's table of cosines and sines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .decoder import (
    Family,
    Moe,
    Style,
    attention_items,
    decoder,
    layers_of,
    mlp_items,
    moe_items,
    norm_items,
    rotary_table,
    with_ends,
)
from .errors import ModelConfigError, short
from .families_states import mamba2_items
from .families_text import LLAMA
from .mixers import Mixer, size_of
from .source import Source
from .tensors import FLOAT32, Item, Linear, Plain, Structure, Vocabulary

# From these versions on Transformers' modules serve them: classes that 0.26 lacks but 0.19 has, and those that 0.32
# lacks but 0.26 has.
_EARLY = (0, 23)
_LATE = (0, 29)
_BIAS = ("attention_bias", False)


def _defaulted(source: Source, **values: Any) -> Source:
    """The source with values for keys that config.json leaves out (transformers' configuration classes)."""
    missing = {key: value for key, value in values.items() if not source.has(key)}
    return Source(source.config, {**source.text, **missing}) if missing else source


def _half_rotary(source: Source, share: float) -> Source:
    rope = source.text.get("rope_parameters")
    inside = isinstance(rope, Mapping) and "partial_rotary_factor" in rope
    known = inside or source.has("rotary_pct") or source.has("rope_pct") or source.has("partial_rotary_factor")
    if not known:
        return _defaulted(source, partial_rotary_factor=share)
    return _defaulted(source, partial_rotary_factor=source.text["rope_pct"]) if source.has("rope_pct") else source


def _plain(
    style: Style, *, everywhere: bool = False, until: tuple[int, int] | None = None, rotary: float = 0.0
) -> Family:
    """A decoder of one style. `everywhere`: each stage makes the embedding and the head; `rotary`: share of the head
    that turns where config.json names none; `until`: Transformers' modules serve from there on."""

    def build(source: Source, architecture: str) -> Structure:
        if rotary:
            source = _half_rotary(source, rotary)
        structure = decoder(source, architecture, style)
        return replace(structure, embedding_everywhere=everywhere, head_everywhere=everywhere, own_until=until)

    return build


def _starcoder2(source: Source, architecture: str) -> Structure:
    bias = ("use_bias", True)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_bias=True,
        gated=False,
        up="c_fc",
        down="c_proj",
        tied=True,
    )
    return replace(decoder(source, architecture, style), own_until=_EARLY)


_PHI = Style(
    output="dense",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    norms=1,
    norm_bias=True,
    gated=False,
    up="fc1",
    down="fc2",
    head_bias=True,
)
_GPT_NEOX = Style(
    attention="attention",
    output="dense",
    qkv_name="query_key_value",
    qkv_parts=(),
    qkv_bias=("attention_bias", True),
    output_bias=("attention_bias", True),
    mlp_bias=True,
    norm_bias=True,
    gated=False,
    up="dense_h_to_4h",
    down="dense_4h_to_h",
    root="gpt_neox.",
)
_STABLELM = Style(qkv_bias=("use_qkv_bias", False), norm_bias=True)


def _phi(source: Source, architecture: str) -> Structure:
    wide = source.size("intermediate_size", "n_inner", default=4 * source.hidden)
    source = _defaulted(source, intermediate_size=wide)
    return _plain(_PHI, everywhere=True, until=_LATE, rotary=0.5)(source, architecture)


def _falcon(source: Source, architecture: str) -> Structure:
    """`models/falcon.py`: the MLP is four times the hidden size whatever config.json says."""
    parallel, newer = source.flag("parallel_attn", default=True), source.flag("new_decoder_architecture")
    count = 2 if not parallel else source.size("num_ln_in_parallel_attn", default=2 if newer else 1)
    bias = ("bias", False)
    style = Style(
        attention="self_attention",
        output="dense",
        qkv_name="query_key_value",
        qkv_parts=(),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norms=min(count, 2),
        norm_bias=True,
        gated=False,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        tied=True,
        rotary=not source.flag("alibi"),
        root="transformer.",
        layers="h.",
    )
    text = {**source.text, "intermediate_size": 4 * source.hidden}
    text.setdefault("max_position_embeddings", 2048)
    structure = decoder(Source(source.config, text), architecture, style)
    return replace(structure, embedding_everywhere=True, head_everywhere=True)


def _opt(source: Source, architecture: str) -> Structure:
    """`models/opt.py`: learned positions, and projections around the decoder where the embedding is narrower."""
    bias = ("enable_bias", True)
    style = Style(
        output="out_proj",
        qkv_bias=bias,
        output_bias=bias,
        norm_bias=True,
        tied=True,
        rotary=False,
        root="model.decoder.",
    )
    hidden, wide = source.hidden, source.size("ffn_dim", "intermediate_size")
    narrow = source.size("word_embed_proj_dim", default=hidden)
    with_bias = source.flag("enable_bias", default=True)

    def make(_index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        def items() -> list[Item]:
            return [
                *attention_items(source, style, mixer),
                Linear("fc1", hidden, (wide,), "column", bias=with_bias),
                Linear("fc2", wide, (hidden,), "row", bias=with_bias),
                norm_items(source, style),
            ]

        return "", items

    every: list[Item] = [Plain((source.size("max_position_embeddings") + 2) * hidden)]
    if source.flag("do_layer_norm_before", default=True) and not source.flag("_remove_final_layer_norm"):
        every.append(Plain(2 * hidden))
    if narrow != hidden:
        every.append(Linear("project_out", hidden, (narrow,), "replicated"))
        every.append(Linear("project_in", narrow, (hidden,), "replicated"))
    vocabulary = source.vocabulary
    return Structure(
        architecture,
        "model.decoder.layers.",
        layers_of(source, make),
        every=tuple(every),
        embedding=Vocabulary("model.decoder.embed_tokens", vocabulary, narrow),
        head=Vocabulary("lm_head", vocabulary, narrow, head=True),
        tied=source.tied(True),
        embedding_everywhere=True,
        head_everywhere=True,
    )


def _block_size(source: Source, feed: Mapping[str, Any]) -> int:
    """Width of one MLP of a NAS model: given, or a multiple of the hidden size rounded up to 256."""
    if feed.get("intermediate_size") is not None:
        return size_of(feed, ("intermediate_size",))
    if feed.get("ffn_mult") is None:
        raise ModelConfigError("config.json: block_configs has no ffn_mult", key="block_configs")
    wide = int(2 * source.number(feed, "ffn_mult", 1.0) * source.hidden / 3)
    return max(256, -(-wide // 256) * 256)


def _deci(source: Source, architecture: str) -> Structure:
    """`models/nemotron_nas.py`: blocks with attention, MLPs of their own width, or nothing."""
    blocks = source.text.get("block_configs")
    if not isinstance(blocks, list):
        return decoder(source, architecture, LLAMA)

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        # mixers() has checked that there is a block for each layer.
        block = blocks[index]
        feed = block.get("ffn") if isinstance(block, Mapping) else None
        if not isinstance(feed, Mapping):
            raise ModelConfigError(f"config.json: block_configs: {short(block)} has no ffn", key="block_configs")
        if feed.get("replace_with_linear") is True:
            raise ModelConfigError("config.json: block_configs: replace_with_linear is not served", key="block_configs")
        wide = 0 if feed.get("no_op") is True else _block_size(source, feed)

        def items() -> list[Item]:
            found: list[Item] = []
            if mixer.kind != "none":
                found += [*attention_items(source, LLAMA, mixer), Plain(source.hidden)]
            if wide:
                found += [*mlp_items(source, LLAMA, "mlp", wide), Plain(source.hidden)]
            return found

        return wide, items

    layers = layers_of(source, make)
    full = next((mixer for mixer in source.mixers if mixer.kind == "full"), None)
    every = (rotary_table(source, full.head_dim),) if full is not None else ()
    return with_ends(source, LLAMA, Structure(architecture, "model.layers.", layers, every=every))


def _olmoe(source: Source, architecture: str) -> Structure:
    style = Style(qk_norm="full", moe=Moe(experts=("num_experts",), intermediate=("intermediate_size",)))
    structure = decoder(source, architecture, style)
    return replace(structure, embedding_everywhere=True, head_everywhere=True)


def _granite_moe(source: Source, architecture: str) -> Structure:
    """`models/granitemoe.py`, `granitemoeshared.py`, `granitemoehybrid.py`: experts, a shared MLP, Mamba-2 layers."""
    moe = Moe(name="block_sparse_moe", experts=("num_local_experts",), intermediate=("intermediate_size",))
    style = Style(qkv_bias=_BIAS, output_bias=_BIAS)
    with_shared = architecture != "GraniteMoeForCausalLM"
    shared = source.size("shared_intermediate_size", default=0, minimum=0) if with_shared else 0
    sparse = source.size("num_local_experts", default=0, minimum=0) > 0

    def make(_index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        def items() -> list[Item]:
            if mixer.kind == "mamba2":
                found = mamba2_items(source, mixer, "mamba", source.flag("mamba_proj_bias"))
            else:
                found = attention_items(source, style, mixer)
            if sparse:
                found += moe_items(source, style, moe)
            if shared:
                found += [
                    Linear("shared_mlp.input_linear", source.hidden, (shared, shared), "column"),
                    Linear("shared_mlp.output_linear", shared, (source.hidden,), "row"),
                ]
            return [*found, norm_items(source, style)]

        return "", items

    full = next((mixer for mixer in source.mixers if mixer.is_attention), None)
    turned = full is not None and source.text.get("position_embedding_type", "rope") == "rope"
    every = (rotary_table(source, full.head_dim),) if full is not None and turned else ()
    structure = with_ends(source, style, Structure(architecture, "model.layers.", layers_of(source, make), every=every))
    return replace(structure, embedding_everywhere=True, head_everywhere=True)


def _ernie_moe(source: Source, architecture: str) -> Structure:
    """`models/ernie45_moe.py`: experts between two layers, a float32 router."""
    bias = ("use_bias", False)
    moe = Moe(
        experts=("moe_num_experts",),
        intermediate=("moe_intermediate_size",),
        router_dtype=FLOAT32,
        correction=True,
        shared_name="shared_experts",
        shared_count=("moe_num_shared_experts",),
    )
    style = Style(qkv_bias=bias, mlp_bias=bias, tied=True)
    count = source.size("moe_num_experts", default=0, minimum=0)
    first = source.size("moe_layer_start_index", default=0, minimum=0)
    last = source.size("moe_layer_end_index", default=1 << 20, minimum=0)
    step = source.size("moe_layer_interval", default=1)

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = count > 0 and first <= index <= last and (index + 1) % step == 0

        def items() -> list[Item]:
            feed = moe_items(source, style, moe) if sparse else mlp_items(source, style, "mlp", source.intermediate)
            return [*attention_items(source, style, mixer), *feed, norm_items(source, style)]

        return sparse, items

    every = (rotary_table(source, source.mixers[0].head_dim),)
    return with_ends(source, style, Structure(architecture, "model.layers.", layers_of(source, make), every=every))


def _olmo2(source: Source, architecture: str) -> Structure:
    """`models/olmo2.py`, `olmo3.py`: windowed layers keep the unscaled table."""
    style = replace(LLAMA, qk_norm="split")
    structure = decoder(source, architecture, style)
    newer = architecture == "Olmo3ForCausalLM"
    if newer and any(mixer.kind == "sliding" for mixer in source.mixers):
        unscaled = Source(source.config, {**source.text, "rope_scaling": None, "rope_parameters": None})
        structure = replace(structure, every=(*structure.every, rotary_table(unscaled, source.mixers[0].head_dim)))
    return replace(structure, embedding_everywhere=True, head_everywhere=True, own_until=_LATE if newer else _EARLY)


def _hunyuan(source: Source, architecture: str) -> Structure:
    style = replace(LLAMA, qk_norm="head" if source.flag("use_qk_norm") else "")
    return replace(decoder(source, architecture, style), own_until=_LATE)


_GLM = Style(qkv_bias=_BIAS)

FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": _plain(replace(LLAMA, gated=False, qk_norm="head")),
    "ArceeForCausalLM": _plain(replace(LLAMA, gated=False), until=_LATE),
    "DeciLMForCausalLM": _deci,
    "Ernie4_5ForCausalLM": _plain(Style(tied=True)),
    "Ernie4_5_MoeForCausalLM": _ernie_moe,
    "Exaone4ForCausalLM": _plain(replace(LLAMA, qk_norm="head")),
    "FalconForCausalLM": _falcon,
    "GPTNeoXForCausalLM": _plain(_GPT_NEOX, everywhere=True, until=_LATE, rotary=0.25),
    "Glm4ForCausalLM": _plain(replace(_GLM, norms=4), rotary=0.5),
    "GlmForCausalLM": _plain(_GLM, until=_LATE, rotary=0.5),
    "GraniteMoeForCausalLM": _granite_moe,
    "GraniteMoeHybridForCausalLM": _granite_moe,
    "GraniteMoeSharedForCausalLM": _granite_moe,
    "HunYuanDenseV1ForCausalLM": _hunyuan,
    "NemotronForCausalLM": _plain(replace(LLAMA, gated=False, norm_bias=True), rotary=0.5),
    "OPTForCausalLM": _opt,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo2,
    "OlmoForCausalLM": _plain(Style(qkv_bias=_BIAS, output_bias=_BIAS, norms=0, final_norm=False), until=_EARLY),
    "OlmoeForCausalLM": _olmoe,
    "PhiForCausalLM": _phi,
    "SeedOssForCausalLM": _plain(
        Style(
            qkv_bias=("attention_bias", True), output_bias=("attention_out_bias", False), mlp_bias=("mlp_bias", False)
        ),
        until=_LATE,
    ),
    # Served by Transformers' modules from the first version on.
    "SmolLM3ForCausalLM": _plain(replace(LLAMA, tied=True, rotary=False)),
    "StableLmForCausalLM": _plain(_STABLELM, everywhere=True, rotary=0.25),
    "Starcoder2ForCausalLM": _starcoder2,
}
