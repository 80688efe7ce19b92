# Every target works on a fresh machine with Python 3.11 and make: the virtual environment makes itself.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 7
WORKERS ?= 2

.PHONY: demo test check fix sim bench clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# Four simulated servers, a run that is killed half-way, its resume, and an audit.
demo: $(VENV)/.ready
	$(BIN)/genpipe demo

# All tests: about five minutes on two cores.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(WORKERS)

# Lint, types and the fast tests: under a minute.
check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" -q

# What can be mended by itself.
fix: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One simulated world in virtual time: make sim SEED=7
sim: $(VENV)/.ready
	$(BIN)/python -m genpipe.sim.engine $(SEED)

# CPU per request beside a bare aiohttp loop, in turn in one run.
bench: $(VENV)/.ready
	$(BIN)/python scripts/bench_client.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
