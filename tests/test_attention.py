"""Attention: the kernels compute the same, every entry of the table works on a mesh and from its
cache, and documents do not see each other."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    GPT2,
    MIXED,
    MOE,
    PLAIN,
    assert_same_gradient,
    check_cached_logits,
    gradient_on,
    one_device_gradient,
    params_of,
)
from conftest import ROOT, interpret_kernels, on_mesh
from jax.sharding import PartitionSpec as P

import attention
import blockwise
import checks
import errors
import layers
import model
import train
from architecture import Model

# ---- positions


def test_rope_of_a_tpu_is_that_of_other_platforms(monkeypatch):
    """Value and gradient, of whole heads and of their last elements."""
    yarn = dict(rope_scaling="yarn", rope_factor=4.0, yarn_mscale=2.0, yarn_mscale_all_dim=1.0)
    cfg = on_mesh(PLAIN, model=yarn)
    x_BLHK, _, _, g_BLHK = random_attention(2, 24, 3, 3, 20, 20)
    index_BL = jnp.arange(24)[None]
    span = attention.Span(index_BL, index_BL)

    def rotate(width, platform):
        monkeypatch.setattr(attention, "platform", lambda: platform)
        y_BLHK, backward = jax.vjp(lambda x: attention.rope(x, span, cfg, width), x_BLHK)
        return y_BLHK, *backward(g_BLHK)

    for width in (20, 12):
        want = rotate(width, "cpu")
        np.testing.assert_allclose(rotate(width, "tpu"), want, atol=1e-5)
        last_BLHK = attention.rope(x_BLHK[..., 20 - width :], span, cfg)
        np.testing.assert_allclose(want[0][..., 20 - width :], last_BLHK, atol=1e-6)
        np.testing.assert_array_equal(want[0][..., : 20 - width], x_BLHK[..., : 20 - width])


def test_only_rope_rotates():
    """A new choice of model.positions does not, nor does it use the settings of RoPE."""
    cfg = on_mesh(PLAIN, model=dict(positions="none"))
    x_BLHK = random_attention(2, 24, 3, 3, 20, 20)[0]
    index_BL = jnp.arange(24)[None]
    assert attention.rope(x_BLHK, attention.Span(index_BL, index_BL), cfg) is x_BLHK
    names = "rope_theta", "rope_scaling", "rope_original", "rope_factor", "max_positions"
    assert {*names} <= checks.unused_fields(cfg.model).keys()


@pytest.mark.parametrize("fields, scale", [
    (dict(rope_theta=1.5, rope_original=4096), 1 / 4),  # all pairs make more than 32 turns
    (dict(rope_original=4, yarn_truncate=False), 1),  # all make less than one
])  # fmt: skip
def test_a_yarn_ramp_outside_of_the_pairs_is_that_of_transformers(fields, scale):
    m = Model(rope_scaling="yarn", rope_factor=4.0, rope_low=1.0, rope_high=32.0, **fields)
    unscaled_A = m.rope_theta ** -(np.arange(4) / 4)
    np.testing.assert_allclose(attention.rope_frequencies(8, m), scale * unscaled_A)


# ---- kernels


def random_attention(B, L, H, G, K, W, dtype=jnp.float32):
    """(q_BLHK, k_BLGK, v_BLGW, g_BLHW): normal numbers."""
    rng = np.random.default_rng(0)
    shapes = (B, L, H, K), (B, L, G, K), (B, L, G, W), (B, L, H, W)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def value_and_gradients(kernel, q, k, v, g, span, cfg, *sink_H):
    """(y, gradients of q, k, v and sink_H, where g is that of y)."""

    def attend(q, k, v, *sink_H):
        return kernel(q, k, v, span, cfg, *sink_H)

    y, backward = jax.vjp(attend, q, k, v, *sink_H)
    return y, *backward(g)


ALL_FIELDS = dict(window=50, documents=True, softcap=3.0, sinks=True)


@pytest.mark.parametrize("unrolled, shape, fields", [
    (True, (2, 16, 4, 2, 8, 8), {}),
    (True, (3, 200, 8, 4, 16, 16), {}),
    (True, (2, 128, 4, 4, 16, 24), dict(softcap=2.0)),
    (True, (1, 150, 4, 1, 16, 8), dict(documents=True)),
    (True, (3, 100, 8, 4, 16, 16), dict(sinks=True)),
    (True, (2, 150, 4, 2, 16, 16), ALL_FIELDS),
    (True, (2, 200, 4, 2, 16, 16), dict(dtype=jnp.bfloat16)),
    (False, (2, 300, 4, 2, 16, 24), {}),
    (False, (2, 300, 4, 2, 16, 16), dict(window=70)),
    (False, (2, 300, 4, 1, 16, 16), ALL_FIELDS),
    (False, (2, 200, 4, 2, 16, 16), dict(dtype=jnp.bfloat16)),
], ids=str)  # fmt: skip
def test_attention_in_blocks_is_the_plain_one(unrolled, shape, fields, monkeypatch):
    """Value and gradients, for rows that no block divides too, and for some pairs at a time."""
    choose = blockwise.choose_options

    def choose_form(*args):
        return choose(*args)._replace(unrolled=unrolled, block=min(64, shape[1]))

    monkeypatch.setattr(blockwise, "choose_options", choose_form)
    softcap = fields.get("softcap", 0.0)
    cfg = on_mesh(PLAIN, model=dict(d_head=shape[4], attn_softcap=softcap))
    dtype = fields.get("dtype", jnp.float32)
    q, k, v, g = random_attention(*shape, dtype)
    index_BL = jnp.broadcast_to(jnp.arange(shape[1]), shape[:2])
    shifted_BL = index_BL + 11 * jnp.arange(shape[0])[:, None]  # so that rows differ
    document_BL = shifted_BL // 37 if fields.get("documents") else None
    window = fields.get("window", 0)
    span = attention.Span(index_BL, index_BL, document_BL, document_BL, window=window)
    sinks = [jnp.linspace(-2.0, 2.0, shape[2])] if fields.get("sinks") else []

    @partial(jax.jit, static_argnums=0)  # compiled once instead of for each operation
    def results(kernel, q, k, v, g, *sinks):
        return value_and_gradients(kernel, q, k, v, g, span, cfg, *sinks)

    got = results(attention.xla_attention, q, k, v, g, *sinks)
    want = results(attention.decoding_attention, q, k, v, g, *sinks)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype == dtype
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.abs(x - y).max() < (2e-6 if dtype == jnp.float32 else 0.02) * np.abs(y).max()


def test_attention_in_blocks_has_the_types_that_shard_map_checks(monkeypatch):
    """In the loop over blocks, and for one pair at a time."""
    cfg = on_mesh(PLAIN, (2, 2, 2), model=dict(d_head=16))
    choose = blockwise.choose_options
    x_BLHK = jnp.asarray(np.random.default_rng(0).normal(size=(2, 128, 2, 16)), jnp.float32)
    want = query_gradient(attention.decoding_attention, x_BLHK, x_BLHK, cfg)

    def choose_loop(*args):
        return choose(*args)._replace(unrolled=False, pairs_at_once=1)

    monkeypatch.setattr(blockwise, "choose_options", choose_loop)

    @jax.jit
    @jax.shard_map(in_specs=P("dp"), out_specs=P("dp"))
    def run(x_BLHK):
        return query_gradient(attention.xla_attention, x_BLHK, x_BLHK, cfg)

    np.testing.assert_allclose(run(x_BLHK), want, atol=1e-5)


def test_portions_of_attention_fit_the_platform(monkeypatch):
    on_mesh(PLAIN)

    def choose(P, R, L, loop=False):
        return blockwise.choose_options(P, R, L, scale=1.0, cap=0.0, window=0, loop=loop)

    assert choose(64, 2, 256)[-3:] == (64, False, 16)
    assert choose(64, 2, 257)[-3:] == (128, False, 4)
    for how in (choose(7, 1, 64), choose(6, 4, 4096), choose(5, 2, 32768)):
        assert 1 <= how.pairs_at_once <= 7
    monkeypatch.setattr(blockwise, "platform", lambda: "gpu")
    assert choose(64, 2, 4096)[-3:] == (256, True, 64)
    assert choose(64, 2, 4097)[-3:] == choose(64, 2, 4096, loop=True)[-3:] == (512, False, 64)


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize("window, n_keys", [(0, 4 + 8 + 12 + 16), (5, 4 + 8 + 8 + 8)])
def test_keys_that_are_later_or_before_the_window_cost_nothing(unrolled, window, n_keys):
    options = dict(heads=2, block=4, unrolled=unrolled, pairs_at_once=1)
    how = blockwise.Options(1.0, 0.0, window, **options)

    def count_keys(total, queries, keys):
        assert queries.sizes == (1, 8)
        return total + keys.sizes[1]

    assert blockwise.visit_blocks(count_keys, 0, 3, 16, how) == 3 * n_keys


@pytest.mark.parametrize("factor", [1e4, 1e6])
def test_gradients_of_huge_scores_are_bounded(factor):
    """The backward pass may round scores in another way than the forward pass."""
    cfg = on_mesh(PLAIN, model=dict(d_head=16))
    q, k, v, g = random_attention(2, 16, 4, 2, 16, 16, jnp.float32)
    index_BL = jnp.arange(16)[None]
    span = attention.Span(index_BL, index_BL)

    @jax.jit
    def results(q, k, v, g):
        return value_and_gradients(attention.xla_attention, q, k, v, g, span, cfg)

    for x in results(factor * q, factor * k, v, g):
        assert np.abs(x).max() < 100


def lowered_attention(L: int):
    """Forward and backward of a row of L tokens."""
    cfg = on_mesh(PLAIN)

    def gradients(q, k, v, g):
        index_BL = jnp.arange(q.shape[1])[None]
        span = attention.Span(index_BL, index_BL)
        return value_and_gradients(attention.xla_attention, q, k, v, g, span, cfg)

    shapes = ((1, L, 8, 32), (1, L, 4, 32), (1, L, 4, 32), (1, L, 8, 32))
    return jax.jit(gradients).lower(*(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes))


def test_an_unrolled_program_holds_no_masks(monkeypatch):
    monkeypatch.setattr(blockwise, "platform", lambda: "gpu")
    assert len(lowered_attention(1024).as_text()) < 2**20


def test_memory_of_attention_grows_with_the_row_and_not_with_its_square():
    """A row of 32,768 tokens, compiled for a CPU."""

    def temporary_bytes(L):
        return lowered_attention(L).compile().memory_analysis().temp_size_in_bytes

    n_bytes = temporary_bytes(32768)
    assert n_bytes < 2**31 and n_bytes < 2.2 * temporary_bytes(16384)
    assert temporary_bytes(2048) < 16 * 2048**2  # half of the scores


@pytest.mark.parametrize("fields", [
    dict(window=100), dict(documents=True),
    *(pytest.param(fields, marks=pytest.mark.slow)
      for fields in ({}, dict(softcap=2.0), dict(value_width=128))),
], ids=str)  # fmt: skip
def test_splash_attention_is_the_plain_one(fields, monkeypatch):
    """Value and gradient, interpreted on a CPU."""
    cfg = on_mesh(PLAIN, model=dict(d_head=128, attn_softcap=fields.get("softcap", 0.0)))
    B, L, H, G, K, W = 2, 256, 4, 2, 128, fields.get("value_width", 64)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32)
               for s in ((B, L, H, K), (B, L, G, K), (B, L, G, W)))  # fmt: skip
    index_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    document_BL = index_BL // 90 if fields.get("documents") else None
    window = fields.get("window", 0)
    span = attention.Span(index_BL, index_BL, document_BL, document_BL, window=window)

    def results(kernel):
        def loss(q, k, v):
            y_BLHW = kernel(q, k, v, span, cfg)
            return (y_BLHW * jnp.cos(jnp.arange(W))).sum(), y_BLHW

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    interpret_kernels(monkeypatch)
    got = results(attention.splash_attention)
    want = results(attention.decoding_attention)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-3), got, want)


def query_gradient(kernel, q_BLHK, k_BLHK, cfg):
    """The gradient of a kernel's output by the queries; the values are the keys."""
    B, L, *_ = q_BLHK.shape
    index_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    span = attention.Span(index_BL, index_BL)

    def output(q_BLHK):
        return kernel(q_BLHK, k_BLHK, k_BLHK, span, cfg)

    y_BLHK, backward = jax.vjp(output, q_BLHK)
    return backward(y_BLHK)[0]


def test_splash_attention_has_the_types_that_shard_map_checks(monkeypatch):
    """Forward and backward, the kernel's outputs get the mesh axes over which they vary, which it
    does not declare itself; afterwards, or after an error, its module is as before."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    cfg = on_mesh(PLAIN, (2, 2, 2), model=dict(d_head=128))
    interpret_kernels(monkeypatch)
    splash = attention.splash_attention
    x_BLHK = jnp.asarray(np.random.default_rng(0).normal(size=(2, 128, 2, 128)), jnp.float32)

    @jax.jit
    @jax.shard_map(in_specs=P("dp"), out_specs=P("dp"))
    def run(x_BLHK):
        return query_gradient(splash, x_BLHK, x_BLHK, cfg)

    want = query_gradient(attention.decoding_attention, x_BLHK, x_BLHK, cfg)
    np.testing.assert_allclose(run(x_BLHK), want, atol=2e-3)
    assert splash_attention_kernel.jax is jax
    with pytest.raises(ValueError, match="'key' head dimension to be: 128"):
        query_gradient(splash, x_BLHK, x_BLHK[..., :64], cfg)
    assert splash_attention_kernel.jax is jax


def test_a_kernel_declares_outputs_of_the_given_type():
    """ShapeDtypeStruct takes manual_axis_type, an argument that JAX does not document."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    on_mesh(PLAIN, (2, 2, 2))
    found = []

    @jax.shard_map(in_specs=P("dp"), out_specs=P("dp"))
    def run(x):
        axis_type = jax.typeof(x).manual_axis_type
        assert axis_type.varying == {"dp"}
        with layers.typed_kernel_outputs(splash_attention_kernel, axis_type):
            shape_of = splash_attention_kernel.jax.ShapeDtypeStruct
            shapes = shape_of((3,), jnp.float32), shape_of.like(jnp.zeros((5, 7), jnp.int8))
            assert [(s.shape, s.dtype) for s in shapes] == [((3,), jnp.float32), ((5, 7), jnp.int8)]
            found.extend(s.manual_axis_type == axis_type for s in shapes)
            assert jax.ShapeDtypeStruct is not shape_of  # other modules are not affected
            assert splash_attention_kernel.jax.numpy is jnp
        return x

    run(jnp.ones(2))
    assert found == [True, True]


def test_a_sink_is_a_key_without_a_value_that_all_queries_see():
    """It is the first key of the row, without positions: its score is q . k = sink."""
    cfg, (B, L, H) = on_mesh(PLAIN, model=dict(d_head=8)), (2, 20, 4)
    q, k, v, _ = random_attention(B, L, H, 2, 8, 8)
    sink_H = jnp.array([-1.0, 0.0, 2.0, 30.0])
    index_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    span = attention.Span(index_BL, index_BL)
    got = attention.xla_attention(q, k, v, span, cfg, sink_H)
    # One more dim, in which queries hold the sink's score, the sink 1 and the other keys 0.
    scores_BLH1 = jnp.broadcast_to(sink_H[:, None] * 8**0.5, (B, L, H, 1))
    q = jnp.concatenate([q, scores_BLH1], -1)
    keys = jnp.concatenate([k, jnp.zeros((B, L, 2, 1))], -1)
    sink = jnp.concatenate([jnp.zeros((B, 1, 2, 8)), jnp.ones((B, 1, 2, 1))], -1)
    k, v = jnp.concatenate([sink, keys], 1), jnp.pad(v, ((0, 0), (1, 0), (0, 0), (0, 0)))
    span = attention.Span(index_BL + 1, index_BL)
    want = attention.decoding_attention(q, k, v, span, cfg)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(got[:, :, 3]).max() < 1e-5 < np.abs(got[:, :, 0]).max()


def test_a_kernel_that_cannot_do_it_is_refused_by_name():
    cfg = on_mesh(PLAIN, train=dict(attention="cudnn"))
    with pytest.raises(errors.UserError, match="cudnn runs on gpu, and this is cpu.*\n.*auto"):
        gradient_on((1, 1, 1), cfg)


# ---- the table


def check_attention(cfg):
    """Assert that a mesh has the gradient of one device, and that the cache changes no logit."""
    assert_same_gradient(gradient_on((2, 2, 2), cfg), one_device_gradient(cfg))
    check_cached_logits(cfg, (2, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", attention.ATTENTION)
def test_every_attention_of_the_table_is_the_same_on_a_mesh_and_from_its_cache(name):
    m = MOE.model
    latent = dict(q_rank=m.q_rank, kv_rank=m.kv_rank, d_rope=m.d_rope, d_value=m.d_value)
    fields = dict(attention=name, n_layers=2) | (latent if name == "mla" else {})
    check_attention(replace(PLAIN, model=replace(PLAIN.model, **fields)))


def test_a_new_attention_is_functions_and_an_entry(monkeypatch):
    """The example of docs/extending.md, as it stands there."""
    page = (ROOT / "docs/extending.md").read_text()
    (code,) = re.findall(r"^```python\n# attention.py\n(.*?)^```$", page, re.S | re.M)
    monkeypatch.setitem(attention.ATTENTION, "gated", None)  # so that the entry is removed again
    exec(code, dict(vars(attention)))
    cfg = replace(PLAIN, model=replace(PLAIN.model, attention="gated", n_layers=2))
    assert "gate_D" in model.param_table(cfg)["layers"]["dense"]
    check_attention(cfg)


def test_an_attention_that_the_table_does_not_have_is_refused():
    cfg = replace(PLAIN, model=replace(PLAIN.model, attention="ring"))
    message = "model.attention='ring' is not one of gqa or mla\n.*--model.attention to gqa or mla"
    with pytest.raises(errors.UserError, match=message):
        model.param_table(cfg)


# ---- documents


@pytest.mark.slow
def test_a_document_behind_another_in_a_row_is_as_if_alone():
    """With local and full layers, learned positions and RoPE."""
    end, tokens = 7, np.random.default_rng(0).integers(8, 500, size=(4, 16), dtype=np.int32)
    packed = np.concatenate([tokens[:, :5], np.full((4, 1), end), tokens[:, :10]], 1)
    targets = np.roll(packed, -1, 1)
    for model_cfg in (GPT2.model, MIXED.model):
        cfg = replace(MIXED, model=model_cfg)
        if model_cfg is GPT2.model:
            cfg = replace(cfg, train=GPT2.train)
        small = dict(batch_size=4, grad_accum=1, microbatches=1)
        cfg = on_mesh(cfg, (1, 1, 2), train=small)
        params = params_of(cfg)

        def nll(cfg, tokens, targets, params=params):
            tokens, targets = jnp.asarray(tokens)[None, None], jnp.asarray(targets)[None, None]
            return np.asarray(train.eval_step(params, tokens, targets, cfg)[2][0, 0])

        together = nll(cfg, packed, targets)
        alone = nll(cfg, tokens, np.roll(tokens, -1, 1))
        np.testing.assert_allclose(together[:, 6:15], alone[:, :9], atol=1e-5)
        without_mask = replace(cfg, data=replace(cfg.data, document_mask=False))
        assert np.abs(nll(without_mask, packed, targets)[:, 6:15] - alone[:, :9]).max() > 0.01


# ---- the cache


@pytest.mark.parametrize("heads", [(), (3,), (3, 2)])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("place", ["cpu", "tpu"])
@pytest.mark.parametrize("first", [0, 4, 12])
def test_tokens_are_written_at_their_places_of_the_cache(heads, prompt, place, first, monkeypatch):
    """In the order in which each platform writes them, from a row of the cache on.  Of 12 rows, 12
    means none, for a stage without work."""
    if prompt and first == 12:
        return
    monkeypatch.setattr(attention, "platform", lambda: place)
    rng, (B, L, S, K) = np.random.default_rng(0), (4, 2, 8, 5)
    shapes = (B, L, *heads, K), (12, *heads, S, K)
    new, cache = (np.float32(rng.normal(size=shape)) for shape in shapes)
    start_B = np.zeros(B, int) if prompt else np.array([0, 3, 6, 1])
    index_BL = start_B[:, None] + np.arange(L)
    options = dict(decoding=True, prompt=prompt, first_row=first)
    span = attention.Span(jnp.asarray(index_BL), None, **options)
    got, seen = attention.update_cache(dict(x=jnp.asarray(cache)), dict(x=jnp.asarray(new)), span)
    want = cache.copy()
    for b, row in enumerate(index_BL if first < 12 else []):
        for n, index in enumerate(row):
            want[first + b, ..., index, :] = new[b, n]
    np.testing.assert_array_equal(got["x"], want)
    rows = np.moveaxis(want, -2, 1)[first : first + B]
    if first < 12:
        np.testing.assert_array_equal(seen["x"], new if prompt else rows)
