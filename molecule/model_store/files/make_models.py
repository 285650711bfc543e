#!/usr/bin/env python3
"""Repositories for the hub of this test: FOLDER/org/tiny/<revision>, each with two shards of other random bytes."""

from __future__ import annotations

import json
import pathlib
import random
import struct
import sys

MIB = 1 << 20
REVISIONS = ("1", "2", "3")


def shard(path: pathlib.Path, tensors: list[str], size: int, chance: random.Random) -> None:
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [number * size, (number + 1) * size]}
        for number, name in enumerate(tensors)
    }
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + chance.randbytes(size * len(tensors)))


def main() -> None:
    for revision in REVISIONS:
        chance = random.Random(revision)  # noqa: S311 - the same each time
        folder = pathlib.Path(sys.argv[1], "org/tiny", revision * 40)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text('{"architectures": ["X"], "model_type": "x", "vocab_size": 100}')
        (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
        (folder / "tokenizer.json").write_text(json.dumps({"revision": revision}))
        (folder / "pytorch_model.bin").write_bytes(b"the same once more, for other programs")
        shard(folder / "model-1.safetensors", ["a", "b"], 4 * MIB, chance)
        shard(folder / "model-2.safetensors", ["c"], 3 * MIB, chance)
        weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


main()
