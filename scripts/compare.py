"""Compare runs: a plot of their losses, and a table of the settings in which they differ.

python scripts/compare.py runs/a runs/b --out compare.png
"""

import json
import sys
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import tyro
from etils import epath

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
from errors import USAGE, UserError


@dataclass(frozen=True)
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, local or gs://."""
    out: str = "compare.png"
    """The picture to write."""


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS = cli.quit_on_error(cli.read_args, Args, __doc__)

import numpy as np

import model
from panels import write_png
from rundir import read_record, record_facts
from scripts.outputs import check_output
from scripts.report import read_metrics


class Curves:
    """The losses of a run, over three costs: tokens, including those of a run that it goes on from
    with its state, and the seconds and FLOPs of its own updates."""

    def __init__(self, run: str):
        self.name, path = run, epath.Path(run)
        # matplotlib leaves out what begins with _, and reads $ as mathematics.
        self.label = (f"./{run}" if run.startswith("_") else run).replace("$", r"\$")
        train, evals, self.scores = read_metrics(path)
        cfg = cli.parse(["--config", f"{run}/config.json"])  # raises UserError for a damaged one
        record = read_record(path)
        self.facts = record_facts(record)
        if parent := record.get("parent"):
            self.facts["run.start_from"] = f"{parent['path']}@{parent['step']}"
            self.facts["run.start_with"] = parent.get("start_with")  # an average has none
        step, tokens, seconds, rate, self.loss = (
            np.array([row[name] for row in train], float)  # a null is NaN
            for name in ("step", "tokens", "step_time", "tokens_per_sec", "loss")
        )
        own = tokens - tokens[0] + seconds[0] * rate[0]
        flops = own * model.flops_per_token(cfg)
        self.costs = {"tokens": tokens, "seconds": np.cumsum(seconds), "FLOPs": flops}
        self.evals = {}  # {name of the set: {row of self.costs: loss}}
        self.bits = {row.get("set", ""): row["bits_per_byte"] for row in evals}  # the last ones
        newest = {row.get("set", ""): row.get("data") for row in evals}
        for row in evals:
            name = row.get("set", "")
            if row.get("data", newest[name]) == newest[name]:  # not of earlier validation data
                at = min(np.searchsorted(step, row["step"]), len(step) - 1)
                loss = np.nan if row["loss"] is None else row["loss"]
                self.evals.setdefault(name, {})[at] = loss


def smooth(x, n: int):
    """The moving mean of n + 1 numbers, without those that are NaN."""
    ends = np.arange(len(x)) + 1
    begins = np.maximum(ends - n - 1, 0)
    # Differences of running sums, because n grows with the run: with a sum for each point, two
    # runs of 300,000 updates together took 28 s instead of 7.
    sums, counts = (np.append(0.0, y.cumsum()) for y in (np.nan_to_num(x), ~np.isnan(x)))
    with np.errstate(invalid="ignore"):  # 0 / 0
        return (sums[ends] - sums[begins]) / (counts[ends] - counts[begins])


def draw(out: str, runs: list[Curves], sets: list[str], n: int):
    """Losses over tokens, seconds and FLOPs; validation as points, a shape for each set."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    height, shapes = max(4.5, 0.2 * (len(runs) + len(sets))), [*zip(cycle("osD^v*"), sets)]
    figure = Figure(figsize=(18, height), layout="constrained")
    for axes, cost in zip(figure.subplots(1, 3, sharey=True), runs[0].costs, strict=True):
        for number, run in enumerate(runs):
            x, is_few = run.costs[cost], len(runs) <= 10  # matplotlib has ten colours of its own
            color = f"C{number}" if is_few else colormaps["turbo"](number / len(runs))
            axes.plot(x, smooth(run.loss, n), lw=1, label=run.label, color=color)
            for shape, name in shapes:
                found = run.evals.get(name, {})
                axes.plot(x[[*found]], [*found.values()], shape, ms=5, color=color)
        axes.set(xlabel=cost)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))
        axes.grid(alpha=0.3)
    for shape, name in shapes:
        axes.plot([], [], shape, color="gray", label=f"validation {name}".strip())
    figure.axes[0].set_ylabel("loss (nats per token)")
    # Beside the plots, because that of many runs would hide the curves.
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", fontsize="small")
    write_png(epath.Path(out), figure)


def cells(numbers) -> list[str]:
    """Each number with four decimals; - for None."""
    return ["-" if x is None else f"{x:.4f}" for x in numbers]


def table(rows: list[list[str]]) -> str:
    """Rows of words as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def main(args: Args):
    """Draw the runs' losses, and print what they reached and how they differ."""
    if len(args.runs) < 2:
        raise UserError(USAGE, f"{len(args.runs)} run(s) named, but 2 are needed", "name more")
    check_output("out", args.out)
    runs = [Curves(run) for run in args.runs]
    sets = sorted({name for run in runs for name in run.evals})
    lengths = [len(run.loss) for run in runs]
    draw(args.out, runs, sets, max(lengths) // 50)  # a point of a curve is a mean of n + 1 updates
    rows = [["", *(run.name for run in runs)]]
    rows += [[cost, *(f"{run.costs[cost][-1]:.4g}" for run in runs)] for cost in runs[0].costs]
    n = min(lengths) // 50  # so that no run shows its first updates
    what = f"training loss of {n + 1} updates" if n else "training loss"
    rows += [[what, *cells(smooth(run.loss, n)[-1] for run in runs)]]
    for name in sets:
        last = [next(reversed(run.evals.get(name, {}).values()), None) for run in runs]
        rows += [[f"validation loss {name}".strip(), *cells(last)]]
        rows += [[f"bits per byte {name}".strip(), *cells(run.bits.get(name) for run in runs)]]
    for name in dict.fromkeys(name for run in runs for name in run.scores):
        rows += [[name, *cells(run.scores.get(name) for run in runs)]]
    for name in dict.fromkeys(name for run in runs for name in run.facts):
        values = [json.dumps(run.facts.get(name)) for run in runs]
        if len(set(values)) > 1:
            rows += [[name, *values]]
    print(table(rows))
    print(f"-> {args.out}")


if __name__ == "__main__":
    cli.quit_on_error(main, ARGS)
