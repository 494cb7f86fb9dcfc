# One door for people and CI. Each target sets up what it needs; a second run is fast.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# The stamp's name holds what was installed, so that a changed list is installed anew.
KERNEL_SOURCES := $(sort $(wildcard kernels/host/csrc/*))
STAMP_SOURCES := pyproject.toml setup.py Makefile $(KERNEL_SOURCES)
STAMP := $(VENV)/.installed-$(shell cksum $(STAMP_SOURCES) | cksum | cut -d' ' -f1)

# Benchmarks have packages of their own, so that no test depends on what peers pull in.
BENCH_VENV := .venv-bench
BENCH_PYTHON := $(BENCH_VENV)/bin/python
BENCH_SOURCES := $(STAMP_SOURCES) benchmarks/peers/requirements.txt
BENCH_STAMP := $(BENCH_VENV)/.installed-$(shell cksum $(BENCH_SOURCES) | cksum | cut -d' ' -f1)

.PHONY: demo test test-slow test-asan test-tsan test-aarch64 lint setup bench bench-setup clean

setup: $(STAMP)
	@$(BIN)/python -c "from hyper_parallel.testing import simnpu; simnpu.install()"

$(STAMP): $(STAMP_SOURCES)
	@echo "setup: installing $(TORCH) and the test packages into $(VENV), a minute or two"
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[test,lower]'
	rm -f $(VENV)/.installed-*
	touch $@

demo: setup
	$(BIN)/python -m hyper_parallel.trainer.demo configs/text_moe_fsdp8_ep4_offload.yaml

test: setup lint
	$(BIN)/python -m pytest -m "not device and not slow"

# Not in CI: 128 ranks, more draws.
test-slow: setup
	$(BIN)/python -m pytest -m slow

bench-setup: $(BENCH_STAMP)
	@$(BENCH_PYTHON) -c "from hyper_parallel.testing import simnpu; simnpu.install()"

$(BENCH_STAMP): $(BENCH_SOURCES)
	@echo "bench-setup: installing $(TORCH) and peers into $(BENCH_VENV), a few minutes"
	test -x $(BENCH_VENV)/bin/pip || $(PYTHON) -m venv --clear $(BENCH_VENV)
	$(BENCH_PYTHON) -m pip install --disable-pip-version-check $(TORCH)
	$(BENCH_PYTHON) -m pip install --disable-pip-version-check --editable '.[bench,peers]'
	$(BENCH_PYTHON) -m pip install --disable-pip-version-check --no-deps \
		--requirement benchmarks/peers/requirements.txt
	cd benchmarks && ../$(BENCH_PYTHON) -c \
		"import importlib, peers; [importlib.import_module(m) for p in peers.METHODS.values() for m in p.modules]"
	rm -f $(BENCH_VENV)/.installed-*
	touch $@

# Refreshes benchmarks/results and the README's tables, in 10 minutes on 2 idle cores.
bench: bench-setup
	$(BENCH_PYTHON) benchmarks/run_all.py

# The host kernels under sanitizers and on another processor; not in CI.
CHECK_SOURCES := $(filter %.cpp,$(KERNEL_SOURCES)) tests/kernels/host_check.cpp
CHECK_FLAGS := -std=c++17 -ffp-contract=off -fno-math-errno -pthread -Wall -Wextra -Wconversion -Werror

test-asan:
	mkdir -p build
	$(CXX) $(CHECK_FLAGS) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
		$(CHECK_SOURCES) -o build/host_check_asan
	build/host_check_asan

test-tsan:
	mkdir -p build
	$(CXX) $(CHECK_FLAGS) -O1 -g -fsanitize=thread $(CHECK_SOURCES) -o build/host_check_tsan
	build/host_check_tsan --no-fork

# NEON must give the bits that this processor gives.
test-aarch64:
	command -v aarch64-linux-gnu-g++ qemu-aarch64-static > /dev/null || \
		(apt-get update -q && apt-get install -q -y g++-aarch64-linux-gnu qemu-user-static)
	mkdir -p build
	$(CXX) $(CHECK_FLAGS) -O2 $(CHECK_SOURCES) -o build/host_check
	aarch64-linux-gnu-g++ $(CHECK_FLAGS) -O2 -static $(CHECK_SOURCES) -o build/host_check_aarch64
	build/host_check > build/digest
	qemu-aarch64-static build/host_check_aarch64 | diff build/digest -

# What triton-ascend lowers the device kernels to, run on this processor. In `make test` too, where
# the tools are there.
test-lowered: $(STAMP) lowered-tools
	$(BIN)/python -m pytest tests/kernels/test_triton_lowered.py

lowered-tools:
	@test -x /usr/lib/llvm-19/bin/mlir-opt -a -x /usr/lib/llvm-19/bin/llc || \
		(apt-get update -q && apt-get install -q -y --no-install-recommends mlir-19-tools llvm-19) || \
		(echo "lowered kernels need Debian's mlir-19-tools and llvm-19, which cannot be installed" \
			"here; the rest of the tests does not need them" >&2; exit 1)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(BENCH_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
