"""The training pass over a pipeline schedule: the loss of a batch and its gradient.

DIMS
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attention import full_row_span
from config import Config, layer_kinds
from experts import MOE_STATS
from layers import gather_rows, mark_varying, norm, norm_table, sequences_to_rows
from model import (
    apply_front,
    apply_layers,
    count_layers,
    cross_entropy,
    prepare_weights,
    split_chunks,
)
from pipeline import Stage, branch_policy, layers_to_parts, make_schedule, run_schedule


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
        return gather_rows(norm(y_BLD, gains, "norm", cfg))

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
    target_BL = jnp.pad(sequences_to_rows(target_BL), ((0, 0), (0, fill)), constant_values=-1)
    target_BL = lax.dynamic_slice_in_dim(target_BL, s * L, L, 1)
    chunks = (
        split_chunks(x_BLD.reshape(-1, D), cfg),
        split_chunks(target_BL.reshape(-1), cfg, fill=-1),
    )
    loss = lax.pcast(jnp.float32(0), ("dp", "pp"), to="varying")
    (loss, of_last), of_x = lax.scan(add, (loss, {name: grads[name] for name in last}), chunks)
    of_gains, of_y_BLD = back(of_x.reshape(-1, D)[: B * L].reshape(B, L, D))
    of_gains = accumulate({name: grads[name] for name in gains}, of_gains)
    return loss, of_last | of_gains, of_y_BLD


def prepare_parts(params, cfg: Config, dtype) -> dict:
    """`ready` weights, with the layers as mesh.schedule takes them."""
    w = prepare_weights(params, cfg, dtype)
    return w | dict(layers=layers_to_parts(w["layers"], cfg))


def reduce_total(total, params, cfg: Config):
    """(loss, gradient, statistics) of the global batch from this device's Total, as params rest."""
    _, back = jax.vjp(partial(prepare_parts, cfg=cfg, dtype=jnp.float32), params)
    stats, layers = total.stats, total.stats["layers"]
    if cfg.mesh.virtual_stages > 1:
        rest = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), layers)
        (layers,) = jax.linear_transpose(partial(layers_to_parts, cfg=cfg), rest)(layers)
    stats = stats | dict(layers=lax.psum(layers, ("dp", "tp")))
    if "prefix" in stats:  # stage 0 has it
        stats |= dict(prefix=lax.psum(stats["prefix"], ("dp", "pp", "tp")))
    return lax.psum(total.loss, ("dp", "pp")), back(total.grads)[0], stats


def zero_stats(params, cfg: Config) -> dict:
    """The sums of moe layers' statistics before any layer has run."""

    def of(kind, w):
        n, E = w["attn_norm_D"].shape[:-1], cfg.model.n_experts
        zeros = dict(load_E=jnp.zeros((*n, E)), **{k: jnp.zeros(n) for k in MOE_STATS})
        return zeros if "moe" in kind else None

    groups = {group: params[group] for group in ("layers", "prefix") if group in params}
    return mark_varying(
        {g: {kind: of(kind, w) for kind, w in ws.items()} for g, ws in groups.items()}
    )


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
        return [mark_varying(x) for x, own in zip(flat(back)[0], own, strict=True) if own]

    def unpack(arrays, weights):
        arrays = iter(arrays)
        leaves = [next(arrays) if own else x for x, own in zip(constants, own, strict=True)]
        back = jax.tree.unflatten(form, leaves)
        back.args_res[0] = weights
        return back

    return pack, unpack


def add_slice_gradient(
    w, token_MBL, target_MBL, total: Total, key, first_row, n_tokens, cfg: Config
):
    """total, and the gradient of a slice's microbatches (all stages', of this dp rank) added.

    w: `ready` weights, the layers dealt.  key: dropout's, for this step.  first_row: the slice's
    first row in the global batch.  n_tokens: those counted in the global batch.
    """
    before, kinds = len(layer_kinds(cfg.model.prefix)), layer_kinds(cfg.model.pattern)
    plan, s = make_schedule(cfg, token_MBL.shape[0]), lax.axis_index("pp")
    span = partial(full_row_span, token_MBL, cfg=cfg, first_row=first_row)
    head = {name: w[name] for name in head_names(cfg)}
    first = {name: x for name, x in w.items() if name in ("embed_VD", "position_LD", "prefix")}

    def opening(m):
        return lambda first, grads: apply_front(first, token_MBL[m], span(m), cfg, key, grads=grads)

    def run(m, r):
        number = before + (r * plan.pp + s) * count_layers(plan.part(w["layers"], r))
        own = partial(apply_layers, kinds=kinds, first=number, at=span(m), cfg=cfg, key=key)
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
    x_BLD = mark_varying(jnp.zeros(x_BLD.shape, x_BLD.dtype))
    (_, stats, _), example = jax.vjp(run(s, s), *of_part(total, s), x_BLD)
    pack, unpack = packing(example)
    work = Stage(begin, forward, score, backward, finish)
    return run_schedule(plan, work, x_BLD, pack(example), total, branch_policy(cfg))
