#!/usr/bin/env bash
# Build .venv with the pinned tools of requirements.txt. Run again at any time: does nothing when it is up to date.
# PYTHON=python3.12 chooses the interpreter, VENV=path the place.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
say() { printf '==> %s\n' "$*" >&2; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
    done
fi
if [ -z "$python" ]; then
    echo "error: no Python >= 3.11 found ($(python3 --version 2>&1)). Install one (Debian 12+, Ubuntu 24.04+: apt-get install python3) or set PYTHON=/path/to/python3.11" >&2
    exit 1
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    { echo "error: PYTHON=$python is no Python >= 3.11 ($("$python" --version 2>&1)). Name another one." >&2; exit 1; }

# Never the environment's own interpreter (make puts it first on PATH): it is about to be removed.
python=$("$python" -c 'import sys; print(sys._base_executable)')

want=$({ cat requirements.txt; "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; } | sha256sum | cut -c1-64)
if [ "$(cat "$venv/.requirements-sha256" 2>/dev/null)" = "$want" ]; then exit 0; fi

# Debian splits ensurepip off into a package of its own.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=$("$python" -c 'import sys; print(f"python3.{sys.version_info[1]}-venv")')
    say "installing $package (apt)"
    as_root apt-get update -qq || say "some package sources did not answer; going on with the others"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null
fi

say "building $venv with $("$python" --version)"
# Built in place, the stamp written last: an interrupted build is begun anew by the next call.
rm -rf "$venv"
"$python" -m venv "$venv"
# uv itself comes by pip, with the hash that requirements.txt pins; it then installs the rest in seconds.
uv_requirement=$(mktemp)
trap 'rm -f "$uv_requirement"' EXIT
awk '/^uv==/ {on = 1} on {print} on && !/\\$/ {exit}' requirements.txt > "$uv_requirement"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r "$uv_requirement"
# A site's package mirror is configured for pip: uv has settings of its own, so hand the index over.
index=$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)
[ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
say "installing $(grep -c '==' requirements.txt) pinned packages"
"$venv/bin/uv" pip sync --quiet --require-hashes --python "$venv/bin/python" requirements.txt
echo "$want" > "$venv/.requirements-sha256"
say "$venv is ready: $("$venv/bin/ansible" --version | head -n 1)"
