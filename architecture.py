"""A model's architecture: the section `model` of the settings, and its layer pattern."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Model:
    """The architecture, in this order: size and layers, attention, positions, norms and dense
    feed-forwards, experts.  A prefix such as mla: marks a flag that counts only for that choice."""

    vocab_size: int = 512
    """Number of token ids; at least the vocabulary of the data.
    The embedding is padded to a multiple of 128 rows, for mesh.tp.
    The padding is never predicted."""
    d_model: int = 64
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of decoder layers, including those of model.prefix."""
    pattern: str = "dense"
    """Block of layers that repeats, such as dense*5,moe.
    Kinds: dense and moe; dense_local and moe_local attend only to the last model.window tokens."""
    prefix: str = ""
    """Layers before the first block, such as dense*3.
    In training the first stage runs them, in addition to its share of the blocks."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output projection too."""
    scale_embedding: bool = False
    """Multiply the embedding by the root of model.d_model, or of model.mup_base_width if set."""
    mup_base_width: int = 0
    """model.d_model of muP's base, whose learning rate this model is to share; 0 uses no muP.
    The ratio of widths scales layers' rates, logits, and the initial values of head and routers."""
    mup_base_depth: int = 0
    """model.n_layers of the base; the ratio scales layers' outputs (CompleteP); 0 scales none."""
    mup_base_head: int = 0
    """model.d_head of the base; multiplies scores by the root of this / model.d_head, unless 0."""
    logit_softcap: float = 0.0
    """Bound c on the logits, which become c * tanh(logit / c); 0 sets no bound."""

    attention: str = "gqa"
    """Kind of attention, a name in the table ATTENTION of attention.py.
    gqa: grouped-query attention.  mla: multi-head latent attention."""
    n_heads: int = 4
    """Number of query heads."""
    n_kv_heads: int = 4
    """gqa: number of key and value heads; it must divide model.n_heads."""
    d_head: int = 16
    """gqa: width of a head.  mla: width of the part of a query or key head that is not rotated."""
    q_rank: int = 0
    """mla: width of the latent that queries are made from; 0 uses none."""
    kv_rank: int = 0
    """mla: width of the latent that keys and values are made from, and that decoding caches."""
    d_rope: int = 0
    """mla: width of the part of a query or key head that RoPE rotates.
    All heads share that part of the key."""
    d_value: int = 0
    """mla: width of a value head."""
    qk_norm: bool = False
    """gqa: apply RMSNorm to queries and keys before RoPE."""
    qk_norm_width: Literal["head", "all"] = "head"
    """gqa: what model.qk_norm norms.  head: each head by itself.  all: all heads of a token."""
    attn_bias: bool = False
    """Add biases to attention's projections.
    In mla: only to those that make latents, the shared key and the output."""
    attn_out_bias: bool = True
    """gqa: add a bias to the output projection too, if model.attn_bias is set."""
    attn_softcap: float = 0.0
    """Bound c on the attention scores, which become c * tanh(score / c); 0 sets no bound."""
    attn_width: int = 0
    """Attention scores are divided by the root of this; 0 takes the width of a key head."""
    attn_sinks: bool = False
    """gqa: give each head a learned score for attending to no key."""
    window: int = 0
    """Number of tokens that a local layer attends to, including the current one."""

    positions: Literal["rope", "learned"] = "rope"
    """rope: rotate queries and keys.  learned: add a learned vector to the embedding."""
    max_positions: int = 0
    """learned: number of position vectors; at least train.seq_len."""
    rope_theta: float = 10_000.0
    """rope: base of the rotation frequencies."""
    rope_local_theta: float = 0.0
    """rope: base of the frequencies of local layers, which are then not scaled.
    0: as in the other layers."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """rope: how frequencies are slowed, for a longer context.
    linear: all of them.  llama3: the low ones, as in Llama 3.1.  yarn: the low ones, as in YaRN."""
    rope_factor: float = 1.0
    """linear, llama3, yarn: factor by which the slowed frequencies are divided."""
    rope_original: int = 8192
    """llama3, yarn: context length, in tokens, that the model was first trained with."""
    rope_low: float = 1.0
    """llama3, yarn: frequencies that make fewer turns than this are divided by model.rope_factor.
    A turn is a full rotation; turns are counted over model.rope_original tokens."""
    rope_high: float = 4.0
    """llama3, yarn: frequencies with more turns than this are kept.
    Those in between are divided in part.
    Usual values are 4 for llama3 and 32 for yarn."""
    yarn_mscale: float = 0.0
    """yarn: DeepSeek's mscale, which scales the rotated queries and keys.
    It counts only if model.yarn_mscale_all_dim is set; 0 is unset."""
    yarn_mscale_all_dim: float = 0.0
    """yarn: DeepSeek's mscale_all_dim, which scales all attention scores; 0 is unset."""
    yarn_truncate: bool = True
    """yarn: let the ramp between kept and divided frequencies begin and end at whole pairs."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_place: Literal["before", "after", "both"] = "before"
    """before: norm what an attention or feed-forward reads.
    after: norm what it adds to the residual stream.  both: norm both."""
    norm_bias: bool = False
    """Add a bias to each norm."""
    norm_offset: bool = False
    """Store the gain of each norm minus 1, as Gemma does."""
    norm_eps: float = 1e-6
    """Added to the mean square or variance inside a norm.
    In the norms of mla's latents it is always 1e-6."""
    d_ff: int = 128
    """Hidden width of a dense feed-forward."""
    activation: Literal["swiglu", "swiglu_clamped", "geglu_tanh", "gelu", "gelu_tanh", "relu2"] = (
        "swiglu"
    )
    """Activation of every feed-forward.  Those with glu in their names have a gate, a third matrix.
    swiglu_clamped is that of gpt-oss, whose gate and up are bounded by 7.
    gelu is exact, gelu_tanh approximates it, relu2 is ReLU squared."""
    mlp_bias: bool = False
    """Add biases to the dense feed-forwards."""

    n_experts: int = 0
    """moe: number of routed experts in a layer."""
    n_active: int = 2
    """moe: number of routed experts that each token goes to."""
    n_shared: int = 0
    """moe: number of shared experts, which every token goes to."""
    d_expert: int = 0
    """moe: hidden width of an expert."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """moe: function that turns the router's outputs into scores."""
    norm_scores: bool = False
    """moe: divide the scores of a token's experts by their sum."""
    score_scale: float = 1.0
    """moe: multiply the scores of a token's experts by this, after model.norm_scores."""
    n_groups: int = 1
    """moe: number of groups that the experts are divided into."""
    n_active_groups: int = 1
    """moe: number of groups that a token's experts come from.
    They are the groups with the largest sum of their two best scores."""
    router_logit_bias: bool = False
    """moe: add a learned bias to each output of the router."""
    expert_bias: bool = False
    """moe: add biases to the routed experts."""
    router_bias: bool = False
    """moe: when experts are chosen, add a bias for each expert to its score.
    Each update moves the biases by train.bias_rate, to balance the load."""

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of 128."""
        return -(-self.vocab_size // 128) * 128

    @property
    def in_matrices(self) -> int:
        """Matrices with which a feed-forward reads its input: gate and up, or only up."""
        return 1 + ("glu" in self.activation)

    @property
    def embedding_scale(self) -> float:
        """The factor on the embedding."""
        return (self.mup_base_width or self.d_model) ** 0.5 if self.scale_embedding else 1.0


# ---- the layers of a pattern

KINDS = ("dense", "moe", "dense_local", "moe_local")


def layer_kinds(pattern: str) -> list[str]:
    """The layers of a pattern: ["dense", "dense", "moe"] for "dense*2,moe".  Raises ValueError."""
    kinds = []
    for part in pattern.split(",") if pattern else []:
        kind, _, count = part.partition("*")
        if kind not in KINDS or (count and not (count.isdecimal() and 0 < int(count) <= 10_000)):
            raise ValueError(f"{part!r} is not one of {', '.join(KINDS)}, with or without *COUNT")
        kinds += [kind] * int(count or 1)
    return kinds


def n_blocks(m: Model) -> int:
    """How many times model.pattern repeats."""
    return (m.n_layers - len(layer_kinds(m.prefix))) // len(layer_kinds(m.pattern))


def kinds_by_group(m: Model) -> dict[str, list[str]]:
    """The kinds of the layers in each group of the weights, both in order."""
    return dict(prefix=layer_kinds(m.prefix), layers=layer_kinds(m.pattern) * n_blocks(m))


def all_kinds(m: Model) -> list[str]:
    """The kind of each layer, in order."""
    return [kind for kinds in kinds_by_group(m).values() for kind in kinds]


def layer_places(m: Model) -> list[tuple[str, str, int]]:
    """(group, kind, row) of each layer, in order; a weight is params[group][kind][name][row]."""
    return [
        (group, kind, kinds[:n].count(kind))
        for group, kinds in kinds_by_group(m).items()
        for n, kind in enumerate(kinds)
    ]


def moe_layers(m: Model) -> list[int]:
    """The numbers of the moe layers, from 0."""
    return [n for n, kind in enumerate(all_kinds(m)) if "moe" in kind]
