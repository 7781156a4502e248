.PHONY: help demo demo-agents test test-all unit integration faults readers soak check format bench notebooks clean
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
WHOLE_RUNS := integration pipelines notebooks benchmarks
# A process a core, each with one thread of its own.
UNIT_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal \
	$(foreach folder,$(WHOLE_RUNS) faults readers,--ignore=tests/$(folder))

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/demo  ## teach a tiny model on this machine, in a minute
	$(BIN)/ludic demo

demo-agents: .venv/demo  ## teach a tiny model to call a tool: demonstrations, warm start, RL, in five minutes
	$(BIN)/ludic demo --agents

test: .venv/installed  ## run the quick tests, in some minutes
	$(UNIT_TESTS) -m "not slow"

test-all: check faults readers integration unit  ## run everything, as CI does, in about an hour

unit: .venv/installed  ## run all tests of the package's parts, the slow ones too
	$(UNIT_TESTS)

integration: .venv/installed  ## whole runs in processes of their own, pipelines, notebooks, benchmarks at a tiny size
	$(BIN)/python -m pytest $(foreach folder,$(WHOLE_RUNS),tests/$(folder))

faults: .venv/installed  ## a thousand injected crashes and a hundred real kills
	$(BIN)/python -m pytest tests/faults

soak: .venv/installed  ## the state machine of the store, for an hour
	LUDIC_SOAK=1 $(BIN)/python -m pytest tests/faults --timeout=7200

readers: .venv/readers  ## read a root with pandas, datasets, Ray and Spark
	$(BIN)/python -m pytest tests/readers

check: .venv/installed  ## format, lint, types, import contracts, generated docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m ludic.schema | diff docs/schemas.md - || (echo "docs/schemas.md is stale; run make format"; exit 1)

format: .venv/installed  ## format the code, write the generated docs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m ludic.schema > docs/schemas.md

bench: .venv/installed  ## measure against what a user would pick instead
	$(BIN)/python -m benchmarks

notebooks: .venv/installed  ## execute the notebooks on a store that a run really made
	$(BIN)/python -m pytest tests/notebooks

clean:  ## remove what the other targets made
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/readers: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[readers]'
	touch $@

# What the tests, the checks and the notebooks need besides the package.
.venv/installed: .venv/demo
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The package alone. constraints.txt pins every package, so that two machines install the same.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@
