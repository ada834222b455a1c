"""The command line, config files, and the fake devices of a CPU.

This module imports neither jax nor anything heavy, so that a bad command line is answered at once.
"""

import argparse
import json
import math
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

import tyro

from checks import check
from config import (
    INTERRUPTED,
    PRESETS,
    SECTIONS,
    STORAGE,
    USAGE,
    Config,
    Mesh,
    UserError,
    field_value,
    or_list,
)

# What config.json holds beside the config.
RECORD = ("argv", "versions", "git_commit", "data_fingerprint", "run_id")


def to_json(cfg: Config, **record) -> str:
    """config.json: the sections, and what is worth knowing about how the run was started."""
    assert set(record) <= set(RECORD), record
    return json.dumps({**{s: asdict(getattr(cfg, s)) for s in SECTIONS}, **record}, indent=1) + "\n"


def no_duplicates(pairs):
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)!r} appears twice")
    return dict(pairs)


def read_file(path: str) -> str:
    """The text of a config file, which may be remote."""
    if "://" in path:
        from etils import epath  # 0.3 s, and only needed here

        return epath.Path(path).read_text()
    return Path(path).read_text(encoding="utf-8")


def file_flags(path: str) -> list[str]:
    """A config file as flags, so that a file and a command line meet the same checks."""
    try:
        text = read_file(path)
        if len(text) > 1_000_000:
            raise ValueError(f"{len(text)} characters, more than a config has")
        record = json.loads(text, object_pairs_hook=no_duplicates)
        keys = set(record) if isinstance(record, dict) else {type(record).__name__}
        if unknown := keys - set(SECTIONS) - set(RECORD):
            raise ValueError(f"unknown keys {sorted(unknown)}")
        flags = []
        for section in SECTIONS:
            for name, v in record.get(section, {}).items():
                if isinstance(v, list) and isinstance(
                    field_value(Config(), f"{section}.{name}"), tuple
                ):
                    flags += [f"--{section}.{name}", *(f"{int(str(x))}" for x in v)]
                elif isinstance(v, (str, int, float, bool)):
                    flags.append(f"--{section}.{name}={v}")
                else:
                    raise ValueError(f"{section}.{name} is {v!r}")
        return flags
    except FileNotFoundError:
        what = f"--config {path}: no such preset or file"
        fix = f"use {or_list(PRESETS)}, or the config.json of a run"
        raise UserError(USAGE, what, fix) from None
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        what = f"--config {path!r} cannot be read: {str(e)[:200]}"
        fix = "give the config.json of a run, or JSON of the same shape"
        raise UserError(USAGE, what, fix) from None


def parse(argv: list[str]) -> Config:
    """The checked Config of a command line.

    Raises UserError; tyro itself exits 2 on unknown flags.
    """
    pre = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    pre.add_argument("--config")
    given, rest = pre.parse_known_args(argv)
    asks_help = "-h" in rest or "--help" in rest
    if given.config is None and not asks_help:
        fix = f"add --config and one of {or_list(PRESETS)}, or a config.json"
        raise UserError(USAGE, "no --config given", fix)
    base = PRESETS.get(given.config, Config)()
    flags = [] if given.config is None or given.config in PRESETS else file_flags(given.config)
    about = (
        f"--config NAME_OR_FILE: a preset ({', '.join(PRESETS)}) or a run's config.json; "
        "flags override it."
    )
    options = dict(default=base, description=about, use_underscores=True)
    return check(tyro.cli(Config, args=flags + rest, **options))


def simulate_devices(mesh: Mesh, n_processes: int = 1):
    """Give the CPU as many devices as the mesh needs, and the threads to run them.

    Call before jax starts.  An accelerator, where there is one, is used instead and none of this
    touches it.  XLA runs fake devices on one pool with a thread per core, and programs with
    collectives wait for each other in it for good when there are fewer threads than twice the
    devices; NPROC sets the pool's size.  The timeout turns what would still hang into an error.
    """
    xla_flags = os.environ.get("XLA_FLAGS", "")
    wanted = math.prod(size for size in mesh.sizes if size > 0) // max(1, n_processes)
    if wanted > 1 and "xla_force_host_platform_device_count" not in xla_flags:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(wanted))
    forced = re.findall(r"xla_force_host_platform_device_count=(\d+)", xla_flags)
    n = max(int(os.environ.get("JAX_NUM_CPU_DEVICES") or 1), *map(int, forced or [1]))
    if n > 1:  # whatever os.cpu_count says: a container may have fewer
        asked, cores = int(os.environ.get("NPROC") or 0), os.cpu_count() or 1
        os.environ["NPROC"] = str(max(64, 2 * n, asked, cores))
    if n > 1 and "collective_call_terminate" not in xla_flags:
        timeout = "--xla_cpu_collective_call_terminate_timeout_seconds=120"
        os.environ["XLA_FLAGS"] = f"{xla_flags} {timeout}".strip()


def config_of_run(run: str, mesh: Mesh, *flags: str) -> Config:
    """The config of a run directory on another mesh, for scripts that do not train.

    The devices are prepared too.
    """
    sizes = [word for axis, size in asdict(mesh).items() for word in (f"--mesh.{axis}", str(size))]
    # A batch that fits; resolve() makes it the script's own.
    rows = str(max(1, mesh.dp) * max(1, mesh.pp))
    batch = ["--train.batch_size", rows, "--train.grad_accum", "1", "--train.microbatches", "0"]
    batch += ["--train.remat", "layer", "--train.attention", "auto"]  # of the trainer's platform
    alone = ["--run.coordinator=", "--run.num_processes", "0", "--run.process_id=-1"]
    cfg = parse(["--config", f"{run.rstrip('/')}/config.json", *sizes, *batch, *alone, *flags])
    simulate_devices(mesh)
    return cfg


def quit_on_error(f, *args):
    """f(*args); what its user can mend becomes two lines on stderr and an exit code."""
    try:
        return f(*args)
    except UserError as e:
        print(e, file=sys.stderr)
        sys.exit(e.code)
    except OSError as e:
        fix = "make room, or mend the path or its permissions, and run the same command again"
        print(
            UserError(STORAGE, f"{e.filename or 'storage'}: {e.strerror or e}", fix),
            file=sys.stderr,
        )
        sys.exit(STORAGE)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        sys.exit(INTERRUPTED)


def start() -> Config:
    """What train.py does before it imports jax: read the command line and prepare the devices."""
    cfg = quit_on_error(parse, sys.argv[1:])
    simulate_devices(cfg.mesh, cfg.run.num_processes)
    return cfg
