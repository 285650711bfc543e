"""What each rank holds once the model is loaded: the figure of vLLM's line "Model loading took X GiB memory"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .cards import UNKNOWN_CHIP, chip
from .engine import Card, Engine
from .errors import PlannerError, UnsupportedArchitectureError, short
from .families_encoder import is_pooling
from .mixers import architecture_of
from .model import Model
from .overhead import batch_defaults, mm_limits
from .quantization import BYTES, NONE, Quantizer, Share, allocated, experts_bytes, linear_bytes, quantizer, weight_bytes
from .rules import split_layers
from .structure import build
from .tensors import EAGER_FLOAT32, Experts, Item, Linear, Plain, Structure, Vocabulary

_VOCABULARY_PADDING = 64
# Classes whose `embedding_modules`, their own or an ancestor's, let adapters change embedding and head too
# (vllm/lora/utils.py: get_supported_lora_modules; the same in 0.19 and 0.26). Others adapt linear layers alone.
_ADAPTED_ENDS = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Apertus",
        "Cwm",
        "DeciLM",
        "Ernie4_5",
        "Exaone",
        "Exaone4",
        "ExaoneMoe",
        "FalconH1",
        "Glm",
        "Granite",
        "GraniteMoe",
        "GraniteMoeHybrid",
        "GraniteMoeShared",
        "HyperCLOVAX",
        "IQuestCoder",
        "InternLM3",
        "Jais2",
        "Jamba",
        "LLaMA",
        "Lfm2",
        "Lfm2Moe",
        "Llama",
        "Llama4",
        "Mellum",
        "MiniCPM",
        "MiniCPM3",
        "Mixtral",
        "Nemotron",
        "NemotronH",
        "Param2MoE",
        "PhiMoE",
        "Phi3",
        "Qwen3",
        "Qwen3Moe",
        "Solar",
        "TeleChat2",
        "TeleChat3",
        "TeleFLM",
    )
) | {"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"}
# 0.33 has them in these too; the versions between were not read.
_ADAPTED_ENDS_33 = frozenset(
    f"Qwen3_5{name}"
    for name in ("ForCausalLM", "ForConditionalGeneration", "MoeForCausalLM", "MoeForConditionalGeneration")
)
# Back ends of the exchange between experts that take a part of the tokens from each tensor rank
# (vllm/config/parallel.py: use_sequence_parallel_moe).
_SPREADING = frozenset(
    {
        "allgather_reducescatter",
        "deepep_high_throughput",
        "deepep_low_latency",
        "deepep_v2",
        "flashinfer_nvlink_one_sided",
        "mori",
        "mori_high_throughput",
        "mori_low_latency",
        "nixl_ep",
        "passthrough",
    }
)
# Found in 0.32 and not in 0.26.
_NARROW_TILES = (0, 27)
# From then on as int32; before in the type of the activations.
_WHOLE_ZEROS = (0, 27)
# vLLM's default on cards of 70 GiB and more.
_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class StageWeights:
    """What the fullest rank of one pipeline stage holds after loading."""

    stage: int
    layers: int
    bytes: float


@dataclass(frozen=True)
class _Split:
    """How tensors are spread and how wide they are."""

    tensor: int
    # Ranks that share one expert's width, and ranks that share the experts.
    expert_tensor: int
    expert_ranks: int
    redundant: int
    width: int
    chip: int
    loras: int = 0
    rank: int = 0
    # Of the largest batch.
    tokens: int = 0
    eager: bool = False
    stages: int = 1
    version: tuple[int, int] = (0, 0)
    # Tensor ranks share out the experts' tokens.
    spread: bool = False


def stage_weights(
    model: Model, engine: Engine, draft: Model | None = None, card: Card | None = None
) -> list[StageWeights]:
    """Bytes a rank of each pipeline stage holds, the drafter's and the adapters' slots included.

    vllm/v1/worker/gpu_model_runner.py: load_model. `card` decides the kernels that repack quantized weights.
    """
    structure = build(model)
    if structure.own_until is not None and engine.at_least(*structure.own_until):
        structure = replace(structure, every=(), embedding_everywhere=False, head_everywhere=False)
    if is_pooling(model, engine):
        # models/adapters.py: a pooling model's head is never made.
        structure = replace(structure, head=None)
    split = _split(model, engine, card)
    totals, layers = _stages(structure, quantizer(model, structure, engine), split, engine)
    adapted = _ADAPTED_ENDS | _ADAPTED_ENDS_33 if engine.at_least(0, 33) else _ADAPTED_ENDS
    if split.loras and (architecture_of(model.config) or model.architecture) in adapted:
        # lora/layers/vocal_parallel_embedding.py and logits_processor.py: every rank keeps the whole vocabulary.
        slots = split.loras * split.rank * split.width
        totals[0] += slots * (structure.embedding.rows + structure.embedding.columns) if structure.embedding else 0
        totals[-1] += slots * (structure.head.rows + structure.head.columns) if structure.head else 0
    extra = _drafter(model, structure, engine, draft, card)
    if extra:
        totals[-1] += extra
    return [StageWeights(stage, count, total) for stage, (count, total) in enumerate(zip(layers, totals, strict=True))]


def dtype_bytes(model: Model, engine: Engine) -> int:
    """Bytes of one unquantized weight. `--dtype auto` turns float32 into 16 bits (vllm/config/model.py)."""
    if engine.dtype == "auto":
        return 2
    width = BYTES.get(engine.dtype)
    if width is None:
        raise PlannerError(
            f"dtype = {short(engine.dtype)} is unknown.", f"Known: auto, {', '.join(sorted(BYTES))}.", "dtype"
        )
    return width


def _split(model: Model, engine: Engine, card: Card | None) -> _Split:
    layout = engine.layout
    flat = layout.tensor * layout.data
    redundant = 0
    eplb = engine.flags.get("eplb_config")
    if isinstance(eplb, dict) and engine.flags.get("enable_eplb") is True:
        value = eplb.get("num_redundant_experts")
        redundant = value if isinstance(value, int) and 0 <= value < 1 << 20 else 0
    return _Split(
        tensor=layout.tensor,
        expert_tensor=1 if layout.expert else flat,
        expert_ranks=flat if layout.expert else 1,
        redundant=redundant,
        width=dtype_bytes(model, engine),
        chip=(chip(card) if card else UNKNOWN_CHIP).capability,
        loras=engine.max_loras,
        rank=engine.max_lora_rank,
        eager=engine.enforce_eager,
        stages=layout.pipeline,
        version=engine.version[:2],
        spread=layout.expert and layout.tensor > 1 and layout.data > 1 and _all_to_all(engine) in _SPREADING,
        tokens=batch_defaults(engine, card, model)[1] if card else engine.max_num_batched_tokens or _BATCHED_TOKENS,
    )


def _all_to_all(engine: Engine) -> str:
    value = engine.flags.get("all2all_backend")
    # The older names stand for the default (config/parallel.py).
    return "allgather_reducescatter" if value in (None, "naive", "pplx") else str(value)[:100]


def _stages(structure: Structure, rules: Quantizer, split: _Split, engine: Engine) -> tuple[list[float], list[int]]:
    stages = engine.layout.pipeline
    partition = engine.layout.layer_partition
    if stages > len(structure.layers) or (
        partition and (len(partition), sum(partition)) != (stages, len(structure.layers))
    ):
        raise PlannerError(
            f"{len(structure.layers)} layers can't be laid out on {stages} pipeline stages"
            + (f" as {short(list(partition))}." if partition else "."),
            "Lower pipeline_parallel_size, or make pp_layer_partition add up.",
            "pipeline_parallel_size",
        )
    counts = split_layers(len(structure.layers), stages, engine.layout.layer_partition)
    cache: dict[object, float] = {}
    costs = []
    for index, layer in enumerate(structure.layers):
        key = (id(layer), rules.signature(index))
        if key not in cache:
            cache[key] = _items(layer, f"{structure.prefix}{index}.", rules, split)
        costs.append(cache[key])
    totals = []
    start = 0
    every = _items(structure.every, "", rules, split)
    for count in counts:
        totals.append(sum(costs[start : start + count]) + every)
        start += count
    embedding, head = structure.embedding, structure.head
    table = _vocabulary_bytes(embedding, rules, split) if embedding is not None else 0.0
    totals[0] += _items(structure.first, "", rules, split)
    totals[-1] += _items(structure.last, "", rules, split)
    own_head = _vocabulary_bytes(head, rules, split) if head is not None and not structure.tied else 0.0
    for stage in range(stages):
        # A tied head is the table, so the last stage needs it too.
        if stage == 0 or structure.embedding_everywhere or (structure.tied and stage == stages - 1):
            totals[stage] += table
        if stage == stages - 1 or structure.head_everywhere:
            totals[stage] += own_head
    buffer = structure.token_elements * split.tokens * split.width
    if engine.speculative or not engine.at_least(0, 33):
        totals[-1] += structure.last_token_elements * split.tokens * split.width
    towers = sum(_tower_bytes(structure, rules, split, engine))
    return [total + buffer + towers for total in totals], counts


def _tower_bytes(structure: Structure, rules: Quantizer, split: _Split, engine: Engine) -> Iterable[float]:
    data = engine.flags.get("mm_encoder_tp_mode") == "data"
    limits = mm_limits(engine)
    for tower in structure.towers:
        if engine.language_model_only or all(limits.get(name) == 0 for name in tower.modalities):
            continue
        whole = data or tower.replicated or (tower.heads > 0 and tower.heads % split.tensor != 0)
        own = _Split(1 if whole else split.tensor, 1, 1, 0, split.width, split.chip)
        yield tower.token_elements * split.tokens * split.width
        yield _items(tower.items, tower.prefix, rules, own)
        yield tower.depth * _items(tower.block, f"{tower.prefix}{tower.layers}0.", rules, own)


def _items(items: Iterable[Item], prefix: str, rules: Quantizer, split: _Split) -> float:
    total = 0.0
    for item in items:
        if isinstance(item, Linear):
            total += _linear_item(item, prefix, rules, split)
        elif isinstance(item, Experts):
            total += _experts_item(item, prefix, rules, split)
        elif isinstance(item, Plain):
            wide = item.dtype == EAGER_FLOAT32 and split.eager
            width = 4 if wide else BYTES.get(item.dtype, split.width)
            total += -(-item.elements // split.tensor if item.split else -item.elements) * width
        else:
            total += _vocabulary_bytes(item, rules, split)
    return total


def shape(item: Linear, tensor: int) -> tuple[int, list[int]]:
    """Inputs and output parts of one rank's share."""
    if item.split == "replicated" or tensor == 1:
        return item.inputs, list(item.outputs)
    if item.split == "row":
        return -(-item.inputs // tensor), list(item.outputs)
    if item.split == "column":
        return item.inputs, [-(-part // tensor) for part in item.outputs]
    queries, *rest = item.outputs
    # KV heads that are fewer than the ranks are replicated.
    shares = min(tensor, item.kv_heads) if item.kv_heads else tensor
    return item.inputs, [-(-queries // tensor), *(-(-part // shares) for part in rest)]


def _linear_item(item: Linear, prefix: str, rules: Quantizer, split: _Split) -> float:
    whole = item.whole
    spread = whole is not None and split.spread and split.version >= whole.since
    tensor = 1 if spread and not (whole is not None and whole.one_stage and split.stages > 1) else split.tensor
    inputs, outputs = shape(item, tensor)
    scheme = rules.linear(prefix, item)
    weight = weight_bytes(scheme, inputs * sum(outputs), split.width)
    scales = linear_bytes(scheme, inputs, outputs, split.width, split.chip) - weight
    total = allocated(weight) + scales
    if item.bias:
        total += sum(outputs) * split.width
    if item.absorbed and scheme is not NONE:
        # The absorbed projections are views of an unquantized weight and 16-bit copies of a quantized one.
        total += inputs * sum(outputs) * split.width
    if split.loras and item.lora:
        slots = split.loras * split.rank * split.width
        total += slots * (len(outputs) * inputs + sum(outputs))
    return total


def _experts_item(item: Experts, prefix: str, rules: Quantizer, split: _Split) -> float:
    count = -(-(item.count + split.redundant) // split.expert_ranks)
    intermediate = -(-item.intermediate // split.expert_tensor)
    total = 0.0
    share = Share(count, intermediate, split.width, split.chip, narrow_tiles=split.version >= _NARROW_TILES)
    scheme = rules.experts(prefix, item)
    elements = count * item.hidden * intermediate
    sizes = experts_bytes(scheme, item, share)
    if rules.method == "gptq" and scheme.kind == "int" and not scheme.zeros:
        # Packed zero points stay with the experts of symmetric checkpoints too (quantization/gptq_marlin.py).
        zeros = 4 if split.version >= _WHOLE_ZEROS else split.width
        packed = count * scheme.bits / 32 * zeros
        wide, tall = (-(-size // scheme.group) if scheme.group else 1 for size in (item.hidden, intermediate))
        total += packed * (wide * (2 if item.gated else 1) * intermediate + tall * item.hidden)
    for size, number, biases in zip(sizes, (2 if item.gated else 1, 1), (intermediate, item.hidden), strict=True):
        weight = weight_bytes(scheme, number * elements, split.width)
        if scheme.kind != "mxfp4":
            total += allocated(weight) + size - weight
        elif 90 <= split.chip < 100:
            # Triton's repacked weights and scales are large tensors of their own; the float32 biases are small ones.
            bias = 4 * count * number * biases if item.bias else 0
            total += allocated(weight, whole=True) + allocated(size - weight - bias, whole=True) + bias
        else:
            total += allocated(size, whole=True)
    if split.loras:
        parts = 2 if item.gated else 1
        total += split.loras * split.rank * split.width * count * (parts + 1) * (item.hidden + intermediate)
    return total


def _vocabulary_bytes(item: Vocabulary, rules: Quantizer, split: _Split) -> float:
    rows = -(-item.rows // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    rows = -(-rows // split.tensor)
    scheme = rules.vocabulary(item.name) if item.head else NONE
    size = linear_bytes(scheme, item.columns, [rows], split.width, split.chip)
    return allocated(size) + (rows * split.width if item.bias else 0)


def _drafter(model: Model, structure: Structure, engine: Engine, draft: Model | None, card: Card | None) -> float:
    """Bytes of the drafter on the ranks of the last stage; its embedding and head are the target's own.

    vllm/v1/spec_decode: MTP layers of the checkpoint, or a model of its own.
    """
    if not engine.speculative:
        return 0.0
    if draft is not None:
        alone = replace(
            engine,
            layout=replace(
                engine.layout,
                tensor=engine.layout.draft_tensor or engine.layout.tensor,
                pipeline=1,
                layer_partition=None,
                expert=False,
                data=1,
            ),
            quantization=None,
            speculative={},
            max_loras=0,
        )
        return stage_weights(draft, alone, card=card)[0].bytes
    method = str(engine.speculative.get("method") or "")
    if "mtp" not in method:
        return 0.0
    if not structure.mtp:
        raise UnsupportedArchitectureError(
            f"MTP layers of {structure.architecture:.80} are not known to this version.",
            "Leave speculative_config out, or plan it by hand.",
            "speculative_config",
        )
    split = replace(_split(model, engine, card), loras=0)
    prefix = f"{structure.prefix}{len(structure.layers)}."
    return structure.mtp_layers * _items(structure.mtp, prefix, quantizer(model, structure, engine), split)
