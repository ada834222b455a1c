"""Eight fake CPU devices, the mesh to use, and a small real data set, shared by all tests."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from math import prod
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import cli
import config

os.environ |= dict(JAX_PLATFORMS="cpu", WANDB_SILENT="true")
# Both compile in half the time; jaxlib 0.11 aborts on the second, which it no longer has.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
if version("jaxlib") < "0.11":
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# What one test compiled, the next one and its subprocesses load.
CACHE = tempfile.TemporaryDirectory(prefix="trifold-tests-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
cli.simulate_devices(config.Mesh(2, 2, 2))  # before jax is imported

import jax
import pytest

import utils

# JAX's programs are many objects that live long, and to look them through took a seventh of the
# time of test_gradient.py's meshes (69 s instead of 59 for twenty of them).
gc.set_threshold(200_000, 50, 1000)

MESHES = sorted((mesh for mesh in product((1, 2, 4, 8), repeat=3) if prod(mesh) <= 8), key=prod)
OF_EIGHT = [mesh for mesh in MESHES if prod(mesh) == 8]
# Each axis alone, and all of them.
AXES_AND_ALL = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]


def on_mesh(cfg: config.Config, mesh=(1, 1, 1), **sections) -> config.Config:
    """cfg on that mesh, which becomes the ambient one;
    sections=dict(field=value) replaces fields."""
    sections = {name: replace(getattr(cfg, name), **fields) for name, fields in sections.items()}
    axes = dict(zip(utils.AXES, mesh, strict=True))
    return utils.start_mesh(replace(cfg, mesh=replace(cfg.mesh, **axes), **sections))


def interpret_kernels(monkeypatch):
    """Let a CPU run the Pallas kernels of TPUs."""
    from jax.experimental import pallas

    call = pallas.pallas_call

    def interpreted(*args, **options):
        return call(*args, **options | dict(interpret=True))

    monkeypatch.setattr(pallas, "pallas_call", interpreted)


def needs(*packages: str):
    """A decorator for a test of `make test-interop`, skipped where a package is missing."""
    missing = [name for name in packages if not find_spec(name)]
    reason = f"{', '.join(missing)} not installed: run make test-interop"
    skip = pytest.mark.skipif(bool(missing), reason=reason)
    return lambda test: pytest.mark.interop(skip(test))


@pytest.fixture(autouse=True)
def few_programs():
    """JAX keeps every compiled program, each a thousand memory maps, and crashes where Linux gives
    no more of them (65,530 a process).  Programs with 23,000 maps held 1.9 GB."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > 25_000:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # without it their memory stays this process's


@pytest.fixture
def time_limit():
    """Ends the test with an error after 20 seconds, for tests of what might wait for ever."""

    def stop(*_):
        pytest.fail("no answer within 20 seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with train/ and val/: real text, one byte per token, in several shards."""
    out = tmp_path_factory.mktemp("corpus")
    source = Path(os.__file__).parent / "json"
    request = ["--input", source, "--suffix", ".py", "--tokenizer", "byte", "--out", out]
    prepare(*request, "--shard_tokens", 10_000, "--val_fraction", 0.2)
    return out


def run(script: str, *args, **kwargs) -> subprocess.CompletedProcess:
    """`python script args`, its output captured."""
    command = [*map(str, (sys.executable, ROOT / script, *args))]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def prepare(*args):
    """Run prepare_data.py, which has to succeed."""
    done = run("scripts/prepare_data.py", *args)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def cfg(corpus, tmp_path) -> config.Config:
    """The tiny preset on the corpus, with its own folder for runs."""
    tiny = config.tiny()
    data = config.Data(train=str(corpus / "train"), val=str(corpus / "val"))
    return replace(tiny, data=data, run=replace(tiny.run, dir=str(tmp_path / "runs")))


STEPS = 20


@pytest.fixture(scope="session")  # with module, a worker that takes tests of others makes it twice
def base(corpus, tmp_path_factory) -> config.Config:
    """20 updates on (2, 2, 2), with checkpoints after 10 and 20."""
    tiny = config.tiny()
    return replace(
        tiny,
        run=replace(tiny.run, dir=str(tmp_path_factory.mktemp("runs")), name="reference"),
        mesh=config.Mesh(2, 2, 2),
        model=replace(tiny.model, n_layers=4),
        data=config.Data(train=str(corpus / "train"), val=str(corpus / "val")),
        train=replace(
            tiny.train, batch_size=32, steps=STEPS, eval_batches=2, dropout=0.1, microbatches=2
        ),
    )


@pytest.fixture(scope="session")
def reference(base) -> Path:
    """The directory of that run, trained without interruption."""
    import runs  # it imports this file

    code, _, err = runs.finish(runs.start(base))
    assert code == 0, err
    return Path(base.run.dir) / base.run.name
