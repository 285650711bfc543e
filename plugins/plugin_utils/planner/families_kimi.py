"""Kimi: the towers of K2.5 and K3; Kimi-Linear and K3 with delta attention and latent attention without positions.

vllm/model_executor/models/kimi_linear.py up to 0.26, vllm/models/kimi_k3 in 0.33; the tensors are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .decoder import Family, Moe, Style, layers_of, mlp_items, moe_items, norm_items, sparse_layers, with_ends
from .errors import ModelConfigError, UnsupportedArchitectureError, short
from .families_latent import mla
from .mixers import Mixer, size_of
from .source import Source
from .tensors import FLOAT32, Experts, Item, Layer, Linear, Plain, Structure, Tower, Whole
from .towers import beside, plain_linear, section_of

_WHOLE = Whole((0, 27), one_stage=True)
_STYLE = Style()
_MOE = Moe(
    name="block_sparse_moe",
    intermediate=("moe_intermediate_size",),
    correction=True,
    shared_name="shared_experts",
    shared_count=("num_shared_experts",),
    shared_whole=_WHOLE,
)


def _delta_attention(source: Source, mixer: Mixer) -> list[Item]:
    """`layers/mamba/gdn/kimi_gdn_linear_attn.py`, `kimi_k3/nvidia/kda.py`: the latter's gate is as wide as Q.

    The few rows that align one rank's fused projection are left out.
    """
    hidden, inner, head_dim = source.hidden, mixer.inner, mixer.state_head_dim
    wide = source.sub("linear_attn_config").get("use_full_rank_gate") is True
    parts = ("q_proj", "k_proj", "v_proj", *(("g_proj",) if wide else ()), "b_proj")
    outputs = (inner,) * (len(parts) - 1)
    convolution = 3 * inner * mixer.conv_kernel
    items: list[Item] = [
        Linear("self_attn.in_proj_qkvgfab", hidden, (*outputs, mixer.state_heads), "column", parts),
        Linear("self_attn.f_a_proj", hidden, (head_dim,), "replicated"),
        Linear("self_attn.f_b_proj", head_dim, (inner,), "column"),
        Plain(inner + mixer.state_heads, FLOAT32, split=True),
        Plain(convolution, FLOAT32, split=True),
        Plain(head_dim),
        Linear("self_attn.o_proj", inner, (hidden,), "row"),
    ]
    if wide:
        # The fused decode kernel reads a copy of the convolution, width first, and of the norm in float32.
        items += [Plain(convolution, FLOAT32, split=True), Plain(head_dim, FLOAT32)]
    else:
        items += [
            Linear("self_attn.g_a_proj", hidden, (head_dim,), "replicated"),
            Linear("self_attn.g_b_proj", head_dim, (inner,), "column"),
        ]
    return items


def _latent_attention(source: Source) -> list[Item]:
    """`kimi_k3/nvidia/mla.py`: no rotary table; the output gate shares a matrix with the low ranks of Q and KV."""
    hidden, heads = source.hidden, source.size("num_attention_heads")
    rank, rope = source.size("kv_lora_rank"), source.size("qk_rope_head_dim")
    nope, values = source.size("qk_nope_head_dim"), source.size("v_head_dim")
    low = source.size("q_lora_rank", default=0, minimum=0)
    queries = heads * (nope + rope)
    items: list[Item] = []
    if low:
        parts = ("q_a_proj", "kv_a_proj_with_mqa")
        items += [
            Linear("self_attn.fused_qkv_a_proj", hidden, (low, rank + rope), "replicated", parts),
            Plain(low),
            Linear("self_attn.q_b_proj", low, (queries,), "column"),
        ]
    else:
        items += [
            Linear("self_attn.q_proj", hidden, (queries,), "column"),
            Linear("self_attn.kv_a_proj_with_mqa", hidden, (rank + rope,), "replicated"),
        ]
    if source.flag("mla_use_output_gate"):
        items.append(Linear("self_attn.g_proj", hidden, (heads * values,), "column"))
    return [
        *items,
        Plain(rank),
        Linear("self_attn.kv_b_proj", rank, (heads * (nope + values),), "column", absorbed=True),
        Linear("self_attn.o_proj", heads * values, (hidden,), "row"),
    ]


def _experts(source: Source) -> list[Item]:
    """`kimi_k3/nvidia/model.py: KimiMoE`: K3's experts work on a narrower copy of the hidden state."""
    narrow = source.size("routed_expert_hidden_size", default=0, minimum=0)
    items = [
        replace(item, hidden=narrow or item.hidden, parts=("w1", "w3", "w2")) if isinstance(item, Experts) else item
        for item in moe_items(source, _STYLE, _MOE)
    ]
    if narrow:
        items += [
            Linear("block_sparse_moe.routed_expert_down_proj", source.hidden, (narrow,), "replicated"),
            Linear("block_sparse_moe.routed_expert_up_proj", narrow, (source.hidden,), "replicated"),
        ]
        if source.flag("latent_moe_use_norm"):
            items.append(Plain(narrow))
    return items


def _kimi_linear(source: Source, architecture: str) -> Structure:
    if source.size("num_nextn_predict_layers", default=0, minimum=0):
        raise UnsupportedArchitectureError(
            f"config.json: num_nextn_predict_layers = {short(source.text['num_nextn_predict_layers'])}: the MTP layers "
            "of this family are not known to this version.",
            "Plan it by hand: give parallelism and max_model_len.",
            "num_nextn_predict_layers",
        )
    hidden = source.hidden
    # Attention over earlier blocks' outputs: a norm and a row before each half of a layer.
    residual = 4 * hidden if source.has("attn_res_block_size") else 0
    experts = sparse_layers(source) if source.has("num_experts") else []

    def make(index: int, mixer: Mixer) -> tuple[Any, Callable[[], list[Item]]]:
        sparse = bool(experts) and experts[index]

        def items() -> list[Item]:
            own = _delta_attention(source, mixer) if mixer.is_state else _latent_attention(source)
            feed = _experts(source) if sparse else mlp_items(source, _STYLE, "mlp", source.intermediate, whole=_WHOLE)
            return [*own, *feed, norm_items(source, _STYLE), Plain(residual)]

        return sparse, items

    last = (Plain(2 * hidden),) if residual else ()
    structure = Structure(architecture, "model.layers.", layers_of(source, make), last=last)
    return with_ends(source, _STYLE, structure)


def _tower(source: Source, *, newer: bool) -> tuple[Tower, ...]:
    """MoonViT for images and clips (models/kimi_k25_vit.py); K3's has no biases, RMS norms and wider attention."""
    vision = section_of(source, "vision_config")
    hidden = size_of(vision, ("vt_hidden_size", "hidden_size"), 1024 if newer else 1152)
    wide = size_of(vision, ("vt_intermediate_size", "intermediate_size"), 4096 if newer else 4304)
    heads = size_of(vision, ("vt_num_attention_heads", "num_attention_heads"), 12 if newer else 16)
    depth = size_of(vision, ("vt_num_hidden_layers", "num_hidden_layers"), 27)
    patch = size_of(vision, ("patch_size",), 14)
    height = size_of(vision, ("init_pos_emb_height",), 64)
    width = size_of(vision, ("init_pos_emb_width",), 64)
    times = size_of(vision, ("init_pos_emb_time",), 4)
    inner = size_of(vision, ("qkv_hidden_size",), 1536) if newer else hidden
    # Vectors of a norm: the scale, and for the older one a bias.
    norm = 1 if newer else 2
    kernel = vision.get("merge_kernel_size", [2, 2])
    if not isinstance(kernel, list) or len(kernel) != 2:
        raise ModelConfigError(
            f"config.json: merge_kernel_size = {short(kernel)} is not two integers", key="merge_kernel_size"
        )
    rows, columns = (size_of({"merge_kernel_size": size}, ("merge_kernel_size",)) for size in kernel)
    merged = hidden * rows * columns
    quantized = not _is_compressed(source)

    def linear(name: str, inputs: int, output: int, split: str) -> Linear:
        return plain_linear(name, inputs, output, split, bias=not newer, quantized=quantized)

    items: Layer = (
        Plain(hidden * (3 * patch * patch + (0 if newer else 1)) + hidden * height * width + norm * hidden),
        Plain(times * hidden, FLOAT32),
        Plain(source.hidden if newer else norm * hidden),
        linear("mm_projector.linear_1", merged, merged, "replicated"),
        linear("mm_projector.linear_2", merged, source.hidden, "replicated"),
    )
    block: Layer = (
        Plain(2 * norm * hidden),
        Linear("wqkv", hidden, (inner,) * 3, "column", bias=not newer, quantized=quantized, lora=False),
        linear("wo", inner, hidden, "row"),
        linear("mlp.fc0", hidden, wide, "column"),
        linear("mlp.fc1", wide, hidden, "row"),
    )
    modality = "image" if newer else "vision_chunk"
    return (
        Tower(items, block, depth, heads, prefix="", layers="vision_tower.encoder.blocks.", modalities=(modality,)),
    )


def _is_compressed(source: Source) -> bool:
    for config in (source.config, source.text):
        section = config.get("quantization_config")
        if isinstance(section, Mapping):
            return section.get("quant_method") == "compressed-tensors"
    return False


_NAMES = (
    ("language_model.layers.", "language_model.model.layers."),
    ("mm_projector.proj.0", "mm_projector.linear_1"),
    ("mm_projector.proj.2", "mm_projector.linear_2"),
)

FAMILIES: dict[str, Family] = {
    "KimiK25ForConditionalGeneration": beside(mla, lambda source: _tower(source, newer=False), _NAMES),
    "KimiK3ForConditionalGeneration": beside(_kimi_linear, lambda source: _tower(source, newer=True), _NAMES),
    "KimiLinearForCausalLM": _kimi_linear,
}
