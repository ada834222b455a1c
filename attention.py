"""Attention: which keys a token sees, rotary positions, the kernels, and gqa and mla with their
weights.  The cache of keys and values is made and used in generate.py, and only updated here.  The
kernel in plain JAX is in blockwise.py.

Dimension key (a suffix on every array's name spells its logical shape):
  B  sequences   L  sequence length, of the queries   S  sequence length of the keys   D  d_model
  H  query heads   G  key and value heads   R  query heads per key head   K  head dim
  A  rotated pairs of elements   M  microbatches   1  a dim of size 1
  Q  R * L: the new tokens of all query heads of a key head
  k  in an einsum, the second K of a [K, K] array
mla:
  J  latent of the queries   I  latent of keys and values   T  rotary dim of a key   W  value dim
  C  what decoding caches of a token: I, behind it T, and on a TPU padding

Inside shard_map the letters still name the whole dims; a sharded dim is only as long as this
device's part.
"""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import layers
from architecture import Model
from blockwise import block_attention
from config import Config
from errors import USAGE, UserError, look_up
from layers import add_bias, einsum, rms_norm
from utils import GPUS, compute_capability, platform, warn_once, with_slices
from weights import Param, norm_gain, normal, zero_bias

# ---- what a token sees


class Span(NamedTuple):
    """The queries that a layer works on, and the keys that each may see."""

    index_BL: jax.Array
    """The index of each query in its row."""
    position_BL: jax.Array
    """The index of each query in its document."""
    document_BL: jax.Array | None = None
    """The document of each query; None where a row is one document."""
    document_BS: jax.Array | None = None
    """The document of each key."""
    row_B: jax.Array | None = None
    """The rows' numbers in the global batch, for dropout."""
    window: int = 0
    """How many keys back each query sees, itself included; 0 is all."""
    decoding: bool = False
    """The queries are new tokens at the ends of rows whose keys are in the cache."""
    prompt: bool = False
    """In decoding: the queries are whole rows, from their first token; no key is in the cache."""
    first_row: jax.Array | int = 0
    """In decoding: which row of the cache belongs to the first row of queries."""

    @property
    def tp_dim(self) -> int:
        """The dim of x_BLD that is sharded over tp: the sequence, or in decoding the rows."""
        return 0 if self.decoding else 1


def document_ids(token_BS, end_id: int):
    """(document_BS, position_BS): the number of each token's document in its row, from 0, and the
    token's place in it.  An end token belongs to the document that it ends."""
    end_BS = token_BS == end_id
    document_BS = jnp.cumsum(end_BS, 1) - end_BS
    index_S = jnp.arange(token_BS.shape[1])
    after_end_BS = jnp.where(end_BS, index_S + 1, 0)[:, :-1]
    start_BS = lax.cummax(jnp.pad(after_end_BS, ((0, 0), (1, 0))), axis=1)
    return document_BS, index_S - start_BS


def full_row_span(token_MBL, m, cfg: Config, first_row=0) -> Span:
    """The Span of microbatch m of token_MBL, whole rows.

    first_row: the number in the global batch of microbatch 0's first row.
    """
    _, B, L = token_MBL.shape
    index_BL = jnp.arange(L)[None]
    ranks = with_slices("dp")
    row_B = first_row + (m * lax.axis_size(ranks) + lax.axis_index(ranks)) * B + jnp.arange(B)
    if not cfg.data.document_mask:
        return Span(index_BL, index_BL, row_B=row_B)
    document_BL, position_BL = document_ids(token_MBL[m], cfg.data.end_id)
    return Span(index_BL, position_BL, document_BL, document_BL, row_B)


# ---- positions


def rope_frequencies(width, m):
    """Radians per token of each rotated pair of a head of that width.

    Linear scaling divides all frequencies by rope_factor (Chen et al. 2023).  Llama 3.1 and YaRN
    divide those of pairs that make few turns within rope_original tokens, and keep those with many.
    In between is a linear ramp: in turns for Llama 3.1 (its reference code), in the index of the
    pair for YaRN (Peng et al. 2023, section 3.2).
    """
    pair_A = np.arange(width // 2)
    freq_A = m.rope_theta ** (-2 * pair_A / width)
    if m.rope_scaling == "none":
        return freq_A
    if m.rope_scaling == "linear":
        return freq_A / m.rope_factor
    if m.rope_scaling == "llama3":
        turns_A = m.rope_original * freq_A / (2 * np.pi)
        unscaled_A = (turns_A - m.rope_low) / (m.rope_high - m.rope_low)
    else:
        ratios = (m.rope_original / (turns * 2 * np.pi) for turns in (m.rope_high, m.rope_low))
        start, end = (width / 2 * (np.log(x) / np.log(m.rope_theta)) for x in ratios)
        if m.yarn_truncate:
            start, end = np.floor(start), np.ceil(end)
        # Where both are outside of the range of pairs, end - start may be negative, as in
        # transformers.
        start, end = max(start, 0), min(end, width - 1)
        unscaled_A = 1 - (pair_A - start) / (end - start or 0.001)
    unscaled_A = np.clip(unscaled_A, 0, 1)
    return freq_A * unscaled_A + freq_A / m.rope_factor * (1 - unscaled_A)


def yarn_magnitudes(m) -> tuple[float, float]:
    """YaRN's factors for rotated queries and keys, and for all scores (section 3.3 of its paper,
    with DeepSeek's two mscales)."""
    if m.rope_scaling != "yarn":
        return 1.0, 1.0

    def magnitude(mscale):
        return 0.1 * mscale * math.log(max(m.rope_factor, 1)) + 1

    if m.yarn_mscale and m.yarn_mscale_all_dim:
        rotated = magnitude(m.yarn_mscale) / magnitude(m.yarn_mscale_all_dim)
    else:
        rotated = magnitude(1)
    return rotated, magnitude(m.yarn_mscale_all_dim) ** 2


def rope(x_BLHK, span: Span, cfg, width=None):
    """Rotary position embedding (Su et al. 2021) of the last `width` elements of each head (None:
    all), of which element i and element i + width/2 are a pair, as in Hugging Face's Llama.  (In
    Meta's own, neighbours are.)"""
    m, K = cfg.model, x_BLHK.shape[-1]
    width = width or K
    if m.positions != "rope":
        return x_BLHK
    if span.window and m.rope_local_theta:
        m = replace(m, rope_theta=m.rope_local_theta, rope_scaling="none")
    freq_A = rope_frequencies(width, m).astype(np.float32)
    angle_BLA = span.position_BL[..., None] * freq_A
    scale = yarn_magnitudes(m)[0]
    sin_BL1A = scale * jnp.sin(angle_BLA)[:, :, None]
    cos_BL1A = scale * jnp.cos(angle_BLA)[:, :, None]
    if platform() == "tpu":
        # A product with a matrix of 0, 1 and -1 swaps the elements of each pair.  If heads were
        # split, XLA would write their halves to memory, each padded to 128 elements, and read them
        # again: attention of jaxformer_1b would take 2.4 times the cycles.
        swap_KK = np.pad(np.kron([[0, 1], [-1, 0]], np.eye(width // 2)), (K - width, 0))
        # With a batch dim, because remat=dots keeps products that have none.
        swap_1KK = swap_KK[None].astype(x_BLHK.dtype)
        swapped_BLHK = jnp.einsum("aBLHK,aKk->aBLHk", x_BLHK[None], swap_1KK)[0]
        front = ((0, 0),) * 3 + ((K - width, 0),)
        sin_BL1K = jnp.pad(jnp.concatenate([sin_BL1A] * 2, -1), front)
        cos_BL1K = jnp.pad(jnp.concatenate([cos_BL1A] * 2, -1), front, constant_values=1)
        return (x_BLHK * cos_BL1K + swapped_BLHK * sin_BL1K).astype(x_BLHK.dtype)
    x32_BLHK = x_BLHK.astype(jnp.float32)
    fixed, a_BLHA, b_BLHA = jnp.split(x32_BLHK, [K - width, K - width // 2], axis=-1)
    halves = [a_BLHA * cos_BL1A - b_BLHA * sin_BL1A, b_BLHA * cos_BL1A + a_BLHA * sin_BL1A]
    return jnp.concatenate([fixed, *halves], -1).astype(x_BLHK.dtype)


# ---- kernels: softmax attention of queries, keys and values


def softmax_scale(m: Model) -> float:
    """The factor on the scores; with muP it falls as 1 / the width of a head (Yang et al. 2022,
    definition 4.1)."""
    scale = (m.attn_width or m.d_head + m.d_rope) ** -0.5 * yarn_magnitudes(m)[1]
    return scale * (m.mup_base_head / m.d_head) ** 0.5 if m.mup_base_head else scale


def decoding_attention(q_BLHK, k_BSGK, v_BSGW, span: Span, cfg, sink_H=None):
    """Attention of new tokens, whose first index differs by row, to the keys of a cache, in the
    cache's dtype.  All scores are in memory."""
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    y_dtype, q_BLHK = q_BLHK.dtype, q_BLHK.astype(k_BSGK.dtype)
    # Heads and new tokens are one dim (Q).  Apart, XLA would transpose a cache with one key head
    # (mla) for each token: 58 instead of 33 ms a token on a CPU (4 layers of 768, float32, 8 rows
    # of 1,024 tokens).
    q_BGQK = q_BLHK.reshape(B, L, G, -1, K).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, K)
    k_BGSK, v_BGSW = k_BSGK.swapaxes(1, 2), v_BSGW.swapaxes(1, 2)
    score_BGQS = einsum("BGQK,BGSK->BGQS", q_BGQK, k_BGSK, jnp.float32)
    score_BGRLS = score_BGQS.reshape(B, G, H // G, L, S)
    score_BGRLS *= softmax_scale(cfg.model)
    score_BGRLS = layers.softcap(score_BGRLS, cfg.model.attn_softcap)
    distance_BLS = span.index_BL[..., None] - jnp.arange(S)
    seen_BLS = (distance_BLS >= 0) & (distance_BLS < (span.window or S))
    if span.document_BL is not None:
        seen_BLS &= span.document_BL[..., None] == span.document_BS[:, None]
    score_BGRLS = jnp.where(seen_BLS[:, None, None], score_BGRLS, -1e30)
    if sink_H is not None:  # the score of one more key, whose probability is dropped
        sink_BGRL1 = jnp.broadcast_to(sink_H.reshape(G, -1, 1, 1), (B, G, H // G, L, 1))
        score_BGRLS = jnp.append(score_BGRLS, sink_BGRL1, -1)
    prob_BGRLS = jax.nn.softmax(score_BGRLS, -1)[..., :S]
    prob_BGQS = prob_BGRLS.astype(q_BLHK.dtype).reshape(B, G, -1, S)
    y_BGRLW = einsum("BGQS,BGSW->BGQW", prob_BGQS, v_BGSW).reshape(B, G, H // G, L, -1)
    return y_BGRLW.transpose(0, 3, 1, 2, 4).reshape(B, L, H, -1).astype(y_dtype)


def xla_attention(q_BLHK, k_BSGK, v_BSGW, span: Span, cfg, sink_H=None):
    """Plain JAX in blocks: supports every option on every platform."""
    options = dict(scale=softmax_scale(cfg.model), cap=cfg.model.attn_softcap, window=span.window)
    arrays = q_BLHK, k_BSGK, v_BSGW, span.document_BL, sink_H
    return block_attention(*arrays, loop=span.prompt, **options)


def cudnn_attention(q_BLHK, k_BSGK, v_BSGW, span: Span, cfg):
    """cuDNN's flash attention; a value head narrower than a key head (mla) is padded with zeros."""
    K, W = q_BLHK.shape[-1], v_BSGW.shape[-1]
    v_BSGK = jnp.pad(v_BSGW, ((0, 0),) * 3 + ((0, K - W),))
    options = dict(scale=softmax_scale(cfg.model), is_causal=True, implementation="cudnn")
    if span.window:
        options |= dict(local_window_size=(span.window - 1, 0))
    return jax.nn.dot_product_attention(q_BLHK, k_BSGK, v_BSGK, **options)[..., :W]


def splash_attention(q_BLHK, k_BSGK, v_BSGW, span: Span, cfg):
    """JAX's flash attention for TPUs, which leaves out blocks of keys that no query sees."""
    # A second of imports that no other platform needs.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    L, H = q_BLHK.shape[1:3]
    causal = masks.CausalMask((L, L))
    mask = masks.LocalMask((L, L), (span.window - 1, 0), 0) if span.window else causal
    size = next(n for n in (1024, 512, 256, 128) if L % n == 0)
    sizes = dict.fromkeys(("block_q", "block_q_dkv", "block_kv", "block_kv_dkv"), size)
    sizes |= dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), min(size, 512))
    blocks = splash.BlockSizes(**sizes, use_fused_bwd_kernel=True)
    options = dict(block_sizes=blocks, attn_logits_soft_cap=cfg.model.attn_softcap or None)
    kernel = splash.make_splash_mha_single_device(masks.MultiHeadMask([mask] * H), **options)
    segments = None
    if span.document_BL is not None:
        segments = splash.SegmentIds(span.document_BL, span.document_BS)
    run = jax.vmap(kernel)
    typed = layers.typed_kernel_outputs(splash, jax.typeof(q_BLHK).manual_axis_type)

    # JAX traces a backward pass after this function has returned, when the kernels declare plain
    # outputs again.  The functions of a custom_vjp can be `typed` each.
    @jax.custom_vjp
    @typed
    def run_typed(*args):
        return run(*args)

    @typed
    def forward(q_BHLK, k_BGSK, v_BGSW, segments):
        return jax.vjp(lambda *qkv: run(*qkv, segments), q_BHLK, k_BGSK, v_BGSW)

    @typed
    def backward(back, grad_BHLW):
        return *back(grad_BHLW), None

    run_typed.defvjp(forward, backward)
    scaled_BLHK = (q_BLHK * softmax_scale(cfg.model)).astype(q_BLHK.dtype)
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (scaled_BLHK, k_BSGK, v_BSGW)]
    return jnp.swapaxes(run_typed(*heads_first, segments), 1, 2)


KERNELS = dict(xla=xla_attention, cudnn=cudnn_attention, splash=splash_attention)
PLATFORMS = dict(cudnn=GPUS, splash=("tpu",))
"""Where the kernels run that do not run everywhere."""


def why_unsupported(kernel: str, q_BLHK, v_BSGW, span: Span, cfg: Config) -> str:
    """Why a kernel cannot do this attention, or "" where it can.  Every setting that a kernel lacks
    needs a line here: otherwise the kernel ignores it without a word."""
    if kernel == "xla":
        return ""
    L, K = q_BLHK.shape[1], q_BLHK.shape[3]
    places = PLATFORMS[kernel]
    limits = {f"runs on {places[0]}, and this is {platform()}": platform() not in places}
    limits |= {"has no attention sinks (model.attn_sinks)": cfg.model.attn_sinks}
    if kernel == "cudnn":
        capability = compute_capability()
        widest = 256 if capability >= 9 else 128
        limits |= {
            "needs an NVIDIA GPU of compute capability 8.0": capability < 8,
            "takes no value head wider than a key head": v_BSGW.shape[-1] > K,
            "has no score softcap (model.attn_softcap)": cfg.model.attn_softcap,
            "has no document mask (data.document_mask)": span.document_BL is not None,
            "needs train.dtype=bfloat16": q_BLHK.dtype != jnp.bfloat16,
            f"takes heads of a multiple of 8, up to {widest}, not {K}": K % 8 or widest < K,
        }
    else:
        limits |= {f"takes rows of a multiple of 128 tokens, not {L}": L % 128}
    return next((limit for limit, applies in limits.items() if applies), "")


def attend(q_BLHK, k_BSGK, v_BSGW, span: Span, cfg, sink_H=None):
    """Causal softmax attention: in training by the kernel that train.attention and the platform
    choose, of prompts by `xla_attention`, and of new tokens by `decoding_attention`.

    sink_H: of each query head, a score that no key has; None adds none.  H / G query heads share a
    key head.  Returns y_BLHW.
    Raises UserError USAGE where train.attention names a kernel that cannot do it.
    """
    if span.decoding:
        attention = xla_attention if span.prompt else decoding_attention
        return attention(q_BLHK, k_BSGK, v_BSGW, span, cfg, sink_H)
    best = next((name for name, places in PLATFORMS.items() if platform() in places), "xla")
    kernel = best if cfg.train.attention == "auto" else cfg.train.attention
    why = why_unsupported(kernel, q_BLHK, v_BSGW, span, cfg)
    if why:
        if kernel == cfg.train.attention:
            raise UserError(USAGE, f"train.attention={kernel} {why}", "set --train.attention auto")
        warn_once(f"attention is plain JAX, since {kernel} {why}")
    sinks = {} if sink_H is None else dict(sink_H=sink_H)
    attention = partial(KERNELS["xla" if why else kernel], span=span, cfg=cfg, **sinks)
    if cfg.train.remat == "attention":
        attention = jax.checkpoint(attention, prevent_cse=False)
    return attention(q_BLHK, k_BSGK, v_BSGW)


def score_stats(q_BLHK, k_BSGK, span: Span, cfg) -> dict:
    """With log.norms_every, a layer's statistic `logit`: the mean square of the scores of all pairs
    of a row's tokens, before softcap and mask, summed over this device's rows and heads.

    The sum over i, j of (q_i . k_j)^2 is <Q'Q, K'K>, which needs no scores.
    """
    if not cfg.log.norms_every or span.decoding:
        return {}
    B, L, H, K = q_BLHK.shape
    G = k_BSGK.shape[2]
    q_BLGRK = lax.stop_gradient(q_BLHK).reshape(B, L, G, H // G, K).astype(jnp.float32)
    k_BSGK = lax.stop_gradient(k_BSGK).astype(jnp.float32)
    q_BGKK = jnp.einsum("BLGRK,BLGRk->BGKk", q_BLGRK, q_BLGRK)
    k_BGKK = jnp.einsum("BSGK,BSGk->BGKk", k_BSGK, k_BSGK)
    return dict(logit=(q_BGKK * k_BGKK).sum() * (softmax_scale(cfg.model) / L) ** 2)


# ---- attention variants: tables of weights, and functions of (x_BLD, w, cfg, Span, cache)


def update_cache(cache, new: dict, span: Span) -> tuple[dict, dict]:
    """(cache, seen): the cache with the new keys and values at their places, and all that queries
    may see, in the order of `new`.  In a prompt, and without a cache (None), they see only `new`.

    The cache has its heads before its tokens, [rows, G, S, K], in the order of
    `decoding_attention`'s products: XLA would copy all of it for each token otherwise.  It may have
    more rows than the queries.  Of new tokens after a prompt, those for rows that it lacks are
    dropped: see pipeline.forward_pipeline's lock_step.
    """
    if cache is None:
        return new, new
    B, index_BL, written = len(span.index_BL), span.index_BL, new
    if span.prompt:  # which begins at 0

        def write_prompt(cache, new):
            new = jnp.moveaxis(new, 1, -2).astype(cache.dtype)
            start = span.first_row, *[0] * (new.ndim - 1)
            return lax.dynamic_update_slice(cache, new, start)

        return {name: write_prompt(cache[name], x) for name, x in new.items()}, new
    if index_BL.size == 1 and platform() == "cpu":
        # Written twice: XLA turns a single write into one that it repeats for each reader, in a
        # copy of the cache.  gpt2_124m with 1,024 tokens: 38 instead of 121 ms a token.
        index_BL, written = jax.tree.map(lambda x: jnp.repeat(x, 2, 1), (index_BL, new))

    row_B1 = span.first_row + jnp.arange(B)[:, None]

    def write(cache, new):
        if new.ndim != 4 or platform() == "cpu":  # a CPU takes microseconds for each index
            return cache.at[row_B1, ..., index_BL, :].set(new, mode="drop")
        # Heads by index too: if they were a slice, XLA would want them behind S on a TPU, and copy
        # the whole cache for each token, to that layout and back.
        at = row_B1[..., None], jnp.arange(new.shape[2]), index_BL[..., None]
        return cache.at[at].set(new, mode="drop")

    cache = {name: write(cache[name], x) for name, x in written.items()}
    seen = {n: lax.dynamic_slice_in_dim(x, span.first_row, B) for n, x in cache.items()}
    return cache, {name: jnp.moveaxis(x, -2, 1) for name, x in seen.items()}


def to_heads(D: int, H: int, K: int) -> Param:
    """A projection of D numbers to H heads of K."""
    return Param((D, H, K), P("dp", "tp", None), normal(D), rows=(0,), columns=(1, 2))


def from_heads(H: int, K: int, m: Model) -> Param:
    """A projection of H heads of K to the residual stream."""
    std = layers.to_residual(m, H * K)
    return Param((H, K, m.d_model), P("tp", None, "dp"), std, rows=(0, 1), columns=(2,))


def to_latent(D: int, I: int) -> Param:
    """A projection of D numbers to I that all heads share."""
    return Param((D, I), P("dp", None), normal(D), rows=(0,), columns=(1,))


QK_GAINS = dict(head=("q_norm_K", "k_norm_K"), all=("q_norm_HK", "k_norm_GK"))
"""model.qk_norm_width: the weights of the norms of queries and keys."""


def token_dim(span: Span) -> int:
    """The dim of x_BLD along which attention gathers tokens over tp.

    On GPUs they become more rows, and only the heads are reordered to whole sequences.  Otherwise
    XLA would copy x_BLD between layouts in each layer, and once more all that the layers keep of
    it: llama_1b on eight H200s (tp 8, remat=attention) needs 27.3 GiB instead of 29.9.  On TPUs
    reordering takes 7 % more cycles (llama_1b on v5p, dp 4, tp 2).
    """
    return 0 if platform() in GPUS else span.tp_dim


def whole_sequences(x_BL, span: Span):
    """What was computed from gathered tokens, as whole sequences."""
    return layers.rows_to_sequences(x_BL) if token_dim(span) < span.tp_dim else x_BL


def sum_heads(dims: str, y_BLHK, w_HKD, span: Span):
    """The heads' outputs times w_HKD, summed over tp; each shard keeps its part of the tokens."""
    y_BLHK = layers.sequences_to_rows(y_BLHK) if token_dim(span) < span.tp_dim else y_BLHK
    return layers.scatter_sum(einsum(dims, y_BLHK, w_HKD), "tp", token_dim(span))


def gqa_table(cfg: Config) -> dict:
    """The weights of `gqa`."""
    m, heads = cfg.model, P("tp", None)
    D, H, G, K = m.d_model, m.n_heads, m.n_kv_heads, m.d_head
    bias, gain = partial(zero_bias, spec=heads), partial(norm_gain, adds_one=m.norm_offset)
    table = dict(
        q_DHK=to_heads(D, H, K),
        k_DGK=to_heads(D, G, K),
        v_DGK=to_heads(D, G, K),
        o_HKD=from_heads(H, K, m),
    )
    if m.attn_bias:
        table |= dict(q_bias_HK=bias(H, K), k_bias_GK=bias(G, K), v_bias_GK=bias(G, K))
        table |= dict(o_bias_D=zero_bias(D)) if m.attn_out_bias else {}
    if m.attn_sinks:
        table |= dict(sink_H=zero_bias(H, spec=P("tp")))
    if m.qk_norm and m.qk_norm_width == "head":
        table |= dict(q_norm_K=gain(K), k_norm_K=gain(K))
    elif m.qk_norm:
        table |= dict(q_norm_HK=gain(H, K, spec=heads), k_norm_GK=gain(G, K, spec=heads))
    return table


def gqa(x_BLD, w, cfg, span: Span, cache):
    """Grouped-query attention (Ainslie et al. 2023).

    Returns y_BLD, the cache (without one the new keys and values), and `score_stats`.

    x is gathered over tp; the outputs of the heads are summed over tp and scattered.
    """
    x_BLD = layers.gather(x_BLD, "tp", token_dim(span))
    q_BLHK = add_bias(einsum("BLD,DHK->BLHK", x_BLD, w["q_DHK"]), w.get("q_bias_HK"))
    k_BLGK = add_bias(einsum("BLD,DGK->BLGK", x_BLD, w["k_DGK"]), w.get("k_bias_GK"))
    v_BLGK = add_bias(einsum("BLD,DGK->BLGK", x_BLD, w["v_DGK"]), w.get("v_bias_GK"))
    q_BLHK, k_BLGK, v_BLGK = (whole_sequences(x, span) for x in (q_BLHK, k_BLGK, v_BLGK))
    if cfg.model.qk_norm:
        q_gain, k_gain = (w[name] for name in QK_GAINS[cfg.model.qk_norm_width])
        q_BLHK = rms_norm(q_BLHK, q_gain, cfg.model.norm_eps)
        k_BLGK = rms_norm(k_BLGK, k_gain, cfg.model.norm_eps)
    q_BLHK = rope(q_BLHK, span, cfg)
    cache, kv = update_cache(cache, dict(k=rope(k_BLGK, span, cfg), v=v_BLGK), span)
    y_BLHK = attend(q_BLHK, kv["k"], kv["v"], span, cfg, w.get("sink_H"))
    y_BLD = sum_heads("BLHK,HKD->BLD", y_BLHK, w["o_HKD"], span)
    stats = score_stats(q_BLHK, kv["k"], span, cfg)
    return add_bias(y_BLD, w.get("o_bias_D")), cache, stats


def mla_table(cfg: Config) -> dict:
    """The weights of `mla`."""
    m = cfg.model
    D, H, K, J, I = m.d_model, m.n_heads, m.d_head, m.q_rank or m.d_model, m.kv_rank
    T, W, gain = m.d_rope, m.d_value, partial(norm_gain, adds_one=m.norm_offset)
    table = dict(
        q_JHK=to_heads(J, H, K),
        q_rope_JHT=to_heads(J, H, T),
        kv_down_DI=to_latent(D, I),
        kv_norm_I=gain(I),
        k_rope_DT=to_latent(D, T),
        k_IHK=to_heads(I, H, K),
        v_IHW=to_heads(I, H, W),
        o_HWD=from_heads(H, W, m),
    )
    if m.q_rank:
        table |= dict(q_down_DJ=to_latent(D, J), q_norm_J=gain(J))
    if m.attn_bias:
        table |= dict(kv_down_bias_I=zero_bias(I), k_rope_bias_T=zero_bias(T))
        table |= dict(o_bias_D=zero_bias(D))
        table |= dict(q_down_bias_J=zero_bias(J)) if m.q_rank else {}
    return table


def mla(x_BLD, w, cfg, span: Span, cache):
    """Multi-head latent attention (DeepSeek-V2, section 2.1; V3, section 2.1.1).

    Returns y_BLD, the cache (in training None), and `score_stats`.  The latents are gathered over
    tp and cached: kv_rank + d_rope numbers a token.
    """
    h_BLJ, c_BSI, k_BST = mla_latents(x_BLD, w, cfg, span)
    if span.decoding:
        # On a TPU padded to whole lanes of 128.  Without that XLA would store the tokens along the
        # lanes, and for each token copy the cache to the layout that it needs and back.
        C = cfg.model.kv_rank + cfg.model.d_rope
        n_pad = -C % 128 if platform() == "tpu" else 0
        ck_BLC = jnp.pad(jnp.concatenate([c_BSI, k_BST], -1), ((0, 0), (0, 0), (0, n_pad)))
        cache, seen = update_cache(cache, dict(ck=ck_BLC), span)
        c_BSI, k_BST, _ = jnp.split(seen["ck"], [cfg.model.kv_rank, C], -1)
    if span.decoding and h_BLJ.shape[1] == 1:
        y_BLHW, stats = attend_to_latents(h_BLJ, seen["ck"], w, cfg, span), {}
    else:
        y_BLHW, stats = attend_to_expanded(h_BLJ, c_BSI, k_BST, w, cfg, span)
    y_BLD = sum_heads("BLHW,HWD->BLD", y_BLHW, w["o_HWD"], span)
    return add_bias(y_BLD, w.get("o_bias_D")), cache, stats


def mla_latents(x_BLD, w, cfg, span: Span):
    """(h_BLJ, c_BLI, k_BLT): what queries are made from, the latent of keys and values, and the
    rotated part of a key, which all heads share.  Each tp shard makes those of its part of the
    sequence, and all are gathered."""
    h_BLJ = x_BLD
    eps = 1e-6  # of the latents' norms; DeepSeek's code does not take it from norm_eps either
    if cfg.model.q_rank:
        h_BLJ = add_bias(einsum("BLD,DJ->BLJ", x_BLD, w["q_down_DJ"]), w.get("q_down_bias_J"))
        h_BLJ = rms_norm(h_BLJ, w["q_norm_J"], eps)
    c_BLI = add_bias(einsum("BLD,DI->BLI", x_BLD, w["kv_down_DI"]), w.get("kv_down_bias_I"))
    c_BLI = rms_norm(c_BLI, w["kv_norm_I"], eps)
    k_BLT = add_bias(einsum("BLD,DT->BLT", x_BLD, w["k_rope_DT"]), w.get("k_rope_bias_T"))
    latents = (layers.gather(x, "tp", token_dim(span)) for x in (h_BLJ, c_BLI, k_BLT))
    h_BLJ, c_BLI, k_BLT = (whole_sequences(x, span) for x in latents)
    return h_BLJ, c_BLI, rope(k_BLT[:, :, None], span, cfg)[:, :, 0]


def attend_to_expanded(h_BLJ, c_BSI, k_BST, w, cfg, span: Span):
    """(y_BLHW, `score_stats`): attention to keys and values of each head, made from the latents."""
    m = cfg.model
    # Weights are joined, because joined heads would be written to memory once more.  On a TPU this
    # is a part of the 2.4 times in `rope`; on a CPU an update takes 1.5 % longer with it.
    q_JHK = jnp.concatenate([w["q_JHK"], w["q_rope_JHT"]], -1)
    k_IHK = jnp.pad(w["k_IHK"], ((0, 0), (0, 0), (0, m.d_rope)))
    q_BLHK = rope(einsum("BLJ,JHK->BLHK", h_BLJ, q_JHK), span, cfg, m.d_rope)
    k_BSK = jnp.pad(k_BST, ((0, 0), (0, 0), (m.d_head, 0)))
    # add_bias, because the gradient of the keys that heads share is a sum over heads.
    k_BSHK = add_bias(einsum("BSI,IHK->BSHK", c_BSI, k_IHK), k_BSK[:, :, None])
    v_BSHW = einsum("BSI,IHW->BSHW", c_BSI, w["v_IHW"])
    y_BLHW = attend(q_BLHK, k_BSHK, v_BSHW, span, cfg)
    return y_BLHW, score_stats(q_BLHK, k_BSHK, span, cfg)


def attend_to_latents(h_BLJ, ck_BSC, w, cfg, span: Span):
    """y_BLHW, as of `attend_to_expanded`, for one new token: it is cheaper to compare one query
    with latents than to expand them to all heads.

    The sum over values includes the rotated parts of keys, which are dropped afterwards: to leave
    them out before, XLA on a CPU would copy the whole cache (8 rows of 1,024 tokens took 1.3 times
    as long).
    """
    q_BLHK = einsum("BLJ,JHK->BLHK", h_BLJ, w["q_JHK"])
    q_BLHT = rope(einsum("BLJ,JHT->BLHT", h_BLJ, w["q_rope_JHT"]), span, cfg)
    q_BLHI = einsum("BLHK,IHK->BLHI", q_BLHK, w["k_IHK"])
    q_BLHC, ck_BS1C = jnp.concatenate([q_BLHI, q_BLHT], -1), ck_BSC[:, :, None]
    n_pad = ck_BSC.shape[-1] - q_BLHC.shape[-1]  # lanes, see mla
    q_BLHC = jnp.pad(q_BLHC, ((0, 0), (0, 0), (0, 0), (0, n_pad)))
    y_BLHI = attend(q_BLHC, ck_BS1C, ck_BS1C, span, cfg)[..., : cfg.model.kv_rank]
    return einsum("BLHI,IHW->BLHW", y_BLHI, w["v_IHW"])


ATTENTION = dict(gqa=(gqa_table, gqa), mla=(mla_table, mla))
"""model.attention: the table of its weights, and the function (x_BLD, w, cfg, Span, cache) ->
(y_BLD, the cache, statistics that are summed over devices).  In decoding without a cache the second
result is what a cache would keep of the tokens; in training it is not used."""


def attention_of(cfg: Config):
    """The entry of ATTENTION that model.attention names.  Raises UserError USAGE."""
    return look_up(ATTENTION, "model.attention", cfg.model.attention)
