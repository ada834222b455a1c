"""gs:// from end to end, in real processes on an emulated bucket: data, training, resuming, locking
and sampling.  The processes share a compilation cache, which saves most of their time."""

import copy
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote

import pytest
from buckets import Bucket, emulate_bucket, object_path
from conftest import ROOT

pytestmark = pytest.mark.slow

JSON_PACKAGE = Path(json.__file__).parent
MESH = ["--mesh.dp", 2, "--mesh.pp", 1, "--mesh.tp", 2]
EVERY = ["--train.eval_every", 3, "--checkpoint.every", 2, "--log.every", 1]
RUN = ["--config", "tiny", *MESH, "--train.steps", 6, *EVERY]
SET_BY_CONFTEST = {"JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS"}


# ---- processes


def start(bucket: Bucket, script: str, *args, beat: int = 1) -> subprocess.Popen:
    """`python script args` in the background; its leases are renewed every `beat` seconds."""
    command = [sys.executable, ROOT / script, *args]
    return subprocess.Popen(
        [*map(str, command)],
        env=bucket.env | {"TRIFOLD_LEASE_BEAT": str(beat)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """Wait for a process to end with this exit code; returns what it has printed."""
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    assert process.returncode == code, output
    return output


def run(bucket: Bucket, script: str, *args, code: int = 0, beat: int = 1) -> str:
    return finish(start(bucket, script, *args, beat=beat), code)


def wait_for_object(bucket: Bucket, name: str, process: subprocess.Popen):
    """Return as soon as the running process has written this object."""
    deadline = time.monotonic() + 60
    while not bucket.has(name):
        if time.monotonic() > deadline:
            process.kill()
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def prepare(bucket: Bucket, out):
    flags = ["--suffix", ".py", "--tokenizer", "byte", "--val_fraction", 0.2]
    run(bucket, "scripts/prepare_data.py", "--input", JSON_PACKAGE, *flags, "--out", out)


# ---- what several tests use


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    inherited = {name: v for name, v in os.environ.items() if name not in SET_BY_CONFTEST}
    cache = dict(JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.mktemp("compile_cache")))
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    with emulate_bucket(inherited | cache) as bucket:
        yield bucket


@pytest.fixture(scope="module")
def on_disk(bucket, tmp_path_factory) -> Path:
    """A folder with the data and the run `a`, made without gs://."""
    folder = tmp_path_factory.mktemp("disk")
    prepare(bucket, folder / "data")
    data = ["--data.train", folder / "data" / "train", "--data.val", folder / "data" / "val"]
    run(bucket, "train.py", *RUN, *data, "--run.dir", folder / "runs", "--run.name", "a")
    return folder


@pytest.fixture(scope="module")
def flags(bucket, tmp_path_factory) -> list:
    """The same command with its data and runs in the bucket; the data is prepared there."""
    prepare(bucket, "gs://bucket/data")
    data = ["--data.train", "gs://bucket/data/train", "--data.val", "gs://bucket/data/val"]
    cache = ["--data.cache", tmp_path_factory.mktemp("cache")]
    return [*RUN, *data, *cache, "--run.dir", "gs://bucket/runs"]


@pytest.fixture(scope="module")
def run_a(bucket, on_disk, flags) -> str:
    """The prefix of the finished run `a` in the bucket; on_disk has compiled its programs."""
    run(bucket, "train.py", *flags, "--run.name", "a")
    return "runs/a/"


@pytest.fixture(scope="module")
def live_run(bucket, run_a, flags):
    """The process of an endless run that was started with --fresh over a finished one."""
    bucket.copy(run_a, "runs/live/")
    endless = ["--train.steps", 10**6, "--train.eval_every", 0, "--checkpoint.every", 10**6]
    process = start(bucket, "train.py", *flags, *endless, "--run.name", "live", "--fresh")
    wait_for_object(bucket, "runs/live/checkpoints/0/commit_success.txt", process)
    yield process
    process.kill()
    process.communicate()


def losses(metrics: bytes) -> list:
    rows = [json.loads(line) for line in metrics.splitlines()]
    return [(row["kind"], row["step"], row["loss"], row.get("grad_norm")) for row in rows]


def run_code(bucket, code: str, *words, **env) -> subprocess.CompletedProcess:
    """Python code that has run in a process of its own, which sees the bucket."""
    command = [sys.executable, "-c", code, *map(str, words)]
    env = bucket.env | env
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)


# ---- tests


def test_an_emulated_bucket_is_not_asked_for_its_kind(bucket):
    code = "import files, fsspec; print(fsspec.get_filesystem_class('gs').__module__)"
    done = run_code(bucket, code)
    assert done.stdout == "gcsfs.core\n", done


def test_the_emulator_answers_at_once_on_a_connection_that_is_kept(bucket):
    bucket.write("kept", b"x" * 100)
    connection, times = HTTPConnection(bucket.host, timeout=30), []
    for _ in range(40):
        begin = time.monotonic()
        connection.request("GET", f"{object_path('kept')}?alt=media", headers={"x-spared": "yes"})
        assert connection.getresponse().read() == b"x" * 100
        times.append(time.monotonic() - begin)
    connection.close()
    assert statistics.median(times) < 0.03  # 0.044 with Nagle's algorithm


def test_the_emulator_answers_as_google_does(bucket):
    """Requests that gcsfs and tensorstore send, some of them only when several processes save."""
    name = "emulator/one"
    bucket.write(name, b"0123456789", ifGenerationMatch=0)
    bucket.write(name, b"again", ifGenerationMatch=0, code=412)
    assert bucket.read(name, ifGenerationNotMatch=0) == b"0123456789"
    about, _ = bucket.call("GET", object_path(name))
    _, headers = bucket.call("GET", object_path(name), alt="media")
    assert headers["x-goog-generation"] == json.loads(about)["generation"]
    bucket.read(name, ifGenerationNotMatch=headers["x-goog-generation"], code=304)

    ranges = {"2-5": b"2345", "7-": b"789", "-3": b"789", "8-99": b"89", "-99": b"0123456789"}
    for part, data in ranges.items():
        assert bucket.read(name, headers={"Range": f"bytes={part}"}, code=206) == data
    bucket.read(name, headers={"Range": "bytes=10-"}, code=416)

    bucket.write("emulator/two", b"2")
    assert bucket.names("emulator/", startOffset="emulator/two") == {"two"}
    assert bucket.names("emulator/", endOffset="emulator/two") == {"one"}
    new_name = quote("emulator/three", safe="")
    bucket.call("POST", f"{object_path('emulator/two')}/moveTo/o/{new_name}")
    assert bucket.contents("emulator/") == {"one": b"0123456789", "three": b"2"}
    bucket.read("emulator/two", code=404)


def test_a_data_set_in_a_bucket_equals_the_one_on_disk(bucket, flags, on_disk):
    folder = on_disk / "data"
    files = [path for path in folder.rglob("*") if path.is_file()]
    local = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    assert bucket.contents("data/") == local
    assert {"train/manifest.json", "val/manifest.json"} < bucket.names("data/")


def test_a_run_in_a_bucket_equals_the_one_on_disk(bucket, run_a, on_disk):
    metrics = bucket.read(run_a + "metrics.jsonl")
    expected = losses((on_disk / "runs" / "a" / "metrics.jsonl").read_bytes())
    assert [step for kind, step, *_ in expected if kind == "train"] == [1, 2, 3, 4, 5, 6]
    assert losses(metrics) == expected

    names = bucket.names(run_a)
    files = {name for name in names if not name.startswith("checkpoints/")}
    rest = {"config.json", "history.jsonl", "loss.png", "tokenizer.json"}
    assert files == {"metrics.jsonl"} | rest
    assert json.loads(bucket.read(run_a + "history.jsonl"))["end"] == "finished"
    assert {name.split("/")[1] for name in names - files} == {"4", "6"}
    assert {f"checkpoints/{n}/commit_success.txt" for n in (4, 6)} < names
    assert json.loads(bucket.read(run_a + "config.json"))["run"]["dir"] == "gs://bucket/runs"
    assert bucket.read(run_a + "loss.png").startswith(b"\x89PNG\r\n\x1a\n")
    assert bucket.read(run_a + "tokenizer.json") == bucket.read("data/train/tokenizer.json")


def test_a_killed_run_resumes_to_the_same_losses(bucket, run_a, flags):
    process = start(bucket, "train.py", *flags, "--run.name", "killed")
    wait_for_object(bucket, "runs/killed/checkpoints/2/commit_success.txt", process)
    process.kill()
    finish(process, -signal.SIGKILL)
    whole = losses(bucket.read(run_a + "metrics.jsonl"))
    assert len(losses(bucket.read("runs/killed/metrics.jsonl"))) < len(whole)

    output = run(bucket, "train.py", *flags, "--run.name", "killed")
    assert re.search(r"resume: update [24] \(verified\) from gs://bucket/runs/killed/", output)
    assert losses(bucket.read("runs/killed/metrics.jsonl")) == whole


def test_fresh_renames_the_whole_old_run(bucket, run_a, live_run):
    assert bucket.contents("runs/live.old/") == bucket.contents(run_a)
    checkpoints = {name.split("/")[0] for name in bucket.names("runs/live/checkpoints/")}
    assert checkpoints <= {"0", "1000000"} and "0" in checkpoints


CUT_OFF = """
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
import gcsfs
import config, files, rundir

left, move = int(sys.argv[2]), gcsfs.GCSFileSystem._mv_file

async def die_later(*args):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    await move(*args)

gcsfs.GCSFileSystem._mv_file = die_later
source = SimpleNamespace(fingerprint="", tokenizer=None)
cfg = replace(config.Config(), fresh=True)
rundir.prepare_run(files.absolute_path(sys.argv[1]), cfg, source, None).release()
"""


def test_fresh_that_is_killed_moves_the_rest_to_the_same_folder(bucket, run_a, flags):
    bucket.copy(run_a, "runs/cut/")
    bucket.write("runs/cut.old/notes", b"of another")
    beat, n_left = dict(TRIFOLD_LEASE_BEAT="0.2"), len(bucket.names(run_a))
    for n_moved, code in ((20, 9), (n_left - 21, 9), (10**6, 0)):
        done = run_code(bucket, CUT_OFF, "gs://bucket/runs/cut", n_moved, **beat)
        assert done.returncode == code, done
        if code:
            output = run(bucket, "train.py", *flags, "--run.name", "cut", code=4)
            assert "give --fresh, which moves the rest" in output
    assert bucket.contents("runs/cut.old.2/") == bucket.contents(run_a)
    assert bucket.names("runs/cut/") == {"config.json"}
    assert bucket.names("runs/cut.old/") == {"notes"}


def test_the_note_of_a_stranger_sends_no_run_to_another_folder(bucket):
    for n, target in enumerate([b"other", b"../other", b"led2.old/../other"]):
        run = f"runs/led{n}"
        bucket.write(f"{run}/config.json", b"{}")
        bucket.write(f"{run}/moving_to", target)
        done = run_code(bucket, CUT_OFF, f"gs://bucket/{run}", 100, TRIFOLD_LEASE_BEAT="0.2")
        assert done.returncode == 0, done
        assert bucket.names(f"{run}.old/") == bucket.names(f"{run}/") == {"config.json"}
        assert not bucket.names("runs/other/") | bucket.names("other/")


def test_a_second_run_is_refused_while_the_first_is_live(bucket, flags, live_run):
    # It waits for 30 s, because on a busy machine the first run may renew its lease late.
    output = run(bucket, "train.py", *flags, "--run.name", "live", code=8, beat=10)
    assert "gs://bucket/runs/live belongs to another live run" in output

    live_run.send_signal(signal.SIGTERM)
    assert "run the same command again to go on" in finish(live_run, 75)
    assert not bucket.has("runs/live/lock")
    steps = [step for _, step, *_ in losses(bucket.read("runs/live/metrics.jsonl"))]
    assert steps == list(range(1, len(steps) + 1))
    assert bucket.has(f"runs/live/checkpoints/{len(steps)}/commit_success.txt")


RACE = """
import sys
import threading
import files, lock

leases, barrier = [], threading.Barrier(8)

def start(path):
    barrier.wait()
    try:
        leases.append(lock.take_lock(path))
    except lock.UserError as e:
        assert e.code == 8 and "belongs to another live run" in str(e), e

for name in sys.argv[1:]:
    path = files.absolute_path(name)
    threads = [threading.Thread(target=start, args=[path]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(leases), flush=True)
    if leases:
        leases.pop().release()
"""


def test_of_runs_that_start_at_once_in_a_bucket_one_gets_the_lease(bucket):
    """Eight at a time: where there is no lease, and where one has expired."""
    for n in range(5):
        bucket.write(f"runs/race{2 * n}/lock", b'{"id": "an earlier run"}')
    names = [f"gs://bucket/runs/race{n}" for n in range(10)]
    command = [sys.executable, "-c", RACE, *names]
    env = bucket.env | {"TRIFOLD_LEASE_BEAT": "0.5"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    counts = [line for line in done.stdout.split("\n") if line.isdigit()]
    assert counts == ["1"] * 10 and not done.stderr, done
    assert not bucket.names("runs/race")


UNREAD = """
import os
import sys
import time
import files, lock

lease = lock.take_lock(files.absolute_path(sys.argv[1]))
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
write, lease.file.write = lease.file.write, None  # as storage that fails
time.sleep(1)
before, lease.file.write = lease.generation, write
deadline = time.monotonic() + 30
while lease.generation == before and time.monotonic() < deadline:
    time.sleep(0.1)
print(lease.generation != before)
"""


def test_a_lease_is_renewed_though_nothing_reads_its_warnings(bucket):
    command = [sys.executable, "-c", UNREAD, "gs://bucket/runs/unread"]
    env = bucket.env | {"TRIFOLD_LEASE_BEAT": "0.2"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    assert done.stdout == "True\n"


LOST = """
import sys
import files, lock

lease = lock.take_lock(files.absolute_path(sys.argv[1]))
write, n_lost = lease.file.write, iter(range(3))

def lose(text, generation):
    written = write(text, generation)
    return written if next(n_lost, None) is None else None  # gcsfs repeats it, and meets 412

lease.file.write = lose
lease.generation = lease.write(lease.generation)
print(lease.generation == lease.file.read()[0])
lease.release()
"""


def test_a_lease_stays_though_several_answers_are_lost(bucket):
    command = [sys.executable, "-c", LOST, "gs://bucket/runs/lost"]
    done = subprocess.run(command, capture_output=True, text=True, env=bucket.env, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("True\n", "")


REFUSED = """
import sys
import gcsfs
import files

async def refuse(*args, **kwargs):
    raise OSError("Forbidden")

gcsfs.GCSFileSystem._cat_file_sequential = refuse
try:
    files.absolute_path(sys.argv[1]).read_bytes()
except OSError as e:
    print(e)
"""


def test_a_read_that_is_refused_logs_no_traceback(bucket):
    bucket.write("refused", b"x")
    done = run_code(bucket, REFUSED, "gs://bucket/refused")
    assert (done.stdout, done.stderr) == ("Forbidden\n", "")


UNLISTED = """
import sys
import gcsfs
import files, shards

listed, n = gcsfs.GCSFileSystem._list_objects, 0

async def refuse_the_second(*args, **kwargs):
    global n
    n += 1
    if n == 2:
        raise OSError("Forbidden")
    return await listed(*args, **kwargs)

gcsfs.GCSFileSystem._list_objects = refuse_the_second
try:
    shards.find_shards(files.absolute_path(sys.argv[1]), "train")
except OSError as e:
    print(e)
"""


def test_a_folder_that_cannot_be_listed_is_not_a_missing_shard(bucket):
    bucket.write("unlisted/train.bin", b"xx")
    done = run_code(bucket, UNLISTED, "gs://bucket/unlisted")
    assert (done.stdout, done.stderr) == ("Forbidden\n", "")


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(bucket, run_a, flags):
    bucket.copy(run_a, "runs/damaged/")
    newest = "runs/damaged/checkpoints/6/"
    sizes = {name: len(data) for name, data in bucket.contents(newest + "params/").items()}
    largest = newest + "params/" + max(sizes, key=sizes.get)
    data = bytearray(bucket.read(largest))
    data[len(data) // 2] ^= 1
    bucket.write(largest, bytes(data))
    damaged = bucket.contents(newest)

    output = run(bucket, "train.py", *flags, "--run.name", "damaged", "--eval_only")
    assert "resume: update 4 (verified) from gs://bucket/runs/damaged/checkpoints" in output
    assert bucket.contents("runs/damaged/damaged/6/") == damaged
    assert not bucket.names(newest)


def test_a_run_is_evaluated_in_a_bucket_that_can_only_be_read(bucket, run_a, flags):
    before = bucket.contents(run_a)
    bucket.set_faults(read_only=True)
    try:
        output = run(bucket, "train.py", *flags, "--run.name", "a", "--eval_only")
        refusal = run(bucket, "train.py", *flags, "--run.name", "a", code=5)
    finally:
        bucket.set_faults()
    (loss,) = [row[2] for row in losses(before["metrics.jsonl"]) if row[:2] == ("eval", 6)]
    assert f"validation loss {loss:.4f}" in output
    assert "cannot write to gs://bucket/runs/a" in refusal and "Traceback" not in refusal
    assert bucket.contents(run_a) == before


@pytest.mark.parametrize("flag, path, code", [
    ("--run.dir", "gs://no_bucket/runs", 5), ("--data.train", "gs://no_bucket/train", 3),
])  # fmt: skip
def test_a_bucket_that_is_not_there_is_named(bucket, flags, flag, path, code):
    output = run(bucket, "train.py", *flags, "--run.name", "none", flag, path, code=code)
    assert re.search(rf"^error: .*{path}.*\n  fix: ", output, re.M) and "Traceback" not in output


def test_a_stopped_run_in_a_bucket_leaves_no_temporary_files(bucket, run_a, flags, tmp_path):
    there = copy.copy(bucket)
    there.env = bucket.env | dict(TMPDIR=str(tmp_path))
    files = ["--log.tensorboard", True, "--train.profile", 2, 1]
    process = start(there, "train.py", *flags, *files, "--train.steps", 10**6, "--run.name", "stop")
    wait_for_object(bucket, "runs/stop/checkpoints/2/commit_success.txt", process)
    assert len([*tmp_path.glob("trifold-*")]) == 4
    process.send_signal(signal.SIGTERM)
    finish(process, 75)
    assert bucket.names("runs/stop/tensorboard/") and bucket.names("runs/stop/profile/plugins/")
    assert not [*tmp_path.glob("trifold-*")]


def test_a_run_is_sampled_from_its_bucket(bucket, run_a):
    request = ["--prompt", "import ", "--tokens", 4, "--temperature", 0, "--mesh.dp", 1]
    output = run(bucket, "scripts/sample.py", "--run", f"gs://bucket/{run_a}", *request)
    assert re.search(r"^import .", output, re.MULTILINE)
