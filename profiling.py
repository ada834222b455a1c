"""train.profile and log.hlo: a trace of some updates, and the ledger of where their time went.

A ledger is made from a trace and the text of the compiled update; see `ledger` for its rows.
"""

import base64
import math
import os
import re
from collections.abc import Callable
from contextlib import contextmanager

import jax
import numpy as np
from etils import epath
from jax.experimental.profiler import get_profiled_instructions_proto

from config import SLICE, Config
from files import exists, local_folder, paths_in, upload_folder, write_whole
from metrics import MetricsLog
from step_picture import step_svg
from utils import AXES, exchange, is_lead, only_warn, run_on_lead, say, warn

UPDATE, DATA_WAIT = "update", "data wait"  # the events with which the host marks a trace


# ---- the compiled program: which mesh axes a collective joins


IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [2,4]T(1,0): 0, 1, 2 .. in shape [2, 4], transposed


def parse_ints(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


def parse_iota(shape: str, order: str | None):
    """The array that the two groups of IOTA describe."""
    x = np.arange(math.prod(parse_ints(shape))).reshape(parse_ints(shape))
    return x if order is None else x.transpose(parse_ints(order))


def device_groups(text: str, n: int):
    """[group, member]: the devices, of n, that an HLO collective joins; None for an unknown form.

    Known are {{0,1},{2,3}} (also as the pairs of a permute), {} for all devices, [2,2]<=[4], and
    mesh['a'=2,'b'=2], device_ids=([4]) {'b'}.  Each of the iotas may be transposed.
    """
    if found := re.search(r"(?:_groups|_pairs)=\{((?:\{[\d,]+\},?)*)\}", text):
        rows = [parse_ints(row) for row in re.findall(r"\{([\d,]+)\}", found[1])]
        return np.array(rows if rows else [range(n)])
    if found := re.search(rf"_groups=\[([\d,]+)\]<={IOTA}", text):
        return parse_iota(found[2], found[3]).reshape(parse_ints(found[1]))
    form = rf"_groups=mesh\[([^\]]+)\](?:, device_ids=\({IOTA}\))? \{{((?:'\w+',?)+)\}}"
    if found := re.search(form, text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        joined = [list(sizes).index(axis) for axis in re.findall(r"\w+", found[4])]
        ids = np.arange(n) if found[2] is None else parse_iota(found[2], found[3])
        ids = np.moveaxis(ids.reshape(*sizes.values()), joined, range(-len(joined), 0))
        return ids.reshape(-1, math.prod(ids.shape[-len(joined) :]))
    return None


def collective_axes(text: str, sizes: tuple[int, ...]) -> list[str] | None:
    """The mesh axes along which the devices of an HLO collective differ; None for an unknown form.

    sizes: of the mesh's axes.
    """
    groups = device_groups(text, math.prod(sizes))
    if groups is None:
        return None
    axes = (SLICE, *AXES)[-len(sizes) :]
    coordinates = zip(axes, np.unravel_index(groups, sizes), strict=True)
    return [axis for axis, i in coordinates if (i != i[:, :1]).any()]


def op_classes(hlo: str, sizes: tuple[int, ...]) -> dict[str, str]:
    """{instruction: class} of a compiled module's text, on a mesh of these sizes.

    The class of a collective is the axes along which its devices differ ("dp", "dp+tp", or "unknown
    axes").  Control flow has the class "", since its events cover those of the ops it runs.  Every
    other op has the class "compute".  The two halves of an asynchronous collective are found by the
    names that XLA gives them, -start and -done.
    """
    instruction = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*)")
    classes, class_in_computation, computation = {}, {}, ""
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = header[1]
        if not (found := instruction.match(line)):
            continue
        name, opcode, rest = found.groups()
        kind = "" if opcode in ("while", "conditional", "call") else "compute"
        if re.search("replica_groups=|source_target_pairs=", rest):
            axes = collective_axes(rest, sizes)  # none where each group is one device: a copy
            kind = "unknown axes" if axes is None else "+".join(axes) or kind
            class_in_computation[computation] = kind
        elif re.search("-start|-done", name):
            for ref in re.findall(r"%([\w.-]+)", rest):
                if ref in class_in_computation or "-start" in ref:
                    kind = class_in_computation.get(ref, classes.get(ref, kind))
                    break
        classes[name] = kind
    return classes


# ---- the trace


OTHER = "other programs"


def read_trace(data) -> tuple[dict, dict]:
    """({device: [(op, module or None, start, stop)]}, {mark: [(start, stop)]}), in ns.

    data: a jax.profiler.ProfileData.  On a CPU, ops are events of host threads: several threads
    work for one device, and some ops last beyond their event, until another named "end: ...".  A
    GPU's plane has a line for each stream, as an H100's had.  A TPU's has one called XLA Ops; it is
    read as it is documented, and no trace of a TPU has been tried.
    """
    cpu, accelerator, ends, marks = {}, {}, {}, {UPDATE: [], DATA_WAIT: []}
    for plane in data.planes:
        device = re.fullmatch(r"/device:(GPU|TPU):\d+", plane.name)
        if device is None and plane.name != "/host:CPU":
            continue
        prefix = "" if device is None else {"GPU": "Stream", "TPU": "XLA Ops"}[device[1]]
        for line in plane.lines:
            for event in line.events if line.name.startswith(prefix) else ():
                stats, span = dict(event.stats), (event.start_ns, event.end_ns)
                if device is not None:
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
        ops[:] = [(*op, start, max(stop, ends.get(key, 0))) for *op, start, stop, key in ops]
    return accelerator or cpu, marks


def op_spans(events: list, module: str, classes: dict[str, str]) -> dict[str, list]:
    """{class: [(start, stop)]} of one device's events as read_trace gives them.

    Events of modules other than `module`, the update's, have the class OTHER.
    """
    spans = {}
    for op, event_module, *span in events:
        is_update = event_module is None or event_module.split("(")[0] == module
        kind = classes.get(op, "compute") if is_update else OTHER
        if kind != "":
            spans.setdefault(kind, []).append(span)
    return spans


# ---- the ledger


def covered_pieces(spans: list, edges):
    """bool [piece]: whether each piece of time between two edges lies in one of the spans."""
    ends = np.searchsorted(edges, np.clip(np.reshape(spans, (-1, 2)), edges[0], edges[-1]))
    starts, stops = (np.bincount(x, minlength=len(edges)) for x in ends.T)
    return (starts - stops).cumsum()[:-1] > 0


def ledger(data, hlo: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """{row: ms per update}, the mean over the devices in a trace (ProfileData) of updates of `hlo`.

    The rows add up to the time from the first update's start to the last one's end, because each
    moment of a device counts in the first row that fits.  {} if the trace shows no device.
      compute               an op that is not a collective runs, or on a CPU waits for a core
      bubble                in a collective over pp while another traced device computes; if that
                            device is not traced, the time counts as collectives over pp
      collectives over ..   in a collective over these axes, the wait for its peers included
      other programs        an evaluation, a sample or a save runs between the updates
      idle                  something runs on another traced device
      data wait             no traced device works, and the host waits for the next batch
      host gap              no traced device works
    """
    (devices, marks), classes = read_trace(data), op_classes(hlo, sizes)
    if not devices or not marks[UPDATE]:
        return {}
    module = re.match(r"HloModule ([\w.-]+)", hlo)[1]
    devices = [op_spans(events, module, classes) for events in devices.values()]
    # Nothing changes between two neighbouring edges, so every piece between them has one row.
    span_lists = [*marks.values(), *(spans for table in devices for spans in table.values())]
    times = np.concatenate([np.ravel(spans) for spans in span_lists])
    edges = np.unique(np.clip(times, np.min(marks[UPDATE]), np.max(marks[UPDATE])))
    axes = sorted(set().union(*devices) - {"compute", OTHER})
    kinds = {"compute", "pp", OTHER, *axes}
    devices = [
        {kind: covered_pieces(spans.get(kind, []), edges) for kind in kinds} for spans in devices
    ]
    n_computing = sum(device["compute"].astype(int) for device in devices)
    some_works = np.any([covered for device in devices for covered in device.values()], 0)
    waits, rows = covered_pieces(marks[DATA_WAIT], edges), {}
    for device in devices:
        fits = dict(compute=device["compute"])
        fits["bubble"] = device["pp"] & (n_computing > device["compute"])
        fits |= {f"collectives over {kind}": device[kind] for kind in axes}
        fits |= {OTHER: device[OTHER], "idle": some_works, "data wait": waits, "host gap": True}
        left = np.diff(edges)  # ns that no row has yet
        for row, fit in fits.items():
            rows[row] = rows.get(row, 0.0) + float((left * fit).sum())
            left = np.where(fit, 0, left)
    return {row: ns / 1e6 / len(devices) / len(marks[UPDATE]) for row, ns in rows.items()}


def learns_from_traces() -> bool:
    """Whether XLA's compiler for these devices can use the times of a trace; warns if not."""
    if jax.devices()[0].platform == "gpu":
        return True
    warn(f"train.pgle has no effect on {jax.devices()[0].device_kind}, only on NVIDIA GPUs")
    return False


class Profile:
    """Traces the updates of train.profile and reports their ledger; with log.hlo, writes the
    compiled program.

    Process 0 traces the devices of its own process only.  A run that resumes after the first of the
    updates traces none.  On object stores the trace is written locally, then copied.
    """

    def __init__(self, run: epath.Path, program, step_jaxpr: Callable, cfg: Config, start: int):
        """program: the compiled update, or None if the run makes no update; step_jaxpr: as in
        step_svg; start: the number of updates before the first."""
        self.cfg, self.path = cfg, run / "profile"
        self.learns = cfg.train.pgle and program is not None and learns_from_traces()
        self.first, n_updates = cfg.train.profile
        if self.learns and self.first <= start:
            self.first, n_updates = start + 3, 3  # later than what only happens once
        if 0 < self.first <= start and not self.path.exists():
            what = f"train.profile={self.first} {n_updates} traces nothing, as the run has already"
            warn(f"{what} made {start} updates; choose later ones")
        self.last, self.state = self.first + n_updates - 1, "none"
        is_needed = program is not None and (cfg.log.hlo or self.first > 0)
        self.hlo = program.as_text() if is_needed else ""
        if self.hlo and cfg.log.hlo and is_lead():
            write_whole(run / "step.hlo.txt", self.hlo)
            with only_warn("no step.svg"):
                picture = step_svg(step_jaxpr, cfg, jax.devices()[0].device_kind)
                write_whole(run / "step.svg", picture)

    @contextmanager
    def trace_update(self, step: int, log: MetricsLog):
        """A context in which update `step` runs: marks it in the trace, and starts the trace before
        the first update to trace and stops it after the last.

        Starting and stopping wait for the updates before, so that the trace has whole ones.
        """
        if is_lead() and step == self.first:
            log.run_untimed(self.start)
        is_end = self.state == "tracing" and step == self.last
        with jax.profiler.StepTraceAnnotation(UPDATE, step_num=step):
            yield
            if is_end:
                log.flush()
        if is_end:
            log.run_untimed(self.stop)

    def start(self):
        self.local_path = local_folder(self.path)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the host that is being measured
        jax.profiler.start_trace(os.fspath(self.local_path), profiler_options=options)
        self.state = "tracing"

    def stop(self):
        self.state = "none"
        with only_warn(f"{self.path} was not written"):  # as on a full disk
            jax.profiler.stop_trace()
            self.state = "traced"
            upload_folder(self.local_path, self.path)

    def learned_times(self, step: int) -> bytes:
        """With train.pgle, after the last traced update: the times that operations took, as XLA
        reads them, the same in every process.  Else b""."""
        if not self.learns or step != self.last:
            return b""
        times = base64.b64decode(exchange(run_on_lead(self.read_times))[0])
        if not times:
            warn("train.pgle: the trace has no times of operations, so the program stays as it is")
        return times

    def read_times(self) -> str:
        if self.state != "traced":  # the run has resumed after the first of train.profile
            return ""
        newest = max(paths_in(self.local_path, "plugins/profile/*"))  # their names are times
        return base64.b64encode(get_profiled_instructions_proto(os.fspath(newest))).decode()

    def report(self):
        """Print the ledger and append it to ledger.txt.

        A trace that the run's end cut short has no ledger.  Called at the end of the run, because
        reading a trace takes a while.
        """
        if self.state == "tracing":
            return self.stop()
        if self.state != "traced":
            return
        # The names of their folders are times.
        newest = max(paths_in(self.local_path, "plugins/profile/*/*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(os.fspath(newest))
        rows = ledger(data, self.hlo, tuple(self.cfg.mesh.shape.values()))
        if not rows:
            return warn(f"{newest} shows no work of a device, so there is no ledger")
        wall = sum(rows.values())
        lines = [f"updates {self.first} to {self.last}, ms each:"]
        for row, ms in (rows | {"all": wall}).items():
            lines.append(f"  {row:<28}{ms:12.3f}{ms / wall:8.1%}")
        path, text = self.path / "ledger.txt", "\n".join(lines)
        say(text)
        before = path.read_text() if exists(path) else ""
        write_whole(path, before + text + "\n")
