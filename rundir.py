"""The run directory: one live run at a time, its config.json and history.jsonl, and starting over.

Checkpoints are in checkpoint.py and verify.py, and the rows of metrics.jsonl in rowfile.py.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import jax
import jaxlib
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import files
from checks import check_record
from cli import to_json
from config import SECTIONS, Config
from errors import CHECKPOINT, USAGE, Problem, UserError, is_storage_error, storage_error
from lock import FileLock, Lease, take_lock
from order import trained_before
from restart import LAST_END, note_start_over
from rowfile import read_lines
from shards import check_tokenizer, tokenizer_text
from utils import only_warn, process_ids, run_on_lead, say, warn


def run_record(cfg: Config, fingerprint: str = "", old: dict | None = None) -> dict:
    """What config.json holds: the resolved configuration, versions, git commit and command line.

    fingerprint: that of the training data.  old: the run's record so far, whose run_id (the run's
    at Weights & Biases) and parent are kept.
    """
    versions = {module.__name__: module.__version__ for module in (jax, jaxlib, np, ocp)}
    with suppress(metadata.PackageNotFoundError):
        versions |= dict(libtpu=metadata.version("libtpu"))
    versions |= dict(python=platform.python_version(), device=jax.devices()[0].device_kind)
    facts = dict(git_commit=git_commit(), argv=sys.argv, versions=versions)
    facts |= dict(data_fingerprint=fingerprint, run_id=uuid.uuid4().hex[:12])
    kept = {name: old[name] for name in ("run_id", "parent") if old and old.get(name)}
    return json.loads(to_json(cfg, **facts | kept))


@cache
def code_digest() -> str:
    """A hash of the modules and scripts, without hidden files: an editor's lock may be a link to
    nothing."""
    folder = Path(__file__).parent
    paths = sorted([*folder.glob("[!.]*.py"), *folder.glob("scripts/[!.]*.py")])
    code = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(code).hexdigest()[:12]


@cache
def git_commit() -> str:
    """The commit of this code.  Where files differ from it -dirty and a hash of the code follow;
    where this is not a checkout it is that hash alone.  It is cached, because a start asks twice,
    and a commit in between is not of the code that runs."""
    # From git 2.38 on safe.directory allows a checkout that another user owns, as in a container;
    # its code runs here in any case.
    command = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--abbrev=40"]
    command += ["--exclude=*"]
    folder, commit = os.path.dirname(os.path.abspath(__file__)), ""
    with suppress(OSError, subprocess.TimeoutExpired):
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
        commit = git.stdout.strip()
    is_clean = commit and not commit.endswith("-dirty")
    return commit if is_clean else f"{commit}-{code_digest()}".removeprefix("-")


@contextmanager
def open_run(cfg: Config, source, lock: FileLock | None = None):
    """Yield run.dir/run.name, locked, with its config.json; --fresh renames an earlier run there.

    source: the training data's dataset.Source.  lock: the run's, if this process has it already.
    For --eval_only it is enough that the directory can be read.  Raises UserError: BUSY if another
    run is live, USAGE if the directory holds something else, STORAGE if it cannot be written,
    CHECKPOINT if --eval_only finds no run; and those of write_record.
    """
    path = files.run_path(cfg)
    lock = run_on_lead(prepare_run, path, cfg, source, lock)
    if isinstance(lock, FileLock):
        lock.watch()
    end = "finished"
    try:
        yield path
    except BaseException as e:
        end = f"exit code {e.code}" if isinstance(e, SystemExit | UserError) else repr(e)[:200]
        raise
    finally:
        if lock is not None:
            record_end(path, end)
            lock.release()


def prepare_run(path: epath.Path, cfg: Config, source, lock) -> FileLock | Lease | None:
    """The part of open_run that only process 0 does.  Returns the lock, or None with --eval_only
    for a directory that cannot be written."""
    record = path / "config.json"
    if (cfg.eval_only or cfg.rollback >= 0) and not files.exists(record):
        what = f"there is no run in {path} to {'evaluate' if cfg.eval_only else 'roll back'}"
        raise UserError(CHECKPOINT, what, "set --run.name and --run.dir to those of a run")
    if cfg.eval_only and not files.is_writable(path):
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_is_run(path)
        lock = lock or take_lock(path)
        is_half_moved = files.is_remote(path) and (path / files.MOVING).exists()
        if is_half_moved and not cfg.fresh:
            what = f"{path} is only a part of a run: --fresh was interrupted while it moved it"
            raise UserError(CHECKPOINT, what, "give --fresh, which moves the rest")
        if is_half_moved or (cfg.fresh and files.exists(record)):
            move_run(path)
            if isinstance(lock, FileLock):  # the locked file was moved too; a lease is not moved
                lock.release()
                path.mkdir(parents=True, exist_ok=True)
                lock = take_lock(path)
        if cfg.fresh:
            note_start_over()
        if cfg.rollback >= 0:
            roll_back(path, cfg, source)
        if not files.exists(record):
            say(f"new run: {path}")
            write_record(path, run_record(cfg, source.fingerprint), source)
        return lock
    except Exception as e:  # not all that a bucket raises is an OSError
        if lock is not None:
            lock.release()
        if not is_storage_error(e):
            raise
        raise storage_error(e, "cannot write to ", path) from None


def move_run(path: epath.Path):
    """Move the run, for --fresh.  In a bucket a note says where to, so that after an interruption
    the rest goes there too."""
    note, old = path / files.MOVING, files.free_name(path.with_name(path.name + ".old"))
    if files.is_remote(path):
        begun = note.read_text() if note.exists() else ""
        # No other folder, because the note may be a stranger's.
        if re.fullmatch(rf"{re.escape(path.name)}\.old(\.\d+)?", begun):
            old = path.with_name(begun)
        note.write_text(old.name)
    files.move_folder(path, old)
    if files.is_remote(path):
        note.unlink()
    say(f"the old run is now {old}")


def roll_back(path: epath.Path, cfg: Config, source):
    """Go back to the newest checkpoint of at most cfg.rollback updates: move later checkpoints and
    rows to rolled_back/, unless the last start was by this same command.  Raises UserError
    CHECKPOINT if there is no such checkpoint, and as check_changes and check_past."""
    history = read_history(path)
    last = history[-1] if history else {}
    if (last.get("argv"), last.get("rollback")) == (sys.argv, cfg.rollback):
        return say("this command has rolled the run back already, so the run goes on")
    saved = files.saved_steps(path)
    to = max((step for step in saved if step <= cfg.rollback), default=None)
    if to is None:
        what = f"{path} has no checkpoint of at most {cfg.rollback} updates"
        fix = f"its checkpoints are {', '.join(map(str, saved)) or 'none'}"
        raise UserError(CHECKPOINT, what, fix)
    old, new = read_record(path), run_record(cfg, source.fingerprint)
    check_changes(changes(old, new, to)["changes the training"], cfg)
    check_past(old, cfg, to)
    # The checkpoint may be from before a --run.accept.
    here, there = record_facts(new), saved_settings(path / "checkpoints" / str(to))
    differ = {n: [x, here[n]] for n, x in there.items() if x not in (None, here.get(n, x))}
    check_changes(differ, cfg, when=f"in checkpoint {to}")
    where = files.free_name(path / "rolled_back" / str(to))
    where.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "samples.jsonl"):  # copies; the run drops late rows as it resumes
        if files.exists(path / name):
            files.write_whole(where / name, (path / name).read_bytes())
    # The newest first: a rollback that is interrupted can be repeated.
    for step in reversed(saved[saved.index(to) + 1 :]):
        files.move_folder(path / "checkpoints" / str(step), where / "checkpoints" / str(step))
    say(f"rolled back to update {to}; what came after it is in {where}")


def check_is_run(path: epath.Path):
    """Raises UserError USAGE where the folder has files that are not a run's, or where a pipe,
    which may never end, has the name of one of a run's files."""
    for name in ("lock", "config.json", "history.jsonl", "metrics.jsonl", "samples.jsonl"):
        file = path / name
        # Not file.is_file(): epath's is True of a pipe.
        if not files.is_remote(file) and files.exists(file) and not Path(file).is_file():
            what = f"{file} is not a file but a folder, pipe or device"
            fix = "move it away" + ("" if name == "lock" else ", and put the run's own file there")
            raise UserError(USAGE, what, fix)
    if not path.exists() or (path / "config.json").exists():  # object stores have no empty folders
        return
    # A run that was killed or hung while it started leaves its lock, and perhaps one of the others.
    left_by_start = ("lock", "config.json.part", "crash", files.MOVING)
    others = [file.name for file in path.iterdir() if file.name not in left_by_start]
    if others:
        what = f"{path} is not a run directory: it holds {others[0]!r} and no config.json"
        raise UserError(USAGE, what, "choose another --run.name or --run.dir")


def write_config(path: epath.Path, record: dict):
    files.write_whole(path / "config.json", json.dumps(record, indent=1) + "\n")


def write_record(path: epath.Path, record: dict, source):
    """Write config.json, which is to hold `record`, and tokenizer.json: for a new run, and whenever
    training starts, because only then is it certain that the run uses these settings.  Raises
    UserError DATA for another tokenizer than the run's."""
    tokenizer = path / "tokenizer.json"
    if files.saved_steps(path):  # otherwise an earlier start has failed, and has left no weights
        check_tokenizer(tokenizer, source.tokenizer)
    text = source.tokenizer and tokenizer_text(source.tokenizer)
    write_config(path, record)
    if text:  # so that the run can be sampled without its data
        files.write_whole(tokenizer, text)


def read_record(path: epath.Path) -> dict:
    """The run's config.json, {} if there is none.  Raises UserError USAGE where it cannot be
    read."""
    record = path / "config.json"
    try:
        found = json.loads(record.read_text()) if files.exists(record) else {}
        check_record(found)
        return found
    except (ValueError, AttributeError) as e:
        what = f"{record} is not the JSON object that a run writes there: {e}"
        raise UserError(USAGE, what, "repair it, or start over with --fresh") from None


def begin_of_rows(record: dict) -> tuple[int, int]:
    """(update, tokens until then) before a run's first row in metrics.jsonl: of a branch that began
    with its parent's state, the parent's."""
    parent = record.get("parent", {})
    return (parent["step"], parent["tokens"]) if parent.get("start_with") == "state" else (0, 0)


# ---- what a start changes

SAME_NUMBERS = {
    "data.train", "data.val", "data.cache", "data.cache_gb", "data.prefetch", "data.epochs_max",
    "train.eval_every", "train.eval_batches", "train.eval_rolling", "train.sample_every",
    "train.sample_tokens", "train.profile", "train.pgle",
}  # fmt: skip
"""Settings that do not change the training; those of eval, checkpoint and log do not either, except
log.norms_every.  data.train is only the path here: other data has another FINGERPRINT."""
ROUNDING = {
    "train.microbatches", "train.grad_accum", "train.remat", "train.unroll", "train.attention",
    "train.loss_chunk", "log.norms_every",
}  # fmt: skip
"""Settings that change the training within rounding, as the mesh, the device and versions do."""
FINGERPRINT = "data.train fingerprint"


def record_facts(record: dict) -> dict:
    """{name: value} of what may change the training in a config.json; settings have their flags'
    names."""
    facts = {f"{s}.{name}": x for s in SECTIONS for name, x in record.get(s, {}).items()}
    facts = {name: x for name, x in facts.items() if name[:4] != "run." or name == "run.seed"}
    versions = record.get("versions", {}) | dict(trifold=record.get("git_commit"))
    facts |= {f"version of {name}": x for name, x in versions.items()}
    return facts | {FINGERPRINT: record.get("data_fingerprint")}


def group_of(name: str) -> str:
    """What a change of this fact does to the training."""
    section = name.partition(".")[0]
    is_mesh = section == "mesh" and name != "mesh.slow_dtype"
    if is_mesh or name in ROUNDING or name.startswith("version of "):
        return "within rounding"
    if section in ("eval", "checkpoint", "log") or name in SAME_NUMBERS:
        return "same numbers"
    return "changes the training"


def changes(old: dict, new: dict, step: int) -> dict[str, dict[str, list]]:
    """{group: {name: [value there, value here]}} of two records.

    step: updates that the run has made.  If it had reached the old train.steps, a new number of
    steps changes nothing that was trained.
    """
    found = {group: {} for group in ("same numbers", "within rounding", "changes the training")}
    usual = json.loads(to_json(Config())) if old else {}  # of settings newer than the run
    there, here = record_facts(usual) | record_facts(old), record_facts(new)
    for name, value in here.items():
        before = there.get(name)
        if None in (before, value) or before == value:  # None: one of the records lacks it
            continue
        ended = name == "train.steps" and step >= before
        found["same numbers" if ended else group_of(name)][name] = [before, value]
    return found


def shown(value) -> str:
    """A value as text for a message; an empty one as ''."""
    return str(value or repr(value))


def check_changes(changed: dict[str, list], cfg: Config, when: str = "at this run's last start"):
    """Raises UserError CHECKPOINT if one of these settings, {name: [value then, value here]}, is
    not in run.accept.  when: words for then."""
    flags = {name: name.removesuffix(" fingerprint") for name in changed}
    flags = {name: flag for name, flag in flags.items() if flag not in cfg.run.accept}
    accept = " ".join([*cfg.run.accept, *flags.values()])  # the flag may be given only once
    problems = []
    for name, flag in flags.items():
        before, value = map(shown, changed[name])
        what = f"{name} was {before} {when} and is {value}, which changes the training"
        fits = " if all arrays keep their shapes" if flag.startswith("model.") else ""
        fix = f"give the old value, or --run.accept {accept}{fits}, or another --run.name"
        problems.append(Problem(what, fix))
    if problems:
        raise UserError(CHECKPOINT, problems=problems)


def check_past(old: dict, cfg: Config, step: int):
    """Raises UserError CHECKPOINT if data.skip, data.stages or train.batch_ramp change updates that
    the run has made."""
    data, train = old.get("data", {}), old.get("train", {})
    there = data.get("skip", ""), data.get("stages", []), train.get("batch_ramp", "")
    here = cfg.data.skip, cfg.data.stages, cfg.train.batch_ramp
    size = train.get("batch_size", cfg.train.batch_size)  # check_changes has compared them
    if trained_before(step, *there, size) != trained_before(step, *here, size):
        what = "data.skip, data.stages or train.batch_ramp change some of the "
        what += f"{step} updates that the run has made"
        fix = "add --rollback with an update from before those, or change only later ones"
        raise UserError(CHECKPOINT, what, fix)


def saved_settings(folder: epath.Path) -> dict:
    """{name: value} of the settings that a checkpoint was saved with; {} if it is damaged."""
    try:
        return dict(json.loads((folder / "meta" / "metadata").read_text())["must"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}


# ---- history.jsonl: a line for each start

START_ID = uuid.uuid4().hex
"""The id of this process's line in history.jsonl."""


def read_history(path: epath.Path) -> list[dict]:
    starts = []

    def add(start: dict):
        changed = dict(start.get("changes", {}))
        starts.append(start | dict(changes={group: dict(x) for group, x in changed.items()}))

    read_lines(path / "history.jsonl", track=add)
    return starts


def write_history(path: epath.Path, lines: list[dict]):
    files.write_whole(path / "history.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))


def record_start(path: epath.Path, cfg: Config, source, step: int):
    """Record in config.json and history.jsonl that training starts after `step` updates, and print
    what has changed since the last start.  Raises as read_record, check_changes, check_past and
    write_record."""
    old, history = read_record(path), read_history(path)
    record = run_record(cfg, source.fingerprint, old)
    found, before = changes(old, record, step), record_facts(old)
    for name in sorted(before.keys() - record_facts(record) - {"version of libtpu"}):
        what = f"{name} was {shown(before[name])} at this run's last start"
        warn(f"{what}, and this code has no such setting: it has no effect any more")
    # Not compared: a run without a checkpoint, or one without history and updates, which is new or
    # made by convert_hf.py or average.py.
    if files.saved_steps(path) and (history or step):
        check_changes(found["changes the training"], cfg)
        check_past(old, cfg, step)
    if history and "end" not in history[-1]:
        history[-1]["end"] = os.environ.get(LAST_END) or "not known: killed, or ended at once"
    write_record(path, record, source)
    for group, names in found.items():
        for name, (before, value) in names.items():
            both = f"{shown(before)} -> {shown(value)}"
            say(f"changed since this run's last start ({group}): {name} {both}")
    line = dict(time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), argv=sys.argv)
    mesh = [cfg.mesh.dp, cfg.mesh.pp, cfg.mesh.tp]
    line |= dict(mesh=mesh, processes=len(process_ids()), step=step)
    line |= dict(rollback=cfg.rollback) if cfg.rollback >= 0 else {}
    last_end = history[-1]["end"] if history else None
    write_history(path, [*history, line | dict(last_end=last_end, changes=found, id=START_ID)])


def record_end(path: epath.Path, end: str):
    """Record in history.jsonl why the run of this process ends, if it has trained.  If that fails
    it only warns, because an error would hide why."""
    with only_warn(f"{path / 'history.jsonl'} was not written"):
        history = read_history(path)
        if history and history[-1].get("id") == START_ID and "end" not in history[-1]:
            history[-1]["end"] = end
            write_history(path, history)
