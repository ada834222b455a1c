"""Profiling: the mesh axes of collectives, a ledger whose rows add up, and a run's files."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import on_mesh
from etils import epath
from jax import lax
from jax.sharding import PartitionSpec as P
from runs import losses, new_run

import cli
import profiling
import train
import utils
from errors import USAGE, UserError

# ---- which mesh axes a collective joins


def shift(x, axis):
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


COLLECTIVES = dict(
    psum=lax.psum,
    gather=lambda x, axes: lax.all_gather(x, axes, tiled=True),
    scatter=lambda x, axes: lax.psum_scatter(x, axes, tiled=True),
    permute=shift,
)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (4, 1, 2), (1, 2, 4)])
@pytest.mark.parametrize("name, axes", [
    ("psum", "dp"), ("psum", "pp"), ("psum", "tp"), ("psum", "dp+tp"), ("psum", "dp+pp+tp"),
    ("gather", "dp"), ("scatter", "tp"), ("gather", "dp+pp"), ("permute", "pp"), ("permute", "tp"),
])  # fmt: skip
def test_a_compiled_collective_joins_the_axes_it_was_written_over(cfg, mesh, name, axes):
    on_mesh(cfg, mesh)
    names = tuple(axes.split("+"))

    def per_device(x):
        return COLLECTIVES[name](jnp.sin(x), names if len(names) > 1 else names[0])

    f = jax.shard_map(per_device, in_specs=P(utils.AXES), out_specs=P(utils.AXES))
    classes = profiling.op_classes(jax.jit(f).lower(jnp.ones(64)).compile().as_text(), mesh)
    size = dict(zip(utils.AXES, mesh, strict=True))
    wide = "+".join(axis for axis in names if size[axis] > 1)
    assert set(classes.values()) - {"compute", ""} == {wide} - {""}


@pytest.mark.parametrize("groups, axes", [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tp"),
    ("replica_groups={}", "dp+pp+tp"),
    ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", "compute"),
    ("source_target_pairs={{0,2},{2,0},{1,3},{3,1}}", "pp"),
    ("replica_groups=[4,2]<=[8]", "tp"),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", "dp"),
    ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", "pp"),
    ("replica_groups=mesh['dp'=2,'pp'=2,'tp'=2] {'dp','tp'}", "dp+tp"),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", "dp"),
    ("replica_groups=mesh['a'=4,'b'=2], device_ids=([8]) {'a'}", "dp+pp"),
    ("replica_groups=mesh['a'=8] {'a':(2)2}", "unknown axes"),
])  # fmt: skip
def test_every_form_of_groups_is_parsed_or_called_unknown(groups, axes):
    line = f"  %x.1 = (f32[8]{{0:T(256)}}, f32[]) all-reduce(%y), channel_id=1, {groups}, a={{}}"
    assert profiling.op_classes(line, (2, 2, 2)) == {"x.1": axes}


# ---- the ledger

HLO = """HloModule jit_train_step, is_scheduled=true
%pieces (p: f32[8]) -> f32[16] {
  ROOT %all-gather.9 = f32[16]{0} all-gather(%p), replica_groups={{0},{1}}, dimensions={0}
}
%gather (p: f32[8]) -> f32[16] {
  ROOT %all-gather.1 = f32[16]{0} all-gather(%p), replica_groups=[1,2]<=[2], dimensions={0}
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, calls=%f
  %loop = f32[8]{0} while(%fusion.1), condition=%c, body=%b
  %send = f32[8]{0} collective-permute(%loop), source_target_pairs={{0,1},{1,0}}
  %all-gather-start = f32[8]{0} async-start(%send), calls=%gather
  %all-gather-done = f32[8]{0} async-done(%all-gather-start)
  ROOT %fusion.2 = f32[8]{0} fusion(%all-gather-done), kind=kLoop, calls=%f
}
"""
A, B = (0, "jit_train_step"), (1, "jit_train_step")
# (device, module), op, start, stop in ms: two updates from 100 to 200 on (1, 2, 1).
OPS = [
    (A, "fusion.0", 40, 90),  # before the first update
    (A, "fusion.1", 95, 110),  # 10 ms of it after the start: compute
    (A, "loop", 100, 190),  # control flow does not count
    (A, "send", 110, 140),  # 10 ms while B computes: bubble; 20 ms with B: collective
    (B, "fusion.1", 100, 120),
    (B, "send", 120, 140),
    (A, "all-gather-start", 140, 150),  # B is idle
    (A, "fusion.2", 145, 160),  # hides 5 ms of the gather
    (B, "fusion.2", 150, 160),
    ((0, "jit_eval_step"), "fusion.1", 160, 170),  # B is idle
]
WANT = dict(  # ms of A and B together
    compute=10 + 15 + 20 + 10,
    bubble=10,
    pp=20 + 20 + 5,
    other=10,
    idle=10 + 10,
    data=20,  # 175 to 185, both
    gap=40,
)


def profile_data(kind: str) -> SimpleNamespace:
    """OPS as a trace of a CPU, GPU or TPU shows them."""

    def event(name, start, stop, **stats):
        return SimpleNamespace(name=name, start_ns=start * 1e6, end_ns=stop * 1e6, stats=stats)

    def line(name, *events):
        return SimpleNamespace(name=name, events=events)

    host = [event("update", 100, 150), event("update", 150, 200), event("data wait", 175, 185)]
    host += [event("data wait", 105, 120)]  # hidden by work
    planes = {"/host:CPU": [line("python", *host)]}
    for n, ((device, module), op, start, stop) in enumerate(OPS):
        stats = dict(hlo_op=op, hlo_module=module)
        if kind == "CPU":
            stats |= dict(device_ordinal=device, _p=n)
            ops = [event(op, start, start + 1, **stats), event(f"end: {op}", stop, stop, _c=n)]
            planes["/host:CPU"].append(line(f"thread {n % 3}", *ops))
            continue
        plane = planes.setdefault(f"/device:{kind}:{device}", [line("Steps", event("0", 0, 300))])
        if kind == "GPU":
            plane.append(line(f"Stream #{n % 3}", event("kernel", start, stop, **stats)))
        else:
            stats = {} if module == "jit_train_step" else dict(hlo_module=module)
            plane.append(line("XLA Ops", event(f"%{op} = f32[8] op()", start, stop, **stats)))
            plane.append(line("Async XLA Ops", event(f"%{op} = f32[8] op()", 0, 300)))
    planes = [SimpleNamespace(name=name, lines=lines) for name, lines in planes.items()]
    return SimpleNamespace(planes=planes)


@pytest.mark.parametrize("kind", ["CPU", "GPU", "TPU"])
def test_each_moment_of_a_device_is_in_one_row(kind):
    rows = profiling.ledger(profile_data(kind), HLO, (1, 2, 1))
    names = dict(zip(WANT, rows, strict=True))
    assert {name: rows[row] for name, row in names.items()} == pytest.approx(
        {name: ms / 2 / 2 for name, ms in WANT.items()}  # devices, updates
    )
    assert names["pp"] == "collectives over pp" and names["gap"] == "host gap"
    assert sum(rows.values()) == pytest.approx(50)


def test_the_rows_of_any_trace_add_up_to_its_wall_time():
    """Random ops overlap each other and the updates' ends.  The compute row is the length of the
    union of its intervals."""
    rng = np.random.default_rng(0)
    data, union = profile_data("GPU"), 0.0
    for plane in data.planes[1:]:
        plane.lines.clear()
        done = 100e6
        for start in np.sort(rng.uniform(0, 250e6, 3000)):
            op = str(rng.choice(["fusion.1", "send", "all-gather-done", "loop"]))
            stats, end = dict(hlo_op=op, hlo_module="jit_train_step"), start + rng.exponential(1e5)
            event = SimpleNamespace(name=op, start_ns=start, end_ns=end, stats=stats)
            plane.lines.append(SimpleNamespace(name="Stream #1", events=[event]))
            if op == "fusion.1":
                union += max(0, min(end, 200e6) - max(start, done))
                done = max(done, end)
    rows = profiling.ledger(data, HLO, (1, 2, 1))
    assert sum(rows.values()) == pytest.approx(50) and min(rows.values()) >= 0
    assert rows["compute"] == pytest.approx(union / 1e6 / 2 / 2)


def test_a_trace_without_a_device_gives_no_ledger():
    data = profile_data("GPU")
    assert profiling.ledger(SimpleNamespace(planes=data.planes[:1]), HLO, (1, 2, 1)) == {}


# ---- the files of a run


@pytest.mark.slow
def test_a_run_writes_trace_ledger_and_program_and_compiles_once(cfg, capsys):
    compiled = []

    def count(name, seconds, fun_name="", **_):
        if name.endswith("backend_compile_duration") and "train_step" in fun_name:
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(count)
    sections = dict(train=dict(steps=6, eval_batches=1, profile=(3, 2)), log=dict(hlo=True))
    cfg = on_mesh(cfg, (2, 2, 2), model=dict(n_layers=2), **sections)
    train.main(cfg)
    jax.monitoring.unregister_event_duration_listener(count)
    assert len(compiled) == 1

    run = Path(cfg.run.dir) / cfg.run.name
    assert (run / "step.hlo.txt").read_text().startswith("HloModule jit_train_step")
    assert ElementTree.parse(run / "step.svg").getroot().tag.endswith("svg")
    (trace,) = run.glob("profile/plugins/profile/*/*.xplane.pb")
    text = (run / "profile" / "ledger.txt").read_text()
    assert text in capsys.readouterr().out and text.startswith("updates 3 to 4")
    ms = {row: float(x) for row, x in re.findall(r"^  (\S.*?) +([\d.]+) +[\d.]+%$", text, re.M)}
    wall = ms.pop("all")
    assert sum(ms.values()) == pytest.approx(wall, abs=0.01)
    assert {f"collectives over {axis}" for axis in ("dp", "pp", "tp")} < set(ms)
    assert ms["compute"] > 0 and ms["other programs"] == 0

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [row["step_time"] for row in lines if row["kind"] == "train" and row["step"] in (3, 4)]
    assert wall * 2 == pytest.approx(sum(timed) * 1e3, rel=0.25)
    data = jax.profiler.ProfileData.from_file(str(trace))
    devices, marks = profiling.read_trace(data)
    assert len(devices) == 8 and len(marks["update"]) == 2
    assert len(marks["data wait"]) == 1  # between the two updates


class Log:
    """What Profile uses of a MetricsLog."""

    def run_untimed(self, f):
        f()

    def flush(self):
        pass


def profile_updates(cfg, tmp_path, steps) -> Path:
    """Profile updates that do nothing; returns the folder of the trace."""
    profile, log = profiling.Profile(epath.Path(tmp_path), None, None, cfg, steps[0] - 1), Log()
    for step in steps:
        with profile.trace_update(step, log):
            pass
    profile.report()
    return tmp_path / "profile"


def test_a_resumed_run_traces_nothing_and_a_stopped_one_has_no_ledger(cfg, tmp_path, capsys):
    cfg = replace(cfg, train=replace(cfg.train, profile=(2, 3)))
    assert not profile_updates(cfg, tmp_path, range(3, 6)).exists()
    assert "2 3 traces nothing, as the run has already made 2 updates" in capsys.readouterr().err
    stopped = profile_updates(cfg, tmp_path, range(1, 4))
    profile_updates(cfg, tmp_path, range(6, 7))  # there is a trace already
    assert not capsys.readouterr().err
    assert [*stopped.glob("plugins/profile/*/*.xplane.pb")]
    assert not (stopped / "ledger.txt").exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_run(cfg, tmp_path, monkeypatch, capsys):
    cfg = replace(cfg, train=replace(cfg.train, profile=(2, 1)))
    stop_trace = jax.profiler.stop_trace

    def fail():
        stop_trace()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    folder = profile_updates(cfg, tmp_path, range(1, 4))
    assert not (folder / "ledger.txt").exists()
    assert capsys.readouterr().err.count("profile was not written (Jax") == 1


@pytest.mark.parametrize("window", ["0 1", "3 0", "-1 2", "20 2", "1 21"])
def test_updates_outside_of_the_run_are_refused(window):
    with pytest.raises(UserError) as error:
        cli.parse(["--config", "tiny", "--train.profile", *window.split()])
    assert error.value.code == USAGE
    (problem,) = error.value.problems
    assert f"train.profile={window}" in problem.what and "train.steps=20" in problem.what


@pytest.mark.parametrize("window", ["0 0", "1 20", "20 1"])
def test_a_config_file_keeps_the_updates_to_profile(window, tmp_path):
    cfg = cli.parse(["--config", "tiny", "--train.profile", *window.split()])
    (tmp_path / "config.json").write_text(cli.to_json(cfg))
    assert cli.parse(["--config", str(tmp_path / "config.json")]) == cfg


@pytest.mark.parametrize("value", [["--fresh"], [[1], 2], [None, 1], "1"])
def test_a_config_file_cannot_pass_flags_in_place_of_updates(value, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(train=dict(profile=value))))
    with pytest.raises((UserError, SystemExit)) as error:
        cli.parse(["--config", str(path)])
    assert error.value.code == USAGE


# ---- compiling again with the times of a trace


@pytest.mark.slow
def test_a_run_that_learned_from_a_trace_computes_the_same(base, monkeypatch, capsys):
    """The times are made up, because only an NVIDIA GPU's trace has them."""
    given, compile_program = [], utils.compile_program

    def note(*args, times=b""):
        given.append(times)
        return compile_program(*args, times=times)

    monkeypatch.setattr(utils, "compile_program", note)
    sections = dict(train=dict(steps=6, eval_every=0, eval_batches=1), mesh=dict(dp=2, pp=2, tp=2))
    plain, plain_run = new_run(base, "plain-pgle", **sections)
    train.main(plain)
    sections["train"] |= dict(pgle=True)
    without, without_run = new_run(base, "without-pgle", **sections)
    train.main(without)
    assert given == [b"", b""] and "train.pgle has no effect on cpu" in capsys.readouterr().err

    monkeypatch.setattr(profiling, "learns_from_traces", lambda: True)
    monkeypatch.setattr(profiling, "get_profiled_instructions_proto", lambda _: b"times")
    learned, learned_run = new_run(base, "with-pgle", **sections)
    train.main(learned)
    assert given == [b"", b"", b"", b"times"]
    assert losses(plain_run) == losses(without_run) == losses(learned_run)
    assert (learned_run / "profile" / "ledger.txt").read_text().startswith("updates 3 to 5")
