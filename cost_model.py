"""What a training step costs one device, counted in the step's jaxpr: FLOPs, seconds of matmuls,
bytes of collectives, and the memory in use at once.  Nothing is compiled or run.

scripts/compiled_cost.py has the figures of XLA's compiler; scripts/plan.py turns these costs into
a plan.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import checks
import gradient
import model
import pipeline
import runstate
import utils
from chips import Chip
from config import Config

# ---- the step as a list of operations


@contextmanager
def assume_gpu(chip: Chip):
    """A context in which JAX uses the kernels of a GPU if `chip` is one, also on a machine without
    such a GPU.

    Otherwise JAX would ask a local GPU for its compute capability, its cuDNN version and its cores.
    This replaces the two private functions that ask for the capability and the version.  For the
    cores it replaces `jax` in the module of the kernel that asks.  Tested with jax 0.10.2 and
    0.12.0.1.
    """
    if chip.gpu is None or jax.local_devices()[0].device_kind == chip.kind:
        yield
        return
    attention = "jax._src.cudnn.fused_attention_stablehlo"
    answers = dict(check_cudnn_version=lambda: 91500, check_compute_capability=lambda _: True)
    experts = "jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu.jax"
    absent = vars(jax) | dict(devices=lambda: [SimpleNamespace(core_count=chip.gpu.cores)])
    with mock.patch.multiple(attention, **answers), mock.patch(experts, SimpleNamespace(**absent)):
        yield


def drop_unused(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without operations whose results nothing uses.

    JAX does not document dce_jaxpr; tested with jax 0.10.2 and 0.12.0.1.
    """
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


@contextmanager
def absent_mesh(cfg: Config, chip: Chip):
    """In its block the ambient mesh is cfg's of such chips, which need not be present."""
    shape, device = cfg.mesh.shape, AbstractDevice(chip.kind, None, chip.platform)
    axes = dict(axis_types=(AxisType.Auto,) * len(shape), abstract_device=device)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), **axes)
    # A notebook may have a mesh, which JAX would not replace by one of another size.
    with jax.set_mesh(None), jax.sharding.use_abstract_mesh(mesh):
        yield


def trace_step(step_jaxpr: Callable, cfg: Config, chip: Chip) -> Jaxpr:
    """step_jaxpr(cfg) on cfg's mesh of such chips, which need not be present.  step_jaxpr:
    train.step_jaxpr, which train.py passes on, because it imports this module."""
    # The model may print warnings while it is traced; stdout is for the plan.
    with absent_mesh(cfg, chip), redirect_stdout(sys.stderr), assume_gpu(chip):
        return drop_unused(step_jaxpr(cfg))


class Op(NamedTuple):
    """An equation of a jaxpr; `inputs` and `outputs` are indices in FlatJaxpr.avals, or None for a
    literal."""

    eqn: JaxprEqn
    inputs: list[int | None]
    outputs: list[int]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


class FlatJaxpr(NamedTuple):
    """A jaxpr with its calls inlined; value n has the type avals[n]."""

    ops: list[Op]
    arguments: list[int]
    results: list[int | None]
    avals: list


# These are not inlined: their bodies may run many times or never, or on a device's part of arrays.
HAVE_BODIES = {"scan", "cond", "while", "shard_map", "pallas_call", "mpmd_map"}

# The parameters in which operations keep the jaxpr that they call; "call" is custom_vmap's.
CALLED = "jaxpr", "call_jaxpr", "call"


def flatten(jaxpr: Jaxpr) -> FlatJaxpr:
    """The operations of `jaxpr`, with those inside jit, checkpoint and custom derivatives."""
    ops, avals = [], []

    def add_value(var) -> int:
        avals.append(var.aval)
        return len(avals) - 1

    def inline(called, inputs) -> list[int | None]:
        values = dict(zip([*called.constvars, *called.invars], inputs, strict=True))

        def read(variables):
            return [None if isinstance(x, Literal) else values[x] for x in variables]

        for eqn in called.eqns:
            body = next((eqn.params[x] for x in CALLED if eqn.params.get(x)), None)
            if body is None or eqn.primitive.name in HAVE_BODIES:
                outputs = [add_value(x) for x in eqn.outvars]
                ops.append(Op(eqn, read(eqn.invars), outputs))
            else:
                body = getattr(body, "jaxpr", body)
                outputs = inline(body, [None] * len(body.constvars) + read(eqn.invars))
            values |= zip(eqn.outvars, outputs, strict=True)
        return read(called.outvars)

    arguments = [add_value(x) for x in [*jaxpr.constvars, *jaxpr.invars]]
    results = inline(jaxpr, arguments)
    return FlatJaxpr(ops, arguments, results, avals)


def n_bytes(aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def bodies(op: Op) -> list[tuple[Jaxpr, int]]:
    """The jaxprs inside an operation, each with the number of times it runs; all branches of a
    cond."""
    params = op.eqn.params
    match op.name:
        case "scan":
            return [(params["jaxpr"].jaxpr, params["length"])]
        case "cond":
            return [(branch.jaxpr, 1) for branch in params["branches"]]
        case "shard_map":
            return [(params["jaxpr"], 1)]
    return []


# ---- FLOPs and communication


@dataclass
class Cost:
    """What one device does in a step."""

    flops: float = 0
    matmul_seconds: float = 0
    """Each matmul at the slower of its arithmetic and its memory traffic."""
    kernel_seconds: float = 0
    """The part of matmul_seconds in kernels."""
    calls: Counter = field(default_factory=Counter)
    """Collectives, by (operation, axis)."""
    received: Counter = field(default_factory=Counter)
    """Bytes that the device receives in collectives, by (operation, axis)."""

    def received_over(self, axis: str) -> float:
        return sum(n for (_, over), n in self.received.items() if over == axis)

    def add(self, other: "Cost", times: float):
        self.flops += times * other.flops
        self.matmul_seconds += times * other.matmul_seconds
        self.kernel_seconds += times * other.kernel_seconds
        self.calls.update(scale(other.calls, times))
        self.received.update(scale(other.received, times))


def scale(counter: Counter, times: float) -> Counter:
    return Counter({name: times * x for name, x in counter.items()})


ATTENTION_BACKWARD = "dot_product_attention_bwd_wrapper"  # cuDNN's
KERNELS = {"pallas_call", "mpmd_map", "dot_product_attention_fwd_wrapper", ATTENTION_BACKWARD}

# In a ring of n devices, each device receives (n - 1) / n of the whole array in every round.
ROUNDS = dict(all_gather=1, all_gather_invariant=1, reduce_scatter=1, all_to_all=1)
ROUNDS |= dict(psum=2, psum_invariant=2, pmax=2, pmin=2)
COLLECTIVES = {*ROUNDS, "ppermute"}


def count_flops(op: Op, cfg: Config) -> float:
    """Two FLOPs per multiply-add of a matmul or a kernel; 0 for everything else."""
    shapes = [x.aval.shape for x in (*op.eqn.invars, *op.eqn.outvars)]
    if op.name == "dot_general":
        (contracted, _), _ = op.eqn.params["dimension_numbers"]
        return 2 * math.prod(shapes[-1]) * math.prod(shapes[0][i] for i in contracted)
    if estimate := op.eqn.params.get("cost_estimate"):  # of a Pallas kernel; splash has none
        return estimate.flops
    if op.name == "mpmd_map":  # a Pallas kernel for GPUs; ours multiply experts, see grouped.py
        inputs = [x.aval for x in op.eqn.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)]
        return 2 * inputs[0].size * shapes[-1][-1]
    if op.name in KERNELS:
        # Attention: two matmuls forward and five backward, with as many keys as a query sees in the
        # mean over the layers.  Three of the seven have the width of a value head.
        inputs = (x.aval for x in op.eqn.invars)
        q, _, v = [x.shape for x in inputs if jnp.issubdtype(x.dtype, jnp.floating)][:3]
        forward = "fwd" in op.eqn.params.get("name", op.name)
        widths = q[-1] + v[-1] if forward else 3 * q[-1] + 2 * v[-1]
        return 2 * math.prod(q[:-1]) * widths * model.mean_keys(cfg)
    return 0


def received_bytes(op: Op, n: int) -> float:
    """Bytes that each of n devices receives in a collective."""
    whole = max(sum(n_bytes(x.aval) for x in side) for side in (op.eqn.invars, op.eqn.outvars))
    if op.name == "ppermute":
        return whole
    return ROUNDS[op.name] * whole * (n - 1) / n


def count_cost(jaxpr: Jaxpr, cfg: Config, chip: Chip, busy_shares=()) -> Cost:
    """What `jaxpr` costs a device of the first pipeline stage; a loop's body counts once per
    iteration.

    A cond counts as its more expensive branch.  busy_shares: for each cond of `jaxpr`, in
    order, the share of runs in which that branch is taken; conds without a share count fully.
    """
    total, sizes, shares = Cost(), cfg.mesh.shape, iter(busy_shares)
    for op in flatten(jaxpr).ops:
        if op.name == "cond":
            branches = [count_cost(body, cfg, chip) for body, _ in bodies(op)]
            slowest = max(branches, key=lambda x: x.matmul_seconds + x.received.total() / chip.link)
            total.add(slowest, next(shares, 1))
            continue
        for body, n in bodies(op):
            total.add(count_cost(body, cfg, chip, work_shares(n, cfg)), n)
        if flops := count_flops(op, cfg):
            traffic = sum(n_bytes(x.aval) for x in [*op.eqn.invars, *op.eqn.outvars])
            seconds = max(flops / chip.flops, traffic / chip.hbm)
            total.flops += flops
            total.matmul_seconds += seconds
            total.kernel_seconds += seconds * (op.name in KERNELS)
        elif op.name in COLLECTIVES:
            axes = op.eqn.params.get("axes") or op.eqn.params["axis_name"]
            for axis in [axes] if isinstance(axes, str) else axes:
                if sizes[axis] > 1:  # several axes count one after the other
                    total.calls[op.name, axis] += 1
                    total.received[op.name, axis] += received_bytes(op, sizes[axis])
    return total


def step_schedule(cfg: Config) -> pipeline.Schedule:
    """The schedule of one pipeline loop; gpipe runs a loop for each accumulation step."""
    steps = 1 if cfg.mesh.schedule == "gpipe" else cfg.train.grad_accum
    return pipeline.make_schedule(cfg, steps * cfg.train.microbatches)


def work_shares(n: int, cfg: Config) -> tuple:
    """The shares of the pipeline's ticks in which a stage does each kind of work, in the order of
    pipeline.run_schedule: begin, forward, score, backward, finish.  A loop is taken for the
    pipeline's if its n iterations are as many as the ticks; () for another."""
    schedule = step_schedule(cfg)
    if n != schedule.ticks:
        return ()
    layers, ends = schedule.items / schedule.ticks, schedule.microbatches / schedule.ticks
    return ends, layers, ends, layers, ends


# ---- memory

# XLA writes to memory what these operations read.  It also writes a value that two matmuls read, so
# that it is computed only once.
READ_FROM_MEMORY = {*COLLECTIVES, *HAVE_BODIES, *KERNELS}
# It fuses most operations into those that use their outputs, but stores the outputs of these.
STORED = {
    "dot_general", "gather", "scatter", "scatter-add", "sort", "top_k", "cumsum",
    "dynamic_update_slice", "reduce_sum", "reduce_max", "argmax", *READ_FROM_MEMORY,
}  # fmt: skip
# As a rule these copy nothing.
VIEWS = {"broadcast_in_dim", "name", "pvary", "reshape", "squeeze", "stop_gradient", "transpose"}
IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}


@dataclass(eq=False)
class Array:
    """An array in memory from operation number `start` to operation number `end`."""

    bytes: int
    memory_class: str
    """See `memory_by_class`."""
    start: int
    end: int


def carry_operands(op: Op) -> range:
    """Which operands of a scan are its carry; its results begin with the carry.

    It compares shapes, because the parameters of scan differ between jax 0.10 and 0.12: constants
    and carry have the same number of dims outside the body as inside, scanned arrays one more.
    """
    body = bodies(op)[0][0]

    def count_unscanned(outside, inside) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)

    n = count_unscanned(op.eqn.outvars, body.outvars)
    end = count_unscanned(op.eqn.invars, body.invars)
    return range(end - n, end)


def overwritten_inputs(op: Op, avals: list, free: set) -> dict[int, int]:
    """{output: the input that it is written over}; `free` are the inputs not needed later."""
    if op.name in IN_PLACE or op.name == "scan":
        inputs = [op.inputs[i] for i in carry_operands(op)] if op.name == "scan" else op.inputs
        return {y: x for y, x in zip(op.outputs, inputs, strict=False) if x in free}
    if op.name in STORED and op.name != "cond":  # most of the others work element by element
        return {}
    data = op.inputs[1:] if op.name == "cond" else op.inputs  # its first chooses the branch
    candidates, pairs = [x for x in data if x in free], {}
    for output in op.outputs:
        form = avals[output].shape, avals[output].dtype
        same = (x for x in candidates if (avals[x].shape, avals[x].dtype) == form)
        if (x := next(same, None)) is not None:
            candidates.remove(x)
            pairs[output] = x
    return pairs


def count_readers(ops: list[Op]) -> Counter:
    """{value: number of matmuls that read it or a view of it}; READ_FROM_MEMORY counts double."""
    readers = Counter()
    for op in reversed(ops):
        for x in {*op.inputs}:
            if op.name in READ_FROM_MEMORY:
                readers[x] += 2
            elif op.name == "dot_general":
                readers[x] += 1
            if op.name in VIEWS:
                readers[x] += readers[op.outputs[0]]
    return readers


def memory_class(op: Op, aval, weight_shapes: set) -> str:
    """The class of an array that an operation stores, see `memory_by_class`."""
    if aval.shape in weight_shapes:
        if aval.dtype == "float32" or op.name == "scan":
            return "gradients"
        if op.name == "convert_element_type":
            return "weights"
    return "activations" if op.name == "scan" else "workspace"


def last_reads(ops: list[Op]) -> dict[int, int]:
    """{value: the number of the last operation that reads it}"""
    updated, found = {op.outputs[0]: op.inputs[0] for op in ops if op.name in IN_PLACE}, {}
    for at, op in enumerate(ops):
        # XLA fuses a select between an array and its update into the update, which is then in place
        # although the select reads the old array.
        old = {updated.get(x) for x in op.inputs} if op.name == "select_n" else ()
        found |= {x: at for x in op.inputs if x not in old}
    return found


def delay_weight_gradients(flat: FlatJaxpr, weight_shapes: set) -> FlatJaxpr:
    """The operations in the order in which XLA runs them on GPUs with tp.

    Nothing in a layer waits for the gradients of its weights, so XLA hides traffic over tp behind
    them: it computes those of the feed-forward only after the backward pass of attention, and until
    then keeps what they need.  docs/compiled.md compares the plans with XLA.
    """
    needed = {x for x in flat.results if x is not None and flat.avals[x].shape not in weight_shapes}
    waits = [False] * len(flat.ops)
    for n, op in reversed([*enumerate(flat.ops)]):
        # XLA does not delay kernels and loops, which compute the gradients of experts.
        waits[n] = needed.isdisjoint(op.outputs) and op.name not in HAVE_BODIES
        if not waits[n]:
            needed |= {*op.inputs}
    ops, begin = [], 0
    for n, op in enumerate(flat.ops):
        if op.name == ATTENTION_BACKWARD:
            ops += [flat.ops[i] for i in sorted(range(begin, n + 1), key=waits.__getitem__)]
            begin = n + 1
    return flat._replace(ops=ops + flat.ops[begin:])


class Memory:
    """The arrays that a jaxpr's operations store, collected from one operation after the other.

    Each is in memory from the operation that stores it to the last one that reads it, directly or
    through values computed from it that are not stored.
    """

    def __init__(self, flat: FlatJaxpr, weight_shapes: set, writable: set, not_counted: set):
        """writable: arguments that may be written over; not_counted: results for which the caller
        has memory."""
        self.avals, self.weight_shapes = flat.avals, weight_shapes
        self.writable, self.not_counted = writable, not_counted
        self.last_read = last_reads(flat.ops) | dict.fromkeys(flat.results, len(flat.ops))
        self.readers = count_readers(flat.ops)
        self.arrays = []
        # {value: the stored arrays that reading it reads}; empty for an argument.
        self.sources = dict.fromkeys([None, *flat.arguments], frozenset())

    def arrays_of(self, values) -> frozenset[Array]:
        return frozenset().union(*(self.sources[x] for x in values))

    def read(self, values, at: int):
        """Operation number `at` needs these values."""
        for array in self.arrays_of(values):
            array.end = at

    def is_stored(self, op: Op) -> bool:
        """Whether XLA writes an operation's outputs to memory."""
        is_read_twice = any(self.readers[x] > 1 for x in op.outputs)
        return op.name in STORED or (op.name not in VIEWS and is_read_twice)

    def pass_on(self, op: Op, free: set):
        """The outputs are not stored: what reads them reads the inputs' arrays."""
        self.sources |= dict.fromkeys(op.outputs, self.arrays_of(op.inputs))
        # Another form of an array that may be written over may be written over too.
        if free and len(op.inputs) == 1:
            size = n_bytes(self.avals[op.inputs[0]])
            self.writable |= {x for x in op.outputs if n_bytes(self.avals[x]) == size}

    def store(self, op: Op, at: int, free: set):
        """The outputs of operation number `at` are stored, over `free` inputs where they can be."""
        overwritten = overwritten_inputs(op, self.avals, free)
        for x in op.outputs:
            if x in overwritten:
                self.sources[x] = self.sources[overwritten[x]]
                continue
            aval = self.avals[x]
            on_host = aval.memory_space == jax.memory.Space.Host  # train.remat=offload
            size = 0 if on_host or x in self.not_counted else n_bytes(aval)
            self.arrays.append(Array(size, memory_class(op, aval, self.weight_shapes), at, at))
            self.sources[x] = frozenset(self.arrays[-1:])
        self.writable |= set(op.outputs)


def body_memory(op: Op, weight_shapes: set, delays: bool, free: set) -> Counter:
    """The most memory by class in use inside an operation, without its inputs and outputs; `free`
    are the inputs not needed later."""
    carry = carry_operands(op) if op.name == "scan" else ()
    branch_inputs = enumerate(op.inputs[1:]) if op.name == "cond" else ()
    overwritable = carry or [i for i, x in branch_inputs if x in free]
    args = weight_shapes, delays, range(len(carry), len(op.outputs)), overwritable
    peaks = [peak_memory(body, *args) for body, _ in bodies(op)]
    return max(peaks, key=Counter.total, default=Counter())


def peak_memory(
    jaxpr: Jaxpr, weight_shapes: set, delays=False, preallocated=(), overwritable=()
) -> Counter:
    """Bytes by class in use at the operation of `jaxpr` where their sum is largest.

    The arguments are not counted, nor are the results at the indices `preallocated`: the caller has
    memory for them.  Arguments at the indices `overwritable` may be written over.  delays: whether
    XLA orders the operations as `delay_weight_gradients` does.
    """
    flat = flatten(jaxpr)
    flat = delay_weight_gradients(flat, weight_shapes) if delays else flat
    writable = {flat.arguments[i] for i in overwritable}
    memory = Memory(flat, weight_shapes, writable, {flat.results[i] for i in preallocated})
    in_use = [Counter() for _ in range(len(flat.ops) + 1)]  # at each operation, and at the end
    for at, op in enumerate(flat.ops):
        # The inputs that may be written over, because nothing reads them later.
        free = {x for x in op.inputs if x in memory.writable and memory.last_read[x] == at}
        if memory.is_stored(op):
            memory.read(op.inputs, at)
            in_use[at] = body_memory(op, weight_shapes, delays, free)
            memory.store(op, at, free)
        else:
            memory.pass_on(op, free)
    memory.read(flat.results, len(flat.ops))
    for array in memory.arrays:
        for at in range(array.start, array.end + 1):
            in_use[at][array.memory_class] += array.bytes
    return max(in_use, key=Counter.total)


def shard_shape(shape: tuple, spec, mesh_shape: dict) -> tuple[int, ...]:
    """The shape of one device's part of an array; mesh_shape: {axis: size}."""
    mesh = AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape))
    return NamedSharding(mesh, spec).shard_shape(shape)


def state_bytes(cfg: Config) -> dict:
    """Bytes between steps of a device's weights, and of its optimizer state and average of the
    weights ("moments"); counters, which are scalars, are left out."""
    state, specs = runstate.state_shapes(cfg), runstate.state_specs(cfg)

    def device_bytes(x, spec) -> int:
        size = math.prod(shard_shape(x.shape, spec, cfg.mesh.shape))
        return size * x.dtype.itemsize if x.shape else 0

    n = jax.tree.map(device_bytes, state, specs)
    moments = jax.tree.leaves((n.opt, n.ema))
    return dict(weights=sum(jax.tree.leaves(n.params)), moments=sum(moments))


def update_bytes(cfg: Config) -> int:
    """Bytes of memory traffic of the optimizer: it reads a device's weights, optimizer state and
    gradient, which has the size of the weights, and writes weights and optimizer state."""
    state = state_bytes(cfg)
    return 3 * state["weights"] + 2 * state["moments"]


def prepared_shapes(cfg: Config, chip: Chip) -> set:
    """The shapes of a device's weights, and of their gradients, in an update."""
    found = set()

    @jax.shard_map(in_specs=(model.param_specs(cfg),), out_specs=P())
    def per_device(params):
        w = gradient.prepare_parts(params, cfg, cfg.train.dtype)
        found.update(x.shape for x in jax.tree.leaves(w))
        return 0

    with absent_mesh(cfg, chip):
        jax.eval_shape(per_device, model.param_shapes(cfg))
    return found


def memory_by_class(jaxpr: Jaxpr, cfg: Config, chip: Chip) -> dict:
    """Bytes by class on a device at the moment in the loss and gradient of `jaxpr` when most is in
    use.  The optimizer's update comes later, and is not looked at.

    weights: the stored ones, always in memory, and casts of them, while layers read them.
    moments: the optimizer's state and the average of optim.ema; always in memory.
    gradients: arrays with the shape of a device's part of a weight, gathered over dp or not, that
        are float32 or come from a loop; in memory from the first backward pass on.
    activations: other arrays that a loop hands from one iteration to the next, or stacks; in memory
        from a microbatch's forward pass to its backward pass.
    workspace: everything else, with gathered weights; in memory inside of a layer or a part of it.
    """
    table = utils.leaf_table(model.param_table(cfg)).values()
    meshes = cfg.mesh.shape, cfg.mesh.shape | dict(dp=1)
    weight_shapes = {shard_shape(p.shape, p.spec, shape) for p in table for shape in meshes}
    weight_shapes |= prepared_shapes(cfg, chip)
    inside = next(op for op in flatten(jaxpr).ops if op.name == "shard_map")
    delays = chip.gpu is not None and cfg.mesh.tp > 1
    found = peak_memory(inside.eqn.params["jaxpr"], weight_shapes, delays)
    found.update(state_bytes(cfg))  # Counter.update adds
    return {k: found[k] for k in ("weights", "moments", "gradients", "activations", "workspace")}


def with_largest_batch(cfg: Config) -> Config:
    """cfg with the largest batch of train.batch_ramp, whose updates need the most memory."""
    return replace(cfg, train=replace(cfg.train, batch_size=max(checks.batch_sizes(cfg))))


def choose_remat(step_jaxpr: Callable, cfg: Config, chip: Chip) -> str:
    """The automatic train.remat on accelerators: dots for a dense model in one stage on GPUs, if
    the plan of that takes at most four fifths of the memory, else layer.

    These plans were up to 3 % too low.  On an H100 an update of llama_1b took 0.87 times as long
    with dots as with layer.  On TPUs, by XLA's count of cycles outside of kernels, dots takes 0.87
    times as long for llama_1b (v5p, dp 4, tp 2), but 1.10 times in two stages, where what is kept
    is copied into a buffer of all microbatches; 1.09 for qwen3_0.6b, 1.18 for jaxformer_1b (v5p, dp
    8) and 1.03 for gpt2_124m (v6e, dp 8).  step_jaxpr: see `trace_step`.
    """
    if chip.platform == "tpu" or cfg.mesh.pp > 1 or cfg.model.n_experts:
        return "layer"
    dots = with_largest_batch(replace(cfg, train=replace(cfg.train, remat="dots")))
    jaxpr = trace_step(step_jaxpr, dots, chip)
    need = sum(memory_by_class(jaxpr, dots, chip).values())
    return "dots" if need <= 0.8 * chip.memory else "layer"
