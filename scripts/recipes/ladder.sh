#!/bin/sh
# A scaling ladder.  Five sizes of one model, from 13,000 to 213,000 parameters in the layers, each
# trained on about five characters for each of them.  A power law through the four smaller ones says
# what the fifth will reach.
#
# 2026-11-24, one CPU core with AVX-512, jax 0.10.2: loss = 8.37 N^-0.126, predicted 1.783, measured
# 1.777, +0.36 %, in 136 CPU seconds.  Two ladders before it, whose law had a constant too, missed
# by more than 1 %; LOG.md has them.
#
# Data: run shakespeare_char.sh first, at least up to prepare_data.py.

set -eu
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=cpu
RUNS=${RUNS:-runs}
widths="16 24 32 48 64"

# The law, the points, rates and lengths were set before the first run.  The parameters of the
# layers grow as width^2, and so do the updates.  muP gives all widths the rate of width 32.
# The default momentum takes the place of the preset's, which AdamW refuses.
for width in $widths; do
  python train.py --config shakespeare_char --run.dir "$RUNS" --run.name "ladder_$width" \
    --model.d_model "$width" --model.n_heads $((width / 8)) --model.n_kv_heads $((width / 8)) \
    --model.d_head 8 --model.d_ff $((3 * width)) --model.mup_base_width 32 \
    --train.steps $((width * width / 3)) --train.eval_every 0 --run.seed 1 \
    --optim.name adamw --optim.muon_momentum 0.95 --optim.lr 1e-2 \
    --optim.warmup_steps $((width * width / 30)) "$@"
done
python scripts/recipes/ladder.py --runs $(for width in $widths; do echo "$RUNS/ladder_$width"; done) \
  --out "${OUT:-docs/ladder.png}"
