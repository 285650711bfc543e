# SPDX-License-Identifier: Apache-2.0
"""Which units and files of a node go, seen on a folder made up for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.ironrack.vllm.plugins.modules import vllm_retire

MARK = "# Managed by ironrack: something.\n"


@pytest.fixture(name="node")
def a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vllm_retire, "UNITS", str(tmp_path / "units"))
    for name in ("old", "tiny", "by-hand"):
        folder = tmp_path / "units" / f"vllm@{name}.service.d"
        folder.mkdir(parents=True)
        (folder / "10-instance.conf").write_text(MARK if name != "by-hand" else "[Service]\n", encoding="utf-8")
    config = tmp_path / "config" / "vllm"
    config.mkdir(parents=True)
    for name in ("old.env", "old.canary.json", "tiny.env", "tiny.canary.json"):
        (config / name).write_text("{}", encoding="utf-8")
    for name in ("ray.token", "ray.env"):
        (tmp_path / "config" / name).write_text("x", encoding="utf-8")
    (tmp_path / "units" / "ray-worker.service").write_text(MARK, encoding="utf-8")
    return tmp_path


def found(node: Path, instances: list[str], units: list[str]) -> tuple[list[str], list[str]]:
    names, paths = vllm_retire.leftovers(instances, units, str(node / "config"))
    return names, [str(Path(path).relative_to(node)) for path in paths]


KEEP = ["vllm-canary@tiny.timer", "ray-worker.service"]


def test_what_the_plan_has_stays(node: Path) -> None:
    assert found(node, ["tiny", "old"], [*KEEP, "vllm-canary@old.timer"]) == ([], [])


def test_an_instance_goes_whole_and_its_drop_in_last(node: Path) -> None:
    units, paths = found(node, ["tiny"], KEEP)
    assert units == ["vllm-canary@old.timer", "vllm-watch@old.timer", "vllm@old.service"]
    assert paths == [
        "config/vllm/old.env",
        "config/vllm/old.canary.json",
        "units/vllm@old.service.d/10-instance.conf",
    ]


def test_ray_goes_with_its_token(node: Path) -> None:
    units, paths = found(node, ["tiny", "old"], ["vllm-canary@tiny.timer", "vllm-canary@old.timer"])
    assert units == ["ray-worker.service"]
    assert paths == ["config/ray.token", "config/ray.env", "units/ray-worker.service"]


def test_a_worker_that_became_the_head_keeps_the_token(node: Path) -> None:
    units, paths = found(node, ["tiny", "old"], ["ray-head.service", "vllm-canary@tiny.timer", "vllm-canary@old.timer"])
    assert (units, paths) == (["ray-worker.service"], ["units/ray-worker.service"])


def test_the_canary_goes_when_the_api_server_moved(node: Path) -> None:
    units, paths = found(
        node, ["tiny", "old"], ["ray-worker.service", "vllm-watch@tiny.timer", "vllm-canary@old.timer"]
    )
    assert (units, paths) == (["vllm-canary@tiny.timer"], ["config/vllm/tiny.canary.json"])
