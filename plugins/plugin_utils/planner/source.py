"""Checked access to config.json for the families of models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from .errors import ModelConfigError, short
from .mixers import Mixer, distinct, mixers, size_of


class Source:
    """config.json with checked access."""

    def __init__(
        self, config: Mapping[str, Any], text: Mapping[str, Any], layers: tuple[Mixer, ...] | None = None
    ) -> None:
        self.config = config
        self.text = text
        self._layers = layers
        self.hidden = self.size("hidden_size", "n_embd", "d_model", "dim")

    def size(self, *names: str, default: int | None = None, minimum: int = 1, within: str = "") -> int:
        return size_of(self.sub(within) if within else self.text, names, default, minimum)

    def has(self, name: str) -> bool:
        return self.text.get(name) is not None

    def flag(self, *names: str, default: bool = False) -> bool:
        for name in names:
            value = self.text.get(name)
            if value is None:
                continue
            if not isinstance(value, bool):
                raise ModelConfigError(f"config.json: {name} = {short(value)} is neither true nor false", key=name)
            return value
        return default

    def sub(self, name: str) -> Mapping[str, Any]:
        value = self.text.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ModelConfigError(f"config.json: {name} = {short(value)} is not an object", key=name)
        return value

    def integers(self, name: str) -> list[int]:
        value = self.text.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ModelConfigError(f"config.json: {name} = {short(value)} is not a list of integers", key=name)
        return value

    def number(self, source: Mapping[str, Any], name: str, default: float) -> float:
        value = source.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e9:
            raise ModelConfigError(f"config.json: {name} = {short(value)} is not a positive number", key=name)
        return float(value)

    def tied(self, default: bool) -> bool:
        for source in (self.text, self.config):
            value = source.get("tie_word_embeddings")
            if value is not None:
                if not isinstance(value, bool):
                    raise ModelConfigError(
                        f"config.json: tie_word_embeddings = {short(value)} is neither true nor false",
                        key="tie_word_embeddings",
                    )
                return value
        return default

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        return mixers(self.config) if self._layers is None else self._layers

    @property
    def kinds(self) -> tuple[Mixer, ...]:
        """The different mixers among those of the layers."""
        return distinct(self.mixers)

    @property
    def intermediate(self) -> int:
        # GPT-2's configs leave out four times the hidden size.
        default = 4 * self.hidden if self.has("n_embd") else None
        return self.size("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=default)

    @property
    def vocabulary(self) -> int:
        return self.size("vocab_size", "padded_vocab_size")
