"""A decoder-only transformer, written as the code that one device runs.

Dimension key (a suffix on every array's name spells its logical shape):
  A  accumulation slices   M  pipeline microbatches    K  head dim
  B  sequences             L  sequence length (S: keys' length)
  D  d_model   F  d_ff   V  vocab   N  layers   C  2: the gate and the up projection
  H  query heads   G  key and value heads   R  query heads per key head

Mesh axes: dp (batch; weights rest sharded over it), pp (layers; microbatches before and after
them), tp (heads, d_ff, vocab, and the sequence wherever an array is x_BLD).  Inside shard_map a
letter that its PartitionSpec maps to a mesh axis is the local piece.  `grep lax.p` and
`grep all_gather` list all communication.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from config import Config

# AMBL: tokens and targets; each stage embeds and scores its own microbatches.
TOKENS = P(None, "pp", "dp", None)

# ---- the parameter table


@dataclass(frozen=True)
class Param:
    """One weight: shape, where it rests, how it starts, and whether weight decay pulls at it."""

    shape: tuple[int, ...]
    spec: P
    init: Callable
    decay: bool = True


def normal(fan_in):
    return lambda key, shape: fan_in**-0.5 * jax.random.normal(key, shape)


def norm_gain(dim):
    return Param((dim,), P(None), lambda key, shape: jnp.ones(shape), decay=False)


def layer_table(cfg: Config) -> dict:
    """One layer: every weight's shape, where it rests, and how it starts."""
    m = cfg.model
    D, F, H, G, K, N = m.d_model, m.d_ff, m.n_heads, m.n_kv_heads, m.d_head, m.n_layers
    table = dict(
        attn_norm_D=norm_gain(D),
        q_DHK=Param((D, H, K), P("dp", "tp", None), normal(D)),
        k_DGK=Param((D, G, K), P("dp", "tp", None), normal(D)),
        v_DGK=Param((D, G, K), P("dp", "tp", None), normal(D)),
        o_HKD=Param((H, K, D), P("tp", None, "dp"), normal(2 * N * H * K)),
        mlp_norm_D=norm_gain(D),
        in_CDF=Param((2, D, F), P(None, "dp", "tp"), normal(D)),
        out_FD=Param((F, D), P("tp", "dp"), normal(2 * N * F)),
    )
    if m.qk_norm:
        table |= dict(q_norm_K=norm_gain(K), k_norm_K=norm_gain(K))
    return table


def ends_table(cfg: Config) -> dict:
    """What comes before and after the layers."""
    D, V = cfg.model.d_model, cfg.model.vocab_size
    table = dict(embed_VD=Param((V, D), P("tp", "dp"), normal(D)), norm_D=norm_gain(D))
    if not cfg.model.tie_embeddings:
        table |= dict(unembed_DV=Param((D, V), P("dp", "tp"), normal(D)))
    return table


def param_table(cfg: Config) -> dict:
    """The whole model.  Layers are stacked on a leading axis, and that axis is the pipeline."""

    def stack(p: Param) -> Param:
        def init(key, shape):
            keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(shape[0]))
            return jax.vmap(lambda k: p.init(k, p.shape))(keys)

        return Param((cfg.model.n_layers, *p.shape), P("pp", *p.spec), init, p.decay)

    return dict(layers=jax.tree.map(stack, layer_table(cfg)), **ends_table(cfg))


def param_count(cfg: Config) -> int:
    return sum(math.prod(p.shape) for p in jax.tree.leaves(param_table(cfg)))


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


def unshard(w: dict, table: dict, cfg: Config) -> dict:
    """FSDP: cast to the compute dtype and gather over dp just before use.

    The transpose reduce-scatters the gradient.
    """

    def gather(x, p: Param):
        if "dp" not in p.spec:
            return x
        return lax.all_gather(x.astype(cfg.train.dtype), "dp", axis=p.spec.index("dp"), tiled=True)

    return {name: gather(x, table[name]) for name, x in w.items()}


# ---- one layer


def rms_norm(x_BLD, gain_D, cfg):
    """x / rms(x) * gain, over the last dim, in float32 (Zhang and Sennrich 2019)."""
    x32 = x_BLD.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + cfg.model.norm_eps)
    return (x32 * scale * gain_D).astype(x_BLD.dtype)


def rope(x_BLHK, theta):
    """Rotary position embedding (Su et al. 2021), pairing element i with i + K/2 as Llama does."""
    L, K = x_BLHK.shape[1], x_BLHK.shape[3]
    freq_K = theta ** (-jnp.arange(0, K, 2) / K)
    angle_LK = jnp.arange(L)[:, None] * freq_K
    sin, cos = jnp.sin(angle_LK)[:, None], jnp.cos(angle_LK)[:, None]
    a, b = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHK.dtype)


def attention(x_BLD, w, cfg):
    """Causal grouped-query attention.

    The sequence is gathered over tp, and the heads' outputs summed and scattered.
    """
    x_BLD = lax.all_gather(x_BLD, "tp", axis=1, tiled=True)
    q_BLHK = jnp.einsum("BLD,DHK->BLHK", x_BLD, w["q_DHK"])
    k_BSGK = jnp.einsum("BSD,DGK->BSGK", x_BLD, w["k_DGK"])
    v_BSGK = jnp.einsum("BSD,DGK->BSGK", x_BLD, w["v_DGK"])
    if cfg.model.qk_norm:
        q_BLHK, k_BSGK = rms_norm(q_BLHK, w["q_norm_K"], cfg), rms_norm(k_BSGK, w["k_norm_K"], cfg)
    q_BLHK, k_BSGK = rope(q_BLHK, cfg.model.rope_theta), rope(k_BSGK, cfg.model.rope_theta)

    B, L, H, K = q_BLHK.shape
    q_BLGRK = q_BLHK.reshape(B, L, k_BSGK.shape[2], -1, K)
    score_BGRLS = jnp.einsum(
        "BLGRK,BSGK->BGRLS", q_BLGRK, k_BSGK, preferred_element_type=jnp.float32
    )
    causal_LS = jnp.tril(jnp.ones((L, L), bool))
    prob_BGRLS = jax.nn.softmax(jnp.where(causal_LS, score_BGRLS * K**-0.5, -1e30), -1)
    y_BLGRK = jnp.einsum("BGRLS,BSGK->BLGRK", prob_BGRLS.astype(x_BLD.dtype), v_BSGK)

    y_BLD = jnp.einsum("BLHK,HKD->BLD", y_BLGRK.reshape(B, L, H, K), w["o_HKD"])
    return lax.psum_scatter(y_BLD, "tp", scatter_dimension=1, tiled=True)


def mlp(x_BLD, w):
    """SwiGLU (Shazeer 2020)."""
    x_BLD = lax.all_gather(x_BLD, "tp", axis=1, tiled=True)
    h_CBLF = jnp.einsum("BLD,CDF->CBLF", x_BLD, w["in_CDF"])
    y_BLF = jax.nn.silu(h_CBLF[0]) * h_CBLF[1]
    y_BLD = jnp.einsum("BLF,FD->BLD", y_BLF, w["out_FD"])
    return lax.psum_scatter(y_BLD, "tp", scatter_dimension=1, tiled=True)


def dropout(x_BLD, key, row_B, cfg):
    """Drop elements by (key, row of the global batch, position), so that no mesh changes which.

    key None drops none.
    """
    if key is None or not cfg.train.dropout:
        return x_BLD
    _, L, D = x_BLD.shape
    position_L = lax.axis_index("tp") * L + jnp.arange(L)
    keep = 1 - cfg.train.dropout

    def kept_D(row, position):
        own_key = jax.random.fold_in(jax.random.fold_in(key, row), position)
        return jax.random.bernoulli(own_key, keep, (D,))

    def kept_LD(row):
        return jax.vmap(partial(kept_D, row))(position_L)

    return jnp.where(jax.vmap(kept_LD)(row_B), x_BLD / keep, 0)


def block(x_BLD, w, cfg, key, row_B):
    attn_key, mlp_key = (None, None) if key is None else jax.random.split(key)
    y_BLD = attention(rms_norm(x_BLD, w["attn_norm_D"], cfg), w, cfg)
    x_BLD = x_BLD + dropout(y_BLD, attn_key, row_B, cfg)
    y_BLD = mlp(rms_norm(x_BLD, w["mlp_norm_D"], cfg), w)
    return x_BLD + dropout(y_BLD, mlp_key, row_B, cfg)


# ---- the ends


def embed(embed_VD, token_BL):
    """Vocab-parallel lookup: each tp shard answers for its own rows; the sum leaves each a piece of
    the sequence."""
    row_BL = token_BL - lax.axis_index("tp") * embed_VD.shape[0]
    mine_BL = (row_BL >= 0) & (row_BL < embed_VD.shape[0])
    x_BLD = jnp.where(mine_BL[..., None], embed_VD[jnp.where(mine_BL, row_BL, 0)], 0)
    return lax.psum_scatter(x_BLD, "tp", scatter_dimension=1, tiled=True)


def logits(x_BLD, ends, cfg):
    """This tp shard's columns of the logits, float32."""
    x_BLD = rms_norm(x_BLD, ends["norm_D"], cfg)
    unembed_DV = ends["embed_VD"].T if cfg.model.tie_embeddings else ends["unembed_DV"]
    return jnp.einsum("BLD,DV->BLV", x_BLD, unembed_DV, preferred_element_type=jnp.float32)


def cross_entropy(x_BLD, target_BL, ends, cfg):
    """Negative log likelihood and log-partition of each token, in nats; no device holds a full row
    of logits."""
    logit_BLV = logits(lax.all_gather(x_BLD, "tp", axis=1, tiled=True), ends, cfg)
    top_BL = lax.pmax(lax.stop_gradient(logit_BLV).max(-1), "tp")
    z_BL = jnp.log(lax.psum(jnp.exp(logit_BLV - top_BL[..., None]).sum(-1), "tp")) + top_BL

    V = logit_BLV.shape[-1]
    col_BL = target_BL - lax.axis_index("tp") * V
    mine_BL = (col_BL >= 0) & (col_BL < V)
    hit_BL = jnp.take_along_axis(logit_BLV, jnp.where(mine_BL, col_BL, 0)[..., None], -1)[..., 0]
    return z_BL - lax.psum(jnp.where(mine_BL, hit_BL, 0), "tp"), z_BL


# ---- the whole model


def pipeline(stage, x_MBLD):
    """GPipe with rotating microbatches: n = pp * slots of them pass pp stages in n + pp - 1 ticks.

    Stage s starts with its own slots' microbatches, m = s * slots and on, and ends with the same
    ones finished.  In tick t it runs stage(x, m) on microbatch m = t - s and hands the result on.
    Slot t % slots turns one stage towards stage 0 once stage 0 has used its own, so that stage 0
    meets the microbatches in order; finished ones turn likewise after the last stage has stored
    them, and are home after the last tick.  A stage with nothing to do skips the work (all of a dp
    or tp group skip together, so collectives inside are safe).
    """
    pp, s, slots = lax.axis_size("pp"), lax.axis_index("pp"), x_MBLD.shape[0]
    onward = [(i, (i + 1) % pp) for i in range(pp)]
    back = [(i, (i - 1) % pp) for i in range(pp)]

    def tick(carry, t):
        x_BLD, todo_MBLD, done_MBLD = carry
        m, i, o = t - s, t % slots, (t - pp + 1) % slots
        x_BLD = jnp.where(s == 0, todo_MBLD[i], x_BLD)
        todo_MBLD = todo_MBLD.at[i].set(lax.ppermute(todo_MBLD[i], "pp", back))
        x_BLD = lax.cond((m >= 0) & (m < pp * slots), stage, lambda x_BLD, m: x_BLD, x_BLD, m)
        turned_BLD = lax.ppermute(done_MBLD[o], "pp", back)
        done_MBLD = done_MBLD.at[o].set(jnp.where(s == pp - 1, x_BLD, turned_BLD))
        return (lax.ppermute(x_BLD, "pp", onward), todo_MBLD, done_MBLD), None

    start = (jnp.zeros_like(x_MBLD[0]), x_MBLD, jnp.zeros_like(x_MBLD))
    return lax.scan(tick, start, jnp.arange(pp * slots + pp - 1))[0][2]


DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
REMAT = dict(
    none=lambda layer: layer,
    dots=partial(jax.checkpoint, policy=DOTS, prevent_cse=False),
    layer=partial(jax.checkpoint, prevent_cse=False),
)


def hidden(params, ends, token_MBL, cfg: Config, key=None, first_row=0):
    """The residual stream after the last layer, for this device's microbatches and piece of the
    sequence.

    key: dropout's, for this step; None for evaluation.
    first_row: the first microbatch's first row in the global batch.
    """
    slots, B, _ = token_MBL.shape
    pp, s, dp = lax.axis_size("pp"), lax.axis_index("pp"), lax.axis_size("dp")

    def fold(n):
        return None if key is None else jax.random.fold_in(key, n)

    def rows(m):
        """Rows of microbatch m in the global batch."""
        return first_row + (m * dp + lax.axis_index("dp")) * B + jnp.arange(B)

    def enter(token_BL, m):
        x_BLD = embed(ends["embed_VD"], token_BL)
        return dropout(x_BLD, fold(cfg.model.n_layers), rows(m), cfg)

    @REMAT[cfg.train.remat]
    def layer(x_BLD, w, n, row_B):
        return block(x_BLD, unshard(w, layer_table(cfg), cfg), cfg, fold(n), row_B)

    def stage(x_BLD, m):
        n_stage = cfg.model.n_layers // pp
        n_N = s * n_stage + jnp.arange(n_stage)

        def one_layer(x_BLD, wn):
            return layer(x_BLD, *wn, rows(m)), None

        return lax.scan(one_layer, x_BLD, (params["layers"], n_N))[0]

    x_MBLD = lax.map(lambda tm: enter(*tm), (token_MBL, s * slots + jnp.arange(slots)))
    return pipeline(stage, x_MBLD)


def token_nll(params, token_MBL, target_MBL, cfg: Config, key=None, first_row=0):
    """Negative log likelihood and log-partition (nats) of this device's share of the tokens, MBL
    each."""
    ends = unshard({name: params[name] for name in ends_table(cfg)}, ends_table(cfg), cfg)
    x_MBLD = hidden(params, ends, token_MBL, cfg, key, first_row)
    # Logits are the widest array: made anew, not kept.
    score = jax.checkpoint(partial(cross_entropy, cfg=cfg))
    return lax.map(lambda xt: score(*xt, ends), (x_MBLD, target_MBL))


# ---- decoding


@partial(jax.jit, static_argnames="cfg")
def next_logits(params, token_MBL, position_MB, cfg: Config):
    """Logits (MBV, float32) of the token after each row's given position, recomputed from the whole
    row."""
    rows = P("pp", "dp")

    @jax.shard_map(in_specs=(param_specs(cfg), rows, rows), out_specs=P("pp", "dp", "tp"))
    def per_device(params, token_MBL, position_MB):
        ends = unshard({name: params[name] for name in ends_table(cfg)}, ends_table(cfg), cfg)
        x_MBLD = lax.all_gather(hidden(params, ends, token_MBL, cfg), "tp", axis=2, tiled=True)
        x_MBD = jnp.take_along_axis(x_MBLD, position_MB[..., None, None], 2)[:, :, 0]
        return logits(x_MBD, ends, cfg)

    return per_device(params, token_MBL, position_MB)


def choose(logit_V, rng, temperature: float, top_k: int, top_p: float) -> int:
    """One token id: the likeliest at temperature 0, else drawn from the top_k likeliest (0: all)
    and of those from the fewest that hold top_p of the probability (Holtzman et al. 2020)."""
    if temperature == 0:
        return int(np.argmax(logit_V))
    order = np.argsort(-logit_V, kind="stable")[: top_k or None]
    prob = np.exp((logit_V[order] - logit_V[order[0]]).astype(np.float64) / temperature)
    prob /= prob.sum()
    n = int(np.searchsorted(np.cumsum(prob), top_p)) + 1
    return int(rng.choice(order[:n], p=prob[:n] / prob[:n].sum()))


def generate(
    params,
    prompts: list[list[int]],
    n_tokens: int,
    cfg: Config,
    *,
    vocab_size: int,
    stop_id: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
):
    """Continue each prompt (token ids, not empty) by up to n_tokens, ending before stop_id; yields
    the rows as they grow.

    Ids from vocab_size on, which only pad the embedding, are never drawn.  A row sees its last
    train.seq_len tokens.
    """
    dp, pp, _ = cfg.mesh.sizes
    B, L = -(-len(prompts) // (pp * dp)) * dp, cfg.train.seq_len
    sharding = NamedSharding(jax.sharding.get_mesh(), P("pp", "dp"))

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    rows, done = [list(p) for p in prompts], [False] * len(prompts)
    rngs = [np.random.default_rng([seed, n]) for n in range(len(prompts))]
    for _ in range(n_tokens):
        token_RL, position_R = np.zeros((pp * B, L), np.int32), np.zeros(pp * B, np.int32)
        for n, row in enumerate(rows):
            token_RL[n, : len(row[-L:])], position_R[n] = row[-L:], len(row[-L:]) - 1
        token_MBL, position_MB = put(token_RL.reshape(pp, B, L)), put(position_R.reshape(pp, B))
        logit_MBV = next_logits(params, token_MBL, position_MB, cfg)
        logit_MBV = np.asarray(multihost_utils.process_allgather(logit_MBV, tiled=True))
        logit_RV = logit_MBV.reshape(pp * B, -1)
        for n, row in enumerate(rows):
            if not done[n]:
                token = choose(logit_RV[n, :vocab_size], rngs[n], temperature, top_k, top_p)
                done[n] = token == stop_id
                row += [] if done[n] else [token]
        yield rows
        if all(done):
            return
