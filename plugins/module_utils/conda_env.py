# SPDX-License-Identifier: Apache-2.0
"""A conda environment from an explicit lock, made on one node without a solver: fetch, install, tidy up, check.

Packages are fetched here, with their hashes, whichever client installs them afterwards: proxies, mirrors and failures
are the same for both, and the client needs no network. A package is a dict with url (where to fetch it), home (its URL
in the lock), channel, file_name, name, version, build and sha256. Standard library only.
"""

# ruff: noqa: PTH101, PTH103, PTH105, PTH108, PTH110, PTH112, PTH114, PTH115, PTH117, PTH118, PTH119, PTH123, PTH208

from __future__ import annotations

import concurrent.futures
import contextlib
import email.utils
import errno
import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.parse
import urllib.request

CHUNK = 1 << 20
MOST = 16 << 30  # bytes of a file whose size nobody told
PATIENCE = 60  # the longest pause that a server may ask for, in seconds
MARK = "@EXPLICIT"
# Run by the Python of a tool environment that holds py-rattler. Copies instead of links: what a release holds must not
# change when something in a cache does.
RATTLER_PROGRAM = '''"""Install conda packages from files: install.py ORDER.json"""
import asyncio
import json
import os
import sys

from rattler import Config, RepoDataRecord, install


async def main():
    with open(sys.argv[1], encoding="utf-8") as stream:
        order = json.load(stream)
    config = Config.from_toml("allow-hard-links = false\\nallow-ref-links = false")
    records = [await RepoDataRecord.from_package_archive(path) for path in order["packages"]]
    where = {"target_prefix": order["prefix"], "cache_dir": order["cache"]}
    await install(records, **where, show_progress=False, execute_link_scripts=False, config=config)


asyncio.run(main())
sys.stdout.flush()
os._exit(0)  # py-rattler's threads may still run: taking the interpreter down under them has crashed
'''


class CondaError(Exception):
    """A problem whose text names what is wrong and what helps."""


class TooMuchError(Exception):
    """A server sends more than a file can have."""


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(CHUNK), b""):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- fetching


def receive(answer, stream, most):
    """Copy what a server sends; what breaks off is told from what is whole and wrong, and there is an end to it.

    http.client itself takes a body that is shorter than announced for a whole one where it is read in parts.
    """
    headers = getattr(answer, "headers", None) or {}
    length = (headers.get("Content-Length") or "").strip()
    # Of what comes packed and is unpacked on the way, the header tells another length.
    told = int(length) if length.isdecimal() and not headers.get("Content-Encoding") else None
    if told is not None and told > most:
        raise TooMuchError(f"the server announces {told} bytes, and {most} are the most that it can be")
    got = 0
    for block in iter(lambda: answer.read(CHUNK), b""):
        got += len(block)
        if got > most:
            raise TooMuchError(f"the server sends more than {most} bytes, the most that it can be")
        stream.write(block)
    if told is not None and got < told:
        raise ConnectionError(f"the answer broke off after {got} of {told} bytes")


def asked_pause(error):
    """Seconds that a server asks to wait, as a number or as a date; as long as that is no build hanging."""
    value = ((getattr(error, "headers", None) or {}).get("Retry-After") or "").strip()
    try:
        seconds = (
            int(value) if value.isdecimal() else email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        )
    except (ValueError, TypeError):  # it does not say, or nothing that can be read
        return 0
    return min(max(seconds, 0), PATIENCE)


def fetch_file(url, target, sha256, *, opener, log, what, remedy, size=0, attempts=4, pause=1.0):
    """Bring one file of a known hash to target; a whole copy that is there already is not fetched again."""
    if os.path.exists(target) and file_sha256(target) == sha256:
        return
    partial = f"{target}.part"
    problem, wrong, asked = "", 0, 0
    local = urllib.parse.urlsplit(url).scheme == "file"
    for attempt in range(attempts):
        if attempt:
            time.sleep(max(pause * 2 ** (attempt - 1), asked))
            asked = 0
        log(f"fetching {url}")
        try:
            if local:
                shutil.copyfile(urllib.request.url2pathname(urllib.parse.urlsplit(url).path), partial)
            else:
                with contextlib.closing(opener(url)) as answer, open(partial, "wb") as stream:
                    receive(answer, stream, size or MOST)
        except TooMuchError as error:
            problem = str(error)
            break
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            problem = f"{type(error).__name__}: {error}"
            log(f"attempt {attempt + 1}: {problem}")
            code = getattr(error, "code", None) or 0
            # An answer 4xx, or what a folder says, will not be another one in a second; 408 and 429 ask to come again.
            if local or (400 <= code < 500 and code not in (408, 429)):
                break
            asked = asked_pause(error)
            continue
        found = file_sha256(partial)
        if found == sha256:
            os.chmod(partial, 0o644)
            os.replace(partial, target)
            return
        os.unlink(partial)
        problem = f"its sha256 is {found}, not {sha256}"
        log(f"attempt {attempt + 1}: {problem}")
        wrong += 1
        if local or wrong == 2:
            break
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    raise CondaError(f"{what} could not be fetched from {url}: {problem}. {remedy}")


def fetch_packages(packages, folder, opener, log, parallel=4):
    """Bring all packages into folder, and remove what the lock does not name; returns their paths."""
    os.makedirs(folder, mode=0o755, exist_ok=True)
    remedy = (
        "Check python_env_conda_mirror (empty: the channel itself), python_env_http_proxy and python_env_ca_bundle, "
        "and whether python_env_conda_lock names what is there."
    )

    def one(package):
        target = os.path.join(folder, package["file_name"])
        what = f"the conda package {package['file_name']}"
        told = {"what": what, "remedy": remedy, "size": package.get("size", 0)}
        fetch_file(package["url"], target, package["sha256"], opener=opener, log=log, **told)
        return target

    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        paths = list(pool.map(one, packages))
    for name in set(os.listdir(folder)) - {package["file_name"] for package in packages}:
        os.unlink(os.path.join(folder, name))
    return paths


def explicit_text(packages, folder):
    """What `conda create --file` reads: the fetched files with their hashes."""
    lines = [
        "file://{}#{}".format(urllib.request.pathname2url(os.path.join(folder, item["file_name"])), item["sha256"])
        for item in packages
    ]
    return "\n".join([MARK, *lines]) + "\n"


# ---------------------------------------------------------------- the environment


def write_json(path, value):
    partial = f"{path}.part"
    with open(partial, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2, sort_keys=True)
        stream.write("\n")
    os.chmod(partial, 0o644)
    os.replace(partial, path)


def settle(prefix, packages):
    """Make conda-meta say where the packages are from, not where this node had them, and check that it is the lock.

    Both clients note the files they were given and their own caches. Those are no news to anyone, and would make the
    same environment another one on each site.
    """
    meta = os.path.join(prefix, "conda-meta")
    by_file = {package["file_name"]: package for package in packages}
    found = set()
    for name in sorted(os.listdir(meta)) if os.path.isdir(meta) else []:
        if not name.endswith(".json"):
            continue
        path = os.path.join(meta, name)
        with open(path, encoding="utf-8") as stream:
            record = json.load(stream)
        file_name = record.get("fn") or os.path.basename(record.get("url", ""))
        package = by_file.get(file_name)
        if package is None:
            raise CondaError(f"{path} is of {file_name}, which the conda lock does not name")
        found.add(file_name)
        for key in ("extracted_package_dir", "package_tarball_full_path"):
            record.pop(key, None)
        if isinstance(record.get("link"), dict):
            record["link"]["source"] = ""
        record.update(url=package["home"], channel=package["channel"], sha256=package["sha256"])
        write_json(path, record)
    missing = sorted(set(by_file) - found)
    if missing:
        raise CondaError(f"{prefix} lacks {', '.join(missing)} of the conda lock: the client installed less than asked")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(
            os.path.join(prefix, "CACHEDIR.TAG")
        )  # py-rattler says so of each environment; a backup would skip it
    history = os.path.join(meta, "history")
    # `conda list -p` takes a folder for an environment by this file; what it says depends on client and clock.
    with open(history, "w", encoding="utf-8") as stream:
        stream.write(
            "".join(f"+{item['channel']}::{item['name']}-{item['version']}-{item['build']}\n" for item in packages)
        )
    os.chmod(history, 0o644)
    for folder, folders, files in os.walk(prefix):
        for name in folders + files:
            path = os.path.join(folder, name)
            if os.path.islink(path) and os.path.isabs(os.readlink(path)):
                raise CondaError(
                    f"{path} is a link to {os.readlink(path)}, out of the environment: it would not travel"
                )


def without_user_packages(prefix):
    """Hide ~/.local from the environment, as a virtual environment does.

    A pyvenv.cfg that names the environment's own bin as its home changes nothing else: prefix and base prefix stay the
    same folder, so it is no virtual environment to anyone who asks.
    """
    path = os.path.join(prefix, "pyvenv.cfg")
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(f"home = {os.path.join(prefix, 'bin')}\ninclude-system-site-packages = false\n")
    os.chmod(path, 0o644)
