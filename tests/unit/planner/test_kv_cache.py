"""The KV cache against answers of vLLM's own functions, and against real start-ups."""
# ruff: noqa: PLR0917  # parametrized

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import parse_engine
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import (
    PlannerError,
    UnsupportedArchitectureError,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.kv_cache import (
    GIB,
    KVPlan,
    KVResult,
    checkpoint_kv_dtype,
    kv_plan,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.mixers import Mixer, draft_mixers, mixers

CASES = Path(__file__).parents[2] / "fixtures" / "planner" / "kv_cache_cases.json"
FULL = Mixer("full", heads=32, kv_heads=8, head_dim=128, v_head_dim=128)
SLIDING = Mixer("sliding", heads=32, kv_heads=8, head_dim=128, v_head_dim=128, window=1024)
GDN = Mixer(
    "gdn",
    inner=6144,
    state_heads=48,
    state_head_dim=128,
    state_dim=128,
    state_groups=16,
    conv_kernel=4,
    state_dtype="float32",
)
GDN_FULL = Mixer("full", heads=24, kv_heads=4, head_dim=256, v_head_dim=256)
QWEN_27B = [GDN, GDN, GDN, GDN_FULL] * 16


def plan(layers: Any, length: int = 32768, batched: int = 8192, **flags: Any) -> KVPlan:
    options = {
        key: flags.pop(key) for key in ("capability", "checkpoint_kv_dtype", "draft", "new_runner") if key in flags
    }
    flags.setdefault("vllm_version", "0.33.0")
    engine = parse_engine(flags)
    return kv_plan(layers, engine, dtype="bfloat16", max_num_batched_tokens=batched, max_model_len=length, **options)


def sized(layers: Any, gib: float, length: int = 32768, seqs: int | None = None, **flags: Any) -> KVResult:
    found = plan(layers, length, **flags)
    return found.size([gib * GIB] * found.stages, length, max_num_seqs=seqs)


def oracle_cases() -> list[Any]:
    """Random mixes of layers that vLLM 0.19, 0.26 and 0.33 themselves grouped and sized."""
    cases = json.loads(CASES.read_bytes())
    return [pytest.param(case, id=f"{case['version']}-{number}") for number, case in enumerate(cases)]


@pytest.mark.parametrize("case", oracle_cases())
def test_as_vllm_s_own_functions(case: dict[str, Any]) -> None:
    kinds = [Mixer(**values) for values in case["kinds"]]
    flags: dict[str, Any] = {
        "vllm_version": case["version"],
        "tensor_parallel_size": case["tp"],
        "pipeline_parallel_size": case["pp"],
        "kv_cache_dtype": case["kv"],
        "enable_prefix_caching": case["prefix"],
        "disable_hybrid_kv_cache_manager": case["hybrid_off"],
    }
    if case["spec"]:
        flags["speculative_config"] = {"method": "mtp", "num_speculative_tokens": case["spec"]}
    found = plan([kinds[index] for index in case["layers"]], case["length"], case["batched"], **flags)
    result = found.size(case["avail"], case["length"])
    assert result.error == case["error"]
    if case["error"] is None:
        assert result.num_blocks == case["blocks"]
        # vLLM 0.19 has no function that returns the tokens.
        assert case["tokens"] in (None, result.tokens)
        assert result.concurrency == pytest.approx(case["conc"], rel=1e-12)
        assert found.block_size == case["block"]
    automatic = found.size(case["avail"], case["length"], auto_length=True)
    assert automatic.max_model_len == case["auto"]
    assert (automatic.error is None) == (case["auto"] > 0)


def test_as_real_starts_on_h200(shared_facts: Path) -> None:
    rows = [json.loads(line) for line in (shared_facts / "ground_truth/h200_vllm_0.26.jsonl").read_text().splitlines()]
    compared = 0
    for row in rows:
        if row["kv_cache_tokens"] is None:
            continue
        config = json.loads((shared_facts / f"model_configs/{row['model']}.json").read_bytes())
        length, concurrency = row["max_concurrency"]
        beside = shared_facts / f"model_configs/{row['model']}.hf_quant_config.json"
        wanted = checkpoint_kv_dtype(config, json.loads(beside.read_bytes()) if beside.is_file() else None)
        flags = {**row["flags"], "vllm_version": row["vllm_version"], "checkpoint_kv_dtype": wanted}
        found = plan(mixers(config), length, row["max_num_batched_tokens"], **flags)
        result = found.size([row["kv_cache_gib"] * GIB], length)
        # The log rounds the memory to 10 MiB.
        assert result.tokens == pytest.approx(row["kv_cache_tokens"], rel=2e-4), row["id"]
        assert result.concurrency == pytest.approx(concurrency, rel=1e-3), row["id"]
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize(
    ("layers", "gib", "length", "flags", "tokens", "concurrency"),
    [
        # Public start-up logs; the issue trackers name the flags.
        ([FULL] * 32, 58.11, 8192, {"vllm_version": "0.19.0", "kv_cache_dtype": "fp8"}, 952032, 116.22),
        (QWEN_27B, 3.86, 122633, {"vllm_version": "0.23.1", "tensor_parallel_size": 2}, 123399, 1.01),
    ],
)
def test_as_public_logs(
    layers: Any, gib: float, length: int, flags: dict[str, Any], tokens: int, concurrency: float
) -> None:
    result = sized(layers, gib, length, **flags)
    assert result.tokens == pytest.approx(tokens, rel=2e-4)
    assert result.concurrency == pytest.approx(concurrency, abs=0.006)


def test_tokens_of_hybrids_changed_their_meaning() -> None:
    layers = [SLIDING, FULL] * 12
    old = sized(layers, 10, vllm_version="0.20.2")
    new = sized(layers, 10, vllm_version="0.21.0")
    assert old.num_blocks == new.num_blocks
    assert old.tokens == old.num_blocks // 2 * 16
    assert new.tokens == int(new.concurrency * 32768)


def test_the_mamba_limit_holds_for_full_graphs_only() -> None:
    flags = {"vllm_version": "0.23.1", "tensor_parallel_size": 2}
    refused = sized(QWEN_27B, 3.86, 122633, seqs=256, **flags)
    assert refused.error == (
        "max_num_seqs (256) exceeds available Mamba cache blocks (161). Each decode sequence requires one Mamba cache "
        "block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most 161 or increase "
        "gpu_memory_utilization."
    )
    assert sized(QWEN_27B, 3.86, 122633, seqs=161, **flags).error is None
    assert sized(QWEN_27B, 3.86, 122633, seqs=256, enforce_eager=True, **flags).error is None
    for compilation in ({"cudagraph_mode": "PIECEWISE"}, '{"cudagraph_mode": "NONE"}'):
        assert sized(QWEN_27B, 3.86, 122633, seqs=256, compilation_config=compilation, **flags).error is None
    decode = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
    assert sized(QWEN_27B, 3.86, 122633, seqs=256, **decode, **flags).error == refused.error
    with pytest.raises(PlannerError, match="compilation_config is not JSON"):
        plan(QWEN_27B, compilation_config="{")
    assert sized(QWEN_27B, 3.86, 122633, seqs=256, **{**flags, "vllm_version": "0.19.1"}).error is None
    assert sized([FULL] * 4, 0.5, 4096, seqs=10**6).error is None


def test_hybrids_cache_prefixes_by_default_from_some_version_on() -> None:
    old, new = (plan(QWEN_27B, vllm_version=version) for version in ("0.26.0", "0.28.0"))
    assert new.request_blocks(32768) - old.request_blocks(32768) == 3
    off = plan(QWEN_27B, vllm_version="0.28.0", enable_prefix_caching=False)
    assert off.request_blocks(32768) == old.request_blocks(32768)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "0.19.1",
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            "engine. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
        ),
        (
            "0.26.0",
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            "engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). See "
            "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
        ),
    ],
)
def test_no_memory_at_all_in_the_version_s_words(version: str, expected: str) -> None:
    result = sized([FULL] * 32, -4.77, vllm_version=version)
    assert result.error == expected
    assert (result.num_blocks, result.tokens) == (0, 0)


def test_too_little_memory_for_one_request_in_the_version_s_words() -> None:
    text = sized([FULL] * 62, 4, 65536, vllm_version="0.19.1").error
    assert text == (
        "To serve at least one request with the models's max seq len (65536), (15.5 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (4 GiB). Based on the available memory, the estimated maximum model "
        "length is 16912. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
        "engine. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
    ).replace("(4 GiB)", "(4.0 GiB)")


def test_later_versions_keep_the_null_block_aside() -> None:
    exact = 32768 // 16 * 16 * 4096 * 32 / GIB
    assert sized([FULL] * 32, exact, vllm_version="0.26.0").error is None
    assert sized([FULL] * 32, exact, vllm_version="0.33.0").error is not None
    found = plan([FULL] * 32)
    assert found.size([exact * GIB], 32768, auto_length=True).max_model_len == 32752


def test_the_poorest_stage_decides() -> None:
    found = plan([FULL] * 33, pipeline_parallel_size=2)
    assert found.block_bytes == (17 * 65536, 16 * 65536)
    assert found.size([10 * GIB, 2 * GIB], 4096).num_blocks == 2 * GIB // (16 * 65536)
    with pytest.raises(PlannerError, match="1 figures of memory were given for 2 stages"):
        found.size([GIB], 4096)
    with pytest.raises(PlannerError, match=r"sum\(partitions\)=3 does not match num_hidden_layers=2"):
        kv_plan(
            [FULL] * 2,
            parse_engine({"pipeline_parallel_size": 2}),
            dtype="bfloat16",
            max_num_batched_tokens=2048,
            max_model_len=4096,
            partition=[1, 2],
        )


def test_tensor_ranks_hold_at_least_one_head_and_all_of_a_latent_row() -> None:
    assert plan([FULL], tensor_parallel_size=4).block_bytes == (16 * 2 * 2 * 128 * 2,)
    assert plan([FULL], tensor_parallel_size=16).block_bytes == (16 * 2 * 128 * 2,)
    latent = Mixer("mla", heads=128, kv_heads=1, head_dim=576)
    assert plan([latent], tensor_parallel_size=8).block_bytes == (16 * 576 * 2,)


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        ("auto", 4096),
        ("fp8", 2048),
        ("fp8_e5m2", 2048),
        ("nvfp4", 8 * 2 * (64 + 8)),
        ("int8_per_token_head", 8 * 2 * (128 + 4)),
        ("int4_per_token_head", 8 * 2 * (64 + 4)),
    ],
)
def test_cache_dtypes(dtype: str, row: int) -> None:
    assert plan([FULL], kv_cache_dtype=dtype).block_bytes == (16 * row,)


def test_auto_follows_the_checkpoint_and_a_flag_wins() -> None:
    assert plan([FULL], checkpoint_kv_dtype="fp8").block_bytes == (16 * 2048,)
    assert plan([FULL], checkpoint_kv_dtype="fp8", kv_cache_dtype="bfloat16").block_bytes == (16 * 4096,)
    with pytest.raises(UnsupportedArchitectureError, match="the memory of kv_cache_dtype turboquant_k8v4 is not known"):
        plan([FULL], kv_cache_dtype="turboquant_k8v4")
    with pytest.raises(PlannerError, match="kv_cache_dtype = 'fp3' is no type of vLLM's cache") as caught:
        plan([FULL], kv_cache_dtype="fp3")
    assert not isinstance(caught.value, UnsupportedArchitectureError)


@pytest.mark.parametrize(
    ("config", "beside", "expected"),
    [
        ({}, None, None),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({}, {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}}, None),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}}, None, "nvfp4"),
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt_fp4",
                    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                }
            },
            None,
            "fp8_e4m3",
        ),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8}}}, None, None),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}},
            None,
            "fp8",
        ),
        ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}, None, None),
        ({"quantization_config": {"quant_method": "fp8"}}, None, None),
        ({"quantization_config": "fp8"}, None, None),
    ],
)
def test_what_a_checkpoint_asks_for(
    config: dict[str, Any], beside: dict[str, Any] | None, expected: str | None
) -> None:
    assert checkpoint_kv_dtype(config, beside) == expected


def test_sparse_latent_attention_has_packed_rows_and_an_indexer() -> None:
    dsa = Mixer("mla", heads=64, kv_heads=1, head_dim=576, index_dim=128, index_kind="dsa")
    shared = Mixer("mla", heads=64, kv_heads=1, head_dim=576, index_dim=128, index_kind="dsa", index_shared=True)
    assert plan([dsa]).block_bytes == (64 * (1152 + 132),)
    assert plan([dsa], kv_cache_dtype="fp8").block_bytes == (64 * (656 + 132),)
    assert plan([dsa], kv_cache_dtype="fp8", capability=100).block_bytes == (64 * (576 + 132),)
    assert plan([dsa], capability=120).block_bytes == (64 * (656 + 132),)
    assert plan([dsa, shared]).block_bytes == (64 * (2 * 1152 + 132),)
    # Older versions give each layer its own indexer.
    assert plan([dsa, shared], vllm_version="0.19.1").block_bytes == (64 * 2 * (1152 + 132),)


def test_layers_that_share_or_have_no_cache_cost_nothing() -> None:
    reader = Mixer("full", heads=32, kv_heads=8, head_dim=128, v_head_dim=128, shares_kv_with=0)
    assert plan([FULL, reader, Mixer("none")]).block_bytes == plan([FULL]).block_bytes
    encoder = sized([Mixer("encoder", heads=8, kv_heads=8, head_dim=64, v_head_dim=64)] * 12, 10)
    assert (encoder.num_blocks, encoder.tokens, encoder.error) == (1, 0, None)


def test_drafts_join_a_group_on_the_last_stage() -> None:
    model = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        **{"num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "hidden_size": 2048},
    }
    found = plan(
        mixers(model),
        draft=draft_mixers(model, "mtp"),
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        vllm_version="0.26.0",
    )
    # "Add 3 padding layers, may waste at most 10.00 % KV cache memory", as that model's log says.
    assert [len(group.caches) for group in found.groups] == [10, 10, 10, 11]


def test_chunked_attention_shares_the_hybrid_manager_unless_drafts_need_hidden_states() -> None:
    chunked = Mixer("chunked", heads=40, kv_heads=8, head_dim=128, v_head_dim=128, window=8192)
    layers = [chunked, chunked, chunked, FULL] * 4
    found = plan(layers, 32768, vllm_version="0.26.0")
    assert [len(group.caches) for group in found.groups] == [4, 4, 4, 4]
    # A chunk and two batches in flight of each chunked layer: 6656 blocks, as Llama 4 Scout of 16 layers was measured.
    assert found.request_blocks(32768) == 32768 // 16 + 3 * (8192 + 2 * 8192) // 16
    off = plan(layers, 32768, speculative_config={"method": "eagle3", "num_speculative_tokens": 2})
    assert [len(group.caches) for group in off.groups] == [16]


def test_hybrids_need_the_hybrid_manager() -> None:
    with pytest.raises(PlannerError, match="failed to convert the KV cache specs to one unified type"):
        plan(QWEN_27B, vllm_version="0.26.0", disable_hybrid_kv_cache_manager=True)
    with pytest.raises(PlannerError, match="Failed to promote local KV cache specs"):
        plan(QWEN_27B, disable_hybrid_kv_cache_manager=True)
    off = plan([SLIDING, FULL], vllm_version="0.19.1", kv_transfer_config={"kv_connector": "x"})
    assert [len(group.caches) for group in off.groups] == [2]
    with pytest.raises(UnsupportedArchitectureError, match="kv_cache_dtype_skip_layers"):
        plan([FULL], kv_cache_dtype_skip_layers=["0"])


def test_pages_that_do_not_divide_are_refused_by_old_versions_and_padded_by_new_ones() -> None:
    odd = Mixer("sliding", heads=24, kv_heads=3, head_dim=256, v_head_dim=256, window=512)
    with pytest.raises(UnsupportedArchitectureError, match="not divisible by the maximum page size"):
        plan([FULL, odd] * 4, vllm_version="0.19.1")
    # The odd page takes the size of the other.
    assert plan([FULL, odd] * 4).block_bytes == (4 * 65536,)


def test_decode_context_parallelism_shards_tokens() -> None:
    latent = Mixer("mla", heads=64, kv_heads=1, head_dim=576)
    found = plan([latent] * 4, tensor_parallel_size=4, decode_context_parallel_size=4)
    assert found.request_blocks(32768) == 32768 // 4 // 16


def test_windows_keep_the_batches_in_flight() -> None:
    one = plan([SLIDING], vllm_version="0.21.0").request_blocks(131072)
    two = plan([SLIDING], vllm_version="0.26.0").request_blocks(131072)
    assert (one, two) == ((1023 + 8192 + 15) // 16 + 1, (1023 + 2 * 8192 + 15) // 16 + 1)
    staged = plan([SLIDING] * 2, pipeline_parallel_size=2, new_runner=True, vllm_version="0.26.0")
    assert staged.in_flight == 3 * 8192
    assert plan([SLIDING], async_scheduling=False).in_flight == 8192
    assert plan([SLIDING], speculative_config={"method": "ngram", "num_speculative_tokens": 3}).in_flight == 8192
    assert plan([SLIDING], disable_sliding_window=True).request_blocks(131072) == 131072 // 16


def test_windows_choose_their_own_block_in_some_versions() -> None:
    wide = Mixer("sliding", heads=16, kv_heads=16, head_dim=128, v_head_dim=128, window=1024)
    blocks = {
        version: {group.caches[0].kind: group.caches[0].block for group in plan([wide, FULL] * 4, **flags).groups}
        for version in ("0.19.1", "0.26.0", "0.33.0")
        for flags in ({"vllm_version": version, "block_size": 128},)
    }
    assert blocks["0.19.1"] == blocks["0.33.0"] == {"sliding": 128, "full": 256}
    assert blocks["0.26.0"] == {"sliding": 64, "full": 128}


def test_old_windows_took_v_to_be_as_wide_as_k() -> None:
    narrow = Mixer("sliding", heads=64, kv_heads=8, head_dim=192, v_head_dim=128, window=128)
    assert plan([narrow], vllm_version="0.19.1").block_bytes == (16 * 8 * 384 * 2,)
    assert plan([narrow], vllm_version="0.26.0").block_bytes == (16 * 8 * 320 * 2,)


def test_hostile_shapes_are_named() -> None:
    with pytest.raises(PlannerError, match="has no cache left on one of 64 tensor ranks"):
        plan([Mixer("lightning", state_heads=8, state_head_dim=64, state_dim=64)], tensor_parallel_size=64)
    with pytest.raises(PlannerError, match="Mamba cache dtype 'int8' is not known"):
        plan(QWEN_27B, mamba_ssm_cache_dtype="int8")
    found = plan([FULL])
    for value in (float("nan"), float("inf"), True, "1"):
        with pytest.raises(PlannerError, match="no amount of memory"):
            found.size([value], 4096)  # type: ignore[list-item]


def test_it_is_quick() -> None:
    layers = [SLIDING, SLIDING, SLIDING, FULL] * 24
    started = time.perf_counter()
    for _ in range(20):
        sized(layers, 1, 131072)
    assert (time.perf_counter() - started) / 20 < 0.02
