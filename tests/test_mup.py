"""muP: the same model as without at the base, and the scales that the papers give elsewhere."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import GPT2, PLAIN, RICH, assert_same_gradient, batch, gradient_on, one_device_gradient
from conftest import on_mesh, run

import attention
import optim
import runstate
import train
import utils
from errors import DATA, USAGE, UserError
from scripts import hf_config, mup_check

BASE = dict(mup_base_width=32, mup_base_depth=8, mup_base_head=4)  # the sizes of PLAIN


def train_two(cfg):
    """The state after two updates, as numpy arrays."""
    state = runstate.init_state(cfg)
    for seed in range(2):
        state, _ = train.train_step(state, *batch(cfg, seed=seed), cfg)
    return jax.device_get(state)


@pytest.mark.parametrize("cfg, name", [
    (PLAIN, "adamw"), pytest.param(GPT2, "muon", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_base_is_the_standard_parametrization_bit_for_bit(cfg, name):
    states = []
    for fields in ({}, BASE):
        states.append(train_two(on_mesh(cfg, model=fields, optim=dict(name=name))))
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
def test_a_wider_and_deeper_model_has_the_scales_of_the_papers():
    """Width 4 times, depth 8 times, heads 4 times the base."""
    fields = dict(mup_base_width=8, mup_base_depth=1, mup_base_head=1)
    plain, scaled = (on_mesh(PLAIN, model=model) for model in ({}, fields))
    # CompleteP, table 1: first values of the head as at the base; those of hidden matrices as
    # their fan-in says, and without regard to the depth
    a, b = (utils.leaf_table(runstate.init_state(cfg).params) for cfg in (plain, scaled))
    for name, x in a.items():
        factor = {"unembed_DV": 2.0}.get(name, 8**0.5 if name.endswith(("HKD", "out_FD")) else 1)
        np.testing.assert_allclose(b[name], factor * x, rtol=1e-6, err_msg=name)
    assert attention.softmax_scale(scaled.model) == 1 / 4
    # rates: hidden matrices 1/4, all others as at the base; the decay with the rate everywhere
    params = runstate.init_state(plain).params
    directions = []
    for decay in (0.0, 0.5):
        updates = []
        for cfg in (plain, scaled):
            cfg = replace(cfg, optim=replace(cfg.optim, warmup_steps=0, weight_decay=decay))
            transform = optim.optimizer(cfg)
            grads = jax.tree.map(np.ones_like, params)
            update, _ = transform.update(grads, transform.init(params), params)
            updates.append(utils.leaf_table(update))
        directions.append(updates)
    for name in a:
        (x, y), (x_decayed, y_decayed) = ((pair[0][name], pair[1][name]) for pair in directions)
        is_hidden = name.startswith("layers") and "norm" not in name
        np.testing.assert_allclose(y, x / (4 if is_hidden else 1), rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(y_decayed - y, x_decayed - x, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_muon_has_a_power_of_its_own():
    """The singular values of its updates grow as the root of the width."""
    fields = dict(mup_base_width=8, mup_base_depth=1, mup_base_head=1)
    plain, scaled = (on_mesh(PLAIN, model=model) for model in ({}, fields))
    params, updates = runstate.init_state(plain).params, []
    for cfg in (plain, scaled):
        cfg = replace(cfg, optim=replace(cfg.optim, name="muon", weight_decay=0.0))
        transform, grads = optim.optimizer(cfg), jax.tree.map(np.ones_like, params)
        update, _ = transform.update(grads, transform.init(params), params)
        updates.append(utils.leaf_table(update))
    for name, x in updates[0].items():
        factor = 1 / 2 if name.startswith("layers") and "norm" not in name else 1
        np.testing.assert_allclose(updates[1][name], factor * x, rtol=1e-6, err_msg=name)


def test_logits_and_residual_are_scaled():
    """A base of half the width and depth halves the logits and what each layer adds."""
    half = dict(mup_base_width=16, mup_base_depth=4)
    plain, scaled = (on_mesh(PLAIN, model=model) for model in ({}, half))
    params = runstate.init_state(plain).params

    def losses(params, cfg):
        return np.asarray(train.eval_step(params, *batch(cfg), cfg)[2])

    # The same by hand: half of the projections to the residual stream, and half of the head.
    def halve(path, x):
        name = path[-1].key
        return x / 2 if name in ("o_HKD", "out_FD", "unembed_DV") else x

    by_hand = jax.tree_util.tree_map_with_path(halve, params)
    np.testing.assert_allclose(losses(params, scaled), losses(by_hand, plain), rtol=1e-5)
    assert np.abs(losses(params, scaled) - losses(params, plain)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [RICH, GPT2], ids=["rich", "gpt2"])
def test_the_gradient_is_the_same_on_a_mesh(cfg):
    cfg = replace(cfg, model=replace(cfg.model, mup_base_width=8, mup_base_depth=2))
    assert_same_gradient(gradient_on((2, 2, 2), cfg), one_device_gradient(cfg))


@pytest.mark.slow
def test_the_script_prints_slopes_and_best_rates_and_draws_them(corpus, tmp_path):
    few = ["--coordinate_widths", 16, 32, "--widths", 16, 32, "--rates", 1e30, 0.01]
    few += ["--steps", 3, "--depth", 1, "--vocab_size", 300, "--out", tmp_path / "mup.v1"]
    done = run("scripts/mup_check.py", "--data", corpus / "train", *few)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout.splitlines()[0])
    assert table.keys() == {"standard", "muP"}
    for found in table.values():
        places = {"embedding", "after layer 1", "logits"}
        assert found["slopes"].keys() == found["sizes"].keys() == places
        assert {losses[0] for losses in found["losses"].values()} == {None}  # 1e30 diverges
        assert set(found["best_rates"].values()) == {0.01}
        assert np.isfinite([*found["slopes"].values()]).all()
    assert table["standard"]["losses"]["16"] == table["muP"]["losses"]["16"]  # the base
    assert (tmp_path / "mup.v1").read_bytes().startswith(b"\x89PNG")  # as compare.py's


@pytest.mark.parametrize("flags", [
    ["--coordinate_widths", 64], ["--widths", 64, 8], ["--widths", 64, 40],
    ["--rates"], ["--seeds"], ["--seeds", 2**32], ["--coordinate_rate", "nan"], ["--depth", 0],
])  # fmt: skip
def test_the_script_names_an_argument_that_it_cannot_use(flags):
    done = run("scripts/mup_check.py", *flags)
    assert done.returncode == USAGE and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error: {flags[0][2:]}=") and "\n  fix: set " in done.stderr


def test_no_rate_is_the_best_where_all_diverge():
    assert np.isnan(mup_check.best_rate([1.0, 2.0], [np.inf, np.inf]))
    assert mup_check.best_rate([1.0, 2.0, 4.0], [np.inf, 3.0, 5.0]) == 2.0


def test_a_ladder_predicts_its_largest_run(tmp_path):
    """From runs on a power law, the same power law."""
    folders = []
    for d in (16, 32, 64, 128):
        folders.append(tmp_path / str(d))
        folders[-1].mkdir()
        sizes = dict(d_model=d, n_layers=4, d_head=8, n_heads=d // 8, n_kv_heads=d // 8, d_ff=3 * d)
        (folders[-1] / "config.json").write_text(
            json.dumps(dict(model=sizes, data=dict(val="a=x,b=y")))
        )
        n = 4 * d * (4 * d + 9 * d)
        update = dict(kind="train", step=1, loss=9, grad_norm=1, tokens=1)
        update |= dict(step_time=1, tokens_per_sec=1)
        score = dict(kind="eval", step=1, loss=8 * n**-0.125, tokens=1, bits_per_byte=1)
        score["set"] = "a"  # the set that counts is the first
        other = dict(score, set="b", loss=9.0)
        before = dict(other, set="", loss=7.0)  # data.val was another then
        lines = "".join(json.dumps(row) + "\n" for row in (update, before, score, other))
        (folders[-1] / "metrics.jsonl").write_text(lines)
    command = "scripts/recipes/ladder.py", "--out", tmp_path / "ladder.png", "--runs"
    done = run(*command, *folders)
    assert done.returncode == 0, done.stderr
    assert "8.000 * N^-0.125" in done.stdout and "+0.00%" in done.stdout.replace("-0.00%", "+0.00%")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    for wrong in (folders[:2], [*folders, tmp_path / "typo"]):
        done = run(*command, *wrong)
        assert done.returncode == USAGE and "Traceback" not in done.stderr
    with (folders[1] / "metrics.jsonl").open("a") as rows:
        rows.write(json.dumps(dict(score, step=2, loss=None)) + "\n")
    done = run(*command, *folders)
    assert done.returncode == DATA and "not finite" in done.stderr


def test_a_scaled_model_is_not_exported_as_another():
    cfg = replace(PLAIN, model=replace(PLAIN.model, mup_base_width=8))
    with pytest.raises(UserError) as error:
        hf_config.write_config(cfg, "float32", None)
    assert error.value.code == DATA and "model.mup_base_width is 8" in str(error.value)
