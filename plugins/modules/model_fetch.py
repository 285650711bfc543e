#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_fetch
short_description: Bring models to the nodes, once into the site and from there node to node
version_added: 0.1.0
description:
  - >-
    A model is fetched by one node, from the hub (with the huggingface_hub of the release) or from a mirror, held
    against the sizes and hashes that are published with it, and handed from node to node. Each file goes to
    C(<name>.part) first; a transfer that broke goes on where it stopped. C(ironrack-model.json), with all names, sizes
    and hashes, is written last.
  - >-
    V(listed), on the node that fetches, finds out what the model consists of. V(room) refuses when the disk of a node
    is too small. V(fetched) fetches, and serves the files to the others. V(received) takes them from the nodes given,
    and hands them on meanwhile. V(finished) removes old revisions if it may, and says what is there now. V(stopped)
    ends the node's server, also after a failure.
  - Progress in bytes, with the time that is left, is written to O(log_path) on the node.
author:
  - The ironrack authors
options:
  state:
    description: What to do.
    type: str
    choices: [listed, room, fetched, received, finished, stopped]
    required: true
  models:
    description: The models that this node has to do with.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Folder of the revision.
        type: path
        required: true
      repo:
        description: Repository, as V(org/name).
        type: str
        required: true
      revision:
        description: Branch, tag or commit.
        type: str
        required: true
      suspects:
        description: Files of this node that were found to be wrong. An empty name stands for all of them.
        type: list
        elements: str
        default: []
      sources:
        description: With O(state=received), base URLs of the nodes to take it from, the nearest first.
        type: list
        elements: str
        default: []
      starve:
        description: Seconds after which a source that has nothing new itself is left for the next.
        type: int
        default: 60
  listings:
    description: What V(listed) or V(fetched) returned.
    type: dict
    default: {}
  store:
    description: Folder that holds all models of the node, as C(<org>/<name>/<revision>).
    type: path
    required: true
  endpoint:
    description: URL of the hub.
    type: str
    default: https://huggingface.co
  mirror:
    description: URL of a mirror to use in place of the hub.
    type: str
    default: ""
  mirror_login:
    description: Name and password for the mirror, as V(name:password).
    type: str
    default: ""
  token:
    description: Token for the hub. It is handed to the program that fetches through a pipe.
    type: str
    default: ""
  token_file:
    description: File on the node with the token, readable by root alone.
    type: str
    default: ""
  ignore:
    description: Patterns of files that are left out, beside those that no engine reads.
    type: list
    elements: str
    default: []
  http_proxy:
    description: Proxy for hub and mirror.
    type: str
    default: ""
  ca_bundle:
    description: File on the node with the certificate authorities to trust, instead of the system's.
    type: str
    default: ""
  python:
    description: Python with huggingface_hub.
    type: path
    default: /opt/ironrack/current/bin/python
  workers:
    description: Files that are fetched at the same time.
    type: int
    default: 4
  reserve:
    description: With O(state=room), what stays free for the next revision, as a multiple of the largest model.
    type: float
    default: 1.0
  serve:
    description: How this node hands files on.
    type: dict
    suboptions:
      address:
        description: Address to listen on.
        type: str
        required: true
      port:
        description: Port to listen on.
        type: int
        required: true
      lifetime:
        description: Seconds after which the server ends in any case.
        type: int
        default: 86400
  planned:
    description: With O(state=finished), folders that are in the plan and never removed.
    type: list
    elements: path
    default: []
  keep:
    description: With O(state=finished), old revisions of a repository to keep. Negative keeps all of them.
    type: int
    default: -1
  verify:
    description: With O(state=finished), what the digests are made of, as in M(ironrack.vllm.model_check).
    type: str
    choices: [sizes, full]
    default: sizes
  log_path:
    description: Log file on the node.
    type: path
    default: /var/log/ironrack-models.log
attributes:
  check_mode:
    description: Says what would be done. What a model consists of is asked if the node is ready to ask.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Find out what the model consists of
  ironrack.vllm.model_fetch:
    state: listed
    store: /var/lib/ironrack/models
    models:
      - path: /var/lib/ironrack/models/Qwen/Qwen3-8B/b968826d9c46dd6066d109eabc6255188de91218
        repo: Qwen/Qwen3-8B
        revision: b968826d9c46dd6066d109eabc6255188de91218
"""

RETURN = r"""
listings:
  description: By folder, the commit, and names, sizes and hashes of its files.
  returned: O(state=listed) and O(state=fetched)
  type: dict
models:
  description: By folder, what M(ironrack.vllm.model_check) would say now.
  returned: O(state=finished)
  type: dict
missing_bytes:
  description: What this node still lacks.
  returned: O(state=room)
  type: int
actions:
  description: What was done.
  returned: always
  type: list
  elements: str
log:
  description: The log file on the node.
  returned: always
  type: str
"""

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.ironrack.vllm.plugins.module_utils import fanout, mirror, models
from ansible_collections.ironrack.vllm.plugins.module_utils import hub as hub_program

UNIT = "ironrack-model-server"
ENTRY = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from ansible_collections.ironrack.vllm.plugins.module_utils import hub; hub.main()"
)
# What goes into the manifest.
KEPT = ("repo", "revision", "commit", "files")
COMMIT = re.compile(r"[0-9a-f]{40}")


class Fetch:
    def __init__(self, module):
        self.module, self.params = module, module.params
        self.host = socket.gethostname()
        self.token = self.read_token()
        self.log = models.Log(
            self.params["log_path"], [self.token, self.params["mirror_login"], self.params["http_proxy"]]
        )
        self.actions, self.warnings, self.changed = [], [], False

    def read_token(self):
        path = self.params["token_file"]
        if self.params["token"] or not path or self.params["state"] not in ("listed", "fetched"):
            return self.params["token"]
        try:
            mode = os.stat(path).st_mode
            with open(path, encoding="utf-8") as stream:
                token = stream.read().strip()
        except (OSError, ValueError) as error:
            raise models.ModelError(
                f"model_store_token_file = {path} cannot be read on {self.host} ({error}): put the token there, or set "
                "model_store_token"
            ) from None
        if stat.S_IMODE(mode) & 0o077:
            raise models.ModelError(
                f"model_store_token_file = {path} on {self.host} has the mode {stat.S_IMODE(mode):04o}, others can "
                f"read the token: chmod 600 {path}"
            )
        if not token:
            raise models.ModelError(
                f"model_store_token_file = {path} on {self.host} is empty: put the token there, or set "
                "model_store_token_file to an empty text for models that need none"
            )
        # A server may repeat it in what it answers.
        self.module.no_log_values.add(token)
        return token

    def done(self, text):
        self.actions.append(text)
        self.changed = True
        if not self.module.check_mode:
            self.log(text)

    # -- listed

    def listed(self):
        return {
            "listings": {model["path"]: listing for model in self.params["models"] if (listing := self.list(model))}
        }

    def list(self, model):
        path = model["path"]
        found = models.look(path)
        here = {"source": "", "here": True}
        if found["state"] == "complete" and not model["suspects"]:
            return {**models.load_manifest(path), **here}
        if found["state"] == "foreign" and not model["suspects"]:
            # Somebody brought it to this node: the others get the same.
            files = [{"name": name, "size": os.path.getsize(os.path.join(path, name))} for name in found["files"]]
            return {"repo": model["repo"], "revision": model["revision"], "commit": "", "files": files, **here}
        # A name that moves is looked up once: what began with a commit goes on with it.
        begun = models.load_manifest(path, models.ARRIVING) or {}
        revision = begun.get("commit") or found["commit"] or model["revision"]
        if self.params["mirror"]:
            listing = self.mirror().listing(self.place(model), self.params["ignore"])
            source = self.mirror().base
        elif self.module.check_mode and not os.path.exists(self.params["python"]):
            return None
        else:
            listing = self.hub({**model, "revision": revision})
            source = self.params["endpoint"]
        if not COMMIT.fullmatch(model["revision"]) and listing["commit"]:
            self.warnings.append(
                f"{model['repo']}: the revision {model['revision']} is the commit {listing['commit']} today; set "
                "model.revision to it, so that a new deployment serves the same"
            )
        return {**listing, "repo": model["repo"], "revision": model["revision"], "source": source, "here": False}

    def place(self, model):
        return f"{model['repo']}/{model['revision']}"

    def mirror(self):
        params = self.params
        return mirror.Mirror(
            params["mirror"],
            self.log,
            login=params["mirror_login"],
            proxy=params["http_proxy"],
            ca_bundle=params["ca_bundle"],
        )

    def hub(self, model, listing=None, lock=None):
        """Run the part that needs huggingface_hub with the release's Python; its job goes through a pipe."""
        # In the archive that Ansible sends, or in the collection's folder.
        root = hub_program.__file__.split("/ansible_collections/", 1)[0]
        if lock is None:
            with tempfile.TemporaryDirectory(prefix="ironrack-hub-") as home:
                return self.hub_in(home, root, model, listing, [])
        # On the disk of the model, which the library may have to move files to, and under the lock of its folder.
        home = models.beside(model["path"], "hub")
        try:
            return self.hub_in(home, root, model, listing, [lock])
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def hub_in(self, home, root, model, listing, descriptors):
        params = self.params
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": home,
            "LC_ALL": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
            if name in os.environ:
                environment[name] = os.environ[name]
        if params["http_proxy"]:
            environment.update(http_proxy=params["http_proxy"], https_proxy=params["http_proxy"])
        if params["ca_bundle"]:
            environment.update(SSL_CERT_FILE=params["ca_bundle"])
        job = {
            "endpoint": params["endpoint"].rstrip("/"),
            "repo": model["repo"],
            "revision": model["revision"],
            "token": self.token,
            "ignore": params["ignore"],
            "folder": model["path"],
            "home": home,
            "workers": max(params["workers"], 1),
            "log": params["log_path"],
            "listing": listing,
        }
        try:
            done = subprocess.run(
                [params["python"], "-I", "-c", ENTRY.format(root=root)],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
                check=False,
                pass_fds=descriptors,
            )
        except OSError as error:
            raise models.ModelError(
                f"{params['python']} does not run on {self.host} ({error.strerror}): playbooks/runtime.yml installs "
                "the runtime first; a node without it cannot be model_store_builder"
            ) from None
        try:
            result = json.loads(done.stdout)
        except ValueError:
            result = {"error": f"the program that fetches ended with status {done.returncode}:\n{done.stderr[-1500:]}"}
        if "error" in result:
            raise models.ModelError(result["error"])
        return result

    # -- room

    def room(self):
        """What was asked about in check mode may be unknown yet."""
        wanted = {model["path"]: self.of(model) for model in self.params["models"] if self.of(model)}
        return {"missing_bytes": models.check_room(wanted, self.params["reserve"]) if wanted else 0}

    def of(self, model):
        """The listing of a model, or None."""
        listing = self.params["listings"].get(model["path"])
        if listing is not None and not models.check_listing(listing):
            raise models.ModelError(f"the list of files of {model['repo']} is damaged: run again")
        return listing

    # -- fetched

    def fetched(self):
        listings = {}
        for model in self.params["models"]:
            listing = self.of(model)
            if listing is None:
                self.done(f"would fetch {model['repo']} to {model['path']}")
            elif self.module.check_mode:
                if not listing["here"]:
                    self.done(f"would fetch {_size(listing)} of {model['repo']} to {model['path']}")
                listings[model["path"]] = listing
            else:
                listings[model["path"]] = self.fetch(model, listing)
        if self.params["serve"] and not self.module.check_mode:
            # Also what comes to this node afterwards: it keeps its one server, and others wait for it there.
            arriving = {path: each for path, each in self.params["listings"].items() if models.check_listing(each)}
            self.serve({**arriving, **listings})
        return {"listings": listings}

    def fetch(self, model, found):
        path = model["path"]
        listing = {key: found[key] for key in KEPT}
        with models.locked(path, self.log) as lock:
            if found["here"]:
                return {**self.described(path, listing), "here": True}
            # Also here: the node that fetches may be none of those that were looked at.
            models.check_room({path: listing}, self.params["reserve"])
            models.begin(path, listing)
            self.log(f"fetching {model['repo']} {listing['commit']} from {found['source']} to {path}")
            try:
                with models.Progress(path, listing, self.log) as progress:
                    if self.params["mirror"]:
                        listing = self.from_mirror(model, listing)
                    else:
                        listing = self.hub(model, listing, lock)
            except OSError as error:
                raise models.ModelError(models.no_space(error, path) or models.os_text(error)) from None
            self.finish(path, listing)
        self.done(f"fetched {model['repo']} to {path}: {progress.summary()}")
        return {**listing, "here": True}

    def from_mirror(self, model, listing):
        source, path = self.mirror(), model["path"]
        files = [
            source.file(self.place(model), entry, os.path.join(path, entry["name"]))
            for entry in sorted(listing["files"], key=lambda entry: -entry["size"])
        ]
        return {**listing, "files": sorted(files, key=lambda entry: entry["name"])}

    def described(self, path, listing):
        """The listing of a model that is here, with the hashes that the others need; worked out once."""
        if all("pieces" in entry for entry in listing["files"]) and os.path.exists(os.path.join(path, models.MANIFEST)):
            return listing
        files = []
        for entry in listing["files"]:
            found = fanout.describe(os.path.join(path, entry["name"]), entry["name"])
            if found["sha256"] != entry.get("sha256", found["sha256"]):
                raise models.ModelError(
                    f"{entry['name']} in {path} on {self.host} has not the hash of its manifest: run again with "
                    "-e model_store_verify=full, which fetches it anew"
                )
            files.append({**entry, **found})
        listing = {**listing, "files": files}
        self.finish(path, listing)
        self.done(f"described {path}, {_size(listing)}")
        return listing

    def finish(self, path, listing):
        """The hashes are right; now the files must also be a model."""
        try:
            models.finish(path, listing)
            models.inspect(path)
        except models.ModelError as error:
            models.begin(path, listing)
            raise models.ModelError(
                f"{listing['repo']} {listing['commit'] or listing['revision']} arrived as it is published, but cannot "
                f"be served from {path}: {error}. Choose another revision, or correct model_store_ignore"
            ) from None

    # -- received

    def serve(self, listings):
        names = [f"{self.relative(path)}/{e['name']}" for path, listing in listings.items() for e in listing["files"]]
        serve = self.params["serve"]
        try:
            fanout.serve(UNIT, self.params["store"], names, serve["address"], serve["port"], lifetime=serve["lifetime"])
        except (fanout.FanoutError, OSError) as error:
            told = models.os_text(error) if isinstance(error, OSError) else error
            self.warnings.append(
                f"{self.host} hands no models on, the others ask further up (model_store_serve_port): {told}"
            )

    def relative(self, path):
        return os.path.relpath(path, self.params["store"])

    def received(self):
        work = self.params["models"]
        if self.module.check_mode:
            for model in work:
                self.done(f"would receive {model['repo']} to {model['path']}")
            return {}
        for model in work:
            models.prepare(model["path"], [entry["name"] for entry in self.of(model)["files"]])
        if self.params["serve"]:
            self.serve({model["path"]: self.of(model) for model in work})
        for model in work:
            self.receive(model)
        return {}

    def receive(self, model):
        """Take what is missing or was found wrong; of a folder that nobody vouches for, look at all."""
        path, store = model["path"], self.params["store"]
        listing = {key: self.of(model)[key] for key in KEPT}
        with models.locked(path, self.log):
            known = os.path.exists(os.path.join(path, models.ARRIVING)) or models.load_manifest(path) is not None
            models.begin(path, listing)
            lacking = set(models.faults(path, listing)) | set(model["suspects"])
            if not known or "" in lacking:
                lacking = {entry["name"] for entry in listing["files"]}
            files = [
                {**entry, "name": f"{self.relative(path)}/{entry['name']}"}
                for entry in listing["files"]
                if entry["name"] in lacking
            ]
            try:
                came = fanout.fetch(
                    files,
                    model["sources"],
                    store,
                    self.log,
                    lambda state: self.log(
                        f"{path}: {state['done']} of {state['total']} bytes; {fanout.progress_text(state)}"
                    ),
                    starve=model["starve"],
                )
            except fanout.FanoutError as error:
                raise models.ModelError(
                    f"{path} could not be taken from another node: {error}. Check that a firewall lets "
                    "model_store_serve_port through between the nodes"
                ) from None
            except OSError as error:
                stays = "Files that are whole stay, the one that did not fit was removed"
                raise models.ModelError(models.no_space(error, path, stays) or models.os_text(error)) from None
            self.warnings += came["wrong"]
            self.finish(path, listing)
        self.done(
            f"received {len(files)} of {len(listing['files'])} files of {model['repo']}, {came['bytes']} bytes in "
            f"{models.duration(came['seconds'])}, from {', '.join(came['by_source']) or 'its own disk'}"
        )

    # -- finished

    def finished(self):
        params = self.params
        if self.module.check_mode:
            return {"models": {}}
        if params["keep"] >= 0:
            for path in models.surplus(models.revisions(params["store"], params["planned"]), params["keep"]):
                self.remove(path)
        full = params["verify"] == "full"
        found = {m["path"]: models.look(m["path"], full, verified=True) for m in params["models"]}
        for path, about in found.items():
            self.warnings += [f"{path}: {note}" for note in about.pop("notes", [])]
        return {"models": found}

    def remove(self, path):
        if models.in_use(path):
            self.warnings.append(f"{path} is not removed, a process on {self.host} still uses it")
            return
        try:
            with models.locked(path, self.log, patience=0):
                # The manifests first: what is left of a killed removal must not look complete.
                for name in (models.MANIFEST, models.ARRIVING):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(path, name))
                shutil.rmtree(path)
                shutil.rmtree(models.beside(path, "hub"), ignore_errors=True)
                os.unlink(models.beside(path, "lock"))
        except models.ModelError as error:
            self.warnings.append(f"{path} is not removed: {error}")
            return
        except OSError as error:
            # Its manifest is gone first, so no later run takes it for a model, nor tries again.
            self.warnings.append(f"{path} on {self.host} is not wholly removed ({models.os_text(error)}): remove it")
            return
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))
        self.done(f"removed the old revision {path}")

    # -- stopped

    def stopped(self):
        if not self.module.check_mode:
            fanout.stop(UNIT)
        return {}


def _size(listing):
    return f"{sum(entry['size'] for entry in listing['files']) / models.GB:.2f} GB"


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "required": True,
                "choices": ["listed", "room", "fetched", "received", "finished", "stopped"],
            },
            "models": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "repo": {"type": "str", "required": True},
                    "revision": {"type": "str", "required": True},
                    "suspects": {"type": "list", "elements": "str", "default": []},
                    "sources": {"type": "list", "elements": "str", "default": []},
                    "starve": {"type": "int", "default": 60},
                },
            },
            "listings": {"type": "dict", "default": {}},
            "store": {"type": "path", "required": True},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "mirror": {"type": "str", "default": ""},
            "mirror_login": {"type": "str", "default": "", "no_log": True},
            "token": {"type": "str", "default": "", "no_log": True},
            "token_file": {"type": "str", "default": "", "no_log": False},
            "ignore": {"type": "list", "elements": "str", "default": []},
            "http_proxy": {"type": "str", "default": "", "no_log": True},
            "ca_bundle": {"type": "str", "default": ""},
            "python": {"type": "path", "default": "/opt/ironrack/current/bin/python"},
            "workers": {"type": "int", "default": 4},
            "reserve": {"type": "float", "default": 1.0},
            "serve": {
                "type": "dict",
                "options": {
                    "address": {"type": "str", "required": True},
                    "port": {"type": "int", "required": True},
                    "lifetime": {"type": "int", "default": 86400},
                },
            },
            "planned": {"type": "list", "elements": "path", "default": []},
            "keep": {"type": "int", "default": -1},
            "verify": {"type": "str", "choices": ["sizes", "full"], "default": "sizes"},
            "log_path": {"type": "path", "default": "/var/log/ironrack-models.log"},
        },
        supports_check_mode=True,
    )
    try:
        fetch = Fetch(module)
    except models.ModelError as error:
        module.fail_json(msg=str(error))
    common = {"log": module.params["log_path"]}
    try:
        result = getattr(fetch, module.params["state"])()
    except (models.ModelError, OSError) as error:
        if module.params["state"] == "received":
            fanout.stop(UNIT)  # those who wait for this node go on to the next source
        told = models.os_text(error) if isinstance(error, OSError) else error
        module.fail_json(
            msg=f"{told} (on {fetch.host}; log: {module.params['log_path']})", actions=fetch.actions, **common
        )
    for warning in fetch.warnings:
        module.warn(warning)
    module.exit_json(changed=fetch.changed, actions=fetch.actions, **result, **common)


if __name__ == "__main__":
    main()
