"""Average the weights of several checkpoints of a run into a new run.  The mean is often better
than the last checkpoint (Izmailov et al. 2018).

    python scripts/average.py --run runs/demo --steps 390,400 --out runs/average

The new run can be evaluated, sampled, exported and trained further like any other.
"""

import re
import sys
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import config
import files
from errors import USAGE, UserError


@dataclass(frozen=True)
class Args:
    run: str
    """A run directory, local or gs://."""
    steps: str
    """Numbers of updates of the checkpoints, such as 300,350,400."""
    out: str
    """The run directory to make, local or gs://."""
    mesh: config.YesNo[config.Mesh] = config.Mesh()


def parse() -> tuple[Args, config.Config]:
    args = cli.read_args(Args, __doc__)
    steps, is_list = args.steps.split(","), re.fullmatch(r"\d{1,9}(,\d{1,9})+", args.steps)
    if not is_list or len({*map(int, steps)}) < len(steps):
        what = f"steps={args.steps!r} must be two or more different numbers of updates"
        raise UserError(USAGE, what, "give them as in --steps 300,350,400")
    name = Path(args.out).name
    return args, cli.config_of_run(args.run, args.mesh, "--run.name", name)


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

import jax

import processes
import rundir
import runstate
import utils
from checkpoint import Checkpoints
from scripts.outputs import check_new


def main(args: Args, cfg: config.Config):
    """Average the weights of the checkpoints, and write them as checkpoint 0 of the new run."""
    cfg = utils.start_mesh(cfg, rows=1)
    run, out = files.absolute_path(args.run), files.absolute_path(args.out)
    utils.run_on_lead(check_new, out, "out")  # before the work
    mean, steps = None, [int(word) for word in args.steps.split(",")]
    for n, step in enumerate(steps):
        params = runstate.load_params(run, cfg, step)
        mean = params if mean is None else update_mean(mean, params, n + 1.0)
    save_weights(mean, run, out, steps, cfg)
    utils.say(f"{out}: the mean of the weights after {args.steps} updates of {run}")


@partial(jax.jit, donate_argnums=0)
def update_mean(mean, params, n):
    """The mean of n trees: `params`, and n - 1 others of which `mean` is the mean."""
    return jax.tree.map(lambda mean, x: mean + (x - mean) / n, mean, params)


def save_weights(params, run, out, steps: list[int], cfg: config.Config):
    """Write weights, which are made of those of `run` after these updates, as checkpoint 0 of a new
    run.  Their memory is used again, so the arrays cannot be read afterwards.  Raises as
    check_new."""
    run, out = files.absolute_path(run), files.absolute_path(out)
    utils.run_on_lead(check_new, out, "out")
    abstract = runstate.checkpoint_items(runstate.abstract_state(cfg))
    items = runstate.add_items(dict(params=params), 0, abstract, cfg)
    store = Checkpoints(out, settings=runstate.model_settings(cfg))
    store.save(0, items, last=True)
    store.close()
    utils.run_on_lead(write_record, run, out, steps)


def write_record(run, out, steps: list[int]):
    """Write the config.json of the new run, and copy the tokenizer."""
    record = rundir.read_record(run)
    record["run"] |= dict(name=out.name, dir=str(out.parent), start_from="", start_with="weights")
    record |= dict(run_id=uuid.uuid4().hex[:12], parent=dict(path=str(run), step=steps))
    if (run / "tokenizer.json").exists():
        files.write_whole(out / "tokenizer.json", (run / "tokenizer.json").read_bytes())
    rundir.write_config(out, record)


if __name__ == "__main__":
    processes.run_main(main, ARGS, CFG)
