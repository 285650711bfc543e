"""GPU memory beside weights and KV cache: what torch sees of the card, the profile run's peak, and graph reserves.

vLLM gives the KV cache what is left of `visible x utilization` after the weights, the torch peak of one profile run
with `max_num_batched_tokens` dummy tokens, the growth of memory that torch doesn't manage, and (by version and runner)
an estimate of CUDA graph memory (vllm/v1/worker/gpu_worker.py: determine_available_memory). The profile run happens
without attention metadata, so attention kernels take nothing; what counts is the live set of the widest layer, the
workspaces of mixture-of-experts kernels, the vision tower's run and the sampler's warm-up. Each is derived from the
shapes that these steps allocate. Constants that no source gives say on which measured rows they rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .cards import Chip, chip, visible_gib
from .engine import Card, Engine
from .errors import ModelConfigError
from .families_encoder import is_pooling
from .mixers import Mixer, architecture_of, distinct
from .model import Model

GIB = float(1 << 30)
MIB = float(1 << 20)
# Sizes beyond this occur in no model; config.json is not trusted.
_MAX_SIZE = 1 << 32


def utilization(engine: Engine) -> float:
    """The fraction that is asked for (vllm/config/cache.py: 0.9 before 0.20, then 0.92)."""
    if engine.gpu_memory_utilization is not None:
        return engine.gpu_memory_utilization
    return 0.92 if engine.at_least(0, 20) else 0.9


# --- Batch sizes ------------------------------------------------------------------------------------------------

_BATCHED_BACKENDS = frozenset({"deepep_low_latency", "nixl_ep"})
# vllm/config/scheduler.py: DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP.
_BATCHED_DP_TOKENS = 256
# vllm/model_executor/models/gemma4_mm.py: 32 video frames of 70 soft tokens, two delimiters and a time stamp.
_GEMMA4_VIDEO_TOKENS = 32 * (70 + 2 + 6)


def batch_defaults(engine: Engine, gpu: Card, model: Model) -> tuple[int, int]:
    """`max_num_seqs` and `max_num_batched_tokens` of the API server (vllm/engine/arg_utils.py: get_batch_defaults and
    _set_default_max_num_seqs_and_batched_tokens_args)."""
    memory = visible_gib(gpu)
    seqs, tokens = 256, 2048
    if engine.at_least(0, 28) and memory >= 160:
        seqs, tokens = 1024, 16384
    elif memory >= 70 and "a100" not in gpu.name.lower():
        # From 0.33 on GB10, which has the memory but not the compute, keeps the small values.
        small = engine.at_least(0, 33) and chip(gpu).capability == 121
        seqs, tokens = (256, 2048) if small else (1024, 8192)
    if _batched_dp(engine) and engine.at_least(0, 20):
        tokens = _BATCHED_DP_TOKENS
    if engine.flags.get("performance_mode") == "throughput":
        seqs, tokens = seqs * 2, tokens * 2
    seqs = engine.max_num_seqs or seqs
    length = _length(model, engine)
    if engine.max_num_batched_tokens is None:
        if engine.enable_chunked_prefill is False or (engine.enable_chunked_prefill is None and _encoder_only(model)):
            tokens = max(tokens, length)
        if engine.at_least(0, 21) and model.text.get("use_bidirectional_attention") == "vision":
            # A prefix-LM can't cut an image or a video into chunks, so the largest one has to fit a batch.
            tokens = max(tokens, _GEMMA4_VIDEO_TOKENS)
        tokens = max(1, min(tokens, seqs * length))
    else:
        tokens = engine.max_num_batched_tokens
    if engine.max_num_seqs is None:
        seqs = min(seqs, tokens)
    return seqs, tokens


def _length(model: Model, engine: Engine) -> int:
    """Tokens of the longest request while the run is profiled; `auto` shrinks the length only afterwards."""
    return engine.max_model_len or (model.max_context if engine.auto_length else model.default_context)


def _batched_dp(engine: Engine) -> bool:
    return engine.layout.expert and engine.layout.data > 1 and engine.flags.get("all2all_backend") in _BATCHED_BACKENDS


# --- Which model runner -----------------------------------------------------------------------------------------

# vllm/config/vllm.py: DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES of each version; only 0.22 to 0.28 have such lists.
_V2_DENSE_22 = frozenset({"Qwen3ForCausalLM"})
_V2_DENSE_23 = _V2_DENSE_22 | {"LlamaForCausalLM", "MistralForCausalLM"}
_V2_MOE = frozenset({"DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"})
_V2_26 = _V2_MOE | {"InklingForCausalLM", "InklingForConditionalGeneration", "LongcatFlashNgramForCausalLM"}
_V2_27 = _V2_26 | {"KimiK3ForConditionalGeneration"}
_V2_28 = _V2_27 | {"DeepseekV4ForCausalLM"}
_V2_METHODS = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark"})
# What the v2 runner still leaves to v1 from 0.29 on.
_V1_METHODS = frozenset({"suffix", "custom_class"})


def runner(model: Model, engine: Engine) -> str:
    """ "v1" or "v2": which model runner serves the model (vllm/config/vllm.py: use_v2_model_runner)."""
    method = _method(engine)
    if method == "dspark":
        return "v2"
    if engine.at_least(0, 29):
        late = bool(engine.flags.get("enable_dbo")) or method in _V1_METHODS
        return "v1" if late else "v2"
    if not engine.at_least(0, 22) or is_pooling(model, engine):
        return "v1"
    if method and method not in _V2_METHODS:
        return "v1"
    if method == "eagle3" and engine.layout.pipeline > 1:
        return "v1"
    if any(
        engine.flags.get(name)
        for name in ("enable_dbo", "enable_elastic_ep", "enable_prompt_embeds", "kv_sharing_fast_prefill")
    ):
        return "v1"
    name = architecture_of(model.config) or model.architecture
    if not engine.at_least(0, 24):
        listed = name in (_V2_DENSE_23 if engine.at_least(0, 23) else _V2_DENSE_22)
        quantized = model.quantization is not None or engine.quantization is not None
        return "v2" if listed and not model.is_moe and not quantized else "v1"
    if not engine.at_least(0, 25):
        return "v2" if name in _V2_DENSE_23 | _V2_MOE else "v1"
    lists = {25: _V2_MOE, 26: _V2_26, 27: _V2_27}
    listed = name in lists.get(engine.version[1], _V2_28)
    kinds = model.kinds
    hybrid = any(mixer.is_state or (mixer.beside and mixer.beside.is_state) for mixer in kinds)
    if hybrid and not (listed and engine.at_least(0, 27)):
        return "v1"
    return "v2" if listed or not model.is_moe else "v1"


def _method(engine: Engine) -> str:
    """The speculative method as vLLM folds its spellings."""
    if not engine.speculative:
        return ""
    method = engine.speculative.get("method")
    if not isinstance(method, str):
        return "draft_model"
    return "mtp" if method.endswith("mtp") else method


def _encoder_only(model: Model) -> bool:
    """Whether every token sees the whole sequence, which rules chunked prefill out."""
    return all(mixer.kind == "encoder" for mixer in model.kinds)


# --- The overhead of a stage ------------------------------------------------------------------------------------


class Stage(Protocol):
    """The part of `weights.StageWeights` that is needed here."""

    @property
    def stage(self) -> int: ...

    @property
    def layers(self) -> int: ...


@dataclass(frozen=True)
class StageOverhead:
    """Memory of one rank of a pipeline stage beside weights and KV cache, in GiB."""

    stage: int
    # Torch peak of the profile run above the loaded weights.
    activation_gib: float
    # Growth of memory outside torch since the snapshot at start.
    non_torch_gib: float
    # The CUDA graph estimate that is subtracted; 0 where version or runner subtract none.
    graph_gib: float
    # Half-width that covers about 95 % of cases.
    spread_gib: float
    # Buffers that models and attention back ends reserve while they load: part of "Model loading took", so part of the
    # weights, though no checkpoint holds them.
    loaded_gib: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Run:
    """One profile run: the sizes that every part below needs. Elements are of the model's 2-byte (4-byte) dtype."""

    model: Model
    engine: Engine
    chip: Chip
    runner: str
    seqs: int
    tokens: int
    length: int
    item: int
    hidden: int
    vocab: int
    experts_method: str
    sizes: Mapping[str, int]
    block: int

    @property
    def tensor(self) -> int:
        return self.engine.layout.tensor


def stage_overheads(
    model: Model, engine: Engine, gpu: Card, weights: Sequence[Stage], block: int | None = None
) -> list[StageOverhead]:
    """One `StageOverhead` a stage, so that KV GiB = visible x utilization - (weights + loaded) - the three terms.

    `block`: tokens of an attention block, which hybrids with states make larger than the engine's default.
    """
    run = _run(model, engine, gpu, block or engine.block_size or 64)
    layers = model.mixers
    stages = sorted(weights, key=lambda item: item.stage)
    last = len(stages) - 1
    result = []
    start = 0
    for index, stage in enumerate(stages):
        # The last stage may count a drafter's layers too; they look like the model's own.
        end = len(layers) if index == last else min(len(layers), start + stage.layers)
        activation, notes = _activation(run, layers[start:end], start, index == 0, index == last)
        first_layer, start = start, end
        non_torch, doubt = _non_torch(run)
        graph = _graphs(run, layers[first_layer:end])
        spread = 0.05 + 0.04 * activation + doubt + (0.12 + 0.2 * graph if graph else 0.0)
        if graph and run.tensor > 1:
            # Collectives inside graphs take memory of their own, in no fitted row.
            spread += 0.2
        if run.runner == "v2" and not engine.enforce_eager and not engine.at_least(0, 33):
            # The live set of compiled code rests on few rows; elsewhere the sampler's exact arithmetic is the peak.
            spread += 0.05 + 0.05 * activation
        loaded = sum(_reserved(run, distinct(layers[first_layer:end]))) / GIB
        result.append(
            StageOverhead(
                stage=stage.stage,
                activation_gib=round(activation, 4),
                non_torch_gib=round(non_torch, 4),
                graph_gib=round(graph, 4),
                spread_gib=round(spread, 4),
                loaded_gib=round(loaded, 4),
                notes=tuple(notes),
            )
        )
    return result


def _run(model: Model, engine: Engine, gpu: Card, block: int) -> _Run:
    seqs, tokens = batch_defaults(engine, gpu, model)
    text = model.text
    dtype = engine.dtype if engine.dtype != "auto" else "bfloat16"
    return _Run(
        model=model,
        engine=engine,
        chip=chip(gpu),
        runner=runner(model, engine),
        seqs=min(seqs, tokens),
        tokens=tokens,
        length=_length(model, engine),
        item=4 if dtype in ("float32", "float") else 2,
        hidden=model.hidden,
        vocab=-(-model.vocab // 64) * 64,
        experts_method=_experts_method(model, engine),
        sizes={name: _integer(text, name) for name in _SIZES},
        block=block,
    )


_SIZES = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_topk",
    "moe_latent_size",
    "routed_expert_hidden_size",
    "attn_res_block_size",
)


def _integer(source: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = source.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_SIZE:
        raise ModelConfigError(f"config.json: {name} is not an integer from 0 to {_MAX_SIZE}", key=name)
    return value


def _activation(run: _Run, layers: Sequence[Mixer], start: int, first: bool, last: bool) -> tuple[float, list[str]]:
    """The torch peak: buffers that stay, and the largest of the phases that follow one another."""
    notes: list[str] = []
    has_experts = run.model.is_moe and start + len(layers) > run.model.dense_layers
    kinds = distinct(layers)
    stays = _workspace(run, kinds, has_experts)
    # cuBLAS asks torch for its workspace with the first unquantized matrix product.
    blas = (32.0 if run.chip.capability >= 90 else 8.125) * MIB
    hidden = run.tokens * run.hidden * run.item
    if run.sizes["attn_res_block_size"]:
        # The outputs of the earlier blocks, which every layer attends to (vllm/models/kimi_k3).
        stays += -(-(start + len(layers)) // run.sizes["attn_res_block_size"]) * hidden
    if not first and run.runner == "v1":
        # Hidden states and residual from the stage before (gpu_model_runner.py: _dummy_run keeps them).
        stays += 2 * hidden
    encoded, tower = (0.0, 0.0)
    if first and _profiles_encoder(run):
        encoded, tower = _vision(run)
        if tower:
            notes.append("the vision tower is profiled with the largest input of its family")
    layer = max(_layer(run, mixer, start, has_experts) for mixer in kinds or (_NO_MIXER,))
    forward = stays + encoded + layer + (0.0 if _only_own_kernels(run, kinds, has_experts) else blas)
    if last and _method(run.engine) == "mtp":
        # Embedding, its norm, the norm of the target's output and their projection (models/deepseek_mtp.py).
        forward += 4 * hidden
    if run.runner == "v2" and (not first or (run.model.multimodal and not _text_only(run))):
        # The layers' input lies in a buffer of the runner, which was there before the run.
        forward -= hidden
    phases = {"a layer": forward, "the vision tower": tower}
    if last and not is_pooling(run.model, run.engine):
        phases["the sampler's warm-up"] = stays + encoded + blas + hidden + _sampler(run)
    widest = max(phases, key=lambda name: phases[name])
    notes.append(f"the peak of the profile run is {widest}")
    return phases[widest] / GIB, notes


_NO_MIXER = Mixer("none")


def _only_own_kernels(run: _Run, kinds: Sequence[Mixer], has_experts: bool) -> bool:
    """Whether no layer uses cuBLAS: 1.69 GiB instead of 1.72 for a dense FP8 model on H200 (0.26)."""
    plain = run.experts_method == "plain" or has_experts
    return not plain and all(mixer.is_attention and mixer.kind != "mla" for mixer in kinds)


def _layer(run: _Run, mixer: Mixer, start: int, has_experts: bool) -> float:
    """Bytes that live at once inside the widest layer, without workspaces that stay.

    Eager (models/llama.py and its kin): the caller still holds the layer's input while gate_up (2 x intermediate) and
    its activation (1 x) exist: 3 intermediate + 3 hidden, exact on three H200 rows of 0.26 (0.88, 3.41, 1.69 GiB).
    MLPs that keep gate_up bound until the down projection (models/qwen2.py) hold its output too, and with tensor
    parallelism the all-reduced copy: 1.01 GiB measured for 32B at TP 2. Compiled code holds one intermediate more:
    4 intermediate + 2 hidden + the attention's output, on the compiled H200 row of 0.26 (1.10 GiB), the first stage of
    an H100 row of 0.19 with PP 3 (0.96) and a float32 row of 0.19; around the all-reduce it holds about 5 hidden.
    """
    tensor = run.tensor
    hidden = run.hidden
    heads = max(1, mixer.heads // tensor)
    query, fused = _widths(run, mixer, heads)
    parts = [0.0]
    if run.model.dense_layers > start or not run.model.is_moe:
        width = _mlp_copies(run) * run.model.intermediate / tensor
        quantization = run.model.quantization
        if quantization is not None and quantization.method == "fp8" and quantization.block and run.chip.hopper:
            # DeepGEMM reads the activation in one byte, with a float32 scale for each block beside it.
            width += run.model.intermediate / tensor * (1 + 4 / quantization.block[1]) / run.item
        if not run.engine.enforce_eager:
            parts += [width + 2.0 * hidden + query, 5.0 * hidden + query + fused if tensor > 1 else 0.0]
        elif _rebinds(run.model):
            parts.append(width + 3.0 * hidden)
        else:
            parts.append(width + (5.0 if tensor > 1 else 4.0) * hidden)
    if has_experts:
        # The experts run as one opaque operation: routing, and a shared expert beside it.
        shared = 3 * run.model.shared_intermediate // tensor
        gathered = hidden * run.engine.layout.data if run.engine.layout.data > 1 else 0
        parts.append(5.0 * hidden + query + shared + 2 * run.model.experts + gathered + _expert_scratch(run))
    token = run.tokens * run.item
    return max(max(parts) * token, _mixer_bytes(run, mixer, heads) * token + _mla_dummy(run, mixer, heads))


# vLLM's MLPs of these families have one matrix before the activation instead of a gate and an up projection.
_UNGATED = frozenset(
    {
        "apertus",
        "arcee",
        "bert",
        "bloom",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "nemotron",
        "nemotron_h",
        "opt",
        "phi",
        "roberta",
        "starcoder2",
        "xlm-roberta",
    }
)


def _mlp_copies(run: _Run) -> float:
    """How many times the intermediate size lives at once: the first product and the steps of its activation.

    Compiled code writes the activation of per-tensor and per-token FP8 in one byte; block FP8 quantizes apart.
    """
    if run.model.model_type in _UNGATED:
        return 2.0
    if run.engine.enforce_eager:
        return 3.0
    return 3.5 if run.experts_method == "fp8" else 4.0


def _rebinds(model: Model) -> bool:
    """Whether the MLP frees gate_up before its down projection, as models/llama.py does."""
    return architecture_of(model.config) in ("LlamaForCausalLM", "MistralForCausalLM", "LlamaModel") or (
        not model.architecture and model.model_type in ("llama", "mistral")
    )


def _widths(run: _Run, mixer: Mixer, heads: int) -> tuple[int, int]:
    """Elements a token of Q and of the fused QKV projection, on one rank."""
    if mixer.kind == "mla" and run.sizes["kv_lora_rank"]:
        sizes = run.sizes
        return heads * (sizes["v_head_dim"] or 128), heads * (
            (sizes["qk_nope_head_dim"] or 128) + sizes["qk_rope_head_dim"]
        )
    if mixer.is_state:
        tensor = run.tensor
        inner = max(mixer.inner, mixer.state_heads * mixer.state_head_dim)
        return inner // tensor, (2 * inner + 2 * mixer.state_groups * mixer.state_dim) // tensor
    query = heads * mixer.head_dim
    kv_heads = max(1, mixer.kv_heads // run.tensor)
    return query, query + kv_heads * (mixer.head_dim + (mixer.v_head_dim or mixer.head_dim))


def _mixer_bytes(run: _Run, mixer: Mixer, heads: int) -> float:
    """Elements a token that live while the mixer itself runs: input, residual, projections and its output."""
    query, fused = _widths(run, mixer, heads)
    down = run.sizes["q_lora_rank"] + run.sizes["kv_lora_rank"] if mixer.kind == "mla" else 0
    return 2.0 * run.hidden + query + fused + 2.0 * down


def _mla_dummy(run: _Run, mixer: Mixer, heads: int) -> float:
    """Bytes of the up-projected context that the profile run allocates for latent attention.

    vllm/model_executor/layers/attention/mla_attention.py: one tensor of chunked_prefill_workspace_size tokens (64 Ki
    for all but short models) x heads of the rank x (nope + V); an indexer's dummy logits take 512 MiB at another time.
    """
    sizes = run.sizes
    if mixer.kind != "mla" or not sizes["kv_lora_rank"]:
        return 0.0
    rows = min(max(8 * run.length, 4 * run.seqs * run.block), 64 * 1024)
    if run.engine.at_least(0, 28):
        rows = -(-max(rows, run.block) // run.block) * run.block
    else:
        # A block for each sequence at least: with the long blocks of a hybrid and many sequences, tens of GiB.
        rows = max(rows, run.seqs * run.block)
    width = (sizes["qk_nope_head_dim"] or 128) + (sizes["v_head_dim"] or 128)
    context = float(rows) * heads * width * run.item
    return max(context, 512 * MIB if mixer.index_kind == "dsa" else 0.0)


# --- Mixture of experts -----------------------------------------------------------------------------------------


def _experts_method(model: Model, engine: Engine) -> str:
    """How the experts are stored, as far as the choice of kernel depends on it."""
    quantization = model.quantization
    asked = engine.quantization or ""
    method = (quantization.method if quantization else asked).lower()
    bits = quantization.bits if quantization else None
    if not method:
        return "plain"
    if "mxfp4" in method:
        return "mxfp4"
    if "nvfp4" in method or "fp4" in method:
        return "nvfp4"
    if "fp8" in method or (bits == 8 and method == "compressed-tensors"):
        return "fp8_block" if quantization is not None and quantization.block else "fp8"
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round", "auto_round", "inc", "moe_wna16"):
        return "int4"
    if method == "compressed-tensors":
        return "int4"
    if method == "modelopt":
        return "nvfp4"
    return "plain"


def _expert_sizes(run: _Run) -> tuple[float, int, int, bool]:
    """Rows (tokens x experts a token) that a rank's kernel sees, intermediate and input width, and whether gated."""
    model = run.model
    layout = run.engine.layout
    # Without a batched back end every rank gathers the tokens of all data-parallel ranks.
    tokens = float(run.tokens) * (layout.data if not _batched_dp(run.engine) else 1)
    shards = 1 if layout.expert else layout.tensor * layout.data
    width = max(1, model.moe_intermediate // shards)
    gated = model.model_type not in _UNGATED
    inputs = run.sizes["moe_latent_size"] or run.sizes["routed_expert_hidden_size"] or run.hidden
    return tokens * max(1, model.experts_per_token), width, inputs, gated


def _reserved(run: _Run, kinds: Sequence[Mixer]) -> tuple[float, float]:
    """Bytes that attention back ends reserve while the model loads: in the shared workspace, and beside it.

    FlashMLA sparse on Hopper (from 0.25 on only where FlashAttention cannot): Q of a full batch, and with an FP8 cache
    5 x max_model_len rows to convert
    (v1/attention/backends/mla/flashmla_sparse.py); MLA prefill on Blackwell: FlashInfer's 394 MiB (mla/prefill/*.py).
    Beside it the top-k indices that all sparse layers share (models/deepseek_v2.py).
    """
    workspace = beside = 0.0
    for mixer in kinds:
        if mixer.kind != "mla":
            continue
        if mixer.index_kind in ("dsa", "deepseek_v4"):
            beside = max(beside, 4.0 * run.tokens * run.sizes["index_topk"])
            if mixer.index_kind == "dsa" and run.chip.hopper and not _flash_attention_sparse(run.engine):
                heads = max(1, mixer.heads // run.tensor)
                size = float(run.tokens) * heads * mixer.head_dim * 2
                if run.engine.kv_cache_dtype.startswith("fp8"):
                    size += 5.0 * run.length * mixer.head_dim * 2
                workspace = max(workspace, size)
        elif not mixer.index_kind and run.chip.blackwell:
            workspace = max(workspace, 394 * MIB)
    return workspace, beside


def _flash_attention_sparse(engine: Engine) -> bool:
    """Whether Hopper's first choice for sparse latent attention serves, which reserves nothing (platforms/cuda.py)."""
    sixteen_bits = engine.kv_cache_dtype in ("auto", "float16", "bfloat16")
    return engine.at_least(0, 25) and sixteen_bits and engine.layout.decode_context == 1


def _workspace(run: _Run, kinds: Sequence[Mixer], has_experts: bool) -> float:
    """Bytes by which the shared workspace grows in the run, to stay (vllm/v1/worker/workspace.py).

    Users: the experts' kernels (fused_moe/experts/*.py: workspace_shapes) and the gather buffer of a sparse-attention
    indexer (layers/sparse_attn_indexer.py: 40 x max_model_len rows of the indexer's key and its scale). What was
    reserved before is freed by the growth from 0.32 on; older back ends hold on to it.
    """
    size = _expert_workspace(run) if has_experts else 0.0
    for mixer in kinds:
        if mixer.index_kind == "dsa" and mixer.index_dim:
            size = max(size, 40.0 * run.length * (mixer.index_dim + 4))
    before, _ = _reserved(run, kinds)
    if size <= before:
        return 0.0
    return size - before if run.engine.at_least(0, 32) else size


def _expert_workspace(run: _Run) -> float:
    rows, width, inputs, gated = _expert_sizes(run)
    up = 2 * width if gated else width
    method = run.experts_method
    # Triton: both intermediate caches hold the wider of their operand and the hidden size.
    triton = rows * (max(width, inputs) + max(up, inputs)) * run.item
    # Marlin: likewise, but the second cache is sized for twice the gated width.
    marlin = rows * (max(width, inputs) + max(2 * width, inputs)) * run.item
    flat = rows / max(1, run.model.experts_per_token) * inputs * run.item
    if method == "int4":
        return marlin
    if method == "mxfp4":
        # OpenAI's Triton kernels (Hopper) and TRT-LLM's (Blackwell) keep no workspace of vLLM's.
        return 0.0 if run.chip.hopper or run.chip.blackwell else marlin
    if method == "nvfp4":
        return flat if run.chip.capability >= 100 else marlin
    if run.chip.blackwell:
        return flat
    if method.startswith("fp8") and run.chip.capability < 89:
        return marlin
    if _flashinfer_cutlass(run):
        return flat
    return triton


def _flashinfer_cutlass(run: _Run) -> bool:
    """Block FP8 on Hopper: Triton, or FlashInfer's CUTLASS with expert parallelism (fused_moe/oracle/fp8.py)."""
    layout = run.engine.layout
    return run.experts_method == "fp8_block" and run.chip.hopper and layout.expert and layout.tensor * layout.data > 1


def _expert_scratch(run: _Run) -> float:
    """Elements a token of quantized copies that a kernel makes of its inputs and of the activation."""
    rows, width, inputs, _ = _expert_sizes(run)
    per_token = rows / run.tokens
    if run.chip.blackwell or _flashinfer_cutlass(run):
        # FlashInfer's kernels expand the inputs and keep both products by themselves.
        return per_token * (2 * inputs + 3 * width) if not run.chip.blackwell else per_token * (inputs + width)
    if not run.experts_method.startswith("fp8"):
        return 0.0
    return (inputs + per_token * width) / 2


# --- Sampler ----------------------------------------------------------------------------------------------------


def _sampler(run: _Run) -> float:
    """Bytes of the sampler's warm-up with one row of logits a sequence.

    v1 (gpu_model_runner.py: _dummy_sampler_run): logits in the model's dtype, their float32 copy, probabilities and
    noise: 14 bytes a logit in bf16, plus one row a multiprocessor for the top-k/top-p kernel
    (sample/ops/topk_topp_triton.py). Exact to 0.01 GiB on 0.19 (1.89, 2.21) and 0.26 (2.68, 2.87, 2.39) rows. With a
    drafter the rejection sampler runs over a drafted and a bonus token a sequence (sample/rejection_sampler.py): the
    doubled logits, the target's in float32 and their copy, probabilities, noise and its reciprocal, and the bonus
    token's float32 row: 30 bytes a logit in bf16, exact on an H200 row of 0.26 (8.05 GiB).
    v2 (gpu/model_runner.py): greedy rows without filters. The float32 copy exists up to 0.25; 0.26 works in place; from
    0.27 the copy is made for requests that need it, and from 0.33 a second pass warms all of that up, with top-k and
    top-p from FlashInfer.
    """
    rows = float(run.seqs) * run.vocab
    plain = rows * run.item
    inputs = 2.0 * run.seqs * run.hidden * run.item
    # The parts of the vocabulary are gathered and laid out anew.
    gathered = plain * (2 + 1 / run.tensor) if run.tensor > 1 else plain
    softcap = run.model.text.get("final_logit_softcapping")
    if softcap:
        gathered = max(gathered, 2 * plain)
    if run.runner == "v1":
        if run.seqs < 8:
            return inputs + plain + 9 * 4.0 * rows
        kernel = float(min(run.chip.multiprocessors, run.seqs)) * run.vocab * 4
        # Logits that are float32 already need no copy.
        total = plain + (12 if run.item == 2 else 8) * rows + kernel
        if run.engine.speculative:
            total = 3 * plain + (24 if run.item == 2 else 20) * rows + kernel
        return inputs + max(total, gathered)
    if run.engine.at_least(0, 33):
        return inputs + max(plain + 12 * rows, gathered)
    if not run.engine.at_least(0, 26):
        return inputs + max(plain + 4 * rows, gathered)
    return inputs + gathered


# --- Vision tower -----------------------------------------------------------------------------------------------

# 16 Mi pixels of 32 x 32 (28 x 28 at 12.8 M) a token: the largest image of the Qwen-VL processors, whose limits are
# not in config.json.
_QWEN_IMAGE_TOKENS = 16384
_QWEN_VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def _profiles_encoder(run: _Run) -> bool:
    """Whether the profile run encodes images: v1 always did, v2 from 0.27 on."""
    if _text_only(run) or not isinstance(run.model.config.get("vision_config"), Mapping):
        return False
    if run.engine.flags.get("skip_mm_profiling") or run.engine.flags.get("mm_encoder_only"):
        return False
    return run.runner == "v1" or run.engine.at_least(0, 27)


def _text_only(run: _Run) -> bool:
    """Whether a multimodal model takes text alone (vllm/multimodal/registry.py: supports_multimodal_inputs)."""
    limits = mm_limits(run.engine)
    return run.engine.language_model_only or bool(limits and all(value == 0 for value in limits.values()))


def mm_limits(engine: Engine) -> Mapping[str, Any]:
    """`--limit-mm-per-prompt`, which may be given as JSON."""
    limits = engine.flags.get("limit_mm_per_prompt")
    if isinstance(limits, str) and len(limits) <= 1000:
        try:
            limits = json.loads(limits)
        except (ValueError, RecursionError):
            return {}
    return limits if isinstance(limits, Mapping) else {}


def _vision(run: _Run) -> tuple[float, float]:
    """Bytes of the encoder outputs that stay in the cache until the run ends, and of the tower's own peak.

    vllm/v1/worker/gpu_model_runner.py: profile_run; multimodal/encoder_budget.py. The budget is max_num_batched_tokens
    or the largest item; attention and MLP run uncompiled over all patches at once.
    """
    config = run.model.config
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return 0.0, 0.0
    # Qwen2-VL calls the tower's width embed_dim and its output hidden_size.
    names = ("embed_dim", "hidden_size", "width", "vt_hidden_size")
    width = next((size for size in (_integer(vision, name) for name in names) if size), 1152)
    inner = _integer(vision, "intermediate_size") or _integer(vision, "vt_intermediate_size") or 4 * width
    tokens = run.tokens
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _QWEN_VISION:
        tokens = max(tokens, _QWEN_IMAGE_TOKENS)
    patches = tokens * _patches_per_token(config, vision)
    taps = vision.get("deepstack_visual_indexes")
    copies = 1 + (min(len(taps), 64) if isinstance(taps, list) else 0)
    outputs = float(tokens) * run.hidden * copies * run.item
    shard = 1 if run.engine.flags.get("mm_encoder_tp_mode") == "data" else run.tensor
    live = 3 * width + max(6 * width, 2 * inner) / shard
    patch = _integer(vision, "patch_size") or 14
    pixels = 3 * min(patch, 64) ** 2 * max(1, min(4, _integer(vision, "temporal_patch_size", 1)))
    # v1's profile_run holds the batch of dummy items until it ends: 0.1875 GiB for an image on three H200 rows of 0.26.
    # v2 lets go of it with the encoder's run (gpu/mm/encoder_runner.py: execute_mm_encoder).
    inputs = float(patches) * pixels * run.item
    held = inputs if run.runner == "v1" else 0.0
    return outputs + held, float(patches) * live * run.item + inputs + outputs


def _patches_per_token(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """How many patches of the tower become one token of the language model."""
    merge = _integer(vision, "spatial_merge_size") or _integer(config, "spatial_merge_size")
    if merge:
        return min(merge, 8) ** 2
    kernel = vision.get("merge_kernel_size")
    if isinstance(kernel, list) and len(kernel) == 2 and all(isinstance(n, int) and 0 < n <= 8 for n in kernel):
        return int(kernel[0] * kernel[1])
    pooled = _integer(vision, "pooling_kernel_size")
    if pooled:
        return min(pooled, 8) ** 2
    soft = _integer(config, "mm_tokens_per_image")
    patch = _integer(vision, "patch_size")
    image = vision.get("image_size")
    if soft and patch and isinstance(image, int) and not isinstance(image, bool) and 0 < image <= 8192:
        return max(1, min(64, (image // patch) ** 2 // soft))
    return 4


# --- Outside torch ----------------------------------------------------------------------------------------------

# Kernel modules, cuBLAS and driver state that one process adds after the snapshot, on H200 with 0.26: 0.2246 on nine
# eager rows (up to 0.2266) of either runner, 0.22 for a dense compiled engine, 0.23 to 0.25 for four compiled ones of
# v1; 0.27 on H100 with 0.19.
_MODULES_GIB = 0.225
_MODULES_V1_GIB = 0.24
_MODULES_OLD_GIB = 0.27
# With several ranks the communicators came before the snapshot: 0.0645 (0.26, PP 2 and TP 2 eager), 0.07 (0.19, PP 3).
_PARALLEL_GIB = 0.0645
_MULTICAST_GIB = 0.5
# What one compiled TP 2 start of 0.26 on H200s took for the fused all-reduce: 874 MiB.
_FUSED_GIB = 0.8535


def _non_torch(run: _Run) -> tuple[float, float]:
    """GiB of growth outside torch since the snapshot, and its doubt.

    Compiled engines with TP >= 2 on NVSwitch Hopper or Blackwell fuse all-reduce and RMSNorm with FlashInfer
    (vllm/config/vllm.py: enable_allreduce_rms_fusion). Its symmetric buffers are rounded to 512 MiB of multicast
    memory each: three for the TRT-LLM back end (up to 0.24), one for MNNVL (from 0.25), and one more for the NCCL
    communicator that their exchange opens, which 0.19 shows (2.07 = 0.07 + 4 x 0.5 GiB for TP 2 and TP 4). A start of
    0.26 shows 0.92 in all (TP 2).
    """
    engine = run.engine
    layout = engine.layout
    if layout.world == 1 and not (layout.data > 1 and run.model.is_moe):
        if not engine.at_least(0, 20):
            return _MODULES_OLD_GIB, 0.05
        compiled = run.runner == "v1" and not engine.enforce_eager
        return (_MODULES_V1_GIB if compiled else _MODULES_GIB), 0.05
    base = _PARALLEL_GIB
    if not _fuses_all_reduce(run):
        return base, 0.1
    if not engine.at_least(0, 25):
        return base + 4 * _MULTICAST_GIB, 0.15
    # From 0.29 on the exchange goes over the CPU group; no start was measured.
    return (base + _MULTICAST_GIB, 0.55) if engine.at_least(0, 29) else (base + _FUSED_GIB, 0.25)


def _fuses_all_reduce(run: _Run) -> bool:
    engine = run.engine
    layout = engine.layout
    if layout.tensor not in (2, 4, 8) or not (run.chip.hopper or run.chip.blackwell):
        return False
    if not engine.at_least(0, 20) and (layout.data > 1 or layout.pipeline > 1):
        return False
    # From 0.29 on plain all-reduces use the same workspace, compiled or not.
    return not engine.enforce_eager or engine.at_least(0, 29)


# --- CUDA graphs ------------------------------------------------------------------------------------------------

# v1 estimate: a first capture whose size hardly follows the model, and at least 1 MiB a graph. Fitted on the two H200
# rows of 0.26: 0.64 (48 layers) and 0.58 GiB (24 layers), each with 2 x 51 graphs.
_GRAPH_BASE_GIB = 0.42
_GRAPH_LAYER_GIB = 0.0025
# Hybrids with recurrent states show about this much more, on one row only: 614 blocks of a 27B GDN model in bf16 on an
# H100 NVL (0.25.1).
_GRAPH_STATES_GIB = 0.45
# v2 measures real captures from 0.29 on; captures took 0.80 to 1.03 GiB in the same rows.
_GRAPH_CAPTURED_GIB = 0.55
_GRAPH_CAPTURED_SIZE_GIB = 0.008


def _graphs(run: _Run, layers: Sequence[Mixer]) -> float:
    """GiB of the CUDA graph estimate that is subtracted: by default from 0.21 on (vllm/envs.py), by the v1 runner
    always and by v2 from 0.29 on (gpu/cudagraph_utils.py: profile_cudagraph_memory)."""
    engine = run.engine
    if engine.enforce_eager or not engine.at_least(0, 21) or is_pooling(run.model, engine):
        return 0.0
    sizes = _capture_sizes(run)
    if not sizes:
        return 0.0
    if run.runner == "v1":
        # 1.06 GiB for 64 layers of a dense hybrid, 0.55 for 40 layers of one with experts (H200, 0.26).
        hybrid = any(mixer.is_state for mixer in distinct(layers)) and not run.model.is_moe
        states = _GRAPH_STATES_GIB if hybrid else 0.0
        return _GRAPH_BASE_GIB + states + _GRAPH_LAYER_GIB * len(layers) + 2 * (sizes - 1) / 1024
    if engine.at_least(0, 29):
        return _GRAPH_CAPTURED_GIB + _GRAPH_CAPTURED_SIZE_GIB * sizes
    return 0.0


def _capture_sizes(run: _Run) -> int:
    """How many batch sizes are captured: 1, 2, 4, then every 8 up to 255 and every 16 up to twice the sequences
    (x the tokens a decode step) or 512 (vllm/config/vllm.py: _set_cudagraph_sizes)."""
    largest = min(run.seqs * (1 + run.engine.speculative_tokens) * 2, 512, run.tokens)
    count = sum(1 for size in (1, 2, 4) if size <= largest)
    if largest >= 8:
        count += len(range(8, min(largest + 1, 256), 8))
    if largest >= 256:
        count += len(range(256, largest + 1, 16))
    return count
