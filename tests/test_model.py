"""The model: one function on every mesh, and the function that it should be."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ROOT, on_mesh
from jax import lax

import attention
import config
import experts
import generate
import layers
import model
import pipeline
import train
import utils
from model import TOKEN_SPEC, P

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
GPT2 = replace(
    PLAIN,
    model=replace(
        PLAIN.model, vocab_size=500, n_kv_heads=16, norm="layer", norm_bias=True, attn_bias=True,
        mlp_bias=True, activation="gelu_tanh", positions="learned", max_positions=20,
        tie_embeddings=True,
    ),
)  # fmt: skip
# A prefix, blocks of many kinds, local layers, capacity, documents and caps: what the others lack.
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


def batch(cfg, seed=0):
    """Random tokens and targets of one step, a fifth of the targets masked,
    placed on the ambient mesh."""
    t, rng = cfg.train, np.random.default_rng(seed)
    rows = rng.integers(cfg.model.vocab_size, size=(t.batch_size, t.seq_len + 1), dtype=np.int32)
    masked = rng.random((t.batch_size, t.seq_len)) < 0.2
    tokens, targets = rows[:, :-1], np.where(masked, -1, rows[:, 1:])
    if cfg.data.document_mask:
        tokens = np.where(rng.random(tokens.shape) < 0.1, cfg.data.end_id, tokens)

    def place(x):
        x = x.reshape(t.grad_accum, t.microbatches, -1, t.seq_len)
        return jax.device_put(x, utils.shardings(TOKEN_SPEC))

    return place(tokens), place(targets)


def params_of(cfg):
    """Initial weights with norm gains that are not all one and biases that are not all zero, or a
    forgotten one would not show."""
    params = train.init_state(cfg).params

    def bend(path, x):
        if not any(word in jax.tree_util.keystr(path) for word in ("norm", "bias")):
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


def errors(got, want) -> dict:
    """The relative L2 error of each parameter's gradient."""
    whole = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(want)))

    def error(got, want):
        """A gradient that is nothing but rounding (softmax ignores a bias of keys that do not turn;
        the choice of experts has none) is measured by the whole one's."""
        size = np.linalg.norm(want)
        return np.linalg.norm(got - want) / (size if size > 1e-6 * whole else whole)

    return jax.tree.map(error, got, want)


def assert_same_gradient(got, want, tolerance=1e-5):
    """The gradients agree, and so do the losses and the statistics of moe layers."""
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
    off = errors(got[1], want[1])
    assert max(jax.tree.leaves(off)) <= tolerance, off
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance), got[2], want[2])


CASES = [
    *((RICH, mesh) for mesh in MESHES),
    *((MOE, mesh) for mesh in MESHES),
    *((MOE_ALLTOALL, mesh) for mesh in MESHES if mesh[0] > 1),  # else there is one rank to go to
    # Norms, biases and positions of its own, which no two axes treat together.
    *((GPT2, mesh) for mesh in [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]),
]
NAMES = {RICH: "accumulation+dropout+qk_norm+tied+z_loss", MOE: "mla+moe"}
NAMES |= {MOE_ALLTOALL: "mla+moe+alltoall", GPT2: "gpt2"}


@pytest.mark.parametrize("cfg, mesh", CASES, ids=lambda x: NAMES.get(x, str(x)))
def test_every_mesh_has_the_gradient_of_one_device(cfg, mesh):
    gather = replace(cfg, mesh=config.Mesh())
    assert_same_gradient(gradient(cfg, mesh), one_device_gradient(gather))


def test_mixed_blocks_with_capacity_and_documents_have_the_gradient_of_one_device():
    want = one_device_gradient(MIXED)
    assert want[2]["layers"]["moe_local"]["dropped"].min() > 0
    cfg = replace(MIXED, mesh=config.Mesh(experts="alltoall"))
    assert_same_gradient(gradient(cfg, (4, 1, 2)), want)


@pytest.mark.parametrize("fields", [
    dict(grad_accum=4), dict(grad_accum=2, microbatches=8), dict(microbatches=16),
    dict(remat="none"), dict(remat="dots"), dict(remat="attention"), dict(unroll=4),
    dict(loss_chunk=12),
], ids=str)  # fmt: skip
def test_what_only_trades_time_and_memory_does_not_change_the_gradient(fields):
    assert_same_gradient(gradient(PLAIN, (2, 2, 1), **fields), one_device_gradient(PLAIN))


def test_stages_that_do_not_divide_the_sequence_share_its_scores():
    cfg = replace(
        PLAIN,
        model=replace(PLAIN.model, n_layers=3),
        train=replace(PLAIN.train, batch_size=12, seq_len=16),
    )
    assert_same_gradient(gradient(cfg, (1, 3, 2)), one_device_gradient(cfg))


def test_inputs_of_layers_can_wait_in_host_memory():
    got = gradient(PLAIN, (2, 1, 2), remat="offload")
    assert_same_gradient(got, one_device_gradient(PLAIN))


@pytest.mark.parametrize("cfg, mesh, how", [
    (PLAIN, (1, 4, 1), dict(schedule="1f1b")),
    (RICH, (2, 2, 2), dict(schedule="1f1b")),
    (RICH, (2, 2, 2), dict(schedule="1f1b", skip_bubbles=False)),
    (MIXED, (2, 2, 2), dict(schedule="1f1b")),
    (MOE, (2, 2, 2), dict(schedule="1f1b", experts="alltoall", fsdp="step")),
    (PLAIN, (1, 2, 1), dict(schedule="interleaved", virtual_stages=4)),
    (RICH, (2, 2, 2), dict(schedule="interleaved", virtual_stages=2)),
    (MOE, (1, 4, 2), dict(schedule="interleaved", virtual_stages=2)),
    (MIXED, (4, 1, 2), dict(fsdp="step")),
    (MOE, (4, 1, 2), dict(fsdp="none", experts="alltoall")),
], ids=["plain", "rich", "lock-step", "mixed", "moe", "plain-4", "rich-2", "moe-2", "mixed-step",
        "moe-none"])  # fmt: skip
def test_schedules_and_fsdp_do_not_change_the_gradient(cfg, mesh, how):
    got = gradient(replace(cfg, mesh=config.Mesh(**how)), mesh)
    assert_same_gradient(got, one_device_gradient(cfg))


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name, parts", SCHEDULES)
def test_every_stage_does_each_microbatch_of_each_part_once_both_ways(name, parts, pp):
    """And what it gets is what the stage before it, or after it, has made of that microbatch."""
    M = 2 * pp
    cfg = on_mesh(replace(PLAIN, mesh=config.Mesh(schedule=name, virtual_stages=parts)), (1, pp, 1),
                  model=dict(n_layers=pp * parts), train=dict(seq_len=16))  # fmt: skip
    plan = pipeline.make_schedule(cfg, M)

    @jax.jit
    @jax.shard_map(in_specs=(), out_specs=(P("pp"), P("pp"), P("pp")))
    def run():
        s = layers.mark_varying(lax.axis_index("pp"))

        def number(r):
            """Of a part in the model."""
            return r * pp + s

        def begin(x, m, total):
            return m * 1000.0 + layers.mark_varying(jnp.float32(0)), total

        def forward(x, m, r, total):
            done, back, good = total
            good &= x == m * 1000 + number(r)
            return m * 1000.0 + number(r) + 1, [x], (done.at[r, m].add(1), back, good)

        def score(y, m, total):
            done, back, good = total
            good &= (s < pp - 1) | (y == m * 1000 + parts * pp)
            return jnp.where(s == pp - 1, m * 1000.0 + parts * pp, -1), (done, back, good)

        def backward(g, kept, m, r, total):
            done, back, good = total
            good &= g == m * 1000 + number(r) + 1
            good &= kept[0] == m * 1000 + number(r)
            return g - 1, (done, back.at[r, m].add(1), good)

        def finish(g, m, total):
            done, back, good = total
            return done, back, good & (g == m * 1000)

        count = jnp.zeros((parts, M), int)
        start = layers.mark_varying((count, count, jnp.bool(True)))
        x = layers.mark_varying(jnp.float32(0))
        stage = pipeline.Stage(begin, forward, score, backward, finish)
        total = pipeline.run_schedule(plan, stage, x, [x], start, pipeline.branch_policy(cfg))
        return jax.tree.map(lambda x: lax.pmin(x.astype(int), ("dp", "tp"))[None], total)

    done, back, good = jax.device_get(run())
    assert good.all() and (done == 1).all() and (back == 1).all()


@pytest.mark.parametrize("name, parts", SCHEDULES)
def test_stages_work_once_a_microbatch_and_in_lock_step_through_the_bubble_too(name, parts):
    """What is really run, counted where it runs: the bubble's share is that of the formula."""
    pp, M = 4, 8
    mesh = config.Mesh(schedule=name, virtual_stages=parts)
    cfg = on_mesh(replace(PLAIN, mesh=mesh), (1, pp, 1), model=dict(n_layers=pp * parts))

    def runs(skip):
        branch = pipeline.branch_policy(replace(cfg, mesh=replace(cfg.mesh, skip_bubbles=skip)))
        plan, ran = pipeline.make_schedule(cfg, M), Counter()

        @jax.jit
        @jax.shard_map(in_specs=(), out_specs=P(("dp", "pp", "tp")))
        def run():
            def ran_here(way):
                jax.debug.callback(lambda s: ran.update([(way, int(s))]), lax.axis_index("pp"))

            def forward(x, m, r, total):
                ran_here("forward")
                return x, [x], total

            def backward(g, kept, m, r, total):
                ran_here("backward")
                return g, total

            def pass_on(x, m, total):
                return x, total

            def finish(g, m, total):
                return total

            x = total = layers.mark_varying(jnp.float32(0))
            stage = pipeline.Stage(pass_on, forward, pass_on, backward, finish)
            return pipeline.run_schedule(plan, stage, x, [x], total, branch)[None]

        jax.block_until_ready(run())
        jax.effects_barrier()
        return [ran[way, s] for way in ("forward", "backward") for s in range(pp)]

    n = parts * M
    assert runs(skip=True) == [n] * 2 * pp
    assert runs(skip=False) == [n + pp - 1] * 2 * pp


def test_memory_of_1f1b_does_not_grow_with_the_microbatches():
    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    def memory(name, M):
        cfg = replace(PLAIN, mesh=config.Mesh(schedule=name))
        sizes = dict(seq_len=128, microbatches=M, batch_size=4 * M)
        cfg = on_mesh(cfg, (1, 2, 1), model=dict(n_layers=4, vocab_size=128), train=sizes)
        args = train.abstract_state(cfg), *jax.tree.map(abstract, batch(cfg)), cfg
        return train.train_step.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert memory("1f1b", 32) < 1.02 * memory("1f1b", 8)  # the tokens themselves
    assert memory("gpipe", 32) > 1.2 * memory("gpipe", 8)


@pytest.mark.parametrize("fields", [
    {}, dict(window=100), dict(documents=True), dict(softcap=2.0), dict(value_width=128),
], ids=str)  # fmt: skip
def test_splash_attention_is_the_plain_one(fields):
    """Interpreted on a CPU, value and gradient."""
    cfg = on_mesh(PLAIN, model=dict(attn_softcap=fields.get("softcap", 0.0)))
    B, L, H, G, K, W = 2, 256, 4, 2, 128, fields.get("value_width", 64)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32)
               for s in ((B, L, H, K), (B, L, G, K), (B, L, G, W)))  # fmt: skip
    index_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    document_BL = index_BL // 90 if fields.get("documents") else None
    at = attention.Span(
        index_BL, index_BL, document_BL, document_BL, window=fields.get("window", 0)
    )

    def results(attention, **kwargs):
        def loss(q, k, v):
            y_BLHW = attention(q, k, v, at, cfg, K, **kwargs)
            return (y_BLHW * jnp.cos(jnp.arange(W))).sum(), y_BLHW

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    got, want = (
        results(attention.splash_attention, interpret=True),
        results(attention.xla_attention),
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-3), got, want)


def test_a_kernel_that_cannot_is_refused_by_name():
    cfg = on_mesh(PLAIN, train=dict(attention="cudnn"))
    with pytest.raises(config.UserError, match="cudnn runs on gpu, and this is cpu.*\n.*auto"):
        gradient(cfg, (1, 1, 1), attention="cudnn")


def test_dropout_drops_each_element_by_itself_and_keeps_the_mean():
    cfg = on_mesh(RICH)

    @jax.shard_map(in_specs=(P(), P(), P()), out_specs=P(None, "tp"))
    def dropped(x_BLD, key, row_B):
        return layers.dropout(lax.pcast(x_BLD, "tp", to="varying"), key, row_B, cfg)

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
            at = replace(cfg, run=replace(cfg.run, seed=seed))
            state = train.init_state(at)._replace(step=jnp.int32(step))
            jax.block_until_ready(train.train_step(state, *batch(at), at))
    jax.effects_barrier()
    # Each key is met more than once: the backward pass makes the embedding anew.
    assert len(set(seen)) == 3 * (1 + 2 * cfg.model.n_layers)


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
    layers = want["layers"]["dense"]["q_DHK"]
    assert abs(layers.std() * PLAIN.model.d_model**0.5 - 1) < 0.05
    assert not np.array_equal(layers[0], layers[1])
    assert not np.array_equal(want["layers"]["dense"]["k_DGK"], want["layers"]["dense"]["v_DGK"])
    out = want["layers"]["dense"]["out_FD"]
    assert abs(out.std() * (2 * PLAIN.model.n_layers * PLAIN.model.d_ff) ** 0.5 - 1) < 0.05
    other = params_of(on_mesh(PLAIN, run=dict(seed=1)))
    assert not np.array_equal(other["embed_VD"], want["embed_VD"])
    assert not np.array_equal(layers, want["layers"]["dense"]["k_DGK"])


def plain_moe(x_LD, w, m, capacity_factor=0.0):
    """One moe layer for one sequence: a loop over tokens and their experts."""

    def expert(x, into, out):
        gate, up = x @ into[0], x @ into[1]
        return (gate / (1 + np.exp(-gate)) * up) @ out

    L, E = len(x_LD), m.n_experts
    room = int(np.ceil(capacity_factor * L * m.n_active / E)) if capacity_factor else L
    y_LD, load, dropped = np.zeros_like(x_LD), np.zeros(E, int), 0
    entropy, mean = 0, np.zeros(E)
    taken = np.zeros(E, int)
    for n, x in enumerate(x_LD):
        logit = x @ w["router_DE"]
        score = 1 / (1 + np.exp(-logit))
        if m.router == "softmax":
            score = np.exp(logit) / np.exp(logit).sum()
        prob = score / score.sum()
        entropy, mean = entropy - (prob * np.log(prob)).sum(), mean + prob / L
        choice = score + w.get("router_bias_E", 0)
        by_group = choice.reshape(m.n_groups, -1)
        worth = np.sort(by_group)[:, -2:].sum(1)
        for bad in np.argsort(-worth)[m.n_active_groups :]:
            by_group[bad] = -np.inf
        chosen = np.argsort(-by_group.reshape(-1))[: m.n_active]
        total = score[chosen].sum() if m.norm_scores else 1
        for e in chosen:
            load[e] += 1
            if taken[e] == room:
                dropped += 1
                continue
            taken[e] += 1
            into = w["in_EDCF"][e].transpose(1, 0, 2)
            y_LD[n] += score[e] / total * m.score_scale * expert(x, into, w["out_EFD"][e])
        if m.n_shared:
            y_LD[n] += expert(x, w["shared_in_CDF"], w["shared_out_FD"])
    sums = dict(load_E=load, dropped=dropped, entropy=entropy)
    return y_LD, sums | dict(balance=E * (load / load.sum() * mean).sum())


SOFTMAX = dict(router="softmax", router_bias=False, n_groups=1, n_active_groups=1, n_shared=0)


@pytest.mark.parametrize("experts", ["gather", "alltoall"])
@pytest.mark.parametrize("capacity_factor", [0.0, 0.75])
@pytest.mark.parametrize("fields", [{}, dict(SOFTMAX, norm_scores=False, n_active=3)], ids=str)
def test_a_moe_layer_is_a_loop_over_tokens_and_their_experts(fields, capacity_factor, experts):
    cfg = replace(MOE, model=replace(MOE.model, **fields), mesh=config.Mesh(experts=experts))
    cfg = on_mesh(cfg, (4, 1, 2), train=dict(capacity_factor=capacity_factor))
    table = experts.moe_table(cfg)
    rng = np.random.default_rng(0)
    w = {n: rng.normal(size=p.shape, scale=p.shape[-1] ** -0.5) for n, p in table.items()}
    x_BLD = rng.normal(size=(8, 16, cfg.model.d_model))

    specs = {name: p.spec for name, p in table.items()}
    sums = dict(load_E=P(), entropy=P(), balance=P(), dropped=P())

    @jax.jit
    @jax.shard_map(in_specs=(P("dp", "tp"), specs), out_specs=(P("dp", "tp"), sums))
    def moe(x_BLD, w):
        y_BLD, stats = experts.moe(x_BLD, layers.gather_over_dp(w, table), cfg, training=True)
        return y_BLD, lax.psum(layers.mark_varying(stats), ("dp", "pp", "tp"))

    to32 = partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))
    y_BLD, stats = jax.device_get(moe(to32(x_BLD), to32(w)))
    want = [plain_moe(x_LD, w, cfg.model, capacity_factor) for x_LD in x_BLD]
    np.testing.assert_allclose(y_BLD, np.stack([y for y, _ in want]), atol=2e-5)
    for name, got in stats.items():
        np.testing.assert_allclose(got, sum(sums[name] for _, sums in want), rtol=1e-5)
    assert (stats["dropped"] > 0) == (capacity_factor > 0)

    # The gradient, along a random direction of each input: that of the loop by differences.
    weight_BLD = rng.normal(size=x_BLD.shape)

    def objective(x_BLD, **w):
        y_BLD = [plain_moe(x_LD, w, cfg.model, capacity_factor)[0] for x_LD in x_BLD]
        return (y_BLD * weight_BLD).sum()

    def ours(inputs):
        return (moe(inputs["x_BLD"], {name: inputs[name] for name in w})[0] * weight_BLD).sum()

    inputs = w | dict(x_BLD=x_BLD)
    for name, got in jax.device_get(jax.grad(ours)(to32(inputs))).items():
        way = rng.normal(size=got.shape)
        ahead, back = (objective(**inputs | {name: inputs[name] + s * way}) for s in (1e-6, -1e-6))
        assert (got * way).sum() == pytest.approx((ahead - back) / 2e-6, rel=1e-3, abs=1e-2)


def test_balance_is_one_when_even_and_the_number_of_experts_over_active_at_worst():
    """And entropy is that of the scores."""
    on_mesh(PLAIN)
    eye_BLE = jnp.eye(4)[None]

    def sums(score_BLE, expert_BLX):
        @jax.shard_map(in_specs=(P("dp", "tp"), P("dp", "tp")), out_specs=P())
        def total(score_BLE, expert_BLX):
            return lax.psum(experts.routing_stats(score_BLE, expert_BLX), ("dp", "tp"))

        return jax.device_get(total(score_BLE, expert_BLX))

    even = sums(jnp.ones((1, 4, 4)), jnp.arange(4)[None, :, None])
    np.testing.assert_allclose([even["balance"], even["entropy"] / 4], [1, np.log(4)], rtol=1e-5)
    worst = sums(jnp.tile(eye_BLE[:, :1], (1, 4, 1)), jnp.zeros((1, 4, 1), int))
    np.testing.assert_allclose([worst["balance"], worst["entropy"]], [4, 0], atol=1e-5)
    np.testing.assert_array_equal(worst["load_E"], [4, 0, 0, 0])


def test_evaluation_drops_no_token():
    losses = []
    for factor in (0.0, 0.5):
        cfg = on_mesh(MIXED, train=dict(capacity_factor=factor))
        losses.append(float(train.eval_step(params_of(cfg), *batch(cfg), cfg)[0]))
    assert losses[0] == losses[1]


def test_a_document_packed_behind_another_is_as_if_alone():
    """Local and full layers, learned positions and RoPE: whatever comes before its first token."""
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
        open_cfg = replace(cfg, data=replace(cfg.data, document_mask=False))
        assert np.abs(nll(open_cfg, packed, targets)[:, 6:15] - alone[:, :9]).max() > 0.01


def test_router_biases_move_against_the_load():
    cfg = on_mesh(MOE, (2, 2, 2))
    state = train.init_state(cfg)
    before = np.asarray(state.params["layers"]["moe"]["router_bias_E"])
    state, metrics = train.train_step(state, *batch(cfg), cfg)
    load = np.asarray(metrics["moe"]["load"])
    assert load.shape == (8, 8) and (load.sum(-1) == 2 * 64 * 16).all()
    after = np.asarray(state.params["layers"]["moe"]["router_bias_E"])
    np.testing.assert_array_equal(
        np.sign(after - before), np.sign(load.mean(-1, keepdims=True) - load)
    )
    np.testing.assert_allclose(np.abs(after - before)[load != 256], 0.001, rtol=1e-5)


def test_statistics_are_per_token_sequence_and_pair_in_the_layers_order():
    B, n = 64, 64 * 16

    def sums(*layers):
        """Of layers whose shares are that number."""
        x = np.array(layers)
        load = np.tile(x[:, None], 4)
        return dict(load_E=load, entropy=n * x, balance=B * x, dropped=2 * n * x)

    stats = dict(prefix=dict(moe=sums(0.5)), layers=dict(moe_local=sums(0.25, 0.125)))
    got = experts.moe_metrics(stats, MIXED)
    assert config.moe_layers(MIXED.model) == [0, 4, 8]
    for name in ("entropy", "balance", "dropped"):
        np.testing.assert_allclose(got[name], [0.5, 0.25, 0.125])
    np.testing.assert_allclose(got["load"][:, 0], [0.5, 0.25, 0.125])


@pytest.mark.parametrize("name", attention.ATTENTION)
def test_every_attention_of_the_table_is_the_same_on_a_mesh_and_from_its_cache(name):
    m = MOE.model
    latent = dict(q_rank=m.q_rank, kv_rank=m.kv_rank, d_rope=m.d_rope, d_value=m.d_value)
    fields = dict(attention=name, n_layers=2) | (latent if name == "mla" else {})
    check_attention(replace(PLAIN, model=replace(PLAIN.model, **fields)))


def check_attention(cfg):
    assert_same_gradient(gradient(cfg, (2, 2, 2)), one_device_gradient(cfg))
    check_cached_logits(cfg, (2, 2, 2))


def test_a_new_attention_is_a_function_and_a_line(monkeypatch):
    """README's example: as it stands there it trains alike on any mesh, and its cache agrees."""
    readme = (ROOT / "README.md").read_text()
    function, line = re.search(
        r"```python\n(def gated.*?)\n\n    gated=(.*?),  *#", readme, re.S
    ).groups()
    names = dict(vars(model))
    exec(function, names)
    monkeypatch.setitem(attention.ATTENTION, "gated", eval(line, names))
    cfg = replace(PLAIN, model=replace(PLAIN.model, attention="gated", n_layers=2))
    assert "gate_D" in model.param_table(cfg)["layers"]["dense"]
    check_attention(cfg)


def test_an_attention_that_the_table_does_not_have_is_refused():
    cfg = replace(PLAIN, model=replace(PLAIN.model, attention="ring"))
    with pytest.raises(config.UserError, match="'ring' is no attention.*\n.*gqa or mla"):
        model.param_table(cfg)


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
        p = {name: weight[n] for name, weight in w["layers"]["dense"].items()}
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


# All experts of every token, since rounding would have some tokens go to others.
ALL_EXPERTS = replace(MOE, model=replace(MOE.model, n_active=8, n_groups=1, n_active_groups=1))
CAPACITY = replace(ALL_EXPERTS, train=replace(MOE.train, capacity_factor=1.0))


@pytest.mark.parametrize("cfg, mesh", [
    (PLAIN, (2, 2, 2)), (GPT2, (1, 1, 1)), (ALL_EXPERTS, (1, 1, 1)), (CAPACITY, (1, 1, 1)),
], ids=["plain", "gpt2", "experts", "capacity"])  # fmt: skip
def test_bfloat16_rounds_and_no_more(cfg, mesh):
    loss, grads, _ = gradient(cfg, mesh, dtype="bfloat16")
    loss32, grads32, _ = one_device_gradient(cfg)
    assert 1e-7 < abs(loss - loss32) < 0.02
    assert max(jax.tree.leaves(errors(grads, grads32))) < 0.1
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(grads))


def test_z_loss_adds_the_mean_square_of_the_log_partition():
    """Its gradient along the last norm's gain is the difference quotient of a plain decoder."""
    few = dict(batch_size=4, microbatches=1)
    weight, grads = 0.5, {}
    for z_loss in (0.0, weight):
        _, grads[z_loss], _ = gradient(PLAIN, (1, 1, 1), z_loss=z_loss, **few)
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
    """On any mesh, for prompts of different lengths, and for a row that has filled its window and
    goes on from its last half."""
    cfg = utils.start_mesh(replace(PLAIN, mesh=config.Mesh(*mesh)), rows=3)
    params, L = params_of(cfg), cfg.train.seq_len
    prompts = [[5, 6, 7], [1], list(range(12))]
    *_, rows = generate.generate(params, prompts, 8, cfg, vocab_size=512, temperature=0)
    assert [row[: len(p)] for row, p in zip(rows, prompts, strict=True)] == prompts
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    half = L + 1 - L // 2
    for row, begin, n in [(0, 0, 3), (0, 0, 9), (1, 0, 4), (2, 0, L), (2, half, L + 3)]:
        window = np.array(rows[row][begin:n])
        assert rows[row][n] == plain_logits(w, window, cfg)[-1].argmax()


def put_rows(x, dp_pp):
    """[row, ...] as the microbatches of decoding."""
    pp, _ = dp_pp
    return jax.device_put(x.reshape(pp, -1, *x.shape[1:]), utils.shardings(P("pp", "dp")))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("cfg", [MOE_ALLTOALL, GPT2, MIXED], ids=["mla+moe", "gpt2", "mixed"])
def test_cached_logits_are_those_of_the_whole_row(cfg, mesh):
    check_cached_logits(cfg, mesh)


@pytest.mark.parametrize("cfg", [PLAIN, ALL_EXPERTS], ids=["plain", "mla+moe"])
def test_cached_logits_are_those_of_the_whole_row_in_bfloat16(cfg):
    cfg = replace(cfg, train=replace(cfg.train, dtype="bfloat16"))
    check_cached_logits(cfg, (1, 1, 1), tolerance=0.1)


def check_cached_logits(cfg, mesh, tolerance=2e-5):
    """Rows of different lengths through prefill and steps give the losses that evaluation, which
    caches nothing, gives."""
    cfg = on_mesh(cfg, mesh, train=dict(grad_accum=1))
    params, (tokens, targets) = params_of(cfg), batch(cfg)
    dp_pp, L = (mesh[1], mesh[0]), cfg.train.seq_len
    nll = np.asarray(train.eval_step(params, tokens, targets, cfg)[2]).reshape(-1, L)
    tokens, targets = (np.asarray(x).reshape(-1, L) for x in (tokens, targets))
    memory, n_new, n_rows = None, 8, 16
    length = np.random.default_rng(1).integers(3, 9, size=n_rows).astype(np.int32)
    for _ in range(5):
        rows = np.where(np.arange(L) < length[:, None], tokens[:n_rows], 0)
        logit, memory = generate.next_logits(
            params, memory, put_rows(rows, dp_pp), put_rows(length, dp_pp), n_new, cfg
        )
        logit, at = np.asarray(logit).reshape(n_rows, -1), (np.arange(n_rows), length - 1)
        z = np.log(np.exp(logit).sum(-1))
        counted = targets[:n_rows][at] >= 0
        got = z - logit[np.arange(n_rows), targets[:n_rows][at]]
        np.testing.assert_allclose(got[counted], nll[:n_rows][at][counted], atol=tolerance)
        length, n_new = length + 1, 1


def test_sampling_options():
    logit_V = np.log(np.array([0.5, 0.3, 0.15, 0.05]))

    def draw(**options):
        """How often each of the four was chosen."""
        options = dict(temperature=1, top_k=0, top_p=1.0) | options
        chosen = [
            generate.choose_token(logit_V, np.random.default_rng(n), **options) for n in range(2000)
        ]
        return np.bincount(chosen, minlength=4) / 2000

    np.testing.assert_allclose(draw(), [0.5, 0.3, 0.15, 0.05], atol=0.04)
    np.testing.assert_allclose(draw(top_k=2), [0.625, 0.375, 0, 0], atol=0.04)
    np.testing.assert_allclose(draw(top_p=0.79), [0.625, 0.375, 0, 0], atol=0.04)
    assert draw(temperature=0)[0] == 1 and draw(top_p=0.5)[0] == 1
    assert draw(temperature=0.5)[0] > 0.6 and draw(temperature=2.0)[3] > 0.08


def test_ids_that_only_pad_the_vocabulary_are_never_drawn():
    cfg = utils.start_mesh(PLAIN, rows=2)
    options = dict(vocab_size=40, temperature=5.0)
    *_, rows = generate.generate(params_of(cfg), [[5], [6]], 12, cfg, **options)
    assert max(max(row) for row in rows) < 40
    *_, alone = generate.generate(params_of(cfg), [[5]], 12, cfg, **options)
    assert alone[0] == rows[0]
    assert rows[1][1:] != rows[0][1:]  # each row has its own random numbers


def test_a_row_stops_at_the_end_of_its_document():
    cfg = utils.start_mesh(PLAIN, rows=1)
    params = params_of(cfg)
    greedy = dict(vocab_size=512, temperature=0)
    *_, rows = generate.generate(params, [[5]], 6, cfg, **greedy)
    *_, stopped = generate.generate(params, [[5]], 6, cfg, **greedy, stop_id=rows[0][3])
    assert stopped[0] == rows[0][: rows[0].index(rows[0][3])]


PUBLISHED = {  # total and active, as counted from the models that transformers 5.23 builds
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1.5b": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_0.6b": 596_049_920,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v3": 671_026_419_200,
}


def test_parameters_are_counted_as_published():
    for name, n in PUBLISHED.items():
        assert model.param_count(config.PRESETS[name]()) == n, name
    for name, n in {"qwen3_30b_a3b": 3.3e9, "deepseek_v3": 37e9, "llama3_8b": 8.03e9}.items():
        assert model.param_count(config.PRESETS[name](), active=True) == pytest.approx(n, rel=0.02)
    params = params_of(on_mesh(PLAIN))
    assert model.param_count(PLAIN) == sum(x.size for x in jax.tree.leaves(params))


def test_flops_are_counted_by_the_matmul():
    """Of a moe layer the experts of one token, of a local layer the keys in its window."""
    cfg = config.llama3_8b()
    weights = model.param_count(cfg) - 128256 * 4096 - (2 * 32 + 1) * 4096
    assert model.flops_per_token(cfg) == 6 * weights + 6 * 32 * 32 * 128 * 8193
    L = 16
    layer = 2 * 32 * 4 * (16 + 8)
    experts = 32 * 4 + 2 * 2 * 32 * 16
    matmul = 6 * (layer + 2 * 32 * 64) + 3 * (layer + experts) + 512 * 32
    keys = 8 * (5 - 10 / L) + (L + 1) / 2
    assert model.flops_per_token(MIXED) == 6 * (matmul + 16 * 2 * 4 * keys)


def test_a_replicated_norm_is_one_value_on_every_device():
    """What check_vma guards: replicas cannot drift apart."""
    cfg = on_mesh(PLAIN, (2, 2, 2))
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    _, grads, _ = f(params_of(cfg), *batch(cfg), jax.random.key(0), cfg)
    copies = [np.asarray(s.data) for s in grads["norm_D"].addressable_shards]
    assert len(copies) == 8
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])


def test_a_frequent_tokens_gradient_survives_bfloat16():
    grads, table = jnp.ones((4, 8)), jnp.zeros((4, 8), jnp.bfloat16)
    rows = jnp.zeros((1, 4096), int)
    (_, found), back = jax.vjp(lambda *args: model.lookup(*args, rows), grads, table)
    of_grads, _ = back((grads, jnp.ones_like(found)))
    assert (of_grads[0] == 4097).all() and (of_grads[1:] == 1).all()


def test_tiles_hold_any_routing():
    for U, E in [(1, 8), (7, 2), (64, 8), (4096, 16), (65536, 16), (524288, 128)]:
        Y, Z = experts.tile_shape(U, E)
        # At worst k experts have one row in a tile of their own, and one has the rest.
        assert max(k + (U - k) // Z for k in range(1, min(E, U) + 1)) <= Y
        assert U < 64 * E or (Y * Z - U) / (Y * Z) <= 0.2
