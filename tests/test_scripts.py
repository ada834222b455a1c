"""The scripts that sample, evaluate and report, and the commands of the Makefile."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT, on_mesh, run
from etils import epath
from runs import two_processes
from tokenizers import Tokenizer, models, pre_tokenizers

import cli
import config
import files
import runstate
import tasks
import train
from dataset import Dataset
from errors import CHECKPOINT, DATA, STORAGE, USAGE, UserError
from scripts import compare, sample


def manifest(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def tokens_of(folder) -> np.ndarray:
    return np.concatenate([np.load(folder / s["name"]) for s in manifest(folder)["shards"]])


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


@pytest.mark.slow
def test_samples_are_the_same_text_from_any_mesh(trained):
    args = ["--tokens", 12, "--temperature", 0.5, "--seed", 3, "--prompt", "import "]
    want = text_of(trained, "--mesh.dp", 1, *args)
    assert want.startswith("import ") and len(want) > 8
    assert text_of(trained, "--mesh.dp", 2, "--mesh.pp", 2, "--mesh.tp", 2, *args) == want
    several = text_of(trained, "--mesh.dp", 1, *args, "def ", "")
    assert several.startswith(want.rstrip("\n")) and several.count("-" * 80) == 3


def test_a_sample_ends_before_a_stop(trained):
    """Also where the word lies over two tokens, and however many others are in the batch."""
    args = ["--tokens", 12, "--temperature", 0.5, "--seed", 3, "--prompt", "import "]
    whole = text_of(trained, "--mesh.dp", 1, *args).rstrip("\n")
    stop = whole[9:12]
    want = whole[:7] + whole[7:].partition(stop)[0]
    args = ["--mesh.dp", 1, "--stop", "no such word", stop, *args]
    assert text_of(trained, *args) == want + "\n"
    lines = text_of(trained, "--json", *args, "def ").splitlines()
    first, second = map(json.loads, lines)
    assert first["prompt"] + first["text"] == want and second["prompt"] == "def "
    assert 0 < first["tokens"] <= 12
    done = run("scripts/sample.py", "--run", trained, "--stop", "")
    assert done.returncode == USAGE and "stop has an empty text" in done.stderr


def test_what_may_be_the_beginning_of_a_stop_is_not_printed(capsys):
    printed = []

    def texts():
        for text in ("ab", "abST", "abcd", "abcde", "abcd"):
            yield text
            printed.append(capsys.readouterr().out)

    sample.print_as_it_grows(texts(), 3)
    assert printed == ["", "a", "", "b", ""] and capsys.readouterr().out == "cd\n"


def test_samples_in_training_compare_over_time(trained):
    train.main(cli.parse(["--config", str(trained / "config.json")]))  # finished: adds nothing
    rows = [json.loads(line) for line in (trained / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20]
    assert all(isinstance(row["text"], str) for row in rows)


@pytest.mark.slow
def test_a_checkpoint_can_be_chosen(trained):
    args = ["--prompt", "import ", "--tokens", 8, "--temperature", 0, "--mesh.dp", 1]
    assert text_of(trained, *args, "--step", 20) == text_of(trained, *args)
    done = run("scripts/sample.py", "--run", trained, *args, "--step", 15)
    assert done.returncode == CHECKPOINT and "has no checkpoint 15, only 10 or 20" in done.stderr
    done = run("scripts/sample.py", "--run", trained, *args, "--step=-20")  # not the newest either
    assert done.returncode == CHECKPOINT and "has no checkpoint -20" in done.stderr
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
    params = runstate.load_params(files.absolute_path(str(trained)), cfg)
    nll = np.asarray(train.eval_step(params, *Dataset(cfg, "val").batch(3), cfg)[2]).ravel()
    np.testing.assert_allclose(logprob[3 * 8 * 16 :][: len(nll)], -nll, atol=1e-5)


@pytest.mark.parametrize("words", [
    ["compare.py", "RUN", "RUN", "--out"],
    ["evaluate.py", "--run", "RUN", "--per_token"],
    ["batch.py", "--run", "RUN", "--step", "1", "--html"],
    ["average.py", "--run", "RUN", "--steps", "10,20", "--out"],
    ["doctor.py", "--report"],
    ["mup_check.py", "--out"],
    ["benchmark.py", "--config", "tiny", "--json"],
    ["convert_hf.py", "import", "--hf", "none", "--run"],
    ["convert_hf.py", "export", "--run", "RUN", "--hf"],
    ["prepare_data.py", "--stdlib", "--out"],
], ids=" ".join)  # fmt: skip
def test_where_a_result_cannot_be_written_no_work_is_done(trained, words):
    script, *words = [str(trained) if word == "RUN" else word for word in words]
    out = trained / "config.json" / "out"  # not in a folder
    done = run(f"scripts/{script}", *words, out)
    error, fix = done.stderr.splitlines()[-2:]
    assert done.returncode == STORAGE and len(done.stdout.splitlines()) <= 2
    assert error == f"error: {words[-1]} {out} cannot be written: Not a directory"
    assert fix.startswith("  fix: ")


@pytest.mark.slow
def test_two_processes_that_compute_different_things_stop_and_say_so(trained, corpus, tmp_path):
    """Other checkpoints; other files under the same path; no file there in one of them."""
    flags = ["--run", trained]
    for code, _, err in two_processes("evaluate.py", *flags, own=(["--step", 10], ["--step", 20])):
        assert code == USAGE and "the command differs: " in err, err
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, split in zip(folders, ("train", "val"), strict=True):
        shutil.copytree(corpus / split, folder / "data")
    flags += ["--data", "data"]
    for code, _, err in two_processes("evaluate.py", *flags, cwd=folders):
        assert code == USAGE and "data.val differs: " in err, err
    shutil.rmtree(folders[1] / "data")
    found = two_processes("evaluate.py", *flags, cwd=folders)
    assert [code for code, _, _ in found] == [DATA, DATA], found
    assert "process 1 stopped: " in found[0][2] and "does not exist" in found[1][2]


@pytest.mark.slow
def test_of_two_processes_one_shows_a_batch_and_writes_its_page(trained, tmp_path):
    flags = ["--run", trained, "--step", 11, "--row", 0, "--html", tmp_path / "b.html"]
    (lead, shown, err), (other, rest, _) = two_processes("batch.py", *flags)
    assert lead == other == 0, err
    assert "update 11 of" in shown and "update" not in rest and (tmp_path / "b.html").exists()


@pytest.mark.slow
def test_evaluate_takes_another_set(trained, corpus):
    done = run("scripts/evaluate.py", "--run", trained, "--data", corpus / "train", "--mesh.dp", 1)
    assert json.loads(done.stdout)["tokens"] == len(tokens_of(corpus / "train")) - 1
    assert run("scripts/evaluate.py", "--run", trained, "--data", "/nowhere").returncode == DATA


def test_evaluate_computes_in_the_dtype_of_the_run_or_another(trained):
    args = ["scripts/evaluate.py", "--run", trained, "--mesh.dp", 1]
    plain, rounded = run(*args), run(*args, "--train.dtype", "bfloat16")
    assert "evaluating in float32 on" in plain.stderr
    assert "evaluating in bfloat16 on" in rounded.stderr, rounded.stderr
    difference = json.loads(plain.stdout)["loss"] - json.loads(rounded.stdout)["loss"]
    assert 1e-7 < abs(difference) < 0.02


def test_report_ends_with_the_numbers(trained):
    done = run("scripts/report.py", "--run", trained)
    assert done.returncode == 0, done.stderr
    numbers = ["validation loss  ", "bits per byte    ", "20 updates", "sample after update 20"]
    for word in [f"run directory    {trained}", *numbers]:
        assert word in done.stdout
    done = run("scripts/report.py", "--run", trained / "none")
    assert done.returncode == USAGE and f"there is no run in {trained}/none" in done.stderr


def test_report_prints_no_traceback_of_a_bucket():
    """As gcsfs logs them, of errors that it also raises."""
    code = "import logging, scripts.report; print(logging.getLogger('gcsfs').isEnabledFor(40))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.slow
def test_rows_that_are_incomplete_damaged_or_not_finite_are_reported(trained, tmp_path):
    """A run that goes on, or that was killed, may have half a row at its end."""
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    rows, whole = other / "metrics.jsonl", (trained / "metrics.jsonl").read_text()
    rows.write_text(whole + '{"kind": "tr')
    done, alone = (run("scripts/report.py", "--run", path) for path in (other, trained))
    assert done.returncode == 0 and done.stdout.splitlines()[1:] == alone.stdout.splitlines()[1:]
    rows.write_text(re.sub(r'("kind": "eval".*?"loss": )[0-9.]+', r"\1null", whole))
    done = run("scripts/report.py", "--run", other)
    assert done.returncode == 0 and "validation loss  not finite" in done.stdout, done.stderr
    spike = whole.replace('"train", "step": 3,', '"train", "step": 3, "spike": 1.0,')
    rows.write_text(re.sub(r'("step": 5, "loss": )[0-9.]+', r"\1null", spike))
    assert (
        " 1 not finite and 1 spike(s) skipped\n" in run("scripts/report.py", "--run", other).stdout
    )
    damages = {"\xff\n" + whole: "utf-8", whole + "{}\n": "has no step"}
    damages[whole + '{"step": 1}\n'] = "has no kind"
    # One flipped bit can change a field's name.
    damages[whole.replace('"grad_norm"', '"grad_norl"', 1)] = "has no grad_norm"
    # A number as text, as tools that edit JSON may leave it, and null where it means nothing.
    damages[re.sub(r'("step_time": )([0-9.]+)', r'\1"\2"', whole, count=1)] = "has step_time="
    damages[re.sub(r'("tokens": )\d+', r"\1null", whole, count=1)] = "has tokens=None"
    for text, what in damages.items():
        rows.write_bytes(text.encode("latin-1"))
        for command in (["report.py", "--run", other], ["compare.py", trained, other]):
            done = run(f"scripts/{command[0]}", *command[1:])
            assert done.returncode == DATA and done.stderr.count("\n") == 2, done.stderr
            assert what in done.stderr
    rows.write_text(whole)
    (other / "config.json").write_text("{")
    done = run("scripts/compare.py", trained, other, "--out", tmp_path / "c.png")
    assert done.returncode == USAGE and done.stderr.count("\n") == 2, done.stderr


def test_evaluate_scores_nothing_else_than_what_is_scored(trained, tmp_path):
    data, out = tmp_path / "h.npy", tmp_path / "logprob.npy"
    np.save(data, np.arange(90, dtype=np.uint16))
    for n_scored in (30, 0):
        data.with_suffix(".mask").write_bytes(bytes(90 - n_scored) + b"\1" * n_scored)
        done = run("scripts/evaluate.py", "--run", trained, "--data", data, "--per_token", out)
        assert done.returncode == 0, done.stderr
        result, logprob = json.loads(done.stdout), np.load(out)
        assert np.isnan(logprob[: 89 - n_scored]).all() and result["tokens"] == n_scored
        if n_scored:
            assert -logprob[-n_scored:].mean() == pytest.approx(result["loss"], rel=1e-6)
        else:
            assert result["loss"] is result["perplexity"] is None


def test_evaluate_refuses_the_data_of_another_tokenizer(trained, tmp_path):
    (tmp_path / "a.txt").write_text("abc\n" * 500)
    words = ["--input", tmp_path / "a.txt", "--tokenizer", "char"]
    assert run("scripts/prepare_data.py", *words, "--out", tmp_path / "d").returncode == 0
    done = run("scripts/evaluate.py", "--run", trained, "--data", tmp_path / "d/val")
    assert done.returncode == DATA and "is another tokenizer than that of the run" in done.stderr


def test_compare_shows_where_runs_ended_whatever_they_are_called(trained, tmp_path):
    diverged = Path(shutil.copytree(trained, tmp_path / "x$/a^$b"))
    text = (diverged / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    last = [row for row in rows if row["kind"] == "train"][-1]
    rows[-1] |= dict(loss=None)
    assert rows[-1]["kind"] == "eval"
    rows += [last | dict(step=n) for n in range(21, 101)]
    (diverged / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("scripts/compare.py", trained, diverged, "--out", tmp_path / "c.png")
    assert done.returncode == 0, done.stderr
    cells = {row[0]: row[1:] for row in (re.split("  +", x) for x in done.stdout.splitlines())}
    assert cells["validation loss"][1] == "nan"
    assert cells["training loss"] == [f"{last['loss']:.4f}"] * 2  # of no more than the shortest has


@pytest.mark.parametrize("n", [0, 1, 3, 40])
def test_compare_draws_the_means_of_what_is_finite(n):
    x = np.array([1.0, np.nan, 3, 5] + [np.nan] * 5 + [1e3, 2])
    windows = [[y for y in x[max(0, i - n) : i + 1] if y == y] for i in range(len(x))]
    want = [np.mean(window) if window else np.nan for window in windows]
    np.testing.assert_allclose(compare.smooth(x, n), want, rtol=1e-12)


def test_compare_can_draw_many_runs(monkeypatch):
    """Their colours repeated, and their legend hid the curves."""
    figures, x = [], np.arange(9.0)
    run = dict(costs={"tokens": x, "seconds": x, "FLOPs": x}, evals=dict(web={3: 1.0}))
    runs = [SimpleNamespace(**run, loss=x + n, label=f"run {n}") for n in range(40)]
    monkeypatch.setattr(compare, "write_png", lambda path, figure: figures.append(figure))
    compare.draw("", runs, ["web"], 0)
    (figure,) = figures
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.y0 <= legend.y0 < legend.y1 <= figure.bbox.y1
    for axes in figure.axes:
        assert axes.get_window_extent().x1 < legend.x0
        assert len({str(line.get_color()) for line in axes.lines[:80]}) == 40


def test_compare_shows_what_differs(trained, tmp_path):
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    record = json.loads((other / "config.json").read_text())
    lr = record["optim"]["lr"]
    record["optim"] |= dict(lr=2 * lr)
    record |= dict(parent=dict(path="runs/a", step=3, start_with="state", tokens=10_000))
    (other / "config.json").write_text(json.dumps(record))
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    rows = [row | dict(loss=row["loss"] + 1) for row in rows]
    for row in rows:  # of a branch, which has its parent's tokens
        row |= dict(tokens=row["tokens"] + 10_000) if row["kind"] == "train" else {}
    rows[0] |= dict(loss=None)
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "compare.png"
    done = run("scripts/compare.py", trained, other, "--out", out)
    assert done.returncode == 0, done.stderr
    cells = [re.split("  +", line) for line in done.stdout.splitlines()[:-1]]
    names = ["", "tokens", "seconds", "FLOPs", "training loss", "validation loss"]
    names += ["bits per byte", "optim.lr", "run.start_from", "run.start_with"]
    assert [row[0] for row in cells] == names
    assert cells[0][1:] == [str(trained), str(other)]
    assert [float(x) for x in cells[1][1:]] == [20 * 1024, 20 * 1024 + 10_000]
    assert cells[2][1] == cells[2][2] and cells[3][1] == cells[3][2]
    for _, *loss in cells[4:6]:
        assert float(loss[1]) - float(loss[0]) == pytest.approx(1, abs=2e-4)
    assert cells[6][1:] == [f"{rows[-1]['bits_per_byte']:.4f}"] * 2
    assert cells[7] == ["optim.lr", str(lr), str(2 * lr)]
    assert cells[8] == ["run.start_from", "null", '"runs/a@3"']
    assert cells[9] == ["run.start_with", "null", '"state"']
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert run("scripts/compare.py", trained, "--out", out).returncode == USAGE
    shutil.copy(trained / "config.json", tmp_path)
    done = run("scripts/compare.py", trained, tmp_path, "--out", out)
    assert done.returncode == DATA and "has no training rows" in done.stderr


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 14, 0)])
def test_a_python_that_is_too_old_or_new_is_told_before_an_environment_is_made(tmp_path, version):
    old = f"import sys; sys.version_info = {version}; exec(sys.argv[2])"
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{old}" "$@"\n')
    (tmp_path / "python").chmod(0o700)
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "demo", "PYTHON=./python"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert done.stderr.startswith("error: ./python is not 3.11 to 3.13\n  fix: ")
    assert not (tmp_path / ".venv").exists()


def test_the_commands_that_the_demo_ends_with_work(trained, tmp_path):
    commands = re.findall(r"@echo '    \$\(BIN\)/python (.*)'", (ROOT / "Makefile").read_text())
    sample, longer, other = map(shlex.split, commands)
    assert text_of(trained, *sample[3:], "--mesh.dp", 1).startswith("When the")
    assert sample[:3] == ["scripts/sample.py", "--run", "runs/demo"]
    assert longer[0] == "train.py" and cli.parse(longer[1:]).train.steps == 1000
    assert other[-2:] == ["--out", "data/mine"]
    done = run(*other[:-1], tmp_path / "out", cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("data", [b"not json", b"\xff\xfe", b"{}"])
def test_a_file_that_is_no_tokenizer_is_no_traceback(data, cfg, tmp_path):
    path = epath.Path(tmp_path / "tokenizer.json")
    path.write_bytes(data)
    with pytest.raises(UserError, match="is not a tokenizer.json") as e:
        tasks.load_tokenizer(path, cfg, "name another")
    assert e.value.code == DATA


def test_a_tokenizer_with_an_id_that_the_model_lacks_is_refused(cfg, tmp_path):
    path, limit = epath.Path(tmp_path / "tokenizer.json"), cfg.model.vocab_size
    for highest in (limit - 1, limit):
        path.write_text(Tokenizer(models.WordLevel(dict(a=0, b=highest), unk_token="a")).to_str())
        if highest < limit:
            tasks.load_tokenizer(path, cfg, "name another")
    with pytest.raises(UserError, match=f"ids up to {limit}, the model vocab_size={limit}"):
        tasks.load_tokenizer(path, cfg, "name another")


def test_a_tokenizer_neither_cuts_nor_pads(cfg, tmp_path):
    path = epath.Path(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer(models.WordLevel(dict(a=0, b=1), unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=9)
    path.write_text(tokenizer.to_str())
    assert tasks.encode(tasks.load_tokenizer(path, cfg, ""), "b a b") == [1, 0, 1]


@pytest.mark.slow
def test_a_run_without_a_tokenizer_says_how_to_name_one(trained, tmp_path):
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    tokenizer = (copy / "tokenizer.json").rename(tmp_path / "t.json")
    args = ["--run", copy, "--tokens", 2, "--mesh.dp", 1]
    done = run("scripts/sample.py", *args)
    assert done.returncode == DATA and "--tokenizer" in done.stderr
    assert run("scripts/sample.py", *args, "--tokenizer", tokenizer).returncode == 0
    jax.clear_caches()


def test_an_evaluation_without_data_of_its_own_asks_for_data(trained, tmp_path):
    """As that of an import, whose config.json has the default data.val."""
    shutil.copytree(trained, run_copy := tmp_path / "imported")
    record = json.loads((run_copy / "config.json").read_text())
    record["data_fingerprint"] = ""
    (run_copy / "config.json").write_text(json.dumps(record))
    done = run("scripts/evaluate.py", "--run", run_copy)
    assert done.returncode == DATA and "give a data set as --data" in done.stderr
    done = run("scripts/evaluate.py", "--run", run_copy, "--data", tmp_path / "none")
    assert done.returncode == DATA and "try --data synthetic\n" in done.stderr
