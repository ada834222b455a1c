"""Measure how fast a config trains on the devices present, next to plain implementations.

    python scripts/benchmark.py --config gpt2_124m --train.batch_size 48 --train.grad_accum 1

All flags of train.py work here too.  The script compares Trifold's step on the config's mesh and on
--meshes, a plain jit on one device, and the models of transformers and nanoGPT under torch.compile
(torch_peers.py).  It measures them in turn, --repeats times, in one process, from the same initial
weights, on the same random tokens, which stay on the device.  On a CPU, where other programs
disturb the wall clock, it compares CPU seconds.

Dimension key (a suffix on every array's name spells its logical shape):
  A  accumulation steps   B  sequences   L  sequence length   D  d_model   F  d_ff   V  vocabulary
  H  query heads   G  key and value heads   K  head dim   C  gate and up, or only up
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import files
from config import Config, settings
from errors import USAGE, UserError, describe


@dataclass(frozen=True)
class Args:
    repeats: int = 3
    """How often each is measured; the table has the medians."""
    steps: int = 0
    """Updates in a measurement, after some to warm up; 0 means 20, or 3 on a CPU."""
    peers: tuple[Literal["plain", "transformers", "nanogpt"], ...] = ("plain", "transformers")
    """What to compare with; give none to measure Trifold alone."""
    meshes: tuple[str, ...] = ()
    """More meshes for Trifold, as dp,pp,tp[,schedule[,skip_bubbles]]:
    2,2,2 1,4,1,1f1b 1,4,1,1f1b,False.  Each has to use all accelerators."""
    json: str = ""
    """Write the measurements to this file too."""


def parse_meshes(names: tuple[str, ...], flags: list[str]) -> dict[str, Config]:
    """The config of train.py's flags on each of --meshes.  Raises UserError USAGE."""
    configs, fields = {}, ("dp", "pp", "tp", "schedule", "skip_bubbles")
    for name in names:
        values = name.split(",")
        if not 3 <= len(values) <= len(fields):
            what = f"meshes: {name!r} is not dp,pp,tp[,schedule[,skip_bubbles]]"
            raise UserError(USAGE, what, "write it as in 2,2,2 or 1,4,1,1f1b")
        mesh = zip(fields, values, strict=False)
        configs[name] = cli.parse([*flags, *(f"--mesh.{field}={x}" for field, x in mesh)])
    return configs


def parse() -> tuple[Args, Config, dict[str, Config]]:
    args, rest = cli.read_args(Args, __doc__, return_unknown_args=True)
    cli.check_at_least(args, repeats=1, steps=0)
    cfg = cli.parse(rest)
    others = parse_meshes(args.meshes, rest)
    meshes = [x.mesh for x in (cfg, *others.values())]
    largest = max(meshes, key=lambda mesh: math.prod(n for n in mesh.sizes if n > 0))
    cli.tune_heap()
    cli.simulate_devices(largest, cfg.run.num_processes)
    if {*args.peers} - {"plain"}:
        # Otherwise JAX would take most of a GPU's memory and leave torch none.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return args, cfg, others


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG, OTHERS = cli.quit_on_error(parse)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh

import model
import optim
import processes
import rundir
import runstate
import train
import utils
from layers import hidden_units, multiply
from scripts.outputs import check_output
from tasks import put_batch

# ---- the plain model: what training on one device takes, and no more.  m is cfg.model.

KNOWN = """vocab_size d_model n_layers pattern tie_embeddings n_heads n_kv_heads d_head qk_norm
attn_bias attn_out_bias max_positions rope_theta norm_bias norm_eps d_ff activation mlp_bias
end_id stages skip seq_len batch_size batch_ramp steps dtype"""
"""The settings of model, data and train that change the training, and that the peers have too or
do not need."""
KNOWN_CHOICES = {"model.norm": "layer", "model.positions": "learned"}
"""{setting: the only choice besides its default that the peers have too}"""
# The policies of jax.checkpoint for train.remat; with "none" everything is kept.
PLAIN_REMAT = dict(layer=None, dots=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def plain_norm(x_BLD, w, name, m):
    x = x_BLD.astype(jnp.float32)
    if m.norm == "layer":
        x -= x.mean(-1, keepdims=True)
    x *= lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + m.norm_eps)
    return (x * w[f"{name}_D"] + w.get(f"{name}_bias_D", 0)).astype(x_BLD.dtype)


def plain_rope(x_BLHK, m):
    if m.positions != "rope":
        return x_BLHK
    L, K = x_BLHK.shape[1], x_BLHK.shape[-1]
    angle_LK = jnp.arange(L)[:, None] * m.rope_theta ** (-jnp.arange(0, K, 2) / K)
    sin, cos = jnp.sin(angle_LK)[:, None], jnp.cos(angle_LK)[:, None]
    a, b = jnp.split(x_BLHK, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x_BLHK.dtype)


def plain_layer(x_BLD, w, m):
    h_BLD = plain_norm(x_BLD, w, "attn_norm", m)
    q_BLHK = jnp.einsum("BLD,DHK->BLHK", h_BLD, w["q_DHK"]) + w.get("q_bias_HK", 0)
    k_BLGK = jnp.einsum("BLD,DGK->BLGK", h_BLD, w["k_DGK"]) + w.get("k_bias_GK", 0)
    v_BLGK = jnp.einsum("BLD,DGK->BLGK", h_BLD, w["v_DGK"]) + w.get("v_bias_GK", 0)
    if m.qk_norm:
        rms = replace(m, norm="rms")
        q_BLHK = plain_norm(q_BLHK, dict(q_D=w["q_norm_K"]), "q", rms)
        k_BLGK = plain_norm(k_BLGK, dict(k_D=w["k_norm_K"]), "k", rms)
    q_BLHK, k_BLGK = plain_rope(q_BLHK, m), plain_rope(k_BLGK, m)
    y_BLHK = jax.nn.dot_product_attention(q_BLHK, k_BLGK, v_BLGK, is_causal=True)
    x_BLD += jnp.einsum("BLHK,HKD->BLD", y_BLHK, w["o_HKD"]) + w.get("o_bias_D", 0)
    h_BLD, bias = plain_norm(x_BLD, w, "mlp_norm", m), w.get("in_bias_CF", [0, 0])
    gate_BLF, up_BLF = h_BLD @ w["in_CDF"][0] + bias[0], h_BLD @ w["in_CDF"][-1] + bias[-1]
    h_BLF = hidden_units(gate_BLF, up_BLF, m.activation)
    return x_BLD + h_BLF @ w["out_FD"] + w.get("out_bias_D", 0), None


def plain_loss(params, token_BL, target_BL, cfg: Config):
    """Mean negative log likelihood, nats a token; params as in runstate.State."""
    m, w = cfg.model, jax.tree.map(lambda x: x.astype(cfg.train.dtype), params)
    x_BLD = w["embed_VD"][token_BL]
    if m.positions == "learned":
        x_BLD += w["position_LD"][: token_BL.shape[1]]
    layer = partial(plain_layer, m=m)
    if cfg.train.remat != "none":
        policy = PLAIN_REMAT[cfg.train.remat]
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x_BLD, _ = lax.scan(layer, x_BLD, w["layers"]["dense"])
    unembed_DV = w["embed_VD"].T if m.tie_embeddings else w["unembed_DV"]
    logit_BLV = (plain_norm(x_BLD, w, "norm", m) @ unembed_DV).astype(jnp.float32)
    logit_BLV = logit_BLV[..., : m.vocab_size]
    return optax.softmax_cross_entropy_with_integer_labels(logit_BLV, target_BL).mean()


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def plain_step(state: runstate.State, tokens_ABL, targets_ABL, cfg: Config):
    """One update."""
    value_and_grad = jax.value_and_grad(partial(plain_loss, cfg=cfg))

    def add(total, inputs):
        return jax.tree.map(jnp.add, total, value_and_grad(state.params, *inputs)), None

    total = value_and_grad(state.params, tokens_ABL[0], targets_ABL[0])
    if len(tokens_ABL) > 1:
        total, _ = lax.scan(add, total, (tokens_ABL[1:], targets_ABL[1:]))
    loss, grads = jax.tree.map(lambda x: x / len(tokens_ABL), total)
    updates, opt = optim.optimizer(cfg).update(grads, state.opt, state.params)
    params = optax.apply_updates(state.params, updates)
    return runstate.State(state.step + 1, params, opt), dict(loss=loss)


# ---- contestants


class Contestant(NamedTuple):
    """One way to take a training step, compiled and run once."""

    name: str
    n_devices: int
    begin: Callable
    """() -> the state before the first update."""
    step: Callable
    """state -> (the next state, {"loss": nats a token}); does not wait for the device."""
    compile_seconds: float
    memory: int | None
    """Bytes of a device that a step needs, by XLA's plan or torch's count; None where unknown."""
    loss: float
    """The loss before the first update."""


def on_mesh(mesh: Mesh, f, *args):
    """f(*args) with this mesh as the ambient one."""
    with jax.set_mesh(mesh):
        return f(*args)


def on_first_device(f, *args):
    """f(*args) with a mesh of only the first device as the ambient one."""
    options = dict(axis_types=(AxisType.Auto,) * 3, devices=jax.local_devices()[:1])
    return on_mesh(jax.make_mesh((1, 1, 1), utils.AXES, **options), f, *args)


def compile_contestant(name: str, step, batch, cfg: Config) -> Contestant:
    """A contestant from a jitted function of (state, *batch, cfg), on the ambient mesh."""
    begin = partial(on_mesh, jax.sharding.get_mesh(), runstate.init_state, cfg)
    state, start = begin(), time.perf_counter()
    program = utils.compile_program(step, state, *batch, cfg)
    seconds, use = time.perf_counter() - start, program.memory_analysis()
    memory = use.argument_size_in_bytes + use.temp_size_in_bytes
    memory += use.output_size_in_bytes - use.alias_size_in_bytes  # donated inputs become outputs
    loss, n_devices = float(program(state, *batch)[1]["loss"]), jax.sharding.get_mesh().size
    return Contestant(name, n_devices, begin, lambda s: program(s, *batch), seconds, memory, loss)


def make_trifold(window_BL, cfg: Config, name: str = "trifold") -> Contestant:
    """train.train_step on the ambient mesh.  window_BL: the batch in windows of L + 1 tokens,
    int32."""
    batch = put_batch(window_BL[:, :-1], window_BL[:, 1:], cfg)
    return compile_contestant(name, train.train_step, batch, cfg)


def make_plain(window_BL, cfg: Config) -> Contestant:
    """plain_step on the one device of the ambient mesh."""
    shape = cfg.train.grad_accum, -1, cfg.train.seq_len
    batch = [jnp.array(x.reshape(shape)) for x in (window_BL[:, :-1], window_BL[:, 1:])]
    return compile_contestant("plain jit", plain_step, batch, cfg)


def make_torch(name: str, window_BL, cfg: Config) -> Contestant:
    """A peer of torch_peers.py.

    Raises UserError: USAGE where it cannot run here, DATA where it has no such model.
    """
    if missing := [name for name in ("torch", "transformers") if not find_spec(name)]:
        raise UserError(USAGE, f"{' and '.join(missing)} not installed")
    if jax.default_backend() not in ("cpu", "gpu"):
        raise UserError(USAGE, f"is not measured on {jax.default_backend()}")
    if cfg.optim.name != "adamw":
        raise UserError(USAGE, f"is not measured with optim.name={cfg.optim.name}")
    import torch

    from scripts import torch_peers

    device = dict(cpu="cpu", gpu="cuda")[jax.default_backend()]
    training = torch_peers.Training(name, window_BL, cfg, device)
    start = time.perf_counter()
    state, metrics = training.step(training.begin())
    loss, seconds = float(metrics["loss"]), time.perf_counter() - start
    float(training.step(state)[1]["loss"])  # with AdamW's moments, for the memory
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Contestant(name, 1, training.begin, training.step, seconds, memory, loss)


def is_lacking(name: str) -> bool:
    """Whether the peers do not have the setting of that name."""
    section, _, field = name.partition(".")
    if section in ("model", "data", "train"):
        return rundir.group_of(name) == "changes the training" and field not in KNOWN.split()
    return name in ("optim.ema", "log.norms_every")


def make_peers(names, window_BL, cfg: Config) -> tuple[list[Contestant], dict[str, str]]:
    """The peers of these names, and the reason for each that is left out."""
    usual, given = settings(Config()), settings(cfg)
    missing = [
        f"{name}={x}"
        for name, x in given.items()
        if is_lacking(name) and x not in (usual.get(name), KNOWN_CHOICES.get(name))
    ]
    missing += [f"train.remat={x}" for x in [cfg.train.remat] if x not in ("none", *PLAIN_REMAT)]
    missing += ["several processes"] if jax.process_count() > 1 else []
    if missing:
        return [], dict.fromkeys(names, f"has no {', no '.join(missing)}")
    peers, left_out = [], {}
    for name in names:
        try:
            make = make_plain if name == "plain" else partial(make_torch, name)
            peers.append(on_first_device(make, window_BL, cfg))
        except UserError as e:
            left_out[name] = e.problems[0].what
        except Exception as e:  # other libraries raise anything; the rest is still measured
            left_out[name] = describe(e)
    return peers, left_out


# ---- measurements


def read_clocks():
    """Wall seconds, and CPU seconds of all threads."""
    return np.array([time.perf_counter(), time.process_time()])


def time_steps(contestant: Contestant, n_steps: int):
    """[wall, CPU] seconds per update over n_steps updates, after a quarter as many to warm up."""
    state = contestant.begin()
    for n in (max(1, n_steps // 4), n_steps):
        start = read_clocks()
        for _ in range(n):
            state, metrics = contestant.step(state)
        float(metrics["loss"])  # waits for all of the updates
    return (read_clocks() - start) / n_steps


@partial(jax.jit, static_argnames="times")
def multiply_repeatedly(x, w, times: int):
    """One element of x after `times` multiplications by w."""
    return lax.fori_loop(0, times, lambda _, x: multiply("BD,DF->BF", x, w), x)[0, 0]


def matmul_flops(dtype: str) -> float:
    """FLOP/s of a device in large matmuls by `layers.multiply`; on a CPU, FLOP per CPU second."""
    on_cpu = jax.default_backend() == "cpu"
    n, times = (2048, 3) if on_cpu else (8192, 50)
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)
    w = x / n**0.5  # keeps the size of the products' elements
    for _ in range(2):  # the first time compiles
        start = read_clocks()
        float(multiply_repeatedly(x, w, times))
    wall_seconds, cpu_seconds = read_clocks() - start
    return 2 * n**3 * times / (cpu_seconds if on_cpu else wall_seconds)


def palm_flops_per_token(cfg: Config) -> float:
    """model.flops_per_token as PaLM counts (appendix B): masked keys count too, so every query has
    L keys.  In a causal sequence of 2 L - 1 tokens that is the mean."""
    twice_as_long = replace(cfg.train, seq_len=2 * cfg.train.seq_len - 1)
    return model.flops_per_token(replace(cfg, train=twice_as_long))


def summarize(contestant: Contestant, turns: list, matmul_rate: float, cfg: Config) -> dict:
    """The medians over a contestant's measurements (time_steps), and what follows from them.

    matmul_rate: by `matmul_flops`.  "rate" is tokens per second and device, or on a CPU tokens per
    CPU second.  "mfu" and "mfu_palm" are None in float32 and where the peak is unknown.
    """
    wall, cpu = np.median(turns, axis=0).tolist()
    tokens, flops_per_token = cfg.train.batch_size * cfg.train.seq_len, model.flops_per_token(cfg)
    rate = tokens / cpu if jax.default_backend() == "cpu" else tokens / wall / contestant.n_devices
    mesh_peak = utils.peak_flops(cfg)
    peak = mesh_peak and mesh_peak / math.prod(cfg.mesh.sizes)
    return dict(
        name=contestant.name,
        n_devices=contestant.n_devices,
        first_loss=contestant.loss,
        memory_bytes=contestant.memory,
        step_seconds=wall,
        cpu_seconds=cpu,
        compile_seconds=contestant.compile_seconds,
        tokens_per_sec=tokens / wall,
        rate=rate,
        of_matmul=rate * flops_per_token / matmul_rate,
        mfu=peak and rate * flops_per_token / peak,
        mfu_palm=peak and rate * palm_flops_per_token(cfg) / peak,
        turns=[seconds.tolist() for seconds in turns],
    )


COLUMNS = [  # of the table: heading, key of a summary, format, unit
    ("s/step", "step_seconds", ".4f", 1),
    ("CPU s/step", "cpu_seconds", ".3f", 1),
    ("tokens/s", "tokens_per_sec", ",.0f", 1),
    ("MFU", "mfu", ".1%", 1),
    ("MFU (PaLM)", "mfu_palm", ".1%", 1),
    ("of matmul", "of_matmul", ".1%", 1),
    ("compile s", "compile_seconds", ".1f", 1),
    ("GiB", "memory_bytes", ".2f", 2**30),
    ("first loss", "first_loss", ".4f", 1),
]


def format_table(summaries: list[dict]) -> str:
    """A line for each summary under the headings; "-" where a number is unknown."""

    def cell(x, form: str, unit: int) -> str:
        return "-" if x is None else format(x / unit, form)

    lines = [("", *(heading for heading, *_ in COLUMNS))]
    for x in summaries:
        lines.append((x["name"], *(cell(x[key], form, unit) for _, key, form, unit in COLUMNS)))
    return "\n".join(f"{name:<12}" + "".join(f"{x:>11}" for x in cells) for name, *cells in lines)


def measure(args: Args, cfg: Config, others: dict[str, tuple[Config, Mesh]]) -> dict:
    """Measure all contestants in alternation; the result is what --json writes.

    cfg: for the ambient mesh.  others: for more meshes, by the names of their contestants.
    """
    t, n_steps = cfg.train, args.steps or (3 if jax.default_backend() == "cpu" else 20)
    shape, rng = (t.batch_size, t.seq_len + 1), np.random.default_rng(cfg.run.seed)
    window_BL = rng.integers(cfg.model.vocab_size, size=shape, dtype=np.int32)
    contestants = [make_trifold(window_BL, cfg)]
    stats = jax.local_devices()[0].memory_stats() or {}  # before the peers use memory
    peers, left_out = make_peers(args.peers, window_BL, cfg)
    contestants += peers
    for name, (other, mesh) in others.items():
        contestants.append(on_mesh(mesh, make_trifold, window_BL, other, name))
    turns, matmul_rates = [], []
    for _ in train.progress(range(args.repeats), "measure", "turn"):
        matmul_rates.append(on_first_device(matmul_flops, t.dtype))
        turns.append([time_steps(contestant, n_steps) for contestant in contestants])
    matmul_rate = float(np.median(matmul_rates))
    pairs = zip(contestants, zip(*turns, strict=True), strict=True)
    first, *rest = (summarize(contestant, x, matmul_rate, cfg) for contestant, x in pairs)
    return dict(
        rows=[first, *rest],
        ratios={x["name"]: first["rate"] / x["rate"] for x in rest},
        left_out=left_out,
        matmul_flops=matmul_rate,
        peak_bytes_in_use=stats.get("peak_bytes_in_use"),
        run=rundir.run_record(cfg),
    )


def main(args: Args, others: dict[str, Config], cfg: Config):
    """Measure, and print the table and its ratios.  others: the config on each of --meshes."""
    jax.config.update("jax_enable_compilation_cache", False)  # to measure the seconds of compiling
    cfg = utils.start_mesh(cfg, plan_remat=train.plan_remat)
    utils.run_on_lead(check_output, "json", args.json)
    resolved = {}
    for name, other in others.items():  # before anything is compiled, because one may be refused
        other = utils.resolve_here(other, plan_remat=train.plan_remat)
        resolved[name] = other, utils.make_mesh(other)
    result, t = measure(args, cfg, resolved), cfg.train
    per = "CPU second" if jax.default_backend() == "cpu" else "second and device"
    size = f"{model.param_count(cfg):,} parameters, {t.batch_size} x {t.seq_len} tokens a step"
    utils.say(f"{cfg.run.name}: {size}, {t.dtype}\n{format_table(result['rows'])}")
    utils.say(f"matmul: {result['matmul_flops'] / 1e12:.3f} TFLOP per {per}")
    if peak := result["peak_bytes_in_use"]:
        utils.say(f"trifold: {peak / 2**30:.2f} GiB in use at most, by the device's count")
    for name, ratio in result["ratios"].items():
        utils.say(f"trifold / {name}: {ratio:.2f} (tokens per {per})")
    for name, reason in result["left_out"].items():
        utils.say(f"left out: {name} ({reason})")
    if args.json and utils.is_lead():
        files.write_whole(files.absolute_path(args.json), json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    processes.run_main(main, ARGS, OTHERS, CFG)
