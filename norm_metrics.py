"""The arrays of rows of kind "norms": the norms of each layer's gradient, update and weights, and
the size of its attention's scores.  Normalization, as by RMSNorm, is in layers.py."""

import jax
import jax.numpy as jnp

from architecture import layer_places
from config import Config
from model import param_table


def layer_names(cfg: Config) -> list[str]:
    """The rows of `norms_by_layer`: the layers, counted from 0 as in rows of kind "moe", then each
    weight outside of them."""
    layers = [f"layer {n}" for n in range(cfg.model.n_layers)]
    return layers + [name for name in sorted(param_table(cfg)) if name not in ("layers", "prefix")]


def norms_by_layer(tree, cfg: Config):
    """The L2 norm over all of a layer's arrays, in the order of `layer_names`; tree: like the
    weights."""

    def sum_of_squares(x, p):
        return (x**2).sum(range(int(p.is_stacked), x.ndim))

    squares = jax.tree.map(sum_of_squares, tree, param_table(cfg))
    groups = {group: squares.pop(group) for group in ("layers", "prefix") if group in squares}
    sums = {(g, kind): sum(w.values()) for g, kinds in groups.items() for kind, w in kinds.items()}
    layers = [sums[group, kind][row] for group, kind, row in layer_places(cfg.model)]
    return jnp.sqrt(jnp.stack([*layers, *(squares[name] for name in sorted(squares))]))


def score_rms_by_layer(stats, cfg: Config):
    """The root mean square of the attention's scores in each layer (attention.score_stats); stats:
    from train.loss_and_grads."""
    squares = [stats[group][kind]["logit"][row] for group, kind, row in layer_places(cfg.model)]
    return jnp.sqrt(jnp.stack(squares) / (cfg.train.batch_size * cfg.model.n_heads))
