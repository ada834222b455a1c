"""Pipeline stages: which stage works on what in which tick, and moving activations between them.

DIMS
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from config import Config
from layers import mark_varying, platform


def forward_pipeline(stage, x_MBLD, carry):
    """Forward only: n = pp * slots microbatches pass pp stages in n + pp - 1 ticks.

    Stage s starts with its own slots' microbatches, m = s * slots and on, and ends with the same
    ones finished.  In tick t it runs stage(x, m, carry) on microbatch m = t - s and hands the
    resulting x on; what it carries stays with it, and is returned beside the x_MBLD.  Slot
    t % slots turns one stage towards stage 0 once stage 0 has used its own, so that stage 0 meets
    the microbatches in order; finished ones turn likewise after the last stage has stored them, and
    are home after the last tick.  A stage with nothing to do skips the work (all of a dp or tp
    group skip together, so collectives inside are safe).
    """
    pp, s, slots = lax.axis_size("pp"), lax.axis_index("pp"), x_MBLD.shape[0]
    onward = [(i, (i + 1) % pp) for i in range(pp)]
    back = [(i, (i - 1) % pp) for i in range(pp)]

    def skip(x_BLD, m, carry):
        return x_BLD, carry

    def tick(state, t):
        x_BLD, todo_MBLD, done_MBLD, carry = state
        m, i, o = t - s, t % slots, (t - pp + 1) % slots
        x_BLD = jnp.where(s == 0, todo_MBLD[i], x_BLD)
        todo_MBLD = todo_MBLD.at[i].set(lax.ppermute(todo_MBLD[i], "pp", back))
        x_BLD, carry = lax.cond((m >= 0) & (m < pp * slots), stage, skip, x_BLD, m, carry)
        turned_BLD = lax.ppermute(done_MBLD[o], "pp", back)
        done_MBLD = done_MBLD.at[o].set(jnp.where(s == pp - 1, x_BLD, turned_BLD))
        return (lax.ppermute(x_BLD, "pp", onward), todo_MBLD, done_MBLD, carry), None

    start = (jnp.zeros_like(x_MBLD[0]), x_MBLD, jnp.zeros_like(x_MBLD), carry)
    return lax.scan(tick, start, jnp.arange(pp * slots + pp - 1))[0][2:]


class Schedule(NamedTuple):
    """Which stage works on what in which tick.

    A stage has `parts` parts of the layers: part r of stage s is number r * pp + s.  Its work
    number j is one microbatch through one part, in rounds of pp microbatches through all parts
    (Narayanan et al. 2021, section 2.2).  Forward, stage s does j in tick s + j, when stage s - 1
    has just sent it (part 0 of stage 0 begins anew, and the last stage's part r goes on to part
    r + 1 of stage 0); backward, the same way back, in tick delay + (pp - 1 - s) + j.
    """

    pp: int
    parts: int
    microbatches: int
    delay: int
    """The tick of the first backward: after all forward in gpipe, else as soon as one is through,
    which takes parts * pp - 1 ticks."""

    @property
    def n(self) -> int:
        return self.parts * self.microbatches

    @property
    def ticks(self) -> int:
        return self.delay + self.pp - 1 + self.n

    def place(self, j):
        """(microbatch, part) of forward work j."""
        turn, rest = j // (self.pp * self.parts), j % (self.pp * self.parts)
        return turn * self.pp + rest % self.pp, rest // self.pp

    def forward(self, t, s):
        """Whether stage s goes forward in tick t, with work number t - s."""
        return (t >= s) & (t - s < self.n)

    def begins(self, t, s):
        """Whether it does so where the model begins."""
        return self.forward(t, s) & (s == 0) & (self.place(t - s)[1] == 0)

    def back(self, t, s):
        """The number of the work with which stage s goes back in tick t, if it does: `backward`."""
        return t - self.delay - (self.pp - 1 - s)

    def backward(self, t, s):
        """Whether stage s goes back in tick t."""
        j = self.back(t, s)
        return (j >= 0) & (j < self.n)

    def scores(self, t, s):
        """Whether the last stage goes back where the model ends, for which all of them score."""
        last = self.pp - 1
        return self.backward(t, last) & (self.place(self.back(t, last))[1] == 0)

    def finishes(self, t, s):
        """Whether stage s goes back where the model begins."""
        r = self.place(self.back(t, s))[1]
        return self.backward(t, s) & (s == 0) & (r == self.parts - 1)

    def part(self, tree, r):
        """Part r of layers, or of what is laid out like them."""
        return tree if self.parts == 1 else jax.tree.map(lambda x: x[r], tree)

    def put(self, tree, r, new):
        """tree with `new` for its part r."""
        return new if self.parts == 1 else jax.tree.map(lambda x, new: x.at[r].set(new), tree, new)

    def depth(self) -> int:
        """Microbatches of a part that a stage keeps, at most, between forward and backward."""
        j = np.arange(self.n)
        m, r = self.place(j)
        begin, end = np.zeros((2, self.parts, self.microbatches), int)
        begin[r, m] = j
        end[self.parts - 1 - r, m] = self.delay + self.pp - 1 + j
        held = (begin[:, None, :] <= end[:, :, None]).sum(-1) - np.arange(self.microbatches)
        return int(held.max())


def make_schedule(cfg: Config, microbatches: int) -> Schedule:
    pp, parts = cfg.mesh.pp, cfg.mesh.virtual_stages
    one_through = parts * pp - 1
    all_through = parts * microbatches + pp - 1
    gpipe = cfg.mesh.schedule == "gpipe" and pp > 1
    return Schedule(pp, parts, microbatches, all_through if gpipe else one_through)


class Stage(NamedTuple):
    """What `run_schedule` does with a microbatch; total is what all of them add up to."""

    begin: Callable
    """(x, m, total) -> (x, total): where the model begins; x is taken for its shape."""
    forward: Callable
    """(x, m, r, total) -> (y, saved, total): microbatch m through part r, and what backward needs.
    """
    score: Callable
    """(y, m, total) -> (gradient of y, total): by all stages together, of what the last one has."""
    backward: Callable
    """(gradient of y, saved, m, r, total) -> (gradient of x, total)."""
    finish: Callable
    """(gradient of x, m, total) -> total: where the model begins."""


def run_schedule(plan: Schedule, stage: Stage, x_BLD, saved, total, branch: Callable):
    """Run the work of a Schedule in one loop over its ticks; returns total.

    x_BLD and saved are examples.  A stage with nothing to do skips the work (all of a dp or tp
    group skip together, so collectives inside are safe).  Each kind of work is a branch of its own,
    after the one before it: XLA's CPU runs independent collectives at once and mixes up those of
    one group.  branch(when, work, rest, *args) does one of the two, when(s) being whether it is
    stage s's turn.
    """
    pp, s, depth = plan.pp, lax.axis_index("pp"), plan.depth()
    onward = [(i, (i + 1) % pp) for i in range(pp)]
    back = [(i, (i - 1) % pp) for i in range(pp)]
    late = plan.delay >= plan.n  # the last stage's y waits for its score
    ring = jax.tree.map(
        lambda x: mark_varying(jnp.zeros((plan.parts, depth, *x.shape), x.dtype)),
        (saved, x_BLD if late else None),
    )

    def keep(ring, new, m, r, works):
        if depth == 1:  # used at once
            return jax.tree.map(lambda x: x[None, None], new)
        at = r, m % depth
        return jax.tree.map(lambda x, new: x.at[at].set(jnp.where(works, new, x[at])), ring, new)

    def recall(ring, m, r):
        return jax.tree.map(lambda x: x[0, 0] if depth == 1 else x[r, m % depth], ring)

    def no_forward(x_BLD, m, r, total):
        return x_BLD, jax.tree.map(jnp.zeros_like, saved), total

    def no_score(y_BLD, m, total):
        return jnp.zeros_like(y_BLD), total

    def tick(state, t):
        x_BLD, g_BLD, ring, total = state
        m, r = plan.place(t - s)
        begins, forward = partial(plan.begins, t), partial(plan.forward, t)
        x_BLD, total = branch(begins, stage.begin, lambda x, m, total: (x, total), x_BLD, m, total)
        y_BLD, new, total = branch(forward, stage.forward, no_forward, x_BLD, m, r, total)
        ring = keep(ring, (new, y_BLD if late else None), m, r, forward(s))

        m, r = plan.place(plan.back(t, pp - 1))
        scored = recall(ring, m, r)[1] if late else y_BLD
        of_y_BLD, total = branch(partial(plan.scores, t), stage.score, no_score, scored, m, total)

        m, r = plan.place(plan.back(t, s))
        g_BLD, r = jnp.where((s == pp - 1) & (r == 0), of_y_BLD, g_BLD), plan.parts - 1 - r
        args = g_BLD, recall(ring, m, r)[0], m, r, total
        backward, finishes = partial(plan.backward, t), partial(plan.finishes, t)
        g_BLD, total = branch(backward, stage.backward, lambda g, *a: (g, a[-1]), *args)
        total = branch(finishes, stage.finish, lambda g, m, total: total, g_BLD, m, total)
        sent = lax.ppermute(y_BLD, "pp", onward), lax.ppermute(g_BLD, "pp", back)
        return (*sent, ring if depth > 1 else (), total), None

    zero_BLD = jnp.zeros_like(x_BLD)
    start = zero_BLD, zero_BLD, ring if depth > 1 else (), total
    return lax.scan(tick, start, jnp.arange(plan.ticks))[0][-1]


def layers_to_parts(layers, cfg: Config):
    """Layers as they rest, [N, ...] in one piece a stage, as the parts of the interleaved schedule,
    [parts, N / parts, ...]; pieces change stages, so that checkpoints know of no schedule."""
    parts, pp, s = cfg.mesh.virtual_stages, cfg.mesh.pp, lax.axis_index("pp")
    if parts == 1:
        return layers
    rounds = []  # {sender: (receiver, piece, part)}; in a round each sends and receives one at most
    for n in range(parts * pp):
        sender, receiver = n // parts, n % pp
        fits = (r for r in rounds if sender not in r and receiver not in [x[0] for x in r.values()])
        if (free := next(fits, None)) is None:
            rounds.append(free := {})
        free[sender] = receiver, n % parts, n // pp

    def leaf(x):
        x = x.reshape(parts, -1, *x.shape[1:])
        out = jnp.zeros_like(x)
        for r in rounds:
            piece, part = np.zeros(pp, int), np.full(pp, parts)  # out of range: dropped
            for sender, (receiver, n, to) in r.items():
                piece[sender], part[receiver] = n, to
            sent, moves = x[jnp.asarray(piece)[s]], [(a, b) for a, (b, *_) in r.items()]
            if any(a != b for a, b in moves):
                sent = lax.ppermute(sent, "pp", moves)
            out = out.at[jnp.asarray(part)[s]].set(sent, mode="drop")
        return out

    return jax.tree.map(leaf, layers)


def branch_policy(cfg: Config) -> Callable:
    """What chooses whether to work, for `run_schedule`.

    Without other stages there always is work.  On a CPU, branches still keep collectives in order;
    but host memory cannot come out of one.
    """

    def always(when, work, rest, *args):
        return work(*args)

    def skip(when, work, rest, *args):
        return lax.cond(when(lax.axis_index("pp")), work, rest, *args)

    def lock_step(when, work, rest, *args):
        """Where one stage works all do, and the others drop what comes of it."""
        own, busy = when(lax.axis_index("pp")), when(jnp.arange(cfg.mesh.pp)).any()

        def all_work(*args):
            return jax.tree.map(partial(jnp.where, own), work(*args), rest(*args))

        return lax.cond(busy, all_work, rest, *args)

    if cfg.mesh.pp == 1 and (platform() != "cpu" or cfg.train.remat == "offload"):
        return always
    return skip if cfg.mesh.skip_bubbles else lock_step
