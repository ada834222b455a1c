"""The loss and its gradient: the same on every mesh, with every schedule, and with every trade of
time for memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ALL_EXPERTS,
    GPT2,
    MIXED,
    MOE,
    MOE_ALLTOALL,
    PLAIN,
    RICH,
    as_float64,
    assert_same_gradient,
    batch,
    golden,
    gradient_on,
    one_device_gradient,
    one_device_params,
    params_of,
    plain_logits,
    relative_errors,
)
from conftest import AXES_AND_ALL, MESHES, OF_EIGHT, on_mesh
from jax.extend.core import jaxprs_in_params

import architecture
import attention
import config
import gradient
import layers
import model
import pipeline
import runstate
import train
import utils
from weights import norm_gain

# ---- on any mesh

SLOW = pytest.mark.slow
CASES = [
    *((RICH, mesh) for mesh in AXES_AND_ALL),
    *(pytest.param(RICH, mesh, marks=SLOW) for mesh in MESHES if mesh not in AXES_AND_ALL),
    *(pytest.param(MOE, mesh, marks=() if mesh == (2, 2, 2) else SLOW) for mesh in OF_EIGHT),
    (MOE_ALLTOALL, (2, 2, 2)),
    # With one dp rank no expert is elsewhere.
    *(
        pytest.param(MOE_ALLTOALL, mesh, marks=SLOW)
        for mesh in OF_EIGHT
        if mesh[0] > 1 and mesh != (2, 2, 2)
    ),
    # It adds other norms, biases and positions, and no two axes handle any of these together.
    *(pytest.param(GPT2, mesh, marks=() if mesh == (2, 2, 2) else SLOW) for mesh in AXES_AND_ALL),
]
NAMES = {RICH: "accumulation+dropout+qk_norm+tied+z_loss", MOE: "mla+moe"}
NAMES |= {MOE_ALLTOALL: "mla+moe+alltoall", GPT2: "gpt2"}


@pytest.mark.parametrize("cfg, mesh", CASES, ids=lambda x: NAMES.get(x, str(x)))
def test_every_mesh_has_the_gradient_of_one_device(cfg, mesh):
    gather = replace(cfg, mesh=config.Mesh())
    assert_same_gradient(gradient_on(mesh, cfg), one_device_gradient(gather))


def test_an_evaluation_has_the_gradient_of_training():
    """It has no running sums, in which training adds up the gradient of rows that are looked up."""
    want, cfg = one_device_gradient(GPT2)[1], on_mesh(GPT2, (2, 2, 2))
    specs = utils.shardings(model.param_specs(cfg))
    params, tokens_and_targets = jax.device_put(one_device_params(cfg.model), specs), batch(cfg)

    def loss(params):
        total, n, *_ = train.eval_step(params, *tokens_and_targets, cfg)
        return total / n

    errors = relative_errors(jax.device_get(jax.jit(jax.grad(loss))(params)), want)
    assert max(jax.tree.leaves(errors)) <= 1e-5, errors


@pytest.mark.parametrize("family, mesh", [
    pytest.param(name, mesh, marks=() if (name, mesh) == ("olmo2", (2, 2, 2)) else SLOW)
    for name in ("gemma2", "gemma3_text", "gpt_oss", "mistral", "olmo2", "qwen2")
    for mesh in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]
], ids=str)  # fmt: skip
def test_models_of_other_families_have_the_gradient_of_one_device(family, mesh):
    cfg = golden(family)
    assert_same_gradient(gradient_on(mesh, cfg), one_device_gradient(cfg))


@pytest.mark.slow
@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
def test_experts_with_biases_may_be_elsewhere(capacity_factor):
    cfg = golden("gpt_oss")
    cfg = replace(cfg, train=replace(cfg.train, capacity_factor=capacity_factor))
    alltoall = replace(cfg, mesh=config.Mesh(experts="alltoall"))
    assert_same_gradient(gradient_on((4, 1, 2), alltoall), one_device_gradient(cfg))


# Two slices of four devices, with each axis inside alone and with all other settings.
SLICED = [
    (RICH, ("2x4", 1, 1), dict()),
    (RICH, ("2x1", 2, 2), dict(schedule="1f1b")),
    pytest.param(MOE, ("2x1", 4, 1), dict(schedule="interleaved", virtual_stages=2), marks=SLOW),
    pytest.param(MOE_ALLTOALL, ("2x2", 1, 2), dict(experts="alltoall", fsdp="step"), marks=SLOW),
    (GPT2, ("2x2", 2, 1), dict(fsdp="none")),
    pytest.param(MIXED, ("2x4", 1, 1), dict(experts="alltoall"), marks=SLOW),
    (PLAIN, ("4x2", 1, 1), dict()),
]
SLICED_NAMES = ["rich", "1f1b", "interleaved", "alltoall", "gpt2-none", "mixed", "four-slices"]


@pytest.mark.parametrize("cfg, mesh, how", SLICED, ids=SLICED_NAMES)
def test_slices_have_the_gradient_of_one_device(cfg, mesh, how):
    want = one_device_gradient(replace(cfg, mesh=config.Mesh()))
    assert_same_gradient(gradient_on(mesh, replace(cfg, mesh=config.Mesh(**how))), want)


def test_gradients_are_rounded_between_slices_only_if_asked():
    cfg, want = replace(PLAIN, mesh=config.Mesh(slow_dtype="bfloat16")), one_device_gradient(PLAIN)
    loss, grads, _ = gradient_on(("2x2", 1, 2), cfg)
    np.testing.assert_allclose(loss, want[0], rtol=1e-6)
    errors = jax.tree.leaves(relative_errors(grads, want[1]))
    assert min(errors) > 1e-4 and max(errors) < 1e-2
    assert_same_gradient(gradient_on((4, 1, 2), cfg), want)  # no slices


@pytest.mark.slow
def test_mixed_blocks_with_capacity_and_documents_have_the_gradient_of_one_device():
    want = one_device_gradient(MIXED)
    assert want[2]["layers"]["moe_local"]["dropped"].min() > 0
    cfg = replace(MIXED, mesh=config.Mesh(experts="alltoall"))
    assert_same_gradient(gradient_on((4, 1, 2), cfg), want)


TWICE = replace(
    PLAIN,
    model=replace(PLAIN.model, pattern="dense_local*2,dense", n_layers=12, window=5),
    log=replace(PLAIN.log, norms_every=1),
)
"""A block has a kind twice."""


def test_a_new_weight_outside_of_the_layers_gets_its_gradient(monkeypatch):
    """A factor on each element of the embedding: s dL/ds is then the sum of E dL/dE."""
    ends_table, apply_embedding = model.ends_table, model.apply_embedding

    def with_factor(params, *args):
        x_BLD, acc = apply_embedding(params, *args)
        return x_BLD * params["factor_D"], acc

    factor = dict(factor_D=norm_gain(PLAIN.model.d_model, adds_one=False))
    monkeypatch.setattr(model, "ends_table", lambda cfg: ends_table(cfg) | factor)
    monkeypatch.setattr(model, "apply_embedding", with_factor)
    cfg = on_mesh(PLAIN, (2, 2, 2), train=dict(grad_accum=2))
    params = params_of(cfg)
    grads = train.loss_and_grads(params, *batch(cfg), jax.random.key(7), cfg)[1]
    want_D = (params["embed_VD"] * grads["embed_VD"]).sum(0)
    assert np.abs(want_D).min() > 0
    np.testing.assert_allclose(params["factor_D"] * grads["factor_D"], want_D, rtol=1e-3)


def test_norms_of_layers_need_no_weights(monkeypatch):
    """Initially their gains are 1."""
    cfg, norm, norm_table = on_mesh(PLAIN, (2, 2, 2)), model.norm, model.norm_table

    def gradient_of_queries(name):  # for which jax has no program yet
        params = runstate.init_state(replace(cfg, run=replace(cfg.run, name=name))).params
        grads = train.loss_and_grads(params, *batch(cfg), jax.random.key(7), cfg)[1]
        return grads["layers"]["dense"]["q_DHK"]

    def norm_without_gain(x_BLD, w, name, cfg):
        return norm(x_BLD, {f"{name}_D": jnp.ones(x_BLD.shape[-1])}, name, cfg)

    want = gradient_of_queries("gains")
    monkeypatch.setattr(model, "norm", norm_without_gain)
    monkeypatch.setattr(model, "norm_table", lambda cfg, name="": {} if name else norm_table(cfg))
    np.testing.assert_allclose(gradient_of_queries("none"), want, atol=1e-5 * abs(want).max())


def test_stages_that_do_not_divide_the_sequence_share_its_scores():
    cfg = replace(
        PLAIN,
        model=replace(PLAIN.model, n_layers=3),
        train=replace(PLAIN.train, batch_size=12, seq_len=16),
    )
    assert_same_gradient(gradient_on((1, 3, 2), cfg), one_device_gradient(cfg))


@pytest.mark.parametrize("cfg, mesh, how", [
    (PLAIN, (1, 4, 1), dict(schedule="1f1b")),
    (RICH, (2, 2, 2), dict(schedule="1f1b")),
    (RICH, (2, 2, 2), dict(schedule="1f1b", skip_bubbles=False)),
    pytest.param(MIXED, (2, 2, 2), dict(schedule="1f1b"), marks=SLOW),
    (MOE, (2, 2, 2), dict(schedule="1f1b", experts="alltoall", fsdp="step")),
    (PLAIN, (1, 2, 1), dict(schedule="interleaved", virtual_stages=4)),
    (RICH, (2, 2, 2), dict(schedule="interleaved", virtual_stages=2)),
    pytest.param(TWICE, (1, 2, 2), dict(schedule="interleaved", virtual_stages=2), marks=SLOW),
    pytest.param(MOE, (1, 4, 2), dict(schedule="interleaved", virtual_stages=2), marks=SLOW),
    pytest.param(MIXED, (4, 1, 2), dict(fsdp="step"), marks=SLOW),
    pytest.param(MOE, (4, 1, 2), dict(fsdp="none", experts="alltoall"), marks=SLOW),
], ids=["plain", "rich", "lock-step", "mixed", "moe", "plain-4", "rich-2", "twice-2", "moe-2",
        "mixed-step", "moe-none"])  # fmt: skip
def test_schedules_and_fsdp_do_not_change_the_gradient(cfg, mesh, how):
    got = gradient_on(mesh, replace(cfg, mesh=config.Mesh(**how)))
    assert_same_gradient(got, one_device_gradient(cfg))


def test_a_gpu_that_writes_what_waits_after_the_branch_has_the_same_gradient(monkeypatch):
    monkeypatch.setattr(pipeline, "platform", lambda: "gpu")
    # A name of its own, so that JAX does not take what another test has traced.
    cfg = replace(RICH, run=replace(RICH.run, name="gpu"), mesh=config.Mesh(schedule="1f1b"))
    assert_same_gradient(gradient_on((2, 2, 2), cfg), one_device_gradient(RICH))


@pytest.mark.parametrize("cfg", [RICH, pytest.param(MOE, marks=SLOW)], ids=["gqa", "mla"])
def test_tokens_gathered_as_rows_have_the_same_gradient(cfg, monkeypatch):
    monkeypatch.setattr(attention, "token_dim", lambda span: 0)
    ours = replace(cfg, run=replace(cfg.run, name="rows"))  # traced anew, as above
    assert_same_gradient(gradient_on((1, 2, 4), ours), one_device_gradient(cfg))


@pytest.mark.parametrize("cfg, mesh, how", [
    pytest.param(MIXED, (1, 1, 1), {}, marks=SLOW),
    (RICH, (2, 2, 2), dict(schedule="interleaved", virtual_stages=2)),
    pytest.param(MIXED, (2, 2, 2), dict(schedule="1f1b"), marks=SLOW),
    pytest.param(MOE, (2, 2, 2), dict(fsdp="step", experts="alltoall"), marks=SLOW),
], ids=["mixed", "rich-2", "mixed-1f1b", "moe-step"])  # fmt: skip
def test_layers_without_a_loop_have_the_same_gradient(cfg, mesh, how):
    got = gradient_on(mesh, replace(cfg, mesh=config.Mesh(**how)), unroll=16)
    assert_same_gradient(got, one_device_gradient(cfg))


def test_one_block_of_several_layers_keeps_its_loops():
    """Also if there is no other block: train.unroll counts layers."""
    stacks = {kind: dict(attn_norm_D=jnp.zeros((n, 2))) for kind, n in dict(dense=3, moe=1).items()}
    w, four = dict(layers=stacks), replace(PLAIN.model, pattern="dense*3,moe")
    for unroll, is_unstacked in (1, False), (3, False), (4, True):
        cfg = replace(PLAIN, model=four, train=replace(PLAIN.train, unroll=unroll))
        moe = model.arrange_layers(w, cfg)["layers"]["moe"]
        assert isinstance(moe, list) == is_unstacked


@pytest.mark.parametrize("cfg, how", [
    (RICH, {}),
    pytest.param(MOE, dict(experts="alltoall", fsdp="step"), marks=SLOW),
    pytest.param(MOE, {}, marks=SLOW),
], ids=["rich", "moe-step", "moe"])  # fmt: skip
def test_processes_on_cpus_need_no_reduce_scatter(cfg, how, monkeypatch):
    monkeypatch.setattr(layers, "uses_gloo", lambda: True)
    # A name of its own, so that JAX does not take what another test has traced.
    ours = replace(cfg, run=replace(cfg.run, name="gloo"), mesh=config.Mesh(**how))
    assert_same_gradient(gradient_on((2, 2, 2), ours), one_device_gradient(cfg))
    ours = on_mesh(ours, (2, 2, 2))
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    program = f.lower(params_of(ours), *batch(ours), jax.random.key(0), ours).as_text()
    assert "all_to_all" in program and "reduce_scatter" not in program


def test_a_replicated_norm_is_one_value_on_every_device():
    """check_vma sees to it: without it replicas would drift apart."""
    cfg = on_mesh(PLAIN, (2, 2, 2))
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    _, grads, _ = f(params_of(cfg), *batch(cfg), jax.random.key(0), cfg)
    copies = [np.asarray(s.data) for s in grads["norm_D"].addressable_shards]
    assert len(copies) == 8
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])


# ---- time against memory


@pytest.mark.parametrize("fields", [
    dict(grad_accum=4), dict(grad_accum=2, microbatches=8), dict(microbatches=16),
    dict(remat="none"), dict(remat="dots"), dict(remat="attention"), dict(remat="layer"),
    dict(unroll=4), dict(unroll=2, remat="none"),
    dict(loss_chunk=12),
], ids=str)  # fmt: skip
def test_what_only_trades_time_for_memory_does_not_change_the_gradient(fields):
    mesh = (1, 2, 2) if fields == dict(remat="dots") else (2, 2, 1)  # dots keeps sums over tp
    assert_same_gradient(gradient_on(mesh, PLAIN, **fields), one_device_gradient(PLAIN))


@pytest.mark.parametrize("remat", ["layer", "none"])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("pattern, fields", [
    ("dense", {}), ("dense_local,dense", dict(window=5)),
    ("dense*3,moe", dict(n_experts=4, n_active=2, d_expert=16)),
])  # fmt: skip
def test_no_weights_wait_for_the_backward_pass(pattern, fields, blocks, remat, monkeypatch):
    """Also where a block has a kind several times; with remat=layer only inputs of layers wait."""
    waiting, init = [], gradient.SavedArrays.__init__

    def spy(self, example):
        init(self, example)
        waiting.extend(self.example)

    monkeypatch.setattr(gradient.SavedArrays, "__init__", spy)
    n_layers = blocks * len(architecture.layer_kinds(pattern))  # of one of the four parts
    m = replace(PLAIN.model, pattern=pattern, n_layers=4 * n_layers, **fields)
    cfg = replace(PLAIN, model=m, mesh=config.Mesh(schedule="interleaved", virtual_stages=2))
    cfg = on_mesh(cfg, (1, 2, 1), train=dict(remat=remat, unroll=1, seq_len=20))
    t, f = cfg.train, jax.jit(train.loss_and_grads, static_argnames="cfg")
    f.trace(params_of(cfg), *batch(cfg), jax.random.key(0), cfg)
    if remat == "layer":
        inputs = n_layers * t.batch_size // t.microbatches * t.seq_len * m.d_model
        assert inputs <= sum(x.size for x in waiting) < inputs + 10
    elif "moe" not in pattern:  # whose rows have no dim of their own for the sequence
        has_tokens = [any(n % t.seq_len == 0 for n in x.shape) for x in waiting if x.size > 1000]
        assert has_tokens and all(has_tokens)


def test_inputs_of_layers_can_wait_in_host_memory():
    got = gradient_on((2, 1, 2), PLAIN, remat="offload")
    assert_same_gradient(got, one_device_gradient(PLAIN))


def test_a_backward_function_takes_other_weights_than_it_has_saved():
    """JAX's documentation says little about the attribute that with_weights replaces."""

    def f(w, x):
        return w["scale"] * x

    w, x, one = dict(scale=jnp.float32(2)), jnp.float32(3), jnp.float32(1)
    _, backward = jax.vjp(f, w, x)
    assert jax.tree.leaves(backward.args_res[0]) == [2]
    other = gradient.with_weights(backward, dict(scale=jnp.float32(5)))
    assert other(one) == (dict(scale=3), 5)
    assert backward(one) == (dict(scale=3), 2)  # the original has not changed
    # Without the weights x alone waits for the backward pass.
    assert jax.tree.leaves(gradient.with_weights(backward, None)) == [3]


# ---- the objective


CAPACITY = replace(ALL_EXPERTS, train=replace(MOE.train, capacity_factor=1.0))


@pytest.mark.parametrize("cfg, mesh", [
    (PLAIN, (2, 2, 2)), (GPT2, (1, 1, 1)),
    pytest.param(ALL_EXPERTS, (1, 1, 1), marks=SLOW),
    pytest.param(CAPACITY, (1, 1, 1), marks=SLOW),
], ids=["plain", "gpt2", "experts", "capacity"])  # fmt: skip
def test_bfloat16_only_rounds(cfg, mesh):
    loss, grads, _ = gradient_on(mesh, cfg, dtype="bfloat16")
    loss32, grads32, _ = one_device_gradient(cfg)
    assert 1e-7 < abs(loss - loss32) < 0.02
    assert max(jax.tree.leaves(relative_errors(grads, grads32))) < 0.1
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(grads))


BIASED_MOE = replace(CAPACITY, model=replace(CAPACITY.model, attn_bias=True, expert_bias=True))


@pytest.mark.parametrize("cfg", [GPT2, BIASED_MOE], ids=["gpt2", "moe"])
def test_gradients_are_never_summed_in_bfloat16(cfg):
    """Such a sum over many tokens, heads or hidden units would stop growing."""
    cfg = on_mesh(cfg, train=dict(dtype="bfloat16"))

    def sums(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "reduce_sum":
                yield eqn.invars[0].aval, eqn.outvars[0].aval
            for inner in jaxprs_in_params(eqn.params):
                yield from sums(inner)

    jaxpr = train.step_jaxpr(cfg)
    found = [(x, y) for x, y in sums(jaxpr) if x.size > y.size]
    assert len(found) > 10
    assert not [(x, y) for x, y in found if y.dtype == jnp.bfloat16]


def test_z_loss_adds_the_mean_square_of_the_log_partition():
    """Its gradient along the last norm's gain is the difference quotient of the plain decoder."""
    few = dict(batch_size=4, microbatches=1)
    weight, grads = 0.5, {}
    for z_loss in (0.0, weight):
        _, grads[z_loss], _ = gradient_on((1, 1, 1), PLAIN, z_loss=z_loss, **few)
    got = grads[weight]["norm_D"] - grads[0.0]["norm_D"]
    cfg = on_mesh(PLAIN, train=few)
    tokens, targets = (np.asarray(x).reshape(4, -1) for x in batch(cfg))
    w = as_float64(one_device_params(cfg.model))

    def objective(step):
        scaled = w | dict(norm_D=w["norm_D"] * (1 + step))
        z = [np.log(np.exp(plain_logits(scaled, row, cfg)).sum(-1)) for row in tokens]
        return weight * (np.array(z)[targets >= 0] ** 2).mean()

    want = (objective(1e-4) - objective(-1e-4)) / 2e-4
    np.testing.assert_allclose(got @ w["norm_D"], want, rtol=1e-3)
