"""Optimizers and learning rate schedules."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import model
from config import Config


def learning_rate(n, cfg: Config):
    """The rate of the update after n others: linear warmup, then cosine or hold-and-fall to
    min_lr_ratio of the peak."""
    o, steps = cfg.optim, cfg.train.steps
    cosine = o.schedule == "cosine"
    fall = steps - o.warmup_steps if cosine else max(1, round(o.decay_ratio * steps))
    done = jnp.clip((n + 1 - (steps - fall)) / max(1, fall), 0, 1)
    left = 0.5 * (1 + jnp.cos(jnp.pi * done)) if cosine else 1 - done
    warm = (n + 1) / max(1, o.warmup_steps)
    return o.lr * jnp.minimum(warm, o.min_lr_ratio + (1 - o.min_lr_ratio) * left)


def optimizer(cfg: Config) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) on gradients clipped by their global norm.

    The last state counts updates.
    """
    o = cfg.optim
    decayed = jax.tree.map(lambda p: p.decay, model.param_table(cfg))
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.scale_by_adam(o.b1, o.b2, o.eps),
        optax.add_decayed_weights(o.weight_decay, decayed),
        optax.scale_by_learning_rate(partial(learning_rate, cfg=cfg)),
    )
