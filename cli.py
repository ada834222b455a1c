"""The command line, config files, simulated devices on a CPU, and the start of every script.

Nothing slow is imported here, above all not jax, so that a bad command line is answered at once.
"""

import argparse
import ctypes
import gc
import json
import math
import mmap
import os
import re
import resource
import sys
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Literal

import tyro

import errors
from checks import check, check_record
from config import PRESETS, SECTIONS, Config, Mesh, YesNo, settings
from errors import USAGE, Problem, UserError, or_list
from signals import leave_if_unread

# ---- config files

# Facts about a run that its config.json holds in addition to the sections of Config.
RECORD = ("argv", "versions", "git_commit", "data_fingerprint", "run_id", "parent")

REMOTE_SECONDS = 10
"""How long reading a config file, which may be in a bucket, may take."""


def to_json(cfg: Config, **record) -> str:
    """The text of config.json: the sections of cfg, and some of the facts in RECORD."""
    assert set(record) <= set(RECORD), record
    sections = {section: asdict(getattr(cfg, section)) for section in SECTIONS}
    sections["run"] |= dict(accept=(), compile_cache="")  # these apply to one start only
    return json.dumps(sections | record, indent=1) + "\n"


def read_file(path: str) -> str:
    """The text of a config file, local or in a bucket.  Raises as absolute_path and read_limited,
    and TimeoutError."""
    from files import absolute_path, read_limited  # they take 0.3 s to import

    return call_within(REMOTE_SECONDS, lambda: read_limited(absolute_path(path)))


def call_within(seconds: float | None, f):
    """Return f(), or raise TimeoutError after so many seconds, if any are given.  Without a network
    gcsfs retries for minutes."""
    answer = Future()

    def call():
        try:
            answer.set_result(f())
        except BaseException as e:  # raised below, in the thread that waits
            answer.set_exception(e)

    threading.Thread(target=call, daemon=True).start()
    if not wait([answer], seconds and min(seconds, threading.TIMEOUT_MAX)).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()


def dict_without_duplicates(pairs) -> dict:
    """A JSON object as a dict.  Raises ValueError if a key appears twice."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)!r} appears twice")
    return dict(pairs)


def value_flags(name: str, value) -> list[str]:
    """The words of a command line that give a setting a value from a file.  Raises ValueError."""
    default = settings(Config()).get(name)
    if isinstance(default, tuple) and isinstance(value, list):
        kind = type(default[0]) if default else str
        kinds = (int, float) if kind is float else (kind,)
        if not all(type(x) in kinds and not str(x).startswith("-") for x in value):
            what = {int: "whole numbers", str: "words"}.get(kind, "numbers")
            raise ValueError(f"{name}={json.dumps(value)} is not a list of {what}")
        return [f"--{name}", *map(str, value)]
    has_type = isinstance(value, str) == isinstance(default, str) or name == "mesh.dp"
    # tyro refuses unknown fields, and suggests known ones.
    if isinstance(value, (str, int, float, bool)) and (default is None or has_type):
        return [f"--{name}={value}"]
    expected = "a setting" if default is None else f"of type {type(default).__name__}"
    raise ValueError(f"{name}={json.dumps(value)} is not {expected}")


def file_flags(path: str) -> list[str]:
    """A config file as words of a command line, so that both go through the same checks.

    Raises UserError USAGE and STORAGE.
    """
    try:
        record = json.loads(read_file(path), object_pairs_hook=dict_without_duplicates)
        if not isinstance(record, dict):
            raise ValueError(f"it holds a {type(record).__name__}, not an object with sections")
        if unknown := set(record) - set(SECTIONS) - set(RECORD):
            raise ValueError(f"unknown keys {sorted(unknown)}")
        check_record(record)
        flags = []
        for section in SECTIONS:
            for field, value in record.get(section, {}).items():
                name = f"{section}.{field}"
                if name == "run.compile_cache" and value:  # its content is run
                    raise ValueError(f"{name} may only be given on the command line")
                flags += value_flags(name, value)
        return flags
    except FileNotFoundError:
        if path.endswith("/config.json"):  # as of a script's --run
            what = f"there is no run in {path.removesuffix('/config.json')}: it has no config.json"
            raise UserError(USAGE, what, "name the directory of a run") from None
        what = f"--config {path}: no such preset or file"
        fix = f"use {or_list(PRESETS)}, or the config.json of a run"
        raise UserError(USAGE, what, fix) from None
    except PermissionError:
        raise  # quit_on_error turns it into STORAGE, as everywhere
    except (OSError, ValueError, RecursionError) as e:
        what = f"--config {path!r} cannot be read: {str(e)[:200]}"
        fix = "give the config.json of a run, or JSON of the same form"
        if isinstance(e, OSError) and "://" in path:  # the bucket may answer later
            fix = "look at the bucket and at your rights there, and run the command again"
            raise UserError(errors.STORAGE, what, fix) from None
        raise UserError(USAGE, what, fix) from None


# ---- the command line


@dataclass(frozen=True)
class CommandLine:
    """Train a language model, or resume the run that the run directory holds.

    Common flags:
      --config PRESET|FILE    settings to start from; all other flags change them
      --run.name NAME         name of the run
      --run.dir DIR           folder that holds run directories
      --mesh.dp N             data parallelism; -1 takes the devices that are left
      --mesh.pp N             pipeline parallelism
      --mesh.tp N             tensor parallelism
      --data.train PATH       training set
      --data.val PATH         held-out set for evaluation
      --train.steps N         number of updates in the whole run
      --train.batch_size N    sequences in an update
      --train.seq_len N       tokens in a sequence
      --optim.lr X            peak learning rate
      --checkpoint.every N    updates between checkpoints
      --fresh                 start over; an old run is moved aside, never deleted
      --eval_only             evaluate the newest checkpoint and exit
      --run.start_from RUN    start from a checkpoint of another run, RUN@STEP
      --run.start_with WHAT   its weights, or its state
      --rollback STEP         go back to the newest checkpoint up to STEP

    Examples:
      python train.py --config demo
      python train.py --config demo --run.name wide --model.d_ff 768
      python train.py --config runs/demo/config.json --run.name again
      python train.py --config llama_1b --help    (shows its values as defaults)
    """

    # This is the top of --help.  tyro keeps breaks before indented lines and joins all others.

    config: Annotated[
        str,
        tyro.conf.arg(
            metavar="PRESET|FILE",
            help=f"A preset, or the config.json of a run.  Presets: {', '.join(PRESETS)}.",
            help_behavior_hint="(required)",
        ),
    ]
    settings: Annotated[Config, tyro.conf.arg(name="")]  # so --model.x, not --settings.model.x


def parse(words: list[str]) -> Config:
    """The checked Config of a command line.

    Raises UserError; on unknown flags and wrong types, tyro itself exits with 2.
    """
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config", action="append", nargs="?", default=[])
    given, rest = config_parser.parse_known_args(words)
    if len(given.config) > 1:
        what = f"--config is given {len(given.config)} times: {', '.join(map(str, given.config))}"
        raise UserError(USAGE, what, "give one, and change its settings with flags")
    refuse_repeated(rest, settings(Config()))
    name = given.config[0] if given.config else None
    # tyro answers a misspelt --config with the right one.
    if name is None and not any(word.startswith(("-h", "--help", "--conf")) for word in rest):
        fix = f"add --config and one of {or_list(PRESETS)}, or a config.json"
        raise UserError(USAGE, "no --config given", fix)
    flags = [] if name in (None, *PRESETS) else file_flags(name)
    default = CommandLine(name or "", PRESETS.get(name, Config)())
    about = getdoc(CommandLine)  # given, because tyro's own reading leaves out the examples
    options = dict(default=default, description=about, use_underscores=True)
    return check(tyro.cli(CommandLine, args=flags + rest, **options).settings)


def refuse_repeated(words: list[str], fields: dict):
    """Raise UserError USAGE for a list that is given twice: tyro would take the last."""
    names = [word.partition("=")[0] for word in words]
    for field, x in fields.items():
        if isinstance(x, tuple) and (n := names.count(f"--{field}")) > 1:
            what = f"--{field} is given {n} times"
            raise UserError(USAGE, what, "give it once, with all of its values behind it")


def read_args(kind, about: str | None, **options):
    """A script's command line as the dataclass `kind`, or one of several; with return_unknown_args
    also the words of other flags.  about: the docstring of the script, the top of its --help.

    Raises UserError USAGE for a list that is given twice."""
    about = (about or "").partition("Dimension key")[0]
    found = tyro.cli(kind, use_underscores=True, description=about, **options)
    args = found[0] if isinstance(found, tuple) else found
    # evaluate.py has --eval.tasks, which is no field of its Args
    refuse_repeated(options.get("args", sys.argv), settings(Config()) | vars(args))
    return found


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """The flags of every script that computes with a run's weights."""

    run: str
    """A run directory, local or gs://."""
    step: int = -1
    """Number of updates of the checkpoint to use; -1 is the newest."""
    weights: Literal["last", "ema"] = "last"
    """last: the weights after that update.  ema: their moving average, if the run has optim.ema."""
    mesh: YesNo[Mesh] = Mesh()
    dtype: Annotated[Literal["", "bfloat16", "float32"], tyro.conf.arg(name="train.dtype")] = ""
    """Type of the computations; by default the run's."""

    @property
    def flags(self) -> list[str]:
        """Flags of train.py that these set."""
        return ["--train.dtype", self.dtype] if self.dtype else []


def too_low(args, **least: float) -> list[Problem]:
    """The flags of a script that are below their least values."""
    pairs = ((name, getattr(args, name)) for name in least)
    return [
        Problem(f"{name}={x} must be at least {least[name]}", f"set --{name} {least[name]} or more")
        for name, x in pairs
        if x is not None and not x >= least[name]  # also if it is NaN
    ]


def check_at_least(args, **least: float):
    """Raise UserError USAGE for the flags of a script that are below their least values."""
    errors.raise_problems(USAGE, too_low(args, **least))


def config_of_run(run: str, mesh: Mesh, *flags: str) -> Config:
    """The config of a run directory on the given mesh, for scripts that do not train.

    Also calls simulate_devices.  Raises UserError USAGE and STORAGE.
    """
    # A batch that passes the checks on this mesh; checks.resolve replaces it.
    rows = max(1, mesh.sizes[0]) * max(1, mesh.pp)
    train = dict(batch_size=rows, batch_ramp="", grad_accum=1, microbatches=0)
    # The trainer's choices may not suit this mesh or platform.
    train |= dict(remat="layer", attention="auto")
    one_process = dict(coordinator="", num_processes=0, process_id=-1)
    sections = dict(mesh=asdict(mesh), train=train, run=one_process)
    changes = [f"--{s}.{name}={x}" for s, values in sections.items() for name, x in values.items()]
    cfg = parse(["--config", f"{run.rstrip('/')}/config.json", *changes, *flags])
    simulate_devices(mesh)
    return cfg


# ---- simulated devices, and the start


def tune_heap():
    """Without an accelerator, have the C library, if it is glibc, keep freed memory for the next
    allocation, and use pages of 2 MiB instead of 4 KiB.

    On a CPU XLA allocates a program's temporary memory in every call.  When that is freed, glibc
    returns large pieces to the system, which then clears each page again.  With all of it kept, an
    update of `make demo` on (1,1,1) takes 0.87 times the CPU seconds and the benchmark's in
    docs/performance.md 0.97; the process is a tenth larger.  Call it before threads start: those
    that have a heap of their own go on with it, and pieces above 64 MiB do not fit into such a one.
    With four heaps the demo took 0.95 times as long on (1,1,1), and 1.08 times on (1,2,1), which
    has such pieces.

    With large pages an update of the demo takes 0.92 times the CPU seconds on (1,1,1) and 0.96
    times on (2,2,2), the benchmark's 0.94 in float32 and 0.91 in bfloat16.
    """
    accelerators = find_spec("libtpu") or find_spec("jax_plugins")
    if accelerators and os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads
    libc.mallopt(-4, 0)  # M_MMAP_MAX: large pieces come from the heap too
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the free end of the heap is kept, whatever its size
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return  # what follows takes addresses, and threads would find none for their stacks
    # Linux gives large pages to memory that is marked before it is first written.  So the heap
    # grows by a quarter of the machine's memory, which takes addresses only, and that is marked.
    # Where a process needs more, the rest has small pages.
    size = ctypes.c_size_t(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 4)
    libc.memalign.restype = ctypes.c_size_t
    if address := libc.memalign(ctypes.c_size_t(mmap.PAGESIZE), size):
        libc.madvise(ctypes.c_void_p(address), size, mmap.MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(address))


def read_number(name: str) -> int:
    """The number in an environment variable, 0 if it is not set.  Raises UserError USAGE."""
    text = os.environ.get(name, "")
    if text and (not text.isdecimal() or not int(text)):
        what = f"the environment variable {name}={text!r} is not a number above 0"
        raise UserError(USAGE, what, "correct it, or unset it")
    return int(text or 0)


def simulate_devices(mesh: Mesh, n_processes: int = 1):
    """Give the CPU as many devices as the mesh needs, and enough threads to run them.

    Call it before jax looks for devices.  Where there is an accelerator, jax uses that and these
    settings do nothing.  XLA runs the simulated devices on one thread pool with a thread per core.
    With fewer threads than twice the devices, programs with collectives deadlock; NPROC sets the
    number of threads.  The timeout turns any hang that is left into an error.
    """
    drop_unknown_xla_flags()
    xla_flags = os.environ.get("XLA_FLAGS", "")
    wanted = math.prod(size for size in mesh.sizes if size > 0) // max(1, n_processes)
    if wanted > 1 and "xla_force_host_platform_device_count" not in xla_flags:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(wanted))
        if "jax" in sys.modules:  # as in a notebook; it reads the variable only when it is imported
            with suppress(RuntimeError):  # it has its devices already, see utils.make_mesh
                n = read_number("JAX_NUM_CPU_DEVICES")
                sys.modules["jax"].config.update("jax_num_cpu_devices", n)
    forced = re.findall(r"xla_force_host_platform_device_count=(\d+)", xla_flags)
    n_devices = max(read_number("JAX_NUM_CPU_DEVICES") or 1, *map(int, forced or [1]))
    if n_devices == 1:
        return
    # At least 64 whatever os.cpu_count says: a container may have fewer cores than that.
    given, cores = read_number("NPROC"), os.cpu_count() or 1
    os.environ["NPROC"] = str(max(64, 2 * n_devices, given, cores))
    if "collective_call_terminate" not in xla_flags:
        timeout = "--xla_cpu_collective_call_terminate_timeout_seconds=120"
        os.environ["XLA_FLAGS"] = f"{xla_flags} {timeout}".strip()


def drop_unknown_xla_flags():
    """Take flags that the installed XLA does not know out of XLA_FLAGS, with a warning: XLA would
    end the process at the first of them.

    The name of every flag is a string in jaxlib's library.  To find one takes 0.01 s, and 0.1 s to
    see that it is not there.  A name that is the end of another one is taken for known.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    found = find_spec("jaxlib")
    library = found and next(Path(found.origin).parent.glob("libjax_common.*"), None)
    if not flags or not flags[0].startswith("--") or not library:  # without "--" it names a file
        return
    with open(library, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
        unknown = [
            flag
            for flag in flags
            if (name := re.match(r"--([\w-]+)", flag)) and content.find(f"{name[1]}\0".encode()) < 0
        ]
    for flag in unknown:
        where = "; LIBTPU_INIT_ARGS takes flags of TPUs" if "_tpu_" in flag else ""
        errors.write_error(f"warning: XLA knows no flag {flag}: left out of XLA_FLAGS{where}\n")
    if unknown:
        os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if flag not in unknown)


def prepare_streams():
    """Open standard streams that are closed, as by 2>&-.  Otherwise the next file that is opened
    would get the number of one, and its messages.  What stdout cannot encode, it escapes."""
    for mode, name in ("r", "stdin"), ("w", "stdout"), ("w", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115, until the process ends
            os.set_inheritable(stream.fileno(), True)  # for child processes
            setattr(sys, name, stream)
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stream has no such method
        sys.stdout.reconfigure(errors="backslashreplace")


def quit_on_interrupt(kind, error, trace):
    """For sys.excepthook: Ctrl-C ends the process with its code, other errors with a traceback."""
    if kind is KeyboardInterrupt and not errors.is_interactive():
        errors.write_error("interrupted: run the same command again to go on\n")
        sys.exit(errors.INTERRUPTED)
    sys.__excepthook__(kind, error, trace)


def quit_on_error(f, *args):
    """f(*args).  A UserError or an error of storage is printed, and ends the process with its code.
    Ctrl-C does the same, during this call and later, when a script imports jax for seconds."""
    prepare_streams()
    sys.excepthook = quit_on_interrupt
    try:
        try:
            return f(*args)
        finally:
            sys.stdout.flush()  # here, because when Python ends it would print the error itself
    except UserError as e:
        error = e
    except Exception as e:  # what gcsfs raises is no OSError
        leave_if_unread(e)
        if not errors.is_storage_error(e):
            raise
        error = errors.storage_error(e)
    errors.write_error(f"{error}\n")
    sys.exit(error.code)


def start() -> Config:
    """The Config of train.py's command line, with simulated devices ready; exits on a mistake."""
    cfg = quit_on_error(parse, sys.argv[1:])
    # JAX's programs are a million long-lived objects.  With Python's defaults, scanning them took a
    # twentieth of the start.
    gc.set_threshold(100_000, 50)
    tune_heap()
    quit_on_error(simulate_devices, cfg.mesh, cfg.run.num_processes)
    return cfg
