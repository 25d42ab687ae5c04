# Every command of the project. Continuous integration (.ci/run) runs the same ones.
# Variables you may set: PYTHON (to make .venv with), CARGO, PYTEST_ARGS, WORKERS, SEEDS, FIRST_SEED, TRACE, FUZZ_CASES, FUZZ_SECONDS, DIST, LOCK_ARGS,
# SEED, MINUTES, JOB_MINUTES and STREAM_MINUTES (of chaos), MUTANTS_ARGS, EXPERIMENTS_ARGS.

PYTHON ?= python3
CARGO ?= cargo
PYTEST_ARGS ?=
# Processes that run the tests of `make test` side by side; auto: two for each core.
WORKERS ?= auto
SEEDS ?= 1000
FIRST_SEED ?= 0
TRACE ?=
FUZZ_CASES ?= 2000000
FUZZ_SECONDS ?= 60
SEED ?= 1
MINUTES ?= 3
JOB_MINUTES ?= 0.75
STREAM_MINUTES ?= 0.75
EXPERIMENTS_ARGS ?=
LOCK_ARGS ?=
MUTANTS_ARGS ?=
DIST ?= dist

VENV := .venv
BIN := $(VENV)/bin
# Cargo asks this interpreter about Python when it builds the binding. Always the same one:
# another answer would rebuild everything.
export PYO3_PYTHON := $(abspath $(BIN)/python)

# A test starts hundreds of Python processes: they read compiled modules, wherever this comes from.
unexport PYTHONDONTWRITEBYTECODE

# A file is run by one worker, which keeps its fixtures. Long tests come first, short ones fill up.
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder -n

RUST_SOURCES := $(shell find crates -name target -prune -o \( -name '*.rs' -o -name '*.toml' \) -print) \
	Cargo.toml $(wildcard Cargo.lock)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install lock demo demo-online test test-slow test-chaos test-kubernetes test-kubernetes-faults kubernetes-cluster chaos lint fmt mutants bench experiments fuzz docs proto wheel clean check-tools sim

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

check-tools:
	@command -v $(CARGO) >/dev/null || { \
	  echo "No '$(CARGO)' found: backstay's data plane is written in Rust. Install a toolchain" \
	       "(1.88 or newer) from https://rustup.rs and try again." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "backstay needs Python 3.10 or newer; choose one with 'make PYTHON=/path/to/python3 ...'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv." >&2; exit 1; }

# From nothing to `make install`: uv, what the demos need, the binding, all else. A changed .rs file rebuilds the binding only.
UV := $(BIN)/uv
UV_PIP := $(UV) pip install --python $(BIN)/python
# Compiled here as pip does: PYTHONDONTWRITEBYTECODE would have each process do it anew.
UV_LOCKED := $(UV_PIP) --compile-bytecode --requirement
LOCK = $(UV) pip compile --quiet --python $(BIN)/python --universal --python-version 3.10 --annotation-style line \
	--custom-compile-command 'make lock' $(LOCK_ARGS) setup.cfg

$(BIN)/python: | check-tools
	@echo "== $(VENV), and uv, which fills it: 25 MB"
	$(PYTHON) -m venv $(VENV)

$(UV): requirements/demo.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint $< uv
	@touch $@

$(VENV)/.demo: requirements/demo.txt | $(UV)
	@echo "== what requirements/demo.txt names: 250 MB"
	$(UV_LOCKED) $<
	@touch $@

$(VENV)/.all: requirements/all.txt | $(VENV)/.demo
	@echo "== what requirements/all.txt names, PyTorch with CUDA among it: 3.3 GB"
	$(UV_LOCKED) $<
	@touch $@

$(VENV)/.binding: $(RUST_SOURCES) setup.cfg setup.py pyproject.toml | $(VENV)/.demo
	@echo "== the binding: one to two minutes of compiling, the first time"
	$(BIN)/python setup.py --quiet build_rust --inplace
	$(UV_PIP) --quiet --no-build-isolation --no-deps --editable .
	@touch $@

install: check-tools $(VENV)/.binding $(VENV)/.all  ## build backstay into .venv, editable, with what the other commands need

lock: $(UV)  ## renew requirements/ after a change of setup.cfg; LOCK_ARGS=--upgrade takes the newest versions
	$(LOCK) --all-extras --output-file requirements/all.txt
	$(LOCK) $(addprefix --extra=,build bench kafka paddle) --constraints requirements/all.txt --no-annotate --output-file requirements/demo.txt

demo: check-tools $(VENV)/.binding  ## train a click model on real data: three pservers and two trainers on this machine
	$(BIN)/python examples/census/demo.py

demo-online: check-tools $(VENV)/.binding  ## learn from a topic of Kafka and serve meanwhile, some minutes; needs Java and Maven
	$(BIN)/python examples/online/demo.py

test: install  ## run the tests: Rust, then Python (some minutes)
	# All crates, as clippy: with two of them syn has other features, and is compiled once more.
	$(CARGO) test --workspace
	$(PYTEST) -m "not slow and not chaos and not kubernetes and not gates" $(SIDE_BY_SIDE) $(WORKERS) $(PYTEST_ARGS)

test-slow: install  ## run the tests that are marked slow: a wheel in a fresh environment, long jobs; all examples of properties
	EXAMPLES=all $(PYTEST) -m "(slow or hypothesis) and not chaos and not kubernetes" $(SIDE_BY_SIDE) 2 $(PYTEST_ARGS)

test-chaos: install  ## run the tests that kill, stop and cut off processes; they need a quiet machine
	$(PYTEST) -m "chaos and not kubernetes" $(SIDE_BY_SIDE) 2 $(PYTEST_ARGS)

kubernetes-cluster:  ## build the Kubernetes cluster of test-kubernetes, once, into a cache outside of this folder
	$(PYTHON) -m tests.kubernetes.build

test-kubernetes: install kubernetes-cluster  ## run the tests on a real Kubernetes cluster on this machine; needs root
	$(PYTEST) -m "kubernetes and not chaos" $(PYTEST_ARGS)
	# Where `make test` found no kubectl it left these out; now there is one.
	$(PYTEST) tests/unit/test_deploy_kubernetes.py $(PYTEST_ARGS)

test-kubernetes-faults: install kubernetes-cluster  ## run the long tests on that cluster: faults, jobs that grow and shrink, schedules
	$(PYTEST) -m "kubernetes and chaos" $(PYTEST_ARGS)

chaos: install  ## kill, pause and cut off real processes at random for MINUTES from SEED, then those of jobs for JOB_MINUTES, of streams for STREAM_MINUTES
	$(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES)
	$(BIN)/python -m tests.chaos jobs --seed $(SEED) --minutes $(JOB_MINUTES)
	$(BIN)/python -m tests.chaos streams --seed $(SEED) --minutes $(STREAM_MINUTES)

sim: install  ## run SEEDS simulated clusters from FIRST_SEED on; TRACE=1 tells everything that happens
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --first-seed $(FIRST_SEED) $(if $(TRACE),--trace)

lint: install  ## run every gate: style, types, layers, stubs, generated code, docs that name what exists
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_proto.py --check
	$(BIN)/python -m mypy.stubtest backstay._native --mypy-config-file pyproject.toml
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(PYTEST) -m "gates and not slow" $(PYTEST_ARGS)

fmt: install  ## format Python and Rust
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .
	$(CARGO) fmt --all

mutants: install  ## plant each known fault in a copy and say which the tests miss; MUTANTS_ARGS="--share 0.1 --seed X", --list, --only WORDS
	$(BIN)/python -m tools.mutants $(MUTANTS_ARGS)

bench: install  ## measure, beside the bare ceiling and the peers that are installed
	$(BIN)/python -m bench

experiments: install kubernetes-cluster  ## run the four experiments on a real Kubernetes cluster here, about 90 minutes; EXPERIMENTS_ARGS=--quick
	$(BIN)/python -m bench.experiments $(EXPERIMENTS_ARGS)

fuzz: check-tools  ## throw FUZZ_CASES damaged frames at the parser; see fuzz/README.md
	BACKSTAY_FUZZ_CASES=$(FUZZ_CASES) $(CARGO) test --release -p backstay-net --test fuzz_frame
	@if $(CARGO) fuzz --version >/dev/null 2>&1; then \
	  $(CARGO) fuzz run --sanitizer none frame -- -max_total_time=$(FUZZ_SECONDS); \
	else echo "cargo-fuzz is not installed: the run guided by coverage is left out."; fi

docs: install  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

proto: install  ## generate src/backstay/_proto from proto/
	$(BIN)/python tools/generate_proto.py

wheel: install  ## build the wheel into DIST (dist/)
	rm -rf build  # setuptools would pack modules left there by earlier builds
	$(BIN)/python -m build --wheel --no-isolation --outdir $(DIST)

clean:  ## remove what the other commands made, .venv included
	rm -rf $(VENV) build dist site .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf src/*.egg-info src/backstay/_native*.so
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	$(CARGO) clean
