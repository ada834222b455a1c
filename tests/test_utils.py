"""The mesh, signals, XLA's options, peaks and small helpers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from conftest import on_mesh

import config
import utils
from errors import STORAGE, UserError


def test_a_mesh_too_large_or_too_small_names_both_numbers():
    too_large = r"mesh.dp\*mesh.pp\*mesh.tp = 4\*2\*2 = 16 but only 8 cpu device"
    with pytest.raises(UserError, match=too_large):
        on_mesh(config.tiny(), (4, 2, 2))
    assert on_mesh(config.tiny(), (-1, 2, 1)).mesh.sizes == (4, 2, 1)
    with pytest.raises(UserError, match="mesh.tp=3 must divide"):
        on_mesh(config.tiny(), (2, 1, 3))


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
    """XLA parses them on a CPU too."""
    on_mesh(config.tiny())
    options = utils.XLA_OPTIONS["gpu"]
    monkeypatch.setattr(utils, "XLA_OPTIONS", dict(cpu=options))
    assert utils.xla_options(jax.sharding.get_mesh()) == options


def test_a_peak_is_known_or_none(monkeypatch):
    cfg = on_mesh(config.PRESETS["gpt2_124m"](), (1, 1, 1))
    assert utils.peak_flops(cfg) is None

    class Device:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert utils.peak_flops(cfg) == 989e12
    assert utils.peak_flops(replace(cfg, train=replace(cfg.train, dtype="float32"))) is None


def test_durations_are_short():
    assert [utils.format_duration(s) for s in (5, 65, 3700)] == ["5s", "1m05s", "1h01m"]


def test_a_cache_of_programs_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o770)
    with pytest.raises(UserError, match="run.compile_cache") as e:
        utils.keep_programs(str(tmp_path))
    assert e.value.code == STORAGE
