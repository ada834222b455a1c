"""Files such as metrics.jsonl: each row once, also across kills, resumes and failing storage."""

import json
import math
import os
import time

from etils import epath

from checks import check_row
from errors import describe, is_storage_error
from files import exists, is_remote, local_folder, write_whole
from utils import is_lead, warn


class RowFile:
    """A .jsonl file that holds each row exactly once, also across kills and resumes.  Process 0
    writes it.

    Rows after `step`, the update the run resumes from, are dropped, because the run makes them
    again.  Object stores cannot append: there a local copy grows, and `upload` sends it.
    """

    def __init__(self, path: epath.Path, step: int, patience: float = 0, track=None):
        """patience: seconds for which writing may fail; the rows wait in memory meanwhile.
        track: see read_lines."""
        lines = read_lines(path, step, track)
        self.path, self.patience = path, patience
        self.local_path = local_folder(path.parent) / path.name
        if is_lead() and (lines or exists(path)):
            write_whole(self.local_path, "".join(lines))
        self.size, self.unwritten = sum(len(line.encode()) for line in lines), b""
        self.failing_since = None

    def add(self, row: dict):
        if not is_lead():
            return
        self.unwritten += f"{json.dumps(row, allow_nan=False)}\n".encode()
        if is_remote(self.path):
            self.append()
        else:
            self.attempt(self.append)

    def append(self):
        if self.failing_since is not None and exists(self.local_path):
            os.truncate(self.local_path, self.size)  # drop what a full disk has written in part
        with self.local_path.open("ab") as f:
            f.write(self.unwritten)
        self.size, self.unwritten = self.size + len(self.unwritten), b""

    def upload(self):
        """Replace a file on an object store by the local copy."""
        if is_remote(self.path) and self.local_path.exists():
            self.attempt(lambda: self.path.write_text(self.local_path.read_text()))

    def attempt(self, f):
        """Call f, which writes.  A failure of storage is only a warning until storage has failed
        for self.patience seconds."""
        try:
            f()
            self.failing_since = None
        except Exception as e:  # gcsfs and others raise many types
            if not is_storage_error(e):
                raise
            if self.failing_since is None:
                self.failing_since = time.monotonic()
                warn(f"{self.path} was not written ({describe(e)})")
            if time.monotonic() - self.failing_since >= self.patience:
                raise

    def close(self):
        """Return once all rows are written.  Raises what `attempt` raises."""
        while self.failing_since is not None:
            time.sleep(1)
            if is_remote(self.path):
                self.upload()
            else:
                self.attempt(self.append)


def read_lines(path: epath.Path, step: float = math.inf, track=None) -> list[str]:
    """The lines of a .jsonl file up to update `step`, without those that a crash left incomplete.
    track: called with each row; it drops the row by a ValueError, TypeError or LookupError."""
    lines = []
    for line in path.read_bytes().splitlines(keepends=True) if exists(path) else []:
        try:
            text = line.decode()
            if text.endswith("\n") and (row := json.loads(text))["step"] <= step:
                check_row(row)
                if track:
                    track(row)
                lines.append(text)
        except (ValueError, TypeError, LookupError, RecursionError):
            warn(f"{path}: dropped a line that is not a row: {line[:60]!r}")
    return lines
