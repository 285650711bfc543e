"""The engine's own rules on parallelism that need only counts, in vLLM's wording, each with a remedy.

Numbers are those of the project's rule list; a rule that is missing here is checked by the engine alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .errors import PlannerError
from .model import Model

VOCAB_PADDING = 64
# Stands for "name the tensor sizes that work"; filled in only when somebody reads the violation.
_OTHER_SIZE = "other tensor size"
_GROUPED_METHODS = ("gptq", "gptq_marlin", "awq", "awq_marlin", "compressed-tensors", "auto-round", "auto_gptq")


@dataclass(frozen=True)
class Layout:
    """How one engine is spread."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    decode_context: int = 1
    layer_partition: tuple[int, ...] | None = None
    draft_tensor: int | None = None

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    rule: int
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


Rule = Callable[[Model, Layout], Iterator[Violation]]


def check(model: Model, layout: Layout) -> list[Violation]:
    """All rules that this layout of this model breaks, each with its remedy."""
    broken = [violation for rule in _RULES for violation in rule(model, layout)]
    if not any(violation.remedy == _OTHER_SIZE for violation in broken):
        return broken
    advice = _other_sizes(model, layout)
    return [replace(violation, remedy=advice) if violation.remedy == _OTHER_SIZE else violation for violation in broken]


def holds(model: Model, layout: Layout) -> bool:
    """Whether this layout breaks no rule."""
    return not any(True for rule in _RULES for _ in rule(model, layout))


def tensor_sizes(model: Model, limit: int) -> list[int]:
    """Every tensor-parallel size up to `limit` that breaks no rule, largest first."""
    return [size for size in range(limit, 0, -1) if holds(model, Layout(tensor=size))]


def padded_vocab(model: Model) -> int:
    return -(-model.vocab // VOCAB_PADDING) * VOCAB_PADDING


def split_layers(layers: int, stages: int, partition: tuple[int, ...] | None = None) -> list[int]:
    """Layers of each pipeline stage: what is left over goes to the stages before the last, from the back."""
    if partition is not None:
        return list(partition)
    split = [layers // stages] * stages
    for index in range(2, layers % stages + 2):
        split[-index] += 1
    return split


def _other_sizes(model: Model, layout: Layout) -> str:
    """Name tensor sizes that do work, near the one that was asked."""
    works = [
        size
        for size in range(1, min(max(layout.tensor, 8), 64) + 1)
        if size != layout.tensor and not any(True for rule in _SIZE_RULES for _ in rule(model, Layout(tensor=size)))
    ]
    if not works:
        return "No tensor size suits this model: check its config.json."
    return f"Set parallelism.tensor to one of {', '.join(map(str, works))}, or leave it out."


def _attention_heads(model: Model, layout: Layout) -> Iterator[Violation]:
    if model.heads % layout.tensor:
        yield Violation(
            1,
            f"Total number of attention heads ({model.heads}) must be divisible by tensor parallel size "
            f"({layout.tensor}).",
            _OTHER_SIZE,
        )


def _kv_heads(model: Model, layout: Layout) -> Iterator[Violation]:
    if model.mla:
        # The latent KV is one head that each rank holds whole.
        return
    large, small = max(layout.tensor, model.kv_heads), min(layout.tensor, model.kv_heads)
    if large % small:
        yield Violation(2, f"{large} is not divisible by {small} (KV heads, tensor size).", _OTHER_SIZE)


def _linear_sizes(model: Model, layout: Layout) -> Iterator[Violation]:
    if model.dense_layers and model.intermediate % layout.tensor:
        yield Violation(
            4,
            f"{model.intermediate} is not divisible by {layout.tensor} (intermediate size, tensor size).",
            _OTHER_SIZE,
        )
    if model.shared_intermediate % layout.tensor:
        yield Violation(
            4,
            f"{model.shared_intermediate} is not divisible by {layout.tensor} (shared expert, tensor size).",
            _OTHER_SIZE,
        )


def _vocabulary(model: Model, layout: Layout) -> Iterator[Violation]:
    padded = padded_vocab(model)
    if padded % layout.tensor:
        yield Violation(
            5,
            f"{padded} is not divisible by {layout.tensor} (vocabulary padded to {VOCAB_PADDING}, tensor size).",
            _OTHER_SIZE,
        )


def _stages(model: Model, layout: Layout) -> Iterator[Violation]:
    if layout.pipeline > model.layers:
        yield Violation(
            6,
            f"{layout.pipeline} pipeline stages are more than the model's {model.layers} layers.",
            f"Set parallelism.pipeline to {model.layers} or less.",
        )


def _layer_partition(model: Model, layout: Layout) -> Iterator[Violation]:
    partition = layout.layer_partition
    if partition is None:
        return
    if len(partition) != layout.pipeline:
        yield Violation(
            7,
            f"len(partitions)={len(partition)} does not match pp_size={layout.pipeline}.",
            "VLLM_PP_LAYER_PARTITION needs one number a pipeline stage.",
        )
    elif sum(partition) != model.layers:
        yield Violation(
            7,
            f"sum(partitions)={sum(partition)} does not match num_hidden_layers={model.layers}.",
            "The numbers of VLLM_PP_LAYER_PARTITION must add up to the model's layers.",
        )


def _experts_split(model: Model, layout: Layout) -> Iterator[Violation]:
    shards = layout.data * layout.tensor
    if model.is_moe and not layout.expert and model.moe_intermediate % shards:
        yield Violation(
            8,
            f"{model.moe_intermediate} is not divisible by {shards} (expert intermediate size, data x tensor size).",
            "Set parallelism.expert to true (experts stay whole), or choose another parallelism.tensor.",
        )


def _experts_exist(model: Model, layout: Layout) -> Iterator[Violation]:
    if layout.expert and not model.is_moe:
        yield Violation(
            9,
            "Number of experts in the model must be greater than 0 when expert parallelism is enabled.",
            "Leave parallelism.expert out: this model has no experts.",
        )


def _decode_context(model: Model, layout: Layout) -> Iterator[Violation]:
    size = layout.decode_context
    if size <= 1:
        return
    remedy = "Set decode-context-parallel-size to 1 in args."
    if layout.tensor % size:
        yield Violation(11, f"tp_size={layout.tensor} must be divisible by dcp_size={size}.", remedy)
    elif not model.mla and layout.tensor <= model.kv_heads:
        yield Violation(
            11,
            "Decode context parallelism for GQA/MQA requires `--tensor-parallel-size` "
            f"({layout.tensor}) to be greater than the model's total number of KV heads ({model.kv_heads}).",
            remedy,
        )
    elif not model.mla and size > layout.tensor // model.kv_heads:
        yield Violation(
            11,
            f"`--decode-context-parallel-size` ({size}) exceeds the maximum supported value "
            f"({layout.tensor // model.kv_heads}) for `--tensor-parallel-size` ({layout.tensor}) and "
            f"{model.kv_heads} model KV heads.",
            remedy,
        )
    elif not model.mla and (model.heads // model.kv_heads) % size:
        yield Violation(
            11,
            f"The model's number of query heads per KV head ({model.heads // model.kv_heads}) must be divisible by "
            f"`--decode-context-parallel-size` ({size}) for GQA/MQA.",
            remedy,
        )


def _row_parallel_inputs(model: Model) -> Iterator[tuple[str, int]]:
    if not model.mla:
        yield "o_proj", model.heads * model.head_dim
    if model.dense_layers:
        yield "down_proj", model.intermediate


def _quantization_groups(model: Model, layout: Layout) -> Iterator[Violation]:
    quantization = model.quantization
    if quantization is None or not quantization.group_size or quantization.method not in _GROUPED_METHODS:
        return
    inputs = list(_row_parallel_inputs(model))
    if model.is_moe and not layout.expert:
        inputs.append(("experts.down_proj", model.moe_intermediate))
    for name, size in inputs:
        if size % layout.tensor == 0 and (size // layout.tensor) % quantization.group_size:
            yield Violation(
                12,
                f"Weight input_size_per_partition={size // layout.tensor} for layer '{name}' is not divisible by "
                f"group_size={quantization.group_size}.",
                _OTHER_SIZE,
            )


def _fp8_blocks(model: Model, layout: Layout) -> Iterator[Violation]:
    quantization = model.quantization
    if quantization is None or quantization.block is None or quantization.method != "fp8" or layout.tensor == 1:
        return
    block_n, block_k = quantization.block
    for _name, size in _row_parallel_inputs(model):
        shard = size // layout.tensor
        if size % layout.tensor == 0 and shard % block_k:
            yield Violation(
                14,
                f"Weight input_size_per_partition = {shard} is not divisible by weight quantization block_k = "
                f"{block_k}.",
                _OTHER_SIZE,
            )
    outputs = [] if model.mla else [model.head_dim * max(1, model.kv_heads // layout.tensor)]
    if model.dense_layers:
        outputs.append(model.intermediate // layout.tensor)
    for shard in outputs:
        if shard % block_n:
            yield Violation(
                14,
                f"Weight output_partition_size = {shard} is not divisible by weight quantization block_n = {block_n}.",
                _OTHER_SIZE,
            )
    if model.is_moe and not layout.expert and model.moe_intermediate % layout.tensor == 0:
        shard = model.moe_intermediate // layout.tensor
        if shard % block_n:
            yield Violation(
                15,
                f"The output_size of gate's and up's weight = {shard} is not divisible by weight quantization "
                f"block_n = {block_n}.",
                "Set parallelism.expert to true (experts stay whole), or choose another parallelism.tensor.",
            )


def _mamba(model: Model, layout: Layout) -> Iterator[Violation]:
    if not model.mamba_heads:
        return
    if model.mamba_heads % layout.tensor:
        yield Violation(
            16,
            f"Tensor parallel world size must divide num heads ({model.mamba_heads} Mamba heads, tensor size "
            f"{layout.tensor}).",
            _OTHER_SIZE,
        )
    if model.mamba_groups > 1 and model.mamba_groups % layout.tensor:
        yield Violation(
            16,
            "If tensor parallel world size does not divide num_groups, then num_groups must equal 1 "
            f"({model.mamba_groups} groups, tensor size {layout.tensor}).",
            _OTHER_SIZE,
        )


def _draft(model: Model, layout: Layout) -> Iterator[Violation]:
    if layout.draft_tensor is not None and layout.draft_tensor not in (1, layout.tensor):
        yield Violation(
            21,
            f"speculative_draft_tensor_parallel_size={layout.draft_tensor} cannot be other value than 1 or target "
            "model tensor_parallel_size",
            f"Set speculative.draft_tensor_parallel_size to 1 or {layout.tensor}.",
        )


_SIZE_RULES: tuple[Rule, ...] = (
    _attention_heads,
    _kv_heads,
    _linear_sizes,
    _vocabulary,
    _quantization_groups,
    _fp8_blocks,
    _mamba,
)
_RULES: tuple[Rule, ...] = (
    *_SIZE_RULES,
    _stages,
    _layer_partition,
    _experts_split,
    _experts_exist,
    _decode_context,
    _draft,
)


def require(model: Model, layout: Layout, key: str) -> None:
    """Raise with every broken rule; `key` is what the user pinned."""
    broken = check(model, layout)
    if broken:
        raise PlannerError(
            " ".join(dict.fromkeys(violation.message for violation in broken)),
            " ".join(dict.fromkeys(violation.remedy for violation in broken)),
            key,
        )
