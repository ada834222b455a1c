"""Loss, perplexity and bits per byte of a trained model, as a line of JSON for each data set, and
another for the tasks of --eval.tasks.

    python scripts/evaluate.py --run runs/demo --data data/demo/val --per_token logprob.npy

Each token counts once, on any mesh.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import config
import errors
import files
from parsers import read_sets


@dataclass(frozen=True)
class Args(cli.RunArgs):
    data: str = ""
    """The data set; by default the run's validation sets.
    Without --data, an imported run with --eval.tasks scores the tasks alone."""
    per_token: str = ""
    """A .npy file to write: the log probability (nats, float32) of each token after the first.
    They are in the order of the data; NaN where a mask says that a token is not scored."""
    batch_size: int = 64
    """Sequences in a batch, rounded to what the mesh needs; does not change the result."""
    eval: config.Eval = config.Eval()


def parse() -> tuple[Args, config.Config]:
    args = cli.read_args(Args, __doc__)
    cli.check_at_least(args, batch_size=1)
    flags = ["--data.val", args.data] if args.data else []
    flags += ["--eval.tasks", *args.eval.tasks]  # in place of the run's own tasks
    cfg = cli.config_of_run(args.run, args.mesh, *flags, *args.flags)
    if args.per_token and len(read_sets(cfg.data.val)) > 1:
        what = f"--per_token takes one set, but data.val={cfg.data.val} has several"
        raise errors.UserError(errors.USAGE, what, "name one with --data")
    return args, cfg


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

import jax.numpy as jnp
import numpy as np

import processes
import rundir
import runstate
import train
import utils
from dataset import Dataset
from scripts.outputs import check_output
from shards import check_tokenizer
from tasks import open_tasks

NOT_SCORED = -1.0
"""Marks a token that is not scored: no loss is this far below 0."""


def main(args: Args, cfg: config.Config):
    """Score every set, print the means, and write --per_token; then score the tasks."""
    cfg, run = utils.start_mesh(cfg, rows=args.batch_size), files.absolute_path(args.run)
    utils.run_on_lead(check_output, "per_token", args.per_token)
    path = run / "tokenizer.json"
    tasks = utils.run_on_each(open_tasks, path, cfg) if cfg.eval.tasks else None
    # An imported run names data in its config.json, but they are not its own.
    has_data = rundir.read_record(run).get("data_fingerprint") or args.data
    if not has_data and (args.per_token or not tasks):
        what = f"{args.run} has no data of its own"
        raise errors.UserError(errors.DATA, what, "give a data set as --data")
    try:
        names = read_sets(cfg.data.val) if has_data else ()
        sets = [utils.run_on_each(Dataset, cfg, "val", name) for name in names]
    except errors.UserError as e:
        problems = [x._replace(fix=x.fix.replace("--data.val", "--data")) for x in e.problems]
        raise errors.UserError(e.code, problems=problems) from None
    for data in sets:
        utils.run_on_lead(check_tokenizer, path, data.source.tokenizer)
    fingerprints = {data.label: data.source.fingerprint for data in sets}
    fingerprints |= {"eval.tasks": tasks.fingerprint} if tasks else {}
    processes.refuse_differences(fingerprints, "let the path hold the same files on every host")
    params = runstate.load_params(run, cfg, args.step, args.weights)
    for data in sets:
        score(args, cfg, params, data)
    if tasks:
        utils.say(f"evaluating in {cfg.train.dtype} on {tasks}", file=sys.stderr)
        utils.say(json.dumps(train.score_tasks(params, tasks, cfg)))


def score(args: Args, cfg: config.Config, params, data: Dataset):
    """Score every token of one set."""
    # stdout is for the result.
    path = read_sets(cfg.data.val)[data.name].path
    utils.say(f"evaluating in {cfg.train.dtype} on {path}: {data.source}", file=sys.stderr)
    parts, total, n_scored = [], 0.0, 0
    for i in train.progress(range(data.n_batches)):
        tokens, targets = data.batch(i)
        _, _, nll_AMBL, _ = train.eval_step(params, tokens, targets, cfg)
        nll = utils.host_rows(jnp.where(targets >= 0, nll_AMBL, NOT_SCORED))
        scored = nll[nll != NOT_SCORED]
        total, n_scored = total + scored.sum(dtype=np.float64), n_scored + scored.size
        if args.per_token:  # otherwise a large set would fill the memory
            parts.append(nll)
    loss = total / n_scored if n_scored else math.nan
    bits = loss / math.log(2) / (data.source.bytes_per_token or math.nan)
    scores = dict(loss=loss, perplexity=np.exp(loss), bits_per_byte=bits)
    scores = {name: utils.finite_or_none(x) for name, x in scores.items()}  # JSON has no NaN
    name = dict(set=data.name) if data.name else {}
    utils.say(json.dumps(name | scores | dict(tokens=n_scored)))
    if args.per_token and utils.is_lead():
        nll = np.concatenate(parts).ravel()[: data.source.n_tokens - 1]  # without the padding
        logprob = np.where(nll != NOT_SCORED, -nll, np.float32(np.nan))
        files.write_whole(files.absolute_path(args.per_token), files.npy_bytes(logprob))


if __name__ == "__main__":
    processes.run_main(main, ARGS, CFG)
