"""The scripts that prepare data, sample, evaluate and report, and the commands of the Makefile."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT, on_mesh, prepare, run
from tokenizers import Tokenizer

import cli
import config
import files
import train
from config import CHECKPOINT, DATA, USAGE
from dataset import Dataset
from scripts import prepare_data

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


# ---- prepare_data


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_prepared_text_decodes_to_what_it_was(texts, tmp_path, kind):
    out = tmp_path / "out"
    request = ["--input", texts, "--suffix", ".txt", "--tokenizer", kind, "--vocab_size", 400]
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


@pytest.mark.slow
def test_a_large_file_is_read_in_pieces_of_whole_lines(tmp_path):
    path, out = tmp_path / "large.txt", tmp_path / "out"
    lines = [f"line {n} of many, with an ümlaut\n" for n in range(300_000)]
    path.write_text("".join(lines))
    assert path.stat().st_size > 8_000_000
    prepare("--input", path, "--tokenizer", "byte", "--out", out, "--shard_tokens", 3_000_000)
    assert len(manifest(out / "train")["shards"]) > 2
    assert "".join(documents_of(out / "train") + documents_of(out / "val")) == "".join(lines)


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


def test_a_tokenizer_left_by_another_request_is_not_used(texts, tmp_path):
    """The state on disk is that of a command killed between the tokenizer and the first shard."""
    out = tmp_path / "out"
    prepare("--input", texts, "--tokenizer", "byte", "--out", out)
    for split in ("train", "val"):
        recipe = manifest(out / split)["recipe"]
        state = dict(next=0, bytes=0, shards=[], recipe=recipe)
        (out / split / "progress.json").write_text(json.dumps(state))
        (out / split / "manifest.json").unlink()
    other = run("scripts/prepare_data.py", "--input", texts, "--tokenizer", "bpe", "--out", out)
    assert other.returncode == DATA and "was made with other tokenizer" in other.stderr


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


def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path):
    source = Path(os.__file__).parent / "email"
    request = ["--input", source, "--suffix", ".py", "--shard_tokens", 4000]
    request += ["--tokenizer", "bpe", "--vocab_size", 600]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    prepare(*request, "--out", whole)
    command = [sys.executable, ROOT / "scripts/prepare_data.py", *request, "--out", cut]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen([*map(str, command)], **quiet)
    while not (cut / "train" / "progress.json").exists():
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
    found = prepare_data.prose_documents(prepare_data.find_files(tmp_path, ".py", set()))
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


def test_a_log_file_gets_no_progress_bars(texts, tmp_path):
    request = ["--input", texts, "--vocab_size", 300, "--out", tmp_path / "out"]
    done = run("scripts/prepare_data.py", *request)
    assert done.stdout.count("\n") == 4 and "\r" not in done.stdout and not done.stderr


@pytest.mark.parametrize("request_, code, word", [
    ([], USAGE, "0 of --input, --stdlib and --pydocs are given, not 1"),
    (["--input", "x", "--stdlib"], USAGE, "2 of --input, --stdlib and --pydocs are given, not 1"),
    (["--stdlib", "--pydocs"], USAGE, "2 of --input, --stdlib and --pydocs are given, not 1"),
    (["--input", "/nowhere"], DATA, "--input /nowhere does not exist"),
    (["--stdlib", "--val_fraction", "2"], USAGE, "val_fraction=2.0"),
    (["--stdlib", "--tokenizer", "bytes"], USAGE, "bytes is none of byte, char and bpe"),
], ids=lambda x: "")  # fmt: skip
def test_a_bad_request_is_two_lines(tmp_path, request_, code, word):
    done = run("scripts/prepare_data.py", "--out", tmp_path / "out", *request_)
    assert done.returncode == code and word in done.stderr and done.stderr.count("\n") == 2


# ---- from a checkpoint


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> Path:
    """A short run on (2, 2, 2) that has sampled, with checkpoints at 10 and 20."""
    tiny = config.tiny()
    cfg = replace(
        tiny,
        run=replace(tiny.run, dir=str(tmp_path_factory.mktemp("runs"))),
        mesh=config.Mesh(2, 2, 2),
        model=replace(tiny.model, n_layers=2),
        data=config.Data(train=str(corpus / "train"), val=str(corpus / "val")),
        train=replace(tiny.train, microbatches=2, sample_every=10, sample_tokens=5),
    )
    train.main(cfg)
    return Path(cfg.run.dir) / cfg.run.name


def text_of(trained, *args) -> str:
    done = run("scripts/sample.py", "--run", trained, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_samples_are_the_same_text_from_any_mesh(trained):
    args = ["--prompt", "import ", "--tokens", 12, "--temperature", 0.5, "--seed", 3]
    want = text_of(trained, *args, "--mesh.dp", 1)
    assert want.startswith("import ") and len(want) > 8
    assert text_of(trained, *args, "--mesh.dp", 2, "--mesh.pp", 2, "--mesh.tp", 2) == want
    several = text_of(trained, *args, "--mesh.dp", 1, "--prompt", "import ", "def ", "")
    assert several.startswith(want.rstrip("\n")) and several.count("-" * 80) == 3


def test_samples_in_training_compare_over_time(trained):
    train.main(cli.parse(["--config", str(trained / "config.json")]))  # finished: adds nothing
    rows = [json.loads(line) for line in (trained / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20]
    assert all(isinstance(row["text"], str) for row in rows)


def test_a_checkpoint_can_be_chosen(trained):
    args = ["--prompt", "import ", "--tokens", 8, "--temperature", 0, "--mesh.dp", 1]
    assert text_of(trained, *args, "--step", 20) == text_of(trained, *args)
    done = run("scripts/sample.py", "--run", trained, *args, "--step", 15)
    assert done.returncode == CHECKPOINT and "has no checkpoint 15, only 10 or 20" in done.stderr
    bad = run("scripts/sample.py", "--run", trained, "--top_p", 2, "--temperature=-1")
    assert bad.returncode == USAGE and bad.stderr.count("error:") == 2


def test_evaluate_agrees_with_training_and_writes_each_token(trained, corpus, tmp_path):
    logged = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()][-1]
    out = tmp_path / "logprob.npy"
    args = ["--run", trained, "--per_token", out, "--batch_size", 10]
    done = run("scripts/evaluate.py", *args, "--mesh.dp", 2, "--mesh.tp", 2)
    assert done.returncode == 0, done.stderr
    result, logprob = json.loads(done.stdout), np.load(out)
    assert logged["kind"] == "eval" and result["tokens"] == logged["tokens"] == len(logprob)
    for name in ("loss", "bits_per_byte"):
        np.testing.assert_allclose(result[name], logged[name], rtol=1e-5)
    np.testing.assert_allclose(-logprob.mean(dtype=np.float64), result["loss"], rtol=1e-6)
    np.testing.assert_allclose(result["perplexity"], np.exp(result["loss"]))

    # The log probabilities are in the order of the data.
    cfg = cli.config_of_run(str(trained), config.Mesh(1, 1, 1))
    cfg = on_mesh(cfg, train=dict(batch_size=8))
    params = train.load_params(files.absolute_path(str(trained)), cfg)
    nll = np.asarray(train.eval_step(params, *Dataset(cfg, "val").eval_batch(3), cfg)[2]).ravel()
    np.testing.assert_allclose(logprob[3 * 8 * 16 :][: len(nll)], -nll, atol=1e-5)


def test_evaluate_takes_another_set(trained, corpus):
    done = run("scripts/evaluate.py", "--run", trained, "--data", corpus / "train", "--mesh.dp", 1)
    assert json.loads(done.stdout)["tokens"] == len(tokens_of(corpus / "train")) - 1
    assert run("scripts/evaluate.py", "--run", trained, "--data", "/nowhere").returncode == DATA


def test_report_ends_with_the_numbers(trained):
    done = run("scripts/report.py", "--run", trained)
    assert done.returncode == 0, done.stderr
    numbers = ["validation loss  ", "bits per byte    ", "20 updates", "sample after update 20"]
    for word in [f"run directory    {trained}", *numbers]:
        assert word in done.stdout
    assert run("scripts/report.py", "--run", trained / "none").returncode == DATA


def test_the_commands_that_the_demo_ends_with_work(trained, tmp_path):
    commands = re.findall(r"@echo '    \$\(BIN\)/python (.*)'", (ROOT / "Makefile").read_text())
    sample, longer, other = map(shlex.split, commands)
    assert text_of(trained, *sample[3:], "--mesh.dp", 1).startswith("When the")
    assert sample[:3] == ["scripts/sample.py", "--run", "runs/demo"]
    assert longer[0] == "train.py" and cli.parse(longer[1:]).train.steps == 1000
    assert other[-2:] == ["--out", "data/mine"]
    done = run(*other[:-1], tmp_path / "out", cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_without_a_tokenizer_says_how_to_name_one(trained, tmp_path):
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    tokenizer = (copy / "tokenizer.json").rename(tmp_path / "t.json")
    args = ["--run", copy, "--tokens", 2, "--mesh.dp", 1]
    done = run("scripts/sample.py", *args)
    assert done.returncode == DATA and "--tokenizer" in done.stderr
    assert run("scripts/sample.py", *args, "--tokenizer", tokenizer).returncode == 0
    jax.clear_caches()
