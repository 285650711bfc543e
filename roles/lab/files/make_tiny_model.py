#!/usr/bin/env python3
"""Write a tiny Llama checkpoint with random weights, for tests that need a real server: make_tiny_model.py DIR

A complete Hugging Face style folder (config, safetensors weights, byte-level BPE tokenizer, chat template), so
that `vllm serve DIR` takes its ordinary path and nothing is downloaded. Standard library only: the lab makes it
on the controller before any Python environment exists.

What tests rely on:
  * the same arguments give the same bytes, on any machine;
  * greedy decoding gives printable ASCII and never ends early: in the output matrix the rows of every other
    token are zero, so a request for N tokens returns N tokens (finish_reason "length");
  * 8 query heads, 4 KV heads and 4 layers allow TP in {1, 2, 4} and PP in {1, 2, 4}.
"""

from __future__ import annotations

import argparse
import array
import json
import math
import pathlib
import random
import struct
import sys

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PRINTABLE = range(0x20, 0x7F)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE: itself where it prints, else one from U+0100 up."""
    keep = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in keep else chr(next(shifted)) for byte in range(256)]


def tokenizer() -> dict[str, object]:
    """One token a byte and no merges: any text has an encoding, and nothing has to be trained."""
    tokens = SPECIAL + byte_letters()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": text, **flags} for index, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(tokens)},
            "merges": [],
        },
    }


def weights(args: argparse.Namespace, vocabulary: int) -> dict[str, tuple[list[int], array.array[float]]]:
    source = random.Random(args.seed)  # noqa: S311 - reproducible numbers, no secret
    hidden, inter = args.hidden_size, args.intermediate_size
    query, key_value = args.heads * args.head_dim, args.kv_heads * args.head_dim

    def matrix(rows: int, columns: int) -> tuple[list[int], array.array[float]]:
        # uniform, with the variance 1/columns that keeps activations near one
        scale = math.sqrt(12.0 / columns)
        draw = source.random
        return [rows, columns], array.array("f", [(draw() - 0.5) * scale for _ in range(rows * columns)])

    def ones() -> tuple[list[int], array.array[float]]:
        return [hidden], array.array("f", [1.0]) * hidden

    result = {"model.embed_tokens.weight": matrix(vocabulary, hidden)}
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}."
        result[prefix + "input_layernorm.weight"] = ones()
        result[prefix + "post_attention_layernorm.weight"] = ones()
        result[prefix + "self_attn.q_proj.weight"] = matrix(query, hidden)
        result[prefix + "self_attn.k_proj.weight"] = matrix(key_value, hidden)
        result[prefix + "self_attn.v_proj.weight"] = matrix(key_value, hidden)
        result[prefix + "self_attn.o_proj.weight"] = matrix(hidden, query)
        result[prefix + "mlp.gate_proj.weight"] = matrix(inter, hidden)
        result[prefix + "mlp.up_proj.weight"] = matrix(inter, hidden)
        result[prefix + "mlp.down_proj.weight"] = matrix(hidden, inter)
    result["model.norm.weight"] = ones()
    shape, head = matrix(vocabulary, hidden)
    spoken = {len(SPECIAL) + byte for byte in PRINTABLE}
    for token in range(vocabulary):
        if token not in spoken:
            head[token * hidden : (token + 1) * hidden] = array.array("f", bytes(4 * hidden))
    result["lm_head.weight"] = (shape, head)
    return result


def safetensors(tensors: dict[str, tuple[list[int], array.array[float]]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, (shape, values) in sorted(tensors.items()):
        if sys.byteorder == "big":
            values.byteswap()
        data = values.tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(chunks)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a tiny Llama checkpoint with random weights.")
    parser.add_argument("out", type=pathlib.Path, help="folder to write (created if missing)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--intermediate-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32, help="vLLM's CPU attention wants 32 or more")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=2, help="2: the first choice of a token is clear of the second")
    args = parser.parse_args()
    if args.heads % args.kv_heads:
        parser.error("--heads must be a multiple of --kv-heads")

    vocabulary = -(-(len(SPECIAL) + 256) // 64) * 64  # vLLM shards the vocabulary in blocks of 64
    pad, bos, eos = range(3)
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": args.intermediate_size,
        "max_position_embeddings": args.max_model_len,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": args.heads,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": args.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        **ids,
    }
    tokenizer_config = {
        "bos_token": SPECIAL[bos],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[eos],
        "model_max_length": args.max_model_len,
        "pad_token": SPECIAL[pad],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }

    def document(value: object) -> bytes:
        return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()

    files = {
        "config.json": document(config),
        "generation_config.json": document(ids),
        "model.safetensors": safetensors(weights(args, vocabulary)),
        "tokenizer.json": document(tokenizer()),
        "tokenizer_config.json": document(tokenizer_config),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = args.out / name
        partial = args.out / f".{name}.part"
        partial.write_bytes(data)
        partial.chmod(0o644)  # the server runs as another user
        partial.replace(path)
    size = sum(len(data) for data in files.values())
    print(f"{args.out}: {size / 1e6:.2f} MB, {args.layers} layers, vocabulary {vocabulary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
