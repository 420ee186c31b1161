# Everything runs in a virtual environment of its own, made on first use and reused until pyproject.toml or
# constraints.txt change. PYTHON chooses the interpreter, ARGS adds arguments to moe-jax demo or to pytest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PINS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-sass test-writers docs docs-text notebooks lint format clean

help:
	@echo "make demo          write, quantize and run a small model; no torch needed"
	@echo "make test          lint, type check and the fast tests"
	@echo "make test-slow     the long tests"
	@echo "make test-sass     the Hopper kernels compiled to machine code, no GPU needed (downloads 230 MB)"
	@echo "make test-writers  checkpoints written anew by llm-compressor, read by us"
	@echo "make docs          the site, notebooks executed, into docs/_build/html  make notebooks   their figures anew"
	@echo "make lint          ruff and pyright      make format   ruff's formatter      make clean"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "moe-jax needs Python 3.11 or newer; $(PYTHON) is older. Use: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: $(PINS) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[demo]'
	@touch $@

# torch first and by its exact version: where pip has been given a CPU wheel of it, later ranges then add nothing
$(VENV)/.installed-dev: $(PINS) | $(BIN)/python
	$(PIP_INSTALL) torch==2.13.0
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

# a module's tests stay in one process: they share fixtures
WORKERS := -n auto --maxprocesses 4 --dist loadfile

test: lint
	$(BIN)/python -m pytest -q $(WORKERS) $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m 'slow and not gpu and not multi_gpu' $(ARGS)

# Warnings are errors, and so are figures that are not those committed. Notebooks are executed side by side, again only
# when they or what they read changed; docs-text shows them without output.
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/_execute.py
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html $(ARGS)

docs-text: $(VENV)/.installed-docs
	MOE_JAX_DOCS_EXECUTION=off $(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html $(ARGS)

notebooks: $(VENV)/.installed-docs
	$(BIN)/python docs/_execute.py --write-figures

# llm-compressor pins its own transformers and compressed-tensors, hence the environment of its own.
WRITERS := tests/data/writers
.venv-writers/.installed: $(WRITERS)/requirements.txt | $(BIN)/python
	$(PYTHON) -m venv .venv-writers
	.venv-writers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-writers/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

test-writers: .venv-writers/.installed $(VENV)/.installed-dev
	.venv-writers/bin/python $(WRITERS)/write.py build/writers
	$(BIN)/python -m pytest -q tests/test_llm_compressor_files.py --writers-dir=build/writers $(ARGS)

# jax's CUDA plugin and NVIDIA's compiler without a driver, cuDNN or cuBLAS; apart from $(VENV), where the plugin complains
# SASS_JAX=0.11.2 SASS_PYTHON=python3.12 takes another jax (which needs that Python) in an environment of its own
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
test-sass: $(VENV)/.installed-dev $(SASS)/.installed
	MOE_JAX_SASS_EVERY=$(EVERY) MOE_JAX_SASS_PYTHON=$(SASS)/bin/python $(BIN)/python -m pytest -q -m slow tests/pallas_kernels/sass $(ARGS)

clean:
	rm -rf $(VENV) .venv-sass* .venv-writers build dist docs/_build docs/_generated .pytest_cache .ruff_cache .hypothesis demo_out
