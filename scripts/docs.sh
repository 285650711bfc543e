#!/usr/bin/env bash
# Write the documents that are generated from specs: each role's README (aar-doc) and docs/inventory.md.
# docs.sh --check changes nothing and fails when one is out of step.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-write}
failed=0
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

settle() { # FRESH TARGET
    if [ "$mode" = --check ]; then
        if ! diff -u "$2" "$1" >"$tmp/diff" 2>&1; then
            echo "error: $2 is out of step with its source: run make docs" >&2
            head -n 20 "$tmp/diff" >&2
            failed=1
        fi
    else
        cp "$1" "$2"
    fi
}

for role in roles/*/; do
    role=${role%/}
    aar-doc --output-file "$tmp/README.md" --output-mode replace "$role" markdown >/dev/null
    if [ -f "$role/README.md" ] && [ -f "$role/$tmp/README.md" ]; then rm -rf "${role:?}/$tmp"; fi
    settle "$tmp/README.md" "$role/README.md"
    rm -f "$tmp/README.md"
done
python scripts/inventory_reference.py > "$tmp/inventory.md"
settle "$tmp/inventory.md" docs/inventory.md
exit "$failed"
