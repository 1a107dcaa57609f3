SHELL := bash
.SHELLFLAGS := -e -o pipefail -c
PYTHON ?= .venv/bin/python
JOBS ?= 2

.PHONY: help lint check test quick fuzz long aot survey kernel-hub faults core-faults lowest codegen codegen-part compiled compiled-part lock notebook docs dist
help:  ## what can be made
	@sed -nE 's/^([a-z%-]+):.*  ## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

lint:  ## formatter, linter, types; changes nothing
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

check: lint  ## that, and the order of imports
	$(PYTHON) -m pytest tests/project/test_architecture.py

test:  ## every test, on all cores
	$(PYTHON) -m pytest -n auto --dist worksteal

quick:  ## is anything broken? the first case of every test that is not slow
	$(PYTHON) -m pytest -n auto --dist worksteal --quick

fuzz:  ## 10,000 inputs of every generator of bad input, in an hour; CI has 100
	nice $(PYTHON) -m pytest -n $(JOBS) --dist worksteal --fuzz 10000 tests/fuzz

long:  ## what CI leaves out, as it takes long and is rarely red: tests, and the kernels with the newest Triton
	$(PYTHON) -m pytest -n $(JOBS) --dist worksteal --long -m long
	$(MAKE) triton-3.9.0

aot:  ## compile the models ahead of time (AOTInductor), and compare them
	$(PYTHON) -m pytest --aot tests/apps/models/test_program_export.py

# 622 types of transformers 5.24. After a new transformers: with --update, and read what changed.
survey:  ## every text model of the installed transformers without padding against eager, held to tested.json
	nice $(PYTHON) -m tests.integrations.survey

kernel-hub:  ## the library in the layout of Hugging Face's kernels package, loaded by that package
	$(PYTHON) -m pip install -q --target .kernels kernels==0.17.2
	PYTHONPATH=.kernels $(PYTHON) -m pytest tests/integrations/test_kernel_hub.py

# Takes about half an hour of two cores.
faults:  ## break the kernels, a fault at a time: each must be caught by the test that it names
	nice $(PYTHON) -m tests.kernels.mutations --jobs $(JOBS)

core-faults:  ## the same of packing, the references of the ops, nn and checkpoints
	nice $(PYTHON) -m tests.core_faults --jobs $(JOBS)

codegen:  ## compile every launch configuration anew, whatever is recorded, and hold it to the budget
	$(PYTHON) -m benchmarks.codegen --fresh --jobs $(JOBS) | tail -n 60
	$(PYTHON) -m benchmarks.codegen --fresh --arch gfx942 --jobs $(JOBS) | tail -n 60

# A sixth of that; with an unknown fingerprint a row of any other GPU is compiled, too.
codegen-part:  ## compile all of sm_90 anew, and what has changed of the others, as CI does
	$(PYTHON) -m benchmarks.codegen --fresh --arch 90 --jobs $(JOBS) | tail -n 60
	$(PYTHON) -m benchmarks.codegen --jobs $(JOBS) | tail -n 60

# Takes about half an hour of a core for each architecture if Triton has compiled nothing before.
compiled:  ## every test of kernels on compiled code, for sm_80, sm_89 and sm_90, executed on the CPU
	nice $(PYTHON) -m pytest -n $(JOBS) --dist worksteal --compiled sm_80
	nice $(PYTHON) -m pytest -n $(JOBS) --dist worksteal --compiled sm_89
	nice $(PYTHON) -m pytest -n $(JOBS) --dist worksteal --compiled sm_90

# The detectors on our kernels, a training step, a translation, and the first case of each op's values and gradients.
compiled-part:  ## a part of that, which CI runs
	for arch in sm_80 sm_90; do \
	  $(PYTHON) -m pytest --compiled $$arch tests/compiled; \
	  $(PYTHON) -m pytest --compiled $$arch --quick tests/kernels -k "shapes or rules or packed or decoding or values"; \
	done

# The kernels with another Triton: values in the interpreter, and what sm_90 code they make (limits hold for every
# version).
triton-%:  ## the kernels with another Triton, such as triton-3.6.0
	$(PYTHON) -m pip install -q --no-deps --target .triton/$* triton==$*
	PYTHONPATH=.triton/$* OMP_NUM_THREADS=1 $(PYTHON) -m pytest --durations=3 tests/kernels/test_fused_attention.py \
	  tests/kernels/test_fused_norms.py tests/kernels/test_fused_feed_forward.py tests/kernels/test_fused_linear_cross_entropy.py \
	  tests/kernels/test_fused_embedding.py tests/kernels/test_plan.py -k "shapes or rules or packed or decoding or values or options or launches"
	PYTHONPATH=.triton/$* OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.codegen --arch 90 --only " light" --jobs 1 | tail -n 60

# The limits with another assembler than the one in Triton's wheel: that one's faults and luck are not all there is.
ptxas-%:  ## every launch configuration with another ptxas of the package index, such as ptxas-13.5.37
	$(PYTHON) -m pip install -q --no-deps --target .ptxas/$* nvidia-cuda-nvcc==$*
	export TRITON_PTXAS_PATH=$$(realpath .ptxas/$*/nvidia/cu*/bin/ptxas); \
	  TRITON_PTXAS_BLACKWELL_PATH=$$TRITON_PTXAS_PATH $(PYTHON) -m benchmarks.codegen --jobs $(JOBS) | tail -n 60

# With 2.11, the oldest that is supported, 5 tests of benchmarks.codegen fail: the budget is that of newer Triton. 6 GB with CUDA.
torch-%:  ## every test with another torch and the Triton that it brings, such as torch-2.11.0, in an environment of its own
	$(PYTHON) -m venv .torch/$*
	grep -vE '^(torch|triton)==' constraints.txt > .torch/$*/constraints.txt
	.torch/$*/bin/pip install -q -c .torch/$*/constraints.txt torch==$* -e '.[dev]'
	.torch/$*/bin/python -m pytest -n $(JOBS) --dist worksteal

lowest:  ## what depends on the numbers of torch, oneDNN and MKL, with the oldest code that each has, and another seed
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE $(PYTHON) -m pytest --seed 1 \
	  tests/functional/test_noise.py tests/kernels/test_fused_*.py tests/nn/test_fused_*.py tests/nn/test_layers.py tests/nn/test_stacks.py tests/nn/test_multihead_attention.py \
	  -k "noise or modules or layers or stacks or multihead or values or infinity or curve"

# TORCH says where a build of torch for CPUs is: those of the registry bring the CUDA libraries, for Linux.
TORCH ?= --torch-backend cpu
lock:  ## requirements.lock: what CI installs before the package, at the versions of constraints.txt, with hashes
	$(PYTHON) -m pip install -q --target .lock uv==0.13.9
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'])" | \
	  PYTHONPATH=.lock UV_CUSTOM_COMPILE_COMMAND="make lock" $(PYTHON) -m uv pip compile -q --generate-hashes \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 $(TORCH) --no-emit-package torch --no-annotate \
	  --extra dev -c constraints.txt pyproject.toml - -o requirements.lock

notebook:  ## write examples/walkthrough.ipynb from examples/walkthrough.py
	$(PYTHON) examples/notebook.py

docs:  ## the documentation site, in build/site: strict, and without a network
	@$(PYTHON) -c "import furo, myst_parser, sphinx" 2>/dev/null || \
	  { echo "the site needs the extra docs: $(PYTHON) -m pip install -c constraints.txt -e '.[docs]'"; exit 1; }
	rm -rf build/site
	$(PYTHON) -m sphinx -E -W --keep-going -n -q -d build/doctrees docs build/site

dist:  ## build sdist and wheel, look into both, use the wheel in a clean environment
	$(PYTHON) tests/project/check_distribution.py
