"""Starting a run from a checkpoint of another, its parent, which is only read."""

import re
from dataclasses import asdict
from functools import partial

import jax
import jax.numpy as jnp
from etils import epath

import model
import utils
from config import Config
from errors import CHECKPOINT, USAGE, Problem, UserError, raise_problems
from files import absolute_path, run_path
from rowfile import read_lines
from rundir import begin_of_rows, read_record, write_config
from shards import check_tokenizer
from verify import Damaged, SavedCheckpoints
from weights import init_weights

MAY_DIFFER = re.compile("rope_|yarn_|max_positions$|window$")
"""Settings of the model that may differ from the parent's: those for a longer context."""


class Parent:
    """The checkpoint that run.start_from names.  Raises UserError CHECKPOINT if there is none, or
    if it is damaged or of another model, DATA if its tokenizer is not that of the data, and USAGE
    if it has made more updates than this run is to make."""

    def __init__(self, cfg: Config, tokenizer: epath.Path | None):
        """tokenizer: that of the training data, if it has one."""
        self.path, step = read_name(cfg.run.start_from)
        self.start_with = cfg.run.start_with
        utils.run_on_each(self.check, cfg, tokenizer)
        self.store = SavedCheckpoints(self.path)
        # Process 0 decides: a parent that still trains may save before another process looks.
        self.step = utils.exchange(utils.run_on_lead(self.store.find_step, step))[0]
        if self.step is None:
            raise UserError(CHECKPOINT, f"{self.path} has no checkpoint", "train it first")
        try:
            self.meta = self.store.read_meta(self.step, {})
        except Damaged as e:
            self.store.reject_step(self.step, f"failed verification ({e})")
        if self.start_with == "state" and self.step > cfg.train.steps:
            what = f"train.steps={cfg.train.steps}, but {cfg.run.start_from} has made {self.step}"
            raise UserError(USAGE, what, f"set --train.steps above {self.step}")

    def check(self, cfg: Config, tokenizer: epath.Path | None):
        """Compare the parent's model and tokenizer with this run's."""
        record = read_record(self.path)
        if not record or self.path == run_path(cfg):
            what = f"run.start_from={cfg.run.start_from}: there is no other run in {self.path}"
            raise UserError(CHECKPOINT, what, "name the directory of a run, as runs/NAME@STEP")
        here, problems = asdict(cfg.model), []
        for name, there in record.get("model", {}).items():
            is_free = MAY_DIFFER.match(name) or f"model.{name}" in cfg.run.accept
            if here.get(name, there) != there and not is_free:
                what = f"model.{name} is {there} in {self.path} and {here[name]} in this run"
                fix = f"give --model.{name} {there}, or if that changes no weight's shape, "
                fix += f"--run.accept model.{name}"
                problems.append(Problem(what, fix))
        if (there := record.get("model", {}).get("max_positions", 0)) > cfg.model.max_positions:
            what = f"model.max_positions={cfg.model.max_positions} is below the parent's {there}"
            problems.append(Problem(what, f"set --model.max_positions {there} or more"))
        raise_problems(CHECKPOINT, problems)
        check_tokenizer(self.path / "tokenizer.json", tokenizer)

    def restore(self, abstract: dict, cfg: Config) -> dict:
        """The items of `abstract`, verified.  Learned positions beyond the parent's get the initial
        values of a new run, and their moments are 0."""

        def with_parents_rows(path, x):
            name = utils.path_name(path)
            shape = self.meta["leaves"][name][0] if name.endswith("/position_LD") else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

        @partial(jax.jit, static_argnums=(0, 2))
        def grow(is_weight: bool, x, shape):
            new = jnp.zeros(shape, x.dtype)
            if is_weight:
                table = dict(position_LD=model.param_table(cfg)["position_LD"])
                new = init_weights(table, cfg.run.seed)["position_LD"]
            return new.at[: len(x)].set(x)

        def fit(path, x, want):
            if x.shape == want.shape:
                return x
            return jax.device_put(grow(path[0].key != "rest", x, want.shape), want.sharding)

        wanted = jax.tree_util.tree_map_with_path(with_parents_rows, abstract)
        found = self.store.restore(wanted, self.step)
        return jax.tree_util.tree_map_with_path(fit, found, abstract)

    def note(self, run: epath.Path):
        """Record in a run's config.json the parent's path, step, digest (the checksum of its
        checkpoint's meta), tokens until then, and what of it the run started with."""
        parent = dict(path=str(self.path), step=self.step, digest=self.meta["checksum"])
        parent["start_with"] = self.start_with
        rows, file = [], self.path / "metrics.jsonl"
        read_lines(file, self.step, rows.append)
        tokens = dict([begin_of_rows(read_record(self.path))])
        tokens |= {row["step"]: row.get("tokens", 0) for row in rows if row.get("kind") == "train"}
        parent["tokens"] = max(tokens.values())
        if self.step not in tokens:
            what = f"{file} has no row of update {self.step}: its tokens until then are taken as"
            utils.warn(f"{what} {parent['tokens']}, which is too few")
        write_config(run, read_record(run) | dict(parent=parent))


def read_name(text: str) -> tuple[epath.Path, int]:
    """(path, step) of RUN@STEP; -1 for RUN."""
    name, step = re.fullmatch(r"(?s)(.+?)(?:@(\d{1,9}))?", text).groups()
    return absolute_path(name), int(step or -1)


def forget_parent(run: epath.Path):
    """Remove the parent from a run's config.json: that of a start which has left no checkpoint.
    Raises UserError CHECKPOINT for an imported run or an average, whose weights are lost then."""
    record = read_record(run)
    parent = record.get("parent")
    is_average = parent and "start_with" not in parent  # which the parent of a branch has
    if is_average or record.get("data_fingerprint") == "":  # an import has no data
        what = f"{run} has no checkpoint: the weights that it was made with are lost"
        fix = "import or average them again under another name, or start over with --fresh, which"
        raise UserError(CHECKPOINT, what, f"{fix} draws new weights")
    if record.pop("parent", None):
        write_config(run, record)


def refuse_other_parent(run: epath.Path, cfg: Config):
    """Raises UserError CHECKPOINT if a run that has a checkpoint did not start from
    run.start_from, or did so with another run.start_with."""
    if not cfg.run.start_from:
        return
    (path, step), parent = read_name(cfg.run.start_from), read_record(run).get("parent", {})
    is_branch = "start_with" in parent  # the parent of an average has none
    if not is_branch or parent.get("path") != str(path) or step not in (-1, parent["step"]):
        what = f"{run} has checkpoints of its own, and did not start from {cfg.run.start_from}"
        raise UserError(CHECKPOINT, what, "choose another --run.name, or start over with --fresh")
    if parent["start_with"] != cfg.run.start_with:
        what = f"{run} started with its parent's {parent['start_with']}, but "
        what += f"run.start_with={cfg.run.start_with}"
        fix = f"give --run.start_with {parent['start_with']}, or choose another --run.name"
        raise UserError(CHECKPOINT, what, fix)
