"""Decoding: the cache of keys and values, the logits of the next token, and drawing tokens.

Dimension key (a suffix on every array's name spells its logical shape):
  M  microbatches, one for each stage   B  sequences   L  sequence length of the new tokens
  S  sequence length of the cache   D  d_model   V  vocabulary   N  layers
  R  rows: sequences of all microbatches

Inside shard_map a letter that the array's PartitionSpec maps to a mesh axis is the local part.
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

CACHE_SPEC = P("dp", "pp", "tp")
"""Each device has a cache of its own: [dp, pp, tp, *the shape on a device]."""


def empty_cache(params, cfg: Config, B: int, S: int) -> dict:
    """Room for S tokens of B rows in each microbatch, in the form of params: [M, N, B, S, ...]."""

    def one_token(kind, weights):
        """The entries of a layer's cache for one token a row."""
        w = jax.tree.map(lambda x: x[0], weights)
        w = gather_over_dp(w, layer_table(cfg, kind)) if cfg.mesh.fsdp == "layer" else w
        shape = B // lax.axis_size("tp"), 1, cfg.model.d_model
        x_BLD = mark_varying(jnp.zeros(shape, cfg.train.dtype))
        at = Span(jnp.zeros((B, 1), int), jnp.zeros((B, 1), int), decoding=True)
        _, attention = attention_of(cfg)
        return attention(x_BLD, w, cfg, at, None)[1]

    def group_cache(M, group):
        cache = {}
        for kind, weights in group.items():
            N = jax.tree.leaves(weights)[0].shape[0]
            new = jax.eval_shape(partial(one_token, kind), weights)
            cache[kind] = {
                name: jnp.zeros((M, N, B, S, *x.shape[2:]), x.dtype) for name, x in new.items()
            }
        return cache

    cache = dict(layers=group_cache(lax.axis_size("pp"), params["layers"]))
    if "prefix" in params:  # a stage runs the prefix for its own microbatch only
        cache |= dict(prefix=group_cache(1, params["prefix"]))
    return mark_varying(cache)


@partial(jax.jit, static_argnames=("n_new", "cfg"), donate_argnames="cache")
def next_logits(params, cache, token_MBS, length_MB, n_new: int, cfg: Config):
    """(logit_MBV, cache): the logits of the token after each row, float32.

    Row b of microbatch m is token_MBS[m, b, :length].  With a cache its last n_new tokens are new;
    without one (None) all are, and n_new is at least the longest length.
    """
    row_spec = P("pp", "dp")

    @jax.shard_map(
        in_specs=(param_specs(cfg), CACHE_SPEC, row_spec, row_spec),
        out_specs=(P("pp", "dp", "tp"), CACHE_SPEC),
    )
    def per_device(params, cache, token_MBS, length_MB):
        start_MB = jnp.zeros_like(length_MB) if cache is None else length_MB - n_new
        index_MBL = start_MB[..., None] + jnp.arange(n_new)
        all_MBS = lax.all_gather(token_MBS, "pp", axis=0, tiled=True)
        all_MBL = lax.all_gather(index_MBL, "pp", axis=0, tiled=True)

        def make_span(m):
            index_BL = all_MBL[m]
            if not cfg.data.document_mask:
                return Span(index_BL, index_BL, decoding=True)
            document_BS, position_BS = document_ids(all_MBS[m], cfg.data.end_id)
            document_BL = jnp.take_along_axis(document_BS, index_BL, 1)
            position_BL = jnp.take_along_axis(position_BS, index_BL, 1)
            return Span(index_BL, position_BL, document_BL, document_BS, decoding=True)

        params, (_, B, S) = prepare_weights(params, cfg, cfg.train.dtype), token_MBS.shape
        if cache is None:
            cache = empty_cache(params, cfg, B, S)
        else:
            cache = jax.tree.map(lambda x: x[0, 0, 0], cache)
        new_MBL = jnp.take_along_axis(token_MBS, index_MBL, 2)
        x_MBLD, cache = hidden_states(params, new_MBL, make_span, cfg, cache)
        last_MB = tp_part(length_MB - 1 - start_MB, 1)
        x_MBD = jnp.take_along_axis(x_MBLD, last_MB[..., None, None], 2)[:, :, 0]
        x_MBD = norm(x_MBD, params, "norm", cfg)
        x_MBD = lax.all_gather(x_MBD, "tp", axis=1, tiled=True)
        return logits(x_MBD, params, cfg), jax.tree.map(lambda x: x[None, None, None], cache)

    return per_device(params, cache, token_MBS, length_MB)


def choose_token(logit_V, rng, temperature: float, top_k: int, top_p: float) -> int:
    """One token id: the most likely one at temperature 0, else one drawn from the top_k most likely
    (0: from all), and of these from the smallest set that has at least top_p of the probability
    (Holtzman et al. 2020)."""
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
    """Continue each prompt (token ids, at least one) by up to n_tokens, ending before stop_id;
    yields the rows as they grow.

    Ids from vocab_size on are never drawn.  A step computes only the newest token of each row, from
    cached keys and values.  When a row gets longer than train.seq_len, the model goes on with its
    last half, as if it began there.
    """
    dp, pp, tp = cfg.mesh.sizes
    B = -(-len(prompts) // (pp * dp * tp)) * dp * tp
    sharding = NamedSharding(jax.sharding.get_mesh(), P("pp", "dp"))

    def padded_length(n):
        """The next power of two, so that few programs are compiled."""
        return min(cfg.train.seq_len, 1 << (n - 1).bit_length())

    def put(x):
        x = x.reshape(pp, B, *x.shape[1:])
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    rows, done = [list(prompt) for prompt in prompts], [False] * len(prompts)
    seen_from, S = [0] * len(prompts), padded_length(max(map(len, prompts)) + n_tokens)
    rngs = [np.random.default_rng([seed, n]) for n in range(len(prompts))]
    cache = None
    for _ in range(n_tokens):
        for n, row in enumerate(rows):
            if len(row) - seen_from[n] > S:
                seen_from[n], cache = len(row) - max(1, S // 2), None
        token_RS, length_R = np.zeros((pp * B, S), np.int32), np.ones(pp * B, np.int32)
        for n, row in enumerate(rows):
            length_R[n] = len(row) - seen_from[n]
            token_RS[n, : length_R[n]] = row[seen_from[n] :]
        n_new = padded_length(int(length_R.max())) if cache is None else 1
        logit_MBV, cache = next_logits(params, cache, put(token_RS), put(length_R), n_new, cfg)
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
