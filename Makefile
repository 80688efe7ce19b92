# Every target works on a fresh machine with Python 3.11 and make: the virtual environment makes itself.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?=
WORKERS ?= 4

ROUNDS ?= 10

.PHONY: demo test check fix sim bench bench-store bench-uploads soak soak-servers clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# Four simulated servers, a run that is killed half-way, its resume, and an audit.
demo: $(VENV)/.ready
	$(BIN)/genpipe demo

# All tests: ten minutes or more on two cores; many of them wait more than they work.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Lint, types and the fast tests: a minute or two.
check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" -q

# What can be mended by itself.
fix: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# 500 simulated worlds in virtual time, about a minute; make sim SEED=7 runs one and tells its story.
sim: $(VENV)/.ready
	$(BIN)/python -m genpipe.sim.seeds $(SEED)

# CPU per request beside a bare aiohttp loop, in turn in one run.
bench: $(VENV)/.ready
	$(BIN)/python scripts/bench_client.py

# The store, a resume of a million of ten million prompts, and verify of 10 GB, each beside the least that it
# could cost: about six minutes, and more than 10 GB of temporary files.
bench-store: $(VENV)/.ready
	$(BIN)/python scripts/bench_store.py
	$(BIN)/python scripts/bench_resume.py
	$(BIN)/python scripts/bench_verify.py 10

# Uploads beside boto3 alone, and the dispatch gap with S3 off, on and black-holed: about four minutes.
bench-uploads: $(VENV)/.ready
	$(BIN)/python scripts/bench_uploads.py

# The tests that break the disk, the power, the program and the servers, with more rounds and in full length:
# make soak ROUNDS=20. An hour or more; the servers' part alone is make soak-servers.
soak: soak-servers
	GENPIPE_SOAK=$(ROUNDS) $(BIN)/python -m pytest -n $(WORKERS) --timeout 7200 \
		tests/faults tests/edges/test_store_machine.py tests/e2e/test_random_kills.py \
		tests/e2e/test_offsite_kills.py tests/s3/test_boto.py tests/cases/test_c29_bar_in_logs_and_notebooks.py \
		tests/cases/test_c24_million_rows.py tests/cases/test_c05_two_runs_one_dir.py

soak-servers: $(VENV)/.ready
	GENPIPE_SOAK=$(ROUNDS) $(BIN)/python -m pytest -n $(WORKERS) --timeout 7200 \
		tests/e2e/test_fault_soak.py tests/e2e/test_black_hole.py tests/e2e/test_stalled_servers.py \
		tests/cases/test_c16_five_minute_timeout.py tests/cases/test_c18_keepalive_race.py \
		tests/cases/test_c19_fd_limit_and_dns.py tests/cases/test_c20_retry_the_right_errors.py \
		tests/cases/test_c23_runaway_tail.py tests/cases/test_c26_uneven_servers.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
