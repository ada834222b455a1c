"""Mixture of experts: the router, dispatching tokens to experts, and balancing the load.

Dimension key (a suffix on every array's name spells its logical shape):
  B  sequences   L  sequence length   D  d_model   F  d_expert   C  gate and up, or only up
  E  experts   X  experts of a token   Q  tokens of all sequences   U  pairs of token and expert
  Z  slots of an expert (without capacity: rows of a tile, see grouped.py)   O  all slots
  J  columns of C times F   1  a dim of size 1   n  queues
  G  groups of experts   P  experts of a group   A  active groups of a token

A pair is a token and one of the experts that it is routed to.  To be multiplied, pairs are put into
slots, which are ordered by expert.

Inside shard_map the letters still name the whole dims; a sharded dim is only as long as this
device's part.  After `gather_rows` B is tp times as large, and L is L / tp.
"""

import math
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import layers
from architecture import layer_places
from config import Config
from grouped import grouped_matmul, grouped_outer, padded_rows
from layers import add_bias, einsum, gather_rows
from utils import warn
from weights import Param, normal, zero_bias


def moe_table(cfg: Config) -> dict:
    """The weights of `moe`."""
    m = cfg.model
    D, E, F, C = m.d_model, m.n_experts, m.d_expert, m.in_matrices
    by_rank = cfg.mesh.experts == "alltoall"
    E_axis, D_axis = ("dp", None) if by_rank else (None, "dp")
    in_spec, out_spec = P(E_axis, D_axis, None, "tp"), P(E_axis, "tp", D_axis)
    expert = partial(Param, is_routed=True, stays_sharded=by_rank, rows=(1,))
    router = partial(Param, keep_float32=True, rows=(0,))
    # With muP a router is an output, whose values fall as 1 / width (Yang et al. 2022, table 3).
    router_std = normal(D**2 / (m.mup_base_width or D))
    table = dict(
        router_DE=router((D, E), P("dp", None), router_std, columns=(1,)),
        in_EDCF=expert((E, D, C, F), in_spec, normal(D), columns=(3,)),
        out_EFD=expert((E, F, D), out_spec, layers.to_residual(m, F), columns=(2,)),
    )
    if m.expert_bias:
        in_bias = partial(zero_bias, spec=P(in_spec[0], None, "tp"), stays_sharded=by_rank)
        table |= dict(in_bias_ECF=in_bias(E, C, F, is_routed=True))
        table |= dict(out_bias_ED=zero_bias(E, D, is_routed=True))
    if m.router_logit_bias:
        table |= dict(router_logit_bias_E=zero_bias(E))
    if m.router_bias:
        table |= dict(router_bias_E=zero_bias(E))
    if m.n_shared:
        table |= layers.mlp_table(cfg, m.n_shared * F, "shared_")
    return table


# ---- the router


def route(x_BLD, w, cfg):
    """(score_BLE, gate_BLX, expert_BLX): all scores of each token, the weights of its experts and
    their ids.

    In float32.  The groups and the bias for the choice are DeepSeek-V3's (section 2.1.2).
    """
    m = cfg.model
    x32_BLD = x_BLD.astype(jnp.float32)
    logit_BLE = jnp.einsum("BLD,DE->BLE", x32_BLD, w["router_DE"], precision="highest")
    logit_BLE = add_bias(logit_BLE, w.get("router_logit_bias_E"))
    softmax = m.router == "softmax"
    score_BLE = jax.nn.softmax(logit_BLE, -1) if softmax else jax.nn.sigmoid(logit_BLE)
    choice_BLE = add_bias(lax.stop_gradient(score_BLE), w.get("router_bias_E"))
    if m.n_groups > 1:
        choice_BLGP = choice_BLE.reshape(*choice_BLE.shape[:2], m.n_groups, -1)
        group_score_BLG = lax.top_k(choice_BLGP, min(2, choice_BLGP.shape[-1]))[0].sum(-1)
        active_group_BLA = lax.top_k(group_score_BLG, m.n_active_groups)[1]
        is_active_BLG = jax.nn.one_hot(active_group_BLA, m.n_groups).sum(-2) > 0
        choice_BLGP = jnp.where(is_active_BLG[..., None], choice_BLGP, -jnp.inf)
        choice_BLE = choice_BLGP.reshape(choice_BLE.shape)
    expert_BLX = lax.top_k(choice_BLE, m.n_active)[1]
    gate_BLX = jnp.take_along_axis(score_BLE, expert_BLX, -1)
    if m.norm_scores:
        gate_BLX /= gate_BLX.sum(-1, keepdims=True) + 1e-20
    return score_BLE, gate_BLX * m.score_scale, expert_BLX


MOE_STATS = ("entropy", "balance", "dropped")
"""The statistics of a moe layer besides load_E, one number each."""


def routing_stats(score_BLE, expert_BLX):
    """Statistics of a moe layer's routing, summed over this device's tokens.

    load_E: pairs that each expert gets.  entropy: of the scores, in nats.  balance: for each
    sequence E * sum over experts of (share of the pairs) * (mean score), which is 1 when balanced
    and E / X at worst (DeepSeek-V3, eq. 17 to 20, except that eq. 18 counts the experts of the best
    scores, without biases and groups).  It is counted by sequence because no mesh, microbatch or
    accumulation changes what a sequence is.
    """
    E, L = score_BLE.shape[-1], score_BLE.shape[1] * lax.axis_size("tp")
    prob_BLE = score_BLE / score_BLE.sum(-1, keepdims=True)
    count_BE = jax.nn.one_hot(expert_BLX, E).sum((1, 2))
    share_BE = lax.psum(count_BE, "tp") / (L * expert_BLX.shape[-1])
    return dict(
        load_E=count_BE.sum(0),
        entropy=-(prob_BLE * jnp.log(prob_BLE + 1e-20)).sum(),
        balance=E * (share_BE * prob_BLE.sum(1) / L).sum(),
    )


# ---- pairs into slots


def queue_positions(queue_U, n: int):
    """The position of each pair in its queue; queue_U: which of n queues it joins, in order."""
    order_U = jnp.argsort(queue_U)
    length_n = jnp.bincount(queue_U, length=n)
    start_n = jnp.cumsum(length_n) - length_n
    position_U = jnp.arange(queue_U.size) - start_n[queue_U[order_U]]
    return jnp.zeros_like(queue_U).at[order_U].set(position_U)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def to_slots(x_QD, pair_O, slot_U, X: int):
    """x_OD: the token of the pair in each slot, and some token in an empty one.  A token's X pairs
    are neighbours.

    The gradient is `from_slots`, which gathers as well; otherwise XLA would scatter.
    """
    return x_QD.at[pair_O // X].get(mode="clip")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def from_slots(y_OD, pair_O, slot_U, X: int):
    """y_QD: the sum over a token's X pairs of what is in their slots.  Empty slots are not read,
    and a pair without a slot adds nothing.

    In float32.  One gather for each of the X, because XLA adds those in half the time that it needs
    for one gather and a sum over X (0.29 and 0.68 ms for 8 times 8,192 tokens on a v5p).
    """
    slot_QX = slot_U.reshape(-1, X)
    rows = (y_OD.at[slot_QX[:, n]].get(mode="fill", fill_value=0) for n in range(X))
    return sum(x_QD.astype(jnp.float32) for x_QD in rows).astype(y_OD.dtype)


def set_gradient(f, transpose):
    """Make `transpose` the gradient of f, for the two functions above."""

    def forward(x, pair_O, slot_U, X):
        return f(x, pair_O, slot_U, X), (pair_O, slot_U)

    f.defvjp(forward, lambda X, slots, grad: (transpose(grad, *slots, X), None, None))


set_gradient(to_slots, from_slots)
set_gradient(from_slots, to_slots)


def fill_slots(x_QD, gate_U, slot_U, n_slots: int):
    """(x_OD, gate_O, pair_O): the token, the gate and the number of the pair in each slot.  An
    empty one has some token, the number U, and a gate of 0, so that it adds to no gradient.  Pairs
    whose slot is n_slots or more are dropped."""
    U = slot_U.size
    pair_O = jnp.full(n_slots, U).at[slot_U].set(jnp.arange(U), mode="drop")
    x_OD = to_slots(x_QD, pair_O, slot_U, U // len(x_QD))
    gate_O1 = to_slots(gate_U[:, None], pair_O, slot_U, 1)
    return x_OD, jnp.where(pair_O < U, gate_O1[:, 0], 0), pair_O


# ---- experts on sorted rows: for dropless routing


def expert_hidden_units(x_OD, in_EDCF, bias_ECF, size_E, Z, cfg):
    """(h_OF, backward): the hidden units of each row, and the function from their gradient to the
    gradients of h_OJ, which is gate and up side by side before the biases, and of the biases."""
    E, D, C, F = in_EDCF.shape
    h_OJ = grouped_matmul(x_OD, in_EDCF.reshape(E, D, C * F), size_E, Z)

    def activation(h_OJ, bias_ECF):
        if bias_ECF is not None:
            expert_O = jnp.searchsorted(jnp.cumsum(size_E), jnp.arange(len(h_OJ)), side="right")
            bias_EJ = bias_ECF.reshape(E, C * F)
            h_OJ = add_bias(h_OJ, bias_EJ.at[expert_O].get(mode="fill", fill_value=0))
        parts = jnp.split(h_OJ, C, axis=1)
        return layers.activate(parts[0], parts[-1], cfg)

    return jax.vjp(activation, h_OJ, bias_ECF)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def expert_mlp(x_OD, gate_O, in_EDCF, bias_ECF, out_EFD, size_E, Z, cfg):
    """y_OD: the output of each row's expert times the row's gate; see grouped.py for size_E and Z.

    The gates multiply hidden units, which are usually narrower than outputs.  The backward pass
    recomputes hidden units.  It does not recompute y: a gate's gradient, g . (h W) with g the
    gradient of y, is computed as (g W') . h.
    """
    h_OF, _ = expert_hidden_units(x_OD, in_EDCF, bias_ECF, size_E, Z, cfg)
    return grouped_matmul(gate_O[:, None] * h_OF, out_EFD, size_E, Z)


def expert_mlp_backward(Z, cfg, saved, grad_OD):
    x_OD, gate_O, in_EDCF, bias_ECF, out_EFD, size_E = saved
    in_EDJ = in_EDCF.reshape(*in_EDCF.shape[:2], -1)
    h_OF, activation_backward = expert_hidden_units(x_OD, in_EDCF, bias_ECF, size_E, Z, cfg)
    grad_OF = grouped_matmul(grad_OD, out_EFD, size_E, Z, transposed=True)
    gate_grad_O = (grad_OF.astype(jnp.float32) * h_OF).sum(-1).astype(gate_O.dtype)
    grad_OJ, bias_grad_ECF = activation_backward(gate_O[:, None] * grad_OF)
    in_grad_EDCF = grouped_outer(x_OD, grad_OJ, size_E, Z).reshape(in_EDCF.shape)
    out_grad_EFD = grouped_outer(gate_O[:, None] * h_OF, grad_OD, size_E, Z)
    x_grad_OD = grouped_matmul(grad_OJ, in_EDJ, size_E, Z, transposed=True)
    return x_grad_OD, gate_grad_O, in_grad_EDCF, bias_grad_ECF, out_grad_EFD, None


expert_mlp.defvjp(lambda *args: (expert_mlp(*args), args[:6]), expert_mlp_backward)


def run_experts(x_QD, gate_U, expert_U, w, cfg):
    """y_QD: the sum over a token's U / Q pairs, which are neighbours, of the output of their expert
    times their gate.  A pair whose expert is E belongs to no expert here and adds nothing.

    Pairs are sorted by expert.  For products in tiles each expert's are padded to whole tiles.
    """
    E, U = len(w["out_EFD"]), expert_U.size
    O, Z = padded_rows(U, w["out_EFD"])
    size_E = -(-jnp.bincount(expert_U, length=E + 1)[:E] // Z) * Z
    start = jnp.append(jnp.cumsum(size_E) - size_E, O)  # pairs of no expert get no slot
    slot_U = start[expert_U] + queue_positions(expert_U, E + 1)
    x_OD, gate_O, pair_O = fill_slots(x_QD, gate_U, slot_U, O)
    weights = w["in_EDCF"], w.get("in_bias_ECF"), w["out_EFD"]
    y_OD = expert_mlp(x_OD, gate_O, *weights, size_E, Z, cfg)
    return from_slots(y_OD, pair_O, slot_U, U // len(x_QD))


def run_experts_alltoall(x_QD, gate_U, expert_U, w, cfg):
    """`run_experts` where experts stay with their dp rank: each rank sends its pairs to the ranks
    of their experts.

    All pairs may go to one rank, so there is room for all of them: dp times the even share, in
    memory and in the products of tiles.  Kernels multiply only the rows that have arrived.
    """
    dp, E, X = lax.axis_size("dp"), len(w["out_EFD"]), expert_U.size // len(x_QD)
    rank_U, room = expert_U // E, len(x_QD) * min(X, E)
    slot_U = rank_U * room + queue_positions(rank_U, dp)
    x_OD, gate_O, pair_O = fill_slots(x_QD, gate_U, slot_U, dp * room)
    expert_O = (expert_U % E).at[pair_O].get(mode="fill", fill_value=E)
    received = lax.all_to_all((x_OD, gate_O, expert_O), "dp", 0, 0, tiled=True)
    y_OD = run_experts(*received, w, cfg)
    y_OD = lax.all_to_all(y_OD, "dp", 0, 0, tiled=True)
    return from_slots(y_OD, pair_O, slot_U, X)


# ---- dispatch: every token to its experts and back


def dispatch_dropless(x_BLD, gate_BLX, expert_BLX, w, cfg):
    """(y_BLD, kept_BLX): the sum over each token's experts of their outputs times the gates; all
    pairs are kept."""
    run = run_experts if cfg.mesh.experts == "gather" else run_experts_alltoall
    x_QD = x_BLD.reshape(-1, x_BLD.shape[-1])
    y_QD = run(x_QD, gate_BLX.reshape(-1), expert_BLX.reshape(-1), w, cfg)
    return y_QD.reshape(x_BLD.shape), jnp.ones(expert_BLX.shape, bool)


def dispatch_with_capacity(x_BLD, gate_BLX, expert_BLX, w, cfg):
    """(y_BLD, kept_BLX): as `dispatch_dropless`, but an expert has Z slots for each sequence, and
    drops the tokens that find them taken.

    The first tokens of a sequence get the slots, so that a later token never causes an earlier one
    to be dropped.  Only the sequence, which is whole on any mesh, decides.  Arguments and results
    are in the order of `gather_rows`.
    """
    D, choice_BLX = x_BLD.shape[-1], layers.rows_to_sequences(expert_BLX)
    (B, L, X), E = choice_BLX.shape, cfg.model.n_experts  # the experts of all dp ranks
    Z = min(L, math.ceil(cfg.train.capacity_factor * L * X / E))
    expert_BU, row_B1 = choice_BLX.reshape(B, -1), jnp.arange(B)[:, None]
    position_BU = jax.vmap(partial(queue_positions, n=E))(expert_BU)
    slot_BU = jnp.where(position_BU < Z, (row_B1 * E + expert_BU) * Z + position_BU, B * E * Z)
    slot_BLX = layers.sequences_to_rows(slot_BU.reshape(B, L, X))
    x_QD, gate_U, slot_U = x_BLD.reshape(-1, D), gate_BLX.reshape(-1), slot_BLX.reshape(-1)
    x_OD, gate_O, pair_O = fill_slots(x_QD, gate_U, slot_U, B * E * Z)
    x_BEZD, gate_BEZ = x_OD.reshape(B, E, Z, D), gate_O.reshape(B, E, Z)
    if cfg.mesh.experts == "alltoall":
        x_BEZD, gate_BEZ = lax.all_to_all((x_BEZD, gate_BEZ), "dp", 1, 0, tiled=True)
    h_BEZCF = einsum("BEZD,EDCF->BEZCF", x_BEZD, w["in_EDCF"])
    if "in_bias_ECF" in w:
        h_BEZCF = add_bias(h_BEZCF, w["in_bias_ECF"][:, None])
    h_BEZF = layers.activate(h_BEZCF[:, :, :, 0], h_BEZCF[:, :, :, -1], cfg)
    gated_BEZF = gate_BEZ[..., None].astype(jnp.float32) * h_BEZF  # whose gradient is a sum over F
    y_BEZD = einsum("BEZF,EFD->BEZD", gated_BEZF.astype(h_BEZF.dtype), w["out_EFD"])
    if cfg.mesh.experts == "alltoall":
        y_BEZD = lax.all_to_all(y_BEZD, "dp", 0, 1, tiled=True)
    y_QD = from_slots(y_BEZD.reshape(-1, D), pair_O, slot_U, X)
    return y_QD.reshape(x_BLD.shape), slot_BLX < B * E * Z


def warn_of_constant_gate(cfg: Config):
    """Warn of a router that learns from the balance loss alone: each gate is normed to 1."""
    m = cfg.model
    if m.n_experts and m.n_active == 1 and m.norm_scores:
        what = "model.norm_scores makes every gate 1, since model.n_active=1"
        warn(f"{what}: the router gets no gradient from the loss")


def moe(x_BLD, w, cfg, training: bool):
    """(y_BLD, statistics): routed experts, and shared ones beside them.  Without training no token
    is dropped, and there are no statistics.

    Tokens are routed where they are, then gathered over tp: each tp shard has a part of d_expert.
    """
    score_BLE, gate_BLX, expert_BLX = route(x_BLD, w, cfg)
    stats = routing_stats(score_BLE, expert_BLX) if training else {}
    x_BLD = gather_rows(x_BLD)
    all_gate_BLX = gather_rows(gate_BLX).astype(x_BLD.dtype)
    all_expert_BLX = gather_rows(expert_BLX)
    drops = training and cfg.train.capacity_factor > 0
    dispatch = dispatch_with_capacity if drops else dispatch_dropless
    y_BLD, kept_BLX = dispatch(x_BLD, all_gate_BLX, all_expert_BLX, w, cfg)
    if cfg.model.n_shared:
        y_BLD += layers.feed_forward(x_BLD, w, cfg, "shared_")
    kept_BLX = layers.tp_part(kept_BLX, 0)
    if training:
        stats["dropped"] = (~kept_BLX).sum(dtype=jnp.float32)
    y_BLD = layers.scatter_rows(y_BLD)
    if "out_bias_ED" in w:  # needs no dispatch, because it does not depend on the token
        gate_BLX = jnp.where(kept_BLX, gate_BLX, 0)
        gate_BLE = (gate_BLX[..., None] * jax.nn.one_hot(expert_BLX, cfg.model.n_experts)).sum(-2)
        bias_BLD = jnp.einsum("BLE,ED->BLD", gate_BLE, w["out_bias_ED"])  # float32
        y_BLD += bias_BLD.astype(y_BLD.dtype)
    return y_BLD, stats


# ---- after an update: statistics of the batch, and the router's bias


def moe_metrics(stats, cfg: Config) -> dict:
    """load (pairs of token and expert), entropy (nats a token), balance (1 is best) and dropped
    (share of the pairs) of each moe layer, in the order of the layers."""
    places = [(group, kind, row) for group, kind, row in layer_places(cfg.model) if "moe" in kind]
    by_layer = [jax.tree.map(itemgetter(row), stats[group][kind]) for group, kind, row in places]
    total = jax.tree.map(lambda *x: jnp.stack(x), *by_layer)
    n = cfg.train.batch_size * cfg.train.seq_len
    return dict(
        load=total["load_E"],
        entropy=total["entropy"] / n,
        balance=total["balance"] / cfg.train.batch_size,
        dropped=total["dropped"] / (n * cfg.model.n_active),
    )


def update_router_biases(params, stats, cfg: Config):
    """params, with each expert's bias moved by train.bias_rate: down where it had more than its
    share of the batch, up where it had less (DeepSeek-V3, section 2.1.2)."""
    for group, kinds in stats.items():
        for kind, layer_stats in kinds.items():
            w = params[group][kind]
            if "router_bias_E" in w:
                load_E = layer_stats["load_E"]
                overloaded_E = jnp.sign(load_E * load_E.shape[-1] - load_E.sum(-1, keepdims=True))
                bias_E = w["router_bias_E"] - cfg.train.bias_rate * overloaded_E
                params = params | {group: params[group] | {kind: w | dict(router_bias_E=bias_E)}}
    return params
