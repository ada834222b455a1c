"""The building blocks of a layer: activations, dropout, the order of tokens gathered over tp."""

import math
import re
from dataclasses import replace
from functools import partial
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RICH, batch, params_of
from conftest import on_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import layers
import model
import runstate
import train
import utils
from architecture import Model

# ---- rows


def test_whole_sequences_get_the_order_of_gathered_rows_and_back():
    on_mesh(RICH, (2, 1, 4))
    x_BL = np.arange(4 * 16).reshape(4, 16)

    @jax.jit
    @jax.shard_map(in_specs=(P("dp"), P("dp", "tp")), out_specs=(P(utils.AXES), P("dp", "tp")))
    def run(whole_BL, part_BL):
        row_BL = layers.gather_rows(part_BL)
        same_BL = layers.mark_varying(layers.sequences_to_rows(whole_BL) == row_BL)
        return same_BL, layers.tp_part(layers.rows_to_sequences(row_BL), 1)

    same_BL, back_BL = run(x_BL, x_BL)
    assert same_BL.shape == (8 * 8, 4) and same_BL.all()
    np.testing.assert_array_equal(back_BL, x_BL)


# ---- products


def test_a_tpu_has_the_gradients_of_other_platforms(monkeypatch):
    on_mesh(RICH)
    rng = np.random.default_rng(0)
    x_BD, w_DV, g_BV = (jnp.float32(rng.normal(size=n)) for n in ((4, 8), (8, 16), (4, 16)))
    xw = x_BD.astype(jnp.bfloat16), w_DV.astype(jnp.bfloat16)
    want = jax.vjp(partial(layers.einsum, "BD,DV->BV", dtype=jnp.float32), *xw)[1](g_BV)
    monkeypatch.setattr(layers, "platform", lambda: "tpu")
    got = jax.vjp(partial(layers.einsum, "BD,DV->BV", dtype=jnp.float32), *xw)[1](g_BV)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype == jnp.bfloat16
        np.testing.assert_allclose(jnp.float32(x), jnp.float32(y), rtol=2**-7)


# ---- activations


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def tanh_gelu(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = dict(  # in float64
    swiglu=lambda gate, up: gate * sigmoid(gate) * up,
    swiglu_clamped=lambda gate, up: (
        np.minimum(gate, 7) * sigmoid(1.702 * np.minimum(gate, 7)) * (np.clip(up, -7, 7) + 1)
    ),
    geglu_tanh=lambda gate, up: tanh_gelu(gate) * up,
    gelu=lambda gate, up: up * (1 + np.vectorize(math.erf)(up / 2**0.5)) / 2,
    gelu_tanh=lambda gate, up: tanh_gelu(up),
    relu2=lambda gate, up: np.maximum(up, 0) ** 2,
)


def test_every_activation_is_tested():
    assert {*ACTIVATIONS} == {*get_args(get_type_hints(Model)["activation"])}


@pytest.mark.parametrize("on", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_its_formulas_value_and_gradient(name, on, monkeypatch):
    cfg = on_mesh(RICH, (1, 1, 2), model=dict(activation=name))
    monkeypatch.setattr(layers, "platform", lambda: on)
    rng = np.random.default_rng(0)
    gate, up, grad = rng.normal(scale=4, size=(3, 2, 500))

    @jax.jit
    @jax.shard_map(in_specs=P("tp"), out_specs=P("tp"))
    def run(gate, up, grad):
        y, backward = jax.vjp(lambda gate, up: layers.activate(gate, up, cfg), gate, up)
        return y, *backward(grad)

    formula, h = ACTIVATIONS[name], 1e-6
    gate_slope = (formula(gate + h, up) - formula(gate - h, up)) / (2 * h)
    up_slope = (formula(gate, up + h) - formula(gate, up - h)) / (2 * h)
    want = formula(gate, up), grad * gate_slope, grad * up_slope
    # 1 + tanh loses digits of float32 near 0, and up multiplies what is lost by up to 13.
    for x, y in zip(run(*map(jnp.float32, (gate, up, grad))), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)


# ---- dropout


def test_dropout_drops_each_element_independently_and_keeps_the_mean():
    cfg = on_mesh(RICH)

    @jax.jit
    @jax.shard_map(in_specs=(P(), P(), P()), out_specs=P(None, "tp"))
    def drop(x_BLD, key, row_B):
        return layers.dropout(lax.pcast(x_BLD, "tp", to="varying"), key, row_B, cfg)

    x_BLD, row_B = jnp.ones((4, 16, 32)), jnp.arange(4)
    y_BLD = np.asarray(drop(x_BLD, jax.random.key(3), row_B))
    assert set(np.unique(y_BLD).round(4)) == {0.0, 1.25}
    assert abs(y_BLD.mean() - 1) < 0.05
    other_key_LD = np.asarray(drop(x_BLD, jax.random.key(4), row_B)[0])
    for other_LD in (y_BLD[1], y_BLD[0, ::-1], other_key_LD):
        assert (other_LD != y_BLD[0]).mean() > 0.2
    assert (y_BLD[0, 0] != y_BLD[0, 1]).any()
    # In bfloat16 too, which does not have 0.8.
    x_BLD = jnp.linspace(1, 2, x_BLD.size, dtype=jnp.bfloat16).reshape(x_BLD.shape)
    y_BLD = np.float64(drop(x_BLD, jax.random.key(3), row_B))
    assert abs(y_BLD.sum() / np.float64(x_BLD)[y_BLD > 0].sum() - 1.25) < 3e-4


@pytest.mark.slow
def test_dropout_differs_between_layers_branches_steps_and_seeds():
    """Each key is made from another one with fold_in; without it, a mask would be used twice."""
    seen = []
    real = layers.dropout

    def spy(x_BLD, key, row_B, cfg):
        if key is not None:
            jax.debug.callback(lambda k: seen.append(tuple(k.tolist())), jax.random.key_data(key))
        return real(x_BLD, key, row_B, cfg)

    few = dict(remat="none", grad_accum=1, microbatches=1)
    cfg = on_mesh(RICH, model=dict(n_layers=2), train=few)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(model, "dropout", spy)
        for seed, step in ((0, 0), (0, 1), (1, 0)):
            seeded = replace(cfg, run=replace(cfg.run, seed=seed))
            state = runstate.init_state(seeded)._replace(step=jnp.int32(step))
            jax.block_until_ready(train.train_step(state, *batch(seeded), seeded))
    jax.effects_barrier()
    # A set, because the backward pass computes the embedding, and its dropout, once more.
    assert len(set(seen)) == 3 * (1 + 2 * cfg.model.n_layers)


def test_dropout_drops_and_differs_between_steps():
    cfg = on_mesh(RICH)
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    losses = [float(f(params_of(cfg), *batch(cfg), jax.random.key(n), cfg)[0]) for n in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_gradient_of_a_bias_is_a_float32_sum(on_gpu, monkeypatch):
    """Also as it is computed on GPUs."""
    on_mesh(RICH)
    monkeypatch.setattr(layers, "GPUS", ("cpu",) if on_gpu else ())
    rng, shape = np.random.default_rng(0), (4, 1024, 2, 8)
    x, grad = (jnp.asarray(rng.normal(size=shape) + 1, jnp.bfloat16) for _ in range(2))
    bias = jnp.asarray(rng.normal(size=shape[2:]), jnp.float32)
    y, backward = jax.vjp(layers.add_bias, x, bias)
    x_grad, bias_grad = backward(grad)
    jaxpr = jax.make_jaxpr(lambda x, bias: layers.add_bias(x, bias))(x, bias)  # not a cached one
    assert ("custom_vjp" in str(jaxpr)) == on_gpu
    np.testing.assert_array_equal(y, (x.astype(jnp.float32) + bias).astype(jnp.bfloat16))
    np.testing.assert_array_equal(x_grad, grad)
    np.testing.assert_allclose(bias_grad, np.float64(grad).sum((0, 1)), rtol=1e-6)


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("dims, x_shape, w_shape", [
    ("BLD,DF->BLF", (2, 64, 96), (96, 80)),
    ("PRQK,PSK->PRQS", (3, 2, 32, 16), (3, 64, 16)),
    ("PRQS,PSW->PRQW", (3, 2, 32, 40), (3, 40, 16)),
    ("BLF,BLD->FD", (2, 40, 64), (2, 40, 96)),
    ("BLD,DF->BLF", (2, 1, 96), (96, 80)),
], ids=["layer", "scores", "values", "weights", "decoding"])  # fmt: skip
def test_cpus_with_slow_bfloat16_multiply_float32_copies(
    dims, x_shape, w_shape, is_slow, monkeypatch
):
    on_mesh(RICH)
    monkeypatch.setattr(layers, "has_slow_bfloat16", lambda: is_slow)
    rng = np.random.default_rng(0)
    x, w = (jnp.bfloat16(rng.normal(size=shape)) for shape in (x_shape, w_shape))
    want = np.einsum(dims, *(np.asarray(a, np.float64) for a in (x, w)))
    for dtype, rtol in (None, 2**-8), (jnp.float32, 1e-5):
        multiply = jax.jit(partial(layers.multiply, dims, dtype=dtype))
        np.testing.assert_allclose(np.float64(multiply(x, w)), want, rtol, atol=1e-5)
        products = re.findall("dot_general.*", multiply.lower(x, w).as_text())
        has_copies = is_slow and x_shape[1] > 1
        assert [("bf16" not in line) for line in products] == [has_copies]


@pytest.mark.parametrize("n_rows", [1, 2, 9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_a_few_rows_copy_no_weights(dtype, n_rows, monkeypatch):
    """And are right, whatever the order of the weights' dims."""
    on_mesh(RICH)
    monkeypatch.setattr(layers, "has_slow_bfloat16", lambda: False)
    rng, sizes = np.random.default_rng(0), dict(B=1, L=n_rows, D=96, H=4, K=24, V=500)
    for dims in "BLD,DHK->BLHK", "BLHK,HKD->BLD", "BLD,VD->BLV":
        shapes = [[sizes[d] for d in part] for part in dims.split("->")[0].split(",")]
        x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
        want = np.einsum(dims, *(np.asarray(a, np.float64) for a in (x, w)))
        program = jax.jit(partial(layers.multiply, dims, dtype=jnp.float32)).lower(x, w).compile()
        np.testing.assert_allclose(np.float64(program(x, w)), want, 1e-5, 1e-5)
        assert program.memory_analysis().temp_size_in_bytes < w.size * 2, dims


def test_a_single_row_is_multiplied_as_two_on_a_tpu(monkeypatch):
    monkeypatch.setattr(layers, "platform", lambda: "tpu")
    x_BLD, w_DF = np.arange(8.0).reshape(1, 1, 8), np.arange(24.0).reshape(8, 3)
    multiply = jax.jit(partial(layers.multiply, "BLD,DF->BLF"))
    np.testing.assert_array_equal(multiply(x_BLD, w_DF), x_BLD @ w_DF)
    product = re.search("dot_general.*", multiply.lower(x_BLD, w_DF).as_text())[0]
    assert "(tensor<2x1x8xf32>" in product


@pytest.mark.parametrize("kind, vendor, flags, is_slow", [
    ("x86_64", "GenuineIntel", "avx2", True),
    ("x86_64", "AuthenticAMD", "avx512f", True),
    ("x86_64", "GenuineIntel", "avx512_bf16", True),
    ("x86_64", "GenuineIntel", "avx512_bf16 amx_bf16", False),
    ("x86_64", "AuthenticAMD", "avx512_bf16", False),
    ("x86_64", None, "", False),
    ("aarch64", "ARM", "bf16", False),
])  # fmt: skip
def test_cpus_with_slow_bfloat16_are_known_by_name(
    kind, vendor, flags, is_slow, tmp_path, monkeypatch
):
    facts = tmp_path / "cpuinfo"
    if vendor:
        facts.write_text(f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags} sse2\n")
    monkeypatch.setattr(layers, "machine", lambda: kind)
    monkeypatch.setattr(layers, "Path", lambda path: facts)
    assert layers.has_slow_bfloat16.__wrapped__() == is_slow
