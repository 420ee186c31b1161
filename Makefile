# Every target makes the virtual environment it needs on first use, and again when pyproject.toml or constraints.txt
# change. PYTHON chooses the interpreter. ARGS adds arguments to `moe-jax demo`, pytest or Sphinx.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PINS := pyproject.toml constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test test-layers test-slow dist nightly test-sass test-sass-portable test-vllm test-writers docs docs-text notebooks lint format clean

help:
	@echo "make demo          write, quantize and run a small model; no torch needed"
	@echo "make test          lint, type check and the fast tests"
	@echo "make test-layers   the fast tests of layers alone, without torch"
	@echo "make test-slow     the slow tests alone"
	@echo "make nightly       lint, type check, the fast and the slow tests, all kernels compiled; takes hours"
	@echo "make test-sass     compile the Hopper kernels to machine code; no GPU needed (downloads 230 MB)"
	@echo "make test-sass-portable  compile the portable kernels for five GPUs; needs Python 3.12 (SASS_PYTHON=python3.12)"
	@echo "make test-vllm     run vLLM's plugin with vLLM's real classes on the CPU (downloads 1 GB)"
	@echo "make test-writers  write checkpoints with llm-compressor, read them with moe_jax"
	@echo "make lint          ruff and pyright"
	@echo "make format        apply ruff's fixes and formatter"
	@echo "make docs          run the notebooks, compare their figures, build the site into docs/_build/html"
	@echo "make docs-text     build the site without running the notebooks"
	@echo "make notebooks     run the notebooks and write them anew, with their outputs"
	@echo "make dist          build the wheel and the source archive into dist/ and check them"
	@echo "make clean         remove environments and build outputs"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "moe-jax needs Python 3.11 or newer; $(PYTHON) is older. Use: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: $(PINS) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[demo]'
	@touch $@

# torch first and by its exact version: where pip was pointed at a CPU wheel of torch, the ranges that follow keep it.
$(VENV)/.installed-dev: $(PINS) | $(BIN)/python
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/moe-jax demo $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tests of one module share fixtures. Neighbours stay in one process, until another one has nothing left to do.
WORKERS := -n auto --maxprocesses 4 --dist worksteal
ON_CPU := not gpu and not multi_gpu

test: lint
	$(BIN)/python -m pytest -q $(WORKERS) $(ARGS)

# Needs no torch, whose wheels for new Pythons come late. An environment of its own: its packages are not those of dev.
LAYERS := tests/test_import.py tests/test_install.py tests/nn tests/routing tests/experts tests/cli/test_doctor.py
LAYERS_WITHOUT := tests/routing/test_judges.py tests/experts/test_gradients.py
.venv-layers/.installed: $(PINS)
	$(PYTHON) -m venv .venv-layers
	.venv-layers/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable '.[chat,demo]' pytest hypothesis jaxtyping beartype
	@touch $@

test-layers: .venv-layers/.installed
	.venv-layers/bin/python -m pytest -q $(LAYERS) $(LAYERS_WITHOUT:%=--ignore=%) $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m 'slow and $(ON_CPU)' $(ARGS)

# Warnings are errors, and so is a figure that differs from the committed one. A notebook runs again only when it or
# what it reads changed.
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/_execute.py
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html

docs-text: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html

notebooks: $(VENV)/.installed-docs
	$(BIN)/python docs/_execute.py --write

# llm-compressor pins its own transformers and compressed-tensors, so it gets an environment of its own.
WRITERS := tests/data/writers
.venv-writers/.installed: $(WRITERS)/requirements.txt constraints.txt | $(BIN)/python
	$(PYTHON) -m venv .venv-writers
	.venv-writers/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-writers/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

test-writers: .venv-writers/.installed $(VENV)/.installed-dev
	.venv-writers/bin/python $(WRITERS)/write.py build/writers
	$(BIN)/python -m pytest -q tests/loading/test_llm_compressor_files.py --writers-dir=build/writers $(ARGS)

# vLLM without what needs a GPU: its Python sources and what they import. It pins its own torch and compressed-tensors,
# so it gets an environment of its own.
VLLM ?= vllm==0.24.0
VLLM_TESTS := tests/torch_bridge/vllm
VLLM_INSTALL := .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check
.venv-vllm/.installed: $(VLLM_TESTS)/requirements.txt $(PINS)
	$(PYTHON) -m venv .venv-vllm
	grep -Ev '^(compressed-tensors|torch)=' constraints.txt > .venv-vllm/constraints.txt
	$(VLLM_INSTALL) $(shell grep '^torch==' $(VLLM_TESTS)/requirements.txt)
	$(VLLM_INSTALL) --constraint .venv-vllm/constraints.txt --editable . --requirement $<
	$(VLLM_INSTALL) --no-deps $(VLLM)
	@touch $@

test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -q $(VLLM_TESTS) tests/torch_bridge/test_vllm_runners.py $(ARGS)

# jax's CUDA plugin and NVIDIA's compiler, without a driver, cuDNN or cuBLAS. In $(VENV) the plugin would complain.
# SASS_JAX=0.11.2 SASS_PYTHON=python3.12 takes another jax, in an environment of its own.
SASS_JAX ?=
SASS_PYTHON ?= $(PYTHON)
SASS := .venv-sass$(SASS_JAX)
SASS_WANTED := $(if $(SASS_JAX),jax==$(SASS_JAX) jaxlib==$(SASS_JAX),--constraint constraints.txt jax)
SASS_INSTALL := $(SASS)/bin/python -m pip install --quiet --disable-pip-version-check

$(SASS)/.installed: constraints.txt
	$(SASS_PYTHON) -m venv $(SASS)
	$(SASS_INSTALL) $(SASS_WANTED) absl-py
	version=$$($(SASS)/bin/python -c 'from importlib.metadata import version; print(version("jax"))'); \
	$(SASS_INSTALL) --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version \
	    'nvidia-cuda-nvcc>=13.0,<13.1' 'nvidia-nvvm>=13.0,<13.1' nvidia-nvjitlink nvidia-cuda-nvdisasm
	@touch $@

# EVERY=8 compiles each eighth kernel
EVERY ?= 1
USE_SASS := MOE_JAX_SASS_EVERY=$(EVERY) MOE_JAX_SASS_PYTHON=$(SASS)/bin/python
test-sass: $(VENV)/.installed-dev $(SASS)/.installed
	$(USE_SASS) $(BIN)/python -m pytest -q -m slow tests/pallas_kernels/sass $(ARGS)

# The portable kernels for five GPUs; needs jax 0.11.
test-sass-portable:
	$(MAKE) .venv-sass0.11.2/.installed SASS_JAX=0.11.2 SASS_PYTHON=$(SASS_PYTHON)
	MOE_JAX_SASS_EVERY=$(EVERY) MOE_JAX_PORTABLE_SASS_PYTHON=.venv-sass0.11.2/bin/python \
	    $(BIN)/python -m pytest -q -m slow tests/pallas_kernels/sass/test_portable_sass.py $(ARGS)

nightly: lint $(SASS)/.installed
	$(USE_SASS) $(BIN)/python -m pytest -q -m '$(ON_CPU)' $(WORKERS) $(ARGS)

# A release is what these commands accept: see docs/guides/release.md.
dist: $(VENV)/.installed-dev
	rm -rf dist
	$(PIP_INSTALL) build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest -q -m slow tests/test_packaging.py --wheel="$$(echo $(CURDIR)/dist/*.whl)" $(ARGS)

clean:
	rm -rf $(VENV) .venv-layers .venv-sass* .venv-vllm .venv-writers build dist docs/_build docs/_generated .pytest_cache .ruff_cache .hypothesis demo_out
