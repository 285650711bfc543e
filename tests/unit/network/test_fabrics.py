"""What nodes say of their fabric has to fit together before any of them is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network.fabrics import DEFAULTS, problems

ROOT = Path(__file__).resolve().parents[3]
IB = {"fabric_type": "infiniband"}
ENGINE = [("llm", ["a", "b"])]


def test_defaults_are_those_of_the_role() -> None:
    assert yaml.safe_load((ROOT / "roles/fabric/defaults/main.yml").read_text("utf-8")) == DEFAULTS


@pytest.mark.parametrize(
    ("one", "other", "variable", "words"),
    [
        (IB, {}, "fabric_type", "differs from a (infiniband), where llm has ranks too"),
        ({"fabric_type": "nvlink"}, {"fabric_type": "nvlink"}, "fabric_type", "but llm spans a, b"),
        (IB | {"fabric_rails": "isolated"}, IB, "fabric_rails", "differs from a (isolated)"),
        (IB, IB | {"fabric_service_level": 3}, "fabric_service_level", "differs from a (0)"),
        (
            IB | {"fabric_rails": "isolated", "fabric_hcas": ["m0", "m1"]},
            IB | {"fabric_rails": "isolated", "fabric_hcas": ["m0"]},
            "fabric_hcas",
            "1 rails, but a, where llm has ranks too, has 2",
        ),
    ],
)
def test_nodes_of_one_engine(one: dict[str, Any], other: dict[str, Any], variable: str, words: str) -> None:
    (found,) = problems({"a": one, "b": other}, ENGINE)
    assert found.variable == variable
    assert words in found.problem
    # Engines that stay on their nodes may differ.
    assert problems({"a": one, "b": other}, [("llm", ["a"]), ("other", ["b"])]) == []


def test_devices_of_other_names_are_alike() -> None:
    assert problems({"a": IB | {"fabric_hcas": ["m0"]}, "b": IB | {"fabric_hcas": ["ib7"]}}, ENGINE) == []
    assert problems({"a": IB | {"fabric_hcas": ["m0"]}, "b": IB}, ENGINE) == []


def test_each_node_for_itself() -> None:
    (found,) = problems({"a": {"fabric_hcas": ["m0"]}, "b": {}}, [])
    assert (found.host, found.variable, found.value) == ("a", "fabric_hcas", "m0")
    (found,) = problems({"a": {"fabric_environment": {"HF_TOKEN": "geheim"}}}, [])
    assert found.variable == "fabric_environment.HF_TOKEN"
    assert "geheim" not in str(found)
