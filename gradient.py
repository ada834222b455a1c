"""The loss of a batch and its gradient: the work of a pipeline schedule, and the sums over
microbatches and devices.  pipeline.py decides when each stage does it.

Dimension key (a suffix on every array's name spells its logical shape):
  M  microbatches   B  sequences   L  sequence length   D  d_model   V  vocabulary
  E  experts

Inside shard_map the letters still name the whole dims; a sharded dim is only as long as this
device's part.
"""

import copy
import math
from functools import partial
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import model
from architecture import layer_kinds
from attention import Span, full_row_span
from config import SLICE, Config
from experts import MOE_STATS
from layers import gather_rows, mark_varying, norm, norm_table, scatter_sum, sequences_to_rows
from pipeline import branch_policy, layers_to_parts, make_schedule, run_schedule
from utils import AXES, BATCH, STAGE, with_slices

# ---- sums over microbatches


class Total(NamedTuple):
    """The sums over the microbatches of an update so far, on this device."""

    loss: jax.Array
    """This device's share of the mean loss, nats."""
    grads: dict
    """Float32, in the form of `prepare_parts`."""
    stats: dict
    """Sums of the layers' statistics, by group ("layers" or "prefix") and kind like params;
    "prefix" is {} in a model without one."""


def zero_total(w, cfg: Config) -> Total:
    """The Total before the first microbatch; w: weights from `prepare_parts`."""

    def kind_stats(kind, weights, dim):
        shape, E = model.stacked_shape(weights), cfg.model.n_experts
        dims = *shape[:dim], math.prod(shape[dim:])  # parts, if there are any, and layers
        sums = dict(logit=jnp.zeros(dims)) if cfg.log.norms_every else {}
        if "moe" in kind:
            sums |= dict(load_E=jnp.zeros((*dims, E)))
            sums |= {name: jnp.zeros(dims) for name in MOE_STATS}
        return sums

    stats = {
        group: {kind: kind_stats(kind, weights, dim) for kind, weights in w.get(group, {}).items()}
        for group, dim in dict(layers=layer_dim(cfg), prefix=0).items()
    }
    grads = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), w)
    zero = lax.pcast(jnp.float32(0), with_slices(*BATCH), to="varying")
    return Total(zero, grads, mark_varying(stats))


def prepare_parts(params, cfg: Config, dtype) -> dict:
    """`prepare_weights`, with the layers in the parts of the schedule, in the form of
    `model.arrange_layers`."""
    w = model.prepare_weights(params, cfg, dtype)
    w |= dict(layers=layers_to_parts(w["layers"], cfg))
    return model.arrange_layers(w, cfg, layer_dim(cfg))


def layer_dim(cfg: Config) -> int:
    """The dim of the arrays in w["layers"] that counts layers: 1 after a dim of parts, else 0."""
    return 1 if cfg.mesh.virtual_stages > 1 else 0


def copy_to_slices(params, cfg: Config):
    """The weights, typed as different in every slice.  Only its transpose is used, which sums the
    gradients over the slices, in mesh.slow_dtype; the rounded weights are not used."""
    if cfg.mesh.slices == 1:
        return params

    def copy(x):
        x = lax.pcast(x.astype(cfg.mesh.slow_dtype), SLICE, to="varying")
        return x.astype(jnp.float32)

    return jax.tree.map(copy, params)


def reduce_total(total: Total, params, cfg: Config):
    """(loss, gradient, statistics) of the global batch; the gradient is sharded like params."""

    def prepare(params):
        return prepare_parts(copy_to_slices(params, cfg), cfg, jnp.float32)

    # Summing gradients over devices is the transpose of preparing the weights.  It sums within each
    # slice first, so that only sums, sharded over dp, cross the slow network.
    _, backward = jax.vjp(prepare, params)
    (grads,) = backward(total.grads)
    layers = total.stats["layers"]
    if cfg.mesh.virtual_stages > 1:  # from the parts' order back to that of the layers
        example = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), layers)
        (layers,) = jax.linear_transpose(partial(layers_to_parts, cfg=cfg), example)(layers)
    layers = lax.psum(layers, with_slices(*STAGE))
    # Only the first stage has counted the prefix.
    prefix = lax.psum(total.stats["prefix"], with_slices(*AXES))
    stats = dict(layers=layers, prefix=prefix)
    return lax.psum(total.loss, with_slices(*BATCH)), grads, stats


# ---- the last norm, the logits and the loss


def score_and_gradient(w, grads, y_BLD, target_BL, n_tokens, cfg: Config):
    """(loss, grads, gradient of y_BLD): a microbatch's share of the mean loss over n_tokens; the
    sums of grads for the weights of the last norm and the logits, with their gradients added.

    All stages score the last stage's y_BLD together, each a part of the sequence.
    """
    s, pp = lax.axis_index("pp"), lax.axis_size("pp")
    padding = -y_BLD.shape[1] % pp

    def scatter_and_norm(gains, y_BLD):
        """This stage's part of the sequence of the last stage's y_BLD, padded and normed."""
        if pp > 1:  # for one stage XLA on a CPU would copy y
            y_BLD = jnp.pad(jnp.where(s == pp - 1, y_BLD, 0), ((0, 0), (0, padding), (0, 0)))
            y_BLD = scatter_sum(y_BLD, "pp", 1)
        return gather_rows(norm(y_BLD, gains, "norm", cfg))

    unembed_name = "embed_VD" if cfg.model.tie_embeddings else "unembed_DV"
    unembed, gains = {unembed_name: w[unembed_name]}, {name: w[name] for name in norm_table(cfg)}
    x_BLD, norm_backward = jax.vjp(scatter_and_norm, gains, y_BLD)
    L = x_BLD.shape[1]
    target_BL = sequences_to_rows(target_BL)
    target_BL = jnp.pad(target_BL, ((0, 0), (0, padding)), constant_values=-1)
    target_BL = lax.dynamic_slice_in_dim(target_BL, s * L, L, 1)
    loss, unembed_grads, x_grad_BLD = score_chunks(unembed, grads, x_BLD, target_BL, n_tokens, cfg)
    gain_grads, y_grad_BLD = norm_backward(x_grad_BLD)
    gain_grads = jax.tree.map(add, {name: grads[name] for name in gains}, gain_grads)
    return loss, unembed_grads | gain_grads, y_grad_BLD


def score_chunks(unembed, grads, x_BLD, target_BL, n_tokens, cfg: Config):
    """(loss, grads of unembed, gradient of x_BLD) of a normed x_BLD; the gradient of unembed is
    added to that in grads.  The gradient of a chunk is computed while its logits are in memory, so
    that no logits are kept or computed twice."""

    def objective(unembed, x_BLD, target_BL):
        nll_BL, z_BL, _ = model.cross_entropy(x_BLD, target_BL, unembed, cfg)
        is_counted_BL = target_BL >= 0
        loss = jnp.where(is_counted_BL, nll_BL, 0).sum() / n_tokens
        z_loss = cfg.train.z_loss * jnp.where(is_counted_BL, z_BL**2, 0).sum() / n_tokens
        return loss + z_loss, loss

    def add_chunk(total, chunk):
        gradient = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (_, loss), (unembed_grads, x_grad) = gradient(unembed, *chunk)
        return jax.tree.map(add, total, (loss, unembed_grads)), x_grad

    chunks = model.split_chunks(x_BLD, target_BL, cfg)
    zero = lax.pcast(jnp.float32(0), with_slices(*BATCH), to="varying")
    start = zero, {name: grads[name] for name in unembed}
    (loss, grads), x_grad = lax.scan(add_chunk, start, chunks)
    x_grad = x_grad.reshape(-1, x_BLD.shape[-1])[: target_BL.size]
    return loss, grads, x_grad.reshape(x_BLD.shape)


# ---- what waits between the forward and the backward pass


def with_weights(backward, weights):
    """A copy of a function from jax.vjp, with its saved first argument replaced by `weights`.

    `args_res`, the list of saved arguments, may be assigned to: jax 0.12 documents that under
    jax.vjp's `saveable_args`, and 0.10, which has no such option, has the same list.
    """
    backward = copy.copy(backward)
    backward.args_res = [weights, *backward.args_res[1:]]
    return backward


class SavedArrays:
    """Packs a backward function, which jax.vjp made from a function of (weights, acc, x), into the
    arrays that must be buffered until it is called, and unpacks it from them.

    The example's microbatch and part have numbers that vary over pp, so every array that depends on
    them is typed as varying over pp; the others are constants.  The weights need no buffer: they
    are in memory anyway.
    """

    def __init__(self, example):
        """example: a backward function, for a microbatch and part whose numbers vary over pp."""
        self.leaves, self.treedef = jax.tree.flatten(with_weights(example, None))
        self.is_buffered = ["pp" in jax.typeof(x).manual_axis_type.varying for x in self.leaves]
        self.example = self.pack(example)

    def pack(self, backward) -> list:
        """The arrays of a backward function to buffer."""
        arrays = jax.tree.leaves(with_weights(backward, None))
        pairs = zip(arrays, self.is_buffered, strict=True)
        return [mark_varying(x) for x, is_buffered in pairs if is_buffered]

    def unpack(self, arrays: list, weights):
        """The backward function, from its arrays and the weights."""
        arrays = iter(arrays)
        pairs = zip(self.leaves, self.is_buffered, strict=True)
        leaves = [next(arrays) if is_buffered else leaf for leaf, is_buffered in pairs]
        return with_weights(jax.tree.unflatten(self.treedef, leaves), weights)


# ---- the work


def balance_cotangent(stats, cfg: Config):
    """The gradient of the objective with respect to a microbatch's statistics: only the balance is
    in the objective."""
    weight = cfg.train.balance_loss / cfg.train.batch_size

    def cotangent(path, x):
        return jnp.full_like(x, weight if path[-1].key == "balance" else 0)

    return jax.tree.map_with_path(cotangent, stats)


class Rows(NamedTuple):
    """The rows of one accumulation step, all stages' microbatches of this dp rank."""

    token_MBL: jax.Array
    target_MBL: jax.Array
    first_row: jax.Array
    """The number of the first row in the global batch."""
    n_tokens: jax.Array
    """Counted tokens of the global batch."""
    key: jax.Array
    """Of this update, for dropout."""

    def span(self, m, cfg: Config) -> Span:
        """The Span of microbatch m."""
        return full_row_span(self.token_MBL, m, cfg, self.first_row)


class ScheduledWork:
    """What `run_schedule` does in one accumulation step.  begin, forward, score, backward and
    finish take the Total so far and return the new one."""

    def __init__(self, w, rows: Rows, total: Total, cfg: Config):
        """See `add_gradient`."""
        self.w, self.rows, self.cfg = w, rows, cfg
        scored = ("unembed_DV", *norm_table(cfg))  # see score_and_gradient
        self.front = {name: x for name, x in w.items() if name not in ("layers", *scored)}
        self.schedule = make_schedule(cfg, len(rows.token_MBL))
        # An example, for shapes and types.  Its microbatch and part have the stage's number,
        # because SavedArrays needs numbers that vary over pp.
        s = lax.axis_index("pp")
        x_BLD = jax.eval_shape(lambda: self.apply_front(s, self.front, None)[0])
        self.example_BLD = mark_varying(jnp.zeros(x_BLD.shape, x_BLD.dtype))
        _, self.example_stats, backward = self.forward_part(s, s, total, self.example_BLD)
        self.saved = SavedArrays(backward)

    def apply_front(self, m, front, acc):
        """`model.apply_front` on microbatch m."""
        rows, cfg = self.rows, self.cfg
        return model.apply_front(front, rows.token_MBL[m], rows.span(m, cfg), cfg, rows.key, acc)

    def apply_part(self, m, r, layers, acc, x_BLD):
        """`model.apply_layers` on microbatch m, with part r of the layers."""
        rows, cfg = self.rows, self.cfg
        chunk = r * self.schedule.pp + lax.axis_index("pp")
        first_layer = len(layer_kinds(cfg.model.prefix)) + chunk * model.count_layers(layers)
        kinds, span = layer_kinds(cfg.model.pattern), rows.span(m, cfg)
        return model.apply_layers(layers, kinds, first_layer, x_BLD, span, cfg, rows.key, acc)

    def part(self, total: Total, r):
        """Part r of the layers' weights, and of their gradient so far."""
        take = self.schedule.take_part
        return take(self.w["layers"], r), take(total.grads["layers"], r)

    def forward_part(self, m, r, total: Total, x_BLD):
        """(y_BLD, statistics, backward function) of `apply_part`."""
        f, (layers, grads) = partial(self.apply_part, m, r), self.part(total, r)
        # The sum's value is not used; `backward` gives the new sum as its cotangent.
        (y_BLD, stats, _), backward = jax.vjp(f, layers, grads, x_BLD)
        return y_BLD, stats, backward

    def begin(self, m, x_BLD, total):
        """(x_BLD, total): the embedding of microbatch m, in place of the given x_BLD."""
        x_BLD, stats, _ = self.apply_front(m, self.front, None)
        prefix = jax.tree.map(add, total.stats["prefix"], stats)
        return x_BLD, total._replace(stats=total.stats | dict(prefix=prefix))

    def forward(self, m, r, x_BLD, total):
        """(y_BLD, saved, total): microbatch m through part r; saved: what `backward` needs."""
        y_BLD, stats, backward = self.forward_part(m, r, total, x_BLD)
        layers = total.stats["layers"]
        part = jax.tree.map(add, self.schedule.take_part(layers, r), stats)
        layers = self.schedule.put_part(layers, r, part)
        total = total._replace(stats=total.stats | dict(layers=layers))
        return y_BLD, self.saved.pack(backward), total

    def score(self, m, y_BLD, total):
        """(gradient of y_BLD, total): by all stages together, of the last stage's y_BLD."""
        rows = self.rows
        loss, grads, y_grad_BLD = score_and_gradient(
            self.w, total.grads, y_BLD, rows.target_MBL[m], rows.n_tokens, self.cfg
        )
        return y_grad_BLD, total._replace(loss=total.loss + loss, grads=total.grads | grads)

    def backward(self, m, r, saved, grad_BLD, total):
        """(gradient of the x_BLD of `forward`, total)."""
        layers, grads = self.part(total, r)
        backward = self.saved.unpack(saved, layers)
        stats_grad = balance_cotangent(self.example_stats, self.cfg)
        _, grads, grad_BLD = backward((grad_BLD, stats_grad, grads))
        grads = self.schedule.put_part(total.grads["layers"], r, grads)
        return grad_BLD, total._replace(grads=total.grads | dict(layers=grads))

    def finish(self, m, grad_BLD, total):
        """The total after the backward pass of `begin`, which is computed again for it."""
        grads = {name: total.grads[name] for name in self.front}
        (_, stats, _), backward = jax.vjp(partial(self.apply_front, m), self.front, grads)
        new, grads = backward((grad_BLD, balance_cotangent(stats, self.cfg), grads))
        # Of these, `summed_lookup` and `accumulate_gradient` have added the gradient already.
        others = self.front.keys() - {"embed_VD", "position_LD", "prefix"}
        grads |= {name: jax.tree.map(add, grads[name], new[name]) for name in others}
        return total._replace(grads=total.grads | grads)


def add_gradient(w, rows: Rows, total: Total, cfg: Config) -> Total:
    """The total with the loss and gradient of one accumulation step added; w: weights from
    `prepare_parts`."""
    work = ScheduledWork(w, rows, total, cfg)
    branch = branch_policy(cfg)
    return run_schedule(work.schedule, work, work.example_BLD, work.saved.example, total, branch)
