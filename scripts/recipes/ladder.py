"""Fit loss = a * N^-b to the smaller runs of a ladder, predict the largest, and draw both.

    python scripts/recipes/ladder.py --runs runs/ladder_16 runs/ladder_24 .. --out docs/ladder.png

N is the number of parameters in the layers.  The last run takes no part in the fit.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cli
from config import Mesh
from errors import DATA, USAGE, UserError
from files import absolute_path
from panels import write_png
from parsers import read_sets
from scripts.report import read_metrics


@dataclass(frozen=True)
class Args:
    runs: tuple[str, ...]
    """Run directories, from the smallest model to the largest."""
    out: str = "ladder.png"
    """The picture to write."""


def parse() -> Args:
    args = cli.read_args(Args, __doc__)
    if len(args.runs) < 3:
        what = f"--runs has {len(args.runs)} of the 3 runs or more that a fit and a prediction need"
        raise UserError(USAGE, what, "name runs of models of different sizes")
    return args


def read_run(run: str) -> tuple[int, float]:
    """(parameters in the layers, final loss on the first set of data.val) of a run whose layers are
    dense.  Raises UserError USAGE and DATA, and TimeoutError as read_metrics."""
    cfg, (_, evals, _) = cli.config_of_run(run, Mesh(1, 1, 1)), read_metrics(absolute_path(run))
    m, first = cfg.model, next(iter(read_sets(cfg.data.val)))
    losses = [row["loss"] for row in evals if row.get("set", "") == first]
    if not losses or losses[-1] is None:
        what = f"{run} has no validation loss, or its last one is not finite"
        raise UserError(DATA, what, "train it to its end, or leave it out")
    heads = 2 * m.d_head * (m.n_heads + m.n_kv_heads)
    return m.n_layers * m.d_model * (heads + 3 * m.d_ff), losses[-1]


def main(args: Args):
    sizes, losses = np.array([read_run(run) for run in args.runs]).T
    # A third number c, as in a * N^-b + c, made four points predict worse: LOG.md has the figures.
    slope, log_a = np.polyfit(np.log(sizes[:-1]), np.log(losses[:-1]), 1)
    law = np.exp(log_a) * sizes**slope
    print(f"loss = {np.exp(log_a):.3f} * N^{slope:.3f}")
    for n, loss, fitted in zip(sizes, losses, law, strict=True):
        print(f"N {n:9,.0f}  loss {loss:.4f}  by the fit {fitted:.4f}")
    error = law[-1] / losses[-1] - 1
    print(f"predicted {law[-1]:.4f}, measured {losses[-1]:.4f}: {error:+.2%}")

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    label = f"{np.exp(log_a):.2f} N$^{{{slope:.3f}}}$"
    axes.loglog(sizes, law, "--", color="gray", label=label)
    axes.loglog(sizes[:-1], losses[:-1], "o", color="C0", label="the runs that are fitted")
    axes.loglog(sizes[-1], law[-1], "x", color="C3", ms=11, label=f"predicted: {law[-1]:.3f}")
    axes.loglog(sizes[-1], losses[-1], "o", color="C2", label=f"measured: {losses[-1]:.3f}")
    axes.set(xlabel="N, parameters in the layers", ylabel="validation loss, nats per character")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    axes.legend()
    write_png(absolute_path(args.out), figure)


if __name__ == "__main__":
    cli.quit_on_error(main, cli.quit_on_error(parse))
