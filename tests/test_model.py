"""The model: one function on every mesh, and the function that it should be."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, on_mesh
from jax import lax

import config
import model
import train
import utils
from model import TOKENS, P

PLAIN = config.tiny()
RICH = replace(
    PLAIN,
    model=replace(PLAIN.model, tie_embeddings=True, qk_norm=True),
    train=replace(PLAIN.train, grad_accum=2, dropout=0.2, z_loss=1e-3),
)


def batch(cfg, seed=0):
    """Random tokens and targets of one step, a fifth of the targets masked,
    placed on the ambient mesh."""
    t, rng = cfg.train, np.random.default_rng(seed)
    rows = rng.integers(cfg.model.vocab_size, size=(t.batch_size, t.seq_len + 1), dtype=np.int32)
    masked = rng.random((t.batch_size, t.seq_len)) < 0.2
    tokens, targets = rows[:, :-1], np.where(masked, -1, rows[:, 1:])

    def place(x):
        x = x.reshape(t.grad_accum, t.microbatches, -1, t.seq_len)
        return jax.device_put(x, utils.shardings(TOKENS))

    return place(tokens), place(targets)


def params_of(cfg):
    """Initial weights with norm gains that are not all one, or a forgotten gain would not show."""
    params = train.init_state(cfg).params

    def bend(path, x):
        if "norm" not in jax.tree_util.keystr(path):
            return x
        return x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(bend, params)


@cache
def one_device_params(model_cfg):
    return jax.device_get(params_of(on_mesh(replace(PLAIN, model=model_cfg))))


@cache
def one_device_gradient(cfg):
    return gradient(cfg, (1, 1, 1))


def gradient(cfg, mesh, **train_fields):
    params = one_device_params(cfg.model)
    cfg = on_mesh(cfg, mesh, train=train_fields)
    params = jax.device_put(params, utils.shardings(model.param_specs(cfg)))
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    return jax.device_get(f(params, *batch(cfg), jax.random.key(7), cfg))


def assert_same_gradient(got, want, tolerance=1e-5):
    """Per-parameter relative L2 error, and the loss."""
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
    error = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), got[1], want[1])
    assert max(jax.tree.leaves(error)) <= tolerance, error


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "cfg", [PLAIN, RICH], ids=["plain", "accumulation+dropout+qk_norm+tied+z_loss"]
)
def test_every_mesh_has_the_gradient_of_one_device(cfg, mesh):
    assert_same_gradient(gradient(cfg, mesh), one_device_gradient(cfg))


@pytest.mark.parametrize("fields", [
    dict(grad_accum=4), dict(grad_accum=2, microbatches=8), dict(microbatches=16),
    dict(remat="none"), dict(remat="dots"),
], ids=str)  # fmt: skip
def test_accumulation_microbatches_and_remat_do_not_change_the_gradient(fields):
    assert_same_gradient(gradient(PLAIN, (2, 2, 1), **fields), one_device_gradient(PLAIN))


def test_dropout_drops_each_element_by_itself_and_keeps_the_mean():
    cfg = on_mesh(RICH)

    @jax.shard_map(in_specs=(P(), P(), P()), out_specs=P(None, "tp"))
    def dropped(x_BLD, key, row_B):
        return model.dropout(lax.pcast(x_BLD, "tp", to="varying"), key, row_B, cfg)

    x_BLD, key = jnp.ones((4, 16, 32)), jax.random.key(3)
    y_BLD = np.asarray(jax.jit(dropped)(x_BLD, key, jnp.arange(4)))
    assert set(np.unique(y_BLD).round(4)) == {0.0, 1.25}
    assert abs(y_BLD.mean() - 1) < 0.05
    for other in (
        y_BLD[1],
        y_BLD[:, ::-1][0],
        jax.jit(dropped)(x_BLD, jax.random.key(4), jnp.arange(4))[0],
    ):
        assert (np.asarray(other) != y_BLD[0]).mean() > 0.2  # by row, by position, by key
    assert (y_BLD[0, 0] != y_BLD[0, 1]).any()


def test_dropout_differs_between_layers_branches_steps_and_seeds():
    """Each of these keys one fold_in away from another; a forgotten one repeats the mask."""
    seen = []
    real = model.dropout

    def spy(x_BLD, key, row_B, cfg):
        if key is not None:
            jax.debug.callback(lambda k: seen.append(tuple(k.tolist())), jax.random.key_data(key))
        return real(x_BLD, key, row_B, cfg)

    cfg = on_mesh(RICH, train=dict(remat="none", grad_accum=1, microbatches=1, z_loss=0.123))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(model, "dropout", spy)
        for seed, step in ((0, 0), (0, 1), (1, 0)):
            at = replace(cfg, run=replace(cfg.run, seed=seed))
            state = train.init_state(at)._replace(step=jnp.int32(step))
            jax.block_until_ready(train.train_step(state, *batch(at), at))
    jax.effects_barrier()
    assert len(seen) == len(set(seen)) == 3 * (1 + 2 * cfg.model.n_layers)


def test_dropout_drops_and_differs_between_steps():
    cfg = on_mesh(RICH)
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    losses = [float(f(params_of(cfg), *batch(cfg), jax.random.key(n), cfg)[0]) for n in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_initial_weights_do_not_depend_on_the_mesh():
    want = jax.device_get(params_of(on_mesh(PLAIN)))
    for mesh in [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)]:
        got = jax.device_get(params_of(on_mesh(PLAIN, mesh)))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    layers = want["layers"]["q_DHK"]
    assert abs(layers.std() * PLAIN.model.d_model**0.5 - 1) < 0.05
    assert not np.array_equal(layers[0], layers[1])
    assert not np.array_equal(want["layers"]["k_DGK"], want["layers"]["v_DGK"])
    out = want["layers"]["out_FD"]
    assert abs(out.std() * (2 * PLAIN.model.n_layers * PLAIN.model.d_ff) ** 0.5 - 1) < 0.05
    other = params_of(on_mesh(PLAIN, run=dict(seed=1)))
    assert not np.array_equal(other["embed_VD"], want["embed_VD"])
    assert not np.array_equal(layers, want["layers"]["k_DGK"])


def test_no_token_sees_the_future():
    cfg = on_mesh(PLAIN, (2, 2, 2))
    tokens_AMBL, targets_AMBL = batch(cfg)
    before = np.asarray(train.eval_step(params_of(cfg), tokens_AMBL, targets_AMBL, cfg)[2])
    changed_AMBL = tokens_AMBL.at[..., 9:].set(3)
    after = np.asarray(train.eval_step(params_of(cfg), changed_AMBL, targets_AMBL, cfg)[2])
    np.testing.assert_array_equal(before[..., :9], after[..., :9])
    assert (before[..., 9:] != after[..., 9:]).any()


def plain_logits(w, tokens, cfg):
    """The same decoder once more, for one sequence,
    in numpy float64 with loops over heads and positions."""
    m, L = cfg.model, len(tokens)

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_eps) * gain

    def turn(x):
        half = m.d_head // 2
        for position in range(L):
            for i in range(half):
                angle = position * m.rope_theta ** (-2 * i / m.d_head)
                a, b = x[position, i], x[position, i + half]
                x[position, i] = a * np.cos(angle) - b * np.sin(angle)
                x[position, i + half] = b * np.cos(angle) + a * np.sin(angle)
        return x

    x = w["embed_VD"][tokens]
    for n in range(m.n_layers):
        p = {name: weight[n] for name, weight in w["layers"].items()}
        y, out = norm(x, p["attn_norm_D"]), np.zeros_like(x)
        for h in range(m.n_heads):
            g = h * m.n_kv_heads // m.n_heads
            q, k, v = y @ p["q_DHK"][:, h], y @ p["k_DGK"][:, g], y @ p["v_DGK"][:, g]
            if m.qk_norm:
                q, k = norm(q, p["q_norm_K"]), norm(k, p["k_norm_K"])
            q, k = turn(q), turn(k)
            for i in range(L):
                score = np.exp(k[: i + 1] @ q[i] / np.sqrt(m.d_head))
                out[i] += score / score.sum() @ v[: i + 1] @ p["o_HKD"][h]
        x = x + out
        y = norm(x, p["mlp_norm_D"])
        gate, up = y @ p["in_CDF"][0], y @ p["in_CDF"][1]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["out_FD"]
    unembed = w["embed_VD"].T if m.tie_embeddings else w["unembed_DV"]
    return norm(x, w["norm_D"]) @ unembed


def plain_nll(w, tokens, targets, cfg):
    logit = plain_logits(w, tokens, cfg)
    return np.log(np.exp(logit).sum(-1)) - logit[np.arange(len(tokens)), targets]


@pytest.mark.parametrize("cfg", [PLAIN, RICH], ids=["plain", "qk_norm+tied"])
def test_the_loss_is_that_of_a_plain_decoder(cfg):
    cfg = on_mesh(cfg, (1, 2, 2))
    params, (tokens, targets) = params_of(cfg), batch(cfg)
    got = np.asarray(train.eval_step(params, tokens, targets, cfg)[2])
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    want = plain_nll(w, np.asarray(tokens)[0, 1, 2], np.asarray(targets)[0, 1, 2], cfg)
    counted = np.asarray(targets)[0, 1, 2] >= 0
    np.testing.assert_allclose(got[0, 1, 2][counted], want[counted], rtol=2e-5)
    assert (got[0, 1, 2][~counted] == 0).all()


def test_a_tenth_of_the_loss_is_not_lost_to_bfloat16():
    cfg = replace(PLAIN, train=replace(PLAIN.train, dtype="bfloat16"))
    (loss, grads), (loss32, grads32) = gradient(cfg, (2, 2, 2)), one_device_gradient(PLAIN)
    assert 1e-7 < abs(loss - loss32) < 0.02

    def cosine(a, b):
        return (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)

    assert min(jax.tree.leaves(jax.tree.map(cosine, grads, grads32))) > 0.99
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(grads))


def test_z_loss_adds_the_mean_square_of_the_log_partition():
    """Its gradient along the last norm's gain is the difference quotient of a plain decoder."""
    few = dict(batch_size=4, microbatches=1)
    weight, grads = 0.5, {}
    for z_loss in (0.0, weight):
        _, grads[z_loss] = gradient(PLAIN, (1, 1, 1), z_loss=z_loss, **few)
    got = grads[weight]["norm_D"] - grads[0.0]["norm_D"]
    cfg = on_mesh(PLAIN, train=few)
    tokens, targets = (np.asarray(x).reshape(4, -1) for x in batch(cfg))
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), one_device_params(cfg.model))

    def objective(step):
        moved = w | dict(norm_D=w["norm_D"] * (1 + step))
        z = [np.log(np.exp(plain_logits(moved, row, cfg)).sum(-1)) for row in tokens]
        return weight * (np.array(z)[targets >= 0] ** 2).mean()

    want = (objective(1e-4) - objective(-1e-4)) / 2e-4
    np.testing.assert_allclose(got @ w["norm_D"], want, rtol=1e-3)


# ---- decoding


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (1, 4, 1)], ids=str)
def test_greedy_text_is_the_argmax_of_a_plain_decoder(mesh):
    """On any mesh, for prompts of different lengths, and where the window has begun to slide."""
    cfg = utils.start_mesh(replace(PLAIN, mesh=config.Mesh(*mesh)), rows=3)
    params, L = params_of(cfg), cfg.train.seq_len
    prompts = [[5, 6, 7], [1], list(range(12))]
    *_, rows = model.generate(params, prompts, 8, cfg, vocab_size=512, temperature=0)
    assert [row[: len(p)] for row, p in zip(rows, prompts, strict=True)] == prompts
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for row, n in [(0, 3), (0, 9), (1, 4), (2, 12), (2, L + 3)]:
        window = np.array(rows[row][:n][-L:])
        assert rows[row][n] == plain_logits(w, window, cfg)[-1].argmax()


def test_sampling_options():
    logit_V = np.log(np.array([0.5, 0.3, 0.15, 0.05]))

    def draw(**options):
        """How often each of the four was chosen."""
        options = dict(temperature=1, top_k=0, top_p=1.0) | options
        chosen = [model.choose(logit_V, np.random.default_rng(n), **options) for n in range(2000)]
        return np.bincount(chosen, minlength=4) / 2000

    np.testing.assert_allclose(draw(), [0.5, 0.3, 0.15, 0.05], atol=0.04)
    np.testing.assert_allclose(draw(top_k=2), [0.625, 0.375, 0, 0], atol=0.04)
    np.testing.assert_allclose(draw(top_p=0.79), [0.625, 0.375, 0, 0], atol=0.04)
    assert draw(temperature=0)[0] == 1 and draw(top_p=0.5)[0] == 1
    assert draw(temperature=0.5)[0] > 0.6 and draw(temperature=2.0)[3] > 0.08


def test_ids_that_only_pad_the_vocabulary_are_never_drawn():
    cfg = utils.start_mesh(PLAIN, rows=2)
    options = dict(vocab_size=40, temperature=5.0)
    *_, rows = model.generate(params_of(cfg), [[5], [6]], 12, cfg, **options)
    assert max(max(row) for row in rows) < 40
    *_, alone = model.generate(params_of(cfg), [[5]], 12, cfg, **options)
    assert alone[0] == rows[0]
    assert rows[1][1:] != rows[0][1:]  # each row has its own random numbers


def test_a_row_stops_at_the_end_of_its_document():
    cfg = utils.start_mesh(PLAIN, rows=1)
    params = params_of(cfg)
    greedy = dict(vocab_size=512, temperature=0)
    *_, rows = model.generate(params, [[5]], 6, cfg, **greedy)
    *_, stopped = model.generate(params, [[5]], 6, cfg, **greedy, stop_id=rows[0][3])
    assert stopped[0] == rows[0][: rows[0].index(rows[0][3])]


def test_parameters_are_counted_as_published():
    """Llama 3 8B has 8.03 billion parameters (Grattafiori et al. 2024)."""
    assert model.param_count(config.llama3_8b()) == 8_030_261_248
    params = params_of(on_mesh(PLAIN))
    assert model.param_count(PLAIN) == sum(x.size for x in jax.tree.leaves(params))


def test_a_replicated_norm_is_one_value_on_every_device():
    """What check_vma guards: replicas cannot drift apart."""
    cfg = on_mesh(PLAIN, (2, 2, 2))
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    _, grads = f(params_of(cfg), *batch(cfg), jax.random.key(0), cfg)
    copies = [np.asarray(s.data) for s in grads["norm_D"].addressable_shards]
    assert len(copies) == 8
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])
