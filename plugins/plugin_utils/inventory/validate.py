"""Checks inventory variables against the contract and the roles' argument specs; collects every problem."""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..plain import VAULTED
from .contract import CONTRACT, FOREIGN_PREFIXES, MAGIC, OWNED_ENVIRONMENT, SWITCHES, Spec

MINIMUM_CORE = (2, 19)
MINIMUM_PYTHON = (3, 11)
# Pythons whose conda lock ships with the role python_env.
CONDA_PYTHONS = ("3.12",)

_SECRET = re.compile(r"(token|password|passwd|secret|credential|private|api[_-]?key)", re.IGNORECASE)
# Counts of a model's tokens, what makes them, and the file that a secret is in.
_NO_SECRET = re.compile(
    r"(num|max|spec|speculative)[_-]([a-z]+[_-])*tokens(?![a-z])|token[_-]threshold|tokeni[sz]er|\w+_file$",
    re.IGNORECASE,
)
# Bridges and links that belong to containers and virtual machines; no other node is behind them.
_CONTAINER_INTERFACE = re.compile(
    r"^(lo$|docker|br-|veth|virbr|cni|flannel|cali|podman|lxc|lxd|kube|tun|tap|dummy|weave|nodelocaldns)"
)
_INSTANCE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
# Other characters than these no tool gives to an interface, and in rules of a firewall they would mean something.
_INTERFACE_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,15}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
# Names that every system gives to itself, or to groups of addresses.
_RESERVED_NAME = re.compile(r"(localhost[46]?|broadcasthost|ip6-[a-z0-9-]+)(\..*)?", re.IGNORECASE)
_ENVIRONMENT_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_ANY = r"(?s).*"
_SHOWN = 120
# Of a URL, however it is misspelt: a password may hold slashes, spaces and an @.
_LOGIN = re.compile(r"(?<=://)[^\"]*@")
_NOT_SET = object()


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong, where, and what to do about it."""

    host: str
    variable: str
    value: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Checked:
    """What the checks found: problems, and the values with types and defaults put right."""

    problems: list[Problem]
    values: dict[str, dict[str, Any]]


def show(value: Any, variable: str = "", hidden: bool = False) -> str:
    """A value for a message: short, and never a secret."""
    if value is _NOT_SET:
        return "(not set)"
    if hidden or _is_secret(variable):
        return "(hidden)"
    text = value if isinstance(value, str) else json.dumps(_masked(value), default=str, ensure_ascii=False)
    text = _LOGIN.sub("***@", text)
    if isinstance(value, str) and (not value or value != value.strip()):
        text = _LOGIN.sub("***@", repr(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _is_secret(name: str) -> bool:
    return _SECRET.search(_NO_SECRET.sub("", name)) is not None


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: "(hidden)" if _is_secret(str(key)) else _masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    return value


def not_set(host: str, variable: str, problem: str, remedy: str) -> Problem:
    return Problem(host, variable, show(_NOT_SET), problem, remedy)


def render(problems: Iterable[Problem], shown: int = 50) -> str:
    """All problems as one message; the same problem on many hosts is said once."""
    hosts: dict[tuple[str, str, str, str], list[str]] = {}
    for item in problems:
        hosts.setdefault((item.variable, item.value, item.problem, item.remedy), []).append(item.host)
    count = len(hosts)
    lines = [f"{count} problem{'s' if count != 1 else ''} in the inventory; no host was contacted."]
    for number, ((variable, value, problem, remedy), names) in enumerate(hosts.items(), 1):
        if number > shown:
            lines.append(f"... and {count - shown} more")
            break
        where = [name for name in dict.fromkeys(names) if name]
        some = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        lines.append(f"{number}. {variable} = {value}{f' ({some})' if some else ''}: {problem}")
        lines.append(f"   -> {remedy}")
    return "\n".join(lines)


def check_controller(core: str, python: tuple[int, int]) -> list[Problem]:
    """The versions on the controller."""
    problems = []
    found = tuple(int(part) for part in re.findall(r"\d+", core)[:2])
    if found < MINIMUM_CORE:
        problems.append(
            Problem(
                "",
                "ansible-core",
                core,
                f"this version is not supported; {'.'.join(map(str, MINIMUM_CORE))} is the oldest that is",
                "run `make venv` and use .venv/bin/ansible-playbook, or install ansible-core>=2.19",
            )
        )
    if python < MINIMUM_PYTHON:
        problems.append(
            Problem(
                "",
                "python",
                ".".join(map(str, python)),
                f"the controller needs Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer",
                "run `make venv` with a newer Python",
            )
        )
    return problems


def validate(
    hosts: Mapping[str, Mapping[str, Any]],
    roles: Mapping[str, Spec],
    extra: Iterable[str] = (),
    names: Mapping[str, Iterable[str]] | None = None,
) -> Checked:
    """Check every variable of every host.

    `hosts` holds the values of variables that are known; `names` every name that is defined, known or not (left out,
    the keys of `hosts`). `roles` are the options of all roles, `extra` the names that came with -e.
    """
    problems: list[Problem] = []
    known = {**roles, **{name: spec for name, spec in CONTRACT.items() if name not in roles}}
    extra = frozenset(extra)
    memo: dict[tuple[str, int], tuple[Any, list[Problem]]] = {}
    values: dict[str, dict[str, Any]] = {}
    suggestions: dict[str, str] = {}
    for host, variables in hosts.items():
        for name in sorted(names[host] if names is not None else variables):
            if name in known or is_foreign(name):
                continue
            if name in SWITCHES:
                if name not in extra:
                    problems.append(
                        Problem(
                            host,
                            name,
                            show(variables.get(name, "(set)"), name),
                            "is a switch for one run, not a variable of the inventory",
                            f"remove it, and give it when you need it: -e {name}=...",
                        )
                    )
                continue
            if name not in suggestions:
                suggestions[name] = _suggest(name, [*known, *SWITCHES])
            source = "unknown variable, given with -e" if name in extra else "unknown variable"
            problems.append(
                Problem(
                    "" if name in extra else host,
                    name,
                    show(variables.get(name, "(set)"), name),
                    source,
                    suggestions[name] or "remove it, or begin its name with site_ if it is a helper of your own",
                )
            )
        checked: dict[str, Any] = {}
        for name, value in variables.items():
            if name not in known:
                continue
            # Hosts of one group share the very same object: check it once.
            memo_key = (name, id(value))
            if memo_key not in memo:
                memo[memo_key] = check_value(value, known[name], name, contract=name in CONTRACT)
            coerced, found = memo[memo_key]
            # Told already: what was declared wrongly must not look like nothing declared.
            checked[name] = [{}] if name == "gpus" and found and not coerced else coerced
            at = "" if CONTRACT.get(name, {}).get("scope") == "cluster" else host
            problems += [Problem(at, item.variable, item.value, item.problem, item.remedy) for item in found]
            if name == "cluster_address":
                problems += _check_address(host, coerced)
            elif name == "cluster_interface":
                problems += _check_interface(host, coerced)
        values[host] = checked
    problems += _duplicate_addresses(values)
    problems += _without_lock(values, names or {})
    problems += _without_conda_lock(values, names or {})
    problems += _two_tokens(values)
    problems += _without_keys(values, names or {})
    problems += _unknown_builder(values)
    return Checked(list(dict.fromkeys(problems)), values)


def _without_lock(values: Mapping[str, Mapping[str, Any]], names: Mapping[str, Iterable[str]]) -> Iterator[Problem]:
    """The runtime for CUDA 12.9, which has no lock in this release. A template of the lock's path counts as given."""
    for host, variables in values.items():
        if variables.get("python_env_variant") != "cu129" or variables.get("python_env_lock"):
            continue
        if "python_env_lock" in variables or "python_env_lock" not in names.get(host, ()):
            yield not_set(
                host,
                "python_env_lock",
                "python_env_variant is cu129, for which no lock ships",
                "give the lock file of a runtime that you made for it, or set python_env_variant to cu130",
            )


def _without_conda_lock(
    values: Mapping[str, Mapping[str, Any]], names: Mapping[str, Iterable[str]]
) -> Iterator[Problem]:
    """A Python for which no conda lock ships. Templates of the method and of the lock's path count as right."""
    for host, variables in values.items():
        python = str(variables.get("python_env_python") or "")
        if not python or ".".join(python.split(".")[:2]) in CONDA_PYTHONS or variables.get("python_env_conda_lock"):
            continue
        templates = {"python_env_method", "python_env_conda_lock"} & set(names.get(host, ())) - set(variables)
        if variables.get("python_env_method", "conda") == "conda" and not templates:
            yield Problem(
                host,
                "python_env_python",
                show(python),
                "no conda lock ships for it, and python_env_conda_lock is empty",
                f"set it to {' or '.join(CONDA_PYTHONS)} (in quotes), give a lock of your own in "
                "python_env_conda_lock, or set python_env_method to venv",
            )


def _two_tokens(values: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """The hub's token, given in both ways."""
    for host, variables in values.items():
        if variables.get("model_store_token") and variables.get("model_store_token_file"):
            yield Problem(
                host,
                "model_store_token_file",
                show(variables["model_store_token_file"], "model_store_token_file"),
                "model_store_token is set too, and only one of them can count",
                "leave one of the two out",
            )


def _without_keys(values: Mapping[str, Mapping[str, Any]], names: Mapping[str, Iterable[str]]) -> Iterator[Problem]:
    """All keys of the user of Ansible removed, and none put there. A template of the list counts as given."""
    for host, variables in values.items():
        if not variables.get("ssh_authorized_keys_exclusive") or variables.get("ssh_authorized_keys"):
            continue
        if "ssh_authorized_keys" in variables or "ssh_authorized_keys" not in names.get(host, ()):
            yield Problem(
                host,
                "ssh_authorized_keys_exclusive",
                "true",
                "every other key goes, and ssh_authorized_keys lists none: nobody could log in",
                "list the keys that may log in, or leave it out",
            )


_NO_BUILDER = {
    "model_store_builder": "name a node that gets the runtime, or leave it out",
    "python_env_builder": "name a host of the inventory, or leave it out; the controller is one when it stands there "
    "with ansible_connection: local and cluster_address, the IP address at which the nodes reach it",
}


def _unknown_builder(values: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """A node that is to fetch for the others, and is none."""
    for host, variables in values.items():
        for name in ("model_store_builder", "python_env_builder"):
            builder = variables.get(name)
            if builder and builder not in values:
                yield Problem(
                    host,
                    name,
                    show(builder),
                    "is no host of the inventory",
                    _suggest(builder, values) or _NO_BUILDER[name],
                )


def is_foreign(name: str) -> bool:
    """Whether a name is none of this project's business."""
    return name in MAGIC or name.startswith(FOREIGN_PREFIXES)


def check_host_names(hosts: Iterable[str]) -> Iterator[Problem]:
    """Whether the inventory's names of hosts can stand in /etc/hosts and known_hosts, where the nodes look them up."""
    seen: dict[str, str] = {}
    for host in dict.fromkeys(hosts):
        problem = ""
        first = seen.setdefault(host.casefold(), host)
        if first != host:
            problem = f"differs from {first} only in case, and names of hosts are looked up without regard to it"
        elif _RESERVED_NAME.fullmatch(host):
            problem = "is a name by which every system means itself"
        elif not _HOST_NAME.fullmatch(host) and not _is_address(host):
            problem = "can't be the name of a host: it goes into /etc/hosts and known_hosts of every node"
        if problem:
            yield Problem(
                host,
                "inventory_hostname",
                show(host),
                problem,
                "rename it in the inventory: letters, digits, dots, dashes and underscores, with a letter or digit"
                " first and last (ansible_host may be anything)",
            )


def _is_address(text: str) -> bool:
    try:
        return "%" not in text and bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _suggest(name: str, known: Iterable[str]) -> str:
    lowered = {item.lower(): item for item in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.7)
    return f"did you mean {lowered[close[0]]}?" if close else ""


def check_value(value: Any, spec: Spec, path: str, contract: bool = False) -> tuple[Any, list[Problem]]:
    """Check one value; returns it with the right type and with defaults filled in."""
    found: list[Problem] = []
    coerced = _check(value, spec, path, found, bool(spec.get("no_log")))
    if contract and path == "vllm_instances" and isinstance(coerced, Mapping):
        _check_instance_names(coerced, found)
    return coerced, found


def _check(value: Any, spec: Spec, path: str, found: list[Problem], hidden: bool) -> Any:
    if value is None and not spec.get("required"):
        return spec.get("default")
    alternatives = spec.get("any_of")
    if alternatives:
        return _check_any(value, alternatives, path, found, hidden)
    kind = str(spec.get("type", "str"))
    if isinstance(value, bool) and kind == "str":
        # What YAML makes of a choice such as off when it stands there without quotes.
        words = ("on", "yes", "true") if value else ("off", "no", "false")
        meant = [choice for choice in spec.get("choices") or () if choice in words]
        value = meant[0] if len(meant) == 1 else value
    ok, coerced = _coerce(value, kind)
    if not ok:
        remedy = _as_json(value, kind, path) or _example(spec)
        found.append(Problem("", path, show(value, path, hidden), f"is not {_ARTICLES.get(kind, kind)}", remedy))
        return None
    choices = spec.get("choices")
    if choices and kind not in ("list",) and coerced not in choices:
        hint = _suggest(str(coerced), map(str, choices))
        found.append(
            Problem(
                "",
                path,
                show(value, path, hidden),
                "is not one of the choices",
                (f"{hint} " if hint else "") + spec.get("remedy", f"choose {', '.join(map(str, choices))}"),
            )
        )
        return None
    if isinstance(coerced, int | float) and not isinstance(coerced, bool):
        outside = list(_limits(value, coerced, spec, path, hidden))
        found += outside
        return None if outside else coerced
    if isinstance(coerced, str) and coerced != VAULTED and not re.fullmatch(spec.get("pattern", _ANY), coerced):
        found.append(Problem("", path, show(value, path, hidden), spec["problem"], spec["remedy"]))
        return None
    if isinstance(coerced, Mapping):
        return _check_mapping(coerced, spec, path, found, hidden)
    if isinstance(coerced, list) and spec.get("elements"):
        inner = {**spec, "type": spec["elements"]}
        inner.pop("elements")
        told = len(found)
        items = [_check(item, inner, f"{path}[{index}]", found, hidden) for index, item in enumerate(coerced)]
        # Half a list would be judged as if the rest had been left out.
        return items if len(found) == told else None
    return coerced


def _limits(value: Any, number: float, spec: Spec, path: str, hidden: bool) -> Iterator[Problem]:
    shown = show(value, path, hidden)
    low, high, above = spec.get("minimum"), spec.get("maximum"), spec.get("above")
    if low is not None and number < low:
        yield Problem("", path, shown, f"is less than {low}", f"use {low} or more")
    if above is not None and number <= above:
        yield Problem("", path, shown, f"is not above {above}", f"use more than {above}")
    if high is not None and number > high:
        yield Problem("", path, shown, f"is more than {high}", f"use {high} or less")


def _check_any(value: Any, alternatives: list[Spec], path: str, found: list[Problem], hidden: bool) -> Any:
    attempts = []
    for alternative in alternatives:
        trial: list[Problem] = []
        coerced = _check(value, alternative, path, trial, hidden)
        if not trial:
            return coerced
        right_type = _coerce(value, str(alternative["type"]))[0]
        attempts.append((not right_type, "choices" in alternative, trial))
    # Explain against the alternative whose type the user meant.
    attempts.sort(key=lambda item: item[:2])
    wrong_type, is_choice, trial = attempts[0]
    if wrong_type or (is_choice and len(trial) == 1):
        forms = " or ".join(
            "/".join(map(str, item["choices"])) if "choices" in item else _ARTICLES[str(item["type"])]
            for item in alternatives
        )
        json_remedy = next(filter(None, (_as_json(value, str(item["type"]), path) for item in alternatives)), "")
        found.append(Problem("", path, show(value, path, hidden), f"is not {forms}", json_remedy or f"give {forms}"))
    else:
        found += trial
    return None


def _check_mapping(value: Mapping[Any, Any], spec: Spec, path: str, found: list[Problem], hidden: bool) -> Any:
    options: Spec | None = spec.get("options")
    if "keys" in spec:
        for key in value if "key_pattern" in spec else ():
            if not re.fullmatch(spec["key_pattern"], str(key)):
                problem, remedy = f"is no {spec['keys']}", "correct or remove it"
                found.append(Problem("", f"{path}.{key}", show(value[key], str(key), hidden), problem, remedy))
        inner: Spec = {"type": "dict", "options": options, "required": True} if options else dict(spec["value"])
        return {str(key): _check(item, inner, f"{path}.{key}", found, hidden) for key, item in value.items()}
    if options is None:
        return dict(value)
    aliases = {alias: name for name, option in options.items() for alias in option.get("aliases", ())}
    checked: dict[str, Any] = {}
    for key, item in value.items():
        name = aliases.get(str(key), str(key))
        if name not in options:
            hint = _suggest(str(key), options)
            found.append(
                Problem(
                    "",
                    f"{path}.{key}",
                    show(item, str(key), hidden),
                    "unknown key",
                    hint or f"remove it; known keys: {', '.join(options)}",
                )
            )
            continue
        option = options[name]
        checked[name] = _check(item, option, f"{path}.{key}", found, hidden or bool(option.get("no_log")))
    for name, option in options.items():
        if name in checked:
            continue
        if option.get("required"):
            text = str(option.get("description", ""))
            found.append(not_set("", f"{path}.{name}", "is required", f"set it: {_plain_markup(text)}"))
        elif "default" in option:
            checked[name] = option["default"]
    return checked


def _plain_markup(text: Any) -> str:
    joined = " ".join(text) if isinstance(text, list) else str(text)
    return re.sub(r"[CIBVOU]\(([^()]*)\)", r"\1", joined)


_ARTICLES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "path": "a path",
    "list": "a list",
    "dict": "a dictionary",
}
# What the filter `bool` understands, with which roles read what came as text.
_TRUE = {"yes", "true", "on", "1"}
_FALSE = {"no", "false", "off", "0"}


def _example(spec: Spec) -> str:
    if spec.get("choices"):
        return f"choose {', '.join(map(str, spec['choices']))}"
    if spec.get("default") is not None:
        return f"for example {json.dumps(spec['default'])}"
    text = _plain_markup(spec.get("description", ""))
    return f"give {_ARTICLES.get(str(spec.get('type', 'str')), 'a value')}" + (f": {text}" if text else "")


def _as_json(value: Any, kind: str, path: str) -> str:
    """The remedy for what `-e name='[...]'` makes of a list: a text that looks like one."""
    shape = {"list": "[...]", "dict": "{...}"}.get(kind, "")
    if not shape or not isinstance(value, str) or value.strip()[:1] != shape[0]:
        return ""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    return f"it came as a text: with -e, write -e '{{\"{name}\": {shape}}}'"


def _coerce(value: Any, kind: str) -> tuple[bool, Any]:
    """As Ansible's argument specs convert values, but without turning containers into text."""
    if kind in ("raw", "any", "json", "jsonarg"):
        return True, value
    if kind in ("str", "path"):
        if value is None or isinstance(value, bool | Mapping | list):
            return False, None
        return True, str(value)
    if kind == "bool":
        if isinstance(value, bool):
            return True, value
        text = str(value).lower()
        return text in _TRUE | _FALSE, text in _TRUE
    if kind in ("int", "bits", "bytes"):
        if isinstance(value, bool):
            return False, None
        if isinstance(value, int):
            return True, value
        if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", value):
            return True, int(value)
        return kind != "int" and isinstance(value, str), value
    if kind == "float":
        if isinstance(value, bool):
            return False, None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return False, None
        return math.isfinite(number), number
    if kind == "list":
        return isinstance(value, list | tuple), list(value) if isinstance(value, list | tuple) else None
    if kind == "dict":
        return isinstance(value, Mapping), value
    return True, value


def _check_instance_names(instances: Mapping[Any, Any], found: list[Problem]) -> None:
    seen: dict[str, str] = {}
    for key, instance in instances.items():
        name = str(key)
        if not _INSTANCE_NAME.match(name):
            found.append(
                Problem(
                    "",
                    f"vllm_instances.{name}",
                    name,
                    "can't be the name of an instance: it names a unit and files",
                    "use letters, digits, dot, dash and underscore, beginning with a letter or digit, at most 63",
                )
            )
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            found.append(
                Problem(
                    "",
                    f"vllm_instances.{name}",
                    name,
                    f"duplicate instance name: {other} differs only in case",
                    "rename one of them",
                )
            )
        environment = instance.get("environment") if isinstance(instance, Mapping) else None
        if isinstance(environment, Mapping):
            found += _check_environment(name, environment)


def _check_environment(instance: str, environment: Mapping[Any, Any]) -> Iterator[Problem]:
    for key, value in environment.items():
        name = str(key)
        where = f"vllm_instances.{instance}.environment.{name}"
        if not _ENVIRONMENT_NAME.match(name):
            yield Problem("", where, show(value, name), "is no name of an environment variable", "use A-Z, 0-9 and _")
        elif name in OWNED_ENVIRONMENT:
            yield Problem(
                "", where, show(value, name), "is set by ironrack", f"remove it; use {OWNED_ENVIRONMENT[name]}"
            )
        elif _is_secret(name):
            yield Problem(
                "",
                where,
                "(hidden)",
                "looks like a secret, and this environment is part of the plan, which is shown",
                f"set vllm_secret_environment.{instance}.{name} instead",
            )


def _check_address(host: str, value: Any) -> Iterator[Problem]:
    if value is None:
        return
    remedy = "give the IP address of the node's interface on the cluster network, for example 10.0.0.11"
    try:
        address = ipaddress.ip_address(str(value))
    except ValueError:
        yield Problem(
            host, "cluster_address", show(value), "is not an IP address (names and networks are not taken)", remedy
        )
        return
    mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    kind = (
        "a loopback"
        if address.is_loopback
        else "an IPv4 address inside an IPv6"
        if mapped
        else "a zoned"
        if "%" in str(value) and not address.is_link_local
        else "a broadcast"
        if str(address) == "255.255.255.255"
        else "a reserved"
        if address.version == 4 and (address.is_reserved or (address.packed[0] == 0 and not address.is_unspecified))
        else "a multicast"
        if address.is_multicast
        else "an unspecified"
        if address.is_unspecified
        else "a link-local"
        if address.is_link_local
        else ""
    )
    if kind:
        yield Problem(host, "cluster_address", show(value), f"is {kind} address, which other nodes can't reach", remedy)


def _check_interface(host: str, value: Any) -> Iterator[Problem]:
    if isinstance(value, str) and not _INTERFACE_NAME.fullmatch(value):
        yield Problem(
            host,
            "cluster_interface",
            show(value),
            "is not the name of an interface",
            "give one name of up to 15 letters, digits, dots, dashes and underscores (see `ip -br address`)",
        )
    elif isinstance(value, str) and _CONTAINER_INTERFACE.match(value):
        yield Problem(
            host,
            "cluster_interface",
            value,
            "belongs to containers, virtual machines or the node itself; no other node is behind it",
            "give the interface of the cluster network, for example eth1 or ib0 (see `ip -br address`)",
        )


def _duplicate_addresses(values: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    owners: dict[str, str] = {}
    for host in sorted(values):
        address = values[host].get("cluster_address")
        if not address:
            continue
        try:
            key = str(ipaddress.ip_address(str(address)))
        except ValueError:
            continue
        first = owners.setdefault(key, host)
        if first != host:
            yield Problem(
                host,
                "cluster_address",
                show(address),
                f"duplicate: {first} has the same address",
                "give each node its own cluster_address in host variables, not in group variables",
            )
