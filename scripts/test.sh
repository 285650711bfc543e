#!/usr/bin/env bash
# test.sh [all | lint | unit | integration | molecule [SCENARIO...]]: what `make test` runs, with the time of each job at the end.
# Two jobs run side by side (JOBS=1: one), since most of them keep little more than one core busy.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
logs=tests/output/jobs

# The long ones first, so that none ends alone. `lab` leads: a broken lab shows in two minutes, and the others find its images
# ready. `cluster_mp` comes late enough to find the wheels that `cluster` has fetched.
scenarios=(lab cluster runtime driver model_store cluster_mp driver_upgrade preflight network firewall ssh)

lint() {
    local bad=0
    yamllint --strict . || bad=1
    ruff check --quiet . || bad=1
    ruff format --quiet --check . || bad=1
    mypy --no-error-summary plugins/plugin_utils || bad=1
    shellcheck scripts/*.sh .ci/run || bad=1
    ansible-lint --offline -q || bad=1
    scripts/docs.sh --check || bad=1
    return "$bad"
}

# Half of their time is waiting, so two of them run beside each other.
unit() {
    local bad=0
    python -m pytest tests/unit tests/accuracy -m "not alone" --numprocesses 2 --dist loadfile || bad=1
    python -m pytest tests/unit tests/accuracy -m alone || bad=1
    return "$bad"
}

job() { # NAME: its output goes to a log, which is shown when it fails
    local name=$1 start=$SECONDS state=passed
    printf '==> %s begins, %s\n' "$name" "$logs/${name// /_}.log"
    case $name in
    lint) lint ;;
    unit) unit ;;
    integration) python -m pytest tests/integration ;;
    molecule\ *) molecule test --scenario-name "${name#molecule }" ;;
    esac >"$logs/${name// /_}.log" 2>&1 || state=FAILED
    [ "$state" = passed ] || cat "$logs/${name// /_}.log"
    printf '%-32s %-7s %4d s\n' "$name" "$state" $((SECONDS - start)) | tee -a "$logs/results"
}

run() { # NAME...
    local failed
    rm -rf "$logs"
    mkdir -p "$logs"
    # In a process group of its own, so that an interrupted run takes its jobs along.
    set -m
    printf '%s\n' "$@" | xargs -d '\n' -n 1 -P "${JOBS:-2}" "$0" job &
    set +m
    # shellcheck disable=SC2064
    trap "kill -TERM -- -$! 2>/dev/null; wait; exit 130" INT TERM
    wait "$!"
    trap - INT TERM
    failed=$(($# - $(grep -c ' passed ' "$logs/results")))
    printf '\n'
    cat "$logs/results"
    printf '%d passed, %d failed\n' $(($# - failed)) "$failed"
    exit $((failed > 0))
}

what=${1:-all}
[ "$#" -eq 0 ] || shift
case $what in
job) job "$1" ;;
lint | unit | integration) run "$what" ;;
molecule)
    [ "$#" -gt 0 ] || set -- "${scenarios[@]}"
    run "${@/#/molecule }"
    ;;
all)
    set -- "${scenarios[@]/#/molecule }"
    run "$1" lint unit integration "${@:2}"
    ;;
*)
    echo "usage: test.sh [all | lint | unit | integration | molecule [SCENARIO...]]" >&2
    exit 2
    ;;
esac
