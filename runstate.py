"""The state of a run: everything that changes in training.  What it is in a checkpoint, and where a
start takes it from: the run's newest checkpoint, that of a parent, or new.

Dimension key (a suffix on every array's name spells its logical shape):
  U  the last updates
"""

import sys
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import model
import optim
import utils
from branch import Parent, forget_parent, refuse_other_parent
from checkpoint import Checkpoints
from config import Config
from dataset import Dataset
from errors import CHECKPOINT, USAGE, UserError
from files import absolute_path, is_writable
from processes import refuse_differences
from verify import SavedCheckpoints


class State(NamedTuple):
    """Everything that changes during training, and all of a checkpoint."""

    step: jax.Array
    """Updates tried so far, skipped ones included."""
    params: Any
    opt: Any
    """The optimizer's state."""
    ema: Any = None
    """With optim.ema, the moving average of params."""
    recent_norms: Any = None
    """With train.spike_sigma, the last gradient norms."""


def state_from_params(params, cfg: Config) -> State:
    """The State before the first update, with these weights."""
    ema = params if cfg.optim.ema else None
    norms = jnp.full(optim.SPIKE_WINDOW, -1.0, jnp.float32) if cfg.train.spike_sigma else None
    return State(np.int32(0), params, optim.optimizer(cfg).init(params), ema, norms)


def new_state(cfg: Config) -> State:
    """The State of a new run."""
    return state_from_params(model.init_params(cfg), cfg)


def state_shapes(cfg: Config) -> State:
    """Shapes and dtypes of the State."""
    return jax.eval_shape(partial(state_from_params, cfg=cfg), model.param_shapes(cfg))


def state_specs(cfg: Config) -> State:
    """The PartitionSpec of each leaf of State.  Moments in the shape of their weights are sharded
    like them; counters, and moments of other shapes, are on every device."""
    specs, state = model.param_specs(cfg), state_shapes(cfg)

    def is_absent(moment):  # the weight belongs to another part of optax.partition
        return isinstance(moment, optax.MaskedNode)

    def moment_spec(moment, weight, spec):
        if is_absent(moment):
            return moment
        return spec if moment.shape == weight.shape else P()

    opt = optax.tree.map_params(
        optim.optimizer(cfg), moment_spec, state.opt, state.params, specs,
        transform_non_params=lambda _: P(), is_leaf=is_absent,
    )  # fmt: skip
    ema = specs if cfg.optim.ema else None
    return State(P(), specs, opt, ema, P() if cfg.train.spike_sigma else None)


def init_state(cfg: Config) -> State:
    """`new_state`, made sharded: no device holds all of it."""
    shardings = utils.shardings(state_specs(cfg))
    return jax.jit(new_state, static_argnums=0, out_shardings=shardings)(cfg)


def checkpoint_items(state: State) -> dict:
    """A State as the items of a checkpoint.  The weights are an item of their own, so that they can
    be read alone, and so are the parts that only some runs have."""
    items = dict(params=state.params, rest=dict(step=state.step, opt=state.opt))
    items |= dict(ema=state.ema, recent_norms=dict(norm_U=state.recent_norms))
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}


def state_from_items(items: dict) -> State:
    """The inverse of `checkpoint_items`."""
    norms = items.get("recent_norms", {}).get("norm_U")
    return State(params=items["params"], ema=items.get("ema"), recent_norms=norms, **items["rest"])


def with_shardings(shapes, specs):
    """The shapes with their shardings on the ambient mesh."""
    return jax.tree.map(lambda x, y: x.update(sharding=y), shapes, utils.shardings(specs))


def abstract_state(cfg: Config) -> State:
    """Shapes, dtypes and shardings of the State."""
    return with_shardings(state_shapes(cfg), state_specs(cfg))


def warn_of_memory(cfg: Config):
    """Warn of a state and gradient that a host without accelerators cannot hold: Linux ends a
    process that fills the memory, without a word."""
    gradient = {} if cfg.eval_only else model.param_shapes(cfg)
    shapes = jax.tree.leaves((state_shapes(cfg), gradient))
    need = sum(x.size * x.dtype.itemsize for x in shapes) // len(utils.process_ids())
    free = utils.free_memory()
    if jax.devices()[0].platform == "cpu" and free is not None and need > free:
        need, free = utils.format_bytes(need), utils.format_bytes(free)
        what = f"weights, moments and any gradient take {need}, and {free} of memory are free"
        utils.warn(f"{what}: the system may end this process")


def restore_or_init(run, train: Dataset, cfg: Config) -> tuple[SavedCheckpoints, State]:
    """The run's checkpoints, and the State of the newest one, or a new State where there is none.
    Raises UserError CHECKPOINT and USAGE."""
    settings, c = fixed_settings(cfg, train.source.fingerprint), cfg.checkpoint
    if cfg.eval_only and not is_writable(run):
        store = SavedCheckpoints(run, settings, cfg.run.accept)
    else:
        store = Checkpoints(run, c.keep, settings, cfg.run.accept, c.patience, c.keep_every)
    begin = time.monotonic()
    items = store.restore(checkpoint_items(abstract_state(cfg)))
    if items is None and cfg.eval_only:
        what = f"{store.run} has no checkpoint to evaluate"
        raise UserError(CHECKPOINT, what, "train it first, without --eval_only")
    if items is None:
        with utils.say_time("initial state"):
            utils.run_on_lead(forget_parent, run)
            start = partial(branch_state, run, train.source) if cfg.run.start_from else init_state
            state = jax.block_until_ready(utils.wait_for(start(cfg)))
        return store, state
    utils.run_on_each(refuse_other_parent, run, cfg)
    if store.newest > cfg.train.steps and not cfg.eval_only:
        what = f"train.steps={cfg.train.steps}, but {run} has already made {store.newest} updates"
        fix = f"set --train.steps {store.newest} or more, or start over with --fresh"
        raise UserError(USAGE, what, fix)
    took = f"{time.monotonic() - begin:.1f} s"
    utils.say(f"resume: update {store.newest} (verified) from {store.path} in {took}")
    return store, state_from_items(items)


def branch_state(run, source, cfg: Config) -> State:
    """The first State of a branch of another run.  source: the branch's training data."""
    parent = Parent(cfg, source.tokenizer)
    abstract, with_state = checkpoint_items(abstract_state(cfg)), cfg.run.start_with == "state"
    taken = items_of_parent(parent, abstract, source, cfg) if with_state else {"params"}
    items = parent.restore({item: abstract[item] for item in taken}, cfg)
    utils.run_on_lead(parent.note, run)
    if taken != abstract.keys():
        items = add_items(items, parent.step if with_state else 0, abstract, cfg)
    kept = "its optimizer's state" if with_state else "its weights alone"
    if with_state and "rest" not in taken:
        kept = "its weights and update; the optimizer's state is new"
    utils.say(f"start from {parent.path} after update {parent.step}, with {kept}")
    return state_from_items(items)


def items_of_parent(parent: Parent, abstract: dict, source, cfg: Config) -> set[str]:
    """The items of a checkpoint that a branch with run.start_with=state takes from its parent."""
    # Only items that have the same arrays in the parent.
    differ = parent.meta["leaves"].keys() ^ utils.leaf_table(abstract).keys()
    names = abstract.keys() - {name.split("/")[0] for name in differ} | {"params"}
    if not batch_settings(cfg, source.fingerprint).items() <= parent.meta["must"].items():
        names -= {"recent_norms"}  # other batches have other gradient norms
    return names


def add_items(given: dict, step: int, abstract: dict, cfg: Config) -> dict:
    """The items of a new state after `step` updates, with those of `given` in place of its own."""

    def fill(given):
        state = state_from_params(given["params"], cfg)
        if step:
            state = state._replace(step=jnp.int32(step), opt=optim.with_count(state.opt, step))
        return checkpoint_items(state) | given

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(fill, out_shardings=shardings, donate_argnums=0)(given)


def load_params(run, cfg: Config, step: int = -1, weights: str = "last"):
    """The weights of a run's newest checkpoint, or of the one after `step` updates.  weights: last,
    or ema for their moving average.  Raises UserError CHECKPOINT, and USAGE if another process was
    started with other flags: they would compute together on different things."""
    words = {"the command": " ".join(sys.argv[1:])}
    refuse_differences(words, "start all processes with the same flags")
    item = weights_item(cfg, weights)
    abstract = with_shardings(model.param_shapes(cfg), model.param_specs(cfg))
    items = SavedCheckpoints(absolute_path(run)).restore({item: abstract}, step)
    if items is None:
        raise UserError(CHECKPOINT, f"{run} has no checkpoint", "train it first")
    return items[item]


def weights_item(cfg: Config, weights: str) -> str:
    """The item of a checkpoint that holds the weights `last` or `ema` of a run.  Raises UserError
    CHECKPOINT if the run keeps no average."""
    if weights == "ema" and not cfg.optim.ema:
        what = "--weights ema, but optim.ema=0: the run keeps no average of its weights"
        raise UserError(CHECKPOINT, what, "leave --weights out, or train with --optim.ema 0.999")
    return "ema" if weights == "ema" else "params"


def fixed_settings(cfg: Config, fingerprint: str | None) -> dict:
    """The settings that must be the same in a run and in the checkpoint that it resumes from; all
    others may change between starts."""
    m = {f"model.{name}": value for name, value in vars(cfg.model).items()}
    return m | {"run.seed": cfg.run.seed} | batch_settings(cfg, fingerprint)


def batch_settings(cfg: Config, fingerprint: str | None) -> dict:
    """Those of `fixed_settings` that decide what a batch is."""
    sizes = {"train.seq_len": cfg.train.seq_len, "train.batch_size": cfg.train.batch_size}
    return sizes | {"data.train fingerprint": fingerprint}


def model_settings(cfg: Config) -> dict:
    """`fixed_settings` of weights from elsewhere, which may be trained further with any batch size
    and data."""
    settings = fixed_settings(cfg, fingerprint=None)
    return {name: x if name.startswith("model.") else None for name, x in settings.items()}
