#!/usr/bin/env bash
# test.sh all|lint|unit|integration|molecule [SCENARIO...]: what `make test` runs, with the time of each step at the end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
results=()
failed=0

step() { # NAME COMMAND...
    local name=$1 start=$SECONDS state=passed
    shift
    printf '\n==> %s\n' "$name"
    if ! "$@"; then
        state=FAILED
        failed=$((failed + 1))
    fi
    results+=("$(printf '%-32s %-7s %4d s' "$name" "$state" $((SECONDS - start)))")
}

lint() {
    step "yamllint" yamllint --strict .
    step "ruff" ruff check --quiet .
    step "ruff format" ruff format --quiet --check .
    step "mypy (planner, strict)" mypy --no-error-summary plugins/plugin_utils
    step "shellcheck" shellcheck scripts/*.sh .ci/run
    step "ansible-lint (production)" ansible-lint --offline -q
    step "generated documents" scripts/docs.sh --check
}

unit() { step "unit tests, accuracy" python -m pytest tests/unit tests/accuracy; }

integration() { step "integration tests" python -m pytest tests/integration; }

scenarios() {
    local name
    for name in "$@"; do step "molecule $name" molecule test --scenario-name "$name"; done
}

molecule_all() {
    # The first scenarios are the cheap ones: a broken lab shows in a minute.
    if [ "$#" -gt 0 ]; then scenarios "$@"; else scenarios lab preflight ssh firewall driver cluster cluster_mp; fi
}

what=${1:-all}
[ "$#" -eq 0 ] || shift
case $what in
lint) lint ;;
unit) unit ;;
integration) integration ;;
molecule) molecule_all "$@" ;;
all)
    lint
    unit
    integration
    molecule_all
    ;;
*)
    echo "usage: test.sh all|lint|unit|integration|molecule [SCENARIO...]" >&2
    exit 2
    ;;
esac

printf '\n'
printf '%s\n' "${results[@]}"
printf '%d passed, %d failed\n' $((${#results[@]} - failed)) "$failed"
exit $((failed > 0))
