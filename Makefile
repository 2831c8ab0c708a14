# Works from a bare clone: needs a Python with venv, nothing else. `make help` lists the targets.

PYTHON ?= python3
# What pip installs as torch. A CPU build is enough, for example:  make test TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
PACKAGES := $(VENV)/.packages
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers
# Tests at a time: ranks of a test wait for each other for a good part of it
WORKERS := $(shell $(PYTHON) -c "import os; print(min(4, (3 * os.cpu_count() + 1) // 2))")

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-all test-slow lint bench bench-floors bench-small bench-peers bench-gpu bench-net reproduce pipelines faults matrix docs site clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch first, so that the packages depending on it find it and do not choose another build
$(PACKAGES): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[demo,test]'
	touch $@

# pip has compiled the C++ kernels; here that is done again for those that change later
$(INSTALLED): $(PACKAGES) setup.py ds_compress/version.py $(shell find ds_compress/kernels -name '*.cpp' -o -name '*.h')
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

demo: $(INSTALLED) ## train a 2-stage pipeline, uncompressed and compressed; writes runs/demo/summary.json
	$(BIN)/python launch/demo.py

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(INSTALLED) ## every feature once, on the CPU
	$(PYTEST) --cases each

test-rest: $(INSTALLED) ## what `make test` leaves out: cross products, long tests
	$(PYTEST) --cases rest

test-all: $(INSTALLED) ## the whole CPU test suite
	$(PYTEST)

test-slow: $(INSTALLED) ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(INSTALLED) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED) ## speed and error of every codec on this machine
	$(BIN)/ds-compress bench

bench-floors: $(INSTALLED) ## the least speed of codecs on one core, judged
	OMP_NUM_THREADS=1 $(BIN)/python launch/bench/floors.py

bench-small: $(INSTALLED) ## what a small message costs through the channel, and what a feedback adds to a large one
	OMP_NUM_THREADS=1 $(BIN)/python launch/bench/small.py

$(PEERS)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet $(TORCH)
	$(PEERS)/bin/python -m pip install --quiet -e '.[peers]'
	touch $@

bench-peers: $(PEERS)/.installed ## against other libraries, on one core
	OMP_NUM_THREADS=1 $(PEERS)/bin/python launch/bench/peers.py

bench-gpu: $(PEERS)/.installed ## on a GPU, against its memory and other libraries; needs TORCH=torch or another CUDA build
	$(PEERS)/bin/python launch/bench/gpu.py

bench-net: $(INSTALLED) ## two hosts with a slow link between them, on this machine; needs root
	$(BIN)/python launch/bench/net.py

PRESET ?= cpu
JOBS ?= 1
reproduce: $(INSTALLED) ## the experiments of arXiv 2401.07788: PRESET=cpu|paper DATA=folder, also JOBS= and ARGS=
	OMP_NUM_THREADS=1 $(BIN)/python launch/reproduce.py --preset $(PRESET) $(if $(DATA),--data $(DATA)) --jobs $(JOBS) $(ARGS)

pipelines: $(INSTALLED) ## every kind of pipeline, as the table of docs/pipelines.md
	$(BIN)/python -m tests.support.pipeline_kinds

faults: $(INSTALLED) ## killed and stopped ranks, damaged packets: time until all have stopped, as a table
	$(BIN)/python -m tests.support.faults

matrix: ## the pipeline tests over releases of DeepSpeed and torch, each in its own environment, as a table
	$(PYTHON) launch/bench/matrix.py

docs: $(INSTALLED) ## the tables, plots and reference pages of README.md and docs/ that are generated
	$(BIN)/python launch/pages.py

site: $(INSTALLED) ## docs/ as a website in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove the virtual environment, runs and caches
	rm -rf $(VENV) $(PEERS) .matrix runs build *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f ds_compress/kernels/*.so
