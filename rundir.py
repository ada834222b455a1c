"""The run directory: one live run at a time, its config.json, and starting over.

Checkpoints are in checkpoint.py, and the rows of metrics.jsonl in metrics.py.
"""

import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import asdict

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import config
from cli import to_json
from config import Config, UserError
from files import absolute_path, free_name, is_remote, move_folder, write_whole
from utils import run_on_lead, say, warn


class RunLock:
    """Lets only one live run use a run directory; the file `lock` in it names the owner.

    Locally it is an flock, which the kernel drops when the process ends.  On object stores it is a
    lease: the owner rewrites the file every `renew_every` seconds, and another run takes it over
    once the file has not changed for three times as long.  Raises UserError BUSY.
    """

    def __init__(self, path: epath.Path):
        self.path, self.released = path, threading.Event()
        self.renew_every = float(os.environ.get("TRIFOLD_LEASE_BEAT", 15))  # shorter in tests
        self.owner = dict(host=socket.gethostname(), pid=os.getpid(), id=uuid.uuid4().hex)
        self.is_lease = is_remote(path)
        if self.is_lease:
            self.take_lease()
        else:
            self.take_flock()

    def busy_error(self, owner: str) -> UserError:
        what = f"run directory {self.path.parent} belongs to another live run: {owner[:200]}"
        fix = "wait for that run or stop it, or choose another --run.name"
        return UserError(config.BUSY, what, fix)

    def take_flock(self):
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self.busy_error(self.read()) from None
        os.ftruncate(self.file, 0)
        os.write(self.file, json.dumps(self.owner).encode())

    def take_lease(self):
        patience, before = 3 * self.renew_every, self.read()
        if before:
            say(f"waiting {patience:.0f} s for the lease of an earlier run to expire: {before}")
        deadline = time.monotonic() + patience
        while before and time.monotonic() < deadline:
            time.sleep(self.renew_every / 5)
            now = self.read()
            if not now:  # the earlier run has released it
                break
            if now != before:
                raise self.busy_error(before)
        self.write_lease(0)
        time.sleep(0.2)  # if two runs start at once, the one that wrote last has the lease
        if not self.owns(self.read()):
            raise self.busy_error(self.read())
        self.thread = threading.Thread(target=self.renew_until_released, daemon=True)
        self.thread.start()

    def read(self) -> str:
        try:
            return self.path.read_text()
        except FileNotFoundError:
            return ""

    def owns(self, text: str) -> bool:
        return self.owner["id"] in text

    def write_lease(self, n: int):
        self.path.write_text(json.dumps(self.owner | dict(beat=n)))

    def renew_until_released(self):
        """The lease's thread; ends the whole process when another run has taken the lease."""
        n = 0
        while not self.released.wait(self.renew_every):
            try:
                text = self.read()
                if not self.owns(text):
                    os.write(2, f"{self.busy_error(text or 'the lease is gone')}\n".encode())
                    os._exit(config.BUSY)
                n += 1
                self.write_lease(n)
            except Exception as e:  # the next turn tries again, and sees whether it is still ours
                warn(f"{self.path} was not renewed ({type(e).__name__}: {str(e)[:200]})")

    def release(self):
        self.released.set()
        if not self.is_lease:
            os.close(self.file)
            return
        self.thread.join()  # otherwise it might write the lease again after the removal
        try:
            self.path.unlink(missing_ok=True)
        except Exception as e:  # must not hide why the run ends; the lease expires by itself
            warn(f"{self.path} was not removed ({type(e).__name__}: {str(e)[:200]})")


def run_record(cfg: Config, fingerprint: str, run_id: str) -> str:
    """The text of config.json: the resolved configuration, versions, git commit and command line.

    fingerprint: that of the training data; run_id: the run's id at Weights & Biases.
    """
    versions = {module.__name__: module.__version__ for module in (jax, np, ocp)}
    versions |= dict(python=platform.python_version(), device=jax.devices()[0].device_kind)
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
        commit = git.stdout.strip()  # empty where the folder is not a checkout
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    facts = dict(git_commit=commit, argv=sys.argv, versions=versions)
    return to_json(cfg, **facts, data_fingerprint=fingerprint, run_id=run_id)


@contextmanager
def open_run(cfg: Config, source):
    """Yield run.dir/run.name, locked, with its config.json; --fresh renames an earlier run there.

    source: the training data's dataset.Source.  Raises UserError: BUSY if another run is live,
    USAGE if the directory holds something else, STORAGE if it cannot be written, CHECKPOINT if
    --eval_only finds no run; and those of write_record.
    """
    path = absolute_path(cfg.run.dir) / cfg.run.name
    lock = run_on_lead(prepare_run, path, cfg, source)
    try:
        yield path
    finally:
        if lock is not None:
            lock.release()


def prepare_run(path: epath.Path, cfg: Config, source) -> RunLock:
    """The part of open_run that only process 0 does."""
    record = path / "config.json"
    if cfg.eval_only and not record.exists():
        what = f"there is no run in {path} to evaluate"
        raise UserError(config.CHECKPOINT, what, "set --run.name and --run.dir to those of a run")
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_is_run(path)
        lock = RunLock(path / "lock")
        if cfg.fresh and record.exists():
            old = free_name(path.with_name(path.name + ".old"))
            move_folder(path, old)
            say(f"the old run is now {old}")
            if not lock.is_lease:  # the locked file was moved too; a lease is not moved
                lock.release()
                path.mkdir(parents=True, exist_ok=True)
                lock = RunLock(path / "lock")
        if not record.exists():
            write_record(path, cfg, source)
        return lock
    except OSError as e:
        what = f"cannot write to {path}: {e.strerror or e}"
        fix = "choose a --run.dir that this user can write to"
        raise UserError(config.STORAGE, what, fix) from None


def check_is_run(path: epath.Path):
    """Raises UserError USAGE where the folder has files, and they are not a run's."""
    if not path.exists() or (path / "config.json").exists():  # object stores have no empty folders
        return
    # A run that was killed while it started leaves its lock, and perhaps config.json.part.
    left_by_start = ("lock", "config.json.part")
    others = [file.name for file in path.iterdir() if file.name not in left_by_start]
    if others:
        what = f"{path} is not a run directory: it holds {others[0]!r} and no config.json"
        raise UserError(config.USAGE, what, "choose another --run.name or --run.dir")


def write_record(path: epath.Path, cfg: Config, source):
    """Write config.json and tokenizer.json: for a new run, and whenever training starts, because
    only then is it certain that the run uses cfg.

    Prints the settings that differ from those of the run's last start.  Raises UserError DATA for
    another tokenizer than the run's, USAGE where config.json cannot be read.
    """
    record, tokenizer = path / "config.json", path / "tokenizer.json"
    text = "" if source.tokenizer is None else source.tokenizer.read_text()
    if text and tokenizer.exists() and tokenizer.read_text() != text:
        what = f"{tokenizer} is another tokenizer than that of the data, {source.tokenizer}"
        raise UserError(config.DATA, what, f"prepare the data with --tokenizer {tokenizer}")
    try:
        old = json.loads(record.read_text()) if record.exists() else {}
        run_id = old.get("run_id", uuid.uuid4().hex[:12])
    except (ValueError, AttributeError) as e:
        what = f"{record} is not the JSON object that a run writes there: {e}"
        raise UserError(config.USAGE, what, "repair it, or start over with --fresh") from None
    write_whole(record, run_record(cfg, source.fingerprint, run_id))
    for section in config.SECTIONS:
        for name, value in asdict(getattr(cfg, section)).items():
            before = old.get(section, {}).get(name, value)
            same = json.dumps(before) == json.dumps(value)  # JSON has lists where cfg has tuples
            if not same and section != "run":
                say(f"changed since this run's last start: {section}.{name} {before} -> {value}")
    if source.tokenizer is not None:  # so that the run can be sampled without its data
        write_whole(tokenizer, text)
