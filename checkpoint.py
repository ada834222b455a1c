"""Checkpoints as they are saved: in the background, with their arrays' digests, and again after a
failure.  verify.py restores them.  What a state holds, and which settings must not change between
starts, is decided in runstate.py."""

import os
import re
import time
from contextlib import suppress

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

import errors
import utils
from errors import AGAIN, UserError, describe, write_error
from files import free_name, is_remote, move_folder, paths_in
from processes import LOST_IN_COLLECTIVE, SAVE_FAILED, PeerFailed, SaveBarrier
from verify import UNREACHABLE, Damaged, SavedCheckpoints, digests_of, meta_checksum

# This handler leaves out orbax's notes on the shapes of shards: nothing here reads them, and to
# write them each process waits up to 600 s for a folder that process 0 makes.  Devices that hold
# the same shard each write a part of it, but only if a part has a megabyte or more: each part is
# cut out by an operation, and with small parts the demo's first save took 1.4 s instead of 0.7.
HANDLER = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
ocp.type_handlers.register_type_handler(jax.Array, HANDLER, override=True)


class Checkpoints(SavedCheckpoints):
    """The checkpoints of a run that trains, saved in the background.  Damaged ones are moved to
    damaged/ when they are to be restored."""

    SAVES = True
    SLOWEST = 3600
    """The longest that a save may take, in seconds; then the run ends with STORAGE."""

    def __init__(self, run: epath.Path, keep=2, settings=None, accept=(), patience=0, keep_every=0):
        """keep, keep_every: as in config.Checkpoint.  settings: also saved as `must`.  patience:
        seconds for which saving may fail.  For the others see SavedCheckpoints.

        Raises UserError USAGE for a path that orbax cannot write to."""
        self.keep, self.keep_every, self.patience = keep, keep_every, patience
        self.error = None
        """The UserError of the last save, until all processes know of it (`recover`)."""
        self.is_final = False
        """Whether the run ends with it."""
        self.failing_since, self.retry_at = None, 0.0
        """When saving began to fail, and when it may be tried again, by time.monotonic."""
        self.losses = {}
        """{step: validation loss or None}; it grows while the run trains."""
        self.no_loss = set()
        """Steps of older checkpoints without a known loss: they stay, as they may be the best."""
        self.saved_at = time.monotonic()
        """When the last save was started, or this object made."""
        self.barrier = SaveBarrier() if jax.process_count() > 1 else None
        self.n_arrays = {}
        """{item: how many arrays of it were saved last}."""
        self.warned_of = None
        """The step that was being written when a save was last skipped."""
        # Orbax takes [ ] for a pattern, a backslash for a slash, and % ? # | in a bucket's path for
        # parts of an address: it would write the arrays to another place.  It cannot encode
        # surrogates, which stand for bytes that are not UTF-8.
        unusable = r"\[[^/]+\]|[\\\ud800-\udfff" + ("%?#|]" if is_remote(run) else "]")
        if found := re.search(unusable, os.fspath(run)):
            what = f"no checkpoint can be written to {run}: a folder has {found[0]} in its name"
            raise UserError(errors.USAGE, what, "rename that folder, or choose another")
        super().__init__(run, settings, accept)

    def options(self) -> ocp.CheckpointManagerOptions:
        return ocp.CheckpointManagerOptions(
            preservation_policy=self,
            create=True,
            # Orbax's limit is never reached, because it goes by the system's clock, which may jump;
            # `is_writing` applies SLOWEST.
            async_options=ocp.AsyncOptions(timeout_secs=10**7, barrier_sync_fn=self.barrier),
        )

    def keep_best(self, losses: dict[int, float | None]):
        """Keep the two checkpoints of lowest loss too.  losses: {step: loss}, which grows while the
        run trains.  Checkpoints older than the newest `keep` stay too if they have no loss: the row
        with it may have been lost, and they may be among the best."""
        older = sorted(self.manager.all_steps())[: -self.keep]
        self.losses, self.no_loss = losses, set(older) - losses.keys()

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Which checkpoints stay: the method of an orbax PreservationPolicy.  Orbax's own BestN
        knows only a loss that was known when the checkpoint was saved."""
        steps = [x.step for x in checkpoints]
        known = [step for step in steps if self.losses.get(step) is not None]
        best = sorted(known, key=self.losses.get)[:2]
        kept = {*steps[-self.keep :], *best, *self.no_loss}
        kept |= {step for step in steps if self.keep_every and step % self.keep_every == 0}
        return [step in kept for step in steps]

    def reject_step(self, step: int, why: str):
        """Move it to damaged/ and open orbax's manager anew: if it stayed, orbax would refuse to
        save that step again, or an earlier one."""
        self.manager.close()
        utils.run_on_lead(self.reject, str(step), why)
        self.open_manager()

    def reject(self, name: str, why: str):
        moved_to = free_name(self.run / "damaged" / name)
        move_folder(self.path / name, moved_to)
        utils.warn(f"checkpoint {name} {why}; moved to {moved_to}")

    def is_writing(self) -> bool:
        """Whether the last save is still being written.  Raises UserError STORAGE once that has
        taken SLOWEST seconds."""
        found = self.error is None and self.manager.is_saving_in_progress()
        if found and (waited := time.monotonic() - self.saved_at) > self.SLOWEST:
            what = f"checkpoint {self.newest} is still being written to {self.path}"
            fix = f"look at the storage, then {AGAIN}"
            raise UserError(errors.STORAGE, f"{what} after {waited:.0f} s", fix)
        return found

    def is_due_by_clock(self, every: int, minutes: float) -> bool:
        """Whether the clock asks for a save; not while the last one is being written.  After a
        failed save, once it is time to try again; otherwise `minutes` after the last one began, or
        if minutes and every are 0, at once.  Calls `finish` first.  Raises what `is_writing` and
        `note_failure` raise."""
        if self.is_writing():
            return False
        self.finish()
        if self.error is not None:
            return time.monotonic() >= self.retry_at
        return time.monotonic() >= self.saved_at + 60 * minutes if minutes else every == 0

    def save(self, step: int, state: dict, last: bool = False) -> bool:
        """Start to save the state after `step` updates; return once it is copied off the devices.

        state: {item: tree of arrays}.  Does nothing if this object last saved or restored `step`,
        and only warns if the save before is not complete.
        last: wait for that one, and return when this one is complete.
        Returns whether it was started, and with `last` whether it is complete; if not, try again
        later.  Raises UserError DIVERGED if a number in the state is not finite, and what
        `is_writing`, `write` and `recover` raise.
        """
        if not last and not utils.all_agree(not self.is_writing()):
            if self.warned_of != self.newest:
                why = f"that of {self.newest} is still being written"
                utils.warn(f"no checkpoint after update {step}: {why}")
            self.warned_of = self.newest
            return False
        self.finish()
        if not self.recover():
            return False
        if step != self.newest:
            leaf_digests, finite = digests_of(state)
            if not finite:
                what = f"the state after update {step} holds a NaN or infinity; it was not saved"
                fix = f"resume from checkpoint {self.newest} with a lower --optim.lr"
                raise UserError(errors.DIVERGED, what, fix)
            self.write(step, state, leaf_digests)
        if last:
            self.finish()
        return utils.all_agree(self.error is None)

    def write(self, step: int, state: dict, leaf_digests: dict[str, list[int]]):
        """Start to write checkpoint `step`: the items of `state`, and meta with their digests.

        The first checkpoint of a new run is complete on return, so that too little room is reported
        before the first update.  Raises UserError STORAGE if that fails, or if one of several
        processes cannot even start.
        """
        table = utils.leaf_table(state)
        leaves = {n: [list(x.shape), str(x.dtype), leaf_digests[n]] for n, x in table.items()}
        meta = dict(format=self.FORMAT, step=step, must=self.settings, leaves=leaves)
        meta |= dict(checksum=meta_checksum(meta))
        items = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
        args = ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta))
        self.n_arrays = {item: len(jax.tree.leaves(tree)) for item, tree in state.items()}
        self.newest, self.saved_at = step, time.monotonic()
        if self.barrier is not None:
            self.barrier.begin()
        try:
            started = self.manager.save(step, args=args, force=True)
            assert started, f"orbax declined to save {step}; it has {self.manager.all_steps()}"
        except Exception as e:  # note_failure raises what storage cannot have caused
            # The other processes wait for this one at orbax's collectives, on the main thread, so
            # it cannot go on with training.
            self.note_failure(e, is_final=jax.process_count() > 1)
            self.raise_if_final()
        if self.newest_complete is None:
            self.finish()
            self.recover()

    def finish(self):
        """Wait until the last save is complete.  If it has failed, warn; `recover` is to follow."""
        if self.newest == self.newest_complete or self.error is not None:
            return
        try:
            self.manager.wait_until_finished()
            if missing := self.missing_part():
                raise Damaged(f"not all that was written is there: {missing}")
        except Exception as e:  # note_failure raises what storage cannot have caused
            self.note_failure(e)
        else:
            self.newest_complete = self.newest
            self.remove_parts()  # again: a failed save may have gone on in the background
            self.failing_since = None

    def note_failure(self, error: Exception, is_final: bool = False):
        """Note that saving `newest` has failed, and when to try again, if not is_final.  Raises the
        error if storage cannot be its cause."""
        # Orbax raises many types for storage, and ValueErrors for a lost process too.
        is_usual = isinstance(error, ValueError | RuntimeError) or errors.is_storage_error(error)
        if not is_usual or re.search(LOST_IN_COLLECTIVE, str(error)):
            raise error
        reason = re.sub(r"\s+", " ", str(error).replace(f"{self.path}/", ""))[:400]
        what = f"checkpoint {self.newest} could not be written to {self.path}: {reason}"
        fix = f"make room or fix the storage, and {AGAIN}"
        now = time.monotonic()
        if self.failing_since is None:
            self.failing_since = now
        failing = now - self.failing_since
        left = self.patience - failing
        wait = max(0, min(60, 5 + failing, left))
        self.error, self.retry_at = UserError(errors.STORAGE, what, fix), now + wait
        self.is_final = is_final or left <= 0 or self.newest_complete is None
        if jax.process_count() == 1:  # with several, the others may still write there
            self.remove_parts()
        if utils.is_lead() and not self.is_final:
            utils.warn(f"{what}; the next try is in {wait:.0f} s, the last in {left:.0f} s")
        elif not utils.is_lead() and not isinstance(error, PeerFailed):
            write_error(f"warning: {what}\n")

    def raise_if_final(self):
        if self.error is not None and self.is_final:
            raise self.error

    def recover(self) -> bool:
        """Whether to save now, asked by all processes together after `finish`.

        If the last save failed in any process: False until process 0 says that it is time for the
        next try.  Then what that save left is removed, and orbax's manager opened anew, because the
        old one counts it as saved.  Raises UserError STORAGE in all processes if saves have failed
        for as long as `patience`, or if the run's first save has failed.
        """
        if utils.all_agree(self.error is None):
            return True
        SAVE_FAILED.set()  # in all processes, which have to end alike
        utils.run_on_lead(self.raise_if_final)
        # As process 0 knows it, so that all go on from the same checkpoint.
        is_time = time.monotonic() >= self.retry_at
        is_time, complete = utils.exchange([is_time, self.newest_complete])[0]
        if not is_time:
            return False
        self.newest_complete = complete
        return self.reopen()

    def reopen(self) -> bool:
        """Remove what a failed save left, and open orbax's manager anew.  Returns whether that
        worked; raises as `recover`."""
        try:
            # It raises the failed save's error again, after the threads of that save have ended.
            with suppress(Exception):
                self.manager.close()
            self.remove_parts()
            self.open_manager()
            if self.newest != self.newest_complete and self.newest in self.manager.all_steps():
                # It exists although its save has failed, and counts if it is whole.
                if utils.all_agree(not self.missing_part()):
                    self.newest_complete, self.failing_since = self.newest, None
                else:
                    self.reject_step(self.newest, "is incomplete")
        except Exception as e:  # note_failure raises what storage cannot have caused
            self.note_failure(e, is_final=jax.process_count() > 1)
            self.raise_if_final()
            return False
        self.newest, self.error = self.newest_complete, None
        return True

    def missing_part(self) -> str:
        """What is missing of the newest checkpoint: meta or an array; "" if nothing is.

        On an object store whose listings lag behind, orbax loses what is not listed yet, and
        reports success.  This reads the names of the arrays, in a millisecond where orbax's
        item_metadata takes 40 and leaks 0.2 MB each time.  Processes come here at different times,
        so only process 0 does it.
        """
        if not utils.is_lead():
            return ""
        try:
            (self.path / str(self.newest) / "meta" / "metadata").read_bytes()
            for item, n_arrays in self.n_arrays.items():
                if (found := self.count_arrays(item)) < n_arrays:
                    return f"{item} has {found} of {n_arrays} arrays"
        except Exception as e:  # orbax and its storage raise many types
            if isinstance(e, FileNotFoundError) or "NOT_FOUND" in str(e):
                return describe(e)
            if not (errors.is_storage_error(e) or re.search(UNREACHABLE, str(e))):
                raise
            utils.warn(f"checkpoint {self.newest} could not be looked at ({describe(e)})")
        return ""

    def count_arrays(self, item: str) -> int:
        """The number of arrays in an item of the newest checkpoint, as its database lists them."""
        folder = f"{self.path / str(self.newest) / item}/"
        base = folder if is_remote(self.path) else dict(driver="file", path=folder)
        keys = tensorstore.KvStore.open(dict(driver="ocdbt", base=base)).result().list().result()
        return sum(key.endswith(b"/.zarray") for key in keys)

    def remove_parts(self):
        """Remove what failed saves have left, which may be why the disk is full."""
        if self.failing_since is not None and utils.is_lead() and not is_remote(self.path):
            with suppress(OSError):  # it is tried again after the next save
                for folder in paths_in(self.path, "*.orbax-checkpoint-tmp*"):
                    folder.rmtree()

    def close(self):
        """Return once every checkpoint is complete.  Raises UserError STORAGE if one is not."""
        self.finish()
        if self.error is not None:
            raise self.error
        self.manager.close()
