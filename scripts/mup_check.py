"""Show that muP works: as the model gets wider, activations keep their size and the best learning
rate stays the same with model.mup_base_width, but not without it.

    python scripts/prepare_data.py --pydocs --tokenizer char --val_fraction 0.05 --out data/chars
    python scripts/mup_check.py --out mup.png          (minutes on two cores)

Prints a table as JSON and draws it.  The coordinate check is that of Yang et al. 2022, appendix
D.1: after a few updates, the root mean square of the residual stream and of the logits is the same
at every width, so that its slope over the width, both as logarithms, is near 0.
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import config
import files
from errors import USAGE, UserError

D_HEAD = 16


@dataclass(frozen=True)
class Args:
    out: str = "mup.png"
    """The picture to write."""
    data: str = "data/chars/train"
    """Training set, as for data.train."""
    vocab_size: int = 128
    """Number of token ids, at least that of the data."""
    coordinate_widths: tuple[int, ...] = (64, 128, 256, 512)
    """Widths of the coordinate check."""
    coordinate_rate: float = 2.0**-8
    """Learning rate in the coordinate check."""
    widths: tuple[int, ...] = (64, 128, 256)
    """Widths whose best learning rates are compared.  The first is muP's base."""
    rates: tuple[float, ...] = tuple(2.0 ** -(n + 0.5) for n in range(10, 3, -1))
    """Learning rates to try."""
    steps: int = 150
    """Updates with each rate."""
    depth: int = 4
    """Number of layers."""
    seeds: tuple[int, ...] = (0,)
    """Values of run.seed: initial weights, order of the data.  The losses are means over them."""


def parse() -> tuple[Args, config.Config]:
    args = cli.read_args(Args, __doc__)
    cli.check_at_least(args, steps=1, depth=1, vocab_size=1, coordinate_rate=1e-30)
    for name, low in dict(coordinate_widths=D_HEAD, widths=D_HEAD, rates=1e-30, seeds=0).items():
        values, n = getattr(args, name), 2 if name == "coordinate_widths" else 1  # for a slope
        high = 1e38 if name == "rates" else 2**32 - 1
        is_width = "widths" in name
        are_heads = not is_width or all(x % D_HEAD == 0 for x in values)
        if len(set(values)) < n or not all(low <= x <= high for x in values) or not are_heads:
            rule = f"multiples of {D_HEAD}" if is_width else f"from {low} to {high}"
            what = f"{name}={values} must be {n} or more different numbers, {rule}"
            raise UserError(USAGE, what, f"set --{name} to such numbers")
    cli.tune_heap()
    cli.simulate_devices(config.Mesh(1, 1, 1))
    return args, make_config(args)


def make_config(args: Args) -> config.Config:
    """A decoder of the first width, with learning rate 1, which `update` multiplies."""
    cfg = config.Config(
        run=config.Run(name="mup_check"),
        mesh=config.Mesh(1, 1, 1),
        model=config.Model(vocab_size=args.vocab_size, n_layers=args.depth),
        data=config.Data(train=args.data),
        train=config.Train(steps=args.steps, batch_size=16, dtype="float32"),
        optim=config.Optim(lr=1.0, schedule="linear", min_lr_ratio=0.0, warmup_steps=10),
    )
    return with_width(cfg, args.widths[0], base=args.widths[0])


def with_width(cfg: config.Config, width: int, base: int, seed: int = 0) -> config.Config:
    """The decoder of that width, with heads of D_HEAD.  base: mup_base_width, or 0 without muP."""
    n = width // D_HEAD
    sizes = dict(d_model=width, n_heads=n, n_kv_heads=n, d_ff=3 * width, mup_base_width=base)
    return replace(cfg, run=replace(cfg.run, seed=seed), model=replace(cfg.model, **sizes))


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import attention
import layers
import model
import processes
import runstate
import train
import utils
from dataset import Dataset
from optim import optimizer
from panels import write_png
from scripts.outputs import check_output
from weights import random_key


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def update(state: runstate.State, tokens_AMBL, targets_AMBL, lr, cfg: config.Config):
    """(state, loss) after one update with that peak learning rate, which is an argument so that one
    program serves all rates."""
    key = random_key(cfg.run.seed)
    loss, grads, _ = train.loss_and_grads(state.params, tokens_AMBL, targets_AMBL, key, cfg)
    updates, opt = optimizer(cfg).update(grads, state.opt, state.params)
    params = optax.apply_updates(state.params, jax.tree.map(lambda x: lr * x, updates))
    return runstate.State(state.step + 1, params, opt), loss


@partial(jax.jit, static_argnames="cfg")
def sizes(params, tokens_AMBL, cfg: config.Config) -> dict:
    """{name: root mean square} of the residual stream in each place, and of the logits."""

    @jax.shard_map(in_specs=(model.param_specs(cfg), model.token_spec()), out_specs=P())
    def per_device(params, tokens_AMBL):
        w, token_MBL = model.prepare_weights(params, cfg, cfg.train.dtype), tokens_AMBL[0]
        span = attention.full_row_span(token_MBL, 0, cfg)
        x_BLD, _ = model.apply_embedding(w, token_MBL[0], span, cfg)
        found = {"embedding": x_BLD}
        for n in range(cfg.model.n_layers):
            layer = {name: x[n] for name, x in w["layers"]["dense"].items()}
            x_BLD, _, _ = model.decoder_layer("dense", x_BLD, layer, cfg, None, span, None)
            found[f"after layer {n + 1}"] = x_BLD
        x_BLD = layers.gather_rows(layers.norm(x_BLD, w, "norm", cfg))
        found["logits"] = model.logits(x_BLD, w, cfg)[..., : cfg.model.vocab_size]
        mean = {name: jnp.sqrt(jnp.mean(x**2)) for name, x in found.items()}
        return lax.pmean(mean, utils.AXES)

    return per_device(params, tokens_AMBL)


def train_for(cfg: config.Config, lr: float, steps: int, data: Dataset, bar):
    """(state, mean loss of the last tenth of the updates, infinite if one is not finite); advances
    the bar by a run."""
    state, losses = runstate.init_state(cfg), []
    for step in range(steps):
        state, loss = update(state, *data.batch(step), np.float32(lr), cfg)
        losses.append(loss)
    mean = float(np.mean(losses[-max(1, steps // 10) :]))
    bar.update()
    return state, mean if np.isfinite(mean) else np.inf


def coordinate_check(args: Args, cfg: config.Config, base: int, bar) -> dict:
    """{name: [root mean square after 20 updates at each width]}."""
    found = {}
    for width in args.coordinate_widths:
        cfg = with_width(cfg, width, base)
        data = Dataset(cfg, "train")
        state, _ = train_for(cfg, args.coordinate_rate, 20, data, bar)
        for name, x in sizes(state.params, data.batch(20)[0], cfg).items():
            found.setdefault(name, []).append(float(x))
    return found


def rate_transfer(args: Args, cfg: config.Config, base: int, bar) -> dict:
    """{width: [loss with each rate]}."""
    found = {}
    for width in args.widths:
        curves = []
        for seed in args.seeds:
            cfg = with_width(cfg, width, base, seed)
            data = Dataset(cfg, "train")
            curves.append([train_for(cfg, lr, args.steps, data, bar)[1] for lr in args.rates])
        found[width] = np.mean(curves, 0).tolist()
    return found


def best_rate(rates, losses) -> float:
    """The rate with the lowest loss; NaN if all diverge."""
    return rates[int(np.argmin(losses))] if np.isfinite(losses).any() else np.nan


def draw(args: Args, table: dict):
    """Above, sizes over width; below, losses over learning rate.  Left standard, right muP."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    for column, (name, found) in zip(figure.subplots(2, 2).T, table.items(), strict=True):
        for label, values in found["sizes"].items():
            column[0].loglog(args.coordinate_widths, values, "o-", label=label)
        column[0].set(title=name, xlabel="width", ylabel="root mean square after 20 updates")
        for width, losses in found["losses"].items():
            (line,) = column[1].semilogx(args.rates, losses, "o-", base=2, label=f"width {width}")
            best = found["best_rates"][width]
            column[1].plot(best, min(losses), "*", ms=15, color=line.get_color())
        column[1].set(xlabel="learning rate", ylabel=f"loss after {args.steps} updates")
        for axes in column:
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    write_png(files.absolute_path(args.out), figure)


def main(args: Args, cfg: config.Config):
    check_output("out", args.out)
    n_runs = len(args.coordinate_widths) + len(args.seeds) * len(args.widths) * len(args.rates)
    table, cfg, log_widths = {}, utils.start_mesh(cfg), np.log(args.coordinate_widths)
    with tqdm(total=2 * n_runs, unit="run") as bar:
        for name, base in (("standard", 0), ("muP", args.widths[0])):
            found = dict(sizes=coordinate_check(args, cfg, base, bar))
            slopes = {k: np.polyfit(log_widths, np.log(x), 1)[0] for k, x in found["sizes"].items()}
            found["losses"] = rate_transfer(args, cfg, base, bar)
            best = {w: best_rate(args.rates, x) for w, x in found["losses"].items()}
            table[name] = found | dict(slopes=slopes, best_rates=best)
    print(json.dumps(jax.tree.map(utils.finite_or_none, table)))
    for name, found in table.items():
        worst = max(found["slopes"].values(), key=abs)
        utils.say(f"{name}: steepest slope {worst:+.2f}; best rates {found['best_rates']}")
    draw(args, table)


if __name__ == "__main__":
    processes.run_main(main, ARGS, CFG)
