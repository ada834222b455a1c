"""Train: build the mesh, make or resume the state, take steps.

`python train.py --config demo`, or --help.
"""

import cli

# Before jax is imported: a bad command line is answered at once, and XLA reads its flags once.
if __name__ == "__main__":
    CFG = cli.start()

import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import gradient
import model
import utils
from checkpoint import Checkpoints
from config import CHECKPOINT, USAGE, Config, UserError
from dataset import Dataset
from experts import moe_metrics, update_router_biases
from generate import generate
from metrics import MetricsLog, print_end, print_eval
from model import TOKEN_SPEC
from optim import learning_rate, optimizer
from profiling import DATA_WAIT, Profile
from rundir import open_run, write_record


class State(NamedTuple):
    """Everything that changes during training, and all of a checkpoint."""

    step: jax.Array
    """Updates tried so far, skipped ones included."""
    params: Any
    opt: Any


def make_state(cfg: Config) -> State:
    params = model.init_params(cfg)
    return State(jnp.int32(0), params, optimizer(cfg).init(params))


def state_specs(cfg: Config) -> State:
    """Where each leaf of State rests: the optimizer's moments with their weights, counters
    everywhere."""
    specs, opt = model.param_specs(cfg), jax.eval_shape(partial(make_state, cfg)).opt
    moment, counter = lambda _, spec: spec, lambda _: P()
    opt = optax.tree.map_params(optimizer(cfg), moment, opt, specs, transform_non_params=counter)
    return State(P(), specs, opt)


def init_state(cfg: Config) -> State:
    homes = utils.shardings(state_specs(cfg))
    return jax.jit(make_state, static_argnums=0, out_shardings=homes)(cfg)


def checkpoint_items(state: State) -> dict:
    """A State as the items of a checkpoint: the weights apart, for those who want nothing else."""
    return dict(params=state.params, rest=dict(step=state.step, opt=state.opt))


def step_shapes(cfg: Config) -> tuple:
    """Of what train_step takes, but for cfg, the shapes and dtypes."""
    t = cfg.train
    rows = t.batch_size // (t.grad_accum * t.microbatches)
    tokens_AMBL = jax.ShapeDtypeStruct((t.grad_accum, t.microbatches, rows, t.seq_len), jnp.int32)
    return jax.eval_shape(partial(make_state, cfg)), tokens_AMBL, tokens_AMBL


def step_specs(cfg: Config) -> tuple:
    return state_specs(cfg), TOKEN_SPEC, TOKEN_SPEC


def with_shardings(shapes, specs):
    """The shapes, each with where it rests on the ambient mesh."""

    def leaf(x, home):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home)

    return jax.tree.map(leaf, shapes, utils.shardings(specs))


def abstract_state(cfg: Config) -> State:
    """State without its numbers."""
    return with_shardings(step_shapes(cfg)[0], state_specs(cfg))


def restore_or_init(run, train: Dataset, cfg: Config) -> tuple[Checkpoints, State]:
    """The run's checkpoints, and the State of the newest one or a new one."""
    store = Checkpoints(run, cfg.checkpoint.keep, fixed_settings(cfg, train))
    found = store.restore(checkpoint_items(abstract_state(cfg)))
    if found is None and cfg.eval_only:
        what = f"{store.run} has no checkpoint to evaluate"
        raise UserError(CHECKPOINT, what, "train it first, without --eval_only")
    if found is None:
        return store, init_state(cfg)
    if store.newest > cfg.train.steps and not cfg.eval_only:
        what = f"train.steps={cfg.train.steps}, but {run} has already made {store.newest} updates"
        fix = f"set --train.steps {store.newest} or more, or start over with --fresh"
        raise UserError(USAGE, what, fix)
    utils.say(f"resume: update {store.newest} (verified) from {store.path}")
    return store, State(params=found["params"], **found["rest"])


def load_params(run, cfg: Config, step: int = -1):
    """The weights of a run's newest checkpoint, or of the one after `step` updates."""
    weights = dict(params=abstract_state(cfg).params)
    found = Checkpoints(run, keep=0).restore(weights, step)
    if found is None:
        raise UserError(CHECKPOINT, f"{run} has no checkpoint", "train it first")
    return found["params"]


def fixed_settings(cfg: Config, train: Dataset) -> dict:
    """The settings that a run and the checkpoint it goes on from must share; the others may change
    between starts."""
    m = {f"model.{name}": value for name, value in vars(cfg.model).items()}
    t = {f"train.{name}": getattr(cfg.train, name) for name in ("seq_len", "batch_size")}
    return m | t | {"run.seed": cfg.run.seed, "data.train fingerprint": train.fingerprint}


def loss_and_grads(params, tokens_AMBL, targets_AMBL, key, cfg: Config):
    """Mean loss (nats per counted token of the global batch), the objective's gradient, and the
    sums over the batch of moe layers' statistics (experts.balance), stacked like their weights.

    The only shard_map of training.
    """
    specs = model.param_specs(cfg)
    out_specs = P(), specs, dict(layers=P("pp")) | (dict(prefix=P()) if cfg.model.prefix else {})

    @jax.shard_map(in_specs=(specs, TOKEN_SPEC, TOKEN_SPEC, P()), out_specs=out_specs)
    def per_device(params, tokens_AMBL, targets_AMBL, key):
        n_tokens = lax.psum((targets_AMBL >= 0).sum(dtype=jnp.float32), ("dp", "pp"))
        tokens_AMBL, targets_AMBL = (
            lax.all_gather(x, "pp", axis=1, tiled=True) for x in (tokens_AMBL, targets_AMBL)
        )
        if cfg.mesh.schedule != "gpipe":  # one slice: the pipeline fills and drains once
            tokens_AMBL, targets_AMBL = (
                x.reshape(1, -1, *x.shape[2:]) for x in (tokens_AMBL, targets_AMBL)
            )
        n_rows = cfg.train.batch_size // tokens_AMBL.shape[0]
        w = gradient.prepare_parts(params, cfg, cfg.train.dtype)

        def add(total, slice):
            tokens_MBL, targets_MBL, a = slice
            rows = tokens_MBL, targets_MBL, total, key, a * n_rows
            return gradient.add_slice_gradient(w, *rows, n_tokens, cfg), None

        grads = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), w)
        loss = lax.pcast(jnp.float32(0), ("dp", "pp"), to="varying")
        zero = gradient.Total(loss, grads, gradient.zero_stats(w, cfg))
        slices = (tokens_AMBL, targets_AMBL, jnp.arange(len(tokens_AMBL)))
        total, _ = lax.scan(add, zero, slices)
        return gradient.reduce_total(total, params, cfg)

    return per_device(params, tokens_AMBL, targets_AMBL, key)


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def train_step(state: State, tokens_AMBL, targets_AMBL, cfg: Config):
    """One update.  One with a loss or gradient that is not finite changes nothing but the step."""
    key = jax.random.fold_in(jax.random.key(cfg.run.seed), state.step)
    loss, grads, stats = loss_and_grads(state.params, tokens_AMBL, targets_AMBL, key, cfg)
    grad_norm = optax.tree.norm(grads)
    updates, opt = optimizer(cfg).update(grads, state.opt, state.params)
    params = update_router_biases(optax.apply_updates(state.params, updates), stats, cfg)
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def pick(new, old):
        return jnp.where(good, new, old)

    params, opt = jax.tree.map(pick, (params, opt), (state.params, state.opt))
    metrics = dict(loss=loss, grad_norm=grad_norm, lr=learning_rate(state.opt[-1].count, cfg))
    if cfg.model.n_experts:
        metrics["moe"] = lax.with_sharding_constraint(moe_metrics(stats, cfg), P())
    new = State(state.step + 1, params, opt)
    return lax.with_sharding_constraint(new, state_specs(cfg)), metrics


@partial(jax.jit, static_argnames="cfg")
def eval_step(params, tokens_AMBL, targets_AMBL, cfg: Config):
    """(sum of the losses, tokens counted, AMBL loss of each token, 0 where it is not counted)."""
    specs = model.param_specs(cfg)

    @jax.shard_map(in_specs=(specs, TOKEN_SPEC, TOKEN_SPEC), out_specs=(P(), P(), TOKEN_SPEC))
    def per_device(params, tokens_AMBL, targets_AMBL):
        def score(slice):
            return model.token_nll(params, *slice, cfg)

        nll_AMBL = lax.map(score, (tokens_AMBL, targets_AMBL))
        nll_AMBL = jnp.where(targets_AMBL >= 0, nll_AMBL, 0)
        return *lax.psum((nll_AMBL.sum(), (targets_AMBL >= 0).sum()), ("dp", "pp")), nll_AMBL

    return per_device(params, tokens_AMBL, targets_AMBL)


def evaluate(params, data: Dataset, step: int, cfg: Config, stop=False) -> dict | None:
    """An eval row of metrics.jsonl, every token weighing the same; None when stop comes first."""
    total = tokens = 0
    indices = data.eval_indices(step)
    bar = dict(desc="evaluate", unit="batch", leave=False, disable=not utils.is_lead())
    for i in tqdm(indices, **bar):
        if stop:
            return None
        nll, n, _ = utils.wait_for(eval_step(params, *data.eval_batch(i), cfg))
        total, tokens = total + float(nll), tokens + int(n)
    loss = total / tokens
    bits = data.bytes_per_token and loss / jnp.log(2).item() / data.bytes_per_token
    return dict(
        loss=utils.finite_or_none(loss),
        bits_per_byte=bits and utils.finite_or_none(bits),
        tokens=tokens,
    )


def is_due(step: int, every: int, cfg: Config) -> bool:
    """Whether what comes every so many updates (0: only at the end) comes after update `step`."""
    return step == cfg.train.steps or (step > 0 and every > 0 and step % every == 0)


def sample_row(params, step: int, cfg: Config, data: Dataset) -> dict:
    """A row of samples.jsonl: the start of a document, from the same random numbers every time."""
    end = data.manifest.get("eot_id", 0)
    ids = dict(vocab_size=data.manifest["vocab_size"], stop_id=end)
    draw = dict(temperature=0.8, seed=cfg.run.seed)
    *_, rows = generate(params, [[end]], cfg.train.sample_tokens, cfg, **ids, **draw)
    return dict(step=step, text=data.decode(rows[0][1:]))


def compile_step(cfg: Config):
    """The program of train_step on the ambient mesh; says what it needs."""
    begin = time.monotonic()
    utils.say("compiling the update")
    program = utils.compile_program(
        train_step, *with_shardings(step_shapes(cfg), step_specs(cfg)), cfg
    )
    took, use = utils.format_duration(time.monotonic() - begin), program.memory_analysis()
    size = f": {use.peak_memory_in_bytes / 2**30:,.2f} GiB on a device" if use else ""
    utils.say(f"compiled in {took}{size}")
    return program


def train_loop(run, store, state: State, train: Dataset, val: Dataset, stop, cfg: Config):
    """Train to the last step, or to the update at which `stop` is set, evaluating and saving on the
    way; the State then, and the log."""
    start = int(state.step)
    utils.on_lead(write_record, run, cfg, train)
    log = MetricsLog(run, cfg, start, model.flops_per_token(cfg))
    # Before the first checkpoint: it may be that this cannot be compiled, or has no room.
    program = log.aside(compile_step, cfg) if start < cfg.train.steps else None
    profile = Profile(run, program, cfg)
    for step in range(start, cfg.train.steps + 1):
        if is_due(step, cfg.train.eval_every, cfg) and step not in log.eval:
            log.evaluation(step, log.aside(evaluate, state.params, val, step, cfg, stop))
        samples = cfg.train.sample_every and is_due(step, cfg.train.sample_every, cfg)
        if samples and step not in log.samples:
            log.sample(log.aside(sample_row, state.params, step, cfg, train))
        last = step == cfg.train.steps or bool(stop)
        if step == 0 or last or is_due(step, cfg.checkpoint.every, cfg):
            log.aside(store.save, step, checkpoint_items(state))
        if last:
            break
        with profile.update(step + 1, log):
            with jax.profiler.TraceAnnotation(DATA_WAIT):
                batch = train.batch(step)
            state, metrics = program(state, *batch)
            log.update(step + 1, metrics)
    store.close()
    profile.report()
    log.close()
    return state, log


def main(cfg: Config) -> State | None:
    """Make or resume a run and train it, or only evaluate it."""
    stop = utils.Stop()
    cfg = utils.start_mesh(cfg)
    n_params, n_active = model.param_count(cfg), model.param_count(cfg, active=True)
    train = Dataset(cfg, "train")
    if cfg.data.document_mask:
        cfg = replace(cfg, data=replace(cfg.data, end_id=train.end_id))
    val = Dataset(cfg, "val")
    with open_run(cfg, train) as run:
        store, state = restore_or_init(run, train, cfg)
        if cfg.eval_only:
            step = int(state.step)
            return print_eval(step, evaluate(state.params, val, step, cfg, stop))
        of_token = f", {n_active:,} active" if n_active < n_params else ""
        utils.say(f"train: {train}\nval: {val}\nmodel: {n_params:,} parameters{of_token}")
        state, log = train_loop(run, store, state, train, val, stop, cfg)
    print_end(log, int(state.step))
    return state


if __name__ == "__main__":
    utils.run_main(main, CFG)
