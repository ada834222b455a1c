"""Muon: momentum whose singular values are all set to about one (Jordan et al. 2024).

Dimension key (a suffix on every array's name spells its logical shape):
  N  matrices   R  rows, over which a product with the weight sums   C  columns
  S  the smaller of R and C   T  the larger
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax

from config import Config
from model import param_table
from weights import Param

# a, b, c of x <- a x + b x^3 + c x^5 on each singular value, in five steps (Amsel et al. 2025, "The
# Polar Express", for values from 0.001 to 1).
OPTIMAL = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
# Rounding may take a value above 1, and from there the steps would diverge.  The margin of 1 % is
# theirs too: values between 0.001 and 1.01 end between 0.85 and 1.13.
STEPS = (*((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in OPTIMAL[:-1]), OPTIMAL[-1])
RMS = 0.2
"""The root mean square of an update's elements, which is about that of AdamW's, so that the rates
and the weight decay of AdamW fit (Liu et al. 2025, "Muon is scalable for LLM training")."""


def orthogonalize(x_ST, dtype: str):
    """x with its singular values moved to between 0.85 and 1.13, if they are at least a hundredth
    of the largest and x has at most 10,000 rows; smaller ones end nearer to zero.  The five steps
    are computed in `dtype`, the norm in float32."""
    x_ST /= jnp.maximum(jnp.linalg.norm(x_ST), 1e-30)
    # The largest singular value is at most the fourth root of the sum of all fourth powers, which
    # is a far closer bound than the Frobenius norm where many are alike.
    gram_SS = jnp.matmul(x_ST, x_ST.T, precision="float32")
    x_ST = (x_ST / jnp.sqrt(jnp.linalg.norm(gram_SS) + 1e-30)).astype(dtype)

    def step(x_ST, abc):
        a, b, c = abc.astype(dtype)
        gram_SS = x_ST @ x_ST.T
        return a * x_ST + (b * gram_SS + c * gram_SS @ gram_SS) @ x_ST, None

    return lax.scan(step, x_ST, jnp.array(STEPS))[0]


def matrix_update(x_RC, dtype: str):
    """The update of a matrix with this momentum, float32."""
    R, C = x_RC.shape
    x_RC = orthogonalize(x_RC, dtype) if R <= C else orthogonalize(x_RC.T, dtype).T
    return RMS * math.sqrt(max(R, C)) * x_RC.astype(jnp.float32)


def part_update(x, p: Param, dtype: str):
    """The update of a device's part of a weight, inside shard_map.

    The devices of a pipeline stage share out the whole matrices of its layers (and experts): one
    all-to-all for each mesh axis of rows and columns brings matrices together, and one takes the
    updates back.  If there are fewer matrices than devices, zeros are added and sent too.  With
    matrices that stay sharded each of the five steps would need a collective.
    """
    rows, columns = ([dim + p.is_stacked for dim in dims] for dims in (p.rows, p.columns))
    counting = [dim for dim in range(x.ndim) if dim not in rows + columns]  # that number matrices
    order = counting + rows + columns
    x = x.transpose(order)
    part_shape, n = x.shape, math.prod(x.shape[: len(counting)])
    x = x.reshape(n, *x.shape[len(counting) :])  # [matrices, *rows, *columns]
    # (mesh axis, dim of x) of each sharded dim.
    moves = [(p.spec[dim], k) for k, dim in enumerate(rows + columns, 1) if p.spec[dim]]
    n_devices = math.prod(lax.axis_size(axis) for axis, _ in moves)
    x = jnp.pad(x, [(0, -n % n_devices)] + [(0, 0)] * (x.ndim - 1))
    for axis, k in moves:
        x = lax.all_to_all(x, axis, split_axis=0, concat_axis=k, tiled=True)
    whole_shape, R = x.shape, math.prod(x.shape[1 : 1 + len(rows)])
    # One after the other: the temporaries of all matrices would not fit.
    update_NRC = lax.map(partial(matrix_update, dtype=dtype), x.reshape(len(x), R, -1))
    x = update_NRC.reshape(whole_shape)
    for axis, k in reversed(moves):
        x = lax.all_to_all(x, axis, split_axis=k, concat_axis=0, tiled=True)
    return x[:n].reshape(part_shape).transpose([order.index(dim) for dim in range(len(order))])


def scale_by_muon(cfg: Config) -> optax.GradientTransformation:
    """Gradients to updates, of the weights that have rows and columns: Nesterov momentum, with its
    singular values set to about one."""
    params = [p for p in jax.tree.leaves(param_table(cfg)) if p.rows]
    specs = [p.spec for p in params]

    def to_updates(momentum, _):
        # Weights that are not Muon's are nodes without leaves.
        leaves, treedef = jax.tree.flatten(momentum)

        @jax.shard_map(in_specs=(specs,), out_specs=specs)
        def update_parts(parts):
            pairs = zip(parts, params, strict=True)
            return [part_update(x, p, cfg.train.dtype) for x, p in pairs]

        return treedef.unflatten(update_parts(leaves))

    trace = optax.trace(cfg.optim.muon_momentum, nesterov=True)
    return optax.chain(trace, optax.stateless(to_updates))
