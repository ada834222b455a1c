# make demo: a small language model, from nothing to text.   make test: the whole suite.   make lint: ruff.
# PYTHON is any Python from 3.11 on; everything is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -r requirements.txt
	touch $@

# JAX_PLATFORMS=cpu: eight fake CPU devices also where there is an accelerator.
demo: export JAX_PLATFORMS := cpu
demo: .venv/installed
	$(BIN)/python scripts/prepare_data.py --stdlib --vocab_size 4096 --val_fraction 0.05 --out data/demo
	$(BIN)/python train.py --config demo
	$(BIN)/python scripts/sample.py --run runs/demo --prompt "def " --tokens 100 --temperature 0.7 --top_p 0.9
	$(BIN)/python scripts/report.py --run runs/demo

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
