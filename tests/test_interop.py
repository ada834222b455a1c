"""Trifold computes the same numbers as Hugging Face transformers from the same weights.

goldens/ holds models and what transformers computed with them (make_goldens.py).  The tests marked
`live` compare with an installed transformers: `make test-interop`.

Dimension key: B  sequences   L  sequence length   S  sequence length of the keys   D  d_model
  V  vocabulary   M  pipeline microbatches   R  rows of tokens
"""

import json
import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import relative_errors
from conftest import ROOT, needs
from jax import lax
from jax.sharding import PartitionSpec as P

import checkpoint
import cli
import config
import files
import generate
import layers
import model
import runstate
import train
import utils
from scripts import convert_hf, hf_config, hf_families
from tasks import put_batch

GOLDENS = ROOT / "tests" / "goldens"
FAMILIES = sorted(p.name for p in GOLDENS.iterdir())
SLOW = ("deepseek_v3_noq", "llama_linear", "llama_yarn", "qwen3")  # variants of others


def with_marks(family: str, *more):
    marks = pytest.mark.slow if family in SLOW else ()
    return pytest.param(family, *more, marks=marks)


live = needs("torch", "transformers")
DTYPES = dict(F64=np.float64, F32=np.float32, BF16=jnp.bfloat16, I32=np.int32)


def tensors(path: Path) -> dict:
    """{name: array} of a safetensors file, read independently of convert_hf.py: 8 bytes with the
    header's length, the header in JSON, the numbers."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)

    def array(dtype, shape, data_offsets):
        first, end = data_offsets
        return np.frombuffer(raw[start + first : start + end], DTYPES[dtype]).reshape(shape)

    return {name: array(**entry) for name, entry in header.items()}


@cache
def golden(family: str) -> dict:
    return tensors(GOLDENS / family / "golden.safetensors")


@pytest.fixture(scope="module", params=map(with_marks, FAMILIES))
def family(request) -> str:
    """A folder of goldens/.  pytest runs all tests of one before those of the next."""
    return request.param


@pytest.fixture(scope="module")
def imported(family, tmp_path_factory) -> Path:
    """The run directory that the family's golden is imported to."""
    run = tmp_path_factory.mktemp(family) / "run"
    convert_hf.import_hf(GOLDENS / family, run)
    return run


@pytest.fixture(scope="module")
def record(request):
    """record(what, family, got, want, at_most) asserts that the arrays differ by at most that, and
    a table of the largest differences is printed at the end (with pytest -n 0)."""
    seen, capture = {}, request.config.pluginmanager.get_plugin("capturemanager")

    def compare(what, family, got, want, at_most):
        assert np.shape(got) == np.shape(want)
        error = float(np.abs(np.asarray(got, np.float64) - want).max())
        row = seen.setdefault(family, {})
        row[what] = max(error, row.get(what, 0))
        assert error <= at_most, f"{what} of {family} differ by {error:.1e}"

    yield compare
    names = [what for row in seen.values() for what in row]
    columns = sorted(set(names), key=names.index)
    with capture.global_and_fixture_disabled():
        print(f"\n{'largest difference':<18}", *columns, sep="  ")
        for family, row in seen.items():
            cells = [f"{row[c]:.1e}" if c in row else "" for c in columns]
            cells = [cell.rjust(len(c)) for cell, c in zip(cells, columns, strict=True)]
            print(f"{family:<18}", *cells, sep="  ")


def load(run, mesh=(1, 2, 2)):
    """(cfg, params) of a run on that mesh, which becomes the ambient one."""
    flags = ["--train.seq_len", "48", "--train.dtype", "float32"]
    cfg = utils.start_mesh(cli.config_of_run(str(run), config.Mesh(*mesh), *flags), rows=2)
    return cfg, runstate.load_params(files.absolute_path(str(run)), cfg)


@partial(jax.jit, static_argnames="cfg")
def score(params, token_MBL, target_MBL, cfg):
    """(logit_MBLV, nll_MBL): the logits, and the targets' negative log likelihood in nats."""
    spec = P("pp", "dp", None)

    @jax.shard_map(in_specs=(model.param_specs(cfg), spec, spec), out_specs=(P(*spec, "tp"), spec))
    def per_device(params, token_MBL, target_MBL):
        w = model.prepare_weights(params, cfg, cfg.train.dtype)
        x_MBLD = model.hidden_states(w, token_MBL, cfg)

        def score_rows(rows):
            x_BLD, target_BL = rows
            x_BLD = lax.all_gather(layers.norm(x_BLD, w, "norm", cfg), "tp", axis=1, tiled=True)
            return model.logits(x_BLD, w, cfg), model.cross_entropy(x_BLD, target_BL, w, cfg)[0]

        return lax.map(score_rows, (x_MBLD, target_MBL))

    return per_device(params, token_MBL, target_MBL)


def scores(params, token_RL, cfg):
    """(logit_RLV, nll_RL): the logits of rows of tokens, without the vocabulary's padding, and the
    negative log likelihood of each next token."""
    target_RL = np.pad(token_RL[:, 1:], ((0, 0), (0, 1)))
    shape = cfg.mesh.pp, -1, token_RL.shape[1]
    logit_MBLV, nll_MBL = score(params, token_RL.reshape(shape), target_RL.reshape(shape), cfg)
    logit_RLV = np.asarray(logit_MBLV).reshape(*token_RL.shape, -1)[..., : cfg.model.vocab_size]
    return logit_RLV, np.asarray(nll_MBL).reshape(token_RL.shape)[:, :-1]


# ---- goldens


MESHES = [with_marks(family, (1, 2, 2)) for family in FAMILIES]
MESHES += [("llama", (1, 1, 1)), ("qwen3_moe", (2, 1, 2))]


@pytest.mark.parametrize("family,mesh", MESHES, indirect=["family"], ids=str)
def test_logits_and_loss_are_those_of_transformers(family, mesh, imported, record):
    cfg, params = load(imported, mesh)
    want = golden(family)
    logit, nll = scores(params, want["tokens"], cfg)
    assert logit.std() > 1  # with smaller logits, small differences would mean little
    record("logits", family, logit[:, -want["logits"].shape[1] :], want["logits"], 1e-4)
    record("nll", family, nll, want["nll"], 1e-4)
    record("loss", family, nll.mean(), want["loss"], 1e-5)


def test_decoding_has_the_logits_of_transformers(family, imported, record):
    """40 tokens at once, and then one at a time."""
    cfg, params = load(imported)
    want, start = golden(family), 40
    (n_rows, L), (_, pp, tp) = want["tokens"].shape, cfg.mesh.sizes
    token_MBS = np.resize(want["tokens"], (pp, tp, L))  # each row in each microbatch
    weights, cache, got = generate.decoding_weights(params, cfg), None, []
    for length in range(start, start + 5):
        length_MB = np.full(token_MBS.shape[:2], length, np.int32)
        n_new = length if cache is None else 1
        logit_MBV, cache = generate.next_logits(weights, cache, token_MBS, length_MB, n_new, cfg)
        got.append(np.asarray(logit_MBV)[..., : cfg.model.vocab_size].reshape(pp, n_rows, 1, -1))
    first = start - 1 - (L - want["logits"].shape[1])
    wanted = want["logits"][:, first : first + len(got)]
    for logit in np.concatenate(got, 2):
        record("decoding", family, logit, wanted, 1e-4)


def exported_tensors(folder: Path) -> dict:
    """{name: array} of all safetensors files of a folder, whose index must agree."""
    arrays = {p.name: tensors(p) for p in folder.glob("model*.safetensors")}
    if len(arrays) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, xs in arrays.items() for name in xs}
    return {name: x for xs in arrays.values() for name, x in xs.items()}


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_an_imported_model_is_exported_bit_for_bit(family, imported, tmp_path):
    """In several files."""
    convert_hf.export_hf(imported, tmp_path / "hf", dtype="bfloat16", shard_size=10_000)
    got, want = exported_tensors(tmp_path / "hf"), exported_tensors(GOLDENS / family)
    assert len([*(tmp_path / "hf").glob("model-*.safetensors")]) > 1
    assert {name: x.shape for name, x in got.items()} == {n: x.shape for n, x in want.items()}
    for name in want:
        np.testing.assert_array_equal(got[name].astype(np.float32), want[name].astype(np.float32))
    models = [hf_config.read_model(read_config(f)) for f in (tmp_path / "hf", GOLDENS / family)]
    assert models[0] == models[1]
    assert cli.config_of_run(str(imported), config.Mesh()).train.dtype == "bfloat16"


def test_a_config_from_before_transformers_5_is_the_same_model(family):
    """Most published models have the older keys rope_theta, rope_scaling and torch_dtype."""
    new = read_config(GOLDENS / family)
    old = {name: x for name, x in new.items() if name not in ("rope_parameters", "dtype")}
    rope = dict(new.get("rope_parameters", {}))
    if "full_attention" in rope:
        old |= dict(rope_local_base_freq=rope["sliding_attention"]["rope_theta"])
        rope = dict(rope["full_attention"])
    if rope:
        old |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
        if rope["rope_type"] == "default":
            old |= dict(rope_scaling=None)
        elif "deepseek" in family:
            rope |= dict(type=rope.pop("rope_type"))
    old |= dict(torch_dtype="bfloat16")
    assert hf_config.read_model(old) == hf_config.read_model(new)


# ---- transformers itself


def load_network(folder: Path, dtype: str):
    """What AutoModelForCausalLM makes of the weights in folder.  It must know and use them all."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    options = dict(attn_implementation="eager", experts_implementation="eager", dtype=dtype)
    network, info = AutoModelForCausalLM.from_pretrained(
        folder, **options, output_loading_info=True
    )
    assert not any(info.values()), info
    return network.eval()


def transformers_logits(folder: Path, tokens):
    import torch

    with torch.no_grad():
        network = load_network(folder, "float32")
        return network(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def transformers_gradient(folder: Path, tokens, scratch: Path) -> dict:
    """{tensor: gradient of the mean loss}, in float64, named as in a file."""
    import torch

    network = load_network(folder, "float64")
    # Without this, the embedding of pad_token_id would get no gradient.
    network.get_input_embeddings().padding_idx = None
    tokens = torch.tensor(tokens, dtype=torch.long)
    network(tokens, labels=tokens).loss.backward()
    for x in network.parameters():
        x.data = x.grad
    network.save_pretrained(scratch)
    return exported_tensors(scratch)


@live
def test_goldens_are_what_transformers_computes_today(family, tmp_path, record):
    """make_goldens.py still writes the same files."""
    import make_goldens

    make_goldens.make(family, tmp_path)
    made = tensors(tmp_path / "golden.safetensors")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (GOLDENS / family / name).read_bytes()
    np.testing.assert_array_equal(made["tokens"], golden(family)["tokens"])
    for name in ("logits", "nll", "loss"):
        record(f"new {name}", family, made[name], golden(family)[name], 1e-5)


@live
def test_transformers_computes_the_same_from_an_export(family, imported, tmp_path, record):
    cfg, params = load(imported)
    convert_hf.export_hf(imported, tmp_path)
    tokens = golden(family)["tokens"]
    want = transformers_logits(tmp_path, tokens)
    record("exported", family, scores(params, tokens, cfg)[0], want, 1e-4)


@live
def test_transformers_has_the_same_gradient(family, imported, tmp_path, record):
    cfg, params = load(imported, (1, 1, 1))
    tokens = golden(family)["tokens"]
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    f = jax.jit(train.loss_and_grads, static_argnames="cfg")
    _, grads, _ = f(params, *put_batch(tokens, targets, cfg), jax.random.key(0), cfg)
    grads = utils.leaf_table(jax.device_get(grads))
    tensors = hf_families.tensor_maps(read_config(GOLDENS / family)["model_type"], cfg)
    got = {x.name: x.from_weights([grads[p.weight][p.entry] for p in x.parts]) for x in tensors}
    want = transformers_gradient(GOLDENS / family, tokens, tmp_path)
    want |= {name: 0 * got[name] for name in want if name.endswith("correction_bias")}
    errors = relative_errors(got, want)
    record("gradient", family, max(errors.values()), 0, 1e-4)


@live
@pytest.mark.parametrize("name", ["mistral", "qwen2", "olmo2", "gemma2", "gemma3_text", "gpt_oss"])
def test_a_familys_usual_model_has_the_tensors_that_transformers_gives_it(name):
    """Of the published size, without any numbers: what transformers builds where config.json says
    nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.for_model(name)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(hf)
    want = {name: tuple(x.shape) for name, x in network.named_parameters()}
    cfg = config.Config(model=hf_config.read_model(json.loads(hf.to_json_string())))
    tensors = hf_families.tensor_maps(name, cfg)
    assert {tensor.name: tensor.shape for tensor in tensors} == want
    assert model.param_count(cfg) == sum(x.numel() for x in network.parameters())


@live
@pytest.mark.parametrize("name", hf_families.FAMILIES)
def test_a_key_that_config_json_lacks_has_the_value_of_transformers(name):
    from transformers import AutoConfig

    windows = dict(use_sliding_window=True) if name.startswith("qwen") else {}
    filled = json.loads(AutoConfig.for_model(name, **windows).to_json_string())
    optional = [(key, field) for key, field, *default in hf_families.FAMILIES[name].keys if default]
    for key, field in optional:
        lacking = {other: x for other, x in filled.items() if other != key}
        if field not in ("n_kv_heads", "d_head", "q_rank"):  # a wrong one fits no tensor
            assert hf_config.read_model(lacking) == hf_config.read_model(filled), key


def add_noise(params):
    """params with gains that are not one and biases that are not zero."""

    def add(path, x):
        name = jax.tree_util.keystr(path)
        if not re.search("norm|bias|sink", name):
            return x
        noise = np.random.default_rng(len(name) + x.size).normal(size=x.shape)
        return x + 0.3 * noise.astype(np.float32)

    return jax.tree_util.tree_map_with_path(add, params)


@live
def test_transformers_computes_the_same_from_our_own_model(family, imported, tmp_path, record):
    """Initialized and saved by Trifold, and exported in several files."""
    run = tmp_path / "run"
    cfg, _ = load(imported)
    run.mkdir()
    (run / "config.json").write_text((imported / "config.json").read_text())
    state = runstate.init_state(cfg)
    state = state._replace(params=add_noise(state.params))
    store = checkpoint.Checkpoints(files.absolute_path(str(run)), keep=1)
    store.save(0, runstate.checkpoint_items(state))
    store.close()
    convert_hf.export_hf(run, tmp_path / "hf", shard_size=20_000)
    cfg, params = load(run)
    tokens = golden(family)["tokens"]
    want = transformers_logits(tmp_path / "hf", tokens)
    record("our own", family, scores(params, tokens, cfg)[0], want, 1e-4)
