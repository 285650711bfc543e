"""apt_transaction: what it reads from apt's recorded words, and what it does against a stand-in of apt and dpkg.

The stand-in keeps packages as JSON and answers in apt's form. Like the real ones it forgets the hold of a package that
it changes. The real apt and dpkg are proven on booted nodes.
"""

from __future__ import annotations

import copy
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]
RECORDED = Path(__file__).resolve().parents[2] / "fixtures/apt"
DEBIAN = ("debian12", "debian13")


class Host:
    """A stand-in for the programs of a host; call runs the module's transaction against it, below a root of its own."""

    def __init__(self, root: Path, module: ModuleType) -> None:
        self.root, self.module, self.holds = root, module, root / "state/driver"
        for folder in ("lists", "dpkg/updates", "sources.list.d"):
            (root / folder).mkdir(parents=True)
        (root / "lists/repo_Packages").touch()
        self.installed: dict[str, list[str]] = {}
        self.repository = {"a": ["2-1", "1-1"], "b": ["2-1", "1-1"], "c": ["5-1"]}
        self.update: tuple[int, str, dict[str, list[str]]] = (0, "", {})
        self.simulation, self.installation, self.configuration = (0, ""), (0, ""), (0, "")
        # What apt finds necessary besides, and after how many packages the real run ends.
        self.besides: list[tuple[str, str | None]] = []
        self.until = 99
        self.calls: list[str] = []

    def program(self, name: str, *words: str) -> tuple[int, str]:
        """Takes the place of Apt.call."""
        plain = [word for number, word in enumerate(words) if word[0] != "-" and words[number - 1] != "-o"]
        self.calls.append(" ".join([name, *plain]))
        if name == "dpkg-query":
            self.calls.pop()
            rows = [f"{status.ljust(3)}\t{package}\t{version}\tamd64\t" for package, (status, version) in self.there()]
            return 0, "\n".join(["ii \tdpkg\t1.22\tamd64\t", *rows])
        if name == "apt-cache":
            return 0, "".join(
                f"{package}:\n  Candidate: (none)\n  Version table:\n"
                + "".join(
                    f"     {version} 500\n        500 file:/repo ./ Packages\n" for version in self.repository[package]
                )
                for package in plain[1:]
                if package in self.repository
            )
        if name == "apt-mark":
            for package in plain[1:] if plain[0] != "manual" else ():
                status = self.installed[package][0]
                self.installed[package][0] = ("h" if plain[0] == "hold" else "i") + status[1:]
            return 0, ""
        if name == "dpkg" and not self.configuration[0]:
            for _package, entry in self.there():
                entry[0] = entry[0].replace("U", "i").replace("F", "i")
        if name == "dpkg":
            return self.configuration
        if plain[0] == "update":
            self.repository.update(self.update[2])
            return self.update[:2]
        return self.install("-s" in words, plain[1:])

    def there(self) -> list[tuple[str, list[str]]]:
        return list(self.installed.items())

    def install(self, simulate: bool, orders: list[str]) -> tuple[int, str]:
        steps: list[tuple[str, str | None]] = []
        for order in orders:
            package, _, version = order.partition("=")
            if package.endswith("-"):
                steps.append((package[:-1], None))
                continue
            version = version or self.repository[package][0]
            status, old = self.installed.get(package, ["un", ""])
            if old != version or status[1] == "H":
                steps.append((package, version))
        steps += [step for step in self.besides if steps and step[0] not in dict(steps)]
        if simulate:
            lines = [self.simulation[1]]
            for name, new in steps:
                old = self.installed.get(name, ["", ""])[1]
                shown = f"{name} [{old}]" if old else name
                lines.append(f"Inst {shown} ({new} NVIDIA CUDA:localhost [amd64])" if new else f"Remv {shown}")
            return self.simulation[0], "\n".join(lines)
        for name, new in steps[: self.until]:
            self.installed[name] = ["ii", new] if new else ["rc", self.installed[name][1]]
        return self.installation

    def call(self, *install: str, check: bool = False, **parameters: Any) -> dict[str, Any]:
        """The module's result with its diff, AptError's text as msg; an entry of install is name[=version[@group]]."""
        entries = []
        for item in install:
            name, _, rest = item.partition("=")
            version, _, group = rest.partition("@")
            entries.append({"name": name, "version": version, "group": group})
        defaults = {
            "install": entries,
            "remove": [],
            "may_remove": [],
            "hold": [],
            "install_recommends": False,
            "update_cache": True,
            "cache_valid_time": 3600,
            "lock_timeout": 0,
            "restart_services": True,
            "state_path": str(self.holds),
        }
        transaction = None
        try:
            transaction = self.module.Transaction(defaults | parameters, check)
            transaction.run()
            return {**transaction.result, "diff": transaction.diff(), "warnings": transaction.warnings}
        except self.module.AptError as error:
            return {**(transaction.result if transaction else {"changed": False}), "msg": str(error)}

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls

    def versions(self) -> dict[str, str]:
        return {name: f"{status} {version}" for name, (status, version) in self.installed.items()}

    def hold_for(self, **callers: str) -> None:
        """Files of holds that earlier runs left."""
        self.holds.parent.mkdir()
        for caller, names in callers.items():
            (self.holds.parent / caller).write_text(names)


@pytest.fixture(name="apt")
def fixture_apt(load: Load) -> ModuleType:
    return load("apt_transaction")


@pytest.fixture(name="host")
def fixture_host(apt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    for name, path in (
        ("LISTS", "lists"),
        ("SOURCES", "sources.list"),
        ("AUTOMATIC", "extended_states"),
        ("UPDATED", "update-success-stamp"),
        ("DPKG", "dpkg"),
        ("SERVICES", "policy-rc.d"),
    ):
        monkeypatch.setattr(apt, name, str(tmp_path / path))
    host = Host(tmp_path, apt)
    monkeypatch.setattr(apt.Apt, "call", host.program)
    return host


def recorded(debian: str, name: str) -> str:
    return (RECORDED / debian / f"{name}.txt").read_text("utf-8")


def entry(version: str = "", group: str = "") -> dict[str, str]:
    return {"version": version, "group": group}


# --- what apt and dpkg say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debian", DEBIAN)
def test_query(apt: ModuleType, debian: str) -> None:
    states = apt.parse_query(recorded(debian, "query"))
    assert states["libnvidia-ml1"][:2] == ("ii ", "570.211.01-1")
    assert states["libnvidia-ml1:i386"][1] == "570.211.01-1"
    assert states["nvidia-kernel-open-dkms"][2] == ["nvidia-kernel-any"]
    assert apt.held(states) == {"nvidia-open"}
    assert apt.unfinished(states) == []


@pytest.mark.parametrize("debian", DEBIAN)
def test_query_of_what_was_left_unfinished(apt: ModuleType, debian: str) -> None:
    states = apt.parse_query(recorded(debian, "query_unfinished"))
    assert apt.unfinished(states) == ["nvidia-kernel-open-dkms", "nvidia-open"]
    killed = apt.parse_query(recorded(debian, "query_killed"))
    assert apt.unfinished(killed) == ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-open"]
    assert "nvidia-driver-cuda" in apt.installed(killed)
    assert "nvidia-driver-cuda" not in apt.usable(killed)
    assert "nvidia-open" in apt.usable(killed)


@pytest.mark.parametrize("debian", DEBIAN)
def test_policy(apt: ModuleType, debian: str) -> None:
    policy = apt.parse_policy(recorded(debian, "policy"))
    assert policy["nvidia-open"] == [("580.105.08-1", 500), ("580.95.05-1", 500), ("570.211.01-1", 500)]
    assert policy["nvidia-kernel-any"] == []
    assert "nope" not in policy
    assert policy["nvidia-settings"][0] == ("580.105.08-1", -1)
    assert policy["libnvidia-ml1:i386"][2] == ("570.211.01-1", 500)
    assert policy["datacenter-gpu-manager-4-cuda13"] == [("1:4.4.1-1", 500), ("1:4.4.0-1", 500)]


@pytest.mark.parametrize("debian", DEBIAN)
def test_simulation(apt: ModuleType, debian: str) -> None:
    steps = apt.parse_simulation(recorded(debian, "simulate_upgrade"))
    assert steps["nvidia-open"] == ("570.211.01-1", "580.95.05-1")
    assert steps["nvidia-fabricmanager"] == (None, "580.95.05-1")
    assert steps["nvidia-fabricmanager-570"] == ("570.211.01-1", None)
    # Both architectures have to be of one version: apt lets the one go that nobody named.
    assert steps["libnvidia-ml1:i386"][1] in (None, "580.95.05-1")


def test_exact_dependencies(apt: ModuleType) -> None:
    """Which versions apt would have needed, from its own complaint."""
    for debian in DEBIAN:
        found = dict(apt.EXACT.findall(recorded(debian, "simulate_unmet")))
        assert found == {"nvidia-driver-cuda": "580.95.05-1", "nvidia-kernel-open-dkms": "580.95.05-1"}


@pytest.mark.parametrize("debian", DEBIAN)
@pytest.mark.parametrize(
    ("name", "line", "remedy"),
    [
        ("update_badsig", "E: The repository 'file:/repo/badsig ./ InRelease' is not signed.", "Signed-By"),
        ("update_unsigned", "E: The repository 'file:/repo/unsigned ./ Release' is not signed.", "Signed-By"),
        ("update_norelease", "E: The repository 'file:/repo/norelease ./ Release' does not have a Rel", "mirror lacks"),
        ("update_badlist", "E: Failed to fetch file:/repo/badlist/./Packages", "half synchronized"),
        ("update_conflict", "E: Conflicting values set for option Signed-By", "configured in two files"),
        ("update_refused", "E: Failed to fetch http://127.0.0.1:9/x/./InRelease", "the network and the proxy"),
        ("update_locked", "E: Could not get lock /var/lib/apt/lists/lock. It is held by process", "lock_timeout"),
        ("install_hash", "E: Failed to fetch file:/repo/hash/./nvidia-open_580.95.05-1_amd64.deb", "half synchronized"),
        ("install_postinst", "dpkg: error processing package nvidia-kernel-open-dkms", "make.log in /var/lib/dkms"),
        ("install_disk_full", "failed to write (No space left on device)", "make room"),
        ("simulate_unknown_dependency", " broken-meta : Depends: does-not-exist", "add the repository"),
        ("simulate_broken", "E: Unmet dependencies. Try 'apt --fix-broken install'", "left so by somebody else"),
        ("simulate_reinstall", "E: The package nvidia-driver-cuda needs to be reinstalled", "no repository has that"),
    ],
)
def test_apts_line_first_then_the_remedy(apt: ModuleType, debian: str, name: str, line: str, remedy: str) -> None:
    told = apt.explain(recorded(debian, name))
    assert line in told
    last = told.splitlines()[-1]
    assert last.startswith("Remedy: ") and remedy in last, told
    assert told.index(line) < told.index("Remedy: ")
    assert "Reading" not in told and "Unpacking" not in told, told


def test_a_failed_script_beside_a_kernel_module_is_not_a_failed_build(apt: ModuleType) -> None:
    told = apt.explain(
        "Setting up nvidia-kernel-open-dkms (580.95.05-1) ...\ndpkg: error processing package nvidia-fabricmanager"
        " (--configure):\n installed nvidia-fabricmanager package post-installation script subprocess returned error"
    )
    assert told.splitlines()[-1].startswith("Remedy: a script or file of the package failed")


def test_no_root_is_no_lock(apt: ModuleType) -> None:
    """Waiting would not help."""
    text = (
        "E: Could not open lock file /var/lib/dpkg/lock-frontend - open (13: Permission denied)\n"
        "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), are you root?"
    )
    assert apt.LOCKED.search(text) is None and "become: true" in apt.explain(text)


def test_cause_of_a_failed_script_is_told(apt: ModuleType) -> None:
    told = apt.explain(recorded("debian12", "install_postinst")).splitlines()
    assert told[0].startswith("Error! Bad return status for module build on kernel")


def test_damaged_archive(apt: ModuleType) -> None:
    text = (
        "Unpacking a ...\ndpkg-deb: error: 'a.deb' is not a Debian format archive\ndpkg: error processing archive a.deb"
    )
    assert apt.explain(text).startswith("dpkg-deb: error: 'a.deb' is not")


def test_silent_failure_tells_the_last_lines(apt: ModuleType) -> None:
    assert apt.explain("one\ntwo\n") == "one\ntwo"


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "pattern", "expected"),
    [
        ("580.95.05-1", "580.95.05-*", True),
        ("1:580.95.05-1", "580.95.05-*", True),
        ("1:580.95.05-1", "1:580.*", True),
        ("2:580.95.05-1", "1:580.*", False),
        ("580.105.08-1", "580.95.*", False),
        ("5800.1-1", "580.*", False),
        ("1", "", True),
    ],
)
def test_globs_of_versions(apt: ModuleType, version: str, pattern: str, expected: bool) -> None:
    assert apt.fits(version, pattern) is expected


POLICY = {
    "driver": [("580.105.08-1", 500), ("580.95.05-1", 500), ("570.211.01-1", 500)],
    "manager": [("580.95.05-1", 500), ("570.211.01-1", 500)],
    "dcgm": [("1:4.4.1-1", 500)],
    "virtual": [],
    "blocked": [("3-1", -1), ("2-1", 500)],
}


def test_a_group_has_one_version(apt: ModuleType) -> None:
    """The newest driver has no Fabric Manager yet: the newest version that both have is taken."""
    wanted = {"driver": entry("580.*", "x"), "manager": entry("580.*", "x")}
    chosen, problems = apt.choose_versions(wanted, {"driver": "580.105.08-1"}, POLICY)
    assert (chosen, problems) == ({"driver": "580.95.05-1", "manager": "580.95.05-1"}, {})
    assert apt.choose_versions(wanted, chosen, POLICY) == ({}, {})


def test_a_group_stays_at_what_is_installed(apt: ModuleType) -> None:
    policy = {"driver": POLICY["driver"], "manager": POLICY["driver"]}
    wanted = {"driver": entry("580.*", "x"), "manager": entry("580.*", "x")}
    assert apt.choose_versions(wanted, {"driver": "580.95.05-1"}, policy)[0] == {"manager": "580.95.05-1"}


def test_without_a_group_versions_are_independent(apt: ModuleType) -> None:
    wanted = {"driver": entry("580.*"), "manager": entry("580.*")}
    assert apt.choose_versions(wanted, {}, POLICY)[0] == {"driver": "580.105.08-1", "manager": "580.95.05-1"}


def test_a_group_without_a_common_version(apt: ModuleType) -> None:
    wanted = {"driver": entry("580.105.*", "x"), "manager": entry("580.*", "x")}
    chosen, problems = apt.choose_versions(wanted, {}, POLICY)
    assert chosen == {}
    assert "no version that all of group x have (driver: 580.105.08-1; manager: 580.95.05-1)" in problems["driver"]


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("nope", "", "nope is in no repository of this host; correct the name"),
        ("driver", "999.*", "driver has no version 999.*; there are: 580.105.08-1, 580.95.05-1, 570.211.01-1."),
        ("virtual", "1.*", "virtual is only a virtual package"),
        ("blocked", "3-*", "blocked has 3-1, which apt's preferences forbid"),
    ],
)
def test_why_there_is_none(apt: ModuleType, name: str, version: str, told: str) -> None:
    chosen, problems = apt.choose_versions({name: entry(version)}, {}, POLICY)
    assert chosen == {}
    assert told in problems[name]


def test_absent_package_fits_no_glob(apt: ModuleType) -> None:
    """An absent package has no version, which is not the empty version that the glob * would fit."""
    assert apt.choose_versions({"driver": entry("*")}, {}, POLICY)[0] == {"driver": "580.105.08-1"}
    assert apt.choose_versions({"driver": entry("*")}, {"driver": "1-1"}, POLICY)[0] == {}


def test_installed_version_counts_though_no_repository_has_it(apt: ModuleType) -> None:
    assert apt.choose_versions({"driver": entry("590.*")}, {"driver": "590.1-1"}, POLICY) == ({}, {})


def test_virtual_packages(apt: ModuleType) -> None:
    """What an installed package provides is there; else apt chooses, or says why not."""
    assert apt.choose_versions({"virtual": entry()}, {}, POLICY, {"virtual"}) == ({}, {})
    assert apt.choose_versions({"virtual": entry()}, {}, POLICY) == ({"virtual": ""}, {})


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"install": [{"name": "a b", "version": "", "group": ""}]}, "install: 'a b' is not the name of a package"),
        ({"install": [{"name": "--purge", "version": "", "group": ""}]}, "'--purge' is not the name"),
        ({"install": [{"name": "aa=1", "version": "", "group": ""}]}, "'aa=1' is not the name"),
        ({"install": [{"name": "aa", "version": "$(id)", "group": ""}]}, "aa: '$(id)' is not a version"),
        ({"install": [{"name": "aa", "version": "", "group": ""}] * 2}, "aa is listed twice"),
        ({"remove": ["*"]}, "remove: '*' fits almost every package"),
        ({"may_remove": ["[a-z]*"]}, "may_remove: '[a-z]*' fits almost every package"),
        ({"hold": ["Linux*"]}, "hold: 'Linux*' is not a name or glob"),
        ({"lock_timeout": -1}, "lock_timeout is -1; give 0 or more"),
    ],
)
def test_wrong_input(apt: ModuleType, parameters: dict[str, Any], told: str) -> None:
    defaults: dict[str, Any] = {"install": [], "remove": [], "may_remove": [], "hold": []}
    with pytest.raises(apt.AptError) as caught:
        apt.check_request({**defaults, "cache_valid_time": 0, "lock_timeout": 0, **parameters})
    assert told in str(caught.value)


# --- what is done ----------------------------------------------------------------------------------------------------


def test_install_hold_and_second_run(host: Host) -> None:
    done = host.call("a=1-*", "b", hold=["a", "b*"])
    assert done["changed"] and done["packages"]["a"] == {"before": None, "after": "1-1"}
    assert host.versions() == {"a": "hi 1-1", "b": "hi 2-1"}
    assert done["held"] == ["a", "b"] and host.holds.read_text() == "a\nb\n"
    assert done["diff"]["after"] == "a 1-1\nb 2-1\nhold a\nhold b\n"
    host.take()
    again = host.call("a=1-*", "b", hold=["a", "b*"])
    assert not again["changed"] and again["packages"] == {}
    assert host.take() == [], "a run that changes nothing needs no more than one look at dpkg"


def test_one_install_for_all(host: Host) -> None:
    host.installed = {"a": ["ii", "1-1"], "old-1": ["ii", "1-1"], "old-2": ["rc", "1-1"]}
    done = host.call("a=2-*", "b=2-*", remove=["old-*", "never*"])
    assert done["packages"]["old-1"] == {"before": "1-1", "after": None}
    orders = [call for call in host.take() if call.startswith("apt-get install")]
    assert orders == ["apt-get install a=2-1 b=2-1 old-1-"] * 2, "once simulated, once for real"


def test_what_is_wanted_is_not_removed(host: Host) -> None:
    host.installed = {"aa": ["ii", "1-1"], "ab": ["ii", "1-1"]}
    host.repository = {"aa": ["2-1"]}
    assert list(host.call("aa=2-*", remove=["aa*"])["packages"]) == ["aa"]
    assert not host.call("aa", remove=["aa*"])["changed"]


def test_holds_are_written_down_before_they_are_made(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed in between must not leave a hold that nobody releases."""
    seen = []
    mark = host.module.Apt.mark

    def look(self: Any, verb: str, names: set[str]) -> None:
        if verb == "hold":
            seen.append(host.holds.read_text())
        mark(self, verb, names)

    monkeypatch.setattr(host.module.Apt, "mark", look)
    host.call("a", hold=["a"])
    assert seen == ["a\n"]


def test_downgrade(host: Host) -> None:
    host.installed = {"a": ["hi", "2-1"]}
    host.hold_for(driver="a\n")
    assert host.call("a=1-*", hold=["a"])["packages"] == {"a": {"before": "2-1", "after": "1-1"}}
    assert host.versions() == {"a": "hi 1-1"}


def test_what_was_not_asked_for_is_refused(host: Host) -> None:
    host.installed = {"c": ["ii", "5-1"]}
    host.besides = [("c", None)]
    done = host.call("a")
    assert "apt would remove c, which was not asked for; nothing was changed" in done["msg"]
    assert not done["changed"] and host.versions() == {"c": "ii 5-1"}
    assert host.call("a", may_remove=["c"])["changed"]
    host.installed = {"c": ["ii", "5-1"]}
    assert "remove c, which" in host.call("a", "c", may_remove=["c"])["msg"], "what is wanted is never let go"


def test_holds_of_others(host: Host) -> None:
    host.installed = {"a": ["ii", "1-1"], "c": ["hi", "4-1"]}
    host.besides = [("c", "5-1")]
    done = host.call("a=2-*")
    assert "c, held by somebody else; nothing was changed" in done["msg"] and "apt-mark unhold c" in done["msg"]
    assert host.versions()["a"] == "ii 1-1"
    done = host.call("a=2-*", hold=["a", "c"])
    assert host.versions() == {"a": "hi 2-1", "c": "hi 5-1"}
    assert done["held"] == ["a"], "the hold on c stays theirs"
    assert host.call(hold=[])["changed"]
    assert host.versions() == {"a": "ii 2-1", "c": "hi 5-1"}
    assert not host.call(hold=[])["changed"]


def test_holds_of_another_caller_are_the_projects_own(host: Host) -> None:
    host.installed = {"a": ["ii", "1-1"], "c": ["hi", "4-1"]}
    host.besides = [("c", "5-1")]
    host.hold_for(cuda="c\n")
    done = host.call("a=2-*", hold=["a"])
    assert done["held"] == ["a"] and host.versions() == {"a": "hi 2-1", "c": "hi 5-1"}


def test_failure_restores_holds_and_tells_what_changed(host: Host) -> None:
    host.installed = {"a": ["hi", "1-1"], "b": ["hi", "1-1"]}
    host.until = 1
    host.installation = (100, recorded("debian12", "install_postinst"))
    host.hold_for(driver="a\n")
    done = host.call("a=2-*", "b=2-*", hold=["a"])
    assert done["msg"].startswith("apt-get install failed:\nError! Bad return status")
    assert done["changed"] and done["packages"] == {"a": {"before": "1-1", "after": "2-1"}}
    assert host.versions() == {"a": "hi 2-1", "b": "hi 1-1"}
    assert sorted(path.name for path in host.holds.parent.iterdir()) == [".updated", "driver"]


def test_hold_lost_by_a_killed_run_comes_back_even_when_refused(host: Host) -> None:
    """apt forgets the hold of what it changes; the killed run left a list of those that are not ours."""
    host.installed = {"a": ["ii", "2-1"], "b": ["ii", "2-1"]}
    host.hold_for(**{"driver": "a\n", ".driver.restore": "b\n"})
    done = host.call("nope", hold=[])
    assert "nope is in no repository" in done["msg"]
    assert host.versions() == {"a": "hi 2-1", "b": "hi 2-1"}
    assert done["changed"] and done["held"] == ["a"]
    assert not (host.holds.parent / ".driver.restore").exists()


def test_list_of_foreign_holds_is_written_before_apt_runs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.installed = {"a": ["ii", "1-1"], "c": ["hi", "4-1"]}
    host.besides = [("c", "5-1")]
    seen = []
    must = host.module.Apt.must

    def killed(self: Any, *arguments: str) -> str:
        if arguments[:2] == ("apt-get", "install"):
            seen.append((host.holds.parent / ".driver.restore").read_text())
        return str(must(self, *arguments))

    monkeypatch.setattr(host.module.Apt, "must", killed)
    host.call("a=2-*", hold=["c"])
    assert seen == ["c\n"]


def test_interrupted_dpkg_is_finished(host: Host) -> None:
    host.installed = {"a": ["iF", "2-1"], "b": ["iU", "2-1"]}
    check = host.call("a=2-*", check=True)
    assert check["changed"] and check["recovered"] == ["a", "b"] and host.versions()["a"] == "iF 2-1"
    done = host.call("a=2-*")
    assert done["changed"] and done["recovered"] == ["a", "b"] and "msg" not in done
    assert host.versions() == {"a": "ii 2-1", "b": "ii 2-1"}
    assert not host.call("a=2-*")["changed"]


def test_half_unpacked_package_is_installed_again(host: Host) -> None:
    host.installed = {"a": ["iHR", "2-1"]}
    assert "msg" not in host.call("a=2-*")
    assert host.versions() == {"a": "ii 2-1"}


def test_what_dpkg_cannot_finish_is_an_error_unless_the_new_version_can(host: Host) -> None:
    host.installed = {"a": ["iF", "1-1"]}
    words = "installed a package post-installation script subprocess returned error exit status 10"
    host.configuration = (1, f"dpkg: error processing package a (--configure):\n {words}")
    done = host.call("a=1-*")
    assert "dpkg is left unfinished with a:\ndpkg: error processing package a" in done["msg"]
    assert "msg" not in host.call("a=2-*")
    assert host.versions() == {"a": "ii 2-1"}


def test_journal_of_dpkg_alone(host: Host) -> None:
    (host.root / "dpkg/updates/0001").touch()
    host.installed = {"a": ["ii", "1-1"]}
    assert not host.call("a")["changed"]
    assert host.take() == ["dpkg"]


UNMET = "The following packages have unmet dependencies:\n a : Depends: b (= 1-1) but 2-1 is to be installed\nE: held"


def test_exact_dependencies_are_asked_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """apt would take the newest of a dependency; the version that is demanded is named in a second simulation."""

    def newest(self: Any, *words: str) -> tuple[int, str]:
        return (100, UNMET) if "-s" in words and "b=1-1" not in words else host.program(*words)

    monkeypatch.setattr(host.module.Apt, "call", newest)
    assert "msg" not in host.call("a=1-*")
    assert host.versions() == {"a": "ii 1-1", "b": "ii 1-1"}


def test_naming_dependencies_comes_to_an_end(host: Host) -> None:
    host.simulation = (100, UNMET)
    assert " a : Depends: b (= 1-1)" in host.call("a=1-*")["msg"]
    assert [call for call in host.take() if call.startswith("apt-get install")] == [
        "apt-get install a=1-1",
        "apt-get install a=1-1 b=1-1",
    ]


def test_broken_dependencies_of_others_are_mended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *words: str) -> tuple[int, str]:
        mending = "--fix-broken" in words or "install" not in words
        return host.program(*words) if mending else (100, recorded("debian12", "simulate_broken"))

    monkeypatch.setattr(host.module.Apt, "call", broken)
    assert "msg" not in host.call("a=1-*")
    assert host.versions() == {"a": "ii 1-1"}


def test_check_mode_changes_nothing(host: Host) -> None:
    host.installed = {"a": ["hi", "1-1"], "old": ["ii", "1-1"]}
    before = copy.deepcopy(host.installed)
    done = host.call("a=2-*", remove=["old"], hold=["a", "b"], check=True)
    assert done["changed"] and done["packages"] == {
        "a": {"before": "1-1", "after": "2-1"},
        "old": {"before": "1-1", "after": None},
    }
    assert host.installed == before and not host.holds.parent.exists()
    assert not [call for call in host.take() if call.startswith(("apt-mark", "apt-get update", "dpkg"))]


def test_check_mode_on_a_bare_host(host: Host) -> None:
    """Repositories come with the run itself: what they will have cannot be known, which is no failure."""
    host.repository = {}
    host.installed = {"old": ["ii", "1-1"]}
    done = host.call("a=1-*", "b", remove=["old"], hold=["a"], check=True)
    assert done["unknown"] == ["a", "b"] and done["changed"] and done["held"] == ["a"]
    assert done["packages"] == {
        "a": {"before": None, "after": "1-*"},
        "b": {"before": None, "after": "newest"},
        "old": {"before": "1-1", "after": None},
    }
    assert "msg" not in done


def test_check_mode_tells_what_is_known_besides(host: Host) -> None:
    host.repository = {"c": ["5-1"]}
    done = host.call("a=1-*", "c", check=True)
    assert done["unknown"] == ["a"] and done["packages"]["c"] == {"before": None, "after": "newest"}


def test_what_apt_cannot_do_yet_is_no_failure_of_check_mode(host: Host) -> None:
    """Preferences and repositories come with the run; a real run, which has them, fails and changes nothing."""
    host.simulation = (100, recorded("debian12", "simulate_unknown_dependency"))
    done = host.call("a=1-*", check=True)
    assert "msg" not in done and done["unknown"] == ["a"]
    assert done["packages"] == {"a": {"before": None, "after": "1-1"}}
    done = host.call("a=1-*")
    assert "nothing was changed" in done["msg"] and not done["changed"]


def test_refusal_after_recovery_tells_of_both(host: Host) -> None:
    host.installed = {"b": ["iU", "1-1"]}
    done = host.call("nope")
    assert done["changed"] and done["msg"].endswith("Before that, dpkg went on with b.")


def test_lists_are_fetched_only_when_needed(host: Host) -> None:
    assert host.call("a")["cache_updated"]
    assert not host.call("b")["cache_updated"], "fetched a moment ago"
    (host.root / "lists/repo_Packages").unlink()
    assert host.call("c")["cache_updated"], "no lists, whatever the date of their folder"
    assert not host.call("a", "b", "c", cache_valid_time=0)["cache_updated"], "nothing is to be installed"


@pytest.mark.parametrize("what", ["sources.list", "sources.list.d/nvidia.sources"])
def test_lists_older_than_a_source_are_fetched(host: Host, what: str) -> None:
    host.call("a")
    (host.root / "lists/repo_Packages").touch()
    (host.root / what).touch()
    later = time.time() + 5
    os.utime(host.root / what, (later, later))
    assert host.call("b")["cache_updated"]


def test_version_newer_than_the_lists(host: Host) -> None:
    host.call("b")
    host.update = (0, "", {"a": ["3-1", "2-1"]})
    done = host.call("a=3-*")
    assert done["cache_updated"] and host.versions()["a"] == "ii 3-1"


def test_failed_fetch_changes_nothing_and_is_not_taken_for_fresh(host: Host) -> None:
    host.update = (100, recorded("debian13", "update_badsig"), {})
    host.installed = {"a": ["ii", "1-1"]}
    for _ in range(2):
        done = host.call("a=2-*")
        assert done["msg"].startswith("apt-get update failed:\nErr:1") and "Remedy: install the repo" in done["msg"]
        assert not done["changed"] and host.versions() == {"a": "ii 1-1"}
    assert not host.call("a=1-*").get("msg"), "what is there needs no mirror"


def test_unknown_version_changes_nothing(host: Host) -> None:
    done = host.call("a=9-*", "zz")
    assert "a has no version 9-*; there are: 2-1, 1-1" in done["msg"] and "zz is in no repository" in done["msg"]
    assert not done["changed"] and host.versions() == {}


def test_dependency_becomes_asked_for(host: Host) -> None:
    host.installed = {"a": ["ii", "1-1"], "b": ["ii", "1-1"]}
    states = "Package: a\nArchitecture: amd64\nAuto-Installed: 1\n\nPackage: c\nAuto-Installed: 1\n"
    (host.root / "extended_states").write_text(states)
    assert host.call("a", check=True)["changed"]
    assert host.call("a", "b")["changed"]
    assert host.take()[-1] == "apt-mark manual a"


def test_apt_that_lies_is_found_out(host: Host) -> None:
    host.until = 0
    assert "apt did not complain, but left a absent" in host.call("a")["msg"]


def test_lock_names_its_holder(host: Host) -> None:
    """Locks of this process itself would not count: another one holds it."""
    lock, ready = host.root / "dpkg/lock-frontend", host.root / "ready"
    lock.touch()
    code = f"import fcntl,time; f=open({str(lock)!r},'w'); fcntl.lockf(f,{fcntl.LOCK_EX}); open({str(ready)!r},'w'); "
    with subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"]) as other:
        while not ready.exists():
            time.sleep(0.02)
        done = host.call("a")
        other.kill()
    assert f"is held by process {other.pid} (python" in done["msg"] and "raise lock_timeout" in done["msg"]
    assert "lockf" not in done["msg"], "a command line may hold secrets"
    assert host.take() == [] and not done["changed"]
    assert host.call("a")["changed"]


def test_services_are_left_alone(host: Host, apt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = host.root / "policy-rc.d"
    seen: list[bool] = []

    def program(own: object, name: str, *words: str) -> tuple[int, str]:
        if name == "apt-get" and "-s" not in words and "install" in words:
            for mine, code in (("1", 101), ("", 0)):
                asked = ["env", f"IRONRACK_APT_TRANSACTION={mine}", "sh", str(policy), "x", "start"]
                assert subprocess.run(asked, check=False).returncode == code
            seen.append(os.access(policy, os.X_OK))
        return host.program(name, *words)

    monkeypatch.setattr(apt.Apt, "call", program)
    host.installation = (100, "E: no")
    assert "msg" in host.call("a=1-*", restart_services=False)
    assert seen == [True] and not policy.exists(), "after a failure too"
    host.installation = (0, "")
    policy.write_text(apt.FORBID)
    policy.chmod(0o755)
    assert host.call("a=2-*", restart_services=False)["changed"]
    assert seen == [True, True] and not policy.exists(), "that of a killed run is taken away"


def test_a_policy_of_somebody_else_stays(host: Host) -> None:
    policy = host.root / "policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    done = host.call("a", restart_services=False)
    assert done["changed"] and f"{policy} is not this module's" in done["warnings"][0]
    assert policy.read_text() == "#!/bin/sh\nexit 101\n"


def test_apt_ends_what_it_began(apt: ModuleType, tmp_path: Path) -> None:
    """The module is killed (a lost connection, say) while a program writes: the program goes on."""
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/began\nsleep 1\necho a line\necho another\ntouch {tmp_path}/ended\n")
    slow.chmod(0o755)
    source = Path(apt.__file__ or "")
    code = (
        f"import sys; sys.path.insert(0, {str(source.parent)!r}); import apt_transaction as module;"
        f" module.Apt({{'lock_timeout': 0, 'install_recommends': False, 'restart_services': True}}).call({str(slow)!r})"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as module:
        while not (tmp_path / "began").exists():
            time.sleep(0.02)
        module.kill()
    end = time.monotonic() + 20
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_a_program_says_is_read(apt: ModuleType) -> None:
    parameters = {"lock_timeout": 0, "install_recommends": False, "restart_services": True}
    assert apt.Apt(parameters).call("sh", "-c", "echo out; echo err >&2; exit 3") == (3, "out\nerr\n")


def test_a_kernel_without_headers_can_go(host: Host) -> None:
    told = host.call("linux-headers-5.10.0-42-amd64")["msg"]
    assert "remove the kernel (apt-get purge linux-image-5.10.0-42-amd64)" in told


def test_remedy_of_a_page_in_place_of_a_list(apt: ModuleType) -> None:
    line = (
        "E: The repository is not signed: Clearsigned file isn't valid, got 'NOSPLIT' (does the network require auth?)"
    )
    assert "Remedy: install the repository's current key" in apt.explain(line.replace("not signed: ", ""))


def test_module_without_apt(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The module as a whole: arguments, failure as a result."""
    done = run("apt_transaction", install=[{"name": "Bad"}], state_path=str(tmp_path / "x"))
    assert done["failed"] and "install: 'Bad' is not the name of a package" in done["msg"]
    assert done["changed"] is False
