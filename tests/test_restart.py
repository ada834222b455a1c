"""Runs that come back by themselves, and saves by the clock, by a signal and to a full disk."""

import ctypes
import fcntl
import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from runs import (
    copy_run,
    finish,
    flags,
    losses,
    new_run,
    rows,
    start,
    start_two,
    wait_for_step,
    wait_until,
)

import checkpoint
import config
import files
import processes
import restart
import runstate
import train
from errors import DATA, DISTRIBUTED, HUNG, INTERRUPTED, STORAGE, UserError

pytestmark = pytest.mark.slow
SINGLE = dict(dp=1, pp=1, tp=1)
ENDLESS = dict(steps=100_000, eval_every=0)


def training_process(run: Path) -> int:
    """The process that trains, as the lock names it; 0 while it is being written."""
    text = (run / "lock").read_text()
    return json.loads(text)["pid"] if text.endswith("}") else 0


def saved(run: Path) -> set[int]:
    """The updates after which complete checkpoints were made."""
    return {int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()}


def read_until(text: str, process: subprocess.Popen) -> str:
    """What the process writes to stderr up to this text, and perhaps a little more."""
    said = b""
    while text.encode() not in said:
        more = os.read(process.stderr.fileno(), 1 << 16)
        assert more, said.decode()
        said += more
    return said.decode()


# ---- the parent


def test_a_killed_run_comes_back_and_changes_no_bit(base, reference):
    sections = dict(checkpoint=dict(every=3), run=dict(restarts=1))
    cfg, run = new_run(base, "back", **sections)
    parent = start(cfg)
    for step in (4, 11):
        wait_for_step(parent, run, step)
        wait_until(lambda step=step: max(saved(run)) >= step - 4, parent)
        child = training_process(run)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda child=child: training_process(run) not in (0, child), parent)
    code, _, err = finish(parent)
    assert code == 0 and len(re.findall(r"with signal SIGKILL.*; try 1 of at most 1", err)) == 2
    assert losses(run) == losses(reference)
    assert rows(run, "eval") == rows(reference, "eval")


def test_fresh_moves_the_old_run_once(base, reference):
    """The first start is killed before it has moved the old run, the second after it."""
    sections = dict(train=dict(steps=100_000), run=dict(restarts=5), mesh=SINGLE)
    cfg, run = copy_run(reference, base, "fresh_again", **sections)
    parent = start(cfg, "--fresh")
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    wait_until(lambda: children.read_text().strip(), parent)
    os.kill(int(children.read_text()), signal.SIGKILL)
    read_until("SIGKILL", parent)
    wait_until(run.with_name("fresh_again.old").exists, parent)
    wait_for_step(parent, run, 3)
    child = training_process(run)
    # Between the two starts the parent cannot read the run's record, as where storage fails.
    (run / "config.json").rename(run / "away")
    os.kill(child, signal.SIGKILL)
    read_until("SIGKILL", parent)
    (run / "away").rename(run / "config.json")
    wait_until(lambda: training_process(run) not in (0, child), parent)
    wait_until(lambda: len(history(run)) == 2, parent)
    parent.send_signal(signal.SIGTERM)
    assert finish(parent)[0] == INTERRUPTED
    assert losses(run.with_name("fresh_again.old")) == losses(reference)
    assert not run.with_name("fresh_again.old.2").exists()


def test_fresh_that_is_given_twice_moves_the_old_run_once(monkeypatch):
    codes, started = [STORAGE, 0], []

    def run(words, last_end):
        started.append(words)
        return codes[len(started) - 1]

    monkeypatch.setattr(sys, "argv", ["train.py", "--fresh", "--fresh"])
    child = SimpleNamespace(run=run, told_to_stop=False, has_started_over=lambda: True)
    monkeypatch.setattr(restart, "Child", lambda: child)
    monkeypatch.setattr(restart, "newest_checkpoint", lambda *_: -1)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert restart.supervise(replace(config.Config(), run=config.Run(restarts=1))) == 0
    assert started == [["train.py", "--fresh", "--fresh"], ["train.py"]]


HANGING = """
import time
import config, restart

def hang(*_):
    print("waiting", flush=True)
    time.sleep(60)

restart.newest_checkpoint = hang
restart.supervise(config.Config())
"""


def test_a_parent_that_waits_for_storage_ends_at_a_signal():
    command = [sys.executable, "-c", HANGING]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout.readline() == "waiting\n"
    parent.terminate()
    assert parent.wait(timeout=30) == INTERRUPTED


def history(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def test_a_signal_that_reaches_parent_and_child_counts_once(base):
    cfg, run = new_run(base, "both_told", train=ENDLESS, run=dict(restarts=5), mesh=SINGLE)
    parent = start(cfg)
    wait_for_step(parent, run, 3)
    os.kill(training_process(run), signal.SIGTERM)
    parent.send_signal(signal.SIGTERM)
    assert finish(parent)[0] == INTERRUPTED
    assert max(saved(run)) == len(rows(run)) >= 3


def test_what_will_not_pass_is_not_tried_again(base, tmp_path):
    cfg, _ = new_run(base, "passes", data=dict(train="nowhere"), run=dict(restarts=3))
    code, _, err = finish(start(cfg))
    assert code == DATA and "restart:" not in err
    (tmp_path / "file").write_text("")
    cfg, _ = new_run(base, "passes", run=dict(restarts=2, dir=str(tmp_path / "file")))
    code, _, err = finish(start(cfg))
    assert code == STORAGE and err.count("error: cannot write to") == 3
    assert "no checkpoint is known; gave up after 2 restarts without a new checkpoint" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_parent_that_is_told_to_stop_lets_the_run_save(base, number):
    cfg, run = new_run(base, f"told{number}", train=ENDLESS, run=dict(restarts=5), mesh=SINGLE)
    parent = start(cfg)
    wait_for_step(parent, run, 3)
    parent.send_signal(number)
    code, _, err = finish(parent)
    assert code == INTERRUPTED and "restart:" not in err
    assert max(saved(run)) == len(rows(run)) >= 3


@pytest.mark.parametrize("restarts, piped", [(0, False), (0, True), (2, False)])
def test_a_terminal_that_is_closed_lets_the_run_save(base, restarts, piped):
    """piped: with `| tee`, which ends with the terminal."""
    cfg, run = new_run(base, f"hung_up{restarts}{piped}", train=ENDLESS, log=dict(every=1))
    cfg = replace(cfg, run=replace(cfg.run, restarts=restarts))
    leader, follower = pty.openpty()
    reader, writer = os.pipe()

    def take_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup of the tests would be inherited
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)

    out = writer if piped else follower
    streams = dict(stdin=follower, stdout=out, stderr=follower, pass_fds=[follower])
    process = start(cfg, **streams, start_new_session=True, preexec_fn=take_terminal)
    os.close(follower)
    os.close(writer)
    wait_for_step(process, run, 3)
    os.close(reader)
    os.close(leader)
    assert process.wait(timeout=60) == INTERRUPTED
    assert max(saved(run)) == len(rows(run)) >= 3


@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_a_run_whose_output_nothing_reads_saves_and_ends(base, number):
    """Ctrl-C ends `| tee` too, before the run prints that it has saved."""
    cfg, run = new_run(base, f"unread{number}", train=ENDLESS, mesh=SINGLE)
    process = start(cfg, stderr=subprocess.STDOUT)
    wait_for_step(process, run, 3)
    process.stdout.close()
    if number is not None:
        process.send_signal(number)
    assert process.wait(timeout=60) == INTERRUPTED
    assert max(saved(run)) == len(rows(run)) >= 3


def test_only_what_may_be_temporary_is_tried_again():
    codes = {code for code in range(256) if restart.temporary_reason(code)}
    assert codes == {STORAGE, DISTRIBUTED, HUNG, INTERRUPTED}


def test_a_signal_without_a_name_has_its_number():
    assert restart.temporary_reason(-9) == "signal SIGKILL"
    assert restart.temporary_reason(-40) == "signal 40"


def test_a_run_ends_with_its_parent(base):
    cfg, run = new_run(base, "orphan", train=ENDLESS, run=dict(restarts=5), mesh=SINGLE)
    parent = start(cfg)
    wait_for_step(parent, run, 3)
    child = training_process(run)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_request_to_save_does_not_end_a_process_that_has_no_handler_yet():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
    options = dict(preexec_fn=restart.prepare_child, timeout=60)
    assert subprocess.run([sys.executable, "-c", code], **options).returncode == 0


def test_a_system_without_prctl_can_have_a_parent_process(monkeypatch):
    """As macOS."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    done = subprocess.run(["true"], preexec_fn=restart.prepare_child)
    assert done.returncode == 0


def test_two_processes_come_back_together(base, reference):
    sections = dict(checkpoint=dict(every=3), run=dict(restarts=2))
    cfg, run = new_run(base, "both_back", **sections)
    both = start_two(cfg)
    wait_for_step(both[0], run, 8)
    (child,) = Path(f"/proc/{both[1].pid}/task/{both[1].pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    ends = [finish(process) for process in both]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "restart: training ended with exit code 7, another process was lost" in ends[0][2]
    assert "restart: training ended with signal SIGKILL" in ends[1][2]
    assert len(rows(run)) == 20 and list(rows(run, "eval")) == [10, 20]


# ---- when to save


@pytest.mark.parametrize("n_processes", [1, 2])
def test_a_signal_saves_without_stopping(base, n_processes):
    sections = dict(train=ENDLESS, checkpoint=dict(every=100_000), mesh=dict(dp=2, pp=1, tp=1))
    cfg, run = new_run(base, f"usr1_{n_processes}", **sections)
    all_processes = [start(cfg)] if n_processes == 1 else start_two(cfg)
    first, last = all_processes[0], all_processes[-1]
    wait_for_step(first, run, 3)
    last.send_signal(signal.SIGUSR1)
    wait_until(lambda: len(saved(run)) == 2, first)
    at = max(saved(run))
    wait_for_step(first, run, at + 3)
    last.send_signal(signal.SIGTERM)
    for process in all_processes:
        assert finish(process)[0] == INTERRUPTED
    assert 3 <= at < max(saved(run)) == len(rows(run))


def test_the_clock_asks_for_one_save_at_a_time(monkeypatch):
    """Also where the update that saves comes later than the one that notices."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    cfg, stop, saves = config.tiny(), processes.Stop(), []
    log = SimpleNamespace(run_untimed=lambda f, *args: f(*args))
    store = SimpleNamespace(
        is_due_by_clock=lambda every, minutes: not saves,
        save=lambda step, *_: saves.append(step) or True,
    )
    monkeypatch.setattr(runstate, "checkpoint_items", lambda state: state)
    for step in range(1, 8):
        assert not stop.agree_to_stop(is_update=True)
        train.save_if_due(store, step, None, False, False, log, stop, cfg)
    assert saves == [2]


@pytest.mark.parametrize("minutes", [0.02, 0])
def test_saves_by_the_clock(base, minutes):
    """Every 1.2 s; with 0, whenever the last save is complete, however slow the machine."""
    sections = dict(train=ENDLESS, checkpoint=dict(every=0, minutes=minutes), mesh=SINGLE)
    cfg, run = new_run(base, f"clock{minutes}", **sections)
    process = start(cfg)
    wait_for_step(process, run, 1)
    seen, began = set(), time.monotonic()
    wait_until(lambda: len(seen.update(saved(run)) or seen) >= 5, process)
    took = time.monotonic() - began
    process.kill()
    finish(process)
    assert (2.5 if minutes else 0) < took < 30


def test_the_two_best_are_kept_too(base, reference):
    sections = dict(train=dict(steps=30, eval_every=5), optim=dict(lr=0.5, clip_norm=1e9))
    cfg, run = new_run(base, "best", mesh=SINGLE, checkpoint=dict(best=True, every=7), **sections)
    train.main(cfg)
    worse = dict(run=replace(cfg.run, accept=("optim.lr",)), optim=replace(cfg.optim, lr=30.0))
    train.main(replace(cfg, train=replace(cfg.train, steps=40), **worse))
    scores = {step: row["loss"] for step, row in rows(run, "eval").items()}
    best = sorted(scores, key=scores.get)[:2]
    assert saved(run) == {*best, 35, 40} and not {*best} & {35, 40}, scores


def test_the_checkpoint_that_a_branch_begins_with_may_be_the_best(base, reference):
    """It is saved before it is evaluated."""
    cfg, run = new_run(
        base, "best-first", mesh=SINGLE, checkpoint=dict(best=True, every=0, minutes=60.0),
        run=dict(name="best-first", start_from=f"{reference}@10", start_with="state"),
        train=dict(steps=30, eval_every=5), optim=dict(lr=30.0, clip_norm=1e9),
    )  # fmt: skip
    train.main(cfg)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["loss"] for row in lines if row["kind"] == "eval"}
    best = sorted(scores, key=scores.get)[:2]
    assert 10 in best and saved(run) == {*best, 25, 30}, scores


# ---- storage that fails


def start_on_small_disk(cfg, folder: Path, megabytes: int) -> subprocess.Popen:
    """train.py where `folder` is a file system of its own, of so many megabytes."""
    mount = f'mount -t tmpfs -o size={megabytes}m none {folder} && exec "$@"'
    command = [sys.executable, str(ROOT / "train.py"), "--config", "tiny", *flags(cfg)]
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", *command]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **pipes)


@pytest.mark.parametrize("recovers", [True, False])
def test_a_full_disk_is_waited_for(base, tmp_path, recovers):
    sections = dict(checkpoint=dict(every=10, patience=600 if recovers else 8), mesh=SINGLE)
    sections |= dict(train=ENDLESS, run=dict(dir=str(tmp_path)))
    cfg, _ = new_run(base, "full", **sections)
    process = start_on_small_disk(cfg, tmp_path, megabytes=40)
    inside = Path(f"/proc/{process.pid}/root{tmp_path}")
    wait_for_step(process, inside / "full", 3)
    folder = os.open(inside / "full", os.O_RDONLY)  # it stays when the process has ended
    run = Path(f"/proc/self/fd/{folder}")
    with (inside / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:  # until not one byte is left
            ballast.write(bytes(4096))
    before = len((run / "metrics.jsonl").read_text().splitlines())
    if recovers:
        time.sleep(6)
        failed_at = max(saved(run))
        (inside / "ballast").unlink()
        wait_until(lambda: max(saved(run)) > max(failed_at, before) + 20, process)
        wait_until(lambda: not [*run.glob("checkpoints/*tmp*")], process)
        process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    if recovers:
        assert len(rows(run)) > before + 20  # none is missing
    os.close(folder)
    assert code == (INTERRUPTED if recovers else STORAGE), err
    assert "the next try is in 5 s" in err and "Traceback" not in err
    assert "metrics.jsonl was not written (OSError" in err


@pytest.mark.parametrize(("number", "recovers"), [(0, True), (1, False)])
def test_one_process_of_two_that_cannot_write_is_waited_for(base, number, recovers):
    sections = dict(checkpoint=dict(every=10, patience=600 if recovers else 8), train=ENDLESS)
    cfg, run = new_run(base, f"unwritable_{number}_{recovers}", **sections)
    both = start_two(cfg)
    wait_for_step(both[0], run, 3)
    unlimited = resource.RLIM_INFINITY
    resource.prlimit(both[number].pid, resource.RLIMIT_FSIZE, (0, unlimited))
    before = len((run / "metrics.jsonl").read_text().splitlines())
    said = read_until("the next try is in 5 s", both[0])
    if recovers:
        failed_at = max(saved(run))
        resource.prlimit(both[number].pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        wait_until(lambda: max(saved(run)) > max(failed_at, before) + 20, both[0])
        both[1].send_signal(signal.SIGTERM)
    expected = INTERRUPTED if recovers else STORAGE
    for n, process in enumerate(both):
        code, _, err = finish(process)
        assert code == expected and "Traceback" not in err, err
        err += said if n == 0 else ""
        assert ("File too large" in err) == (n == number), err
    assert number == 0 or "process 1 could not write" in said
    if recovers:
        assert len(rows(run)) > before + 20  # none is missing
        assert not [*run.glob("checkpoints/*tmp*")]


ENDS_AFTER_A_FAILED_SAVE = """
import errno, os, sys
import jax.numpy as jnp
from etils import epath
import checkpoint, config, processes

def fail(*args, **options):
    raise OSError(errno.EIO, os.strerror(errno.EIO))

def main(cfg):
    store = checkpoint.Checkpoints(epath.Path(sys.argv[1]), patience=60)
    items = dict(params=dict(x=jnp.ones(4)))
    assert store.save(0, items, last=True)
    mkdir, os.mkdir = os.mkdir, fail
    assert not store.save(1, items, last=True)
    os.mkdir, store.retry_at = mkdir, 0
    assert store.save(1, items, last=True)
    sys.exit(int(sys.argv[2]))

processes.run_main(main, config.Config())
"""


@pytest.mark.parametrize("code", [0, INTERRUPTED])
def test_the_end_of_a_run_does_not_wait_for_a_failed_save(tmp_path, code):
    """Orbax's threads wait 600 s for a folder that could not be made."""
    command = [sys.executable, "-c", ENDS_AFTER_A_FAILED_SAVE, tmp_path, str(code)]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == code


@pytest.mark.parametrize("part", ["params", "params/manifest.ocdbt", "params/d", "meta/metadata"])
def test_a_save_of_which_a_part_is_missing_has_failed(tmp_path, capsys, monkeypatch, part):
    """orbax reports success where a listing of a bucket, and so a copy, lacks what is new."""
    store = checkpoint.Checkpoints(files.absolute_path(str(tmp_path)), patience=600)
    state = dict(params=dict(a=np.zeros(3, np.float32)))
    assert store.save(1, state)
    wait = store.manager.wait_until_finished

    def wait_and_lose():
        wait()
        path = tmp_path / "checkpoints" / "2" / part
        if path.exists():  # orbax calls this before a save too
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    monkeypatch.setattr(store.manager, "wait_until_finished", wait_and_lose)
    assert not store.save(2, state, last=True)
    assert "not all that was written is there" in capsys.readouterr().err
    store.retry_at = 0
    assert store.save(2, state, last=True) and saved(tmp_path) == {1, 2}
    assert (tmp_path / "damaged" / "2").exists()


def test_storage_that_still_fails_when_it_is_tried_again_is_waited_for(tmp_path, monkeypatch):
    store = checkpoint.Checkpoints(files.absolute_path(str(tmp_path)), patience=600)
    state = dict(params=dict(a=np.zeros(3, np.float32)))
    assert store.save(1, state)

    def fail(*_, **__):
        raise TimeoutError("the storage does not answer")

    monkeypatch.setattr(store.manager, "save", fail)
    assert not store.save(2, state) and not store.save(2, state)
    with monkeypatch.context() as still:
        still.setattr(store, "open_manager", fail)
        store.retry_at = 0
        assert not store.save(3, state) and store.retry_at > 0
    store.retry_at = 0
    assert store.is_due_by_clock(every=10, minutes=0)
    assert store.save(4, state, last=True) and saved(tmp_path) == {1, 4}


def test_a_save_that_is_there_although_it_failed_counts(tmp_path, monkeypatch):
    """Process 0 makes the parts a checkpoint, and then fails to remove an older one."""
    store = checkpoint.Checkpoints(files.absolute_path(str(tmp_path)), patience=600)
    state = dict(params=dict(a=np.zeros(3, np.float32)))
    assert store.save(1, state)
    wait = store.manager.wait_until_finished

    def wait_and_fail():
        wait()
        if (tmp_path / "checkpoints" / "2").exists():
            raise TimeoutError("the storage does not answer")

    monkeypatch.setattr(store.manager, "wait_until_finished", wait_and_fail)
    assert not store.save(2, state, last=True)
    store.retry_at = 0
    assert store.save(2, state, last=True)
    assert store.newest_complete == 2 and saved(tmp_path) == {1, 2}


def test_a_save_that_cannot_be_looked_at_counts(tmp_path, capsys, monkeypatch):
    """It is verified before it is used in any case."""
    store = checkpoint.Checkpoints(files.absolute_path(str(tmp_path)))

    def fail(item):
        raise TimeoutError("the storage does not answer")

    monkeypatch.setattr(store, "count_arrays", fail)
    assert store.save(1, dict(params=dict(a=np.zeros(3, np.float32))))
    assert store.newest_complete == 1
    assert "checkpoint 1 could not be looked at (TimeoutError" in capsys.readouterr().err


def test_a_save_that_is_not_complete_is_not_waited_for(base, tmp_path, capsys, monkeypatch):
    store = checkpoint.Checkpoints(files.absolute_path(str(tmp_path)))
    state = dict(params=dict(a=np.zeros(3, np.float32)))
    assert store.save(1, state)
    monkeypatch.setattr(store.manager, "is_saving_in_progress", lambda: True)
    assert not store.save(2, state)
    warning = "no checkpoint after update 2: that of 1 is still being written"
    assert warning in capsys.readouterr().err
    with monkeypatch.context() as later:
        later.setattr(store, "SLOWEST", 0)
        with pytest.raises(UserError, match="checkpoint 1 is still being written") as error:
            store.is_due_by_clock(every=0, minutes=0)
    assert error.value.code == STORAGE
    assert store.save(3, state, last=True) and saved(tmp_path) == {1, 3}


def test_a_later_start_takes_its_programs_from_the_cache(base, tmp_path):
    """With the same numbers; damaged entries are compiled again."""
    cache, found = tmp_path / "cache", {}
    for name in ("first", "second", "third"):
        cfg = new_run(base, name, train=dict(steps=2, eval_every=0, eval_batches=1))[0]
        places = ["--run.dir", tmp_path, "--run.compile_cache", cache]
        code, _, err = finish(start(cfg, *places))
        assert code == 0 and "Traceback" not in err, err
        found[name] = losses(tmp_path / name)
        entries = {path.name: path.stat().st_mtime for path in cache.glob("*-cache")}
        if name == "first":
            assert entries and cache.stat().st_mode & 0o777 == 0o700
            kept = entries
        elif name == "second":
            assert entries == kept  # nothing was compiled
            for path in cache.glob("*-cache"):
                os.truncate(path, path.stat().st_size // 2)
    assert found["first"] == found["second"] == found["third"]
