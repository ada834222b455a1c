"""Decoding: the cache of keys and values, the logits of the next token, and drawing tokens.

Dimension key (a suffix on every array's name spells its logical shape):
  M  microbatches, one for each stage   B  sequences   L  sequence length of the new tokens
  S  sequence length of the cache   D  d_model   V  vocabulary
  R  rows: sequences of all microbatches   E  experts   C  gate and up   F  hidden units
  H  query heads   G  key and value heads   K  head dim
  J  latent of the queries   I  latent of keys and values   T  rotary dim of a key   W  value dim

Inside shard_map the letters still name the whole dims; a sharded dim is only as long as this
device's part.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import model
from architecture import layer_places
from attention import Span, attention_of, document_ids
from config import Config
from layers import ByColumns, has_slow_bfloat16, mark_varying, norm, tp_part
from pipeline import forward_pipeline
from utils import host_rows, platform, put_on_mesh, with_slices


def per_device_spec() -> P:
    """The spec of arrays that differ on every device: [dp, pp, tp, *the shape on a device]."""
    return P(with_slices("dp"), "pp", "tp")


def layer_groups(w) -> list[str]:
    """The groups of layers that a model has."""
    return [group for group in ("prefix", "layers") if group in w]


def stage_layers(cfg: Config, group: str) -> list[tuple[str, int]]:
    """(kind, row) of each layer of a group that a device has, in order."""
    places = [(kind, row) for where, kind, row in layer_places(cfg.model) if where == group]
    # Each stage has whole blocks, so the same kinds as the first, and its rows count from 0.
    return places if group == "prefix" else places[: len(places) // lax.axis_size("pp")]


@partial(jax.jit, static_argnames="cfg")
def decoding_weights(params, cfg: Config) -> dict:
    """The weights as `next_logits` uses them: cast, and those of the layers in lists.

    A token takes as long as reading each weight once.  Casting them and slicing stacked ones for
    each token, which copies, made that 2.9 times as long (gpt2_124m in float32, one row, one CPU
    core).  The price is a program that grows with the number of layers: a tiny model with 48
    compiles in 19 s instead of 2, once for prompts and once for a token.
    """

    @jax.shard_map(in_specs=(model.param_specs(cfg),), out_specs=per_device_spec())
    def per_device(params):
        w = model.prepare_weights(params, cfg, cfg.train.dtype)
        for group in layer_groups(w):
            w[group] = [
                pack_layer(jax.tree.map(itemgetter(row), w[group][kind]), kind, cfg)
                for kind, row in stage_layers(cfg, group)
            ]
        if "unembed_DV" in w and stored_by_columns(cfg):
            w["unembed_DV"] = ByColumns(w["unembed_DV"].T)
        return add_device_dims(w)

    return per_device(params)


BY_COLUMNS = {"q_DHK", "k_DGK", "v_DGK", "o_HKD", "o_HWD", "out_FD", "shared_out_FD"}
BY_COLUMNS |= {"q_down_DJ", "kv_down_DI", "k_rope_DT"}  # mla
"""Weights of layers that are kept as ByColumns, as gate and up are.  Only `einsum` takes them."""


def stored_by_columns(cfg: Config) -> bool:
    """Whether dense weights are kept as ByColumns: on CPUs, see layers.multiply.  A token of
    gpt2_124m in float32 takes 40 instead of 54 ms for one row, and 73 instead of 112 for 8.
    Weights that a layer gathers stay as they are, because Param.spec says along which of their own
    dims."""
    is_gathered = cfg.mesh.fsdp == "layer" and cfg.mesh.shape["dp"] > 1
    is_fast = cfg.train.dtype == "float32" or not has_slow_bfloat16()
    return platform() == "cpu" and is_fast and not is_gathered


def pack_layer(w: dict, kind: str, cfg: Config) -> dict:
    """A layer's weights as they are kept between tokens.  On CPUs some are ByColumns, see
    `stored_by_columns`.  Others are kept so that XLA does not copy them for each token:

    - gate and up apart, in a list of [1, D, F].  CPUs and GPUs would cut them apart: a token of a
      Llama-style model took 4 times as long on a CPU (4 layers of 768, d_ff 3,072, float32, one
      row), and the copies take 224 MiB a layer of llama3_8b.
    - gate and up of routed experts as [E, D, C * F], as in their product: a TPU would join them
      (768 MiB a layer of qwen3_30b_a3b).
    - k and v of mla by head, as in their products.
    - routed experts in bfloat16 as their bits on a CPU, which would convert all of them to float32
      to choose some: 15 times as long, with 16 experts of which a token uses 2.
    """
    packed, table, by_columns = {}, model.layer_table(cfg, kind), stored_by_columns(cfg)
    for name, x in w.items():
        dims = name.rpartition("_")[2]
        if dims == "CDF" and (len(x) > 1 or by_columns):
            parts = jnp.split(x, len(x))
            x = [ByColumns(part.swapaxes(1, 2)) for part in parts] if by_columns else parts
        elif by_columns and name in BY_COLUMNS:
            x = ByColumns(x.transpose(table[name].columns + table[name].rows))
        elif dims in ("IHK", "IHW"):
            x = x.swapaxes(0, 1)
        elif dims in ("EDCF", "EFD"):
            x = x.reshape(*x.shape[:2], -1)
            if platform() == "cpu" and x.dtype == jnp.bfloat16:
                x = lax.bitcast_convert_type(x, jnp.uint16)
        packed[name] = x
    return packed


def unpack_layer(w: dict, kind: str, cfg: Config) -> dict:
    """The inverse of `pack_layer` as far as XLA does it without a copy, and the weights whole over
    dp: what `decoder_layer` takes."""
    C = cfg.model.in_matrices
    w = w | {n: x.swapaxes(0, 1) for n, x in w.items() if n in ("k_IHK", "v_IHW")}
    w = w | {n: x.reshape(*x.shape[:2], C, -1) for n, x in w.items() if n == "in_EDCF"}
    w = model.gather_layer(w, kind, cfg)
    lists = {n: x for n, x in w.items() if isinstance(x, list)}
    return w | jax.tree.map(itemgetter(0), lists)


def add_device_dims(tree):
    """A device's arrays with three dims of 1 in front, for dp, pp and tp: see per_device_spec."""
    return jax.tree.map(lambda x: x[None, None, None], tree)


def drop_device_dims(tree):
    """The inverse of `add_device_dims`."""
    return jax.tree.map(lambda x: x[0, 0, 0], tree)


def empty_cache(w, cfg: Config, B: int, S: int) -> dict:
    """Room for S tokens of B rows in each microbatch, in each layer: [M * B, heads, S, width], or
    without heads.

    On a CPU it is float32, because XLA would convert all of it for each token: for 32 rows of 256
    tokens gpt2_124m in bfloat16 takes 263 instead of 110 ms a token.
    """

    def one_token(kind, w):
        """The entries of a layer's cache for one token a row."""
        shape = B // lax.axis_size("tp"), 1, cfg.model.d_model
        x_BLD = mark_varying(jnp.zeros(shape, cfg.train.dtype))
        span = Span(jnp.zeros((B, 1), int), jnp.zeros((B, 1), int), decoding=True)
        _, attention = attention_of(cfg)
        return attention(x_BLD, unpack_layer(w, kind, cfg), cfg, span, None)[1]

    def room(M, x):
        is_widened = platform() == "cpu" and x.dtype == jnp.bfloat16
        dtype = jnp.float32 if is_widened else x.dtype
        return jnp.zeros((M * B, *x.shape[2:-1], S, x.shape[-1]), dtype)

    cache = {}
    for group in layer_groups(w):
        # A stage runs the prefix for its own microbatch only.
        M = 1 if group == "prefix" else lax.axis_size("pp")
        layers = zip(stage_layers(cfg, group), w[group], strict=True)
        tokens = [jax.eval_shape(partial(one_token, kind), layer) for (kind, _), layer in layers]
        cache[group] = jax.tree.map(partial(room, M), tokens)
    return mark_varying(cache)


def run_layers(w, group: str, x_BLD, cache: dict, span: Span, cfg: Config):
    """(x_BLD, cache) after this device's layers of a group."""
    new = []
    for (kind, _), layer, kv in zip(stage_layers(cfg, group), w[group], cache[group], strict=True):
        whole = unpack_layer(layer, kind, cfg)
        x_BLD, kv, _ = model.decoder_layer(kind, x_BLD, whole, cfg, None, span, kv)
        new.append(kv)
    return x_BLD, cache | {group: mark_varying(new)}


@partial(jax.jit, static_argnames=("n_new", "cfg"), donate_argnames="cache")
def next_logits(weights, cache, token_MBS, length_MB, n_new: int, cfg: Config):
    """(logit_MBV, cache): the logits of the token after each row, float32.

    weights: `decoding_weights`.  Row b of microbatch m is token_MBS[m, b, :length].  With a cache
    its last n_new tokens are new; without one (None) all are, and n_new is at least the longest
    length.
    """
    row_spec, own = P("pp", with_slices("dp")), per_device_spec()

    @jax.shard_map(in_specs=(own, own, row_spec, row_spec), out_specs=(P(*row_spec, "tp"), own))
    def per_device(weights, cache, token_MBS, length_MB):
        prompt = cache is None
        start_MB = jnp.zeros_like(length_MB) if prompt else length_MB - n_new
        index_MBL = start_MB[..., None] + jnp.arange(n_new)
        all_MBS = lax.all_gather(token_MBS, "pp", axis=0, tiled=True)
        all_MBL = lax.all_gather(index_MBL, "pp", axis=0, tiled=True)

        def make_span(m):
            index_BL = all_MBL[m]
            options = dict(decoding=True, prompt=prompt, first_row=m * B)
            if not cfg.data.document_mask:
                return Span(index_BL, index_BL, **options)
            document_BS, position_BS = document_ids(all_MBS[m], cfg.data.end_id)
            document_BL = jnp.take_along_axis(document_BS, index_BL, 1)
            position_BL = jnp.take_along_axis(position_BS, index_BL, 1)
            return Span(index_BL, position_BL, document_BL, document_BS, **options)

        w, (_, B, S) = drop_device_dims(weights), token_MBS.shape
        cache = empty_cache(w, cfg, B, S) if prompt else drop_device_dims(cache)
        new_MBL, s = jnp.take_along_axis(token_MBS, index_MBL, 2), lax.axis_index("pp")
        x_BLD, _ = model.apply_embedding(w, new_MBL[0], make_span(s), cfg)
        if "prefix" in w:
            span = make_span(s)._replace(first_row=0)  # its cache has only this microbatch
            x_BLD, cache = run_layers(w, "prefix", x_BLD, cache, span, cfg)

        def stage(x_BLD, m, cache):
            return run_layers(w, "layers", x_BLD, cache, make_span(m), cfg)

        x_MBLD, cache = forward_pipeline(stage, x_BLD[None], cache, lock_step=not prompt)
        last_MB = tp_part(length_MB - 1 - start_MB, 1)
        x_MBD = jnp.take_along_axis(x_MBLD, last_MB[..., None, None], 2)[:, :, 0]
        x_MBD = norm(x_MBD, w, "norm", cfg)
        x_MBD = lax.all_gather(x_MBD, "tp", axis=1, tiled=True)
        return model.logits(x_MBD, w, cfg), add_device_dims(cache)

    return per_device(weights, cache, token_MBS, length_MB)


# ---- rows that grow


def padded_length(n: int, cfg: Config) -> int:
    """The next power of two, at most train.seq_len, so that few programs are compiled."""
    return min(cfg.train.seq_len, 1 << (n - 1).bit_length())


def place_rows(rows: list[list[int]], S: int, cfg: Config) -> list[jax.Array]:
    """[token_MBS, length_MB] on the mesh: each row with room for S tokens, and its length.  Rows
    of one token are added until the mesh divides their number."""
    dp, pp, tp = cfg.mesh.sizes
    B = -(-len(rows) // (pp * dp * tp)) * dp * tp
    token_RS, length_R = np.zeros((pp * B, S), np.int32), np.ones(pp * B, np.int32)
    for n, row in enumerate(rows):
        token_RS[n, : len(row)], length_R[n] = row, len(row)
    spec, arrays = P("pp", with_slices("dp")), (token_RS, length_R)
    return [put_on_mesh(x.reshape(pp, B, *x.shape[1:]), spec) for x in arrays]


def choose_token(logit_V, rng, temperature: float, top_k: int, top_p: float) -> int:
    """One token id: the most likely one at temperature 0, else one drawn from the top_k most likely
    (0: from all), and of these from the smallest set that has at least top_p of the probability
    (Holtzman et al. 2020)."""
    if temperature == 0:
        return int(np.argmax(logit_V))
    order = np.argsort(-logit_V, kind="stable")[: top_k or None]
    prob = np.exp((logit_V[order] - logit_V[order[0]]).astype(np.float64) / temperature)
    prob /= prob.sum()
    n = int(np.searchsorted(np.cumsum(prob), top_p)) + 1
    return int(rng.choice(order[:n], p=prob[:n] / prob[:n].sum()))


def generate(
    params,
    prompts: list[list[int]],
    n_tokens: int,
    cfg: Config,
    *,
    vocab_size: int,
    stop_id: int | None = None,
    stops: Sequence[str] = (),
    added_text: Callable[[int, list[int]], str] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
):
    """Continue each prompt (token ids, at least one) by up to n_tokens, ending before stop_id, or
    after one of `stops` is in added_text(n, row), the text after the prompt of row n; yields the
    rows as they grow.

    Ids from vocab_size on are never drawn.  A step computes only the newest token of each row, from
    cached keys and values.  When a row gets longer than train.seq_len, the model goes on with its
    last half, as if it began there.
    """
    rows, done = [list(prompt) for prompt in prompts], [False] * len(prompts)
    seen_from = [0] * len(prompts)
    S = padded_length(max(map(len, prompts)) + n_tokens, cfg)
    rngs = [np.random.default_rng([seed, n]) for n in range(len(prompts))]
    weights, cache = decoding_weights(params, cfg), None
    for _ in range(n_tokens):
        for n, row in enumerate(rows):
            if len(row) - seen_from[n] > S:
                seen_from[n], cache = len(row) - max(1, S // 2), None
        seen = [row[start:] for row, start in zip(rows, seen_from, strict=True)]
        n_new = padded_length(max(map(len, seen)), cfg) if cache is None else 1
        logit_MBV, cache = next_logits(weights, cache, *place_rows(seen, S, cfg), n_new, cfg)
        logit_RV = host_rows(logit_MBV)
        for n, row in enumerate(rows):
            if done[n]:
                continue
            token = choose_token(logit_RV[n, :vocab_size], rngs[n], temperature, top_k, top_p)
            if token != stop_id:
                row.append(token)
            text = added_text(n, row) if stops else ""
            done[n] = token == stop_id or any(stop in text for stop in stops)
        yield rows
        if all(done):
            return
