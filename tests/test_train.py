"""Training runs: they are equal on every mesh and through every interruption, they refuse what
would spoil a run directory, and they end with a sound checkpoint."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, STEPS, on_mesh, prepare
from runs import (
    contents,
    copy_run,
    final_weights,
    finish,
    flags,
    loss_curve,
    losses,
    new_run,
    refusal,
    rows,
    start,
    wait_for_step,
)

import checkpoint
import checks
import cli
import config
import errors
import files
import processes
import runstate
import signals
import train
from errors import BUSY, CHECKPOINT, DIVERGED, INTERRUPTED, STORAGE, UserError

SLOW = pytest.mark.slow
SINGLE = dict(dp=1, pp=1, tp=1)  # the mesh of one device


# ---- what a run leaves behind


def test_a_run_leaves_its_record(reference, base):
    train_rows, evals = rows(reference), rows(reference, "eval")
    assert list(train_rows) == list(range(1, STEPS + 1)) and list(evals) == [10, 20]
    speed = ["step_time", "tokens_per_sec", "mfu"]
    assert list(train_rows[1]) == ["kind", "step", "loss", "grad_norm", "lr", "tokens", *speed]
    assert list(evals[10]) == ["kind", "step", "data", "loss", "bits_per_byte", "tokens"]
    assert train_rows[3]["tokens"] == 3 * 32 * 16 and train_rows[3]["mfu"] is None
    assert train_rows[STEPS]["loss"] < 0.6 * train_rows[1]["loss"]
    assert sorted(p.name for p in (reference / "checkpoints").iterdir()) == ["10", "20"]
    record = json.loads((reference / "config.json").read_text())
    assert record["versions"]["jax"] == jax.__version__
    assert record["argv"] and len(record["data_fingerprint"]) == 32
    resolved = checks.resolve(base, jax.device_count(), on_cpu=True)
    assert cli.parse(["--config", str(reference / "config.json")]) == resolved
    assert (reference / "loss.png").read_bytes()[:4] == b"\x89PNG"


# ---- interruptions


@pytest.mark.slow
def test_sigkill_at_any_moment_changes_no_bit(base, reference):
    """The run is killed while it trains, saves and starts, and then runs to its end."""
    cfg, run = new_run(base, "killed", checkpoint=dict(every=3))
    for step in (2, 5, 13):
        process = start(cfg)
        wait_for_step(process, run, step)
        time.sleep(np.random.default_rng(step).uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        assert finish(process)[0] == -signal.SIGKILL
    process = start(cfg)
    time.sleep(2)
    process.kill()
    finish(process)
    code, out, err = finish(start(cfg))
    resumed = r"resume: update \d+ \(verified\) from .*/killed/checkpoints in \d+\.\d s\n"
    assert code == 0 and re.search(resumed, out), err
    assert losses(run) == losses(reference)
    assert rows(run, "eval") == rows(reference, "eval")
    got, want = final_weights(run), final_weights(reference)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW)])
def test_a_stopped_run_saves_exits_75_and_resumes(base, reference, number):
    cfg, run = new_run(base, f"stopped{number}", checkpoint=dict(every=1000))
    process = start(cfg)
    wait_for_step(process, run, 7)
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == INTERRUPTED and "checkpoint of update" in out and "Traceback" not in err
    saved = max(int(p.name) for p in (run / "checkpoints").iterdir())
    assert saved >= 7 and len(rows(run)) == saved
    train.main(cfg)
    assert losses(run) == losses(reference)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_starting_is_exit_75(base, number):
    """While modules are imported, JAX starts, and programs are compiled."""
    cfg, _ = new_run(base, f"started{number}", train=dict(steps=100_000))
    for seconds in (0.5, 0.8, 1.2, 1.8, 2.5):
        process = start(cfg)
        time.sleep(seconds)
        process.send_signal(number)
        code, _, err = finish(process)
        assert code == INTERRUPTED and "Traceback" not in err, (seconds, code, err)
        assert "nothing is lost" in err or "stopping after this update" in err


def test_a_signal_while_compiling_ends_the_run_at_once(base):
    cfg, run = new_run(base, "compiling")
    process = start(cfg)
    assert "compiling the update\n" in process.stdout  # reads up to this line
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == INTERRUPTED and "nothing is lost" in err, err
    assert "compiled in" not in out and json.loads((run / "history.jsonl").read_text())["end"]


def wait_for_handler(pid: int):
    """Until train.py has handlers of signals; that of SIGUSR1 is the last."""
    status, bit = Path(f"/proc/{pid}/status"), 1 << (signal.SIGUSR1 - 1)
    until = time.monotonic() + 60
    while not int(re.search(r"SigIgn:\s*(\w+)", status.read_text())[1], 16) & bit:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_terminal_that_is_closed_while_starting_is_exit_75(base):
    for handler, code in ((signal.SIG_DFL, INTERRUPTED), (signal.SIG_IGN, errors.DATA)):  # nohup
        cfg, _ = new_run(base, "hung_up", data=dict(train="nowhere"))
        process = start(cfg, preexec_fn=partial(signal.signal, signal.SIGHUP, handler))
        wait_for_handler(process.pid)
        process.send_signal(signal.SIGHUP)
        assert finish(process)[0] == code


# Runs its arguments as a command that obeys permissions even if root runs it: without the
# capabilities CAP_DAC_OVERRIDE (1) and CAP_DAC_READ_SEARCH (2), dropped by PR_CAPBSET_DROP (24).
OBEY_PERMISSIONS = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("sealed", ["checkpoints/20/params", "checkpoints/20/meta/metadata"])
def test_a_checkpoint_without_permission_is_exit_5_and_stays(base, reference, sealed):
    cfg, run = copy_run(reference, base, f"sealed{len(sealed)}")
    mode = (run / sealed).stat().st_mode
    (run / sealed).chmod(0)
    command = [sys.executable, ROOT / "train.py", "--config", "tiny", *flags(cfg)]
    command = [sys.executable, "-c", OBEY_PERMISSIONS, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (run / sealed).chmod(mode)
    assert done.returncode == STORAGE and "Traceback" not in done.stderr
    assert "Permission denied" in done.stderr
    assert not (run / "damaged").exists() and (run / "checkpoints" / "20").exists()


class StopAt(processes.Stop):
    """Says to stop at its n-th poll."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n

    def agree_to_stop(self, error=None, is_update=False) -> bool:
        super().agree_to_stop(error, is_update)
        return self.polls >= self.n


@pytest.mark.slow
@pytest.mark.parametrize("n, step", [(12, 10), (24, 20)], ids=["midway", "at the end"])
def test_an_interrupted_evaluation_is_repeated_on_resume(base, reference, monkeypatch, n, step):
    """The run is stopped between the two batches of an evaluation."""
    cfg, run = new_run(base, f"interrupted{step}")
    with monkeypatch.context() as m:
        m.setattr(processes, "Stop", lambda: StopAt(n))
        with pytest.raises(SystemExit) as stopped:
            train.main(cfg)
    assert stopped.value.code == INTERRUPTED
    assert len(rows(run)) == step and step not in rows(run, "eval")
    train.main(cfg)
    assert losses(run) == losses(reference)
    assert rows(run, "eval") == rows(reference, "eval")


@pytest.mark.parametrize("mesh", [pytest.param((8, 1, 1), marks=SLOW), (1, 4, 2)], ids=str)
def test_a_checkpoint_resumes_on_any_mesh(base, reference, mesh):
    cfg, run = copy_run(reference, base, "mesh" + "".join(map(str, mesh)))
    shutil.rmtree(run / "checkpoints" / "20")
    any_count = replace(cfg.train, microbatches=0)
    train.main(replace(cfg, mesh=config.Mesh(*mesh), train=any_count))
    got, want = rows(run), rows(reference)
    for step in range(11, STEPS + 1):
        np.testing.assert_allclose(got[step]["loss"], want[step]["loss"], rtol=1e-5)
    assert losses(run)[:10] == losses(reference)[:10]


@pytest.mark.slow
def test_a_new_run_is_equal_on_another_mesh(base, reference):
    split = dict(grad_accum=2, microbatches=0)
    cfg, run = new_run(base, "one_device", mesh=SINGLE, train=split)
    train.main(cfg)
    # Ten updates only: later, rounding errors have grown tenfold, by an amount that differs between
    # versions of jaxlib.
    np.testing.assert_allclose(loss_curve(run)[:10], loss_curve(reference)[:10], rtol=1e-5)
    assert rows(run, "eval")[20]["tokens"] == rows(reference, "eval")[20]["tokens"]


def test_a_finished_run_that_is_started_again_does_nothing(base, reference):
    cfg, run = copy_run(reference, base, "again")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook, which goes on
    before = [*map(signal.getsignal, signals.STOPS)]
    train.main(cfg)
    assert [*map(signal.getsignal, signals.STOPS)] == before
    assert (run / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()


# ---- what a run refuses


@pytest.mark.slow
def test_a_program_that_does_not_compile_leaves_no_checkpoint(base):
    cfg, run = new_run(base, "refused", train=dict(attention="splash"))
    with pytest.raises(UserError, match="train.attention=splash runs on tpu, and this is cpu"):
        train.main(cfg)
    assert not [*run.glob("checkpoints/*")]
    other = replace(base, train=replace(base.train, steps=1), optim=replace(base.optim, lr=1e-3))
    train.main(replace(other, run=cfg.run))  # no update has the settings of the first start
    assert [*rows(run)] == [1]


def test_the_memory_that_is_said_counts_temporary_arrays(capsys):
    """The logits alone, of microbatches of 512 tokens, are 8 MiB."""
    cfg = on_mesh(config.tiny(), (1, 1, 1), model=dict(n_layers=2, vocab_size=4096))
    state_mib = 3 * 4 * train.model.param_count(cfg) / 2**20
    train.compile_step(cfg)
    (said,) = re.findall(r"compiled in .*: (\S+) MiB on a device", capsys.readouterr().out)
    assert float(said) > state_mib + 8


def test_a_run_directory_has_at_most_one_live_run(base):
    cfg, run = new_run(base, "busy", train=dict(steps=100_000), optim=dict(warmup_steps=5))
    first = start(cfg)
    wait_for_step(first, run, 1)
    began = time.monotonic()
    code, _, err = finish(start(cfg))
    first.kill()
    finish(first)
    assert code == BUSY and "belongs to another live run" in err and f'"pid": {first.pid}' in err
    assert time.monotonic() - began < 20 and "Traceback" not in err


@pytest.mark.slow
def test_a_live_run_is_noticed_before_jax_is_imported(base):
    cfg, run = new_run(base, "busy_early", train=dict(steps=100_000))
    first = start(cfg)
    wait_for_step(first, run, 1)
    seconds = []
    for _ in range(3):  # the fastest of three, because the machine is busy
        began = time.monotonic()
        code, _, err = finish(start(cfg))
        seconds.append(time.monotonic() - began)
        assert code == BUSY and err.count("\n") == 2, err
    first.kill()
    finish(first)
    assert min(seconds) < 2


@pytest.mark.slow
def test_of_four_runs_that_start_at_once_one_trains(base):
    """In an empty directory, and in one that a killed run has left."""
    cfg, run = new_run(base, "four", train=dict(steps=100_000), mesh=SINGLE)
    for _ in range(2):
        starts = [start(cfg) for _ in range(4)]
        while sum(process.poll() is None for process in starts) > 1:
            time.sleep(0.1)
        (winner,) = [process for process in starts if process.poll() is None]
        wait_for_step(winner, run, 1)
        winner.kill()
        codes = sorted(finish(process)[0] for process in starts)
        assert codes == [-signal.SIGKILL, BUSY, BUSY, BUSY]


def test_fresh_moves_the_old_run_aside(base, reference):
    cfg, run = copy_run(reference, base, "fresh", train=dict(steps=5), optim=dict(warmup_steps=5))
    train.main(replace(cfg, fresh=True))
    assert len(rows(run)) == 5
    assert losses(run.with_name("fresh.old")) == losses(reference)


@pytest.mark.parametrize("sections, word", [
    (dict(model=dict(d_ff=128)), "model.d_ff: 64 there, 128 here"),
    (dict(model=dict(n_layers=8)), "model.n_layers: 4 there, 8 here"),
    (dict(model=dict(tie_embeddings=True)), "model.tie_embeddings: False there, True here"),
    (dict(train=dict(seq_len=32)), "train.seq_len: 16 there, 32 here"),
    (dict(train=dict(batch_size=64)), "train.batch_size: 32 there, 64 here"),
    (dict(run=dict(seed=1)), "run.seed: 0 there, 1 here"),
    (dict(data=dict(train=None)), "data.train fingerprint: "),
], ids=lambda x: str(x) if isinstance(x, dict) else "")  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused_with_the_fields(
    base, reference, corpus, sections, word
):
    if "data" in sections:
        sections = dict(data=dict(train=str(corpus / "val")))
    cfg, run = copy_run(reference, base, f"other{abs(hash(str(sections)))}")
    cfg = replace(cfg, **{s: replace(getattr(cfg, s), **fields) for s, fields in sections.items()})
    before = contents(run)
    error = refusal(cfg)
    assert error.code == CHECKPOINT and word in str(error)
    assert "params/" not in str(error)  # other shapes follow from the setting
    assert contents(run) == before


def test_a_warmup_longer_than_the_run_is_only_a_warning(base, capsys):
    for steps in (4, 5):
        data = dict(train="nowhere")  # so that the run ends before it trains
        cfg, _ = new_run(base, "short", train=dict(steps=steps), data=data)
        assert refusal(cfg).code == errors.DATA
        want = "warning: optim.warmup_steps=5 is more than train.steps=4: the learning rate"
        assert (want in capsys.readouterr().err) == (steps == 4)


def test_data_that_cannot_be_read_end_a_run_before_it_compiles(base, corpus, tmp_path, capsys):
    data = shutil.copytree(corpus / "train", tmp_path / "data")
    for shard in data.glob("*.npy"):
        shard.write_bytes(shard.read_bytes()[:-9])
    cfg, run = new_run(base, "cut_data", data=dict(train=str(data)))
    assert refusal(cfg).code == errors.DATA
    assert "updates 1 to" in (out := capsys.readouterr().out) and "compil" not in out, out
    assert not [*run.glob("checkpoints/*")]


def test_fewer_steps_than_the_run_has_made_are_refused(base, reference):
    cfg, run = copy_run(reference, base, "fewer", train=dict(steps=15))
    before = contents(run)
    error = refusal(cfg)
    assert error.code == errors.USAGE
    assert "train.steps=15" in str(error) and "already made 20 updates" in str(error)
    assert contents(run) == before


def test_a_run_without_its_checkpoints_does_not_start_over(base, reference):
    cfg, run = copy_run(reference, base, "lost")
    shutil.rmtree(run / "checkpoints")
    error = refusal(cfg)
    assert error.code == CHECKPOINT and "has trained, but" in str(error)


@pytest.mark.parametrize("record", [dict(data_fingerprint=""), dict(parent=dict(step=[10, 20]))])
def test_an_import_or_average_without_its_weights_does_not_start_anew(base, reference, record):
    cfg, run = copy_run(reference, base, "-".join(["lost", *record]))
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    made = json.loads((run / "config.json").read_text()) | record
    (run / "config.json").write_text(json.dumps(made))
    error = refusal(cfg)
    assert error.code == CHECKPOINT and "the weights that it was made with" in str(error)


def test_a_folder_that_is_not_a_run_is_refused(base):
    cfg, run = new_run(base, "not_a_run")
    run.mkdir()
    (run / "thesis.tex").write_text("x")
    error = refusal(cfg)
    assert error.code == errors.USAGE and "'thesis.tex'" in str(error)
    assert list(run.iterdir()) == [run / "thesis.tex"]


def test_eval_only_evaluates_and_changes_no_file(base, reference, capsys):
    cfg, run = copy_run(reference, base, "only")
    before = contents(run)
    train.main(replace(cfg, eval_only=True))
    loss = rows(reference, "eval")[20]["loss"]
    assert f"validation loss {loss:.4f}" in capsys.readouterr().out
    assert contents(run) == before
    assert refusal(replace(new_run(base, "nowhere")[0], eval_only=True)).code == CHECKPOINT


def test_other_validation_data_are_evaluated_where_the_run_is(base, reference, capsys):
    cfg, run = copy_run(reference, base, "other-val", data=dict(val=base.data.train))
    before = rows(run, "eval")[20]
    for _ in range(2):  # the second time there is nothing to do
        train.main(cfg)
    assert "rows of kind eval about other data" in capsys.readouterr().err
    table = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in table if row["kind"] == "eval"]
    assert [row["step"] for row in found] == [10, 20, 20] and found[1] == before
    assert found[2]["loss"] != before["loss"] and found[2]["data"] != before["data"]


@pytest.mark.slow
def test_eval_only_evaluates_a_directory_that_can_only_be_read(base, reference):
    cfg, run = copy_run(reference, base, "readable")
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    (run / "lock").chmod(0o444)
    command = [sys.executable, ROOT / "train.py", "--config", "tiny", *flags(cfg), "--eval_only"]
    command = [sys.executable, "-c", OBEY_PERMISSIONS, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    for folder in folders:
        folder.chmod(0o755)
    loss = rows(reference, "eval")[20]["loss"]
    assert done.returncode == 0 and f"validation loss {loss:.4f}" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_run_keeps_the_tokenizer_of_its_weights(reference, base, tmp_path):
    """Data of another tokenizer are refused even if everything else about them is equal; another
    layout of the file, as in an imported model, is the same tokenizer."""
    cfg, run = copy_run(reference, base, "tokens")
    published = json.loads((run / "tokenizer.json").read_text())
    published["truncation"] = dict(
        max_length=8, stride=0, strategy="LongestFirst", direction="Left"
    )
    (run / "tokenizer.json").write_text(json.dumps(published, indent=2))
    train.main(cfg)
    (run / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="another tokenizer than that of the run") as error:
        train.main(cfg)
    assert error.value.code == errors.DATA
    assert (run / "tokenizer.json").read_text() == "{}"
    (run / "tokenizer.json").write_bytes(b"{}\xff")
    with pytest.raises(UserError, match="tokenizer.json is damaged") as error:
        train.main(cfg)
    assert error.value.code == errors.DATA
    for name in ("metrics", "samples", "history"):
        (run / f"{name}.jsonl").unlink(missing_ok=True)
    shutil.rmtree(run / "checkpoints")  # now as a start that failed before the first one
    train.main(cfg)
    assert (run / "tokenizer.json").read_text() == (reference / "tokenizer.json").read_text()


# ---- experts and documents


@pytest.mark.slow
def test_a_run_of_experts_logs_their_load(cfg):
    """There is a row for all moe layers every log.every updates, also with expert parallelism."""
    sizes = dict(pattern="dense,moe", n_layers=4, n_experts=4, d_expert=16, router_bias=True)
    few = dict(steps=5, eval_every=0, eval_batches=1, sample_every=5, sample_tokens=4)
    cfg = replace(
        cfg,
        mesh=config.Mesh(2, 2, 2, experts="alltoall"),
        model=replace(cfg.model, **sizes),
        data=replace(cfg.data, document_mask=True),
        train=replace(cfg.train, **few, capacity_factor=1.0, balance_loss=0.01),
        log=replace(cfg.log, every=2),
    )
    state = train.main(cfg)
    run = Path(cfg.run.dir) / cfg.run.name
    moe_rows = rows(run, "moe")
    assert list(moe_rows) == [1, 2, 4, 5]
    for row in moe_rows.values():
        assert row["layer"] == [1, 3]
        np.testing.assert_allclose(np.sum(row["load"], 1), 1, atol=1e-4)
        assert row["dead"] == [sum(share == 0 for share in load) for load in row["load"]]
        assert all(0.9 < b <= 2 and 0 < e <= np.log(4) + 1e-6 for b, e in zip(
            row["balance"], row["entropy"], strict=True))  # fmt: skip
        assert all(0 < share < 0.5 for share in row["dropped"])
    router_bias = np.asarray(state.params["layers"]["moe"]["router_bias_E"])
    assert router_bias.any() and np.abs(router_bias).max() <= 5.01e-3
    assert (run / "samples.jsonl").read_text().count("\n") == 1
    assert (run / "experts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flag, of_data, prompt, stop", [
    (3, 5, 3, 3), (-1, 5, 5, 5), (-1, -1, 0, -1),
])  # fmt: skip
def test_a_sample_begins_and_ends_with_the_runs_end_of_documents(
    flag, of_data, prompt, stop, monkeypatch
):
    """Where none is known it begins with token 0, which is no reason to end there."""

    def answer(params, prompts, n_tokens, cfg, stop_id, **_):
        assert (prompts, stop_id) == ([[prompt]], stop)
        yield prompts

    monkeypatch.setattr(train, "generate", answer)
    source = SimpleNamespace(end_id=of_data, vocab_size=8, decode=str)
    cfg = config.Config(data=config.Data(end_id=flag))
    assert train.sample_row(None, 1, cfg, SimpleNamespace(source=source))["step"] == 1


@pytest.mark.slow
def test_a_document_mask_takes_the_end_of_documents_from_the_manifest(base, tmp_path, capsys):
    for n in range(300):  # documents shorter than a window
        (tmp_path / f"{n}.txt").write_text(f"{n} is a number.")
    out = tmp_path / "data"
    prepare("--input", tmp_path, "--tokenizer", "byte", "--out", out, "--val_fraction", 0.1)
    end_id = json.loads((out / "train" / "manifest.json").read_text())["eot_id"]

    def train_some_updates(name, **data) -> tuple[list[float], int]:
        few = dict(steps=10, eval_batches=1)
        cfg, run = new_run(base, name, mesh=SINGLE, train=few)
        data |= dict(train=str(out / "train"), val=str(out / "val"))
        train.main(replace(cfg, data=replace(cfg.data, **data)))
        return loss_curve(run), json.loads((run / "config.json").read_text())["data"]["end_id"]

    masked = train_some_updates("masked", document_mask=True)
    assert masked == train_some_updates("masked_by_flag", document_mask=True, end_id=end_id)
    assert masked[1] == end_id
    assert "documents in data.train end with" not in capsys.readouterr().err
    train_some_updates("another_end", end_id=3)
    assert "documents in data.train end with token 256, but" in capsys.readouterr().err
    assert abs(train_some_updates("not_masked")[0][-1] - masked[0][-1]) > 1e-3


# ---- numerics


def poison(monkeypatch, cfg, steps, part="gradient"):
    """Make the gradient, or the loss, NaN on the batches of these steps."""
    data = train.Dataset(on_mesh(cfg, cfg.mesh.sizes), "train")
    bad_sums = np.array([int(np.asarray(data.batch(step)[0]).sum()) for step in steps])
    loss_and_grads = train.loss_and_grads

    def with_nan(params, tokens, targets, key, cfg):
        loss, grads, stats = loss_and_grads(params, tokens, targets, key, cfg)
        nan = jnp.where((tokens.sum() == bad_sums).any(), jnp.nan, 0.0)
        if part == "loss":
            return loss + nan, grads, stats
        return loss, jax.tree.map(lambda g: g + nan, grads), stats

    monkeypatch.setattr(train, "loss_and_grads", with_nan)


@pytest.mark.parametrize("part, lr", [
    ("gradient", 0.011), pytest.param("loss", 0.013, marks=SLOW),
])  # fmt: skip
def test_an_update_that_is_not_finite_changes_nothing_but_the_step(
    base, monkeypatch, capsys, part, lr
):
    sections = dict(mesh=SINGLE, train=dict(steps=8), optim=dict(lr=lr), log=dict(norms_every=1))
    cfg, run = new_run(base, f"skip{part}", **sections)
    poison(monkeypatch, cfg, [3], part)
    state = train.main(cfg)
    table = rows(run)
    assert [n for n, row in table.items() if None in (row["loss"], row["grad_norm"])] == [4]
    # The schedule does not count the skipped update.
    assert table[5]["lr"] == table[4]["lr"] > table[3]["lr"]
    assert int(state.step) == 8 and int(state.opt[-1].count) == 7
    norms = rows(run, "norms")
    assert norms[4]["weight"] == norms[3]["weight"] and not any(norms[4]["update"])
    assert None not in norms[4]["update"]
    assert capsys.readouterr().err.count("warning: update 4 skipped") == 1

    resolved = on_mesh(cfg, (1, 1, 1))
    data, want = train.Dataset(resolved, "train"), runstate.init_state(resolved)
    for step in range(8):
        if step == 3:
            want = want._replace(step=want.step + 1)
        else:
            want, _ = train.train_step(want, *data.batch(step), resolved)
    jax.tree.map(np.testing.assert_array_equal, want.params, state.params)


@pytest.mark.slow
def test_ten_bad_updates_in_a_row_end_the_run_with_finite_checkpoints(base, monkeypatch):
    sections = dict(optim=dict(lr=0.012), checkpoint=dict(every=4))
    cfg, run = new_run(base, "diverged", mesh=SINGLE, **sections)
    poison(monkeypatch, cfg, range(5, 20))
    error = refusal(cfg)
    assert error.code == DIVERGED and "6 to 15" in str(error)
    for name, x in final_weights(run).items():
        assert np.isfinite(x).all(), name


def test_a_state_with_a_nan_is_not_saved(base, tmp_path):
    cfg = on_mesh(base, (1, 1, 1))
    state = runstate.init_state(cfg)
    state.params["norm_D"] = state.params["norm_D"].at[3].set(jnp.nan)
    store = checkpoint.Checkpoints(files.absolute_path(str(tmp_path)))
    with pytest.raises(UserError) as error:
        store.save(5, runstate.checkpoint_items(state))
    assert error.value.code == DIVERGED and store.manager.latest_step() is None
