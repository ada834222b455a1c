"""Causal attention in blocks of queries, in plain JAX: the scores of a long row are never in memory
as a whole, and blocks of keys that are all later, or all before the window, cost nothing.

It serves CPUs, and what the kernels in attention.py do not support.  Algorithm and gradient are
those of FlashAttention-2 (Dao 2023, section 3.1).

Dimension key (a suffix on every array's name spells its logical shape):
  B  sequences   L  sequence length   H  query heads   G  key and value heads   K  head dim
  W  value dim   R  query heads per key head   P  pairs of a sequence and a key head
  Q  queries of a block   S  the keys that they are compared with   1  a dim of size 1
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
    block: int
    """Queries in a block; rows are padded to a multiple of it."""
    unrolled: bool
    """True: a block meets all of its keys at once, and each block is another part of the program.
    False: one loop, in which a block of queries meets a block of keys."""
    pairs_at_once: int
    """How many of the P pairs are computed at once; it divides P."""


def choose_options(
    P: int, R: int, L: int, scale: float, cap: float, window: int, loop: bool
) -> Options:
    """Portions for rows of L tokens: on a CPU the fastest of a study, elsewhere not measured.

    The program has a bounded size: on a CPU always a loop, elsewhere at most 16 blocks up to 4,096
    tokens, and a loop for longer rows.  loop: a loop for all rows, for programs that have none over
    layers, such as that of a prompt.

    On an Intel Xeon updates of models of 2 to 24 million parameters took 0.75 to 1.02 times as many
    CPU seconds with the loop as unrolled, and compiled in 0.22 to 1.05 times as many.  A CPU's
    cache should hold the scores of a portion: in a study of 16 rows of 256 tokens, with 8 query and
    4 key heads of 32, all pairs at once took 1.7 times as long.
    """
    on_cpu = platform() == "cpu"
    unrolled = not on_cpu and L <= 4096 and not loop
    block = min(L, (64 if L <= 256 else 128) if on_cpu else 256 if unrolled else 512)
    room = 2**17 // (R * block**2)  # half a megabyte of scores
    divisors = [n for n in range(1, P + 1) if P % n == 0]
    pairs_at_once = max(n for n in divisors if n <= max(1, room)) if on_cpu else P
    return Options(scale, cap, window, block, unrolled, pairs_at_once)


slice_at, update_at = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


def add_at(x, new, start, dim: int):
    return update_at(x, slice_at(x, start, new.shape[dim], dim) + new, start, dim)


def visit_blocks(visit: Callable, carry, L: int, how: Options):
    """The last carry of carry = visit(carry, i, j, n), called for each block of queries, from index
    i on, with the keys that it sees, in one or more calls: the n keys from index j on.

    The first call of a block has its own keys: each query sees itself there, so that its running
    maximum is that of scores that count.
    """
    starts = range(0, L, how.block)
    first_key = {i: max(0, i - how.window + 1) if how.window else 0 for i in starts}
    if how.unrolled:
        for i, j in first_key.items():
            carry = visit(carry, i, j, i + how.block - j)
        return carry
    block_starts = [(i, j) for i in starts for j in range(i, first_key[i] - how.block, -how.block)]

    def visit_next(carry, start):
        return visit(carry, *start, how.block), None

    return lax.scan(visit_next, carry, jnp.array(block_starts))[0]


def block_scores(q_PRQK, k_PSK, document_PL, i, j, how: Options):
    """(score_PRQS, seen_P1QS): the scores of the queries from index i on with the keys from index j
    on, float32, and which of them count."""
    Q, S = q_PRQK.shape[2], k_PSK.shape[1]
    score_PRQS = how.scale * multiply("PRQK,PSK->PRQS", q_PRQK, k_PSK, jnp.float32)
    distance_QS = i + jnp.arange(Q)[:, None] - (j + jnp.arange(S))
    seen_P1QS = (distance_QS >= 0)[None, None]
    if how.window:
        seen_P1QS &= distance_QS < how.window
    if document_PL is not None:
        document_PQ, document_PS = slice_at(document_PL, i, Q, 1), slice_at(document_PL, j, S, 1)
        seen_P1QS &= (document_PQ[..., None] == document_PS[:, None])[:, None]
    return softcap(score_PRQS, how.cap), seen_P1QS


def forward(q_PRLK, k_PLK, v_PLW, document_PL, sink_PR, how: Options):
    """(y_PRLW, z_PRL1): the output, and the logarithm of the sum of the scores' exponentials."""

    def add_keys(sums, i, j, n):
        y_PRQW, total_PRQ1, max_PRQ1 = (slice_at(x, i, how.block, 2) for x in sums)
        q_PRQK, k_PSK = slice_at(q_PRLK, i, how.block, 2), slice_at(k_PLK, j, n, 1)
        v_PSW = slice_at(v_PLW, j, n, 1)
        score_PRQS, seen_P1QS = block_scores(q_PRQK, k_PSK, document_PL, i, j, how)
        score_PRQS = jnp.where(seen_P1QS, score_PRQS, -1e30)
        new_max_PRQ1 = jnp.maximum(max_PRQ1, score_PRQS.max(-1, keepdims=True))
        exp_PRQS = jnp.exp(score_PRQS - new_max_PRQ1)
        rescale_PRQ1 = jnp.exp(max_PRQ1 - new_max_PRQ1)  # the sums are relative to the old maximum
        new_PRQW = multiply("PRQS,PSW->PRQW", exp_PRQS.astype(v_PSW.dtype), v_PSW, jnp.float32)
        new = (
            rescale_PRQ1 * y_PRQW + new_PRQW,
            rescale_PRQ1 * total_PRQ1 + exp_PRQS.sum(-1, keepdims=True),
            new_max_PRQ1,
        )
        return tuple(update_at(x, y, i, 2) for x, y in zip(sums, new, strict=True))

    *PRL, _ = q_PRLK.shape
    zeros = partial(jnp.zeros_like, q_PRLK, jnp.float32)  # varies over mesh axes as q does
    y_PRLW, zero_PRL1 = zeros(shape=(*PRL, v_PLW.shape[-1])), zeros(shape=(*PRL, 1))
    total_PRL1, max_PRL1 = zero_PRL1, zero_PRL1 - 1e30
    if sink_PR is not None:  # as if each query had seen a key of this score, and of value 0
        total_PRL1, max_PRL1 = zero_PRL1 + 1, zero_PRL1 + sink_PR[..., None, None]
    start = y_PRLW, total_PRL1, max_PRL1
    y_PRLW, total_PRL1, max_PRL1 = visit_blocks(add_keys, start, PRL[-1], how)
    return (y_PRLW / total_PRL1).astype(q_PRLK.dtype), max_PRL1 + jnp.log(total_PRL1)


def backward(q_PRLK, k_PLK, v_PLW, document_PL, sink_PR, y_PRLW, z_PRL1, g_PRLW, how: Options):
    """The gradients of q, k, v and sink, from g, the gradient of y."""
    dtype = q_PRLK.dtype
    y_dot_g_PRL1 = (y_PRLW.astype(jnp.float32) * g_PRLW).sum(-1, keepdims=True)

    def add_gradients(grads, i, j, n):
        q_PRQK, g_PRQW, z_PRQ1, y_dot_g_PRQ1 = (
            slice_at(x, i, how.block, 2) for x in (q_PRLK, g_PRLW, z_PRL1, y_dot_g_PRL1)
        )
        k_PSK, v_PSW = slice_at(k_PLK, j, n, 1), slice_at(v_PLW, j, n, 1)
        score_PRQS, seen_P1QS = block_scores(q_PRQK, k_PSK, document_PL, i, j, how)
        prob_PRQS = jnp.where(seen_P1QS, jnp.exp(score_PRQS - z_PRQ1), 0)
        prob_grad_PRQS = multiply("PRQW,PSW->PRQS", g_PRQW, v_PSW, jnp.float32)
        grad_PRQS = prob_PRQS * (prob_grad_PRQS - y_dot_g_PRQ1)
        if how.cap:
            grad_PRQS *= 1 - (score_PRQS / how.cap) ** 2
        grad_PRQS, prob_PRQS = (how.scale * grad_PRQS).astype(dtype), prob_PRQS.astype(dtype)
        # One sum over R and Q, which XLA on a CPU does faster than two.
        P, S = k_PSK.shape[:2]
        grad_PQS, prob_PQS = grad_PRQS.reshape(P, -1, S), prob_PRQS.reshape(P, -1, S)
        q_PQK, g_PQW = (x.reshape(P, -1, x.shape[-1]) for x in (q_PRQK, g_PRQW))
        q_grad, k_grad, v_grad = grads
        return (
            add_at(q_grad, multiply("PRQS,PSK->PRQK", grad_PRQS, k_PSK, jnp.float32), i, 2),
            add_at(k_grad, multiply("PQS,PQK->PSK", grad_PQS, q_PQK, jnp.float32), j, 1),
            add_at(v_grad, multiply("PQS,PQW->PSW", prob_PQS, g_PQW, jnp.float32), j, 1),
        )

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (q_PRLK, k_PLK, v_PLW))
    grads = visit_blocks(add_gradients, zeros, q_PRLK.shape[2], how)
    sink_grad_PR = None
    if sink_PR is not None:
        sink_prob_PRL1 = jnp.exp(sink_PR[..., None, None] - z_PRL1)
        sink_grad_PR = -(sink_prob_PRL1 * y_dot_g_PRL1).sum((2, 3))
    return *(x.astype(dtype) for x in grads), sink_grad_PR


def map_pairs(f: Callable, arrays: tuple, pairs_at_once: int):
    """f(*arrays), computed for some of the P pairs, their first dim, at a time."""
    groups = jax.tree.map(lambda x: x.reshape(-1, pairs_at_once, *x.shape[1:]), arrays)
    if len(groups[0]) == 1:
        return f(*arrays)
    results = lax.map(lambda group: f(*group), groups)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend_in_blocks(q_PRLK, k_PLK, v_PLW, document_PL, sink_PR, how: Options):
    """y_PRLW.  Its own backward pass, because JAX's would keep the scores."""
    return attend_forward(q_PRLK, k_PLK, v_PLW, document_PL, sink_PR, how)[0]


def attend_forward(q_PRLK, k_PLK, v_PLW, document_PL, sink_PR, how):
    inputs = q_PRLK, k_PLK, v_PLW, document_PL, sink_PR
    y_PRLW, z_PRL1 = map_pairs(partial(forward, how=how), inputs, how.pairs_at_once)
    return y_PRLW, (*inputs, y_PRLW, z_PRL1)


def attend_backward(how, saved, g_PRLW):
    *grads, sink_grad = map_pairs(partial(backward, how=how), (*saved, g_PRLW), how.pairs_at_once)
    return *grads, None, sink_grad


attend_in_blocks.defvjp(attend_forward, attend_backward)


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

    q_BLGRK = pad(q_BLHK).reshape(B, -1, G, R, K)
    q_PRLK = q_BLGRK.transpose(0, 2, 3, 1, 4).reshape(P, R, -1, K)
    k_PLK = pad(k_BLGK).swapaxes(1, 2).reshape(P, -1, K)
    v_PLW = pad(v_BLGW).swapaxes(1, 2).reshape(P, -1, W)
    document_PL = None if document_BL is None else jnp.repeat(pad(document_BL), G, 0)
    sink_PR = None if sink_H is None else jnp.tile(sink_H.reshape(G, R), (B, 1))
    y_PRLW = attend_in_blocks(q_PRLK, k_PLK, v_PLW, document_PL, sink_PR, how)
    y_BLGRW = y_PRLW.reshape(B, G, R, -1, W).transpose(0, 3, 1, 2, 4)
    return y_BLGRW.reshape(B, -1, H, W)[:, :L]
