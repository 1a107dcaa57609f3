PYTHON ?= .venv/bin/python

.PHONY: check test notebook dist
check:  ## formatter, linter, types, import order; changes nothing
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest tests/test_architecture.py

test:
	$(PYTHON) -m pytest

notebook:  ## write examples/walkthrough.ipynb from examples/walkthrough.py
	$(PYTHON) examples/notebook.py

dist:  ## build sdist and wheel, look into both, use the wheel in a clean environment
	$(PYTHON) tests/check_distribution.py
