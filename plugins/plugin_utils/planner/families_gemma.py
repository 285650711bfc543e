"""Gemma 1 to 4: decoders with windows, global layers of their own width, and their encoders of images and sound.

Keys of `vision_config` that a file leaves out have the defaults of the `transformers` configuration classes.
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
    rotary_table,
    styled,
    with_ends,
)
from .errors import ModelConfigError, short
from .mixers import Mixer, size_of
from .source import Source
from .tensors import FLOAT32, Item, Layer, Linear, Plain, Structure, Tower, Vocabulary
from .towers import QKV, Sub, beside, plain_linear, section_of, under_model

# Methods whose kernels take towers of any width (models/gemma4_mm.py).
_ANY_WIDTH = ("bitsandbytes", "torchao", "compressed-tensors")

GEMMA = Style(tied=True)


def _gemma2(source: Source, architecture: str) -> Structure:
    return decoder(source, architecture, replace(GEMMA, norms=4))


def gemma3(source: Source, architecture: str) -> Structure:
    """Two rotary tables: one for windowed layers, one for the others (models/gemma3.py)."""
    structure = decoder(source, architecture, replace(GEMMA, norms=4, qk_norm="head", rotary=False))
    head_dim = source.mixers[0].head_dim
    # A scaling without a kind of layer is the global layers' own.
    plain = {key: value for key, value in source.text.items() if key != "rope_scaling"}
    local = Source(source.config, plain)
    tables = (
        rotary_table(source, head_dim, kind="full_attention"),
        rotary_table(local, head_dim, kind="sliding_attention"),
    )
    return replace(structure, every=tables)


# --- Gemma 3 ------------------------------------------------------------------------------------------------------


def _gemma3_tower(source: Source) -> tuple[Tower, ...]:
    """SigLIP and its projector (models/siglip.py, gemma3_mm.py)."""
    vision = section_of(source, "vision_config")
    hidden = size_of(vision, ("hidden_size",), 768)
    items, block = _siglip(vision, hidden)
    items = (*items, Plain(hidden * (source.hidden + 1)))
    heads = size_of(vision, ("num_attention_heads",), 12)
    depth = size_of(vision, ("num_hidden_layers",), 12)
    return (
        Tower(
            items,
            block,
            depth,
            heads,
            prefix="vision_tower.vision_model.",
            layers="encoder.layers.",
            modalities=("image",),
        ),
    )


def _siglip(vision: Sub, hidden: int) -> tuple[Layer, Layer]:
    wide = size_of(vision, ("intermediate_size",), 3072)
    patch = size_of(vision, ("patch_size",), 16)
    patches = (size_of(vision, ("image_size",), 224) // patch) ** 2
    # The patch embedding, positions (and their 8-byte numbers), the last norm.
    items: Layer = (Plain(hidden * (3 * patch * patch + patches + 3)), Plain(2 * patches, FLOAT32))
    block: Layer = (
        Plain(4 * hidden),
        Linear("self_attn.qkv_proj", hidden, (hidden,) * 3, "column", QKV, bias=True, lora=False),
        plain_linear("self_attn.out_proj", hidden, hidden, "row", bias=True),
        plain_linear("mlp.fc1", hidden, wide, "column", bias=True),
        plain_linear("mlp.fc2", wide, hidden, "row", bias=True),
    )
    return items, block


# --- Gemma 4 ------------------------------------------------------------------------------------------------------


def _gemma4_text(source: Source, architecture: str) -> Structure:
    """`models/gemma4.py`: wider global layers, experts beside the MLP, and embeddings of each layer (PLE).

    Norms without a learned weight hold a vector of ones all the same. Every stage makes the embedding tables.
    """
    hidden, layers = source.hidden, source.size("num_hidden_layers")
    style = Style(tied=True, rotary=False, qkv_bias=("attention_bias", False), output_bias=("attention_bias", False))
    moe = Moe(name="moe", intermediate=("moe_intermediate_size", "expert_intermediate_size"))
    sparse = source.flag("enable_moe_block", "use_second_mlp_block")
    first_shared = layers - min(layers, source.size("num_kv_shared_layers", default=0, minimum=0))
    wide = source.flag("use_double_wide_mlp")
    default = 0 if architecture == "Gemma4UnifiedForConditionalGeneration" else 256
    each = default if "hidden_size_per_layer_input" not in source.text else 0
    each = source.size("hidden_size_per_layer_input", default=each, minimum=0)

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        double = wide and index >= first_shared > 0

        def items() -> list[Item]:
            norms = 4 * hidden + 3 * mixer.head_dim + 1
            own = [
                *attention_items(source, style, mixer),
                *mlp_items(source, style, "mlp", source.intermediate * (1 + double)),
            ]
            if sparse:
                own += moe_items(source, style, moe)
                # Three norms, the router's norm and scale, and a scale an expert.
                norms += 5 * hidden + source.size("num_experts") + 1
            if each:
                own.append(plain_linear("per_layer_input_gate", hidden, each, "replicated"))
                own.append(plain_linear("per_layer_projection", each, hidden, "replicated"))
                norms += hidden
            return [*own, Plain(norms)]

        return double, items

    kinds = {mixer.kind: mixer for mixer in source.mixers}
    names = {"sliding": "sliding_attention", "full": "full_attention"}
    every: list[Item] = [rotary_table(source, mixer.head_dim, kind=names[kind]) for kind, mixer in kinds.items()]
    every.append(Plain(hidden + 1))
    if each:
        rows = source.size("vocab_size_per_layer_input", default=262144)
        every += [
            Vocabulary("model.embed_tokens_per_layer", rows, each * layers),
            plain_linear("model.per_layer_model_projection", hidden, each * layers, "column"),
            Plain(each),
        ]
    structure = Structure(
        architecture, "model.layers.", layers_of(source, make), every=tuple(every), embedding_everywhere=True
    )
    if each and architecture != "Gemma4ForCausalLM":
        # models/gemma4_mm.py: per_layer_embeddings.
        structure = replace(structure, token_elements=each * layers)
    return with_ends(source, replace(style, final_norm=False), structure)


def _tower_quantized(source: Source, hidden: int, wide: int) -> bool:
    """`models/gemma4_mm.py`: most methods leave towers alone whose widths are no multiples of 64."""
    section = source.config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    return method in _ANY_WIDTH or (hidden % 64 == 0 and wide % 64 == 0)


def _gemma4_towers(source: Source) -> tuple[Tower, ...]:
    """Transformers' towers, whole on each rank (models/gemma4_mm.py, transformers' modeling_gemma4.py)."""
    vision = section_of(source, "vision_config")
    hidden = size_of(vision, ("hidden_size",), 768)
    wide = size_of(vision, ("intermediate_size",), 3072)
    head_dim = size_of(vision, ("head_dim",), 64)
    queries = head_dim * size_of(vision, ("num_attention_heads",), 12)
    keys = head_dim * size_of(vision, ("num_key_value_heads",), 12)
    patch = size_of(vision, ("patch_size",), 16)
    positions = size_of(vision, ("position_embedding_size",), 10240)
    quantized = _tower_quantized(source, hidden, wide)

    def linear(name: str, inputs: int, output: int) -> Linear:
        return plain_linear(name, inputs, output, "replicated", quantized=quantized)

    items: Layer = (
        Plain(hidden * (2 * positions + 3)),
        linear("vision_tower.patch_embedder.input_proj", 3 * patch * patch, hidden),
        linear("embed_vision.embedding_projection", hidden, source.hidden),
    )
    block: Layer = (
        linear("self_attn.q_proj.linear", hidden, queries),
        linear("self_attn.k_proj.linear", hidden, keys),
        linear("self_attn.v_proj.linear", hidden, keys),
        linear("self_attn.o_proj.linear", queries, hidden),
        linear("mlp.gate_proj.linear", hidden, wide),
        linear("mlp.up_proj.linear", hidden, wide),
        linear("mlp.down_proj.linear", wide, hidden),
        Plain(4 * hidden + 2 * head_dim),
    )
    depth = size_of(vision, ("num_hidden_layers",), 16)
    towers = [Tower(items, block, depth, replicated=True, prefix="", layers="vision_tower.encoder.layers.")]
    audio = source.config.get("audio_config")
    if isinstance(audio, Mapping):
        towers.append(_gemma4_audio(source, audio, quantized=quantized))
    return tuple(towers)


def _gemma4_audio(source: Source, audio: Sub, *, quantized: bool) -> Tower:
    """A conformer: two feed-forwards, attention with relative keys and a light convolution a layer."""
    hidden = size_of(audio, ("hidden_size",), 1024)
    heads = size_of(audio, ("num_attention_heads",), 8)
    kernel = size_of(audio, ("conv_kernel_size",), 5)
    out = size_of(audio, ("output_proj_dims",), 1536)
    channels = audio.get("subsampling_conv_channels") or (128, 32)
    if not isinstance(channels, list | tuple) or len(channels) != 2:
        raise ModelConfigError(
            f"config.json: subsampling_conv_channels = {short(channels)} is not two integers",
            key="subsampling_conv_channels",
        )
    first, second = (size_of({"subsampling_conv_channels": size}, ("subsampling_conv_channels",)) for size in channels)

    def linear(name: str, inputs: int, output: int, *, bias: bool = False) -> Linear:
        return plain_linear(name, inputs, output, "replicated", bias=bias, quantized=quantized)

    items: Layer = (
        Plain(9 * first + first + 9 * first * second + second + hidden // 2),
        linear("audio_tower.subsample_conv_projection.input_proj_linear", first // 4 * second, hidden),
        linear("audio_tower.output_proj", hidden, out, bias=True),
        linear("embed_audio.embedding_projection", out, source.hidden),
    )
    forward = [
        item
        for name in ("feed_forward1", "feed_forward2")
        for item in (
            linear(f"{name}.ffw_layer_1.linear", hidden, 4 * hidden),
            linear(f"{name}.ffw_layer_2.linear", 4 * hidden, hidden),
        )
    ]
    square = ("q_proj.linear", "k_proj.linear", "v_proj.linear", "post.linear", "relative_k_proj")
    block: Layer = (
        *forward,
        *(linear(f"self_attn.{name}", hidden, hidden) for name in square),
        linear("lconv1d.linear_start.linear", hidden, 2 * hidden),
        linear("lconv1d.linear_end.linear", hidden, hidden),
        Plain(hidden * (kernel + 9) + hidden // heads),
    )
    depth = size_of(audio, ("num_hidden_layers",), 12)
    return Tower(items, block, depth, replicated=True, prefix="", layers="audio_tower.layers.", modalities=("audio",))


_GEMMA4_NAMES = under_model(
    ("model.vision_tower", "vision_tower"),
    ("model.embed_vision", "embed_vision"),
    ("model.audio_tower", "audio_tower"),
    ("model.embed_audio", "embed_audio"),
    ("model.vision_embedder", "vision_embedder"),
)
_gemma4 = beside(_gemma4_text, _gemma4_towers, _GEMMA4_NAMES)
_gemma4_alone = beside(_gemma4_text, lambda source: (), _GEMMA4_NAMES)


def _gemma4_unified(source: Source, architecture: str) -> Structure:
    """`models/gemma4_unified.py`: no towers but projections of raw patches and sound, which no flag leaves out."""
    structure = _gemma4_alone(source, architecture)
    extra: list[Item] = []
    vision, audio = source.config.get("vision_config"), source.config.get("audio_config")
    if isinstance(vision, Mapping):
        pooled = size_of(vision, ("patch_size",), 16) * size_of(vision, ("pooling_kernel_size",), 3)
        pixels = 3 * size_of(vision, ("model_patch_size",), pooled) ** 2
        width = size_of(vision, ("mm_embed_dim",), 3840)
        out = size_of(vision, ("output_proj_dims",), 3840)
        extra += [
            plain_linear("vision_embedder.patch_dense", pixels, width, "column", bias=True),
            Plain(2 * pixels + (4 + 2 * size_of(vision, ("mm_posemb_size",), 1120)) * width),
            Plain(out * (source.hidden + 1)),
        ]
    if isinstance(audio, Mapping):
        width = size_of(audio, ("output_proj_dims", "audio_embed_dim"), 640)
        extra.append(Plain(width * (source.hidden + 1)))
    return replace(structure, every=(*structure.every, *extra))


FAMILIES: dict[str, Family] = {
    "GemmaForCausalLM": styled(GEMMA),
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": beside(gemma3, _gemma3_tower, under_model()),
    "Gemma4ForCausalLM": _gemma4_text,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4_unified,
}
