"""Hugging Face directories become runs and are exported again bit for bit, in little memory; what
cannot be converted is refused.

Dimension key: V  vocabulary   D  d_model   H  query heads   G  key and value heads   K  head dim
  F  d_ff   E  experts   N  layers
"""

import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import ROOT, on_mesh, run
from etils import epath
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, processors

import attention
import checkpoint
import checks
import cli
import config
import digests
import errors
import experts
import files
import layers
import model
import runstate
import utils
import verify
from architecture import Model
from errors import UserError
from scripts import big_arrays, convert_hf, hf_config, hf_families

# ---- directories as transformers writes them

V, D, H, G, K, F, E = 100, 16, 4, 2, 8, 32, 4
COMMON = dict(
    vocab_size=V, hidden_size=D, num_attention_heads=H, intermediate_size=F, hidden_act="silu",
    rms_norm_eps=1e-6, max_position_embeddings=4096, torch_dtype="float32", use_cache=True,
)  # fmt: skip
GQA = COMMON | dict(num_hidden_layers=2, num_key_value_heads=G, head_dim=K)
YARN = dict(
    type="yarn", factor=4, original_max_position_embeddings=64, beta_fast=32, beta_slow=1,
    mscale=1.0, mscale_all_dim=0.8,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
CONFIGS = dict(
    gpt2=dict(
        vocab_size=V, n_embd=D, n_layer=2, n_head=H, n_positions=64, n_ctx=64,
        activation_function="gelu_new", layer_norm_epsilon=1e-5, attn_pdrop=0.1,
    ),
    llama=GQA | dict(
        attention_bias=True, mlp_bias=True, rope_theta=5e5, rope_scaling=LLAMA3,
        tie_word_embeddings=False, bos_token_id=1,
    ),
    mistral=GQA | dict(sliding_window=None, rope_theta=1e6, head_dim=None),
    qwen2=GQA | dict(
        head_dim=None, use_sliding_window=True, sliding_window=8, max_window_layers=1,
        rope_scaling=dict(type="linear", factor=2.0),
    ),
    olmo2=GQA | dict(head_dim=None, rope_theta=5e5, attention_bias=False, rms_norm_eps=1e-6),
    gemma2=GQA | dict(
        num_hidden_layers=4, hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=6, sliding_window=16, sliding_window_size=16,
        attn_logit_softcapping=50.0, final_logit_softcapping=None, cache_implementation="hybrid",
    ),
    gemma3_text=GQA | dict(
        num_hidden_layers=6, hidden_activation="gelu_pytorch_tanh", hidden_act=None,
        query_pre_attn_scalar=K, sliding_window=16, sliding_window_pattern=3, rope_theta=1e6,
        rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    gpt_oss=GQA | dict(
        num_local_experts=E, num_experts_per_tok=2, experts_per_token=2, intermediate_size=8,
        sliding_window=16, attention_bias=True, swiglu_limit=7.0, rope_theta=150000,
        layer_types=["sliding_attention", "full_attention"], initial_context_length=4096,
        rope_scaling=dict(
            rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096,
        ),
    ),
    qwen3=GQA | dict(
        num_hidden_layers=4, tie_word_embeddings=True, sliding_window=8, use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"] * 2, rope_scaling=None,
        rope_parameters=dict(rope_type="default", rope_theta=1e6), attention_bias=False,
    ),
    qwen3_moe=GQA | dict(
        num_hidden_layers=3, num_experts=E, num_experts_per_tok=2, moe_intermediate_size=8,
        norm_topk_prob=True, mlp_only_layers=[0], decoder_sparse_step=1, rope_theta=1e6,
        use_sliding_window=False, sliding_window=None, max_window_layers=3,
    ),
    mixtral=GQA | dict(
        num_local_experts=E, num_experts_per_tok=2, sliding_window=16, rope_theta=1e6,
        router_aux_loss_coef=0.02,
    ),
    deepseek_v3=COMMON | dict(
        num_hidden_layers=3, num_key_value_heads=H, q_lora_rank=12, kv_lora_rank=10,
        qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=4, attention_bias=True,
        first_k_dense_replace=1, moe_layer_freq=1, n_routed_experts=E, n_shared_experts=2,
        num_experts_per_tok=2, moe_intermediate_size=8, n_group=2, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid",
        topk_method="noaux_tc", num_nextn_predict_layers=1, rope_theta=1e4, rope_scaling=YARN,
    ),
)  # fmt: skip


def mlp(name: str, F: int, gate="gate_proj", up="up_proj", down="down_proj") -> dict:
    shapes = {gate: (F, D), up: (F, D), down: (D, F)}
    return {f"{name}.{which}.weight": shape for which, shape in shapes.items()}


def layer_shapes(family: str, n: int) -> dict:
    """{name: shape} of a layer's tensors, as in the files that the families' publishers made."""
    if family == "gpt2":
        return {
            "ln_1.weight": (D,), "ln_1.bias": (D,), "ln_2.weight": (D,), "ln_2.bias": (D,),
            "attn.c_attn.weight": (D, 3 * D), "attn.c_attn.bias": (3 * D,),
            "attn.c_proj.weight": (D, D), "attn.c_proj.bias": (D,),
            "mlp.c_fc.weight": (D, 4 * D), "mlp.c_fc.bias": (4 * D,),
            "mlp.c_proj.weight": (4 * D, D), "mlp.c_proj.bias": (D,),
        }  # fmt: skip
    norms = ["post_attention"] + ["input"] * (family != "olmo2")
    norms += ["post_feedforward"] * (family == "olmo2" or "gemma" in family)
    norms += ["pre_feedforward"] * ("gemma" in family)
    shapes = {f"{name}_layernorm.weight": (D,) for name in norms}
    a, K = "self_attn.", CONFIGS[family].get("head_dim") or D // H
    if family == "deepseek_v3":
        shapes |= {
            a + "q_a_proj.weight": (12, D), a + "q_a_proj.bias": (12,),
            a + "q_a_layernorm.weight": (12,), a + "q_b_proj.weight": (H * 14, 12),
            a + "kv_a_proj_with_mqa.weight": (18, D), a + "kv_a_proj_with_mqa.bias": (18,),
            a + "kv_a_layernorm.weight": (10,), a + "kv_b_proj.weight": (H * 10, 10),
            a + "o_proj.weight": (D, H * 4), a + "o_proj.bias": (D,),
        }  # fmt: skip
        if n == 0:
            return shapes | mlp("mlp", F)
        shapes |= {"mlp.gate.weight": (E, D), "mlp.gate.e_score_correction_bias": (E,)}
        shapes |= mlp("mlp.shared_experts", 16)
    else:
        shapes |= {a + "q_proj.weight": (H * K, D), a + "o_proj.weight": (D, H * K)}
        shapes |= {a + f"{x}_proj.weight": (G * K, D) for x in "kv"}
    if family in ("llama", "qwen2", "gpt_oss"):
        shapes |= {a + "q_proj.bias": (H * K,)} | {a + f"{x}_proj.bias": (G * K,) for x in "kv"}
    if family == "llama":
        shapes |= {a + "o_proj.bias": (D,)}
        biases = {"gate": F, "up": F, "down": D}
        shapes |= {f"mlp.{name}_proj.bias": (size,) for name, size in biases.items()}
    if family == "olmo2":
        shapes |= {a + "q_norm.weight": (H * K,), a + "k_norm.weight": (G * K,)}
    if family.startswith(("qwen3", "gemma3")):
        shapes |= {a + "q_norm.weight": (K,), a + "k_norm.weight": (K,)}
    if not any("expert" in key for key in CONFIGS[family]) or (family == "qwen3_moe" and n == 0):
        return shapes | mlp("mlp", F)
    if family == "gpt_oss":
        m, moe = "mlp.router.", "mlp.experts."
        return shapes | {
            a + "o_proj.bias": (D,), a + "sinks": (H,), m + "weight": (E, D), m + "bias": (E,),
            moe + "gate_up_proj": (E, D, 16), moe + "gate_up_proj_bias": (E, 16),
            moe + "down_proj": (E, 8, D), moe + "down_proj_bias": (E, D),
        }  # fmt: skip
    if family == "mixtral":
        shapes |= {"block_sparse_moe.gate.weight": (E, D)}
        for e in range(E):
            shapes |= mlp(f"block_sparse_moe.experts.{e}", F, "w1", "w3", "w2")
        return shapes
    shapes |= {"mlp.gate.weight": (E, D)}
    for e in range(E):
        shapes |= mlp(f"mlp.experts.{e}", 8)
    return shapes


def hf_tensors(family: str) -> dict:
    """{name: random array} of a whole model, named as in the published files."""
    hf = CONFIGS[family]
    if family == "gpt2":
        shapes = {"wte.weight": (V, D), "wpe.weight": (64, D)}
        shapes |= {"ln_f.weight": (D,), "ln_f.bias": (D,)}
        layers = "h.{}."
    else:
        shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
        tied = family in ("qwen3", "gemma2", "gemma3_text")
        shapes |= {} if tied else {"lm_head.weight": (V, D)}
        layers = "model.layers.{}."
    for n in range(hf.get("n_layer", hf.get("num_hidden_layers"))):
        shapes |= {layers.format(n) + x: shape for x, shape in layer_shapes(family, n).items()}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def hf_dir(path: Path, family: str, tensors=None, **keys) -> Path:
    """Make a directory of that family; keys change its config.json."""
    path.mkdir()
    hf = CONFIGS[family] | dict(model_type=family) | keys
    (path / "config.json").write_text(json.dumps(hf))
    save_file(hf_tensors(family) if tensors is None else tensors, path / "model.safetensors")
    return path


def read_dir(path: Path) -> dict:
    """{name: array} of all safetensors files."""
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "numpy") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return found


def leaves(run: Path) -> dict:
    """{leaf: [shape, dtype, digest]} of checkpoint 0."""
    return json.loads((run / "checkpoints/0/meta/metadata").read_text())["leaves"]


def config_of(run: Path, mesh=(1, 1, 1)) -> config.Config:
    return utils.start_mesh(cli.config_of_run(str(run), config.Mesh(*mesh)), rows=4)


def weight(run: Path, name: str):
    """A weight of checkpoint 0, stacked over layers."""
    path = files.absolute_path(str(run / "checkpoints/0/params"))
    return big_arrays.open_arrays(path, [name])[name].read().result()


# ---- import and export


# Their tensors are handled as those of llama and deepseek_v3.
SLOW = ("mistral", "mixtral", "olmo2", "gemma2", "gpt_oss", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("family", [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
    for name in CONFIGS
])  # fmt: skip
def test_an_imported_model_is_exported_bit_for_bit(family, tmp_path, capsys):
    tensors = hf_tensors(family)
    extra = {}
    if family == "gpt2":  # a buffer in old files
        extra = {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)}
    if family == "llama":
        extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    if family == "qwen3":
        extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    if family == "deepseek_v3":
        extra = {"model.layers.3.eh_proj.weight": np.ones((D, 2 * D), np.float32)}
    hf_dir(tmp_path / "hf", family, tensors | extra)
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(5)}, unk_token="0"))
    tokenizer.add_special_tokens(["<end>", config.END, "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 7)])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    convert_hf.import_hf(tmp_path / "hf", tmp_path / "runs" / "a")
    assert f"--end_token '{config.END}'\n" in capsys.readouterr().out
    convert_hf.export_hf(tmp_path / "runs" / "a", tmp_path / "out", shard_size=20_000)
    names = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 1 and names[-1].endswith(f"of-{len(names):05}.safetensors")
    exported = read_dir(tmp_path / "out")
    if family == "gpt2":
        tensors = {f"transformer.{name}": x for name, x in tensors.items()}
    assert set(exported) == set(tensors)
    for name, x in tensors.items():
        np.testing.assert_array_equal(exported[name], x, err_msg=name)
    convert_hf.import_hf(tmp_path / "out", tmp_path / "runs" / "b")
    assert leaves(tmp_path / "runs" / "b") == leaves(tmp_path / "runs" / "a")
    configs = [cli.config_of_run(str(tmp_path / "runs" / x), config.Mesh()) for x in "ab"]
    assert configs[0].model == configs[1].model
    assert configs[0].train.dtype == configs[1].train.dtype == "float32"
    assert Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).to_str() == tokenizer.to_str()
    about = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    end = {5: "<end>", -1: config.END}.get(configs[0].data.end_id)
    assert about == dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token=end)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == 7
    (tmp_path / "runs" / "a" / "tokenizer.json").write_bytes(b"{}\xff")
    with pytest.raises(UserError, match="tokenizer.json is damaged"):
        convert_hf.export_hf(tmp_path / "runs" / "a", tmp_path / "damaged")


def test_an_imported_run_resumes_on_any_mesh_and_with_any_data(tmp_path):
    hf_dir(tmp_path / "hf", "llama")
    run = files.absolute_path(str(tmp_path / "runs" / "x"))
    convert_hf.import_hf(tmp_path / "hf", run)
    cfg = config_of(run, (1, 2, 2))
    params = runstate.load_params(run, cfg)
    embed_VD = np.asarray(params["embed_VD"])
    np.testing.assert_array_equal(embed_VD[:V], hf_tensors("llama")["model.embed_tokens.weight"])
    assert embed_VD.shape[0] == 128 and not embed_VD[V:].any()
    settings = dict.fromkeys(["train.seq_len", "train.batch_size", "run.seed"], 7)
    settings |= {"data.train fingerprint": "another", "model.d_model": D}
    state = runstate.checkpoint_items(runstate.abstract_state(cfg))
    found = checkpoint.Checkpoints(run, settings=settings).restore(state)
    assert not any(x.any() for x in jax.tree.leaves(found["rest"]))
    settings["model.d_model"] = 2 * D
    with pytest.raises(UserError, match=f"model.d_model: {D} there, {2 * D} here"):
        checkpoint.Checkpoints(run, settings=settings).restore(state)


@pytest.mark.slow
def test_rotary_pairs_that_are_not_interleaved_keep_their_order(tmp_path):
    hf_dir(tmp_path / "a", "deepseek_v3")
    hf_dir(tmp_path / "b", "deepseek_v3", rope_interleave=False)
    for x in "ab":
        convert_hf.import_hf(tmp_path / x, tmp_path / "runs" / x)
    for name in ("k_rope_DT", "q_rope_JHT"):
        reordered, plain = (weight(tmp_path / "runs" / x, f"layers/moe/{name}") for x in "ab")
        np.testing.assert_array_equal(reordered, plain[..., [0, 2, 4, 6, 1, 3, 5, 7]])
    k_TD = hf_tensors("deepseek_v3")["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"][10:]
    plain = weight(tmp_path / "runs" / "b", "layers/moe/k_rope_DT")
    np.testing.assert_array_equal(plain[0], k_TD.T)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_fused_and_split_tensors_become_the_right_weights(family, tmp_path):
    x, run = hf_tensors(family), tmp_path / "runs" / "x"
    convert_hf.import_hf(hf_dir(tmp_path / "hf", family), run)
    if family == "gpt2":
        for i, name in enumerate(["q_DHK", "k_DGK", "v_DGK"]):
            part = x["h.1.attn.c_attn.weight"][:, i * D : (i + 1) * D].reshape(D, H, D // H)
            np.testing.assert_array_equal(weight(run, f"layers/dense/{name}")[1], part)
    if family == "mixtral":
        w1, w2, w3 = (
            x[f"model.layers.1.block_sparse_moe.experts.2.w{n}.weight"].T for n in (1, 2, 3)
        )
        in_DCF = weight(run, "layers/moe_local/in_EDCF")[1, 2]
        np.testing.assert_array_equal(in_DCF, np.stack([w1, w3], 1))
        np.testing.assert_array_equal(weight(run, "layers/moe_local/out_EFD")[1, 2], w2)
    if family == "gpt_oss":  # gate and up take turns
        gate_up = x["model.layers.1.mlp.experts.gate_up_proj"][2]
        in_DCF = weight(run, "layers/moe/in_EDCF")[0, 2]
        np.testing.assert_array_equal(in_DCF, np.stack([gate_up[:, ::2], gate_up[:, 1::2]], 1))
    if family == "deepseek_v3":
        up = x["model.layers.2.self_attn.kv_b_proj.weight"].reshape(H, 10, 10).transpose(2, 0, 1)
        np.testing.assert_array_equal(weight(run, "layers/moe/k_IHK")[1], up[..., :6])
        np.testing.assert_array_equal(weight(run, "layers/moe/v_IHW")[1], up[..., 6:])
        down = x["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].T
        np.testing.assert_array_equal(weight(run, "prefix/dense/kv_down_DI")[0], down[:, :10])


def test_a_checkpoint_of_training_is_exported(tmp_path):
    """Its chunks are those of a mesh, with many layers in one."""
    m = Model(vocab_size=V, pattern="moe", n_experts=4, d_expert=8, qk_norm=True)
    cfg = config.Config(run=config.Run("x", str(tmp_path / "runs")), model=m)
    cfg = on_mesh(cfg, (1, 2, 2))
    rng, run = np.random.default_rng(0), files.absolute_path(str(tmp_path / "runs" / "x"))
    table = model.param_table(cfg)
    params = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), table)
    params = jax.device_put(params, utils.shardings(model.param_specs(cfg)))
    store = checkpoint.Checkpoints(run)
    store.save(7, dict(params=params))
    store.close()
    (run / "config.json").write_text(cli.to_json(cfg))
    convert_hf.export_hf(run, tmp_path / "out", shard_size=100_000)
    found = read_dir(tmp_path / "out")
    layers = params["layers"]
    up = np.asarray(layers["moe"]["in_EDCF"])[2, 3, :, 1].T
    np.testing.assert_array_equal(found["model.layers.2.mlp.experts.3.up_proj.weight"], up)
    convert_hf.import_hf(tmp_path / "out", tmp_path / "runs" / "again")
    again = leaves(tmp_path / "runs" / "again")
    table = utils.leaf_table(dict(params=params))
    embeds = {"params/embed_VD", "params/unembed_DV"}  # their padding rows become zero
    for name in set(table) - embeds:
        assert again[name][2] == np.asarray(digests.digest(table[name])[0]).tolist(), name


def test_the_digest_of_blocks_is_that_of_the_whole_array():
    rng = np.random.default_rng(0)
    for shape in [(3,), (2, 3, 5), (2, 4, 6, 2, 7), (1, 700, 800), ()]:
        x = rng.normal(size=shape).astype(np.float32)
        indices = [(n, *map(slice, shape[1:])) for n in range(shape[0])] if shape else [()]
        if len(shape) == 5:  # as experts are: gate and up are tensors of their own
            indices = [(n, e, slice(6), c, slice(7)) for n, e, c in np.ndindex(2, 4, 2)]
        blocks = [(index, np.asarray(x[index])) for index in indices]
        whole = np.asarray(digests.digest(jnp.asarray(x))[0]).tolist()
        assert big_arrays.digest_blocks(blocks, shape) == (whole, True)
        assert big_arrays.digest_blocks(reversed(blocks), shape) == (whole, True)
        zero = np.asarray(digests.digest(jnp.zeros(shape))[0]).tolist()
        assert big_arrays.zero_digest(shape) == zero
    x, shape = np.arange(72, dtype=np.float32).reshape(3, 3, 2, 2, 2), (3, 3, 2, 2, 2)
    index = (slice(1, 3), slice(1, 3), slice(2), slice(1, 2), slice(2))  # gaps in two dims
    ones = [at for at in np.ndindex(*shape) if at[0] and at[1] and at[3] == 1]
    by_element = big_arrays.digest_blocks([(at, np.asarray(x[at])) for at in ones], shape)
    assert big_arrays.digest_blocks([(index, x[index])], shape) == by_element
    infinite = np.full((), np.inf, np.float32)
    assert not big_arrays.digest_blocks([((), infinite)], ())[1]


# One tensor is 5 MB, the weights are 159 MB, and a checkpoint of them is 476 MB.
N_BIG, D_BIG, F_BIG, MB = 8, 512, 2560, 2**20
PEAK = """
import sys
sys.path[:0] = sys.argv[1:2]
from scripts import convert_hf

def convert(name):
    run = f"runs/{name}"
    convert_hf.import_hf(name, run)
    convert_hf.export_hf(run, f"{name}_out", dtype="bfloat16", shard_size=30_000_000)
    # not getrusage's peak: a child process starts with its parent's
    peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(peak[0].split()[1]) // 1024

print(convert("small"), convert("big"))
"""


@pytest.mark.slow
def test_memory_stays_below_the_size_of_a_model(tmp_path):
    def build(name, N, D, F):
        (tmp_path / name).mkdir()
        hf = CONFIGS["llama"] | dict(model_type="llama", num_hidden_layers=N, hidden_size=D,
                                     intermediate_size=F, head_dim=D // H, attention_bias=False,
                                     mlp_bias=False, num_key_value_heads=H)  # fmt: skip
        (tmp_path / name / "config.json").write_text(json.dumps(hf))
        x = np.random.default_rng(0).integers(0, 2**8, D * max(F, V)).astype(np.float32)

        def arrays(**shapes):
            return {
                name: x[: math.prod(s)].reshape(s).astype("bfloat16") for name, s in shapes.items()
            }

        ends = {"model.embed_tokens": (V, D), "lm_head": (V, D), "model.norm": (D,)}
        for n in range(-1, N):
            shapes = mlp("mlp", F) | {f"self_attn.{q}_proj.weight": (D, D) for q in "qkvo"}
            shapes = {
                name: tuple(D if s == 16 else s for s in size) for name, size in shapes.items()
            }
            shapes |= {f"{when}_layernorm.weight": (D,) for when in ("input", "post_attention")}
            shapes = {f"model.layers.{n}.{name}": size for name, size in shapes.items()}
            shapes = shapes if n >= 0 else {f"{name}.weight": size for name, size in ends.items()}
            save_file(arrays(**shapes), tmp_path / name / f"part{n + 1}.safetensors")

    build("small", 1, 32, 64)
    build("big", N_BIG, D_BIG, F_BIG)
    # With these, malloc returns freed memory at once: the test measures what is in use.
    env = dict(MALLOC_MMAP_THRESHOLD_="1000000", MALLOC_ARENA_MAX="2", JAX_PLATFORMS="cpu")
    command = [sys.executable, "-c", PEAK, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split("\n")[-2].split())
    weights = sum(math.prod(x[0]) * 4 for x in leaves(tmp_path / "runs/big").values()) / MB / 3
    assert weights > 150
    assert after - before < 80, f"{after - before} MB for {weights:.0f} MB of weights"


# ---- what cannot be converted


def refusal(*args) -> str:
    """The exit code and the messages of the script."""
    done = run("scripts/convert_hf.py", *args)
    assert "Traceback" not in done.stderr, done.stderr
    return f"{done.returncode}\n{done.stderr}"


def problems(tmp_path, family, tensors=None, **keys) -> str:
    """The messages with which an import is refused."""
    hf_dir(tmp_path / "hf", family, tensors, **keys)
    with pytest.raises(UserError) as e:
        convert_hf.import_hf(tmp_path / "hf", tmp_path / "runs" / "x")
    assert e.value.code == errors.DATA and not (tmp_path / "runs").exists()
    lines = str(e.value).splitlines()
    assert all(x.startswith("error: ") for x in lines[::2])
    assert all(x.startswith("  fix: ") for x in lines[1::2])
    return str(e.value)


def test_all_tensors_that_do_not_fit_are_reported_at_once(tmp_path):
    tensors = hf_tensors("llama")
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((F, D + 1), np.float32)
    tensors |= {f"model.layers.0.strange.{n}": np.zeros(1, np.float32) for n in range(12)}
    text = problems(tmp_path, "llama", tensors)
    assert "12 tensors are unknown for llama: model.layers.0.strange.0" in text
    assert text.count("strange") == 10 and " and 2 more" in text
    assert "are missing: model.norm.weight" in text
    assert "model.layers.1.mlp.up_proj.weight [32, 17] instead of [32, 16]" in text


@pytest.mark.parametrize(
    "family,keys,words",
    [
        ("llama", dict(hidden_act="gelu"), "hidden_act='gelu', but only 'silu'"),
        ("llama", dict(hidden_act="gelu"), "needs an activation of layers.hidden_units"),
        ("llama", dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type='dynamic'"),
        ("llama", dict(rope_scaling=dict(type="yarn", factor=2.0, attention_factor=3.0)), "3.0"),
        ("llama", dict(rope_scaling=dict(type="yarn", factor=2.0, attention_factor=np.nan)), "nan"),
        ("llama", dict(rope_scaling=YARN), "mscale_all_dim=0.8, but only 0"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5, but only 1"),
        ("llama", dict(clip_qkv=8.0), "clip_qkv=8.0 is not known"),
        ("llama", dict(hidden_size=None), "no hidden_size"),
        ("llama", dict(hidden_size="many"), "model.d_model would be 'many', no int"),
        ("llama", dict(model_type="bert"), "model_type='bert' is none of gpt2"),
        ("llama", dict(num_hidden_layers=10**30), f"from 1 to 10000 is needed, not {10**30}"),
        ("llama", dict(num_hidden_layers=2.0), "from 1 to 10000 is needed, not 2.0"),
        ("llama", dict(rms_norm_eps=10**400), "OverflowError: int too large"),
        ("llama", dict(rope_theta=1, rope_scaling=dict(type="yarn", factor=2.0)), "must be above"),
        ("llama", dict(rope_scaling=dict(type="yarn", factor=2.0), max_position_embeddings=None),
         "no max_position_embeddings"),
        ("llama", dict(rope_scaling=dict(type="linear"), max_position_embeddings=None),
         "no max_position_embeddings"),
        ("llama", dict(rope_scaling=dict(type="linear", factor=0.0)), "model.rope_factor=0.0 must"),
        ("gpt2", dict(n_layer=10**30), f"from 1 to 10000 is needed, not {10**30}"),
        ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "inverse_layer_idx=True"),
        ("gpt2", dict(activation_function="tanh"), "activation_function='tanh'"),
        ("qwen3", dict(layer_types=["full_attention"]), "4 of full_attention and sliding"),
        ("qwen3", dict(use_sliding_window=False), "sliding_attention, but no sliding_window is"),
        ("mistral", dict(sliding_window=0), "sliding_window=0 leaves no token"),
        ("qwen3_moe", dict(use_sliding_window=True, sliding_window=0), "leaves no token"),
        ("mixtral", dict(num_local_experts=10**9), "at most 1000000 experts"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func='softmax'"),
        ("deepseek_v3", dict(num_nextn_predict_layers=0), "model.layers.3.eh_proj.weight"),
        ("deepseek_v3", dict(quantization_config=dict(quant_method="fp8")), "bfloat16 first"),
        ("gpt_oss", dict(quantization_config=dict(quant_method="mxfp4")), "dequantize=True"),
        ("gpt_oss", dict(swiglu_limit=10.0), "swiglu_limit=10.0, but only 7.0"),
        ("gemma3_text", dict(model_type="gemma3"), "save its language model alone"),
        ("gemma3_text", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        ("gemma3_text", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
        ("gemma3_text", dict(rope_scaling=dict(type="yarn", factor=2.0, truncate=False)),
         "truncate=False has no effect in transformers' gemma3_text"),
        ("gemma2", dict(hidden_activation="gelu"), "hidden_activation='gelu', but only"),
        ("qwen3", dict(tie_word_embeddings=True), "lm_head.weight (tie_word_embeddings"),
    ],
)  # fmt: skip
def test_a_config_that_changes_the_maths_is_refused(family, keys, words, tmp_path):
    tensors = hf_tensors(family)
    if family == "deepseek_v3":
        tensors["model.layers.3.eh_proj.weight"] = np.ones(1, np.float32)
    if family == "qwen3":
        tensors["lm_head.weight"] = np.ones((V, D), np.float32)
    assert words in problems(tmp_path, family, tensors, **keys)


@pytest.mark.parametrize("dtype, found", [
    (ml_dtypes.float8_e4m3fn, "model.embed_tokens.weight (F8_E4M3)"),
    (np.float32, "lm_head.weight (tie_word_embeddings, but it is not the embedding)"),
])  # fmt: skip
def test_a_head_of_another_dtype_is_refused_where_weights_are_tied(dtype, found, tmp_path):
    """They are compared, which numpy could not do with this one."""
    tensors = hf_tensors("qwen3")
    tensors["model.embed_tokens.weight"] = np.ones((V, D), dtype)
    tensors["lm_head.weight"] = np.ones((V, D), ml_dtypes.float8_e4m3fn)
    assert found in problems(tmp_path, "qwen3", tensors, tie_word_embeddings=True)


def test_what_another_value_of_a_key_would_need_is_said_and_exists():
    supported = {key for family in hf_families.FAMILIES.values() for key in family.supported}
    # transformers' gemma3 applies no softcap to scores, whatever config.json says.
    assert supported - {"attn_logit_softcapping"} <= {*hf_config.NEEDS}
    modules = (attention, experts, hf_config, hf_families, layers)
    by_name = {module.__name__.removeprefix("scripts."): module for module in modules}
    for need in hf_config.NEEDS.values():
        for module, name in re.findall(r"(\w+)\.(\w+)", need):
            assert hasattr(by_name[module], name)


def test_keys_that_only_concern_other_programs_are_read():
    hf = CONFIGS["llama"] | dict(model_type="llama")
    more = {"is_llama_config": True, "transformers.js_config": {}, "pruned_heads": {}, "top_k": 5}
    assert hf_config.read_model(hf | more) == hf_config.read_model(hf)


def test_a_window_that_is_null_is_none_and_one_that_is_absent_is_the_familys():
    hf = CONFIGS["mistral"] | dict(model_type="mistral")
    assert hf_config.read_model(hf).window == 0
    del hf["sliding_window"]
    assert hf_config.read_model(hf).window == 4096


def test_scores_are_not_normalized_where_config_json_says_null():
    hf = CONFIGS["deepseek_v3"] | dict(model_type="deepseek_v3", norm_topk_prob=None)
    assert not hf_config.read_model(hf).norm_scores
    del hf["norm_topk_prob"]
    assert hf_config.read_model(hf).norm_scores


def test_gemma3s_two_thetas_are_read_as_transformers_reads_them():
    full, local = hf_config.FULL, hf_config.SLIDING
    hf = CONFIGS["gemma3_text"] | dict(model_type="gemma3_text", rope_scaling=None)
    none = hf | dict(rope_theta=None, rope_local_base_freq=None)

    def thetas(hf, **rope):
        m = hf_config.read_model(hf | dict(rope_parameters=rope))
        return m.rope_theta, m.rope_local_theta

    default = {kind: dict(rope_type="default") for kind in (full, local)}
    assert thetas(none, **default) == (1e6, 1e4)
    assert thetas(hf | dict(rope_theta=7e5, rope_local_base_freq=8e4), **default) == (7e5, 8e4)
    assert thetas(none, rope_type="default", rope_theta=5e5) == (1e6, 1e4)  # of no kind of layers
    both = {full: dict(rope_theta=7e5), local: dict(rope_theta=8e4)}
    none["rope_scaling"] = dict(rope_type="linear", factor=2)
    assert thetas(none, **both) == (7e5, 8e4)


def test_an_original_length_outside_of_rope_parameters_is_not_gemma3s():
    for family, original in dict(llama=32, gemma3_text=64).items():
        hf = CONFIGS[family] | dict(model_type=family, rope_scaling=LLAMA3)
        m = hf_config.read_model(hf | dict(original_max_position_embeddings=32))
        assert m.rope_original == original


def test_what_config_json_says_about_positions_is_read_before_what_its_family_has():
    for family in ("mixtral", "gpt_oss", "gemma3_text"):
        hf = CONFIGS[family] | dict(model_type=family, rope_theta=5e5)
        assert hf_config.read_model(hf).rope_theta == 5e5
        assert hf_config.read_model(hf | dict(rope_theta=None)).rope_theta != 5e5
    m = hf_config.read_model(CONFIGS["gpt_oss"] | dict(model_type="gpt_oss", rope_scaling=None))
    assert (m.rope_theta, m.rope_scaling, m.rope_factor) == (1.5e5, "yarn", 32)
    assert (m.rope_low, m.rope_high, m.rope_original, m.yarn_truncate) == (1, 32, 4096, False)


def test_weights_that_are_no_floats_or_not_finite_are_refused(tmp_path):
    tensors = hf_tensors("llama")
    tensors["model.norm.weight"] = np.ones(D, np.int8)
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = np.ones(1, np.float32)
    (tmp_path / "a").mkdir()
    text = problems(tmp_path / "a", "llama", tensors)
    assert "model.norm.weight (I8)" in text and "of quantized weights" in text
    tensors = hf_tensors("llama")
    tensors["model.norm.weight"][3] = np.nan
    (tmp_path / "b").mkdir()
    assert "hold a NaN or infinity: params/norm_D" in problems(tmp_path / "b", "llama", tensors)


@pytest.mark.parametrize("name, data, why", [
    ("model.safetensors.index.json", b'{"weight_map": {"a": 1, "b": "x"}}', "no plain file name"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": ["x"]}}', "no plain file name"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": "x"}}', "has both model.safetensors"),
    ("tokenizer.json", b'{"a": 1}', "is not a tokenizer.json"),
    ("tokenizer.json", b"\xff\xfe", "cannot be read"),
    ("tokenizer.json", None, "is not a file"),
    ("config.json", b'{"model_type": []}', "is none of"),
])  # fmt: skip
def test_a_damaged_file_leaves_no_run(name, data, why, tmp_path):
    hf = hf_dir(tmp_path / "hf", "llama")
    if data is None:
        os.mkfifo(hf / name)
    else:
        (hf / name).write_bytes(data)
    with pytest.raises(UserError, match=why) as e:
        convert_hf.import_hf(hf, tmp_path / "runs" / "x")
    assert e.value.code == errors.DATA and not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("room, size", [(4, 0), (500, 10**6)], ids=["weights", "tokenizer"])
def test_what_a_full_disk_has_stopped_works_again_once_there_is_room(tmp_path, room, size):
    hf_dir(tmp_path / "hf", "llama")
    tokenizer = Tokenizer(models.WordLevel({"x" * size: 0}, unk_token="x"))
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    for direction, hf in (("import", "hf"), ("export", "out")):
        words = ["scripts/convert_hf.py", direction, "--hf", tmp_path / hf]
        words += ["--run", tmp_path / "run"]
        full = ["bash", "-c", f'ulimit -f {room}; exec "$@"', "_", sys.executable, *map(str, words)]
        done = subprocess.run(full, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == errors.STORAGE and "Traceback" not in done.stderr, done.stderr
        assert run(*words).returncode == 0


def test_only_an_incomplete_checkpoint_may_be_where_an_import_goes(tmp_path):
    """It may have been written after the import had failed, and removed what it wrote."""
    hf, checkpoints = hf_dir(tmp_path / "hf", "llama"), tmp_path / "run" / "checkpoints"
    (checkpoints / "7").mkdir(parents=True)
    with pytest.raises(UserError, match="exists, and nothing is overwritten"):
        convert_hf.import_hf(hf, tmp_path / "run")
    (checkpoints / "7").rename(checkpoints / "0.orbax-checkpoint-tmp")
    with pytest.raises(UserError, match="exists, and nothing is overwritten"):
        convert_hf.export_hf(tmp_path / "other", tmp_path / "run")
    convert_hf.import_hf(hf, tmp_path / "run")
    assert [x.name for x in checkpoints.iterdir()] == ["0"]


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_model_in_a_bucket_is_refused(direction, tmp_path):
    done = run("scripts/convert_hf.py", direction, "--hf", "gs://bucket/x", "--run", tmp_path / "x")
    assert done.returncode == errors.USAGE and "--hf gs://bucket/x is remote" in done.stderr


def test_a_link_to_nothing_is_refused_like_what_exists(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="exists, and nothing is overwritten"):
        convert_hf.import_hf(tmp_path, tmp_path / "link")


def test_added_tokens_that_the_model_lacks_are_left_out(tmp_path, capsys):
    hf, run = hf_dir(tmp_path / "hf", "qwen3"), tmp_path / "runs" / "x"
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(V - 1)}, unk_token="0"))
    tokenizer.add_special_tokens(["<end>", "<image>"])
    tokenizer.save(str(hf / "tokenizer.json"))
    convert_hf.import_hf(hf, run)
    found = Tokenizer.from_file(str(run / "tokenizer.json"))
    assert found.token_to_id("<end>") == V - 1 and found.token_to_id("<image>") is None
    assert "left out 1 token(s)" in capsys.readouterr().err


@pytest.mark.parametrize("size, start", [(V + 1, "0"), (V, "<image>")], ids=["word", "template"])
def test_a_tokenizer_that_gives_ids_without_a_row_is_refused(size, start, tmp_path):
    """In its vocabulary, or as the token that it puts before a text."""
    hf = hf_dir(tmp_path / "hf", "llama")
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(size)}, unk_token="0"))
    tokenizer.add_special_tokens(["<image>"])
    special = [(start, tokenizer.token_to_id(start))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{start} $A", special_tokens=special)
    tokenizer.save(str(hf / "tokenizer.json"))
    with pytest.raises(UserError, match=f"ids up to {V}, the model vocab_size={V}") as e:
        convert_hf.import_hf(hf, tmp_path / "runs" / "x")
    assert e.value.code == errors.DATA and not (tmp_path / "runs").exists()


def test_a_length_that_is_no_number_is_refused(tmp_path):
    assert "is no whole number" in problems(tmp_path, "mistral", max_position_embeddings="64")


def test_no_file_outside_the_directory_and_no_pickle_is_read(tmp_path):
    hf, out = hf_dir(tmp_path / "hf", "llama"), tmp_path / "runs" / "x"
    (hf / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = hf / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map={"lm_head.weight": "../model.safetensors"})))
    text = refusal("import", "--hf", hf, "--run", out)
    assert text.startswith("3\nerror: ") and "'../model.safetensors', which is no plain" in text
    index.unlink()
    (hf / "pytorch_model.bin").write_bytes(b"pickle")
    text = refusal("import", "--hf", hf, "--run", out)
    assert text.startswith("3\nerror: ") and "only pytorch_model.bin, and such files can" in text
    assert not out.exists()


def test_links_are_read_within_the_directory_or_its_cache_only(tmp_path):
    """A Hugging Face cache has snapshots of links to blobs, and large ones (those that come through
    Xet) are links in turn."""
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    hf, out = hf_dir(tmp_path / "models--a--b" / "snapshots" / "1f", "llama"), tmp_path / "x"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in list(hf.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    shared = tmp_path / "blobs" / "1f" / "1f2e"
    shared.parent.mkdir(parents=True)
    (blobs / "model.safetensors").rename(shared)
    (blobs / "model.safetensors").symlink_to("../../blobs/1f/1f2e")
    done = run("scripts/convert_hf.py", "import", "--hf", hf, "--run", out)
    assert done.returncode == 0, done.stderr
    shared.rename(shared := blobs / "model.safetensors")
    blobs.rename(blobs := tmp_path / "elsewhere")
    for name in ("config.json", "model.safetensors"):
        (hf / name).unlink()
        (hf / name).symlink_to(blobs / name)
        text = refusal("import", "--hf", hf, "--run", tmp_path / "y")
        assert text.startswith("3\nerror: ") and f"{name} is a link to" in text
        (hf / name).unlink()
        shutil.copy(blobs / name, hf / name)


@pytest.mark.slow
def test_nothing_that_exists_is_overwritten(tmp_path):
    hf, out = hf_dir(tmp_path / "hf", "llama"), tmp_path / "runs" / "x"
    done = run("scripts/convert_hf.py", "import", "--hf", hf, "--run", out)
    assert done.returncode == 0, done.stderr
    text = refusal("import", "--hf", hf, "--run", out)
    assert text.startswith("2\nerror: ") and "choose another --run" in text
    text = refusal("export", "--run", out, "--hf", hf)
    assert text.startswith("2\nerror: ") and "choose another --hf" in text
    done = run("scripts/convert_hf.py", "export", "--run", out, "--hf", tmp_path / "new")
    assert done.returncode == 0 and "write: 100%" in done.stderr
    text = refusal("export", "--run", out, "--hf", tmp_path / "newer", "--step", 5)
    assert text.startswith("4\nerror: ") and "no checkpoint 5, only 0" in text


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    convert_hf.import_hf(hf_dir(tmp_path / "hf", "llama"), tmp_path / "runs" / "x")
    meta = tmp_path / "runs/x/checkpoints/0/meta/metadata"
    text = json.loads(meta.read_text())
    text["leaves"]["params/norm_D"][2][0] ^= 1
    text["checksum"] = verify.meta_checksum(text)
    meta.write_text(json.dumps(text))
    with pytest.raises(UserError, match="damaged: norm_D is not as saved"):
        convert_hf.export_hf(tmp_path / "runs" / "x", tmp_path / "out")
    shutil.rmtree(tmp_path / "runs/x/checkpoints/0/params")
    with pytest.raises(UserError, match="checkpoints/0 is damaged: NOT_FOUND"):
        convert_hf.export_hf(tmp_path / "runs" / "x", tmp_path / "out")
    assert not (tmp_path / "out").exists()


GEMMA = dict(norm_offset=True, norm_place="both", n_kv_heads=1)
GPT2 = dict(norm="layer", positions="learned", max_positions=128, n_kv_heads=3)
NOT_TRUNCATED = dict(rope_scaling="yarn", yarn_truncate=False)
MLA = dict(attention="mla", q_rank=8, kv_rank=8, d_rope=8, d_value=8)
ALONE = dict(n_experts=4, d_expert=8, n_groups=4, n_active_groups=2, n_shared=1, pattern="moe")
ALONE |= dict(router="sigmoid", router_bias=True)


@pytest.mark.parametrize(
    "fields,words",
    [
        (dict(logit_softcap=30.0), "model.logit_softcap is 30.0, but the llama of"),
        (
            dict(activation="gelu"),
            "model.activation is gelu, but the llama of transformers has swiglu",
        ),
        (dict(norm="layer"), "model.positions is rope, but the gpt2 of transformers has learned"),
        (dict(norm_place="both"), "model.norm_place is both, but the llama of"),
        (dict(attn_sinks=True), "model.attn_sinks is True, but the llama of"),
        (dict(qk_norm=True, mlp_bias=True), "model.mlp_bias is True, but the qwen3 of"),
        (MLA | dict(pattern="dense,moe", n_experts=4, d_expert=8), "model.router is softmax"),
        (MLA | ALONE, "model.n_groups=4 leaves one of model.n_experts=4 in each group"),
        (GEMMA | dict(d_model=40, n_heads=3), "model.d_model=40 is no multiple of model.n_heads=3"),
        (GPT2 | dict(d_model=40, n_heads=3), "model.n_heads=3, as transformers demands of a gpt2"),
        (GEMMA | dict(qk_norm=True) | NOT_TRUNCATED, "model.yarn_truncate is False, but the gemma"),
        (dict(pattern="dense,dense_local", window=4), "model.layers is {'prefix': '', 'pattern'"),
    ],
)
def test_models_that_transformers_lacks_are_not_exported(fields, words):
    cfg = checks.check(config.Config(model=Model(**fields)))
    with pytest.raises(UserError) as e:
        hf_config.write_config(cfg, "float32", None)
    assert e.value.code == errors.DATA and words in str(e.value)


def test_a_gemma3_whose_two_thetas_are_equal_can_be_exported():
    hf = CONFIGS["gemma3_text"] | dict(model_type="gemma3_text", rope_theta=1e4, rope_scaling={})
    m = hf_config.read_model({key: x for key, x in hf.items() if key != "rope_local_base_freq"})
    again = hf_config.read_model(hf_config.write_config(config.Config(model=m), "float32", None))
    assert hf_config.effective_fields(again) == hf_config.effective_fields(m)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss"])
def test_an_exported_window_is_never_null(family):
    """transformers makes these families' local masks even where no layer is local."""
    hf = CONFIGS[family] | dict(model_type=family)
    m = hf_config.read_model(hf | dict(layer_types=[hf_config.FULL] * hf["num_hidden_layers"]))
    assert "sliding_window" not in hf_config.write_config(config.Config(model=m), "float32", None)


def test_a_gemma_whose_scores_have_the_heads_own_width_can_be_exported():
    m = hf_config.read_model(CONFIGS["gemma2"] | dict(model_type="gemma2"))
    for width in (0, m.d_head):
        cfg = config.Config(model=replace(m, attn_width=width))
        hf = hf_config.write_config(cfg, "float32", None)
        assert hf["query_pre_attn_scalar"] == m.d_head


def test_a_width_of_scores_that_the_family_lacks_is_refused():
    m = hf_config.read_model(CONFIGS["deepseek_v3"] | dict(model_type="deepseek_v3"))
    own, other = (config.Config(model=replace(m, attn_width=m.d_head + x)) for x in (m.d_rope, 0))
    hf_config.write_config(own, "float32", None)
    with pytest.raises(UserError, match="attn_width"):
        hf_config.write_config(other, "float32", None)


def test_a_llama_whose_width_is_no_multiple_of_its_heads_is_exported_as_a_mistral():
    """transformers (5.23) refuses to load such a llama, and a mistral without a window is one."""
    cfg = config.Config(model=Model(d_model=40, n_heads=3, n_kv_heads=1, d_head=16))
    hf = hf_config.write_config(cfg, "float32", None)
    assert hf["model_type"] == "mistral" and hf["sliding_window"] is None


PUBLISHED = ["gpt2_124m", "gpt2_1.5b", "llama3_8b", "llama3_70b", "qwen3_0.6b", "qwen3_30b_a3b"]


@pytest.mark.parametrize("name", [*PUBLISHED, "deepseek_v3"])
def test_presets_of_published_models_can_be_exported(name):
    cfg = config.PRESETS[name]()
    hf = hf_config.write_config(cfg, "float32", None)
    again = hf_config.read_model(hf)
    assert hf_config.effective_fields(again) == hf_config.effective_fields(cfg.model)
    tensors = hf_families.tensor_maps(hf["model_type"], cfg)
    assert sum(math.prod(tensor.shape) for tensor in tensors) == model.param_count(cfg)


@pytest.mark.parametrize(
    "kinds,prefix,pattern",
    [
        ("d d d", "", "dense"),
        ("d m m m", "dense", "moe"),
        ("d l d l", "", "dense,dense_local"),
        ("d d d m d d d m", "", "dense*3,moe"),
        ("d m l", "", "dense,moe,dense_local"),
        ("l d d l d d", "", "dense_local,dense*2"),
    ],
)
def test_the_shortest_pattern_is_found(kinds, prefix, pattern):
    names = dict(d="dense", m="moe", l="dense_local")
    found = hf_config.shortest_pattern([names[kind] for kind in kinds.split()])
    assert found == dict(prefix=prefix, pattern=pattern)


# ---- orbax


def test_orbax_still_has_the_internals_that_big_arrays_uses():
    """If this fails after an update of orbax-checkpoint, read the docstrings of StreamHandler and
    open_arrays, and adapt them first."""
    orbax, changed = ocp.type_handlers, "orbax has changed {}: big_arrays.py uses it"
    write = getattr(orbax.NumpyHandler, "_open_and_write", None)
    assert inspect.iscoroutinefunction(write), changed.format("NumpyHandler._open_and_write")
    arguments = list(inspect.signature(write).parameters)
    assert arguments == ["self", "value", "tspec", "ts_context"], changed.format(write)
    for name, wanted in dict(
        get_json_tspec_read=["info", "use_ocdbt"], ParamInfo=["name", "parent_dir", "ts_context"]
    ).items():
        assert hasattr(orbax, name), changed.format(name)
        arguments = inspect.signature(getattr(orbax, name)).parameters
        assert set(wanted) <= set(arguments), changed.format(f"{name}{tuple(arguments)}")


def test_orbax_writes_a_streamed_array_from_its_blocks(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    blocks = [((n, slice(6)), partial(x.__getitem__, n)) for n in range(4)]
    tree = dict(x=big_arrays.streamed_array(x.shape, x.dtype, blocks), y=np.ones(3, np.float32))
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "saved", tree)
    arrays = big_arrays.open_arrays(epath.Path(tmp_path / "saved"), tree)
    np.testing.assert_array_equal(arrays["x"].read().result(), x)
    np.testing.assert_array_equal(arrays["y"].read().result(), tree["y"])
    assert arrays["x"].chunk_layout.read_chunk.shape == (1, 6), "StreamHandler did not write it"
