"""The pipeline: each stage does each piece of work once and in time, and the layers get to the
stages that want them."""

from collections import Counter
from dataclasses import replace
from itertools import chain, product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, batch
from conftest import on_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import config
import layers
import pipeline
import runstate
import train
import utils

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
"""mesh.schedule and mesh.virtual_stages."""


def pipeline_config(name: str, parts: int, pp: int):
    """A config with one layer in each part of each stage, on the ambient mesh."""
    cfg = replace(PLAIN, mesh=config.Mesh(schedule=name, virtual_stages=parts))
    return on_mesh(cfg, (1, pp, 1), model=dict(n_layers=pp * parts))


# ---- forward and backward


@pytest.mark.parametrize("skip_bubbles, device", [(True, "cpu"), (True, "gpu"), (False, "gpu")])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name, parts", SCHEDULES)
def test_every_stage_does_each_microbatch_of_each_part_once_in_each_direction(
    name, parts, pp, skip_bubbles, device, monkeypatch
):
    """Each stage also receives what its neighbour has made of that very microbatch.  A GPU writes
    what waits after the branch.

    The x of microbatch m is 1000 m + the number of parts that it has gone through.
    """
    monkeypatch.setattr(pipeline, "platform", lambda: device)
    M = 2 * pp
    cfg = pipeline_config(name, parts, pp)
    schedule = pipeline.make_schedule(cfg, M)

    @jax.jit
    @jax.shard_map(in_specs=(), out_specs=(P("pp"), P("pp"), P("pp")))
    def run():
        s = layers.mark_varying(lax.axis_index("pp"))

        def begin(m, x, total):
            return m * 1000.0 + layers.mark_varying(jnp.float32(0)), total

        def forward(m, r, x, total):
            n_forward, n_backward, correct = total
            part = r * pp + s
            correct &= x == m * 1000 + part
            return m * 1000.0 + part + 1, [x], (n_forward.at[r, m].add(1), n_backward, correct)

        def score(m, y, total):
            n_forward, n_backward, correct = total
            correct &= (s < pp - 1) | (y == m * 1000 + parts * pp)
            grad = jnp.where(s == pp - 1, m * 1000.0 + parts * pp, -1)
            return grad, (n_forward, n_backward, correct)

        def backward(m, r, saved, grad, total):
            n_forward, n_backward, correct = total
            part = r * pp + s
            correct &= grad == m * 1000 + part + 1
            correct &= saved[0] == m * 1000 + part
            return grad - 1, (n_forward, n_backward.at[r, m].add(1), correct)

        def finish(m, grad, total):
            n_forward, n_backward, correct = total
            return n_forward, n_backward, correct & (grad == m * 1000)

        work = SimpleNamespace(
            begin=begin, forward=forward, score=score, backward=backward, finish=finish
        )
        zeros = jnp.zeros((parts, M), int)
        total = layers.mark_varying((zeros, zeros, jnp.bool(True)))
        x = layers.mark_varying(jnp.float32(0))
        mesh = replace(cfg.mesh, skip_bubbles=skip_bubbles)
        branch = pipeline.branch_policy(replace(cfg, mesh=mesh))
        total = pipeline.run_schedule(schedule, work, x, [x], total, branch)
        return jax.tree.map(lambda x: lax.pmin(x.astype(int), utils.STAGE)[None], total)

    n_forward, n_backward, correct = jax.device_get(run())
    assert correct.all() and (n_forward == 1).all() and (n_backward == 1).all()


@pytest.mark.parametrize("name, parts", SCHEDULES)
def test_stages_work_once_a_microbatch_and_in_lock_step_in_the_bubble_too(name, parts):
    """The work that is really run, counted where it runs.  In lock step the bubble adds pp - 1
    items in each direction, as the formula for the bubble says."""
    pp, M = 4, 8
    cfg = pipeline_config(name, parts, pp)

    def count_work(skip_bubbles):
        mesh = replace(cfg.mesh, skip_bubbles=skip_bubbles)
        branch = pipeline.branch_policy(replace(cfg, mesh=mesh))
        schedule, counter = pipeline.make_schedule(cfg, M), Counter()

        @jax.jit
        @jax.shard_map(in_specs=(), out_specs=P(utils.AXES))
        def run():
            def count(direction):
                def add(s):
                    counter[direction, int(s)] += 1

                jax.debug.callback(add, lax.axis_index("pp"))

            def forward(m, r, x, total):
                count("forward")
                return x, [x], total

            def backward(m, r, saved, grad, total):
                count("backward")
                return grad, total

            def pass_on(m, x, total):
                return x, total

            def finish(m, grad, total):
                return total

            work = SimpleNamespace(
                begin=pass_on, forward=forward, score=pass_on, backward=backward, finish=finish
            )
            x = total = layers.mark_varying(jnp.float32(0))
            return pipeline.run_schedule(schedule, work, x, [x], total, branch)[None]

        jax.block_until_ready(run())
        jax.effects_barrier()
        return [counter[direction, s] for direction in ("forward", "backward") for s in range(pp)]

    n = parts * M
    assert count_work(skip_bubbles=True) == [n] * 2 * pp
    assert count_work(skip_bubbles=False) == [n + pp - 1] * 2 * pp


@pytest.mark.parametrize("name, parts, pp, M", [
    ("gpipe", 1, 1, 3), ("1f1b", 1, 1, 3),
    *((name, parts, pp, 2 * pp) for name, parts in SCHEDULES for pp in (2, 4)),
])  # fmt: skip
def test_ticks_and_kept_microbatches_are_those_of_the_timetable(name, parts, pp, M):
    """`ticks` is the length of the timetable that the conditions make, tick by tick, and
    `buffer_size` its greatest number of microbatches between their forward and backward work."""
    mesh = config.Mesh(1, pp, 1, schedule=name, virtual_stages=parts)
    schedule = pipeline.make_schedule(replace(PLAIN, mesh=mesh), M)
    timetables = {}
    for s in range(pp):
        forward, backward = {}, {}
        for t in range(3 * schedule.ticks):
            if schedule.does_forward(t, s):
                forward[schedule.microbatch_and_part(t - s)] = t
            if schedule.does_backward(t, s):
                backward[schedule.backward_microbatch_and_part(t, s)] = t
        assert forward.keys() == backward.keys() and len(forward) == parts * M
        timetables[s] = forward, backward
    assert 1 + max(max(backward.values()) for _, backward in timetables.values()) == schedule.ticks
    gpipe_ticks, overlapping_ticks = 2 * (M + pp - 1), parts * M + (parts + 1) * pp - 2
    waits = name == "gpipe" and pp > 1
    assert schedule.ticks == (gpipe_ticks if waits else overlapping_ticks)
    most = 0
    for forward, backward in timetables.values():
        for t in range(schedule.ticks):
            kept = [r for m, r in forward if forward[m, r] <= t <= backward[m, r]]
            most = max(most, *(kept.count(r) for r in range(parts)))
    assert schedule.buffer_size() == most


@pytest.mark.slow
def test_memory_of_1f1b_does_not_grow_with_the_microbatches():
    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    def memory(name, M):
        cfg = replace(PLAIN, mesh=config.Mesh(schedule=name))
        sizes = dict(seq_len=128, microbatches=M, batch_size=4 * M)
        cfg = on_mesh(cfg, (1, 2, 1), model=dict(n_layers=4, vocab_size=128), train=sizes)
        args = runstate.abstract_state(cfg), *jax.tree.map(abstract, batch(cfg)), cfg
        return train.train_step.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert memory("1f1b", 32) < 1.02 * memory("1f1b", 8)  # the tokens themselves
    assert memory("gpipe", 32) > 1.2 * memory("gpipe", 8)


# ---- layers to the parts of an interleaved schedule


def test_every_piece_gets_to_its_stage_and_a_round_has_one_message_a_stage():
    """At rest the stages have the pieces in order, `parts` each, and afterwards stage s has the
    pieces s, s + pp, s + 2 pp and so on."""
    for pp, parts in product(range(1, 9), range(1, 7)):
        rounds = pipeline.transfer_rounds(pp, parts)
        for pieces in rounds:
            senders, receivers = {n // parts for n in pieces}, {n % pp for n in pieces}
            assert len(senders) == len(receivers) == len(pieces)
        assert sorted(chain(*rounds)) == list(range(pp * parts))


@pytest.mark.parametrize("pp, parts", [(2, 2), (2, 3), (3, 2), (4, 3), (1, 2), (4, 1)])
def test_layers_to_parts_is_a_reshape_of_all_layers(pp, parts):
    cfg = on_mesh(PLAIN, (1, pp, 1), model=dict(n_layers=12), train=dict(batch_size=12))
    cfg = replace(cfg, mesh=replace(cfg.mesh, schedule="interleaved", virtual_stages=parts))
    layer_N = np.arange(2 * pp * parts)

    @jax.jit
    @jax.shard_map(in_specs=P("pp"), out_specs=P("pp"))
    def run(layer_N):
        return pipeline.layers_to_parts(layer_N, cfg)[None]

    want = layer_N.reshape(parts, pp, 2).swapaxes(0, 1)
    np.testing.assert_array_equal(np.asarray(run(layer_N)).reshape(want.shape), want)
