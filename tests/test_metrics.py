"""Rows of metrics.jsonl, console lines, pictures and Weights & Biases."""

import errno
import gc
import io
import json
import os
import re
import shutil
import struct
import sys
import time
import weakref
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import ALL_EXPERTS
from conftest import on_mesh
from etils import epath
from matplotlib.figure import Figure
from runs import open_log

import boards
import config
import files
import metrics
import norm_metrics
import panels
import rowfile
import rundir
import train
from errors import DIVERGED, USAGE, UserError

# ---- rows


def read_rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def line(step, kind="train") -> str:
    return json.dumps(dict(kind=kind, step=step, loss=1.0, grad_norm=1.0)) + "\n"


def test_rows_after_the_checkpoint_and_incomplete_lines_are_dropped(tmp_path, capsys):
    path = epath.Path(tmp_path / "metrics.jsonl")
    kept = line(1) + line(2) + line(2, "eval")
    no_rows = [b"not json\n", b"\xff\n", b"\xef\xbb\xbf" + line(1).encode()]
    path.write_bytes(b"".join([kept.encode(), *no_rows, line(3).encode(), line(4).encode()[:-9]]))
    rows = []
    file = rowfile.RowFile(path, 2, track=rows.append)
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("train", 1), ("train", 2), ("eval", 2)
    ]  # fmt: skip
    warnings = capsys.readouterr().err
    for text in no_rows:
        assert f"dropped a line that is not a row: {text[:60]!r}" in warnings
    file.add(dict(kind="train", step=3))
    assert path.read_text() == kept + '{"kind": "train", "step": 3}\n'


def test_a_file_that_cannot_be_looked_at_is_not_begun_anew(tmp_path, monkeypatch):
    """A disk may fail once; the file was taken for a missing one, and its rows were lost."""
    path = epath.Path(tmp_path / "metrics.jsonl")
    path.write_text(line(1) + line(2))
    answers = [OSError(errno.ESTALE, os.strerror(errno.ESTALE)), *[os.stat(path)] * 4]
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", Mock(side_effect=answers))
        with pytest.raises(OSError, match="Stale"):
            rowfile.RowFile(path, 2)
    assert path.read_text() == line(1) + line(2)


def test_a_name_that_cannot_be_looked_at_is_not_free(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "stat", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(OSError, match="Stale"):
        files.free_name(epath.Path(tmp_path / "run.old"))


@pytest.mark.parametrize("name", ["kind", "step", "loss", "grad_norm", "tokens"])
def test_a_row_without_one_of_its_fields_is_dropped(tmp_path, capsys, name):
    """One flipped bit can change a field's name."""
    cfg = on_mesh(config.tiny(), (1, 1, 1))
    row = dict(kind="train", loss=2.0, grad_norm=1.0, tokens=1)
    lines = [json.dumps(row | dict(step=step)) + "\n" for step in range(1, 4)]
    lines[1] = lines[1].replace(f'"{name}"', f'"_{name}"')
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    open_log(epath.Path(tmp_path), cfg, 3).close()
    warnings = capsys.readouterr().err
    assert f"dropped a line that is not a row: {lines[1].encode()[:60]!r}" in warnings
    assert "lost 1 of the rows up to update 3, from that of update 2 on" in warnings
    assert (tmp_path / "metrics.jsonl").read_text() == lines[0] + lines[2]


@pytest.mark.parametrize("row", [
    dict(kind="train", loss=[2.0], grad_norm=1.0, tokens=1),
    dict(kind="train", loss=2.0, grad_norm=1.0, tokens=None),
    dict(kind="eval", loss="2.0"),
    dict(kind="moe", layer=[], load=[]),
    dict(kind="norms", layer=["a"], gradient=None, update=[1.0], weight=[1.0], logit=[1.0]),
], ids=["loss", "tokens", "eval", "moe", "norms"])  # fmt: skip
def test_a_row_without_its_numbers_is_dropped(tmp_path, capsys, row):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(dict(step=1, **row)) + "\n")
    cfg = on_mesh(ALL_EXPERTS, (1, 1, 1), log=dict(norms_every=1))
    open_log(epath.Path(tmp_path), cfg, 1).close()
    assert "dropped a line that is not a row" in capsys.readouterr().err


def test_the_largest_numbers_of_float32_are_no_damage(tmp_path):
    """As the gradient norm of a run that diverges, whose row a resume would drop."""
    path = epath.Path(tmp_path) / "metrics.jsonl"
    path.write_text(json.dumps(dict(kind="train", step=1, loss=3.4e38, grad_norm=1.8e19)) + "\n")
    assert len(rowfile.read_lines(path, 1)) == 1


def test_lost_rows_are_said(tmp_path, capsys):
    cfg, path = on_mesh(config.tiny(), (1, 1, 1)), epath.Path(tmp_path)
    train_row = dict(kind="train", loss=2.0, grad_norm=1.0, tokens=1)
    rows = [json.dumps(dict(train_row, step=step)) + "\n" for step in range(1, 7)]
    rows.append(json.dumps(dict(kind="eval", step=6, loss=2.0)) + "\n")  # before a first update
    lost = "has lost {} of the rows up to update 6, from"
    cases = [  # the rows that are there, the updates before each start, what is said, and below
        (range(6), [0, 3], ""),
        (range(4, 6), [4, 6], ""),  # a branch with its parent's state, or an average
        ((6,), [6], ""),
        ((), [6], ""),
        ((6,), [], ""),
        ((0, 3), [], lost.format(4)),
        (range(4, 6), [0, 6], lost.format(4)),
        ((), [0, 6], lost.format(6)),
    ]
    cases = [(*case, 0) for case in cases]  # the update after which the run begins
    # A branch from update 4, after a start from 0 that never saved; then without its first row.
    cases += [(range(4, 6), [0, 4], "", 4), ((5,), [0, 4], lost.format(1), 4)]
    for kept, starts, said, begin in cases:
        history = [dict(step=step) for step in starts]
        rundir.write_history(path, history)
        parent = dict(parent=dict(step=begin, start_with="state", tokens=1)) if begin else {}
        (path / "config.json").write_text(json.dumps(parent))
        (path / "metrics.jsonl").write_text("".join(rows[n] for n in kept))
        open_log(path, cfg, 6).close()
        warnings = capsys.readouterr().err
        assert said in warnings and ("lost" in warnings) == bool(said)
    (path / "metrics.jsonl").unlink()
    open_log(path, cfg, 6).close()
    assert lost.format(2) in capsys.readouterr().err


def test_rows_are_written_one_update_late_and_nan_is_null(tmp_path, capsys):
    cfg = on_mesh(config.tiny(), (1, 1, 1), log=dict(every=1))
    log = open_log(tmp_path, cfg, 0)
    names = ("loss", "grad_norm", "lr", "entropy")
    log.add_update(1, dict(zip(names, jnp.float32([2, 1, 0.1, 3]), strict=True)))
    assert not (tmp_path / "metrics.jsonl").exists()
    log.add_update(2, dict(zip(names, jnp.float32([jnp.nan, jnp.inf, 0.1, jnp.nan]), strict=True)))
    assert len(read_rows(tmp_path)) == 1
    log.close()
    last = read_rows(tmp_path)[1]
    assert last["step"] == 2 and [last[name] for name in names if name != "lr"] == [None] * 3
    printed = capsys.readouterr()
    assert "update 1/20  loss 2.0000  grad norm 1.000  lr 1.00e-01  entropy 3  " in printed.out
    assert "eta" in printed.out and "warning: update 2 skipped" in printed.err


def test_the_time_left_counts_evaluations_and_not_compiling(tmp_path, monkeypatch, capsys):
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    cfg = on_mesh(config.tiny(), (1, 1, 1), log=dict(every=1))
    scalars = {name: jnp.float32(1) for name in ("loss", "grad_norm", "lr")}
    log = open_log(tmp_path, cfg, 10)
    monkeypatch.setattr(log.past, "draw", lambda run: wait(1))
    log.run_untimed(wait, 1000)  # compiling
    log.run_untimed(wait, 100)  # the first checkpoint

    def evaluate(seconds):
        wait(seconds)

    for step in (11, 12, 13):
        log.add_update(step, scalars)
        wait(2)
        if step > 11:
            log.run_untimed(evaluate, 8 if step == 12 else 4)
            log.add_evaluation(step, dict(loss=1.0, bits_per_byte=1.0, tokens=1))
    log.add_update(14, scalars)
    wait(2)
    log.close()
    # 9 and 8 updates of 2 s, then 7 of 7 / 3, with one draw, and 6 of 14 / 4, with an evaluation.
    assert re.findall(r"eta (\S+)", capsys.readouterr().out) == ["18s", "16s", "16s", "21s"]
    updates = [row for row in read_rows(tmp_path) if row["kind"] == "train"]
    assert [row["step_time"] for row in updates] == [2, 2, 2, 2]


def test_each_set_and_each_score_has_its_curve(tmp_path, monkeypatch):
    figures, row = [], {"c/accuracy": 0.5, "c/centred_accuracy": 0.0, "c/file/accuracy": 0.5}
    monkeypatch.setattr(metrics, "write_png", lambda path, figure: figures.append(figure))
    losses = {1: 3.0, 2: None, 3: 2.0}, dict(a={3: 2.5}, b={2: 4.0, 3: 1.5})
    metrics.draw_loss(epath.Path(tmp_path / "loss.png"), *losses, {3: row})
    lines = [line for axes in figures[0].axes for line in axes.lines]
    assert {line.get_label(): line.get_xydata().tolist() for line in lines} == {
        "train": [[1, 3], [3, 2]],
        "validation a": [[3, 2.5]],
        "validation b": [[2, 4], [3, 1.5]],
        "c/accuracy": [[3, 0.5]],
        "c/centred accuracy": [[3, 0]],
    }


def test_the_curve_is_drawn(tmp_path):
    path = epath.Path(tmp_path / "loss.png")
    metrics.draw_loss(path, {1: 3.0, 2: None, 3: 2.0}, {"": {3: 2.5}, "code": {}}, {})
    assert path.read_bytes()[:4] == b"\x89PNG"
    metrics.draw_loss(path, {}, {"": {}}, {})


def test_the_legend_of_many_sets_hides_no_curve(tmp_path, monkeypatch):
    figures, losses = [], {1: 3.0, 2: 2.0}
    monkeypatch.setattr(metrics, "write_png", lambda path, figure: figures.append(figure))
    metrics.draw_loss(epath.Path(tmp_path), losses, {f"set {n}": losses for n in range(40)}, {})
    figures[0].draw_without_rendering()
    (axes,) = figures[0].axes
    assert axes.get_window_extent().x1 < axes.get_legend().get_window_extent().x0
    assert len({str(line.get_color()) for line in axes.lines}) == 41


def test_a_run_goes_on_without_the_package_of_its_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log = open_log(tmp_path, on_mesh(config.tiny()), 0)
    log.add_evaluation(1, dict(loss=1.0, bits_per_byte=1.0, tokens=1))
    assert "warning: no pictures (ModuleNotFoundError: import of" in capsys.readouterr().err


def test_pictures_are_freed(tmp_path, monkeypatch):
    """Each holds its pixels, and matplotlib refers to some until it draws the next."""
    figures, write_png = [], panels.write_png
    monkeypatch.setattr(panels, "write_png", lambda path, x: write_png(path, note(x)))

    def note(figure):
        figures.append(weakref.ref(figure))
        return figure

    cfg = on_mesh(config.tiny())
    log, n = open_log(tmp_path, cfg, 0), len(norm_metrics.layer_names(cfg))
    norms = dict(gradient=[1.0] * n, update=[1.0] * n, weight=[1.0] * n, logit=[1.0] * 8)
    gc.disable()  # cli.start makes it run as seldom
    try:
        for step in range(1, 5):
            log.past.track(dict(kind="norms", step=step) | norms)
            log.add_evaluation(step, dict(loss=1.0, bits_per_byte=1.0, tokens=1))
    finally:
        gc.enable()
    assert len(figures) == 4 and not any(figure() for figure in figures[:2])


# ---- Weights & Biases


def read_history(run: Path) -> list[dict]:
    """The rows in a .wandb file (a LevelDB log of protobuf records)."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    raw, at, records, part = path.read_bytes(), 7, [], b""
    while at < len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        part += raw[at + 7 : at + 7 + size]
        if kind in (1, 4):  # a whole record, or its last part
            records.append(Record.FromString(part))
            part = b""
        at += 7 + size
    items = [r.history.item for r in records if r.HasField("history")]

    def name(item):
        return item.key or "/".join(item.nested_key)

    return [{name(i): json.loads(i.value_json) for i in row} for row in items]


def wait_for_history(run: Path, n_rows: int) -> list[dict]:
    """read_history, once wandb's own process has written that many rows."""
    deadline = time.monotonic() + 20
    while len(history := read_history(run)) < n_rows and time.monotonic() < deadline:
        time.sleep(0.1)
    return history


def add_norm_to_step(patch: pytest.MonkeyPatch):
    """Make train_step return one more scalar: the whole edit that a new metric needs."""
    real_step = train.train_step

    @partial(jax.jit, static_argnames="cfg")
    def train_step(state, tokens_AMBL, targets_AMBL, cfg):
        state, values = real_step(state, tokens_AMBL, targets_AMBL, cfg)
        return state, values | dict(param_norm=optax.tree.norm(state.params))

    patch.setattr(train, "train_step", train_step)


@pytest.fixture(scope="session")
def run(corpus, tmp_path_factory) -> SimpleNamespace:
    """A run with experts and with that scalar: its cfg, last state, folder, rows, printed text and
    rows at Weights & Biases, which log.wandb=online writes to a file where there is no key."""
    tiny, folder, printed = config.tiny(), tmp_path_factory.mktemp("reported"), io.StringIO()
    cfg = replace(
        tiny,
        run=replace(tiny.run, dir=str(folder)),
        mesh=config.Mesh(1, 1, 1),
        data=config.Data(train=str(corpus / "train"), val=str(corpus / "val")),
        model=replace(tiny.model, n_layers=2, pattern="dense,moe", n_experts=4, d_expert=16),
        train=replace(tiny.train, steps=4, eval_every=2, eval_batches=1),
        optim=replace(tiny.optim, warmup_steps=1),
        log=config.Log(wandb="online", every=2),
    )
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setenv("NETRC", str(folder / "none"))
        patch.setenv("HOME", str(folder))
        add_norm_to_step(patch)
        state = train.main(cfg)
    path = folder / cfg.run.name
    rows = read_rows(path)
    sent = wait_for_history(path, len(rows))
    return SimpleNamespace(
        cfg=cfg, state=state, path=path, rows=rows, printed=printed.getvalue(), sent=sent
    )


def test_wandb_gets_the_same_rows_offline_without_a_key(run):
    for kind in ("train", "eval"):
        sent = [(row["step"], row[f"{kind}/loss"]) for row in run.sent if f"{kind}/loss" in row]
        assert sent == [(row["step"], row["loss"]) for row in run.rows if row["kind"] == kind]
    run_id = json.loads((run.path / "config.json").read_text())["run_id"]
    assert next(run.path.glob("wandb/offline-run-*")).name.endswith(run_id)


def test_wandb_changes_no_weight(run, monkeypatch):
    add_norm_to_step(monkeypatch)
    log = replace(run.cfg.log, wandb="off")
    plain = train.main(replace(run.cfg, log=log, run=replace(run.cfg.run, name="plain")))
    jax.tree.map(np.testing.assert_array_equal, plain, run.state)


def test_wandb_that_fails_never_stops_a_run_unless_required(cfg, monkeypatch, tmp_path, capsys):
    import wandb

    def fail(**_):
        raise OSError("no route to host")

    monkeypatch.setattr(wandb, "init", fail)
    cfg = on_mesh(cfg)
    offline, required = (replace(cfg, log=config.Log(wandb=w)) for w in ("offline", "required"))
    (tmp_path / "config.json").write_text('{"run_id": "x"}')
    assert boards.start_wandb(epath.Path(tmp_path), offline) is None
    assert "wandb is off (OSError: no route to host)" in capsys.readouterr().err
    monkeypatch.setattr(boards, "has_wandb_key", lambda: True)
    with pytest.raises(UserError, match="did not start: OSError: no route to host") as error:
        boards.start_wandb(epath.Path(tmp_path), required)
    assert error.value.code == USAGE
    monkeypatch.setattr(boards, "has_wandb_key", lambda: False)
    with pytest.raises(UserError, match="no API key"):
        boards.start_wandb(epath.Path(tmp_path), required)


def test_a_key_of_a_server_of_ones_own_is_found_as_wandb_finds_it(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "keys"))
    assert not boards.has_wandb_key()
    (tmp_path / "keys").write_text("machine wandb.lab:8080 login user password " + "0" * 40)
    assert not boards.has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.lab:8080")
    assert boards.has_wandb_key()


@pytest.mark.parametrize("chosen, env, mode", [
    ("online", "offline", "offline"), ("online", "disabled", None), ("online", "", "online"),
    ("required", "offline", "online"), ("offline", "online", "offline"), ("off", "online", None),
])  # fmt: skip
def test_wandb_stays_offline_where_the_machine_says_so(cfg, monkeypatch, chosen, env, mode):
    """As on a cluster without a network, where each start would wait for it in vain."""
    monkeypatch.setenv("WANDB_MODE", env)
    monkeypatch.setattr(boards, "has_wandb_key", lambda: True)
    monkeypatch.setattr(boards, "init_wandb", lambda run, cfg, mode: mode)
    assert boards.start_wandb(None, replace(cfg, log=config.Log(wandb=chosen))) == mode


def test_a_run_ends_20_s_after_its_last_update_where_the_network_of_wandb_is_gone(
    run, monkeypatch, capsys
):
    import wandb

    class Session:
        def define_metric(self, *_, **__):
            pass

        def finish(self):
            raise TimeoutError("Timed out finishing run.")

    given = {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or Session())
    board = boards.Wandb(boards.init_wandb(epath.Path(run.path), run.cfg, "online"))
    assert 0 < given["settings"].finish_timeout <= 20 and given["settings"].finish_timeout_raises
    board.close()
    assert "wandb did not finish (TimeoutError: Timed out" in capsys.readouterr().err


# ---- the seam: what the step returns is reported without a line elsewhere


def test_a_scalar_that_the_step_returns_is_in_every_report(run):
    norms = {row["step"]: row["param_norm"] for row in run.rows if row["kind"] == "train"}
    assert list(norms) == [1, 2, 3, 4]
    assert norms[4] == pytest.approx(float(optax.tree.norm(run.state.params)), rel=1e-6)
    for step in (1, 2, 4):
        words = rf"update {step}/4  loss .*  lr \S+  param_norm {re.escape(f'{norms[step]:.4g}')}  "
        assert re.search(words, run.printed), run.printed
    assert [r["train/param_norm"] for r in run.sent if "train/loss" in r] == list(norms.values())


def test_the_start_says_each_phase_with_its_time(run):
    phases = "data", "initial state", "compiled", "first checkpoint"
    lines = [rf"(?<=\n){phase} in [\dm. ]+s.*\n" for phase in phases]
    assert re.search(".*".join([*lines, "update 1/4"]), "\n" + run.printed, re.S), run.printed


def test_the_panel_of_the_experts_is_in_every_report(run):
    rows = {row["step"]: row for row in run.rows if row["kind"] == "moe"}
    assert list(rows) == [1, 2, 4]
    for step, row in rows.items():
        busiest = re.escape(f"busiest expert {4 * max(row['load'][0]):.1f}x, {row['dead'][0]} dead")
        assert re.search(rf"update {step}/4  .*  mfu -  {busiest}.*  eta", run.printed), run.printed
    sent = [row for row in run.sent if "moe/load/layer1" in row]
    assert [r["moe/load/layer1"] for r in sent] == [max(r["load"][0]) for r in rows.values()]
    for name in ("balance", "dead", "dropped", "entropy"):
        assert [r[f"moe/{name}/layer1"] for r in sent] == [r[name][0] for r in rows.values()]
    assert (run.path / "experts.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_replaced_whole(tmp_path):
    """Somebody may look at it, or the disk be full."""
    path, link = epath.Path(tmp_path / "loss.png"), tmp_path / "link.png"
    path.write_bytes(b"the last one")
    os.link(path, link)
    panels.write_png(path, Figure())
    assert path.read_bytes()[1:4] == b"PNG" and link.read_bytes() == b"the last one"


def test_experts_have_whole_numbers_on_the_axis_of_their_picture(tmp_path, monkeypatch):
    figures, cfg = [], config.PRESETS["jaxformer_1b"]()
    monkeypatch.setattr(panels, "write_png", lambda path, figure: figures.append(figure))
    panel = panels.ExpertsPanel(cfg)
    panel.track(dict(step=1, load=[[0.25] * 4] * len(panel.layers)))
    panel.draw(tmp_path)
    figures[0].draw_without_rendering()
    assert all(x.is_integer() for x in figures[0].axes[0].get_xticks())


def test_a_panel_is_one_entry_in_a_table(tmp_path, monkeypatch, capsys):
    class LayersPanel(panels.Panel):
        """A panel of one array: the norm of each layer."""

        def __init__(self, cfg):
            super().__init__(cfg)
            self.steps = []

        def row(self, arrays):
            return dict(norm=arrays["norm"].tolist())

        def summary(self, arrays):
            return f"largest layer {arrays['norm'].max():.1f}"

        def track(self, row):
            self.steps.append(row["step"])

        @staticmethod
        def board_fields(row):
            return {f"norm/layer{i}": x for i, x in enumerate(row["norm"])}

        def draw(self, run):
            (run / "layers.txt").write_text(f"{self.steps}")

    monkeypatch.setitem(panels.PANELS, "layers", LayersPanel)
    sent = []

    class Session:
        log, finish = sent.append, lambda: None

    monkeypatch.setattr(boards, "start_wandb", lambda run, cfg: Session)
    cfg = on_mesh(config.tiny(), (1, 1, 1), log=dict(every=10))
    for first in (0, 1):  # a run and its resume
        log = open_log(tmp_path, cfg, first)
        scalars = {name: jnp.float32(1) for name in ("loss", "grad_norm", "lr")}
        log.add_update(first + 1, scalars | dict(layers=dict(norm=jnp.float32([1, 2]))))
        log.close()
    assert [row for row in read_rows(tmp_path) if row["kind"] == "layers"] == [
        dict(kind="layers", step=step, norm=[1.0, 2.0]) for step in (1, 2)
    ]
    assert capsys.readouterr().out.count("mfu -  largest layer 2.0  eta") == 2
    assert sent[1] == {"layers/norm/layer0": 1.0, "layers/norm/layer1": 2.0, "step": 1}
    log.add_evaluation(2, dict(loss=1.0, bits_per_byte=None, tokens=1))
    assert (tmp_path / "layers.txt").read_text() == "[1, 2]"


def read_scalars(run: Path) -> dict:
    """{(name, step): value} as TensorBoard shows them: a file that begins with a later start takes
    back what older ones have from its first update on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = {}
    for path in sorted(run.glob("tensorboard/*"), key=lambda path: path.stat().st_ctime_ns):
        data = path.read_bytes()
        while data:
            (n,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + n]), data[16 + n :]
            if event.session_log.status == SessionLog.START:
                found = {key: x for key, x in found.items() if key[1] < event.step}
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


def test_wandb_is_told_of_a_rollback_but_not_of_restarts_after_it(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(boards, "start_wandb", lambda run, cfg: SimpleNamespace(log=sent.append))
    cfg = replace(config.tiny(), rollback=5)
    for step in (4, 8):  # from the checkpoint of update 4, and after a crash from that of update 8
        boards.open_boards(epath.Path(tmp_path), cfg, step)
    boards.open_boards(epath.Path(tmp_path), replace(cfg, rollback=-1), 0)
    assert sent == [{"rollback/to": 4, "step": 4}]


def test_wandb_whose_own_process_has_ended_is_off_with_one_warning(capsys):
    def fail(*_):
        raise ConnectionResetError("Connection lost")

    board = boards.Wandb(SimpleNamespace(log=fail, finish=fail))
    for step in (1, 2):
        board.send(dict(kind="train", step=step, loss=1.0))
    board.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "wandb is off (ConnectionResetError: Connection lost)" in line


def test_wandb_gets_a_histogram_of_norms_and_tensorboard_no_wandb():
    sent, sizes = [], {name: [1.0, None] for name in panels.SIZES}
    row = dict(kind="norms", step=1, layer=["layer 1", "layer 2"], **sizes)
    assert boards.row_fields(row)["norms/weight_histogram"] == [1.0]
    boards.Wandb(SimpleNamespace(log=sent.append)).send(row)
    assert sum(sent[0]["norms/weight_histogram"].histogram) == 1
    assert sent[0]["norms/weight/layer 1"] == 1 and sent[0]["step"] == 1


def test_tensorboard_has_the_numbers_of_the_rows_also_after_a_resume(tmp_path):
    sections = dict(log=dict(wandb="off", tensorboard=True, norms_every=1))
    cfg = on_mesh(config.tiny(), (1, 1, 1), **sections)
    norms = {name: jnp.arange(4.0) for name in panels.SIZES}
    for first, last in ((0, 3), (1, 2)):  # the resume makes update 2 again
        log = open_log(tmp_path, cfg, first)
        for step in range(first + 1, last + 1):
            scalars = {name: jnp.float32(last + step) for name in ("grad_norm", "lr")}
            log.add_update(step, scalars | dict(loss=jnp.float32(jnp.nan), norms=norms))
        log.flush()
        log.add_evaluation(last, dict(set="web", loss=float(last), bits_per_byte=None, tokens=7))
        log.close()
    expected = {}
    for row in read_rows(tmp_path):
        for name, x in boards.row_fields(row).items():
            if isinstance(x, float | int):
                expected[name.replace(" ", "_"), row["step"]] = pytest.approx(x)
    found = read_scalars(tmp_path)
    assert found == expected
    assert found["train/lr", 2] == 4 and found["val/web", 2] == 2 and ("train/lr", 3) not in found
    assert ("train/loss", 1) not in found and found["norms/weight/layer_1", 1] == 1


def test_tensorboard_that_cannot_start_ends_no_run(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("")
    cfg = on_mesh(config.tiny(), (1, 1, 1), log=dict(wandb="off", tensorboard=True))
    assert boards.open_boards(epath.Path(tmp_path), cfg, 0) == []
    assert "warning: tensorboard is off (FileExistsError" in capsys.readouterr().err


def test_tensorboard_has_the_tokens_of_each_source_also_in_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(boards, "local_folder", lambda path: tmp_path / "local")
    monkeypatch.setattr(boards, "upload_folder", partial(shutil.copytree, dirs_exist_ok=True))
    board = boards.TensorBoard(epath.Path(tmp_path), 0)
    board.send(dict(kind="train", step=1, tokens=8, tokens_by_source=dict(web=5, code=3)))
    board.upload()
    board.close()
    counts = {("train/tokens_by_source/web", 1): 5, ("train/tokens_by_source/code", 1): 3}
    assert read_scalars(tmp_path) == {("train/tokens", 1): 8} | counts


@pytest.mark.usefixtures("time_limit")
def test_a_full_disk_turns_tensorboard_off_and_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    full = Path("/dev/full")
    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: full.open("wb"))
    board = boards.TensorBoard(epath.Path(tmp_path), 0)
    for step in range(1, 500):
        board.send(dict(kind="train", step=step, loss=1.0))
    board.close()
    assert capsys.readouterr().err.count("tensorboard is off (OSError: [Errno 28] No space") == 1


def test_tensorboard_shows_rows_while_the_run_trains(tmp_path):
    board = boards.TensorBoard(epath.Path(tmp_path), 0)
    for step in (1, 2):
        board.flush_at = 0
        board.send(dict(kind="train", step=step, loss=1.0))
        assert len(read_scalars(tmp_path)) == step


def test_the_rows_of_a_divergence_are_sent_before_the_run_ends(tmp_path):
    cfg = on_mesh(config.tiny(), log=dict(wandb="off", tensorboard=True))
    log, scalars = open_log(tmp_path, cfg, 0), dict(loss=jnp.nan, grad_norm=1.0, lr=0.5)
    with pytest.raises(UserError) as error:
        for step in range(1, 100):
            log.add_update(step, {name: jnp.float32(x) for name, x in scalars.items()})
    assert error.value.code == DIVERGED
    assert read_scalars(tmp_path)["train/lr", metrics.MetricsLog.MAX_SKIPS] == 0.5


def test_tensorboard_does_not_hide_that_storage_fails(tmp_path, monkeypatch):
    log = open_log(tmp_path, on_mesh(config.tiny(), log=dict(wandb="off", tensorboard=True)), 0)
    with monkeypatch.context() as patch:
        patch.setattr(log.metrics_file, "append", Mock(side_effect=OSError("disk full")))
        log.metrics_file.patience = 60
        log.write(dict(kind="eval", step=0, loss=1.0))
        log.upload()
    assert log.metrics_file.failing_since is not None
    log.close()
    assert len(read_rows(tmp_path)) == 1


@pytest.mark.usefixtures("time_limit")
def test_rows_wait_for_storage_that_fails_for_a_while(tmp_path, monkeypatch, capsys):
    """Where the folder does not exist yet, locally and as on an object store."""
    for remote in (False, True):
        monkeypatch.setattr(rowfile, "is_remote", lambda path, remote=remote: remote)
        if remote:
            monkeypatch.setattr(rowfile, "local_folder", lambda path: epath.Path(tmp_path))
        path = epath.Path(tmp_path / f"{remote}" / "metrics.jsonl")
        rows = rowfile.RowFile(path, 0, patience=1.5)
        for step in (1, 2):
            rows.add(dict(step=step))
            rows.upload()
        assert capsys.readouterr().err.count("was not written (FileNotFoundError") == 1
        with pytest.raises(FileNotFoundError):
            rows.close()
        path.parent.mkdir()
        rows.close()
        assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
