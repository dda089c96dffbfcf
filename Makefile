# make run        the main job: self-play with the nano recipe on two CPU cores, with a live view and a report
# make test       formatting, lint, types, architecture, fast and slow tests, the main job killed and resumed
# make test-long  the other end-to-end tests with vLLM, processes killed at random, fuzz
# make test-frameworks  pools of other frameworks and exports to them, in an environment of their own
# make docs       the documentation as a site in site/
# Each of the first three sets up .venv first when it is missing or its lock has changed.

PYTHON ?= python3
RECIPE ?= configs/nano.toml
ARGS ?=
PYTEST_ARGS ?=
TORCH_INDEX ?=
UV ?=
BIN := .venv/bin
# Collecting all tests takes seconds in each worker: only files that may have some of a mark are looked into.
TESTS := grep -rlE --include='test_*.py'
marked = $(sort $(shell $(TESTS) 'mark\.($(1))\b' tests))
MAIN_JOB = tests/e2e/test_run.py
SLOW = $(sort $(call marked,slow) $(shell $(TESTS) sandbox_siege tests))
NEVER_FAST = $(addprefix --ignore=,$(shell $(TESTS) '^pytestmark = .*mark\.(slow|fuzz)\b' tests))
# Hundreds of processes are started by the tests: without bytecode each would compile the whole project again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test ahead test-fast test-slow test-run test-e2e test-long test-chaos test-fuzz test-exhaustive
.PHONY: lint format setup clean docs test-frameworks gpu-lock
.DEFAULT_GOAL := run
.NOTPARALLEL:

setup:
	@TORCH_INDEX='$(TORCH_INDEX)' $(PYTHON) requirements/install.py $(if $(UV),--uv)

run: setup
	@exec $(BIN)/spade run $(RECIPE) $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadgroup --ignore tests/e2e $(NEVER_FAST) -m "not e2e and not slow and not long and not chaos and not fuzz" $(PYTEST_ARGS)

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m "slow and not long" $(SLOW) $(PYTEST_ARGS)

test-run: setup
	$(BIN)/python -m pytest $(MAIN_JOB) $(PYTEST_ARGS)

test-e2e: setup
	$(BIN)/python -m pytest -m "e2e and not long and not chaos and not fuzz" $(filter-out $(MAIN_JOB),$(call marked,e2e)) $(PYTEST_ARGS)

test-chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m chaos $(call marked,chaos) $(PYTEST_ARGS)

test-fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m fuzz $(call marked,fuzz) $(PYTEST_ARGS)

# Pools of other frameworks and exports to them, for real.
test-frameworks: setup .venv-frameworks/installed
	OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m pytest tests/engine/test_pools.py tests/engine/test_exports.py $(PYTEST_ARGS)

.venv-frameworks/installed: requirements/frameworks.lock
	$(BIN)/python -m venv --clear .venv-frameworks
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >$$(echo .venv-frameworks/lib/python*/site-packages)/spade.pth
	.venv-frameworks/bin/pip install -q --no-deps -r $<
	.venv-frameworks/bin/python -c 'import openenv, textarena, verifiers.v1'
	@touch $@

# The documentation as a site in site/, with an environment of its own.
docs:
	@test -x .venv-docs/bin/mkdocs || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install -q -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build -q --strict -f requirements/docs.yml

# While mypy has one core the other collects the tests once, so that no worker has to compile them all, and
# builds the nano model with which end-to-end tests begin. That takes two minutes, wherever a core is idle; the
# first test that needs it waits for the rest, or builds it and says what is wrong.
ahead: setup
	@$(BIN)/python -m pytest --collect-only -q -p no:cacheprovider </dev/null >/dev/null 2>&1 &
	@OMP_NUM_THREADS=1 nice -n 19 $(BIN)/spade warmstart configs/nano.toml warmstart.threads=1 </dev/null >/dev/null 2>&1 &

# More points and lengths of what shorter tests show already; not in CI.
test-exhaustive: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long $(PYTEST_ARGS)

test: ahead lint test-fast test-slow test-run

test-long: test-e2e test-chaos test-fuzz

# The stack of a GPU machine, with the CPU lock's versions where vLLM's GPU build does not pin another. Needs uv.
gpu-lock:
	grep -v '^apache-tvm-ffi' requirements/cpu.lock | uv pip compile -q pyproject.toml --extra gpu --constraint - \
		--python-version 3.12 --python-platform x86_64-manylinux_2_31 --no-annotate \
		--custom-compile-command "make gpu-lock" -o requirements/gpu.lock

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-frameworks build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
