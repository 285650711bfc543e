"""Decoders of text with grouped-query attention: Llama, Qwen, Phi, GPT, Mixtral, GLM, MiniMax, MiMo and their kin."""

from __future__ import annotations

import re
from collections.abc import Callable
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
    rope_parameters,
    rotary_table,
    sparse_layers,
    styled,
    with_ends,
)
from .errors import ModelConfigError, short
from .mixers import Mixer
from .source import Source
from .tensors import FLOAT32, Item, Linear, Plain, Structure, Whole

LLAMA = Style(qkv_bias=("attention_bias", False), output_bias=("attention_bias", False), mlp_bias=("mlp_bias", False))
QWEN2 = Style(qkv_bias=True)
QWEN3 = Style(qkv_bias=("attention_bias", False), output_bias=("attention_bias", False), qk_norm="head")
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
QWEN3_MOE = replace(QWEN3, moe=Moe(shared_size=(), experts=("num_experts",)))


def _phi3(source: Source, architecture: str) -> Structure:
    return decoder(source, architecture, replace(LLAMA, qkv_parts=("qkv_proj",)))


def _cohere(source: Source, architecture: str) -> Structure:
    norm = "split" if source.flag("use_qk_norm") else ""
    return decoder(source, architecture, replace(LLAMA, norms=1, tied=True, qk_norm=norm))


def _gpt_oss(source: Source, architecture: str) -> Structure:
    """`vllm/model_executor/models/gpt_oss.py`: biases everywhere, attention sinks, a float32 rotary table."""
    style = Style(
        attention="attn",
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        rotary_dtype=FLOAT32,
        moe=Moe(experts=("num_local_experts",), intermediate=("intermediate_size",), router_bias=True, bias=True),
    )
    return decoder(source, architecture, style)


def _minimax_m2(source: Source, architecture: str) -> Structure:
    style = Style(
        qk_norm="split",
        moe=Moe(
            name="block_sparse_moe",
            experts=("num_local_experts",),
            intermediate=("intermediate_size",),
            router_dtype=FLOAT32,
            correction=True,
        ),
    )
    return decoder(source, architecture, style)


def minimax_m3(source: Source, architecture: str) -> Structure:
    """Block-sparse layers project an index of Q and K beside Q, K and V (vllm/models/minimax_m3)."""
    moe = Moe(
        name="block_sparse_moe",
        experts=("num_local_experts",),
        intermediate=("intermediate_size",),
        router_dtype=FLOAT32,
        correction=source.flag("use_routing_bias"),
        shared_name="shared_experts",
        shared_count=("n_shared_experts",),
    )
    style = Style(qk_norm="head")
    experts = sparse_layers(source)

    def index(mixer: Mixer) -> list[Item]:
        queries = source.size("sparse_num_index_heads", within="sparse_attention_config") * mixer.index_dim
        name, count = "self_attn.qkv_proj", mixer.kv_heads
        return [
            Linear(name, source.hidden, (0, queries), "qkv", ("index_q_proj",), count),
            Linear(name, source.hidden, (mixer.index_dim,), "replicated", ("index_k_proj",)),
            Plain(2 * mixer.index_dim),
        ]

    def make(number: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        def items() -> list[Item]:
            own = attention_items(source, style, mixer)
            if mixer.index_dim:
                own += index(mixer)
            dense = source.size("dense_intermediate_size", "intermediate_size")
            feed = moe_items(source, style, moe) if experts[number] else mlp_items(source, style, "mlp", dense)
            return [*own, *feed, norm_items(source, style)]

        return experts[number], items

    every = (rotary_table(source, source.mixers[0].head_dim),)
    structure = Structure(architecture, "model.layers.", layers_of(source, make), every=every)
    return with_ends(source, style, structure)


def _step_sparse(source: Source) -> list[bool]:
    """`models/step3p5.py: _is_moe_layer`; files without any of its keys say it as most families do."""
    layers = len(source.mixers)
    kinds, listed = source.text.get("mlp_layer_types"), source.text.get("moe_layers_enum")
    if isinstance(kinds, list):
        return [index < len(kinds) and kinds[index] == "sparse" for index in range(layers)]
    if isinstance(listed, str) and re.fullmatch(r"[0-9, ]{1,10000}", listed):
        chosen = {int(number) for number in listed.split(",") if number.strip() and len(number) < 10}
        return [index in chosen for index in range(layers)]
    if listed is not None:
        raise ModelConfigError(
            f"config.json: moe_layers_enum = {short(listed)} is not a list of numbers in a word.",
            "Use the checkpoint's own config.json.",
            "moe_layers_enum",
        )
    # transformers' Step3p7TextConfig: the first three are dense.
    return sparse_layers(source) if source.has("first_k_dense_replace") else [index > 2 for index in range(layers)]


def _step_tables(source: Source) -> tuple[Plain, ...]:
    """One rotary table for each base, width and scaling that layers have; files may list them for each layer."""
    bases, shares = source.text.get("rope_theta"), source.text.get("partial_rotary_factors")
    scaled = source.text.get("yarn_only_types")
    tables: dict[Any, Plain] = {}
    for index, mixer in enumerate(source.mixers):
        kind = "sliding_attention" if mixer.window else "full_attention"
        share = shares[index] if isinstance(shares, list) and index < len(shares) else 1.0
        base = bases[index] if isinstance(bases, list) and index < len(bases) else None
        text = {**source.text, "partial_rotary_factor": share, "rope_theta": None}
        if isinstance(scaled, list) and kind not in scaled:
            text["rope_scaling"] = None
        own = Source(source.config, text, source.mixers)
        key = (short(rope_parameters(own, kind), 1000), short(share), short(base))
        if key not in tables:
            tables[key] = rotary_table(own, mixer.head_dim, kind=kind)
    return tuple(tables.values())


def step(source: Source, architecture: str) -> Structure:
    """Windowed layers with more heads, gates of attention, a shared expert (models/step3p5.py)."""
    style = Style(qk_norm="head", qkv_bias=("attention_bias", False))
    moe = Moe(
        name="moe",
        experts=("moe_num_experts", "n_routed_experts", "num_experts"),
        intermediate=("moe_intermediate_size",),
        router_dtype=FLOAT32,
        correction=True,
        shared_name="share_expert",
        shared_size=("share_expert_dim",),
    )
    gated = source.flag("use_head_wise_attn_gate")
    experts = _step_sparse(source)

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        def items() -> list[Item]:
            own = attention_items(source, style, mixer)
            if gated:
                own.append(Linear("self_attn.g_proj", source.hidden, (mixer.heads,), "column"))
            feed = (
                moe_items(source, style, moe)
                if experts[index]
                else mlp_items(source, style, "mlp", source.intermediate)
            )
            return [*own, *feed, norm_items(source, style)]

        return experts[index], items

    structure = Structure(architecture, "model.layers.", layers_of(source, make), every=_step_tables(source))
    return with_ends(source, style, structure)


def _glm4_moe(source: Source, architecture: str) -> Structure:
    moe = Moe(
        experts=("n_routed_experts",),
        intermediate=("moe_intermediate_size",),
        router_dtype=FLOAT32,
        correction=True,
        shared_name="shared_experts",
        shared_count=("n_shared_experts",),
    )
    norm = "head" if source.flag("use_qk_norm") else ""
    style = Style(qkv_bias=("attention_bias", False), qk_norm=norm, moe=moe)
    if not source.has("partial_rotary_factor") and not rope_parameters(source):
        # transformers' Glm4MoeConfig turns half of each head.
        source = Source(source.config, {**source.text, "partial_rotary_factor": 0.5})
    structure = decoder(source, architecture, style)
    count = source.size("num_nextn_predict_layers", default=0, minimum=0)
    if not count:
        return structure
    # models/glm4_moe_mtp.py: a layer with experts, three norms and the projection of what it is given.
    own = [
        *attention_items(source, style, source.mixers[-1]),
        *moe_items(source, style, moe),
        norm_items(source, style),
    ]
    extra = Plain(2 * source.hidden * source.hidden + 3 * source.hidden)
    return replace(structure, mtp=(*own, extra), mtp_layers=count)


def _mimo_v2(source: Source, architecture: str) -> Structure:
    """Other heads in windowed layers, sinks, K and V of different size (models/mimo_v2.py)."""
    style = Style(
        qkv_bias=("attention_bias", False),
        rotary=False,
        moe=Moe(
            experts=("n_routed_experts",),
            intermediate=("moe_intermediate_size",),
            router_dtype=FLOAT32,
            correction=True,
        ),
    )
    structure = decoder(source, architecture, style)
    sink_keys = {"sliding": "add_swa_attention_sink_bias", "full": "add_full_attention_sink_bias"}
    kinds = {mixer.kind: mixer for mixer in source.mixers}
    every = tuple(rotary_table(source, mixer.head_dim) for mixer in kinds.values())
    sinks = sum(mixer.heads for mixer in source.mixers if source.flag(sink_keys.get(mixer.kind, ""), default=False))
    return replace(structure, every=(*every, Plain(sinks, split=True)))


def llama4(source: Source, architecture: str) -> Structure:
    """Experts in every n-th layer, the shared one as wide as a routed one (models/llama4.py)."""
    moe = Moe(
        name="feed_forward",
        experts=("num_local_experts",),
        intermediate=("intermediate_size",),
        shared_name="shared_expert",
        shared_size=("intermediate_size",),
        shared_whole=Whole(),
    )
    style = Style(mlp="feed_forward", moe=moe)
    step = source.size("interleave_moe_layer_step", default=1, minimum=0)
    listed = source.integers("moe_layers")

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = index in listed if listed else step > 0 and (index + 1) % step == 0

        def items() -> list[Item]:
            feed = (
                moe_items(source, style, moe)
                if sparse
                else mlp_items(source, style, "feed_forward", source.size("intermediate_size_mlp"))
            )
            return [*attention_items(source, style, mixer), *feed, norm_items(source, style)]

        return sparse, items

    layers = layers_of(source, make)
    every = (rotary_table(source, source.mixers[0].head_dim),)
    return with_ends(source, style, Structure(architecture, "model.layers.", layers, every=every))


FAMILIES: dict[str, Family] = {
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
        styled(LLAMA),
    ),
    "Qwen2ForCausalLM": styled(QWEN2),
    "MiMoForCausalLM": styled(QWEN2),
    "Qwen3ForCausalLM": styled(QWEN3),
    "Qwen3MoeForCausalLM": styled(QWEN3_MOE),
    "Qwen2MoeForCausalLM": styled(
        replace(
            QWEN2,
            moe=Moe(shared_name="shared_expert", shared_size=("shared_expert_intermediate_size",), shared_gate=True),
        )
    ),
    "Phi3ForCausalLM": _phi3,
    "CohereForCausalLM": _cohere,
    "Cohere2ForCausalLM": _cohere,
    "GPT2LMHeadModel": styled(_GPT2),
    "GptOssForCausalLM": _gpt_oss,
    "MixtralForCausalLM": styled(
        replace(
            LLAMA,
            moe=Moe(name="block_sparse_moe", experts=("num_local_experts",), intermediate=("intermediate_size",)),
        )
    ),
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "Glm4MoeForCausalLM": _glm4_moe,
    "Step3p5ForCausalLM": step,
    # Names that catalogues give the language models of Step-3.7 and MiniMax-M3.
    "Step3p7FlashForCausalLM": step,
    "MiniMaxM3ForCausalLM": minimax_m3,
    "MiniMaxM3SparseForCausalLM": minimax_m3,
    "MiMoV2FlashForCausalLM": _mimo_v2,
    "Llama4ForCausalLM": llama4,
}
