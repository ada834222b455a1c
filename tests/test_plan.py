"""The plan: the costs counted in the step are those of the formulas, and an overflow is named."""

import inspect
import json
import math
import os
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import needs, run
from jax._src.cudnn import fused_attention_stablehlo
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

import checks
import config
import cost_model
import generate
import grouped
import model
import optim
import profiling
import runstate
import step_picture
import train
import utils
from chips import CHIPS, GIB, PEAK_TFLOPS, chip_of, gpu_target, parse_topology
from errors import USAGE, UserError
from scripts import compiled_cost, plan

CHIP = CHIPS["v5e"]
TINY = replace(config.tiny(), train=replace(config.tiny().train, dtype="bfloat16"))


@pytest.fixture(autouse=True)
def no_mesh():
    """No ambient mesh, as in the script: one of this machine's devices would have other sizes."""
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        yield


def configure(mesh, cfg=TINY, **fields) -> config.Config:
    """cfg with these fields of its mesh, or these sizes, and these fields of cfg.train."""
    mesh = mesh if isinstance(mesh, dict) else dict(zip(utils.AXES, mesh, strict=True))
    cfg = replace(cfg, mesh=replace(cfg.mesh, **mesh), train=replace(cfg.train, **fields))
    return checks.resolve(cfg, cfg.mesh.dp * cfg.mesh.pp * cfg.mesh.tp)


def trace(cfg, chip=CHIP):
    return cost_model.trace_step(train.step_jaxpr, cfg, chip)


def count(cfg, chip=CHIP) -> cost_model.Cost:
    return cost_model.count_cost(trace(cfg, chip), cfg, chip)


def collectives_by_formula(cfg) -> tuple[dict, dict]:
    """{(collective, axis): calls} and {(collective, axis): bytes received} of a dense model with
    FSDP and Megatron's sequence parallelism, without the small sums over pp and tp."""
    m, t, (dp, pp, tp) = cfg.model, cfg.train, cfg.mesh.sizes
    D, F, H, G, K, V = m.d_model, m.d_ff, m.n_heads, m.n_kv_heads, m.d_head, m.vocab_rows
    M = t.microbatches * t.grad_accum
    n = M * m.n_layers // pp  # times that a stage runs a layer
    # Bytes: of the residual stream of one microbatch, of a layer's and of the ends' weights.
    x = 2 * t.batch_size // dp // M * t.seq_len * D
    weights, ends = 2 * (2 * D * (H + G) * K + 3 * D * F) // tp, 2 * 2 * D * V // tp
    stage, gains = weights * m.n_layers // pp, 4 * 2 * D * m.n_layers // pp
    recomputed = 0 if t.remat == "none" else 1
    summed_again = 0 if t.remat == "dots" else recomputed
    schedule = cost_model.step_schedule(cfg)
    ticks = schedule.ticks * M // schedule.microbatches
    tokens = 4 * t.batch_size * t.seq_len // dp
    # Weights are gathered in bfloat16.  Gradients of weights that are gathered once a step, and of
    # the ends always, are summed in float32.
    gathers, scatters, sums = {
        "layer": ((12 * n + 2, 2 * n * weights + ends), (6 * n + 2, n * weights + 2 * ends), 0),
        "step": ((8, stage + ends), (8, 2 * (stage + ends)), 0),
        "none": ((0, 0), (0, 0), 8),
    }[cfg.mesh.fsdp]
    # An interleaved schedule sends its parts of 6 matrices and 2 gains to their stages, and the
    # gradients back in float32; with two stages of two parts, each stage keeps one part.
    parts = cfg.mesh.virtual_stages
    kept = 1 if parts == 1 or pp == parts == 2 else 0
    sent = parts - kept
    at_rest = stage // dp if cfg.mesh.fsdp == "layer" else stage
    part_calls, part_bytes = 16 * sent, (3 * at_rest + 2 * gains) * sent // parts
    found = {
        ("all_gather", "dp"): gathers,
        ("reduce_scatter", "dp"): scatters,
        # 3 gains, the loss and its tokens; without FSDP all weights too.  A sum is two rounds.
        ("psum_invariant", "dp"): (
            5 + sums,
            2 * (gains + 4 * D + 8 + (2 * (stage + ends) if sums else 0)),
        ),
        # Two a layer, two for the gradients of its input, and two for those of its weights; then
        # the two ends.
        ("all_gather", "tp"): (
            (4 + 2 * recomputed) * n + 2 * M,
            (4 + 2 * recomputed) * n * x + M * x * (1 + 1 / pp),
        ),
        ("reduce_scatter", "tp"): (
            (4 + summed_again) * n + 2 * M,
            (4 + summed_again) * n * x + M * x * (1 + 1 / pp),
        ),
        ("ppermute", "pp"): (2 * ticks + part_calls, 2 * ticks * x // tp + part_bytes),
        ("all_gather", "pp"): (2 + M, 2 * tokens + M * x // tp),
        ("reduce_scatter", "pp"): (M, M * x // tp),
    }
    sizes = dict(dp=dp, pp=pp, tp=tp)
    found = {k: x for k, x in found.items() if sizes[k[1]] > 1 and x[0]}
    share = {k: 1 if k[0] == "ppermute" else 1 - 1 / sizes[k[1]] for k in found}
    return {k: n for k, (n, _) in found.items()}, {k: x * share[k] for k, (_, x) in found.items()}


# Each axis alone, and mixtures, with different accumulation, remat, schedules and FSDP.
CASES = [
    (dict(), dict(grad_accum=2)),
    (dict(dp=8), dict(grad_accum=2)),
    (dict(pp=8), dict(remat="none")),
    (dict(tp=8), dict()),
    (dict(dp=2, pp=2, tp=2), dict(remat="dots", grad_accum=2)),
    (dict(dp=2, pp=4), dict(microbatches=8)),
    (dict(dp=2, pp=2, tp=2, fsdp="step", schedule="1f1b"), dict(grad_accum=2)),
    (dict(dp=4, tp=2, fsdp="none"), dict(grad_accum=2)),
    (dict(dp=2, pp=2, tp=2, schedule="interleaved", virtual_stages=2), dict(grad_accum=2)),
    (dict(dp=2, pp=4, schedule="interleaved", virtual_stages=2, fsdp="step"), dict()),
]


@pytest.mark.parametrize("mesh, fields", CASES, ids=str)
def test_collectives_and_flops_of_the_step_are_those_of_the_formulas(mesh, fields):
    cfg = configure(dict(dp=1, pp=1, tp=1) | mesh, **fields)
    m, t, (dp, pp, tp) = cfg.model, cfg.train, cfg.mesh.sizes
    cost = count(cfg)
    calls, received = collectives_by_formula(cfg)
    sums = ("psum_invariant", "pp"), ("psum_invariant", "tp"), ("pmax", "tp")
    for k in (k for k in sums if k in cost.calls):  # small, and not in the formulas
        calls[k], received[k] = cost.calls[k], cost.received[k]
    assert dict(cost.calls) == calls
    assert dict(cost.received) == pytest.approx(received, rel=1e-12)

    D, F, H, G, K = m.d_model, m.d_ff, m.n_heads, m.n_kv_heads, m.d_head
    matmuls, attention = 2 * D * (H + G) * K + 3 * D * F, 2 * t.seq_len * H * K
    rotary = (H + G) * K * K  # of attention.rope on a TPU
    layer = 3 * (matmuls + attention) + attention / 2  # the backward pass computes the scores again
    recomputed = {
        "none": 0,
        "dots": attention + rotary,
        "layer": matmuls + attention + rotary - D * F,
    }
    layer += 2 * rotary + recomputed[t.remat]
    flops = 2 * (m.n_layers * layer + 3 * D * m.vocab_rows)
    assert cost.flops == pytest.approx(flops * t.batch_size * t.seq_len / (dp * pp * tp))


HLO_BYTES = dict(f32=4, bf16=2, s32=4, pred=1)
HLO_COLLECTIVES = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "collective-permute": "ppermute",
}


def collective_in_line(line: str, sizes) -> Counter:
    """Calls and bytes received of the collective in a line of a compiled program, if any."""
    found, names = Counter(), "|".join(HLO_COLLECTIVES)
    if match := re.search(rf" = (.*?) ({names})(?:-start)?\(", line):
        name = HLO_COLLECTIVES[match[2]]
        (axis,) = profiling.collective_axes(line, sizes) or [""]
        n = dict(zip(utils.AXES, sizes, strict=True)).get(axis, 1)
        dtype, shape = re.match(r"(\w+)\[([\d,]*)\]", match[1]).groups()
        output = HLO_BYTES[dtype] * math.prod(int(x) for x in shape.split(",") if x)
        whole = output * n if name == "reduce_scatter" else output
        received = output if name == "ppermute" else whole * (n - 1) / n
        found.update({(name, axis, "calls"): 1, (name, axis): received})
    return found


@pytest.mark.parametrize("mesh, fields", [CASES[i] for i in (4, 6, 9)], ids=str)
def test_xla_compiles_just_the_collectives_that_are_counted(mesh, fields):
    """In float32, since XLA's collectives on a CPU have no bfloat16."""
    cfg = configure(dict(dp=1, pp=1, tp=1) | mesh, TINY, dtype="float32", **fields)
    cost, names = count(cfg), HLO_COLLECTIVES.values()
    want = {(*k, "calls"): n for k, n in cost.calls.items() if k[0] in names}
    want |= {k: n for k, n in cost.received.items() if k[0] in names}
    cfg = utils.start_mesh(cfg)
    args = runstate.with_shardings(train.step_shapes(cfg), train.step_specs(cfg))
    hlo = utils.compile_program(train.train_step, *args, cfg).as_text()
    read_line = partial(collective_in_line, sizes=cfg.mesh.sizes)
    got = compiled_cost.sum_lines(hlo, cfg, read_line)
    assert {k: n for k, n in got.items() if k[1]} == pytest.approx(want, rel=1e-12)


# ---- slices


def sent_in_line(line: str, sizes) -> Counter:
    """{(operation, axes): bytes} of the collective in a line of a compiled program, if any."""
    match = re.search(r" = (.*?) ([a-z-]+)\((.*)", line)
    if match is None or not re.search("_groups=|_pairs=", match[3]):
        return Counter()
    axes = profiling.collective_axes(match[3], sizes)
    assert axes is not None, line
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
    counts = (
        (HLO_BYTES[dtype], math.prod(map(int, filter(None, s.split(","))))) for dtype, s in shapes
    )
    return Counter({(match[2].removesuffix("-start"), *axes): sum(math.prod(x) for x in counts)})


SLICED = [
    (dict(dp="2x2", tp=2), dict(grad_accum=2)),
    (dict(dp="2x1", pp=2, tp=2, schedule="interleaved", virtual_stages=2), dict()),
    (dict(dp="2x2", pp=2, fsdp="step", schedule="1f1b"), dict()),
]


@pytest.mark.parametrize("mesh, fields", SLICED, ids=str)
def test_only_the_sum_of_the_gradients_crosses_slices_and_once(mesh, fields):
    """Besides two numbers, the loss and its tokens, over which all axes are summed at once."""
    cfg = configure(dict(dp=1, pp=1, tp=1) | mesh, TINY, dtype="float32", **fields)
    weights = cost_model.state_bytes(cfg)["weights"]
    assert count(cfg).received_over("slice") == weights + 2 * 4
    cfg = utils.start_mesh(cfg)
    args = runstate.with_shardings(train.step_shapes(cfg), train.step_specs(cfg))
    hlo = utils.compile_program(train.train_step, *args, cfg).as_text()
    sizes = tuple(cfg.mesh.shape.values())
    found = compiled_cost.sum_lines(hlo, cfg, partial(sent_in_line, sizes=sizes))
    assert len(found) > 2
    crossing = {k: n for k, n in found.items() if "slice" in k}
    assert crossing.pop(("all-reduce", "slice")) == weights
    assert {k[0] for k in crossing} == {"all-reduce"} and sum(crossing.values()) == 2 * 4


@pytest.mark.slow
def test_a_plan_for_slices_bounds_the_step_by_both_networks():
    args = "--topology", "v5e:2x2", "--slices", 2, "--mesh.tp", 2, "--json"
    code, text, error = answer(*args)
    assert code == 0, error
    found, seconds = json.loads(text), json.loads(text)["seconds"]
    assert found["mesh"] == dict(dp="2x2", pp=1, tp=2)
    assert seconds["slice"] == found["networks"]["DCN"] / CHIP.slow
    assert seconds["dp"] + seconds["tp"] == pytest.approx(found["networks"]["ICI"] / CHIP.link)
    assert found["best"]["step_time"] == seconds["slice"]  # the longest, for so small a model
    half = json.loads(answer(*args, "--mesh.slow_dtype", "bfloat16")[1])
    assert half["networks"]["DCN"] == pytest.approx(found["networks"]["DCN"] / 2, rel=1e-3)
    plans = plan.search(replace(TINY, train=replace(TINY.train, batch_size=4)), CHIP, 2, 2)["plans"]
    assert {tuple(x["mesh"].values()) for x in plans} == {
        ("2x2", 1, 1),
        ("2x1", 2, 1),
        ("2x1", 1, 2),
    }


MOE_FIELDS = dict(pattern="moe", n_experts=8, n_active=2, n_shared=1, d_expert=64)
MOE = replace(TINY, model=replace(TINY.model, vocab_size=512, **MOE_FIELDS))


@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
def test_tokens_go_to_their_experts_and_back_as_the_formula_says(capacity_factor):
    """Each layer sends tokens to their experts and back, to them again when it is recomputed, and
    both ways for the gradients.  Each pair of token and expert takes a gate along, and without a
    capacity an id; then each rank has room for the tokens of all ranks."""
    cfg = configure(
        dict(dp=4, pp=1, tp=2, experts="alltoall"), MOE, capacity_factor=capacity_factor
    )
    m, t, dp = cfg.model, cfg.train, cfg.mesh.dp
    n = t.microbatches * t.grad_accum * m.n_layers
    tokens = t.batch_size // dp // t.microbatches // t.grad_accum * t.seq_len
    rows, ids = tokens * m.n_active, 0
    if not capacity_factor:
        rows, ids = dp * tokens * min(m.n_active, m.n_experts // dp), 2
    cost, sent = count(cfg), 1 - 1 / dp
    assert cost.calls["all_to_all", "dp"] == (5 + 3 + ids) * n  # ids have no gradient, gates do
    pair_bytes = 5 * 2 * m.d_model + 3 * 2 + ids * 4
    assert cost.received["all_to_all", "dp"] == n * sent * rows * pair_bytes


@pytest.mark.parametrize("form", ["tiles", "kernels"])
def test_flops_of_experts_are_those_that_a_token_is_sent_to(form):
    """As many as model.flops_per_token says, and the masked half of attention, its recomputed
    scores, the products of attention.rope, the recomputed hidden units, and the padding of tiles,
    which kernels do not need."""
    sizes = dict(d_model=128, d_expert=128) if form == "kernels" else {}
    cfg = replace(MOE, model=replace(MOE.model, **sizes))
    cfg = configure((1, 1, 1), cfg, remat="none")
    m, t = cfg.model, cfg.train
    masked = 12 * m.n_layers * m.n_heads * m.d_head * (t.seq_len - 1) / 2
    pairs = t.batch_size // t.grad_accum // t.microbatches * t.seq_len * m.n_active
    n_tiles, tile_rows = grouped.tile_shape(pairs, m.n_experts)
    rows_per_pair = 1 if form == "kernels" else n_tiles * tile_rows / pairs
    extra = rows_per_pair * (6 * 3 + 2 * 2) - 6 * 3
    extra *= m.n_layers * m.n_active * m.d_model * m.d_expert
    scores = 2 * m.n_layers * m.n_heads * m.d_head * t.seq_len
    rotary = 2 * 2 * m.n_layers * (m.n_heads + m.n_kv_heads) * m.d_head**2
    want = model.flops_per_token(cfg) + masked + scores + rotary + extra
    assert count(cfg).flops / (t.batch_size * t.seq_len) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("chip", ["v5e", "h200"])
def test_kernels_of_attention_multiply_what_local_layers_see_and_values_have_their_own_width(chip):
    """Of seven products, three have the width of a value head; cuDNN pads it to a key head's."""
    mla = dict(attention="mla", kv_rank=32, d_head=16, d_rope=16, d_value=24)
    flops, pairs = [], []
    for window in (256, 100):
        sizes = mla | dict(pattern="dense_local,dense", window=window)
        cfg = replace(TINY, model=replace(TINY.model, **sizes))
        cfg = configure((1, 1, 1), cfg, seq_len=256, remat="none")
        flops.append(count(cfg, CHIPS[chip]).flops)
        pairs.append(sum(min(i + 1, window) for i in range(256)))
    width = 32 * 4 + 3 * (32 if chip == "h200" else 24)
    n = cfg.train.batch_size * cfg.model.n_heads * cfg.model.n_layers // 2
    assert flops[0] - flops[1] == pytest.approx(2 * width * n * (pairs[0] - pairs[1]))


@pytest.mark.parametrize("chip", ["v5e", "h200"])
def test_kernels_multiply_only_the_rows_of_their_experts(chip):
    """Another active expert of a token adds eleven products: three each with gate, up and down (one
    forward and two backward), and one each with gate and up, whose hidden units are recomputed."""
    flops = []
    for n_active in (1, 2):
        sizes = dict(d_model=128, d_expert=128, n_active=n_active)
        cfg = configure((1, 1, 1), replace(MOE, model=replace(MOE.model, **sizes)), remat="none")
        flops.append(count(cfg, CHIPS[chip]).flops)
    tokens, m = cfg.train.batch_size * cfg.train.seq_len, cfg.model
    want = tokens * m.n_layers * (6 * 3 + 2 * 2) * m.d_model * m.d_expert
    assert flops[1] - flops[0] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_gpus_sum_the_gradients_of_biases_by_products(mesh):
    """Only products count as FLOPs; a sum would add none.  JAX refuses to trace the product if its
    type does not vary over the mesh as the bias's does."""
    flops = []
    for has_bias in (False, True):
        fields = dict(attn_bias=has_bias, mlp_bias=has_bias)
        cfg = configure(mesh, replace(TINY, model=replace(TINY.model, **fields)))
        flops.append(count(cfg, CHIPS["h200"]).flops)
    assert flops[1] > flops[0]


def kernel_flops(jaxpr, cfg) -> float:
    """The FLOPs of kernels in a jaxpr."""
    total = 0
    for op in cost_model.flatten(jaxpr).ops:
        if op.name in cost_model.KERNELS:
            total += cost_model.count_flops(op, cfg)
        total += sum(times * kernel_flops(body, cfg) for body, times in cost_model.bodies(op))
    return total


def test_remat_dots_keeps_what_cudnns_attention_returns():
    """Of seven products remat=layer does two once more."""
    flops, wide = {}, replace(TINY, model=replace(TINY.model, d_head=16))
    for remat in ("none", "dots", "layer"):
        cfg = configure((1, 1, 1), wide, seq_len=256, remat=remat)
        flops[remat] = kernel_flops(trace(cfg, CHIPS["h200"]), cfg)
    assert flops["dots"] == flops["none"] > 0
    assert flops["layer"] == pytest.approx(9 / 7 * flops["none"])


# ---- memory


def memory(cfg) -> dict:
    return cost_model.memory_by_class(trace(cfg), cfg, CHIP)


MATRIX = jax.ShapeDtypeStruct((32, 32), "float32")  # 4096 bytes


def peak(f) -> Counter:
    return cost_model.peak_memory(jax.make_jaxpr(f)(MATRIX).jaxpr, set())


def test_an_array_is_in_memory_from_its_matmul_to_its_last_reader_and_is_then_overwritten():
    def three(x):
        a, b = x @ x, jnp.exp(x @ x.T)
        return jnp.sin(a) @ b

    def one(x):
        return jax.lax.scan(lambda x, _: (x.at[0].set(1.0), None), x @ x, length=3)[0]

    def lock_step(x):
        def update(x, i):
            return jnp.where(i < 2, x.at[i].set(jnp.sin(x[i + 1])), x), None

        return jax.lax.scan(update, x @ x, jnp.arange(3))[0]

    assert peak(three)["workspace"] == 3 * 4096
    assert peak(lambda x: three(x) @ x)["workspace"] == 3 * 4096
    assert peak(one).total() == 4096
    assert peak(lock_step).total() == 4096 + 12  # and the numbers that it loops over


def test_arrays_that_a_loop_stacks_for_its_gradient_are_activations():
    def f(x, n):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=n)[0].sum()

    few, many = (peak(jax.grad(partial(f, n=n))) for n in (4, 10))
    assert many["activations"] - few["activations"] == 6 * 2 * 4096  # x and x @ x
    assert many["workspace"] == few["workspace"]


def test_on_gpus_with_tp_the_gradients_of_a_feed_forward_wait_for_attention(monkeypatch):
    def layer(w_KF, x_BLHK):
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        return x_BLHK + jnp.tanh(attend(x_BLHK, x_BLHK, x_BLHK) @ w_KF) @ w_KF.T

    def loss(weights, x_BLHK):
        for w_KF in weights:
            x_BLHK = layer(w_KF, x_BLHK)
        return x_BLHK.astype("float32").sum()

    x_BLHK = jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")
    w_KF = jax.ShapeDtypeStruct((64, 256), "bfloat16")
    with cost_model.assume_gpu(CHIPS["h200"]):
        grad = jax.grad(loss, argnums=(0, 1))
        jaxpr = jax.make_jaxpr(grad)([w_KF, w_KF], x_BLHK).jaxpr
    flat = cost_model.flatten(jaxpr)
    ops = cost_model.delay_weight_gradients(flat, {w_KF.shape}).ops
    assert sorted(map(id, ops)) == sorted(map(id, flat.ops)) and ops != flat.ops
    known = {None, *flat.arguments}
    for op in ops:  # each comes after those whose results it reads
        assert known >= {*op.inputs}
        known |= {*op.outputs}

    def products_of_weights(ops) -> list[str]:
        """The products that are gradients of weights, and the kernels between them."""
        names = {cost_model.ATTENTION_BACKWARD: "attention"}
        shapes = [flat.avals[op.outputs[0]].shape for op in ops]
        is_w = [op.name == "dot_general" and len(s) == 2 for op, s in zip(ops, shapes, strict=True)]
        found = ["w" if w else names.get(op.name) for op, w in zip(ops, is_w, strict=True)]
        return [x for x in found if x]

    assert products_of_weights(flat.ops) == ["w", "w", "attention"] * 2
    assert products_of_weights(ops) == ["attention", "w", "w"] * 2

    asked = []
    monkeypatch.setattr(
        cost_model, "peak_memory", lambda _, shapes, delays: asked.append(delays) or Counter()
    )
    for tp, chip in ((1, CHIPS["h200"]), (2, CHIPS["h200"]), (2, CHIP)):
        cfg = configure((1, 1, tp))
        cost_model.memory_by_class(trace(cfg, chip), cfg, chip)
    assert asked == [False, True, False]


def test_memory_follows_the_config():
    policies = "none", "dots", "layer"
    kept = [memory(configure((1, 2, 1), remat=remat))["activations"] for remat in policies]
    assert kept == sorted(kept, reverse=True)
    for dtype in ("float32", "bfloat16"):  # the sum of the gradients grows in place
        replicated = memory(configure(dict(dp=1, pp=2, tp=1, fsdp="none"), dtype=dtype))
        # Most is in use in attention's backward pass.  Until a layer ends, the gradient of the gain
        # of its second norm waits there to be added to the sum.
        gain = 4 * TINY.model.d_model
        assert replicated["gradients"] == replicated["moments"] / 2 + gain
    kept = {}
    for schedule, microbatches in product(("gpipe", "1f1b"), (8, 32)):
        cfg = configure(dict(dp=1, pp=4, tp=1, schedule=schedule), microbatches=microbatches)
        kept[schedule, microbatches] = memory(cfg)["activations"] * microbatches  # at equal sizes
    assert kept["1f1b", 32] == pytest.approx(kept["1f1b", 8], rel=0.05)
    assert kept["gpipe", 32] > 3 * kept["gpipe", 8]


def sharded_params(cfg) -> int:
    """Parameters on a device of a (4, 1, 1) mesh: all weights but the norms' gains are sharded."""
    n_gains = (2 * cfg.model.n_layers + 1) * cfg.model.d_model
    return (model.param_count(cfg) - n_gains) // 4 + n_gains


def test_optimizer_state_and_traffic_of_adamw_are_8_and_28_bytes_a_parameter():
    cfg = configure((4, 1, 1), replace(TINY, model=replace(TINY.model, vocab_size=512)))
    n = sharded_params(cfg)
    assert cost_model.state_bytes(cfg) == dict(weights=4 * n, moments=8 * n)
    assert cost_model.update_bytes(cfg) == 28 * n
    averaged = replace(cfg, optim=replace(cfg.optim, ema=0.999))  # read and written too
    assert cost_model.state_bytes(averaged) == dict(weights=4 * n, moments=12 * n)
    assert cost_model.update_bytes(averaged) == 36 * n


def test_a_plan_takes_optimizer_state_and_traffic_from_any_optimizer(monkeypatch):
    """From SGD with momentum: one moment, in bfloat16."""
    momentum = optax.sgd(1e-3, momentum=0.9, accumulator_dtype="bfloat16")
    monkeypatch.setitem(optim.OPTIMIZERS, "momentum", lambda cfg: momentum)
    cfg = configure((4, 1, 1), replace(TINY, model=replace(TINY.model, vocab_size=512)))
    cfg = replace(cfg, optim=replace(cfg.optim, name="momentum"))
    n = sharded_params(cfg)
    found = plan.make_plan(cfg, CHIP)
    assert found["memory"]["moments"] == 2 * n
    assert found["seconds"]["update"] * CHIP.hbm == pytest.approx(16 * n, rel=1e-12)


def test_a_plan_may_have_more_devices_than_the_mesh_that_a_notebook_has_started():
    mesh = utils.start_mesh(configure((1, 1, 1))).mesh.shape
    assert plan.make_plan(configure((4, 1, 1)), CHIP)["mesh"]["dp"] == 4
    assert dict(jax.sharding.get_mesh().shape) == mesh


def test_the_hours_of_a_run_are_those_of_its_updates_on_all_devices(capsys):
    cfg = configure((4, 1, 1))
    cfg = replace(cfg, train=replace(cfg.train, steps=10**9))
    found = plan.make_plan(cfg, CHIP)
    plan.print_plan(found, cfg, "four chips")
    line = re.search("all 1,000,000,000 updates(.*)", capsys.readouterr().out)[1]
    hours = [found[bound]["step_time"] * 1e9 / 3600 for bound in ("best", "worst")]
    want = hours[0], 4 * hours[0], hours[1], 4 * hours[1]
    assert re.findall(r"\d[\d,]*\.\d", line) == [f"{x:,.1f}" for x in want]


def test_the_matrices_and_the_moment_of_muon_are_counted():
    """Five steps of x'x, its square and a product with x for each matrix, after one x'x for the
    norm; a device has a fourth of the layers' matrices."""
    adamw = configure((4, 1, 1))
    muon = replace(adamw, optim=replace(adamw.optim, name="muon"))
    want = n_hidden = 0
    for p in utils.leaf_table(model.param_table(adamw)).values():
        if p.rows:
            sizes = p.of_one_layer(p.shape)
            S, T = sorted(math.prod(sizes[dim] for dim in dims) for dims in (p.rows, p.columns))
            n = math.prod(p.shape) // (S * T)
            want += math.ceil(n / 4) * (2 * S * S * T + 5 * (4 * S * S * T + 2 * S**3))
            n_hidden += math.prod(p.shape) // 4
    assert count(muon).flops - count(adamw).flops == want > 0
    both = [cost_model.state_bytes(cfg)["moments"] for cfg in (adamw, muon)]
    assert both[0] - both[1] == 4 * n_hidden


# ---- private functions of JAX

CUDNN_CHECKS = "check_cudnn_version", "check_compute_capability"


def test_drop_unused_removes_operations_without_effect_here_and_in_loops():
    """Fails when jax.interpreters.partial_eval.dce_jaxpr changes."""
    names = list(inspect.signature(partial_eval.dce_jaxpr).parameters)
    assert names[:3] == ["jaxpr", "used_outputs", "instantiate"]

    def f(x):
        unused = jnp.sin(x)
        return jax.lax.scan(lambda x, _: (x @ x, jnp.cos(unused)), x, length=3)[0]

    jaxpr = jax.make_jaxpr(f)(MATRIX).jaxpr
    assert {"sin", "cos"} <= set(re.findall(r"sin|cos", str(jaxpr)))
    (loop,) = cost_model.drop_unused(jaxpr).eqns
    assert [x.primitive.name for x in loop.params["jaxpr"].jaxpr.eqns] == ["dot_general"]


def test_assume_gpu_makes_jax_take_cudnns_kernels_and_leaves_its_module_as_it_was():
    """Fails when the functions of jax._src that it replaces change."""
    asked = [getattr(fused_attention_stablehlo, name) for name in CUDNN_CHECKS]
    assert [list(inspect.signature(f).parameters) for f in asked] == [[], ["capability"]]

    def attention(q_BLHK):
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        return attend(q_BLHK, q_BLHK, q_BLHK).astype("float32").sum()

    q_BLHK = jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")
    with cost_model.assume_gpu(CHIPS["h200"]):
        jaxpr = jax.make_jaxpr(jax.grad(attention))(q_BLHK).jaxpr
    names = [op.name for op in cost_model.flatten(jaxpr).ops]
    kernels = ["dot_product_attention_fwd_wrapper", cost_model.ATTENTION_BACKWARD]
    assert [name for name in names if name in cost_model.KERNELS] == kernels
    with cost_model.assume_gpu(CHIP):
        assert [getattr(fused_attention_stablehlo, name) for name in CUDNN_CHECKS] == asked
    assert [getattr(fused_attention_stablehlo, name) for name in CUDNN_CHECKS] == asked


# ---- the command


def answer(*args) -> tuple[int, str, str]:
    done = run("scripts/plan.py", "--config", "tiny", "--train.dtype", "bfloat16", *args)
    return done.returncode, done.stdout, done.stderr


def test_json_is_one_object_and_says_what_the_table_says():
    args = "--topology", "v5e:2x4", "--mesh.pp", 2, "--mesh.tp", 2
    code, text, _ = answer(*args, "--json")
    found = json.loads(text)
    assert code == 0 and found["fits"] and found["mesh"] == dict(dp=2, pp=2, tp=2)
    assert found["memory_total"] == sum(found["memory"].values())
    assert found["best"]["step_time"] <= found["worst"]["step_time"]
    code, table, _ = answer(*args)
    calls = found["collectives"]["tp all_gather"]["calls"]
    assert code == 0 and re.search(rf"^tp all_gather +{calls:,.0f} calls", table, re.M)


def test_a_plan_for_gpus_counts_their_attention_kernel_without_a_gpu():
    code, _, error = answer("--topology", "h200:1", "--model.d_head", 8)
    assert code == 0 and "plain JAX" not in error, error


REFUSED = [
    (["--topology", "v5e:1", "--train.batch_size", 2**20], "workspace overflow"),
    (["--topology", "v5e:1", "--model.d_ff", 2**20, "--model.d_model", 96], "moments overflow"),
    (["--topology", "v5:9"], "topology='v5:9'"),
    (["--topology", "v5e:8", "--mesh.dp", 2], "= 2*1*1 = 2, but v5e:8 has 8 devices"),
    (["--topology", "v5e:8", "--mesh.pp", 3], "mesh.pp=3 must divide model.n_layers=8"),
    (
        ["--topology", "v5e:1", "--slices", 2, "--mesh.dp", 1],
        "mesh.dp=1 must be a multiple of the 2",
    ),
    (["--topology", "v5e:8", "--mesh.dp", "2x4"], "mesh.dp=2x4 has 2 slices, but --slices is 1"),
    (["--topology", "v5e:8", "--slices", 0], "slices=0 must be at least 1"),
    (["--topology", "v5e:1", "--slices", 10**5], "= 1*100000*1 = 100000 must divide"),
    (["--topology", "v5e:1", "--search", "--compile"], "--search only estimates, but --compile"),
    (["--topology", "v5e:1", "--train.attention", "cudnn"], "runs on gpu, and this is tpu"),
    (["--topology", "h200:16"], "topology=h200:16 has 16 devices, but a node has at most 8"),
]


@pytest.mark.parametrize("args, why", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_an_impossible_plan_is_two_lines_and_exit_2(args, why):
    code, _, error = answer(*args)
    problem, fix = error.splitlines()[-2:]
    assert code == USAGE and why in error and problem.startswith("error: "), error
    assert fix.startswith("  fix: ")


@pytest.mark.parametrize(
    "name, memory, cache",
    [("a100_40gb", 39.42, 40), ("a100", 79.26, 40), ("h100", 79.2, 50), ("h200", 139.8, 60),
     ("b200", 178.36, 126)],
)  # fmt: skip
def test_xla_compiles_for_all_memory_of_a_gpu_and_a_plan_has_what_jax_takes(name, memory, cache):
    target = gpu_target(CHIPS[name])
    sizes = [int(n) for n in re.findall(r"(?:device_memory|l2_cache)_size: (\d+)\n", target)]
    assert sizes == pytest.approx([memory * GIB, cache * 2**20])
    assert CHIPS[name].memory == pytest.approx(0.75 * memory * GIB)


@pytest.mark.parametrize("name, capability", [("a100", 8.0), ("h100", 9.0), ("b200", 10.0)])
def test_a_planned_gpu_has_its_own_compute_capability_and_kernels(name, capability):
    experts = dict(pattern="moe", d_model=128, n_experts=4, d_expert=128)
    wide = replace(TINY, model=replace(TINY.model, **experts))
    cfg = configure((1, 1, 1), wide, seq_len=128)
    with cost_model.absent_mesh(cfg, CHIPS[name]):
        assert utils.compute_capability() == capability
    jaxpr = str(trace(cfg, CHIPS[name]))
    assert ("run_scoped" in jaxpr) == (name == "h100")  # of Pallas


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_a_chip_is_found_by_its_kind_and_has_a_peak(chip):
    assert chip.kind in PEAK_TFLOPS and chip_of(chip.kind) == chip


def test_only_slices_that_can_exist_are_planned_for():
    exist = "v5e:1 v5e:8 v5e:2x2x1 v5e:4x2 v6e:16x16 v4:4x4x2 v5p:2x2x1 v5p:4x4x12 v5p:16x20x28"
    not_one = "v5e:3 v5e:3x3 v5e:2x2x2 v6e:16x32 v5p:3x3x3 v5p:4x4x6 v5p:4x4x4x4 v4:16x16x20"
    for name in exist.split():
        sizes = name.partition(":")[2].split("x")
        assert parse_topology(name)[1] == math.prod(map(int, sizes))
    for name in not_one.split():
        with pytest.raises(UserError, match=f"topology={name}: there is no .* slice"):
            parse_topology(name)
    with pytest.raises(UserError, match="is not a chip"):
        parse_topology("v5e:" + 5000 * "9")  # too many digits for int()


@pytest.mark.parametrize("flag", ["--topology=v5p", "--model.d_ff=-1"])
def test_a_bad_command_line_is_answered_before_jax_is_imported(flag):
    """So that it takes less than half a second."""
    args = "--config", "tiny", "--topology", "v5e:1", flag
    env = os.environ | dict(PYTHONPROFILEIMPORTTIME="1")  # prints a line per import to stderr
    error = run("scripts/plan.py", *args, env=env).stderr
    imported = set(re.findall(r"^import time:.*\| +(\w+)$", error, re.M))
    assert "tyro" in imported and not imported & {"jax", "numpy"} and "error: " in error


def test_search_ranks_legal_plans_and_says_what_rules_out_the_others():
    cfg = replace(TINY, train=replace(TINY.train, batch_size=1, remat="layer"))
    found = plan.search(cfg, CHIP, 1)
    times = [x["worst"]["step_time"] for x in found["plans"]]
    assert times == sorted(times) and not found["out"]
    assert {x["remat"] for x in found["plans"]} >= {"none", "dots", "layer"}

    assert plan.search(cfg, CHIP._replace(memory=1000), 8)["out"]["weights overflow"]
    out = plan.search(cfg, CHIP, 64)["out"]
    heads = "model.n_heads=16 and train.seq_len=16 and"
    assert out[f"mesh.tp must divide {heads} model.n_kv_heads=8"] == 3
    assert out["mesh.tp must divide model.n_kv_heads=8"] == 3
    assert out["train.grad_accum*mesh.dp*mesh.pp must divide train.batch_size=1"] > 9


def test_search_proposes_only_microbatches_that_each_size_of_a_ramp_has():
    cfg = checks.check(replace(TINY, train=replace(TINY.train, batch_ramp="0:24,2:32")))
    proposed, _ = plan.candidates(cfg, 4, 1)
    assert {cfg.train.microbatches for cfg in proposed} == {1, 2, 4, 8}
    assert all(checks.check(cfg) for cfg in proposed)


@pytest.mark.slow
def test_a_plan_is_that_of_the_largest_batch_of_a_ramp():
    one = ["--topology", "v5e:1", "--json"]
    falling, largest = (
        json.loads(answer(*one, *flags)[1])
        for flags in (["--train.batch_ramp", "0:4,100:1"], ["--train.batch_size", 4])
    )
    assert falling["memory_total"] == largest["memory_total"]
    assert falling["best"] == largest["best"]
    ramp = ["--train.batch_ramp", "0:4,100:1", "--train.remat", "layer"]
    found = json.loads(answer(*one, "--search", *ramp)[1])["plans"]
    assert falling["memory_total"] in [x["memory_total"] for x in found]


def test_automatic_remat_keeps_matmuls_where_the_plan_of_the_largest_batch_fits(monkeypatch):
    auto = replace(TINY, train=replace(TINY.train, batch_ramp="0:4,100:1"))
    cfg, chip = configure((1, 1, 1), auto), CHIPS["h100"]
    dots, layer = (
        plan.make_plan(configure((1, 1, 1), batch_size=4, remat=x), chip)["memory_total"]
        for x in ("dots", "layer")
    )
    assert layer < dots
    choose_remat = partial(cost_model.choose_remat, train.step_jaxpr)
    assert choose_remat(cfg, chip._replace(memory=1.25 * dots + 1)) == "dots"
    assert choose_remat(cfg, chip._replace(memory=1.25 * dots - 1)) == "layer"
    for other in (configure((1, 2, 1)), configure((1, 1, 1), MOE)):
        assert choose_remat(other, chip) == "layer"

    def choose(kind, **fields) -> str:
        device = SimpleNamespace(platform="gpu", device_kind=kind, process_index=0)
        monkeypatch.setattr(jax, "devices", lambda *_: [device])
        cfg = replace(auto, mesh=config.Mesh(1, 1, 1), train=replace(auto.train, **fields))
        return utils.resolve_here(cfg, plan_remat=train.plan_remat).train.remat

    assert choose(chip.kind) == "dots" and choose(chip.kind, remat="none") == "none"
    assert choose("TPU v5 lite") == choose("Quadro") == "layer"
    assert json.loads(answer("--topology", "h100:1", "--json")[1])["remat"] == "dots"


# ---- against XLA


def test_a_step_that_is_compiled_for_a_gpu_must_fit_into_what_jax_takes(monkeypatch):
    monkeypatch.setattr(compiled_cost, "target_devices", lambda *_: [])
    found = dict(memory=120 * GIB, fusion_seconds=0, compile_seconds=1)
    monkeypatch.setattr(compiled_cost, "compile_step", lambda *_: found)
    with pytest.raises(UserError, match="XLA's arrays overflow: a device needs 120.00 GiB"):
        plan.main(plan.Args(topology="h200:1", compile=True), TINY)


COMPILERS = [
    ("v5e:1", "libtpu", "pip install 'jax[tpu]=="),
    ("h100:1", "jax_plugins.xla_cuda13", "pip install 'jax[cuda13]=="),
]


@pytest.mark.parametrize("topology, module, fix", COMPILERS)
def test_without_a_compiler_the_plan_says_how_to_get_it(topology, module, fix):
    if compiled_cost.is_installed(module):
        pytest.skip(f"{module} is installed")
    code, _, error = answer("--topology", topology, "--compile")
    assert code == USAGE and fix in error and error.count("\n") == 2


@pytest.fixture
def tpu_compiler(monkeypatch):
    """The variables that libtpu needs without a TPU, and JAX's own precision of matmuls, which a
    float32 run of another test may have changed."""
    env = dict(ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")  # as plan.parse sets them
    env |= dict(TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_HOSTNAMES="localhost")
    for name, x in env.items():
        monkeypatch.setenv(name, x)
    with jax.default_matmul_precision("default"):
        yield


EXPERTS = dict(pattern="moe", n_experts=64, n_active=4, d_expert=128)
LATENTS = dict(attention="mla", kv_rank=128, d_rope=64, d_value=128)


@needs("libtpu")
@pytest.mark.parametrize("variant, pp", [({}, 1), (EXPERTS, 1), (LATENTS, 1), ({}, 2)])
def test_decoding_on_a_tpu_copies_no_cache_and_no_experts(variant, pp, tpu_compiler):
    """By the temporary memory of the compiled program."""
    sizes = dict(d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, d_head=128)
    cfg = replace(TINY, model=replace(TINY.model, **sizes, **variant))
    cfg = configure(dict(dp=1, pp=pp, tp=1), cfg, seq_len=2048, dtype="bfloat16")
    mesh = utils.mesh_of(compiled_cost.target_devices("v5p:2x2x1", CHIPS["v5p"], 4, 1)[:pp], cfg)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        params = model.param_shapes(cfg), model.param_specs(cfg)
    jax.set_mesh(mesh)

    def on_mesh(tree, spec):
        return runstate.with_shardings(tree, jax.tree.map(lambda _: spec, tree))

    weights = generate.decoding_weights.lower(runstate.with_shardings(*params), cfg).out_info
    weights = on_mesh(weights, generate.per_device_spec())
    shapes = [jax.ShapeDtypeStruct((pp, 8, *n), int) for n in ([2048], [])]
    rows = [on_mesh(x, P("pp", "dp")) for x in shapes]
    _, cache = generate.next_logits.lower(weights, None, *rows, 2048, cfg).out_info
    cache = on_mesh(cache, generate.per_device_spec())
    program = generate.next_logits.lower(weights, cache, *rows, 1, cfg).compile()
    one_array = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert program.memory_analysis().temp_size_in_bytes < one_array / pp


@needs("libtpu")
def test_xla_for_tpus_sends_gradients_between_slices_once_and_in_bfloat16(
    monkeypatch, tpu_compiler
):
    """XLA makes a sum over slices, and nothing else, a message to its runtime; all of its
    collectives are then inside of a slice."""
    chip, mesh = CHIPS["v5p"], dict(dp="2x1", pp=2, tp=2, slow_dtype="bfloat16")
    sizes = dict(vocab_size=2048, d_model=256, n_layers=2, n_heads=2, n_kv_heads=2, d_head=128)
    cfg = configure(mesh, replace(TINY, model=replace(TINY.model, **sizes)), seq_len=256)
    n_weights = cost_model.state_bytes(cfg)["weights"] / 4
    devices, programs = compiled_cost.target_devices("v5p:2x2x1", chip, 4, 2), []

    def keep(*args, compile_program=utils.compile_program):
        programs.append(compile_program(*args))
        return programs[0]

    monkeypatch.setattr(utils, "compile_program", keep)
    compiled_cost.compile_step(cfg, "two slices", chip, devices)

    def sent(line: str) -> Counter:
        message = re.search(r" = \((\w+)\[([\d,]*)\].* send\(.*_transfer_type=\"(\w+)\"", line)
        if message is None:
            return Counter()
        dtype, shape, kind = message.groups()
        return Counter({(kind, dtype): math.prod(map(int, shape.split(",")))})

    found = compiled_cost.sum_lines(programs[0].as_text(), cfg, sent)
    assert {kind for kind, _ in found} == {"ALL_REDUCE"}
    # XLA pads the three gains of norms, which are small, to a hundred thousand elements.
    assert n_weights <= found["ALL_REDUCE", "bf16"] <= 1.2 * n_weights
    assert found["ALL_REDUCE", "f32"] <= 2 * 128  # the loss and its tokens


DENSE = dict(vocab_size=8192, d_model=1024, n_layers=8, n_heads=8, n_kv_heads=8, d_head=128)
DENSE |= dict(d_ff=4096)
SPARSE = DENSE | dict(pattern="moe", n_experts=16, n_active=2, d_expert=1024)
COMPILED = {
    "experts": (SPARSE, "v5p:2x2x1", dict(dp=4), dict()),
    "1f1b": (DENSE, "v5p:2x2x1", dict(dp=2, pp=2, schedule="1f1b", fsdp="step"), dict()),
    "dots": (DENSE, "v6e:2x2", dict(dp=4), dict(remat="dots", grad_accum=2)),
}


@needs("libtpu")
@pytest.mark.parametrize("case", COMPILED)
def test_the_estimate_is_within_a_tenth_of_the_compilers(case):
    sizes, topology, mesh, fields = COMPILED[case]
    fields = dict(seq_len=1024, batch_size=32) | fields
    sections = dict(model=sizes, mesh=mesh, train=fields)
    flags = [
        word
        for section, values in sections.items()
        for name, value in values.items()
        for word in (f"--{section}.{name}", value)
    ]
    code, text, error = answer(*flags, "--topology", topology, "--compile", "--json")
    assert code == 0, error
    found = json.loads(text)
    xla, kind = found["xla"], CHIPS[topology[:3]].kind
    assert found["memory_total"] == pytest.approx(xla["memory"], rel=0.1)
    assert 0.5 < xla["fusion_seconds"] / found["seconds"]["matmuls"] < 10
    # The pinned libtpu accepts every option.
    wanted = {"TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}.get(kind)
    assert xla["options"] == utils.XLA_OPTIONS.get(wanted, {})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_boxes_of_the_picture_hold_all_work_of_the_plan_once(schedule):
    cfg = configure(dict(dp=2, pp=2, tp=2, schedule=schedule), grad_accum=2, microbatches=4)
    whole, found = count(cfg), cost_model.Cost()
    _, boxes = step_picture.boxes_in(trace(cfg), cfg, CHIP)
    todo = list(boxes)
    while todo:
        box = todo.pop()
        found.add(box.own, 1)
        todo += box.inside
        assert min(box.own.flops, *box.own.received.values(), 0) > -1  # rounding
    assert found.flops == pytest.approx(whole.flops)
    for name in whole.received:
        assert found.received[name] == pytest.approx(whole.received[name], abs=1)
        assert found.calls[name] == pytest.approx(whole.calls[name], abs=1e-3)


def test_every_loop_of_the_picture_has_a_name_that_is_no_code():
    cfg = replace(MOE, optim=replace(MOE.optim, name="muon"))
    cfg = configure((1, 1, 1), cfg, attention="xla", seq_len=8192, batch_size=1)
    picture = step_picture.step_svg(train.step_jaxpr, cfg, CHIP.kind)
    assert not re.findall('bold">([^<]*[_&][^<]*)', picture)
    titles = re.findall('bold">([^<]+)', picture)
    assert {"block of attention", "step of Muon"} <= {title.partition(",")[0] for title in titles}
    assert all(titles.count(f"{x} on one device") == 1 for x in ("loss and gradient", "Muon"))


def test_the_work_of_a_stage_has_its_name_in_the_picture():
    def titles(**mesh):
        cfg = configure(dict(dp=2, pp=2, tp=2, **mesh), MOE)
        picture = step_picture.step_svg(train.step_jaxpr, cfg, CHIP.kind)
        return {title.partition(",")[0] for title in re.findall('bold">([^<]+)', picture)}

    found = titles()
    assert {"begin", "forward", "score", "backward", "finish"} <= found and "part" not in found
    assert not any("_" in title for title in titles(skip_bubbles=False))


def test_the_picture_writes_numbers_of_any_size_without_exponents():
    cost = cost_model.Cost(flops=1.5e15, matmul_seconds=3.29)
    assert step_picture.lines(cost, CHIP)[0][0] == "matmuls: 1,500 TFLOP, 3,290 ms"
    cost = cost_model.Cost(flops=1.5e3, matmul_seconds=3.291e-4)
    assert step_picture.lines(cost, CHIP)[0][0] == "matmuls: 1.5 kFLOP, 0.329 ms"
    sums = ("psum_invariant", "dp")
    cost = cost_model.Cost(received={sums: 3 * CHIP.speed("dp")}, calls={sums: 4})
    assert re.fullmatch("dp psum: 4 calls, .* GB, 3,000 ms", step_picture.lines(cost, CHIP)[0][0])


def test_decoding_reads_the_weights_that_the_rows_meet():
    """GPT-2 reads all except the positions; of experts, those chosen, and at most all."""
    dense = configure((1, 1, 2), config.PRESETS["gpt2_124m"]())
    read = 2 * (model.param_count(dense) - 1024 * 768)  # bytes
    for rows in (1, 32):
        expected = rows * CHIP.hbm * 2 / read
        assert plan.decoding_speed(dense, CHIP, rows) == pytest.approx(expected)
    experts = configure((1, 1, 1), config.PRESETS["qwen3_30b_a3b"]())
    active, whole = (model.param_count(experts, active=x) for x in (True, False))
    embedding = experts.model.vocab_rows * experts.model.d_model
    assert plan.decoding_speed(experts, CHIP, 1) == pytest.approx(
        CHIP.hbm / 2 / (active - embedding)
    )
    at_most = 1000 * CHIP.hbm / 2 / (whole - embedding)
    assert plan.decoding_speed(experts, CHIP, 1000) == pytest.approx(at_most)
