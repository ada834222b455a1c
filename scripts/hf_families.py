"""The families of Hugging Face transformers: which tensor of a file holds which weight, and which
key of config.json is which field of Model.  Nothing here reads or writes a file.

Dimension key (the letters that end the weights' names, and the dims in the tables):
  V  vocabulary   D  d_model   L  positions   N  layers   H  query heads   G  key and value heads
  K  head dim   F  d_ff, or an expert's hidden width   C  gate and up, or only up   E  experts
mla:
  J  latent of the queries   I  latent of keys and values   T  rotary dim   W  value dim
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import config
import model
import utils
from architecture import layer_places

# ---- tensors and weights

# A line is a tensor's name, its dims in the file's order, and the weights that it holds.  A space
# separates two dims of the tensor: "HK D" is a matrix with H * K rows.  A | separates the weights
# that it holds side by side.  A dict gives an index into the weight where the tensor is one entry
# of a dim: with C=1 it is the second of gate and up.  Where a name has {E}, each expert has such a
# tensor; tensor_maps has the other words in braces.  A layer uses the lines whose weights it has.

LLAMA_ENDS = [
    ("model.embed_tokens.weight", "V D", "embed_VD"),
    ("model.norm.weight", "D", "norm_D"),
    ("lm_head.weight", "V D", "unembed_DV"),
]
LLAMA_LAYER = [
    ("input_layernorm.weight", "D", "attn_norm_D"),
    ("{mlp_norm}_layernorm.weight", "D", "mlp_norm_D"),
    ("post_attention_layernorm.weight", "D", "attn_post_norm_D"),
    ("post_feedforward_layernorm.weight", "D", "mlp_post_norm_D"),
    ("self_attn.q_proj.weight", "HK D", "q_DHK"),
    ("self_attn.k_proj.weight", "GK D", "k_DGK"),
    ("self_attn.v_proj.weight", "GK D", "v_DGK"),
    ("self_attn.o_proj.weight", "D HK", "o_HKD"),
    ("self_attn.q_proj.bias", "HK", "q_bias_HK"),
    ("self_attn.k_proj.bias", "GK", "k_bias_GK"),
    ("self_attn.v_proj.bias", "GK", "v_bias_GK"),
    ("self_attn.o_proj.bias", "D", "o_bias_D"),
    ("self_attn.q_norm.weight", "K", "q_norm_K"),
    ("self_attn.k_norm.weight", "K", "k_norm_K"),
    ("self_attn.q_norm.weight", "HK", "q_norm_HK"),
    ("self_attn.k_norm.weight", "GK", "k_norm_GK"),
    ("self_attn.sinks", "H", "sink_H"),
    # mla:
    ("self_attn.q_a_proj.weight", "J D", "q_down_DJ"),
    ("self_attn.q_a_proj.bias", "J", "q_down_bias_J"),
    ("self_attn.q_a_layernorm.weight", "J", "q_norm_J"),
    ("self_attn.{query}_proj.weight", "HK J|HT J", "q_JHK q_rope_JHT"),
    ("self_attn.kv_a_proj_with_mqa.weight", "I D|T D", "kv_down_DI k_rope_DT"),
    ("self_attn.kv_a_proj_with_mqa.bias", "I|T", "kv_down_bias_I k_rope_bias_T"),
    ("self_attn.kv_a_layernorm.weight", "I", "kv_norm_I"),
    ("self_attn.kv_b_proj.weight", "HK I|HW I", "k_IHK v_IHW"),
    ("self_attn.o_proj.weight", "D HW", "o_HWD"),
    # dense:
    ("mlp.gate_proj.weight", "F D", "in_CDF", dict(C=0)),
    ("mlp.up_proj.weight", "F D", "in_CDF", dict(C=1)),
    ("mlp.down_proj.weight", "D F", "out_FD"),
    ("mlp.gate_proj.bias", "F", "in_bias_CF", dict(C=0)),
    ("mlp.up_proj.bias", "F", "in_bias_CF", dict(C=1)),
    ("mlp.down_proj.bias", "D", "out_bias_D"),
]
QWEN_MOE = [  # and of deepseek_v3
    ("mlp.gate.weight", "E D", "router_DE"),
    ("mlp.gate.e_score_correction_bias", "E", "router_bias_E"),
    ("mlp.shared_experts.gate_proj.weight", "F D", "shared_in_CDF", dict(C=0)),
    ("mlp.shared_experts.up_proj.weight", "F D", "shared_in_CDF", dict(C=1)),
    ("mlp.shared_experts.down_proj.weight", "D F", "shared_out_FD"),
    ("mlp.experts.{E}.gate_proj.weight", "F D", "in_EDCF", dict(C=0)),
    ("mlp.experts.{E}.up_proj.weight", "F D", "in_EDCF", dict(C=1)),
    ("mlp.experts.{E}.down_proj.weight", "D F", "out_EFD"),
]
MIXTRAL_MOE = [
    ("block_sparse_moe.gate.weight", "E D", "router_DE"),
    ("block_sparse_moe.experts.{E}.w1.weight", "F D", "in_EDCF", dict(C=0)),
    ("block_sparse_moe.experts.{E}.w3.weight", "F D", "in_EDCF", dict(C=1)),
    ("block_sparse_moe.experts.{E}.w2.weight", "D F", "out_EFD"),
]
GPT_OSS_MOE = [
    ("mlp.router.weight", "E D", "router_DE"),
    ("mlp.router.bias", "E", "router_logit_bias_E"),
    ("mlp.experts.gate_up_proj", "E D FC", "in_EDCF"),
    ("mlp.experts.gate_up_proj_bias", "E FC", "in_bias_ECF"),
    ("mlp.experts.down_proj", "E F D", "out_EFD"),
    ("mlp.experts.down_proj_bias", "E D", "out_bias_ED"),
]
GPT2_ENDS = [
    ("transformer.wte.weight", "V D", "embed_VD"),
    ("transformer.wpe.weight", "L D", "position_LD"),
    ("transformer.ln_f.weight", "D", "norm_D"),
    ("transformer.ln_f.bias", "D", "norm_bias_D"),
    ("lm_head.weight", "V D", "unembed_DV"),
]
GPT2_LAYER = [
    ("ln_1.weight", "D", "attn_norm_D"),
    ("ln_1.bias", "D", "attn_norm_bias_D"),
    ("attn.c_attn.weight", "D HK|D GK|D GK", "q_DHK k_DGK v_DGK"),
    ("attn.c_attn.bias", "HK|GK|GK", "q_bias_HK k_bias_GK v_bias_GK"),
    ("attn.c_proj.weight", "HK D", "o_HKD"),
    ("attn.c_proj.bias", "D", "o_bias_D"),
    ("ln_2.weight", "D", "mlp_norm_D"),
    ("ln_2.bias", "D", "mlp_norm_bias_D"),
    ("mlp.c_fc.weight", "D F", "in_CDF", dict(C=0)),
    ("mlp.c_fc.bias", "F", "in_bias_CF", dict(C=0)),
    ("mlp.c_proj.weight", "F D", "out_FD"),
    ("mlp.c_proj.bias", "D", "out_bias_D"),
]


# ---- families


SILU = dict(hidden_act="silu")


class Family(NamedTuple):
    """A model_type of transformers."""

    architecture: str
    keys: list
    """Keys of config.json: (key, field of Model, value if the key is absent, value if it is null).
    Without the last, null counts as absent; with neither, the key is required."""
    fixed: dict = {}  # noqa: RUF012, it is never changed
    """Fields of Model that are the same for the whole family."""
    supported: dict = SILU
    """Keys of config.json that must have this value, or be absent: {key: value}."""
    layer: list = LLAMA_LAYER
    """The lines of a layer's tensors."""
    layer_prefix: str = "model.layers.{}."
    """The start of the names of layer {}'s tensors."""
    ends: list = LLAMA_ENDS
    """The lines of the tensors outside the layers; the embedding's is the first."""
    rope_theta: float = 1e4
    """rope_theta where config.json has none; 0 without rotary positions."""
    rope_scaling: dict = {}  # noqa: RUF012
    """Rotary settings where config.json has none."""


# fmt: off
def keys(eps: float = 1e-6, tied: bool = False) -> list:
    """Keys of most families.  eps and tied: rms_norm_eps and tie_word_embeddings if absent."""
    return [
        ("vocab_size", "vocab_size"), ("hidden_size", "d_model"), ("num_hidden_layers", "n_layers"),
        ("num_attention_heads", "n_heads"), ("rms_norm_eps", "norm_eps", eps),
        ("tie_word_embeddings", "tie_embeddings", tied),
    ]


KV_HEADS = ("num_key_value_heads", "n_kv_heads", None)
HEADS = [KV_HEADS, ("head_dim", "d_head", None)]
BIAS = ("attention_bias", "attn_bias", False)
WINDOW_4096 = ("sliding_window", "window", 4096, 0)
D_FF, ACTIVE = ("intermediate_size", "d_ff"), ("num_experts_per_tok", "n_active")
# Old files have hidden_act as well, which transformers ignores.
GEGLU = dict.fromkeys(("hidden_activation", "hidden_act"), "gelu_pytorch_tanh")
GEGLU |= dict(use_bidirectional_attention=False)
GEMMA_KEYS = [
    *keys(tied=True), *HEADS, BIAS, D_FF, WINDOW_4096,
    ("query_pre_attn_scalar", "attn_width", 256),
]
GEMMA = dict(activation="geglu_tanh", norm_place="both", norm_offset=True, scale_embedding=True)
FAMILIES = dict(
    gpt2=Family(
        "GPT2LMHeadModel",
        [("vocab_size", "vocab_size"), ("n_embd", "d_model"), ("n_layer", "n_layers"),
         ("n_head", "n_heads"), ("n_inner", "d_ff", None), ("n_positions", "max_positions", 1024),
         ("activation_function", "activation", "gelu_new"),
         ("layer_norm_epsilon", "norm_eps", 1e-5), ("tie_word_embeddings", "tie_embeddings", True)],
        dict(attn_bias=True, mlp_bias=True, norm="layer", norm_bias=True, positions="learned"),
        dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
             add_cross_attention=False),
        GPT2_LAYER, "transformer.h.{}.", GPT2_ENDS, rope_theta=0,
    ),
    llama=Family(
        "LlamaForCausalLM", [*keys(), *HEADS, BIAS, D_FF, ("mlp_bias", "mlp_bias", False)],
    ),
    mistral=Family("MistralForCausalLM", [*keys(), *HEADS, D_FF, WINDOW_4096]),
    qwen2=Family(
        "Qwen2ForCausalLM", [*keys(), *HEADS, D_FF, WINDOW_4096],
        dict(attn_bias=True, attn_out_bias=False),
    ),
    olmo2=Family(
        "Olmo2ForCausalLM", [*keys(1e-5), *HEADS, BIAS, D_FF],
        dict(norm_place="after", qk_norm=True, qk_norm_width="all"),
    ),
    gemma2=Family(
        "Gemma2ForCausalLM",
        [*GEMMA_KEYS, ("attn_logit_softcapping", "attn_softcap", 50.0, 0.0),
         ("final_logit_softcapping", "logit_softcap", 30.0, 0.0)],
        GEMMA, GEGLU,
    ),
    gemma3_text=Family(
        "Gemma3ForCausalLM", [*GEMMA_KEYS, ("final_logit_softcapping", "logit_softcap", 0.0)],
        GEMMA | dict(qk_norm=True), GEGLU | dict(attn_logit_softcapping=None),
        rope_theta=1e6,
    ),
    qwen3=Family(
        "Qwen3ForCausalLM",
        [*keys(), KV_HEADS, ("head_dim", "d_head", 128), BIAS, D_FF, WINDOW_4096],
        dict(qk_norm=True),
    ),
    qwen3_moe=Family(
        "Qwen3MoeForCausalLM",
        [*keys(), *HEADS, BIAS, D_FF, WINDOW_4096, ACTIVE, ("num_experts", "n_experts"),
         ("moe_intermediate_size", "d_expert"), ("norm_topk_prob", "norm_scores", False)],
        dict(qk_norm=True), SILU, [*LLAMA_LAYER, *QWEN_MOE],
    ),
    mixtral=Family(
        "MixtralForCausalLM",
        [*keys(1e-5), *HEADS, ("sliding_window", "window", 0), ACTIVE,
         ("num_local_experts", "n_experts"), ("intermediate_size", "d_expert")],
        dict(norm_scores=True), SILU, [*LLAMA_LAYER, *MIXTRAL_MOE], rope_theta=1e6,
    ),
    gpt_oss=Family(
        "GptOssForCausalLM",
        [*keys(1e-5), *HEADS, ("sliding_window", "window", 128, 0), ACTIVE,
         ("attention_bias", "attn_bias", True), ("num_local_experts", "n_experts"),
         ("intermediate_size", "d_expert")],
        dict(activation="swiglu_clamped", attn_sinks=True, norm_scores=True,
             router_logit_bias=True, expert_bias=True),
        SILU | dict(swiglu_alpha=1.702, swiglu_limit=7.0), [*LLAMA_LAYER, *GPT_OSS_MOE],
        rope_theta=1.5e5,
        rope_scaling=dict(rope_type="yarn", factor=32.0, truncate=False,
                          original_max_position_embeddings=4096),
    ),
    deepseek_v3=Family(
        "DeepseekV3ForCausalLM",
        [*keys(), BIAS, D_FF, ACTIVE, ("num_key_value_heads", "n_kv_heads"),
         ("q_lora_rank", "q_rank", 0), ("kv_lora_rank", "kv_rank"),
         ("qk_nope_head_dim", "d_head"), ("qk_rope_head_dim", "d_rope"), ("v_head_dim", "d_value"),
         ("n_routed_experts", "n_experts"), ("n_shared_experts", "n_shared", 1),
         ("moe_intermediate_size", "d_expert"), ("norm_topk_prob", "norm_scores", True, False),
         ("routed_scaling_factor", "score_scale", 2.5), ("n_group", "n_groups"),
         ("topk_group", "n_active_groups")],
        dict(attention="mla", router="sigmoid", router_bias=True),
        SILU | dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1),
        [*LLAMA_LAYER, *QWEN_MOE],
    ),
)
# fmt: on
# Endings of the names of buffers in old files, which transformers ignores too.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


# ---- one model


@dataclass(frozen=True)
class Part:
    """The part of one weight that a tensor holds."""

    weight: str
    """The weight's path in params."""
    entry: tuple
    """The index of the part in the weight, which is stacked over layers."""
    file_dims: str
    """The part's dims in the tensor's order."""
    weight_dims: str
    """The same dims in the weight's order."""
    sizes: dict[str, int]
    """The size of each dim."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor of a Hugging Face file, and the parts of weights that it holds side by side."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    joined_dim: int
    """The index in file_dims of the dim along which the parts are concatenated."""
    interleaved: bool
    """Whether the tensor pairs rotary dim 2i with 2i + 1 (DeepSeek); our weights pair i with
    i + T/2."""

    def to_weight(self, x, j: int):
        """Part j of the tensor x, with its dims in the weight's order."""
        part = self.parts[j]
        ends = np.cumsum([part.sizes[part.file_dims[self.joined_dim]] for part in self.parts])
        shape = [part.sizes[dim] for dim in part.file_dims]
        shape[self.joined_dim] = -1
        x = np.split(x.reshape(shape), ends[:-1], self.joined_dim)[j]
        if self.interleaved and "T" in part.file_dims:
            x = x.take(rotary_order(part.sizes["T"]), part.file_dims.index("T"))
        return np.einsum(f"{part.file_dims}->{part.weight_dims}", x)

    def from_weights(self, xs: list):
        """The tensor made of its parts, whose dims are in the weights' order."""
        in_file_order = []
        for part, x in zip(self.parts, xs, strict=True):
            x = np.einsum(f"{part.weight_dims}->{part.file_dims}", x)
            if self.interleaved and "T" in part.file_dims:
                order = np.argsort(rotary_order(part.sizes["T"]))
                x = x.take(order, part.file_dims.index("T"))
            in_file_order.append(x)
        return np.concatenate(in_file_order, self.joined_dim).reshape(self.shape)


def rotary_order(T: int):
    """The index in an interleaved tensor of each of our T rotary dims: 0, 2, .., 1, 3, .."""
    return np.arange(T).reshape(-1, 2).T.ravel()


def weight_part(weight: str, dims: str, index: dict, shape: tuple, vocab_size: int) -> Part:
    """The Part of a weight of that shape.  dims: the tensor's, in the file's order.  index:
    {dim: index} for the dims of the weight in which the tensor is one entry."""
    letters = weight.rsplit("_", 1)[1]
    letters = "N" * (len(shape) - len(letters)) + letters  # stacked layers have one more dim
    sizes = dict(zip(letters, shape, strict=True))
    if "V" in sizes:  # the files have no padding rows
        sizes["V"] = vocab_size
    entry = tuple(index.get(dim, slice(sizes[dim])) for dim in letters)
    weight_dims = "".join(dim for dim in letters if dim not in index)
    return Part(weight, entry, dims.replace(" ", ""), weight_dims, sizes)


def tensor_map(name: str, layout: str, parts: list[Part], interleaved: bool) -> TensorMap:
    """The tensor that holds these parts; the letters of their dims differ in one dim at most.
    layout: the first part's, whose spaces separate the tensor's dims."""
    dims = [part.file_dims for part in parts]
    differ = [len(set(letters)) > 1 for letters in zip(*dims, strict=True)]
    joined = differ.index(True) if any(differ) else 0
    sizes = dict(parts[0].sizes)
    sizes[dims[0][joined]] = sum(part.sizes[part.file_dims[joined]] for part in parts)
    shape = tuple(math.prod(sizes[dim] for dim in letters) for letters in layout.split())
    return TensorMap(name, shape, tuple(parts), joined, interleaved)


def tensor_maps(name: str, cfg: config.Config, interleaved: bool = True) -> list[TensorMap]:
    """Every tensor of a model of that family.  interleaved: as in TensorMap."""
    family, m = FAMILIES[name], cfg.model
    shapes = {path: p.shape for path, p in utils.leaf_table(model.param_table(cfg)).items()}
    words = dict(
        # One name means different norms in different families.
        mlp_norm="pre_feedforward" if m.norm_place == "both" else "post_attention",
        query="q_b" if m.q_rank else "q",  # queries may be made from a latent
    )

    experts = [dict(E=e) for e in range(m.n_experts)]

    def maps(lines, prefix="", group="", **row):
        for tensor, layout, weights, *rest in lines:
            paths, layouts = [group + weight for weight in weights.split()], layout.split("|")
            if not all(path in shapes for path in paths):
                continue
            for expert in experts if "{E}" in tensor else [{}]:
                index, pairs = dict(*rest) | row | expert, zip(paths, layouts, strict=True)
                parts = [weight_part(p, dims, index, shapes[p], m.vocab_size) for p, dims in pairs]
                full_name = prefix + tensor.format(**words, **expert)
                yield tensor_map(full_name, layouts[0], parts, interleaved)

    found = [*maps(family.ends)]
    for n, (group, kind, row) in enumerate(layer_places(cfg.model)):
        found += maps(family.layer, family.layer_prefix.format(n), f"{group}/{kind}/", N=row)
    named = {part.weight for tensor in found for part in tensor.parts}
    assert named == set(shapes), f"{name} has no tensor for {set(shapes) - named}"
    return found
