"""Check before a run whether the machines, the storage and the data are fit for it.

    python scripts/doctor.py --config demo --report doctor.json

Start it like train.py, with the same flags, in every process of the run.  Without --config, the run
is that of a small model on random tokens.  It removes what it has written to run.dir.

Dimension key: D rows and columns of a matrix, N elements.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import cli
from config import Config


@dataclass(frozen=True)
class Args:
    report: str = ""
    """A file to write for a bug report: the table, settings, versions, environment; no secrets."""
    seconds: float = 3.0
    """Seconds that most checks may take; those that compile may take three times as long."""


# These sizes have many divisors, so that nearly any mesh divides them: 1536 = 3 * 2**9.
SMALL = "--config=tiny --data.train=synthetic --data.val=synthetic --train.batch_size=1536"
SMALL += " --model.d_model=1536"


def parse() -> tuple[Args, Config]:
    args, rest = cli.read_args(Args, __doc__, return_unknown_args=True)
    cli.check_at_least(args, seconds=0.1)
    cfg = cli.parse(rest if "--config" in " ".join(rest) else [*SMALL.split(), *rest])
    cli.simulate_devices(cfg.mesh, cfg.run.num_processes)
    return args, cfg


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

import json
import os
import re
import resource
import shutil
import time
from functools import partial
from importlib import metadata
from timeit import repeat, timeit
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import files
import processes
import rundir
import runstate
import utils
from boards import has_wandb_key
from chips import GIB, PEAK_TFLOPS, chip_of
from connect import name_ids
from dataset import Dataset, TokenFiles, check_tokenizers, parts_of
from errors import USAGE, UserError, describe, exit_at_once
from lock import FileLock
from parsers import read_sets
from scripts.outputs import check_output, nearest_folder
from tasks import open_tasks

STATUSES = FAIL, WARN, OK = "FAIL", "warn", "ok"


class Row(NamedTuple):
    """A line of the table."""

    status: str
    what: str
    fix: str = ""
    """By default the docstring of the check."""
    score: float = 0.0
    """Of lines that differ only in numbers, the one with the lowest score is shown."""
    check: str = ""


def grade(value: float, least: float, enough: float, what: str) -> Row:
    """A FAIL if the value is below `least`, or else a warning if it is below `enough`."""
    return Row(FAIL if value < least else WARN if value < enough else OK, what, score=value)


# ---- checks of one process.  A check yields rows, and puts into `found` what later checks need.
# Its docstring is the fix of those rows that have none of their own.

RELEASES = dict(python=("3.11.", "3.12.", "3.13."), jax=("0.10.", "0.11.", "0.12."))


def versions(cfg: Config, found: dict):
    """take Python 3.11 to 3.13, and pip install --require-hashes -r requirements.txt"""
    has = rundir.run_record(cfg)["versions"] | dict(optax=metadata.version("optax"))
    found["facts"] |= has
    # The package of the module orbax.checkpoint is named orbax-checkpoint.
    pins = (ROOT / "requirements.in").read_text().replace("-", ".")
    for name, version in has.items():
        pinned = re.findall(rf"^{name}==([\w.]+)", pins, re.M)
        releases = RELEASES.get(name.removesuffix("lib"), ("",))
        if not version.startswith(releases):
            yield Row(FAIL, f"{name} is {version}, and the tests run on {'x, '.join(releases)}x")
        elif pinned and version not in pinned:
            yield Row(WARN, f"{name} is {version}, and the tests run on {' and '.join(pinned)}")
    yield Row(OK, ", ".join(f"{name} {version}" for name, version in has.items()))


def devices(cfg: Config, found: dict):
    """end other programs that use the devices, and see the driver's log"""
    utils.find_devices()
    here = jax.local_devices()
    found["facts"]["devices"] = what = f"{len(here)} x {here[0].device_kind}"
    yield Row(OK, f"{what}; {jax.device_count()} in all processes")
    for device in here:
        if memory := device.memory_stats():  # None on a CPU
            limit, free = memory["bytes_limit"], memory["bytes_limit"] - memory["bytes_in_use"]
            what = f"device {device.id} has {free / GIB:.2f} of {limit / GIB:.2f} GiB free"
            yield grade(free / limit, 0.5, 0.9, what)


def mesh(cfg: Config, found: dict):
    """choose --mesh.dp, --mesh.pp and --mesh.tp for these devices"""
    utils.start_mesh(cfg)
    found["mesh"] = jax.sharding.get_mesh()
    found["facts"]["mesh"] = what = str(dict(found["mesh"].shape))
    yield Row(OK, what)


def limits(cfg: Config, found: dict):
    """ulimit -n 65536; in a container, docker run --shm-size 8g"""
    n, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1, no limit, is large modulo 2**63
    yield grade(n % 2**63, 256, 1024, f"a process may open {n} files; 1024 are enough")
    shared, least = Path("/dev/shm"), 1 if Path("/dev/nvidia0").exists() else 0
    if shared.exists():  # not on macOS
        free = shutil.disk_usage(shared).free / GIB
        yield grade(free, least, least, f"{free:.2f} GiB of /dev/shm are free; GPUs need 1.00")


def run_folder(cfg: Config):
    """run.dir, or the first folder above it that exists."""
    return nearest_folder(files.absolute_path(cfg.run.dir))


def room(cfg: Config, found: dict):
    """free some, use a larger disk or more hosts, or keep less: --checkpoint.keep and keep_every"""
    shapes = jax.tree.leaves(runstate.state_shapes(cfg))
    c = cfg.checkpoint
    keep = c.keep + 2 * c.best + 1  # one more while it is saved
    keep += 1 + cfg.train.steps // c.keep_every if c.keep_every else 0  # 0 is kept too
    size = sum(x.size * x.dtype.itemsize for x in shapes) / GIB
    free, part = utils.free_memory(), size / len(utils.process_ids())
    if free is not None:
        on_cpu = jax.devices()[0].platform == "cpu"  # whose arrays are in the same memory
        what = f"{free / GIB:.2f} GiB of memory are free; a checkpoint's part is {part:.2f}"
        what += ", and the state is as large" if on_cpu else ""
        need = part * (1 + on_cpu)
        yield grade(free / GIB, need, need, what)
    if not files.is_remote(cfg.run.dir):
        free = shutil.disk_usage(run_folder(cfg)).free / GIB
        what = f"{free:.2f} GiB are free in run.dir; {keep} checkpoints are {keep * size:.2f}"
        yield grade(free, size, keep * size, what)


def save(folder: Path):
    """Write a file as orbax does: locked by tensorstore, in a folder that is renamed at the end."""
    part = folder.with_suffix(".part")
    try:
        store = tensorstore.KvStore.open(dict(driver="file", path=f"{part}/")).result()
        store.write("file", b"content").result()
        os.rename(part, folder)
    finally:
        for path in part, folder:
            shutil.rmtree(path, ignore_errors=True)


def storage(cfg: Config, found: dict):
    """let this user write to --run.dir, or name another folder; --seconds 20 waits longer"""
    folder = run_folder(cfg)
    probe = folder / f"doctor-{os.urandom(16).hex()}"
    steps = dict(write=partial(probe.write_bytes, os.urandom(2**20)), read=probe.read_bytes)
    if not files.is_remote(folder):  # a run locks its directory
        steps |= dict(lock=lambda: FileLock(probe).release())
        steps |= dict(save=partial(save, Path(f"{probe}-folder")))
    steps |= dict(list=lambda: [*folder.iterdir()], delete=probe.unlink)
    try:
        ms = {name: 1000 * timeit(step, number=1) for name, step in steps.items()}
    finally:
        probe.unlink(missing_ok=True)
    what = ", ".join(f"{name} {x:.1f} ms" for name, x in ms.items())
    yield grade(-max(ms.values()), -np.inf, -1000, f"1 MiB in {folder}: {what}")


def wandb(cfg: Config, found: dict):
    """set WANDB_API_KEY, or use --log.wandb offline"""
    if utils.is_lead():  # no other process needs it
        key = "yes" if has_wandb_key() else "no"
        status = OK if key == "yes" else dict(online=WARN, required=FAIL).get(cfg.log.wandb, OK)
        yield Row(status, f"log.wandb={cfg.log.wandb}; key: {key}")


def data(cfg: Config, found: dict):
    """let this user read the data and tasks, or name others; --seconds 20 waits longer"""
    sources, one = {}, Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), utils.AXES)
    for split, name in [("train", ""), *(("val", name) for name in read_sets(cfg.data.val))]:
        try:
            with jax.set_mesh(one):
                dataset = Dataset(cfg, split, name)
            source = sources[dataset.label] = dataset.source
            for part in parts_of(source).values():
                # The last window of each shard, of at most 64 shards; reading verifies them.
                ends = [part.n_tokens]
                if isinstance(part, TokenFiles):
                    ends = part.starts[1:]
                    part.pages.disk = None  # data.cache may have pages of a shard that is gone
                numbers = np.unique(np.maximum(np.array(ends) - 2, 0) // cfg.train.seq_len)
                for read in part.windows, part.scored:
                    read(numbers[:: 1 + len(numbers) // 64])
            yield Row(OK, f"{dataset.label}: {source}")
        except UserError as e:
            yield from (Row(FAIL, *problem) for problem in e.problems)
    found["facts"] |= {name: source.fingerprint for name, source in sources.items()}
    check_tokenizers(sources)
    if cfg.eval.tasks and "data.train" in sources:
        tasks = open_tasks(sources["data.train"].tokenizer, cfg)
        found["facts"]["eval.tasks"] = tasks.fingerprint
        yield Row(OK, f"eval.tasks: {tasks}")


def seconds(f, *args) -> float:
    """The least of four timings of f(*args), of which the first compiles it."""
    return min(repeat(lambda: f(*args).block_until_ready(), number=1, repeat=4))


def sheet(peak: float) -> str:
    """The data sheet's figure as the end of a row; nothing where it is unknown."""
    return f"; data sheet: {peak:g}" if peak else ""


def matmul(cfg: Config, found: dict):
    """see that device's clock, heat and errors (nvidia-smi -q); --seconds 20 waits longer"""
    here = jax.local_devices()
    D, dtype = (1024, "float32") if here[0].platform == "cpu" else (8192, "bfloat16")
    x_DD = jax.random.normal(jax.random.key(0), (D, D), dtype)
    multiply = jax.jit(partial(jnp.matmul, precision="default"))
    for device in here:
        y_DD, peak = jax.device_put(x_DD, device), PEAK_TFLOPS.get(device.device_kind, 0)
        speed = 2 * D**3 / seconds(multiply, y_DD, y_DD) / 1e12
        what = f"device {device.id}: {speed:.3g} TFLOP/s in {dtype}{sheet(peak)}"
        yield grade(speed, 0.3 * peak, 0.6 * peak, what)


# ---- checks of all processes together


def clocks(cfg: Config, found: dict):
    """let all hosts take the time from one server (chrony, ntpd)"""
    for _ in range(2):  # in the first round processes wait for late ones, so its span is too long
        begin = time.time()
        # All processes return from this at about the same moment, which lies in each one's span.
        utils.exchange("")
        span = begin, time.time()
    spans = np.array(utils.exchange(span))
    ours, first = spans[[utils.process_id(), 0]]
    ahead, error = ours.mean() - first.mean(), (np.ptp(ours) + np.ptp(first)) / 2
    what = f"{1000 * ahead:+.1f} ms from process 0, give or take {1000 * error:.1f}"
    yield grade(error - abs(ahead), -60, -1, what)


def same(cfg: Config, found: dict):
    """install the same on every host, and let each path hold the same data there"""
    differ = processes.differences(found["facts"])
    found["is_same"] = "mesh" in found and not {"mesh", "devices", "jax", "jaxlib"} & set(differ)
    yield from (Row(FAIL, f"{name} is {values}") for name, values in differ.items())
    processes.compare_settings(cfg)
    if not differ and "devices" in found["facts"]:
        yield Row(OK, "versions, devices, mesh, data and settings")


def links(cfg: Config, found: dict):
    """see NCCL_DEBUG=INFO or the TPU's log, and measure the network; --seconds 20 waits longer"""
    mesh, kind = found["mesh"], jax.local_devices()[0].device_kind
    size = 2**20 if kind == "cpu" else 2**26  # numbers of 4 bytes on each device
    chip = chip_of(kind)
    for i, (axis, n) in enumerate(mesh.shape.items()):
        if n == 1:
            continue
        line = np.moveaxis(mesh.devices, i, 0).reshape(n, -1)[:, 0]
        is_near = len({getattr(x, "slice_index", x.process_index) for x in line}) == 1
        rate = chip.link if chip and is_near else 0
        x_N = jnp.ones(n * size, device=NamedSharding(mesh, P(axis)))
        add = partial(jax.lax.psum, axis_name=axis)
        add = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P(axis), out_specs=P()))
        speed = 2 * (n - 1) / n * 4 * size / seconds(add, x_N)
        what = f"{axis}={n}: a device receives {speed / 1e9:.3g} GB/s in a sum{sheet(rate / 1e9)}"
        yield grade(speed, 0.05 * rate, 0.25 * rate, what)


# ---- the table


def run_check(check, cfg: Config, found: dict, limit: float | None = None) -> list[Row]:
    """The rows of a check.  An error, or no answer within `limit` seconds, is a FAIL."""
    rows = []
    try:
        cli.call_within(limit, lambda: rows.extend(check(cfg, found)))
    except UserError as e:
        rows += [Row(FAIL, *problem) for problem in e.problems]
    except Exception as e:  # whatever it is, the other checks go on
        rows.append(Row(FAIL, describe(e)))
    return [row._replace(fix=row.fix or check.__doc__, check=check.__name__) for row in rows]


def run_checks(args: Args, cfg: Config) -> dict:
    """What this process finds; every process calls this."""
    found, rows = dict(facts={}), []
    alone = (devices, mesh, versions, limits, room, storage, wandb, data, matmul)
    waits = {devices: cfg.run.start_timeout, matmul: 3 * args.seconds, clocks: None, same: None}
    for check in (*alone, clocks, same):
        if check in (mesh, versions, data, matmul) and "devices" not in found["facts"]:
            continue  # they would all say that there is no device
        rows += run_check(check, cfg, found, waits.get(check, args.seconds))
    if utils.all_agree(found.get("is_same", False)):  # otherwise the collectives could hang
        rows += run_check(links, cfg, found, 3 * args.seconds)
    return dict(host=os.uname().nodename, facts=found["facts"], rows=rows)


def merge(answers: list[dict]) -> list[Row]:
    """The rows of all processes, FAIL first.  Of rows that differ only in numbers the worst is
    kept, with the processes that have such a row."""
    groups = {}
    for n, answer in enumerate(answers):
        for row in [Row(*fields) for fields in answer["rows"]]:
            words = row.status, row.check, re.sub(r"[-+\d.]+", "", row.what)
            groups.setdefault(words, []).append((row.score, n, row))
    table = []
    for found in sorted(groups.values(), key=lambda found: STATUSES.index(found[0][2].status)):
        _, worst, row = min(found)
        ids = {n for _, n, _ in found}
        where = f" ({name_ids(ids)}; shown: {worst} on {answers[worst]['host']})"
        table.append(row._replace(what=row.what + where * (len(answers) > 1)))
    return table


# The environment variables in --report.
REPORTED = r"(JAX|XLA|NCCL|TPU|SLURM|OMPI|PMI)_\w+|LIBTPU_INIT_ARGS|CUDA_VISIBLE_DEVICES|NPROC"


SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|JWT", re.I)
"""A variable with one of these in its name may hold a secret."""


def scrub(text: str) -> str:
    """The text without passwords in addresses, and values of variables named like secrets."""
    # The longest first, because one value may be the beginning of another.
    by_length = sorted(os.environ.items(), key=lambda x: -len(x[1]))
    for name, value in by_length:
        if SECRET.search(name) and len(value) > 5:  # a shorter one would be found in other words
            text = text.replace(value, "***").replace(json.dumps(value)[1:-1], "***")
    text = re.sub(r"(://)[^\s\"]*@", r"\1***@", text)
    return re.sub(r"(://[^\s\"?]*\?)[^\s\"]+", r"\1***", text)  # such as the signature of a link


def main(args: Args, cfg: Config):
    utils.run_on_lead(check_output, "report", args.report)
    answers = utils.exchange(json.loads(scrub(json.dumps(run_checks(args, cfg)))))
    table = merge(answers)
    red, plain = ("\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "")
    for status, what, fix, _, check in table:
        utils.say(f"{red * (status == FAIL)}{status:5} {check:9} {what}{plain}")
        if status != OK:
            utils.say(f"{'':15} fix: {fix}")
    if args.report and utils.is_lead():
        shown = {name: x for name, x in os.environ.items() if re.fullmatch(REPORTED, name)}
        shown |= dict.fromkeys(filter(SECRET.search, shown), "***")
        facts = rundir.run_record(cfg)
        facts |= dict(table=table, processes=answers, environment=shown)
        files.write_whole(files.absolute_path(args.report), scrub(json.dumps(facts, indent=1)))
    processes.leave_last(5)
    exit_at_once(USAGE if table[0].status == FAIL else 0)  # a check may still hang


if __name__ == "__main__":
    processes.run_main(main, ARGS, CFG)
