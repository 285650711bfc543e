"""Action `ironrack.vllm.cluster_plan`: checks the inventory and plans the cluster, on the controller alone.

Only collects what Ansible knows and hands it to the pure code in plugin_utils, and with `show` prints what that says.
Opens no connection.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible import context
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.release import __version__ as core_version
from ansible.utils.display import Display

display = Display()
COLLECTION = Path(__file__).resolve().parents[2]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_REGISTERED = "ironrack_plan"
_HOST_FACTS = "ironrack_host"


class ActionModule(ActionBase):
    """See the module of the same name for the documentation."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _check_controller()
        # Imported late, since an old Python can't read it.
        from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import cluster, validate  # noqa: PLC0415 - an old Python can't read it

        _, arguments = self.validate_argument_spec(
            {
                "require_addresses": {"type": "bool", "default": True},
                "show": {"type": "bool", "default": False},
            }
        )
        task_vars = task_vars or {}
        collected = Collected(task_vars, self._templar, _role_options())
        asked, problems = self._switches(task_vars, collected)
        options: dict[str, Any] = {"require_addresses": arguments["require_addresses"]}
        if arguments["show"] and asked.growth is not None:
            # Only the plan that is shown answers this question; the plan that roles read stays as it is.
            options["growth"] = asked.growth
        inputs = cluster.digest([collected.inputs(), options, _code_digest()])
        known = task_vars.get(_REGISTERED)
        if isinstance(known, Mapping) and known.get("inputs") == inputs and not problems:
            # Planned earlier in this run, or in an earlier run from the very same inputs.
            plan = collected.plain(known)
        else:
            checked = validate.validate(collected.values, collected.roles, collected.extra, collected.names)
            plan, found = cluster.build(
                checked.values, collected.groups, collected.load_config, collected.facts, **options
            )
            problems = [*collected.problems, *problems, *checked.problems, *found]
            if problems:
                return {**result, "failed": True, "msg": validate.render(problems)}
            plan["inputs"] = inputs
        return {**result, **self._show(plan, asked)} if arguments["show"] else self._success(result, plan)

    def _switches(self, task_vars: Mapping[str, Any], collected: Collected) -> tuple[Any, list[Any]]:
        """The switches of this run as they were given with -e."""
        from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import (  # noqa: PLC0415 - an old Python can't read it
            contract,
            switches,
            validate,
        )

        values: dict[str, Any] = {}
        problems = []
        for name in contract.SWITCHES:
            if name not in collected.extra:
                continue
            try:
                values[name] = collected.plain(self._templar.template(task_vars.get(name)))
            except AnsibleError as error:
                problems.append(
                    validate.Problem(
                        "", name, "(a template)", f"can't be evaluated: {error.message}", "give a plain value"
                    )
                )
        asked, found = switches.read(values, collected.inventory_dir, Path.cwd())
        return asked, problems + found

    def _show(self, plan: Mapping[str, Any], asked: Any) -> dict[str, Any]:
        """The plan in the form that was asked for: `msg` is for the terminal."""
        from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import switches  # noqa: PLC0415 - an old Python can't read it
        from ansible_collections.ironrack.vllm.plugins.plugin_utils.planner import html, report  # noqa: PLC0415 - an old Python can't read it

        document = report.document(plan, plan.get("growth"))
        shown: dict[str, Any] = {"changed": False, "document": document}
        text = report.render_text(document)
        if asked.format == "json":
            # One line, so that it can be told from the lines of Ansible; the file is for reading, too.
            display.display(json.dumps(document, allow_nan=False))
            shown["msg"] = "The plan is the line above that begins with a brace."
            text = json.dumps(document, allow_nan=False, indent=2)
        elif asked.format == "html":
            shown["msg"] = ""
            text = html.render_html(document)
        else:
            shown["msg"] = text
        if asked.file is None:
            return shown
        shown["path"] = str(asked.file)
        written = f"Plan as {asked.format}: {asked.file}"
        if self._task.check_mode:
            written += " (not written in check mode)"
        else:
            try:
                shown["changed"] = switches.write(asked.file, text if text.endswith("\n") else f"{text}\n")
            except OSError as error:
                raise AnsibleActionFail(
                    f"plan_file = {asked.file}: can't be written: {error.strerror or error}\n"
                    "   -> give a file in a folder that you may write to"
                ) from error
        shown["msg"] = "\n\n".join(filter(None, (shown["msg"], written)))
        return shown

    @staticmethod
    def _success(result: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
        # No fact: `register: ironrack_plan` with run_once gives the plan to every host, without a copy of it in the
        # fact cache of each. Ansible itself shows its warnings.
        return {**result, **plan, "changed": False}


class Collected:
    """The variables of the inventory, of all hosts and not only of those in --limit, as plain Python values."""

    def __init__(self, task_vars: Mapping[str, Any], templar: Any, roles: dict[str, Any]) -> None:
        from ansible_collections.ironrack.vllm.plugins.plugin_utils import plain  # noqa: PLC0415 - an old Python can't read it
        from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import (  # noqa: PLC0415 - an old Python can't read it
            cluster,
            contract,
            model_files,
            validate,
        )
        from ansible_collections.ironrack.vllm.plugins.plugin_utils.network import fabrics  # noqa: PLC0415 - an old Python can't read it
        from ansible_collections.ironrack.vllm.plugins.plugin_utils.nvidia import gpu_fabric, request  # noqa: PLC0415 - an old Python can't read it

        self.plain = plain.to_plain
        self.roles = roles
        self.problems: list[Any] = []
        self.values: dict[str, dict[str, Any]] = {}
        self.names: dict[str, list[str]] = {}
        self.facts: dict[str, Any] = {}
        self._templar = templar
        self._validate = validate
        self._model_files = model_files
        # What the plan itself reads.
        self._needed = {
            *contract.CONTRACT,
            *cluster.RAY_PORTS,
            *request.DEFAULTS,
            *gpu_fabric.VARIABLES,
            *fabrics.COMMON,
        }
        self._known = {*contract.CONTRACT, *contract.SWITCHES, *roles}
        self._plain_cache: dict[int, tuple[Any, Any, bool]] = {}
        self._configs: dict[str, tuple[Any, Any]] = {}
        inventory_dir = task_vars.get("inventory_dir")
        self.inventory_dir = Path(str(inventory_dir)) if inventory_dir else None
        groups = self.plain(task_vars.get("groups", {}))
        self.groups = {name: members for name, members in groups.items() if name not in ("all", "ungrouped")}
        hostvars = task_vars["hostvars"]
        manager = getattr(hostvars, "_variable_manager", None)
        self.extra = sorted(map(str, getattr(manager, "extra_vars", None) or {}))
        for host in groups.get("all", ()):
            raw = hostvars.raw_get(host)
            volatile = set(_set_during_run(manager, host)) - set(self.extra)
            self.names[host] = [str(name) for name in raw if name not in volatile]
            self.values[host] = dict(self._values(host, raw, hostvars))
            self.facts[host] = cluster.facts_view(
                self.plain(raw.get("ansible_facts", {}).get(_HOST_FACTS)), str(raw.get("inventory_dir") or "")
            )
            self.facts[host].login = self._login(raw, hostvars)

    def _values(self, host: str, raw: Mapping[str, Any], hostvars: Any) -> Iterator[tuple[str, Any]]:
        for name in self.names[host]:
            value = raw[name]
            if name not in self._known:
                # Shown in the message about an unknown variable, and no further.
                if not self._validate.is_foreign(name):
                    yield name, self._cached(value)[0]
                continue
            plain, templated = self._cached(value)
            if not templated:
                yield name, plain
                continue
            if name not in self._needed:
                # Roles check their own variables again when they run; what needs templating is left to them.
                continue
            try:
                templar = self._templar.copy_with_new_env(available_variables={**raw, "hostvars": hostvars})
                yield name, self.plain(templar.template(value))
            except AnsibleError as error:
                self.problems.append(
                    self._validate.Problem(
                        host,
                        name,
                        self._validate.show(plain, name),
                        f"can't be evaluated: {error.message}",
                        "use only variables of the inventory in it; facts and role defaults are not known yet",
                    )
                )

    def _login(self, raw: Mapping[str, Any], hostvars: Any) -> str:
        """Whom Ansible logs in to a host as by SSH; nobody where the inventory does not say it."""
        try:
            templar = self._templar.copy_with_new_env(available_variables={**raw, "hostvars": hostvars})
            connection, *users = (
                str(self.plain(templar.template(raw[name]))) if raw.get(name) else ""
                for name in ("ansible_connection", "ansible_user", "ansible_ssh_user")
            )
        except AnsibleError:
            return ""
        # What the names mean together is the connection's business.
        named = {user for user in users if user} or {str(context.CLIARGS.get("remote_user") or "")}
        by_ssh = connection.rpartition(".")[2] in ("", "ssh", "smart")
        return named.pop() if by_ssh and len(named) == 1 else ""

    def _cached(self, value: Any) -> tuple[Any, bool]:
        """A plain copy, and whether it holds a template. Hosts of one group share an object; they share its copy."""
        if id(value) not in self._plain_cache:
            # The original is kept, so that its id stays taken.
            self._plain_cache[id(value)] = (value, self.plain(value), _has_template(value))
        return self._plain_cache[id(value)][1:]

    def load_config(self, variable: str, model: Mapping[str, Any]) -> tuple[Any, Any]:
        """The model's config.json, read once."""
        if variable not in self._configs:
            self._configs[variable] = self._model_files.find_config(variable, model, self.inventory_dir)
        return self._configs[variable]

    @staticmethod
    def _instances(values: Mapping[str, Any]) -> dict[str, Any]:
        instances = values.get("vllm_instances")
        return instances if isinstance(instances, dict) else {}

    def inputs(self) -> list[Any]:
        """Everything that the plan depends on."""
        configs: dict[str, Any] = {}
        # What many hosts share is written once.
        shared: dict[int, int] = {}
        written: list[Any] = []
        hosts: dict[str, dict[str, int]] = {}
        for host, values in self.values.items():
            hosts[host] = {}
            for name, value in sorted(values.items()):
                if id(value) not in shared:
                    shared[id(value)] = len(written)
                    written.append(value)
                hosts[host][name] = shared[id(value)]
        for instances in {id(item): item for item in map(self._instances, self.values.values())}.values():
            for name, spec in instances.items():
                model = spec.get("model") if isinstance(spec, dict) else None
                variable = f"vllm_instances.{name}.model"
                if isinstance(model, dict) and variable not in configs:
                    configs[variable] = self.load_config(variable, model)[0]
                place = self._model_files.draft_place(spec) if isinstance(spec, dict) else None
                if place is not None:
                    variable = f"vllm_instances.{name}.speculative"
                    configs[variable] = self.load_config(variable, place)[0]
        facts = {host: vars(view) for host, view in self.facts.items()}
        problems = [vars(problem) for problem in self.problems]
        return [hosts, written, self.names, self.groups, facts, configs, self.extra, problems]


def _check_controller() -> None:
    # Imports nothing else of the collection: an old Python must be able to read what refuses it.
    from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import validate  # noqa: PLC0415 - an old Python can't read it

    problems = validate.check_controller(core_version, sys.version_info[:2])
    if problems:
        raise AnsibleActionFail(validate.render(problems))


def _set_during_run(manager: Any, host: str) -> Iterator[str]:
    """Names that plays set (set_fact, register, include_vars): they are nobody's inventory."""
    for cache in ("_nonpersistent_fact_cache", "_vars_cache"):
        yield from (getattr(manager, cache, None) or {}).get(host, ())


def _has_template(value: Any) -> bool:
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    if isinstance(value, Mapping):
        return any(_has_template(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_template(item) for item in value)
    return False


def _role_options() -> dict[str, Any]:
    """The options of every role of this collection, with their limits."""
    from ansible_collections.ironrack.vllm.plugins.plugin_utils.inventory import limits  # noqa: PLC0415 - an old Python can't read it

    options: dict[str, Any] = {}
    for path in sorted(COLLECTION.glob("roles/*/defaults/main.yml")):
        # A default without a spec is known all the same.
        options.update({name: {"type": "raw"} for name in _read(path)})
    for path in sorted(COLLECTION.glob("roles/*/meta/argument_specs.yml")):
        for entry_point in (_read(path).get("argument_specs") or {}).values():
            options.update(entry_point.get("options") or {})
    return limits.limited(options)


def _read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text("utf-8"), Loader=_Loader) or {}  # noqa: S506  # a safe loader


def _code_digest() -> list[list[Any]]:
    """A plan in a fact cache must not outlive the code that made it."""
    files = [*COLLECTION.glob("plugins/plugin_utils/*/*.py"), *COLLECTION.glob("plugins/plugin_utils/*/data/*.json")]
    return sorted([str(path.relative_to(COLLECTION)), path.stat().st_mtime_ns, path.stat().st_size] for path in files)
