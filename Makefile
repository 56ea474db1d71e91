# make setup   the virtual environment .venv with every version of constraints.txt, and software rendering (Vulkan, EGL) where needed
# make demo    a VLA learns to pick up a cube: results, plots and videos in runs/demo
# make test    the tests that this machine can run, but for long matrices
# make test-all   those as well
# make check   format, lint, types, import directions
# make docs    the documentation as a site, in build/docs; warnings are errors
# make clean   removes what setup, tests and checks made; runs/ stays

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(STAMP)-dev
DEMO_ARGS ?=
PYTEST_ARGS ?=

# One thread per process: worker processes use the cores, and threads on top of them slow everything down.
export OMP_NUM_THREADS ?= 1
export LP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: setup rendering demo test test-all check docs clean
.DEFAULT_GOAL := setup
.NOTPARALLEL: # two recipes must not install into one environment at once

# A demo waits for what runs need; tests and checks need more.
# A name on the PATH is not enough (a version manager's shim may refuse): the interpreter has to answer.
$(STAMP) $(DEV_STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ ! -x $(BIN)/python ]; then \
		for name in python3.11 python3.12 python3; do \
			if $$name -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; \
			then chosen=$$name; break; fi; \
		done; \
		if [ -z "$${chosen:-}" ]; then \
			echo "error: no Python 3.11 or 3.12 with venv on the PATH: install one (Debian: apt-get install python3-venv)" >&2; \
			exit 1; \
		fi; \
		$$chosen -m venv $(VENV); \
	fi
	@$(BIN)/python -m experiments.setup.environment $(if $(filter %-dev,$@),dev=true)
	@touch $(STAMP) $@

# Rendering belongs to the machine, not to .venv: it is checked each time, which takes half a second.
setup: $(DEV_STAMP) rendering

rendering: | $(STAMP)
	@$(BIN)/python -m experiments.setup.rendering

demo: $(STAMP) rendering
	$(BIN)/python experiments/train_vla.py env=maniskill_pick algorithm=ppo_finetune run=demo run.dir=runs/demo $(DEMO_ARGS)

# Tests wait for processes that they start, so that there is one test process more than two cores.  Ray tests start
# processes that use the cores themselves: they come after the others, whose failures are not the last word, and each of
# their two test processes has a separate Ray.
# Set-up makes rendering work, so no test may be skipped for lack of it.
test: TIER := and not slow
test test-all: export RLINF_REQUIRE_SIM = 1
test test-all: setup
	@status=0; \
	$(BIN)/python -m pytest -m "not ray $(TIER)" -n 3 --dist loadfile $(PYTEST_ARGS) || status=$$?; \
	$(BIN)/python -m pytest -m "ray $(TIER)" -n 2 --dist loadfile $(PYTEST_ARGS) || status=$$?; \
	exit $$status

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# Sphinx has a separate virtual environment: pages are made from sources, which are read and not imported.
DOCS_VENV := build/venv-docs
DOCS_PYTHON ?= $(DOCS_VENV)/bin/python

$(DOCS_VENV)/.installed: pyproject.toml constraints.txt | $(STAMP)
	$(BIN)/python -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --constraint constraints.txt furo myst-parser sphinx
	@touch $@

docs: $(if $(filter $(DOCS_VENV)/%,$(DOCS_PYTHON)),$(DOCS_VENV)/.installed)
	$(DOCS_PYTHON) -m sphinx --fail-on-warning --quiet --doctree-dir build/doctrees docs build/docs

clean:
	rm -rf $(VENV) .venv-* build tests/accelerator/build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
