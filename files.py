"""Files and folders, local or in a bucket: paths, atomic writes, unused names, moves, uploads, .npy
bytes.

This module does not import jax, so that scripts that only prepare files start at once.
"""

import atexit
import errno
import glob
import io
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
from etils import epath

from config import Config
from errors import STORAGE, USAGE, UserError
from parsers import is_wrong_address

# Without this, gcsfs answers from its first listing of a folder, file sizes included, and does not
# see what other processes write there.
fsspec.config.conf.setdefault("gs", {}).setdefault("use_listings_cache", False)
# gcsfs asks Google what kind of bucket it is, and remembers the answer.  For an emulated bucket
# there is none, so gcsfs would ask before each request, which takes longer than the request.
if os.environ.get("STORAGE_EMULATOR_HOST", "") not in ("", "default"):
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
for package in ("gcsfs", "fsspec"):  # they log errors that they also raise
    logging.getLogger(package).setLevel(logging.CRITICAL)


def is_remote(path) -> bool:
    return "://" in os.fspath(path)


def thread_map(f, *lists) -> list:
    """[*map(f, *lists)] with several calls at once, because each may wait for a bucket."""
    with ThreadPoolExecutor(32) as pool:
        return [*pool.map(f, *lists)]


def is_folder(path: epath.Path) -> bool:
    """Whether an existing path is a folder.  Raises the errors of the storage, which epath's is_dir
    takes for the answer no."""
    if not is_remote(path):
        return Path(path).is_dir()
    fs, name = fsspec.url_to_fs(os.fspath(path))
    return fs.info(name)["type"] == "directory"


def exists(path: epath.Path) -> bool:
    """Whether there is such a file or folder.  Raises OSError where that cannot be known, such as
    without permission; epath's exists says no then."""
    return path.exists() if is_remote(path) else Path(path).exists()


def run_path(cfg: Config) -> epath.Path:
    """The run directory."""
    return absolute_path(cfg.run.dir) / cfg.run.name


def saved_steps(run: epath.Path) -> list[int]:
    """The numbers of a run's complete checkpoints, in order."""

    def is_complete(path) -> bool:
        # In a bucket orbax writes this file last; on a disk it renames the folder.
        return (path / "commit_success.txt").exists() if is_remote(path) else is_folder(path)

    folder = run / "checkpoints"
    paths = [*folder.iterdir()] if exists(folder) else []
    numbered = [path for path in paths if re.fullmatch("0|[1-9][0-9]*", path.name)]
    return sorted(int(path.name) for path in numbered if is_complete(path))


def is_writable(path: epath.Path) -> bool:
    """Whether files can be made in a folder.  In a bucket, makes one and removes it to find out."""
    if not is_remote(path):
        return os.access(path, os.W_OK)
    probe = path / f"probe-{uuid.uuid4().hex}"
    try:
        probe.write_text("")
        probe.unlink()
    except OSError:  # gcsfs raises no other type for 403
        return False
    return True


def absolute_path(path: str) -> epath.Path:
    """Raises UserError USAGE for an address that is not of a bucket, gs://, or has credentials."""
    if is_wrong_address(os.fspath(path)):
        fix = "give gs://bucket/path without credentials, or a path on this machine"
        raise UserError(USAGE, f"{path} is not the address of a bucket", fix)
    return epath.Path(path if is_remote(path) else os.path.abspath(path))


def paths_in(folder: epath.Path, pattern: str) -> list[epath.Path]:
    """What a pattern matches in a folder.  For epath's own glob the folder's name is a pattern
    too."""
    return [*epath.Path(glob.escape(os.fspath(folder))).glob(pattern)]


def leaves_folder(path, folder) -> bool:
    """Whether a path, which is on this machine, is a link to something outside of the folder.

    A snapshot in a Hugging Face cache is a folder of links to the model's blobs, which may be links
    to those that all models share.  Both count as inside.
    """
    root = os.path.realpath(folder)
    cache = re.fullmatch(r"(.*)(/models--[^/]+)/snapshots/[^/]+", root)
    roots = [cache[1] + cache[2], f"{cache[1]}/blobs"] if cache else [root]
    return not os.path.realpath(path).startswith(tuple(root + os.sep for root in roots))


def file_size(path) -> int:
    """Bytes of a file.  On a disk epath's stat would fail where the owner's id has no account."""
    return epath.Path(path).stat().length if is_remote(path) else os.stat(path).st_size


def read_limited(path) -> str:
    """The text of a file from an untrusted source.  Raises ValueError, before reading, if it has
    more than 256 MiB, or is a pipe or device, which may have no end."""
    file = epath.Path(path)
    if (size := file_size(path)) > 2**28:
        raise ValueError(f"it has {size} bytes, more than {2**28}")
    # Epath's is_file is True of a pipe.  A folder in a bucket has no bytes.
    is_file = size > 0 if is_remote(path) else Path(path).is_file()
    if not is_file:
        raise ValueError("it is not a file, or is empty")
    return file.read_text(encoding="utf-8")


def write_whole(path: epath.Path, data: bytes | str):
    """Replace a file atomically: a reader finds the old content or the new, even if this process is
    killed.  (After a crash of the machine it may find a part: nothing is synced to disk.)"""
    data = data.encode() if isinstance(data, str) else data
    if is_remote(path):
        path.write_bytes(data)  # an object becomes visible only when it is complete
        return
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def make_private_folder(path: str, name: str) -> Path:
    """A folder that only this user can write to, made if it is missing.  name: the setting that
    gives its path.  Raises UserError USAGE and STORAGE."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        pass  # a file, or a link to nothing: refused below
    except OSError as e:
        what = f"{name}={path} cannot be made: {e.strerror or e}"
        fix = f"set --{name} to a folder that this user can write to"
        raise UserError(STORAGE, what, fix) from None
    facts = os.lstat(folder)
    reasons = {
        "is a link": stat.S_ISLNK(facts.st_mode),
        "is a file": not stat.S_ISDIR(facts.st_mode),
        "belongs to another user": facts.st_uid != os.getuid(),
        "can be written to by others": facts.st_mode & 0o022,
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        fix = f"set --{name} to a folder of your own, of mode 700"
        raise UserError(USAGE, f"{name}={path} {why[0]}", fix)
    return folder


def free_name(path: epath.Path) -> epath.Path:
    """path, or if it exists the first of path.2, path.3, ... that does not."""
    names = (path if n == 1 else path.with_name(f"{path.name}.{n}") for n in range(1, 10_000))
    return next(name for name in names if not exists(name))


MOVING = "moving_to"
"""A run's file in a bucket, while --fresh moves its objects: the name of the folder they go to."""


def move_folder(path: epath.Path, where: epath.Path):
    """Rename a folder, or copy it where the disk cannot rename it.

    An object store has no folders, so each object in it is renamed, except the lease of a live run
    and MOVING.  The deepest objects go first, and last the one that makes the folder a run or a
    checkpoint: while it is there, a move that was interrupted can be repeated.
    """
    if not is_remote(path):
        where.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.rename(where)
        except OSError as e:
            if e.errno != errno.EXDEV:
                raise
            shutil.move(path, where)  # copies: overlayfs renames no folder of a container's image
        return
    fs, old = fsspec.url_to_fs(os.fspath(path))
    new = os.fspath(where).partition("://")[2]
    stay, last = (f"{old}/lock", f"{old}/{MOVING}"), ("config.json", "commit_success.txt")

    def rank(name: str) -> tuple[bool, int]:
        return name.removeprefix(f"{old}/") in last, -name.count("/")

    objects = [name for name in fs.find(old) if name not in stay]
    for n in sorted({rank(name) for name in objects}):
        names = [name for name in objects if rank(name) == n]
        fs.mv(names, [new + name.removeprefix(old) for name in names])


LOCAL_FOLDERS = []
"""The temporary folders that local_folder has made."""


def local_folder(path: epath.Path) -> epath.Path:
    """The folder itself, or for one in a bucket a temporary folder, which `upload_folder` copies
    there and which is removed when this process exits."""
    if not is_remote(path):
        return path
    LOCAL_FOLDERS.append(tempfile.mkdtemp(prefix="trifold-"))
    return epath.Path(LOCAL_FOLDERS[-1])


@atexit.register
def remove_local_folders():
    for folder in LOCAL_FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)


def upload_folder(local: epath.Path, path: epath.Path):
    """If the path is in a bucket, copy there what is in `local`, its local_folder."""
    if is_remote(path):
        fs, remote = fsspec.url_to_fs(os.fspath(path))
        fs.put(f"{local}/", f"{remote}/", recursive=True)


def npy_bytes(array: np.ndarray) -> bytes:
    """The array as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
