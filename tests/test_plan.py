"""The plan: what is counted in the step is what the formulas say, and what overflows is named."""

import importlib.util
import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, run

import checks
import config
import profiling
import utils
from config import USAGE

sys.path.insert(0, str(ROOT / "scripts"))

import plan

CHIP = plan.CHIPS["v5e"]
TINY = replace(config.tiny(), train=replace(config.tiny().train, dtype="bfloat16"))


@pytest.fixture(autouse=True)
def no_mesh():
    """As in the script: an ambient mesh of devices would refuse another's sizes."""
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        yield


def configured(mesh, cfg=TINY, **train) -> config.Config:
    """cfg on a mesh of such sizes, or with such fields of it."""
    mesh = mesh if isinstance(mesh, dict) else dict(zip(("dp", "pp", "tp"), mesh, strict=True))
    cfg = replace(cfg, mesh=replace(cfg.mesh, **mesh), train=replace(cfg.train, **train))
    return checks.resolve(cfg, cfg.mesh.dp * cfg.mesh.pp * cfg.mesh.tp)


def by_formula(cfg) -> tuple[dict, dict]:
    """{(collective, axis): calls} and {..: bytes received} of a dense model under FSDP and
    Megatron's sequence parallelism, the small sums over pp and tp left out."""
    m, t, (dp, pp, tp) = cfg.model, cfg.train, cfg.mesh.sizes
    D, F, H, G, K, V = m.d_model, m.d_ff, m.n_heads, m.n_kv_heads, m.d_head, m.vocab_rows
    M = t.microbatches * t.grad_accum
    n = M * m.n_layers // pp  # layers run
    x = 2 * t.batch_size // dp // M * t.seq_len * D  # bytes of one microbatch's residual stream
    weights, ends = 2 * (2 * D * (H + G) * K + 3 * D * F) // tp, 2 * 2 * D * V // tp
    stage, gains = weights * m.n_layers // pp, 4 * 2 * D * m.n_layers // pp
    again = t.remat != "none"
    ticks = plan.schedule(cfg).ticks * M // plan.schedule(cfg).microbatches
    tokens = 4 * t.batch_size * t.seq_len // dp
    # Gathers in bfloat16; sums of what is gathered once are of float32, as is the ends' always.
    gathers, scatters, sums = {
        "layer": ((12 * n + 2, 2 * n * weights + ends), (6 * n + 2, n * weights + 2 * ends), 0),
        "step": ((8, stage + ends), (8, 2 * (stage + ends)), 0),
        "none": ((0, 0), (0, 0), 8),
    }[cfg.mesh.fsdp]
    # An interleaved schedule deals its pieces of 6 matrices and 2 gains to their stages, and
    # collects the gradients in float32; of two stages with two pieces each keeps one.
    parts = cfg.mesh.virtual_stages
    sent = 0 if parts == 1 else parts - (pp == parts == 2)
    at_rest = stage // dp if cfg.mesh.fsdp == "layer" else stage
    pieces, dealt = 16 * sent, (3 * at_rest + 2 * gains) * sent // parts
    found = {
        ("all_gather", "dp"): gathers,
        ("reduce_scatter", "dp"): scatters,
        # 3 gains, the loss and its tokens; without FSDP all weights too.  A sum is two rings.
        ("psum_invariant", "dp"): (
            5 + sums,
            2 * (gains + 4 * D + 8 + bool(sums) * 2 * (stage + ends)),
        ),
        # Two a layer, two for their gradients, two more for the weights'; then both ends.
        ("all_gather", "tp"): (
            (4 + 2 * again) * n + 2 * M,
            (4 + 2 * again) * n * x + M * x * (1 + 1 / pp),
        ),
        ("reduce_scatter", "tp"): (
            (4 + again) * n + 2 * M,
            (4 + again) * n * x + M * x * (1 + 1 / pp),
        ),
        ("ppermute", "pp"): (2 * ticks + pieces, 2 * ticks * x // tp + dealt),
        ("all_gather", "pp"): (2 + M, 2 * tokens + M * x // tp),
        ("reduce_scatter", "pp"): (M, M * x // tp),
    }
    sizes = dict(dp=dp, pp=pp, tp=tp)
    found = {k: x for k, x in found.items() if sizes[k[1]] > 1 and x[0]}
    ring = {k: 1 if k[0] == "ppermute" else 1 - 1 / sizes[k[1]] for k in found}
    return {k: n for k, (n, _) in found.items()}, {k: x * ring[k] for k, (_, x) in found.items()}


# One of each axis alone, and mixtures; slices, policies, schedules and FSDP change with them.
CASES = [
    (dict(), dict(grad_accum=2)),
    (dict(dp=8), dict(grad_accum=2)),
    (dict(pp=8), dict(remat="none")),
    (dict(tp=8), dict()),
    (dict(dp=2, pp=2, tp=2), dict(remat="dots", grad_accum=2)),
    (dict(dp=2, pp=4), dict(microbatches=8)),
    (dict(dp=2, pp=2, tp=2, fsdp="step", schedule="1f1b"), dict(grad_accum=2)),
    (dict(dp=4, tp=2, fsdp="none"), dict(grad_accum=2)),
    (dict(dp=2, pp=2, tp=2, schedule="interleaved", virtual_stages=2), dict(grad_accum=2)),
    (dict(dp=2, pp=4, schedule="interleaved", virtual_stages=2, fsdp="step"), dict()),
]


@pytest.mark.parametrize("mesh, train", CASES, ids=str)
def test_collectives_and_flops_of_the_step_are_those_of_the_formulas(mesh, train):
    cfg = configured(dict(dp=1, pp=1, tp=1) | mesh, **train)
    m, t, (dp, pp, tp) = cfg.model, cfg.train, cfg.mesh.sizes
    tally = plan.count(plan.trace(cfg, CHIP), cfg, CHIP)
    calls, moved = by_formula(cfg)
    sums = ("psum_invariant", "pp"), ("psum_invariant", "tp"), ("pmax", "tp")
    small = [k for k in tally.calls if k in sums]
    assert dict(tally.calls) == calls | {k: tally.calls[k] for k in small}
    assert dict(tally.moved) == pytest.approx(moved | {k: tally.moved[k] for k in small}, rel=1e-12)

    D, F, H, G, K = m.d_model, m.d_ff, m.n_heads, m.n_kv_heads, m.d_head
    matmuls, attention = 2 * D * (H + G) * K + 3 * D * F, 2 * t.seq_len * H * K
    layer = 3 * (matmuls + attention)
    layer += {"none": 0, "dots": attention, "layer": matmuls + attention - D * F}[t.remat]
    flops = 2 * (m.n_layers * layer + 3 * D * m.vocab_rows)
    assert tally.flops == pytest.approx(flops * t.batch_size * t.seq_len / (dp * pp * tp))


ITEM = dict(f32=4, bf16=2, s32=4, pred=1)
NAMES = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "collective-permute": "ppermute",
}


def by_program(line: str, sizes) -> Counter:
    """Calls and bytes received of a compiled program's line, as the formulas name them."""
    found, op = Counter(), "|".join(NAMES)
    if match := re.search(rf" = (.*?) ({op})(?:-start)?\(", line):
        (axis,) = profiling.joined_axes(line, sizes) or [""]
        n = dict(zip(utils.AXES, sizes, strict=True)).get(axis, 1)
        dtype, shape = re.match(r"(\w+)\[([\d,]*)\]", match[1]).groups()
        part = ITEM[dtype] * math.prod(int(x) for x in shape.split(",") if x)
        whole = part * n if match[2] == "reduce-scatter" else part
        received = part if match[2] == "collective-permute" else whole * (n - 1) / n
        found.update({(NAMES[match[2]], axis, "calls"): 1, (NAMES[match[2]], axis): received})
    return found


@pytest.mark.parametrize("mesh, train", [CASES[i] for i in (4, 6, 9)], ids=str)
def test_xla_compiles_just_the_collectives_that_are_counted(mesh, train):
    """In float32: on a CPU XLA has no others."""
    cfg = configured(dict(dp=1, pp=1, tp=1) | mesh, TINY, dtype="float32", **train)
    tally = plan.count(plan.trace(cfg, CHIP), cfg, CHIP)
    want = {(*k, "calls"): n for k, n in tally.calls.items() if k[0] in NAMES.values()}
    want |= {k: n for k, n in tally.moved.items() if k[0] in NAMES.values()}
    cfg = utils.start_mesh(cfg)
    args = plan.train.with_shardings(plan.train.step_shapes(cfg), plan.train.step_specs(cfg))
    text = utils.compile_program(plan.train.train_step, *args, cfg).as_text()
    got = plan.hlo_total(text, cfg, partial(by_program, sizes=cfg.mesh.sizes))
    assert {k: n for k, n in got.items() if k[1]} == pytest.approx(want, rel=1e-12)


EXPERTS = dict(pattern="moe", n_experts=8, n_active=2, n_shared=1, d_expert=64)
MOE = replace(TINY, model=replace(TINY.model, vocab_size=512, **EXPERTS))


@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
def test_tokens_go_to_their_experts_and_back_as_the_formula_says(capacity_factor):
    """In each layer there and back; again for what is recomputed, and for the gradients.  Without
    a capacity an id and a gate go with each pair, nothing comes back of what is recomputed, and
    there is room for all to go to one rank."""
    cfg = configured(
        dict(dp=4, pp=1, tp=2, experts="alltoall"), MOE, capacity_factor=capacity_factor
    )
    m, t, dp = cfg.model, cfg.train, cfg.mesh.dp
    n = t.microbatches * t.grad_accum * m.n_layers
    tokens = t.batch_size // dp // t.microbatches // t.grad_accum * t.seq_len
    if capacity_factor:
        times, rows, pairs = 6, tokens * m.n_active, 0
    else:
        times, rows = 5, dp * tokens * min(m.n_active, m.n_experts // dp)
        pairs = rows * (2 * 4 + 3 * 2)  # ids have no gradient, gates do
    tally = plan.count(plan.trace(cfg, CHIP), cfg, CHIP)
    there = 1 - 1 / dp
    assert tally.calls["all_to_all", "dp"] == (times + 5 * bool(pairs)) * n
    assert tally.moved["all_to_all", "dp"] == n * there * (times * rows * 2 * m.d_model + pairs)


def test_experts_count_what_a_token_meets():
    """As many FLOPs as model.flops_per_token says, and attention's masked half, what fills up the
    experts' tiles, and their hidden units once more."""
    cfg = configured((1, 1, 1), MOE, remat="none")
    m, t = cfg.model, cfg.train
    masked = 12 * m.n_layers * m.n_heads * m.d_head * (t.seq_len - 1) / 2
    pairs = t.batch_size // t.grad_accum // t.microbatches * t.seq_len * m.n_active
    rows = math.prod(plan.model.tiles(pairs, m.n_experts)) / pairs
    more = rows * (6 * 3 + 2 * 2) - 6 * 3
    more *= m.n_layers * m.n_active * m.d_model * m.d_expert
    want = plan.model.flops_per_token(cfg) + masked + more
    found = plan.count(plan.trace(cfg, CHIP), cfg, CHIP).flops / (t.batch_size * t.seq_len)
    assert found == pytest.approx(want, rel=1e-6)


def held(cfg) -> dict:
    return plan.memory(plan.trace(cfg, CHIP), cfg)


MATRIX = jax.ShapeDtypeStruct((32, 32), "float32")  # 4096 bytes


def bytes_of(f) -> dict:
    return plan.alive(jax.make_jaxpr(f)(MATRIX).jaxpr, set())


def test_an_array_lives_from_its_matmul_to_its_last_reader_and_is_then_written_over():
    def three(x):
        a, b = x @ x, jnp.exp(x @ x.T)
        return jnp.sin(a) @ b

    def one(x):
        return jax.lax.scan(lambda x, _: (x.at[0].set(1.0), None), x @ x, length=3)[0]

    assert bytes_of(three)["workspace"] == 3 * 4096
    assert bytes_of(lambda x: three(x) @ x)["workspace"] == 3 * 4096
    assert bytes_of(one).total() == 4096


def test_what_a_loop_stacks_for_its_gradient_is_an_activation():
    def f(x, n):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=n)[0].sum()

    few, many = (bytes_of(jax.grad(partial(f, n=n))) for n in (4, 10))
    assert many["activations"] - few["activations"] == 6 * 2 * 4096  # x and x @ x
    assert many["workspace"] == few["workspace"]


def test_memory_follows_the_config():
    tiny = {remat: held(configured((1, 2, 1), remat=remat)) for remat in ("none", "dots", "layer")}
    assert [tiny[k]["activations"] for k in tiny] == sorted(
        (x["activations"] for x in tiny.values()), reverse=True
    )
    n_params = plan.model.param_count(TINY)  # 512 tokens, so none fill up
    assert held(configured((8, 1, 1)))["moments"] == pytest.approx(8 * n_params / 8, rel=0.1)
    for dtype in ("float32", "bfloat16"):  # one sum, that grows in place
        whole = held(configured(dict(dp=1, pp=2, tp=1, fsdp="none"), dtype=dtype))
        assert whole["gradients"] == whole["moments"] / 2
    more = {}
    for schedule, microbatches in product(("gpipe", "1f1b"), (8, 32)):
        cfg = configured(dict(dp=1, pp=4, tp=1, schedule=schedule), microbatches=microbatches)
        more[schedule, microbatches] = held(cfg)["activations"] * microbatches  # of equal ones
    assert more["1f1b", 32] == pytest.approx(more["1f1b", 8], rel=0.05)
    assert more["gpipe", 32] > 3 * more["gpipe", 8]


# ---- the command


def answer(*args) -> tuple[int, str, str]:
    done = run("scripts/plan.py", "--config", "tiny", "--train.dtype", "bfloat16", *args)
    return done.returncode, done.stdout, done.stderr


def test_json_is_one_object_and_says_what_the_table_says():
    args = "--topology", "v5e:2x4", "--mesh.pp", 2, "--mesh.tp", 2
    code, text, _ = answer(*args, "--json")
    found = json.loads(text)
    assert code == 0 and found["fits"] and found["mesh"] == dict(dp=2, pp=2, tp=2)
    assert found["memory_total"] == sum(found["memory"].values())
    assert found["best"]["step_time"] <= found["worst"]["step_time"]
    code, table, _ = answer(*args)
    calls = found["collectives"]["tp all_gather"]["calls"]
    assert code == 0 and re.search(rf"^tp all_gather +{calls:,.0f} calls", table, re.M)


def test_a_plan_for_gpus_needs_none_to_take_their_kernel():
    code, _, error = answer("--topology", "h200:1", "--model.d_head", 8)
    assert code == 0 and "plain XLA" not in error, error


OUT = [
    (["--topology", "v5e:1", "--train.batch_size", 2**20], "workspace overflow"),
    (["--topology", "v5e:1", "--model.d_ff", 2**21], "moments overflow"),
    (["--topology", "v5:9"], "topology='v5:9'"),
    (["--topology", "v5e:8", "--mesh.dp", 2], "= 2*1*1 = 2, but v5e:8 has 8 devices"),
    (["--topology", "v5e:8", "--mesh.pp", 3], "mesh.pp=3 must divide model.n_layers=8"),
]


@pytest.mark.parametrize("args, why", OUT, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_is_two_lines_and_exit_2(args, why):
    code, _, error = answer(*args)
    problem, fix = error.splitlines()[-2:]
    assert code == USAGE and why in error and problem.startswith("error: "), error
    assert fix.startswith("  fix: ")


def test_search_ranks_what_is_legal_and_says_why_the_rest_is_out():
    cfg = replace(TINY, train=replace(TINY.train, batch_size=1, remat="layer"))
    found = plan.search(cfg, CHIP, 1)
    times = [x["worst"]["step_time"] for x in found["plans"]]
    assert times == sorted(times) and not found["out"]
    assert {x["remat"] for x in found["plans"]} >= {"none", "dots", "layer"}

    assert plan.search(cfg, CHIP._replace(memory=1000), 8)["out"]["weights overflow"]
    out, heads = plan.search(cfg, CHIP, 64)["out"], "model.n_heads=16 and train.seq_len=16 and"
    assert out[f"mesh.tp must divide {heads} model.n_kv_heads=8"] == 3
    assert out["mesh.tp must divide model.n_kv_heads=8"] == 3
    assert out["train.grad_accum*mesh.dp*mesh.pp must divide train.batch_size=1"] > 9


TPU = importlib.util.find_spec("libtpu")
tpu = pytest.mark.skipif(not TPU, reason="no libtpu to compile for a TPU: run make test-interop")


@pytest.mark.skipif(TPU, reason="libtpu is installed")
def test_without_libtpu_the_plan_says_how_to_get_it():
    code, _, error = answer("--topology", "v5e:1", "--compile")
    assert code == USAGE and "pip install 'jax[tpu]==" in error and error.count("\n") == 2


DENSE = dict(vocab_size=8192, d_model=1024, n_layers=8, n_heads=8, n_kv_heads=8, d_head=128)
DENSE |= dict(d_ff=4096)
EXPERTS = DENSE | dict(pattern="moe", n_experts=16, n_active=2, d_expert=1024)
COMPILED = {
    "experts": (EXPERTS, "v5p:2x2x1", dict(dp=4), dict()),
    "1f1b": (DENSE, "v5p:2x2x1", dict(dp=2, pp=2, schedule="1f1b", fsdp="step"), dict()),
    "kept": (DENSE, "v6e:2x2", dict(dp=4), dict(remat="dots", grad_accum=2)),
}


@tpu
@pytest.mark.parametrize("case", COMPILED)
def test_the_estimate_is_within_a_tenth_of_the_compilers(case):
    sizes, topology, mesh, train = COMPILED[case]
    train = dict(seq_len=1024, batch_size=32) | train
    sections = dict(model=sizes, mesh=mesh, train=train)
    args = [y for s, xs in sections.items() for k, x in xs.items() for y in (f"--{s}.{k}", x)]
    code, text, error = answer(*args, "--topology", topology, "--compile", "--json")
    assert code == 0, error
    found = json.loads(text)
    xla, kind = found["xla"], plan.CHIPS[topology[:3]].kind
    assert found["memory_total"] == pytest.approx(xla["memory"], rel=0.1)
    assert 0.5 < xla["fusion_seconds"] / found["seconds"]["matmuls"] < 10
    # The libtpu that is pinned knows all that is asked of it.
    wanted = {"TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite"}.get(kind)
    assert xla["options"] == utils.XLA_OPTIONS.get(wanted, {})
