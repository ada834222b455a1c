"""What an update was made of, and going back to before it."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, on_mesh
from etils import epath
from runs import copy_run, finish, new_run, refusal, rows, start, wait_for_step, wait_until
from tokenizers import Tokenizer, decoders, models

import config
import files
import train
from dataset import Dataset, TokenFiles
from errors import CHECKPOINT, DATA, USAGE
from files import saved_steps
from scripts import batch

BAD, UPDATE, STEPS = 7, 40, 60


def explain(run, *flags) -> str:
    """What is printed; first what is on stderr, such as the weights that losses are by."""
    command = [sys.executable, ROOT / "scripts/batch.py", "--run", run, *flags]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def refused(run, *flags) -> tuple[int, list[str]]:
    """The exit code and the error's lines, which come last on stderr, of a command that fails."""
    command = [sys.executable, ROOT / "scripts/batch.py", "--run", run, *flags]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    lines = done.stderr.splitlines()
    errors = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    assert len(errors) == 1 and len(lines) == errors[0] + 2, done.stderr
    assert lines[-1].startswith("  fix: ") and "Traceback" not in done.stderr
    return done.returncode, lines[-2:]


def losses_of_tokens(block: str) -> list[float]:
    """The losses in the table of a row, whose tokens are bytes, so that each fits its column."""
    table = re.search(r"with a \*:\n(.*)\n", block.strip(), re.S)[1].splitlines()
    words = [line[i : i + 14] for line in table for i in range(2, len(line), 14)]
    return [float(word[1:].split()[0]) for word in words]


def losses_of(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"^  loss ([0-9.]+);", text, re.M)]


def mean_loss(text: str) -> float:
    return float(np.mean(losses_of(text)))


@pytest.fixture(scope="session")
def spoilt(base, corpus, tmp_path_factory):
    """(config of a finished clean run, of one to come whose update UPDATE has only a repeated
    token, final loss of the clean one)."""
    folder = tmp_path_factory.mktemp("spoilt")
    more = dict(steps=STEPS, eval_every=STEPS, eval_batches=-1)
    # At that rate, whether a usual batch is left out changes the last loss by less than 0.1 %.
    more = dict(train=more, optim=dict(lr=5e-3))
    cfg, run = new_run(base, "clean", checkpoint=dict(every=10, keep=10), **more)
    manifest = json.loads((corpus / "train" / "manifest.json").read_text())
    tokens = np.concatenate([np.load(corpus / "train" / s["name"]) for s in manifest["shards"]])
    np.save(folder / "clean.npy", tokens)
    cfg = replace(cfg, data=replace(cfg.data, train=str(folder / "clean.npy")))
    windows, L = Dataset(on_mesh(cfg), "train").batch_windows(UPDATE - 1), cfg.train.seq_len
    for window in windows:
        tokens[window * L + 1 : window * L + L + 1] = BAD
    np.save(folder / "bad.npy", tokens)
    (folder / "tokenizer.json").write_bytes((corpus / "train" / "tokenizer.json").read_bytes())
    train.main(on_mesh(cfg, (1, 1, 1)))
    bad, _ = new_run(cfg, "bad", data=dict(train=str(folder / "bad.npy")))
    return cfg, bad, rows(run, "eval")[STEPS]["loss"]


@pytest.mark.slow
def test_a_bad_batch_is_found_rolled_back_and_left_out(spoilt, tmp_path, capsys):
    _, cfg, want = spoilt
    run = Path(cfg.run.dir) / cfg.run.name
    train.main(on_mesh(cfg, (1, 1, 1)))
    loss = [row["loss"] for row in rows(run).values()]
    spike = int(np.argmax(np.diff(loss))) + 2
    assert spike == UPDATE

    text = explain(run, "--step", UPDATE, "--loss", "--html", tmp_path / "page.html")
    newest = max(step for step in saved_steps(run) if step < UPDATE)
    assert f"losses by the weights after update {newest}\n" in text
    before = explain(run, "--step", UPDATE - 1, "--loss")
    assert mean_loss(text) > 1.2 * mean_loss(before)
    assert text.count("bad.npy tokens") >= cfg.train.batch_size
    for row in (blocks := before.split("\n\n")[1:]):
        each = losses_of_tokens(row)
        assert len(each) == cfg.train.seq_len and row.count("\n  ") > 4
        assert np.mean(each) == pytest.approx(mean_loss(row), abs=0.006)
    assert len(blocks) == cfg.train.batch_size
    assert "data.skip" not in text
    page = (tmp_path / "page.html").read_text()
    assert page.count("<span") == cfg.train.batch_size * cfg.train.seq_len
    one = explain(run, "--step", UPDATE, "--row", 3)
    assert one.count("\nrow ") == 1 and "loss" not in one

    skip = replace(cfg.data, skip=str(UPDATE))
    without_leave = replace(cfg, data=skip, rollback=UPDATE - 1)
    error = refusal(on_mesh(without_leave, (1, 1, 1)))
    assert error.code == CHECKPOINT and "data.skip" in str(error)
    accepted = replace(without_leave, run=replace(cfg.run, accept=("data.skip",)))
    before = saved_steps(run)  # on a slow disk a save may have been left out
    to = max(step for step in before if step < UPDATE)
    train.main(on_mesh(accepted, (1, 1, 1)))
    assert f"rolled back to update {to}" in capsys.readouterr().out
    moved = run / "rolled_back" / str(to)
    kept = sorted(int(p.name) for p in (moved / "checkpoints").iterdir())
    assert kept == [step for step in before if step > to] and kept[-1] == STEPS
    old = [json.loads(line) for line in (moved / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in old if row["kind"] == "train"] == loss
    assert rows(run, "eval")[STEPS]["loss"] == pytest.approx(want, rel=0.01)
    assert rows(run)[UPDATE]["loss"] < 1.2 * rows(run)[UPDATE - 1]["loss"]

    train.main(on_mesh(accepted, (1, 1, 1)))  # the same command goes on: here there is no more
    assert "this command has rolled the run back already" in capsys.readouterr().out
    assert [path.name for path in (run / "rolled_back").iterdir()] == [str(to)]
    text = explain(run, "--step", UPDATE)  # what was update 41 before another was left out
    skip = re.search(r"so there it is 41: --data.skip (40,41) leaves it out too\n", text)[1]
    windows = {int(x.replace(",", "")) for x in re.findall(r"window ([\d,]+)", text)}
    for word, others in ((str(UPDATE), 1), (skip, 0)):
        data = Dataset(on_mesh(cfg, data=dict(skip=word)), "train")
        trained = [windows & {*data.batch_windows(step).tolist()} for step in range(STEPS)]
        assert [len(x) for x in trained if x] == [cfg.train.batch_size] * others
    assert "data.skip" not in explain(run, "--step", UPDATE - 1)

    later = replace(cfg, data=replace(cfg.data, skip=f"5,{UPDATE}"), run=accepted.run)
    error = refusal(on_mesh(later, (1, 1, 1)))
    assert error.code == CHECKPOINT and "change some of the 60 updates" in str(error)


@pytest.mark.slow
def test_a_rollback_that_is_refused_moves_nothing(reference, base):
    """Update 8 is not after the checkpoint of 10, so it cannot be left out from there."""
    data, accept = replace(base.data, skip="8"), ("data.skip",)
    cfg, run = copy_run(reference, replace(base, data=data), "no-way-back", run=dict(accept=accept))
    error = refusal(replace(cfg, rollback=10))
    assert error.code == CHECKPOINT and "change some of the 10 updates" in str(error)
    assert saved_steps(run)[-1] == 20 and not (run / "rolled_back").exists()


@pytest.mark.slow
def test_a_rollback_to_before_an_accepted_change_moves_nothing_until_it_is_accepted_again(
    reference, base
):
    cfg, run = copy_run(reference, base, "larger-batch", train=dict(batch_size=64))
    record = json.loads((run / "config.json").read_text())
    record["train"]["batch_size"] = 64  # as after a start with --run.accept train.batch_size
    (run / "config.json").write_text(json.dumps(record))
    error = refusal(replace(cfg, rollback=10))
    assert error.code == CHECKPOINT
    assert "train.batch_size was 32 in checkpoint 10 and is 64" in str(error)
    assert saved_steps(run)[-1] == 20 and not (run / "rolled_back").exists()
    train.main(replace(cfg, rollback=10, run=replace(cfg.run, accept=("train.batch_size",))))
    assert rows(run)[20]["tokens"] == (10 * 32 + 10 * 64) * cfg.train.seq_len


def test_a_rollback_of_no_run_leaves_no_folder(base):
    cfg, run = new_run(base, "no-run")
    error = refusal(replace(cfg, rollback=5))
    assert error.code == CHECKPOINT and "there is no run in" in str(error) and not run.exists()


def test_a_rollback_to_before_all_checkpoints_is_an_error(spoilt):
    cfg, _, _ = spoilt
    run = Path(cfg.run.dir) / cfg.run.name
    (run / "checkpoints" / "0").rename(run / "0")
    others = ", ".join(map(str, saved_steps(run)))
    error = refusal(replace(on_mesh(cfg, (1, 1, 1)), rollback=3))
    (run / "0").rename(run / "checkpoints" / "0")
    assert error.code == CHECKPOINT and f"its checkpoints are {others}" in str(error)


def test_what_only_resembles_a_checkpoint_is_none(tmp_path):
    for name in ("0", "20", "020", "³", "20.old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "15").write_text("a note")
    assert saved_steps(epath.Path(tmp_path)) == [0, 20]


@pytest.mark.slow
def test_a_rollback_happens_once_under_restarts(base):
    """The training process is killed after it; the next start does not go back again."""
    more = dict(train=dict(steps=12), checkpoint=dict(every=4, keep=10))
    cfg, run = new_run(base, "once", **more)
    assert finish(start(cfg))[0] == 0
    cfg = replace(cfg, train=replace(cfg.train, steps=100_000))
    again = start(cfg, "--rollback", 5, "--run.restarts", 1, "--run.accept", "train.steps")
    wait_until((run / "rolled_back").exists, again, 120)
    wait_for_step(again, run, 14)
    child = subprocess.run(["pgrep", "-P", str(again.pid)], capture_output=True, text=True).stdout
    os.kill(int(child), 9)
    history = run / "history.jsonl"
    wait_until(lambda: len(history.read_text().splitlines()) == 3, again, 120)
    again.terminate()
    assert finish(again)[0] == 75
    steps = [json.loads(line)["step"] for line in history.read_text().splitlines()]
    assert steps[0] == 0 and steps[1] == 4 and steps[2] > 4
    assert [p.name for p in (run / "rolled_back").iterdir()] == ["4"]


def test_an_update_that_the_run_does_not_have_is_an_error(spoilt):
    cfg, _, _ = spoilt
    run = Path(cfg.run.dir) / cfg.run.name
    for flags in (["--step", 0], ["--step", 61], ["--step", 3, "--row", 99]):
        code, (what, _) = refused(run, *flags)
        assert code == USAGE and "must be between" in what


def test_the_losses_are_the_same_on_any_mesh_and_of_one_row(reference):
    whole = explain(reference, "--step", 10, "--loss")
    assert "losses by the weights after update 10\n" in whole  # it has none from before
    on_mesh = explain(reference, "--step", 10, "--loss", "--mesh.dp", 4, "--mesh.tp", 2)
    assert losses_of(on_mesh) == pytest.approx(losses_of(whole), abs=2e-4)
    one = explain(reference, "--step", 10, "--loss", "--row", 5)
    assert losses_of(one) == losses_of(whole)[5:6]


def test_an_update_that_has_not_been_made_yet_is_shown_as_such(reference, tmp_path):
    record = json.loads((reference / "config.json").read_text())
    rows = (reference / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert "not been made yet: the run has made 0" in explain(tmp_path, "--step", 1)  # an average
    made = [row for row in rows if json.loads(row)["step"] <= 5]
    (tmp_path / "metrics.jsonl").write_text("".join(made))
    assert "not been made yet: the run has made 5" in explain(tmp_path, "--step", 6)
    assert "not been made" not in explain(tmp_path, "--step", 5)


def test_rows_and_starts_that_lack_a_field_do_not_count(reference, tmp_path):
    """One flipped bit can change a field's name."""
    shutil.copy(reference / "config.json", tmp_path)
    rows = (reference / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(rows.replace('"kind"', '"kinf"', 1))
    start = dict(stdp=20, changes={"changes the training": {"train.seq_len": [1, 2]}})
    (tmp_path / "history.jsonl").write_text(json.dumps(start) + "\n")
    assert explain(tmp_path, "--step", 3).count("\nrow ") == 32


def test_a_run_without_updates_of_its_own_is_an_error(reference, tmp_path):
    """As an import."""
    record = json.loads((reference / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record | dict(data_fingerprint="")))
    code, (what, _) = refused(tmp_path, "--step", 1)
    assert code == DATA and "has made no update" in what


def test_a_row_may_be_beyond_the_last_size_of_a_ramp(reference, tmp_path):
    record = json.loads((reference / "config.json").read_text())
    record["train"]["batch_ramp"] = "0:64,10:32"
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert explain(tmp_path, "--step", 10, "--row", 63).count("\nrow 63") == 1
    code, (what, _) = refused(tmp_path, "--step", 11, "--row", 63)
    assert code == USAGE and "must be between -1 and 31" in what


def test_a_config_without_a_setting_has_its_default(reference, tmp_path):
    record = json.loads((reference / "config.json").read_text())
    del record["train"]["batch_ramp"]
    assert record["train"].pop("batch_size") == config.Train.batch_size
    (tmp_path / "config.json").write_text(json.dumps(record))
    found = [re.findall("row .*", explain(run, "--step", 3)) for run in (tmp_path, reference)]
    assert found[0] == found[1] and len(found[0]) == 32


def test_a_damaged_tokenizer_is_an_error(reference, tmp_path):
    shutil.copy(reference / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    code, (what, _) = refused(tmp_path, "--step", 3)
    assert code == DATA and "is not a tokenizer.json" in what


def test_only_changes_that_a_batch_may_depend_on_are_told(reference, tmp_path):
    shutil.copy(reference / "config.json", tmp_path)
    later = ["data.skip", "data.stages", "train.batch_ramp", "train.batch_size"]
    names = ["optim.lr", *later, "train.seq_len"]
    row = dict(step=20, changes={"changes the training": {name: [1, 2] for name in names}})
    (tmp_path / "history.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, ROOT / "scripts/batch.py", "--run", tmp_path, "--step", 3]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "warning: train.seq_len changed after update 3" in done.stderr


def test_an_update_that_the_parent_of_a_branch_has_made_is_an_error(reference, tmp_path):
    """It was trained on the parent's data."""
    record = json.loads((reference / "config.json").read_text())
    record["parent"] = dict(path="runs/parent", step=10, start_with="state", tokens=0)
    (tmp_path / "config.json").write_text(json.dumps(record))
    code, (what, fix) = refused(tmp_path, "--step", 10)
    assert code == USAGE and "step=10 must be between 11 and 20" in what
    assert "--run runs/parent" in fix


def test_a_run_that_does_not_exist_is_an_error(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        code, (what, fix) = refused(folder, "--step", 3)
        assert (
            code == USAGE and what == f"error: there is no run in {folder}: it has no config.json"
        )
        assert fix == "  fix: name the directory of a run"


@pytest.mark.parametrize("where", ["nowhere", "val"])
def test_data_that_are_no_longer_there_are_an_error(reference, corpus, tmp_path, where):
    """Moved away, or others in their place."""
    record = json.loads((reference / "config.json").read_text())
    record["data"]["train"] = str(corpus / where)
    (tmp_path / "config.json").write_text(json.dumps(record))
    code, (what, fix) = refused(tmp_path, "--step", 3)
    why = "does not exist" if where == "nowhere" else "are not the data that"
    assert code == DATA and f"data.train={corpus / where} {why}" in what
    assert "put the data, or a link to them, back there" in fix


def test_each_token_has_its_loss_and_the_worst_are_marked(capsys):
    nll, scored = np.arange(20.0), np.arange(20) % 10 > 0
    row = batch.Row("row 0", ["a place"], [*range(97, 118)], scored, nll)
    batch.print_row(row, lambda ids: "".join(map(chr, ids)))
    title, place, loss, *lines, text = capsys.readouterr().out.splitlines()[1:]
    words = " ".join(lines).replace("*", " *").split()
    each = {text: loss for loss, text in zip(words[::2], words[1::2], strict=True)}
    assert title == "row 0" and place == "  a place" and "loss 10.0000;" in loss
    assert each["'b'"] == "-" and each["'c'"] == "1.00" and each["'l'"] == "-"
    assert len(each) == 20 and list(each)[-1] == "'u'" and text == f"  {'abcdefghijklmnopqrstu'!r}"
    assert [x for x in each.values() if "*" in x] == [f"*{n}.00" for n in range(15, 20)]
    batch.print_row(row._replace(scored=scored & False), lambda ids: "x")
    assert "loss -;" in capsys.readouterr().out  # not 0: nothing is scored


def test_the_page_shows_characters_of_several_tokens():
    """The tokens are bytes, and the row ends within a character."""
    tokens = [*"né日🙂!é".encode()][:-1]
    nll, scored = np.arange(len(tokens) - 1.0), np.ones(len(tokens) - 1, bool)
    row = batch.Row("row 0", ["a place"], tokens, scored, nll)
    page = batch.to_html(
        batch.Args("run", 1), [row], lambda ids: bytes(ids).decode(errors="replace")
    )
    spans = re.findall(r'<span title="([^"]*)" style="[^"]*,([\d.]+)\)">([^<]*)</span>', page)
    assert [text for *_, text in spans] == ["é", "日", "🙂", "!", "\ufffd"]
    assert spans[1][:2] == ("2.00 3.00 4.00", "0.40")


def test_the_page_keeps_the_spaces_of_a_tokenizer_in_the_style_of_llama():
    tokenizer = Tokenizer(models.WordLevel({"\u2581an": 0, "\u2581old": 1, "er": 2}, "none"))
    tokenizer.decoder = decoders.Metaspace()
    nll, scored = np.zeros(2), np.ones(2, bool)
    page = batch.to_html(
        batch.Args("run", 1), [batch.Row("row 0", [], [0, 1, 2], scored, nll)], tokenizer.decode
    )
    assert re.sub("<[^>]*>", "", page.partition("<pre>")[2]) == tokenizer.decode([0, 1, 2])


@pytest.fixture
def sixteens(cfg, tmp_path) -> TokenFiles:
    """Documents of 16 tokens; windows of 15 and the token after them."""
    np.save(tmp_path / "a.npy", np.arange(9000, dtype=np.uint16) % 16)
    data = dict(train=str(tmp_path / "a.npy"))
    source = Dataset(on_mesh(cfg, data=data, train=dict(seq_len=15)), "train").source
    source.end_id = 15
    return source


@pytest.mark.parametrize("ids", [(15, -1), (-1, 15), (3, 15)], ids=["source", "flag", "both"])
def test_a_document_that_begins_behind_a_row_is_not_in_it(sixteens, ids):
    """Also where only data.end_id says which token ends a document."""
    sixteens.end_id, end_id = ids
    cfg = replace(sixteens.cfg, data=replace(sixteens.cfg.data, end_id=end_id))
    first, second = (batch.describe_row(sixteens, n, cfg) for n in (0, 1))
    assert first == ["a.npy tokens 0 to 15 in document 0"]
    assert second == ["a.npy tokens 15 to 30 in document 0; others begin at 16"]


def test_documents_in_a_bucket_have_no_numbers_and_nothing_more_is_read(sixteens, monkeypatch):
    monkeypatch.setattr(files, "is_remote", lambda path: True)
    monkeypatch.setattr(batch, "count_documents", lambda *_: pytest.fail("it counts"))
    why = "in a document without a number: counting would fetch all before it"
    line = f"a.npy tokens 15 to 30 {why}; others begin at 16"
    assert batch.describe_row(sixteens, 1, sixteens.cfg) == [line]


def test_a_row_ends_with_its_last_token_also_where_that_is_not_scored(cfg, tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.arange(9000, dtype=np.uint16) % 250 + 1)
    (tmp_path / "a.mask").write_bytes(bytes([0, 1] * 4500))
    cfg = on_mesh(replace(cfg, data=replace(cfg.data, train=str(tmp_path / "a.npy"))))
    monkeypatch.setattr(batch, "open_data", lambda *_: Dataset(cfg, "train"))
    rows = batch.read_rows(batch.Args(str(tmp_path), 1), cfg, cfg)
    assert not any(row.scored[-1] for row in rows)
    for row in rows:
        assert set(np.diff(row.tokens) % 250) == {1}
