"""Digests and checkpoints: a restored state is bit for bit the saved one, or it is refused."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aiohttp import ClientPayloadError
from conftest import ROOT, on_mesh
from etils import epath
from gcsfs.retry import HttpError

import checkpoint
import config
import digests
import runstate
import utils
import verify
from errors import CHECKPOINT, STORAGE, USAGE, UserError

SLOW = pytest.mark.slow

# ---- digests


def digest(x) -> list[int]:
    return np.asarray(digests.digest(x)[0]).tolist()


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


def test_digests_keep_no_array_of_terms_in_memory():
    cfg = on_mesh(config.PRESETS["llama3_8b"](), (2, 2, 2))
    leaves = list(utils.leaf_table(runstate.abstract_state(cfg).params).values())
    memory = digests.digest_leaves.lower(leaves).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1e-4 * memory.argument_size_in_bytes


# ---- checkpoints


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """(cfg, run directory, {step: state}) with checkpoints 10 and 20 of different states."""
    cfg = on_mesh(config.tiny(), (2, 2, 2))
    run = epath.Path(tmp_path_factory.mktemp("saved"))
    store = checkpoint.Checkpoints(run, keep=2, settings=dict(colour="red"))
    state = runstate.init_state(cfg)
    states = {10: state, 20: jax.tree.map(lambda x: x + 1, state)}
    for step, s in states.items():
        store.save(step, runstate.checkpoint_items(s))
    store.close()
    return cfg, run, states


@pytest.fixture
def copy(saved, tmp_path):
    """The same, with a copy of the run directory that a test may damage."""
    cfg, run, states = saved
    return on_mesh(cfg, (2, 2, 2)), epath.Path(shutil.copytree(run, tmp_path / "run")), states


def open_store(run, keep=2) -> checkpoint.Checkpoints:
    return checkpoint.Checkpoints(run, keep, settings=dict(colour="red"))


def restore(run, cfg):
    """(step, items): the checkpoint that a run would resume from."""
    store = open_store(run)
    found = store.restore(runstate.checkpoint_items(runstate.abstract_state(cfg)))
    store.manager.close()
    return store.newest, found


def assert_restored(found, state):
    jax.tree.map(np.testing.assert_array_equal, found, runstate.checkpoint_items(state))


def checkpoint_files(run, step) -> list[Path]:
    """Every file of a checkpoint, the largest, which holds most of its numbers, last."""
    found = (p for p in Path(run / "checkpoints" / str(step)).rglob("*") if p.is_file())
    return sorted(found, key=lambda path: path.stat().st_size)


def flip_bit(path, at: int, bit: int = 0):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(bytes(raw))


def test_a_state_is_restored_on_other_meshes(copy):
    cfg, run, states = copy
    for mesh in [(1, 1, 1), (8, 1, 1), (1, 8, 1)]:
        step, found = restore(run, on_mesh(cfg, mesh, train=dict(microbatches=0)))
        assert step == 20
        assert_restored(found, states[20])


def test_the_format_is_that_of_earlier_checkpoints(saved):
    _, run, _ = saved
    folder = run / "checkpoints" / "20"
    assert {"params", "rest", "meta"} <= {p.name for p in folder.iterdir()}
    meta = json.loads((folder / "meta" / "metadata").read_text())
    assert set(meta) == {"format", "step", "must", "leaves", "checksum"}
    assert meta["format"] == 2 and meta["step"] == 20 and meta["must"] == dict(colour="red")
    shape, dtype, numbers = meta["leaves"]["params/embed_VD"]
    assert shape == [512, 32] and dtype == "float32" and len(numbers) == 2


def test_a_checkpoint_with_a_flipped_bit_is_moved_and_the_one_before_it_is_restored(copy, capsys):
    cfg, run, states = copy
    path = checkpoint_files(run, 20)[-1]
    flip_bit(path, path.stat().st_size // 2)  # orbax alone restores this without a word
    step, found = restore(run, cfg)
    assert step == 10
    assert_restored(found, states[10])
    assert "warning: checkpoint 20 failed verification" in capsys.readouterr().err
    assert (run / "damaged" / "20" / "meta").exists() and not (run / "checkpoints" / "20").exists()

    store = open_store(run)  # later saves still work, also at the damaged one's step
    store.restore(runstate.checkpoint_items(runstate.abstract_state(cfg)))
    for later in (15, 20):
        assert store.save(later, runstate.checkpoint_items(states[20]), last=True)
    store.close()
    step, found = restore(run, cfg)
    assert step == 20
    assert_restored(found, states[20])


# Orbax raises another error in a destructor after each failed read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mutation", [
    "flip", "cut", pytest.param("zero", marks=SLOW), pytest.param("remove", marks=SLOW),
])  # fmt: skip
def test_no_mutation_of_any_file_gives_a_wrong_state(copy, mutation):
    """A bit flipped, or a file cut, zeroed or removed: the state is restored whole or refused."""
    cfg, run, states = copy
    rng, outcomes = np.random.default_rng(0), []
    store = open_store(run)
    abstract = runstate.checkpoint_items(runstate.abstract_state(cfg))
    for path in sorted(checkpoint_files(run, 20)):
        original = path.read_bytes()
        if not original:
            continue
        if mutation == "flip":
            flip_bit(path, int(rng.integers(len(original))), int(rng.integers(8)))
        elif mutation == "cut":
            path.write_bytes(original[: len(original) // 2])
        elif mutation == "zero":
            path.write_bytes(bytes(len(original)))
        else:
            path.unlink()
        try:
            assert_restored(store.load(20, abstract), states[20])
            outcomes.append("whole")
        except verify.Damaged:
            outcomes.append("refused")
        path.write_bytes(original)
    assert outcomes.count("refused") >= 5, outcomes


@pytest.mark.parametrize("junk", ["empty", "file", "link", "partial", "names"])
def test_junk_beside_the_checkpoints_is_not_restored(copy, junk):
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
        links = Path(where / "latest"), Path(where / "last")
        for link, target in zip(links, ("40", "20/_CHECKPOINT_METADATA"), strict=True):
            link.symlink_to(where / target)
    step, found = restore(run, cfg)
    assert step == 20
    assert junk != "names" or all(link.is_symlink() for link in links)
    assert_restored(found, states[20])


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize(
    "change", ["rename", "copy", "swap", "pipe", "pipe of metadata", "pipe alone", "plain file"]
)
def test_a_checkpoint_under_another_name_is_damaged(copy, change):
    """A folder that was renamed, copied or swapped, or that holds a pipe, is moved away, as is what
    is no folder; the newest that is left is restored."""
    cfg, run, states = copy
    where = run / "checkpoints"
    if change == "rename":
        (where / "20").rename(where / "60")
    elif change == "copy":
        shutil.copytree(where / "20", where / "60")
    elif change == "swap":
        for old, new in [("20", "x"), ("10", "20"), ("x", "10")]:
            (where / old).rename(where / new)
    elif change == "pipe":
        os.mkfifo(where / "20" / "params" / "pipe")
    elif change == "pipe alone":
        shutil.rmtree(where / "20")
        os.mkfifo(where / "20")
    elif change == "plain file":
        shutil.rmtree(where / "20")
        (where / "20").write_text("mine")
    else:
        (where / "20" / "_CHECKPOINT_METADATA").unlink()
        os.mkfifo(where / "20" / "_CHECKPOINT_METADATA")
    if change == "swap":
        with pytest.raises(UserError, match="20 .it is checkpoint 10 under another name"):
            restore(run, cfg)
        return
    step, found = restore(run, cfg)
    assert step == (20 if change == "copy" else 10)
    assert_restored(found, states[step])
    assert (run / "damaged" / ("60" if change in ("rename", "copy") else "20")).exists()


def test_a_file_beside_checkpoints_does_not_keep_a_run_from_being_read(copy):
    cfg, run, states = copy
    (run / "checkpoints" / "30").write_text("mine")
    params = runstate.load_params(run, cfg)
    jax.tree.map(np.testing.assert_array_equal, params, states[20].params)
    assert (run / "checkpoints" / "30").read_text() == "mine"


def test_a_folder_may_have_any_name(saved, tmp_path):
    cfg, _, states = saved
    run = epath.Path(tmp_path / "é #%20?x")
    store = open_store(run)
    assert store.save(10, runstate.checkpoint_items(states[10]), last=True)
    store.close()
    assert_restored(restore(run, cfg)[1], states[10])


def test_a_run_without_a_usable_checkpoint_does_not_start_over(copy):
    cfg, run, _ = copy
    for step in (10, 20):
        (run / "checkpoints" / str(step) / "meta" / "metadata").write_text("{}")
    with pytest.raises(UserError) as error:
        restore(run, cfg)
    assert error.value.code == CHECKPOINT and "no usable checkpoint among 2" in str(error.value)
    assert "20 (" in str(error.value) and "10 (" in str(error.value)
    assert (run / "damaged" / "10").exists() and (run / "damaged" / "20").exists()


def test_a_reader_says_that_a_checkpoint_was_removed(copy):
    cfg, run, _ = copy
    store = verify.SavedCheckpoints(run)
    shutil.rmtree(run / "checkpoints" / "20")  # as by its run, which trains
    with pytest.raises(UserError, match="20 was removed while it was read") as error:
        store.restore(runstate.checkpoint_items(runstate.abstract_state(cfg)))
    assert "damaged" not in str(error.value)


def test_a_reader_moves_no_damaged_checkpoint(copy):
    cfg, run, _ = copy
    flip_bit(checkpoint_files(run, 20)[-1], 5000)
    abstract = runstate.checkpoint_items(runstate.abstract_state(cfg))
    with pytest.raises(UserError, match="20 failed verification .*arrays are not as saved"):
        verify.SavedCheckpoints(run).restore(abstract)
    assert (run / "checkpoints" / "20").exists()
    with pytest.raises(UserError, match="has no checkpoint 15, only 10 or 20"):
        verify.SavedCheckpoints(run).restore(abstract, step=15)
    store = verify.SavedCheckpoints(run)
    store.manager = SimpleNamespace(all_steps=lambda: range(0, 50_000, 10))
    with pytest.raises(UserError, match="15, only 0, 10,.*, 80 or 90, and 4,990 further away"):
        store.find_step(15)
    os.symlink("nowhere", run / "checkpoints" / "30")
    with pytest.raises(UserError, match="30 is damaged: 30 is not a regular file"):
        verify.SavedCheckpoints(run)


@pytest.mark.parametrize("error", [
    HttpError(dict(code=503, message="Service Unavailable")),
    OSError("Forbidden: it has no access"), ClientPayloadError("not complete"),
])  # fmt: skip
def test_a_checkpoint_in_a_bucket_that_does_not_answer_is_not_damaged(copy, monkeypatch, error):
    store = open_store(copy[1])
    store.path = epath.Path("gs://bucket/run/checkpoints")
    monkeypatch.setattr(store.manager, "restore", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match="cannot read gs://bucket/run/checkpoints/20") as refusal:
        store.read(20)
    assert refusal.value.code == STORAGE


def test_a_checkpoint_of_a_disk_that_does_not_answer_is_not_damaged(copy, monkeypatch):
    """Orbax's own text does not say why; the cause's does."""
    error = Exception("Encountered error while reading array index")
    error.__cause__ = ValueError("ABORTED: Failed to open: Stale file handle")
    store = open_store(copy[1])
    monkeypatch.setattr(store.manager, "restore", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match="cannot read .*checkpoints/20: .*Stale") as refusal:
        store.read(20)
    assert refusal.value.code == STORAGE


def test_a_checkpoint_that_cannot_be_looked_at_is_not_damaged(copy, monkeypatch):
    store, stat_of = open_store(copy[1]), os.stat

    def fail(path, **options):
        if os.fspath(path).endswith("checkpoints/20"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat_of(path, **options)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(OSError, match="Input/output"):
        store.reject_files()
    assert not (copy[1] / "damaged").exists()


@pytest.mark.parametrize("folder", ["gs://bucket/run", "/disk/run"])
def test_a_checkpoint_is_read_twice_before_it_is_damaged(copy, monkeypatch, folder):
    store = open_store(copy[1])
    store.path = epath.Path(folder) / "checkpoints"
    always = mock.Mock(side_effect=FileNotFoundError())
    monkeypatch.setattr(store.manager, "restore", always)
    with pytest.raises(verify.Damaged):
        store.read(20)
    assert always.call_count == 2
    once = mock.Mock(side_effect=[KeyError('Item "params" was not found'), "all of it"])
    monkeypatch.setattr(store.manager, "restore", once)
    assert store.read(20) == "all of it"


def test_a_checkpoint_in_a_bucket_that_orbax_has_missed_is_not_passed_over(copy, monkeypatch):
    store = open_store(copy[1])
    store.path = epath.Path("gs://bucket/run/checkpoints")
    monkeypatch.setattr(store.manager, "latest_step", lambda: 10)
    with pytest.raises(UserError, match="cannot look at gs://bucket/run/checkpoints/20") as error:
        store.find_step(-1)
    assert error.value.code == STORAGE


def test_all_processes_restore_the_checkpoint_that_process_0_names(copy, monkeypatch):
    """Another one may list the folder as it was before the newest save."""
    cfg, run, _ = copy
    store = open_store(run)
    monkeypatch.setattr(store.manager, "latest_step", lambda: 10)
    monkeypatch.setattr(utils, "exchange", lambda value: [20 if value == 10 else value])
    store.restore(runstate.checkpoint_items(runstate.abstract_state(cfg)))
    assert store.newest == 20


def test_another_setting_or_dtype_is_an_error_that_names_the_fields(copy):
    cfg, run, _ = copy
    abstract = runstate.checkpoint_items(runstate.abstract_state(cfg))
    with pytest.raises(UserError, match="colour: red there, blue here"):
        checkpoint.Checkpoints(run, settings=dict(colour="blue")).restore(abstract)

    def halved(x):
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding)

    half = jax.tree.map(halved, abstract["params"])
    dtypes = r"params/embed_VD: float32\[512, 32\] there, bfloat16\[512, 32\] here"
    with pytest.raises(UserError, match=dtypes):
        open_store(run).restore(dict(params=half))


def test_the_oldest_checkpoints_are_deleted(copy):
    cfg, run, states = copy
    store = open_store(run)
    store.restore(runstate.checkpoint_items(runstate.abstract_state(cfg)))
    for step in (30, 40):
        assert store.save(step, runstate.checkpoint_items(states[10]), last=True)
    store.close()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["30", "40"]


def test_a_full_disk_is_a_storage_error(tmp_path):
    """Where files may not grow beyond 20 kB, the first save fails, before any update."""
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


def test_a_peer_that_is_lost_in_a_save_is_no_storage_error(tmp_path):
    """Orbax's collectives fail then; run_main makes exit code 7 of it."""
    store = checkpoint.Checkpoints(epath.Path(tmp_path))
    for kind in (jax.errors.JaxRuntimeError, ValueError):
        with pytest.raises(kind, match="Gloo"):
            store.note_failure(kind("UNKNOWN: Gloo AllGather failed: Connection reset by peer"))
    assert store.error is None
    store.note_failure(RuntimeError("disk full"), is_final=True)
    assert store.error.code == STORAGE


def test_each_checkpoint_of_keep_every_stays(tmp_path):
    store = checkpoint.Checkpoints(epath.Path(tmp_path), keep=2, keep_every=20)
    for step in (0, 10, 20, 30, 40, 50, 60):
        assert store.save(step, dict(params=dict(a=jnp.zeros(3))), last=True)
    store.close()
    assert {int(x.name) for x in tmp_path.glob("checkpoints/*")} == {0, 20, 40, 50, 60}


def test_best_checkpoints_stay_when_their_losses_are_lost(tmp_path):
    losses, state = {1: 1.0, 2: 0.5, 3: 2.0, 4: None, 5: 3.0}, dict(params=dict(a=jnp.zeros(3)))
    for known, steps in ((losses, range(1, 6)), ({}, (6, 7))):  # metrics.jsonl was removed
        store = checkpoint.Checkpoints(epath.Path(tmp_path), keep=1)
        store.keep_best(known)
        for step in steps:
            assert store.save(step, state, last=True)
        store.close()
        assert {int(x.name) for x in tmp_path.glob("checkpoints/*")} == {1, 2, steps[-1]}


def test_a_path_that_orbax_cannot_write_to_is_refused(tmp_path):
    """A pattern, a backslash, which it takes for a slash, or bytes that are not UTF-8."""
    for name, fits in (("x [1]", False), ("x [1", True), (r"a\b", False), ("a\udcff", False)):
        if fits:
            store = checkpoint.Checkpoints(epath.Path(tmp_path / name))
            assert store.save(0, dict(params=dict(a=jnp.zeros(3))), last=True)
            continue
        with pytest.raises(UserError, match=r"has (\[1\]|\\|\udcff) in its name") as error:
            checkpoint.Checkpoints(epath.Path(tmp_path / name))
        assert error.value.code == USAGE


@pytest.mark.parametrize("name", ["50%", "what?", "a#1", "a|b", "x [1]"])
def test_an_address_that_orbax_does_not_quote_is_refused(name):
    with pytest.raises(UserError, match=f"gs://bucket/{re.escape(name)}/run: a folder has"):
        checkpoint.Checkpoints(epath.Path("gs://bucket") / name / "run")
