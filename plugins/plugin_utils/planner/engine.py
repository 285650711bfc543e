"""Turns `vllm serve` flags in snake_case into one checked, typed description of an engine."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import PlannerError, short
from .rules import Layout

DEFAULT_VERSION = "0.33.0"
# The oldest version whose memory rules are described; older ones are taken for it, with a wide margin.
OLDEST_VERSION = (0, 19, 0)
NEWEST_VERSION = (0, 33)
# Larger values occur in no flag; arithmetic with them would only hide a mistake.
MAX_VALUE = 1 << 40
# Flags that read JSON, which may be given as text.
_JSON_FLAGS = ("compilation_config", "eplb_config", "kv_transfer_config", "limit_mm_per_prompt")
# Flags that are looked up where they matter.
_WORDS = ("all2all_backend", "attention_backend", "mm_encoder_tp_mode", "performance_mode")
_AUTO_LENGTH = ("auto", -1, "-1")
# vllm/utils/argparse_utils.py: human_readable_int.
_SIZE = re.compile(r"(\d{1,15})([KMGT]?)|(\d{1,15}(?:\.\d{1,15})?)([kmgt])")
_SUFFIXES = {
    letter: base**power for base, letters in ((1000, "kmgt"), (1024, "KMGT")) for power, letter in enumerate(letters, 1)
}


@dataclass(frozen=True)
class Card:
    """One GPU as `nvidia-smi` prints it."""

    name: str
    memory_total_mib: float


@dataclass(frozen=True)
class Engine:
    """The flags that decide memory. None means: the default of that version."""

    version: tuple[int, int, int]
    layout: Layout = field(default_factory=Layout)
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    auto_length: bool = False
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    block_size: int | None = None
    language_model_only: bool = False
    # None: vLLM's default for the model.
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    disable_hybrid_kv_cache_manager: bool = False
    disable_sliding_window: bool = False
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    mamba_cache_mode: str | None = None
    runner: str = "auto"
    convert: str = "auto"
    speculative: Mapping[str, Any] = field(default_factory=dict)
    # Zero adapters: LoRA is off.
    max_loras: int = 0
    max_lora_rank: int = 16
    # Every flag as given, for the rarely used ones.
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculative_tokens(self) -> int:
        """Tokens that the drafter proposes a step; 0 without speculation."""
        if not self.speculative:
            return 0
        return _integer(self.speculative, "num_speculative_tokens", 1, prefix="speculative_config.") or 1

    def at_least(self, major: int, minor: int) -> bool:
        return self.version >= (major, minor, 0)


def parse_version(text: Any) -> tuple[int, int, int]:
    """`0.26.1rc1.dev608` and `0.32.0+cpu` count as the release that they lead to."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", str(text).strip())
    if match is None:
        raise PlannerError(
            f"vllm_version = {short(text)} is no version.", f"Write it like {DEFAULT_VERSION}.", "vllm_version"
        )
    major, minor, patch = (int(part or 0) for part in match.groups())
    return major, minor, patch


def parse_card(gpu: Any) -> Card:
    """Read `{name, memory_total_mib}`."""
    if not isinstance(gpu, Mapping):
        raise PlannerError(f"gpu = {short(gpu)} is not a mapping of name and memory_total_mib.", key="gpu")
    memory = _float(gpu, "memory_total_mib", None, 1.0, float(1 << 32), prefix="gpu.")
    if memory is None:
        raise PlannerError("gpu.memory_total_mib is missing.", "Give what nvidia-smi prints.", "gpu.memory_total_mib")
    name = gpu.get("name", "")
    if not isinstance(name, str):
        raise PlannerError(f"gpu.name = {short(name)} is not a string.", key="gpu.name")
    return Card(name, memory)


def parse_engine(flags: Mapping[str, Any] | None) -> Engine:
    """Check the flags that decide memory. Raises PlannerError with the key of the first wrong one."""
    flags = dict(flags or {})
    for key in _JSON_FLAGS:
        if isinstance(flags.get(key), str) and flags[key]:
            flags[key] = _json(flags[key], key)
    for key in _WORDS:
        _word(flags, key, "")
    speculative = mapping_flag(flags, "speculative_config")
    length = flags.get("max_model_len")
    auto = length in _AUTO_LENGTH and not isinstance(length, bool)
    lora = _boolean(flags, "enable_lora", False)
    layout = Layout(
        tensor=_integer(flags, "tensor_parallel_size", 1) or 1,
        pipeline=_integer(flags, "pipeline_parallel_size", 1) or 1,
        data=_integer(flags, "data_parallel_size", 1) or 1,
        expert=bool(_boolean(flags, "enable_expert_parallel", False)),
        decode_context=_integer(flags, "decode_context_parallel_size", 1) or 1,
        layer_partition=_partition(flags.get("pp_layer_partition")),
        draft_tensor=_integer(speculative, "draft_tensor_parallel_size", None, prefix="speculative_config."),
        eplb=bool(_boolean(flags, "enable_eplb", False)),
        redundant_experts=_redundant_experts(mapping_flag(flags, "eplb_config")),
        adaptive=speculative.get("enable_adaptive_verification") is True,
    )
    utilization = _float(flags, "gpu_memory_utilization", None, 0.0, 1.0)
    if utilization == 0:
        raise PlannerError(
            "gpu_memory_utilization = 0 leaves no memory.", "Give a fraction up to 1.", "gpu_memory_utilization"
        )
    return Engine(
        version=parse_version(flags.get("vllm_version") or DEFAULT_VERSION),
        layout=layout,
        dtype=_word(flags, "dtype", "auto"),
        quantization=_word(flags, "quantization", "") or None,
        kv_cache_dtype=_word(flags, "kv_cache_dtype", "auto"),
        gpu_memory_utilization=utilization,
        kv_cache_memory_bytes=_integer(flags, "kv_cache_memory_bytes", None),
        max_model_len=None if auto else _integer(flags, "max_model_len", None),
        auto_length=auto,
        max_num_seqs=_integer(flags, "max_num_seqs", None),
        max_num_batched_tokens=_integer(flags, "max_num_batched_tokens", None),
        enforce_eager=bool(_boolean(flags, "enforce_eager", False)),
        block_size=_integer(flags, "block_size", None),
        language_model_only=bool(_boolean(flags, "language_model_only", False)),
        enable_prefix_caching=_boolean(flags, "enable_prefix_caching", None),
        enable_chunked_prefill=_boolean(flags, "enable_chunked_prefill", None),
        disable_hybrid_kv_cache_manager=bool(_boolean(flags, "disable_hybrid_kv_cache_manager", False)),
        disable_sliding_window=bool(_boolean(flags, "disable_sliding_window", False)),
        mamba_cache_dtype=_word(flags, "mamba_cache_dtype", "auto"),
        mamba_ssm_cache_dtype=_word(flags, "mamba_ssm_cache_dtype", "auto"),
        mamba_cache_mode=_word(flags, "mamba_cache_mode", "") or None,
        runner=_word(flags, "runner", "auto"),
        convert=_word(flags, "convert", "auto"),
        speculative=speculative,
        max_loras=(_integer(flags, "max_loras", 1) or 1) if lora else 0,
        max_lora_rank=_integer(flags, "max_lora_rank", 16) or 16,
        flags=flags,
    )


def mapping_flag(flags: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The value of a flag that reads JSON, given as a mapping or as text; empty where the flag is not given."""
    value = flags.get(key)
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = _json(value, key)
    if not isinstance(value, Mapping):
        raise PlannerError(f"{key} = {short(value)} is not a mapping.", key=key)
    return value


def _redundant_experts(config: Mapping[str, Any]) -> int:
    number = config.get("num_redundant_experts")
    if number == 0 and not isinstance(number, bool):
        return 0
    return _integer(config, "num_redundant_experts", None, prefix="eplb_config.") or 0


def _json(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlannerError(f"{key} is not JSON: {short(text)}.", key=key) from error


def _integer(source: Mapping[str, Any], key: str, default: int | None, *, prefix: str = "") -> int | None:
    value = source.get(key)
    if value is None:
        return default
    number = value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        number = (
            int(match[1]) * _SUFFIXES.get(match[2], 1)
            if match[3] is None
            else int(float(match[3]) * _SUFFIXES[match[4]])
        )
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_VALUE:
        name = f"{prefix}{key}"
        raise PlannerError(f"{name} = {short(value)} is not a positive integer up to {MAX_VALUE}.", key=name)
    return number


def _float(
    source: Mapping[str, Any], key: str, default: float | None, low: float, high: float, *, prefix: str = ""
) -> float | None:
    value = source.get(key)
    if value is None:
        return default
    number = value
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value.strip()):
        number = float(value)
    good = not isinstance(number, bool) and isinstance(number, int | float) and low <= number <= high
    if not good or not math.isfinite(number):
        name = f"{prefix}{key}"
        raise PlannerError(f"{name} = {short(value)} is not a number between {low:.15g} and {high:.15g}.", key=name)
    return float(number)


def _boolean(source: Mapping[str, Any], key: str, default: bool | None) -> bool | None:
    value = source.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise PlannerError(f"{key} = {short(value)} is neither true nor false.", key=key)
    return value


def _word(source: Mapping[str, Any], key: str, default: str) -> str:
    value = source.get(key)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > 100:
        raise PlannerError(f"{key} = {short(value)} is not a word.", key=key)
    return value


def _partition(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) > 4096:
        raise PlannerError(
            f"pp_layer_partition = {short(value)} is not a list of layer counts.", key="pp_layer_partition"
        )
    counts = []
    for part in parts:
        text = part.strip() if isinstance(part, str) else part
        number = int(text) if isinstance(text, str) and re.fullmatch(r"\d{1,6}", text) else text
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= 1_000_000:
            raise PlannerError(
                f"pp_layer_partition = {short(value)}: {short(part)} is no count of layers.",
                "Give one positive integer a pipeline stage.",
                "pp_layer_partition",
            )
        counts.append(number)
    return tuple(counts)
