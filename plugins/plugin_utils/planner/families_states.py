"""Hybrids with recurrent states: Mamba-2 (Nemotron-H) and gated delta nets (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .decoder import (
    Family,
    Moe,
    Style,
    attention_items,
    layers_of,
    mlp_items,
    moe_items,
    norm_items,
    rotary_table,
    sparse_layers,
    with_ends,
)
from .errors import ModelConfigError
from .mixers import Mixer
from .source import Source
from .tensors import FLOAT32, Experts, Item, Linear, Plain, Structure, Whole


def mamba2_items(source: Source, mixer: Mixer, name: str, bias: bool) -> list[Item]:
    """`layers/mamba/mamba_mixer2.py`. Groups that are fewer than the ranks are held by each."""
    groups = mixer.state_groups * mixer.state_dim
    count = mixer.state_groups
    convolution = mixer.conv_kernel + 1
    return [
        Linear(f"{name}.in_proj", source.hidden, (mixer.inner, mixer.inner, mixer.state_heads), "column", bias=bias),
        Linear(f"{name}.in_proj", source.hidden, (0, groups, groups), "qkv", kv_heads=count, bias=bias),
        Plain(mixer.inner * convolution, split=True),
        Linear(f"{name}.conv1d", convolution, (0, groups, groups), "qkv", kv_heads=count, quantized=False, lora=False),
        Plain(mixer.state_heads, FLOAT32, split=True),
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
            Plain(count, FLOAT32),
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
            items += mlp_items(source, style, "mixer.shared_experts", size, whole=Whole())
        if latent:
            items.append(Linear("mixer.fc1_latent_proj", source.hidden, (latent,), "replicated"))
            items.append(Linear("mixer.fc2_latent_proj", latent, (source.hidden,), "replicated"))
        return items

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        kind = kinds[index] if index < len(kinds) else ""

        def items() -> list[Item]:
            if mixer.kind == "mamba2":
                own = mamba2_items(source, mixer, "mixer", source.flag("mamba_proj_bias", "use_bias"))
            elif mixer.is_attention:
                own = attention_items(source, style, mixer)
            elif kind == "moe":
                own = experts()
            else:
                own = mlp_items(source, style, "mixer", source.intermediate)
            return [*own, norm_items(source, style)]

        return kind, items

    layers = layers_of(source, make)
    structure = Structure(architecture, "model.layers.", layers, renamed=(("backbone.", "model."),))
    return with_ends(source, style, structure)


def gdn(source: Source, architecture: str) -> Structure:
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
        shared_whole=Whole((0, 20)),
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
            Plain(mixer.state_heads, FLOAT32, split=True),
            Plain(mixer.state_heads, split=True),
            Plain(mixer.state_head_dim),
            Linear(f"{name}.out_proj", values, (hidden,), "row"),
        ]

    experts = sparse_layers(source) if source.has("num_experts") else []

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = bool(experts) and experts[index]

        def items() -> list[Item]:
            own = linear_attention(mixer) if mixer.kind == "gdn" else attention_items(source, style, mixer)
            feed = moe_items(source, style, moe) if sparse else mlp_items(source, style, "mlp", source.intermediate)
            return [*own, *feed, norm_items(source, style)]

        return sparse, items

    layers = layers_of(source, make)
    full = next((mixer for mixer in source.mixers if mixer.kind == "full"), None)
    every = (rotary_table(source, full.head_dim),) if full is not None else ()
    structure = Structure(architecture, "model.layers.", layers, every=every)
    count = source.size("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0, minimum=0)
    if count and full is not None:
        feed = (
            moe_items(source, style, moe)
            if source.has("num_experts")
            else mlp_items(source, style, "mlp", source.intermediate)
        )
        own = [*attention_items(source, style, full), *feed, norm_items(source, style)]
        extra: list[Item] = [Plain(2 * hidden * hidden + 3 * hidden)]
        structure = replace(structure, mtp=(*own, *extra), mtp_layers=count)
    return with_ends(source, style, structure)


FAMILIES: dict[str, Family] = {
    "NemotronHForCausalLM": _nemotron_h,
    "Qwen3NextForCausalLM": gdn,
    "Qwen3_5ForCausalLM": gdn,
    "Qwen3_5MoeForCausalLM": gdn,
}
