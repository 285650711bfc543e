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

# One lane is one scenario after the other. Of a scenario that fails, the log is shown.
lane() {
    local name start state child=''
    trap '[ -z "$child" ] || kill "$child"; exit 143' TERM
    for name in "$@"; do
        start=$SECONDS state=passed
        printf '==> molecule %s begins, %s\n' "$name" "$logs/$name.log"
        # In the background, so that a signal gets through to it at once.
        molecule test --scenario-name "$name" >"$logs/$name.log" 2>&1 &
        child=$!
        wait "$child" || state=FAILED
        [ "$state" = passed ] || cat "$logs/$name.log"
        printf '%-32s %-7s %4d s\n' "molecule $name" "$state" $((SECONDS - start)) | tee -a "$logs/results"
    done
}

lanes() { # "SCENARIO..." "SCENARIO...": side by side, since a scenario keeps little more than one core busy
    local words lane=() pids=() line
    logs=tests/output/molecule
    rm -rf "$logs"
    mkdir -p "$logs"
    for words in "$@"; do
        read -ra lane <<<"$words"
        lane "${lane[@]}" &
        pids+=($!)
    done
    trap 'kill "${pids[@]}" 2>/dev/null; wait' EXIT
    trap 'exit 130' INT TERM
    wait
    trap - EXIT INT TERM
    while read -r line; do
        results+=("$line")
        [[ $line != *FAILED* ]] || failed=$((failed + 1))
    done <"$logs/results"
}

molecule_all() {
    if [ "$#" -gt 0 ]; then
        scenarios "$@"
        return
    fi
    # Alone and first: a broken lab shows in a minute, and the others find its images ready.
    scenarios lab
    lanes "cluster cluster_mp" "preflight ssh firewall network driver driver_upgrade"
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
