"""Variables of model_store that are wrong are told with the inventory, before any host is contacted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import limits, model_files, validate

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
    assert found[0].value == (
        "(hidden)" if variable == "model_store_token" else str(value).replace("user:secret", "***")
    )


def test_the_token_is_given_in_one_way() -> None:
    both = {"model_store_token": "hf_swordfish", "model_store_token_file": "/root/token"}
    (problem,) = problems(**both)
    assert (problem.variable, problem.value) == ("model_store_token_file", "/root/token")
    assert "model_store_token is set too" in problem.problem
    assert "swordfish" not in validate.render([problem])
    assert problems(**both | {"model_store_token_file": ""}) == []


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ({"repo": "o/n", "revision": "0e9e39f"}, "short form"),
        ({"repo": "o/n", "revision": "0e9e39f249a16976918f6564b8830bc894c89659"[:39]}, "short form"),
        ({"repo": "o/n", "revision": "0e9e39f249a16976918f6564b8830bc894c89659"}, ""),
        ({"repo": "o/n", "revision": "main"}, ""),
        ({"repo": "o/n", "revision": "a/b"}, "is not a revision"),
    ],
)
def test_a_short_commit_is_refused(model: dict[str, str], word: str) -> None:
    found = model_files.check_model("vllm_instances.a.model", model)
    assert [item.variable for item in found] == (["vllm_instances.a.model.revision"] if word else [])
    assert not word or (word in found[0].problem and found[0].value == model["revision"] and found[0].remedy)


@pytest.mark.parametrize(
    ("model", "moving"),
    [
        ({"repo": "o/n"}, "main"),
        ({"repo": "o/n", "revision": "main"}, "main"),
        ({"repo": "o/n", "revision": "v1.0"}, "v1.0"),
        ({"repo": "o/n", "revision": "0e9e39f249a16976918f6564b8830bc894c89659"}, ""),
        ({"path": "/data/models/a", "repo": "o/n"}, ""),
    ],
)
def test_a_branch_is_told_from_a_commit(model: dict[str, str], moving: str) -> None:
    assert model_files.moving_revision(model) == moving


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("https://user:p@SECRET@m.example/x y", "https://***@m.example/x y"),
        ("https://user:a/SECRET@m.example/x?y", "https://***@m.example/x?y"),
        (["http://user:SECRET@h", "http://other:SECRET@h"], '["http://***@h", "http://***@h"]'),
    ],
)
def test_a_wrong_value_is_told_without_its_password(value: Any, told: str) -> None:
    (found,) = problems(model_store_mirror=value)
    assert found.value == told


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"repo": "o/n\n"}, "repo"),
        ({"repo": "o/n", "revision": "main\n"}, "revision"),
        ({"repo": "o/n", "revision": "feature/x"}, "revision"),
        *(({"path": path}, "path") for path in ("/", "//", "/a//b", "/a/./b", "/a/../b", "/a\0b", "/a\nb", "a/b")),
    ],
)
def test_a_wrong_place_of_a_model_is_named(model: dict[str, str], field: str) -> None:
    assert [item.variable for item in model_files.check_model("m", model)] == [f"m.{field}"]
    assert not model_files.check_model("m", {"path": "/data/models/llama-3.1_8b/"})


def test_a_builder_of_the_runtime_is_a_host_too() -> None:
    specs = yaml.safe_load((ROOT / "roles/python_env/meta/argument_specs.yml").read_text("utf-8"))
    options = limits.limited(specs["argument_specs"]["main"]["options"])
    (found,) = validate.validate({"n1": {"python_env_builder": "n9"}}, options).problems
    assert (found.variable, found.value) == ("python_env_builder", "n9")
    assert validate.validate({"n1": {"python_env_builder": "n1"}}, options).problems == []


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


@pytest.mark.parametrize(
    ("given", "place", "login"),
    [
        ("https://user:p@SECRET@m.example/a@b", "https://m.example/a@b", "user:p@SECRET"),
        ("https://m.example/a@b", "https://m.example/a@b", ""),
        ("file:///srv/a@b", "file:///srv/a@b", ""),
    ],
)
def test_no_part_of_a_password_stays_in_the_address(given: str, place: str, login: str) -> None:
    (block,) = yaml.safe_load((ROOT / "roles/model_store/tasks/fetch.yml").read_text("utf-8"))
    shown = block["module_defaults"]["ironrack.vllm.model_fetch"]
    templar = Templar(loader=DataLoader(), variables={"__model_store_source": given})
    asked = shown["mirror"], block["vars"]["__model_store_login"]
    assert [templar.template(trust_as_template(text)) for text in asked] == [place, login]
    # What is secret goes to the node that fetches from there, and to no other.
    secret = {"mirror_login", "token", "token_file"}
    assert not secret & set(shown)
    given_to = [task["ironrack.vllm.model_fetch"] for task in [*block["block"], *block["always"]]]
    assert [each["state"] for each in given_to if secret & set(each)] == ["listed", "fetched"]
