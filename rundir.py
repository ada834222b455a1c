"""The run directory: one live run at a time, its config.json, and starting over.

Checkpoints are in checkpoint.py, and the rows of metrics.jsonl in metrics.py.
"""

import json
import os
import platform
import subprocess
import sys
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
from files import free_name, is_writable, move_folder, run_path, write_whole
from lock import FileLock, Lease, take_lock
from utils import run_on_lead, say


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
def open_run(cfg: Config, source, lock: FileLock | None = None):
    """Yield run.dir/run.name, locked, with its config.json; --fresh renames an earlier run there.

    source: the training data's dataset.Source.  lock: the run's, if this process has it already.
    For --eval_only it is enough that the directory can be read.  Raises UserError: BUSY if another
    run is live, USAGE if the directory holds something else, STORAGE if it cannot be written,
    CHECKPOINT if --eval_only finds no run; and those of write_record.
    """
    path = run_path(cfg)
    lock = run_on_lead(prepare_run, path, cfg, source, lock)
    try:
        yield path
    finally:
        if lock is not None:
            lock.release()


def prepare_run(path: epath.Path, cfg: Config, source, lock) -> FileLock | Lease | None:
    """The part of open_run that only process 0 does.  None for a directory that cannot be written,
    with --eval_only."""
    record = path / "config.json"
    if cfg.eval_only and not record.exists():
        what = f"there is no run in {path} to evaluate"
        raise UserError(config.CHECKPOINT, what, "set --run.name and --run.dir to those of a run")
    if cfg.eval_only and not is_writable(path):
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_is_run(path)
        lock = lock or take_lock(path)
        if cfg.fresh and record.exists():
            old = free_name(path.with_name(path.name + ".old"))
            move_folder(path, old)
            say(f"the old run is now {old}")
            if isinstance(lock, FileLock):  # the locked file was moved too; a lease is not moved
                lock.release()
                path.mkdir(parents=True, exist_ok=True)
                lock = take_lock(path)
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
