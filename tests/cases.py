"""What the tests of the model share: configs, batches and weights, the gradient on a mesh and on
one device, and the same decoder in plain numpy.  There are no tests here."""

import json
import re
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
from conftest import ROOT, on_mesh
from jax.sharding import PartitionSpec as P

import config
import generate
import model
import runstate
import train
import utils
from scripts import hf_config

# ---- configs

PLAIN = config.tiny()
RICH = replace(
    PLAIN,
    model=replace(PLAIN.model, tie_embeddings=True, qk_norm=True),
    train=replace(PLAIN.train, grad_accum=2, dropout=0.2, z_loss=1e-3),
)
MOE = replace(
    PLAIN,
    model=replace(
        PLAIN.model, n_layers=8, pattern="moe", attention="mla",
        q_rank=16, kv_rank=8, d_rope=4, d_value=8, n_experts=8, n_active=2, n_shared=1, d_expert=16,
        router="sigmoid", norm_scores=True, score_scale=2.5, n_groups=4, n_active_groups=2,
        router_bias=True,
    ),
    train=replace(PLAIN.train, balance_loss=0.01),
)  # fmt: skip
MOE_ALLTOALL = replace(MOE, mesh=config.Mesh(experts="alltoall"))
# Every token goes to all experts, because rounding would route some tokens to other ones.
ALL_EXPERTS = replace(MOE, model=replace(MOE.model, n_active=8, n_groups=1, n_active_groups=1))
GPT2 = replace(
    PLAIN,
    model=replace(
        PLAIN.model, vocab_size=500, n_kv_heads=16, norm="layer", norm_bias=True, attn_bias=True,
        mlp_bias=True, activation="gelu_tanh", positions="learned", max_positions=20,
        tie_embeddings=True,
    ),
)  # fmt: skip
# What the others lack: a prefix, blocks of several kinds, local layers, capacity, documents, caps.
MIXED = replace(
    PLAIN,
    model=replace(
        PLAIN.model, n_layers=9, prefix="moe", pattern="dense_local*3,moe_local", window=5,
        n_experts=4,
        n_active=2, d_expert=16, activation="relu2", attn_softcap=3.0, logit_softcap=5.0,
    ),
    data=replace(PLAIN.data, document_mask=True, end_id=7),
    train=replace(PLAIN.train, capacity_factor=1.0, balance_loss=0.01, grad_accum=2, dropout=0.1),
)  # fmt: skip


def golden(family: str) -> config.Config:
    """PLAIN with the model of a folder of goldens/, of random weights."""
    path = ROOT / "tests" / "goldens" / family / "config.json"
    return replace(PLAIN, model=hf_config.read_model(json.loads(path.read_text())))


# ---- batches and weights


def batch(cfg, seed=0):
    """Random tokens and targets of one step, on the ambient mesh; a fifth of the targets is
    masked."""
    t, rng = cfg.train, np.random.default_rng(seed)
    rows = rng.integers(cfg.model.vocab_size, size=(t.batch_size, t.seq_len + 1), dtype=np.int32)
    masked = rng.random((t.batch_size, t.seq_len)) < 0.2
    tokens, targets = rows[:, :-1], np.where(masked, -1, rows[:, 1:])
    if cfg.data.document_mask:
        tokens = np.where(rng.random(tokens.shape) < 0.1, cfg.data.end_id, tokens)

    def put(x):
        x = x.reshape(t.grad_accum, t.microbatches, -1, t.seq_len)
        return jax.device_put(x, utils.shardings(model.token_spec()))

    return put(tokens), put(targets)


def params_of(cfg):
    """Initial weights, with noise on norms' gains, biases and sinks, and with layers that add
    as much to the residual stream as the embedding gives.

    They start as ones, zeros and small numbers, and then a test would not notice a gain or bias
    that is not used, or what a layer adds.
    """
    params, table = runstate.init_state(cfg).params, model.param_table(cfg)

    def add_noise(path, x):
        name = path[-1].key
        if name.startswith(("embed", "position", "unembed")):
            return x * (cfg.model.d_model**-0.5 / table[name].init.std)
        if re.match("o_H|out_|shared_out", name):
            return x * 10
        if not re.search("norm|bias|sink", name):
            return x
        return x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(add_noise, params)


def as_float64(params):
    """The weights as numpy arrays, for `plain_logits`."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


# ---- gradients


@cache
def one_device_params(model_cfg):
    """`params_of` on one device, as numpy arrays."""
    return jax.device_get(params_of(on_mesh(replace(PLAIN, model=model_cfg))))


@cache
def one_device_gradient(cfg):
    """`gradient_on` one device.  Every weight has one, but the biases that choose experts."""
    found = gradient_on((1, 1, 1), cfg)
    without = [name for name, x in utils.leaf_table(found[1]).items() if not x.any()]
    assert all(name.endswith("/router_bias_E") for name in without), without
    return found


def gradient_on(mesh, cfg, **train_fields):
    """(loss, gradient, statistics) of `batch` on a mesh, with fields of cfg.train replaced."""
    params = one_device_params(cfg.model)
    cfg = on_mesh(cfg, mesh, train=train_fields)
    params = jax.device_put(params, utils.shardings(model.param_specs(cfg)))
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    return jax.device_get(f(params, *batch(cfg), jax.random.key(7), cfg))


def relative_errors(got, want) -> dict:
    """The relative L2 error of each weight's gradient.

    Some gradients are nothing but rounding: softmax ignores the bias of keys that are not rotated,
    and the choice of experts has no gradient.  Their error is divided by the size of the gradient
    of all weights instead.
    """
    whole = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(want)))

    def error(got, want):
        size = np.linalg.norm(want)
        return np.linalg.norm(got - want) / (size if size > 1e-6 * whole else whole)

    return jax.tree.map(error, got, want)


def assert_same_gradient(got, want, tolerance=1e-5):
    """The gradients agree, and so do the losses and the statistics of moe layers."""
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
    errors = relative_errors(got[1], want[1])
    assert max(jax.tree.leaves(errors)) <= tolerance, errors
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance), got[2], want[2])


# ---- the same decoder in plain numpy


def plain_logits(w, tokens, cfg):
    """The logits of one sequence, in float64, with loops over layers, heads and positions."""
    m, L = cfg.model, len(tokens)

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_eps) * gain

    def rotate(x):
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
        p = {name: weight[n] for name, weight in w["layers"]["dense"].items()}
        y, out = norm(x, p["attn_norm_D"]), np.zeros_like(x)
        for h in range(m.n_heads):
            g = h * m.n_kv_heads // m.n_heads
            q, k, v = y @ p["q_DHK"][:, h], y @ p["k_DGK"][:, g], y @ p["v_DGK"][:, g]
            if m.qk_norm:
                q, k = norm(q, p["q_norm_K"]), norm(k, p["k_norm_K"])
            q, k = rotate(q), rotate(k)
            for i in range(L):
                score = np.exp(k[: i + 1] @ q[i] / np.sqrt(m.d_head))
                out[i] += score / score.sum() @ v[: i + 1] @ p["o_HKD"][h]
        x = x + out
        y = norm(x, p["mlp_norm_D"])
        gate, up = y @ p["in_CDF"][0], y @ p["in_CDF"][1]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["out_FD"]
    unembed = w["embed_VD"].T if m.tie_embeddings else w["unembed_DV"]
    return norm(x, w["norm_D"]) @ unembed


# ---- decoding


def put_rows(x, cfg):
    """[rows, ...] as the microbatches of decoding, on the ambient mesh."""
    x = x.reshape(cfg.mesh.pp, -1, *x.shape[1:])
    return jax.device_put(x, utils.shardings(P("pp", "dp")))


def check_cached_logits(cfg, mesh):
    """Assert that in float32 the cache changes no loss."""
    assert cached_errors(cfg, mesh).max() <= 2e-5


def cached_errors(cfg, mesh):
    """How far the losses (nats) of rows of different lengths, through prefill and then one token at
    a time, are from those of an evaluation, which caches nothing."""
    cfg = on_mesh(cfg, mesh, train=dict(grad_accum=1))
    params, (tokens, targets) = params_of(cfg), batch(cfg)
    L, n_rows = cfg.train.seq_len, 16
    nll = np.asarray(train.eval_step(params, tokens, targets, cfg)[2]).reshape(-1, L)
    tokens, targets = (np.asarray(x).reshape(-1, L)[:n_rows] for x in (tokens, targets))
    weights = generate.decoding_weights(params, cfg)
    cache, n_new, errors = None, 8, []
    length = np.random.default_rng(1).integers(3, 9, size=n_rows).astype(np.int32)
    for _ in range(5):
        rows = np.where(np.arange(L) < length[:, None], tokens, 0)
        args = put_rows(rows, cfg), put_rows(length, cfg), n_new, cfg
        logit, cache = generate.next_logits(weights, cache, *args)
        logit, last = np.asarray(logit).reshape(n_rows, -1), (np.arange(n_rows), length - 1)
        z = np.log(np.exp(logit).sum(-1))
        counted = targets[last] >= 0
        got = z - logit[np.arange(n_rows), targets[last]]
        errors.append(np.abs(got - nll[last])[counted])
        length, n_new = length + 1, 1
    return np.concatenate(errors)
