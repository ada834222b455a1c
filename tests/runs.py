"""Training runs for tests: in this process, or in processes of their own."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from conftest import ROOT
from etils import epath

import cli
import config
import metrics
import runstate
import train
import utils
from config import Config
from errors import UserError


def rows(run: Path, kind="train") -> dict:
    """{step: row} of metrics.jsonl, which must have one row a step and miss none."""
    table = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    table = [row for row in table if row["kind"] == kind]
    steps = [row["step"] for row in table]
    assert steps == sorted(set(steps))
    assert kind != "train" or steps == list(range(1, len(steps) + 1))
    return {row["step"]: row for row in table}


def losses(run: Path) -> list[str]:
    """The loss and gradient norm of every update, in hexadecimal, so that every bit counts."""
    return [f"{row['loss'].hex()} {row['grad_norm'].hex()}" for row in rows(run).values()]


def loss_curve(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run).values()]


def final_weights(run: Path, step: int = -1) -> dict:
    """The weights of a run, of its newest checkpoint or of that of `step`, by name."""
    cfg = utils.start_mesh(cli.config_of_run(str(run), config.Mesh(1, 1, 1)), rows=1)
    params = runstate.load_params(str(run), cfg, step)
    return utils.leaf_table(jax.device_get(params))


def flags(cfg: Config, *more) -> list[str]:
    """cfg as command line flags, and more; a list in `more` replaces that of cfg."""
    words = ["--fresh"] if cfg.fresh else []
    for section, fields in json.loads(cli.to_json(cfg)).items():
        for name, value in fields.items():
            flag = f"--{section}.{name}"
            if not isinstance(value, list):
                words.append(f"{flag}={value}")
            elif flag not in more:
                words += [flag, *map(str, value)]
    return [*words, *map(str, more)]


def start(cfg: Config, *more, **kwargs) -> subprocess.Popen:
    """train.py in a process, with cfg and more flags."""
    command = [sys.executable, str(ROOT / "train.py"), "--config", "tiny", *flags(cfg, *more)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **(pipes | kwargs))


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a process."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def wait_until(condition, process: subprocess.Popen, seconds: float = 60):
    """Return once the condition holds.  It is an error if the process ends before, or if that takes
    longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_step(process: subprocess.Popen, run: Path, step: int):
    """Return once metrics.jsonl has the row of update `step`."""
    path, row = run / "metrics.jsonl", f'"step": {step}, "loss"'
    wait_until(lambda: path.exists() and row in path.read_text(), process, 120)


def new_run(base: Config, name: str, **sections) -> tuple[Config, Path]:
    """base under another name and with fields replaced, and its run directory."""
    cfg = replace(base, run=replace(base.run, name=name))
    cfg = replace(cfg, **{s: replace(getattr(cfg, s), **fields) for s, fields in sections.items()})
    run = Path(cfg.run.dir) / name
    assert not run.exists(), f"another test has a run {name}"
    return cfg, run


def copy_run(reference: Path, base: Config, name: str, **sections) -> tuple[Config, Path]:
    """new_run, in whose directory the reference run is already finished."""
    cfg, run = new_run(base, name, **sections)
    shutil.copytree(reference, run)
    return cfg, run


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_two(first: Config, second: Config | None = None, cwd=(None, None), n_processes=2):
    """train.py in two processes, each with half of the mesh."""
    port = free_port()
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    both = []
    for n, cfg in enumerate((first, second or first)):
        shared = dict(coordinator=f"127.0.0.1:{port}", num_processes=n_processes, process_id=n)
        both.append(start(replace(cfg, run=replace(cfg.run, **shared)), env=env, cwd=cwd[n]))
    return both


def two_processes(script: str, *words, own=((), ()), cwd=(None, None)) -> list[tuple]:
    """(exit code, stdout, stderr) of a script in two processes, each with half of the mesh."""
    env = os.environ | dict(JAX_NUM_CPU_DEVICES="1", SLURM_STEP_NODELIST="127.0.0.1")
    env |= dict(SLURM_JOB_ID=str(free_port()), SLURM_NTASKS="2", SLURM_LOCALID="0")
    pipes, both = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), []
    for n in range(2):
        command = [sys.executable, ROOT / "scripts" / script, *words, "--mesh.dp", 2, *own[n]]
        own_env = env | dict(SLURM_PROCID=str(n))
        both.append(subprocess.Popen([*map(str, command)], env=own_env, cwd=cwd[n], **pipes))
    return [*map(finish, both)]


def open_log(run: Path, cfg: Config, step: int) -> metrics.MetricsLog:
    """The log of a run whose updates all have train.batch_size sequences."""
    n = cfg.train.batch_size * cfg.train.seq_len
    return metrics.MetricsLog(epath.Path(run), cfg, step, lambda step: {"": step * n}, {})


def contents(run: Path) -> dict:
    """{path: bytes} of every file except the lock."""
    return {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "lock"}


def refusal(cfg: Config) -> UserError:
    """The error that train.main(cfg) ends with."""
    with pytest.raises(UserError) as error:
        train.main(cfg)
    return error.value
