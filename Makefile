# One door for people and CI. Each target sets up what it needs; a second run is fast.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# The stamp's name holds what was installed, so that a changed list is installed anew.
STAMP := $(VENV)/.installed-$(shell cksum pyproject.toml Makefile | cksum | cut -d' ' -f1)

.PHONY: demo test lint setup clean

setup: $(STAMP)
	@$(BIN)/python -c "from hyper_parallel.testing import simnpu; simnpu.install()"

$(STAMP): pyproject.toml Makefile
	@echo "setup: installing $(TORCH) and the test packages into $(VENV), a minute or two"
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[test]'
	rm -f $(VENV)/.installed-*
	touch $@

demo: setup
	$(BIN)/python -m hyper_parallel.trainer.demo configs/text_moe_fsdp8_ep4_offload.yaml

test: setup lint
	$(BIN)/python -m pytest -m "not device"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
