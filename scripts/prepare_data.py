"""Turn text into a data set: token shards with a manifest.json and a tokenizer.json, in OUT/train
and OUT/val.

    python scripts/prepare_data.py --pydocs --val_fraction 0.05 --out data/demo
    python scripts/prepare_data.py --input book.txt --tokenizer char --out data/book
    python scripts/prepare_data.py --input 'web/*.parquet' more.jsonl --field text --out data/tables

A text file, or a row of a table, is a document, and an end-of-document token follows it.  One
document in fifty, chosen by a hash of its text, is held out for validation; a single text is cut
near its end instead.  An interrupted command, given again, continues with the shards that are
missing.  A finished data set is not changed.
"""

# This file has the flags, the plan and the manifests.  Finding files is in corpus.py, their formats
# in readers.py, the tasks in shard_tasks.py, the processes that run them in workers.py, and the
# tokenizers in vocabularies.py.

import hashlib
import io
import json
import os
import re
import signal
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from itertools import chain, repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from etils import epath
from tokenizers import Tokenizer
from tqdm import tqdm

from cli import quit_on_error, read_args, too_low
from config import END, Flag
from errors import DATA, USAGE, Problem, UserError, or_list, raise_problems
from files import absolute_path, is_remote, paths_in, thread_map, write_whole
from scripts import readers, shard_tasks
from scripts.corpus import File, find_files, find_input, real_path
from scripts.outputs import check_output
from scripts.pydocs import prose_documents
from scripts.readers import PIECE, Document, Options, Piece
from scripts.shard_tasks import SPLITS, Task
from scripts.vocabularies import bpe_tokenizer, byte_tokenizer, char_tokenizer, read_tokenizer
from scripts.workers import run_tasks
from shards import are_different, manifest_digest, n_ids, tokenizer_text


@dataclass(frozen=True)
class Args:
    out: str
    """Folder to write to, local or gs://.  It gets train/ and val/."""
    input: tuple[str, ...] = ()
    """Files, folders and patterns, local or gs://, and data sets hf://org/name:config:split.
    By suffix: .parquet, .arrow, .jsonl and .ndjson are tables, and so are .jsonl, .ndjson and .json
    followed by .gz or .zst; the rest is text."""
    stdlib: Flag = False
    """Use the source code of Python's standard library, without its tests."""
    pydocs: Flag = False
    """Use the prose in Python's documentation: docstrings, and the topics of help()."""
    suffix: str = ""
    """With --input: use only files whose names end with this, such as .txt or .md."""
    field: str = "text"
    """Field or column with a document's text, or with the messages of a chat.
    In a chat only the assistant's messages are scored."""
    prompt_field: str = ""
    """Field or column with a prompt that precedes the text and is not scored."""
    document_per_line: Flag = False
    """Each line of a text file is a document."""
    dedup: Flag = False
    """Drop documents that repeat an earlier one exactly."""
    strict: Flag = False
    """Stop at a row or file that cannot be used; without it they are skipped and listed."""
    tokenizer: str = "bpe"
    """byte, char, bpe (byte-level, trained on the text), or the path of a tokenizer.json."""
    end_token: str = ""
    """With the path of a tokenizer.json: its token that ends a document, such as </s>.
    <|endoftext|> unless the tokenizer has other special tokens and not this one."""
    vocab_size: int = 4096
    """With bpe: size of the vocabulary, which includes the end-of-document token."""
    val_fraction: float = 0.02
    """Share of the documents that is held out for validation."""
    shard_tokens: int = 100_000_000
    """Tokens of a shard, roughly: texts are assigned to shards by their size in bytes.
    A smaller corpus gets up to 256 shards of at least 4 MB of text, to keep all workers busy."""
    workers: int = 0
    """Processes that tokenize in parallel; 0 is one for each core."""
    ray: str = ""
    """Address of a Ray cluster that does the work; local starts one on this machine."""


MADE = ("byte", "char", "bpe")
"""The tokenizers that this script makes; --tokenizer has the path of any other."""
SAMPLE = 100_000_000
"""Bytes of text that a tokenizer is trained on, from places spread evenly over the corpus."""


class LogFile(io.TextIOBase):
    """Stderr for a bar where there is no terminal: each text that the bar writes becomes a line."""

    def write(self, text: str):
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)


def progress_bar(*args, **kwargs) -> tqdm:
    """A bar that is erased when it is full; where there is no terminal, a line each 30 seconds."""
    options = dict(unit="B", unit_scale=True, leave=False)
    if not sys.stderr.isatty():
        form = "{desc}: {n_fmt} of {total_fmt} in {elapsed}, {remaining} left, {rate_fmt}{postfix}"
        options |= dict(file=LogFile(), bar_format=form, delay=30, mininterval=30, miniters=1)
    return tqdm(*args, **options | kwargs)


def say(text: str):
    print(text, flush=True)


# ---- files and pieces

NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def find_corpus(args: Args) -> list[File]:
    """All files, or the documents of --pydocs.  Raises UserError DATA if there are none."""
    if not (args.stdlib or args.pydocs):
        files, out = {}, real_path(args.out)
        for file in chain.from_iterable(find_input(x, args.suffix, out) for x in args.input):
            # Once, also where links or several --input lead to it.
            files.setdefault(real_path(file.source), file)
        return list(files.values())
    found = find_files(Path(sysconfig.get_paths()["stdlib"]), ".py", NOT_STDLIB)
    if args.pydocs:
        return [File(name, text, len(text)) for name, text in prose_documents(found)]
    return [file._replace(modified=0) for file in found]


FROM_ARRAY = "`jq -c '.[]' data.json > data.jsonl` makes a table of an array of rows"
# {suffix of files that may be meant as tables, but are read as text: what makes tables of them}
CONVERT = {
    ".json": f"rename those with a row in each line to .jsonl; {FROM_ARRAY}",
    **dict.fromkeys((".csv", ".tsv"), "convert tables to .jsonl or .parquet"),
}


def say_what_is_text(files: list[File], kinds: list[str]):
    """Say which files are read as text that may be meant as tables, or may be there by mistake."""
    for suffix, note in CONVERT.items():
        if suffix not in readers.FORMATS and any(file.name.endswith(suffix) for file in files):
            say(f"files ending in {suffix} are read as text; {note}")
    tables = [kind for kind in kinds if kind in readers.TABLES]
    n_texts = sum(kind in ("text", "lines") for kind in kinds)
    if tables and n_texts:
        suffixes = or_list(sorted(set(tables)))
        note = f"--suffix takes one kind alone: {suffixes}"
        say(f"{len(tables):,} file(s) are tables, {n_texts:,} are read as text; {note}")


def cut_corpus(files: list[File], options: Options, val_fraction: float) -> list[Piece]:
    """The pieces of all files.  Raises UserError USAGE for flags about fields or lines, if no file
    has any."""
    kinds = [readers.kind_of(file, options) for file in files]
    say_what_is_text(files, kinds)
    if {*kinds} <= {"text", "lines"} and (options.prompt_field or options.field != "text"):
        what = "--field or --prompt_field is given, but no file is a table with fields"
        fix = f"leave them out, or give tables: files ending in {or_list(readers.TABLES)}"
        fix += f"; {FROM_ARRAY}"
        raise UserError(USAGE, what, fix)
    if options.document_per_line and "lines" not in kinds:
        what = "--document_per_line is given, but no file has lines of text: all are tables"
        raise UserError(USAGE, what, "leave it out: each row of a table is a document")
    not_empty = [file for file in files if file.size] or files
    if len(not_empty) == 1 and readers.kind_of(not_empty[0], options) == "text":
        return readers.split_text(not_empty[0], val_fraction)
    return [*chain.from_iterable(thread_map(readers.cut_file, files, repeat(options)))]


def join_pieces(pieces: list[Piece]) -> list[Piece]:
    """The pieces.  Those that follow each other in a file become one, so that it is opened once."""
    found = []
    for piece in pieces:
        last = found[-1] if found else None
        is_part = piece.split_hash is not None  # of a long text
        if last and not is_part and last[:2] == piece[:2] and last.stop == piece.start > 0:
            found[-1] = last._replace(stop=piece.stop, size=last.size + piece.size)
        else:
            found.append(piece)
    return found


# ---- the plan: the tokenizer, and what the tasks are


def sample_texts(
    pieces: list[Piece], options: Options, val_below: int, limit: int, n_parts: int = 256
) -> Iterator[str]:
    """The texts whose split_hash is not below val_below.  From a corpus of more than `limit` bytes
    about that many, from the beginnings of `n_parts` parts of equal size."""
    total = sum(piece.size for piece in pieces)
    # A part may be many small files: one of each would be too little to train a tokenizer on.
    size = total / n_parts if total > limit else 0
    parts = [*shard_tasks.group_by_size(pieces, size)]
    limit //= len(parts) if size else 1
    for part in progress_bar(parts, desc="read a sample", unit="part"):
        left = limit
        for found in chain.from_iterable(readers.read_documents(x, options) for x in part):
            if isinstance(found, Document) and found.split_hash >= val_below:
                yield "".join(text for text, _ in found.parts)
                left -= found.size
            if left <= 0:
                break


def make_tokenizer(args: Args, pieces: list[Piece], options: Options, val_below: int) -> Tokenizer:
    match args.tokenizer:
        case "byte":
            return byte_tokenizer()
        case "char":  # from all text, since a character without an id could not be evaluated
            return char_tokenizer(sample_texts(pieces, options, 0, 2**62))
        case "bpe":
            n = len(pieces)
            say(f"training a tokenizer of {args.vocab_size:,} tokens on {n:,} piece(s) of text")
            return bpe_tokenizer(sample_texts(pieces, options, val_below, SAMPLE), args.vocab_size)
    return read_tokenizer(args.tokenizer, args.end_token)


def choose_val_below(pieces: list[Piece], options: Options, val_fraction: float) -> int:
    """The split_hash below which documents are for validation, so that about val_fraction of them
    are, but at least one is and one is not.

    It reads until both splits have a document.  Raises UserError DATA if that is impossible.
    """
    val_below = round(val_fraction * 2**64)  # hashes are uniform below 2**64
    low, high = 2**64, -1  # the smallest and the largest split_hash read so far
    why, n_skipped = "", 0  # the reason for the first skipped row
    for found in chain.from_iterable(readers.read_documents(piece, options) for piece in pieces):
        if isinstance(found, Document):
            low, high = min(low, found.split_hash), max(high, found.split_hash)
            if low < val_below <= high:
                return val_below
        elif found.why:
            why, n_skipped = why or found.why, n_skipped + 1
            if n_skipped == 100_000 and low > high:  # the rest of a large corpus can take hours
                say(f"no document yet, and {n_skipped:,} rows skipped; the first: {why}")
    if low > high:
        n_files = len({piece.source for piece in pieces})
        what = f"no documents in {n_files} file(s): {why or 'no rows'}"
        fix = "give other files, or name the right --field"
        raise UserError(DATA, what, readers.FIX_UTF8 if why == readers.NOT_UTF8 else fix)
    if low == high:
        what = "there is only one document, or all are the same"
        what += f"; others are skipped: {why}" if why else ""
        raise UserError(DATA, what, "give more documents, or a single text file to cut in two")
    return low + 1 if val_below <= low else high


def make_plan(args: Args, out, pieces: list[Piece], options, recipe: dict, times: str) -> dict:
    """{recipe, threshold, size (bytes of text of a task)}, also written to progress/plan.json, and
    the tokenizer in its files.  If an interrupted command has written them, they are kept.
    """
    path, tokenizer_path = out / "progress" / "plan.json", out / "train" / "tokenizer.json"
    if path.exists() and tokenizer_path.exists():
        return json.loads(path.read_text())
    val_below = choose_val_below(pieces, options, args.val_fraction)
    texts = [text[:PIECE] for text in sample_texts(pieces, options, 0, 1_000_000, 16)]
    tokenizer = make_tokenizer(args, pieces, options, val_below)
    encodings = shard_tasks.encode_texts(tokenizer, texts)
    n_bytes = sum(len(text.encode()) for text in texts)
    # Both are 0 if the sample has only rows that are skipped.
    bytes_per_token = max(1, n_bytes) / max(1, sum(map(len, encodings)))
    size = min(args.shard_tokens * bytes_per_token, max(PIECE, sum(p.size for p in pieces) / 256))
    plan = dict(recipe=recipe, threshold=val_below, size=size)
    for folder in ("progress", *SPLITS):
        (out / folder).mkdir(parents=True, exist_ok=True)
    write_whole(out / "times.sha256", times)
    write_whole(path, json.dumps(plan))  # from now on the recipe is fixed
    for split in reversed(SPLITS):  # train last: with its tokenizer the plan is complete
        write_whole(out / split / "tokenizer.json", tokenizer.to_str())
    return plan


# ---- what is there already

# Flags that change nothing in the data, and --input, for which `documents` stands.
NOT_RECIPE = ("out", "input", "strict", "workers", "ray")


def make_recipe(args: Args, files: list[File]) -> tuple[dict, str]:
    """(recipe, times): what decides the content of the data set, and a hash of the times when the
    files were modified, as far as they are known."""

    def digest(values: list) -> str:
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    files = [file for file in files if file.size]
    recipe = {name: x for name, x in asdict(args).items() if name not in NOT_RECIPE}
    recipe["end_token"] = args.end_token or END
    recipe["documents"] = digest([(file.name, file.size) for file in files])
    return recipe, digest([(file.name, file.modified) for file in files if file.modified])


def changed_fields(path: epath.Path, recipe: dict) -> list[str]:
    """The fields in which a recipe differs from that of a manifest or plan.  Raises UserError DATA
    if the file is damaged."""
    try:
        old = dict(json.loads(path.read_text())["recipe"])
    except (ValueError, KeyError, TypeError) as e:
        what = f"{path} is damaged: {type(e).__name__} {e}"
        fix = f"delete {path.parent.parent}, or choose another --out"
        raise UserError(DATA, what, fix) from None
    # Flags added since the data was made count as their defaults.
    defaults = {f.name: f.default for f in fields(Args) if f.name in recipe}
    old = defaults | dict(end_token=END) | old
    return [name for name in old | recipe if old.get(name) != recipe.get(name)]


def files_made(out: epath.Path) -> list[epath.Path]:
    """The shards and tokenizers in `out`, without files that this script never writes."""
    patterns = [f"{split}/{name}" for split in SPLITS for name in ("shard_*", "tokenizer.json")]
    return [path for pattern in patterns for path in paths_in(out, pattern)]


def remove_progress(out: epath.Path):
    """Remove progress/, without files that this script never writes."""
    folder = out / "progress"
    found = [*folder.iterdir()] if folder.exists() else []
    mine = [x for x in found if re.fullmatch(r"task_\d+.*|(plan\.json|refused)(\.part)?", x.name)]
    if len(mine) == len(found):
        return folder.rmtree(missing_ok=True)
    for path in mine:
        path.unlink()


def modified_inputs(out: epath.Path, recipe: dict, times: str) -> list[str]:
    """["documents"] if a file of the corpus was modified since `out` was begun, or ["tokenizer"] if
    the tokenizer's was.  Raises what read_tokenizer raises."""
    # Not in the manifests, which do not depend on when the files were copied to a machine.
    old_times, used = out / "times.sha256", out / "train" / "tokenizer.json"
    if old_times.exists() and old_times.read_text() != times:
        return ["documents"]
    if recipe["tokenizer"] in MADE or not used.exists():
        return []
    now = read_tokenizer(recipe["tokenizer"], recipe["end_token"]).to_str()
    return ["tokenizer"] if are_different(tokenizer_text(used), now) else []


def check_or_reset(out: epath.Path, recipe: dict, times: str):
    """Raise UserError DATA if `out` was begun with another recipe or by something else, or the
    input files or the tokenizer have been modified since, because nothing is overwritten.

    If --strict has refused a row and the inputs have changed since, all that was made is removed.
    """
    paths = [out / split / "manifest.json" for split in SPLITS]
    found = [path for path in (*paths, out / "progress" / "plan.json") if path.exists()]
    modified = modified_inputs(out, recipe, times)
    for path in found:
        differ = changed_fields(path, recipe) or modified
        if differ == ["documents"] and found == [path] and (path.parent / "refused").exists():
            for file in files_made(out):
                file.unlink()
            # Last: without progress/ the other files would look like those of another program.
            return remove_progress(out)
        if differ:
            what = f"{path.parent} was made with other {', '.join(differ)}"
            raise UserError(DATA, what, f"choose another --out, or delete {out}")
    # To list a bucket that does not exist is an error.
    if not found and out.exists() and (files := files_made(out)):
        what = f"{files[0]} is there, but no manifest.json and no interrupted command's progress"
        raise UserError(DATA, what, "choose another --out, or move what is there away")


# ---- running the tasks


def count_workers(args: Args, pieces: list[Piece]) -> int:
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    # Starting a process takes about as long as tokenizing a million bytes.
    return min(args.workers or cores, 1 + sum(piece.size for piece in pieces) // 1_000_000)


def find_repeats(tasks: list[Task], args: Args, n_workers: int) -> list[Task]:
    """The tasks with `repeats` set."""
    bar = progress_bar(total=sum(task.size for task in tasks), desc="find repeats")
    with bar, closing(run_tasks(shard_tasks.hash_documents, tasks, n_workers, args.ray)) as results:
        for task, _ in zip(tasks, results, strict=True):
            bar.update(task.size)
    keys = [np.frombuffer(task.path(".keys").read_bytes(), "S16") for task in tasks]
    is_repeat = np.ones(sum(map(len, keys)), bool)
    is_repeat[np.unique(np.concatenate(keys), return_index=True)[1]] = False
    say(f"{is_repeat.sum():,} of {len(is_repeat):,} documents are repeats")
    parts = np.split(is_repeat, np.cumsum([len(part) for part in keys])[:-1])
    found = [frozenset(np.flatnonzero(part).tolist()) for part in parts]
    return [task._replace(repeats=x) for task, x in zip(tasks, found, strict=True)]


def skipped_rows(tasks: list[Task], all_facts: Iterable[dict]) -> Iterator[dict]:
    """The rows that were skipped and listed, numbered from the start of their files."""
    n_rows = Counter()  # of each file so far
    for task, facts in zip(tasks, all_facts, strict=True):
        before = []  # rows of the file before each piece
        for piece, n in zip(task.pieces, facts["rows"], strict=True):
            before.append(n_rows[piece.source])
            n_rows[piece.source] += n
        for i, row, why in facts["skipped"]:
            yield dict(file=task.pieces[i].source, row=before[i] + row, why=why)


def run_all(tasks: list[Task], args: Args, n_workers: int) -> list[dict]:
    """The facts of all tasks, after running those that have none yet.

    With --strict, raises UserError DATA for the first skipped row.
    """
    folder = epath.Path(args.out) / "progress"
    names = {path.name for path in folder.iterdir()}
    missing = [task for task in tasks if task.path(".json").name not in names]
    results = run_tasks(shard_tasks.write_shards, missing, n_workers, args.ray)
    total = sum(task.size for task in tasks)
    done = total - sum(task.size for task in missing)
    bar = progress_bar(total=total, initial=done, desc="tokenize")
    all_facts, n_documents, n_tokens = [], 0, 0
    with bar, closing(results):
        for task in tasks:
            path = task.path(".json")
            if path.name not in names:
                next(results)
                bar.update(task.size)
            facts = json.loads(path.read_text())
            all_facts.append(facts)
            for shard in chain.from_iterable(facts["shards"].values()):
                n_documents += shard["documents"]
                n_tokens += shard["tokens"]
            counts = f"{n_documents:,} documents, {n_tokens:,} tokens"
            bar.set_postfix_str(counts, refresh=False)  # shown with the next task
            if args.strict and facts["n_skipped"]:
                first = next(skipped_rows(tasks, all_facts))
                what = f"{first['file']} row {first['row']}: {first['why']}"
                write_whole(folder / "refused", "")
                raise UserError(DATA, what, "correct it, or leave out --strict to skip it")
    return all_facts


def write_manifests(out: epath.Path, tasks: list[Task], facts: list[dict], recipe: dict):
    """Write the list of skipped rows, and the manifests.  Raises UserError DATA if a split is
    empty, because its documents can no longer be read."""
    tokenizer = shard_tasks.load_tokenizer(str(out))
    vocab_size, end_id = n_ids(tokenizer), tokenizer.token_to_id(recipe["end_token"])
    n_skipped = sum(x["n_skipped"] for x in facts)
    if n_skipped:
        rows = [json.dumps(row) + "\n" for row in skipped_rows(tasks, facts)]
        write_whole(out / "skipped.jsonl", "".join(rows))
    for split in SPLITS:
        if not any(x["shards"][split] for x in facts):
            fix = f"delete {out}, and give other files or another --val_fraction"
            raise UserError(DATA, f"no document for {split} could be read", fix)
    for split in SPLITS:
        shards = [shard for x in facts for shard in x["shards"][split]]
        manifest = dict(format=2, dtype="uint16" if vocab_size <= 65536 else "uint32")
        manifest |= dict(vocab_size=vocab_size, eot_id=end_id)
        manifest |= {name: sum(shard[name] for shard in shards) for name in ("bytes", "documents")}
        manifest |= dict(tokenizer="tokenizer.json", recipe=recipe, shards=shards)
        manifest["digest"] = manifest_digest(manifest)
        write_whole(out / split / "manifest.json", json.dumps(manifest, indent=1))
        n_tokens, n_bytes = sum(shard["tokens"] for shard in shards), manifest["bytes"]
        rate = f"{n_bytes / n_tokens:.2f} bytes per token"
        rest = f"{len(shards)} shard(s), vocabulary {vocab_size:,}"
        say(f"{out / split}: {n_tokens:,} tokens from {n_bytes:,} bytes ({rate}) in {rest}")
    if recipe["end_token"] != END:
        say(f"give --data.end_id {end_id} to a run that does not have it yet")
    if n_skipped:
        say(f"skipped {n_skipped:,} document(s), which {out / 'skipped.jsonl'} lists")


def problems(args: Args) -> Iterator[Problem]:
    """Flags that cannot work."""
    yield from too_low(args, shard_tokens=1, vocab_size=257, workers=0)
    n_sources = bool(args.input) + args.stdlib + args.pydocs
    if n_sources != 1:
        what = f"{n_sources} of --input, --stdlib and --pydocs are given, not 1"
        yield Problem(what, "give one: --input FILE_OR_FOLDER, --stdlib or --pydocs")
    if not 0 < args.val_fraction < 1:
        what = f"val_fraction={args.val_fraction} must be more than 0 and less than 1"
        yield Problem(what, "set --val_fraction to a share of the documents such as 0.02")
    if args.vocab_size > 10**7:  # the trainer makes room for all at once
        what = f"vocab_size={args.vocab_size} must be at most {10**7}"
        yield Problem(what, f"set --vocab_size {10**7} or less")
    for name in ("out", "field"):
        if not getattr(args, name):
            yield Problem(f"--{name} is empty", f"give --{name} a name, or leave it out")
    for x in args.input:
        if is_remote(x) and not re.match("gs://[^/@]+(/|$)|hf://[^:]*[^:/]", x):
            fix = "give gs://bucket/path without credentials, or hf://org/name:config:split"
            yield Problem(f"--input {x} has no name, or is of an unknown kind", fix)
        if args.out and f"{real_path(x)}/".startswith(f"{real_path(args.out)}/"):
            what = f"--input {x} lies in --out {args.out}, where only this command may write"
            yield Problem(what, "choose another --out; it may lie within the input")
    if args.ray and args.workers:
        what = f"--workers {args.workers} is given, but the work is Ray's: --ray {args.ray}"
        yield Problem(what, "leave one of them out; a cluster uses all cores that it has")
    if args.end_token not in ("", END) and args.tokenizer in MADE:
        what = f"--tokenizer {args.tokenizer} ends documents with {END}, not {args.end_token}"
        yield Problem(what, "leave --end_token out, or give a tokenizer.json")
    if args.vocab_size != Args.vocab_size and args.tokenizer != "bpe":
        what = f"--vocab_size is given, but --tokenizer {args.tokenizer} has its own vocabulary"
        yield Problem(what, "leave --vocab_size out, or choose --tokenizer bpe")
    if args.suffix and not args.input:
        what = f"--suffix {args.suffix} is given without --input"
        yield Problem(what, "leave it out: --stdlib and --pydocs choose their own files")
    if args.field and args.field == args.prompt_field:
        what = f"--field and --prompt_field are both {args.field}"
        yield Problem(what, "give the prompt another field than the text")
    try:
        absolute_path(args.out)  # refuses http:// and the like
    except UserError as e:
        yield from e.problems
    try:
        if args.tokenizer not in MADE and not absolute_path(args.tokenizer).exists():
            what = f"--tokenizer {args.tokenizer} is none of byte, char and bpe, nor a file"
            fix = "choose one of those, or give the path of a tokenizer.json; for GPT-2's: "
            fix += "`hf download openai-community/gpt2 tokenizer.json --local-dir gpt2`"
            yield Problem(what, fix)
    except UserError as e:
        yield from e.problems


def parse() -> Args:
    """The command line.  Raises UserError USAGE for all flags that cannot work."""
    args = read_args(Args, __doc__)
    raise_problems(USAGE, problems(args))
    return args


def main(args: Args):
    """Find the files, plan the tasks, run them, and write the manifests."""
    files = find_corpus(args)
    out = epath.Path(args.out)
    n_bytes = sum(file.size for file in files)
    is_streamed = any(x.startswith("hf://") for x in args.input)  # of unknown size
    say(f"found {len(files):,} file(s)" + ("" if is_streamed else f", {n_bytes:,} bytes"))
    recipe, times = make_recipe(args, files)
    check_or_reset(out, recipe, times)
    if all((out / split / "manifest.json").exists() for split in SPLITS):
        remove_progress(out)
        if args.strict and (out / "skipped.jsonl").exists():
            what = f"{out} was made without the documents that {out / 'skipped.jsonl'} lists"
            raise UserError(DATA, what, "correct them and choose another --out, or omit --strict")
        return say(f"{out} is up to date")
    check_output("out", out, is_folder=True)
    step = min(PIECE, max(65536, args.shard_tokens))
    options = Options(args.field, args.prompt_field, args.document_per_line, step)
    pieces = cut_corpus(files, options, args.val_fraction)
    plan = make_plan(args, out, pieces, options, recipe, times)
    common = str(out), options, args.shard_tokens, recipe["end_token"], plan["threshold"]
    lists = shard_tasks.group_by_size(pieces, plan["size"])
    tasks = [Task(n, join_pieces(found), *common) for n, found in enumerate(lists)]
    n_workers = count_workers(args, pieces)
    if args.dedup:
        tasks = find_repeats(tasks, args, n_workers)
    facts = run_all(tasks, args, n_workers)
    write_manifests(out, tasks, facts, recipe)
    remove_progress(out)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    quit_on_error(main, quit_on_error(parse))
