"""The tensors that vLLM creates for a model, by name and shape, and where they lie.

Names are vLLM's, because quantization is decided by name. Sizes are those of the whole model; weights.py splits them
over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL_DTYPE = ""
FLOAT32 = "float32"
# float32 in eager mode, where FlashInfer's kernel turns Q and K; else the model's.
EAGER_FLOAT32 = "float32 if eager"


@dataclass(frozen=True)
class Whole:
    """Each tensor rank holds the layer whole where the ranks share out the experts' tokens (sequence parallelism).

    vllm/config/parallel.py: use_sequence_parallel_moe, and `disable_tp` of the models that follow it.
    """

    since: tuple[int, int] = (0, 0)
    # Not with pipeline stages.
    one_stage: bool = False


@dataclass(frozen=True)
class Linear:
    """One linear layer as vLLM fuses it."""

    name: str
    inputs: int
    # Output sizes of the fused parts, in order.
    outputs: tuple[int, ...]
    # "column", "row", "replicated", or "qkv": column with KV heads that are replicated when they are too few.
    split: str
    # Names in the checkpoint of the fused parts; empty when the layer is not fused.
    parts: tuple[str, ...] = ()
    kv_heads: int = 0
    bias: bool = False
    # False: vLLM never hands this layer to a quantization method.
    quantized: bool = True
    # A bfloat16 copy beside a quantized weight (MLA's absorbed kv_b_proj).
    absorbed: bool = False
    lora: bool = True
    whole: Whole | None = None


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer."""

    name: str
    count: int
    hidden: int
    intermediate: int
    gated: bool = True
    bias: bool = False
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Vocabulary:
    """An embedding or a language-model head, padded to 64 rows and split by rows."""

    name: str
    rows: int
    columns: int
    head: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Plain:
    """A tensor that no quantization touches. `split` tells whether tensor ranks share it."""

    elements: int
    dtype: str = MODEL_DTYPE
    split: bool = False


Item = Linear | Experts | Vocabulary | Plain
Layer = tuple[Item, ...]


@dataclass(frozen=True)
class Tower:
    """An encoder of images or sound with its projector."""

    items: Layer = ()
    # Each layer's items, times `depth`.
    block: Layer = ()
    depth: int = 0
    heads: int = 0
    # Held whole by each tensor rank in any case.
    replicated: bool = False
    prefix: str = "visual."
    # What the names of its layers begin with.
    layers: str = "blocks."
    # Elements of the model's dtype that it keeps for each token of the largest batch.
    token_elements: int = 0
    # Left out when limit_mm_per_prompt is zero for all of these (models/interfaces.py: _mark_tower_model).
    modalities: tuple[str, ...] = ("image", "video")


@dataclass(frozen=True)
class Structure:
    """All tensors of a model, by place."""

    architecture: str
    # Prefix of the decoder layers' names: "model.layers.".
    prefix: str
    layers: tuple[Layer, ...]
    # Held by the first stage only, by the last one only, and by every stage.
    first: Layer = ()
    last: Layer = ()
    every: Layer = ()
    embedding: Vocabulary | None = None
    head: Vocabulary | None = None
    tied: bool = False
    # These classes make the table or the head on every stage, used there or not.
    embedding_everywhere: bool = False
    head_everywhere: bool = False
    # The version from which Transformers' modules serve the model: they have no tables of cosines and sines (`every`),
    # and the embedding and the head are on the stages that use them.
    own_until: tuple[int, int] | None = None
    towers: tuple[Tower, ...] = ()
    # The MTP layers inside the checkpoint, loaded only for speculation.
    mtp: Layer = ()
    mtp_layers: int = 0
    # Elements of the model's dtype that a buffer keeps for each token of the largest batch.
    token_elements: int = 0
    # The same on the last stage alone, from 0.33 on only with a drafter.
    last_token_elements: int = 0
    # Replacements that turn names in the checkpoint into vLLM's (WeightsMapper).
    renamed: tuple[tuple[str, str], ...] = ()
