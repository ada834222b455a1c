#!/bin/sh
# muP: activations keep their size as a model gets wider, and the best learning rate of a narrow
# model is that of a wide one.
#
# RESULT
#
# The table is JSON on standard output; LOG.md explains it.

set -eu
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=cpu
python scripts/prepare_data.py --pydocs --tokenizer char --val_fraction 0.05 --out data/chars
python scripts/mup_check.py --data data/chars/train --out "${OUT:-docs/mup.png}" "$@"
