"""Older dense families, encoders and pooling models: against vLLM's own classes and published parameter counts."""

from __future__ import annotations

import contextlib

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import (
    PlannerError,
    UnsupportedArchitectureError,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.estimate import estimate
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.families_encoder import is_pooling
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.weights import stage_weights
from hypothesis import given, settings
from hypothesis import strategies as st

H200 = {"name": "NVIDIA H200", "memory_total_mib": 143771}


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def config(architecture, *sizes, **more):
    """A config of four layers; `sizes` in the order of SIZES."""
    return {"architectures": [architecture], "num_hidden_layers": 4, **dict(zip(SIZES, sizes, strict=True)), **more}


LONG = {"max_position_embeddings": 131072}
PHI = config(
    "PhiForCausalLM",
    2560,
    10240,
    32,
    32,
    51200,
    partial_rotary_factor=0.4,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
STARCODER2 = config("Starcoder2ForCausalLM", 4608, 18432, 36, 4, 49152, max_position_embeddings=16384)
OPT = config(
    "OPTForCausalLM", 2048, 0, 32, 32, 50272, ffn_dim=8192, word_embed_proj_dim=2048, max_position_embeddings=2048
)
del OPT["intermediate_size"]
OPT_NARROW = {
    **OPT,
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
NEOX = config(
    "GPTNeoXForCausalLM",
    4096,
    16384,
    32,
    32,
    50432,
    max_position_embeddings=2048,
    rotary_pct=0.25,
    tie_word_embeddings=False,
)
FALCON = {
    "architectures": ["FalconForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "vocab_size": 65024,
    "multi_query": True,
    "new_decoder_architecture": True,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
}
STABLELM = config(
    "StableLmForCausalLM",
    2048,
    5632,
    32,
    32,
    100352,
    max_position_embeddings=4096,
    partial_rotary_factor=0.25,
    use_qkv_bias=True,
    tie_word_embeddings=False,
)
EXAONE = config(
    "Exaone4ForCausalLM",
    5120,
    27392,
    40,
    8,
    102400,
    head_dim=128,
    sliding_window=4096,
    tie_word_embeddings=False,
    layer_types=["sliding_attention"] * 3 + ["full_attention"],
    **LONG,
)
GRANITE_MOE = config(
    "GraniteMoeForCausalLM",
    1024,
    512,
    16,
    8,
    49155,
    num_local_experts=32,
    num_experts_per_tok=8,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
GRANITE_SHARED = {
    **GRANITE_MOE,
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "shared_intermediate_size": 1024,
}
GRANITE_HYBRID = {
    **config("GraniteMoeHybridForCausalLM", 1536, 512, 12, 4, 100352, **LONG),
    "num_hidden_layers": 8,
    "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 2,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "position_embedding_type": "nope",
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_proj_bias": False,
}
OLMO = config("OlmoForCausalLM", 4096, 11008, 32, 32, 50304, max_position_embeddings=2048, tie_word_embeddings=False)
OLMO2 = config("Olmo2ForCausalLM", 4096, 11008, 32, 32, 100352, max_position_embeddings=4096, tie_word_embeddings=False)
OLMO3 = {
    **OLMO2,
    "architectures": ["Olmo3ForCausalLM"],
    "vocab_size": 100278,
    "max_position_embeddings": 65536,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
}
OLMOE = config(
    "OlmoeForCausalLM",
    2048,
    1024,
    16,
    16,
    50304,
    num_experts=64,
    num_experts_per_tok=8,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
COMMAND_R7B = config(
    "Cohere2ForCausalLM", 4096, 14336, 32, 8, 256000, max_position_embeddings=8192, sliding_window=4096
)
SMOLLM3 = config("SmolLM3ForCausalLM", 2048, 11008, 16, 4, 128256, max_position_embeddings=65536)
SEED = config(
    "SeedOssForCausalLM",
    5120,
    27648,
    80,
    8,
    155136,
    head_dim=128,
    max_position_embeddings=524288,
    attention_bias=True,
    attention_out_bias=False,
    tie_word_embeddings=False,
)
GLM4 = config(
    "Glm4ForCausalLM",
    4096,
    13696,
    32,
    2,
    151552,
    head_dim=128,
    max_position_embeddings=32768,
    partial_rotary_factor=0.5,
    tie_word_embeddings=False,
)
GLM = config("GlmForCausalLM", 4096, 13696, 32, 2, 151552, head_dim=128, attention_bias=True, **LONG)
GLM["tie_word_embeddings"] = False
ERNIE = config("Ernie4_5ForCausalLM", 1024, 3072, 16, 2, 103424, head_dim=128, tie_word_embeddings=True, **LONG)
ERNIE_MOE = config(
    "Ernie4_5_MoeForCausalLM",
    2560,
    12288,
    20,
    4,
    103424,
    tie_word_embeddings=True,
    moe_num_experts=64,
    moe_k=6,
    moe_intermediate_size=1536,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_layer_end_index=4,
    moe_layer_interval=1,
    **LONG,
)
HUNYUAN = config(
    "HunYuanDenseV1ForCausalLM",
    4096,
    14336,
    32,
    8,
    128167,
    head_dim=128,
    use_qk_norm=True,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
APERTUS = config("ApertusForCausalLM", 4096, 21504, 32, 8, 131072, max_position_embeddings=65536)
APERTUS["tie_word_embeddings"] = False
ARCEE = config(
    "ArceeForCausalLM",
    2560,
    18432,
    20,
    4,
    128004,
    head_dim=128,
    max_position_embeddings=65536,
    tie_word_embeddings=False,
    rope_scaling={"type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096},
)
NEMOTRON = config(
    "NemotronForCausalLM",
    3072,
    9216,
    24,
    8,
    256000,
    head_dim=128,
    max_position_embeddings=4096,
    partial_rotary_factor=0.5,
    tie_word_embeddings=False,
)
BERT = config("BertModel", 768, 3072, 12, 12, 30522, max_position_embeddings=512, type_vocab_size=2)
XLM = config("XLMRobertaModel", 1024, 4096, 16, 16, 250002, max_position_embeddings=8194, type_vocab_size=1)
MODERN = config("ModernBertModel", 1024, 2624, 16, 16, 50368, max_position_embeddings=8192)
NOMIC = {
    "architectures": ["NomicBertModel"],
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 4,
    "n_positions": 2048,
    "vocab_size": 30528,
    "type_vocab_size": 2,
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
}
QWEN3 = config(
    "Qwen3ForCausalLM",
    1024,
    3072,
    16,
    8,
    151669,
    head_dim=128,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
QWEN3_LARGE = {
    **QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "vocab_size": 151665,
    "tie_word_embeddings": False,
}
QWEN2 = config(
    "Qwen2ForRewardModel", 3584, 18944, 28, 4, 152064, max_position_embeddings=4096, tie_word_embeddings=False
)
LLAMA = config(
    "LlamaForSequenceClassification", 4096, 14336, 32, 8, 128256, num_labels=1, tie_word_embeddings=False, **LONG
)
MISTRAL = config("MistralModel", 4096, 14336, 32, 8, 32000, max_position_embeddings=32768, tie_word_embeddings=False)
TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
POOLING = {"runner": "pooling"}


def renamed(source, architecture, **more):
    return {**source, "architectures": [architecture], **more}


# Bytes that vLLM 0.26's classes have as parameters and buffers (seen with a faked rank on the meta device), by stage.
ORACLE = [
    (PHI, {}, [1153902736]),
    (PHI, PP2, [839217224, 839217224]),
    (STARCODER2, {}, [2189859328]),
    (STARCODER2, PP2, [1321413120, 1321431552]),
    (OPT, {}, [617316496]),
    (OPT, TP2, [312909968]),
    (OPT, PP2, [415883336, 415883336]),
    (OPT_NARROW, TP2, [82460816]),
    (NEOX, {}, [2437464208]),
    (NEOX, TP2, [1218904208]),
    (NEOX, PP2, [1631944776, 1631944776]),
    (FALCON, {}, [6501728400]),
    (FALCON, TP2, [3251142800]),
    (FALCON, PP2, [3783688264, 3783688264]),
    (STABLELM, {}, [1233379472]),
    (STABLELM, PP2, [1027801160, 1027801160]),
    (EXAONE, {}, [6000046224]),
    (GRANITE_MOE, {}, [529418384]),
    (GRANITE_MOE, TP2, [265111696]),
    (GRANITE_MOE, PP2, [315369544, 315369544]),
    (GRANITE_SHARED, {}, [554584208]),
    (GRANITE_HYBRID, {}, [3019089060]),
    (GRANITE_HYBRID, TP2, [1513125732]),
    (GRANITE_HYBRID, PP2, [1672051200, 1655322276]),
    (OLMO, {}, [2443182592]),
    (OLMO, PP2, [1221591552, 1221591552]),
    (OLMO2, {}, [3263308288]),
    (OLMO2, PP2, [1631650304, 1631658496]),
    (OLMO3, {}, [3295813776]),
    (OLMOE, {}, [3769700496]),
    (OLMOE, TP2, [1885933712]),
    (OLMOE, PP2, [2091421768, 2091421768]),
    (COMMAND_R7B, {}, [3844120720]),
    (COMMAND_R7B, PP2, [2971689032, 2971689032]),
    (SEED, {}, [7631726736]),
    (SEED, PP2, [3882967112, 3882977352]),
    (GLM4, {}, [4118945936]),
    (GLM, {}, [4131500176]),
    (ERNIE, {}, [358631568]),
    (ERNIE, PP2, [301998152, 302000200]),
    (ERNIE_MOE, {}, [5551077264]),
    (ERNIE_MOE, TP2, [2793322384]),
    (HUNYUAN, {}, [2803443856]),
    (HUNYUAN, PP2, [1930986568, 1930994760]),
    (APERTUS, {}, [3909167280]),
    (APERTUS, PP2, [1962968152, 1962976344]),
    (ARCEE, {}, [2213196944]),
    (ARCEE, PP2, [1117081672, 1117086792]),
    (NEMOTRON, {}, [3800674448]),
    (BERT, {}, [104486032]),
    (BERT, TP2, [52265104]),
    (renamed(BERT, "BertForSequenceClassification", num_labels=2), {}, [106854552]),
    (renamed(BERT, "BertForTokenClassification", num_labels=9), {}, [104513716]),
    (XLM, {}, [629977248]),
    (XLM, TP2, [315048096]),
    (renamed(XLM, "XLMRobertaForSequenceClassification", id2label={"0": "LABEL_0"}), {}, [634179748]),
    (MODERN, {}, [203311248]),
    (renamed(MODERN, "ModernBertForSequenceClassification", num_labels=1), {}, [207513748]),
    (NOMIC, {}, [122776720]),
    (QWEN3, POOLING, [444878992]),
    (QWEN3, {**POOLING, **TP2}, [226644112]),
    (QWEN3_LARGE, POOLING, [2794530960]),
    (QWEN3_LARGE, {**POOLING, **TP2}, [1401497744]),
    (renamed(QWEN3, "Qwen3ForSequenceClassification", num_labels=1), {}, [444883088]),
    (MISTRAL, {}, [2015436944]),
    (LLAMA, {}, [2829148304]),
]
# Large tensors are rounded to the allocator's segments, which weighs more in four layers of some hundred MiB.
ROUNDED = [
    (PHI, TP2, [577063056]),
    (STARCODER2, TP2, [1095049728]),
    (OPT_NARROW, {}, [158576784]),
    (EXAONE, TP2, [3016847504]),
    (SMOLLM3, {}, [1150325248]),
    (SMOLLM3, PP2, [837829120, 837833216]),
    (GLM4, TP2, [2061639824]),
    (ARCEE, TP2, [1117107344]),
    (NEMOTRON, TP2, [1900654736]),
    (MODERN, TP2, [124209296]),
    (QWEN2, {}, [3006921876]),
    (QWEN2, TP2, [1504017556]),
    (renamed(QWEN2, "Qwen2ForProcessRewardModel"), {}, [3006936216]),
]


def bytes_of(source, flags, version="0.26.0") -> list[float]:
    engine = parse_engine({**flags, "vllm_version": version})
    return [stage.bytes for stage in stage_weights(parse_config(source), engine)]


@pytest.mark.parametrize(("source", "flags", "expected"), ORACLE)
def test_against_the_engines_own_classes(source, flags, expected) -> None:
    assert bytes_of(source, flags) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("source", "flags", "expected"), ROUNDED)
def test_small_models_round_up(source, flags, expected) -> None:
    for got, held in zip(bytes_of(source, flags), expected, strict=True):
        assert -1e-5 <= got / held - 1 <= 0.019


# Of the whole models: their authors' counts (model cards) in two bytes each.
@pytest.mark.parametrize(
    ("source", "layers", "parameters"),
    [
        (STABLELM, 24, 1_644_515_328),
        (OLMOE, 16, 6_919_161_856),
        (SEED, 64, 36_151_104_512),
        (SMOLLM3, 36, 3_075_098_624),
        (GLM4, 40, 9_400_279_040),
    ],
)
def test_published_parameter_counts(source, layers, parameters) -> None:
    whole = {**source, "num_hidden_layers": layers}
    assert bytes_of(whole, {})[0] / 2 == pytest.approx(parameters, rel=0.01)


def test_transformers_modules_have_no_rotary_table() -> None:
    table = 524288 * 128 * 2
    assert bytes_of(SEED, {}, "0.26.0")[0] - bytes_of(SEED, {}, "0.33.0")[0] == pytest.approx(table)
    # And they keep the head off the first stage.
    assert bytes_of(PHI, PP2, "0.33.0")[0] < 0.75 * bytes_of(PHI, PP2, "0.26.0")[0]


DECI = {
    **config("DeciLMForCausalLM", 8192, 0, 64, 8, 128256, tie_word_embeddings=False, **LONG),
    "block_configs": [
        {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 2.625}},
        {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 8}, "ffn": {"no_op": True, "ffn_mult": None}},
        {"attention": {"n_heads_in_group": 16}, "ffn": {"intermediate_size": 1024}},
    ],
}
del DECI["intermediate_size"]


def test_blocks_of_a_nas_model() -> None:
    """By hand: ffn_mult 2.625 is 14336 wide and 1.0 is 5461, rounded up to 5632 (models/nemotron_nas.py)."""
    attention = 2 * 8192 * 8192 + 2 * 8192 * 1024
    narrow = 2 * 8192 * 8192 + 2 * 8192 * 512
    feeds = 3 * 8192 * (14336 + 5632 + 1024)
    norms = 7 * 8192
    ends = 2 * 128256 * 8192 + 131072 * 128
    assert bytes_of(DECI, {})[0] == pytest.approx(2 * (2 * attention + narrow + feeds + norms + ends), rel=1e-3)


@pytest.mark.parametrize(
    "block",
    [None, {}, {"attention": {"n_heads_in_group": 8}}, {"attention": {"n_heads_in_group": 8}, "ffn": {}}],
)
def test_incomplete_blocks_are_named(block) -> None:
    with pytest.raises(PlannerError, match=r"ffn|n_heads_in_group"):
        bytes_of({**DECI, "block_configs": [block] * 4}, {})


@pytest.mark.parametrize("source", [BERT, XLM, MODERN, NOMIC, renamed(XLM, "XLMRobertaForSequenceClassification")])
@pytest.mark.parametrize("version", ["0.19.1", "0.26.0", "0.33.0"])
def test_encoders_need_no_cache(source, version) -> None:
    result = estimate(source, H200, {"vllm_version": version})
    assert result["fits"], result["error"]
    assert result["kv_cache_tokens"] == 0
    assert not estimate(source, {"name": "tiny", "memory_total_mib": 600}, {"vllm_version": version})["fits"]


def test_pooling_models_have_a_cache_but_no_head() -> None:
    result = estimate(QWEN3_LARGE, H200, {"runner": "pooling", "vllm_version": "0.26.0"})
    generating = estimate(QWEN3_LARGE, H200, {"vllm_version": "0.26.0"})
    head = 151680 * 4096 * 2 / 2**30
    assert result["kv_cache_tokens"] > generating["kv_cache_tokens"] > 0
    assert generating["weights_gib"] - result["weights_gib"] == pytest.approx(head, abs=0.01)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("Qwen3ForCausalLM", {}, False),
        ("Qwen3ForCausalLM", {"runner": "pooling"}, True),
        ("Qwen3ForCausalLM", {"convert": "embed"}, True),
        ("Qwen3ForSequenceClassification", {}, True),
        ("LlamaModel", {}, True),
        ("BertModel", {}, True),
        ("ChatGLMModel", {}, False),
        ("Qwen3VLForConditionalGeneration", {}, False),
    ],
)
def test_which_models_pool(name, flags, expected) -> None:
    assert is_pooling(parse_config(renamed(QWEN3, name)), parse_engine(flags)) is expected


@pytest.mark.parametrize(
    ("model_type", "same"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
        ("gemma", "GemmaForCausalLM"),
        ("glm4", "Glm4ForCausalLM"),
        ("apertus", "ApertusForCausalLM"),
    ],
)
def test_model_type_stands_in_for_architectures(model_type, same) -> None:
    named = renamed(QWEN3, same)
    bare = {key: value for key, value in QWEN3.items() if key != "architectures"} | {"model_type": model_type}
    assert bytes_of(bare, {}) == bytes_of(named, {})
    assert estimate(bare, H200, {})["fits"]


@pytest.mark.parametrize("more", [{}, {"model_type": "bert"}, {"model_type": "weird"}])
def test_neither_name_is_refused(more) -> None:
    bare = {key: value for key, value in QWEN3.items() if key != "architectures"}
    with pytest.raises(UnsupportedArchitectureError):
        bytes_of({**bare, **more}, {})


def test_an_unknown_pooling_model_is_named() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="WeirdForSequenceClassification"):
        bytes_of(renamed(QWEN3, "WeirdForSequenceClassification"), {})
    with pytest.raises(UnsupportedArchitectureError, match="NomicBertModel"):
        bytes_of({**NOMIC, "moe_every_n_layers": 2}, {})


@pytest.mark.parametrize("producer", [{}, {"producer": {"name": "modelopt", "version": "0.31.0"}}])
def test_modelopts_file_counts_with_and_without_its_producer(producer) -> None:
    source = renamed(QWEN3_LARGE, "Qwen3ForCausalLM")
    beside = {**producer, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    engine = parse_engine({})
    half = stage_weights(parse_config(source, beside), engine)[0].bytes
    ends = 2 * 151680 * 4096 * 2
    assert half - ends == pytest.approx((bytes_of(source, {})[0] - ends) / 2, rel=0.01)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([FALCON, OPT, DECI, GRANITE_HYBRID, ERNIE_MOE, OLMO3, MODERN, NOMIC, XLM, QWEN2]), st.data())
def test_wrong_values_give_planner_errors_only(source, data) -> None:
    more = ["num_labels", "id2label", "rope_parameters", "rope_pct", "block_configs", "bias", "head_dtype"]
    key = data.draw(st.sampled_from([*source, *more]))
    with contextlib.suppress(PlannerError):
        estimate({**source, key: data.draw(JSON)}, H200, {})
