"""What every run needs from the machine: processes, signals, the mesh, compiling, and peak speeds.

No maths of the model is here.  Files and folders are in files.py.
"""

import logging
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager
from functools import partial
from itertools import compress
from types import CoroutineType

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import config
from checks import AUTOMATIC, resolve
from config import Config, UserError

for package in ("absl", "asyncio", "gcsfs"):  # they log tracebacks of errors that they also raise
    logging.getLogger(package).setLevel(logging.CRITICAL)

AXES = ("dp", "pp", "tp")
IMPORTED = time.monotonic()  # before the processes meet and JAX looks for devices


# ---- processes


def is_lead() -> bool:
    """Whether this is process 0, the one that prints and writes files."""
    return jax.process_index() == 0


def say(*words):
    """Print from process 0, without buffering."""
    if is_lead():
        print(*words, flush=True)


def warn(text: str):
    """Print a warning on stderr, from process 0."""
    if is_lead():
        print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def say_time(what: str):
    """Say how long the block took."""
    begin = time.monotonic()
    yield
    say(f"{what} in {time.monotonic() - begin:.1f} s")


def run_on_lead(f, *args):
    """f(*args) on process 0, None on the others.  A UserError on process 0 is raised in all."""
    result, error = None, None
    if is_lead():
        try:
            result = f(*args)
        except UserError as e:
            error = e
    if jax.process_count() > 1:
        code = 0 if error is None else error.code
        code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
        if code != 0 and error is None:
            error = UserError(code, "process 0 stopped", "see the error that process 0 printed")
    if error is not None:
        raise error
    return result


def all_agree(ok: bool) -> bool:
    """Whether ok is true in every process."""
    if jax.process_count() == 1:
        return ok
    return bool(multihost_utils.process_allgather(np.int32(ok)).all())


def wait_for(tree):
    """With several processes, wait until all devices of this one have computed their shards of the
    arrays, and return the arrays.

    Raises as soon as one has failed.  When a peer process is lost, only the devices that talk to it
    fail at once: blocking on a shard of another device would last until JAX gives up on the peer
    and aborts this process, 100 s later.  So this polls all of them.
    """
    if jax.process_count() > 1:
        pending = [shard.data for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
        while pending:
            # Asked once a round: if it were asked again below, a shard that failed in between would
            # be dropped without an error.
            ready = [x.is_ready() for x in pending]
            for x in compress(pending, ready):
                x.block_until_ready()  # raises if it has failed
            pending = [x for x, done in zip(pending, ready, strict=True) if not done]
            if pending:
                time.sleep(0.001)
    return tree


def start_processes(cfg: Config):
    """Join the run's other processes, named by run.coordinator or by a cluster that JAX detects.

    Where there is neither, this process is the only one.  Raises UserError DISTRIBUTED.
    """
    r = cfg.run
    if r.coordinator:
        if r.process_id > 0:
            wait_for_port(r.coordinator)
        try:
            jax.distributed.initialize(r.coordinator, r.num_processes, r.process_id)
        except RuntimeError as e:
            what = f"run.coordinator={r.coordinator}: {str(e).splitlines()[0][:200]}"
            fix = "choose a free port on process 0's host, the same in every process's flags"
            raise UserError(config.DISTRIBUTED, what, fix) from None
        return
    try:
        jax.distributed.initialize()
    except ValueError as e:
        if "coordinator_address should be defined" not in str(e):  # this says: no cluster found
            raise


def wait_for_port(address: str, seconds: float = 60):
    """Return once HOST:PORT accepts connections.  Raises UserError DISTRIBUTED after `seconds`.

    Without this, jax.distributed.initialize would abort the process instead of raising.
    """
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


class Stop:
    """Notices SIGTERM and Ctrl-C, which ask the run to save and exit; a second one exits at once.

    With jax.distributed, JAX's preemption service handles SIGTERM and tells the other processes.  A
    Python handler for SIGTERM would disable it.
    """

    def __init__(self):
        self.asked = self.agreed = False
        self.polls = 0
        signal.signal(signal.SIGINT, self.handle)
        if not jax.distributed.is_initialized():
            signal.signal(signal.SIGTERM, self.handle)

    def handle(self, number, frame):
        if self.asked:
            os.write(2, b"\ninterrupted before all was saved; run the same command again\n")
            os._exit(config.INTERRUPTED)
        self.asked = True
        os.write(2, b"\nstopping after this update; once more stops at once\n")
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)

    def agree_to_stop(self) -> bool:
        """Whether to stop now: the same answer in every process.

        With several processes all must make the same calls: after a SIGTERM to any of them, JAX's
        preemption service picks a call by its number, and from it on the answer is True in all.
        """
        if not jax.distributed.is_initialized():
            return self.asked
        self.polls += 1
        self.agreed = self.agreed or multihost_utils.reached_preemption_sync_point(self.polls)
        return self.agreed


def hide_late_errors(unraisable):
    """A sys.unraisablehook that hides the hundreds of lines that follow a failed read in orbax."""
    late = "Event loop is closed" in str(unraisable.exc_value)
    if not late and not isinstance(unraisable.object, CoroutineType):
        sys.__unraisablehook__(unraisable)


# What the messages of errors contain after another process of the run is lost.
LOST_PEER = r"Gloo|[Cc]onnection closed by peer|coordination service|heartbeat"
# Packages that raise only when storage still fails after their retries.
STORAGE_PACKAGES = {"gcsfs", "aiohttp", "google", "requests"}


def run_main(main, cfg: Config):
    """Join the other processes and return main(cfg); exit with config.py's codes, 1 for a bug."""
    sys.unraisablehook = hide_late_errors
    again = "run the same command again to resume"
    try:
        start_processes(cfg)
        return main(cfg)
    except UserError as e:
        exit_with(e)
    except KeyboardInterrupt:  # before Stop has replaced the signal's handler
        exit_with(UserError(config.INTERRUPTED, "interrupted", again))
    except Exception as e:  # every error ends the process here: a normal exit could hang
        reason = f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"
        if jax.distributed.is_initialized() and re.search(LOST_PEER, str(e)):
            fix = f"look at that process's log, then {again}, in every process"
            exit_with(UserError(config.DISTRIBUTED, f"a peer process was lost: {reason}", fix))
        if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(e):
            rows = "fewer rows at a time (in training, train.microbatches or train.grad_accum)"
            fix = f"use more devices, {rows}, or train.remat=layer; scripts/plan.py says what fits"
            exit_with(UserError(config.USAGE, f"a device's memory is too small: {reason}", fix))
        if isinstance(e, OSError) or type(e).__module__.split(".")[0] in STORAGE_PACKAGES:
            fix = f"free some space, or fix the storage or the permissions, then {again}"
            exit_with(UserError(config.STORAGE, f"storage failed: {reason}", fix))
        traceback.print_exc()
        exit_with(None)


def exit_with(error: UserError | None):
    """Print the error, if any, and end the process with its code, or with 1.

    At once, because a normal exit waits for lost peers and for failed saves.
    """
    if error is not None:
        print(error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if error is None else error.code)


# ---- the mesh


def start_mesh(cfg: Config, rows: int | None = None) -> Config:
    """Make cfg's mesh the ambient one, and return cfg resolved for it (see checks.resolve)."""
    given = cfg.train
    try:
        on_cpu = jax.devices()[0].platform == "cpu"
        cfg = resolve(cfg, jax.device_count(), rows, on_cpu)
    except RuntimeError as e:
        what = f"JAX has no device: {str(e).splitlines()[0][:200]}"
        fix = "install JAX for the accelerator, or set JAX_PLATFORMS=cpu to simulate the mesh"
        raise UserError(config.USAGE, what, fix) from None
    jax.set_mesh(make_mesh(cfg))
    if cfg.train.dtype == "float32":  # TPUs and GPUs multiply in fewer bits by default
        jax.config.update("jax_default_matmul_precision", "float32")
    if is_lead():  # on stderr, because stdout is for results
        axes = " ".join(f"{axis}={n}" for axis, n in zip(AXES, cfg.mesh.sizes, strict=True))
        devices = f"{math.prod(cfg.mesh.sizes)} x {jax.devices()[0].device_kind}"
        processes = f"{jax.process_count()} process(es) in {time.monotonic() - IMPORTED:.1f} s"
        print(f"mesh: {axes} on {devices}, {processes}", file=sys.stderr, flush=True)
        chosen = [name for name, x in AUTOMATIC.items() if getattr(given, name) == x]
        if chosen and on_cpu and rows is None:
            values = ", ".join(f"train.{name} {getattr(cfg.train, name)}" for name in chosen)
            why = "arrays that fit its caches, and copies or recomputing, whichever is faster"
            print(f"fast on a CPU: {values} ({why})", file=sys.stderr, flush=True)
    return cfg


def make_mesh(cfg: Config) -> jax.sharding.Mesh:
    """The (dp, pp, tp) mesh over all visible devices.  Of fake CPU devices some may stay unused.

    Raises UserError USAGE where there are too few devices, or others would stay idle.
    """
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
    # Puts mesh neighbours next to each other on the chips' network.  That network may have fewer
    # axes than the mesh, so one of them may be split between two mesh axes.
    grid = mesh_utils.create_device_mesh(
        cfg.mesh.sizes, devices[:n], allow_split_physical_axes=True
    )
    return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def shardings(specs):
    """A tree of PartitionSpecs as NamedShardings on the ambient mesh."""
    on_ambient_mesh = partial(NamedSharding, jax.sharding.get_mesh())
    return jax.tree.map(on_ambient_mesh, specs, is_leaf=lambda x: isinstance(x, P))


# ---- compiling


# Options by platform or kind of device, where XLA's defaults are worse.  They were found by
# compiling llama_1b with mesh.dp=8, and have not been timed on a device:
# - gpu: the gathers for a loop's next iteration run during this one (compiled for an H200);
# - TPU v5: with more fast memory (VMEM), matmuls take 12 % fewer cycles by XLA's count on a v5p and
#   8 to 14 % fewer on a v5e (llama3_8b, gpt2_1.5b, qwen3_0.6b).  Compiling takes 1.5 times as long
#   on a v5p, up to twice as long on a v5e;
# - TPU v6e: the SparseCores hide 17 of 18 collectives; by default none is hidden.
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
    """Those of XLA_OPTIONS that the installed XLA accepts and that the user has not set by flags.

    Each is tried on a program of one number.  An unknown option is an error there; in XLA_FLAGS it
    would end the process.
    """
    replicated = NamedSharding(mesh, P())
    number = jax.ShapeDtypeStruct((), np.float32, sharding=replicated)
    program = jax.jit(lambda x: x + 1).lower(number)
    set_by_user = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))

    def is_accepted(name, value) -> bool:
        try:
            program.compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as e:
            if "INVALID_ARGUMENT" not in str(e):
                raise
            if "No such compile option" not in str(e):
                warn(f"XLA does not accept {name}={value}: {str(e).splitlines()[0][:200]}")
            return False
        return True

    device = mesh.devices.flat[0]
    wanted = XLA_OPTIONS.get(device.platform, {}) | XLA_OPTIONS.get(device.device_kind, {})
    wanted = {name: value for name, value in wanted.items() if name not in set_by_user}
    return {name: value for name, value in wanted.items() if is_accepted(name, value)}


def compile_program(step, *args):
    """Compile a jitted function for these arguments on the ambient mesh, with xla_options."""
    return step.lower(*args).compile(compiler_options=xla_options(jax.sharding.get_mesh()))


# ---- peaks and small helpers


# Dense bfloat16 TFLOP/s of a JAX device, from data sheets; a TPU v2, v3 or 7x chip is two devices.
PEAK_TFLOPS = {
    "TPU v2": 22.5, "TPU v3": 61.5, "TPU v4": 275, "TPU v5 lite": 197, "TPU v5e": 197,
    "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU v6e": 918, "TPU7x": 1153.5,
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989, "NVIDIA B200": 2250,
}  # fmt: skip


def peak_flops(cfg: Config) -> float | None:
    """Peak FLOP/s of the mesh; None where it is unknown or the run is not in bfloat16."""
    peak = PEAK_TFLOPS.get(jax.devices()[0].device_kind)
    if peak is None or cfg.train.dtype != "bfloat16":
        return None
    return peak * 1e12 * math.prod(cfg.mesh.sizes)


def format_duration(seconds: float) -> str:
    """5s, 1m05s or 1h01m."""
    h, m, s = int(seconds // 3600), int(seconds // 60 % 60), int(seconds % 60)
    if h > 0:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if m > 0 else f"{s}s"


def finite_or_none(x) -> float | None:
    """x as a float, or None, JSON's null, where it is infinite or NaN."""
    return float(x) if math.isfinite(x) else None


def leaf_table(tree) -> dict:
    """The leaves by path: {"params/layers/q_DHK": leaf}."""
    path_name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
