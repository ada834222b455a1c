"""Grouped matmuls: products of rows with the weights of their experts.

Dimension key (a suffix on every array's name spells its logical shape):
  E  experts   U  pairs of token and expert   O  rows   Y  tiles   Z  rows of a tile
  D  d_model, or the width of other inputs   F  width of the outputs   1  a dim of size 1

Rows are sorted by expert, and size_E says how many each has.  Rows beyond their sum belong to no
expert: what is in them does not matter, and what comes out there is undefined and must not be used.
For `grouped_outer` in tiles one of the two factors must be zero there, and in the rows that pad an
expert's rows to a multiple of Z.

TPUs and GPUs have kernels in JAX's own libraries, which take experts of any size.  Elsewhere rows
are multiplied in tiles of one expert each, for which each size must be a multiple of Z.  In this
file Z=1 selects the kernels.
"""

import importlib

import jax
import jax.numpy as jnp
from jax import lax

from layers import add_to_index, multiply, typed_kernel_outputs, vary_like
from utils import GPUS, compute_capability, platform

# ---- tiles


def tile_shape(U: int, E: int) -> tuple[int, int]:
    """(Y, Z): Y tiles of Z rows hold U pairs, in any distribution over E experts, when each tile
    belongs to one expert.  With many pairs per expert at most a fifth of the rows is padding."""
    Z = max(8, min(1024, U // (4 * E)))
    Z -= Z % (128 if Z > 128 else 8)  # the sizes that matmul units take
    return min(U // Z + E, U), Z


def split_into_tiles(size_E, Z: int, *arrays):
    """(expert_Y, tiles of each array): the expert of each tile; for tiles of no expert, any."""
    tiles = [x.reshape(-1, Z, x.shape[-1]) for x in arrays]
    tile_Y = jnp.arange(len(tiles[0]))
    expert_Y = jnp.searchsorted(jnp.cumsum(size_E) // Z, tile_Y, side="right")
    return jnp.minimum(expert_Y, size_E.size - 1), *tiles


def late_zeros(x, shape, dtype):
    """(zeros, x): zeros that XLA cannot make before x, and that vary over mesh axes as x does.

    XLA on a GPU makes plain zeros of one shape once for all loops that begin with them, keeps them
    from the first loop to the last, and copies them for each: for jaxformer_1b on A100s, from a
    layer's forward pass to its backward pass, 1.5 of 10 GiB.
    """
    zero, x = lax.optimization_barrier((jnp.zeros_like(x, dtype, shape=()), x))
    return jnp.broadcast_to(zero, shape), x


def matmul_in_tiles(x_OD, w_EDF, size_E, Z: int, transposed: bool):
    """`grouped_matmul`, one tile after the other, because lax.ragged_dot multiplies with all E
    experts on CPUs and GPUs, and on TPUs for the gradients of weights (XLA's programs of jax
    0.10.2)."""
    dims = "ZF,DF->ZD" if transposed else "ZD,DF->ZF"

    def add_tile(y_YZF, tile):
        n, expert, x_ZD = tile
        w_DF = w_EDF[expert]
        if w_DF.dtype == jnp.uint16:  # the bits of bfloat16, see generate.pack_layer
            w_DF = lax.bitcast_convert_type(w_DF, jnp.bfloat16)
        y_ZF = multiply(dims, x_ZD, w_DF)
        return lax.dynamic_update_index_in_dim(y_YZF, y_ZF, n, 0), None

    shape = len(x_OD) // Z, Z, w_EDF.shape[1 if transposed else 2]
    zeros_YZF, x_OD = late_zeros(x_OD, shape, x_OD.dtype)
    tiles = jnp.arange(shape[0]), *split_into_tiles(size_E, Z, x_OD)
    y_YZF, _ = lax.scan(add_tile, zeros_YZF, tiles)
    return y_YZF.reshape(len(x_OD), -1)


def outer_in_tiles(x_OD, y_OF, size_E, Z: int):
    """`grouped_outer`, one tile after the other."""

    def add_tile(total_EDF, tile):
        expert, x_ZD, y_ZF = tile
        new_DF = multiply("ZD,ZF->DF", x_ZD, y_ZF, jnp.float32)
        return add_to_index(total_EDF, new_DF, (expert,)), None

    shape = size_E.size, x_OD.shape[1], y_OF.shape[1]
    zeros_EDF, x_OD = late_zeros(x_OD, shape, jnp.float32)
    total_EDF, _ = lax.scan(add_tile, zeros_EDF, split_into_tiles(size_E, Z, x_OD, y_OF))
    return total_EDF.astype(x_OD.dtype)


# ---- kernels


def megablox():
    """The module of JAX's kernels; its package exports a function of the same name."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def block_width(n: int, largest: int, cores: int = 1) -> int:
    """The width of blocks that cover n: at most `largest`, and a multiple of 128 or n itself.  The
    number of blocks is a multiple of `cores`, unless rounding up the width makes it smaller."""
    blocks = -(-n // (largest * cores)) * cores
    return min(n, -(-n // (128 * blocks)) * 128)


def block_sizes(x_OD, E: int, D: int, F: int, input_bytes: int) -> tuple[int, int, int]:
    """Rows, input width and output width of the blocks of a kernel on a TPU, which fit its 16 MiB
    of on-chip memory; input_bytes: of a row of inputs.

    A block of rows is multiplied once for each expert that has some of them.  Output blocks are
    shared out to a chip's cores, of which TPU v4 and v5p have two.
    """
    O, width = len(x_OD), input_bytes // x_OD.dtype.itemsize
    block_rows = next((n for n in (512, 256) if O % n == 0 and 4 * n * E <= O), 128)
    return block_rows, block_width(D, width), block_width(F, 768, cores=2)


def matmul_on_tpu(x_OD, w_EDF, size_E, transposed: bool):
    """`grouped_matmul`.  A block has the whole width of the inputs, if that is at most 2,048 in
    bfloat16, so that an expert's weights are read once for all its rows."""
    (E, D, F), module = w_EDF.shape, megablox()
    D, F = (F, D) if transposed else (D, F)
    blocks = block_sizes(x_OD, E, D, F, 4096)
    with typed_kernel_outputs(module, jax.typeof(x_OD).manual_axis_type):
        return module.gmm(x_OD, w_EDF, size_E, x_OD.dtype, blocks, transpose_rhs=transposed)


def outer_on_tpu(x_OD, y_OF, size_E):
    """`grouped_outer`."""
    module = megablox()
    blocks = block_sizes(x_OD, size_E.size, x_OD.shape[1], y_OF.shape[1], 2048)
    with typed_kernel_outputs(module, jax.typeof(x_OD).manual_axis_type):
        return module.tgmm(x_OD.T, y_OF, size_E, x_OD.dtype, blocks)


def matmul_on_gpu(x_OD, w_EDF, size_E, transposed: bool):
    """`grouped_matmul`, on a Hopper GPU: 490 to 580 TFLOP/s on an H100 for 16 experts of 768 x
    3,072."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    blocks = dict(block_m=192, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=4)
    y_OF = ragged_dot(x_OD, w_EDF, group_sizes=size_E, transpose_rhs=transposed, **blocks)
    return vary_like(y_OF, x_OD)


def outer_on_gpu(x_OD, y_OF, size_E):
    """`grouped_outer`, on a Hopper GPU."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    # The kernel multiplies rows of no expert by zero, and they may be NaN.
    has_expert_O1 = jnp.arange(len(x_OD))[:, None] < size_E.sum()
    x_OD, y_OF = jnp.where(has_expert_O1, x_OD, 0), jnp.where(has_expert_O1, y_OF, 0)
    blocks = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=4)
    w_EDF = transposed_ragged_dot(x_OD, y_OF, group_sizes=size_E, **blocks)
    return vary_like(w_EDF, x_OD)


KERNELS = dict.fromkeys(GPUS, (matmul_on_gpu, outer_on_gpu))
KERNELS["tpu"] = matmul_on_tpu, outer_on_tpu
"""Kernels for `grouped_matmul` and `grouped_outer` by platform."""


# ---- products


def padded_rows(U: int, w_EFD) -> tuple[int, int]:
    """(O, Z): U pairs need O rows, and the size of each expert must be a multiple of Z.  A TPU's
    kernels take whole blocks of 128 rows, and widths from 128 on; those of Hopper GPUs take
    bfloat16, widths of a multiple of 128, and more rows than one block has."""
    E, F, D = w_EFD.shape
    if platform() in GPUS:
        fits = D % 128 == F % 128 == 0 and w_EFD.dtype == jnp.bfloat16
        if fits and compute_capability() == 9:
            return max(U, 256), 1
    elif platform() in KERNELS and min(D, F) >= 128:
        return -(-U // 128) * 128, 1
    Y, Z = tile_shape(U, E)
    return Y * Z, Z


def grouped_matmul(x_OD, w_EDF, size_E, Z: int, transposed=False):
    """y_OF: each row times its expert's weights; transposed, x_OF gives y_OD."""
    if Z > 1:
        return matmul_in_tiles(x_OD, w_EDF, size_E, Z, transposed)
    kernel, _ = KERNELS[platform()]
    return kernel(x_OD, w_EDF, size_E, transposed)


def grouped_outer(x_OD, y_OF, size_E, Z: int):
    """w_EDF: the sum over each expert's rows of x times y."""
    if Z > 1:
        return outer_in_tiles(x_OD, y_OF, size_E, Z)
    _, kernel = KERNELS[platform()]
    return kernel(x_OD, y_OF, size_E)
