"""Checkpoints that tell the truth, metrics that hold each row once,
and the rest of what surrounds a run."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, on_mesh
from etils import epath

import checkpoint
import config
import files
import metrics
import train
import utils
from config import CHECKPOINT, STORAGE, USAGE, UserError

# ---- digests


def digest(x) -> list[int]:
    return np.asarray(jax.jit(checkpoint.digest)(x)).tolist()


def test_a_digest_is_the_same_on_every_mesh_and_layout():
    x = np.random.default_rng(0).normal(size=(16, 8, 24)).astype(np.float32)
    want = digest(x)
    for mesh in [(2, 2, 2), (8, 1, 1), (1, 4, 2)]:
        on_mesh(config.tiny(), mesh)
        for spec in [("dp", "pp", "tp"), (None, None, ("dp", "tp")), (("pp", "dp"), "tp", None)]:
            assert digest(jax.device_put(x, utils.shardings(jax.P(*spec)))) == want


def test_a_digest_changes_with_any_bit_and_any_move():
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    want, rng = digest(x), np.random.default_rng(1)
    for _ in range(50):
        bits = x.view(np.uint32).copy()
        bits.flat[rng.integers(x.size)] ^= np.uint32(1 << rng.integers(32))
        assert digest(bits.view(np.float32)) != want
    assert digest(x[::-1].copy()) != want and digest(x.T.copy()) != want
    assert digest(np.float32([0.0])) != digest(np.float32([-0.0]))
    assert digest(jnp.bfloat16(x).astype(np.float32)) != want
    half = jnp.bfloat16(x)
    assert digest(half) == digest(jnp.array(half))
    assert digest(np.int32([3])) != digest(np.int32([4]))


# ---- checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run directory with checkpoints 10 and 20 of two different states, and those states."""
    cfg = on_mesh(config.tiny(), (2, 2, 2))
    run = epath.Path(tmp_path_factory.mktemp("saved"))
    store = checkpoint.Checkpoints(run, keep=2, must=dict(colour="red"))
    state = train.init_state(cfg)
    states = {10: state, 20: jax.tree.map(lambda x: x + 1, state)}
    for step, s in states.items():
        store.save(step, train.checkpoint_items(s))
    store.close()
    return cfg, run, states


@pytest.fixture
def copy(saved, tmp_path):
    """(cfg, a copy of that run directory, the states)"""
    cfg, run, states = saved
    return on_mesh(cfg, (2, 2, 2)), epath.Path(shutil.copytree(run, tmp_path / "run")), states


def open_store(run, keep=2) -> checkpoint.Checkpoints:
    return checkpoint.Checkpoints(run, keep, must=dict(colour="red"))


def restored(run, cfg):
    """(step, state) of what a start would resume from."""
    store = open_store(run)
    found = store.restore(train.checkpoint_items(train.abstract_state(cfg)))
    store.manager.close()
    return store.newest, found


def assert_equal(found, state):
    jax.tree.map(np.testing.assert_array_equal, found, train.checkpoint_items(state))


def files_below(folder) -> list[Path]:
    """Every file below."""
    return sorted(p for p in Path(folder).rglob("*") if p.is_file())


def largest(run, step) -> Path:
    """The file with most of a checkpoint's numbers."""
    return max(files_below(run / "checkpoints" / str(step)), key=lambda p: p.stat().st_size)


def flip(path, at: int, bit: int = 0):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(bytes(raw))


def test_what_is_saved_is_restored_on_another_mesh(copy):
    cfg, run, states = copy
    for mesh in [(1, 1, 1), (8, 1, 1), (1, 8, 1)]:
        step, found = restored(run, on_mesh(cfg, mesh))
        assert step == 20
        assert_equal(found, states[20])


def test_a_flipped_bit_is_reported_set_aside_and_survived(copy, capsys):
    cfg, run, states = copy
    path = largest(run, 20)
    flip(path, path.stat().st_size // 2)  # orbax alone restores this without a word
    step, found = restored(run, cfg)
    assert step == 10
    assert_equal(found, states[10])
    assert "warning: checkpoint 20 failed verification" in capsys.readouterr().err
    assert (run / "damaged" / "20" / "meta").exists() and not (run / "checkpoints" / "20").exists()

    store = open_store(run)  # and later saves still happen, at the bad one's step too
    store.restore(train.checkpoint_items(train.abstract_state(cfg)))
    for later in (15, 20):
        store.save(later, train.checkpoint_items(states[20]))
    store.close()
    step, found = restored(run, cfg)
    assert step == 20
    assert_equal(found, states[20])


# Orbax's own, after each failed read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_mutation_of_any_file_gives_a_wrong_state(copy, capsys):
    """Bits flipped, files cut, emptied and removed:
    what is restored is always one of the two states, whole."""
    cfg, run, states = copy
    rng, outcomes = np.random.default_rng(0), []
    store = open_store(run)
    abstract = train.checkpoint_items(train.abstract_state(cfg))
    for path in files_below(run / "checkpoints" / "20"):
        original = path.read_bytes()
        for mutation in ("flip", "cut", "zero", "remove"):
            if not original:
                continue
            if mutation == "flip":
                flip(path, int(rng.integers(len(original))), int(rng.integers(8)))
            elif mutation == "cut":
                path.write_bytes(original[: len(original) // 2])
            elif mutation == "zero":
                path.write_bytes(bytes(len(original)))
            else:
                path.unlink()
            try:
                assert_equal(store.load(20, abstract), states[20])
                outcomes.append("whole")
            except checkpoint.Damaged:
                outcomes.append("refused")
            path.write_bytes(original)
    assert outcomes.count("refused") > len(outcomes) / 4, outcomes


@pytest.mark.parametrize("junk", ["empty", "file", "link", "partial", "names"])
def test_junk_beside_the_checkpoints_does_not_win(copy, junk):
    cfg, run, states = copy
    where = run / "checkpoints"
    if junk == "empty":
        (where / "999").mkdir()
    elif junk == "file":
        (where / "999").write_text("x")
    elif junk == "link":
        Path(where / "999").symlink_to("/etc")
    elif junk == "partial":
        shutil.copytree(where / "20" / "params", where / "999" / "params")
    else:
        for name in ("foo", "-3", "30.orbax-checkpoint-tmp", "1e3"):
            (where / name).mkdir()
    step, found = restored(run, cfg)
    assert step == 20
    assert_equal(found, states[20])


def test_with_no_usable_checkpoint_nothing_starts_over(copy):
    cfg, run, _ = copy
    for step in (10, 20):
        (run / "checkpoints" / str(step) / "meta" / "metadata").write_text("{}")
    with pytest.raises(UserError) as error:
        restored(run, cfg)
    assert error.value.code == CHECKPOINT and "no usable checkpoint among 2" in str(error.value)
    assert "20 (" in str(error.value) and "10 (" in str(error.value)
    assert (run / "damaged" / "10").exists() and (run / "damaged" / "20").exists()


def test_a_readers_view_moves_nothing(copy):
    cfg, run, _ = copy
    flip(largest(run, 20), 5000)
    with pytest.raises(UserError, match="checkpoint .*20 is damaged"):
        open_store(run, keep=0).restore(train.checkpoint_items(train.abstract_state(cfg)))
    assert (run / "checkpoints" / "20").exists()
    with pytest.raises(UserError, match="has no checkpoint 15, only 10 or 20"):
        open_store(run, keep=0).restore(train.checkpoint_items(train.abstract_state(cfg)), step=15)


def test_another_setting_or_dtype_is_an_error_with_the_fields(copy):
    cfg, run, _ = copy
    abstract = train.checkpoint_items(train.abstract_state(cfg))
    with pytest.raises(UserError, match="colour: red there, blue here"):
        checkpoint.Checkpoints(run, must=dict(colour="blue")).restore(abstract)

    def halved(x):
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding)

    half = jax.tree.map(halved, abstract["params"])
    dtypes = r"params/embed_VD: float32\[512, 32\] there, bfloat16\[512, 32\] here"
    with pytest.raises(UserError, match=dtypes):
        open_store(run).restore(dict(params=half))


def test_the_oldest_checkpoints_are_dropped(copy):
    cfg, run, states = copy
    store = open_store(run)
    store.restore(train.checkpoint_items(train.abstract_state(cfg)))
    for step in (30, 40):
        store.save(step, train.checkpoint_items(states[10]))
    store.close()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["30", "40"]


def test_a_full_disk_is_a_storage_error(tmp_path):
    """A file may not grow beyond 20 kB in a process of its own:
    the first save, before any update, says so."""
    data, folder = str(tmp_path / "a.npy"), str(tmp_path)
    argv = [str(ROOT / "train.py"), "--config", "tiny", "--run.dir", folder, "--data.train", data]
    argv += ["--data.val", data, "--mesh.dp", "1", "--model.d_model", "128"]
    code = f"""
import resource, runpy, signal, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.argv = {argv!r}
sys.path.insert(0, {str(ROOT)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    np.save(tmp_path / "a.npy", np.arange(5000, dtype=np.uint16) % 512)
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == STORAGE, done.stderr
    assert "error: checkpoint 0 could not be written to" in done.stderr
    assert "Traceback" not in done.stderr


# ---- metrics


def row(step, kind="train") -> str:
    return json.dumps(dict(kind=kind, step=step, loss=1.0, grad_norm=1.0)) + "\n"


def test_rows_after_the_checkpoint_and_torn_lines_are_dropped(tmp_path):
    path = epath.Path(tmp_path / "metrics.jsonl")
    path.write_text(row(1) + row(2) + row(2, "eval") + "not json\n" + row(3) + row(4)[:-9])
    assert metrics.read_rows(path, 2) == [row(1), row(2), row(2, "eval")]
    file = metrics.RowFile(path, 2)
    file.add(dict(kind="train", step=3))
    assert path.read_text() == row(1) + row(2) + row(2, "eval") + '{"kind": "train", "step": 3}\n'


def test_rows_are_written_one_update_late_and_nan_is_null(tmp_path, capsys):
    cfg = on_mesh(config.tiny(), (1, 1, 1), log=dict(every=1))
    log = metrics.MetricsLog(epath.Path(tmp_path), cfg, 0, flops=1.0)
    path = tmp_path / "metrics.jsonl"
    log.update(1, dict(loss=jnp.float32(2), grad_norm=jnp.float32(1), lr=jnp.float32(0.1)))
    assert not path.exists()
    bad = dict(loss=jnp.float32(jnp.nan), grad_norm=jnp.float32(jnp.inf), lr=jnp.float32(0.1))
    log.update(2, bad)
    assert len(path.read_text().splitlines()) == 1
    log.close()
    last = json.loads(path.read_text().splitlines()[1])
    assert last["loss"] is None and last["grad_norm"] is None and last["step"] == 2
    assert "eta" in capsys.readouterr().out


def test_the_curve_is_drawn(tmp_path):
    metrics.draw_loss(epath.Path(tmp_path / "loss.png"), [(1, 3.0), (2, None), (3, 2.0)], {3: 2.5})
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    metrics.draw_loss(epath.Path(tmp_path / "loss.png"), [], {})


# ---- Weights & Biases


def history(run) -> list[dict]:
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
        if kind in (1, 4):  # whole, or the last piece
            records.append(Record.FromString(part))
            part = b""
        at += 7 + size
    items = [r.history.item for r in records if r.HasField("history")]

    def name(item):
        return item.key or "/".join(item.nested_key)

    return [{name(i): json.loads(i.value_json) for i in row} for row in items]


def test_wandb_reads_the_same_rows_offline_and_without_a_key(cfg, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = replace(
        cfg,
        mesh=config.Mesh(1, 1, 1),
        train=replace(cfg.train, steps=6, eval_every=3, eval_batches=1),
        log=config.Log(wandb="online"),
    )
    with_wandb = train.main(cfg)
    run = files.absolute_path(cfg.run.dir) / cfg.run.name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train_rows, evals = ([r for r in rows if r["kind"] == kind] for kind in ("train", "eval"))
    deadline = time.monotonic() + 20
    while len(seen := history(run)) < len(rows) and time.monotonic() < deadline:
        time.sleep(0.1)  # wandb's own process may still be writing
    seen_evals = [(r["step"], r["eval/loss"]) for r in seen if "eval/loss" in r]
    assert [r["train/loss"] for r in seen if "train/loss" in r] == [r["loss"] for r in train_rows]
    assert seen_evals == [(r["step"], r["loss"]) for r in evals]
    run_id = json.loads((run / "config.json").read_text())["run_id"]
    assert next(run.glob("wandb/offline-run-*")).name.endswith(run_id)
    plain = replace(cfg, log=config.Log(wandb="off"), run=replace(cfg.run, name="plain"))
    without = train.main(plain)
    jax.tree.map(np.testing.assert_array_equal, with_wandb, without)


def test_wandb_that_fails_never_stops_a_run_unless_required(cfg, monkeypatch, tmp_path, capsys):
    import wandb

    def fails(**_):
        raise OSError("no route to host")

    monkeypatch.setattr(wandb, "init", fails)
    cfg = on_mesh(cfg)
    offline, required = (replace(cfg, log=config.Log(wandb=w)) for w in ("offline", "required"))
    (tmp_path / "config.json").write_text('{"run_id": "x"}')
    assert metrics.start_wandb(epath.Path(tmp_path), offline) is None
    assert "wandb is off (OSError: no route to host)" in capsys.readouterr().err
    monkeypatch.setattr(metrics, "has_wandb_key", lambda: True)
    with pytest.raises(UserError) as error:
        metrics.start_wandb(epath.Path(tmp_path), required)
    assert error.value.code == USAGE
    monkeypatch.setattr(metrics, "has_wandb_key", lambda: False)
    with pytest.raises(UserError, match="no API key"):
        metrics.start_wandb(epath.Path(tmp_path), required)


# ---- meshes, paths and numbers


def test_a_mesh_too_large_or_too_small_names_both_numbers(monkeypatch):
    too_large = r"mesh.dp\*mesh.pp\*mesh.tp = 4\*2\*2 = 16 but only 8 cpu device"
    with pytest.raises(UserError, match=too_large):
        on_mesh(config.tiny(), (4, 2, 2))
    assert on_mesh(config.tiny(), (-1, 2, 1)).mesh.sizes == (4, 2, 1)
    with pytest.raises(UserError, match="mesh.tp=3 must divide"):
        on_mesh(config.tiny(), (2, 1, 3))


def test_only_options_that_xla_takes_are_set(monkeypatch, capsys):
    """As an XLA flag an unknown one would end the process.  What a user sets is left alone."""
    on_mesh(config.tiny(), (2, 2, 2))
    known, mesh = dict(xla_cpu_prefer_vector_width=128), jax.sharding.get_mesh()
    of_cpu, of_gpu = known | dict(xla_no_such_option=True), dict(xla_gpu_autotune_level=0)
    monkeypatch.setattr(utils, "XLA_OPTIONS", dict(cpu=of_cpu, gpu=of_gpu))
    assert utils.xla_options(mesh) == known
    assert utils.compile_program(jax.jit(jnp.sin), jnp.float32(0))(jnp.float32(0)) == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=512")
    assert utils.xla_options(mesh) == {}
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(utils, "XLA_OPTIONS", dict(cpu=dict(xla_cpu_prefer_vector_width="wide")))
    assert utils.xla_options(mesh) == {}
    assert "XLA does not take xla_cpu_prefer_vector_width=wide" in capsys.readouterr().err


def test_xla_still_knows_the_options_for_gpus(monkeypatch):
    """It parses them on a CPU too."""
    on_mesh(config.tiny())
    wanted = utils.XLA_OPTIONS["gpu"]
    monkeypatch.setattr(utils, "XLA_OPTIONS", dict(cpu=wanted))
    assert utils.xla_options(jax.sharding.get_mesh()) == wanted


def test_too_little_memory_is_two_lines_and_exit_2():
    main = "lambda cfg: jax.numpy.zeros(1 << 45).block_until_ready()"
    code = f"import config, jax, utils; utils.run_main({main}, config.tiny())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == USAGE and done.stderr.count("\n") == 2, done.stderr
    assert "memory is too small" in done.stderr and "140737488355328 bytes" in done.stderr


def test_a_peak_is_known_or_null(monkeypatch):
    cfg = on_mesh(config.PRESETS["gpt2_124m"](), (1, 1, 1))
    assert utils.peak_flops(cfg) is None

    class Device:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert utils.peak_flops(cfg) == 989e12
    assert utils.peak_flops(replace(cfg, train=replace(cfg.train, dtype="float32"))) is None


def test_an_unwritable_run_directory_is_a_storage_error(cfg, tmp_path):
    (tmp_path / "file").write_text("x")
    for where in ("file", "file/below"):
        with pytest.raises(UserError) as error:
            train.main(replace(cfg, run=replace(cfg.run, dir=str(tmp_path / where))))
        assert error.value.code == STORAGE and "cannot write to" in str(error.value)


def test_secrets_stay_out_of_the_run_directory(cfg, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a")
    cfg = replace(
        cfg,
        mesh=config.Mesh(1, 1, 1),
        train=replace(cfg.train, steps=2, eval_batches=1),
        optim=replace(cfg.optim, warmup_steps=1),
        log=config.Log(wandb="offline"),
    )
    train.main(cfg)
    run = files.absolute_path(cfg.run.dir) / cfg.run.name
    assert files_below(run)
    for path in files_below(run):
        assert b"canary-7f3a" not in path.read_bytes(), path


def test_durations_read_well():
    assert [utils.format_duration(s) for s in (5, 65, 3700)] == ["5s", "1m05s", "1h01m"]
