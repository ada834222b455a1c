"""Converts a Hugging Face model's config.json to our Model, and back.  What the other side cannot
represent is refused; nothing is approximated.  H is the number of query heads, D is d_model."""

from dataclasses import asdict, replace
from itertools import groupby

import attention
import checks
from architecture import Model, all_kinds, moe_layers
from config import Config
from errors import DATA, Problem, UserError, or_list, raise_problems
from scripts import hf_families

# Keys that are accepted with any value: they have no effect, or only on training with transformers,
# or are read by name below (max_position_embeddings, max_window_layers and others).
IGNORED = """
    model_type architectures transformers_version torch_dtype dtype use_cache initializer_range
    bos_token_id eos_token_id pad_token_id unk_token_id decoder_start_token_id _name_or_path
    attention_dropout attn_pdrop embd_pdrop resid_pdrop summary_type summary_use_proj
    summary_activation summary_first_dropout summary_proj_to_labels n_ctx task_specific_params
    reorder_and_upcast_attn pretraining_tp output_router_logits router_aux_loss_coef
    router_jitter_noise auto_map ep_size aux_loss_alpha seq_aux max_window_layers
    max_position_embeddings gradient_checkpointing return_dict output_attentions id2label label2id
    output_hidden_states num_nextn_predict_layers num_mtp_layers rope_interleave qk_head_dim
    cache_implementation initial_context_length experts_per_token sliding_window_size
    _sliding_window_pattern _attn_implementation _attn_implementation_autoset _commit_hash
    original_max_position_embeddings tokenizer_class is_llama_config transformers.js_config
    _num_labels max_length min_length do_sample temperature top_k top_p repetition_penalty
    num_beams unsloth_version unsloth_fixed pruned_heads chunk_size_feed_forward torchscript
    use_bfloat16 use_flash_attention_2
    """.split()  # noqa: SIM905

ACTIVATION = "an activation of layers.hidden_units, named in hf_families.FAMILIES"
ROUTER = "a router of experts.route, named in hf_families.FAMILIES"
MAGNITUDE = "a magnitude in attention.yarn_magnitudes"
NEEDS = dict(
    hidden_act=ACTIVATION,
    hidden_activation=ACTIVATION,
    activation_function=ACTIVATION,
    swiglu_alpha=ACTIVATION,
    swiglu_limit=ACTIVATION,
    scale_attn_weights="a scale in attention.softmax_scale",
    scale_attn_by_inverse_layer_idx="an attention that knows the number of its layer",
    mscale_all_dim=MAGNITUDE,
    attention_factor=MAGNITUDE,
    rope_type="frequencies in attention.rope_frequencies",
    partial_rotary_factor="rotary positions in a part of each head, in attention.rope",
    use_bidirectional_attention="an attention in which tokens see later ones",
    add_cross_attention="an encoder",
    scoring_func=ROUTER,
    topk_method=ROUTER,
    moe_layer_freq="hf_config.read_layers to read this key",
)
"""{key: what Trifold would need for a value of it that cannot be converted}."""

# ---- from config.json


class Keys:
    """The keys of a config.json, removed as they are read, and the problems found with them."""

    REQUIRED = object()

    def __init__(self, hf: dict):
        self.unread = {name: x for name, x in hf.items() if x is not None and name not in IGNORED}
        self.all, self.problems = hf, []

    def take(self, name: str, default=REQUIRED, null=None):
        """The value of a key, or `default` if it is absent, which is a problem without a default.
        null: the value that a null stands for; by default a null counts as absent."""
        is_null = null is not None and name in self.all and self.all[name] is None
        value = self.unread.pop(name, null if is_null else default)
        if value is self.REQUIRED:
            fix = "get the complete file from the model's publisher"
            self.add_problem(f"config.json has no {name}", fix)
            return 1  # a number, so that reading continues and finds the next problem
        return value

    def require(self, name: str, value, supported):
        """Note a problem unless the value of that name is the supported one."""
        if value != supported:
            what = f"config.json: {name}={value!r}, but only {supported!r} can be converted"
            fix = "convert another model"
            if need := NEEDS.get(name.split(".")[-1]):
                fix += f": this one needs {need} (see docs/extending.md)"
            self.add_problem(what, fix)

    def add_problem(self, what: str, fix: str):
        self.problems.append(Problem(what, fix))


def read_model(hf: dict) -> Model:
    """The Model of a config.json.  Raises UserError DATA with all keys that cannot be converted."""
    name = hf.get("model_type")
    if not isinstance(name, str) or name not in hf_families.FAMILIES:
        what = f"config.json: model_type={name!r} is none of {or_list(hf_families.FAMILIES)}"
        fix = "convert a model of one of these families"
        if name == "gemma3":
            fix = "save its language model alone, with its text_config as config.json (gemma3_text)"
        raise UserError(DATA, what, fix)
    if quantized := hf.get("quantization_config"):
        what = f"config.json: quantization_config={quantized!r:.200} is not read"
        fix = "convert the weights to bfloat16 first, and delete this key"
        if "mxfp4" in str(quantized):
            fix += ": transformers loads them so with Mxfp4Config(dequantize=True), and saves them"
        raise UserError(DATA, what, fix)
    keys = Keys(hf)
    if name == "qwen3_moe" and "num_local_experts" in keys.unread:  # transformers 5's name for it
        keys.unread["num_experts"] = keys.unread.pop("num_local_experts")
    try:
        fields = read_fields(keys, name)
        m = Model(**{field: check_type(field, x, keys) for field, x in fields.items()})
    except (TypeError, ValueError, AttributeError, ArithmeticError) as e:
        what = f"config.json cannot be read as {name}: {type(e).__name__}: {e}"
        raise UserError(DATA, what, "fetch it again") from None
    for key, x in keys.unread.items():
        if x is not False:
            fix = "if it changes nothing, delete it from config.json in a copy of the folder"
            keys.add_problem(f"config.json: {key}={x!r} is not known for {name}", fix)
    raise_problems(DATA, keys.problems)
    unused = set(checks.unused_fields(m)) - checks.MAY_BE_UNUSED  # if set, checks.check refuses m
    return replace(m, **{field: getattr(Model(), field) for field in unused})


def read_fields(keys: Keys, name: str) -> dict:
    """The fields of Model: those in the family's table, and those that depend on several keys."""
    family = hf_families.FAMILIES[name]
    fields = family.fixed | {field: keys.take(key, *rest) for key, field, *rest in family.keys}
    for key, value in family.supported.items():
        keys.require(key, keys.take(key, value), value)
    N, E = fields["n_layers"], fields.get("n_experts", 0)
    if type(N) is not int or not 0 < N <= 10_000:  # as in checks.py; lists of all layers follow
        raise ValueError(f"a number of layers from 1 to 10000 is needed, not {N!r:.40}")
    if type(E) is int and N * E > 10**6:  # each has tensors of its own, which are listed
        raise ValueError(f"at most 1000000 experts in all layers are read, not {N * E!r:.40}")
    fields |= read_sizes(keys, name, fields) | read_layers(keys, name, fields)
    return fields | (read_rope(keys, name) if family.rope_theta else {})


def check_type(field: str, x, keys: Keys):
    """x as a value of that field of Model.  If it has the wrong type, a problem is noted, and the
    field's default is returned."""
    kind = type(getattr(Model(), field))
    if kind is float and type(x) is int:
        return float(x)
    if type(x) is not kind:
        what = f"config.json: model.{field} would be {x!r}, no {kind.__name__}"
        keys.add_problem(what, "correct config.json")
        return getattr(Model(), field)
    return x


# ---- to config.json


def write_config(cfg: Config, dtype: str, end_id: int | None, start_id: int | None = None) -> dict:
    """The config.json of a run's model.  Raises UserError DATA if transformers has no such model.

    end_id: the token that ends a document.  start_id: the one that is put before a text.
    """
    m, name = cfg.model, likely_family(cfg.model)
    family = hf_families.FAMILIES[name]
    hf = dict(model_type=name, architectures=[family.architecture], torch_dtype=dtype)
    hf |= dict(bos_token_id=start_id, eos_token_id=end_id) | family.supported
    for key, field, *_ in family.keys:
        x = getattr(m, field)
        hf[key] = None if x == 0 and x is not False else x  # our 0 stands for "not set"
    hf |= write_sizes(m, name) | write_layers(m, name)
    hf |= write_rope(m, name, cfg.train.seq_len) if family.rope_theta else {}
    if name in WITH_LAYER_TYPES and not hf["sliding_window"]:
        del hf["sliding_window"]  # null is an error in gemma2, gemma3_text and gpt_oss
    ours, theirs = effective_fields(m), effective_fields(read_model(hf))
    differ = [n for n in ours | theirs if ours.get(n) != theirs.get(n)]
    has = f"but the {name} of transformers has"
    found = [f"model.{n} is {ours.get(n)}, {has} {theirs.get(n)}" for n in differ]
    fix = f"only models of {or_list(hf_families.FAMILIES)} can be exported"
    raise_problems(DATA, [Problem(what, fix) for what in found])
    return hf


def likely_family(m: Model) -> str:
    """The family of this model if it has one, which write_config checks."""
    moe, kinds = moe_layers(m), all_kinds(m)
    signs = dict(  # the first family whose sign is true is the one
        deepseek_v3=m.attention == "mla",
        gpt2=m.norm == "layer" or m.positions == "learned",
        gpt_oss=moe and m.attn_sinks,
        qwen3_moe=moe and m.qk_norm,
        mixtral=moe,
        gemma3_text=m.norm_offset and m.qk_norm,
        gemma2=m.norm_offset,
        olmo2=m.norm_place == "after",
        qwen3=m.qk_norm,
        qwen2=m.attn_bias and not m.attn_out_bias,
        # transformers loads no llama whose width is not a multiple of its heads.
        mistral=all("local" in kind for kind in kinds) or m.d_model % m.n_heads > 0,
    )
    return next((name for name, is_true in signs.items() if is_true), "llama")


def effective_fields(m: Model) -> dict:
    """The fields that have an effect in m; two models that agree in them are the same."""
    if m.rope_scaling == "none":  # then a rope_local_theta of 0 is rope_theta
        m = replace(m, rope_local_theta=m.rope_local_theta or m.rope_theta)
    m = replace(m, attn_width=m.attn_width or m.d_head + m.d_rope)  # d_rope is 0 without mla
    unused = {"pattern", "prefix", *checks.unused_fields(m)}
    if not m.yarn_mscale_all_dim:  # without it, yarn_mscale has no effect
        unused.add("yarn_mscale")
    rest = {name: x for name, x in asdict(m).items() if name not in unused}
    return rest | dict(layers=shortest_pattern(all_kinds(m)))


# Below, for each part that needs more than the family's table: how it is read, and how it is
# written.

# ---- sizes

ACTIVATIONS = dict(gelu="gelu", gelu_new="gelu_tanh", gelu_pytorch_tanh="gelu_tanh", relu2="relu2")


def read_sizes(keys: Keys, name: str, fields: dict) -> dict:
    """The fields of heads and feed-forwards that depend on others."""
    H, D = fields["n_heads"], fields["d_model"]
    if name == "deepseek_v3":
        keys.require("num_key_value_heads", fields["n_kv_heads"], H)
        keys.require("n_shared_experts", fields["n_shared"], max(1, fields["n_shared"]))
        keys.take("head_dim", None)  # transformers writes d_rope there
        return {}
    sizes = dict(n_kv_heads=fields.get("n_kv_heads") or H, d_head=fields.get("d_head") or D // H)
    if name == "gpt2":
        act = fields["activation"]
        supported = act if act in ACTIVATIONS else or_list(ACTIVATIONS)
        keys.require("activation_function", act, supported)
        keys.require("n_embd % n_head", D % H, 0)
        sizes |= dict(d_ff=fields["d_ff"] or 4 * D, activation=ACTIVATIONS.get(act, "gelu"))
    return sizes


def write_sizes(m: Model, name: str) -> dict:
    if name.startswith(("gemma", "gpt2")) and m.d_model % m.n_heads:
        # transformers (5.23) does not load it
        what = f"model.d_model={m.d_model} is no multiple of model.n_heads={m.n_heads}"
        fix = "this model cannot be exported; train one whose width is a multiple"
        raise UserError(DATA, f"{what}, as transformers demands of a {name}", fix)
    if name == "deepseek_v3" and m.n_experts == m.n_groups:
        # transformers (5.23) adds the two best scores of each group, and fails where there is one
        what = f"model.n_groups={m.n_groups} leaves one of model.n_experts={m.n_experts}"
        fix = "this model cannot be exported; train one with fewer groups"
        raise UserError(DATA, f"{what} in each group, and transformers demands two", fix)
    if name == "gpt2":
        names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
        return dict(activation_function=names.get(m.activation, "gelu_new"))
    if name.startswith("gemma"):
        return dict(query_pre_attn_scalar=m.attn_width or m.d_head)
    if name == "deepseek_v3":  # which needs numbers also where a model has no experts
        sizes = dict(n_routed_experts=m.n_experts or 1, n_shared_experts=m.n_shared or 1)
        return sizes | dict(moe_intermediate_size=m.d_expert or 1, num_key_value_heads=m.n_heads)
    return {}


# ---- kinds of layers

FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types
WITH_LAYER_TYPES = ("qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss")


def read_layers(keys: Keys, name: str, fields: dict) -> dict:
    """The fields prefix and pattern."""
    n_layers, moe = fields["n_layers"], []
    if name in ("mixtral", "gpt_oss"):
        moe = range(n_layers)
    if name == "deepseek_v3":
        moe = range(keys.take("first_k_dense_replace"), n_layers)
    if name == "qwen3_moe":
        every, dense = keys.take("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
        moe = [n for n in range(n_layers) if n not in dense and (n + 1) % every == 0]
    local = read_local_layers(keys, name, fields)
    kinds = [("moe" if n in moe else "dense") + "_local" * x for n, x in enumerate(local)]
    return shortest_pattern(kinds)


def read_local_layers(keys: Keys, name: str, fields: dict) -> list[bool]:
    """Whether each layer's queries see only a window."""
    n_layers, window = fields["n_layers"], fields.get("window", 0)
    if name.startswith("qwen") and not keys.take("use_sliding_window", False):
        window = 0
    elif name not in WITH_LAYER_TYPES and keys.all.get("sliding_window") == 0:
        what = "config.json: sliding_window=0 leaves no token to see"
        keys.add_problem(what, "correct config.json: null stands for no window")
    if name not in WITH_LAYER_TYPES:
        return [bool(window)] * n_layers
    if name.startswith("qwen"):
        first = keys.all.get("max_window_layers", 28)
        local = [bool(window) and n >= first for n in range(n_layers)]
    else:  # every second (gemma3: sixth) layer is not local
        period = keys.take("sliding_window_pattern", 6) if name == "gemma3_text" else 2
        local = [(n + 1) % period > 0 for n in range(n_layers)]
    types = keys.take("layer_types", [SLIDING if x else FULL for x in local])
    if len(types) != n_layers or set(types) - {FULL, SLIDING}:
        keys.require("layer_types", types, f"{n_layers} of {FULL} and {SLIDING}")
    elif SLIDING in types and not window:
        what = f"config.json: layer_types has {SLIDING}, but no sliding_window is set and used"
        keys.add_problem(what, "correct config.json")
    return [x == SLIDING for x in types]


def write_layers(m: Model, name: str) -> dict:
    kinds = all_kinds(m)
    dense = [n for n, kind in enumerate(kinds) if "dense" in kind]
    types = [SLIDING if "local" in kind else FULL for kind in kinds]
    hf = dict(layer_types=types) if name in WITH_LAYER_TYPES else {}
    if name.startswith("qwen"):
        hf |= dict(use_sliding_window=SLIDING in types)
    if name == "qwen3_moe":
        hf |= dict(mlp_only_layers=dense, decoder_sparse_step=1)
    if name == "deepseek_v3":
        hf |= dict(first_k_dense_replace=len(dense), num_nextn_predict_layers=0)
    return hf


def shortest_pattern(kinds: list[str]) -> dict:
    """The shortest model.prefix and model.pattern that give these kinds of layers."""

    def text(kinds):
        runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
        return ",".join(kind if n == 1 else f"{kind}*{n}" for kind, n in runs)

    n = len(kinds)
    splits = [(p + b, p) for p in range(n) for b in range(1, n - p + 1) if (n - p) % b == 0]
    for end, p in sorted(splits):
        block = kinds[p:end]
        if kinds[p:] == block * ((n - p) // len(block)):
            return dict(prefix=text(kinds[:p]), pattern=text(block))


# ---- rotary positions

# For each model.rope_scaling: its keys for model.rope_low and rope_high, and their usual values.
SCALINGS = dict(
    linear=dict(),
    llama3=dict(low_freq_factor=1, high_freq_factor=4),
    yarn=dict(beta_slow=1, beta_fast=32),
)


def read_rope(keys: Keys, name: str) -> dict:
    """The fields rope_* and yarn_*, from rope_parameters of transformers 5 or the older keys."""
    family = hf_families.FAMILIES[name]
    theta = keys.take("rope_theta", family.rope_theta)
    new, old = keys.take("rope_parameters", {}), keys.take("rope_scaling", {})
    fields = {}
    if name == "gemma3_text":  # its local layers have rotary settings of their own
        local = dict(rope_theta=keys.take("rope_local_base_freq", 1e4)) | (new.get(SLIDING) or {})
        new, old = dict(rope_theta=theta) | (new.get(FULL) or {}) | old, {}
        if local != new:
            fields = dict(rope_local_theta=local["rope_theta"])
            kind = local.get("rope_type", "default")
            keys.require("rope_parameters.sliding_attention.rope_type", kind, "default")
    rope = {key: x for key, x in (old or new or family.rope_scaling).items() if x is not None}
    fields |= dict(rope_theta=rope.pop("rope_theta", theta))
    rotated = keys.take("partial_rotary_factor", 1)
    keys.require("partial_rotary_factor", rope.pop("partial_rotary_factor", rotated), 1)
    old_kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or old_kind or "default"
    if kind not in ("default", *SCALINGS):
        keys.require("rope_type", kind, f"default, {or_list(SCALINGS)}")
        return fields
    if kind != "default":
        fields |= read_scaling(keys, name, kind, rope)
    for key, x in rope.items():
        keys.require(f"rope_parameters.{key}", x, None)
    return fields


def read_scaling(keys: Keys, name: str, kind: str, rope: dict) -> dict:
    """The fields of a kind of model.rope_scaling.  Removes from `rope` the keys that it reads."""
    longest = keys.all.get("max_position_embeddings")
    original = rope.pop("original_max_position_embeddings", longest)
    if name != "gemma3_text":  # transformers ignores it there, as the settings are by kind of layer
        original = keys.all.get("original_max_position_embeddings") or original
    factor, usual = rope.pop("factor", None), SCALINGS[kind]
    if not longest and (factor is None or (usual and not original)):
        longest = keys.take("max_position_embeddings")  # absent, which is noted as a problem
    original = original or longest
    fields = dict(rope_scaling=kind, rope_factor=longest / original if factor is None else factor)
    if usual:
        low, high = (rope.pop(key, 0) or x for key, x in usual.items())
        fields |= dict(rope_original=original, rope_low=low, rope_high=high)
    if kind == "yarn":
        mscale, all_dim = rope.pop("mscale", 0), rope.pop("mscale_all_dim", 0)
        if name == "deepseek_v3":  # only this family scales attention scores by them
            fields |= dict(yarn_mscale=mscale, yarn_mscale_all_dim=all_dim)
        else:
            keys.require("mscale_all_dim", all_dim, 0)
        ours = attention.yarn_magnitudes(replace(Model(), **fields))[0]
        given = rope.pop("attention_factor", ours)
        keys.require("attention_factor", ours if abs(given - ours) <= 1e-6 else given, ours)
        truncate = rope.pop("truncate", True)
        if name == "gemma3_text" and truncate is False:
            what = "config.json: truncate=False has no effect in transformers' gemma3_text"
            keys.add_problem(what, "delete it from config.json: Trifold truncates then too")
        fields |= dict(yarn_truncate=truncate)
    return fields


def write_rope(m: Model, name: str, seq_len: int) -> dict:
    """The keys of rotary positions, for transformers 5 and for 4."""
    rope, longest = dict(rope_type="default", rope_theta=m.rope_theta), seq_len
    if m.rope_scaling != "none":
        rope |= dict(rope_type=m.rope_scaling, factor=m.rope_factor)
        rope |= zip(SCALINGS[m.rope_scaling], (m.rope_low, m.rope_high), strict=False)
    if m.rope_scaling in ("llama3", "yarn"):
        rope |= dict(original_max_position_embeddings=m.rope_original)
        longest = max(longest, int(m.rope_original * m.rope_factor))
    if m.rope_scaling == "yarn" and name != "gemma3_text":  # there it has no effect
        rope |= dict(truncate=m.yarn_truncate)
    if m.rope_scaling == "yarn" and name == "deepseek_v3":
        rope |= dict(mscale=m.yarn_mscale, mscale_all_dim=m.yarn_mscale_all_dim)
    keys = dict(rope_parameters=rope, rope_theta=m.rope_theta, max_position_embeddings=longest)
    if name == "deepseek_v3":
        keys |= dict(rope_interleave=True)
    if m.rope_scaling != "none":
        keys |= dict(rope_scaling=rope)
    if name == "gemma3_text":  # its local layers have rotary settings of their own
        theta = m.rope_local_theta
        local = dict(rope_type="default", rope_theta=theta) if theta else rope
        keys |= dict(rope_parameters={FULL: rope, SLIDING: local})
        keys |= dict(rope_local_base_freq=local["rope_theta"])
    return keys
