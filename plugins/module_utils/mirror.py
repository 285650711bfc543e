# SPDX-License-Identifier: Apache-2.0
"""Fetches a model from a plain mirror: files below a URL (a web server, a bucket) or below a folder of this node.

What there has to be stands in the mirror itself: the manifest of a node that has the model, or a file SHA256SUMS as
`sha256sum *` writes it. A folder may do without; its files are then judged by what they say of themselves.
"""
# Plain os calls, as in the modules. The URL is the user's.
# ruff: noqa: PTH108, PTH110, PTH113, PTH118, PTH123, PTH202, S310

from __future__ import annotations

import base64
import email.utils
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request

from ansible_collections.ironrack.vllm.plugins.module_utils import fanout, models, redirects

ATTEMPTS = 6
PATIENCE = 3600
SUMS = "SHA256SUMS"


class Mirror:
    def __init__(self, base, log, *, login="", proxy="", ca_bundle="", pause=1.0):
        parts = urllib.parse.urlsplit(base)
        self.headers = {"User-Agent": "ironrack", "Accept-Encoding": "identity"}
        if login:
            plain = ":".join(map(urllib.parse.unquote, login.split(":", 1)))
            self.headers["Authorization"] = f"Basic {base64.b64encode(plain.encode()).decode()}"
        self.base = base.rstrip("/")
        self.folder = urllib.parse.unquote(parts.path) if parts.scheme == "file" else None
        self.log, self.pause = log, pause
        self.refused = ""  # what the mirror answered where it let nothing be read
        try:
            context = ssl.create_default_context(cafile=ca_bundle or None)
        except OSError as error:
            raise models.ModelError(
                f"model_store_ca_bundle = {ca_bundle} cannot be used ({error.strerror or error}): name a file of this "
                "node with certificates in PEM, or leave it empty for the system's"
            ) from None
        handlers = [urllib.request.HTTPSHandler(context=context), redirects.Handler()]
        if proxy:
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        self.opener = urllib.request.build_opener(*handlers)

    # -- asking

    def url(self, place, name):
        return f"{self.base}/{urllib.parse.quote(f'{place}/{name}')}"

    def open(self, place, name, method="GET", first=0):
        headers = {**self.headers, **({"Range": f"bytes={first}-"} if first else {})}
        request = urllib.request.Request(self.url(place, name), headers=headers, method=method)
        return self.opener.open(request, timeout=60)

    def patiently(self, what, call, progressed=lambda: 0):
        """Do it; what may pass by itself is tried again, and as long as something arrives there is no end to that."""
        failures, waited = 0, 0.0
        while True:
            before = progressed()
            try:
                return call()
            except (OSError, http.client.HTTPException) as error:
                status = getattr(error, "code", None)
                if status in (401, 403, 404, 410) or models.no_space(error, ""):
                    raise
                failures = 0 if progressed() > before else failures + 1
                pause = _retry_after(error) if status in (429, 503) else None
                waited += pause or 0
                if failures >= ATTEMPTS or waited > PATIENCE:
                    raise models.ModelError(
                        f"{what} could not be fetched: {error}. Check model_store_mirror, and that this node reaches "
                        "it (model_store_http_proxy, model_store_ca_bundle)"
                    ) from None
                if pause is None:
                    pause = min(2.0 ** max(failures - 1, 0), 15) * self.pause
                self.log(f"{what}: {error}; again in {pause:.0f} s")
                time.sleep(pause)

    # -- what the mirror has

    def text(self, place, name):
        """The content of a small file, or None where the mirror lacks it."""
        url = self.url(place, name)
        if self.folder is not None:
            try:
                with open(os.path.join(self.folder, place, name), encoding="utf-8") as stream:
                    return stream.read()
            except OSError:
                return None

        def get():
            with self.open(place, name) as answer:
                return answer.read().decode("utf-8", "replace")

        try:
            return self.patiently(url, get)
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                return None
            if error.code in (401, 403):
                # Of a bucket that may not be listed, what is not there is forbidden.
                self.log(f"{url}: {error}")
                self.refused = f"{error.code} {error.reason}"
                return None
            raise

    def listing(self, place, ignore):
        manifest = self.text(place, models.MANIFEST)
        if manifest is not None:
            try:
                listing = json.loads(manifest)
            except ValueError:
                listing = None
            if not models.check_listing(listing) or not all(
                _SHA256.fullmatch(str(e.get("sha256"))) for e in listing["files"]
            ):
                raise models.ModelError(
                    f"{self.url(place, models.MANIFEST)} is no manifest of a model: copy it again from a node that has "
                    f"the model, or write {SUMS} in its place"
                )
            names = self.left([e["name"] for e in listing["files"]], ignore, place)
            files = [
                {key: e[key] for key in ("name", "size", "sha256")} for e in listing["files"] if e["name"] in names
            ]
            return {"commit": str(listing.get("commit") or ""), "files": files}
        sums = self.text(place, SUMS)
        if sums is not None:
            return {"commit": "", "files": self.from_sums(place, sums, ignore)}
        if self.folder is not None:
            folder = os.path.join(self.folder, place)
            found = _files_below(folder)
            if found:
                names = self.left(found, ignore, place)
                files = [{"name": name, "size": os.path.getsize(os.path.join(folder, name))} for name in names]
                return {"commit": "", "files": files}
            raise models.ModelError(
                f"the mirror has no model at {folder} (model_store_mirror, or ironrack_mirror/models): put it there "
                "with `make artifacts DOWNLOAD=<folder>`, or correct model.repo and model.revision"
            )
        if self.refused:
            raise models.ModelError(
                f"{self.url(place, models.MANIFEST)} and {self.url(place, SUMS)} cannot be read: the mirror "
                f"(model_store_mirror) answers {self.refused}. Put a name and password that may read it into the URL "
                "(https://name:password@host/...). Of a bucket that does not let itself be listed, this may also mean "
                "that it has not this revision"
            )
        raise models.ModelError(
            f"{self.url(place, models.MANIFEST)} and {self.url(place, SUMS)} cannot be read: the mirror "
            "(model_store_mirror) has not this revision, or nothing that lists its files. Put the model there with "
            f"`make artifacts DOWNLOAD=<folder>`, or write the list with `sha256sum * > {SUMS}` in its folder"
        )

    def left(self, names, ignore, place):
        """What an engine reads of them."""
        kept = models.wanted(names, ignore)
        if not kept:
            raise models.ModelError(
                f"{self.url(place, '')} has no file that an engine reads and that model_store_ignore leaves: correct "
                "model.repo, model.revision or model_store_ignore"
            )
        return kept

    def from_sums(self, place, sums, ignore):
        hashes = {}
        for line in sums.splitlines():
            match = re.fullmatch(r"\\?([0-9a-f]{64}) [ *](?:\./)?(.+)", line)
            if not match or match[2] == SUMS:
                continue
            if not models.safe_name(match[2]):
                raise models.ModelError(
                    f"{self.url(place, SUMS)} names {match[2]!r}, which is no plain path inside of its folder: write "
                    f"it there with `sha256sum * > {SUMS}`"
                )
            hashes[match[2]] = match[1]
        if not hashes:
            raise models.ModelError(
                f"{self.url(place, SUMS)} lists no files of a model: write it with `sha256sum * > {SUMS}`"
            )
        names = self.left(sorted(hashes), ignore, place)
        return [{"name": name, "size": self.size(place, name), "sha256": hashes[name]} for name in names]

    def size(self, place, name):
        url = self.url(place, name)

        def head():
            with self.open(place, name, "HEAD") as answer:
                return int(answer.headers["Content-Length"])

        try:
            if self.folder is not None:
                return os.path.getsize(os.path.join(self.folder, place, name))
            return self.patiently(url, head)
        except (OSError, TypeError, ValueError) as error:
            raise models.ModelError(
                f"{url} stands in {SUMS}, but has no size there ({error}): copy the folder to the mirror again"
            ) from None

    # -- fetching

    def file(self, place, entry, target):
        """Bring one file, or take what is there; returns its entry with hashes of the whole and of its pieces."""
        name = entry["name"]
        if os.path.isfile(target) and os.path.getsize(target) == entry["size"]:
            described = fanout.describe(target, name)
            if described["sha256"] == entry.get("sha256"):
                return {**entry, **described}
        partial = target + models.PART
        if "sha256" not in entry and os.path.lexists(partial):
            os.unlink(partial)  # nothing would prove that it is the beginning of this file
        for last in (False, True):
            self.bring(place, entry, partial)
            described = fanout.describe(partial, name)
            if entry.get("sha256", described["sha256"]) == described["sha256"]:
                models.keep_file(partial, target)
                self.log(f"{name}: {entry['size']} bytes, verified")
                return {**entry, **described}
            os.unlink(partial)
            problem = f"has the sha256 {described['sha256']} instead of {entry['sha256']}"
            self.log(f"{name} {problem}" + ("" if last else "; once more from its beginning"))
        raise models.ModelError(
            f"{self.url(place, name)} came twice and {problem}: the file in the mirror is damaged, or is not the one "
            "its list names; copy it to the mirror again"
        )

    def bring(self, place, entry, partial):
        url = self.url(place, entry["name"])
        models.drop_link(partial)

        def arrived():
            return os.path.getsize(partial) if os.path.exists(partial) else 0

        def get():
            if arrived() > entry["size"]:
                os.unlink(partial)
            have = arrived()
            if have == entry["size"] and have:
                return
            source = self.local(place, entry["name"], have) if self.folder is not None else None
            with source or self.open(place, entry["name"], first=have) as answer:
                resumed = bool(have) and (source is not None or answer.status == 206)
                left = entry["size"] - have if resumed else entry["size"]
                with open(partial, "ab" if resumed else "wb", opener=models.no_link) as stream:
                    while block := answer.read(min(models.CHUNK, left + 1)):
                        left -= len(block)
                        if left < 0:
                            raise models.ModelError(
                                f"{url} has more than the {entry['size']} bytes that the mirror (model_store_mirror) "
                                "lists: the file is another one, or a proxy answers in its place "
                                "(model_store_http_proxy); copy the folder to the mirror again"
                            )
                        stream.write(block)
            if arrived() != entry["size"]:
                raise ConnectionError(f"the connection ended after {arrived()} of {entry['size']} bytes")

        try:
            self.patiently(url, get, arrived)
        except OSError as error:
            if models.no_space(error, ""):
                raise
            raise models.ModelError(
                f"{url} cannot be read ({error}): the mirror (model_store_mirror) lacks the file or does not let it be "
                "read; copy the folder to the mirror again"
            ) from None

    def local(self, place, name, first):
        stream = open(os.path.join(self.folder, place, name), "rb")  # noqa: SIM115 - its reader closes it
        stream.seek(first)
        return stream


_SHA256 = re.compile(r"[0-9a-f]{64}")


def _files_below(folder):
    found = []
    for path, folders, names in os.walk(folder):
        folders.sort()
        found += [os.path.relpath(os.path.join(path, name), folder) for name in names]
    return sorted(found)


def _retry_after(error):
    """Seconds that the server asks to wait, as a number or as a date; None where it does not say."""
    value = (getattr(error, "headers", None) or {}).get("Retry-After") or ""
    if value.strip().isdigit():
        return int(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0) if value else None
    except (ValueError, TypeError):
        return None
