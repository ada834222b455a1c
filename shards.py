"""Files of tokens: what a shard holds, which shards a path has, and their fingerprint.

scripts/prepare_data.py makes them from text.  Another file format is one entry in READERS.
"""

import hashlib
import io
import json
import os
import re
import threading
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import fsspec
import numpy as np
from etils import epath

from errors import DATA, UserError, describe, or_list
from files import exists, file_size, is_folder, is_remote, leaves_folder, read_limited, thread_map


def missing_error(path: epath.Path) -> UserError:
    what = f"shard {path.name!r} is missing from {path.parent}"
    return UserError(DATA, what, "copy it there, or make the data set again")


def shard_error(path: epath.Path, what: str, fix: str) -> UserError:
    return UserError(DATA, f"shard {os.fspath(path)!r}: {what}", fix)


COPY_AGAIN = "copy it again, or make the data set again"
"""The fix for a damaged file."""


# ---- tokenizers


def n_ids(tokenizer) -> int:
    """One more than the highest id of a tokenizer, including the ids that it puts before a text,
    which its vocabulary may lack.  Its get_vocab_size() is less where ids have gaps."""
    return 1 + max([*tokenizer.get_vocab().values(), *tokenizer.encode("").ids], default=-1)


def tokenizer_text(path: epath.Path) -> str:
    """The text of a tokenizer.json.  Raises UserError DATA if it is too large or not UTF-8."""
    try:
        return read_limited(path)
    except ValueError as e:
        raise UserError(DATA, f"{path} is damaged: {str(e)[:200]}", "copy it again") from None


def parse_tokenizer(text: str):
    """The tokenizer in the text of a tokenizer.json, without truncation and padding: files of
    published models may have the settings of a last use.  Raises ValueError."""
    from tokenizers import Tokenizer  # takes 0.1 s, and few runs need it

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as e:  # tokenizers raises nothing narrower
        raise ValueError(str(e)[:200]) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def are_different(one: str, other: str) -> bool:
    """Whether two texts of tokenizer.json are of different tokenizers.  Layout, truncation and
    padding do not count: prepare_data.py writes what the library makes of a file."""

    def canonical(text: str) -> str:
        try:
            return parse_tokenizer(text).to_str()
        except ValueError:
            return text

    return one != other and canonical(one) != canonical(other)


def check_tokenizer(ours: epath.Path, theirs: epath.Path | None):
    """Raise UserError DATA if a run's tokenizer.json, `ours`, and that of data, `theirs`, are of
    different tokenizers.  A run or data may have none."""
    if theirs and exists(ours) and are_different(tokenizer_text(ours), tokenizer_text(theirs)):
        what = f"{theirs} is another tokenizer than that of the run, {ours}"
        raise UserError(DATA, what, f"prepare the data with --tokenizer {ours}")


# ---- pages: the units in which a file is verified

PAGE = 64 * 1024
"""Bytes of a page."""


def page_digest(page: bytes) -> bytes:
    return hashlib.blake2b(page, digest_size=16).digest()


def page_digests(data: bytes) -> bytes:
    """The digests of a file's pages, 16 bytes each, one after the other: the content of the file
    NAME.pages beside it, whose own page_digest is in the manifest."""
    return b"".join(page_digest(data[i : i + PAGE]) for i in range(0, len(data), PAGE))


def manifest_digest(manifest: dict) -> str:
    """The digest of all fields of a manifest except "digest", where prepare_data writes it."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return page_digest(json.dumps(rest, sort_keys=True).encode()).hex()


# ---- readers: from a file's header to a Shard


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens."""

    path: epath.Path
    n_tokens: int
    dtype: str
    """A numpy dtype, such as "uint16" or ">u2"."""
    offset: int
    """Bytes before the first token."""
    sha256: str = ""
    """The checksum of the whole file; empty without a manifest of format 1."""
    pages_digest: bytes = b""
    """The digest of the file NAME.pages; empty without a manifest of format 2."""
    mask: "Shard | None" = None
    """A file with a byte for each token: 0 where it is not scored."""

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.offset + self.n_tokens * self.itemsize


# A bare .npy file may have any of these; a shard of a manifest has one of the first two.
DTYPES = ("uint16", "uint32", "int32", "int64")


# What numpy raises for a damaged header, which it parses as a Python literal.
NPY_ERRORS = (ValueError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError)
NPY_ERRORS += (tokenize.TokenError,)


PARSING = threading.Lock()
"""Held while a header is parsed: where several threads parse Python literals, Python 3.11 sometimes
raises SystemError (CPython issue 106905)."""


def npy_shard(path: epath.Path) -> Shard:
    """A .npy file of one dimension.

    Raises UserError for pickles, other shapes and dtypes, and a size that does not fit the header.
    """
    fix, npy = "make the shard again, as a 1-D .npy of token ids", np.lib.format
    fix += ", or prepare a text with scripts/prepare_data.py"
    try:
        with path.open("rb") as file:
            f = io.BytesIO(file.read(12 + 10_000))
        version_1 = npy.read_magic(f) == (1, 0)
        read_header = npy.read_array_header_1_0 if version_1 else npy.read_array_header_2_0
        with PARSING:
            shape, _, dtype = read_header(f, max_header_size=10_000)
        offset = f.tell()
        size = file_size(path)
    except FileNotFoundError:
        raise missing_error(path) from None
    except NPY_ERRORS as e:  # not OSError, which becomes STORAGE: the data may be sound
        raise shard_error(path, str(e)[:200], fix) from None
    if dtype.hasobject or dtype.name not in DTYPES or dtype.byteorder == ">":
        raise shard_error(path, f"dtype {dtype} is not one of {', '.join(DTYPES)}", fix)
    if len(shape) != 1 or not shape[0]:
        raise shard_error(path, f"shape {shape} is not one dimension with tokens in it", fix)
    promised = offset + shape[0] * dtype.itemsize
    if size != promised:
        raise shard_error(path, f"{size} bytes, but its header promises {promised}", fix)
    return Shard(path, shape[0], dtype.name, offset)


LLMC_MAGIC = {20240520: "uint16", 20240801: "uint32"}
"""{first int32 of llm.c's header: the dtype of the tokens after it}.  As uint16, a file without a
header would have to begin with token 55,432 or 55,713, which GPT-2's vocabulary lacks."""


def bin_shard(path: epath.Path) -> Shard:
    """nanoGPT's format: uint16 tokens without a header."""
    size = file_size(path)
    with path.open("rb") as f:
        first = int.from_bytes(f.read(4), "little")
    if first in LLMC_MAGIC:
        what = f"it begins with llm.c's header, as modded-nanogpt's files do ({LLMC_MAGIC[first]})"
        fix = "add the reader of docs/extending.md (A data format), or save the tokens that follow "
        raise shard_error(path, what, fix + "its 1,024 bytes as a .npy file")
    if size % 2 or not size:
        what = f"{size} bytes is not a whole number of uint16 tokens"
        raise shard_error(path, what, "copy the file again")
    return Shard(path, size // 2, "uint16", 0)


def check_is_file(path: epath.Path):
    """Raise UserError for a folder, pipe or device of this machine; a pipe may never end."""
    if not is_remote(path) and exists(path) and not Path(path).is_file():
        fix = "put a file there, or set --data.train or --data.val to another data set"
        raise UserError(DATA, f"{path} is not a file but a folder, pipe or device", fix)


def check_is_part(path: epath.Path):
    """check_is_file, and raise UserError for a link that leaves the folder of the data set."""
    check_is_file(path)
    # A bucket has no links, and a request for each shard takes longer than the first batch.
    if not is_remote(path) and exists(path) and leaves_folder(path, path.parent):
        target = os.path.realpath(path)
        what = f"{path} is a link to {target}, outside of its data set"
        raise UserError(DATA, what, "copy the file, or name the folder that it is in")


# {suffix: the function that describes such a file as a Shard}, in the order in which folders are
# searched for them.
READERS = {".npy": npy_shard, ".bin": bin_shard}


def read_shard(path: epath.Path) -> Shard:
    """The file as the reader of its suffix describes it; a file with another suffix is a .npy."""
    return next((READERS[x] for x in READERS if path.name.endswith(x)), npy_shard)(path)


# ---- the files of a path


class TokenSet(NamedTuple):
    """What a path holds."""

    shards: list[Shard]
    manifest: dict
    """{} without one."""


def read_manifest(folder: epath.Path) -> TokenSet:
    """The shards that manifest.json lists.

    In format 2 that is the only file read.  Shard names are plain file names, so that a manifest
    cannot reach outside its folder.
    """
    path = folder / "manifest.json"
    fix = "make the data set again with scripts/prepare_data.py"
    try:
        manifest = json.loads(read_limited(path))
        make = {1: format_1_shard, 2: format_2_shard}.get(manifest["format"])
        if not make:
            raise ValueError(f"its format is {manifest['format']!r}, not 1 or 2")
        shards = [make(folder, entry, manifest) for entry in manifest["shards"]]
        counts = [manifest["vocab_size"], manifest["bytes"], len(shards)]
        if not all(isinstance(n, int) and n > 0 for n in counts):
            raise ValueError("it needs shards, and vocab_size and bytes above 0")
        end = manifest.get("eot_id", -1)
        if type(end) is not int or not -1 <= end < manifest["vocab_size"]:
            what = f"eot_id={end!r} is no id below vocab_size={manifest['vocab_size']}"
            raise ValueError(f"{what}, nor -1 for none")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        what = f"{path} is not a manifest: {describe(e)}"
        raise UserError(DATA, what, fix) from None
    return TokenSet(shards, manifest)


PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_entry(entry: dict, numbers: list, digest: str, n_digits: int, dtype="uint16"):
    """Raise ValueError for an entry of a manifest that cannot be right."""
    if not PLAIN_NAME.fullmatch(entry["name"]):
        raise ValueError(f"shard name {entry['name']!r} is not a plain file name")
    are_counts = all(type(n) is int and 0 < n < 2**40 for n in numbers)
    is_digest = re.fullmatch(f"[0-9a-f]{{{n_digits}}}", digest)
    if dtype not in ("uint16", "uint32") or not are_counts or not is_digest:
        facts = f"dtype {dtype!r}, {numbers!r} tokens, digest {digest!r}"
        raise ValueError(f"shard {entry['name']!r} has {facts}")


def format_1_shard(folder: epath.Path, entry: dict, manifest: dict) -> Shard:
    """A shard of format 1: its entry has a checksum of the whole file, with the header that says
    how many tokens there are."""
    check_entry(entry, [entry["tokens"]], entry["sha256"], 64, entry["dtype"])
    path = folder / entry["name"]
    check_is_part(path)
    return replace(npy_shard(path), sha256=entry["sha256"])


SHARD_FIELDS = {"name", "tokens", "offset", "pages", "mask", "bytes", "documents"}


def format_2_shard(folder: epath.Path, entry: dict, manifest: dict) -> Shard:
    name, n_tokens, offset, digest = (entry[key] for key in ("name", "tokens", "offset", "pages"))
    if unknown := entry.keys() - SHARD_FIELDS:  # it may be a damaged "mask"
        raise ValueError(f"shard {name!r} has an unknown field {min(unknown)!r}")
    check_entry(entry, [n_tokens, offset], digest, 32, manifest["dtype"])
    pages, mask = bytes.fromhex(digest), None
    if "mask" in entry:
        check_entry(entry, [], entry["mask"], 32)
        file = folder / f"{name.removesuffix('.npy')}.mask"
        mask = Shard(file, n_tokens, "uint8", 0, pages_digest=bytes.fromhex(entry["mask"]))
    return Shard(folder / name, n_tokens, manifest["dtype"], offset, "", pages, mask)


def bare_set(paths: list[epath.Path]) -> TokenSet:
    """Shards without a manifest.  Their headers are read in parallel."""
    return TokenSet(thread_map(lambda path: with_mask(read_shard(path)), paths), {})


def with_mask(shard: Shard) -> Shard:
    """A shard without a manifest, with the mask beside it if there is one."""
    path = shard.path.with_suffix(".mask")
    if not exists(path):
        return shard
    check_is_part(path)
    if (size := file_size(path)) != shard.n_tokens:
        holds = f"{shard.path.name!r} {shard.n_tokens} tokens"
        what = f"mask {os.fspath(path)!r} has {size} bytes, but {holds}"
        raise UserError(DATA, what, "make the mask again, with a byte for each token")
    return replace(shard, mask=Shard(path, size, "uint8", 0))


def find_shards(path: epath.Path, split: str) -> TokenSet:
    """What a path holds.

    The path is one file, or a folder with a manifest.json, with {split}.bin (nanoGPT), or with bare
    shards of one format (JAXformer's are .npy), which are taken in the order of their names.
    """
    if not exists(path):
        fix = f"correct it, make it with scripts/prepare_data.py, or try --data.{split} synthetic"
        if "=" in os.fspath(path):
            fix += "; in NAME=PATH a NAME has letters, digits, _ and - only"
        raise UserError(DATA, f"data.{split}={path} does not exist", fix)
    if not is_folder(path):
        check_is_file(path)
        return bare_set([path])
    if exists(path / "manifest.json"):
        check_is_part(path / "manifest.json")
        return read_manifest(path)
    # The other split's file, if nanoGPT's folder has it, is no shard of this one.
    other = "train.bin" if split == "val" else "val.bin"
    names = sorted(p.name for p in path.iterdir() if p.name != other)
    formats = [[path / name for name in names if name.endswith(suffix)] for suffix in READERS]
    formats = [found for found in formats if found]
    if (single := path / f"{split}.bin").exists():
        formats = [[single]]
    if len(formats) > 1:
        files = " and ".join(found[0].name for found in formats)
        what = f"data.{split}={path} has shards of {len(formats)} formats, such as {files}"
        raise UserError(DATA, what, "leave those of one format there")
    if formats:
        for file in formats[0]:
            check_is_part(file)
        return bare_set(formats[0])
    wanted = or_list(["manifest.json", *(f"*{suffix}" for suffix in READERS)])
    what = f"no shards in data.{split}={path}: no {wanted} among {len(names)} other files"
    fix = "make them with scripts/prepare_data.py"
    if (path / split / "manifest.json").exists():  # the --out of prepare_data
        fix = f"give its folder {path / split}"
    elif (path / other).exists():
        what = f"no shards in data.{split}={path}: {other} there belongs to the other split"
        fix = f"put {split}.bin there, or give {path / other}"
    raise UserError(DATA, what, fix)


def file_sha256(path: epath.Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


SAMPLES, SAMPLE = 64, 16 * 1024
"""For a shard without a checksum the fingerprint covers SAMPLES samples of SAMPLE bytes each."""


def sample_bytes(shard: Shard) -> bytes:
    """All bytes of a small shard, or samples spread evenly from its first token to its last."""
    fs, path = fsspec.url_to_fs(os.fspath(shard.path))
    begin, size = shard.offset, shard.n_tokens * shard.itemsize
    if size <= SAMPLES * SAMPLE:
        return fs.cat_file(path, begin, begin + size)
    starts = [begin + i * (size - SAMPLE) // (SAMPLES - 1) for i in range(SAMPLES)]
    ends = [start + SAMPLE for start in starts]
    return b"".join(fs.cat_ranges([path] * SAMPLES, starts, ends, on_error="raise"))


def fingerprint(token_set: TokenSet) -> str:
    """A hash that changes with the tokens and masks: of the manifest's digests, or else of each
    file's size and of samples of it, 1 MiB in all, so that the start of a run does not wait for all
    data."""

    def digest(shard: Shard) -> str:
        known = shard.sha256 or shard.pages_digest.hex()
        return known or hashlib.sha256(sample_bytes(shard)).hexdigest()

    def facts_of(shard: Shard) -> list:
        facts = [shard.n_tokens, shard.dtype, digest(shard)]
        facts += [shard.offset] if shard.pages_digest else []
        return facts + ([f"mask {digest(shard.mask)}"] if shard.mask else [])

    each = map if token_set.manifest else thread_map  # with a manifest there is nothing to read
    facts = [*each(facts_of, token_set.shards)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
