"""Text as rows of tokens, and the tasks of eval.tasks: questions from files in the form of DCLM's
CORE, whose answers the eval step scores.

A row is (ids, n): a sequence of tokens, and how many at its end are scored.

Dimension key: A accumulation steps, M microbatches, B sequences, L sequence length.
"""

import hashlib
import json
from contextlib import suppress
from itertools import product, takewhile

import fsspec
import jax
import numpy as np
from etils import epath

from config import END, Config
from errors import DATA, Problem, UserError, raise_problems
from files import absolute_path, read_limited
from model import token_spec
from parsers import read_tasks
from shards import n_ids, parse_tokenizer
from utils import put_on_mesh

# ---- text as rows of tokens


def load_tokenizer(path: epath.Path | None, cfg: Config, fix: str):
    """The tokenizer of a tokenizer.json.  Raises UserError DATA if there is none, with this fix,
    if it cannot be read, or if the model lacks some of its ids."""
    if path is None or not path.exists():
        absent = "tokenizer.json does not exist: the run's data had none"
        raise UserError(DATA, f"{path} does not exist" if path else absent, fix)
    try:
        tokenizer = parse_tokenizer(read_limited(path))
    except ValueError as e:
        what = f"{path} is not a tokenizer.json of the tokenizers library: {e}"
        raise UserError(DATA, what, fix) from None
    if (n := n_ids(tokenizer)) > cfg.model.vocab_size:
        what = f"the tokenizer has ids up to {n - 1}, the model vocab_size={cfg.model.vocab_size}"
        raise UserError(DATA, what, "give the tokenizer that the run's data was made with")
    return tokenizer


def find_end_id(tokenizer, cfg: Config) -> int | None:
    """The token that ends a document; None if it is not known."""
    return cfg.data.end_id if cfg.data.end_id >= 0 else tokenizer.token_to_id(END)


def encode(tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """The ids of a text, with the special tokens that the tokenizer puts before it, and without
    those that it puts after it, because the text goes on.  Raises ValueError for a character that
    it does not know."""
    try:
        found = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as e:  # tokenizers raises nothing narrower
        what = f"{text!r} has a character that the tokenizer does not know: {e}"
        raise ValueError(what) from None
    of_text = [n for n, is_added in enumerate(found.special_tokens_mask) if not is_added]
    return found.ids[: of_text[-1] + 1] if of_text else found.ids


def make_batch(rows: list[tuple], L: int, cfg: Config) -> list[jax.Array]:
    """`put_batch` of these rows.  Rows of more than L + 1 tokens lose the first ones."""
    tokens = np.zeros((len(rows), L), np.int32)
    targets = np.full_like(tokens, -1)
    for k, (ids, n_scored) in enumerate(rows):
        ids = ids[-(L + 1) :]
        last = len(ids) - 1
        tokens[k, :last] = ids[:-1]
        targets[k, last - n_scored : last] = ids[-n_scored:]
    return put_batch(tokens, targets, cfg)


def put_batch(tokens, targets, cfg: Config) -> list[jax.Array]:
    """[tokens_AMBL, targets_AMBL] on the mesh, of at most train.batch_size sequences; what is left
    of the batch has no targets."""
    t = cfg.train
    padding = (0, t.batch_size - len(tokens)), (0, 0)
    arrays = np.pad(tokens, padding), np.pad(targets, padding, constant_values=-1)
    shape = t.grad_accum, t.microbatches, -1, tokens.shape[1]
    return [put_on_mesh(x.reshape(shape), token_spec()) for x in arrays]


# ---- questions


def read_question(line: bytes) -> tuple[list[tuple[str, str]], int | None]:
    """([(query, answer)], number of the right one) of a line's choices.  With a single choice the
    number is None: the model is right if each of the answer's tokens is its most likely one.
    Raises ValueError."""
    try:
        x = {**json.loads(line)}
    except (TypeError, RecursionError):
        raise ValueError("it is not an object") from None
    for names in (("query", "context", "context_options"), ("choices", "context_options")):
        if len(found := [name for name in names if name in x]) > 1:
            raise ValueError(f"it has {' and '.join(found)}, but only one may be there")
    queries = x.get("context_options", [x.get("query", x.get("context"))])
    answers, gold = x.get("choices", [x.get("continuation")]), x.get("gold")
    are_lists = all(isinstance(texts, list) and texts for texts in (queries, answers))
    if not are_lists or not all(isinstance(x, str) for x in queries + answers) or "" in answers:
        raise ValueError("its query or its choices are missing, empty or not text")
    pairs = list(product(queries, answers))
    is_number = type(gold) is int and 0 <= gold < len(pairs)
    if not (is_number if len(pairs) > 1 else gold is None):
        what = f"gold={gold!r} must be the number, from 0, of one of several choices"
        raise ValueError(f"{what}, which are {len(pairs)} here")
    return pairs, gold


class Tasks:
    """The questions of eval.tasks, as batches for the eval step, and the scores of its answers.

    The answer is the choice with the highest mean log probability of its tokens, after the query
    and a space.  Raises UserError DATA with the first problem of each file.
    """

    FIX = "docs/evaluating.md has the form"

    def __init__(self, cfg: Config, tokenizer):
        self.cfg, self.tokenizer, self.rows = cfg, tokenizer, []
        self.questions = {}
        """{NAME/FILE: [(numbers of the choices' rows, right choice)]}"""
        problems, digest = [], hashlib.sha256()
        for name, pattern in read_tasks(cfg.eval.tasks).items():
            fs, path = fsspec.url_to_fs(absolute_path(pattern))
            files = []
            with suppress(FileNotFoundError):  # of a bucket that does not exist
                files += filter(fs.isfile, sorted(fs.glob(path)))
            if not files:
                what = f"eval.tasks: {name}={pattern} names no file"
                problems.append(Problem(what, f"correct the path; {self.FIX} of files"))
            for file in files:
                lines = fs.cat_file(file).splitlines()
                digest.update(b"".join(lines))
                problems += self.add_file(name, file, lines)
        raise_problems(DATA, problems)
        self.fingerprint = digest.hexdigest()
        self.n_batches = -(-len(self.rows) // cfg.train.batch_size)

    def add_file(self, name: str, file: str, lines: list[bytes]) -> list[Problem]:
        """Append the questions of a file, and a row for each of their choices.  Returns the file's
        first problem, if it has one."""
        task = f"{name}/{file.rpartition('/')[2].removesuffix('.jsonl')}"
        if task in self.questions:
            what = f"{file}: {name} has another file of this name"
            return [Problem(what, "rename it, or give it a NAME of its own")]
        try:
            for number, line in enumerate(lines, 1):  # noqa: B007
                if line.strip():
                    pairs, gold = read_question(line)
                    numbers = range(len(self.rows), len(self.rows) + len(pairs))
                    self.questions.setdefault(task, []).append((numbers, gold))
                    self.rows += [self.make_row(*pair) for pair in pairs]
        except ValueError as e:
            return [Problem(f"{file}, line {number}: {e}", self.FIX)]
        return [] if task in self.questions else [Problem(f"{file} has no questions", self.FIX)]

    def __str__(self):
        n_cut = sum(len(ids) > self.cfg.train.seq_len + 1 for ids, _ in self.rows)
        n, cut = len(self.rows), f"; of {n_cut:,} only the end fits train.seq_len"
        return f"{n:,} choices in {len(self.questions)} file(s){cut if n_cut else ''}"

    def make_row(self, query: str, answer: str) -> tuple[list[int], int]:
        """The row of a choice.  Its tokens are scored from the first one that differs from those of
        the query without the spaces at its end.  Raises ValueError."""
        before, L = query.rstrip(), self.cfg.train.seq_len
        space = query[len(before) :] or ("" if answer[:1].isspace() else " ")
        ids = encode(self.tokenizer, before + (space if before else "") + answer)
        pairs = zip(ids, encode(self.tokenizer, before), strict=False)
        n_same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if not 0 < len(ids) - n_same <= L:
            what = f"{answer[:40]!r} has {len(ids) - n_same} tokens"
            raise ValueError(f"{what}, and it needs 1 to train.seq_len={L}")
        start = [] if n_same else [find_end_id(self.tokenizer, self.cfg) or 0]
        return start + ids, len(ids) - n_same

    def batch(self, i: int) -> list[jax.Array]:
        n = self.cfg.train.batch_size
        return make_batch(self.rows[i * n : (i + 1) * n], self.cfg.train.seq_len, self.cfg)

    def scores(self, nll, is_top) -> dict[str, float]:
        """{"NAME/FILE/accuracy": number, "NAME/FILE/centred_accuracy": number}, and under "NAME/.."
        the means over its files.  Centred: 0 is chance, 1 is perfect.

        nll, is_top: for each row, its loss, and whether all of its tokens are the most likely ones.
        """
        found = {}
        for task, questions in self.questions.items():
            results = []
            for rows, gold in questions:
                best = np.argmin([nll[n] / self.rows[n][1] for n in rows])
                is_right = is_top[rows[0]] if gold is None else best == gold
                results.append((is_right, 0 if gold is None else 1 / len(rows)))
            accuracy, chance = np.mean(results, 0)
            found[task] = accuracy, (accuracy - chance) / (1 - chance)
        for name in read_tasks(self.cfg.eval.tasks):
            files = [pair for task, pair in found.items() if task.startswith(f"{name}/")]
            found[name] = np.mean(files, 0)
        return {
            f"{task}/{kind}": float(value)
            for task, pair in found.items()
            for kind, value in zip(("accuracy", "centred_accuracy"), pair, strict=True)
        }


def open_tasks(tokenizer, cfg: Config) -> Tasks:
    """The questions of eval.tasks.  tokenizer: the path of its tokenizer.json, or None."""
    fix = "prepare the data with scripts/prepare_data.py, or leave --eval.tasks out"
    return Tasks(cfg, load_tokenizer(tokenizer, cfg, fix))
