"""Muon: its updates are orthogonal, the same on every mesh, and take one moment."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import ALL_EXPERTS, PLAIN, RICH, batch
from conftest import AXES_AND_ALL, on_mesh
from runs import final_weights, losses, new_run, refusal

import cli
import config
import model
import muon
import optim
import runstate
import train
import utils
from errors import CHECKPOINT, USAGE, UserError

matrix_update = jax.jit(muon.matrix_update, static_argnums=1)  # compiled once for each shape
SHAPES = [(64, 64), (64, 256), (300, 20), (7, 513), (1, 5), (512, 512)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_singular_values_end_near_one(shape, scale):
    """Those of at least a hundredth of the largest, and the singular vectors stay."""
    rng, n = np.random.default_rng(0), min(shape)
    u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = scale * np.geomspace(1, 0.01, n)
    x = ((u * values) @ v).astype(np.float32)
    got = np.asarray(matrix_update(x, "float32")) / (muon.RMS * np.sqrt(max(shape)))
    inner = u.T @ got @ v.T
    np.testing.assert_allclose(inner - np.diag(np.diag(inner)), 0, atol=2e-3)
    assert np.diag(inner).min() > 0.85 and np.diag(inner).max() < 1.15


def test_singular_values_that_are_alike_end_near_one():
    """256 of them, in the type of a large run: then the norm is 16 times the largest."""
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(4096, 256)))
    x = np.asarray(matrix_update(q.T.astype(np.float32), "bfloat16")) / (muon.RMS * 64)
    values = np.linalg.svd(x, compute_uv=False)
    assert values.min() > 0.85 and values.max() < 1.15


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [
    (1, 5), (7, 513), (16, 64), (64, 64), pytest.param((256, 1024), marks=pytest.mark.slow),
])  # fmt: skip
def test_the_update_of_a_matrix_of_rank_one_is_bounded(shape, dtype):
    """Its norm is its only singular value, and rounding may take that above one."""
    rng = np.random.default_rng(0)
    for n in range(30 if max(shape) < 1000 else 3):
        u, v = rng.normal(size=shape[0]), rng.normal(size=shape[1])
        u, v = [(u, v), (np.sign(u), np.sign(v)), (u * (u == u.max()), v)][n % 3]
        x = np.outer(u, v).astype(np.float32)
        got = np.asarray(matrix_update(x, dtype)) / (muon.RMS * np.sqrt(max(shape)))
        assert np.linalg.norm(got, 2) == pytest.approx(1, abs=0.3)


def test_a_matrix_of_zeros_stays():
    assert not np.asarray(matrix_update(np.zeros((4, 8), np.float32), "float32")).any()


def muon_config(cfg, mesh, **more):
    return on_mesh(cfg, mesh, optim=dict(name="muon", warmup_steps=2) | more)


def matrices(x, p):
    """A weight as matrices [N, rows, columns]."""
    rows, columns = ([p.is_stacked + dim for dim in dims] for dims in (p.rows, p.columns))
    others = [dim for dim in range(x.ndim) if dim not in rows + columns]
    n_rows = int(np.prod([x.shape[dim] for dim in rows]))
    n_columns = int(np.prod([x.shape[dim] for dim in columns]))
    return np.transpose(x, others + rows + columns).reshape(-1, n_rows, n_columns)


def momenta(state) -> dict:
    """{name of a weight: Muon's momentum}."""
    found = utils.leaf_table(state.opt)
    return {name.split("trace/")[1]: x for name, x in found.items() if "trace/" in name}


@pytest.mark.parametrize("case", [
    pytest.param(PLAIN, id="plain"),
    pytest.param(ALL_EXPERTS, id="moe", marks=pytest.mark.slow),
])  # fmt: skip
def test_updates_of_a_model_are_orthogonal(case):
    """Of each layer and expert, and of the heads together; what has no rows is AdamW's."""
    cfg = muon_config(case, (2, 2, 2), weight_decay=0.0)
    state, table = runstate.init_state(cfg), utils.leaf_table(model.param_table(cfg))
    moments = utils.leaf_table(optim.optimizer(cfg).init(state.params))
    n_hidden = sum(bool(p.rows) for p in table.values())
    assert sum(x.ndim > 0 for x in moments.values()) == 2 * len(table) - n_hidden
    for step in range(3):
        before = jax.device_get((utils.leaf_table(state.params), momenta(state)))
        state, metrics = train.train_step(state, *batch(cfg, seed=step), cfg)
        after = jax.device_get((utils.leaf_table(state.params), momenta(state)))
        for name, p in table.items():
            if not p.rows:
                continue
            old, new = before[1][name], after[1][name]
            nesterov = new - cfg.optim.muon_momentum * old + cfg.optim.muon_momentum * new
            change = (after[0][name] - before[0][name]) / -float(metrics["lr"])
            for x, y in zip(matrices(change, p), matrices(nesterov, p), strict=True):
                u, values, vt = np.linalg.svd(y, full_matrices=False)
                got = np.diag(u.T @ x @ vt.T) / (muon.RMS * np.sqrt(max(x.shape)))
                large = values >= 0.01 * values[0]
                assert got[large].min() >= 0.6 and got.max() <= 1.3, name
    assert {name.rsplit("/")[-1] for name, p in table.items() if not p.rows and p.is_matrix} == {
        "embed_VD", "unembed_DV"
    }  # fmt: skip


def trained(cfg, mesh) -> dict:
    # Few rows: with 64 of them and two slices an update takes four times as long.
    cfg = replace(cfg, train=replace(cfg.train, batch_size=16, grad_accum=1))
    # With eps 1e-8, AdamW's updates of the rare tokens of embed_VD follow the signs of rounding.
    cfg = muon_config(cfg, mesh, lr=1e-3, eps=1e-5)
    state = runstate.init_state(cfg)
    for step in range(20):
        state, _ = train.train_step(state, *batch(cfg, seed=step), cfg)
    return jax.device_get(utils.leaf_table(state.params))


ON_ONE = {}
TO_EXPERTS = replace(ALL_EXPERTS, mesh=config.Mesh(experts="alltoall"))


@pytest.mark.parametrize("case, mesh", [
    (RICH, (2, 2, 2)),
    *(pytest.param(RICH, mesh, marks=pytest.mark.slow) for mesh in AXES_AND_ALL[:3]),
    pytest.param(TO_EXPERTS, (2, 2, 2), marks=pytest.mark.slow),
    pytest.param(ALL_EXPERTS, (8, 1, 1), marks=pytest.mark.slow),
])  # fmt: skip
def test_twenty_updates_are_equal_on_any_mesh(case, mesh):
    key = case.model
    ON_ONE[key] = ON_ONE.get(key) or trained(case, (1, 1, 1))
    for name, x in trained(case, mesh).items():
        want = ON_ONE[key][name]
        assert np.abs(x - want).max() <= 1e-5 * np.abs(want).max(), name


@pytest.mark.slow
def test_a_run_goes_back_and_on_to_the_same_bits(base):
    few = dict(train=dict(steps=8, eval_every=0, eval_batches=1))
    cfg, run = new_run(base, "muon", optim=dict(name="muon"), checkpoint=dict(every=4), **few)
    train.main(on_mesh(cfg, (2, 2, 2)))
    want, weights = losses(run), final_weights(run)
    train.main(on_mesh(replace(cfg, rollback=4), (2, 2, 2)))
    assert len(want) == 8 and losses(run) == want
    for name, x in final_weights(run).items():
        np.testing.assert_array_equal(x, weights[name])
    other = replace(cfg.run, accept=("optim.name",))
    error = refusal(on_mesh(replace(cfg, run=other), optim=dict(name="lion")))
    assert error.code == CHECKPOINT and "is of another run: " in str(error)
    assert "arrays are of another optimizer's state (optim.name)\n" in str(error)


@pytest.mark.parametrize("flags, word", [
    (["--optim.muon_momentum", 0.9], "optim.muon_momentum=0.9 has no effect: optim.name=adamw"),
    (["--optim.name", "lion", "--optim.eps", 1e-6], "optim.eps=1e-06 has no effect"),
])  # fmt: skip
def test_settings_of_another_optimizer_are_refused(flags, word):
    with pytest.raises(UserError, match=word) as error:
        cli.parse(["--config", "tiny", *map(str, flags)])
    assert error.value.code == USAGE


def test_a_preset_whose_settings_another_optimizer_has_not_says_how_to_go_on():
    words = ["--config", "shakespeare_char", "--optim.name", "adamw"]
    with pytest.raises(UserError, match="set it to 0.95 if a preset or file has set it"):
        cli.parse(words)
    assert cli.parse([*words, "--optim.muon_momentum", "0.95"]).optim.name == "adamw"
