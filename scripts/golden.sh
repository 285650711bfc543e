#!/usr/bin/env bash
# Write tests/golden: what the roles render for the example inventories in tests/topologies.
# golden.sh --check changes nothing and fails when something differs.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python tests/tools/golden.py "$@"
