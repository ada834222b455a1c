"""Checkpoints as they are read: found, verified and compared with the run; checkpoint.py saves."""

import errno
import json
import os
import re
import stat
import zlib
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import utils
from digests import digest_leaves
from errors import CHECKPOINT, STORAGE, UserError, describe, first_ten, is_storage_error, or_list
from files import exists, is_remote, paths_in, saved_steps


class Damaged(ValueError):
    """A checkpoint that differs from what was saved, or cannot be read."""


def meta_checksum(meta: dict) -> int:
    """CRC-32 of a checkpoint's meta without its checksum."""
    rest = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


# An error with one of these in its text means that the storage cannot be reached, not that the
# checkpoint is damaged.
UNREACHABLE = "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED|PERMISSION_DENIED"
UNREACHABLE += "|[Pp]ermission denied|Stale file handle|timed out|endpoint is not connected"


def find_fault(folder: Path) -> str:
    """What is wrong with a checkpoint's folder on this machine: a link, pipe or device; "" if
    nothing is.

    Orbax would follow a link out of the run directory, and wait for a pipe for ever.  Raises
    PermissionError for a file that may not be read, because its checkpoint is not damaged.
    """
    try:
        for path in [folder, *folder.rglob("*")]:
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "a pipe or device"
                return f"{'it' if path == folder else path.relative_to(folder)} is {kind}"
            needed = os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)
            if not os.access(path, needed, effective_ids=os.access in os.supports_effective_ids):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except FileNotFoundError:
        return "it was removed while this process looked at it"
    return ""


def digests_of(tree) -> tuple[dict[str, list[int]], bool]:
    """({"params/embed_VD": its digest} of each array, whether all of their numbers are finite)."""
    table = utils.leaf_table(tree)
    values, finite = digest_leaves(list(table.values()))
    return dict(zip(table, np.asarray(values).tolist(), strict=True)), bool(finite)


OPTIONAL = {
    "rest/opt/": "another optimizer's state (optim.name)",
    "ema/": "an average of the weights (optim.ema)",
    "recent_norms/": "the last gradient norms (train.spike_sigma)",
}
"""Arrays that some settings add; an error counts them instead of naming each."""


def differing_arrays(there: dict, here: dict) -> tuple[dict[str, tuple], dict[str, int]]:
    """({name: (array there, array here)} of what differs, {why: n} of OPTIONAL arrays that only one
    side has).  there: `leaves` of a meta; here: a leaf_table."""
    saved = {n: f"{dtype}{shape}" for n, (shape, dtype, _) in there.items()}
    wanted = {n: f"{x.dtype}{list(x.shape)}" for n, x in here.items()}
    pairs = {n: (saved.get(n, "nothing"), wanted.get(n, "nothing")) for n in wanted | saved}
    differ, optional = {n: (a, b) for n, (a, b) in pairs.items() if a != b}, {}
    # Where weights differ too, the reason is another model, and not one of these settings.
    if not any(n.startswith("params/") for n in differ):
        for prefix, why in OPTIONAL.items():
            found = [n for n, x in differ.items() if n.startswith(prefix) and "nothing" in x]
            optional |= {why: len(found)} if found else {}
            differ = {n: x for n, x in differ.items() if n not in found}
    return differ, optional


class SavedCheckpoints:
    """The checkpoints of a run, verified when they are restored.

    The folder checkpoints/N is the state after N updates.  It holds the state's items
    (`runstate.checkpoint_items`) and `meta`, a JSON object:
      format    FORMAT
      step      N
      must      the settings that every run which continues from here must have too
      leaves    {"params/embed_VD": [shape, dtype, digest]} of every array
      checksum  meta_checksum
    """

    FORMAT = 2
    SAVES = False
    """Whether this object writes to the run, as Checkpoints does, or only reads it."""

    def __init__(self, run: epath.Path, settings=None, accept=()):
        """run: the run directory.  settings: {name: value}, compared with a restored checkpoint's
        `must`.  accept: names of settings not to compare.  Raises UserError CHECKPOINT."""
        self.run, self.path = run, run / "checkpoints"
        self.settings, self.accept = settings or {}, accept
        self.newest = None
        """The step of the last checkpoint that this object restored, saved or started to save."""
        self.newest_complete = None
        """The newest step that is known to be complete."""
        self.open_manager()

    def open_manager(self):
        utils.run_on_lead(self.reject_files)
        self.manager = ocp.CheckpointManager(self.path, options=self.options())

    def options(self) -> ocp.CheckpointManagerOptions:
        return ocp.CheckpointManagerOptions(read_only=True)

    def reject_files(self):
        """Reject a pipe or device in place of a checkpoint or of its metadata: orbax reads the
        metadata of all checkpoints when it is opened, and would never end.  If this object saves,
        also a file in place of a checkpoint, which orbax would overwrite."""
        for path in [] if is_remote(self.path) else paths_in(self.path, "*"):
            is_folder = Path(path).is_dir()
            file = path / "_CHECKPOINT_METADATA" if is_folder else path
            if not (is_folder or path.name.isdigit()) or not os.path.lexists(file):
                continue
            if not stat.S_ISREG(os.lstat(file).st_mode):
                self.reject(path.name, f"is damaged: {file.name} is not a regular file")
            elif self.SAVES and not is_folder:
                self.reject(path.name, "is damaged: it is a file")

    def reject_step(self, step: int, why: str):
        """Reject a checkpoint that is damaged.  why: a phrase such as "failed verification"."""
        self.reject(str(step), why)

    def reject(self, name: str, why: str):
        """Raise UserError CHECKPOINT, because what is only read is not changed.  A run's own
        Checkpoints moves the checkpoint to damaged/."""
        path = self.path / name
        if not (path.exists() or os.path.islink(path)):  # a link to nothing does not exist
            why = "was removed while it was read, perhaps by its run"
        fix = "use another one; if it is the newest, its run goes on from the one before"
        raise UserError(CHECKPOINT, f"checkpoint {path} {why}", fix)

    def restore(self, abstract: dict, step: int = -1):
        """Return {item: tree of arrays} of the newest checkpoint that passes verification, or None
        if the run has no rows in metrics.jsonl and no checkpoint.

        abstract: {item: tree} of the items to restore, which need not be all that were saved.  The
        leaves are ShapeDtypeStructs with the shardings that the restored arrays get.
        step: the checkpoint to restore; -1 tries all, newest first, and gives those that fail
        verification to `reject_step`.  Raises UserError CHECKPOINT if none is usable, if a run
        that has trained has none, or if there is no checkpoint `step`; and the UserErrors of
        `load` and `reject_step`.
        """
        bad = []
        # Process 0 decides: others may list the folder as it was before the newest save, and parts
        # of two checkpoints together look damaged.
        while (n := utils.exchange(utils.run_on_lead(self.find_step, step))[0]) is not None:
            try:
                tree = self.load(n, abstract)
                self.newest = self.newest_complete = n
                return tree
            except Damaged as e:
                bad.append(f"{n} ({e})")
                self.reject_step(n, f"failed verification ({e})")
        if bad:
            what = f"no usable checkpoint among {len(bad)} in {self.path}: {', '.join(bad)}"
            fix = "restore one from a copy, or start over with --fresh; they are in damaged/"
            raise UserError(CHECKPOINT, what, fix)
        metrics = self.run / "metrics.jsonl"
        if exists(metrics) and metrics.read_bytes().strip():
            what = f"{self.run} has trained, but {self.path} holds no checkpoint"
            fix = "restore the checkpoints from a copy, or start over with --fresh"
            raise UserError(CHECKPOINT, what, fix)
        return None

    def find_step(self, step: int) -> int | None:
        """Return `step`, or for -1 the step of the newest checkpoint, None if there is none.
        Raises UserError CHECKPOINT if there is no checkpoint `step`, and STORAGE if the newest
        cannot be looked at."""
        if step == -1:
            found = self.manager.latest_step()
            # After a failed request gcsfs may say that a checkpoint's folder is none, and orbax
            # leaves it out.  Not asked of a run that is only read: it may have saved another since.
            is_ours = self.SAVES and is_remote(self.path)
            there = saved_steps(self.run)[-1:] if is_ours else []
            if there and (found is None or found < there[0]):
                what = f"cannot look at {self.path / str(there[0])}, which is the newest checkpoint"
                raise UserError(STORAGE, what, "run the same command again")
            return found
        found = self.manager.all_steps()
        if step not in found:
            near = sorted(sorted(found, key=lambda x: abs(x - step))[:10]) or ["none"]
            what = f"{self.path} has no checkpoint {step}, only {or_list(near)}"
            what += f", and {len(found) - 10:,} further away" if len(found) > 10 else ""
            fix = "give one of those as the step, or none for the newest"
            raise UserError(CHECKPOINT, what, fix)
        return step

    def load(self, step: int, abstract: dict):
        """Return the items of checkpoint `step`, with every array verified.  Raises what read_meta
        raises."""
        meta = self.read_meta(step, abstract)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        tree = dict(self.read(step, **items))
        found, _ = digests_of(tree)
        wrong = [n for n, x in found.items() if x != meta["leaves"][n][2]]
        if wrong:
            raise Damaged(f"{len(wrong)} of {len(found)} arrays are not as saved, {wrong[0]} first")
        return tree

    def read_meta(self, step: int, abstract: dict) -> dict:
        """Return the meta of checkpoint `step`, after comparing it with its checksum, its step and
        this run.  Raises Damaged, UserError CHECKPOINT for another run's, and what `read`
        raises."""
        fault = "" if is_remote(self.path) else find_fault(Path(self.path / str(step)))
        if not utils.all_agree(fault == ""):
            raise Damaged(fault or "another process found a fault")
        meta = self.read(step, meta=ocp.args.JsonRestore())["meta"]
        if not isinstance(meta, dict) or meta.get("checksum") != meta_checksum(meta):
            raise Damaged("its meta does not match its checksum")
        if meta["step"] != step:
            raise Damaged(f"it is checkpoint {meta['step']} under another name")
        self.check_same_run(step, meta, abstract)
        return meta

    def read(self, step: int, **items):
        """Return items of checkpoint `step` without verification; items: {name: what orbax takes to
        restore it}.  Raises Damaged, or UserError STORAGE if the storage cannot be reached.

        It is read again before it is called damaged: a network disk may fail once, and where one
        request to a bucket fails, gcsfs may tell orbax that an item is not there.
        """
        tree, error = self.try_to_restore(step, items)
        if not utils.all_agree(error is None):
            tree = error = None  # frees what has been read
            tree, error = self.try_to_restore(step, items)
        refused = isinstance(error, PermissionError | ConnectionError | TimeoutError)
        if is_remote(self.path):  # there only a missing object is damage, other errors may pass
            refused = is_storage_error(error) and not isinstance(error, FileNotFoundError)
        cause = getattr(error, "__cause__", None) or error  # orbax's own text may not say why
        if refused or re.search(UNREACHABLE, f"{error} {cause}"):
            what = f"cannot read {self.path / str(step)}: {describe(cause)}"
            fix = "fix the storage or the permissions, and run the same command again"
            raise UserError(STORAGE, what, fix) from error
        if not utils.all_agree(error is None):
            why = f"{type(cause).__name__}: {cause}" if error else "another process failed"
            raise Damaged(re.sub(r"\s+", " ", why)[:160]) from error
        return tree

    def try_to_restore(self, step: int, items: dict) -> tuple:
        """(items, None), or (None, the error) if orbax cannot restore them."""
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**items)), None
        except Exception as e:  # orbax raises many types for damage, a bare Exception among them
            return None, e

    def check_same_run(self, step: int, meta: dict, abstract: dict):
        """Raise UserError CHECKPOINT if format, settings, shapes or dtypes in meta differ from this
        run's."""
        leaves = {n: x for n, x in meta["leaves"].items() if n.split("/")[0] in abstract}
        arrays, optional = differing_arrays(leaves, utils.leaf_table(abstract))
        pairs = self.differing_settings(meta) or arrays  # which a setting of the model may change
        differ = [f"{n}: {a} there, {b} here" for n, (a, b) in pairs.items()]
        differ += [f"{n} arrays are of {why}" for why, n in optional.items()]
        if differ:
            what = f"checkpoint {self.path / str(step)} is of another run: "
            fix = "give the values in its run's config.json, or another --run.name, or --fresh, or "
            fix += "--run.accept with the names of settings that change no weight's shape"
            fix += "; or start another run from it with --run.start_from" if optional else ""
            raise UserError(CHECKPOINT, what + first_ten(differ, "; "), fix)

    def differing_settings(self, meta: dict) -> dict[str, tuple]:
        """{name: (value there, value here)} of the settings and the format.  A setting that was
        saved as null is not compared: imported weights have no data."""
        compared = [n for n in self.settings if n.removesuffix(" fingerprint") not in self.accept]
        pairs = {n: (meta["must"].get(n, "nothing"), self.settings[n]) for n in compared}
        pairs["format"] = meta["format"], self.FORMAT
        return {n: (a, b) for n, (a, b) in pairs.items() if a not in (None, b)}
