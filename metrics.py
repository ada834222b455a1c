"""What a run reports: rows of metrics.jsonl, console lines, pictures, Weights & Biases."""

import io
import json
import netrc
import os
import sys
import tempfile
import time
from dataclasses import asdict

import numpy as np
from etils import epath

import config
from config import Config, UserError
from files import is_remote, write_whole
from utils import finite_or_none, format_duration, is_lead, on_lead, peak_flops, say, wait_for, warn


class RowFile:
    """A .jsonl file that holds each row exactly once, also across kills and resumes.

    Rows after `step`, the update resumed from, are dropped: they are about to be made again.  On
    object stores, which cannot append, it grows locally and is uploaded before every checkpoint.
    """

    def __init__(self, path: epath.Path, step: int):
        rows = read_rows(path, step)
        self.path, self.rows = path, [json.loads(row) for row in rows]
        self.local = path
        if is_remote(path):
            self.local = epath.Path(tempfile.mkdtemp(prefix="trifold-")) / path.name
        if is_lead() and (rows or path.exists()):
            write_whole(self.local, "".join(rows))

    def add(self, row: dict):
        with self.local.open("a") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")

    def publish(self):
        if is_remote(self.path) and self.local.exists():
            self.path.write_text(self.local.read_text())


class MetricsLog:
    """metrics.jsonl, the console, loss.png and Weights & Biases, all from the same rows.

    Rows are written one update late, so that the host never waits for the device.
    """

    MAX_SKIPS = 10

    def __init__(self, run: epath.Path, cfg: Config, step: int, flops: float):
        """flops: of a token, forward and backward."""
        self.cfg, self.run, self.held, self.skips = cfg, run, None, 0
        self.train, self.eval = [], {}  # [(step, loss)] and {step: loss}, for the curve
        self.busiest, self.load = {}, {}  # {step: a share a layer} and the newest moe row
        self.flops, self.peak = flops, peak_flops(cfg)
        self.tokens_per_step = cfg.train.batch_size * cfg.train.seq_len
        self.began = self.clock = time.perf_counter()
        self.first = step
        self.file = RowFile(run / "metrics.jsonl", step)
        self.text = RowFile(run / "samples.jsonl", step)
        self.samples = {row["step"] for row in self.text.rows}
        for row in self.file.rows:
            self.remember(row)
        self.wandb = on_lead(start_wandb, run, cfg)
        if step < cfg.train.steps:
            say(f"updates {step + 1} to {cfg.train.steps}")

    def remember(self, row: dict):
        if row["kind"] == "train":
            self.train.append((row["step"], row["loss"]))
            self.skips = self.skips + 1 if None in (row["loss"], row["grad_norm"]) else 0
        elif row["kind"] == "moe":
            E = len(row["load"][0])
            self.busiest[row["step"]] = [max(load) * E for load in row["load"]]
            self.load = row
        else:
            self.eval[row["step"]] = row["loss"]

    def write(self, row: dict):
        if is_lead():
            self.file.add(row)
            if self.wandb:
                self.wandb(row)
        self.remember(row)

    def update(self, step: int, metrics: dict):
        """Note the metrics of update `step` (device arrays), and write those of the one before."""
        self.flush()
        self.held = (step, metrics)

    def flush(self):
        """Wait for the update noted last, and write it.  Raises UserError DIVERGED, see `judge`."""
        if self.held is None:
            return
        (step, metrics), self.held = self.held, None
        wait_for(metrics)
        loss, norm, lr = (float(metrics[name]) for name in ("loss", "grad_norm", "lr"))
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        rate = self.tokens_per_step / seconds
        row = dict(
            kind="train",
            step=step,
            loss=finite_or_none(loss),
            grad_norm=finite_or_none(norm),
            lr=lr,
        )
        row |= dict(tokens=step * self.tokens_per_step, step_time=seconds, tokens_per_sec=rate)
        self.write(row | dict(mfu=self.peak and rate * self.flops / self.peak))
        steps = self.cfg.train.steps
        if step == self.first + 1 or step % self.cfg.log.every == 0 or step == steps:
            moe = self.experts(step, metrics["moe"]) if "moe" in metrics else ""
            mfu = f"{rate * self.flops / self.peak:.1%}" if self.peak else "-"
            left = format_duration((steps - step) * (now - self.began) / (step - self.first))
            say(
                f"update {step}/{steps}  loss {loss:.4f}  grad norm {norm:.3f}  lr {lr:.2e}  "
                f"{rate:,.0f} tokens/s  mfu {mfu}{moe}  eta {left}"
            )
        self.judge(step, loss, norm)

    def experts(self, step: int, moe: dict) -> str:
        """Write the moe row of an update, one element a moe layer; a summary for the console."""
        table = {name: np.asarray(x, np.float64) for name, x in moe.items()}
        share, dead = table.pop("load"), (np.asarray(moe["load"]) == 0).sum(-1)
        share = share / share.sum(-1, keepdims=True)
        row = {name: [finite_or_none(x) for x in table[name]] for name in table}
        row |= dict(load=share.round(6).tolist(), dead=dead.tolist())
        self.write(dict(kind="moe", step=step, layer=config.moe_layers(self.cfg.model)) | row)
        most = (share.max(-1) * share.shape[-1]).max()
        return (
            f"  busiest expert {most:.1f}x, {dead.sum()} dead, "
            f"{table['dropped'].mean():.1%} dropped, balance {table['balance'].mean():.3f}"
        )

    def judge(self, step: int, loss: float, norm: float):
        """Warn of a skipped update.  Raises UserError DIVERGED after MAX_SKIPS of them in a row."""
        if self.skips:
            warn(f"update {step} skipped: loss {loss}, gradient norm {norm}; {self.skips} in a row")
        if self.skips >= self.MAX_SKIPS:
            o, first = self.cfg.optim, step - self.skips + 1
            what = f"diverged: {self.skips} updates in a row, {first} to {step}, were not finite"
            fix = f"lower optim.lr={o.lr} or optim.clip_norm={o.clip_norm}, or look at their data"
            raise UserError(config.DIVERGED, what, fix)

    def aside(self, f, *args):
        """f(*args), with every row before it written and its own time left out of the updates'."""
        self.publish()
        result = f(*args)
        self.clock = time.perf_counter()
        return result

    def evaluation(self, step: int, result: dict | None):
        """Write an evaluation, redraw the curve; None, one cut short, is made again on resume."""
        if result is None:
            return
        self.write(dict(kind="eval", step=step) | result)
        print_eval(step, result)
        if is_lead():
            draw_loss(self.run / "loss.png", self.train, self.eval)
            if self.load:
                draw_experts(self.run / "experts.png", self.load, self.busiest)

    def sample(self, row: dict):
        self.samples.add(row["step"])
        if is_lead():
            self.text.add(row)
        say(f"sample after update {row['step']}: {row['text']!r}")

    def publish(self):
        """Write the update noted last too, and bring the file on an object store up to date."""
        self.flush()
        if is_lead():
            self.file.publish()
            self.text.publish()

    def close(self):
        self.publish()
        if self.wandb:
            self.wandb(None)


def print_eval(step: int, result: dict | None):
    """Print an evaluation; one that was cut short ends the process as interrupted."""
    if result is None:
        sys.exit(config.INTERRUPTED)

    def number(x):
        return "-" if x is None else f"{x:.4f}"

    loss, bits = number(result["loss"]), number(result["bits_per_byte"])
    n = result["tokens"]
    say(f"update {step}  validation loss {loss}  bits per byte {bits}  over {n:,} tokens")


def print_end(log: MetricsLog, step: int):
    """The last line of a run; one that was asked to stop leaves with its own exit code."""
    if step == log.cfg.train.steps and step in log.eval:
        return say(f"finished: {log.run}")
    say(f"interrupted: checkpoint of update {step} committed; run the same command again to go on")
    sys.exit(config.INTERRUPTED)


def read_rows(path: epath.Path, step: int) -> list[str]:
    """The whole lines of a .jsonl up to update `step`; a torn last line goes with the rest."""
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                rows.append(line)
        except (ValueError, TypeError, KeyError):
            warn(f"{path}: dropped a line that is no row: {line[:60]!r}")
    return rows


def draw_loss(path: epath.Path, train: list, evals: dict):
    """The loss curve, as a PNG."""
    from matplotlib.figure import Figure  # 0.3 s, and only needed here

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    known = [(step, loss) for step, loss in train if loss is not None]
    axes.plot(*zip(*known or [(0, np.nan)], strict=True), lw=0.8, label="train")
    axes.plot(list(evals), list(evals.values()), "o-", label="validation")
    axes.set(xlabel="update", ylabel="loss (nats per token)", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    write_png(path, figure)


def draw_experts(path: epath.Path, row: dict, busiest: dict):
    """Each expert's load in each moe layer in the newest row, and the busiest one's over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    load = np.array(row["load"]) * len(row["load"][0])
    image = left.imshow(load, aspect="auto", vmin=0, vmax=max(2, load.max()), cmap="magma")
    left.set(xlabel="expert", ylabel="layer", title=f"load after update {row['step']} (1 is even)")
    named = range(0, len(load), 1 + len(load) // 16)
    left.set_yticks(named, [row["layer"][i] for i in named])
    figure.colorbar(image, ax=left)
    for i, layer in enumerate(row["layer"]):
        color = f"{0.75 * (1 - i / len(load)):.2f}"  # later layers are darker
        label = layer if i in named else None
        right.plot(list(busiest), [x[i] for x in busiest.values()], color=color, label=label)
    right.set(xlabel="update", ylabel="load of the busiest expert", title=path.parent.name)
    right.legend(title="layer", fontsize="small")
    right.grid(alpha=0.3)
    write_png(path, figure)


def write_png(path: epath.Path, figure):
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    path.write_bytes(png.getvalue())


def has_wandb_key() -> bool:
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators("api.wandb.ai"))
    except (OSError, netrc.NetrcParseError):
        return False


def start_wandb(run: epath.Path, cfg: Config):
    """A function that sends a row to Weights & Biases (None ends it), or None where it is off.

    Never stops or changes the run, unless log.wandb is required: then UserError USAGE.
    """
    mode, required = cfg.log.wandb, cfg.log.wandb == "required"
    if mode == "off":
        return None
    if mode != "offline" and not has_wandb_key():
        if required:
            fix = "set WANDB_API_KEY or run `wandb login`, or use --log.wandb online"
            raise UserError(config.USAGE, "log.wandb=required but no API key was found", fix)
        say("wandb: no API key, so this run is logged offline; `wandb sync` uploads it later")
        mode = "offline"
    sections = {s: asdict(getattr(cfg, s)) for s in config.SECTIONS}
    try:
        import wandb

        session = wandb.init(
            project=cfg.log.wandb_project,
            name=cfg.run.name,
            id=json.loads((run / "config.json").read_text())["run_id"],
            config=sections,
            dir=tempfile.mkdtemp(prefix="trifold-") if is_remote(run) else os.fspath(run),
            mode="offline" if mode == "offline" else "online",
            resume="allow",
            settings=wandb.Settings(
                init_timeout=30, console="off", save_code=False, disable_git=True
            ),
        )
        session.define_metric("*", step_metric="step")
    except Exception as e:  # whatever fails in there, training goes on without it
        why = f"{type(e).__name__}: {str(e)[:200]}"
        if required:
            fix = "mend the connection, or use --log.wandb online"
            what = f"log.wandb=required but it did not start: {why}"
            raise UserError(config.USAGE, what, fix) from None
        warn(f"wandb is off ({why}); metrics.jsonl has everything")
        return None

    def send(row: dict | None):
        try:
            if row is None:
                return session.finish()
            named = {k: v for k, v in row.items() if k not in ("kind", "step", "layer")}
            if row["kind"] == "moe":  # a line a layer; of the load the busiest expert's
                named["load"] = [max(load) for load in named["load"]]
                layers = list(enumerate(row["layer"]))
                named = {f"{k}/layer{n}": x[i] for k, x in named.items() for i, n in layers}
            named = {f"{row['kind']}/{k}": v for k, v in named.items()}
            session.log(named | dict(step=row["step"]))
        except Exception as e:  # as above
            warn(f"wandb lost a row ({type(e).__name__}: {str(e)[:200]})")

    return send
