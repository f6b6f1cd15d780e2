# `make demo` and `make test` do all of their own set-up on a machine with Python 3.11 to 3.14, make and gcc. Environments are
# built once, outside this folder, and shared by every clone: see tools/env.py.

# Any Python of the machine: make PYTHON=python3.12 test
PYTHON ?= python3

RUN := .venv/bin/python
ENV := $(PYTHON) tools/env.py

# Without it vLLM compiles two small kernels with g++ at its first request: 15 seconds for nothing that is tested here.
export TORCH_COMPILE_DISABLE := 1

.NOTPARALLEL:
.PHONY: help demo test test-core test-engine test-all soak fuzz bench bench-peers lint format docs golden clean

help:
	@echo 'make demo      a vLLM engine stores its KV cache, another one gets it back'
	@echo 'make test      every test that takes seconds, real engines included'
	@echo 'make test-all  the long ones too'
	@echo 'make soak      a quarter of an hour of faults and kills over folders and buckets; SOAK_SECONDS for more or less'
	@echo 'make fuzz      a million bent frames through the decoder of the peers, and a hundred thousand at one that serves'
	@echo 'make bench     the whole comparison with vLLM, fio, NIXL and others; BENCH_FOLDER=/mnt/disk BENCH_ROUNDS=quick|full'
	@echo 'make bench-peers  the fs backend beside LMCache, which it installs; BENCH_FOLDER=/mnt/disk'
	@echo 'make lint      formatting, types, import layers, content of the wheel'
	@echo 'make format    formatting, done instead of checked'
	@echo 'make docs      the tables of docs/configuration.md, and docs/requirements.md, from the code'
	@echo 'make golden    the golden files of the record format and of the protocol, and the examples in docs'
	@echo 'make clean     remove what was built in this folder'

demo:
	@$(ENV) engine
	@.venv/bin/kvstore demo

test: test-core test-engine

# The suite on backends that are wrong on purpose waits much and computes little.
SUITE_TESTS = suites=$$($(ENV) suites) && KVSTORE_SUITES="$$suites" $(RUN) -m pytest tests/conformance -n 4 --dist worksteal

# Object stores are slow, hang and are waited for, in processes of their own.
STORE_TESTS = $(RUN) -m pytest tests/backends/s3 -n 3 --dist worksteal

# Peers wait for each other, and are killed in processes and networks of their own.
PEER_TESTS = $(RUN) -m pytest tests/backends/p2p -n 2 --dist worksteal

# Two processes: an engine leaves threads and global state behind that would colour what is tested after it.
# Each part runs even when one before it failed.
test-core:
	@$(ENV) engine
	failed=0; \
	$(RUN) -m pytest --ignore=tests/vllm --ignore=tests/conformance --ignore=tests/backends/s3 --ignore=tests/backends/p2p -m "not long" || failed=1; \
	$(STORE_TESTS) -m "not long" || failed=1; \
	$(PEER_TESTS) -m "not long" || failed=1; \
	$(SUITE_TESTS) -m "not long" || failed=1; \
	exit $$failed

test-engine:
	@$(ENV) engine
	overlays=$$($(ENV) overlays) && KVSTORE_VLLM_OVERLAYS="$$overlays" $(RUN) -m pytest tests/vllm -m "not long"

test-all:
	@$(ENV) engine
	$(RUN) -m pytest --ignore=tests/vllm --ignore=tests/conformance --ignore=tests/backends/s3 --ignore=tests/backends/p2p
	$(STORE_TESTS)
	$(PEER_TESTS)
	$(SUITE_TESTS)
	overlays=$$($(ENV) overlays) && KVSTORE_VLLM_OVERLAYS="$$overlays" $(RUN) -m pytest tests/vllm

# What it found is in build/soak: a summary, a table and a plot.
SOAK_SECONDS ?= 900
soak:
	@$(ENV) engine
	$(RUN) tests/soak/soak.py --seconds $(SOAK_SECONDS) --out build/soak

# CI runs a fiftieth of it; `FUZZ_SEED` for other frames.
FUZZ_SEED ?= 0
fuzz:
	@$(ENV) engine
	$(RUN) tests/backends/p2p/fuzz.py --decoder 1000000 --socket 100000 --seed $(FUZZ_SEED)

# The disk to measure; what came of it is a page, tables as JSON and plots in `BENCH_OUT`. quick: some 10 minutes, to see that it all runs.
BENCH_FOLDER ?= /tmp
BENCH_OUT ?= build/bench
BENCH_ROUNDS ?= full
bench:
	@$(ENV) engine
	$(RUN) benchmarks/run.py --folder $(BENCH_FOLDER) --out $(BENCH_OUT) --profile $(BENCH_ROUNDS)

bench-peers:
	@$(ENV) engine
	@lmcache="$$($(ENV) lmcache)" && set -x && \
	$(RUN) benchmarks/run.py --folder $(BENCH_FOLDER) --out $(BENCH_OUT) --profile $(BENCH_ROUNDS) --only peers --lmcache "$$lmcache"

# In an environment without an engine, as a vendor has it.
lint:
	@bin="$$($(ENV) lint)/bin" && export PYTHONPATH=.:backends:conformance && set -x && \
	"$$bin/ruff" check . && \
	"$$bin/ruff" format --check . && \
	"$$bin/mypy" && \
	"$$bin/mypy" --explicit-package-bases tools/*.py && \
	"$$bin/lint-imports" --no-cache && \
	"$$bin/python" -m pytest -q tests/test_packaging.py

# Tables that are made from code.
docs:
	@$(ENV) engine
	@$(RUN) tools/option_tables.py
	@$(RUN) tools/requirements_page.py

# Files that a change of the format has to change; from version 1 on this refuses.
golden:
	@$(ENV) engine
	@$(RUN) tests/golden/regenerate.py
	@$(RUN) tests/golden/p2p_regenerate.py

format:
	@bin="$$($(ENV) lint)/bin" && "$$bin/ruff" check --fix . && "$$bin/ruff" format .

clean:
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f backends/kvstore_sdk_backends/fs/_librecords.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
