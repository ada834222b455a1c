"""What every layer is made of: one weight's record, matmuls, norms, feed-forward, dropout, and the
moves of rows between tensor-parallel shards.

DIMS
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from config import Config, layer_kinds, n_blocks
from utils import AXES


@dataclass(frozen=True)
class Param:
    """One weight.  Everything that is known about it is here and nowhere else."""

    shape: tuple[int, ...]
    spec: P
    """The mesh axis that each dim is sharded over."""
    init: Callable
    """(key, shape) -> initial values."""
    decay: bool = True
    """Whether weight decay applies: to matrices, not to gains and biases."""
    keep_float32: bool = False
    """Computed with in float32, not in train.dtype."""
    stays_sharded: bool = False
    """Each dp rank uses only its own part (expert parallelism), so it is never gathered."""


def normal(fan_in):
    return lambda key, shape: fan_in**-0.5 * jax.random.normal(key, shape)


def norm_gain(dim):
    return Param((dim,), P(None), lambda key, shape: jnp.ones(shape), decay=False)


def zero_bias(*shape, spec=None):
    """A bias: zero at first."""
    spec = spec or P(*[None] * len(shape))
    return Param(shape, spec, lambda key, shape: jnp.zeros(shape), decay=False)


def mlp_table(cfg: Config, F: int, name: str = "") -> dict:
    m = cfg.model
    D, N, C = m.d_model, m.n_layers, 1 + (m.activation == "swiglu")
    table = {
        f"{name}in_CDF": Param((C, D, F), P(None, "dp", "tp"), normal(D)),
        f"{name}out_FD": Param((F, D), P("tp", "dp"), normal(2 * N * F)),
    }
    if m.mlp_bias and not name:
        table |= dict(in_bias_CF=zero_bias(C, F, spec=P(None, "tp")), out_bias_D=zero_bias(D))
    return table


def norm_table(cfg: Config, name: str = "norm") -> dict:
    D = cfg.model.d_model
    table = {f"{name}_D": norm_gain(D)}
    return table | {f"{name}_bias_D": zero_bias(D)} if cfg.model.norm_bias else table


def layer_places(cfg: Config) -> list[tuple[str, str, int]]:
    """Where each layer's weights are in params: params[group][kind][name][row]."""
    prefix, block = layer_kinds(cfg.model.prefix), layer_kinds(cfg.model.pattern)
    places = []
    for group, kinds in (("prefix", prefix), ("layers", block * n_blocks(cfg.model))):
        places += [(group, kind, kinds[:n].count(kind)) for n, kind in enumerate(kinds)]
    return places


def gather_over_dp(w: dict, table: dict) -> dict:
    """FSDP: gather over dp.  The transpose reduce-scatters the gradient."""
    alone = lax.axis_size("dp") == 1  # XLA would copy, on a CPU more than a decoding step computes

    def gather(x, p: Param):
        if alone or p.stays_sharded or "dp" not in p.spec:
            return x
        return lax.all_gather(x, "dp", axis=p.spec.index("dp"), tiled=True)

    return jax.tree.map(gather, w, table)


def tp_part(x, dim):
    """This tp shard's part of an array that all of them hold."""
    size = x.shape[dim] // lax.axis_size("tp")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * size, size, dim)


def gather_rows(x_BLD):
    """x of all tp shards, where the order of tokens does not matter: each shard's pieces of the
    sequences are rows of their own.  Gathered along the sequence they would all be copied again."""
    return lax.all_gather(x_BLD, "tp", tiled=True)


def scatter_rows(y_BLD):
    """The sum over tp of what was made of `all_rows`, for the rows of this shard."""
    return lax.psum_scatter(y_BLD, "tp", tiled=True)


def sequences_to_rows(x_BL):
    """What all shards hold of whole sequences, put in the order of `all_rows`."""
    x = x_BL.reshape(len(x_BL), lax.axis_size("tp"), -1, *x_BL.shape[2:]).swapaxes(0, 1)
    return x.reshape(-1, *x.shape[2:])


def rows_to_sequences(x_BL):
    """The inverse of `as_rows`."""
    x = x_BL.reshape(lax.axis_size("tp"), -1, *x_BL.shape[1:]).swapaxes(0, 1)
    return x.reshape(len(x), -1, *x_BL.shape[2:])


def add_bias(x, bias):
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
    return add_bias(y_BLD, w.get(f"{name}_bias_D")).astype(x_BLD.dtype)


def softcap(x, cap: float):
    return cap * jnp.tanh(x / cap) if cap else x


def platform() -> str:
    """Of the ambient mesh's devices, be they here or only planned with."""
    return jax.sharding.get_abstract_mesh().abstract_device.platform


def multiply(sums: str, x, w, dtype=None):
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
    return multiply(sums, x, w, dtype)


def einsum_backward(sums, dtype, xw, g):
    of_x, of_w, of_y = re.split(",|->", sums)
    (x, w), g = xw, g.astype(xw[0].dtype)
    return multiply(f"{of_y},{of_w}->{of_x}", g, w), multiply(f"{of_x},{of_y}->{of_w}", x, g)


einsum.defvjp(lambda sums, x, w, dtype: (multiply(sums, x, w, dtype), (x, w)), einsum_backward)


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
    h_BLCF = add_bias(
        einsum("BLD,CDF->BLCF", x_BLD, w[f"{name}in_CDF"]), w.get(f"{name}in_bias_CF")
    )
    return einsum("BLF,FD->BLD", activate(h_BLCF, 2, cfg), w[f"{name}out_FD"])


def mlp(x_BLD, w, cfg):
    y_BLD = feed_forward(gather_rows(x_BLD), w, cfg)
    return add_bias(scatter_rows(y_BLD), w.get("out_bias_D"))


def add_to_row(total, new, row):
    """total with new added to one row, which there has to be: total.at[row].add would make sure."""
    new = lax.dynamic_index_in_dim(total, row, keepdims=False) + new.astype(total.dtype)
    return lax.dynamic_update_index_in_dim(total, new, row, 0)


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


def mark_varying(tree):
    """The same, typed as different on every device."""

    def vary(x):
        missing = tuple(set(AXES) - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)
