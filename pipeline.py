"""The pipeline: which stage works on which microbatch in which tick, and the loops that do it.
What the work is, forward and backward, is in model.py and gradient.py.

Dimension key (a suffix on every array's name spells its logical shape):
  M  microbatches   B  sequences   L  sequence length   D  d_model   N  layers

Single letters: s is a stage, t a tick, j a work item, m a microbatch, r a part of a stage's layers.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from config import Config
from layers import mark_varying
from utils import GPUS, platform


def neighbours() -> tuple[list, list]:
    """The pairs for lax.ppermute that send from each stage to the next, and to the one before."""
    pp = lax.axis_size("pp")
    return [(s, (s + 1) % pp) for s in range(pp)], [(s, (s - 1) % pp) for s in range(pp)]


# ---- forward only: for evaluation and decoding


def forward_pipeline(stage: Callable, x_MBLD, carry, lock_step=False):
    """Run pp * n_local microbatches through pp stages in pp * n_local + pp - 1 ticks.

    x_MBLD: the inputs of this stage's n_local microbatches, m = s * n_local and on.  Returns their
    outputs, and the carry.  In tick t stage s runs (x_BLD, carry) = stage(x_BLD, m, carry) on
    microbatch m = t - s and sends x_BLD to the next stage; the carry stays.

    Stage 0 needs all inputs, in order, and only the last stage makes outputs, so both rotate from
    stage to stage towards stage 0: the input in slot t % n_local once stage 0 has read it, and the
    output in slot (t - pp + 1) % n_local just before the last stage stores a new one there.  After
    the last tick each stage holds the outputs of its own microbatches.  A stage without work in a
    tick skips it, and with it the whole dp and tp group, so that collectives inside are safe.

    lock_step: a stage without work runs too, with m = pp * n_local.  The carry then passes through
    no branch, in which XLA for a GPU would copy a cache: for 8 layers of qwen3_0.6b in two stages
    and 8 rows of 4,096 tokens a token needs 128 instead of 1,101 MiB of temporary memory.
    """
    pp, s, n_local = lax.axis_size("pp"), lax.axis_index("pp"), x_MBLD.shape[0]
    n = pp * n_local
    if n == 1:  # in a loop, XLA would copy the carry
        x_BLD, carry = stage(x_MBLD[0], 0, carry)
        return x_BLD[None], carry
    to_next, to_previous = neighbours()

    def skip(x_BLD, m, carry):
        return x_BLD, carry

    def tick(state, t):
        x_BLD, input_MBLD, output_MBLD, carry = state
        m, in_slot, out_slot = t - s, t % n_local, (t - pp + 1) % n_local
        input_BLD = input_MBLD[in_slot]
        x_BLD = jnp.where(s == 0, input_BLD, x_BLD)
        input_MBLD = input_MBLD.at[in_slot].set(lax.ppermute(input_BLD, "pp", to_previous))
        is_busy = (m >= 0) & (m < n)
        if lock_step:
            x_BLD, carry = stage(x_BLD, jnp.where(is_busy, m, n), carry)
        else:
            x_BLD, carry = lax.cond(is_busy, stage, skip, x_BLD, m, carry)
        rotated_BLD = lax.ppermute(output_MBLD[out_slot], "pp", to_previous)
        output_MBLD = output_MBLD.at[out_slot].set(jnp.where(s == pp - 1, x_BLD, rotated_BLD))
        return (lax.ppermute(x_BLD, "pp", to_next), input_MBLD, output_MBLD, carry), None

    start = (jnp.zeros_like(x_MBLD[0]), x_MBLD, jnp.zeros_like(x_MBLD), carry)
    return lax.scan(tick, start, jnp.arange(n + pp - 1))[0][2:]


# ---- forward and backward: for training


class Schedule(NamedTuple):
    """Which stage works on what in which tick.

    A stage has `parts` parts of the layers: part r of stage s is chunk r * pp + s of the model.  A
    work item is one microbatch through one part.  The order of items is pp microbatches through
    part 0, the same through part 1, and so on; then the next pp (Narayanan et al. 2021, section
    2.2).  Forward, stage s does item j in tick s + j, just after stage s - 1 has sent its input;
    stage 0 takes new microbatches for part 0, and for part r + 1 what the last stage made in part
    r.  Backward is the same in reverse: stage s does item j in tick
    first_backward + (pp - 1 - s) + j.
    """

    pp: int
    parts: int
    microbatches: int
    first_backward: int
    """The tick of the first backward work: after all forward work in gpipe with pp > 1, otherwise
    as soon as one microbatch is through, after parts * pp - 1 ticks."""

    @property
    def items(self) -> int:
        """Work items of a stage in each direction."""
        return self.parts * self.microbatches

    @property
    def ticks(self) -> int:
        return self.first_backward + self.pp - 1 + self.items

    @property
    def output_waits(self) -> bool:
        """Whether the last stage's output waits in the buffer for its score: in gpipe, because
        backward work, which begins with the score, starts only after all forward work.  Otherwise
        an output is scored in the tick that makes it."""
        return self.first_backward >= self.items

    def microbatch_and_part(self, j):
        """(m, r) of forward item j."""
        group, rest = j // (self.pp * self.parts), j % (self.pp * self.parts)
        return group * self.pp + rest % self.pp, rest // self.pp

    def backward_item(self, t, s):
        """The number of stage s's backward item in tick t; see `does_backward` for whether it has
        one."""
        return t - self.first_backward - (self.pp - 1 - s)

    def backward_microbatch_and_part(self, t, s):
        """(m, r) of stage s's backward item in tick t: the last part comes first."""
        m, r = self.microbatch_and_part(self.backward_item(t, s))
        return m, self.parts - 1 - r

    def does_begin(self, t, s):
        """Whether stage s embeds a new microbatch in tick t."""
        return self.does_forward(t, s) & (s == 0) & (self.microbatch_and_part(t - s)[1] == 0)

    def does_forward(self, t, s):
        """Whether stage s has forward work in tick t: item t - s."""
        return (t >= s) & (t - s < self.items)

    def does_score(self, t, s):
        """Whether the last stage's output is scored in tick t: the same for every s, because all
        stages share that work."""
        last = self.pp - 1
        _, r = self.backward_microbatch_and_part(t, last)
        return self.does_backward(t, last) & (r == self.parts - 1)

    def does_backward(self, t, s):
        """Whether stage s has backward work in tick t."""
        j = self.backward_item(t, s)
        return (j >= 0) & (j < self.items)

    def does_finish(self, t, s):
        """Whether stage s does the backward pass of the embedding in tick t."""
        _, r = self.backward_microbatch_and_part(t, s)
        return self.does_backward(t, s) & (s == 0) & (r == 0)

    def take_part(self, tree, r):
        """Part r of the layers, or of a tree in their form."""
        return tree if self.parts == 1 else jax.tree.map(lambda x: x[r], tree)

    def put_part(self, tree, r, new):
        """The tree with `new` as its part r."""
        return new if self.parts == 1 else jax.tree.map(lambda x, new: x.at[r].set(new), tree, new)

    def buffer_size(self) -> int:
        """How many microbatches of a part wait at most on a stage, between forward and backward.

        Without output_waits that is on stage 0, where a microbatch waits for 2 * parts * pp - 2
        ticks.  In parts * pp ticks the stage begins pp microbatches, so 2 * pp of them wait, and
        one fewer if there is one part.
        """
        if self.output_waits:
            return self.microbatches
        return min(self.microbatches, 2 * self.pp - (self.parts == 1))


def make_schedule(cfg: Config, microbatches: int) -> Schedule:
    """The Schedule that mesh.schedule names."""
    pp, parts = cfg.mesh.pp, cfg.mesh.virtual_stages
    after_one = parts * pp - 1
    after_all = parts * microbatches + pp - 1
    gpipe = cfg.mesh.schedule == "gpipe" and pp > 1
    return Schedule(pp, parts, microbatches, after_all if gpipe else after_one)


def run_schedule(schedule: Schedule, work, example_BLD, example_saved, total, branch: Callable):
    """Do the work of a schedule in one loop over its ticks; returns the total.

    work: has the methods begin, forward, score, backward and finish of gradient.ScheduledWork.
    example_BLD and example_saved: an x_BLD and what `forward` saves, for shapes and types.
    branch(due, f, skip, *state) returns f(*state), or skip(*state) without work; due(s) says
    whether stage s has that work.  Each kind of work is a branch of its own, and takes the total
    that the one before returned: of branches that do not depend on each other XLA on a CPU would
    run the collectives at the same time, and mix up those of one group of devices.
    """
    pp, s, size = schedule.pp, lax.axis_index("pp"), schedule.buffer_size()
    to_next, to_previous = neighbours()
    empty = jax.tree.map(
        lambda x: mark_varying(jnp.zeros((schedule.parts, size, *x.shape), x.dtype)),
        (example_saved, example_BLD if schedule.output_waits else None),
    )

    def tick(carry, t):
        def when(is_due, f, *state, skip=keep):
            return branch(partial(is_due, t), f, skip, *state)

        x_BLD, grad_BLD, buffer, total = carry
        # A buffer of size 1 is used up within a tick, so the loop does not carry it.
        buffer = buffer if size > 1 else empty
        m, r = schedule.microbatch_and_part(t - s)
        x_BLD, total = when(schedule.does_begin, partial(work.begin, m), x_BLD, total)
        run_if_due, waits = partial(when, schedule.does_forward), schedule.output_waits
        y_BLD, buffer, total = run_forward(run_if_due, work, m, r, x_BLD, buffer, total, waits)

        end_m, end_r = schedule.backward_microbatch_and_part(t, pp - 1)
        end_BLD = y_BLD
        if schedule.output_waits:
            _, end_BLD = take_from_buffer(buffer, end_m, end_r)
        end_grad_BLD, total = when(schedule.does_score, partial(work.score, end_m), end_BLD, total)

        back_m, back_r = schedule.backward_microbatch_and_part(t, s)
        is_end = (s == pp - 1) & (back_r == schedule.parts - 1)
        grad_BLD = jnp.where(is_end, end_grad_BLD, grad_BLD)

        def backward(grad_BLD, total):
            saved, _ = take_from_buffer(buffer, back_m, back_r)
            return work.backward(back_m, back_r, saved, grad_BLD, total)

        def finish(total):
            return (work.finish(back_m, grad_BLD, total),)

        grad_BLD, total = when(schedule.does_backward, backward, grad_BLD, total)
        (total,) = when(schedule.does_finish, finish, total)
        sent = lax.ppermute(y_BLD, "pp", to_next), lax.ppermute(grad_BLD, "pp", to_previous)
        return (*sent, buffer if size > 1 else (), total), None

    zero_BLD = jnp.zeros_like(example_BLD)
    start = zero_BLD, zero_BLD, empty if size > 1 else (), total
    return lax.scan(tick, start, jnp.arange(schedule.ticks))[0][-1]


def run_forward(run_if_due, work, m, r, x_BLD, buffer, total, output_waits: bool):
    """(y_BLD, buffer, total) after the forward pass of microbatch m and part r; (x_BLD, buffer,
    total) if none is due.  The buffer keeps what `work.forward` saves, and y if output_waits.

    The buffer is written inside of the branch, where XLA copies nothing; if it were written after
    the branch, updates of the demo on (2, 2, 2) would take 1.08 times the CPU time.  On a GPU it is
    written after the branch, because inside XLA would copy all of it for each write: llama_1b with
    dp 4, pp 2, 1f1b and remat=dots on H200s would need 21.6 GiB instead of 14.2.
    """
    writes_inside = platform() not in GPUS

    def forward(x_BLD, buffer, total):
        y_BLD, saved, total = work.forward(m, r, x_BLD, total)
        new = saved, y_BLD if output_waits else None
        return y_BLD, put_in_buffer(buffer, new, m, r) if writes_inside else new, total

    def skip_forward(x_BLD, buffer, total):
        return x_BLD, buffer if writes_inside else take_from_buffer(buffer, m, r), total

    y_BLD, written, total = run_if_due(forward, x_BLD, buffer, total, skip=skip_forward)
    return y_BLD, written if writes_inside else put_in_buffer(buffer, written, m, r), total


def put_in_buffer(buffer, new, m, r):
    """The buffer, arrays of [part, size, ...], with those of microbatch m and part r.

    With a size of 1 an item's arrays are used in the same tick, and replace the whole buffer.
    """

    def put(x, new):
        if x.shape[1] == 1:
            return new[None, None]
        return lax.dynamic_update_slice(x, new[None, None], (r, m % x.shape[1], *(0,) * new.ndim))

    return jax.tree.map(put, buffer, new)


def take_from_buffer(buffer, m, r):
    """The arrays of microbatch m and part r."""
    return jax.tree.map(lambda x: x[0, 0] if x.shape[1] == 1 else x[r, m % x.shape[1]], buffer)


# ---- how a stage skips work, for `run_schedule`


def keep(*state):
    """The state as it is, for a stage without work."""
    return state


def always_work(due, f, skip, *state):
    """For a pipeline of one stage, which has work in every tick."""
    return f(*state)


def work_when_due(due, f, skip, *state):
    """Each stage works when it has work, and else skips it."""
    return lax.cond(due(lax.axis_index("pp")), f, skip, *state)


def work_in_lock_step(due, f, skip, *state):
    """All stages work if any has work; the others drop their results."""
    this_stage = due(lax.axis_index("pp"))
    any_stage = due(jnp.arange(lax.axis_size("pp"))).any()

    def work_and_choose(*state):
        return jax.tree.map(partial(jnp.where, this_stage), f(*state), skip(*state))

    return lax.cond(any_stage, work_and_choose, skip, *state)


def branch_policy(cfg: Config) -> Callable:
    """The `branch` of run_schedule that mesh.skip_bubbles chooses.

    A single stage needs no branches.  On several CPU devices it has them anyway, because they keep
    collectives in order, except with train.remat=offload: arrays in host memory cannot leave a
    branch.
    """
    one_device = cfg.mesh.sizes == (1, 1, 1)
    if cfg.mesh.pp == 1 and (one_device or platform() != "cpu" or cfg.train.remat == "offload"):
        return always_work
    return work_when_due if cfg.mesh.skip_bubbles else work_in_lock_step


# ---- layers to the parts of an interleaved schedule


def transfer_rounds(pp: int, parts: int) -> list[list[int]]:
    """Rounds of messages that bring the layers to the stages of the schedule: the numbers of the
    chunks that are sent in each.  In a round each stage sends and receives at most one chunk.

    The model is pp * parts chunks of layers.  Chunk n is stored on stage n // parts, where its
    index is n % parts; the schedule wants it on stage n % pp, as part n // pp.  With two stages and
    two parts:

        stored:      stage 0 has chunks 0 1, stage 1 has chunks 2 3
        scheduled:   stage 0 has chunks 0 2, stage 1 has chunks 1 3
        round 0:     stage 0 keeps chunk 0, stage 1 keeps chunk 3
        round 1:     stage 0 sends chunk 1 to stage 1, stage 1 sends chunk 2 to stage 0
    """
    rounds = []
    for n in range(parts * pp):
        for chunks in rounds:
            if all(n // parts != k // parts and n % pp != k % pp for k in chunks):
                break
        else:
            rounds.append(chunks := [])
        chunks.append(n)
    return rounds


def layers_to_parts(layers, cfg: Config):
    """A stage's layers [N, ...] as the parts of the schedule, [parts, N / parts, ...], or as
    they are if there is one part.

    Layers are stored in the model's order whatever the schedule, so that checkpoints do not depend
    on it; an interleaved schedule wants other layers on a stage.  A reshape outside of shard_map
    would do, but unless pp and parts are powers of two XLA (jaxlib 0.10.2) gathers all layers on
    every device for it.
    """
    parts, pp, s = cfg.mesh.virtual_stages, cfg.mesh.pp, lax.axis_index("pp")
    if parts == 1:
        return layers

    def leaf(x):
        x = x.reshape(parts, -1, *x.shape[1:])
        out = jnp.zeros_like(x)
        for n in map(np.array, transfer_rounds(pp, parts)):
            sender, receiver = n // parts, n % pp
            index, part = np.zeros(pp, int), np.full(pp, parts)  # part `parts` is dropped below
            index[sender], part[receiver] = n % parts, n // pp
            sent = x[jnp.asarray(index)[s]]
            if (sender != receiver).any():
                sent = lax.ppermute(sent, "pp", np.stack([sender, receiver], 1).tolist())
            out = out.at[jnp.asarray(part)[s]].set(sent, mode="drop")
        return out

    return jax.tree.map(leaf, layers)
