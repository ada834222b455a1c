"""Show the batch of an update: source, shard, documents and text of each row, and with --loss the
loss of each token.

    python scripts/batch.py --run runs/demo --step 120 --loss --html batch.html

The batch is computed again from the run's config.json and its data; nothing about it was stored.
"""

import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import config
import errors
import files


@dataclass(frozen=True)
class Args:
    run: str
    """A run directory, local or gs://."""
    step: int
    """The update, counted from 1."""
    row: int = -1
    """Only this row of the batch, counted from 0; -1 shows all."""
    loss: config.Flag = False
    """Also show each token's loss, with the newest checkpoint from before the update.
    Where there is none, with the oldest after it."""
    html: str = ""
    """A page to write, with the text coloured by its loss."""
    mesh: config.YesNo[config.Mesh] = config.Mesh()


def parse() -> tuple[Args, config.Config, config.Config]:
    """(args, cfg to compute losses with, the run's own for its data)."""
    args = cli.read_args(Args, __doc__)
    file = f"{args.run.rstrip('/')}/config.json"
    cfg = cli.config_of_run(args.run, args.mesh)
    data_cfg = cli.parse(["--config", file, "--data.epochs_max=0"])
    cli.check_at_least(args, row=-1)
    # The updates before belong to the parent, which made them with its own data.
    parent = json.loads(files.absolute_path(file).read_text()).get("parent", {})
    first = parent["step"] + 1 if parent.get("start_with") == "state" else 1
    if not first <= args.step <= cfg.train.steps:
        what = f"step={args.step} must be between {first} and {cfg.train.steps} in this run"
        fix = "set --step inside that range"
        fix += f", or --run {parent['path']} for the updates before" if first > 1 else ""
        raise errors.UserError(errors.USAGE, what, fix)
    return args, cfg, data_cfg


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG, DATA_CFG = cli.quit_on_error(parse)

import numpy as np

import processes
import rowfile
import rundir
import runstate
import train
import utils
from dataset import Dataset, TokenFiles, parts_of
from order import stream_index
from scripts.outputs import check_output
from tasks import load_tokenizer, put_batch


def describe_row(source, window: int, cfg) -> list[str]:
    """Where a window comes from: a line for each shard, with the documents that begin there."""
    if not isinstance(source, TokenFiles):
        return [f"window {window:,} of {source}"]
    L, lines = cfg.train.seq_len, []
    end_id = cfg.data.end_id if cfg.data.end_id >= 0 else source.end_id
    start = window * L
    for n, a, b in source.spans(start, min(start + L + 1, source.n_tokens)):
        shard, first = source.shards[n], source.starts[n]
        tokens = source.read(first + a, first + b)
        starts = [f"{a + int(i) + 1:,}" for i in np.flatnonzero(tokens[:-1] == end_id)]
        line = f"{shard.path.name} tokens {a:,} to {b - 1:,}"
        if end_id >= 0 and files.is_remote(shard.path):
            line += " in a document without a number: counting would fetch all before it"
        elif end_id >= 0:
            line += f" in document {count_documents(source, end_id, first, first + a):,}"
        lines.append(line + (f"; others begin at {', '.join(starts)}" if starts else ""))
    return lines


def count_documents(source: TokenFiles, end_id: int, start: int, stop: int) -> int:
    """How many documents end from token `start` to token `stop`, which is the number of the
    document that token `stop` is in if document 0 begins at `start`."""
    at = range(start, stop, 2**24)
    return sum(int((source.read(a, min(a + 2**24, stop)) == end_id).sum()) for a in at)


IN_BATCH = ("data.", "model.", "run.seed", "train.batch_size", "train.seq_len")
"""Settings that a batch or its losses depend on."""
FOR_LATER = ("data.skip", "data.stages")
"""Settings that may change only for updates still to come, see rundir.check_past."""


def open_data(args: Args, cfg: config.Config, run) -> Dataset:
    """The training set that config.json names.  Raises UserError DATA if it is gone or has changed;
    warns if settings have changed since the update, because the batch is made by the new ones."""
    fix = "start this script in the folder in which train.py was started, or put the data, or a "
    fix += "link to them, back there"
    trained_on = rundir.read_record(run).get("data_fingerprint")
    if not trained_on:
        raise errors.UserError(errors.DATA, f"{run} has made no update", "train it with train.py")
    try:
        data = Dataset(cfg, "train")
    except errors.UserError as e:
        raise errors.UserError(e.code, e.problems[0].what, fix) from None
    if trained_on != data.source.fingerprint:
        what = f"data.train={cfg.data.train} are not the data that {run} was trained on"
        raise errors.UserError(errors.DATA, what, fix)
    for start in rundir.read_history(run):
        found = start.get("changes", {}).get("changes the training", {})
        # With a ramp train.batch_size is its last size.
        later = (*FOR_LATER, *(["train.batch_size"] if "train.batch_ramp" in found else []))
        changed = ", ".join(x for x in found if x.startswith(IN_BATCH) and x not in later)
        if start.get("step", 0) >= args.step and changed:
            utils.warn(f"{changed} changed after update {args.step}: the new values are used")
    return data


class Row(NamedTuple):
    """One sequence of the batch."""

    title: str
    places: list[str]
    """Lines of describe_row."""
    tokens: list[int]
    scored: np.ndarray
    """Whether each token after the first is scored."""
    nll: np.ndarray | None
    """The losses of these tokens; None without --loss and --html."""

    def mean(self) -> str:
        return f"{self.nll[self.scored].mean():.4f}" if self.scored.any() else "-"


def token_nlls(params, tokens_BL, targets_BL, cfg: config.Config) -> np.ndarray:
    """nll_BL of these rows, computed in batches of the eval step."""
    n, found = cfg.train.batch_size, []
    for i in range(0, len(tokens_BL), n):
        batch = put_batch(tokens_BL[i : i + n], targets_BL[i : i + n], cfg)
        _, _, nll_AMBL, _ = train.eval_step(params, *batch, cfg)
        found.append(utils.host_rows(nll_AMBL))
    return np.concatenate(found)[: len(tokens_BL)]


def last_update(run) -> int:
    """The newest update that metrics.jsonl has; 0 without one."""
    rows = map(json.loads, rowfile.read_lines(run / "metrics.jsonl"))
    return max((row["step"] for row in rows if row.get("kind") == "train"), default=0)


def read_rows(args: Args, cfg: config.Config, data_cfg: config.Config) -> list[Row]:
    run = files.absolute_path(args.run)
    data = open_data(args, data_cfg, run)
    sources, epochs, windows = data.order.batch(args.step - 1)
    utils.say(f"update {args.step} of {args.run}: {len(windows)} rows of {cfg.train.seq_len}")
    if (made := last_update(run)) < args.step:
        utils.say(f"it has not been made yet: the run has made {made}")
    if (number := stream_index(args.step - 1, data.order.skip) + 1) != args.step:
        what = f"data.skip also counts the updates left out before, so there it is {number}"
        utils.say(f"{what}: --data.skip {cfg.data.skip},{number} leaves it out too")
    if args.row >= len(windows):
        what = f"row={args.row} must be between -1 and {len(windows) - 1} in this update"
        raise errors.UserError(errors.USAGE, what, "set --row inside that range")
    chosen = np.arange(len(windows)) if args.row < 0 else np.array([args.row])
    numbers = data.batch_windows(args.step - 1)[chosen]
    tokens, targets = data.read_windows(numbers)
    whole = data.source.windows(numbers)  # a last token that is not scored is only in these
    nll = [None] * len(chosen)
    if args.loss or args.html:
        saved = files.saved_steps(run)
        step = max((n for n in saved if n < args.step), default=min(saved, default=-1))
        params = runstate.load_params(run, cfg, step)  # raises if there is none
        utils.say(f"losses by the weights after update {step}", file=sys.stderr)
        nll = token_nlls(params, tokens, targets, cfg)
    rows = []
    for n, k in enumerate(chosen):
        name = data.order.names[sources[k]]
        source = parts_of(data.source)[name]
        title = f"row {k}: {name or 'data.train'}, epoch {epochs[k] + 1}, window {windows[k]:,}"
        places = describe_row(source, int(windows[k]), data.cfg)
        rows.append(Row(title, places, whole[n].tolist(), targets[n] >= 0, nll[n]))
    return rows


def print_row(row: Row, decode):
    utils.say(f"\n{row.title}")
    for place in row.places:
        utils.say(f"  {place}")
    if row.nll is not None:
        utils.say(f"  loss {row.mean()}; of each token after the first, the worst with a *:")
        utils.say("\n".join(f"  {line}" for line in token_losses(row, decode)))
    utils.say(f"  {decode(row.tokens)!r}")


def token_losses(row: Row, decode) -> list[str]:
    """Lines of words "2.31 'a'", one for each token after the first, or "- 'a'" where it is not
    scored.  The five with the highest losses begin with a *."""
    worst, words = np.argsort(-np.where(row.scored, row.nll, -1))[:5], []
    for i, token in enumerate(row.tokens[1:]):
        mark = "*" if row.scored[i] and i in worst else " "
        words.append(f"{mark}{f'{row.nll[i]:.2f}' if row.scored[i] else '-'} {decode([token])!r} ")
    return ["".join(f"{x:14}" for x in words[i : i + 7]).rstrip() for i in range(0, len(words), 7)]


STYLE = """body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
pre { white-space: pre-wrap; background: #fafafa; padding: 1em; border: 1px solid #ddd }
h2 { font-size: 1em } .masked { color: #aaa }"""


def whole_characters(ids: list[int], decode) -> list[tuple[int, int, str]]:
    """(first, stop, text) of the tokens after the first in their order: each alone, or together
    where a character of UTF-8, which has up to four bytes, is cut between them."""
    found, before, first = [], 0, 1
    for stop in range(2, len(ids) + 1):
        # After those before it, because tokenizers in the style of Llama's strip a first space.
        text = decode(ids[before:stop])[len(decode(ids[before:first])) :]
        if not text.endswith("\ufffd") or stop - first == 4 or stop == len(ids):
            found.append((first, stop, text))
            before, first = first, stop
    return found


def to_html(args: Args, rows: list[Row], decode) -> str:
    """The rows as HTML: the background of a token is as red as its loss is high, up to 10 nats."""
    title = html.escape(f"update {args.step} of {args.run}")
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"]
    parts.append(f"<h1>{title}</h1>")
    for row in rows:
        places = html.escape("; ".join(row.places))
        heading = f"{html.escape(row.title)}, loss {row.mean()}"
        parts.append(f"<h2>{heading}</h2><p>{places}</p><pre>")
        parts.append(html.escape(decode(row.tokens[:1])))
        for first, stop, text in whole_characters(row.tokens, decode):
            nll = row.nll[first - 1 : stop - 1][row.scored[first - 1 : stop - 1]]
            red = f"rgba(220,40,30,{min(1, float(max(nll, default=0)) / 10):.2f})"
            losses = " ".join(f"{x:.2f}" for x in nll)
            facts = f'title="{losses}" style="background: {red}"' if losses else 'class="masked"'
            parts.append(f"<span {facts}>{html.escape(text)}</span>")
        parts.append("</pre>")
    return "".join(parts)


def main(args: Args, data_cfg: config.Config, cfg: config.Config):
    """Print the rows of the update, and write --html."""
    utils.run_on_lead(check_output, "html", args.html)
    cfg = utils.start_mesh(cfg, rows=8 if args.row < 0 else 1)
    path = files.absolute_path(args.run) / "tokenizer.json"
    fix = "copy the tokenizer of the run's data there"
    tokenizer = load_tokenizer(path, cfg, fix) if path.exists() else None
    rows = read_rows(args, cfg, data_cfg)

    def decode(ids: list[int]) -> str:
        if tokenizer is None:
            return " ".join(map(str, ids))
        return tokenizer.decode(ids, skip_special_tokens=False)

    for row in rows:
        print_row(row, decode)
    if args.html and utils.is_lead():
        space = "" if tokenizer else " "
        page = to_html(args, rows, lambda ids: decode(ids) + space)
        files.write_whole(files.absolute_path(args.html), page)


if __name__ == "__main__":
    processes.run_main(main, ARGS, DATA_CFG, CFG)
