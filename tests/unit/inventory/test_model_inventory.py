"""Variables of model_store that are wrong are told with the inventory, before any host is contacted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import limits, validate

ROOT = Path(__file__).resolve().parents[3]
SPECS = yaml.safe_load((ROOT / "roles/model_store/meta/argument_specs.yml").read_text("utf-8"))
OPTIONS = limits.limited(SPECS["argument_specs"]["main"]["options"])


def problems(**variables: Any) -> list[validate.Problem]:
    return validate.validate({"n1": variables, "n2": {}}, OPTIONS).problems


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("model_store_builder", "n9"),
        ("model_store_endpoint", "huggingface.co"),
        ("model_store_endpoint", "https://user:secret@huggingface.co"),
        ("model_store_mirror", "s3://bucket/models"),
        ("model_store_mirror", "srv/models"),
        ("model_store_token", "hf_x y"),
        ("model_store_token_file", "token"),
        ("model_store_ca_bundle", "ca.pem"),
        ("model_store_reserve", -1),
        ("model_store_keep", -2),
        ("model_store_workers", 0),
        ("model_store_verify", "all"),
        ("model_store_serve_port", 70000),
        ("model_store_serve_lifetime", 0),
    ],
)
def test_a_wrong_value_is_named(variable: str, value: Any) -> None:
    found = problems(**{variable: value})
    assert [item.variable for item in found] == [variable]
    assert found[0].problem and found[0].remedy
    if "token" in variable:
        assert found[0].value == "(hidden)"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("model_store_builder", "n2"),
        ("model_store_builder", ""),
        ("model_store_endpoint", "http://10.0.0.5:8080/hub"),
        ("model_store_mirror", "/srv/models"),
        ("model_store_mirror", "https://user:secret@models.example.net/a"),
        ("model_store_mirror", ""),
        ("model_store_reserve", 0),
        ("model_store_keep", -1),
    ],
)
def test_a_right_value_is_taken(variable: str, value: Any) -> None:
    assert problems(**{variable: value}) == []
