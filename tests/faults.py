"""Random faults for as long as you like: kills, signals, storage that fails, damage, meshes and
command lines.

    python tests/faults.py --minutes 30 --seed 7        each row once, then rows at random
    python tests/faults.py --full                       each row as often as ROWS says

Each row of ROWS makes one random case at a time and raises where a promise is broken: work that is
lost beyond the last checkpoint, a damage that is not noticed, a traceback, another exit code than
those of docs/running.md.  The seed and the case are printed then, and the exit code is 1.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buckets import OBJECTS, emulate_bucket, object_path
from conftest import MESHES, ROOT, on_mesh, prepare, run
from etils import epath
from failpoint import WATCHED
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from runs import final_weights, flags, free_port, loss_curve, losses, new_run, rows, wait_for_step
from tqdm import tqdm

import checkpoint
import cli
import config
import dataset
import processes
import runstate
import signals
import train
from errors import (
    BUSY,
    CHECKPOINT,
    DATA,
    DISTRIBUTED,
    DIVERGED,
    HUNG,
    INTERRUPTED,
    STORAGE,
    USAGE,
    UserError,
)

KILLED = -signal.SIGKILL
DEEP = dict(model=dict(n_layers=8), train=dict(steps=20))  # layers for eight stages


class World:
    """What all cases share: random numbers, data, and runs without faults to compare with."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.random, self.n = folder, random.Random(number), 0
        text = Path(json.__file__).parent
        request = ["--input", text, "--suffix", ".py", "--tokenizer", "byte", "--out", folder]
        prepare(*request, "--shard_tokens", 10_000, "--val_fraction", 0.2)
        tiny = config.tiny()
        self.base = replace(
            tiny,
            run=replace(tiny.run, dir=str(folder / "runs"), start_timeout=20),
            model=replace(tiny.model, n_layers=2),
            data=config.Data(train=str(folder / "train"), val=str(folder / "val")),
            train=replace(tiny.train, batch_size=8, steps=60, eval_every=20, eval_batches=2),
            checkpoint=config.Checkpoint(every=5),
        )

    @functools.cached_property
    def tokens(self) -> tuple[bytes, str]:
        return read_all(self, self.folder / "train")

    @functools.cached_property
    def saved(self) -> dict:
        """{step: state} of two checkpoints whose values differ, in the folder `saved`."""
        cfg = on_mesh(self.base, (1, 1, 1))
        store = checkpoint.Checkpoints(epath.Path(self.folder / "saved"))
        state = runstate.init_state(cfg)
        states = {10: state, 20: jax.tree.map(lambda x: x + 1, state)}
        for step, state in states.items():
            assert store.save(step, runstate.checkpoint_items(state), last=True)
        store.close()
        return states

    @functools.cached_property
    def deep_losses(self) -> list[float]:
        """Those of a run with DEEP without faults."""
        with self.trial(1, True, **DEEP) as trial:
            trial.go_on()
            return loss_curve(trial.run)

    @contextlib.contextmanager
    def trial(self, n_processes: int = 0, on_disk: bool | None = None, **sections):
        """A Trial in n_processes (0: one or two), on disk or in a bucket (None: at random)."""
        n_processes = n_processes or self.random.choice([1, 1, 1, 2])
        if on_disk is None:
            on_disk = self.random.random() < 0.75
        with contextlib.nullcontext() if on_disk else emulate_bucket({**os.environ}) as bucket:
            trial = Trial(self, n_processes, bucket, **sections)
            try:
                yield trial
            finally:
                trial.stop()
                shutil.rmtree(trial.run, ignore_errors=True)


class Trial:
    """A run in one process or several, with its directory on disk or in a bucket."""

    def __init__(self, world: World, n_processes: int = 1, bucket=None, **sections):
        world.n += 1
        sections = dict(mesh=dict(dp=n_processes, pp=1, tp=1)) | sections
        self.world, self.n_processes, self.bucket = world, n_processes, bucket
        self.cfg, self.run = new_run(world.base, f"run{world.n}", **sections)
        self.env, self.processes = dict(TRIFOLD_LEASE_BEAT="2"), []
        if bucket:
            self.cfg = replace(self.cfg, run=replace(self.cfg.run, dir="gs://bucket/runs"))
            self.env |= bucket.env

    def start(self, failpoint: str = "", only=None, prefix=()) -> list[subprocess.Popen]:
        """Start train.py.  failpoint: of process 0, see failpoint.py; only: the ids of the
        processes that come; prefix: a command that starts the process."""
        port, self.processes = free_port(), []
        for n in range(self.n_processes):
            cfg, env = self.cfg, os.environ | self.env
            if self.n_processes > 1:
                shared = dict(coordinator=f"127.0.0.1:{port}", num_processes=self.n_processes)
                cfg = replace(cfg, run=replace(cfg.run, process_id=n, **shared))
                env.pop("JAX_NUM_CPU_DEVICES")
            script = [ROOT / "train.py"]
            if failpoint and n == 0:
                script, env["FAILPOINT"] = [ROOT / "tests" / "failpoint.py", *script], failpoint
            if only is None or n in only:
                command = [*prefix, sys.executable, *script, "--config", "tiny", *flags(cfg)]
                pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                self.processes.append(subprocess.Popen([*map(str, command)], env=env, **pipes))
        return self.processes

    def finish(self) -> list[int]:
        """The exit codes; `err` has what the processes wrote to stderr."""
        self.err = [process.communicate(timeout=300)[1] for process in self.processes]
        assert not any("Traceback" in err for err in self.err), self.err
        return [process.returncode for process in self.processes]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.communicate()

    def go_on(self):
        """Run to the end."""
        self.start()
        assert self.finish() == [0] * self.n_processes, self.err

    def read(self, name: str) -> bytes:
        """A file of the run directory, empty if it is not there."""
        if self.bucket:
            path = f"runs/{self.run.name}/{name}"
            return self.bucket.read(path) if self.bucket.has(path) else b""
        path = self.run / name
        return path.read_bytes() if path.exists() else b""

    def starts(self) -> list[dict]:
        """The lines of history.jsonl: one for each start, written when all processes are there."""
        return [json.loads(line) for line in self.read("history.jsonl").splitlines()]

    def fetch(self):
        """Copy the run directory from the bucket, if it is there."""
        if self.bucket:
            shutil.rmtree(self.run, ignore_errors=True)
            for name, data in self.bucket.contents(f"runs/{self.run.name}/").items():
                path = self.run / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def saved(self) -> list[int]:
        """The steps of the complete checkpoints."""
        if self.bucket:
            names = self.bucket.names(f"runs/{self.run.name}/checkpoints/")
            found = [re.fullmatch(r"(\d+)/commit_success.txt", name) for name in names]
            return sorted(int(match[1]) for match in found if match)
        return sorted(int(p.name) for p in (self.run / "checkpoints").glob("*") if p.name.isdigit())

    def result(self):
        self.fetch()
        return losses(self.run), rows(self.run, "eval"), final_weights(self.run)

    def wait_for_rows(self):
        """Return when the run has made an update, or after a minute."""
        deadline = time.monotonic() + 60
        while not self.read("metrics.jsonl") and time.monotonic() < deadline:
            time.sleep(0.1)

    def assert_all_saved(self):
        """The newest checkpoint has every update, unless a process ended before there was one."""
        if self.read("metrics.jsonl") and not any("nothing is lost" in err for err in self.err):
            self.fetch()
            assert self.saved()[-1] == len(rows(self.run)), self.err

    def assert_whole(self, damaged: int = 0):
        """The run goes on from its newest checkpoint, or that before as many damaged ones, to its
        end, and then has every row and every bit of one without faults."""
        saved = [0, *self.saved()]
        self.go_on()
        assert self.starts()[-1]["step"] >= saved[-1 - damaged]
        *tables, weights = self.result()
        *expected, expected_weights = reference(self.world, self.n_processes)
        assert tables == expected
        jax.tree.map(np.testing.assert_array_equal, weights, expected_weights)


@functools.cache
def reference(world: World, n_processes: int) -> tuple[list, dict, dict]:
    """(losses, evaluations, final weights) of a run without faults."""
    trial = Trial(world, n_processes)
    trial.go_on()
    return trial.result()


def restore(run: Path, cfg) -> tuple[int, dict]:
    """(step, items) of the checkpoint that a start would use."""
    abstract = runstate.abstract_state(on_mesh(cfg))
    store = checkpoint.Checkpoints(epath.Path(run))
    try:
        found = store.restore(runstate.checkpoint_items(abstract))
    finally:
        store.manager.close()
    return store.newest, found


def sample(world: World, things: list) -> list:
    """One or more of these."""
    return world.random.sample(things, world.random.randint(1, len(things)))


# ---- kills and signals


def tear_last_row(trial: Trial):
    """Cut the last row of metrics.jsonl, as a kill may, if no checkpoint is as new as the row."""
    file = trial.run / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    is_whole = bool(lines) and lines[-1].endswith(b"\n")
    if is_whole and json.loads(lines[-1])["step"] > max([0, *trial.saved()]):
        lines[-1] = lines[-1][: trial.world.random.randrange(len(lines[-1]))]
        file.write_bytes(b"".join(lines))


def kill(world: World) -> int:
    """SIGKILL at random times, of all processes or of one, until the run is at its end."""
    n = 0
    with world.trial() as trial:
        for _ in range(world.random.randint(2, 5)):
            started = trial.start()
            time.sleep(world.random.uniform(0.5, 7 + 3 * (len(started) - 1)))
            killed = sample(world, started)
            for process in killed:
                process.kill()
            for process, code in zip(started, trial.finish(), strict=True):
                expected = (KILLED, 0) if process in killed else (DISTRIBUTED, 0)
                assert code in expected, (code, trial.err)
                n += code == KILLED
            if world.random.random() < 0.5:
                tear_last_row(trial)
        trial.assert_whole()
    return n


CALLS = dict(mkdir=30, replace=6, rename=24, append=63, unlink=100, rmdir=40, request=290)
"""How many calls of each kind process 0 makes, which is the one that writes all but arrays."""


def run_to_failpoint(trial: Trial, signal_name: str) -> tuple[int, list[int]]:
    """Run until process 0 gets the signal before or after a call that writes: its exit code, and
    those of the others."""
    r = trial.world.random
    name = "request" if trial.bucket else r.choice([*WATCHED])
    trial.start(f"{name}:{r.randint(1, CALLS[name])}:{r.choice(['before', 'after'])}:{signal_name}")
    first, *others = trial.finish()
    return first, others


def kill_at_failpoint(world: World) -> int:
    """SIGKILL of process 0 before or after a call that writes, then the run to its end."""
    with world.trial() as trial:
        code, others = run_to_failpoint(trial, "SIGKILL")
        allowed = (DISTRIBUTED, 0) if code == KILLED else (0,)
        assert code in (KILLED, 0) and {*others} <= {*allowed}, (code, others, trial.err)
        trial.assert_whole()
    return int(code == KILLED)


def terminate_at_failpoint(world: World) -> int:
    """SIGTERM of process 0 before or after a call that writes: code 75, and no update is lost."""
    with world.trial() as trial:
        code, others = run_to_failpoint(trial, "SIGTERM")
        assert code in (INTERRUPTED, 0), (code, others, trial.err)
        if trial.read("metrics.jsonl"):  # before, one that starts leaves without the others
            assert {*others} <= {code}, (code, others, trial.err)
        trial.assert_all_saved()
        trial.assert_whole()
    return int(code == INTERRUPTED)


def terminate(world: World) -> int:
    """SIGTERM or Ctrl-C at random times: exit code 75, and no update is lost."""
    n = 0
    with world.trial(checkpoint=dict(every=1000)) as trial:
        for _ in range(5):
            n_starts = len(trial.starts())
            started = trial.start()
            time.sleep(world.random.uniform(0.2, 7 + 3 * (len(started) - 1)))
            # One that starts does not know the others yet, so all get the signal.
            trains = len(trial.starts()) > n_starts
            number = world.random.choice([signal.SIGTERM, signal.SIGINT])
            for process in sample(world, started) if trains else started:
                process.send_signal(number)
            codes = trial.finish()
            if codes == [0] * len(codes):
                break
            # The end of process 0 may be noticed before the signal.
            allowed = (INTERRUPTED,) if len(codes) == 1 or trains else (INTERRUPTED, DISTRIBUTED)
            assert INTERRUPTED in codes and {*codes} <= {*allowed}, (codes, trial.err)
            n += 1
            trial.assert_all_saved()
        trial.assert_whole()
    return n


def change_mesh(world: World):
    """A run is stopped on one mesh and goes on on another."""
    meshes = [mesh for mesh in MESHES if np.prod(mesh) > 1]
    before, after = world.random.sample(meshes, 2)
    axes = dict(zip(("dp", "pp", "tp"), before, strict=True))
    with world.trial(1, True, mesh=axes, **DEEP) as trial:
        (process,) = trial.start()
        wait_for_step(process, trial.run, world.random.randint(2, 15))
        process.send_signal(signal.SIGTERM)
        assert trial.finish()[0] in (INTERRUPTED, 0), trial.err
        trial.cfg = replace(trial.cfg, mesh=config.Mesh(*after))
        trial.go_on()
        got = loss_curve(trial.run)
    # Rounding errors grow with the updates: test_train.py has the reason.
    np.testing.assert_allclose(got[:10], world.deep_losses[:10], rtol=1e-5)
    np.testing.assert_allclose(got, world.deep_losses, rtol=1e-3)


# ---- processes and clocks


def stand_still(world: World):
    """One of two processes is stopped: for a while, which changes nothing, or for good."""
    with world.trial(2, True, run=dict(hang_timeout=10)) as trial:
        started = trial.start()
        wait_for_step(started[0], trial.run, world.random.randint(1, 40))
        process, for_good = world.random.choice(started), world.random.random() < 0.3
        process.send_signal(signal.SIGSTOP)
        if for_good:
            (other,) = {*started} - {process}
            _, err = other.communicate(timeout=300)
            # In a save the watchdog waits 12 times as long, but JAX ends a process 100 s after the
            # last sign of life of another one.
            code = DISTRIBUTED if "stopped sending heartbeats" in err else HUNG
            assert other.returncode == code and "Traceback" not in err, err
            trial.stop()
        else:
            time.sleep(world.random.uniform(0.1, 4))
            process.send_signal(signal.SIGCONT)
            assert trial.finish() == [0, 0], trial.err
        trial.assert_whole()


def leave_one_out(world: World):
    """One of four processes does not come: the others name it, each after start_timeout."""
    missing = world.random.randrange(4)
    with world.trial(4, True, run=dict(start_timeout=15)) as trial:
        trial.start(only={0, 1, 2, 3} - {missing})
        assert trial.finish() == [DISTRIBUTED] * 3, trial.err
        assert all(f"process {missing}" in err for err in trial.err), trial.err


def start_four_at_once(world: World):
    """Of four processes on one run directory one trains, the others leave with 8."""
    with world.trial(n_processes=1, train=dict(steps=100_000)) as trial:
        all_four = [process for _ in range(4) for process in trial.start()]
        trial.processes, deadline = all_four, time.monotonic() + 120
        while sum(process.poll() is None for process in all_four) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for process in all_four:
            process.terminate()
        codes = sorted(trial.finish())
        assert codes == [BUSY, BUSY, BUSY, INTERRUPTED], (codes, trial.err)


CLOCK = """
import os
import time

read = time.time

def jumped():
    return read() + float(open(os.environ["CLOCK_OFFSET"]).read())

time.time, time.time_ns = jumped, lambda: int(jumped() * 1e9)
"""


def change_clock(world: World):
    """The clock that Python reads jumps by up to three days, forward and back, all the time.

    libfaketime would reach C++ too, but not the kernel: what waits until a moment, as XLA's threads
    do, then waits for days.
    """
    offset, ended = world.folder / "offset", threading.Event()
    jumps = random.Random(world.random.getrandbits(32))

    def jump():
        while not ended.wait(0.2):
            offset.with_suffix(".new").write_text(f"{jumps.uniform(-3, 3) * 86400}")
            offset.with_suffix(".new").replace(offset)

    offset.write_text("0")
    (world.folder / "sitecustomize.py").write_text(CLOCK)
    with world.trial() as trial:
        trial.env |= dict(CLOCK_OFFSET=str(offset), PYTHONPATH=str(world.folder))
        thread = threading.Thread(target=jump)
        thread.start()
        try:
            started = trial.start()
            time.sleep(world.random.uniform(5, 10))
            for process in started:
                process.kill()
            assert {*trial.finish()} <= {KILLED, 0}, trial.err
            trial.assert_whole()
        finally:
            ended.set()
            thread.join()


# ---- storage that fails


def fail_requests(world: World):
    """A bucket that fails at random: the run is whole all the same."""
    with world.trial(on_disk=False) as trial:
        kinds = ["unavailable", "too_many", "slow", "cut", "lost"]
        chosen, number = sample(world, kinds), world.random.getrandbits(32)
        trial.bucket.set_faults(seed=number, **{kind: 0.05 / len(chosen) for kind in chosen})
        trial.start()
        assert trial.finish() == [0] * trial.n_processes, (chosen, trial.err)
        trial.bucket.set_faults()
        trial.assert_whole()


def interrupt_storage(world: World):
    """A bucket answers nothing but 503 for up to 20 seconds: the run is whole all the same."""
    with world.trial(on_disk=False) as trial:
        trial.start()
        trial.wait_for_rows()
        time.sleep(world.random.uniform(0, 5))
        trial.bucket.set_faults(unavailable=1)
        time.sleep(world.random.uniform(1, 20))
        trial.bucket.set_faults()
        assert trial.finish() == [0] * trial.n_processes, trial.err
        trial.assert_whole()


def list_late(world: World):
    """New objects are missing from listings for up to two seconds, which Google rules out: a save
    is whole, or fails with code 5, and what was saved before stays."""
    with world.trial(1, on_disk=False, checkpoint=dict(patience=5)) as trial:
        trial.bucket.set_faults(stale=world.random.uniform(0.2, 2))
        trial.start()
        codes = trial.finish()
        assert codes in ([0], [STORAGE]), trial.err
        trial.bucket.set_faults()
        trial.fetch()
        if (trial.run / "metrics.jsonl").exists() and rows(trial.run):
            trial.assert_whole()
        else:  # it has not begun, because its first checkpoint was not whole
            trial.start()
            assert {*trial.finish()} <= {0, CHECKPOINT}, trial.err


def cut_save(world: World):
    """Of the newest checkpoint in a bucket there are only the first objects, as after a crash at
    any moment of its save: the one before it is used."""
    with world.trial(1, on_disk=False) as trial:
        trial.go_on()
        newest = f"runs/{trial.run.name}/checkpoints/{trial.saved()[-1]}/"
        objects = json.loads(trial.bucket.call("GET", OBJECTS, prefix=newest)[0])["items"]
        objects.sort(key=lambda about: int(about["generation"]))
        for about in objects[world.random.randrange(len(objects)) :]:
            trial.bucket.call("DELETE", object_path(about["name"]))
        assert len(trial.saved()) == 1
        trial.assert_whole()


def forbid_writes(world: World):
    """From a random moment on a bucket answers 403 to all that writes: code 5, and what was saved
    before stays."""
    with world.trial(on_disk=False, checkpoint=dict(patience=3)) as trial:
        trial.start()
        time.sleep(world.random.uniform(0, 10))
        trial.bucket.set_faults(read_only=True)
        codes = trial.finish()
        assert {*codes} <= {STORAGE} or {*codes} <= {0}, (codes, trial.err)
        trial.bucket.set_faults()
        trial.assert_whole()


def stall_bucket(world: World):
    """A bucket does not answer at all: for a while, which changes nothing, or for good: code 9."""
    for_good = world.random.random() < 0.3
    with world.trial(1, on_disk=False, run=dict(hang_timeout=10 if for_good else 0)) as trial:
        trial.start()
        trial.wait_for_rows()
        trial.bucket.emulator.send_signal(signal.SIGSTOP)
        try:
            if for_good:
                assert trial.finish() == [HUNG], trial.err
                assert "no update, save or evaluation batch for" in trial.err[0], trial.err
            else:
                time.sleep(world.random.uniform(1, 20))
        finally:
            trial.bucket.emulator.send_signal(signal.SIGCONT)
        assert for_good or trial.finish() == [0], trial.err
        trial.assert_whole()


def lose_power(world: World):
    """Files of the newest checkpoint are empty, as after power was lost before the disk had them:
    the one before it is used."""
    with world.trial(1, True) as trial:
        (process,) = trial.start()
        wait_for_step(process, trial.run, 10)
        while len(trial.saved()) < 2:
            time.sleep(0.1)
        process.kill()
        assert trial.finish()[0] in (KILLED, 0), trial.err
        newest = trial.run / "checkpoints" / str(trial.saved()[-1])
        for path in sample(world, [path for path in newest.rglob("*") if path.is_file()]):
            os.truncate(path, 0)
        trial.assert_whole(damaged=1)


def fill_disk(world: World):
    """The disk is full for a while, from a random moment on."""
    folder, runs = world.folder / "disk", world.base.run.dir
    folder.mkdir(exist_ok=True)
    # What is on the small disk is gone with the process, so it is copied out before.
    script = f'mount -t tmpfs -o size=40m none {folder} && "$@"; code=$?; rm -f {folder}/ballast; '
    script += f"mkdir -p {runs}; cp -r {folder}/* {runs} || exit 1; exit $code"
    with world.trial(1, True) as trial:
        trial.cfg = replace(trial.cfg, run=replace(trial.cfg.run, dir=str(folder)))
        (process,) = trial.start(prefix=["unshare", "-rm", "sh", "-c", script, "sh"])
        inside = Path(f"/proc/{process.pid}/root{folder}")
        wait_for_step(process, inside / trial.run.name, world.random.randint(1, 40))
        with (inside / "ballast").open("wb", buffering=0) as f, contextlib.suppress(OSError):
            while True:  # until not one byte is left
                f.write(bytes(4096))
        time.sleep(world.random.uniform(0, 12))
        (inside / "ballast").unlink(missing_ok=True)
        assert trial.finish() == [0], trial.err
        trial.cfg = replace(trial.cfg, run=replace(trial.cfg.run, dir=str(trial.run.parent)))
        trial.assert_whole()


def limit_files(world: World):
    """A process of one or two cannot write a byte into any file for a while."""
    unlimited = resource.RLIM_INFINITY
    with world.trial(on_disk=True) as trial:
        started = trial.start()
        wait_for_step(started[0], trial.run, world.random.randint(1, 40))
        process = world.random.choice(started)
        with contextlib.suppress(ProcessLookupError):  # its run is over
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, unlimited))
            time.sleep(world.random.uniform(0, 12))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        assert trial.finish() == [0] * trial.n_processes, trial.err
        trial.assert_whole()


# ---- numbers that are not finite


def poison(world: World):
    """One NaN, in the gradient of a random element at a random update: that update is skipped as if
    its loss were NaN, and no checkpoint has it."""
    step = world.random.randrange(12)
    leaf, where = world.random.getrandbits(32), world.random.random()
    want, want_weights = train_with_nan(world, step, leaf, where, in_loss=True)
    table, weights = train_with_nan(world, step, leaf, where, in_loss=False)
    assert table == want, (step, leaf, where)
    jax.tree.map(np.testing.assert_array_equal, weights, want_weights)


def train_with_nan(world: World, step: int, leaf: int, where: float, in_loss: bool):
    """({update: loss or None}, final weights) after one NaN at this step: in the loss, or in an
    element of a leaf of the gradient.  Both are one program, because others round otherwise."""
    sections = dict(train=dict(steps=12), checkpoint=dict(every=2, keep=20))
    with world.trial(1, True, **sections) as trial:
        data = dataset.Dataset(on_mesh(trial.cfg, (1, 1, 1)), "train")
        bad_sum = int(np.asarray(data.batch(step)[0]).sum())
        data.workers.shutdown()
        loss_and_grads = train.loss_and_grads

        def with_nan(params, tokens, targets, key, cfg):
            loss, grads, stats = loss_and_grads(params, tokens, targets, key, cfg)
            sums = (bad_sum, -1) if in_loss else (-1, bad_sum)  # tokens have no negative sum
            loss_nan, nan = (jnp.where(tokens.sum() == x, jnp.nan, 0.0) for x in sums)
            leaves, tree = jax.tree.flatten(grads)
            n = leaf % len(leaves)
            at = np.unravel_index(int(where * leaves[n].size), leaves[n].shape)
            leaves[n] = leaves[n].at[at].add(nan)
            return loss + loss_nan, jax.tree.unflatten(tree, leaves), stats

        numbers = *signals.STOPS, signal.SIGUSR1
        handlers = {number: signal.getsignal(number) for number in numbers}
        jax.clear_caches()
        try:
            with mock.patch.object(train, "loss_and_grads", with_nan):
                train.main(trial.cfg)
        finally:
            jax.clear_caches()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        table = rows(trial.run)
        bad = [n for n, row in table.items() if None in (row["loss"], row["grad_norm"])]
        assert bad == [step + 1], bad
        weights = final_weights(trial.run)
        while trial.saved():
            newest, found = restore(trial.run, trial.cfg)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(found)), newest
            shutil.rmtree(trial.run / "checkpoints" / str(newest))
        del table[step + 1]
        return {n: (row["loss"], row["grad_norm"], row["lr"]) for n, row in table.items()}, weights


# ---- damage


def damage(path: Path, world: World) -> str:
    """Damage a file; what was done."""
    data, r = bytearray(path.read_bytes()), world.random
    kinds = ["bit", "cut", "zeros", "append", "remove", "random", "pipe", "folder", "swap"]
    kind = r.choice(kinds)
    at = r.randrange(max(1, len(data)))
    if kind == "bit" and data:
        data[at] ^= 1 << r.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "zeros":
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    elif kind == "append":
        data += r.randbytes(r.randint(1, 64))
    elif kind == "random":
        data[at : at + 16] = r.randbytes(len(data[at : at + 16]))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "swap":
        others = [p for p in path.parent.iterdir() if p.is_file()]
        path.write_bytes(r.choice(others).read_bytes() if others else b"")
    elif kind != "remove":
        path.write_bytes(data)
    return f"{kind} at {at} of {path}"


def copy_checkpoints(world: World, name: str) -> Path:
    """A run directory with copies of the checkpoints world.saved."""
    assert sorted(world.saved) == [10, 20]
    return Path(shutil.copytree(world.folder / "saved", world.folder / name))


def restored(world: World, run: Path) -> tuple[int, bool]:
    """The step of the checkpoint that is used, and whether it is as it was saved."""
    newest, found = restore(run, world.base)
    want = runstate.checkpoint_items(world.saved[newest])
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True)
    return newest, all(np.array_equal(got, x) for got, x in pairs)


def damage_checkpoint(world: World):
    """One file of the newest checkpoint is damaged: the state is whole, or that before is used."""
    copy = copy_checkpoints(world, "damaged")
    files = sorted(p for p in (copy / "checkpoints" / "20").rglob("*") if p.is_file())
    done = damage(world.random.choice(files), world)
    _, is_whole = restored(world, copy)
    assert is_whole, done
    shutil.rmtree(copy)


def move_checkpoint(world: World):
    """The newest checkpoint is renamed, or replaced by a copy of the one before, or they are
    swapped: one whose step is not its folder's is not used."""
    copy = copy_checkpoints(world, "damaged")
    ten, twenty = copy / "checkpoints" / "10", copy / "checkpoints" / "20"
    kind = world.random.choice(["rename", "copy", "swap"])
    if kind == "rename":
        twenty.rename(twenty.with_name(str(world.random.randint(21, 10**6))))
    else:
        shutil.rmtree(twenty) if kind == "copy" else twenty.rename(copy / "aside")
        shutil.copytree(ten, twenty)
        if kind == "swap":
            shutil.rmtree(ten)
            (copy / "aside").rename(ten)
    if kind == "swap":
        with pytest.raises(UserError) as error:
            restored(world, copy)
        assert error.value.code == CHECKPOINT
    else:
        assert restored(world, copy) == (10, True), kind
    shutil.rmtree(copy)


@contextlib.contextmanager
def no_permission(path: Path, owned: Path):
    """As a user who owns the folder `owned`, but may not read the file `path` in it."""
    path.chmod(0)
    if is_root := os.geteuid() == 0:
        for p in (owned, *owned.rglob("*")):
            os.chown(p, 65534, 65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def seal_file(world: World):
    """One file of the newest checkpoint or of a data set may not be read: code 5, and it stays."""
    is_data = world.random.random() < 0.5
    copy = world.folder / "sealed"
    if is_data:
        shutil.copytree(world.folder / "train", copy)
    else:
        copy_checkpoints(world, copy.name)
    inside = copy if is_data else copy / "checkpoints" / "20"
    file = world.random.choice(sorted(p for p in inside.rglob("*") if p.is_file()))

    def is_whole() -> bool:
        if is_data:
            return read_all(world, copy) == world.tokens
        return restored(world, copy) == (20, True)

    assert is_whole()  # and what it imports is imported, because the other user may not read Python
    try:
        with no_permission(file, copy):
            assert is_whole(), file
    except UserError as e:
        assert e.code == STORAGE, (file, e)
    except PermissionError:  # run_main makes code 5 of it
        pass
    assert file.exists(), file
    shutil.rmtree(copy)


def read_all(world: World, folder: Path) -> tuple[bytes, str]:
    """All tokens of a data set, and its fingerprint; its tokenizer is read as by a start."""
    data = replace(world.base.data, train=str(folder))
    data = dataset.Dataset(on_mesh(replace(world.base, data=data), (1, 1, 1)), "train")
    dataset.check_tokenizers(dict(train=data.source))
    found = data.source.windows(np.arange(data.n_windows)).tobytes()
    data.workers.shutdown()
    return found, data.source.fingerprint


def damage_data(world: World):
    """One file of a data set is damaged: all tokens are read as they were, or it is refused."""
    copy = Path(shutil.copytree(world.folder / "train", world.folder / "damaged_data"))
    if bare := world.random.random() < 0.3:
        (copy / "manifest.json").unlink()
    done = damage(world.random.choice(sorted(copy.iterdir())), world)
    whole, fingerprint = world.tokens
    try:
        found, now = read_all(world, copy)
        # Without a manifest nothing says what the tokens were, but a run does not resume on others.
        assert found == whole or (bare and now != fingerprint), done
    except UserError as e:
        assert e.code == DATA, (done, e)
    shutil.rmtree(copy)


# ---- command lines

NAMES = [f"--{s}.{n}" for s in config.SECTIONS for n in vars(getattr(config.Config(), s))]
NUMBERS = ["0", "-1", "1", "2", "3", "7", "8", "1e-4", "1e999", "nan", "-0.0", "2147483647", "1.5"]
WORDS = ["", "True", "none", "auto", "layer", "x", "gs://b/c", "a\0b", "../..", "/dev/zero", "é\n"]
WORDS += ["moe", "dense*3,moe", "moe*99999", "mla", "adamw", "1f1b", "interleaved", "127.0.0.1:1"]
FLAG = st.tuples(
    st.sampled_from([*NAMES, "--fresh", "--eval_only", "--model.nope", "--"]),
    st.one_of(st.sampled_from(NUMBERS + WORDS), st.integers().map(str), st.text(max_size=8)),
)
PRESET = st.sampled_from([*config.PRESETS, "nope", "", "/dev/null"])


def parse_command_lines(world: World) -> int:
    """A hundred command lines in this process: a config, or exit code 2 or 5, each within two
    seconds."""

    @seed(world.random.getrandbits(32))
    @settings(max_examples=100, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(PRESET, st.lists(FLAG, max_size=5))
    def parse(preset, chosen):
        words = ["--config", preset, *(word for pair in chosen for word in pair)]
        began = time.monotonic()
        try:
            cli.parse(words)
        except UserError as e:
            assert e.code in (USAGE, STORAGE), words
        except SystemExit as e:
            assert e.code in (0, USAGE), words
        assert time.monotonic() - began < 2, words

    parse()
    return 100


def start_command_line(world: World):
    """A command line that the parser takes is started for real, for one update on the data."""
    with world.trial(1, True, train=dict(steps=1)) as trial:
        while True:
            chosen = world.random.sample(NAMES, world.random.randint(1, 3))
            values = [world.random.choice(NUMBERS + WORDS) for _ in chosen]
            words = [f"{n}={x}" for n, x in zip(chosen, values, strict=True) if "\0" not in x]
            words = [*flags(trial.cfg), *words]
            with contextlib.suppress(UserError, SystemExit):
                small = cli.parse(["--config", "tiny", *words])
                if train.model.param_count(small) < 1e6 and small.train.batch_size < 1000:
                    break
        done = run("train.py", "--config", "tiny", *words, cwd=world.folder)
        codes = (0, USAGE, DATA, CHECKPOINT, STORAGE, DIVERGED, DISTRIBUTED)
        assert done.returncode in codes, (words[-6:], done.stderr)
        assert "Traceback" not in done.stderr, (words[-6:], done.stderr)


# ---- growth


def do_not_grow(world: World):
    """2,500 updates: memory, threads and open files are those of the first 500."""
    sections = dict(train=dict(steps=2500, eval_every=50), checkpoint=dict(every=50))
    with world.trial(1, True, **sections) as trial:
        # With an arena for each thread the C library keeps 50 MB that 400 saves have freed, and
        # gives them back when malloc_trim asks for them.
        trial.env |= dict(MALLOC_ARENA_MAX="1")
        (process,) = trial.start()
        seen = {}
        for step in (500, 2490):
            wait_for_step(process, trial.run, step)
            status = Path(f"/proc/{process.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            n_files = len(os.listdir(f"/proc/{process.pid}/fd"))
            seen[step] = int(fields["VmRSS"].split()[0]), int(fields["Threads"]), n_files
        assert trial.finish() == [0], trial.err
    (memory, threads, n_files), after = seen.values()
    assert after[0] < 1.05 * memory and after[1] <= threads + 4 and after[2] <= n_files + 8, seen


# {row: (how often it is chosen with --minutes, cases of --full)}
ROWS = {
    kill: (6, 150),
    kill_at_failpoint: (4, 50),
    terminate_at_failpoint: (2, 30),
    terminate: (4, 100),
    change_mesh: (1, 12),
    stand_still: (1, 6),
    leave_one_out: (0.5, 4),
    start_four_at_once: (1, 6),
    change_clock: (1, 6),
    fail_requests: (2, 10),
    interrupt_storage: (1, 6),
    list_late: (1, 6),
    cut_save: (1, 20),
    forbid_writes: (1, 6),
    stall_bucket: (1, 6),
    lose_power: (1, 20),
    fill_disk: (1, 6),
    limit_files: (1, 10),
    poison: (1, 20),
    damage_checkpoint: (60, 1000),
    move_checkpoint: (4, 60),
    seal_file: (4, 60),
    damage_data: (60, 1000),
    parse_command_lines: (10, 20_000),
    start_command_line: (2, 60),
    do_not_grow: (0.2, 1),
}


class Progress:
    """The cases and the seconds of each chosen row."""

    def __init__(self, chosen: list):
        self.counts, self.seconds = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0.0)

    def left(self, row) -> int:
        """Cases that the row still has to make with --full."""
        return max(0, ROWS[row][1] - self.counts[row])

    def run(self, row, world: World):
        """Call the row, which returns how many cases it made; None is one."""
        self.row, began, output = row, time.monotonic(), io.StringIO()
        try:
            with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
                n = row(world)
        finally:
            self.seconds[row] += time.monotonic() - began
            self.output = output.getvalue()
        self.counts[row] += 1 if n is None else n

    def table(self) -> str:
        return "\n".join(
            f"{n:7,}  {row.__name__.replace('_', ' '):22} {self.seconds[row]:6.0f} s"
            for row, n in self.counts.items()
        )


def make_cases(world: World, progress: Progress, minutes: float, is_full: bool):
    counts, end = progress.counts, time.monotonic() + 60 * minutes
    total = sum(map(progress.left, counts)) if is_full else None
    with tqdm(total=total, unit=" case", mininterval=60, maxinterval=60) as bar:
        while is_full or time.monotonic() < end:
            if is_full:
                chosen, weights = [row for row in counts if progress.left(row)], None
            else:
                chosen = [row for row, n in counts.items() if not n] or [*counts]  # each row once
                weights = [ROWS[row][0] for row in chosen]
            if not chosen:
                break
            progress.run(*world.random.choices(chosen, weights), world)
            bar.update(sum(counts.values()) - bar.n)


def main(minutes: float, is_full: bool, number: int, only: list[str]):
    sys.unraisablehook = processes.hide_late_errors
    progress = Progress([row for row in ROWS if not only or row.__name__ in only])
    print(f"seed {number}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trifold-faults-") as folder:
        Path(folder).chmod(0o755)  # seal_file reads in it as another user
        world = World(Path(folder), number)
        try:
            make_cases(world, progress, minutes, is_full)
        except BaseException:
            print(f"seed {number}, {progress.row.__name__}\n{progress.output[-5000:]}", flush=True)
            raise
        finally:
            print(progress.table(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", nargs="*", default=[], choices=[row.__name__ for row in ROWS])
    ARGS = parser.parse_args()
    main(ARGS.minutes, ARGS.full, ARGS.seed, ARGS.only)
