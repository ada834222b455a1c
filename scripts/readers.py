"""What prepare_data.py reads: the pieces that files are cut into, and the documents of a piece.

A format of files is one entry in FORMATS.
"""

import codecs
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count, pairwise
from typing import NamedTuple

import fsspec
import pyarrow as pa
import zstandard
from pyarrow import ipc, parquet

from errors import DATA, USAGE, UserError, or_list
from files import is_remote
from scripts.corpus import File

PIECE = 4_000_000
"""Bytes of a text that are tokenized together.  A longer text is cut at ends of lines."""
LIMIT = 2**28
"""Bytes that a document in a table or a file of lines may have."""
NOT_UTF8 = "not UTF-8"


class Options(NamedTuple):
    """The flags that say what a document is."""

    field: str = "text"
    prompt_field: str = ""
    document_per_line: bool = False
    piece: int = PIECE
    """Bytes of a piece of a file of lines."""


class Piece(NamedTuple):
    """A part of the corpus that can be read without the others."""

    kind: str
    """A key of FORMATS."""
    source: str | bytes
    """A path, or the text itself."""
    start: int
    stop: int
    """The range of bytes or of row groups; of a streamed data set, the shard's number and how many
    there are."""
    size: int
    """Bytes of text, estimated where they are compressed."""
    split_hash: int | None = None
    """The `Document.split_hash` of the whole text, if this is a part of a long one."""
    ends: bool = True
    """Whether the text ends here; False for the other parts of a long one."""
    why: str = ""
    """Why it cannot be read; empty if it can."""


class Document(NamedTuple):
    row: int
    """Its line or row in the piece, from 1."""
    parts: list[tuple[str, bool]]
    """Its text in parts, and whether each part is scored."""
    size: int
    """Bytes of text."""
    split_hash: int
    """The first 64 bits of its text's hash, which decide whether it is held out."""
    key: bytes
    """A hash of its text and of which parts are scored; documents with the same key are repeats."""
    ends: bool
    """False for a part of a text that goes on in the next piece."""


class Skipped(NamedTuple):
    """A row that is not used; a blank line has no reason."""

    row: int
    why: str


def split_hash_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


# ---- text: a file is a document


def open_source(source: str | bytes):
    """A file; for hf:// the data set that it names."""
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not is_remote(source):
        return open(source, "rb")
    if source.startswith("hf://"):
        return nullcontext(open_dataset(source))
    return io.BufferedReader(fsspec.open(source, "rb").open(), PIECE)


def find_cut(source: str | bytes, at: int, seek_line: bool = True) -> int:
    """The first position from byte `at` on where a line begins; without seek_line, or in a line
    longer than PIECE, where a character begins."""
    with open_source(source) as f:
        f.seek(max(0, at - 1))
        if seek_line and f.readline(PIECE)[-1:] == b"\n":
            return f.tell()
        at = f.seek(max(at, f.tell()))
        return at + len(re.match(rb"[\x80-\xbf]*", f.read(3))[0])


def find_last_line(source: str | bytes, start: int, at: int) -> int:
    """The last position between the bytes `start` and `at` where a line begins; 0 without any."""
    with open_source(source) as f:
        f.seek(start)
        n = f.read(max(0, at - 1 - start)).rfind(b"\n") + 1
        return n and start + n


def hash_long_text(source: str | bytes) -> int:
    """The split_hash of a long text, which is read block by block.  Raises UnicodeDecodeError if it
    is not UTF-8."""
    digest = hashlib.blake2b(digest_size=16)
    with open_source(source) as f:
        for text in codecs.iterdecode(iter(lambda: f.read(PIECE), b""), "utf-8"):
            digest.update(text.encode())
    return split_hash_of(digest.digest())


def cut_bytes(source, start: int, stop: int, split_hash: int) -> list[tuple]:
    """The bytes from start to stop, in pieces that begin where `find_cut` says."""
    cuts = [start, *(find_cut(source, at) for at in range(start + PIECE, stop, PIECE)), stop]
    cuts = sorted({min(cut, stop) for cut in cuts})
    return [(a, b, b - a, split_hash, b == stop) for a, b in pairwise(cuts)]


def cut_text(file: File, options: Options) -> list[tuple]:
    if file.size <= PIECE:
        return [(0, file.size, file.size)]
    return cut_bytes(file.source, 0, file.size, hash_long_text(file.source))


def split_text(file: File, val_fraction: float) -> list[Piece]:
    """The pieces of a single text.  Its last part gets split_hash 0, so that it is held out.

    Raises UserError DATA.
    """
    try:
        hash_long_text(file.source)
    except UnicodeDecodeError:
        raise UserError(DATA, f"{file.name} is not UTF-8", FIX_UTF8) from None
    target = round(file.size * (1 - val_fraction))
    start = max(file.size // 2, target - PIECE)  # a last line that begins before it is cut
    cuts = find_cut(file.source, target), find_last_line(file.source, start, target)
    for cut in (*cuts, find_cut(file.source, target, seek_line=False)):
        if 0 < cut < file.size:
            train = cut_bytes(file.source, 0, cut, 2**64 - 1)
            ranges = train + cut_bytes(file.source, cut, file.size, 0)
            return [Piece("text", file.source, *found) for found in ranges]
    what = f"{file.name} is too short to hold out {val_fraction} of it"
    raise UserError(DATA, what, "give more text")


def read_text(f, piece: Piece, options: Options) -> Iterator[bytes]:
    f.seek(piece.start)
    yield f.read(piece.stop - piece.start)


# ---- lines


def read_line(f) -> bytes:
    """The next line, b"" at the end.  One of more than LIMIT bytes is cut to a bit more than LIMIT,
    so that read_documents skips it."""
    line = rest = f.readline(LIMIT + 3)
    while rest and rest[-1:] != b"\n":
        rest = f.readline(PIECE)
    return line


def cut_lines(file: File, options: Options) -> list[tuple]:
    """Ranges of bytes: a line belongs to the range in which it begins."""
    starts = range(0, file.size, options.piece) or [0]
    return [(a, b, b - a) for a, b in pairwise([*starts, file.size])]


def read_range(f, piece: Piece, options: Options) -> Iterator[bytes]:
    if piece.start:
        f.seek(piece.start - 1)
        # Not beyond the piece: the pieces of a file of one line would each read all of it.
        while (end := f.readline(PIECE)) and end[-1:] != b"\n" and f.tell() < piece.stop:
            pass
    while f.tell() < piece.stop and (line := read_line(f)):
        yield line.rstrip(b"\r\n")


def take_whole(file: File, options: Options) -> list[tuple]:
    """A compressed file, as one piece.  Its text is estimated at three times its size."""
    return [(0, file.size, 3 * file.size)]


class ZstdText(io.RawIOBase):
    """The text of a .zst file, frame after frame.

    zstandard's own reader does not notice that the end of a file is missing.
    """

    def __init__(self, f):
        self.f, self.frame, self.packed, self.text = f, None, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.text and (packed := self.packed or self.f.read(4096)):
            if not self.frame:
                # 2 GB, the most of `zstd --long`, which large dumps of the web are made with.
                decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
                self.frame = decompressor.decompressobj()
            self.text = memoryview(self.frame.decompress(packed))
            self.packed = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        if not self.text and self.frame:
            raise EOFError("Compressed file ended before the end of a frame")
        n = min(len(buffer), len(self.text))
        buffer[:n], self.text = self.text[:n], self.text[n:]
        return n


def read_compressed(f, piece: Piece, options: Options) -> Iterator[bytes]:
    is_gzip = piece.kind.endswith(".gz")
    text = gzip.GzipFile(fileobj=f) if is_gzip else io.BufferedReader(ZstdText(f), PIECE)
    while line := read_line(text):
        yield line


# ---- tables


def columns_of(options: Options) -> list[str]:
    return [name for name in (options.field, options.prompt_field) if name]


def check_columns(file: File, names: list[str], options: Options):
    for name in columns_of(options):
        if (n := names.count(name)) != 1:
            found = f"{n} columns" if n else "no column"
            what = f"{file.name} has {found} {name!r}; its columns: {', '.join(names)[:200]}"
            fix = "name a column that is there once with --field or --prompt_field"
            raise UserError(DATA, what, fix)


MESSAGE_FORMS = {("role", "content"): {}, ("from", "value"): dict(human="user", gpt="assistant")}
"""{fields of a chat's message that are read: the usual names of its roles}.  The second form is
ShareGPT's."""


# {type of text: that of bytes with the same layout}
BYTES_TYPES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def bytes_type(t: pa.DataType) -> pa.DataType:
    """The type, with bytes in place of text, also within lists, structs and dictionaries.  Of a
    struct only the fields of a message are left: others, such as times in nanoseconds, may have no
    Python value."""
    if pa.types.is_struct(t):
        read = [x for x in t if x.name in sum(MESSAGE_FORMS, ())]
        return pa.struct([x.with_type(bytes_type(x.type)) for x in read])
    if pa.types.is_list(t):
        return pa.list_(bytes_type(t.value_type))
    if pa.types.is_large_list(t):
        return pa.large_list(bytes_type(t.value_type))
    if pa.types.is_dictionary(t):
        return pa.dictionary(t.index_type, bytes_type(t.value_type))
    return BYTES_TYPES.get(t, t)


def rows_of(batch, options: Options) -> Iterator[dict]:
    """The rows of a batch of pyarrow, with text as bytes, because it may not be UTF-8."""
    batch = batch.select(columns_of(options))
    batch = batch.cast(pa.schema([x.with_type(bytes_type(x.type)) for x in batch.schema]))
    batch.validate(full=True)  # the offsets of a damaged file may point outside of it
    yield from batch.to_pylist()


def cut_parquet(file: File, options: Options) -> list[tuple]:
    """The row groups."""
    with open_source(file.source) as f:
        about = parquet.ParquetFile(f)
    check_columns(file, about.schema_arrow.names, options)
    names, ranges = tuple(f"{name}." for name in columns_of(options)), []
    for n in range(about.num_row_groups):
        group = about.metadata.row_group(n)
        columns = [group.column(i) for i in range(group.num_columns)]
        read = [c for c in columns if f"{c.path_in_schema}.".startswith(names)]
        ranges.append((n, n + 1, sum(column.total_uncompressed_size for column in read)))
    return ranges


def read_parquet(f, piece: Piece, options: Options) -> Iterator[dict | Exception]:
    """The rows.  An error stands for the rest of its row group, so that pieces that are joined have
    the documents that each has alone."""
    file = parquet.ParquetFile(f)
    for n in range(piece.start, piece.stop):
        try:
            for batch in file.iter_batches(256, [n], columns_of(options)):
                yield from rows_of(batch, options)
        except READ_ERRORS as e:
            yield e


def open_arrow(f) -> ipc.RecordBatchStreamReader:
    """The batches of Arrow's stream format, which `datasets` writes, or of its file format: 8 bytes
    and such a stream."""
    if f.read(8) != b"ARROW1\0\0":
        f.seek(0)
    return ipc.open_stream(f)


def cut_arrow(file: File, options: Options) -> list[tuple]:
    with open_source(file.source) as f:
        check_columns(file, open_arrow(f).schema.names, options)
    return [(0, file.size, file.size)]


def read_arrow(f, piece: Piece, options: Options) -> Iterator[dict]:
    for batch in open_arrow(f):
        yield from rows_of(batch, options)


STREAMED = 2**30
"""The size given to a shard of a streamed data set, so large that each is a task of its own."""


def open_dataset(source: str):
    """hf://org/name[@revision][:config][:split], through the library `datasets`.  Raises
    UserError."""
    try:
        from datasets import load_dataset
    except ImportError:
        fix = "pip install datasets, as docs/data.md says"
        raise UserError(USAGE, f"--input {source} needs the package datasets", fix) from None
    name, config, split = (source.removeprefix("hf://").split(":") + ["", ""])[:3]
    name, _, revision = name.partition("@")
    options = dict(split=split or "train", revision=revision or None, streaming=True)
    return load_dataset(name, config or None, **options)


def cut_dataset(file: File, options: Options) -> list[tuple]:
    try:
        dataset = open_dataset(file.source)
    except (OSError, ValueError, RuntimeError) as e:  # RuntimeError: it has a loading script
        what = f"{file.source}: {' '.join(str(e).split())[:300]}"
        fix = "give another config or split, as hf://org/name:config:split, or a data set with "
        fix += "Parquet files in place of a script; for a gated one, log in with `hf auth login`"
        raise UserError(DATA, what, fix) from None
    if dataset.column_names:  # not known of every data set
        check_columns(file, dataset.column_names, options)
    return [(i, dataset.num_shards, STREAMED) for i in range(dataset.num_shards)]


def read_dataset(dataset, piece: Piece, options: Options) -> Iterator[dict]:
    dataset = dataset.shard(num_shards=piece.stop, index=piece.start)
    if dataset.column_names:  # else images and sounds of other columns would be decoded
        dataset = dataset.select_columns(columns_of(options))
    yield from dataset


# ---- formats


def parse_text(text: bytes) -> str:
    return text.decode("utf-8-sig")  # without a byte order mark


def parse_line(line: bytes) -> str | None:
    return parse_text(line) if line.removeprefix(codecs.BOM_UTF8).strip() else None


def parse_json(line: bytes):
    text = parse_line(line)
    if text is None:
        return None
    row = json.loads(text)
    if not isinstance(row, dict):  # of a string, parts_of would take all as the text
        raise ValueError(f"{'null' if row is None else type(row).__name__} in place of an object")
    return row


class Format(NamedTuple):
    cut: Callable[[File, Options], list[tuple]]
    """The pieces of a file, each as the fields of Piece from `start` on."""
    read: Callable[..., Iterator]
    """(what open_source returns, piece, options) -> the lines, rows or texts of the piece,
    and errors in place of those that cannot be read."""
    parse: Callable
    """A line, row or text -> the text or the row's fields; None for a blank line."""


# C4 and Dolma have lines of JSON in files ending in .json.gz.  A .json file is text, because among
# source code it seldom has a row in each line.
COMPRESSED = tuple(f"{x}{end}" for x in (".jsonl", ".json", ".ndjson") for end in (".gz", ".zst"))

# {suffix or another name: format}.  Files of other suffixes are "text", or with --document_per_line
# "lines".
FORMATS = {
    "text": Format(cut_text, read_text, parse_text),
    "lines": Format(cut_lines, read_range, parse_line),
    **dict.fromkeys((".jsonl", ".ndjson"), Format(cut_lines, read_range, parse_json)),
    **dict.fromkeys(COMPRESSED, Format(take_whole, read_compressed, parse_json)),
    ".parquet": Format(cut_parquet, read_parquet, dict),
    ".arrow": Format(cut_arrow, read_arrow, dict),
    "hf://": Format(cut_dataset, read_dataset, dict),
}
TABLES = tuple(kind for kind in FORMATS if kind[0] == ".")
"""The suffixes of tables; other files are text."""
FIX_UTF8 = "give text in UTF-8; compressed files are read only if they end in "
FIX_UTF8 += or_list(COMPRESSED)

# What the readers raise for a damaged file.  The last three derive from Exception only.
READ_ERRORS = (ValueError, NotImplementedError, EOFError, RecursionError, MemoryError, OSError)
READ_ERRORS += (pa.ArrowException, zlib.error, zstandard.ZstdError)


def describe_damage(e: Exception, source: str | bytes) -> str:
    """What is wrong with a file, in one line.  An error of the storage rather than of the file (it
    has an errno, or the file is in a bucket) is raised again.  Raises UserError DATA where memory
    ran out, because the file may be sound."""
    if isinstance(e, MemoryError):
        fix = "copy the file again if it is damaged, or take a machine with more memory"
        raise UserError(DATA, f"{source} cannot be read: {str(e) or 'out of memory'}", fix)
    is_storage = isinstance(e, OSError) and not isinstance(e, gzip.BadGzipFile)
    if is_storage and (e.errno or is_remote(source)):
        raise e
    return f"cannot be read on from here: {' '.join(str(e).split())[:200]}"


def kind_of(file: File, options: Options) -> str:
    text = "lines" if options.document_per_line else "text"
    if isinstance(file.source, bytes):
        return text
    if file.source.startswith("hf://"):
        return "hf://"
    return next((x for x in TABLES if file.source.endswith(x)), text)


def cut_file(file: File, options: Options) -> list[Piece]:
    """The pieces of a file.  If it cannot be read, one piece that says why."""
    kind = kind_of(file, options)
    try:
        return [Piece(kind, file.source, *x) for x in FORMATS[kind].cut(file, options)]
    except READ_ERRORS as e:
        why = NOT_UTF8 if isinstance(e, UnicodeError) else describe_damage(e, file.source)
        return [Piece(kind, file.source, 0, 0, 0, why=why)]


# ---- documents


def as_text(value):
    return value.decode() if isinstance(value, bytes) else value


def message_of(value, number: int) -> tuple[str, str]:
    """The role and the content of a chat's message, the number-th from 1.  Raises ValueError."""
    form = 'a message is {"role": .., "content": ..} or {"from": .., "value": ..}'
    if not isinstance(value, dict):
        raise ValueError(f"message {number} is of type {type(value).__name__}; {form}")
    keys = next((x for x in MESSAGE_FORMS if value.get(x[0]) is not None), ("role", "content"))
    role, content = (as_text(value.get(key)) for key in keys)
    for key, x in zip(keys, (role, content), strict=True):
        if not isinstance(x, str):
            raise ValueError(f"message {number}: {key} is not text; {form}")
    return MESSAGE_FORMS[keys].get(role, role), content


def parts_of(value, options: Options) -> list[tuple[str, bool]]:
    """The text of a row in parts, and whether each is scored.  Raises ValueError.

    A chat becomes `role: content` and a newline for each message.  The assistant's contents and the
    newlines after them are scored.
    """
    if isinstance(value, str):
        return [(value, True)]
    fields = []
    for name in columns_of(options):
        x = as_text(value.get(name))
        fields.append(x)
        if not isinstance(x, str if name == options.prompt_field else (str, list)):
            what = f"is of type {type(x).__name__}, not text"
            if x is None:
                others = [] if name in value else [*value]
                what = "is missing" + (f": the row has {str(others)[1:-1]}" if others else "")
            raise ValueError(f"field {name!r} {what}")
    text, *prompts = fields
    if isinstance(text, str):
        return [(prompt, False) for prompt in prompts] + [(text, True)] if text else []
    if prompts:
        raise ValueError("--prompt_field does not go with a field of messages")
    parts = []
    for role, content in map(message_of, text, count(1)):
        parts += [(f"{role}: ", False), (f"{content}\n", role == "assistant")]
    if parts and not any(scored for _, scored in parts):
        raise ValueError("no message of the assistant")
    return parts


def read_row(row: int, raw, piece: Piece, options: Options) -> Document | Skipped:
    """What a line, row or text of a piece is, the row-th from 1."""
    try:
        if len(raw) > LIMIT:
            raise ValueError(f"longer than {LIMIT} bytes")
        value = FORMATS[piece.kind].parse(raw)
        if value is None:
            return Skipped(row, "")
        parts = parts_of(value, options)
        data = "".join(text for text, _ in parts).encode()
        if not data or len(data) > LIMIT:
            raise ValueError(f"longer than {LIMIT} bytes" if data else "empty")
    except (ValueError, RecursionError) as e:
        return Skipped(row, NOT_UTF8 if isinstance(e, UnicodeError) else str(e)[:200])
    is_part = piece.split_hash is not None
    # A part is known by its place, because repeats of a long text are cut at the same places.
    hashed = f"{piece.split_hash} {piece.start}".encode() if is_part else data
    key = hashlib.blake2b(hashed, digest_size=16).digest()
    split_hash = piece.split_hash if is_part else split_hash_of(key)
    if len(parts) > 1:  # the same text is no repeat where other parts of it are scored
        key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
    return Document(row, parts, len(data), split_hash, key, piece.ends)


def read_documents(piece: Piece, options: Options) -> Iterator[Document | Skipped]:
    """A Document or a Skipped for each line, row or text of the piece."""
    if piece.why:
        yield Skipped(1, piece.why)
        return
    row = 0
    try:
        with open_source(piece.source) as f:
            for row, raw in enumerate(FORMATS[piece.kind].read(f, piece, options), 1):
                if isinstance(raw, Exception):
                    yield Skipped(row, describe_damage(raw, piece.source))
                else:
                    yield read_row(row, raw, piece, options)
    except READ_ERRORS as e:
        yield Skipped(row + 1, describe_damage(e, piece.source))
