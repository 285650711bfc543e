"""What is asked of the planner: the fields of an instance, checked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .choices import check_choices, check_speculative
from .engine import DEFAULT_VERSION, MAX_VALUE, parse_version
from .errors import PlannerError, short
from .serve_args import engine_flags

OBJECTIVES = ("throughput", "latency", "capacity")
EXECUTORS = ("auto", "ray", "mp")
_KEYS = frozenset(
    {
        "objective",
        "context_length",
        "concurrency",
        "parallelism",
        "executor",
        "disaggregation",
        "speculative",
        "args",
        "environment",
        "vllm_version",
        "variant",
        "hf_quant_config",
        "draft_config",
    }
)
_PARTITION = "VLLM_PP_LAYER_PARTITION"
# Beyond these a value is no configuration: it could not even be printed, or only cost time.
_MAX_BITS = 1024
_MAX_DEPTH = 100
_MAX_VALUES = 2_000_000


@dataclass
class Request:
    """A checked request."""

    objective: str = "throughput"
    context_length: int | None = None
    concurrency: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    expert: bool | None = None
    executor: str = "auto"
    speculative: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    layer_partition: tuple[int, ...] | None = None
    vllm_version: str = DEFAULT_VERSION
    variant: str = ""
    # config.json of the model that `speculative` names.
    draft_config: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu(self) -> bool:
        return self.variant == "cpu"

    @property
    def max_num_seqs(self) -> int | None:
        value = self.flags.get("max_num_seqs")
        return None if value is None else integer(value, "args.max-num-seqs")

    @property
    def decode_context(self) -> int:
        value = self.flags.get("decode_context_parallel_size")
        return integer(value, "args.decode-context-parallel-size") or 1


def check_plain(value: Any, key: str) -> None:
    """Raise unless a value is what JSON can hold, with numbers that can be printed and a bounded depth and size."""
    level, seen = [value], 0
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        seen += len(level)
        if seen > _MAX_VALUES:
            raise PlannerError(f"{key} holds more than {_MAX_VALUES} values.", key=key)
        for item in level:
            kind = type(item)
            if kind is str or kind is float or item is None:
                continue
            if kind is dict or isinstance(item, Mapping):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
            elif isinstance(item, int):
                if item.bit_length() > _MAX_BITS:
                    raise PlannerError(f"{key} holds a number of more than {_MAX_BITS} bits.", "Correct it.", key)
            elif item is not None and not isinstance(item, str | float):
                raise PlannerError(f"{key} holds a {type(item).__name__}, which JSON can't say.", key=key)
        if not below:
            return
        level = below
    raise PlannerError(f"{key} is nested more than {_MAX_DEPTH} deep.", key=key)


def parse_request(values: Mapping[str, Any]) -> Request:
    unknown = sorted(set(values) - _KEYS)
    if unknown:
        close = difflib.get_close_matches(unknown[0][:100], _KEYS, n=1, cutoff=0.6)
        hint = f"Did you mean {close[0]!r}?" if close else f"Use {', '.join(sorted(_KEYS))}."
        raise PlannerError(f"{short(unknown[0])} is no key of a request.", hint, unknown[0])
    version = values.get("vllm_version") or DEFAULT_VERSION
    parse_version(version)
    version = str(version)
    parallelism = _mapping(values, "parallelism")
    for key in parallelism:
        if key not in ("tensor", "pipeline", "data", "expert"):
            raise PlannerError(
                f"parallelism.{key} is not known." if isinstance(key, str) else f"parallelism: {short(key)} is no key.",
                "Use tensor, pipeline, data or expert.",
                f"parallelism.{key}" if isinstance(key, str) else "parallelism",
            )
    expert = parallelism.get("expert")
    if expert is not None and not isinstance(expert, bool):
        raise _wrong("parallelism.expert", expert, "true or false")
    if values.get("disaggregation"):
        raise PlannerError("disaggregation is not served by this release.", "Leave it out.", "disaggregation")
    args = _mapping(values, "args")
    context = values.get("context_length")
    environment = _mapping(values, "environment")
    partition = _partition(environment)
    pipeline = integer(parallelism.get("pipeline"), "parallelism.pipeline")
    request = Request(
        draft_config=_mapping(values, "draft_config"),
        objective=_choice(values.get("objective"), "objective", OBJECTIVES),
        context_length=None if context in (None, "auto") else integer(context, "context_length"),
        concurrency=integer(values.get("concurrency"), "concurrency"),
        tensor=integer(parallelism.get("tensor"), "parallelism.tensor"),
        # The partition says how many stages there are.
        pipeline=len(partition) if partition and pipeline is None else pipeline,
        data=integer(parallelism.get("data"), "parallelism.data"),
        expert=expert,
        executor=_choice(values.get("executor"), "executor", EXECUTORS),
        speculative=_mapping(values, "speculative"),
        args=args,
        flags=engine_flags(args, version),
        environment=environment,
        layer_partition=partition,
        vllm_version=version,
        variant=_variant(values.get("variant")),
    )
    check_choices(request.flags, version)
    check_speculative(request.speculative, version)
    return request


def _variant(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 100:
        raise _wrong("variant", value, "a build of vLLM such as cu130 or cpu")
    return value


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    if value is None or value == "":
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(key, value, "a dictionary")
    return dict(value)


def _choice(value: Any, name: str, choices: Sequence[str]) -> str:
    if value is None:
        return choices[0]
    if not isinstance(value, str) or value not in choices:
        raise _wrong(name, value, f"one of {', '.join(choices)}")
    return value


def _wrong(key: str, value: Any, expected: str) -> PlannerError:
    return PlannerError(f"{key} = {short(value, 100)} is not {expected}.", key=key)


def integer(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_VALUE:
        raise _wrong(name, value, f"a positive integer up to {MAX_VALUE}")
    return value


def _partition(environment: Mapping[str, Any]) -> tuple[int, ...] | None:
    text = environment.get(_PARTITION)
    if text is None:
        return None
    if not isinstance(text, str | int) or not re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5}){0,4095}", str(text)):
        raise PlannerError(
            f"Invalid partition string: {short(text)}.",
            f"{_PARTITION} is a comma list of layer counts.",
            f"environment.{_PARTITION}",
        )
    return tuple(int(part) for part in str(text).split(","))
