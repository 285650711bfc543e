#!/usr/bin/env bash
# lab.sh up|down INVENTORY: the lab as one command. Called by `make lab` and `make lab-down`.
set -euo pipefail
cd "$(dirname "$0")/.."
action=$1 inventory=$2
say() { printf '\n==> %s\n' "$*"; }
become=()
if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then become=(--ask-become-pass); fi
start=$SECONDS
case $action in
up)
    say "1/3 booting the lab's nodes (packages and node images are fetched or built the first time)"
    ansible-playbook playbooks/lab_up.yml -i "$inventory" "${become[@]}"
    say "2/3 deploying: ansible-playbook site.yml -i $inventory"
    ansible-playbook site.yml -i "$inventory"
    say "3/3 asking the deployed endpoint ($((SECONDS - start)) s so far)"
    scripts/ask.py
    ;;
down)
    ansible-playbook playbooks/lab_down.yml -i "$inventory" "${become[@]}"
    ;;
*)
    echo "usage: lab.sh up|down INVENTORY" >&2
    exit 2
    ;;
esac
