# make demo       trains tiny_bf16, tiny_fp8 and tiny_nvfp4 on real text and prints the loss-parity report
# make test       the whole suite; what .ci/run calls
# make test-long  what takes minutes: README's long commands, larger sweeps
# Each target makes .venv and installs what it needs on first use (PYTHON=... chooses the interpreter).

PYTHON ?= python3
VENV   := .venv
SHELL  := bash
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long test-mcore019 check clean

help:
	@sed -n 's/^# //p' Makefile

install: $(STAMP)

# The stamp depends on everything that decides what is installed. `touch` comes last, so an
# interrupted installation is started again. torch is pinned in constraints.txt.
KERNELS := $(wildcard nvfp4/backends/cpu_*.h nvfp4/backends/cpu_*.cpp)
$(STAMP): pyproject.toml setup.py constraints.txt $(KERNELS)
	@test -x $(BIN)/python || { echo "== making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing nvfp4[test] (a few minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]' | \
	  sed -unE '/^(Collecting|Building|Installing|Successfully)/p'; exit $${PIPESTATUS[0]}
	@touch $@

# The three runs side by side, one thread each: no run waits for another thread at every small
# operation, so a busy machine slows them little. A pipe makes their progress plain lines.
RUNS := tiny_bf16 tiny_fp8 tiny_nvfp4
demo: $(STAMP)
	@$(MAKE) --no-print-directory -j 3 $(RUNS:%=run-%)
	@$(BIN)/nvfp4 parity $(RUNS:%=runs/%) --out runs/parity || test $$? -eq 4

run-%: $(STAMP)
	@set -o pipefail; OMP_NUM_THREADS=1 $(BIN)/nvfp4 train $* 2>&1 | sed -u "s/^/$*  /"

# One process a core, one thread each: the suite is many small tensors.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not long" tests

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long tests

# The same suite against megatron-core 0.19, in an environment of its own. Its wheels for
# Python 3.11 exist but are marked for 3.12 and newer, hence the two flags.
MCORE019 := .venv-mcore019
$(MCORE019)/.installed: pyproject.toml setup.py constraints.txt $(KERNELS)
	@test -x $(MCORE019)/bin/python || $(PYTHON) -m venv $(MCORE019)
	@$(MCORE019)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[test]'
	@$(MCORE019)/bin/python -m pip install --disable-pip-version-check -q --no-deps --ignore-requires-python megatron-core==0.19.2
	@touch $@

test-mcore019: $(MCORE019)/.installed
	OMP_NUM_THREADS=1 $(MCORE019)/bin/python -m pytest -n 2 --dist loadfile -m "not long" tests

check: $(STAMP)
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

clean:
	rm -rf runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
