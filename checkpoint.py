"""Checkpoints that are verified leaf by leaf when they are restored."""

import json
import os
import re
import zlib
from contextlib import contextmanager
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import lax

import config
from config import UserError
from files import free_name, is_remote, move_folder
from utils import all_agree, leaf_table, on_lead, warn


def mix_bits(x):
    """A bijection of uint32 that spreads every bit (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def digest(x):
    """Two uint32 that change with any bit or any move of an element of x, and with nothing else.

    A sum over elements of mix(bits ^ mix(index)): integer addition is associative, so every mesh
    gets the same.  It detects accidents, not forgery.
    """
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, words).astype(jnp.uint32)
    index, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for dim in reversed(range(x.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, x.shape, dim) * np.uint32(stride % 2**32)
        stride *= x.shape[dim]
    spread = [
        mix_bits(bits ^ mix_bits(index + np.uint32(seed))) for seed in (0x9E3779B9, 0x7F4A7C15)
    ]
    return jnp.stack([x.sum(dtype=jnp.uint32) for x in spread])


@jax.jit
def digests(leaves: list):
    """uint32 [leaf, 2], and whether every float in them is finite."""
    finite = [jnp.isfinite(x).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([digest(x) for x in leaves]), jnp.stack(finite).all()


def meta_checksum(meta: dict) -> int:
    rest = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


class Damaged(ValueError):
    """A checkpoint that is not what was saved."""


OUTAGE = (
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED|PERMISSION_DENIED"
    "|[Pp]ermission denied"
)


class Checkpoints:
    """checkpoints/N: the state after N updates, saved in the background, verified when restored.

    Each holds two array items, `params` and `rest`, and `meta`: per leaf its shape, dtype and
    digest, and the settings (`must`) that a run which continues it has to share.
    """

    FORMAT = 2

    def __init__(self, run: epath.Path, keep: int = 2, must: dict = MappingProxyType({})):
        """keep: how many stay; 0 only reads, and moves nothing."""
        self.run, self.path, self.keep, self.must = run, run / "checkpoints", keep, dict(must)
        self.newest = None
        self.open()

    def open(self):
        options = dict(max_to_keep=self.keep, create=True) if self.keep else dict(read_only=True)
        options = ocp.CheckpointManagerOptions(**options)
        self.manager = ocp.CheckpointManager(self.path, options=options)

    def restore(self, abstract: dict, step: int = -1):
        """The newest checkpoint that verifies, laid out as `abstract`, or None where there is none.

        abstract: {"params": ..., "rest": ...} or one of them, ShapeDtypeStructs with shardings.
        step: that one and no other.  Those that do not verify are moved to damaged/.  Raises
        UserError CHECKPOINT where none is left or a run has lost them, and as `load` does.
        """
        found = self.manager.all_steps()
        if step >= 0 and step not in found:
            what = f"{self.path} has no checkpoint {step}, only {config.or_list(found or ['none'])}"
            fix = "give --step one of those, or leave it out for the newest"
            raise UserError(config.CHECKPOINT, what, fix)
        bad = []
        while (n := self.manager.latest_step() if step < 0 else step) is not None:
            try:
                tree = self.load(n, abstract)
                self.newest = n
                return tree
            except Damaged as e:
                bad.append(f"{n} ({e})")
                where = self.set_aside(n)
                warn(f"checkpoint {n} failed verification ({e}); moved to {where}")
        if bad:
            what = f"no usable checkpoint among {len(bad)} in {self.path}: {', '.join(bad)}"
            fix = "restore one from a copy, or start over with --fresh; they are in damaged/"
            raise UserError(config.CHECKPOINT, what, fix)
        metrics = self.run / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().strip():
            what = f"{self.run} has trained, but {self.path} holds no checkpoint"
            fix = "restore the checkpoints from a copy, or start over with --fresh"
            raise UserError(config.CHECKPOINT, what, fix)
        return None

    def load(self, step: int, abstract: dict):
        """Checkpoint `step`, verified.  Raises Damaged, UserError as `read` and `compare` do."""
        if not is_remote(self.path) and os.path.islink(self.path / str(step)):
            raise Damaged("it is a symbolic link")
        meta = self.read(step, meta=ocp.args.JsonRestore())["meta"]
        if not isinstance(meta, dict) or meta.get("checksum") != meta_checksum(meta):
            raise Damaged("its meta does not match its checksum")
        self.compare(step, meta, abstract)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        found = self.read(step, **items)
        tree = {name: found[name] for name in abstract}
        table = leaf_table(tree)
        got = np.asarray(digests(list(table.values()))[0]).tolist()
        wrong = [n for n, d in zip(table, got, strict=True) if d != meta["leaves"][n][2]]
        if wrong:
            raise Damaged(f"{len(wrong)} of {len(table)} arrays are not as saved, {wrong[0]} first")
        return tree

    def read(self, step: int, **items):
        """Items of checkpoint `step`.  Raises Damaged, or UserError STORAGE where out of reach."""
        tree = error = None
        try:
            tree = self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as e:  # orbax raises all types for damage, a bare Exception among them
            error = e
        if isinstance(error, PermissionError | ConnectionError | TimeoutError) or re.search(
            OUTAGE, str(error)
        ):
            what = f"cannot read {self.path / str(step)}: {str(error)[:300]}"
            fix = "mend the storage or the permissions, and run the same command again"
            raise UserError(config.STORAGE, what, fix) from error
        if not all_agree(error is None):
            why = f"{type(error).__name__}: {error}" if error else "another process failed"
            raise Damaged(re.sub(r"\s+", " ", why)[:160]) from error
        return tree

    def compare(self, step: int, meta: dict, abstract: dict):
        """Raise UserError CHECKPOINT where it is of another format, model or data than this run."""
        then = {name: meta["must"][name] for name in self.must if name in meta["must"]}
        free = {name for name, x in then.items() if x is None}  # of weights that came without data
        then = {name: x for name, x in then.items() if name not in free}
        now = {name: x for name, x in self.must.items() if name not in free}
        now["format"] = self.FORMAT
        then["format"] = meta["format"]
        for name, x in leaf_table(abstract).items():
            now[name] = f"{x.dtype}{list(x.shape)}"
        for name, (shape, dtype, _) in meta["leaves"].items():
            if name.split("/")[0] in abstract:
                then[name] = f"{dtype}{shape}"

        def value(table, name):
            return table.get(name, "nothing")

        names = [name for name in now | then if value(now, name) != value(then, name)]
        differ = [f"{n}: {value(then, n)} there, {value(now, n)} here" for n in names[:10]]
        if differ:
            more = f", and {len(names) - 10} more" if len(names) > 10 else ""
            where = self.path / str(step)
            what = f"checkpoint {where} is of another run: {'; '.join(differ)}{more}"
            fix = "give the values in its run's config.json, or another --run.name, or --fresh"
            raise UserError(config.CHECKPOINT, what, fix)

    def set_aside(self, step: int) -> epath.Path:
        """Move it out of the way: while it is there, orbax refuses to save any step up to it."""
        if not self.keep:
            what = f"checkpoint {self.path / str(step)} is damaged"
            fix = "start its run once: it goes on from the one before"
            raise UserError(config.CHECKPOINT, what, fix)
        where = free_name(self.run / "damaged" / str(step))
        self.manager.close()
        on_lead(move_folder, self.path / str(step), where)
        self.open()
        return where

    def save(self, step: int, state: dict):
        """Start saving the state after `step` updates, and return once it is off the devices.

        The first of a new run is waited for, so that a storage that cannot hold it shows before
        the first update.  Raises UserError STORAGE, or DIVERGED where the state is not finite.
        """
        if step == self.newest:
            return
        table = leaf_table(state)
        got, finite = digests(list(table.values()))
        if not finite:
            what = f"the state after update {step} holds a NaN or infinity; it was not saved"
            fix = f"resume from {self.newest} with a lower --optim.lr"
            raise UserError(config.DIVERGED, what, fix)
        rows = zip(table.items(), np.asarray(got).tolist(), strict=True)
        leaves = {name: [list(x.shape), str(x.dtype), d] for (name, x), d in rows}
        meta = dict(format=self.FORMAT, step=step, must=self.must, leaves=leaves)
        items = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
        items["meta"] = ocp.args.JsonSave(meta | dict(checksum=meta_checksum(meta)))
        with self.storage_errors(step):
            started = self.manager.save(step, args=ocp.args.Composite(**items), force=True)
            assert started, f"orbax declined to save {step}; it has {self.manager.all_steps()}"
            if self.newest is None:
                self.manager.wait_until_finished()
        self.newest = step

    @contextmanager
    def storage_errors(self, step: int):
        try:
            yield
        except (OSError, ValueError, RuntimeError) as e:
            what = f"checkpoint {step} could not be written to {self.path}: {str(e)[:300]}"
            fix = "make room or mend the storage, and run the same command again to resume"
            raise UserError(config.STORAGE, what, fix) from e

    def close(self):
        """Return once everything saved is committed."""
        with self.storage_errors(self.newest):
            self.manager.wait_until_finished()
        self.manager.close()
