"""vLLM's KV cache arithmetic: what one block costs, how many fit, and what the start-up says of it.

Sources (vLLM 0.19 to 0.33): v1/kv_cache_interface.py (pages, blocks a request), v1/core/kv_cache_utils.py and
v1/core/kv_cache_planning.py (groups, checks, texts), platforms/interface.py (block sizes of hybrids),
model_executor/layers/mamba/mamba_utils.py (states), config/compilation.py (the Mamba limit).
Memory is in bytes and lengths are in tokens unless a name says otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .engine import Engine
from .errors import PlannerError, UnsupportedArchitectureError, short
from .mixers import Mixer
from .rules import split_layers

GIB = 1 << 30
DEFAULT_BLOCK = 16

# The first release with a rule, where it lies between the releases that were read.
_TOKENS_FROM_CONCURRENCY = (0, 21, 0)
_IN_FLIGHT_BATCHES = (0, 22, 0)
_LONG_TEXTS = (0, 20, 0)
_PADDING = (0, 20, 0)
_SHARED_INDEXERS = (0, 22, 0)
_MAMBA_LIMIT = (0, 20, 0)
# Page padding, prefix caching for hybrids by default, and the null block in the check, found in 0.32 and not in 0.26.
_LATE = (0, 27, 0)
_PREFILL_CHECKPOINTS = (0, 32, 0)

_ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
}
# A token of sparse latent attention in its packed formats (backends/mla/flashmla_sparse.py).
_PACKED_ROWS = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_SYNCHRONOUS = ("ngram", "suffix", "medusa", "mlp_speculator")
# Types that vLLM knows and whose pages are not described here (config/cache.py: CacheDType).
_UNPRICED = frozenset(
    {
        "fp8_per_token_head",
        "int4_per_token_head",
        "int8_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
        "octave_k3v3",
        "octave_k3v3_compact",
        "octave_k3v4",
        "turboquant_3bit_nc",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_k8v4",
        "ultraquant_4bit",
    }
)
_STATE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_DOCS = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."

# Methods whose drafts are made from the target's hidden states (config/speculative.py: use_eagle).
_HIDDEN_STATE_METHODS = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark"})


@dataclass(frozen=True)
class Cache:
    """The cache of one layer: vLLM's KVCacheSpec."""

    # What may share a group: caches of one family always need the same number of tokens.
    family: tuple[Hashable, ...]
    # "full", "sliding", "chunked" or "state".
    kind: str
    # Tokens a block.
    block: int
    # Bytes a block, padding included.
    page: int
    window: int = 0
    # Blocks that one request holds of a state, beside one every `block` tokens where `grows`.
    slots: int = 0
    grows: bool = False
    # Attention pages may be padded to another size; packed latent rows may not.
    paddable: bool = False

    def blocks(self, length: int, in_flight: int, context: int) -> int:
        """Blocks that one request of `length` tokens may hold (max_memory_usage_bytes / page_size_bytes)."""
        if self.kind == "full":
            return _ceil(_ceil(length, context), self.block)
        if self.kind == "sliding":
            return _ceil(min(self.window - 1 + in_flight, length), self.block) + 1
        if self.kind == "chunked":
            return _ceil(min(self.window + in_flight, length), self.block)
        return self.slots + (_ceil(length, self.block) if self.grows else 0)


@dataclass(frozen=True)
class Group:
    """Layers with one block table. `pages` are the bytes of each layer's page, `stages` where the layers are."""

    caches: tuple[Cache, ...]
    stages: tuple[int, ...]

    @property
    def page(self) -> int:
        return sum(cache.page for cache in self.caches)

    @cached_property
    def kinds(self) -> frozenset[Cache]:
        return frozenset(self.caches)


@dataclass(frozen=True)
class KVResult:
    """What vLLM says after it sized the cache."""

    num_blocks: int
    tokens: int
    concurrency: float
    max_model_len: int
    error: str | None = None


@dataclass(frozen=True)
class KVPlan:
    """The groups of one engine, and the arithmetic over them."""

    version: tuple[int, int, int]
    groups: tuple[Group, ...]
    stages: int
    # Bytes of one block on each stage's ranks.
    block_bytes: tuple[int, ...]
    # Tokens a block of attention has, after hybrids were aligned.
    block_size: int
    # Tokens scheduled but not settled: windows keep them.
    in_flight: int
    decode_context: int
    has_state: bool
    # Full decode CUDA graphs are captured.
    full_graphs: bool
    # Bytes that older versions took for a block of packed groups of each stage when they checked a request.
    packed: tuple[int, ...] = ()

    def request_blocks(self, length: int) -> int:
        """Blocks that one request of `length` tokens takes from the pool."""
        return sum(self._group_blocks(group, length) for group in self.groups)

    def _group_blocks(self, group: Group, length: int) -> int:
        return max(cache.blocks(length, self.in_flight, self.decode_context) for cache in group.kinds)

    def needed(self, stage: int, length: int) -> int:
        """Bytes that one request of `length` tokens needs on a rank of this stage."""
        block = self.packed[stage] if self.packed else self.block_bytes[stage]
        return block * self.request_blocks(length)

    def fitting_length(self, available: int, stage: int, longest: int) -> int:
        """The longest request that fits (vLLM's binary search; 0 if none does)."""
        low, high, best = 1, longest, 0
        while low <= high:
            middle = (low + high) // 2
            if self.needed(stage, middle) <= available:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def size(
        self,
        available: Sequence[float],
        max_model_len: int,
        *,
        auto_length: bool = False,
        max_num_seqs: int | None = None,
        blocks_override: int | None = None,
    ) -> KVResult:
        """Size the cache from the bytes left on the tightest rank of each stage (get_kv_cache_configs)."""
        if len(available) != self.stages:
            raise PlannerError(f"{len(available)} figures of memory were given for {self.stages} stages.")
        memory = [_whole(value) for value in available]
        used = [stage for stage in range(self.stages) if self.block_bytes[stage]]
        if not used:
            # Encoders and models without any cache still have the null block.
            return KVResult(1, 0, 0.0, max_model_len)
        if blocks_override is not None:
            memory = [blocks_override * size for size in self.block_bytes]
        # The block pool keeps one block back for itself.
        reserve = 1 if self.version >= _LATE else 0
        checked = [memory[stage] - reserve * self.block_bytes[stage] for stage in range(self.stages)]
        length = max_model_len
        if auto_length:
            length = min(
                [max_model_len, *(self.fitting_length(checked[stage], stage, max_model_len) for stage in used)]
            )
            if length <= 0:
                return KVResult(
                    0,
                    0,
                    0.0,
                    0,
                    "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. "
                    "Try increasing `gpu_memory_utilization`.",
                )
        for stage in used:
            error = self._check(checked[stage], stage, length)
            if error:
                return self._sized(memory, used, length, error)
        return self._sized(memory, used, length, None, max_num_seqs)

    def _check(self, available: int, stage: int, length: int) -> str | None:
        long_texts = self.version >= _LONG_TEXTS
        if available <= 0:
            note = (
                " (this flag also controls CPU memory reservation on the CPU backend, despite its name)"
                if long_texts
                else ""
            )
            return (
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
                f"the engine{note}. {_DOCS}"
            )
        needed = self.needed(stage, length)
        if needed <= available:
            return None
        fitting = self.fitting_length(available, stage, length)
        estimated = (
            f"Based on the available memory, the estimated maximum model length is {fitting}. " if fitting > 0 else ""
        )
        note = " (which also controls CPU memory on the CPU backend)" if long_texts else ""
        model = "model's" if long_texts else "models's"
        return (
            f"To serve at least one request with the {model} max seq len ({length}), ({_gib(needed)} GiB KV cache is "
            f"needed, which is larger than the available KV cache memory ({_gib(available)} GiB). {estimated}"
            f"Try increasing `gpu_memory_utilization`{note} or decreasing `max_model_len` when initializing the "
            f"engine. {_DOCS}"
        )

    def _sized(
        self, memory: Sequence[int], used: Sequence[int], length: int, error: str | None, seqs: int | None = None
    ) -> KVResult:
        blocks = max(0, min(memory[stage] // self.block_bytes[stage] for stage in used))
        concurrency = blocks / self._concurrency_blocks(length)
        if self.version >= _TOKENS_FROM_CONCURRENCY:
            tokens = int(concurrency * length)
        else:
            smallest = min(cache.block for group in self.groups for cache in group.caches)
            tokens = blocks // len(self.groups) * smallest * self.decode_context
        if (
            error is None
            and seqs is not None
            and self.has_state
            and self.full_graphs
            and seqs > blocks
            and self.version >= _MAMBA_LIMIT
        ):
            error = (
                f"max_num_seqs ({seqs}) exceeds available Mamba cache blocks ({blocks}). Each decode sequence "
                "requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to "
                f"at most {blocks} or increase gpu_memory_utilization."
            )
        return KVResult(blocks, tokens, concurrency, length, error)

    def _concurrency_blocks(self, length: int) -> int:
        if not self.packed:
            return self.request_blocks(length)
        # Groups were weighed by their bytes and measured in pages of the first one.
        weighed = sum(group.page * self._group_blocks(group, length) for group in self.groups)
        return _ceil(weighed, self.groups[0].page)


def kv_plan(
    layers: Sequence[Mixer],
    engine: Engine,
    *,
    dtype: str,
    max_num_batched_tokens: int,
    max_model_len: int,
    checkpoint_kv_dtype: str | None = None,
    capability: int = 90,
    draft: Sequence[Mixer] = (),
    partition: Sequence[int] | None = None,
    new_runner: bool = False,
) -> KVPlan:
    """Group the caches of all layers as vLLM does.

    `dtype` is that of the activations, `checkpoint_kv_dtype` what the checkpoint asks of its cache (`auto` follows it),
    `capability` the GPU's, `draft` the drafter's layers (they sit on the last stage), `partition` the layers of each
    pipeline stage, `new_runner` whether vLLM's second model runner serves the model.
    """
    layout = engine.layout
    if engine.flags.get("kv_cache_dtype_skip_layers"):
        raise UnsupportedArchitectureError(
            "kv_cache_dtype_skip_layers is not known to this version", key="kv_cache_dtype_skip_layers"
        )
    counts = list(partition) if partition is not None else split_layers(len(layers), layout.pipeline)
    owner = [stage for stage, count in enumerate(counts) for _ in range(count)]
    if len(owner) != len(layers):
        raise PlannerError(
            f"sum(partitions)={len(owner)} does not match num_hidden_layers={len(layers)}.", key="pp_layer_partition"
        )
    builder = _Builder(
        engine, layers, dtype, checkpoint=checkpoint_kv_dtype, capability=capability, max_model_len=max_model_len
    )
    caches: list[Cache] = []
    stages: list[int] = []
    for mixer, stage in [*zip(layers, owner, strict=True), *((mixer, layout.pipeline - 1) for mixer in draft)]:
        for cache in builder.caches(mixer):
            if cache.page <= 0:
                raise PlannerError(
                    f"A layer of kind {mixer.kind!r} has no cache left on one of {layout.tensor} tensor ranks.",
                    "Choose a smaller tensor_parallel_size, or another block_size.",
                    "tensor_parallel_size",
                )
            caches.append(cache)
            stages.append(stage)
    hybrid = not engine.disable_hybrid_kv_cache_manager
    # Drafts from the target's hidden states and chunked attention do not share one manager yet (config/vllm.py).
    if engine.speculative.get("method") in _HIDDEN_STATE_METHODS and any(mixer.kind == "chunked" for mixer in layers):
        hybrid = False
    # A connector switched the manager off before connectors could say that they support it.
    if engine.flags.get("kv_transfer_config") and engine.version < _PADDING:
        hybrid = False
    groups = _groups(caches, stages, engine.version, hybrid=hybrid)
    return KVPlan(
        version=engine.version,
        groups=tuple(groups),
        stages=layout.pipeline,
        block_bytes=tuple(_block_bytes(groups, stage, engine.version) for stage in range(layout.pipeline)),
        block_size=builder.block,
        in_flight=_in_flight(engine, max_num_batched_tokens, new_runner=new_runner),
        decode_context=layout.decode_context,
        has_state=any(cache.kind == "state" for cache in caches),
        full_graphs=_full_graphs(engine),
        packed=_packed_blocks(groups, layout.pipeline) if engine.version < _LATE else (),
    )


def kv_dtype(engine: Engine, checkpoint: str | None) -> str:
    """`kv_cache_dtype` with `auto` resolved to what the checkpoint asks for (utils/torch_utils.py)."""
    if engine.kv_cache_dtype == "auto" and checkpoint:
        return checkpoint
    return engine.kv_cache_dtype


def checkpoint_kv_dtype(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> str | None:
    """The cache dtype that a quantized checkpoint asks for, or None.

    `beside` is its hf_quant_config.json. utils/torch_utils.py: get_kv_cache_quant_algo_string, and for
    compressed-tensors model_executor/layers/attention/attention.py.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    text = config.get("text_config")
    if not found and isinstance(text, Mapping):
        found = text.get("quantization_config")
    found = found or beside or config.get("hf_quant_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method") or "")
    inner = found.get("quantization")
    if method.startswith("modelopt") or isinstance(inner, Mapping):
        sources = [source for source in (inner, found) if isinstance(source, Mapping)]
        named = [source.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo") for source in sources]
        wanted = next((value for value in named if value), None)
        if isinstance(wanted, Mapping):
            # Only static FP8 and FP4 are known; anything else stays with the model's own dtype.
            bits = wanted.get("num_bits") if wanted.get("type") == "float" else None
            wanted = "fp8" if bits == 8 and wanted.get("dynamic") is False else "nvfp4" if bits == 4 else None
        return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(wanted.lower()) if isinstance(wanted, str) else None
    return "fp8" if method.replace("_", "-") == "compressed-tensors" and found.get("kv_cache_scheme") else None


class _Builder:
    """Turns mixers into caches. What it needs of the whole model is computed once."""

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[Mixer],
        dtype: str,
        *,
        checkpoint: str | None,
        capability: int,
        max_model_len: int,
    ) -> None:
        self.engine = engine
        self.version = engine.version
        self.padding = engine.version >= _PADDING
        self.tensor = engine.layout.tensor
        self.activation = _element(dtype, "dtype")
        self.dtype = kv_dtype(engine, checkpoint)
        self.major = capability // 10
        self.max_model_len = max_model_len
        self.known: dict[int, tuple[Cache, ...]] = {}
        distinct = list({id(mixer): mixer for mixer in layers}.values())
        states = [state for mixer in distinct for state in (mixer, mixer.beside) if state and state.is_state]
        attention = [mixer for mixer in distinct if mixer.is_attention]
        self.mode = self._state_mode(states)
        self.checkpoint_slots, alignment = self._checkpoints(states)
        self.state_page: int | None = None
        self.block = engine.block_size or self._preferred_block(attention)
        self.state_block = self.block if self.mode != "none" else max_model_len
        if states and attention:
            self._align(states, attention, alignment)

    def caches(self, mixer: Mixer) -> tuple[Cache, ...]:
        key = id(mixer)
        if key not in self.known:
            self.known[key] = tuple(self._caches(mixer))
        return self.known[key]

    def _caches(self, mixer: Mixer) -> list[Cache]:
        if mixer.shares_kv_with is not None or mixer.kind in ("none", "encoder"):
            found: list[Cache] = []
        elif mixer.is_state:
            found = [self._state(mixer)]
        elif mixer.index_kind == "deepseek_v4":
            found = self._deepseek_v4(mixer)
        else:
            found = [self._attention(mixer), *self._indexer(mixer)]
        if mixer.beside is not None:
            found += self._caches(mixer.beside)
        return found

    # --- attention --------------------------------------------------------------------------------------------

    def _row(self, mixer: Mixer) -> int:
        """Bytes of one token in one layer on one rank."""
        if mixer.kind == "mla":
            packed = self._packed(mixer)
            if packed in _PACKED_ROWS:
                return _PACKED_ROWS[packed]
            return mixer.head_dim * self._element()
        heads = max(1, mixer.kv_heads // self.tensor)
        sizes = (mixer.head_dim, mixer.v_head_dim)
        if self.dtype.startswith("nvfp4"):
            # Packed values and one scale for 16 of them.
            return heads * sum(size // 2 + size // 16 for size in sizes)
        if self.dtype.endswith("_per_token_head"):
            halves = 2 if self.dtype.startswith("int4") else 1
            return heads * sum(size // halves + 4 for size in sizes)
        return heads * sum(sizes) * self._element()

    def _element(self) -> int:
        return self.activation if self.dtype == "auto" else _element(self.dtype, "kv_cache_dtype")

    def _packed(self, mixer: Mixer) -> str:
        """The format of a latent row: sparse kernels have their own (mla_attention.py)."""
        if not mixer.index_dim or self.dtype in _PACKED_ROWS:
            return self.dtype
        quantized = self.dtype not in ("auto", "bfloat16", "float16", "float32")
        if self.major == 12:
            return "fp8_ds_mla" if self.dtype in ("auto", "fp8", "fp8_e4m3") else self.dtype
        # Blackwell data-centre cards prefer FlashInfer's kernel, which takes plain FP8 rows.
        return "fp8_ds_mla" if quantized and self.major != 10 else self.dtype

    def _attention(self, mixer: Mixer) -> Cache:
        window = 0 if self.engine.disable_sliding_window else (mixer.window or 0)
        kind = mixer.kind if window and mixer.kind in ("sliding", "chunked") else "full"
        block = self.block
        if kind == "sliding" and not self.padding:
            # Versions without head_size_v in this spec took V to be as wide as K.
            mixer = replace(mixer, v_head_dim=mixer.head_dim)
        elif kind == "sliding" and self.version < _LATE:
            # Windows had the kernel's smallest block, whatever --block-size said.
            block = DEFAULT_BLOCK
        family: tuple[Hashable, ...] = (kind, window) if window and kind != "full" else ("full",)
        return Cache(family, kind, block, block * self._row(mixer), window, paddable=mixer.kind != "mla")

    def _indexer(self, mixer: Mixer) -> list[Cache]:
        if not mixer.index_dim or (mixer.index_shared and self.version >= _SHARED_INDEXERS):
            return []
        # Bfloat16, or FP8 values and a float32 scale for each 128 of them (models/deepseek_v2.py).
        dim = mixer.index_dim
        row = dim * 2 if mixer.index_kind == "minimax_m3" else dim + dim // 128 * 4
        return [Cache(("full",), "full", self.block, self.block * row)]

    def _deepseek_v4(self, mixer: Mixer) -> list[Cache]:
        """A window, compressed rows, their index keys, and the compressors' running states (models/deepseek_v4)."""

        def page(size: int) -> int:
            return _ceil(size, 576) * 576

        def window(block: int, size: int, tokens: int) -> Cache:
            return Cache(("sliding_mla", block, tokens), "sliding", block, page(size), tokens)

        # 448 bytes without position, 128 with, 8 of scales.
        found = [window(64, 64 * 584, mixer.window or 0)]
        ratio = mixer.compress
        if ratio:
            found.append(Cache(("full",), "full", self.block, page(self.block // ratio * 584)))
            overlap = 2 if ratio == 4 else 1
            block = 4 if ratio == 4 else 8
            found.append(window(block, block * 2 * overlap * mixer.head_dim * 4, overlap * ratio))
            if mixer.index_dim:
                key = mixer.index_dim + mixer.index_dim // 128 * 4
                found.append(Cache(("full",), "full", self.block, page(self.block // ratio * key)))
                found.append(window(block, block * 2 * overlap * mixer.index_dim * 4, overlap * ratio))
        return found

    def _preferred_block(self, attention: Sequence[Mixer]) -> int:
        """The block size that the backend prefers (AttentionBackend.get_preferred_block_size)."""
        if any(mixer.index_kind == "deepseek_v4" for mixer in attention):
            return 256
        if any(mixer.index_kind == "minimax_m3" for mixer in attention):
            return 128
        if any(mixer.index_kind == "dsa" for mixer in attention):
            return 64
        if not any(mixer.kind == "mla" for mixer in attention):
            return DEFAULT_BLOCK
        if self.major == 10:
            return 32
        quantized = self.dtype not in ("auto", "bfloat16", "float16")
        return 64 if self.major == 9 and quantized else DEFAULT_BLOCK

    # --- states -----------------------------------------------------------------------------------------------

    def _state_mode(self, states: Sequence[Mixer]) -> str:
        """How states are kept for prefix caching (models/config.py: MambaModelConfig)."""
        caching = self.engine.enable_prefix_caching
        if caching is None:
            caching = self.version >= _LATE
        if not states or not caching:
            return "none"
        asked = self.engine.mamba_cache_mode
        if self.version >= _LATE or asked == "align":
            return "align"
        return "all" if all(state.kind in ("mamba1", "mamba2") for state in states) else "align"

    def _checkpoints(self, states: Sequence[Mixer]) -> tuple[int, int]:
        """Extra blocks a request for states inside a prefill, and the token grid that they need."""
        if self.mode != "align" or not states:
            return 0, 1
        if all(state.kind == "mamba2" for state in states) and self.version >= _PREFILL_CHECKPOINTS:
            return 1, 1
        flash = self.major in (9, 10, 12)
        if flash and all(state.exports for state in states) and self.version >= _PREFILL_CHECKPOINTS:
            return 1, 1
        flash_infer = flash and all(
            state.kind == "gdn" and (self.major == 9 or state.state_dim == 128) for state in states
        )
        if flash_infer and self.version >= (0, 33, 0):
            return 1, 64
        return 0, 1

    def _state_bytes(self, mixer: Mixer) -> int:
        """Bytes of one request's state in one layer on one rank (mamba_utils.py)."""
        tensor, spec = self.tensor, self.engine.speculative_tokens
        conv_type = self._state_element(self.engine.mamba_cache_dtype, self.activation)
        asked = self.engine.mamba_ssm_cache_dtype
        if asked == "auto" and mixer.state_dtype is not None:
            asked = mixer.state_dtype
        kernel = mixer.conv_kernel - 1
        if mixer.kind == "mamba2":
            groups = mixer.state_groups
            if groups % tensor:
                groups += tensor - groups
            conv = (mixer.inner + 2 * groups * mixer.state_dim) // tensor * (kernel + spec)
            state = mixer.state_heads // tensor * mixer.state_head_dim * mixer.state_dim
        elif mixer.kind == "gdn":
            channels = 2 * mixer.state_dim * mixer.state_groups + mixer.inner
            conv = channels // tensor * (kernel + spec)
            state = mixer.state_heads // tensor * mixer.state_head_dim * mixer.state_dim
        elif mixer.kind == "kda":
            conv = 3 * mixer.inner // tensor * (kernel + (spec if self.version >= _LATE else 0))
            state = mixer.state_heads // tensor * mixer.state_head_dim * mixer.state_dim
            # Its recurrent state is float32 unless told otherwise.
            return conv * conv_type + state * self._state_element(asked if self.version >= _LATE else "auto", 4)
        elif mixer.kind == "mamba1":
            conv = mixer.inner // tensor * kernel
            state = mixer.inner // tensor * mixer.state_dim
        elif mixer.kind == "lightning":
            return mixer.state_heads // tensor * mixer.state_head_dim * mixer.state_dim * conv_type
        else:
            return mixer.inner // tensor * kernel * conv_type
        return conv * conv_type + state * self._state_element(asked, conv_type)

    def _state_element(self, name: str, default: int) -> int:
        if name == "auto":
            return default
        if name not in _STATE_BYTES:
            raise PlannerError(f"Mamba cache dtype {name!r:.60} is not known.", key="mamba_ssm_cache_dtype")
        return _STATE_BYTES[name]

    def _state(self, mixer: Mixer) -> Cache:
        size = self._state_bytes(mixer)
        page = max(size, self.state_page or 0)
        spec = self.engine.speculative_tokens
        # With "all", older versions forgot the blocks of speculated tokens.
        slots = {"none": 1 + spec, "align": 2 + spec + self.checkpoint_slots, "all": spec if self.padding else 0}
        # Pages that were padded to one size are of one kind, whatever their states.
        family = ("state", size if self.state_page is None else 0, spec)
        return Cache(family, "state", self.state_block, page, slots=slots[self.mode], grows=self.mode == "all")

    def _align(self, states: Sequence[Mixer], attention: Sequence[Mixer], alignment: int) -> None:
        """Grow the attention block until its page holds a state, and pad states to it (_align_hybrid_block_size)."""
        size = max(self._state_bytes(state) for state in states)
        if not size:
            return
        mla = any(mixer.kind == "mla" for mixer in attention)
        if not self.padding:
            kernel = 64 if mla else 16
        else:
            kernel = max(self.block, 128 if mla and self.version >= _LATE else self.block)
        if self.mode == "align":
            kernel = math.lcm(kernel, alignment)
        # vLLM takes the model's own head count and size, those of its first attention layer.
        row = self._row(attention[0])
        if self.mode == "all":
            step = math.lcm(max(state.chunk for state in states) or 2048, kernel)
            block = step * _ceil(_ceil(size, row), step)
            self.state_block = block
        else:
            block = kernel * _ceil(size, kernel * row)
        self.block = max(self.block, block)
        if self.mode == "align":
            self.state_block = self.block
        self.state_page = self.block * row


def _element(name: str, key: str) -> int:
    if name in _ELEMENT_BYTES:
        return _ELEMENT_BYTES[name]
    if name in _UNPRICED or name in _PACKED_ROWS:
        raise UnsupportedArchitectureError(f"the memory of {key} {name} is not known to this version", key=key)
    known = ", ".join(sorted({"auto", *_ELEMENT_BYTES, *_PACKED_ROWS, *_UNPRICED} - {"half", "float", "float32"}))
    raise PlannerError(f"{key} = {short(name)} is no type of vLLM's cache.", f"Use one of {known}.", key)


# --- groups -------------------------------------------------------------------------------------------------------


def _groups(
    caches: Sequence[Cache], stages: Sequence[int], version: tuple[int, int, int], *, hybrid: bool
) -> list[Group]:
    """get_kv_cache_groups: one group, or several of as many layers each that share the pool."""
    if not caches:
        return []
    if not hybrid and any(cache.kind == "full" for cache in caches):
        caches = [_as_full(cache) for cache in caches]
    if len({(cache.family, cache.block) for cache in caches}) == 1:
        return [Group(tuple(caches), tuple(stages))]
    if not hybrid:
        raise PlannerError(
            "Failed to promote local KV cache specs to one unified type."
            if version >= _LATE
            else "Hybrid KV cache manager is disabled but failed to convert the KV cache specs to one unified type.",
            "Leave the hybrid KV cache manager on for this model.",
            "disable_hybrid_kv_cache_manager",
        )
    if any(cache.family[0] == "sliding_mla" for cache in caches):
        return _packed_groups(caches, stages, version)
    return _equal_groups(_one_page(caches, version), stages)


def _as_full(cache: Cache) -> Cache:
    """Without the hybrid manager windows are allocated in full (unify_hybrid_kv_cache_specs)."""
    if cache.kind in ("sliding", "chunked"):
        return replace(cache, family=("full",), kind="full", window=0)
    return cache


def _one_page(caches: Sequence[Cache], version: tuple[int, int, int]) -> list[Cache]:
    """unify_kv_cache_spec_page_size: smaller pages get more tokens, or padding where that doesn't work out."""
    largest = max(cache.page for cache in caches)
    known: dict[Cache, Cache] = {}
    result = []
    for cache in caches:
        if cache not in known:
            known[cache] = _grown(cache, largest, version)
        result.append(known[cache])
    return result


def _grown(cache: Cache, page: int, version: tuple[int, int, int]) -> Cache:
    if cache.page == page:
        return cache
    padding = version >= _PADDING
    if cache.kind == "state" and padding:
        return replace(cache, page=page)
    if page % cache.page == 0:
        return replace(cache, page=page, block=cache.block * (page // cache.page))
    if cache.paddable and padding:
        return replace(cache, page=page)
    raise UnsupportedArchitectureError(
        "The page size of the layer is not divisible by the maximum page size. Cannot unify by adjusting block_size."
    )


def _equal_groups(caches: Sequence[Cache], stages: Sequence[int]) -> list[Group]:
    """_get_kv_cache_groups_uniform_page_size: groups of the smallest kind's size, or of the largest's if it is near."""
    kinds: dict[Cache, list[int]] = {}
    for index, cache in enumerate(caches):
        kinds.setdefault(cache, []).append(index)
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups = []
    for cache, members in kinds.items():
        number = _ceil(len(members), size)
        for first in range(number):
            part = members[first::number]
            groups.append(Group((cache,) * len(part), tuple(stages[index] for index in part)))
    return groups


def _packed_groups(caches: Sequence[Cache], stages: Sequence[int], version: tuple[int, int, int]) -> list[Group]:
    """DeepSeek-V4: pages of several sizes side by side in a block (_get_kv_cache_groups_uniform_groups)."""
    buckets: dict[tuple[Hashable, ...], list[int]] = {}
    for index, cache in enumerate(caches):
        buckets.setdefault((*cache.family, cache.block), []).append(index)
    full = next((key for key in buckets if key[0] == "full"), None)
    if full is None:
        raise UnsupportedArchitectureError("a model with windows of latent attention only is not known to this version")
    keys = [full, *(key for key in buckets if key != full)] if version < _LATE else list(buckets)
    repeats = [_repeats(caches, buckets[key]) for key in keys]
    mixed = [
        count
        for key, count in zip(keys, repeats, strict=True)
        if len({caches[index].page for index in buckets[key]}) > 1
    ]
    floor = repeats[0] if version < _LATE else max(mixed, default=0)
    size = _approximate_gcd(repeats, floor) if floor else 0
    sizes = sorted({caches[index].page for index in buckets[full]})
    groups = []
    for key, count in zip(keys, repeats, strict=True):
        members = buckets[key]
        number = _ceil(count, size) if size and key != full else 1
        by_page: dict[int, list[int]] = {}
        for index in members:
            by_page.setdefault(caches[index].page, []).append(index)
        if key == full or number == 1:
            parts = [members]
        else:
            patterns = list(zip(*by_page.values(), strict=True))
            parts = [[index for pattern in patterns[first::number] for index in pattern] for first in range(number)]
        for part in parts:
            chosen = [caches[index] for index in part]
            if key != full and version < _LATE:
                # Pages of windows were padded to one of the sizes that compressed rows have.
                padded = {
                    identity: replace(
                        cache, page=min((size for size in sizes if size >= cache.page), default=cache.page)
                    )
                    for identity, cache in {id(cache): cache for cache in chosen}.items()
                }
                chosen = [padded[id(cache)] for cache in chosen]
            groups.append(Group(tuple(chosen), tuple(stages[index] for index in part)))
    return groups


def _repeats(caches: Sequence[Cache], members: Sequence[int]) -> int:
    counts: dict[int, int] = {}
    for index in members:
        counts[caches[index].page] = counts.get(caches[index].page, 0) + 1
    return max(counts.values())


def _approximate_gcd(values: Sequence[int], floor: int) -> int:
    """The group size of least padding, the larger of two that tie."""
    return max(range(max(1, floor), max(*values, floor) + 1), key=lambda d: (-sum(-value % d for value in values), d))


def _block_bytes(groups: Sequence[Group], stage: int, version: tuple[int, int, int]) -> int:
    """Bytes of one block on this stage: the layers of the largest group there (_pool_bytes_per_block)."""
    here = [
        [cache.page for cache, owner in zip(group.caches, group.stages, strict=True) if owner == stage]
        for group in groups
    ]
    if version < _LATE and len(groups) > 1 and any(len(set(pages)) > 1 for pages in here):
        # Each page size has as many slots as the group with most pages of that size.
        slots: dict[int, int] = {}
        for pages in here:
            for page in set(pages):
                slots[page] = max(slots.get(page, 0), pages.count(page))
        return sum(page * count for page, count in slots.items())
    return max((sum(pages) for pages in here), default=0)


def _packed_blocks(groups: Sequence[Group], stages: int) -> tuple[int, ...]:
    """One page of each size of the first group, as often as the fullest group repeats its commonest size.

    _max_memory_usage_bytes_from_groups; differs a little from what a block takes. Empty for groups that aren't packed.
    """
    if len(groups) < 2 or all(len(group.kinds) == 1 for group in groups):
        return ()
    blocks = []
    for stage in range(stages):
        here = [
            [cache.page for cache, owner in zip(group.caches, group.stages, strict=True) if owner == stage]
            for group in groups
        ]
        repeats = max((max(map(pages.count, set(pages)), default=0) for pages in here), default=0)
        blocks.append(repeats * sum(set(here[0])))
    return tuple(blocks)


# --- the engine's own limits --------------------------------------------------------------------------------------


def _in_flight(engine: Engine, batched: int, *, new_runner: bool) -> int:
    """Tokens that may be scheduled and not settled (config/vllm.py: max_in_flight_tokens)."""
    if engine.version < _IN_FLIGHT_BATCHES:
        return batched
    stages = engine.layout.pipeline
    method = str(engine.speculative.get("method", ""))[:100]
    # Drafters that need the sampled tokens on the host, and pooling, keep the scheduler synchronous.
    late = engine.version >= _LATE
    waits = engine.runner == "pooling" or (
        not (late and new_runner) and (method in _SYNCHRONOUS or (method == "draft_model" and not late))
    )
    if engine.flags.get("async_scheduling") is False or engine.flags.get("no_async_scheduling") is True or waits:
        return batched * stages
    if new_runner:
        return batched * (stages + 1)
    return batched * (2 if stages == 1 else stages)


def _full_graphs(engine: Engine) -> bool:
    """Whether decode steps are captured whole, as is the default (config/compilation.py: has_full_cudagraphs)."""
    if engine.enforce_eager or engine.flags.get("optimization_level") in (0, 1, "0", "1"):
        return False
    compilation = engine.flags.get("compilation_config")
    if isinstance(compilation, str):
        try:
            compilation = json.loads(compilation)
        except (ValueError, RecursionError) as error:
            raise PlannerError("compilation_config is not JSON.", key="compilation_config") from error
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, Mapping) else None
    return not isinstance(mode, str) or mode.upper() not in ("NONE", "PIECEWISE")


def _ceil(value: int, step: int) -> int:
    return -(-value // step)


def _gib(value: int) -> str:
    return f"{round(value / GIB, 2)}"


def _whole(value: float) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PlannerError(f"{value!r:.60} is no amount of memory in bytes.")
    return math.floor(value)
