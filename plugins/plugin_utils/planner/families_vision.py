"""Families with an encoder of images or sound beside the language model: Gemma 3 and 4, Mistral 3, Kimi-K2.5, Qwen-VL.

The language model is described as it is alone; `_beside` puts it under `language_model.` and adds the towers. Keys of
`vision_config` that a file leaves out have the defaults of the `transformers` configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .errors import ModelConfigError, UnsupportedArchitectureError, short
from .mixers import Mixer, mixers, size_of
from .structure import (
    _BY_TYPE,
    _FAMILIES,
    _FLOAT32,
    _QWEN2,
    Family,
    Item,
    Layer,
    Linear,
    Moe,
    Plain,
    Source,
    Structure,
    Style,
    Tower,
    Vocabulary,
    _attention,
    _ends,
    _gemma3,
    _layers,
    _mla,
    _mlp,
    _moe,
    _rotary,
    _styled,
)

Sub = Mapping[str, Any]
_QKV = ("q_proj", "k_proj", "v_proj")
# Methods whose kernels take towers of any width (models/gemma4_mm.py).
_ANY_WIDTH = ("bitsandbytes", "torchao", "compressed-tensors")


def _section(source: Source, name: str) -> Sub:
    value = source.config.get(name)
    if not isinstance(value, Mapping):
        raise ModelConfigError(f"config.json has no {name}", key=name)
    return value


def _linear(name: str, inputs: int, output: int, split: str, *, bias: bool = False, quantized: bool = True) -> Linear:
    return Linear(name, inputs, (output,), split, bias=bias, quantized=quantized, lora=False)


def _beside(
    inner: Family, towers: Callable[[Source], tuple[Tower, ...]], renamed: tuple[tuple[str, str], ...]
) -> Family:
    """A language model under `language_model.` with towers beside it."""

    def build(source: Source, architecture: str) -> Structure:
        structure = inner(source, architecture)
        head = structure.head
        return replace(
            structure,
            prefix=f"language_model.{structure.prefix}",
            head=replace(head, name=f"language_model.{head.name}") if head is not None else None,
            towers=towers(source),
            renamed=renamed,
        )

    return build


def _under_model(*more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Names of checkpoints of Transformers 4.52 and later: towers and language model under `model.`."""
    return (
        *more,
        ("model.language_model.", "language_model.model."),
        ("language_model.", "language_model."),
        ("lm_head", "language_model.lm_head"),
        ("model.", "language_model.model."),
    )


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
            own = [*_attention(source, style, mixer), *_mlp(source, style, "mlp", source.intermediate * (1 + double))]
            if sparse:
                own += _moe(source, style, moe)
                # Three norms, the router's norm and scale, and a scale an expert.
                norms += 5 * hidden + source.size("num_experts") + 1
            if each:
                own.append(_linear("per_layer_input_gate", hidden, each, "replicated"))
                own.append(_linear("per_layer_projection", each, hidden, "replicated"))
                norms += hidden
            return [*own, Plain(norms)]

        return double, items

    kinds = {mixer.kind: mixer for mixer in mixers(source.config)}
    names = {"sliding": "sliding_attention", "full": "full_attention"}
    every: list[Item] = [_rotary(source, mixer.head_dim, kind=names[kind]) for kind, mixer in kinds.items()]
    every.append(Plain(hidden + 1))
    if each:
        rows = source.size("vocab_size_per_layer_input", default=262144)
        every += [
            Vocabulary("model.embed_tokens_per_layer", rows, each * layers),
            _linear("model.per_layer_model_projection", hidden, each * layers, "column"),
            Plain(each),
        ]
    structure = Structure(
        architecture, "model.layers.", _layers(source, make), every=tuple(every), embedding_everywhere=True
    )
    if each and architecture != "Gemma4ForCausalLM":
        # models/gemma4_mm.py: per_layer_embeddings.
        structure = replace(structure, token_elements=each * layers)
    return _ends(source, replace(style, final_norm=False), structure)


def _tower_quantized(source: Source, hidden: int, wide: int) -> bool:
    """`models/gemma4_mm.py`: most methods leave towers alone whose widths are no multiples of 64."""
    section = source.config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    return method in _ANY_WIDTH or (hidden % 64 == 0 and wide % 64 == 0)


def _gemma4_towers(source: Source) -> tuple[Tower, ...]:
    """Transformers' towers, whole on each rank (models/gemma4_mm.py, transformers' modeling_gemma4.py)."""
    vision = _section(source, "vision_config")
    hidden = size_of(vision, ("hidden_size",), 768)
    wide = size_of(vision, ("intermediate_size",), 3072)
    head_dim = size_of(vision, ("head_dim",), 64)
    queries = head_dim * size_of(vision, ("num_attention_heads",), 12)
    keys = head_dim * size_of(vision, ("num_key_value_heads",), 12)
    patch = size_of(vision, ("patch_size",), 16)
    positions = size_of(vision, ("position_embedding_size",), 10240)
    quantized = _tower_quantized(source, hidden, wide)

    def linear(name: str, inputs: int, output: int) -> Linear:
        return _linear(name, inputs, output, "replicated", quantized=quantized)

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
        return _linear(name, inputs, output, "replicated", bias=bias, quantized=quantized)

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


_GEMMA4_NAMES = _under_model(
    ("model.vision_tower", "vision_tower"),
    ("model.embed_vision", "embed_vision"),
    ("model.audio_tower", "audio_tower"),
    ("model.embed_audio", "embed_audio"),
    ("model.vision_embedder", "vision_embedder"),
)
_gemma4 = _beside(_gemma4_text, _gemma4_towers, _GEMMA4_NAMES)
_gemma4_alone = _beside(_gemma4_text, lambda source: (), _GEMMA4_NAMES)


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
            _linear("vision_embedder.patch_dense", pixels, width, "column", bias=True),
            Plain(2 * pixels + (4 + 2 * size_of(vision, ("mm_posemb_size",), 1120)) * width),
            Plain(out * (source.hidden + 1)),
        ]
    if isinstance(audio, Mapping):
        width = size_of(audio, ("output_proj_dims", "audio_embed_dim"), 640)
        extra.append(Plain(width * (source.hidden + 1)))
    return replace(structure, every=(*structure.every, *extra))


# --- Gemma 3 ------------------------------------------------------------------------------------------------------


def _gemma3_tower(source: Source) -> tuple[Tower, ...]:
    """SigLIP and its projector (models/siglip.py, gemma3_mm.py)."""
    vision = _section(source, "vision_config")
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
    items: Layer = (Plain(hidden * (3 * patch * patch + patches + 3)), Plain(2 * patches, _FLOAT32))
    block: Layer = (
        Plain(4 * hidden),
        Linear("self_attn.qkv_proj", hidden, (hidden,) * 3, "column", _QKV, bias=True, lora=False),
        _linear("self_attn.out_proj", hidden, hidden, "row", bias=True),
        _linear("mlp.fc1", hidden, wide, "column", bias=True),
        _linear("mlp.fc2", wide, hidden, "row", bias=True),
    )
    return items, block


# --- Mistral 3 ----------------------------------------------------------------------------------------------------


def _inner(source: Source, architecture: str) -> Structure:
    """The language model that text_config tells by `architectures` or `model_type`."""
    names = source.text.get("architectures") if source.text is not source.config else None
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not name:
        kind = source.text.get("model_type") if source.text is not source.config else None
        name = _BY_TYPE.get(kind, "") if isinstance(kind, str) else ""
        if not name:
            # Mistral's own files tell no type: latent attention or Mistral's plain decoder.
            name = "MistralLarge3ForCausalLM" if source.has("kv_lora_rank") else "MistralForCausalLM"
    family = _FAMILIES.get(name)
    if family is None:
        raise UnsupportedArchitectureError(
            f"the weights of {name:.80} inside {architecture:.80} are not known to this version.",
            "Plan it by hand: give parallelism and max_model_len.",
            "architectures",
        )
    structure = family(source, name)
    return replace(structure, architecture=architecture)


def _mistral3_tower(source: Source) -> tuple[Tower, ...]:
    """Pixtral's tower up to the layer that is used, a merger of patches and two projections (models/mistral3.py)."""
    vision = _section(source, "vision_config")
    hidden = size_of(vision, ("hidden_size",), 1024)
    wide = size_of(vision, ("intermediate_size",), 4096)
    heads = size_of(vision, ("num_attention_heads",), 16)
    patch = size_of(vision, ("patch_size",), 16)
    side = size_of(vision, ("image_size",), 1024) // patch
    channels = size_of(vision, ("num_channels",), 3)
    merged = hidden * size_of(source.config, ("spatial_merge_size",), 2) ** 2
    depth = size_of(vision, ("num_hidden_layers",), 24)
    bias = source.config.get("multimodal_projector_bias") is True
    items: Layer = (
        Plain(hidden * channels * patch * patch + hidden),
        # Frequencies of each position, and a copy of them.
        Plain(2 * side * side * (hidden // heads), _FLOAT32),
        Plain(hidden * (merged + 1)),
        _linear("multi_modal_projector.linear_1", hidden, source.hidden, "column", bias=bias),
        _linear("multi_modal_projector.linear_2", source.hidden, source.hidden, "row", bias=bias),
    )
    block: Layer = (
        Plain(2 * hidden),
        Linear("attention.qkv_proj", hidden, (hidden,) * 3, "column", _QKV, lora=False),
        _linear("attention.o_proj", hidden, hidden, "row"),
        Linear("feed_forward.gate_up_proj", hidden, (wide,) * 2, "column", ("gate_proj", "up_proj"), lora=False),
        _linear("feed_forward.down_proj", wide, hidden, "row"),
    )
    return (
        Tower(
            items,
            block,
            _used_layers(source.config, depth),
            prefix="",
            layers="vision_tower.transformer.layers.",
            modalities=("image",),
        ),
    )


def _used_layers(config: Sub, depth: int) -> int:
    """`models/mistral3.py: _get_num_hidden_layers`: negative numbers count from the end."""
    feature = config.get("vision_feature_layer")
    listed = feature if isinstance(feature, list) else [-1 if feature is None else feature]
    if not listed or not all(isinstance(index, int) and not isinstance(index, bool) for index in listed):
        raise ModelConfigError(
            f"config.json: vision_feature_layer = {short(feature)} is not an integer", key="vision_feature_layer"
        )
    return min(depth, max(0, *(depth + index + 1 if index < 0 else index for index in listed)))


_MISTRAL3_NAMES = _under_model(
    ("model.vision_tower", "vision_tower"), ("model.multi_modal_projector", "multi_modal_projector")
)


# --- Kimi-K2.5 ----------------------------------------------------------------------------------------------------


def _kimi_tower(source: Source) -> tuple[Tower, ...]:
    """MoonViT for images and clips (models/kimi_k25_vit.py). compressed-tensors leaves it alone."""
    vision = _section(source, "vision_config")
    hidden = size_of(vision, ("vt_hidden_size", "hidden_size"), 1152)
    wide = size_of(vision, ("vt_intermediate_size", "intermediate_size"), 4304)
    heads = size_of(vision, ("vt_num_attention_heads", "num_attention_heads"), 16)
    depth = size_of(vision, ("vt_num_hidden_layers", "num_hidden_layers"), 27)
    patch = size_of(vision, ("patch_size",), 14)
    height = size_of(vision, ("init_pos_emb_height",), 64)
    width = size_of(vision, ("init_pos_emb_width",), 64)
    times = size_of(vision, ("init_pos_emb_time",), 4)
    kernel = vision.get("merge_kernel_size", [2, 2])
    if not isinstance(kernel, list) or len(kernel) != 2:
        raise ModelConfigError(
            f"config.json: merge_kernel_size = {short(kernel)} is not two integers", key="merge_kernel_size"
        )
    rows, columns = (size_of({"merge_kernel_size": size}, ("merge_kernel_size",)) for size in kernel)
    merged = hidden * rows * columns
    quantized = not _is_compressed(source)

    def linear(name: str, inputs: int, output: int, split: str) -> Linear:
        return _linear(name, inputs, output, split, bias=True, quantized=quantized)

    items: Layer = (
        Plain(hidden * (3 * patch * patch + 1) + hidden * height * width + 2 * hidden),
        Plain(times * hidden, _FLOAT32),
        Plain(2 * hidden),
        linear("mm_projector.linear_1", merged, merged, "replicated"),
        linear("mm_projector.linear_2", merged, source.hidden, "replicated"),
    )
    block: Layer = (
        Plain(4 * hidden),
        Linear("wqkv", hidden, (hidden,) * 3, "column", bias=True, quantized=quantized, lora=False),
        linear("wo", hidden, hidden, "row"),
        linear("mlp.fc0", hidden, wide, "column"),
        linear("mlp.fc1", wide, hidden, "row"),
    )
    return (
        Tower(
            items, block, depth, heads, prefix="", layers="vision_tower.encoder.blocks.", modalities=("vision_chunk",)
        ),
    )


def _is_compressed(source: Source) -> bool:
    for config in (source.config, source.text):
        section = config.get("quantization_config")
        if isinstance(section, Mapping):
            return section.get("quant_method") == "compressed-tensors"
    return False


_KIMI_NAMES = (
    ("language_model.layers.", "language_model.model.layers."),
    ("mm_projector.proj.0", "mm_projector.linear_1"),
    ("mm_projector.proj.2", "mm_projector.linear_2"),
)


# --- Qwen2-VL and Qwen2.5-VL --------------------------------------------------------------------------------------


def _qwen2_tower(source: Source) -> tuple[Tower, ...]:
    """`models/qwen2_vl.py`, which calls the tower's width embed_dim, and `qwen2_5_vl.py` with a gated MLP."""
    vision = _section(source, "vision_config")
    older = "embed_dim" in vision
    hidden = size_of(vision, ("embed_dim", "hidden_size"), 1280)
    patch = size_of(vision, ("patch_size",), 14)
    pixels = size_of(vision, ("in_channels", "in_chans"), 3) * patch * patch
    pixels *= size_of(vision, ("temporal_patch_size",), 2)
    merged = hidden * size_of(vision, ("spatial_merge_size",), 2) ** 2
    out = size_of(vision, ("hidden_size" if older else "out_hidden_size",), source.hidden)
    heads = size_of(vision, ("num_heads",), 16)
    norm = hidden * (2 if older else 1)
    items: Layer = (
        Plain(hidden * pixels + norm),
        Plain(8192 * (hidden // heads // 2)),
        _linear("merger.mlp.0", merged, merged, "column", bias=True),
        _linear("merger.mlp.2", merged, out, "row", bias=True),
    )
    if older:
        wide = int(hidden * source.number(vision, "mlp_ratio", 4.0))
        mlp: Layer = (
            _linear("mlp.fc1", hidden, wide, "column", bias=True),
            _linear("mlp.fc2", wide, hidden, "row", bias=True),
        )
    else:
        wide = size_of(vision, ("intermediate_size",), 3420)
        parts = ("gate_proj", "up_proj")
        mlp = (
            Linear("mlp.gate_up_proj", hidden, (wide, wide), "column", parts, bias=True, lora=False),
            _linear("mlp.down_proj", wide, hidden, "row", bias=True),
        )
    block: Layer = (
        Plain(2 * norm),
        Linear("attn.qkv", hidden, (hidden,) * 3, "column", bias=True, lora=False),
        _linear("attn.proj", hidden, hidden, "row", bias=True),
        *mlp,
    )
    return (Tower(items, block, size_of(vision, ("depth",), 32), heads),)


_QWEN_NAMES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head", "language_model.lm_head"),
    ("model.", "language_model.model."),
)

FAMILIES: dict[str, Family] = {
    "Gemma4ForCausalLM": _gemma4_text,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4_unified,
    "Gemma3ForConditionalGeneration": _beside(_gemma3, _gemma3_tower, _under_model()),
    "Mistral3ForConditionalGeneration": _beside(_inner, _mistral3_tower, _MISTRAL3_NAMES),
    "Qwen2VLForConditionalGeneration": _beside(_styled(_QWEN2), _qwen2_tower, _QWEN_NAMES),
    "Qwen2_5_VLForConditionalGeneration": _beside(_styled(_QWEN2), _qwen2_tower, _QWEN_NAMES),
    "KimiK25ForConditionalGeneration": _beside(_mla, _kimi_tower, _KIMI_NAMES),
}
