"""Convert the weights of a Hugging Face transformers model to a run, and a run's weights to a model
that transformers loads.  Families: gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, olmo2,
gemma2, gemma3_text, gpt_oss, deepseek_v3.

    python scripts/convert_hf.py import --hf Qwen3-0.6B --run runs/qwen3
    python scripts/convert_hf.py export --run runs/qwen3 --hf exported --dtype bfloat16

Neither direction holds the whole model in memory: an import reads one tensor at a time, an export
holds the file that it writes.
"""

# This file has the command line, the directories of both sides, the import and the export.  The
# tensors' names are in hf_families.py, config.json is in hf_config.py, and arrays that are larger
# than memory are in big_arrays.py.

import json
import math
import os
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checks
import cli
import config
import files
from config import Config
from errors import CHECKPOINT, DATA, STORAGE, USAGE, Problem, UserError, first_ten, or_list


@dataclass(frozen=True)
class Import:
    """Make a run from a Hugging Face model: to sample, to evaluate or to train further."""

    hf: str
    """A directory with config.json and *.safetensors."""
    run: str
    """The run directory to make, local or gs://."""


@dataclass(frozen=True)
class Export:
    """Write the weights of a run as a Hugging Face model."""

    run: str
    """A run directory, local or gs://."""
    hf: str
    """The directory to write."""
    step: int = -1
    """The checkpoint to use; -1 is the newest."""
    weights: Literal["last", "ema"] = "last"
    """last: the weights after that update.  ema: their moving average, if the run has optim.ema."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the written weights, which are rounded to it."""
    shard_size: int = 5_000_000_000
    """The most bytes in a file, unless one tensor has more."""


def parse() -> Import | Export:
    args = cli.read_args(Import | Export, __doc__)
    if isinstance(args, Export):
        cli.check_at_least(args, shard_size=1)
    if files.is_remote(args.hf):
        raise UserError(USAGE, f"--hf {args.hf} is remote", "give a local directory, and copy it")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an accelerator has nothing to do here
    return args


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS = cli.quit_on_error(parse)

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

import checkpoint
import model
import processes
import rundir
import runstate
import utils
import verify
from scripts import big_arrays, hf_config, hf_families
from scripts.big_arrays import SavedWeights
from scripts.hf_families import TensorMap
from scripts.outputs import check_new
from shards import n_ids, parse_tokenizer, tokenizer_text

# ---- Hugging Face directories

DTYPES = "F32", "F16", "BF16"


class StoredTensor(NamedTuple):
    """A tensor in a file, as the file's header describes it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self):
        """The tensor, float32.  Its file is mapped into memory only during the call."""
        with safe_open(self.file, "numpy") as f:
            return f.get_tensor(self.name).astype(np.float32, copy=False)


def check_is_part(path: Path):
    """Raise UserError DATA if `path` is a link to something outside of the model's folder."""
    if files.leaves_folder(path, path.parent):
        what = f"{path} is a link to {os.path.realpath(path)}, outside of the model"
        raise UserError(DATA, what, "put a copy of the file in its place")


def read_json(path: Path) -> dict:
    check_is_part(path)
    try:
        found = json.loads(files.read_limited(path))
        if not isinstance(found, dict):
            raise ValueError(f"it is {type(found).__name__}")
        return found
    except (OSError, ValueError, RecursionError) as e:
        what = f"{path} cannot be read: {str(e)[:200]}"
        fix = "give --hf a model's folder, as `hf download ORG/NAME --local-dir FOLDER` makes it"
        raise UserError(DATA, what, f"{fix}, or fetch it again") from None


def shard_files(folder: Path) -> list[Path]:
    """The files with the model's tensors."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    paths = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if index.exists():
        file_of = read_json(index).get("weight_map")
        names = [*file_of.values()] if isinstance(file_of, dict) else []
        for name in names or [None]:
            if not isinstance(name, str) or Path(name).name != name:
                what = f"{index} names {name!r}, which is no plain file name"
                raise UserError(DATA, what, "fetch the model again, from its publisher")
        paths = [folder / name for name in sorted(set(names))]
        if single.exists() and paths != [single]:
            what = f"{folder} has both {single.name}, which transformers reads, and {index.name}"
            raise UserError(DATA, what, "keep the one that belongs to the model")
    if not paths:
        pickled = [p.name for end in ("bin", "pt", "pth") for p in sorted(folder.glob(f"*.{end}"))]
        what = f"{folder} holds no *.safetensors"
        what += f", only {pickled[0]}, and such files can run code" if pickled else ""
        raise UserError(DATA, what, "fetch the model's safetensors, or convert it to them")
    lost = [path.name for path in paths if not path.is_file()]
    if lost:
        what = f"{folder} lacks {len(lost)} of {len(paths)} files: {first_ten(lost)}"
        raise UserError(DATA, what, "fetch them again")
    for path in paths:
        check_is_part(path)
    return paths


def find_tensors(folder: Path, family: str) -> dict[str, StoredTensor]:
    """The tensors of a directory, by their names in hf_families.py."""
    found = {}
    for path in shard_files(folder):
        try:
            with safe_open(path, "numpy") as f:
                for name in f.keys():  # noqa: SIM118, f is not a dict
                    header = f.get_slice(name)
                    tensor = StoredTensor(path, name, tuple(header.get_shape()), header.get_dtype())
                    if family == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
                        name = f"transformer.{name}"  # files of a GPT2Model lack this prefix
                    if name in found:
                        what = f"{name} is in {found[name].file.name} and in {path.name}"
                        raise UserError(DATA, what, "keep one of the two")
                    found[name] = tensor
        except (SafetensorError, OSError) as e:
            raise UserError(DATA, f"{path} cannot be read: {e}", "fetch it again") from None
    return found


def unknown_tensors(found: dict[str, StoredTensor], known, hf: dict, cfg: Config):
    """The names of tensors that the model does not use, except those that may be ignored."""
    m, family = cfg.model, hf_families.FAMILIES[hf["model_type"]]
    unknown = [n for n in found if n not in known and not n.endswith(hf_families.BUFFERS)]
    if m.tie_embeddings and "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")
        embed, head = found.get(family.ends[0][0]), found["lm_head.weight"]
        has_embed = embed and embed.dtype in DTYPES  # else it is refused later
        is_readable = head.dtype in DTYPES
        if has_embed and not (is_readable and np.array_equal(embed.read(), head.read())):
            unknown.append("lm_head.weight (tie_word_embeddings, but it is not the embedding)")
    layer = family.layer_prefix.replace(".", r"\.").format(r"(\d{1,9})")
    later = [n for n in unknown if (x := re.match(layer, n)) and int(x[1]) >= m.n_layers]
    if later and hf.get("num_nextn_predict_layers"):
        utils.warn(f"left out {len(later)} tensors that predict further tokens: {later[0]}, ..")
        unknown = [name for name in unknown if name not in later]
    return unknown


def check_tensors(found: dict[str, StoredTensor], tensors: list[TensorMap], hf: dict, cfg: Config):
    """Raise UserError DATA unless the directory has every tensor, with the right shape, and no
    unknown ones."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    unknown = unknown_tensors(found, shapes, hf, cfg)
    ends = ("_scale_inv", ".scales", ".qweight", "_proj_scales", "_proj_blocks")
    quantized = [name for name in unknown if name.endswith(ends)]
    unknown = [name for name in unknown if name not in quantized]
    missing = [name for name in shapes if name not in found]
    known = {name: found[name] for name in shapes if name in found}
    quantized += [f"{name} ({x.dtype})" for name, x in known.items() if x.dtype not in DTYPES]
    pairs = [(name, list(x.shape), list(shapes[name])) for name, x in known.items()]
    misshaped = [f"{name} {has} instead of {want}" for name, has, want in pairs if has != want]
    to_bfloat16 = "convert the model to bfloat16 first, with its publisher's script"
    other = "fetch config.json again, or convert a model with only the tensors of its family"
    table = [  # what is wrong, with which tensors, fix
        (f"tensors are of quantized weights, not of {or_list(DTYPES)}", quantized, to_bfloat16),
        (f"tensors are unknown for {hf['model_type']}", unknown, other),
        (f"of {len(shapes)} tensors are missing", missing, "fetch the model again"),
        ("tensors have another shape than config.json says", misshaped, "fetch config.json again"),
    ]
    problems = [Problem(f"{len(x)} {what}: {first_ten(x)}", fix) for what, x, fix in table if x]
    if problems:
        raise UserError(DATA, problems=problems)


# ---- import


def import_hf(hf_dir, run_dir):
    """Make a run directory from a Hugging Face one.  Raises UserError USAGE, DATA and STORAGE."""
    folder, run = Path(hf_dir), files.absolute_path(os.fspath(run_dir))
    check_new(run, "run")
    hf = read_json(folder / "config.json")
    cfg = run_config(hf, run)
    found = find_tensors(folder, hf["model_type"])
    tensors = hf_families.tensor_maps(hf["model_type"], cfg, bool(hf.get("rope_interleave", True)))
    check_tensors(found, tensors, hf, cfg)
    # Before the weights are written, so that an error in the tokenizer is found first.
    tokenizer = read_tokenizer(folder / "tokenizer.json", cfg.model.vocab_size)
    # A model published in float32 would have other losses in bfloat16, our default.
    dtype = "bfloat16" if any(found[x.name].dtype == "BF16" for x in tensors) else "float32"
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype))
    try:
        (run / "checkpoints").rmtree(missing_ok=True)  # see kept_files
        write_checkpoint(found, tensors, run, cfg)
        if tokenizer:
            files.write_whole(run / "tokenizer.json", tokenizer)
        rundir.write_config(run, rundir.run_record(cfg))
    except BaseException:  # also Ctrl-C; or the next import would refuse the directory
        with suppress(Exception):  # any that storage raises, so that the first error is reported
            (run / "checkpoints").rmtree(missing_ok=True)
            for name, end in product(("tokenizer.json", "config.json"), ("", ".part")):
                (run / f"{name}{end}").unlink(missing_ok=True)
        raise
    utils.say(f"{folder} -> {run}: {model.param_count(cfg):,} parameters, train.dtype {dtype}")
    _, (_, end) = special_tokens(tokenizer, cfg.data.end_id)
    if end:
        utils.say(f"prepare its data with --end_token {shlex.quote(str(end))}")


def read_tokenizer(path: Path, vocab_size: int) -> str:
    """The text of a tokenizer.json, "" if there is none, without the added tokens that the model
    has no row for, such as gemma-3-1b's for images.  Raises UserError DATA."""
    if not path.exists():
        utils.warn(f"{path} does not exist: AutoTokenizer of transformers saves one")
        return ""
    found = read_json(path)
    try:
        lost = [x["content"] for x in found["added_tokens"] if x["id"] >= vocab_size]
        found["added_tokens"] = [x for x in found["added_tokens"] if x["id"] < vocab_size]
    except (TypeError, KeyError):
        lost = []  # the tokenizers library will say what is wrong
    text = json.dumps(found, ensure_ascii=False) if lost else files.read_limited(path)
    fix = "fetch it again, or move it away: a model is imported without one too"
    try:
        n = n_ids(parse_tokenizer(text))
    except ValueError as e:
        what = f"{path} is not a tokenizer.json of the tokenizers library: {e}"
        raise UserError(DATA, what, fix) from None
    if n > vocab_size:
        what = f"{path} has ids up to {n - 1}, the model vocab_size={vocab_size}"
        raise UserError(DATA, what, fix)
    if lost:
        what = f"left out {len(lost)} token(s) of {path}, for which the model has no row"
        utils.warn(f"{what}: {first_ten(lost)}")
    return text


def run_config(hf: dict, run) -> Config:
    """The config of a run with that model.  Raises UserError DATA, or USAGE for the run's name."""
    m = hf_config.read_model(hf)
    longest = m.max_positions or hf.get("max_position_embeddings") or 1024
    if type(longest) is not int:
        what = f"config.json: max_position_embeddings={longest!r} is no whole number"
        raise UserError(DATA, what, "correct config.json")
    cfg = checks.check(Config(run=config.Run(name=run.name, dir=os.fspath(run.parent))))
    end = hf.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    end = end if isinstance(end, int) and 0 <= end < m.vocab_size else -1
    cfg = replace(cfg, model=m, train=config.Train(seq_len=min(longest, 1024)))
    cfg = replace(cfg, data=config.Data(end_id=end), optim=config.Optim(lr=2e-5))
    try:
        return checks.check(cfg)
    except UserError as e:
        raise UserError(DATA, problems=e.problems) from None


def weight_blocks(found: dict[str, StoredTensor], tensors: list[TensorMap], shapes: dict, bar):
    """{"params/embed_VD": [(index, function)]}: function() returns that part of the weight, and
    advances the progress bar."""
    blocks = {}

    def read(tensor: TensorMap, j: int, shape: list[int]):
        x = tensor.to_weight(found[tensor.name].read(), j)
        padded = np.zeros(shape, np.float32)  # our embedding has more rows than the file's
        padded[tuple(map(slice, x.shape))] = x
        bar.update(padded.nbytes)
        return padded

    for tensor in tensors:
        for j, part in enumerate(tensor.parts):
            name = f"params/{part.weight}"
            sizes = zip(part.entry, shapes[name], strict=True)
            index = tuple(at if isinstance(at, int) else slice(n) for at, n in sizes)
            shape = [at.stop for at in index if isinstance(at, slice)]
            blocks.setdefault(name, []).append((index, partial(read, tensor, j, shape)))
    return blocks


def write_checkpoint(found: dict[str, StoredTensor], tensors: list[TensorMap], run, cfg: Config):
    """Write checkpoint 0: the weights, and zeros for the rest of a new run's state.

    Every tensor is read twice, because orbax needs the digests before it writes the arrays.
    """
    state = runstate.checkpoint_items(runstate.state_shapes(cfg))
    shapes = {name: x.shape for name, x in utils.leaf_table(state).items()}
    digests = {name: big_arrays.zero_digest(shape) for name, shape in shapes.items()}
    broken = []
    with progress_bar("read and verify", cfg) as bar:
        for name, blocks in weight_blocks(found, tensors, shapes, bar).items():
            parts = ((index, read()) for index, read in blocks)
            digests[name], finite = big_arrays.digest_blocks(parts, shapes[name])
            if not finite:
                broken.append(name)
    if broken:
        what = f"{len(broken)} weights hold a NaN or infinity: {first_ten(broken)}"
        raise UserError(DATA, what, "fetch the model again")

    store = checkpoint.Checkpoints(run, settings=runstate.model_settings(cfg))
    with progress_bar("write", cfg) as bar:
        blocks = weight_blocks(found, tensors, shapes, bar)

        def leaf(path, x):
            return big_arrays.streamed_array(x.shape, x.dtype, blocks.get(utils.path_name(path)))

        store.write(0, jax.tree_util.tree_map_with_path(leaf, state), digests)
        store.close()


def progress_bar(what: str, cfg: Config) -> tqdm:
    total = 4 * model.param_count(cfg)  # bytes in float32
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, mininterval=1)


# ---- export


def export_hf(run_dir, hf_dir, step=-1, dtype="float32", shard_size=5_000_000_000, weights="last"):
    """Write a run's weights as a Hugging Face directory.  Raises UserError USAGE, DATA, STORAGE
    and CHECKPOINT."""
    run, folder = files.absolute_path(os.fspath(run_dir)), Path(hf_dir)
    check_new(folder, "hf")
    cfg = cli.config_of_run(os.fspath(run), config.Mesh(1, 1, 1))
    path = run / "tokenizer.json"
    tokenizer = tokenizer_text(path) if path.exists() else ""
    (bos_id, bos), (eos_id, eos) = special_tokens(tokenizer, cfg.data.end_id)
    hf = hf_config.write_config(cfg, dtype, eos_id, bos_id)
    tensors = hf_families.tensor_maps(hf["model_type"], cfg)
    step, saved = open_weights(run, cfg, step, runstate.weights_item(cfg, weights))
    tensors.sort(key=partial(slab_order, saved))  # so that each slab is read once
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with progress_bar("write", cfg) as bar:
            write_shards(saved, tensors, folder, dtype, shard_size, bar)
        if tokenizer:
            (folder / "tokenizer.json").write_text(tokenizer)
            about = dict(bos_token=bos, eos_token=eos, tokenizer_class="PreTrainedTokenizerFast")
            (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")
    except BaseException:  # also Ctrl-C; or the next export would refuse the directory
        for file in folder.iterdir():  # it was empty, see check_new
            file.unlink()
        raise
    utils.say(f"{run} after update {step} -> {folder}: {hf['model_type']}, {dtype}")


def special_tokens(tokenizer: str, end_id: int) -> tuple[tuple, tuple]:
    """(id, text) of the token that a tokenizer puts before texts, and of the one that ends a
    document; None where unknown.  tokenizer: the text of a tokenizer.json, or "".  end_id:
    data.end_id, -1 where unknown."""
    start, texts = (None, None), {}
    with suppress(ValueError):
        parsed = parse_tokenizer(tokenizer)
        before = parsed.encode("")
        start = next(zip(before.ids, before.tokens, strict=True), start)
        texts = {n: token.content for n, token in parsed.get_added_tokens_decoder().items()}
    if end_id < 0:
        end_id = next((n for n, text in texts.items() if text == config.END), None)
    return start, (end_id, texts.get(end_id))


def open_weights(run, cfg: Config, step: int, item: str) -> tuple[int, SavedWeights]:
    """(step, weights) of checkpoint `step`, or of the newest for -1, verified.  Raises UserError
    CHECKPOINT and STORAGE."""
    store = verify.SavedCheckpoints(run)
    step = store.find_step(step)
    if step is None:
        raise UserError(CHECKPOINT, f"{store.path} has no checkpoint", "train the run first")
    path = store.path / str(step)
    try:
        meta = store.read_meta(step, {item: model.param_shapes(cfg)})
        saved = SavedWeights(path / item, utils.leaf_table(model.param_table(cfg)))
        with progress_bar("read and verify", cfg) as bar:
            for name, array in saved.arrays.items():
                chunks = big_arrays.read_chunks(array, bar)
                digest, _ = big_arrays.digest_blocks(chunks, array.shape)
                if digest != meta["leaves"][f"{item}/{name}"][2]:
                    raise verify.Damaged(f"{name} is not as saved")
    except ValueError as e:  # a verify.Damaged, or of tensorstore
        what = f"checkpoint {path} is damaged: {str(e)[:200]}"
        fix = "give --step another one, or restore it from a copy"
        raise UserError(CHECKPOINT, what, fix) from None
    return step, saved


def slab_order(weights: SavedWeights, tensor: TensorMap):
    """A sort key that puts the tensors of one slab next to each other."""
    part = tensor.parts[0]
    slab = weights.slab(part.weight, part.entry)
    return part.weight, [s.start for s in slab], [at for at in part.entry if isinstance(at, int)]


def file_dtype(tensor: TensorMap, dtype: str) -> np.dtype:
    """dtype, but float32 for the routers' biases, whose small updates rounding would lose."""
    is_bias = tensor.name.endswith("e_score_correction_bias")
    return jnp.dtype("float32" if is_bias else dtype)


def write_shards(saved: SavedWeights, tensors: list[TensorMap], folder: Path, dtype, limit, bar):
    """Write the tensors as *.safetensors of at most `limit` bytes each, unless one tensor has more,
    and an index if there are several."""
    named = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        named,
        get_storage_size=lambda x: math.prod(x.shape) * file_dtype(x, dtype).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    for file, names in split.filename_to_tensors.items():
        arrays = {}
        for tensor in map(named.get, names):
            x = tensor.from_weights(saved.read({p.weight: p.entry for p in tensor.parts}))
            arrays[tensor.name] = round_to(x, file_dtype(tensor, dtype), tensor.name)
            bar.update(4 * x.size)
        try:
            save_file(arrays, folder / file, metadata=dict(format="pt"))
        except SafetensorError as e:  # also for a full disk
            what, fix = f"{folder / file} cannot be written: {e}", "make room, and try again"
            raise UserError(STORAGE, what, fix) from None
    if split.is_sharded:
        index = dict(metadata=split.metadata, weight_map=split.tensor_to_filename)
        text = json.dumps(index, indent=1) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def round_to(x, dtype: np.dtype, name: str):
    """x in that dtype.  Raises UserError DATA if a number is too large for it."""
    with np.errstate(over="ignore"):
        y = np.ascontiguousarray(x.astype(dtype))
    if dtype == np.float16 and not np.isfinite(y).all():
        what = f"{name} holds {np.abs(x).max():g}, above float16's largest, 65504"
        raise UserError(DATA, what, "use --dtype bfloat16 or float32")
    return y


def main(args: Import | Export, cfg: Config):
    """cfg, which processes.run_main passes on, is not used: nothing here needs a mesh."""
    if isinstance(args, Import):
        import_hf(args.hf, args.run)
    else:
        export_hf(args.run, args.hf, args.step, args.dtype, args.shard_size, args.weights)


if __name__ == "__main__":
    processes.run_main(main, ARGS, Config())
