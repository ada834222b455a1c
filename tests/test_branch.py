"""Runs that start from a checkpoint of another run."""

import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import optax
import pytest
from cases import GPT2
from etils import epath
from runs import contents, final_weights, finish, losses, new_run, refusal, rows, start, start_two

import branch
import optim
import train
from errors import CHECKPOINT, USAGE, UserError
from model import HEAD_STD


def branch_of(reference, base, name, start="", how="weights", **sections):
    start_from = dict(start_from=f"{reference}{start}", start_with=how)
    return new_run(base, name, run=dict(name=name, **start_from), **sections)


def test_a_branch_with_the_state_goes_on_bit_for_bit(reference, base):
    before = contents(reference)
    cfg, run = branch_of(reference, base, "same", "@10", "state")
    train.main(cfg)
    assert list(rows_after(run)) == losses(reference)[10:]
    want, got = final_weights(reference), final_weights(run)
    assert all(np.array_equal(got[name], want[name]) for name in want)
    assert contents(reference) == before
    parent = json.loads((run / "config.json").read_text())["parent"]
    assert (parent["path"], parent["step"]) == (str(reference), 10) and parent["digest"] > 0
    # It is a run like any other: the same command does nothing more, without its parent too.
    train.main(replace(cfg, run=replace(cfg.run, start_from="", start_with="weights")))
    assert json.loads((run / "config.json").read_text())["parent"] == parent


def test_a_branch_keeps_the_tokenizer_of_its_parent(reference, base, tmp_path):
    parent = shutil.copytree(reference, tmp_path / "parent")
    cfg, _ = branch_of(parent, base, "same-tokens")
    tokenizer = epath.Path(reference / "tokenizer.json")
    published = json.dumps(json.loads(tokenizer.read_text()), indent=2)
    (parent / "tokenizer.json").write_text(published)
    branch.Parent(cfg, tokenizer)
    (parent / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="another tokenizer than that of the run"):
        branch.Parent(cfg, tokenizer)


def rows_after(run):
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if row["kind"] == "train":
            yield f"{row['loss'].hex()} {row['grad_norm'].hex()}"


def test_a_branch_may_change_data_lengths_schedule_optimizer_mesh_and_dtype(reference, base):
    cfg, run = branch_of(
        reference, base, "other", "@10", "state",
        mesh=dict(dp=4, pp=1, tp=1, fsdp="step"),
        model=dict(rope_scaling="yarn", rope_factor=4.0, rope_original=16, rope_high=32.0),
        data=dict(train="synthetic", val="synthetic"),
        train=dict(seq_len=64, batch_size=8, steps=12, dtype="bfloat16", microbatches=1),
        optim=dict(name="muon", schedule="wsd", lr=4e-3, decay_ratio=0.5, warmup_steps=0),
    )  # fmt: skip
    state = train.main(cfg)
    assert int(state.step) == 12
    # wsd: the peak until update 6, then down to 0.1 at update 12
    table = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in table if row["kind"] == "train"]
    np.testing.assert_allclose(rates, [4e-3 * (0.1 + 0.9 / 6), 4e-4], rtol=1e-5)
    tokens = [row["tokens"] for row in table if row["kind"] == "train"]
    before = rows(reference)[10]["tokens"]
    assert tokens == [before + 8 * 64, before + 2 * 8 * 64]


@pytest.mark.slow
def test_the_tokens_of_a_branch_of_a_branch_that_made_no_update_go_on(reference, base):
    cfg, run = branch_of(reference, base, "no-update", "@10", "state", train=dict(steps=10))
    train.main(cfg)
    cfg, run = branch_of(run, base, "after-no-update", "", "state", train=dict(steps=11))
    train.main(cfg)
    (row,) = (json.loads(x) for x in (run / "metrics.jsonl").open() if '"train"' in x)
    assert row["tokens"] == rows(reference)[11]["tokens"]


def test_a_parent_that_has_lost_rows_is_named(reference, base, tmp_path, capsys):
    damaged = tmp_path / "lost-rows"
    shutil.copytree(reference, damaged)
    (damaged / "metrics.jsonl").unlink()
    cfg, _ = branch_of(damaged, base, "of-lost-rows", "@10", "state", train=dict(steps=10))
    train.main(cfg)
    warning = "metrics.jsonl has no row of update 10: its tokens until then are taken as 0"
    assert warning in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_start_a_branch_with_a_new_optimizer_and_average(reference, base):
    more = dict(mesh=dict(dp=2, pp=1, tp=1), optim=dict(name="muon", ema=0.9))
    more |= dict(train=dict(steps=12, eval_every=0), log=dict(norms_every=1))
    found = []
    for n in (1, 2):
        cfg, run = branch_of(reference, base, f"by-{n}", "@10", "state", **more)
        processes = [start(cfg)] if n == 1 else start_two(cfg)
        ends = [finish(process) for process in processes]
        assert [end[0] for end in ends] == [0] * n, ends
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found.append({(row["kind"], row["step"]): row for row in lines})
    want, got = found
    assert want.keys() == got.keys() and ("train", 11) in got and ("train", 10) not in got
    for step in (11, 12):
        assert got["train", step]["loss"] == pytest.approx(want["train", step]["loss"], rel=1e-5)
        sizes = got["norms", step]["update"], want["norms", step]["update"]
        np.testing.assert_allclose(*sizes, rtol=1e-3)
    assert got["train", 12]["tokens"] == rows(reference)[12]["tokens"]


def test_a_branch_with_weights_is_a_new_training(reference, base):
    cfg, run = branch_of(reference, base, "tuned", train=dict(steps=2))
    train.main(cfg)
    found = rows(run)
    assert list(found) == [1, 2] and found[1]["lr"] == pytest.approx(cfg.optim.lr / 5)
    first = rows(reference)[1]["loss"]
    assert found[1]["loss"] < first - 0.5  # of the same batch, but with trained weights


def test_a_branch_that_left_no_checkpoint_is_forgotten(reference, base, monkeypatch):
    cfg, run = branch_of(reference, base, "left-nothing", "@10", "state", train=dict(steps=11))
    with monkeypatch.context() as patch:
        patch.setattr(train, "compile_step", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            train.main(cfg)
    assert json.loads((run / "config.json").read_text())["parent"]["step"] == 10
    new = dict(
        run=replace(cfg.run, start_from="", start_with="weights"), train=replace(cfg.train, steps=1)
    )
    train.main(replace(cfg, **new))
    assert "parent" not in json.loads((run / "config.json").read_text())
    assert list(rows(run)) == [1]


def test_a_config_without_a_fingerprint_is_no_import(tmp_path):
    (tmp_path / "config.json").write_text("{}")  # as one written by hand
    branch.forget_parent(epath.Path(tmp_path))


def test_what_a_branch_started_with_cannot_change(base, tmp_path):
    name = dict(start_from=f"{tmp_path}/parent@10", start_with="weights")
    cfg = replace(base, run=replace(base.run, **name))
    for how, word in (("weights", None), ("state", "its parent's state, but run.start_with=wei")):
        parent = dict(path=f"{tmp_path}/parent", step=10, tokens=0, start_with=how)
        (tmp_path / "config.json").write_text(json.dumps(dict(parent=parent)))
        with pytest.raises(UserError, match=word) if word else nullcontext():
            branch.refuse_other_parent(epath.Path(tmp_path), cfg)


@pytest.mark.slow
def test_gradient_norms_of_other_batches_are_not_compared_with_the_parents(base):
    few = dict(eval_every=0, steps=3, spike_sigma=6.0)
    cfg, run = new_run(base, "norms-parent", train=few)
    train.main(cfg)
    more = few | dict(steps=4)
    for name, batch_size, n in (("same-norms", 32, 4), ("other-norms", 16, 1)):
        cfg, _ = branch_of(run, base, name, "", "state", train=more | dict(batch_size=batch_size))
        norms = np.asarray(train.main(cfg).recent_norms)
        assert (norms > 0).sum() == n


def test_a_name_may_have_any_character():
    assert branch.read_name("/runs/a\nb") == (epath.Path("/runs/a\nb"), -1)


@pytest.mark.slow
def test_positions_may_grow(base, monkeypatch):
    """With moments in the shape of their weight, and in other shapes, as Adafactor's."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    both = optax.chain(optax.scale_by_adam(), factored)
    monkeypatch.setitem(optim.OPTIMIZERS, "both", partial(optim.with_direction, both))
    model = replace(GPT2.model, n_layers=4, vocab_size=512)
    cfg, run = new_run(replace(base, model=model), "few-positions", optim=dict(name="both"))
    train.main(cfg := replace(cfg, train=replace(cfg.train, steps=1)))
    for how in ("weights", "state"):
        longer, branch = branch_of(
            run, cfg, f"long-{how}", "", how,
            model=dict(max_positions=40), train=dict(seq_len=40, steps=2), mesh=dict(pp=1),
        )  # fmt: skip
        train.main(replace(longer, train=replace(longer.train, steps=1)))
        if how == "state":  # nothing was trained
            want, got = final_weights(run), final_weights(branch)
            position = got.pop("position_LD")
            assert np.array_equal(position[:20], want.pop("position_LD"))
            assert position[20:].std() == pytest.approx(HEAD_STD * 32**-0.5, rel=0.1)
            assert all(np.array_equal(got[name], want[name]) for name in want)
    shorter, _ = branch_of(run, cfg, "shorter", model=dict(max_positions=16))
    assert "below the parent's 20" in str(refusal(shorter))


def test_fresh_moves_no_run_for_a_branch_that_cannot_be(reference, base):
    cfg, run = branch_of(reference, base, "fresh-branch")
    shutil.copytree(reference, run)
    before = contents(run)
    for parent in (f"{reference}@15", str(run), str(run.with_name("typo"))):
        start_from = replace(cfg.run, start_from=parent)
        assert refusal(replace(cfg, run=start_from, fresh=True)).code == CHECKPOINT
        assert contents(run) == before
    for process in start_two(replace(cfg, run=start_from, fresh=True)):
        code, _, err = finish(process)
        assert code == CHECKPOINT and "Traceback" not in err, err
    assert contents(run) == before


def test_a_branch_that_cannot_be_is_refused(reference, base, tmp_path):
    def refused(name, start="", how="weights", **sections):
        return refusal(branch_of(reference, base, f"bad-{name}", start, how, **sections)[0])

    error = refused("wide", model=dict(d_ff=128, norm_eps=1e-5))
    assert error.code == CHECKPOINT and len(error.problems) == 2
    assert f"model.d_ff is 64 in {reference} and 128 in this run" in str(error)
    error = refused("none", "@15")
    assert error.code == CHECKPOINT and "no checkpoint 15, only 10 or 20" in str(error)
    # That start trained nothing, so the next one may have other settings.
    run = replace(base.run, name="bad-none", start_from=str(reference), start_with="state")
    other = dict(train=replace(base.train, steps=21), optim=replace(base.optim, lr=1e-3))
    train.main(replace(base, run=run, **other))
    error = refused("ended", how="state", train=dict(steps=19))
    assert error.code == USAGE and "train.steps=19" in str(error)
    error = refused("nothing", "-2")
    assert error.code == CHECKPOINT and "there is no other run in" in str(error)
    error = refusal(replace(base, run=replace(base.run, start_from=str(reference))))
    assert error.code == CHECKPOINT and "there is no other run in" not in str(error)
    assert "did not start from" in str(error)
    damaged = tmp_path / "damaged"
    shutil.copytree(reference, damaged)
    for file in (damaged / "checkpoints" / "20").rglob("*"):
        if file.is_file() and file.stat().st_size > 3000:
            data = bytearray(file.read_bytes())
            data[1500] ^= 16
            file.write_bytes(data)
    before = contents(damaged)
    error = refusal(branch_of(damaged, base, "bad-damaged")[0])
    assert error.code == CHECKPOINT and "checkpoints/20 failed verification" in str(error)
    assert contents(damaged) == before
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    error = refusal(branch_of(tmp_path / "run", base, "empty")[0])
    assert error.code == CHECKPOINT


def test_a_model_of_other_settings_is_named_by_accept(reference, base):
    cfg, _ = branch_of(reference, base, "eps", model=dict(norm_eps=1e-5), train=dict(steps=1))
    train.main(replace(cfg, run=replace(cfg.run, accept=("model.norm_eps",))))
