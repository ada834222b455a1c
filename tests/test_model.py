"""The model as a whole: its initial weights and their number, and the decoder that it should be."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GPT2, MIXED, MOE, PLAIN, RICH, as_float64, batch, golden, params_of, plain_logits
from conftest import on_mesh

import config
import model
import runstate
import train

# ---- the parameter table


def test_initial_weights_do_not_depend_on_the_mesh():
    want = jax.device_get(params_of(on_mesh(PLAIN)))
    for mesh in [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)]:
        got = jax.device_get(params_of(on_mesh(PLAIN, mesh)))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    w = want["layers"]["dense"]
    assert abs(w["q_DHK"].std() * PLAIN.model.d_model**0.5 - 1) < 0.05
    assert not np.array_equal(w["q_DHK"][0], w["q_DHK"][1])
    assert not np.array_equal(w["k_DGK"], w["v_DGK"])
    fan_in = 2 * PLAIN.model.n_layers * PLAIN.model.d_ff
    assert abs(w["out_FD"].std() * fan_in**0.5 - 1) < 0.05
    other = params_of(on_mesh(PLAIN, run=dict(seed=1)))
    assert not np.array_equal(other["embed_VD"], want["embed_VD"])
    assert not np.array_equal(other["layers"]["dense"]["q_DHK"], w["q_DHK"])


WIDE = replace(
    config.gpt2("wide", n_layers=2, d_model=768, n_heads=12),
    train=replace(PLAIN.train, batch_size=8, seq_len=64),
)


FIRST = [
    PLAIN, RICH, MOE, GPT2, MIXED, golden("olmo2"), golden("gemma3_text"),
    pytest.param(WIDE, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("cfg", FIRST)
def test_the_first_loss_is_that_of_even_chances(cfg):
    cfg = on_mesh(cfg)
    params = runstate.init_state(cfg).params
    nll, n, *_ = train.eval_step(params, *batch(cfg), cfg)
    assert abs(nll / n - np.log(cfg.model.vocab_size)) < 0.05


@pytest.mark.parametrize("family", ["olmo2", "gemma2"])
def test_a_norm_after_attention_begins_with_a_gain_as_small_as_what_other_layers_add(family):
    cfg = on_mesh(golden(family))
    params = runstate.init_state(cfg).params
    small = 0.1 * (2 * cfg.model.n_layers) ** -0.5
    for w in params["layers"].values():
        for name in ("attn_post_norm_D", "mlp_post_norm_D"):
            np.testing.assert_allclose(w[name] + cfg.model.norm_offset, small, rtol=1e-6)
    np.testing.assert_array_equal(params["norm_D"] + cfg.model.norm_offset, 1)


PUBLISHED = {  # total, as counted from the models that transformers 5.23 builds
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1.5b": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_0.6b": 596_049_920,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v3": 671_026_419_200,
}


def test_parameters_are_counted_as_published():
    for name, n in PUBLISHED.items():
        assert model.param_count(config.PRESETS[name]()) == n, name
    for name, n in {"qwen3_30b_a3b": 3.3e9, "deepseek_v3": 37e9, "llama3_8b": 8.03e9}.items():
        assert model.param_count(config.PRESETS[name](), active=True) == pytest.approx(n, rel=0.02)
    params = params_of(on_mesh(PLAIN))
    assert model.param_count(PLAIN) == sum(x.size for x in jax.tree.leaves(params))


def test_flops_are_counted_by_the_matmul():
    """A moe layer counts the experts of one token, a local layer the keys in its window."""
    cfg = config.llama3_8b()
    weights = model.param_count(cfg) - 128256 * 4096 - (2 * 32 + 1) * 4096
    assert model.flops_per_token(cfg) == 6 * weights + 6 * 32 * 32 * 128 * 8193
    L = 16
    attention = 2 * 32 * 4 * (16 + 8)
    experts = 32 * 4 + 2 * 2 * 32 * 16
    matmul = 6 * (attention + 2 * 32 * 64) + 3 * (attention + experts) + 512 * 32
    keys = 8 * (5 - 10 / L) + (L + 1) / 2
    assert model.flops_per_token(MIXED) == 6 * (matmul + 16 * 2 * 4 * keys)


# ---- the decoder


def plain_nll(w, tokens, targets, cfg):
    """The negative log likelihood of each token of one sequence, from `plain_logits`."""
    logit = plain_logits(w, tokens, cfg)
    return np.log(np.exp(logit).sum(-1)) - logit[np.arange(len(tokens)), targets]


@pytest.mark.parametrize("cfg", [PLAIN, RICH], ids=["plain", "qk_norm+tied"])
def test_the_loss_is_that_of_a_plain_decoder(cfg):
    cfg = on_mesh(cfg, (1, 2, 2))
    params, (tokens, targets) = params_of(cfg), batch(cfg)
    got = np.asarray(train.eval_step(params, tokens, targets, cfg)[2])
    want = plain_nll(as_float64(params), *(np.asarray(x)[0, 1, 2] for x in (tokens, targets)), cfg)
    counted = np.asarray(targets)[0, 1, 2] >= 0
    np.testing.assert_allclose(got[0, 1, 2][counted], want[counted], rtol=2e-5)
    assert (got[0, 1, 2][~counted] == 0).all()


def test_no_token_sees_the_future():
    cfg = on_mesh(PLAIN, (2, 2, 2))
    tokens_AMBL, targets_AMBL = batch(cfg)
    before = np.asarray(train.eval_step(params_of(cfg), tokens_AMBL, targets_AMBL, cfg)[2])
    changed_AMBL = tokens_AMBL.at[..., 9:].set(3)
    after = np.asarray(train.eval_step(params_of(cfg), changed_AMBL, targets_AMBL, cfg)[2])
    np.testing.assert_array_equal(before[..., :9], after[..., :9])
    assert (before[..., 9:] != after[..., 9:]).any()


def test_a_frequent_tokens_gradient_survives_bfloat16():
    grads_VD, table_VD = jnp.ones((4, 8)), jnp.zeros((4, 8), jnp.bfloat16)
    row_BL = jnp.zeros((1, 4096), int)
    (_, x_BLD), backward = jax.vjp(lambda *args: model.lookup(*args, row_BL), grads_VD, table_VD)
    sum_VD, _ = backward((grads_VD, jnp.ones_like(x_BLD)))
    assert (sum_VD[0] == 4097).all() and (sum_VD[1:] == 1).all()
