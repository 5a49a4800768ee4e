# `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON := .venv/bin/python
# torch, CuPy and Triton are several gigabytes and of use with an NVIDIA GPU alone.
GPU := $(shell if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then echo gpu; fi)
PORT ?= 8000

# A stamp says which extras .venv holds. Installs run again when what they depend on changes.
STAMPS := .venv/.installed
BASE := $(STAMPS)/base$(GPU:%=-%)
LOCKED := pyproject.toml constraints.txt
# Everything that an execution leaves behind and that differs between machines.
LEFTOVERS := metadata.papermill cell.metadata.papermill \
	$(addprefix metadata.language_info.,version codemirror_mode file_extension mimetype nbconvert_exporter pygments_lexer)
STRIP := $(PYTHON) -m nbstripout --keep-id --drop-tagged-cells injected-parameters --extra-keys "$(LEFTOVERS)"

.PHONY: help report test test-all test-fast lint strip lab serve lock bundle chart clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

report: $(BASE) ## run every notebook, build the site into build/site; with an NVIDIA GPU, measure: FULL=1 everything
	@$(PYTHON) -m flashlab report $(if $(FULL),--full) $(ARGS)

# Each worker computes with one thread: two that want all cores spin while they wait for each other. Files begin in the
# order of tests/conftest.py, the longest first; pytest-xdist would begin those with the most tests first. Hundreds of
# processes start, so Python keeps what it compiled, even where the environment says otherwise, as many images' does.
PYTEST := PYTHONDONTWRITEBYTECODE= $(if $(GPU),,OPENBLAS_NUM_THREADS=1) $(PYTHON) -m pytest -n $(if $(GPU),0,auto) --dist loadfile --no-loadscope-reorder

test: $(STAMPS)/dev ## every test but the whole of large matrices; GPU tests where there is a GPU
	@$(PYTEST) -m 'not exhaustive' $(ARGS)

test-all: $(STAMPS)/dev ## every test this machine can run
	@$(PYTEST) $(ARGS)

test-fast: $(STAMPS)/dev ## the tests that take seconds, for while you work
	@OPENBLAS_NUM_THREADS=1 $(PYTHON) -m pytest -n auto --dist loadfile -m 'not slow and not gpu and not exhaustive' $(ARGS)

lint: $(STAMPS)/dev ## format, style, types, import layers, notebooks without outputs, Dockerfile
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	$(STRIP) --verify notebooks/*.ipynb
	.venv/bin/hadolint Dockerfile

strip: $(STAMPS)/dev ## take outputs and execution traces out of the notebooks, before a commit
	$(STRIP) notebooks/*.ipynb

lab: $(STAMPS)/lab ## JupyterLab on the notebooks, on localhost with its token
	@$(PYTHON) -m jupyterlab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) --notebook-dir=. --LabApp.default_url=/lab/tree/notebooks/index.ipynb

serve: $(BASE) ## serve build/site on localhost (PORT=8000)
	@if [ ! -f build/site/index.html ]; then echo 'build/site holds no site yet; build it with: make report' >&2; exit 1; fi
	@echo 'serving build/site on http://127.0.0.1:$(PORT), Ctrl-C stops it'
	@$(PYTHON) -m http.server --bind 127.0.0.1 --directory build/site $(PORT)

lock: $(STAMPS)/dev ## resolve pyproject.toml into constraints.txt; ARGS=--upgrade takes newer versions
	@scripts/lock.sh $(ARGS)

bundle: $(STAMPS)/dev ## wheels and provenance in build/bundle, for a GPU machine without internet
	@$(PYTHON) scripts/bundle.py

chart: $(BASE) ## draw the chart of README.md anew from data/
	@$(PYTHON) scripts/chart.py $(ARGS)

clean: ## remove what was built; .venv and the compile cache stay
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BASE): $(LOCKED) scripts/install.sh
	@scripts/install.sh $(GPU)
	@mkdir -p $(STAMPS) && touch $(STAMPS)/base $@

$(STAMPS)/dev: $(BASE)
	@scripts/install.sh dev
	@touch $@

$(STAMPS)/lab: $(BASE)
	@scripts/install.sh lab
	@touch $@
