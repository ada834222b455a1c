"""The lock of a run directory: one live run at a time.

jax is not imported here, so that a second run is refused before its imports, which take seconds.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid

import fsspec
from etils import epath

from config import Config
from errors import AGAIN, BUSY, STORAGE, UserError, describe, is_interactive, write_error
from files import is_remote, run_path


def busy_error(path: epath.Path, owner: str) -> UserError:
    owner = owner[:200] or "it has just started"
    what = f"run directory {path.parent} belongs to another live run: {owner}"
    fix = "wait for that run or stop it, or choose another --run.name"
    return UserError(BUSY, what, fix)


def new_owner() -> str:
    """The text of a lock that this process takes now."""
    return json.dumps(dict(host=socket.gethostname(), pid=os.getpid(), id=uuid.uuid4().hex))


class FileLock:
    """An flock on a local file, which the kernel drops when the process ends.  The file names the
    owner.  Raises UserError BUSY, and STORAGE on a disk without locks."""

    def __init__(self, path: epath.Path):
        self.path, self.released = path, threading.Event()
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.stat = os.fstat(self.file)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self.file, 0)
            os.write(self.file, new_owner().encode())
        except OSError as e:  # such as a full disk; left open, it would refuse this process later
            os.close(self.file)
            if isinstance(e, BlockingIOError):
                raise busy_error(path, path.read_text()) from None
            if e.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                what = f"the disk of {path} has no locks: {e.strerror}"
                fix = "choose a --run.dir on another, or mount Lustre with flock or localflock"
                raise UserError(STORAGE, what, fix) from None
            raise

    def watch(self):
        """End the process with BUSY when its run directory was moved or removed: it would go on in
        a new folder of that name, without the rows and checkpoints so far.  Not with STORAGE, after
        which a restart would go on there."""
        threading.Thread(target=self.watch_until_released, daemon=True).start()

    def watch_until_released(self):
        seconds = 0  # how long the file has been missing or replaced
        while seconds < 5:  # a network disk may show an old state for a moment
            if self.released.wait(1):
                return
            try:
                is_ours = os.path.samestat(os.stat(self.path), self.stat)
            except FileNotFoundError:
                is_ours = False
            except OSError:  # the storage does not answer, which the run itself waits for
                is_ours = True
            seconds = 0 if is_ours else seconds + 1
        what = f"{self.path} is gone: the run directory was moved or removed under this run"
        fix = f"move it back, in place of what is in {self.path.parent} now, and {AGAIN}"
        write_error(f"{UserError(BUSY, what, fix)}\n")
        os._exit(BUSY)

    def release(self):
        self.released.set()
        if self.file is not None:
            os.close(self.file)
            self.file = None


class BucketFile:
    """An object of a bucket, which is written only if its generation, the number that GCS gives
    each version, is the expected one; 0 where there is no object."""

    def __init__(self, path: epath.Path):
        self.fs, name = fsspec.url_to_fs(os.fspath(path))
        self.bucket, _, self.name = name.partition("/")

    def read(self) -> tuple[str, str]:
        """(generation, text), ("0", "") where there is none."""
        try:
            headers, data = self.fs.call("GET", "b/{}/o/{}", self.bucket, self.name, alt="media")
        except FileNotFoundError:
            return "0", ""
        return headers["x-goog-generation"], data.decode(errors="replace")

    def write(self, text: str, generation: str) -> str | None:
        """The new generation; None where the object is no longer of `generation`."""
        url = self.fs.base.replace("/storage/", "/upload/storage/", 1) + "b/{}/o"
        query = dict(uploadType="media", name=self.name, ifGenerationMatch=generation)
        try:
            about = self.fs.call("POST", url, self.bucket, data=text, json_out=True, **query)
            return about["generation"]
        except FileExistsError:  # what gcsfs makes of 412, Precondition Failed
            return None

    def remove(self, generation: str):
        self.fs.call("DELETE", "b/{}/o/{}", self.bucket, self.name, ifGenerationMatch=generation)


class Lease:
    """The lock of a run in a bucket: an object that its owner writes again every `renew_every`
    seconds.  Another run takes it over when its generation has not changed for three times as long.
    Raises UserError BUSY."""

    def __init__(self, path: epath.Path):
        self.path, self.file, self.released = path, BucketFile(path), threading.Event()
        self.renew_every = float(os.environ.get("TRIFOLD_LEASE_BEAT", 15))  # shorter in tests
        self.owner = new_owner()
        self.generation = self.write(self.wait_until_free())
        self.thread = threading.Thread(target=self.renew_until_released, daemon=True)
        self.thread.start()

    def wait_until_free(self) -> str:
        """The generation of an expired lease, "0" where there is none, or where it is released
        meanwhile."""
        patience, (first, owner) = 3 * self.renew_every, self.file.read()
        found, deadline = first, time.monotonic() + patience
        if found != "0":
            what = f"waiting {patience:.0f} s for the lease of an earlier run to expire: {owner}"
            print(what, flush=True)
        while found != "0" and time.monotonic() < deadline:
            time.sleep(self.renew_every / 5)
            found = self.file.read()[0]
            if found not in ("0", first):
                raise busy_error(self.path, owner)
        return found

    def write(self, generation: str) -> str:
        """The new generation.  Raises UserError BUSY if another run has written the lease."""
        for _ in range(5):
            if written := self.file.write(self.owner, generation):
                return written
            # If the answer to a write was lost, the lease is still ours, of a newer generation.
            generation, there = self.file.read()
            if there != self.owner:
                raise busy_error(self.path, there or "the lease is gone")
        raise OSError("the answers to 5 writes of the run's lease were lost")

    def renew_until_released(self):
        """The lease's thread; ends the whole process when another run has taken the lease."""
        while not self.released.wait(self.renew_every):
            try:
                self.generation = self.write(self.generation)
            except UserError as e:
                write_error(f"{e}\n")
                os._exit(BUSY)
            except Exception as e:  # the next turn tries again, and sees whether it is still ours
                write_error(f"warning: {self.path} was not renewed ({describe(e)})\n")

    def release(self):
        self.released.set()
        self.thread.join()  # otherwise it might write the lease again after the removal
        try:
            self.file.remove(self.generation)
        except Exception as e:  # must not hide why the run ends; the lease expires by itself
            write_error(f"warning: {self.path} was not removed ({describe(e)})\n")


def take_lock(run: epath.Path) -> FileLock | Lease:
    """The lock of a run directory.  Raises UserError BUSY, and OSError."""
    return Lease(run / "lock") if is_remote(run) else FileLock(run / "lock")


# Set by launchers that start several processes of one run on a host.
RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def take_early(cfg: Config) -> FileLock | None:
    """The lock of a local run that exists, taken before jax is imported; None where only
    rundir.open_run can decide.

    Only process 0 takes the lock, and on a cluster JAX has to start before a process knows whether
    it is process 0.  So a lock that another host holds may be that of this run's process 0.  Raises
    UserError BUSY if this host holds it, or with run.coordinator, which tells the id, if any does.
    """
    run = run_path(cfg)
    is_rank = cfg.run.process_id > 0 or any(name in os.environ for name in RANKS)
    # Without a config.json, the folder may not be a run's.
    if is_rank or cfg.eval_only or is_remote(run) or not (run / "config.json").exists():
        return None
    if is_interactive():  # it goes on after an error before open_run, and would keep the lock
        return None
    try:
        return FileLock(run / "lock")
    except OSError:  # open_run says why
        return None
    except UserError as e:
        if cfg.run.coordinator or f'"host": "{socket.gethostname()}"' in str(e):
            raise
        return None
