"""What takes the place of attention in each layer, for every family."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.errors import (
    ModelConfigError,
    PlannerError,
    UnsupportedArchitectureError,
)
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.mixers import Mixer, draft_mixers, mixers
from hypothesis import given, settings
from hypothesis import strategies as st


def config(architecture: str, **changes: Any) -> dict[str, Any]:
    base = {
        "architectures": [architecture],
        "num_hidden_layers": 12,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    return {**base, **changes}


def kinds(value: dict[str, Any]) -> str:
    letters = {"full": "F", "sliding": "s", "chunked": "c", "mla": "L", "none": "-", "encoder": "E"}
    return "".join(letters.get(mixer.kind, "M") for mixer in mixers(value))


def test_equal_layers_are_one_object() -> None:
    found = mixers(config("LlamaForCausalLM", num_hidden_layers=80))
    assert len(found) == 80
    assert len({id(mixer) for mixer in found}) == 1
    assert found[0] == Mixer("full", heads=32, kv_heads=8, head_dim=128, v_head_dim=128)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (config("Gemma2ForCausalLM"), "sFsFsFsFsFsF"),
        (config("Gemma3ForCausalLM"), "sssssFsssssF"),
        (config("Gemma3ForCausalLM", sliding_window_pattern=4), "sssFsssFsssF"),
        (config("Cohere2ForCausalLM"), "sssFsssFsssF"),
        (config("Exaone4ForCausalLM", sliding_window_pattern="LLLG"), "sssFsssFsssF"),
        (config("Exaone4ForCausalLM", sliding_window=None), "FFFFFFFFFFFF"),
        (config("GptOssForCausalLM"), "sFsFsFsFsFsF"),
        (config("Llama4ForConditionalGeneration"), "cccFcccFcccF"),
        (config("Llama4ForCausalLM", attention_chunk_size=None), "FFFFFFFFFFFF"),
        (config("MistralForCausalLM", sliding_window=4096), "ssssssssssss"),
        (config("MistralForCausalLM", sliding_window=None), "FFFFFFFFFFFF"),
        (config("MistralForCausalLM", sliding_window=0), "FFFFFFFFFFFF"),
        (config("Phi3ForCausalLM", sliding_window=2047), "ssssssssssss"),
        (config("Qwen2ForCausalLM", sliding_window=4096, use_sliding_window=False), "FFFFFFFFFFFF"),
        (config("Qwen2ForCausalLM", sliding_window=4096, use_sliding_window=True, max_window_layers=6), "F" * 12),
        (config("Qwen2ForCausalLM", sliding_window=4096, use_sliding_window=True, max_window_layers=0), "s" * 12),
        (
            config(
                "LlamaForCausalLM", sliding_window=8, layer_types=["sliding_attention"] * 3 + ["full_attention"] * 9
            ),
            "sssFFFFFFFFF",
        ),
        (config("Qwen3NextForCausalLM"), "MMMFMMMFMMMF"),
        (config("Qwen3_5ForConditionalGeneration", full_attention_interval=6), "MMMMMFMMMMMF"),
        (config("NemotronHForCausalLM", hybrid_override_pattern="MEM*-M"), "M-MF-M"),
        (config("NemotronHForCausalLM", layers_block_type=["mamba", "moe", "attention"]), "M-F"),
        (config("JambaForCausalLM", attn_layer_period=4, attn_layer_offset=1), "MFMMMFMMMFMM"),
        (config("BambaForCausalLM", attn_layer_indices=[3]), "MMMFMMMMMMMM"),
        (config("Lfm2ForCausalLM", full_attn_idxs=[2, 5]), "MMFMMFMMMMMM"),
        (config("DeepseekV3ForCausalLM", kv_lora_rank=512), "LLLLLLLLLLLL"),
        (config("DeepseekV2ForCausalLM"), "FFFFFFFFFFFF"),
        (
            config("Step3p5ForCausalLM", sliding_window=512, layer_types=["full_attention", "sliding_attention"] * 6),
            "Fs" * 6,
        ),
        (config("MiMoV2FlashForCausalLM", hybrid_layer_pattern=[0, 1] * 6), "Fs" * 6),
        (config("BertModel"), "EEEEEEEEEEEE"),
    ],
)
def test_patterns(value: dict[str, Any], expected: str) -> None:
    assert kinds(value) == expected


def test_gemma4_global_layers_have_their_own_heads_and_share_late_caches() -> None:
    found = mixers(
        config(
            "Gemma4ForCausalLM",
            head_dim=256,
            global_head_dim=512,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            sliding_window=1024,
            num_kv_shared_layers=4,
        )
    )
    assert [mixer.head_dim for mixer in found] == [256] * 5 + [512] + [256] * 5 + [512]
    assert (found[5].kv_heads, found[0].kv_heads) == (2, 8)
    assert [mixer.shares_kv_with for mixer in found] == [None] * 8 + [7, 7, 7, 5]


def test_gemma3n_shares_the_last_layers_before_the_border() -> None:
    found = mixers(config("Gemma3nForCausalLM", num_kv_shared_layers=4, num_hidden_layers=10))
    # Local layers read the last but one layer before the border, global ones the last.
    assert [mixer.shares_kv_with for mixer in found] == [None] * 6 + [4, 4, 4, 5]


def test_indexers_are_shared_by_schedule_or_pattern() -> None:
    base = {"kv_lora_rank": 512, "index_topk": 2048, "index_head_dim": 128}
    every = mixers(config("DeepseekV32ForCausalLM", **base))
    assert {mixer.index_dim for mixer in every} == {128}
    assert not any(mixer.index_shared for mixer in every)
    scheduled = mixers(config("GlmMoeDsaForCausalLM", **base, index_topk_freq=4, index_skip_topk_offset=3))
    assert [index for index, mixer in enumerate(scheduled) if not mixer.index_shared] == [0, 1, 2, 6, 10]
    written = mixers(config("GlmMoeDsaForCausalLM", **base, index_topk_pattern="FSSFSSFSSFSS"))
    assert [index for index, mixer in enumerate(written) if not mixer.index_shared] == [0, 3, 6, 9]


def test_deepseek_v4_reads_its_ratios() -> None:
    found = mixers(config("DeepseekV4ForCausalLM", compress_ratios=[0, 0, 4, 128] * 3, head_dim=512))
    assert [mixer.compress for mixer in found] == [0, 0, 4, 128] * 3
    assert {mixer.compress for mixer in found if mixer.index_dim} == {4}
    with pytest.raises(ModelConfigError, match="compress ratio"):
        mixers(config("DeepseekV4ForCausalLM", compress_ratios=[7] * 12))


def test_deci_blocks_may_have_no_attention() -> None:
    blocks = [{"attention": {"no_op": True}}, {"attention": {"n_heads_in_group": 4}}] * 6
    found = mixers(config("DeciLMForCausalLM", block_configs=blocks))
    assert [(mixer.kind, mixer.kv_heads) for mixer in found[:2]] == [("none", 0), ("full", 8)]
    with pytest.raises(ModelConfigError, match="block_configs has 1 entries for 12 layers"):
        mixers(config("DeciLMForCausalLM", block_configs=blocks[:1]))


def test_kimi_counts_layers_from_one() -> None:
    linear = {"num_heads": 32, "head_dim": 128, "kda_layers": [1, 2, 3]}
    found = mixers(config("KimiLinearForCausalLM", num_hidden_layers=4, kv_lora_rank=512, linear_attn_config=linear))
    assert [mixer.kind for mixer in found] == ["kda", "kda", "kda", "mla"]


def test_wrappers_follow_the_model_inside() -> None:
    inner = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "model_type": "gemma2"}
    wrapped = {"architectures": ["LlavaForConditionalGeneration"], "text_config": inner}
    assert kinds(wrapped) == "sF"
    assert kinds({**wrapped, "text_config": {**inner, "model_type": "mistral4", "kv_lora_rank": 256}}) == "LL"


def test_a_file_without_architectures_is_read_by_its_keys() -> None:
    value = config("x")
    del value["architectures"]
    assert kinds(value) == "F" * 12
    assert kinds({**value, "kv_lora_rank": 512}) == "L" * 12
    assert kinds({**value, "model_type": "gemma2"}) == "sF" * 6
    with pytest.raises(UnsupportedArchitectureError, match="model_type strange"):
        mixers({**value, "model_type": "strange"})


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="the memory of SomethingNewForCausalLM is not known"):
        mixers(config("SomethingNewForCausalLM"))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers"),
        ({"num_key_value_heads": float("nan")}, "num_key_value_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"num_attention_heads": 10**5000}, "num_attention_heads"),
        ({"sliding_window": True}, "sliding_window"),
        ({"layer_types": [1] * 12}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        mixers(config("LlamaForCausalLM", **changes))
    assert caught.value.key == key


def test_drafts_have_the_model_s_own_layers_or_those_of_their_config() -> None:
    model = config("Qwen3_5ForConditionalGeneration", mtp_num_hidden_layers=1, head_dim=256)
    assert [mixer.kind for mixer in draft_mixers(model, "mtp")] == ["full"]
    assert draft_mixers(model, "ngram") == ()
    assert len(draft_mixers(model, "eagle3", config("LlamaForCausalLM", num_hidden_layers=1))) == 1
    deepseek = config("DeepseekV3ForCausalLM", kv_lora_rank=512, num_nextn_predict_layers=2)
    assert [mixer.head_dim for mixer in draft_mixers(deepseek, "deepseek_mtp")] == [576, 576]
    hybrid = config(
        "NemotronHForCausalLM",
        hybrid_override_pattern="M*",
        mtp_hybrid_override_pattern="*E",
        num_nextn_predict_layers=1,
    )
    assert [mixer.kind for mixer in draft_mixers(hybrid, "mtp")] == ["full"]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_ARCHITECTURES = st.sampled_from(
    [
        "LlamaForCausalLM",
        "Gemma4ForCausalLM",
        "NemotronHForCausalLM",
        "DeepseekV4ForCausalLM",
        "KimiLinearForCausalLM",
        "DeciLMForCausalLM",
        "Step3p5ForCausalLM",
        "Llama4ForCausalLM",
        "Lfm2ForCausalLM",
        "MiMoV2FlashForCausalLM",
    ]
)
_KEYS = st.sampled_from(
    [
        "layer_types",
        "sliding_window",
        "num_hidden_layers",
        "head_dim",
        "block_configs",
        "hybrid_override_pattern",
        "compress_ratios",
        "linear_attn_config",
        "no_rope_layers",
        "kv_lora_rank",
        "num_kv_shared_layers",
        "text_config",
        "hybrid_layer_pattern",
        "attention_other_setting",
        "model_type",
        "architectures",
        "num_key_value_heads",
    ]
)


@settings(max_examples=200, deadline=None)
@given(_ARCHITECTURES, st.dictionaries(_KEYS, _VALUES, max_size=5))
def test_nothing_but_planner_errors_leaves(architecture: str, changes: dict[str, Any]) -> None:
    try:
        found = mixers(config(architecture, **changes))
    except PlannerError:
        return
    assert all(isinstance(mixer, Mixer) for mixer in found)


def test_every_complete_real_config_is_read(shared_facts: Path) -> None:
    refused = Counter[str]()
    for path in sorted((shared_facts / "model_configs").glob("*.json")):
        if path.stem.endswith(".hf_quant_config"):
            continue
        try:
            mixers(json.loads(path.read_bytes()))
        except ModelConfigError as error:
            refused[error.key] += 1
    # Files that lack what decides their layers.
    assert refused == {"hybrid_override_pattern": 5, "num_attention_heads": 1}
