"""What families with towers share: a language model under `language_model.` and encoders beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .decoder import Family
from .errors import ModelConfigError
from .source import Source
from .tensors import Linear, Structure, Tower

Sub = Mapping[str, Any]
QKV = ("q_proj", "k_proj", "v_proj")


def section_of(source: Source, name: str) -> Sub:
    value = source.config.get(name)
    if not isinstance(value, Mapping):
        raise ModelConfigError(f"config.json has no {name}", key=name)
    return value


def plain_linear(
    name: str, inputs: int, output: int, split: str, *, bias: bool = False, quantized: bool = True
) -> Linear:
    return Linear(name, inputs, (output,), split, bias=bias, quantized=quantized, lora=False)


def beside(
    inner: Family, towers: Callable[[Source], tuple[Tower, ...]], renamed: tuple[tuple[str, str], ...]
) -> Family:
    """A language model under `language_model.` with towers beside it."""

    def build(source: Source, architecture: str) -> Structure:
        structure = inner(source, architecture)
        head = structure.head
        return replace(
            structure,
            prefix=f"language_model.{structure.prefix}",
            head=replace(head, name=f"language_model.{head.name}") if head is not None else None,
            towers=towers(source),
            renamed=renamed,
        )

    return build


def under_model(*more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Names of checkpoints of Transformers 4.52 and later: towers and language model under `model.`."""
    return (
        *more,
        ("model.language_model.", "language_model.model."),
        ("language_model.", "language_model."),
        ("lm_head", "language_model.lm_head"),
        ("model.", "language_model.model."),
    )
