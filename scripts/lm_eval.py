"""EleutherAI's evaluation harness on a run, from any checkpoint and on any mesh.

    python scripts/lm_eval.py --run runs/demo --tasks hellaswag,arc_easy --json results.json

It needs the harness: pip install lm-eval==0.4.13
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Without this folder, whose lm_eval.py and evaluate.py would hide the packages of those names.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]

import cli
import config
import errors
import files


@dataclass(frozen=True)
class Args(cli.RunArgs):
    tasks: str
    """Names of the harness' tasks, groups or tags, with commas between them."""
    include_path: str | None = None
    """A folder with tasks of your own, as YAML files.  They may name code, which is run."""
    limit: float | None = None
    """The number of questions of each task to use, or their share if it is below 1."""
    num_fewshot: int | None = None
    """Examples before each question, for tasks that do not fix their number."""
    json: str = ""
    """A file to write the results to."""
    batch_size: int = 64
    """Sequences in a batch, rounded to what the mesh needs; changes no result but text that a task
    samples at a temperature."""
    seq_len: int = 0
    """Number of tokens that the model can look back on; 0 is the run's train.seq_len."""


def parse() -> tuple[Args, config.Config]:
    args = cli.read_args(Args, __doc__)
    if find_spec("lm_eval") is None:
        what = "the harness is not installed: Python has no package lm_eval"
        raise errors.UserError(errors.USAGE, what, "pip install lm-eval==0.4.13")
    cli.check_at_least(args, batch_size=1, num_fewshot=0, seq_len=0)
    if args.limit is not None and not args.limit > 0:
        what = f"limit={args.limit} must be above 0"
        raise errors.UserError(errors.USAGE, what, "set --limit 100, or leave it out")
    if args.include_path is not None and not Path(args.include_path).is_dir():
        what = f"--include_path {args.include_path} is not a folder"
        raise errors.UserError(errors.USAGE, what, "name the folder of your tasks")
    length = ["--train.seq_len", str(args.seq_len)] if args.seq_len else []
    return args, cli.config_of_run(args.run, args.mesh, *length, *args.flags)


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

from lm_eval import evaluator
from lm_eval import utils as harness
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

import generate
import processes
import runstate
import shards
import tasks
import train
import utils
from scripts.outputs import check_output

DRAW = dict(temperature=0, top_k=0, top_p=1)
"""The settings by which a task may have tokens drawn, with their defaults."""


class Run(TemplateLM):
    """A run's weights as a model of the harness.  All processes make the same calls, and get the
    same results."""

    def __init__(self, params, tokenizer, cfg: config.Config):
        super().__init__()
        self.params, self.tokenizer, self.cfg = params, tokenizer, cfg
        self.max_length, self.end_id = cfg.train.seq_len, tasks.find_end_id(tokenizer, cfg)

    @property
    def eot_token_id(self) -> int:
        return self.end_id or 0

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without context is conditioned on."""
        return [*self.tokenizer.encode("").ids, self.eot_token_id][0]

    def tok_encode(self, string, add_special_tokens=None, **_) -> list[int]:
        if add_special_tokens is None:  # a chat template may have put the first token there already
            start = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not (start and string.startswith(start))
        try:
            return tasks.encode(self.tokenizer, string, add_special_tokens)
        except ValueError as e:
            fix = "choose tasks of the characters that the run was trained on"
            raise errors.UserError(errors.DATA, f"the text {e}", fix) from None

    def batches(self, requests, order, **group) -> tuple[Collator, Iterable]:
        """The harness' Collator of these requests, and its batches, with a progress bar.  Raises
        UserError USAGE if another process has other requests: each computes a part of a batch."""
        asked = hashlib.sha256(repr(requests).encode()).hexdigest()[:12]
        fix = "give all processes the same --tasks, --limit, --include_path and tokenizer"
        processes.refuse_differences({"what the harness asks": asked}, fix)
        collator = Collator(requests, sort_fn=order, **group)
        return collator, train.progress([*collator.get_batched(n=self.cfg.train.batch_size)])

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        # For a context of spaces the harness passes no tokens: it moves the spaces into the answer.
        start = [self.prefix_token_id]
        rows = [((context or start) + answer, len(answer)) for _, context, answer in requests]
        if wrong := [n for _, n in rows if not 0 < n <= self.max_length]:
            limit = f"train.seq_len={self.max_length}"
            what = f"an answer has {wrong[0]} tokens, and it needs 1 to {limit}"
            fix = "leave the task out" + (", or set --seq_len" if max(wrong) else "")
            raise errors.UserError(errors.DATA, what, fix)
        collator, batches = self.batches(rows, lambda row: -len(row[0]))
        found, tp = [], self.cfg.mesh.tp
        for rows in batches:
            # Powers of two times tp, so that few programs are compiled.
            n = max(32, *(len(ids) - 1 for ids, _ in rows))
            length = min(self.max_length, tp << (-(-n // tp) - 1).bit_length())
            batch = tasks.make_batch(rows, length, self.cfg)
            nll, is_top = train.score_rows(self.params, *batch, self.cfg)
            found += [*zip((-nll).tolist(), is_top.tolist(), strict=True)][: len(rows)]
        return collator.get_original(found)

    def loglikelihood_rolling(self, requests, **_) -> list[float]:
        sizes = dict(prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
        windows, ends = [], []
        for request in requests:
            pairs = harness.get_rolling_token_windows(self.tok_encode(request.args[0]), **sizes)
            windows += [(None, *harness.make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        logprobs = [x for x, _ in self._loglikelihood_tokens(windows)]
        return [sum(logprobs[a:b]) for a, b in pairwise([0, *ends])]

    def generate_until(self, requests, **_) -> list[str]:
        pairs = [request.args for request in requests]
        settings = [normalize_gen_kwargs(s) for _, s in pairs]
        known = {*DRAW, "until", "max_gen_toks", "do_sample"}
        for name, x in (pair for s in settings for pair in s.items()):
            # With these values most settings are off, as with num_beams=1.
            if name not in known and x not in (None, False, 0, 1):
                what = f"a task asks for texts with {name}={x}, which this script cannot make"
                raise errors.UserError(errors.DATA, what, "leave the task out")
        most = max((s["max_gen_toks"] for s in settings), default=0)
        if most >= self.max_length:  # the harness' own backend refuses it too
            what = f"a task asks for {most} tokens, which must be fewer than"
            what += f" train.seq_len={self.max_length}"
            fix = f"leave the task out, or set --seq_len to more than {most}"
            raise errors.UserError(errors.DATA, what, fix)
        collator, batches = self.batches(pairs, lambda x: -len(x[0]), group_by="gen_kwargs")
        # Each batch has a seed of its own: a task may ask for many samples of one prompt.
        found = [text for n, batch in enumerate(batches) for text in self.complete(batch, n)]
        return collator.get_original(found)

    def complete(self, requests: list[tuple[str, dict]], seed: int = 0) -> list[str]:
        """The continuations of a batch's prompts, which all have the same settings."""
        s = normalize_gen_kwargs(requests[0][1])
        room = self.max_length - s["max_gen_toks"]
        prompts = [self.tok_encode(x)[-room:] or [self.prefix_token_id] for x, _ in requests]

        def added_text(k: int, row: list[int]) -> str:
            return self.tokenizer.decode(row[len(prompts[k]) :])

        ends = dict(stop_id=self.end_id, stops=s["until"], added_text=added_text)
        draw = {name: s.get(name, x) for name, x in DRAW.items()}
        draw |= dict(vocab_size=shards.n_ids(self.tokenizer), seed=seed)
        args = self.params, prompts, s["max_gen_toks"], self.cfg
        *_, rows = [prompts, *generate.generate(*args, **ends, **draw)]  # max_gen_toks may be 0
        texts = [added_text(k, row) for k, row in enumerate(rows)]
        return [postprocess_generated_text(text, s["until"], None) for text in texts]


def main(args: Args, cfg: config.Config):
    """Run the harness, print its table, and write --json."""
    cfg = utils.start_mesh(cfg, rows=args.batch_size)
    utils.run_on_lead(check_output, "json", args.json)
    manager = TaskManager(include_path=args.include_path)
    names = [name.strip() for name in args.tasks.split(",")]
    if unknown := [name for name in names if name not in manager.task_index]:
        what = f"the harness knows no task {errors.or_list(map(repr, unknown))}"
        fix = "name one of `python -m lm_eval ls tasks`, or give your folder as --include_path"
        raise errors.UserError(errors.USAGE, what, fix)
    run = files.absolute_path(args.run)
    path, fix = run / "tokenizer.json", "copy the model's there"
    tokenizer = utils.run_on_each(tasks.load_tokenizer, path, cfg, fix)
    lm = Run(runstate.load_params(run, cfg, args.step, args.weights), tokenizer, cfg)
    options = dict(num_fewshot=args.num_fewshot, limit=args.limit, log_samples=False)
    try:
        results = evaluator.simple_evaluate(lm, tasks=names, task_manager=manager, **options)
    except ValueError as e:
        if not args.num_fewshot or "larger than population" not in str(e):
            raise
        what = f"--num_fewshot {args.num_fewshot} is more than the examples that a task has"
        raise errors.UserError(errors.USAGE, what, "set a lower one, or leave it out") from None
    except OSError as e:
        # Without a number it is of the library that loads the questions: our own data and
        # checkpoints have been read before.
        if e.errno:
            raise
        what = f"the questions of {args.tasks} cannot be loaded: {errors.describe(e)}"
        fix = "connect this machine to the network, or correct the path in the task's file"
        raise errors.UserError(errors.DATA, what, fix) from None
    if not utils.is_lead():
        return
    results["config"] |= vars(args) | dict(model="trifold", dtype=cfg.train.dtype)
    print(harness.make_table(results))
    if results.get("groups"):
        print(harness.make_table(results, "groups"))
    if args.json:
        text = json.dumps(results, indent=1, default=harness.handle_non_serializable)
        files.write_whole(files.absolute_path(args.json), text)


if __name__ == "__main__":
    processes.run_main(main, ARGS, CFG)
