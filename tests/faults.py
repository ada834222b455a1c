"""Random faults for as long as you like: kills, signals, damage, meshes and command lines.

    python tests/faults.py --minutes 30 --seed 7

Each row of ROWS makes one random case at a time and raises where a promise is broken: work that is
lost beyond the last checkpoint, a damage that is not noticed, a traceback, another exit code than
those of docs/running.md.  The seed and the case are printed then, and the exit code is 1.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from conftest import MESHES, ROOT, on_mesh, prepare
from etils import epath
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from runs import final_weights, flags, losses, new_run, rows, wait_for_step

import checkpoint
import cli
import config
import dataset
import train
from config import CHECKPOINT, DATA, INTERRUPTED, STORAGE, USAGE, UserError

SINGLE = dict(dp=1, pp=1, tp=1)


class World:
    """What all cases share: random numbers, data, and a run without faults to compare with."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.random, self.n = folder, random.Random(number), 0
        self.np_random = np.random.default_rng(number)
        text = Path(json.__file__).parent
        request = ["--input", text, "--suffix", ".py", "--tokenizer", "byte", "--out", folder]
        prepare(*request, "--shard_tokens", 10_000, "--val_fraction", 0.2)
        tiny = config.tiny()
        self.base = replace(
            tiny,
            run=replace(tiny.run, dir=str(folder / "runs"), name="whole"),
            mesh=config.Mesh(**SINGLE),
            model=replace(tiny.model, n_layers=2),
            data=config.Data(train=str(folder / "train"), val=str(folder / "val")),
            train=replace(tiny.train, batch_size=8, steps=60, eval_every=20, eval_batches=2),
            checkpoint=config.Checkpoint(every=5),
        )
        self.whole = folder / "runs" / "whole"
        code, err = finish(launch(self.base))
        assert code == 0, err
        self.weights = final_weights(self.whole)

    def new_run(self, **sections):
        self.n += 1
        return new_run(self.base, f"run{self.n}", **sections)

    def assert_whole(self, run: Path):
        """The run has every row and every bit of the one without faults."""
        assert losses(run) == losses(self.whole)
        assert rows(run, "eval") == rows(self.whole, "eval")
        for name, x in final_weights(run).items():
            np.testing.assert_array_equal(x, self.weights[name])
        shutil.rmtree(run)


def launch(cfg, *more, failpoint: str = "") -> subprocess.Popen:
    command = [sys.executable, ROOT / "train.py", "--config", "tiny", *flags(cfg, *more)]
    if failpoint:
        command[1:2] = [ROOT / "tests" / "failpoint.py", ROOT / "train.py"]
    return subprocess.Popen(
        [*map(str, command)],
        env=os.environ | ({"FAILPOINT": failpoint} if failpoint else {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, err = process.communicate(timeout=300)
    assert "Traceback" not in err, err
    return process.returncode, err


# ---- kills and signals


def tear_last_row(run: Path, world: World):
    """Cut the last row of metrics.jsonl, as a kill may, if no checkpoint is as new as the row."""
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    saved = [int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit()]
    if lines and lines[-1].endswith(b"\n") and json.loads(lines[-1])["step"] > max([0, *saved]):
        lines[-1] = lines[-1][: world.random.randrange(len(lines[-1]))]
        file.write_bytes(b"".join(lines))


def kill(world: World) -> int:
    """SIGKILL at random times, sometimes with a torn last row, until the run is at its end."""
    cfg, run = world.new_run()
    n = world.random.randint(2, 5)
    for _ in range(n):
        process = launch(cfg)
        time.sleep(world.random.uniform(0.5, 7))
        process.kill()
        code, err = finish(process)
        assert code in (-signal.SIGKILL, 0), (code, err)
        if world.random.random() < 0.5:
            tear_last_row(run, world)
    code, err = finish(launch(cfg))
    assert code == 0, err
    world.assert_whole(run)
    return n


def kill_at_failpoint(world: World) -> int:
    """SIGKILL before or after a call to the file system, then the run to its end."""
    cfg, run = world.new_run()
    name, when = world.random.choice(["rename", "replace", "unlink", "rmdir", "mkdir"]), "before"
    if world.random.random() < 0.5:
        when = "after"
    failpoint = f"{name}:{world.random.randint(1, 40)}:{when}"
    code, err = finish(launch(cfg, failpoint=failpoint))
    assert code in (-signal.SIGKILL, 0), (failpoint, code, err)
    code, err = finish(launch(cfg))
    assert code == 0, (failpoint, err)
    world.assert_whole(run)
    return 1


def terminate(world: World) -> int:
    """SIGTERM or Ctrl-C at random times: exit code 75, and no update is lost."""
    cfg, run = world.new_run(checkpoint=dict(every=1000))
    n = 0
    while True:
        n += 1
        process = launch(cfg)
        time.sleep(world.random.uniform(0.2, 7))
        process.send_signal(world.random.choice([signal.SIGTERM, signal.SIGINT]))
        code, err = finish(process)
        assert code in (INTERRUPTED, 0), (code, err)
        if code == 0:
            break
        if (run / "metrics.jsonl").exists() and "nothing is lost" not in err:
            assert max(int(p.name) for p in (run / "checkpoints").iterdir()) == len(rows(run))
        if n == 5:
            assert finish(launch(cfg))[0] == 0
            break
    world.assert_whole(run)
    return n


def change_mesh(world: World) -> int:
    """A run is stopped on one mesh and goes on on another."""
    meshes = [mesh for mesh in MESHES if np.prod(mesh) > 1]
    before, after = world.random.sample(meshes, 2)
    cfg, run = world.new_run(mesh=dict(zip(("dp", "pp", "tp"), before, strict=True)))
    cfg = replace(cfg, model=replace(cfg.model, n_layers=8), train=replace(cfg.train, steps=20))
    process = launch(cfg)
    wait_for_step(process, run, world.random.randint(2, 15))
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] in (INTERRUPTED, 0), (before, after)
    cfg = replace(cfg, mesh=config.Mesh(*after))
    assert finish(launch(cfg))[0] == 0, (before, after)
    if not hasattr(world, "eight_layers"):
        one, path = world.new_run(mesh=SINGLE)
        one = replace(one, model=cfg.model, train=cfg.train)
        assert finish(launch(one))[0] == 0
        world.eight_layers = [row["loss"] for row in rows(path).values()]
    got = [row["loss"] for row in rows(run).values()]
    # Rounding errors grow with the updates: test_train.py has the reason.
    np.testing.assert_allclose(got[:10], world.eight_layers[:10], rtol=1e-5)
    np.testing.assert_allclose(got, world.eight_layers, rtol=1e-3)
    shutil.rmtree(run)
    return 1


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


def damage_checkpoint(world: World) -> int:
    """One file of the newest checkpoint is damaged: the state is whole, or that before is used."""
    if not hasattr(world, "saved"):
        world.cfg = on_mesh(world.base, (1, 1, 1))
        store = checkpoint.Checkpoints(epath.Path(world.folder / "saved"))
        state = train.init_state(world.cfg)
        world.saved = {10: state, 20: jax.tree.map(lambda x: x + 1, state)}
        for step, state in world.saved.items():
            assert store.save(step, train.checkpoint_items(state), last=True)
        store.close()
    copy = Path(shutil.copytree(world.folder / "saved", world.folder / "damaged"))
    files = sorted(p for p in (copy / "checkpoints" / "20").rglob("*") if p.is_file())
    done = damage(world.random.choice(files), world)
    store = checkpoint.Checkpoints(epath.Path(copy))
    on_mesh(world.base, (1, 1, 1))
    found = store.restore(train.checkpoint_items(train.abstract_state(world.cfg)))
    want = train.checkpoint_items(world.saved[store.newest])
    for got, x in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.array_equal(got, x), done
    store.manager.close()
    shutil.rmtree(copy)
    return 1


def damage_data(world: World) -> int:
    """One file of a data set is damaged: all tokens are read as they were, or it is refused."""
    copy = Path(shutil.copytree(world.folder / "train", world.folder / "damaged_data"))
    if bare := world.random.random() < 0.3:
        (copy / "manifest.json").unlink()
    done = damage(world.random.choice(sorted(copy.iterdir())), world)
    cfg = on_mesh(replace(world.base, data=replace(world.base.data, train=str(copy))), (1, 1, 1))
    if not hasattr(world, "tokens"):
        data = dataset.Dataset(on_mesh(world.base, (1, 1, 1)), "train")
        world.tokens = data.source.windows(np.arange(data.n_windows))
        world.fingerprints = {data.source.fingerprint}
    try:
        data = dataset.Dataset(cfg, "train")
        found = data.source.windows(np.arange(data.n_windows))
        same = np.array_equal(found, world.tokens)
        # Without a manifest nothing says what the tokens were, but a run does not resume on others.
        assert same or (bare and data.source.fingerprint not in world.fingerprints), done
    except UserError as e:
        assert e.code == DATA, (done, e)
    shutil.rmtree(copy)
    return 1


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
    """A hundred command lines in this process: a config, or exit code 2 or 5, each in a second."""

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


def start_command_line(world: World) -> int:
    """A command line that the parser takes is started for real, for one update on the data."""
    while True:
        chosen = world.random.sample(NAMES, world.random.randint(1, 3))
        values = [world.random.choice(NUMBERS + WORDS) for _ in chosen]
        words = [f"{n}={x}" for n, x in zip(chosen, values, strict=True) if "\0" not in x]
        cfg, run = world.new_run(train=dict(steps=1))
        words = [*flags(cfg), *words]
        try:
            small = cli.parse(["--config", "tiny", *words])
        except (UserError, SystemExit):
            continue
        if train.model.param_count(small) < 1e6 and small.train.batch_size < 1000:
            break
    command = [sys.executable, str(ROOT / "train.py"), "--config", "tiny", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=world.folder)
    assert done.returncode in (0, USAGE, DATA, CHECKPOINT, STORAGE, 6, 7), (words[-6:], done.stderr)
    assert "Traceback" not in done.stderr, (words[-6:], done.stderr)
    shutil.rmtree(run, ignore_errors=True)
    return 1


# ---- growth


def do_not_grow(world: World) -> int:
    """2,500 updates: memory, threads and open files are those of the first 500."""
    cfg, run = world.new_run(train=dict(steps=2500, eval_every=50), checkpoint=dict(every=50))
    process = launch(cfg)
    seen = {}
    for step in (500, 2490):
        wait_for_step(process, run, step)
        status = Path(f"/proc/{process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        n_files = len(os.listdir(f"/proc/{process.pid}/fd"))
        seen[step] = int(fields["VmRSS"].split()[0]), int(fields["Threads"]), n_files
    assert finish(process)[0] == 0
    (memory, threads, n_files), after = seen.values()
    assert after[0] < 1.05 * memory and after[1] <= threads + 4 and after[2] <= n_files + 8, seen
    shutil.rmtree(run)
    return 1


# {row: how often it is chosen}
ROWS = {
    kill: 6,
    kill_at_failpoint: 4,
    terminate: 4,
    change_mesh: 1,
    damage_checkpoint: 60,
    damage_data: 60,
    parse_command_lines: 10,
    start_command_line: 2,
    do_not_grow: 0.2,
}


def main(minutes: float, number: int, only: list[str]):
    chosen = {row: n for row, n in ROWS.items() if not only or row.__name__ in only}
    counts, seconds = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0.0)
    print(f"seed {number}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trifold-faults-") as folder:
        world, deadline = World(Path(folder), number), time.monotonic() + 60 * minutes
        shown = time.monotonic()
        while time.monotonic() < deadline:
            (row,) = world.random.choices([*chosen], [*chosen.values()])
            began = time.monotonic()
            output = io.StringIO()
            try:
                with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
                    counts[row] += row(world)
            except BaseException:
                print(f"seed {number}, {row.__name__}, after {counts[row]} cases", file=sys.stderr)
                raise
            seconds[row] += time.monotonic() - began
            if time.monotonic() > shown + 60:
                shown = time.monotonic()
                left = (deadline - shown) / 60
                print(f"{sum(counts.values())} cases, {left:.0f} min to go", flush=True)
    for row in chosen:
        print(f"{counts[row]:7,}  {row.__name__.replace('_', ' '):22} {seconds[row]:6.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", nargs="*", default=[], choices=[row.__name__ for row in ROWS])
    ARGS = parser.parse_args()
    main(ARGS.minutes, ARGS.seed, ARGS.only)
