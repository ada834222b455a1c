"""Every check that needs no device, of a config and of what a run has written; and `resolve`, which
fits a config to the devices.

A check of a config yields Problems.  Names in the tables of other modules (model.attention,
optim.name, optim.schedule) are checked by those modules, because this one does not import jax.
"""

import math
import re
from dataclasses import replace

from architecture import Model, all_kinds, layer_kinds, n_blocks
from config import SECTIONS, Config, settings
from errors import USAGE, Problem, UserError, or_list, raise_problems
from parsers import is_wrong_address, read_ramp, read_sets, read_skip, read_stages, read_tasks


def check(cfg: Config) -> Config:
    """Return cfg, or raise a UserError with all its problems.  A mesh axis may be -1.

    With train.batch_ramp, the cfg returned has its last size as train.batch_size.
    """
    cfg = replace(cfg, train=replace(cfg.train, batch_size=batch_sizes(cfg)[-1]))
    bad_patterns = [*pattern_problems(cfg)]
    problems = [*range_problems(cfg), *bad_patterns]
    if not bad_patterns:  # these checks parse the patterns
        problems += [*divisor_problems(cfg), *pipeline_problems(cfg)]
        problems += [*no_effect_problems(cfg), *model_problems(cfg), *size_problems(cfg)]
    problems += other_problems(cfg)
    raise_problems(USAGE, problems)
    return cfg


AUTOMATIC = dict(microbatches=0, remat="auto", unroll=0)
"""The values of settings of section train that `resolve` replaces."""


def resolve(
    cfg: Config, n_devices: int, rows: int | None = None, on_cpu: bool = False, slices: int = 1
) -> Config:
    """Replace a mesh axis of -1, and microbatches, remat and unroll where they are automatic, by
    their values on n_devices devices, and check the result.

    slices: the number of TPU slices or GPU nodes, over which mesh.dp is split unless it has the
    form SLICESxRANKS.  rows: for scripts that do not train; the batch becomes about this many
    sequences, a multiple of dp * pp, and settings that only training needs are reset.

    Raises UserError USAGE.
    """
    known = math.prod(size for size in cfg.mesh.sizes if size != -1)
    dp, pp, tp = (max(1, n_devices // known) if size == -1 else size for size in cfg.mesh.sizes)
    slices = cfg.mesh.slices if isinstance(cfg.mesh.dp, str) else slices
    if dp % slices:
        what = f"mesh.dp={dp} must be a multiple of the {slices} slices or nodes of the devices: "
        what += "pp and tp cannot use the slow network between them"
        fix = f"set --mesh.dp to a multiple of {slices}, and --mesh.pp and --mesh.tp to less, or "
        fix += f"on GPUs --mesh.dp 1x{dp} to let every axis use that network"
        raise UserError(USAGE, what, fix)
    # 1x8 stays: 8 would be split over nodes.
    given = cfg.mesh.dp if isinstance(cfg.mesh.dp, str) else slice_ranks(slices, dp // slices)
    cfg = replace(cfg, mesh=replace(cfg.mesh, dp=given, pp=pp, tp=tp))
    if rows is not None:
        batch_size = max(1, rows // (dp * pp)) * dp * pp
        batch = dict(batch_size=batch_size, batch_ramp="", grad_accum=1, microbatches=0)
        batch |= dict(remat="layer", unroll=1)
        mesh = replace(cfg.mesh, schedule="gpipe", virtual_stages=1)
        cfg = replace(cfg, train=replace(cfg.train, **batch), mesh=mesh)
    cfg = check(cfg)
    t, chosen = cfg.train, cpu_choices(cfg) if on_cpu else accelerator_choices(cfg)
    chosen = {name: x for name, x in chosen.items() if getattr(t, name) == AUTOMATIC[name]}
    return replace(cfg, train=replace(t, **chosen))


def slice_ranks(slices: int, ranks: int) -> int | str:
    """The mesh.dp of so many slices with so many ranks each."""
    return f"{slices}x{ranks}" if slices > 1 else ranks


def accelerator_choices(cfg: Config) -> dict:
    """The automatic settings of section train for anything but a CPU."""
    dp, pp, _ = cfg.mesh.sizes
    rows = math.gcd(*batch_sizes(cfg)) // (cfg.train.grad_accum * dp)
    counts = range(pp, 4 * pp + 1, pp) if pp > 1 else [1]
    return dict(microbatches=max(n for n in counts if rows % n == 0), remat="layer", unroll=1)


CPU_TOKENS = 512
"""Tokens of a microbatch on a CPU: its arrays fit caches, and XLA asks for fewer new pages.
Updates of models of 5, 2 and 0.8 million parameters took 0.99, 0.94 and 0.74 times as long as with
twice as many tokens."""


def cpu_choices(cfg: Config) -> dict:
    """The automatic settings of section train for a CPU, whose programs depend more on caches and
    copies than an accelerator's.

    With 512 tokens a microbatch, a model of 5 million parameters took 1.18 times as long with
    remat=layer, and 1.12 times with a loop over layers.  With both, the demo in two stages took
    1.08 to 1.13 times as long; with 8 layers 1.14 times, and with 24 layers 1.07 times.
    """
    m, t, mesh = cfg.model, cfg.train, cfg.mesh
    dp, pp, _ = mesh.sizes
    sizes, share = batch_sizes(cfg), t.grad_accum * dp
    rows = max(sizes) // share  # with train.batch_ramp, at its largest
    counts = [n for n in divisors(math.gcd(*sizes) // share) if n % pp == 0]
    small = [n for n in counts if rows // n * t.seq_len <= CPU_TOKENS]
    microbatches = t.microbatches or min(small, default=max(counts))
    # In a pipeline all microbatches may wait for their backward pass; all devices share the memory.
    waiting_tokens = dp * t.seq_len * (rows if pp > 1 else rows // microbatches)
    width = max(m.d_ff, m.n_active * m.d_expert)
    inputs = 16 + (m.n_active if m.n_experts else 0)
    kept_bytes = 4 * waiting_tokens * m.n_layers * (inputs * m.d_model + 4 * width)
    layer_flops = 6 * 12 * m.d_model**2 * t.batch_size * t.seq_len
    best_remat = "none" if kept_bytes <= 2**30 else "layer"
    remat = best_remat if t.remat == "auto" else t.remat
    # A loop compiles sooner, and compiling is most of a tiny model's run.  Without a loop XLA
    # recomputes layers too early: with remat=layer and 4 layers it then needs twice the memory.
    layers = n_blocks(m) * len(layer_kinds(m.pattern)) // (pp * mesh.virtual_stages)
    unroll = layers if remat == "none" and layers <= 12 and layer_flops > 5e8 else 1
    return dict(microbatches=microbatches, remat=remat, unroll=unroll)


def cpu_reasons(cfg: Config) -> dict:
    """Why `cpu_choices` has chosen these values, in a few words each."""
    t, fits = cfg.train, "at most" if cfg.train.remat == "none" else "more than"
    loop = "a loop over layers compiles sooner and needs less memory"
    return dict(
        microbatches=f"at most {CPU_TOKENS} tokens in each, or as few as the batch allows",
        remat=f"all activations take {fits} 1 GiB",
        unroll="a loop over layers would copy their arrays" if t.unroll > 1 else loop,
    )


# ---- ranges

INT32_MAX = 2**31 - 1
MAY_BE_MINUS_1 = {"mesh.dp", "mesh.pp", "mesh.tp", "train.eval_batches", "data.end_id"}
MAY_BE_MINUS_1 |= {"run.process_id"}  # without run.coordinator

LIMITS = {
    (1, INT32_MAX): (
        "run.start_timeout mesh.dp mesh.pp mesh.tp mesh.virtual_stages log.every "
        "model.vocab_size model.rope_original train.seq_len train.batch_size train.grad_accum "
        "train.steps train.eval_batches train.sample_tokens train.loss_chunk"
    ),
    (1, 2**20): (
        "model.d_model model.d_ff model.n_heads model.n_kv_heads "
        "model.n_active model.n_groups model.n_active_groups"
    ),
    (0, 2**20): (
        "model.n_experts model.n_shared model.d_expert model.q_rank model.kv_rank model.d_value"
    ),
    (1, 2**14): "model.d_head",  # `attention.rope` makes a matrix of this width
    (0, 2**14): "model.d_rope",
    (1, math.inf): "model.n_layers",  # pattern_problems has its limit
    (1.0, 1e6): "model.rope_factor",
    (1e-6, 1e6): "model.rope_low model.rope_high",
    (0, 2**32 - 1): "run.seed",
    (0.0, 100.0): "optim.lr",
    (1.0, 1e12): "model.rope_theta",
    (0.0, 1e12): "model.rope_local_theta",
    (1e-12, 0.1): "model.norm_eps",
    (0.0, 0.99): "train.dropout",
    (0.0, 0.9999999): "optim.ema optim.b1 optim.b2 optim.muon_momentum",
    (0.0, 1.0): "train.z_loss train.bias_rate optim.decay_ratio optim.min_lr_ratio",
    (0.0, 10.0): "train.balance_loss optim.weight_decay",
    (0.0, 1000.0): "train.capacity_factor",
    (1e-30, 1.0): "optim.eps",
    (0.0, 1e4): "optim.muon_lr_ratio",
    (1e-9, 1e9): "optim.clip_norm",
    (1, 1000): "data.prefetch",
    (2, INT32_MAX): "checkpoint.keep",
}
"""{(lowest, highest): the settings that may have these values, and all between}"""
RANGES = {name: limits for limits, names in LIMITS.items() for name in names.split()}
OTHER_RANGES = {int: (0, INT32_MAX), float: (0.0, 1e6)}
"""The limits of all other numbers, by type."""


def range_problems(cfg: Config):
    for name, x in settings(cfg).items():
        auto, limits = name in MAY_BE_MINUS_1, RANGES.get(name, OTHER_RANGES.get(type(x)))
        if limits is None or isinstance(x, str):  # a mesh.dp of slices x ranks, both at least 1
            continue
        low, high = limits
        if not (low <= x <= high or (x == -1 and auto)):  # "not", so that NaN is a problem too
            good = f"between {low} and {high}" if high < 2**14 or x > high else f"at least {low}"
            fix = f"set --{name} to a value in this range{', or to -1' if auto else ''}"
            yield Problem(f"{name}={x} must be {good}", fix)


def size_problems(cfg: Config):
    """Layers that are too wide together, because XLA aborts where an array has 2**63 bytes."""
    m = cfg.model
    heads = m.n_heads * max(m.d_head, m.d_rope, m.d_value)
    experts = m.d_expert * max(m.n_experts, m.n_shared)
    n = m.n_layers * max(m.d_model, m.q_rank, m.kv_rank) * max(heads, 2 * m.d_ff, 2 * experts)
    if n > 2**53:
        what = f"a weight of all layers together may have {n:,} numbers, more than {2**53:,}"
        yield Problem(what, "set the model's widths, n_layers and n_experts to less")


# ---- layer patterns and divisors


def pattern_problems(cfg: Config):
    """Patterns that do not parse, or whose layers do not add up to model.n_layers; and too many
    layers, because the checks after this one make a list of all layers."""
    m, fix = cfg.model, "give kinds with counts, such as dense or dense*5,moe"
    if m.n_layers > 10_000:
        what = f"model.n_layers={m.n_layers} must be at most 10000"
        yield Problem(what, "set --model.n_layers to 10000 or less")
        return
    kinds = {}
    for name in ("prefix", "pattern"):
        try:
            kinds[name] = layer_kinds(getattr(m, name))
        except ValueError as e:
            yield Problem(f"model.{name}={getattr(m, name)!r}: {e}", fix)
    if kinds.get("pattern") == []:
        yield Problem("model.pattern is empty", fix)
    elif len(kinds) == 2:
        n_prefix, n_pattern = len(kinds["prefix"]), len(kinds["pattern"])
        n_left = m.n_layers - n_prefix
        if n_left <= 0 or n_left % n_pattern:
            what = f"model.n_layers={m.n_layers} must be a multiple of {n_pattern}, "
            what += "model.pattern's layers"
            what += f", plus the {n_prefix} of model.prefix" if n_prefix else ""
            nearest = n_prefix + max(1, round(n_left / n_pattern)) * n_pattern
            yield Problem(what, f"set --model.n_layers {nearest}")


def divisors(n: int) -> list[int]:
    """All divisors, in order.  Above 10**8 some may be missing, to keep the time below 1 ms."""
    small = [d for d in range(1, min(math.isqrt(n), 10**4) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def has_layer(m: Model, word: str) -> bool:
    """Whether the kind of a layer has this word: dense, moe or local."""
    return any(word in kind for kind in all_kinds(m))


def sizes_to_divide(cfg: Config) -> dict[str, dict[str, int]]:
    """{axis: {name: size}}: each mesh axis must divide these sizes.  A size of 0 is not set."""
    m, t = cfg.model, cfg.train
    n = n_blocks(m)
    blocks = "model.n_layers" if n == m.n_layers else "the number of model.pattern's blocks"
    dp = {"model.d_model": m.d_model}
    tp = {"model.n_heads": m.n_heads, "train.seq_len": t.seq_len}
    tp |= {"the embedding's rows (a multiple of 128)": m.vocab_rows}
    if m.attention == "mla":
        dp |= {"model.kv_rank": m.kv_rank, "model.q_rank": m.q_rank}
    else:
        tp |= {"model.n_kv_heads": m.n_kv_heads}
    if has_layer(m, "dense"):
        tp |= {"model.d_ff": m.d_ff}
    if has_layer(m, "moe"):
        tp |= {"model.d_expert": m.d_expert}
        dp |= {"model.n_experts": m.n_experts} if cfg.mesh.experts == "alltoall" else {}
    return dict(dp=dp, pp={blocks: n, "train.microbatches": t.microbatches}, tp=tp)


def divisor_problems(cfg: Config):
    """Sizes that do not divide: at most one problem per mesh axis, then heads, RoPE and batch."""
    m = cfg.model
    for axis, sizes in sizes_to_divide(cfg).items():
        n, given = cfg.mesh.shape[axis], getattr(cfg.mesh, axis)
        sizes = {name: x for name, x in sizes.items() if x > 0}
        wrong = [f"{name}={x}" for name, x in sizes.items() if n > 1 and x % n]
        if wrong:
            size = n if n == given else f"{given}: {n}"
            what = f"mesh.{axis}={size} must divide {' and '.join(wrong)}"
            slices = f"{cfg.mesh.slices}x" if size != n else ""
            sizes = [f"{slices}{x}" for x in divisors(math.gcd(*sizes.values()))]
            # The config.json of a run has the number that was chosen for its own mesh.
            other = "set --train.microbatches 0, or " * wrong[0].startswith("train.microbatches=")
            yield Problem(what, f"{other}set --mesh.{axis} to {or_list(sizes)}")
    if m.attention == "gqa" and min(m.n_heads, m.n_kv_heads) > 0 and m.n_heads % m.n_kv_heads:
        what = f"model.n_kv_heads={m.n_kv_heads} must divide model.n_heads={m.n_heads}"
        yield Problem(what, f"set --model.n_kv_heads to {or_list(divisors(m.n_heads))}")
    rotated = "d_rope" if m.attention == "mla" else "d_head"
    width = getattr(m, rotated)
    if m.positions == "rope" and width % 2:
        what = f"model.{rotated}={width} must be even: RoPE rotates pairs of elements"
        yield Problem(what, f"set --model.{rotated} to {width + 1}")
    yield from batch_problems(cfg)


def batch_sizes(cfg: Config) -> list[int]:
    """Sequences in an update, in the order of train.batch_ramp; if that cannot be read, which
    other_problems reports, train.batch_size."""
    t = cfg.train
    try:
        return [*read_ramp(t.batch_ramp, t.batch_size).values()]
    except ValueError:
        return [t.batch_size]


def batch_problems(cfg: Config):
    """A batch that does not divide into accumulation steps, dp ranks and microbatches."""
    t = cfg.train
    dp, pp, _ = (max(1, size) for size in cfg.mesh.sizes)
    factors, other_pp = {"train.grad_accum": t.grad_accum}, 1
    in_slice = max(1, cfg.mesh.shape["dp"])
    if not any(x % in_slice for x in sizes_to_divide(cfg)["dp"].values()):  # else dp is reported
        factors["mesh.dp"] = dp
    if t.microbatches:
        factors["train.microbatches"] = t.microbatches
    elif n_blocks(cfg.model) % pp == 0:
        factors["mesh.pp"] = pp
    else:  # This pp is reported already.  The suggested batch fits each pp that may replace it.
        other_pp = n_blocks(cfg.model)
    parts = math.prod(factors.values())
    for size in dict.fromkeys(x for x in batch_sizes(cfg) if parts > 0 and x % parts):
        what = f"{'*'.join(factors)} = {'*'.join(map(str, factors.values()))} = {parts}"
        nearest = max(1, round(size / parts / other_pp)) * parts * other_pp
        fix = f"set --train.batch_size {nearest}"
        if t.batch_ramp:
            fix = f"put {nearest} in the place of {size} in --train.batch_ramp"
        rows, others = math.gcd(*batch_sizes(cfg)), parts * other_pp // t.grad_accum
        if rows % others == 0:
            n = math.gcd(t.grad_accum, rows // others)
            fix = f"set --train.grad_accum {n}, which keeps the batch, or {fix}"
        fix += ", or change --train.microbatches" if t.microbatches else ""
        name = f"train.batch_ramp={t.batch_ramp}'s " if t.batch_ramp else "train.batch_size="
        yield Problem(f"{what} must divide {name}{size}", fix)


def pipeline_problems(cfg: Config):
    """Settings of mesh.schedule and train.remat that do not fit the number of stages."""
    mesh, pp = cfg.mesh, max(1, cfg.mesh.pp)
    v, blocks = mesh.virtual_stages, n_blocks(cfg.model)
    interleaved = mesh.schedule == "interleaved"
    plain = "--mesh.schedule 1f1b --mesh.virtual_stages 1"
    if interleaved and (v < 2 or mesh.pp == 1):
        what = f"mesh.schedule=interleaved, but mesh.virtual_stages={v} and mesh.pp={mesh.pp}"
        yield Problem(what, f"set both to 2 or more, or use {plain}")
    elif v > 1 and not interleaved:
        what = f"mesh.virtual_stages={v} has no effect: mesh.schedule={mesh.schedule}"
        fits = mesh.pp != 1 and blocks % (pp * v) == 0
        fix = "set --mesh.schedule interleaved, or" if fits else "set"
        yield Problem(what, f"{fix} --mesh.virtual_stages 1")
    elif v > 1 and blocks % pp == 0 and blocks % (pp * v):
        what = f"mesh.pp*mesh.virtual_stages = {pp}*{v} = {pp * v} must divide the {blocks}"
        what += " layers" if blocks == cfg.model.n_layers else " blocks of layers"
        larger = divisors(blocks // pp)[1:]
        fix = f"set --mesh.virtual_stages to {or_list(larger)}, or " if larger else ""
        yield Problem(what, f"{fix}use {plain}")
    if cfg.train.remat == "offload" and pp > 1:
        what = f"train.remat=offload needs mesh.pp=1, but mesh.pp={pp}"
        yield Problem(what, "use --train.remat layer")


# ---- the architecture


def unused_fields(m: Model) -> dict[str, str]:
    """{field: why it has no effect}"""
    thetas, ramp = "rope_theta rope_local_theta", "rope_original rope_low rope_high"
    gqa = "n_kv_heads qk_norm qk_norm_width attn_sinks"
    yarn = "yarn_mscale yarn_mscale_all_dim yarn_truncate"
    local = has_layer(m, "local")
    scaling = m.rope_scaling if m.positions == "rope" else "none"
    experts = "n_experts n_active n_shared d_expert norm_scores score_scale router router_bias"
    experts += " router_logit_bias expert_bias n_groups n_active_groups"
    table = [  # fields, whether they are unused, why
        (gqa, m.attention == "mla", "model.attention=mla"),
        ("qk_norm_width", not m.qk_norm, "model.qk_norm=False"),
        ("q_rank kv_rank d_rope d_value", m.attention == "gqa", "model.attention=gqa"),
        (f"{thetas} rope_scaling", m.positions != "rope", f"model.positions={m.positions}"),
        ("attn_out_bias", not m.attn_bias or m.attention == "mla", "no projection has biases"),
        ("rope_factor", scaling == "none", "RoPE is not scaled"),
        (ramp, scaling in ("none", "linear"), "rope_scaling is neither llama3 nor yarn"),
        (yarn, scaling != "yarn", "rope_scaling is not yarn"),
        ("max_positions", m.positions != "learned", f"model.positions={m.positions}"),
        ("window rope_local_theta", not local, "no layer is dense_local or moe_local"),
        ("d_ff mlp_bias", not has_layer(m, "dense"), "no layer is dense"),
        (experts, not has_layer(m, "moe"), "no layer is moe"),
        ("n_active_groups", m.n_groups == 1, "model.n_groups=1"),
    ]
    return {name: why for names, unused, why in table if unused for name in names.split()}


# Not reported: presets set these, and a flag that makes them unused need not unset them.
MAY_BE_UNUSED = {"n_kv_heads", "d_ff", "mlp_bias"}
OF_MUON = "muon_momentum muon_lr_ratio"
UNUSED_BY = dict(adamw=OF_MUON, lion=f"eps {OF_MUON}", muon="")
"""{optim.name: the settings of optim that it does not use}"""
ONLY_MOE = "train.balance_loss", "train.bias_rate", "train.capacity_factor", "mesh.experts"
"""Settings of other sections that only moe layers use."""


def no_effect_problems(cfg: Config):
    """Settings that were changed from their defaults, but have no effect."""
    m, o, given, usual = cfg.model, cfg.optim, settings(cfg), settings(Config())
    unused = {f"model.{n}": why for n, why in unused_fields(m).items() if n not in MAY_BE_UNUSED}
    if not has_layer(m, "moe"):
        unused |= dict.fromkeys(ONLY_MOE, "no layer is moe")
    elif not m.router_bias:
        unused["train.bias_rate"] = "model.router_bias=False"
    unused |= {f"optim.{n}": f"optim.name={o.name}" for n in UNUSED_BY.get(o.name, "").split()}
    for name, why in unused.items():
        if given[name] != usual[name]:
            fix = f"leave --{name} out, or set it to {usual[name]} if a preset or file has set it"
            yield Problem(f"{name}={given[name]} has no effect: {why}", fix)


def model_problems(cfg: Config):
    """Settings of the architecture that are missing or contradict each other."""
    m, t = cfg.model, cfg.train
    if has_layer(m, "moe"):
        yield from moe_problems(m)
    if has_layer(m, "local"):
        yield from missing_problems(m, ["window"], "there are local layers")
    if m.attention == "mla":
        yield from missing_problems(m, ["kv_rank", "d_rope", "d_value"], "model.attention=mla")
    if m.positions == "learned" and m.max_positions < t.seq_len:
        what = f"model.max_positions={m.max_positions} is below train.seq_len={t.seq_len}"
        fix = f"set --train.seq_len (a script's --seq_len) to at most {m.max_positions}"
        fix += f", or in training --model.max_positions to {t.seq_len} or more"
        yield Problem(what, fix)
    if cfg.data.end_id >= m.vocab_size:
        what = f"data.end_id={cfg.data.end_id} must be below model.vocab_size={m.vocab_size}"
        yield Problem(what, "set --data.end_id to a token id")
    if m.rope_scaling != "none" and m.rope_low >= m.rope_high:
        what = f"model.rope_low={m.rope_low} must be below model.rope_high={m.rope_high}"
        yield Problem(what, "set them to 1 and 4 (Llama 3.1), or to 1 and 32 (YaRN)")
    if m.rope_scaling == "yarn" and m.rope_theta <= 1:  # its logarithm is a divisor
        what = f"model.rope_theta={m.rope_theta} must be above 1 with rope_scaling=yarn"
        yield Problem(what, "set --model.rope_theta 10000, or as the model was trained with")


def moe_problems(m: Model):
    """Settings of moe layers that are missing or contradict each other."""
    yield from missing_problems(m, ["n_experts", "d_expert"], "there are moe layers")
    if m.n_experts <= 0:
        return
    n_groups, n_active_groups = max(1, m.n_groups), max(1, m.n_active_groups)
    n_used = min(n_active_groups, n_groups)
    n_choices = m.n_experts // n_groups * n_used
    if m.n_experts % n_groups:
        what = f"model.n_groups={n_groups} must divide model.n_experts={m.n_experts}"
        sizes = divisors(m.n_experts)
        sizes = [n for n in sizes if n >= n_active_groups] or sizes
        yield Problem(what, f"set --model.n_groups to {or_list(sizes)}")
    elif n_active_groups > n_groups > 1:
        what = f"model.n_active_groups={n_active_groups} is more than model.n_groups={n_groups}"
        yield Problem(what, f"set --model.n_active_groups to at most {n_groups}")
    elif m.n_active > n_choices:
        what = f"model.n_active={m.n_active} is more than the {n_choices} experts"
        what += f" of {n_used} of {n_groups} groups"
        yield Problem(what, f"set --model.n_active to {n_choices} or less")


def missing_problems(m: Model, names: list[str], why: str):
    for name in names:
        if not getattr(m, name):
            yield Problem(f"model.{name}=0, but {why}", f"set --model.{name} above 0")


# ---- everything else


def other_problems(cfg: Config):
    r, t = cfg.run, cfg.train
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", r.name) or r.name.startswith("."):
        allowed = "1 to 64 letters, digits, '.', '_' or '-', not starting with '.'"
        what = f"run.name={r.name!r} must be {allowed}"
        yield Problem(what, "choose a plain --run.name; folders belong in --run.dir")
    if unknown := [name for name in r.accept if name not in settings(cfg)]:
        what = f"run.accept names {or_list(unknown)}, which is no setting"
        yield Problem(what, "name settings as their flags do, such as --run.accept optim.lr")
    if cfg.rollback < -1:
        what = f"rollback={cfg.rollback} must be an update of the run, 0 or more"
        yield Problem(what, "correct --rollback, or leave it out")
    starts = dict(fresh=cfg.fresh, eval_only=cfg.eval_only, rollback=cfg.rollback >= 0)
    if len(given := [f"--{name}" for name, is_given in starts.items() if is_given]) > 1:
        yield Problem(f"{' and '.join(given)} exclude each other", "give one of them")
    for name in ("data.cache", "run.compile_cache"):
        if "://" in (folder := settings(cfg)[name]):
            what = f"{name}={folder!r} must be a local folder"
            yield Problem(what, f"leave --{name} out, or name a folder on this host's disk")
    if (n_auto := cfg.mesh.sizes.count(-1)) > 1:
        what = f"mesh: {n_auto} axes are -1, at most one may be"
        yield Problem(what, "set all but one of --mesh.dp --mesh.pp --mesh.tp")
    first, n = t.profile
    if t.profile != (0, 0) and not (0 < first < first + n <= t.steps + 1):
        what = f"train.profile={first} {n} must be updates between 1 and train.steps={t.steps}"
        yield Problem(what, "give the number of the first update and how many to trace, or 0 0")
    if r.start_with != "weights" and not r.start_from:
        what = f"run.start_with={r.start_with} has no effect without --run.start_from"
        yield Problem(what, "name the run to start from, as --run.start_from runs/NAME@STEP")
    yield from text_problems(cfg)
    port = re.fullmatch(r"(?:[^:]+|\[.+\]):(\d{1,5})", r.coordinator)
    complete = port and 0 < int(port[1]) < 65536 and 0 <= r.process_id < r.num_processes
    if (r.coordinator or r.num_processes or r.process_id >= 0) and not complete:
        what = f"run.coordinator={r.coordinator!r} run.num_processes={r.num_processes} "
        what += f"run.process_id={r.process_id} must go together: "
        what += "HOST:PORT or [IPV6]:PORT, a count, and a number below it"
        yield Problem(what, "set all three, or none of them where JAX detects the cluster")


def text_problems(cfg: Config):
    """Paths, and settings whose text is parsed, that are malformed."""
    r, t = cfg.run, cfg.train
    paths = [("run.dir", r.dir)] + ([("run.start_from", r.start_from)] if r.start_from else [])
    try:
        sets = {f"data.{name}": read_sets(getattr(cfg.data, name)) for name in ("train", "val")}
        paths += [(name, part.path) for name, parts in sets.items() for part in parts.values()]
        read_stages(cfg.data.stages, sets["data.train"])
        if any(part.weight != 1 for part in sets["data.val"].values()):
            raise ValueError("sets of data.val have no weights: each is evaluated")
    except ValueError as e:
        fix = "give them as in --data.train web=data/web:0.7,code=data/code:0.3 "
        fix += "--data.val web=data/web-val --data.stages 8000:web=0.2,code=0.8"
        if cfg.data.stages:  # perhaps from a config file
            fix += ", or --data.stages alone for no stages"
        yield Problem(f"data.train, data.val or data.stages: {e}", fix)
    try:
        paths += [("eval.tasks", pattern) for pattern in read_tasks(cfg.eval.tasks).values()]
    except ValueError as e:
        yield Problem(f"eval.tasks: {e}", "give files, as in --eval.tasks core=tasks/core/*.jsonl")
    try:
        read_ramp(t.batch_ramp, t.batch_size)
    except ValueError as e:
        yield Problem(f"train.batch_ramp: {e}", "give updates and sizes, such as 0:16,2000:32")
    try:
        read_skip(cfg.data.skip)
    except ValueError as e:
        yield Problem(f"data.skip: {e}", "give updates as in --data.skip 1200:1250,1311")
    for name, path in paths:
        if not path or "\0" in path or is_wrong_address(path):
            what = f"{name}={path!r} must be a local path or gs://bucket/path, "
            what += "without NUL bytes or credentials"
            yield Problem(what, f"give --{name} a local path or gs://bucket/path")


# ---- what a run has written


def check_record(record: dict):
    """Raise ValueError unless sections and facts of a config.json have the types that are relied
    on."""
    for name in (*SECTIONS, "versions", "parent"):
        if not isinstance(values := record.get(name, {}), dict):
            raise ValueError(f"{name} is {values!r}, not an object with fields")
    if type(steps := record.get("train", {}).get("steps", 0)) is not int:
        raise ValueError(f"train.steps is {steps!r}, not a whole number")
    parent = record.get("parent", {})
    numbers = [parent.get(name) for name in ("step", "tokens")]
    # The parent of an average has a list of steps, and no start_with.
    if "start_with" in parent and any(type(n) is not int for n in numbers):
        raise ValueError(f"parent's step and tokens are {numbers}, not whole numbers")


TEXTS, OR_NULL = ("kind", "set", "text"), ("loss", "grad_norm", "bits_per_byte")
NUMBERS = (*OR_NULL, "step", "tokens", "step_time", "tokens_per_sec", "spike")


def check_row(row: dict, *needed: str):
    """Raise ValueError if a row of metrics.jsonl or samples.jsonl lacks a field that is needed, or
    a field has a type that no run writes.  Of rows of other kinds than train and eval only kind and
    step are checked."""
    is_known = row.get("kind", "") in ("train", "eval", "")  # a sample has no kind
    for name in (*needed, *(row if is_known else ("kind", "step"))):
        if name not in row:
            raise ValueError(f"{str(row)[:60]} has no {name}")
        x = row[name]
        fits = type(x) in (int, float) and abs(x) < 1e39  # any finite float32
        fits |= x is None and name in OR_NULL
        if (not fits and name in NUMBERS) or (name in TEXTS and not isinstance(x, str)):
            raise ValueError(f"{str(row)[:60]} has {name}={str(x)[:60]}")
