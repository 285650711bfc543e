"""Memory beside weights and KV cache, held against measured starts and against the allocations that cause them."""

from __future__ import annotations

import time
from collections import namedtuple
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner import overhead
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import Card, parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import PlannerError
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.model import parse_config
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.rules import split_layers
from hypothesis import given, settings
from hypothesis import strategies as st

H200 = Card("NVIDIA H200", 143771)
H100 = Card("NVIDIA H100 80GB HBM3", 81559)
A100 = Card("NVIDIA A100-SXM4-80GB", 81920)
B200 = Card("NVIDIA B200", 183359)
L4 = Card("NVIDIA L4", 23034)
GIB = 1 << 30

Stage = namedtuple("Stage", "stage layers")

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
QWEN_7B = LLAMA_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
}
QWEN_32B = LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "head_dim": 128,
    "num_hidden_layers": 64,
    "vocab_size": 151936,
}
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}
MLA = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
HYBRID = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "depth": 27,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [],
    },
}


def stages(config: dict[str, Any], gpu: Card = H200, **flags: Any) -> list[overhead.StageOverhead]:
    flags = {"vllm_version": "0.26.0", **flags}
    model = parse_config(config)
    engine = parse_engine(flags)
    counts = split_layers(model.layers, engine.layout.pipeline, engine.layout.layer_partition)
    return overhead.stage_overheads(model, engine, gpu, [Stage(index, count) for index, count in enumerate(counts)])


def one(config: dict[str, Any], gpu: Card = H200, **flags: Any) -> overhead.StageOverhead:
    return stages(config, gpu, **flags)[-1]


def batch(config: dict[str, Any], gpu: Card, **flags: Any) -> tuple[int, int]:
    return overhead.batch_defaults(parse_engine(flags), gpu, parse_config(config))


def runner(config: dict[str, Any], version: str, **flags: Any) -> str:
    return overhead.runner(parse_config(config), parse_engine({"vllm_version": version, **flags}))


# (config, flags, peak activation, non-torch, graph estimate) of real starts on H200, vLLM 0.26; 0.00 means eager or v2.
MEASURED_26 = [
    pytest.param(LLAMA_8B, {}, 1.10, 0.22, 0.0, id="compiled"),
    pytest.param(LLAMA_8B, {"enforce_eager": True}, 0.88, 0.22, 0.0, id="eager"),
    pytest.param(LLAMA_8B, {"enforce_eager": True, "max_num_batched_tokens": 32768}, 3.41, 0.22, 0.0, id="32k"),
    pytest.param(LLAMA_70B, {"enforce_eager": True, "tensor_parallel_size": 2}, 1.06, 0.06, 0.0, id="tp2"),
    pytest.param(LLAMA_70B | FP8, {"enforce_eager": True}, 1.69, 0.22, 0.0, id="fp8"),
    pytest.param(QWEN_32B, {"enforce_eager": True, "tensor_parallel_size": 2}, 1.01, 0.06, 0.0, id="ray-tp2"),
    pytest.param(QWEN_MOE, {"max_model_len": 32768}, 2.68, 0.24, 0.64, id="moe"),
    pytest.param(GPT_OSS, {}, 2.87, 0.23, 0.58, id="mxfp4"),
]


@pytest.mark.parametrize(("config", "flags", "activation", "non_torch", "graph"), MEASURED_26)
def test_measured_on_h200(config: Any, flags: Any, activation: float, non_torch: float, graph: float) -> None:
    found = one(config, **flags)
    assert found.activation_gib == pytest.approx(activation, abs=0.015)
    assert found.non_torch_gib == pytest.approx(non_torch, abs=0.015)
    assert found.graph_gib == pytest.approx(graph, abs=0.02)


@pytest.mark.parametrize(
    ("config", "flags", "activation", "non_torch"),
    [
        (LLAMA_8B, {"tensor_parallel_size": 2}, 1.89, 2.07),
        (QWEN_7B, {"tensor_parallel_size": 2}, 2.21, 2.06),
        (QWEN_7B, {"tensor_parallel_size": 4}, 2.21, 2.13),
    ],
)
def test_measured_on_h100_with_019(config: Any, flags: Any, activation: float, non_torch: float) -> None:
    found = one(config, H100, vllm_version="0.19.0", max_model_len=8192, **flags)
    assert found.activation_gib == pytest.approx(activation, abs=0.015)
    assert found.non_torch_gib == pytest.approx(non_torch, abs=0.08)
    assert found.graph_gib == 0


def test_kv_of_public_starts() -> None:
    """What is left for the KV cache, from the weights that each log prints."""
    found = one(LLAMA_8B, H100, vllm_version="0.19.0", max_model_len=8192, dtype="float32")
    left = overhead.visible_gib(H100) * 0.95 - 29.98 - found.activation_gib - found.non_torch_gib
    assert left == pytest.approx(42.8, abs=0.1)
    found = one(GPT_OSS, A100, vllm_version="0.19.0", max_model_len=131072)
    left = overhead.visible_gib(A100) * 0.65 - 13.72 - found.activation_gib - found.non_torch_gib
    assert left == pytest.approx(36.56, abs=0.15)


@pytest.mark.parametrize(
    ("name", "mib", "seen", "within"),
    [
        ("NVIDIA H200", 143771, 139.80, 0.01),
        ("NVIDIA H100 80GB HBM3", 81559, 79.19, 0.01),
        ("NVIDIA H100 NVL", 95830, 93.11, 0.02),
        ("NVIDIA A100-SXM4-40GB", 40960, 39.39, 0.02),
        ("NVIDIA GeForce RTX 5090", 32607, 31.38, 0.03),
        ("NVIDIA GeForce RTX 3090", 24576, 23.57, 0.03),
        ("NVIDIA GB300", 284208, 276.62, 0.05),
        ("NVIDIA B200", 183359, 178.36, 0.02),
        ("Tesla T4", 15360, 14.56, 0.06),
        ("NVIDIA GB10", 131072, 121.69, 0.01),
    ],
)
def test_visible(name: str, mib: int, seen: float, within: float) -> None:
    assert overhead.visible_gib(Card(name, mib)) == pytest.approx(seen, abs=within)


def test_utilization() -> None:
    assert overhead.utilization(parse_engine({"vllm_version": "0.19.1"})) == 0.9
    assert overhead.utilization(parse_engine({"vllm_version": "0.20.0"})) == 0.92
    assert overhead.utilization(parse_engine({"gpu_memory_utilization": 0.5})) == 0.5


def test_batch_defaults() -> None:
    assert batch(LLAMA_8B, H200) == (1024, 8192)
    assert batch(LLAMA_8B, A100) == (256, 2048)
    assert batch(LLAMA_8B, L4) == (256, 2048)
    assert batch(LLAMA_8B, B200, vllm_version="0.27.0") == (1024, 8192)
    assert batch(LLAMA_8B, B200, vllm_version="0.28.0") == (1024, 16384)
    spark = Card("NVIDIA GB10", 124610)
    assert batch(LLAMA_8B, spark, vllm_version="0.32.0") == (1024, 8192)
    assert batch(LLAMA_8B, spark, vllm_version="0.33.0") == (256, 2048)
    assert batch(LLAMA_8B, H200, performance_mode="throughput") == (2048, 16384)
    # Tokens never exceed what the sequences can hold, and sequences never the tokens.
    assert batch(LLAMA_8B, H200, max_num_seqs=2, max_model_len=100) == (2, 200)
    assert batch(LLAMA_8B, H200, max_num_batched_tokens=512) == (512, 512)
    assert batch(LLAMA_8B, H200, enable_chunked_prefill=False, max_model_len=20000)[1] == 20000
    expert = {"enable_expert_parallel": True, "data_parallel_size": 2, "all2all_backend": "deepep_low_latency"}
    assert batch(QWEN_MOE, H200, **expert) == (256, 256)


def test_prefix_lm_fits_a_video() -> None:
    config = LLAMA_8B | {"use_bidirectional_attention": "vision"}
    assert batch(config, L4, vllm_version="0.26.0") == (256, 2496)
    assert batch(config, L4, vllm_version="0.20.0") == (256, 2048)


def test_runner_by_version() -> None:
    assert runner(LLAMA_8B, "0.19.1") == "v1"
    assert runner(LLAMA_8B, "0.22.0") == "v1"
    assert runner(QWEN_32B, "0.22.0") == "v2"
    assert runner(LLAMA_8B, "0.23.0") == "v2"
    assert runner(LLAMA_8B | FP8, "0.23.0") == "v1"
    assert runner(LLAMA_8B | FP8, "0.24.0") == "v2"
    assert runner(QWEN_7B, "0.24.0") == "v1"
    assert runner(QWEN_7B, "0.26.0") == "v2"
    assert runner(QWEN_MOE, "0.26.0") == "v1"
    assert runner(HYBRID, "0.26.0") == "v1"
    assert runner(QWEN_MOE, "0.29.0") == "v2"
    assert runner(HYBRID, "0.33.0") == "v2"


def test_runner_by_speculation() -> None:
    def asked(version: str, method: str) -> str:
        return runner(LLAMA_8B, version, speculative_config={"method": method, "num_speculative_tokens": 2})

    assert asked("0.26.0", "ngram") == "v1"
    assert asked("0.26.0", "eagle3") == "v2"
    assert asked("0.26.0", "deepseek_mtp") == "v2"
    assert asked("0.33.0", "ngram") == "v2"
    assert asked("0.33.0", "suffix") == "v1"
    pipeline = {"method": "eagle3"}
    assert runner(LLAMA_8B, "0.26.0", speculative_config=pipeline, pipeline_parallel_size=2) == "v1"


def test_sampler_follows_sequences_and_vocabulary() -> None:
    """The older runner samples in float32: 14 bytes a logit."""
    many, few = (one(HYBRID, max_num_seqs=count, enforce_eager=True).activation_gib for count in (2048, 1024))
    rows = 1024 * (14 * 248320 + 2 * 2 * 5120) / GIB
    assert many - few == pytest.approx(rows, rel=0.001)


def test_drafter_doubles_the_logits() -> None:
    plain = one(HYBRID, enforce_eager=True).activation_gib
    drafted = one(HYBRID, enforce_eager=True, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    assert drafted.activation_gib - plain == pytest.approx((30 - 14) * 1024 * 248320 / GIB, rel=0.001)


def test_newest_runner_profiles_the_filters() -> None:
    late, early = (one(LLAMA_8B, vllm_version=version).activation_gib for version in ("0.33.0", "0.32.0"))
    assert early == pytest.approx(1.09, abs=0.02)
    assert late == pytest.approx(1024 * 14 * 128256 / GIB + 0.0625 + 0.03125, abs=0.02)


def test_latent_attention_reserves_its_context() -> None:
    """64 Ki rows of every head's K and V, which tensor parallelism splits."""
    whole, half = (one(MLA, tensor_parallel_size=size).activation_gib for size in (1, 2))
    context = 65536 * 128 * 256 * 2 / GIB
    workspace = 2 * 8192 * 8 * 7168 * 2 / GIB
    assert whole == pytest.approx(context + workspace + 0.94, abs=0.05)
    assert whole - half > context / 2


def test_sparse_attention_reserves_while_loading() -> None:
    sparse = MLA | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 2048}
    assert one(MLA).loaded_gib == 0
    query = 8192 * 128 * 576 * 2 / GIB
    indices = 8192 * 2048 * 4 / GIB
    # FlashAttention, which Hopper prefers from 0.25 on, reserves nothing; FlashMLA does where it cannot serve.
    assert one(sparse).loaded_gib == pytest.approx(indices, rel=0.001)
    assert one(sparse, vllm_version="0.24.0").loaded_gib == pytest.approx(query + indices, rel=0.001)
    assert one(sparse, kv_cache_dtype="fp8").loaded_gib > query + indices
    # 40 x max_model_len rows of the indexer are more than the experts need.
    long = one(sparse, max_model_len=1 << 20, vllm_version="0.26.0").activation_gib
    grown = 40 * (1 << 20) * 132 / GIB - 2 * 8192 * 8 * 7168 * 2 / GIB
    assert long - one(sparse).activation_gib == pytest.approx(grown, rel=0.01)


def test_long_blocks_of_a_hybrid_make_the_context_of_latent_attention_long() -> None:
    """Kimi-Linear of 12 layers, 1024 sequences and blocks of 1888 tokens: 29.5 GiB of context on H200 with 0.26."""

    def context(version: str) -> float:
        model = parse_config(MLA)
        engine = parse_engine({"vllm_version": version, "max_num_seqs": 1024, "enforce_eager": True})
        run = overhead._run(model, engine, H200, 1888)
        mixer = next(mixer for mixer in model.mixers if mixer.kind == "mla")
        return overhead._mla_dummy(run, mixer, 32) / GIB

    rows = 1024 * 1888
    assert context("0.26.0") == pytest.approx(rows * 32 * 256 * 2 / GIB, rel=0.001)
    # From 0.28 on the rows are but rounded to whole blocks.
    assert context("0.33.0") == pytest.approx(-(-65536 // 1888) * 1888 * 32 * 256 * 2 / GIB, rel=0.001)


def test_experts_workspace_by_kernel() -> None:
    block = QWEN_MOE | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    int4 = QWEN_MOE | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    plain = one(QWEN_MOE).activation_gib
    assert one(block).activation_gib == pytest.approx(plain, abs=0.01)
    assert one(int4).activation_gib == pytest.approx(plain, abs=0.01)
    # Data-parallel ranks gather one another's tokens.
    gathered = one(QWEN_MOE, data_parallel_size=2, enable_expert_parallel=True).activation_gib
    assert gathered - plain == pytest.approx(2 * 8192 * 8 * 2048 * 2 / GIB, rel=0.001)


def test_first_stage_of_a_pipeline() -> None:
    """0.96 GiB on H100 with 0.19: the stages before the last one sample nothing."""
    config = QWEN_32B | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
    first, *_ = stages(config | {"num_hidden_layers": 36}, H100, vllm_version="0.19.0", pipeline_parallel_size=3)
    assert first.activation_gib == pytest.approx(0.96, abs=0.015)
    assert first.non_torch_gib == pytest.approx(0.07, abs=0.015)


def test_stages_differ() -> None:
    first, last = stages(QWEN_MOE, pipeline_parallel_size=2)
    # Only the last stage samples.
    assert last.activation_gib > first.activation_gib + 1.5
    assert first.non_torch_gib == last.non_torch_gib == pytest.approx(0.06, abs=0.01)
    assert [first.stage, last.stage] == [0, 1]


def test_vision_tower() -> None:
    small = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 8192}
    seen = one(HYBRID, **small).activation_gib
    blind = one(HYBRID, language_model_only=True, **small).activation_gib
    # 16,384 tokens are 65,536 patches, whose MLP is the peak when few sequences sample.
    assert seen - blind > 1.0
    for limits in ({"image": 0, "video": 0}, '{"image": 0, "video": 0}'):
        assert one(HYBRID, limit_mm_per_prompt=limits, **small).activation_gib == blind
    assert one(HYBRID, limit_mm_per_prompt={"image": 1, "video": 0}, **small).activation_gib == seen
    dense = LLAMA_8B | {"vision_config": HYBRID["vision_config"]}
    # The newer runner did not profile the tower before 0.27; its buffer of embeddings was there before the run.
    old: dict[str, Any] = {"vllm_version": "0.26.0", **small}
    text = one(dense, language_model_only=True, **old).activation_gib
    assert text - one(dense, **old).activation_gib == pytest.approx(2048 * 4096 * 2 / GIB, abs=0.0002)
    assert one(dense, vllm_version="0.27.0", **small).activation_gib > one(dense, **small).activation_gib


def test_dummy_image_stays_with_the_older_runner_alone() -> None:
    """65,536 patches of 3 x 2 x 16 x 16 values beside 16,384 tokens of output: 0.1875 GiB on H200 with 0.26."""
    flags: dict[str, Any] = {"vllm_version": "0.27.0", "enforce_eager": True, "max_num_batched_tokens": 8192}
    text = HYBRID["text_config"]
    plain = {**HYBRID, "text_config": {**text, "layer_types": ["full_attention"] * text["num_hidden_layers"]}}
    outputs = 16384 * text["hidden_size"] * 2
    for config, older in ((HYBRID, True), (plain, False)):
        run = overhead._run(parse_config(config), parse_engine(flags), H200, 64)
        stays, peak = overhead._vision(run)
        assert (run.runner == "v1") is older
        assert stays == outputs + (65536 * 1536 * 2 if older else 0)
        assert peak > outputs + 65536 * 1536 * 2


def test_layers_of_the_newer_runner_read_a_buffer() -> None:
    """0.875 and 0.8125 GiB on the two stages of a pipeline; 0.7813 GiB on a vision model (H200, 0.26, eager)."""
    flags: dict[str, Any] = {"vllm_version": "0.26.0", "enforce_eager": True}
    first, last = stages(LLAMA_8B, H200, pipeline_parallel_size=2, **flags)
    assert first.activation_gib - last.activation_gib == pytest.approx(8192 * 4096 * 2 / GIB, abs=0.0002)
    vision = LLAMA_8B | {"vision_config": HYBRID["vision_config"]}
    text = one(vision, language_model_only=True, **flags).activation_gib
    assert text - one(vision, **flags).activation_gib == pytest.approx(8192 * 4096 * 2 / GIB, abs=0.0002)


def test_graph_estimate_by_version() -> None:
    assert one(QWEN_MOE, vllm_version="0.20.0").graph_gib == 0
    assert one(QWEN_MOE, vllm_version="0.21.0").graph_gib > 0.5
    assert one(LLAMA_8B, vllm_version="0.28.0").graph_gib == 0
    assert one(LLAMA_8B, vllm_version="0.29.0").graph_gib > 0.5
    assert one(QWEN_MOE, enforce_eager=True).graph_gib == 0
    assert one(QWEN_MOE, max_num_seqs=4).graph_gib < one(QWEN_MOE).graph_gib


def test_fused_all_reduce_by_version() -> None:
    found = [
        one(LLAMA_8B, vllm_version=v, tensor_parallel_size=2).non_torch_gib for v in ("0.24.0", "0.26.0", "0.29.0")
    ]
    assert found == sorted(found, reverse=True)
    # 985661440 bytes on two H200s with 0.26.
    assert found[1] == pytest.approx(985661440 / GIB, abs=0.001)
    assert one(LLAMA_8B, A100, tensor_parallel_size=2).non_torch_gib == pytest.approx(0.0645)


def test_pooling_model_has_no_sampler() -> None:
    generate = one(QWEN_MOE).activation_gib
    embed = one(QWEN_MOE, runner="pooling").activation_gib
    assert embed < generate - 1.0


@pytest.mark.parametrize("value", [-1, "x", 1.5, True, 1 << 80, [], float("nan")])
def test_wrong_values_are_named(value: Any) -> None:
    with pytest.raises(PlannerError):
        one(MLA | {"q_lora_rank": value})
    with pytest.raises(PlannerError):
        one(HYBRID | {"vision_config": {"hidden_size": value}})


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(
        [
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "num_experts",
            "num_experts_per_tok",
            "kv_lora_rank",
            "index_topk",
            "vision_config",
            "final_logit_softcapping",
            "moe_latent_size",
            "model_type",
        ]
    ),
    value=_JUNK,
    base=st.sampled_from([LLAMA_8B, QWEN_MOE, MLA, HYBRID]),
)
def test_hostile_config(key: str, value: Any, base: dict[str, Any]) -> None:
    try:
        found = stages(base | {key: value})
    except PlannerError:
        return
    assert all(stage.activation_gib >= 0 for stage in found)


def test_is_fast() -> None:
    model, engine = parse_config(HYBRID), parse_engine({})
    weights = [Stage(0, 64)]
    started = time.perf_counter()
    for _ in range(20):
        overhead.stage_overheads(model, engine, H200, weights)
    assert (time.perf_counter() - started) / 20 < 0.005
