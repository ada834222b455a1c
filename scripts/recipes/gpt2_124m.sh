#!/bin/sh
# GPT-2 124M with nanoGPT's recipe on 10 billion tokens of FineWeb, on one node of 8 H200s.
#
# NOT RUN HERE.  Planned on 2026-11-28 with jax 0.10.2, without a GPU, by
#   python scripts/plan.py --config gpt2_124m --mesh.dp 8 --train.grad_accum 1 --topology h200:8
# A device needs 12.5 GiB of 104.9.  (With --train.remat layer, which was compiled on 2026-11-24, it
# needs 3.28 GiB by the plan and 3.29 by XLA.)  An update takes 52 ms of matmuls at the chip's peak
# (an MFU of 95 %), and 54 if no communication is hidden: 20,000 updates take 18 minutes at the
# least, and 41 at the MFU of 40 % that llm.c had on 8 H100s.  llm.c's validation loss was 3.28
# after as many tokens of FineWeb (both from the records of modded-nanogpt, 2024-10-13).
#
# The first command needs a network, the package datasets, and GPT-2's tokenizer, which
# `hf download openai-community/gpt2 tokenizer.json --local-dir data/gpt2` fetches.  On the node JAX
# is `pip install "jax[cuda13]"`.

set -eu
cd "$(dirname "$0")/../.."
python scripts/prepare_data.py --input hf://HuggingFaceFW/fineweb:sample-10BT:train \
  --tokenizer "${TOKENIZER:-data/gpt2/tokenizer.json}" --val_fraction 0.001 --out data/fineweb
python train.py --config gpt2_124m --run.name gpt2_124m_fineweb \
  --data.train data/fineweb/train --data.val data/fineweb/val \
  --mesh.dp 8 --mesh.pp 1 --mesh.tp 1 --train.grad_accum 1 "$@"
