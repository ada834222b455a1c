"""Every knob of a run: frozen sections, presets, the command line,
and every check that needs no device.

    python train.py --config NAME_OR_FILE [--section.field VALUE ...]

This module imports neither jax nor anything heavy, so that a bad command line is answered at once.
"""

import argparse
import json
import math
import os
import re
import sys
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

# ---- errors

USAGE, DATA, CHECKPOINT, STORAGE, DIVERGED, DISTRIBUTED, BUSY, INTERRUPTED = 2, 3, 4, 5, 6, 7, 8, 75


class Problem(NamedTuple):
    """One mistake in two lines: what is wrong, with both numbers, and how to mend it."""

    what: str
    fix: str

    def __str__(self):
        return f"error: {self.what}\n  fix: {self.fix}"


class UserError(Exception):
    """Something its user can mend.  Ends the process with `code` and two lines a problem."""

    def __init__(self, code: int, what: str = "", fix: str = "", problems: list[Problem] = ()):
        self.code, self.problems = code, list(problems) or [Problem(what, fix)]
        super().__init__("\n".join(map(str, self.problems)))


END = "<|endoftext|>"  # the token that ends a document

# gcsfs goes by its first listing of a folder, file sizes included; but others write there too
os.environ.setdefault("FSSPEC_GS", '{"use_listings_cache": false}')

# ---- sections


@dataclass(frozen=True)
class Run:
    name: str = "run"
    """The run directory is run.dir/run.name."""
    dir: str = "runs"
    """Where run directories live: a local path or gs://bucket/path."""
    seed: int = 0
    """Initial weights, the order of the data and dropout all follow from it."""
    coordinator: str = ""
    """HOST:PORT of process 0 where no cluster is detected; needs num_processes and process_id."""
    num_processes: int = 0
    """Processes in all, when run.coordinator is given."""
    process_id: int = -1
    """This process's number, from 0, when run.coordinator is given."""


@dataclass(frozen=True)
class Mesh:
    dp: int = -1
    """Data parallel: weights, gradients and optimizer state rest sharded over it (FSDP).
    One of the three axes may be -1: what the others leave over."""
    pp: int = 1
    """Pipeline stages: the layers are split over them."""
    tp: int = 1
    """Tensor parallel: heads, d_ff, vocabulary and the sequence are split over it."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.dp, self.pp, self.tp


@dataclass(frozen=True)
class Model:
    vocab_size: int = 512
    """Rows of the embedding; at least the data's vocabulary."""
    d_model: int = 64
    """Width of the residual stream."""
    n_layers: int = 4
    """Decoder layers."""
    n_heads: int = 4
    """Query heads."""
    n_kv_heads: int = 4
    """Key and value heads; fewer than n_heads is grouped-query attention."""
    d_head: int = 16
    """Width of one head."""
    d_ff: int = 128
    """Hidden width of the SwiGLU feed-forward."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    norm_eps: float = 1e-6
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output projection too."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE."""


@dataclass(frozen=True)
class Data:
    train: str = "data/demo/train"
    """Directory of token shards to train on, local or gs://; or one nanoGPT .bin file."""
    val: str = "data/demo/val"
    """The held-out set, likewise."""
    cache: str = ""
    """Where shards from gs:// are kept; by default a folder under the system's temporary one."""


@dataclass(frozen=True)
class Train:
    seq_len: int = 64
    """Tokens in a sequence."""
    batch_size: int = 32
    """Sequences in an optimizer step, over the whole mesh."""
    microbatches: int = 0
    """Pipeline microbatches per accumulation slice; 0 takes the most that fit, up to 4 a stage."""
    grad_accum: int = 1
    """Slices a batch is cut into and worked through one after another."""
    steps: int = 100
    """Optimizer updates in all."""
    eval_every: int = 50
    """Updates between evaluations; 0 evaluates at the end only."""
    eval_batches: int = -1
    """Batches in an evaluation; -1 is the whole set."""
    eval_rolling: bool = False
    """Let each evaluation go on where the one before it stopped, instead of at the start."""
    sample_every: int = 0
    """Updates between lines of samples.jsonl; 0 writes none."""
    sample_tokens: int = 64
    """Tokens in each of them."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype.  Parameters and optimizer state rest in float32."""
    remat: Literal["none", "dots", "layer"] = "layer"
    """What the backward pass recomputes: nothing, all but matmul outputs, or whole layers."""
    dropout: float = 0.0
    """Chance that an element of the embedding or of a branch's output is dropped."""
    z_loss: float = 0.0
    """Weight of the mean squared log-partition in the objective (PaLM, section 5; usual: 1e-4)."""


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warmup: cosine to min_lr_ratio, or hold, then fall linearly (warmup-stable-decay)."""
    warmup_steps: int = 10
    """Updates of linear warmup."""
    decay_ratio: float = 0.2
    """wsd: the share of train.steps over which the rate falls."""
    min_lr_ratio: float = 0.1
    """The last learning rate over the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    b1: float = 0.9
    """AdamW's first moment decay."""
    b2: float = 0.95
    """AdamW's second moment decay."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""


@dataclass(frozen=True)
class Checkpoint:
    every: int = 50
    """Updates between saves; the last update is always saved."""
    keep: int = 2
    """Checkpoints kept, newest first."""


@dataclass(frozen=True)
class Log:
    every: int = 10
    """Updates between console lines; metrics.jsonl has every update."""
    wandb: Literal["off", "offline", "online", "required"] = "online"
    """online falls back to offline without a key; required exits instead."""
    wandb_project: str = "trifold"
    """The Weights & Biases project."""


# Booleans take a value (--model.qk_norm True), as config.json has it.
YesNo = tyro.conf.FlagConversionOff


@dataclass(frozen=True)
class Config:
    run: Run = Run()
    mesh: Mesh = Mesh()
    model: YesNo[Model] = Model()
    data: Data = Data()
    train: YesNo[Train] = Train()
    optim: Optim = Optim()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    fresh: tyro.conf.FlagCreatePairsOff[bool] = False
    """Start over in a run directory that holds a run: the old one is moved aside, never deleted."""
    eval_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Evaluate the newest checkpoint and exit."""


SECTIONS = [f.name for f in fields(Config) if f.name not in ("fresh", "eval_only")]

# ---- presets

# fmt: off


def tiny() -> Config:
    """For tests: compiles in seconds, and every axis can be 1, 2, 4 or 8."""
    return Config(
        run=Run(name="tiny"),
        model=Model(n_layers=8, d_model=32, n_heads=16, n_kv_heads=8, d_head=4, d_ff=64),
        train=Train(seq_len=16, batch_size=64, steps=20, eval_every=10, dtype="float32"),
        optim=Optim(lr=1e-2, warmup_steps=5),
        checkpoint=Checkpoint(every=10),
        log=Log(wandb="off"),
    )


def demo() -> Config:
    """Python's standard library on 8 fake CPU devices, in about three minutes on two cores."""
    return Config(
        run=Run(name="demo"),
        mesh=Mesh(dp=2, pp=2, tp=2),
        model=Model(vocab_size=4096, d_model=128, n_layers=4, n_heads=8, n_kv_heads=4,
                    d_head=16, d_ff=384),
        train=Train(seq_len=128, batch_size=16, steps=400, eval_every=100, sample_every=200,
                    dtype="float32"),
        optim=Optim(lr=4e-3, warmup_steps=30, schedule="wsd"),
        checkpoint=Checkpoint(every=10),
        log=Log(wandb="off"),
    )


def gpt2_124m() -> Config:
    """GPT-2 small's sizes in a modern block; vocabulary rounded up to 128 x 393."""
    return Config(
        run=Run(name="gpt2_124m"),
        model=Model(vocab_size=50304, d_model=768, n_layers=12, n_heads=12, n_kv_heads=12,
                    d_head=64, d_ff=2048, tie_embeddings=True),
        data=Data(train="data/openwebtext/train.bin", val="data/openwebtext/val.bin"),
        train=Train(seq_len=1024, batch_size=480, grad_accum=10, steps=20_000, eval_every=500,
                    eval_batches=20),
        optim=Optim(lr=6e-4, warmup_steps=500),
        checkpoint=Checkpoint(every=500),
    )


def llama_1b() -> Config:
    """A 0.9B Llama-style model for one node."""
    return Config(
        run=Run(name="llama_1b"),
        model=Model(vocab_size=32768, d_model=2048, n_layers=16, n_heads=16, n_kv_heads=8,
                    d_head=128, d_ff=5632),
        data=Data(train="data/train", val="data/val"),
        train=Train(seq_len=2048, batch_size=512, grad_accum=4, steps=20_000, eval_every=500,
                    eval_batches=20),
        optim=Optim(lr=4e-4, warmup_steps=1000),
        checkpoint=Checkpoint(every=500),
    )


def llama3_8b() -> Config:
    """Llama 3 8B (Grattafiori et al. 2024, table 3)."""
    return Config(
        run=Run(name="llama3_8b"),
        model=Model(vocab_size=128256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8,
                    d_head=128, d_ff=14336, rope_theta=500_000.0, norm_eps=1e-5),
        data=Data(train="data/train", val="data/val"),
        train=Train(seq_len=8192, batch_size=512, grad_accum=4, steps=100_000, eval_every=1000,
                    eval_batches=20),
        optim=Optim(lr=3e-4, warmup_steps=2000),
        checkpoint=Checkpoint(every=500, keep=3),
    )

# fmt: on


PRESETS = {f.__name__: f for f in (demo, tiny, gpt2_124m, llama_1b, llama3_8b)}

# ---- checks


def listed(values) -> str:
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def value(cfg: Config, name: str):
    return reduce(getattr, name.split("."), cfg)


# fmt: off
AXIS_DIVIDES = {  # what each mesh axis splits into equal parts
    "mesh.dp": ["model.d_model"],
    "mesh.pp": ["model.n_layers", "train.microbatches"],
    "mesh.tp": ["model.n_heads", "model.n_kv_heads", "model.d_ff", "model.vocab_size",
                "train.seq_len"],
}

BIG = 2**31 - 1
AUTO = {"mesh.dp", "mesh.pp", "mesh.tp", "train.eval_batches"}  # where -1 has a meaning of its own
RANGES = {  # name: (low, high), both allowed
    **dict.fromkeys(sorted(AUTO), (1, BIG)),
    **{f"model.{name}": (1, BIG) for name in (
        "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff")},
    **{f"train.{name}": (1, BIG) for name in (
        "seq_len", "batch_size", "grad_accum", "steps", "sample_tokens")},
    **{f"train.{name}": (0, BIG) for name in ("microbatches", "eval_every", "sample_every")},
    "run.seed": (0, 2**32 - 1),
    "model.rope_theta": (1.0, 1e12),
    "model.norm_eps": (1e-12, 0.1),
    "train.dropout": (0.0, 0.99),
    "train.z_loss": (0.0, 1.0),
    "optim.lr": (0.0, 100.0),
    "optim.warmup_steps": (0, BIG),
    "optim.decay_ratio": (0.0, 1.0),
    "optim.min_lr_ratio": (0.0, 1.0),
    "optim.weight_decay": (0.0, 10.0),
    "optim.b1": (0.0, 0.9999999),
    "optim.b2": (0.0, 0.9999999),
    "optim.eps": (1e-30, 1.0),
    "optim.clip_norm": (1e-9, 1e9),
    "checkpoint.every": (1, BIG),
    "checkpoint.keep": (2, BIG),
    "log.every": (1, BIG),
}
# fmt: on


def range_problems(cfg: Config):
    for name, (low, high) in RANGES.items():
        x, auto = value(cfg, name), name in AUTO
        if not (low <= x <= high or (x == -1 and auto)):  # so written, a NaN is out of range too
            limits = f"at least {low}" if high == BIG else f"between {low} and {high}"
            fix = f"set --{name} accordingly{', or to -1' if auto else ''}"
            yield Problem(f"{name}={x} must be {limits}", fix)


def divide_problems(cfg: Config):
    """Each axis once, with all that it fails to divide; and the heads and batch likewise."""
    m, t = cfg.model, cfg.train
    for axis, names in AXIS_DIVIDES.items():
        size, of = value(cfg, axis), {n: value(cfg, n) for n in names if value(cfg, n) > 0}
        wrong = [f"{name}={n}" for name, n in of.items() if size > 1 and n % size]
        if wrong:
            what = f"{axis}={size} must divide {' and '.join(wrong)}"
            yield Problem(what, f"set --{axis} to {listed(divisors(math.gcd(*of.values())))}")
    if m.n_kv_heads > 0 and m.n_heads % m.n_kv_heads:
        what = f"model.n_kv_heads={m.n_kv_heads} must divide model.n_heads={m.n_heads}"
        yield Problem(what, f"set --model.n_kv_heads to {listed(divisors(m.n_heads))}")
    if m.d_head % 2:
        what = f"model.d_head={m.d_head} must be even: RoPE turns pairs of elements"
        yield Problem(what, f"set --model.d_head to {m.d_head + 1}")
    dp, pp, _ = (max(1, size) for size in cfg.mesh.sizes)
    micro = t.microbatches or (pp if m.n_layers % pp == 0 else 1)  # a wrong pp is reported above
    parts = t.grad_accum * dp * micro
    if parts > 0 and t.batch_size % parts:
        names = f"train.grad_accum*mesh.dp*{'train.microbatches' if t.microbatches else 'mesh.pp'}"
        product = f"{t.grad_accum}*{dp}*{micro} = {parts}"
        what = f"{names} = {product} must divide train.batch_size={t.batch_size}"
        near = max(1, round(t.batch_size / parts)) * parts
        fix = f"set --train.batch_size {near}"
        yield Problem(what, fix + (", or --train.microbatches 0" if t.microbatches else ""))


def other_problems(cfg: Config):
    r, t, o = cfg.run, cfg.train, cfg.optim
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", r.name) or r.name.startswith("."):
        allowed = "1 to 64 letters, digits, '.', '_' or '-', not starting with '.'"
        what = f"run.name={r.name!r} must be {allowed}"
        yield Problem(what, "choose a plain --run.name; folders belong in --run.dir")
    if cfg.fresh and cfg.eval_only:
        what = "--fresh starts a run over, and --eval_only evaluates what there is"
        yield Problem(what, "give one of the two")
    if "://" in cfg.data.cache:
        what = f"data.cache={cfg.data.cache!r} must be a local folder"
        yield Problem(what, "leave --data.cache out, or name a folder on this host's disk")
    n_auto = cfg.mesh.sizes.count(-1)
    if n_auto > 1:
        what = f"mesh: {n_auto} axes are -1, at most one may be"
        yield Problem(what, "set all but one of --mesh.dp --mesh.pp --mesh.tp")
    if o.warmup_steps > t.steps:
        what = f"optim.warmup_steps={o.warmup_steps} must not exceed train.steps={t.steps}"
        yield Problem(what, f"set --optim.warmup_steps to {t.steps} or less")
    for name in ("run.dir", "data.train", "data.val"):
        path = value(cfg, name)
        if not path or "\0" in path or re.match(r"[a-z]+://[^/]*@", path):
            what = f"{name}={path!r} must be a path without NUL bytes or credentials"
            yield Problem(what, f"give --{name} a local path or gs://bucket/path")
    given = r.coordinator or r.num_processes or r.process_id >= 0
    port = re.fullmatch(r".+:(\d{1,5})", r.coordinator)
    whole = port and 0 < int(port[1]) < 65536 and 0 <= r.process_id < r.num_processes
    if given and not whole:
        what = (
            f"run.coordinator={r.coordinator!r} run.num_processes={r.num_processes} "
            f"run.process_id={r.process_id} must go together: "
            "HOST:PORT, a count, and a number below it"
        )
        yield Problem(what, "set all three, or none where a cluster is detected")


def check(cfg: Config) -> Config:
    """cfg itself, or a UserError with every problem in it.

    Needs no device; a -1 axis is left for later.
    """
    found = [*range_problems(cfg), *divide_problems(cfg)]
    found += other_problems(cfg)
    if found:
        raise UserError(USAGE, problems=found)
    return cfg


def resolve(cfg: Config, n_devices: int, rows: int | None = None) -> Config:
    """Fill in what depends on the number of devices: the -1 axis and the automatic microbatches.

    rows: about so many sequences at a time instead of the training batch, for scripts that do not
    train.
    """
    known = math.prod(size for size in cfg.mesh.sizes if size != -1)
    dp, pp, tp = (max(1, n_devices // known) if size == -1 else size for size in cfg.mesh.sizes)
    cfg = replace(cfg, mesh=Mesh(dp, pp, tp))
    if rows is not None:
        whole = max(1, rows // (dp * pp)) * dp * pp
        cfg = replace(cfg, train=replace(cfg.train, batch_size=whole, grad_accum=1, microbatches=0))
    check(cfg)
    if not cfg.train.microbatches:
        rows = cfg.train.batch_size // (cfg.train.grad_accum * dp)
        most = max(n for n in range(pp, 4 * pp + 1, pp) if rows % n == 0) if pp > 1 else 1
        cfg = replace(cfg, train=replace(cfg.train, microbatches=most))
    return cfg


# ---- command line

# What config.json holds beside the config.
RECORD = ("argv", "versions", "git_commit", "data_fingerprint", "run_id")


def to_json(cfg: Config, **record) -> str:
    """config.json: the sections, and what is worth knowing about how the run was started."""
    assert set(record) <= set(RECORD), record
    return json.dumps({**{s: asdict(getattr(cfg, s)) for s in SECTIONS}, **record}, indent=1) + "\n"


def no_duplicates(pairs):
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)!r} appears twice")
    return dict(pairs)


def read_file(path: str) -> str:
    """The text of a config file, which may be remote."""
    if "://" in path:
        from etils import epath  # 0.3 s, and only needed here

        return epath.Path(path).read_text()
    return Path(path).read_text(encoding="utf-8")


def file_flags(path: str) -> list[str]:
    """A config file as flags, so that a file and a command line meet the same checks."""
    try:
        text = read_file(path)
        if len(text) > 1_000_000:
            raise ValueError(f"{len(text)} characters, more than a config has")
        record = json.loads(text, object_pairs_hook=no_duplicates)
        keys = set(record) if isinstance(record, dict) else {type(record).__name__}
        if unknown := keys - set(SECTIONS) - set(RECORD):
            raise ValueError(f"unknown keys {sorted(unknown)}")
        flags = []
        for section in SECTIONS:
            for name, v in record.get(section, {}).items():
                if not isinstance(v, (str, int, float, bool)):
                    raise ValueError(f"{section}.{name} is {v!r}")
                flags.append(f"--{section}.{name}={v}")
        return flags
    except FileNotFoundError:
        what = f"--config {path}: no such preset or file"
        fix = f"use {listed(PRESETS)}, or the config.json of a run"
        raise UserError(USAGE, what, fix) from None
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        what = f"--config {path!r} cannot be read: {str(e)[:200]}"
        fix = "give the config.json of a run, or JSON of the same shape"
        raise UserError(USAGE, what, fix) from None


def parse(argv: list[str]) -> Config:
    """The checked Config of a command line.

    Raises UserError; tyro itself exits 2 on unknown flags.
    """
    pre = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    pre.add_argument("--config")
    given, rest = pre.parse_known_args(argv)
    asks_help = "-h" in rest or "--help" in rest
    if given.config is None and not asks_help:
        fix = f"add --config and one of {listed(PRESETS)}, or a config.json"
        raise UserError(USAGE, "no --config given", fix)
    base = PRESETS.get(given.config, Config)()
    flags = [] if given.config is None or given.config in PRESETS else file_flags(given.config)
    about = (
        f"--config NAME_OR_FILE: a preset ({', '.join(PRESETS)}) or a run's config.json; "
        "flags override it."
    )
    options = dict(default=base, description=about, use_underscores=True)
    return check(tyro.cli(Config, args=flags + rest, **options))


def simulate_devices(mesh: Mesh, n_processes: int = 1):
    """Give the CPU as many devices as the mesh needs, and the threads to run them.

    Call before jax starts.  An accelerator, where there is one, is used instead and none of this
    touches it.  XLA runs fake devices on one pool with a thread per core, and programs with
    collectives wait for each other in it for good when there are fewer threads than twice the
    devices; NPROC sets the pool's size.  The timeout turns what would still hang into an error.
    """
    xla_flags = os.environ.get("XLA_FLAGS", "")
    wanted = math.prod(size for size in mesh.sizes if size > 0) // max(1, n_processes)
    if wanted > 1 and "xla_force_host_platform_device_count" not in xla_flags:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(wanted))
    forced = re.findall(r"xla_force_host_platform_device_count=(\d+)", xla_flags)
    n = max(int(os.environ.get("JAX_NUM_CPU_DEVICES") or 1), *map(int, forced or [1]))
    if n > 1:  # whatever os.cpu_count says: a container may have fewer
        asked, cores = int(os.environ.get("NPROC") or 0), os.cpu_count() or 1
        os.environ["NPROC"] = str(max(64, 2 * n, asked, cores))
    if n > 1 and "collective_call_terminate" not in xla_flags:
        timeout = "--xla_cpu_collective_call_terminate_timeout_seconds=120"
        os.environ["XLA_FLAGS"] = f"{xla_flags} {timeout}".strip()


def of_run(run: str, mesh: Mesh, *flags: str) -> Config:
    """The config of a run directory on another mesh, for scripts that do not train.

    The devices are prepared too.
    """
    sizes = [word for axis, size in asdict(mesh).items() for word in (f"--mesh.{axis}", str(size))]
    # A batch that fits; resolve() makes it the script's own.
    rows = str(max(1, mesh.dp) * max(1, mesh.pp))
    batch = ["--train.batch_size", rows, "--train.grad_accum", "1", "--train.microbatches", "0"]
    alone = ["--run.coordinator=", "--run.num_processes", "0", "--run.process_id=-1"]
    cfg = parse(["--config", f"{run.rstrip('/')}/config.json", *sizes, *batch, *alone, *flags])
    simulate_devices(mesh)
    return cfg


def quit_on_error(f, *args):
    """f(*args); what its user can mend becomes two lines on stderr and an exit code."""
    try:
        return f(*args)
    except UserError as e:
        print(e, file=sys.stderr)
        sys.exit(e.code)
    except OSError as e:
        fix = "make room, or mend the path or its permissions, and run the same command again"
        print(
            UserError(STORAGE, f"{e.filename or 'storage'}: {e.strerror or e}", fix),
            file=sys.stderr,
        )
        sys.exit(STORAGE)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        sys.exit(INTERRUPTED)


def start() -> Config:
    """What train.py does before it imports jax: read the command line and prepare the devices."""
    cfg = quit_on_error(parse, sys.argv[1:])
    simulate_devices(cfg.mesh, cfg.run.num_processes)
    return cfg
