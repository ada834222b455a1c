"""Runs beside each other: their losses as a picture, and the settings in which they differ.

python scripts/compare.py runs/a runs/b --out compare.png
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from etils import epath

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
from errors import DATA, USAGE, UserError


@dataclass(frozen=True)
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, local or gs://."""
    out: str = "compare.png"
    """The picture to write."""


def parse() -> Args:
    return tyro.cli(Args, use_underscores=True, description=__doc__)


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS = cli.quit_on_error(parse)

import numpy as np

import model
from metrics import write_png
from rundir import record_facts
from scripts.report import read_rows


class Curves:
    """A run's losses, and what they had cost by then."""

    def __init__(self, run: str):
        path = epath.Path(run)
        self.name = path.name
        rows = read_rows(path / "metrics.jsonl")
        train = [row for row in rows if row["kind"] == "train"]
        if not train:
            what = f"{run} has no training rows in metrics.jsonl"
            raise UserError(DATA, what, "give run directories that have trained")
        self.facts = record_facts(json.loads((path / "config.json").read_text()))
        flops = model.flops_per_token(cli.parse(["--config", f"{run}/config.json"]))
        step, tokens, rate = (
            np.array([row[key] for row in train], float)
            for key in ("step", "tokens", "tokens_per_sec")
        )
        loss = np.array([row["loss"] for row in train], float)  # None, if not finite, is NaN
        # A branch begins with its parent's tokens, but took none of its time.
        seconds = np.cumsum(np.diff(tokens, prepend=tokens[0]) / rate)
        self.costs = {"tokens": tokens, "seconds": seconds, "FLOPs": tokens * flops}
        self.loss = smooth(loss)
        self.evals = {}  # {name of the set: (rows of self.costs, losses)}
        for name in {row.get("set", "") for row in rows if row["kind"] == "eval"}:
            found = {
                row["step"]: row["loss"]
                for row in rows
                if row["kind"] == "eval" and row.get("set", "") == name and row["step"] > 0
            }
            at = np.searchsorted(step, list(found)).clip(max=len(step) - 1)
            self.evals[name] = at, np.array([*found.values()], float)


def smooth(x):
    """The mean of each number and those before it, a fiftieth of all, without NaN."""
    n = 1 + len(x) // 50
    return np.array([np.nanmean(x[max(0, i - n) : i + 1]) for i in range(len(x))])


def draw(out: str, runs: list[Curves]):
    """Losses over tokens, seconds and FLOPs; validation as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    for axes, cost in zip(figure.subplots(1, 3, sharey=True), runs[0].costs, strict=True):
        for number, run in enumerate(runs):
            axes.plot(run.costs[cost], run.loss, lw=1, color=f"C{number}", label=run.name)
            for at, loss in run.evals.values():
                axes.plot(run.costs[cost][at], loss, "o", color=f"C{number}", ms=5)
        axes.set(xlabel=cost, title="lines: training, points: validation")
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.axes[0].set_ylabel("loss (nats per token)")
    write_png(epath.Path(out), figure)


def table(rows: list[list[str]]) -> str:
    """Rows of words as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def main(args: Args):
    """Print what the runs reached and how they differ, and draw their losses."""
    if len(args.runs) < 2:
        raise UserError(USAGE, f"{len(args.runs)} run(s) named, but 2 are needed", "name more")
    runs = [Curves(run) for run in args.runs]
    rows = [["", *(run.name for run in runs)]]
    rows += [[cost, *(f"{run.costs[cost][-1]:.4g}" for run in runs)] for cost in runs[0].costs]
    rows += [["training loss", *(f"{run.loss[-1]:.4f}" for run in runs)]]
    for name in sorted({name for run in runs for name in run.evals}):
        last = [run.evals[name][1][-1:] if name in run.evals else [] for run in runs]
        words = [f"{loss[0]:.4f}" if len(loss) else "-" for loss in last]
        rows += [[f"validation loss {name}".strip(), *words]]
    for name in dict.fromkeys(name for run in runs for name in run.facts):
        values = [json.dumps(run.facts.get(name)) for run in runs]
        if len(set(values)) > 1:
            rows += [[name, *values]]
    print(table(rows))
    draw(args.out, runs)
    print(f"-> {args.out}")


if __name__ == "__main__":
    cli.quit_on_error(main, ARGS)
