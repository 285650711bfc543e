"""What takes the place of attention in each decoder layer, read from config.json.

A key that config.json leaves out has the default of its `transformers` configuration class, because vLLM reads the
file through that class. Windows are the exception where a class default would contradict what checkpoints mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import ModelConfigError, UnsupportedArchitectureError, short
from .sections import HEADS, text_config

# Real models end at some hundred layers; the list is built in memory.
MAX_LAYERS = 2048
# Sizes beyond this occur in no model.
_MAX_SIZE = 1 << 32

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_SLIDING = "sliding_attention"

STATE_KINDS = frozenset({"mamba1", "mamba2", "gdn", "kda", "lightning", "short_conv"})
ATTENTION_KINDS = frozenset({"full", "sliding", "chunked", "mla"})


@dataclass(frozen=True)
class Mixer:
    """One layer's token mixer. Counts are those of the whole model, before tensor parallelism."""

    # "full", "sliding", "chunked", "mla", "mamba1", "mamba2", "gdn", "kda", "lightning", "short_conv", "encoder",
    # or "none" for a layer without a mixer.
    kind: str
    heads: int = 0
    kv_heads: int = 0
    # Elements a head of K; of the latent row (kv_lora_rank + qk_rope_head_dim) for MLA.
    head_dim: int = 0
    v_head_dim: int = 0
    # Tokens of the sliding window, or of the chunk of chunked attention.
    window: int | None = None
    # Index of the earlier layer whose cache this one reads instead of keeping its own.
    shares_kv_with: int | None = None
    # Elements of the key that the sparse-attention indexer keeps a token; 0 without an indexer.
    index_dim: int = 0
    # "dsa" (DeepSeek-V3.2, GLM-5), "minimax_m3" or "deepseek_v4": how that key is stored.
    index_kind: str = ""
    # This layer reads the top-k that an earlier layer's indexer found (GLM-5.2), where the version can.
    index_shared: bool = False
    # DeepSeek-V4: tokens in one compressed cache row (4 or 128), 0 in a layer with the window only.
    compress: int = 0
    # The state of linear kinds: channels of the mixer, its (value) heads and their size, the state size (or key size),
    # groups (or key heads), and the width of the causal convolution.
    inner: int = 0
    state_heads: int = 0
    state_head_dim: int = 0
    state_dim: int = 0
    state_groups: int = 0
    conv_kernel: int = 0
    # Tokens that the Mamba kernel takes at a time; 0 where it has no such notion.
    chunk: int = 0
    # What the checkpoint asks its recurrent state to be kept in; None leaves it to vLLM.
    state_dtype: str | None = None
    # Its kernel can store states from inside a prefill (Kimi-K3: vllm/models/kimi_k3/nvidia/kda.py, FlashKDA).
    exports: bool = False
    # A second mixer that runs in the same layer (Falcon-H1: Mamba beside attention).
    beside: Mixer | None = None

    @property
    def is_state(self) -> bool:
        return self.kind in STATE_KINDS

    @property
    def is_attention(self) -> bool:
        return self.kind in ATTENTION_KINDS


NONE = Mixer("none")

Text = Mapping[str, Any]
Builder = Callable[[Text], list[Mixer]]


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of `architectures`, or "" when the file names none."""
    names = config.get("architectures")
    if isinstance(names, str):
        return names
    if isinstance(names, Sequence) and names and isinstance(names[0], str):
        return names[0]
    return ""


# Ends of the names of pooling models that are made of a decoder (vllm/config/model.py: _SUFFIX_TO_DEFAULTS).
_POOLING_SUFFIXES = ("ForSequenceClassification", "ForProcessRewardModel", "ForRewardModel", "Model")


def generative_name(architecture: str) -> str:
    """The decoder that a pooling model is made of (Qwen3ForSequenceClassification: Qwen3ForCausalLM), or the name."""
    if architecture in _ARCHITECTURES:
        return architecture
    for suffix in _POOLING_SUFFIXES:
        if architecture.endswith(suffix):
            name = f"{architecture.removesuffix(suffix)}ForCausalLM"
            return name if name in _ARCHITECTURES else architecture
    return architecture


def mixers(config: Mapping[str, Any]) -> tuple[Mixer, ...]:
    """One `Mixer` a decoder layer, equal layers being the same object.

    Raises UnsupportedArchitectureError for an architecture that is not known, ModelConfigError for a wrong value.
    """
    text = text_config(config)
    return _interned(_builder(config, text)(text))


def draft_mixers(config: Mapping[str, Any], method: str, draft: Mapping[str, Any] | None = None) -> tuple[Mixer, ...]:
    """The layers that a drafter adds to the KV cache: the model's own MTP layers, or those of `draft`'s config.json.

    vllm/config/speculative.py and model_executor/models/*_mtp.py. Methods without layers (ngram, suffix) give none.
    """
    if draft is not None:
        return mixers(draft)
    if "mtp" not in method:
        return ()
    text = text_config(config)
    own = mixers(config)
    attention = [mixer for mixer in own if mixer.is_attention]
    count = _mtp_layers(config, text)
    pattern = text.get("mtp_layers_block_type") or text.get("mtp_hybrid_override_pattern")
    if isinstance(pattern, str | list) and _is_nemotron_h(config, text):
        kinds = _nemotron_kinds(list(pattern)[:MAX_LAYERS])
        return (_nemotron_attention(text),) * (kinds.count("attention") * max(1, count))
    if not attention:
        return ()
    like = attention[-1]
    if isinstance(text.get("hybrid_layer_pattern"), list) and "swa_head_dim" in text:
        # MiMo-V2's MTP layers use the sliding window.
        like = next((mixer for mixer in own if mixer.kind == "sliding"), like)
    elif like.compress or like.index_kind == "deepseek_v4":
        ratios = _integers(text, "compress_ratios")
        like = replace(like, compress=0, index_dim=0, index_kind="")
        if len(ratios) > len(own):
            like = replace(like, compress=ratios[len(own)])
    # MTP layers always own an indexer, even where the target's layers share one.
    return _interned([replace(like, index_shared=False, shares_kv_with=None)] * count)


def _mtp_layers(config: Mapping[str, Any], text: Text) -> int:
    for source in (text, config):
        for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "n_predict"):
            if source.get(name) is not None:
                return min(size_of(source, (name,), minimum=0), MAX_LAYERS)
    return 1


def distinct(layers: Sequence[Mixer]) -> tuple[Mixer, ...]:
    """The different ones of the layers that `mixers` gave, in the order of their first appearance."""
    return tuple({id(mixer): mixer for mixer in layers}.values())


def _interned(layers: Sequence[Mixer]) -> tuple[Mixer, ...]:
    """Equal layers become one object. Builders repeat objects, so that few need the slow comparison by value."""
    by_value: dict[Mixer, Mixer] = {}
    by_id: dict[int, Mixer] = {}
    for mixer in layers:
        if id(mixer) not in by_id:
            _check_heads(mixer)
            by_id[id(mixer)] = by_value.setdefault(mixer, mixer)
    return tuple(by_id[id(mixer)] for mixer in layers)


# Names of the two counts of heads of which the second divides the first, by kind of mixer.
_STATE_HEADS = {
    "gdn": ("linear_num_value_heads", "linear_num_key_heads"),
    "mamba2": ("mamba_num_heads", "n_groups"),
}


def _check_heads(mixer: Mixer) -> None:
    """Groups of heads are equal (layers/attention/attention.py; models/qwen3_next.py; layers/mamba)."""
    many, few = mixer.heads, mixer.kv_heads
    names = ("num_attention_heads", "num_key_value_heads")
    if mixer.is_state:
        many, few, names = mixer.state_heads, mixer.state_groups, _STATE_HEADS.get(mixer.kind, names)
    if few and many % few:
        raise ModelConfigError(
            f"config.json: {names[0]} = {many} is no multiple of {names[1]} = {few}.", "Correct one of them.", names[1]
        )


def _builder(config: Mapping[str, Any], text: Text) -> Builder:
    architecture = architecture_of(config)
    if architecture in _WRAPPERS:
        inner = architecture_of(text) if text is not config else ""
        if inner and inner != architecture and inner not in _WRAPPERS:
            architecture = inner
        else:
            return _by_model_type(text)
    if architecture:
        found = _ARCHITECTURES.get(generative_name(architecture))
        if found is None:
            raise UnsupportedArchitectureError(f"the memory of {architecture!s:.80} is not known to this version")
        return found
    model_type = text.get("model_type") or config.get("model_type")
    if isinstance(model_type, str) and model_type not in _MODEL_TYPES:
        raise UnsupportedArchitectureError(f"the memory of model_type {model_type:.80} is not known to this version")
    return _by_model_type(text)


def _by_model_type(text: Text) -> Builder:
    model_type = text.get("model_type")
    if isinstance(model_type, str) and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    return _mla if text.get("kv_lora_rank") is not None else _plain


# --- Reading values ---------------------------------------------------------------------------------------------


def size_of(text: Text, names: Sequence[str], default: int | None = None, minimum: int = 1) -> int:
    """The first of these keys that config.json has, as an integer in bounds."""
    for name in names:
        value = text.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_SIZE:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_SIZE:
            raise ModelConfigError(
                f"config.json: {name} = {short(value)} is not an integer from {minimum} up", key=name
            )
        return value
    if default is None:
        raise ModelConfigError(f"config.json has no {names[0]}", key=names[0])
    return default


def _integers(text: Text, name: str) -> list[int]:
    value = text.get(name)
    if value is None:
        return []
    # `moe_layer_freq`-like lists may hold booleans.
    if not isinstance(value, list) or len(value) > 4 * MAX_LAYERS or not all(isinstance(item, int) for item in value):
        raise ModelConfigError(f"config.json: {name} = {short(value)} is not a list of integers", key=name)
    return [int(item) for item in value]


def _each_layer(text: Text, name: str, layers: int) -> list[int]:
    """A list with an entry a layer, or nothing."""
    values = _integers(text, name)
    if values and len(values) < layers:
        raise ModelConfigError(
            f"config.json: {name} has {len(values)} entries for {layers} layers.",
            "Use the checkpoint's own list.",
            name,
        )
    return values


def _words(text: Text, name: str) -> list[str]:
    value = text.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > 4 * MAX_LAYERS or not all(isinstance(item, str) for item in value):
        raise ModelConfigError(f"config.json: {name} = {short(value)} is not a list of words", key=name)
    return list(value)


def _layer_types(text: Text, layers: int) -> list[str]:
    kinds = _words(text, "layer_types")
    if kinds and len(kinds) < layers:
        raise ModelConfigError(
            f"config.json: layer_types has {len(kinds)} entries for {layers} layers", "", "layer_types"
        )
    return kinds[:layers]


def _layers(text: Text) -> int:
    count = size_of(text, _LAYERS)
    if count > MAX_LAYERS:
        raise ModelConfigError(f"config.json: {count} layers is more than any model has", key="num_hidden_layers")
    return count


def _window(text: Text, default: int | None = None) -> int | None:
    if "sliding_window" not in text:
        return default
    if text.get("sliding_window") is None:
        return None
    # Zero means that there is no window (vllm/config/model.py).
    return size_of(text, ("sliding_window",), minimum=0) or None


def _sub(text: Text, name: str) -> Mapping[str, Any]:
    value = text.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelConfigError(f"config.json: {name} = {short(value)} is not an object", key=name)
    return value


def _attention(text: Text) -> Mixer:
    """Grouped-query attention as most families spell it."""
    heads = size_of(text, HEADS)
    kv_heads = size_of(text, _KV_HEADS, heads)
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        kv_heads = 1
    # Zero or null means "derive it".
    head_dim = size_of(text, ("head_dim", "hidden_size_per_head"), 0, minimum=0)
    hidden = size_of(text, _HIDDEN)
    if not head_dim and hidden < heads:
        raise ModelConfigError(
            f"config.json: hidden_size = {hidden} is too small for {heads} heads.", "Correct it.", "hidden_size"
        )
    head_dim = head_dim or hidden // heads
    return Mixer("full", heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim)


def _sliding(mixer: Mixer, window: int | None) -> Mixer:
    return replace(mixer, kind="sliding", window=window) if window else mixer


# --- Families ---------------------------------------------------------------------------------------------------


def _plain(text: Text) -> list[Mixer]:
    """Attention in every layer; `layer_types` decides where the window holds (models/llama.py)."""
    layers = _layers(text)
    full = _attention(text)
    local = _sliding(full, _window(text))
    kinds = _layer_types(text, layers)
    if not kinds:
        # Without layer_types the window is the whole model's (engine/arg_utils.py: CacheConfig.sliding_window).
        return [local] * layers
    return [local if kind == _SLIDING else full for kind in kinds]


def _qwen(text: Text) -> list[Mixer]:
    """Qwen2, Qwen3 and their kin: a window only with use_sliding_window, and then only when every layer has it."""
    layers = _layers(text)
    full = _attention(text)
    window = _window(text) if text.get("use_sliding_window") is True else None
    kinds = _layer_types(text, layers)
    everywhere = (
        all(kind == _SLIDING for kind in kinds) if kinds else size_of(text, ("max_window_layers",), 28, minimum=0) == 0
    )
    return [_sliding(full, window) if everywhere else full] * layers


def _alternating(period: int, default_window: int, pattern_key: str = "sliding_window_pattern") -> Builder:
    """Every `period`-th layer sees everything, the others a window."""

    def build(text: Text) -> list[Mixer]:
        layers = _layers(text)
        full = _attention(text)
        local = _sliding(full, _window(text, default_window))
        kinds = _layer_types(text, layers)
        if kinds:
            return [local if kind == _SLIDING else full for kind in kinds]
        pattern = text.get(pattern_key)
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            return [local if pattern[index % len(pattern)] == "L" else full for index in range(layers - 1)] + [full]
        every = period if isinstance(pattern, str) else size_of(text, (pattern_key,), period)
        return [local if (index + 1) % every else full for index in range(layers)]

    return build


def _gpt_oss(text: Text) -> list[Mixer]:
    """The window holds in even layers, whatever layer_types says (models/gpt_oss.py)."""
    full = _attention(text)
    local = _sliding(full, _window(text, 128))
    return [full if index % 2 else local for index in range(_layers(text))]


def _gemma3n(text: Text) -> list[Mixer]:
    layers = _layers(text)
    full = _attention(text)
    local = _sliding(full, _window(text, 512))
    kinds = _layer_types(text, layers)
    own = [local if (kinds[index] == _SLIDING if kinds else (index + 1) % 5) else full for index in range(layers)]
    first = layers - min(layers, size_of(text, ("num_kv_shared_layers",), 15, minimum=0))
    return [
        mixer if index < first else replace(mixer, shares_kv_with=max(0, first - (2 if mixer.window else 1)))
        for index, mixer in enumerate(own)
    ]


def _gemma4(text: Text) -> list[Mixer]:
    """Global layers have their own head size, and with attention_k_eq_v their own KV heads (models/gemma4.py)."""
    layers = _layers(text)
    base = replace(
        _attention(text), head_dim=size_of(text, ("head_dim",), 256), v_head_dim=size_of(text, ("head_dim",), 256)
    )
    wide = size_of(text, ("global_head_dim",), 512)
    kv_heads = base.kv_heads
    if text.get("attention_k_eq_v") is True:
        kv_heads = size_of(text, ("num_global_key_value_heads",), kv_heads)
    full = replace(base, kv_heads=kv_heads, head_dim=wide, v_head_dim=wide)
    local = _sliding(base, _window(text, 512))
    kinds = _layer_types(text, layers) or [_SLIDING if (index + 1) % 6 else "full_attention" for index in range(layers)]
    # transformers turns the last layer global.
    kinds[-1] = "full_attention"
    own = [local if kind == _SLIDING else full for kind in kinds]
    first = layers - min(layers, size_of(text, ("num_kv_shared_layers",), 0, minimum=0))
    latest = {kind: index for index, kind in enumerate(kinds[:first])}
    return [
        mixer if index < first or kinds[index] not in latest else replace(mixer, shares_kv_with=latest[kinds[index]])
        for index, mixer in enumerate(own)
    ]


def _llama4(text: Text) -> list[Mixer]:
    """Layers with rotary embeddings attend inside chunks (models/llama4.py)."""
    layers = _layers(text)
    full = _attention(text)
    chunk = size_of(text, ("attention_chunk_size",), 8192) if text.get("attention_chunk_size", 1) is not None else None
    local = replace(full, kind="chunked", window=chunk) if chunk else full
    rope = _each_layer(text, "no_rope_layers", layers)
    if not rope:
        interval = size_of(text, ("no_rope_layer_interval",), 4)
        rope = [int((index + 1) % interval != 0) for index in range(layers)]
    return [local if rope[index] else full for index in range(layers)]


def _step(text: Text) -> list[Mixer]:
    """Step-3.5 and 3.7: global layers may have other head counts for Q, KV heads are the same (models/step3p5.py)."""
    layers = _layers(text)
    full = replace(_attention(text), kv_heads=size_of(text, ("num_attention_groups", "num_key_value_heads")))
    local = _sliding(full, _window(text))
    local = replace(local, heads=size_of(text, ("num_sliding_attention_heads",), local.heads))
    other = text.get("attention_other_setting")
    if isinstance(other, Mapping) and other.get("attention_type") == _SLIDING:
        local = replace(local, heads=size_of(other, ("num_attention_heads",), local.heads))
    kinds = _layer_types(text, layers) or [_SLIDING if index % 2 == 0 else "" for index in range(layers)]
    return [local if kind == _SLIDING else full for kind in kinds]


def _mimo_v2(text: Text) -> list[Mixer]:
    """K and V of different size, and other heads in the windowed layers (models/mimo_v2.py)."""
    layers = _layers(text)
    full = _attention(text)
    full = replace(full, v_head_dim=size_of(text, ("v_head_dim",), full.head_dim))
    head_dim = size_of(text, ("swa_head_dim",), full.head_dim)
    local = Mixer(
        "sliding",
        heads=size_of(text, ("swa_num_attention_heads",), full.heads),
        kv_heads=size_of(text, ("swa_num_key_value_heads",), full.kv_heads),
        head_dim=head_dim,
        v_head_dim=size_of(text, ("swa_v_head_dim",), head_dim),
        window=size_of(text, ("sliding_window_size", "sliding_window"), 128),
    )
    pattern = _each_layer(text, "hybrid_layer_pattern", layers) or [0] * layers
    return [local if pattern[index] == 1 else full for index in range(layers)]


def _minimax_m3(text: Text) -> list[Mixer]:
    """Sparse layers keep one index key a token beside K and V (models/minimax_m3)."""
    layers = _layers(text)
    full = _attention(text)
    sparse_config = _sub(text, "sparse_attention_config")
    freq = _each_layer(sparse_config, "sparse_attention_freq", layers) or [0] * layers
    sparse = full
    if any(freq):
        dim = size_of(sparse_config, ("sparse_index_dim",), 128)
        sparse = replace(full, index_dim=dim, index_kind="minimax_m3")
    return [sparse if freq[index] else full for index in range(layers)]


def _deci(text: Text) -> list[Mixer]:
    """NAS models: each block has its own group size, or no attention at all (models/nemotron_nas.py)."""
    layers = _layers(text)
    blocks = text.get("block_configs")
    if not isinstance(blocks, list):
        return _plain(text)
    heads = size_of(text, HEADS)
    head_dim = size_of(text, ("head_dim",), 0, minimum=0) or size_of(text, _HIDDEN) // heads
    result = []
    for block in blocks[:layers]:
        attention = _sub(block, "attention") if isinstance(block, Mapping) else {}
        if attention.get("no_op") is True or attention.get("replace_with_linear") is True:
            result.append(NONE)
            continue
        group = size_of(attention, ("n_heads_in_group",))
        result.append(Mixer("full", heads, max(1, heads // group), head_dim, head_dim))
    if len(result) < layers:
        raise ModelConfigError(
            f"config.json: block_configs has {len(result)} entries for {layers} layers", key="block_configs"
        )
    return result


def _mla(text: Text) -> list[Mixer]:
    """Multi-head latent attention: one row a token that no tensor rank shares, with an indexer for DSA models."""
    layers = _layers(text)
    mixer = _latent(text)
    if text.get("index_topk") is None:
        return [mixer] * layers
    indexed = replace(mixer, index_dim=size_of(text, ("index_head_dim",), 128), index_kind="dsa")
    pattern = text.get("index_topk_pattern")
    freq = size_of(text, ("index_topk_freq",), 1)
    offset = size_of(text, ("index_skip_topk_offset",), 2, minimum=0)
    shared = replace(indexed, index_shared=True)
    if isinstance(pattern, str):
        return [shared if pattern[index : index + 1] == "S" else indexed for index in range(layers)]
    return [shared if max(index - offset + 1, 0) % freq else indexed for index in range(layers)]


def _latent(text: Text) -> Mixer:
    row = size_of(text, ("kv_lora_rank",)) + size_of(text, ("qk_rope_head_dim",), 64, minimum=0)
    return Mixer("mla", heads=size_of(text, HEADS), kv_heads=1, head_dim=row)


def _deepseek(text: Text) -> list[Mixer]:
    return _mla(text) if text.get("kv_lora_rank") is not None else _plain(text)


def _deepseek_v4(text: Text) -> list[Mixer]:
    """A window in every layer, and compressed rows (with an indexer at ratio 4) in most (models/deepseek_v4)."""
    layers = _layers(text)
    window = Mixer(
        "mla",
        heads=size_of(text, HEADS),
        kv_heads=1,
        head_dim=size_of(text, ("head_dim",), 512),
        window=size_of(text, ("sliding_window",), 128),
        index_kind="deepseek_v4",
    )
    ratios = _integers(text, "compress_ratios")
    if not ratios:
        # The default of transformers' DeepseekV4Config: two layers at 128, then 4 and 128 in turn.
        ratios = [128] * min(2, layers) + [4 if index % 2 == 0 else 128 for index in range(layers - 2)]
    by_ratio = {
        0: window,
        1: window,
        4: replace(window, compress=4, index_dim=size_of(text, ("index_head_dim",), 128)),
        128: replace(window, compress=128),
    }
    result = []
    for index in range(layers):
        ratio = ratios[index] if index < len(ratios) else 0
        if ratio not in by_ratio:
            raise ModelConfigError(f"config.json: a compress ratio of {short(ratio)} is none of 0, 4, 128")
        result.append(by_ratio[ratio])
    return result


def _gdn(text: Text) -> list[Mixer]:
    """Qwen3-Next and Qwen3.5: gated delta nets with full attention in between (models/qwen3_next.py)."""
    layers = _layers(text)
    full = _attention(text)
    if text.get("head_dim") is None:
        full = replace(full, head_dim=256, v_head_dim=256)
    key_heads = size_of(text, ("linear_num_key_heads",), 16)
    value_heads = size_of(text, ("linear_num_value_heads",), 32)
    key_dim = size_of(text, ("linear_key_head_dim",), 128)
    value_dim = size_of(text, ("linear_value_head_dim",), 128)
    dtype = text.get("mamba_ssm_dtype")
    linear = Mixer(
        "gdn",
        inner=value_heads * value_dim,
        state_heads=value_heads,
        state_head_dim=value_dim,
        state_dim=key_dim,
        state_groups=key_heads,
        conv_kernel=size_of(text, ("linear_conv_kernel_dim",), 4),
        state_dtype=dtype if isinstance(dtype, str) else None,
    )
    kinds = _layer_types(text, layers)
    interval = size_of(text, ("full_attention_interval",), 4)
    return [
        full if (kinds[index] == "full_attention" if kinds else (index + 1) % interval == 0) else linear
        for index in range(layers)
    ]


_FLASH_KDA_HEAD = 128


def _kimi_linear(text: Text) -> list[Mixer]:
    """Kimi delta attention with latent attention in between (models/kimi_linear.py, vllm/models/kimi_k3)."""
    layers = _layers(text)
    linear_config = _sub(text, "linear_attn_config")
    if not linear_config:
        return _mla(text)
    heads = size_of(linear_config, ("num_heads",))
    head_dim = size_of(linear_config, ("head_dim",), 128)
    kda = Mixer(
        "kda",
        inner=heads * head_dim,
        state_heads=heads,
        state_head_dim=head_dim,
        state_dim=head_dim,
        state_groups=heads,
        conv_kernel=size_of(linear_config, ("short_conv_kernel_size",), 4),
        exports=linear_config.get("use_full_rank_gate") is True
        and linear_config.get("gate_lower_bound") is not None
        and head_dim == _FLASH_KDA_HEAD,
    )
    mla = _latent(text)
    # Layers are counted from one.
    linear = frozenset(_integers(linear_config, "kda_layers"))
    return [kda if index + 1 in linear else mla for index in range(layers)]


def _mamba2(text: Text, prefix: str = "mamba_") -> Mixer:
    """The state of a Mamba-2 layer as Bamba-like configs spell it."""
    heads = size_of(text, ("mamba_n_heads", "mamba_num_heads"), 128)
    inner = size_of(text, ("mamba_d_ssm",), 0, minimum=0)
    inner = inner or size_of(text, ("mamba_expand",), 2) * size_of(text, _HIDDEN)
    head_dim = text.get("mamba_d_head", "auto")
    size = inner // heads if head_dim in ("auto", None) else size_of(text, ("mamba_d_head",))
    return Mixer(
        "mamba2",
        inner=inner,
        state_heads=heads,
        state_head_dim=size,
        state_dim=size_of(text, ("mamba_d_state",), 256),
        state_groups=size_of(text, ("mamba_n_groups",), 1),
        conv_kernel=size_of(text, ("mamba_d_conv",), 4),
        chunk=size_of(text, ("mamba_chunk_size", "chunk_size"), 256),
    )


def _granite_hybrid(text: Text) -> list[Mixer]:
    layers = _layers(text)
    kinds = _layer_types(text, layers)
    state = _mamba2(text)
    full = _attention(text)
    return [full if kind in ("attention", "full_attention") else state for kind in kinds or ["mamba"] * layers]


def _bamba(text: Text) -> list[Mixer]:
    attention = frozenset(_integers(text, "attn_layer_indices"))
    state = _mamba2(text)
    full = _attention(text)
    return [full if index in attention else state for index in range(_layers(text))]


def _falcon_h1(text: Text) -> list[Mixer]:
    return [replace(_attention(text), beside=_mamba2(text))] * _layers(text)


def _jamba(text: Text) -> list[Mixer]:
    period = size_of(text, ("attn_layer_period",), 8)
    offset = size_of(text, ("attn_layer_offset",), 4, minimum=0)
    inner = size_of(text, ("mamba_expand",), 2) * size_of(text, _HIDDEN)
    state = Mixer(
        "mamba1",
        inner=inner,
        state_dim=size_of(text, ("mamba_d_state",), 16),
        conv_kernel=size_of(text, ("mamba_d_conv",), 4),
    )
    full = _attention(text)
    return [full if index % period == offset else state for index in range(_layers(text))]


def _mamba1_only(text: Text) -> list[Mixer]:
    inner = size_of(text, ("intermediate_size",), 0, minimum=0) or size_of(text, ("expand",), 2) * size_of(
        text, _HIDDEN
    )
    state = Mixer(
        "mamba1",
        inner=inner,
        state_dim=size_of(text, ("state_size",), 16),
        conv_kernel=size_of(text, ("conv_kernel",), 4),
    )
    return [state] * _layers(text)


def _mamba2_only(text: Text) -> list[Mixer]:
    state = Mixer(
        "mamba2",
        inner=size_of(text, ("expand",), 2) * size_of(text, _HIDDEN),
        state_heads=size_of(text, ("num_heads",), 128),
        state_head_dim=size_of(text, ("head_dim",), 64),
        state_dim=size_of(text, ("state_size",), 128),
        state_groups=size_of(text, ("n_groups",), 8),
        conv_kernel=size_of(text, ("conv_kernel",), 4),
        chunk=size_of(text, ("chunk_size",), 256),
    )
    return [state] * _layers(text)


_NEMOTRON_KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "none",
    "E": "none",
    "|": "",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "moe": "none",
    "mlp": "none",
}


def _nemotron_kinds(pattern: Sequence[Any]) -> list[str]:
    kinds = []
    for item in pattern:
        if not isinstance(item, str) or item not in _NEMOTRON_KINDS:
            raise ModelConfigError(
                f"config.json: {short(item)} is no layer of a Nemotron-H pattern", key="hybrid_override_pattern"
            )
        if _NEMOTRON_KINDS[item]:
            kinds.append(_NEMOTRON_KINDS[item])
    return kinds


def _is_nemotron_h(config: Mapping[str, Any], text: Text) -> bool:
    return text.get("model_type") == "nemotron_h" or architecture_of(config).startswith("NemotronH")


def _nemotron_attention(text: Text) -> Mixer:
    head_dim = size_of(text, ("attention_head_dim", "head_dim"), 128)
    return _sliding(replace(_attention(text), head_dim=head_dim, v_head_dim=head_dim), _window(text))


def _nemotron_h(text: Text) -> list[Mixer]:
    """Blocks of Mamba-2, attention, MLP or experts, one a layer (models/nemotron_h.py)."""
    pattern = text.get("hybrid_override_pattern") or text.get("layers_block_type") or text.get("layer_types")
    if pattern is None and isinstance(text.get("block_configs"), list):
        blocks = text["block_configs"][: MAX_LAYERS + 1]
        pattern = [block.get("block_type") for block in blocks if isinstance(block, Mapping)]
    if not isinstance(pattern, str | list):
        raise ModelConfigError(
            "config.json has no hybrid_override_pattern and no layers_block_type", key="hybrid_override_pattern"
        )
    # The pattern decides the number of layers, not num_hidden_layers (transformers: NemotronHConfig).
    kinds = _nemotron_kinds(list(pattern)[: MAX_LAYERS + 1])
    if len(kinds) > MAX_LAYERS:
        raise ModelConfigError(
            f"config.json: {len(kinds)} layers or more are more than any model has", key="hybrid_override_pattern"
        )
    heads = size_of(text, ("mamba_num_heads",), 128)
    head_dim = size_of(text, ("mamba_head_dim",), 64)
    dtype = text.get("mamba_ssm_cache_dtype", "float32")
    state = Mixer(
        "mamba2",
        inner=heads * head_dim,
        state_heads=heads,
        state_head_dim=head_dim,
        state_dim=size_of(text, ("ssm_state_size",), 128),
        state_groups=size_of(text, ("n_groups", "mamba_n_groups"), 8),
        conv_kernel=size_of(text, ("conv_kernel", "mamba_d_conv"), 4),
        chunk=size_of(text, ("chunk_size", "mamba_chunk_size"), 128),
        state_dtype=dtype if isinstance(dtype, str) else "float32",
    )
    by_kind = {"mamba": state, "attention": _nemotron_attention(text), "none": NONE}
    return [by_kind[kind] for kind in kinds]


def _lfm2(text: Text) -> list[Mixer]:
    layers = _layers(text)
    conv = Mixer(
        "short_conv",
        inner=size_of(text, ("conv_dim",), 0, minimum=0) or size_of(text, _HIDDEN),
        conv_kernel=size_of(text, ("conv_L_cache",), 3),
    )
    full = _attention(text)
    kinds = _layer_types(text, layers)
    if not kinds:
        attention = frozenset(_integers(text, "full_attn_idxs") or range(layers))
        kinds = ["full_attention" if index in attention else "conv" for index in range(layers)]
    return [full if kind == "full_attention" else conv for kind in kinds]


def _minimax_text(text: Text) -> list[Mixer]:
    """MiniMax-Text-01 and M1: lightning attention keeps a square state a head."""
    layers = _layers(text)
    full = _attention(text)
    linear = Mixer(
        "lightning",
        inner=full.heads * full.head_dim,
        state_heads=full.heads,
        state_head_dim=full.head_dim,
        state_dim=full.head_dim,
    )
    kinds = _layer_types(text, layers)
    if kinds:
        return [full if kind == "full_attention" else linear for kind in kinds]
    types = _each_layer(text, "attn_type_list", layers) or [index % 2 for index in range(layers)]
    return [full if types[index] == 1 else linear for index in range(layers)]


def _encoder(text: Text) -> list[Mixer]:
    """Bidirectional encoders keep no cache."""
    return [replace(_attention(text), kind="encoder")] * _layers(text)


def _embedding_gemma(text: Text) -> list[Mixer]:
    """EmbeddingGemma sees the whole text from every token, so it keeps no cache (models/gemma3.py)."""
    layers = _GEMMA3(text)
    if text.get("use_bidirectional_attention") is not True:
        return layers
    return [replace(layers[0], kind="encoder", window=None)] * len(layers)


def _whole_heads(text: Text) -> list[Mixer]:
    """MiniCPM3: latent projections, but a plain cache of whole heads (models/minicpm3.py)."""
    heads = size_of(text, HEADS)
    dim = size_of(text, ("qk_nope_head_dim",)) + size_of(text, ("qk_rope_head_dim",))
    return [Mixer("full", heads, heads, dim, dim)] * _layers(text)


_GEMMA2 = _alternating(2, 4096)
_GEMMA3 = _alternating(6, 4096)
_COHERE2 = _alternating(4, 4096)

_FAMILIES: tuple[tuple[Builder, str], ...] = (
    (
        _plain,
        "AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM BaiChuanForCausalLM BaichuanForCausalLM "
        "BailingMoeForCausalLM BailingMoeV2ForCausalLM BloomForCausalLM ChatGLMModel ChatGLMForConditionalGeneration "
        "CohereForCausalLM CwmForCausalLM DeepseekForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM "
        "ExaoneForCausalLM FalconForCausalLM FlexOlmoForCausalLM GemmaForCausalLM GlmForCausalLM Glm4ForCausalLM "
        "Glm4MoeForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM "
        "GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM "
        "GraniteSWAForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HYV3ForCausalLM "
        "HyperCLOVAXForCausalLM InternLMForCausalLM InternLM2ForCausalLM InternLM3ForCausalLM IQuestCoderForCausalLM "
        "Jais2ForCausalLM LlamaForCausalLM LLaMAForCausalLM MiniCPMForCausalLM MiniMaxM2ForCausalLM "
        "Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MixtralForCausalLM NemotronForCausalLM "
        "OlmoForCausalLM Olmo2ForCausalLM OlmoeForCausalLM OPTForCausalLM OrionForCausalLM PhiForCausalLM "
        "Phi3ForCausalLM PhiMoEForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM SolarForCausalLM StableLmForCausalLM "
        "Starcoder2ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM",
    ),
    (
        _qwen,
        "Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM MiMoForCausalLM DotsOCRForCausalLM "
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
        "Qwen3VLMoeForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen2_5OmniModel "
        "Qwen2_5OmniForConditionalGeneration Qwen3OmniMoeForConditionalGeneration Qwen3ASRForConditionalGeneration",
    ),
    (_GEMMA2, "Gemma2ForCausalLM VaultGemmaForCausalLM"),
    (_GEMMA3, "Gemma3ForCausalLM Gemma3ForConditionalGeneration"),
    (_embedding_gemma, "Gemma3TextModel"),
    (_gemma3n, "Gemma3nForCausalLM Gemma3nForConditionalGeneration"),
    (_gemma4, "Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration"),
    (_COHERE2, "Cohere2ForCausalLM Cohere2VisionForConditionalGeneration Olmo3ForCausalLM"),
    (_alternating(4, 4096), "Exaone4ForCausalLM"),
    (_gpt_oss, "GptOssForCausalLM"),
    (_llama4, "Llama4ForCausalLM Llama4ForConditionalGeneration"),
    (
        _step,
        "Step3p5ForCausalLM Step3p7FlashForCausalLM Step3p7ForCausalLM Step3p7ForConditionalGeneration",
    ),
    (_mimo_v2, "MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM"),
    (
        _minimax_m3,
        "MiniMaxM3ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration",
    ),
    (_deci, "DeciLMForCausalLM"),
    (
        _deepseek,
        "DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM GlmMoeDsaForCausalLM "
        "Glm4MoeLiteForCausalLM KimiK25ForConditionalGeneration KimiVLForConditionalGeneration AXK1ForCausalLM "
        "MistralLarge3ForCausalLM DeepseekVLV2ForCausalLM PanguUltraMoEForCausalLM",
    ),
    (_whole_heads, "MiniCPM3ForCausalLM"),
    (_deepseek_v4, "DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration"),
    (
        _gdn,
        "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForConditionalGeneration "
        "Qwen3_5MoeForConditionalGeneration OlmoHybridForCausalLM",
    ),
    (_kimi_linear, "KimiLinearForCausalLM KimiK3ForConditionalGeneration"),
    (
        _nemotron_h,
        "NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_VL_V2 NemotronH_Nano_Omni_Reasoning_V3 "
        "NemotronH_Super_Omni_Reasoning_V3 NemotronH_Omni_Reasoning_V3",
    ),
    (_granite_hybrid, "GraniteMoeHybridForCausalLM"),
    (_bamba, "BambaForCausalLM"),
    (_falcon_h1, "FalconH1ForCausalLM"),
    (_jamba, "JambaForCausalLM"),
    (_mamba1_only, "MambaForCausalLM FalconMambaForCausalLM"),
    (_mamba2_only, "Mamba2ForCausalLM"),
    (_lfm2, "Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration"),
    (_minimax_text, "MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM MiniMaxForCausalLM"),
    (
        _encoder,
        "BertModel BertForSequenceClassification BertForTokenClassification RobertaModel "
        "RobertaForSequenceClassification RobertaForTokenClassification XLMRobertaModel "
        "XLMRobertaForSequenceClassification XLMRobertaForTokenClassification ModernBertModel "
        "ModernBertForSequenceClassification ModernBertForTokenClassification NomicBertModel GteModel GteNewModel "
        "GteNewForSequenceClassification",
    ),
)
_ARCHITECTURES: dict[str, Builder] = {name: build for build, names in _FAMILIES for name in names.split()}

# Wrappers around any language model: what is inside tells its own family.
_WRAPPER_NAMES = (
    "AriaForConditionalGeneration InternVLChatModel InternS1ForConditionalGeneration InternVLForConditionalGeneration "
    "LlavaForConditionalGeneration LlavaNextForConditionalGeneration LlavaOnevisionForConditionalGeneration "
    "Mistral3ForConditionalGeneration PixtralForConditionalGeneration PaliGemmaForConditionalGeneration "
    "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration Glm4vForConditionalGeneration "
    "Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration Llama_Nemotron_Nano_VL NVLM_D UltravoxModel "
    "VoxtralForConditionalGeneration LightOnOCRForConditionalGeneration GraniteSpeechForConditionalGeneration"
)
_WRAPPERS = frozenset(_WRAPPER_NAMES.split())

_TYPES: tuple[tuple[Builder, str], ...] = (
    (
        _plain,
        "llama mistral ministral ministral3 mixtral gemma granite granitemoe cohere phi phi3 phimoe gpt2 gpt_neox "
        "gpt_bigcode gptj falcon olmo olmo2 olmoe opt starcoder2 internlm2 nemotron stablelm glm glm4 glm4_moe "
        "glm4v_text glm4v_moe_text chatglm minimax_m2 seed_oss arcee exaone ernie4_5 ernie4_5_moe phi-msft smollm3 "
        "apertus hunyuan_v1_dense",
    ),
    (_qwen, "qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_text qwen3_vl_moe mimo"),
    (_qwen, "qwen3_vl_moe_text"),
    (_GEMMA2, "gemma2"),
    (_GEMMA3, "gemma3 gemma3_text"),
    (_gemma3n, "gemma3n gemma3n_text"),
    (_gemma4, "gemma4 gemma4_text gemma4_unified gemma4_unified_text"),
    (_COHERE2, "cohere2 olmo3 exaone4"),
    (_gpt_oss, "gpt_oss"),
    (_llama4, "llama4 llama4_text"),
    (_step, "step3p5 step3p7"),
    (_mimo_v2, "mimo_v2 mimo_v2_flash"),
    (_minimax_m3, "minimax_m3"),
    (_deci, "nemotron-nas"),
    (_deepseek, "deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe_lite kimi_k2 mistral4"),
    (_deepseek_v4, "deepseek_v4 deepseek_ref"),
    (_gdn, "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text olmo_hybrid"),
    (_kimi_linear, "kimi_linear kimi_k3"),
    (_nemotron_h, "nemotron_h"),
    (_granite_hybrid, "granitemoehybrid"),
    (_bamba, "bamba"),
    (_falcon_h1, "falcon_h1"),
    (_jamba, "jamba"),
    (_mamba1_only, "mamba falcon_mamba"),
    (_mamba2_only, "mamba2"),
    (_lfm2, "lfm2 lfm2_moe"),
    (_minimax_text, "minimax minimax_text_01"),
)
_MODEL_TYPES: dict[str, Builder] = {name: build for build, names in _TYPES for name in names.split()}
