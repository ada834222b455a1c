#!/bin/sh
# Llama 3 8B on a v5p-128 (64 chips), 4 million tokens an update.
#
# NOT RUN HERE.  Planned and compiled on 2026-11-29 with jax 0.10.2 and libtpu 0.0.42.1, by
#   python scripts/plan.py --config llama3_8b --mesh.dp 64 --train.remat dots \
#     --topology v5p:4x4x4 --compile
# A device needs 53.3 GiB by the plan and 52.9 by XLA, of 95.7.  An update takes 7.9 s of matmuls at
# the chip's peak.  By XLA's count of cycles and the plan's count of the attention kernel and of
# communication it takes 8.9 + 1.4 = 10.3 s if all communication is hidden and 11.3 s if none is, an
# MFU of 71 or 65 %: three days for 100 billion tokens (24,000 updates).
#
# The first command runs once, anywhere; BUCKET is a gs:// path that the pod can read and write, and
# TOKENIZER the tokenizer.json of a Llama 3 model on the Hugging Face hub.  The second one runs on
# every worker of the pod, where JAX is `pip install "jax[tpu]"`.  The same command resumes.

set -eu
cd "$(dirname "$0")/../.."
if [ "${1:-}" = prepare ]; then
  python scripts/prepare_data.py --input hf://HuggingFaceFW/fineweb:sample-100BT:train \
    --tokenizer "$TOKENIZER" --val_fraction 0.0002 --out "$BUCKET/fineweb"
else
  python train.py --config llama3_8b --run.name llama3_8b_fineweb --run.dir "$BUCKET/runs" \
    --data.train "$BUCKET/fineweb/train" --data.val "$BUCKET/fineweb/val" \
    --mesh.dp 64 --mesh.pp 1 --mesh.tp 1 --train.remat dots --train.steps 24000 "$@"
fi
