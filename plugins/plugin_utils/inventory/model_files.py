"""Finds the config.json of an instance's model on the controller."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..planner.errors import ModelConfigError
from ..planner.model import load_config
from .validate import Problem, not_set, show

MODELS_DIR = "models"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*")
# A folder, no part of which is empty, `.` or `..`.
_PATH = re.compile(r"(?!.*/\.{1,2}(/|$))(/[^/\s\"'$%\\\0]+)+/?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Git's own abbreviations have seven digits and more.
_SHORT = re.compile(r"[0-9a-f]{7,39}")


class ConfigFile(dict[str, Any]):
    """The content of a config.json that knows its file, so that an error about a value can name it."""

    def __init__(self, content: Mapping[str, Any], file: Path) -> None:
        super().__init__(content)
        self.file = str(file)


def model_path(model: Mapping[str, Any], state_dir: str) -> str | None:
    """The folder on the engine nodes."""
    if model.get("path"):
        return str(model["path"])
    if model.get("repo"):
        return f"{state_dir}/{MODELS_DIR}/{model['repo']}/{model.get('revision') or 'main'}"
    return None


def check_model(variable: str, model: Mapping[str, Any]) -> list[Problem]:
    """What can be said of `model` without reading a file."""
    path, repo = model.get("path"), model.get("repo")
    if not path and not repo:
        return [
            not_set(
                "",
                f"{variable}.path",
                "the model has no path",
                "set model.path to the absolute path of its folder on the engine nodes, or model.repo to org/name",
            )
        ]
    problems = []
    if path and not _PATH.fullmatch(str(path)):
        problems.append(
            Problem(
                "",
                f"{variable}.path",
                show(path),
                "is not an absolute path without spaces, quotes, '..', '.' and empty parts",
                "give the absolute path of the model's folder, for example /data/models/llama",
            )
        )
    if repo and not _REPO.fullmatch(str(repo)):
        problems.append(
            Problem("", f"{variable}.repo", show(repo), "is not a repository of the form org/name", "correct it")
        )
    revision = model.get("revision")
    if revision and not _REVISION.fullmatch(str(revision)):
        problems.append(
            Problem(
                "",
                f"{variable}.revision",
                show(revision),
                "is not a revision that can be the name of a folder",
                "give a commit; of a branch with a slash in its name, the commit to which it leads",
            )
        )
    elif _SHORT.fullmatch(str(revision or "")):
        problems.append(
            Problem(
                "",
                f"{variable}.revision",
                show(revision),
                "is the short form of a commit, which may come to mean several",
                "give all 40 hexadecimal digits, as the repository's list of commits shows them",
            )
        )
    return problems


def fetched_model(model: Mapping[str, Any]) -> dict[str, str] | None:
    """What the nodes fetch, or None where the user brings the folder."""
    if model.get("path") or not model.get("repo"):
        return None
    return {"repo": str(model["repo"]), "revision": str(model.get("revision") or "main")}


def moving_revision(model: Mapping[str, Any]) -> str:
    """The branch or tag that a model is fetched from; empty where it is a commit, or nothing is fetched."""
    fetched = fetched_model(model)
    return "" if fetched is None or _COMMIT.fullmatch(fetched["revision"]) else fetched["revision"]


def trusts_remote_code(spec: Mapping[str, Any]) -> bool:
    """Whether the engine may run Python that comes with the model."""
    for name, value in (spec.get("args") or {}).items():
        if str(name).strip("-").replace("_", "-") == "trust-remote-code":
            return value is not None and str(value).lower() not in ("false", "no", "off", "0")
    return False


def check_trust(variable: str, spec: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """Problems and warnings of an instance that runs its model's own code: it must be code that somebody has read."""
    model = spec["model"]
    if not trusts_remote_code(spec):
        return [], []
    if fetched_model(model) is None:
        return [], [
            f"{variable}: args.trust-remote-code runs the Python in {model.get('path')} on every node; whoever may "
            "write there may run code as the engine's user"
        ]
    revision = model.get("revision")
    if _COMMIT.fullmatch(str(revision or "")):
        return [], [
            f"{variable}: args.trust-remote-code runs the Python of {model['repo']} at {revision} on every node; read "
            "it before you change the revision"
        ]
    return [
        not_set(
            "",
            f"{variable}.model.revision",
            "args.trust-remote-code is on, and the revision is not pinned: the publisher could run code on the nodes",
            "set it to the commit whose code you have read",
        )
        if not revision
        else Problem(
            "",
            f"{variable}.model.revision",
            show(revision),
            "is not a commit, and args.trust-remote-code is on: whoever moves that name could run code on the nodes",
            "set it to the commit (40 hexadecimal digits) whose code you have read",
        )
    ], []


def draft_place(spec: Mapping[str, Any]) -> dict[str, str] | None:
    """Where the model of `speculative` is: a folder or a repository; None where the drafter is none of its own."""
    speculative = spec.get("speculative")
    name = speculative.get("model") if isinstance(speculative, Mapping) else None
    if not isinstance(name, str) or not name:
        return None
    if name.startswith("/"):
        # The name of the file beside the inventory has no leading underscores.
        return {"path": name, "repo": name.strip("/")}
    return {"repo": name} if _REPO.fullmatch(name) else None


def find_config(
    variable: str, model: Mapping[str, Any], inventory_dir: Path | None
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """The content of the config.json, or the problem that names where it was looked for."""
    given = model.get("config")
    if isinstance(given, Mapping):
        return dict(given), []
    remedy = f"set {variable}.config to the path of the model's config.json on the controller (or to its content)" + (
        f", or put it at {_beside(model, inventory_dir)}" if model.get("repo") and inventory_dir else ""
    )
    if isinstance(given, str):
        path = Path(given).expanduser()
        if not path.is_absolute():
            path = (inventory_dir or Path.cwd()) / path
        return _load(f"{variable}.config", given, path, remedy)
    candidates = []
    if model.get("repo") and inventory_dir:
        candidates.append(_beside(model, inventory_dir))
    if model.get("path"):
        candidates.append(Path(str(model["path"])) / "config.json")
    for candidate in candidates:
        if candidate.is_file():
            return _load(f"{variable}.config", str(candidate), candidate, remedy)
    looked = " or ".join(map(str, candidates))
    value = show(model.get("path") or model.get("repo") or "")
    name = f"{variable}.{'path' if model.get('path') else 'repo'}"
    return None, [
        Problem("", name, value, f"the planner found no config.json of this model on the controller ({looked})", remedy)
    ]


def _beside(model: Mapping[str, Any], inventory_dir: Path | None) -> Path:
    return (inventory_dir or Path()) / "model_configs" / f"{str(model['repo']).replace('/', '__')}.json"


def _load(variable: str, value: str, path: Path, remedy: str) -> tuple[dict[str, Any] | None, list[Problem]]:
    try:
        config = load_config(path)
        if twice := _told_twice(path):
            return None, [Problem("", variable, show(value), f"{path}: {twice}", "remove the wrong one from the file")]
        # Some publishers keep the quantization in a file of its own.
        for beside in (path.with_name("hf_quant_config.json"), path.with_name(f"{path.stem}.hf_quant_config.json")):
            if "quantization_config" not in config and beside.is_file():
                config["hf_quant_config"] = load_config(beside)
        return ConfigFile(config, path), []
    except ModelConfigError as error:
        return None, [Problem("", variable, show(value), str(error), remedy)]


def _told_twice(path: Path) -> str:
    """The first key with two values in one object; readers of JSON keep the last without a word."""
    found: list[str] = []

    def look(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values and values[key] != value and not found:
                found.append(f"{show(key)} is there twice, as {show(values[key])} and as {show(value)}")
            values[key] = value
        return values

    json.loads(path.read_bytes(), object_pairs_hook=look)
    return found[0] if found else ""
