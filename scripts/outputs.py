"""Checks, before the work begins, that its result can be written."""

import uuid

from errors import STORAGE, UserError
from files import absolute_path, is_remote


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
