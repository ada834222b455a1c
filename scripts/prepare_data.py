"""Turn text into a data set: token shards with a manifest.json and a tokenizer.json, in OUT/train
and OUT/val.

    python scripts/prepare_data.py --pydocs --out data/demo
    python scripts/prepare_data.py --input book.txt --tokenizer char --out data/book

Each file is a document, and an end-of-document token follows it.  One document in fifty, chosen by
its name, is held out for validation; a single file is cut near its end instead.  An interrupted
command, given again, continues after the last complete shard.  A finished data set is not changed.
"""

import ast
import hashlib
import inspect
import io
import json
import os
import re
import sys
import sysconfig
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro
from etils import epath
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from cli import quit_on_error
from config import DATA, END, USAGE, UserError
from files import npy_bytes, write_whole


@dataclass(frozen=True)
class Args:
    out: str
    """Folder to write to, local or gs://.  It gets train/ and val/."""
    input: str = ""
    """A text file, or a folder: each file in it and in its subfolders is a document."""
    stdlib: tyro.conf.FlagCreatePairsOff[bool] = False
    """Use the source code of Python's standard library, without its tests."""
    pydocs: tyro.conf.FlagCreatePairsOff[bool] = False
    """Use the prose in Python's documentation: docstrings, and the topics of help()."""
    suffix: str = ""
    """With --input: use only files whose names end with this, such as .txt or .md."""
    tokenizer: str = "bpe"
    """byte, char, bpe (byte-level, trained on the text), or the path of a tokenizer.json."""
    vocab_size: int = 4096
    """With bpe: size of the vocabulary, which includes the end-of-document token."""
    val_fraction: float = 0.02
    """Share of the text that is held out for validation."""
    shard_tokens: int = 100_000_000
    """A shard ends with the document that brings it to this many tokens."""


# A bar is shown on a terminal only (disable=None), and erased when it is full.
progress_bar = partial(tqdm, unit="piece", leave=False, disable=None)


def say(text: str):
    print(text, flush=True)


# ---- documents: pairs (name, source).  A source is a file, or the text itself as bytes.

NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def find_files(root: Path, suffix: str, excluded: set[str]) -> list[tuple[str, Path]]:
    """(path below root, path) of each file, sorted.

    Leaves out empty files, symbolic links, and folders that are hidden or have an excluded name.
    """
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in excluded]
        for name in files:
            path = Path(folder, name)
            if name.endswith(suffix) and not path.is_symlink() and path.stat().st_size:
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def find_documents(args: Args) -> list[tuple[str, Path | bytes]]:
    """All documents, in the order of their names.  Raises UserError DATA if there are none.

    A name does not depend on where the folder is: it decides whether the document is held out.
    """
    root, suffix, excluded = Path(args.input), args.suffix, set()
    if args.stdlib or args.pydocs:
        root, suffix, excluded = Path(sysconfig.get_paths()["stdlib"]), ".py", NOT_STDLIB
    documents = [(root.name, root)] if root.is_file() else find_files(root, suffix, excluded)
    if args.pydocs:
        documents = prose_documents(documents)
    if not documents:
        what = f"no files{f' ending in {suffix!r}' if suffix else ''} in {root}"
        raise UserError(DATA, what, "give --input a text file or a folder with text files")
    return documents


def size_of(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def open_bytes(source: Path | bytes):
    return io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")


# ---- the prose in Python's documentation

WITHOUT_PROSE = ("encodings/", "idlelib/")
TOPICS = "pydoc_data/topics.py"  # one dict: {topic: its text}

ASCII_PUNCTUATION = str.maketrans("\u201c\u201d\u2018\u2019\u2013\u2014", "\"\"''--")
LIST_ITEM = r"(?:[*+-]|\d+[.)]|\(\d+\))\s+"
PARAGRAPH_BREAK = re.compile(rf"\n\s*\n|\n\s*(?={LIST_ITEM})")
# Each of these marks a name or a phrase: :func:`x`, ``x``, `x' or `x`, *x* or **x**, "x" or 'x'.
MARKUP = [
    re.compile(r":[a-z:]+:`~?(?P<text>[^`]+)`"),
    re.compile(r"``(?P<text>[^`]+)``"),
    re.compile(r"`(?P<text>[^`']+)[`']"),
    re.compile(r"(?<![\w*])(\*\*?)(?P<text>\w[^*]*)\1(?![\w*])"),
    re.compile(r"(?<!\w)([\"'])(?P<text>[\w.]+(\(\))?)\1(?!\w)"),
]
# The last sentence of a paragraph if it announces a list or an example; it is left out.
LEAD_IN = re.compile(r"(?<=[.!?]) [^.!?]*:$")
# In wrapped text only the last line of a paragraph, or of a sentence, is this short.
SHORT_LINE = re.compile(r"^.{,28}[^.!?\n]\n", re.M)
SENTENCES = re.compile(r"[(\"']*[A-Z].*[.!?][)\"']*")
WORD = re.compile(r"[(\"']*[A-Za-z]+([/'-][A-Za-z]+)*[)\"'.,;:!?]*")
# Code, tables, grammars, accents, addresses, lists of PEPs, histories of versions, and licences.
NOT_PROSE = re.compile(
    r">>>|::|->|[^ -~]|[{}\\<>=@|]|https?:|Copyright|([A-Z]{2,} ){3}"
    r"|^PEP \d+ -|^(New|Changed|Added|Deprecated) in version"
)


def find_prose(text: str) -> list[str]:
    """The paragraphs of a docstring that are prose, each on one line and without markup.

    Less text, but easier for a small model: of the words that the demo's model samples (at
    temperature 0.8), 3 % do not occur in its training text.  With the same docstrings and topics
    uncut it was 7 %.
    """
    found = []
    for paragraph in PARAGRAPH_BREAK.split(inspect.cleandoc(text).translate(ASCII_PUNCTUATION)):
        wrapped = "\n".join(line.strip() for line in paragraph.strip().splitlines())
        line = LEAD_IN.sub("", re.sub(f"^{LIST_ITEM}", "", " ".join(wrapped.split())))
        for pattern in MARKUP:
            line = pattern.sub(r"\g<text>", line)
        words = line.split()
        n_plain = sum(WORD.fullmatch(word) is not None for word in words)
        if (
            len(words) >= 5
            and n_plain >= 0.9 * len(words)
            and SENTENCES.fullmatch(line)
            and not SHORT_LINE.search(wrapped)
            and not NOT_PROSE.search(line)
            and line.count("(") == line.count(")")
            and line.count('"') % 2 == 0
        ):
            found.append(line)
    return found


def read_documentation(name: str, path: Path) -> dict[str, str]:
    """{name of a document: text} of a Python file: its docstrings of at least 80 characters.

    A document is a class with its methods, a function, the docstring of the module, or a topic.
    The file is parsed, not imported.
    """
    tree = ast.parse(path.read_bytes())
    if name == TOPICS:
        topics = next(node for node in ast.walk(tree) if isinstance(node, ast.Dict))
        return {f"{name}:{topic}": text for topic, text in ast.literal_eval(topics).items()}
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = {name: [tree]}  # {document: the nodes whose docstrings it has}
    for statement in tree.body:
        inside = [node for node in ast.walk(statement) if isinstance(node, kinds)]
        nodes[f"{name}:{statement.lineno}"] = inside
    documents = {}
    for document in nodes:
        texts = [ast.get_docstring(node) or "" for node in nodes[document]]
        documents[document] = "\n\n".join(text for text in texts if len(text) >= 80)
    return documents


def prose_documents(files: list[tuple[str, Path]]) -> list[tuple[str, bytes]]:
    """The documents that have prose, in the order of the files.

    A paragraph that is repeated, as in subclasses and in topics, is kept only the first time.
    """
    documents, seen = [], set()
    for file, path in files:
        if file.startswith(WITHOUT_PROSE):
            continue
        for name, text in read_documentation(file, path).items():
            paragraphs = [x for x in dict.fromkeys(find_prose(text)) if x not in seen]
            seen.update(paragraphs)
            if paragraphs:
                documents.append((name, "\n\n".join(paragraphs).encode()))
    return documents


# ---- pieces of documents, and the split


class Piece(NamedTuple):
    """Whole lines of a document, few enough that they fit in memory where the document may not."""

    source: Path | bytes
    start: int
    stop: int
    is_last: bool
    """Whether the document ends here."""

    def text(self) -> str:
        with open_bytes(self.source) as f:
            f.seek(self.start)
            return f.read(self.stop - self.start).decode("utf-8", errors="replace")


def find_line_end(source: Path | bytes, at: int) -> int:
    """The first position from byte `at` on that follows a newline; the end where there is none."""
    with open_bytes(source) as f:
        f.seek(max(0, at - 1))
        f.readline()
        return f.tell()


def cut_into_pieces(source, start: int, stop: int, size: int = 4_000_000) -> list[Piece]:
    """Pieces of about `size` bytes, cut at line ends, of the bytes from start to stop."""
    cuts = [start, *(find_line_end(source, at) for at in range(start + size, stop, size)), stop]
    cuts = sorted({min(cut, stop) for cut in cuts})
    return [Piece(source, a, b, b == stop) for a, b in zip(cuts, cuts[1:], strict=False)]


def split_documents(documents, val_fraction: float) -> dict[str, list[Piece]]:
    """{"train": pieces, "val": pieces}, each of whole documents; a single document is cut in
    two."""
    if len(documents) == 1:
        source, size = documents[0][1], size_of(documents[0][1])
        target = round(size * (1 - val_fraction))
        cut = find_line_end(source, target)
        cut = cut if 0 < cut < size else target  # a file of one line
        return dict(train=cut_into_pieces(source, 0, cut), val=cut_into_pieces(source, cut, size))
    rank = {name: zlib.crc32(name.encode()) / 2**32 for name, _ in documents}
    n_val = sum(r < val_fraction for r in rank.values())
    n_val = min(max(1, n_val), len(rank) - 1)  # neither split is empty
    val_names = set(sorted(rank, key=rank.get)[:n_val])
    splits = dict(train=[], val=[])
    for name, source in documents:
        split = "val" if name in val_names else "train"
        splits[split] += cut_into_pieces(source, 0, size_of(source))
    return splits


# ---- tokenizers


def byte_tokenizer() -> Tokenizer:
    """Each byte is its own id; 256 ends a document."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 keeps these
    others = [b for b in range(256) if b not in letters]
    stand_in = {b: chr(b) for b in letters} | {b: chr(256 + n) for n, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={stand_in[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def char_tokenizer(pieces: list[Piece]) -> Tokenizer:
    """Each character that occurs has an id, in the order of code points."""
    characters = set()
    for piece in progress_bar(pieces, desc="find characters"):
        characters.update(piece.text())
    vocab = {c: n for n, c in enumerate(sorted(characters))}
    # "none" is not in the vocabulary, so a character without an id is an error.
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="none"))
    any_character = Regex("(?m).")  # m: newlines too
    tokenizer.pre_tokenizer = pre_tokenizers.Split(any_character, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    return tokenizer


def bpe_tokenizer(pieces: list[Piece], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, trained on the pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # it would print its bars into log files too
    )
    texts = (piece.text() for piece in progress_bar(pieces, desc="train tokenizer"))
    tokenizer.train_from_iterator(texts, trainer, len(pieces))
    return tokenizer


def make_tokenizer(args: Args, splits: dict[str, list[Piece]]) -> Tokenizer:
    match args.tokenizer:
        case "byte":
            return byte_tokenizer()
        case "char":  # from both splits, since a character without an id could not be evaluated
            return char_tokenizer(splits["train"] + splits["val"])
        case "bpe":
            n = len(splits["train"])
            say(f"training a tokenizer of {args.vocab_size:,} tokens on {n:,} piece(s) of text")
            return bpe_tokenizer(splits["train"], args.vocab_size)
    tokenizer = Tokenizer.from_str(epath.Path(args.tokenizer).read_text())
    tokenizer.add_special_tokens([END])  # does nothing if it has this token
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# ---- shards


class ShardWriter:
    """Writes the shards of one split, and after each the state in progress.json, from which an
    interrupted command continues."""

    def __init__(self, out: epath.Path, dtype: str):
        self.out, self.dtype = out, dtype
        self.state = json.loads((out / "progress.json").read_text())
        self.arrays, self.n_tokens, self.n_bytes = [], 0, 0

    def add(self, ids: list[int], n_bytes: int):
        self.arrays.append(np.array(ids, self.dtype))
        self.n_tokens, self.n_bytes = self.n_tokens + len(ids), self.n_bytes + n_bytes

    def close_shard(self, next_piece: int):
        """Write what was added since the last shard; the next one begins with that piece."""
        data, state = npy_bytes(np.concatenate(self.arrays)), self.state
        name = f"shard_{len(state['shards']):05d}.npy"
        write_whole(self.out / name, data)
        facts = dict(name=name, tokens=self.n_tokens, dtype=self.dtype)
        state["shards"].append(facts | dict(sha256=hashlib.sha256(data).hexdigest()))
        state["next"], state["bytes"] = next_piece, state["bytes"] + self.n_bytes
        write_whole(self.out / "progress.json", json.dumps(state))
        self.arrays, self.n_tokens, self.n_bytes = [], 0, 0


def tokenize(pieces: list[Piece], out: epath.Path, tokenizer: Tokenizer, recipe: dict, args: Args):
    """Write the shards of one split and then its manifest."""
    vocab_size, end_id = tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
    dtype = "uint16" if vocab_size <= 65536 else "uint32"
    writer = ShardWriter(out, dtype)
    state = writer.state
    with progress_bar(total=len(pieces), initial=state["next"], desc=f"tokenize {out.name}") as bar:
        for first in range(state["next"], len(pieces), 32):
            batch = pieces[first : first + 32]
            texts = [piece.text() for piece in batch]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for n, piece in enumerate(batch):
                ids = encodings[n].ids + ([end_id] if piece.is_last else [])
                writer.add(ids, len(texts[n].encode()))
                if writer.n_tokens >= args.shard_tokens:
                    writer.close_shard(first + n + 1)
            bar.update(len(batch))
    if writer.arrays:
        writer.close_shard(len(pieces))
    shards, n_bytes = state["shards"], state["bytes"]
    manifest = dict(format=1, shards=shards, dtype=dtype, vocab_size=vocab_size, eot_id=end_id)
    manifest |= dict(bytes=n_bytes, tokenizer="tokenizer.json", recipe=recipe)
    write_whole(out / "manifest.json", json.dumps(manifest, indent=1))
    (out / "progress.json").unlink(missing_ok=True)
    n_tokens = sum(shard["tokens"] for shard in shards)
    size = f"{n_tokens:,} tokens from {n_bytes:,} bytes ({n_bytes / n_tokens:.2f} bytes per token)"
    say(f"{out}: {size} in {len(shards)} shard(s), vocabulary {vocab_size:,}")


def is_finished(out: epath.Path, recipe: dict) -> bool:
    """Whether this split has a manifest.  Raises UserError DATA if it was made with another recipe,
    since nothing is overwritten."""
    for name in ("manifest.json", "progress.json"):
        if (out / name).exists():
            old = json.loads((out / name).read_text()).get("recipe", {})
            # A flag that did not exist when the split was made was off.
            differ = [k for k in old | recipe if old.get(k, False) != recipe.get(k, False)]
            if differ:
                what = f"{out} was made with other {', '.join(differ)}"
                raise UserError(DATA, what, "choose another --out, or delete that folder")
            return name == "manifest.json"
    return False


def write_splits(splits: dict[str, list[Piece]], out: epath.Path, recipe: dict, args: Args):
    """Write each split that is not finished."""
    unfinished = [name for name in splits if not is_finished(out / name, recipe)]
    if not unfinished:
        return say(f"{out} is up to date")
    for name in unfinished:
        (out / name).mkdir(parents=True, exist_ok=True)
        if not (out / name / "progress.json").exists():  # from now on the recipe is fixed
            state = dict(next=0, bytes=0, shards=[], recipe=recipe)
            write_whole(out / name / "progress.json", json.dumps(state))
    path = out / "train" / "tokenizer.json"
    if not path.exists():
        text = make_tokenizer(args, splits).to_str()
        write_whole(out / "val" / "tokenizer.json", text)
        write_whole(path, text)
    tokenizer = Tokenizer.from_str(path.read_text())
    tokenizer.encode_special_tokens = True  # a special token's name in the text stays text
    for name in unfinished:
        tokenize(splits[name], out / name, tokenizer, recipe, args)


def check_args(args: Args):
    """Raise UserError USAGE or DATA for flags that cannot work."""
    n_sources = bool(args.input) + args.stdlib + args.pydocs
    if n_sources != 1:
        what = f"{n_sources} of --input, --stdlib and --pydocs are given, not 1"
        raise UserError(USAGE, what, "give one: --input FILE_OR_FOLDER, --stdlib or --pydocs")
    if not 0 < args.val_fraction < 1 or args.shard_tokens < 1 or args.vocab_size < 257:
        names = ("val_fraction", "shard_tokens", "vocab_size")
        what = ", ".join(f"{name}={getattr(args, name)}" for name in names)
        fix = "give a fraction between 0 and 1, at least 1 token, and a vocabulary of at least 257"
        raise UserError(USAGE, what, fix)
    if args.input and not Path(args.input).exists():
        what = f"--input {args.input} does not exist"
        raise UserError(DATA, what, "give a text file or a folder with text files")
    if args.tokenizer not in ("byte", "char", "bpe") and not epath.Path(args.tokenizer).exists():
        what = f"--tokenizer {args.tokenizer} is none of byte, char and bpe, nor a file"
        raise UserError(USAGE, what, "choose one of those, or give the path of a tokenizer.json")


def main(args: Args):
    """Find the documents, split them, and write both splits."""
    check_args(args)
    documents = find_documents(args)
    splits = split_documents(documents, args.val_fraction)
    if not (splits["train"] and splits["val"]):
        what = f"{documents[0][0]} is too short to hold out {args.val_fraction} of it"
        raise UserError(DATA, what, "give more text")
    recipe = {k: v for k, v in asdict(args).items() if k not in ("out", "input")}
    sizes = [(name, size_of(source)) for name, source in documents]
    say(f"found {len(sizes):,} document(s), {sum(size for _, size in sizes):,} bytes")
    recipe["documents"] = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
    write_splits(splits, epath.Path(args.out), recipe, args)


if __name__ == "__main__":
    quit_on_error(main, tyro.cli(Args, use_underscores=True, description=__doc__))
