"""The commands of recipes, averages of the weights, spikes that are skipped, and batches that
grow."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALL_EXPERTS, MIXED, PLAIN, batch
from conftest import ROOT, on_mesh
from conftest import run as run_script
from etils import epath
from runs import copy_run, final_weights, losses, new_run, open_log, refusal, rows

import attention
import branch
import checkpoint
import cli
import config
import norm_metrics
import optim
import panels
import runstate
import train
from architecture import layer_places
from errors import CHECKPOINT, USAGE, UserError
from scripts import average

# ---- scripts/recipes


@pytest.mark.parametrize("name", ["gpt2_124m", "ladder", "llama3_8b", "muon"])
def test_commands_of_the_recipes_pass_the_checks(name, tmp_path):
    python = tmp_path / "python"  # writes down its words, and runs nothing
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n')
    python.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = os.environ | dict(PATH=path, RUNS=str(tmp_path), BUCKET="gs://bucket", SWEEP="1")
    subprocess.run(["sh", ROOT / f"scripts/recipes/{name}.sh"], env=env, check=True)
    words = [line.split() for line in (tmp_path / "words").read_text().splitlines()]
    commands = [rest for script, *rest in words if script == "train.py"]
    assert commands and all(cli.parse(command) for command in commands)


# ---- averages of the weights


def test_the_average_of_the_weights_is_that_of_the_formula_on_any_mesh():
    found = {}
    for mesh in [(1, 1, 1), (2, 2, 2)]:
        cfg = on_mesh(PLAIN, mesh, model=dict(n_layers=2), optim=dict(ema=0.3))
        state = runstate.init_state(cfg)
        want = jax.device_get(state.params)
        for n in range(6):
            good = state.params
            if n == 3:  # the update is skipped
                state = state._replace(params=jax.tree.map(lambda x: x * jnp.nan, good))
            state, _ = train.train_step(state, *batch(cfg, seed=n), cfg)
            if n == 3:
                state = state._replace(params=good)
            else:
                decay = np.float32(min(0.3, (1 + n) / (10 + n)))
                new = jax.device_get(state.params)
                want = jax.tree.map(lambda a, b, d=decay: d * a + (1 - d) * b, want, new)
        found[mesh] = jax.device_get(state.ema)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[mesh], want
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found[1, 1, 1], found[2, 2, 2]
    )


@pytest.mark.slow
def test_scripts_take_the_average(base, tmp_path):
    cfg, run = new_run(base, "averaged", optim=dict(ema=0.9), train=dict(steps=10))
    state = train.main(cfg)
    tokenizer = run / "tokenizer.json"
    assert tokenizer.exists()
    found = {}
    for weights in ("last", "ema"):
        done = run_script("scripts/evaluate.py", "--run", run, "--weights", weights)
        assert done.returncode == 0, done.stderr
        found[weights] = json.loads(done.stdout)["loss"]
    assert abs(found["last"] - found["ema"]) > 1e-3
    done = run_script("scripts/sample.py", "--run", run, "--weights", "ema", "--tokens", 4)
    assert done.returncode == 0, done.stderr
    words = ["export", "--run", run, "--hf", tmp_path / "hf", "--weights", "ema"]
    done = run_script("scripts/convert_hf.py", *words)
    assert done.returncode == 0, done.stderr
    words = ["import", "--run", tmp_path / "back", "--hf", tmp_path / "hf"]
    done = run_script("scripts/convert_hf.py", *words)
    assert done.returncode == 0, done.stderr
    back, want = final_weights(tmp_path / "back"), jax.device_get(state.ema)["unembed_DV"]
    np.testing.assert_array_equal(back["unembed_DV"][:, :512], want[:, :512])


@pytest.mark.slow
def test_a_mean_of_checkpoints_is_a_run_like_any_other(reference, tmp_path):
    out = tmp_path / "mean"
    words = ["scripts/average.py", "--run", reference, "--steps", "10,20", "--out", out]
    done = run_script(*words)
    assert done.returncode == 0, done.stderr
    a, b, got = final_weights(reference, 10), final_weights(reference, 20), final_weights(out)
    for name, x in got.items():
        np.testing.assert_allclose(x, (a[name] + b[name]) / 2, rtol=1e-6, atol=1e-7)
    record = json.loads((out / "config.json").read_text())
    assert record["parent"] == dict(path=str(reference), step=[10, 20])
    theirs = json.loads((reference / "config.json").read_text())
    assert len(record["run_id"]) == len(theirs["run_id"]) and record["run_id"] != theirs["run_id"]
    done = run_script("scripts/evaluate.py", "--run", out)
    assert done.returncode == 0 and json.loads(done.stdout)["loss"] < 6, done.stderr
    done = run_script("scripts/sample.py", "--run", out, "--tokens", 4)
    assert done.returncode == 0, done.stderr
    done = run_script(*words)
    assert done.returncode == USAGE and "exists" in done.stderr
    start = replace(config.tiny(), run=config.Run(start_from=str(reference), start_with="state"))
    with pytest.raises(UserError, match="did not start from"):
        branch.refuse_other_parent(epath.Path(out), start)
    done = run_script(*words[:3], "--steps", "10,10", "--out", tmp_path / "other")
    assert done.returncode == USAGE and "different numbers of updates" in done.stderr
    done = run_script(*words[:3], "--steps", "10,15", "--out", tmp_path / "other")
    assert done.returncode == CHECKPOINT and "no checkpoint 15" in done.stderr
    assert not (tmp_path / "other").exists()


def test_an_average_that_was_cut_short_is_made_again(reference, tmp_path, monkeypatch):
    cfg = cli.config_of_run(str(reference), config.Mesh())
    args = average.Args(str(reference), "10,20", str(tmp_path / "mean"))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(checkpoint.Checkpoints, "write", lambda *_: 1 // 0)
        average.main(args, cfg)
    assert not (tmp_path / "mean" / "config.json").exists()
    (tmp_path / "mean" / "checkpoints" / "0.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    average.main(args, cfg)
    assert [x.name for x in (tmp_path / "mean" / "checkpoints").iterdir()] == ["0"]
    with pytest.raises(UserError, match="mean exists, and nothing is overwritten"):
        average.main(args, cfg)


def test_each_checkpoint_has_the_same_share_of_the_mean(reference, tmp_path, monkeypatch):
    cfg, found = cli.config_of_run(str(reference), config.Mesh()), []
    monkeypatch.setattr(runstate, "load_params", lambda run, cfg, step: dict(w=jnp.float32(step)))
    monkeypatch.setattr(average, "save_weights", lambda mean, *_: found.append(float(mean["w"])))
    average.main(average.Args(str(reference), "1,2,6", str(tmp_path / "mean")), cfg)
    assert found == [3]


@pytest.mark.slow
def test_an_average_that_exists_ends_every_process_alike(reference, tmp_path):
    words = ["scripts/average.py", "--run", reference, "--steps", "10,20", "--out", tmp_path]
    (tmp_path / "config.json").touch()

    def start(n: int):
        env = dict(SLURM_JOB_ID=str(os.getpid()), SLURM_STEP_NODELIST="127.0.0.1")
        env |= dict(SLURM_NTASKS="2", SLURM_PROCID=str(n), SLURM_LOCALID="0")
        return run_script(*words, env=os.environ | env)

    with ThreadPoolExecutor() as pool:
        both = [*pool.map(start, range(2))]
    assert [done.returncode for done in both] == [USAGE, USAGE], both
    assert all(f"{tmp_path} exists" in done.stderr for done in both)


def test_what_a_checkpoint_lacks_is_named_by_its_setting(reference, base):
    more = dict(optim=dict(ema=0.9), train=dict(spike_sigma=6.0))
    cfg, _ = copy_run(reference, base, "lacks", **more)
    accept = ("optim.ema", "train.spike_sigma")
    error = refusal(replace(cfg, run=replace(cfg.run, accept=accept)))
    assert error.code == CHECKPOINT
    for words in ("(optim.ema)", "1 arrays are of the last", "--run.start_from"):
        assert words in str(error), words


def test_a_run_without_an_average_says_so(reference, base):
    done = run_script("scripts/evaluate.py", "--run", reference, "--weights", "ema")
    assert done.returncode == CHECKPOINT and "optim.ema=0" in done.stderr


# ---- spikes


def test_a_spike_changes_only_the_step_and_the_window():
    cfg = on_mesh(PLAIN, (2, 2, 2), model=dict(n_layers=2), train=dict(spike_sigma=6.0))
    state = runstate.init_state(cfg)
    norms = np.random.default_rng(0).normal(1, 0.02, size=optim.SPIKE_WINDOW).astype(np.float32)
    for scale, is_skipped in ((1.0, False), (0.01, True)):  # of the norms before
        first = jax.device_get(state)._replace(recent_norms=norms * scale * 1.6)
        state = jax.device_put(first, jax.tree.map(lambda x: x.sharding, state))
        state, metrics = train.train_step(state, *batch(cfg), cfg)
        assert float(metrics["spike"]) == is_skipped, metrics["grad_norm"]
        assert int(state.step) == first.step + 1
        recent = np.append(first.recent_norms[1:], metrics["grad_norm"])
        np.testing.assert_array_equal(state.recent_norms, recent)
        same = jax.tree.map(np.array_equal, (state.params, state.opt), (first.params, first.opt))
        assert all(jax.tree.leaves(same)) == is_skipped
    # Before the window is full nothing is a spike, and what is not finite does not enter it.
    assert not optim.is_spike(jnp.float32(1e9), jnp.append(-1, norms[1:]), cfg)
    assert not optim.is_spike(jnp.float32(jnp.inf), norms, cfg)
    np.testing.assert_array_equal(optim.add_norm(jnp.float32(jnp.inf), norms), norms)


@pytest.mark.slow
def test_skipped_spikes_are_counted_and_a_branch_skips_the_same(base, capsys):
    sections = dict(train=dict(spike_sigma=0.5, steps=100, eval_every=0, batch_size=8))
    small = replace(base, model=replace(base.model, n_layers=2), checkpoint=config.Checkpoint(40))
    cfg, run = new_run(small, "spikes", **sections)
    train.main(cfg)
    n_spikes = sum(row["spike"] for row in rows(run).values())
    err = capsys.readouterr().err
    assert n_spikes > 2 and err.count("is a spike (train.spike_sigma)") == n_spikes
    assert f"; {n_spikes:.0f} so far" in err
    assert not any(row["spike"] for step, row in rows(run).items() if step <= 64)
    start = dict(start_from=f"{run}@80", start_with="state", name="spikes-80")
    again, branch = new_run(cfg, "spikes-80", run=start)
    train.main(again)
    text = (branch / "metrics.jsonl").read_text().splitlines()
    found = [row["loss"].hex() for row in map(json.loads, text) if row["kind"] == "train"]
    assert found == [line.split()[0] for line in losses(run)[80:]]
    assert np.array_equal(final_weights(branch)["embed_VD"], final_weights(run)["embed_VD"])


# ---- batches that grow


@pytest.mark.slow
def test_a_ramp_is_the_same_on_any_mesh_and_from_any_checkpoint(base):
    ramp = dict(batch_ramp="0:8,4:16,9:32", steps=12, eval_every=0, microbatches=0, dropout=0.0)
    small = replace(base, checkpoint=config.Checkpoint(every=5, keep=3))
    curves = {}
    for mesh in [(2, 2, 2), (1, 1, 1)]:
        name, axes = f"ramp-{mesh[0]}", dict(zip(("dp", "pp", "tp"), mesh, strict=True))
        cfg, run = new_run(small, name, train=ramp, mesh=axes)
        train.main(cfg)
        curves[mesh] = [row["loss"] for row in rows(run).values()]
        tokens = [row["tokens"] for row in rows(run).values()]
        sizes = [8] * 4 + [16] * 5 + [32] * 3
        np.testing.assert_array_equal(np.diff(tokens, prepend=0), np.array(sizes) * 16)
    np.testing.assert_allclose(curves[2, 2, 2], curves[1, 1, 1], rtol=1e-4)
    record = json.loads((run / "config.json").read_text())
    assert record["train"]["batch_size"] == 32
    steps = {int(path.name) for path in (run / "checkpoints").iterdir()}  # of (1, 1, 1)
    assert 5 in steps  # and 10, unless 5 was still being written
    for step in steps & {5, 10}:
        start = dict(start_from=f"{run}@{step}", start_with="state", name=f"ramp-from-{step}")
        again, branch = new_run(cfg, f"ramp-from-{step}", run=start)
        train.main(again)
        assert np.array_equal(final_weights(branch)["embed_VD"], final_weights(run)["embed_VD"])
    done = run_script("scripts/batch.py", "--run", run, "--step", 7, "--loss")
    assert done.returncode == 0 and "16 rows of 16" in done.stdout, done.stderr
    # What comes may change if run.accept says so, and what was trained may not.
    changed = replace(cfg, run=replace(cfg.run, accept=("train.batch_ramp", "train.batch_size")))
    t = dict(steps=13, batch_ramp="0:8,4:16,10:32")
    error = refusal(replace(changed, train=replace(cfg.train, **t)))
    assert error.code == CHECKPOINT and "train.batch_ramp" in str(error)
    t = dict(steps=13, batch_ramp="0:8,4:16,9:32,12:64")
    error = refusal(replace(cfg, train=replace(cfg.train, **t)))
    assert error.code == CHECKPOINT and "train.batch_size: 32 there, 64 here" in str(error)
    train.main(replace(changed, train=replace(cfg.train, **t)))
    assert rows(run)[13]["tokens"] - rows(run)[12]["tokens"] == 64 * 16


@pytest.mark.parametrize("ramp, words", [
    ("8", ["'8' is not UPDATES:SEQUENCES"]),
    ("2:8", ["'2:8' does not begin at 0"]),
    ("0:8,0:16", ["'0:16' does not begin"]),
    ("0:0", ["'0:0' is not"]),
    ("0:8,4:6", ["must divide train.batch_ramp=0:8,4:6's 6"]),
])  # fmt: skip
def test_a_ramp_that_cannot_be_is_refused(base, ramp, words):
    cfg = replace(base, train=replace(base.train, batch_ramp=ramp, microbatches=0))
    error = refusal(replace(cfg, mesh=config.Mesh(4, 1, 1)))
    assert all(word in str(error) for word in words), error


# ---- norms of layers, and alarms


def test_the_size_of_logits_is_that_of_all_scores():
    cfg = on_mesh(PLAIN, model=dict(d_head=6), log=dict(norms_every=1))
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(3, 7, 4, 6)), rng.normal(size=(3, 7, 2, 6))
    span = attention.Span(jnp.zeros((3, 7), int), jnp.zeros((3, 7), int))
    (got,) = attention.score_stats(jnp.array(q), jnp.array(k), span, cfg).values()
    scores = np.einsum("blhk,bshk->bhls", q, k.repeat(2, axis=2)) / 6**0.5
    np.testing.assert_allclose(got, (scores**2).mean((2, 3)).sum(), rtol=1e-5)


@pytest.mark.parametrize("cfg", [
    pytest.param(PLAIN, id="plain"),
    pytest.param(MIXED, id="mixed", marks=pytest.mark.slow),
    pytest.param(ALL_EXPERTS, id="mla", marks=pytest.mark.slow),
])  # fmt: skip
def test_norms_are_those_of_each_layer_on_any_mesh(cfg):
    found = {}
    for mesh in [(1, 1, 1), (2, 2, 2)]:
        on = on_mesh(cfg, mesh, log=dict(norms_every=3))
        state = runstate.init_state(on)
        before = jax.device_get(state.params)
        state, found_metrics = train.train_step(state, *batch(on), on)
        after = jax.device_get(state.params)
        found[mesh] = jax.device_get(found_metrics["norms"])
    names = norm_metrics.layer_names(on)
    assert len(names) == len(found[1, 1, 1]["weight"])
    for n, (group, kind, row) in enumerate(layer_places(on.model)):
        for name, trees in (("weight", [after]), ("update", [after, before])):
            rows = [[x[row] for x in tree[group][kind].values()] for tree in trees]
            parts = rows[0] if len(rows) == 1 else [a - b for a, b in zip(*rows, strict=True)]
            want = np.sqrt(sum((x**2).sum() for x in parts))
            np.testing.assert_allclose(found[2, 2, 2][name][n], want, rtol=1e-4)
    at = names.index("embed_VD")
    want = np.linalg.norm(after["embed_VD"])
    np.testing.assert_allclose(found[2, 2, 2]["weight"][at], want, rtol=1e-5)
    whole = np.sqrt((found[2, 2, 2]["gradient"] ** 2).sum())
    np.testing.assert_allclose(whole, found_metrics["grad_norm"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), found[1, 1, 1], found[2, 2, 2]
    )


def test_latent_attention_measures_its_logits_in_rows_of_one_token_too():
    cfg = on_mesh(ALL_EXPERTS, train=dict(seq_len=1), log=dict(norms_every=1))
    _, found = jax.eval_shape(partial(train.train_step, cfg=cfg), *train.step_shapes(cfg))
    assert found["norms"]["logit"].shape == (cfg.model.n_layers,)


def test_norms_are_written_and_drawn_as_often_as_asked(base, capsys):
    cfg, run = new_run(base, "norms", log=dict(norms_every=4), train=dict(steps=10))
    train.main(cfg)
    found = rows(run, "norms")
    assert list(found) == [1, 4, 8, 10]
    names = ["layer 0", "layer 1", "layer 2", "layer 3", "embed_VD", "norm_D", "unembed_DV"]
    assert all(row["layer"] == names and len(row["update"]) == 7 for row in found.values())
    assert (run / "norms.png").stat().st_size > 10_000
    assert "largest change" in capsys.readouterr().out


def test_the_legend_of_norms_hides_no_curve(base, tmp_path, monkeypatch):
    panel, figures = panels.NormsPanel(base), []
    panel.track(dict(step=1) | {name: [1.0] * len(panel.names) for name in panels.SIZES})
    monkeypatch.setattr(panels, "write_png", lambda path, figure: figures.append(figure))
    panel.draw(tmp_path)
    assert len(figures[0].legends) == 1 and not any(x.get_legend() for x in figures[0].axes)


def test_a_long_curve_is_drawn_in_few_points_with_all_its_peaks():
    curve = {step: np.array([0.0, float(step)]) for step in range(1, 1202)}
    assert panels.points_of(curve, 1201)[0] == [*curve]
    curve[5][0], curve[9][0] = 7.0, np.nan
    steps, values = panels.points_of(curve)
    assert steps == [*range(1, 1202, 4)] and values.shape == (301, 2)
    assert values[1, 0] == 7.0 and values[2].tolist() == [0, 12] and values[-1, 1] == 1201


@pytest.mark.parametrize("model, quiet", [
    (dict(norm_offset=False), set()),
    (dict(norm_offset=True), {"norm_D"}),
    (dict(norm="layer", norm_bias=True), {"norm_bias_D"}),
], ids=str)  # fmt: skip
def test_only_a_weight_that_begins_at_0_may_grow_tenfold(base, model, quiet):
    panel = panels.NormsPanel(replace(base, model=replace(base.model, **model)))
    for step, size in enumerate([1.0, 1.0, 1.0, 11.0]):
        panel.track(dict(step=step) | {name: [size] * len(panel.names) for name in panels.SIZES})
    grown = {alarm.removeprefix("weight ") for alarm in panel.alarms() if "weight" in alarm}
    assert grown == {*panel.names} - quiet


def test_an_alarm_is_said_once_also_after_a_resume(base, tmp_path, capsys):
    model = replace(base.model, pattern="moe", n_experts=4, d_expert=16)
    cfg = replace(base, model=model, log=replace(base.log, every=1, norms_every=1))
    n, path = len(norm_metrics.layer_names(cfg)), epath.Path(tmp_path)
    scalars = dict(loss=1.0, grad_norm=1.0, lr=1.0)
    for first in (0, 8):
        log = open_log(path, cfg, first)
        for step in range(first + 1, first + 9):
            load = np.full((4, 4), 25.0)
            load[2] = [60, 30, 9, 1] if step > 1 else 25  # the last has 4 % of an even load
            moe = {name: np.ones(4) for name in ("dropped", "entropy", "balance")}
            # It is back for a while, at the resume too.
            grown = np.where(np.arange(n) == 1, 1.0 if step < 4 or 7 < step < 12 else 11.0, 1.0)
            logit = np.array([0.5, 0.5, 0.5 if step < 7 else 6, 0.5])
            panels = dict(
                moe=dict(load=load, **moe),
                norms=dict(gradient=np.ones(n), update=np.ones(n), weight=grown, logit=logit),
            )
            log.add_update(step, scalars | panels)
        log.close()
    err = capsys.readouterr().err
    assert err.count("layer 2: experts [3] have had less than 10% of an even load") == 1
    assert "update 6: layer 2" in err
    assert err.count("update 4: layer 1: weights grew from 1 to 11") == 1
    assert err.count("layer 2: attention logits grew from 0.5 to 6") == 1
    assert err.count("warning") == 3
