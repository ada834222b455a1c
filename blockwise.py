"""Causal attention in blocks of queries, in plain JAX: the scores of a long row are never in memory
as a whole, and blocks of keys that are all later, or all before the window, cost nothing.

It serves CPUs, and what the kernels in attention.py do not support.  Algorithm and gradient are
those of FlashAttention-2 (Dao 2023, section 3.1).

Dimension key (a suffix on every array's name spells its logical shape):
  B  sequences   L  sequence length   H  query heads   G  key and value heads   K  head dim
  W  value dim   R  query heads per key head   P  pairs of a sequence and a key head
  X  L * R: the R queries of the first token, then those of the second, and so on
  Z  queries of a block   S  the keys that they are compared with   1  a dim of size 1
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from layers import multiply, softcap
from utils import platform


class Options(NamedTuple):
    """What is computed, and in which portions."""

    scale: float
    """Factor on the scores."""
    cap: float
    """Bound on the scores; 0 sets none."""
    window: int
    """How many keys back each query sees, itself included; 0 is all."""
    heads: int
    """R, the query heads per key head."""
    block: int
    """Tokens whose queries are a block; rows are padded to a multiple of it."""
    unrolled: bool
    """True: a block of queries is compared with all of its keys at once, and the program has code
    for each block.  False: one loop compares a block of queries with a block of keys."""
    pairs_at_once: int
    """How many of the P pairs are computed at once; it divides P."""


def choose_options(
    P: int, R: int, L: int, scale: float, cap: float, window: int, loop: bool
) -> Options:
    """Portions for rows of L tokens: on a CPU the fastest of a study, elsewhere not measured.

    The program has a bounded size: on a CPU always a loop, elsewhere at most 16 blocks up to 4,096
    tokens, and a loop for longer rows.  loop: a loop for all rows, for programs that have none over
    layers, such as that of a prompt.

    On an Intel Xeon attention of rows of 128 and 256 tokens takes 1.5 and 1.2 times as many CPU
    seconds unrolled as with the loop.  A CPU's cache should hold the scores of a portion: in a
    study of 16 rows of 256 tokens, with 8 query and 4 key heads of 32, all pairs at once took 1.7
    times as long.
    """
    on_cpu = platform() == "cpu"
    unrolled = not on_cpu and L <= 4096 and not loop
    block = min(L, (64 if L <= 256 else 128) if on_cpu else 256 if unrolled else 512)
    room = 2**17 // (R * block**2)  # half a megabyte of scores
    divisors = [n for n in range(1, P + 1) if P % n == 0]
    pairs_at_once = max(n for n in divisors if n <= max(1, room)) if on_cpu else P
    return Options(scale, cap, window, R, block, unrolled, pairs_at_once)


class Part(NamedTuple):
    """A part of arrays: some of the P pairs, which are their first dim, and a range of another
    dim."""

    start: tuple
    sizes: tuple

    def start_in(self, x, dim: int) -> list:
        start = [0] * x.ndim
        start[0], start[dim] = self.start
        return start

    def cut(self, x, dim: int = 1):
        sizes = list(x.shape)
        sizes[0], sizes[dim] = self.sizes
        return lax.dynamic_slice(x, self.start_in(x, dim), sizes)

    def put(self, x, new, dim: int = 1):
        return lax.dynamic_update_slice(x, new, self.start_in(x, dim))

    def add(self, x, new, dim: int = 1):
        return self.put(x, self.cut(x, dim) + new, dim)


def visit_blocks(visit: Callable, carry, P: int, L: int, how: Options):
    """The last carry of carry = visit(carry, queries, keys), called for each block of queries with
    the keys that it sees, in one or more calls.  queries is a Part of arrays [P, X, ...], and keys
    one of arrays [P, L, ...].

    The first call of a block has its own keys: each query sees itself there, so that its running
    maximum is that of scores that count.
    """
    starts, groups = range(0, L, how.block), range(0, P, how.pairs_at_once)
    first_key = {i: max(0, i - how.window + 1) if how.window else 0 for i in starts}

    def visit_part(carry, p, i, j, n_keys):
        queries = Part((p, i * how.heads), (how.pairs_at_once, how.block * how.heads))
        return visit(carry, queries, Part((p, j), (how.pairs_at_once, n_keys)))

    if how.unrolled:
        for p, (i, j) in product(groups, first_key.items()):
            carry = visit_part(carry, p, i, j, i + how.block - j)
        return carry
    blocks = [(i, j) for i in starts for j in range(i, first_key[i] - how.block, -how.block)]
    block_starts = jnp.array(blocks)

    def visit_next(carry, n):
        group, block = n // len(blocks), n % len(blocks)
        return visit_part(carry, group * how.pairs_at_once, *block_starts[block], how.block), None

    return lax.scan(visit_next, carry, jnp.arange(len(groups) * len(blocks)))[0]


def block_scores(
    q_PZK, k_PSK, queries: Part, keys: Part, documents, how: Options, keys_first=False
):
    """(score_PZS, seen_PZS): the scores of these queries with these keys, float32, and which of
    them count; with keys_first both are [P, S, Z]."""
    products = ("PSK,PZK->PSZ", k_PSK, q_PZK) if keys_first else ("PZK,PSK->PZS", q_PZK, k_PSK)
    score = softcap(how.scale * multiply(*products, jnp.float32), how.cap)
    Z, S = q_PZK.shape[1], k_PSK.shape[1]
    token_Z = queries.start[1] // how.heads + np.arange(Z) // how.heads
    # Not np.arange(S): the unrolled form would hold each block's mask as a constant.
    distance_1ZS = (token_Z[:, None] - (keys.start[1] + jnp.arange(S)))[None]
    seen_PZS = distance_1ZS >= 0
    if how.window:
        seen_PZS &= distance_1ZS < how.window
    if documents is not None:
        document_PX, document_PL = documents
        seen_PZS &= queries.cut(document_PX)[..., None] == keys.cut(document_PL)[:, None]
    return score, seen_PZS.swapaxes(1, 2) if keys_first else seen_PZS


def forward(q_PXK, k_PLK, v_PLW, documents, sink_PX, how: Options):
    """(y_PXW, saved): the output, and what `backward` needs: the arguments, the output, and z_PX,
    the logarithm of the sum of the scores' exponentials."""

    def add_keys(sums, queries, keys):
        y_PZW, total_PZ1, max_PZ1 = map(queries.cut, sums)
        q_PZK, k_PSK, v_PSW = queries.cut(q_PXK), keys.cut(k_PLK), keys.cut(v_PLW)
        score_PZS, seen_PZS = block_scores(q_PZK, k_PSK, queries, keys, documents, how)
        score_PZS = jnp.where(seen_PZS, score_PZS, -1e30)
        new_max_PZ1 = jnp.maximum(max_PZ1, score_PZS.max(-1, keepdims=True))
        exp_PZS = jnp.exp(score_PZS - new_max_PZ1)
        rescale_PZ1 = jnp.exp(max_PZ1 - new_max_PZ1)  # the sums are relative to the old maximum
        new_PZW = multiply("PZS,PSW->PZW", exp_PZS.astype(v_PSW.dtype), v_PSW, jnp.float32)
        y_PZW = rescale_PZ1 * y_PZW + new_PZW
        total_PZ1 = rescale_PZ1 * total_PZ1 + exp_PZS.sum(-1, keepdims=True)
        return tuple(map(queries.put, sums, (y_PZW, total_PZ1, new_max_PZ1)))

    (P, X, _), L = q_PXK.shape, k_PLK.shape[1]
    zeros = partial(jnp.zeros_like, q_PXK, jnp.float32)  # varies over mesh axes as q does
    y_PXW, zero_PX1 = zeros(shape=(P, X, v_PLW.shape[-1])), zeros(shape=(P, X, 1))
    total_PX1, max_PX1 = zero_PX1, zero_PX1 - 1e30
    if sink_PX is not None:  # as if each query had seen a key of this score, and of value 0
        total_PX1, max_PX1 = zero_PX1 + 1, zero_PX1 + sink_PX[..., None]
    y_PXW, total_PX1, max_PX1 = visit_blocks(add_keys, (y_PXW, total_PX1, max_PX1), P, L, how)
    y_PXW = (y_PXW / total_PX1).astype(q_PXK.dtype)
    z_PX = (max_PX1 + jnp.log(total_PX1))[..., 0]
    return y_PXW, (q_PXK, k_PLK, v_PLW, documents, sink_PX, y_PXW, z_PX)


def backward(how: Options, saved, g_PXW):
    """The gradients of the arguments of `forward`, from g, the gradient of y.

    Scores are [keys, queries] here, and q's gradient is [K, X]: with both the other way round XLA
    on a CPU takes 1.4 times as long for the products that give the gradients.
    """
    q_PXK, k_PLK, v_PLW, documents, sink_PX, y_PXW, z_PX = saved
    dtype = q_PXK.dtype
    y_dot_g_PX = (y_PXW.astype(jnp.float32) * g_PXW).sum(-1)

    def add_gradients(grads, queries, keys):
        q_PZK, g_PZW, z_PZ, y_dot_g_PZ = map(queries.cut, (q_PXK, g_PXW, z_PX, y_dot_g_PX))
        k_PSK, v_PSW = keys.cut(k_PLK), keys.cut(v_PLW)
        score_PSZ, seen_PSZ = block_scores(
            q_PZK, k_PSK, queries, keys, documents, how, keys_first=True
        )
        # `forward` may have rounded the scores in another way.  Those in the millions can then be
        # so far above z that the exponential would be infinite.
        prob_PSZ = jnp.exp(jnp.minimum(score_PSZ - z_PZ[:, None], 0))
        prob_PSZ = jnp.where(seen_PSZ, prob_PSZ, 0)
        prob_grad_PSZ = multiply("PSW,PZW->PSZ", v_PSW, g_PZW, jnp.float32)
        grad_PSZ = prob_PSZ * (prob_grad_PSZ - y_dot_g_PZ[:, None])
        if how.cap:
            grad_PSZ *= 1 - (score_PSZ / how.cap) ** 2
        grad_PSZ, prob_PSZ = (how.scale * grad_PSZ).astype(dtype), prob_PSZ.astype(dtype)
        q_grad_PKZ = multiply("PSK,PSZ->PKZ", k_PSK, grad_PSZ, jnp.float32)
        k_grad_PSK = multiply("PSZ,PZK->PSK", grad_PSZ, q_PZK, jnp.float32)
        v_grad_PSW = multiply("PSZ,PZW->PSW", prob_PSZ, g_PZW, jnp.float32)
        q_grad_PKX, *kv_grads = grads
        q_grad_PKX = queries.add(q_grad_PKX, q_grad_PKZ, dim=2)
        return q_grad_PKX, *map(keys.add, kv_grads, (k_grad_PSK, v_grad_PSW))

    (P, L, _), q_PKX = k_PLK.shape, q_PXK.swapaxes(1, 2)
    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (q_PKX, k_PLK, v_PLW))
    q_grad_PKX, *kv_grads = visit_blocks(add_gradients, zeros, P, L, how)
    grads = [x.astype(dtype) for x in (q_grad_PKX.swapaxes(1, 2), *kv_grads)]
    return *grads, None, None if sink_PX is None else -jnp.exp(sink_PX - z_PX) * y_dot_g_PX


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend_in_blocks(q_PXK, k_PLK, v_PLW, documents, sink_PX, how: Options):
    """y_PXW.  Its own backward pass, because JAX's would keep the scores."""
    return forward(q_PXK, k_PLK, v_PLW, documents, sink_PX, how)[0]


attend_in_blocks.defvjp(forward, backward)


def block_attention(
    q_BLHK, k_BLGK, v_BLGW, document_BL, sink_H, scale: float, cap: float, window: int, loop: bool
):
    """y_BLHW, the causal softmax attention of whole rows; see Options for scale, cap and window,
    and `choose_options` for loop.  H / G query heads share a key head.

    document_BL: the document of each token, which sees no other; None: each row is one document.
    sink_H: each head's score for attending to no key, float32; None: no sinks.
    """
    (B, L, H, K), (G, W) = q_BLHK.shape, v_BLGW.shape[2:]
    R, P = H // G, B * G
    how = choose_options(P, R, L, scale, cap, window, loop)

    def pad(x):
        """x with rows of a multiple of the block; no query sees the padding, which comes last."""
        return jnp.pad(x, ((0, 0), (0, -L % how.block), *((0, 0),) * (x.ndim - 2)))

    q_PXK = pad(q_BLHK).reshape(B, -1, G, R, K).swapaxes(1, 2).reshape(P, -1, K)
    k_PLK = pad(k_BLGK).swapaxes(1, 2).reshape(P, -1, K)
    v_PLW = pad(v_BLGW).swapaxes(1, 2).reshape(P, -1, W)
    documents = sink_PX = None
    if document_BL is not None:
        document_PL = jnp.repeat(pad(document_BL), G, 0)
        documents = jnp.repeat(document_PL, R, 1), document_PL
    if sink_H is not None:
        sink_PX = jnp.tile(sink_H.reshape(G, R), (B, k_PLK.shape[1]))
    y_PXW = attend_in_blocks(q_PXK, k_PLK, v_PLW, documents, sink_PX, how)
    y_BLGRW = y_PXW.reshape(B, G, -1, R, W).swapaxes(1, 2)
    return y_BLGRW.reshape(B, -1, H, W)[:, :L]
