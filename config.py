"""A run's settings: sections of flags, and presets.

The section `model` is in architecture.py, checks of settings in checks.py, the command line and
config files in cli.py.
"""

import math
import re
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Annotated, Literal

import tyro

from architecture import Model

# ---- sections

# A field's docstring is the help text of its flag.  tyro starts a new line wherever the docstring
# does, so each line of it ends a sentence.


@dataclass(frozen=True)
class Run:
    """Where the run is stored, its random seed, and its processes."""

    name: str = "run"
    """Name of the run.  Its directory is run.dir/run.name."""
    dir: str = "runs"
    """Folder that holds run directories: a local path or gs://bucket/path."""
    start_from: str = ""
    """Another run, RUN or RUN@STEP, whose newest or given checkpoint this new run starts from.
    Its settings may differ from that run's, but not the shapes of its weights.
    It is not changed, and not needed once this run has a checkpoint of its own."""
    start_with: Literal["weights", "state"] = "weights"
    """What run.start_from gives.
    weights: the weights, to train from update 0.
    state: everything, to go on from its update; if optim.name differs, weights and update only."""
    seed: int = 0
    """Seed of the initial weights, the order of the data, dropout and the sampled text."""
    coordinator: str = ""
    """HOST:PORT or [IPV6]:PORT of process 0, where JAX does not detect the cluster itself.
    It needs run.num_processes and run.process_id too."""
    num_processes: int = 0
    """Number of processes, together with run.coordinator; 0 leaves it to JAX."""
    process_id: int = -1
    """Number of this process, from 0, together with run.coordinator; -1 leaves it to JAX."""
    restarts: int = 0
    """How often training is restarted without a new checkpoint in between.
    Only after what may be temporary: storage errors, a lost process, a hang, preemption, a kill."""
    accept: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SETTINGS")] = ()
    """Settings, such as optim.lr, that may differ from those of the run's last start.
    Only those that change the training need to be named; data.train permits other data."""
    start_timeout: int = 120
    """Seconds within which all processes must connect; otherwise the run ends with exit code 7."""
    compile_cache: str = ""
    """Local folder that keeps compiled programs for later starts; empty keeps none.
    Its content is run as code, so no one else may be able to write to it."""
    hang_timeout: int = 0
    """Seconds without an update, save or evaluation batch after which the run exits with code 9.
    The stacks of all threads are then in crash/ in the run directory.
    0 takes 20 times the slowest recent update, and at least 300.
    The start, compiling, and waiting for a save may take 12 times as long."""


SLICE = "slice"
"""The first axis of a mesh with several slices; see Mesh.shape."""


@dataclass(frozen=True)
class Mesh:
    """How dp * pp * tp devices share the work.  One of the three may be -1: it takes the devices
    that the other two leave."""

    dp: Annotated[int | str, tyro.conf.arg(metavar="INT|SLICESxINT")] = -1
    """Data parallelism: each of the dp ranks trains on part of the batch.
    Weights, gradients and optimizer state are sharded over dp too, as mesh.fsdp says.
    2x4: 8 ranks in 2 slices, each of which stores all weights.
    Only the sum of the gradients crosses the network between slices, once an update.
    A plain number is split evenly over several slices (TPU) or nodes (GPU): 8 on two is 2x4."""
    pp: int = 1
    """Pipeline parallelism: the layers are split into pp stages."""
    tp: int = 1
    """Tensor parallelism: heads, d_ff, the vocabulary and the sequence are split into tp parts."""
    fsdp: Literal["layer", "step", "none"] = "layer"
    """When the weights are gathered over dp.
    layer: each layer's weights where they are used (ZeRO-3).
    step: all weights once per update, with whole gradients; more memory, less communication.
    none: never; each dp rank stores all weights (plain data parallelism)."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe"
    """Order of the passes in the pipeline.
    gpipe: all forward passes, then all backward passes.
    1f1b: backward passes as early as possible, for less memory than gpipe.
    interleaved: 1f1b with mesh.virtual_stages parts on each stage."""
    virtual_stages: int = 1
    """interleaved: parts of the model on each stage; the bubble is that many times smaller."""
    skip_bubbles: bool = True
    """True: in training, a stage that has no microbatch does nothing.
    False: it computes with the others and drops the result, to measure the bubble in CPU time."""
    experts: Literal["gather", "alltoall"] = "gather"
    """How the tokens of a moe layer reach their experts.
    gather: the experts' weights are gathered over dp, like all others.
    alltoall: each expert stays on one dp rank, and the tokens are sent to it.
    Without train.capacity_factor, alltoall keeps room for all ranks' tokens on each rank.
    Its token buffers are then dp times as large, and without kernels its expert matmuls too."""
    slow_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients cross the network between slices, if mesh.dp has several."""

    def __post_init__(self):
        if isinstance(self.dp, str) and not re.fullmatch(r"[1-9]\d{0,8}x[1-9]\d{0,8}", self.dp):
            what = f"mesh.dp={self.dp!r} is not a number such as 8"
            raise ValueError(f"{what}, or slices and their ranks as in 2x4")

    def __str__(self):
        return f"dp={self.dp} pp={self.pp} tp={self.tp}"

    @property
    def slices(self) -> int:
        return int(self.dp.partition("x")[0]) if isinstance(self.dp, str) else 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(dp over all slices, pp, tp)"""
        return math.prod(map(int, str(self.dp).split("x"))), self.pp, self.tp

    @property
    def shape(self) -> dict[str, int]:
        """{axis: size} of the device mesh; with several slices the first axis is "slice", and "dp"
        has the ranks of a slice."""
        dp, pp, tp = self.sizes
        slices = {SLICE: self.slices} if self.slices > 1 else {}
        return slices | dict(dp=dp // self.slices, pp=pp, tp=tp)


@dataclass(frozen=True)
class Data:
    """The data sets, and where documents end."""

    train: str = "data/demo/train"
    """Training set: a folder of token shards, or one .npy or nanoGPT .bin file; local or gs://.
    synthetic: seeded random tokens with structure, without files.
    NAME=PATH:WEIGHT,NAME=PATH:WEIGHT: a mixture of sets, whose rows are in these proportions."""
    val: str = "data/demo/val"
    """Held-out set for evaluation, in the same formats.
    NAME=PATH,NAME=PATH: several, each evaluated; the first decides which checkpoints are best."""
    stages: Annotated[tuple[str, ...], tyro.conf.arg(metavar="STAGES")] = ()
    """Later weights of a mixture: UPDATES:NAME=WEIGHT,NAME=WEIGHT for each stage.
    UPDATES is the number of updates before the stage; those that data.skip leaves out count too."""
    skip: str = ""
    """Updates whose rows are left out, such as 1200:1250,1311: those from 1200 to 1249, and 1311.
    Later rows move up.  Updates have the numbers that they would have without data.skip."""
    epochs_max: int = 0
    """How often a set may be trained on.  A run that would repeat one more often does not start.
    0 sets no limit."""
    document_mask: bool = False
    """True: tokens attend only within their document, and positions restart with each document."""
    end_id: int = -1
    """Id of the token that ends a document, for data.document_mask and for scripts.
    -1 takes it from the data's manifest, and in scripts from the tokenizer."""
    prefetch: int = 8
    """Batches that are read ahead, the current one included; at least 4."""
    cache: str = ""
    """Local folder for pages of shards from gs://; by default in the system's temporary folder."""
    cache_gb: float = 4.0
    """Largest size of data.cache, in units of 2**30 bytes; 0 keeps no pages on disk."""


@dataclass(frozen=True)
class Train:
    """Batches, evaluation, samples, memory, and terms of the loss.  An update is one step of the
    optimizer."""

    seq_len: int = 64
    """Tokens in a sequence."""
    batch_size: int = 32
    """Sequences in an update, over all devices."""
    batch_ramp: str = ""
    """Batch sizes as UPDATES:SEQUENCES, such as 0:16,2000:32, which doubles after 2000 updates.
    The last size replaces train.batch_size."""
    microbatches: int = 0
    """Pipeline microbatches in each accumulation step.
    0 takes 1 if mesh.pp is 1, else the largest of pp, 2, 3 and 4 pp that divides a rank's rows.
    On a CPU: the fewest, in multiples of pp, with at most 512 tokens in each.
    If no number gives so few tokens, the largest that the batch allows."""
    grad_accum: int = 1
    """Accumulation steps: the parts into which a batch is cut, to save memory.
    gpipe runs them one after another; 1f1b and interleaved run all of them as one."""
    steps: int = 100
    """Number of updates in the whole run."""
    eval_every: int = 50
    """Updates between evaluations; 0 evaluates only at the end."""
    eval_batches: int = -1
    """Batches in an evaluation; -1 takes the whole set."""
    eval_rolling: bool = False
    """True: each evaluation starts where the previous one stopped.
    False: each starts at the beginning of the set."""
    sample_every: int = 0
    """Updates between samples of text, written to samples.jsonl; 0 writes none."""
    sample_tokens: int = 64
    """Tokens in a sample."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the computations; parameters and optimizer state are stored in float32."""
    remat: Literal["auto", "none", "dots", "attention", "layer", "offload"] = "auto"
    """What the backward pass recomputes, to save memory.
    auto: layer, unless there is memory for more.
    On a CPU it is none, if that takes at most 1 GiB for all devices.
    On GPUs that plan.py knows it is dots, if its plan takes up to 4/5 of memory.
    On those GPUs pipelines, and models with experts, take layer.
    none: nothing.  layer: whole layers.
    dots: all except cuDNN's attention and matmuls with dense weights.
    Where mesh.tp sums an output, the sum is kept instead.
    attention: only attention.
    offload: whole layers, from inputs in host memory; needs mesh.pp 1.
    Every choice recomputes routed experts' hidden units, unless train.capacity_factor is set."""
    unroll: int = 0
    """Number of iterations of the loops over layers that are compiled as one.
    A larger number copies less and takes longer to compile.
    A pipeline stage, or a part of one, of at most so many layers has no loop.
    0 takes 1; on a CPU with remat none, all layers of a stage if they are large and at most 12."""
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """Attention kernel.
    auto: cudnn on NVIDIA GPUs, splash on TPUs, xla elsewhere.
    auto warns and takes xla where that kernel does not support the model.
    xla: plain JAX, in blocks of queries."""
    loss_chunk: int = 4096
    """Tokens whose logits a device computes and holds in memory at a time."""
    spike_sigma: float = 0.0
    """Skip an update whose gradient norm is this many standard deviations above the mean.
    Both are of the last 64 updates; before there are 64, and with 0, none is skipped."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding, or of an attention or MLP output."""
    profile: tuple[int, int] = (0, 0)
    """First update to trace, and number of updates; 0 0 traces none.
    Writes profile/ in the run directory, with a ledger of the time."""
    pgle: bool = False
    """NVIDIA GPUs: compile again with the times that operations took in a trace (PGLE).
    The trace is of three early updates, or of those of train.profile.
    Elsewhere it has no effect, and the run says so."""
    z_loss: float = 0.0
    """Weight of the z-loss, the mean of (log of the softmax's denominator)^2 over the tokens.
    It keeps the logits from growing (PaLM, section 5; usually 1e-4)."""
    balance_loss: float = 0.0
    """moe: weight of each layer's sequence-wise balance loss (DeepSeek-V3, eq. 17 to 20)."""
    bias_rate: float = 0.001
    """moe: change of each bias of model.router_bias in an update (DeepSeek-V3, section 2.1.2)."""
    capacity_factor: float = 0.0
    """moe: limit on the tokens of a sequence that an expert takes in training.
    It is a multiple of the expert's even share; the rest are dropped.
    0 sets no limit.  Evaluation and sampling never drop tokens."""


@dataclass(frozen=True)
class Eval:
    """What an evaluation scores besides data.val."""

    tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASKS")] = ()
    """Files of questions with choices, as NAME=PATTERN, such as core=tasks/core/*.jsonl.
    docs/evaluating.md has their form.
    Each file has its accuracy, and NAME the mean over its files."""


@dataclass(frozen=True)
class Optim:
    """The optimizer and the learning rate."""

    name: str = "adamw"
    """Optimizer, a name in the table OPTIMIZERS of optim.py.
    muon: Muon for the matrices of layers, AdamW for the rest.
    lion: the sign of one moment; its rates are 3 to 10 times smaller than AdamW's."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: str = "cosine"
    """Learning rate after warmup, a name in the table SCHEDULES of optim.py.
    cosine: fall along a cosine.
    wsd (warmup-stable-decay): stay at the peak, then fall linearly.
    wsd_sqrt: as wsd, but fall fast at first, as 1 - sqrt.
    linear: fall linearly.
    constant: stay at the peak."""
    warmup_steps: int = 10
    """Updates in which the learning rate rises linearly to its peak."""
    decay_ratio: float = 0.2
    """wsd, wsd_sqrt: share of train.steps in which the learning rate falls."""
    min_lr_ratio: float = 0.1
    """Last learning rate divided by the peak; constant does not use it."""
    weight_decay: float = 0.1
    """Decoupled weight decay; it applies to matrices only."""
    b1: float = 0.9
    """AdamW: decay of the first moment.  Lion: weight of its moment against the gradient."""
    b2: float = 0.95
    """AdamW: decay of the second moment.  Lion: decay of its moment."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    muon_momentum: float = 0.95
    """Muon: decay of its moment."""
    muon_lr_ratio: float = 1.0
    """Muon: learning rate of its matrices divided by that of the other weights."""
    clip_norm: float = 1.0
    """Gradients whose global norm is larger are scaled down to it."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999; 0 keeps none.
    Scripts take the average with --weights ema.
    After n updates the decay is at most (1 + n) / (10 + n)."""


@dataclass(frozen=True)
class Checkpoint:
    """How often the state is saved."""

    every: int = 50
    """Updates between checkpoints; the last update is always saved.
    0 saves by checkpoint.minutes alone.
    If that is 0 too, the next save starts whenever the last one is complete."""
    minutes: float = 0.0
    """Minutes between checkpoints, besides checkpoint.every; 0 sets no time."""
    keep: int = 2
    """Number of newest checkpoints to keep; at least 2."""
    keep_every: int = 0
    """Also keep each checkpoint whose number of updates is a multiple of this; 0 keeps none."""
    best: bool = False
    """True: save after each evaluation too, and keep the two checkpoints of lowest loss."""
    patience: int = 600
    """Seconds for which saving is retried after it has failed."""


@dataclass(frozen=True)
class Log:
    """What is reported while the run goes on."""

    every: int = 10
    """Updates between lines on the console; metrics.jsonl has every update."""
    norms_every: int = 0
    """Updates between rows with the size of each layer's gradient, update, weights and logits.
    They are measured at each update, and drawn in norms.png.  0 measures none."""
    wandb: Literal["off", "offline", "online", "required"] = "online"
    """Weights & Biases.
    online: offline without an API key or with WANDB_MODE=offline; not at all if it cannot start.
    required: online, or the run does not start."""
    wandb_project: str = "trifold"
    """Project in Weights & Biases."""
    tensorboard: bool = False
    """Write the numbers of metrics.jsonl to tensorboard/ in the run directory too."""
    hlo: bool = False
    """Write the compiled program of an update to step.hlo.txt in the run directory.
    step.svg is a picture of its loops, with the matmuls and collectives in each."""


# Booleans take a value (--model.qk_norm True), as in config.json.
YesNo = tyro.conf.FlagConversionOff
Flag = tyro.conf.FlagCreatePairsOff[bool]  # takes no value, and has no --no_ form


@dataclass(frozen=True)
class Config:
    run: Run = Run()
    mesh: YesNo[Mesh] = Mesh()
    model: YesNo[Model] = Model()
    data: YesNo[Data] = Data()
    train: YesNo[Train] = Train()
    eval: Eval = Eval()
    optim: Optim = Optim()
    checkpoint: YesNo[Checkpoint] = Checkpoint()
    log: YesNo[Log] = Log()
    fresh: Flag = False
    """Start over where the run directory holds a run: the old run is moved aside, never deleted."""
    eval_only: Flag = False
    """Evaluate the newest checkpoint and exit."""
    rollback: int = -1
    """Go back to the newest checkpoint that has at most this many updates; -1 does not go back.
    Later checkpoints and rows are moved to rolled_back/ in the run directory."""


SECTIONS = [f.name for f in fields(Config) if is_dataclass(f.default)]


# ---- presets


# fmt: off
def tiny() -> Config:
    """A model for tests: it compiles in seconds, and each mesh axis can be 1, 2, 4 or 8."""
    return Config(
        run=Run(name="tiny"),
        model=Model(n_layers=8, d_model=32, n_heads=16, n_kv_heads=8, d_head=4, d_ff=64),
        train=Train(seq_len=16, batch_size=64, steps=20, eval_every=10, dtype="float32"),
        optim=Optim(lr=1e-2, warmup_steps=5),
        checkpoint=Checkpoint(every=10),
        log=Log(wandb="off"),
    )


def demo() -> Config:
    """Trains on the documentation of Python, on 8 simulated devices; three minutes on two cores."""
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


def shakespeare_char() -> Config:
    """Shakespeare by characters, in nanoGPT's sizes for a CPU: scripts/recipes has the text."""
    return Config(
        run=Run(name="shakespeare_char"),
        mesh=Mesh(dp=1, pp=1, tp=1),
        model=Model(vocab_size=128, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, d_head=32,
                    d_ff=256, qk_norm=True, rope_theta=100.0),
        data=Data(train="data/shakespeare_char/train", val="data/shakespeare_char/val"),
        train=Train(seq_len=64, batch_size=12, steps=2000, eval_every=500, dtype="float32"),
        optim=Optim(name="muon", lr=1.2e-2, warmup_steps=100, schedule="linear",
                    min_lr_ratio=0.0, b2=0.99, muon_momentum=0.9),
        checkpoint=Checkpoint(every=500),
        log=Log(wandb="off"),
    )


def recipe(name: str, model: Model, lr: float, warmup_steps=1000, keep=2, **train) -> Config:
    """A model and its recipe, of 20,000 updates by default.  train: settings of that section."""
    train = dict(steps=20_000, eval_every=500, eval_batches=20) | train
    return Config(
        run=Run(name=name),
        model=model,
        data=Data(train="data/train", val="data/val"),
        train=Train(**train),
        optim=Optim(lr=lr, warmup_steps=warmup_steps),
        checkpoint=Checkpoint(every=500, keep=keep),
    )


def gpt2(name: str, n_layers: int, d_model: int, n_heads: int) -> Config:
    """GPT-2 (Radford et al. 2019, table 2) with nanoGPT's batch size, rates and weight decay."""
    model = Model(vocab_size=50257, d_model=d_model, n_layers=n_layers, n_heads=n_heads,
                  n_kv_heads=n_heads, d_head=64, d_ff=4 * d_model, tie_embeddings=True,
                  attn_bias=True, mlp_bias=True, norm="layer", norm_bias=True, norm_eps=1e-5,
                  activation="gelu_tanh", positions="learned", max_positions=1024)
    cfg = recipe(name, model, lr=6e-4, warmup_steps=500, seq_len=1024, batch_size=480,
                 grad_accum=10)
    data = Data(train="data/openwebtext/train.bin", val="data/openwebtext/val.bin")
    return replace(cfg, data=data)


def llama_1b() -> Config:
    """A model in the style of Llama with 0.9 billion parameters, for one node."""
    model = Model(vocab_size=32768, d_model=2048, n_layers=16, n_heads=16, n_kv_heads=8,
                  d_head=128, d_ff=5632)
    return recipe("llama_1b", model, lr=4e-4, seq_len=2048, batch_size=512, grad_accum=4)


def large(name: str, model: Model, seq_len: int, lr: float, **train) -> Config:
    """A published architecture with one recipe for all: 4 million tokens per update."""
    batch = dict(seq_len=seq_len, batch_size=2**22 // seq_len, grad_accum=4)
    return recipe(name, model, lr, warmup_steps=2000, keep=3, steps=100_000, eval_every=1000,
                  **batch, **train)


def llama3_8b() -> Config:
    """Llama 3 8B (Grattafiori et al. 2024, table 3)."""
    model = Model(vocab_size=128256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8,
                  d_head=128, d_ff=14336, rope_theta=500_000.0, norm_eps=1e-5)
    return large("llama3_8b", model, seq_len=8192, lr=3e-4)


def llama3_70b() -> Config:
    """Llama 3 70B (Grattafiori et al. 2024, table 3)."""
    model = Model(vocab_size=128256, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8,
                  d_head=128, d_ff=28672, rope_theta=500_000.0, norm_eps=1e-5)
    return large("llama3_70b", model, seq_len=8192, lr=1.5e-4)


def qwen3_0_6b() -> Config:
    """Qwen3 0.6B (Yang et al. 2025, table 1, and the config.json published with it)."""
    model = Model(vocab_size=151936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8,
                  d_head=128, d_ff=3072, rope_theta=1e6, qk_norm=True, tie_embeddings=True)
    return large("qwen3_0.6b", model, seq_len=4096, lr=4e-4)


def qwen3_30b_a3b() -> Config:
    """Qwen3 30B-A3B (Yang et al. 2025, table 2): 128 experts, 8 of them active."""
    model = Model(vocab_size=151936, d_model=2048, n_layers=48, n_heads=32, n_kv_heads=4,
                  d_head=128, rope_theta=1e6, qk_norm=True,
                  pattern="moe", n_experts=128, n_active=8, d_expert=768, norm_scores=True)
    return large("qwen3_30b_a3b", model, seq_len=4096, lr=3e-4, balance_loss=1e-3)


def deepseek_v3() -> Config:
    """DeepSeek-V3 (2024, section 4.2) without multi-token prediction: MLA, 3 dense layers, then moe
    layers with 256 experts (8 active, from 4 of 8 groups) and a shared expert."""
    model = Model(vocab_size=129280, d_model=7168, n_layers=61, attention="mla", n_heads=128,
                  d_head=128, q_rank=1536, kv_rank=512, d_rope=64, d_value=128,
                  d_ff=18432, prefix="dense*3", pattern="moe", n_experts=256, n_active=8,
                  n_shared=1, d_expert=2048, router="sigmoid", norm_scores=True, score_scale=2.5,
                  n_groups=8, n_active_groups=4, router_bias=True)
    return large("deepseek_v3", model, seq_len=4096, lr=2.2e-4, balance_loss=1e-4)


def jaxformer_1b() -> Config:
    """The model of JAXformer's published run: MLA, and 8 blocks of five dense layers and one moe
    layer with 16 experts (2 active) and 2 shared experts.  The recipe is ours.  JAXformer's shared
    experts are linear maps whose output is dropped; here they are complete experts."""
    model = Model(vocab_size=100277, d_model=768, n_layers=48, pattern="dense*5,moe",
                  attention="mla", n_heads=12, d_head=64, q_rank=128, kv_rank=128, d_rope=64,
                  d_value=64, d_ff=3072, activation="gelu_tanh", mlp_bias=True, norm_bias=True,
                  tie_embeddings=True, n_experts=16, n_active=2, n_shared=2, d_expert=3072,
                  router="sigmoid", norm_scores=True, router_bias=True)
    cfg = recipe("jaxformer_1b", model, lr=6e-4, seq_len=1024, batch_size=512, grad_accum=2,
                 balance_loss=0.01)
    return replace(cfg, mesh=Mesh(dp=-1, pp=2, tp=2))


# fmt: on
# The names that --config takes.
PRESETS = {
    "demo": demo,
    "tiny": tiny,
    "shakespeare_char": shakespeare_char,
    "jaxformer_1b": jaxformer_1b,
    "gpt2_124m": partial(gpt2, "gpt2_124m", 12, 768, 12),
    "gpt2_355m": partial(gpt2, "gpt2_355m", 24, 1024, 16),
    "gpt2_774m": partial(gpt2, "gpt2_774m", 36, 1280, 20),
    "gpt2_1.5b": partial(gpt2, "gpt2_1.5b", 48, 1600, 25),
    "llama_1b": llama_1b,
    "llama3_8b": llama3_8b,
    "llama3_70b": llama3_70b,
    "qwen3_0.6b": qwen3_0_6b,
    "qwen3_30b_a3b": qwen3_30b_a3b,
    "deepseek_v3": deepseek_v3,
}


# ---- what other modules share

END = "<|endoftext|>"  # the token that our tokenizers put after each document


def settings(cfg: Config) -> dict:
    """{"section.field": value} of all sections."""
    return {f"{s}.{name}": x for s in SECTIONS for name, x in vars(getattr(cfg, s)).items()}
