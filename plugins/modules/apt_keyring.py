#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
---
module: apt_keyring
short_description: Put keys of package repositories in place, checked before they are trusted
version_added: 0.1.0
description:
  - Fetches each key that is not in place yet, compares its SHA-256 and its fingerprint with those given, and only then
    writes it where C(Signed-By) of a source names it.
  - A file that holds any key beside the one with the given fingerprint is refused, since apt would trust both.
  - What is in place is checked again in each run, without the network.
  - Needs neither gpg nor python3-apt.
author:
  - The ironrack authors
options:
  keys:
    description: The keys.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description:
          - Where the key goes; its folder is created. A name that ends in C(.asc), as the key is written with armor.
        type: path
        required: true
      url:
        description: Where the key comes from, a URL (V(https), V(http), V(file)) or the path of a file on the host.
        type: str
        required: true
      sha256:
        description: SHA-256 of the file at O(keys[].url).
        type: str
      fingerprint:
        description: Fingerprint of the primary key, 40 hexadecimal digits in upper case.
        type: str
      variable:
        description: Variable that the address came from, for messages.
        type: str
  timeout:
    description: Seconds after which a download that does not move is given up.
    type: int
    default: 30
attributes:
  check_mode:
    description: Fetches nothing; a key that is not in place is reported as one that would be written.
    support: full
  diff_mode:
    description: Shows the fingerprints before and after.
    support: full
"""

EXAMPLES = r"""
- name: Trust NVIDIA's repository
  ironrack.vllm.apt_keyring:
    keys:
      - path: /etc/apt/keyrings/nvidia-cuda.asc
        url: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/3bf863cc.pub
        fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
"""

RETURN = r"""
changed_paths:
  description: Files that were (or in check mode would be) written.
  returned: success
  type: list
  elements: str
"""

import base64
import binascii
import hashlib
import os
import re
import struct
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

# A key is a few kilobytes; whatever is larger is something else.
LIMIT = 1 << 20
PUBLIC_KEY = 6
DISTRUST = "; it is not trusted. Find out whose key it is, then correct the address or what is asked of the key"

NO_KEY = (
    "is no OpenPGP key: see what is there (a page of a proxy or of a login, perhaps), then correct the address, or let"
    " this host reach it"
)


class KeyProblem(Exception):
    """What is wrong with a key, and the remedy."""


def binary(data):
    """The packets of a key file, whether it has armor or not."""
    if data[:1] and data[0] & 0x80:
        return data
    blocks = re.findall(
        rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(.*?)-----END PGP PUBLIC KEY BLOCK-----", data, re.DOTALL
    )
    if not blocks:
        raise KeyProblem(NO_KEY)
    packets = b""
    for block in blocks:
        # Headers end with an empty line; a line that begins with = is a checksum.
        _, _, body = block.replace(b"\r", b"").partition(b"\n\n") if b":" in block else (b"", b"", block)
        lines = [line for line in body.split() if not line.startswith(b"=")]
        try:
            packets += base64.b64decode(b"".join(lines), validate=True)
        except binascii.Error:
            raise KeyProblem("has a damaged armor") from None
    return packets


def armored(packets):
    """Packets as text, the form that apt expects of a file named .asc."""
    text = base64.b64encode(packets).decode()
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    checksum = base64.b64encode(struct.pack(">I", crc24(packets))[1:]).decode()
    begin, end = (f"-----{word} PGP PUBLIC KEY BLOCK-----" for word in ("BEGIN", "END"))
    return "\n".join([begin, "", *lines, f"={checksum}", end, ""]).encode()


def crc24(data):
    """Checksum of armor (RFC 4880, 6.1)."""
    value = 0xB704CE
    for byte in data:
        value ^= byte << 16
        for _ in range(8):
            value <<= 1
            if value & 0x1000000:
                value ^= 0x1864CFB
    return value


def body_length(data, at, tag_byte):
    """(length of a packet's body, where it begins)"""
    if tag_byte & 0x40:
        first = data[at]
        if first < 192:
            return first, at + 1
        if first < 224:
            return ((first - 192) << 8) + data[at + 1] + 192, at + 2
        if first == 255:
            return struct.unpack_from(">I", data, at + 1)[0], at + 5
        raise KeyProblem(NO_KEY)
    form = {0: ">B", 1: ">H", 2: ">I"}.get(tag_byte & 3)
    if form is None:
        raise KeyProblem(NO_KEY)
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)


def fingerprints(packets):
    """Fingerprints of the primary keys, of version 4 as all that sign repositories today."""
    found, at = [], 0
    try:
        while at < len(packets):
            tag_byte = packets[at]
            if not tag_byte & 0x80:
                raise KeyProblem(NO_KEY)
            tag = tag_byte & 0x3F if tag_byte & 0x40 else (tag_byte >> 2) & 0x0F
            length, start = body_length(packets, at + 1, tag_byte)
            body = packets[start : start + length]
            if len(body) < length:
                raise KeyProblem("is cut off")
            if tag == PUBLIC_KEY:
                if body[:1] != b"\x04":
                    raise KeyProblem(f"is a key of version {body[0] if body else '?'}, only version 4 is known here")
                data = b"\x99" + struct.pack(">H", length) + body
                # Not a choice of ours: this is how fingerprints of version 4 are defined.
                found.append(hashlib.sha1(data).hexdigest().upper())  # noqa: S324 - how OpenPGP makes a fingerprint
            at = start + length
    except (IndexError, struct.error):
        raise KeyProblem("is cut off") from None
    if not found:
        raise KeyProblem("holds no public key")
    return found


def check(data, key):
    """Raises what is wrong with the bytes of a key file; returns its packets."""
    packets = binary(data)
    found = fingerprints(packets)
    if key["fingerprint"] and set(found) != {key["fingerprint"]}:
        raise KeyProblem(f"holds {', '.join(found)}, wanted is {key['fingerprint']} alone{DISTRUST}")
    if key["sha256"]:
        sums = [hashlib.sha256(form).hexdigest() for form in (data, packets)]
        if key["sha256"] not in sums:
            raise KeyProblem(f"has SHA-256 {sums[0]}, wanted is {key['sha256']}{DISTRUST}")
    return packets


def fetch(key, timeout):
    """The bytes at a key's address."""
    url = key["url"]
    try:
        if url.startswith("/"):
            with open(url, "rb") as handle:
                return handle.read(LIMIT)
        return open_url(url, timeout=timeout, http_agent="ironrack").read(LIMIT)
    except Exception as error:  # of urllib, ssl, socket: all mean the same here
        raise KeyProblem(f"cannot be fetched: {error}; check the address, the network and the proxy") from error


def in_place(key):
    """(the key's file, None), or (None, what is wrong with the file that is there)"""
    try:
        with open(key["path"], "rb") as handle:
            data = handle.read(LIMIT)
    except FileNotFoundError:
        return None, None
    try:
        check(data, key)
    except KeyProblem as problem:
        return None, str(problem)
    return data, None


def write(path, data):
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, fresh = tempfile.mkstemp(prefix=".ironrack-new-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            # apt reads it as the user _apt.
            os.fchmod(stream.fileno(), 0o644)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise


def main():
    module = AnsibleModule(
        argument_spec={
            "keys": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "url": {"type": "str", "required": True},
                    "sha256": {"type": "str"},
                    "fingerprint": {"type": "str"},
                    "variable": {"type": "str"},
                },
            },
            "timeout": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    changed, diffs = [], []

    def fail(message):
        module.fail_json(msg=message, changed=bool(changed), changed_paths=changed)

    for key in module.params["keys"]:
        if not key["path"].endswith(".asc"):
            fail(f"{key['path']}: the name of a key's file must end in .asc; correct keys[].path")
        after = key["fingerprint"] or "a key"
        try:
            data, wrong = in_place(key)
            if data is not None:
                continue
            if not module.check_mode:
                fetched = fetch(key, module.params["timeout"])
                packets = check(fetched, key)
                after = ", ".join(fingerprints(packets))
                write(key["path"], armored(packets) if packets == fetched else fetched)
        except KeyProblem as problem:
            origin = f" (of {key['variable']})" if key["variable"] else ""
            fail(f"the key {key['url']}{origin} {problem}")
        except OSError as error:
            fail(f"{key['path']}: {error.strerror}; keys[].path must name a file that can be written")
        changed.append(key["path"])
        diffs.append(
            {
                "before_header": key["path"],
                "after_header": key["path"],
                "before": f"{wrong}\n" if wrong else "",
                "after": f"{after}\n",
            }
        )
    result = {"changed": bool(changed), "changed_paths": changed}
    if module._diff:
        result["diff"] = diffs
    module.exit_json(**result)


if __name__ == "__main__":
    main()
