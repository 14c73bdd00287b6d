# `make quickstart` and `make test` do all set-up themselves. They need make and Python 3.12.

PYTHON := $(shell for p in python3.12 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 && { command -v $$p; break; }; done)
UV := $(or $(shell command -v uv),.bootstrap/bin/uv)
BIN := .venv/bin
SOURCES := flows tasks models infra data ops tests

# Compiled once here; a machine that forbids writing bytecode would compile 15,000 files in every process.
export UV_COMPILE_BYTECODE := 1
export UV_PYTHON_DOWNLOADS := never
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test test-slow test-games test-sglang lint format benchmark clean
.DEFAULT_GOAL := quickstart

quickstart: .venv/synced ## train the toy model on sorting, in minutes
	$(BIN)/rollbook run flows/configs/sort.toml

test: .venv/synced ## everything but the slow tests
	$(BIN)/pytest

test-slow: .venv/synced ## the slow ones
	$(BIN)/pytest -m slow

test-games: ## those of TextWorld; adds it to the environment (`make test` takes it away again); needs a C compiler
	rm -f .venv/synced
	$(MAKE) .venv/synced EXTRA="--extra games"
	$(BIN)/pytest -m "slow or not slow" tests/models/environments
	rm -f .venv/synced

test-sglang: ## those of SGLang, on the CPU; adds it to the environment (`make test` takes it away again)
	rm -f .venv/synced
	$(MAKE) .venv/synced EXTRA="--extra sglang"
	$(BIN)/pytest -m sglang
	rm -f .venv/synced

lint: .venv/synced ## style, types of ops and data, import directions
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ty check
	$(BIN)/lint-imports

format: .venv/synced
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

benchmark: .venv/synced ## the figures of docs/performance.md
	for name in gae tables advantages training orchestration resume lineage traces iteration agents; do PYTHONPATH=. $(BIN)/python tests/benchmarks/$$name.py || exit 1; done

clean: ## forget runs and environment
	rm -rf .venv .bootstrap .rollbook

.venv/synced: uv.lock pyproject.toml | $(UV)
	@test -n "$(PYTHON)" || { echo "Rollbook needs Python 3.12: no python3.12, python3 or python of that version is on the PATH; install it"; exit 1; }
	$(UV) sync --locked $(EXTRA) --python "$(PYTHON)"
	@touch $@

.bootstrap/bin/uv:
	@test -n "$(PYTHON)" || { echo "Rollbook needs Python 3.12: no python3.12, python3 or python of that version is on the PATH; install it"; exit 1; }
	"$(PYTHON)" -m venv .bootstrap
	.bootstrap/bin/pip install --quiet uv
