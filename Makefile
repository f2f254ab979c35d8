# The two commands of the README are `make serve` and `make test`; `make help` lists the rest.
# They need Python 3.11 or newer, make, and apt where something is missing.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Where pip finds torch if not where it finds everything else: PyTorch's index of CPU wheels saves 2 GB without a GPU.
TORCH_INDEX ?=
ARGS ?=
# Three processes of tests at a time, also on two cores: a third of the time a test waits for servers that it has started.
WORKERS ?= -n 3 --dist worksteal

# Tests start hundreds of processes of Python. Where none may keep what it has compiled, each compiles all of Pagebus anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test quick lint format types unit chaos containers schedules fault-seeds fuzz soak overload jobs-stress
.PHONY: slow-links families grids compatibility vllm-names models screenshots docs clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

serve: $(VENV)/.installed ## install into .venv and serve the shipped model on 127.0.0.1:8000 (ARGS="..." adds options)
	$(BIN)/pagebus serve $(ARGS)

test: $(BIN)/python ## install what tests need; lint, types and all tests
	$(MAKE) --jobs 2 $(VENV)/.installed-test chromium
	$(MAKE) lint
	$(MAKE) --jobs 2 types unit

quick: $(VENV)/.installed-test ## what changed, within a minute: lint, types, and the tests of the rooms that changed
	$(BIN)/python -m tests.quick

lint: $(VENV)/.installed-test ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test ## check types
	$(BIN)/mypy

unit: $(VENV)/.installed-test ## run the tests (ARGS="tests/bus -k lease" chooses)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

format: $(VENV)/.installed-test ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: $(VENV)/.installed-test redis ## kill, freeze and restart every part of deployments under load; about 20 minutes
	PAGEBUS_TEST_CHAOS=full PAGEBUS_TEST_GRIDS=full $(BIN)/python -m pytest -p no:randomly tests/chaos tests/system/faults/test_breaking_connections.py \
		tests/system/faults/test_ranks.py tests/system/faults/test_stages.py tests/system/faults/test_moving_blocks.py $(ARGS)

containers: $(VENV)/.installed-test ## build the image and try compose.yaml with the engine that is here; about 15 minutes
	PAGEBUS_TEST_CONTAINERS=1 $(BIN)/python -m pytest -p no:randomly tests/containers $(ARGS)

slow-links: $(VENV)/.installed-test redis ## two hosts with slow links: is the better of pulling and computing chosen? Needs root; some minutes
	PAGEBUS_TEST_SLOW_LINKS=1 $(BIN)/python -m pytest -p no:randomly tests/system/cache/test_links.py $(ARGS)

families: $(VENV)/.installed-test redis ## all tiny models of all families through the whole pipeline, over both buses, and with drafts; about an hour
	PAGEBUS_TEST_FAMILIES=full PAGEBUS_TEST_GRIDS=full $(BIN)/python -m pytest $(WORKERS) tests/system/answers/test_family_tokens.py \
		tests/actors/executor/speculation/test_families.py $(ARGS)

grids: $(VENV)/.installed-test redis ## every form of every kernel for each GPU, and every case of tests of which some run each time
	PAGEBUS_TEST_GRIDS=full $(BIN)/python -m pytest $(WORKERS) $(ARGS)

SEED ?= 1
SCHEDULES ?= 40000
schedules: $(VENV)/.installed-test ## random schedules of the scheduler's core (SCHEDULES=40000, SEED=1: the first)
	PAGEBUS_TEST_SCHEDULES=$(SCHEDULES) PAGEBUS_TEST_FIRST_SEED=$(SEED) $(BIN)/python -m pytest $(WORKERS) \
		tests/actors/simulator/test_schedules.py $(ARGS)

SEEDS ?= 1000
fault-seeds: $(VENV)/.installed-test ## whole systems on virtual time under random faults (SEEDS=1000, ARGS="--from 5000")
	$(BIN)/python -m tests.dst --seeds $(SEEDS) --keep-going $(ARGS)

soak: $(VENV)/.installed-test redis ## half an hour at 80% load with aborts and faults: does anything grow? (ARGS="--minutes 5")
	$(BIN)/python -m tests.chaos.soak $(ARGS)

overload: $(VENV)/.installed-test redis ## ten times the load that can be served: what becomes of goodput, latency and memory?
	$(BIN)/python -m tests.chaos.overload $(ARGS)

jobs-stress: $(VENV)/.installed-test redis ## 100,000 jobs beside 16 streams, every actor killed in turn; about 20 minutes (ARGS="--jobs 5000")
	$(BIN)/python -m tests.chaos.jobs_stress $(ARGS)

FUZZ ?= 20000
fuzz: $(VENV)/.installed-test redis ## send 20000 hostile requests; bus entries and broken streams beside (FUZZ=..., SEED=...)
	PAGEBUS_TEST_FUZZ=$$(($(FUZZ) / 2)) PAGEBUS_TEST_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -p no:randomly \
		tests/web/fuzz/test_wire_fuzz.py tests/web/fuzz/test_schemathesis.py $(ARGS)
	PAGEBUS_TEST_FUZZ=$(FUZZ) PAGEBUS_TEST_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -p no:randomly \
		tests/system/faults/test_bus_fuzz.py tests/system/faults/test_resume_fuzz.py $(ARGS)

vllm-names: $(VENV)/.installed-test ## read vLLM's routes, fields and flags at the index anew, and tell what differs (ARGS=--write)
	$(BIN)/python -m tests.vllm_names.extract $(ARGS)

CLIENTS ?= .venv-clients
compatibility: $(VENV)/.installed-test redis node ## run clients of others, in an environment of their own, against a server (ARGS="llm node")
	test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -q $(addprefix --extra-index-url ,$(TORCH_INDEX)) \
		-r tests/compatibility/requirements.txt
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -q --no-deps \
		-r tests/compatibility/requirements-alone.txt
	mkdir -p $(CLIENTS)/node && cp tests/compatibility/package.json $(CLIENTS)/node
	npm install --prefix $(CLIENTS)/node --no-audit --no-fund --silent
	$(BIN)/python -m tests.compatibility.run $(CLIENTS) $(ARGS)

models: $(VENV)/.installed-test ## write the lists of the families that are served into README.md and docs/models.md
	$(BIN)/python -m tests.served_pages

screenshots: $(VENV)/.installed-test redis chromium ## take the pictures of the page in docs/img, from a run on this machine
	$(BIN)/python -m tests.browser.screenshots docs/img

docs: $(VENV)/.installed-test ## build these pages as a site in build/docs; a broken link or an undocumented name fails
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	$(BIN)/sphinx-build -q -W --keep-going -b coverage docs build/docs-coverage

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

# -- what the targets above need ----------------------------------------------------------------------------------------

.PHONY: redis chromium node
redis:
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || $(call apt,redis-server,the tests run against a real Redis)

node:
	@command -v npm >/dev/null || $(call apt,npm,a client is one for Node)

chromium: redis # not beside it: one apt runs at a time
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || $(call apt,chromium,the tests look at the page in a real browser)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "This needs Python 3.11 or newer on PATH (or PYTHON=/path/to/python)." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call apt,python3-venv,Python here cannot make environments)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) install -q --no-compile -c constraints.txt $(addprefix --extra-index-url ,$(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install -q --no-compile -c constraints.txt -e .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.torch pyproject.toml
	$(PIP) install -q --no-compile -c constraints.txt -e '.[test]'
	@$(COMPILE)
	@touch $@ $(VENV)/.installed

# What pip would do, which takes one core and compiles a thousand models that nobody asks for, and mathematics that torch
# needs for what we do not use. Some packages hold files that are no valid Python: they are passed over.
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/transformers/models/(?!auto|llama|mistral|qwen)|/(sympy|networkx)/' \
	$(VENV)/lib || true

# apt,PACKAGE,REASON: install a Debian package, or say how.
define apt
{ if command -v apt-get >/dev/null && { [ "$$(id -u)" = 0 ] || command -v sudo >/dev/null; }; then \
	run=$$([ "$$(id -u)" = 0 ] || echo sudo); echo "installing $(1): $(2)"; \
	$$run apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$run apt-get install -y -qq --no-install-recommends $(1); \
else echo "Please install $(1): $(2)." >&2; exit 1; fi; }
endef
