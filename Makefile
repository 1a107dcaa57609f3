PYTHON ?= .venv/bin/python

.PHONY: check test
check:  ## formatter, linter, types, import order; changes nothing
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest tests/test_architecture.py

test:
	$(PYTHON) -m pytest
