"""The transformer as one device runs it: the parameter table, the embedding and the logits, the
layers in order, and the loss of each token.  gradient.py has the gradient, generate.py decoding.

Dimension key (a suffix on every array's name spells its logical shape):
  A  accumulation steps   M  microbatches   B  sequences   L  sequence length   D  d_model
  V  vocabulary   N  layers
  E  experts   C  gate and up, or only up   F  hidden units

Mesh axes: dp (the batch; weights are stored sharded over it), pp (the layers; tokens are stored
sharded over it by microbatch), tp (heads, d_ff, vocabulary, and between the matmuls the sequence).
Inside shard_map the letters still name the whole dims; a sharded dim is only as long as this
device's part.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import layers
from architecture import Model, all_kinds, kinds_by_group, layer_kinds
from attention import Span, attention_of, full_row_span
from config import Config
from experts import moe, moe_table
from layers import accumulate_gradient, dropout, einsum, gather_rows, mark_varying, norm, norm_table
from pipeline import forward_pipeline
from utils import leaf_table, with_slices
from weights import Normal, Param, init_weights


def token_spec() -> P:
    """How tokens and targets, AMBL, are stored on the ambient mesh."""
    return P(None, "pp", with_slices("dp"), None)


# ---- the parameter table


NORM_NAMES = dict(
    before=("attn_norm", "mlp_norm"),
    after=("attn_post_norm", "mlp_post_norm"),
    both=("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm"),
)
"""model.norm_place: the names of a layer's norms."""


def layer_table(cfg: Config, kind: str) -> dict:
    """The weights of one layer of a kind."""
    mlp_or_moe = moe_table(cfg) if "moe" in kind else layers.mlp_table(cfg, cfg.model.d_ff)
    attention_table, _ = attention_of(cfg)
    table = attention_table(cfg) | mlp_or_moe
    for name in NORM_NAMES[cfg.model.norm_place]:
        table |= norm_table(cfg, name)
    return table


HEAD_STD = 0.25
"""Standard deviation of the initial logits.  The initial loss is above log(vocab_size) by half of
its square, 0.03."""


def ends_table(cfg: Config) -> dict:
    """The weights before and after the layers."""
    m = cfg.model
    D, V, L = m.d_model, m.vocab_rows, m.max_positions
    head = Normal(HEAD_STD * (m.mup_base_width or D) ** -0.5)
    embedding = head if m.tie_embeddings else Normal(1 / m.embedding_scale)
    table = dict(embed_VD=Param((V, D), P("tp", "dp"), embedding), **norm_table(cfg))
    if m.positions == "learned":
        table |= dict(position_LD=Param((L, D), P(None, "dp"), embedding))
    if not m.tie_embeddings:
        table |= dict(unembed_DV=Param((D, V), P("dp", "tp"), head))
    return table


def param_table(cfg: Config) -> dict:
    """All weights.  Layers of one kind are stacked along a leading dim, which is sharded over pp;
    those of the prefix are on every stage."""

    def stack(n: int, axis: str | None, p: Param) -> Param:
        return replace(p, shape=(n, *p.shape), spec=P(axis, *p.spec), is_stacked=True)

    def group(kinds: list[str], axis: str | None) -> dict:
        return {
            kind: jax.tree.map(partial(stack, kinds.count(kind), axis), layer_table(cfg, kind))
            for kind in sorted(set(kinds))
        }

    def without_dp(p: Param) -> Param:
        spec = P(*(None if axis == "dp" else axis for axis in p.spec))
        return p if p.stays_sharded else replace(p, spec=spec)

    kinds = kinds_by_group(cfg.model)
    table = dict(layers=group(kinds["layers"], "pp"), **ends_table(cfg))
    if cfg.model.prefix:
        table |= dict(prefix=group(kinds["prefix"], None))
    return jax.tree.map(without_dp, table) if cfg.mesh.fsdp == "none" else table


def param_specs(cfg: Config) -> dict:
    """The PartitionSpec of each weight."""
    return jax.tree.map(lambda p: p.spec, param_table(cfg))


def param_shapes(cfg: Config) -> dict:
    """The shape and dtype of each weight."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), param_table(cfg))


def init_params(cfg: Config) -> dict:
    """Initial weights, float32; the mesh does not change them."""
    return init_weights(param_table(cfg), cfg.run.seed)


def param_sizes(cfg: Config, active: bool = False) -> dict:
    """Number of parameters of each weight, by its path; active: those that one token uses, so
    n_active of n_experts routed experts.  Rows that pad the vocabulary do not count."""
    m, sizes = cfg.model, {}
    for name, p in leaf_table(param_table(cfg)).items():
        n = math.prod(p.shape)
        if name in ("embed_VD", "unembed_DV"):
            n = m.vocab_size * m.d_model
        if active and p.is_routed:
            n = n // m.n_experts * m.n_active
        sizes[name] = n
    return sizes


def param_count(cfg: Config, active: bool = False) -> int:
    """The sum of `param_sizes`."""
    return sum(param_sizes(cfg, active).values())


def only_looked_up(m: Model) -> set[str]:
    """The weights of which a token reads a row, and which are in no matmul."""
    return {"position_LD"} if m.tie_embeddings else {"position_LD", "embed_VD"}


def mean_keys(cfg: Config) -> float:
    """How many keys a query sees, the mean over a sequence and over the layers."""
    m, L = cfg.model, cfg.train.seq_len
    windows = [min(m.window, L) if "local" in kind else L for kind in all_kinds(m)]
    # Query i = 1 .. L sees min(i, n) keys; this is their mean.
    return sum(n - n * (n - 1) / (2 * L) for n in windows) / m.n_layers


def flops_per_token(cfg: Config) -> float:
    """Forward and backward FLOPs of one token (PaLM, appendix B, but with the causal mask).

    6 for each weight of a matmul that the token goes through, with the output head but without the
    embedding lookup; attention counts only the keys that a query sees.
    """
    m, table = cfg.model, leaf_table(param_table(cfg))
    lookups, sizes = only_looked_up(m), param_sizes(cfg, active=True).items()
    matmul_weights = sum(n for name, n in sizes if table[name].is_matrix and name not in lookups)
    head_widths = m.d_head + m.d_rope + (m.d_value or m.d_head)
    return 6 * (matmul_weights + m.n_heads * head_widths * m.n_layers * mean_keys(cfg))


def prepare_weights(params, cfg: Config, dtype) -> dict:
    """The weights as layers use them: matrices cast to dtype, and gathered over dp.  With
    mesh.fsdp=layer the layers' weights stay sharded, and each layer gathers its own.

    They are typed as different on every device, so that gradients are summed over devices once, in
    the transpose of this function.
    """

    def cast(x, p: Param):
        x = x + 1 if p.adds_one else x
        return x.astype(dtype) if p.is_matrix and not p.keep_float32 else x

    table = param_table(cfg)
    w = jax.tree.map(cast, params, table)
    gathered_later = ("layers", "prefix") if cfg.mesh.fsdp == "layer" else ()
    w |= {n: layers.gather_over_dp(x, table[n]) for n, x in w.items() if n not in gathered_later}
    return mark_varying(w)


def gather_layer(w, kind: str, cfg: Config) -> dict:
    """A layer's weights, whole over dp."""
    return layers.gather_over_dp(w, layer_table(cfg, kind)) if cfg.mesh.fsdp == "layer" else w


# ---- embedding, logits, cross entropy


def lookup(acc_VD, table_VD, row_BL):
    """(acc_VD, table_VD[row_BL]).  If acc_VD is None, table_VD gets its gradient as usual; else it
    is added to a sum, see `summed_lookup`."""
    if acc_VD is None:
        return None, table_VD[row_BL]
    return summed_lookup(acc_VD, table_VD, row_BL)


@jax.custom_vjp
def summed_lookup(acc_VD, table_VD, row_BL):
    """`lookup`, whose backward pass adds each row's gradient to a running sum.  acc_VD: the place
    of the sum in the forward pass, as acc in `accumulate_gradient`.

    The sum is float32: in bfloat16 it would stop growing at 256 times the size of a term, which a
    frequent token's gradient soon reaches.
    """
    return acc_VD, table_VD[row_BL]


def lookup_backward(row_BL, sum_and_grad):
    sum_VD, grad_BLD = sum_and_grad
    return sum_VD.at[row_BL].add(grad_BLD.astype(sum_VD.dtype)), None, None


summed_lookup.defvjp(lambda *args: (summed_lookup(*args), args[-1]), lookup_backward)


def embed(acc_VD, embed_VD, token_BL, tp_dim: int):
    """(acc_VD, x_BLD): a vocab-parallel `lookup`.

    Each tp shard looks up the tokens in its rows of the table; the sum over tp leaves each shard
    its part of the sequence (tp_dim 1) or of the rows (tp_dim 0).
    """
    token_BL = layers.sequences_to_rows(token_BL) if tp_dim == 1 else token_BL
    row_BL = token_BL - lax.axis_index("tp") * embed_VD.shape[0]
    is_here_BL = (row_BL >= 0) & (row_BL < embed_VD.shape[0])
    acc_VD, x_BLD = lookup(acc_VD, embed_VD, jnp.where(is_here_BL, row_BL, 0))
    return acc_VD, layers.scatter_rows(jnp.where(is_here_BL[..., None], x_BLD, 0))


def logits(x_BLD, params, cfg):
    """This tp shard's columns of the logits, float32, for the normed x of all tp shards.  Ids from
    vocab_size on get a logit of -1e30."""
    if cfg.model.tie_embeddings:
        logit_BLV = einsum("BLD,VD->BLV", x_BLD, params["embed_VD"], jnp.float32)
    else:
        logit_BLV = einsum("BLD,DV->BLV", x_BLD, params["unembed_DV"], jnp.float32)
    if base := cfg.model.mup_base_width:  # Yang et al. 2022, table 8
        logit_BLV *= base / cfg.model.d_model
    logit_BLV = layers.softcap(logit_BLV, cfg.model.logit_softcap)
    if cfg.model.vocab_size == cfg.model.vocab_rows:
        return logit_BLV
    V = logit_BLV.shape[-1]
    id_V = lax.axis_index("tp") * V + jnp.arange(V)
    # Added, because jnp.where costs another pass over the gradient (a fifth on a CPU).
    padding_V = jnp.where(id_V < cfg.model.vocab_size, 0, -1e30)
    return logit_BLV + padding_V


def split_chunks(x_BLD, target_BL, cfg: Config):
    """(x, target): [n, 1, tokens, D] and [n, 1, tokens], n chunks of at most train.loss_chunk
    tokens.  Padding has a target of -1."""
    n_tokens, D = target_BL.size, x_BLD.shape[-1]
    n = -(-n_tokens // cfg.train.loss_chunk)
    padding = (0, -n_tokens % n)
    x = jnp.pad(x_BLD.reshape(-1, D), (padding, (0, 0))).reshape(n, 1, -1, D)
    target = jnp.pad(target_BL.reshape(-1), padding, constant_values=-1).reshape(n, 1, -1)
    return x, target


def cross_entropy(x_BLD, target_BL, params, cfg):
    """(nll_BL, z_BL, is_top_BL): negative log likelihood and log-partition of each token, in nats,
    and whether no token is more likely, for the normed x of all tp shards.  No device holds a full
    row of logits."""
    logit_BLV = logits(x_BLD, params, cfg)
    max_BL = lax.pmax(lax.stop_gradient(logit_BLV).max(-1), "tp")
    z_BL = jnp.log(lax.psum(jnp.exp(logit_BLV - max_BL[..., None]).sum(-1), "tp")) + max_BL

    V = logit_BLV.shape[-1]
    col_BL = target_BL - lax.axis_index("tp") * V  # outside of 0 .. V-1 on the other tp shards
    # Not take_along_axis: its gradient is a scatter into another array of this size.
    target_logit_BL = jnp.where(col_BL[..., None] == jnp.arange(V), logit_BLV, 0).sum(-1)
    target_logit_BL = lax.psum(target_logit_BL, "tp")
    return z_BL - target_logit_BL, z_BL, target_logit_BL >= max_BL


# ---- one layer


def norm_if_there(x_BLD, w, name: str, cfg: Config):
    """`norm` where the layer has one of that name, elsewhere x."""
    return norm(x_BLD, w, name, cfg) if name in NORM_NAMES[cfg.model.norm_place] else x_BLD


def decoder_layer(kind, x_BLD, w, cfg, key, span: Span, cache):
    """(x_BLD, kv, statistics): attention and feed-forward, each added to the residual stream.

    kv: what a cache keeps of the tokens.  statistics: of the attention's scores and of a moe
    layer's routing, in training.
    """
    m = cfg.model
    # On what a layer adds to the residual stream (Dey et al. 2025, CompleteP with alpha 1).
    scale = m.mup_base_depth / m.n_layers if m.mup_base_depth else 1.0
    attn_key, mlp_key = (None, None) if key is None else jax.random.split(key)
    span = span._replace(window=m.window if "local" in kind else 0)
    _, attention = attention_of(cfg)
    y_BLD = norm_if_there(x_BLD, w, "attn_norm", cfg)
    y_BLD, kv, stats = attention(y_BLD, w, cfg, span, cache)
    y_BLD = norm_if_there(y_BLD, w, "attn_post_norm", cfg)
    x_BLD = x_BLD + scale * dropout(y_BLD, attn_key, span.row_B, cfg)
    y_BLD = norm_if_there(x_BLD, w, "mlp_norm", cfg)
    if "moe" in kind:
        y_BLD, moe_stats = moe(y_BLD, w, cfg, training=key is not None)
        stats |= moe_stats
    else:
        y_BLD = layers.mlp(y_BLD, w, cfg)
    y_BLD = norm_if_there(y_BLD, w, "mlp_post_norm", cfg)
    x_BLD = x_BLD + scale * dropout(y_BLD, mlp_key, span.row_B, cfg)
    return x_BLD, kv, stats


LAYER_INPUT = "layer input"
"""The name by which train.remat=offload finds the inputs of layers."""


def keep_products(primitive, *types, **params):
    """A policy of jax.checkpoint that keeps products with dense weights, and what cuDNN's attention
    returns.  Of a product that is summed over tp it keeps, instead of the product, this device's
    part of the sum.  What splash returns is computed again: if it were kept, llama_1b on v5p 2x2x2
    (dp 4, tp 2) would need 6 GiB more, and by XLA's count be no faster."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    is_cudnn = primitive.name == "dot_product_attention_fwd_wrapper"
    is_sum = primitive.name == "reduce_scatter" and "tp" in params["axis_name"]
    return is_cudnn or is_sum or dots(primitive, *types, **params)


def rematerialize(layer: Callable, cfg: Config) -> Callable:
    """The layer, with a backward pass that recomputes what train.remat says.

    Weights that the layer gathers are never kept, but gathered again; except with gloo, on CPUs.
    """
    remat, policies = cfg.train.remat, jax.checkpoint_policies

    def all_but_weights(primitive, *_, **params):
        return not (primitive.name == "all_gather" and "dp" in params["axis_name"])

    if remat in ("none", "attention"):
        if cfg.mesh.fsdp != "layer" or lax.axis_size("dp") == 1:
            return layer
        policy = all_but_weights
    elif remat == "offload":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = keep_products if remat == "dots" else None
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


# ---- layers in order


def block_of(kinds: list[str]) -> list[str]:
    """The shortest block of layers that `kinds` repeats: one layer, if all are of one kind."""
    blocks = (kinds[:n] for n in range(1, len(kinds) + 1))
    return next(block for block in blocks if block * (len(kinds) // len(block)) == kinds)


def split_layers(stack, dim: int) -> list:
    """[the weights of each layer], from a kind's stacked weights."""
    leaves, tree = jax.tree.flatten(stack)
    # lax.split, because its transpose is one concatenation.
    parts = ([y.squeeze(dim) for y in lax.split(x, (1,) * x.shape[dim], dim)] for x in leaves)
    return [tree.unflatten(layer) for layer in zip(*parts, strict=True)]


# What `arrange_layers` makes of a kind's stacked weights, {"in_CDF": [N, C, D, F], ...}:
#
#   layers of all kinds    of the kind in a block   result
#   at most train.unroll   any number               [{"in_CDF": [C, D, F], ...}, ...]
#   more                   1                        {"in_CDF": [N, C, D, F], ...}
#   more                   n > 1                    {"in_CDF": [blocks, n, C, D, F], ...}
#
# These are the layers of a device.  In an interleaved schedule they are those of a part, and a dim
# of parts comes first in each array.


def arrange_group(stacks: dict, pattern: str, cfg: Config, dim: int) -> dict:
    """`arrange_layers` for one group, {kind: stacked weights}, of a pattern."""
    if sum(stacked_shape(stack)[dim] for stack in stacks.values()) <= cfg.train.unroll:
        return {kind: split_layers(stack, dim) for kind, stack in stacks.items()}
    kinds = block_of(layer_kinds(pattern))

    def in_blocks(n, x):  # not reshaped without need: XLA copies what is reshaped for a loop
        return x.reshape(*x.shape[:dim], -1, n, *x.shape[dim + 1 :]) if n > 1 else x

    return {
        kind: jax.tree.map(partial(in_blocks, kinds.count(kind)), stack)
        for kind, stack in stacks.items()
    }


def arrange_layers(w: dict, cfg: Config, dim: int = 0) -> dict:
    """The weights, with the layers in the form that `scan_layers` takes.  dim: the dim of arrays in
    w["layers"] that counts layers; if there is one before it, that counts parts.

    Up to train.unroll layers (of this device, or of a part) become {kind: [the weights of each
    layer]}.  With lists a microbatch neither slices weights nor writes gradients into part of a
    sum: an update of a model of 5 million parameters took 0.93 times as long on a CPU.

    More layers stay stacked.  A kind that a block has n > 1 times becomes [blocks, n, ...] here: if
    each microbatch reshaped it, each would keep a copy until its backward pass (0.13 of 2.09 GiB
    for jaxformer_1b in two stages on v4:4x4x2, by XLA's count).
    """
    m = cfg.model
    w = w | dict(layers=arrange_group(w["layers"], m.pattern, cfg, dim))
    return w | dict(prefix=arrange_group(w["prefix"], m.prefix, cfg, 0)) if m.prefix else w


def scan_layers(layer: Callable, x, kinds: list[str], inputs: dict, first_layer, unroll: int):
    """(x, outputs): x through all layers, which are blocks of `kinds`, one block after the other.

    inputs, {kind: tree}: the weights and other inputs of each layer, in the form of
    `arrange_layers`, not in lists.  layer(kind, x, (input, n)) -> (x, output) runs layer number n,
    counted from first_layer; outputs, {kind: tree of [N, ...]}, are stacked.  Blocks are one scan,
    and so is a run of equal kinds in a block: the program does not grow with the number of layers.
    """
    kinds = block_of(kinds)
    repeated = [kind for kind in inputs if kinds.count(kind) > 1]

    def block(x, numbered_input):
        block_input, n = numbered_input
        outputs, n_done = {kind: [] for kind in repeated}, dict.fromkeys(repeated, 0)
        for kind, run in groupby(kinds):
            length = len(list(run))
            if kind in repeated:
                rows = slice(n_done[kind], n_done[kind] + length)
                run_input = jax.tree.map(itemgetter(rows), block_input[kind])
                numbers = n + jnp.arange(length)
                x, output = lax.scan(partial(layer, kind), x, (run_input, numbers), unroll=unroll)
                outputs[kind].append(output)
                n_done[kind] += length
            else:
                x, outputs[kind] = layer(kind, x, (block_input[kind], n))
            n += length
        for kind in repeated:
            outputs[kind] = jax.tree.map(lambda *x: jnp.concatenate(x), *outputs[kind])
        return x, outputs

    # A single block is a scan too, which reads the weights where they are: a slice of them would be
    # a copy, kept for each microbatch until its backward pass.
    times = jax.tree.leaves(inputs)[0].shape[0]
    numbers = first_layer + len(kinds) * jnp.arange(times)
    x, outputs = lax.scan(block, x, (inputs, numbers), unroll=unroll)
    repeated_outputs = {kind: outputs[kind] for kind in repeated}
    return x, outputs | jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), repeated_outputs)


def stacked_shape(w) -> tuple[int, ...]:
    """(parts, layers), or (layers,) without parts: the leading dims of a kind's weights, for which
    their names have no letters.  The layers may also be a list."""
    if isinstance(w, list):
        return *stacked_shape(w[0]), len(w)
    named = ((name.rpartition("_")[2], x) for name, x in w.items())
    return next(x.shape[: x.ndim - len(dims)] for dims, x in named if dims.isupper())


def count_layers(params) -> int:
    """Layers in {kind: weights} without a dim of parts."""
    return sum(math.prod(stacked_shape(w)) for w in params.values())


def fold_key(key, n):
    """The key of layer n, or of the embedding if n is n_layers, made from an update's key; None if
    that is None."""
    return None if key is None else jax.random.fold_in(key, n)


def apply_layers(
    params, kinds: list[str], first_layer, x_BLD, span: Span, cfg: Config, key=None, acc=None
):
    """(x_BLD, statistics, acc): x through the layers of params, blocks of `kinds`, arranged by
    `arrange_layers`.

    key: of this update, for dropout; None outside of training, when experts drop no tokens and
    routing makes no statistics.  acc: see `accumulate_gradient`; if None, params get the gradient.
    """

    def compute(kind, x_BLD, w, n):
        w = gather_layer(w, kind, cfg)
        x_BLD = checkpoint_name(x_BLD, LAYER_INPUT)
        x_BLD, _, stats = decoder_layer(kind, x_BLD, w, cfg, fold_key(key, n), span, None)
        return x_BLD, stats

    def layer(kind, x_BLD, w, n):
        return rematerialize(partial(compute, kind), cfg)(x_BLD, w, n)

    def layer_of_loop(kind, x_and_acc, numbered_input):
        (x_BLD, acc), ((w, index), n) = x_and_acc, numbered_input
        if acc is not None:
            kind_acc, w = accumulate_gradient(acc[kind], w, index)
            acc = acc | {kind: kind_acc}
        x_BLD, stats = layer(kind, x_BLD, w, n)
        return (x_BLD, acc), stats

    if any(isinstance(w, list) for w in params.values()):
        if acc is not None:
            acc, params = accumulate_gradient(acc, params, None)
        stats = {kind: [] for kind in params}
        for n in range(count_layers(params)):
            kind = kinds[n % len(kinds)]
            w = params[kind][len(stats[kind])]
            x_BLD, layer_stats = layer(kind, x_BLD, w, first_layer + n)
            stats[kind].append(layer_stats)
        stats = {kind: jax.tree.map(lambda *x: jnp.stack(x), *y) for kind, y in stats.items()}
    else:
        inputs = {kind: (w, tuple(jnp.indices(stacked_shape(w)))) for kind, w in params.items()}
        (x_BLD, acc), stats = scan_layers(
            layer_of_loop, (x_BLD, acc), kinds, inputs, first_layer, cfg.train.unroll
        )
    return x_BLD, mark_varying(stats), acc


def apply_embedding(params, token_BL, span: Span, cfg: Config, key=None, acc=None):
    """(x_BLD, acc) as `apply_layers`: the embedding, and that of positions."""
    acc = {} if acc is None else dict(acc)
    acc["embed_VD"], x_BLD = embed(acc.get("embed_VD"), params["embed_VD"], token_BL, span.tp_dim)
    if cfg.model.positions == "learned":
        name = "position_LD"
        position_BL = jnp.broadcast_to(span.position_BL, token_BL.shape)
        position_BL = layers.tp_part(position_BL, span.tp_dim)
        acc[name], position_BLD = lookup(acc.get(name), params[name], position_BL)
        x_BLD += position_BLD
    if cfg.model.scale_embedding:
        x_BLD *= cfg.model.embedding_scale
    x_BLD = dropout(x_BLD, fold_key(key, cfg.model.n_layers), span.row_B, cfg)
    return mark_varying(x_BLD), acc


def apply_front(params, token_BL, span: Span, cfg: Config, key=None, acc=None):
    """(x_BLD, statistics, acc) as `apply_layers`: the embedding, and the layers of the prefix.
    params: from `arrange_layers`."""
    x_BLD, acc = apply_embedding(params, token_BL, span, cfg, key, acc)
    prefix, stats = layer_kinds(cfg.model.prefix), {}
    if prefix:
        x_BLD, stats, acc["prefix"] = apply_layers(
            params["prefix"], prefix, 0, x_BLD, span, cfg, key, acc.get("prefix")
        )
    return x_BLD, stats, acc


# ---- the whole model, forward only


def hidden_states(params, token_MBL, cfg: Config):
    """The residual stream after the last layer, x_MBLD, for this device's microbatches."""
    params = arrange_layers(params, cfg)
    # Each stage needs the tokens of every microbatch, for the documents that they are in.
    all_MBL = lax.all_gather(token_MBL, "pp", axis=0, tiled=True)
    kinds, n_local, s = layer_kinds(cfg.model.pattern), token_MBL.shape[0], lax.axis_index("pp")

    def front(microbatch):
        token_BL, m = microbatch
        return apply_front(params, token_BL, full_row_span(all_MBL, m, cfg), cfg)[0]

    def stage(x_BLD, m, carry):
        span = full_row_span(all_MBL, m, cfg)
        # Without dropout, the layers' numbers do not matter.
        return apply_layers(params["layers"], kinds, 0, x_BLD, span, cfg)[0], carry

    x_MBLD = lax.map(front, (token_MBL, s * n_local + jnp.arange(n_local)))
    return forward_pipeline(stage, x_MBLD, None)[0]


def score_tokens(params, token_MBL, target_MBL, cfg: Config):
    """(nll_MBL, is_top_MBL): negative log likelihood (nats) of each target of this device, and
    whether no token is more likely, without a gradient."""
    params = prepare_weights(params, cfg, cfg.train.dtype)
    x_MBLD = hidden_states(params, token_MBL, cfg)

    def score(microbatch):
        x_BLD, target_BL = microbatch
        x_BLD = gather_rows(norm(x_BLD, params, "norm", cfg))
        target_BL = layers.sequences_to_rows(target_BL)
        chunks = split_chunks(x_BLD, target_BL, cfg)
        nll, _, is_top = lax.map(lambda chunk: cross_entropy(*chunk, params, cfg), chunks)

        def unchunk(x):
            x_BL = x.reshape(-1)[: target_BL.size].reshape(target_BL.shape)
            return layers.rows_to_sequences(x_BL)

        return unchunk(nll), unchunk(is_top)

    return lax.map(score, (x_MBLD, target_MBL))
