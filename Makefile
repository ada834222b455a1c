# make demo: a small language model, from nothing to text.   make test: the whole suite.   make lint: ruff.
# make test-interop: its models against Hugging Face transformers, its plans against TPUs' compiler.
# PYTHON is any Python from 3.11 on; everything is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-interop lint

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

# Against transformers and libtpu, which nothing else needs: in an environment of its own.
.venv-interop/installed: tests/requirements-interop.txt requirements.txt
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/pip install --disable-pip-version-check -r tests/requirements-interop.txt
	touch $@

test-interop: export JAX_PLATFORMS := cpu
test-interop: .venv-interop/installed
	.venv-interop/bin/python -m pytest -n 0 tests/test_interop.py
	.venv-interop/bin/python -m pytest -n 0 tests/test_plan.py -k compilers

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
