"""SSH of a node: what sshd is told, which host keys are pinned, and who logs in from node to node.

Files of keys are handled as text: lines of others stay as they are and where they are.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import difflib
import hashlib
import hmac
import ipaddress
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from ..planner.plan import natural_key

MODES = ("off", "hardened")
DEFAULTS: dict[str, Any] = {
    "mode": "hardened",
    "settings": {},
    "allow_users": [],
    "confirm_seconds": 60,
    "authorized_keys": [],
    "authorized_keys_exclusive": False,
    "between_nodes": False,
    "between_nodes_user": "ironrack-mpi",
    "accept_changed_host_keys": [],
    "host_key_fingerprint": "",
}

# Ciphers and the like are left to OpenSSH, whose own lists are sound and grow with it.
HARDENED: dict[str, str] = {
    "PermitRootLogin": "prohibit-password",
    "PubkeyAuthentication": "yes",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "PermitEmptyPasswords": "no",
    "HostbasedAuthentication": "no",
    "IgnoreRhosts": "yes",
    "StrictModes": "yes",
    "PermitUserEnvironment": "no",
    "X11Forwarding": "no",
    "PermitTunnel": "no",
    "GatewayPorts": "no",
    "LoginGraceTime": "30",
    # Says which key logged in.
    "LogLevel": "VERBOSE",
}
PASSWORDS = ("PasswordAuthentication", "KbdInteractiveAuthentication")
# Whoever has none of them does not log in at all.
_WAYS_IN = ("PubkeyAuthentication", *PASSWORDS, "HostbasedAuthentication", "GSSAPIAuthentication")

# Global keywords of sshd_config(5), OpenSSH 8.9 to 10.
KEYWORDS: tuple[str, ...] = tuple(
    """
    AcceptEnv AllowAgentForwarding AllowGroups AllowStreamLocalForwarding AllowTcpForwarding AuthenticationMethods
    AuthorizedKeysCommand AuthorizedKeysCommandUser AuthorizedPrincipalsCommand AuthorizedPrincipalsCommandUser
    AuthorizedPrincipalsFile Banner CASignatureAlgorithms ChannelTimeout ChrootDirectory Ciphers ClientAliveCountMax
    ClientAliveInterval Compression DebianBanner DenyGroups DenyUsers DisableForwarding ExposeAuthInfo FingerprintHash
    ForceCommand GatewayPorts GSSAPIAuthentication GSSAPICleanupCredentials GSSAPIKeyExchange GSSAPIKexAlgorithms
    GSSAPIStoreCredentialsOnRekey GSSAPIStrictAcceptorCheck HostbasedAcceptedAlgorithms HostbasedAuthentication
    HostbasedUsesNameFromPacketOnly HostCertificate HostKeyAgent HostKeyAlgorithms IgnoreRhosts IgnoreUserKnownHosts
    IPQoS KbdInteractiveAuthentication KerberosAuthentication KerberosGetAFSToken KerberosOrLocalPasswd
    KerberosTicketCleanup KexAlgorithms LoginGraceTime LogLevel LogVerbose MACs MaxAuthTries MaxSessions MaxStartups
    ModuliFile PAMServiceName PasswordAuthentication PermitEmptyPasswords PermitListen PermitOpen PermitRootLogin
    PermitTTY PermitTunnel PermitUserEnvironment PermitUserRC PerSourceMaxStartups PerSourceNetBlockSize
    PerSourcePenalties PerSourcePenaltyExemptList PrintLastLog PrintMotd PubkeyAcceptedAlgorithms PubkeyAuthentication
    PubkeyAuthOptions RDomain RefuseConnection RekeyLimit RequiredRSASize RevokedKeys SecurityKeyProvider SetEnv
    StreamLocalBindMask StreamLocalBindUnlink StrictModes SyslogFacility TCPKeepAlive TrustedUserCAKeys
    UnusedConnectionTimeout UseDNS UsePAM VersionAddendum X11DisplayOffset X11Forwarding X11UseLocalhost XAuthLocation
    """.split()  # noqa: SIM905 (a hundred names read better as text)
)
# Keywords that are not for this file, and what to do instead.
REFUSED: dict[str, str] = {
    "AllowUsers": "use ssh_allow_users, which is checked against the user that Ansible logs in as",
    "AuthorizedKeysFile": "the keys of this role are in ~/.ssh/authorized_keys; leave it out",
    "Include": "write the file into /etc/ssh/sshd_config.d yourself, under a name after 10-ironrack.conf",
    "Match": "write the block into a file of your own in /etc/ssh/sshd_config.d; blocks are respected",
    "HostKey": "put it into /etc/ssh/sshd_config; this role pins whatever keys sshd has",
    "PidFile": "leave it out",
    "Subsystem": "change it in /etc/ssh/sshd_config; a second one of a name is an error there",
    **dict.fromkeys(
        ("Port", "ListenAddress", "AddressFamily"),
        "move sshd by hand and in one go with ansible_port and firewall_ssh_ports; a reload does not move its socket",
    ),
}
_BY_LOWER = {keyword.lower(): keyword for keyword in (*KEYWORDS, *REFUSED)}
_COMMA_LISTS = re.compile("Algorithms$|^Ciphers$|^MACs$|^PerSourcePenaltyExemptList$", re.IGNORECASE)

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_USER_PATTERN = re.compile(r"[^\s@#\"']+(@[^\s@#\"']+)?")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)
# How many parts a key of a type has, the type itself among them.
_KEY_PARTS = dict(zip(_KEY_TYPES, (2, 3, 3, 3, 3, 3, 4), strict=True))
MARK = "ironrack:"

# What may stand before a key in authorized_keys; with another word sshd passes over the whole line.
_OPTION = (
    r"(?i:cert-authority|command|environment|expiry-time|from|permitlisten|permitopen|principals|restrict|tunnel"
    r"|verify-required|(?:no-)?(?:agent-forwarding|port-forwarding|pty|touch-required|user-rc|x11-forwarding))"
    r'(?:="(?:[^"\\]|\\.)*")?'
)
_AUTHORIZED = re.compile(
    rf"(?:{_OPTION}(?:,{_OPTION})*[ \t]+)?(?P<key>(?:{'|'.join(map(re.escape, _KEY_TYPES))})[ \t]+\S+)"
    r"(?:[ \t][^\0\n\r]*)?"
)

_FLAG = ("yes", "no")
_FORWARDING = (*_FLAG, "all", "local", "remote")
# Keywords that take one of few words. sshd would refuse another one only when the node has been changed already.
_WORDS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        """
        AllowAgentForwarding DisableForwarding ExposeAuthInfo GSSAPIAuthentication GSSAPICleanupCredentials
        HostbasedAuthentication HostbasedUsesNameFromPacketOnly IgnoreUserKnownHosts KbdInteractiveAuthentication
        PasswordAuthentication PermitEmptyPasswords PermitTTY PermitUserRC PrintLastLog PrintMotd PubkeyAuthentication
        StreamLocalBindUnlink StrictModes TCPKeepAlive UseDNS UsePAM X11Forwarding X11UseLocalhost
        """.split(),  # noqa: SIM905 (as above)
        _FLAG,
    ),
    "AllowStreamLocalForwarding": _FORWARDING,
    "AllowTcpForwarding": _FORWARDING,
    "Compression": (*_FLAG, "delayed"),
    "FingerprintHash": ("md5", "sha256"),
    "GatewayPorts": (*_FLAG, "clientspecified"),
    "IgnoreRhosts": (*_FLAG, "shosts-only"),
    "LogLevel": ("QUIET", "FATAL", "ERROR", "INFO", "VERBOSE", "DEBUG", "DEBUG1", "DEBUG2", "DEBUG3"),
    "PermitRootLogin": (*_FLAG, "prohibit-password", "without-password", "forced-commands-only"),
    "PermitTunnel": (*_FLAG, "point-to-point", "ethernet"),
}
_NUMBERS = ("ClientAliveCountMax", "MaxAuthTries", "MaxSessions", "RequiredRSASize", "X11DisplayOffset")
_TIMES = ("ClientAliveInterval", "LoginGraceTime")


class SshError(ValueError):
    """Names what is wrong with the variables of ssh, or with a key, and the remedy; one line a problem."""


@dataclass(frozen=True)
class Key:
    """A public key."""

    kind: str
    blob: str

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(base64.b64decode(self.blob)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    def __str__(self) -> str:
        return f"{self.kind} {self.blob}"


def parse_key(line: str) -> Key | None:
    """The key in a line of a .pub, authorized_keys or known_hosts file; None where there is none."""
    words = line.split()
    if words and words[0].startswith("#"):
        return None
    for kind, blob in pairwise(words):
        if kind in _KEY_TYPES:
            try:
                parts = _parts(base64.b64decode(blob, validate=True))
            except (binascii.Error, ValueError):
                return None
            # The key itself begins with its type.
            whole = len(parts) == _KEY_PARTS[kind] and parts[0] == kind.encode() and all(parts[1:])
            return Key(kind, blob) if whole else None
    return None


def _parts(inner: bytes) -> list[bytes]:
    """What a key is made of, each part with its length before it; ValueError where one is cut short."""
    found = []
    while inner:
        length = int.from_bytes(inner[:4], "big")
        if len(inner) < 4 + length:
            raise ValueError("cut short")
        found.append(inner[4 : 4 + length])
        inner = inner[4 + length :]
    return found


def lines_of(text: str) -> list[str]:
    """Lines as those who read such a file see them: splitlines() would cut at a form feed or U+2028 too."""
    return text.removesuffix("\n").split("\n") if text else []


def parse_keys(text: str) -> list[Key]:
    found = [key for key in map(parse_key, text.splitlines()) if key]
    return sorted(dict.fromkeys(found), key=lambda key: (_KEY_TYPES.index(key.kind), key.blob))


# Variables


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    complete = {**DEFAULTS, **settings}
    # What YAML makes of an `off` without quotes.
    if complete["mode"] in (False, "False"):
        complete["mode"] = "off"
    return complete


def _check_settings(settings: Any) -> list[str]:
    if not isinstance(settings, Mapping):
        return [f"ssh_settings = {settings}: is no dictionary -> write keywords of sshd_config and their values"]
    problems = []
    seen: dict[str, str] = {}
    for name, value in settings.items():
        variable = f"ssh_settings.{name}"
        keyword = _BY_LOWER.get(str(name).lower())
        if keyword is None:
            close = difflib.get_close_matches(str(name).lower(), _BY_LOWER, 1)
            remedy = f"did you mean {_BY_LOWER[close[0]]}?" if close else "see sshd_config(5) for the keywords"
            problems.append(f"{variable} = {value}: is no keyword of sshd_config -> {remedy}")
        elif keyword in REFUSED:
            problems.append(f"{variable} = {value}: is not for this variable -> {REFUSED[keyword]}")
        elif keyword in seen:
            problems.append(f"{variable} = {value}: is there twice, as {seen[keyword]} too -> keep one")
        elif isinstance(value, Mapping) or value in ("", []):
            problems.append(f"{variable} = {value}: is no value -> give a word, a number, true, false or a list")
        elif re.search(r"[\0\n\r#]", _text(keyword, value)):
            problems.append(f"{variable} = {value!r}: has a line break or # in it -> give the value alone")
        elif value is not None and (remedy := _misfit(keyword, _text(keyword, value))):
            problems.append(f"{variable} = {value}: is no value of {keyword} -> {remedy}")
        seen.setdefault(keyword or str(name), str(name))
    return problems


def _misfit(keyword: str, text: str) -> str:
    """What to give instead of a value that sshd does not know; empty where it may know it."""
    words = _WORDS_OF.get(keyword)
    if words and text.lower() not in [word.lower() for word in words]:
        return f"choose {', '.join(words)}"
    if keyword in _NUMBERS and not re.fullmatch(r"\d{1,9}", text):
        return "give a number"
    if keyword in _TIMES and not re.fullmatch(r"(\d{1,9}[smhdwSMHDW]?)+", text):
        return "give seconds, or a time such as 2m"
    return ""


def _check_keys(keys: Any, exclusive: Any) -> list[str]:
    problems = []
    for number, entry in enumerate(keys):
        variable = f"ssh_authorized_keys[{number}]"
        text = str(entry)
        if "PRIVATE KEY" in text:
            # The value itself must not be shown.
            problems.append(f"{variable}: is a private key -> give the public one (the file with .pub)")
        elif not (found := _AUTHORIZED.fullmatch(text.strip())) or parse_key(found["key"]) is None:
            problems.append(
                f"{variable} = {text[:60]}: is no public key, or not the whole of one -> give one line of a .pub file"
            )
    if exclusive and not keys:
        problems.append(
            "ssh_authorized_keys_exclusive = true: with ssh_authorized_keys = [] nobody could log in -> list the keys"
        )
    return problems


def check(
    settings: Mapping[str, Any], nodes: Mapping[str, Any] | None = None, host: str = "", hosts: Iterable[str] = ()
) -> list[str]:
    """What is wrong with the variables, by themselves and with the plan. `hosts` are those of the inventory."""
    settings = _complete(settings)
    problems = []
    if settings["mode"] not in MODES:
        problems.append(f"ssh_mode = {settings['mode']}: is not known -> choose one of {', '.join(MODES)}")
    problems += _check_settings(settings["settings"])
    problems += [
        f"ssh_allow_users = {entry}: is no user -> write ops, or ops@10.20.0.0/16"
        for entry in settings["allow_users"]
        if not _USER_PATTERN.fullmatch(str(entry))
    ]
    seconds = settings["confirm_seconds"]
    if isinstance(seconds, bool) or not str(seconds).isdigit() or not 15 <= int(seconds) <= 600:
        problems.append(
            f"ssh_confirm_seconds = {seconds}: is not between 15 and 600 -> a fresh connection needs some seconds, and"
            " somebody who is locked out should not wait long; take 60"
        )
    problems += _check_keys(settings["authorized_keys"], settings["authorized_keys_exclusive"])
    fingerprint = str(settings["host_key_fingerprint"] or "")
    if fingerprint and not _FINGERPRINT.fullmatch(fingerprint):
        problems.append(
            f"ssh_host_key_fingerprint = {fingerprint} ({host}): is no fingerprint -> write SHA256: and 43 characters,"
            " as ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints it on the console of the host"
        )
    known = set(hosts)
    problems += [
        f"ssh_accept_changed_host_keys = {entry}: is no host of the inventory -> name hosts as the inventory does"
        for entry in settings["accept_changed_host_keys"]
        if known and entry not in known
    ]
    if settings["between_nodes"]:
        user = str(settings["between_nodes_user"])
        if not _USER.fullmatch(user) or user == "root":
            problems.append(
                f"ssh_between_nodes_user = {user}: is no user for this -> name one that Linux accepts, and not root:"
                " whoever has one node would have them all"
            )
        node = (nodes or {}).get(host)
        if node is not None and not node.get("address"):
            problems.append(
                f"cluster_address = (not set) ({host}): the other nodes let it in from that address only -> set"
                " cluster_address, or ssh_between_nodes: false"
            )
    # Whom Ansible logs in as, where it does so by SSH and the inventory says it.
    if settings.get("login") and not problems:
        problems += locked_out(settings, str(settings["login"]), host)
    return problems


# sshd


def _text(keyword: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ("," if _COMMA_LISTS.search(keyword) else " ").join(map(str, value))
    return str(value).strip()


@dataclass(frozen=True)
class Connection:
    """What the node says of the present connection; addresses are empty where it is not one of SSH."""

    user: str
    client: str = ""
    server: str = ""
    port: int = 22
    home: str = ""

    @property
    def is_ssh(self) -> bool:
        return bool(self.client)


# Asked without becoming root: sudo drops the variable, and the user is another one then. One line, since the user's
# shell, which need not be sh, has to hand it on.
PROBE_SCRIPT = (
    'echo "user $(id -un)"; echo "home $HOME"; echo "ssh $SSH_CONNECTION";'
    " keys=$(cat /etc/ssh/sshd_config /etc/ssh/sshd_config.d/*.conf 2>/dev/null"
    " | sed -n 's/^[[:space:]]*[Hh]ost[Kk]ey[[:space:]][[:space:]]*//p');"
    " for key in ${keys:-/etc/ssh/ssh_host_ed25519_key /etc/ssh/ssh_host_ecdsa_key /etc/ssh/ssh_host_rsa_key};"
    ' do if [ -r "$key.pub" ]; then echo "key $(cat "$key.pub")"; fi; done'
)
PROBE = shlex.join(["/bin/sh", "-c", PROBE_SCRIPT])


def read_probe(text: str) -> tuple[Connection, list[Key]]:
    """What PROBE printed: the connection, and the host keys of the node."""
    found: dict[str, str] = {}
    keys = []
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if name == "key":
            keys.append(value)
        elif name in ("user", "home", "ssh"):
            found[name] = value
    words = found.get("ssh", "").split()
    user, home = found.get("user", ""), found.get("home", "")
    present = Connection(user, home=home)
    # sshd writes UNKNOWN where the other end is no address, as behind a program that hands the connection on.
    with contextlib.suppress(ValueError):
        client, _, server, port = words
        present = Connection(user, _address(client), _address(server), int(port), home)
    return present, parse_keys("\n".join(keys))


def _address(text: str) -> str:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(address)


def locked_out(settings: Mapping[str, Any], user: str, host: str) -> list[str]:
    """Why a user, as which Ansible logs in by SSH, could not do so again. What takes a look at the host is left out."""
    settings = _complete(settings)
    if settings["mode"] == "off":
        return []
    asked = {_BY_LOWER.get(str(name).lower(), str(name)): value for name, value in settings["settings"].items()}
    wanted = {name: _text(name, value).lower() for name, value in {**HARDENED, **asked}.items() if value is not None}
    problems = []
    if user == "root" and wanted.get("PermitRootLogin") in ("no", "forced-commands-only"):
        problems.append(
            f"ssh_settings.PermitRootLogin = {wanted['PermitRootLogin']}: Ansible logs in to {host} as root -> let it"
            " log in as another user (ansible_user) first, or take prohibit-password"
        )
    users = [str(entry) for entry in settings["allow_users"]]
    if users and not _named(user, users):
        problems.append(
            f"ssh_allow_users = {users}: Ansible logs in to {host} as {user}, which is not in it -> add {user}"
        )
    denied = asked.get("DenyUsers")
    if denied is not None and _named(user, _text("DenyUsers", denied).split()):
        problems.append(
            f"ssh_settings.DenyUsers = {denied}: Ansible logs in to {host} as {user}, which it shuts out -> take {user}"
            " out, or let Ansible log in as another user (ansible_user) first"
        )
    ways = [name for name in wanted if name in _WAYS_IN and wanted[name] != "no"]
    if not ways:
        problems.append(
            f"ssh_settings.PubkeyAuthentication = no: no way to log in to {host} is left -> leave it out, or allow one"
            f" of {', '.join(_WAYS_IN)}"
        )
    return problems


def _named(user: str, entries: Iterable[str]) -> bool:
    """Whether patterns of users name one, from whatever address."""
    return any(fnmatchcase(user, entry.partition("@")[0]) for entry in entries)


def sshd_config(settings: Mapping[str, Any], connection: Connection, host: str) -> tuple[str, list[str]]:
    """The drop-in of sshd for a host, empty where there is none to be, and what to know of it."""
    settings = _complete(settings)
    if settings["mode"] == "off":
        return "", []
    notes = []
    asked = {
        _BY_LOWER[str(name).lower()]: None if value is None else _text(_BY_LOWER[str(name).lower()], value)
        for name, value in settings["settings"].items()
    }
    wanted = {name: value for name, value in {**HARDENED, **asked}.items() if value is not None}
    if not connection.is_ssh:
        left = [name for name in PASSWORDS if name not in asked]
        for name in left:
            del wanted[name]
        if left:
            notes.append(
                f"{host}: this connection is not one of SSH, so nobody is known to get in by a key: logging in by"
                f" password stays as it is; ssh_settings can switch off {' and '.join(left)}"
            )
    users = [str(entry) for entry in settings["allow_users"]]
    if connection.is_ssh and (problems := locked_out(settings, connection.user, host)):
        raise SshError("\n".join(problems))
    if users and connection.is_ssh and settings["between_nodes"] and settings["between_nodes_user"] not in users:
        users.append(str(settings["between_nodes_user"]))
    if users:
        wanted["AllowUsers"] = " ".join(users)
    lines = [f"{name} {value}" for name, value in sorted(wanted.items())]
    return "\n".join(["# Managed by ironrack: change ssh_settings and ssh_allow_users instead.", *lines, ""]), notes


def passwords_off(text: str) -> bool:
    """Whether a drop-in leaves keys as the only way in."""
    return "\nPasswordAuthentication no\n" in text


# Host keys


def pattern(name: str, port: int) -> str:
    """A name as it stands in known_hosts."""
    return name if port == 22 else f"[{name}]:{port}"


def host_names(host: str, reached: str | None, port: int, address: str | None, own_port: int) -> list[str]:
    """Under what names a host's keys are looked for: by Ansible, by hand, and from the other nodes."""
    found = [pattern(host, port)]
    if reached:
        found.append(pattern(reached, port))
    if address:
        found += [pattern(host, own_port), pattern(address, own_port)]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Line:
    """A line of known_hosts; without names it is one that says nothing about keys."""

    text: str
    names: tuple[str, ...] = ()
    key: Key | None = None
    owner: str = ""

    @classmethod
    def parse(cls, text: str) -> Line:
        words = text.split()
        # Markers (@revoked, @cert-authority) and comments are nobody's host key.
        if len(words) < 3 or words[0][0] in "#@":
            return cls(text)
        key = parse_key(" ".join(words[1:3]))
        if key is None:
            return cls(text)
        owner = words[3][len(MARK) :] if len(words) > 3 and words[3].startswith(MARK) else ""
        return cls(text, tuple(words[0].split(",")), key, owner)

    def covers(self, name: str) -> bool:
        return any(_is_name(entry, name) for entry in self.names)

    def without(self, names: Sequence[str]) -> Line | None:
        """The line for its other names; None where it has no others."""
        left = [entry for entry in self.names if not any(_is_name(entry, name) for name in names)]
        return Line.parse(" ".join([",".join(left), *self.text.split()[1:]])) if left else None


def _is_name(entry: str, name: str) -> bool:
    if entry.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in entry[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), digest)
    return entry.lower() == name.lower()


def _changed(host: str, names: Sequence[str], line: Line, present: Mapping[str, Key], other: Key) -> str:
    old = line.key or other
    new = present.get(old.kind, other)
    name = next((name for name in names if line.covers(name)), line.names[0])
    whose = f", pinned for {line.owner}" if line.owner not in ("", host) else ""
    return (
        f"{host}: its host key is not the pinned one. Pinned for {name}{whose}: {old.fingerprint} ({old.kind}); now:"
        f" {new.fingerprint} ({new.kind}). Somebody may be in between, or the host was installed anew -> compare with"
        f" ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub at its console, and if it is right run again with"
        f' -e \'{{"ssh_accept_changed_host_keys": ["{host}"]}}\''
    )


def pin(
    text: str, host: str, names: Sequence[str], keys: Sequence[Key], *, accept: bool = False, fingerprint: str = ""
) -> str:
    """The file of pinned host keys with those of a host. Another key than the pinned one is an error."""
    if not keys:
        raise SshError(
            f"{host}: no public host key can be read in /etc/ssh -> ssh-keygen -A on the host makes what is missing"
        )
    if fingerprint and fingerprint not in [key.fingerprint for key in keys]:
        shown = ", ".join(f"{key.fingerprint} ({key.kind})" for key in keys)
        raise SshError(
            f"ssh_host_key_fingerprint = {fingerprint} ({host}): the host has {shown} -> find out at its console which"
            " is right: this is another host than the one you mean, or its keys were made anew"
        )
    lines = [Line.parse(line) for line in lines_of(text)]
    present = {key.kind: key for key in keys}
    old = [line for line in lines if line.key and (line.owner == host or any(map(line.covers, names)))]
    changed = [line for line in old if line.key and present.get(line.key.kind, line.key) != line.key]
    if old and not changed and not any(line.key in keys for line in old):
        # None of the pinned kinds is left.
        changed = old
    if changed and not accept:
        raise SshError(_changed(host, names, changed[0], present, keys[0]))
    own = [Line.parse(f"{','.join(names)} {key} {MARK}{host}") for key in keys]
    kept: list[Line] = []
    for line in lines:
        if line.owner == host:
            # All of them, where the first one was.
            kept, own = kept + own, []
        elif line in changed:
            rest = line.without(names)
            kept += [rest] if rest else []
        else:
            kept.append(line)
    kept += own
    return "".join(f"{line.text}\n" for line in kept)


def pinned(text: str, host: str) -> list[Key]:
    """The keys of a host in the file of pinned host keys."""
    return [line.key for line in map(Line.parse, lines_of(text)) if line.owner == host and line.key]


# From node to node


def note_node(text: str, host: str, port: int, key: Key | None) -> str:
    """The file of what the nodes need to know of each other, with a node in it, or without it."""
    lines = [line for line in lines_of(text) if line.split()[:1] != [host]]
    if key:
        lines.append(f"{host} {port} {key}")
    return "".join(f"{line}\n" for line in sorted(lines, key=natural_key))


def _noted(text: str) -> dict[str, tuple[int, Key]]:
    found = {}
    for line in lines_of(text):
        words = line.split()
        key = parse_key(line)
        if len(words) == 4 and words[1].isdigit() and key:
            found[words[0]] = (int(words[1]), key)
    return found


def peers(nodes: Mapping[str, Any], host: str, user: str, known_hosts: str, noted: str) -> dict[str, Any]:
    """What a node is told of the others: their host keys, the keys of their user, how to reach them."""
    known = _noted(noted)
    keys, users, missing = [], [], []
    ports: dict[int, list[str]] = {}
    for name in sorted(nodes, key=natural_key):
        address = nodes[name].get("address")
        # A node without a part in anything is not managed.
        if name == host or not address or "ironrack_runtime" not in nodes[name].get("groups", ()):
            continue
        port, key = known.get(name, (22, None))
        host_keys = pinned(known_hosts, name)
        if key is None or not host_keys:
            missing.append(name)
            continue
        ports.setdefault(port, []).extend([name, address])
        names = ",".join(pattern(entry, port) for entry in (name, address))
        keys += [f"{names} {entry}" for entry in host_keys]
        users.append(f'from="{address}",restrict {key} {MARK}{name}')
    client = [f"# Managed by ironrack: how {user} reaches the other nodes."]
    for port, names_of in sorted(ports.items()):
        client += [
            f"Match localuser {user} host {','.join(names_of)}",
            *([f"    Port {port}"] if port != 22 else []),
            "    IdentityFile ~/.ssh/id_ironrack",
            "    IdentitiesOnly yes",
            "    BatchMode yes",
            "    StrictHostKeyChecking yes",
            "    UserKnownHostsFile none",
            "    GlobalKnownHostsFile /etc/ssh/ssh_known_hosts",
        ]
    return {
        "known_hosts": keys,
        "authorized_keys": users,
        "client_config": "\n".join([*client, ""]),
        "missing": missing,
    }
