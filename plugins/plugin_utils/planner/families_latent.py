"""DeepSeek-V4: latent attention with compressed rows, and several residual streams (vllm/models/deepseek_v4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .mixers import Mixer, mixers
from .structure import (
    _FLOAT32,
    Experts,
    Family,
    Item,
    Linear,
    Plain,
    Source,
    Structure,
    Style,
    _ends,
    _layers,
    _mlp,
    _rotary,
)

# The indexer that picks compressed rows comes with this ratio alone.
_INDEXED_RATIO = 4


def _compressor(hidden: int, head_dim: int, ratio: int, name: str) -> list[Item]:
    """`deepseek_v4/compressor.py`: at ratio 4 the windows overlap, which doubles K and gate."""
    width = head_dim * (2 if ratio == _INDEXED_RATIO else 1)
    return [
        Plain(ratio * width, _FLOAT32),
        Linear(f"{name}.fused_wkv_wgate", hidden, (width, width), "replicated", quantized=False, lora=False),
        Plain(head_dim),
    ]


def _attention(source: Source, mixer: Mixer) -> list[Item]:
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
        Plain(max(64, heads), _FLOAT32),
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
        items.append(Plain(source.vocabulary * source.size("num_experts_per_tok"), _FLOAT32))
    elif source.text.get("topk_method") == "noaux_tc":
        items.append(Plain(count, _FLOAT32))
    items.append(Experts("ffn.experts", count, hidden, wide, parts=("w1", "w3", "w2")))
    shared = source.size("n_shared_experts", default=0, minimum=0)
    if shared:
        items += _mlp(source, Style(), "ffn.shared_experts", shared * wide)
    return items


def _streams(source: Source) -> Plain:
    """How a layer mixes its residual streams before attention and before the experts."""
    count = source.size("hc_mult", default=4)
    mixes = (2 + count) * count
    return Plain(2 * (mixes * count * source.hidden + mixes + 3), _FLOAT32)


def _deepseek_v4(source: Source, architecture: str) -> Structure:
    hidden, streams = source.hidden, source.size("hc_mult", default=4)
    hashed = source.size("num_hash_layers", default=0, minimum=0)

    def layer(mixer: Mixer, *, table: bool) -> list[Item]:
        return [*_attention(source, mixer), *_experts(source, hashed=table), _streams(source), Plain(2 * hidden)]

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        return index < hashed, lambda: layer(mixer, table=index < hashed)

    kinds = set(mixers(source.config))
    rope = source.size("qk_rope_head_dim")
    # Compressed rows turn by a base of their own, so there is a table for each; both are float32.
    tables = tuple(_rotary(source, rope, _FLOAT32) for _ in {mixer.compress > 1 for mixer in kinds})
    head = Plain(streams * streams * hidden + streams + 1, _FLOAT32)
    structure = Structure(
        architecture,
        "model.layers.",
        _layers(source, make),
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
    return _ends(source, Style(), structure)


FAMILIES: dict[str, Family] = {"DeepseekV4ForCausalLM": _deepseek_v4}
