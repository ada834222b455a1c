"""Train: build the mesh, make or resume the state, take steps.  The sharded train and eval step,
the loop over updates, and `main`.

    python train.py --config demo

Dimension key (a suffix on every array's name spells its logical shape):
  A  accumulation steps   M  microbatches   B  sequences   L  sequence length
"""

import os
import signal
import sys
from contextlib import suppress


def quit_early(number, frame):
    """Handles signals to stop until main makes its Stop; there is nothing to save yet."""
    with suppress(OSError):  # nothing may read it any more
        os.write(2, b"\ninterrupted while starting: nothing is lost, run the same command again\n")
    os._exit(75)  # errors.INTERRUPTED, which is not imported yet


# This comes before the import of jax, which takes seconds: a signal, a bad command line or a live
# run is answered at once, and XLA, which reads its flags only once, finds those that are set here.
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # PYTHONSAFEPATH leaves it out
    import signals

    if not hasattr(sys, "ps1"):  # as errors.is_interactive: a notebook keeps its own handlers
        signals.handle_stops(quit_early)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is nothing to save yet
    import cli

    CFG = cli.start()
    import lock  # takes 0.3 s
    import restart

    if CFG.run.restarts > 0 and not (CFG.eval_only or restart.has_parent()):
        sys.exit(restart.supervise(CFG))
    LOCK = cli.quit_on_error(lock.take_early, CFG)

import math
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import model
import optim
import processes
import runstate
import utils
from branch import Parent
from chips import chip_of
from config import Config
from cost_model import choose_remat
from dataset import Dataset, check_tokenizers
from errors import INTERRUPTED
from experts import moe_metrics, update_router_biases, warn_of_constant_gate
from generate import generate
from gradient import Rows, add_gradient, prepare_parts, reduce_total, zero_total
from metrics import MetricsLog, print_eval, print_scores
from norm_metrics import norms_by_layer, score_rms_by_layer
from parsers import read_sets
from profiling import DATA_WAIT, Profile
from rundir import open_run, record_start
from runstate import State
from tasks import Tasks, open_tasks
from utils import BATCH, run_on_each, with_slices
from weights import random_key

# ---- the train step and the eval step


def step_shapes(cfg: Config) -> tuple:
    """Shapes and dtypes of the arrays that train_step takes."""
    t = cfg.train
    rows = t.batch_size // (t.grad_accum * t.microbatches)
    tokens_AMBL = jax.ShapeDtypeStruct((t.grad_accum, t.microbatches, rows, t.seq_len), jnp.int32)
    return runstate.state_shapes(cfg), tokens_AMBL, tokens_AMBL


def step_specs(cfg: Config) -> tuple:
    """PartitionSpecs of the arrays that train_step takes."""
    return runstate.state_specs(cfg), model.token_spec(), model.token_spec()


def step_jaxpr(cfg: Config):
    """The jaxpr of train_step on the ambient mesh."""
    return jax.make_jaxpr(partial(train_step, cfg=cfg))(*step_shapes(cfg)).jaxpr


def loss_and_grads(params, tokens_AMBL, targets_AMBL, key, cfg: Config):
    """(loss, gradient, statistics) of a batch: the mean loss in nats per counted token; the
    gradient of that plus z-loss and balance loss, sharded like params; the sums of the layers'
    statistics (experts.routing_stats, attention.score_stats), stacked like their weights.

    The only shard_map of training, besides that of an optimizer of whole matrices (muon.py).
    """
    specs, row_spec = model.param_specs(cfg), model.token_spec()
    stats_specs = dict(layers=P("pp"), prefix=P())

    @jax.shard_map(in_specs=(specs, row_spec, row_spec, P()), out_specs=(P(), specs, stats_specs))
    def per_device(params, tokens_AMBL, targets_AMBL, key):
        n_tokens = lax.psum((targets_AMBL >= 0).sum(dtype=jnp.float32), with_slices(*BATCH))
        n_tokens = jnp.maximum(n_tokens, 1)  # masks may leave none
        # A stage works on all microbatches of its dp rank.
        tokens_AMBL = lax.all_gather(tokens_AMBL, "pp", axis=1, tiled=True)
        targets_AMBL = lax.all_gather(targets_AMBL, "pp", axis=1, tiled=True)
        if cfg.mesh.schedule != "gpipe":  # one step, so that the pipeline fills and drains once
            tokens_AMBL = tokens_AMBL.reshape(1, -1, *tokens_AMBL.shape[2:])
            targets_AMBL = targets_AMBL.reshape(1, -1, *targets_AMBL.shape[2:])
        n_rows = cfg.train.batch_size // tokens_AMBL.shape[0]
        w = prepare_parts(params, cfg, cfg.train.dtype)

        def accumulate(total, step):
            tokens_MBL, targets_MBL, a = step
            rows = Rows(tokens_MBL, targets_MBL, a * n_rows, n_tokens, key)
            return add_gradient(w, rows, total, cfg), None

        steps = (tokens_AMBL, targets_AMBL, jnp.arange(len(tokens_AMBL)))
        total, _ = lax.scan(accumulate, zero_total(w, cfg), steps)
        return reduce_total(total, params, cfg)

    return per_device(params, tokens_AMBL, targets_AMBL, key)


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def train_step(state: State, tokens_AMBL, targets_AMBL, cfg: Config):
    """(state, metrics) after one update.  If its loss or gradient is not finite, or its gradient a
    spike (train.spike_sigma), only state.step and state.recent_norms change.

    Every scalar in metrics gets into metrics.jsonl, the console and Weights & Biases by itself.
    """
    key = jax.random.fold_in(random_key(cfg.run.seed), state.step)
    loss, grads, stats = loss_and_grads(state.params, tokens_AMBL, targets_AMBL, key, cfg)
    grad_norm = optax.tree.norm(grads)
    updates, opt = optim.optimizer(cfg).update(grads, state.opt, state.params)
    params = update_router_biases(optax.apply_updates(state.params, updates), stats, cfg)
    ema = optim.average_weights(state.ema, params, state.step, cfg)
    new = state._replace(params=params, opt=opt, ema=ema)
    is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    lr = optim.learning_rate(optim.count_updates(state.opt, state.step), cfg)
    metrics = dict(loss=loss, grad_norm=grad_norm, lr=lr)
    if cfg.model.n_experts:
        metrics["moe"] = lax.with_sharding_constraint(moe_metrics(stats, cfg), P())
    recent_norms = state.recent_norms
    if cfg.train.spike_sigma:
        metrics["spike"] = optim.is_spike(grad_norm, recent_norms, cfg)
        is_good &= ~metrics["spike"]
        recent_norms = optim.add_norm(grad_norm, recent_norms)
    new = optax.tree.where(is_good, new, state)
    new = new._replace(step=state.step + 1, recent_norms=recent_norms)
    if cfg.log.norms_every:
        trees = dict(gradient=grads, update=updates, weight=new.params)
        norms = {name: norms_by_layer(tree, cfg) for name, tree in trees.items()}
        norms["update"] = jnp.where(is_good, norms["update"], 0)
        norms["logit"] = score_rms_by_layer(stats, cfg)
        metrics["norms"] = lax.with_sharding_constraint(norms, P())
    return lax.with_sharding_constraint(new, runstate.state_specs(cfg)), metrics


@partial(jax.jit, static_argnames="cfg")
def eval_step(params, tokens_AMBL, targets_AMBL, cfg: Config):
    """(sum of the losses in nats, counted tokens, nll_AMBL, is_top_AMBL: whether no token is more
    likely than the target).  A target that is not counted has nll 0 and is_top True."""
    specs, row_spec = model.param_specs(cfg), model.token_spec()

    @jax.shard_map(in_specs=(specs, row_spec, row_spec), out_specs=(P(), P(), row_spec, row_spec))
    def per_device(params, tokens_AMBL, targets_AMBL):
        def score(step):
            return model.score_tokens(params, *step, cfg)

        nll_AMBL, is_top_AMBL = lax.map(score, (tokens_AMBL, targets_AMBL))
        nll_AMBL = jnp.where(targets_AMBL >= 0, nll_AMBL, 0)
        sums = nll_AMBL.sum(), (targets_AMBL >= 0).sum()
        total, n = lax.psum(sums, with_slices(*BATCH))
        return total, n, nll_AMBL, is_top_AMBL | (targets_AMBL < 0)

    return per_device(params, tokens_AMBL, targets_AMBL)


# ---- the loop over updates


def progress(items, what: str = "evaluate", unit: str = "batch"):
    """The items, with a progress bar on a terminal."""
    hidden = None if utils.is_lead() else True  # None hides it where stderr is not a terminal
    return tqdm(items, what, unit=unit, leave=False, disable=hidden)


def evaluate(params, data: Dataset, step: int, cfg: Config, stop=None) -> dict | None:
    """The loss (nats a token), bits per byte and number of tokens of the evaluation after `step`
    updates; every token has the same weight.  None if `stop` (a processes.Stop) cuts it short."""
    total = tokens = 0
    indices = data.eval_indices(step)
    for k, i in enumerate(progress(indices)):
        if stop is not None and stop.agree_to_stop(data.first_error(indices[k:])):
            return None
        nll, n, *_ = utils.wait_for(eval_step(params, *data.batch(i), cfg))
        total, tokens = total + float(nll), tokens + int(n)
    loss = total / tokens if tokens else math.nan
    bits = loss / math.log(2) / (data.source.bytes_per_token or math.nan)
    loss, bits = utils.finite_or_none(loss), utils.finite_or_none(bits)
    result = dict(data=data.source.fingerprint, loss=loss, bits_per_byte=bits, tokens=tokens)
    return (dict(set=data.name) if data.name else {}) | result


def score_rows(params, tokens_AMBL, targets_AMBL, cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """(loss in nats, whether each target is the likeliest token) of each row, in order."""
    *_, nll_AMBL, is_top_AMBL = utils.wait_for(eval_step(params, tokens_AMBL, targets_AMBL, cfg))
    nll_BL, is_top_BL = utils.host_rows(nll_AMBL), utils.host_rows(is_top_AMBL)
    return nll_BL.sum(-1, dtype=np.float64), is_top_BL.all(-1)


def score_tasks(params, tasks: Tasks, cfg: Config, stop=None) -> dict | None:
    """The scores of eval.tasks, see Tasks.scores.  None if `stop` cuts it short."""
    batches = []
    for i in progress(range(tasks.n_batches)):
        if stop is not None and stop.agree_to_stop():
            return None
        batches.append(score_rows(params, *tasks.batch(i), cfg))
    scores = tasks.scores(*map(np.concatenate, zip(*batches, strict=True)))
    return dict(data=tasks.fingerprint) | scores


def is_due(step: int, every: int, cfg: Config) -> bool:
    """Whether work done every so many updates (0: only at the end) is due after update `step`."""
    return step == cfg.train.steps or (step > 0 and every > 0 and step % every == 0)


def next_evaluation(step: int, cfg: Config) -> int:
    """The first step after `step` at which an evaluation is due."""
    every = cfg.train.eval_every or cfg.train.steps
    return min(cfg.train.steps, (step // every + 1) * every)


def sample_row(params, step: int, cfg: Config, data: Dataset) -> dict:
    """A row of samples.jsonl: a new document, drawn with the same random numbers every time."""
    end_id = cfg.data.end_id if cfg.data.end_id >= 0 else data.source.end_id
    *_, rows = generate(
        params, [[max(0, end_id)]], cfg.train.sample_tokens, cfg,
        vocab_size=data.source.vocab_size, stop_id=end_id, temperature=0.8, seed=cfg.run.seed,
    )  # fmt: skip
    return dict(step=step, text=data.source.decode(rows[0][1:]))


def compile_step(cfg: Config, times: bytes = b""):
    """train_step compiled for the ambient mesh; prints the memory that it needs."""
    begin = time.monotonic()
    utils.say("compiling the update with the times of a trace" if times else "compiling the update")
    shapes = runstate.with_shardings(step_shapes(cfg), step_specs(cfg))
    program = utils.compile_program(train_step, *shapes, cfg, times=times)
    took, use = utils.format_duration(time.monotonic() - begin), program.memory_analysis()
    size = ""
    if use:  # XLA's peak for a CPU leaves temporary arrays out
        whole = use.argument_size_in_bytes + use.temp_size_in_bytes
        n_bytes = whole if utils.platform() == "cpu" else use.peak_memory_in_bytes
        size = f": {utils.format_bytes(n_bytes)} on a device"
    utils.say(f"compiled in {took}{size}")
    return program


def compile_steps(start: int, train: Dataset, cfg: Config, times: bytes = b"") -> dict:
    """{sequences: train_step compiled for them}, for the updates after the first `start`."""
    sizes = train.order.batch_sizes(start, cfg.train.steps) if start < cfg.train.steps else []
    sized = {n: replace(cfg, train=replace(cfg.train, batch_size=n)) for n in sizes}
    return {n: compile_step(sized_cfg, times) for n, sized_cfg in sized.items()}


def save(store, step: int, state: State, last: bool, stop):
    """Save the state; for the last time, return only when it is complete."""
    items = runstate.checkpoint_items(state)
    while not (saved := store.save(step, items, last)) and last:
        time.sleep(1)
        stop.poll()  # so that the Watchdog sees that the run goes on
    if saved:  # until then, a save that a signal asked for is tried again
        stop.must_save = False


def evaluate_if_due(params, step: int, vals, tasks, log: MetricsLog, stop, cfg: Config) -> bool:
    """If an evaluation is due, score the validation sets and tasks that the log does not have for
    this step.  Returns whether there were any."""
    if not is_due(step, cfg.train.eval_every, cfg) or log.past.is_evaluated(step):
        return False
    for val in vals:
        if step not in log.past.evaluations["eval", val.name]:
            result = log.run_untimed(evaluate, params, val, step, cfg, stop)
            log.add_evaluation(step, result)
    if tasks and step not in log.past.evaluations["tasks", ""]:
        result = log.run_untimed(score_tasks, params, tasks, cfg, stop)
        log.add_evaluation(step, result, "tasks")
    return True


def sample_if_due(params, step: int, train: Dataset, log: MetricsLog, cfg: Config):
    every = cfg.train.sample_every
    if every > 0 and is_due(step, every, cfg) and step not in log.sampled_steps:
        log.add_sample(log.run_untimed(sample_row, params, step, cfg, train))


def read_upcoming(step: int, train: Dataset, vals, cfg: Config) -> BaseException | None:
    """Begin to read the next batches and the next evaluation.  Returns the error of a batch that
    cannot be read.  An error of the evaluation is returned only when the evaluation is at most
    processes.REQUEST_DELAY updates away: all processes can still stop before it."""
    with jax.profiler.TraceAnnotation(DATA_WAIT):
        due = next_evaluation(step, cfg)
        error = train.first_error(range(step, cfg.train.steps))
        for val in vals:
            indices = val.eval_indices(due)
            val.read_ahead(indices)
            if due - step <= processes.REQUEST_DELAY:
                error = error or val.first_error(indices)
    return error


def save_if_due(store, step: int, state: State, last: bool, evaluated: bool, log, stop, cfg):
    """Save if it is the last step, a save is due, or a signal or a failed save asks for one."""
    c = cfg.checkpoint
    keeps_best = evaluated and c.best
    if keeps_best:
        store.finish()  # so that this one is not skipped
    if last or stop.must_save or is_due(step, c.every, cfg) or keeps_best:
        log.run_untimed(save, store, step, state, last, stop)
    elif store.is_due_by_clock(c.every, c.minutes) and utils.is_lead():
        stop.ask_to_save()


def train_loop(run, store, state: State, train: Dataset, vals, tasks, stop, cfg: Config):
    """Train to the last step, or until `stop`, with the evaluations, samples and checkpoints on the
    way.  Returns the state, and whether the run is finished."""
    start = int(state.step)
    utils.run_on_lead(record_start, run, cfg, train.source, start)
    fingerprints = {("eval", val.name): val.source.fingerprint for val in vals}
    fingerprints |= {("tasks", ""): tasks.fingerprint} if tasks else {}
    log = MetricsLog(run, cfg, start, train.tokens_by_source, fingerprints)
    if cfg.checkpoint.best:
        store.keep_best(log.past.best_losses())
    if start < cfg.train.steps:  # before compiling, which may take minutes
        stop.error = read_upcoming(start, train, vals, cfg)
        run_on_each(stop.raise_error)
    # Before the first checkpoint, because compiling may fail, or show that memory is too small.
    with stop.nothing_to_save():
        programs = log.run_untimed(compile_steps, start, train, cfg)
    if store.newest is None:
        with utils.say_time("first checkpoint"):
            log.run_untimed(store.save, start, runstate.checkpoint_items(state))
    # With train.batch_ramp there are several programs: that of the first traced update is profiled.
    first = min(max(start, cfg.train.profile[0] - 1), cfg.train.steps - 1)
    program = programs.get(len(train.order.batch_rows(first)))
    profile = Profile(run, program, step_jaxpr, cfg, start)
    for step in range(start, cfg.train.steps + 1):
        evaluated = evaluate_if_due(state.params, step, vals, tasks, log, stop, cfg)
        sample_if_due(state.params, step, train, log, cfg)
        last = step == cfg.train.steps
        if not last:
            error = read_upcoming(step, train, vals, cfg)
            last = stop.agree_to_stop(error, is_update=True)
        save_if_due(store, step, state, last, evaluated, log, stop, cfg)
        if last:
            break
        for name, epoch in train.order.new_epochs(step).items():
            if epoch <= 10:  # a small set has thousands
                utils.say(f"update {step + 1} begins epoch {epoch} of {name or 'data.train'}")
        program = programs[len(train.order.batch_rows(step))]
        with profile.trace_update(step + 1, log):
            state, metrics = program(state, *train.batch(step))
            log.add_update(step + 1, metrics)
        if times := profile.learned_times(step + 1):
            # A new function, so that the eta leaves this compilation out too.
            recompile = partial(compile_steps, times=times)
            programs = log.run_untimed(recompile, step + 1, train, cfg)
    store.close()
    with utils.only_warn("train.profile: no ledger"):  # rows may still wait in the log
        profile.report()
    log.close()
    return state, log.past.is_evaluated(cfg.train.steps)


def main(cfg: Config, held=None) -> State | None:
    """Make or resume a run and train it, or only evaluate it.  held: the run's lock, if this
    process has it already."""
    stop = processes.Stop()
    if held and not utils.is_lead():  # open_run needs that of process 0 only
        held.release()
    with processes.Watchdog(stop, cfg):
        processes.compare_settings(cfg)
        cfg = run_on_each(partial(utils.start_mesh, plan_remat=plan_remat), cfg)
        optim.optimizer(cfg)  # raises for a name that no table has, before anything is written
        optim.warn_of_warmup(cfg)
        warn_of_constant_gate(cfg)
        runstate.warn_of_memory(cfg)
        train, vals, tasks = open_data(cfg)
        cfg = train.cfg  # now with the data's end-of-document id
        # A parent that cannot be used is refused before open_run moves the old run.  Process 0
        # decides, because a restart of it may have dropped --fresh.
        if cfg.run.start_from and utils.exchange(cfg.fresh)[0]:
            Parent(cfg, train.source.tokenizer)
        with open_run(cfg, train.source, held) as run:
            store, state = runstate.restore_or_init(run, train, cfg)
            if cfg.eval_only:
                return evaluate_once(state, vals, tasks, stop, cfg)
            print_sizes(train, vals, tasks, cfg)
            state, finished = train_loop(run, store, state, train, vals, tasks, stop, cfg)
            if finished:
                stop.ignore_signals()
            run_on_each(stop.raise_error)
            if not finished:
                committed = f"checkpoint of update {int(state.step)} committed"
                utils.say(f"interrupted: {committed}; run the same command again to go on")
                sys.exit(INTERRUPTED)
            utils.say(f"finished: {run}")
    return state


def plan_remat(cfg: Config, device_kind: str) -> str:
    """The value of train.remat=auto on accelerators of this kind: the one that scripts/plan.py
    chooses, or layer for a kind that is not in chips.py."""
    chip = chip_of(device_kind)
    return choose_remat(step_jaxpr, cfg, chip) if chip else "layer"


def open_data(cfg: Config) -> tuple[Dataset, list[Dataset], Tasks | None]:
    """The training set, the validation sets and the tasks, the same in every process."""
    with utils.say_time("data"):
        train = run_on_each(Dataset, cfg, "train")
        vals = [run_on_each(Dataset, train.cfg, "val", name) for name in read_sets(cfg.data.val)]
        sources = {x.label: x.source for x in (train, *vals)}
        run_on_each(check_tokenizers, sources)
        tasks = run_on_each(open_tasks, train.source.tokenizer, cfg) if cfg.eval.tasks else None
        sources |= {"eval.tasks": tasks} if tasks else {}
        fingerprints = {name: x.fingerprint for name, x in sources.items()}
        fix = "let the path hold the same data set on every host"
        processes.refuse_differences(fingerprints, fix)
    return train, vals, tasks


def print_sizes(train: Dataset, vals: list[Dataset], tasks: Tasks | None, cfg: Config):
    n_params, n_active = model.param_count(cfg), model.param_count(cfg, active=True)
    active = f", {n_active:,} active" if n_active < n_params else ""
    sets = "".join(f"{f'val {val.name}'.strip()}: {val}\n" for val in vals)
    sets += f"tasks: {tasks}\n" if tasks else ""
    utils.say(f"train: {train}\n{sets}model: {n_params:,} parameters{active}")
    if (ours := cfg.data.end_id) >= 0 and train.source.end_id not in (-1, ours):
        theirs = train.source.end_id
        what = f"documents in data.train end with token {theirs}, but samples and exports of this"
        utils.warn(f"{what} run use data.end_id={ours}: set --data.end_id {theirs}")


def evaluate_once(state: State, vals: list[Dataset], tasks: Tasks | None, stop, cfg: Config):
    """What --eval_only does."""
    step = int(state.step)

    def show(print_result, result):
        run_on_each(stop.raise_error)
        if result is None:
            sys.exit(INTERRUPTED)
        print_result(step, result)

    for val in vals:
        show(print_eval, evaluate(state.params, val, step, cfg, stop))
    if tasks:
        show(print_scores, score_tasks(state.params, tasks, cfg, stop))


if __name__ == "__main__":
    processes.run_main(partial(main, held=LOCK), CFG)
