"""The benchmark: its plain model trains as Trifold's does, so that the two can be compared; and its
report."""

import json
import os
from dataclasses import dataclass, replace

import numpy as np
import optax
import pytest
from conftest import needs, on_mesh, run

import config
import errors
import model
import optim
import utils
from scripts import benchmark

TINY = config.tiny()
# At the default of 1e-8 a gradient that is rounding alone, such as a key bias', makes an update of
# full size: on one CPU the third loss of QK_NORM then differed by 4.1e-6, with this by 2.4e-7.
TINY = replace(TINY, optim=replace(TINY.optim, eps=1e-6))
LLAMA = replace(
    TINY,
    model=replace(TINY.model, vocab_size=500, qk_norm=True),
    train=replace(TINY.train, batch_size=8, grad_accum=2, remat="dots"),
)
GPT2 = replace(
    TINY,
    model=replace(
        TINY.model, n_kv_heads=16, norm="layer", norm_bias=True, attn_bias=True, mlp_bias=True,
        activation="gelu_tanh", positions="learned", max_positions=20, tie_embeddings=True,
    ),
    train=replace(TINY.train, batch_size=8),
)  # fmt: skip
RELU2 = replace(GPT2, model=replace(GPT2.model, activation="relu2", tie_embeddings=False))
QK_NORM = replace(GPT2, model=replace(GPT2.model, qk_norm=True))
MOE = replace(TINY, model=replace(TINY.model, pattern="moe", n_experts=4, d_expert=16))


def windows(cfg):
    """A batch of random windows of L + 1 tokens."""
    shape = cfg.train.batch_size, cfg.train.seq_len + 1
    return np.random.default_rng(0).integers(cfg.model.vocab_size, size=shape, dtype=np.int32)


def first_losses(contestant: benchmark.Contestant) -> list[float]:
    """Of the first updates; from the second on they depend on gradients and optimizer too."""
    state, found = contestant.begin(), []
    for _ in range(4):
        state, metrics = contestant.step(state)
        found.append(float(metrics["loss"]))
    assert found[0] == contestant.loss
    return found


@pytest.mark.parametrize("preset", [
    pytest.param(LLAMA, id="llama"),
    pytest.param(GPT2, id="gpt2", marks=pytest.mark.slow),
    pytest.param(RELU2, id="relu2", marks=pytest.mark.slow),
    pytest.param(QK_NORM, id="qk_norm", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_plain_model_trains_as_trifolds_does(preset):
    cfg = on_mesh(preset)
    got = first_losses(benchmark.make_plain(windows(cfg), cfg))
    want = first_losses(benchmark.make_trifold(windows(cfg), cfg))
    assert want[-1] < want[0] - 0.01
    np.testing.assert_allclose(got, want, rtol=2e-6)


def test_the_plain_model_is_trained_by_any_optimizer(monkeypatch):
    monkeypatch.setitem(optim.OPTIMIZERS, "sgd", lambda cfg: optax.sgd(0.1))
    cfg = on_mesh(replace(LLAMA, optim=replace(LLAMA.optim, name="sgd")))
    got = first_losses(benchmark.make_plain(windows(cfg), cfg))
    want = first_losses(benchmark.make_trifold(windows(cfg), cfg))
    assert len({*want}) == len(want)
    np.testing.assert_allclose(got, want, rtol=2e-6)


live = needs("torch", "transformers")


@live
@pytest.mark.parametrize("name, preset, dtype, rtol", [
    ("transformers", LLAMA, "float32", 1e-5), ("nanogpt", GPT2, "float32", 1e-5),
    ("transformers", GPT2, "float32", 1e-5), ("transformers", LLAMA, "bfloat16", 2e-3),
])  # fmt: skip
def test_a_peer_in_torch_trains_from_the_same_weights_as_trifold(name, preset, dtype, rtol):
    """The losses of the first four updates; a decay of 9 would show in other groups of weights."""
    train = replace(preset.train, microbatches=2, dtype=dtype)
    model = replace(preset.model, qk_norm=False, n_heads=8, n_kv_heads=8)
    optimizer = replace(preset.optim, weight_decay=9.0)
    cfg = on_mesh(replace(preset, model=model, train=train, optim=optimizer))
    got = first_losses(benchmark.make_torch(name, windows(cfg), cfg))
    want = first_losses(benchmark.make_trifold(windows(cfg), cfg))
    assert abs(want[-1] - want[0]) > 0.01
    np.testing.assert_allclose(got, want, rtol=rtol)


@live
def test_nanogpt_is_left_out_where_it_lacks_the_activation():
    m = replace(RELU2.model, n_heads=8, n_kv_heads=8, tie_embeddings=True)
    cfg = on_mesh(replace(RELU2, model=m))
    peers, left_out = benchmark.make_peers(["nanogpt"], windows(cfg), cfg)
    assert not peers and "relu2" in left_out["nanogpt"]


MUP = replace(TINY, model=replace(TINY.model, mup_base_width=8))
REMAT = replace(TINY, train=replace(TINY.train, remat="attention"))
EMA = replace(TINY, optim=replace(TINY.optim, ema=0.9))
SPIKES = replace(TINY, train=replace(TINY.train, spike_sigma=5.0))
NORMS = replace(TINY, log=replace(TINY.log, norms_every=1))


@dataclass(frozen=True)
class NewModel(type(TINY.model)):
    residual_scale: float = 1.0


NEW = replace(TINY, model=NewModel(**vars(TINY.model), residual_scale=0.5))
NORM = replace(TINY, model=replace(TINY.model, norm="dyt"))
POSITIONS = replace(TINY, model=replace(TINY.model, positions="alibi"))


@pytest.mark.parametrize("preset,word", [
    (MOE, "model.n_experts=4"), (MUP, "model.mup_base_width=8"), (REMAT, "train.remat=attention"),
    (EMA, "optim.ema=0.9"), (SPIKES, "train.spike_sigma=5.0"), (NORMS, "log.norms_every=1"),
    (NEW, "model.residual_scale=0.5"), (NORM, "model.norm=dyt"), (POSITIONS, "positions=alibi"),
])  # fmt: skip
def test_a_peer_that_lacks_a_setting_of_the_config_is_left_out_with_the_reason(preset, word):
    cfg, names = on_mesh(preset), ["plain", "transformers", "nanogpt"]
    peers, left_out = benchmark.make_peers(names, windows(cfg), cfg)
    assert not peers and [*left_out] == names
    assert all(word in reason for reason in left_out.values())


def test_peers_lack_a_new_setting_that_changes_the_training():
    assert benchmark.is_lacking("train.new") and not benchmark.is_lacking("log.new")


def test_rates_and_shares_follow_from_medians(monkeypatch):
    """On a CPU, from CPU seconds; PaLM's FLOPs count all keys, Trifold's those not masked."""
    cfg = on_mesh(TINY)
    m, L, n_tokens = cfg.model, cfg.train.seq_len, cfg.train.batch_size * cfg.train.seq_len
    causal = model.flops_per_token(cfg)
    masked = 12 * m.n_layers * m.n_heads * m.d_head * (L - (L + 1) / 2)
    monkeypatch.setattr(utils, "peak_flops", lambda cfg: 1e9)
    contestant = benchmark.Contestant("some", 1, None, None, 1.0, None, 6.0)
    turns = [np.array(seconds) for seconds in ([5, 9], [4, 2], [1, 1])]
    got = benchmark.summarize(contestant, turns, 1e8, cfg)
    assert (got["step_seconds"], got["cpu_seconds"]) == (4, 2)
    assert got["tokens_per_sec"] == n_tokens / 4 and got["rate"] == n_tokens / 2
    want = dict(of_matmul=causal / 1e8, mfu=causal / 1e9, mfu_palm=(causal + masked) / 1e9)
    for name, share in want.items():
        np.testing.assert_allclose(got[name], n_tokens / 2 * share, rtol=1e-12)


@pytest.mark.slow
def test_the_command_measures_on_any_mesh_and_writes_what_it_prints(tmp_path):
    flags = ["--mesh.dp", 2, "--mesh.tp", 2, "--train.batch_size", 4, "--model.n_layers", 2]
    out = tmp_path / "out.json"
    flags += ["--repeats", 2, "--steps", 1, "--peers", "plain", "--json", out]
    flags += ["--meshes", "1,1,1", "1,2,1,1f1b,False"]
    done = run("scripts/benchmark.py", "--config", "tiny", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    names = ["trifold", "plain jit", "1,1,1", "1,2,1,1f1b,False"]
    assert [r["name"] for r in result["rows"]] == names and list(result["ratios"]) == names[1:]
    assert [r["n_devices"] for r in result["rows"]] == [4, 1, 1, 2]
    assert [len(r["turns"]) for r in result["rows"]] == [2, 2, 2, 2]
    losses = [r["first_loss"] for r in result["rows"]]
    np.testing.assert_allclose(losses, losses[1], rtol=1e-5)
    assert f"trifold / plain jit: {result['ratios']['plain jit']:.2f}" in done.stdout
    assert result["run"]["mesh"]["tp"] == 2 and result["matmul_flops"] > 0


@pytest.mark.parametrize(
    "flags",
    [["--repeats", 0], ["--optim.b1", 5], ["--meshes", "2,2"], ["--meshes", "1,3,1"]],
    ids=str,
)
def test_a_bad_request_is_two_lines(flags):
    done = run("scripts/benchmark.py", "--config", "tiny", *flags)
    assert done.returncode == errors.USAGE and not done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 2


@pytest.mark.slow
@live
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoding_takes_no_more_time_than_transformers(name):
    """On one device: small matmuls take longer with the threads of eight, as in this process."""
    set_by_conftest = ("JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS")
    env = {name: x for name, x in os.environ.items() if name not in set_by_conftest}
    done = run("tests/decode_speed.py", name, "float32", 1, 8, env=env)
    assert done.returncode == 0, done.stderr
    for row in map(json.loads, done.stdout.splitlines()):
        assert row["trifold"] <= row["transformers"], row
