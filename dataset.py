"""Data: windows of tokens, their order, and the batch of step s on the mesh.  The batch is a pure
function of (data, seed, s).

Files of tokens are in shards.py.  Another source of tokens is one class and its entry in SOURCES.

Dimension key: A accumulation slices, M microbatches, B sequences, L sequence length.
"""

import os
import tempfile
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from config import DATA, STORAGE, Config, Problem, UserError
from files import absolute_path, is_remote
from model import TOKEN_SPEC
from processes import NOTICE
from shards import (
    Shard,
    check_is_part,
    data_error,
    file_sha256,
    file_state,
    find_shards,
    fingerprint,
)

# ---- the order


def scramble(x):
    """uint64 to well-mixed uint64 (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(i, n: int, key: int):
    """Elements i of the permutation of range(n) that key selects.

    There is no table, so that a billion windows cost no memory.  A Feistel network permutes the
    range up to the next power of four; what falls outside range(n) goes through it again until it
    falls inside (cycle walking: Black and Rogaway 2002), on average at most four times.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = scramble(scramble(np.full(6, key, np.uint64)) + np.arange(6, dtype=np.uint64))

    def network(x):
        left, right = x >> half, x & mask
        for k in keys:
            left, right = right, left ^ (scramble(right ^ k) & mask)
        return left << half | right

    x = network(np.asarray(i, np.uint64))
    while (outside := x >= n).any():
        x = np.where(outside, network(x), x)
    return x.astype(np.int64)


# ---- sources: from the number of a window to its tokens


class Source:
    """A set of tokens, made from (cfg, split) with split "train" or "val".

    A subclass sets n_tokens and fingerprint, and defines windows(rows), which must always give the
    same tokens for the same rows: other processes and resumed runs rely on it.  The rest has
    defaults.
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

    def windows(self, rows: np.ndarray) -> np.ndarray:
        """int32 [len(rows), seq_len + 1]: tokens from row * seq_len on, and -1 after the last."""
        raise NotImplementedError

    def __str__(self):
        return f"{self.n_tokens:,} tokens"

    def decode(self, ids: list[int]) -> str:
        from tokenizers import Tokenizer  # takes 0.1 s, and few runs need it

        return Tokenizer.from_str(self.tokenizer.read_text()).decode(ids)


class TokenFiles(Source):
    """The shards of a local or remote path, read as one long array.

    Before its first use a remote shard is fetched, and a shard's checksum is verified.
    """

    def __init__(self, cfg: Config, split: str):
        path = absolute_path(getattr(cfg.data, split))
        self.shards, manifest = find_shards(path, split)
        self.cfg, self.fingerprint = cfg, fingerprint(self.shards)
        self.opened = {}  # {number of a shard: (its local path, its file_state)}
        self.ends = np.cumsum([shard.n_tokens for shard in self.shards])
        self.n_tokens = int(self.ends[-1])
        self.vocab_size = manifest.get("vocab_size", 0)
        self.end_id = manifest.get("eot_id", -1)
        self.bytes_per_token = manifest["bytes"] / self.n_tokens if manifest else None
        tokenizer = path / "tokenizer.json"
        check_is_part(tokenizer)
        self.tokenizer = tokenizer if path.is_dir() and tokenizer.exists() else None

    def __str__(self):
        return f"{super().__str__()} in {len(self.shards)} shard(s)"

    def windows(self, rows: np.ndarray) -> np.ndarray:
        L = self.cfg.train.seq_len
        windows = np.full((len(rows), L + 1), -1, np.int32)
        for window, row in zip(windows, rows.tolist(), strict=True):
            tokens = self.read(row * L, min(row * L + L + 1, self.n_tokens))
            window[: len(tokens)] = tokens
        return windows

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop - 1 as int32, each checked to be below model.vocab_size."""
        pieces = []
        while start < stop:
            n = int(np.searchsorted(self.ends, start, side="right"))
            first = int(self.ends[n]) - self.shards[n].n_tokens
            piece = self.read_shard(n, start - first, stop - first)
            if piece.max() >= self.cfg.model.vocab_size or piece.min() < 0:
                raise self.token_error(piece, n, start - first)
            pieces.append(piece.astype(np.int32))
            start += len(piece)
        return np.concatenate(pieces)

    def token_error(self, piece, n: int, first: int) -> UserError:
        """The error that names the first bad token of a piece, which begins at index `first` of
        shard n."""
        limit = self.cfg.model.vocab_size
        i = int(np.argmax((piece >= limit) | (piece < 0)))
        what = f"token id {piece[i]} at index {first + i} is not below model.vocab_size={limit}"
        fix = "make the shards again with the right tokenizer"
        if piece.min() >= 0:
            fix += f", or set --model.vocab_size {int(piece.max()) + 1} or more"
        return data_error(f"shard {self.shards[n].path.name!r}: {what}", fix)

    def read_shard(self, n: int, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop - 1 of shard n, fewer at its end.  Raises UserError if the file is
        not the one that was verified.

        It is opened for each piece and not mapped: a file that is cut while it is mapped ends the
        process by a signal.
        """
        shard = self.shards[n]
        try:
            if n not in self.opened or (shard.sha256 and not self.is_unchanged(n)):
                self.opened[n] = self.open_shard(shard)
            itemsize, count = np.dtype(shard.dtype).itemsize, min(stop, shard.n_tokens) - start
            with open(self.opened[n][0], "rb") as f:
                data = os.pread(f.fileno(), count * itemsize, shard.offset + start * itemsize)
            if len(data) == count * itemsize and self.is_unchanged(n):
                return np.frombuffer(data, shard.dtype)
        except FileNotFoundError:
            what = f"shard {shard.path.name!r} is missing from {shard.path.parent}"
            raise data_error(what, "copy it there again") from None
        what = f"shard {shard.path.name!r} was changed while the run used it"
        raise data_error(what, "do not change data that a run uses; copy the shard again")

    def is_unchanged(self, n: int) -> bool:
        """Whether the file of shard n is as it was when it was opened first."""
        local, state = self.opened[n]
        return file_state(local) == state

    def open_shard(self, shard: Shard) -> tuple[str, list[int]]:
        """The shard's local path and its file_state, once its checksum is verified."""
        local = self.fetch(shard) if is_remote(shard.path) else os.fspath(shard.path)
        state = file_state(local)
        if shard.sha256 and file_sha256(local) != shard.sha256:
            what = f"shard {shard.path.name!r}: its checksum is not the manifest's"
            raise data_error(what, "copy it again, or make the data set again")
        return local, state

    def fetch(self, shard: Shard) -> str:
        """The path of a remote shard's local copy, which later runs use too if the shard has a
        checksum."""
        key = shard.sha256[:32] or uuid.uuid4().hex
        default = os.path.join(tempfile.gettempdir(), f"trifold-shards-{os.getuid()}")
        folder = epath.Path(self.cfg.data.cache or default)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = os.stat(folder)
        if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
            what = f"the cache {folder} belongs to another user, or others can write to it"
            raise UserError(STORAGE, what, "set --data.cache to a folder of your own, of mode 700")
        local = folder / f"{key}-{shard.path.name}"
        if not local.exists() or (shard.sha256 and file_sha256(os.fspath(local)) != shard.sha256):
            part = folder / f"{local.name}.{uuid.uuid4().hex}.part"
            shard.path.copy(part, overwrite=True)
            part.replace(local)
        return os.fspath(local)


class Synthetic(Source):
    """Random tokens with structure, which need no files: for benchmarks and first tries.

    Each token has SUCCESSORS tokens that may follow it, the same in every set, and one of them
    follows by chance.  So the best model's loss is log(SUCCESSORS), 1.386 nats, or a little less
    where some of a token's successors are the same.
    """

    SUCCESSORS = 4
    WINDOWS = MappingProxyType(dict(train=2**32, val=256))

    def __init__(self, cfg: Config, split: str):
        self.cfg, self.fingerprint = cfg, f"synthetic {split} {cfg.model.vocab_size}"
        self.n_tokens = self.WINDOWS[split] * cfg.train.seq_len + 1
        self.first = 0 if split == "val" else self.WINDOWS["val"]  # the sets have no common window

    def __str__(self):
        return f"{super().__str__()}, synthetic"

    def windows(self, rows: np.ndarray) -> np.ndarray:
        V, L = self.cfg.model.vocab_size, self.cfg.train.seq_len
        place = (rows[:, None] + self.first) * (L + 1) + np.arange(L + 1)
        draw = scramble(scramble(place.astype(np.uint64)) + np.uint64(self.cfg.run.seed))
        tokens = np.empty(draw.shape, np.int32)
        tokens[:, 0] = draw[:, 0] % np.uint64(V)
        choice = draw % np.uint64(self.SUCCESSORS)
        for i in range(L):
            edge = tokens[:, i].astype(np.uint64) * np.uint64(self.SUCCESSORS) + choice[:, i + 1]
            tokens[:, i + 1] = scramble(edge) % np.uint64(V)
        return tokens


# {name: class}: a --data.train or --data.val that is such a name, or begins with it and a colon,
# makes that Source; any other is a path and makes TokenFiles.
SOURCES = {"synthetic": Synthetic}


def open_source(cfg: Config, split: str) -> Source:
    name = getattr(cfg.data, split).partition(":")[0]
    return SOURCES.get(name, TokenFiles)(cfg, split)


# ---- batches


def with_end_id(cfg: Config, source: Source) -> Config:
    """cfg with the source's end_id, where data.document_mask needs one and no flag gives it."""
    if not cfg.data.document_mask or cfg.data.end_id >= 0:
        return cfg
    return replace(cfg, data=replace(cfg.data, end_id=source.end_id))


READ_AHEAD = 2 * NOTICE
"""Batches that are being read or wait for their update."""


class Dataset:
    """Batches of a source's windows: sequences of tokens and their next-token targets.

    batch(step) and eval_batch(i) return (tokens, targets), both int32 AMBL and sharded as
    model.TOKEN_SPEC; a target of -1 is not scored.  Each process reads only the rows that its
    devices hold, and reads the next batches while the step runs.  `cfg` is the one given, completed
    by with_end_id.  Raises UserError DATA with every reason why cfg cannot use the data.
    """

    def __init__(self, cfg: Config, split: str):
        self.split, self.source = split, open_source(cfg, split)
        self.cfg = with_end_id(cfg, self.source)
        L, n_targets = cfg.train.seq_len, self.source.n_tokens - 1
        self.n_windows = n_targets // L  # evaluation also has the rest, in a padded window
        self.n_eval_windows = -(-n_targets // L)
        self.n_eval_batches = -(-self.n_eval_windows // cfg.train.batch_size)
        self.sharding = NamedSharding(jax.sharding.get_mesh(), TOKEN_SPEC)
        self.worker, self.reading = ThreadPoolExecutor(1), {}
        if found := list(self.problems()):
            raise UserError(DATA, problems=found)

    def __str__(self):
        L = self.cfg.train.seq_len
        left = self.source.n_tokens - 1 - self.n_windows * L
        windows = f"{self.n_windows:,} windows of {L}"
        return f"{self.source}, {windows}; the last {left} tokens do not fill one"

    def problems(self):
        data, source, t = self.cfg.data, self.source, self.cfg.train
        name = f"data.{self.split}={getattr(data, self.split)}"
        is_train = self.split == "train"
        needed = t.seq_len + 1 if is_train else 2  # evaluation pads its last window
        if source.n_tokens < needed:
            window = f"train.seq_len + 1 = {needed}" if is_train else needed
            what = f"{name} holds {source.n_tokens} tokens; one window needs {window}"
            yield Problem(what, "give more data, or set a smaller --train.seq_len")
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
            fix = f"set --model.vocab_size {source.vocab_size} or more"
            yield Problem(what, f"{fix}, or prepare the data with a smaller tokenizer")
        can_sample = source.tokenizer is not None and source.vocab_size > 0
        if is_train and t.sample_every and not can_sample:
            what = f"train.sample_every={t.sample_every}, but {name} has no tokenizer.json"
            fix = "prepare the data with scripts/prepare_data.py, or set --train.sample_every 0"
            yield Problem(what, fix)

    def train_rows(self, step: int) -> np.ndarray:
        """The windows of the step's batch: each epoch has a seeded order of its own, and the
        batches run through the epochs without a break."""
        B, n, seed = self.cfg.train.batch_size, self.n_windows, self.cfg.run.seed
        epoch, i = np.divmod(step * B + np.arange(B), n)
        order = [permute(i[epoch == e], n, seed << 32 | int(e)) for e in np.unique(epoch)]
        return np.concatenate(order)

    def eval_rows(self, i: int) -> np.ndarray:
        return i * self.cfg.train.batch_size + np.arange(self.cfg.train.batch_size)

    def eval_indices(self, step: int) -> list[int]:
        """The batches of the evaluation after `step` updates."""
        t, n = self.cfg.train, self.n_eval_batches
        count = n if t.eval_batches == -1 else min(t.eval_batches, n)
        n_before = max(0, -(-step // t.eval_every) - 1) if t.eval_every and t.eval_rolling else 0
        return [(n_before * count + k) % n for k in range(count)]

    def windows(self, rows: np.ndarray) -> np.ndarray:
        """int32 [len(rows), seq_len + 1], -1 in the rows after the last window."""
        windows = np.full((len(rows), self.cfg.train.seq_len + 1), -1, np.int32)
        exists, limit = rows < self.n_eval_windows, self.cfg.model.vocab_size
        if exists.any():
            found = self.source.windows(rows[exists])
            wrong = found[(found < -1) | (found >= limit)]
            if wrong.size:
                what = f"data.{self.split} gives token id {wrong[0]}, not below"
                fix = "correct the data, or set a larger --model.vocab_size"
                raise data_error(f"{what} model.vocab_size={limit}", fix)
            windows[exists] = found
        return windows

    def make_batch(self, rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """(tokens, targets) of these windows on the mesh."""
        t = self.cfg.train
        row_AMB = rows.reshape(t.grad_accum, t.microbatches, -1)
        pieces = {}  # devices that differ in tp alone ask for the same piece

        def read(index):
            key = tuple((s.start, s.stop) for s in index[:3])
            if key not in pieces:
                piece_AMB = row_AMB[index[:3]]
                windows = self.windows(piece_AMB.ravel())
                pieces[key] = windows.reshape(*piece_AMB.shape, t.seq_len + 1)
            return pieces[key]

        def put(read_piece):
            shape = (*row_AMB.shape, t.seq_len)
            return jax.make_array_from_callback(shape, self.sharding, read_piece)

        tokens = put(lambda index: np.maximum(read(index)[..., :-1], 0))
        return tokens, put(lambda index: read(index)[..., 1:])

    def read_ahead(self, rows_of, numbers) -> list[Future]:
        """The batches of rows_of(n) for the first READ_AHEAD of these numbers n, which a thread
        starts to read unless it already has."""
        keys = [(rows_of.__name__, n) for n in numbers[:READ_AHEAD]]
        for key in set(self.reading) - set(keys):
            del self.reading[key]
        for key in keys:
            if key not in self.reading:
                self.reading[key] = self.worker.submit(self.make_batch, rows_of(key[1]))
        return [self.reading[key] for key in keys]

    def read_train(self, step: int) -> list[Future]:
        return self.read_ahead(self.train_rows, range(step, max(self.cfg.train.steps, step + 1)))

    def read_eval(self, numbers: list[int]) -> list[Future]:
        return self.read_ahead(self.eval_rows, numbers)

    def batch(self, step: int):
        """The batch that update step + 1 trains on."""
        return self.read_train(step)[0].result()

    def eval_batch(self, i: int):
        """Batch i of the set, from what eval_error has started to read if it is there."""
        found = self.reading.get((self.eval_rows.__name__, i))
        return (found or self.read_eval([*range(i, self.n_eval_batches)])[0]).result()

    def batch_error(self, step: int) -> BaseException | None:
        """What prevented the reading of `batch(step)` or of one of the NOTICE batches after it."""
        return first_error(self.read_train(step))

    def eval_error(self, numbers: list[int]) -> BaseException | None:
        """Likewise for the batches of an evaluation."""
        return first_error(self.read_eval(numbers))


def first_error(batches: list[Future]) -> BaseException | None:
    errors = (batch.exception() for batch in batches[: NOTICE + 1])
    return next((e for e in errors if e is not None), None)
