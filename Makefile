# Each target does all the set-up that it needs: a fresh machine wants python3 with venv, and a C++ compiler for the
# native kernels (without one everything works, slower).

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
BENCH_OPTIONS ?=
DEMO_PROMPT ?= A river that runs at bankfull is

VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
BUILD_INPUTS := pyproject.toml CMakeLists.txt bankfull/__init__.py $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help install demo bench test test-full lint clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## Create .venv with the package (editable), its kernels and the tools; quick when nothing changed
	@mkdir -p $(STAMPS)
	@key=$$(echo "$(PYTHON) $(TORCH)" | cat - $(BUILD_INPUTS) | cksum); \
	if [ -x $(BIN)/bankfull ] && [ "$$key" = "$$(cat $(STAMPS)/install 2>/dev/null)" ]; then exit 0; fi; \
	set -e; \
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --upgrade pip; \
	$(BIN)/python -m pip install --quiet "$(TORCH)"; \
	$(BIN)/python -m pip install --quiet "scikit-build-core>=1.1" "nanobind>=3.1" cmake ninja; \
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation \
		--editable ".[test,lint,hub]"; \
	$(BIN)/python -c "from bankfull.ops import native; print('bankfull:', native.status() or 'native kernels ready, ' + native.select_isa())"; \
	echo "$$key" > $(STAMPS)/install

demo: install ## Fetch the default model and let it write a few words
	$(BIN)/bankfull pull
	$(BIN)/bankfull run "$(DEMO_PROMPT)"

bench: install ## Compare with llama.cpp and vLLM on this machine; BENCH_OPTIONS="--peers llamacpp --pairs 3" for less, "--help" for all
	$(BIN)/python -m benchmarks.cpu_peers $(BENCH_OPTIONS)

lint: install ## Style, types and the rules on who may import whom
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: install lint ## Lint, then the quick tests
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not full"

test-full: install lint ## Lint, then every test
	$(BIN)/python -m pytest -q -n $(WORKERS)

clean: ## Remove the environment, builds and caches
	rm -rf $(VENV) $(STAMPS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find bankfull tests -name __pycache__ -type d -prune -exec rm -rf {} +
