"""Families with an encoder of images or sound beside the language model: Llama 4, Mistral 3, Qwen-VL.

Keys of `vision_config` that a file leaves out have the defaults of the `transformers` configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .decoder import Family, styled
from .errors import ModelConfigError, UnsupportedArchitectureError, short
from .families import BY_TYPE, LANGUAGE_MODELS
from .families_states import gdn
from .families_text import QWEN2, QWEN3, QWEN3_MOE, llama4, minimax_m3
from .mixers import size_of
from .source import Source
from .tensors import FLOAT32, Item, Layer, Linear, Plain, Structure, Tower
from .towers import QKV, Sub, beside, plain_linear, section_of, under_model

# --- Mistral 3 ----------------------------------------------------------------------------------------------------


def _inner(source: Source, architecture: str) -> Structure:
    """The language model that text_config tells by `architectures` or `model_type`."""
    names = source.text.get("architectures") if source.text is not source.config else None
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not name:
        kind = source.text.get("model_type") if source.text is not source.config else None
        name = BY_TYPE.get(kind, "") if isinstance(kind, str) else ""
        if not name:
            # Mistral's own files tell no type: latent attention or Mistral's plain decoder.
            name = "MistralLarge3ForCausalLM" if source.has("kv_lora_rank") else "MistralForCausalLM"
    family = LANGUAGE_MODELS.get(name)
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
    vision = section_of(source, "vision_config")
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
        Plain(2 * side * side * (hidden // heads), FLOAT32),
        Plain(hidden * (merged + 1)),
        plain_linear("multi_modal_projector.linear_1", hidden, source.hidden, "column", bias=bias),
        plain_linear("multi_modal_projector.linear_2", source.hidden, source.hidden, "row", bias=bias),
    )
    block: Layer = (
        Plain(2 * hidden),
        Linear("attention.qkv_proj", hidden, (hidden,) * 3, "column", QKV, lora=False),
        plain_linear("attention.o_proj", hidden, hidden, "row"),
        Linear("feed_forward.gate_up_proj", hidden, (wide,) * 2, "column", ("gate_proj", "up_proj"), lora=False),
        plain_linear("feed_forward.down_proj", wide, hidden, "row"),
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


_MISTRAL3_NAMES = under_model(
    ("model.vision_tower", "vision_tower"), ("model.multi_modal_projector", "multi_modal_projector")
)


# --- MiniMax-M3 ---------------------------------------------------------------------------------------------------


def _minimax_tower(source: Source) -> tuple[Tower, ...]:
    """A CLIP-like tower, a projector and a merger of patches (vllm/models/minimax_m3/common/vision_tower.py)."""
    vision = section_of(source, "vision_config")
    hidden = size_of(vision, ("hidden_size",))
    wide = size_of(vision, ("intermediate_size",))
    heads = size_of(vision, ("num_attention_heads",))
    patch = size_of(vision, ("patch_size",), 14)
    compression = vision.get("img_token_compression_config")
    compression = compression if isinstance(compression, Mapping) else {}
    times = size_of(compression, ("temporal_patch_size",), 2)
    merged = source.hidden * size_of(compression, ("spatial_merge_size",), 2) ** 2
    middle = size_of(source.config, ("projector_hidden_size",), source.hidden)
    items: Layer = (
        Plain(hidden * (size_of(vision, ("num_channels",), 3) * times * patch * patch + 2)),
        Plain(3 * (2 * (hidden // heads // 2) // 3 // 2), FLOAT32),
        plain_linear("multi_modal_projector.linear_1", hidden, middle, "column", bias=True),
        plain_linear("multi_modal_projector.linear_2", middle, source.hidden, "row", bias=True),
        plain_linear("patch_merge_mlp.linear_1", merged, middle, "column", bias=True),
        plain_linear("patch_merge_mlp.linear_2", middle, source.hidden, "row", bias=True),
    )
    block: Layer = (
        Plain(4 * hidden),
        Linear("self_attn.qkv_proj", hidden, (hidden,) * 3, "column", QKV, bias=True, lora=False),
        plain_linear("self_attn.out_proj", hidden, hidden, "row", bias=True),
        plain_linear("fc1", hidden, wide, "column", bias=True),
        plain_linear("fc2", wide, hidden, "row", bias=True),
    )
    depth = size_of(vision, ("num_hidden_layers",))
    return (Tower(items, block, depth, prefix="vision_tower.", layers="vision_model.encoder.layers."),)


_MINIMAX_NAMES = (
    ("multi_modal_projector.", "vision_tower.multi_modal_projector."),
    ("patch_merge_mlp.", "vision_tower.patch_merge_mlp."),
)


# --- Qwen2-VL and Qwen2.5-VL --------------------------------------------------------------------------------------


def _qwen2_tower(source: Source) -> tuple[Tower, ...]:
    """`models/qwen2_vl.py`, which calls the tower's width embed_dim, and `qwen2_5_vl.py` with a gated MLP."""
    vision = section_of(source, "vision_config")
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
        plain_linear("merger.mlp.0", merged, merged, "column", bias=True),
        plain_linear("merger.mlp.2", merged, out, "row", bias=True),
    )
    if older:
        wide = int(hidden * source.number(vision, "mlp_ratio", 4.0))
        mlp: Layer = (
            plain_linear("mlp.fc1", hidden, wide, "column", bias=True),
            plain_linear("mlp.fc2", wide, hidden, "row", bias=True),
        )
    else:
        wide = size_of(vision, ("intermediate_size",), 3420)
        parts = ("gate_proj", "up_proj")
        mlp = (
            Linear("mlp.gate_up_proj", hidden, (wide, wide), "column", parts, bias=True, lora=False),
            plain_linear("mlp.down_proj", wide, hidden, "row", bias=True),
        )
    block: Layer = (
        Plain(2 * norm),
        Linear("attn.qkv", hidden, (hidden,) * 3, "column", bias=True, lora=False),
        plain_linear("attn.proj", hidden, hidden, "row", bias=True),
        *mlp,
    )
    return (Tower(items, block, size_of(vision, ("depth",), 32), heads),)


_QWEN_NAMES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head", "language_model.lm_head"),
    ("model.", "language_model.model."),
)


# --- Qwen3-VL, Qwen3.5 and Llama 4 --------------------------------------------------------------------------------


def _qwen_tower(source: Source, *, deepstack: bool) -> Tower:
    """The vision tower of Qwen3-VL and Qwen3.5 (models/qwen3_vl.py)."""
    vision = section_of(source, "vision_config")
    hidden = size_of(vision, ("hidden_size",))
    wide = size_of(vision, ("intermediate_size",))
    patch = size_of(vision, ("patch_size",), 16)
    merged = hidden * size_of(vision, ("spatial_merge_size",), 2) ** 2
    out = size_of(vision, ("out_hidden_size",), source.hidden)
    time = size_of(vision, ("temporal_patch_size",), 2)
    channels = size_of(vision, ("in_channels",), 3)
    heads = size_of(vision, ("num_heads",), 16)
    stacks = (vision.get("deepstack_visual_indexes") if deepstack else None) or []
    if not isinstance(stacks, list) or not all(isinstance(layer, int) and layer >= 0 for layer in stacks):
        raise ModelConfigError(
            f"config.json: deepstack_visual_indexes = {short(stacks)} is not a list of layers.",
            "Use the checkpoint's own config.json.",
            "deepstack_visual_indexes",
        )
    count = len(stacks)
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
        Plain(patches * (hidden // heads // 2) * 2, FLOAT32),
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


_RENAMED = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head", "language_model.lm_head"),
    ("language_model.", "language_model."),
    ("model.", "language_model.model."),
)


def _qwen(inner: Family, *, deepstack: bool) -> Family:
    return beside(inner, lambda source: (_qwen_tower(source, deepstack=deepstack),), _RENAMED)


FAMILIES: dict[str, Family] = {
    "Llama4ForConditionalGeneration": beside(llama4, lambda source: (_llama4_tower(source),), _RENAMED),
    "MiniMaxM3SparseForConditionalGeneration": beside(minimax_m3, _minimax_tower, _MINIMAX_NAMES),
    "Mistral3ForConditionalGeneration": beside(_inner, _mistral3_tower, _MISTRAL3_NAMES),
    "Qwen2VLForConditionalGeneration": beside(styled(QWEN2), _qwen2_tower, _QWEN_NAMES),
    "Qwen2_5_VLForConditionalGeneration": beside(styled(QWEN2), _qwen2_tower, _QWEN_NAMES),
    "Qwen3VLForConditionalGeneration": _qwen(styled(QWEN3), deepstack=True),
    "Qwen3VLMoeForConditionalGeneration": _qwen(styled(QWEN3_MOE), deepstack=True),
    "Qwen3_5ForConditionalGeneration": _qwen(gdn, deepstack=False),
    "Qwen3_5MoeForConditionalGeneration": _qwen(gdn, deepstack=False),
}
