# SPDX-License-Identifier: Apache-2.0
"""The variables of the roles that decide the stack: names, what they may be, and what they are when left out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import StackError
from .matrix import BRANCHES, CUDA
from .versions import branch_of, cuda_parts, driver_key


@dataclass(frozen=True)
class Problem:
    variable: str
    value: Any
    message: str
    remedy: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "variable": self.variable,
            "value": self.value,
            "message": self.message,
            "remedy": self.remedy,
            "text": f"{self.variable} is {self.value!r}: {self.message}; {self.remedy}",
        }


MIRROR = "https://developer.download.nvidia.com/compute/cuda/repos"
CHOICES: dict[str, tuple[Any, ...]] = {
    "python_env_variant": (*CUDA, "cpu"),
    "nvidia_driver_source": ("nvidia", "distribution", "local", "none"),
    "nvidia_driver_flavour": ("auto", "open", "proprietary"),
    "gpu_fabric_manager": ("auto", "present", "absent"),
    "gpu_fabric_imex": ("auto", "present", "absent"),
    "gpu_fabric_gdr": ("auto", "dma_buf", "peermem", "none"),
    "nvidia_driver_precompiled": (True, False),
    "gpu_fabric_dcgm": (True, False),
    "cuda_compat": (True, False),
}
DEFAULTS: dict[str, Any] = {
    "python_env_variant": "cu130",
    "gpus": [],
    "ironrack_mirror": "",
    "nvidia_driver_source": "nvidia",
    "nvidia_driver_branch": "auto",
    "nvidia_driver_version": "auto",
    "nvidia_driver_flavour": "auto",
    "nvidia_driver_precompiled": False,
    "nvidia_driver_packages": [],
    "nvidia_driver_mirror": MIRROR,
    "nvidia_driver_distribution_mirror": "",
    "nvidia_driver_local": "",
    "nvidia_driver_key_url": "",
    "nvidia_driver_key_sha256": "",
    "nvidia_driver_key_fingerprint": "",
    "nvidia_driver_mok_key": "",
    "nvidia_driver_mok_cert": "",
    "cuda_version": "auto",
    "cuda_compat": False,
    "gpu_fabric_manager": "auto",
    "gpu_fabric_imex": "auto",
    "gpu_fabric_imex_domain": "",
    "gpu_fabric_gdr": "auto",
    "gpu_fabric_dcgm": True,
}
# As Ansible and the inventory's check read them: what came with -e is a text.
BOOLEANS = dict.fromkeys(("yes", "true", "on", "1"), True) | dict.fromkeys(("no", "false", "off", "0"), False)
URL = re.compile(r"(https?|file)://[^\s\[\]]+|/[^\s\[\]]+")
URLS = (
    "ironrack_mirror",
    "nvidia_driver_mirror",
    "nvidia_driver_distribution_mirror",
    "nvidia_driver_local",
    "nvidia_driver_key_url",
)
LOGIN = re.compile(r"(?<=://)[^/]*@")


def check(request: Any) -> tuple[dict[str, Any], list[Problem]]:
    """All variables with a usable value each, and what is wrong with those given."""
    if not isinstance(request, Mapping):
        raise StackError(
            f"the variables are {type(request).__name__}, a dictionary is needed; hand over role variables"
        )
    problems: list[Problem] = []
    values = dict(DEFAULTS)
    for name, given in request.items():
        value = given
        if name not in DEFAULTS:
            near = difflib.get_close_matches(str(name), DEFAULTS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(DEFAULTS)}"
            problems.append(Problem(str(name), value, "no such variable", remedy))
            continue
        if CHOICES.get(name) == (True, False) and isinstance(value, str | int):
            value = BOOLEANS.get(str(value).lower(), value)
        fault = _fault(name, value)
        if fault:
            shown = LOGIN.sub("(hidden)@", value) if name in URLS and isinstance(value, str) else value
            problems.append(Problem(name, shown, *fault))
        else:
            values[name] = value
    problems += _contradictions(values)
    return values, problems


def _contradictions(values: Mapping[str, Any]) -> list[Problem]:
    """What is right by itself and wrong beside another variable."""
    problems = []
    key, certificate = "nvidia_driver_mok_key", "nvidia_driver_mok_cert"
    for name, other in ((key, certificate), (certificate, key)):
        if values[name] and not values[other]:
            problems.append(
                Problem(other, values[other], f"{name} is set, and DKMS signs with both or neither", f"set {other} too")
            )
    url = values["nvidia_driver_key_url"]
    if url and not values["nvidia_driver_key_sha256"] and not values["nvidia_driver_key_fingerprint"]:
        problems.append(
            Problem(
                "nvidia_driver_key_fingerprint",
                "",
                f"the key at {url} would be trusted unseen",
                "give its fingerprint (gpg --show-keys), or nvidia_driver_key_sha256",
            )
        )
    if values["python_env_variant"] != "cpu" and values["nvidia_driver_source"] != "none":
        problems += _wishes(values)
    return problems


def _wishes(values: Mapping[str, Any]) -> list[Problem]:
    """Wishes that exclude each other on every host."""
    problems = []
    source, variant = values["nvidia_driver_source"], values["python_env_variant"]
    branch, version = str(values["nvidia_driver_branch"]), str(values["nvidia_driver_version"])
    if "auto" not in (branch, version) and branch_of(version) != int(branch):
        problems.append(
            Problem(
                "nvidia_driver_version",
                version,
                f"not of branch {branch}, which nvidia_driver_branch asks for",
                f"set nvidia_driver_branch to {branch_of(version)} or auto, or nvidia_driver_version to auto",
            )
        )
    toolkit, runtime = str(values["cuda_version"]), CUDA[variant]
    if toolkit not in ("auto", "none") and toolkit.split(".", maxsplit=1)[0] != runtime.runtime.split(".")[0]:
        problems.append(
            Problem(
                "cuda_version",
                toolkit,
                f"python_env_variant {variant} is built with CUDA {runtime.runtime}, and kernels compiled by another"
                f" major version do not load beside it",
                f"set it to auto, none or one of {', '.join(runtime.toolkits)}, or change python_env_variant",
            )
        )
    if source == "local" and not values["nvidia_driver_local"]:
        problems.append(
            Problem(
                "nvidia_driver_local",
                "",
                "nvidia_driver_source is local, and no place is named",
                "give the folder on the node, or the URL, of a repository with the packages",
            )
        )
    if values["nvidia_driver_precompiled"] and source != "distribution":
        problems.append(
            Problem(
                "nvidia_driver_precompiled",
                True,
                f"nvidia_driver_source is {source}, and modules built beforehand are Ubuntu's own",
                "set it to false, or nvidia_driver_source to distribution on Ubuntu",
            )
        )
    return problems


def too_old(values: Mapping[str, Any]) -> list[Problem]:
    """A branch below the runtime's floor, where nothing can help it: told before the hosts are looked at."""
    variant, source = values["python_env_variant"], values["nvidia_driver_source"]
    if variant == "cpu" or source in ("none", "distribution") or values["cuda_compat"]:
        return []
    floor = CUDA[variant].floor
    given = [name for name in ("nvidia_driver_branch", "nvidia_driver_version") if str(values[name]) != "auto"]
    return [
        Problem(
            name,
            values[name],
            f"too old: CUDA {CUDA[variant].runtime} of python_env_variant {variant} needs branch {floor} or newer",
            f"set it to auto or to {floor} or newer, or python_env_variant to cu129 (CUDA 12, with a lock of your own"
            f" in python_env_lock), or on data centre GPUs cuda_compat to true",
        )
        for name in given[:1]
        if int(str(values[name]).split(".")[0]) < floor
    ]


def _fault(name: str, value: Any) -> tuple[str, str] | None:
    if name in CHOICES:
        # 1 equals True: compare the types as well.
        if not any(type(value) is type(choice) and value == choice for choice in CHOICES[name]):
            shown = ", ".join(str(choice).lower() for choice in CHOICES[name])
            return "not one of the choices", f"set it to one of {shown}"
        return None
    if name == "gpus":
        known = all(map(_is_gpu, [value] if isinstance(value, Mapping) else value if isinstance(value, list) else [0]))
        return (
            None if known else ("not GPUs as they are declared", "declare {count: 8, name: ..., memory_total_mib: ...}")
        )
    if name == "nvidia_driver_packages":
        good = isinstance(value, list) and all(
            isinstance(item, str) and re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", item) for item in value
        )
        return None if good else ("not a list of package names", "give names such as libnvidia-compute-580")
    if not isinstance(value, str | int) or isinstance(value, bool):
        return "not a text", "put it in quotes"
    text = str(value)
    if name == "nvidia_driver_branch" and text not in ("auto", *map(str, BRANCHES)):
        return "no known driver branch", f"set it to auto or one of {', '.join(map(str, BRANCHES))}"
    if name == "nvidia_driver_version" and text != "auto":
        key = driver_key(text)
        if key is None:
            return "not a version as NVIDIA numbers drivers", "write it as 580.159.04, without a package's suffix"
        if key[0] not in BRANCHES:
            return "of no known driver branch", f"take a version of one of {', '.join(map(str, BRANCHES))}"
    if name == "cuda_version" and text not in ("auto", "none") and cuda_parts(text) is None:
        return "not a version of CUDA", 'set it to auto, none, or a quoted major.minor such as "13.0"'
    if name in URLS:
        if LOGIN.search(text):
            return "it holds a login, and lies in files that everybody may read", (
                "leave the login out, and put it into /etc/apt/auth.conf.d on the nodes (man apt_auth.conf)"
            )
        needed = name == "nvidia_driver_mirror"
        if (text or needed) and not URL.fullmatch(text):
            return "neither a URL nor an absolute path", "write https://…, file:///… or /…"
    if name in ("nvidia_driver_mok_key", "nvidia_driver_mok_cert") and text and not re.fullmatch(r"/[\w./@+-]+", text):
        return "not an absolute path", "give the path of a file on the node, such as /etc/dkms/mok.key"
    if name == "nvidia_driver_key_sha256" and text and not re.fullmatch(r"[0-9a-f]{64}", text):
        return "not a SHA-256", "give 64 lower case hexadecimal digits (sha256sum of the key file)"
    if name == "nvidia_driver_key_fingerprint" and text and not re.fullmatch(r"[0-9A-F]{40}", text):
        return "not a fingerprint", "give 40 upper case hexadecimal digits (gpg --show-keys)"
    return None


def _is_gpu(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    count = entry.get("count", 1)
    return isinstance(entry.get("name", ""), str) and type(count) is int and count > 0
