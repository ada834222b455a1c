"""Tasks of eval.tasks: questions made from Python's documentation, scored on every mesh, in
training and afterwards."""

import inspect
import json
import re
import shutil
import signal
import textwrap
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from cases import PLAIN, as_float64, params_of, plain_logits
from conftest import MESHES, on_mesh, run
from fsspec.implementations.local import LocalFileSystem
from runs import copy_run, finish, losses, new_run, rows, start, start_two, wait_for_step
from tokenizers.processors import TemplateProcessing

import cli
import config
import errors
import rundir
import train
from errors import UserError
from scripts import pydocs
from scripts.vocabularies import byte_tokenizer
from tasks import Tasks, encode, make_batch, open_tasks

LENGTH = 12
"""Bytes of a choice, which have to fit the 16 tokens of the tiny preset."""


def questions(module, n: int) -> list[dict]:
    """Which of four texts goes on with a paragraph of a module's docstrings?"""
    docs = pydocs.read_documentation(module.__name__, Path(inspect.getsourcefile(module)))
    paragraphs = [p for text in docs.values() for p in pydocs.find_prose(text) if len(p) > 60]
    cuts = [paragraph.index(" ", 30) for paragraph in paragraphs]
    endings = [p[cut : cut + LENGTH] for p, cut in zip(paragraphs, cuts, strict=True)]
    rng, found = np.random.default_rng(0), []
    for k in range(n):
        gold = int(rng.integers(4))
        choices = rng.permutation([x for x in endings if x != endings[k]])[:4].tolist()
        choices[gold] = endings[k]
        found.append(dict(query=paragraphs[k][: cuts[k]], choices=choices, gold=gold))
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with two files of questions with choices, and one of texts to complete."""
    folder = tmp_path_factory.mktemp("tasks")
    files = dict(
        functions=questions(inspect, 10),
        wrapping=questions(textwrap, 4),
        copies=[dict(context="a b a b a b a b", continuation="a")] * 2,
    )
    for name, lines in files.items():
        text = "\n".join(map(json.dumps, lines)) + "\n\n"
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def with_tasks(cfg: config.Config, *words: str) -> config.Config:
    return replace(cfg, eval=config.Eval(tasks=words))


# ---- scores


def test_the_answer_is_the_choice_with_the_best_mean_log_probability(folder):
    """Computed with a plain decoder, one choice at a time."""
    cfg = with_tasks(on_mesh(PLAIN, (2, 2, 2)), f"core={folder}/w*.jsonl")
    params, tokenizer = params_of(cfg), byte_tokenizer()
    got = train.score_tasks(params, Tasks(cfg, tokenizer), cfg)
    w, right = as_float64(params), []
    for line in (folder / "wrapping.jsonl").read_text().split("\n")[:4]:
        question, means = json.loads(line), []
        for choice in question["choices"]:
            ids = tokenizer.encode(question["query"] + choice).ids[-17:]
            logit = plain_logits(w, ids[:-1], cfg)[-LENGTH:]
            logprob = logit - np.log(np.exp(logit).sum(-1, keepdims=True))
            means.append(logprob[np.arange(LENGTH), ids[-LENGTH:]].mean())
        right.append(int(np.argmax(means)) == question["gold"])
    assert got["core/wrapping/accuracy"] == np.mean(right)


@pytest.mark.slow
def test_losses_of_choices_are_the_same_on_every_mesh(folder):
    """And so are the scores; also with rows of another length, and with documents."""
    found = {}
    for mesh in MESHES[:: len(MESHES) // 7]:
        cfg = on_mesh(PLAIN, mesh, train=dict(batch_size=16, seq_len=64))
        cfg = with_tasks(cfg, f"core={folder}/*.jsonl")
        params, tasks = params_of(cfg), Tasks(cfg, byte_tokenizer())
        nll = [train.score_rows(params, *tasks.batch(i), cfg)[0] for i in range(tasks.n_batches)]
        found[mesh] = np.concatenate(nll), train.score_tasks(params, tasks, cfg)
    (want, scores), *others = found.values()
    # The questions, and so the scores, differ between versions of Python.
    accuracies = [scores[f"core/{name}/accuracy"] for name in ("functions", "wrapping")]
    assert len(others) >= 6 and max(accuracies) > 0 and min(accuracies) < 1
    for nll, other in others:
        np.testing.assert_allclose(nll, want, rtol=1e-5)
        assert other == scores


def test_accuracies_are_centred_and_means_are_of_files(tmp_path):
    """The three forms of CORE: choices, contexts, and a continuation alone."""
    lines = dict(
        choices=[dict(query="q", choices=["aa", "b"], gold=0)] * 2,
        contexts=[dict(context_options=["x", "y", "z"], continuation="aaaa", gold=2)],
        alone=[dict(context="x", continuation="a")] * 4,
    )
    for name, objects in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, objects)))
    cfg = with_tasks(on_mesh(PLAIN), f"one={tmp_path}/*.jsonl", f"two={tmp_path}/cho*")
    tasks = Tasks(cfg, byte_tokenizer())
    assert [n for _, n in tasks.rows] == [2] * 4 + [3, 2, 3, 2] + [5] * 3 + [3, 2, 3, 2]
    tops = [True, False, True, True] + [False] * 11
    nll = np.array([1] * 4 + [3, 2.2, 6, 2.2] + [5, 4, 3] + [3, 2.2] * 2, float)
    got = tasks.scores(nll, np.array(tops))
    want = {"one/alone": (0.75, 0.75), "one/choices": (0.5, 0), "one/contexts": (1, 1)}
    want |= {"one": (0.75, 1.75 / 3), "two/choices": (1, 1), "two": (1, 1)}
    pairs = {task: (got[f"{task}/accuracy"], got[f"{task}/centred_accuracy"]) for task in want}
    assert pairs == {task: pytest.approx(pair) for task, pair in want.items()}
    assert len(got) == 2 * len(want)


def test_a_long_query_loses_its_beginning_and_an_empty_one_begins_a_document():
    cfg = on_mesh(PLAIN, (1, 1, 1), train=dict(batch_size=3))
    tasks = Tasks(cfg, byte_tokenizer())
    long, empty = tasks.make_row("0123456789" * 3, "ab"), tasks.make_row("", "ab")
    tokens, targets = (np.asarray(x)[0, 0] for x in make_batch([long, empty], 16, cfg))
    assert bytes(tokens[0].tolist()) == b"6789" + b"0123456789" + b" a"
    assert targets[0].tolist() == [-1] * 13 + [*b" ab"]
    assert tokens[1, :2].tolist() == [256, *b"a"] and targets[1].tolist() == [*b"ab"] + [-1] * 14
    assert (targets[2] == -1).all()


def test_a_row_has_the_tokens_of_its_whole_text():
    """Spaces at the end of a query belong to the choice, and none is added to those there."""
    tasks = Tasks(on_mesh(PLAIN), byte_tokenizer())
    texts = [("a", "b"), ("a ", "b"), ("a", " b"), ("a\n", "b")]
    found = [tasks.make_row(*pair) for pair in texts]
    assert [bytes(ids) for ids, _ in found] == [b"a b", b"a b", b"a b", b"a\nb"]
    assert [n for _, n in found] == [2, 2, 2, 2]


def test_what_a_tokenizer_puts_after_texts_is_not_in_a_prompt_and_not_scored():
    """As </s> of T5's and BERT's kind: the model would go on after the end of the document."""
    tasks, ends = Tasks(on_mesh(PLAIN), byte_tokenizer()), [("<s>", 257), ("</s>", 258)]
    tasks.tokenizer.add_special_tokens([name for name, _ in ends])
    tasks.tokenizer.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=ends)
    assert encode(tasks.tokenizer, "ab</s>") == [257, *b"ab", 258]  # that of the text stays
    assert tasks.make_row("a", "b") == ([257, *b"a b"], 2)


# ---- mistakes


BAD = {
    "gold=4 must be the number, from 0, of one of several choices, which are 2 here":
        dict(query="q", choices=["a", "b"], gold=4),
    "gold=True must be": dict(query="q", choices=["a", "b"], gold=True),
    "gold=None must be": dict(query="q", choices=["a", "b"]),
    "gold=0 must be": dict(query="q", choices=["a"], gold=0),
    "choices are missing, empty or not text": dict(query="q", choices="ab", gold=0),
    "its query or its choices are missing, empty or not text": dict(query="q", choices=[], gold=0),
    "its query or its choices": dict(query=None, choices=["a", "b"], gold=0),
    "its query or": dict(choices=["a", "b"], gold=0),
    "it is not an object": [1, 2],
    "line 3: it is not an object": "text",
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' has 61 tokens, and it needs 1 to train.seq_len=16":
        dict(query="q", choices=["a" * 60, "b"], gold=0),
    "empty": dict(query="q ", choices=["", "b"], gold=0),
    "it has query and context, but only one":
        dict(query="q", context="c", choices=["a", "b"], gold=0),
    "it has choices and context_options":
        dict(context_options=["q", "c"], choices=["a", "b"], gold=0),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_a_mistake_in_a_file_is_named_with_its_line(words, tmp_path):
    good = json.dumps(dict(query="q", choices=["a", "b"], gold=0))
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{json.dumps(BAD[words])}\n{good}\n")
    (tmp_path / "b.jsonl").write_text(f"{good}\nnot JSON\n")
    cfg = with_tasks(on_mesh(PLAIN), f"x={tmp_path}/*.jsonl")
    with pytest.raises(UserError) as error:
        Tasks(cfg, byte_tokenizer())
    assert error.value.code == errors.DATA
    first, second = (problem.what for problem in error.value.problems)
    assert first.startswith(f"{tmp_path}/a.jsonl, line 3: ") and words in first
    assert second.startswith(f"{tmp_path}/b.jsonl, line 2: ")


def test_tasks_without_files_names_or_a_tokenizer_are_refused(tmp_path, monkeypatch):
    cfg = with_tasks(on_mesh(PLAIN), f"x={tmp_path}/*.jsonl")
    with pytest.raises(UserError, match=r"x=.*\.jsonl names no file") as error:
        Tasks(cfg, byte_tokenizer())
    assert error.value.code == errors.DATA and "correct the path" in error.value.problems[0].fix
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "glob", mock.Mock(side_effect=FileNotFoundError("b/none/o")))
        with pytest.raises(UserError, match="names no file"):  # as of a bucket that does not exist
            Tasks(cfg, byte_tokenizer())
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "full.jsonl").write_text('{"context": "a", "continuation": "b"}')
    with pytest.raises(UserError, match=r"/empty\.jsonl has no questions"):
        Tasks(cfg, byte_tokenizer())
    for n in range(2):
        (tmp_path / f"{n}").mkdir()
        (tmp_path / f"{n}" / "same.jsonl").write_text(
            '{"query": "a", "choices": ["b", "c"], "gold": 0}'
        )
    with pytest.raises(UserError, match="1/same.jsonl: x has another file of this name"):
        Tasks(with_tasks(cfg, f"x={tmp_path}/*/same.jsonl"), byte_tokenizer())
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist") as error:
        open_tasks(None, cfg)
    assert error.value.code == errors.DATA
    for words in (["core"], ["a=x", "a=y"], ["a=gs://user:secret@bucket/x"]):
        with pytest.raises(UserError, match=r"eval\.tasks") as error:
            cli.parse(["--config", "tiny", "--eval.tasks", *words])
        assert error.value.code == errors.USAGE and "secret" not in str(error.value)


# ---- in training


@pytest.fixture(scope="session")
def scored(base, folder) -> tuple[config.Config, Path]:
    """The reference run, with tasks."""
    cfg, run_dir = new_run(with_tasks(base, f"core={folder}/*.jsonl"), "scored")
    code, out, err = finish(start(cfg))
    assert code == 0, err
    assert "tasks: 58 choices in 3 file(s); of 56 only the end fits train.seq_len" in out
    assert out.count("core/accuracy") == 2
    return cfg, run_dir


def test_scores_are_rows_and_change_nothing_else(scored, reference):
    cfg, run_dir = scored
    found = rows(run_dir, "tasks")
    assert list(found) == [10, 20] and losses(run_dir) == losses(reference)
    files = ("core", "core/copies", "core/functions", "core/wrapping")
    kinds = ("accuracy", "centred_accuracy")
    names = {f"{file}/{kind}" for file in files for kind in kinds}
    assert found[10].keys() - {"kind", "step", "data"} == names
    assert cli.parse(["--config", str(run_dir / "config.json")]).eval == cfg.eval
    # A finished run scores nothing again.
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert finish(start(cfg))[0] == 0
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_scores_are_in_the_summary_and_the_comparison(scored, reference, tmp_path):
    score = rows(scored[1], "tasks")[20]["core/accuracy"]
    done = run("scripts/report.py", "--run", scored[1])
    assert f"core/accuracy    {score:.4f}\ncore/centred_accuracy " in done.stdout, done.stderr
    done = run("scripts/compare.py", reference, scored[1], "--out", tmp_path / "x.png")
    assert re.search(rf"core/accuracy +- +{score:.4f}\n", done.stdout), done.stderr
    assert "core/wrapping" not in done.stdout


def test_a_finished_run_can_be_scored_later(scored, base, reference):
    """At its last update, and nothing else is done."""
    cfg, other = copy_run(reference, base, "scored_later", eval=dict(tasks=scored[0].eval.tasks))
    assert finish(start(cfg))[0] == 0
    assert rows(other, "tasks") == {20: rows(scored[1], "tasks")[20]}
    assert losses(other) == losses(reference)


@pytest.mark.slow
def test_a_stopped_run_has_the_same_scores(scored, base):
    cfg, run_dir = scored
    stopped, other = new_run(cfg, "stopped", checkpoint=dict(every=3))
    for step, number in ((4, signal.SIGKILL), (11, signal.SIGTERM)):
        process = start(stopped)
        wait_for_step(process, other, step)
        process.send_signal(number)
        assert finish(process)[0] in (-signal.SIGKILL, errors.INTERRUPTED)
    assert finish(start(stopped))[0] == 0
    assert rows(other, "tasks") == rows(run_dir, "tasks") and losses(other) == losses(run_dir)


@pytest.mark.slow
def test_evaluate_and_eval_only_score_as_training_does(scored, folder):
    cfg, run_dir = scored
    want = rows(run_dir, "tasks")[20]
    flags = ["--run", run_dir, "--mesh.dp", 2, "--eval.tasks", f"core={folder}/*.jsonl"]
    done = run("scripts/evaluate.py", *flags)
    assert done.returncode == 0, done.stderr
    assert dict(kind="tasks", step=20) | json.loads(done.stdout.splitlines()[-1]) == want
    done = run("scripts/evaluate.py", "--run", run_dir, "--mesh.dp", 1)
    assert "accuracy" not in done.stdout
    code, out, _ = finish(start(cfg, "--eval_only"))
    accuracy = want["core/accuracy"]
    assert code == 0 and f"update 20  core/accuracy {accuracy:.4f}  core/centred" in out


@pytest.mark.slow
def test_an_imported_run_has_questions_and_no_data(scored, folder):
    cfg, run_dir = scored
    other = run_dir.with_name("imported")
    shutil.copytree(run_dir, other, ignore=shutil.ignore_patterns("metrics.jsonl"))
    flags = ["--run", other, "--eval.tasks", f"core={folder}/*.jsonl"]
    assert "perplexity" in run("scripts/evaluate.py", *flags).stdout  # it may be an average
    record = rundir.run_record(replace(cfg, data=replace(cfg.data, val="none/val")))
    rundir.write_config(other, record)
    done = run("scripts/evaluate.py", *flags)
    assert done.returncode == 0 and done.stderr.count("evaluating in float32") == 1, done.stderr
    want = rows(run_dir, "tasks")[20]
    assert dict(kind="tasks", step=20) | json.loads(done.stdout) == want
    assert run("scripts/evaluate.py", "--run", other).returncode == errors.DATA


@pytest.mark.slow
def test_two_processes_have_the_scores_of_one(scored):
    cfg, run_dir = scored
    two, other = new_run(cfg, "two_scored")
    assert [finish(process)[0] for process in start_two(two)] == [0, 0]
    assert rows(other, "tasks") == rows(run_dir, "tasks")
