"""Mixture of experts: the router, sending tokens to experts, and keeping them balanced.

DIMS
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from config import Config
from layers import (
    Param,
    activate,
    add_bias,
    add_to_row,
    einsum,
    feed_forward,
    gather_rows,
    layer_places,
    mlp_table,
    normal,
    rows_to_sequences,
    scatter_rows,
    sequences_to_rows,
    tp_part,
    zero_bias,
)


def moe_table(cfg: Config) -> dict:
    m = cfg.model
    D, N, E, F, C = m.d_model, m.n_layers, m.n_experts, m.d_expert, 1 + (m.activation == "swiglu")
    stays_sharded = cfg.mesh.experts == "alltoall"
    up, down = P(None, "dp", None, "tp"), P(None, "tp", "dp")
    if stays_sharded:
        up, down = P("dp", None, None, "tp"), P("dp", "tp", None)
    table = dict(
        router_DE=Param((D, E), P("dp", None), normal(D), keep_float32=True),
        in_EDCF=Param((E, D, C, F), up, normal(D), stays_sharded=stays_sharded),
        out_EFD=Param((E, F, D), down, normal(2 * N * F), stays_sharded=stays_sharded),
    )
    if m.router_bias:
        table |= dict(router_bias_E=zero_bias(E))
    if m.n_shared:
        table |= mlp_table(cfg, m.n_shared * F, "shared_")
    return table


def route(x_BLD, w, cfg):
    """(score_BLE, gate_BLX, expert_BLX): all scores of a token, and its experts' weights and ids.

    Float32.  Groups and the bias for the choice are DeepSeek-V3's (section 2.1.2).
    """
    m = cfg.model
    logit_BLE = jnp.einsum(
        "BLD,DE->BLE", x_BLD.astype(jnp.float32), w["router_DE"], precision=lax.Precision.HIGHEST
    )
    softmax = m.router == "softmax"
    score_BLE = jax.nn.softmax(logit_BLE, -1) if softmax else jax.nn.sigmoid(logit_BLE)
    choice_BLE = add_bias(lax.stop_gradient(score_BLE), w.get("router_bias_E"))
    if m.n_groups > 1:
        group = choice_BLE.reshape(*choice_BLE.shape[:2], m.n_groups, -1)
        worth = lax.top_k(group, min(2, group.shape[-1]))[0].sum(-1)
        best = lax.top_k(worth, m.n_active_groups)[1]
        good = jax.nn.one_hot(best, m.n_groups).sum(-2) > 0
        choice_BLE = jnp.where(good[..., None], group, -jnp.inf).reshape(choice_BLE.shape)
    expert_BLX = lax.top_k(choice_BLE, m.n_active)[1]
    gate_BLX = jnp.take_along_axis(score_BLE, expert_BLX, -1)
    if m.norm_scores:
        gate_BLX /= gate_BLX.sum(-1, keepdims=True) + 1e-20
    return score_BLE, gate_BLX * m.score_scale, expert_BLX


MOE_STATS = ("entropy", "balance", "dropped")  # beside load_E, the statistics of a moe layer


def routing_stats(score_BLE, expert_BLX):
    """What a moe layer's routing looks like, summed over this device's tokens.

    load_E: pairs of token and expert.  entropy: of the scores, nats.  balance: of each sequence
    E * sum of (share of the pairs) * (mean score), which is 1 when balanced and E / X at worst
    (DeepSeek-V3, eq. 17 to 20; a group that no mesh, microbatch or accumulation changes).
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


def queue_positions(to_U, n: int):
    """The place of each element in the queue of its destination, one of n, first come first."""
    order_U = jnp.argsort(to_U)
    length_n = jnp.bincount(to_U, length=n)
    start_n = jnp.cumsum(length_n) - length_n
    place_U = jnp.arange(to_U.size) - start_n[to_U[order_U]]
    return jnp.zeros_like(to_U).at[order_U].set(place_U)


def slot_owners(place_U, n: int):
    """Who has each of n places; U, which is nobody, where it is free.  A place >= n is none."""
    U = place_U.size
    return jnp.full(n, U).at[place_U].set(jnp.arange(U), mode="drop")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def move_rows(x_QD, from_O, to_U, copies: int = 1):
    """x_QD[from_O // copies], and anything where from_O is nobody.

    to_U is the way back: with it the gradient is a gather too, where XLA would scatter.  Nobody's
    has a gradient of 0, so whatever is made of nobody's must not be read.
    """
    return x_QD.at[from_O // copies].get(mode="clip")


def move_rows_forward(x_QD, from_O, to_U, copies):
    return move_rows(x_QD, from_O, to_U, copies), to_U


def move_rows_backward(copies, to_U, g_OD):
    g_UD = g_OD.at[to_U].get(mode="fill", fill_value=0)
    return g_UD.reshape(-1, copies, g_UD.shape[-1]).sum(1), None, None


move_rows.defvjp(move_rows_forward, move_rows_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def experts_on_tiles(x_YZD, gate_YZ, in_EDCF, out_EFD, expert_Y, cfg):
    """y_YZD: each tile of rows through its expert, times their gates.

    One tile after the other: lax.ragged_dot multiplies with all E experts on CPUs and GPUs, and on
    TPUs for the gradients of weights (XLA's programs of jax 0.10.2).  Backward, a tile's hidden
    units are made again, so that they are never there of all tiles; y is not, since a gate's
    gradient g . (h W) is (g W') . h.  jaxformer_1b on eight H200s compiles to 7.8 GiB, and to 9.2
    with hidden units kept and y made again.
    """

    def one(tile):
        x_ZD, gate_Z, expert = tile
        h_ZF, _ = hidden_units(x_ZD, in_EDCF[expert], cfg)
        y_ZD = gate_Z[:, None] * einsum("ZF,FD->ZD", h_ZF, out_EFD[expert], jnp.float32)
        return y_ZD.astype(x_ZD.dtype)

    return lax.map(one, (x_YZD, gate_YZ, expert_Y))


def hidden_units(x_ZD, in_DCF, cfg):
    """(h_ZF, the function from its gradient to that of the projections, ZCF)."""
    h_ZCF = einsum("ZD,DCF->ZCF", x_ZD, in_DCF)
    return jax.vjp(lambda h_ZCF: activate(h_ZCF, 1, cfg), h_ZCF)


def experts_on_tiles_backward(cfg, kept, g_YZD):
    x_YZD, gate_YZ, in_EDCF, out_EFD, expert_Y = kept

    def one(of_weights, tile):
        x_ZD, gate_Z, g_ZD, expert = tile
        h_ZF, back = hidden_units(x_ZD, in_EDCF[expert], cfg)
        g_ZF = einsum("ZD,FD->ZF", g_ZD, out_EFD[expert])
        of_gate_Z = (g_ZF.astype(jnp.float32) * h_ZF).sum(-1).astype(gate_Z.dtype)
        (g_ZCF,) = back(gate_Z[:, None] * g_ZF)
        new = [
            einsum("ZD,ZCF->DCF", x_ZD, g_ZCF, jnp.float32),
            einsum("ZF,ZD->FD", h_ZF, gate_Z[:, None] * g_ZD, jnp.float32),
        ]
        of_x_ZD = einsum("ZCF,DCF->ZD", g_ZCF, in_EDCF[expert])
        return jax.tree.map(partial(add_to_row, row=expert), of_weights, new), (of_x_ZD, of_gate_Z)

    zeros = [jnp.zeros_like(w, jnp.float32) for w in (in_EDCF, out_EFD)]
    of_weights, of_rows = lax.scan(one, zeros, (x_YZD, gate_YZ, g_YZD, expert_Y))
    return *of_rows, *(x.astype(in_EDCF.dtype) for x in of_weights), None


experts_on_tiles.defvjp(
    lambda *args: (experts_on_tiles(*args), args[:5]), experts_on_tiles_backward
)


def tile_shape(U: int, E: int) -> tuple[int, int]:
    """(Y, Z): Y tiles of Z rows hold U rows, however they are spread over E experts, when a tile is
    of one expert.  With many rows an expert at most a fifth is filling."""
    Z = max(8, min(1024, U // (4 * E)))
    Z -= Z % (128 if Z > 128 else 8)  # as matmul units have it
    return min(U // Z + E, U), Z


def run_experts(x_QD, gate_U, expert_U, w, cfg):
    """y_UD: each row through its U / Q experts, times the gate; of no expert's number, anything.

    Rows are put in tiles of one expert each; only its last one is not full.
    """
    (E, D, *_), U = w["in_EDCF"].shape, expert_U.size
    Y, Z = tile_shape(U, E)
    tiles_E = -(-jnp.bincount(expert_U, length=E + 1)[:E] // Z)
    ends_E = jnp.cumsum(tiles_E)
    first = jnp.append(ends_E - tiles_E, Y)  # those that are no expert's have no tile
    to_U = first[expert_U] * Z + queue_positions(expert_U, E + 1)
    from_O = slot_owners(to_U, Y * Z)
    expert_Y = jnp.minimum(jnp.searchsorted(ends_E, jnp.arange(Y), side="right"), E - 1)
    x_YZD = move_rows(x_QD, from_O, to_U, U // len(x_QD)).reshape(Y, Z, D)
    gate_YZ = move_rows(gate_U[:, None], from_O, to_U).reshape(Y, Z)
    y_YZD = experts_on_tiles(x_YZD, gate_YZ, w["in_EDCF"], w["out_EFD"], expert_Y, cfg)
    return move_rows(y_YZD.reshape(-1, D), to_U, from_O)


def dispatch_dropless(x_BLD, gate_BLX, expert_BLX, w, cfg):
    """(y_BLXD, all kept): every token through each of its experts, times its gate.

    Where experts stay with their dp rank, the pairs of a rank are sent there.  As all may go to
    one rank, there is room for that: dp times the even share in memory, and in the matmuls, for
    none dropped.
    """
    (*_, D), X, expert_U = x_BLD.shape, expert_BLX.shape[-1], expert_BLX.reshape(-1)
    x_QD, gate_U = x_BLD.reshape(-1, D), gate_BLX.reshape(-1)
    if cfg.mesh.experts == "gather":
        y_UD = run_experts(x_QD, gate_U, expert_U, w, cfg)
    else:
        dp, E = lax.axis_size("dp"), w["in_EDCF"].shape[0]
        rank_U, room = expert_U // E, len(x_QD) * min(X, E)
        to_U = rank_U * room + queue_positions(rank_U, dp)
        from_O = slot_owners(to_U, dp * room)
        x_OD = move_rows(x_QD, from_O, to_U, X)
        gate_O1 = move_rows(gate_U[:, None], from_O, to_U)
        expert_O = (expert_U % E).at[from_O].get(mode="fill", fill_value=E)
        x_OD = lax.all_to_all(x_OD, "dp", 0, 0, tiled=True)
        gate_O1 = lax.all_to_all(gate_O1, "dp", 0, 0, tiled=True)
        expert_O = lax.all_to_all(expert_O, "dp", 0, 0, tiled=True)
        y_OD = run_experts(x_OD, gate_O1[:, 0], expert_O, w, cfg)
        y_UD = move_rows(lax.all_to_all(y_OD, "dp", 0, 0, tiled=True), to_U, from_O)
    return y_UD.reshape(*expert_BLX.shape, D), jnp.ones(expert_BLX.shape, bool)


def dispatch_with_capacity(x_BLD, gate_BLX, expert_BLX, w, cfg):
    """(y_BLXD, kept_BLX): each expert takes at most its slots' worth of each sequence.

    First come, first served along the sequence, so that no token is dropped for a later one's sake
    and the sequence, whole on any mesh, decides alone.  Arguments and results are in the order of
    `all_rows`.
    """
    D, sequences = x_BLD.shape[-1], rows_to_sequences(expert_BLX)
    (B, L, X), E = sequences.shape, cfg.model.n_experts  # of all dp ranks
    Z = min(L, math.ceil(cfg.train.capacity_factor * L * X / E))
    expert_BU, row_B1 = sequences.reshape(B, -1), jnp.arange(B)[:, None]
    place_BU = jax.vmap(partial(queue_positions, n=E))(expert_BU)
    to_BU = jnp.where(place_BU < Z, (row_B1 * E + expert_BU) * Z + place_BU, B * E * Z)
    to_BLX = sequences_to_rows(to_BU.reshape(B, L, X))
    to_U = to_BLX.reshape(-1)
    from_O = slot_owners(to_U, B * E * Z)
    x_BEZD = move_rows(x_BLD.reshape(-1, D), from_O, to_U, X).reshape(B, E, Z, D)
    if cfg.mesh.experts == "alltoall":
        x_BEZD = lax.all_to_all(x_BEZD, "dp", split_axis=1, concat_axis=0, tiled=True)
    h_BEZCF = einsum("BEZD,EDCF->BEZCF", x_BEZD, w["in_EDCF"])
    y_BEZD = einsum("BEZF,EFD->BEZD", activate(h_BEZCF, 3, cfg), w["out_EFD"])
    if cfg.mesh.experts == "alltoall":
        y_BEZD = lax.all_to_all(y_BEZD, "dp", split_axis=0, concat_axis=1, tiled=True)
    y_BLXD = move_rows(y_BEZD.reshape(-1, D), to_U, from_O).reshape(*to_BLX.shape, D)
    kept_BLX = to_BLX < B * E * Z
    return y_BLXD * jnp.where(kept_BLX, gate_BLX, 0)[..., None], kept_BLX


def moe(x_BLD, w, cfg, training: bool):
    """(y_BLD, statistics when training): routed experts, and shared ones beside them.

    Tokens are routed where they are, then gathered over tp: each tp shard has a part of d_expert.
    """
    score_BLE, gate_BLX, expert_BLX = route(x_BLD, w, cfg)
    stats = routing_stats(score_BLE, expert_BLX) if training else None
    x_BLD = gather_rows(x_BLD)
    gate_BLX = gather_rows(gate_BLX).astype(x_BLD.dtype)
    expert_BLX = gather_rows(expert_BLX)
    dispatch = (
        dispatch_with_capacity if training and cfg.train.capacity_factor else dispatch_dropless
    )
    y_BLXD, kept_BLX = dispatch(x_BLD, gate_BLX, expert_BLX, w, cfg)
    y_BLD = y_BLXD.sum(2)
    if cfg.model.n_shared:
        y_BLD += feed_forward(x_BLD, w, cfg, "shared_")
    if training:
        stats["dropped"] = (~tp_part(kept_BLX, 0)).sum(dtype=jnp.float32)
    return scatter_rows(y_BLD), stats


def moe_metrics(stats, cfg: Config) -> dict:
    """load (pairs of token and expert), entropy (nats a token), balance (1 is best) and dropped
    (share of the pairs) of each moe layer, in the layers' order."""

    def of_layer(group, kind, row):
        return jax.tree.map(lambda x: x[row], stats[group][kind])

    layers = [of_layer(*place) for place in layer_places(cfg) if "moe" in place[1]]
    total = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    n = cfg.train.batch_size * cfg.train.seq_len
    return dict(
        load=total["load_E"],
        entropy=total["entropy"] / n,
        balance=total["balance"] / cfg.train.batch_size,
        dropped=total["dropped"] / (n * cfg.model.n_active),
    )


def update_router_biases(params, stats, cfg: Config):
    """Each expert's bias one step down where it had more than its share of the batch, else up
    (DeepSeek-V3, section 2.1.2)."""

    def moved(group, kind, w):
        if "router_bias_E" not in w:
            return w
        load = stats[group][kind]["load_E"]
        over = jnp.sign(load * load.shape[-1] - load.sum(-1, keepdims=True))
        return w | dict(router_bias_E=w["router_bias_E"] - cfg.train.bias_rate * over)

    groups = {
        group: {kind: moved(group, kind, w) for kind, w in params[group].items()} for group in stats
    }
    return params | groups
