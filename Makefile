# The two set-up commands are `make demo` and `make test`; both need a C++ compiler and some Python >= 3.12, no GPU. CMake, ninja
# and all else come from PyPI into .venv, at the versions that requirements/ pins.
#
# CUDA code is compiled only where there are GPUs to run it, to keep both commands short elsewhere: ENTWINE_CUDA=ON compiles it
# anywhere (.ci/run does), ENTWINE_CUDA=OFF nowhere.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# What the caller's own Python path holds must not stand in for what .venv lacks.
unexport PYTHONPATH

GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
ifeq ($(GPUS),0)
  ENTWINE_CUDA ?= OFF
  REQUIREMENTS := requirements/dev.txt
else
  ENTWINE_CUDA ?= ON
  REQUIREMENTS := requirements/cuda13.txt
endif
ENTWINE_WERROR ?= ON
ENTWINE_PTXAS_VERBOSE ?= OFF
ENTWINE_GPU_TESTS ?= OFF
export ENTWINE_CUDA ENTWINE_WERROR ENTWINE_PTXAS_VERBOSE ENTWINE_GPU_TESTS
SETTINGS := cuda=$(ENTWINE_CUDA) werror=$(ENTWINE_WERROR) ptxas_verbose=$(ENTWINE_PTXAS_VERBOSE) gpu_tests=$(ENTWINE_GPU_TESTS)

PIP := $(BIN)/python -m pip --disable-pip-version-check
# In front of a command that may compile CUDA code.
FIND_NVCC = if [ '$(ENTWINE_CUDA)' = ON ]; then CUDACXX=$$(scripts/find_nvcc.sh $(BIN)/python build/nvcc) || exit 1; export CUDACXX; fi

CPP := $(shell find cc tests/cc tests/gpu/cc -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

.PHONY: help demo test lint format test-cc test-py soak build wheel lock clean distclean FORCE
help: ## show this
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: build ## train a tensor-parallel MLP, on the GPUs where there are any, else on 8 virtual CPU devices
	$(BIN)/python examples/mlp.py

test: lint test-cc test-py ## all checks: lint, C++ tests under sanitizers, Python tests

# ---------------------------------------------------------------------------------------------------------------------
# Environment and build. Stamps in build/ and .venv/ make both free when nothing changed.

# The name says which requirements it has, so that a machine that gains GPUs gets theirs.
VENV_STAMP := $(VENV)/$(notdir $(REQUIREMENTS)).stamp
$(VENV_STAMP): $(REQUIREMENTS)
	@test -x $(BIN)/python || { python=$$(scripts/find_python.sh) && echo "Python: $$python" && "$$python" -m venv $(VENV); }
	$(PIP) install --quiet -r $(REQUIREMENTS)
	@touch $@

# Rewritten only if the settings differ from those of the last build.
build/settings: FORCE
	@mkdir -p build
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

# An editable install: Python sources are used where they lie, the extension is built incrementally in build/module.
build: build/installed ## build the extension and install the package into .venv, editable
build/installed: $(VENV_STAMP) build/settings pyproject.toml CMakeLists.txt $(wildcard cmake/*.cmake) $(filter cc/%,$(CPP))
	@echo "Building the extension, ENTWINE_CUDA=$(ENTWINE_CUDA)"
	@$(FIND_NVCC); $(PIP) install $(if $(filter ON,$(ENTWINE_PTXAS_VERBOSE)),--verbose,--quiet) \
	  --no-build-isolation --no-deps -C build-dir=build/module -e .
	@touch $@

# ---------------------------------------------------------------------------------------------------------------------
# Checks

lint: $(VENV_STAMP) ## formatting, lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy

format: $(VENV_STAMP) ## rewrite all sources in the project's format
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# Python's tests run the same code optimised; `make test-cc-plain` does so without them.
test-cc: test-cc-thread test-cc-address ## C++ tests under ThreadSanitizer (where there are threads), and AddressSanitizer with UBSan

test-cc-%: $(VENV_STAMP)
	@echo "C++ tests: $*"
	@$(BIN)/cmake -S . -B build/cc-$* -G Ninja -DCMAKE_MAKE_PROGRAM='$(CURDIR)/$(BIN)/ninja' -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE='$(CURDIR)/$(BIN)/python' \
	  -DENTWINE_MODULE=OFF -DENTWINE_TESTS=ON -DENTWINE_WERROR=$(ENTWINE_WERROR) \
	  -DENTWINE_SANITIZE=$(filter-out plain,$*) --log-level=WARNING
	@$(BIN)/cmake --build build/cc-$*
	@$(BIN)/ctest --test-dir build/cc-$* -j2 --output-on-failure --no-tests=error

# One process has one platform, so the tests that need GPUs are a run of their own. The others are two: most of their time goes to
# tracing and compiling on one core. Each prints when it ends.
test-py: build ## Python tests on 8 virtual CPU devices, and on the GPUs where there are any
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-py-part-1 test-py-part-2
ifneq ($(GPUS),0)
	$(BIN)/python -m pytest tests/gpu
endif

# Code that nobody waits for: XLA spends less on it (flags of the pinned jaxlib).
QUICKLY := --xla_cpu_parallel_codegen_split_count=1 --xla_llvm_disable_expensive_passes=true
test-py-part-%:
	XLA_FLAGS="$(QUICKLY) $$XLA_FLAGS" JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests --ignore=tests/gpu --part $*/2

soak: build ## random collective matmuls by the thousand, each checked to the bit, and leaks; SOAK_ARGS="--seconds 60 --out soak.json"
	$(BIN)/python scripts/soak.py $(SOAK_ARGS)
	$(BIN)/python scripts/soak.py --leaks --out build/leaks.json

# ---------------------------------------------------------------------------------------------------------------------

wheel: $(VENV_STAMP) ## source distribution and wheel in dist/, the wheel built from the former in a clean environment
	rm -rf dist build/sdist
	$(BIN)/python -m build --sdist --no-isolation --outdir dist
	@mkdir -p build/sdist && tar -xzf dist/*.tar.gz -C build/sdist
	@$(FIND_NVCC); $(BIN)/python -m build --wheel --outdir dist build/sdist/*

lock: $(VENV_STAMP) ## renew the pinned versions in requirements/
	$(PIP) install --quiet uv==0.13.9
	UV_CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.12 --no-annotate \
	  pyproject.toml --extra test --extra bench --group dev -o requirements/dev.txt
	UV_CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.12 --no-annotate \
	  pyproject.toml requirements/cuda13.in --extra test --extra bench --extra cuda13 --group dev -c requirements/dev.txt -o requirements/cuda13.txt

clean: ## remove what was built
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean ## and .venv
	rm -rf $(VENV)
