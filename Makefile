# Every target sets up what it needs in .venv; a machine with Python 3.10+ and pip is enough.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Files run in parallel; each owns its servers. More processes than cores only make timing tests wait.
JOBS ?= 2

.PHONY: demo test test-unit lint bench clean setup

demo: $(STAMP)
	$(BIN)/python -m celery_durable.demo

test: $(STAMP)
	@sh tests/servers/install.sh
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest tests/integration tests/faults tests/plans -n $(JOBS) --dist loadfile

test-unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell celery_durable tests benchmarks examples docs README.md CHANGELOG.md CONTRIBUTING.md

bench: $(STAMP)
	$(BIN)/python -m benchmarks

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "celery-durable needs Python 3.10 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "This Python has no venv module. On Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
