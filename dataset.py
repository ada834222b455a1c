"""Data: sources of tokens, and the batch of step s on the mesh.  The batch is a pure function of
(data, seed, s).

order.py decides which window each row is; shards.py and pages.py read files of tokens.  To add a
source of tokens, write a subclass of Source and enter it in SOURCES.

Dimension key: A accumulation steps, M microbatches, B sequences, L sequence length.
"""

import hashlib
import json
import operator
import sys
from bisect import bisect_right
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

import shards
from config import Config
from errors import DATA, Problem, UserError, first_ten, raise_problems
from files import absolute_path, exists, thread_map
from model import token_spec
from order import Order, scramble
from pages import Block, DamagedPage, PageReader
from parsers import Part, read_sets
from processes import REQUEST_DELAY
from utils import warn

# ---- sources: from the number of a window to its tokens


class Source:
    """A set of tokens, made from (cfg, split) with split "train" or "val".

    A subclass sets n_tokens and fingerprint, and defines windows(numbers), which must always give
    the same tokens for the same numbers: other processes and resumed runs rely on it.  The rest has
    defaults.  Its constructor raises UserError DATA if it cannot be used.
    """

    n_tokens: int
    """Tokens of the whole set; n_windows * seq_len + 1 where windows are separate sequences."""
    fingerprint: str
    """A hash that changes with the tokens: a run resumes only on the data that it began with."""
    vocab_size = 0
    """Token ids of the tokenizer; 0 where unknown."""
    end_id = -1
    """The token that ends a document; -1 where unknown."""
    bytes_per_token: float | None = None
    """Mean bytes of text in a token, for bits per byte."""
    tokenizer: epath.Path | None = None
    """The tokenizer.json, for samples; it is copied into the run directory."""

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        """int32 [len(numbers), seq_len + 1]: these windows, with -1 after the last token.  In a
        text, window n begins at token n * seq_len."""
        raise NotImplementedError

    def scored(self, numbers: np.ndarray) -> np.ndarray | None:
        """bool [len(numbers), seq_len + 1], whether each token of the windows counts in the loss as
        a target; None where all do."""
        return None

    def __str__(self):
        return f"{self.n_tokens:,} tokens"

    def decode(self, ids: list[int]) -> str:
        try:
            return shards.parse_tokenizer(shards.tokenizer_text(self.tokenizer)).decode(ids)
        except ValueError as e:
            raise UserError(DATA, f"{self.tokenizer} is damaged: {e}", shards.COPY_AGAIN) from None


class TokenFiles(Source):
    """The shards of a local or remote path, read as one long array."""

    def __init__(self, cfg: Config, split: str):
        path = absolute_path(getattr(cfg.data, split))
        self.shards, manifest = token_set = shards.find_shards(path, split)
        self.masks = [shard.mask for shard in self.shards]
        if manifest.get("digest") not in (None, shards.manifest_digest(manifest)):
            what = f"{path}/manifest.json is not as it was written: copy the data set again, or if"
            warn(f"{what} you have edited it, delete its field digest")
        self.cfg, self.fingerprint = cfg, shards.fingerprint(token_set)
        self.pages = PageReader(self.shards, cfg)
        # The index in the whole set of each shard's first token, and at last n_tokens.
        self.starts = [0, *accumulate(shard.n_tokens for shard in self.shards)]
        self.n_tokens = self.starts[-1]
        self.vocab_size = manifest.get("vocab_size", 0)
        self.end_id = manifest.get("eot_id", -1)
        if manifest and not any(self.masks):
            self.bytes_per_token = manifest["bytes"] / self.n_tokens
        tokenizer = path / "tokenizer.json"
        shards.check_is_part(tokenizer)
        self.tokenizer = tokenizer if exists(tokenizer) else None
        self.is_incomplete = "tokenizer" in manifest and self.tokenizer is None

    def __str__(self):
        more = ", masked" if any(self.masks) else ""
        more += ", without the tokenizer.json of its manifest" if self.is_incomplete else ""
        return f"{super().__str__()} in {len(self.shards)} shard(s){more}"

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        L = self.cfg.train.seq_len
        return self.cut(numbers * L, L + 1, self.shards)

    def scored(self, numbers: np.ndarray) -> np.ndarray | None:
        if not any(self.masks):
            return None
        L = self.cfg.train.seq_len
        return self.cut(numbers * L, L + 1, self.masks) != 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop - 1 as int32."""
        return self.cut(np.array([start]), stop - start, self.shards)[0]

    def cut(self, starts: np.ndarray, length: int, files: list) -> np.ndarray:
        """int32 [len(starts), length]: the tokens of the files, self.shards or self.masks, from
        each start on.  Places after the last token are -1; in masks they are 1, and so are those
        of a shard without a mask.

        A window may lie in several shards.  Each piece is (place, n, first, end): tokens first to
        end - 1 of file n are copied to that place in the window."""
        fill = -1 if files is self.shards else 1
        windows = np.full((len(starts), length), fill, np.int32)
        pieces = []
        for window, at in zip(windows, starts.tolist(), strict=True):
            for n, first, end in self.spans(at, min(at + length, self.n_tokens)):
                if files[n] is not None:
                    begin = first + self.starts[n] - at
                    pieces.append((window[begin : begin + end - first], n, first, end))
        found = self.pages.read([(files[n], first, end) for _, n, first, end in pieces])
        for (place, n, first, _), tokens in zip(pieces, found, strict=True):
            if files is self.shards:
                self.check_tokens(tokens, n, first)
            place[:] = tokens
        return windows

    def spans(self, start: int, stop: int):
        """(n, first, end) of each shard that has some of the set's tokens start to stop - 1: they
        are tokens first to end - 1 of shard n."""
        while start < stop:
            n = bisect_right(self.starts, start) - 1
            end = min(stop, self.starts[n + 1])
            yield n, start - self.starts[n], end - self.starts[n]
            start = end

    def windows_of(self, block: Block) -> range:
        """The windows that have tokens of this page of a shard or mask; none if it is of another
        file."""
        L = self.cfg.train.seq_len
        for n, file in [*enumerate(self.shards), *enumerate(self.masks)]:
            if file and file.path == block.path:
                ends = block.start, block.stop - 1  # a token may go on in the next page
                places = ((at - file.offset) // file.itemsize for at in ends)
                first, last = (self.starts[n] + max(0, place) for place in places)
                # Window w has tokens w * L to w * L + L.
                return range(max(0, (first - 1) // L), last // L + 1)
        return range(0)

    def check_tokens(self, piece: np.ndarray, n: int, first: int):
        """Raise the UserError that names the first token of a piece that is not below
        model.vocab_size; the piece begins at index `first` of shard n."""
        limit = self.cfg.model.vocab_size
        if piece.max() < limit and piece.min() >= 0:
            return
        i = int(np.argmax((piece >= limit) | (piece < 0)))
        what = f"token id {piece[i]} at index {first + i} is not below model.vocab_size={limit}"
        fix = "make the shards again with the right tokenizer"
        if piece.min() >= 0:
            fix += f", or set --model.vocab_size {int(piece.max()) + 1} or more"
        raise shards.shard_error(self.shards[n].path, what, fix)


SUCCESSORS = 4
"""Tokens that may follow a token of the synthetic set."""
SYNTHETIC_WINDOWS = dict(train=2**32, val=256)


class Synthetic(Source):
    """Random tokens with structure, which need no files: for benchmarks and first tries.

    Each token has SUCCESSORS successors, the same in every set; one of them is drawn to follow it.
    So the best model's loss is log(SUCCESSORS), 1.386 nats, or a little less where some of a
    token's successors are the same.
    """

    def __init__(self, cfg: Config, split: str):
        if (path := getattr(cfg.data, split)) != "synthetic":
            raise UserError(DATA, f"{path} is not a data set", "give synthetic, without a suffix")
        self.cfg = cfg
        self.fingerprint = f"synthetic {split} {cfg.model.vocab_size}"
        self.n_tokens = SYNTHETIC_WINDOWS[split] * cfg.train.seq_len + 1
        # The sets have no common window.
        self.first = 0 if split == "val" else SYNTHETIC_WINDOWS["val"]

    def __str__(self):
        return f"{super().__str__()}, synthetic"

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        V, L = self.cfg.model.vocab_size, self.cfg.train.seq_len
        place = (numbers[:, None] + self.first) * (L + 1) + np.arange(L + 1)
        draw = scramble(scramble(place.astype(np.uint64)) + np.uint64(self.cfg.run.seed))
        tokens = np.empty(draw.shape, np.int32)
        tokens[:, 0] = draw[:, 0] % np.uint64(V)
        choice = draw % np.uint64(SUCCESSORS)
        for i in range(L):
            edge = tokens[:, i].astype(np.uint64) * np.uint64(SUCCESSORS) + choice[:, i + 1]
            tokens[:, i + 1] = scramble(edge) % np.uint64(V)
        return tokens


# {name: class}: a --data.train or --data.val that is such a name, or begins with it and a colon,
# makes that Source; any other is a path and makes TokenFiles.
SOURCES = {"synthetic": Synthetic}


def open_source(cfg: Config, split: str, path: str) -> Source:
    cfg = replace(cfg, data=replace(cfg.data, **{split: path}))
    return SOURCES.get(path.partition(":")[0], TokenFiles)(cfg, split)


class Mixture(Source):
    """Several sources.  Its windows are those of the first, then those of the second, and so on."""

    def __init__(self, cfg: Config, split: str, parts: dict[str, Part]):
        found = thread_map(lambda part: open_source(cfg, split, part.path), parts.values())
        self.parts = dict(zip(parts, found, strict=True))
        self.cfg, sources, L = cfg, [*self.parts.values()], cfg.train.seq_len
        # Of each source, and at last the number of all windows.
        self.first_windows = np.cumsum([0, *((source.n_tokens - 1) // L for source in sources)])
        self.n_tokens = int(self.first_windows[-1]) * L + 1
        self.vocab_size = max(source.vocab_size for source in sources)
        self.end_id = max(source.end_id for source in sources)
        self.tokenizer = next((x.tokenizer for x in sources if x.tokenizer is not None), None)
        total = sum(part.weight for part in parts.values())
        facts = [[n, str(x.weight / total), self.parts[n].fingerprint] for n, x in parts.items()]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def __str__(self):
        return "; ".join(f"{name}: {source}" for name, source in self.parts.items())

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        return self.gather(numbers, [x.windows for x in self.parts.values()], np.int32)

    def scored(self, numbers: np.ndarray) -> np.ndarray:
        return self.gather(numbers, [x.scored for x in self.parts.values()], bool)

    def gather(self, numbers: np.ndarray, readers: list, dtype) -> np.ndarray:
        """Each window as its source's reader returns it; all 1 if that returns None."""
        sources = np.searchsorted(self.first_windows, numbers, side="right") - 1
        rows = np.ones((len(numbers), self.cfg.train.seq_len + 1), dtype)
        for n, read in enumerate(readers):
            if (here := sources == n).any():
                part = read(numbers[here] - self.first_windows[n])
                if part is not None:
                    rows[here] = part
        return rows


def parts_of(source: Source) -> dict[str, Source]:
    """The sources of a mixture by name; of another source only itself, with the name ""."""
    return source.parts if isinstance(source, Mixture) else {"": source}


def check_tokenizers(sources: dict[str, Source]):
    """Raise UserError DATA if these sources, {name: source}, state different tokenizers, or
    different tokens that end documents."""
    parts = {}
    for name, source in sources.items():
        parts |= {f"{name} {part}".strip(): x for part, x in parts_of(source).items()}
    with_text = {name: x.tokenizer for name, x in parts.items() if x.tokenizer}
    # Equal texts, of up to 20 MB, are kept once.
    texts = thread_map(lambda x: sys.intern(shards.tokenizer_text(x)), with_text.values())
    texts = dict(zip(with_text, texts, strict=True))
    ends = {name: x.end_id for name, x in parts.items() if x.end_id >= 0}
    for stated, differ, how in (
        (texts, shards.are_different, "has another tokenizer than"),
        (ends, operator.ne, "ends documents with another token than"),
    ):
        first = next(iter(stated), "")
        if others := [name for name in stated if differ(stated[first], stated[name])]:
            fix = "prepare all with one --tokenizer PATH/tokenizer.json and one --end_token"
            raise UserError(DATA, f"{first} {how} {', '.join(others)}", fix)


# ---- batches


class Dataset:
    """Batches of a source's windows: sequences of tokens and their next-token targets.

    batch(i) returns (tokens, targets), both int32 AMBL and sharded as model.token_spec; a target of
    -1 is not scored.  Each process reads only the rows that its devices hold, and reads the next
    batches while the step runs.  `cfg` is the one given, with the source's end_id where
    data.document_mask needs one and no flag gives it.  Raises UserError DATA with every reason why
    cfg cannot use the data.
    """

    def __init__(self, cfg: Config, split: str, name: str = ""):
        """name: which of the sets of data.val."""
        parts, self.split, self.name = read_sets(getattr(cfg.data, split)), split, name
        self.label = f"data.{split} {name}".strip()
        """What messages call the set, such as data.val web."""
        if split == "train" and "" not in parts:
            self.source = Mixture(cfg, split, parts)
        else:
            self.source = open_source(cfg, split, parts[name].path)
        self.cfg = cfg
        if cfg.data.document_mask and cfg.data.end_id < 0:
            self.cfg = replace(cfg, data=replace(cfg.data, end_id=self.source.end_id))
        L, n_targets = cfg.train.seq_len, self.source.n_tokens - 1
        self.n_windows = n_targets // L  # evaluation also has the rest, in a padded window
        self.n_eval_windows = -(-n_targets // L)
        n_eval_batches = -(-self.n_eval_windows // cfg.train.batch_size)
        self.n_batches = cfg.train.steps if split == "train" else n_eval_batches
        self.sharding = NamedSharding(jax.sharding.get_mesh(), token_spec())
        self.workers, self.reading = ThreadPoolExecutor(4), {}  # {number of a batch: its Future}
        raise_problems(DATA, self.problems())
        if split == "train":
            n_windows = [(part.n_tokens - 1) // L for part in parts_of(self.source).values()]
            self.first_window = np.cumsum([0, *n_windows[:-1]])  # of each source
            self.order = Order(self.cfg, n_windows)
            self.check_epochs()

    def __str__(self):
        L = self.cfg.train.seq_len
        left = sum((part.n_tokens - 1) % L for part in parts_of(self.source).values())
        windows = f"{self.n_windows:,} windows of {L}"
        are = "do not fill one" if self.split == "train" else "are in a padded one"
        return f"{self.source}, {windows}; the last {left} tokens {are}"

    def problems(self):
        data, source, t = self.cfg.data, self.source, self.cfg.train
        name = f"data.{self.split}={getattr(data, self.split)}"
        is_train = self.split == "train"
        needed = t.seq_len + 1 if is_train else 2  # evaluation pads its last window
        for part, x in parts_of(source).items():
            if x.n_tokens < needed:
                holder = f"data.train: {part}" if part else name
                window = f"train.seq_len + 1 = {needed}" if is_train else needed
                what = f"{holder} holds {x.n_tokens} tokens; one window needs {window}"
                fix = "give more data"
                fix += ", or set a smaller --train.seq_len" if is_train else ""
                yield Problem(what, fix)
        if data.document_mask and data.end_id < 0:
            what = f"data.document_mask=True, but {name} does not say which token ends a document"
            yield Problem(what, "set --data.end_id")
        elif data.document_mask and source.end_id not in (-1, data.end_id):
            what = f"data.end_id={data.end_id}, but documents in {name} end with {source.end_id}"
            fix = f"set --data.end_id {source.end_id}, or give data of the same tokenizer"
            yield Problem(what, fix)
        if source.vocab_size > self.cfg.model.vocab_size:
            limit = f"model.vocab_size={self.cfg.model.vocab_size}"
            what = f"data.{self.split} has a vocabulary of {source.vocab_size}, above {limit}"
            fix = f"train with --model.vocab_size {source.vocab_size} or more"
            yield Problem(what, f"{fix}, or prepare the data with a smaller tokenizer")
        can_sample = source.tokenizer is not None and source.vocab_size > 0
        if is_train and t.sample_every and not can_sample:
            what = f"train.sample_every={t.sample_every}, but {name} has no tokenizer.json"
            fix = "prepare the data with scripts/prepare_data.py, or set --train.sample_every 0"
            yield Problem(what, fix)

    def check_epochs(self):
        """Raise UserError DATA if the run would repeat a source more often than data.epochs_max."""
        limit = self.cfg.data.epochs_max
        if limit and not self.cfg.eval_only and (found := self.order.first_beyond(limit)):
            name, update = found
            what = f"data.epochs_max={limit}, but update {update} would begin epoch {limit + 1}"
            what += f" of {name or 'data.train'}"
            fix = f"set --train.steps {update - 1}, give more data, or a larger --data.epochs_max"
            raise UserError(DATA, what, fix)

    def batch_windows(self, i: int) -> np.ndarray:
        """The windows of batch i."""
        if self.split == "val":
            return i * self.cfg.train.batch_size + np.arange(self.cfg.train.batch_size)
        sources, _, windows = self.order.batch(i)
        return self.first_window[sources] + windows

    def tokens_by_source(self, step: int) -> dict[str, int]:
        """{name of a source: tokens of it that the first `step` updates trained on}; the name is ""
        where there is no mixture."""
        L = self.cfg.train.seq_len
        return {name: n * L for name, n in self.order.trained_on(step).items()}

    def eval_indices(self, step: int) -> np.ndarray:
        """The batches of the evaluation after `step` updates."""
        t, n = self.cfg.train, self.n_batches
        count = n if t.eval_batches == -1 else min(t.eval_batches, n)
        n_before = max(0, -(-step // t.eval_every) - 1) if t.eval_every and t.eval_rolling else 0
        # An array, because each batch takes the rest of it: with 125,000 batches, copies of a list
        # took 23 s.
        return (n_before * count + np.arange(count)) % n

    def read_windows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) of these windows, both int32 [len(numbers), seq_len]; those after the
        last window have no targets."""
        windows = np.full((len(numbers), self.cfg.train.seq_len + 1), -1, np.int32)
        are_scored = np.ones(windows.shape, bool)
        exists, limit = numbers < self.n_eval_windows, self.cfg.model.vocab_size
        if exists.any():
            try:
                found = self.source.windows(numbers[exists])
                scored = self.source.scored(numbers[exists])
            except DamagedPage as e:
                raise self.page_error(e) from None
            wrong = found[(found < -1) | (found >= limit)]
            if wrong.size:
                what = f"data.{self.split} gives token id {wrong[0]}, not below"
                fix = "correct the data, or set a larger --model.vocab_size"
                raise UserError(DATA, f"{what} model.vocab_size={limit}", fix)
            windows[exists] = found
            are_scored[exists] = True if scored is None else scored
        return np.maximum(windows[:, :-1], 0), np.where(are_scored, windows, -1)[:, 1:]

    def page_error(self, error: DamagedPage) -> UserError:
        """The error, with the updates that train on the page."""
        parts = enumerate(parts_of(self.source).values())
        windows = {n: x.windows_of(error.block) for n, x in parts if isinstance(x, TokenFiles)}
        if self.split != "train" or not any(windows.values()):
            return error
        updates = {x for n, found in windows.items() for x in self.order.updates_of(n, found)}
        feeds = f"updates {first_ten(sorted(updates))}" if updates else "no update of this run"
        (problem,) = error.problems
        return UserError(DATA, f"{problem.what}; it feeds {feeds}", problem.fix)

    def make_batch(self, i: int) -> tuple[jax.Array, jax.Array]:
        """(tokens, targets) of batch i on the mesh."""
        t = self.cfg.train
        window_AMB = self.batch_windows(i).reshape(t.grad_accum, t.microbatches, -1)
        shape = (*window_AMB.shape, t.seq_len)
        places = self.sharding.addressable_devices_indices_map(shape).values()
        # This process's windows, read at once, because each request to a bucket takes its time.
        ours = np.unique(np.concatenate([window_AMB[place[:3]].ravel() for place in places]))

        def put(array):
            def read(place):
                return array[np.searchsorted(ours, window_AMB[place[:3]])]

            return jax.make_array_from_callback(shape, self.sharding, read)

        tokens, targets = self.read_windows(ours)
        return put(tokens), put(targets)

    def read_ahead(self, numbers) -> list[Future]:
        """The first max(data.prefetch, REQUEST_DELAY + 1) of the batches with these numbers:
        threads begin to read those that are new, and all others are forgotten."""
        numbers = numbers[: max(self.cfg.data.prefetch, REQUEST_DELAY + 1)]
        for n in set(self.reading) - set(numbers):
            del self.reading[n]
        for n in numbers:
            if n not in self.reading:
                self.reading[n] = self.workers.submit(self.make_batch, n)
        return [self.reading[n] for n in numbers]

    def batch(self, i: int):
        """Batch i of the set; of a training set what update i + 1 trains on."""
        # An evaluation may have begun to read its batches in another order, see eval_indices.
        if self.split == "train" or i not in self.reading:
            self.read_ahead(range(i, max(i + 1, self.n_batches)))
        return self.reading[i].result()

    def first_error(self, numbers) -> BaseException | None:
        """Why one of the first REQUEST_DELAY + 1 of these batches cannot be read, or None.  Waits
        for them."""
        errors = (batch.exception() for batch in self.read_ahead(numbers)[: REQUEST_DELAY + 1])
        return next((e for e in errors if e is not None), None)
