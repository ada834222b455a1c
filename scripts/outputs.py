"""Checks, before the work begins, that its result can be written."""

import os
import uuid
from pathlib import Path

from errors import STORAGE, USAGE, UserError
from files import absolute_path, exists, is_remote


def nearest_folder(path):
    """The path, or the first folder above it that exists."""
    return next(x for x in (path, *path.parents) if is_remote(x) or x.exists())


def check_output(flag: str, path, is_folder: bool = False):
    """Raise UserError STORAGE if the file, or with is_folder the folder, that a flag names cannot
    be written.  An empty path is not checked."""
    if not path:
        return
    target = absolute_path(path)
    target = nearest_folder(target) / uuid.uuid4().hex if is_folder else target
    probe = target.with_name(f"{target.name}.part")  # as files.write_whole names it
    try:
        if target.is_dir():
            raise IsADirectoryError("it is a folder")
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        what = f"--{flag} {path} cannot be written: {e.strerror or e}"
        raise UserError(STORAGE, what, "name another place, or correct its permissions") from None


def check_new(path, flag: str):
    """Raise UserError USAGE if something to keep is there, STORAGE if the folder cannot be made."""
    found = Path.iterdir if flag == "hf" else kept_files
    is_there = exists(path) or os.path.islink(path)  # a link to nothing does not exist
    if is_there and (not path.is_dir() or any(found(path))):
        what = f"{path} exists, and nothing is overwritten"
        raise UserError(USAGE, what, f"choose another --{flag}, or move what is there away")
    check_output(flag, path, is_folder=True)


def kept_files(path):
    """Yield what is in a folder, except the incomplete checkpoint of an import or average that has
    failed: orbax's threads write on for a while after an error, even after the folder was removed.
    The checkpoint of one that is still running looks the same."""
    for entry in path.iterdir():
        is_searched = entry.name == "checkpoints" and entry.is_dir() and not os.path.islink(entry)
        found = entry.iterdir() if is_searched else [entry]
        if not all(x.name.endswith(".orbax-checkpoint-tmp") for x in found):
            yield entry
