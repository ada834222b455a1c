"""Attention: what a token may see, rotary positions, the kernels, gqa and mla.

DIMS
"""

import functools
import math
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from config import USAGE, Config, UserError, or_list
from layers import (
    Param,
    add_bias,
    einsum,
    norm_gain,
    normal,
    platform,
    rms_norm,
    softcap,
    zero_bias,
)
from utils import warn


def gqa_table(cfg: Config) -> dict:
    m = cfg.model
    D, H, G, K, N = m.d_model, m.n_heads, m.n_kv_heads, m.d_head, m.n_layers
    table = dict(
        q_DHK=Param((D, H, K), P("dp", "tp", None), normal(D)),
        k_DGK=Param((D, G, K), P("dp", "tp", None), normal(D)),
        v_DGK=Param((D, G, K), P("dp", "tp", None), normal(D)),
        o_HKD=Param((H, K, D), P("tp", None, "dp"), normal(2 * N * H * K)),
    )
    if m.attn_bias:
        spec = P("tp", None)
        table |= dict(
            q_bias_HK=zero_bias(H, K, spec=spec),
            k_bias_GK=zero_bias(G, K, spec=spec),
            v_bias_GK=zero_bias(G, K, spec=spec),
            o_bias_D=zero_bias(D),
        )
    if m.qk_norm:
        table |= dict(q_norm_K=norm_gain(K), k_norm_K=norm_gain(K))
    return table


def mla_table(cfg: Config) -> dict:
    m = cfg.model
    D, H, K, N, J, I = m.d_model, m.n_heads, m.d_head, m.n_layers, m.q_rank or m.d_model, m.kv_rank
    T, W = m.d_rope, m.d_value
    table = dict(
        q_JHK=Param((J, H, K), P("dp", "tp", None), normal(J)),
        q_rope_JHT=Param((J, H, T), P("dp", "tp", None), normal(J)),
        kv_down_DI=Param((D, I), P("dp", None), normal(D)),
        kv_norm_I=norm_gain(I),
        k_rope_DT=Param((D, T), P("dp", None), normal(D)),
        k_IHK=Param((I, H, K), P("dp", "tp", None), normal(I)),
        v_IHW=Param((I, H, W), P("dp", "tp", None), normal(I)),
        o_HWD=Param((H, W, D), P("tp", None, "dp"), normal(2 * N * H * W)),
    )
    if m.q_rank:
        table |= dict(q_down_DJ=Param((D, J), P("dp", None), normal(D)), q_norm_J=norm_gain(J))
    if m.attn_bias:
        table |= dict(
            kv_down_bias_I=zero_bias(I), k_rope_bias_T=zero_bias(T), o_bias_D=zero_bias(D)
        )
        table |= dict(q_down_bias_J=zero_bias(J)) if m.q_rank else {}
    return table


class Span(NamedTuple):
    """The tokens that a layer works on, and what they may see."""

    index_BL: jax.Array
    """Where each query stands in its row."""
    position_BL: jax.Array
    """..and in its document."""
    document_BL: jax.Array | None = None
    """The documents of the queries, and of all that is in their rows; None is one a row."""
    document_BS: jax.Array | None = None
    row_B: jax.Array | None = None
    """Rows of the global batch, for dropout."""
    split: int = 1
    """The dim of x_BLD that is spread over tp: the sequence, or in decoding the rows."""
    window: int = 0
    """Keys in reach, the query's own included; 0 is all."""


def document_ids(token_BS, end_id: int):
    """(document_BS, position_BS): each token's document, from 0, and its place there.  An end
    belongs to the document that it ends."""
    end_BS = token_BS == end_id
    document_BS = jnp.cumsum(end_BS, 1) - end_BS
    index_S = jnp.arange(token_BS.shape[1])
    after_BS = jnp.where(end_BS, index_S + 1, 0)[:, :-1]
    start_BS = lax.cummax(jnp.pad(after_BS, ((0, 0), (1, 0))), axis=1)
    return document_BS, index_S - start_BS


def rope_frequencies(width, m):
    """Radians a token of each pair of elements.

    Those that turn seldom within rope_original tokens are slowed by rope_factor, those that turn
    often are kept, and between them is a ramp: over turns in Llama 3.1 (its reference code), over
    pairs in YaRN (Peng et al. 2023, section 3.2).
    """
    pair = np.arange(width // 2)
    freq = m.rope_theta ** (-2 * pair / width)
    if m.rope_scaling == "none":
        return freq
    if m.rope_scaling == "llama3":
        turns = m.rope_original * freq / (2 * np.pi)
        kept = (turns - m.rope_low) / (m.rope_high - m.rope_low)
    else:

        def pair_of(turns):
            log_ratio = np.log(m.rope_original / (turns * 2 * np.pi)) / np.log(m.rope_theta)
            return width / 2 * log_ratio

        first = max(np.floor(pair_of(m.rope_high)), 0)
        last = min(np.ceil(pair_of(m.rope_low)), width - 1)
        kept = 1 - (pair - first) / max(last - first, 0.001)
    kept = np.clip(kept, 0, 1)
    return freq * kept + freq / m.rope_factor * (1 - kept)


def yarn_magnitudes(m) -> tuple[float, float]:
    """YaRN's factors of rotated queries and keys, and of all scores (there section 3.3; DeepSeek's
    two mscales)."""
    if m.rope_scaling != "yarn":
        return 1.0, 1.0

    def g(mscale):
        return 0.1 * mscale * math.log(max(m.rope_factor, 1)) + 1

    both = m.yarn_mscale and m.yarn_mscale_all_dim
    turned = g(m.yarn_mscale) / g(m.yarn_mscale_all_dim) if both else g(1)
    return turned, g(m.yarn_mscale_all_dim) ** 2


def rope(x_BLHK, at: Span, cfg):
    """Rotary position embedding (Su et al. 2021), pairing element i with i + K/2 as Llama does."""
    m = cfg.model
    if m.positions == "learned":
        return x_BLHK
    freq_K = rope_frequencies(x_BLHK.shape[-1], m).astype(np.float32)
    angle_BLK = at.position_BL[..., None] * freq_K
    size = yarn_magnitudes(m)[0]
    sin, cos = size * jnp.sin(angle_BLK)[:, :, None], size * jnp.cos(angle_BLK)[:, :, None]
    a, b = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHK.dtype)


def xla_attention(q_BLHK, k_BSGK, v_BSGW, at: Span, cfg, width: int):
    """All of `attend`, with the scores in memory."""
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    # Heads before the sequence: so turned first, the matmuls take three quarters of the time.
    q_BGRLK = q_BLHK.reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k_BGSK, v_BGSW = k_BSGK.swapaxes(1, 2), v_BSGW.swapaxes(1, 2)
    score_BGRLS = einsum("BGRLK,BGSK->BGRLS", q_BGRLK, k_BGSK, jnp.float32)
    score_BGRLS *= width**-0.5 * yarn_magnitudes(cfg.model)[1]
    score_BGRLS = softcap(score_BGRLS, cfg.model.attn_softcap)
    ahead_BLS = at.index_BL[..., None] - jnp.arange(S)
    seen_BLS = (ahead_BLS >= 0) & (ahead_BLS < (at.window or S))
    if at.document_BL is not None:
        seen_BLS &= at.document_BL[..., None] == at.document_BS[:, None]
    prob_BGRLS = jax.nn.softmax(jnp.where(seen_BLS[:, None, None], score_BGRLS, -1e30), -1)
    y_BGRLW = einsum("BGRLS,BGSW->BGRLW", prob_BGRLS.astype(q_BLHK.dtype), v_BGSW)
    return y_BGRLW.transpose(0, 3, 1, 2, 4).reshape(B, L, H, -1)


def cudnn_attention(q_BLHK, k_BSGK, v_BSGW, at: Span, cfg, width: int):
    """cuDNN's flash attention; a value head narrower than a key head (mla) is filled up."""
    K, W = q_BLHK.shape[-1], v_BSGW.shape[-1]
    v_BSGK = jnp.pad(v_BSGW, ((0, 0),) * 3 + ((0, K - W),))
    y_BLHK = jax.nn.dot_product_attention(
        q_BLHK,
        k_BSGK,
        v_BSGK,
        scale=width**-0.5 * yarn_magnitudes(cfg.model)[1],
        is_causal=True,
        local_window_size=(at.window - 1, 0) if at.window else None,
        implementation="cudnn",
    )
    return y_BLHK[..., :W]


def splash_attention(q_BLHK, k_BSGK, v_BSGW, at: Span, cfg, width: int, interpret=False):
    """JAX's flash attention for TPUs, which leaves out the blocks that no query sees."""
    # A second of imports that no other platform needs.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    L, H = q_BLHK.shape[1:3]
    one = masks.LocalMask((L, L), (at.window - 1, 0), 0) if at.window else masks.CausalMask((L, L))
    size = next(n for n in (1024, 512, 256, 128) if L % n == 0)
    q = dict(block_q=size, block_q_dkv=size)
    kv = dict(block_kv=size, block_kv_dkv=size)
    at_once = dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), min(size, 512))
    scaled_BLHK = (q_BLHK * (width**-0.5 * yarn_magnitudes(cfg.model)[1])).astype(q_BLHK.dtype)
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (scaled_BLHK, k_BSGK, v_BSGW)]
    if at.document_BL is not None:
        heads_first.append(splash.SegmentIds(at.document_BL, at.document_BS))

    class Shape(jax.ShapeDtypeStruct):
        """The kernel's outputs differ from device to device as q does, which it does not say, and
        shard_map asks."""

        def __init__(self, shape, dtype):
            super().__init__(shape, dtype, manual_axis_type=jax.typeof(q_BLHK).manual_axis_type)

        @staticmethod
        def like(x):
            return Shape(x.shape, x.dtype)

    class Jax:
        ShapeDtypeStruct = Shape

        def __getattr__(self, name):
            return getattr(jax, name)

    splash.jax = Jax()
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([one] * H),
        block_sizes=splash.BlockSizes(**q, **kv, **at_once, use_fused_bwd_kernel=True),
        attn_logits_soft_cap=cfg.model.attn_softcap or None,
        interpret=interpret,
    )
    return jnp.swapaxes(jax.vmap(kernel)(*heads_first), 1, 2)


def why_unsupported(kernel: str, q_BLHK, v_BSGW, at: Span, cfg: Config) -> str:
    """Why the kernel cannot do this attention, or ""."""
    L, K, half = q_BLHK.shape[1], q_BLHK.shape[3], q_BLHK.dtype == jnp.bfloat16
    home = dict(cudnn=("gpu", "cuda"), splash=("tpu",))[kernel]
    lacks = {
        f"runs on {home[0]}, and this is {platform()}": platform() not in home,
        "is for whole rows, not for decoding": at.split == 0,
    }
    if kernel == "cudnn":
        found = str(getattr(jax.devices()[0], "compute_capability", "9.0"))  # a plan's is Hopper
        capability = float(found) if re.fullmatch(r"\d+\.\d+", found) else 0.0  # AMD's is a name
        widest = 256 if capability >= 9 else 128
        lacks |= {
            "needs an NVIDIA GPU of compute capability 8.0": capability < 8,
            "takes no value head wider than a key head": v_BSGW.shape[-1] > K,
            "has no score softcap (model.attn_softcap)": cfg.model.attn_softcap,
            "has no document mask (data.document_mask)": at.document_BL is not None,
            "needs train.dtype=bfloat16": not half,
            f"takes heads of a multiple of 8, up to {widest}, not {K}": K % 8 or widest < K,
        }
    else:
        lacks |= {f"takes rows of a multiple of 128 tokens, not {L}": L % 128}
    return next((why for why, so in lacks.items() if so), "")


@functools.cache
def warn_once(text: str):
    warn(text)


def attend(q_BLHK, k_BSGK, v_BSGW, at: Span, cfg, width: int):
    """Causal softmax attention by the kernel that train.attention and the platform name; scores
    over sqrt(width), and H / G query heads share a key head.  Raises UserError USAGE."""
    best = dict(gpu="cudnn", cuda="cudnn", tpu="splash").get(platform(), "xla")
    kernel = best if cfg.train.attention == "auto" else cfg.train.attention
    why = kernel != "xla" and why_unsupported(kernel, q_BLHK, v_BSGW, at, cfg)
    if why and at.split == 1:
        if kernel == cfg.train.attention:
            raise UserError(USAGE, f"train.attention={kernel} {why}", "set --train.attention auto")
        warn_once(f"attention is plain XLA, since {kernel} {why}")
    kernels = dict(xla=xla_attention, cudnn=cudnn_attention, splash=splash_attention)
    f = partial(kernels["xla" if why else kernel], at=at, cfg=cfg, width=width)
    if cfg.train.remat == "attention":
        f = jax.checkpoint(f, prevent_cse=False)
    return f(q_BLHK, k_BSGK, v_BSGW)


def update_cache(memory, new: dict, at: Span) -> dict:
    """What there is of keys and values once the new tokens' are put into memory; None has none."""
    if memory is None:
        return new
    row_B1 = jnp.arange(at.index_BL.shape[0])[:, None]
    return {name: memory[name].at[row_B1, at.index_BL].set(x) for name, x in new.items()}


def gqa(x_BLD, w, cfg, at: Span, memory):
    """Grouped-query attention (Ainslie et al. 2023).

    x is gathered over tp, and the heads' outputs summed and scattered.
    """
    x_BLD = lax.all_gather(x_BLD, "tp", axis=at.split, tiled=True)
    q_BLHK = add_bias(einsum("BLD,DHK->BLHK", x_BLD, w["q_DHK"]), w.get("q_bias_HK"))
    k_BLGK = add_bias(einsum("BLD,DGK->BLGK", x_BLD, w["k_DGK"]), w.get("k_bias_GK"))
    v_BLGK = add_bias(einsum("BLD,DGK->BLGK", x_BLD, w["v_DGK"]), w.get("v_bias_GK"))
    if cfg.model.qk_norm:
        q_BLHK = rms_norm(q_BLHK, w["q_norm_K"], cfg.model.norm_eps)
        k_BLGK = rms_norm(k_BLGK, w["k_norm_K"], cfg.model.norm_eps)
    q_BLHK = rope(q_BLHK, at, cfg)
    kv = update_cache(memory, dict(k_BSGK=rope(k_BLGK, at, cfg), v_BSGK=v_BLGK), at)
    y_BLHK = attend(q_BLHK, kv["k_BSGK"], kv["v_BSGK"], at, cfg, cfg.model.d_head)
    y_BLD = einsum("BLHK,HKD->BLD", y_BLHK, w["o_HKD"])
    y_BLD = lax.psum_scatter(y_BLD, "tp", scatter_dimension=at.split, tiled=True)
    return add_bias(y_BLD, w.get("o_bias_D")), kv


def mla(x_BLD, w, cfg, at: Span, memory):
    """Multi-head latent attention (DeepSeek-V2, section 2.1; V3, section 2.1.1).

    The latents are made from the local sequence, and they are what is gathered over tp and what is
    remembered: kv_rank + d_rope numbers a token.
    """
    m, h_BLJ = cfg.model, x_BLD
    eps = 1e-6  # of the latents' norms: DeepSeek's code has it apart from norm_eps
    if m.q_rank:
        h_BLJ = add_bias(einsum("BLD,DJ->BLJ", x_BLD, w["q_down_DJ"]), w.get("q_down_bias_J"))
        h_BLJ = rms_norm(h_BLJ, w["q_norm_J"], eps)
    c_BLI = add_bias(einsum("BLD,DI->BLI", x_BLD, w["kv_down_DI"]), w.get("kv_down_bias_I"))
    c_BLI = rms_norm(c_BLI, w["kv_norm_I"], eps)
    k_BLT = add_bias(einsum("BLD,DT->BLT", x_BLD, w["k_rope_DT"]), w.get("k_rope_bias_T"))
    h_BLJ = lax.all_gather(h_BLJ, "tp", axis=at.split, tiled=True)
    c_BLI = lax.all_gather(c_BLI, "tp", axis=at.split, tiled=True)
    k_BLT = lax.all_gather(k_BLT, "tp", axis=at.split, tiled=True)

    q_BLHK = einsum("BLJ,JHK->BLHK", h_BLJ, w["q_JHK"])
    q_BLHT = rope(einsum("BLJ,JHT->BLHT", h_BLJ, w["q_rope_JHT"]), at, cfg)
    kv = update_cache(
        memory, dict(c_BSI=c_BLI, k_BST=rope(k_BLT[:, :, None], at, cfg)[:, :, 0]), at
    )
    c_BSI, k_BST = kv["c_BSI"], kv["k_BST"]
    width = m.d_head + m.d_rope
    if q_BLHK.shape[1] > 1:
        k_BSHK = einsum("BSI,IHK->BSHK", c_BSI, w["k_IHK"])
        k_BSHT = jnp.broadcast_to(k_BST[:, :, None], (*k_BSHK.shape[:3], m.d_rope))
        v_BSHW = einsum("BSI,IHW->BSHW", c_BSI, w["v_IHW"])
        q, k = jnp.concatenate([q_BLHK, q_BLHT], -1), jnp.concatenate([k_BSHK, k_BSHT], -1)
        y_BLHW = attend(q, k, v_BSHW, at, cfg, width)
    else:  # for one query it is cheaper to meet the latents than to unfold them all
        q_BLHI = einsum("BLHK,IHK->BLHI", q_BLHK, w["k_IHK"])
        q, k = jnp.concatenate([q_BLHI, q_BLHT], -1), jnp.concatenate([c_BSI, k_BST], -1)
        y_BLHI = attend(q, k[:, :, None], c_BSI[:, :, None], at, cfg, width)
        y_BLHW = einsum("BLHI,IHW->BLHW", y_BLHI, w["v_IHW"])
    y_BLD = einsum("BLHW,HWD->BLD", y_BLHW, w["o_HWD"])
    y_BLD = lax.psum_scatter(y_BLD, "tp", scatter_dimension=at.split, tiled=True)
    return add_bias(y_BLD, w.get("o_bias_D")), kv


# model.attention: its weights, and the function (x_BLD, weights, cfg, Span, memory) -> (y_BLD, kv).
ATTENTION = dict(
    gqa=(gqa_table, gqa),
    mla=(mla_table, mla),
)


def attention_of(cfg: Config):
    """The line of ATTENTION that cfg names.  Raises UserError USAGE."""
    if cfg.model.attention not in ATTENTION:
        what = f"model.attention={cfg.model.attention!r} is no attention of model.py"
        raise UserError(USAGE, what, f"set --model.attention to {or_list(ATTENTION)}")
    return ATTENTION[cfg.model.attention]


def full_row_span(token_MBL, m, cfg: Config, first_row=0) -> Span:
    """The Span of whole rows, of microbatch m of them all.

    first_row: microbatch 0's first row in the global batch.
    """
    _, B, L = token_MBL.shape
    index_BL = jnp.arange(L)[None]
    row_B = first_row + (m * lax.axis_size("dp") + lax.axis_index("dp")) * B + jnp.arange(B)
    if not cfg.data.document_mask:
        return Span(index_BL, index_BL, row_B=row_B)
    document_BL, position_BL = document_ids(token_MBL[m], cfg.data.end_id)
    return Span(index_BL, position_BL, document_BL, document_BL, row_B)
