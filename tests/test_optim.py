"""Optimizers and learning rate schedules: each is an entry of a table, and an update is the same on
every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import GPT2, MOE, PLAIN, batch
from conftest import on_mesh
from runs import new_run, refusal

import checks
import cli
import model
import optim
import runstate
import train
import utils
from errors import USAGE, UserError

# ---- learning rate schedules


@pytest.mark.parametrize("schedule", optim.SCHEDULES)
def test_learning_rate(schedule):
    steps = ["--train.steps", "100", "--optim.warmup_steps", "10"]
    rates = ["--optim.lr", "1", "--optim.min_lr_ratio", "0.1"]
    cfg = cli.parse(["--config", "tiny", "--optim.schedule", schedule, *steps, *rates])
    rate = np.array([float(optim.learning_rate(n, cfg)) for n in range(100)])
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert (np.diff(rate[10:]) <= 1e-7).all()
    left = np.linspace(1, 0, 91)[1:]  # the share of the updates after the warmup that is to come
    last = np.arange(19, -1, -1) / 20
    want = dict(
        cosine=0.5 - 0.5 * np.cos(np.pi * left),
        linear=left,
        constant=np.ones(90),
        wsd=np.append(np.ones(70), last),
        wsd_sqrt=np.append(np.ones(70), 1 - np.sqrt(1 - last)),
    )
    np.testing.assert_allclose(rate[10:], 0.1 + 0.9 * want[schedule], rtol=1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_run_shorter_than_its_warmup_keeps_to_the_warmup(schedule):
    """No flag is needed to try a preset for a few updates; the decay still ends at the minimum."""
    cfg = cli.parse(["--config", "tiny", "--optim.schedule", schedule, "--train.steps", "3"])
    rate = [float(optim.learning_rate(n, cfg)) for n in range(3)]
    last = 3 / 5 if schedule == "cosine" else cfg.optim.min_lr_ratio
    np.testing.assert_allclose(rate, cfg.optim.lr * np.array([1 / 5, 2 / 5, last]), rtol=1e-6)


def test_a_new_schedule_is_one_entry_of_the_table(monkeypatch):
    """It sets the rate of the updates and of the metrics, with the warmup and the minimum."""

    def half_way(n, cfg):
        return jnp.where(n < cfg.train.steps // 2, 1.0, 0.0)

    monkeypatch.setitem(optim.SCHEDULES, "half_way", half_way)
    fields = dict(schedule="half_way", lr=0.5, warmup_steps=2, min_lr_ratio=0.1)
    cfg = on_mesh(PLAIN, train=dict(steps=6), optim=fields)
    want = [0.25, 0.5, 0.5, 0.05, 0.05, 0.05]
    np.testing.assert_allclose([optim.learning_rate(n, cfg) for n in range(6)], want, rtol=1e-6)

    state = runstate.init_state(cfg)
    opt = optim.scale_by_rate(cfg).init(state.params)
    for n in range(4):
        ones = jax.tree.map(jnp.ones_like, state.params)
        update, opt = optim.scale_by_rate(cfg).update(ones, opt)
        state, metrics = train.train_step(state, *batch(cfg), cfg)
        rates = -update["norm_D"][0], metrics["lr"]
        np.testing.assert_allclose(rates, [want[n]] * 2, rtol=1e-6)


# ---- optimizers


def sgd(cfg):
    """No moment, and no weight decay."""
    return optax.chain(optim.clip(cfg), optim.scale_by_rate(cfg))


def adafactor(cfg):
    """Shazeer and Stern 2018: for each weight the second moments of its rows and columns, or of its
    elements; of the three one is there and the others are empty."""
    scale = optax.scale_by_factored_rms(min_dim_size_to_factor=16)
    return optax.chain(optim.clip(cfg), scale, optim.scale_by_rate(cfg))


@pytest.mark.parametrize("new, n_moments", [
    pytest.param(adafactor, 3, marks=pytest.mark.slow),
    pytest.param(optim.lion, 1, marks=pytest.mark.slow),
    (sgd, 0),
])  # fmt: skip
def test_a_new_optimizer_is_one_entry_of_the_table(new, n_moments, monkeypatch):
    """It trains alike on any mesh, and an update that is skipped changes neither its state nor the
    learning rate."""
    monkeypatch.setitem(optim.OPTIMIZERS, new.__name__, new)
    losses, rates = {}, {}
    for mesh in [(1, 1, 1), (2, 2, 2)]:
        cfg = on_mesh(PLAIN, mesh, model=dict(n_layers=2), optim=dict(name=new.__name__))
        state, losses[mesh], rates[mesh] = runstate.init_state(cfg), [], []
        n_weights = len(jax.tree.leaves(state.params))
        assert sum(x.ndim > 0 for x in jax.tree.leaves(state.opt)) == n_moments * n_weights
        for step in range(6):
            good = state.params
            if step == 3:  # a weight is not finite, so neither is the loss
                bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), good)
                state = state._replace(params=bad)
            before = jax.device_get((state.params, state.opt))
            state, metrics = train.train_step(state, *batch(cfg, seed=step), cfg)
            losses[mesh].append(float(metrics["loss"]))
            rates[mesh].append(float(metrics["lr"]))
            if step == 3:
                after = jax.device_get((state.params, state.opt))
                jax.tree.map(np.testing.assert_array_equal, after, before)
                state = state._replace(params=good)
        assert int(state.step) == 6 and optim.count_updates(state.opt, 0) == 5
        shardings = utils.shardings(runstate.state_specs(cfg))
        for x, sharding in zip(*map(jax.tree.leaves, (state, shardings)), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
    np.testing.assert_allclose(losses[2, 2, 2], losses[1, 1, 1], rtol=1e-5)
    assert np.isnan(losses[1, 1, 1]).tolist() == [n == 3 for n in range(6)]
    want = [float(optim.learning_rate(n, cfg)) for n in (0, 1, 2, 3, 3, 4)]
    for found in rates.values():
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_every_optimizer_says_which_settings_it_does_not_use():
    assert checks.UNUSED_BY.keys() == optim.OPTIMIZERS.keys()


def test_moments_are_sharded_like_their_weights():
    cfg = on_mesh(PLAIN, (2, 2, 2), optim=dict(name="lion"))
    assert runstate.state_specs(cfg).opt[1].mu == model.param_specs(cfg)


@pytest.mark.parametrize("case", [GPT2, MOE], ids=["gpt2", "moe"])
def test_an_update_keeps_the_types_of_the_state(case):
    """Otherwise the second update would be compiled anew."""
    cfg = on_mesh(case, optim=dict(ema=0.9), train=dict(spike_sigma=6.0))
    before = jax.eval_shape(lambda: runstate.new_state(cfg))
    after, _ = jax.eval_shape(train.train_step, before, *train.step_shapes(cfg)[1:], cfg)
    types = [jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), s) for s in (before, after)]
    assert types[0] == types[1]


def test_updates_are_those_of_the_state_where_the_optimizer_does_not_count():
    assert optim.count_updates(optax.identity().init(dict(w=jnp.zeros(1))), 7) == 7


@pytest.mark.parametrize("field, table", [
    ("name", optim.OPTIMIZERS), ("schedule", optim.SCHEDULES),
])  # fmt: skip
def test_a_name_that_the_table_does_not_have_is_refused(field, table):
    cfg = on_mesh(PLAIN, optim={field: "nonesuch"})
    with pytest.raises(UserError) as error:
        train.train_step(runstate.init_state(cfg), *batch(cfg), cfg)
    what, fix = str(error.value).splitlines()
    assert error.value.code == USAGE
    assert f"optim.{field}='nonesuch' is not one of" in what
    for line in (what, fix):
        assert all(name in line for name in table)
    assert f"--optim.{field}" in fix


@pytest.mark.parametrize("section, field", [
    ("optim", "name"), ("optim", "schedule"), ("model", "attention"),
])  # fmt: skip
def test_a_wrong_name_is_reported_before_a_run_is_made(base, section, field):
    """With --fresh an old run would have been moved aside."""
    cfg, run = new_run(base, f"typo_{field}", **{section: {field: "nonesuch"}})
    assert refusal(cfg).code == USAGE and not run.exists()


def test_weight_decay_changes_matrices_only():
    cfg = on_mesh(PLAIN, optim=dict(weight_decay=0.5, warmup_steps=0))
    params = runstate.init_state(cfg).params
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optim.optimizer(cfg).update(zero, optim.optimizer(cfg).init(params), params)
    changed = {name for name, x in utils.leaf_table(updates).items() if np.abs(x).max() > 0}
    table = utils.leaf_table(model.param_table(cfg))
    assert changed == {name for name in table if "norm" not in name}
    want = -optim.learning_rate(0, cfg) * 0.5 * params["embed_VD"]
    np.testing.assert_allclose(updates["embed_VD"], want, rtol=1e-6)


def test_clipping_uses_the_norm_of_the_whole_gradient():
    got = []
    for mesh in [(1, 1, 1), (2, 2, 2)]:
        cfg = on_mesh(PLAIN, mesh, optim=dict(clip_norm=0.01, lr=0.02))
        state = runstate.init_state(cfg)
        rng, M = np.random.default_rng(0), cfg.train.microbatches
        pair = rng.integers(512, size=(2, 1, M, 64 // M, 16), dtype=np.int32)
        tokens, targets = (jax.device_put(x, utils.shardings(model.token_spec())) for x in pair)
        state, metrics = train.train_step(state, tokens, targets, cfg)
        assert metrics["grad_norm"] > 0.1  # ten times what is allowed
        mu = state.opt[1].mu
        got.append(float(jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(mu)))))
    np.testing.assert_allclose(got, [0.01 * (1 - cfg.optim.b1)] * 2, rtol=1e-4)
