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
from functools import partial, reduce
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
    fsdp: Literal["layer", "step", "none"] = "layer"
    """How weights meet dp: each layer's gathered where it is used (ZeRO-3), all gathered once an
    update (ZeRO-2: more memory, less traffic), or whole on each dp rank (plain data parallel)."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe"
    """The pipeline's order: all forward, then all backward; each microbatch back as soon as it is
    through, so that memory does not grow with their number; or so with virtual_stages."""
    virtual_stages: int = 1
    """interleaved: parts of the model on each stage; the bubble shrinks by as much."""
    skip_bubbles: bool = True
    """In training a stage without a microbatch does nothing.  False: in a tick in which any stage
    works all do, as in lock step, and what the bubble costs can be measured on one machine."""
    experts: Literal["gather", "alltoall"] = "gather"
    """How a moe layer meets its experts: gather their weights over dp like all others, or send the
    tokens to the dp rank that holds them (expert parallelism; without train.capacity_factor there
    is room for all of them to come to one, in memory and in time)."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.dp, self.pp, self.tp


@dataclass(frozen=True)
class Model:
    vocab_size: int = 512
    """Token ids; at least the data's vocabulary.  The embedding has the next multiple of 128 rows,
    so that mesh.tp divides it; the rest is never predicted."""
    d_model: int = 64
    """Width of the residual stream."""
    n_layers: int = 4
    """Decoder layers, those of model.prefix included."""
    pattern: str = "dense"
    """The block of layers that repeats: kinds with counts, such as dense*5,moe.
    Kinds: dense, moe, and dense_local, moe_local, which attend within model.window."""
    prefix: str = ""
    """Layers before the first block, such as dense*3.  They run before the pipeline, as the
    embedding does."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output projection too."""
    logit_softcap: float = 0.0
    """Bound c of the logits, c * tanh(logit / c); 0 leaves them."""

    attention: str = "gqa"
    """A line of ATTENTION in model.py: gqa (grouped-query) or mla (multi-head latent)."""
    n_heads: int = 4
    """Query heads."""
    n_kv_heads: int = 4
    """Key and value heads of gqa; fewer than n_heads share them."""
    d_head: int = 16
    """Width of a head; of mla, the part of queries and keys without position."""
    q_rank: int = 0
    """mla: width of the queries' latent; 0 projects them directly."""
    kv_rank: int = 0
    """mla: width of the latent from which keys and values are made, and which is cached."""
    d_rope: int = 0
    """mla: width of the key that carries the position, shared by all heads."""
    d_value: int = 0
    """mla: width of a value head."""
    qk_norm: bool = False
    """gqa: RMSNorm over each query and key head before RoPE."""
    attn_bias: bool = False
    """Biases on attention's projections (in mla on those from and to the residual stream)."""
    attn_softcap: float = 0.0
    """Bound of the attention scores, as logit_softcap."""
    window: int = 0
    """Tokens that a local layer attends to, its own included."""

    positions: Literal["rope", "learned"] = "rope"
    """Rotate queries and keys, or add a learned vector to the embedding."""
    max_positions: int = 0
    """Rows of the learned positions."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    rope_scaling: Literal["none", "llama3", "yarn"] = "none"
    """How frequencies stretch beyond the length trained on first: Llama 3.1, or YaRN."""
    rope_factor: float = 1.0
    """By how much they stretch."""
    rope_original: int = 8192
    """The length trained on first."""
    rope_low: float = 1.0
    """Those with fewer turns over rope_original are stretched whole.."""
    rope_high: float = 4.0
    """..and those with more turns than this not at all (YaRN's usual value is 32)."""
    yarn_mscale: float = 0.0
    """YaRN's factor of log(rope_factor) for the rotated parts; 0 is not given."""
    yarn_mscale_all_dim: float = 0.0
    """The same for all dims of the scores, as DeepSeek does; 0 is not given."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_bias: bool = False
    """A bias beside each norm's gain."""
    norm_eps: float = 1e-6
    """Added to the mean square or variance inside a norm."""
    d_ff: int = 128
    """Hidden width of a dense feed-forward."""
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu2"] = "swiglu"
    """SwiGLU has a gate and so a third matrix; gelu is exact, gelu_tanh its approximation."""
    mlp_bias: bool = False
    """Biases on a dense feed-forward."""

    n_experts: int = 0
    """Routed experts of a moe layer."""
    n_active: int = 2
    """Routed experts that a token goes to."""
    n_shared: int = 0
    """Experts that every token goes to, beside the routed ones."""
    d_expert: int = 0
    """Hidden width of an expert."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's outputs into scores."""
    norm_scores: bool = False
    """Scores of a token's experts sum to one."""
    score_scale: float = 1.0
    """..and are multiplied by this."""
    n_groups: int = 1
    """Groups of experts, of which a token's experts come from the n_active_groups best."""
    n_active_groups: int = 1
    """A group is as good as the sum of its two best scores."""
    router_bias: bool = False
    """A bias per expert, for the choice only, moved by train.bias_rate against the load."""

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // 128) * 128


KINDS = ("dense", "moe", "dense_local", "moe_local")


def layer_kinds(pattern: str) -> list[str]:
    """["dense", "dense", "moe"] of "dense*2,moe".  Raises ValueError."""
    kinds = []
    for part in pattern.split(",") if pattern else []:
        kind, _, times = part.partition("*")
        if kind not in KINDS or (times and not (times.isdecimal() and 0 < int(times) <= 10_000)):
            raise ValueError(f"{part!r} is not one of {', '.join(KINDS)}, or one with *COUNT")
        kinds += [kind] * int(times or 1)
    return kinds


@dataclass(frozen=True)
class Data:
    train: str = "data/demo/train"
    """Directory of token shards to train on, local or gs://; or one nanoGPT .bin file."""
    val: str = "data/demo/val"
    """The held-out set, likewise."""
    document_mask: bool = False
    """No attention and no position across the end of a document."""
    end_id: int = -1
    """The token that ends a document, for document_mask and for sampling; -1 is the one in the
    data's manifest."""
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
    remat: Literal["none", "dots", "attention", "layer", "offload"] = "layer"
    """What the backward pass recomputes: nothing; all but matmuls; only attention; whole layers; or
    whole layers from inputs kept in host memory (with mesh.pp 1).  Besides, without a capacity, the
    hidden units of routed experts."""
    unroll: int = 1
    """Layers in a step of the loop over them: more compile time, fewer copies."""
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """The attention kernel: cuDNN's flash on NVIDIA, splash on TPU, XLA elsewhere and where those
    lack something; or always the one named."""
    loss_chunk: int = 4096
    """Tokens a device scores at a time: their logits, and no others, are in memory."""
    dropout: float = 0.0
    """Chance that an element of the embedding or of a branch's output is dropped."""
    profile: tuple[int, int] = (0, 0)
    """First update and number of updates to trace into profile/ of the run directory, with a ledger
    of where their time went; 0 0 is none."""
    z_loss: float = 0.0
    """Weight of the mean squared log-partition in the objective (PaLM, section 5; usual: 1e-4)."""
    balance_loss: float = 0.0
    """Weight of the sequence-wise balance loss of each moe layer (DeepSeek-V3, eq. 17 to 20)."""
    bias_rate: float = 0.001
    """What model.router_bias moves by in an update (DeepSeek-V3, section 2.1.2)."""
    capacity_factor: float = 0.0
    """0: no token is dropped.  Else an expert takes at most this times its even share of a
    sequence while training, and drops the rest; evaluation and sampling drop none."""


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
    hlo: bool = False
    """Write the compiled program of the update to step.hlo.txt in the run directory."""


# Booleans take a value (--model.qk_norm True), as config.json has it.
YesNo = tyro.conf.FlagConversionOff


@dataclass(frozen=True)
class Config:
    run: Run = Run()
    mesh: YesNo[Mesh] = Mesh()
    model: YesNo[Model] = Model()
    data: YesNo[Data] = Data()
    train: YesNo[Train] = Train()
    optim: Optim = Optim()
    checkpoint: Checkpoint = Checkpoint()
    log: YesNo[Log] = Log()
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


def gpt2(name: str, n_layers: int, d_model: int, n_heads: int) -> Config:
    """GPT-2 (Radford et al. 2019, table 2), on nanoGPT's recipe."""
    return Config(
        run=Run(name=name),
        model=Model(vocab_size=50257, d_model=d_model, n_layers=n_layers, n_heads=n_heads,
                    n_kv_heads=n_heads, d_head=64, d_ff=4 * d_model, tie_embeddings=True,
                    attn_bias=True, mlp_bias=True, norm="layer", norm_bias=True, norm_eps=1e-5,
                    activation="gelu_tanh", positions="learned", max_positions=1024),
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


def large(name: str, model: Model, seq_len: int, lr: float, **train) -> Config:
    """A published architecture on a common recipe: 4 million tokens an update."""
    return Config(
        run=Run(name=name),
        model=model,
        data=Data(train="data/train", val="data/val"),
        train=Train(seq_len=seq_len, batch_size=2**22 // seq_len, grad_accum=4, steps=100_000,
                    eval_every=1000, eval_batches=20, **train),
        optim=Optim(lr=lr, warmup_steps=2000),
        checkpoint=Checkpoint(every=500, keep=3),
    )


def llama3_8b() -> Config:
    """Llama 3 8B (Grattafiori et al. 2024, table 3)."""
    model = Model(vocab_size=128256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8,
                  d_head=128, d_ff=14336, rope_theta=500_000.0, norm_eps=1e-5)
    return large("llama3_8b", model, seq_len=8192, lr=3e-4)


def llama3_70b() -> Config:
    """Llama 3 70B (the same table)."""
    model = Model(vocab_size=128256, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8,
                  d_head=128, d_ff=28672, rope_theta=500_000.0, norm_eps=1e-5)
    return large("llama3_70b", model, seq_len=8192, lr=1.5e-4)


def qwen3_0_6b() -> Config:
    """Qwen3 0.6B (Yang et al. 2025, table 1, and the config.json published with it)."""
    model = Model(vocab_size=151936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8,
                  d_head=128, d_ff=3072, rope_theta=1e6, qk_norm=True, tie_embeddings=True)
    return large("qwen3_0.6b", model, seq_len=4096, lr=4e-4)


def qwen3_30b_a3b() -> Config:
    """Qwen3 30B-A3B: 128 experts, 8 active (there table 2)."""
    model = Model(vocab_size=151936, d_model=2048, n_layers=48, n_heads=32, n_kv_heads=4,
                  d_head=128, rope_theta=1e6, qk_norm=True,
                  pattern="moe", n_experts=128, n_active=8, d_expert=768, norm_scores=True)
    return large("qwen3_30b_a3b", model, seq_len=4096, lr=3e-4, balance_loss=1e-3)


def deepseek_v3() -> Config:
    """DeepSeek-V3 (2024, section 4.2), without its multi-token prediction: MLA, 3 dense layers,
    then 256 experts, 8 active from 4 of 8 groups, and a shared one."""
    model = Model(vocab_size=129280, d_model=7168, n_layers=61, attention="mla", n_heads=128,
                  d_head=128, q_rank=1536, kv_rank=512, d_rope=64, d_value=128,
                  d_ff=18432, prefix="dense*3", pattern="moe", n_experts=256, n_active=8,
                  n_shared=1, d_expert=2048, router="sigmoid", norm_scores=True, score_scale=2.5,
                  n_groups=8, n_active_groups=4, router_bias=True)
    return large("deepseek_v3", model, seq_len=4096, lr=2.2e-4, balance_loss=1e-4)


def jaxformer_1b() -> Config:
    """JAXformer's published run: 8 blocks of five dense layers and a MoE of 16 experts, 2 active
    and 2 shared, on MLA.  The recipe is ours, and shared experts are whole ones here: theirs are
    linear maps whose output is dropped."""
    return Config(
        run=Run(name="jaxformer_1b"),
        mesh=Mesh(dp=-1, pp=2, tp=2),
        model=Model(vocab_size=100277, d_model=768, n_layers=48, pattern="dense*5,moe",
                    attention="mla", n_heads=12, d_head=64, q_rank=128,
                    kv_rank=128, d_rope=64, d_value=64, d_ff=3072, activation="gelu_tanh",
                    mlp_bias=True, norm_bias=True, tie_embeddings=True, n_experts=16, n_active=2,
                    n_shared=2, d_expert=3072, router="sigmoid", norm_scores=True,
                    router_bias=True),
        data=Data(train="data/train", val="data/val"),
        train=Train(seq_len=1024, batch_size=512, grad_accum=2, steps=20_000, eval_every=500,
                    eval_batches=20, balance_loss=0.01),
        optim=Optim(lr=6e-4, warmup_steps=1000),
        checkpoint=Checkpoint(every=500),
    )

# fmt: on


PRESETS = {
    "demo": demo,
    "tiny": tiny,
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

# ---- checks


def listed(values) -> str:
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def n_blocks(m: Model) -> int:
    """How often model.pattern repeats."""
    return (m.n_layers - len(layer_kinds(m.prefix))) // len(layer_kinds(m.pattern))


def all_kinds(m: Model) -> list[str]:
    """The kind of every layer."""
    return layer_kinds(m.prefix) + layer_kinds(m.pattern) * n_blocks(m)


def moe_layers(m: Model) -> list[int]:
    return [n for n, kind in enumerate(all_kinds(m)) if "moe" in kind]


def value(cfg: Config, name: str):
    return reduce(getattr, name.split("."), cfg)


# fmt: off
BIG = 2**31 - 1
# Where -1 has a meaning of its own.
AUTO = {"mesh.dp", "mesh.pp", "mesh.tp", "train.eval_batches", "data.end_id"}
RANGES = {  # name: (low, high), both allowed
    **dict.fromkeys(sorted(AUTO), (1, BIG)),
    "data.end_id": (0, BIG),
    **{f"model.{name}": (1, BIG) for name in (
        "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff",
        "n_active", "n_groups", "n_active_groups", "rope_original")},
    **{f"model.{name}": (0, BIG) for name in (
        "q_rank", "kv_rank", "d_rope", "d_value", "window", "max_positions",
        "n_experts", "n_shared", "d_expert")},
    **{f"model.{name}": (0.0, 1e6) for name in (
        "logit_softcap", "attn_softcap", "yarn_mscale", "yarn_mscale_all_dim", "score_scale")},
    "model.rope_factor": (1.0, 1e6),
    "model.rope_low": (1e-6, 1e6),
    "model.rope_high": (1e-6, 1e6),
    **{f"train.{name}": (1, BIG) for name in (
        "seq_len", "batch_size", "grad_accum", "steps", "sample_tokens", "unroll", "loss_chunk")},
    "mesh.virtual_stages": (1, BIG),
    **{f"train.{name}": (0, BIG) for name in ("microbatches", "eval_every", "sample_every")},
    "run.seed": (0, 2**32 - 1),
    "model.rope_theta": (1.0, 1e12),
    "model.norm_eps": (1e-12, 0.1),
    "train.dropout": (0.0, 0.99),
    "train.z_loss": (0.0, 1.0),
    "train.balance_loss": (0.0, 10.0),
    "train.bias_rate": (0.0, 1.0),
    "train.capacity_factor": (0.0, 1000.0),
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
            limits = f"between {low} and {high}" if high < BIG or x > BIG else f"at least {low}"
            fix = f"set --{name} accordingly{', or to -1' if auto else ''}"
            yield Problem(f"{name}={x} must be {limits}", fix)


def axis_divides(cfg: Config) -> dict[str, dict[str, int]]:
    """What each mesh axis splits into equal parts."""
    m, t = cfg.model, cfg.train
    kinds, mla = all_kinds(m), m.attention == "mla"
    layers = {"model.n_layers": m.n_layers}
    if m.prefix or "," in m.pattern or "*" in m.pattern:
        layers = {"the number of model.pattern's blocks": n_blocks(m)}
    dp = {"model.d_model": m.d_model}
    tp = {"model.n_heads": m.n_heads, "train.seq_len": t.seq_len}
    if mla:
        dp |= {"model.kv_rank": m.kv_rank, "model.q_rank": m.q_rank}
    else:
        tp |= {"model.n_kv_heads": m.n_kv_heads}
    if any("dense" in kind for kind in kinds):
        tp |= {"model.d_ff": m.d_ff}
    if any("moe" in kind for kind in kinds):
        tp |= {"model.d_expert": m.d_expert}
        dp |= {"model.n_experts": m.n_experts} if cfg.mesh.experts == "alltoall" else {}
    pp = layers | {"train.microbatches": t.microbatches}
    return {"mesh.dp": dp, "mesh.pp": pp, "mesh.tp": tp}


def divide_problems(cfg: Config):
    """Each axis once, with all that it fails to divide; and the heads and batch likewise."""
    m, t = cfg.model, cfg.train
    for axis, parts in axis_divides(cfg).items():
        size, of = value(cfg, axis), {name: n for name, n in parts.items() if n > 0}
        wrong = [f"{name}={n}" for name, n in of.items() if size > 1 and n % size]
        if wrong:
            what = f"{axis}={size} must divide {' and '.join(wrong)}"
            yield Problem(what, f"set --{axis} to {listed(divisors(math.gcd(*of.values())))}")
    if m.attention == "gqa" and m.n_kv_heads > 0 and m.n_heads % m.n_kv_heads:
        what = f"model.n_kv_heads={m.n_kv_heads} must divide model.n_heads={m.n_heads}"
        yield Problem(what, f"set --model.n_kv_heads to {listed(divisors(m.n_heads))}")
    turned = "d_rope" if m.attention == "mla" else "d_head"
    if m.positions == "rope" and getattr(m, turned) % 2:
        what = f"model.{turned}={getattr(m, turned)} must be even: RoPE turns pairs of elements"
        yield Problem(what, f"set --model.{turned} to {getattr(m, turned) + 1}")
    dp, pp, _ = (max(1, size) for size in cfg.mesh.sizes)
    micro = t.microbatches or (pp if n_blocks(m) % pp == 0 else 1)  # a wrong pp is reported above
    parts = t.grad_accum * dp * micro
    if parts > 0 and t.batch_size % parts:
        names = f"train.grad_accum*mesh.dp*{'train.microbatches' if t.microbatches else 'mesh.pp'}"
        product = f"{t.grad_accum}*{dp}*{micro} = {parts}"
        what = f"{names} = {product} must divide train.batch_size={t.batch_size}"
        near = max(1, round(t.batch_size / parts)) * parts
        fix = f"set --train.batch_size {near}"
        yield Problem(what, fix + (", or --train.microbatches 0" if t.microbatches else ""))


def pipeline_problems(cfg: Config):
    """What mesh.schedule and train.remat ask of the pipeline."""
    mesh, pp = cfg.mesh, max(1, cfg.mesh.pp)
    v, blocks = mesh.virtual_stages, n_blocks(cfg.model)
    interleaved = mesh.schedule == "interleaved"
    if interleaved and (v < 2 or mesh.pp == 1):
        what = f"mesh.schedule=interleaved, but mesh.virtual_stages={v} and mesh.pp={mesh.pp}"
        yield Problem(what, "set both to 2 or more, or take --mesh.schedule 1f1b")
    elif v > 1 and not interleaved:
        what = f"mesh.virtual_stages={v} has no effect: mesh.schedule={mesh.schedule}"
        yield Problem(what, "set --mesh.schedule interleaved, or leave it out")
    elif v > 1 and blocks % pp == 0 and blocks % (pp * v):
        what = f"mesh.pp*mesh.virtual_stages = {pp}*{v} = {pp * v} must divide the {blocks}"
        what += " layers" if blocks == cfg.model.n_layers else " blocks of layers"
        some = divisors(blocks // pp)[1:]
        fix = f"set --mesh.virtual_stages to {listed(some)}, or " if some else ""
        yield Problem(what, fix + "take --mesh.schedule 1f1b")
    if cfg.train.remat == "offload" and pp > 1:
        what = f"train.remat=offload needs mesh.pp=1, and it is {pp}"
        yield Problem(what, "take --train.remat layer")


def pattern_problems(cfg: Config):
    """Layer kinds that do not parse or do not add up to model.n_layers."""
    m, usual = cfg.model, "give kinds with counts, such as dense or dense*5,moe"
    kinds = {}
    for name in ("prefix", "pattern"):
        try:
            kinds[name] = layer_kinds(getattr(m, name))
        except ValueError as e:
            yield Problem(f"model.{name}={getattr(m, name)!r}: {e}", usual)
    if kinds.get("pattern") == []:
        yield Problem("model.pattern is empty", usual)
    elif len(kinds) == 2:
        before, block = len(kinds["prefix"]), len(kinds["pattern"])
        left = m.n_layers - before
        if left <= 0 or left % block:
            what = (
                f"model.n_layers={m.n_layers} must be a multiple of {block}, model.pattern's layers"
            )
            what += f", and the {before} of model.prefix" if before else ""
            near = before + max(1, round(left / block)) * block
            yield Problem(what, f"set --model.n_layers {near}")


def idle(m: Model) -> dict[str, str]:
    """{field: why} of what has no effect in m."""
    kinds = all_kinds(m)
    moe, dense, local = (any(word in kind for kind in kinds) for word in ("moe", "dense", "local"))
    groups = "n_groups n_active_groups"
    experts = "n_experts n_active n_shared d_expert norm_scores score_scale router router_bias"
    stretch = "rope_factor rope_original rope_low rope_high"
    table = [
        ("n_kv_heads qk_norm", m.attention == "mla", "model.attention=mla"),
        ("q_rank kv_rank d_rope d_value", m.attention == "gqa", "model.attention=gqa"),
        ("rope_theta rope_scaling", m.positions == "learned", "model.positions=learned"),
        (stretch, m.rope_scaling == "none" or m.positions == "learned", "no RoPE is stretched"),
        ("yarn_mscale yarn_mscale_all_dim", m.rope_scaling != "yarn", "it is YaRN's"),
        ("max_positions", m.positions == "rope", "model.positions=rope"),
        ("window", not local, "no layer is dense_local or moe_local"),
        ("d_ff mlp_bias", not dense, "no layer is dense"),
        (f"{experts} {groups}", not moe, "no layer is moe"),
        ("n_active_groups", m.n_groups == 1, "model.n_groups=1"),
    ]
    return {name: why for names, so, why in table if so for name in names.split()}


# Sizes that a preset has set may stay when a flag makes them idle.
MAY_IDLE = {"n_kv_heads", "d_ff", "mlp_bias"}


def model_problems(cfg: Config):
    """Settings of the architecture that need each other, or would be without effect."""
    m, t, usual = cfg.model, cfg.train, Model()
    kinds = set(all_kinds(m))
    for name, why in idle(m).items():
        if (x := getattr(m, name)) != getattr(usual, name) and name not in MAY_IDLE:
            yield Problem(f"model.{name}={x} has no effect: {why}", f"leave --model.{name} out")

    def missing(names, why):
        for name in names:
            if not getattr(m, name):
                yield Problem(f"model.{name}=0, but {why}", f"set --model.{name} above 0")

    if any("moe" in kind for kind in kinds):
        yield from missing(["n_experts", "d_expert"], "there are moe layers")
        groups, best, E = max(1, m.n_groups), m.n_active_groups, m.n_experts
        if E % groups or best > groups:
            what = f"model.n_groups={groups} must divide model.n_experts={E}"
            what += f" and be at least model.n_active_groups={best}"
            yield Problem(what, f"set --model.n_groups to {listed(divisors(E))}")
        elif E and m.n_active > E // groups * best:
            what = f"model.n_active={m.n_active} is more than the {E // groups * best} experts"
            yield Problem(f"{what} of {best} of {groups} groups", "set a smaller --model.n_active")
    else:
        given = dict(balance_loss=t.balance_loss, capacity_factor=t.capacity_factor)
        given = {f"train.{name}": x for name, x in given.items()}
        given["mesh.experts"] = cfg.mesh.experts if cfg.mesh.experts != "gather" else None
        for name, x in given.items():
            if x:
                what = f"{name}={x} has no effect: no layer is moe"
                yield Problem(what, f"leave --{name} out")
    if any("local" in kind for kind in kinds):
        yield from missing(["window"], "there are local layers")
    if m.attention == "mla":
        yield from missing(["kv_rank", "d_rope", "d_value"], "model.attention=mla")
    if m.positions == "learned" and m.max_positions < t.seq_len:
        what = f"model.max_positions={m.max_positions} is below train.seq_len={t.seq_len}"
        yield Problem(what, f"set --train.seq_len to at most {m.max_positions}, or more rows")
    if cfg.data.end_id >= m.vocab_size:
        what = f"data.end_id={cfg.data.end_id} must be below model.vocab_size={m.vocab_size}"
        yield Problem(what, "set --data.end_id to a token id")
    if m.rope_scaling != "none" and m.rope_low >= m.rope_high:
        what = f"model.rope_low={m.rope_low} must be below model.rope_high={m.rope_high}"
        yield Problem(what, "set them to 1 and 4 (Llama 3.1), or to 1 and 32 (YaRN)")


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
    first, n = t.profile
    if t.profile != (0, 0) and not (0 < first < first + n <= t.steps + 1):
        what = f"train.profile={first} {n}: no {n} updates from {first} on are within"
        fix = "give the number of the first update and how many to trace, or 0 0"
        yield Problem(f"{what} train.steps={t.steps}", fix)
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
    found = [*range_problems(cfg)]
    if pattern := [*pattern_problems(cfg)]:  # without it the rest of the model cannot be told
        found += pattern
    else:
        found += [*divide_problems(cfg), *pipeline_problems(cfg), *model_problems(cfg)]
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
    cfg = replace(cfg, mesh=replace(cfg.mesh, dp=dp, pp=pp, tp=tp))
    if rows is not None:
        whole = max(1, rows // (dp * pp)) * dp * pp
        no_training = dict(grad_accum=1, microbatches=0, remat="layer")
        train = replace(cfg.train, batch_size=whole, **no_training)
        mesh = replace(cfg.mesh, schedule="gpipe", virtual_stages=1)
        cfg = replace(cfg, train=train, mesh=mesh)
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
                if isinstance(v, list) and isinstance(value(Config(), f"{section}.{name}"), tuple):
                    flags += [f"--{section}.{name}", *(f"{int(str(x))}" for x in v)]
                elif isinstance(v, (str, int, float, bool)):
                    flags.append(f"--{section}.{name}={v}")
                else:
                    raise ValueError(f"{section}.{name} is {v!r}")
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
    batch += ["--train.remat", "layer", "--train.attention", "auto"]  # of the trainer's platform
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
