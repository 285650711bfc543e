"""House rules that no linter knows: specs equal defaults, one prefix a role, every plugin documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())


def load(path: Path) -> dict:
    return (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


@pytest.fixture(params=ROLES, ids=lambda path: path.name)
def role(request: pytest.FixtureRequest) -> Path:
    return request.param


def spec_options(role: Path) -> dict:
    return load(role / "meta/argument_specs.yml")["argument_specs"]["main"].get("options", {})


def test_there_are_roles() -> None:
    assert len(ROLES) >= 9


def test_specs_equal_defaults(role: Path) -> None:
    """A documented default that is not the real one is worse than none."""
    defaults = load(role / "defaults/main.yml")
    options = spec_options(role)
    documented = {name: option["default"] for name, option in options.items() if "default" in option}
    assert documented == defaults
    undocumented = {name for name in defaults if name not in options}
    assert not undocumented


def test_options_are_described_and_typed(role: Path) -> None:
    def walk(options: dict, path: str) -> list[str]:
        found = []
        for name, option in options.items():
            if not option.get("description") or not option.get("type"):
                found.append(f"{path}{name}")
            found += walk(option.get("options", {}), f"{path}{name}.")
        return found

    assert walk(spec_options(role), "") == []


def test_names_carry_the_role(role: Path) -> None:
    """Public names begin with the role's name (or are it), private ones with two underscores and the role's name."""
    public = [name for name in load(role / "defaults/main.yml") if name != role.name]
    foreign = [name for name in public if not name.startswith(f"{role.name}_")]
    private = [name for name in load(role / "vars/main.yml") if not name.startswith(f"__{role.name}_")]
    assert foreign == []
    assert private == []


def test_role_shape(role: Path) -> None:
    for part in (
        "README.md",
        "defaults/main.yml",
        "meta/main.yml",
        "meta/argument_specs.yml",
        "tasks/main.yml",
        "tasks/validate.yml",
    ):
        assert (role / part).is_file(), part
    first = load(role / "tasks/main.yml")[0]
    assert "validate.yml" in str(first)


PLUGINS = sorted((ROOT / "plugins/modules").glob("*.py"))


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.stem)
def test_modules_are_documented(path: Path) -> None:
    names = {
        target.id
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {"DOCUMENTATION", "EXAMPLES", "RETURN"} <= names


@pytest.mark.parametrize("path", sorted((ROOT / "plugins/filter").glob("*.py")), ids=lambda path: path.stem)
def test_filters_are_documented(path: Path) -> None:
    document = load(path.with_suffix(".yml"))
    assert document["DOCUMENTATION"]["name"] == path.stem
    assert document["EXAMPLES"] and document["RETURN"]


def test_plugin_utils_import_no_ansible() -> None:
    """What decides is plain Python: testable, and usable outside Ansible."""
    guilty = []
    for path in (ROOT / "plugins/plugin_utils").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            guilty += [
                f"{path.name}: {name}"
                for name in names
                if name.split(".")[0] in {"ansible", "ansible_collections", "yaml", "jinja2"}
            ]
    assert guilty == []


def test_no_injected_facts() -> None:
    """ansible_facts['x'], never ansible_x (connection variables and magic ones excepted)."""
    magic = set(
        """
        become become_password check_mode collections config_file connection control_path
        control_path_dir diff_mode facts failed_result host inventory_sources limit loop managed
        play_batch play_hosts play_hosts_all playbook playbook_python port python_interpreter
        role_name run_tags search_path skip_tags ssh_args ssh_common_args ssh_private_key_file user
        version
        """.split()  # noqa: SIM905 (sixty short words read better as text)
    )
    guilty = []
    for folder in ("roles", "playbooks", "molecule"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".yml", ".j2"}:
                for name in re.findall(r"(?<![\w.'\"/])ansible_(\w+)", path.read_text(encoding="utf-8")):
                    if name not in magic:
                        guilty.append(f"{path.relative_to(ROOT)}: ansible_{name}")
    assert guilty == []


def test_every_file_is_free_of_unfinished_marks() -> None:
    words = re.compile("TO" + "DO|FIX" + "ME|XX" + "X")
    for folder in ("roles", "playbooks", "plugins", "molecule", "scripts", "docs", "inventories"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in {".py", ".yml", ".j2", ".sh", ".md"}:
                assert not words.search(path.read_text(encoding="utf-8")), path


def test_files_made_beside_an_inventory_are_hidden(role: Path) -> None:
    """Ansible reads every file in an inventory folder as hosts, except hidden ones: a token is no host."""
    for name, value in load(role / "defaults/main.yml").items():
        if isinstance(value, str) and "inventory_dir }}" in value:
            assert "inventory_dir }}/." in value, name
