# Two commands for a fresh Debian or Ubuntu machine: `make lab` and `make test`. `make help` lists the others.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
export VENV
export PATH := $(abspath $(VENV))/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
# Without byte code each of the many short Python starts compiles Ansible anew.
unexport PYTHONDONTWRITEBYTECODE
INVENTORY ?= inventories/lab

.PHONY: help venv requirements lock artifacts lab lab-down ask lint unit integration molecule test docs golden collection clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## Build .venv with the pinned tools (PYTHON=python3.12 chooses the interpreter)
	@scripts/venv.sh

lab: venv ## Boot three local nodes, deploy to them over SSH, print a completion
	@scripts/lab.sh up $(INVENTORY)

lab-down: venv ## Remove the lab: processes, mounts, namespaces, files
	@scripts/lab.sh down $(INVENTORY)

ask: ## Ask the lab's endpoint again (PROMPT="...")
	@scripts/ask.py $(if $(PROMPT),"$(PROMPT)")

lint: venv ## ansible-lint, yamllint, ruff, mypy, documents in step with the specs
	@scripts/test.sh lint

unit: venv ## Unit and property tests
	@scripts/test.sh unit

integration: venv ## Wrong inventories, collection tarball, every supported ansible-core at hand
	@scripts/test.sh integration

molecule: venv ## Molecule scenarios on booted nodes (SCENARIO=cluster for one)
	@scripts/test.sh molecule $(SCENARIO)

test: venv ## Everything: lint, unit, integration, molecule
	@scripts/test.sh all

docs: venv ## Write the generated documents (role READMEs, inventory reference)
	@scripts/docs.sh

golden: venv ## Write tests/golden: what the roles render for the inventories in tests/topologies
	@scripts/golden.sh

requirements: venv ## Resolve requirements.in into requirements.txt
	@uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-emit-index-url --upgrade \
		--custom-compile-command "make requirements" -o requirements.txt requirements.in

lock: venv ## Resolve the runtime's lock files (vLLM, Ray, torch) anew
	@scripts/lock.sh

artifacts: venv ## List all that a deployment fetches (DOWNLOAD=folder fetches it, CHECK=folder compares, OS=debian12)
	@python scripts/artifacts.py $(if $(CHECK),--check "$(CHECK)") $(if $(DOWNLOAD),--download "$(DOWNLOAD)") \
		$(if $(filter-out file,$(origin INVENTORY))$(if $(CHECK),,default),--inventory "$(INVENTORY)") \
		$(foreach name,$(OS),--os $(name)) $(ARGUMENTS)

collection: venv ## Build the collection tarball into build/
	@ansible-galaxy collection build --force --output-path build

clean: ## Remove what builds and tests leave (not the lab: make lab-down)
	@rm -rf $(VENV) build .cache .ansible .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/output
