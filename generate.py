"""Decoding: the cache of keys and values, and drawing tokens.

DIMS
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attention import Span, attention_of, document_ids
from config import Config
from layers import gather_over_dp, mark_varying, norm, tp_part
from model import hidden_states, layer_table, logits, param_specs, prepare_weights

# What the layers remember belongs to its device: [dp, pp, tp, *as the device holds it].
CACHE_SPEC = P("dp", "pp", "tp")


def empty_cache(params, cfg: Config, B: int, S: int) -> dict:
    """Room for S tokens of B rows in each of pp microbatches, in every layer."""

    def entries(kind, weights):
        """Keys and values of one token a row."""
        table = layer_table(cfg, kind)
        w = jax.tree.map(lambda x: x[0], weights)
        w = gather_over_dp(w, table) if cfg.mesh.fsdp == "layer" else w
        x_BLD = mark_varying(
            jnp.zeros((B // lax.axis_size("tp"), 1, cfg.model.d_model), cfg.train.dtype)
        )
        at = Span(jnp.zeros((B, 1), int), jnp.zeros((B, 1), int), split=0)
        return attention_of(cfg)[1](x_BLD, w, cfg, at, None)[1]

    def blank(n_microbatches, kinds):
        def of_kind(kind, weights):
            n = jax.tree.leaves(weights)[0].shape[0]
            new = jax.eval_shape(partial(entries, kind), weights)
            return {
                name: jnp.zeros((n_microbatches, n, B, S, *x.shape[2:]), x.dtype)
                for name, x in new.items()
            }

        return {kind: of_kind(kind, weights) for kind, weights in kinds.items()}

    memory = dict(layers=blank(lax.axis_size("pp"), params["layers"]))
    if "prefix" in params:
        memory |= dict(prefix=blank(1, params["prefix"]))
    return mark_varying(memory)


@partial(jax.jit, static_argnames=("n_new", "cfg"), donate_argnames="memory")
def next_logits(params, memory, token_MBS, length_MB, n_new: int, cfg: Config):
    """(logits of the token after each row (MBV, float32), memory).

    Row b of microbatch m is token_MBS[m, b, :length]; its last n_new tokens are new.  memory None
    has none of them, and n_new then counts from the rows' start.
    """
    rows = P("pp", "dp")

    @jax.shard_map(
        in_specs=(param_specs(cfg), CACHE_SPEC, rows, rows),
        out_specs=(P("pp", "dp", "tp"), CACHE_SPEC),
    )
    def per_device(params, memory, token_MBS, length_MB):
        first_MB = length_MB - n_new if memory else jnp.zeros_like(length_MB)
        index_MBL = first_MB[..., None] + jnp.arange(n_new)
        all_MBS = lax.all_gather(token_MBS, "pp", axis=0, tiled=True)
        all_MBL = lax.all_gather(index_MBL, "pp", axis=0, tiled=True)

        def span(m):
            index_BL = all_MBL[m]
            if not cfg.data.document_mask:
                return Span(index_BL, index_BL, split=0)
            document_BS, position_BS = document_ids(all_MBS[m], cfg.data.end_id)
            document_BL = jnp.take_along_axis(document_BS, index_BL, 1)
            position_BL = jnp.take_along_axis(position_BS, index_BL, 1)
            return Span(index_BL, position_BL, document_BL, document_BS, split=0)

        params, (_, B, S) = prepare_weights(params, cfg, cfg.train.dtype), token_MBS.shape
        memory = jax.tree.map(lambda x: x[0, 0, 0], memory) or empty_cache(params, cfg, B, S)
        new_MBL = jnp.take_along_axis(token_MBS, index_MBL, 2)
        x_MBLD, memory = hidden_states(params, new_MBL, span, cfg, memory)
        last_MB = tp_part(length_MB - 1 - first_MB, 1)
        x_MBD = jnp.take_along_axis(x_MBLD, last_MB[..., None, None], 2)[:, :, 0]
        x_MBD = norm(x_MBD, params, "norm", cfg)
        x_MBD = lax.all_gather(x_MBD, "tp", axis=1, tiled=True)
        return logits(x_MBD, params, cfg), jax.tree.map(lambda x: x[None, None, None], memory)

    return per_device(params, memory, token_MBS, length_MB)


def choose_token(logit_V, rng, temperature: float, top_k: int, top_p: float) -> int:
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

    Ids from vocab_size on are never drawn.  What a row's layers remember is kept, so that a step
    runs its newest token only; a row that has filled train.seq_len goes on from its last half.
    """
    dp, pp, tp = cfg.mesh.sizes
    B = -(-len(prompts) // (pp * dp * tp)) * dp * tp
    home = NamedSharding(jax.sharding.get_mesh(), P("pp", "dp"))

    def room(n):
        """Powers of two, so that few programs are compiled."""
        return min(cfg.train.seq_len, 1 << (n - 1).bit_length())

    def put(x):
        x = x.reshape(pp, B, *x.shape[1:])
        return jax.make_array_from_callback(x.shape, home, lambda at: x[at])

    rows, done = [list(p) for p in prompts], [False] * len(prompts)
    begin, S = [0] * len(prompts), room(max(map(len, prompts)) + n_tokens)
    rngs = [np.random.default_rng([seed, n]) for n in range(len(prompts))]
    memory = None
    for _ in range(n_tokens):
        for n, row in enumerate(rows):
            if len(row) - begin[n] > S:
                begin[n], memory = len(row) - max(1, S // 2), None
        token_RS, length_R = np.zeros((pp * B, S), np.int32), np.ones(pp * B, np.int32)
        for n, row in enumerate(rows):
            length_R[n] = len(row) - begin[n]
            token_RS[n, : length_R[n]] = row[begin[n] :]
        n_new = 1 if memory else room(int(length_R.max()))
        logit_MBV, memory = next_logits(params, memory, put(token_RS), put(length_R), n_new, cfg)
        logit_MBV = np.asarray(multihost_utils.process_allgather(logit_MBV, tiled=True))
        logit_RV = logit_MBV.reshape(pp * B, -1)
        for n, row in enumerate(rows):
            if not done[n]:
                token = choose_token(logit_RV[n, :vocab_size], rngs[n], temperature, top_k, top_p)
                done[n] = token == stop_id
                row += [] if done[n] else [token]
        yield rows
        if all(done):
            return
