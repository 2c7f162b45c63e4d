# Each target does all the set-up that it needs: a fresh machine wants python3 with venv, and a C++ compiler for the
# native kernels (without one everything works, slower).

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
BENCH_OPTIONS ?=
GPU_OPTIONS ?=
SERVE_OPTIONS ?=
SOAK_OPTIONS ?=
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_EMULATOR ?= qemu-aarch64
DEMO_PROMPT ?= A river that runs at bankfull is

VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
CLIENTS_VENV := .venv-clients
CLIENTS := guidellm==0.8.1 langchain-openai litellm "lm_eval[api]" pytest pytest-timeout schemathesis transformers
COMMA := ,
KERNEL_TESTS := $(wildcard $(addprefix tests/,test_native.py test_packed.py test_tape.py test_attention_tiles.py test_ops.py))
GPU_TESTS := tests/gpu $(wildcard tests/sample/test_cuda.py tests/sample/test_triton_*.py tests/ops/test_triton_*.py)
BUILD_INPUTS := pyproject.toml CMakeLists.txt bankfull/__init__.py $(wildcard csrc/*.cpp csrc/*.hpp)

.DEFAULT_GOAL := help
.PHONY: help install demo serve bench lint test test-full test-gpu bench-gpu test-clients test-console soak test-kernels \
	test-sanitize test-aarch64 clean clients-environment

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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
		--editable ".[test,lint,charts,hub,serve]"; \
	$(BIN)/python -m compileall -q bankfull; \
	$(BIN)/python -c "from bankfull.ops import native; print('bankfull:', native.status() or 'native kernels ready, ' + native.select_isa())"; \
	echo "$$key" > $(STAMPS)/install

demo: install ## Fetch the default model and let it write a few words
	$(BIN)/bankfull pull
	$(BIN)/bankfull run "$(DEMO_PROMPT)"

serve: install ## Fetch the default model and serve it on 127.0.0.1:8000; SERVE_OPTIONS="MODEL --port 9000" for another
	$(BIN)/bankfull pull
	$(BIN)/bankfull serve $(SERVE_OPTIONS)

bench: install ## Compare with llama.cpp and vLLM on this machine; BENCH_OPTIONS="--peers llamacpp --pairs 3" for less, "--help" for all
	$(BIN)/python -m benchmarks.cpu_peers $(BENCH_OPTIONS)

lint: install ## Style, types and the rules on who may import whom
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: install lint ## Lint, then the quick tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -rs -m "not full"

test-full: install lint ## Lint, then every test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -rs

# A machine with a GPU is used as it is: its own Python with torch, triton, transformers and pytest; nothing is installed,
# nothing is fetched. Other packages may lie as wheels in the folder wheels/. Everything else that is not there is
# skipped, and counted.
ON_GPU = PYTHONPATH="$(CURDIR):$(CURDIR)/build/wheels"
define prepare_gpu
	@$(PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else '$@ needs a CUDA device; torch sees none.')"
	@for wheel in wheels/*.whl; do [ ! -e "$$wheel" ] || $(PYTHON) -m zipfile -e "$$wheel" build/wheels; done
endef

# Most of the suite's time goes into compiling kernels, so several processes share the device where pytest-xdist is
# there. What is measured runs alone.
GPU_ALONE := tests/gpu/test_limits.py
GPU_WORKERS ?= $$($(ON_GPU) $(PYTHON) -c "import execnet, os, xdist; print(max(1, len(os.sched_getaffinity(0)) - 2))" 2>/dev/null)
GPU_PYTEST = $(ON_GPU) BANKFULL_TEST_DEVICE=cuda $(PYTHON) -m pytest -q -m "not full" -p tests.gpu.summary --durations 10

test-gpu: ## The GPU suite with PYTHON's own packages, no network needed; GPU_OPTIONS="-m ''" for every combination
	$(call prepare_gpu)
	@workers="$(GPU_WORKERS)"; set -x; \
	$(GPU_PYTEST) $${workers:+-n $$workers --dist worksteal} --deselect $(GPU_ALONE) $(GPU_TESTS) $(GPU_OPTIONS)
	$(GPU_PYTEST) $(GPU_ALONE) $(GPU_OPTIONS)

bench-gpu: ## What the engine reaches on the GPU, beside the device's limits; GPU_OPTIONS="--work decode --timeline" for less, or more
	$(call prepare_gpu)
	$(ON_GPU) $(PYTHON) -m benchmarks.gpu $(GPU_OPTIONS)

# Heavy clients have an environment of their own. The server that they ask runs in the main one. guidellm needs
# torch: it gets the main environment's version, not the newest.
clients-environment:
	@mkdir -p $(STAMPS)
	@key=$$(echo '$(PYTHON) $(TORCH) $(CLIENTS)' | cksum); \
	if [ -x $(CLIENTS_VENV)/bin/schemathesis ] && [ "$$key" = "$$(cat $(STAMPS)/clients 2>/dev/null)" ]; then exit 0; fi; \
	set -e; \
	[ -x $(CLIENTS_VENV)/bin/python ] || $(PYTHON) -m venv $(CLIENTS_VENV); \
	$(CLIENTS_VENV)/bin/python -m pip install --quiet "$(TORCH)" $(CLIENTS); \
	echo "$$key" > $(STAMPS)/clients

test-clients: install clients-environment ## The service with guidellm, LangChain, LiteLLM and lm-evaluation-harness as clients
	BANKFULL_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS_VENV)/bin/python -m pytest -q --confcutdir=tests/clients tests/clients

# Playwright drives the system's own Chromium; it fetches no browser. `make test` has these tests too.
test-console: install ## The console in a real browser: Chromium must be there (Debian: apt-get install chromium)
	$(BIN)/python -m pytest -q -rs tests/console

soak: install clients-environment ## Long trials of the service, with figures; SOAK_OPTIONS="--short" for a quick look, "--help" for all
	$(BIN)/bankfull pull
	$(BIN)/python -m tests.soak $(SOAK_OPTIONS)

# $(call test_kernels,FOLDER,OPTIONS): builds the programs of csrc/tests in a folder of their own, and runs them.
WITH_TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"
define test_kernels
	$(WITH_TOOLS) cmake -S . -B build/$(1) -DBANKFULL_TESTS=ON $(2) > /dev/null
	$(WITH_TOOLS) cmake --build build/$(1) --parallel $(WORKERS)
	$(WITH_TOOLS) ctest --test-dir build/$(1) --verbose
endef

test-kernels: install ## Every kernel of this machine's instruction sets against plain loops, in C++
	$(call test_kernels,kernels)

test-sanitize: install ## The kernels under the address, undefined-behaviour and thread sanitizers
	$(call test_kernels,kernels-address,"-DBANKFULL_SANITIZE=address$(COMMA)undefined")
	$(call test_kernels,kernels-thread,-DBANKFULL_SANITIZE=thread)
	$(WITH_TOOLS) csrc/tests/sanitize.sh $(BIN)/python $(KERNEL_TESTS)

test-aarch64: install ## The kernels as they are compiled for 64-bit ARM, in an emulator
	@for tool in $(AARCH64_CXX) $(AARCH64_EMULATOR); do command -v $$tool > /dev/null || { \
		echo "make test-aarch64 needs $(AARCH64_CXX) and $(AARCH64_EMULATOR) (Debian: g++-aarch64-linux-gnu and" \
			"qemu-user), and $$tool is not there."; exit 1; }; done
	$(call test_kernels,kernels-aarch64,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=$(AARCH64_CXX) -DCMAKE_EXE_LINKER_FLAGS=-static \
		-DCMAKE_CROSSCOMPILING_EMULATOR=$(AARCH64_EMULATOR))

clean: ## Remove the environment, builds and caches
	rm -rf $(VENV) $(CLIENTS_VENV) $(STAMPS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find bankfull tests -name __pycache__ -type d -prune -exec rm -rf {} +
