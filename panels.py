"""Panels.  Each turns a dict of arrays that the step returns into rows of metrics.jsonl, a part of
the console line, numbers for Weights & Biases, alarms and a picture."""

import io
from itertools import islice

import numpy as np
from etils import epath

from architecture import moe_layers
from config import Config
from files import write_whole
from norm_metrics import layer_names
from utils import finite_or_none


class Panel:
    """What all panels have; see `ExpertsPanel` for the methods that each defines."""

    def __init__(self, cfg: Config):
        self.every = cfg.log.every
        """Updates between rows."""

    def alarms(self) -> dict[str, str]:
        """{key: text} of the alarms after the newest row; a run prints each key once."""
        return {}


class ExpertsPanel(Panel):
    """How the router of each moe layer spreads its tokens: rows of kind "moe" and experts.png."""

    STARVED = 0.1
    """The share of its even load below which an expert is starved."""

    PATIENCE = 5
    """How many rows an expert has to be starved, without a break, for an alarm."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.layers = moe_layers(cfg.model)
        self.load = None  # [layer, expert]: the newest row's shares times n_experts, so 1 is even
        self.busiest = {}  # {step: the largest load of each layer}
        self.starved = 0  # [layer, expert]: how many rows it has been starved without a break

    def row(self, arrays: dict) -> dict:
        """The fields of a row, one element per layer, from the arrays of experts.moe_metrics; the
        load in shares of the pairs."""
        load, others = arrays["load"], {name: x for name, x in arrays.items() if name != "load"}
        fields = {name: [finite_or_none(x) for x in values] for name, values in others.items()}
        share = (load / load.sum(-1, keepdims=True)).round(6)
        dead = (load == 0).sum(-1)
        return dict(layer=self.layers, **fields, load=share.tolist(), dead=dead.tolist())

    def summary(self, arrays: dict) -> str:
        load = arrays["load"]
        busiest = (load / load.sum(-1, keepdims=True)).max() * load.shape[-1]
        return (
            f"busiest expert {busiest:.1f}x, {(load == 0).sum()} dead, "
            f"{arrays['dropped'].mean():.1%} dropped, balance {arrays['balance'].mean():.3f}"
        )

    def track(self, row: dict):
        self.load = np.array(row["load"]) * len(row["load"][0])
        self.busiest[row["step"]] = self.load.max(-1)
        self.starved = (self.starved + 1) * (self.load < self.STARVED)

    def alarms(self) -> dict[str, str]:
        lasting = zip(self.layers, self.starved >= self.PATIENCE, strict=True)
        experts = {layer: np.flatnonzero(x).tolist() for layer, x in lasting if x.any()}
        why = f"have had less than {self.STARVED:.0%} of an even load for {self.PATIENCE} rows"
        fix = "see --model.router_bias and --train.balance_loss"
        return {
            f"starved experts of layer {layer}": f"layer {layer}: experts {found[:8]} {why}; {fix}"
            for layer, found in experts.items()
        }

    @staticmethod
    def board_fields(row: dict) -> dict:
        """One number per layer; for the load, that of the busiest expert."""
        fields = {name: row[name] for name in row if name not in ("kind", "step", "layer")}
        fields["load"] = [max(load) for load in row["load"]]
        return {
            f"{name}/layer{layer}": values[i]
            for name, values in fields.items()
            for i, layer in enumerate(row["layer"])
        }

    def draw(self, run: epath.Path):
        """Draw the newest load of every expert, and that of each layer's busiest one over time."""
        if self.load is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        load, (steps, busiest) = self.load, points_of(self.busiest)
        image = left.imshow(load, aspect="auto", vmin=0, vmax=max(2, load.max()), cmap="magma")
        title = f"load after update {max(self.busiest)} (1 is even)"
        left.set(xlabel="expert", ylabel="layer", title=title)
        left.locator_params("x", integer=True)
        ticks = range(0, len(load), 1 + len(load) // 16)
        left.set_yticks(ticks, [self.layers[i] for i in ticks])
        figure.colorbar(image, ax=left)
        for i, layer in enumerate(self.layers):
            color = f"{0.75 * (1 - i / len(load)):.2f}"  # later layers are darker
            label = layer if i in ticks else None
            right.plot(steps, busiest[:, i], color=color, label=label)
        right.set(xlabel="update", ylabel="load of the busiest expert", title=run.name)
        right.legend(title="layer", fontsize="small")
        right.grid(alpha=0.3)
        write_png(run / "experts.png", figure)


SIZES = dict(gradient="gradient", update="update", weight="weights", logit="attention logits")
"""The arrays of `NormsPanel`, in words."""


class NormsPanel(Panel):
    """The norms of the gradient, update and weights of each layer, and of each weight outside of
    layers; the root mean square of each layer's attention logits: rows "norms" and norms.png."""

    GROWTH = 10
    """A size above this many times the median of its first ten finite rows is an alarm; not that of
    an update, which follows the learning rate."""

    def __init__(self, cfg: Config):
        self.names, self.every = layer_names(cfg), cfg.log.norms_every
        # Weights that begin at 0, where any growth is more than tenfold.
        self.from_0 = ["norm_bias_D"] + ["norm_D"] * cfg.model.norm_offset
        self.curves = {}  # {name in SIZES: {step: one number each layer, NaN for a null}}

    def row(self, arrays: dict) -> dict:
        norms = {name: [finite_or_none(x) for x in values] for name, values in arrays.items()}
        return dict(layer=self.names) | norms

    def summary(self, arrays: dict) -> str:
        change = arrays["update"] / np.maximum(arrays["weight"], 1e-30)
        worst = int(np.argmax(change))
        return f"largest change {change[worst]:.1%} in {self.names[worst]}"

    def track(self, row: dict):
        for name in SIZES:
            self.curves.setdefault(name, {})[row["step"]] = np.array([*row[name]], float)

    def alarms(self) -> dict[str, str]:
        found = {}
        for name in ("gradient", "weight", "logit") if self.curves else ():
            rows = self.curves[name].values()
            first = [*islice((x for x in rows if np.isfinite(x).all()), 10)]
            usual, newest = np.median(first, axis=0) if first else (), next(reversed(rows))
            for layer, a, b in zip(self.names, usual, newest, strict=False):
                may_grow = name == "weight" and layer in self.from_0
                if b > self.GROWTH * a > 0 and not may_grow:
                    what = f"{layer}: {SIZES[name]} grew from {a:.3g} to {b:.3g}"
                    found[f"{name} {layer}"] = f"{what}; see norms.png, and lower --optim.lr"
        return found

    @staticmethod
    def board_fields(row: dict) -> dict:
        """Each layer's norms, and the finite ones of all layers as a list, for a histogram."""
        fields = {}
        for name in SIZES:
            fields |= {f"{name}/{x}": y for x, y in zip(row["layer"], row[name], strict=False)}
            finite = [x for x in row[name] if x is not None]
            fields[f"{name}_histogram"] = finite or None
        return fields

    def draw(self, run: epath.Path):
        """Draw the norms over the updates, a line for each layer."""
        if not self.curves:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(16, 4.5), layout="constrained")
        plots = figure.subplots(1, len(self.curves))
        for axes, (name, curve) in zip(plots, self.curves.items(), strict=True):
            steps, values = points_of(curve)
            n_layers = sum(x.startswith("layer ") for x in self.names)
            for i, layer in enumerate(self.names[: values.shape[1]]):
                is_layer = i < n_layers  # later layers are darker, other weights dashed
                shade = f"{0.8 * (1 - i / n_layers):.2f}" if is_layer else f"C{i - n_layers}"
                label = layer if not is_layer or i in (0, n_layers - 1) else None
                axes.plot(steps, values[:, i], "-" if is_layer else "--", color=shade, label=label)
            axes.set(title=SIZES[name], xlabel="update", yscale="log")
            axes.grid(alpha=0.3)
        plots[0].set(ylabel="norm")
        # Beside the plots, because the legend would hide curves.
        figure.legend(*plots[0].get_legend_handles_labels(), loc="outside right upper")
        plots[-1].set(ylabel="root mean square")
        write_png(run / "norms.png", figure)


# A dict of arrays that the step returns under one of these names becomes a row of that kind,
# written every `every` updates.  Pictures are drawn after each evaluation.
PANELS = dict(moe=ExpertsPanel, norms=NormsPanel)


def points_of(curve: dict[int, np.ndarray], most: int = 400) -> tuple[list[int], np.ndarray]:
    """(updates, one row of values for each) to draw of {update: values}.  Of a curve longer than
    `most`, each point has the largest of a few updates, so that no peak is lost.

    Matplotlib takes 28 us a point: 80 layers after 50,000 updates were 45 s at each evaluation.
    """
    begins = range(0, len(curve), 1 + (len(curve) - 1) // most)
    steps = [*curve]
    return [steps[i] for i in begins], np.fmax.reduceat([*curve.values()], begins)


def write_png(path: epath.Path, figure):
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_whole(path, png.getvalue())
