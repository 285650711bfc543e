"""Latent attention: DeepSeek V2 to V3.2, GLM-5 and Kimi-K2, and DeepSeek-V4 with compressed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .decoder import (
    Family,
    Moe,
    Style,
    layers_of,
    mlp_items,
    moe_items,
    norm_items,
    rope_parameters,
    rotary_table,
    sparse_layers,
    with_ends,
)
from .mixers import Mixer
from .source import Source
from .tensors import EAGER_FLOAT32, FLOAT32, MODEL_DTYPE, Experts, Item, Linear, Plain, Structure, Whole

_FLASHINFER_HEADS = (64, 128, 256, 512)
# The indexer that picks compressed rows comes with this ratio alone.
_INDEXED_RATIO = 4


def mla(source: Source, architecture: str) -> Structure:
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
            shared_whole=Whole(),
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
                Plain(2 * mixer.index_dim, FLOAT32),
            ]
        return items

    experts = sparse_layers(source) if source.has("n_routed_experts") else []

    # The classes with an indexer (vllm/models/deepseek_v32) treat the first layers likewise.
    dense = Whole((0, 27), one_stage=True) if source.has("index_topk") else None

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = bool(experts) and experts[index]

        def items() -> list[Item]:
            feed = (
                moe_items(source, style, moe)
                if sparse and moe is not None
                else mlp_items(source, style, "mlp", source.intermediate, whole=dense)
            )
            return [*attention(mixer), *feed, norm_items(source, style)]

        return sparse, items

    layers = layers_of(source, make)
    # layers/rotary_embedding/deepseek_scaling_rope.py: any scaling makes it DeepSeek's own kind.
    kind = rope_parameters(source)
    scaled = str(kind.get("rope_type", kind.get("type", "default"))) != "default"
    table = rotary_table(source, rope, EAGER_FLOAT32 if scaled and rope in _FLASHINFER_HEADS else MODEL_DTYPE)
    structure = Structure(architecture, "model.layers.", layers, every=(table,))
    count = source.size("num_nextn_predict_layers", default=0, minimum=0)
    if count:
        own = [*attention(replace(source.mixers[-1], index_shared=False)), norm_items(source, style)]
        feed = moe_items(source, style, moe) if source.has("n_routed_experts") and moe is not None else []
        extra: list[Item] = [Plain(2 * hidden * hidden + 3 * hidden)]
        structure = replace(structure, mtp=(*own, *feed, *extra), mtp_layers=count)
    return with_ends(source, style, structure)


def _compressor(hidden: int, head_dim: int, ratio: int, name: str) -> list[Item]:
    """`deepseek_v4/compressor.py`: at ratio 4 the windows overlap, which doubles K and gate."""
    width = head_dim * (2 if ratio == _INDEXED_RATIO else 1)
    return [
        Plain(ratio * width, FLOAT32),
        Linear(f"{name}.fused_wkv_wgate", hidden, (width, width), "replicated", quantized=False, lora=False),
        Plain(head_dim),
    ]


def attention_items(source: Source, mixer: Mixer) -> list[Item]:
    """`deepseek_v4/attention.py`: a low rank for Q and for the grouped output."""
    hidden, head_dim, heads = source.hidden, mixer.head_dim, mixer.heads
    rank, groups = source.size("q_lora_rank"), source.size("o_groups")
    low = groups * source.size("o_lora_rank")
    items: list[Item] = [
        Linear("attn.fused_wqa_wkv", hidden, (rank, head_dim), "replicated", ("wq_a", "wkv")),
        Linear("attn.wq_b", rank, (heads * head_dim,), "column"),
        Linear("attn.wo_a", heads * head_dim // groups, (low,), "column"),
        Linear("attn.wo_b", low, (hidden,), "row"),
        Plain(rank + head_dim),
        # FlashMLA pads a rank's sinks to 64 heads.
        Plain(max(64, heads), FLOAT32),
    ]
    if mixer.compress > 1:
        items += _compressor(hidden, head_dim, mixer.compress, "attn.compressor")
    if mixer.compress == _INDEXED_RATIO:
        index_heads = source.size("index_n_heads")
        items += [
            Linear("attn.indexer.wq_b", rank, (mixer.index_dim * index_heads,), "replicated"),
            Plain(hidden * index_heads),
            *_compressor(hidden, mixer.index_dim, mixer.compress, "attn.indexer.compressor"),
        ]
    return items


def _experts(source: Source, *, hashed: bool) -> list[Item]:
    """`deepseek_v4/nvidia/model.py: DeepseekV4MoE`: the first layers choose experts by a table of tokens."""
    hidden, count = source.hidden, source.size("n_routed_experts")
    wide = source.size("moe_intermediate_size")
    items: list[Item] = [Plain(count * hidden)]
    if hashed:
        items.append(Plain(source.vocabulary * source.size("num_experts_per_tok"), FLOAT32))
    elif source.text.get("topk_method") == "noaux_tc":
        items.append(Plain(count, FLOAT32))
    items.append(Experts("ffn.experts", count, hidden, wide, parts=("w1", "w3", "w2")))
    shared = source.size("n_shared_experts", default=0, minimum=0)
    if shared:
        items += mlp_items(source, Style(), "ffn.shared_experts", shared * wide, whole=Whole((0, 27), one_stage=True))
    return items


def _streams(source: Source) -> Plain:
    """How a layer mixes its residual streams before attention and before the experts."""
    count = source.size("hc_mult", default=4)
    mixes = (2 + count) * count
    return Plain(2 * (mixes * count * source.hidden + mixes + 3), FLOAT32)


def _deepseek_v4(source: Source, architecture: str) -> Structure:
    hidden, streams = source.hidden, source.size("hc_mult", default=4)
    hashed = source.size("num_hash_layers", default=0, minimum=0)

    def layer(mixer: Mixer, *, table: bool) -> list[Item]:
        return [*attention_items(source, mixer), *_experts(source, hashed=table), _streams(source), Plain(2 * hidden)]

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        return index < hashed, lambda: layer(mixer, table=index < hashed)

    kinds = source.kinds
    rope = source.size("qk_rope_head_dim")
    # Compressed rows turn by a base of their own, so there is a table for each; both are float32.
    tables = tuple(rotary_table(source, rope, FLOAT32) for _ in {mixer.compress > 1 for mixer in kinds})
    head = Plain(streams * streams * hidden + streams + 1, FLOAT32)
    structure = Structure(
        architecture,
        "model.layers.",
        layers_of(source, make),
        every=(*tables, head),
        # The residual streams that the MTP layer reads.
        last_token_elements=streams * hidden,
        renamed=(("layers.", "model.layers."), ("mtp.", "model.mtp."), ("head", "lm_head")),
    )
    count = source.size("num_nextn_predict_layers", default=0, minimum=0)
    if count:
        window = next((mixer for mixer in kinds if not mixer.compress), None)
        window = window or replace(next(iter(kinds)), compress=0, index_dim=0)
        own: list[Item] = [
            *layer(window, table=False),
            Linear("e_proj", hidden, (hidden,), "replicated"),
            Linear("h_proj", hidden, (hidden,), "replicated"),
            head,
            Plain(3 * hidden),
        ]
        structure = replace(structure, mtp=tuple(own), mtp_layers=count)
    return with_ends(source, Style(), structure)


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "GlmMoeDsaForCausalLM",
            "MistralLarge3ForCausalLM",
        ),
        mla,
    ),
    "DeepseekV4ForCausalLM": _deepseek_v4,
}
