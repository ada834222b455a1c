"""Will it fit, and how fast can it be: a training step on chips that are not at hand.

    python scripts/plan.py --config llama3_8b --mesh.dp 16 --mesh.tp 4 --topology v5p:4x4x4

All flags of train.py hold too.  Operations and collectives are counted in the jaxpr of the real
step, traced for an abstract mesh; what is alive at once is told from the same jaxpr.
"""

import importlib.util
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints
from unittest import mock

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checks
import cli
import config
from config import USAGE, Config, UserError

GIB = 2**30


class Chip(NamedTuple):
    kind: str
    """Its line in utils.PEAK_TFLOPS."""
    memory: float
    """Bytes that a program may use."""
    hbm: float
    """Bytes per second of that memory."""
    link: float
    """Bytes per second that a device receives in a ring: both directions of a TPU's axis, or all
    of NVLink."""
    clock: float
    """Cycles per second."""


# Memory: what XLA's own message says is left of 16, 32 and 95 GiB; a H200's is its driver's figure.
# Rates: Google Cloud's TPU pages and the "TPU specs" table of the JAX scaling book (Austin et al.
# 2025, chapter 2), NVIDIA's H200 data sheet.
CHIPS = {
    "v4": Chip("TPU v4", 30.75 * GIB, 1.23e12, 0.9e11, 1.05e9),
    "v5e": Chip("TPU v5e", 15.75 * GIB, 0.81e12, 0.9e11, 1.5e9),
    "v5p": Chip("TPU v5p", 95.74 * GIB, 2.77e12, 1.8e11, 1.75e9),
    "v6e": Chip("TPU v6e", 31.25 * GIB, 1.64e12, 1.8e11, 1.75e9),
    "h200": Chip("NVIDIA H200", 140.4 * GIB, 4.8e12, 4.5e11, 1.98e9),
}


@dataclass(frozen=True)
class Args:
    topology: str = ""
    """The target: v5p:4x4x4, v5e:16x16, v6e:.., v4:.., or h200:8."""
    compile: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compile the step for it too, and show XLA's own figures beside the estimate."""
    search: tyro.conf.FlagCreatePairsOff[bool] = False
    """Rank all meshes, microbatches and remat policies of so many chips by predicted step time."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """One JSON object instead of a table."""


def topology(name: str) -> tuple[Chip, int]:
    """The chip and how many of them.  Raises UserError USAGE."""
    chip, _, shape = name.partition(":")
    sizes = shape.split("x")
    if chip not in CHIPS or not all(size.isdecimal() and 0 < int(size) < 10**5 for size in sizes):
        what = f"topology={name!r} is no chip of {config.or_list(CHIPS)} with its shape"
        raise UserError(USAGE, what, "give one such as v5p:4x4x4, v5e:16x16 or h200:8")
    return CHIPS[chip], math.prod(map(int, sizes))


def parse() -> tuple[Args, Config]:
    args, rest = tyro.cli(Args, use_underscores=True, description=__doc__, return_unknown_args=True)
    topology(args.topology)
    # No accelerator is asked, nor the cloud whether this is a TPU's host.
    os.environ |= dict(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    os.environ |= dict(TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")
    return args, cli.parse(rest)


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.mesh_utils import create_device_mesh
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from tqdm import tqdm

import layers
import model
import pipeline
import train
import utils

# ---- the step as a list of operations


class Op(NamedTuple):
    """An equation of a jaxpr, its values by number; a literal is None."""

    eqn: JaxprEqn
    ins: list[int | None]
    outs: list[int]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


class Body(NamedTuple):
    """A jaxpr with its calls inlined; avals are those of the values."""

    ops: list[Op]
    args: list[int]
    results: list[int | None]
    avals: list


OWN = {"scan", "cond", "while", "shard_map", "pallas_call"}  # not inlined: a body run many times


def flat(jaxpr) -> Body:
    """The operations that `jaxpr` comes to; jit, checkpoint and custom derivatives are entered."""
    ops, avals = [], []

    def new(var) -> int:
        avals.append(var.aval)
        return len(avals) - 1

    def walk(jaxpr, args):
        value = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(variables):
            return [None if isinstance(x, Literal) else value[x] for x in variables]

        for eqn in jaxpr.eqns:
            body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if body is None or eqn.primitive.name in OWN:
                outs = [new(x) for x in eqn.outvars]
                ops.append(Op(eqn, read(eqn.invars), outs))
            else:
                body = getattr(body, "jaxpr", body)
                outs = walk(body, [None] * len(body.constvars) + read(eqn.invars))
            value |= zip(eqn.outvars, outs, strict=True)
        return read(jaxpr.outvars)

    args = [new(x) for x in [*jaxpr.constvars, *jaxpr.invars]]
    results = walk(jaxpr, args)
    return Body(ops, args, results, avals)


def size(aval) -> int:
    """Bytes."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def bodies(op: Op) -> list[tuple[Jaxpr, int]]:
    """What an operation runs inside, and how often; of a cond, all branches."""
    p = op.eqn.params
    match op.name:
        case "scan":
            return [(p["jaxpr"].jaxpr, p["length"])]
        case "cond":
            return [(branch.jaxpr, 1) for branch in p["branches"]]
        case "shard_map":
            return [(p["jaxpr"], 1)]
    return []


# ---- operations and communication


@dataclass
class Tally:
    """What one device does in a step."""

    flops: float = 0
    seconds: float = 0
    """Of matmuls, each at the slower of its arithmetic and its traffic with memory."""
    calls: Counter = field(default_factory=Counter)
    moved: Counter = field(default_factory=Counter)
    """Collectives and the bytes they receive, by (operation, axis)."""

    def received(self, axis: str) -> float:
        return sum(n for (_, its), n in self.moved.items() if its == axis)

    def add(self, other: "Tally", n: float):
        self.flops += n * other.flops
        self.seconds += n * other.seconds
        for mine, its in ((self.calls, other.calls), (self.moved, other.moved)):
            mine.update(scaled(its, n))


def flops_of(op: Op, cfg: Config) -> float:
    """Two for each product of a matmul; 0 of all else but attention's kernels."""
    shapes = [x.aval.shape for x in (*op.eqn.invars, *op.eqn.outvars)]
    if op.name == "dot_general":
        (contracted, _), _ = op.eqn.params["dimension_numbers"]
        return 2 * math.prod(shapes[-1]) * math.prod(shapes[0][i] for i in contracted)
    if op.name in KERNELS:
        # Two matmuls forward, and backward five, with the half of the keys that is seen.
        inputs = (x.aval for x in op.eqn.invars)
        q = next(x.shape for x in inputs if jnp.issubdtype(x.dtype, jnp.floating))
        forward = "fwd" in op.eqn.params.get("name", op.name)
        return (2 if forward else 5) * math.prod(q) * (cfg.train.seq_len + 1)
    return 0


ATTENTION = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"  # cuDNN's
KERNELS = {"pallas_call", *ATTENTION}

# A ring of n devices receives (n - 1) / n of the whole array for each of these, each device.
ONCE = {"all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all"}
TWICE = {"psum", "psum_invariant", "pmax", "pmin"}
COLLECTIVES = {*ONCE, *TWICE, "ppermute"}


def received(op: Op, n: int) -> float:
    """Bytes that each of n devices receives."""
    whole = max(sum(size(x.aval) for x in side) for side in (op.eqn.invars, op.eqn.outvars))
    return whole if op.name == "ppermute" else (1 + (op.name in TWICE)) * whole * (n - 1) / n


def count(jaxpr, cfg: Config, chip: Chip, at_work=()) -> Tally:
    """Everything in `jaxpr` as often as it runs on a device, of the first pipeline stage.

    A cond counts as its dearer branch; at_work: of the times that `jaxpr` runs those in which the
    conds in it do work, one after the other.
    """
    total, sizes = Tally(), dict(zip(utils.AXES, cfg.mesh.sizes, strict=True))
    plan, at_work = schedule(cfg), iter(at_work)
    for op in flat(jaxpr).ops:
        if op.name == "cond":
            inside = [count(body, cfg, chip) for body, _ in bodies(op)]
            dearest = max(inside, key=lambda x: x.seconds + x.moved.total() / chip.link)
            total.add(dearest, next(at_work, 1))
        for body, n in bodies(op) if op.name != "cond" else ():
            ticks = op.name == "scan" and n == plan.ticks
            total.add(count(body, cfg, chip, shares(plan) if ticks else ()), n)
        if flops := flops_of(op, cfg):
            traffic = sum(size(x.aval) for x in [*op.eqn.invars, *op.eqn.outvars])
            total.flops += flops
            total.seconds += max(flops / peak(chip), traffic / chip.hbm)
        elif op.name in COLLECTIVES:
            axes = op.eqn.params.get("axes") or op.eqn.params["axis_name"]
            for axis in [axes] if isinstance(axes, str) else axes:
                if sizes[axis] > 1:  # over several axes: one after the other
                    total.calls[op.name, axis] += 1
                    total.moved[op.name, axis] += received(op, sizes[axis])
    return total


def schedule(cfg: Config) -> pipeline.Schedule:
    """That of a pipeline's run; of gpipe there is one for each accumulation slice."""
    slices = 1 if cfg.mesh.schedule == "gpipe" else cfg.train.grad_accum
    return pipeline.make_schedule(cfg, slices * cfg.train.microbatches)


def shares(plan: pipeline.Schedule) -> tuple:
    """Of the ticks those in which a stage begins, goes forward, scores, goes back and finishes, as
    pipeline.run_schedule has them one after the other."""
    works, ends = plan.n / plan.ticks, plan.microbatches / plan.ticks
    return ends, works, ends, works, ends


def scaled(counter: Counter, n: float) -> Counter:
    return Counter({name: n * x for name, x in counter.items()})


def peak(chip: Chip) -> float:
    """FLOP/s in bfloat16; float32 is slower."""
    return utils.PEAK_TFLOPS[chip.kind] * 1e12


# ---- memory

# XLA computes an array where it is used, but for these ones..
STORED = {
    "dot_general", "gather", "scatter", "scatter-add", "sort", "top_k",
    "cumsum", "dynamic_update_slice", "reduce_sum", "reduce_max", "argmax", *COLLECTIVES, *OWN,
    *KERNELS,
}  # fmt: skip
# ..and what these read, or two matmuls: each would compute it.
READERS = {*COLLECTIVES, *OWN, *KERNELS}
# The array they are of, as a rule.
SAME = {"broadcast_in_dim", "name", "pvary", "reshape", "squeeze", "stop_gradient", "transpose"}
IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}


@dataclass
class Array:
    bytes: float
    kind: str
    start: int
    end: int


def carried(op: Op) -> tuple[int, int]:
    """Where a scan's carry begins among its operands, and how many arrays it is: those that have
    as many dims inside as outside, and are not constants."""
    body = bodies(op)[0][0]

    def n_whole(outside, inside) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)

    n = n_whole(op.eqn.outvars, body.outvars)
    return n_whole(op.eqn.invars, body.invars) - n, n


def overwrites(op: Op, avals: list, may_reuse: Callable) -> dict[int, int | None]:
    """{result: the operand that it is written over, if that may be reused}."""
    if op.name in IN_PLACE:
        return {op.outs[0]: op.ins[0]}
    if op.name == "scan":
        first, n = carried(op)
        return dict(zip(op.outs[:n], op.ins[first : first + n], strict=True))
    pairs, free = {}, []
    if op.name == "cond" or op.name not in STORED:  # as a rule of elements in their place
        free = [x for x in op.ins[op.name == "cond" :] if may_reuse(x)]
    for out in op.outs:
        same = (x for x in free if avals[x].shape == avals[out].shape)
        if (x := next((x for x in same if avals[x].dtype == avals[out].dtype), None)) is not None:
            free.remove(x)
            pairs[out] = x
    return pairs


def reads_of(ops: list[Op]) -> Counter:
    """How many matmuls read each value, or it as one of SAME; one of READERS counts as two."""
    reads = Counter()
    for op in reversed(ops):
        for x in {*op.ins}:
            reads[x] += 2 if op.name in READERS else op.name == "dot_general"
            reads[x] += reads[op.outs[0]] if op.name in SAME else 0
    return reads


def kind_of(op: Op, aval, weights: set) -> str:
    """The class of an array that an operation stores, as `memory` has them."""
    if aval.shape in weights:
        if aval.dtype == "float32" or op.name == "scan":
            return "gradients"
        if op.name == "convert_element_type":
            return "weights"
    return "activations" if op.name == "scan" else "workspace"


def alive(jaxpr: Jaxpr, weights: set, held=(), own=()) -> Counter:
    """Bytes by class when most is alive, without the arguments, and the results numbered in `held`,
    which whoever runs `jaxpr` has room for.  Arguments numbered in `own` may be written over.

    An array lives from the operation that stores it to the last one that reads it, through
    whatever is computed between the two.
    """
    ops, args, results, avals = flat(jaxpr)
    last = {x: at for at, op in enumerate(ops) for x in op.ins} | dict.fromkeys(results, len(ops))
    reads = reads_of(ops)
    needs = dict.fromkeys([None, *args], frozenset())  # the arrays behind each value
    arrays, inside, owned = [], [Counter() for _ in range(len(ops) + 1)], {args[i] for i in own}

    def may_reuse(x, at):
        return x in owned and last[x] == at

    for at, op in enumerate(ops):
        behind = frozenset().union(*(needs[x] for x in op.ins))
        # A small piece is kept, not the array it is of.
        piece = 8 * sum(size(avals[x]) for x in op.outs) <= sum(arrays[i].bytes for i in behind)
        kept = op.name in STORED or (op.name == "slice" and piece)
        shared = op.name not in SAME and any(reads[x] > 1 for x in op.outs)
        if not (kept or shared):
            needs |= dict.fromkeys(op.outs, behind)
            if may_reuse(op.ins[0] if op.ins else None, at) and len(op.ins) == 1:
                owned |= {x for x in op.outs if size(avals[x]) == size(avals[op.ins[0]])}
            continue
        for i in behind:
            arrays[i].end = at
        for body, _ in bodies(op):
            here, mine = range(len(body.outvars)), ()  # results with room, and free operands
            if op.name == "scan":
                first, n = carried(op)
                here, mine = here[n:], range(first, first + n)
            elif op.name == "cond":
                mine = [i for i, x in enumerate(op.ins[1:]) if may_reuse(x, at)]
            new = alive(body, weights, here, mine)
            inside[at] = max(inside[at], new, key=Counter.total)
        into = overwrites(op, avals, partial(may_reuse, at=at))
        for x in op.outs:
            if may_reuse(into.get(x), at):
                needs[x] = needs[into[x]]
            else:
                needs[x] = frozenset([len(arrays)])
                away = avals[x].memory_space == jax.memory.Space.Host  # train.remat=offload
                room = 0 if away or x in {results[i] for i in held} else size(avals[x])
                arrays.append(Array(room, kind_of(op, avals[x], weights), at, at))
        owned |= set(op.outs)
    for i in frozenset().union(*(needs[x] for x in results)):
        arrays[i].end = len(ops)
    for at, now in enumerate(inside):
        for a in arrays:
            now[a.kind] += a.bytes * (a.start <= at <= a.end)
    return max(inside, key=Counter.total)


def part(p: layers.Param, sizes: dict) -> tuple[int, ...]:
    """A device's share of a weight; an axis that `sizes` does not name does not spread it."""
    return tuple(n // sizes.get(axis, 1) for n, axis in zip(p.shape, p.spec, strict=True))


def state(cfg: Config) -> dict:
    """Bytes of a device's weights at rest, and of AdamW's two moments of them."""
    sizes = dict(zip(utils.AXES, cfg.mesh.sizes, strict=True))
    table = utils.leaf_table(model.param_table(cfg)).values()
    master = 4 * sum(math.prod(part(p, sizes)) for p in table)
    return dict(weights=master, moments=2 * master)


def memory(jaxpr: Jaxpr, cfg: Config) -> dict:
    """Bytes on a device by class, when most is alive.

    weights: at rest, and casts of them that live then.  gradients: arrays with the shape of a
    device's share of a weight, gathered over dp or not, that are float32 or come from a loop.
    activations: the others that loops hand on, or stack for the backward pass.  workspace:
    everything else, gathered weights too.
    """
    sizes = dict(zip(utils.AXES, cfg.mesh.sizes, strict=True))
    table = utils.leaf_table(model.param_table(cfg)).values()
    shapes = {part(p, of) for p in table for of in (sizes, sizes | dict(dp=1))}
    inside = next(op for op in flat(jaxpr).ops if op.name == "shard_map")
    found = alive(inside.eqn.params["jaxpr"], shapes)
    found.update(state(cfg))  # adds
    return {k: found[k] for k in ("weights", "moments", "gradients", "activations", "workspace")}


# ---- the plan


def as_hopper(chip: Chip):
    """JAX asks the GPU that is present what its cuDNN can do; a plan's is not present."""
    if chip.kind.startswith("TPU"):
        return nullcontext()
    answers = dict(check_cudnn_version=lambda: 91500, check_compute_capability=lambda _: True)
    return mock.patch.multiple("jax._src.cudnn.fused_attention_stablehlo", **answers)


def trace(cfg: Config, chip: Chip) -> Jaxpr:
    """train.train_step on cfg's mesh, which needs no devices, without what it does not use."""
    device = AbstractDevice(chip.kind, None, "tpu" if chip.kind.startswith("TPU") else "gpu")
    axes = dict(axis_types=(AxisType.Auto,) * 3, abstract_device=device)
    mesh = AbstractMesh(cfg.mesh.sizes, utils.AXES, **axes)
    # What the model remarks is not the answer.
    with jax.sharding.use_abstract_mesh(mesh), redirect_stdout(sys.stderr), as_hopper(chip):
        jaxpr = jax.make_jaxpr(partial(train.train_step, cfg=cfg))(*train.step_shapes(cfg)).jaxpr
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def plan(cfg: Config, chip: Chip) -> dict:
    """Everything that the table shows, in bytes, seconds and FLOPs, of one device and one step.

    Of the two step times, in the better one all communication is hidden behind arithmetic (or all
    else behind it), in the other nothing is.  Both have the pipeline's idle ticks, which last as
    long where mesh.skip_bubbles is off.
    """
    t, n = cfg.train, math.prod(cfg.mesh.sizes)
    jaxpr, pipeline = trace(cfg, chip), schedule(cfg)
    done, held = count(jaxpr, cfg, chip), memory(jaxpr, cfg)
    idle = (pipeline.pp - 1) / pipeline.n  # Narayanan et al. 2021, section 2.2
    update = 28 / 8 * held["moments"] / chip.hbm  # AdamW reads p, m, v, g and writes p, m, v
    seconds = dict(matmuls=done.seconds, idle=idle * done.seconds, update=update)
    link = {axis: done.received(axis) / chip.link for axis in utils.AXES}
    compute, tokens = sum(seconds.values()), t.batch_size * t.seq_len
    ideal = model.flops_per_token(cfg) * tokens / n / peak(chip)

    def pace(step_time: float) -> dict:
        per_day = 86400 * tokens / step_time
        return dict(step_time=step_time, mfu=ideal / step_time, tokens_per_day=per_day)

    return dict(
        mesh=dict(zip(utils.AXES, cfg.mesh.sizes, strict=True)),
        microbatches=t.microbatches,
        remat=t.remat,
        parameters=model.param_count(cfg),
        active=model.param_count(cfg, active=True),
        flops_per_token=model.flops_per_token(cfg),
        flops=done.flops,
        bubble=idle / (1 + idle),
        memory=held,
        memory_total=sum(held.values()),
        memory_limit=chip.memory,
        fits=sum(held.values()) <= chip.memory,
        collectives={
            f"{axis} {name}": dict(calls=done.calls[name, axis], bytes=done.moved[name, axis])
            for name, axis in sorted(done.calls, key=lambda x: (utils.AXES.index(x[1]), x[0]))
        },
        seconds=seconds | link,
        best=pace(max(compute, *link.values())),
        worst=pace(compute + sum(link.values())),
    )


def overflow(held: dict, chip: Chip) -> str:
    """The class of memory with which it no longer fits, or nothing."""
    totals = zip(held, accumulate(held.values()), strict=True)
    return next((name for name, total in totals if total > chip.memory), "")


def gib(n: float) -> str:
    return f"{n / GIB:,.2f} GiB"


def xla_rows(found: dict) -> list[tuple[str, str]]:
    if not (xla := found.get("xla")):
        return []
    off = found["memory_total"] / xla["memory"] - 1
    rows = [("  by XLA's account", f"{gib(xla['memory'])}; the estimate is {off:+.1%}")]
    if xla["fusion_seconds"]:
        rows += [("XLA's fusions", f"{1e3 * xla['fusion_seconds']:,.0f} ms, without collectives")]
    return rows + [("compiled in", f"{xla['compile_seconds']:.0f} s")]


def show(found: dict, cfg: Config, topology: str):
    """The table."""
    n, mesh = math.prod(cfg.mesh.sizes), " ".join(f"{k}={v}" for k, v in found["mesh"].items())
    where = f"{topology}: {n} devices, {mesh}, {found['microbatches']} microbatches"
    counted = found["flops"] * n / (cfg.train.batch_size * cfg.train.seq_len)
    ideal, limit = found["flops_per_token"], found["memory_limit"]
    rows = [
        ("target", f"{where}, remat {found['remat']}"),
        ("parameters", f"{found['parameters']:,}, {found['active']:,} active"),
        ("FLOPs per token", f"{ideal:.4g}, and {counted:.4g} with what is recomputed and masked"),
        ("", ""),
        *((name, gib(size)) for name, size in found["memory"].items()),
        ("memory per device", f"{gib(found['memory_total'])} of {gib(limit)}"),
        *xla_rows(found),
        ("", ""),
        *(
            (name, f"{x['calls']:,.0f} calls, {x['bytes'] / 1e6:,.1f} MB")
            for name, x in found["collectives"].items()
        ),
        ("bubble", f"{found['bubble']:.1%}"),
        *((f"{name} time", f"{1e3 * x:,.1f} ms") for name, x in found["seconds"].items()),
        ("", ""),
    ]
    for name, label in (("best", "communication hidden"), ("worst", "nothing hidden")):
        x = found[name]
        pace = f"{1e3 * x['step_time']:,.0f} ms a step, MFU {x['mfu']:.1%}"
        rows += [(label, f"{pace}, {x['tokens_per_day']:.3g} tokens a day")]
    for name, text in rows:
        print(f"{name:22}{text}".rstrip())


# ---- the compiler's own figures

# An H200 for XLA: NVIDIA's data sheet and CUDA's device properties for compute capability 9.0.
H200 = """
platform_name: "CUDA" device_description_str: "NVIDIA H200"
runtime_version { major: 13 } dnn_version_info { major: 9 minor: 15 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000 device_memory_size: 150754820096 l2_cache_size: 62914560
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def target_devices(name: str) -> list:
    """Devices to compile for.  Raises UserError USAGE where what that needs is not installed, or
    there is no such topology."""
    gpu, n = name.startswith("h200"), topology(name)[1]
    needed = {"jax_plugins.xla_cuda13": "cuda13"} if gpu else {"libtpu": "tpu"}
    for module, extra in needed.items():
        if importlib.util.find_spec(module) is None:
            what = f"--compile for {name} needs the package {module}, which is not installed"
            fix = f"pip install 'jax[{extra}]=={jax.__version__}', in an environment of its own"
            raise UserError(USAGE, what, fix)
    try:
        if gpu:
            hosts = f"{-(-n // 8)}x{min(n, 8)}x1"
            options = dict(platform="cuda", target_config=H200, topology=hosts)
            return topologies.get_topology_desc(**options).devices
        # A v4 chip is one device, of two cores, as it is where one is present.
        options = dict(chip_config_name="megacore") if name.startswith("v4") else {}
        return topologies.get_topology_desc(name, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as e:
        what = f"topology={name}: {str(e).splitlines()[0][:200]}"
        raise UserError(USAGE, what, "give the shape of a slice that exists") from None


def compile_step(cfg: Config, name: str, devices: list) -> dict:
    """What XLA says of train.train_step on a topology's devices: seconds to compile, bytes on each,
    and on TPUs the seconds of its fusions.  Raises UserError USAGE where it does not fit."""
    chip, types = topology(name)[0], (AxisType.Auto,) * 3
    shapes, specs = train.step_shapes(cfg), train.step_specs(cfg)  # before JAX meets such devices
    # An axis of the mesh may be a part of one of the torus.
    devices = create_device_mesh(cfg.mesh.sizes, devices, allow_split_physical_axes=True)
    jax.set_mesh(Mesh(devices, utils.AXES, axis_types=types))
    begin = time.monotonic()
    try:
        with as_hopper(chip):
            done = utils.compile_program(
                train.train_step, *train.with_shardings(shapes, specs), cfg
            )
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        what = f"XLA cannot fit the step into {name}: {str(e).splitlines()[0][:300]}"
        raise UserError(USAGE, what, "see what the plan says of memory without --compile") from None
    seconds, used = time.monotonic() - begin, done.memory_analysis()
    cycles = None if name.startswith("h200") else hlo_cycles(done.as_text(), cfg)
    return dict(
        compile_seconds=seconds,
        memory=used.peak_memory_in_bytes,
        arguments=used.argument_size_in_bytes,
        temporary=used.temp_size_in_bytes,
        options=utils.xla_options(jax.sharding.get_mesh()),
        fusion_seconds=cycles and cycles / chip.clock,
    )


def hlo_cycles(text: str, cfg: Config) -> float:
    """XLA's estimated cycles of all fusions of a TPU program, as often as they run; Pallas kernels
    have no estimate."""

    def cycles(line):
        found = re.search(r'"estimated_cycles":"(\d{1,15})"', line)
        return Counter(cycles=int(found[1])) if found else Counter()

    return hlo_total(text, cfg, cycles)["cycles"]


def hlo_total(text: str, cfg: Config, worth: Callable) -> Counter:
    """worth(line), a Counter, of all lines of a compiled program, as often as they run.

    A loop runs as often as the number says that its condition compares with; a conditional counts
    as its dearer branch, in the share of the ticks around it that `count` takes.
    """
    parts = re.split(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", text, flags=re.M)
    lines = dict(zip(parts[1::2], map(str.splitlines, parts[2::2]), strict=True))
    entry, plan = re.search(r"^ENTRY %?([\w.-]+)", text, re.M)[1], schedule(cfg)

    def trips(name: str) -> int:
        inside = [int(n) for line in lines[name] for n in re.findall(r"constant\((\d+)\)", line)]
        called = [x for line in lines[name] for x in re.findall(r"calls=%?([\w.-]+)", line)]
        return max([1, *inside, *map(trips, called)])

    def total(name: str, ticks: bool) -> Counter:
        at_work = iter(shares(plan) if ticks else ())
        sums = Counter()
        for line in lines[name]:
            sums.update(worth(line))
            if found := re.search(r"while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)", line):
                n = trips(found[1])
                sums.update(scaled(total(found[2], n == plan.ticks), n))
            if " conditional(" in line:
                form = r"(?:true|false)_computation=%?([\w.-]+)|branch_computations=\{(.*?)\}"
                names = " ".join(a or b for a, b in re.findall(form, line))
                inside = [total(x, False) for x in re.findall(r"[\w.-]+", names)]
                sums.update(scaled(max(inside, key=Counter.total), next(at_work, 1)))
            if found := re.search(r" call\(.*to_apply=%?([\w.-]+)", line):
                sums.update(total(found[1], ticks))
        return sums

    return total(entry, False)


# ---- search


def choices(cfg: Config, n: int):
    """(config, None) for each mesh of n devices, microbatches and remat, or (None, why not)."""
    policies = get_args(get_type_hints(config.Train)["remat"])
    for dp in checks.divisors(n):
        for pp in checks.divisors(n // dp):
            sizes = dict(dp=dp, pp=pp, tp=n // dp // pp)
            one = replace(cfg, mesh=replace(cfg.mesh, **sizes))
            one = replace(one, train=replace(one.train, microbatches=0, remat="layer"))
            try:
                checks.check(one)
            except UserError as e:
                yield None, e.problems[0].what
                continue
            rows = cfg.train.batch_size // (cfg.train.grad_accum * dp)
            for microbatches in (m for m in checks.divisors(rows) if m % pp == 0):
                for remat in (r for r in policies if r != "offload" or pp == 1):
                    fields = dict(microbatches=microbatches, remat=remat)
                    yield replace(one, train=replace(one.train, **fields)), None


def search(cfg: Config, chip: Chip, n: int) -> dict:
    """All plans that fit, the fastest first, and how many do not, by reason.

    Ranked by the step time with nothing hidden: XLA's TPU programs wait for most of a layer's
    collectives.
    """
    found, out, legal = [], Counter(), []
    for one, why in choices(cfg, n):
        if why:
            out[re.sub(r" ?=[0-9*= ]+must", " must", why)] += 1
        else:
            legal.append(one)
    for one in tqdm(legal, desc="search", unit="plan", leave=False):
        name = overflow(state(one), chip)  # which takes no trace
        new = None if name else plan(one, chip)
        if name := name or overflow(new["memory"], chip):
            out[f"{name} overflow"] += 1
        else:
            found.append(new)
    return dict(plans=sorted(found, key=lambda x: x["worst"]["step_time"]), out=dict(out))


def show_search(found: dict):
    heads = ("dp", "pp", "tp", "microbatches", "remat", "GiB", "ms hidden", "ms not", "MFU")
    print("".join(f"{head:>13}" for head in heads))
    for x in found["plans"][:20]:
        times = (f"{1e3 * x[k]['step_time']:,.0f}" for k in ("best", "worst"))
        size, mfu = f"{x['memory_total'] / GIB:.1f}", f"{x['worst']['mfu']:.1%}"
        row = (*x["mesh"].values(), x["microbatches"], x["remat"], size, *times, mfu)
        print("".join(f"{cell:>13}" for cell in row))
    print(f"{len(found['plans'])} fit.  Out:")
    for why, times in sorted(found["out"].items(), key=lambda x: -x[1]):
        print(f"{times:>6}  {why}")


def main():
    """Print a plan, or all of them, or raise UserError USAGE where none fits."""
    chip, n = topology(ARGS.topology)
    if ARGS.search:
        found = search(CFG, chip, n)
        print(json.dumps(found)) if ARGS.json else show_search(found)
        if not found["plans"]:
            what = f"no plan fits {ARGS.topology}"
            raise UserError(USAGE, what, "take more chips, or mend what they are out for")
        return
    cfg = checks.resolve(CFG, n)
    if math.prod(cfg.mesh.sizes) != n:
        product = "mesh.dp*mesh.pp*mesh.tp = {}*{}*{}".format(*cfg.mesh.sizes)
        what = f"{product} = {math.prod(cfg.mesh.sizes)}, but {ARGS.topology} has {n} devices"
        raise UserError(USAGE, what, f"choose axes whose product is {n} (one axis may be -1)")
    devices = target_devices(ARGS.topology) if ARGS.compile else []
    found = plan(cfg, chip)
    if devices:
        found["xla"] = compile_step(cfg, ARGS.topology, devices)
    print(json.dumps(found)) if ARGS.json else show(found, cfg, ARGS.topology)
    if not found["fits"] and not devices:
        need, limit = found["memory_total"], found["memory_limit"]
        name = overflow(found["memory"], chip)
        what = f"{name} overflow: {gib(need)} are needed on a device, and there are {gib(limit)}"
        raise UserError(USAGE, what, "see what fits with --search, or take more chips")


if __name__ == "__main__":
    cli.quit_on_error(main)
