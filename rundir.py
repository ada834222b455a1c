"""The run directory: one live run at a time, its config.json, starting over."""

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
from utils import on_lead, say, warn


class Lock:
    """Keeps a run directory to one live run.

    Locally an flock, which the kernel drops with the process.  On object stores a lease: renewed
    every `beat` seconds, and taken over once it has not changed for three of them.
    """

    def __init__(self, path: epath.Path):
        self.path, self.done = path, threading.Event()
        self.beat = float(os.environ.get("TRIFOLD_LEASE_BEAT", 15))  # seconds; shorter in tests
        self.me = dict(host=socket.gethostname(), pid=os.getpid(), id=uuid.uuid4().hex)
        self.remote = is_remote(path)
        if self.remote:
            self.take_lease()
        else:
            self.take_flock()

    def busy(self, holder: str):
        what = f"run directory {self.path.parent} belongs to another live run: {holder[:200]}"
        return UserError(
            config.BUSY, what, "wait for that run or stop it, or choose another --run.name"
        )

    def take_flock(self):
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self.busy(self.read()) from None
        os.ftruncate(self.file, 0)
        os.write(self.file, json.dumps(self.me).encode())

    def take_lease(self):
        seen = self.read()
        if seen:
            say(f"waiting {3 * self.beat:.0f} s for the lease of an earlier run to lapse: {seen}")
        deadline = time.monotonic() + 3 * self.beat
        while seen and time.monotonic() < deadline:
            time.sleep(self.beat / 5)
            now = self.read()
            if not now:  # released
                break
            if now != seen:
                raise self.busy(seen)
        self.renew(0)
        time.sleep(0.2)  # of two that start at once, the later writer wins
        if self.me["id"] not in self.read():
            raise self.busy(self.read())
        self.thread = threading.Thread(target=self.keep_renewing, daemon=True)
        self.thread.start()

    def read(self) -> str:
        try:
            return self.path.read_text()
        except FileNotFoundError:
            return ""

    def renew(self, n: int):
        self.path.write_text(json.dumps(self.me | dict(beat=n)))

    def keep_renewing(self):
        n = 0
        while not self.done.wait(self.beat):
            try:
                if self.me["id"] not in (holder := self.read()):
                    os.write(2, f"{self.busy(holder or 'its lease is gone')}\n".encode())
                    os._exit(config.BUSY)
                self.renew(n := n + 1)
            except Exception as e:  # the next beat tries again, and sees if another run took over
                warn(f"{self.path} was not renewed ({type(e).__name__}: {str(e)[:200]})")

    def release(self):
        self.done.set()
        if not self.remote:
            os.close(self.file)
            return
        self.thread.join()  # or its last beat might write the lease anew
        try:
            self.path.unlink(missing_ok=True)
        except Exception as e:  # must not hide why the run ends; the lease lapses by itself
            warn(f"{self.path} was not removed ({type(e).__name__}: {str(e)[:200]})")


OURS = {"lock", "config.json"}  # what a run killed at its very start has left


def run_record(cfg: Config, fingerprint: str, run_id: str) -> str:
    """config.json: the resolved configuration, and what tells this run from another."""
    versions = {module.__name__: module.__version__ for module in (jax, np, ocp)}
    versions |= dict(python=platform.python_version(), device=jax.devices()[0].device_kind)
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        here = os.path.dirname(os.path.abspath(__file__))
        done = subprocess.run(git, cwd=here, capture_output=True, text=True, timeout=10)
        facts = dict(git_commit=done.stdout.strip())
    except (OSError, subprocess.TimeoutExpired):
        facts = dict(git_commit="")  # no git, or not a checkout
    facts |= dict(argv=sys.argv, versions=versions, data_fingerprint=fingerprint, run_id=run_id)
    return to_json(cfg, **facts)


@contextmanager
def open_run(cfg: Config, data):
    """Yield run.dir/run.name, locked, with its config.json written; --fresh moves an old run aside.

    data: the training Dataset, for its fingerprint and tokenizer.  Raises UserError BUSY where
    another run holds it, USAGE where it is something else, STORAGE where it can't be written.
    """
    path = absolute_path(cfg.run.dir) / cfg.run.name
    lock = on_lead(prepare_run, path, cfg, data)
    try:
        yield path
    finally:
        if lock:
            lock.release()


def prepare_run(path: epath.Path, cfg: Config, data) -> Lock:
    """open_run's part on process 0."""
    settings = path / "config.json"
    if cfg.eval_only and not settings.exists():
        what = f"there is no run in {path} to evaluate"
        raise UserError(config.CHECKPOINT, what, "give the --run.name and --run.dir of one")
    try:
        path.mkdir(parents=True, exist_ok=True)
        there = path.iterdir() if path.exists() else []  # object stores have no empty folders
        strange = [p.name for p in there if p.name.removesuffix(".part") not in OURS]
        if strange and not settings.exists():
            what = f"{path} is not a run directory: it holds {strange[0]!r} and no config.json"
            raise UserError(config.USAGE, what, "choose another --run.name or --run.dir")
        lock = Lock(path / "lock")
        if cfg.fresh and settings.exists():
            aside = free_name(path.with_name(path.name + ".old"))
            move_folder(path, aside)
            say(f"the old run is now {aside}")
            if not lock.remote:  # the flock went along
                lock.release()
                path.mkdir(parents=True, exist_ok=True)
                lock = Lock(path / "lock")
        if not settings.exists():
            write_record(path, cfg, data)
        return lock
    except OSError as e:
        what = f"cannot write to {path}: {e.strerror or e}"
        fix = "choose a --run.dir that this user can write to"
        raise UserError(config.STORAGE, what, fix) from None


def write_record(path: epath.Path, cfg: Config, data):
    """Write config.json and tokenizer.json, once it is certain that this run goes on with cfg."""
    settings, old, own = path / "config.json", {}, path / "tokenizer.json"
    text = data.tokenizer.read_text() if data.tokenizer else ""
    if text and own.exists() and own.read_text() != text:
        what = f"{own} is another tokenizer than that of the data, {data.tokenizer}"
        raise UserError(config.DATA, what, f"prepare the data with --tokenizer {own}")
    try:
        old = json.loads(settings.read_text()) if settings.exists() else {}
        run_id = old.get("run_id", uuid.uuid4().hex[:12])
    except (ValueError, AttributeError) as e:
        what = f"{settings} is not what a run wrote there: {e}"
        raise UserError(config.USAGE, what, "mend it, or start over with --fresh") from None
    write_whole(settings, run_record(cfg, data.fingerprint, run_id))
    for section in config.SECTIONS:
        for name, value in asdict(getattr(cfg, section)).items():
            before = old.get(section, {}).get(name, value)
            same = json.dumps(before) == json.dumps(value)  # where a tuple is a list
            if not same and section != "run":
                say(f"changed since this run's last start: {section}.{name} {before} -> {value}")
    if data.tokenizer:  # so that the run can be sampled without its data
        write_whole(path / "tokenizer.json", text)
