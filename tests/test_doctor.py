"""scripts/doctor.py: what it says of real processes, folders and buckets, with real faults."""

import json
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from buckets import emulate_bucket, object_path
from conftest import ROOT
from runs import finish, free_port
from test_train import OBEY_PERMISSIONS

import chips
import config
import utils
from chips import GIB
from errors import USAGE
from runstate import state_shapes
from scripts import doctor
from scripts.doctor import FAIL, OK, WARN, Row

ENV = {name: x for name, x in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "NPROC")}
SYNTHETIC = ["--data.train", "synthetic", "--data.val", "synthetic"]


@pytest.fixture(autouse=True)
def no_mesh():
    """No ambient mesh, as in the script before it makes its own."""
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        yield


def start(*words, before=(), env=ENV, **options) -> subprocess.Popen:
    """doctor.py with these flags."""
    command = [sys.executable, *before, ROOT / "scripts/doctor.py", *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*map(str, command)], env=env, **pipes, **options)


def rows(out: str, status: str) -> dict[str, list[str]]:
    """{check: what is said} of the lines of a status, in a printed table with red lines first."""
    out = re.sub(r"^\[Gloo\].*\n", "", out, flags=re.M)  # by the library of a CPU's collectives
    found = re.findall(r"^(FAIL|warn|ok) +(\w+) +(.*(?:\n +fix: .+)?)$", out, re.M)
    places = [(FAIL, WARN, OK).index(word) for word, _, _ in found]
    assert places == sorted(places) and len(places) == len(re.findall(r"^\S", out, re.M)), out
    assert all(("\n" in what) == (word != OK) for word, _, what in found), out
    chosen = [(check, what) for word, check, what in found if word == status]
    return {check: [what for name, what in chosen if name == check] for check, _ in chosen}


# ---- one process


def test_without_a_config_it_looks_at_the_machine_and_tells_no_secret(tmp_path):
    planted = dict(WANDB_API_KEY="canary-7f3a" + "0" * 40, SLURM_JWT='canary-"rapunzel')
    planted |= dict(NCCL_TOPO_FILE="https://me:canary-55e1@host/topology", OTHER="canary-other")
    planted |= dict(SLURM_PASSWORD="short")  # of which scrub leaves the value alone
    began = time.monotonic()
    doctor = start(
        "--report",
        "out.json",
        "--mesh.tp",
        2,
        cwd=tmp_path,
        env=ENV | planted | dict(SLURM_NTASKS="1"),
    )
    code, out, err = finish(doctor)
    assert code == 0 and time.monotonic() - began < 20, err  # 10, but others may use the cores
    assert "key: yes" in rows(out, OK)["wandb"][0]
    assert re.search("read [0-9.]+ ms, lock [0-9.]+ ms", rows(out, OK)["storage"][0])
    expected = {"devices", "mesh", "versions", "limits", "room", "storage", "wandb", "data"}
    assert rows(out, OK).keys() == expected | {"matmul", "clocks", "same", "links"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # and no folder of runs
    text = (tmp_path / "out.json").read_text()
    report = json.loads(text)
    environment = dict(
        SLURM_NTASKS="1",
        SLURM_JWT="***",
        SLURM_PASSWORD="***",
        NCCL_TOPO_FILE="https://***@host/topology",
    )
    assert environment.items() <= report["environment"].items()
    assert report["versions"]["jax"] == jax.__version__ and report["train"]["dtype"] == "float32"
    assert len(report["table"]) == out.count("\n") - out.count("  fix: ")  # such as of versions
    for printed in (text, out, err):
        assert "canary" not in printed and "rapunzel" not in printed


def test_a_disk_on_which_no_folder_can_be_renamed_is_told(tmp_path, monkeypatch):
    """Such as a bucket that is mounted: files can be written there, but no checkpoint."""
    cfg = replace(config.tiny(), run=config.Run(dir=str(tmp_path)))
    (row,) = doctor.run_check(doctor.storage, cfg, {})
    assert row.status == OK and re.search(r"lock [0-9.]+ ms, save [0-9.]+ ms", row.what)
    monkeypatch.setattr(os, "rename", Mock(side_effect=OSError("Function not implemented")))
    (row,) = doctor.run_check(doctor.storage, cfg, {})
    assert row.status == FAIL and "not implemented" in row.what and not [*tmp_path.iterdir()]


def test_faults_are_told_all_at_once_and_each_with_its_cure(corpus, tmp_path):
    """A folder that can only be read, few files, no key, a set and tasks that are missing, a set
    with a shard that is cut, and one without the mask of its manifest."""
    data = shutil.copytree(corpus / "train", tmp_path / "data")
    names = [shard["name"] for shard in json.loads((data / "manifest.json").read_text())["shards"]]
    assert len(names) > 2
    os.truncate(data / names[1], 1000)
    masked = shutil.copytree(corpus / "val", tmp_path / "masked")
    manifest = json.loads((masked / "manifest.json").read_text())
    manifest["shards"][0]["mask"] = manifest.pop("digest")
    (masked / "manifest.json").write_text(json.dumps(manifest))
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o555)
    flags = ["--config", "tiny", "--mesh.tp", 2, "--run.dir", runs, "--log.wandb", "required"]
    vals = f"a={corpus / 'val'},b={tmp_path / 'nowhere'},c={masked}"
    flags += ["--data.train", data, "--data.val", vals]
    flags += ["--eval.tasks", f"core={tmp_path}/*.jsonl"]
    env = {name: x for name, x in ENV.items() if name != "WANDB_API_KEY"} | dict(HOME=str(tmp_path))
    few = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)))
    code, out, err = finish(
        start(*flags, before=["-c", OBEY_PERMISSIONS, sys.executable], env=env, **few)
    )
    red = rows(out, FAIL)
    assert (
        code == USAGE
        and "Traceback" not in err
        and red.keys() == {"limits", "storage", "wandb", "data"}
    )
    assert "may open 128 files" in red["limits"][0] and "ulimit -n" in red["limits"][0]
    assert "Permission denied" in red["storage"][0] and "--run.dir" in red["storage"][0]
    assert "required; key: no" in red["wandb"][0] and "WANDB_API_KEY" in red["wandb"][0]
    assert names[1] in red["data"][0] and "data.val" in red["data"][1]
    assert ".mask.pages' is missing" in red["data"][2] and "eval.tasks: core=" in red["data"][3]
    assert {"devices", "mesh", "room", "matmul", "clocks", "same", "links"} <= rows(out, OK).keys()
    assert not [*runs.iterdir()]


@pytest.mark.parametrize("seconds", ["0", "nan"])
def test_no_time_for_a_check_is_a_mistake_and_no_fault_of_the_machine(seconds):
    doctor = start("--seconds", seconds)
    out, err = doctor.communicate(timeout=60)
    assert (doctor.returncode, out) == (USAGE, "")
    assert f"error: seconds={float(seconds)} must be at least 0.1\n  fix: " in err


def test_a_check_may_take_any_time():
    rows = doctor.run_check(doctor.limits, None, {}, math.inf)
    assert rows and not [row.what for row in rows if "OverflowError" in row.what]


def test_a_mesh_that_does_not_fit_is_red_and_not_measured(tmp_path):
    axes = ["--mesh.dp", 2, "--mesh.pp", 2, "--mesh.tp", 2]
    env = ENV | dict(JAX_NUM_CPU_DEVICES="4")
    code, out, _ = finish(start(*axes, cwd=tmp_path, env=env))
    assert code == USAGE and rows(out, FAIL).keys() == {"mesh"}
    assert "2*2*2 = 8 but only 4" in rows(out, FAIL)["mesh"][0]
    assert "matmul" in rows(out, OK) and "links" not in out


def test_versions_are_compared_with_the_tested_ones(monkeypatch):
    for version, status in (("0.9.2", FAIL), ("0.13.0", FAIL), ("0.11.0", WARN)):
        monkeypatch.setattr(jax, "__version__", version)
        found = dict(facts={})
        rows = doctor.versions(config.tiny(), found)  # more where other packages are newer
        assert [x.status for x in rows if f"jax is {version}, and" in x.what] == [status]
        assert found["facts"]["jax"] == version


def test_a_system_without_proc_and_shared_memory_is_not_red(monkeypatch, tmp_path):
    """As macOS is."""
    for module in (doctor, utils):
        monkeypatch.setattr(module, "Path", lambda path: tmp_path / path[1:])
    for check in (doctor.limits, doctor.room):
        rows = doctor.run_check(check, config.tiny(), dict(facts={}))
        assert rows and FAIL not in [row.status for row in rows], rows


def test_a_cpu_needs_memory_for_the_state_and_for_a_checkpoint_of_it(monkeypatch):
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_shapes(config.tiny())))
    for free, status in ((2 * size - 1, FAIL), (2 * size, OK)):
        monkeypatch.setattr(utils, "free_memory", lambda free=free: free)
        (row,) = [row for row in doctor.room(config.tiny(), {}) if "of memory" in row.what]
        assert row.status == status


def test_the_disk_has_room_for_the_other_kept_checkpoints_too():
    for more, n in ((dict(), 3), (dict(best=True), 5), (dict(keep_every=10), 6)):  # 0, 10, 20
        cfg = replace(config.tiny(), checkpoint=replace(config.tiny().checkpoint, **more))
        (row,) = [row for row in doctor.room(cfg, {}) if "run.dir" in row.what]
        assert f"{n} checkpoints" in row.what


@pytest.mark.parametrize("peak, status", [(1e-6, OK), (275, FAIL)])
def test_speeds_are_compared_with_the_data_sheet(monkeypatch, peak, status):
    """If this CPU's were that of a TPU v4, its devices would be far too slow."""
    monkeypatch.setitem(chips.PEAK_TFLOPS, "cpu", peak)
    if peak == 275:
        monkeypatch.setitem(chips.JAX_NAMES, "cpu", "TPU v4")
    (*products,) = doctor.matmul(config.tiny(), {})
    assert [row.status for row in products] == [status] * len(jax.local_devices())
    mesh = jax.make_mesh((2, 1, 4), utils.AXES)
    sums = [*doctor.links(config.tiny(), dict(mesh=mesh))]
    assert [row.what[:5] for row in sums] == ["dp=2:", "tp=4:"]
    assert all(row.status == status for row in sums)
    assert all(row.what.endswith("; data sheet: 90") == (peak == 275) for row in sums)


def test_a_link_is_not_compared_with_that_of_another_chip_of_the_same_peak(monkeypatch):
    """Only the name of a device tells what its links are."""
    monkeypatch.setitem(chips.PEAK_TFLOPS, "cpu", chips.PEAK_TFLOPS["NVIDIA H100 80GB HBM3"])
    (row,) = doctor.links(config.tiny(), dict(mesh=jax.make_mesh((8, 1, 1), utils.AXES)))
    assert row.status == OK and "data sheet" not in row.what


def test_every_axis_of_a_mesh_with_slices_is_measured():
    mesh = jax.make_mesh((2, 2, 1, 2), (config.SLICE, *utils.AXES))
    found = [row.what.split(":")[0] for row in doctor.links(config.tiny(), dict(mesh=mesh))]
    assert found == ["slice=2", "dp=2", "tp=2"]


def test_the_device_with_the_least_free_memory_is_shown(monkeypatch):
    class Device:
        device_kind, limit = "TPU v4", 32 * GIB

        def __init__(self, n, used):
            self.id, self.used = n, used

        def memory_stats(self):
            return dict(bytes_limit=self.limit, bytes_in_use=self.used * GIB)

    here = [Device(0, 1), Device(1, 2), Device(2, 20), Device(3, 17)]
    monkeypatch.setattr(jax, "local_devices", lambda: here)
    rows = doctor.run_check(doctor.devices, config.tiny(), dict(facts={}))
    red, *others = doctor.merge([dict(host="a", rows=rows)])
    assert red.status == FAIL and red.what == "device 2 has 12.00 of 32.00 GiB free"
    assert [row.what for row in others] == [
        f"4 x TPU v4; {jax.device_count()} in all processes",
        "device 1 has 30.00 of 32.00 GiB free",
    ]


def test_clocks_that_differ_more_than_the_exchange_took_are_told(monkeypatch):
    """Process 0 leaves the exchange between 10 and 10.2 by its clock."""
    monkeypatch.setattr(utils, "process_id", lambda: 1)
    for span, status in (((10, 10.3), OK), ((11, 12), OK), ((12, 12.2), WARN), ((95, 96), FAIL)):
        monkeypatch.setattr(utils, "exchange", lambda value, span=span: [(10, 10.2), span])
        (row,) = doctor.clocks(config.tiny(), {})
        assert row.status == status, row
    assert row.what == "+85400.0 ms from process 0, give or take 600.0"


def test_of_rows_that_say_the_same_the_worst_is_shown():
    def answer(host, *found):
        return dict(host=host, rows=[Row(*x, check="matmul") for x in found])

    slow = FAIL, "device 7 does 0.5 TFLOP/s", "look", 0.5
    fast = [(OK, f"device {n} does {x} TFLOP/s", "", x) for n, x in enumerate((3.0, 2.5, 3.5))]
    red, ok = doctor.merge(
        [answer("a", *fast[:2]), answer("b", fast[2], slow), answer("c", fast[0])]
    )
    assert red.what == "device 7 does 0.5 TFLOP/s (process 1; shown: 1 on b)" and red.fix == "look"
    assert ok.what == "device 1 does 2.5 TFLOP/s (processes 0, 1 and 2; shown: 0 on a)"


# ---- several processes


def start_two(first: list, second: list, cwd=(None, None), env=(ENV, ENV)):
    """doctor.py in two processes."""
    together = ["--run.coordinator", f"127.0.0.1:{free_port()}", "--run.num_processes", 2]
    options = [dict(cwd=cwd[n], env=env[n]) for n in (0, 1)]
    return [
        start(*words, *together, f"--run.process_id={n}", **options[n])
        for n, words in enumerate((first, second))
    ]


@pytest.mark.slow
def test_two_processes_have_one_table(tmp_path):
    flags = [
        "--config",
        "tiny",
        *SYNTHETIC,
        "--mesh.tp",
        2,
        "--run.dir",
        tmp_path,
        "--log.wandb",
        "off",
    ]
    began = time.monotonic()
    both = [finish(process) for process in start_two(flags, flags)]
    assert [code for code, _, _ in both] == [0, 0] and "storage" not in both[1][1], both
    assert time.monotonic() - began < 30
    found = rows(both[0][1], OK)
    assert "2 in all processes (processes 0 and 1; shown: 0 on" in found["devices"][0]
    assert re.search(
        r"ms from process 0, give or take \d+\.\d \(processes 0 and 1;", found["clocks"][0]
    )
    assert any(re.match(r"tp=2: .* receives [\d.]+ GB/s", what) for what in found["links"])
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_what_differs_between_two_processes_is_red_in_both(corpus, tmp_path):
    """Other data under the same relative path, another flag, and another version."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, source in zip(folders, ("train", "val"), strict=True):
        shutil.copytree(corpus / source, folder / "data")
    about = tmp_path / "site" / "optax-9.9.9.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n")
    env = ENV | dict(PYTHONPATH=str(about.parent))
    flags = ["--config", "tiny", "--data.train", "data", "--data.val", corpus / "val"]
    flags += ["--run.dir", tmp_path / "runs"]
    both = start_two(flags, [*flags, "--optim.lr", "0.02"], folders, (ENV, env))
    both = [finish(process) for process in both]
    assert [code for code, _, _ in both] == [USAGE, USAGE] and "Traceback" not in str(both)
    red = rows(both[0][1], FAIL)
    assert red.keys() == {"same"} and len(red["same"]) == 3, red
    data, version, setting = red["same"]
    assert re.match(r"data.train is \w{32} in process 0, \w{32} in process 1 ", data)
    assert re.match(r"optax is \d\S+ in process 0, 9.9.9 in process 1 ", version)
    assert "optim.lr differs: 0.01 in process 0, 0.02 in process 1" in setting
    assert "optax is 9.9.9" in rows(both[0][1], WARN)["versions"][0]
    assert "(process 1; shown: 1 on" in rows(both[0][1], WARN)["versions"][0]


# ---- buckets


@pytest.fixture(scope="module")
def bucket():
    with emulate_bucket(ENV) as bucket:
        yield bucket


@pytest.mark.slow
def test_a_bucket_is_written_and_left_as_it_was(bucket, corpus):
    for path in (corpus / "val").iterdir():
        bucket.write(f"val/{path.name}", path.read_bytes())
    bucket.write("runs/tiny/notes.txt", b"mine")
    before = bucket.contents("")
    data = ["--data.train", "gs://bucket/val", "--data.val", "gs://bucket/val"]
    flags = ["--config", "tiny", *data, "--run.dir", "gs://bucket/runs", "--seconds", 30]
    code, out, err = finish(start(*flags, env=bucket.env))
    assert code == 0, out + err
    found = rows(out, OK) | rows(out, WARN)  # the emulator may be slow
    assert re.match("1 MiB in gs://bucket/runs: write [0-9.]+ ms, read", found["storage"][0])
    assert bucket.contents("") == before
    bucket.set_faults(read_only=True)
    try:
        code, out, err = finish(start(*flags, env=bucket.env))
    finally:
        bucket.set_faults()
    assert code == USAGE and rows(out, FAIL).keys() == {"storage"} and "Traceback" not in err
    assert "Forbidden" in rows(out, FAIL)["storage"][0] and bucket.contents("") == before
    shard = next((corpus / "val").glob("*.npy")).name
    bucket.call("DELETE", object_path(f"val/{shard}"))  # its pages are still in data.cache
    code, out, err = finish(start(*flags, env=bucket.env))
    assert code == USAGE and f"'{shard}' is missing" in rows(out, FAIL)["data"][0]


@pytest.mark.slow
def test_a_bucket_that_never_answers_is_not_waited_for(bucket):
    """Neither as run.dir nor as data, and all else is looked at."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = [
            "--config",
            "tiny",
            "--mesh.tp",
            2,
            "--data.train",
            "gs://bucket/a",
            "--data.val",
            "synthetic",
        ]
        env = bucket.env | dict(STORAGE_EMULATOR_HOST=address)
        began = time.monotonic()
        process = start(*flags, "--run.dir", "gs://bucket/runs", env=env)
        code, out, _ = finish(process)
    assert code == USAGE and time.monotonic() - began < 20
    red = rows(out, FAIL)
    assert red.keys() == {"storage", "data"}
    assert all("no answer within 3 s" in what for (what,) in red.values())
    assert {"matmul", "clocks", "same", "links"} <= rows(out, OK).keys()
