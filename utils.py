"""Exchange between processes, the mesh and its devices, compiling, and small helpers.

How processes meet is in connect.py, how they stop and fail in processes.py; files and folders are
in files.py.
"""

import errno
import json
import logging
import math
import os
import re
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from checks import AUTOMATIC, cpu_reasons, resolve
from chips import PEAK_TFLOPS, chip_of
from cli import call_within
from config import SLICE, Config
from errors import STORAGE, USAGE, UserError, describe, is_storage_error, or_list
from files import make_private_folder
from signals import discard

for package in ("absl", "asyncio"):  # they log tracebacks of errors that they also raise
    logging.getLogger(package).setLevel(logging.CRITICAL)

AXES = ("dp", "pp", "tp")
BATCH = ("dp", "pp")
"""The mesh axes over which the tokens of a batch are stored, besides that of the slices."""
STAGE = ("dp", "tp")
"""The mesh axes of the devices of one pipeline stage, besides that of the slices."""
GPUS = "gpu", "cuda"
"""The platforms that `platform` may return for an NVIDIA GPU."""
IMPORTED = time.monotonic()  # before the processes meet and JAX looks for devices


# ---- processes


def process_id() -> int:
    """The id of this process; unlike jax.process_index it does not look for devices."""
    return distributed.global_state.process_id


def process_ids() -> range:
    """The ids of all processes."""
    return range(distributed.global_state.num_processes or 1)


def is_lead() -> bool:
    """Whether this is process 0, the one that prints and writes files."""
    return process_id() == 0


on_lost_reader = None
"""A function that training sets, to be called when nothing reads stdout or stderr any more: Ctrl-C
in `train.py | tee log` ends tee too."""


def say(*words, file=None):
    """Print from process 0, without buffering.  file: sys.stderr, or None for stdout."""
    if is_lead():
        try:
            print(*words, file=file, flush=True)
        except OSError as e:
            if on_lost_reader is None:
                raise
            # EIO: the terminal was closed, and SIGHUP is on its way.  A full disk may recover.
            if e.errno in (errno.EPIPE, errno.EIO):
                discard((file or sys.stdout).fileno())
                on_lost_reader()


def warn(text: str):
    """Print a warning on stderr, from process 0."""
    say(f"warning: {text}", file=sys.stderr)


warn_once = cache(warn)


@contextmanager
def only_warn(what: str):
    """Turn an error of the block into a warning, whatever its type."""
    try:
        yield
    except Exception as e:  # storage and many packages raise types of their own
        warn(f"{what} ({describe(e)})")


@contextmanager
def say_time(what: str):
    """Say how long the block took."""
    begin = time.monotonic()
    yield
    say(f"{what} in {time.monotonic() - begin:.1f} s")


EXCHANGES = count()
"""Gives each exchange a number, the same in every process: all make the same exchanges in order."""


def shared_store():
    """JAX's key-value store, which all processes share.  jax has no public name for it."""
    return distributed.global_state.client


def exchange(value) -> list:
    """The values of all processes, in the order of their ids (tuples become lists); every
    process calls this at the same point.

    They go through the key-value store and not over the mesh, which can be used only once all
    processes are known to have the same one.
    """
    text = json.dumps(value)
    if len(process_ids()) == 1:
        return [json.loads(text)]
    name = f"trifold/exchange/{next(EXCHANGES)}"
    shared_store().key_value_set(f"{name}/{process_id()}", text)
    shared_store().wait_at_barrier(name, 24 * 3600 * 1000)  # ms; a Watchdog gives up sooner
    answers = shared_store().key_value_dir_get(name)
    values = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in answers}
    return [values[n] for n in process_ids()]


def run_on_each(f, *args):
    """f(*args), called in every process.  An error in one of them is raised in all."""
    result = error = answer = None
    try:
        result = f(*args)
    except UserError as e:
        error, answer = e, (e.code, e.problems[0].what)
    except Exception as e:  # raised again below
        code = STORAGE if is_storage_error(e) else 1
        error, answer = e, (code, f"{type(e).__name__}: {e}")
    answers = exchange(answer)
    if error is not None:
        raise error
    for n, answer in enumerate(answers):
        if answer:
            code, what = answer
            raise UserError(code, f"process {n} stopped: {what}", "see the output of that process")
    return result


def run_on_lead(f, *args):
    """f(*args) on process 0, None on the others.  An error on process 0 is raised in all."""
    return run_on_each(f if is_lead() else lambda *_: None, *args)


def all_agree(ok: bool) -> bool:
    """Whether ok is true in every process."""
    return all(exchange(bool(ok)))


def wait_for(tree):
    """With several processes, wait until all devices of this one have computed their shards of the
    arrays, and return the arrays.

    Raises as soon as one has failed.  When a peer process is lost, only the devices that talk to it
    fail at once: blocking on a shard of another device would last until JAX gives up on the peer
    and aborts this process, 100 s later.  So this polls all of them.
    """

    def is_pending(x) -> bool:
        if is_ready := x.is_ready():
            x.block_until_ready()  # raises if it has failed
        return not is_ready

    if jax.process_count() > 1:
        shards = [shard.data for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
        while shards := [x for x in shards if is_pending(x)]:
            time.sleep(0.001)
    return tree


def host_rows(x) -> np.ndarray:
    """The rows [row, last dim] of an array that is sharded over the mesh, in every process."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True)).reshape(-1, x.shape[-1])


# ---- the mesh


def start_mesh(cfg: Config, rows: int | None = None, plan_remat=None) -> Config:
    """Make cfg's mesh the ambient one, and return cfg resolved for it (see resolve_here).  Also
    sets JAX up for the run: the compile cache, numbers of 32 bits, the precision of matmuls."""
    given, kind = cfg.train, find_devices()[0].device_kind
    if cfg.run.compile_cache:
        keep_programs(cfg.run.compile_cache)
    if jax.config.jax_enable_x64:
        warn("JAX_ENABLE_X64 is turned off: runs compute in float32 or bfloat16")
        jax.config.update("jax_enable_x64", False)
    cfg = resolve_here(cfg, rows, plan_remat)
    jax.set_mesh(make_mesh(cfg))
    if cfg.train.dtype == "float32":  # TPUs and GPUs multiply in fewer bits by default
        jax.config.update("jax_default_matmul_precision", "float32")
    devices = f"{math.prod(cfg.mesh.sizes)} x {kind}"
    processes = f"{jax.process_count()} process(es) in {time.monotonic() - IMPORTED:.1f} s"
    say(f"mesh: {cfg.mesh} on {devices}, {processes}", file=sys.stderr)  # stdout is for results
    chosen = [name for name, x in AUTOMATIC.items() if getattr(given, name) == x]
    if chosen and plan_remat:  # the others do not train
        why = {name: f" ({x})" for name, x in cpu_reasons(cfg).items()} if kind == "cpu" else {}
        values = [f"train.{name} {getattr(cfg.train, name)}{why.get(name, '')}" for name in chosen]
        say(f"chosen for {'a CPU' if why else kind}: {', '.join(values)}", file=sys.stderr)
    return cfg


def find_devices() -> list:
    """JAX's devices, of all processes.  Raises UserError USAGE if there are none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as e:  # the latter where a platform's plugin is missing
        platforms = os.environ.get("JAX_PLATFORMS", "")
        why = str(e).splitlines()[0][:200] if str(e) else f"none for JAX_PLATFORMS={platforms}"
        fix = "install JAX for the accelerator, or set JAX_PLATFORMS=cpu to simulate the mesh"
        if "gloo" in why:  # connects the processes of a CPU at the addresses of their hosts' names
            fix = "let this host look up its own name, by a line in /etc/hosts"
        raise UserError(USAGE, f"JAX has no device: {why}", fix) from None


def resolve_here(cfg: Config, rows: int | None = None, plan_remat=None) -> Config:
    """cfg resolved for the devices of all processes (see checks.resolve).  plan_remat(cfg, kind of
    device): chooses an automatic train.remat on accelerators (see train.plan_remat)."""
    devices, is_auto = jax.devices(), cfg.train.remat == "auto"
    on_cpu = devices[0].platform == "cpu"
    cfg = resolve(cfg, len(devices), rows, on_cpu, count_slices(devices))
    if plan_remat and is_auto and not on_cpu:
        remat = plan_remat(cfg, devices[0].device_kind)
        cfg = replace(cfg, train=replace(cfg.train, remat=remat))
    return cfg


def make_mesh(cfg: Config) -> jax.sharding.Mesh:
    """The (dp, pp, tp) mesh over all visible devices.  Some simulated devices may stay unused.

    Raises UserError USAGE where there are too few devices, or others would stay idle.
    """
    n, devices = math.prod(cfg.mesh.sizes), jax.devices()
    product = "mesh.dp*mesh.pp*mesh.tp = {}*{}*{}".format(*cfg.mesh.sizes)
    found = f"{len(devices)} {devices[0].device_kind} device(s) are visible"
    fix = f"choose axes whose product is {len(devices)} (one axis may be -1), or "
    if n > len(devices):
        is_simulated = devices[0].platform == "cpu"
        again = "start Python again with this mesh, without JAX_NUM_CPU_DEVICES and XLA_FLAGS"
        other = "simulate the mesh on this host's CPU with JAX_PLATFORMS=cpu"
        fix += again if is_simulated else other
        raise UserError(USAGE, f"{product} = {n} but only {found}", fix)
    if n < len(devices) and (devices[0].platform != "cpu" or jax.process_count() > 1):
        fix += "hide the others from JAX"
        raise UserError(USAGE, f"{product} = {n} would leave some idle: {found}", fix)
    return mesh_of(devices[:n], cfg)


def mesh_of(devices: list, cfg: Config) -> jax.sharding.Mesh:
    """The mesh of cfg over these devices, of which there must be as many as it needs.  Its slices
    are the devices' own; for devices in one slice, and for GPUs, equal parts of the list.

    Raises UserError USAGE where TPUs are in other slices than the mesh.
    """
    found, wanted, shape = count_slices(devices), cfg.mesh.slices, cfg.mesh.shape
    sizes = tuple(shape.values())
    # Puts mesh neighbours next to each other on the chips' network.  That network may have fewer
    # axes than the mesh, so one of them may be split between two mesh axes.
    split = dict(allow_split_physical_axes=True)
    if found > 1 and found == wanted:
        inside, between = (1, *sizes[1:]), (wanted, 1, 1, 1)
        grid = mesh_utils.create_hybrid_device_mesh(inside, between, devices, **split)
    elif found > 1 and devices[0].platform == "tpu":
        what = f"mesh.dp={cfg.mesh.dp} has {wanted} slice(s), but the devices are in {found}"
        fix = f"set --mesh.dp {found}x{len(devices) // found}, or less with --mesh.pp or --mesh.tp"
        raise UserError(USAGE, what, fix)
    else:  # GPUs and CPUs stay in their order, which is by node
        grid = mesh_utils.create_device_mesh(sizes, devices, **split)
    return jax.sharding.Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def count_slices(devices: list) -> int:
    """How many slices (of TPUs) or nodes (of GPUs) these devices are in; the network inside each is
    fast.  XLA numbers both; CPUs are one group.

    Raises UserError USAGE where the groups have different sizes.
    """
    sizes = Counter(getattr(device, "slice_index", 0) for device in devices).values()
    if len({*sizes}) > 1:
        what = f"the slices or nodes have {or_list([*sizes])} devices, not equally many"
        raise UserError(USAGE, what, "leave devices out, so that all have the same number")
    # GPU nodes of one device have no fast network to keep apart.
    nodes_of_one = devices[0].platform == "gpu" and {*sizes} == {1}
    return 1 if nodes_of_one else len(sizes)


def with_slices(*axes: str) -> tuple[str, ...]:
    """(SLICE, *axes) if the ambient mesh has a SLICE axis, otherwise axes."""
    return (SLICE, *axes) if SLICE in jax.sharding.get_abstract_mesh().axis_names else axes


def platform() -> str:
    """The platform of the ambient mesh's devices, which may be present or only planned for."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def compute_capability() -> float:
    """The CUDA compute capability of the ambient mesh's devices: for a GPU of chips.py the one
    given there, for others that of JAX's first device.  0 for devices that have none, and for
    AMD GPUs, where it is a name."""
    chip = chip_of(jax.sharding.get_abstract_mesh().abstract_device.device_kind)
    if chip and chip.gpu:
        return chip.gpu.capability
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0


def shardings(specs):
    """A tree of PartitionSpecs as NamedShardings on the ambient mesh."""
    return jax.tree.map(partial(NamedSharding, jax.sharding.get_mesh()), specs)


def put_on_mesh(x: np.ndarray, spec: P) -> jax.Array:
    """An array that every process has, on the ambient mesh."""
    return jax.make_array_from_callback(x.shape, shardings(spec), x.__getitem__)


# ---- compiling


def keep_programs(folder: str):
    """Let JAX keep every compiled program in a folder, and take it from there when the same one is
    to be compiled again.  Raises UserError USAGE where others can write to the folder."""
    folder = make_private_folder(folder, "run.compile_cache")
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Options by platform or kind of device, where XLA's defaults are worse.  They were found by
# compiling llama_1b with mesh.dp=8, and have not been timed on a device:
# - gpu: the gathers for a loop's next iteration run during this one (compiled for an H200).  With
#   mesh.tp that is left out (see xla_options);
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

    With mesh.tp the option for gathers is left out, because with it XLA copies what waits for the
    backward pass: on H200s llama_1b with dp 2 and tp 4 would need 38 GiB instead of 28, and 78
    instead of 30 with tp 8, remat=attention and 64 rows of 4,096 tokens.
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
    if mesh.shape["tp"] > 1:
        wanted.pop("xla_gpu_enable_pipelined_all_gather", None)
    return {n: x for n, x in wanted.items() if n not in set_by_user and is_accepted(n, x)}


def compile_program(step, *args, times: bytes = b""):
    """Compile a jitted function for these arguments on the ambient mesh, with xla_options.  times:
    see profiling.Profile.learned_times.

    In a thread, because Python handles signals only between the main thread's own instructions, and
    compiling may take minutes.  (In a notebook it goes on in the background after an interrupt.)
    """
    options = xla_options(jax.sharding.get_mesh()) | (dict(fdo_profile=times) if times else {})
    return call_within(None, partial(step.lower(*args).compile, compiler_options=options))


# ---- small helpers


def peak_flops(cfg: Config) -> float | None:
    """Peak FLOP/s of the mesh; None where it is unknown or the run is not in bfloat16."""
    peak = PEAK_TFLOPS.get(jax.devices()[0].device_kind)
    if peak is None or cfg.train.dtype != "bfloat16":
        return None
    return peak * 1e12 * math.prod(cfg.mesh.sizes)


def free_memory() -> int | None:
    """Bytes of this host's memory that are free, but at most the limit of a container; None where
    the system does not say, as macOS."""
    paths = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    host, limit = (path.read_text() if path.exists() else "" for path in paths)
    sizes = [1024 * int(n) for n in re.findall(r"MemAvailable: +(\d+)", host)]
    return min([*sizes, *map(int, re.findall(r"^\d+", limit))], default=None)


def format_bytes(n: int) -> str:
    return f"{n / 2**30:,.2f} GiB" if n >= 2**30 else f"{n / 2**20:,.1f} MiB"


def format_duration(seconds: float) -> str:
    """5s, 1m05s or 1h01m."""
    h, m, s = int(seconds // 3600), int(seconds // 60 % 60), int(seconds % 60)
    if h > 0:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if m > 0 else f"{s}s"


def finite_or_none(x) -> float | None:
    """x as a float, or None, JSON's null, where it is infinite or NaN."""
    return float(x) if math.isfinite(x) else None


path_name = partial(jax.tree_util.keystr, simple=True, separator="/")
"""params/layers/q_DHK: a JAX key path as text."""


def leaf_table(tree) -> dict:
    """The leaves by path: {"params/layers/q_DHK": leaf}."""
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
