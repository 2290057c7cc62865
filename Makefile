# `make demo` and `make test` need Python 3.11 or newer, and nothing else.
PYTHON ?= python3
VENV ?= .venv
# A package index that holds torch, for machines that should not fetch CUDA builds from the default one, e.g.
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# What `make demo` may run on: any, cpu or gpu.
DEVICE ?= any
# How long `make fuzz` fuzzes each of its fifteen targets.
FUZZ_SECONDS ?= 600

BIN := $(VENV)/bin
CAPSULE := $(CURDIR)/$(BIN)/capsule
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
DEMO := build/demo
PROTOCOL := protocols/0001-prefix-shared-gradients.toml

.DEFAULT_GOAL := help
.PHONY: help install demo conformance test test-slow test-gpu test-slurm test-exports fuzz lint types check bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/' | expand -t 16

install: $(INSTALLED) ## make .venv with everything

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "capsule needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	$(PIP) --index-url $(TORCH_INDEX) torch
endif
	$(PIP) --editable '.[experiments,dev]'
	touch $@

demo: $(INSTALLED) ## freeze, run, pack, verify and replay a real small experiment
	rm -rf $(DEMO) && mkdir -p $(DEMO)/.capsule
	cp -R experiments protocols constraints.txt $(DEMO)/
	cd $(DEMO) && $(CAPSULE) freeze $(PROTOCOL)
	cd $(DEMO) && $(CAPSULE) run $(PROTOCOL) --device $(DEVICE)
	cd $(DEMO) && $(CAPSULE) pack $(PROTOCOL) --output demo.capsule
	cd $(DEMO) && $(CAPSULE) verify demo.capsule
	cd $(DEMO) && $(CAPSULE) replay demo.capsule --execute
	cd $(DEMO) && $(CAPSULE) report demo.capsule --output report.html
	@echo "The capsule is $(DEMO)/demo.capsule, its report $(DEMO)/report.html."

test: $(INSTALLED) ## run the tests
	$(BIN)/python -m pytest -n 3

test-slow: $(INSTALLED) ## run the tests that crash, kill and fail everything at every state
	$(BIN)/python -m pytest -n 3 -m slow

test-gpu: $(INSTALLED) ## run the tests that need an NVIDIA device
	$(BIN)/python -m pytest --override-ini addopts="--import-mode=importlib" tests/gpu

test-slurm: $(INSTALLED) ## run the tests that need a Slurm: installs Debian's and starts one (root)
	tests/slurm/setup
	$(BIN)/python -m pytest --override-ini addopts="--import-mode=importlib" tests/slurm

test-exports: $(INSTALLED) ## show exports to RO-Crate's validator and to MLflow: installs both in build/exports
	test -x build/exports/bin/python || $(PYTHON) -m venv build/exports
	build/exports/bin/python -m pip install --quiet roc-validator rocrate mlflow-skinny sqlalchemy alembic
	$(BIN)/python -m pytest --override-ini addopts="--import-mode=importlib" tests/exports

fuzz: $(INSTALLED) ## fuzz every reader, guided by coverage, FUZZ_SECONDS each; flip every bit; change much
	for target in $$($(BIN)/python -m tests.fuzz --list); do mkdir -p build/fuzz/$$target || exit; \
	    $(BIN)/python -m tests.fuzz $$target build/fuzz/$$target -artifact_prefix=build/fuzz/ \
	    -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 || exit; done
	CAPSULE_EVERY_BIT=1 CAPSULE_CHANGES=300 $(BIN)/python -m pytest tests/attacks

conformance: $(INSTALLED) ## try both verifiers on every golden and vector, by command line
	$(BIN)/python -m tests.conformance.kit --verifier '$(CURDIR)/$(BIN)/capsule verify {file} {options} --json'
	$(BIN)/python -m tests.conformance.kit --verifier '$(CURDIR)/$(BIN)/python ../conformance/verifier.py {file} {options}'

lint: $(INSTALLED) ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## check types
	$(BIN)/mypy

check: lint types test ## everything that CI runs but the demo

bench: $(INSTALLED) ## run the benchmarks, by hand
	for file in benchmarks/*.py; do $(BIN)/python $$file || exit; done

clean: ## remove what make made
	rm -rf build $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache
