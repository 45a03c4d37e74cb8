# Every target sets up what it needs in .venv; a machine with Python 3.10+ and pip is enough.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
# Files run in parallel; each owns its servers. More processes than cores only make timing tests wait.
JOBS ?= 2
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: demo test test-unit test-oldest lint bench clean setup

demo: $(STAMP)
	$(BIN)/python -m celery_durable.demo

test: $(STAMP)
	@sh tests/servers/install.sh
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest --ignore=tests/unit -n $(JOBS) --dist loadfile
	@$(MAKE) --no-print-directory test-oldest

test-unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit

# The unit tests and the main job on the oldest Celery that is supported: the contract of every hook.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest tests/unit -n $(JOBS)
	$(OLDEST)/bin/python -m pytest tests/integration/test_end_to_end.py -k main_job

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "celery-durable needs Python 3.10 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) \
	  || { rm -rf $(VENV); echo "This Python cannot make a venv with pip. On Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
	$(PIP) install --upgrade pip
	$(PIP) install --editable '.[dev]'
	@touch $@

$(VENV)/.bench: $(STAMP)
	$(PIP) install --editable '.[bench]'
	@touch $@

$(OLDEST)/.installed: pyproject.toml $(STAMP)
	@$(OLDEST)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip --quiet --disable-pip-version-check install --upgrade pip
	$(OLDEST)/bin/python -m pip --quiet --disable-pip-version-check install --editable '.[dev]' 'celery==5.5.*'
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache build dist
