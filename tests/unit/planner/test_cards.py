"""Chips by the names that nvidia-smi prints."""

from __future__ import annotations

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner.cards import chip, is_foreign, is_known
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


@pytest.mark.parametrize("name", ["NVIDIA RTX 9090", "something new", ""])
def test_unknown_names(name: str) -> None:
    assert not is_known(Card(name, 1.0))
    assert not is_foreign(name)


@pytest.mark.parametrize(
    "name", ["AMD Instinct MI300X", "MI300X", "Radeon RX 7900 XT", "Intel Gaudi 3", "Intel(R) Data Center GPU Max 1550"]
)
def test_other_makers(name: str) -> None:
    assert is_foreign(name)


@pytest.mark.parametrize("name", ["NVIDIA H200", "Tesla V100-SXM2-32GB", "NVIDIA RTX PRO 6000 Blackwell", "CPU slot"])
def test_not_of_other_makers(name: str) -> None:
    assert not is_foreign(name)


def test_old_chips_are_known() -> None:
    old = {"Tesla V100-SXM2-32GB": 70, "Tesla P100-PCIE-16GB": 61, "NVIDIA TITAN V": 70, "Tesla M40": 52}
    assert {name: chip(Card(name, 1.0)).capability for name in old} == old
