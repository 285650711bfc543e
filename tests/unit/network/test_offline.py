"""What the variables of several roles say together, before any host is contacted."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import offline


@pytest.mark.parametrize(
    ("own", "refused"),
    [
        ({}, False),
        ({"python_env_serve_port": 9000, "model_store_serve_port": "9000"}, True),
        ({"python_env_serve_port": 8791}, True),
        ({"python_env_serve_port": 8791, "model_store_serve_port": 8790}, False),
    ],
)
def test_releases_and_models_have_ports_of_their_own(own: dict[str, Any], refused: bool) -> None:
    problems = offline.problems({"gpu1": own}, {"gpu1": "10.0.0.1"}, {})
    assert [problem.variable for problem in problems] == ["model_store_serve_port"] * refused
    assert all("python_env_serve_port" in problem.problem for problem in problems)
