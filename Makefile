.PHONY: help demo demo-agents test test-all environments test-vllm vllm-engines vllm-runs vllm-servers inspect trl verifiers \
	verifiers-v1 verifiers-legacy 8bit light unit integration faults readers trackers clusters gateway-clients soak durations mutants check format docs docs-serve \
	bench gpu notebooks clean collect
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
# The longest first: whoever runs it must not begin it last.
WHOLE_RUNS := benchmarks post_training integration pipelines notebooks
VLLM := .venv-vllm/bin
# Beside .venv, which is complete before they are begun.
OTHER_ENVIRONMENTS := .venv-vllm/installed .venv/inspect/installed .venv/docs/installed \
	.venv/light/installed .venv/verifiers/installed .venv/verifiers-legacy/installed .venv/8bit/installed .venv/trl/installed \
	.venv/trackers/installed
# Tests start hundreds of processes, and each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=
# pip would compile 50,000 files, which is most of an installation. Python compiles those that are imported.
export PIP_COMPILE := 0
# Tests take warnings for errors, and these packages warn when they are compiled.
COMPILE_WHAT_WARNS = $(@D)/bin/python -m compileall -qq $(addprefix $(@D)/lib/python*/site-packages/,cellpylib textarena) || true
# Real processes and sampled models depend on what else the machine does: a test that fails is run once more, and shown.
# How long each test took is kept as build/tests/TARGET.xml.
TWICE = --reruns 1 --rerun-show-tracebacks -rfER --junitxml=build/tests/$@.xml
CORES := $(shell getconf _NPROCESSORS_ONLN)
# Three processes for two cores, each with one thread of its own: a third of their time they wait.
PROCESSES := $(shell expr $(CORES) \* 3 / 2)
# Two processes a core: beside three, a tenth of two cores was idle.
UNIT_PROCESSES = $(shell expr $(CORES) \* 2)
UNIT_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(UNIT_PROCESSES) --dist worksteal $(WITHOUT_OTHERS)
WITHOUT_OTHERS = $(foreach folder,$(WHOLE_RUNS) faults readers clusters gateway_clients,--ignore=tests/$(folder))

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/demo  ## teach a tiny model on this machine, in a minute
	$(BIN)/ludic demo

demo-agents: .venv/demo  ## teach a tiny model to call a tool: demonstrations, warm start, RL, in five minutes
	$(BIN)/ludic demo --agents

test: .venv/installed  ## run the quick tests
	$(UNIT_TESTS) -m "not slow"

# Targets that run one test at a time go side by side, the longest first; so do installations, beside the first tests.
# `unit` is the longest: the others go beside it, two at a time, and it has fewer processes than alone. All go on when
# one has failed, so that a run names all that fails.
test-all:  ## run everything, as CI does, in half an hour on two cores
	$(MAKE) --jobs 2 .venv/clusters .venv-vllm/installed
	$(MAKE) --keep-going --jobs 4 --output-sync=target $(OTHER_ENVIRONMENTS) $(addprefix timed-,check docs faults)
	$(MAKE) timed-integration
	$(MAKE) --keep-going --jobs 3 --output-sync=target UNIT_PROCESSES=$(PROCESSES) \
		$(addprefix timed-,unit vllm-servers vllm-runs vllm-engines clusters readers verifiers-v1 verifiers-legacy trl inspect \
		trackers 8bit light)

# A line at the end of each target, with its seconds, shows where a run is that nears its limit.
timed-docs: .venv/docs/installed
timed-%:
	@began=$$(date +%s); $(MAKE) --no-print-directory $*; code=$$?; \
	echo "== $* ended with $$code after $$(($$(date +%s) - began)) s"; exit $$code

collect: .venv/installed  ## import every test file in every environment that is installed
	@.ci/collect

environments: .venv/clusters  ## install all that the tests need
	$(MAKE) --jobs 3 $(OTHER_ENVIRONMENTS)

unit: .venv/installed  ## run all tests of the package's parts, the slow ones too
	$(UNIT_TESTS) $(TWICE)

integration: .venv/installed  ## whole runs in processes of their own, pipelines, notebooks, benchmarks at a tiny size
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(TWICE) $(foreach folder,$(WHOLE_RUNS),tests/$(folder))

faults: .venv/installed  ## hundreds of injected crashes and real kills
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(TWICE) tests/faults

soak: .venv/installed  ## the state machine of the store, for an hour; kills and random trees of calls, in larger numbers
	LUDIC_SOAK=1 $(BIN)/python -m pytest tests/faults tests/rollouts/test_killed_requests.py tests/gateway --timeout=7200

readers: .venv/readers  ## read a root with pandas, datasets, Ray and Spark
	$(BIN)/python -m pytest $(TWICE) tests/readers

test-vllm: vllm-engines vllm-runs vllm-servers  ## sample with vLLM on the CPU: engine suite, whole runs

# The other engines' tests are part of `unit`, and so are those of servers that only look like vLLM's.
vllm-engines: .venv-vllm/installed
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest $(TWICE) -k "vllm or server" tests/engines \
		--ignore=tests/engines/test_server_engine.py

vllm-runs: .venv-vllm/installed
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest $(TWICE) tests/vllm_runs --ignore=tests/vllm_runs/test_server_runs.py

vllm-servers: .venv-vllm/installed
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest $(TWICE) tests/vllm_runs/test_server_runs.py

inspect: .venv/inspect/installed  ## write and read logs of inspect_ai, with its own readers
	.venv/inspect/bin/python -m pytest --junitxml=build/tests/$@.xml tests/adapters/exports/test_inspect_logs.py tests/adapters/imports/test_inspect.py

trackers: .venv/trackers/installed  ## log a run to MLflow and Trackio on this machine, and read it back
	OMP_NUM_THREADS=1 .venv/trackers/bin/python -m pytest $(TWICE) tests/adapters/test_local_trackers.py

light: .venv/light/installed  ## run what needs no torch, the gateway too, in an environment of the package alone
	.venv/light/bin/pip install --quiet --no-deps --force-reinstall .
	.venv/light/bin/python -m pytest $(TWICE) --confcutdir tests/light tests/light

trl: .venv/trl/installed  ## record trainers of TRL: killed and resumed, on two ranks, into stores that fail
	OMP_NUM_THREADS=1 .venv/trl/bin/python -m pytest $(TWICE) tests/adapters/trl

verifiers: verifiers-v1 verifiers-legacy  ## run environments of both APIs of verifiers

verifiers-v1: .venv/verifiers/installed
	OMP_NUM_THREADS=1 .venv/verifiers/bin/python -m pytest $(TWICE) -k "verifiers or prime_rl" \
		tests/adapters/environments/test_verifiers_v1.py tests/adapters/environments/test_verifiers_runs.py tests/test_coming_from_guide.py

verifiers-legacy: .venv/verifiers-legacy/installed
	OMP_NUM_THREADS=1 .venv/verifiers-legacy/bin/python -m pytest $(TWICE) \
		tests/adapters/environments/test_verifiers_legacy.py tests/adapters/environments/test_verifiers_runs.py

8bit: .venv/8bit/installed  ## train with moments in 8 bits, beside float32
	PYTHONPATH=.venv/8bit OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWICE) tests/training/test_adamw_8bit.py

clusters: .venv/clusters  ## a run on a Ray cluster that loses nodes
	$(BIN)/python -m pytest $(TWICE) tests/clusters

# Not part of test-all: it installs 1.5 GB, and needs node 20 and npm.
gateway-clients: .venv/clients-openai3/installed .venv/clients-openai2/installed .venv/clients-node/installed  ## run real agents and SDKs through the gateway
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWICE) tests/gateway_clients

durations:  ## list the files whose tests took longest in the last run of each target
	$(BIN)/python .ci/durations.py

mutants: .venv/installed  ## break 60 places of the package, one at a time, and count those that the quick tests notice
	rm -rf build/mutants
	$(BIN)/python .ci/mutants.py cover -m "not slow" $(WITHOUT_OTHERS)
	$(BIN)/python .ci/mutants.py run

check: .venv/installed  ## format, lint, types, import contracts, generated docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python .ci/contracts.py
	$(BIN)/python -m ludic.records | diff docs/schemas.md - || (echo "docs/schemas.md is stale; run make format"; exit 1)
	$(BIN)/python -m ludic.app.cli.docs --check
	$(BIN)/python -m ludic.root docs/storage.md --check

format: .venv/installed  ## format the code, write the generated docs
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m ludic.records > docs/schemas.md
	$(BIN)/python -m ludic.app.cli.docs
	$(BIN)/python -m ludic.root docs/storage.md

docs: .venv/docs/installed  ## make the documentation site in build/site, with every link checked
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --quiet --strict

# A browser loads the search index over http only, never from a file.
docs-serve: .venv/docs/installed  ## serve the documentation site, with its search, at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs serve --strict $(ARGS)

bench: .venv/installed  ## measure against what a user would pick instead
	$(BIN)/python -m benchmarks

# On a machine without .venv, by its own python3 with PyTorch: nothing is installed.
gpu:  ## check and measure on this machine's GPU, in eight minutes; ARGS="--device cpu" shows that it runs
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(ARGS)

notebooks: .venv/installed  ## execute the notebooks on a store that a run really made
	$(BIN)/python -m pytest tests/notebooks

clean:  ## remove what the other targets made
	rm -rf .venv .venv-vllm build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/readers: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[readers]'
	touch $@

# vLLM pins other versions than constraints.txt, so it gets an environment of its own.
.venv-vllm/installed: pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install --quiet --upgrade pip
	$(VLLM)/pip install --quiet --no-deps --requirement requirements-vllm.txt
	$(VLLM)/pip install --quiet --no-deps --editable .
	$(COMPILE_WHAT_WARNS)
	touch $@

.venv/clusters: .venv/readers
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[clusters]'
	touch $@

# These want other versions than constraints.txt pins: their packages lie over those of .venv. Of verifiers, 0.3.1 is the
# newest with load_environment, and 0.4 has v1 alone.
.venv/inspect/installed: OVER = inspect-ai==0.3.285 pandas==3.1.1
.venv/trl/installed: OVER = trl==1.16.0
.venv/verifiers/installed: OVER = verifiers==0.4.0
.venv/verifiers-legacy/installed: OVER = verifiers==0.3.1
# MLflow wants cachetools below 8, and Trackio pillow below 13.
.venv/trackers/installed: OVER = mlflow-skinny==3.17.2 alembic==1.20.1 trackio==0.43.0
.venv/inspect/installed .venv/trl/installed .venv/trackers/installed .venv/verifiers/installed \
.venv/verifiers-legacy/installed: .venv/installed
	$(PYTHON) -m venv --without-pip $(@D)
	$(@D)/bin/python -c "from sysconfig import get_path as path; from pathlib import Path; \
		below = path('purelib').replace('$(@D)', '.venv'); \
		Path(path('purelib'), 'below.pth').write_text(f'import site; site.addsitedir({below!r})')"
	$(BIN)/pip --python $(@D)/bin/python install --quiet $(OVER)
	touch $@

# A copy of the package, as others install it, which the target makes again. The S3 server of its tests runs in .venv.
.venv/light/installed: .venv/installed
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint constraints.txt '.[gateway,s3]' pytest pytest-rerunfailures pytest-timeout
	touch $@

# transformers imports torchao wherever it finds it, which takes a second of each start. It warns when it is compiled.
.venv/8bit/installed: .venv/installed
	$(BIN)/pip install --quiet --no-deps --compile --constraint constraints.txt --target .venv/8bit --upgrade torchao
	touch $@

# Agents and SDKs that know nothing of ludic, in environments without it.
.venv/clients-openai3/installed: OVER = openai==3.57.0 anthropic==2.14.0 openai-agents==0.24.0 litellm==1.110.2 \
	langgraph==1.2.24 langchain-openai==1.7.4 'pydantic-ai-slim[openai]==2.68.0' smolagents==1.26.0 mini-swe-agent==2.4.6
.venv/clients-openai2/installed: OVER = openai==2.54.0
.venv/clients-openai3/installed .venv/clients-openai2/installed: .venv/installed
	$(PYTHON) -m venv --without-pip $(@D)
	$(BIN)/pip --python $(@D)/bin/python install --quiet $(OVER)
	touch $@

.venv/clients-node/installed: .venv/installed
	npm install --silent --no-audit --no-fund --prefix $(@D) @mariozechner/pi-coding-agent@0.73.1 @openai/codex@0.169.0 \
		opencode-ai@1.18.33 @anthropic-ai/claude-code@2.1.197
	node $(@D)/node_modules/@anthropic-ai/claude-code/install.cjs  # newer versions of npm do not run it
	touch $@

# mkdocs reads the package as text: the site needs these three packages, not ludic's own.
.venv/docs/installed:
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/pip install --quiet mkdocs-material==9.8.2 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11
	touch $@

# What the tests, the checks and the notebooks need besides the package.
.venv/installed: .venv/demo
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(COMPILE_WHAT_WARNS)
	touch $@

# What runs and trains. constraints.txt pins every package, so that two machines install the same.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@
