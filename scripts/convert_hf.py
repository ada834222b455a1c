"""Weights of Hugging Face transformers to a run, and of a run to what its from_pretrained loads.
Families: gpt2, llama, qwen3, qwen3_moe, mixtral, deepseek_v3.

    python scripts/convert_hf.py import --hf Qwen3-0.6B --run runs/qwen3
    python scripts/convert_hf.py export --run runs/qwen3 --hf exported --dtype bfloat16

One table of names serves both directions.  Nothing holds the whole model: an import reads a tensor
at a time, an export holds the file that it is writing.
"""

import json
import math
import os
import sys
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checks
import cli
import config
import files
from config import DATA, USAGE, Model, Problem, UserError


@dataclass(frozen=True)
class Import:
    """Make a run, ready to sample, to evaluate or to go on training, from a Hugging Face model."""

    hf: str
    """A directory with config.json and *.safetensors."""
    run: str
    """The run directory to make, local or gs://."""


@dataclass(frozen=True)
class Export:
    """Write the weights of a run as a Hugging Face model."""

    run: str
    """A run directory, local or gs://."""
    hf: str
    """The directory to write."""
    step: int = -1
    """The checkpoint to use; -1 is the newest."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the weights are rounded to."""
    shard_size: int = 5_000_000_000
    """Bytes in a file, at most, unless one tensor has more."""


def parse() -> Import | Export:
    commands = (
        Annotated[Import, tyro.conf.subcommand("import")]
        | Annotated[Export, tyro.conf.subcommand("export")]
    )
    args = tyro.cli(commands, use_underscores=True, description=__doc__)
    if isinstance(args, Export) and args.shard_size < 1:
        what = f"shard_size={args.shard_size} must be at least 1"
        raise UserError(USAGE, what, "leave --shard_size out")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an accelerator would do nothing here
    return args


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS = cli.quit_on_error(parse)

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax import lax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

import attention
import checkpoint
import layers
import model
import rundir
import train
import utils

# ---- names: where each tensor of a file belongs

# A line: the tensor, its dims, the weights.  Dims are those that our weights' names end in, in the
# file's order, with a space between the dims that the file has; what it holds side by side is
# separated by |.  In braces: dims of the weight at which the tensor is one entry.

LLAMA_ENDS = [
    ("model.embed_tokens.weight", "V D", "embed_VD"),
    ("model.norm.weight", "D", "norm_D"),
    ("lm_head.weight", "V D", "unembed_DV"),
]
LLAMA_LAYER = [
    ("input_layernorm.weight", "D", "attn_norm_D"),
    ("post_attention_layernorm.weight", "D", "mlp_norm_D"),
]
GQA = [
    ("self_attn.q_proj.weight", "HK D", "q_DHK"),
    ("self_attn.k_proj.weight", "GK D", "k_DGK"),
    ("self_attn.v_proj.weight", "GK D", "v_DGK"),
    ("self_attn.o_proj.weight", "D HK", "o_HKD"),
    ("self_attn.q_proj.bias", "HK", "q_bias_HK"),
    ("self_attn.k_proj.bias", "GK", "k_bias_GK"),
    ("self_attn.v_proj.bias", "GK", "v_bias_GK"),
    ("self_attn.o_proj.bias", "D", "o_bias_D"),
    ("self_attn.q_norm.weight", "K", "q_norm_K"),
    ("self_attn.k_norm.weight", "K", "k_norm_K"),
]
MLA = [
    ("self_attn.q_a_proj.weight", "J D", "q_down_DJ"),
    ("self_attn.q_a_proj.bias", "J", "q_down_bias_J"),
    ("self_attn.q_a_layernorm.weight", "J", "q_norm_J"),
    ("self_attn.kv_a_proj_with_mqa.weight", "I D|T D", "kv_down_DI k_rope_DT"),
    ("self_attn.kv_a_proj_with_mqa.bias", "I|T", "kv_down_bias_I k_rope_bias_T"),
    ("self_attn.kv_a_layernorm.weight", "I", "kv_norm_I"),
    ("self_attn.kv_b_proj.weight", "HK I|HW I", "k_IHK v_IHW"),
    ("self_attn.o_proj.weight", "D HW", "o_HWD"),
    ("self_attn.o_proj.bias", "D", "o_bias_D"),
]
GPT2_ENDS = [
    ("transformer.wte.weight", "V D", "embed_VD"),
    ("transformer.wpe.weight", "L D", "position_LD"),
    ("transformer.ln_f.weight", "D", "norm_D"),
    ("transformer.ln_f.bias", "D", "norm_bias_D"),
    ("lm_head.weight", "V D", "unembed_DV"),
]
GPT2_LAYER = [
    ("ln_1.weight", "D", "attn_norm_D"),
    ("ln_1.bias", "D", "attn_norm_bias_D"),
    ("attn.c_attn.weight", "D HK|D GK|D GK", "q_DHK k_DGK v_DGK"),
    ("attn.c_attn.bias", "HK|GK|GK", "q_bias_HK k_bias_GK v_bias_GK"),
    ("attn.c_proj.weight", "HK D", "o_HKD"),
    ("attn.c_proj.bias", "D", "o_bias_D"),
    ("ln_2.weight", "D", "mlp_norm_D"),
    ("ln_2.bias", "D", "mlp_norm_bias_D"),
    ("mlp.c_fc.weight", "D F", "in_CDF", dict(C=0)),
    ("mlp.c_fc.bias", "F", "in_bias_CF", dict(C=0)),
    ("mlp.c_proj.weight", "F D", "out_FD"),
    ("mlp.c_proj.bias", "D", "out_bias_D"),
]


def swiglu(name: str, into: str, out: str, **at) -> list:
    """A feed-forward whose three tensors {name} tells apart by gate, up and down."""
    return [
        (name.format("gate"), "F D", into, at | dict(C=0)),
        (name.format("up"), "F D", into, at | dict(C=1)),
        (name.format("down"), "D F", out, at),
    ]


def llama_layer(m: Model) -> list:
    """For all but gpt2; a layer has those lines whose weights its kind has."""
    dense = swiglu("mlp.{}_proj.weight", "in_CDF", "out_FD")
    biases = swiglu("mlp.{}_proj.bias", "in_bias_CF", "out_bias_D")
    dense += [(name, dims[0], *rest) for name, dims, *rest in biases]
    attention = GQA
    if m.attention == "mla":
        q = "self_attn.q_b_proj.weight" if m.q_rank else "self_attn.q_proj.weight"
        attention = [*MLA, (q, "HK J|HT J", "q_JHK q_rope_JHT")]
    return [*LLAMA_LAYER, *attention, *dense]


def qwen_layer(m: Model) -> list:
    moe = [
        ("mlp.gate.weight", "E D", "router_DE"),
        ("mlp.gate.e_score_correction_bias", "E", "router_bias_E"),
        *swiglu("mlp.shared_experts.{}_proj.weight", "shared_in_CDF", "shared_out_FD"),
    ]
    for e in range(m.n_experts):
        moe += swiglu(f"mlp.experts.{e}.{{}}_proj.weight", "in_EDCF", "out_EFD", E=e)
    return llama_layer(m) + moe


def mixtral_layer(m: Model) -> list:
    moe, names = [("block_sparse_moe.gate.weight", "E D", "router_DE")], dict(gate=1, up=3, down=2)
    for e in range(m.n_experts):
        for name, *rest in swiglu("{}", "in_EDCF", "out_EFD", E=e):
            moe.append((f"block_sparse_moe.experts.{e}.w{names[name]}.weight", *rest))
    return llama_layer(m) + moe


class Family(NamedTuple):
    """What transformers has under one model_type."""

    architecture: str
    ends: list
    layers: str
    """What the names of layer n's tensors begin with."""
    layer: Callable[[Model], list]
    keys: list
    """Of config.json: (key, field of Model, the value where it is absent)."""
    only: dict
    """Keys of which only one value can be represented."""
    fixed: dict
    """Fields of Model that are the same in all of the family."""


# fmt: off
KEYS = [
    ("vocab_size", "vocab_size"), ("hidden_size", "d_model"), ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"), ("rms_norm_eps", "norm_eps", 1e-6),
    ("tie_word_embeddings", "tie_embeddings", False),
]
GQA_KEYS = [*KEYS, ("num_key_value_heads", "n_kv_heads", None), ("head_dim", "d_head", None)]
BIAS, WINDOW = ("attention_bias", "attn_bias", False), ("sliding_window", "window", 0)
D_FF, ACTIVE = ("intermediate_size", "d_ff"), ("num_experts_per_tok", "n_active")
LLAMA, SILU = (LLAMA_ENDS, "model.layers.{}."), dict(hidden_act="silu")
FAMILIES = dict(
    gpt2=Family(
        "GPT2LMHeadModel", GPT2_ENDS, "transformer.h.{}.", lambda m: GPT2_LAYER,
        [("vocab_size", "vocab_size"), ("n_embd", "d_model"), ("n_layer", "n_layers"),
         ("n_head", "n_heads"), ("n_inner", "d_ff", None), ("n_positions", "max_positions", 1024),
         ("activation_function", "activation", "gelu_new"),
         ("layer_norm_epsilon", "norm_eps", 1e-5), ("tie_word_embeddings", "tie_embeddings", True)],
        dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
             add_cross_attention=False),
        dict(attn_bias=True, mlp_bias=True, norm="layer", norm_bias=True, positions="learned"),
    ),
    llama=Family(
        "LlamaForCausalLM", *LLAMA, llama_layer,
        [*GQA_KEYS, BIAS, D_FF, ("mlp_bias", "mlp_bias", False)], SILU, dict(),
    ),
    qwen3=Family(
        "Qwen3ForCausalLM", *LLAMA, llama_layer,
        [*GQA_KEYS, BIAS, D_FF, WINDOW], SILU, dict(qk_norm=True),
    ),
    qwen3_moe=Family(
        "Qwen3MoeForCausalLM", *LLAMA, qwen_layer,
        [*GQA_KEYS, BIAS, D_FF, WINDOW, ACTIVE, ("num_experts", "n_experts"),
         ("moe_intermediate_size", "d_expert"), ("norm_topk_prob", "norm_scores", False)],
        SILU, dict(qk_norm=True),
    ),
    mixtral=Family(
        "MixtralForCausalLM", *LLAMA, mixtral_layer,
        [*GQA_KEYS, WINDOW, ACTIVE, ("num_local_experts", "n_experts"),
         ("intermediate_size", "d_expert")],
        SILU, dict(norm_scores=True),
    ),
    deepseek_v3=Family(
        "DeepseekV3ForCausalLM", *LLAMA, qwen_layer,
        [*KEYS, BIAS, D_FF, ACTIVE, ("num_key_value_heads", "n_kv_heads"),
         ("q_lora_rank", "q_rank", 0), ("kv_lora_rank", "kv_rank"),
         ("qk_nope_head_dim", "d_head"), ("qk_rope_head_dim", "d_rope"), ("v_head_dim", "d_value"),
         ("n_routed_experts", "n_experts"), ("n_shared_experts", "n_shared", 1),
         ("moe_intermediate_size", "d_expert"), ("norm_topk_prob", "norm_scores", True),
         ("routed_scaling_factor", "score_scale", 2.5), ("n_group", "n_groups"),
         ("topk_group", "n_active_groups")],
        SILU | dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1),
        dict(attention="mla", router="sigmoid", router_bias=True),
    ),
)
# fmt: on
# Buffers of old files, that transformers ignores too.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class Part:
    """One weight's share of a tensor."""

    leaf: str
    """Its path in params."""
    at: tuple
    """The entry of the whole, stacked array."""
    dims: str
    """As the file orders them.."""
    free: str
    """..and as the weight does."""
    sizes: dict[str, int]


@dataclass(frozen=True)
class Piece:
    """A tensor of a file: the shares of one weight or more, side by side along dim `axis`."""

    name: str
    shape: tuple[int, ...]
    axis: int
    parts: tuple[Part, ...]
    turn: bool
    """Its rotary dims T pair 2i with 2i + 1 (DeepSeek), where ours pair i with i + T/2."""

    def share(self, x, j: int):
        """Part j of the tensor x, as it is in our weight."""
        lengths = [part.sizes[part.dims[self.axis]] for part in self.parts]
        part, start = self.parts[j], sum(lengths[:j])
        split = [part.sizes[dim] for dim in part.dims]
        split[self.axis] = sum(lengths)
        x = x.reshape(split).take(range(start, start + lengths[j]), self.axis)
        if self.turn and "T" in part.dims:
            x = x.take(pairs(part.sizes["T"]), part.dims.index("T"))
        return x.transpose([part.dims.index(dim) for dim in part.free])

    def join(self, shares: list):
        """The tensor, from what our weights hold of it."""
        xs = []
        for part, x in zip(self.parts, shares, strict=True):
            x = x.transpose([part.free.index(dim) for dim in part.dims])
            if self.turn and "T" in part.dims:
                x = x.take(np.argsort(pairs(part.sizes["T"])), part.dims.index("T"))
            xs.append(x)
        return np.concatenate(xs, self.axis).reshape(self.shape)


def pairs(T: int):
    """Where element i of our rotary dims is in DeepSeek's."""
    return np.arange(T).reshape(-1, 2).T.ravel()


def piece(name: str, layout: str, leaves: list[str], at: dict, group: str, shapes, cfg, turn):
    """The Piece of one line of the tables; group: what the weights' paths begin with."""
    parts, layouts = [], layout.split("|")
    for dims, leaf in zip(layouts, leaves, strict=True):
        letters, path = leaf.rsplit("_", 1)[1], f"{group}{leaf}"
        stacked = len(shapes[path]) - len(letters)
        sizes = dict(zip(letters, shapes[path][stacked:], strict=True))
        sizes |= dict(V=cfg.model.vocab_size) if "V" in sizes else {}
        entry = tuple(at.get(dim, slice(sizes[dim])) for dim in letters)
        free = "".join(dim for dim in letters if dim not in at)
        entry = (at["N"],) + entry if stacked else entry
        parts.append(Part(path, entry, dims.replace(" ", ""), free, sizes))
    ours = [part.dims for part in parts]
    axis = next((i for i, dims in enumerate(zip(*ours, strict=True)) if len(set(dims)) > 1), 0)
    lengths = dict(parts[0].sizes)
    lengths[ours[0][axis]] = sum(part.sizes[part.dims[axis]] for part in parts)
    shape = tuple(math.prod(lengths[dim] for dim in dims) for dims in layouts[0].split())
    return Piece(name, shape, axis, tuple(parts), turn)


def pieces(family: str, cfg: config.Config, turn: bool = True) -> list[Piece]:
    """Every tensor of the model's files.  turn: as in Piece."""
    own = FAMILIES[family]
    shapes = {name: p.shape for name, p in utils.leaf_table(model.param_table(cfg)).items()}

    def of(table, prefix, group, **at):
        for name, layout, leaves, *fixed in table:
            leaves = leaves.split()
            if all(f"{group}{leaf}" in shapes for leaf in leaves):
                where = dict(*fixed) | at
                yield piece(prefix + name, layout, leaves, where, group, shapes, cfg, turn)

    found, table = [*of(own.ends, "", "")], own.layer(cfg.model)
    for n, (group, kind, row) in enumerate(layers.layer_places(cfg)):
        found += of(table, own.layers.format(n), f"{group}/{kind}/", N=row)
    named = {part.leaf for piece in found for part in piece.parts}
    assert named == set(shapes), f"{family} has no name for {set(shapes) - named}"
    return found


# ---- config.json

# Keys that change nothing, or only training with transformers.
INERT = """
    model_type architectures transformers_version torch_dtype dtype use_cache initializer_range
    bos_token_id eos_token_id pad_token_id unk_token_id decoder_start_token_id _name_or_path
    attention_dropout attn_pdrop embd_pdrop resid_pdrop summary_type summary_use_proj
    summary_activation summary_first_dropout summary_proj_to_labels n_ctx task_specific_params
    reorder_and_upcast_attn pretraining_tp output_router_logits router_aux_loss_coef
    router_jitter_noise auto_map ep_size aux_loss_alpha seq_aux max_window_layers
    max_position_embeddings gradient_checkpointing return_dict output_attentions id2label label2id
    output_hidden_states num_nextn_predict_layers num_mtp_layers rope_interleave qk_head_dim
    _attn_implementation _attn_implementation_autoset _commit_hash original_max_position_embeddings
    """.split()  # noqa: SIM905
GELU = dict(gelu="gelu", gelu_new="gelu_tanh", gelu_pytorch_tanh="gelu_tanh", relu2="relu2")
REQUIRED = object()


class Keys:
    """The keys of a config.json as they are read, and what is wrong with them.  null is absent."""

    def __init__(self, hf: dict):
        self.left = {name: x for name, x in hf.items() if x is not None and name not in INERT}
        self.all, self.problems = hf, []

    def take(self, name: str, default=REQUIRED):
        x = self.left.pop(name, default)
        if x is REQUIRED:
            self.wrong(f"config.json has no {name}", "complete it from the model's publisher")
            return 1
        return x

    def must(self, name: str, x, value):
        """x of that name has this value, or there is a problem."""
        if x != value:
            fix = "convert a model of another architecture: model.py has no such part"
            self.wrong(f"config.json: {name}={x!r}, but only {value!r} can be converted", fix)

    def wrong(self, what: str, fix: str):
        self.problems.append(Problem(what, fix))


def shortest(kinds: list[str]) -> dict:
    """model.prefix and model.pattern that give this list."""

    def text(kinds):
        runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
        return ",".join(kind if n == 1 else f"{kind}*{n}" for kind, n in runs)

    n = len(kinds)
    splits = [(p + b, p) for p in range(n) for b in range(1, n - p + 1) if (n - p) % b == 0]
    for end, p in sorted(splits):
        block = kinds[p:end]
        if kinds[p:] == block * ((n - p) // len(block)):
            return dict(prefix=text(kinds[:p]), pattern=text(block))


RAMP = dict(llama3=("low_freq_factor", "high_freq_factor"), yarn=("beta_slow", "beta_fast"))


def read_rope(k: Keys, family: str) -> dict:
    """rope_* and yarn_* of Model, from transformers 5's rope_parameters or the older keys."""
    theta = k.take("rope_theta", 1e6 if family == "mixtral" else 1e4)
    new, old = k.take("rope_parameters", {}), k.take("rope_scaling", {})
    r = {name: x for name, x in (old or new).items() if x is not None}
    kind = [r.pop(name, None) for name in ("rope_type", "type")]
    kind = kind[0] or kind[1] or "default"
    ours = dict(rope_theta=r.pop("rope_theta", theta))
    turned = k.take("partial_rotary_factor", 1)
    k.must("partial_rotary_factor", r.pop("partial_rotary_factor", turned), 1)
    if kind not in ("default", *RAMP):
        k.must("rope_type", kind, f"default, {config.or_list(RAMP)}")
        return ours
    if kind != "default":
        longest = k.all.get("max_position_embeddings", 2048)
        original = r.pop("original_max_position_embeddings", longest)
        original = k.all.get("original_max_position_embeddings") or original
        low, high = (r.pop(name, 0) for name in RAMP[kind])
        factor = r.pop("factor", longest / original)
        ours |= dict(rope_scaling=kind, rope_factor=factor, rope_original=original)
        usual = (1, 4) if kind == "llama3" else (1, 32)
        ours |= dict(rope_low=low or usual[0], rope_high=high or usual[1])
    if kind == "yarn":
        mscales = dict(
            yarn_mscale=r.pop("mscale", 0), yarn_mscale_all_dim=r.pop("mscale_all_dim", 0)
        )
        if family == "deepseek_v3":  # the others do not scale the scores by it
            ours |= mscales
        else:
            k.must("mscale_all_dim", mscales["yarn_mscale_all_dim"], 0)
        usual = attention.yarn_magnitudes(replace(Model(), **ours))[0]
        given = r.pop("attention_factor", usual)
        k.must("attention_factor", given if abs(given - usual) > 1e-6 else usual, usual)
        k.must("truncate", r.pop("truncate", True), True)
    for name, x in r.items():
        k.must(f"rope_parameters.{name}", x, None)
    return ours


TYPES = ["full_attention", "sliding_attention"]


def read_kinds(k: Keys, family: str, N: int, window: int) -> list[str]:
    """The kind of every layer."""
    moe = range(N) if family == "mixtral" else []
    local = [bool(window)] * N
    if family == "deepseek_v3":
        moe = range(k.take("first_k_dense_replace"), N)
    if family == "qwen3_moe":
        every, dense = k.take("decoder_sparse_step", 1), k.take("mlp_only_layers", [])
        moe = [n for n in range(N) if n not in dense and (n + 1) % every == 0]
    if family.startswith("qwen3") and not k.take("use_sliding_window", False):
        local = [False] * N
    if family == "qwen3":
        first = k.all.get("max_window_layers", 28)
        types = [TYPES[at and n >= first] for n, at in enumerate(local)]
        types = k.take("layer_types", types)
        if len(types) != N or set(types) - set(TYPES):
            k.must("layer_types", types, f"{N} of {' and '.join(TYPES)}")
        elif TYPES[1] in types and not any(local):
            k.wrong("config.json: layer_types has sliding_attention, but no window", "correct it")
        local = [kind == TYPES[1] for kind in types]
    return [("moe" if n in moe else "dense") + "_local" * at for n, at in enumerate(local)]


def read_model(hf: dict) -> Model:
    """model of a config.json.  Raises UserError DATA with all that cannot be represented."""
    name = hf.get("model_type")
    if name not in FAMILIES:
        what = f"config.json: model_type={name!r} is none of {config.or_list(FAMILIES)}"
        raise UserError(DATA, what, "convert a model of one of these families")
    if hf.get("quantization_config"):
        what = f"config.json: quantization_config={hf['quantization_config']!r:.200} is not read"
        raise UserError(DATA, what, "convert the weights to bfloat16 first, and delete this key")
    k, family = Keys(hf), FAMILIES[name]
    if name == "qwen3_moe" and "num_local_experts" in k.left:  # transformers 5's name for it
        k.left["num_experts"] = k.left.pop("num_local_experts")
    try:
        ours = complete(k, name, {key: k.take(key, *x) for key, _, *x in family.keys})
        m = Model(**{field: typed(field, x, k) for field, x in ours.items()})
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        what = f"config.json cannot be read as {name}: {type(e).__name__}: {e}"
        raise UserError(DATA, what, "fetch it again") from None
    for key, x in k.left.items():
        if x is not False:
            what = f"config.json: {key}={x!r} is not known for {name}"
            k.wrong(what, "make sure that it changes nothing, and delete it from config.json")
    if k.problems:
        raise UserError(DATA, problems=k.problems)
    without = set(checks.unused_fields(m)) - checks.MAY_BE_UNUSED
    return replace(m, **{name: getattr(Model(), name) for name in without})


def complete(k: Keys, name: str, taken: dict) -> dict:
    """The fields of Model, from the values of its family's keys and from what else there is."""
    family = FAMILIES[name]
    ours = family.fixed | {field: taken[key] for key, field, *_ in family.keys}
    for key, value in family.only.items():
        k.must(key, k.take(key, value), value)
    H, D = ours["n_heads"], ours["d_model"]
    if name == "gpt2":
        act = ours["activation"]
        k.must("activation_function", act, act if act in GELU else config.or_list(GELU))
        k.must("n_embd % n_head", D % H, 0)
        ours |= dict(n_kv_heads=H, d_head=D // H, d_ff=ours["d_ff"] or 4 * D)
        return ours | dict(activation=GELU.get(act, "gelu"))
    if name == "deepseek_v3":
        k.must("num_key_value_heads", ours["n_kv_heads"], H)
        k.must("n_shared_experts", ours["n_shared"], max(1, ours["n_shared"]))
        k.take("head_dim", None)  # transformers writes d_rope there
    else:
        ours["n_kv_heads"] = ours["n_kv_heads"] or H
        ours["d_head"] = ours["d_head"] or (128 if name == "qwen3" else D // H)
    kinds = read_kinds(k, name, ours["n_layers"], ours.get("window", 0))
    ours |= read_rope(k, name) | shortest(kinds)
    usual = vars(Model())
    if not any("moe" in kind for kind in kinds):  # what has no effect, checks.check would refuse
        moe = ("n_", "d_expert", "router", "norm_scores", "score_")
        kept = ("n_layers", "n_heads", "n_kv_heads")
        ours |= {x: usual[x] for x in ours if x.startswith(moe) and x not in kept}
    if not any("local" in kind for kind in kinds):
        ours |= dict(window=0)
    return ours


def typed(field: str, x, k: Keys):
    """x with the type of that field of Model."""
    kind = type(getattr(Model(), field))
    if kind is float and type(x) is int:
        return float(x)
    if type(x) is not kind:
        k.wrong(f"config.json: model.{field} would be {x!r}, no {kind.__name__}", "correct it")
        return getattr(Model(), field)
    return x


def family_of(m: Model) -> str:
    """The one that may have it; whether it does, write_config finds out."""
    if m.attention == "mla":
        return "deepseek_v3"
    if m.norm == "layer" or m.positions == "learned":
        return "gpt2"
    if config.moe_layers(m):
        return "qwen3_moe" if m.qk_norm else "mixtral"
    return "qwen3" if m.qk_norm else "llama"


def meaning(m: Model) -> dict:
    """The fields that have an effect in m."""
    idle = {"pattern", "prefix", *checks.unused_fields(m)}
    if not m.yarn_mscale_all_dim:  # then yarn_mscale has none
        idle.add("yarn_mscale")
    rest = {name: x for name, x in asdict(m).items() if name not in idle}
    return rest | dict(layers=shortest(config.all_kinds(m)))


def write_config(cfg: config.Config, dtype: str, end: int | None) -> dict:
    """config.json of the model.  Raises UserError DATA where transformers has no such model."""
    m, name, kinds = cfg.model, family_of(cfg.model), config.all_kinds(cfg.model)
    family, longest = FAMILIES[name], cfg.train.seq_len
    hf = dict(model_type=name, architectures=[family.architecture], torch_dtype=dtype)
    hf |= dict(bos_token_id=None, eos_token_id=end) | family.only
    for key, field, *_ in family.keys:
        x = getattr(m, field)
        hf[key] = None if x == 0 and type(x) is int else x
    dense = [n for n, kind in enumerate(kinds) if "dense" in kind]
    local = ["local" in kind for kind in kinds]
    if name == "gpt2":
        named = {ours: theirs for theirs, ours in reversed(GELU.items())}
        hf |= dict(activation_function=named.get(m.activation, "gelu_new"))
    else:
        rope = dict(rope_type="default", rope_theta=m.rope_theta)
        if m.rope_scaling != "none":
            low, high = RAMP[m.rope_scaling]
            rope |= {"rope_type": m.rope_scaling, "factor": m.rope_factor}
            rope |= {"original_max_position_embeddings": m.rope_original}
            rope |= {low: m.rope_low, high: m.rope_high}
            longest = max(longest, int(m.rope_original * m.rope_factor))
        if m.rope_scaling == "yarn" and name == "deepseek_v3":
            rope |= dict(mscale=m.yarn_mscale, mscale_all_dim=m.yarn_mscale_all_dim)
        hf |= dict(rope_parameters=rope, rope_theta=m.rope_theta, max_position_embeddings=longest)
        if m.rope_scaling != "none":  # for transformers 4
            hf |= dict(rope_scaling=rope)
    if name.startswith("qwen3"):
        hf |= dict(use_sliding_window=any(local))
    if name == "qwen3":
        hf |= dict(layer_types=[TYPES[at] for at in local])
    if name == "qwen3_moe":
        hf |= dict(mlp_only_layers=dense, decoder_sparse_step=1)
    if name == "deepseek_v3":
        hf |= dict(first_k_dense_replace=len(dense), rope_interleave=True)
        hf |= dict(num_nextn_predict_layers=0, num_key_value_heads=m.n_heads)
        needed = ("n_routed_experts", "n_shared_experts", "moe_intermediate_size")
        hf |= {key: hf[key] or 1 for key in needed}
    mine, theirs = meaning(m), meaning(read_model(hf))
    if wrong := [n for n in mine | theirs if mine.get(n) != theirs.get(n)]:
        fix = f"export models that are all of {config.or_list(FAMILIES)}"
        so = f"but a {name} of transformers has"
        told = [f"model.{n} is {mine.get(n)}, {so} {theirs.get(n)}" for n in wrong]
        raise UserError(DATA, problems=[Problem(what, fix) for what in told])
    return hf


# ---- Hugging Face directories

DTYPES = dict(F32=np.float32, F16=np.float16, BF16=ml_dtypes.bfloat16)


class Tensor(NamedTuple):
    """Where one is, from the header of its file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self):
        """The whole, float32.  Its file is mapped for no longer than that."""
        with safe_open(self.file, "numpy") as f:
            return f.get_tensor(self.name).astype(np.float32, copy=False)


def read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it is {type(found).__name__}")
        return found
    except FileNotFoundError:
        what, fix = f"{path} does not exist", "give --hf the directory of a Hugging Face model"
    except (OSError, ValueError, RecursionError) as e:
        what, fix = f"{path} cannot be read: {str(e)[:200]}", "fetch it again"
    raise UserError(DATA, what, fix)


def shard_files(folder: Path) -> list[Path]:
    """The files that hold the model."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        named = read_json(index).get("weight_map")
        names = sorted(set(named.values())) if isinstance(named, dict) else []
        for name in names or [None]:
            if not isinstance(name, str) or Path(name).name != name or "\\" in name:
                what = f"{index} names {name!r}, which is no plain file name"
                raise UserError(DATA, what, "fetch the model again, from its publisher")
        files = [folder / name for name in names]
    else:
        files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = [p.name for end in ("bin", "pt", "pth") for p in sorted(folder.glob(f"*.{end}"))]
        what = f"{folder} holds no *.safetensors"
        what += f", only {pickled[0]}, and such files can run code" if pickled else ""
        raise UserError(DATA, what, "fetch the model's safetensors, or convert it to them")
    if lost := [file.name for file in files if not file.is_file()]:
        what = f"{folder} lacks {len(lost)} of {len(files)} files: {', '.join(lost[:10])}"
        raise UserError(DATA, what, "fetch them again")
    return files


def find_tensors(folder: Path, family: str) -> dict[str, Tensor]:
    """All of a directory, by the names that our tables have."""
    found = {}
    for file in shard_files(folder):
        try:
            with safe_open(file, "numpy") as f:
                for name in f.keys():  # noqa: SIM118, it is no dict
                    at = f.get_slice(name)
                    tensor = Tensor(file, name, tuple(at.get_shape()), at.get_dtype())
                    if family == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
                        name = f"transformer.{name}"  # GPT2Model's own names
                    if name in found:
                        what = f"{name} is in {found[name].file.name} and in {file.name}"
                        raise UserError(DATA, what, "keep one of the two")
                    found[name] = tensor
        except (SafetensorError, OSError) as e:
            raise UserError(DATA, f"{file} cannot be read: {e}", "fetch it again") from None
    return found


def check_tensors(found: dict[str, Tensor], wanted: list[Piece], hf: dict, cfg: config.Config):
    """Raise UserError DATA unless every tensor has its place and its shape."""
    shapes = {piece.name: piece.shape for piece in wanted}
    m, own = cfg.model, FAMILIES[hf["model_type"]]
    layers = own.layers.format("")[:-1]

    def later(name):
        n = name.removeprefix(layers).partition(".")[0]
        return name.startswith(layers) and n.isdigit() and int(n) >= m.n_layers

    extra = [name for name in found if name not in shapes and not name.endswith(BUFFERS)]
    if m.tie_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        embed = found.get(own.ends[0][0])
        if embed and not np.array_equal(embed.read(), found["lm_head.weight"].read()):
            extra.append("lm_head.weight (tie_word_embeddings, but it is not the embedding)")
    if hf.get("num_nextn_predict_layers"):
        mtp = [name for name in extra if later(name)]
        extra = [name for name in extra if not later(name)]
        if mtp:
            utils.warn(f"left out {len(mtp)} tensors that predict further tokens: {mtp[0]}, ..")
    problems = []

    def tell(names, what, fix):
        if names:
            more = f", and {len(names) - 10} more" if len(names) > 10 else ""
            problems.append(Problem(f"{len(names)} {what}: {', '.join(names[:10])}{more}", fix))

    scales = [name for name in extra if name.endswith(("_scale_inv", ".scales", ".qweight"))]
    coarse = [n for n, t in found.items() if n in shapes and t.dtype not in DTYPES]
    fix = "convert the model to bfloat16 first, with its publisher's script"
    tell(scales, "tensors are scales of quantized weights", fix)
    tell([f"{n} ({found[n].dtype})" for n in coarse], f"are none of {', '.join(DTYPES)}", fix)
    extra = [name for name in extra if name not in scales]
    fix = "convert a model that this family's transformers code describes as a whole"
    tell(extra, f"tensors are unknown for {hf['model_type']}", fix)
    missing = [name for name in shapes if name not in found]
    tell(missing, f"of {len(shapes)} tensors are missing", "fetch the model again")
    misshaped = [
        f"{name} {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in found and found[name].shape != shape
    ]
    tell(misshaped, "tensors have another shape than config.json says", "fetch config.json again")
    if problems:
        raise UserError(DATA, problems=problems)


# ---- arrays that are never whole in memory

CHUNK = 16 * 2**20  # bytes of what is compressed as one


class Streamed(np.ndarray):
    """Stands for an array in a tree that orbax saves: zeros that take no room, and in `blocks`
    what to write, [(entry, function that reads it)]."""

    blocks: list


def streamed(shape, dtype, blocks: list | None) -> Streamed:
    """blocks None: zeros, a chunk at a time, for what is not there at all is damage to orbax."""
    x = np.broadcast_to(np.zeros((), dtype), shape).view(Streamed)
    if blocks is None:
        chunk, blocks = chunk_of(shape, x.itemsize), []
        for starts in product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
            ends = [min(a + c, n) for a, c, n in zip(starts, chunk, shape, strict=True)]
            entry = tuple(map(slice, starts, ends))
            blocks.append((entry, partial(np.ndarray.__getitem__, x.view(np.ndarray), entry)))
    x.blocks = blocks
    return x


def chunk_of(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """What of such an array is compressed as one."""
    chunk = list(shape)
    for dim, n in enumerate(shape):
        room = CHUNK // (itemsize * math.prod(chunk[dim + 1 :]))
        chunk[dim] = max(1, min(n, room))
    return tuple(chunk)


class StreamHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of numpy arrays, which writes a Streamed block by block."""

    async def _open_and_write(self, value, tspec, ts_context):
        if not isinstance(value, Streamed):
            return await super()._open_and_write(value, tspec, ts_context)
        entry = value.blocks[0][0]
        size = [1 if isinstance(at, int) else at.stop - (at.start or 0) for at in entry]
        tspec["metadata"]["chunks"] = chunk_of(tuple(size), value.dtype.itemsize)
        array = ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context).result()
        before = None
        for entry, read in value.blocks:
            x = read()
            if before:
                before.result()
            before = array[entry].write(x)  # while the next one is read
        before.result()


@contextmanager
def streaming():
    """Let orbax save Streamed arrays."""
    registry, before = ocp.type_handlers, ocp.type_handlers.get_type_handler(np.ndarray)
    registry.register_type_handler(
        np.ndarray, StreamHandler(deepcopy_host_arrays=False), override=True
    )
    try:
        yield
    finally:
        registry.register_type_handler(np.ndarray, before, override=True)


BLOCK = 2**18  # elements; one size, so that one program is compiled


@jax.jit
def block_digest(bits, n, first, column, columns, stride):
    """(checkpoint.digest's sum over the first n elements, whether they are finite as float32).

    Element i is number first + (column + i) // columns * stride + (column + i) % columns of its
    array; all is modulo 2**32, as there.
    """
    i = lax.iota(jnp.uint32, BLOCK)
    row, column = jnp.divmod(column + i, columns)
    index, mine = first + row * stride + column, i < n
    seeds = (0x9E3779B9, 0x7F4A7C15)
    spread = [
        checkpoint.mix_bits(bits ^ checkpoint.mix_bits(index + np.uint32(seed))) for seed in seeds
    ]
    sums = [jnp.where(mine, x, 0).sum(dtype=jnp.uint32) for x in spread]
    infinite = np.uint32(0x7F800000)
    return jnp.stack(sums), ~(mine & (bits & infinite == infinite)).any()


def rows_of(x, first: int, steps: list[int]):
    """x as pieces of equal rows: (first, columns, stride, bits), as block_digest counts them.

    steps: how far apart in the whole array neighbours along each dim of x are.
    """
    dims, columns = [(n, step) for n, step in zip(x.shape, steps, strict=True) if n > 1], 1
    while dims and dims[-1][1] == columns:  # these follow each other without a gap
        columns *= dims.pop()[0]
    if len(dims) > 1:
        for i in range(len(x)):
            yield from rows_of(x[i], first + i * steps[0], steps[1:])
    else:
        columns, stride = (columns, dims[0][1]) if dims else (2**31, 2**31)
        yield first, columns, stride, x.reshape(-1).view(np.uint32)


def digest_of(blocks, shape) -> tuple[list[int], bool]:
    """(checkpoint.digest, whether all is finite) of an array that blocks, (entry, x), make up."""
    total, finite = np.zeros(2, np.uint32), True
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for entry, x in blocks:
        starts = [at if isinstance(at, int) else at.start or 0 for at in entry]
        first = sum(a * step for a, step in zip(starts, steps, strict=True))
        kept = [step for step, at in zip(steps, entry, strict=True) if not isinstance(at, int)]
        for start_row, columns, stride, bits in rows_of(x, first, kept):
            for start in range(0, bits.size, BLOCK):
                block = bits[start : start + BLOCK]
                row, column = divmod(start, columns)
                numbers = (block.size, start_row + row * stride, column, columns, stride)
                block = np.pad(block, (0, BLOCK - block.size))
                part, good = block_digest(block, *(np.uint32(x % 2**32) for x in numbers))
                total, finite = total + np.asarray(part), finite and bool(good)
    return total.tolist(), finite


@cache
def zero_digest(shape: tuple[int, ...]) -> list[int]:
    """Of an array of zeros."""
    whole = tuple(slice(n) for n in shape)
    return digest_of([(whole, np.broadcast_to(np.uint32(0), shape))], shape)[0]


# ---- import


def import_hf(hf_dir, run_dir):
    """Make a run directory from a Hugging Face one.  Raises UserError USAGE, DATA and STORAGE."""
    folder, run = Path(hf_dir), files.absolute_path(os.fspath(run_dir))
    refuse_taken(run, "--run")
    hf = read_json(folder / "config.json")
    cfg = run_config(hf, run)
    found = find_tensors(folder, hf["model_type"])
    wanted = pieces(hf["model_type"], cfg, bool(hf.get("rope_interleave", True)))
    check_tensors(found, wanted, hf, cfg)
    save(found, wanted, run, cfg)
    if (folder / "tokenizer.json").exists():
        files.write_whole(run / "tokenizer.json", (folder / "tokenizer.json").read_text())
    files.write_whole(run / "config.json", rundir.run_record(cfg, "", uuid.uuid4().hex[:12]))
    utils.say(f"{folder} -> {run}: {model.param_count(cfg):,} parameters")


def refuse_taken(path, flag: str):
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = f"{path} exists, and nothing is overwritten"
        raise UserError(USAGE, what, f"choose another {flag}, or move what is there away")


def run_config(hf: dict, run) -> config.Config:
    """The config of a run with that model.  Raises UserError DATA, or USAGE for its name."""
    m = read_model(hf)
    longest = m.max_positions or hf.get("max_position_embeddings") or 1024
    usual = config.Config(run=config.Run(name=run.name, dir=os.fspath(run.parent)))
    checks.check(usual)
    end = hf.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    end = end if isinstance(end, int) and 0 <= end < m.vocab_size else -1
    cfg = replace(usual, model=m, train=config.Train(seq_len=min(longest, 1024)))
    cfg = replace(cfg, data=config.Data(end_id=end), optim=config.Optim(lr=2e-5))
    try:
        return checks.check(cfg)
    except UserError as e:
        raise UserError(DATA, problems=e.problems) from None


def save(found: dict[str, Tensor], wanted: list[Piece], run, cfg: config.Config):
    """Write checkpoint 0.  All is read twice: the digests go into what orbax writes first."""
    state = train.checkpoint_items(jax.eval_shape(partial(train.make_state, cfg)))
    table = utils.leaf_table(state)
    fill, blocks = cfg.model.vocab_rows - cfg.model.vocab_size, {}

    def read(piece: Piece, j: int, bar):
        part = piece.parts[j]
        x = piece.share(found[piece.name].read(), j)
        if "V" in part.free:  # the rows that fill up
            x = np.pad(x, [(0, fill if dim == "V" else 0) for dim in part.free])
        bar.update(x.nbytes)
        return np.ascontiguousarray(x)

    for piece in wanted:
        for j, part in enumerate(piece.parts):
            name = f"params/{part.leaf}"
            whole = zip(part.at, table[name].shape, strict=True)
            entry = tuple(at if isinstance(at, int) else slice(n) for at, n in whole)
            blocks.setdefault(name, []).append((entry, partial(read, piece, j)))

    leaves, broken = {}, []
    with progress("read and verify", wanted) as bar:
        for name, x in table.items():
            digest, finite = zero_digest(x.shape), True
            if name in blocks:
                digest, finite = digest_of(((at, f(bar)) for at, f in blocks[name]), x.shape)
            leaves[name] = [list(x.shape), str(x.dtype), digest]
            broken += [] if finite else [name]
    if broken:
        what = f"{len(broken)} weights hold a NaN or infinity: {', '.join(broken[:10])}"
        raise UserError(DATA, what, "fetch the model again")

    must = train.fixed_settings(cfg, SimpleNamespace(fingerprint=None))
    must = {name: x if name.startswith("model.") else None for name, x in must.items()}
    meta = dict(format=checkpoint.Checkpoints.FORMAT, step=0, must=must, leaves=leaves)
    meta |= dict(checksum=checkpoint.meta_checksum(meta))
    store = checkpoint.Checkpoints(run)
    with progress("write", wanted) as bar, streaming(), store.storage_errors(0):

        def leaf(path, x):
            own = blocks.get(jax.tree_util.keystr(path, simple=True, separator="/"))
            own = own and [(at, partial(f, bar)) for at, f in own]
            return streamed(x.shape, x.dtype, own) if x.shape else np.zeros((), x.dtype)

        trees = jax.tree_util.tree_map_with_path(leaf, state)
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items["meta"] = ocp.args.JsonSave(meta)
        store.manager.save(0, args=ocp.args.Composite(**items))
        store.manager.wait_until_finished()
    store.manager.close()


def progress(what: str, wanted: list[Piece]) -> tqdm:
    total = 4 * sum(math.prod(piece.shape) for piece in wanted)
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, mininterval=1)


# ---- export


class Weights:
    """The weights of a checkpoint, read by the part that its chunks allow, the last one kept."""

    def __init__(self, path, shapes: dict):
        context = ocp.type_handlers.get_ts_context()
        self.arrays, self.held = {}, {}
        for name in shapes:
            dotted = name.replace("/", ".")
            info = ocp.type_handlers.ParamInfo(name=dotted, parent_dir=path, ts_context=context)
            spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True)
            self.arrays[name] = ts.open(ts.Spec(spec), open=True, context=context).result()

    def slab(self, name: str, entry: tuple) -> tuple[slice, ...]:
        """The smallest part that has the entry and begins and ends with chunks, in the first dims,
        where entries are numbers."""
        array = self.arrays[name]
        chunk, wide = array.chunk_layout.read_chunk.shape, []
        for at, c, n in zip(entry, chunk, array.shape, strict=True):
            start = at // c * c if isinstance(at, int) else 0
            wide.append(slice(start, min(start + c, n)) if isinstance(at, int) else slice(0, n))
        return tuple(wide)

    def read(self, name: str, entry: tuple):
        wide = self.slab(name, entry)
        if self.held.get(name, (None,))[0] != wide:
            self.held.pop(name, None)
            self.held[name] = wide, self.arrays[name][wide].read().result()
        inside = (
            at - s.start if isinstance(at, int) else at for at, s in zip(entry, wide, strict=True)
        )
        return self.held[name][1][tuple(inside)]

    def forget(self, but: list[str]):
        self.held = {name: x for name, x in self.held.items() if name in but}


def find_checkpoint(run, cfg: config.Config, step: int) -> tuple[int, dict]:
    """(its step, its meta), which fits cfg.  Raises UserError CHECKPOINT and STORAGE."""
    store = checkpoint.Checkpoints(run, keep=0)
    found = store.manager.all_steps()
    n = max(found, default=None) if step < 0 else step
    if n not in found:
        what = f"{store.path} has no checkpoint {'' if n is None else n}"
        what += f", only {config.or_list(found or ['none'])}"
        raise UserError(config.CHECKPOINT, what, "give --step one of those, or train it first")
    try:
        meta = store.read(n, meta=ocp.args.JsonRestore())["meta"]
        if not isinstance(meta, dict) or meta.get("checksum") != checkpoint.meta_checksum(meta):
            raise checkpoint.Damaged("its meta does not match its checksum")
    except checkpoint.Damaged as e:
        raise damaged(store.path / str(n), e) from None
    store.compare(n, meta, dict(params=jax.eval_shape(partial(model.init_params, cfg))))
    return n, meta


def damaged(path, why) -> UserError:
    fix = "give --step another one, or restore it from a copy"
    return UserError(config.CHECKPOINT, f"checkpoint {path} is damaged: {why}", fix)


def export_hf(run_dir, hf_dir, step=-1, dtype="float32", shard_size=5_000_000_000):
    """Write a run's weights as a Hugging Face directory.  Raises UserError USAGE, DATA, STORAGE,
    and CHECKPOINT."""
    run, folder = files.absolute_path(os.fspath(run_dir)), Path(hf_dir)
    if files.is_remote(hf_dir):
        raise UserError(USAGE, f"--hf {hf_dir} is remote", "give a local directory, and copy it")
    refuse_taken(folder, "--hf")
    cfg = cli.config_of_run(os.fspath(run), config.Mesh(1, 1, 1))
    tokenizer = run / "tokenizer.json"
    tokenizer = tokenizer.read_text() if tokenizer.exists() else ""
    end = cfg.data.end_id if cfg.data.end_id >= 0 else end_id(tokenizer)
    hf = write_config(cfg, dtype, end)
    step, meta = find_checkpoint(run, cfg, step)
    path = run / "checkpoints" / str(step) / "params"
    shapes = {name: p.shape for name, p in utils.leaf_table(model.param_table(cfg)).items()}
    wanted = pieces(hf["model_type"], cfg)
    weights = Weights(path, shapes)
    wanted.sort(key=partial(place, weights))
    with progress("read and verify", wanted) as bar:
        verify(weights, wanted, meta, path.parent, bar)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with progress("write", wanted) as bar:
            write_shards(weights, wanted, folder, dtype, shard_size, bar)
    except UserError:  # half a model is none, and would be in the way of the next try
        for file in folder.glob("*.safetensors"):
            file.unlink()
        raise
    if tokenizer:
        (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")
    utils.say(f"{run} after update {step} -> {folder}: {hf['model_type']}, {dtype}")


def end_id(tokenizer: str) -> int | None:
    """The id of the token that ends a document."""
    try:
        added = json.loads(tokenizer).get("added_tokens", []) if tokenizer else []
        return next((x["id"] for x in added if x["content"] == config.END), None)
    except (ValueError, AttributeError, KeyError, TypeError):
        return None


def place(weights: Weights, piece: Piece):
    """For sorting: the tensors of one slab follow each other."""
    part = piece.parts[0]
    slab = weights.slab(part.leaf, part.at)
    return part.leaf, [at.start for at in slab], [at for at in part.at if isinstance(at, int)]


def verify(weights: Weights, wanted: list[Piece], meta: dict, path, bar):
    """Raise UserError CHECKPOINT unless every weight is as it was saved."""
    slabs: dict[str, list] = {}
    for part in (part for piece in wanted for part in piece.parts):
        slab, seen = weights.slab(part.leaf, part.at), slabs.setdefault(part.leaf, [])
        if not seen or slab != seen[-1]:
            seen.append(slab)

    def blocks(name):
        for slab in slabs[name]:
            x = weights.arrays[name][slab].read().result()
            bar.update(x.nbytes)
            yield slab, x

    for name in slabs:
        try:
            digest, _ = digest_of(blocks(name), weights.arrays[name].shape)
        except (ValueError, OSError) as e:  # what tensorstore raises for damage
            raise damaged(path, str(e)[:200]) from None
        if digest != meta["leaves"][f"params/{name}"][2]:
            raise damaged(path, f"{name} is not as saved")


def write_shards(weights: Weights, wanted: list[Piece], folder: Path, dtype: str, limit: int, bar):
    """*.safetensors of at most `limit` bytes, and the index where there are several."""

    def kept(piece):  # what decides on experts is no weight, and small steps add up in it
        return "float32" if piece.name.endswith("e_score_correction_bias") else dtype

    shards, size = [[]], 0
    for piece in wanted:
        n = math.prod(piece.shape) * jnp.dtype(kept(piece)).itemsize
        if shards[-1] and size + n > limit:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += n
    index, total = {}, 0
    for i, shard in enumerate(shards):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for piece in shard:
            weights.forget(but=[part.leaf for part in piece.parts])
            x = piece.join([weights.read(part.leaf, part.at) for part in piece.parts])
            tensors[piece.name] = y = rounded(x, kept(piece), piece.name)
            index[piece.name], total = file, total + y.nbytes
            bar.update(4 * x.size)
        save_file(tensors, folder / file, metadata=dict(format="pt"))
    if len(shards) > 1:
        text = json.dumps(dict(metadata=dict(total_size=total), weight_map=index), indent=1)
        (folder / "model.safetensors.index.json").write_text(text + "\n")


def rounded(x, dtype: str, name: str):
    with np.errstate(over="ignore"):
        y = np.ascontiguousarray(x.astype(jnp.dtype(dtype)))
    if dtype == "float16" and not np.isfinite(y).all():
        what = f"{name} holds {np.abs(x).max():g}, above float16's largest, 65504"
        raise UserError(DATA, what, "use --dtype bfloat16 or float32")
    return y


def main(cfg: config.Config):
    if isinstance(ARGS, Import):
        import_hf(ARGS.hf, ARGS.run)
    else:
        export_hf(ARGS.run, ARGS.hf, ARGS.step, ARGS.dtype, ARGS.shard_size)


if __name__ == "__main__":
    utils.run_main(main, config.Config())
