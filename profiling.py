"""A trace of some updates, and the ledger of where their time went."""

import math
import os
import re
import tempfile
from contextlib import contextmanager

import fsspec
import jax
import numpy as np
from etils import epath

from config import Config
from files import is_remote, write_whole
from metrics import MetricsLog
from utils import AXES, is_lead, say, warn

UPDATE, DATA_WAIT = "update", "data wait"  # what the host marks in a trace


OTHER = "other programs"


IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [2,4]T(1,0): 0, 1 .. in that shape, transposed


def parse_ints(text: str | None) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text or "")]


def iota(shape: str | None, order: str | None):
    x = np.arange(math.prod(parse_ints(shape))).reshape(parse_ints(shape))
    return x.transpose(parse_ints(order)) if order else x


def device_groups(text: str, n: int):
    """[group, member]: the devices, of n, that an HLO collective joins; None in a form not known.

    Known are {{0,1},{2,3}} (a permute's pairs too), {} for all, [2,2]<=[4], and
    mesh['a'=2,'b'=2], device_ids=([4]) {'b'}, each of the iotas perhaps transposed.
    """
    if found := re.search(r"(?:_groups|_pairs)=\{((?:\{[\d,]+\},?)*)\}", text):
        rows = re.findall(r"\{([\d,]+)\}", found[1])
        return np.array([parse_ints(row) for row in rows] or [range(n)])
    if found := re.search(rf"_groups=\[([\d,]+)\]<={IOTA}", text):
        return iota(found[2], found[3]).reshape(parse_ints(found[1]))
    form = rf"_groups=mesh\[([^\]]+)\](?:, device_ids=\({IOTA}\))? \{{((?:'\w+',?)+)\}}"
    if found := re.search(form, text):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        joined = [list(axes).index(axis) for axis in re.findall(r"\w+", found[4])]
        x = iota(found[2] or str(n), found[3]).reshape([int(size) for size in axes.values()])
        x = np.moveaxis(x, joined, range(-len(joined), 0))
        return x.reshape(-1, math.prod(x.shape[-len(joined) :]))
    return None


def joined_axes(text: str, sizes: tuple[int, ...]) -> list[str] | None:
    """The axes along which the devices of an HLO collective differ, on a mesh of these sizes; None
    in a form not known."""
    groups = device_groups(text, math.prod(sizes))
    if groups is None:
        return None
    at = zip(AXES, np.unravel_index(groups, sizes), strict=True)
    return [axis for axis, i in at if (i != i[:, :1]).any()]


def op_classes(hlo: str, sizes: tuple[int, ...]) -> dict[str, str]:
    """{instruction: class} of a compiled module's text, on a mesh of these sizes.

    "compute"; of a collective the axes along which its devices differ ("dp", "dp+tp", or "unknown
    axes"); "" of control flow, whose events cover those of what it runs.  The two halves of an
    asynchronous collective are found by XLA's names, -start and -done.
    """
    instruction = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)")
    classes, inside, computation = {}, {}, ""
    for line in hlo.splitlines():
        if not (found := instruction.match(line)):
            header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
            computation = header[1] if header else computation
            continue
        name, opcode, rest = found.groups()
        kind = "" if opcode in ("while", "conditional", "call") else "compute"
        if re.search("replica_groups=|source_target_pairs=", rest):
            axes = joined_axes(rest, sizes)
            # A group of one only copies.
            kind = "unknown axes" if axes is None else "+".join(axes) or "compute"
            inside[computation] = kind
        elif re.search("-start|-done", name):
            for ref in re.findall(r"%([\w.-]+)", rest):
                if ref in inside or "-start" in ref:
                    kind = inside.get(ref) or classes.get(ref, kind)
                    break
        classes[name] = kind
    return classes


def read_trace(data) -> tuple[dict, dict]:
    """({device: [(op, module or None, start, stop)]}, {mark: [(start, stop)]}), in ns.

    data: a jax.profiler.ProfileData.  On a CPU ops are events of host threads, several of which
    work for one device, and some go on after their event until one named "end: ..".  A GPU's plane
    has a line a stream, a TPU's one called XLA Ops; those two are read as they are documented to
    be, and have not been met.
    """
    cpu, accelerator, ends, marks = {}, {}, {}, {UPDATE: [], DATA_WAIT: []}
    for plane in data.planes:
        device = re.fullmatch(r"/device:(GPU|TPU):\d+", plane.name)
        prefix = {"GPU": "Stream", "TPU": "XLA Ops"}[device[1]] if device else ""
        for line in plane.lines if device or plane.name == "/host:CPU" else ():
            for event in line.events if line.name.startswith(prefix) else ():
                stats, span = dict(event.stats), (event.start_ns, event.end_ns)
                if device:
                    op = stats.get("hlo_op") or event.name.split(" = ")[0].lstrip("%")
                    ops = accelerator.setdefault(plane.name, [])
                    ops.append((op, stats.get("hlo_module"), *span))
                elif "hlo_op" in stats:
                    ops = cpu.setdefault(stats["device_ordinal"], [])
                    ops.append((stats["hlo_op"], stats["hlo_module"], *span, stats.get("_p")))
                elif event.name.startswith("end: "):
                    ends[stats.get("_c")] = event.end_ns
                elif event.name in marks:
                    marks[event.name].append(span)
    for ops in cpu.values():
        ops[:] = [(*op, start, max(stop, ends.get(id, 0))) for *op, start, stop, id in ops]
    return accelerator or cpu, marks


def op_spans(events: list, module: str, classes: dict[str, str]) -> dict[str, list]:
    """{class: [(start, stop)]} of a device's ops in read_trace's form."""
    spans = {}
    for op, its_module, *span in events:
        own = its_module is None or its_module.split("(")[0] == module
        if kind := classes.get(op, "compute") if own else OTHER:
            spans.setdefault(kind, []).append(span)
    return spans


def ledger(data, hlo: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """{row: ms an update} of a trace (ProfileData) of updates that ran `hlo`; a device's mean.

    The rows add up to the time from the first update's start to the last one's end, for each moment
    of a device is in the first row that fits; {} where the trace shows no device.
      compute               an op that is no collective runs, or on a CPU waits for a core
      bubble                it is in a collective over pp while another traced device computes; one
                            that no traced device sees so shows as time in collectives over pp
      collectives over ..   it is in one, waiting for its peers included
      other programs        an evaluation, a sample or a save falls among the updates
      idle                  something runs on another traced device
      data wait             no traced device works, and the host waits for the next batch
      host gap              no traced device works
    """
    (devices, marks), classes = read_trace(data), op_classes(hlo, sizes)
    module = re.match(r"HloModule ([\w.-]+)", hlo)[1]
    devices = [op_spans(events, module, classes) for events in devices.values()]
    if not devices or not marks[UPDATE]:
        return {}
    first, last = np.min(marks[UPDATE]), np.max(marks[UPDATE])
    lists = [*marks.values(), *(spans for table in devices for spans in table.values())]
    edges = np.unique(np.concatenate([np.clip(x, first, last).ravel() for x in lists]))

    def covered(spans):
        """bool: whether each piece between two edges lies in one of the spans."""
        ends = np.searchsorted(edges, np.clip(np.reshape(spans, (-1, 2)), first, last))
        starts, stops = (np.bincount(x, minlength=len(edges)) for x in ends.T)
        return (starts - stops).cumsum()[:-1] > 0

    axes = sorted(set().union(*devices) - {"compute", OTHER})
    kinds = {"compute", "pp", OTHER, *axes}
    devices = [{kind: covered(spans.get(kind, [])) for kind in kinds} for spans in devices]
    computing = sum(covers["compute"].astype(int) for covers in devices)
    working = np.any([cover for covers in devices for cover in covers.values()], 0)
    waiting, rows = covered(marks[DATA_WAIT]), {}
    for covers in devices:
        fits = dict(compute=covers["compute"])
        fits["bubble"] = covers["pp"] & (computing > covers["compute"])
        fits |= {f"collectives over {kind}": covers[kind] for kind in axes}
        fits |= {OTHER: covers[OTHER], "idle": working, "data wait": waiting}
        left = np.diff(edges)
        for row, fit in (fits | {"host gap": True}).items():
            rows[row] = rows.get(row, 0.0) + float((left * fit).sum())
            left = np.where(fit, 0, left)
    return {row: ns / 1e6 / len(devices) / len(marks[UPDATE]) for row, ns in rows.items()}


class Profile:
    """train.profile and log.hlo: a trace of some updates, their ledger, and the step's program.

    Process 0 traces its own devices, and no others; a run resumed past the first of the updates
    traces none.  On object stores the trace is written locally, then copied.
    """

    def __init__(self, run: epath.Path, program, cfg: Config):
        """program: the compiled update, or None where there is none to take."""
        self.run, self.cfg, self.path = run, cfg, run / "profile"
        self.first, n = cfg.train.profile
        self.last, self.state = self.first + n - 1, "none"
        self.hlo = program.as_text() if program and (cfg.log.hlo or self.first) else ""
        if self.hlo and cfg.log.hlo and is_lead():
            write_whole(run / "step.hlo.txt", self.hlo)

    @contextmanager
    def update(self, step: int, log: MetricsLog):
        """Around update `step`: start and stop the trace where due, the devices at rest."""
        if is_lead() and step == self.first:
            log.aside(self.start)
        ends = self.state == "tracing" and step == self.last
        with jax.profiler.StepTraceAnnotation(UPDATE, step_num=step):
            yield
            if ends:
                log.flush()
        if ends:
            log.aside(self.stop)
            self.state = "traced"

    def start(self):
        remote = is_remote(self.path)
        self.local = epath.Path(tempfile.mkdtemp(prefix="trifold-")) if remote else self.path
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # would slow the host that is being measured
        jax.profiler.start_trace(os.fspath(self.local), profiler_options=options)
        self.state = "tracing"

    def stop(self):
        jax.profiler.stop_trace()
        if is_remote(self.path):
            fs, there = fsspec.url_to_fs(os.fspath(self.path))
            fs.put(f"{self.local}/", f"{there}/", recursive=True)

    def report(self):
        """Print the ledger and add it to ledger.txt; at the end of the run, for reading a trace
        takes a while.  A run stopped among its updates leaves the trace alone."""
        if self.state == "tracing":
            self.stop()
        if self.state != "traced":
            return
        trace = sorted(self.local.glob("plugins/profile/*/*.xplane.pb"))[-1]  # by time
        data = jax.profiler.ProfileData.from_file(os.fspath(trace))
        rows = ledger(data, self.hlo, self.cfg.mesh.sizes)
        if not rows:
            return warn(f"{trace} shows no work of a device, so there is no ledger")
        wall = sum(rows.values())
        lines = [f"updates {self.first} to {self.last}, ms each:"]
        for row, ms in (rows | {"all": wall}).items():
            lines.append(f"  {row:<28}{ms:12.3f}{ms / wall:8.1%}")
        path, text = self.path / "ledger.txt", "\n".join(lines)
        say(text)
        write_whole(path, (path.read_text() if path.exists() else "") + text + "\n")
