"""The tasks of prepare_data.py.  From a fixed list of pieces, a task makes one shard of each split,
or several if the pieces have more text than their sizes say.

What a task writes depends on its fields only, so any process on any machine may run it, at any time
and again.  The facts about its shards, task_N.json, are written last: a task without that file has
not been done.
"""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from etils import epath
from tokenizers import Encoding, Tokenizer, models

from errors import DATA, UserError
from files import npy_bytes, write_whole
from scripts.readers import PIECE, Document, Options, Piece, read_documents
from shards import n_ids, page_digest, page_digests

SPLITS = ("train", "val")
LISTED = 1000
"""The most skipped rows of a task that are listed; all are counted."""


class Task(NamedTuple):
    number: int
    pieces: list[Piece]
    out: str
    options: Options
    shard_tokens: int
    end_token: str
    val_below: int
    """Documents whose split_hash is below it are for validation."""
    repeats: frozenset[int] = frozenset()
    """The numbers, from 0, of its documents that repeat an earlier one; they are left out."""

    def path(self, suffix: str) -> epath.Path:
        return epath.Path(self.out) / "progress" / f"task_{self.number:05d}{suffix}"

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class ShardWriter:
    """Writes a task's shards of one split."""

    def __init__(self, task: Task, split: str, dtype: str):
        self.task, self.folder, self.dtype = task, epath.Path(task.out) / split, dtype
        self.shards = []
        self.clear()

    def clear(self):
        self.ids, self.masks, self.n_tokens, self.n_bytes, self.documents = [], [], 0, 0, 0

    def add(self, ids: list[int], is_scored: bool):
        self.ids.append(np.array(ids, self.dtype))
        self.masks.append(np.full(len(ids), is_scored, np.uint8))
        self.n_tokens += len(ids)

    def write(self, name: str, data: bytes) -> str:
        """Write a file and the digests of its pages, and return one digest of these."""
        pages = page_digests(data)
        write_whole(self.folder / name, data)
        write_whole(self.folder / f"{name}.pages", pages)
        return page_digest(pages).hex()

    def close_shard(self):
        """Write what was added since the last shard."""
        if not self.n_tokens:
            return
        stem = f"shard_{self.task.number:05d}" + (f"_{len(self.shards)}" if self.shards else "")
        ids, mask = np.concatenate(self.ids), np.concatenate(self.masks)
        data = npy_bytes(ids)
        facts = dict(name=f"{stem}.npy", tokens=len(ids), offset=len(data) - ids.nbytes)
        facts |= dict(bytes=self.n_bytes, documents=self.documents)
        facts["pages"] = self.write(f"{stem}.npy", data)
        if not mask.all():
            facts["mask"] = self.write(f"{stem}.mask", mask.tobytes())
        self.shards.append(facts)
        self.clear()


# {--out: its tokenizer}.  Not functools.cache: Ray's workers would import its functions from this
# module, which they have only where the command was started in this repository.
LOADED = {}


def load_tokenizer(out: str) -> Tokenizer:
    if out not in LOADED:
        text = (epath.Path(out) / "train" / "tokenizer.json").read_text()
        LOADED[out] = Tokenizer.from_str(text)
        LOADED[out].encode_special_tokens = True  # a special token's name in the text stays text
        hide_special_pieces(LOADED[out], json.loads(text)["model"])
    return LOADED[out]


def hide_special_pieces(tokenizer: Tokenizer, model: dict):
    """Rename the pieces of special tokens inside a Unigram model, which would else find their names
    in a text: `<s>` there would become the token.  Names and ids of the tokens stay.  BPE builds
    its pieces by merges, of which special tokens have none."""
    if model["type"] == "Unigram":
        vocab = [(piece, score) for piece, score in model["vocab"]]
        for n, token in tokenizer.get_added_tokens_decoder().items():
            if token.special and n < len(vocab):
                vocab[n] = f"\U0010ffff{n}", vocab[n][1]  # Unicode has no character there
        tokenizer.model = models.Unigram(vocab, model["unk_id"], model["byte_fallback"])


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    """Raises UserError DATA for text that the tokenizer has no tokens for."""
    try:
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as e:  # tokenizers raises nothing narrower
        what = f"the tokenizer has no token for a part of the text: {e}"
        raise UserError(DATA, what, "give another --tokenizer, such as bpe") from None


def documents_of(task: Task, facts: dict) -> Iterator[Document]:
    """The documents of a task.  It adds to `facts` how many rows each piece has, and the rows that
    it skips."""
    facts |= dict(rows=[], skipped=[], n_skipped=0)
    n = 0
    for number, piece in enumerate(task.pieces):
        row = 0
        for found in read_documents(piece, task.options):
            row = found.row
            if isinstance(found, Document):
                if n not in task.repeats:
                    yield found
                n += 1
            elif found.why:
                facts["n_skipped"] += 1
                if facts["n_skipped"] <= LISTED:
                    facts["skipped"].append([number, row, found.why])
        facts["rows"].append(row)


def cut_document(document: Document) -> Iterator[Document]:
    """A document whose texts have more than PIECE characters in several parts, cut at ends of lines
    where there are any: encoding takes 200 times the memory of the text."""
    parts = []
    for text, is_scored in document.parts:
        while len(text) > PIECE:
            end = text.rfind("\n", 0, PIECE) + 1 or PIECE
            parts.append((text[:end], is_scored))
            text = text[end:]
        parts.append((text, is_scored))
    if len(parts) == len(document.parts):
        return (yield document)
    for n, part in enumerate(parts, 1):
        size, ends = len(part[0].encode()), document.ends and n == len(parts)
        yield document._replace(parts=[part], size=size, ends=ends)


def group_by_size(items: Iterable, size: float) -> Iterator[list]:
    """Lists of consecutive pieces or documents.  Each has at least `size` bytes, except for the
    last."""
    found, n_bytes = [], 0
    for item in items:
        found.append(item)
        n_bytes += item.size
        if n_bytes >= size:
            yield found
            found, n_bytes = [], 0
    if found:
        yield found


def hash_documents(task: Task):
    """Write the hashes of a task's documents, to find those that repeat others."""
    if not task.path(".keys").exists():
        keys = b"".join(document.key for document in documents_of(task, {}))
        write_whole(task.path(".keys"), keys)


def write_shards(task: Task):
    """Write a task's shards, and then the facts about them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks already run in parallel
    tokenizer = load_tokenizer(task.out)
    end_id = tokenizer.token_to_id(task.end_token)
    dtype = "uint16" if n_ids(tokenizer) <= 65536 else "uint32"
    train, val = writers = [ShardWriter(task, split, dtype) for split in SPLITS]
    facts = {}
    documents = chain.from_iterable(map(cut_document, documents_of(task, facts)))
    for batch in group_by_size(documents, 1_000_000):
        texts = [text for document in batch for text, _ in document.parts]
        encodings = iter(encode_texts(tokenizer, texts))
        for document in batch:
            writer = val if document.split_hash < task.val_below else train
            for _, is_scored in document.parts:
                writer.add(next(encodings).ids, is_scored)
            if document.ends:
                writer.add([end_id], document.parts[-1][1])
            writer.n_bytes += document.size
            writer.documents += document.ends
            if writer.n_tokens >= 2 * task.shard_tokens:
                writer.close_shard()
    for writer in writers:
        writer.close_shard()
    facts["shards"] = {split: w.shards for split, w in zip(SPLITS, writers, strict=True)}
    write_whole(task.path(".json"), json.dumps(facts))
