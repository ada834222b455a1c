"""scripts/prepare_data.py: every format, bad rows, splits, masks, digests, and the same bytes
whatever runs the tasks and however often it is killed."""

import codecs
import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from buckets import emulate_bucket
from conftest import ROOT, needs, prepare, run
from pyarrow import ipc, parquet
from tokenizers import Tokenizer, models, pre_tokenizers

import config
from errors import DATA, DISTRIBUTED, INTERRUPTED, STORAGE, USAGE, UserError
from scripts import corpus, prepare_data, pydocs, readers, shard_tasks, vocabularies

SCRIPT = "scripts/prepare_data.py"

TEXTS = {
    "b/notes.txt": "Ünïcödé, tabs\tand\r\nlines.\n\n   Trailing spaces  \n" * 30,
    "a.txt": "The quick brown fox jumps over the lazy dog. <|endoftext|> is text\n" * 40,
    "c.txt": "ÿ\x00binary-ish\x7f 日本語 🙂\n" * 20,
    "empty.txt": "",
    "d.md": "# not a .txt file\n",
}


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def manifest(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def tokens_of(folder) -> np.ndarray:
    return np.concatenate([np.load(folder / s["name"]) for s in manifest(folder)["shards"]])


def documents_of(folder) -> list[str]:
    """The documents of a prepared set, decoded."""
    end, tokens = manifest(folder)["eot_id"], tokens_of(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokens[-1] == end
    parts = np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_prepared_text_decodes_to_what_it_was(texts, tmp_path, kind):
    out = tmp_path / "out"
    request = ["--input", texts, "--suffix", ".txt", "--tokenizer", kind]
    request += ["--vocab_size", 400] if kind == "bpe" else []
    prepare(*request, "--out", out, "--val_fraction", 0.3, "--shard_tokens", 500)
    got = documents_of(out / "train") + documents_of(out / "val")
    want = [text for name, text in TEXTS.items() if name.endswith(".txt") and text]
    assert sorted(got) == sorted(want)
    total = sum(manifest(out / split)["bytes"] for split in ("train", "val"))
    assert total == sum(len(text.encode()) for text in want)
    assert manifest(out / "train")["vocab_size"] <= dict(byte=257, char=200, bpe=400)[kind]


def test_byte_tokens_are_bytes_and_a_single_file_is_cut_at_a_line(tmp_path):
    path, out = tmp_path / "one.txt", tmp_path / "out"
    path.write_bytes("zwölf Boxkämpfer\n".encode() * 200)
    prepare("--input", path, "--tokenizer", "byte", "--out", out, "--val_fraction", 0.1)
    train_tokens, val_tokens = tokens_of(out / "train"), tokens_of(out / "val")
    assert bytes(train_tokens[:-1].tolist()) + bytes(val_tokens[:-1].tolist()) == path.read_bytes()
    assert train_tokens[-2] == ord("\n") and 0.05 < len(val_tokens) / len(train_tokens) < 0.15


@pytest.mark.parametrize("text, val", [
    (b"a line\n" * 30 + b"the last one", b"the last one"),
    (b"a line\n" * 30, b"a line\n"),
    (b"a title\n" + b"x" * 1000, b"x" * 20),  # the last line has more than half of the text
])  # fmt: skip
def test_a_text_may_be_cut_at_the_start_of_its_last_line(tmp_path, text, val):
    (tmp_path / "a.txt").write_bytes(text)
    (file,) = corpus.find_input(str(tmp_path / "a.txt"), "")
    *_, last = readers.split_text(file, 0.02)
    assert text[last.start : last.stop] == val


def test_a_json_file_is_text_and_the_command_says_so(tmp_path):
    row, out = b'{"text": "a row"}\n', tmp_path / "out"
    (tmp_path / "rows.json").write_bytes(row * 50)
    flags = ["--input", tmp_path / "rows.json", "--tokenizer", "byte", "--out", out]
    done = run("scripts/prepare_data.py", *flags)
    assert ".json are read as text; rename those with a row in each line to .jsonl" in done.stdout
    assert bytes(tokens_of(out / "val")[:-1].tolist()) == row


def test_an_array_of_rows_in_place_of_a_table_is_told_with_the_way_to_convert_it(tmp_path):
    rows = [dict(instruction=f"ask {n}", output=f"answer {n}") for n in range(9)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    flags = ["--field", "output", "--prompt_field", "instruction", "--out", tmp_path / "out"]
    done = run(SCRIPT, "--input", tmp_path / "data.json", *flags)
    assert done.returncode == USAGE and done.stderr.count("\n") == 2, done.stderr
    for printed in (done.stdout, done.stderr):
        assert "`jq -c '.[]' data.json > data.jsonl` makes a table of an array" in printed
    assert ".jsonl, .ndjson, " in done.stderr and ".parquet or .arrow" in done.stderr


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_file_of_values_is_text_and_the_command_says_so(tmp_path, suffix):
    (tmp_path / f"rows{suffix}").write_text("id,text\n" * 50)
    flags = ["--input", tmp_path / f"rows{suffix}", "--tokenizer", "byte", "--out", tmp_path / "o"]
    assert f"ending in {suffix} are read as text; convert tables" in run(SCRIPT, *flags).stdout


def test_a_file_of_a_new_format_is_no_text(monkeypatch, capsys):
    monkeypatch.setitem(readers.FORMATS, ".tsv", readers.FORMATS[".jsonl"])
    prepare_data.say_what_is_text([corpus.File("rows.tsv", "rows.tsv", 9)], [".tsv"])
    assert not capsys.readouterr().out


def test_text_files_among_tables_are_told(tmp_path):
    """A folder that `hf download --repo-type dataset` has made."""
    folder, flags = tmp_path / "in", ["--tokenizer", "byte", "--out", tmp_path / "out"]
    folder.mkdir()
    write_corpus(folder, ".parquet", text_rows())
    (folder / "README.md").write_text("A data set.")
    done = run(SCRIPT, "--input", folder, *flags)
    note = "1 file(s) are tables, 1 are read as text; --suffix takes one kind alone: .parquet\n"
    assert done.returncode == 0 and note in done.stdout, done.stdout
    assert "A data set." in all_documents(tmp_path / "out")
    alone = run(SCRIPT, "--input", folder, *flags[:-1], tmp_path / "alone", "--suffix", ".parquet")
    assert "are read as text" not in alone.stdout
    assert sorted(all_documents(tmp_path / "alone")) == sorted(text_rows())


@pytest.mark.parametrize("flags", [[], ["--document_per_line"]])
def test_a_byte_order_mark_is_no_text(tmp_path, flags):
    lines, out = [f"line {n:02}\n" for n in range(50)], tmp_path / "out"
    (tmp_path / "one.txt").write_text("".join(lines), "utf-8-sig")
    prepare("--input", tmp_path / "one.txt", "--tokenizer", "byte", "--out", out, *flags)
    found = "".join(sorted(all_documents(out)))
    assert found == "".join(lines if not flags else map(str.strip, lines))


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_blank_line_behind_a_byte_order_mark_is_no_bad_row(tmp_path, kind):
    pack = dict(gz=gzip.compress, zst=zstandard.compress, jsonl=bytes)[kind.rpartition(".")[2]]
    path = tmp_path / f"a{kind}"
    path.write_bytes(pack(codecs.BOM_UTF8 + b'\n{"text": "a"}\n'))
    (file,) = corpus.find_input(str(path), "")
    options = readers.Options()
    (piece,) = readers.cut_file(file, options)
    blank, row = readers.read_documents(piece, options)
    assert blank == readers.Skipped(1, "") and row.parts == [("a", True)]


def test_byte_order_marks_of_files_that_cat_has_joined_are_left_out(tmp_path):
    path, options = tmp_path / "a.txt", readers.Options(document_per_line=True)
    path.write_bytes(2 * (codecs.BOM_UTF8 + b"a\n"))
    (file,) = corpus.find_input(str(path), "")
    (piece,) = readers.cut_file(file, options)
    rows = readers.read_documents(piece, options)
    assert [row.parts for row in rows] == 2 * [[("a", True)]]


@pytest.mark.slow
def test_a_large_file_is_read_in_pieces_of_whole_lines(tmp_path):
    path, out = tmp_path / "large.txt", tmp_path / "out"
    lines = [f"line {n} of many, with an ümlaut\n" for n in range(300_000)]
    path.write_text("".join(lines))
    assert path.stat().st_size > 8_000_000
    prepare("--input", path, "--tokenizer", "byte", "--out", out, "--shard_tokens", 3_000_000)
    assert len(manifest(out / "train")["shards"]) > 2
    assert "".join(documents_of(out / "train") + documents_of(out / "val")) == "".join(lines)


@pytest.mark.parametrize("step", [1, 3, 8, 25, 100])
def test_each_line_is_in_one_range_even_beside_a_line_that_is_too_long(tmp_path, monkeypatch, step):
    monkeypatch.setattr(readers, "LIMIT", 20)
    monkeypatch.setattr(readers, "PIECE", 8)
    lines = [b"a" * 50, b"b", b"", b"c" * 70, b"d", b"e" * 21, b"f" * 30]
    path, options = tmp_path / "long.txt", readers.Options(document_per_line=True, piece=step)
    path.write_bytes(b"\n".join(lines))
    file = readers.File("long.txt", str(path), path.stat().st_size)
    pieces = readers.cut_file(file, options)
    with path.open("rb") as f:
        found = [x for piece in pieces for x in readers.read_range(f, piece, options)]
    assert [line[:20] for line in found] == [line[:20] for line in lines]


def test_a_second_run_does_nothing_and_another_request_is_refused(texts, tmp_path):
    out = tmp_path / "out"
    request = ["--input", texts, "--tokenizer", "byte", "--out", out]

    def contents():
        paths = [p for p in out.rglob("*") if p.is_file()]
        return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}

    prepare(*request)
    before = contents()
    assert "is up to date" in run("scripts/prepare_data.py", *request).stdout
    other = run("scripts/prepare_data.py", *request, "--val_fraction", 0.5)
    assert other.returncode == DATA and "was made with other val_fraction" in other.stderr
    (texts / "a.txt").write_text("changed")
    changed = run("scripts/prepare_data.py", *request)
    assert changed.returncode == DATA and "was made with other documents" in changed.stderr
    assert contents() == before
    (tmp_path / "out/train/manifest.json").write_text('{"recipe": {')
    damaged = run("scripts/prepare_data.py", *request)
    assert damaged.returncode == DATA and "train/manifest.json is damaged" in damaged.stderr


def test_an_out_within_the_input_is_no_input(texts):
    request = ["--input", texts, "--tokenizer", "byte", "--out", texts / "out"]
    for n in (1, 2):
        done = run(SCRIPT, *request)
        assert done.returncode == 0 and ("is up to date" in done.stdout) == (n == 2), done.stderr


@pytest.mark.parametrize("name", [".", "a.txt", "*.txt"])
def test_an_input_within_the_out_is_refused(texts, name):
    request = ["--input", texts / name, "--tokenizer", "byte", "--out", texts]
    done = run(SCRIPT, *request)
    assert done.returncode == USAGE and f"lies in --out {texts}" in done.stderr


def test_a_file_of_the_user_in_progress_stays(texts, tmp_path):
    (tmp_path / "out/progress").mkdir(parents=True)
    (tmp_path / "out/progress/week1.txt").write_text("mine")
    prepare("--input", texts, "--tokenizer", "byte", "--out", tmp_path / "out")
    assert [x.name for x in (tmp_path / "out/progress").iterdir()] == ["week1.txt"]


def test_a_tokenizer_that_has_been_changed_is_another_request(texts, tmp_path):
    request = ["--input", texts, "--tokenizer", tmp_path / "own.json", "--out", tmp_path / "out"]
    vocabularies.byte_tokenizer().save(str(tmp_path / "own.json"), pretty=False)
    prepare(*request)
    vocabularies.byte_tokenizer().save(str(tmp_path / "own.json"))  # in another layout
    assert "is up to date" in run(SCRIPT, *request).stdout
    vocabularies.char_tokenizer(TEXTS.values()).save(str(tmp_path / "own.json"))
    done = run(SCRIPT, *request)
    assert done.returncode == DATA and "train was made with other tokenizer" in done.stderr


def test_a_tokenizer_left_by_another_request_is_not_used(texts, tmp_path):
    """The state on disk is that of a command killed between the tokenizer and the first shard."""
    out = tmp_path / "out"
    prepare("--input", texts, "--tokenizer", "byte", "--out", out)
    recipe = manifest(out / "train")["recipe"]
    (out / "progress").mkdir()
    plan = dict(recipe=recipe, threshold=1, size=1000)
    (out / "progress/plan.json").write_text(json.dumps(plan))
    for split in ("train", "val"):
        (out / split / "manifest.json").unlink()
    other = run("scripts/prepare_data.py", "--input", texts, "--tokenizer", "bpe", "--out", out)
    assert other.returncode == DATA and "was made with other tokenizer" in other.stderr


def test_a_file_edited_to_the_same_length_is_another_document(texts, tmp_path):
    out, n_bytes = tmp_path / "out", len(TEXTS["a.txt"].encode())
    request = ["--input", texts, "--tokenizer", "byte", "--out", out]
    prepare(*request)
    (texts / "a.txt").write_bytes(b"z" * n_bytes)
    fix = f"was made with other documents\n  fix: choose another --out, or delete {out}\n"
    edited = run(SCRIPT, *request)
    assert edited.returncode == DATA and fix in edited.stderr
    plan = dict(recipe=manifest(out / "train")["recipe"], threshold=1, size=1000)
    (out / "progress").mkdir()  # the state of a command killed before its manifests
    (out / "progress/plan.json").write_text(json.dumps(plan))
    for split in ("train", "val"):
        (out / split / "manifest.json").unlink()
    interrupted = run(SCRIPT, *request)
    assert interrupted.returncode == DATA and fix in interrupted.stderr


def test_times_are_in_no_shard_and_no_manifest(texts, tmp_path):
    request = ["--input", texts, "--tokenizer", "byte", "--out"]
    prepare(*request, tmp_path / "old")
    os.utime(texts / "a.txt", ns=(1, 1))
    prepare(*request, tmp_path / "new")
    old, new = contents(tmp_path / "old"), contents(tmp_path / "new")
    assert old.pop("times.sha256") != new.pop("times.sha256")
    assert old == new


@pytest.mark.parametrize("n_rows", [400, 100])
def test_what_strict_refused_is_not_in_the_way_once_it_is_corrected(tmp_path, n_rows):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    rows = [json.dumps(dict(text=f"{n} {'x' * 600}")).encode() for n in range(400)]
    request = ["--input", path, "--shard_tokens", 9000, "--tokenizer", "byte", "--strict"]
    path.write_bytes(b"\n".join([*rows, b'{"text":  bad"}']))
    refused = run(SCRIPT, *request, "--out", out)
    assert refused.returncode == DATA and "row 401: Expecting" in refused.stderr
    path.write_bytes(b"\n".join([*rows[:n_rows], b'{"text": "bad"}']))  # 400: of the same length
    (out / "train" / "notes.txt").write_text("mine")
    prepare(*request, "--out", out)
    (out / "train" / "notes.txt").unlink()  # it was left alone
    prepare(*request, "--out", tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")


def test_strict_refuses_a_row_of_a_file_whose_name_is_not_utf8(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.jsonl")
    path.write_text('{"text": "a"}\n{"text": "b"}\n{}\n')
    flags = ["--input", path, "--strict", "--tokenizer", "byte", "--out", tmp_path / "out"]
    done = run(SCRIPT, *flags)
    assert done.returncode == DATA and "row 3: field 'text' is missing" in done.stderr, done.stderr


def test_an_out_that_looks_like_a_pattern_matches_no_other_folder(tmp_path):
    path, theirs = tmp_path / "a.jsonl", tmp_path / "x1" / "train" / "shard_00000.npy"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    request = ["--input", path, "--tokenizer", "byte", "--strict", "--out", tmp_path / "x[1]*"]
    for lines in (["{}"], ["{}", "{}"], []):
        rows = [json.dumps(dict(text=str(n))) for n in range(9)]
        path.write_text("\n".join([*rows, *lines]))
        done = run(SCRIPT, *request)
        got = done.returncode, "is missing" in done.stderr
        assert got == ((DATA, True) if lines else (0, False)), done.stderr
    assert theirs.read_bytes() == b"theirs" and len(documents_of(tmp_path / "x[1]*" / "train")) > 4


def test_a_single_text_that_is_not_utf8_is_said_to_be(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\n")
    request = ["--input", tmp_path / "b.txt", "--tokenizer", "byte", "--out", tmp_path / "out"]
    done = run(SCRIPT, *request)
    assert done.returncode == DATA and "b.txt is not UTF-8" in done.stderr


@pytest.mark.parametrize("names", ["a", "abc"])
def test_compressed_texts_are_not_read_and_the_fix_says_so(tmp_path, names):
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / f"{name}.txt.gz").write_bytes(gzip.compress(name.encode() * 500))
    done = run(SCRIPT, "--input", tmp_path / "in", "--tokenizer", "byte", "--out", tmp_path / "out")
    fix = "fix: give text in UTF-8; compressed files are read only if they end in .jsonl.gz"
    assert done.returncode == DATA and fix in done.stderr


@pytest.mark.parametrize("text", ["", "x", "one line without an end"])
def test_too_little_text_is_an_error_and_leaves_nothing(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "out"
    request = ["--input", tmp_path / "a.txt", "--tokenizer", "byte", "--out", out]
    done = run("scripts/prepare_data.py", *request)
    if done.returncode == 0:  # a single line that is long enough is cut inside
        assert len(tokens_of(out / "val")) > 1
    else:
        assert done.returncode == DATA and "too short" in done.stderr and not out.exists()


@pytest.mark.parametrize("n_rows", [10, 3000])
def test_text_that_a_tokenizer_does_not_know_is_two_lines(tmp_path, n_rows):
    """Of 3,000 rows the last one is not in the sample that is read at first."""
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    rows = [dict(text=f"{n} {'x' * 500}") for n in range(n_rows)]
    path.write_bytes(json_lines(rows))
    prepare("--input", path, "--tokenizer", "char", "--out", out)
    path.write_bytes(json_lines([*rows, dict(text="ü")]))
    flags = ["--tokenizer", out / "train/tokenizer.json", "--out", tmp_path / "other"]
    done = run(SCRIPT, "--input", path, *flags)
    assert done.returncode == DATA and "has no token for a part of the text" in done.stderr
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize("x_id, n_ids, dtype", [(5, 6, "uint16"), (70_000, 70_001, "uint32")])
def test_a_vocabulary_ends_with_the_highest_id(tmp_path, x_id, n_ids, dtype):
    tokenizer = Tokenizer(models.WordLevel(dict(a=0, b=1, x=x_id), unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "gaps.json"))
    (tmp_path / "a.txt").write_text("a b x\n" * 50)
    flags = ["--tokenizer", tmp_path / "gaps.json", "--out", tmp_path / "out"]
    prepare("--input", tmp_path / "a.txt", *flags)
    about = manifest(tmp_path / "out" / "train")
    assert (about["vocab_size"], about["dtype"], about["eot_id"]) == (n_ids, dtype, 3)
    assert set(tokens_of(tmp_path / "out" / "train")) == {0, 1, x_id, 3}


def test_an_end_token_with_the_id_of_another_is_refused(tmp_path):
    Tokenizer(models.WordLevel(dict(a=0, b=2), unk_token="b")).save(str(tmp_path / "gaps.json"))
    (tmp_path / "a.txt").write_text("a\n" * 50)
    flags = ["--tokenizer", tmp_path / "gaps.json", "--out", tmp_path / "out"]
    done = run(SCRIPT, "--input", tmp_path / "a.txt", *flags)
    assert done.returncode == DATA and "id 2 is that of <|endoftext|> and of" in done.stderr


def test_an_end_token_that_is_not_called_special_is_not_new(tmp_path, capsys):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, config.END: 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "own.json"))
    found = vocabularies.read_tokenizer(str(tmp_path / "own.json"), config.END)
    assert found.token_to_id(config.END) == 1 and capsys.readouterr().out == ""


def test_documents_end_with_the_token_that_is_named(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 2}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "own.json"))
    (tmp_path / "a.txt").write_text("a\nb\n" * 50)
    flags = ["--input", tmp_path / "a.txt", "--document_per_line", "--out", tmp_path / "out"]
    flags += ["--tokenizer", tmp_path / "own.json"]
    done = run(SCRIPT, *flags, "--end_token", "<eos>")
    assert done.returncode == USAGE and "--end_token <eos> is no token of" in done.stderr
    assert "give --data.end_id 1 to a run" in run(SCRIPT, *flags, "--end_token", "</s>").stdout
    about = manifest(tmp_path / "out" / "train")
    assert (about["vocab_size"], about["eot_id"]) == (3, 1)
    ids = np.concatenate([tokens_of(tmp_path / "out" / split) for split in ("train", "val")])
    assert ids[1::2].tolist() == [1] * 100 and set(ids[::2].tolist()) == {0, 2}


def test_names_of_special_tokens_stay_text_for_a_unigram_model(tmp_path):
    pieces = ["<unk>", "</s>", *"</ab>"]
    tokenizer = Tokenizer(models.Unigram([(x, -float(n)) for n, x in enumerate(pieces)], 0))
    tokenizer.add_special_tokens(["<unk>", "</s>", "<s>"])
    tokenizer.save(str(tmp_path / "unigram.json"))
    (tmp_path / "a.txt").write_text("a</s>b?<unk>\nb\n")
    flags = ["--input", tmp_path / "a.txt", "--document_per_line", "--out", tmp_path / "out"]
    prepare(*flags, "--tokenizer", tmp_path / "unigram.json", "--end_token", "</s>")
    assert manifest(tmp_path / "out" / "train")["vocab_size"] == 8
    ids = {tuple(tokens_of(tmp_path / "out" / split).tolist()) for split in ("train", "val")}
    assert ids == {(4, 2, 3, 0, 6, 5, 0, 2, 0, 6, 1), (5, 1)}  # 0: what the model does not know


def test_the_end_token_of_a_tokenizer_with_other_special_tokens_has_to_be_chosen(tmp_path):
    tokenizer = Tokenizer(models.WordLevel(dict(a=0, b=1), unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([f"<{n}>" for n in range(12)])
    tokenizer.save(str(tmp_path / "own.json"))
    (tmp_path / "a.txt").write_text("a\nb\n" * 50)
    flags = ["--input", tmp_path / "a.txt", "--tokenizer", tmp_path / "own.json"]
    done = run(SCRIPT, *flags, "--out", tmp_path / "out")
    first = ", ".join(f"<{n}>" for n in range(10))
    assert done.returncode == USAGE and done.stderr.count("\n") == 2, done.stderr
    assert f"has no {config.END}; its special tokens are {first} and 2 more\n" in done.stderr
    assert f"--end_token '{config.END}' adds that one\n" in done.stderr
    assert not (tmp_path / "out").exists()
    prepare(*flags, "--end_token", "<3>", "--out", tmp_path / "named")
    prepare(*flags, "--end_token", config.END, "--out", tmp_path / "added")
    ids = [manifest(tmp_path / out / "val")["eot_id"] for out in ("named", "added")]
    assert ids == [5, 14]
    # As data that were made before one had to be chosen.
    assert "is up to date" in run(SCRIPT, *flags, "--out", tmp_path / "added").stdout


def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path):
    source = Path(os.__file__).parent / "email"
    request = ["--input", source, "--suffix", ".py", "--shard_tokens", 4000]
    request += ["--tokenizer", "bpe", "--vocab_size", 600]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    prepare(*request, "--out", whole)
    command = [sys.executable, ROOT / "scripts/prepare_data.py", *request, "--out", cut]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen([*map(str, command)], **quiet)
    while not list(cut.glob("progress/task_*.json")):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cut / "val" / "manifest.json").exists()
    prepare(*request, "--out", cut)
    for split in ("train", "val"):
        assert manifest(cut / split) == manifest(whole / split)
        np.testing.assert_array_equal(tokens_of(cut / split), tokens_of(whole / split))


DOCSTRINGS = '''
"""Short."""


def f():
    """Return `name`, as given by :func:`g` or ``None``.

    A paragraph can be wrapped at some seventy characters, which “ends” here;
    it becomes one line.  Its last sentence, which announces an example, is left out:

        >>> f()
        (1, 2)

    Arguments:
    first -- the first argument of the function
    second -- the second argument of the function

    * An item of a list is a paragraph (if it is a sentence).
    * not a sentence

    +--------+-------------------------------+
    | Header | A table with two columns.     |
    +--------+-------------------------------+
    """


class C:
    async def g(self):
        """Return name, as given by g or None.

        A licence says that THIS SOFTWARE IS PROVIDED AS IT IS.

        This paragraph occurs for the first time.
        """
'''


def test_prose_is_taken_from_docstrings_without_importing(tmp_path):
    modules = {"m.py": DOCSTRINGS + "raise SystemExit", "idlelib/n.py": DOCSTRINGS}
    topics = "topics = {'a': 'One topic is a document.', 'b': 'And another'}"
    for name, text in {**modules, "pydoc_data/topics.py": topics}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = pydocs.prose_documents(corpus.find_files(tmp_path, ".py", set()))
    sentences = """Return name, as given by g or None.

A paragraph can be wrapped at some seventy characters, which ends here; it becomes one line.

An item of a list is a paragraph (if it is a sentence)."""
    assert found == [
        ("m.py:5", sentences.encode()),
        ("m.py:27", b"This paragraph occurs for the first time."),
        ("pydoc_data/topics.py:a", b"One topic is a document."),
    ]


@pytest.mark.slow
def test_pydocs_are_sentences_and_the_same_each_time(tmp_path):
    request = ["--pydocs", "--tokenizer", "byte", "--val_fraction", 0.05, "--out", tmp_path / "out"]
    prepare(*request)
    found = documents_of(tmp_path / "out/train") + documents_of(tmp_path / "out/val")
    lines = [line for text in found for line in text.split("\n\n")]
    assert sum(map(len, lines)) > 500_000 and len(set(lines)) == len(lines)
    assert all(line.isascii() and line.strip("\"')")[-1] in ".!?" for line in lines)
    assert "is up to date" in run("scripts/prepare_data.py", *request).stdout


@pytest.mark.parametrize("n, size", [(2000, 10), (10, 2000)])
def test_a_sample_of_a_large_corpus_has_the_size_that_is_asked_for(n, size):
    pieces = [readers.Piece("text", b"x" * size, 0, size, size)] * n
    texts = [*prepare_data.sample_texts(pieces, readers.Options(), 0, 4000, n_parts=8)]
    assert 4000 <= sum(map(len, texts)) <= 4000 + 10 * size


def test_a_log_file_gets_lines_of_progress(monkeypatch, capsys):
    clock = [0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    with prepare_data.progress_bar(total=80_000_000, initial=8_000_000, desc="tokenize") as bar:
        for n in range(9):
            clock[0] += 10
            bar.update(8_000_000)
            bar.set_postfix_str(f"{n:,} documents", refresh=False)
    out, err = capsys.readouterr()
    assert not out and err.splitlines() == [
        f"tokenize: {at}.0M of 80.0M in {time}, {left} left, 800kB/s, {n} documents"
        for at, time, left, n in (
            (32, "00:30", "01:00", 1),
            (56, "01:00", "00:30", 4),
            (80, "01:30", "00:00", 7),
        )
    ]


def test_a_log_file_gets_no_progress_bars(texts, tmp_path):
    request = ["--input", texts, "--vocab_size", 300, "--out", tmp_path / "out"]
    done = run("scripts/prepare_data.py", *request)
    assert done.stdout.count("\n") == 5 and "skipped 1 document(s)" in done.stdout
    assert "\r" not in done.stdout and not done.stderr


@pytest.mark.parametrize("request_, code, word", [
    ([], USAGE, "0 of --input, --stdlib and --pydocs are given, not 1"),
    (["--input", "x", "--stdlib"], USAGE, "2 of --input, --stdlib and --pydocs are given, not 1"),
    (["--stdlib", "--pydocs"], USAGE, "2 of --input, --stdlib and --pydocs are given, not 1"),
    (["--input", "x", "--input=y"], USAGE, "--input is given 2 times"),
    (["--input", "/nowhere"], DATA, "--input /nowhere does not exist"),
    (["--input", __file__, "--suffix", ".md"], DATA, f"no files ending in '.md' in {__file__}"),
    (["--input", "s3://bucket"], USAGE, "--input s3://bucket has no name"),
    (["--input", "hf://"], USAGE, "--input hf:// has no name, or is"),
    (["--stdlib", "--out="], USAGE, "--out is empty"),
    (["--stdlib", "--out", "http://x/y"], USAGE, "http://x/y is not the address of a bucket"),
    (["--input", "gs://me:canary@b/x", "--out", "x"], USAGE, "--input gs://***@b/x has no name"),
    (["--stdlib", "--tokenizer", "s3://x/y"], USAGE, "s3://x/y is not the address of a bucket"),
    (["--input", __file__, "--field="], USAGE, "--field is empty"),
    (["--input", __file__, "--prompt_field=text"], USAGE, "and --prompt_field are both text"),
    (["--input", __file__, "--prompt_field=q"], USAGE, "but no file is a table with fields"),
    (["--stdlib", "--val_fraction", "2"], USAGE, "val_fraction=2.0"),
    (["--input", "hf://a/b", "--document_per_line"], USAGE, "but no file has lines of text"),
    (["--stdlib", "--suffix", ".txt"], USAGE, "--suffix .txt is given without --input"),
    (["--stdlib", "--tokenizer", "char", "--vocab_size", "300"], USAGE, "char has its own"),
    (["--stdlib", "--ray=auto", "--workers=2"], USAGE, "--workers 2 is given, but the work is"),
    (["--stdlib", "--vocab_size", "5"], USAGE, "vocab_size=5 must be at least 257"),
    (["--input", __file__, "--tokenizer", "/dev/null"], DATA, "cannot be read: it is not a file"),
    (["--stdlib", "--tokenizer", "bytes"], USAGE, "bytes is none of byte, char and bpe"),
], ids=lambda x: "")  # fmt: skip
def test_a_bad_request_is_two_lines(tmp_path, request_, code, word):
    done = run("scripts/prepare_data.py", "--out", tmp_path / "out", *request_)
    assert done.returncode == code and word in done.stderr and done.stderr.count("\n") == 2


def test_all_that_is_wrong_with_a_request_is_told_at_once(tmp_path):
    request = ["--stdlib", "--val_fraction", 2, "--suffix", ".md", "--workers", -1]
    done = run("scripts/prepare_data.py", *request, "--tokenizer", "http://x/y", "--out", "ftp://z")
    assert done.returncode == USAGE and done.stderr.count("\n") == 10
    for what in ("val_fraction=2.0", "--suffix .md is given", "workers=-1", "http://x/y", "ftp:"):
        assert what in done.stderr


# ---- formats


def text_rows(n: int = 60) -> list[str]:
    return [f"Row {i} — ünïcödé, {'words ' * (i % 7)}\nand a line" for i in range(n)]


def json_lines(rows: list) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_corpus(folder: Path, kind: str, rows: list[str]) -> Path:
    """A file of that kind with the rows."""
    path = folder / f"rows{kind}"
    table = pa.table(dict(id=range(len(rows)), text=rows))
    lines = json_lines([dict(id=n, text=text) for n, text in enumerate(rows)])
    match kind:
        case ".parquet":
            parquet.write_table(table, path, row_group_size=20)
        case ".arrow":  # a stream, as `datasets` writes
            with ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=17)
        case ".jsonl.gz" | ".json.gz" | ".ndjson.gz":
            path.write_bytes(gzip.compress(lines))
        case ".jsonl.zst" | ".json.zst" | ".ndjson.zst":  # two frames, as parallel compressors make
            first, second = lines[:500], lines[500:]
            path.write_bytes(zstandard.compress(first) + zstandard.compress(second))
        case ".jsonl" | ".ndjson":
            path.write_bytes(lines)
    return path


KINDS = (".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
KINDS += (".ndjson", ".ndjson.gz", ".ndjson.zst")


def all_documents(out: Path) -> list[str]:
    return documents_of(out / "train") + documents_of(out / "val")


def check_digests(out: Path):
    """Every file's pages are those of its content, and the manifest's are those of the pages."""

    def blake(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    for split in ("train", "val"):
        about = manifest(out / split)
        names = {"manifest.json", "tokenizer.json"}
        for shard in about["shards"]:
            files = [(shard["name"], shard["pages"])]
            tokens = np.load(out / split / shard["name"])
            assert (len(tokens), tokens.dtype) == (shard["tokens"], about["dtype"])
            if "mask" in shard:
                files.append((shard["name"].replace(".npy", ".mask"), shard["mask"]))
                mask = np.fromfile(out / split / files[-1][0], np.uint8)
                assert len(mask) == len(tokens) and set(mask) <= {0, 1} and 0 in mask
            for name, digest in files:
                data = (out / split / name).read_bytes()
                pages = b"".join(blake(data[i : i + 65536]) for i in range(0, len(data), 65536))
                assert (out / split / f"{name}.pages").read_bytes() == pages
                assert blake(pages).hex() == digest
                names |= {name, f"{name}.pages"}
            data = (out / split / shard["name"]).read_bytes()
            assert data[shard["offset"] :] == tokens.tobytes()
        assert {path.name for path in (out / split).iterdir()} == names
        rest = {name: value for name, value in about.items() if name != "digest"}
        assert about["digest"] == blake(json.dumps(rest, sort_keys=True).encode()).hex()
        for total in ("bytes", "documents"):
            assert about[total] == sum(shard[total] for shard in about["shards"])
    assert not (out / "progress").exists()


def test_a_manifest_has_the_fields_that_the_docs_list(tmp_path):
    rows = [dict(prompt=f"ask {n}", text=f"answer {n}") for n in range(40)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows))
    flags = ["--tokenizer", "byte", "--prompt_field", "prompt", "--val_fraction", 0.2]
    prepare("--input", tmp_path / "a.jsonl", *flags, "--out", tmp_path / "out")
    section = (ROOT / "docs/data.md").read_text().partition("### Format 2")[2].partition("###")[0]
    tables = [re.findall("`([^`]*)`", row) for row in re.findall(r"^\| (`.*?) \|", section, re.M)]
    documented = [name for names in tables for name in names]
    for_all = documented[: documented.index("shards") + 1]
    for split in ("train", "val"):
        about = manifest(tmp_path / "out" / split)
        assert set(about) == set(for_all)
        assert all(set(shard) == set(documented[len(for_all) :]) for shard in about["shards"])
    check_digests(tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_its_rows(tmp_path, kind):
    rows, out = text_rows(), tmp_path / "out"
    path = write_corpus(tmp_path, kind, rows)
    flags = ["--tokenizer", "byte", "--val_fraction", 0.2, "--shard_tokens", 500]
    prepare("--input", path, *flags, "--out", out)
    assert sorted(all_documents(out)) == sorted(rows)
    assert len(documents_of(out / "val")) not in (0, 1, len(rows))
    check_digests(out)
    assert not (out / "skipped.jsonl").exists()


def test_arrows_file_format_is_read_too(tmp_path):
    table = pa.table(dict(text=text_rows()))
    with ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=17)
    prepare("--input", tmp_path / "a.arrow", "--tokenizer", "byte", "--out", tmp_path / "out")
    assert sorted(all_documents(tmp_path / "out")) == sorted(text_rows())


def make_unreadable(folder: Path, monkeypatch):
    """Make a folder with a.txt that this user, who may be root, may not read."""
    folder.mkdir()
    (folder / "a.txt").write_text("secret")
    scandir = os.scandir

    def refuse(f, path, **options):
        if str(path).startswith(str(folder)) and (f is scandir or "/a" in str(path)):
            raise PermissionError(13, "Permission denied", str(path))
        return f(path, **options)

    for name_of_f in ("scandir", "stat", "lstat"):
        monkeypatch.setattr(os, name_of_f, partial(refuse, getattr(os, name_of_f)))


@pytest.mark.parametrize("name", ["", "*", "*/*.txt", "**/*.txt", "private/a.txt"])
def test_a_folder_that_this_user_may_not_read_is_not_left_out(tmp_path, monkeypatch, name):
    (tmp_path / "b.txt").write_text("open")
    make_unreadable(tmp_path / "private", monkeypatch)
    with pytest.raises(PermissionError):
        corpus.find_input(f"{tmp_path}/{name}", "")


@pytest.mark.parametrize("name", ["", "*", "**/*.txt"])
def test_a_disk_of_ones_own_is_read_though_it_has_a_folder_for_its_repair(
    tmp_path, monkeypatch, name
):
    (tmp_path / "b.txt").write_text("open")
    make_unreadable(tmp_path / "lost+found", monkeypatch)
    (file,) = corpus.find_input(f"{tmp_path}/{name}", "")
    assert file.name == "b.txt"


def test_several_inputs_patterns_and_folders_are_one_corpus(tmp_path):
    rows, out = text_rows(), tmp_path / "out"
    folder = tmp_path / "data"
    (folder / "hf").mkdir(parents=True)
    write_corpus(folder / "hf", ".arrow", rows[:10])
    (folder / "hf" / "dataset_info.json").write_text("{}")  # describes the .arrow files
    write_corpus(folder, ".jsonl", rows[10:30])
    (folder / "notes.md").write_text("A text.")
    (folder / "link.md").symlink_to("/etc/hostname")
    for name in ("x1", "blobs"):
        (tmp_path / name).mkdir()
    blob = write_corpus(tmp_path / "blobs", ".jsonl.gz", rows[30:])
    (tmp_path / "x1" / "link.jsonl.gz").symlink_to(blob.rename(tmp_path / "blobs" / "0123"))
    inputs = [folder, tmp_path / "x*/*.gz", folder / "rows.jsonl", tmp_path / "dat?"]
    prepare("--input", *inputs, "--tokenizer", "byte", "--out", out)
    assert sorted(all_documents(out)) == sorted([*rows, "A text."])


def test_a_file_is_read_once_however_often_it_is_named(tmp_path):
    rows = text_rows(20)
    (tmp_path / "in").mkdir()
    path = write_corpus(tmp_path / "in", ".jsonl", rows)
    (tmp_path / "in" / "loop").symlink_to(".")
    names = [path, tmp_path / "in/../in/rows.jsonl", "in/rows.jsonl", tmp_path / "in/**"]
    flags = ["--tokenizer", "byte", "--out", tmp_path / "out"]
    done = run(SCRIPT, "--input", *names, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(all_documents(tmp_path / "out")) == sorted(rows)


def test_files_of_a_bucket_that_describe_arrow_files_are_no_text():
    bucket = fsspec.filesystem("memory")
    names = ["hf/data.arrow", "hf/more.parquet", "hf/rows.json", "hf/state.json", "hf/LICENSE"]
    names += ["notes/a.md", "notes/.hidden"]
    names += ["splits/dataset_dict.json", "splits/test/a.arrow", "notes/dataset_dict.json"]
    for name in names:
        bucket.pipe(f"/corpus/{name}", b"x")
    names = [file.name for file in corpus.find_input("memory://corpus", "")]
    kept = ["hf/data.arrow", "hf/more.parquet", "hf/rows.json", "notes/a.md"]
    assert names == [*kept, "notes/dataset_dict.json", "splits/test/a.arrow"]


def test_what_datasets_puts_beside_a_data_set_is_not_read(tmp_path):
    """As after load_dataset("json", ..), map() and shuffle(): their results are no other data."""
    tmp_path = tmp_path / "a\nb"  # a name may have any character
    hidden = "json/0.0.0/cache-5e1dc27ab7fe2d54"
    names = ["json/0.0.0/json-train.arrow", f"{hidden}.arrow", f"{hidden}_00000_of_00002.arrow"]
    # Where cache_dir is a relative path, the name of the first lock begins with that folder's.
    locks = ["tmp_a\nb_json.lock", "json/0.0.0_builder.lock", "json/0.0.0.incomplete_info.lock"]
    for name in [*names, *locks, "json/0.0.0/dataset_info.json", "Cargo.lock"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"" if name in locks else b"x")
    read = [file.name for file in corpus.find_input(str(tmp_path), "")]
    assert read == ["Cargo.lock", names[0]]
    named = corpus.find_input(f"{tmp_path}/{hidden}*", "")
    assert [file.source for file in named] == [f"{tmp_path}/{name}" for name in names[1:]]


def test_results_beside_nothing_except_the_out_are_read(tmp_path):
    cache, out = tmp_path / "cache-5e1dc27ab7fe2d54.arrow", tmp_path / "out"
    table = pa.table(dict(text=text_rows()))
    with ipc.new_stream(str(cache), table.schema) as writer:
        writer.write_table(table)
    request = ["--input", tmp_path, "--tokenizer", "byte", "--out", out]
    prepare(*request)
    assert sorted(all_documents(out)) == sorted(text_rows())
    assert "is up to date" in run(SCRIPT, *request).stdout


def test_a_file_of_a_bucket_may_be_named_like_a_pattern():
    fsspec.filesystem("memory").pipe("/named/a[1].jsonl", b"x")
    (file,) = corpus.find_input("memory://named/a[1].jsonl", "")
    assert file.name == "a[1].jsonl"


def test_a_folder_that_a_pattern_of_a_bucket_matches_is_read():
    for name in ("top.jsonl", "part-1/a.jsonl", "part-2/deep/b.jsonl", "part-2/.hidden"):
        fsspec.filesystem("memory").pipe(f"/crawl/{name}", b"x")
    found = ["part-1/a.jsonl", "part-2/deep/b.jsonl", "top.jsonl"]
    for pattern, n in (("*", 3), ("**", 3), ("part-*", 2)):
        names = [file.name for file in corpus.find_input(f"memory://crawl/{pattern}", "")]
        assert names == found[:n]


def test_a_bucket_that_does_not_exist_has_no_files(tmp_path):
    with emulate_bucket({**os.environ}) as bucket:
        request = ["--input", "gs://nowhere/x", "--out", tmp_path / "out"]
        done = run(SCRIPT, *request, env=bucket.env)
        request = ["--input", __file__, "--out", "gs://nowhere/x"]
        unwritten = run(SCRIPT, *request, env=bucket.env)
    assert done.returncode == DATA and "no files in gs://nowhere/x" in done.stderr
    assert unwritten.returncode == STORAGE
    assert "--out gs://nowhere/x cannot be written" in unwritten.stderr


@pytest.mark.parametrize("shard_tokens", [300, 100_000_000])
def test_lines_are_documents_wherever_a_file_is_cut(tmp_path, monkeypatch, shard_tokens):
    lines = [f"line {n} {'x' * (n % 90)}" for n in range(3000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    flags = ["--tokenizer", "byte", "--shard_tokens", shard_tokens, "--document-per-line"]
    prepare("--input", tmp_path / "a.txt", *flags, "--out", tmp_path / "out")
    assert sorted(all_documents(tmp_path / "out")) == sorted(lines)
    for step in (1, 7, 100, 4096):
        file = corpus.File("a.txt", str(tmp_path / "a.txt"), (tmp_path / "a.txt").stat().st_size)
        options = readers.Options(document_per_line=True, piece=step)
        pieces = readers.cut_file(file, options)
        pieces = pieces if step > 7 else pieces[:2000]
        found = [x.parts[0][0] for piece in pieces for x in readers.read_documents(piece, options)]
        assert found == lines[: len(found)] and len(found) > 100 // (8 - min(step, 7))


def test_web_pages_as_in_fineweb(tmp_path):
    n = 500
    rows = [f"Page {i}: " + "some words of the web. " * (i % 13) for i in range(n)]
    columns = dict(text=rows, id=[f"<urn:uuid:{i}>" for i in range(n)], dump=["CC"] * n)
    columns |= dict(url=["http://a.b/c"] * n, date=["2013-05-18T05:48:54Z"] * n)
    columns |= dict(file_path=["s3://x"] * n, language=["en"] * n, language_score=[0.9] * n)
    columns |= dict(token_count=[7] * n)
    for k in range(2):
        part = {name: column[k::2] for name, column in columns.items()}
        parquet.write_table(pa.table(part), tmp_path / f"{k}.parquet", row_group_size=50)
    flags = ["--tokenizer", "bpe", "--vocab_size", 400, "--shard_tokens", 2000]
    prepare("--input", tmp_path / "*.parquet", *flags, "--out", tmp_path / "out")
    assert sorted(all_documents(tmp_path / "out")) == sorted(rows)
    check_digests(tmp_path / "out")


FINEWEB = ("id", "dump", "url", "date", "file_path", "language", "language_score", "token_count")


def write_web(path: Path, n_bytes: int) -> int:
    """A parquet of at least so many bytes, with the columns of FineWeb: the sources of the standard
    library again and again, each time cut elsewhere; how many rows it has."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = corpus.find_files(stdlib, ".py", prepare_data.NOT_STDLIB)
    sources = [Path(x.source).read_text(encoding="utf-8", errors="ignore") for x in found]
    generator, n, writer = random.Random(0), 0, None
    while writer is None or path.stat().st_size < n_bytes:
        rows = []
        for text in sources:
            cut = generator.randrange(len(text) or 1)
            n += 1
            facts = f"<urn:uuid:{n}>", "CC-MAIN-2013-20", f"http://a.b/{n}", "2013-05-18T05:48:54Z"
            facts += "s3://commoncrawl/x", "en", 0.9, len(text) // 4
            rows.append(
                dict(text=f"Page {n}\n{text[cut:]}{text[:cut]}")
                | dict(zip(FINEWEB, facts, strict=True))
            )
        table = pa.Table.from_pylist(rows)
        writer = writer or parquet.ParquetWriter(path, table.schema, compression="none")
        writer.write_table(table, row_group_size=100)
    writer.close()
    return n


@pytest.mark.slow
def test_200_mb_of_web_pages_become_a_model_that_learns(tmp_path):
    n = write_web(tmp_path / "web.parquet", 200_000_000)
    assert (tmp_path / "web.parquet").stat().st_size >= 200_000_000
    out, flags = tmp_path / "out", ["--tokenizer", "byte", "--workers", 2]
    prepare("--input", tmp_path / "*.parquet", *flags, "--out", out)
    assert sum(manifest(out / split)["documents"] for split in ("train", "val")) == n
    assert sum(manifest(out / split)["bytes"] for split in ("train", "val")) > 199_000_000
    data = ["--data.train", out / "train", "--data.val", out / "val", "--run.dir", tmp_path]
    few = ["--run.name", "web", "--train.steps", 30, "--train.eval_batches", 2]
    done = run("train.py", "--config", "tiny", *data, *few)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "web/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 30 and losses[-1] < losses[0] - 1.5
    for path in (out, tmp_path / "web.parquet"):  # 600 MB, of which pytest would keep three copies
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_suffix_begins_with_a_dot():
    options = readers.Options()
    for name in ("headlines", "context", "a.txt", "a.jsonl.txt"):
        assert readers.kind_of(corpus.File(name, f"/{name}", 1), options) == "text"
        lines = options._replace(document_per_line=True)
        assert readers.kind_of(corpus.File(name, f"/{name}", 1), lines) == "lines"
    assert readers.kind_of(corpus.File("a", "/a.jsonl.gz", 1), options) == ".jsonl.gz"


# ---- bad rows

BAD_LINES = [
    b'{"text": "good one"}',
    b'{"text": ',
    b"",
    b'{"text": ""}',
    b'{"text": 7}',
    b'{"other": "x"}',
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b"[1]",
    b"[" * 100_000,
    b"null",
    b'"text"',
    b'{"text": "good two"}',
    b'{"text": "good three"}',
]
WHY = {2: "Expecting", 4: "empty", 5: "is of type int", 6: "is missing", 7: "not UTF-8"}
WHY |= {8: "not UTF-8", 9: "list in place of", 10: "recursion", 11: "null in place of"}
WHY |= {12: "str in place of"}


def skipped_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]


def test_bad_rows_are_counted_skipped_and_listed(tmp_path):
    path, out = tmp_path / "bad.jsonl", tmp_path / "out"
    path.write_bytes(b"\n".join(BAD_LINES))
    (tmp_path / "latin.txt").write_bytes("ü".encode("latin-1"))
    request = ["--input", path, tmp_path / "latin.txt", "--tokenizer", "byte", "--out"]
    done = run(SCRIPT, *request, out)
    assert done.returncode == 0 and "skipped 11 document(s)" in done.stdout
    assert sorted(all_documents(out)) == ["good one", "good three", "good two"]
    found = skipped_of(out)
    assert [row["row"] for row in found] == [*WHY, 1]
    for row in found[:-1]:
        assert row["file"] == str(path) and WHY[row["row"]] in row["why"], row
    assert found[-1] == dict(file=str(tmp_path / "latin.txt"), row=1, why="not UTF-8")
    strict = run(SCRIPT, *request, tmp_path / "strict", "--strict")
    assert strict.returncode == DATA and f"{path} row 2: Expecting" in strict.stderr
    assert strict.stderr.count("\n") == 2
    prepare(*request, tmp_path / "strict")
    assert contents(tmp_path / "strict") == contents(out)
    strict = run(SCRIPT, *request, out, "--strict")
    assert strict.returncode == DATA and "out/skipped.jsonl lists" in strict.stderr


def test_rows_are_numbered_from_the_start_of_their_file(tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = [json.dumps(dict(text="x" * 100 + str(n))) for n in range(3000)]
    bad = [0, 1, 1234, 2999]
    for n in bad:
        lines[n] = "{"
    path.write_text("\n".join(lines))
    assert path.stat().st_size > 4 * 65536  # several pieces
    prepare("--input", path, "--tokenizer", "byte", "--shard_tokens", 100, "--out", out)
    assert len(manifest(out / "train")["shards"]) > 3
    assert [row["row"] for row in skipped_of(out)] == [n + 1 for n in bad]


def test_a_line_that_is_too_long_is_one_bad_row(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n" + "x" * 5000 + "\ntwo\n")
    monkeypatch.setattr(readers, "LIMIT", 1000)
    monkeypatch.setattr(readers, "PIECE", 64)
    file = corpus.File("a.txt", str(tmp_path / "a.txt"), 5009)
    options = readers.Options(document_per_line=True)
    pieces = readers.cut_file(file, options)
    one, bad, two = (x for piece in pieces for x in readers.read_documents(piece, options))
    assert (one.parts[0][0], two.parts[0][0], two.row) == ("one", "two", 3)
    assert bad == readers.Skipped(2, "longer than 1000 bytes")


def test_a_long_document_is_encoded_in_parts(tmp_path, monkeypatch):
    """To encode 20 MB at once took 4 GB of memory."""
    lines = "".join(f"line {n}\n" for n in range(1000))
    chat = [dict(role="user", content="Hi"), dict(role="assistant", content=lines)]
    texts = [chat, lines, "ä" * 5000, *(f"short {n}" for n in range(40))]
    rows = [json.dumps(dict(text=text)) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    encode, encoded = shard_tasks.encode_texts, []

    def encode_texts(tokenizer, texts):
        encoded.extend(texts)
        return encode(tokenizer, texts)

    monkeypatch.setattr(shard_tasks, "encode_texts", encode_texts)
    for module in (prepare_data, shard_tasks):
        monkeypatch.setattr(module, "PIECE", 1000)
    inputs, out = (str(tmp_path / "a.jsonl"),), tmp_path / "out"
    prepare_data.main(prepare_data.Args(str(out), inputs, tokenizer="byte"))
    assert max(map(len, encoded)) <= 1000 and "short 1" in encoded
    found = documents_of(out / "train") + documents_of(out / "val")
    chat = f"user: Hi\nassistant: {lines}\n"
    assert sorted(found) == sorted([chat, *texts[1:]])
    counts = [manifest(out / split)["documents"] for split in ("train", "val")]
    assert sum(counts) == len(texts)


def test_a_file_of_one_line_is_not_read_again_by_each_of_its_pieces(tmp_path, monkeypatch):
    path, n_read = tmp_path / "a.jsonl", []
    path.write_bytes(b"x" * 100_000)

    class Counted(io.FileIO):
        def readline(self, n):
            n_read.append(len(line := super().readline(n)))
            return line

    monkeypatch.setattr(readers, "open_source", Counted)
    monkeypatch.setattr(readers, "PIECE", 1000)
    options = readers.Options(piece=1000)
    pieces = readers.cut_file(corpus.File("a.jsonl", str(path), 100_000), options)
    assert len([x for piece in pieces for x in readers.read_documents(piece, options)]) == 1
    assert sum(n_read) < 3 * 100_000


@pytest.mark.parametrize("kind", [".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("how", ["cut", "flipped", "other"])
def test_a_damaged_file_is_no_traceback(tmp_path, kind, how):
    path, out = write_corpus(tmp_path, kind, text_rows(400)), tmp_path / "out"
    data = bytearray(path.read_bytes())
    match how:
        case "cut":
            data = data[: len(data) // 2]
        case "flipped":
            for i in range(len(data) // 3, len(data) // 3 + 40):
                data[i] ^= 0x5A
        case "other":
            data = b"not such a file"
    path.write_bytes(data)
    (tmp_path / "good.jsonl").write_bytes(json_lines([dict(text=x) for x in "abc"]))
    request = ["--input", path, tmp_path / "good.jsonl", "--tokenizer", "byte", "--out", out]
    done = run(SCRIPT, *request)
    assert done.returncode == 0, done.stderr
    assert {"a", "b", "c"} <= set(all_documents(out))
    if how != "flipped" or kind.startswith(".jsonl"):  # the others have no checksums
        assert str(path) in {row["file"] for row in skipped_of(out)}


def test_a_length_beyond_all_memory_is_two_lines(tmp_path):
    """Damage may make one; where memory is short for another reason, the file is sound."""
    path = write_corpus(tmp_path, ".arrow", text_rows())
    data = path.read_bytes()
    _, rows, *_ = ipc.MessageReader.open_stream(data)
    path.write_bytes(data.replace(rows.body.size.to_bytes(8, "little"), bytes(7) + b"\x10", 1))
    done = run(SCRIPT, "--input", path, "--tokenizer", "byte", "--out", tmp_path / "out")
    assert done.returncode == DATA and f"error: {path} cannot be read: " in done.stderr, done.stderr
    assert done.stderr.count("\n") == 2
    with pytest.raises(UserError, match="x.jsonl cannot be read: out of memory"):
        readers.describe_damage(MemoryError(), "x.jsonl")


def test_an_arrow_file_without_its_dictionary_is_damaged(tmp_path):
    column, path = pa.array(text_rows()).dictionary_encode(), tmp_path / "a.arrow"
    table = pa.table(dict(text=column, other=column))
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    schema, first, _, rows, *_ = ipc.MessageReader.open_stream(path.read_bytes())
    parts = [part.serialize().to_pybytes() for part in (schema, first, first, rows)]
    path.write_bytes(b"".join(parts))
    (file,) = corpus.find_input(str(path), "")
    (piece,) = readers.cut_file(file, readers.Options())
    (skipped,) = readers.read_documents(piece, readers.Options())
    assert skipped.why == "cannot be read on from here: Dictionary with id 1 not found"


def test_a_damaged_row_group_ends_no_other(tmp_path):
    rows, out = text_rows(), tmp_path / "out"
    path = write_corpus(tmp_path, ".parquet", rows)
    start = parquet.ParquetFile(path).metadata.row_group(1).column(1).dictionary_page_offset
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(20) + data[start + 20 :])
    prepare("--input", path, "--tokenizer", "byte", "--out", out)
    assert sorted(all_documents(out)) == sorted(rows[:20] + rows[40:])
    assert [row["row"] for row in skipped_of(out)] == [21]


def test_an_empty_split_is_an_error_without_a_manifest(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "choose_val_below", lambda *_: 0)
    args = prepare_data.Args(str(tmp_path / "out"), (str(texts),), tokenizer="byte")
    with pytest.raises(UserError, match="no document for val") as error:
        prepare_data.main(args)
    assert error.value.code == DATA and not [*tmp_path.rglob("manifest.json")]


def test_a_wrong_field_of_a_large_corpus_is_said_before_it_is_all_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "a"}\n' * 100_001)
    done = run(SCRIPT, "--input", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert done.returncode == DATA and "fix: give other files, or name the right" in done.stderr
    assert re.search("no document yet, and 100,000 rows.*the row has 'body'", done.stdout)


def test_files_of_another_origin_are_not_overwritten(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n" * 50)
    (tmp_path / "out" / "train").mkdir(parents=True)
    theirs = tmp_path / "out" / "train" / "shard_00000.npy"
    theirs.write_bytes(b"theirs")
    flags = ["--input", tmp_path / "a.txt", "--tokenizer", "byte", "--out", tmp_path / "out"]
    done = run(SCRIPT, *flags)
    assert done.returncode == DATA and f"{theirs} is there" in done.stderr, done.stderr
    assert theirs.read_bytes() == b"theirs"


def test_a_column_that_is_there_twice_and_a_vocabulary_without_end_are_errors(tmp_path):
    column = pa.array(["one", "two"])
    parquet.write_table(pa.table([column, column], ["text", "text"]), tmp_path / "a.parquet")
    flags = ["--input", tmp_path / "a.parquet", "--out", tmp_path / "out"]
    done = run(SCRIPT, *flags, "--tokenizer", "byte")
    assert done.returncode == DATA and "has 2 columns 'text'" in done.stderr, done.stderr
    done = run(SCRIPT, *flags, "--vocab_size", 99_999_999_999)
    assert done.returncode == USAGE and done.stderr.count("\n") == 2, done.stderr


@pytest.mark.parametrize("cut", [1, 2000, None])
def test_the_end_that_a_compressed_file_lacks_is_told(tmp_path, cut):
    """Also where it was cut between two lines, so that no row is broken."""
    path = tmp_path / "rows.jsonl.zst"
    rows = json_lines([dict(text=f"{n} {n * n * 7919 % 100003}") for n in range(20_000)])
    path.write_bytes(zstandard.compress(rows[:-9]) + zstandard.compress(rows[-9:]))
    if cut is None:  # all of what was flushed is there, but the frame does not end
        stream = zstandard.ZstdCompressor().compressobj()
        flushed = stream.compress(rows) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        path.write_bytes(flushed)
    else:
        path.write_bytes(path.read_bytes()[:-cut])
    [piece] = readers.cut_file(
        corpus.File("rows", str(path), path.stat().st_size), readers.Options()
    )
    found = list(readers.read_documents(piece, readers.Options()))
    assert "ended before" in found[-1].why
    assert cut or len(found) == 20_001


def test_a_zst_file_with_the_longest_window_is_read(tmp_path):
    rows, path = text_rows(), tmp_path / "rows.jsonl.zst"
    longest = zstandard.ZstdCompressionParameters(window_log=31)
    stream = zstandard.ZstdCompressor(compression_params=longest).compressobj()
    lines = json_lines([dict(text=text) for text in rows])
    path.write_bytes(stream.compress(lines) + stream.flush())
    piece = readers.Piece(".jsonl.zst", str(path), 0, 0, 0)
    found = list(readers.read_documents(piece, readers.Options()))
    assert [document.parts[0][0] for document in found] == rows


def test_a_column_with_a_dot_in_its_name_has_a_size(tmp_path):
    path, sizes = tmp_path / "a.parquet", []
    for name in ("text", "text.clean"):
        parquet.write_table(pa.table({name: ["x" * 1000, "y"], "textual": ["z" * 9000] * 2}), path)
        (file,) = corpus.find_input(str(path), "")
        sizes.append(readers.cut_file(file, readers.Options(name))[0].size)
    assert sizes[0] == sizes[1] > 1000


@pytest.mark.parametrize("how", [
    lambda column: column,
    lambda column: column.dictionary_encode(),  # as Pandas writes categories
    lambda column: column.cast(pa.string_view()),
])  # fmt: skip
def test_text_that_is_not_utf8_in_a_table_is_one_bad_row(tmp_path, how):
    column = how(pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string()))
    parquet.write_table(pa.table(dict(text=column)), tmp_path / "a.parquet")
    prepare("--input", tmp_path / "a.parquet", "--tokenizer", "byte", "--out", tmp_path / "out")
    assert sorted(all_documents(tmp_path / "out")) == ["fine", "good"]
    assert [(row["row"], row["why"]) for row in skipped_of(tmp_path / "out")] == [(2, "not UTF-8")]


def test_a_chat_that_is_not_utf8_in_a_table_is_one_bad_row(tmp_path):
    texts = [b"good", b"\xff\xfe", b"fine", b"well"]
    column = pa.array(texts, pa.binary()).view(pa.string())
    columns = [pa.array(["assistant"] * 4), column]
    messages = pa.StructArray.from_arrays(columns, ["role", "content"])
    chats = pa.ListArray.from_arrays(range(5), messages)
    parquet.write_table(pa.table(dict(chat=chats)), tmp_path / "a.parquet")
    flags = ["--field", "chat", "--tokenizer", "byte", "--out", tmp_path / "out"]
    prepare("--input", tmp_path / "a.parquet", *flags)
    want = [f"assistant: {word}\n" for word in ("fine", "good", "well")]
    assert sorted(all_documents(tmp_path / "out")) == want
    assert [(row["row"], row["why"]) for row in skipped_of(tmp_path / "out")] == [(2, "not UTF-8")]


def test_other_fields_of_a_message_in_a_table_are_not_read(tmp_path):
    """Python has no such time and no such date: without care for them no row could be read."""
    fields = [("at", pa.timestamp("ns")), ("content", pa.string()), ("day", pa.date32())]
    kind = pa.list_(pa.struct([("role", pa.string()), *fields]))
    chats = [[dict(role="assistant", at=123456789, content=x, day=10**7)] for x in "abc"]
    parquet.write_table(pa.table(dict(chat=pa.array(chats, kind))), tmp_path / "a.parquet")
    flags = ["--field", "chat", "--tokenizer", "byte", "--out", tmp_path / "out"]
    prepare("--input", tmp_path / "a.parquet", *flags)
    assert sorted(all_documents(tmp_path / "out")) == [f"assistant: {x}\n" for x in "abc"]


# ---- splits and repeats


def test_the_split_does_not_change_when_files_are_added(tmp_path):
    rows = text_rows(300)
    held_out = {}
    for name, some in dict(few=rows[:150], all=rows).items():
        (tmp_path / name).mkdir()
        for n in range(0, len(some), 50):
            path = tmp_path / name / f"{name}{n}.jsonl"
            path.write_bytes(json_lines([dict(text=x) for x in some[n : n + 50]]))
        flags = ["--tokenizer", "byte", "--val_fraction", 0.2, "--out", tmp_path / f"{name}.out"]
        prepare("--input", tmp_path / name, *flags)
        held_out[name] = set(documents_of(tmp_path / f"{name}.out" / "val"))
    assert held_out["few"] == held_out["all"] & set(rows[:150])
    assert 40 < len(held_out["all"]) < 80


@pytest.mark.parametrize("fraction", [0.000001, 0.999999])
def test_neither_split_is_empty(tmp_path, fraction):
    rows, out = text_rows(), tmp_path / "out"
    path = write_corpus(tmp_path, ".parquet", rows)
    flags = ["--tokenizer", "byte", "--shard_tokens", 100, "--val_fraction", fraction]
    prepare("--input", path, *flags, "--out", out)
    small, large = ("val", "train") if fraction < 0.5 else ("train", "val")
    digests = {hashlib.blake2b(x.encode(), digest_size=16).digest(): x for x in rows}
    extreme = digests[min(digests) if small == "val" else max(digests)]
    assert documents_of(out / small) == [extreme]
    assert sorted(documents_of(out / large)) == sorted(set(rows) - {extreme})
    check_digests(out)


def test_one_row_alone_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines([dict(text="alone")] * 3 + [dict(text=1)]))
    done = run(SCRIPT, "--input", path, "--tokenizer", "byte", "--out", tmp_path / "out")
    assert done.returncode == DATA and "only one document" in done.stderr
    assert "skipped: field 'text' is of type int, not text" in done.stderr
    other = run(SCRIPT, "--input", path, "--field", "x", "--out", tmp_path / "other")
    assert other.returncode == DATA and "'x' is missing: the row has 'text'" in other.stderr
    assert not (tmp_path / "other").exists()


def test_dedup_drops_exact_repeats(tmp_path):
    rows = text_rows(40)
    for name in "ab":
        some = rows[:30] if name == "a" else rows[20:] + rows[25:]
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines([dict(text=x) for x in some]))
    (tmp_path / "c.txt").write_text(rows[3])
    request = ["--input", *(tmp_path / x for x in ("a.jsonl", "b.jsonl", "c.txt"))]
    request += ["--tokenizer", "byte", "--shard_tokens", 300]
    prepare(*request, "--out", tmp_path / "all")
    assert len(all_documents(tmp_path / "all")) == 66
    prepare(*request, "--out", tmp_path / "out", "--dedup")
    assert sorted(all_documents(tmp_path / "out")) == sorted(rows)
    check_digests(tmp_path / "out")


def test_prompts_that_end_elsewhere_make_other_documents(tmp_path):
    rows = [dict(q=f"{n} ab"[:end], text=f"{n} ab"[end:]) for n in range(9) for end in (3, 3, 2)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows))
    flags = ["--prompt_field", "q", "--tokenizer", "byte", "--dedup", "--out", tmp_path / "out"]
    prepare("--input", tmp_path / "a.jsonl", *flags)
    scored = [part for _, part, _ in masked_documents(tmp_path / "out")]
    assert sorted(scored) == ["ab"] * 9 + ["b"] * 9


# ---- masks


def masked_documents(out: Path) -> list[tuple[str, str, bool]]:
    """(text, what is scored of it, whether its end token is) of each document."""
    found = []
    for split in ("train", "val"):
        tokenizer = Tokenizer.from_file(str(out / split / "tokenizer.json"))
        for shard in manifest(out / split)["shards"]:
            tokens = np.load(out / split / shard["name"])
            stem = shard["name"].removesuffix(".npy")
            mask = np.fromfile(out / split / f"{stem}.mask", np.uint8).astype(bool)
            assert len(mask) == len(tokens) and "mask" in shard
            ends = np.flatnonzero(tokens == manifest(out / split)["eot_id"]) + 1
            parts = zip(np.split(tokens, ends)[:-1], np.split(mask, ends)[:-1], strict=True)
            for ids, scored in parts:
                text, part = ids[:-1].tolist(), ids[:-1][scored[:-1]].tolist()
                found.append((tokenizer.decode(text), tokenizer.decode(part), bool(scored[-1])))
    return sorted(found)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompts_are_not_scored(tmp_path, kind):
    rows = [dict(q=f"Question {n}? It is", text=f"ismael's answer {n}.") for n in range(20)]
    path, out = tmp_path / f"a.{kind}", tmp_path / "out"
    if kind == "jsonl":
        path.write_bytes(json_lines(rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    flags = ["--prompt_field", "q", "--vocab_size", 300, "--val_fraction", 0.3]
    prepare("--input", path, *flags, "--out", out)
    want = sorted((row["q"] + row["text"], row["text"], True) for row in rows)
    assert masked_documents(out) == want
    check_digests(out)


@pytest.mark.parametrize("role_key, content_key", [("role", "content"), ("from", "value")])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_only_the_assistant_is_scored(tmp_path, kind, role_key, content_key):
    rows, want = [], []
    other_names = dict(user="human", assistant="gpt") if role_key == "from" else {}

    def message(role, content):
        return {role_key: other_names.get(role, role), content_key: content}

    for n in range(20):
        talk = [("system", "Be brief."), ("user", f"Hi {n}"), ("assistant", f"Hello {n}!")]
        talk += [("user", "Bye"), ("assistant", "So long.\nBye")][: 2 if n % 2 else 1]
        rows.append(dict(messages=[message(*x) for x in talk]))
        text = "".join(f"{role}: {content}\n" for role, content in talk)
        scored = "".join(f"{content}\n" for role, content in talk if role == "assistant")
        want.append((text, scored, talk[-1][0] == "assistant"))
    path, out = tmp_path / f"a.{kind}", tmp_path / "out"
    if kind == "jsonl":
        bad = [dict(messages=[message("user", "alone")]), dict(messages=[3])]
        for content in (None, [dict(type="text", text="Hi")]):
            bad.append(dict(messages=[rows[0]["messages"][0], message("user", content)]))
        path.write_bytes(json_lines(rows + bad))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    flags = ["--field", "messages", "--tokenizer", "byte", "--val_fraction", 0.3]
    prepare("--input", path, *flags, "--out", out)
    assert masked_documents(out) == sorted(want)
    if kind == "jsonl":
        form = 'a message is {"role": .., "content": ..} or {"from": .., "value": ..}'
        why = ["no message of the assistant", f"message 1 is of type int; {form}"]
        why += [f"message 2: {content_key} is not text; {form}"] * 2
        assert [x["why"] for x in skipped_of(out)] == why


def test_a_prompt_does_not_go_with_messages():
    chat = [dict(role="assistant", content="Hi")]
    options = readers.Options("x", "q")
    for row, why in (
        (dict(q="ask", x=chat), "--prompt_field does not go with a field of messages"),
        (dict(q=chat, x="answer"), "field 'q' is of type list, not text"),
    ):
        with pytest.raises(ValueError) as error:
            readers.parts_of(row, options)
        assert str(error.value) == why


# ---- the same bytes


def contents(out: Path) -> dict[str, bytes]:
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}


WORDS = "the of and to in is you that it he was for on are as with his they at be this have"


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> list:
    """A corpus for which several processes are started, and the request to prepare it."""
    folder = tmp_path_factory.mktemp("large")
    generator = random.Random(0)
    words = WORDS.split()
    rows = [" ".join(generator.choices(words, k=300)) + f" {n}" for n in range(3000)]
    parquet.write_table(pa.table(dict(text=rows[:1500])), folder / "a.parquet", row_group_size=100)
    (folder / "b.jsonl").write_bytes(json_lines([dict(text=x) for x in rows[1500:]]) + b"{\n")
    request = ["--input", folder, "--tokenizer", "bpe", "--vocab_size", 300, "--dedup"]
    return [*request, "--shard_tokens", 40_000]


@pytest.fixture(scope="module")
def by_one_worker(large, tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("one") / "out"
    prepare(*large, "--workers", 1, "--out", out)
    check_digests(out)
    assert len(manifest(out / "train")["shards"]) > 12
    return contents(out)


def test_four_workers_write_the_same_bytes(large, by_one_worker, tmp_path):
    prepare(*large, "--workers", 4, "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == by_one_worker


def start_prepare(request, out) -> subprocess.Popen:
    """prepare_data.py in a process group of its own."""
    command = [*map(str, (sys.executable, ROOT / SCRIPT, *request, "--workers", 4, "--out", out))]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **pipes, start_new_session=True)


@pytest.mark.slow
def test_twenty_kills_change_no_byte(large, by_one_worker, tmp_path):
    folders, generator, n_kills = (tmp_path / f"out{n}" for n in count()), random.Random(1), 0
    out = next(folders)
    begin = time.monotonic()
    prepare(*large, "--workers", 4, "--out", tmp_path / "straight")
    whole = time.monotonic() - begin
    while n_kills < 20:
        process = start_prepare(large, out)
        time.sleep(generator.uniform(0.2, 1) * whole)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            n_kills += 1
        _, err = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), err
        if process.returncode == 0:
            assert contents(out) == by_one_worker
            out = next(folders)
    prepare(*large, "--out", out)
    assert contents(out) == by_one_worker


def wait_for_task(out: Path, process):
    while not list(out.glob("progress/task_*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    )
    return [*map(int, listed.stdout.split())]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_system_that_does_not_say_which_cores_are_its_own(texts, tmp_path, monkeypatch):
    """As macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    args = prepare_data.Args(str(tmp_path / "out"), (str(texts),), tokenizer="byte")
    prepare_data.main(args)
    assert manifest(tmp_path / "out" / "train")


@pytest.mark.parametrize("number", [
    signal.SIGTERM,
    *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGKILL)),
])  # fmt: skip
def test_workers_end_with_their_parent(large, by_one_worker, tmp_path, number):
    process = start_prepare(large, tmp_path / "out")
    wait_for_task(tmp_path / "out", process)
    workers = children(process.pid)
    assert len(workers) >= 4
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as Ctrl-C does
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == INTERRUPTED, err
        assert err == "interrupted: run the same command again to go on\n"
    deadline = time.monotonic() + 10
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
    prepare(*large, "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == by_one_worker


def test_a_killed_worker_is_two_lines(large, by_one_worker, tmp_path):
    process = start_prepare(large, tmp_path / "out")
    wait_for_task(tmp_path / "out", process)
    for pid in children(process.pid):
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == DISTRIBUTED and "a worker process was killed" in err
    assert "with fewer --workers" in err
    assert err.count("\n") == 2, err
    prepare(*large, "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == by_one_worker


@pytest.mark.slow
def test_a_bucket_has_the_same_bytes(large, by_one_worker, tmp_path):
    with emulate_bucket({**os.environ}) as bucket:
        for path in sorted(Path(large[1]).iterdir()):
            bucket.write(f"in/{path.name}", path.read_bytes())
        inputs = ["--input", "gs://bucket/in/*.parquet", "gs://bucket/in/b.jsonl"]
        done = run(SCRIPT, *inputs, *large[2:], "--out", "gs://bucket/out", env=bucket.env)
        assert done.returncode == 0, done.stderr
        found = bucket.contents("out/")
    assert found.pop("times.sha256") != by_one_worker["times.sha256"]  # of generations
    row = json.loads(found.pop("skipped.jsonl"))
    assert row == dict(file="gs://bucket/in/b.jsonl", row=1501, why=row["why"])
    names = by_one_worker.keys() - {"skipped.jsonl", "times.sha256"}
    assert found == {name: by_one_worker[name] for name in names}


# ---- with packages of tests/requirements-interop.txt


@pytest.mark.slow
@needs("ray")
def test_ray_writes_the_same_bytes(large, by_one_worker, tmp_path):
    """Also where its workers cannot import this repository, because it was not started there."""
    done = run(SCRIPT, *large, "--ray", "local", "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == by_one_worker


@needs("ray")
def test_what_is_no_address_of_a_cluster_is_two_lines(texts, tmp_path):
    request = ["--input", texts, "--tokenizer", "byte", "--out", tmp_path / "out"]
    done = run(SCRIPT, *request, "--ray", "nonsense")
    assert done.returncode == DISTRIBUTED and "--ray nonsense: Invalid address" in done.stderr


@pytest.mark.slow
@needs("datasets")
def test_a_streamed_data_set_is_read_through_its_library(tmp_path):
    """A local folder stands in for the hub's data set of the same name."""
    rows, out = text_rows(), tmp_path / "out"
    (tmp_path / "org/name").mkdir(parents=True)
    # What `datasets` writes of a column of images: it would decode each that is read.
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = dict(text={"dtype": "string", "_type": "Value"}, image={"_type": "Image"})
    about = {"huggingface": json.dumps(dict(info=dict(features=features)))}
    for n in range(3):
        some = rows[n::3]
        images = pa.array([dict(bytes=b"no image", path=None)] * len(some), image)
        table = pa.table(dict(text=some, image=images)).replace_schema_metadata(about)
        parquet.write_table(table, tmp_path / f"org/name/train-{n}.parquet")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    request = ["--tokenizer", "byte", "--val_fraction", 0.2, "--out", out]
    done = run(SCRIPT, "--input", "hf://org/name::train", *request, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(all_documents(out)) == sorted(rows)
    names = [shard["name"] for shard in manifest(out / "train")["shards"]]
    assert names == [f"shard_{n:05d}.npy" for n in range(3)]


@pytest.mark.parametrize("source, asked", [
    ("hf://org/name", ("org/name", None, "train", None)),
    ("hf://org/name:small:test", ("org/name", "small", "test", None)),
    ("hf://org/name@v1.0::test", ("org/name", None, "test", "v1.0")),
])  # fmt: skip
def test_a_streamed_data_set_is_asked_for_by_its_parts(monkeypatch, source, asked):
    def load_dataset(name, config, *, split, revision, streaming):
        return name, config, split, revision

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert readers.open_dataset(source) == asked


@pytest.mark.parametrize("error", [
    RuntimeError("Dataset scripts are no longer supported, but found b.py"),
    FileNotFoundError("Dataset 'a/b' is a gated dataset on the Hub."),
    ValueError("Unknown split 'x'"),
], ids=lambda e: type(e).__name__)  # fmt: skip
def test_a_streamed_data_set_that_cannot_be_read_is_told_with_what_may_help(monkeypatch, error):
    def fail(source):
        raise error

    monkeypatch.setattr(readers, "open_dataset", fail)
    with pytest.raises(UserError) as e:
        readers.cut_file(corpus.File("hf://a/b", "hf://a/b", 1), readers.Options())
    assert e.value.code == DATA and str(error) in str(e.value)
    for word in ("hf://org/name:config:split", "Parquet files", "`hf auth login`"):
        assert word in e.value.problems[0].fix


HUB = ["--input", "hf://a/b"]


def test_a_streamed_data_set_without_the_column_is_an_error_before_all_of_it_is_read(monkeypatch):
    dataset = SimpleNamespace(column_names=["id", "text"], num_shards=2)
    monkeypatch.setattr(readers, "open_dataset", lambda source: dataset)
    file = corpus.File("hf://a/b", "hf://a/b", 1)
    assert len(readers.cut_file(file, readers.Options())) == 2
    with pytest.raises(UserError, match="hf://a/b has no column 'content'; its columns: id, text"):
        readers.cut_file(file, readers.Options("content"))


def test_packages_that_are_not_there_are_named(texts, tmp_path):
    code = "import sys; sys.modules |= dict(ray=None, datasets=None); sys.argv[0] = sys.argv[1]; "
    code += "del sys.argv[1]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    for word, flags in dict(ray=["--input", texts, "--ray", "local"], datasets=HUB).items():
        command = [sys.executable, "-c", code, ROOT / SCRIPT, *flags, "--out", tmp_path / word]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert done.returncode == USAGE and f"needs the package {word}" in done.stderr
        assert done.stderr.count("\n") == 2
        assert ("bytes" in done.stdout) == (word == "ray")  # what is streamed has no size
