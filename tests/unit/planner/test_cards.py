"""Chips by the names that nvidia-smi prints."""

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.cards import chip
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.engine import Card


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H200", 90),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A10", 86),
        ("NVIDIA L40S", 89),
        ("NVIDIA B200", 100),
        ("NVIDIA GB10", 121),
        ("NVIDIA GeForce RTX 5090", 120),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120),
        ("NVIDIA GeForce RTX 3090", 86),
        ("Tesla T4", 75),
        ("something new", 90),
    ],
)
def test_capabilities(name: str, capability: int) -> None:
    assert chip(Card(name, 1.0)).capability == capability
