"""Turn text into token shards: OUT/train and OUT/val, each with a manifest.json and its tokenizer.

    python scripts/prepare_data.py --stdlib --out data/demo --vocab_size 4096
    python scripts/prepare_data.py --input book.txt --tokenizer char --out data/book

A file is a document, and ends with the end-of-document token.  One in fifty is held out, chosen by
its name; a single file is cut near its end instead.  Interrupted, the same command goes on after
the last finished shard; finished, it does nothing.
"""

import hashlib
import json
import os
import sys
import sysconfig
import zlib
from dataclasses import asdict, dataclass
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
    """The folder to make, local or gs://; it gets train/ and val/."""
    input: str = ""
    """A text file, or a folder whose files (below it too) are documents."""
    stdlib: tyro.conf.FlagCreatePairsOff[bool] = False
    """Use the Python files of this Python's own standard library, without its tests."""
    suffix: str = ""
    """Take only files that end so, .txt or .md for instance."""
    tokenizer: str = "bpe"
    """byte, char, bpe (byte-level, trained on the text), or the path of a tokenizer.json."""
    vocab_size: int = 4096
    """For bpe: entries, the end-of-document token included."""
    val_fraction: float = 0.02
    """Share of the text that is held out."""
    shard_tokens: int = 100_000_000
    """Tokens at which a shard is closed, at the end of a document."""


# ---- documents


def find_documents(args: Args) -> list[tuple[str, Path]]:
    """(name, path) of each file, in the order of the names; a name does not depend on where the
    folder lies."""
    root = Path(sysconfig.get_paths()["stdlib"] if args.stdlib else args.input)
    suffix = ".py" if args.stdlib else args.suffix
    if root.is_file():
        return [(root.name, root)]
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", ".git"}
    found = []
    for folder, folders, files in os.walk(root):
        visible = [f for f in folders if not f.startswith(".")]
        folders[:] = [f for f in visible if not (args.stdlib and f in skip)]
        for name in files:
            path = Path(folder, name)
            if name.endswith(suffix) and not path.is_symlink() and path.stat().st_size:
                found.append((path.relative_to(root).as_posix(), path))
    if not found:
        what = f"no files{f' ending in {args.suffix!r}' if args.suffix else ''} in {root}"
        raise UserError(DATA, what, "give --input a text file or a folder with text files")
    return sorted(found)


class Piece(NamedTuple):
    """Some whole lines of a document, so that a huge file need not fit in memory."""

    path: Path
    start: int
    stop: int
    ends: bool
    """Whether the document ends with it."""

    def text(self) -> str:
        with open(self.path, "rb") as f:
            f.seek(self.start)
            return f.read(self.stop - self.start).decode("utf-8", errors="replace")


def line_end(path: Path, at: int) -> int:
    """The first line's end from byte `at` on."""
    with open(path, "rb") as f:
        f.seek(max(0, at - 1))
        f.readline()
        return f.tell()


def pieces(path: Path, start: int, stop: int, size: int = 4_000_000) -> list[Piece]:
    """Bytes start .. stop of a file, cut at line ends into pieces of about `size` bytes."""
    cuts = [start, *(line_end(path, at) for at in range(start + size, stop, size)), stop]
    cuts = sorted({min(cut, stop) for cut in cuts})
    return [Piece(path, a, b, b == stop) for a, b in zip(cuts, cuts[1:], strict=False)]


def split(documents, args: Args) -> dict[str, list[Piece]]:
    """{"train": pieces, "val": pieces}: of whole documents, or of the two parts of a single one."""
    parts = dict(train=[], val=[])
    if len(documents) == 1:
        path, size = documents[0][1], documents[0][1].stat().st_size
        cut = line_end(path, round(size * (1 - args.val_fraction)))
        cut = cut if 0 < cut < size else round(size * (1 - args.val_fraction))  # a file of one line
        return dict(train=pieces(path, 0, cut), val=pieces(path, cut, size))
    rank = {name: zlib.crc32(name.encode()) / 2**32 for name, _ in documents}
    n_held = sum(r < args.val_fraction for r in rank.values())
    n_held = min(max(1, n_held), len(rank) - 1)  # a split is never empty
    held = set(sorted(rank, key=rank.get)[:n_held])
    for name, path in documents:
        parts["val" if name in held else "train"] += pieces(path, 0, path.stat().st_size)
    return parts


# ---- tokenizers


def byte_tokenizer() -> Tokenizer:
    """Each byte is its own id; 256 ends a document."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's printable stand-ins
    others = [b for b in range(256) if b not in letters]
    stand_in = {b: chr(b) for b in letters} | {b: chr(256 + n) for n, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={stand_in[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def char_tokenizer(texts) -> Tokenizer:
    """Each character that occurs is an id, in code point order."""
    characters = set()
    for text in texts:
        characters.update(text)
    vocab = {c: n for n, c in enumerate(sorted(characters))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="none"))  # another one is an error
    any_character = Regex("(?m).")  # m: newlines too
    tokenizer.pre_tokenizer = pre_tokenizers.Split(any_character, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    return tokenizer


def bpe_tokenizer(texts, vocab_size: int, n_texts: int) -> Tokenizer:
    """Byte-level BPE, trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,  # of the merges; tqdm shows the reading
    )
    texts = tqdm(texts, desc="train tokenizer", total=n_texts, unit="piece")
    tokenizer.train_from_iterator(texts, trainer, n_texts)
    return tokenizer


def make_tokenizer(args: Args, parts: dict[str, list[Piece]]) -> Tokenizer:
    """From the training text; characters from all of it, or held-out text could not be read."""
    match args.tokenizer:
        case "byte":
            return byte_tokenizer()
        case "char":
            return char_tokenizer(piece.text() for piece in parts["train"] + parts["val"])
        case "bpe":
            texts = (piece.text() for piece in parts["train"])
            return bpe_tokenizer(texts, args.vocab_size, len(parts["train"]))
    tokenizer = Tokenizer.from_str(epath.Path(args.tokenizer).read_text())
    tokenizer.add_special_tokens([END])  # nothing happens where it has one
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# ---- shards


def tokenize(parts: list, out: epath.Path, tokenizer: Tokenizer, recipe: dict, args: Args):
    """Write the shards of one split and then its manifest.

    progress.json says how far a run before this one came.
    """
    vocab_size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
    kind = "uint16" if vocab_size <= 65536 else "uint32"
    progress = out / "progress.json"
    state = json.loads(progress.read_text())
    held, n_held, n_bytes = [], 0, 0

    def close_shard(next_part: int):
        nonlocal held, n_held, n_bytes
        data = npy_bytes(np.concatenate(held))
        name = f"shard_{len(state['shards']):05d}.npy"
        write_whole(out / name, data)
        sha256 = hashlib.sha256(data).hexdigest()
        state["shards"].append(dict(name=name, tokens=n_held, dtype=kind, sha256=sha256))
        state["next"], state["bytes"] = next_part, state["bytes"] + n_bytes
        write_whole(progress, json.dumps(state).encode())
        held, n_held, n_bytes = [], 0, 0

    desc = f"tokenize {out.name}"
    bar = tqdm(total=len(parts), initial=state["next"], desc=desc, unit="piece")
    for at in range(state["next"], len(parts), 32):
        texts = [piece.text() for piece in parts[at : at + 32]]
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for n, text in enumerate(texts):
            held.append(np.array(encoded[n].ids + [end] * parts[at + n].ends, kind))
            n_held, n_bytes = n_held + len(held[-1]), n_bytes + len(text.encode())
            if n_held >= args.shard_tokens:
                close_shard(at + n + 1)
        bar.update(len(texts))
    if held:
        close_shard(len(parts))
    bar.close()
    size, n_shards = state["bytes"], len(state["shards"])
    manifest = dict(format=1, shards=state["shards"], dtype=kind, vocab_size=vocab_size)
    manifest |= dict(eot_id=end, bytes=size, tokenizer="tokenizer.json", recipe=recipe)
    write_whole(out / "manifest.json", json.dumps(manifest, indent=1).encode())
    progress.unlink(missing_ok=True)
    tokens = sum(s["tokens"] for s in state["shards"])
    print(
        f"{out}: {tokens:,} tokens from {size:,} bytes ({size / tokens:.2f} bytes a token) "
        f"in {n_shards} shard(s), vocabulary {vocab_size}"
    )


def main(args: Args):
    """Check the request, make the tokenizer once, and tokenize both splits."""
    if bool(args.input) == args.stdlib:
        fix = "name a file or folder with --input, or say --stdlib"
        raise UserError(USAGE, "give either --input or --stdlib", fix)
    if not 0 < args.val_fraction < 1 or args.shard_tokens < 1 or args.vocab_size < 257:
        names = ("val_fraction", "shard_tokens", "vocab_size")
        what = ", ".join(f"{name}={getattr(args, name)}" for name in names)
        fix = "give a fraction between 0 and 1, 1 token or more, and 257 entries or more"
        raise UserError(USAGE, what, fix)
    if args.input and not Path(args.input).exists():
        what = f"--input {args.input} does not exist"
        raise UserError(DATA, what, "give a text file or a folder of them")
    if args.tokenizer not in ("byte", "char", "bpe") and not epath.Path(args.tokenizer).exists():
        what = f"--tokenizer {args.tokenizer} is none of byte, char and bpe, nor a file"
        raise UserError(USAGE, what, "choose one of those, or give the path of a tokenizer.json")
    documents = find_documents(args)
    parts = split(documents, args)
    if not (parts["train"] and parts["val"]):
        what = f"{documents[0][1]} is too short to hold {args.val_fraction} of it out"
        raise UserError(DATA, what, "give more text")
    sizes = [(name, path.stat().st_size) for name, path in documents]
    recipe = {k: v for k, v in asdict(args).items() if k not in ("out", "input")}
    recipe["documents"] = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
    write_splits(parts, epath.Path(args.out), recipe, args)


def write_splits(parts: dict[str, list[Piece]], out: epath.Path, recipe: dict, args: Args):
    """Make what is not finished yet of both splits, as the recipe says."""
    done = {name: check_out(out / name, recipe) for name in parts}
    if all(done.values()):
        return print(f"{out} is up to date")
    for name in [name for name in parts if not done[name]]:
        (out / name).mkdir(parents=True, exist_ok=True)
        if not (out / name / "progress.json").exists():  # from here on the recipe is fixed
            start = dict(next=0, bytes=0, shards=[], recipe=recipe)
            write_whole(out / name / "progress.json", json.dumps(start).encode())
    path = out / "train" / "tokenizer.json"
    if not path.exists():
        text = make_tokenizer(args, parts).to_str().encode()
        write_whole(out / "val" / "tokenizer.json", text)
        write_whole(path, text)
    tokenizer = Tokenizer.from_str(path.read_text())
    tokenizer.encode_special_tokens = True  # a text that spells a special token stays text
    for name in [name for name in parts if not done[name]]:
        tokenize(parts[name], out / name, tokenizer, recipe, args)


def check_out(out: epath.Path, recipe: dict) -> bool:
    """Whether this split is finished.

    Raises UserError where it was made in another way: it is not overwritten.
    """
    for name in ("manifest.json", "progress.json"):
        if (out / name).exists():
            before = json.loads((out / name).read_text()).get("recipe", {})
            differ = [k for k in before | recipe if before.get(k) != recipe.get(k)]
            if differ:
                what = f"{out} was made with other {', '.join(differ)}"
                raise UserError(DATA, what, "choose another --out, or delete that folder")
            return name == "manifest.json"
    return False


if __name__ == "__main__":
    quit_on_error(main, tyro.cli(Args, use_underscores=True, description=__doc__))
