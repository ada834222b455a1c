"""Loss, perplexity and bits per byte of a trained model on a data set, each token counted once,
as one line of JSON.

    python scripts/evaluate.py --run runs/demo --data data/demo/val --per_token logprob.npy
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import config
import files


@dataclass(frozen=True)
class Args:
    run: str
    """A run directory, local or gs://."""
    data: str = ""
    """The data set; by default what the run validated on."""
    per_token: str = ""
    """Write here, as float32 .npy, the log probability (nats) of each token but the first, in the
    data's order."""
    batch_size: int = 64
    """Sequences at a time, about; the result does not depend on it."""
    step: int = -1
    """The checkpoint to use; -1 is the newest."""
    mesh: config.YesNo[config.Mesh] = config.Mesh()


def parse() -> tuple[Args, config.Config]:
    args = tyro.cli(Args, use_underscores=True, description=__doc__)
    if args.batch_size < 1:
        what = f"batch_size={args.batch_size} must be at least 1"
        raise config.UserError(config.USAGE, what, "set --batch_size 1 or more")
    flags = ["--data.val", args.data] if args.data else []
    return args, cli.config_of_run(args.run, args.mesh, *flags)


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

import train
import utils
from dataset import Dataset


def main(cfg: config.Config):
    """Score every token of the set, and print what comes of it."""
    args = ARGS
    cfg = utils.start_mesh(cfg, rows=args.batch_size)
    data = Dataset(cfg, "val")
    params = train.load_params(files.absolute_path(args.run), cfg, args.step)
    nlls, bar = [], dict(desc="evaluate", unit="batch", disable=not utils.is_lead())
    for i in tqdm(range(data.n_eval_batches), **bar):
        _, _, nll_AMBL = train.eval_step(params, *data.eval_batch(i), cfg)
        nlls.append(np.asarray(multihost_utils.process_allgather(nll_AMBL, tiled=True)).ravel())
    nll = np.concatenate(nlls)[: len(data.stream) - 1]  # the rest pads the last batch
    loss = nll.sum(dtype=np.float64) / len(nll)
    per_byte = loss / math.log(2) / data.bytes_per_token if data.bytes_per_token else math.nan
    scores = dict(loss=loss, perplexity=np.exp(loss), bits_per_byte=per_byte)
    scores = {
        name: utils.finite_or_none(score) for name, score in scores.items()
    }  # JSON has no NaN
    utils.say(json.dumps(scores | dict(tokens=len(nll))))
    if args.per_token and utils.is_lead():
        files.write_whole(files.absolute_path(args.per_token), files.npy_bytes(-nll))


if __name__ == "__main__":
    utils.run_main(main, CFG)
