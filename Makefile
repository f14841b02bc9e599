# `make` lists the targets. Everything runs from the virtual environment in .venv.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.specfleet-installed
LOCK := deploy/locks/cpu.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help setup test check bench soak demo clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Create .venv and install the pinned requirements and SpecFleet into it

test: setup check ## Run the checks, then every test, the slow ones included
	@$(BIN)/python -m pytest -q -ra

check: setup ## Check format, lint, types and the direction of imports
	@$(BIN)/ruff format --check --quiet . || { echo "format: $(BIN)/ruff format . puts it right"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo --no-cache >.venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	@echo "check: format, lint, types and imports are in order"

bench: setup ## Run the benchmarks and print what they measured
	@$(BIN)/python -m tests.benchmarks

soak: setup ## Half an hour of load while the estimator is killed again and again
	@$(BIN)/python -m tests.soak soak.jsonl

demo: setup ## Bring up two vLLM replicas, send them traffic, and show what the fleet learns
	@$(BIN)/specfleet demo

clean: ## Remove caches and build products; .venv stays
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: debian-packages
debian-packages:
	@.ci/debian-packages || echo "setup: going on without them; tests that need them are skipped"

# The phony prerequisite is order-only: it runs first and never makes the stamp look old.
$(STAMP): $(LOCK) pyproject.toml | debian-packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "setup: $(PYTHON) is $$($(PYTHON) --version 2>&1 || true); SpecFleet needs Python 3.11 or newer." >&2; \
	    echo "       Name another with \`make setup PYTHON=python3.11\`." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@total=$$(grep -c '^[a-z].*==' $(LOCK)); \
	echo "setup: installing $$total pinned packages into .venv, a few minutes the first time"; \
	$(BIN)/python -m pip install --no-deps -r $(LOCK) | awk -v total="$$total" ' \
	    /^(Collecting|Processing|Requirement already satisfied)/ && ++n % 25 == 0 { print "  " n " of " total; fflush() } \
	    /^Installing collected packages/ { print "  all fetched; unpacking"; fflush() }'
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch' || { \
	    echo "setup: torch does not load, probably because pip found only its CUDA build. Remove .venv and" >&2; \
	    echo "       run make setup with PIP_EXTRA_INDEX_URL set to the index of PyTorch's CPU builds." >&2; exit 1; }
	@touch $@
	@echo "setup: done"
