# make            lists the targets
# Tests: three files at a time, since many of them wait; make test TESTERS=0 runs one
# Torch: scripts/install-torch picks a build that suits this machine; bring your own with
#   make demo TORCH="torch==2.12.0"        or        make demo TORCH=/path/to/torch.whl

PYTHON ?= python3
TORCH  ?=
TESTERS ?= 3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: help demo compiled test test-times test-gpu prove zoo check format bench docs package readme clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train the digits recipe on 2 processes, then show the equality with 1"
	@echo "make test    what must hold for a commit (10 minutes on 2 cores)"
	@echo "make test-times  the same, with the time of each test"
	@echo "make test-gpu  what only a real GPU can show, on one card, in parts: PART=1, 2, 3 or 4"
	@echo "make prove   the rest: sweeps, several hosts, browsers, every example"
	@echo "make zoo     samestep verify on every script of zoo/, and its score"
	@echo "make check   formatting, lint and types"
	@echo "make format  format the sources"
	@echo "make bench   the benchmarks, ours and theirs in alternation"
	@echo "make docs    the pages as a site, in build/site; it needs no network"
	@echo "make package the wheel and the source archive, in dist/, checked by twine"
	@echo "make readme  draw the README's picture; write the diffs, codes, messages and commands into their pages"
	@echo "make clean   remove the environment and caches; runs/ stays"

$(VENV)/torch: scripts/install-torch constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch into $(VENV): a minute or two, without a word"
	@scripts/install-torch $(BIN)/python "$(TORCH)"
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	@echo "installing samestep into $(VENV): less than a minute"
	@$(PIP) install -c constraints.txt -e ".[recipes,report]"
	@touch $@

$(VENV)/tested: $(VENV)/installed
	@echo "installing what the tests need into $(VENV)"
	@$(PIP) install -c constraints.txt -e ".[test]"
	@touch $@

demo: $(VENV)/installed
	@$(BIN)/python -m samestep.recipes.demo

# Where PYTHONDONTWRITEBYTECODE is set, every rank would compile samestep for itself: 1 s each.
compiled: $(VENV)/tested
	@$(BIN)/python -m compileall -q src

test: compiled
	@scripts/install-test-tools
	@$(BIN)/python -m pytest -q -m "not prove" -n $(TESTERS) --dist loadscope

test-times: compiled
	@scripts/install-test-tools
	@$(BIN)/python scripts/test_times.py -m "not prove" -n $(TESTERS) --dist loadscope

# On a machine with a GPU and its own torch: make test-gpu PYTHON=python3, in parts with PART=1, 2, 3, 4.
test-gpu:
	@$(PYTHON) scripts/test_gpu.py $(if $(PART),--part $(PART))

prove: compiled
	@scripts/install-test-tools
	@$(BIN)/python -m pytest -q -m prove -n $(TESTERS) --dist loadscope

zoo: $(VENV)/tested
	@$(BIN)/python scripts/zoo.py

check: $(VENV)/tested
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/tested
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only .

bench: $(VENV)/tested
	@$(BIN)/samestep bench step

docs: $(VENV)/tested
	@$(BIN)/python -m sphinx -W --keep-going -q -j auto -b html docs build/site
	@echo "build/site/index.html"

# The wheel in an empty environment: tests/test_package.py, in make prove.
package: $(VENV)/installed
	@$(PIP) install build hatchling twine
	@rm -rf dist
	@$(BIN)/python -m build -q --no-isolation --outdir dist
	@$(BIN)/python -m twine check --strict dist/*

readme: $(VENV)/installed
	@$(BIN)/python scripts/readme.py
	@$(BIN)/python scripts/moving.py
	@$(BIN)/python scripts/codes.py
	@$(BIN)/python scripts/messages.py
	@$(BIN)/python scripts/commands.py
	@$(BIN)/python scripts/reference.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
