"""XLA's figures for a training step, compiled for chips that need not be present: its memory, and
on TPUs the cycles of its fusions.

It needs libtpu or JAX's CUDA plugin, but no accelerator.  Estimates without compiling are in
cost_model.py.
"""

import importlib.util
import re
import time
from collections import Counter
from collections.abc import Callable

import jax
from jax.experimental import topologies

import runstate
import train
import utils
from chips import Chip, gpu_target
from config import Config
from cost_model import assume_gpu, scale, work_shares
from errors import USAGE, UserError


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing too
        return False


def target_devices(topology: str, chip: Chip, n: int, slices: int) -> list:
    """The devices of `slices` slices or nodes of n devices each, to compile for.

    Raises UserError USAGE where the compiler is not installed or has no such topology.
    """
    on_gpu = chip.platform == "gpu"
    module, extra = ("jax_plugins.xla_cuda13", "cuda13") if on_gpu else ("libtpu", "tpu")
    if not is_installed(module):
        what = f"--compile for {topology} needs the package {module}, which is not installed"
        fix = f"pip install 'jax[{extra}]=={jax.__version__}', in a separate environment"
        raise UserError(USAGE, what, fix)
    try:
        if on_gpu:
            nodes = f"{slices}x{n}x1"
            options = dict(platform="cuda", target_config=gpu_target(chip), topology=nodes)
            return topologies.get_topology_desc(**options).devices
        # The two cores of a v4 chip are one device, as they are on a host with such chips.
        options = dict(chip_config_name="megacore") if chip.kind == "TPU v4" else {}
        options |= dict(num_slices=slices) if slices > 1 else {}
        return topologies.get_topology_desc(topology, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as e:
        what = f"topology={topology}: {str(e).splitlines()[0][:200]}"
        raise UserError(USAGE, what, "give the shape of a slice that exists") from None


def compile_step(cfg: Config, target: str, chip: Chip, devices: list) -> dict:
    """XLA's figures for train.train_step on these devices, those of `target`: seconds to compile,
    bytes on each device, and on TPUs the seconds of its fusions.

    Raises UserError USAGE where the step does not fit.
    """
    mesh = utils.mesh_of(devices, cfg)
    # Before set_mesh, because they cannot be computed on a mesh of absent devices.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shapes, specs = train.step_shapes(cfg), train.step_specs(cfg)
    jax.set_mesh(mesh)
    begin = time.monotonic()
    try:
        with assume_gpu(chip):
            arguments = runstate.with_shardings(shapes, specs)
            program = utils.compile_program(train.train_step, *arguments, cfg)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        what = f"XLA cannot fit the step into {target}: {str(e).splitlines()[0][:300]}"
        raise UserError(USAGE, what, "see the plan's memory without --compile") from None
    seconds, memory = time.monotonic() - begin, program.memory_analysis()
    on_tpu = chip.platform == "tpu"
    return dict(
        compile_seconds=seconds,
        memory=memory.peak_memory_in_bytes,
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        options=utils.xla_options(jax.sharding.get_mesh()),
        fusion_seconds=fusion_cycles(program.as_text(), cfg) / chip.clock if on_tpu else None,
    )


def fusion_cycles(hlo: str, cfg: Config) -> float:
    """XLA's estimated cycles of all fusions of a TPU program, each counted as often as it runs; it
    has no estimate for Pallas kernels."""

    def cycles(line: str) -> Counter:
        found = re.search(r'"estimated_cycles":"(\d{1,15})"', line)
        return Counter(cycles=int(found[1])) if found else Counter()

    return sum_lines(hlo, cfg, cycles)["cycles"]


def sum_lines(hlo: str, cfg: Config, value: Callable) -> Counter:
    """The sum of value(line), a Counter, over the lines of a compiled program, each times how often
    it runs.

    The trip count of a loop is the largest constant in its condition.  Of a conditional the larger
    branch counts; in the pipeline's loop it is multiplied by the share of the ticks in which a
    stage does that work (cost_model.work_shares).
    """
    pieces = re.split(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", hlo, flags=re.M)
    computations = dict(zip(pieces[1::2], map(str.splitlines, pieces[2::2]), strict=True))
    entry = re.search(r"^ENTRY %?([\w.-]+)", hlo, re.M)[1]

    def count_trips(condition: str) -> int:
        lines = computations[condition]
        constants = [int(n) for line in lines for n in re.findall(r"constant\((\d+)\)", line)]
        called = [name for line in lines for name in re.findall(r"calls=%?([\w.-]+)", line)]
        return max([1, *constants, *map(count_trips, called)])

    def sum_computation(name: str, busy_shares=()) -> Counter:
        sums, shares = Counter(), iter(busy_shares)
        for line in computations[name]:
            sums.update(value(line))
            if found := re.search(r"while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)", line):
                n = count_trips(found[1])
                sums.update(scale(sum_computation(found[2], work_shares(n, cfg)), n))
            if " conditional(" in line:
                form = r"(?:true|false)_computation=%?([\w.-]+)|branch_computations=\{(.*?)\}"
                names = " ".join(one or many for one, many in re.findall(form, line))
                branches = [sum_computation(x) for x in re.findall(r"[\w.-]+", names)]
                sums.update(scale(max(branches, key=Counter.total), next(shares, 1)))
            if found := re.search(r" call\(.*to_apply=%?([\w.-]+)", line):
                sums.update(sum_computation(found[1], busy_shares))
        return sums

    return sum_computation(entry)
