#!/bin/sh
# muP: activations keep their size as a model gets wider, and the best learning rate moves by a
# factor of 2 instead of 8.
#
# 2026-11-24, one CPU core with AVX-512, jax 0.10.2, 17 CPU minutes, one seed (docs/mup.png):
#   steepest slope of log size over log width    standard 1.43, muP 0.05
#   best of seven rates at widths 64, 128, 256   standard 2^-6 2^-8 2^-9, muP 2^-6 2^-7 2^-7
# On a grid between these rates, with another seed, muP's best is 2^-6.5 at all three widths.
#
# The table is JSON on standard output.  LOG.md has all losses, and says what they do not show.

set -eu
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=cpu
python scripts/prepare_data.py --pydocs --tokenizer char --val_fraction 0.05 --out data/chars
python scripts/mup_check.py --data data/chars/train --out "${OUT:-docs/mup.png}" "$@"
