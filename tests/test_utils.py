"""The mesh, signals, XLA's options, peaks and small helpers."""

import os
import re
from dataclasses import dataclass, replace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from conftest import on_mesh
from etils import epath

import checks
import config
import files
import utils
from errors import USAGE, UserError
from runstate import state_shapes, warn_of_memory


def test_a_mesh_too_large_or_too_small_names_both_numbers():
    too_large = r"mesh.dp\*mesh.pp\*mesh.tp = 4\*2\*2 = 16 but only 8 cpu device"
    with pytest.raises(UserError, match=too_large):
        on_mesh(config.tiny(), (4, 2, 2))
    assert on_mesh(config.tiny(), (-1, 2, 1)).mesh.sizes == (4, 2, 1)
    with pytest.raises(UserError, match="mesh.tp=3 must divide"):
        on_mesh(config.tiny(), (2, 1, 3))


def test_what_is_chosen_for_a_cpu_is_said_in_one_line_with_the_reasons(capsys):
    def chosen(**train) -> str:
        demo = replace(config.demo(), train=replace(config.demo().train, **train))
        utils.start_mesh(demo, plan_remat=lambda cfg, kind: "layer")
        (line,) = re.findall("chosen for a CPU: .*", capsys.readouterr().err) or [""]
        return line

    assert re.search(r"microbatches 2 \(.*512.*remat none \(.*most 1 GiB.*unroll 2 \(", chosen())
    assert re.search(r"remat layer \(.*more than 1 GiB.*unroll 1 \(.*memory", chosen(seq_len=4096))
    assert chosen(microbatches=2, remat="none").startswith("chosen for a CPU: train.unroll 2 (")
    assert chosen(microbatches=2, remat="none", unroll=1) == ""


@dataclass(frozen=True)
class Device:
    """A device of a machine that is not here."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100"


def nodes(*sizes: int, platform="gpu") -> list[Device]:
    """Devices of so many nodes of these sizes."""
    indices = [n for n, size in enumerate(sizes) for _ in range(size)]
    return [Device(id, n, platform) for id, n in enumerate(indices)]


def test_dp_is_laid_over_the_slow_network_and_pp_and_tp_inside():
    assert utils.count_slices(jax.devices()) == 1
    devices = [Device(id, slice_index=id % 2) for id in range(8)]
    cfg = checks.resolve(config.tiny(), 8, slices=utils.count_slices(devices))
    assert cfg.mesh.dp == "2x4"
    for dp, pp, tp in [("2x4", 1, 1), ("2x1", 2, 2), ("2x2", 1, 2)]:
        cfg = replace(cfg, mesh=config.Mesh(dp, pp, tp))
        mesh = utils.mesh_of(devices, cfg)
        assert mesh.shape == cfg.mesh.shape and mesh.axis_names == ("slice", *utils.AXES)
        assert [{x.slice_index for x in half.flat} for half in mesh.devices] == [{0}, {1}]
    assert utils.count_slices(nodes(1, 1, 1)) == 1  # which have no fast network inside
    # GPUs may have other slices than nodes, if mesh.dp says so: here pp is over the nodes.
    cfg = checks.resolve(replace(config.tiny(), mesh=config.Mesh("1x4", 2, 1)), 8, slices=2)
    assert utils.mesh_of(devices, cfg).shape == dict(dp=4, pp=2, tp=1)


def test_a_mesh_that_would_use_the_slow_network_for_more_is_refused_with_both_numbers():
    cfg = replace(config.tiny(), mesh=config.Mesh(1, 2, 4))
    with pytest.raises(UserError, match="mesh.dp=1 must be a multiple of the 2 slices") as e:
        checks.resolve(cfg, 8, slices=2)
    assert "on GPUs --mesh.dp 1x1 " in str(e.value)
    cfg = replace(cfg, mesh=config.Mesh("4x2"))
    with pytest.raises(UserError, match=r"mesh.dp=4x2 has 4 slice\(s\), but the devices are in 2"):
        utils.mesh_of(nodes(4, 4, platform="tpu"), cfg)
    with pytest.raises(UserError, match="the slices or nodes have 8 or 4 devices"):
        utils.count_slices(nodes(8, 4))
    assert on_mesh(config.tiny(), ("2x2", 1, 2)).mesh.sizes == (4, 1, 2)  # simulated
    simulated = jax.sharding.get_mesh().devices
    assert [x.id for x in simulated.flat] == [x.id for x in jax.devices()]


def test_only_options_that_xla_accepts_are_set(monkeypatch, capsys):
    """An unknown XLA flag would end the process.  Options that the user has set are left out."""
    on_mesh(config.tiny(), (2, 2, 2))
    known, mesh = dict(xla_cpu_prefer_vector_width=128), jax.sharding.get_mesh()
    options = dict(cpu=known | dict(xla_no_such_option=True), gpu=dict(xla_gpu_autotune_level=0))
    monkeypatch.setattr(utils, "XLA_OPTIONS", options)
    assert utils.xla_options(mesh) == known
    assert utils.compile_program(jax.jit(jnp.sin), jnp.float32(0))(jnp.float32(0)) == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=512")
    assert utils.xla_options(mesh) == {}
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(utils, "XLA_OPTIONS", dict(cpu=dict(xla_cpu_prefer_vector_width="wide")))
    assert utils.xla_options(mesh) == {}
    assert "XLA does not accept xla_cpu_prefer_vector_width=wide" in capsys.readouterr().err


def test_xla_still_knows_the_options_for_gpus(monkeypatch):
    """XLA parses them on a CPU too.  Those with "pipelined" ended before jaxlib 0.11."""
    on_mesh(config.tiny(), (2, 2, 1))
    options = utils.XLA_OPTIONS["gpu"]
    monkeypatch.setattr(utils, "XLA_OPTIONS", dict(cpu=options))
    is_new = jax.__version_info__ >= (0, 11)
    known = {name: x for name, x in options.items() if not (is_new and "pipelined" in name)}
    assert known and utils.xla_options(jax.sharding.get_mesh()) == known
    on_mesh(config.tiny(), (1, 1, 2))
    known.pop("xla_gpu_enable_pipelined_all_gather", None)  # only for meshes without tp
    assert known and utils.xla_options(jax.sharding.get_mesh()) == known


def test_a_peak_is_known_or_none(monkeypatch):
    cfg = on_mesh(config.PRESETS["gpt2_124m"](), (1, 1, 1))
    assert utils.peak_flops(cfg) is None

    class Device:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert utils.peak_flops(cfg) == 989e12
    assert utils.peak_flops(replace(cfg, train=replace(cfg.train, dtype="float32"))) is None


def test_a_state_and_gradient_above_the_free_memory_are_only_a_warning(monkeypatch, capsys):
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_shapes(config.tiny())))
    for free, is_said in ((size, True), (2 * size, False), (None, False)):
        monkeypatch.setattr(utils, "free_memory", lambda free=free: free)
        warn_of_memory(config.tiny())
        assert ("of memory are free: the system may end" in capsys.readouterr().err) == is_said
    monkeypatch.setattr(utils, "free_memory", lambda: size)
    warn_of_memory(replace(config.tiny(), eval_only=True))  # which has no gradient
    assert not capsys.readouterr().err


def test_a_system_that_does_not_say_what_is_free_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 1024 kB\nMemFree: 512 kB\n")
    monkeypatch.setattr(utils, "Path", lambda path: tmp_path / "meminfo")
    assert utils.free_memory() is None


def test_a_container_has_no_more_memory_than_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(utils, "Path", lambda path: tmp_path / os.path.basename(path))
    (tmp_path / "meminfo").write_text("MemAvailable: 2048 kB\n")
    for limit, free in (("max\n", 2**21), (f"{2**20}\n", 2**20), (f"{2**30}\n", 2**21)):
        (tmp_path / "memory.max").write_text(limit)
        assert utils.free_memory() == free


def test_durations_are_short():
    assert [utils.format_duration(s) for s in (5, 65, 3700)] == ["5s", "1m05s", "1h01m"]


def test_a_cache_of_programs_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(".")
    tmp_path.chmod(0o770)
    whys = {".": "can be written to by others", "link": "is a link", "file": "is a file"}
    for name, why in whys.items():
        with pytest.raises(UserError, match=f"run.compile_cache={tmp_path / name} {why}") as e:
            utils.keep_programs(str(tmp_path / name))
        assert e.value.code == USAGE


def test_a_folder_named_like_a_pattern_is_searched_as_it_is(tmp_path):
    for name in ("run[1]*", "run1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").touch()
    found = files.paths_in(epath.Path(tmp_path / "run[1]*"), "*.txt")
    assert [str(path) for path in found] == [str(tmp_path / "run[1]*" / "a.txt")]


@pytest.mark.parametrize(
    "path",
    ["http://x/y", "s3://b/x", "file:///x", "gs://", "gs:///x", "gs:/b/x", "gs://me:canary@b/x"],
)
def test_an_address_that_is_not_of_a_bucket_is_refused(path):
    with pytest.raises(UserError, match="is not the address of a bucket") as e:
        files.absolute_path(path)
    assert e.value.code == USAGE
    bucket = epath.Path("gs://bucket/x")
    assert files.absolute_path(bucket) == bucket


def test_a_folder_of_a_bucket_is_no_file(monkeypatch):
    folder = mock.Mock(**{"stat.return_value.length": 0, "read_text.return_value": ""})  # as gcsfs
    monkeypatch.setattr(files.epath, "Path", lambda path: folder)
    with pytest.raises(ValueError, match="it is not a file"):
        files.read_limited("gs://bucket/runs/a")


def test_without_devices_the_fix_is_said_whatever_jax_raises(monkeypatch):
    """A platform whose plugin is missing is an AssertionError without a text."""
    gloo = "Unable to initialize backend 'cpu': external/gloo/gloo/transport/tcp/device.cc:99"
    for error, word, fix in (
        (AssertionError(), "none for JAX_PLATFORMS=cuda", "install JAX"),
        (RuntimeError("x"), "x", "install JAX"),
        (RuntimeError(gloo), "Unable", "let this host look up its own name"),
    ):
        monkeypatch.setenv("JAX_PLATFORMS", "cuda")
        monkeypatch.setattr(jax, "devices", lambda error=error: (_ for _ in ()).throw(error))
        with pytest.raises(UserError, match=f"JAX has no device: {word}.*\n  fix: {fix}"):
            utils.start_mesh(config.tiny())


def test_64_bits_are_turned_off(capsys):
    jax.config.update("jax_enable_x64", True)
    try:
        utils.start_mesh(replace(config.tiny(), mesh=config.Mesh(1, 1, 1)))
        assert not jax.config.jax_enable_x64 and "JAX_ENABLE_X64" in capsys.readouterr().err
    finally:
        jax.config.update("jax_enable_x64", False)
