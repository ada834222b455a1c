"""Initial values: one loop draws the numbers that each initializer would, on any mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GPT2, MIXED, MOE_ALLTOALL
from conftest import ROOT, on_mesh
from jax import lax
from jax.extend.random import threefry_2x32

import config
import errors
import model
import runstate
import utils
import weights


@pytest.mark.parametrize("cfg, mesh", [
    (GPT2, (1, 1, 1)), (MOE_ALLTOALL, (2, 2, 2)), (MIXED, (4, 1, 2)),
], ids=["gpt2", "mla+moe", "mixed"])  # fmt: skip
def test_drawn_weights_are_those_of_their_initializers(cfg, mesh, monkeypatch):
    """Bit for bit, also where a chunk is smaller than a layer and where it is larger."""
    cfg = on_mesh(cfg, mesh)
    table, specs = model.param_table(cfg), utils.shardings(model.param_specs(cfg))

    def draw(chunk):
        monkeypatch.setattr(weights, "CHUNK", chunk)
        return jax.jit(lambda: weights.init_weights(table, cfg.run.seed), out_shardings=specs)()

    found = {chunk: jax.device_get(draw(chunk)) for chunk in (100, 2**16)}
    monkeypatch.setattr(weights, "Normal", type(None))  # so that all run their initializers
    want = jax.device_get(draw(0))
    for got in found.values():
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_random_numbers_are_not_of_the_default_generator():
    """It may be set to rbg, whose numbers in a vmap depend on the mesh."""
    with jax.default_prng_impl("rbg"):
        assert jax.random.key_impl(weights.random_key(1)) == "threefry2x32"
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    assert re.findall(r"random\.(?:PRNGK|k)ey\([^)]*\)", code) == [
        'random.key(seed, impl="threefry2x32")'
    ]


@pytest.mark.parametrize("preset, mesh", [("llama3_70b", (2, 2, 2)), ("gpt2_1.5b", (8, 1, 1))])
def test_no_device_needs_more_than_its_part_and_the_weights_once_more(preset, mesh):
    """While the initial state is made: less than an update needs, whose gradients are as large."""
    cfg = on_mesh(config.PRESETS[preset](), mesh)
    shapes, specs = runstate.state_shapes(cfg), utils.shardings(runstate.state_specs(cfg))

    def parts(shapes, shardings) -> list[int]:
        sizes = jax.tree.map(lambda x, s: 4 * np.prod(s.shard_shape(x.shape)), shapes, shardings)
        return jax.tree.leaves(sizes)

    program = (
        jax.jit(runstate.new_state, static_argnums=0, out_shardings=specs).lower(cfg).compile()
    )
    found = program.memory_analysis()
    assert found.output_size_in_bytes == pytest.approx(sum(parts(shapes, specs)), rel=0.001)
    weights = parts(shapes.params, specs.params)
    copied = max(weights) if jax.__version_info__ >= (0, 11) else 0  # that XLA copies one of them
    assert found.temp_size_in_bytes < 1.05 * (sum(weights) + copied)


def test_a_weight_that_no_device_could_hold_is_refused():
    cfg = on_mesh(config.PRESETS["deepseek_v3"]())
    with pytest.raises(errors.UserError, match="7,516,192,768 numbers.*\n.*more devices") as e:
        jax.eval_shape(lambda: runstate.new_state(cfg))
    assert e.value.code == errors.USAGE


@pytest.mark.parametrize("middle", [7 * 2**32, 3132 * 9_600_000 + 100])
def test_numbers_of_a_large_weight_have_places_of_64_bits(middle):
    """Where the lower word begins again from 0: in the sum, and in the product."""
    whole, n = (60_000, 100, 32, 3000), 200
    start = np.unravel_index(middle - n // 2, whole)
    dims = [jnp.array(x, jnp.uint32) for x in ((1, 1, 1, n), start, whole)]
    key = jax.random.key_data(jax.random.key(3))
    got = weights.draw_chunk(key, jnp.uint32(0), *dims, 1.0, n)
    words = np.array([divmod(middle + i, 2**32) for i in range(-n // 2, n // 2)], np.uint32).T
    bits, more_bits = np.asarray(threefry_2x32(tuple(key), jnp.asarray(words)))
    fraction = ((bits ^ more_bits) >> 9 | 0x3F800000).view(np.float32) - 1
    np.testing.assert_allclose(got, np.sqrt(2) * lax.erf_inv(2 * fraction - 1), rtol=1e-4)
