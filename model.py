"""A decoder-only transformer, written as the code that one device runs.

Dimension key (a suffix on every array's name spells its logical shape):
  A  accumulation slices   M  pipeline microbatches    K  head dim
  B  sequences             L  sequence length (S: keys' length)
  D  d_model   F  d_ff, d_expert   V  vocab rows   N  layers   C  gate and up, or only up
  H  query heads   G  key and value heads   R  query heads per key head
  J  queries' latent   I  keys' and values' latent   T  rotary key dim   W  value dim  (mla)
  E  experts   X  experts of a token   U  pairs of token and expert   Q  tokens of all sequences
  O  places for pairs   Z  an expert's slots, rows of a tile   Y  tiles

Mesh axes: dp (batch; weights rest sharded over it), pp (layers; tokens rest by microbatch, and are
scored by parts of the sequence), tp (heads, d_ff, vocab, and the sequence wherever an array is
x_BLD).  Inside shard_map a letter that its PartitionSpec maps to a mesh axis is the local piece.
`grep -E "lax.p|lax.all_|_rows"` lists all communication.  What `all_rows` gives has pieces of
sequences for B, and their length for L.
"""

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from config import USAGE, Config, UserError, layer_kinds, listed, n_blocks
from utils import AXES, leaf_table, warn

# AMBL: tokens and targets as they rest; in evaluation a stage embeds and scores its own.
TOKENS = P(None, "pp", "dp", None)

INPUT = "a layer's input"  # its name for train.remat

# ---- the parameter table


@dataclass(frozen=True)
class Param:
    """One weight: shape, where it rests, how it starts, and whether weight decay pulls at it.

    wide: it stays float32 in use.  own: each dp rank uses its own part, and gathers nothing.
    """

    shape: tuple[int, ...]
    spec: P
    init: Callable
    decay: bool = True
    wide: bool = False
    own: bool = False


def normal(fan_in):
    return lambda key, shape: fan_in**-0.5 * jax.random.normal(key, shape)


def norm_gain(dim):
    return Param((dim,), P(None), lambda key, shape: jnp.ones(shape), decay=False)


def vector(*shape, spec=None):
    """A bias: zero at first."""
    spec = spec or P(*[None] * len(shape))
    return Param(shape, spec, lambda key, shape: jnp.zeros(shape), decay=False)


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
            q_bias_HK=vector(H, K, spec=spec),
            k_bias_GK=vector(G, K, spec=spec),
            v_bias_GK=vector(G, K, spec=spec),
            o_bias_D=vector(D),
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
        table |= dict(kv_down_bias_I=vector(I), k_rope_bias_T=vector(T), o_bias_D=vector(D))
        table |= dict(q_down_bias_J=vector(J)) if m.q_rank else {}
    return table


def mlp_table(cfg: Config, F: int, name: str = "") -> dict:
    m = cfg.model
    D, N, C = m.d_model, m.n_layers, 1 + (m.activation == "swiglu")
    table = {
        f"{name}in_CDF": Param((C, D, F), P(None, "dp", "tp"), normal(D)),
        f"{name}out_FD": Param((F, D), P("tp", "dp"), normal(2 * N * F)),
    }
    if m.mlp_bias and not name:
        table |= dict(in_bias_CF=vector(C, F, spec=P(None, "tp")), out_bias_D=vector(D))
    return table


def moe_table(cfg: Config) -> dict:
    m = cfg.model
    D, N, E, F, C = m.d_model, m.n_layers, m.n_experts, m.d_expert, 1 + (m.activation == "swiglu")
    own = cfg.mesh.experts == "alltoall"
    up, down = P(None, "dp", None, "tp"), P(None, "tp", "dp")
    if own:
        up, down = P("dp", None, None, "tp"), P("dp", "tp", None)
    table = dict(
        router_DE=Param((D, E), P("dp", None), normal(D), wide=True),
        in_EDCF=Param((E, D, C, F), up, normal(D), own=own),
        out_EFD=Param((E, F, D), down, normal(2 * N * F), own=own),
    )
    if m.router_bias:
        table |= dict(router_bias_E=vector(E))
    if m.n_shared:
        table |= mlp_table(cfg, m.n_shared * F, "shared_")
    return table


def norm_table(cfg: Config, name: str = "norm") -> dict:
    D = cfg.model.d_model
    table = {f"{name}_D": norm_gain(D)}
    return table | {f"{name}_bias_D": vector(D)} if cfg.model.norm_bias else table


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
        return p if p.own else replace(p, spec=spec)

    return jax.tree.map(whole, table) if cfg.mesh.fsdp == "none" else table


def layer_places(cfg: Config) -> list[tuple[str, str, int]]:
    """Where each layer's weights are in params: params[group][kind][name][row]."""
    prefix, block = layer_kinds(cfg.model.prefix), layer_kinds(cfg.model.pattern)
    places = []
    for group, kinds in (("prefix", prefix), ("layers", block * n_blocks(cfg.model))):
        places += [(group, kind, kinds[:n].count(kind)) for n, kind in enumerate(kinds)]
    return places


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


def unshard(w: dict, table: dict) -> dict:
    """FSDP: gather over dp.  The transpose reduce-scatters the gradient."""
    alone = lax.axis_size("dp") == 1  # XLA would copy, on a CPU more than a decoding step computes

    def gather(x, p: Param):
        if alone or p.own or "dp" not in p.spec:
            return x
        return lax.all_gather(x, "dp", axis=p.spec.index("dp"), tiled=True)

    return jax.tree.map(gather, w, table)


def ready(params, cfg: Config, dtype) -> dict:
    """The weights as the layers take them: matrices cast to dtype, and gathered over dp, but those
    of layers only if mesh.fsdp does not leave it to the layer.

    They are typed as different on every device, so that a gradient is summed over the devices
    once, in the transpose of this function.
    """

    def cast(x, p: Param):
        return x.astype(dtype) if p.decay and not p.wide else x

    table = param_table(cfg)
    w = jax.tree.map(cast, params, table)
    late = ("layers", "prefix") if cfg.mesh.fsdp == "layer" else ()
    early = {name: x for name, x in w.items() if name not in late}
    return varying(w | unshard(early, {name: table[name] for name in early}))


# ---- attention


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


def documents(token_BS, end_id: int):
    """(document_BS, position_BS): each token's document, from 0, and its place there.  An end
    belongs to the document that it ends."""
    end_BS = token_BS == end_id
    document_BS = jnp.cumsum(end_BS, 1) - end_BS
    index_S = jnp.arange(token_BS.shape[1])
    after_BS = jnp.where(end_BS, index_S + 1, 0)[:, :-1]
    start_BS = lax.cummax(jnp.pad(after_BS, ((0, 0), (1, 0))), axis=1)
    return document_BS, index_S - start_BS


def piece(x, dim):
    """This tp shard's part of an array that all of them hold."""
    size = x.shape[dim] // lax.axis_size("tp")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * size, size, dim)


def all_rows(x_BLD):
    """x of all tp shards, where the order of tokens does not matter: each shard's pieces of the
    sequences are rows of their own.  Gathered along the sequence they would all be copied again."""
    return lax.all_gather(x_BLD, "tp", tiled=True)


def sum_rows(y_BLD):
    """The sum over tp of what was made of `all_rows`, for the rows of this shard."""
    return lax.psum_scatter(y_BLD, "tp", tiled=True)


def as_rows(x_BL):
    """What all shards hold of whole sequences, put in the order of `all_rows`."""
    x = x_BL.reshape(len(x_BL), lax.axis_size("tp"), -1, *x_BL.shape[2:]).swapaxes(0, 1)
    return x.reshape(-1, *x.shape[2:])


def as_sequences(x_BL):
    """The inverse of `as_rows`."""
    x = x_BL.reshape(lax.axis_size("tp"), -1, *x_BL.shape[1:]).swapaxes(0, 1)
    return x.reshape(len(x), -1, *x_BL.shape[2:])


def plus(x, bias):
    """x + bias, where there is one."""
    return x if bias is None else x + bias.astype(x.dtype)


def rms_norm(x_BLD, gain_D, eps):
    """x / rms(x) * gain, over the last dim, in float32 (Zhang and Sennrich 2019)."""
    x32 = x_BLD.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + eps)
    return (x32 * scale * gain_D).astype(x_BLD.dtype)


def norm(x_BLD, w, name, cfg):
    """The configured norm with the weights of that name; LayerNorm (Ba et al. 2016) is an RMSNorm
    of x - mean(x)."""
    x32 = x_BLD.astype(jnp.float32)
    if cfg.model.norm == "layer":
        x32 -= x32.mean(-1, keepdims=True)
    y_BLD = rms_norm(x32, w[f"{name}_D"], cfg.model.norm_eps)
    return plus(y_BLD, w.get(f"{name}_bias_D")).astype(x_BLD.dtype)


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


def softcap(x, cap: float):
    return cap * jnp.tanh(x / cap) if cap else x


def platform() -> str:
    """Of the ambient mesh's devices, be they here or only planned with."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def product(sums: str, x, w, dtype=None):
    """jnp.einsum of two arrays of one dtype, in that dtype or the one given.

    On a CPU bfloat16 is multiplied into float32 and rounded after: only so does XLA use bfloat16
    instructions where there are any, in half the time.  (So remat=dots keeps float32 there.)
    """
    assert x.dtype == w.dtype, (sums, x.dtype, w.dtype)
    if platform() != "cpu" or x.dtype == jnp.float32:
        return jnp.einsum(sums, x, w, preferred_element_type=dtype)
    # With one more dim to sum over, since XLA (jaxlib 0.10 to 0.12) does not run all such products:
    # "ZD,ZCF->DCF" ends in "Unsupported element type for DotThunk", and "ZF,ZD->FD" is slow.
    sums = re.sub(r"(\w+),", r"a\1,a", sums)
    y = jnp.einsum(sums, x[None], w[None], preferred_element_type=jnp.float32)
    return y.astype(dtype or x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def einsum(sums: str, x, w, dtype=None):
    """`product`, but a gradient is rounded to the arrays' dtype before it is multiplied on, or
    bfloat16 would be trained at the speed of float32."""
    return product(sums, x, w, dtype)


def einsum_backward(sums, dtype, xw, g):
    of_x, of_w, of_y = re.split(",|->", sums)
    (x, w), g = xw, g.astype(xw[0].dtype)
    return product(f"{of_y},{of_w}->{of_x}", g, w), product(f"{of_x},{of_y}->{of_w}", x, g)


einsum.defvjp(lambda sums, x, w, dtype: (product(sums, x, w, dtype), (x, w)), einsum_backward)


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


def shortcoming(kernel: str, q_BLHK, v_BSGW, at: Span, cfg: Config) -> str:
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


@cache
def warn_once(text: str):
    warn(text)


def attend(q_BLHK, k_BSGK, v_BSGW, at: Span, cfg, width: int):
    """Causal softmax attention by the kernel that train.attention and the platform name; scores
    over sqrt(width), and H / G query heads share a key head.  Raises UserError USAGE."""
    best = dict(gpu="cudnn", cuda="cudnn", tpu="splash").get(platform(), "xla")
    kernel = best if cfg.train.attention == "auto" else cfg.train.attention
    why = kernel != "xla" and shortcoming(kernel, q_BLHK, v_BSGW, at, cfg)
    if why and at.split == 1:
        if kernel == cfg.train.attention:
            raise UserError(USAGE, f"train.attention={kernel} {why}", "set --train.attention auto")
        warn_once(f"attention is plain XLA, since {kernel} {why}")
    kernels = dict(xla=xla_attention, cudnn=cudnn_attention, splash=splash_attention)
    f = partial(kernels["xla" if why else kernel], at=at, cfg=cfg, width=width)
    if cfg.train.remat == "attention":
        f = jax.checkpoint(f, prevent_cse=False)
    return f(q_BLHK, k_BSGK, v_BSGW)


def remember(memory, new: dict, at: Span) -> dict:
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
    q_BLHK = plus(einsum("BLD,DHK->BLHK", x_BLD, w["q_DHK"]), w.get("q_bias_HK"))
    k_BLGK = plus(einsum("BLD,DGK->BLGK", x_BLD, w["k_DGK"]), w.get("k_bias_GK"))
    v_BLGK = plus(einsum("BLD,DGK->BLGK", x_BLD, w["v_DGK"]), w.get("v_bias_GK"))
    if cfg.model.qk_norm:
        q_BLHK = rms_norm(q_BLHK, w["q_norm_K"], cfg.model.norm_eps)
        k_BLGK = rms_norm(k_BLGK, w["k_norm_K"], cfg.model.norm_eps)
    q_BLHK = rope(q_BLHK, at, cfg)
    kv = remember(memory, dict(k_BSGK=rope(k_BLGK, at, cfg), v_BSGK=v_BLGK), at)
    y_BLHK = attend(q_BLHK, kv["k_BSGK"], kv["v_BSGK"], at, cfg, cfg.model.d_head)
    y_BLD = einsum("BLHK,HKD->BLD", y_BLHK, w["o_HKD"])
    y_BLD = lax.psum_scatter(y_BLD, "tp", scatter_dimension=at.split, tiled=True)
    return plus(y_BLD, w.get("o_bias_D")), kv


def mla(x_BLD, w, cfg, at: Span, memory):
    """Multi-head latent attention (DeepSeek-V2, section 2.1; V3, section 2.1.1).

    The latents are made from the local sequence, and they are what is gathered over tp and what is
    remembered: kv_rank + d_rope numbers a token.
    """
    m, h_BLJ = cfg.model, x_BLD
    eps = 1e-6  # of the latents' norms: DeepSeek's code has it apart from norm_eps
    if m.q_rank:
        h_BLJ = plus(einsum("BLD,DJ->BLJ", x_BLD, w["q_down_DJ"]), w.get("q_down_bias_J"))
        h_BLJ = rms_norm(h_BLJ, w["q_norm_J"], eps)
    c_BLI = plus(einsum("BLD,DI->BLI", x_BLD, w["kv_down_DI"]), w.get("kv_down_bias_I"))
    c_BLI = rms_norm(c_BLI, w["kv_norm_I"], eps)
    k_BLT = plus(einsum("BLD,DT->BLT", x_BLD, w["k_rope_DT"]), w.get("k_rope_bias_T"))
    h_BLJ = lax.all_gather(h_BLJ, "tp", axis=at.split, tiled=True)
    c_BLI = lax.all_gather(c_BLI, "tp", axis=at.split, tiled=True)
    k_BLT = lax.all_gather(k_BLT, "tp", axis=at.split, tiled=True)

    q_BLHK = einsum("BLJ,JHK->BLHK", h_BLJ, w["q_JHK"])
    q_BLHT = rope(einsum("BLJ,JHT->BLHT", h_BLJ, w["q_rope_JHT"]), at, cfg)
    kv = remember(memory, dict(c_BSI=c_BLI, k_BST=rope(k_BLT[:, :, None], at, cfg)[:, :, 0]), at)
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
    return plus(y_BLD, w.get("o_bias_D")), kv


# model.attention: its weights, and the function (x_BLD, weights, cfg, Span, memory) -> (y_BLD, kv).
ATTENTION = dict(
    gqa=(gqa_table, gqa),
    mla=(mla_table, mla),
)


def attention_of(cfg: Config):
    """The line of ATTENTION that cfg names.  Raises UserError USAGE."""
    if cfg.model.attention not in ATTENTION:
        what = f"model.attention={cfg.model.attention!r} is no attention of model.py"
        raise UserError(USAGE, what, f"set --model.attention to {listed(ATTENTION)}")
    return ATTENTION[cfg.model.attention]


# ---- feed-forward


def activate(h_CF, dim, cfg):
    """The hidden units from the projections along dim: gate and up, or only up."""
    gate, up = lax.index_in_dim(h_CF, 0, dim, False), lax.index_in_dim(h_CF, -1, dim, False)
    match cfg.model.activation:
        case "swiglu":  # Shazeer 2020
            return jax.nn.silu(gate) * up
        case "relu2":  # So et al. 2021
            return jax.nn.relu(up) ** 2
        case kind:  # Hendrycks and Gimpel 2016
            return jax.nn.gelu(up, approximate=kind == "gelu_tanh")


def feed_forward(x_BLD, w, cfg, name=""):
    """This tp shard's part of a feed-forward's output, still to be summed."""
    h_BLCF = plus(einsum("BLD,CDF->BLCF", x_BLD, w[f"{name}in_CDF"]), w.get(f"{name}in_bias_CF"))
    return einsum("BLF,FD->BLD", activate(h_BLCF, 2, cfg), w[f"{name}out_FD"])


def mlp(x_BLD, w, cfg):
    y_BLD = feed_forward(all_rows(x_BLD), w, cfg)
    return plus(sum_rows(y_BLD), w.get("out_bias_D"))


# ---- mixture of experts


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
    choice_BLE = plus(lax.stop_gradient(score_BLE), w.get("router_bias_E"))
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


MOE_SUMS = ("entropy", "balance", "dropped")  # beside load_E, the statistics of a moe layer


def balance(score_BLE, expert_BLX):
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


def queue(to_U, n: int):
    """The place of each element in the queue of its destination, one of n, first come first."""
    order_U = jnp.argsort(to_U)
    length_n = jnp.bincount(to_U, length=n)
    start_n = jnp.cumsum(length_n) - length_n
    place_U = jnp.arange(to_U.size) - start_n[to_U[order_U]]
    return jnp.zeros_like(to_U).at[order_U].set(place_U)


def inverse(place_U, n: int):
    """Who has each of n places; U, which is nobody, where it is free.  A place >= n is none."""
    U = place_U.size
    return jnp.full(n, U).at[place_U].set(jnp.arange(U), mode="drop")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def moved(x_QD, from_O, to_U, copies: int = 1):
    """x_QD[from_O // copies], and anything where from_O is nobody.

    to_U is the way back: with it the gradient is a gather too, where XLA would scatter.  Nobody's
    has a gradient of 0, so whatever is made of nobody's must not be read.
    """
    return x_QD.at[from_O // copies].get(mode="clip")


def moved_forward(x_QD, from_O, to_U, copies):
    return moved(x_QD, from_O, to_U, copies), to_U


def moved_backward(copies, to_U, g_OD):
    g_UD = g_OD.at[to_U].get(mode="fill", fill_value=0)
    return g_UD.reshape(-1, copies, g_UD.shape[-1]).sum(1), None, None


moved.defvjp(moved_forward, moved_backward)


def grown(total, new, row):
    """total with new added to one row, which there has to be: total.at[row].add would make sure."""
    new = lax.dynamic_index_in_dim(total, row, keepdims=False) + new.astype(total.dtype)
    return lax.dynamic_update_index_in_dim(total, new, row, 0)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def through_tiles(x_YZD, gate_YZ, in_EDCF, out_EFD, expert_Y, cfg):
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


def through_tiles_backward(cfg, kept, g_YZD):
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
        return jax.tree.map(partial(grown, row=expert), of_weights, new), (of_x_ZD, of_gate_Z)

    zeros = [jnp.zeros_like(w, jnp.float32) for w in (in_EDCF, out_EFD)]
    of_weights, of_rows = lax.scan(one, zeros, (x_YZD, gate_YZ, g_YZD, expert_Y))
    return *of_rows, *(x.astype(in_EDCF.dtype) for x in of_weights), None


through_tiles.defvjp(lambda *args: (through_tiles(*args), args[:5]), through_tiles_backward)


def tiles(U: int, E: int) -> tuple[int, int]:
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
    Y, Z = tiles(U, E)
    tiles_E = -(-jnp.bincount(expert_U, length=E + 1)[:E] // Z)
    ends_E = jnp.cumsum(tiles_E)
    first = jnp.append(ends_E - tiles_E, Y)  # those that are no expert's have no tile
    to_U = first[expert_U] * Z + queue(expert_U, E + 1)
    from_O = inverse(to_U, Y * Z)
    expert_Y = jnp.minimum(jnp.searchsorted(ends_E, jnp.arange(Y), side="right"), E - 1)
    x_YZD = moved(x_QD, from_O, to_U, U // len(x_QD)).reshape(Y, Z, D)
    gate_YZ = moved(gate_U[:, None], from_O, to_U).reshape(Y, Z)
    y_YZD = through_tiles(x_YZD, gate_YZ, w["in_EDCF"], w["out_EFD"], expert_Y, cfg)
    return moved(y_YZD.reshape(-1, D), to_U, from_O)


def dropless(x_BLD, gate_BLX, expert_BLX, w, cfg):
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
        to_U = rank_U * room + queue(rank_U, dp)
        from_O = inverse(to_U, dp * room)
        x_OD = moved(x_QD, from_O, to_U, X)
        gate_O1 = moved(gate_U[:, None], from_O, to_U)
        expert_O = (expert_U % E).at[from_O].get(mode="fill", fill_value=E)
        x_OD = lax.all_to_all(x_OD, "dp", 0, 0, tiled=True)
        gate_O1 = lax.all_to_all(gate_O1, "dp", 0, 0, tiled=True)
        expert_O = lax.all_to_all(expert_O, "dp", 0, 0, tiled=True)
        y_OD = run_experts(x_OD, gate_O1[:, 0], expert_O, w, cfg)
        y_UD = moved(lax.all_to_all(y_OD, "dp", 0, 0, tiled=True), to_U, from_O)
    return y_UD.reshape(*expert_BLX.shape, D), jnp.ones(expert_BLX.shape, bool)


def with_capacity(x_BLD, gate_BLX, expert_BLX, w, cfg):
    """(y_BLXD, kept_BLX): each expert takes at most its slots' worth of each sequence.

    First come, first served along the sequence, so that no token is dropped for a later one's sake
    and the sequence, whole on any mesh, decides alone.  Arguments and results are in the order of
    `all_rows`.
    """
    D, sequences = x_BLD.shape[-1], as_sequences(expert_BLX)
    (B, L, X), E = sequences.shape, cfg.model.n_experts  # of all dp ranks
    Z = min(L, math.ceil(cfg.train.capacity_factor * L * X / E))
    expert_BU, row_B1 = sequences.reshape(B, -1), jnp.arange(B)[:, None]
    place_BU = jax.vmap(partial(queue, n=E))(expert_BU)
    to_BU = jnp.where(place_BU < Z, (row_B1 * E + expert_BU) * Z + place_BU, B * E * Z)
    to_BLX = as_rows(to_BU.reshape(B, L, X))
    to_U = to_BLX.reshape(-1)
    from_O = inverse(to_U, B * E * Z)
    x_BEZD = moved(x_BLD.reshape(-1, D), from_O, to_U, X).reshape(B, E, Z, D)
    if cfg.mesh.experts == "alltoall":
        x_BEZD = lax.all_to_all(x_BEZD, "dp", split_axis=1, concat_axis=0, tiled=True)
    h_BEZCF = einsum("BEZD,EDCF->BEZCF", x_BEZD, w["in_EDCF"])
    y_BEZD = einsum("BEZF,EFD->BEZD", activate(h_BEZCF, 3, cfg), w["out_EFD"])
    if cfg.mesh.experts == "alltoall":
        y_BEZD = lax.all_to_all(y_BEZD, "dp", split_axis=0, concat_axis=1, tiled=True)
    y_BLXD = moved(y_BEZD.reshape(-1, D), to_U, from_O).reshape(*to_BLX.shape, D)
    kept_BLX = to_BLX < B * E * Z
    return y_BLXD * jnp.where(kept_BLX, gate_BLX, 0)[..., None], kept_BLX


def moe(x_BLD, w, cfg, training: bool):
    """(y_BLD, statistics when training): routed experts, and shared ones beside them.

    Tokens are routed where they are, then gathered over tp: each tp shard has a part of d_expert.
    """
    score_BLE, gate_BLX, expert_BLX = route(x_BLD, w, cfg)
    stats = balance(score_BLE, expert_BLX) if training else None
    x_BLD = all_rows(x_BLD)
    gate_BLX = all_rows(gate_BLX).astype(x_BLD.dtype)
    expert_BLX = all_rows(expert_BLX)
    dispatch = with_capacity if training and cfg.train.capacity_factor else dropless
    y_BLXD, kept_BLX = dispatch(x_BLD, gate_BLX, expert_BLX, w, cfg)
    y_BLD = y_BLXD.sum(2)
    if cfg.model.n_shared:
        y_BLD += feed_forward(x_BLD, w, cfg, "shared_")
    if training:
        stats["dropped"] = (~piece(kept_BLX, 0)).sum(dtype=jnp.float32)
    return sum_rows(y_BLD), stats


# ---- one layer


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


def block(kind, x_BLD, w, cfg, key, at: Span, memory):
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


# ---- the ends


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
    token_BL = as_rows(token_BL) if split else token_BL
    row_BL = token_BL - lax.axis_index("tp") * embed_VD.shape[0]
    mine_BL = (row_BL >= 0) & (row_BL < embed_VD.shape[0])
    grads_VD, x_BLD = lookup(grads_VD, embed_VD, jnp.where(mine_BL, row_BL, 0))
    return grads_VD, sum_rows(jnp.where(mine_BL[..., None], x_BLD, 0))


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


# ---- the whole model


def pipeline(stage, x_MBLD, carry):
    """Forward only: n = pp * slots microbatches pass pp stages in n + pp - 1 ticks.

    Stage s starts with its own slots' microbatches, m = s * slots and on, and ends with the same
    ones finished.  In tick t it runs stage(x, m, carry) on microbatch m = t - s and hands the
    resulting x on; what it carries stays with it, and is returned beside the x_MBLD.  Slot
    t % slots turns one stage towards stage 0 once stage 0 has used its own, so that stage 0 meets
    the microbatches in order; finished ones turn likewise after the last stage has stored them, and
    are home after the last tick.  A stage with nothing to do skips the work (all of a dp or tp
    group skip together, so collectives inside are safe).
    """
    pp, s, slots = lax.axis_size("pp"), lax.axis_index("pp"), x_MBLD.shape[0]
    onward = [(i, (i + 1) % pp) for i in range(pp)]
    back = [(i, (i - 1) % pp) for i in range(pp)]

    def skip(x_BLD, m, carry):
        return x_BLD, carry

    def tick(state, t):
        x_BLD, todo_MBLD, done_MBLD, carry = state
        m, i, o = t - s, t % slots, (t - pp + 1) % slots
        x_BLD = jnp.where(s == 0, todo_MBLD[i], x_BLD)
        todo_MBLD = todo_MBLD.at[i].set(lax.ppermute(todo_MBLD[i], "pp", back))
        x_BLD, carry = lax.cond((m >= 0) & (m < pp * slots), stage, skip, x_BLD, m, carry)
        turned_BLD = lax.ppermute(done_MBLD[o], "pp", back)
        done_MBLD = done_MBLD.at[o].set(jnp.where(s == pp - 1, x_BLD, turned_BLD))
        return (lax.ppermute(x_BLD, "pp", onward), todo_MBLD, done_MBLD, carry), None

    start = (jnp.zeros_like(x_MBLD[0]), x_MBLD, jnp.zeros_like(x_MBLD), carry)
    return lax.scan(tick, start, jnp.arange(pp * slots + pp - 1))[0][2:]


def remat(layer, cfg: Config):
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
            names_which_can_be_offloaded=[INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.dots_with_no_batch_dims_saveable if kept == "dots" else None
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def varying(tree):
    """The same, typed as different on every device."""

    def vary(x):
        missing = tuple(set(AXES) - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def runs(kinds: list[str]) -> list[tuple[str, int, int]]:
    """(kind, start, stop) of each run of one kind, counted among the layers of that kind."""
    found, seen = [], dict.fromkeys(kinds, 0)
    for kind, run in groupby(kinds):
        start = seen[kind]
        seen[kind] += len(list(run))
        found.append((kind, start, seen[kind]))
    return found


def run_layers(x, kinds: list[str], params, own, first, layer, unroll: int):
    """Repeat the block of `kinds` over params, {kind: its layers' weights, [N, ...]}.

    layer(kind, x, w, n, own) -> (x, out) runs layer number n; numbers count from `first`.  own and
    the outs, stacked, have the form of params.  Blocks are one scan, and so are the runs of a kind
    in them: the program does not grow with their number.
    """
    kinds = kinds[:1] if len(set(kinds)) == 1 else kinds
    times = n_rows(params) // len(kinds)
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
        for kind, start, stop in runs(kinds):
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


def n_rows(params) -> int:
    """Layers in {kind: weights}."""
    return sum(w["attn_norm_D"].shape[0] for w in params.values())


def fold(key, n):
    return None if key is None else jax.random.fold_in(key, n)


@jax.custom_vjp
def tap(grads, w, row):
    """(grads, w) as they are; backward, w's gradient is added to that row of grads' own.

    Handed on from layer to layer, the gradient of grads is a sum that grows in place (interleaved,
    in a copy of a part).  Otherwise a loop stacks the layers' gradients, and they are added to the
    sum afterwards: 0.18 GiB more for llama_1b with 1f1b on v5p 2x2x2, one row a microbatch, and 5 %
    more cycles by XLA's count.
    """
    return grads, w


def tap_backward(row, of_both):
    return jax.tree.map(partial(grown, row=row), *of_both), None, None


tap.defvjp(lambda grads, w, row: ((grads, w), row), tap_backward)


def stack(
    params, kinds: list[str], first, x_BLD, at: Span, cfg: Config, key=None, memory=None, grads=None
):
    """(x_BLD, outs, grads): x through some of the layers, numbered from `first`.

    outs, in the form of params: with memory, what each layer remembers now; with a key, in
    training, the sums of moe layers' statistics.  grads: the float32 sum that the gradient of
    params is added to, see `tap`; None leaves it to params.
    """

    def layer(kind, x_BLD, w, n, memory):
        if cfg.mesh.fsdp == "layer":
            w = unshard(w, layer_table(cfg, kind))
        return block(kind, checkpoint_name(x_BLD, INPUT), w, cfg, fold(key, n), at, memory)

    def one(kind, state, w, n, own):
        (x_BLD, grads), (row, memory) = state, own
        if grads is not None:
            of_kind, w = tap(grads[kind], w, row)
            grads = grads | {kind: of_kind}
        x_BLD, out = remat(partial(layer, kind), cfg)(x_BLD, w, n, memory)
        return (x_BLD, grads), out

    own = {k: (jnp.arange(n_rows({k: w})), memory and memory[k]) for k, w in params.items()}
    state = x_BLD, grads
    (x_BLD, grads), outs = run_layers(state, kinds, params, own, first, one, cfg.train.unroll)
    return x_BLD, varying({kind: out[memory is None] for kind, out in outs.items()}), grads


def enter(params, token_BL, at: Span, cfg: Config, key=None, memory=None, grads=None):
    """The embedding, and the layers of the prefix: what `stack` returns, of both."""
    grads = dict(grads or {})
    pair = grads.get("embed_VD"), params["embed_VD"]
    grads["embed_VD"], x_BLD = embed(*pair, token_BL, at.split)
    if cfg.model.positions == "learned":
        position_BL = jnp.broadcast_to(at.position_BL, token_BL.shape)
        pair = grads.get("position_LD"), params["position_LD"]
        grads["position_LD"], position_BLD = lookup(*pair, piece(position_BL, at.split))
        x_BLD += position_BLD
    x_BLD = varying(dropout(x_BLD, fold(key, cfg.model.n_layers), at.row_B, cfg))
    prefix = layer_kinds(cfg.model.prefix)
    if not prefix:
        return x_BLD, None, grads
    args = x_BLD, at, cfg, key, memory, grads.get("prefix")
    x_BLD, outs, grads["prefix"] = stack(params["prefix"], prefix, 0, *args)
    return x_BLD, outs, grads


def hidden(params, token_MBL, span, cfg: Config, memory=None):
    """(x_MBLD, memory): the residual stream after the last layer, for this device's microbatches.

    span(m): the Span of microbatch m.  memory: what the layers remember, "layers" and "prefix" of
    the form of params, [microbatch, N, ...]; or None.
    """
    prefix, kinds = layer_kinds(cfg.model.prefix), layer_kinds(cfg.model.pattern)
    slots, s, memory = token_MBL.shape[0], lax.axis_index("pp"), memory or {}

    def start(parts):
        token_BL, m, own = parts
        return enter(params, token_BL, span(m), cfg, memory=own)[:2]

    def stage(x_BLD, m, carry):
        first = len(prefix) + s * n_rows(params["layers"])
        own = jax.tree.map(lambda x: x[m], carry)
        x_BLD, new, _ = stack(params["layers"], kinds, first, x_BLD, span(m), cfg, memory=own)
        if carry is None:
            return x_BLD, None
        return x_BLD, jax.tree.map(lambda x, new: x.at[m].set(new), carry, new)

    parts = token_MBL, s * slots + jnp.arange(slots), memory.get("prefix")
    x_MBLD, prefix_memory = lax.map(start, parts)
    x_MBLD, layers_memory = pipeline(stage, x_MBLD, memory.get("layers"))
    return x_MBLD, dict(layers=layers_memory) | (dict(prefix=prefix_memory) if prefix else {})


def span_of(token_MBL, m, cfg: Config, first_row=0) -> Span:
    """The Span of whole rows, of microbatch m of them all.

    first_row: microbatch 0's first row in the global batch.
    """
    _, B, L = token_MBL.shape
    index_BL = jnp.arange(L)[None]
    row_B = first_row + (m * lax.axis_size("dp") + lax.axis_index("dp")) * B + jnp.arange(B)
    if not cfg.data.document_mask:
        return Span(index_BL, index_BL, row_B=row_B)
    document_BL, position_BL = documents(token_MBL[m], cfg.data.end_id)
    return Span(index_BL, position_BL, document_BL, document_BL, row_B)


def in_chunks(x, cfg: Config, fill=0):
    """[tokens, ...] as [n, 1, tokens of a chunk, ...], at most train.loss_chunk each, filled up."""
    n = -(-x.shape[0] // cfg.train.loss_chunk)
    size = -(-x.shape[0] // n)
    x = jnp.pad(x, ((0, n * size - x.shape[0]), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    return x.reshape(n, 1, size, *x.shape[1:])


def token_nll(params, token_MBL, target_MBL, cfg: Config):
    """Negative log likelihood (nats) of each token of this device's share, MBL; no gradient."""
    params = ready(params, cfg, cfg.train.dtype)
    all_MBL = lax.all_gather(token_MBL, "pp", axis=0, tiled=True)  # any stage may meet them
    x_MBLD, _ = hidden(params, token_MBL, lambda m: span_of(all_MBL, m, cfg), cfg)

    def score(parts):
        x_BLD, target_BL = parts
        x_BLD = all_rows(norm(x_BLD, params, "norm", cfg))
        target_BL = as_rows(target_BL)
        x = in_chunks(x_BLD.reshape(-1, x_BLD.shape[-1]), cfg)
        chunks = x, in_chunks(target_BL.reshape(-1), cfg, fill=-1)
        nll, _ = lax.map(lambda chunk: cross_entropy(*chunk, params, cfg), chunks)
        return as_sequences(nll.reshape(-1)[: target_BL.size].reshape(target_BL.shape))

    return lax.map(score, (x_MBLD, target_MBL))


# ---- training


def head_names(cfg: Config) -> list[str]:
    """The weights after the last layer."""
    last = "embed_VD" if cfg.model.tie_embeddings else "unembed_DV"
    return [last, *norm_table(cfg)]


def score_and_gradient(head, grads, y_BLD, target_BL, n_tokens, cfg: Config):
    """(loss, grads, gradient of y): a microbatch's share of the mean loss over n_tokens, and grads,
    sums in float32, with the gradient of head added.

    Only the last stage's y counts; all stages score a part of its sequence.  A chunk's logits live
    until its gradient is made, so that none is kept or made twice.
    """
    s, pp = lax.axis_index("pp"), lax.axis_size("pp")
    fill = -y_BLD.shape[1] % pp

    def share(gains, y_BLD):
        """This stage's part of each tp shard's part of the sequence, filled up and normed."""
        if pp > 1:  # XLA's CPU program would copy y for a scatter among one, too
            y_BLD = jnp.pad(jnp.where(s == pp - 1, y_BLD, 0), ((0, 0), (0, fill), (0, 0)))
            y_BLD = lax.psum_scatter(y_BLD, "pp", scatter_dimension=1, tiled=True)
        return all_rows(norm(y_BLD, gains, "norm", cfg))

    def objective(last, x_BLD, target_BL):
        nll_BL, z_BL = cross_entropy(x_BLD, target_BL, last, cfg)
        counted_BL = target_BL >= 0
        loss = jnp.where(counted_BL, nll_BL, 0).sum() / n_tokens
        z_loss = cfg.train.z_loss * jnp.where(counted_BL, z_BL**2, 0).sum() / n_tokens
        return loss + z_loss, loss

    def add(total, chunk):
        gradient = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (_, loss), (of_last, of_x) = gradient(last, *chunk)
        return accumulate(total, (loss, of_last)), of_x

    gains = {name: head[name] for name in norm_table(cfg)}
    last = {name: x for name, x in head.items() if name not in gains}
    x_BLD, back = jax.vjp(share, gains, y_BLD)
    B, L, D = x_BLD.shape
    target_BL = jnp.pad(as_rows(target_BL), ((0, 0), (0, fill)), constant_values=-1)
    target_BL = lax.dynamic_slice_in_dim(target_BL, s * L, L, 1)
    chunks = in_chunks(x_BLD.reshape(-1, D), cfg), in_chunks(target_BL.reshape(-1), cfg, fill=-1)
    loss = lax.pcast(jnp.float32(0), ("dp", "pp"), to="varying")
    (loss, of_last), of_x = lax.scan(add, (loss, {name: grads[name] for name in last}), chunks)
    of_gains, of_y_BLD = back(of_x.reshape(-1, D)[: B * L].reshape(B, L, D))
    of_gains = accumulate({name: grads[name] for name in gains}, of_gains)
    return loss, of_last | of_gains, of_y_BLD


class Schedule(NamedTuple):
    """Which stage works on what in which tick.

    A stage has `parts` parts of the layers: part r of stage s is number r * pp + s.  Its work
    number j is one microbatch through one part, in rounds of pp microbatches through all parts
    (Narayanan et al. 2021, section 2.2).  Forward, stage s does j in tick s + j, when stage s - 1
    has just sent it (part 0 of stage 0 begins anew, and the last stage's part r goes on to part
    r + 1 of stage 0); backward, the same way back, in tick delay + (pp - 1 - s) + j.
    """

    pp: int
    parts: int
    microbatches: int
    delay: int
    """The tick of the first backward: after all forward in gpipe, else as soon as one is through,
    which takes parts * pp - 1 ticks."""

    @property
    def n(self) -> int:
        return self.parts * self.microbatches

    @property
    def ticks(self) -> int:
        return self.delay + self.pp - 1 + self.n

    def place(self, j):
        """(microbatch, part) of forward work j."""
        turn, rest = j // (self.pp * self.parts), j % (self.pp * self.parts)
        return turn * self.pp + rest % self.pp, rest // self.pp

    def forward(self, t, s):
        """Whether stage s goes forward in tick t, with work number t - s."""
        return (t >= s) & (t - s < self.n)

    def begins(self, t, s):
        """Whether it does so where the model begins."""
        return self.forward(t, s) & (s == 0) & (self.place(t - s)[1] == 0)

    def back(self, t, s):
        """The number of the work with which stage s goes back in tick t, if it does: `backward`."""
        return t - self.delay - (self.pp - 1 - s)

    def backward(self, t, s):
        """Whether stage s goes back in tick t."""
        j = self.back(t, s)
        return (j >= 0) & (j < self.n)

    def scores(self, t, s):
        """Whether the last stage goes back where the model ends, for which all of them score."""
        last = self.pp - 1
        return self.backward(t, last) & (self.place(self.back(t, last))[1] == 0)

    def finishes(self, t, s):
        """Whether stage s goes back where the model begins."""
        r = self.place(self.back(t, s))[1]
        return self.backward(t, s) & (s == 0) & (r == self.parts - 1)

    def part(self, tree, r):
        """Part r of layers, or of what is laid out like them."""
        return tree if self.parts == 1 else jax.tree.map(lambda x: x[r], tree)

    def put(self, tree, r, new):
        """tree with `new` for its part r."""
        return new if self.parts == 1 else jax.tree.map(lambda x, new: x.at[r].set(new), tree, new)

    def depth(self) -> int:
        """Microbatches of a part that a stage keeps, at most, between forward and backward."""
        j = np.arange(self.n)
        m, r = self.place(j)
        begin, end = np.zeros((2, self.parts, self.microbatches), int)
        begin[r, m] = j
        end[self.parts - 1 - r, m] = self.delay + self.pp - 1 + j
        held = (begin[:, None, :] <= end[:, :, None]).sum(-1) - np.arange(self.microbatches)
        return int(held.max())


def schedule_of(cfg: Config, microbatches: int) -> Schedule:
    pp, parts = cfg.mesh.pp, cfg.mesh.virtual_stages
    one_through = parts * pp - 1
    all_through = parts * microbatches + pp - 1
    gpipe = cfg.mesh.schedule == "gpipe" and pp > 1
    return Schedule(pp, parts, microbatches, all_through if gpipe else one_through)


class Stage(NamedTuple):
    """What `run_schedule` does with a microbatch; total is what all of them add up to."""

    begin: Callable
    """(x, m, total) -> (x, total): where the model begins; x is taken for its shape."""
    forward: Callable
    """(x, m, r, total) -> (y, saved, total): microbatch m through part r, and what backward needs.
    """
    score: Callable
    """(y, m, total) -> (gradient of y, total): by all stages together, of what the last one has."""
    backward: Callable
    """(gradient of y, saved, m, r, total) -> (gradient of x, total)."""
    finish: Callable
    """(gradient of x, m, total) -> total: where the model begins."""


def run_schedule(plan: Schedule, stage: Stage, x_BLD, saved, total, branch: Callable):
    """Run the work of a Schedule in one loop over its ticks; returns total.

    x_BLD and saved are examples.  A stage with nothing to do skips the work (all of a dp or tp
    group skip together, so collectives inside are safe).  Each kind of work is a branch of its own,
    after the one before it: XLA's CPU runs independent collectives at once and mixes up those of
    one group.  branch(when, work, rest, *args) does one of the two, when(s) being whether it is
    stage s's turn.
    """
    pp, s, depth = plan.pp, lax.axis_index("pp"), plan.depth()
    onward = [(i, (i + 1) % pp) for i in range(pp)]
    back = [(i, (i - 1) % pp) for i in range(pp)]
    late = plan.delay >= plan.n  # the last stage's y waits for its score
    ring = jax.tree.map(
        lambda x: varying(jnp.zeros((plan.parts, depth, *x.shape), x.dtype)),
        (saved, x_BLD if late else None),
    )

    def keep(ring, new, m, r, works):
        if depth == 1:  # used at once
            return jax.tree.map(lambda x: x[None, None], new)
        at = r, m % depth
        return jax.tree.map(lambda x, new: x.at[at].set(jnp.where(works, new, x[at])), ring, new)

    def recall(ring, m, r):
        return jax.tree.map(lambda x: x[0, 0] if depth == 1 else x[r, m % depth], ring)

    def no_forward(x_BLD, m, r, total):
        return x_BLD, jax.tree.map(jnp.zeros_like, saved), total

    def no_score(y_BLD, m, total):
        return jnp.zeros_like(y_BLD), total

    def tick(state, t):
        x_BLD, g_BLD, ring, total = state
        m, r = plan.place(t - s)
        begins, forward = partial(plan.begins, t), partial(plan.forward, t)
        x_BLD, total = branch(begins, stage.begin, lambda x, m, total: (x, total), x_BLD, m, total)
        y_BLD, new, total = branch(forward, stage.forward, no_forward, x_BLD, m, r, total)
        ring = keep(ring, (new, y_BLD if late else None), m, r, forward(s))

        m, r = plan.place(plan.back(t, pp - 1))
        scored = recall(ring, m, r)[1] if late else y_BLD
        of_y_BLD, total = branch(partial(plan.scores, t), stage.score, no_score, scored, m, total)

        m, r = plan.place(plan.back(t, s))
        g_BLD, r = jnp.where((s == pp - 1) & (r == 0), of_y_BLD, g_BLD), plan.parts - 1 - r
        args = g_BLD, recall(ring, m, r)[0], m, r, total
        backward, finishes = partial(plan.backward, t), partial(plan.finishes, t)
        g_BLD, total = branch(backward, stage.backward, lambda g, *a: (g, a[-1]), *args)
        total = branch(finishes, stage.finish, lambda g, m, total: total, g_BLD, m, total)
        sent = lax.ppermute(y_BLD, "pp", onward), lax.ppermute(g_BLD, "pp", back)
        return (*sent, ring if depth > 1 else (), total), None

    zero_BLD = jnp.zeros_like(x_BLD)
    start = zero_BLD, zero_BLD, ring if depth > 1 else (), total
    return lax.scan(tick, start, jnp.arange(plan.ticks))[0][-1]


def deal(layers, cfg: Config):
    """Layers as they rest, [N, ...] in one piece a stage, as the parts of the interleaved schedule,
    [parts, N / parts, ...]; pieces change stages, so that checkpoints know of no schedule."""
    parts, pp, s = cfg.mesh.virtual_stages, cfg.mesh.pp, lax.axis_index("pp")
    if parts == 1:
        return layers
    rounds = []  # {sender: (receiver, piece, part)}; in a round each sends and receives one at most
    for n in range(parts * pp):
        sender, receiver = n // parts, n % pp
        fits = (r for r in rounds if sender not in r and receiver not in [x[0] for x in r.values()])
        if (free := next(fits, None)) is None:
            rounds.append(free := {})
        free[sender] = receiver, n % parts, n // pp

    def leaf(x):
        x = x.reshape(parts, -1, *x.shape[1:])
        out = jnp.zeros_like(x)
        for r in rounds:
            piece, part = np.zeros(pp, int), np.full(pp, parts)  # out of range: dropped
            for sender, (receiver, n, to) in r.items():
                piece[sender], part[receiver] = n, to
            sent, moves = x[jnp.asarray(piece)[s]], [(a, b) for a, (b, *_) in r.items()]
            if any(a != b for a, b in moves):
                sent = lax.ppermute(sent, "pp", moves)
            out = out.at[jnp.asarray(part)[s]].set(sent, mode="drop")
        return out

    return jax.tree.map(leaf, layers)


def dealt(params, cfg: Config, dtype) -> dict:
    """`ready` weights, with the layers as mesh.schedule takes them."""
    w = ready(params, cfg, dtype)
    return w | dict(layers=deal(w["layers"], cfg))


def collect(total, params, cfg: Config):
    """(loss, gradient, statistics) of the global batch from this device's Total, as params rest."""
    _, back = jax.vjp(partial(dealt, cfg=cfg, dtype=jnp.float32), params)
    stats, layers = total.stats, total.stats["layers"]
    if cfg.mesh.virtual_stages > 1:
        rest = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), layers)
        (layers,) = jax.linear_transpose(partial(deal, cfg=cfg), rest)(layers)
    stats = stats | dict(layers=lax.psum(layers, ("dp", "tp")))
    if "prefix" in stats:  # stage 0 has it
        stats |= dict(prefix=lax.psum(stats["prefix"], ("dp", "pp", "tp")))
    return lax.psum(total.loss, ("dp", "pp")), back(total.grads)[0], stats


def no_sums(params, cfg: Config) -> dict:
    """The sums of moe layers' statistics before any layer has run."""

    def of(kind, w):
        n, E = w["attn_norm_D"].shape[:-1], cfg.model.n_experts
        zeros = dict(load_E=jnp.zeros((*n, E)), **{k: jnp.zeros(n) for k in MOE_SUMS})
        return zeros if "moe" in kind else None

    groups = {group: params[group] for group in ("layers", "prefix") if group in params}
    return varying({g: {kind: of(kind, w) for kind, w in ws.items()} for g, ws in groups.items()})


def accumulate(total, new):
    """total with new added, in total's dtype."""
    return jax.tree.map(lambda x, new: x + new.astype(x.dtype), total, new)


class Total(NamedTuple):
    """What the microbatches of a step add up to."""

    loss: jax.Array
    """This device's share of the mean loss."""
    grads: dict
    """Float32, in the form of the ready weights."""
    stats: dict
    """The sums of moe layers' statistics."""

    def grads_of(self, names) -> dict:
        return {name: self.grads[name] for name in names}

    def put(self, grads: dict) -> "Total":
        """With these gradients in place of its own, by their names."""
        return self._replace(grads=self.grads | grads)


def balance_cotangent(stats, cfg: Config):
    """The objective's gradient by the statistics of a microbatch: it has only the balance."""
    share = cfg.train.balance_loss / cfg.train.batch_size

    def of(x):
        return {name: jnp.full_like(v, share if name == "balance" else 0) for name, v in x.items()}

    return {kind: x and of(x) for kind, x in stats.items()}


def packing(example):
    """(pack, unpack) for what jax.vjp keeps of a function of (weights, their gradient so far, x),
    from an example of it.

    pack(back) is the arrays that differ from stage to stage, and so from work to work; the weights
    are at hand, and the rest is constant.  unpack(arrays, weights) is back again.
    """

    def flat(back):
        back.args_res[0] = None
        return jax.tree.flatten(back)

    constants, form = flat(example)
    own = ["pp" in jax.typeof(x).manual_axis_type.varying for x in constants]

    def pack(back):
        return [varying(x) for x, own in zip(flat(back)[0], own, strict=True) if own]

    def unpack(arrays, weights):
        arrays = iter(arrays)
        leaves = [next(arrays) if own else x for x, own in zip(constants, own, strict=True)]
        back = jax.tree.unflatten(form, leaves)
        back.args_res[0] = weights
        return back

    return pack, unpack


def branching(cfg: Config) -> Callable:
    """What chooses whether to work, for `run_schedule`.

    Without other stages there always is work.  On a CPU, branches still keep collectives in order;
    but host memory cannot come out of one.
    """

    def always(when, work, rest, *args):
        return work(*args)

    def skip(when, work, rest, *args):
        return lax.cond(when(lax.axis_index("pp")), work, rest, *args)

    def lock_step(when, work, rest, *args):
        """Where one stage works all do, and the others drop what comes of it."""
        own, busy = when(lax.axis_index("pp")), when(jnp.arange(cfg.mesh.pp)).any()

        def all_work(*args):
            return jax.tree.map(partial(jnp.where, own), work(*args), rest(*args))

        return lax.cond(busy, all_work, rest, *args)

    if cfg.mesh.pp == 1 and (platform() != "cpu" or cfg.train.remat == "offload"):
        return always
    return skip if cfg.mesh.skip_bubbles else lock_step


def gradient(w, token_MBL, target_MBL, total: Total, key, first_row, n_tokens, cfg: Config):
    """total, and the gradient of a slice's microbatches (all stages', of this dp rank) added.

    w: `ready` weights, the layers dealt.  key: dropout's, for this step.  first_row: the slice's
    first row in the global batch.  n_tokens: those counted in the global batch.
    """
    before, kinds = len(layer_kinds(cfg.model.prefix)), layer_kinds(cfg.model.pattern)
    plan, s = schedule_of(cfg, token_MBL.shape[0]), lax.axis_index("pp")
    span = partial(span_of, token_MBL, cfg=cfg, first_row=first_row)
    head = {name: w[name] for name in head_names(cfg)}
    first = {name: x for name, x in w.items() if name in ("embed_VD", "position_LD", "prefix")}

    def opening(m):
        return lambda first, grads: enter(first, token_MBL[m], span(m), cfg, key, grads=grads)

    def run(m, r):
        number = before + (r * plan.pp + s) * n_rows(plan.part(w["layers"], r))
        own = partial(stack, kinds=kinds, first=number, at=span(m), cfg=cfg, key=key)
        return lambda w, grads, x_BLD: own(w, x_BLD=x_BLD, grads=grads)

    def of_part(total, r):
        """Part r's weights, and their gradient so far."""
        return plan.part(w["layers"], r), plan.part(total.grads["layers"], r)

    def begin(x_BLD, m, total):
        x_BLD, new, _ = opening(m)(first, None)
        if new is not None:
            prefix = accumulate(total.stats["prefix"], new)
            total = total._replace(stats=total.stats | dict(prefix=prefix))
        return x_BLD, total

    def forward(x_BLD, m, r, total):
        (y_BLD, new, _), back = jax.vjp(run(m, r), *of_part(total, r), x_BLD)
        layers = total.stats["layers"]
        layers = plan.put(layers, r, accumulate(plan.part(layers, r), new))
        return y_BLD, pack(back), total._replace(stats=total.stats | dict(layers=layers))

    def score(y_BLD, m, total):
        args = head, total.grads_of(head), y_BLD, target_MBL[m], n_tokens
        loss, grads, of_y_BLD = score_and_gradient(*args, cfg)
        return of_y_BLD, total._replace(loss=total.loss + loss).put(grads)

    def backward(g_BLD, kept, m, r, total):
        layers, grads = of_part(total, r)
        back = unpack(kept, layers)
        _, grads, g_BLD = back((g_BLD, balance_cotangent(stats, cfg), grads))
        return g_BLD, total.put(dict(layers=plan.put(total.grads["layers"], r, grads)))

    def finish(g_BLD, m, total):
        grads = total.grads_of(first)
        (_, stats, _), back = jax.vjp(opening(m), first, grads)
        return total.put(back((g_BLD, stats and balance_cotangent(stats, cfg), grads))[1])

    x_BLD = jax.eval_shape(lambda: opening(s)(first, None)[0])
    x_BLD = varying(jnp.zeros(x_BLD.shape, x_BLD.dtype))
    (_, stats, _), example = jax.vjp(run(s, s), *of_part(total, s), x_BLD)
    pack, unpack = packing(example)
    work = Stage(begin, forward, score, backward, finish)
    return run_schedule(plan, work, x_BLD, pack(example), total, branching(cfg))


# ---- decoding

# What the layers remember belongs to its device: [dp, pp, tp, *as the device holds it].
MEMORY = P("dp", "pp", "tp")


def blank_memory(params, cfg: Config, B: int, S: int) -> dict:
    """Room for S tokens of B rows in each of pp microbatches, in every layer."""

    def entries(kind, weights):
        """Keys and values of one token a row."""
        table = layer_table(cfg, kind)
        w = jax.tree.map(lambda x: x[0], weights)
        w = unshard(w, table) if cfg.mesh.fsdp == "layer" else w
        x_BLD = varying(
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
    return varying(memory)


@partial(jax.jit, static_argnames=("n_new", "cfg"), donate_argnames="memory")
def next_logits(params, memory, token_MBS, length_MB, n_new: int, cfg: Config):
    """(logits of the token after each row (MBV, float32), memory).

    Row b of microbatch m is token_MBS[m, b, :length]; its last n_new tokens are new.  memory None
    has none of them, and n_new then counts from the rows' start.
    """
    rows = P("pp", "dp")

    @jax.shard_map(
        in_specs=(param_specs(cfg), MEMORY, rows, rows), out_specs=(P("pp", "dp", "tp"), MEMORY)
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
            document_BS, position_BS = documents(all_MBS[m], cfg.data.end_id)
            document_BL = jnp.take_along_axis(document_BS, index_BL, 1)
            position_BL = jnp.take_along_axis(position_BS, index_BL, 1)
            return Span(index_BL, position_BL, document_BL, document_BS, split=0)

        params, (_, B, S) = ready(params, cfg, cfg.train.dtype), token_MBS.shape
        memory = jax.tree.map(lambda x: x[0, 0, 0], memory) or blank_memory(params, cfg, B, S)
        new_MBL = jnp.take_along_axis(token_MBS, index_MBL, 2)
        x_MBLD, memory = hidden(params, new_MBL, span, cfg, memory)
        last_MB = piece(length_MB - 1 - first_MB, 1)
        x_MBD = jnp.take_along_axis(x_MBLD, last_MB[..., None, None], 2)[:, :, 0]
        x_MBD = norm(x_MBD, params, "norm", cfg)
        x_MBD = lax.all_gather(x_MBD, "tp", axis=1, tiled=True)
        return logits(x_MBD, params, cfg), jax.tree.map(lambda x: x[None, None, None], memory)

    return per_device(params, memory, token_MBS, length_MB)


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
                token = choose(logit_RV[n, :vocab_size], rngs[n], temperature, top_k, top_p)
                done[n] = token == stop_id
                row += [] if done[n] else [token]
        yield rows
        if all(done):
            return
