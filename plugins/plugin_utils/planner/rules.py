"""The engine's own rules on parallelism that need only counts, in vLLM's wording, each with a remedy.

Numbers are those of the project's rule list; those from 24 on came later (24 block size, 25 scheduler, 26 graphs).
`check` knows the rules of a layout, `check_engine` those of other flags and of the environment; `remarks` tells what
vLLM does by itself where a rule is not kept (rules 3, 13 and 19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import PlannerError
from .mixers import Mixer, mixers
from .model import Model

if TYPE_CHECKING:
    from .engine import Engine

VOCAB_PADDING = 64
# Stands for "name the tensor sizes that work"; filled in only when somebody reads the violation.
_OTHER_SIZE = "other tensor size"
# Classes without `SupportsPP` (vllm/model_executor/models, 0.33).
_WITHOUT_STAGES = frozenset(
    {
        "AliceAIForCausalLM",
        "AriaForConditionalGeneration",
        "BertForMaskedLM",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertModel",
        "BertSpladeSparseEmbeddingModel",
        "BgeM3EmbeddingModel",
        "CLIPModel",
        "ColBERTJinaRobertaModel",
        "ColBERTLfm2Model",
        "ColBERTModernBertModel",
        "DomynEdgeForCausalLM",
        "DoryForCausalLM",
        "EmbeddingGemma2Model",
        "GPT2ForSequenceClassification",
        "Gemma3TextModel",
        "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration",
        "GteModel",
        "GteNewForSequenceClassification",
        "GteNewModel",
        "HF_ColBERT",
        "HrmTextForCausalLM",
        "IQuestLoopCoderForCausalLM",
        "Idefics3ForConditionalGeneration",
        "JinaForRanking",
        "Lfm2BidirectionalModel",
        "LlamaBidirectionalForSequenceClassification",
        "LlamaBidirectionalModel",
        "Mamba2ForCausalLM",
        "ModernBertForSequenceClassification",
        "ModernBertForTokenClassification",
        "ModernBertModel",
        "ModernVBertModel",
        "NemotronH_Nano_VL_V2",
        "NomicBertModel",
        "PaddleOCRVLForConditionalGeneration",
        "Phi4MMForCausalLM",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "RobertaForTokenClassification",
        "RobertaModel",
        "SiglipModel",
        "SmolVLMForConditionalGeneration",
        "VoyageQwen3BidirectionalEmbedModel",
        "WhisperForConditionalGeneration",
        "XLMRobertaForSequenceClassification",
        "XLMRobertaForTokenClassification",
        "XLMRobertaModel",
        "Zamba2ForCausalLM",
    }
)
# vllm/config/lora.py: MaxLoRARanks.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# vllm/lora/layers/logits_processor.py: create_lora_weights, in 0.19 as in 0.33.
_LORA_VOCABULARY = 258048
# Back ends that take only multiples of a size other than 16 (v1/attention/backends: get_supported_kernel_block_sizes).
_BACKEND_BLOCKS = {
    "CUTLASS_MLA": 128,
    "FLASHINFER_MLA": 32,
    "FLASHINFER_MLA_SPARSE": 32,
    "FLASHMLA": 64,
    "FLASHMLA_SPARSE": 64,
    "FLASH_ATTN_MLA_SPARSE": 64,
    "TOKENSPEED_MLA": 32,
}
_CAPTURES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
# The indexers of sparse attention have one kernel each (v1/attention/backends/mla/indexer.py).
_INDEXER_BLOCKS = {"dsa": 64, "deepseek_v4": 256}
# Methods that left the core, and the first version known to be without them.
_GONE_METHODS = {"gguf": (0, 26), "bitsandbytes": (0, 33)}
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
    # Expert load balancing, and the copies of experts that it adds.
    eplb: bool = False
    redundant_experts: int = 0
    # Adaptive verification of drafts.
    adaptive: bool = False

    @property
    def world(self) -> int:
        """GPUs of one data-parallel rank."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    rule: int
    message: str
    remedy: str
    # The flag that is to be corrected, where it is one.
    flag: str = ""

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


def tensor_sizes(model: Model, limit: int, *, expert: bool = False) -> list[int]:
    """Every tensor-parallel size up to `limit` that breaks no rule, largest first; `expert`: experts stay whole."""
    return [size for size in range(limit, 0, -1) if holds(model, Layout(tensor=size, expert=expert))]


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
    if layout.pipeline > 1 and model.architecture in _WITHOUT_STAGES:
        yield Violation(
            6,
            "Pipeline parallelism is not supported for this model. Supported models implement the `SupportsPP` "
            "interface.",
            "Set parallelism.pipeline to 1, or leave it out.",
        )
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


def _balanced_experts(model: Model, layout: Layout) -> Iterator[Violation]:
    if not layout.eplb:
        if layout.redundant_experts:
            yield Violation(
                10,
                f"num_redundant_experts is set to {layout.redundant_experts} but EPLB is not enabled. Either enable "
                "EPLB or unset num_redundant_experts.",
                "Add enable-eplb: true to args.",
            )
        return
    ranks = layout.data * layout.tensor
    experts = model.experts + layout.redundant_experts
    if not layout.expert:
        yield Violation(
            10,
            "enable_expert_parallel must be True to use EPLB.",
            "Set parallelism.expert to true, or drop enable-eplb.",
        )
    elif ranks <= 1:
        yield Violation(
            10,
            "EPLB requires tensor, prefill-context, or data parallelism, but got "
            f"TP={layout.tensor}, PCP=1, DP={layout.data}.",
            "Drop enable-eplb from args.",
        )
    elif experts % ranks:
        yield Violation(
            10,
            f"EPLB currently only supports even distribution of experts across ranks. Got {experts} experts and "
            f"{ranks} EP ranks.",
            f"Set num_redundant_experts in eplb-config to {-model.experts % ranks}.",
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


@lru_cache(maxsize=16)
def _mixers(model: Model) -> tuple[Mixer, ...]:
    """The distinct mixers of a model; none where they are not known."""
    try:
        found = mixers(model.config) if model.config else []
    except PlannerError:
        return ()
    kinds: dict[Mixer, None] = {}
    for mixer in found:
        kinds[mixer] = None
        if mixer.beside is not None:
            kinds[mixer.beside] = None
    return tuple(kinds)


def _mamba(model: Model, layout: Layout) -> Iterator[Violation]:
    sizes = {(mixer.state_heads, mixer.state_groups) for mixer in _mixers(model) if mixer.kind == "mamba2"}
    if not sizes and model.mamba_heads:
        sizes = {(model.mamba_heads, model.mamba_groups)}
    for heads, groups in sorted(sizes):
        if heads % layout.tensor:
            yield Violation(
                16,
                f"Tensor parallel world size must divide num heads. ({heads} Mamba heads, tensor size {layout.tensor})",
                _OTHER_SIZE,
            )
        if groups > 1 and groups % layout.tensor:
            yield Violation(
                16,
                "If tensor parallel world size does not divide num_groups, then num_groups must equal 1. "
                f"({groups} groups, tensor size {layout.tensor})",
                _OTHER_SIZE,
            )


def _linear_attention(model: Model, layout: Layout) -> Iterator[Violation]:
    for mixer in _mixers(model):
        if mixer.kind not in ("gdn", "kda"):
            continue
        values = mixer.state_heads * mixer.state_head_dim
        sizes = {"value heads": mixer.state_heads}
        if mixer.kind == "gdn":
            sizes["convolution"] = 2 * mixer.state_groups * mixer.state_dim + values
        for what, size in sizes.items():
            if size % layout.tensor:
                yield Violation(
                    17,
                    f"{size} is not divisible by {layout.tensor} (linear attention {what}, tensor size).",
                    _OTHER_SIZE,
                )


def _sinks(model: Model, layout: Layout) -> Iterator[Violation]:
    text = model.text
    heads = [model.heads] if "gpt_oss" in model.model_type or text.get("add_full_attention_sink_bias") else []
    sliding = text.get("swa_num_attention_heads")
    if text.get("add_swa_attention_sink_bias") and isinstance(sliding, int):
        heads.append(sliding)
    for number in heads:
        if number % layout.tensor:
            yield Violation(
                18, f"Attention sink heads ({number}) must be divisible by tp_size ({layout.tensor})", _OTHER_SIZE
            )


def _draft(model: Model, layout: Layout) -> Iterator[Violation]:
    if layout.draft_tensor is not None and layout.draft_tensor not in (1, layout.tensor):
        yield Violation(
            21,
            f"speculative_draft_tensor_parallel_size={layout.draft_tensor} cannot be other value than 1 or target "
            "model tensor_parallel_size",
            f"Set speculative.draft_tensor_parallel_size to 1 or {layout.tensor}.",
        )
    if layout.adaptive and layout.pipeline > 1:
        yield Violation(
            21,
            "Adaptive verification is not currently compatible with pipeline parallelism",
            "Drop enable_adaptive_verification from speculative, or set parallelism.pipeline to 1.",
        )


_SIZE_RULES: tuple[Rule, ...] = (
    _attention_heads,
    _kv_heads,
    _linear_sizes,
    _vocabulary,
    _quantization_groups,
    _fp8_blocks,
    _mamba,
    _linear_attention,
    _sinks,
)
_RULES: tuple[Rule, ...] = (
    *_SIZE_RULES,
    _stages,
    _layer_partition,
    _experts_split,
    _experts_exist,
    _balanced_experts,
    _decode_context,
    _draft,
)


# Rules of other flags


def check_engine(
    model: Model, engine: Engine, environment: Mapping[str, Any] | None = None, *, cpu: bool = False
) -> list[Violation]:
    """Rules from 20 on and what of rule 11 no layout describes: broken by flags or by the environment of the engine."""
    return [
        *_lora(model, engine),
        *_block(model, engine, cpu),
        *_scheduler(engine),
        *_captures(engine),
        *_speculation(model, engine),
        *_method(model, engine),
        *_connector(engine, environment or {}),
        *_prefill_context(engine),
    ]


def _lora(model: Model, engine: Engine) -> Iterator[Violation]:
    flags = engine.flags
    if not flags.get("enable_lora"):
        return
    if model.vocab > _LORA_VOCABULARY:
        yield Violation(
            20,
            f"When using LoRA, vocab size must be <= {_LORA_VOCABULARY} (this model's is {model.vocab}).",
            "Drop enable-lora from args, and serve a checkpoint that the adapter is merged into.",
            "enable_lora",
        )
    if engine.max_lora_rank not in LORA_RANKS:
        ranks = ", ".join(map(str, LORA_RANKS[:-1]))
        best = min((rank for rank in LORA_RANKS if rank >= engine.max_lora_rank), default=LORA_RANKS[-1])
        yield Violation(
            20,
            f"max_lora_rank = {engine.max_lora_rank}: Input should be {ranks} or {LORA_RANKS[-1]}.",
            f"Set max-lora-rank in args to {best}.",
            "max_lora_rank",
        )
    host = _number(flags.get("max_cpu_loras"))
    if host is not None and host < engine.max_loras:
        yield Violation(
            20,
            f"max_cpu_loras ({host}) must be >= max_loras ({engine.max_loras}).",
            f"Set max-cpu-loras to {engine.max_loras} or more in args.",
            "max_cpu_loras",
        )


def _block(model: Model, engine: Engine, cpu: bool) -> Iterator[Violation]:
    size = engine.block_size
    kinds = _mixers(model)
    if size is None or (kinds and not any(mixer.is_attention for mixer in kinds)):
        return
    if cpu:
        # v1/attention/backends/cpu_attn.py; platforms/cpu.py replaces whatever is given where the attention is latent.
        step, why = (1, "") if model.mla else (32, f"No common block size for {size} (CPU_ATTN: [MultipleOf(32)]).")
    else:
        backend = str(engine.flags.get("attention_backend") or "").upper()
        # FlexAttention took any size once.
        step = 16 if engine.at_least(0, 26) else 1
        step = max(step, _BACKEND_BLOCKS.get(backend, 1), *(_INDEXER_BLOCKS.get(each.index_kind, 1) for each in kinds))
        why = (
            f"Selected backend {backend} is not valid for this configuration. Reason: ['block_size not supported']"
            if backend
            else "No valid attention backend found for cuda: block_size not supported."
        )
    if size % step:
        near = max(step, round(size / step) * step)
        yield Violation(
            24,
            f"{why} ({size} is no multiple of {step})",
            f"Set block-size to {near} in args, or leave it out.",
            "block_size",
        )


def _scheduler(engine: Engine) -> Iterator[Violation]:
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    if tokens is not None and seqs is not None and tokens < seqs:
        yield Violation(
            25,
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs}).",
            f"Set max-num-batched-tokens to {seqs} or more in args, or lower max-num-seqs.",
            "max_num_batched_tokens",
        )


def _captures(engine: Engine) -> Iterator[Violation]:
    """vllm/config/vllm.py: _set_cudagraph_sizes."""
    config = engine.flags.get("compilation_config")
    config = config if isinstance(config, Mapping) else {}
    given = {name: engine.flags.get(name, config.get(name)) for name in _CAPTURES}
    sizes, largest = given["cudagraph_capture_sizes"], given["max_cudagraph_capture_size"]
    flag = next((name for name in _CAPTURES if name in engine.flags), "compilation_config")
    if sizes is None or engine.enforce_eager:
        return
    known = [_number(size) for size in sizes] if isinstance(sizes, list | tuple) else [None]
    counts = [size for size in known if size is not None and size > 0]
    if len(counts) < len(known) or not counts:
        yield Violation(
            26,
            "cudagraph_capture_sizes should contain at least one element when using cuda graph, and positive integers.",
            "Correct cudagraph-capture-sizes in args, or leave it out.",
            flag,
        )
    elif largest is not None and not _is_largest(_number(largest), counts, engine.max_num_batched_tokens or 256):
        yield Violation(
            26,
            f"customized max_cudagraph_capture_size(={str(largest)[:60]}) should be consistent with the max value of "
            f"cudagraph_capture_sizes(={max(counts)})",
            "Leave max-cudagraph-capture-size out of args.",
            flag,
        )


def _is_largest(size: int | None, sizes: Sequence[int], tokens: int) -> bool:
    """Sizes beyond a batch are dropped first; `tokens` is the least that a batch may have."""
    return size is not None and size in sizes and not any(size < other <= tokens for other in sizes)


def _speculation(model: Model, engine: Engine) -> Iterator[Violation]:
    speculative = engine.speculative
    if not speculative:
        return
    method, tokens = speculative.get("method"), _number(speculative.get("num_speculative_tokens"))
    if engine.layout.adaptive and engine.flags.get("enable_lora"):
        yield Violation(
            21,
            "Adaptive verification is not currently compatible with LoRA",
            "Drop enable_adaptive_verification from speculative, or enable-lora from args.",
        )
    if method in ("ngram", "[ngram]", "ngram_gpu"):
        low, high = (_number(speculative.get(f"prompt_lookup_{end}")) for end in ("min", "max"))
        if low is not None and high is not None and low > high:
            yield Violation(
                21,
                f"prompt_lookup_min={low} must be <= prompt_lookup_max={high}",
                "Correct prompt_lookup_min or prompt_lookup_max in speculative.",
            )
    elif isinstance(method, str) and method.endswith("mtp"):
        depth = _number(model.text.get("num_nextn_predict_layers", model.text.get("mtp_num_hidden_layers")))
        if depth and tokens and tokens > depth and tokens % depth:
            yield Violation(
                21,
                f"num_speculative_tokens:{tokens} must be divisible by n_predict={depth}",
                f"Set speculative.num_speculative_tokens to a multiple of {depth}.",
            )
    elif method not in ("suffix", "dspark") and speculative.get("model") is None:
        if tokens is not None:
            yield Violation(
                21,
                "num_speculative_tokens was provided but without speculative model.",
                "Set speculative.model, or speculative.method to mtp or ngram.",
            )
    elif tokens is None and method in ("eagle", "eagle3", "draft_model"):
        yield Violation(
            21,
            "A speculative model was provided, but `num_speculative_tokens` was not provided",
            "Set speculative.num_speculative_tokens.",
        )


def _method(model: Model, engine: Engine) -> Iterator[Violation]:
    stored = model.quantization.method if model.quantization is not None else ""
    for name in dict.fromkeys((engine.quantization or "", stored)):
        gone = _GONE_METHODS.get(name)
        if gone is None or not engine.at_least(*gone):
            continue
        remedy = "Install the plugin vllm-gguf-plugin, or use" if name == "gguf" else "Use"
        yield Violation(
            22,
            f"Unknown quantization method: {name}.",
            f"{remedy} a checkpoint quantized to FP8, AWQ, GPTQ or with compressed-tensors: {name} is no longer in "
            "vLLM's core.",
        )


def _connector(engine: Engine, environment: Mapping[str, Any]) -> Iterator[Violation]:
    transfer = engine.flags.get("kv_transfer_config")
    allocator = str(environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))[:1000]
    if not isinstance(transfer, Mapping) or "expandable_segments:True" not in allocator:
        return
    if engine.flags.get("enable_cumem_allocator") or engine.flags.get("enable_sleep_mode"):
        return
    yield Violation(
        23,
        f"KV connector {str(transfer.get('kv_connector'))[:60]} is incompatible with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True unless enable_cumem_allocator is also enabled.",
        "Remove expandable_segments:True from environment.PYTORCH_CUDA_ALLOC_CONF.",
    )


def _prefill_context(engine: Engine) -> Iterator[Violation]:
    size = _number(engine.flags.get("prefill_context_parallel_size")) or 1
    decode, tensor = engine.layout.decode_context, engine.layout.tensor
    if size > 1 and decode not in (1, size, tensor * size):
        yield Violation(
            11,
            "When PCP is enabled, DCP must be disabled, span the PCP axis, or span the full TP x PCP axis. "
            f"Got TP={tensor}, PCP={size}, DCP={decode}; valid DCP sizes are {sorted({1, size, tensor * size})}.",
            "Set decode-context-parallel-size to 1 in args.",
        )


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 12:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# What vLLM does by itself


def remarks(model: Model, layout: Layout) -> list[str]:
    """What a layout costs although vLLM takes it."""
    found = []
    if model.mla and layout.tensor > 1 and layout.decode_context == 1:
        # vllm/config/model.py: get_num_kv_heads.
        found.append(
            f"latent attention: each of the {layout.tensor} tensor ranks holds the whole KV cache, so that tensor "
            "parallelism does not make room for more sequences"
        )
    elif not model.mla and layout.tensor > model.kv_heads:
        found.append(
            f"{model.kv_heads} KV heads on {layout.tensor} tensor ranks: each head is held "
            f"{layout.tensor // model.kv_heads} times"
        )
    quantization = model.quantization
    if (
        model.is_moe
        and quantization is not None
        and quantization.method in _GROUPED_METHODS
        and (quantization.bits or 4) < 16
        and model.hidden % 128
    ):
        # marlin_utils.py: check_moe_marlin_supports_config.
        found.append(f"hidden size {model.hidden} is no multiple of 128: vLLM falls back to slower MoE WNA16 kernels")
    heads = _vision_heads(model)
    if heads and heads % layout.tensor:
        # vllm/model_executor/models/vision.py: is_vit_use_data_parallel.
        found.append(
            "The number of vision attention heads is not divisible by the tensor parallel size. Falling back to data "
            f"parallelism for the vision encoder. ({heads} heads, tensor size {layout.tensor})"
        )
    return found


def _vision_heads(model: Model) -> int | None:
    vision = model.config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    return next((number for key in ("num_heads", "num_attention_heads") if (number := _number(vision.get(key)))), None)


def require_engine(
    model: Model, engine: Engine, environment: Mapping[str, Any] | None = None, *, cpu: bool = False
) -> None:
    """Raise with every broken rule of the other flags."""
    broken = check_engine(model, engine, environment, cpu=cpu)
    if broken:
        keys = {21: "speculative", 22: "model", 23: "environment"}
        raise PlannerError(
            " ".join(violation.message for violation in broken),
            " ".join(dict.fromkeys(violation.remedy for violation in broken)),
            broken[0].flag or keys.get(broken[0].rule, "args"),
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
