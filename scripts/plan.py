"""Plan a training step for chips that need not be present: does it fit, and how fast can it be?

    python scripts/plan.py --config llama3_8b --mesh.dp 16 --mesh.tp 4 --topology v5p:4x4x4

All flags of train.py work here too.  The real step is traced for an abstract mesh; its FLOPs,
collectives and memory are counted in the jaxpr (cost_model.py).
"""

import gc
import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import get_args, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checks
import cli
from chips import GIB, Chip, parse_topology
from config import SLICE, Config, Flag, Train
from errors import USAGE, UserError


@dataclass(frozen=True)
class Args:
    topology: str = ""
    """Chips and their shape, such as v5p:4x4x4, v5e:16x16, v6e:4x4, v4:4x4x4 or h100:8."""
    slices: int = 1
    """How many TPU slices of that topology, or nodes of GPUs; dp is split over them."""
    compile: Flag = False
    """Compile the step for these chips too, and show XLA's own figures beside the estimate."""
    search: Flag = False
    """Rank all meshes, microbatches and remat policies for these chips by predicted step time.
    Those of the config and of other flags are ignored."""
    json: Flag = False
    """Print one JSON object instead of a table."""

    @property
    def target(self) -> str:
        return f"{self.slices} slices of {self.topology}" if self.slices > 1 else self.topology


def parse() -> tuple[Args, Config]:
    args, rest = cli.read_args(Args, __doc__, return_unknown_args=True)
    parse_topology(args.topology)  # raises
    cli.check_at_least(args, slices=1)
    if args.search and args.compile:
        what = "--search only estimates, but --compile is given too"
        raise UserError(USAGE, what, "leave --compile out, and compile the mesh that you choose")
    # Keep JAX from looking for an accelerator, and libtpu from asking the cloud whether this is a
    # TPU host.
    os.environ |= dict(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    os.environ |= dict(TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")
    return args, cli.parse(rest)


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

import numpy as np
from tqdm import tqdm

import cost_model
import model
import train
import utils
from scripts import compiled_cost

# ---- the plan


def make_plan(cfg: Config, chip: Chip) -> dict:
    """What the table shows, in bytes, seconds and FLOPs of one device and one step.

    "best" is the step time if arithmetic and the communication over each mesh axis overlap fully,
    so that the longest of them decides; "worst" is their sum.  Both include the pipeline's idle
    ticks, which take the same time with mesh.skip_bubbles off.
    """
    t, n_devices = cfg.train, math.prod(cfg.mesh.sizes)
    jaxpr = cost_model.trace_step(train.step_jaxpr, cfg, chip)
    schedule = cost_model.step_schedule(cfg)
    cost = cost_model.count_cost(jaxpr, cfg, chip)
    memory = cost_model.memory_by_class(jaxpr, cfg, chip)
    idle = (schedule.pp - 1) / schedule.items  # Narayanan et al. 2021, section 2.2
    update = cost_model.update_bytes(cfg) / chip.hbm
    seconds = dict(matmuls=cost.matmul_seconds, idle=idle * cost.matmul_seconds, update=update)
    received = {axis: cost.received_over(axis) for axis in cfg.mesh.shape}
    over_slow = received.get(SLICE, 0)
    networks = sum(received.values()) - over_slow, over_slow
    link = {axis: n / chip.speed(axis) for axis, n in received.items()}
    compute, tokens = sum(seconds.values()), t.batch_size * t.seq_len
    flops_per_token = model.flops_per_token(cfg)
    ideal = flops_per_token * tokens / n_devices / chip.flops

    def pace(step_time: float) -> dict:
        tokens_per_day = 86400 * tokens / step_time
        return dict(step_time=step_time, mfu=ideal / step_time, tokens_per_day=tokens_per_day)

    return dict(
        mesh={axis: getattr(cfg.mesh, axis) for axis in utils.AXES},
        microbatches=t.microbatches,
        remat=t.remat,
        parameters=model.param_count(cfg),
        active=model.param_count(cfg, active=True),
        flops_per_token=flops_per_token,
        flops=cost.flops,
        kernel_seconds=cost.kernel_seconds,
        bubble=idle / (1 + idle),
        memory=memory,
        memory_total=sum(memory.values()),
        memory_limit=chip.memory,
        fits=sum(memory.values()) <= chip.memory,
        collectives={
            f"{axis} {name}": dict(calls=cost.calls[name, axis], bytes=cost.received[name, axis])
            for name, axis in sorted(cost.calls, key=lambda x: ([*link].index(x[1]), x[0]))
        },
        decoding={rows: decoding_speed(cfg, chip, rows) for rows in (1, 8, 32)},
        networks=dict(zip(chip.networks, networks, strict=True)),
        seconds=seconds | link,
        best=pace(max(compute, *link.values())),
        worst=pace(compute + sum(link.values())),
    )


def decoding_speed(cfg: Config, chip: Chip, rows: int) -> float:
    """Tokens per second of `rows` sequences decoded together, if only reading the weights takes
    time: an upper bound.  Stages read theirs one after another, tp ranks in parallel.  Each row is
    taken to choose experts of its own; experts that no row chooses are not read."""
    whole, active = (model.param_sizes(cfg, active=x) for x in (False, True))
    names = whole.keys() - model.only_looked_up(cfg.model)
    read = sum(min(whole[name], rows * active[name]) for name in names)
    return rows * chip.hbm * cfg.mesh.tp / (read * np.dtype(cfg.train.dtype).itemsize)


def overflowing_class(memory: dict, chip: Chip) -> str:
    """The first class with which the running sum exceeds the chip's memory; "" if all fits."""
    sums = zip(memory, accumulate(memory.values()), strict=True)
    return next((name for name, total in sums if total > chip.memory), "")


def gib(n: float) -> str:
    return f"{n / GIB:,.2f} GiB"


def xla_rows(plan: dict) -> list[tuple[str, str]]:
    if "xla" not in plan:
        return []
    xla = plan["xla"]
    error = plan["memory_total"] / xla["memory"] - 1
    rows = [("  XLA's figure", f"{gib(xla['memory'])}; the estimate is {error:+.1%}")]
    if xla["fusion_seconds"]:
        fusions, kernels = 1e3 * xla["fusion_seconds"], 1e3 * plan["kernel_seconds"]
        text = f"{fusions:,.0f} ms, without kernels ({kernels:,.0f} ms by the plan) and collectives"
        rows += [("XLA's fusions", text)]
    return rows + [("compiled in", f"{xla['compile_seconds']:.0f} s")]


def print_plan(plan: dict, cfg: Config, target: str):
    n_devices = math.prod(cfg.mesh.sizes)
    mesh = " ".join(f"{axis}={n}" for axis, n in plan["mesh"].items())
    target = f"{target}: {n_devices} devices, {mesh}, {plan['microbatches']} microbatches"
    ideal = plan["flops_per_token"]
    counted = plan["flops"] * n_devices / (cfg.train.batch_size * cfg.train.seq_len)
    rows = [
        ("target", f"{target}, remat {plan['remat']}"),
        ("parameters", f"{plan['parameters']:,}, {plan['active']:,} active"),
        ("FLOPs per token", f"{ideal:.4g}; {counted:.4g} with recomputed and masked ones"),
        ("", ""),
        *((name, gib(n)) for name, n in plan["memory"].items()),
        ("memory per device", f"{gib(plan['memory_total'])} of {gib(plan['memory_limit'])}"),
        *xla_rows(plan),
        ("", ""),
        *(
            (name, f"{x['calls']:,.0f} calls, {x['bytes'] / 1e6:,.1f} MB")
            for name, x in plan["collectives"].items()
        ),
        *((f"over {name}", f"{x / 1e6:,.1f} MB") for name, x in plan["networks"].items() if x),
        ("bubble", f"{plan['bubble']:.1%}"),
        *((f"{name} time", f"{1e3 * x:,.1f} ms") for name, x in plan["seconds"].items()),
        ("", ""),
    ]
    for name, label in (("best", "communication hidden"), ("worst", "nothing hidden")):
        pace = plan[name]
        most = f"at most {pace['mfu']:.1%} MFU and {pace['tokens_per_day']:.3g} tokens a day"
        rows += [(label, f"at least {1e3 * pace['step_time']:,.0f} ms a step, {most}")]
    if not cfg.train.batch_ramp:  # the plan is that of the largest batch
        best, worst = (plan[x]["step_time"] * cfg.train.steps / 3600 for x in ("best", "worst"))
        text = f"at least {best:,.1f} hours, {best * n_devices:,.1f} device hours; with nothing "
        text += f"hidden {worst:,.1f} and {worst * n_devices:,.1f}"
        rows += [(f"all {cfg.train.steps:,} updates", text)]
    speeds = ", ".join(f"{n} rows {x:,.0f}" for n, x in plan["decoding"].items())
    rows += [("decoding, at most", f"tokens a second: {speeds.replace('1 rows', '1 row')}")]
    for name, text in rows:
        print(f"{name:22}{text}".rstrip())


# ---- search


def candidates(cfg: Config, n_devices: int, slices: int) -> tuple[list[Config], Counter]:
    """(a config for each mesh over `slices` slices of n_devices, each number of microbatches and
    each remat policy; {reason: how many meshes do not suit the config})"""
    found, ruled_out = [], Counter()
    policies = [x for x in get_args(get_type_hints(Train)["remat"]) if x != "auto"]
    for dp in checks.divisors(n_devices):
        for pp in checks.divisors(n_devices // dp):
            sizes = dict(dp=checks.slice_ranks(slices, dp), pp=pp, tp=n_devices // dp // pp)
            on_mesh = replace(cfg, mesh=replace(cfg.mesh, **sizes))
            train = replace(cfg.train, microbatches=0, remat="layer")
            try:
                checks.check(replace(on_mesh, train=train))
            except UserError as e:
                ruled_out[re.sub(r" ?=[0-9x:*= ]+must", " must", e.problems[0].what)] += 1
                continue
            n_rows = math.gcd(*checks.batch_sizes(cfg)) // (cfg.train.grad_accum * slices * dp)
            for microbatches in (n for n in checks.divisors(n_rows) if n % pp == 0):
                for remat in (x for x in policies if x != "offload" or pp == 1):
                    chosen = dict(microbatches=microbatches, remat=remat)
                    train = replace(cfg.train, **chosen, unroll=max(1, cfg.train.unroll))
                    found.append(replace(on_mesh, train=train))
    return found, ruled_out


def search(cfg: Config, chip: Chip, n_devices: int, slices: int = 1) -> dict:
    """dict(plans=those that fit, fastest first, out={reason: how many others it rules out}).

    Ranked by the step time without overlap, because XLA's TPU programs wait for most of a layer's
    collectives.
    """
    legal, ruled_out = candidates(cfg, n_devices, slices)
    plans = []
    # A trace is many objects that live long; with Python's own thresholds, a fifth of the time of a
    # search was spent looking through them for garbage.
    gc.set_threshold(200_000, 50, 1000)
    # disable=None hides the bar where stderr is not a terminal.
    for candidate in tqdm(legal, desc="search", unit="plan", leave=False, disable=None):
        name = overflowing_class(cost_model.state_bytes(candidate), chip)  # needs no trace
        if not name:
            plan = make_plan(candidate, chip)
            name = overflowing_class(plan["memory"], chip)
        if name:
            ruled_out[f"{name} overflow"] += 1
        else:
            plans.append(plan)
    return dict(plans=sorted(plans, key=lambda x: x["worst"]["step_time"]), out=dict(ruled_out))


def print_search(found: dict):
    heads = ("dp", "pp", "tp", "microbatches", "remat", "GiB", "ms hidden", "ms not", "MFU")
    print("".join(f"{head:>13}" for head in heads))
    for plan in found["plans"][:20]:
        times = (f"{1e3 * plan[k]['step_time']:,.0f}" for k in ("best", "worst"))
        memory, mfu = f"{plan['memory_total'] / GIB:.1f}", f"{plan['worst']['mfu']:.1%}"
        sizes = plan["mesh"].values()
        cells = (*sizes, plan["microbatches"], plan["remat"], memory, *times, mfu)
        print("".join(f"{cell:>13}" for cell in cells))
    print(f"{len(found['plans'])} plans fit.  Ruled out:")
    for reason, n in sorted(found["out"].items(), key=lambda x: -x[1]):
        print(f"{n:>6}  {reason}")


# ---- the command


def print_best_plans(args: Args, cfg: Config):
    """Print the plans that --search finds.  Raises UserError USAGE where none fits."""
    found = search(cost_model.with_largest_batch(cfg), *parse_topology(args.topology), args.slices)
    if args.json:
        print(json.dumps(found))
    else:
        print_search(found)
    if not found["plans"]:
        what = f"no plan fits {args.target}"
        raise UserError(USAGE, what, "take more chips, or change what rules the plans out")


def check_devices(args: Args, cfg: Config, n_devices: int):
    """Raise UserError USAGE where cfg's mesh is not one of all n_devices, in --slices slices."""
    if cfg.mesh.slices != args.slices:
        what = f"mesh.dp={cfg.mesh.dp} has {cfg.mesh.slices} slices, but --slices is {args.slices}"
        fix = f"give --mesh.dp -1 or a multiple of {args.slices}"
        if cfg.mesh.slices > 1:
            fix += f", or --slices {cfg.mesh.slices}"
        else:
            what += ": a mesh whose pp or tp leaves a node cannot be planned"
        raise UserError(USAGE, what, fix)
    if (n := math.prod(cfg.mesh.sizes)) != n_devices:
        product = "mesh.dp*mesh.pp*mesh.tp = {}*{}*{}".format(*cfg.mesh.sizes)
        fix = f"choose axes whose product is {n_devices} (one axis may be -1)"
        raise UserError(USAGE, f"{product} = {n}, but {args.target} has {n_devices} devices", fix)


def main(args: Args, cfg: Config):
    """Print one plan, or those of --search.  Raises UserError USAGE where none fits."""
    if args.search:
        return print_best_plans(args, cfg)
    chip, slice_size = parse_topology(args.topology)
    n_devices = args.slices * slice_size
    remat = cfg.train.remat
    cfg = cost_model.with_largest_batch(checks.resolve(cfg, n_devices, slices=args.slices))
    check_devices(args, cfg, n_devices)
    if args.compile:  # first, because the compiler may be missing
        devices = compiled_cost.target_devices(args.topology, chip, slice_size, args.slices)
    if remat == "auto":
        remat = cost_model.choose_remat(train.step_jaxpr, cfg, chip)
        cfg = replace(cfg, train=replace(cfg.train, remat=remat))
    plan = make_plan(cfg, chip)
    need, name = plan["memory_total"], overflowing_class(plan["memory"], chip)
    if args.compile:
        plan["xla"] = compiled_cost.compile_step(cfg, args.target, chip, devices)
        need, name = plan["xla"]["memory"], "XLA's arrays"
        # A step that XLA has compiled for a TPU fits.
        plan["fits"] = chip.platform == "tpu" or need <= plan["memory_limit"]
    if args.json:
        print(json.dumps(plan))
    else:
        print_plan(plan, cfg, args.target)
    if not plan["fits"]:
        what = f"{name} overflow: a device needs {gib(need)} and has {gib(plan['memory_limit'])}"
        raise UserError(USAGE, what, "see what fits with --search, or take more chips")


if __name__ == "__main__":
    cli.quit_on_error(main, ARGS, CFG)
