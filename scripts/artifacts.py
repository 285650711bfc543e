#!/usr/bin/env python3
"""List all that a deployment of an inventory fetches, or fetch it into one folder for a site without a way out.

    make artifacts INVENTORY=inventories/prod                    the list, as a table and as .cache/artifacts.json
    make artifacts INVENTORY=... DOWNLOAD=/srv/mirror            fetches what the folder lacks, then checks all of it
    make artifacts CHECK=/srv/mirror [INVENTORY=...]             compares the folder with its list, without network

What is fetched is read where the roles read it: the packages from their tasks, templated with the inventory's
variables for a bare node of each distribution; the wheels from the lock; versions and hashes of tools from the roles'
defaults. Packages of Debian, Ubuntu and NVIDIA keep their own signed indexes: nodes verify them as they would online.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import fcntl
import gzip
import hashlib
import http.client
import importlib
import json
import lzma
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg"))
sys.path[:0] = [str(ROOT / "collections"), str(ROOT / "scripts")]

import lock as lock_tool  # noqa: E402
from ansible.errors import AnsibleError  # noqa: E402
from ansible.inventory.manager import InventoryManager  # noqa: E402
from ansible.parsing.dataloader import DataLoader  # noqa: E402
from ansible.plugins.loader import init_plugin_loader  # noqa: E402
from ansible.template import Templar  # noqa: E402
from ansible.utils.display import Display  # noqa: E402
from ansible.vars.hostvars import HostVars  # noqa: E402
from ansible.vars.manager import VariableManager  # noqa: E402

PYPI = "https://pypi.org/simple"
HUB = "https://huggingface.co"
AGENT = {"User-Agent": "ironrack-artifacts"}
CHUNK = 1 << 20
WORKERS = 8
TRIES = 4
# In the folder that is being filled: who fills it.
LOCK = ".ironrack-artifacts.lock"
# By these apt finds the other indexes, with their hashes.
SIGNED = ("InRelease", "Release", "Release.gpg")
# Modules that install packages by themselves, and the name of the list of them.
MODULE_PACKAGES = {"release": "COMMANDS"}
# Wheels that role python_env fetches beside those of the lock, and how its variables call them.
TOOLS = {"uv": "uv", "py-rattler": "rattler"}
# Roles that run on the controller for tests.
NOT_DEPLOYED = {"lab"}
# What tasks would have registered on a bare node.
BARE_STATE = {
    "time_services": [],
    "time_ours": False,
    "may_set_clock": True,
    "hosts_written_by": "",
    "hosts_in_user_data": False,
}
KEYRINGS = {
    "debian": "/usr/share/keyrings/debian-archive-keyring.gpg",
    "ubuntu": "/usr/share/keyrings/ubuntu-archive-keyring.gpg",
}


def code(name: str) -> Any:
    """A module of the collection; found only after Ansible's loader was set up."""
    return importlib.import_module(f"ansible_collections.ironrack.vllm.plugins.{name}")


class Failure(Exception):
    """What the user can act on."""


@dataclass
class Report:
    """What else is to be said: what could not be found out, and what is worth knowing."""

    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


# --- the network --------------------------------------------------------------------------------------------------


# user:password of places in the inventory: no list, table or error may show it.
LOGINS: dict[str, str] = {}


def without_login(url: str) -> str:
    """A URL of the inventory as it may be shown; its login is sent to that server alone."""
    clean, logins = code("plugin_utils.runtime.lock").split_credentials(url)
    LOGINS.update(logins)
    return str(clean)


def login_for(url: str) -> dict[str, str]:
    origin = code("module_utils.redirects").same_origin
    for place, login in LOGINS.items():
        if origin(place, url):
            text = urllib.parse.unquote(login).encode()
            return {"Authorization": f"Basic {base64.b64encode(text).decode()}"}
    return {}


def opened(url: str, start: int = 0, accept: str = "*/*", timeout: float = 60) -> Any:
    redirects = code("module_utils.redirects")
    headers = {**AGENT, "Accept": accept, **login_for(url)} | ({"Range": f"bytes={start}-"} if start else {})
    token = os.environ.get("HF_TOKEN")
    if token and redirects.same_origin(hub(), url):
        headers["Authorization"] = f"Bearer {token}"
    opener = urllib.request.build_opener(redirects.Handler)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)  # noqa: S310


def hub() -> str:
    return os.environ.get("HF_ENDPOINT") or HUB


def get(url: str, accept: str = "*/*", tries: int = TRIES) -> tuple[bytes, str, str]:
    """(content, its type, where it came from). An answer that says no is final; anything else is tried again."""
    for attempt in range(tries):
        try:
            with opened(url, accept=accept) as answer:
                return answer.read(), answer.headers.get("Content-Type") or "", answer.geturl()
        except urllib.error.HTTPError as error:
            if error.code not in (429, 500, 502, 503, 504) or attempt == tries - 1:
                raise
        except OSError:
            if attempt == tries - 1:
                raise
        except http.client.HTTPException as error:
            if attempt == tries - 1:
                raise broken(error) from None
        time.sleep(2**attempt)
    raise AssertionError


def broken(error: Exception) -> ConnectionError:
    """An answer or address that http.client cannot read; its text may hold parts of a login."""
    return ConnectionError(f"the answer broke off, or the address is none ({type(error).__name__})")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


# --- what the roles read ------------------------------------------------------------------------------------------


class Inventory:
    """An inventory with its plan, and what roles make of it on nodes that are bare."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self._loader = DataLoader()
        self._loader.set_basedir(str(source if source.is_dir() else source.parent))
        manager = InventoryManager(loader=self._loader, sources=[str(source)])
        variables = VariableManager(loader=self._loader, inventory=manager)
        self._hostvars = HostVars(inventory=manager, variable_manager=variables, loader=self._loader)
        # The list says where everything comes from, also when the inventory itself names a mirror.
        self._variables = {
            host.name: {**variables.get_vars(host=host), "ironrack_mirror": ""} for host in manager.get_hosts()
        }
        groups = {name: [host.name for host in group.get_hosts()] for name, group in manager.groups.items()}
        self.plan = self._plan(groups)

    def _plan(self, groups: Mapping[str, Any]) -> dict[str, Any]:
        cluster_plan, plugin = code("action.cluster_plan"), "plugin_utils.inventory"
        cluster, validate = code(f"{plugin}.cluster"), code(f"{plugin}.validate")
        folder = self.source if self.source.is_dir() else self.source.parent
        variables = {"groups": groups, "hostvars": self._hostvars, "inventory_dir": str(folder)}
        templar = Templar(loader=self._loader, variables=variables)
        collected = cluster_plan.Collected(variables, templar, cluster_plan._role_options())
        checked = validate.validate(collected.values, collected.roles, collected.extra, collected.names)
        plan, found = cluster.build(
            checked.values, collected.groups, collected.load_config, collected.facts, require_addresses=False
        )
        problems = [*collected.problems, *checked.problems, *found]
        if problems:
            raise Failure(validate.render(problems))
        self.values = checked.values
        for node in plan["nodes"].values():
            node["nvidia"] = {**node["nvidia"], "ironrack_mirror": ""}
        return dict(plan)

    def hosts(self, group: str = "ironrack_runtime") -> list[str]:
        return [host for host, node in self.plan["nodes"].items() if group in node.get("groups", ())]

    def template(self, host: str, role: str, value: Any, facts: Mapping[str, Any] | None = None) -> Any:
        """A value as a task of this role would see it on this host."""
        variables: dict[str, Any] = {}
        for layer in (
            self.yaml(role, "defaults/main.yml"),
            self._variables[host],
            self.yaml(role, "vars/main.yml"),
            {
                "ironrack_plan": self.plan,
                "hostvars": self._hostvars,
                "role_path": str(ROOT / "roles" / role),
                "ansible_facts": {"ironrack_host": facts or {}},
                "ansible_check_mode": False,
                "__base_found": {"state": BARE_STATE},
            },
        ):
            variables |= layer
        answer = Templar(loader=self._loader, variables=variables).template(value)
        return code("plugin_utils.plain").to_plain(answer)

    def variable(self, host: str, role: str, name: str) -> Any:
        for path in ("vars/main.yml", "defaults/main.yml"):
            given = self.yaml(role, path)
            if name in given:
                own = self._variables[host].get(name) if path.startswith("defaults") else None
                return self.template(host, role, given[name] if own is None else own)
        raise Failure(f"role {role} has no variable {name}")

    def yaml(self, role: str, path: str) -> Any:
        file = ROOT / "roles" / role / path
        return (self._loader.load_from_file(str(file), trusted_as_template=True) if file.exists() else None) or {}


def package_tasks(inventory: Inventory) -> Iterator[tuple[str, Any]]:
    """(role, packages) of every task of every role that installs some."""
    for role in sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir()):
        for file in sorted((ROOT / "roles" / role / "tasks").glob("*.yml")) if role not in NOT_DEPLOYED else ():
            for task in flat(inventory.yaml(role, f"tasks/{file.name}") or []):
                apt = task.get("ansible.builtin.apt") or {}
                if asked := apt.get("name") or apt.get("pkg"):
                    yield role, asked
                if asked := (task.get("ironrack.vllm.apt_transaction") or {}).get("install"):
                    yield role, asked


def flat(tasks: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        yield task
        for part in ("block", "rescue", "always"):
            yield from flat(task.get(part) or ())


def packages_of_modules() -> list[dict[str, str]]:
    return [
        {"name": name}
        for module, names in MODULE_PACKAGES.items()
        for name in getattr(code(f"modules.{module}"), names)
    ]


def wanted_packages(inventory: Inventory, hosts: Sequence[str], facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """All that roles and modules install on bare nodes with these facts: names, with a version where one is set."""
    found = {name: {"name": name} for name in code("plugin_utils.runtime.artifacts").ANSIBLE_NEEDS}
    found |= {entry["name"]: entry for entry in packages_of_modules()}
    tasks = list(package_tasks(inventory))
    for host in hosts:
        for role, asked in tasks:
            try:
                answer = inventory.template(host, role, asked, facts)
            except AnsibleError as error:
                raise Failure(f"{host}: what role {role} installs cannot be told: {error}") from error
            for entry in [answer] if isinstance(answer, str | Mapping) else answer:
                row = (
                    {"name": entry}
                    if isinstance(entry, str)
                    else {key: entry.get(key) or "" for key in ("name", "version")}
                )
                found[f"{row['name']} {row.get('version', '')}"] = row
    return list(found.values())


# --- apt ----------------------------------------------------------------------------------------------------------


class Repositories:
    """The repositories of one distribution: read, verified where the keyring is here, and kept as they were signed."""

    def __init__(self, distribution: Any, report: Report) -> None:
        self.distribution = distribution
        self.debian = code("plugin_utils.runtime.debian")
        self.artifacts = code("plugin_utils.runtime.artifacts")
        self.archive = self.debian.Archive()
        self.indexes: dict[str, bytes] = {}
        self.index_artifacts: list[Any] = []
        self.report = report
        self._known: set[tuple[str, ...]] = set()
        # Whether the driver's repositories were asked for in vain.
        self.broken = False
        self.label = f"{distribution.id} {distribution.version}"

    def add(
        self,
        base: str,
        suite: str,
        components: Sequence[str],
        keyring: Path | None,
        key: Mapping[str, str] | None = None,
    ) -> None:
        """Read one suite; `components` is empty for a flat repository."""
        base = base.rstrip("/")
        if (base, suite, *components) in self._known:
            return
        self._known.add((base, suite, *components))
        root = base if not components else f"{base}/dists/{suite}"
        text, name = self._release(root)
        self._verify(text, root, keyring if keyring else self._key(key))
        record, files = self.debian.read_release(text[0].decode("utf-8", "replace"))
        folder = self.artifacts.archive_folder(base) + root[len(base) :]
        for release_name, content in zip(name, text, strict=True):
            self._keep(f"{root}/{release_name}", f"{folder}/{release_name}", content)
        for component in components or ("",):
            stem = f"{component}/binary-amd64/Packages" if component else "Packages"
            place = next((stem + ending for ending in (".xz", ".gz", "") if stem + ending in files), None)
            if place is None:
                raise Failure(f"{root} has no index of packages for amd64 ({stem})")
            data = fetched(f"{root}/{place}")
            if (hashlib.sha256(data).hexdigest(), len(data)) != files[place]:
                raise Failure(
                    f"{root}/{place} is not the file that its Release names: run again, or choose another mirror"
                )
            self._keep(f"{root}/{place}", f"{folder}/{place}", data)
            opener = {".xz": lzma.decompress, ".gz": gzip.decompress}.get(Path(place).suffix, bytes)
            origin = record.get("Origin", "") or self.distribution.id
            if not components and "nvidia" in base:
                origin = "NVIDIA"
            self.archive.add(
                self.debian.read_packages(opener(data).decode("utf-8", "replace"), base, component, origin)
            )

    def _release(self, root: str) -> tuple[list[bytes], list[str]]:
        try:
            return [fetched(f"{root}/InRelease")], ["InRelease"]
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        return [fetched(f"{root}/Release"), fetched(f"{root}/Release.gpg")], ["Release", "Release.gpg"]

    def _key(self, key: Mapping[str, str] | None) -> Path | None:
        """The key of a repository that is not the distribution's, held against its fingerprint."""
        if not key:
            return None
        data = fetched(key["url"])
        keyring = code("modules.apt_keyring")
        try:
            packets = keyring.check(data, {"fingerprint": key.get("fingerprint"), "sha256": key.get("sha256")})
        except keyring.KeyProblem as problem:
            raise Failure(f"{key['url']}: {problem}") from problem
        folder = self.artifacts.archive_folder(key["url"].rsplit("/", 1)[0])
        self._keep(key["url"], f"{folder}/{key['url'].rsplit('/', 1)[1]}", data)
        file = Path(tempfile.mkdtemp(prefix="ironrack-key-")) / "key.gpg"
        file.write_bytes(packets)
        return file

    def _verify(self, texts: Sequence[bytes], root: str, keyring: Path | None) -> None:
        if keyring is None or not keyring.exists() or shutil.which("gpgv") is None:
            self.report.remarks.append(
                f"{root}: its signature was not verified here, since {keyring or 'its keyring'} or gpgv is missing; "
                "the nodes verify it"
            )
            return
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, str(number)) for number in range(len(texts))]
            for file, text in zip(files, texts, strict=True):
                file.write_bytes(text)
            done = subprocess.run(
                ["gpgv", "--quiet", "--keyring", str(keyring), *map(str, reversed(files))],
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            raise Failure(f"{root}: the signature of its index is wrong (gpgv with {keyring}):\n{done.stderr.strip()}")

    def _keep(self, url: str, file: str, data: bytes) -> None:
        self.indexes[file] = data
        digest = hashlib.sha256(data).hexdigest()
        name = f"{self.label} index"
        self.index_artifacts.append(
            self.artifacts.Artifact("apt-index", name, "", url, file, len(data), digest, "none", self.label)
        )


_fetched: dict[str, bytes] = {}
_fetched_guard = threading.Lock()


def fetched(url: str) -> bytes:
    """Content of an index, once a run."""
    with _fetched_guard:
        if url in _fetched:
            return _fetched[url]
    try:
        data = get(url)[0]
    except urllib.error.HTTPError:
        raise
    except OSError as error:
        raise Failure(f"{url} cannot be reached: {error}") from error
    with _fetched_guard:
        _fetched[url] = data
    return data


def newest_kernel(archive: Any, distribution: Any) -> str:
    """The kernel that a freshly installed node boots, as its headers' meta-package names it."""
    package = archive.candidate("linux-headers-generic" if distribution.family == "ubuntu" else "linux-headers-amd64")
    found = re.search(r"linux-headers-(\d\S*?)(?=[\s,(]|$)", package.needs if package else "")
    return found[1] if found else ""


def bare_facts(distribution: Any, kernels: Sequence[str]) -> dict[str, Any]:
    """What host_facts would tell of a node on which nothing is installed yet; its GPUs are those declared."""
    return {
        "distribution": {"id": distribution.id, "version": distribution.version, "codename": distribution.codename},
        "kernel": {"release": kernels[0] if kernels else "", "architecture": "x86_64"},
        "kernels": [{"release": release} for release in kernels],
        "packages": [],
        "nvidia_functions": [],
        "nvidia_driver": {},
        "rdma": [],
    }


def apt_of(
    inventory: Inventory, distribution: Any, kernels: Sequence[str], report: Report
) -> tuple[list[Any], dict[str, bytes]]:
    """Packages that bare nodes of a distribution fetch, with indexes."""
    artifacts = code("plugin_utils.runtime.artifacts")
    repositories = Repositories(distribution, report)
    keyring = Path(KEYRINGS[distribution.family])
    for base, suites, components in artifacts.ARCHIVES[distribution.family]:
        for suite in suites:
            repositories.add(base, suite.format(code=distribution.codename), components, keyring)
    newest = newest_kernel(repositories.archive, distribution)
    facts = bare_facts(distribution, list(kernels) or [newest])
    driver = [host for host in inventory.hosts("ironrack_gpu") if add_driver(repositories, inventory, host, facts)]
    if driver and not kernels:
        report.remarks.append(f"{repositories.label}: kernel headers are those of {newest} (others: --kernel RELEASE)")
    wanted = wanted_packages(inventory, inventory.hosts(), facts if driver else {})
    try:
        found = repositories.archive.closure(wanted)
    except repositories.debian.RepositoryError as error:
        raise Failure(
            f"{repositories.label}: no repository has {error}. Correct the variable that names it, or its repository"
        ) from error
    listed = artifacts.apt_artifacts(found.values(), repositories.label)
    return listed + repositories.index_artifacts, repositories.indexes


def add_driver(repositories: Repositories, inventory: Inventory, host: str, facts: Mapping[str, Any]) -> bool:
    """Read the repositories of a host's driver, as its role chooses them; False where they cannot be had."""
    if repositories.broken:
        return False
    template = inventory.yaml("nvidia_driver", "vars/main.yml")["__nvidia_driver_stack"]
    stack = inventory.template(host, "nvidia_driver", template, facts)
    if stack["problems"]:
        texts = "; ".join(problem["text"] for problem in stack["problems"])
        repositories.report.remarks.append(
            f"{host} could not run {repositories.label}, its driver is left out: {texts}"
        )
        return False
    repositories.archive.pins = repositories.archive.pins or stack["pins"]
    for row in stack["repositories"]:
        keys = {"url": row["key_url"], "fingerprint": row["key_fingerprint"], "sha256": row["key_sha256"]}
        keyring = None if row["key_url"] else Path(row["signed_by"])
        for base, suite in ((base, suite) for base in row["uris"] for suite in row["suites"]):
            try:
                repositories.add(base, suite, row["components"], keyring, keys if row["key_url"] else None)
            except (Failure, OSError) as failure:
                asked = stack["transaction"]["install"] + stack["cuda_transaction"]["install"]
                # Headers are the distribution's own.
                names = ", ".join(entry["name"] for entry in asked if not entry["name"].startswith("linux-headers"))
                repositories.report.missing.append(
                    f"{repositories.label}: the packages of {base} ({names} and what they need): {failure}"
                )
                repositories.archive.pins = ()
                repositories.broken = True
                return False
    return bool(stack["needed"])


# --- wheels and tools ---------------------------------------------------------------------------------------------


def project_page(name: str, indexes: Sequence[str], failed: dict[str, str]) -> list[dict[str, Any]]:
    """What the indexes list of a package; `failed` gets the last error of each, for what is then found nowhere."""
    artifacts = code("plugin_utils.runtime.artifacts")
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    found: list[dict[str, Any]] = []
    for index in indexes:
        try:
            data, kind, where = get(f"{index.rstrip('/')}/{name}/", accept)
        except urllib.error.HTTPError as error:
            if error.code != 404:  # it has no such package, which another index may have
                failed[index] = str(error)
            continue
        except OSError as error:
            local = index.startswith("file://") and Path(urllib.parse.urlsplit(index).path, name, "index.html")
            if not local:
                failed[index] = str(error)
            if not local or not local.exists():
                continue
            data, kind, where = local.read_bytes(), "text/html", local.as_uri()
        try:
            found += artifacts.index_page(data.decode("utf-8", "replace"), kind, where)
        except ValueError as error:
            failed[index] = f"its page of {name} is no JSON ({error})"
    return found


def linked(places: Sequence[str]) -> list[dict[str, Any]]:
    """Wheels of folders and pages that stand beside the index."""
    artifacts = code("plugin_utils.runtime.artifacts")
    found: list[dict[str, Any]] = []
    for place in places:
        folder = Path(place.removeprefix("file://"))
        if "://" in place and not place.startswith("file://"):
            data, kind, where = get(place)
            found += artifacts.index_page(data.decode("utf-8", "replace"), kind, where)
        elif folder.is_dir():
            found += [
                {"url": file.as_uri(), "filename": file.name, "sha256": sha256_of(file), "size": file.stat().st_size}
                for file in sorted(folder.glob("*.whl"))
            ]
    return found


def licence_of(name: str, version: str, url: str) -> str:
    """From the metadata of the index; the wheel itself tells more once it is here."""
    artifacts = code("plugin_utils.runtime.artifacts")
    for place in (
        f"https://pypi.org/pypi/{name}/{version}/json",
        f"{url}.metadata",
        f"https://pypi.org/pypi/{name}/json",
    ):
        try:
            text = get(place, tries=2)[0].decode("utf-8", "replace") if place.startswith("https://") else ""
            info = {} if place.endswith(".metadata") else json.loads(text or "{}").get("info") or {}
        except (OSError, ValueError):  # not there, or a page of something in between
            continue
        if place.endswith(".metadata"):
            said = artifacts.wheel_licence(text)
        else:
            said = artifacts.wheel_licence(
                "".join(
                    f"{key}: {value}\n"
                    for key, value in (
                        ("License-Expression", info.get("license_expression")),
                        ("License", info.get("license")),
                    )
                    if value
                )
                + "".join(f"Classifier: {line}\n" for line in info.get("classifiers") or ())
            )
        if said != artifacts.UNKNOWN:
            return str(said)
    return str(artifacts.UNKNOWN)


def places_of(inventory: Inventory, arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Indexes, and places beside them: those of the command line and those of the inventory that this machine reads."""
    indexes, places = list(arguments.index_url), [*arguments.find_links, *lock_tool.pip_find_links()]
    for host in inventory.hosts():
        for name in ("python_env_index_url", "python_env_extra_index_urls", "python_env_find_links"):
            try:
                given = inventory.variable(host, "python_env", name)
            except AnsibleError:
                continue  # in the lab's inventories, as long as the lab is not up
            (places if name.endswith("links") else indexes).extend([given] if isinstance(given, str) else given)
    indexes, places = ([without_login(place) for place in each if place] for each in (indexes, places))
    return list(dict.fromkeys(indexes)) or [PYPI], list(dict.fromkeys(places))


def wheels_of(inventory: Inventory, arguments: argparse.Namespace) -> list[Any]:
    """The wheels of every lock that nodes of the inventory use, and those of the tools that install them."""
    artifacts, lock = code("plugin_utils.runtime.artifacts"), code("plugin_utils.runtime.lock")
    indexes, places = places_of(inventory, arguments)
    files = {str(inventory.variable(host, "python_env", "__python_env_lock")) for host in inventory.hosts()}
    beside = linked(places)
    found = []
    failed: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for file in sorted(files):
            read = lock.parse_lock(Path(file).read_text(), Path(file).name)
            names = sorted(read.packages)
            pages = dict(zip(names, pool.map(lambda name: project_page(name, indexes, failed), names), strict=True))
            pages = {name: [*page, *beside] for name, page in pages.items()}
            found += artifacts.choose_wheels(read, pages, Path(file).name, failed)
        for name, version, sha256 in sorted(tools_of(inventory)):
            page = [*project_page(name, indexes, failed), *beside]
            only = lock.Lock({name: version}, {name: (sha256,)}, 0)
            found += artifacts.choose_wheels(only, {name: page}, f"{TOOLS[name]}_sha256 of python_env", failed)
        if not arguments.no_licences:
            said = pool.map(lambda item: licence_of(item.name, item.version, item.url), found)
            found = [replace(item, licence=licence) for item, licence in zip(found, said, strict=True)]
        sizes = pool.map(lambda item: item.size or size_of(item.url), found)
        return [replace(item, size=size) for item, size in zip(found, sizes, strict=True)]


def tools_of(inventory: Inventory) -> set[tuple[str, str, str]]:
    """Name, version and hash of the tools that come as wheels."""
    found = set()
    for host in inventory.hosts():
        value = {
            name: str(inventory.variable(host, "python_env", f"python_env_{name}"))
            for name in (
                "method",
                "conda_client",
                *(f"{tool}_{end}" for tool in TOOLS.values() for end in ("version", "sha256")),
            )
        }
        for name, tool in TOOLS.items():
            if tool == "uv" or (value["method"], value["conda_client"]) == ("conda", tool):
                found.add((name, value[f"{tool}_version"], value[f"{tool}_sha256"]))
    return found


def conda_of(inventory: Inventory) -> list[Any]:
    """The packages of conda locks, and the installer where the conda command itself is wanted."""
    artifacts, conda = code("plugin_utils.runtime.artifacts"), code("plugin_utils.runtime.conda")
    found = []
    for host in inventory.hosts():

        def of(name: str, host: str = host) -> str:
            return str(inventory.variable(host, "python_env", name))

        if of("python_env_method") != "conda":
            continue
        file = Path(of("__python_env_conda_lock"))
        if not file.is_file():
            raise Failure(
                f"there is no conda lock {file} (python_env_conda_lock); for the lab's, bring the lab up first"
            )
        lock = conda.parse_explicit(file.read_text(), file.name)
        found += artifacts.conda_artifacts(lock.packages, without_login(of("python_env_conda_mirror")), file.name)
        if of("python_env_conda_client") == "miniforge":
            url, sha256 = without_login(of("python_env_miniforge_url")), of("python_env_miniforge_sha256")
            release = re.search(r"/download/([^/]+)/", url)
            found.append(
                artifacts.Artifact(
                    kind="tool",
                    name="miniforge",
                    version=release[1] if release else "",
                    url=url,
                    file=artifacts.MINIFORGE,
                    size=size_of(url),
                    sha256=sha256,
                    licence="BSD-3-Clause",
                    wanted_by="python_env_conda_client",
                )
            )
    return found


def size_of(url: str) -> int:
    if url.startswith("file://"):
        return Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).stat().st_size
    try:
        headers = {**AGENT, **login_for(url)}
        request = urllib.request.Request(url, headers=headers, method="HEAD")  # noqa: S310
        opener = urllib.request.build_opener(code("module_utils.redirects").Handler)
        with opener.open(request, timeout=30) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except OSError:
        return 0


# --- models -------------------------------------------------------------------------------------------------------


def models_of(inventory: Inventory, report: Report) -> list[Any]:
    artifacts = code("plugin_utils.runtime.artifacts")
    wanted = set()
    for values in inventory.values.values():
        for name, spec in (values.get("vllm_instances") or {}).items():
            model = spec.get("model") or {}
            if model.get("path"):
                report.remarks.append(f"{name}: {model['path']} is yours (model.path): bring it to the nodes yourself")
            elif model.get("repo"):
                wanted.add((str(model["repo"]), str(model.get("revision") or "main")))
    found = []
    files = code("module_utils.models")
    for repo, revision in sorted(wanted):
        told = None
        try:
            told = json.loads(get(f"{hub()}/api/models/{repo}/revision/{revision}?blobs=true", tries=2)[0])
        except urllib.error.HTTPError as error:
            hint = f": accept its licence at {hub()}/{repo} and set HF_TOKEN" if error.code in (401, 403) else ""
            report.missing.append(f"model {repo}, revision {revision}: the hub answers {error.code}{hint}")
        except (OSError, ValueError) as error:
            report.missing.append(f"model {repo}, revision {revision}: {hub()} was not reached ({error})")
        if told is not None:
            # What an engine reads, as the nodes choose it.
            names = set(files.wanted([str(item["rfilename"]) for item in told.get("siblings") or []]))
            told["siblings"] = [item for item in told.get("siblings") or [] if item["rfilename"] in names]
        found += artifacts.model_artifacts(repo, revision, told, hub())
    return found


# --- the folder ---------------------------------------------------------------------------------------------------


class Folder:
    """The mirror: fetched in parallel, resumable, each file verified before it has its name."""

    def __init__(self, path: Path, caches: Sequence[Path]) -> None:
        self.path = path
        self.caches = caches
        self.artifacts = code("plugin_utils.runtime.artifacts")
        self._done = 0
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """One run at a time: two would write to the same .part files."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / LOCK
        with lock.open("a+", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                raise Failure(
                    f"{self.path} (DOWNLOAD) is being filled by {handle.read().strip() or 'another run'}, which "
                    f"holds {lock}. Wait until it has ended, or name another folder"
                ) from None
            handle.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            handle.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            handle.flush()
            yield

    def whole(self, item: Any) -> bool:
        file = self.path / item.file
        try:
            fits = file.stat().st_size == item.size or not item.size
        except OSError:
            return False
        return fits and not self.wrong(item, file)

    @staticmethod
    def wrong(item: Any, file: Path) -> str:
        """Why a file is not the one that is listed, or an empty text."""
        if item.sha256:
            found = sha256_of(file)
            return "" if found == item.sha256 else f"its sha256 is {found}, not {item.sha256}"
        if item.git:
            right = code("module_utils.models").git_blob(file) == item.git
            return "" if right else f"it is not the blob {item.git} that the hub lists"
        return "the place that lists it tells no hash of it, so nothing proves that it is right"

    def fetch(self, items: Sequence[Any], indexes: Mapping[str, bytes]) -> list[Any]:
        """Fetch what is missing; returns the list with sizes and hashes that are known now."""
        listed = [item for item in items if item.file]
        total = sum(item.size for item in listed)
        print(f"{len(listed)} files, {self.artifacts.human(total)} into {self.path}", file=sys.stderr)
        problems: list[str] = []
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            jobs = {pool.submit(self._one, item, total): item for item in listed if item.file not in indexes}
            finished = {}
            for job in concurrent.futures.as_completed(jobs):
                item = jobs[job]
                try:
                    finished[item.file] = job.result()
                except (OSError, Failure) as error:
                    problems.append(f"{item.file} from {item.url}: {error}")
        if problems:
            raise Failure(
                "not fetched; run the same command again, it goes on where it stopped:\n" + "\n".join(sorted(problems))
            )
        self._put(indexes)
        finished |= {item.file: self._one(item, total) for item in listed if item.file in indexes}
        return [finished.get(item.file, item) for item in items]

    def _put(self, indexes: Mapping[str, bytes]) -> None:
        """The indexes of apt, once all that they name is there: written first, then put in place, those signed last.

        A node that finds a new Packages under an old InRelease, or the other way about, can install nothing at all.
        """
        new = []
        for target, data in ((self.path / file, data) for file, data in indexes.items()):
            if not target.exists() or target.read_bytes() != data:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.with_name(target.name + ".part").write_bytes(data)
                new.append(target)
        for target in sorted(new, key=lambda target: target.name in SIGNED):
            target.with_name(target.name + ".part").replace(target)

    def _one(self, item: Any, total: int) -> Any:
        target = self.path / item.file
        if not self.whole(item):
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(target.name + ".part")
            self._transfer(item, part)
            if problem := self.wrong(item, part):
                part.unlink()
                raise Failure(problem)
            part.replace(target)
        with self._guard:
            before, self._done = self._done, self._done + item.size
            if total and before * 20 // total != self._done * 20 // total:
                print(f"  {self._done * 100 // total} %, {self.artifacts.human(self._done)}", file=sys.stderr)
        licence = self._licence(target) if item.kind == "wheel" else self.artifacts.UNKNOWN
        return replace(
            item,
            size=target.stat().st_size,
            sha256=item.sha256 or sha256_of(target),
            licence=item.licence if licence == self.artifacts.UNKNOWN else licence,
        )

    def _licence(self, wheel: Path) -> str:
        try:
            with zipfile.ZipFile(wheel) as archive:
                name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
                return str(self.artifacts.wheel_licence(archive.read(name).decode("utf-8", "replace")))
        except (zipfile.BadZipFile, StopIteration):
            return str(self.artifacts.UNKNOWN)

    def _transfer(self, item: Any, part: Path) -> None:
        # Another mirror, one of its folders such as conda/, or a folder with the files themselves.
        places = (item.file, item.file.partition("/")[2], Path(item.file).name)
        for kept in (cache / place for cache in self.caches for place in places):
            same_size = kept.is_file() and item.size in (0, kept.stat().st_size)
            if same_size and item.sha256 and sha256_of(kept) == item.sha256:
                shutil.copyfile(kept, part)
                return
        conda_env = code("module_utils.conda_env")
        for attempt in range(TRIES):
            start = part.stat().st_size if part.exists() else 0
            if item.size and start == item.size:
                return
            try:
                with opened(item.url, 0 if start > item.size > 0 else start) as answer:
                    resumed = getattr(answer, "status", None) == 206
                    with part.open("ab" if resumed else "wb") as stream:
                        begun = start if resumed else 0
                        conda_env.receive(answer, stream, (item.size or conda_env.MOST) - begun)
                if not item.size or part.stat().st_size >= item.size:
                    return
            except urllib.error.HTTPError as error:
                if error.code == 416:
                    part.unlink()
                elif error.code not in (429, 500, 502, 503, 504) or attempt == TRIES - 1:
                    raise
            except conda_env.TooMuchError as error:
                part.unlink()
                raise Failure(str(error)) from None
            except OSError:
                if attempt == TRIES - 1:
                    raise
            except http.client.HTTPException as error:
                if attempt == TRIES - 1:
                    raise broken(error) from None
            time.sleep(2**attempt)
        raise Failure("the connection broke off too often")

    def write_list(self, items: Sequence[Any], inventory: str, report: Report) -> None:
        wheels = [item for item in items if item.kind == "wheel"]
        (self.path / "wheels").mkdir(parents=True, exist_ok=True)
        replace_text(self.path / "wheels" / "index.html", self.artifacts.wheels_index(wheels))
        for file, text in self.artifacts.manifests(items).items():
            replace_text(self.path / file, text)
        # Last: a folder with a list was complete once.
        text = self.artifacts.dump(items, inventory, report.missing, report.remarks)
        replace_text(self.path / self.artifacts.LIST, text)

    def known(self) -> list[Any]:
        file = self.path / self.artifacts.LIST
        if not file.exists():
            raise Failure(
                f"{file} is missing: make the folder with `make artifacts INVENTORY=... DOWNLOAD={self.path}`"
            )
        return list(self.artifacts.load(file.read_text(encoding="utf-8"), str(file)))

    def check(self, items: Sequence[Any]) -> list[str]:
        """What is missing or damaged."""
        listed = [item for item in items if item.file]
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            whole = list(pool.map(self.whole, listed))
        found = []
        for item, good in zip(listed, whole, strict=True):
            if not good:
                found.append(f"{item.file}: {'is damaged' if (self.path / item.file).exists() else 'is missing'}")
        for file, wanted in self.artifacts.manifests(listed).items():
            there = self.path / file
            if not there.exists() or there.read_text(encoding="utf-8") != wanted:
                found.append(f"{file}: {'does not name the files of the list' if there.exists() else 'is missing'}")
        page = self.path / "wheels" / "index.html"
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        found += [
            f"{item.file}: is not in wheels/index.html"
            for item in listed
            if item.kind == "wheel" and item.sha256 not in text
        ]
        return found


def replace_text(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


# --- command line -------------------------------------------------------------------------------------------------


def supported(names: Sequence[str]) -> list[Any]:
    artifacts, matrix = code("plugin_utils.runtime.artifacts"), code("plugin_utils.nvidia.matrix")
    known = [row for row in matrix.DISTRIBUTIONS if row.accepted and row.family in artifacts.ARCHIVES]
    if not names:
        return known
    by_name = {f"{row.id}{row.version}": row for row in known}
    wrong = [name for name in names if name not in by_name]
    if wrong:
        raise Failure(f"--os {', '.join(wrong)}: is none of {', '.join(by_name)}")
    return [by_name[name] for name in names]


def step(text: str) -> None:
    """What is being looked up: the list takes minutes."""
    print(f"looking up {text}", file=sys.stderr, flush=True)


def collect(arguments: argparse.Namespace) -> tuple[list[Any], dict[str, bytes], Report]:
    artifacts, lock = code("plugin_utils.runtime.artifacts"), code("plugin_utils.runtime.lock")
    inventory = Inventory(arguments.inventory)
    report = Report()
    indexes: dict[str, bytes] = {}
    try:
        step("wheels and conda packages of the locks")
        found = [*wheels_of(inventory, arguments), *conda_of(inventory)]
    except lock.RuntimeInputError as error:
        raise Failure(str(error)) from error
    for distribution in supported(arguments.os):
        step(f"packages of {distribution.id} {distribution.version}, of NVIDIA where a driver is wanted")
        items, files = apt_of(inventory, distribution, arguments.kernel, report)
        found += items
        indexes |= files
    step("models")
    found += models_of(inventory, report)
    for name in ("missing", "remarks"):
        setattr(report, name, list(dict.fromkeys(getattr(report, name))))
    return artifacts.merged(found), indexes, report


def lacking(inventory: Inventory, items: Sequence[Any]) -> list[str]:
    """What an inventory asks for and a list does not name, as far as it shows without network."""
    lock = code("plugin_utils.runtime.lock")
    hashes, names = {item.sha256 for item in items}, {item.name for item in items if item.kind == "apt"}
    found = []
    for file in sorted(
        {str(inventory.variable(host, "python_env", "__python_env_lock")) for host in inventory.hosts()}
    ):
        read = lock.parse_lock(Path(file).read_text(), Path(file).name)
        found += [
            f"{name} {version} of {Path(file).name}"
            for name, version in read.packages.items()
            if not hashes & {*read.hashes[name]}
        ]
    found += [f"{name} {version}" for name, version, sha256 in sorted(tools_of(inventory)) if sha256 not in hashes]
    found += [item.file for item in conda_of(inventory) if item.sha256 not in hashes]
    # Drivers are chosen for a distribution; what every node gets shows here too.
    asked = {str(entry["name"]).partition("=")[0] for entry in wanted_packages(inventory, inventory.hosts(), {})}
    found += [f"the package {name}" for name in sorted(asked - names)]
    return [f"{text}: is not in the list" for text in found]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inventory", "-i", type=Path, help="an inventory")
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="fetch everything into this folder")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="compare a folder with its list, without network")
    parser.add_argument("--json", type=Path, default=ROOT / ".cache" / "artifacts.json", help="file for the list")
    parser.add_argument("--os", action="append", default=[], help="only for nodes of this distribution, as debian12")
    parser.add_argument("--kernel", action="append", default=[], help="kernel release of the nodes, for its headers")
    parser.add_argument("--index-url", action="append", default=[], help="package indexes (default: PyPI)")
    parser.add_argument(
        "--find-links", action="append", default=[], metavar="PLACE", help="folders or pages with wheels"
    )
    parser.add_argument("--cache", action="append", type=Path, default=[], help="folders that may hold files already")
    parser.add_argument("--no-licences", action="store_true", help="do not ask the index for licences")
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> int:
    artifacts = code("plugin_utils.runtime.artifacts")
    if arguments.inventory and not arguments.inventory.exists():
        raise Failure(f"there is no inventory {arguments.inventory}: name a folder or a file, as inventories/prod")
    supported(arguments.os)  # before anything is read or fetched
    if arguments.check:
        folder = Folder(arguments.check.resolve(), [])
        items = folder.known()
        problems = folder.check(items) + (lacking(Inventory(arguments.inventory), items) if arguments.inventory else [])
        if problems:
            raise Failure(
                f"{folder.path} is not whole:\n"
                + "\n".join(problems)
                + f"\n-> make artifacts INVENTORY={arguments.inventory or '...'} DOWNLOAD={folder.path} fetches them "
                "again"
            )
        told(folder, items)
        return 0
    if not arguments.inventory:
        raise Failure("name an inventory: make artifacts INVENTORY=inventories/prod")
    if arguments.download:
        folder = Folder(arguments.download.resolve(), arguments.cache)
        with folder.held():  # before the minutes that the list takes
            download(folder, arguments)
        return 0
    items, _, report = collect(arguments)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    replace_text(arguments.json, artifacts.dump(items, arguments.inventory.name, report.missing, report.remarks))
    print(artifacts.table(items, report.missing, report.remarks))
    print(f"as JSON: {arguments.json}")
    return 0


def download(folder: Folder, arguments: argparse.Namespace) -> None:
    items, indexes, report = collect(arguments)
    items = folder.fetch(items, indexes)
    folder.write_list(items, arguments.inventory.name, report)
    problems = folder.check(items)
    if problems:
        raise Failure(f"{folder.path} is not whole:\n" + "\n".join(problems))
    print("".join(f"note: {remark}\n" for remark in report.remarks), end="")
    told(folder, items)
    if report.missing:
        raise Failure("these could not be fetched, the folder is not complete:\n" + "\n".join(report.missing))
    print(f"in the inventory: ironrack_mirror: {folder.path} (a folder on the nodes), or the URL that serves it")


def told(folder: Folder, items: Sequence[Any]) -> None:
    size = folder.artifacts.human(sum(item.size for item in items))
    print(f"{folder.path}: {len(items)} files, {size}, all as listed")


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    Display().verbosity = 0
    init_plugin_loader()
    try:
        return run(arguments)
    except Failure as failure:
        print(f"artifacts: {failure}", file=sys.stderr)
    except (OSError, ValueError) as problem:
        print(f"artifacts: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
