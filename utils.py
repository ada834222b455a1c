"""What is not maths: processes, mesh, run directory, metrics, checkpoints, FLOPs and peaks."""

import fcntl
import io
import json
import logging
import math
import netrc
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import zlib
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import compress
from types import CoroutineType, MappingProxyType

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import lax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import config
from config import Config, UserError

for noisy in ("absl", "asyncio", "gcsfs"):  # they log what they also raise, with tracebacks
    logging.getLogger(noisy).setLevel(logging.CRITICAL)

AXES = ("dp", "pp", "tp")

# ---- processes and devices


def is_lead() -> bool:
    return jax.process_index() == 0


def say(*words):
    """Print once, from process 0, at once."""
    if is_lead():
        print(*words, flush=True)


def warn(text: str):
    if is_lead():
        print(f"warning: {text}", file=sys.stderr, flush=True)


def on_lead(f, *args):
    """f(*args) on process 0, whose UserError stops every process; the others get None."""
    result, error = None, None
    if is_lead():
        try:
            result = f(*args)
        except UserError as e:
            error = e
    if jax.process_count() > 1:
        code = int(multihost_utils.broadcast_one_to_all(np.int32(error.code if error else 0)))
        if code and error is None:
            error = UserError(code, "process 0 could not go on", "see what it printed")
    if error:
        raise error
    return result


def all_agree(ok: bool) -> bool:
    """True where every process says ok."""
    if jax.process_count() == 1:
        return ok
    return bool(multihost_utils.process_allgather(np.int32(ok)).all())


def arrived(tree):
    """tree of arrays, once every device of this process has them; raises when one has failed.

    A lost peer fails the devices that talk to it; the others here wait for those, and whoever waits
    for one of the others waits until JAX gives up on the peer and aborts (100 s).
    """
    if jax.process_count() > 1:
        waiting = [shard.data for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
        while waiting:
            ready = [x.is_ready() for x in waiting]  # asked once, or a failure between is missed
            for x in compress(waiting, ready):
                x.block_until_ready()  # raises
            waiting = [x for x, done in zip(waiting, ready, strict=True) if not done]
            time.sleep(0.001 if waiting else 0)
    return tree


def start_processes(cfg: Config):
    """Join the other processes: as the run.* flags or a detected cluster say, or not at all."""
    r = cfg.run
    if r.coordinator:
        if r.process_id > 0:
            wait_for_port(r.coordinator)
        try:
            jax.distributed.initialize(r.coordinator, r.num_processes, r.process_id)
        except RuntimeError as e:
            what = f"run.coordinator={r.coordinator}: {str(e).splitlines()[0][:200]}"
            fix = "choose a free port on process 0's host, and the same everywhere"
            raise UserError(config.DISTRIBUTED, what, fix) from None
        return
    try:
        jax.distributed.initialize()
    except ValueError as e:
        if "coordinator_address should be defined" not in str(e):  # there is a cluster, but
            raise


def wait_for_port(address: str, seconds: float = 60):
    """Return once HOST:PORT listens.  jax.distributed would abort the process, not raise."""
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as e:
            if time.monotonic() > deadline:
                what = f"no process 0 at run.coordinator={address} after {seconds:.0f} s: {e}"
                fix = "start process 0, and check the address and the firewall"
                raise UserError(config.DISTRIBUTED, what, fix) from None
            time.sleep(0.5)


def start_mesh(cfg: Config, rows: int | None = None) -> Config:
    """Make cfg's mesh the ambient one and return cfg resolved for it; rows as in config.resolve."""
    try:
        cfg = config.resolve(cfg, jax.device_count(), rows)
    except RuntimeError as e:
        what = f"JAX has no device: {str(e).splitlines()[0][:200]}"
        fix = "install JAX for the accelerator, or set JAX_PLATFORMS=cpu to simulate the mesh"
        raise UserError(config.USAGE, what, fix) from None
    jax.set_mesh(make_mesh(cfg))
    if cfg.train.dtype == "float32":  # or TPUs and GPUs would multiply in fewer bits
        jax.config.update("jax_default_matmul_precision", "float32")
    if is_lead():  # on stderr: stdout is for results
        axes = " ".join(f"{axis}={n}" for axis, n in zip(AXES, cfg.mesh.sizes, strict=True))
        devices = f"{math.prod(cfg.mesh.sizes)} x {jax.devices()[0].device_kind}"
        processes = f"{jax.process_count()} process(es)"
        print(f"mesh: {axes} on {devices}, {processes}", file=sys.stderr, flush=True)
    return cfg


def make_mesh(cfg: Config) -> jax.sharding.Mesh:
    """The (dp, pp, tp) mesh over all visible devices, or some where they are fake ones on a CPU."""
    n, devices = math.prod(cfg.mesh.sizes), jax.devices()
    product = "mesh.dp*mesh.pp*mesh.tp = {}*{}*{}".format(*cfg.mesh.sizes)
    found = f"{len(devices)} {devices[0].device_kind} device(s) are visible"
    fix = f"choose axes whose product is {len(devices)} (one axis may be -1), or "
    if n > len(devices):
        fix += "simulate the mesh on this host's CPU with JAX_PLATFORMS=cpu"
        raise UserError(config.USAGE, f"{product} = {n} but only {found}", fix)
    if n < len(devices) and (devices[0].platform != "cpu" or jax.process_count() > 1):
        fix += "hide the others from JAX"
        raise UserError(config.USAGE, f"{product} = {n} would leave some idle: {found}", fix)
    # Neighbours on the chips' own network, one of whose axes may have to serve two of ours.
    placed = mesh_utils.create_device_mesh(
        cfg.mesh.sizes, devices[:n], allow_split_physical_axes=True
    )
    return jax.sharding.Mesh(placed, AXES, axis_types=(AxisType.Auto,) * 3)


def shardings(specs):
    """NamedShardings on the ambient mesh from a tree of PartitionSpecs."""
    place = partial(NamedSharding, jax.sharding.get_mesh())
    return jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P))


class Stop:
    """Whether SIGTERM or Ctrl-C has asked the run to stop; the same in every process at each poll.

    With jax.distributed its preemption service owns SIGTERM (a Python handler would disable it),
    and makes the processes agree on the poll.
    """

    def __init__(self):
        self.asked = self.agreed = False
        self.polls = 0
        signal.signal(signal.SIGINT, self.handle)
        if not jax.distributed.is_initialized():
            signal.signal(signal.SIGTERM, self.handle)

    def handle(self, number, frame):
        if self.asked:  # the second time: at once
            os.write(2, b"\ninterrupted before all was saved; run the same command again\n")
            os._exit(config.INTERRUPTED)
        self.asked = True
        os.write(2, b"\nstopping after this update; once more stops at once\n")
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)

    def __bool__(self):
        if jax.distributed.is_initialized():
            self.polls += 1
            self.agreed = self.agreed or multihost_utils.reached_preemption_sync_point(self.polls)
            return self.agreed
        return self.asked


def drop_late_callbacks(unraisable):
    """A sys.unraisablehook without the hundreds of lines that follow a failed read in orbax."""
    late = "Event loop is closed" in str(unraisable.exc_value)
    if not late and not isinstance(unraisable.object, CoroutineType):
        sys.__unraisablehook__(unraisable)


LOST_PEER = r"Gloo|[Cc]onnection closed by peer|coordination service|heartbeat"
CLOUD = {"gcsfs", "aiohttp", "google", "requests"}  # whose exceptions are storage's, after retries


def run_main(main, cfg: Config):
    """main(cfg) among the other processes, with the exit codes of config.py, and 1 for a bug."""
    sys.unraisablehook = drop_late_callbacks
    again = "run the same command again to resume"
    try:
        start_processes(cfg)
        return main(cfg)
    except UserError as e:
        leave(e)
    except KeyboardInterrupt:  # before Stop takes it
        leave(UserError(config.INTERRUPTED, "interrupted", again))
    except Exception as e:
        reason = f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"
        if jax.distributed.is_initialized() and re.search(LOST_PEER, str(e)):
            fix = f"look at that process's log, then {again}, everywhere"
            leave(UserError(config.DISTRIBUTED, f"a peer process was lost: {reason}", fix))
        if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(e):
            rows = "fewer rows at a time (in training, train.microbatches or train.grad_accum)"
            fix = f"take more devices, {rows}, or train.remat=layer; scripts/plan.py says what fits"
            leave(UserError(config.USAGE, f"a device's memory is too small: {reason}", fix))
        if isinstance(e, OSError) or type(e).__module__.split(".")[0] in CLOUD:
            fix = f"make room, or mend the storage or the permissions, then {again}"
            leave(UserError(config.STORAGE, f"storage failed: {reason}", fix))
        traceback.print_exc()
        leave(None)


def leave(error: UserError | None):
    """Print the error and exit at once: a normal exit waits for lost peers and for failed saves."""
    if error:
        print(error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if error else 1)


# ---- compiling

# Options by platform or kind of device, where XLA's defaults are worse.  Found by compiling
# llama_1b with mesh.dp=8, and not timed on a device: pipelined, an H200's gathers for a loop's next
# turn run in this one; matmuls that may use more of a v5p's fast memory take 12 % fewer cycles by
# XLA's count (8 to 14 % on v5e, for llama3_8b, gpt2_1.5b and qwen3_0.6b), and half as long again to
# compile (on v5e up to twice); a v6e's SparseCores hide 17 of 18 collectives, where none was.
XLA_OPTIONS = {
    "gpu": dict(
        xla_gpu_enable_latency_hiding_scheduler=True,
        xla_gpu_enable_pipelined_all_gather=True,
        xla_gpu_enable_pipelined_reduce_scatter=True,
    ),
    "TPU v5": dict(xla_tpu_scoped_vmem_limit_kib=24576),
    "TPU v5 lite": dict(xla_tpu_scoped_vmem_limit_kib=24576),
    "TPU v6 lite": dict(
        xla_tpu_enable_sparse_core_collective_offload_all_gather=True,
        xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=True,
        xla_tpu_enable_sparse_core_collective_offload_all_reduce=True,
    ),
}


def xla_options(mesh: jax.sharding.Mesh) -> dict:
    """Those of XLA_OPTIONS that the XLA installed for the mesh's devices takes, but for flags that
    the user has set.

    Each is tried on a program of one number: there an unknown one is an error, and in XLA_FLAGS it
    would end the process.
    """
    home = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    number = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), np.float32, sharding=home))
    users = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))

    def taken(name, value) -> bool:
        try:
            number.compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as e:
            if "INVALID_ARGUMENT" not in str(e):
                raise
            if "No such compile option" not in str(e):
                warn(f"XLA does not take {name}={value}: {str(e).splitlines()[0][:200]}")
            return False
        return True

    device = mesh.devices.flat[0]
    wanted = XLA_OPTIONS.get(device.platform, {}) | XLA_OPTIONS.get(device.device_kind, {})
    return {k: value for k, value in wanted.items() if k not in users and taken(k, value)}


def compiled(step, *args):
    """The program of a jitted function for such arguments, on the ambient mesh."""
    return step.lower(*args).compile(compiler_options=xla_options(jax.sharding.get_mesh()))


# ---- peaks

# Dense bfloat16 TFLOP/s of a JAX device, from data sheets; a TPU v2, v3 or 7x chip is two of them.
PEAK_TFLOPS = {
    "TPU v2": 22.5, "TPU v3": 61.5, "TPU v4": 275, "TPU v5 lite": 197, "TPU v5e": 197,
    "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU v6e": 918, "TPU7x": 1153.5,
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989, "NVIDIA B200": 2250,
}  # fmt: skip


def peak_flops(cfg: Config) -> float | None:
    """FLOP/s of the whole mesh, or None where unknown or where the run is not in bfloat16."""
    peak = PEAK_TFLOPS.get(jax.devices()[0].device_kind)
    if peak is None or cfg.train.dtype != "bfloat16":
        return None
    return peak * 1e12 * math.prod(cfg.mesh.sizes)


# ---- run directory


def is_remote(path) -> bool:
    return "://" in os.fspath(path)


def absolute(path: str) -> epath.Path:
    return epath.Path(path if is_remote(path) else os.path.abspath(path))


def write_text(path: epath.Path, text: str):
    """Replace a file whole: a reader, or a crash, meets the old text or the new, never a half."""
    if is_remote(path):
        return path.write_text(text)  # an object appears whole
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def free_name(path: epath.Path) -> epath.Path:
    """path, or path.2, path.3 .. where it is taken."""
    names = (path if n == 1 else path.with_name(f"{path.name}.{n}") for n in range(1, 10_000))
    return next(name for name in names if not name.exists())


def move(path: epath.Path, where: epath.Path):
    """Rename a folder.

    On object stores that is each object in it, but a lease; the deepest first, for those at the
    top tell what the folder is, and a move that was cut short can then be made again.
    """
    if not is_remote(path):
        where.parent.mkdir(parents=True, exist_ok=True)
        path.rename(where)
        return
    fs, old = fsspec.url_to_fs(os.fspath(path))
    new = os.fspath(where).partition("://")[2]
    found = [name for name in fs.find(old) if name != f"{old}/lock"]
    for depth in sorted({name.count("/") for name in found}, reverse=True):
        names = [name for name in found if name.count("/") == depth]
        fs.mv(names, [new + name.removeprefix(old) for name in names])


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


def record(cfg: Config, fingerprint: str, run_id: str) -> str:
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
    return config.to_json(cfg, **facts)


@contextmanager
def open_run(cfg: Config, data):
    """Yield run.dir/run.name, locked, with its config.json written; --fresh moves an old run aside.

    data: the training Dataset, for its fingerprint and tokenizer.  Raises UserError BUSY where
    another run holds it, USAGE where it is something else, STORAGE where it can't be written.
    """
    path = absolute(cfg.run.dir) / cfg.run.name
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
            move(path, aside)
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
    write_text(settings, record(cfg, data.fingerprint, run_id))
    for section in config.SECTIONS:
        for name, value in asdict(getattr(cfg, section)).items():
            before = old.get(section, {}).get(name, value)
            same = json.dumps(before) == json.dumps(value)  # where a tuple is a list
            if not same and section != "run":
                say(f"changed since this run's last start: {section}.{name} {before} -> {value}")
    if data.tokenizer:  # so that the run can be sampled without its data
        write_text(path / "tokenizer.json", text)


# ---- metrics


def duration(seconds: float) -> str:
    h, m, s = int(seconds // 3600), int(seconds // 60 % 60), int(seconds % 60)
    return f"{h}h{m:02d}m" if h else f"{m}m{s:02d}s" if m else f"{s}s"


def finite(x) -> float | None:
    return float(x) if math.isfinite(x) else None


class RowFile:
    """A .jsonl file that holds each row exactly once, also across kills and resumes.

    Rows after `step`, the update resumed from, are dropped: they are about to be made again.  On
    object stores, which cannot append, it grows locally and is uploaded before every checkpoint.
    """

    def __init__(self, path: epath.Path, step: int):
        rows = kept_rows(path, step)
        self.path, self.rows = path, [json.loads(row) for row in rows]
        self.local = path
        if is_remote(path):
            self.local = epath.Path(tempfile.mkdtemp(prefix="trifold-")) / path.name
        if is_lead() and (rows or path.exists()):
            write_text(self.local, "".join(rows))

    def add(self, row: dict):
        with self.local.open("a") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")

    def publish(self):
        if is_remote(self.path) and self.local.exists():
            self.path.write_text(self.local.read_text())


class MetricsLog:
    """metrics.jsonl, the console, loss.png and Weights & Biases, all from the same rows.

    Rows are written one update late, so that the host never waits for the device.
    """

    MAX_SKIPS = 10

    def __init__(self, run: epath.Path, cfg: Config, step: int, flops: float):
        """flops: of a token, forward and backward."""
        self.cfg, self.run, self.held, self.skips = cfg, run, None, 0
        self.train, self.eval = [], {}  # [(step, loss)] and {step: loss}, for the curve
        self.busiest, self.load = {}, {}  # {step: a share a layer} and the newest moe row
        self.flops, self.peak = flops, peak_flops(cfg)
        self.tokens_per_step = cfg.train.batch_size * cfg.train.seq_len
        self.began = self.clock = time.perf_counter()
        self.first = step
        self.file = RowFile(run / "metrics.jsonl", step)
        self.text = RowFile(run / "samples.jsonl", step)
        self.samples = {row["step"] for row in self.text.rows}
        for row in self.file.rows:
            self.remember(row)
        self.wandb = on_lead(start_wandb, run, cfg)
        if step < cfg.train.steps:
            say(f"updates {step + 1} to {cfg.train.steps}")

    def remember(self, row: dict):
        if row["kind"] == "train":
            self.train.append((row["step"], row["loss"]))
            self.skips = self.skips + 1 if None in (row["loss"], row["grad_norm"]) else 0
        elif row["kind"] == "moe":
            E = len(row["load"][0])
            self.busiest[row["step"]] = [max(load) * E for load in row["load"]]
            self.load = row
        else:
            self.eval[row["step"]] = row["loss"]

    def write(self, row: dict):
        if is_lead():
            self.file.add(row)
            if self.wandb:
                self.wandb(row)
        self.remember(row)

    def update(self, step: int, metrics: dict):
        """Note the metrics of update `step` (device arrays), and write those of the one before."""
        self.flush()
        self.held = (step, metrics)

    def flush(self):
        """Wait for the update noted last, and write it.  Raises UserError DIVERGED, see `judge`."""
        if self.held is None:
            return
        (step, metrics), self.held = self.held, None
        arrived(metrics)
        loss, norm, lr = (float(metrics[name]) for name in ("loss", "grad_norm", "lr"))
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        rate = self.tokens_per_step / seconds
        row = dict(kind="train", step=step, loss=finite(loss), grad_norm=finite(norm), lr=lr)
        row |= dict(tokens=step * self.tokens_per_step, step_time=seconds, tokens_per_sec=rate)
        self.write(row | dict(mfu=self.peak and rate * self.flops / self.peak))
        steps = self.cfg.train.steps
        if step == self.first + 1 or step % self.cfg.log.every == 0 or step == steps:
            moe = self.experts(step, metrics["moe"]) if "moe" in metrics else ""
            mfu = f"{rate * self.flops / self.peak:.1%}" if self.peak else "-"
            left = duration((steps - step) * (now - self.began) / (step - self.first))
            say(
                f"update {step}/{steps}  loss {loss:.4f}  grad norm {norm:.3f}  lr {lr:.2e}  "
                f"{rate:,.0f} tokens/s  mfu {mfu}{moe}  eta {left}"
            )
        self.judge(step, loss, norm)

    def experts(self, step: int, moe: dict) -> str:
        """Write the moe row of an update, one element a moe layer; a summary for the console."""
        table = {name: np.asarray(x, np.float64) for name, x in moe.items()}
        share, dead = table.pop("load"), (np.asarray(moe["load"]) == 0).sum(-1)
        share = share / share.sum(-1, keepdims=True)
        row = {name: [finite(x) for x in table[name]] for name in table}
        row |= dict(load=share.round(6).tolist(), dead=dead.tolist())
        self.write(dict(kind="moe", step=step, layer=config.moe_layers(self.cfg.model)) | row)
        most = (share.max(-1) * share.shape[-1]).max()
        return (
            f"  busiest expert {most:.1f}x, {dead.sum()} dead, "
            f"{table['dropped'].mean():.1%} dropped, balance {table['balance'].mean():.3f}"
        )

    def judge(self, step: int, loss: float, norm: float):
        """Warn of a skipped update.  Raises UserError DIVERGED after MAX_SKIPS of them in a row."""
        if self.skips:
            warn(f"update {step} skipped: loss {loss}, gradient norm {norm}; {self.skips} in a row")
        if self.skips >= self.MAX_SKIPS:
            o, first = self.cfg.optim, step - self.skips + 1
            what = f"diverged: {self.skips} updates in a row, {first} to {step}, were not finite"
            fix = f"lower optim.lr={o.lr} or optim.clip_norm={o.clip_norm}, or look at their data"
            raise UserError(config.DIVERGED, what, fix)

    def aside(self, f, *args):
        """f(*args), with every row before it written and its own time left out of the updates'."""
        self.publish()
        result = f(*args)
        self.clock = time.perf_counter()
        return result

    def evaluation(self, step: int, result: dict | None):
        """Write an evaluation, redraw the curve; None, one cut short, is made again on resume."""
        if result is None:
            return
        self.write(dict(kind="eval", step=step) | result)
        say_eval(step, result)
        if is_lead():
            draw_loss(self.run / "loss.png", self.train, self.eval)
            if self.load:
                draw_experts(self.run / "experts.png", self.load, self.busiest)

    def sample(self, row: dict):
        self.samples.add(row["step"])
        if is_lead():
            self.text.add(row)
        say(f"sample after update {row['step']}: {row['text']!r}")

    def publish(self):
        """Write the update noted last too, and bring the file on an object store up to date."""
        self.flush()
        if is_lead():
            self.file.publish()
            self.text.publish()

    def close(self):
        self.publish()
        if self.wandb:
            self.wandb(None)


def say_eval(step: int, result: dict | None):
    """Print an evaluation; one that was cut short ends the process as interrupted."""
    if result is None:
        sys.exit(config.INTERRUPTED)

    def number(x):
        return "-" if x is None else f"{x:.4f}"

    loss, bits = number(result["loss"]), number(result["bits_per_byte"])
    n = result["tokens"]
    say(f"update {step}  validation loss {loss}  bits per byte {bits}  over {n:,} tokens")


def farewell(log: MetricsLog, step: int):
    """The last line of a run; one that was asked to stop leaves with its own exit code."""
    if step == log.cfg.train.steps and step in log.eval:
        return say(f"finished: {log.run}")
    say(f"interrupted: checkpoint of update {step} committed; run the same command again to go on")
    sys.exit(config.INTERRUPTED)


def kept_rows(path: epath.Path, step: int) -> list[str]:
    """The whole lines of a .jsonl up to update `step`; a torn last line goes with the rest."""
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                rows.append(line)
        except (ValueError, TypeError, KeyError):
            warn(f"{path}: dropped a line that is no row: {line[:60]!r}")
    return rows


def draw_loss(path: epath.Path, train: list, evals: dict):
    """The loss curve, as a PNG."""
    from matplotlib.figure import Figure  # 0.3 s, and only needed here

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    known = [(step, loss) for step, loss in train if loss is not None]
    axes.plot(*zip(*known or [(0, np.nan)], strict=True), lw=0.8, label="train")
    axes.plot(list(evals), list(evals.values()), "o-", label="validation")
    axes.set(xlabel="update", ylabel="loss (nats per token)", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    write_png(path, figure)


def draw_experts(path: epath.Path, row: dict, busiest: dict):
    """Each expert's load in each moe layer in the newest row, and the busiest one's over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    load = np.array(row["load"]) * len(row["load"][0])
    image = left.imshow(load, aspect="auto", vmin=0, vmax=max(2, load.max()), cmap="magma")
    left.set(xlabel="expert", ylabel="layer", title=f"load after update {row['step']} (1 is even)")
    named = range(0, len(load), 1 + len(load) // 16)
    left.set_yticks(named, [row["layer"][i] for i in named])
    figure.colorbar(image, ax=left)
    for i, layer in enumerate(row["layer"]):
        color = f"{0.75 * (1 - i / len(load)):.2f}"  # later layers are darker
        label = layer if i in named else None
        right.plot(list(busiest), [x[i] for x in busiest.values()], color=color, label=label)
    right.set(xlabel="update", ylabel="load of the busiest expert", title=path.parent.name)
    right.legend(title="layer", fontsize="small")
    right.grid(alpha=0.3)
    write_png(path, figure)


def write_png(path: epath.Path, figure):
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    path.write_bytes(png.getvalue())


def has_wandb_key() -> bool:
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators("api.wandb.ai"))
    except (OSError, netrc.NetrcParseError):
        return False


def start_wandb(run: epath.Path, cfg: Config):
    """A function that sends a row to Weights & Biases (None ends it), or None where it is off.

    Never stops or changes the run, unless log.wandb is required: then UserError USAGE.
    """
    mode, required = cfg.log.wandb, cfg.log.wandb == "required"
    if mode == "off":
        return None
    if mode != "offline" and not has_wandb_key():
        if required:
            fix = "set WANDB_API_KEY or run `wandb login`, or use --log.wandb online"
            raise UserError(config.USAGE, "log.wandb=required but no API key was found", fix)
        say("wandb: no API key, so this run is logged offline; `wandb sync` uploads it later")
        mode = "offline"
    sections = {s: asdict(getattr(cfg, s)) for s in config.SECTIONS}
    try:
        import wandb

        session = wandb.init(
            project=cfg.log.wandb_project,
            name=cfg.run.name,
            id=json.loads((run / "config.json").read_text())["run_id"],
            config=sections,
            dir=tempfile.mkdtemp(prefix="trifold-") if is_remote(run) else os.fspath(run),
            mode="offline" if mode == "offline" else "online",
            resume="allow",
            settings=wandb.Settings(
                init_timeout=30, console="off", save_code=False, disable_git=True
            ),
        )
        session.define_metric("*", step_metric="step")
    except Exception as e:  # whatever fails in there, training goes on without it
        why = f"{type(e).__name__}: {str(e)[:200]}"
        if required:
            fix = "mend the connection, or use --log.wandb online"
            what = f"log.wandb=required but it did not start: {why}"
            raise UserError(config.USAGE, what, fix) from None
        warn(f"wandb is off ({why}); metrics.jsonl has everything")
        return None

    def send(row: dict | None):
        try:
            if row is None:
                return session.finish()
            named = {k: v for k, v in row.items() if k not in ("kind", "step", "layer")}
            if row["kind"] == "moe":  # a line a layer; of the load the busiest expert's
                named["load"] = [max(load) for load in named["load"]]
                layers = list(enumerate(row["layer"]))
                named = {f"{k}/layer{n}": x[i] for k, x in named.items() for i, n in layers}
            named = {f"{row['kind']}/{k}": v for k, v in named.items()}
            session.log(named | dict(step=row["step"]))
        except Exception as e:  # as above
            warn(f"wandb lost a row ({type(e).__name__}: {str(e)[:200]})")

    return send


# ---- verified checkpoints


def mix(x):
    """A bijection of uint32 that spreads every bit (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def digest(x):
    """Two uint32 that change with any bit or any move of an element of x, and with nothing else.

    A sum over elements of mix(bits ^ mix(index)): integer addition is associative, so every mesh
    gets the same.  It detects accidents, not forgery.
    """
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, words).astype(jnp.uint32)
    index, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for dim in reversed(range(x.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, x.shape, dim) * np.uint32(stride % 2**32)
        stride *= x.shape[dim]
    spread = [mix(bits ^ mix(index + np.uint32(seed))) for seed in (0x9E3779B9, 0x7F4A7C15)]
    return jnp.stack([x.sum(dtype=jnp.uint32) for x in spread])


@jax.jit
def digests(leaves: list):
    """uint32 [leaf, 2], and whether every float in them is finite."""
    finite = [jnp.isfinite(x).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([digest(x) for x in leaves]), jnp.stack(finite).all()


def leaf_table(tree) -> dict:
    """{"params/layers/q_DHK": leaf}"""
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def checksum(meta: dict) -> int:
    rest = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


class Damaged(ValueError):
    """A checkpoint that is not what was saved."""


OUTAGE = (
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED|PERMISSION_DENIED"
    "|[Pp]ermission denied"
)


class Checkpoints:
    """checkpoints/N: the state after N updates, saved in the background, verified when restored.

    Each holds two array items, `params` and `rest`, and `meta`: per leaf its shape, dtype and
    digest, and the settings (`must`) that a run which continues it has to share.
    """

    FORMAT = 2

    def __init__(self, run: epath.Path, keep: int = 2, must: dict = MappingProxyType({})):
        """keep: how many stay; 0 only reads, and moves nothing."""
        self.run, self.path, self.keep, self.must = run, run / "checkpoints", keep, dict(must)
        self.newest = None
        self.open()

    def open(self):
        options = dict(max_to_keep=self.keep, create=True) if self.keep else dict(read_only=True)
        options = ocp.CheckpointManagerOptions(**options)
        self.manager = ocp.CheckpointManager(self.path, options=options)

    def restore(self, abstract: dict, step: int = -1):
        """The newest checkpoint that verifies, laid out as `abstract`, or None where there is none.

        abstract: {"params": ..., "rest": ...} or one of them, ShapeDtypeStructs with shardings.
        step: that one and no other.  Those that do not verify are moved to damaged/.  Raises
        UserError CHECKPOINT where none is left or a run has lost them, and as `load` does.
        """
        found = self.manager.all_steps()
        if step >= 0 and step not in found:
            what = f"{self.path} has no checkpoint {step}, only {config.listed(found or ['none'])}"
            fix = "give --step one of those, or leave it out for the newest"
            raise UserError(config.CHECKPOINT, what, fix)
        bad = []
        while (n := self.manager.latest_step() if step < 0 else step) is not None:
            try:
                tree = self.load(n, abstract)
                self.newest = n
                return tree
            except Damaged as e:
                bad.append(f"{n} ({e})")
                where = self.set_aside(n)
                warn(f"checkpoint {n} failed verification ({e}); moved to {where}")
        if bad:
            what = f"no usable checkpoint among {len(bad)} in {self.path}: {', '.join(bad)}"
            fix = "restore one from a copy, or start over with --fresh; they are in damaged/"
            raise UserError(config.CHECKPOINT, what, fix)
        metrics = self.run / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().strip():
            what = f"{self.run} has trained, but {self.path} holds no checkpoint"
            fix = "restore the checkpoints from a copy, or start over with --fresh"
            raise UserError(config.CHECKPOINT, what, fix)
        return None

    def load(self, step: int, abstract: dict):
        """Checkpoint `step`, verified.  Raises Damaged, UserError as `read` and `compare` do."""
        if not is_remote(self.path) and os.path.islink(self.path / str(step)):
            raise Damaged("it is a symbolic link")
        meta = self.read(step, meta=ocp.args.JsonRestore())["meta"]
        if not isinstance(meta, dict) or meta.get("checksum") != checksum(meta):
            raise Damaged("its meta does not match its checksum")
        self.compare(step, meta, abstract)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        found = self.read(step, **items)
        tree = {name: found[name] for name in abstract}
        table = leaf_table(tree)
        got = np.asarray(digests(list(table.values()))[0]).tolist()
        wrong = [n for n, d in zip(table, got, strict=True) if d != meta["leaves"][n][2]]
        if wrong:
            raise Damaged(f"{len(wrong)} of {len(table)} arrays are not as saved, {wrong[0]} first")
        return tree

    def read(self, step: int, **items):
        """Items of checkpoint `step`.  Raises Damaged, or UserError STORAGE where out of reach."""
        tree = error = None
        try:
            tree = self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as e:  # orbax raises all types for damage, a bare Exception among them
            error = e
        if isinstance(error, PermissionError | ConnectionError | TimeoutError) or re.search(
            OUTAGE, str(error)
        ):
            what = f"cannot read {self.path / str(step)}: {str(error)[:300]}"
            fix = "mend the storage or the permissions, and run the same command again"
            raise UserError(config.STORAGE, what, fix) from error
        if not all_agree(error is None):
            why = f"{type(error).__name__}: {error}" if error else "another process failed"
            raise Damaged(re.sub(r"\s+", " ", why)[:160]) from error
        return tree

    def compare(self, step: int, meta: dict, abstract: dict):
        """Raise UserError CHECKPOINT where it is of another format, model or data than this run."""
        then = {name: meta["must"][name] for name in self.must if name in meta["must"]}
        free = {name for name, x in then.items() if x is None}  # of weights that came without data
        then = {name: x for name, x in then.items() if name not in free}
        now = {name: x for name, x in self.must.items() if name not in free}
        now["format"] = self.FORMAT
        then["format"] = meta["format"]
        for name, x in leaf_table(abstract).items():
            now[name] = f"{x.dtype}{list(x.shape)}"
        for name, (shape, dtype, _) in meta["leaves"].items():
            if name.split("/")[0] in abstract:
                then[name] = f"{dtype}{shape}"

        def value(table, name):
            return table.get(name, "nothing")

        names = [name for name in now | then if value(now, name) != value(then, name)]
        differ = [f"{n}: {value(then, n)} there, {value(now, n)} here" for n in names[:10]]
        if differ:
            more = f", and {len(names) - 10} more" if len(names) > 10 else ""
            where = self.path / str(step)
            what = f"checkpoint {where} is of another run: {'; '.join(differ)}{more}"
            fix = "give the values in its run's config.json, or another --run.name, or --fresh"
            raise UserError(config.CHECKPOINT, what, fix)

    def set_aside(self, step: int) -> epath.Path:
        """Move it out of the way: while it is there, orbax refuses to save any step up to it."""
        if not self.keep:
            what = f"checkpoint {self.path / str(step)} is damaged"
            fix = "start its run once: it goes on from the one before"
            raise UserError(config.CHECKPOINT, what, fix)
        where = free_name(self.run / "damaged" / str(step))
        self.manager.close()
        on_lead(move, self.path / str(step), where)
        self.open()
        return where

    def save(self, step: int, state: dict):
        """Start saving the state after `step` updates, and return once it is off the devices.

        The first of a new run is waited for, so that a storage that cannot hold it shows before
        the first update.  Raises UserError STORAGE, or DIVERGED where the state is not finite.
        """
        if step == self.newest:
            return
        table = leaf_table(state)
        got, finite = digests(list(table.values()))
        if not finite:
            what = f"the state after update {step} holds a NaN or infinity; it was not saved"
            fix = f"resume from {self.newest} with a lower --optim.lr"
            raise UserError(config.DIVERGED, what, fix)
        rows = zip(table.items(), np.asarray(got).tolist(), strict=True)
        leaves = {name: [list(x.shape), str(x.dtype), d] for (name, x), d in rows}
        meta = dict(format=self.FORMAT, step=step, must=self.must, leaves=leaves)
        items = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
        items["meta"] = ocp.args.JsonSave(meta | dict(checksum=checksum(meta)))
        with self.storage_errors(step):
            started = self.manager.save(step, args=ocp.args.Composite(**items), force=True)
            assert started, f"orbax declined to save {step}; it has {self.manager.all_steps()}"
            if self.newest is None:
                self.manager.wait_until_finished()
        self.newest = step

    @contextmanager
    def storage_errors(self, step: int):
        try:
            yield
        except (OSError, ValueError, RuntimeError) as e:
            what = f"checkpoint {step} could not be written to {self.path}: {str(e)[:300]}"
            fix = "make room or mend the storage, and run the same command again to resume"
            raise UserError(config.STORAGE, what, fix) from e

    def close(self):
        """Return once everything saved is committed."""
        with self.storage_errors(self.newest):
            self.manager.wait_until_finished()
        self.manager.close()


# ---- the profile

UPDATE, DATA_WAIT = "update", "data wait"  # what the host marks in a trace
OTHER = "other programs"
IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [2,4]T(1,0): 0, 1 .. in that shape, transposed


def numbers(text: str | None) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text or "")]


def iota(shape: str | None, order: str | None):
    x = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return x.transpose(numbers(order)) if order else x


def device_groups(text: str, n: int):
    """[group, member]: the devices, of n, that an HLO collective joins; None in a form not known.

    Known are {{0,1},{2,3}} (a permute's pairs too), {} for all, [2,2]<=[4], and
    mesh['a'=2,'b'=2], device_ids=([4]) {'b'}, each of the iotas perhaps transposed.
    """
    if found := re.search(r"(?:_groups|_pairs)=\{((?:\{[\d,]+\},?)*)\}", text):
        rows = re.findall(r"\{([\d,]+)\}", found[1])
        return np.array([numbers(row) for row in rows] or [range(n)])
    if found := re.search(rf"_groups=\[([\d,]+)\]<={IOTA}", text):
        return iota(found[2], found[3]).reshape(numbers(found[1]))
    form = rf"_groups=mesh\[([^\]]+)\](?:, device_ids=\({IOTA}\))? \{{((?:'\w+',?)+)\}}"
    if found := re.search(form, text):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        joined = [list(axes).index(axis) for axis in re.findall(r"\w+", found[4])]
        x = iota(found[2] or str(n), found[3]).reshape([int(size) for size in axes.values()])
        x = np.moveaxis(x, joined, range(-len(joined), 0))
        return x.reshape(-1, math.prod(x.shape[-len(joined) :]))
    return None


def joined_axes(text: str, sizes: tuple[int, ...]) -> list[str] | None:
    """The axes along which the devices of an HLO collective differ, on a mesh of these sizes; None
    in a form not known."""
    groups = device_groups(text, math.prod(sizes))
    if groups is None:
        return None
    at = zip(AXES, np.unravel_index(groups, sizes), strict=True)
    return [axis for axis, i in at if (i != i[:, :1]).any()]


def op_classes(hlo: str, sizes: tuple[int, ...]) -> dict[str, str]:
    """{instruction: class} of a compiled module's text, on a mesh of these sizes.

    "compute"; of a collective the axes along which its devices differ ("dp", "dp+tp", or "unknown
    axes"); "" of control flow, whose events cover those of what it runs.  The two halves of an
    asynchronous collective are found by XLA's names, -start and -done.
    """
    instruction = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)")
    classes, inside, computation = {}, {}, ""
    for line in hlo.splitlines():
        if not (found := instruction.match(line)):
            header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
            computation = header[1] if header else computation
            continue
        name, opcode, rest = found.groups()
        kind = "" if opcode in ("while", "conditional", "call") else "compute"
        if re.search("replica_groups=|source_target_pairs=", rest):
            axes = joined_axes(rest, sizes)
            # A group of one only copies.
            kind = "unknown axes" if axes is None else "+".join(axes) or "compute"
            inside[computation] = kind
        elif re.search("-start|-done", name):
            for ref in re.findall(r"%([\w.-]+)", rest):
                if ref in inside or "-start" in ref:
                    kind = inside.get(ref) or classes.get(ref, kind)
                    break
        classes[name] = kind
    return classes


def read_trace(data) -> tuple[dict, dict]:
    """({device: [(op, module or None, start, stop)]}, {mark: [(start, stop)]}), in ns.

    data: a jax.profiler.ProfileData.  On a CPU ops are events of host threads, several of which
    work for one device, and some go on after their event until one named "end: ..".  A GPU's plane
    has a line a stream, a TPU's one called XLA Ops; those two are read as they are documented to
    be, and have not been met.
    """
    cpu, accelerator, ends, marks = {}, {}, {}, {UPDATE: [], DATA_WAIT: []}
    for plane in data.planes:
        device = re.fullmatch(r"/device:(GPU|TPU):\d+", plane.name)
        prefix = {"GPU": "Stream", "TPU": "XLA Ops"}[device[1]] if device else ""
        for line in plane.lines if device or plane.name == "/host:CPU" else ():
            for event in line.events if line.name.startswith(prefix) else ():
                stats, span = dict(event.stats), (event.start_ns, event.end_ns)
                if device:
                    op = stats.get("hlo_op") or event.name.split(" = ")[0].lstrip("%")
                    ops = accelerator.setdefault(plane.name, [])
                    ops.append((op, stats.get("hlo_module"), *span))
                elif "hlo_op" in stats:
                    ops = cpu.setdefault(stats["device_ordinal"], [])
                    ops.append((stats["hlo_op"], stats["hlo_module"], *span, stats.get("_p")))
                elif event.name.startswith("end: "):
                    ends[stats.get("_c")] = event.end_ns
                elif event.name in marks:
                    marks[event.name].append(span)
    for ops in cpu.values():
        ops[:] = [(*op, start, max(stop, ends.get(id, 0))) for *op, start, stop, id in ops]
    return accelerator or cpu, marks


def spans_of(events: list, module: str, classes: dict[str, str]) -> dict[str, list]:
    """{class: [(start, stop)]} of a device's ops in read_trace's form."""
    spans = {}
    for op, its_module, *span in events:
        own = its_module is None or its_module.split("(")[0] == module
        if kind := classes.get(op, "compute") if own else OTHER:
            spans.setdefault(kind, []).append(span)
    return spans


def ledger(data, hlo: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """{row: ms an update} of a trace (ProfileData) of updates that ran `hlo`; a device's mean.

    The rows add up to the time from the first update's start to the last one's end, for each moment
    of a device is in the first row that fits; {} where the trace shows no device.
      compute               an op that is no collective runs, or on a CPU waits for a core
      bubble                it is in a collective over pp while another traced device computes; one
                            that no traced device sees so shows as time in collectives over pp
      collectives over ..   it is in one, waiting for its peers included
      other programs        an evaluation, a sample or a save falls among the updates
      idle                  something runs on another traced device
      data wait             no traced device works, and the host waits for the next batch
      host gap              no traced device works
    """
    (devices, marks), classes = read_trace(data), op_classes(hlo, sizes)
    module = re.match(r"HloModule ([\w.-]+)", hlo)[1]
    devices = [spans_of(events, module, classes) for events in devices.values()]
    if not devices or not marks[UPDATE]:
        return {}
    first, last = np.min(marks[UPDATE]), np.max(marks[UPDATE])
    lists = [*marks.values(), *(spans for table in devices for spans in table.values())]
    edges = np.unique(np.concatenate([np.clip(x, first, last).ravel() for x in lists]))

    def covered(spans):
        """bool: whether each piece between two edges lies in one of the spans."""
        ends = np.searchsorted(edges, np.clip(np.reshape(spans, (-1, 2)), first, last))
        starts, stops = (np.bincount(x, minlength=len(edges)) for x in ends.T)
        return (starts - stops).cumsum()[:-1] > 0

    axes = sorted(set().union(*devices) - {"compute", OTHER})
    kinds = {"compute", "pp", OTHER, *axes}
    devices = [{kind: covered(spans.get(kind, [])) for kind in kinds} for spans in devices]
    computing = sum(covers["compute"].astype(int) for covers in devices)
    working = np.any([cover for covers in devices for cover in covers.values()], 0)
    waiting, rows = covered(marks[DATA_WAIT]), {}
    for covers in devices:
        fits = dict(compute=covers["compute"])
        fits["bubble"] = covers["pp"] & (computing > covers["compute"])
        fits |= {f"collectives over {kind}": covers[kind] for kind in axes}
        fits |= {OTHER: covers[OTHER], "idle": working, "data wait": waiting}
        left = np.diff(edges)
        for row, fit in (fits | {"host gap": True}).items():
            rows[row] = rows.get(row, 0.0) + float((left * fit).sum())
            left = np.where(fit, 0, left)
    return {row: ns / 1e6 / len(devices) / len(marks[UPDATE]) for row, ns in rows.items()}


class Profile:
    """train.profile and log.hlo: a trace of some updates, their ledger, and the step's program.

    Process 0 traces its own devices, and no others; a run resumed past the first of the updates
    traces none.  On object stores the trace is written locally, then copied.
    """

    def __init__(self, run: epath.Path, program, cfg: Config):
        """program: the compiled update, or None where there is none to take."""
        self.run, self.cfg, self.path = run, cfg, run / "profile"
        self.first, n = cfg.train.profile
        self.last, self.state = self.first + n - 1, "none"
        self.hlo = program.as_text() if program and (cfg.log.hlo or self.first) else ""
        if self.hlo and cfg.log.hlo and is_lead():
            write_text(run / "step.hlo.txt", self.hlo)

    @contextmanager
    def update(self, step: int, log: MetricsLog):
        """Around update `step`: start and stop the trace where due, the devices at rest."""
        if is_lead() and step == self.first:
            log.aside(self.start)
        ends = self.state == "tracing" and step == self.last
        with jax.profiler.StepTraceAnnotation(UPDATE, step_num=step):
            yield
            if ends:
                log.flush()
        if ends:
            log.aside(self.stop)
            self.state = "traced"

    def start(self):
        remote = is_remote(self.path)
        self.local = epath.Path(tempfile.mkdtemp(prefix="trifold-")) if remote else self.path
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # would slow the host that is being measured
        jax.profiler.start_trace(os.fspath(self.local), profiler_options=options)
        self.state = "tracing"

    def stop(self):
        jax.profiler.stop_trace()
        if is_remote(self.path):
            fs, there = fsspec.url_to_fs(os.fspath(self.path))
            fs.put(f"{self.local}/", f"{there}/", recursive=True)

    def report(self):
        """Print the ledger and add it to ledger.txt; at the end of the run, for reading a trace
        takes a while.  A run stopped among its updates leaves the trace alone."""
        if self.state == "tracing":
            self.stop()
        if self.state != "traced":
            return
        trace = sorted(self.local.glob("plugins/profile/*/*.xplane.pb"))[-1]  # by time
        data = jax.profiler.ProfileData.from_file(os.fspath(trace))
        rows = ledger(data, self.hlo, self.cfg.mesh.sizes)
        if not rows:
            return warn(f"{trace} shows no work of a device, so there is no ledger")
        wall = sum(rows.values())
        lines = [f"updates {self.first} to {self.last}, ms each:"]
        for row, ms in (rows | {"all": wall}).items():
            lines.append(f"  {row:<28}{ms:12.3f}{ms / wall:8.1%}")
        path, text = self.path / "ledger.txt", "\n".join(lines)
        say(text)
        write_text(path, (path.read_text() if path.exists() else "") + text + "\n")
