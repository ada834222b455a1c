"""Small things that are not maths: processes, the mesh, compiling, peaks, files."""

import logging
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from functools import partial
from itertools import compress
from types import CoroutineType

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import config
from checks import resolve
from config import Config, UserError

for noisy in ("absl", "asyncio", "gcsfs"):  # they log what they also raise, with tracebacks
    logging.getLogger(noisy).setLevel(logging.CRITICAL)


AXES = ("dp", "pp", "tp")


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


def wait_for(tree):
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
    """Make cfg's mesh the ambient one and return cfg resolved for it; rows as in resolve."""
    try:
        cfg = resolve(cfg, jax.device_count(), rows)
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
        exit_with(e)
    except KeyboardInterrupt:  # before Stop takes it
        exit_with(UserError(config.INTERRUPTED, "interrupted", again))
    except Exception as e:
        reason = f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"
        if jax.distributed.is_initialized() and re.search(LOST_PEER, str(e)):
            fix = f"look at that process's log, then {again}, everywhere"
            exit_with(UserError(config.DISTRIBUTED, f"a peer process was lost: {reason}", fix))
        if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(e):
            rows = "fewer rows at a time (in training, train.microbatches or train.grad_accum)"
            fix = f"take more devices, {rows}, or train.remat=layer; scripts/plan.py says what fits"
            exit_with(UserError(config.USAGE, f"a device's memory is too small: {reason}", fix))
        if isinstance(e, OSError) or type(e).__module__.split(".")[0] in CLOUD:
            fix = f"make room, or mend the storage or the permissions, then {again}"
            exit_with(UserError(config.STORAGE, f"storage failed: {reason}", fix))
        traceback.print_exc()
        exit_with(None)


def exit_with(error: UserError | None):
    """Print the error and exit at once: a normal exit waits for lost peers and for failed saves."""
    if error:
        print(error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if error else 1)


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


def compile_program(step, *args):
    """The program of a jitted function for such arguments, on the ambient mesh."""
    return step.lower(*args).compile(compiler_options=xla_options(jax.sharding.get_mesh()))


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


def format_duration(seconds: float) -> str:
    h, m, s = int(seconds // 3600), int(seconds // 60 % 60), int(seconds % 60)
    return f"{h}h{m:02d}m" if h else f"{m}m{s:02d}s" if m else f"{s}s"


def finite_or_none(x) -> float | None:
    return float(x) if math.isfinite(x) else None


def leaf_table(tree) -> dict:
    """{"params/layers/q_DHK": leaf}"""
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): x for path, x in jax.tree.leaves_with_path(tree)}
