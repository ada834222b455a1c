"""Data: files of tokens, the windows cut from them, and the batch of step s on the mesh.  The batch
is a pure function of (data, seed, s).

scripts/prepare_data.py makes the files from text; nothing here does.  Another file format is one
entry in READERS, another source of tokens is one class and its entry in SOURCES.

Dimension key: A accumulation slices, M microbatches, B sequences, L sequence length.
"""

import hashlib
import json
import os
import re
import stat
import tempfile
import tokenize
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import fsspec
import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from config import DATA, STORAGE, Config, Problem, UserError, or_list
from files import absolute_path, is_remote, leaves_folder, read_limited
from model import TOKEN_SPEC
from processes import NOTICE


def data_error(what: str, fix: str) -> UserError:
    return UserError(DATA, what, fix)


# ---- readers: what a file holds, from its header


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    path: epath.Path
    n_tokens: int
    dtype: str
    """A numpy dtype, such as "uint16" or ">u2"."""
    offset: int
    """Bytes before the first token."""
    sha256: str = ""
    """The checksum of the whole file; empty without a manifest."""


# Of .npy shards; those of a manifest are unsigned.
DTYPES = ("uint16", "uint32", "int32", "int64")


# What numpy raises for a header that is damaged, since it evaluates it as a Python literal, and for
# a file that cannot be read.
NPY_ERRORS = (
    *(ValueError, OSError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError),
    tokenize.TokenError,
)


def npy_shard(path: epath.Path) -> Shard:
    """A .npy file of one dimension.

    Raises UserError for pickles, other shapes and dtypes, and a size that does not fit the header.
    """
    fix = "make the shard again, as a 1-D .npy of token ids"

    def error(why: str) -> UserError:
        return data_error(f"shard {path.name!r}: {why}", fix)

    npy = np.lib.format
    try:
        with path.open("rb") as f:
            version_1 = npy.read_magic(f) == (1, 0)
            read_header = npy.read_array_header_1_0 if version_1 else npy.read_array_header_2_0
            shape, _, dtype = read_header(f, max_header_size=10_000)
            offset = f.tell()
        size = path.stat().length
    except FileNotFoundError:
        what = f"shard {path.name!r} is missing from {path.parent}"
        raise data_error(what, "copy it there, or make the data set again") from None
    except PermissionError:
        raise  # becomes STORAGE: the data may be sound
    except NPY_ERRORS as e:
        raise error(str(e)[:200]) from None
    if dtype.hasobject or dtype.name not in DTYPES or dtype.byteorder == ">":
        raise error(f"dtype {dtype} is not one of {', '.join(DTYPES)}")
    if len(shape) != 1 or not shape[0]:
        raise error(f"shape {shape} is not one dimension with tokens in it")
    promised = offset + shape[0] * dtype.itemsize
    if size != promised:
        raise error(f"{size} bytes, but its header promises {promised}")
    return Shard(path, shape[0], dtype.name, offset)


def bin_shard(path: epath.Path) -> Shard:
    """nanoGPT's format: uint16 tokens without a header."""
    size = path.stat().length
    if size % 2 or not size:
        what = f"shard {path.name!r}: {size} bytes is not a whole number of uint16 tokens"
        raise data_error(what, "copy the file again")
    return Shard(path, size // 2, "uint16", 0)


def check_is_file(path: epath.Path):
    """Raise UserError for a folder, pipe or device of this machine; a pipe may never end."""
    if not is_remote(path) and path.exists() and not stat.S_ISREG(os.stat(path).st_mode):
        fix = "put a file there, or set --data.train or --data.val to another data set"
        raise data_error(f"{path} is not a file but a folder, pipe or device", fix)


def check_is_part(path: epath.Path):
    """check_is_file, and raise UserError for a link that leaves the folder of the data set."""
    check_is_file(path)
    if path.exists() and leaves_folder(path, path.parent):
        target = os.path.realpath(path)
        what = f"{path} is a link to {target}, outside of its data set"
        raise data_error(what, "copy the file, or name the folder that it is in")


# {suffix: the function that describes such a file as a Shard}, in the order in which folders are
# searched for them.
READERS = {".npy": npy_shard, ".bin": bin_shard}


def read_shard(path: epath.Path) -> Shard:
    """The file as the reader of its suffix describes it; a file with another suffix is a .npy."""
    check_is_file(path)
    return READERS.get(path.suffix, npy_shard)(path)


# ---- the files of a path


def read_manifest(folder: epath.Path) -> tuple[list[Shard], dict]:
    """The shards that manifest.json lists, and the manifest.

    Shard names are plain file names, so that a manifest cannot reach outside its folder.
    """
    path = folder / "manifest.json"
    fix = "make the data set again with scripts/prepare_data.py"
    try:
        manifest = json.loads(read_limited(path))
        shards = []
        for entry in manifest["shards"]:
            name, dtype, n_tokens, sha256 = (
                entry[key] for key in ("name", "dtype", "tokens", "sha256")
            )
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", name):
                raise ValueError(f"shard name {name!r} is not a plain file name")
            is_count = isinstance(n_tokens, int) and n_tokens > 0
            is_checksum = re.fullmatch(r"[0-9a-f]{64}", sha256)
            if dtype not in ("uint16", "uint32") or not is_count or not is_checksum:
                facts = f"dtype {dtype!r}, {n_tokens!r} tokens, sha256 {sha256!r}"
                raise ValueError(f"shard {name!r} has {facts}")
            check_is_part(folder / name)
            shard = npy_shard(folder / name)
            if (shard.dtype, shard.n_tokens) != (dtype, n_tokens):
                holds = f"{shard.n_tokens} {shard.dtype} tokens"
                what = f"shard {name!r} holds {holds}, its manifest says {n_tokens} {dtype}"
                raise data_error(what, fix)
            shards.append(replace(shard, sha256=sha256))
        counts = [manifest["vocab_size"], manifest["bytes"], len(shards)]
        if not all(isinstance(n, int) and n > 0 for n in counts) or manifest["format"] != 1:
            raise ValueError("it needs format 1, shards, and vocab_size and bytes above 0")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        what = f"{path} is not a manifest: {type(e).__name__} {str(e)[:200]}"
        raise data_error(what, fix) from None
    return shards, manifest


# nanoGPT's folders hold one file for each split.
SPLIT_FILES = {"train": "train.bin", "val": "val.bin"}


def find_shards(path: epath.Path, split: str) -> tuple[list[Shard], dict]:
    """The shards of a data set and its manifest, {} where it has none.

    The path is one file, or a folder with a manifest.json, with {split}.bin (nanoGPT), or with bare
    shards of one format (JAXformer's are .npy), which are taken in the order of their names.
    """
    if not path.exists():
        fix = f"make it with scripts/prepare_data.py, or set --data.{split}"
        raise data_error(f"data.{split}={path} does not exist", fix)
    if not path.is_dir():
        return [read_shard(path)], {}
    if (path / "manifest.json").exists():
        check_is_part(path / "manifest.json")
        return read_manifest(path)
    if (path / SPLIT_FILES[split]).exists():
        check_is_part(path / SPLIT_FILES[split])
        return [read_shard(path / SPLIT_FILES[split])], {}
    names = sorted(p.name for p in path.iterdir() if p.name not in SPLIT_FILES.values())
    for suffix, read in READERS.items():
        if found := [path / name for name in names if name.endswith(suffix)]:
            for file in found:
                check_is_part(file)
            return [read(file) for file in found], {}
    wanted = or_list(["manifest.json", *(f"*{suffix}" for suffix in READERS)])
    what = f"no shards in data.{split}={path}: no {wanted} among {len(names)} other files"
    raise data_error(what, "make them with scripts/prepare_data.py")


def file_state(file: str | int) -> list[int]:
    """What changes when a file is written or replaced; file: a path or an open file's number."""
    facts = os.stat(file)
    return [facts.st_size, facts.st_mtime_ns, facts.st_ino]


def file_sha256(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


PAGES, PAGE_SIZE = 64, 16 * 1024
"""Of a shard without a checksum, that its fingerprint covers."""


def sample_pages(shard: Shard) -> bytes:
    """All tokens of a small shard, or pages spread evenly from its first token to its last."""
    fs, path = fsspec.url_to_fs(os.fspath(shard.path))
    begin, size = shard.offset, shard.n_tokens * np.dtype(shard.dtype).itemsize
    if size <= PAGES * PAGE_SIZE:
        return fs.cat_file(path, begin, begin + size)
    starts = [begin + i * (size - PAGE_SIZE) // (PAGES - 1) for i in range(PAGES)]
    ends = [start + PAGE_SIZE for start in starts]
    return b"".join(fs.cat_ranges([path] * PAGES, starts, ends, on_error="raise"))


def fingerprint(shards: list[Shard]) -> str:
    """A hash that changes with the tokens: of the manifest's checksums, or else of each file's size
    and of pages of it, 1 MiB in all, so that the start of a run does not wait for all data."""
    facts = []
    for shard in shards:
        checksum = shard.sha256 or hashlib.sha256(sample_pages(shard)).hexdigest()
        facts.append([shard.n_tokens, shard.dtype, checksum])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


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


# {prefix: class}: a --data.train or --data.val that starts with the prefix makes that Source, any
# other makes TokenFiles of a path.
SOURCES = {}


def open_source(cfg: Config, split: str) -> Source:
    for prefix, source_class in SOURCES.items():
        if getattr(cfg.data, split).startswith(prefix):
            return source_class(cfg, split)
    return TokenFiles(cfg, split)


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
