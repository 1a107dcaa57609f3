PYTHON ?= .venv/bin/python

.PHONY: check test lowest notebook dist
check:  ## formatter, linter, types, import order; changes nothing
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest tests/test_architecture.py

test:
	$(PYTHON) -m pytest

lowest:  ## what depends on the numbers of torch, oneDNN and MKL, with the oldest code that each has, and another seed
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE $(PYTHON) -m pytest --seed 1 \
	  tests/test_noise.py tests/test_fused_*.py tests/test_layers.py tests/test_stacks.py tests/test_multihead_attention.py \
	  -k "noise or modules or layers or stacks or multihead or values or rules or infinity or curve"

notebook:  ## write examples/walkthrough.ipynb from examples/walkthrough.py
	$(PYTHON) examples/notebook.py

dist:  ## build sdist and wheel, look into both, use the wheel in a clean environment
	$(PYTHON) tests/check_distribution.py
