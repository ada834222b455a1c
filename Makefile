# make demo: train a small language model and sample from it.   make lint: ruff.
# make test: the tests, without the slow ones.   make test-full: all of them.
# make test-faults MINUTES=30: random faults, from a seed that is printed.
# make test-interop: compare models with Hugging Face transformers, plans with the TPU compiler, and
#   answers with EleutherAI's harness; prepare data on Ray and through Hugging Face datasets.
# make test-launch: train under a real Slurm, Open MPI and sshd; what is not installed is skipped.
# make hashes: make requirements.txt anew after a change of requirements.in.
# PYTHON is any Python from 3.11 to 3.13; everything is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-full test-faults test-interop test-launch lint hashes

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "error: $(PYTHON) is not \
	3.11 to 3.13\n  fix: install Python 3.12, and give it: make demo PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --require-hashes -r requirements.txt
	touch $@

# JAX_PLATFORMS=cpu: eight simulated CPU devices even if there is an accelerator.
demo: export JAX_PLATFORMS := cpu
demo: .venv/installed
	$(BIN)/python scripts/prepare_data.py --pydocs --val_fraction 0.05 --out data/demo
	$(BIN)/python train.py --config demo
	$(BIN)/python scripts/report.py --run runs/demo
	$(BIN)/python scripts/sample.py --run runs/demo --prompt "Open a file" "If the" "Set the" --tokens 64 --temperature 0.7 --top_p 0.8
	@echo
	@echo 'Next, for example:'
	@echo '  continue another text:'
	@echo '    $(BIN)/python scripts/sample.py --run runs/demo --prompt "When the" --temperature 0.7 --top_p 0.9'
	@echo '  train longer, on all devices that JAX finds:'
	@echo '    $(BIN)/python train.py --config demo --run.name longer --train.steps 1000 --mesh.dp -1 --mesh.pp 1 --mesh.tp 1'
	@echo '  prepare a text or a folder of yours (here docs/), for --data.train data/mine/train --data.val data/mine/val:'
	@echo '    $(BIN)/python scripts/prepare_data.py --input docs --suffix .md --val_fraction 0.1 --out data/mine'

test: .venv/installed
	$(BIN)/python -m pytest

test-full: .venv/installed
	$(BIN)/python -m pytest -m ""

test-faults: MINUTES ?= 30
test-faults: export JAX_PLATFORMS := cpu
test-faults: .venv/installed
	$(BIN)/python tests/faults.py --minutes $(MINUTES)

# transformers and libtpu are needed for nothing else, so they have a separate environment.
.venv-interop/installed: tests/requirements-interop.txt requirements.in
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/pip install --disable-pip-version-check -r tests/requirements-interop.txt
	touch $@

test-interop: export JAX_PLATFORMS := cpu
test-interop: .venv-interop/installed
	.venv-interop/bin/python -m pytest -m interop tests/test_interop.py tests/test_benchmark.py
	.venv-interop/bin/python -m pytest -m interop tests/test_lm_eval.py
	.venv-interop/bin/python -m pytest -n 0 -m interop tests/test_prepare.py tests/test_plan.py

# Slurm starts jobs as root only.
test-launch: export JAX_PLATFORMS := cpu
test-launch: .venv/installed
	$(BIN)/python -m pytest -n 0 -m "" -rs tests/test_launch.py
	@echo 'What was skipped needs, on Debian: apt-get install slurmctld slurmd slurm-client munge' \
		'openmpi-bin openssh-server'

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# With the hash of every file of each package, for all platforms and Pythons.
hashes: export UV_CUSTOM_COMPILE_COMMAND := make hashes
hashes: .venv/installed
	$(BIN)/pip install --disable-pip-version-check uv==0.13.9
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes \
		--output-file requirements.txt requirements.in
