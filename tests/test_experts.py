"""Mixture of experts: a layer is a loop over tokens and their experts, whatever the dispatch."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MIXED, MOE, PLAIN, batch, params_of
from conftest import interpret_kernels, on_mesh
from jax import lax
from jax._src import config as jax_config
from jax._src.pallas import hlo_interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode
from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import config
import experts
import grouped
import layers
import runstate
import train
import utils
from architecture import moe_layers

# ---- one layer


def plain_moe(x_LD, w, m, capacity_factor=0.0):
    """(y_LD, statistics) of one moe layer for one sequence, by a loop over tokens and their
    experts."""

    def expert(x, weights_in, weights_out, in_bias=(0, 0), out_bias=0):
        gate, up = x @ weights_in[0] + in_bias[0], x @ weights_in[1] + in_bias[1]
        if m.activation == "swiglu_clamped":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            return (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)) @ weights_out + out_bias
        return (gate / (1 + np.exp(-gate)) * up) @ weights_out + out_bias

    L, E = len(x_LD), m.n_experts
    room = int(np.ceil(capacity_factor * L * m.n_active / E)) if capacity_factor else L
    y_LD, load, dropped = np.zeros_like(x_LD), np.zeros(E, int), 0
    entropy, mean_prob = 0, np.zeros(E)
    taken = np.zeros(E, int)
    for n, x in enumerate(x_LD):
        logit = x @ w["router_DE"] + w.get("router_logit_bias_E", 0)
        score = 1 / (1 + np.exp(-logit))
        if m.router == "softmax":
            score = np.exp(logit) / np.exp(logit).sum()
        prob = score / score.sum()
        entropy, mean_prob = entropy - (prob * np.log(prob)).sum(), mean_prob + prob / L
        choice = score + w.get("router_bias_E", 0)
        by_group = choice.reshape(m.n_groups, -1)
        group_score = np.sort(by_group)[:, -2:].sum(1)
        for inactive in np.argsort(-group_score)[m.n_active_groups :]:
            by_group[inactive] = -np.inf
        chosen = np.argsort(-by_group.reshape(-1))[: m.n_active]
        total = score[chosen].sum() if m.norm_scores else 1
        for e in chosen:
            load[e] += 1
            if taken[e] == room:
                dropped += 1
                continue
            taken[e] += 1
            weights_in = w["in_EDCF"][e].transpose(1, 0, 2)
            gate = score[e] / total * m.score_scale
            biases = [w[name][e] for name in ("in_bias_ECF", "out_bias_ED") if name in w]
            y_LD[n] += gate * expert(x, weights_in, w["out_EFD"][e], *biases)
        if m.n_shared:
            y_LD[n] += expert(x, w["shared_in_CDF"], w["shared_out_FD"])
    stats = dict(load_E=load, dropped=dropped, entropy=entropy)
    return y_LD, stats | dict(balance=E * (load / load.sum() * mean_prob).sum())


SOFTMAX = dict(router="softmax", router_bias=False, n_groups=1, n_active_groups=1, n_shared=0)
BIASES = dict(expert_bias=True, router_logit_bias=True)
OSS = dict(SOFTMAX, **BIASES, activation="swiglu_clamped")


@pytest.mark.parametrize("dispatch", ["gather", "alltoall"])
@pytest.mark.parametrize("capacity_factor", [0.0, 0.75])
@pytest.mark.parametrize("fields", [
    {}, dict(SOFTMAX, norm_scores=False, n_active=3), pytest.param(OSS, id="gpt_oss"),
], ids=str)  # fmt: skip
def test_a_moe_layer_is_a_loop_over_tokens_and_their_experts(fields, capacity_factor, dispatch):
    cfg = replace(MOE, model=replace(MOE.model, **fields), mesh=config.Mesh(experts=dispatch))
    cfg = on_mesh(cfg, (4, 1, 2), train=dict(capacity_factor=capacity_factor))
    table = experts.moe_table(cfg)
    rng = np.random.default_rng(0)
    w = {n: rng.normal(size=p.shape, scale=p.shape[-1] ** -0.5) for n, p in table.items()}
    if "in_bias_ECF" in w:
        w["in_bias_ECF"] *= 20  # beyond the bounds of swiglu_clamped
    x_BLD = rng.normal(size=(8, 16, cfg.model.d_model))

    specs = {name: p.spec for name, p in table.items()}
    stats_specs = dict(load_E=P(), entropy=P(), balance=P(), dropped=P())

    @jax.jit
    @jax.shard_map(in_specs=(P("dp", "tp"), specs), out_specs=(P("dp", "tp"), stats_specs))
    def moe(x_BLD, w):
        y_BLD, stats = experts.moe(x_BLD, layers.gather_over_dp(w, table), cfg, training=True)
        return y_BLD, lax.psum(layers.mark_varying(stats), utils.AXES)

    as_float32 = partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))
    y_BLD, stats = jax.device_get(moe(as_float32(x_BLD), as_float32(w)))
    want = [plain_moe(x_LD, w, cfg.model, capacity_factor) for x_LD in x_BLD]
    np.testing.assert_allclose(y_BLD, np.stack([y for y, _ in want]), atol=2e-5)
    for name, got in stats.items():
        np.testing.assert_allclose(got, sum(stats[name] for _, stats in want), rtol=1e-5)
    assert (stats["dropped"] > 0) == (capacity_factor > 0)

    # The gradient along a random direction of each input is the loop's difference quotient.
    weight_BLD = rng.normal(size=x_BLD.shape)

    def plain_objective(x_BLD, **w):
        y_BLD = [plain_moe(x_LD, w, cfg.model, capacity_factor)[0] for x_LD in x_BLD]
        return (y_BLD * weight_BLD).sum()

    def objective(inputs):
        return (moe(inputs["x_BLD"], {name: inputs[name] for name in w})[0] * weight_BLD).sum()

    inputs = w | dict(x_BLD=x_BLD)
    for name, got in jax.device_get(jax.grad(objective)(as_float32(inputs))).items():
        direction = rng.normal(size=got.shape)

        def move(step, name=name, direction=direction):
            return plain_objective(**inputs | {name: inputs[name] + step * direction})

        difference = (move(1e-6) - move(-1e-6)) / 2e-6
        assert (got * direction).sum() == pytest.approx(difference, rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("dispatch", [
    "gather", pytest.param("alltoall", marks=pytest.mark.slow),
])  # fmt: skip
def test_kernels_compute_the_same_as_tiles(monkeypatch, dispatch):
    """Outputs and all gradients, interpreted on a CPU, where rows that no kernel has written are
    NaN.  Two experts get no tokens, and another two, of one rank, get most of them."""
    fields = dict(SOFTMAX, **BIASES, d_model=256, d_expert=384, n_active=3) | dict(router_bias=True)
    cfg = replace(MOE, model=replace(MOE.model, **fields), mesh=config.Mesh(experts=dispatch))
    cfg = on_mesh(cfg, (4, 1, 2))
    table, rng = experts.moe_table(cfg), np.random.default_rng(0)
    w = {n: rng.normal(size=p.shape, scale=p.shape[-1] ** -0.5) for n, p in table.items()}
    w["router_bias_E"] = np.array([0, 0, -9, 0.1, -9, 0, 0.1, 0.1])
    inputs = dict(w, x_BLD=rng.normal(size=(8, 64, 256)), grad_BLD=rng.normal(size=(8, 64, 256)))
    specs = {name: p.spec for name, p in table.items()} | dict.fromkeys(
        ("x_BLD", "grad_BLD"), P("dp", "tp")
    )

    def layer(x_BLD, **w):
        return experts.moe(x_BLD, layers.gather_over_dp(w, table), cfg, training=False)[0]

    def results(inputs):
        y_BLD, backward = jax.vjp(
            lambda w: layer(**w), {k: x for k, x in inputs.items() if k != "grad_BLD"}
        )
        return y_BLD, backward(inputs["grad_BLD"])[0]

    def run():
        out_specs = P("dp", "tp"), {k: specs[k] for k in specs if k != "grad_BLD"}
        f = jax.jit(jax.shard_map(results, in_specs=(specs,), out_specs=out_specs))
        return jax.device_get(f({k: jnp.asarray(x, jnp.float32) for k, x in inputs.items()}))

    want, used = run(), Counter()

    def counted(kernel):
        def run_kernel(*args):
            used[kernel.__name__] += 1
            return kernel(*args)

        return run_kernel

    interpret = hlo_interpreter.pallas_call_hlo_interpret

    def interpret_untyped(*args, **kwargs):
        """The types of the kernels' outputs have been checked; the interpreter's own have none."""
        untyped = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        with jax_config._check_vma(False):
            jaxpr = jax.make_jaxpr(partial(interpret, **kwargs))(*untyped)
            return jaxpr_as_fun(jaxpr)(*args)

    monkeypatch.setattr(hlo_interpreter, "pallas_call_hlo_interpret", interpret_untyped)
    monkeypatch.setitem(grouped.KERNELS, "cpu", [counted(x) for x in grouped.KERNELS["tpu"]])
    interpret_kernels(monkeypatch)
    got = run()
    assert used == dict(matmul_on_tpu=5, outer_on_tpu=2)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def interpreted_on_cpu(form: str, monkeypatch) -> list:
    """The kernels of TPUs, or of Hopper GPUs."""
    if form == "tpu":
        interpret_kernels(monkeypatch)
        return grouped.KERNELS["tpu"]
    devices = [SimpleNamespace(core_count=4)]
    names = vars(jax) | dict(devices=lambda: devices)
    monkeypatch.setattr(transposed_ragged_dot_mgpu, "jax", SimpleNamespace(**names))

    def interpreted(kernel, *args, **options):
        # A last block reaches beyond the rows, where a GPU's copies stop.
        with force_gpu_interpret_mode(InterpretGPUParams(out_of_bounds_reads="uninitialized")):
            return kernel(*args, **options)

    return [partial(interpreted, kernel) for kernel in grouped.KERNELS["gpu"]]


INTERPRETS_GPU = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 cannot interpret a transposed block"
)


@pytest.mark.parametrize("form", [
    pytest.param("tiles", marks=pytest.mark.slow),
    "tpu",
    pytest.param("gpu", marks=INTERPRETS_GPU),
])  # fmt: skip
def test_a_pair_of_no_expert_is_one_of_an_expert_of_zeros(monkeypatch, form):
    """Although its token has pairs of other experts; also in interpreted kernels."""
    cfg, rng, (Q, E, D, F) = on_mesh(PLAIN), np.random.default_rng(0), (100, 4, 128, 256)
    shapes = dict(in_EDCF=(E + 1, D, 2, F), out_EFD=(E + 1, F, D), x_QD=(Q, D), gate_U=(2 * Q,))
    scale = dict(in_EDCF=D**-0.5, out_EFD=F**-0.5)
    inputs = {k: rng.normal(size=n, scale=scale.get(k, 1.0)) for k, n in shapes.items()}
    for name in ("in_EDCF", "out_EFD"):
        inputs[name][E] = 0
    expert_U, grad_QD = rng.integers(E + 1, size=2 * Q), rng.normal(size=(Q, D))
    expert_U[expert_U == 2] = 0  # one has no rows
    as_arrays = partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))

    def results(n_experts):
        def y_QD(x_QD, gate_U, **w):
            w = {name: x[:n_experts] for name, x in w.items()}
            return experts.run_experts(x_QD, gate_U, jnp.asarray(expert_U), w, cfg)

        @jax.jit
        def y_and_gradients(inputs, grad_QD):
            y, backward = jax.vjp(lambda x: y_QD(**x), inputs)
            return y, *backward(grad_QD)

        y, grads = y_and_gradients(as_arrays(inputs), as_arrays(grad_QD))
        grads |= {name: grads[name][:E] for name in ("in_EDCF", "out_EFD")}
        return y, grads

    want = results(E + 1)
    if form != "tiles":
        monkeypatch.setitem(grouped.KERNELS, "cpu", interpreted_on_cpu(form, monkeypatch))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), results(E), want)


@pytest.mark.parametrize("widths, dtype, is_hopper, takes", [
    ((128, 128), "bfloat16", True, True), ((192, 128), "bfloat16", True, False),
    ((128, 192), "bfloat16", True, False), ((128, 128), "float32", True, False),
    ((128, 128), "bfloat16", False, False),
])  # fmt: skip
def test_a_gpu_uses_kernels_where_they_fit(monkeypatch, widths, dtype, is_hopper, takes):
    monkeypatch.setattr(grouped, "platform", lambda: "gpu")
    monkeypatch.setattr(grouped, "compute_capability", lambda: 9.0 if is_hopper else 8.0)
    padded = [grouped.padded_rows(U, jax.ShapeDtypeStruct((4, *widths), dtype)) for U in (9, 257)]
    assert [Z == 1 for _, Z in padded] == [takes, takes]
    assert not takes or padded == [(256, 1), (257, 1)]


def test_a_tpu_pads_pairs_to_blocks_of_its_kernels(monkeypatch):
    monkeypatch.setattr(grouped, "platform", lambda: "tpu")
    wide, narrow = (jax.ShapeDtypeStruct((4, 128, n), jnp.bfloat16) for n in (128, 64))
    assert [grouped.padded_rows(U, wide) for U in (1, 128, 129)] == [(128, 1), (128, 1), (256, 1)]
    assert grouped.padded_rows(128, narrow)[1] > 1


def test_tiles_hold_any_routing():
    for U, E in [(1, 8), (7, 2), (64, 8), (4096, 16), (65536, 16), (524288, 128)]:
        Y, Z = grouped.tile_shape(U, E)
        # At worst k experts have one row each in a tile of their own, and one has the others.
        assert max(k + (U - k) // Z for k in range(1, min(E, U) + 1)) <= Y
        assert U < 64 * E or (Y * Z - U) / (Y * Z) <= 0.2


def test_evaluation_drops_no_token():
    losses = []
    for factor in (0.0, 0.5):
        cfg = on_mesh(MIXED, train=dict(capacity_factor=factor))
        losses.append(float(train.eval_step(params_of(cfg), *batch(cfg), cfg)[0]))
    assert losses[0] == losses[1]


# ---- statistics, and the router's bias


def test_balance_is_one_when_even_and_the_number_of_experts_over_active_at_worst():
    """And the entropy is that of the scores."""
    on_mesh(PLAIN)
    eye_BLE = jnp.eye(4)[None]

    def sums(score_BLE, expert_BLX):
        @jax.jit
        @jax.shard_map(in_specs=(P("dp", "tp"), P("dp", "tp")), out_specs=P())
        def total(score_BLE, expert_BLX):
            return lax.psum(experts.routing_stats(score_BLE, expert_BLX), utils.STAGE)

        return jax.device_get(total(score_BLE, expert_BLX))

    even = sums(jnp.ones((1, 4, 4)), jnp.arange(4)[None, :, None])
    np.testing.assert_allclose([even["balance"], even["entropy"] / 4], [1, np.log(4)], rtol=1e-5)
    worst = sums(jnp.tile(eye_BLE[:, :1], (1, 4, 1)), jnp.zeros((1, 4, 1), int))
    np.testing.assert_allclose([worst["balance"], worst["entropy"]], [4, 0], atol=1e-5)
    np.testing.assert_array_equal(worst["load_E"], [4, 0, 0, 0])


def test_statistics_are_per_token_sequence_and_pair_in_the_layers_order():
    B, n = 64, 64 * 16

    def stats_of(*shares):
        """The sums of layers with these shares."""
        x = np.array(shares)
        load = np.tile(x[:, None], 4)
        return dict(load_E=load, entropy=n * x, balance=B * x, dropped=2 * n * x)

    stats = dict(prefix=dict(moe=stats_of(0.5)), layers=dict(moe_local=stats_of(0.25, 0.125)))
    got = experts.moe_metrics(stats, MIXED)
    assert moe_layers(MIXED.model) == [0, 4, 8]
    for name in ("entropy", "balance", "dropped"):
        np.testing.assert_allclose(got[name], [0.5, 0.25, 0.125])
    np.testing.assert_allclose(got["load"][:, 0], [0.5, 0.25, 0.125])


@pytest.mark.slow
def test_router_biases_move_against_the_load():
    cfg = on_mesh(MOE, (2, 2, 2))
    state = runstate.init_state(cfg)
    before = np.asarray(state.params["layers"]["moe"]["router_bias_E"])
    state, metrics = train.train_step(state, *batch(cfg), cfg)
    load = np.asarray(metrics["moe"]["load"])
    assert load.shape == (8, 8) and (load.sum(-1) == 2 * 64 * 16).all()
    change = np.asarray(state.params["layers"]["moe"]["router_bias_E"]) - before
    np.testing.assert_array_equal(np.sign(change), np.sign(load.mean(-1, keepdims=True) - load))
    np.testing.assert_allclose(np.abs(change)[load != 256], 0.001, rtol=1e-5)


def test_with_mup_the_first_values_of_a_router_are_those_of_an_output():
    """They fall as 1 / width (Yang et al. 2022, table 3): the number of experts does not grow."""
    table = experts.moe_table(replace(MOE, model=replace(MOE.model, mup_base_width=8)))
    assert table["router_DE"].init.std == pytest.approx(8**0.5 / 32)
    assert table["in_EDCF"].init == experts.moe_table(MOE)["router_DE"].init == layers.normal(32)


def test_a_router_that_gets_no_gradient_is_said(capsys):
    for n_active, norm_scores in ((1, True), (1, False), (2, True)):
        fields = dict(n_active=n_active, norm_scores=norm_scores)
        experts.warn_of_constant_gate(replace(MOE, model=replace(MOE.model, **fields)))
        is_said = "makes every gate 1" in capsys.readouterr().err
        assert is_said == (n_active == 1 and norm_scores)
