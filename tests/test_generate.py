"""Decoding: greedy text, the cache, and how tokens are drawn."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from cases import (
    ALL_EXPERTS,
    GPT2,
    MIXED,
    MOE_ALLTOALL,
    PLAIN,
    as_float64,
    cached_errors,
    check_cached_logits,
    golden,
    params_of,
    plain_logits,
)

import config
import generate
import utils

SLOW = pytest.mark.slow

# ---- logits

OSS_ALLTOALL = replace(golden("gpt_oss"), mesh=config.Mesh(experts="alltoall"))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_greedy_text_is_the_argmax_of_a_plain_decoder(mesh):
    """On any mesh, for prompts of different lengths, and for a row that gets as long as
    train.seq_len and continues from its last half."""
    cfg = utils.start_mesh(replace(PLAIN, mesh=config.Mesh(*mesh)), rows=3)
    params, L = params_of(cfg), cfg.train.seq_len
    prompts = [[5, 6, 7], [1], list(range(12))]
    *_, rows = generate.generate(params, prompts, 8, cfg, vocab_size=512, temperature=0)
    assert [row[: len(p)] for row, p in zip(rows, prompts, strict=True)] == prompts
    w = as_float64(params)
    half = L + 1 - L // 2
    for row, begin, n in [(0, 0, 3), (0, 0, 9), (1, 0, 4), (2, 0, L), (2, half, L + 3)]:
        window = np.array(rows[row][begin:n])
        assert rows[row][n] == plain_logits(w, window, cfg)[-1].argmax()


@pytest.mark.parametrize("cfg, mesh", [
    pytest.param(MOE_ALLTOALL, (2, 2, 2), id="mla+moe"),
    pytest.param(GPT2, (2, 2, 2), id="gpt2"),
    pytest.param(ALL_EXPERTS, (1, 2, 2), id="mla", marks=SLOW),  # weights by columns, as in mixed-1
    pytest.param(MIXED, (2, 2, 2), id="mixed", marks=SLOW),
    pytest.param(MIXED, (1, 1, 1), id="mixed-1", marks=SLOW),
    pytest.param(golden("gemma3_text"), (2, 2, 2), id="gemma3", marks=SLOW),
    pytest.param(OSS_ALLTOALL, (2, 2, 2), id="gpt_oss", marks=SLOW),
    pytest.param(replace(GPT2, mesh=config.Mesh(fsdp="step")), (2, 2, 2), id="step", marks=SLOW),
    pytest.param(replace(GPT2, mesh=config.Mesh(fsdp="none")), (2, 2, 2), id="none", marks=SLOW),
])  # fmt: skip
def test_cached_logits_are_those_of_the_whole_row(cfg, mesh):
    check_cached_logits(cfg, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [PLAIN, ALL_EXPERTS], ids=["plain", "mla+moe"])
def test_cached_logits_are_those_of_the_whole_row_in_bfloat16(cfg):
    """In the mean: both are 0.01 from float32, and the worst of a thousand tokens 0.1."""
    cfg = replace(cfg, train=replace(cfg.train, dtype="bfloat16"))
    assert 1e-4 < cached_errors(cfg, (1, 1, 1)).mean() < 0.03


def temporary_bytes(cfg, n_rows: int, is_prompt: bool) -> tuple[int, list, list]:
    """(memory of the compiled program besides what it is given and returns, weights, cache)."""
    cfg = utils.start_mesh(replace(cfg, mesh=config.Mesh(1, 1, 1)), rows=n_rows)
    S, weights = cfg.train.seq_len, generate.decoding_weights(params_of(cfg), cfg)
    rows = generate.place_rows([[1] * 9] * n_rows, S, cfg)
    prompt = partial(generate.next_logits, n_new=S, cfg=cfg)
    _, cache = jax.eval_shape(prompt, weights, None, *rows)
    given = (None, *rows, S) if is_prompt else (cache, *rows, 1)
    program = generate.next_logits.lower(weights, *given, cfg).compile()
    return program.memory_analysis().temp_size_in_bytes, weights, cache


MLA = dict(d_ff=2**15, attention="mla", kv_rank=64, d_rope=16, d_value=64)


def long_rows(dtype: str, **sizes):
    model = replace(PLAIN.model, n_layers=2, n_heads=2, n_kv_heads=2, d_head=64, **sizes)
    return replace(PLAIN, model=model, train=replace(PLAIN.train, seq_len=2048, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_rows, sizes", [
    pytest.param(1, dict(d_ff=2**15), id="1-gqa"),
    pytest.param(2, dict(d_ff=2**15), id="2-gqa"),
    pytest.param(2, MLA, id="2-mla"),
    pytest.param(2, dict(pattern="moe", n_experts=64, n_active=2, d_expert=512), id="2-moe"),
])  # fmt: skip
def test_decoding_copies_no_cache_and_no_weights(n_rows, sizes, dtype):
    cfg = long_rows(dtype, **sizes)
    used, weights, cache = temporary_bytes(cfg, n_rows, is_prompt=False)
    large = [x.nbytes for x in jax.tree.leaves(weights["layers"]) if x.size >= 2**20]
    assert large and used < min(large)
    assert used < min(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def test_unpacking_leaves_the_packed_weights_as_they_are():
    """JAX may trace the function that unpacks them more than once."""
    cfg = utils.start_mesh(replace(ALL_EXPERTS, mesh=config.Mesh(fsdp="none")), rows=1)
    packed = generate.pack_layer(dict(k_IHK=np.zeros((3, 2, 4))), "moe", cfg)
    for _ in range(2):
        assert generate.unpack_layer(packed, "moe", cfg)["k_IHK"].shape == (3, 2, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_rows", [1, 2])
def test_a_prompt_has_no_scores_in_memory(n_rows, dtype):
    cfg = long_rows(dtype)
    used, _, _ = temporary_bytes(cfg, n_rows, is_prompt=True)
    assert used < 4 * n_rows * cfg.model.n_heads * cfg.train.seq_len**2


# ---- drawing


def test_sampling_options():
    logit_V = np.log(np.array([0.5, 0.3, 0.15, 0.05]))

    def draw(**options):
        """How often each of the four is chosen."""
        options = dict(temperature=1, top_k=0, top_p=1.0) | options
        chosen = [
            generate.choose_token(logit_V, np.random.default_rng(n), **options) for n in range(2000)
        ]
        return np.bincount(chosen, minlength=4) / 2000

    np.testing.assert_allclose(draw(), [0.5, 0.3, 0.15, 0.05], atol=0.04)
    np.testing.assert_allclose(draw(top_k=2), [0.625, 0.375, 0, 0], atol=0.04)
    np.testing.assert_allclose(draw(top_p=0.79), [0.625, 0.375, 0, 0], atol=0.04)
    assert draw(temperature=0)[0] == 1 and draw(top_p=0.5)[0] == 1
    assert draw(temperature=0.5)[0] > 0.6 and draw(temperature=2.0)[3] > 0.08


def test_ids_that_only_pad_the_vocabulary_are_never_drawn():
    cfg = utils.start_mesh(PLAIN, rows=2)
    options = dict(vocab_size=40, temperature=5.0)
    *_, rows = generate.generate(params_of(cfg), [[5], [6]], 12, cfg, **options)
    assert max(max(row) for row in rows) < 40
    *_, alone = generate.generate(params_of(cfg), [[5]], 12, cfg, **options)
    assert alone[0] == rows[0]
    assert rows[1][1:] != rows[0][1:]  # each row has random numbers of its own


def test_a_row_stops_at_the_end_of_its_document():
    cfg = utils.start_mesh(PLAIN, rows=1)
    params = params_of(cfg)
    greedy = dict(vocab_size=512, temperature=0)
    *_, rows = generate.generate(params, [[5]], 6, cfg, **greedy)
    *_, stopped = generate.generate(params, [[5]], 6, cfg, **greedy, stop_id=rows[0][3])
    assert stopped[0] == rows[0][: rows[0].index(rows[0][3])]
