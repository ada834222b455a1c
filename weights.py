"""The record that describes a weight, and the initial values of weights.

Which weights a model has is in the tables of layers.py, attention.py, experts.py and model.py.

Dimension key (a suffix on every array's name spells its logical shape):
  W  weights   C  chunks of random numbers   I  numbers of a chunk
  A  dims of a weight without that of the layers, filled up to four   2  the two words of a key
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
from jax.extend.random import threefry2x32_p
from jax.nn import initializers
from jax.sharding import PartitionSpec as P

from errors import USAGE, UserError
from utils import AXES, with_slices


@dataclass(frozen=True)
class Param:
    """One weight: the only place that describes it."""

    shape: tuple[int, ...]
    spec: P
    """For each dim, the mesh axis that it is sharded over, or None."""
    init: Callable
    """(key, shape) -> initial values; of one layer, if layers are stacked."""
    is_matrix: bool = True
    """A matrix decays, and is used in train.dtype; gains and biases do not, and stay float32."""
    keep_float32: bool = False
    """A matrix that is used in float32 all the same."""
    stays_sharded: bool = False
    """Each dp rank uses only its own part (expert parallelism), so it is never gathered."""
    is_routed: bool = False
    """It belongs to routed experts, of which a token uses only n_active of n_experts."""
    adds_one: bool = False
    """It is used as 1 + weight."""
    is_stacked: bool = False
    """The first dim counts layers."""
    rows: tuple[int, ...] = ()
    """The dims over which a product with the weight sums, numbered as in one layer.  Only matrices
    of layers have them; the embeddings and the head do not."""
    columns: tuple[int, ...] = ()
    """The dims of the product's result.  Each index of the other dims is a matrix of its own."""

    def of_one_layer(self, dims) -> list:
        """The elements of `dims`, one for each dim, without the one that counts layers."""
        return list(dims[1:] if self.is_stacked else dims)


@dataclass(frozen=True)
class Normal:
    """An initializer: normal with mean 0.  `draw_normals` draws the same numbers."""

    std: float

    def __call__(self, key, shape):
        return self.std * jax.random.normal(key, shape)


def normal(fan_in) -> Normal:
    """Normal with standard deviation fan_in ** -0.5."""
    return Normal(fan_in**-0.5)


def norm_gain(*shape, adds_one: bool, spec=None, initial: float = 1.0) -> Param:
    """The gain of a norm, by default the same on every device."""
    spec, init = spec or P(*[None] * len(shape)), initializers.constant(initial - adds_one)
    return Param(shape, spec, init, is_matrix=False, adds_one=adds_one)


def zero_bias(*shape, spec=None, **fields) -> Param:
    """A bias, initially zero, by default the same on every device.  fields: others of its Param."""
    spec = spec or P(*[None] * len(shape))
    return Param(shape, spec, initializers.zeros, is_matrix=False, **fields)


# ---- initial values


def random_key(seed: int):
    """The key of a run.  Its generator is fixed, because JAX's default may be set to rbg, whose
    numbers in a vmap depend on the mesh."""
    return jax.random.key(seed, impl="threefry2x32")


def init_weights(table, seed: int):
    """Initial values of a tree of Params, float32.  Random ones are drawn on the ambient mesh.

    Each weight and layer has a key of its own, so that the mesh does not change them.
    """
    leaves, treedef = jax.tree.flatten_with_path(table)
    params = [p for _, p in leaves]
    crc_W = [zlib.crc32(jax.tree_util.keystr(path).encode()) for path, _ in leaves]
    key_W = jax.vmap(partial(jax.random.fold_in, random_key(seed)))(np.array(crc_W, np.uint32))
    is_normal_W = np.array([can_draw(p) for p in params])
    normals = [p for p, is_normal in zip(params, is_normal_W, strict=True) if is_normal]
    drawn = iter(draw_normals(normals, key_W[is_normal_W]) if normals else ())

    def initial(p, is_normal, key):
        return next(drawn) if is_normal else run_initializer(p, key)

    return treedef.unflatten(map(initial, params, is_normal_W, key_W))


def can_draw(p: Param) -> bool:
    """Whether `draw_normals` can draw a weight; on enough devices, those of every preset."""
    dims = p.of_one_layer(p.shape)
    fits = len(dims) <= 4 and math.prod(dims[-3:]) < 2**32 and math.prod(dims[:-3]) < 2**16
    return isinstance(p.init, Normal) and fits


def run_initializer(p: Param, key):
    """The initial values of a weight, by its initializer."""
    if not p.is_stacked:
        return p.init(key, p.shape)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(p.shape[0]))
    return jax.vmap(lambda key: p.init(key, p.shape[1:]))(keys)


CHUNK = 2**16
"""How many random numbers a device draws at once."""


def draw_normals(params: list[Param], key_W) -> list:
    """`run_initializer` of each weight, where all initializers are Normal.

    One loop draws the numbers of all weights, on each device those of its own parts only.  XLA on a
    CPU compiles it in 1.5 s, and takes up to a second for each array that is drawn by itself.
    """

    @jax.shard_map(in_specs=P(), out_specs=[p.spec for p in params])
    def per_device(key_W):
        parts = [LocalPart(p) for p in params]
        n = min(CHUNK, max(part.n_numbers for part in parts))
        n_chunks_W = np.array([-(-part.n_numbers // n) for part in parts])  # of each layer
        stop_W = np.cumsum(n_chunks_W * [part.n_layers for part in parts])
        start_W = np.append(0, stop_W[:-1])
        table_W = jax.tree.map(lambda *values: jnp.stack(values), *[part.values for part in parts])
        table_W |= dict(key=key_W, start=jnp.uint32(start_W), n_chunks=jnp.uint32(n_chunks_W))

        def draw(c):
            weight = (c >= np.uint32(stop_W)).sum()
            row = jax.tree.map(lambda x_W: x_W[weight], table_W)
            layer, i = jnp.divmod(c - row["start"], row["n_chunks"])
            layer_key = jax.random.fold_in(row["key"], row["first_layer"] + layer)
            key = jnp.where(row["is_stacked"], layer_key, row["key"])
            dims = row["size_A"], row["start_A"], row["whole_A"]
            return draw_chunk(jax.random.key_data(key), i * np.uint32(n), *dims, row["std"], n)

        normal_CI = lax.map(draw, jnp.arange(stop_W[-1], dtype=jnp.uint32))
        values = []
        for p, part, start, stop in zip(params, parts, start_W, stop_W, strict=True):
            x = normal_CI[start:stop].reshape(part.n_layers, -1)[:, : part.n_numbers]
            values.append(mark_replicated(x.reshape(part.sizes), p.spec))
        return values

    return per_device(key_W)


class LocalPart:
    """A device's part of a weight, inside shard_map."""

    def __init__(self, p: Param):
        counts = [1 if axis is None else lax.axis_size(axis) for axis in p.spec]
        index = [0 if axis is None else lax.axis_index(axis) for axis in p.spec]
        self.sizes = [size // count for size, count in zip(p.shape, counts, strict=True)]
        start = [size * i for size, i in zip(self.sizes, index, strict=True)]
        self.n_layers = self.sizes[0] if p.is_stacked else 1
        self.n_numbers = math.prod(p.of_one_layer(self.sizes))
        """In each layer."""
        if self.n_numbers >= 2**32:  # draw_chunk counts them in 32 bits
            what = f"a layer's weight has {self.n_numbers:,} numbers on a device, 2**32 or more"
            raise UserError(USAGE, what, "give a mesh of more devices")

        def four_dims(values, missing):
            values = p.of_one_layer(values)
            return jnp.stack([jnp.uint32(x) for x in [missing] * (4 - len(values)) + values])

        # What `draw_normals` looks up for each chunk: a table of chunks would be a constant of the
        # program, of a million rows for 70 billion numbers.
        self.values = dict(
            std=np.float32(p.init.std),
            is_stacked=np.bool_(p.is_stacked),
            first_layer=jnp.uint32(start[0]),
            size_A=four_dims(self.sizes, 1),
            start_A=four_dims(start, 0),
            whole_A=four_dims(p.shape, 1),
        )


def draw_chunk(key_2, first, size_A, start_A, whole_A, std, n: int):
    """Numbers first .. first + n - 1 of a device's part of a layer, float32 [n]: std times the
    elements of jax.random.normal(key, whole_A) at their indices.

    Threefry (Salmon et al. 2011) hashes an element's index in the whole, a number of 64 bits.
    """
    i_I = first + lax.iota(jnp.uint32, n)
    at_AI = []
    for a in reversed(range(4)):
        at_AI.insert(0, i_I % size_A[a] + start_A[a])
        i_I //= size_A[a]
    rest_I = (at_AI[1] * whole_A[2] + at_AI[2]) * whole_A[3] + at_AI[3]
    stride = whole_A[1] * whole_A[2] * whole_A[3]
    # 64 bits of at[0] * stride + rest, where at[0] < 2**16, stride < 2**32 and rest < stride.
    high_I, low_I = at_AI[0] * (stride >> 16), at_AI[0] * (stride & 0xFFFF)
    product_I = (high_I << 16) + low_I
    sum_I = product_I + rest_I
    carry_I = (product_I < low_I).astype(jnp.uint32) + (sum_I < product_I).astype(jnp.uint32)
    bits_I, more_bits_I = threefry2x32_p.bind(*key_2, (high_I >> 16) + carry_I, sum_I)
    # As jax.random.normal: 23 bits are the fraction of a float in [1, 2).
    float_bits_I = (bits_I ^ more_bits_I) >> 9 | np.uint32(0x3F800000)
    lowest = np.nextafter(np.float32(-1), np.float32(0))
    fraction_I = lax.bitcast_convert_type(float_bits_I, jnp.float32) - 1
    uniform_I = jnp.maximum(lowest, fraction_I * (1 - lowest) + lowest)
    return std * (np.float32(np.sqrt(2)) * lax.erf_inv(uniform_I))


def mark_replicated(x, spec: P):
    """x, whose copies along the mesh axes that spec does not name are equal, typed as equal there.

    JAX has no cast for that, so this takes the maximum of the copies.
    """
    varying = jax.typeof(x).manual_axis_type.varying
    copied = tuple(axis for axis in with_slices(*AXES) if axis in varying and axis not in spec)
    return lax.pmax(x, copied) if copied else x
