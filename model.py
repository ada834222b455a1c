"""The transformer as one device runs it: the parameter table, the ends, the layers in order, and
the loss of each token.

DIMS
"""

import math
import zlib
from dataclasses import replace
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from attention import Span, attention_of, full_row_span
from config import Config, layer_kinds, n_blocks
from experts import moe, moe_table
from layers import (
    Param,
    add_to_row,
    dropout,
    einsum,
    gather_over_dp,
    gather_rows,
    layer_places,
    mark_varying,
    mlp,
    mlp_table,
    norm,
    norm_table,
    normal,
    rows_to_sequences,
    scatter_rows,
    sequences_to_rows,
    softcap,
    tp_part,
)
from pipeline import forward_pipeline
from utils import leaf_table

# AMBL: tokens and targets as they rest; in evaluation a stage embeds and scores its own.
TOKEN_SPEC = P(None, "pp", "dp", None)


LAYER_INPUT = "a layer's input"  # its name for train.remat


def layer_table(cfg: Config, kind: str) -> dict:
    """One layer of a kind: every weight's shape, where it rests, and how it starts."""
    mlp = moe_table(cfg) if "moe" in kind else mlp_table(cfg, cfg.model.d_ff)
    attention = attention_of(cfg)[0](cfg)
    return norm_table(cfg, "attn_norm") | attention | norm_table(cfg, "mlp_norm") | mlp


def ends_table(cfg: Config) -> dict:
    """What comes before and after the layers."""
    m = cfg.model
    D, V, L = m.d_model, m.vocab_rows, m.max_positions
    table = dict(embed_VD=Param((V, D), P("tp", "dp"), normal(D)), **norm_table(cfg))
    if m.positions == "learned":
        table |= dict(position_LD=Param((L, D), P(None, "dp"), normal(D)))
    if not m.tie_embeddings:
        table |= dict(unembed_DV=Param((D, V), P("dp", "tp"), normal(D)))
    return table


def param_table(cfg: Config) -> dict:
    """The whole model.  The layers of a kind are stacked on a leading axis, and that axis is the
    pipeline; those of the prefix belong to every stage."""

    def stack(n: int, axis: str | None, p: Param) -> Param:
        def init(key, shape):
            keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(n))
            return jax.vmap(lambda k: p.init(k, p.shape))(keys)

        return replace(p, shape=(n, *p.shape), spec=P(axis, *p.spec), init=init)

    def stacks(kinds: list[str], times: int, axis: str | None) -> dict:
        def of_kind(kind):
            n = times * kinds.count(kind)
            return jax.tree.map(partial(stack, n, axis), layer_table(cfg, kind))

        return {kind: of_kind(kind) for kind in sorted(set(kinds))}

    prefix, block = layer_kinds(cfg.model.prefix), layer_kinds(cfg.model.pattern)
    table = dict(layers=stacks(block, n_blocks(cfg.model), "pp"), **ends_table(cfg))
    table |= dict(prefix=stacks(prefix, 1, None)) if prefix else {}

    def whole(p: Param):
        spec = P(*(None if axis == "dp" else axis for axis in p.spec))
        return p if p.stays_sharded else replace(p, spec=spec)

    return jax.tree.map(whole, table) if cfg.mesh.fsdp == "none" else table


def param_sizes(cfg: Config, active: bool = False) -> dict:
    """Parameters of each weight, by its path; active: of routed experts only a token's share."""
    m, sizes = cfg.model, {}
    for name, p in leaf_table(param_table(cfg)).items():
        n = math.prod(p.shape)
        if name in ("embed_VD", "unembed_DV"):  # the rows that fill up are no parameters
            n = m.vocab_size * m.d_model
        if active and name.endswith(("in_EDCF", "out_EFD")):
            n = n // m.n_experts * m.n_active
        sizes[name] = n
    return sizes


def param_count(cfg: Config, active: bool = False) -> int:
    return sum(param_sizes(cfg, active).values())


def flops_per_token(cfg: Config) -> float:
    """Forward and backward FLOPs of one token (PaLM, appendix B, but with the causal mask).

    6 a matmul weight that the token meets, the head counted and the embedding lookup not; of
    attention only the keys that are seen.
    """
    m, L, table = cfg.model, cfg.train.seq_len, leaf_table(param_table(cfg))
    lookups = {"position_LD"} if m.tie_embeddings else {"position_LD", "embed_VD"}
    sizes = param_sizes(cfg, active=True).items()
    matmul = sum(n for name, n in sizes if table[name].decay and name not in lookups)
    keys = 0.0
    for _, kind, _ in layer_places(cfg):
        w = min(m.window, L) if "local" in kind else L
        keys += w - w * (w - 1) / (2 * L)  # the mean over a sequence
    return 6 * (matmul + m.n_heads * (m.d_head + m.d_rope + (m.d_value or m.d_head)) * keys)


def param_specs(cfg: Config) -> dict:
    return jax.tree.map(lambda p: p.spec, param_table(cfg))


def init_params(cfg: Config) -> dict:
    """Initial weights, float32.

    A key per parameter (by name) and layer, so no mesh changes them.
    """
    key = jax.random.key(cfg.run.seed)

    def init(path, p: Param):
        name_crc = zlib.crc32(jax.tree_util.keystr(path).encode())
        return p.init(jax.random.fold_in(key, name_crc), p.shape)

    return jax.tree_util.tree_map_with_path(init, param_table(cfg))


def prepare_weights(params, cfg: Config, dtype) -> dict:
    """The weights as the layers take them: matrices cast to dtype, and gathered over dp, but those
    of layers only if mesh.fsdp does not leave it to the layer.

    They are typed as different on every device, so that a gradient is summed over the devices
    once, in the transpose of this function.
    """

    def cast(x, p: Param):
        return x.astype(dtype) if p.decay and not p.keep_float32 else x

    table = param_table(cfg)
    w = jax.tree.map(cast, params, table)
    late = ("layers", "prefix") if cfg.mesh.fsdp == "layer" else ()
    early = {name: x for name, x in w.items() if name not in late}
    return mark_varying(w | gather_over_dp(early, {name: table[name] for name in early}))


def decoder_layer(kind, x_BLD, w, cfg, key, at: Span, memory):
    """(x_BLD, (keys and values where there is memory, a moe layer's statistics in training))."""
    attn_key, mlp_key = (None, None) if key is None else jax.random.split(key)
    at = at._replace(window=cfg.model.window if "local" in kind else 0)
    attention = attention_of(cfg)[1]
    y_BLD, kv = attention(norm(x_BLD, w, "attn_norm", cfg), w, cfg, at, memory)
    x_BLD = x_BLD + dropout(y_BLD, attn_key, at.row_B, cfg)
    y_BLD, stats = norm(x_BLD, w, "mlp_norm", cfg), None
    if "moe" in kind:
        y_BLD, stats = moe(y_BLD, w, cfg, training=key is not None)
    else:
        y_BLD = mlp(y_BLD, w, cfg)
    x_BLD = x_BLD + dropout(y_BLD, mlp_key, at.row_B, cfg)
    return x_BLD, (None if memory is None else kv, stats)


@jax.custom_vjp
def lookup(grads_VD, table_VD, row_BL):
    """(grads, table_VD[row_BL]); backward, what comes back to a row is added to that of grads.

    In float32: a bfloat16 sum no longer grows when it is 256 times what comes to it, which a
    frequent token's soon is.  See `tap` for the gradient of grads; None is for no gradient.
    """
    return grads_VD, table_VD[row_BL]


def lookup_backward(row_BL, of_both):
    of_grads_VD, g_BLD = of_both
    return of_grads_VD.at[row_BL].add(g_BLD.astype(of_grads_VD.dtype)), None, None


lookup.defvjp(lambda grads, table, row: (lookup(grads, table, row), row), lookup_backward)


def embed(grads_VD, embed_VD, token_BL, split: int):
    """(grads, x): vocab-parallel `lookup`: each tp shard answers for its own rows; the sum leaves
    each a piece of the sequence (split 1) or of the rows (0)."""
    token_BL = sequences_to_rows(token_BL) if split else token_BL
    row_BL = token_BL - lax.axis_index("tp") * embed_VD.shape[0]
    mine_BL = (row_BL >= 0) & (row_BL < embed_VD.shape[0])
    grads_VD, x_BLD = lookup(grads_VD, embed_VD, jnp.where(mine_BL, row_BL, 0))
    return grads_VD, scatter_rows(jnp.where(mine_BL[..., None], x_BLD, 0))


def logits(x_BLD, ends, cfg):
    """This tp shard's columns of the logits, float32, of all tp shards' x after the last norm; ids
    from vocab_size on are impossible."""
    tied = cfg.model.tie_embeddings
    sums, w = ("BLD,VD->BLV", ends["embed_VD"]) if tied else ("BLD,DV->BLV", ends["unembed_DV"])
    logit_BLV = einsum(sums, x_BLD, w, jnp.float32)
    V = logit_BLV.shape[-1]
    id_V = lax.axis_index("tp") * V + jnp.arange(V)
    # Added, not chosen: a choice costs another pass in the backward direction (a fifth on a CPU).
    never_V = jnp.where(id_V < cfg.model.vocab_size, 0, -1e30)
    return softcap(logit_BLV, cfg.model.logit_softcap) + never_V


def cross_entropy(x_BLD, target_BL, ends, cfg):
    """Negative log likelihood and log-partition of each token, in nats, from all tp shards' x after
    the last norm; no device holds a full row of logits."""
    logit_BLV = logits(x_BLD, ends, cfg)
    top_BL = lax.pmax(lax.stop_gradient(logit_BLV).max(-1), "tp")
    z_BL = jnp.log(lax.psum(jnp.exp(logit_BLV - top_BL[..., None]).sum(-1), "tp")) + top_BL

    V = logit_BLV.shape[-1]
    col_BL = target_BL - lax.axis_index("tp") * V  # of another shard: none of these
    # Not picked by index, whose gradient would be scattered into another array of that size.
    hit_BL = jnp.where(col_BL[..., None] == jnp.arange(V), logit_BLV, 0).sum(-1)
    return z_BL - lax.psum(hit_BL, "tp"), z_BL


def rematerialize(layer, cfg: Config):
    """layer, but its backward pass recomputes what train.remat says.

    Weights that the layer itself gathers are gathered again, not kept.
    """
    kept, policies = cfg.train.remat, jax.checkpoint_policies

    def all_but_weights(primitive, *_, **params):
        return not (primitive.name == "all_gather" and "dp" in params["axis_name"])

    if kept in ("none", "attention"):
        if cfg.mesh.fsdp != "layer":
            return layer
        policy = all_but_weights
    elif kept == "offload":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.dots_with_no_batch_dims_saveable if kept == "dots" else None
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def kind_runs(kinds: list[str]) -> list[tuple[str, int, int]]:
    """(kind, start, stop) of each run of one kind, counted among the layers of that kind."""
    found, seen = [], dict.fromkeys(kinds, 0)
    for kind, run in groupby(kinds):
        start = seen[kind]
        seen[kind] += len(list(run))
        found.append((kind, start, seen[kind]))
    return found


def scan_layers(x, kinds: list[str], params, own, first, layer, unroll: int):
    """Repeat the block of `kinds` over params, {kind: its layers' weights, [N, ...]}.

    layer(kind, x, w, n, own) -> (x, out) runs layer number n; numbers count from `first`.  own and
    the outs, stacked, have the form of params.  Blocks are one scan, and so are the runs of a kind
    in them: the program does not grow with their number.
    """
    kinds = kinds[:1] if len(set(kinds)) == 1 else kinds
    times = count_layers(params) // len(kinds)
    single = {kind: kinds.count(kind) == 1 for kind in params}

    def split(kind, tree):
        """[N, ...] by block; a kind that a block has once is as it was, since XLA copies what is
        reshaped on its way into a loop."""
        if single[kind]:
            return tree
        return jax.tree.map(lambda x: x.reshape(times, -1, *x.shape[1:]), tree)

    def join(kind, tree):
        return tree if single[kind] else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def one_run(kind, x, parts, n, start, stop):
        w, own = jax.tree.map(lambda x: x[start:stop], parts)
        numbers = n + jnp.arange(stop - start)
        return lax.scan(lambda x, wn: layer(kind, x, *wn), x, (w, numbers, own), unroll=unroll)

    def one_block(x, parts):
        blocks, n = parts
        outs = {kind: [] for kind in params}
        for kind, start, stop in kind_runs(kinds):
            if single[kind]:
                w, own = blocks[kind]
                x, out = layer(kind, x, w, n, own)
            else:
                x, out = one_run(kind, x, blocks[kind], n, start, stop)
            outs[kind].append(out)
            n += stop - start
        for kind, out in outs.items():
            outs[kind] = (
                out[0] if single[kind] else jax.tree.map(lambda *x: jnp.concatenate(x), *out)
            )
        return x, outs

    blocks = {kind: split(kind, (params[kind], own[kind])) for kind in params}
    numbers = first + len(kinds) * jnp.arange(times)
    x, outs = lax.scan(one_block, x, (blocks, numbers), unroll=unroll)
    return x, {kind: join(kind, out) for kind, out in outs.items()}


def count_layers(params) -> int:
    """Layers in {kind: weights}."""
    return sum(w["attn_norm_D"].shape[0] for w in params.values())


def fold_key(key, n):
    return None if key is None else jax.random.fold_in(key, n)


@jax.custom_vjp
def tap_gradient(grads, w, row):
    """(grads, w) as they are; backward, w's gradient is added to that row of grads' own.

    Handed on from layer to layer, the gradient of grads is a sum that grows in place (interleaved,
    in a copy of a part).  Otherwise a loop stacks the layers' gradients, and they are added to the
    sum afterwards: 0.18 GiB more for llama_1b with 1f1b on v5p 2x2x2, one row a microbatch, and 5 %
    more cycles by XLA's count.
    """
    return grads, w


def tap_gradient_backward(row, of_both):
    return jax.tree.map(partial(add_to_row, row=row), *of_both), None, None


tap_gradient.defvjp(lambda grads, w, row: ((grads, w), row), tap_gradient_backward)


def apply_layers(
    params, kinds: list[str], first, x_BLD, at: Span, cfg: Config, key=None, memory=None, grads=None
):
    """(x_BLD, outs, grads): x through some of the layers, numbered from `first`.

    outs, in the form of params: with memory, what each layer remembers now; with a key, in
    training, the sums of moe layers' statistics.  grads: the float32 sum that the gradient of
    params is added to, see `tap`; None leaves it to params.
    """

    def layer(kind, x_BLD, w, n, memory):
        if cfg.mesh.fsdp == "layer":
            w = gather_over_dp(w, layer_table(cfg, kind))
        return decoder_layer(
            kind, checkpoint_name(x_BLD, LAYER_INPUT), w, cfg, fold_key(key, n), at, memory
        )

    def one(kind, state, w, n, own):
        (x_BLD, grads), (row, memory) = state, own
        if grads is not None:
            of_kind, w = tap_gradient(grads[kind], w, row)
            grads = grads | {kind: of_kind}
        x_BLD, out = rematerialize(partial(layer, kind), cfg)(x_BLD, w, n, memory)
        return (x_BLD, grads), out

    own = {k: (jnp.arange(count_layers({k: w})), memory and memory[k]) for k, w in params.items()}
    state = x_BLD, grads
    (x_BLD, grads), outs = scan_layers(state, kinds, params, own, first, one, cfg.train.unroll)
    return x_BLD, mark_varying({kind: out[memory is None] for kind, out in outs.items()}), grads


def apply_front(params, token_BL, at: Span, cfg: Config, key=None, memory=None, grads=None):
    """The embedding, and the layers of the prefix: what `stack` returns, of both."""
    grads = dict(grads or {})
    pair = grads.get("embed_VD"), params["embed_VD"]
    grads["embed_VD"], x_BLD = embed(*pair, token_BL, at.split)
    if cfg.model.positions == "learned":
        position_BL = jnp.broadcast_to(at.position_BL, token_BL.shape)
        pair = grads.get("position_LD"), params["position_LD"]
        grads["position_LD"], position_BLD = lookup(*pair, tp_part(position_BL, at.split))
        x_BLD += position_BLD
    x_BLD = mark_varying(dropout(x_BLD, fold_key(key, cfg.model.n_layers), at.row_B, cfg))
    prefix = layer_kinds(cfg.model.prefix)
    if not prefix:
        return x_BLD, None, grads
    args = x_BLD, at, cfg, key, memory, grads.get("prefix")
    x_BLD, outs, grads["prefix"] = apply_layers(params["prefix"], prefix, 0, *args)
    return x_BLD, outs, grads


def hidden_states(params, token_MBL, span, cfg: Config, memory=None):
    """(x_MBLD, memory): the residual stream after the last layer, for this device's microbatches.

    span(m): the Span of microbatch m.  memory: what the layers remember, "layers" and "prefix" of
    the form of params, [microbatch, N, ...]; or None.
    """
    prefix, kinds = layer_kinds(cfg.model.prefix), layer_kinds(cfg.model.pattern)
    slots, s, memory = token_MBL.shape[0], lax.axis_index("pp"), memory or {}

    def start(parts):
        token_BL, m, own = parts
        return apply_front(params, token_BL, span(m), cfg, memory=own)[:2]

    def stage(x_BLD, m, carry):
        first = len(prefix) + s * count_layers(params["layers"])
        own = jax.tree.map(lambda x: x[m], carry)
        x_BLD, new, _ = apply_layers(
            params["layers"], kinds, first, x_BLD, span(m), cfg, memory=own
        )
        if carry is None:
            return x_BLD, None
        return x_BLD, jax.tree.map(lambda x, new: x.at[m].set(new), carry, new)

    parts = token_MBL, s * slots + jnp.arange(slots), memory.get("prefix")
    x_MBLD, prefix_memory = lax.map(start, parts)
    x_MBLD, layers_memory = forward_pipeline(stage, x_MBLD, memory.get("layers"))
    return x_MBLD, dict(layers=layers_memory) | (dict(prefix=prefix_memory) if prefix else {})


def split_chunks(x, cfg: Config, fill=0):
    """[tokens, ...] as [n, 1, tokens of a chunk, ...], at most train.loss_chunk each, filled up."""
    n = -(-x.shape[0] // cfg.train.loss_chunk)
    size = -(-x.shape[0] // n)
    x = jnp.pad(x, ((0, n * size - x.shape[0]), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    return x.reshape(n, 1, size, *x.shape[1:])


def token_nll(params, token_MBL, target_MBL, cfg: Config):
    """Negative log likelihood (nats) of each token of this device's share, MBL; no gradient."""
    params = prepare_weights(params, cfg, cfg.train.dtype)
    all_MBL = lax.all_gather(token_MBL, "pp", axis=0, tiled=True)  # any stage may meet them
    x_MBLD, _ = hidden_states(params, token_MBL, lambda m: full_row_span(all_MBL, m, cfg), cfg)

    def score(parts):
        x_BLD, target_BL = parts
        x_BLD = gather_rows(norm(x_BLD, params, "norm", cfg))
        target_BL = sequences_to_rows(target_BL)
        x = split_chunks(x_BLD.reshape(-1, x_BLD.shape[-1]), cfg)
        chunks = x, split_chunks(target_BL.reshape(-1), cfg, fill=-1)
        nll, _ = lax.map(lambda chunk: cross_entropy(*chunk, params, cfg), chunks)
        return rows_to_sequences(nll.reshape(-1)[: target_BL.size].reshape(target_BL.shape))

    return lax.map(score, (x_MBLD, target_MBL))
