"""The run directory: where it can be written, what is kept out of it, and what a start changes."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import ROOT
from etils import epath
from runs import contents, copy_run, finish, flags, new_run, refusal, rows, start, wait_for_step
from test_train import OBEY_PERMISSIONS

import cli
import config
import errors
import files
import lock
import rundir
import shards
import train
from errors import CHECKPOINT, STORAGE, USAGE, UserError
from scripts import report


def test_an_unwritable_run_directory_is_a_storage_error(cfg, tmp_path):
    (tmp_path / "file").write_text("x")
    for where in ("file", "file/below"):
        with pytest.raises(UserError) as error:
            train.main(replace(cfg, run=replace(cfg.run, dir=str(tmp_path / where))))
        assert error.value.code == STORAGE and "cannot write to" in str(error.value)


def test_the_start_of_a_new_run_says_where_it_is(cfg, tmp_path, capsys):
    """A config.json that was moved names its old place, and a run from there is a new one."""
    source, path = SimpleNamespace(fingerprint="", tokenizer=None), epath.Path(tmp_path / "new")
    for said in (f"new run: {path}\n", ""):
        rundir.prepare_run(path, cfg, source, None).release()
        assert capsys.readouterr().out == said


def test_an_error_of_a_bucket_that_is_no_oserror_is_named_and_unlocks(cfg, tmp_path, monkeypatch):
    from gcsfs.retry import HttpError

    answer = HttpError(dict(code=503, message="try\nlater"))
    monkeypatch.setattr(rundir, "run_record", Mock(side_effect=answer))
    for _ in range(2):  # the second would not get the lock
        with pytest.raises(UserError) as error:
            rundir.prepare_run(epath.Path(tmp_path), cfg, SimpleNamespace(fingerprint=""), None)
        assert error.value.code == STORAGE and "HttpError: try later, 503" in str(error.value)


def test_the_commit_is_known_where_another_user_owns_the_checkout(cfg, monkeypatch):
    ours = rundir.run_record(cfg)["git_commit"]
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    rundir.git_commit.cache_clear()
    assert rundir.run_record(cfg)["git_commit"] == ours


def test_a_commit_while_a_run_starts_is_no_change(cfg, monkeypatch):
    """A start makes two records, and says what differs between them."""
    ours = rundir.run_record(cfg)["git_commit"]
    answer = Mock(return_value=SimpleNamespace(stdout="another"))
    monkeypatch.setattr(rundir.subprocess, "run", answer)
    assert rundir.run_record(cfg)["git_commit"] == ours


@pytest.mark.parametrize("answer", ["abc-dirty\n", ""])
def test_edited_code_is_another_version_than_before_the_edit(answer, cfg, monkeypatch):
    """In a checkout with edits, and where there is no checkout."""
    git = Mock(return_value=SimpleNamespace(stdout=answer))
    monkeypatch.setattr(rundir.subprocess, "run", git)
    records = []
    for code in ("1" * 12, "2" * 12):
        monkeypatch.setattr(rundir, "code_digest", lambda code=code: code)
        rundir.git_commit.cache_clear()
        records.append(rundir.run_record(cfg))
    rundir.git_commit.cache_clear()
    (change,) = rundir.changes(*records, step=1)["within rounding"].items()
    before = "abc-dirty-111111111111" if answer else "111111111111"
    assert change == ("version of trifold", [before, before.replace("1", "2")])


@pytest.mark.slow
def test_a_lock_without_permission_is_named(base, reference):
    cfg, run = copy_run(reference, base, "sealed_lock")
    (run / "lock").chmod(0)
    command = [sys.executable, "-c", OBEY_PERMISSIONS]
    command += [sys.executable, ROOT / "train.py", "--config", "tiny", *flags(cfg)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    what, _ = done.stderr.splitlines()[-2:]
    assert done.returncode == STORAGE and "Traceback" not in done.stderr
    assert what == f"error: cannot write to {run / 'lock'}: Permission denied", done.stderr


def test_a_lock_has_the_rights_that_umask_leaves(tmp_path):
    """Where a group shares a run, each member has to write to the lock of another."""
    before = os.umask(0o002)
    try:
        lock.FileLock(epath.Path(tmp_path / "lock")).release()
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664


def test_a_lock_that_cannot_be_written_stays_free(tmp_path, monkeypatch):
    path, full = epath.Path(tmp_path / "lock"), OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as m, pytest.raises(OSError, match="No space"):
        m.setattr(lock.os, "write", Mock(side_effect=full))
        lock.FileLock(path)
    lock.FileLock(path).release()


@pytest.mark.parametrize("look", [
    lambda run, cfg: rundir.prepare_run(run, replace(cfg, eval_only=True), None, None),
    lambda run, cfg: rundir.read_record(run),
    lambda run, cfg: report.read_metrics(run),
    lambda run, cfg: files.saved_steps(run),
    lambda run, cfg: shards.find_shards(run, "train"),
], ids=["eval_only", "record", "report", "checkpoints", "data"])  # fmt: skip
def test_what_this_user_may_not_look_at_is_not_called_missing(cfg, tmp_path, monkeypatch, look):
    run, stat = epath.Path(tmp_path / "private"), os.stat

    def refuse(path, **options):
        if str(path).startswith(str(run)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr("os.stat", refuse)
    with pytest.raises(PermissionError):
        look(run, cfg)


def test_a_disk_without_locks_is_called_that(tmp_path, monkeypatch):
    """As Lustre without its mount option flock, where this user can write."""
    error = OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(lock.fcntl, "flock", Mock(side_effect=error))
    with pytest.raises(UserError, match="has no locks: Function not implemented") as found:
        lock.FileLock(epath.Path(tmp_path / "lock"))
    assert found.value.code == STORAGE and "localflock" in found.value.problems[0].fix


def test_a_run_that_has_not_written_its_name_yet_is_refused_in_words(tmp_path):
    path = epath.Path(tmp_path / "lock")
    held = lock.FileLock(path)
    path.write_text("")
    with pytest.raises(UserError, match="another live run: it has just started"):
        lock.FileLock(path)
    held.release()


@pytest.mark.slow
def test_a_run_whose_directory_is_moved_ends_instead_of_going_on_in_a_new_one(base):
    """Nor does a restart go on there."""
    cfg, run = new_run(base, "moved", run=dict(restarts=1), train=dict(steps=100_000))
    process = start(cfg)
    wait_for_step(process, run, 3)
    run.rename(run.with_name("elsewhere"))
    code, out, err = finish(process)
    assert code == errors.BUSY and "was moved or removed under this run" in err
    assert "restart: try" not in out + err


def test_a_notebook_takes_no_lock_early(base, reference, monkeypatch):
    """An error before open_run does not end it, so it would hold the lock and refuse the next."""
    cfg, _ = copy_run(reference, base, "notebook")
    lock.take_early(cfg).release()
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    assert lock.take_early(cfg) is None


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "history.jsonl", "lock"])
def test_a_pipe_among_a_runs_files_is_refused(base, reference, name, time_limit):
    cfg, run = copy_run(reference, base, f"pipe-{name}")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    if name == "lock":
        assert lock.take_early(cfg) is None
    error = refusal(cfg)
    assert error.code == USAGE and f"{name} is not a file but" in str(error)


def test_a_folder_of_a_container_image_is_moved_too(tmp_path, monkeypatch):
    """Overlayfs renames no folder that is in the image; --fresh ended with code 5."""
    run, old = epath.Path(tmp_path / "run"), epath.Path(tmp_path / "run.old")
    run.mkdir()
    (run / "config.json").write_text("{}")
    refused = OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    monkeypatch.setattr(os, "rename", Mock(side_effect=refused))
    files.move_folder(run, old)
    assert (old / "config.json").read_text() == "{}" and not run.exists()


BRANCH = dict(start_with="state", step="2")


@pytest.mark.parametrize("fact", [
    dict(parent=[]),
    dict(parent=BRANCH),
    dict(parent=dict(start_with="state", step=2)),
    dict(versions=3),
    dict(train=dict(steps="30")),
])  # fmt: skip
def test_a_record_with_facts_of_another_type_is_refused(tmp_path, fact):
    record = tmp_path / "config.json"
    record.write_text(json.dumps(json.loads(cli.to_json(config.Config())) | fact))
    for read in (partial(cli.file_flags, str(record)), partial(rundir.read_record, tmp_path)):
        with pytest.raises(UserError, match=f"{next(iter(fact))}.* not ") as error:
            read()
        assert error.value.code == USAGE


def test_no_message_has_the_password_of_an_address():
    error = UserError(STORAGE, "cannot read gs://me:canary@bucket/x", "see gs://me:canary@bucket")
    assert "canary" not in str(error) and "gs://***@bucket/x" in str(error)


def test_a_message_has_two_lines_even_if_a_path_has_more():
    error = UserError(STORAGE, "data.train=a\nb does not exist", "make it\nnow")
    assert str(error) == "error: data.train=a\\nb does not exist\n  fix: make it\\nnow"


@pytest.mark.slow
def test_secrets_are_not_in_what_a_run_leaves_and_prints(base, tmp_path, monkeypatch):
    """Also where the run fails: its crash, history and messages are looked at too."""
    (tmp_path / "key.json").write_text('{"private_key": "canary-91d0"}')
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a" + "0" * 40)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    sections = dict(mesh=dict(dp=1, pp=1, tp=1), log=dict(wandb="offline"))
    cfg, run = new_run(base, "secrets", train=dict(steps=2), run=dict(hang_timeout=4), **sections)
    printed = [*finish(start(cfg))]
    cfg = replace(cfg, train=replace(cfg.train, steps=100_000))
    hangs = start(cfg, "--run.accept", "train.steps")
    wait_for_step(hangs, run, 4)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    printed += finish(hangs)
    assert [printed[0], printed[3]] == [0, errors.HUNG], printed
    found = [path for path in run.rglob("*") if path.is_file()]
    assert {"crash", "wandb", "checkpoints"} < {path.relative_to(run).parts[0] for path in found}
    for name, data in [*((p, p.read_bytes()) for p in found), ("printed", str(printed).encode())]:
        assert b"canary-7f3a" not in data and b"canary-91d0" not in data, name


FORBIDDEN = r"\bpickle\.|yaml|\beval\(|\bexec\(|os\.system|shell=True|allow_pickle=True|mktemp\("


def test_no_code_is_run_from_data():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")]:
        assert not re.search(FORBIDDEN, path.read_text()), path


# ---- what a start changes


def history(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def test_a_damaged_line_of_the_history_is_dropped(tmp_path, capsys):
    lines = [dict(step=n, changes=x) for n, x in enumerate(({}, None, [[]], {"same numbers": 3}))]
    rundir.write_history(epath.Path(tmp_path), lines)
    assert rundir.read_history(epath.Path(tmp_path)) == lines[:1]
    assert capsys.readouterr().err.count("dropped a line that is not a row") == 3


def test_every_setting_is_in_a_group():
    names = rundir.record_facts(json.loads(cli.to_json(config.Config())))
    assert {*rundir.SAME_NUMBERS, *rundir.ROUNDING} < {*names}
    training = {name for name in names if rundir.group_of(name) == "changes the training"}
    assert training == {"run.seed", rundir.FINGERPRINT} | {
        name for name in names
        if name.startswith(("model.", "optim.")) or name in (
            "data.document_mask", "data.end_id", "train.seq_len", "train.batch_size", "train.steps",
            "train.dtype", "train.dropout", "train.z_loss", "train.balance_loss", "train.bias_rate",
            "train.capacity_factor", "train.batch_ramp", "train.spike_sigma", "data.stages",
            "data.skip", "mesh.slow_dtype",
        )
    }  # fmt: skip


@pytest.mark.parametrize("flags, group", [
    (dict(log=dict(every=3)), "same numbers"),
    (dict(mesh=dict(tp=1)), "within rounding"),
    (dict(optim=dict(lr=0.011)), "changes the training"),
    (dict(train=dict(dropout=0.2)), "changes the training"),
    (dict(train=dict(steps=24)), "same numbers"),  # the old run is at its end
])  # fmt: skip
def test_a_change_is_printed_in_its_group_and_must_be_accepted_if_it_changes_the_training(
    base, reference, capsys, flags, group
):
    (section, fields), *_ = flags.items()
    (field, value), *_ = fields.items()
    cfg, run = copy_run(reference, base, f"change_{field}{value}", **flags)
    before = contents(run)
    if group == "changes the training":
        error = refusal(cfg)
        assert error.code == CHECKPOINT and f"--run.accept {section}.{field}" in str(error)
        assert contents(run) == before
        cfg = replace(cfg, run=replace(cfg.run, accept=(f"{section}.{field}",)))
    train.main(cfg)
    line = f"changed since this run's last start ({group}): {section}.{field} "
    assert line in capsys.readouterr().out
    first, last = history(run)
    assert first["last_end"] is None and first["step"] == 0 and first["end"] == "finished"
    assert (
        last["last_end"] == "finished" and last["step"] == 20 and last["mesh"] == [*cfg.mesh.sizes]
    )
    assert f"{section}.{field}" in last["changes"][group]
    assert not any(
        last["changes"][name] for name in last["changes"] if name != group and field != "dp"
    )
    assert json.loads((run / "config.json").read_text())["run"]["accept"] == []


def test_a_run_from_before_a_setting_was_trained_with_its_default():
    old, new = (json.loads(cli.to_json(config.Config())) for _ in range(2))
    del old["train"]["z_loss"], old["data"]["stages"], old["log"]["every"]
    assert not any(rundir.changes(old, new, step=1).values())
    new["train"]["z_loss"] = 1e-4
    found = rundir.changes(old, new, step=1)
    assert found["changes the training"] == {"train.z_loss": [0.0, 1e-4]}
    assert not any(rundir.changes({}, new, step=0).values())  # a new run


def test_a_setting_that_this_code_does_not_have_is_named(cfg, tmp_path, capsys):
    """As when a run of changed code goes on with the code from before the change."""
    source, path = SimpleNamespace(fingerprint="", tokenizer=None), epath.Path(tmp_path)
    record = rundir.run_record(cfg)
    record["train"]["magic"] = 3
    rundir.write_config(path, record)
    for n_said in (1, 0):
        rundir.record_start(path, cfg, source, 0)
        out, err = capsys.readouterr()
        assert (out + err).count("train.magic was 3 at this run's last start") == n_said


def test_an_empty_setting_is_shown_as_such():
    with pytest.raises(UserError, match="data.skip was '' at this run's last start and is 1:2"):
        rundir.check_changes({"data.skip": ["", "1:2"]}, config.tiny())


def test_one_flag_accepts_all_changes():
    changed = {"optim.lr": [1, 2], rundir.FINGERPRINT: ["a", "b"]}
    cfg = replace(config.tiny(), run=config.Run(accept=("optim.b1",)))
    with pytest.raises(UserError) as error:
        rundir.check_changes(changed, cfg)
    assert str(error.value).count("--run.accept optim.b1 optim.lr data.train, or") == 2


@pytest.mark.slow
def test_other_data_and_another_batch_can_be_accepted(base, reference, corpus, capsys):
    other = dict(data=dict(train=str(corpus / "val")), train=dict(batch_size=16, steps=22))
    cfg, run = copy_run(reference, base, "accepted", **other)
    assert refusal(cfg).code == CHECKPOINT
    cfg = replace(cfg, run=replace(cfg.run, accept=("data.train", "train.batch_size")))
    train.main(cfg)
    assert "(changes the training): data.train fingerprint" in capsys.readouterr().out
    table = rows(run)
    assert [table[n]["tokens"] for n in (20, 21, 22)] == [20 * 512, 20 * 512 + 256, 20 * 512 + 512]


@pytest.mark.slow
def test_the_history_says_why_the_last_start_ended(base):
    cfg, run = new_run(base, "ends", train=dict(steps=100_000), mesh=dict(dp=1, pp=1, tp=1))
    for number in (signal.SIGKILL, signal.SIGTERM):
        process, n = start(cfg), 3
        if (run / "metrics.jsonl").exists():
            n = 3 + len((run / "metrics.jsonl").read_text().splitlines())
        wait_for_step(process, run, n)
        process.send_signal(number)
        finish(process)
    cfg = replace(cfg, data=replace(cfg.data, train="nowhere"))
    assert refusal(cfg).code == errors.DATA  # no start: it has not trained
    ends = [line.get("end") for line in history(run)]
    assert ends == ["not known: killed, or ended at once", "exit code 75"]
