#!/usr/bin/env bash
# Resolve the runtime's lock files (vLLM, Ray, torch): scripts/lock.sh [--upgrade] [--find-links PLACE] [VARIANT...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 scripts/lock.py "$@"
