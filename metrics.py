"""What a run reports: rows of metrics.jsonl, console lines and pictures; boards.py has the rest.

The numbers themselves are computed elsewhere (train.train_step, train.evaluate).  A scalar that the
step returns needs no line here; a dict of arrays needs an entry in panels.PANELS.
"""

import gc
import time
from functools import lru_cache

import jax
import numpy as np
from etils import epath

import utils
from boards import open_boards
from config import Config
from errors import DIVERGED, UserError, describe, is_storage_error
from model import flops_per_token
from panels import PANELS, write_png
from rowfile import RowFile
from rundir import begin_of_rows, read_history, read_record
from utils import finite_or_none, run_on_lead, say, warn

# ---- the log of a run


# The scalars that every step returns, as the console shows them; others are `name value`.
SCALARS = dict(loss="loss {:.4f}", grad_norm="grad norm {:.3f}", lr="lr {:.2e}")


class PastRows:
    """What the rows of metrics.jsonl say: those that a resume finds, and those written since."""

    def __init__(self, cfg: Config, fingerprints: dict, tokens: tuple[int, int]):
        """fingerprints: as MetricsLog.  tokens: see rundir.begin_of_rows."""
        self.fingerprints = fingerprints
        self.tokens = tokens  # (newest update, tokens until then)
        self.losses = {}  # {step: loss}
        # {(kind, set): {step: loss, or for kind "tasks" the row}}
        self.evaluations = {key: {} for key in fingerprints}
        self.skips = 0  # updates in a row, up to the newest, that were not finite
        self.spikes = 0  # updates that were skipped because of train.spike_sigma
        self.panels = {name: panel(cfg) for name, panel in PANELS.items()}
        self.alarms = {}  # all so far, {what: text}
        self.others = set()  # (kind, set) of rows about other data than this start evaluates

    def track(self, row: dict):
        if row["kind"] == "train":
            step, loss, norm = row["step"], row["loss"], row["grad_norm"]
            self.tokens = step, row["tokens"]
            self.losses[step] = loss
            self.skips = self.skips + 1 if None in (loss, norm) else 0
            self.spikes += row.get("spike", 0) > 0
        elif row["kind"] in ("eval", "tasks"):
            key = row["kind"], row.get("set", "")
            here = self.fingerprints.get(key, row.get("data"))
            if row.get("data", here) == here:
                found = row["loss"] if row["kind"] == "eval" else row
                self.evaluations.setdefault(key, {})[row["step"]] = found
            else:
                self.others.add(key)
        elif row["kind"] in self.panels:
            panel = self.panels[row["kind"]]
            panel.track(row)
            self.alarms = panel.alarms() | self.alarms

    def best_losses(self) -> dict:
        """{step: loss} of the set that decides which checkpoints are best."""
        return next(iter(self.evaluations.values()))

    def is_evaluated(self, step: int) -> bool:
        """Whether all that is evaluated after update `step` is there."""
        return all(step in self.evaluations[key] for key in self.fingerprints)

    def draw(self, run: epath.Path):
        evals = {name: x for (kind, name), x in self.evaluations.items() if kind == "eval"}
        scores = self.evaluations.get(("tasks", ""), {})
        draw_loss(run / "loss.png", self.losses, evals, scores)
        for panel in self.panels.values():
            panel.draw(run)


class MetricsLog:
    """metrics.jsonl, the console, the pictures, Weights & Biases and TensorBoard, all from the same
    rows.

    Rows are written one update late: while the host waits for the numbers of one update, the
    device has the next one to do.
    """

    MAX_SKIPS = 10

    def __init__(
        self, run: epath.Path, cfg: Config, step: int, tokens_by_source, fingerprints: dict
    ):
        """step: the update the run resumes from.  tokens_by_source: as Dataset.tokens_by_source.
        fingerprints: {(kind, set): fingerprint} of what this start evaluates."""
        self.cfg, self.run, self.steps_before = cfg, run, step
        self.tokens_by_source = lru_cache(2)(tokens_by_source)  # an update asks five times
        self.flops_per_token, self.peak = flops_per_token(cfg), utils.peak_flops(cfg)
        self.start = self.clock = time.perf_counter()  # of this start, and of the update under way
        self.compiled = set()  # the functions that run_untimed has called
        self.pending = None  # (step, metrics) of the newest update, not written yet
        begin = begin_of_rows(run_on_lead(read_record, run) or {})  # the lead writes rows
        self.past, self.sampled_steps = PastRows(cfg, fingerprints, begin), set()
        patience = cfg.checkpoint.patience
        self.metrics_file = RowFile(run / "metrics.jsonl", step, patience, self.past.track)
        self.samples_file = RowFile(run / "samples.jsonl", step, patience, self.track_sample)
        self.warn_of_lost_rows(begin[0])
        for name in sorted(" ".join(pair).strip() for pair in self.past.others):
            what = f"{self.metrics_file.path} has rows of kind {name} about other data"
            warn(f"{what}: they do not count for pictures and best checkpoints")
        self.boards = run_on_lead(open_boards, run, cfg, step) or []
        if step < cfg.train.steps:
            say(f"updates {step + 1} to {cfg.train.steps}")

    def warn_of_lost_rows(self, begin: int):
        """begin: the update after which the run's own rows begin."""
        firsts = [start["step"] + 1 for start in run_on_lead(read_history, self.run) or []]
        step, there = self.steps_before, self.past.losses.keys()
        # The run may have started at 0, and become a branch before it saved anything.
        first = max(begin + 1, min([*there, *firsts], default=step + 1))
        if lost := sorted(set(range(first, step + 1)) - there):
            what = f"{self.metrics_file.path} has lost {len(lost)} of the rows up to update {step}"
            warn(f"{what}, from that of update {lost[0]} on: they cannot be made again")

    def write(self, row: dict):
        self.metrics_file.add(row)
        for board in self.boards:
            board.send(row)
        self.past.track(row)

    def add_update(self, step: int, metrics: dict):
        """Note the metrics of update `step` (device arrays), and write those of the one before."""
        self.flush()
        self.pending = (step, metrics)

    def flush(self):
        """Wait for the pending update and write its rows.  Raises what check_skips raises."""
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        utils.wait_for(metrics)
        numbers = jax.tree.map(lambda x: np.asarray(x, np.float64), metrics)
        arrays = {name: x for name, x in numbers.items() if isinstance(x, dict)}
        scalars = {name: float(numbers[name]) for name in SCALARS | numbers if name not in arrays}
        speed = self.measure_speed(step)
        self.write_update(step, scalars, speed)
        is_first_or_last = step in (self.steps_before + 1, self.cfg.train.steps)
        for name, x in arrays.items():
            if is_first_or_last or step % self.past.panels[name].every == 0:
                self.write_panel(step, name, x)
        if is_first_or_last or step % self.cfg.log.every == 0:
            summaries = [self.past.panels[name].summary(x) for name, x in arrays.items()]
            self.print_update(step, scalars, speed, summaries)
        self.check_skips(step, scalars)

    def measure_speed(self, step: int) -> dict:
        """The speed of update `step`, which has just ended; begins to time the next one."""
        if step == self.steps_before + 1:
            self.start = self.clock  # the eta leaves out what came before, such as compiling
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        rate = (self.tokens_until(step) - self.tokens_until(step - 1)) / seconds
        mfu = None if self.peak is None else rate * self.flops_per_token / self.peak
        return dict(step_time=seconds, tokens_per_sec=rate, mfu=mfu)

    def tokens_until(self, step: int) -> int:
        """What `step` updates train on, with this start's batch sizes."""
        return sum(self.tokens_by_source(step).values())

    def write_update(self, step: int, scalars: dict, speed: dict):
        before, tokens = self.past.tokens
        tokens += self.tokens_until(step) - self.tokens_until(before)
        fields = {name: finite_or_none(x) for name, x in scalars.items()} | dict(tokens=tokens)
        if "" not in (sources := self.tokens_by_source(step)):  # a mixture
            fields["tokens_by_source"] = sources
        self.write(dict(kind="train", step=step) | fields | speed)

    def write_panel(self, step: int, name: str, arrays: dict):
        """Write a panel's row, and warn of its new alarms."""
        before = self.past.alarms
        self.write(dict(kind=name, step=step) | self.past.panels[name].row(arrays))
        for key, text in self.past.alarms.items():
            if key not in before:
                warn(f"update {step}: {text}")

    def print_update(self, step: int, scalars: dict, speed: dict, summaries: list[str]):
        steps, mfu = self.cfg.train.steps, speed["mfu"]
        shown = {name: x for name, x in scalars.items() if name != "spike"}  # check_skips warns
        seconds_per_step = (self.clock - self.start) / (step - self.steps_before)
        parts = [
            f"update {step}/{steps}",
            *(SCALARS.get(name, name + " {:.4g}").format(x) for name, x in shown.items()),
            f"{speed['tokens_per_sec']:,.0f} tokens/s",
            "mfu -" if mfu is None else f"mfu {mfu:.1%}",
            *summaries,
            f"eta {utils.format_duration((steps - step) * seconds_per_step)}",
        ]
        say("  ".join(parts))

    def check_skips(self, step: int, scalars: dict):
        """Warn of a skipped update.  Raises UserError DIVERGED after MAX_SKIPS in a row that were
        not finite."""
        loss, norm, skips = scalars["loss"], scalars["grad_norm"], self.past.skips
        if scalars.get("spike"):
            why = f"its gradient norm {norm:.3f} is a spike (train.spike_sigma)"
            warn(f"update {step} skipped: {why}; {self.past.spikes} so far")
        if skips > 0:
            warn(f"update {step} skipped: loss {loss}, gradient norm {norm}; {skips} in a row")
        if skips >= self.MAX_SKIPS:
            self.upload()  # these rows say how the run diverged
            o, first = self.cfg.optim, step - skips + 1
            what = f"diverged: {skips} updates in a row, {first} to {step}, were not finite"
            fix = f"lower optim.lr={o.lr} or optim.clip_norm={o.clip_norm}, or check their data"
            raise UserError(DIVERGED, what, fix)

    def run_untimed(self, f, *args):
        """f(*args), once all earlier rows are written; no update's step_time includes it, and the
        eta leaves out the first call of each f, which compiles."""
        self.upload()
        begin = time.perf_counter()
        result = f(*args)
        self.clock = time.perf_counter()
        if f not in self.compiled:
            self.compiled.add(f)
            self.start += self.clock - begin
        return result

    def add_evaluation(self, step: int, result: dict | None, kind="eval"):
        """Write an evaluation (kind "tasks": the scores of eval.tasks) and draw the pictures.

        None is an evaluation that was cut short; the run makes it when it resumes.
        """
        if result is None:
            return
        self.write(dict(kind=kind, step=step) | result)
        (print_eval if kind == "eval" else print_scores)(step, result)
        if utils.is_lead():
            # Frees the figures of earlier evaluations, each with 4 MB of pixels: they refer to
            # themselves, and with the thresholds of cli.start the collector seldom runs.  It looks
            # at all objects (0.1 to 0.6 s), because matplotlib still refers to the newest figure,
            # which this call makes an old object, and the next call has to free.
            gc.collect()
            try:
                self.past.draw(self.run)
            except Exception as e:  # the next evaluation draws them again
                if not (is_storage_error(e) or isinstance(e, ImportError)):
                    raise
                warn(f"no pictures ({describe(e)})")
        self.clock = time.perf_counter()  # the next update's step_time leaves the pictures out

    def add_sample(self, row: dict):
        self.track_sample(row)
        self.samples_file.add(row)
        say(f"sample after update {row['step']}: {row['text']!r}")

    def track_sample(self, row: dict):
        self.sampled_steps.add(row["step"])

    def upload(self):
        """Write the pending update, then bring the files on an object store up to date."""
        self.flush()
        for x in (self.metrics_file, self.samples_file, *self.boards):
            x.upload()

    def close(self):
        self.upload()
        for x in (self.metrics_file, self.samples_file, *self.boards):
            x.close()


# ---- the console


def print_eval(step: int, result: dict):
    numbers, n = (result["loss"], result["bits_per_byte"]), result["tokens"]
    loss, bits = ("-" if x is None else f"{x:.4f}" for x in numbers)
    name = f"{result['set']} " if "set" in result else ""
    say(f"update {step}  {name}validation loss {loss}  bits per byte {bits}  over {n:,} tokens")


def print_scores(step: int, scores: dict):
    """Print the scores of each name of eval.tasks, without those of its files."""
    means = [f"{name} {x:.4f}" for name, x in scores.items() if name.count("/") == 1]
    say(f"update {step}  {'  '.join(means)}")


# ---- pictures


def draw_loss(path: epath.Path, train_losses: dict, eval_losses: dict, scores: dict):
    """The loss curves as a PNG, and beside them those of eval.tasks.  train_losses: {step: loss or
    None}; eval_losses: {name of a set: the same}; scores: {step: row of kind "tasks"}."""
    from matplotlib import colormaps  # imported here because they take 0.3 s
    from matplotlib.figure import Figure

    width = 2 if scores else 1
    figure = Figure(figsize=(8 * width, 4.5), layout="constrained")
    axes = figure.add_subplot(1, width, 1)
    finite = {step: loss for step, loss in train_losses.items() if loss is not None}
    axes.plot(list(finite), list(finite.values()), lw=0.8, label="train")
    for name, losses in eval_losses.items():
        label = f"validation {name}".strip()
        axes.plot(list(losses), list(losses.values()), "o-", label=label)
    axes.set(xlabel="update", ylabel="loss (nats per token)", title=path.parent.name)
    if scores:
        axes = figure.add_subplot(1, 2, 2, xlabel="update", ylabel="accuracy")
        last = [*scores.values()][-1]
        for name in (name for name in last if name.count("/") == 1):  # not those of a file
            curve = {step: row[name] for step, row in scores.items() if name in row}
            axes.plot(list(curve), list(curve.values()), "o-", label=name.replace("_", " "))
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        if (n := len(axes.lines)) <= 8:
            axes.legend()
        else:  # beside the plot, because it would hide the curves
            for i, line in enumerate(axes.lines):  # matplotlib's own ten colours would repeat
                line.set_color(colormaps["turbo"](i / n))
            place = dict(loc="upper left", bbox_to_anchor=(1, 1), ncols=1 + n // 24)
            axes.legend(**place, fontsize="small")
    write_png(path, figure)
