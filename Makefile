# Two commands on a fresh machine: `make audit` shows what leaks, `make test` checks that all is well.
PYTHON ?= python3
VENV := .venv
WORKERS ?= 2
THREADS ?= 1
ISA ?= DEFAULT
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

NUMERICS := $(addprefix tests/,domains engine defenses bounds client models generators metrics threat attacks federated auditing) \
	$(wildcard tests/test_every_*.py)

.PHONY: help install audit test test-integration test-all test-numerics fuzz check format flower bench kills browser clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 15

install: $(VENV)/installed  ## Create .venv and install Gradveil into it

audit: install  ## Audit a client without a defense, with CENSOR and with veil, and say where the report is
	$(BIN)/gradveil audit --budget quick --defense none --defense censor --defense veil $(ARGS)

test: $(VENV)/installed-tests  ## Run the quick tests, WORKERS=2 of them at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not integration" -n $(WORKERS) --dist worksteal $(ARGS)

test-integration: $(VENV)/installed-tests browser  ## Run whole commands, trainings and audits, and the report in Chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "integration and not slow" -n $(WORKERS) --dist worksteal $(ARGS)

test-all: $(VENV)/installed-tests browser  ## Run the tests, slow ones too, one by one
	$(BIN)/python -m pytest $(ARGS)

test-numerics: $(VENV)/installed-tests  ## Run the tests that compare numbers; ISA=AVX2 for older processors
	ONEDNN_MAX_CPU_ISA=$(ISA) OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) \
		--dist worksteal --ignore tests/federated/flower $(NUMERICS) $(ARGS)

fuzz: $(VENV)/installed-tests  ## Send 20,000 spoilt files through every loader; ARGS="--count 500 --seed 7"
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py --count 20000 --workers $(WORKERS) $(ARGS)

check: $(VENV)/installed-tests  ## Lint, format check and type check
	$(BIN)/ruff check src tests scripts examples
	$(BIN)/ruff format --check src tests scripts examples
	$(BIN)/mypy

format: $(VENV)/installed-tests  ## Format the code
	$(BIN)/ruff format src tests scripts examples
	$(BIN)/ruff check --fix src tests scripts examples

flower: $(VENV)/installed-flower  ## Train on Flower, on this machine; ARGS="--engine deployment --tls --auth"
	$(BIN)/python scripts/flower_loopback.py $(ARGS)

bench: install  ## Measure throughput against a plain eager loop, one JSON object a line
	$(BIN)/gradveil bench throughput --model lenet:init=wide --problems 16
	$(BIN)/gradveil bench throughput --model resnet18 --problems 4 --steps 6

kills: install  ## Kill commands at random moments, and compare what they resume to; ARGS="--count 20"
	$(BIN)/python scripts/kills.py $(ARGS)

browser:  ## Install Chromium for the browser tests where that is possible
	@scripts/install_browser.sh

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-tests: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[test,check,flower]'
	@touch $@ $(VENV)/installed $(VENV)/installed-flower

$(VENV)/installed-flower: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[flower]'
	@touch $@ $(VENV)/installed
