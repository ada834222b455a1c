#!/bin/sh
# muP: as a model gets wider, its activations keep their size and its best learning rate stays the
# same.  Without muP the best rate halves each time the width doubles.
#
# 2026-11-25, one busy CPU core, jax 0.10.2, 35 CPU minutes, with --seeds 0 1 2 (docs/mup.png):
#   steepest slope of log size over log width    standard 1.43, muP 0.05
#   best of seven rates at widths 64, 128, 256   standard 2^-6.5 2^-7.5 2^-8.5, muP 2^-6.5 at all
#
# The table is JSON on standard output.  LOG.md has all losses, and says what they do not show.

set -eu
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=cpu
python scripts/prepare_data.py --pydocs --tokenizer char --val_fraction 0.05 --out data/chars
python scripts/mup_check.py --data data/chars/train --out "${OUT:-docs/mup.png}" "$@"
