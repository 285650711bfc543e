"""Which linear layers a checkpoint quantizes, and the bytes that each takes once its kernel has repacked it.

Rules of `vllm/model_executor/layers/quantization`: each method reads its own keys and matches names in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from typing import Any

from .engine import Engine
from .errors import ModelConfigError, PlannerError, short
from .model import Model
from .sections import text_config
from .tensors import Experts, Linear, Structure

BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
_MAX_PATTERNS = 200_000
_MAX_GROUP = 1 << 20
_SEGMENT = 2 * 1024 * 1024


@dataclass(frozen=True)
class Scheme:
    """How one layer is stored after loading.

    kind: "none", "fp8" (one scale a tensor), "fp8_channel", "fp8_block", "int" (packed, a scale a group), "int8"
    (a scale a channel), "nvfp4", "mxfp4", "mxfp8".
    """

    kind: str = "none"
    bits: int = 16
    group: int = 0
    block: tuple[int, int] = (128, 128)
    zeros: bool = False
    # GPTQ's desc_act: an order of the inputs is kept with each layer.
    ordered: bool = False
    # A static scale for the activations.
    static: bool = False


NONE = Scheme()


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def allocated(size: float, *, whole: bool = False) -> float:
    """What PyTorch's caching allocator takes for a tensor: from 10 MiB on, a multiple of 2 MiB.

    A rest above 1 MiB is given back (CUDACachingAllocator: should_split), unless `whole`: experts repacked while
    loading land in the larger gaps of their raw tensors (fitted on gpt-oss-20b, vLLM 0.26 on an H200).
    """
    if size < _SEGMENT * 5:
        return size
    full = -(-size // _SEGMENT) * _SEGMENT
    return full if whole or full - size <= _SEGMENT / 2 else size


def weight_bytes(scheme: Scheme, count: int, width: int) -> float:
    """Bytes of `count` weights without scales and zeros."""
    return count * (width if scheme.kind == "none" else scheme.bits / 8)


def linear_bytes(scheme: Scheme, inputs: int, outputs: Sequence[int], width: int, chip: int) -> float:
    """Bytes of one linear layer's weight and scales on one rank; `width` = bytes of the model's dtype."""
    total = sum(outputs)
    count = inputs * total
    kind = scheme.kind
    if kind == "none":
        return count * width
    if kind == "fp8":
        return count + (4 * total if chip < 89 else 8 * len(outputs))
    if kind in ("fp8_channel", "int8"):
        return count + 4 * total
    if kind == "fp8_block":
        rows, columns = scheme.block
        if chip < 89:
            # Marlin spreads block scales over every output column.
            return count + -(-inputs // columns) * total * width
        return count + 4 * sum(-(-part // rows) for part in outputs) * -(-inputs // columns)
    if kind == "int":
        groups = -(-inputs // scheme.group) if scheme.group else 1
        # Machete, which serves these layers on Hopper, keeps the zero points in the type of the activations.
        zeros = groups * total * (width if chip == 90 else scheme.bits / 8) if scheme.zeros else 0
        return count * scheme.bits / 8 + groups * total * width + zeros + (8 * inputs if scheme.ordered else 0)
    if kind == "nvfp4":
        # Block scales are laid out in tiles of 128 by 4.
        return count / 2 + _up(total, 128) * _up(inputs // 16, 4)
    if kind == "mxfp8":
        return count + count / 32
    return count / 2 + count / 32


@dataclass(frozen=True)
class Share:
    """One rank's part of a layer's experts, and how wide and by which chip they are held."""

    count: int
    intermediate: int
    width: int
    chip: int
    # FlashInfer's MXFP4 kernels on Blackwell take 128 columns at a time instead of 256.
    narrow_tiles: bool = False


def experts_bytes(scheme: Scheme, experts: Experts, share: Share) -> tuple[float, float]:
    """Bytes of the first (gate and up) and of the second (down) tensor of one rank's experts."""
    hidden, intermediate, count = experts.hidden, share.intermediate, share.count
    parts = 2 if experts.gated else 1
    width = share.width
    if scheme.kind == "mxfp4":
        up, down = _mxfp4_expert(hidden, parts, share)
        # Triton's back end on Hopper and FlashInfer's keep the biases in float32 (fused_moe/oracle/mxfp4.py).
        width = 4 if 90 <= share.chip < 120 else width
    else:
        up = linear_bytes(scheme, hidden, [intermediate] * parts, width, share.chip)
        down = linear_bytes(scheme, intermediate, [hidden], width, share.chip)
    if experts.bias:
        up += parts * intermediate * width
        down += hidden * width
    return count * up, count * down


def _mxfp4_expert(hidden: int, parts: int, share: Share) -> tuple[float, float]:
    """`fused_moe/oracle/mxfp4.py: mxfp4_round_up_hidden_size_and_intermediate_size`, by the chip's usual back end."""
    intermediate, chip = share.intermediate, share.chip
    if 90 <= chip < 100:
        # Triton on Hopper: scales in tiles of 256 rows by 4 groups (triton_kernels: HopperMXScaleLayout).
        wide = _up(intermediate, 64)
        up = parts * wide * hidden / 2 + _up(parts * wide, 256) * _up(-(-hidden // 32), 4)
        return up, hidden * wide / 2 + _up(hidden, 256) * _up(wide // 32, 4)
    tile = 256 if 100 <= chip < 120 and not share.narrow_tiles else 128
    wide, tall = _up(intermediate, tile), _up(hidden, 256)
    return parts * wide * tall * 17 / 32, tall * wide * 17 / 32


@dataclass
class Quantizer:
    """Answers for each layer how it is stored."""

    structure: Structure
    method: str = ""
    scheme: Scheme = NONE
    # Decides whether the method leaves a name alone; None where nothing is left alone.
    experts_scheme: Scheme | None = None
    head: bool = False
    linears: bool = True
    skips: Callable[[str, tuple[str, ...], bool], bool] | None = None
    choose: Callable[[str, tuple[str, ...], bool], Scheme] | None = None
    # Patterns by the number of the layer that they name, for grouping equal layers.
    by_layer: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    # Some pattern may tell layers apart in a way that only matching can say.
    every_layer: bool = False

    def signature(self, index: int) -> object:
        """Layers of one kind with equal signatures are quantized alike."""
        return index if self.every_layer else self.by_layer.get(index, ())

    def linear(self, prefix: str, item: Linear) -> Scheme:
        if not item.quantized or not self.method or not self.linears:
            return NONE
        return self._decide(f"{prefix}{item.name}", item.parts, False)

    def experts(self, prefix: str, item: Experts) -> Scheme:
        if not self.method:
            return NONE
        found = self._decide(f"{prefix}{item.name}", item.parts, True)
        if found is not NONE and self.experts_scheme is not None:
            return self.experts_scheme
        return found

    def vocabulary(self, name: str) -> Scheme:
        if not self.method or not self.head:
            return NONE
        return self._decide(name, (), False)

    def _decide(self, name: str, parts: tuple[str, ...], experts: bool) -> Scheme:
        if self.choose is not None:
            return self.choose(name, parts, experts)
        if self.skips is not None and self.skips(name, parts, experts):
            return NONE
        return self.scheme


# --- Reading the config -------------------------------------------------------------------------------------------


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelConfigError(f"{key} = {short(value)} is not an object", key=key)
    return value


def _integer(source: Mapping[str, Any], key: str, default: int, minimum: int = 1) -> int:
    value = source.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_GROUP:
        raise ModelConfigError(f"quantization_config: {key} = {short(value)} is not an integer in bounds", key=key)
    return value


def _bits(source: Mapping[str, Any], key: str, known: Collection[int]) -> int:
    bits = _integer(source, key, 4)
    if bits not in known:
        raise ModelConfigError(
            f"quantization_config: {key} = {bits} is none of {', '.join(map(str, sorted(known)))}.",
            "Use a checkpoint that vLLM can read.",
            key,
        )
    return bits


def _group_size(source: Mapping[str, Any], key: str) -> int:
    """Weights that share a scale; -1 for all of a row."""
    size = _integer(source, key, 128, -1)
    if not size:
        raise ModelConfigError(
            f"quantization_config: {key} = 0 is no size of a group.", "Write -1 where a row has one scale.", key
        )
    return size


def _strings(source: Mapping[str, Any], *keys: str) -> list[str]:
    for key in keys:
        value = source.get(key)
        if value is None:
            continue
        if not isinstance(value, list | tuple) or len(value) > _MAX_PATTERNS:
            raise ModelConfigError(f"quantization_config: {key} = {short(value)} is not a list of names", key=key)
        return [item for item in value if isinstance(item, str)]
    return []


def quantization_config(model: Model) -> Mapping[str, Any] | None:
    """The quantization section: in config.json, in its text part, or beside it (`hf_quant_config.json`)."""
    text = text_config(model.config)
    for source in (model.config, text):
        for key in ("quantization_config", "compression_config"):
            found = source.get(key)
            if found is not None:
                return _mapping(found, key)
    beside = model.quantization_beside or model.config.get("hf_quant_config")
    if beside is None:
        return None
    inner = _mapping(beside, "hf_quant_config").get("quantization", beside)
    # vLLM takes the file for ModelOpt's by `producer` (transformers_utils/model_arch_config_convertor.py), which the
    # tool always writes but copies of the file leave out; no other tool writes this file, so it is not asked for.
    return {"quant_method": "modelopt", **_mapping(inner, "hf_quant_config.quantization")}


def quantizer(model: Model, structure: Structure, engine: Engine) -> Quantizer:
    """The rules of this model's checkpoint under these flags."""
    section = quantization_config(model)
    asked = engine.quantization
    if section is None:
        return Quantizer(structure) if asked is None else _online(structure, asked)
    method = str(section.get("quant_method") or "").lower().replace("_", "-")
    if method in ("fp8", "deepseek-v4-fp8") and (model.model_type == "deepseek_v4" or asked == "deepseek_v4_fp8"):
        return _deepseek_v4(structure, section, model.text.get("expert_dtype"))
    if model.architecture == "KimiK3ForConditionalGeneration" and section.get("format") == "mxfp4-pack-quantized":
        # models/config.py: KimiK3ForConditionalGenerationConfig; its other layers stay as they are.
        method = "mxfp4"
    if not method and "quant_algo" in section:
        method = "modelopt"
    if method.startswith("modelopt") or str(section.get("producer", {})).find("modelopt") >= 0:
        return _modelopt(structure, section)
    reader = _METHODS.get(method)
    if reader is None:
        raise PlannerError(
            f"quantization method {short(section.get('quant_method'))} is not known to this version.",
            f"Known: {', '.join(sorted(_METHODS))}.",
            "quantization_config.quant_method",
        )
    return reader(structure, section)


def _rename(structure: Structure, names: Sequence[str]) -> list[str]:
    """Names of the checkpoint as vLLM spells them (`WeightsMapper.apply_list`)."""
    if not structure.renamed:
        return list(names)
    result = []
    for name in names:
        rule = next(((old, new) for old, new in structure.renamed if name.startswith(old)), ("", ""))
        result.append(rule[1] + name.removeprefix(rule[0]))
    return result


_PLAIN_ROOT = re.compile(r"(?:[A-Za-z_]+\.)+(?=\d)")
_INNER_NUMBER = re.compile(r"\.(\d+)(?=\.)")
_LAYER_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def _group(target: Quantizer, names: Sequence[str], *, whole: bool) -> None:
    """Sort patterns by the layer that they name. `whole`: a name matches only as a whole, dots included."""
    structure = target.structure
    found, every_layer = _by_layer(structure.prefix, len(structure.layers), tuple(names), whole)
    target.by_layer, target.every_layer = found, target.every_layer or every_layer


# One model is estimated many times while it is planned, and quantized checkpoints list hundreds of names.
@lru_cache(maxsize=4)
def _by_layer(
    prefix: str, count: int, names: tuple[str, ...], whole: bool
) -> tuple[Mapping[int, tuple[str, ...]], bool]:
    every_layer = False
    by_layer: dict[int, list[str]] = {}
    for name in names:
        match = _LAYER_NUMBER.search(name)
        if match is None and name.startswith(prefix) and name.endswith("*") and name[len(prefix) : -1].isdigit():
            # "model.layers.1*" holds for layers 1, 10 to 19 and so on.
            for index in range(count):
                if str(index).startswith(name[len(prefix) : -1]):
                    by_layer.setdefault(index, []).append("*")
            continue
        if match is not None:
            root, rest = name[: match.start(1)], name[match.end(1) :]
            by_layer.setdefault(int(match[1]) if len(match[1]) < 7 else -1, []).append(f"{root}#{rest}")
            if whole or (rest.startswith(".") and name.startswith(prefix)):
                continue
        if match is not None or (any(letter.isdigit() for letter in name) and not whole):
            every_layer = every_layer or not _elsewhere(name, prefix)
    return {index: tuple(sorted(found)) for index, found in by_layer.items()}, every_layer


def _elsewhere(name: str, prefix: str) -> bool:
    """Whether a pattern begins with plain names that lead past the decoder's layers ("mtp.layers.0*")."""
    root = _PLAIN_ROOT.match(name)
    return root is not None and not prefix.endswith(root[0]) and not root[0].startswith(prefix)


def _shards(name: str, parts: tuple[str, ...]) -> list[str]:
    if not parts:
        return [name]
    root, _, last = name.rpartition(".")
    return [f"{root}.{part}" if root else part for part in parts] if last else [name]


def _exact(names: Sequence[str]) -> Callable[[str, tuple[str, ...], bool], bool]:
    """`utils/quant_utils.py: is_layer_skipped` with whole names."""
    listed = frozenset(names)
    expert_names = "\n".join(name for name in names if "experts" in name)

    def skips(name: str, parts: tuple[str, ...], experts: bool) -> bool:
        if name in listed:
            return True
        if experts:
            return name in expert_names
        return bool(parts) and all(shard in listed for shard in _shards(name, parts))

    return skips


def _substring(names: Sequence[str]) -> Callable[[str, tuple[str, ...], bool], bool]:
    """`is_layer_skipped(..., skip_with_substr=True)`."""

    def skips(name: str, parts: tuple[str, ...], experts: bool) -> bool:
        shards = [name, *_shards(name, () if experts else parts)]
        return any(listed in shard for listed in names for shard in shards)

    return skips


def _block(value: Any, key: str) -> tuple[int, int]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _MAX_GROUP for size in value)
    ):
        raise ModelConfigError(f"quantization_config: {key} = {short(value)} is not two integers", key=key)
    return value[0], value[1]


def _fp8(structure: Structure, section: Mapping[str, Any]) -> Quantizer:
    """`quantization/fp8.py`."""
    activations = section.get("activation_scheme")
    if activations not in (None, "dynamic", "static"):
        raise ModelConfigError(
            f"quantization_config: activation_scheme = {short(activations)} is neither dynamic nor static.",
            "Correct it.",
            "activation_scheme",
        )
    block = section.get("weight_block_size")
    if block is not None:
        scheme = Scheme("fp8_block", 8, block=_block(block, "weight_block_size"))
    else:
        scheme = Scheme("fp8", 8, static=activations == "static")
    names = _rename(structure, _strings(section, "ignored_layers", "modules_to_not_convert"))
    found = Quantizer(structure, "fp8", scheme, skips=_exact(names))
    _group(found, names, whole=True)
    return found


def _deepseek_v4(structure: Structure, section: Mapping[str, Any], experts: Any) -> Quantizer:
    """`vllm/models/deepseek_v4/quant_config.py`: block FP8, but the routed experts as `expert_dtype` says."""
    found = _fp8(structure, section)
    if experts not in (None, "fp4", "fp8"):
        raise ModelConfigError(
            f"config.json: expert_dtype = {short(experts)} is neither fp4 nor fp8", key="expert_dtype"
        )
    if experts != "fp8":
        nvfp4 = str(section.get("moe_quant_algo") or "").upper() == "NVFP4"
        found.experts_scheme = Scheme("nvfp4", 4, 16) if nvfp4 else Scheme("mxfp4", 4, 32)
    return found


def _awq(structure: Structure, section: Mapping[str, Any]) -> Quantizer:
    """`quantization/awq_marlin.py`."""
    bits = _bits(section, "w_bit" if "w_bit" in section else "bits", (4, 8))
    group = _group_size(section, "q_group_size" if "q_group_size" in section else "group_size")
    scheme = Scheme("int", bits, max(group, 0), zeros=section.get("zero_point", True) is not False)
    names = _rename(structure, _strings(section, "modules_to_not_convert"))
    found = Quantizer(structure, "awq", scheme, head=section.get("lm_head") is True, skips=_substring(names))
    _group(found, names, whole=False)
    return found


def _gptq(structure: Structure, section: Mapping[str, Any]) -> Quantizer:
    """`quantization/gptq_marlin.py`, with the overrides of `dynamic` (GPTQModel): "-:regex" leaves layers alone."""
    bits = _bits(section, "bits", (2, 3, 4, 8))
    group = _group_size(section, "group_size")
    ordered = section.get("desc_act") is True and group != -1
    scheme = Scheme("int", bits, max(group, 0), zeros=section.get("sym") is False, ordered=ordered)
    found = Quantizer(structure, "gptq", scheme, head=section.get("lm_head") is True)
    dynamic = section.get("dynamic")
    rules: list[tuple[bool, re.Pattern[str], Scheme]] = []
    if isinstance(dynamic, Mapping):
        for pattern, override in dynamic.items():
            if not isinstance(pattern, str):
                continue
            negative = pattern.startswith("-:")
            body = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
            changed = override if isinstance(override, Mapping) else {}
            own = Scheme(
                "int",
                _integer(changed, "bits", bits),
                max(_integer(changed, "group_size", group, -1), 0),
                zeros=changed.get("sym", section.get("sym")) is False,
                ordered=ordered,
            )
            rules.append((negative, _regex(body), own))
        _group(found, [pattern for pattern in dynamic if isinstance(pattern, str)], whole=False)
    blocks = _strings(section, "modules_in_block_to_quantize")

    def choose(name: str, parts: tuple[str, ...], experts: bool) -> Scheme:
        for negative, pattern, own in rules:
            if pattern.match(name):
                return NONE if negative else own
        if blocks and not any(block in shard for block in blocks for shard in _shards(name, parts)):
            return NONE
        return scheme

    found.choose = choose
    return found


def _regex(text: str) -> re.Pattern[str]:
    # Bounds what a hostile pattern can cost: none that a real checkpoint has is longer.
    if len(text) > 500 or re.search(r"[+*}]\)?[+*{]|\([^)]*[+*][^)]*\)[+*{]", text):
        raise ModelConfigError(f"quantization_config: the pattern {short(text)} is not one that is understood")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelConfigError(f"quantization_config: {short(text)} is no regular expression") from error


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """compressed-tensors: a name, the end of a name, or `re:` and a regular expression."""
    exact = frozenset(pattern for pattern in patterns if not pattern.startswith("re:"))
    regexes = [_regex(pattern[3:]) for pattern in patterns if pattern.startswith("re:")]
    return lambda name: name in exact or any(regex.match(name) for regex in regexes)


def _compressed(structure: Structure, section: Mapping[str, Any]) -> Quantizer:
    """`quantization/compressed_tensors/compressed_tensors.py`: groups of targets, and a list to ignore."""
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelConfigError("quantization_config has no config_groups", key="quantization_config.config_groups")
    form = str(section.get("format") or "")
    targets: list[tuple[Callable[[str], bool], bool, Scheme]] = []
    patterns: list[str] = []
    for group in groups.values():
        entry = _mapping(group, "quantization_config.config_groups")
        names = _rename_patterns(structure, _strings(entry, "targets"))
        patterns += names
        scheme = _compressed_scheme(entry, str(entry.get("format") or form))
        targets.append((_matcher(names), "Linear" in names, scheme))
    ignore = _rename_patterns(structure, _strings(section, "ignore"))
    patterns += ignore
    ignored = _matcher(ignore)

    def choose(name: str, parts: tuple[str, ...], experts: bool) -> Scheme:
        shards = [f"{name}.0.{parts[0]}"] if experts else _shards(name, parts)
        if ignored(name) or all(ignored(shard) for shard in shards):
            return NONE
        for matches, _, scheme in targets:
            if matches(name) or any(matches(shard) for shard in shards):
                return scheme
        for _, linear, scheme in targets:
            if linear:
                return scheme
        return NONE

    found = Quantizer(structure, "compressed-tensors", head="lm_head" not in ignore, choose=choose)
    _group(found, patterns, whole=False)
    return found


def _rename_patterns(structure: Structure, names: Sequence[str]) -> list[str]:
    plain = [name for name in names if not name.startswith("re:")]
    return [*_rename(structure, plain), *(name for name in names if name.startswith("re:"))]


def _compressed_scheme(entry: Mapping[str, Any], form: str) -> Scheme:
    weights = entry.get("weights")
    if weights is None:
        return NONE
    weights = _mapping(weights, "config_groups.weights")
    bits = _integer(weights, "num_bits", 8)
    kind = str(weights.get("type") or "int")
    strategy = str(weights.get("strategy") or "")
    group = max(_integer(weights, "group_size", 0, -1), 0)
    activations = entry.get("input_activations")
    if kind == "float" and bits == 4:
        return Scheme("mxfp4", 4, 32) if form.startswith("mxfp4") or group == 32 else Scheme("nvfp4", 4, 16)
    if kind == "float" and bits == 8:
        block = weights.get("block_structure")
        if form.startswith("mxfp8"):
            return Scheme("mxfp8", 8, 32)
        if strategy == "block":
            return Scheme("fp8_block", 8, block=_block(block, "block_structure"))
        return Scheme("fp8" if strategy == "tensor" else "fp8_channel", 8)
    if kind == "int" and bits == 8 and activations is not None:
        return Scheme("int8", 8)
    zeros = weights.get("symmetric") is False
    return Scheme("int", bits, group, zeros=zeros, ordered=weights.get("actorder") in ("group", True))


_ALGORITHMS = {
    "FP8": Scheme("fp8", 8),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8_channel", 8),
    "FP8_PB_WO": Scheme("fp8_block", 8),
    "NVFP4": Scheme("nvfp4", 4, 16),
    "W4A16_NVFP4": Scheme("nvfp4", 4, 16),
    "NVFP4_AWQ": Scheme("nvfp4", 4, 16),
    "MXFP8": Scheme("mxfp8", 8, 32),
}


def _modelopt(structure: Structure, section: Mapping[str, Any]) -> Quantizer:
    """`quantization/modelopt.py`: wildcards and substrings to leave alone, or a list of layers with their own rule."""
    inner = section.get("quantization")
    if isinstance(inner, Mapping):
        section = inner
    algorithm = str(section.get("quant_algo") or "").upper()
    names = _rename(structure, _strings(section, "exclude_modules", "ignore"))
    if algorithm == "MIXED_PRECISION":
        return _mixed(structure, section, names)
    scheme = _ALGORITHMS.get(algorithm)
    if scheme is None:
        raise PlannerError(
            f"quant_algo {short(section.get('quant_algo'))} is not known to this version.",
            f"Known: {', '.join(sorted(_ALGORITHMS))}.",
            "quantization_config.quant_algo",
        )
    found = Quantizer(structure, "modelopt", scheme, skips=_wildcards(tuple(names)))
    _group(found, names, whole=False)
    return found


@lru_cache(maxsize=4)
def _wildcards(names: tuple[str, ...]) -> Callable[[str, tuple[str, ...], bool], bool]:
    """`modelopt.py: is_layer_excluded`: whole names, then substrings, then wildcards."""
    exact = _exact([name for name in names if "*" not in name])
    # A part that names a layer can only occur in the names of that layer.
    anywhere: list[str] = []
    of_layer: dict[str, list[str]] = {}
    for name in names:
        if "*" not in name:
            number = _INNER_NUMBER.search(name)
            (of_layer.setdefault(number[1], []) if number else anywhere).append(name)
    # Most wildcards stand at the end alone; a regular expression of hundreds of them takes long to compile.
    starts: list[str] = []
    wild: list[str] = []
    for name in names:
        if "*" not in name:
            continue
        stem = name.rstrip("*")
        if any(letter in stem for letter in "*?["):
            wild.append(name)
        else:
            starts.append(stem)
    beginnings = tuple(starts)
    pattern = re.compile("|".join(translate(re.sub(r"\*+", "*", name)) for name in wild)) if wild else None

    def skips(name: str, parts: tuple[str, ...], experts: bool) -> bool:
        if exact(name, parts, experts) or any(part in name for part in anywhere):
            return True
        if any(part in name for number in _INNER_NUMBER.findall(name) for part in of_layer.get(number, ())):
            return True
        return name.startswith(beginnings) or (pattern is not None and pattern.match(name) is not None)

    return skips


def _mixed(structure: Structure, section: Mapping[str, Any], names: Sequence[str]) -> Quantizer:
    """ModelOptMixedPrecisionConfig: every quantized layer is listed with its algorithm."""
    listed = section.get("quantized_layers")
    if not isinstance(listed, Mapping) or len(listed) > _MAX_PATTERNS:
        raise ModelConfigError(
            "quantization_config has no quantized_layers", key="quantization_config.quantized_layers"
        )
    keys = [key for key in listed if isinstance(key, str)]
    entries = (listed[key] for key in keys)
    algorithms = [str(entry.get("quant_algo") if isinstance(entry, dict) else entry).upper() for entry in entries]
    table, by_layer = _listed(tuple(keys), tuple(_rename(structure, keys)), tuple(algorithms))

    def choose(name: str, parts: tuple[str, ...], experts: bool) -> Scheme:
        if name in table:
            return table[name]
        shards = [f"{name}.0.{parts[0]}"] if experts else _shards(name, parts)
        for shard in shards:
            if shard in table:
                return table[shard]
        return NONE

    found = Quantizer(structure, "modelopt", choose=choose, head=True)
    found.by_layer = by_layer
    return found


@lru_cache(maxsize=4)
def _listed(
    keys: tuple[str, ...], names: tuple[str, ...], algorithms: tuple[str, ...]
) -> tuple[Mapping[str, Scheme], Mapping[int, tuple[str, ...]]]:
    """How each of the listed layers is stored, and what is listed of each decoder layer."""
    table: dict[str, Scheme] = {}
    by_layer: dict[int, list[str]] = {}
    for key, name, algorithm in zip(keys, names, algorithms, strict=True):
        scheme = _ALGORITHMS.get(algorithm)
        if scheme is None:
            raise PlannerError(f"quant_algo {short(algorithm)} of {key:.80} is not known to this version.")
        table[name] = scheme
        match = _LAYER_NUMBER.search(name)
        if match is not None and len(match[1]) < 7:
            by_layer.setdefault(int(match[1]), []).append(f"{name[match.end(1) :]}:{algorithm}")
    return table, {index: tuple(sorted(entries)) for index, entries in by_layer.items()}


def _mxfp4(structure: Structure, section: Mapping[str, Any]) -> Quantizer:
    """`quantization/mxfp4.py`: experts alone; attention stays as it is."""
    scheme = Scheme("mxfp4", 4, 32)
    names = _rename(structure, _strings(section, "modules_to_not_convert"))
    found = Quantizer(structure, "mxfp4", scheme, linears=False, skips=_exact(names))
    _group(found, names, whole=True)
    return found


def _auto_round(structure: Structure, section: Mapping[str, Any]) -> Quantizer:
    """`quantization/inc.py`: blocks to quantize, and layers with settings of their own (16 bits: left alone)."""
    bits = _integer(section, "bits", 4)
    group = _integer(section, "group_size", 128, -1)
    packing = str(section.get("packing_format") or "auto_round:auto_gptq")
    base = Scheme("int", bits, max(group, 0), zeros="awq" in packing or section.get("sym") is False)
    own: dict[str, Scheme] = {}
    patterns: list[tuple[re.Pattern[str], Scheme]] = []
    extra = section.get("extra_config")
    names: list[str] = []
    if isinstance(extra, Mapping):
        keys = [key for key in extra if isinstance(key, str)]
        for key, name in zip(keys, _rename(structure, keys), strict=True):
            entry = extra[key] if isinstance(extra[key], Mapping) else {}
            own_bits = _integer(entry, "bits", bits)
            own_group = max(_integer(entry, "group_size", group, -1), 0)
            scheme = NONE if own_bits >= 16 else Scheme("int", own_bits, own_group, zeros=base.zeros)
            own[name] = scheme
            names.append(name)
            if any(letter in name for letter in "*^$[]|+?{}\\"):
                patterns.append((_regex(name), scheme))
    value = section.get("block_name_to_quantize") or section.get("to_quant_block_names")
    blocks = value.split(",") if isinstance(value, str) else _strings({"blocks": value}, "blocks")
    blocks = _rename(structure, [block.strip() for block in blocks])

    def choose(name: str, parts: tuple[str, ...], experts: bool) -> Scheme:
        for shard in (name, *_shards(name, parts)):
            if shard in own:
                return own[shard]
        for pattern, scheme in patterns:
            if pattern.search(name):
                return scheme
        if blocks and not any(name.startswith(block) for block in blocks):
            return NONE
        return base

    found = Quantizer(structure, "auto-round", base, choose=choose)
    _group(found, names, whole=False)
    return found


def _online(structure: Structure, asked: str) -> Quantizer:
    """`--quantization` on an unquantized checkpoint: weights are quantized while loading."""
    kind = asked.lower().replace("-", "_")
    schemes = {
        "fp8": Scheme("fp8", 8),
        "fp8_per_tensor": Scheme("fp8", 8),
        "fp8_per_block": Scheme("fp8_block", 8),
        "mxfp8": Scheme("mxfp8", 8, 32),
        "experts_int8": Scheme("int8", 8),
        "int8_per_channel": Scheme("int8", 8),
    }
    if kind not in schemes:
        raise PlannerError(
            f"quantization = {short(asked)}: this checkpoint is not quantized and vLLM can't do that while loading.",
            f"Known: {', '.join(sorted(schemes))}; or leave it out.",
            "quantization",
        )
    return Quantizer(structure, kind, schemes[kind], linears=kind != "experts_int8")


_METHODS: dict[str, Callable[[Structure, Mapping[str, Any]], Quantizer]] = {
    "fp8": _fp8,
    "awq": _awq,
    "awq-marlin": _awq,
    "gptq": _gptq,
    "gptq-marlin": _gptq,
    "auto-gptq": _gptq,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
    "gpt-oss-mxfp4": _mxfp4,
    "auto-round": _auto_round,
    "inc": _auto_round,
}
