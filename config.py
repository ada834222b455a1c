"""Every setting of a run: frozen sections and presets.  This is the file to edit.

python train.py --config NAME_OR_FILE [--section.field VALUE ...]
"""

import os
from dataclasses import dataclass, fields
from functools import partial, reduce
from typing import Literal, NamedTuple

import tyro

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


def or_list(values) -> str:
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last


def n_blocks(m: Model) -> int:
    """How often model.pattern repeats."""
    return (m.n_layers - len(layer_kinds(m.prefix))) // len(layer_kinds(m.pattern))


def all_kinds(m: Model) -> list[str]:
    """The kind of every layer."""
    return layer_kinds(m.prefix) + layer_kinds(m.pattern) * n_blocks(m)


def moe_layers(m: Model) -> list[int]:
    return [n for n, kind in enumerate(all_kinds(m)) if "moe" in kind]


def field_value(cfg: Config, name: str):
    return reduce(getattr, name.split("."), cfg)
