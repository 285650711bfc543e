"""The script that clears ACS, with stand-ins for lspci and setpci: no machine with such bridges is at hand.

The stand-ins keep registers in files and speak as pciutils does (its refusal was recorded from version 3.13).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "roles/base/files/acs-off"
LSPCI = """\
#!/bin/sh
[ "$*" = "-D -n -d ::0604" ] || { echo "lspci: unexpected: $*" >&2; exit 1; }
cat "$BENCH/bridges"
"""
SETPCI = """\
#!/bin/sh
[ "$1" = -s ] || exit 1
register="$BENCH/$2"
if [ ! -e "$register" ]; then
    echo "setpci: $2: Instance #0 of Extended capability 000d not found - there are no capabilities with that id." >&2
    exit 1
fi
case $3 in
    ECAP_ACS+6.w) cat "$register" ;;
    ECAP_ACS+6.w=*) echo "$2 $3" >> "$BENCH/writes"; [ -e "$register.fixed" ] || echo "${3#*=}" > "$register" ;;
    *) exit 1 ;;
esac
"""
BRIDGES = """\
0000:00:01.0 0604: 8086:2030 (rev 04)
0000:3a:00.0 0604: 10b5:8796 (rev ca)
0000:3b:08.0 0604: 10b5:8796 (rev ca)
"""


@pytest.fixture(name="bench")
def fixture_bench(tmp_path: Path) -> Path:
    for name, text in (("lspci", LSPCI), ("setpci", SETPCI), ("systemd-detect-virt", "#!/bin/sh\nexit 1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bridges").write_text(BRIDGES)
    return tmp_path


def run(bench: Path) -> tuple[int, list[str]]:
    environment = {"PATH": f"{bench}:{os.environ['PATH']}", "BENCH": str(bench)}
    done = subprocess.run(["sh", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def written(bench: Path) -> list[str]:
    path = bench / "writes"
    return path.read_text().splitlines() if path.exists() else []


def test_bridges_with_the_capability_are_cleared_and_named(bench: Path) -> None:
    (bench / "0000:3a:00.0").write_text("0000\n")
    (bench / "0000:3b:08.0").write_text("001d\n")
    code, lines = run(bench)
    assert code == 0
    assert written(bench) == ["0000:3b:08.0 ECAP_ACS+6.w=0000"]
    assert lines == [
        "0000:3b:08.0: cleared, was 001d",
        "2 bridges have the capability, 1 were cleared, 0 could not be",
    ]
    assert run(bench)[1] == ["2 bridges have the capability, 0 were cleared, 0 could not be"]


def test_a_bridge_that_keeps_its_bits_is_named(bench: Path) -> None:
    (bench / "0000:3b:08.0").write_text("001d\n")
    (bench / "0000:3b:08.0.fixed").touch()
    code, lines = run(bench)
    assert code == 0, "the preflight judges"
    assert "0000:3b:08.0: still 001d, was 001d" in lines


@pytest.mark.parametrize("bridges", ["", BRIDGES])
def test_a_host_without_any_is_left_alone(bench: Path, bridges: str) -> None:
    (bench / "bridges").write_text(bridges)
    assert run(bench) == (0, ["0 bridges have the capability, 0 were cleared, 0 could not be"])
    assert written(bench) == []


def test_a_virtual_machine_is_left_alone(bench: Path) -> None:
    (bench / "0000:3b:08.0").write_text("001d\n")
    (bench / "systemd-detect-virt").write_text("#!/bin/sh\nexit 0\n")
    code, lines = run(bench)
    assert code == 0
    assert "nothing is cleared" in lines[0]
    assert written(bench) == []
