"""How fast a config trains on the devices present, beside the same model written plainly.

    python scripts/benchmark.py --config gpt2_124m --train.batch_size 48 --train.grad_accum 1

All flags of train.py are taken too.  Trifold's step on the config's mesh and on --meshes, a
plain jit on one device, and transformers under torch.compile take turns in one process, on the same
random tokens, which rest on the device.  On a CPU, whose wall clock other programs disturb, they
are compared in CPU seconds.
"""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checks
import cli
import config
import files
from config import Config, UserError


@dataclass(frozen=True)
class Args:
    repeats: int = 3
    """Turns of each; the table has their median."""
    steps: int = 0
    """Updates timed in a turn, after some to warm up; 0 is 20, or on a CPU 3."""
    peers: tuple[Literal["plain", "transformers"], ...] = ("plain", "transformers")
    """What to compare with; give none to measure Trifold alone."""
    meshes: tuple[str, ...] = ()
    """More meshes for Trifold, as dp,pp,tp, with a schedule, and with mesh.skip_bubbles after that:
    2,2,2 1,4,1,1f1b 1,4,1,1f1b,False.  Accelerators have to be in use all."""
    json: str = ""
    """Write the measurements to this file too."""


def on_meshes(names: tuple[str, ...], flags: list[str]) -> dict[str, Config]:
    """The config of train.py's flags on each of --meshes.  Raises UserError USAGE."""
    found, fields = {}, ("dp", "pp", "tp", "schedule", "skip_bubbles")
    for name in names:
        values = name.split(",")
        if not 3 <= len(values) <= len(fields):
            what = f"meshes: {name!r} is not dp,pp,tp[,schedule[,skip_bubbles]]"
            raise UserError(config.USAGE, what, "write it as in 2,2,2 or 1,4,1,1f1b")
        mesh = zip(fields, values, strict=False)
        found[name] = cli.parse([*flags, *(f"--mesh.{field}={x}" for field, x in mesh)])
    return found


def parse() -> tuple[Args, Config, dict[str, Config]]:
    args, rest = tyro.cli(Args, return_unknown_args=True, use_underscores=True, description=__doc__)
    for name, least in dict(repeats=1, steps=0).items():
        if getattr(args, name) < least:
            what = f"{name}={getattr(args, name)} must be at least {least}"
            raise UserError(config.USAGE, what, f"set --{name} accordingly")
    out = Path(args.json)
    if args.json and (out.is_dir() or not out.parent.is_dir()):
        what = f"--json {out} is not a file in a folder that is there"
        raise UserError(config.USAGE, what, "make the folder, or name another file")
    cfg = cli.parse(rest)
    others = on_meshes(args.meshes, rest)
    sizes = {n.mesh: math.prod(x for x in n.mesh.sizes if x > 0) for n in (cfg, *others.values())}
    cli.simulate_devices(max(sizes, key=sizes.get), cfg.run.num_processes)
    if "transformers" in args.peers:  # JAX would take most of a GPU's memory, and leave torch none
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return args, cfg, others


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG, OTHERS = cli.quit_on_error(parse)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from tqdm import tqdm

import model
import optim
import rundir
import train
import utils

# ---- the plain model: what it takes to train on one device, and no more.  Its dims are model.py's.

# What it has not, and what those settings then are.
PLAIN = {
    "model.attention": "gqa", "model.prefix": "", "model.n_experts": 0, "model.window": 0,
    "model.attn_softcap": 0, "model.logit_softcap": 0, "model.rope_scaling": "none",
    "train.dropout": 0, "train.z_loss": 0, "data.document_mask": False,
}  # fmt: skip
# The policy of jax.checkpoint for train.remat; the others keep everything.
PLAIN_REMAT = dict(layer=None, dots=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def plain_norm(x_BLD, w, name, m):
    x = x_BLD.astype(jnp.float32)
    if m.norm == "layer":
        x -= x.mean(-1, keepdims=True)
    x *= lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + m.norm_eps)
    return (x * w[f"{name}_D"] + w.get(f"{name}_bias_D", 0)).astype(x_BLD.dtype)


def plain_rope(x_BLHK, m):
    if m.positions == "learned":
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
        q_BLHK = plain_norm(q_BLHK, dict(q_D=w["q_norm_K"]), "q", m)
        k_BLGK = plain_norm(k_BLGK, dict(k_D=w["k_norm_K"]), "k", m)
    q_BLHK, k_BLGK = plain_rope(q_BLHK, m), plain_rope(k_BLGK, m)
    y_BLHK = jax.nn.dot_product_attention(q_BLHK, k_BLGK, v_BLGK, is_causal=True)
    x_BLD += jnp.einsum("BLHK,HKD->BLD", y_BLHK, w["o_HKD"]) + w.get("o_bias_D", 0)
    h_BLD, bias = plain_norm(x_BLD, w, "mlp_norm", m), w.get("in_bias_CF", [0, 0])
    gate_BLF, up_BLF = h_BLD @ w["in_CDF"][0] + bias[0], h_BLD @ w["in_CDF"][-1] + bias[-1]
    if m.activation == "swiglu":
        h_BLF = jax.nn.silu(gate_BLF) * up_BLF
    elif m.activation == "relu2":
        h_BLF = jax.nn.relu(up_BLF) ** 2
    else:
        h_BLF = jax.nn.gelu(up_BLF, approximate=m.activation == "gelu_tanh")
    return x_BLD + h_BLF @ w["out_FD"] + w.get("out_bias_D", 0), None


def plain_loss(params, token_BL, target_BL, cfg: Config):
    """Mean negative log likelihood, nats a token; params as train.State has them."""
    m, w = cfg.model, jax.tree.map(lambda x: x.astype(cfg.train.dtype), params)
    x_BLD = w["embed_VD"][token_BL]
    if m.positions == "learned":
        x_BLD += w["position_LD"][: token_BL.shape[1]]
    layer = partial(plain_layer, m=m)
    if cfg.train.remat in PLAIN_REMAT:
        policy = PLAIN_REMAT[cfg.train.remat]
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x_BLD, _ = lax.scan(layer, x_BLD, w["layers"]["dense"])
    unembed_DV = w["embed_VD"].T if m.tie_embeddings else w["unembed_DV"]
    logit_BLV = (plain_norm(x_BLD, w, "norm", m) @ unembed_DV).astype(jnp.float32)
    logit_BLV = logit_BLV[..., : m.vocab_size]
    return optax.softmax_cross_entropy_with_integer_labels(logit_BLV, target_BL).mean()


def plain_optimizer(cfg: Config) -> optax.GradientTransformation:
    o, decayed = cfg.optim, jax.tree.map(lambda p: p.decay, model.param_table(cfg))
    rate = partial(optim.learning_rate, cfg=cfg)
    adamw = optax.adamw(rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw)


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def plain_step(state, tokens_ABL, targets_ABL, cfg: Config):
    """One update of state, (params, opt)."""
    params, opt = state
    value_and_grad = jax.value_and_grad(partial(plain_loss, cfg=cfg))

    def add(total, slice):
        return jax.tree.map(jnp.add, total, value_and_grad(params, *slice)), None

    first, A = value_and_grad(params, tokens_ABL[0], targets_ABL[0]), len(tokens_ABL)
    total = lax.scan(add, first, (tokens_ABL[1:], targets_ABL[1:]))[0] if A > 1 else first
    loss, grads = jax.tree.map(lambda x: x / A, total)
    updates, opt = plain_optimizer(cfg).update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), dict(loss=loss)


def plain_state(cfg: Config):
    """(params, opt) with Trifold's own initial weights."""
    params = model.init_params(cfg)
    return params, plain_optimizer(cfg).init(params)


# ---- contestants


class Contestant(NamedTuple):
    """One way to take a training step, compiled and run once."""

    name: str
    n_devices: int
    begin: Callable
    """() -> the state to start a turn from."""
    step: Callable
    """state -> (the next state, {"loss": nats a token}); does not wait for the device."""
    compile_seconds: float
    memory: int | None
    """Bytes of a device that a step needs: by XLA's plan, or torch's count; None is not known."""
    loss: float
    """Of the first update."""


def alone(f, *args):
    """f(*args) on the first device only, whatever the ambient mesh."""
    types = (AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((1,), "x", axis_types=types, devices=jax.local_devices()[:1])):
        return f(*args)


def compiled(name: str, n_devices: int, step, begin, batch, cfg: Config) -> Contestant:
    state, start = begin(), time.perf_counter()
    program = utils.compile_program(step, state, *batch, cfg)
    seconds, use = time.perf_counter() - start, program.memory_analysis()
    memory = use.argument_size_in_bytes + use.temp_size_in_bytes
    memory += use.output_size_in_bytes - use.alias_size_in_bytes  # what is donated becomes output
    loss = float(program(state, *batch)[1]["loss"])
    return Contestant(name, n_devices, begin, lambda s: program(s, *batch), seconds, memory, loss)


def trifold(row_BL, cfg: Config, name: str = "trifold") -> Contestant:
    """train.train_step on the ambient mesh.  row_BL: the batch, each row a token longer than a
    sequence, int32."""
    home, t, mesh = utils.shardings(model.TOKEN_SPEC), cfg.train, jax.sharding.get_mesh()
    shape = t.grad_accum, t.microbatches, -1, t.seq_len
    batch = [jax.device_put(x.reshape(shape), home) for x in (row_BL[:, :-1], row_BL[:, 1:])]

    def begin():
        with jax.set_mesh(mesh):
            return train.init_state(cfg)

    return compiled(name, mesh.size, train.train_step, begin, batch, cfg)


def trifold_on(name: str, row_BL, cfg: Config) -> Contestant:
    """The same on cfg's mesh."""
    with jax.set_mesh(utils.make_mesh(cfg)):
        return trifold(row_BL, cfg, name)


def plain(row_BL, cfg: Config) -> Contestant:
    """plain_step on one device."""
    shape = cfg.train.grad_accum, -1, cfg.train.seq_len
    batch = [jnp.array(x.reshape(shape)) for x in (row_BL[:, :-1], row_BL[:, 1:])]
    begin = partial(alone, jax.jit(plain_state, static_argnums=0), cfg)
    return compiled("plain jit", 1, plain_step, begin, batch, cfg)


def transformers(row_BL, cfg: Config) -> Contestant:
    """Hugging Face's model of the same config under torch.compile, from random weights: float32
    ones, and autocast to the compute dtype.

    Raises UserError USAGE where it is not installed, DATA where it has no such model.
    """
    if missing := [name for name in ("torch", "transformers") if not find_spec(name)]:
        what = f"{' and '.join(missing)} not installed"
        raise UserError(config.USAGE, what, "pip install torch transformers")
    if platform() not in ("cpu", "gpu"):
        raise UserError(config.USAGE, f"is not measured on {platform()}", "leave it out")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from scripts import convert_hf

    device, o = dict(cpu="cpu", gpu="cuda")[platform()], cfg.optim
    settings = convert_hf.write_config(cfg, cfg.train.dtype, None)
    settings |= dict(vocab_size=cfg.model.vocab_rows)  # its matmuls have our shapes
    settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    kind = dict(attn_implementation="sdpa", dtype=torch.float32)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), **kind).to(device)
    adam = dict(lr=o.lr, betas=(o.b1, o.b2), eps=o.eps, weight_decay=o.weight_decay)
    adamw = torch.optim.AdamW(network.train().parameters(), fused=True, **adam)
    slices = torch.tensor(row_BL, dtype=torch.long, device=device).chunk(cfg.train.grad_accum)

    @torch.compile
    def loss_of(row_BL):
        logit_BLV = network(input_ids=row_BL[:, :-1], use_cache=False).logits.float()
        target_BL = row_BL[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logit_BLV.flatten(0, 1), target_BL)

    def step(state):
        total = 0
        for row_BL in slices:
            with torch.autocast(device, torch.bfloat16, enabled=cfg.train.dtype == "bfloat16"):
                loss = loss_of(row_BL) / len(slices)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(network.parameters(), o.clip_norm)
        adamw.step()
        adamw.zero_grad()
        return state, dict(loss=total)

    start = time.perf_counter()
    loss = float(step(None)[1]["loss"])
    seconds = time.perf_counter() - start
    float(step(None)[1]["loss"])  # the first had no moments yet
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Contestant("transformers", 1, lambda: None, step, seconds, memory, loss)


PEERS = dict(plain=plain, transformers=transformers)


def enter_peers(names, row_BL, cfg: Config) -> tuple[list[Contestant], dict[str, str]]:
    """The peers, and why those are left out that are."""
    entered, left_out = [], {}
    beyond = [
        f"{n}={config.field_value(cfg, n)}"
        for n, x in PLAIN.items()
        if config.field_value(cfg, n) != x
    ]
    beyond += ["several processes"] if jax.process_count() > 1 else []
    for name in names:
        try:
            if beyond:
                raise UserError(config.USAGE, f"has no {', no '.join(beyond)}")
            entered.append(alone(PEERS[name], row_BL, cfg))
        except UserError as e:
            left_out[name] = e.problems[0].what
        except Exception as e:  # whatever fails in other libraries, the others are still measured
            left_out[name] = f"{type(e).__name__}: {str(e)[:200]}".splitlines()[0]
    return entered, left_out


# ---- measurements


def platform() -> str:
    return jax.devices()[0].platform


def clock():
    """Wall seconds, and CPU seconds of all threads."""
    return np.array([time.perf_counter(), time.process_time()])


def turn(c: Contestant, n_steps: int):
    """[wall, CPU] seconds of each of n_steps updates, after a quarter as many to warm up."""
    state = c.begin()
    for n in (max(1, n_steps // 4), n_steps):
        start = clock()
        for _ in range(n):
            state, metrics = c.step(state)
        float(metrics["loss"])  # waits for them all
    return (clock() - start) / n_steps


@partial(jax.jit, static_argnames=("times", "out"))
def products(x, w, times: int, out):
    def product(_, x):
        return jnp.matmul(x, w, preferred_element_type=out).astype(x.dtype)

    return lax.fori_loop(0, times, product, x)[0, 0]


def matmul_flops(dtype: str) -> float:
    """FLOP/s of a device in large matmuls; on a CPU, in a CPU second."""
    cpu = platform() == "cpu"
    # Only into float32 does XLA use the bfloat16 instructions of a CPU: it is twice as fast.
    n, times, out = (2048, 3, "float32") if cpu else (8192, 50, dtype)
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)
    w = x / n**0.5  # so that products stay of that size
    for _ in range(2):  # the first compiles
        start = clock()
        float(products(x, w, times, out))
    return 2 * n**3 * times / (clock() - start)[int(cpu)]


def palm_flops(cfg: Config) -> float:
    """model.flops_per_token with all keys of the sequence, seen or not (PaLM, appendix B): as many
    as a causal sequence of twice the length sees on average."""
    longer = replace(cfg.train, seq_len=2 * cfg.train.seq_len - 1)
    return model.flops_per_token(replace(cfg, train=longer))


def row(c: Contestant, turns: list, ceiling: float, cfg: Config) -> dict:
    """What a contestant's turns come to, in medians.  `rate` is tokens per second and device, or on
    a CPU per CPU second; an MFU is None where the peak is unknown."""
    wall, cpu = np.median(turns, axis=0).tolist()
    tokens, causal = cfg.train.batch_size * cfg.train.seq_len, model.flops_per_token(cfg)
    rate = tokens / cpu if platform() == "cpu" else tokens / wall / c.n_devices
    peak = utils.peak_flops(cfg)
    peak = peak and peak / math.prod(cfg.mesh.sizes)
    about = dict(name=c.name, n_devices=c.n_devices, first_loss=c.loss, memory_bytes=c.memory)
    times = dict(step_seconds=wall, cpu_seconds=cpu, compile_seconds=c.compile_seconds)
    shares = dict(
        mfu=peak and rate * causal / peak, mfu_palm=peak and rate * palm_flops(cfg) / peak
    )
    rates = dict(tokens_per_sec=tokens / wall, rate=rate, of_matmul=rate * causal / ceiling)
    return about | times | rates | shares | dict(turns=[t.tolist() for t in turns])


COLUMNS = {  # of the table: field of a row, how it is written, in what unit
    "": ("name", "", None),
    "s/step": ("step_seconds", ".4f", 1),
    "CPU s": ("cpu_seconds", ".3f", 1),
    "tokens/s": ("tokens_per_sec", ",.0f", 1),
    "MFU": ("mfu", ".1%", 1),
    "PaLM's": ("mfu_palm", ".1%", 1),
    "of matmul": ("of_matmul", ".1%", 1),
    "compile s": ("compile_seconds", ".1f", 1),
    "GiB": ("memory_bytes", ".2f", 2**30),
    "first loss": ("first_loss", ".4f", 1),
}


def table(rows: list[dict]) -> str:
    """The rows as text; - is not known."""

    def cell(x, form, unit) -> str:
        return "-" if x is None else format(x / unit if unit else x, form)

    lines = [[*COLUMNS]]
    lines += [[cell(r[field], *how) for field, *how in COLUMNS.values()] for r in rows]
    return "\n".join(f"{name:<12}" + "".join(f"{x:>11}" for x in cells) for name, *cells in lines)


def measure(args: Args, cfg: Config, others: dict[str, Config]) -> dict:
    """Let each take its turns, A B A B; what comes of it, as --json has it.  others: for more
    meshes, by their names."""
    t, n_steps = cfg.train, args.steps or (3 if platform() == "cpu" else 20)
    shape, rng = (t.batch_size, t.seq_len + 1), np.random.default_rng(cfg.run.seed)
    row_BL = rng.integers(cfg.model.vocab_size, size=shape, dtype=np.int32)
    ours = trifold(row_BL, cfg)
    stats = jax.local_devices()[0].memory_stats() or {}  # before the peers' share
    peers, left_out = enter_peers(args.peers, row_BL, cfg)
    peers += [trifold_on(name, row_BL, other) for name, other in others.items()]
    turns, ceilings = {c: [] for c in (ours, *peers)}, []
    for _ in tqdm(range(args.repeats), "measure", leave=False, disable=not utils.is_lead()):
        ceilings.append(alone(matmul_flops, t.dtype))
        for c in turns:
            turns[c].append(turn(c, n_steps))
    ceiling = statistics.median(ceilings)
    rows = [row(c, turns[c], ceiling, cfg) for c in turns]
    ratios = {r["name"]: rows[0]["rate"] / r["rate"] for r in rows[1:]}
    result = dict(rows=rows, ratios=ratios, left_out=left_out, matmul_flops=ceiling)
    result |= dict(peak_bytes_in_use=stats.get("peak_bytes_in_use"))
    return result | dict(run=json.loads(rundir.run_record(cfg, "", "")))


def main(cfg: Config):
    """Measure, and print the table and what it comes to."""
    jax.config.update("jax_enable_compilation_cache", False)  # or compile_seconds is of a load
    args, cfg = ARGS, utils.start_mesh(cfg)
    others = {name: checks.resolve(other, jax.device_count()) for name, other in OTHERS.items()}
    for other in others.values():  # before anything is compiled
        utils.make_mesh(other)
    result, t = measure(args, cfg, others), cfg.train
    per = "CPU second" if platform() == "cpu" else "second and device"
    size = f"{model.param_count(cfg):,} parameters, {t.batch_size} x {t.seq_len} tokens a step"
    utils.say(f"{cfg.run.name}: {size}, {t.dtype}\n{table(result['rows'])}")
    utils.say(f"matmul: {result['matmul_flops'] / 1e12:.3f} TFLOP per {per}")
    if peak := result["peak_bytes_in_use"]:
        utils.say(f"trifold: {peak / 2**30:.2f} GiB in use at most, by the device's own count")
    for name, ratio in result["ratios"].items():
        utils.say(f"trifold / {name}: {ratio:.2f} (tokens per {per})")
    for name, why in result["left_out"].items():
        utils.say(f"left out: {name} ({why})")
    if args.json and utils.is_lead():
        files.write_whole(files.absolute_path(args.json), json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    utils.run_main(main, CFG)
