# SPDX-License-Identifier: Apache-2.0
"""Fetches a model from the hub with the real huggingface_hub; runs with the Python of the release.

The job, with the token in it, comes as JSON on standard input: nothing of it is in the arguments or the environment.
The result leaves as one line of JSON. Names, sizes and hashes come from the hub's listing, and every file is held
against them. The library has no way to go on with a file that another process began (it downloads to a name of its own
and removes it on failure), so files are taken with its `http_get`, which resumes, into `<name>.part`.
"""
# Plain os calls, as in the modules.
# ruff: noqa: PTH105, PTH108, PTH110, PTH113, PTH118, PTH202, S106

from __future__ import annotations

import concurrent.futures
import contextlib
import email.utils
import json
import logging
import os
import re
import sys
import threading
import time

from ansible_collections.ironrack.vllm.plugins.module_utils import fanout, models

ATTEMPTS = 6
PATIENCE = 3600  # the longest that a rate limit is waited for, in seconds
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
LARGE = 50 * 10**9  # the hub gives larger files by Xet alone


class Hub:
    def __init__(self, job):
        # The library reads the environment when it is imported.
        os.environ.update(
            HF_ENDPOINT=job["endpoint"],
            HF_HOME=job["home"],
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_DISABLE_UPDATE_CHECK="1",
            HF_HUB_DOWNLOAD_TIMEOUT="60",
            HF_HUB_ETAG_TIMEOUT="60",
        )
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DEBUG"):
            os.environ.pop(name, None)
        import huggingface_hub  # noqa: PLC0415 - after its settings
        from huggingface_hub import constants, errors, file_download  # noqa: PLC0415

        # What is lost where a connection breaks, at most: the library writes whole chunks.
        constants.DOWNLOAD_CHUNK_SIZE = 1 << 20

        self.library, self.errors, self.http_get = huggingface_hub, errors, file_download.http_get
        self.job = job
        self.token = job["token"] or False
        self.endpoint = job["endpoint"]
        self.repo = job["repo"]
        self.log = models.Log(job["log"], [job["token"]])
        handler = logging.Handler()
        handler.emit = lambda record: self.log(f"huggingface_hub: {' '.join(record.getMessage().split())}")
        logger = logging.getLogger("huggingface_hub")
        logger.handlers[:] = [handler]
        logger.propagate = False

    # -- errors

    def explain(self, error):
        """What an answer of the hub means for whoever runs the deployment, or None when it may pass by itself."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        page = f"{self.endpoint}/{self.repo}"
        told = " ".join(str(getattr(error, "server_message", None) or "").split())
        told = f" (the hub says: {told})" if told else ""
        if isinstance(error, self.errors.GatedRepoError):
            if not self.token:
                return (
                    f"the model {self.repo} is gated, and there is no token. Accept its licence at {page} with your "
                    "account, make a token there that may read gated repositories, and set model_store_token (in a "
                    f"vault) or model_store_token_file{told}"
                )
            return (
                f"the model {self.repo} is gated, and the account of model_store_token has no access. Accept its "
                f"licence at {page} with that account (some publishers answer after a while), and give the token "
                f"read access to gated repositories{told}"
            )
        if isinstance(error, self.errors.RevisionNotFoundError):
            return (
                f"the model {self.repo} has no revision {self.job['revision']}: correct model.revision; "
                f"{page}/commits/main lists the commits"
            )
        if status == 401 and "nvalid" in told:
            return f"{self.endpoint} does not take the token: set model_store_token to a valid one{told}"
        if isinstance(error, self.errors.RepositoryNotFoundError) or status in (401, 404):
            return (
                f"{self.endpoint} knows no model {self.repo}, or does not show it to "
                + ("the account of model_store_token" if self.token else "somebody without a token (model_store_token)")
                + f": correct model.repo, or give a token that may read it{told}"
            )
        if status == 403:
            return (
                f"{self.endpoint} refuses {self.repo} to "
                + ("the account of model_store_token" if self.token else "somebody without a token (model_store_token)")
                + f": give the token read access{told}"
            )
        return None

    @staticmethod
    def retry_after(error):
        """Seconds that the server asks to wait, as a number or as a date; None where it does not say."""
        headers = getattr(getattr(error, "response", None), "headers", None) or {}
        value = (headers.get("Retry-After") or "").strip()
        if value.isdigit():
            return int(value)
        try:
            return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0) if value else None
        except (ValueError, TypeError):
            return None

    def patiently(self, what, call, progressed=None):
        """Do it; what may pass by itself is tried again, and as long as something arrives there is no end to that."""
        failures, waited = 0, 0.0
        while True:
            before = progressed() if progressed else 0
            try:
                return call()
            except models.ModelError:
                raise
            except Exception as error:
                full = models.no_space(error, self.job["folder"])
                explained = full or self.explain(error)
                if explained:
                    raise models.ModelError(explained) from None
                problem = " ".join(str(error).split())[:300] or type(error).__name__
                status = getattr(getattr(error, "response", None), "status_code", None)
                failures = 0 if progressed and progressed() > before else failures + 1
                pause = self.retry_after(error) if status in (429, 503) else None
                if pause is not None:
                    pause = max(pause, 1.0)  # a server may ask for none, for ever
                    waited += pause
                    if waited > PATIENCE:
                        raise models.ModelError(
                            f"{self.endpoint} limits the rate and asks to wait for {models.duration(pause)}: run again "
                            f"after that, or set model_store_token (accounts have a higher limit): {problem}"
                        ) from None
                elif failures >= ATTEMPTS or not self.may_pass(error, status):
                    raise models.ModelError(
                        f"{what} could not be fetched from {self.endpoint} (model_store_endpoint): {problem}. Check "
                        "that this node reaches it (model_store_http_proxy, model_store_ca_bundle), or set "
                        "model_store_builder to one that does"
                    ) from None
                else:
                    pause = min(2.0 ** (failures - 1), 15) * self.job.get("pause", 1.0)
                self.log(f"{what}: {problem}; again in {pause:.0f} s")
                time.sleep(pause)

    @staticmethod
    def may_pass(error, status):
        """A connection that broke, a server with a bad moment; not what the server meant."""
        return status is None or status in (408, 416, 429) or status >= 500

    # -- what the hub has

    def listing(self):
        info = self.patiently(
            f"the list of files of {self.repo}",
            lambda: self.library.HfApi(endpoint=self.endpoint, token=self.token).model_info(
                self.repo, revision=self.job["revision"], files_metadata=True, timeout=60
            ),
        )
        siblings = {each.rfilename: each for each in info.siblings or []}
        files = []
        for name in models.wanted(sorted(siblings), self.job["ignore"]):
            each = siblings[name]
            lfs = each.lfs or {}
            size = lfs.get("size") if lfs else each.size
            if not models.safe_name(name) or type(size) is not int or size < 0:
                raise models.ModelError(f"{self.endpoint} lists {name!r} of {self.repo} without a size or place")
            proof = {"sha256": lfs.get("sha256")} if lfs else {"git": each.blob_id}
            if not _HASH.fullmatch(str(next(iter(proof.values())))):
                raise models.ModelError(
                    f"{self.endpoint} (model_store_endpoint) lists {name} of {self.repo} without a hash, so nothing "
                    "could prove what arrives: use a server that tells them, or put the model into a folder "
                    "with SHA256SUMS and name that with model_store_mirror"
                )
            files.append({"name": name, "size": size, **proof})
        if not files:
            raise models.ModelError(
                f"{self.endpoint} has no file of {self.repo} {self.job['revision']} that an engine reads and that "
                "model_store_ignore leaves: correct model.repo, model.revision or model_store_ignore"
            )
        revision = self.job["revision"]
        if not _COMMIT.fullmatch(str(info.sha)) or (_COMMIT.fullmatch(revision) and info.sha != revision):
            raise models.ModelError(
                f"{self.endpoint} (model_store_endpoint) is asked for {self.repo} {revision} and answers with the "
                f"commit {info.sha}: correct model.revision, or use another server"
            )
        return {"commit": info.sha, "files": files}

    # -- fetching

    def download(self, entry, commit, target):
        partial = target + models.PART
        models.drop_link(partial)
        url = self.library.hf_hub_url(self.repo, entry["name"], revision=commit, endpoint=self.endpoint)
        headers = self.library.utils.build_hf_headers(token=self.token)

        def arrived():
            return os.path.getsize(partial) if os.path.exists(partial) else 0

        def get():
            if arrived() > entry["size"]:
                os.unlink(partial)
            have = arrived()
            # Not opened to append: the library may cut the file back where a server knows no ranges.
            with open(partial, "r+b" if have else "wb", opener=models.no_link) as stream:
                stream.seek(have)
                self.http_get(url, stream, resume_size=have, headers=headers, expected_size=entry["size"])
            if arrived() != entry["size"]:
                raise ConnectionError(f"{arrived()} of {entry['size']} bytes arrived")

        def get_large():
            # By Xet, of which the library has no parts to go on with.
            path = self.library.hf_hub_download(
                self.repo,
                entry["name"],
                revision=commit,
                endpoint=self.endpoint,
                token=self.token,
                local_dir=self.job["home"],
            )
            os.replace(path, partial)

        large = entry["size"] > LARGE
        self.patiently(entry["name"], get_large if large else get, arrived)
        return partial

    def file(self, entry, commit):
        """Bring one file, or take what is there; returns its entry with hashes of the whole and of its pieces."""
        folder, name = self.job["folder"], entry["name"]
        target = os.path.join(folder, name)
        if os.path.isfile(target) and os.path.getsize(target) == entry["size"]:
            described = fanout.describe(target, name)
            if not self.wrong(entry, described, target):
                return {**entry, **described}
            self.log(f"{name} in {folder} is not the file that the hub has: it is fetched again")
        for last in (False, True):
            partial = self.download(entry, commit, target)
            described = fanout.describe(partial, name)
            problem = self.wrong(entry, described, partial)
            if not problem:
                models.keep_file(partial, target)
                self.log(f"{name}: {entry['size']} bytes, verified")
                return {**entry, **described}
            os.unlink(partial)
            self.log(f"{name} {problem}" + ("" if last else "; once more from its beginning"))
        raise models.ModelError(
            f"{name} of {self.repo} came twice from {self.endpoint} and {problem}. A mirror or proxy on the way alters "
            "or mixes up files: check model_store_endpoint and model_store_http_proxy"
        )

    @staticmethod
    def wrong(entry, described, path):
        if entry.get("sha256") and described["sha256"] != entry["sha256"]:
            return f"has the sha256 {described['sha256']} instead of {entry['sha256']}"
        if entry.get("git") and models.git_blob(path) != entry["git"]:
            return f"is not the blob {entry['git']} that the hub lists"
        return ""

    def fetch(self):
        listing = self.job["listing"]
        # The large ones first, so that no worker is left alone with one at the end.
        order = sorted(listing["files"], key=lambda entry: -entry["size"])
        pool = concurrent.futures.ThreadPoolExecutor(self.job["workers"])
        futures = [pool.submit(self.file, entry, listing["commit"]) for entry in order]
        try:
            done = [future.result() for future in concurrent.futures.as_completed(futures)]
        except BaseException:
            # Told at once: the transfers that still run end with the process.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        return {**listing, "files": sorted(done, key=lambda entry: entry["name"])}


def end_with(parent):
    """A module that is killed takes its child with it; the lock on the folder is held until then."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main():
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    job = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    # Whatever a library prints is no result.
    os.dup2(2, 1)
    try:
        hub = Hub(job)
        result = hub.fetch() if job.get("listing") else hub.listing()
    except models.ModelError as error:
        result = {"error": str(error)}
    except OSError as error:
        result = {"error": models.no_space(error, job["folder"]) or models.os_text(error)}
    except ImportError as error:
        result = {"error": f"the release has no huggingface_hub that can be used ({error}): run playbooks/runtime.yml"}
    with contextlib.suppress(BrokenPipeError):
        output.write(json.dumps(result) + "\n")
        output.flush()
    # Threads may still sit in a transfer that nobody wants any more.
    os._exit(0)


if __name__ == "__main__":
    main()
