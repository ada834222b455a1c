"""Token shards on disk or in a bucket, and the batch of step s on the mesh: a pure function of
(data, seed, s)."""

import hashlib
import json
import os
import re
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from config import DATA, Config, Problem, UserError
from files import absolute_path, is_remote
from model import TOKEN_SPEC

# The manifest's are unsigned; bare shards may be any of these.
DTYPES = ("uint16", "uint32", "int32", "int64")


def bad_data(what: str, fix: str) -> UserError:
    return UserError(DATA, what, fix)


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    path: epath.Path
    tokens: int
    dtype: str
    offset: int
    """Bytes before the first token."""
    sha256: str = ""
    """Of the whole file; empty where no manifest says."""


# ---- what a path holds


def read_manifest(folder: epath.Path) -> tuple[list[Shard], dict]:
    """The shards that manifest.json lists, and the manifest.

    Nothing it says can name a file outside the folder.
    """
    path = folder / "manifest.json"
    remake = "make the data set again with scripts/prepare_data.py"
    try:
        manifest = json.loads(path.read_text())
        shards = []
        for entry in manifest["shards"]:
            name, dtype, tokens, sha = (entry[k] for k in ("name", "dtype", "tokens", "sha256"))
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", name):
                raise ValueError(f"shard name {name!r} is not a plain file name")
            says = f"dtype {dtype!r}, {tokens!r} tokens, sha256 {sha!r}"
            is_count = isinstance(tokens, int) and tokens > 0
            if dtype not in DTYPES[:2] or not is_count or not re.fullmatch(r"[0-9a-f]{64}", sha):
                raise ValueError(f"shard {name!r} has {says}")
            shard = npy_shard(folder / name, sha)
            if (shard.dtype, shard.tokens) != (dtype, tokens):
                holds = f"{shard.tokens} {shard.dtype} tokens"
                what = f"shard {name!r} holds {holds}, its manifest says {tokens} {dtype}"
                raise bad_data(what, remake)
            shards.append(shard)
        counts = [manifest["vocab_size"], manifest["bytes"], len(shards)]
        if not all(isinstance(n, int) and n > 0 for n in counts) or manifest["format"] != 1:
            raise ValueError("it needs format 1, shards, and vocab_size and bytes above 0")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        what = f"{path} is not a manifest: {type(e).__name__} {str(e)[:200]}"
        raise bad_data(what, remake) from None
    return shards, manifest


def npy_shard(path: epath.Path, sha256: str = "") -> Shard:
    """A .npy shard from its header.

    Refuses pickles, other shapes and types, and sizes that do not fit the header.
    """
    fix = "make the shard again, as a 1-D .npy of token ids"

    def refuse(why):
        return bad_data(f"shard {path.name!r}: {why}", fix)

    npy = np.lib.format
    try:
        with path.open("rb") as f:
            v1 = npy.read_magic(f) == (1, 0)
            read_header = npy.read_array_header_1_0 if v1 else npy.read_array_header_2_0
            shape, _, dtype = read_header(f, max_header_size=10_000)
            offset = f.tell()
        size = path.stat().length
    except FileNotFoundError:
        what = f"shard {path.name!r} is missing from {path.parent}"
        raise bad_data(what, "copy it there, or make the data set again") from None
    except (ValueError, OSError) as e:
        raise refuse(str(e)[:200]) from None
    if dtype.hasobject or dtype.name not in DTYPES or dtype.byteorder == ">":
        raise refuse(f"dtype {dtype} is refused, only {', '.join(DTYPES)} are token ids")
    if len(shape) != 1 or not shape[0]:
        raise refuse(f"shape {shape} is not one dimension with tokens in it")
    if size != offset + shape[0] * dtype.itemsize:
        raise refuse(f"{size} bytes, but its header promises {offset + shape[0] * dtype.itemsize}")
    return Shard(path, shape[0], dtype.name, offset, sha256)


def bin_shard(path: epath.Path) -> Shard:
    """nanoGPT's raw format: nothing but uint16 tokens."""
    size = path.stat().length
    if size % 2 or not size:
        what = f"shard {path.name!r}: {size} bytes is no whole number of uint16 tokens"
        raise bad_data(what, "copy the file again")
    return Shard(path, size // 2, "uint16", 0)


def find_shards(path: epath.Path, split: str) -> tuple[list[Shard], dict]:
    """The shards of a data set and its manifest, {} where it has none.

    A path is a folder with a manifest.json; or one .bin or .npy file; or a folder with {split}.bin
    (nanoGPT), or with bare .npy (JAXformer) or .bin shards, taken in the order of their names.
    """
    if not path.exists():
        fix = f"make it with scripts/prepare_data.py, or set --data.{split}"
        raise bad_data(f"data.{split}={path} does not exist", fix)
    if not path.is_dir():
        return [bin_shard(path) if path.suffix == ".bin" else npy_shard(path)], {}
    if (path / "manifest.json").exists():
        return read_manifest(path)
    if (path / f"{split}.bin").exists():
        return [bin_shard(path / f"{split}.bin")], {}
    names = sorted(p.name for p in path.iterdir() if p.name not in ("train.bin", "val.bin"))
    for suffix, read in ((".npy", npy_shard), (".bin", bin_shard)):
        if found := [read(path / name) for name in names if name.endswith(suffix)]:
            return found, {}
    missing = f"no manifest.json, *.npy or *.bin among {len(names)} other files"
    what = f"no shards in data.{split}={path}: {missing}"
    raise bad_data(what, "make them with scripts/prepare_data.py")


# ---- the token stream


def file_sha256(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class Stream:
    """The shards as one long array of tokens.

    A shard is fetched, if remote, and its checksum verified before first use.
    """

    def __init__(self, shards: list[Shard], vocab_size: int, cache: str):
        self.shards, self.vocab_size, self.cache = shards, vocab_size, cache
        self.ends = np.cumsum([s.tokens for s in shards])
        self.arrays = {}

    def __len__(self):
        return int(self.ends[-1])

    def read(self, start: int, stop: int):
        """Tokens start .. stop - 1 as int32, each checked to be below vocab_size."""
        pieces = []
        while start < stop:
            n = int(np.searchsorted(self.ends, start, side="right"))
            first = int(self.ends[n]) - self.shards[n].tokens
            piece = self.array(n)[start - first : stop - first]
            if piece.max() >= self.vocab_size or piece.min() < 0:
                raise self.outside(piece, n, start - first)
            pieces.append(piece.astype(np.int32))
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def outside(self, piece, n: int, at: int) -> UserError:
        """The error for a piece, from index `at` of shard n on, with a token that is no id."""
        V, name = self.vocab_size, self.shards[n].path.name
        i = int(np.argmax((piece >= V) | (piece < 0)))
        what = f"token id {piece[i]} at index {at + i} is not below model.vocab_size={V}"
        fix = "make the shards again with the right tokenizer"
        if piece.min() >= 0:
            fix += f", or set --model.vocab_size {int(piece.max()) + 1} or more"
        return bad_data(f"shard {name!r}: {what}", fix)

    def array(self, n: int):
        if n not in self.arrays:
            shard = self.shards[n]
            local = self.fetch(shard) if is_remote(shard.path) else os.fspath(shard.path)
            if shard.sha256 and file_sha256(local) != shard.sha256:
                what = f"shard {shard.path.name!r}: its checksum is not the manifest's"
                raise bad_data(what, "copy it again, or make the data set again")
            self.arrays[n] = np.memmap(local, shard.dtype, "r", shard.offset, (shard.tokens,))
        return self.arrays[n]

    def fetch(self, shard: Shard) -> str:
        """A local copy of a remote shard, for later runs too where a checksum says which it is."""
        key = shard.sha256[:32] or uuid.uuid4().hex
        default = os.path.join(tempfile.gettempdir(), f"trifold-shards-{os.getuid()}")
        folder = epath.Path(self.cache or default)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        local = folder / f"{key}-{shard.path.name}"
        if not local.exists() or (shard.sha256 and file_sha256(os.fspath(local)) != shard.sha256):
            part = folder / f"{local.name}.{uuid.uuid4().hex}.part"
            shard.path.copy(part, overwrite=True)
            part.replace(local)
        return os.fspath(local)


def fingerprint(shards: list[Shard]) -> str:
    """Changes with the tokens: from the manifest's checksums, else from sizes and both ends of each
    file."""
    sums = []
    for s in shards:
        mark = s.sha256
        if not mark:
            with s.path.open("rb") as f:
                head = f.read(65536)
                f.seek(max(0, s.offset + s.tokens * np.dtype(s.dtype).itemsize - 65536))
                mark = hashlib.sha256(head + f.read()).hexdigest()
        sums.append([s.tokens, s.dtype, mark])
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:32]


# ---- the order


def scramble(x):
    """uint64 to well-mixed uint64 (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(i, n: int, key: int):
    """Elements i of a permutation of range(n) that key selects, without holding the permutation.

    A Feistel network permutes the next power of four; what lands outside range(n) is sent through
    again until it does not (cycle walking: Black and Rogaway 2002), at most four times on average.
    A billion windows need no table.
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


class Dataset:
    """Windows of seq_len tokens and their next-token targets.

    batch(step) and eval_batch(i) return (tokens, targets), both AMBL int32 and sharded as
    model.TOKENS; a target of -1 is not scored.  Each process reads only the rows that its devices
    hold, and reads the next batch ahead while the step runs.
    """

    def __init__(self, cfg: Config, split: str):
        path = absolute_path(getattr(cfg.data, split))
        shards, self.manifest = find_shards(path, split)
        self.cfg, self.fingerprint = cfg, fingerprint(shards)
        self.stream = Stream(shards, cfg.model.vocab_size, cfg.data.cache)
        tokenizer = path / "tokenizer.json"
        self.tokenizer = tokenizer if path.is_dir() and tokenizer.exists() else None
        self.worker, self.ahead = ThreadPoolExecutor(1), {}
        self.sharding = NamedSharding(jax.sharding.get_mesh(), TOKEN_SPEC)

        L, T = cfg.train.seq_len, len(self.stream)
        self.windows = (T - 1) // L
        self.n_eval_batches = -(-(T - 1) // (L * cfg.train.batch_size))
        self.end_id = cfg.data.end_id if cfg.data.end_id >= 0 else self.manifest.get("eot_id", -1)
        self.bytes_per_token = self.manifest["bytes"] / T if self.manifest else None
        if found := list(self.problems(split, path)):
            raise UserError(DATA, problems=found)

    def problems(self, split: str, path: epath.Path):
        """What keeps the run from using these data."""
        m, t = self.cfg.model, self.cfg.train
        vocab = self.manifest.get("vocab_size", 0)
        needs = t.seq_len + 1 if split == "train" else 2  # evaluation pads
        if len(self.stream) < needs:
            holds = f"data.{split}={path} holds {len(self.stream)} tokens"
            what = f"{holds}; one window needs " + (
                f"train.seq_len + 1 = {needs}" if split == "train" else "2"
            )
            yield Problem(what, "give more data, or set a smaller --train.seq_len")
        told, own = self.cfg.data.end_id, self.manifest.get("eot_id", self.end_id)
        if self.cfg.data.document_mask and self.end_id < 0:
            what = f"data.document_mask=True, but {path} does not say which token ends a document"
            yield Problem(what, "set --data.end_id")
        elif self.cfg.data.document_mask and own != self.end_id:
            what = f"data.end_id={told}, but documents in data.{split}={path} end with {own}"
            yield Problem(what, f"set --data.end_id {own}, or give data of the same tokenizer")
        if vocab > m.vocab_size:
            limit = f"model.vocab_size={m.vocab_size}"
            what = f"data.{split} has a vocabulary of {vocab}, above {limit}"
            more = f"--model.vocab_size {vocab} or more"
            yield Problem(what, f"set {more}, or prepare the data with a smaller tokenizer")
        if split == "train" and t.sample_every and not (self.tokenizer and self.manifest):
            what = f"train.sample_every={t.sample_every} but {path} has no tokenizer.json"
            fix = "prepare the data with scripts/prepare_data.py, or set --train.sample_every 0"
            yield Problem(what, fix)

    def decode(self, ids: list[int]) -> str:
        from tokenizers import Tokenizer  # 0.1 s, and few runs need it

        return Tokenizer.from_str(self.tokenizer.read_text()).decode(ids)

    def __str__(self):
        T, L = len(self.stream), self.cfg.train.seq_len
        shards = f"{T:,} tokens in {len(self.stream.shards)} shard(s)"
        left = T - 1 - self.windows * L
        return f"{shards}, {self.windows:,} windows of {L}; the last {left} tokens fill none"

    def rows(self, step: int):
        """The windows of step's batch: the seeded order of the first epoch, then of the next, with
        no break between."""
        B, n, seed = self.cfg.train.batch_size, self.windows, self.cfg.run.seed
        epoch, i = np.divmod(step * B + np.arange(B), n)
        order = [permuted(i[epoch == e], n, seed << 32 | int(e)) for e in np.unique(epoch)]
        return np.concatenate(order)

    def eval_rows(self, i: int):
        return i * self.cfg.train.batch_size + np.arange(self.cfg.train.batch_size)

    def eval_indices(self, step: int) -> list[int]:
        """The batches that the evaluation after `step` updates goes through."""
        t, n = self.cfg.train, self.n_eval_batches
        count = n if t.eval_batches == -1 else min(t.eval_batches, n)
        n_before = max(0, -(-step // t.eval_every) - 1) if t.eval_every and t.eval_rolling else 0
        return [(n_before * count + k) % n for k in range(count)]

    def window(self, row: int):
        """seq_len + 1 tokens from row * seq_len on, -1 beyond the end of the set."""
        L, T = self.cfg.train.seq_len, len(self.stream)
        start = int(row) * L
        found = self.stream.read(start, min(start + L + 1, T)) if start < T - 1 else []
        return np.concatenate([found, np.full(L + 1 - len(found), -1)]).astype(np.int32)

    def place(self, rows):
        """(tokens, targets) of these windows on the mesh."""
        t = self.cfg.train
        row_AMB = rows.reshape(t.grad_accum, t.microbatches, -1)
        made = {}  # tp shards ask for the same piece

        def read(index):
            key = tuple((s.start, s.stop) for s in index[:3])
            if key not in made:
                piece = row_AMB[index[:3]]
                windows = np.stack([self.window(row) for row in piece.flat])
                made[key] = windows.reshape(*piece.shape, t.seq_len + 1)
            return made[key]

        shape = (*row_AMB.shape, t.seq_len)

        def put(piece):
            return jax.make_array_from_callback(shape, self.sharding, piece)

        tokens = put(lambda at: np.maximum(read(at)[..., :-1], 0))
        return tokens, put(lambda at: read(at)[..., 1:])

    def ahead_of(self, key, rows, next_key, next_rows):
        """Place rows, from the read-ahead where they are in it, and start reading next_rows."""
        future = self.ahead.pop(key, None)
        placed = future.result() if future else self.place(rows)
        self.ahead = {}
        if next_rows is not None:
            self.ahead = {next_key: self.worker.submit(self.place, next_rows)}
        return placed

    def batch(self, step: int):
        follows = step + 1
        next_rows = self.rows(follows) if follows < self.cfg.train.steps else None
        return self.ahead_of(("train", step), self.rows(step), ("train", follows), next_rows)

    def eval_batch(self, i: int):
        follows = (i + 1) % self.n_eval_batches
        next_rows = self.eval_rows(follows)
        return self.ahead_of(("eval", i), self.eval_rows(i), ("eval", follows), next_rows)
