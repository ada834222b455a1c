"""Optimizers and learning rate schedules, each a line of a table; the average of the weights, and
which gradient norms are spikes.

Dimension key (a suffix on every array's name spells its logical shape):
  U  the last updates
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from config import Config
from errors import look_up
from model import param_table
from muon import scale_by_muon
from utils import warn

# ---- learning rate schedules: (n, cfg) -> how far from min_lr_ratio (0) to the peak (1)


def decay_progress(n, start: int, cfg: Config):
    """0 at update `start`, 1 at the last; n updates have been made before this one."""
    steps = cfg.train.steps
    return jnp.clip((n + 1 - start) / max(1, steps - start), 0, 1)


def cosine(n, cfg: Config):
    """Half a cosine, from the end of the warmup on (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + jnp.cos(jnp.pi * decay_progress(n, cfg.optim.warmup_steps, cfg)))


def linear(n, cfg: Config):
    """A straight line, from the end of the warmup on."""
    return 1 - decay_progress(n, cfg.optim.warmup_steps, cfg)


def constant(n, cfg: Config):
    """The peak, to the end."""
    return 1.0


def wsd(n, cfg: Config):
    """Warmup-stable-decay: the peak, then linear decay over the last optim.decay_ratio of the
    updates (Hu et al. 2024)."""
    decay_steps = max(1, round(cfg.optim.decay_ratio * cfg.train.steps))
    return 1 - decay_progress(n, cfg.train.steps - decay_steps, cfg)


def wsd_sqrt(n, cfg: Config):
    """As wsd, but the decay is 1 - sqrt of its progress: fast at first (Haegele et al. 2024)."""
    return 1 - jnp.sqrt(1 - wsd(n, cfg))


SCHEDULES = dict(cosine=cosine, wsd=wsd, wsd_sqrt=wsd_sqrt, linear=linear, constant=constant)


def warn_of_warmup(cfg: Config):
    if (warmup := cfg.optim.warmup_steps) > cfg.train.steps:
        what = f"optim.warmup_steps={warmup} is more than train.steps={cfg.train.steps}"
        warn(f"{what}: the learning rate will not reach optim.lr={cfg.optim.lr}")


def learning_rate(n, cfg: Config):
    """The rate of update n, from 0: linear warmup, then optim.schedule between the peak and
    min_lr_ratio of it.  Raises UserError USAGE."""
    o = cfg.optim
    level = look_up(SCHEDULES, "optim.schedule", o.schedule)(n, cfg)
    warmup = (n + 1) / max(1, o.warmup_steps)
    return o.lr * jnp.minimum(warmup, o.min_lr_ratio + (1 - o.min_lr_ratio) * level)


# ---- optimizers: cfg -> optax transformation, from the gradient to the change of the weights


def clip(cfg: Config) -> optax.GradientTransformation:
    """Gradients scaled down to a global norm of optim.clip_norm."""
    return optax.clip_by_global_norm(cfg.optim.clip_norm)


def is_layer_matrix(cfg: Config):
    """A tree of booleans: whether each weight is a matrix of a layer."""
    return jax.tree.map(lambda p: len(p.rows) > 0, param_table(cfg))


def scale_layer_matrices(cfg: Config, rate=1.0, power=1.0) -> optax.GradientTransformation:
    """Scales the updates of the layers' matrices by rate, and with muP by (base width / width) **
    power.  power: 1 for AdamW and Lion (Yang et al. 2022, table 8); 0.5 for Muon, whose updates
    have singular values that grow as the root of the width."""
    m = cfg.model
    rate *= (m.mup_base_width / m.d_model) ** power if m.mup_base_width else 1.0
    return optax.masked(optax.scale(rate), is_layer_matrix(cfg))


def decay_weights(cfg: Config) -> optax.GradientTransformation:
    """Decoupled weight decay, for matrices only."""
    mask = jax.tree.map(lambda p: p.is_matrix, param_table(cfg))
    return optax.add_decayed_weights(cfg.optim.weight_decay, mask)


def scale_by_rate(cfg: Config) -> optax.GradientTransformation:
    """The negative `learning_rate` times the update.  Raises UserError USAGE."""
    look_up(SCHEDULES, "optim.schedule", cfg.optim.schedule)  # before anything is traced
    return optax.scale_by_learning_rate(partial(learning_rate, cfg=cfg))


def adam(cfg: Config) -> optax.GradientTransformation:
    """The first moment over the root of the second (Kingma and Ba 2015)."""
    return optax.scale_by_adam(cfg.optim.b1, cfg.optim.b2, cfg.optim.eps)


def with_direction(direction, cfg: Config, **scale) -> optax.GradientTransformation:
    """The parts that all optimizers share, around `direction`, which makes updates of the clipped
    gradients.  scale: see `scale_layer_matrices`."""
    decay = optax.chain(scale_layer_matrices(cfg, **scale), decay_weights(cfg))
    return optax.chain(clip(cfg), direction, decay, scale_by_rate(cfg))


def adamw(cfg: Config) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019): two moments."""
    return with_direction(adam(cfg), cfg)


def lion(cfg: Config) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023): the sign of one moment."""
    return with_direction(optax.scale_by_lion(cfg.optim.b1, cfg.optim.b2), cfg)


def muon(cfg: Config) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024), with one moment, for matrices of layers; AdamW for the rest."""
    names = jax.tree.map(lambda is_one: "muon" if is_one else "adam", is_layer_matrix(cfg))
    direction = optax.partition(dict(muon=scale_by_muon(cfg), adam=adam(cfg)), names)
    return with_direction(direction, cfg, rate=cfg.optim.muon_lr_ratio, power=0.5)


OPTIMIZERS = dict(adamw=adamw, lion=lion, muon=muon)


def optimizer(cfg: Config) -> optax.GradientTransformation:
    """The optimizer that optim.name chooses.  Raises UserError USAGE."""
    return look_up(OPTIMIZERS, "optim.name", cfg.optim.name)(cfg)


# ---- updates


def count_updates(opt, step):
    """How many updates an optimizer's state has had; `step` for a state that does not count."""
    counts = optax.tree.get_all_with_path(opt, "count")
    return counts[-1][1] if counts else step


def with_count(opt, n: int):
    """An optimizer's state whose learning rate is that after n updates."""

    def is_schedule(path, _):
        return any(getattr(key, "tuple_name", "") == "ScaleByScheduleState" for key in path)

    return optax.tree.set(opt, is_schedule, count=jnp.int32(n))


def average_weights(ema, params, n, cfg: Config):
    """The exponential moving average of the weights after update n, from 0; None from None.

    The decay grows to optim.ema, because an average that began with the initial weights would keep
    them for 1 / (1 - optim.ema) updates.
    """
    if ema is None:
        return None
    decay = jnp.minimum(cfg.optim.ema, (1 + n) / (10 + n))
    return jax.tree.map(lambda old, new: old + (1 - decay) * (new - old), ema, params)


# ---- updates that are skipped

SPIKE_WINDOW = 64
"""How many recent gradient norms a new one is compared with."""


def is_spike(grad_norm, recent_U, cfg: Config):
    """Whether a finite gradient norm is train.spike_sigma standard deviations above the mean of
    those before it.  recent_U: oldest first, and -1 for updates that are not made yet."""
    limit = recent_U.mean() + cfg.train.spike_sigma * recent_U.std()
    return jnp.isfinite(grad_norm) & (recent_U[0] >= 0) & (grad_norm > limit)


def add_norm(grad_norm, recent_U):
    """recent_U with a new norm in place of the oldest, if it is finite.  Spikes are added too, so
    that a norm that stays high soon counts as normal."""
    return jnp.where(jnp.isfinite(grad_norm), jnp.append(recent_U[1:], grad_norm), recent_U)
