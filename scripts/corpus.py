"""Which files prepare_data.py reads: those of a folder, of a pattern, or of a bucket."""

import glob
import os
import re
from pathlib import Path
from typing import NamedTuple

import fsspec

from errors import DATA, UserError
from files import exists, is_remote


class File(NamedTuple):
    name: str
    """Its path below the folder, which does not depend on where the folder is."""
    source: str | bytes
    size: int
    modified: int | str = 0
    """Its modification time in ns, or a bucket's generation number; 0 if neither is known."""


def local_file(name: str, path: Path) -> File:
    about = path.stat()
    return File(name, str(path), about.st_size, about.st_mtime_ns)


def real_path(path: str) -> str:
    return path.rstrip("/") if is_remote(path) else os.path.realpath(path)


def fail(error: OSError):
    """For os.walk, which would leave out a folder that this user may not read."""
    if os.path.basename(error.filename) != "lost+found":  # which fsck keeps in a disk's root
        raise error


def find_files(root: Path, suffix: str, excluded: set[str] = frozenset()) -> list[File]:
    """The files in a folder and in those inside it, sorted by name.

    Leaves out symbolic links, pipes and devices, and folders that are hidden or have an excluded
    name.
    """
    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name[0] != "." and name not in excluded]
        names = [name for name in names if name.endswith(suffix) and name[0] != "."]
        paths = [Path(folder, name) for name in names]
        paths = [path for path in paths if path.is_file() and not path.is_symlink()]
        found += [local_file(path.relative_to(root).as_posix(), path) for path in paths]
    return sorted(found)


def find_local(pattern: str, suffix: str) -> list[File]:
    """The files of a local file, folder or pattern.

    A link that is named itself is followed, and so is one to a file that a pattern matches.
    """
    is_name, found = exists(Path(pattern)), []
    folders = [] if is_name else glob.glob(os.path.dirname(pattern), recursive=True)
    for folder in filter(os.path.isdir, folders):
        next(os.walk(folder, onerror=fail), None)  # glob leaves out what this user may not read
    paths = [pattern] if is_name else sorted(glob.glob(pattern, recursive=True))
    for path in map(Path, paths):
        if path.is_file() and path.name.endswith(suffix):
            found.append(local_file(path.name, path))
        elif path.is_dir() and (is_name or not path.is_symlink()):
            found += find_files(path, suffix)
    return found


def find_remote(pattern: str, suffix: str) -> list[File]:
    """The files of a gs:// file, folder or pattern, as find_files finds local ones."""
    fs, path = fsspec.url_to_fs(pattern)
    if glob.has_magic(pattern) and not fs.exists(path):
        found = fs.glob(path, detail=True)
        for folder in [x for x, about in found.items() if about["type"] == "directory"]:
            found |= fs.find(folder, detail=True)
        # Names are relative to the last folder before the first *.
        path = path[: re.search(r"[*?[]", path).start()].rpartition("/")[0]
    else:
        found = fs.find(path, detail=True)
    files = []
    for full, about in sorted(found.items()):
        name = full.removeprefix(path.rstrip("/")).lstrip("/") or full.rpartition("/")[2]
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if about["type"] == "file" and name.endswith(suffix) and not is_hidden:
            modified = about.get("generation", 0)
            files.append(File(name, fs.unstrip_protocol(full), about["size"], modified))
    return files


def drop_descriptions(files: list[File]) -> list[File]:
    """The files, without those that only describe .arrow files in the same folder, or in folders
    for each split, and without what `datasets` puts beside a data set: its locks, which are empty,
    and the results of map(), shuffle() and the like."""
    # DOTALL, because a name may have a line break.
    is_result = re.compile(r"cache-[0-9a-f]{16}.*\.arrow", re.DOTALL).fullmatch
    # All of them, if they alone are named.
    files = [x for x in files if not is_result(os.path.basename(x.source))] or files
    folders = {os.path.dirname(x.source) for x in files if x.source.endswith(".arrow")}
    lists = {os.path.join(os.path.dirname(folder), "dataset_dict.json") for folder in folders}

    def is_description(x: File) -> bool:
        folder, name = os.path.split(x.source)
        is_beside = name in ("dataset_info.json", "state.json", "LICENSE") and folder in folders
        is_lock = bool(folders) and x.size == 0 and x.source.endswith(".lock")
        return is_beside or x.source in lists or is_lock

    return [x for x in files if not is_description(x)]


def find_input(pattern: str, suffix: str, out: str = "") -> list[File]:
    """The files of one --input: a file, a folder, a pattern, or a data set of hf://.  Those in the
    folder `out`, a real_path, are what an earlier command has written, and are left out.

    Raises UserError DATA if there are none.
    """
    if pattern.startswith("hf://"):
        return [File(pattern, pattern, 1)]
    try:
        found = (find_remote if is_remote(pattern) else find_local)(pattern, suffix)
    except FileNotFoundError:  # there is no such bucket
        found = []
    if out:
        found = [x for x in found if not real_path(x.source).startswith(f"{out}/")]
    if not found:
        exists = os.path.exists(pattern) or is_remote(pattern)
        ending = f" ending in {suffix!r}" if suffix else ""
        what = f"no files{ending} in {pattern}" if exists else f"--input {pattern} does not exist"
        fix = "give a file, a folder with files (not links), or a pattern within quotes"
        raise UserError(DATA, what, fix)
    return drop_descriptions(found)
