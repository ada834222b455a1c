"""Summary of a run, from its metrics.jsonl and samples.jsonl.

python scripts/report.py --run runs/demo
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from etils import epath

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checks import check_row
from cli import REMOTE_SECONDS, call_within, quit_on_error, read_args
from errors import DATA, USAGE, UserError
from files import absolute_path, exists


@dataclass(frozen=True)
class Args:
    run: str
    """A run directory, local or gs://."""


# Of the rows of metrics.jsonl: {kind: the fields that are read here and in compare.py}.
FIELDS = dict(
    train=("loss", "grad_norm", "tokens", "step_time", "tokens_per_sec"),
    eval=("loss", "tokens", "bits_per_byte"),
    tasks=(),
)


def read_rows(path: epath.Path, *fields: str) -> list[dict]:
    """The rows of a .jsonl file, without one at its end that is still being written, or that a kill
    left incomplete.  Raises UserError DATA for a row that lacks one of `fields`, or of FIELDS, or
    fails check_row."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    try:
        rows = [dict(json.loads(line)) for line in lines]
        for row in rows:
            check_row(row, *fields, *FIELDS.get(row.get("kind"), ()))
        return rows
    except (ValueError, TypeError, RecursionError) as e:
        what = f"{path} has a line that is not a row: {str(e)[:200]}"
        raise UserError(DATA, what, "delete that line") from None


def read_metrics(run: epath.Path) -> tuple[list[dict], list[dict], dict]:
    """The rows of a run's updates, of which there is at least one, and those of its evaluations;
    the newest scores of each name of eval.tasks, without those of its files.  Raises UserError
    USAGE and DATA; TimeoutError if storage does not answer in REMOTE_SECONDS."""
    if not call_within(REMOTE_SECONDS, lambda: exists(run / "config.json")):
        what = f"there is no run in {run}: it has no config.json"
        raise UserError(USAGE, what, "name the directory of a run")
    rows = read_rows(run / "metrics.jsonl", "step", "kind")
    train, evals, tasks = ([row for row in rows if row["kind"] == kind] for kind in FIELDS)
    if not train:
        what = f"{run} has no training rows in metrics.jsonl"
        raise UserError(DATA, what, "name a run directory that has trained")
    newest = tasks[-1] if tasks else {}
    scores = {k: x for k, x in newest.items() if k.count("/") == 1 and isinstance(x, float)}
    return train, evals, scores


def main():
    """Print where the run is, how long and how fast it trained, its last evaluation and sample."""
    run = absolute_path(read_args(Args, __doc__).run)
    train, evals, scores = read_metrics(run)
    samples = read_rows(run / "samples.jsonl", "step", "text")
    last, skipped = train[-1], sum(None in (row["loss"], row["grad_norm"]) for row in train)
    if n_spikes := sum(row.get("spike", 0) > 0 for row in train):
        skipped = f"{skipped} not finite and {n_spikes} spike(s)"
    rate = statistics.median(row["tokens_per_sec"] for row in train)
    print(f"run directory    {run} (loss.png, metrics.jsonl, checkpoints/)")
    amount = f"{last['step']:,} updates, {last['tokens']:,} tokens"
    print(f"trained          {amount}, {rate:,.0f} tokens/s, {skipped} skipped")
    for row in {row.get("set"): row for row in evals}.values():  # the last of each set
        loss, n_tokens, bits = (row[k] for k in ("loss", "tokens", "bits_per_byte"))
        name = f" of {row['set']}" if "set" in row else ""
        loss = "not finite" if loss is None else f"{loss:.4f} nats per token"
        print(f"validation loss  {loss}, over {n_tokens:,} tokens{name}")
        if bits is not None:
            print(f"bits per byte    {bits:.4f}")
    for name, score in scores.items():
        print(f"{name:16} {score:.4f}")
    if samples:
        print(f"sample after update {samples[-1]['step']}:\n{samples[-1]['text']}")


if __name__ == "__main__":
    quit_on_error(main)
